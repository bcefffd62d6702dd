/* SPDX-License-Identifier: Apache-2.0 */
/* Work that waits for a disk, done by threads of its own: writes one after the other, in the order
 * in which they were given, reads side by side. One thread gives work and takes it back; a job and
 * all it points to belong to the workers from kv_io_submit until kv_io_poll gives it back. */
#ifndef IMBREX_KV_KV_IO_H
#define IMBREX_KV_KV_IO_H

#include <stdbool.h>

#include "base/status.h"

enum kv_io_kind { KV_IO_READ, KV_IO_WRITE };

/* Lies at the beginning of its owner's struct. */
struct kv_io_job {
    void (*run)(struct kv_io_job *job); /* on a worker */
    enum kv_io_kind kind;
    struct kv_io_job *next; /* kv_io's */
};

struct kv_io;

/* num_readers >= 1; one writer beside them. */
enum imbrex_status kv_io_create(int32_t num_readers, struct kv_io **io, struct imbrex_error *err);
/* Does all jobs that were given, and forgets them. NULL does nothing. */
void kv_io_destroy(struct kv_io *io);

void kv_io_submit(struct kv_io *io, struct kv_io_job *job);
/* Takes a job back that no worker has begun. False: it has begun. */
bool kv_io_cancel(struct kv_io *io, struct kv_io_job *job);
/* A job that is done, NULL: none is. */
struct kv_io_job *kv_io_poll(struct kv_io *io);
/* Waits until a job is done that has not been taken, at most timeout_ns. */
void kv_io_wait(struct kv_io *io, int64_t timeout_ns);

#endif
