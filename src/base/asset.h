/* SPDX-License-Identifier: Apache-2.0 */
/* Files embedded in the binary. A path is "builtin:<model>/<file>"; the folder is
 * "builtin:<model>". */
#ifndef IMBREX_BASE_ASSET_H
#define IMBREX_BASE_ASSET_H

#include <stdbool.h>
#include <stddef.h>

#define ASSET_PREFIX "builtin:"
#define ASSET_DEFAULT_MODEL "builtin:stories260K"

/* True if the path names an embedded file or folder by its prefix, whether it exists or not. */
bool asset_is_path(const char *path);
/* True if the path is an embedded folder. */
bool asset_is_folder(const char *path);
/* The bytes of an embedded file, 16-byte aligned, or NULL if there is none at the path. */
const unsigned char *asset_find(const char *path, size_t *num_bytes);

#endif
