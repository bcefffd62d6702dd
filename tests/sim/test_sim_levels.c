/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_levels.h"

#include "tests/test.h"

static struct sim_levels *create(int32_t num_nodes, const struct sim_level_options *options,
                                 int32_t num_levels)
{
    struct sim_levels *levels = NULL;
    struct imbrex_error err = {0};

    assert_int_equal(sim_levels_create(num_nodes, options, num_levels, &levels, &err),
                     IMBREX_STATUS_OK);
    return levels;
}

/* Two blocks in the first tier, three in the second.
 *
 *   put 0 at 0     down 0-5, and on from 5 to 55
 *   put 1 at 0     down 5-10
 *   put 2 at 20    0 goes from the first tier, the second is being given it; 20-25
 *   put 3 at 30    1 goes before its copy has begun: lost; 30-35; on: 2 55-105, 3 105-155
 *   put 4 at 200   2 goes; 200-205, and on from 205 to 255, for which the second tier forgets 0
 *   raise 2        300-400 over the second link, there at 407; 3 goes
 *   raise 3        after it: 400-500, there at 507; 4 goes
 *
 * Catches: links that move two blocks at once, or keep the next one waiting for a latency; a block
 * that is there before its time, in two places of a list, or in none; a tier that holds more than
 * it may or forgets another than the oldest; losses that are not counted, or counted for what the
 * next tier has; what was lost and is copied on all the same; what goes down again and is there. */
static void test_by_hand(void **state)
{
    static const struct sim_level_options options[] = {
        {.capacity = 2, .up_block_ns = 10, .latency_ns = 3, .down_block_ns = 5},
        {.capacity = 3, .up_block_ns = 100, .latency_ns = 7, .down_block_ns = 50},
    };
    struct sim_levels *levels = create(8, options, 2);
    struct sim_level_metrics near, far;

    (void)state;
    assert_int_equal(sim_levels_find(levels, 0), -1);
    assert_int_equal(sim_levels_put(levels, 0, 0), 5);
    assert_int_equal(sim_levels_put(levels, 1, 0), 10);
    assert_int_equal(sim_levels_find(levels, 0), 0);
    sim_levels_advance(levels, 20);
    assert_int_equal(sim_levels_put(levels, 2, 20), 25);
    assert_int_equal(sim_levels_find(levels, 0), 1);
    assert_int_equal(sim_levels_raise_end(levels, 0, 20), 55 + 107);
    sim_levels_advance(levels, 30);
    assert_int_equal(sim_levels_put(levels, 3, 30), 35);
    assert_int_equal(sim_levels_find(levels, 1), -1);
    sim_levels_read_metrics(levels, 0, &near);
    assert_int_equal(near.num_lost, 1);

    sim_levels_advance(levels, 104);
    assert_int_equal(sim_levels_find(levels, 2), 0);
    sim_levels_advance(levels, 200);
    assert_int_equal(sim_levels_put(levels, 4, 200), 205);
    assert_int_equal(sim_levels_find(levels, 2), 1);
    assert_int_equal(sim_levels_find(levels, 0), 1);
    assert_false(sim_levels_is_near(levels, 2, 200));
    assert_false(sim_levels_is_near(levels, 4, 204));
    assert_true(sim_levels_is_near(levels, 4, 205));

    sim_levels_advance(levels, 300);
    assert_int_equal(sim_levels_find(levels, 0), -1);
    assert_int_equal(sim_levels_raise_end(levels, 2, 300), 407);
    assert_int_equal(sim_levels_raise(levels, 2, 300), 407);
    assert_int_equal(sim_levels_origin(levels, 2), 1);
    assert_int_equal(sim_levels_find(levels, 2), 0);
    assert_false(sim_levels_is_near(levels, 2, 406));
    assert_int_equal(sim_levels_find(levels, 3), 1);
    assert_int_equal(sim_levels_raise(levels, 3, 300), 507);
    assert_int_equal(sim_levels_find(levels, 4), 1);
    assert_true(sim_levels_check(levels));

    /* It is there: nothing goes down, but it is the youngest now. */
    assert_int_equal(sim_levels_put(levels, 2, 600), 600);
    sim_levels_read_metrics(levels, 0, &near);
    sim_levels_read_metrics(levels, 1, &far);
    assert_int_equal(near.num_down, 5);
    assert_int_equal(far.num_down, 4);
    assert_int_equal(far.num_up, 2);
    assert_int_equal(near.num_up, 0);
    assert_int_equal(near.num_lost, 1);

    assert_int_equal(sim_levels_free_ns(levels), 0);
    sim_levels_load(levels, 2, 630);
    assert_int_equal(sim_levels_free_ns(levels), 627);
    assert_int_equal(sim_levels_origin(levels, 2), 0);
    sim_levels_read_metrics(levels, 0, &near);
    assert_int_equal(near.num_up, 1);
    assert_int_equal(sim_levels_put(levels, 5, 700), 705);
    assert_int_equal(sim_levels_find(levels, 3), 1);
    assert_int_equal(sim_levels_find(levels, 2), 0);
    assert_true(sim_levels_check(levels));
    sim_levels_destroy(levels);
    sim_levels_destroy(NULL);
}

static uint32_t draw(uint32_t *state, uint32_t limit)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % limit;
}

/* Catches, over many steps: lists and counts that part; a move that takes less than its time, or
 * more of a link's than has passed; a raised block that is not there when it was said to be, or is
 * in no tier. */
static void test_walk(void **state)
{
    enum { NUM_NODES = 40, NUM_STEPS = TEST_SANITIZED ? 4000 : 20000 };
    static const struct sim_level_options options[] = {
        {.capacity = 5, .up_block_ns = 3, .latency_ns = 2, .down_block_ns = 3},
        {.capacity = 11, .up_block_ns = 17, .latency_ns = 29, .down_block_ns = 90},
        {.capacity = 23, .up_block_ns = 40, .latency_ns = 0, .down_block_ns = 40},
    };
    struct sim_levels *levels = create(NUM_NODES, options, 3);
    uint32_t random = 5;
    int64_t now_ns = 0, num_raised = 0, num_lost = 0;

    (void)state;
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        int32_t node = (int32_t)draw(&random, NUM_NODES);
        int32_t found = sim_levels_find(levels, node);
        now_ns += draw(&random, 60);
        sim_levels_advance(levels, now_ns);
        found = sim_levels_find(levels, node);
        if (draw(&random, 3) == 0 || found < 0) {
            int64_t out_ns = sim_levels_put(levels, node, now_ns);
            assert_true(found == 0 ? out_ns == now_ns : out_ns >= now_ns + 3);
            assert_int_equal(sim_levels_find(levels, node), 0);
        } else {
            int64_t expected_ns = sim_levels_raise_end(levels, node, now_ns);
            int64_t end_ns = sim_levels_raise(levels, node, now_ns);
            assert_int_equal(end_ns, expected_ns);
            assert_true(end_ns >= now_ns + (found > 0 ? 46 : 0) + (found > 1 ? 40 : 0));
            assert_true(sim_levels_is_near(levels, node, end_ns));
            assert_true(found == 0 || !sim_levels_is_near(levels, node, end_ns - 1));
            assert_true(found == 0 || sim_levels_origin(levels, node) == found);
            sim_levels_load(levels, node, end_ns + 5);
            num_raised += found > 0;
        }
        if (i % 16 == 0) {
            assert_true(sim_levels_check(levels));
        }
    }
    for (int32_t k = 0; k < 3; k++) {
        struct sim_level_metrics metrics;
        sim_levels_read_metrics(levels, k, &metrics);
        num_lost += metrics.num_lost;
        assert_true(metrics.num_up > 0 && metrics.num_down > 0);
        assert_true(k == 0 || (metrics.num_down - 1) * options[k].down_block_ns <= now_ns);
    }
    assert_true(num_raised > 0 && num_lost > 0);
    sim_levels_destroy(levels);
}

int run_sim_levels_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_walk),
    };
    return cmocka_run_group_tests_name("sim_levels", tests, NULL, NULL);
}
