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
#define DEFAULT_STEP_TOKENS 512 /* llama-bench's ubatch */

enum bench_format { BENCH_FORMAT_TABLE, BENCH_FORMAT_JSON };

struct model_settings {
    struct engine_settings engine; /* its threads are not used: there is a list of them */
    struct option_strings models;
    struct option_integer num_samples, max_step_tokens, format;
    const char *prompts, *generated, *depths, *threads, *device, *json;
    bool no_warmup, no_roofs;
};

static const struct model_settings model_defaults = {
    .engine = ENGINE_SETTINGS_DEFAULT,
    .num_samples = {.value = 5},
    .max_step_tokens = {.value = DEFAULT_STEP_TOKENS},
    .prompts = "512",
    .generated = "128",
    .depths = "0",
    .device = "cpu",
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
     .help = "tokens of prompts to read; 0: no such test",
     .offset = offsetof(struct model_settings, prompts)},
    {.long_name = "generate",
     .short_name = 'n',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "tokens to generate; 0: no such test",
     .offset = offsetof(struct model_settings, generated)},
    {.long_name = "depth",
     .short_name = 'd',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Tests",
     .help = "tokens in the context before either, whose time does not count: whole KV blocks",
     .offset = offsetof(struct model_settings, depths)},
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
    {.long_name = "device",
     .argument = "NAME",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "cpu",
     .offset = offsetof(struct model_settings, device)},
    {.long_name = "threads",
     .short_name = 't',
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "compute threads",
     .default_text = "all CPUs of this process",
     .offset = offsetof(struct model_settings, threads)},
    {.long_name = "max-step-tokens",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Engine",
     .help = "tokens of a prompt in one step (llama-bench's ubatch)",
     .min = 16,
     .max = IMBREX_MAX_STEP_TOKENS,
     .offset = offsetof(struct model_settings, max_step_tokens)},
    ENGINE_OPTION_CPU(struct model_settings),
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
    struct number_list prompts, generated, depths, threads;
    json_t *rows;
    FILE *json_file; /* or NULL */
    struct speed_model described;
    struct imbrex_model *model;
    int32_t vocab_size, context_size, max_depth;
    int32_t *prefix_ids; /* [max_depth] */
    struct roofs *roofs;
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

    if (strcmp(settings->device, "cpu") != 0) {
        output_error("bench model: --device: expected cpu, found \"%s\"", settings->device);
        return EXIT_CODE_INPUT;
    }
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

/* The longest sequence, and the ids that all of them begin with. It may be longer than the model is
 * for: speed does not depend on sense. */
static int choose_context(struct model_bench *bench)
{
    int32_t prompt = number_list_max(&bench->prompts);
    /* A first token, whose time does not count, comes before those generated. */
    int32_t generated = number_list_max(&bench->generated) + 1;
    uint64_t random_state = 0;

    bench->max_depth = number_list_max(&bench->depths);
    bench->context_size = bench->max_depth + (prompt > generated ? prompt : generated) + 1;
    bench->prefix_ids = calloc((size_t)bench->max_depth + 1, sizeof(*bench->prefix_ids));
    if (bench->prefix_ids == NULL) {
        output_error("out of memory");
        return EXIT_CODE_FAILURE;
    }
    speed_random_ids(&random_state, bench->vocab_size, bench->prefix_ids, bench->max_depth);
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

static int create_engine(const struct model_bench *bench, int32_t num_threads,
                         struct imbrex_memory_plan *plan, struct imbrex_engine **engine)
{
    const struct model_settings *settings = bench->settings;
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_engine_options options =
        engine_settings_to_options(&settings->engine, bench->context_size);

    options.num_threads = num_threads;
    options.max_running = 1;
    options.max_step_tokens = (int32_t)settings->max_step_tokens.value;
    if (bench->max_depth > 0) {
        /* Room for the prefix and two tests behind it: the older one is given up first. */
        options.kv_policy = "lru";
        options.kv_cache_tokens = 2 * bench->context_size - bench->max_depth;
    }
    if (options.kv_cache_tokens < options.max_step_tokens) {
        options.kv_cache_tokens = options.context_size > options.max_step_tokens
                                      ? options.context_size
                                      : options.max_step_tokens;
    }
    if (imbrex_engine_create(bench->model, &options, engine, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_engine_memory_plan(*engine, plan);
    int exit_code = engine_settings_check(&settings->engine, plan);
    return exit_code == EXIT_CODE_OK ? check_depths(bench, plan) : exit_code;
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

static int add_row(struct model_bench *bench, const struct speed_result *result,
                   int32_t max_step_tokens)
{
    if (json_array_append_new(bench->rows,
                              speed_report_row(&bench->described, result, max_step_tokens)) != 0) {
        output_error("out of memory");
        return EXIT_CODE_FAILURE;
    }
    if (bench->settings->format.value == BENCH_FORMAT_TABLE) {
        speed_report_print_row(&bench->described, result);
    }
    return EXIT_CODE_OK;
}

static int run_test(struct model_bench *bench, struct imbrex_engine *engine,
                    const struct imbrex_memory_plan *plan, const struct speed_test *test)
{
    struct speed_settings settings = {
        .model = bench->model,
        .engine = engine,
        .roofs = bench->roofs,
        .num_samples = (int32_t)bench->settings->num_samples.value,
        .vocab_size = bench->vocab_size,
        .prompt_roof = prompt_roof(bench->model, plan->kernels),
        .has_warmup = !bench->settings->no_warmup,
        .prefix_ids = bench->prefix_ids,
    };
    struct speed_result result;

    if (test->num_tokens == 0 || signals_interrupt() != 0) {
        return EXIT_CODE_OK;
    }
    int exit_code = speed_run(&settings, test, &result);
    if (exit_code == EXIT_CODE_OK && result.num_samples > 0) {
        exit_code = add_row(bench, &result, plan->max_step_tokens);
    }
    speed_result_release(&result);
    return exit_code;
}

/* Prompts, then generated tokens, at each depth. */
static int run_tests(struct model_bench *bench, struct imbrex_engine *engine,
                     const struct imbrex_memory_plan *plan)
{
    int exit_code = EXIT_CODE_OK;

    for (int32_t d = 0; d < bench->depths.count; d++) {
        for (int32_t kind = 0; kind < 2; kind++) {
            const struct number_list *list = kind == 0 ? &bench->prompts : &bench->generated;
            for (int32_t i = 0; i < list->count && exit_code == EXIT_CODE_OK; i++) {
                struct speed_test test = {list->values[i], bench->depths.values[d], kind == 0};
                exit_code = run_test(bench, engine, plan, &test);
            }
        }
    }
    return exit_code;
}

static int run_threads(struct model_bench *bench, int32_t num_threads)
{
    struct imbrex_engine *engine = NULL;
    struct imbrex_memory_plan plan;
    int exit_code = create_engine(bench, num_threads, &plan, &engine);

    if (exit_code == EXIT_CODE_OK && !bench->settings->no_roofs) {
        exit_code = roofs_create(plan.num_threads, &bench->roofs);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = run_tests(bench, engine, &plan);
    }
    roofs_destroy(bench->roofs);
    bench->roofs = NULL;
    imbrex_engine_destroy(engine);
    return exit_code;
}

static int run_model(struct model_bench *bench, const char *path)
{
    int exit_code = open_model(bench, path);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_context(bench);
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
    json_t *root = speed_report_root(bench->rows, signals_interrupt() != 0);
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) : NULL;
    int exit_code = EXIT_CODE_OK;

    if (text == NULL) {
        output_error("out of memory");
        exit_code = EXIT_CODE_FAILURE;
    } else if (is_table) {
        speed_report_print_roofs(bench->rows);
    } else {
        output_printf("%s\n", text);
    }
    if (exit_code == EXIT_CODE_OK && bench->json_file != NULL) {
        exit_code = report_write(bench->settings->json, bench->json_file, root);
    }
    json_decref(root);
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
    signals_note_interrupts(true);
    signals_watch_interrupts();
    if (bench->settings->format.value == BENCH_FORMAT_TABLE) {
        speed_report_print_head();
    }
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
        output_error("out of memory");
    } else {
        exit_code = bench_models(&bench, model);
    }
    json_decref(bench.rows);
    if (bench.json_file != NULL) {
        fclose(bench.json_file);
    }
    return exit_code;
}

const struct command bench_model = {
    .name = "bench model",
    .synopsis = "[MODEL] [options]",
    .summary = "one sequence: tokens/s of prompts and of generating, as llama-bench has them",
    .description =
        "Reads random prompts (pp512) and generates tokens (tg128), one sequence at a time and "
        "optionally behind a context, and prints the mean and the deviation of the tokens per "
        "second. Beside them stands what share of the machine that is, as the median over pairs: "
        "before each sample the rate of the machine is measured, for prompts that of arithmetic "
        "(fp32 multiply-adds; 8-bit dot products for quantised weights), for generating that of "
        "reading memory. MODEL is a Hugging Face folder, a GGUF file or random:SHAPE, such as "
        "random:qwen2.5-0.5b; without it the built-in model is used.",
    .examples = "  imbrex bench model random:qwen2.5-0.5b\n"
                "  imbrex bench model -m a.gguf -m b.gguf -p 512 -n 128 -d 0,4096 -t 1,2 -r 5\n"
                "  imbrex bench model qwen.gguf -p 0 -n 32 -o json\n",
    .options = {model_options, sizeof(model_options) / sizeof(model_options[0])},
    .defaults = &model_defaults,
    .settings_bytes = sizeof(model_defaults),
    .run = run,
};
