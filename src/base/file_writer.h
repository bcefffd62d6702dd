/* SPDX-License-Identifier: Apache-2.0 */
/* A file that appears under its name only when it is whole: written as "<path>.partial" beside it,
 * then renamed. */
#ifndef IMBREX_BASE_FILE_WRITER_H
#define IMBREX_BASE_FILE_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct file_writer {
    char *path, *partial_path; /* NULL: not open */
    int fd;                    /* locked until the file has its name */
    bool overwrite;
    uint64_t num_bytes; /* written so far */
};

/* INVALID_ARGUMENT if something stands at the path and `overwrite` is false, if it is no regular
 * file, or while another writer has the partial file; one that a killed writer left is reused. IO
 * if the partial file cannot be created; failures afterwards are OUTPUT. */
enum imbrex_status file_writer_open(const char *path, bool overwrite, struct file_writer *writer,
                                    struct imbrex_error *err);
enum imbrex_status file_writer_write(struct file_writer *writer, const void *bytes,
                                     size_t num_bytes, struct imbrex_error *err);
/* Hands the bytes to the disk and renames; afterwards the writer is closed. On failure nothing has
 * changed at the path; abandon then deletes the partial file. */
enum imbrex_status file_writer_commit(struct file_writer *writer, struct imbrex_error *err);
/* Deletes the partial file. Safe on a zeroed struct and after a commit. */
void file_writer_abandon(struct file_writer *writer);

#endif
