/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/prefetch_plan.h"

#include "tests/kv/policy_world.h"
#include "tests/test.h"

enum { MAX_STEPS = 64, MAX_TRACKED = 32 };

static struct prefetch_planner *make_planner(int64_t block_ns, int64_t horizon_ns)
{
    struct prefetch_planner *planner;
    struct imbrex_error err;
    const struct prefetch_options options = {
        .block_ns = block_ns, .horizon_ns = horizon_ns, .max_tracked = MAX_TRACKED};
    assert_int_equal(prefetch_planner_create(&options, &planner, &err), IMBREX_STATUS_OK);
    return planner;
}

/* Catches: blocks out of order, loads that come too late, a farther request served first, a load
 * planned twice, free blocks left while victims go. */
static void test_order_and_deadline(void **state)
{
    (void)state;
    static const uint64_t near_keys[] = {1, 2, 3, 4}, far_keys[] = {5, 6};
    const struct prefetch_request requests[] = {
        {.request_idx = 0, .place = 10, .needed_ns = 250, .keys = near_keys, .num_keys = 4},
        {.request_idx = 1, .place = 20, .needed_ns = 10000, .keys = far_keys, .num_keys = 2},
    };
    const struct prefetch_victim victims[] = {{.block_idx = 7, .place = INT64_MAX}};
    struct prefetch_step steps[MAX_STEPS];
    struct prefetch_metrics metrics;
    int32_t num_steps;
    struct prefetch_planner *planner = make_planner(100, 1000);
    assert_int_equal(
        prefetch_plan(planner, 0, requests, 2, victims, 1, 3, steps, MAX_STEPS, &num_steps),
        IMBREX_STATUS_OK);
    static const uint64_t expected[] = {1, 2, 5, 6};
    assert_int_equal(num_steps, 4);
    for (int32_t i = 0; i < 4; i++) {
        assert_int_equal(steps[i].key, expected[i]);
        assert_int_equal(steps[i].begin_ns, 100 * i);
        assert_int_equal(steps[i].victim_block, i < 3 ? -1 : 7);
    }
    prefetch_read_metrics(planner, &metrics);
    assert_int_equal(metrics.num_late, 2);
    assert_int_equal(metrics.num_planned, 4);
    assert_int_equal(
        prefetch_plan(planner, 0, &requests[1], 1, victims, 1, 3, steps, MAX_STEPS, &num_steps),
        IMBREX_STATUS_OK);
    assert_int_equal(num_steps, 0);
    prefetch_planner_destroy(planner);
    prefetch_planner_destroy(NULL);
}

/* Catches: a cancelled request whose moves go on though they have not begun, bandwidth that stays
 * taken, waste and use that are not counted. */
static void test_cancel_and_waste(void **state)
{
    (void)state;
    static const uint64_t keys[] = {1, 2, 3}, others[] = {9};
    const struct prefetch_request requests[] = {
        {.request_idx = 4, .place = 1, .needed_ns = 10000, .keys = keys, .num_keys = 3},
        {.request_idx = 5, .place = 2, .needed_ns = 10000, .keys = others, .num_keys = 1},
    };
    struct prefetch_step steps[MAX_STEPS];
    struct prefetch_metrics metrics;
    uint64_t cancelled[MAX_TRACKED];
    int32_t num_steps;
    struct prefetch_planner *planner = make_planner(100, 1000);
    assert_int_equal(
        prefetch_plan(planner, 0, requests, 1, NULL, 0, 8, steps, MAX_STEPS, &num_steps),
        IMBREX_STATUS_OK);
    assert_int_equal(num_steps, 3);
    assert_int_equal(prefetch_cancel(planner, 4, 150, cancelled), 1);
    assert_int_equal(cancelled[0], 3);
    assert_int_equal(
        prefetch_plan(planner, 150, &requests[1], 1, NULL, 0, 8, steps, MAX_STEPS, &num_steps),
        IMBREX_STATUS_OK);
    assert_int_equal(num_steps, 1);
    assert_int_equal(steps[0].begin_ns, 200);
    prefetch_used(planner, 9);
    prefetch_lost(planner, 1);
    prefetch_lost(planner, 2);
    prefetch_lost(planner, 3);
    prefetch_read_metrics(planner, &metrics);
    assert_int_equal(metrics.num_used, 1);
    assert_int_equal(metrics.num_wasted, 2);
    assert_int_equal(metrics.num_cancelled, 1);
    prefetch_planner_destroy(planner);
}

/* Catches: plans made from lists that are not in order, which would break every promise. */
static void test_disorder_is_refused(void **state)
{
    (void)state;
    static const uint64_t keys[] = {1};
    const struct prefetch_request requests[] = {
        {.place = 5, .needed_ns = 1000, .keys = keys, .num_keys = 1},
        {.place = 4, .needed_ns = 1000, .keys = keys, .num_keys = 1},
    };
    const struct prefetch_victim victims[] = {{.place = 3}, {.place = INT64_MAX}};
    struct prefetch_step steps[MAX_STEPS];
    int32_t num_steps = -1;
    struct prefetch_planner *planner = make_planner(1, 1);
    assert_int_equal(prefetch_plan(planner, 0, requests, 2, NULL, 0, 1, steps, 1, &num_steps),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(prefetch_plan(planner, 0, requests, 1, victims, 2, 1, steps, 1, &num_steps),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(num_steps, -1);
    prefetch_planner_destroy(planner);
}

/* Catches: a plan that lets a block go which a nearer request, or the same, needs; a prediction
 * that displaces what is wanted or worth as much; a load after its deadline or beyond the horizon;
 * two moves at once; a block planned without those before it; more blocks taken than are free. */
static void test_never_against_the_nearer(void **state)
{
    (void)state;
    uint32_t random = 17;
    struct prefetch_planner *planner = make_planner(10, 200);
    int64_t now_ns = 0, busy_until_ns = 0;
    uint64_t next_key = 1;
    int32_t num_swaps = 0;
    for (int32_t round = 0; round < 3000; round++) {
        struct prefetch_request requests[6];
        struct prefetch_victim victims[12];
        struct prefetch_step steps[MAX_STEPS];
        uint64_t keys[6][5];
        int64_t place = 1000 * round;
        int32_t num_requests = (int32_t)world_random(&random, 7), num_steps;
        int32_t num_victims = (int32_t)world_random(&random, 13);
        int32_t num_waiting = (int32_t)world_random(&random, 7);
        int32_t num_free = (int32_t)world_random(&random, 4);
        double value = 1.0;
        now_ns += world_random(&random, 100);
        for (int32_t i = 0; i < num_requests; i++) {
            place += 1 + world_random(&random, 5);
            value *= 0.5 + world_random(&random, 50) / 100.0;
            requests[i] = (struct prefetch_request){
                .request_idx = 10 * round + i,
                .place = i < num_waiting ? place : INT64_MAX,
                .needed_ns = now_ns + world_random(&random, 400),
                .value = value,
                .keys = keys[i],
                .num_keys = (int32_t)world_random(&random, 6),
            };
            for (int32_t k = 0; k < 5; k++) {
                keys[i][k] = next_key++;
            }
        }
        place = 1000 * round + 35;
        value = 0.0;
        for (int32_t i = 0; i < num_victims; i++) {
            bool is_wanted = i >= num_victims / 2;
            value += world_random(&random, 20) / 100.0;
            place -= world_random(&random, 6);
            victims[i] = (struct prefetch_victim){
                .block_idx = i, .place = is_wanted ? place : INT64_MAX, .value = value};
        }
        assert_int_equal(prefetch_plan(planner, now_ns, requests, num_requests, victims,
                                       num_victims, num_free, steps, MAX_STEPS, &num_steps),
                         IMBREX_STATUS_OK);
        int32_t num_taken = 0, num_done[6] = {0};
        bool is_gone[12] = {false};
        for (int32_t s = 0; s < num_steps; s++) {
            const struct prefetch_request *request = &requests[steps[s].request_idx - 10 * round];
            assert_int_equal(steps[s].key, request->keys[num_done[request - requests]++]);
            assert_true(steps[s].begin_ns >= busy_until_ns && steps[s].begin_ns >= now_ns);
            assert_true(steps[s].begin_ns - now_ns <= 200);
            assert_true(steps[s].end_ns <= request->needed_ns);
            busy_until_ns = steps[s].end_ns;
            if (steps[s].victim_block < 0) {
                num_taken++;
                continue;
            }
            const struct prefetch_victim *victim = &victims[steps[s].victim_block];
            assert_false(is_gone[victim->block_idx]);
            is_gone[victim->block_idx] = true;
            num_swaps++;
            if (request->place == INT64_MAX) {
                assert_true(victim->place == INT64_MAX && victim->value < request->value);
            } else {
                assert_true(victim->place > request->place);
            }
        }
        assert_true(num_taken <= num_free);
        for (int32_t s = 0; s < num_steps; s++) {
            (s % 2 == 0 ? prefetch_used : prefetch_lost)(planner, steps[s].key);
        }
    }
    assert_true(num_swaps > 500);
    prefetch_planner_destroy(planner);
}

/* Plans one predicted block each 100 ns, the time of a move; every use_interval-th is used, the
 * rest are lost. The number planned. */
static int32_t run_predictions(struct prefetch_planner *planner, int64_t begin_ns, int32_t count,
                               int32_t use_interval)
{
    struct prefetch_step step;
    int32_t num_planned = 0, num_steps;
    for (int32_t i = 0; i < count; i++) {
        const uint64_t key = (uint64_t)i + 1;
        const struct prefetch_request request = {.request_idx = -1,
                                                 .place = INT64_MAX,
                                                 .needed_ns = INT64_MAX,
                                                 .value = 1,
                                                 .keys = &key,
                                                 .num_keys = 1};
        assert_int_equal(prefetch_plan(planner, begin_ns + 100 * i, &request, 1, NULL, 0, 1, &step,
                                       1, &num_steps),
                         IMBREX_STATUS_OK);
        if (num_steps > 0) {
            num_planned++;
            (num_planned % use_interval == 0 ? prefetch_used : prefetch_lost)(planner, key);
        }
    }
    return num_planned;
}

/* Catches: wrong predictions that fill an idle link for ever, right ones that are held back, or
 * never tried again after many wrong ones, a waiting request that pays for them. */
static void test_credit(void **state)
{
    (void)state;
    enum { COUNT = 100 * PREFETCH_RENEWAL_BLOCKS };
    const uint64_t key = COUNT + 1;
    const struct prefetch_request waiting = {
        .request_idx = 1, .place = 1, .needed_ns = INT64_MAX, .keys = &key, .num_keys = 1};
    struct prefetch_planner *planner = make_planner(100, 1000);
    struct prefetch_step step;
    int32_t num_steps;
    /* One more after twice as long each time. */
    assert_in_range(run_predictions(planner, 0, COUNT, INT32_MAX), PREFETCH_CREDIT_BLOCKS + 4,
                    PREFETCH_CREDIT_BLOCKS + 10);
    assert_int_equal(
        prefetch_plan(planner, 100 * COUNT - 50, &waiting, 1, NULL, 0, 1, &step, 1, &num_steps),
        IMBREX_STATUS_OK);
    assert_int_equal(num_steps, 1);
    prefetch_used(planner, key);
    assert_int_equal(run_predictions(planner, INT64_C(100) * PREFETCH_MAX_RENEWAL_BLOCKS, COUNT,
                                     PREFETCH_CREDIT_OF_USE - 1),
                     COUNT);
    prefetch_planner_destroy(planner);
    planner = make_planner(100, 1000);
    assert_int_equal(run_predictions(planner, 0, COUNT, PREFETCH_CREDIT_OF_USE), COUNT);
    prefetch_planner_destroy(planner);
}

int run_prefetch_plan_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_deadline),
        cmocka_unit_test(test_cancel_and_waste),
        cmocka_unit_test(test_disorder_is_refused),
        cmocka_unit_test(test_never_against_the_nearer),
        cmocka_unit_test(test_credit),
    };
    return cmocka_run_group_tests_name("prefetch_plan", tests, NULL, NULL);
}
