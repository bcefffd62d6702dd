/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_BASE_CLOCK_H
#define IMBREX_BASE_CLOCK_H

#include <stdint.h>

/* Monotonic time in nanoseconds since an arbitrary start. */
int64_t clock_now_ns(void);

#endif
