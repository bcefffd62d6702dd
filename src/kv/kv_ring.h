/* SPDX-License-Identifier: Apache-2.0 */
/* Reads that the kernel does on its own, several at a time: an io_uring. Where there is none (a
 * build without liburing, a kernel before 5.1, a container that forbids it), kv_ring_create says
 * why, and reads are done one by one. One thread uses a ring. */
#ifndef IMBREX_KV_KV_RING_H
#define IMBREX_KV_KV_RING_H

#include <stdbool.h>

#include "kv/kv_files.h"

struct kv_ring;

/* depth: reads at once, in [1, 256]. 0 or -errno, -ENOSYS in a build without. */
int kv_ring_create(int32_t depth, struct kv_ring **ring);
/* No read may be under way. NULL does nothing. */
void kv_ring_destroy(struct kv_ring *ring);

/* Puts a read, into [num_parts] buffers one after the other, behind those that kv_ring_submit has
 * not given to the kernel yet; with them and those under way they are at most `depth`. The parts
 * stay the caller's and as they are until the read is done. */
void kv_ring_add(struct kv_ring *ring, int fd, const struct iovec *parts, int32_t num_parts,
                 int64_t offset, void *user);
/* Gives them to the kernel and waits until min_done reads are done. 0, or -errno: what was added
 * last, num_left reads, is not under way and never will be; nothing more may be added. */
int kv_ring_submit(struct kv_ring *ring, int32_t min_done, int32_t *num_left);
/* The next read that is done: its user, and how many bytes it gave, or -errno. NULL: none yet. */
void *kv_ring_take(struct kv_ring *ring, int64_t *num_read);

#endif
