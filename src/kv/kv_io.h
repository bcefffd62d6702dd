/* SPDX-License-Identifier: Apache-2.0 */
/* Work that waits for a disk, done by threads of its own: writes one after the other, in the order
 * in which they were given; reads side by side, several of a thread where the kernel does them on
 * its own (kv_ring.h); packing side by side. Reads that wait and follow each other in one file are
 * one read for the disk. One thread gives work and takes it back; a job and all it points to belong
 * to the workers from kv_io_submit until kv_io_poll gives it back. */
#ifndef IMBREX_KV_KV_IO_H
#define IMBREX_KV_KV_IO_H

#include <stdbool.h>

#include "base/status.h"
#include "kv/kv_files.h"

enum kv_io_kind { KV_IO_READ = 0, KV_IO_WRITE = 1, KV_IO_PACK = 2, KV_IO_KIND_COUNT = 3 };

/* Reads are put together up to so many bytes. */
#define KV_IO_GROUP_BYTES ((size_t)1 << 20)

/* Whole pages of a file. */
struct kv_io_read {
    uint32_t file; /* kv_io_options.open knows which that is */
    int64_t offset;
    void *bytes;
    size_t num_bytes;
};

/* Lies at the beginning of its owner's struct. worker_idx is unique among the workers of the job's
 * kind. */
struct kv_io_job {
    enum kv_io_kind kind;
    /* Of a WRITE or PACK, on a worker: all there is to do. */
    void (*run)(struct kv_io_job *job, int32_t worker_idx);
    /* Of a READ, on a worker, when `read` is done: failure is 0 or -errno. */
    void (*end)(struct kv_io_job *job, int failure, int32_t worker_idx);
    struct kv_io_read read;
    struct kv_io_job *next; /* kv_io's */
};

struct kv_io_options {
    int32_t num_workers[KV_IO_KIND_COUNT]; /* READ: >= 1; WRITE: 1 */
    int32_t num_ring_readers;              /* of the readers, those that there are with rings */
    int32_t ring_depth;                    /* reads at once of a reader with a ring; 0: no ring */
    const struct kv_files *files;          /* outlives kv_io */
    /* On a worker: opens a file to read it. A descriptor or -errno. */
    int (*open)(void *user, uint32_t file);
    void *user;
};

struct kv_io;

enum imbrex_status kv_io_create(const struct kv_io_options *options, struct kv_io **io,
                                struct imbrex_error *err);
/* Does all jobs that were given, and forgets them. NULL does nothing. */
void kv_io_destroy(struct kv_io *io);

/* Why readers have no ring: -errno, as kv_ring_create; 0: they have one. */
int kv_io_ring_failure(const struct kv_io *io);

void kv_io_submit(struct kv_io *io, struct kv_io_job *job);
/* Takes a job back that no worker has begun. False: it has begun. */
bool kv_io_cancel(struct kv_io *io, struct kv_io_job *job);
/* A job that is done, NULL: none is. */
struct kv_io_job *kv_io_poll(struct kv_io *io);
/* Waits until a job is done that has not been taken, at most timeout_ns. */
void kv_io_wait(struct kv_io *io, int64_t timeout_ns);

#endif
