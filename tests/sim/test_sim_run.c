/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "imbrex_kv.h"
#include "sim/sim_trace.h"
#include "tests/base/fixture.h"
#include "tests/sim/sim_fixture.h"
#include "tests/test.h"

#define TRACES "tests/sim/traces/"

static const char *const traces[] = {TRACES "mooncake_excerpt.jsonl", TRACES "weka_excerpt.jsonl"};
static const int64_t capacities[] = {153600, 512000};

static struct imbrex_kv_sim_options small_options(void)
{
    struct imbrex_kv_sim_options options = imbrex_kv_sim_options_default();

    options.traces = traces;
    options.num_traces = 2;
    options.capacities = capacities;
    options.num_capacities = 2;
    options.seed = 1;
    return options;
}

static bool count_calls(void *user, const struct imbrex_kv_sim_progress *progress)
{
    double *last = user;

    if (progress->step == NULL || progress->trace == NULL || progress->done < *last - 1e-9 ||
        progress->done > 1 + 1e-9) {
        *last = 1e9;
    } else {
        *last = progress->done;
    }
    return true;
}

static bool end_at_half(void *user, const struct imbrex_kv_sim_progress *progress)
{
    (void)user;
    return progress->done < 0.5;
}

/* Catches: rows that are missing, in another order or named wrongly; closures that do not go from
 * 0 at lru to 1 at MIN; a row above MIN; a search that misses its queue; progress that goes back.
 */
static void test_rows(void **state)
{
    (void)state;
    static const char *const policies[] = {"predictive", "lru", "arc"};
    static const char *const names[] = {"lru",
                                        "predictive",
                                        "predictive -queue",
                                        "predictive -table",
                                        "predictive -guard",
                                        "predictive -lookahead",
                                        "predictive -ghosts",
                                        "predictive -hints",
                                        "arc",
                                        "MIN",
                                        "infinite"};
    enum { NUM_NAMES = sizeof(names) / sizeof(names[0]) };
    struct imbrex_kv_sim_options options = small_options();
    struct imbrex_kv_sim_result *result = NULL;
    struct imbrex_error err = {0};
    double last = 0;

    options.policies = policies;
    options.num_policies = 3;
    options.has_ablations = true;
    options.hint_error = 0.1;
    options.progress = count_calls;
    options.user = &last;
    if (imbrex_kv_sim_run(&options, &result, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(last > 0.9 && last <= 1);
    assert_int_equal(result->num_traces, 2);
    assert_string_equal(result->traces[0].trace, "mooncake_excerpt.jsonl");
    assert_string_equal(result->traces[0].format, "mooncake");
    assert_string_equal(result->traces[1].format, "weka");
    assert_int_equal(result->traces[0].num_requests, 60);
    assert_int_equal(result->num_rows, 2 * 2 * NUM_NAMES);
    for (size_t i = 0; i < result->num_rows; i++) {
        const struct imbrex_kv_sim_row *row = &result->rows[i], *first = row - i % NUM_NAMES;
        const struct imbrex_kv_sim_row *min = first + NUM_NAMES - 2, *infinite = min + 1;
        assert_string_equal(row->policy, names[i % NUM_NAMES]);
        assert_string_equal(row->trace, result->traces[i / (2 * NUM_NAMES)].trace);
        assert_int_equal(row->capacity_tokens, capacities[i / NUM_NAMES % 2]);
        assert_true(row->hit_rate >= 0 && row->hit_rate <= infinite->hit_rate);
        assert_true(row == infinite || row->hit_rate <= min->hit_rate);
        assert_int_equal(row->num_blocks, result->traces[i / (2 * NUM_NAMES)].num_blocks);
        assert_true(row->ttft.p50 <= row->ttft.p90 && row->ttft.p90 <= row->ttft.p99);
        assert_true(row->prefill_tokens_per_s == first->prefill_tokens_per_s);
        assert_true(!row->prefetch.was_replayed && isnan(row->prefetch.precision));
        if (min->hit_rate > first->hit_rate) {
            assert_true(first->closure == 0 && min->closure == 1);
        } else {
            assert_true(isnan(row->closure));
        }
    }
    assert_int_equal(result->rows[0].num_requests, 30);
    imbrex_free(result);
}

/* Catches: a live run with a MIN, without its infinite cache, or whose fast server still queues. */
static void test_live(void **state)
{
    (void)state;
    struct imbrex_kv_sim_options options = small_options();
    struct imbrex_kv_sim_result *result = NULL;
    struct imbrex_error err = {0};
    size_t num_policies = 0;

    while (imbrex_kv_policy_name((int32_t)num_policies) != NULL) {
        num_policies++;
    }
    assert_string_equal(imbrex_kv_policy_name(0), "lru");
    options.capacities = (const int64_t[]){4000000, 8000000};
    options.is_live = true;
    options.prefill_tokens_per_s = 1e9;
    if (imbrex_kv_sim_run(&options, &result, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(result->num_rows, 2 * 2 * (num_policies + 1));
    for (size_t i = 0; i < result->num_rows; i++) {
        assert_true(result->rows[i].is_live && isnan(result->rows[i].closure));
        assert_true(result->rows[i].mean_queue < 1);
        assert_true(result->rows[i].ttft.mean < 0.1);
        assert_string_not_equal(result->rows[i].policy, "MIN");
    }
    assert_string_equal(result->rows[num_policies].policy, "infinite");
    imbrex_free(result);
}

/* Catches: a tier that another one's numbers reach; stacks of MIN; figures of the cache alone that
 * change with what lies below it; progress that goes back or does not reach its end. */
static void test_tiers(void **state)
{
    (void)state;
    enum { NUM_REQUESTS = 48, NUM_SESSIONS = 8 };
    static struct sim_text text;
    char path[FIXTURE_PATH_BYTES];
    const char *const turns[] = {fixture_path(path, "turns.jsonl")};
    static const char *const policies[] = {"predictive"};
    static const struct imbrex_kv_sim_tier tiers[] = {
        {.capacity_tokens = 1024, .tokens_per_s = 1e6},
        {.capacity_tokens = 1000000000, .tokens_per_s = 2e5, .latency_s = 0.001},
    };
    static const int64_t small_capacities[] = {4096, 5120};
    struct imbrex_kv_sim_options options = small_options();
    struct imbrex_kv_sim_result *alone = NULL, *result = NULL;
    struct imbrex_error err = {0};
    double last = 0;
    int64_t num_from_last = 0;

    /* Each of the sessions comes again when the others have been there. */
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        int32_t first = 2 * (i % NUM_SESSIONS);
        sim_text_add_request(&text, 1000 * i, 10, (const int32_t[]){first, first + 1}, 2);
    }
    fixture_write(path, text.bytes, text.num_bytes);
    options.traces = turns;
    options.num_traces = 1;
    options.policies = policies;
    options.num_policies = 1;
    options.prefill_tokens_per_s = 50000;
    options.capacities = small_capacities;
    assert_int_equal(imbrex_kv_sim_run(&options, &alone, &err), IMBREX_STATUS_OK);
    options.tiers = tiers;
    options.num_tiers = 2;
    options.progress = count_calls;
    options.user = &last;
    assert_int_equal(imbrex_kv_sim_run(&options, &result, &err), IMBREX_STATUS_OK);
    assert_true(last > 0.9 && last <= 1);
    assert_int_equal(result->num_rows, alone->num_rows);
    for (size_t i = 0; i < result->num_rows; i++) {
        const struct imbrex_kv_sim_row *row = &result->rows[i];
        bool is_policy = i % 4 < 2;
        assert_true(row->hit_rate == alone->rows[i].hit_rate && !row->prefetch.was_replayed);
        for (size_t k = 0; k < 2; k++) {
            const struct imbrex_kv_sim_stack *stack = &row->stacks[k];
            assert_int_equal(stack->prefetch.was_replayed, is_policy);
            assert_int_equal(stack->num_from[k + 1] + stack->num_up[k + 1] + stack->num_down[k + 1],
                             0);
        }
        /* On one timeline the last tier, which forgets nothing, has all that there ever was. */
        assert_true(!is_policy || row->stacks[1].prefetch.hit_rate >= row->hit_rate);
        num_from_last += row->stacks[1].num_from[1];
    }
    assert_true(num_from_last > 0);
    imbrex_free(alone);
    imbrex_free(result);
}

static bool end_at_third_call(void *user, double done)
{
    int32_t *num_calls = user;
    assert_true(done == 0);
    return ++*num_calls < 3;
}

/* Catches: a reader that goes on when it is told to stop, or waits for bytes that do not come. */
static void test_stopped_reading(void **state)
{
    (void)state;
    int32_t num_calls = 0, pipes[2];
    char path[64];
    const struct sim_trace_options options = {.block_size = 512};
    struct sim_input *input = NULL;
    struct sim_trace trace;
    struct imbrex_error err = {0};

    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(write(pipes[1], "{\"timestamp\": 1}\n", 17), 17);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", pipes[0]);
    assert_int_equal(sim_input_open(path, &input, &err), IMBREX_STATUS_OK);
    sim_input_watch(input, end_at_third_call, &num_calls);
    assert_int_equal(sim_trace_read(input, &options, &trace, &err), IMBREX_STATUS_CANCELLED);
    assert_int_equal(num_calls, 3);
    assert_non_null(strstr(err.message, "ended"));
    sim_input_close(input);
    close(pipes[0]);
    close(pipes[1]);
}

/* Catches: options that are not checked, pointers and names that are there twice among them, starts
 * for a trace that has them, a run that cannot be ended, a result that is touched when there is
 * none. */
static void test_refused(void **state)
{
    (void)state;
    static const char *const nothing[] = {TRACES "nothing.jsonl"},
                             *const text[] = {TRACES "README.md"}, *const best[] = {"best"},
                             *const twice[] = {"predictive", "lfu", "predictive"};
    static const int64_t too_small[] = {511};
    struct imbrex_kv_sim_result *const untouched = (struct imbrex_kv_sim_result *)&state;

    static const char *const null_text[] = {TRACES "mooncake_excerpt.jsonl", NULL};
    static const char starts[] = TEST_BUILD_DIR "/sim_run_starts.txt";
    struct imbrex_error error = {0};
    FILE *file = fopen(starts, "w");
    assert_non_null(file);
    fputs("1\n2\n", file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(imbrex_kv_sim_run(NULL, NULL, NULL), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(imbrex_kv_sim_run(NULL, &(struct imbrex_kv_sim_result *){NULL}, &error),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_string_equal(error.message, "options: expected a struct, found NULL");

    for (int32_t i = 0; i < 28; i++) {
        struct imbrex_kv_sim_options options = small_options();
        struct imbrex_kv_sim_tier tier = {.capacity_tokens = 512, .tokens_per_s = 1};
        struct imbrex_kv_sim_result *result = untouched;
        struct imbrex_error err = {0};
        enum imbrex_status expected = IMBREX_STATUS_INVALID_ARGUMENT;
        switch (i) {
        case 0:
            options.num_traces = 0;
            break;
        case 1:
            options.num_capacities = 0;
            break;
        case 2:
            options.capacities = too_small;
            options.num_capacities = 1;
            break;
        case 3:
            options.num_slots = 0;
            break;
        case 4:
            options.warm = 1;
            break;
        case 5:
            options.warm = (double)NAN;
            break;
        case 6:
            options.target_queue = 0;
            break;
        case 7:
            options.hint_error = 1.5;
            break;
        case 8:
            options.block_size = 100;
            break;
        case 9:
            options.traces = nothing;
            options.num_traces = 1;
            expected = IMBREX_STATUS_NOT_FOUND;
            break;
        case 10:
            options.traces = text;
            options.num_traces = 1;
            expected = IMBREX_STATUS_FORMAT;
            break;
        case 11:
            options.policies = best;
            options.num_policies = 1;
            expected = IMBREX_STATUS_NOT_FOUND;
            break;
        case 12:
            options.starts = nothing[0];
            expected = IMBREX_STATUS_NOT_FOUND;
            break;
        case 13:
            options.starts = TRACES "README.md"; /* no number stands there */
            expected = IMBREX_STATUS_FORMAT;
            break;
        case 14:
            options.starts = starts;
            options.num_traces = 1;
            break;
        case 15:
            options.traces = NULL;
            break;
        case 16:
            options.traces = null_text;
            break;
        case 17:
            options.policies = null_text;
            options.num_policies = 2;
            break;
        case 18:
            options.capacities = NULL;
            break;
        case 19:
            options.has_prefetch = true;
            options.fetch_ratio = 0;
            break;
        case 20:
        case 21:
        case 22:
        case 23:
        case 24:
        case 25:
            options.tiers = i == 20 ? NULL : &tier;
            options.num_tiers = i == 21 ? IMBREX_KV_SIM_MAX_TIERS + 1 : 1;
            tier.capacity_tokens -= i == 22;
            tier.tokens_per_s = i == 23 ? 0 : i == 24 ? (double)NAN : 1;
            tier.latency_s = i == 25 ? -1 : 0;
            break;
        case 26:
            /* Each would bring its own rows of ablations, for which there is room once. */
            options.policies = twice;
            options.num_policies = 3;
            options.has_ablations = true;
            options.has_sensitivity = true;
            break;
        default:
            options.progress = end_at_half;
            expected = IMBREX_STATUS_CANCELLED;
        }
        assert_int_equal(imbrex_kv_sim_run(&options, &result, &err), expected);
        assert_ptr_equal(result, untouched);
        assert_int_not_equal(err.message[0], '\0');
    }
}

int run_sim_run_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),    cmocka_unit_test(test_live),
        cmocka_unit_test(test_tiers),   cmocka_unit_test(test_stopped_reading),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("sim_run", tests, NULL, NULL);
}
