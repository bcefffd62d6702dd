/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are written as a whole. */
#ifndef IMBREX_CLI_REPLACE_FILE_H
#define IMBREX_CLI_REPLACE_FILE_H

#include <stdbool.h>
#include <stddef.h>

/* Writes "<path>.partial", hands it to the disk and renames it, so that a full disk leaves what
 * stands at the path; through a link, beside the file that it points to. Devices and pipes get the
 * bytes as they are. False with errno if that fails. */
bool replace_file(const char *path, const char *bytes, size_t num_bytes);

#endif
