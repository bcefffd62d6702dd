/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/faulty_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_dead(struct faulty_files *faulty)
{
    return faulty->num_bytes_left == 0;
}

static bool is_due(atomic_int_fast64_t *num_calls, int64_t every)
{
    return (++*num_calls % (every > 0 ? every : 1)) == 0 && every > 0;
}

static int faulty_open(void *user, const char *path, int flags, unsigned mode)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_opens, faulty->open_every)) {
        return -faulty->failure;
    }
    if (is_dead(faulty) && flags != O_RDONLY) {
        return -EIO;
    }
    return kv_files_system.open(NULL, path, flags, mode);
}

static void faulty_close(void *user, int fd)
{
    (void)user;
    kv_files_system.close(NULL, fd);
}

static void flip(struct faulty_files *faulty, void *bytes, int64_t num_read)
{
    int64_t flip_every = faulty->flip_every;
    if (num_read > 0 && flip_every > 0 && faulty->num_reads % flip_every == 0) {
        int64_t bit = faulty->num_reads * 7919 % (8 * num_read);
        ((unsigned char *)bytes)[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

static int64_t faulty_read(void *user, int fd, void *bytes, size_t num_bytes, int64_t offset)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_reads, faulty->read_every)) {
        return -faulty->failure;
    }
    num_bytes = faulty->is_short ? (num_bytes + 1) / 2 : num_bytes;
    int64_t num_read = kv_files_system.read(NULL, fd, bytes, num_bytes, offset);
    flip(faulty, bytes, num_read);
    return num_read;
}

static int64_t faulty_read_parts(void *user, int fd, const struct iovec *parts, int32_t num_parts,
                                 int64_t offset)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_reads, faulty->read_every)) {
        return -faulty->failure;
    }
    int64_t num_read = kv_files_system.read_parts(NULL, fd, parts, num_parts, offset);
    flip(faulty, parts[0].iov_base,
         num_read < (int64_t)parts[0].iov_len ? num_read : (int64_t)parts[0].iov_len);
    return faulty->is_short ? (num_read + 1) / 2 : num_read;
}

static int64_t taken_bytes(const struct faulty_files *faulty, const struct stat *status)
{
    return faulty->is_late ? (int64_t)status->st_blocks * 512 : (int64_t)status->st_size;
}

/* What the file takes has changed: `before` is what it took. */
static void take_room(struct faulty_files *faulty, int fd, int64_t before)
{
    struct stat status;
    if (faulty->room_bytes >= 0 && fstat(fd, &status) == 0) {
        faulty->room_bytes -= taken_bytes(faulty, &status) - before;
    }
}

static int64_t file_taken_bytes(const struct faulty_files *faulty, int fd)
{
    struct stat status;
    return fstat(fd, &status) == 0 ? taken_bytes(faulty, &status) : 0;
}

static int64_t faulty_write(void *user, int fd, const void *bytes, size_t num_bytes, int64_t offset)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_writes, faulty->write_every)) {
        return -faulty->failure;
    }
    int64_t before = file_taken_bytes(faulty, fd);
    if (faulty->is_late && faulty->room_bytes >= 0 && (int64_t)num_bytes > faulty->room_bytes) {
        return -ENOSPC;
    }
    num_bytes = faulty->is_short ? (num_bytes + 1) / 2 : num_bytes;
    int64_t left = faulty->num_bytes_left;
    if (left >= 0) {
        if (left == 0) {
            return -EIO;
        }
        num_bytes = (int64_t)num_bytes < left ? num_bytes : (size_t)left;
        faulty->num_bytes_left -= (int64_t)num_bytes;
    }
    int64_t num_written = kv_files_system.write(NULL, fd, bytes, num_bytes, offset);
    faulty->num_bytes_written += num_written > 0 ? num_written : 0;
    take_room(faulty, fd, before);
    return num_written;
}

static void faulty_prefer_direct(void *user, int fd, int64_t offset, size_t num_bytes)
{
    (void)user;
    kv_files_system.prefer_direct(NULL, fd, offset, num_bytes);
}

/* What the kernel read is as faulty as what `read` gives. */
static int64_t faulty_settle(void *user, void *bytes, int64_t num_read)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_reads, faulty->read_every)) {
        return -faulty->failure;
    }
    num_read = faulty->is_short ? (num_read + 1) / 2 : num_read;
    flip(faulty, bytes, num_read);
    return num_read;
}

static int faulty_resize(void *user, int fd, int64_t num_bytes)
{
    struct faulty_files *faulty = user;
    if (is_due(&faulty->num_resizes, faulty->resize_every)) {
        return -faulty->failure;
    }
    int64_t before = file_taken_bytes(faulty, fd);
    if (!faulty->is_late && faulty->room_bytes >= 0 && num_bytes - before > faulty->room_bytes) {
        return -ENOSPC;
    }
    /* Thousands of files need no room on the disk. */
    int failure = is_dead(faulty) ? -EIO : ftruncate(fd, num_bytes) == 0 ? 0 : -errno;
    take_room(faulty, fd, before);
    return failure;
}

static int64_t faulty_size(void *user, int fd)
{
    (void)user;
    return kv_files_system.size(NULL, fd);
}

static int faulty_rename(void *user, const char *from, const char *to)
{
    return is_dead(user) ? -EIO : kv_files_system.rename(NULL, from, to);
}

static int faulty_remove(void *user, const char *path)
{
    struct faulty_files *faulty = user;
    struct stat status;
    int64_t num_bytes = stat(path, &status) == 0 ? taken_bytes(faulty, &status) : 0;
    int failure = is_dead(faulty) ? -EIO : kv_files_system.remove(NULL, path);
    if (failure == 0 && faulty->room_bytes >= 0) {
        faulty->room_bytes += num_bytes;
    }
    return failure;
}

void faulty_files_init(struct faulty_files *faulty)
{
    *faulty = (struct faulty_files){
        .files = {.user = faulty,
                  .open = faulty_open,
                  .close = faulty_close,
                  .read = faulty_read,
                  .read_parts = faulty_read_parts,
                  .write = faulty_write,
                  .prefer_direct = faulty_prefer_direct,
                  .settle = faulty_settle,
                  .resize = faulty_resize,
                  .size = faulty_size,
                  .rename = faulty_rename,
                  .remove = faulty_remove},
        .num_bytes_left = -1,
        .room_bytes = -1,
        .failure = EIO,
    };
}
