/* SPDX-License-Identifier: Apache-2.0 */
/* The engine on a GPU: requests beside each other, graphs, what a steady step calls, and what is
 * left after a failure. Skipped where there is no GPU. An argument is a filter of test names. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "engine/engine.h"
#include "ops/cuda/device_cuda.h"
#include "tests/engine/request_cases.h"
#include "tests/fault/fault.h"
#include "tests/golden/golden.h"

#define STORIES "builtin:stories260K"
#define STORIES_FOLDER "tests/golden/stories260K"
#define QWEN "tests/golden/qwen2-tiny-4m"
#define RANDOM_SMALL "random:qwen2.5-0.5b"
#define RANDOM_LARGE "random:qwen2.5-1.5b"
#define CONTEXT_SIZE 352
#define MAX_CASES 96

/* ---- requests, alone and beside each other ---- */

struct mix {
    const char *device;
    enum imbrex_compute compute;
    enum imbrex_kv_dtype kv_dtype;
    bool batch_invariant;
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    uint32_t ablations;
    int32_t num_at_once;    /* requests that come before a step */
    int32_t num_idle_steps; /* between two such steps */
    bool has_cache;
    size_t kv_host_bytes;
    const char *kv_disk_path; /* NULL: none */
    int32_t num_groups;       /* of layers that come up one behind the other; 0: as it is */
    int32_t own_groups;       /* as many the engine must choose by itself; 0: any */
    bool evicts;              /* all that is idle goes down after each step */
};

static const struct mix roomy = {.device = "cuda",
                                 .batch_invariant = true,
                                 .kv_cache_tokens = 1 << 16,
                                 .max_running = 48,
                                 .max_step_tokens = 512,
                                 .num_at_once = 3,
                                 .has_cache = true};
/* The cache holds hardly more than one request: some are preempted. */
static const struct mix tight = {.device = "cuda",
                                 .batch_invariant = true,
                                 .kv_cache_tokens = CONTEXT_SIZE + 48,
                                 .max_running = 16,
                                 .max_step_tokens = 40,
                                 .num_at_once = 3,
                                 .has_cache = true};

/* All at once, in steps of more sequences than the kernels for few tokens take. */
static const struct mix crowded = {.device = "cuda",
                                   .batch_invariant = true,
                                   .kv_cache_tokens = 1 << 17,
                                   .max_running = 240,
                                   .max_step_tokens = 2048,
                                   .num_at_once = MAX_CASES,
                                   .has_cache = true};

/* Of all mixes. */
static uint32_t mix_ablations;

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix)
{
    struct imbrex_error err;
    struct imbrex_engine *engine = NULL;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = mix->device;
    options.compute = mix->compute;
    options.kv_dtype = mix->kv_dtype;
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.batch_invariant = mix->batch_invariant ? IMBREX_INVARIANCE_ON : IMBREX_INVARIANCE_OFF;
    options.ablations = mix->ablations | mix_ablations;
    options.kv_policy = mix->has_cache ? NULL : "none";
    options.kv_host_bytes = mix->kv_host_bytes;
    options.kv_disk_path = mix->kv_disk_path;
    options.kv_disk_bytes = mix->kv_disk_path != NULL ? (size_t)2 << 30 : 0;
    golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
    engine->tiers.patience_ns = INT64_MAX;
    assert_true(mix->own_groups == 0 || engine->tiers.num_groups == mix->own_groups);
    if (mix->num_groups > 0) {
        prefix_tiers_set_groups(&engine->tiers, executor_kv(engine->executor), mix->num_groups);
    }
    if (mix->num_groups > 0 || mix->own_groups > 0) {
        engine->tiers.max_layered_ns = INT64_MAX;
    }
    return engine;
}

/* Fewer layers, unless all are wanted, and ids make a model of a published shape small. */
static struct imbrex_model *open_layers(const char *path, bool has_all)
{
    struct imbrex_error err = {0};
    struct imbrex_model *model = golden_open(path);
    if (imbrex_model_tokenizer(model) == NULL) {
        golden_check(model_fill(model, &err), &err);
        model->config.num_layers = has_all ? model->config.num_layers : 3;
        model->config.vocab_size = 4000;
    }
    return model;
}

static struct imbrex_model *open_model(const char *path)
{
    return open_layers(path, false);
}

static struct request_case *create_cases(const struct imbrex_model *model, int32_t num_cases,
                                         uint64_t seed, bool has_cancels)
{
    struct request_case *cases = calloc((size_t)num_cases, sizeof(*cases));
    assert_non_null(cases);
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_init(&cases[i], model, &(struct request_case_limits){300, 48, 4, has_cancels},
                          &seed);
    }
    return cases;
}

static void destroy_cases(struct request_case *cases, int32_t num_cases)
{
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_deinit(&cases[i]);
    }
    free(cases);
}

static void run_alone(struct imbrex_model *model, const struct mix *mix, struct request_case *cases,
                      int32_t num_cases)
{
    struct imbrex_engine *engine = create_engine(model, mix);
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_run_alone(&cases[i], engine);
    }
    imbrex_engine_destroy(engine);
}

/* All cases, a few more before each of the first steps. */
static struct imbrex_engine_metrics run_mix(struct imbrex_model *model, const struct mix *mix,
                                            struct request_case *cases, int32_t num_cases)
{
    struct imbrex_error err;
    struct imbrex_engine_metrics metrics;
    struct imbrex_engine *engine = create_engine(model, mix);
    bool has_work = true;
    int32_t num_submitted = 0;
    for (int32_t step = 0; has_work || num_submitted < num_cases; step++) {
        int32_t num_more = step % (mix->num_idle_steps + 1) == 0 ? mix->num_at_once : 0;
        for (int32_t i = 0; i < num_more && num_submitted < num_cases; i++) {
            request_case_reset(&cases[num_submitted]);
            assert_int_equal(request_case_submit(&cases[num_submitted], engine), IMBREX_STATUS_OK);
            num_submitted++;
        }
        golden_check(imbrex_engine_step(engine, &has_work, &err), &err);
        if (mix->evicts) {
            kv_cache_clear(engine->prefix.cache, 0);
        }
    }
    assert_true(scheduler_check(&engine->scheduler));
    assert_true(kv_pool_check(&engine->kv_pool));
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_finish(&cases[i]);
    }
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
    assert_int_equal(metrics.forward_time.num_values, metrics.num_steps); /* the GPU's time */
    imbrex_engine_destroy(engine);
    return metrics;
}

static void compare_cases(const struct request_case *cases, int32_t num_cases)
{
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_compare(&cases[i], i);
    }
}

static void check_mixed(const char *path, enum imbrex_compute compute, int32_t num_cases)
{
    struct imbrex_model *model = open_model(path);
    struct request_case *cases = create_cases(model, num_cases, 1, true);
    struct mix alone = roomy, many = roomy, few = tight, crowd = crowded;
    alone.compute = many.compute = few.compute = crowd.compute = compute;
    alone.kv_cache_tokens = 4 * CONTEXT_SIZE;
    run_alone(model, &alone, cases, num_cases);
    (void)run_mix(model, &many, cases, num_cases);
    compare_cases(cases, num_cases);
    (void)run_mix(model, &crowd, cases, num_cases);
    compare_cases(cases, num_cases);
    assert_true(run_mix(model, &few, cases, num_cases).num_preemptions > 0);
    compare_cases(cases, num_cases);
    destroy_cases(cases, num_cases);
    imbrex_model_close(model);
}

/* Catches: a request that sees its neighbours, how its prompt was cut, a preemption or what the
 * prefix cache had; in both modes, head_dims of all attention kernels. */
static void test_mixed_stories(void **state)
{
    (void)state;
    check_mixed(STORIES, IMBREX_COMPUTE_F32, MAX_CASES);
    check_mixed(STORIES, IMBREX_COMPUTE_BF16, MAX_CASES);
}

static void test_mixed_qwen(void **state)
{
    (void)state;
    check_mixed(QWEN, IMBREX_COMPUTE_F32, 48);
    check_mixed(QWEN, IMBREX_COMPUTE_BF16, MAX_CASES);
}

static void test_mixed_random(void **state)
{
    (void)state;
    check_mixed(RANDOM_SMALL, IMBREX_COMPUTE_BF16, MAX_CASES);
    check_mixed(RANDOM_LARGE, IMBREX_COMPUTE_BF16, 48);
}

/* ---- keys and values with scales ---- */

/* Per token, of the first rows of the validation ids. */
static double validation_nll(struct imbrex_model *model, const struct mix *mix)
{
    enum { NUM_ROWS = 24, ROW_IDS = 256 };
    struct imbrex_error err;
    double nll[ROW_IDS], sum = 0.0;
    int32_t num_ids;
    json_t *rows = golden_read_json(QWEN "/val_ids.json");
    int32_t *ids = golden_ids(rows, &num_ids);
    struct imbrex_engine *engine = create_engine(model, mix);
    assert_true(num_ids >= NUM_ROWS * ROW_IDS);
    for (int32_t row = 0; row < NUM_ROWS; row++) {
        golden_check(imbrex_engine_score(engine, ids + row * ROW_IDS, ROW_IDS, nll, &err), &err);
        for (int32_t i = 0; i < ROW_IDS - 1; i++) {
            sum += nll[i];
        }
    }
    imbrex_engine_destroy(engine);
    free(ids);
    json_decref(rows);
    return sum / (NUM_ROWS * (ROW_IDS - 1));
}

/* Catches: keys or values that lose more than their bits on the way into the cache or out of it, a
 * request that sees its neighbours, and a model that the kernels do not take but nobody refuses. */
static void test_kv_dtypes(void **state)
{
    (void)state;
    static const enum imbrex_kv_dtype kv_dtypes[] = {IMBREX_KV_DTYPE_INT8, IMBREX_KV_DTYPE_FP8};
    struct imbrex_model *model = open_model(QWEN);
    struct mix plain = roomy, scaled = roomy;
    double expected = validation_nll(model, &plain);
    for (size_t i = 0; i < 2; i++) {
        scaled.kv_dtype = kv_dtypes[i];
        for (int is_invariant = 0; is_invariant < 2; is_invariant++) {
            scaled.batch_invariant = is_invariant != 0;
            double found = validation_nll(model, &scaled);
            print_message("kv_dtype %d, invariant %d: nll %.5f, bf16 %.5f\n", (int)kv_dtypes[i],
                          is_invariant, found, expected);
            assert_true(fabs(found / expected - 1.0) < 0.005);
        }
        struct request_case *cases = create_cases(model, 48, 3, true);
        struct mix alone = scaled, few = tight;
        few.kv_dtype = kv_dtypes[i];
        alone.kv_cache_tokens = 4 * CONTEXT_SIZE;
        run_alone(model, &alone, cases, 48);
        (void)run_mix(model, &scaled, cases, 48);
        compare_cases(cases, 48);
        (void)run_mix(model, &few, cases, 48);
        compare_cases(cases, 48);
        destroy_cases(cases, 48);
    }
    imbrex_model_close(model);

    struct imbrex_engine *engine;
    struct imbrex_error err;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = "cuda";
    options.kv_dtype = IMBREX_KV_DTYPE_INT8;
    model = open_model(STORIES);
    assert_int_equal(imbrex_engine_create(model, &options, &engine, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "kv_dtype: expected bf16 on a GPU for this model"));
    imbrex_model_close(model);
}

/* ---- tiers ---- */

#define KV_FOLDER TEST_BUILD_DIR "/tests/gpu-kv"

static void empty_folder(void)
{
    char path[600];
    DIR *folder = opendir(KV_FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        (void)snprintf(path, sizeof(path), "%s/%s", KV_FOLDER, item->d_name);
        (void)unlink(path);
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
}

/* Prompts that begin alike. */
static struct request_case *create_alike(const struct imbrex_model *model, int32_t num_cases)
{
    struct request_case *cases = create_cases(model, num_cases, 7, false);
    for (int32_t i = 3; i < num_cases; i++) {
        int32_t num_ids = cases[i].options.num_prompt_ids;
        int32_t num_shared = cases[i % 3].options.num_prompt_ids;
        num_shared = num_shared < num_ids ? num_shared : num_ids;
        memcpy(cases[i].prompt_ids, cases[i % 3].prompt_ids,
               (size_t)num_shared * sizeof(*cases[i].prompt_ids));
    }
    return cases;
}

static void check_tiers(const char *path, enum imbrex_compute compute, size_t kv_host_bytes,
                        int32_t num_cases)
{
    struct imbrex_model *model = open_model(path);
    struct request_case *cases = create_alike(model, num_cases);
    struct mix alone = roomy, few = tight;
    alone.compute = few.compute = compute;
    alone.kv_cache_tokens = 4 * CONTEXT_SIZE;
    few.kv_cache_tokens = CONTEXT_SIZE + 160;
    few.kv_host_bytes = kv_host_bytes;
    empty_folder();
    run_alone(model, &alone, cases, num_cases);
    struct imbrex_engine_metrics host = run_mix(model, &few, cases, num_cases);
    compare_cases(cases, num_cases);
    few.kv_disk_path = KV_FOLDER;
    (void)run_mix(model, &few, cases, num_cases);
    compare_cases(cases, num_cases);
    struct imbrex_engine_metrics warm = run_mix(model, &few, cases, num_cases);
    compare_cases(cases, num_cases);
    printf("%s: %llu tokens from RAM; after a restart %llu from RAM, %llu from disk\n", path,
           (unsigned long long)host.num_host_tokens, (unsigned long long)warm.num_host_tokens,
           (unsigned long long)warm.num_disk_tokens);
    assert_true(host.num_host_tokens > 0 && warm.num_disk_tokens > 0);
    assert_int_equal(host.num_kv_faults + warm.num_kv_faults, 0);
    empty_folder();
    destroy_cases(cases, num_cases);
    imbrex_model_close(model);
}

/* Catches: a block that comes up from RAM or disk with other bits, before its copy is done, or in
 * the place of one that is still read; blocks that are not found after a restart. */
static void test_tiers(void **state)
{
    (void)state;
    check_tiers(STORIES, IMBREX_COMPUTE_F32, (size_t)4 << 20, MAX_CASES);
    check_tiers(STORIES, IMBREX_COMPUTE_BF16, (size_t)4 << 20, MAX_CASES);
    check_tiers(RANDOM_SMALL, IMBREX_COMPUTE_BF16, (size_t)16 << 20, MAX_CASES);
}

static const struct mix layered = {.device = "cuda",
                                   .batch_invariant = true,
                                   .kv_cache_tokens = 1 << 16,
                                   .max_running = 48,
                                   .max_step_tokens = 512,
                                   .num_at_once = 1,
                                   .has_cache = true,
                                   .kv_host_bytes = (size_t)256 << 20,
                                   .evicts = true};

static void run_layers(struct imbrex_model *model, const char *path, const struct mix *mix,
                       struct request_case *cases, int32_t num_cases)
{
    struct imbrex_engine_metrics metrics = run_mix(model, mix, cases, num_cases);
    compare_cases(cases, num_cases);
    printf("%s: %llu starts in %d groups of layers%s, %llu tokens from RAM\n", path,
           (unsigned long long)metrics.num_kv_layered, (int)(mix->num_groups + mix->own_groups),
           mix->own_groups > 0 ? ", as many as it chose" : "",
           (unsigned long long)metrics.num_host_tokens);
    assert_true(metrics.num_kv_layered > 0);
    assert_int_equal(metrics.num_kv_faults, 0);
}

static void check_layers(const char *path, enum imbrex_compute compute, int32_t num_cases)
{
    struct imbrex_model *model = open_model(path);
    struct request_case *cases = create_alike(model, num_cases);
    struct mix alone = roomy, parted = layered;
    alone.compute = parted.compute = compute;
    alone.kv_cache_tokens = 4 * CONTEXT_SIZE;
    run_alone(model, &alone, cases, num_cases);
    for (parted.num_groups = 2; parted.num_groups <= 3; parted.num_groups++) {
        run_layers(model, path, &parted, cases, num_cases);
    }
    destroy_cases(cases, num_cases);
    imbrex_model_close(model);
}

/* As many groups as the engine chooses for blocks of all layers. */
static void check_own_groups(const char *path, int32_t num_groups, int32_t num_cases)
{
    struct imbrex_model *model = open_layers(path, true);
    struct request_case *cases = create_alike(model, num_cases);
    struct mix alone = roomy, parted = layered;
    alone.kv_cache_tokens = 4 * CONTEXT_SIZE;
    parted.kv_host_bytes = (size_t)1 << 30;
    parted.num_idle_steps = 15; /* what others have in use does not come up */
    parted.own_groups = num_groups;
    run_alone(model, &alone, cases, num_cases);
    run_layers(model, path, &parted, cases, num_cases);
    destroy_cases(cases, num_cases);
    imbrex_model_close(model);
}

/* Catches: kernels of a layer that read blocks before its group has come up, where kernels begin
 * before those in front of them have ended too; in so many groups as are told, and as the engine
 * chooses. */
static void test_layers(void **state)
{
    (void)state;
    check_layers(STORIES, IMBREX_COMPUTE_F32, MAX_CASES);
    check_layers(STORIES, IMBREX_COMPUTE_BF16, MAX_CASES);
    check_layers(RANDOM_SMALL, IMBREX_COMPUTE_BF16, MAX_CASES);
    check_layers(RANDOM_LARGE, IMBREX_COMPUTE_BF16, MAX_CASES);
    check_own_groups(RANDOM_SMALL, 2, 48);
    check_own_groups(RANDOM_LARGE, 4, 48);
}

/* ---- against the CPU ---- */

static void check_against_cpu(const char *path, int32_t num_cases)
{
    struct imbrex_model *model = open_model(path);
    struct request_case *cases = create_cases(model, num_cases, 7, false);
    struct mix on_cpu = roomy, on_gpu = roomy;
    on_cpu.device = "cpu";
    on_gpu.compute = IMBREX_COMPUTE_F32;
    on_gpu.batch_invariant = false;
    run_alone(model, &on_cpu, cases, num_cases);
    (void)run_mix(model, &on_gpu, cases, num_cases);
    for (int32_t i = 0; i < num_cases; i++) {
        for (int32_t j = 0; j < cases[i].options.num_choices; j++) {
            const struct choice_record *expected = &cases[i].alone.choices[j];
            const struct choice_record *found = &cases[i].mixed.choices[j];
            if (found->num_tokens != expected->num_tokens || found->reason != expected->reason) {
                fail_msg("case %d choice %d: cpu %d tokens (%s), cuda %d (%s)", (int)i, (int)j,
                         (int)expected->num_tokens, imbrex_finish_reason_name(expected->reason),
                         (int)found->num_tokens, imbrex_finish_reason_name(found->reason));
            }
            for (int32_t token = 0; token < found->num_tokens; token++) {
                if (found->token_ids[token] != expected->token_ids[token]) {
                    fail_msg("case %d choice %d token %d: cpu %d, cuda %d", (int)i, (int)j,
                             (int)token, (int)expected->token_ids[token],
                             (int)found->token_ids[token]);
                }
            }
        }
    }
    destroy_cases(cases, num_cases);
    imbrex_model_close(model);
}

/* Catches: in fp32, any difference from the CPU that reaches an id, drawn or greedy. */
static void test_cpu_ids(void **state)
{
    (void)state;
    check_against_cpu(STORIES, MAX_CASES);
    check_against_cpu(QWEN, 48);
}

static void check_golden(const char *path, uint32_t ablations, const int32_t *prompt_ids,
                         int32_t num_prompt_ids, const int32_t *expected, int32_t num_expected)
{
    struct mix mix = roomy;
    struct imbrex_model *model = golden_open(path);
    int32_t *found = malloc((size_t)num_expected * sizeof(*found));
    assert_non_null(found);
    mix.compute = IMBREX_COMPUTE_F32;
    mix.batch_invariant = false;
    mix.ablations = ablations;
    struct imbrex_engine *engine = create_engine(model, &mix);
    assert_int_equal(golden_greedy(engine, model, prompt_ids, num_prompt_ids, num_expected, found),
                     num_expected);
    assert_memory_equal(found, expected, (size_t)num_expected * sizeof(*found));
    imbrex_engine_destroy(engine);
    imbrex_model_close(model);
    free(found);
}

static void check_goldens(uint32_t ablations)
{
    json_t *root = golden_read_json(STORIES_FOLDER "/greedy_golden.json");
    json_t *qwen = golden_read_json(QWEN "/golden.json");
    json_t *prompts = json_object_get(qwen, "prompts");
    int32_t num_ids, num_expected;
    int32_t *ids = golden_ids(json_object_get(root, "prompt_ids"), &num_ids);
    int32_t *expected = golden_ids(json_object_get(root, "ids"), &num_expected);
    check_golden(STORIES, ablations, ids, num_ids, expected, num_expected);
    check_golden(STORIES_FOLDER, ablations, ids, num_ids, expected, num_expected);
    free(ids);
    free(expected);
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        json_t *prompt = json_array_get(prompts, i);
        ids = golden_ids(json_object_get(prompt, "prompt_ids"), &num_ids);
        expected = golden_ids(json_object_get(prompt, "fp32_greedy_ids"), &num_expected);
        check_golden(QWEN, ablations, ids, num_ids, expected, num_expected);
        free(ids);
        free(expected);
    }
    json_decref(root);
    json_decref(qwen);
}

/* Catches: a text that differs from the published one, on graphs; by the kernels of other GPUs
 * too. */
static void test_goldens(void **state)
{
    (void)state;
    check_goldens(0);
    check_goldens(IMBREX_ABLATE_HOPPER);
}

/* Catches: what test_mixed_* and test_cpu_ids do, in the kernels of other GPUs. */
static void test_portable(void **state)
{
    static const char *const paths[] = {STORIES, QWEN, RANDOM_SMALL};
    (void)state;
    mix_ablations = IMBREX_ABLATE_HOPPER;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        check_mixed(paths[i], IMBREX_COMPUTE_BF16, 48);
    }
    check_against_cpu(STORIES, 48);
    mix_ablations = 0;
}

/* ---- graphs and overlap ---- */

/* With the ablation everything must be the same bits. */
static void compare_ablated(struct imbrex_model *model, const struct mix *mix, uint32_t ablation,
                            struct request_case *cases, int32_t num_cases)
{
    struct mix ablated = *mix;
    ablated.ablations = ablation;
    (void)run_mix(model, &ablated, cases, num_cases);
    for (int32_t i = 0; i < num_cases; i++) {
        struct request_record without = cases[i].mixed;
        cases[i].mixed = cases[i].alone;
        cases[i].alone = without;
    }
    (void)run_mix(model, mix, cases, num_cases);
    compare_cases(cases, num_cases);
    for (int32_t i = 0; i < num_cases; i++) {
        struct request_record without = cases[i].alone;
        cases[i].alone = cases[i].mixed;
        cases[i].mixed = without;
        request_case_reset(&cases[i]);
    }
}

static void check_ablation(const char *path, const struct mix *mix, uint32_t ablation)
{
    enum { NUM_CASES = 64 };
    struct imbrex_model *model = open_model(path);
    struct request_case *cases = create_cases(model, NUM_CASES, 3, false);
    compare_ablated(model, mix, ablation, cases, NUM_CASES);
    destroy_cases(cases, NUM_CASES);
    imbrex_model_close(model);
}

/* Catches: a graph that was captured for other memory, an argument that is a constant in it but not
 * in a step. Padding may change bits unless they are invariant. */
static void test_graphs(void **state)
{
    static const char *const paths[] = {STORIES, QWEN, RANDOM_SMALL, RANDOM_LARGE};
    (void)state;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        check_ablation(paths[i], &roomy, IMBREX_ABLATE_GRAPH);
        check_ablation(paths[i], &tight, IMBREX_ABLATE_GRAPH);
    }
}

/* Catches: a kernel that reads what the one ahead of it has not written yet, or writes what it
 * reads still. */
static void test_overlap(void **state)
{
    static const char *const paths[] = {STORIES, QWEN, RANDOM_SMALL, RANDOM_LARGE};
    struct mix fast = roomy, preempted = tight;
    (void)state;
    fast.batch_invariant = preempted.batch_invariant = false;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        check_ablation(paths[i], &fast, IMBREX_ABLATE_PDL);
        check_ablation(paths[i], &preempted, IMBREX_ABLATE_PDL);
        check_ablation(paths[i], &roomy, IMBREX_ABLATE_PDL);
        check_ablation(paths[i], &crowded, IMBREX_ABLATE_PDL);
    }
}

#define LADDER_TOKENS 260

/* Room for as many tokens as this, and nothing that ends it earlier. */
static void make_long(struct request_case *request_case, int32_t num_tokens)
{
    struct request_record *records[] = {&request_case->alone, &request_case->mixed};
    struct imbrex_request_options *options = &request_case->options;
    for (size_t i = 0; i < 2; i++) {
        struct choice_record *choice = &records[i]->choices[0];
        choice->token_ids = realloc(choice->token_ids, (size_t)num_tokens * sizeof(int32_t));
        choice->logprobs = realloc(choice->logprobs, (size_t)num_tokens * sizeof(float));
        assert_true(choice->token_ids != NULL && choice->logprobs != NULL);
    }
    options->max_tokens = num_tokens;
    options->ignore_eos = true;
    options->num_stop = 0;
    options->num_logit_bias = 0;
    options->num_logprobs = 0;
    options->num_prompt_logprobs = -1;
    options->priority = 0;
}

/* Catches: as test_graphs, in the kernels for few tokens. Sequences that begin and end together, as
 * many as a bucket holds: no step is padded, so that bits are the same also where they depend on
 * the batch. */
static void test_graphs_of_few(void **state)
{
    static const char *const paths[] = {QWEN, RANDOM_SMALL, RANDOM_LARGE};
    (void)state;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct imbrex_model *model = open_model(paths[i]);
        for (int32_t num_seqs = 1; num_seqs <= 16; num_seqs *= 2) {
            uint64_t seed = 5 + (uint64_t)num_seqs;
            struct mix mix = roomy;
            struct request_case cases[16];
            mix.batch_invariant = false;
            mix.num_at_once = num_seqs;
            for (int32_t j = 0; j < num_seqs; j++) {
                request_case_init(&cases[j], model, &(struct request_case_limits){20, 1, 1, false},
                                  &seed);
                make_long(&cases[j], LADDER_TOKENS);
            }
            compare_ablated(model, &mix, IMBREX_ABLATE_GRAPH, cases, num_seqs);
            for (int32_t j = 0; j < num_seqs; j++) {
                request_case_deinit(&cases[j]);
            }
        }
        imbrex_model_close(model);
    }
}

/* ---- the driver's calls, counted and made to fail ---- */

/* X(field, parameters, arguments) */
#define WATCHED_CALL_LIST(X)                                                                      \
    X(mem_alloc, (CUdeviceptr * memory, size_t num_bytes), (memory, num_bytes))                   \
    X(mem_free, (CUdeviceptr memory), (memory))                                                   \
    X(mem_host_register, (void *memory, size_t num_bytes, unsigned int flags),                    \
      (memory, num_bytes, flags))                                                                 \
    X(memset_d8_async, (CUdeviceptr memory, unsigned char value, size_t count, CUstream stream),  \
      (memory, value, count, stream))                                                             \
    X(memcpy_async, (CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream),        \
      (to, from, num_bytes, stream))                                                              \
    X(memcpy_batch_async,                                                                         \
      (CUdeviceptr * to, CUdeviceptr * from, size_t * sizes, size_t count,                        \
       CUmemcpyAttributes * attributes, size_t * firsts, size_t num_attributes, CUstream stream), \
      (to, from, sizes, count, attributes, firsts, num_attributes, stream))                       \
    X(stream_synchronize, (CUstream stream), (stream))                                            \
    X(stream_begin_capture, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))          \
    X(stream_end_capture, (CUstream stream, CUgraph * graph), (stream, graph))                    \
    X(stream_wait_event, (CUstream stream, CUevent event, unsigned int flags),                    \
      (stream, event, flags))                                                                     \
    X(event_create, (CUevent * event, unsigned int flags), (event, flags))                        \
    X(event_record, (CUevent event, CUstream stream), (event, stream))                            \
    X(event_query, (CUevent event), (event))                                                      \
    X(event_synchronize, (CUevent event), (event))                                                \
    X(graph_instantiate, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),           \
      (exec, graph, flags))                                                                       \
    X(graph_upload, (CUgraphExec exec, CUstream stream), (exec, stream))                          \
    X(graph_launch, (CUgraphExec exec, CUstream stream), (exec, stream))                          \
    X(library_load_data,                                                                          \
      (CUlibrary * library, const void *code, CUjit_option *jit, void **jit_values,               \
       unsigned int num_jit, CUlibraryOption *options, void **values, unsigned int count),        \
      (library, code, jit, jit_values, num_jit, options, values, count))                          \
    X(launch_kernel_ex,                                                                           \
      (const CUlaunchConfig *config, CUfunction function, void **params, void **extra),           \
      (config, function, params, extra))

enum watched_call {
#define WATCHED_ENUM(field, parameters, arguments) WATCHED_##field,
    WATCHED_CALL_LIST(WATCHED_ENUM)
#undef WATCHED_ENUM
        NUM_WATCHED
};

static const char *const watched_names[NUM_WATCHED] = {
#define WATCHED_NAME(field, parameters, arguments) #field,
    WATCHED_CALL_LIST(WATCHED_NAME)
#undef WATCHED_NAME
};

static struct {
    struct driver real;
    int64_t counts[NUM_WATCHED];
    enum watched_call failing;
    int64_t
        num_left; /* calls of that kind until one fails, and all after it; negative: none does */
    CUresult result;
} watch;

static bool must_fail(enum watched_call call)
{
    watch.counts[call]++;
    if (watch.num_left < 0 || call != watch.failing) {
        return false;
    }
    watch.num_left -= watch.num_left > 0 ? 1 : 0;
    return watch.num_left == 0;
}

#define WATCHED_FUNCTION(field, parameters, arguments)                                 \
    static CUresult watch_##field parameters                                           \
    {                                                                                  \
        return must_fail(WATCHED_##field) ? watch.result : watch.real.field arguments; \
    }
WATCHED_CALL_LIST(WATCHED_FUNCTION)

/* The first GPU with every watched call in our hands. */
static struct device *create_watched(void)
{
    struct imbrex_error err = {0};
    struct device *device = NULL;
    memset(&watch, 0, sizeof(watch));
    watch.num_left = -1;
    golden_check(driver_open(&watch.real, &err), &err);
    struct driver table = watch.real;
#define WATCHED_ENTRY(field, parameters, arguments) table.field = watch_##field;
    WATCHED_CALL_LIST(WATCHED_ENTRY)
    golden_check(device_cuda_create_on(&table, 0, &device, &err), &err);
    return device;
}

static struct imbrex_engine *create_watched_engine(struct imbrex_model *model,
                                                   struct device *device)
{
    struct imbrex_error err = {0};
    struct imbrex_engine *engine = NULL;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = 512;
    options.kv_cache_tokens = 8192;
    golden_check(engine_create_on(model, &options, device, &engine, &err), &err);
    return engine;
}

static bool ignore_event(void *user, const struct imbrex_token_event *event)
{
    (void)user, (void)event;
    return true;
}

#define NUM_REQUESTS 4
#define NUM_TOKENS 400

static void submit_all(const struct imbrex_model *model, struct imbrex_engine *engine,
                       struct imbrex_request *requests[NUM_REQUESTS])
{
    struct imbrex_error err = {0};
    static const int32_t prompt[NUM_REQUESTS] = {1, 40, 50, 60};
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        struct imbrex_request_options options = imbrex_request_options_default(model);
        options.prompt_ids = prompt;
        options.num_prompt_ids = i + 1;
        options.max_tokens = NUM_TOKENS;
        options.ignore_eos = true;
        options.temperature = i % 2 == 0 ? 0.0f : 0.9f;
        options.callback = ignore_event;
        golden_check(imbrex_request_submit(engine, &options, &requests[i], &err), &err);
    }
}

static void step(struct imbrex_engine *engine, int32_t num_steps)
{
    struct imbrex_error err = {0};
    bool has_work;
    for (int32_t i = 0; i < num_steps; i++) {
        golden_check(imbrex_engine_step(engine, &has_work, &err), &err);
        assert_true(has_work);
    }
}

/* Catches: a step that allocates, synchronises the stream, launches kernels by itself or copies
 * more than once each way. Keys go from block 17 to 25: blocks begin, the widths of tables are the
 * same. */
static void test_steady_step(void **state)
{
    enum { NUM_WARM = 280, NUM_STEPS = 100 };
    static const int64_t calls_of_step[NUM_WATCHED] = {
        [WATCHED_launch_kernel_ex] = 2, /* the copies */
        [WATCHED_graph_launch] = 1,
        [WATCHED_event_record] = 1,
        [WATCHED_event_synchronize] = 1,
    };
    int64_t before[NUM_WATCHED];
    struct imbrex_request *requests[NUM_REQUESTS];
    struct imbrex_model *model = golden_open(QWEN);
    struct device *device = create_watched();
    struct imbrex_engine *engine = create_watched_engine(model, device);
    (void)state;
    submit_all(model, engine, requests);
    step(engine, NUM_WARM);
    memcpy(before, watch.counts, sizeof(before));
    int64_t num_memory_calls = fault_num_calls(FAULT_MEMORY);
    step(engine, NUM_STEPS);
    assert_int_equal(fault_num_calls(FAULT_MEMORY), num_memory_calls);
    for (int i = 0; i < NUM_WATCHED; i++) {
        if (watch.counts[i] - before[i] != NUM_STEPS * calls_of_step[i]) {
            fail_msg("%s: expected %d calls in each of %d steps, found %d in all", watched_names[i],
                     (int)calls_of_step[i], NUM_STEPS, (int)(watch.counts[i] - before[i]));
        }
    }
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        imbrex_request_destroy(requests[i]);
    }
    imbrex_engine_destroy(engine);
    device_destroy(device);
    imbrex_model_close(model);
}

/* ---- failures ---- */

static void check_works(struct imbrex_model *model, const char *device)
{
    struct mix mix = roomy;
    int32_t prompt = 1, found[20];
    mix.device = device;
    struct imbrex_engine *engine = create_engine(model, &mix);
    assert_int_equal(golden_greedy(engine, model, &prompt, 1, 20, found), 20);
    imbrex_engine_destroy(engine);
}

/* Catches: requests that never end after the device is gone, a reason that is lost on the way, a
 * process that can do nothing more. */
static void test_lost_device(void **state)
{
    static const struct {
        enum watched_call call;
        int64_t number; /* of the call, once requests run */
        CUresult result;
        const char *name;
    } failures[] = {
        {WATCHED_event_synchronize, 30, CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {WATCHED_graph_launch, 7, CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
        {WATCHED_launch_kernel_ex, 1, CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {WATCHED_launch_kernel_ex, 3, CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {WATCHED_graph_instantiate, 1, CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {WATCHED_event_record, 25, CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    };
    struct imbrex_model *model = golden_open(STORIES);
    (void)state;
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        struct imbrex_error err = {0};
        struct imbrex_request *requests[NUM_REQUESTS], *late = NULL;
        struct device *device = create_watched();
        struct imbrex_engine *engine = create_watched_engine(model, device);
        submit_all(model, engine, requests);
        watch.failing = failures[i].call;
        watch.result = failures[i].result;
        watch.num_left = failures[i].number;
        for (int32_t j = 0; j < NUM_REQUESTS; j++) {
            assert_int_equal(imbrex_request_wait(requests[j], &err), IMBREX_STATUS_DEVICE);
            if (strstr(err.message, failures[i].name) == NULL) {
                fail_msg("expected %s of %s in \"%s\"", failures[i].name,
                         watched_names[failures[i].call], err.message);
            }
        }
        struct imbrex_request_options options = imbrex_request_options_default(model);
        int32_t prompt = 1;
        options.prompt_ids = &prompt;
        options.num_prompt_ids = 1;
        assert_int_equal(imbrex_request_submit(engine, &options, &late, &err),
                         IMBREX_STATUS_DEVICE);
        for (int32_t j = 0; j < NUM_REQUESTS; j++) {
            imbrex_request_destroy(requests[j]);
        }
        imbrex_engine_destroy(engine);
        device_destroy(device);
        check_works(model, "cpu");
        check_works(model, "cuda");
    }
    imbrex_model_close(model);
}

static void keep_line(void *user, enum imbrex_log_level level, const char *message)
{
    char *line = user;
    if (level == IMBREX_LOG_LEVEL_WARNING) {
        snprintf(line, IMBREX_ERROR_MESSAGE_BYTES, "%s", message);
    }
}

/* Catches: too large a cache that is not said to be one, memory that stays taken, an `auto` that
 * gives up or falls back without a word. */
static void test_too_large(void **state)
{
    struct imbrex_error err = {0};
    struct imbrex_engine *engine = NULL;
    struct imbrex_model *model = NULL;
    struct imbrex_memory_plan plan;
    char line[IMBREX_ERROR_MESSAGE_BYTES] = "";
    struct imbrex_model_options model_options = {.log = keep_line, .log_user = line};
    struct imbrex_engine_options options = imbrex_engine_options_default();
    (void)state;
    golden_check(imbrex_model_open(QWEN, &model_options, &model, &err), &err);
    options.device = "cuda";
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = 80 << 20; /* 2 KiB each: more than a GPU of today has */
    options.kv_policy = "none";
    assert_int_equal(imbrex_engine_create(model, &options, &engine, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    golden_check(imbrex_engine_plan(model, &options, &plan, &err), &err);
    char wanted[60];
    snprintf(wanted, sizeof(wanted), "the KV cache: expected %zu bytes", plan.kv_bytes);
    if (strstr(err.message, wanted) == NULL || strstr(err.message, " free of ") == NULL) {
        fail_msg("%s", err.message);
    }
    options.device = "auto";
    golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
    imbrex_engine_memory_plan(engine, &plan);
    assert_string_equal(plan.device, "cpu");
    assert_non_null(strstr(line, wanted));
    imbrex_engine_destroy(engine);
    check_works(model, "cuda");
    imbrex_model_close(model);
}

/* Catches: a GPU that is not there taken for the first one, `auto` that leaves a good one alone. */
static void test_device_names(void **state)
{
    struct imbrex_error err = {0};
    struct imbrex_engine *engine = NULL;
    struct imbrex_model *model = golden_open(STORIES);
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    (void)state;
    options.device = "cuda:99";
    assert_int_equal(imbrex_engine_create(model, &options, &engine, &err), IMBREX_STATUS_NOT_FOUND);
    assert_non_null(strstr(err.message, "device 99: expected a number from 0 to "));
    options.device = "auto";
    golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
    imbrex_engine_memory_plan(engine, &plan);
    assert_string_equal(plan.device, "cuda");
    imbrex_engine_destroy(engine);
    check_works(model, "cuda:0");
    imbrex_model_close(model);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixed_stories), cmocka_unit_test(test_mixed_qwen),
        cmocka_unit_test(test_mixed_random),  cmocka_unit_test(test_cpu_ids),
        cmocka_unit_test(test_goldens),       cmocka_unit_test(test_portable),
        cmocka_unit_test(test_graphs),        cmocka_unit_test(test_graphs_of_few),
        cmocka_unit_test(test_overlap),       cmocka_unit_test(test_steady_step),
        cmocka_unit_test(test_lost_device),   cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_device_names),  cmocka_unit_test(test_tiers),
        cmocka_unit_test(test_kv_dtypes),     cmocka_unit_test(test_layers),
    };
    struct imbrex_error err = {0};
    struct device *device = NULL;
    if (device_cuda_create(0, &device, &err) != IMBREX_STATUS_OK) {
        printf("%s\n", err.message);
        return err.status == IMBREX_STATUS_UNSUPPORTED ? SKIPPED : 1;
    }
    device_destroy(device);
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests_name("check_gpu_engine", tests, NULL, NULL);
}

#else

int main(void)
{
    return check_absent();
}

#endif
