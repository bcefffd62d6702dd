/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/pinned_region.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/thread_pool.h"

#define DEFAULT_CHUNK_BYTES ((size_t)256 << 20)
/* What a thread takes at a time: some huge pages, and little beside a chunk. */
#define PIECE_BYTES ((size_t)8 << 20)
/* 16 threads fill memory faster than one thread registers it. */
#define MAX_TOUCHERS 15
#define MAX_NODES 1024
#define PAGE_BYTES 4096
#define WORD_BITS (8 * sizeof(unsigned long))

/* From linux/mempolicy.h, which not every system has installed. */
#define MEMPOLICY_PREFERRED 1

struct toucher {
    const struct pinned_region *region;
    size_t pieces_per_chunk, num_pieces; /* the last chunk's too, though some may be empty */
    pthread_mutex_t lock;                /* of all below */
    pthread_cond_t has_touched;
    size_t next_piece;
    size_t *num_touched; /* [num_chunks] pieces */
    int failure;         /* 0 or an errno: nothing more is touched */
};

/* ---- touching -------------------------------------------------------------------------------- */

/* Makes the pages of [begin, begin + num_bytes) exist. 0 or an errno. */
static int touch(unsigned char *begin, size_t num_bytes)
{
#ifdef MADV_POPULATE_WRITE
    int failure;
    do {
        failure = madvise(begin, num_bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    } while (failure == EINTR || failure == EAGAIN);
    if (failure != EINVAL && failure != ENOSYS) {
        return failure;
    }
#endif
    /* Before Linux 5.14. The pages are new: zeroes are what they have. */
    for (size_t i = 0; i < num_bytes; i += PAGE_BYTES) {
        ((volatile unsigned char *)begin)[i] = 0;
    }
    return 0;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The bytes of a piece, a part of one chunk; *num_bytes may be 0. */
static unsigned char *piece_at(const struct toucher *toucher, size_t piece, size_t *num_bytes)
{
    const struct pinned_region *region = toucher->region;
    size_t chunk_begin = piece / toucher->pieces_per_chunk * region->chunk_bytes;
    size_t chunk_end = smaller(chunk_begin + region->chunk_bytes, region->num_bytes);
    size_t begin =
        smaller(chunk_begin + piece % toucher->pieces_per_chunk * PIECE_BYTES, chunk_end);
    *num_bytes = smaller(PIECE_BYTES, chunk_end - begin);
    return region->base + begin;
}

/* Touches the next piece if it lies before `end`. With the lock, which it gives up meanwhile.
 * False: there is none. */
static bool touch_next(struct toucher *toucher, size_t end)
{
    size_t num_bytes, piece = toucher->next_piece;
    if (toucher->failure != 0 || piece >= end) {
        return false;
    }
    toucher->next_piece++;
    pthread_mutex_unlock(&toucher->lock);
    unsigned char *begin = piece_at(toucher, piece, &num_bytes);
    int failure = num_bytes > 0 ? touch(begin, num_bytes) : 0;
    pthread_mutex_lock(&toucher->lock);
    if (failure != 0 && toucher->failure == 0) {
        toucher->failure = failure;
    }
    toucher->num_touched[piece / toucher->pieces_per_chunk]++;
    pthread_cond_signal(&toucher->has_touched);
    return true;
}

static void *touch_all(void *arg)
{
    struct toucher *toucher = arg;
    pthread_mutex_lock(&toucher->lock);
    while (touch_next(toucher, toucher->num_pieces)) {
    }
    pthread_mutex_unlock(&toucher->lock);
    return NULL;
}

/* Returns when the chunk is touched, or never will be. 0 or an errno. */
static int await_chunk(struct toucher *toucher, size_t chunk)
{
    pthread_mutex_lock(&toucher->lock);
    while (toucher->failure == 0 && toucher->num_touched[chunk] < toucher->pieces_per_chunk) {
        if (!touch_next(toucher, (chunk + 1) * toucher->pieces_per_chunk)) {
            pthread_cond_wait(&toucher->has_touched, &toucher->lock);
        }
    }
    int failure = toucher->failure;
    pthread_mutex_unlock(&toucher->lock);
    return failure;
}

/* ---- registering ----------------------------------------------------------------------------- */

static size_t chunk_bytes_at(const struct pinned_region *region, int32_t chunk)
{
    return smaller(region->chunk_bytes, region->num_bytes - (size_t)chunk * region->chunk_bytes);
}

/* toucher: NULL if nothing is touched. */
static enum imbrex_status register_all(struct pinned_region *region, const char *what,
                                       struct toucher *toucher, struct imbrex_error *err)
{
    for (int32_t i = 0; i < region->num_chunks; i++) {
        int failure = toucher != NULL ? await_chunk(toucher, (size_t)i) : 0;
        if (failure != 0) {
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                             "%s: expected %zu bytes of memory, found less: %s", what,
                             region->num_bytes, system_error_text(failure));
        }
        TRY(device_host_register(region->device, region->base + (size_t)i * region->chunk_bytes,
                                 chunk_bytes_at(region, i), err));
        region->num_registered++;
    }
    return IMBREX_STATUS_OK;
}

/* As many threads as the system gives, be it none. */
static enum imbrex_status touch_and_register(struct pinned_region *region, const char *what,
                                             struct imbrex_error *err)
{
    pthread_t threads[MAX_TOUCHERS];
    int32_t num_threads = 0;
    struct toucher toucher = {
        .region = region,
        .pieces_per_chunk = (region->chunk_bytes + PIECE_BYTES - 1) / PIECE_BYTES,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .has_touched = PTHREAD_COND_INITIALIZER,
        .num_touched = calloc((size_t)region->num_chunks, sizeof(*toucher.num_touched)),
    };
    if (toucher.num_touched == NULL) {
        return error_out_of_memory(err, what,
                                   (size_t)region->num_chunks * sizeof(*toucher.num_touched));
    }
    toucher.num_pieces = toucher.pieces_per_chunk * (size_t)region->num_chunks;
    size_t num_wanted = smaller((size_t)thread_pool_num_cpus() - 1, toucher.num_pieces / 2);
    while ((size_t)num_threads < smaller(num_wanted, MAX_TOUCHERS) &&
           pthread_create(&threads[num_threads], NULL, touch_all, &toucher) == 0) {
        num_threads++;
    }
    region->num_threads = num_threads + 1;
    enum imbrex_status status = register_all(region, what, &toucher, err);
    if (status != IMBREX_STATUS_OK) {
        pthread_mutex_lock(&toucher.lock);
        toucher.next_piece = toucher.num_pieces;
        pthread_mutex_unlock(&toucher.lock);
    }
    for (int32_t i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    free(toucher.num_touched);
    return status;
}

/* A wish: the system may have no nodes, or not let us choose. */
static void prefer_node(struct pinned_region *region)
{
    unsigned long nodes[MAX_NODES / WORD_BITS] = {0};
    int32_t node = device_host_node(region->device);
    region->node = -1;
    if (node < 0 || node >= MAX_NODES) {
        return;
    }
    nodes[(size_t)node / WORD_BITS] = 1UL << (size_t)node % WORD_BITS;
    /* The kernel reads one bit less than it is told. */
    if (syscall(SYS_mbind, region->memory.base, region->memory.num_bytes, MEMPOLICY_PREFERRED,
                nodes, (unsigned long)MAX_NODES + 1, 0) == 0) {
        region->node = node;
    }
}

enum imbrex_status pinned_region_map(struct device *device, const char *what, size_t num_units,
                                     size_t unit_bytes, size_t chunk_bytes,
                                     struct pinned_region *region, struct imbrex_error *err)
{
    size_t num_bytes;
    struct pinned_region mapped = {.device = device};
    assert(num_units > 0 && unit_bytes > 0 && unit_bytes % PAGE_BYTES == 0);
    if (!size_mul(num_units, unit_bytes, &num_bytes)) {
        return error_out_of_memory(err, what, SIZE_MAX);
    }
    size_t units_per_chunk =
        smaller((chunk_bytes != 0 ? chunk_bytes : DEFAULT_CHUNK_BYTES) / unit_bytes, num_units);
    units_per_chunk = units_per_chunk > 0 ? units_per_chunk : 1;
    size_t num_chunks = (num_units + units_per_chunk - 1) / units_per_chunk;
    if (num_chunks > INT32_MAX) {
        return error_out_of_memory(err, what, num_bytes);
    }
    TRY(memory_region_map(what, num_bytes, &mapped.memory, err));
    mapped.base = mapped.memory.base;
    mapped.num_bytes = num_bytes;
    mapped.chunk_bytes = units_per_chunk * unit_bytes;
    mapped.num_chunks = (int32_t)num_chunks;
    prefer_node(&mapped);
    enum imbrex_status status = device_is_async(device) ? touch_and_register(&mapped, what, err)
                                                        : register_all(&mapped, what, NULL, err);
    if (status != IMBREX_STATUS_OK) {
        pinned_region_unmap(&mapped);
        return status;
    }
    *region = mapped;
    return IMBREX_STATUS_OK;
}

void pinned_region_unmap(struct pinned_region *region)
{
    for (int32_t i = region->num_registered - 1; i >= 0; i--) {
        device_host_unregister(region->device, region->base + (size_t)i * region->chunk_bytes);
    }
    memory_region_unmap(&region->memory);
    *region = (struct pinned_region){0};
}
