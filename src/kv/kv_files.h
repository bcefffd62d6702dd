/* SPDX-License-Identifier: Apache-2.0 */
/* What the disk tier asks of the file system, as a table, so that tests can put one in its place
 * that fails, tells lies or dies. Any thread; results are counts, descriptors, 0, or -errno. */
#ifndef IMBREX_KV_KV_FILES_H
#define IMBREX_KV_KV_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct kv_files {
    void *user;
    /* flags and mode as open(2); close-on-exec is added. -ELOOP for a symbolic link, -ENOTSUP for
     * what else is no regular file. */
    int (*open)(void *user, const char *path, int flags, unsigned mode);
    void (*close)(void *user, int fd);
    /* At most num_bytes; fewer are no failure. */
    int64_t (*read)(void *user, int fd, void *bytes, size_t num_bytes, int64_t offset);
    int64_t (*write)(void *user, int fd, const void *bytes, size_t num_bytes, int64_t offset);
    /* The same into several buffers, one after the other. */
    int64_t (*read_parts)(void *user, int fd, const struct iovec *parts, int32_t num_parts,
                          int64_t offset);
    /* What is read next, whole pages into whole pages, lies there. If the page cache has it, it
     * comes from there; if not, reads go past the page cache from now on, where the file system can
     * do that: no page is filled and copied, and what others have there stays. */
    void (*prefer_direct)(void *user, int fd, int64_t offset, size_t num_bytes);
    /* Sees what a read gave that the kernel did without `read` (kv_ring.h), and may change it: once
     * for each buffer. NULL: nobody does. */
    int64_t (*settle)(void *user, void *bytes, int64_t num_read);
    /* The file has num_bytes from now on, with room for them on the disk where that can be had.
     * -EINTR: a signal came between; it can be asked for again. */
    int (*resize)(void *user, int fd, int64_t num_bytes);
    int64_t (*size)(void *user, int fd);
    int (*rename)(void *user, const char *from, const char *to);
    int (*remove)(void *user, const char *path);
};

/* The operating system's. */
extern const struct kv_files kv_files_system;

/* Reads or writes num_bytes, in as many calls as it takes. 0 or -errno; -ENODATA: the file ends
 * before them. */
int kv_files_read_all(const struct kv_files *files, int fd, void *bytes, size_t num_bytes,
                      int64_t offset);
int kv_files_write_all(const struct kv_files *files, int fd, const void *bytes, size_t num_bytes,
                       int64_t offset);

#endif
