/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a whole file, or none: a full disk, an interruption or a crash leaves what was there. */
#include "base/file_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

#define SUFFIX ".partial"
#define WRITE_MAX_BYTES ((size_t)1 << 30) /* Linux stops at 2 GiB - 4 KiB anyhow */

static enum imbrex_status fail_to(const struct file_writer *writer, const char *action, int cause,
                                  struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_IO, "%s: cannot %s: %s", writer->path, action,
                     system_error_text(cause));
}

static enum imbrex_status check_target(const char *path, bool overwrite, struct imbrex_error *err)
{
    struct stat status;
    if (stat(path, &status) != 0) {
        return IMBREX_STATUS_OK; /* what else may be wrong, open says */
    }
    if (!S_ISREG(status.st_mode)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected the name of a new file, found a folder or a device", path);
    }
    if (!overwrite) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected the name of a new file, found a file there", path);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status copy_paths(const char *path, struct file_writer *writer,
                                     struct imbrex_error *err)
{
    size_t path_bytes = strlen(path) + 1, partial_bytes = path_bytes + strlen(SUFFIX);
    writer->path = malloc(path_bytes);
    writer->partial_path = malloc(partial_bytes);
    if (writer->path == NULL || writer->partial_path == NULL) {
        return error_out_of_memory(err, path, path_bytes + partial_bytes);
    }
    memcpy(writer->path, path, path_bytes);
    snprintf(writer->partial_path, partial_bytes, "%s" SUFFIX, path);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_partial(struct file_writer *writer, struct imbrex_error *err)
{
    if (writer->overwrite) {
        (void)unlink(writer->partial_path); /* of a run that was killed; open says what remains */
    }
    writer->fd = open(writer->partial_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->fd >= 0) {
        return IMBREX_STATUS_OK;
    }
    if (errno == EEXIST) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected no such file, found one that another run writes or left",
                         writer->partial_path);
    }
    return fail_to(writer, "create", errno, err);
}

static void release(struct file_writer *writer)
{
    free(writer->path);
    free(writer->partial_path);
    *writer = (struct file_writer){0};
}

enum imbrex_status file_writer_open(const char *path, bool overwrite, struct file_writer *writer,
                                    struct imbrex_error *err)
{
    struct file_writer opened = {.fd = -1, .overwrite = overwrite};
    enum imbrex_status status;
    TRY(check_target(path, overwrite, err));
    TRY_OR_FAIL(copy_paths(path, &opened, err));
    TRY_OR_FAIL(create_partial(&opened, err));
    *writer = opened;
    return IMBREX_STATUS_OK;
fail:
    release(&opened);
    return status;
}

enum imbrex_status file_writer_write(struct file_writer *writer, const void *bytes,
                                     size_t num_bytes, struct imbrex_error *err)
{
    const unsigned char *next = bytes;
    while (num_bytes > 0) {
        ssize_t written =
            write(writer->fd, next, num_bytes < WRITE_MAX_BYTES ? num_bytes : WRITE_MAX_BYTES);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return fail_to(writer, "write", written < 0 ? errno : ENOSPC, err);
        }
        next += written;
        num_bytes -= (size_t)written;
        writer->num_bytes += (uint64_t)written;
    }
    return IMBREX_STATUS_OK;
}

/* Without `overwrite` not even a file that appeared meanwhile is replaced, where the file system
 * can promise that. */
static int rename_partial(const struct file_writer *writer)
{
    if (!writer->overwrite) {
        if (renameat2(AT_FDCWD, writer->partial_path, AT_FDCWD, writer->path, RENAME_NOREPLACE) ==
            0) {
            return 0;
        }
        if (errno != EINVAL && errno != ENOSYS) {
            return -1;
        }
    }
    return rename(writer->partial_path, writer->path);
}

enum imbrex_status file_writer_commit(struct file_writer *writer, struct imbrex_error *err)
{
    if (fsync(writer->fd) != 0 && errno != EINVAL && errno != EROFS) {
        return fail_to(writer, "write", errno, err);
    }
    int fd = writer->fd;
    writer->fd = -1;
    if (close(fd) != 0 && errno != EINTR) {
        return fail_to(writer, "write", errno, err);
    }
    if (rename_partial(writer) != 0) {
        return fail_to(writer, "rename the partial file", errno, err);
    }
    release(writer);
    return IMBREX_STATUS_OK;
}

void file_writer_abandon(struct file_writer *writer)
{
    if (writer->partial_path == NULL) {
        return;
    }
    if (writer->fd >= 0) {
        (void)close(writer->fd);
    }
    (void)unlink(writer->partial_path);
    release(writer);
}
