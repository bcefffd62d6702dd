/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_pool.h"

#include <assert.h>
#include <stdlib.h>

bool kv_block_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, size_t *block_bytes)
{
    size_t total = 2 * KV_BLOCK_SIZE * sizeof(float);
    if (!size_mul(total, (size_t)num_layers, &total) ||
        !size_mul(total, (size_t)num_kv_heads, &total) ||
        !size_mul(total, (size_t)head_dim, &total) ||
        !size_add(total, KV_BLOCK_ALIGNMENT - 1, &total)) {
        return false;
    }
    *block_bytes = total / KV_BLOCK_ALIGNMENT * KV_BLOCK_ALIGNMENT;
    return true;
}

enum imbrex_status kv_pool_create(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                  int32_t num_blocks, struct kv_pool *pool,
                                  struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_pool created = {.num_blocks = num_blocks, .num_free = num_blocks};
    size_t num_bytes;

    if (!kv_block_bytes(num_layers, num_kv_heads, head_dim, &created.view.block_bytes) ||
        !size_mul(created.view.block_bytes, (size_t)num_blocks, &num_bytes)) {
        return error_out_of_memory(err, "the KV cache", SIZE_MAX);
    }
    TRY_OR_FAIL(memory_region_map("the KV cache", num_bytes, &created.region, err));
    created.free_blocks = calloc((size_t)num_blocks, sizeof(*created.free_blocks));
    created.free_idx = calloc((size_t)num_blocks, sizeof(*created.free_idx));
    if (created.free_blocks == NULL || created.free_idx == NULL) {
        status = error_out_of_memory(err, "the list of free KV blocks",
                                     (size_t)num_blocks * sizeof(*created.free_blocks));
        goto fail;
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        created.free_blocks[i] = num_blocks - 1 - i;
        created.free_idx[num_blocks - 1 - i] = i;
    }
    created.view.blocks = created.region.base;
    created.view.num_layers = num_layers;
    created.view.num_kv_heads = num_kv_heads;
    created.view.block_size = KV_BLOCK_SIZE;
    created.view.head_dim = head_dim;
    *pool = created;
    return IMBREX_STATUS_OK;
fail:
    kv_pool_destroy(&created);
    return status;
}

void kv_pool_destroy(struct kv_pool *pool)
{
    memory_region_unmap(&pool->region);
    free(pool->free_blocks);
    free(pool->free_idx);
    *pool = (struct kv_pool){0};
}

enum imbrex_status kv_pool_acquire(struct kv_pool *pool, int32_t *block_idx)
{
    if (pool->num_free == 0) {
        return IMBREX_STATUS_CAPACITY;
    }
    pool->num_free--;
    *block_idx = pool->free_blocks[pool->num_free];
    assert(pool->free_idx[*block_idx] == pool->num_free);
    pool->free_idx[*block_idx] = -1;
    return IMBREX_STATUS_OK;
}

void kv_pool_release(struct kv_pool *pool, int32_t block_idx)
{
    assert(block_idx >= 0 && block_idx < pool->num_blocks && pool->free_idx[block_idx] == -1);
    pool->free_blocks[pool->num_free] = block_idx;
    pool->free_idx[block_idx] = pool->num_free;
    pool->num_free++;
}

bool kv_pool_check(const struct kv_pool *pool)
{
    int32_t num_used = 0;
    for (int32_t block_idx = 0; block_idx < pool->num_blocks; block_idx++) {
        int32_t i = pool->free_idx[block_idx];
        if (i == -1) {
            num_used++;
        } else if (i < 0 || i >= pool->num_free || pool->free_blocks[i] != block_idx) {
            return false;
        }
    }
    return num_used + pool->num_free == pool->num_blocks;
}
