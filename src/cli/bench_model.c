/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench model: one sequence alone, in the terms of llama-bench, beside what the machine can
 * do. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/number_list.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/signals.h"
#include "cli/speed_report.h"

#define MAX_TOKENS (1 << 20)
#define MAX_THREADS 1024
#define MAX_BATCH 1024
#define DEFAULT_STEP_TOKENS 512 /* llama-bench's ubatch */
/* Of a GPU's memory, for what the driver and kernels need. */
#define GPU_RESERVE_BYTES ((size_t)2 << 30)

enum bench_format { BENCH_FORMAT_TABLE, BENCH_FORMAT_JSON };

struct model_settings {
    struct engine_settings engine; /* its threads are not used: there is a list of them */
    struct option_strings models;
    struct option_integer num_samples, max_step_tokens, format;
    struct option_real energy_ms;
    const char *prompts, *generated, *depths, *batches, *threads, *beside_kv, *json;
    bool no_warmup, no_roofs, shares;
};

static const struct model_settings model_defaults = {
    .engine = ENGINE_SETTINGS_DEFAULT,
    .num_samples = {.value = 5},
    .prompts = "512",
    .generated = "128",
    .depths = "0",
    .batches = "1",
    .energy_ms = {.value = 1000},
};

static const struct option_choice format_choices[] = {
    {"md", BENCH_FORMAT_TABLE}, {"json", BENCH_FORMAT_JSON}, {NULL, 0}};

static const struct option_spec model_options[] = {
    {.long_name = "model",
     .short_name = 'm',
     .argument = "MODEL",
     .type = OPTION_TYPE_STRINGS,
     .group = "Tests",
     .help = "a model to measure, instead of the operand; may be given several times",
     .default_text = "the built-in model",
     .offset = offsetof(struct model_settings, models)},
    {.long_name = "prompt",
     .short_name = 'p',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "tokens of prompts to read, also more than the model was made for; 0: no such test",
     .default_text = "512",
     .offset = offsetof(struct model_settings, prompts)},
    {.long_name = "generate",
     .short_name = 'n',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "tokens to generate; 0: no such test",
     .default_text = "128",
     .offset = offsetof(struct model_settings, generated)},
    {.long_name = "depth",
     .short_name = 'd',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "tokens in the context before either, whose time does not count: whole KV blocks",
     .default_text = "0",
     .offset = offsetof(struct model_settings, depths)},
    {.long_name = "batch",
     .short_name = 'b',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "sequences that generate together, each behind a context of its own",
     .default_text = "1",
     .offset = offsetof(struct model_settings, batches)},
    {.long_name = "repetitions",
     .short_name = 'r',
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Tests",
     .help = "samples of each test",
     .min = 1,
     .max = 10000,
     .offset = offsetof(struct model_settings, num_samples)},
    {.long_name = "no-warmup",
     .type = OPTION_TYPE_FLAG,
     .group = "Tests",
     .help = "do not run each test once before",
     .offset = offsetof(struct model_settings, no_warmup)},
    {.long_name = "no-roofs",
     .type = OPTION_TYPE_FLAG,
     .group = "Tests",
     .help = "do not measure what the machine can do",
     .offset = offsetof(struct model_settings, no_roofs)},
    ENGINE_OPTION_DEVICE(struct model_settings),
    ENGINE_OPTION_COMPUTE(struct model_settings),
    ENGINE_OPTION_KV_DTYPE(struct model_settings),
    {.long_name = "beside-kv",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "measure beside it, in turns, engines that keep keys and values as these types: of "
             "those of --kv-dtype",
     .default_text = "none",
     .offset = offsetof(struct model_settings, beside_kv)},
    ENGINE_OPTION_TUNED(struct model_settings),
    ENGINE_OPTION_ABLATE(struct model_settings,
                         "on a GPU, measure beside it, in turns, engines each without one of: mlp "
                         "(gate, up and the activation in one kernel), attention (the fast kernels "
                         "of it), pdl (kernels that begin while the one ahead of them ends), graph "
                         "(decode steps that are launched as a whole), hopper (kernels that older "
                         "GPUs do not run)"),
    {.long_name = "shares",
     .type = OPTION_TYPE_FLAG,
     .group = "Engine",
     .help = "on a GPU, tell the shares of MLP and attention in the time: by engines that leave "
             "them out",
     .offset = offsetof(struct model_settings, shares)},
    ENGINE_OPTION_INVARIANT(struct model_settings),
    ENGINE_OPTION_NVTX(struct model_settings),
    {.long_name = "threads",
     .fields = "num_threads",
     .short_name = 't',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "compute threads",
     .default_text = "all CPUs of this process",
     .offset = offsetof(struct model_settings, threads)},
    {.long_name = "max-step-tokens",
     .fields = "max_step_tokens",
     .short_name = 'u',
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Engine",
     .help = "tokens of a prompt in one step (llama-bench's ubatch)",
     .default_text = "512; on a GPU the engine's",
     .min = 16,
     .max = IMBREX_MAX_STEP_TOKENS,
     .offset = offsetof(struct model_settings, max_step_tokens)},
    ENGINE_OPTION_CPU(struct model_settings),
    {.long_name = "energy-ms",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "Report",
     .help = "on a GPU, then repeat each test alone for so long and read the energy counter, clock "
             "and power; 0: not",
     .max = 60000,
     .offset = offsetof(struct model_settings, energy_ms)},
    {.long_name = "output",
     .short_name = 'o',
     .argument = "FORMAT",
     .type = OPTION_TYPE_CHOICE,
     .group = "Report",
     .help = "on standard output: md, a table; json, with every sample",
     .choices = format_choices,
     .offset = offsetof(struct model_settings, format)},
    {.long_name = "json",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help = "write the JSON to a file too",
     .offset = offsetof(struct model_settings, json)},
};

struct model_bench {
    const struct model_settings *settings;
    struct number_list prompts, generated, depths, batches, threads;
    json_t *rows;
    FILE *json_file; /* or NULL */
    struct speed_model described;
    struct imbrex_model *model;
    int32_t vocab_size;
    int32_t *prefix_ids;            /* [the largest batch, the largest depth] */
    struct imbrex_memory_plan plan; /* of the engines below */
    struct speed_engine engines[SPEED_MAX_ENGINES];
    int32_t num_engines;
    int64_t kv_tokens; /* each has room for */
    struct roofs *roofs;
    struct gpu_meter *meter; /* of a GPU */
    struct gpu_description gpu;
    bool has_head;
};

/* ---- options --------------------------------------------------------------------------------- */

static int parse_lists(struct model_bench *bench)
{
    const struct model_settings *settings = bench->settings;
    static const char command[] = "bench model";
    int exit_code =
        number_list_parse(command, "--prompt", settings->prompts, 0, MAX_TOKENS, &bench->prompts);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = number_list_parse(command, "--generate", settings->generated, 0, MAX_TOKENS,
                                      &bench->generated);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            number_list_parse(command, "--depth", settings->depths, 0, MAX_TOKENS, &bench->depths);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            number_list_parse(command, "--batch", settings->batches, 1, MAX_BATCH, &bench->batches);
    }
    if (exit_code == EXIT_CODE_OK && settings->threads != NULL) {
        exit_code = number_list_parse(command, "--threads", settings->threads, 1, MAX_THREADS,
                                      &bench->threads);
    } else {
        bench->threads = (struct number_list){.count = 1};
    }
    if (exit_code == EXIT_CODE_OK && number_list_max(&bench->prompts) == 0 &&
        number_list_max(&bench->generated) == 0) {
        output_error("bench model: expected tokens in --prompt or --generate, found 0 in both");
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

static int check_settings(struct model_bench *bench, const char *operand)
{
    const struct model_settings *settings = bench->settings;

    if (operand != NULL && settings->models.count > 0) {
        output_error("bench model: expected one of MODEL and --model, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->json != NULL && settings->json[0] == '\0') {
        output_error("bench model: --json: expected the name of a file, found \"\"");
        return EXIT_CODE_INPUT;
    }
    return parse_lists(bench);
}

/* ---- model and engine ------------------------------------------------------------------------ */

/* Speed does not depend on sense, so that contexts may be longer than the model is for. */
static void warn_of_length(const struct model_bench *bench)
{
    int32_t prompt = number_list_max(&bench->prompts);
    int32_t generated = number_list_max(&bench->generated);
    int64_t longest =
        (int64_t)number_list_max(&bench->depths) + (prompt > generated ? prompt : generated);

    if (longest > bench->described.info.max_position_embeddings) {
        output_warning("bench model: %s: contexts of up to %" PRId64 " tokens, more than the "
                       "%" PRId32 " that it was made for (max_position_embeddings): the speed is "
                       "that of its shape, the text would be worth nothing",
                       bench->described.info.path, longest,
                       bench->described.info.max_position_embeddings);
    }
}

static int open_model(struct model_bench *bench, const char *path)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    /* No log: that there is no tokenizer, say, is nothing to a benchmark. */
    if (imbrex_model_open(path, NULL, &bench->model, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_model(bench->model);
    speed_model_describe(bench->model, &bench->described);
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(bench->model);
    int32_t num_rows = bench->described.info.vocab_size;
    bench->vocab_size = tokenizer != NULL ? imbrex_tokenizer_vocab_size(tokenizer) : num_rows;
    bench->vocab_size = bench->vocab_size < num_rows ? bench->vocab_size : num_rows;
    warn_of_length(bench);
    return EXIT_CODE_OK;
}

static void close_model(struct model_bench *bench)
{
    signals_set_model(NULL);
    imbrex_model_close(bench->model);
    free(bench->prefix_ids);
    bench->model = NULL;
    bench->prefix_ids = NULL;
}

/* Calls `visit` for each test, in the order in which they are run: at each depth prompts, then
 * generating, until it returns another exit code than EXIT_CODE_OK. */
static int for_each_test(struct model_bench *bench,
                         int (*visit)(struct model_bench *bench, const struct speed_test *test,
                                      void *arg),
                         void *arg)
{
    int exit_code = EXIT_CODE_OK;

    for (int32_t d = 0; d < bench->depths.count; d++) {
        struct speed_test test = {.depth = bench->depths.values[d], .batch = 1, .is_prompt = true};
        for (int32_t i = 0; i < bench->prompts.count && exit_code == EXIT_CODE_OK; i++) {
            test.num_tokens = bench->prompts.values[i];
            exit_code = test.num_tokens > 0 ? visit(bench, &test, arg) : EXIT_CODE_OK;
        }
        test.is_prompt = false;
        for (int32_t i = 0; i < bench->generated.count * bench->batches.count; i++) {
            test.num_tokens = bench->generated.values[i / bench->batches.count];
            test.batch = bench->batches.values[i % bench->batches.count];
            if (exit_code == EXIT_CODE_OK && test.num_tokens > 0) {
                exit_code = visit(bench, &test, arg);
            }
        }
    }
    return exit_code;
}

/* What the tests of an engine need. */
struct bench_sizes {
    int32_t max_step_tokens;
    int64_t most_kv_tokens; /* that there is room for */
    int32_t context_size;   /* of the longest test that fits */
    int64_t kv_tokens;      /* of the largest */
};

static int measure_test(struct model_bench *bench, const struct speed_test *test, void *arg)
{
    struct bench_sizes *sizes = arg;
    int32_t context_size = speed_context_tokens(test, sizes->max_step_tokens);
    int64_t kv_tokens = speed_kv_tokens(test, sizes->max_step_tokens);

    (void)bench;
    if (kv_tokens <= sizes->most_kv_tokens) {
        sizes->context_size =
            context_size > sizes->context_size ? context_size : sizes->context_size;
        sizes->kv_tokens = kv_tokens > sizes->kv_tokens ? kv_tokens : sizes->kv_tokens;
    }
    return EXIT_CODE_OK;
}

/* Ids that all contexts begin with, of each sequence others. */
static int make_prefixes(struct model_bench *bench)
{
    int64_t count = (int64_t)number_list_max(&bench->batches) * number_list_max(&bench->depths);
    uint64_t random_state = 0;

    bench->prefix_ids = calloc((size_t)count + 1, sizeof(*bench->prefix_ids));
    if (bench->prefix_ids == NULL) {
        return output_out_of_memory();
    }
    speed_random_ids(&random_state, bench->vocab_size, bench->prefix_ids, count);
    return EXIT_CODE_OK;
}

/* Whole blocks are what the prefix cache keeps. */
static int check_depths(const struct model_bench *bench, const struct imbrex_memory_plan *plan)
{
    for (int32_t i = 0; i < bench->depths.count; i++) {
        if (bench->depths.values[i] % plan->kv_block_size != 0) {
            output_error("bench model: --depth: expected multiples of a KV block's %" PRId32
                         " tokens, found %" PRId32,
                         plan->kv_block_size, bench->depths.values[i]);
            return EXIT_CODE_INPUT;
        }
    }
    return EXIT_CODE_OK;
}

/* ---- engines --------------------------------------------------------------------------------- */

static int plan_engine(const struct model_bench *bench, const struct imbrex_engine_options *options,
                       struct imbrex_memory_plan *plan)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    if (imbrex_engine_plan(bench->model, options, plan, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    return EXIT_CODE_OK;
}

/* One engine for each type of keys and values between commas. */
static int list_kv_engines(struct model_bench *bench, const char *list)
{
    for (const char *word = list; word != NULL;) {
        size_t length = strcspn(word, ",");
        const struct option_choice *choice = engine_kv_dtype_choices;
        while (choice->name != NULL &&
               (strlen(choice->name) != length || strncmp(choice->name, word, length) != 0)) {
            choice++;
        }
        if (choice->name == NULL) {
            output_error("bench model: --beside-kv: expected types of --kv-dtype between commas, "
                         "found \"%.*s\"",
                         (int)length, word);
            return EXIT_CODE_INPUT;
        }
        if (bench->num_engines == SPEED_MAX_ENGINES) {
            output_error("bench model: --beside-kv: expected at most %d engines in all, found more",
                         SPEED_MAX_ENGINES);
            return EXIT_CODE_INPUT;
        }
        bench->engines[bench->num_engines++] =
            (struct speed_engine){.name = choice->name,
                                  .has_kv_dtype = true,
                                  .kv_dtype = (enum imbrex_kv_dtype)choice->value};
        word = word[length] == ',' ? word + length + 1 : NULL;
    }
    return EXIT_CODE_OK;
}

/* One engine as it is, and one without each thing that was named. */
static void list_engines(struct model_bench *bench, uint32_t ablations)
{
    bench->num_engines = 0;
    bench->engines[bench->num_engines++] = (struct speed_engine){.name = NULL};
    for (const struct option_choice *choice = engine_ablations; choice->name != NULL; choice++) {
        if ((ablations & (uint32_t)choice->value) != 0) {
            bench->engines[bench->num_engines++] =
                (struct speed_engine){.name = choice->name, .ablations = (uint32_t)choice->value};
        }
    }
    if (bench->settings->shares) {
        bench->engines[bench->num_engines++] =
            (struct speed_engine){.name = "MLP", .ablations = IMBREX_OMIT_MLP, .is_omission = true};
        bench->engines[bench->num_engines++] = (struct speed_engine){
            .name = "attention", .ablations = IMBREX_OMIT_ATTENTION, .is_omission = true};
    }
}

#if IMBREX_CUDA
/* Tokens that the KV cache of each engine can have. */
static int64_t most_gpu_tokens(const struct model_bench *bench,
                               const struct imbrex_memory_plan *plan)
{
    size_t free_bytes = gpu_meter_free_bytes(bench->meter);
    size_t fixed_bytes = plan->device_weight_bytes + plan->activation_bytes + plan->batch_bytes;
    size_t token_bytes =
        plan->kv_bytes / ((size_t)plan->kv_num_blocks * (size_t)plan->kv_block_size);

    free_bytes = free_bytes > GPU_RESERVE_BYTES ? free_bytes - GPU_RESERVE_BYTES : 0;
    free_bytes /= (size_t)bench->num_engines;
    return free_bytes > fixed_bytes
               ? (int64_t)((free_bytes - fixed_bytes) / (token_bytes > 0 ? token_bytes : 1))
               : 0;
}
#endif

static int open_meter(struct model_bench *bench, const struct imbrex_memory_plan *plan)
{
#if IMBREX_CUDA
    int exit_code = EXIT_CODE_OK;
    if (bench->meter == NULL) {
        exit_code = gpu_meter_open(plan->device_idx, &bench->meter);
    }
    if (exit_code == EXIT_CODE_OK) {
        gpu_meter_describe(bench->meter, &bench->gpu);
    }
    return exit_code;
#else
    (void)bench, (void)plan;
    return EXIT_CODE_OK;
#endif
}

/* The sizes of the engines, which all have the same. */
static int choose_sizes(struct model_bench *bench, struct imbrex_engine_options *options)
{
    const struct model_settings *settings = bench->settings;
    struct bench_sizes sizes = {.most_kv_tokens = IMBREX_MAX_KV_CACHE_TOKENS};
    struct imbrex_memory_plan plan;

    options->max_running = number_list_max(&bench->batches);
    options->max_step_tokens = (int32_t)settings->max_step_tokens.value;
    options->kv_cache_tokens = options->context_size = IMBREX_MAX_STEP_TOKENS;
    int exit_code = plan_engine(bench, options, &plan);
    if (exit_code == EXIT_CODE_OK && !engine_settings_has_gpu(&plan) &&
        !settings->max_step_tokens.given) {
        options->max_step_tokens = DEFAULT_STEP_TOKENS;
        exit_code = plan_engine(bench, options, &plan);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_check(&settings->engine, &plan);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = check_depths(bench, &plan);
    }
    if (exit_code == EXIT_CODE_OK && plan.max_running < options->max_running) {
        output_error("bench model: --batch: expected at most %" PRId32
                     " sequences in steps of %" PRId32 " tokens, found %" PRId32,
                     plan.max_running, plan.max_step_tokens, options->max_running);
        exit_code = EXIT_CODE_INPUT;
    }
    if (exit_code == EXIT_CODE_OK && engine_settings_has_gpu(&plan)) {
        exit_code = open_meter(bench, &plan);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    sizes.max_step_tokens = plan.max_step_tokens;
    if (!engine_settings_has_gpu(&plan)) {
        /* Decided: auto need not look for a GPU again. */
        options->device = "cpu";
    }
#if IMBREX_CUDA
    if (bench->meter != NULL) {
        int64_t most = most_gpu_tokens(bench, &plan);
        sizes.most_kv_tokens = most < sizes.most_kv_tokens ? most : sizes.most_kv_tokens;
    }
#endif
    (void)for_each_test(bench, measure_test, &sizes);
    options->context_size = sizes.context_size > 2 ? sizes.context_size : 2;
    int64_t kv_tokens =
        options->context_size > plan.max_step_tokens ? options->context_size : plan.max_step_tokens;
    bench->kv_tokens = kv_tokens > sizes.kv_tokens ? kv_tokens : sizes.kv_tokens;
    options->kv_cache_tokens = (int32_t)bench->kv_tokens;
    options->kv_policy = number_list_max(&bench->depths) > 0 ? "lru" : "none";
    return EXIT_CODE_OK;
}

static int check_gpu_options(const struct model_bench *bench)
{
    const struct model_settings *settings = bench->settings;
    bool has_energy = settings->energy_ms.given && settings->energy_ms.value > 0.0;
    const char *name = settings->shares ? "shares" : has_energy ? "energy-ms" : NULL;

    if (name != NULL && bench->meter == NULL) {
        output_error("bench model: --%s: expected a model that runs on a GPU with it, found one on "
                     "the CPU",
                     name);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

static int create_engines(struct model_bench *bench, int32_t num_threads)
{
    const struct engine_settings *settings = &bench->settings->engine;
    struct imbrex_engine_options options;
    struct imbrex_memory_plan plan;
    int exit_code = engine_settings_to_options(settings, 0, &options);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    list_engines(bench, options.ablations);
    exit_code = list_kv_engines(bench, bench->settings->beside_kv);
    enum imbrex_kv_dtype kv_dtype = options.kv_dtype;
    options.ablations = 0;
    options.num_threads = num_threads;
    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_sizes(bench, &options);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = check_gpu_options(bench);
    }
    for (int32_t i = 0; i < bench->num_engines && exit_code == EXIT_CODE_OK; i++) {
        options.ablations = bench->engines[i].ablations;
        options.kv_dtype = bench->engines[i].has_kv_dtype ? bench->engines[i].kv_dtype : kv_dtype;
        exit_code = engine_settings_create(settings, bench->model, &options, true,
                                           &bench->engines[i].engine, &plan);
        if (exit_code == EXIT_CODE_OK && i == 0) {
            bench->plan = plan;
        }
    }
    return exit_code;
}

static void destroy_engines(struct model_bench *bench)
{
    for (int32_t i = 0; i < bench->num_engines; i++) {
        imbrex_engine_destroy(bench->engines[i].engine);
    }
    bench->num_engines = 0;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* The rate that bounds a prompt. That of tile registers is not measured. */
static enum roof_kind prompt_roof(const struct imbrex_model *model, const char *kernels)
{
    if (speed_model_is_quantized(model)) {
        return ROOF_KIND_INT8;
    }
    return strcmp(kernels, "avx512-bf16") == 0 ? ROOF_KIND_BF16 : ROOF_KIND_FP32;
}

static int add_row(struct model_bench *bench, const struct speed_settings *settings,
                   const struct speed_result *result)
{
    if (json_array_append_new(bench->rows, speed_report_row(&bench->described, settings, result)) !=
        0) {
        return output_out_of_memory();
    }
    if (bench->settings->format.value == BENCH_FORMAT_TABLE) {
        speed_report_print_row(&bench->described, settings, result);
    }
    return EXIT_CODE_OK;
}

/* *arg: the struct speed_settings of all tests. */
static int run_test(struct model_bench *bench, const struct speed_test *test, void *arg)
{
    const struct speed_settings *settings = arg;
    struct speed_result result;
    int64_t kv_tokens = speed_kv_tokens(test, bench->plan.max_step_tokens);

    if (signals_interrupt() != 0) {
        return EXIT_CODE_OK;
    }
    if (kv_tokens > bench->kv_tokens) {
        char name[SPEED_TEST_NAME_BYTES];
        output_warning("bench model: %s: left out: expected room for a KV cache of %" PRId64
                       " tokens, found %" PRId64,
                       speed_test_name(test, name), kv_tokens, bench->kv_tokens);
        return EXIT_CODE_OK;
    }
    int exit_code = speed_run(settings, test, &result);
    if (exit_code == EXIT_CODE_OK && result.num_samples > 0) {
        exit_code = add_row(bench, settings, &result);
    }
    speed_result_release(&result);
    return exit_code;
}

static int run_tests(struct model_bench *bench)
{
    const struct model_settings *settings = bench->settings;
    struct speed_settings speed = {
        .model = bench->model,
        .plan = &bench->plan,
        .num_engines = bench->num_engines,
        .roofs = bench->roofs,
        .meter = bench->meter,
        .has_gpu_roofs = !settings->no_roofs,
        .energy_ms = settings->energy_ms.value,
        .num_samples = (int32_t)settings->num_samples.value,
        .vocab_size = bench->vocab_size,
        .prompt_roof =
            bench->meter != NULL ? ROOF_KIND_BF16 : prompt_roof(bench->model, bench->plan.kernels),
        .has_warmup = !settings->no_warmup,
        .prefix_ids = bench->prefix_ids,
        .prefix_stride = number_list_max(&bench->depths),
    };

    memcpy(speed.engines, bench->engines, sizeof(speed.engines));
    if (settings->format.value == BENCH_FORMAT_TABLE && !bench->has_head) {
        speed_report_print_head(bench->meter != NULL ? &bench->gpu : NULL);
        bench->has_head = true;
    }
    return for_each_test(bench, run_test, &speed);
}

static int run_threads(struct model_bench *bench, int32_t num_threads)
{
    /* The first engine draws random weights, which takes a while: as long as there is no row to
     * report, an interrupt ends the program at once. */
    signals_note_interrupts(json_array_size(bench->rows) > 0);
    int exit_code = create_engines(bench, num_threads);
    signals_note_interrupts(true);

    if (exit_code == EXIT_CODE_OK && !bench->settings->no_roofs && bench->meter == NULL) {
        exit_code = roofs_create(bench->plan.num_threads, &bench->roofs);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = run_tests(bench);
    }
    roofs_destroy(bench->roofs);
    bench->roofs = NULL;
    destroy_engines(bench);
    return exit_code;
}

static int run_model(struct model_bench *bench, const char *path)
{
    int exit_code = open_model(bench, path);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = make_prefixes(bench);
    }
    for (int32_t i = 0; i < bench->threads.count && exit_code == EXIT_CODE_OK; i++) {
        exit_code = run_threads(bench, bench->threads.values[i]);
    }
    close_model(bench);
    return exit_code;
}

static int run_models(struct model_bench *bench, const char *operand)
{
    const struct option_strings *models = &bench->settings->models;
    int exit_code = models->count == 0 ? run_model(bench, operand) : EXIT_CODE_OK;

    for (size_t i = 0; i < models->count && exit_code == EXIT_CODE_OK && signals_interrupt() == 0;
         i++) {
        exit_code = run_model(bench, models->values[i]);
    }
    return exit_code;
}

/* ---- report ---------------------------------------------------------------------------------- */

static int write_report(const struct model_bench *bench)
{
    bool is_table = bench->settings->format.value == BENCH_FORMAT_TABLE;
    const struct gpu_description *gpu = bench->meter != NULL ? &bench->gpu : NULL;
    char *text;
    int exit_code = report_dump(speed_report_root(bench->rows, gpu, signals_interrupt() != 0),
                                REPORT_DIGITS, &text);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (is_table) {
        speed_report_print_roofs(bench->rows);
    } else {
        output_printf("%s\n", text);
    }
    if (bench->json_file != NULL) {
        exit_code = report_write_text(bench->settings->json, bench->json_file, text);
    }
    free(text);
    return exit_code;
}

static int bench_models(struct model_bench *bench, const char *operand)
{
    int exit_code = check_settings(bench, operand);

    if (exit_code == EXIT_CODE_OK && bench->settings->json != NULL) {
        exit_code = report_open(bench->settings->json, &bench->json_file);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    signals_watch_interrupts();
    exit_code = run_models(bench, operand);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = write_report(bench);
    }
    return exit_code == EXIT_CODE_OK && signals_interrupt() != 0
               ? EXIT_CODE_SIGNAL + signals_interrupt()
               : exit_code;
}

static int run(const void *settings, const char *model)
{
    struct model_bench bench = {.settings = settings, .rows = json_array()};
    int exit_code = EXIT_CODE_FAILURE;

    if (bench.rows == NULL) {
        (void)output_out_of_memory();
    } else {
        exit_code = bench_models(&bench, model);
    }
    json_decref(bench.rows);
#if IMBREX_CUDA
    gpu_meter_close(bench.meter);
#endif
    if (bench.json_file != NULL) {
        fclose(bench.json_file);
    }
    return exit_code;
}

const struct command bench_model = {
    .name = "bench model",
    .synopsis = "[MODEL] [options]",
    .summary = "tokens/s of prompts and of generating, as llama-bench has them",
    .description =
        "Reads random prompts (pp512) and generates tokens (tg128; tg128 x8: eight sequences "
        "together), optionally behind a context, and prints the mean and the deviation of the "
        "tokens per second. Beside them stands what share of the machine that is, as the median "
        "over pairs: before each sample the rate of the machine is measured, for prompts that of "
        "arithmetic (fp32 multiply-adds; 8-bit dot products for quantised weights; of a GPU its "
        "data sheet says it), for generating that of reading memory. On a GPU also the median "
        "time of a step, the bytes that it reads, and the energy of a token. MODEL is a Hugging "
        "Face folder, a GGUF file or random:SHAPE, such as random:qwen2.5-0.5b; without it the "
        "built-in model is used.",
    .examples = "  imbrex bench model random:qwen2.5-0.5b\n"
                "  imbrex bench model -m a.gguf -m b.gguf -p 512 -n 128 -d 0,4096 -t 1,2 -r 5\n"
                "  imbrex bench model qwen.gguf -p 0 -n 32 -o json\n"
                "  imbrex bench model random:qwen2.5-7b --device cuda -p 2048 -b 1,8,32 "
                "--ablate mlp\n",
    .options = {model_options, sizeof(model_options) / sizeof(model_options[0])},
    .defaults = &model_defaults,
    .settings_bytes = sizeof(model_defaults),
    .run = run,
};
