/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks from malloc that small pieces are cut from; a large piece gets a chunk of its own. */
#include <stdalign.h>
#include <stdlib.h>

#include "base/memory.h"
#include "jinja/jinja_pool.h"

#define FIRST_CHUNK_BYTES 4096
#define MAX_CHUNK_BYTES (256 * 1024)

struct jinja_pool_chunk {
    alignas(max_align_t) struct jinja_pool_chunk *older;
};

void jinja_pool_init(struct jinja_pool *pool, size_t max_bytes)
{
    *pool = (struct jinja_pool){.max_bytes = max_bytes};
}

void jinja_pool_deinit(struct jinja_pool *pool)
{
    while (pool->chunks != NULL) {
        struct jinja_pool_chunk *chunk = pool->chunks;
        pool->chunks = chunk->older;
        free(chunk);
    }
    *pool = (struct jinja_pool){.max_bytes = pool->max_bytes};
}

static unsigned char *chunk_add(struct jinja_pool *pool, size_t num_bytes)
{
    size_t total, in_use;
    if (!size_add(num_bytes, sizeof(struct jinja_pool_chunk), &total) ||
        !size_add(pool->num_bytes, total, &in_use) || in_use > pool->max_bytes) {
        pool->is_full = true;
        return NULL;
    }
    struct jinja_pool_chunk *chunk = malloc(total);
    if (chunk == NULL) {
        pool->is_full = false;
        return NULL;
    }
    chunk->older = pool->chunks;
    pool->chunks = chunk;
    pool->num_bytes = in_use;
    return (unsigned char *)(chunk + 1);
}

void *jinja_pool_take(struct jinja_pool *pool, size_t num_bytes)
{
    const size_t alignment = alignof(max_align_t);
    if (num_bytes > MAX_CHUNK_BYTES / 4) {
        return chunk_add(pool, num_bytes);
    }
    num_bytes = (num_bytes + alignment - 1) / alignment * alignment;
    num_bytes = num_bytes == 0 ? alignment : num_bytes;
    if ((size_t)(pool->end - pool->next) < num_bytes) {
        size_t chunk_bytes = FIRST_CHUNK_BYTES;
        while (chunk_bytes < MAX_CHUNK_BYTES &&
               (chunk_bytes < num_bytes || chunk_bytes < pool->num_bytes)) {
            chunk_bytes *= 2;
        }
        unsigned char *chunk = chunk_add(pool, chunk_bytes);
        if (chunk == NULL && pool->is_full) { /* the last bytes below the limit may still do */
            chunk_bytes = num_bytes;
            chunk = chunk_add(pool, chunk_bytes);
        }
        if (chunk == NULL) {
            return NULL;
        }
        pool->next = chunk;
        pool->end = chunk + chunk_bytes;
    }
    void *piece = pool->next;
    pool->next += num_bytes;
    return piece;
}
