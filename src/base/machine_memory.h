/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory this process can have. */
#ifndef IMBREX_BASE_MACHINE_MEMORY_H
#define IMBREX_BASE_MACHINE_MEMORY_H

#include <stddef.h>

/* Bytes that Linux says are available, caches counted as such, or what the cgroups of this process
 * (v1 or v2) allow at most, if that is less. SIZE_MAX: neither is told. `root`: "" for the system's
 * /proc and /sys, else the folder that has others. */
size_t machine_memory_bytes(const char *root);

#endif
