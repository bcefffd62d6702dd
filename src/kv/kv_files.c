/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of cachestat(2), Linux 6.5, which C libraries do not have yet: on all architectures the same. */
#define CACHESTAT_NUMBER 451

/* A FIFO, of which opening would wait for somebody, is opened without waiting and closed again. */
static int system_open(void *user, const char *path, int flags, unsigned mode)
{
    (void)user;
    struct stat status;
    int fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, (mode_t)mode);
    if (fd < 0) {
        return errno == ENXIO ? -ENOTSUP : -errno;
    }
    int failure = fstat(fd, &status) != 0 ? -errno : S_ISREG(status.st_mode) ? 0 : -ENOTSUP;
    if (failure != 0) {
        (void)close(fd);
        return failure;
    }
    return fd;
}

static void system_close(void *user, int fd)
{
    (void)user;
    (void)close(fd);
}

static int64_t system_read(void *user, int fd, void *bytes, size_t num_bytes, int64_t offset)
{
    (void)user;
    ssize_t num_read = pread(fd, bytes, num_bytes, (off_t)offset);
    return num_read >= 0 ? num_read : -errno;
}

static int64_t system_read_parts(void *user, int fd, const struct iovec *parts, int32_t num_parts,
                                 int64_t offset)
{
    (void)user;
    ssize_t num_read = preadv(fd, parts, num_parts, (off_t)offset);
    return num_read >= 0 ? num_read : -errno;
}

static int64_t system_write(void *user, int fd, const void *bytes, size_t num_bytes, int64_t offset)
{
    (void)user;
    ssize_t num_written = pwrite(fd, bytes, num_bytes, (off_t)offset);
    return num_written >= 0 ? num_written : -errno;
}

/* Whether all of it is there, and none of it is being read or written. False before Linux 6.5. */
static bool is_cached(int fd, int64_t offset, size_t num_bytes)
{
    struct {
        uint64_t offset, num_bytes;
    } range = {(uint64_t)offset, num_bytes};
    struct {
        uint64_t num_cached, num_dirty, num_in_write, num_evicted, num_lately_evicted;
    } pages;
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    return syscall(CACHESTAT_NUMBER, fd, &range, &pages, 0) == 0 &&
           pages.num_cached * page_bytes >= num_bytes;
}

static void system_prefer_direct(void *user, int fd, int64_t offset, size_t num_bytes)
{
    (void)user;
    if (!is_cached(fd, offset, num_bytes)) {
        int flags = fcntl(fd, F_GETFL);
        /* What cannot do that says so here, and is read as before. */
        (void)fcntl(fd, F_SETFL, flags | O_DIRECT);
    }
}

static int system_resize(void *user, int fd, int64_t num_bytes)
{
    (void)user;
    if (fallocate(fd, 0, 0, (off_t)num_bytes) == 0) {
        return 0;
    }
    if (errno != EOPNOTSUPP && errno != ENOSYS) {
        return -errno;
    }
    /* Such a file system says only when a block is written that there is no room for it. */
    return ftruncate(fd, (off_t)num_bytes) == 0 ? 0 : -errno;
}

static int64_t system_size(void *user, int fd)
{
    (void)user;
    struct stat status;
    return fstat(fd, &status) == 0 ? (int64_t)status.st_size : -errno;
}

static int system_rename(void *user, const char *from, const char *to)
{
    (void)user;
    return rename(from, to) == 0 ? 0 : -errno;
}

static int system_remove(void *user, const char *path)
{
    (void)user;
    return unlink(path) == 0 ? 0 : -errno;
}

const struct kv_files kv_files_system = {
    .open = system_open,
    .close = system_close,
    .read = system_read,
    .read_parts = system_read_parts,
    .write = system_write,
    .prefer_direct = system_prefer_direct,
    .resize = system_resize,
    .size = system_size,
    .rename = system_rename,
    .remove = system_remove,
};

/* False: the descriptor reads through the page cache as it is. */
static bool leave_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0 && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

int kv_files_read_all(const struct kv_files *files, int fd, void *bytes, size_t num_bytes,
                      int64_t offset)
{
    unsigned char *next = bytes;
    while (num_bytes > 0) {
        int64_t num_read = files->read(files->user, fd, next, num_bytes, offset);
        if (num_read == -EINTR) {
            continue;
        }
        /* A disk with larger sectors than pages, or the end of a short read. */
        if (num_read == -EINVAL && leave_direct(fd)) {
            continue;
        }
        if (num_read <= 0) {
            return num_read < 0 ? (int)num_read : -ENODATA;
        }
        next += num_read;
        offset += num_read;
        num_bytes -= (size_t)num_read;
    }
    return 0;
}

int kv_files_write_all(const struct kv_files *files, int fd, const void *bytes, size_t num_bytes,
                       int64_t offset)
{
    const unsigned char *next = bytes;
    while (num_bytes > 0) {
        int64_t num_written = files->write(files->user, fd, next, num_bytes, offset);
        if (num_written == -EINTR) {
            continue;
        }
        if (num_written <= 0) {
            return num_written < 0 ? (int)num_written : -EIO;
        }
        next += num_written;
        offset += num_written;
        num_bytes -= (size_t)num_written;
    }
    return 0;
}
