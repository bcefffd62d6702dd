/* SPDX-License-Identifier: Apache-2.0 */
/* A thousand prompts with common beginnings on a small real model: with the prefix cache each gives
 * what it gives without, bit for bit, under eviction at random moments and after preemption.
 *
 * Catches: what test_engine_prefix.c catches, on a model whose attention has several kv heads and
 * whose logits are close. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "tests/engine/request_cases.h"

#define MODEL "tests/golden/qwen2-tiny-4m"
#define NUM_CASES 1000
#define CONTEXT_SIZE 320
#define MAX_PROMPT 300
#define MAX_OUTPUT 16
#define NUM_PREFIXES 8

static struct request_case cases[NUM_CASES];

struct mix {
    const char *policy;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    int32_t evict_every; /* steps between evictions of what is idle; 0: never */
};

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix)
{
    struct imbrex_engine *engine;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.kv_policy = mix->policy;
    assert_int_equal(imbrex_engine_create(model, &options, &engine, NULL), IMBREX_STATUS_OK);
    return engine;
}

static void run_mix(struct imbrex_model *model, const struct mix *mix)
{
    struct imbrex_engine *engine = create_engine(model, mix);
    struct imbrex_engine_metrics metrics;
    int64_t begin_ns = clock_now_ns();
    int32_t num_submitted = 0;
    uint64_t random = 9;
    bool has_work = true;
    for (int32_t step = 1; has_work || num_submitted < NUM_CASES; step++) {
        for (int32_t i = 0; i < 2 && num_submitted < NUM_CASES; i++) {
            assert_int_equal(request_case_submit(&cases[num_submitted], engine), IMBREX_STATUS_OK);
            num_submitted++;
        }
        assert_int_equal(imbrex_engine_step(engine, &has_work, NULL), IMBREX_STATUS_OK);
        assert_true(scheduler_check(&engine->scheduler));
        assert_true(kv_cache_check(engine->prefix.cache));
        if (mix->evict_every > 0 && step % mix->evict_every == 0) {
            int32_t num_blocks = (int32_t)request_case_random(&random, 60);
            kv_cache_make_room(engine->prefix.cache, engine->kv_pool.num_free + num_blocks, 0);
        }
    }
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_finish(&cases[i]);
        request_case_compare(&cases[i], i);
        request_case_reset(&cases[i]);
    }
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
    assert_true(metrics.num_cached_tokens > 0);
    printf("%s, %d tokens of cache: %llu of %llu prompt tokens found, %llu preemptions, %.0f s\n",
           mix->policy, mix->kv_cache_tokens, (unsigned long long)metrics.num_cached_tokens,
           (unsigned long long)metrics.num_queried_tokens,
           (unsigned long long)metrics.num_preemptions, (double)(clock_now_ns() - begin_ns) * 1e-9);
    imbrex_engine_destroy(engine);
}

static void test_soak(void **state)
{
    (void)state;
    static const struct mix mixes[] = {
        {"lru", 1 << 16, 32, 128, 0},
        {"predictive", 1 << 13, 32, 128, 5},
        {"lru", CONTEXT_SIZE + 480, 16, 64, 7},
    };
    struct imbrex_model *model;
    uint64_t random = 77;
    static int32_t prefixes[NUM_PREFIXES][MAX_PROMPT];
    assert_int_equal(imbrex_model_open(MODEL, NULL, &model, NULL), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_PREFIXES * MAX_PROMPT; i++) {
        prefixes[i / MAX_PROMPT][i % MAX_PROMPT] = (int32_t)request_case_random(&random, 4000);
    }
    struct imbrex_engine *engine = create_engine(model, &(struct mix){.policy = "none"});
    for (int32_t i = 0; i < NUM_CASES; i++) {
        struct request_case *request_case = &cases[i];
        request_case_init(request_case, model,
                          &(struct request_case_limits){MAX_PROMPT, MAX_OUTPUT, 2, false}, &random);
        uint32_t num_ids = (uint32_t)request_case->options.num_prompt_ids;
        uint32_t num_shared = request_case_random(&random, num_ids + 1);
        memcpy(request_case->prompt_ids, prefixes[request_case_random(&random, NUM_PREFIXES)],
               num_shared * sizeof(int32_t));
        request_case_run_alone(request_case, engine);
    }
    imbrex_engine_destroy(engine);
    for (size_t i = 0; i < sizeof(mixes) / sizeof(mixes[0]); i++) {
        run_mix(model, &mixes[i]);
    }
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_deinit(&cases[i]);
    }
    imbrex_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    return cmocka_run_group_tests_name("soak_prefix", tests, NULL, NULL);
}
