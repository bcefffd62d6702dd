/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that run while their blocks come up, layer by layer, on a device whose streams overtake
 * each other: the same bits as alone and computed, whatever was cancelled, preempted or failed. */
#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/engine/request_cases.h"

#define NUM_CASES (TEST_SANITIZED ? 20 : CASE_BED_MAX_CASES)
#define NUM_FAULT_CASES (TEST_SANITIZED ? 20 : 40) /* where things fail: more rounds of fewer */
#define CONTEXT_SIZE 352
#define BLOCK_BYTES ((size_t)20480) /* of the built-in model, which has five layers */
#define ROOMY_TOKENS (NUM_CASES * CONTEXT_SIZE)

struct mix {
    uint64_t seed;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    int32_t num_groups;
    const char *policy;     /* NULL: lru */
    int32_t num_at_once;    /* requests that come before a step */
    int32_t num_idle_steps; /* between requests, for them to be alone now and then */
};

/* An engine on a fake device of its own. */
struct stage {
    struct device *device;
    struct imbrex_engine *engine;
    int32_t num_spoilt; /* requests that began again since a copy failed */
};

/* ---- set-up ---------------------------------------------------------------------------------- */

static void open_stage(struct imbrex_model *model, const struct mix *mix, struct stage *stage)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.num_threads = 1;
    options.kv_policy = mix->policy;
    options.kv_host_bytes = 4000 * BLOCK_BYTES;
    *stage = (struct stage){0};
    assert_int_equal(device_fake_create(mix->seed, &stage->device, NULL), IMBREX_STATUS_OK);
    stage->engine = request_cases_engine(model, &options, stage->device);
    /* Blocks of 20 KiB are too small to be parted, and nothing here may depend on the time. */
    assert_int_equal(stage->engine->tiers.num_groups, 1);
    prefix_tiers_set_groups(&stage->engine->tiers, executor_kv(stage->engine->executor),
                            mix->num_groups);
    stage->engine->tiers.max_layered_ns = INT64_MAX;
}

static struct imbrex_engine_metrics close_stage(struct stage *stage)
{
    struct imbrex_engine_metrics metrics;
    /* An engine without work does not step: what still comes up comes up for nobody. */
    for (int32_t i = 0; kv_tiers_is_promoting(stage->engine->tiers.tiers); i++) {
        assert_true(i < 10000);
        kv_tiers_wait(stage->engine->tiers.tiers, 1000000);
        prefix_tiers_look(&stage->engine->tiers, &stage->engine->scheduler);
        request_cases_check(stage->engine);
    }
    assert_null(stage->engine->tiers.arrival.sequence);
    assert_int_equal(stage->engine->tiers.arrival.num_left, 0);
    assert_int_equal(kv_pool_num_available(&stage->engine->kv_pool),
                     stage->engine->kv_pool.num_blocks);
    assert_true(scheduler_is_idle(&stage->engine->scheduler));
    imbrex_engine_read_metrics(stage->engine, &metrics);
    imbrex_engine_destroy(stage->engine);
    device_destroy(stage->device);
    return metrics;
}

static int set_up(void **state)
{
    static struct case_bed bed;
    case_bed_open(&bed, NULL, NUM_CASES, CONTEXT_SIZE, 5);
    *state = &bed;
    return 0;
}

static int tear_down(void **state)
{
    case_bed_close(*state);
    return 0;
}

static bool step(const struct stage *stage)
{
    bool has_work;
    assert_int_equal(imbrex_engine_step(stage->engine, &has_work, NULL), IMBREX_STATUS_OK);
    request_cases_check(stage->engine);
    return has_work;
}

/* What is idle goes down all the time. */
static void after_step(void *user, struct imbrex_engine *engine, int32_t step_idx,
                       int32_t num_submitted)
{
    (void)user, (void)step_idx, (void)num_submitted;
    kv_cache_clear(engine->prefix.cache, 0);
}

static void count_spoilt(void *user, const struct request_case *request_case)
{
    struct stage *stage = user;
    stage->num_spoilt += request_case->request->prefix.was_spoilt;
}

/* before_step: NULL: nothing. How many failed, if they may. */
static int32_t run_round(struct case_bed *bed, int32_t num_cases, const struct mix *mix,
                         struct stage *stage, request_cases_step_fn *before_step, bool may_fail)
{
    const struct request_round round = {.num_at_once = mix->num_at_once,
                                        .num_idle_steps = mix->num_idle_steps,
                                        .before_step = before_step,
                                        .after_step = after_step,
                                        .before_finish = count_spoilt,
                                        .user = stage,
                                        .may_fail = may_fail};
    return request_cases_run(bed->cases, num_cases, stage->engine, &round);
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* Catches: a group of layers that is computed before its blocks are there (a wait that is missing
 * or for the wrong event), slices that leave bytes out, a block of which the cache knows too early
 * or that goes twice, ids that the history lacks; with more groups than layers too. */
static void test_equal(void **state)
{
    static const char *const policies[] = {"lru", "predictive", "seed", "arc", "queue", "s3fifo"};
    static const int32_t groups[] = {2, 3, 4, 5, 8, 8};
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 6); seed++) {
        const struct mix mix = {.seed = seed,
                                .kv_cache_tokens = ROOMY_TOKENS,
                                .max_running = 16,
                                .max_step_tokens = seed % 2 == 0 ? 64 : 256,
                                .num_groups = groups[seed],
                                .policy = policies[seed],
                                .num_at_once = 1 + (int32_t)seed % 2,
                                .num_idle_steps = (int32_t)seed};
        struct stage stage;
        open_stage(((struct case_bed *)*state)->model, &mix, &stage);
        for (int32_t round = 0; round < 2; round++) {
            (void)run_round(*state, NUM_CASES, &mix, &stage, NULL, false);
        }
        struct imbrex_engine_metrics metrics = close_stage(&stage);
        assert_true(metrics.num_kv_layered > (TEST_SANITIZED ? 0 : 20));
        assert_true(metrics.num_host_tokens > 0);
        assert_true(metrics.num_host_tokens <= metrics.num_cached_tokens);
        assert_true(metrics.num_cached_tokens <= metrics.num_queried_tokens);
        assert_int_equal(metrics.num_kv_faults, 0);
    }
}

/* A cache that holds hardly more than one request. Catches: a request that is preempted while its
 * blocks come up and loses or keeps them, room that counts twice, a request that waits for ever. */
static void test_preempted(void **state)
{
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 1 : 3); seed++) {
        const struct mix mix = {.seed = seed,
                                .kv_cache_tokens = CONTEXT_SIZE + 48,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .num_groups = 3,
                                .num_at_once = 2,
                                .num_idle_steps = 4};
        struct stage stage;
        open_stage(((struct case_bed *)*state)->model, &mix, &stage);
        for (int32_t round = 0; round < 2; round++) {
            (void)run_round(*state, NUM_CASES, &mix, &stage, NULL, false);
        }
        struct imbrex_engine_metrics metrics = close_stage(&stage);
        assert_true(metrics.num_kv_layered > 0);
        assert_true(metrics.num_preemptions > 0);
        assert_int_equal(metrics.num_kv_faults, 0);
    }
}

/* ---- one request ----------------------------------------------------------------------------- */

static struct imbrex_request *submit_prompt(const struct stage *stage, int32_t max_tokens)
{
    int32_t ids[PLAIN_PROMPT_TOKENS];
    plain_prompt_fill(ids);
    return plain_prompt_submit(stage->engine, ids, PLAIN_PROMPT_TOKENS, max_tokens, NULL);
}

static struct imbrex_request_metrics end_prompt(const struct stage *stage,
                                                struct imbrex_request *request)
{
    struct imbrex_request_metrics metrics = plain_prompt_end(request);
    request_cases_check(stage->engine);
    return metrics;
}

static struct imbrex_request_metrics run_prompt(const struct stage *stage)
{
    return end_prompt(stage, submit_prompt(stage, 4));
}

static uint64_t num_layered(const struct stage *stage)
{
    struct imbrex_engine_metrics metrics;
    imbrex_engine_read_metrics(stage->engine, &metrics);
    return metrics.num_kv_layered;
}

static const struct mix alone = {.seed = 3,
                                 .kv_cache_tokens = 4 * CONTEXT_SIZE,
                                 .max_running = 8,
                                 .max_step_tokens = 64,
                                 .num_groups = 4};

/* Catches: a layer-wise start where there is one group or the load is too slow for others, tokens
 * that come up under a step and are counted as computed or twice, blocks that the cache does not
 * have afterwards. */
static void test_counts(void **state)
{
    struct case_bed *bed = *state;
    for (int32_t num_groups = 1; num_groups <= 4; num_groups += 3) {
        struct mix mix = alone;
        struct stage stage;
        mix.num_groups = num_groups;
        open_stage(bed->model, &mix, &stage);
        uint64_t expected = num_groups > 1;
        assert_int_equal(run_prompt(&stage).num_cached_tokens, 0);
        kv_cache_clear(stage.engine->prefix.cache, 0);
        struct imbrex_request_metrics metrics = run_prompt(&stage);
        assert_int_equal(metrics.num_cached_tokens, 192);
        assert_int_equal(metrics.num_host_tokens, 192);
        assert_int_equal(num_layered(&stage), expected);
        metrics = run_prompt(&stage);
        assert_int_equal(metrics.num_cached_tokens, 192);
        assert_int_equal(metrics.num_host_tokens, 0);
        assert_int_equal(num_layered(&stage), expected);
        /* Only what is not there comes up. */
        struct kv_cache_metrics before, after;
        kv_cache_read_metrics(stage.engine->prefix.cache, &before);
        kv_cache_make_room(stage.engine->prefix.cache, stage.engine->kv_pool.num_blocks - 5, 0);
        metrics = run_prompt(&stage);
        kv_cache_read_metrics(stage.engine->prefix.cache, &after);
        assert_int_equal(metrics.num_cached_tokens, 192);
        assert_int_equal(metrics.num_host_tokens, 7 * KV_BLOCK_SIZE);
        assert_int_equal(after.num_promoted - before.num_promoted, 7);
        assert_int_equal(num_layered(&stage), 2 * expected);
        struct imbrex_engine_metrics totals = close_stage(&stage);
        assert_int_equal(totals.num_cached_tokens, 3 * 192);
        assert_int_equal(totals.num_host_tokens, 192 + 7 * KV_BLOCK_SIZE);
        assert_int_equal(totals.num_prompt_tokens,
                         PLAIN_PROMPT_TOKENS + 3 * (PLAIN_PROMPT_TOKENS - 192));
    }
}

/* Catches: others that wait for a load that takes longer than the step. */
static void test_slow_load(void **state)
{
    struct case_bed *bed = *state;
    struct stage stage;
    open_stage(bed->model, &alone, &stage);
    (void)run_prompt(&stage);
    kv_cache_clear(stage.engine->prefix.cache, 0);
    struct imbrex_request *other = submit_prompt(&stage, 40);
    while (stage.engine->scheduler.num_running == 0) {
        (void)step(&stage);
    }
    assert_int_equal(num_layered(&stage), 1); /* nobody was there */
    (void)step(&stage);
    stage.engine->tiers.max_layered_ns = 11 * stage.engine->tiers.sliced_block_ns;
    assert_int_equal(run_prompt(&stage).num_cached_tokens, 192); /* found: nothing to load */
    assert_int_equal(imbrex_request_wait(other, NULL), IMBREX_STATUS_OK);
    imbrex_request_destroy(other);

    int32_t ids[] = {5, 6, 7};
    struct imbrex_request_options options = imbrex_request_options_default(bed->model);
    options.prompt_ids = ids;
    options.num_prompt_ids = 3;
    options.max_tokens = 300;
    options.ignore_eos = true;
    for (int32_t is_fast = 0; is_fast < 2; is_fast++) {
        kv_cache_clear(stage.engine->prefix.cache, 0);
        stage.engine->tiers.max_layered_ns = (11 + is_fast) * stage.engine->tiers.sliced_block_ns;
        assert_int_equal(imbrex_request_submit(stage.engine, &options, &other, NULL),
                         IMBREX_STATUS_OK);
        while (stage.engine->scheduler.num_running == 0) {
            (void)step(&stage);
        }
        assert_int_equal(run_prompt(&stage).num_host_tokens, 192);
        assert_int_equal(num_layered(&stage), 1 + (uint64_t)is_fast);
        assert_true(stage.engine->scheduler.num_running == 1);
        imbrex_request_cancel(other);
        assert_int_equal(imbrex_request_wait(other, NULL), IMBREX_STATUS_OK);
        imbrex_request_destroy(other);
    }
    (void)close_stage(&stage);
}

/* Catches: a block that is given out while it is still copied into, or never again; a request that
 * cannot end before its load has, or that the load finds again when it has ended. */
static void test_cancel_under_way(void **state)
{
    struct case_bed *bed = *state;
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 8 : 30); seed++) {
        struct mix mix = alone;
        struct stage stage;
        mix.seed = seed;
        mix.kv_cache_tokens = CONTEXT_SIZE; /* others soon get the blocks */
        open_stage(bed->model, &mix, &stage);
        (void)run_prompt(&stage);
        kv_cache_clear(stage.engine->prefix.cache, 0);
        struct imbrex_request *request = submit_prompt(&stage, 4);
        while (stage.engine->scheduler.num_running == 0) {
            (void)step(&stage);
        }
        assert_int_equal(num_layered(&stage), 1);
        assert_int_equal(stage.engine->tiers.arrival.num_left, 12);
        for (uint64_t i = 0; i < seed % 3; i++) {
            (void)step(&stage);
        }
        imbrex_request_cancel(request);
        const struct request_round at_once = {.num_at_once = NUM_CASES};
        (void)request_cases_run(bed->cases, NUM_CASES / 10, stage.engine, &at_once);
        assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
        imbrex_request_destroy(request);
        (void)close_stage(&stage);
    }
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void fail_copies_in(void *user, struct imbrex_engine *engine, int32_t step_idx,
                           int32_t num_submitted)
{
    struct stage *stage = user;
    (void)engine, (void)num_submitted;
    device_fake_aim(stage->device, DEVICE_STREAM_KV_IN);
    if (step_idx % 3 == 0) {
        device_fake_fail(stage->device,
                         step_idx % 2 == 0 ? DEVICE_FAKE_FAULT_COPY : DEVICE_FAKE_FAULT_CALL,
                         1 + step_idx % 11, IMBREX_STATUS_IO);
    }
}

static void end_faults(const struct stage *stage)
{
    device_fake_fail(stage->device, DEVICE_FAKE_FAULT_COPY, 0, IMBREX_STATUS_OK);
    device_fake_fail(stage->device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
    device_fake_fail(stage->device, DEVICE_FAKE_FAULT_WORK, 0, IMBREX_STATUS_OK);
}

/* Copies up fail, and nothing else does. Catches: a token that was drawn from blocks that did not
 * come up, such a block, or one computed on it, that the cache gives to somebody; a request that
 * fails, or ends, because of it; a step in flight behind it that counts. */
static void test_copy_faults(void **state)
{
    struct case_bed *bed = *state;
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 8); seed++) {
        const struct mix mix = {.seed = seed,
                                .kv_cache_tokens = ROOMY_TOKENS,
                                .max_running = 16,
                                .max_step_tokens = seed % 2 == 0 ? 64 : 256,
                                .num_groups = 2 + (int32_t)seed % 4,
                                .num_at_once = 1,
                                .num_idle_steps = (int32_t)seed % 3};
        struct stage stage;
        open_stage(bed->model, &mix, &stage);
        for (int32_t round = 0; round < 3; round++) {
            (void)run_round(bed, NUM_FAULT_CASES, &mix, &stage, fail_copies_in, false);
        }
        end_faults(&stage);
        struct imbrex_engine_metrics metrics = close_stage(&stage);
        assert_true(metrics.num_kv_layered > 0);
        assert_true(metrics.num_kv_faults > 0);
        assert_true(stage.num_spoilt > 0);
        assert_int_equal(metrics.num_failed_steps, 0);
        assert_int_equal(metrics.num_bad_logits, 0);
    }
}

/* Every copy of one load fails in turn. Catches the same of each slice, and cached tokens that are
 * counted though they were computed. */
static void test_each_fault(void **state)
{
    struct case_bed *bed = *state;
    struct stage stage;
    open_stage(bed->model, &alone, &stage);
    (void)run_prompt(&stage);
    device_fake_aim(stage.device, DEVICE_STREAM_KV_IN);
    for (int32_t i = 1; i <= 4 * 12; i++) {
        kv_cache_clear(stage.engine->prefix.cache, 0);
        device_fake_fail(stage.device, DEVICE_FAKE_FAULT_COPY, i, IMBREX_STATUS_IO);
        struct imbrex_request *request = submit_prompt(&stage, 4);
        stage.engine->tiers.patience_ns = INT64_MAX;
        while (stage.engine->scheduler.num_running == 0) {
            (void)step(&stage);
        }
        /* Nobody waits for a second attempt: the blocks are computed. */
        stage.engine->tiers.patience_ns = 1;
        struct imbrex_request_metrics metrics = end_prompt(&stage, request);
        assert_int_equal(metrics.num_cached_tokens, 0);
        assert_int_equal(metrics.num_host_tokens, 0);
        assert_int_equal(metrics.num_preemptions, 1);
        assert_int_equal(metrics.num_generated_tokens, 4);
        assert_int_equal(num_layered(&stage), (uint64_t)i);
    }
    struct imbrex_engine_metrics totals = close_stage(&stage);
    assert_true(totals.num_kv_faults >= (uint64_t)(4 * 12 * 12));
    assert_int_equal(totals.num_failed_steps, 0);
}

static void cancel_some(void *user, struct imbrex_engine *engine, int32_t step_idx,
                        int32_t num_submitted)
{
    fail_copies_in(user, engine, step_idx, num_submitted);
    const struct sequence *sequence = engine->tiers.arrival.sequence;
    if (sequence != NULL && step_idx % 3 != 0) {
        const struct request_choice *choice = sequence->owner;
        imbrex_request_cancel(choice->request);
    }
}

/* All of it at once. Catches: a request that was cancelled and spoilt, and counts twice or never
 * ends. */
static void test_cancel_and_faults(void **state)
{
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 6); seed++) {
        const struct mix mix = {.seed = 50 + seed,
                                .kv_cache_tokens = seed % 2 == 0 ? ROOMY_TOKENS : 3 * CONTEXT_SIZE,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .num_groups = 4,
                                .num_at_once = 1,
                                .num_idle_steps = 1};
        struct stage stage;
        open_stage(((struct case_bed *)*state)->model, &mix, &stage);
        for (int32_t round = 0; round < 2; round++) {
            (void)run_round(*state, NUM_FAULT_CASES, &mix, &stage, cancel_some, false);
        }
        end_faults(&stage);
        struct imbrex_engine_metrics metrics = close_stage(&stage);
        assert_true(metrics.num_kv_layered > 0);
        assert_true(metrics.num_ended[IMBREX_FINISH_REASON_CANCELLED] > 0);
    }
}

static void fail_steps(void *user, struct imbrex_engine *engine, int32_t step_idx,
                       int32_t num_submitted)
{
    struct stage *stage = user;
    (void)engine, (void)num_submitted;
    if (step_idx % 4 == 0) {
        device_fake_fail(stage->device, (enum device_fake_fault)(step_idx / 4 % 3),
                         1 + step_idx % 13, IMBREX_STATUS_IO);
    }
}

/* Anything may fail, the waits too. A step that fails takes its requests with it, and only these.
 * Catches: one that runs on although the step that was to wait for its blocks failed. */
static void test_step_faults(void **state)
{
    struct case_bed *bed = *state;
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 6); seed++) {
        const struct mix mix = {.seed = 90 + seed,
                                .kv_cache_tokens = ROOMY_TOKENS,
                                .max_running = 4,
                                .max_step_tokens = 32,
                                .num_groups = 4,
                                .num_at_once = 1,
                                .num_idle_steps = 1};
        struct stage stage;
        int32_t num_failed = 0;
        open_stage(bed->model, &mix, &stage);
        for (int32_t round = 0; round < 3; round++) {
            num_failed += run_round(bed, NUM_FAULT_CASES, &mix, &stage, fail_steps, true);
            end_faults(&stage);
        }
        struct imbrex_engine_metrics metrics = close_stage(&stage);
        assert_true(num_failed > 0 && num_failed < 3 * NUM_FAULT_CASES);
        assert_true(metrics.num_kv_layered > 0 || TEST_SANITIZED);
    }
}

/* The device fails for good, at each call of a load and the step over it. Catches: an engine that
 * waits for copies that nobody tells of, or leaves something behind; a request that ends well. */
static void test_lost_device(void **state)
{
    struct case_bed *bed = *state;
    int32_t num_lost = 0;
    for (int32_t i = 1; i <= (TEST_SANITIZED ? 15 : 45); i++) {
        struct stage stage;
        open_stage(bed->model, &alone, &stage);
        (void)run_prompt(&stage);
        kv_cache_clear(stage.engine->prefix.cache, 0);
        struct imbrex_request *request = submit_prompt(&stage, 4);
        device_fake_fail(stage.device, DEVICE_FAKE_FAULT_CALL, i, IMBREX_STATUS_DEVICE);
        enum imbrex_status status = imbrex_request_wait(request, NULL);
        num_lost += status == IMBREX_STATUS_DEVICE;
        assert_true(status == IMBREX_STATUS_DEVICE || !stage.device->has_failed);
        imbrex_request_destroy(request);
        assert_null(stage.engine->tiers.arrival.sequence);
        imbrex_engine_destroy(stage.engine);
        device_destroy(stage.device);
    }
    assert_true(num_lost > 10);
}

int run_engine_layers_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_slow_load),
        cmocka_unit_test(test_equal),
        cmocka_unit_test(test_preempted),
        cmocka_unit_test(test_cancel_under_way),
        cmocka_unit_test(test_each_fault),
        cmocka_unit_test(test_copy_faults),
        cmocka_unit_test(test_cancel_and_faults),
        cmocka_unit_test(test_step_faults),
        cmocka_unit_test(test_lost_device),
    };
    return cmocka_run_group_tests_name("engine_layers", tests, set_up, tear_down);
}
