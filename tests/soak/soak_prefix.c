/* SPDX-License-Identifier: Apache-2.0 */
/* A thousand prompts with common beginnings on a small real model: with the prefix cache each gives
 * what it gives without, bit for bit, under eviction at random moments and after preemption, out of
 * RAM, off a disk, after a restart, and through a device whose copies come late.
 *
 * Catches: what test_engine_prefix.c and test_engine_tiers.c catch, on a model whose attention has
 * several kv heads and whose logits are close. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/engine/request_cases.h"

#define MODEL "tests/golden/qwen2-tiny-4m"
#define NUM_CASES 1000
#define CONTEXT_SIZE 320
#define MAX_PROMPT 300
#define MAX_OUTPUT 16
#define NUM_PREFIXES 8
#define FOLDER TEST_BUILD_DIR "/tests/kv-soak"

static struct request_case cases[NUM_CASES];

struct mix {
    const char *policy;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    int32_t evict_every; /* steps between evictions of what is idle; 0: never */
    size_t host_bytes;   /* 0: no RAM below the first tier */
    bool has_disk;
    uint64_t fake_seed; /* 0: the CPU */
};

static void empty_folder(void)
{
    char path[600];
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
        (void)unlink(path);
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
}

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           struct device *device)
{
    struct imbrex_engine *engine;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.kv_policy = mix->policy;
    options.kv_host_bytes = mix->host_bytes;
    options.kv_disk_path = mix->has_disk ? FOLDER : NULL;
    options.kv_disk_bytes = mix->has_disk ? (size_t)1 << 30 : 0;
    assert_int_equal(engine_create_on(model, &options, device, &engine, NULL), IMBREX_STATUS_OK);
    if (mix->host_bytes > 0 || mix->has_disk) {
        engine->tiers.patience_ns = INT64_MAX; /* what is below is always waited for */
    }
    return engine;
}

static void run_mix(struct imbrex_model *model, const struct mix *mix)
{
    struct device *device = NULL;
    struct imbrex_engine_metrics metrics;
    if (mix->fake_seed != 0) {
        assert_int_equal(device_fake_create(mix->fake_seed, &device, NULL), IMBREX_STATUS_OK);
    }
    struct imbrex_engine *engine = create_engine(model, mix, device);
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
        assert_true(engine->tiers.tiers == NULL || kv_tiers_check(engine->tiers.tiers));
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
    /* What comes up ahead may be on its way still. */
    assert_int_equal(kv_pool_num_available(&engine->kv_pool) + engine->kv_pool.num_pinned,
                     metrics.kv_num_blocks);
    assert_true(metrics.num_cached_tokens > 0);
    assert_int_equal(metrics.num_kv_faults, 0);
    assert_int_equal(metrics.num_host_tokens + metrics.num_disk_tokens > 0,
                     mix->host_bytes > 0 || mix->has_disk);
    printf("%s, %d tokens of cache: %llu of %llu prompt tokens found, %llu of them in RAM and %llu "
           "on disk, %llu blocks ahead, %llu preemptions, %.0f s\n",
           mix->policy, mix->kv_cache_tokens, (unsigned long long)metrics.num_cached_tokens,
           (unsigned long long)metrics.num_queried_tokens,
           (unsigned long long)metrics.num_host_tokens, (unsigned long long)metrics.num_disk_tokens,
           (unsigned long long)metrics.num_kv_ahead, (unsigned long long)metrics.num_preemptions,
           (double)(clock_now_ns() - begin_ns) * 1e-9);
    imbrex_engine_destroy(engine);
    device_destroy(device);
}

static void test_soak(void **state)
{
    (void)state;
    static const struct mix mixes[] = {
        {"lru", 1 << 16, 32, 128, 0, 0, false, 0},
        {"predictive", 1 << 13, 32, 128, 5, 0, false, 0},
        {"lru", CONTEXT_SIZE + 480, 16, 64, 7, 0, false, 0},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, 0},
        {"lru", 1 << 11, 16, 64, 7, 0, true, 0},
        {"seed", 1 << 11, 16, 64, 7, (size_t)16 << 20, true, 0}, /* the folder of the one before */
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, 3},
    };
    struct imbrex_model *model;
    uint64_t random = 77;
    static int32_t prefixes[NUM_PREFIXES][MAX_PROMPT];
    assert_int_equal(imbrex_model_open(MODEL, NULL, &model, NULL), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_PREFIXES * MAX_PROMPT; i++) {
        prefixes[i / MAX_PROMPT][i % MAX_PROMPT] = (int32_t)request_case_random(&random, 4000);
    }
    struct imbrex_engine *engine = create_engine(model, &(struct mix){.policy = "none"}, NULL);
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
    empty_folder();
    for (size_t i = 0; i < sizeof(mixes) / sizeof(mixes[0]); i++) {
        run_mix(model, &mixes[i]);
    }
    empty_folder();
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
