/* SPDX-License-Identifier: Apache-2.0 */
/* Requests with common beginnings, with a prefix cache and without: the same bits, whatever was in
 * the cache, whatever was evicted and whoever was preempted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/engine/request_cases.h"

#define NUM_CASES (TEST_SANITIZED ? 20 : CASE_BED_MAX_CASES)
#define CONTEXT_SIZE 352

struct mix {
    int32_t kv_cache_tokens, max_running, max_step_tokens, num_threads;
    uint64_t fake_seed; /* 0: the CPU */
    int32_t num_rounds; /* how often all cases run; from the second on they are in the cache */
    const char *policy;
    int32_t num_weak_bits; /* of keys; 0: whole ones */
    int32_t evict_every;   /* steps between evictions of some or all that is idle; 0: never */
};

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           const char *policy, struct device *device)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.num_threads = mix->num_threads;
    options.kv_policy = policy;
    return request_cases_engine(model, &options, device);
}

static int set_up(void **state)
{
    static struct case_bed bed;
    case_bed_open(&bed, NULL, NUM_CASES, CONTEXT_SIZE, 3);
    *state = &bed;
    return 0;
}

static int tear_down(void **state)
{
    case_bed_close(*state);
    return 0;
}

/* Whether steps in flight still read blocks that their sequences have changed for others; all of
 * them must be pinned. */
static bool has_pinned_duplicates(const struct imbrex_engine *engine)
{
    bool has_pinned = false;
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        const struct flight *flight = &engine->flights[i];
        for (int32_t j = 0; j < flight->num_pinned_blocks; j++) {
            assert_true(engine->kv_pool.num_pins[flight->pinned_blocks[j]] > 0);
            has_pinned = true;
        }
    }
    return has_pinned;
}

struct pinned_round {
    const struct mix *mix;
    uint64_t *random;
    bool has_pinned;
};

static void after_step(void *user, struct imbrex_engine *engine, int32_t step,
                       int32_t num_submitted)
{
    struct pinned_round *round = user;
    (void)num_submitted;
    round->has_pinned |= has_pinned_duplicates(engine);
    if (round->mix->evict_every > 0 && step % round->mix->evict_every == 0) {
        int32_t num_blocks = (int32_t)request_case_random(round->random, 30);
        kv_cache_make_room(engine->prefix.cache, engine->kv_pool.num_free + num_blocks, 0);
    }
}

static void run_round(struct case_bed *bed, const struct mix *mix, struct imbrex_engine *engine,
                      uint64_t *random)
{
    struct pinned_round pinned = {.mix = mix, .random = random};
    const struct request_round round = {.after_step = after_step, .user = &pinned};
    (void)request_cases_run(bed->cases, NUM_CASES, engine, &round);
    assert_int_equal(pinned.has_pinned, mix->fake_seed != 0);
}

static struct imbrex_engine_metrics run_mix(struct case_bed *bed, const struct mix *mix)
{
    struct device *device = NULL;
    struct imbrex_engine_metrics metrics;
    uint64_t random = 5;
    if (mix->fake_seed != 0) {
        assert_int_equal(device_fake_create(mix->fake_seed, &device, NULL), IMBREX_STATUS_OK);
    }
    struct imbrex_engine *engine =
        create_engine(bed->model, mix, mix->policy != NULL ? mix->policy : "lru", device);
    engine->prefix.identity.num_weak_bits = mix->num_weak_bits;
    kv_hasher_weaken(engine->prefix.hasher, mix->num_weak_bits);
    for (int32_t round = 0; round < mix->num_rounds; round++) {
        run_round(bed, mix, engine, &random);
    }
    assert_true(scheduler_is_idle(&engine->scheduler));
    imbrex_engine_read_metrics(engine, &metrics);
    struct kv_cache_metrics cache_metrics;
    kv_cache_read_metrics(engine->prefix.cache, &cache_metrics);
    assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
    assert_int_equal(cache_metrics.num_used, 0);
    assert_int_equal(cache_metrics.num_collisions > 0, mix->num_weak_bits > 0);
    assert_int_equal(metrics.num_key_collisions, cache_metrics.num_collisions);
    assert_true(cache_metrics.num_duplicates > 0);
    assert_int_equal(cache_metrics.num_evicted > 0, mix->kv_cache_tokens < 1 << 14);
    assert_true(metrics.num_cached_tokens > 0);
    assert_true(metrics.num_cached_tokens < metrics.num_queried_tokens);
    imbrex_engine_destroy(engine);
    device_destroy(device);
    return metrics;
}

/* Catches: cached blocks that do not hold what a prefill would have written, ids that the history
 * lacks (penalties), positions whose logprobs are wanted and which are skipped. */
static void test_roomy(void **state)
{
    run_mix(*state, &(struct mix){.kv_cache_tokens = 1 << 16,
                                  .max_running = 24,
                                  .max_step_tokens = 128,
                                  .num_threads = 2,
                                  .num_rounds = 2});
}

/* Catches: a block that is found before the step which fills it is done, a duplicate that returns
 * while a step in flight reads it. */
static void test_asynchronous(void **state)
{
    for (uint64_t seed = 1; seed <= (TEST_SANITIZED ? 1 : 3); seed++) {
        run_mix(*state, &(struct mix){.kv_cache_tokens = 1 << 14,
                                      .max_running = 24,
                                      .max_step_tokens = 64,
                                      .num_threads = 1,
                                      .fake_seed = seed,
                                      .num_rounds = 1});
    }
}

/* Catches: a preempted request that comes back wrong, be its blocks still there or not. */
static void test_tight(void **state)
{
    struct mix mix = {.kv_cache_tokens = CONTEXT_SIZE + 160,
                      .max_running = 16,
                      .max_step_tokens = 48,
                      .num_threads = 1,
                      .num_rounds = 1};
    for (uint64_t seed = 0; seed < 2; seed++) {
        mix.fake_seed = seed;
        mix.policy = seed == 0 ? "lru" : "predictive";
        assert_true(run_mix(*state, &mix).num_preemptions > 0);
    }
}

/* Catches: an eviction that takes what a request is about to use, or that leaves a path with a
 * hole. */
static void test_forced_eviction(void **state)
{
    struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE,
                      .max_running = 16,
                      .max_step_tokens = 64,
                      .num_threads = 1,
                      .num_rounds = 1,
                      .evict_every = 3};
    for (uint64_t seed = 0; seed < 2; seed++) {
        mix.fake_seed = seed;
        run_mix(*state, &mix);
    }
}

/* Keys of 8 bits: of some thousand blocks most collide. Catches: a block that is used for other
 * tokens because its key is equal; a request that loses its way after a collision, in its blocks or
 * when it is preempted; collisions that are not counted where a user looks. */
static void test_collisions(void **state)
{
    struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE,
                      .max_running = 16,
                      .max_step_tokens = 64,
                      .num_threads = 1,
                      .num_rounds = 2,
                      .num_weak_bits = 6};
    for (uint64_t seed = 0; seed < 2; seed++) {
        mix.fake_seed = seed;
        mix.policy = seed == 0 ? "lru" : "predictive";
        assert_true(run_mix(*state, &mix).num_key_collisions > 0);
    }
}

/* Runs the prompt alone; returns the tokens it found in the cache. */
static int32_t count_cached(struct imbrex_engine *engine, const int32_t *ids, int32_t num_ids,
                            const char *salt)
{
    return plain_prompt_end(plain_prompt_submit(engine, ids, num_ids, 1, salt)).num_cached_tokens;
}

/* Catches: tenants that see each other's blocks, a prompt that is cached to its last token and gets
 * no logits, output that is not found again, tokens counted as found that were not. */
static void test_what_is_found(void **state)
{
    struct case_bed *bed = *state;
    const struct mix mix = {.kv_cache_tokens = 1 << 14, .num_threads = 1};
    struct imbrex_engine *engine = create_engine(bed->model, &mix, "lru", NULL);
    struct imbrex_engine_metrics metrics;
    int32_t ids[64];
    for (int32_t i = 0; i < 64; i++) {
        ids[i] = 10 + i;
    }
    assert_int_equal(count_cached(engine, ids, 64, NULL), 0);
    assert_int_equal(count_cached(engine, ids, 64, NULL), 48);
    assert_int_equal(count_cached(engine, ids, 63, NULL), 48);
    assert_int_equal(count_cached(engine, ids, 48, NULL), 32);
    assert_int_equal(count_cached(engine, ids, 15, NULL), 0);
    assert_int_equal(count_cached(engine, ids, 64, "a"), 0);
    assert_int_equal(count_cached(engine, ids, 64, "b"), 0);
    assert_int_equal(count_cached(engine, ids, 64, "a"), 48);
    ids[0]++;
    assert_int_equal(count_cached(engine, ids, 64, NULL), 0);
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.num_queried_tokens, 6 * 64 + 63 + 48 + 15);
    assert_int_equal(metrics.num_cached_tokens, 3 * 48 + 32);
    assert_int_equal(metrics.num_prompt_tokens,
                     metrics.num_queried_tokens - metrics.num_cached_tokens);
    imbrex_engine_destroy(engine);

    /* What was generated is a prompt's beginning too. */
    engine = create_engine(bed->model, &mix, "lru", NULL);
    struct imbrex_request *request = plain_prompt_submit(engine, ids, 64, 40, NULL);
    int32_t longer[64 + 40];
    memcpy(longer, ids, sizeof(ids));
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(request->choices[0].num_output, 40);
    memcpy(longer + 64, request->choices[0].output_ids, 40 * sizeof(*longer));
    imbrex_request_destroy(request);
    /* The last token was drawn, not computed: of 103 there are 6 whole blocks. */
    assert_int_equal(count_cached(engine, longer, 104, NULL), 96);
    imbrex_engine_destroy(engine);
}

/* Catches: requests behind cached contexts of which one begins in a step though there are slots and
 * tokens for all; a step that takes more out of the cache than its memory was made for. */
static void test_beginning_together(void **state)
{
    enum { NUM_REQUESTS = 12, NUM_IDS = 321, NUM_CACHED = 320, STEP_TOKENS = 128 };
    const int32_t num_together = IMBREX_STEP_CACHED_TOKENS * STEP_TOKENS / NUM_CACHED;
    struct case_bed *bed = *state;
    const struct mix mix = {.kv_cache_tokens = 1 << 14,
                            .max_running = NUM_REQUESTS,
                            .max_step_tokens = STEP_TOKENS,
                            .num_threads = 1};
    struct imbrex_engine *engine = create_engine(bed->model, &mix, "lru", NULL);
    struct imbrex_request *requests[NUM_REQUESTS];
    struct imbrex_engine_metrics before, after;
    int32_t ids[NUM_IDS];
    for (int32_t i = 0; i < NUM_IDS; i++) {
        ids[i] = 10 + i % 400;
    }
    assert_int_equal(count_cached(engine, ids, NUM_IDS, NULL), 0);
    imbrex_engine_read_metrics(engine, &before);
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        requests[i] = plain_prompt_submit(engine, ids, NUM_IDS, 1, NULL);
    }
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        (void)plain_prompt_end(requests[i]);
    }
    imbrex_engine_read_metrics(engine, &after);
    assert_int_equal(after.num_cached_tokens - before.num_cached_tokens, NUM_REQUESTS * NUM_CACHED);
    assert_true(num_together < NUM_REQUESTS && NUM_REQUESTS <= 2 * num_together);
    assert_int_equal(after.num_steps - before.num_steps, 2);
    imbrex_engine_destroy(engine);
}

/* Of a model of two tensors, the first one large; the byte at flip_at is changed. */
static void digest_flipped(unsigned char *bytes, size_t num_bytes, size_t flip_at,
                           unsigned char digest[32])
{
    struct checkpoint_tensor tensors[2] = {
        {.name = "a", .dtype_name = "F32", .num_dims = 1, .elements = bytes},
        {.name = "b", .dtype_name = "F32", .num_dims = 1, .elements = bytes + num_bytes - 64},
    };
    const struct checkpoint_tensor *named[2] = {&tensors[0], &tensors[1]};
    struct checkpoint checkpoint = {.tensors = named, .num_tensors = 2};
    struct kv_hasher *hasher;
    tensors[0].num_bytes = num_bytes - 64;
    tensors[1].num_bytes = 64;
    tensors[0].shape[0] = (int64_t)tensors[0].num_bytes / 4;
    tensors[1].shape[0] = 16;
    assert_int_equal(kv_hasher_create(&hasher, NULL), IMBREX_STATUS_OK);
    bytes[flip_at] ^= 1;
    prefix_weight_digest(hasher, &checkpoint, digest);
    bytes[flip_at] ^= 1;
    kv_hasher_destroy(hasher);
}

/* Catches: a byte of the weights that the digest does not see, wherever it lies; a digest that
 * differs from run to run, with which nothing that is kept would be found again. */
static void test_weight_digest(void **state)
{
    struct case_bed *bed = *state;
    enum { NUM_BYTES = (1 << 21) + 64, STRIDE = TEST_SANITIZED ? 262139 : 32749 };
    unsigned char *bytes = calloc(NUM_BYTES, 1), whole[32], digest[32], last[32] = {0};
    struct kv_hasher *hasher;
    assert_non_null(bytes);
    digest_flipped(bytes, NUM_BYTES, 0, whole);
    for (size_t flip_at = 1; flip_at < NUM_BYTES; flip_at += STRIDE) {
        digest_flipped(bytes, NUM_BYTES, flip_at, digest);
        assert_memory_not_equal(digest, whole, 32);
        assert_memory_not_equal(digest, last, 32);
        memcpy(last, digest, 32);
    }
    digest_flipped(bytes, NUM_BYTES, NUM_BYTES - 1, digest);
    assert_memory_not_equal(digest, last, 32);
    digest_flipped(bytes, NUM_BYTES, 0, digest);
    assert_memory_equal(digest, whole, 32);
    free(bytes);

    assert_int_equal(kv_hasher_create(&hasher, NULL), IMBREX_STATUS_OK);
    prefix_weight_digest(hasher, &bed->model->checkpoint, whole);
    prefix_weight_digest(hasher, &bed->model->checkpoint, digest);
    assert_memory_equal(digest, whole, 32);
    kv_hasher_destroy(hasher);
}

/* Catches: blocks of one engine that another could take for its own, when nothing says that the
 * weights are still the same. */
static void test_identity(void **state)
{
    struct case_bed *bed = *state;
    const struct mix mix = {.num_threads = 1};
    struct imbrex_engine *engines[2];
    for (int32_t i = 0; i < 2; i++) {
        engines[i] = create_engine(bed->model, &mix, "lru", NULL);
    }
    const struct kv_identity *a = &engines[0]->prefix.identity, *b = &engines[1]->prefix.identity;
    assert_memory_not_equal(a->secret, b->secret, 32);
    assert_memory_not_equal(a->weight_digest, b->weight_digest, 32);
    for (int32_t i = 0; i < 2; i++) {
        imbrex_engine_destroy(engines[i]);
    }
}

/* Catches: a policy's name that is not checked, "none" taken for one, a cache that is there without
 * being asked for. */
static void test_policy_names(void **state)
{
    struct case_bed *bed = *state;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    struct imbrex_engine *engine = NULL;
    struct imbrex_error err;
    options.kv_policy = "best";
    assert_int_equal(imbrex_engine_create(bed->model, &options, &engine, &err),
                     IMBREX_STATUS_NOT_FOUND);
    assert_null(engine);
    assert_non_null(strstr(err.message, "\"best\""));
    options.kv_policy = "none";
    assert_int_equal(imbrex_engine_create(bed->model, &options, &engine, &err), IMBREX_STATUS_OK);
    assert_null(engine->prefix.cache);
    imbrex_engine_destroy(engine);
}

/* Catches: hints that are taken and get lost on their way to the policy. */
static void test_hints(void **state)
{
    struct case_bed *bed = *state;
    struct imbrex_engine *engine = create_engine(
        bed->model, &(struct mix){.kv_cache_tokens = 1024, .num_threads = 1}, "lru", NULL);
    struct imbrex_request *request;
    struct imbrex_request_options options = imbrex_request_options_default(bed->model);
    options.prompt_text = "Once upon a time";
    options.prompt_text_bytes = strlen(options.prompt_text);
    options.max_tokens = 1;
    options.session = 11;
    options.turn = 3;
    options.tenant = 7;
    options.expected_return_ns = 5000000000;
    options.is_session_end = true;
    assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
    const struct kv_fingerprint *fingerprint = &request->prefix.kv.fingerprint;
    assert_int_equal(fingerprint->session, 11);
    assert_int_equal(fingerprint->turn, 3);
    assert_int_equal(fingerprint->tenant, 7);
    assert_int_equal(fingerprint->expected_return_ns, 5000000000);
    assert_true(fingerprint->is_session_end);
    imbrex_request_destroy(request);
    imbrex_engine_destroy(engine);
}

int run_engine_prefix_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hints),
        cmocka_unit_test(test_roomy),
        cmocka_unit_test(test_asynchronous),
        cmocka_unit_test(test_tight),
        cmocka_unit_test(test_forced_eviction),
        cmocka_unit_test(test_what_is_found),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_collisions),
        cmocka_unit_test(test_policy_names),
        cmocka_unit_test(test_weight_digest),
        cmocka_unit_test(test_beginning_together),
    };
    return cmocka_run_group_tests_name("engine_prefix", tests, set_up, tear_down);
}
