/* SPDX-License-Identifier: Apache-2.0 */
/* A thousand prompts with common beginnings on a small real model: with the prefix cache each gives
 * what it gives without, bit for bit, under eviction at random moments and after preemption, out of
 * RAM, off a disk, after a restart, through a server, and through a device whose copies come late.
 *
 *   soak_prefix [--device NAME] [--cases N] [--compute auto|fp32] [--tie-gap LOGPROB]
 *
 * NAME as for imbrex ("cpu" unless said, "cuda", "cuda:1"); the mixes on the fake device are those
 * of a CPU. With a gap the engines are not batch invariant, as a GPU's are not unless asked, all
 * requests are greedy, and ids may part where two have logprobs no further apart than that. What
 * rounding does to them by itself is measured first: each request alone, in one mode and the other.
 * Reads tests/golden/qwen2-tiny-4m from the folder that it runs in.
 *
 * Catches: what test_engine_prefix.c and test_engine_tiers.c catch, on a model whose attention has
 * several kv heads and whose logits are close. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "cli/machine.h"
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
#define MAX_CHOICES 2
#define NUM_PREFIXES 8
#define FOLDER TEST_BUILD_DIR "/tests/kv-soak"

static struct request_case cases[MAX_CASES];
static int32_t num_cases = MAX_CASES;
static const char *device_option = "cpu";
static enum imbrex_compute compute = IMBREX_COMPUTE_AUTO;
static float tie_gap; /* 0: bit for bit */

/* From one run of all cases to another. */
struct distance {
    int32_t num_ties;           /* requests whose ids part */
    int32_t num_found;          /* requests that found tokens */
    int32_t num_found_ties;     /* those of them whose ids part */
    float median, p99, largest; /* of the differences of logprobs */
};

static struct distance rounding; /* alone, from one mode to the other */

struct mix {
    const char *policy;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    int32_t evict_every; /* steps between evictions of what is idle; 0: never */
    size_t host_bytes;   /* 0: no RAM below the first tier */
    bool has_disk, has_remote;
    uint64_t fake_seed;   /* 0: the device that was named */
    bool begins_at_empty; /* server: what comes from it then hangs on who goes when */
};

struct run {
    const struct mix *mix;
    uint64_t random;
};

static bool has_tiers(const struct mix *mix)
{
    return mix->host_bytes > 0 || mix->has_disk || mix->has_remote;
}

/* Of the engines that are tested. */
static enum imbrex_invariance mode(void)
{
    return tie_gap > 0.0f ? IMBREX_INVARIANCE_OFF : IMBREX_INVARIANCE_ON;
}

/* For one request at a time, without a cache. */
static struct imbrex_engine *create_alone(struct imbrex_model *model, const char *device,
                                          enum imbrex_invariance batch_invariant)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = device;
    options.compute = compute;
    options.batch_invariant = batch_invariant;
    options.context_size = CONTEXT_SIZE;
    options.kv_policy = "none";
    return request_cases_engine(model, &options, NULL);
}

/* port: of the server. */
static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           struct device *device, int32_t port)
{
    char url[64];
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = device_option;
    options.compute = compute;
    options.batch_invariant = mode();
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

static int compare_floats(const void *a, const void *b)
{
    float left = *(const float *)a, right = *(const float *)b;
    return (left > right) - (left < right);
}

/* How far all cases are from what they were alone. */
static struct distance measure_distance(void)
{
    static float gaps[MAX_CASES * MAX_OUTPUT * MAX_CHOICES];
    struct distance distance = {0};
    int32_t num_gaps = 0;
    for (int32_t i = 0; i < num_cases; i++) {
        int32_t has_tie = request_case_has_tie(&cases[i]);
        int32_t has_found = cases[i].mixed.num_cached_tokens > 0;
        distance.num_ties += has_tie;
        distance.num_found += has_found;
        distance.num_found_ties += has_tie && has_found;
        num_gaps += request_case_gaps(&cases[i], gaps + num_gaps);
    }
    assert_true(num_gaps > 0);
    qsort(gaps, (size_t)num_gaps, sizeof(*gaps), compare_floats);
    distance.median = gaps[num_gaps / 2];
    distance.p99 = gaps[(int32_t)(0.99 * (num_gaps - 1))];
    distance.largest = gaps[num_gaps - 1];
    printf("  %d of %d requests part at a tie, %d of the %d that found tokens among them; logprobs "
           "differ by %.2g (median), %.2g (p99), %.2g at most\n",
           (int)distance.num_ties, (int)num_cases, (int)distance.num_found_ties,
           (int)distance.num_found, (double)distance.median, (double)distance.p99,
           (double)distance.largest);
    (void)fflush(stdout);
    return distance;
}

/* Rounding alone makes requests part as often, and logprobs differ as much, as in the other mode
 * without neighbours and a cache. What is far more often or further is wrong numbers. */
static void check_ties(void)
{
    if (tie_gap == 0.0f) {
        (void)fflush(stdout);
        return;
    }
    struct distance distance = measure_distance();
    assert_true(distance.num_ties <= 2 * rounding.num_ties + num_cases / 100);
    assert_true(distance.p99 <= 1.5f * rounding.p99 + 1e-3f);
    assert_true(distance.largest <= 2.0f * rounding.largest + 1e-3f);
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
    assert_true(mix->has_remote || metrics.num_remote_tokens == 0);
    assert_true(!mix->has_remote || mix->begins_at_empty || metrics.num_remote_tokens > 0);
    printf("%s, %d tokens of cache: %llu of %llu prompt tokens found, %llu of them in RAM, %llu on "
           "disk and %llu on a server, %llu blocks ahead, %llu preemptions, %.0f s\n",
           mix->policy, mix->kv_cache_tokens, (unsigned long long)metrics.num_cached_tokens,
           (unsigned long long)metrics.num_queried_tokens,
           (unsigned long long)metrics.num_host_tokens, (unsigned long long)metrics.num_disk_tokens,
           (unsigned long long)metrics.num_remote_tokens, (unsigned long long)metrics.num_kv_ahead,
           (unsigned long long)metrics.num_preemptions, (double)(clock_now_ns() - begin_ns) * 1e-9);
    check_ties();
    imbrex_engine_destroy(engine);
    device_destroy(device);
}

/* Twice: into a server that has nothing, and out of it. */
static void run_remote(struct imbrex_model *model)
{
    static const struct mix mixes[] = {
        {"lru", 1 << 11, 16, 64, 7, 0, false, true, 0, true},
        {"lru", 1 << 11, 16, 64, 7, 0, false, true, 0, false},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)16 << 20, true, true, 0, false},
        {"predictive", 1 << 11, 16, 64, 7, 0, false, true, 5, false},
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
    struct imbrex_engine *engine = create_alone(model, device_option, mode());
    for (int32_t i = 0; i < num_cases; i++) {
        struct request_case *request_case = &cases[i];
        request_case_init(request_case, model,
                          &(struct request_case_limits){MAX_PROMPT, MAX_OUTPUT, MAX_CHOICES, false},
                          &random);
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

/* Each case alone once more. */
static void run_again(struct imbrex_model *model, const char *device,
                      enum imbrex_invariance batch_invariant)
{
    struct imbrex_engine *engine = create_alone(model, device, batch_invariant);
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_reset(&cases[i]);
        assert_int_equal(request_case_submit(&cases[i], engine), IMBREX_STATUS_OK);
        request_case_finish(&cases[i]);
        request_case_compare(&cases[i], i);
    }
    imbrex_engine_destroy(engine);
}

static void allow_ties(float gap)
{
    for (int32_t i = 0; i < num_cases; i++) {
        cases[i].tie_gap = gap;
    }
}

static void measure_rounding(struct imbrex_model *model)
{
    allow_ties(0.0f);
    run_again(model, device_option, mode());
    printf("alone, once more: the same bits\n");
    allow_ties(tie_gap);
    if (strcmp(device_option, "cpu") != 0) {
        run_again(model, "cpu", IMBREX_INVARIANCE_ON);
        printf("alone, on the CPU:\n");
        (void)measure_distance();
    }
    run_again(model, device_option, IMBREX_INVARIANCE_ON);
    printf("alone, in batch-invariant mode:\n");
    rounding = measure_distance();
}

/* What was run, of which commit, where and when: what is kept of a run begins with it. */
static void print_head(void)
{
    struct machine machine;
    char date[32] = "";
    time_t now = time(NULL);
    machine_describe(&machine);
    (void)strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    printf("soak_prefix --device %s --cases %d --compute %s --tie-gap %g: imbrex %s (%s), %s, %d "
           "CPUs, %s\n",
           device_option, (int)num_cases, compute == IMBREX_COMPUTE_F32 ? "fp32" : "auto",
           (double)tie_gap, machine.version, machine.commit != NULL ? machine.commit : "no commit",
           machine.cpu_name, (int)machine.num_cpus, date);
}

static void test_soak(void **state)
{
    (void)state;
    static const struct mix mixes[] = {
        {"lru", 1 << 16, 32, 128, 0, 0, false, false, 0, false},
        {"predictive", 1 << 13, 32, 128, 5, 0, false, false, 0, false},
        {"lru", CONTEXT_SIZE + 480, 16, 64, 7, 0, false, false, 0, false},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, false, 0, false},
        {"lru", 1 << 11, 16, 64, 7, 0, true, false, 0, false},
        /* The folder of the one before. */
        {"seed", 1 << 11, 16, 64, 7, (size_t)16 << 20, true, false, 0, false},
        {"predictive", 1 << 11, 16, 64, 7, (size_t)256 << 20, false, false, 3, false},
    };
    struct imbrex_model *model;
    print_head();
    assert_int_equal(imbrex_model_open(MODEL, NULL, &model, NULL), IMBREX_STATUS_OK);
    make_cases(model);
    if (tie_gap > 0.0f) {
        measure_rounding(model);
    }
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
        } else if (has_value && strcmp(argv[i], "--compute") == 0) {
            bool is_fp32 = strcmp(argv[i + 1], "fp32") == 0;
            compute = is_fp32 ? IMBREX_COMPUTE_F32 : IMBREX_COMPUTE_AUTO;
            num_cases = is_fp32 || strcmp(argv[i + 1], "auto") == 0 ? num_cases : 0;
        } else {
            num_cases = 0;
        }
    }
    if (num_cases < 1 || num_cases > MAX_CASES) {
        (void)fprintf(stderr,
                      "soak_prefix: expected [--device NAME] [--cases 1..%d] [--compute auto|fp32] "
                      "[--tie-gap LOGPROB]\n",
                      MAX_CASES);
        return 2;
    }
    return cmocka_run_group_tests_name("soak_prefix", tests, NULL, NULL);
}
