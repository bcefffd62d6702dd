/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a disk has the room that a folder on it is promised. */
#ifndef IMBREX_CLI_DISK_ROOM_H
#define IMBREX_CLI_DISK_ROOM_H

#include <stddef.h>

/* Warns, naming the option, if the folder may take more bytes than it has and its disk has free. It
 * need not be there yet. Says nothing where the system does not tell. */
void disk_room_warn(const char *option, const char *folder, size_t max_bytes);

#endif
