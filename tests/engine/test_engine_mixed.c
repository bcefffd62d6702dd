/* SPDX-License-Identifier: Apache-2.0 */
/* Many requests at once on the built-in model: each gives what it gives alone, bit for bit,
 * whatever the device, the threads, the pool and the neighbours are. */
#include <stdlib.h>

#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/engine/request_cases.h"

/* A sanitizer makes the same steps cost some ten times as much. */
#define NUM_CASES (TEST_SANITIZED ? 24 : 120)
#define CONTEXT_SIZE 352

struct mix {
    int32_t kv_cache_tokens, max_running, max_step_tokens, num_threads;
    uint64_t fake_seed; /* 0: the CPU */
    bool batch_invariant;
};

struct fixture {
    struct imbrex_model *model;
    struct request_case cases[120];
};

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           struct device *device)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.num_threads = mix->num_threads;
    options.batch_invariant = mix->batch_invariant;
    return request_cases_engine(model, &options, device);
}

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    struct imbrex_engine *engine;
    uint64_t random = 1;
    if (fixture == NULL ||
        imbrex_model_open(NULL, NULL, &fixture->model, NULL) != IMBREX_STATUS_OK) {
        return 1;
    }
    engine = create_engine(fixture->model,
                           &(struct mix){.kv_cache_tokens = 4 * CONTEXT_SIZE,
                                         .num_threads = 1,
                                         .batch_invariant = true},
                           NULL);
    for (int32_t i = 0; i < NUM_CASES; i++) {
        request_case_init(&fixture->cases[i], fixture->model,
                          &(struct request_case_limits){300, 48, 4, false}, &random);
        request_case_run_alone(&fixture->cases[i], engine);
    }
    imbrex_engine_destroy(engine);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    request_cases_deinit(fixture->cases, NUM_CASES);
    imbrex_model_close(fixture->model);
    free(fixture);
    return 0;
}

struct overlap {
    const struct device *device; /* NULL: the CPU */
    bool was_seen;
};

static void look_for_overlap(void *user, struct imbrex_engine *engine, int32_t step,
                             int32_t num_submitted)
{
    struct overlap *overlap = user;
    (void)step, (void)num_submitted;
    overlap->was_seen |= overlap->device != NULL && engine->num_flights > 0 &&
                         device_fake_num_pending(overlap->device) > 0;
}

/* All cases at once, a few submitted before each of the first steps. Returns how often something
 * was preempted. */
static uint64_t run_mix(struct fixture *fixture, const struct mix *mix)
{
    struct device *device = NULL;
    struct imbrex_engine_metrics metrics;
    if (mix->fake_seed != 0) {
        assert_int_equal(device_fake_create(mix->fake_seed, &device, NULL), IMBREX_STATUS_OK);
    }
    struct imbrex_engine *engine = create_engine(fixture->model, mix, device);
    struct overlap overlap = {.device = device};
    const struct request_round round = {
        .num_at_once = 3, .after_step = look_for_overlap, .user = &overlap};
    (void)request_cases_run(fixture->cases, NUM_CASES, engine, &round);
    assert_int_equal(overlap.was_seen, device != NULL);
    assert_true(scheduler_is_idle(&engine->scheduler));
    assert_int_equal(kv_pool_num_available(&engine->kv_pool), engine->kv_pool.num_blocks);
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.num_submitted, NUM_CASES);
    assert_int_equal(metrics.num_running, 0);
    assert_int_equal(metrics.num_waiting, 0);
    assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
    imbrex_engine_destroy(engine);
    device_destroy(device);
    return metrics.num_preemptions;
}

/* Catches: a request that sees its neighbours: rows mixed up, a block shared by mistake, an order
 * of summation that depends on the batch. */
static void test_roomy(void **state)
{
    run_mix(*state, &(struct mix){.kv_cache_tokens = 1 << 16,
                                  .max_running = 48,
                                  .max_step_tokens = 128,
                                  .num_threads = 2,
                                  .batch_invariant = true});
}

/* Catches: a recomputation that goes wrong (ids, draws, penalties, prompt logprobs), copy-on-write
 * that comes too late. The pool holds hardly more than one request. */
static void test_tight(void **state)
{
    uint64_t num_preemptions = run_mix(*state, &(struct mix){.kv_cache_tokens = CONTEXT_SIZE + 48,
                                                             .max_running = 16,
                                                             .max_step_tokens = 40,
                                                             .num_threads = 1,
                                                             .batch_invariant = true});
    assert_true(num_preemptions > 0);
}

/* Catches: chunks that do not end on block edges but count as if they did; steps of a single token.
 */
static void test_small_steps(void **state)
{
    run_mix(*state, &(struct mix){.kv_cache_tokens = 2048,
                                  .max_running = 4,
                                  .max_step_tokens = 19,
                                  .num_threads = 2,
                                  .batch_invariant = false});
}

/* Catches: a host that waits for each step before it plans the next one; a step planned on what the
 * device has not done yet, a buffer reused while the device
 * still reads it, blocks given away while a step in flight uses them. */
static void test_fake_device(void **state)
{
    for (uint64_t seed = 1; seed <= (TEST_SANITIZED ? 1 : 3); seed++) {
        run_mix(*state, &(struct mix){.kv_cache_tokens = seed == 1 ? 1 << 14 : CONTEXT_SIZE + 64,
                                      .max_running = 24,
                                      .max_step_tokens = 64,
                                      .num_threads = 1,
                                      .fake_seed = seed,
                                      .batch_invariant = true});
    }
}

int run_engine_mixed_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_roomy),
        cmocka_unit_test(test_tight),
        cmocka_unit_test(test_small_steps),
        cmocka_unit_test(test_fake_device),
    };
    return cmocka_run_group_tests_name("engine_mixed", tests, set_up, tear_down);
}
