/* SPDX-License-Identifier: Apache-2.0 */
/* Which way few rows take. Catches: a way that is never tried or is kept although another one was
 * faster; shapes or numbers of rows that decide for each other; trials that go on for ever, that
 * are not repeated, or of what a cache may hold; a full table. */
#include "ops/few_ways.h"

#include "tests/test.h"

#define NUM_TRIALS (FEW_WAY_TRIALS * FEW_WAY_COUNT)
#define LARGE ((int64_t)8 << 20)

static struct few_ways new_ways(void)
{
    return (struct few_ways){.the_only = FEW_WAY_COUNT};
}

/* All trials of a shape, in which `fast` takes half of the time, but for its first one. */
static void try_all(struct few_ways *ways, int32_t num_rows, int64_t num_bytes, enum few_way fast)
{
    int32_t num_tries[FEW_WAY_COUNT] = {0};
    for (int32_t i = 0; i < NUM_TRIALS; i++) {
        struct few_shape *trial;
        enum few_way way = few_ways_take(ways, num_rows, num_bytes, &trial);
        assert_non_null(trial);
        num_tries[way]++;
        few_ways_note(trial, way, way == fast ? (i < FEW_WAY_COUNT ? 9000 : 500) : 1000);
    }
    for (int way = 0; way < FEW_WAY_COUNT; way++) {
        assert_int_equal(num_tries[way], FEW_WAY_TRIALS);
    }
}

static void expect_way(struct few_ways *ways, int32_t num_rows, int64_t num_bytes,
                       enum few_way expected)
{
    struct few_shape *trial;
    assert_int_equal(few_ways_take(ways, num_rows, num_bytes, &trial), expected);
    assert_null(trial);
}

static void test_each_shape_finds_its_own(void **state)
{
    struct few_ways ways = new_ways();
    (void)state;
    try_all(&ways, 1, LARGE, FEW_WAY_ORDERED);
    try_all(&ways, 1, 2 * LARGE, FEW_WAY_STREAMS);
    try_all(&ways, 8, LARGE, FEW_WAY_STREAMS);
    expect_way(&ways, 1, LARGE, FEW_WAY_ORDERED);
    expect_way(&ways, 1, 2 * LARGE, FEW_WAY_STREAMS);
    expect_way(&ways, 8, LARGE, FEW_WAY_STREAMS);
}

static void test_trials_are_repeated(void **state)
{
    struct few_ways ways = new_ways();
    (void)state;
    try_all(&ways, 1, LARGE, FEW_WAY_ORDERED);
    for (int32_t i = 0; i < FEW_WAY_CALLS; i++) {
        expect_way(&ways, 1, LARGE, FEW_WAY_ORDERED);
    }
    try_all(&ways, 1, LARGE, FEW_WAY_STREAMS);
    expect_way(&ways, 1, LARGE, FEW_WAY_STREAMS);
}

static void test_small_shapes_try_nothing(void **state)
{
    struct few_ways ways = new_ways();
    (void)state;
    expect_way(&ways, 1, FEW_WAY_MIN_BYTES - 1, (enum few_way)0);
    assert_int_equal(ways.num_shapes, 0);
}

static void test_a_full_table_takes_the_first_way(void **state)
{
    struct few_ways ways = new_ways();
    (void)state;
    for (int32_t i = 0; i < FEW_WAY_MAX_SHAPES; i++) {
        try_all(&ways, 1, LARGE + i, FEW_WAY_ORDERED);
    }
    expect_way(&ways, 1, LARGE + FEW_WAY_MAX_SHAPES, (enum few_way)0);
    expect_way(&ways, 1, LARGE, FEW_WAY_ORDERED);
}

static void test_the_only_way(void **state)
{
    struct few_ways ways = new_ways();
    (void)state;
    ways.the_only = FEW_WAY_ORDERED;
    expect_way(&ways, 1, LARGE, FEW_WAY_ORDERED);
    expect_way(&ways, 1, 1, FEW_WAY_ORDERED);
}

int run_few_ways_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_shape_finds_its_own),
        cmocka_unit_test(test_trials_are_repeated),
        cmocka_unit_test(test_small_shapes_try_nothing),
        cmocka_unit_test(test_a_full_table_takes_the_first_way),
        cmocka_unit_test(test_the_only_way),
    };
    return cmocka_run_group_tests_name("few_ways", tests, NULL, NULL);
}
