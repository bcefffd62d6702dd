/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_pool.h"

#include <assert.h>
#include <stdlib.h>

#include "base/memory.h"

bool kv_token_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, enum kv_dtype dtype,
                    size_t *token_bytes)
{
    size_t total = 2 * kv_dtype_row_bytes(dtype, head_dim);
    if (!size_mul(total, (size_t)num_layers, &total) ||
        !size_mul(total, (size_t)num_kv_heads, &total)) {
        return false;
    }
    *token_bytes = total;
    return true;
}

bool kv_block_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, enum kv_dtype dtype,
                    size_t *block_bytes)
{
    size_t total;
    if (!kv_token_bytes(num_layers, num_kv_heads, head_dim, dtype, &total) ||
        !size_mul(total, KV_BLOCK_SIZE, &total) ||
        !size_add(total, KV_BLOCK_ALIGNMENT - 1, &total)) {
        return false;
    }
    *block_bytes = total / KV_BLOCK_ALIGNMENT * KV_BLOCK_ALIGNMENT;
    return true;
}

enum imbrex_status kv_pool_create(int32_t num_blocks, struct kv_pool *pool,
                                  struct imbrex_error *err)
{
    struct kv_pool created = {.num_blocks = num_blocks, .num_free = num_blocks};

    assert(num_blocks >= 1);
    created.free_blocks = calloc((size_t)num_blocks, sizeof(*created.free_blocks));
    created.free_idx = calloc((size_t)num_blocks, sizeof(*created.free_idx));
    created.num_users = calloc((size_t)num_blocks, sizeof(*created.num_users));
    created.num_pins = calloc((size_t)num_blocks, sizeof(*created.num_pins));
    created.is_kept = calloc((size_t)num_blocks, sizeof(*created.is_kept));
    if (created.free_blocks == NULL || created.free_idx == NULL || created.num_users == NULL ||
        created.num_pins == NULL || created.is_kept == NULL) {
        kv_pool_destroy(&created);
        return error_out_of_memory(err, "the list of KV blocks",
                                   (size_t)num_blocks * sizeof(*created.free_blocks));
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        created.free_blocks[i] = num_blocks - 1 - i;
        created.free_idx[num_blocks - 1 - i] = i;
    }
    *pool = created;
    return IMBREX_STATUS_OK;
}

void kv_pool_destroy(struct kv_pool *pool)
{
    free(pool->free_blocks);
    free(pool->free_idx);
    free(pool->num_users);
    free(pool->num_pins);
    free(pool->is_kept);
    *pool = (struct kv_pool){0};
}

static void make_free(struct kv_pool *pool, int32_t block_idx)
{
    pool->free_blocks[pool->num_free] = block_idx;
    pool->free_idx[block_idx] = pool->num_free;
    pool->num_free++;
}

/* Neither user nor pin is left. */
static void give_back(struct kv_pool *pool, int32_t block_idx)
{
    if (pool->is_kept[block_idx]) {
        pool->num_cached++;
        pool->keeper.idle(pool->keeper.user, block_idx);
    } else {
        make_free(pool, block_idx);
    }
}

enum imbrex_status kv_pool_acquire(struct kv_pool *pool, int32_t *block_idx)
{
    if (pool->num_free == 0 && pool->num_cached > 0) {
        pool->keeper.make_room(pool->keeper.user);
    }
    if (pool->num_free == 0) {
        return IMBREX_STATUS_CAPACITY;
    }
    pool->num_free--;
    *block_idx = pool->free_blocks[pool->num_free];
    assert(pool->free_idx[*block_idx] == pool->num_free);
    pool->free_idx[*block_idx] = -1;
    pool->num_users[*block_idx] = 1;
    return IMBREX_STATUS_OK;
}

void kv_pool_retain(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->free_idx[block_idx] == -1);
    pool->num_users[block_idx]++;
    if (pool->num_users[block_idx] > 1) {
        return;
    }
    if (pool->num_pins[block_idx] > 0) {
        pool->num_pinned--;
    } else {
        pool->num_cached--;
        pool->keeper.busy(pool->keeper.user, block_idx);
    }
}

void kv_pool_release(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->num_users[block_idx] > 0);
    pool->num_users[block_idx]--;
    if (pool->num_users[block_idx] > 0) {
        return;
    }
    if (pool->num_pins[block_idx] > 0) {
        pool->num_pinned++;
    } else {
        give_back(pool, block_idx);
    }
}

bool kv_pool_is_shared(const struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->num_users[block_idx] > 0);
    return pool->num_users[block_idx] > 1;
}

bool kv_pool_is_writable(const struct kv_pool *pool, int32_t block_idx)
{
    return !kv_pool_is_shared(pool, block_idx) && !pool->is_kept[block_idx];
}

void kv_pool_pin(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->num_users[block_idx] > 0);
    pool->num_pins[block_idx]++;
}

void kv_pool_unpin(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->num_pins[block_idx] > 0);
    pool->num_pins[block_idx]--;
    if (pool->num_pins[block_idx] == 0 && pool->num_users[block_idx] == 0) {
        pool->num_pinned--;
        give_back(pool, block_idx);
    }
}

void kv_pool_keep(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->keeper.idle != NULL && pool->num_users[block_idx] > 0);
    assert(!pool->is_kept[block_idx]);
    pool->is_kept[block_idx] = true;
}

void kv_pool_forget(struct kv_pool *pool, int32_t block_idx)
{
    assert(pool->is_kept[block_idx]);
    bool is_cached = kv_pool_is_cached(pool, block_idx);
    pool->is_kept[block_idx] = false;
    if (is_cached) {
        pool->num_cached--;
        make_free(pool, block_idx);
    }
}

bool kv_pool_is_cached(const struct kv_pool *pool, int32_t block_idx)
{
    return pool->is_kept[block_idx] && pool->num_users[block_idx] == 0 &&
           pool->num_pins[block_idx] == 0;
}

bool kv_pool_check(const struct kv_pool *pool)
{
    int32_t num_used = 0, num_cached = 0, num_pinned = 0;
    for (int32_t block_idx = 0; block_idx < pool->num_blocks; block_idx++) {
        int32_t i = pool->free_idx[block_idx];
        int32_t num_users = pool->num_users[block_idx], num_pins = pool->num_pins[block_idx];
        bool is_used = num_users + num_pins > 0;
        if (num_users < 0 || num_pins < 0 || (i == -1) != (is_used || pool->is_kept[block_idx])) {
            return false;
        }
        if (is_used) {
            num_used++;
            num_pinned += num_users == 0;
        } else if (i == -1) {
            num_cached++;
        } else if (i < 0 || i >= pool->num_free || pool->free_blocks[i] != block_idx) {
            return false;
        }
    }
    return num_used + num_cached + pool->num_free == pool->num_blocks &&
           num_cached == pool->num_cached && num_pinned == pool->num_pinned;
}
