/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_pool.h"

#include <stdint.h>
#include <stdlib.h>

#include "ops/kv_view.h"
#include "tests/test.h"

/* Catches: a block given out twice or lost over a random walk of users and pins, a full pool that
 * does not say so, a pinned block given out, a block that is shared without its knowing. */
static void test_random_walk(void **state)
{
    (void)state;
    struct kv_pool pool;
    struct imbrex_error err;
    enum { NUM_BLOCKS = 13 };
    int32_t num_users[NUM_BLOCKS] = {0}, num_pins[NUM_BLOCKS] = {0};
    uint32_t random = 7;
    assert_int_equal(kv_pool_create(NUM_BLOCKS, &pool, &err), IMBREX_STATUS_OK);
    for (int32_t step = 0; step < 40000; step++) {
        random = random * 1664525u + 1013904223u;
        int32_t chosen = (int32_t)((random >> 8) % NUM_BLOCKS);
        switch (random >> 29) {
        case 0:
        case 1:
        case 2: {
            int32_t block_idx = -1;
            if (pool.num_free == 0) {
                assert_int_equal(kv_pool_acquire(&pool, &block_idx), IMBREX_STATUS_CAPACITY);
                assert_int_equal(block_idx, -1);
            } else {
                assert_int_equal(kv_pool_acquire(&pool, &block_idx), IMBREX_STATUS_OK);
                assert_in_range(block_idx, 0, NUM_BLOCKS - 1);
                assert_int_equal(num_users[block_idx] + num_pins[block_idx], 0);
                num_users[block_idx] = 1;
            }
            break;
        }
        case 3:
            if (num_users[chosen] > 0) {
                kv_pool_retain(&pool, chosen);
                num_users[chosen]++;
            }
            break;
        case 4:
            if (num_users[chosen] > 0) {
                kv_pool_pin(&pool, chosen);
                num_pins[chosen]++;
            }
            break;
        case 5:
            if (num_pins[chosen] > 0) {
                kv_pool_unpin(&pool, chosen);
                num_pins[chosen]--;
            }
            break;
        default:
            if (num_users[chosen] > 0) {
                kv_pool_release(&pool, chosen);
                num_users[chosen]--;
            }
        }
        int32_t num_free = 0, num_pinned = 0;
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            num_free += num_users[i] + num_pins[i] == 0;
            num_pinned += num_users[i] == 0 && num_pins[i] > 0;
            if (num_users[i] > 0) {
                assert_int_equal(kv_pool_is_shared(&pool, i), num_users[i] > 1);
            }
        }
        assert_true(kv_pool_check(&pool));
        assert_int_equal(pool.num_free, num_free);
        assert_int_equal(pool.num_pinned, num_pinned);
    }
    kv_pool_destroy(&pool);
    kv_pool_destroy(&pool);
}

/* Catches: a check that sees nothing. */
static void test_check_sees_damage(void **state)
{
    (void)state;
    struct kv_pool pool;
    struct imbrex_error err;
    int32_t block_idx;
    assert_int_equal(kv_pool_create(4, &pool, &err), IMBREX_STATUS_OK);
    assert_int_equal(kv_pool_acquire(&pool, &block_idx), IMBREX_STATUS_OK);
    assert_true(kv_pool_check(&pool));
    int32_t saved = pool.free_blocks[0];
    pool.free_blocks[0] = block_idx; /* both used and free */
    assert_false(kv_pool_check(&pool));
    pool.free_blocks[0] = pool.free_blocks[1]; /* free twice */
    assert_false(kv_pool_check(&pool));
    pool.free_blocks[0] = saved;
    pool.num_free--; /* lost */
    assert_false(kv_pool_check(&pool));
    pool.num_free++;
    pool.num_users[block_idx] = 0; /* in use by nobody */
    assert_false(kv_pool_check(&pool));
    pool.num_pins[block_idx] = 1; /* a pin that is not counted */
    assert_false(kv_pool_check(&pool));
    pool.num_pins[block_idx] = 0;
    pool.num_users[block_idx] = 1;
    pool.num_users[saved] = 1; /* free with a user */
    assert_false(kv_pool_check(&pool));
    pool.num_users[saved] = 0;
    pool.is_kept[saved] = true; /* free and kept */
    assert_false(kv_pool_check(&pool));
    pool.is_kept[saved] = false;
    pool.num_cached = 1; /* a cached block that is not there */
    assert_false(kv_pool_check(&pool));
    pool.num_cached = 0;
    assert_true(kv_pool_check(&pool));
    kv_pool_destroy(&pool);
}

/* Keeps what it is told to keep, and forgets the block that has been idle for longest. */
struct keeper {
    struct kv_pool *pool;
    int32_t idle[13]; /* [num_idle] the longest idle first */
    int32_t num_idle;
    bool is_stubborn; /* makes no room */
};

static void keeper_idle(void *user, int32_t block_idx)
{
    struct keeper *keeper = user;
    keeper->idle[keeper->num_idle++] = block_idx;
}

static void keeper_busy(void *user, int32_t block_idx)
{
    struct keeper *keeper = user;
    int32_t num_left = 0;
    for (int32_t i = 0; i < keeper->num_idle; i++) {
        if (keeper->idle[i] != block_idx) {
            keeper->idle[num_left++] = keeper->idle[i];
        }
    }
    assert_int_equal(num_left, keeper->num_idle - 1);
    keeper->num_idle = num_left;
}

static void keeper_make_room(void *user)
{
    struct keeper *keeper = user;
    assert_int_equal(keeper->pool->num_free, 0);
    if (!keeper->is_stubborn) {
        int32_t block_idx = keeper->idle[0];
        keeper_busy(keeper, block_idx);
        kv_pool_forget(keeper->pool, block_idx);
    }
}

/* Catches: a kept block that is free, or is given out while something uses or pins it; an event
 * that is missing or comes twice; room that is asked for although there is some, or not asked for;
 * a block that stays cached when it is kept no more. */
static void test_keeper_walk(void **state)
{
    (void)state;
    enum { NUM_BLOCKS = 13 };
    struct kv_pool pool;
    struct imbrex_error err;
    struct keeper keeper = {.pool = &pool};
    int32_t num_users[NUM_BLOCKS] = {0}, num_pins[NUM_BLOCKS] = {0};
    bool is_kept[NUM_BLOCKS] = {false};
    uint32_t random = 3;
    assert_int_equal(kv_pool_create(NUM_BLOCKS, &pool, &err), IMBREX_STATUS_OK);
    pool.keeper = (struct kv_pool_keeper){
        .user = &keeper,
        .idle = keeper_idle,
        .busy = keeper_busy,
        .make_room = keeper_make_room,
    };
    for (int32_t step = 0; step < 40000; step++) {
        random = random * 1664525u + 1013904223u;
        int32_t chosen = (int32_t)((random >> 8) % NUM_BLOCKS);
        bool is_used = num_users[chosen] + num_pins[chosen] > 0;
        keeper.is_stubborn = (random >> 24) % 8 == 0;
        switch (random >> 29) {
        case 0:
        case 1: {
            int32_t block_idx = -1;
            bool has_room = pool.num_free > 0 || (keeper.num_idle > 0 && !keeper.is_stubborn);
            int32_t expected = pool.num_free == 0 && has_room ? keeper.idle[0] : -1;
            enum imbrex_status status = kv_pool_acquire(&pool, &block_idx);
            assert_int_equal(status, has_room ? IMBREX_STATUS_OK : IMBREX_STATUS_CAPACITY);
            if (has_room) {
                assert_true(expected == -1 || block_idx == expected);
                assert_int_equal(num_users[block_idx] + num_pins[block_idx], 0);
                assert_true(expected != -1 || !is_kept[block_idx]);
                num_users[block_idx] = 1;
                is_kept[block_idx] = false;
            }
            break;
        }
        case 2:
            if (is_used || is_kept[chosen]) {
                kv_pool_retain(&pool, chosen);
                num_users[chosen]++;
            }
            break;
        case 3:
            if (num_users[chosen] > 0) {
                kv_pool_pin(&pool, chosen);
                num_pins[chosen]++;
            }
            break;
        case 4:
            if (num_pins[chosen] > 0) {
                kv_pool_unpin(&pool, chosen);
                num_pins[chosen]--;
            }
            break;
        case 5:
            if (!is_kept[chosen] && num_users[chosen] > 0) {
                kv_pool_keep(&pool, chosen);
                is_kept[chosen] = true;
            } else if (is_kept[chosen] && step % 4 == 0) {
                if (!is_used) {
                    keeper_busy(&keeper, chosen);
                }
                kv_pool_forget(&pool, chosen);
                is_kept[chosen] = false;
            }
            break;
        default:
            if (num_users[chosen] > 0) {
                kv_pool_release(&pool, chosen);
                num_users[chosen]--;
            }
        }
        int32_t num_free = 0, num_cached = 0;
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            bool is_cached = num_users[i] + num_pins[i] == 0 && is_kept[i];
            num_cached += is_cached;
            num_free += num_users[i] + num_pins[i] == 0 && !is_kept[i];
            assert_int_equal(kv_pool_is_cached(&pool, i), is_cached);
            if (num_users[i] > 0) {
                assert_int_equal(kv_pool_is_writable(&pool, i), num_users[i] == 1 && !is_kept[i]);
            }
        }
        assert_true(kv_pool_check(&pool));
        assert_int_equal(pool.num_free, num_free);
        assert_int_equal(pool.num_cached, num_cached);
        assert_int_equal(keeper.num_idle, num_cached);
        assert_int_equal(kv_pool_num_available(&pool), num_free + num_cached);
    }
    kv_pool_destroy(&pool);
}

/* Marks bytes [at, at + count) as taken: none was, and all lie in the block that begins there. */
static void take_bytes(const struct kv_view *view, const unsigned char *begin,
                       const unsigned char *at, size_t count, unsigned char *taken)
{
    assert_true(at >= begin && at + count <= begin + view->block_bytes);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(taken[at + i - view->blocks], 0);
        taken[at + i - view->blocks] = 1;
    }
}

/* Catches: rows, scales, heads, layers or blocks that overlap or leave their block, in every type:
 * each byte of each row of each head has an address of its own inside a block of kv_block_bytes,
 * and a token's bytes are as many as kv_token_bytes says. */
static void test_layout(void **state)
{
    (void)state;
    enum { LAYERS = 3, HEADS = 2, HEAD_DIM = 34, BLOCKS = 3 };
    for (int dtype = 0; dtype < KV_DTYPE_COUNT; dtype++) {
        struct kv_view view = {
            .dtype = (enum kv_dtype)dtype,
            .num_layers = LAYERS,
            .num_kv_heads = HEADS,
            .block_size = KV_BLOCK_SIZE,
            .head_dim = HEAD_DIM,
        };
        size_t element_bytes = HEAD_DIM * kv_dtype_element_bytes(view.dtype), token_bytes;
        size_t scale_bytes = kv_dtype_has_scales(view.dtype) ? 2 * sizeof(uint16_t) : 0;
        assert_true(kv_token_bytes(LAYERS, HEADS, HEAD_DIM, view.dtype, &token_bytes));
        assert_int_equal(token_bytes, 2 * LAYERS * HEADS * (element_bytes + scale_bytes));
        assert_true(kv_block_bytes(LAYERS, HEADS, HEAD_DIM, view.dtype, &view.block_bytes));
        view.blocks = malloc(BLOCKS * view.block_bytes);
        unsigned char *taken = calloc(BLOCKS, view.block_bytes);
        assert_true(view.blocks != NULL && taken != NULL);
        for (int32_t i = 0; i < BLOCKS * LAYERS * HEADS * KV_BLOCK_SIZE; i++) {
            int32_t offset = i % KV_BLOCK_SIZE, head = i / KV_BLOCK_SIZE % HEADS;
            int32_t layer = i / KV_BLOCK_SIZE / HEADS % LAYERS;
            int32_t block = i / KV_BLOCK_SIZE / HEADS / LAYERS;
            unsigned char *begin = view.blocks + (size_t)block * view.block_bytes;
            unsigned char *heads[2] = {kv_view_keys(&view, block, layer, head),
                                       kv_view_values(&view, block, layer, head)};
            for (int plane = 0; plane < 2; plane++) {
                struct kv_row row = kv_view_row(&view, heads[plane], offset);
                take_bytes(&view, begin, row.elements, element_bytes, taken);
                take_bytes(&view, begin, (unsigned char *)row.scales, scale_bytes, taken);
            }
        }
        free(taken);
        free(view.blocks);
    }
}

/* Catches: sizes that wrap around instead of failing, and a block that is no multiple of 4 KiB. */
static void test_block_bytes(void **state)
{
    (void)state;
    size_t block_bytes = 1;
    assert_false(kv_block_bytes(INT32_MAX, INT32_MAX, INT32_MAX, KV_DTYPE_F32, &block_bytes));
    assert_int_equal(block_bytes, 1);
    for (int dtype = 0; dtype < KV_DTYPE_COUNT; dtype++) {
        size_t row_bytes = kv_dtype_row_bytes((enum kv_dtype)dtype, 10);
        size_t used_bytes = row_bytes * 2 * 3 * 2 * KV_BLOCK_SIZE;
        assert_true(kv_block_bytes(3, 2, 10, (enum kv_dtype)dtype, &block_bytes));
        assert_int_equal(block_bytes % KV_BLOCK_ALIGNMENT, 0);
        assert_true(block_bytes >= used_bytes);
        assert_true(block_bytes < used_bytes + KV_BLOCK_ALIGNMENT);
    }
}

int run_kv_pool_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walk),       cmocka_unit_test(test_keeper_walk),
        cmocka_unit_test(test_check_sees_damage), cmocka_unit_test(test_layout),
        cmocka_unit_test(test_block_bytes),
    };
    return cmocka_run_group_tests_name("kv_pool", tests, NULL, NULL);
}
