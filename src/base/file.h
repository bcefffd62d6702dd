/* SPDX-License-Identifier: Apache-2.0 */
/* Whole files as bytes: mapped (weights) or read into memory (JSON). Paths that begin with
 * "builtin:" are files embedded in the binary (asset.h), so that everything above reads both in the
 * same way. */
#ifndef IMBREX_BASE_FILE_H
#define IMBREX_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum file_storage {
    FILE_STORAGE_EMBEDDED, /* in the binary */
    FILE_STORAGE_MAPPED,
    FILE_STORAGE_HEAP,
};

/* The bytes of one file, [num_bytes] at `bytes`, until file_close. `path` is a copy, for messages.
 */
struct file {
    const unsigned char *bytes;
    size_t num_bytes;
    enum file_storage storage;
    char *path;
};

/* Maps a regular file for reading. NOT_FOUND if it does not exist, IO for what else the system
 * says, FORMAT if it is no regular file (the message says what it is) or empty. A FIFO or device is
 * never opened for reading. */
enum imbrex_status file_map(const char *path, struct file *file, struct imbrex_error *err);

/* Reads a regular file of at most max_bytes into memory; more is FORMAT. Otherwise as file_map. */
enum imbrex_status file_read(const char *path, size_t max_bytes, struct file *file,
                             struct imbrex_error *err);

/* Safe on a zeroed struct and after close. */
void file_close(struct file *file);

/* True if something exists at the path (embedded ones included), whatever its type. */
bool file_exists(const char *path);
/* True if both paths lead to one file of the file system. */
bool file_is_same(const char *path, const char *other_path);
/* True if the path is a folder (an embedded model counts as one). */
bool file_is_folder(const char *path);

/* "folder/name", allocated with malloc. */
enum imbrex_status file_join(const char *folder, const char *name, char **path,
                             struct imbrex_error *err);

#endif
