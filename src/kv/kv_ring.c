/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_ring.h"

#include <assert.h>
#include <errno.h>

#if IMBREX_HAS_URING

#include <stdlib.h>

#include <liburing.h>

struct kv_ring {
    struct io_uring uring;
};

int kv_ring_create(int32_t depth, struct kv_ring **ring)
{
    struct kv_ring *created = malloc(sizeof(*created));
    assert(depth >= 1 && depth <= 256);
    if (created == NULL) {
        return -ENOMEM;
    }
    int failure = io_uring_queue_init((unsigned)depth, &created->uring, 0);
    if (failure != 0) {
        free(created);
        return failure;
    }
    *ring = created;
    return 0;
}

void kv_ring_destroy(struct kv_ring *ring)
{
    if (ring != NULL) {
        io_uring_queue_exit(&ring->uring);
        free(ring);
    }
}

void kv_ring_add(struct kv_ring *ring, int fd, const struct iovec *parts, int32_t num_parts,
                 int64_t offset, void *user)
{
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring->uring);
    assert(entry != NULL);
    io_uring_prep_readv(entry, fd, parts, (unsigned)num_parts, (uint64_t)offset);
    io_uring_sqe_set_data(entry, user);
}

int kv_ring_submit(struct kv_ring *ring, int32_t min_done, int32_t *num_left)
{
    int result;
    do {
        result = io_uring_submit_and_wait(&ring->uring, (unsigned)min_done);
    } while (result == -EINTR || (result >= 0 && io_uring_sq_ready(&ring->uring) > 0));
    *num_left = (int32_t)io_uring_sq_ready(&ring->uring);
    return result < 0 ? result : 0;
}

void *kv_ring_take(struct kv_ring *ring, int64_t *num_read)
{
    struct io_uring_cqe *done = NULL;
    if (io_uring_peek_cqe(&ring->uring, &done) != 0) {
        return NULL;
    }
    void *user = io_uring_cqe_get_data(done);
    *num_read = done->res;
    io_uring_cqe_seen(&ring->uring, done);
    return user;
}

#else

int kv_ring_create(int32_t depth, struct kv_ring **ring)
{
    (void)depth, (void)ring;
    return -ENOSYS;
}

void kv_ring_destroy(struct kv_ring *ring)
{
    (void)ring;
}

void kv_ring_add(struct kv_ring *ring, int fd, const struct iovec *parts, int32_t num_parts,
                 int64_t offset, void *user)
{
    (void)ring, (void)fd, (void)parts, (void)num_parts, (void)offset, (void)user;
    assert(!"there is no ring");
}

int kv_ring_submit(struct kv_ring *ring, int32_t min_done, int32_t *num_left)
{
    (void)ring, (void)min_done;
    *num_left = 0;
    return -ENOSYS;
}

void *kv_ring_take(struct kv_ring *ring, int64_t *num_read)
{
    (void)ring, (void)num_read;
    return NULL;
}

#endif
