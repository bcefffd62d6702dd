/* SPDX-License-Identifier: Apache-2.0 */
/* The small structures that policies are made of, beside naive ones. */
#include "kv/key_table.h"

#include "kv/block_heap.h"
#include "kv/ghost_list.h"
#include "tests/kv/policy_world.h"
#include "tests/test.h"

/* Catches: a key lost when another is removed from its run, one that takes more than it says. */
static void test_key_table(void **state)
{
    (void)state;
    enum { NUM_KEYS = 60, MAX_ENTRIES = 40 };
    struct key_table table;
    struct imbrex_error err;
    int32_t values[NUM_KEYS], num_entries = 0;
    uint32_t random = 1;
    assert_int_equal(key_table_init(MAX_ENTRIES, &table, &err), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_KEYS; i++) {
        values[i] = -1;
    }
    for (int32_t step = 0; step < 50000; step++) {
        int32_t key = (int32_t)world_random(&random, NUM_KEYS);
        if (world_random(&random, 2) == 0) {
            bool has_room = values[key] >= 0 || num_entries < MAX_ENTRIES;
            assert_int_equal(key_table_put(&table, (uint64_t)key, step), has_room);
            num_entries += has_room && values[key] < 0;
            values[key] = has_room ? step : values[key];
        } else {
            key_table_remove(&table, (uint64_t)key);
            num_entries -= values[key] >= 0;
            values[key] = -1;
        }
        if (step % 16 == 0) {
            for (int32_t i = 0; i < NUM_KEYS; i++) {
                assert_int_equal(key_table_find(&table, (uint64_t)i), values[i]);
            }
        }
    }
    assert_int_equal(table.num_entries, num_entries);
    key_table_deinit(&table);
}

/* Catches: a heap whose first is not the least after any change. */
static void test_block_heap(void **state)
{
    (void)state;
    enum { NUM_BLOCKS = 30 };
    struct block_heap heap;
    struct imbrex_error err;
    bool is_there[NUM_BLOCKS] = {false};
    uint64_t keys[NUM_BLOCKS];
    uint32_t random = 2;
    assert_int_equal(block_heap_init(NUM_BLOCKS, &heap, &err), IMBREX_STATUS_OK);
    for (int32_t step = 0; step < 50000; step++) {
        int32_t block_idx = (int32_t)world_random(&random, NUM_BLOCKS);
        if (world_random(&random, 5) < 3) {
            keys[block_idx] = world_random(&random, 100);
            is_there[block_idx] = true;
            block_heap_put(&heap, block_idx, keys[block_idx]);
        } else {
            is_there[block_idx] = false;
            block_heap_remove(&heap, block_idx);
        }
        uint64_t least = UINT64_MAX;
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            least = is_there[i] && keys[i] < least ? keys[i] : least;
        }
        int32_t first = block_heap_first(&heap);
        assert_int_equal(first < 0, least == UINT64_MAX);
        assert_true(first < 0 || (is_there[first] && keys[first] == least));
    }
    block_heap_clear(&heap);
    assert_int_equal(block_heap_first(&heap), -1);
    block_heap_deinit(&heap);
}

/* Catches: ghosts beyond the bound, the newest forgotten for the oldest, one found twice. */
static void test_ghost_list(void **state)
{
    (void)state;
    struct ghost_list ghosts;
    struct imbrex_error err;
    assert_int_equal(ghost_list_init(5, &ghosts, &err), IMBREX_STATUS_OK);
    for (uint64_t key = 1; key <= 8; key++) {
        ghost_list_add(&ghosts, key);
    }
    assert_int_equal(ghost_list_count(&ghosts), 5);
    ghost_list_add(&ghosts, 4); /* the newest again */
    assert_int_equal(ghost_list_count(&ghosts), 5);
    assert_false(ghost_list_take(&ghosts, 3));
    assert_true(ghost_list_take(&ghosts, 6));
    assert_false(ghost_list_take(&ghosts, 6));
    ghost_list_shrink(&ghosts, 2);
    assert_int_equal(ghost_list_count(&ghosts), 2);
    assert_true(ghost_list_take(&ghosts, 4));
    assert_true(ghost_list_take(&ghosts, 8));
    ghost_list_deinit(&ghosts);
}

int run_key_table_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_key_table),
        cmocka_unit_test(test_block_heap),
        cmocka_unit_test(test_ghost_list),
    };
    return cmocka_run_group_tests_name("key_table", tests, NULL, NULL);
}
