/* SPDX-License-Identifier: Apache-2.0 */
/* A thousand mixed requests on a small real model: prompts up to most of its context, cancels,
 * priorities, several choices, a pool that holds few of them, with one and two threads. Takes
 * minutes; `make soak` runs it.
 *
 * Catches: what test_engine_mixed.c catches, where it needs long prompts or rare meetings of
 * events. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "tests/engine/request_cases.h"

#define MODEL "tests/golden/qwen2-tiny-4m"
#define NUM_CASES 1000
#define CONTEXT_SIZE 2048
#define MAX_PROMPT 1500
#define MAX_OUTPUT 200

static struct request_case cases[NUM_CASES];

static struct imbrex_engine *create_engine(struct imbrex_model *model, int32_t kv_cache_tokens,
                                           int32_t num_threads)
{
    struct imbrex_engine *engine;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = kv_cache_tokens;
    options.num_threads = num_threads;
    options.max_running = 32;
    assert_int_equal(imbrex_engine_create(model, &options, &engine, NULL), IMBREX_STATUS_OK);
    return engine;
}

static void run_mix(struct imbrex_model *model, int32_t num_threads, uint64_t seed)
{
    struct imbrex_engine *engine = create_engine(model, CONTEXT_SIZE + 2048, num_threads);
    struct imbrex_engine_metrics metrics;
    int64_t begin_ns = clock_now_ns();
    int32_t num_submitted = 0;
    uint64_t random = seed;
    bool has_work = true;
    while (has_work || num_submitted < NUM_CASES) {
        if (num_submitted < NUM_CASES && request_case_random(&random, 4) == 0) {
            assert_int_equal(request_case_submit(&cases[num_submitted], engine), IMBREX_STATUS_OK);
            num_submitted++;
        }
        assert_int_equal(imbrex_engine_step(engine, &has_work, NULL), IMBREX_STATUS_OK);
        assert_true(scheduler_check(&engine->scheduler));
        assert_true(kv_pool_check(&engine->kv_pool));
    }
    assert_int_equal(kv_pool_num_available(&engine->kv_pool), engine->kv_pool.num_blocks);
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_finish(&cases[i]);
        request_case_compare(&cases[i], i);
        request_case_reset(&cases[i]);
    }
    imbrex_engine_read_metrics(engine, &metrics);
    assert_true(metrics.num_preemptions > 0);
    printf("%d threads: %llu steps, %llu preemptions, %llu tokens, %llu cancelled, %.0f s\n",
           num_threads, (unsigned long long)metrics.num_steps,
           (unsigned long long)metrics.num_preemptions,
           (unsigned long long)metrics.num_generated_tokens,
           (unsigned long long)metrics.num_ended[IMBREX_FINISH_REASON_CANCELLED],
           (double)(clock_now_ns() - begin_ns) * 1e-9);
    imbrex_engine_destroy(engine);
}

static void test_soak(void **state)
{
    (void)state;
    struct imbrex_model *model;
    uint64_t random = 2026;
    assert_int_equal(imbrex_model_open(MODEL, NULL, &model, NULL), IMBREX_STATUS_OK);
    struct imbrex_engine *engine = create_engine(model, 4 * CONTEXT_SIZE, 2);
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_init(&cases[i], model,
                          &(struct request_case_limits){MAX_PROMPT, MAX_OUTPUT, 4, true}, &random);
        request_case_run_alone(&cases[i], engine);
    }
    imbrex_engine_destroy(engine);
    for (int32_t num_threads = 1; num_threads <= 2; num_threads++) {
        run_mix(model, num_threads, (uint64_t)num_threads);
    }
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_deinit(&cases[i]);
    }
    imbrex_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    return cmocka_run_group_tests_name("soak_engine", tests, NULL, NULL);
}
