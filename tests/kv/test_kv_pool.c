/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_pool.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* Catches: a block given out twice or lost over a random walk, a full pool that does not say so. */
static void test_random_walk(void **state)
{
    (void)state;
    struct kv_pool pool;
    struct imbrex_error err;
    enum { NUM_BLOCKS = 13 };
    int32_t held[NUM_BLOCKS];
    int32_t num_held = 0;
    uint32_t random = 7;
    assert_int_equal(kv_pool_create(2, 3, 8, NUM_BLOCKS, &pool, &err), IMBREX_STATUS_OK);
    for (int32_t step = 0; step < 20000; step++) {
        random = random * 1664525u + 1013904223u;
        if (random >> 31) {
            int32_t block_idx = -1;
            enum imbrex_status status = kv_pool_acquire(&pool, &block_idx);
            if (num_held == NUM_BLOCKS) {
                assert_int_equal(status, IMBREX_STATUS_CAPACITY);
                assert_int_equal(block_idx, -1);
            } else {
                assert_int_equal(status, IMBREX_STATUS_OK);
                assert_in_range(block_idx, 0, NUM_BLOCKS - 1);
                for (int32_t i = 0; i < num_held; i++) {
                    assert_int_not_equal(held[i], block_idx);
                }
                held[num_held++] = block_idx;
            }
        } else if (num_held > 0) {
            int32_t victim = (int32_t)((random >> 8) % (uint32_t)num_held);
            kv_pool_release(&pool, held[victim]);
            held[victim] = held[--num_held];
        }
        assert_true(kv_pool_check(&pool));
        assert_int_equal(pool.num_free, NUM_BLOCKS - num_held);
    }
    kv_pool_destroy(&pool);
}

/* Catches: a check that sees nothing. */
static void test_check_sees_damage(void **state)
{
    (void)state;
    struct kv_pool pool;
    struct imbrex_error err;
    int32_t block_idx;
    assert_int_equal(kv_pool_create(1, 1, 2, 4, &pool, &err), IMBREX_STATUS_OK);
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
    assert_true(kv_pool_check(&pool));
    kv_pool_destroy(&pool);
}

/* Catches: heads, layers or blocks that overlap, and a block that is no multiple of 4 KiB: every
 * element of every head has an address of its own inside its block. */
static void test_layout(void **state)
{
    (void)state;
    enum { LAYERS = 3, HEADS = 2, HEAD_DIM = 10, BLOCKS = 3 };
    struct kv_pool pool;
    struct imbrex_error err;
    assert_int_equal(kv_pool_create(LAYERS, HEADS, HEAD_DIM, BLOCKS, &pool, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(pool.view.block_bytes % KV_BLOCK_ALIGNMENT, 0);
    assert_true(pool.view.block_bytes >=
                sizeof(float) * 2 * LAYERS * HEADS * HEAD_DIM * KV_BLOCK_SIZE);
    float mark = 1.0f;
    for (int32_t pass = 0; pass < 2; pass++) {
        mark = 1.0f;
        for (int32_t block = 0; block < BLOCKS; block++) {
            for (int32_t layer = 0; layer < LAYERS; layer++) {
                for (int32_t head = 0; head < HEADS; head++) {
                    float *planes[2] = {kv_view_keys(&pool.view, block, layer, head),
                                        kv_view_values(&pool.view, block, layer, head)};
                    for (int32_t i = 0; i < 2 * KV_BLOCK_SIZE * HEAD_DIM; i++) {
                        float *element = &planes[i % 2][i / 2];
                        unsigned char *begin =
                            pool.view.blocks + (size_t)block * pool.view.block_bytes;
                        assert_true((unsigned char *)element >= begin);
                        assert_true((unsigned char *)(element + 1) <=
                                    begin + pool.view.block_bytes);
                        if (pass == 0) {
                            *element = mark;
                        } else {
                            assert_true(*element == mark);
                        }
                        mark += 1.0f;
                    }
                }
            }
        }
    }
    kv_pool_destroy(&pool);
}

/* Catches: sizes that wrap around instead of failing. */
static void test_too_large(void **state)
{
    (void)state;
    struct kv_pool pool;
    struct imbrex_error err;
    memset(&pool, 0x5a, sizeof(pool));
    struct kv_pool before = pool;
    size_t block_bytes = 1;
    assert_false(kv_block_bytes(INT32_MAX, INT32_MAX, INT32_MAX, &block_bytes));
    assert_int_equal(block_bytes, 1);
    assert_int_equal(kv_pool_create(INT32_MAX, INT32_MAX, INT32_MAX, 1, &pool, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_int_equal(kv_pool_create(1 << 20, 1 << 10, 1 << 10, INT32_MAX, &pool, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_memory_equal(&pool, &before, sizeof(pool));
}

int run_kv_pool_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walk),
        cmocka_unit_test(test_check_sees_damage),
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests_name("kv_pool", tests, NULL, NULL);
}
