/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/replace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int fd, const char *bytes, size_t num_bytes)
{
    while (num_bytes > 0) {
        ssize_t count = write(fd, bytes, num_bytes);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return false;
        }
        bytes += count;
        num_bytes -= (size_t)count;
    }
    return true;
}

/* Closes the file too. `mode` is the file's that will be replaced, or 0. errno tells why not. */
static bool write_new_file(int fd, mode_t mode, const char *bytes, size_t num_bytes)
{
    bool is_written =
        write_all(fd, bytes, num_bytes) && (mode == 0 || fchmod(fd, mode) == 0) && fsync(fd) == 0;
    int cause = errno;
    bool is_closed = close(fd) == 0;

    if (!is_written) {
        errno = cause;
    }
    return is_written && is_closed;
}

/* What stands in the file stays until the new bytes are on the disk. errno tells why not. */
static bool replace_regular_file(const char *path, mode_t mode, const char *bytes, size_t num_bytes)
{
    char partial[PATH_MAX + sizeof(".partial")];
    int length = snprintf(partial, sizeof(partial), "%s.partial", path);

    if (length < 0 || (size_t)length >= sizeof(partial)) {
        errno = ENAMETOOLONG;
        return false;
    }
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) {
        return false;
    }
    if (!write_new_file(fd, mode, bytes, num_bytes) || rename(partial, path) != 0) {
        int cause = errno;
        unlink(partial);
        errno = cause;
        return false;
    }
    return true;
}

bool replace_file(const char *path, const char *bytes, size_t num_bytes)
{
    struct stat status;
    char target[PATH_MAX];

    /* A link goes on pointing to the file. */
    if (stat(path, &status) != 0 || realpath(path, target) == NULL) {
        return errno == ENOENT && replace_regular_file(path, 0, bytes, num_bytes);
    }
    if (S_ISREG(status.st_mode)) {
        return replace_regular_file(target, status.st_mode & 07777, bytes, num_bytes);
    }
    /* A device or a pipe has nothing to lose, and must not become a file. */
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    bool is_written = write_all(fd, bytes, num_bytes);
    int cause = errno;
    close(fd);
    errno = cause;
    return is_written;
}
