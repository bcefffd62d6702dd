/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a whole file, or none: a full disk, an interruption or a crash leaves what was there.
 * The lock on the partial file says that somebody writes it; one without is of a run that was
 * killed. */
#include "base/file_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

#define SUFFIX ".partial"
#define WRITE_MAX_BYTES ((size_t)1 << 30) /* Linux stops at 2 GiB - 4 KiB anyhow */

static enum imbrex_status fail_to(const struct file_writer *writer, const char *action, int cause,
                                  struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_OUTPUT, "%s: cannot %s: %s", writer->path, action,
                     system_error_text(cause));
}

static enum imbrex_status refuse_target(const char *path, const char *found,
                                        struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                     "%s: expected the name of a new file, found %s", path, found);
}

static enum imbrex_status check_target(const char *path, bool overwrite, struct imbrex_error *err)
{
    struct stat status;
    if (path[0] == '\0') {
        return refuse_target("path", "\"\"", err);
    }
    if (stat(path, &status) != 0) {
        if (lstat(path, &status) == 0) {
            return refuse_target(path, "a symbolic link to nothing", err);
        }
        return IMBREX_STATUS_OK; /* what else may be wrong, open says */
    }
    if (!S_ISREG(status.st_mode)) {
        return refuse_target(path, "a folder or a device", err);
    }
    return overwrite ? IMBREX_STATUS_OK : refuse_target(path, "a file there", err);
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

static enum imbrex_status lock_partial(const struct file_writer *writer, struct imbrex_error *err)
{
    while (flock(writer->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) {
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "%s: expected no other run, found that another run writes it",
                             writer->partial_path);
        }
        if (errno != EINTR) {
            return fail_to(writer, "lock the partial file", errno, err);
        }
    }
    return IMBREX_STATUS_OK;
}

/* Whether the file at partial_path is the one that is open. */
static bool has_partial(const struct file_writer *writer)
{
    struct stat opened, named;
    return fstat(writer->fd, &opened) == 0 && lstat(writer->partial_path, &named) == 0 &&
           opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

static enum imbrex_status create_partial(struct file_writer *writer, struct imbrex_error *err)
{
    static const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    for (;;) {
        writer->fd = open(writer->partial_path, flags, 0666);
        if (writer->fd < 0) {
            return error_set(err, IMBREX_STATUS_IO, "%s: cannot create: %s", writer->path,
                             system_error_text(errno));
        }
        TRY(lock_partial(writer, err));
        if (has_partial(writer)) {
            break;
        }
        /* Between open and lock its writer renamed or deleted it. */
        (void)close(writer->fd);
        writer->fd = -1;
    }
    if (ftruncate(writer->fd, 0) != 0) {
        return fail_to(writer, "empty the partial file", errno, err);
    }
    return IMBREX_STATUS_OK;
}

static void release(struct file_writer *writer)
{
    if (writer->fd >= 0) {
        (void)close(writer->fd); /* and unlocks */
    }
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
    if (!has_partial(writer)) {
        return error_set(err, IMBREX_STATUS_OUTPUT,
                         "%s: expected the file that was written, found another one or none",
                         writer->partial_path);
    }
    if (rename_partial(writer) != 0) {
        return errno == EEXIST ? refuse_target(writer->path, "a file there", err)
                               : fail_to(writer, "rename the partial file", errno, err);
    }
    release(writer);
    return IMBREX_STATUS_OK;
}

void file_writer_abandon(struct file_writer *writer)
{
    if (writer->partial_path == NULL) {
        return;
    }
    if (has_partial(writer)) {
        (void)unlink(writer->partial_path);
    }
    release(writer);
}
