/* SPDX-License-Identifier: Apache-2.0 */
/* A thousand prompts with common beginnings on a small real model: with the prefix cache each gives
 * what it gives without, bit for bit, under eviction at random moments and after preemption, out of
 * RAM, off a disk, after a restart, through a server, and through a device whose copies come late.
 *
 *   soak_prefix [--device NAME] [--cases N] [--tie-gap LOGPROB]
 *
 * NAME as for imbrex ("cpu" unless said, "cuda", "cuda:1"); the mixes on the fake device are those
 * of a CPU. With a gap the engines are not batch invariant, as a GPU's are not unless asked, all
 * requests are greedy, and ids may part where two have logprobs no further apart than that. Reads
 * tests/golden/qwen2-tiny-4m from the folder that it runs in.
 *
 * Catches: what test_engine_prefix.c and test_engine_tiers.c catch, on a model whose attention has
 * several kv heads and whose logits are close. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "kv/kv_remote_link.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/engine/request_cases.h"
#include "tests/kv/redis_server.h"

#define MODEL "tests/golden/qwen2-tiny-4m"
#define MAX_CASES 1000
#define CONTEXT_SIZE 320
#define MAX_PROMPT 300
#define MAX_OUTPUT 16
#define NUM_PREFIXES 8
#define FOLDER TEST_BUILD_DIR "/tests/kv-soak"

static struct request_case cases[MAX_CASES];
static int32_t num_cases = MAX_CASES;
static const char *device_option = "cpu";
static float tie_gap; /* 0: bit for bit */

struct mix {
    const char *policy;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    int32_t evict_every; /* steps between evictions of what is idle; 0: never */
    size_t host_bytes;   /* 0: no RAM below the first tier */
    bool has_disk, has_remote;
    uint64_t fake_seed; /* 0: the device that was named */
};

struct run {
    const struct mix *mix;
    uint64_t random;
};

static bool has_tiers(const struct mix *mix)
{
    return mix->host_bytes > 0 || mix->has_disk || mix->has_remote;
}

/* port: of the server. */
static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           struct device *device, int32_t port)
{
    char url[64];
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = device_option;
    options.batch_invariant = tie_gap > 0.0f ? IMBREX_INVARIANCE_OFF : IMBREX_INVARIANCE_ON;
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.kv_policy = mix->policy;
    options.kv_host_bytes = mix->host_bytes;
    options.kv_disk_path = mix->has_disk ? FOLDER : NULL;
    options.kv_disk_bytes = mix->has_disk ? (size_t)1 << 30 : 0;
    (void)snprintf(url, sizeof(url), "redis://127.0.0.1:%d", (int)port);
    options.kv_remote_url = mix->has_remote ? url : NULL;
    return request_cases_engine(model, &options, device);
}

static void after_step(void *user, struct imbrex_engine *engine, int32_t step,
                       int32_t num_submitted)
{
    struct run *run = user;
    (void)num_submitted;
    if (run->mix->evict_every > 0 && step % run->mix->evict_every == 0) {
        int32_t num_blocks = (int32_t)request_case_random(&run->random, 60);
        kv_cache_make_room(engine->prefix.cache, engine->kv_pool.num_free + num_blocks, 0);
    }
}

/* More than a few are wrong numbers that happen to be near. */
static void check_ties(void)
{
    int32_t num_ties = 0;
    for (int32_t i = 0; i < num_cases && tie_gap > 0.0f; i++) {
        num_ties += request_case_has_tie(&cases[i]);
    }
    if (tie_gap > 0.0f) {
        printf("  %d of %d requests part at a tie\n", (int)num_ties, (int)num_cases);
    }
    assert_true(num_ties <= num_cases / 20);
}

static void run_mix(struct imbrex_model *model, const struct mix *mix, int32_t port)
{
    struct device *device = NULL;
    struct imbrex_engine_metrics metrics;
    struct run run = {.mix = mix, .random = 9};
    if (mix->fake_seed != 0) {
        assert_int_equal(device_fake_create(mix->fake_seed, &device, NULL), IMBREX_STATUS_OK);
    }
    struct imbrex_engine *engine = create_engine(model, mix, device, port);
    int64_t begin_ns = clock_now_ns();
    const struct request_round round = {.after_step = after_step, .user = &run};
    (void)request_cases_run(cases, num_cases, engine, &round);
    imbrex_engine_read_metrics(engine, &metrics);
    /* What comes up ahead may be on its way still. */
    assert_int_equal(kv_pool_num_available(&engine->kv_pool) + engine->kv_pool.num_pinned,
                     metrics.kv_num_blocks);
    assert_true(metrics.num_cached_tokens > 0);
    assert_int_equal(metrics.num_kv_faults, 0);
    assert_int_equal(metrics.num_host_tokens + metrics.num_disk_tokens + metrics.num_remote_tokens >
                         0,
                     has_tiers(mix));
    assert_int_equal(metrics.num_remote_tokens > 0, mix->has_remote);
    printf("%s, %d tokens of cache: %llu of %llu prompt tokens found, %llu of them in RAM, %llu on "
           "disk and %llu on a server, %llu blocks ahead, %llu preemptions, %.0f s\n",
           mix->policy, mix->kv_cache_tokens, (unsigned long long)metrics.num_cached_tokens,
           (unsigned long long)metrics.num_queried_tokens,
           (unsigned long long)metrics.num_host_tokens, (unsigned long long)metrics.num_disk_tokens,
           (unsigned long long)metrics.num_remote_tokens, (unsigned long long)metrics.num_kv_ahead,
           (unsigned long long)metrics.num_preemptions, (double)(clock_now_ns() - begin_ns) * 1e-9);
    check_ties();
    (void)fflush(stdout);
    imbrex_engine_destroy(engine);
    device_destroy(device);
}

/* Twice: into a server that has nothing, and out of it. */
static void run_remote(struct imbrex_model *model)
{
    static const struct mix mixes[] = {
        {"lru", 1 << 11, 16, 64, 7, 0, false, true, 0},
        {"lru", 1 << 11, 16, 64, 7, 0, false, true, 0},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)16 << 20, true, true, 0},
        {"predictive", 1 << 11, 16, 64, 7, 0, false, true, 5},
    };
    struct redis_server server;
    if (!kv_remote_link_is_built() || !redis_server_is_there()) {
        printf("SKIP: no redis-server, or a build without hiredis\n");
        return;
    }
    redis_server_start(&server, NULL, NULL);
    for (size_t i = 0; i < sizeof(mixes) / sizeof(mixes[0]); i++) {
        fixture_empty_folder(FOLDER);
        if (mixes[i].fake_seed == 0 || strcmp(device_option, "cpu") == 0) {
            run_mix(model, &mixes[i], server.port);
        }
    }
    redis_server_kill(&server);
}

static void make_cases(struct imbrex_model *model)
{
    static int32_t prefixes[NUM_PREFIXES][MAX_PROMPT];
    uint64_t random = 77;
    for (int32_t i = 0; i < NUM_PREFIXES * MAX_PROMPT; i++) {
        prefixes[i / MAX_PROMPT][i % MAX_PROMPT] = (int32_t)request_case_random(&random, 4000);
    }
    struct imbrex_engine *engine = create_engine(model, &(struct mix){.policy = "none"}, NULL, 0);
    for (int32_t i = 0; i < num_cases; i++) {
        struct request_case *request_case = &cases[i];
        request_case_init(request_case, model,
                          &(struct request_case_limits){MAX_PROMPT, MAX_OUTPUT, 2, false}, &random);
        uint32_t num_ids = (uint32_t)request_case->options.num_prompt_ids;
        uint32_t num_shared = request_case_random(&random, num_ids + 1);
        memcpy(request_case->prompt_ids, prefixes[request_case_random(&random, NUM_PREFIXES)],
               num_shared * sizeof(int32_t));
        if (tie_gap > 0.0f) {
            request_case_allow_ties(request_case, tie_gap);
        }
        request_case_run_alone(request_case, engine);
    }
    imbrex_engine_destroy(engine);
}

static void test_soak(void **state)
{
    (void)state;
    static const struct mix mixes[] = {
        {"lru", 1 << 16, 32, 128, 0, 0, false, false, 0},
        {"predictive", 1 << 13, 32, 128, 5, 0, false, false, 0},
        {"lru", CONTEXT_SIZE + 480, 16, 64, 7, 0, false, false, 0},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, false, 0},
        {"lru", 1 << 11, 16, 64, 7, 0, true, false, 0},
        /* The folder of the one before. */
        {"seed", 1 << 11, 16, 64, 7, (size_t)16 << 20, true, false, 0},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, false, 3},
    };
    struct imbrex_model *model;
    assert_int_equal(imbrex_model_open(MODEL, NULL, &model, NULL), IMBREX_STATUS_OK);
    make_cases(model);
    fixture_empty_folder(FOLDER);
    for (size_t i = 0; i < sizeof(mixes) / sizeof(mixes[0]); i++) {
        if (mixes[i].fake_seed == 0 || strcmp(device_option, "cpu") == 0) {
            run_mix(model, &mixes[i], 0);
        }
    }
    run_remote(model);
    fixture_empty_folder(FOLDER);
    request_cases_deinit(cases, num_cases);
    imbrex_model_close(model);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    for (int i = 1; i < argc; i += 2) {
        bool has_value = i + 1 < argc;
        if (has_value && strcmp(argv[i], "--device") == 0) {
            device_option = argv[i + 1];
        } else if (has_value && strcmp(argv[i], "--cases") == 0) {
            num_cases = atoi(argv[i + 1]);
        } else if (has_value && strcmp(argv[i], "--tie-gap") == 0) {
            tie_gap = strtof(argv[i + 1], NULL);
        } else {
            num_cases = 0;
        }
    }
    if (num_cases < 1 || num_cases > MAX_CASES) {
        (void)fprintf(stderr,
                      "soak_prefix: expected [--device NAME] [--cases 1..%d] [--tie-gap LOGPROB]\n",
                      MAX_CASES);
        return 2;
    }
    return cmocka_run_group_tests_name("soak_prefix", tests, NULL, NULL);
}
