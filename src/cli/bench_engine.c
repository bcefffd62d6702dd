/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench engine: a load of random prompts for an engine in this process, and what it makes of
 * them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/load_plan.h"
#include "cli/load_report.h"
#include "cli/load_run.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

#define DEFAULT_REQUESTS 32
#define DEFAULT_CONCURRENCY 8
#define MAX_REQUESTS 10000000
#define MIN_RATE 1e-6   /* a request in 11 days */
#define MIN_SLO_MS 1e-6 /* 1 ns */

struct bench_settings {
    struct engine_settings engine;
    struct option_integer num_requests, concurrency, num_choices, seed, warmup;
    struct option_integer max_running, max_step_tokens, shared_prefix;
    struct option_real rate, speed, temperature, slo_ttft_ms, slo_itl_ms;
    const char *prompt_tokens, *output_tokens, *trace, *priority_mix, *json;
    bool clip, no_batch_invariant, compare_invariant;
};

static const struct bench_settings bench_defaults = {
    .engine = ENGINE_SETTINGS_DEFAULT,
    .num_choices = {.value = 1},
    .seed = {.value = 1},
    .warmup = {.value = 4},
    .speed = {.value = 1},
    .prompt_tokens = "128",
    .output_tokens = "64",
};

static const struct option_spec bench_options[] = {
    {.long_name = "requests",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "requests to send; of a trace: the first N",
     .default_text = "32; all of a trace",
     .min = 1,
     .max = MAX_REQUESTS,
     .offset = offsetof(struct bench_settings, num_requests)},
    {.long_name = "concurrency",
     .argument = "C",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "closed loop: C requests at once, the next one as soon as one ends",
     .default_text = "8, without --rate and --trace",
     .min = 1,
     .max = IMBREX_MAX_WAITING,
     .offset = offsetof(struct bench_settings, concurrency)},
    {.long_name = "rate",
     .argument = "R",
     .type = OPTION_TYPE_REAL,
     .group = "Load",
     .help = "open loop: R requests a second on average, at random times (Poisson), however long "
             "they take",
     .default_text = "closed loop",
     .min = MIN_RATE,
     .max = 1e6,
     .offset = offsetof(struct bench_settings, rate)},
    {.long_name = "prompt-tokens",
     .argument = "LENGTH",
     .type = OPTION_TYPE_STRING,
     .group = "Load",
     .help = "tokens of a prompt: N, MIN-MAX (uniform), or lognormal:MEAN,SIGMA, SIGMA being the "
             "standard deviation of the logarithm",
     .default_text = "128",
     .offset = offsetof(struct bench_settings, prompt_tokens)},
    {.long_name = "output-tokens",
     .argument = "LENGTH",
     .type = OPTION_TYPE_STRING,
     .group = "Load",
     .help = "tokens to generate, in the same forms; end tokens end nothing",
     .default_text = "64",
     .offset = offsetof(struct bench_settings, output_tokens)},
    {.long_name = "shared-prefix",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "let all prompts begin with the same N ids, or be a part of them if they are shorter",
     .max = IMBREX_MAX_CONTEXT_SIZE,
     .offset = offsetof(struct bench_settings, shared_prefix)},
    {.long_name = "trace",
     .argument = "FILE.csv",
     .type = OPTION_TYPE_STRING,
     .group = "Load",
     .help = "lengths, and times without --concurrency and --rate, from a csv file with columns "
             "arrival_s (or arrival_ms), prompt_tokens and output_tokens, or TIMESTAMP, "
             "ContextTokens and GeneratedTokens; - is standard input",
     .offset = offsetof(struct bench_settings, trace)},
    {.long_name = "speed",
     .argument = "F",
     .type = OPTION_TYPE_REAL,
     .group = "Load",
     .help = "play the times of a trace F times as fast",
     .min = MIN_RATE,
     .max = 1e6,
     .offset = offsetof(struct bench_settings, speed)},
    {.long_name = "clip",
     .type = OPTION_TYPE_FLAG,
     .group = "Load",
     .help = "cut requests that are longer than the context, instead of refusing them: the prompt "
             "first",
     .offset = offsetof(struct bench_settings, clip)},
    {.long_name = "n",
     .fields = "num_choices",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "continuations of each prompt",
     .min = 1,
     .max = IMBREX_MAX_CHOICES,
     .offset = offsetof(struct bench_settings, num_choices)},
    {.long_name = "priority-mix",
     .argument = "P=W,...",
     .type = OPTION_TYPE_STRING,
     .group = "Load",
     .help = "priorities of requests and how often they come, such as 0=9,10=1",
     .default_text = "all 0",
     .offset = offsetof(struct bench_settings, priority_mix)},
    {.long_name = "temp",
     .fields = "temperature",
     .argument = "T",
     .type = OPTION_TYPE_REAL,
     .group = "Load",
     .help = "temperature; 0: the most likely token",
     .max = 100,
     .offset = offsetof(struct bench_settings, temperature)},
    {.long_name = "seed",
     .argument = "S",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "the same seed makes the same load",
     .max = UINT32_MAX,
     .offset = offsetof(struct bench_settings, seed)},
    {.long_name = "warmup",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "requests that are run before and not counted",
     .max = MAX_REQUESTS,
     .offset = offsetof(struct bench_settings, warmup)},
    ENGINE_OPTION_CTX_SIZE(struct bench_settings, "the longest request"),
    ENGINE_OPTION_KV_CACHE(struct bench_settings,
                           "enough for all that run at once; less makes the engine preempt"),
    ENGINE_OPTION_KV_POLICY(struct bench_settings, "lru; none with --compare-invariant"),
    ENGINE_OPTION_MAX_RUNNING(struct bench_settings),
    {.long_name = "max-step-tokens",
     .fields = "max_step_tokens",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Engine",
     .help = "tokens in one step, of prompts and outputs together",
     .default_text = "the engine's",
     .min = 1,
     .max = IMBREX_MAX_STEP_TOKENS,
     .offset = offsetof(struct bench_settings, max_step_tokens)},
    {.long_name = "no-batch-invariant",
     .type = OPTION_TYPE_FLAG,
     .group = "Engine",
     .help = "let chunks of prompts begin anywhere, as on a GPU without --batch-invariant",
     .offset = offsetof(struct bench_settings, no_batch_invariant)},
    {.long_name = "compare-invariant",
     .type = OPTION_TYPE_FLAG,
     .group = "Engine",
     .help = "run the load with and without batch invariance in turns, three times each, and show "
             "what it costs; closed loop only",
     .offset = offsetof(struct bench_settings, compare_invariant)},
    ENGINE_OPTION_KV_TIERS(struct bench_settings),
    ENGINE_OPTION_KV_PREFETCH(struct bench_settings),
    ENGINE_OPTION_KV_DTYPE(struct bench_settings),
    ENGINE_OPTIONS_GPU(struct bench_settings),
    ENGINE_OPTION_INVARIANT(struct bench_settings),
    ENGINE_OPTION_THREADS(struct bench_settings),
    ENGINE_OPTION_CPU(struct bench_settings),
    {.long_name = "slo-ttft",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "Report",
     .help = "a request counts for the goodput if its first token came after at most MS ms",
     .default_text = "no limit",
     .min = MIN_SLO_MS,
     .max = 1e9,
     .offset = offsetof(struct bench_settings, slo_ttft_ms)},
    {.long_name = "slo-itl",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "Report",
     .help =
         "and if the gaps between the tokens of each of its texts were at most MS ms on average",
     .default_text = "no limit",
     .min = MIN_SLO_MS,
     .max = 1e9,
     .offset = offsetof(struct bench_settings, slo_itl_ms)},
    {.long_name = "json",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help = "write the report to a JSON file too; -: to standard output, instead of the table",
     .offset = offsetof(struct bench_settings, json)},
};

struct bench_state {
    const struct bench_settings *settings;
    const char *model_name;
    struct imbrex_model *model;
    struct imbrex_engine *engine;
    struct imbrex_engine *variant_engine; /* without batch invariance, to compare; or NULL */
    struct load_plan load, warmup;
    struct load_settings load_settings;
    struct load_report report;
    FILE *json_file; /* NULL: none, or standard output */
};

/* ---- options --------------------------------------------------------------------------------- */

static int report_needs(const char *option, const char *needed)
{
    output_error("bench engine: --%s: expected %s with it, found none", option, needed);
    return EXIT_CODE_INPUT;
}

/* The times of the trace are when requests come. */
static bool has_trace_times(const struct bench_settings *settings)
{
    return settings->trace != NULL && !settings->concurrency.given && !settings->rate.given;
}

static const char *policy_of(const struct bench_settings *settings)
{
    bool is_chosen = settings->compare_invariant && settings->engine.kv_policy == NULL;

    return is_chosen ? "none" : engine_settings_policy(&settings->engine);
}

static int check_settings(const struct bench_settings *settings)
{
    int exit_code = report_check_name("bench engine", "trace", settings->trace);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = report_check_name("bench engine", "json", settings->json);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (settings->concurrency.given && settings->rate.given) {
        output_error("bench engine: expected one of --concurrency and --rate, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->speed.given && !has_trace_times(settings)) {
        return report_needs("speed", "the times of a --trace");
    }
    if (settings->trace != NULL && (settings->prompt_tokens != bench_defaults.prompt_tokens ||
                                    settings->output_tokens != bench_defaults.output_tokens)) {
        output_error("bench engine: expected one of --trace and --%s-tokens, found both",
                     settings->prompt_tokens != bench_defaults.prompt_tokens ? "prompt" : "output");
        return EXIT_CODE_INPUT;
    }
    if (settings->compare_invariant && (has_trace_times(settings) || settings->rate.given)) {
        return report_needs("compare-invariant", "a closed loop (--concurrency)");
    }
    if (settings->compare_invariant && settings->no_batch_invariant) {
        output_error("bench engine: expected one of --compare-invariant and --no-batch-invariant, "
                     "found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->engine.batch_invariant && settings->no_batch_invariant) {
        output_error("bench engine: expected one of --batch-invariant and --no-batch-invariant, "
                     "found both");
        return EXIT_CODE_INPUT;
    }
    /* The same prompts come again and again: all but the first run would find them. */
    if (settings->compare_invariant && strcmp(policy_of(settings), "none") != 0) {
        output_error("bench engine: --compare-invariant: expected --kv-policy none with it, found "
                     "%s",
                     policy_of(settings));
        return EXIT_CODE_INPUT;
    }
    if (settings->compare_invariant && engine_settings_has_tiers(&settings->engine)) {
        output_error("bench engine: --compare-invariant: expected no --kv-host, --kv-disk or "
                     "--kv-remote with it, since it runs without a prefix cache");
        return EXIT_CODE_INPUT;
    }
    return engine_settings_check_policy("kv-policy", policy_of(settings));
}

static int open_json(struct bench_state *state)
{
    const char *path = state->settings->json;

    if (path == NULL || report_is_dash(path)) {
        return EXIT_CODE_OK;
    }
    return report_open(path, &state->json_file);
}

/* ---- the load -------------------------------------------------------------------------------- */

static int make_requests(struct bench_state *state)
{
    const struct bench_settings *settings = state->settings;
    struct load_lengths prompts, outputs;
    uint64_t seed = (uint64_t)settings->seed.value;

    if (settings->trace != NULL) {
        size_t max_requests =
            settings->num_requests.given ? (size_t)settings->num_requests.value : MAX_REQUESTS;
        return load_plan_read_trace(&state->load, settings->trace, max_requests,
                                    has_trace_times(settings), seed);
    }
    int exit_code =
        load_lengths_parse("bench engine", "prompt-tokens", settings->prompt_tokens, &prompts);
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            load_lengths_parse("bench engine", "output-tokens", settings->output_tokens, &outputs);
    }
    if (exit_code == EXIT_CODE_OK) {
        size_t count =
            settings->num_requests.given ? (size_t)settings->num_requests.value : DEFAULT_REQUESTS;
        exit_code = load_plan_create(&state->load, count, &prompts, &outputs, seed);
    }
    return exit_code;
}

static int make_load(struct bench_state *state)
{
    const struct bench_settings *settings = state->settings;
    struct load_priorities priorities;
    int exit_code = make_requests(state);

    if (exit_code == EXIT_CODE_OK && settings->priority_mix != NULL) {
        exit_code = load_priorities_parse("priority-mix", settings->priority_mix, &priorities);
        if (exit_code == EXIT_CODE_OK) {
            load_plan_draw_priorities(&state->load, &priorities);
        }
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state->load.shared_prefix = (int32_t)settings->shared_prefix.value;
    if (settings->rate.given) {
        load_plan_draw_arrivals(&state->load, settings->rate.value);
    } else if (settings->concurrency.given) {
        state->load.concurrency = settings->concurrency.value;
    } else if (settings->trace == NULL) {
        state->load.concurrency = DEFAULT_CONCURRENCY;
    } else {
        load_plan_scale_arrivals(&state->load, settings->speed.value);
    }
    return EXIT_CODE_OK;
}

/* The tokens of the longest request, or fewer if --clip says so. */
static int choose_context_size(struct bench_state *state, int32_t *context_size)
{
    const struct bench_settings *settings = state->settings;
    const struct load_request *longest = &state->load.requests[load_plan_longest(&state->load)];
    int64_t needed = (int64_t)longest->num_prompt_tokens + longest->num_output_tokens;
    int64_t limit = state->report.model.max_position_embeddings;

    if (settings->engine.ctx_size.given) {
        limit = settings->engine.ctx_size.value;
    }
    if (needed > limit && !settings->clip) {
        const char *whose = settings->engine.ctx_size.given ? "of --ctx-size" : "the model is for";
        char place[32] = "";
        if (longest->line_number > 0) {
            snprintf(place, sizeof(place), "line %zu: ", longest->line_number);
        }
        output_error(
            "bench engine: %s%s%sexpected prompt and output of at most the %" PRId64
            " tokens %s together, found %" PRId32 " and %" PRId32 "; --clip cuts such requests",
            settings->trace != NULL ? settings->trace : "", settings->trace != NULL ? ": " : "",
            place, limit, whose, longest->num_prompt_tokens, longest->num_output_tokens);
        return EXIT_CODE_INPUT;
    }
    if (needed > limit) {
        state->report.num_cut = load_plan_clip(&state->load, limit);
        needed = limit;
    }
    *context_size = (int32_t)needed;
    return EXIT_CODE_OK;
}

/* The same lengths again, with other ids, at once. */
static int make_warmup(struct bench_state *state)
{
    const struct load_plan *load = &state->load;
    size_t count = (size_t)state->settings->warmup.value;

    if (count == 0) {
        return EXIT_CODE_OK;
    }
    state->warmup = (struct load_plan){
        .requests = calloc(count, sizeof(*state->warmup.requests)),
        .count = count,
        .concurrency =
            load->concurrency > 0 ? load->concurrency : (int64_t)state->report.plan.max_running,
        .seed = load->seed + 1,
        .shared_prefix = load->shared_prefix,
    };
    if (state->warmup.requests == NULL) {
        return output_out_of_memory();
    }
    for (size_t i = 0; i < count; i++) {
        state->warmup.requests[i] = load->requests[i % load->count];
    }
    return EXIT_CODE_OK;
}

/* ---- model and engine ------------------------------------------------------------------------ */

static int open_model(struct bench_state *state, const char *model)
{
    int exit_code = session_open(model, &state->model);

    if (exit_code == EXIT_CODE_OK) {
        imbrex_model_describe(state->model, &state->report.model);
    }
    return exit_code;
}

static int64_t larger_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t smaller_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Room for all sequences that can run at once. The engine lets fewer run than it was asked for if
 * the cache is too small for their step, so it is asked what it would do with one that is not. */
static int choose_kv_tokens(const struct bench_state *state, int64_t most_sequences,
                            struct imbrex_engine_options *options)
{
    int32_t num_choices = (int32_t)state->settings->num_choices.value;
    struct imbrex_engine_options ample = *options;
    struct imbrex_memory_plan plan;

    ample.kv_cache_tokens = (int32_t)larger_of(options->context_size, IMBREX_MAX_STEP_TOKENS);
    int exit_code = engine_settings_plan(state->model, &ample, &plan);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    options->device = ample.device;
    int64_t kv_tokens =
        load_plan_peak_tokens(&state->load, smaller_of(most_sequences, plan.max_running),
                              num_choices, plan.kv_block_size);
    /* A step has a token of each that runs and a block of a prompt; it is no larger than the
     * cache. */
    int64_t least = larger_of(options->context_size, plan.max_running + plan.kv_block_size - 1);
    options->kv_cache_tokens =
        (int32_t)smaller_of(larger_of(kv_tokens, least), IMBREX_MAX_KV_CACHE_TOKENS);
    return EXIT_CODE_OK;
}

/* Waiting room for the whole load, and blocks for all that can run at once. */
static int choose_engine_options(struct bench_state *state, struct imbrex_engine_options *options)
{
    const struct bench_settings *settings = state->settings;
    const struct load_plan *load = &state->load;
    int32_t context_size;

    int exit_code = choose_context_size(state, &context_size);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = engine_settings_to_options(&settings->engine, context_size, options);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    options->max_running = (int32_t)settings->max_running.value;
    options->max_step_tokens = (int32_t)settings->max_step_tokens.value;
    if (settings->no_batch_invariant) {
        options->batch_invariant = IMBREX_INVARIANCE_OFF;
    } else if (settings->compare_invariant) {
        options->batch_invariant = IMBREX_INVARIANCE_ON;
    }
    options->kv_policy = policy_of(settings);
    int64_t most_at_once = load->concurrency > 0 ? load->concurrency : (int64_t)load->count;
    if (most_at_once > IMBREX_MAX_WAITING) {
        most_at_once = IMBREX_MAX_WAITING;
    }
    if (most_at_once > 1024) {
        options->max_waiting = (int32_t)most_at_once;
    }
    if (settings->engine.kv_cache != NULL) {
        return engine_settings_choose_kv_cache(&settings->engine, state->model, options);
    }
    return choose_kv_tokens(state, most_at_once * settings->num_choices.value, options);
}

static int create_engine(struct bench_state *state, struct imbrex_engine_options *options,
                         struct imbrex_engine **engine)
{
    return engine_settings_create(&state->settings->engine, state->model, options, true, engine,
                                  &state->report.plan);
}

static int create_engines(struct bench_state *state)
{
    struct imbrex_engine_options options;
    char kv_folder[ENGINE_MAX_PATH_BYTES];
    int exit_code = choose_engine_options(state, &options);

    if (exit_code == EXIT_CODE_OK) {
        const struct engine_settings *settings = &state->settings->engine;
        exit_code = engine_settings_check_prefetch(settings, engine_settings_has_tiers(settings),
                                                   options.kv_policy);
    }
    if (exit_code == EXIT_CODE_OK) {
        const struct engine_settings *settings = &state->settings->engine;
        exit_code = engine_settings_check_write(settings, settings->kv_disk != NULL ||
                                                              settings->kv_remote != NULL);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_choose_tiers(&state->settings->engine, kv_folder, &options);
        state->report.kv_remote = engine_settings_remote_place(&state->settings->engine);
        state->report.kv_disk_zstd_level = options.kv_disk_zstd_level;
        state->report.kv_prefetch_percent = options.kv_prefetch_percent;
        state->report.kv_write = options.kv_write;
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = create_engine(state, &options, &state->engine);
    }
    if (exit_code == EXIT_CODE_OK && state->settings->compare_invariant) {
        options.batch_invariant = IMBREX_INVARIANCE_OFF;
        exit_code = create_engine(state, &options, &state->variant_engine);
    }
    return exit_code;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static void choose_load_settings(struct bench_state *state)
{
    const struct bench_settings *settings = state->settings;
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(state->model);

    state->load_settings = (struct load_settings){
        .model = state->model,
        .vocab_size = tokenizer != NULL ? imbrex_tokenizer_vocab_size(tokenizer)
                                        : state->report.model.vocab_size,
        .num_choices = (int32_t)settings->num_choices.value,
        .temperature = (float)settings->temperature.value,
        .slo_ttft_ns = (int64_t)ceil(settings->slo_ttft_ms.value * 1e6),
        .slo_itl_ns = (int64_t)ceil(settings->slo_itl_ms.value * 1e6),
        .has_text = tokenizer != NULL,
        .has_progress = isatty(STDERR_FILENO) == 1,
    };
    /* The tokenizer may know ids that the weights have no rows for. */
    if (state->load_settings.vocab_size > state->report.model.vocab_size) {
        state->load_settings.vocab_size = state->report.model.vocab_size;
    }
}

static int run_load(struct bench_state *state, struct imbrex_engine *engine,
                    const struct load_plan *plan, struct load_result *result)
{
    state->load_settings.engine = engine;
    return load_run(&state->load_settings, plan, result);
}

static int warm_up(struct bench_state *state, struct imbrex_engine *engine)
{
    struct load_result ignored;

    return state->warmup.count > 0 ? run_load(state, engine, &state->warmup, &ignored)
                                   : EXIT_CODE_OK;
}

/* Every second pair begins with the other engine: a machine that gets slower or faster meanwhile
 * favours neither. */
static int run_pair(struct bench_state *state, struct load_comparison *comparison)
{
    int32_t pair = comparison->num_pairs;
    bool on_is_first = pair % 2 == 0;
    int exit_code = EXIT_CODE_OK;

    for (int32_t i = 0; i < 2 && exit_code == EXIT_CODE_OK && signals_interrupt() == 0; i++) {
        bool is_on = (i == 0) == on_is_first;
        exit_code = run_load(state, is_on ? state->engine : state->variant_engine, &state->load,
                             is_on ? &comparison->on[pair] : &comparison->off[pair]);
    }
    if (exit_code == EXIT_CODE_OK && signals_interrupt() == 0) {
        comparison->num_pairs++;
    }
    return exit_code;
}

static int compare(struct bench_state *state, struct load_comparison *comparison)
{
    int exit_code = warm_up(state, state->engine);

    if (exit_code == EXIT_CODE_OK && signals_interrupt() == 0) {
        exit_code = warm_up(state, state->variant_engine);
    }
    while (exit_code == EXIT_CODE_OK && signals_interrupt() == 0 &&
           comparison->num_pairs < LOAD_COMPARISON_PAIRS) {
        exit_code = run_pair(state, comparison);
    }
    return exit_code;
}

static int write_json(struct bench_state *state)
{
    char *text = NULL;
    int exit_code = load_report_format_json(&state->report, &text);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (state->json_file == NULL) {
        output_printf("%s\n", text);
    } else {
        exit_code = report_write_text(state->settings->json, state->json_file, text);
    }
    free(text);
    return exit_code;
}

/* Exit code of the whole: a signal's, or that of requests that failed. */
static int show_report(struct bench_state *state, size_t num_failed, const char *first_failure)
{
    int exit_code = EXIT_CODE_OK;
    int signal_number = signals_interrupt();
    const char *json = state->settings->json;

    state->report.was_interrupted = signal_number != 0;
    if (!report_is_dash(json)) {
        load_report_print(&state->report);
    }
    if (json != NULL) {
        exit_code = write_json(state);
    }
    if (exit_code == EXIT_CODE_OK && signal_number != 0) {
        return EXIT_CODE_SIGNAL + signal_number;
    }
    if (exit_code == EXIT_CODE_OK && num_failed > 0) {
        output_error("bench engine: %zu request%s failed; the first: %s", num_failed,
                     output_plural((uint64_t)num_failed), first_failure);
        exit_code = EXIT_CODE_FAILURE;
    }
    return exit_code;
}

static int measure(struct bench_state *state)
{
    struct load_result result = {.num_cancelled = state->load.count};
    int exit_code = warm_up(state, state->engine);

    if (exit_code == EXIT_CODE_OK && signals_interrupt() == 0) {
        exit_code = run_load(state, state->engine, &state->load, &result);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state->report.result = &result;
    return show_report(state, result.num_failed, result.first_failure);
}

static int measure_comparison(struct bench_state *state)
{
    struct load_comparison comparison = {.num_pairs = 0};
    size_t num_failed = 0;
    const char *first_failure = "";
    int exit_code = compare(state, &comparison);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    for (int32_t i = 0; i < comparison.num_pairs; i++) {
        num_failed += comparison.on[i].num_failed + comparison.off[i].num_failed;
        if (first_failure[0] == '\0') {
            first_failure = comparison.on[i].first_failure;
        }
        if (first_failure[0] == '\0') {
            first_failure = comparison.off[i].first_failure;
        }
    }
    state->report.comparison = &comparison;
    return show_report(state, num_failed, first_failure);
}

static void choose_report(struct bench_state *state)
{
    const struct bench_settings *settings = state->settings;
    struct load_report *report = &state->report;

    report->load = &state->load;
    report->settings = &state->load_settings;
    report->trace = settings->trace;
    report->prompt_lengths = settings->trace == NULL ? settings->prompt_tokens : NULL;
    report->output_lengths = settings->trace == NULL ? settings->output_tokens : NULL;
    report->rate = settings->rate.value;
    report->speed = settings->speed.value;
    report->num_warmup = settings->warmup.value;
    report->batch_invariant =
        settings->engine.batch_invariant || settings->compare_invariant ||
        (!settings->no_batch_invariant && !engine_settings_has_gpu(&report->plan));
    report->kv_policy = policy_of(settings);
}

static int bench(struct bench_state *state, const char *model)
{
    int exit_code = check_settings(state->settings);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = make_load(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_json(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_model(state, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = create_engines(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = make_warmup(state);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    choose_load_settings(state);
    choose_report(state);
    signals_note_interrupts(true);
    signals_watch_interrupts();
    return state->settings->compare_invariant ? measure_comparison(state) : measure(state);
}

static int run(const void *settings, const char *model)
{
    struct bench_state state = {.settings = settings, .model_name = model_display_name(model)};
    int exit_code = bench(&state, model);

    imbrex_engine_destroy(state.variant_engine);
    imbrex_engine_destroy(state.engine);
    signals_set_model(NULL);
    imbrex_model_close(state.model);
    load_plan_release(&state.warmup);
    load_plan_release(&state.load);
    if (state.json_file != NULL) {
        fclose(state.json_file);
    }
    return exit_code;
}

const struct command bench_engine = {
    .name = "bench engine",
    .synopsis = "[MODEL] [options]",
    .summary = "many requests at once: throughput, latencies, the engine's overhead",
    .description =
        "Sends prompts of random ids to an engine in this process, in a closed loop, at a rate or "
        "as a trace tells, and prints throughput, the time to the first token (TTFT), the gaps "
        "between tokens (ITL; TPOT is a text's mean gap), the time in the queue, and what a step "
        "takes beside its forward pass. MODEL is a Hugging Face folder, a GGUF file or "
        "random:SHAPE, such as random:qwen2.5-0.5b; without it the built-in model is used. Ctrl-C "
        "ends the load early and prints what there is.",
    .examples =
        "  imbrex bench engine --requests 64 --concurrency 16\n"
        "  imbrex bench engine random:qwen2.5-0.5b --rate 2 --slo-ttft 500 --slo-itl 100\n"
        "  imbrex bench engine --prompt-tokens 32-256 --output-tokens lognormal:64,0.8\n"
        "  imbrex bench engine Qwen2.5-0.5B --trace azure.csv --speed 0.1 --json out.json\n",
    .options = {bench_options, sizeof(bench_options) / sizeof(bench_options[0])},
    .defaults = &bench_defaults,
    .settings_bytes = sizeof(bench_defaults),
    .run = run,
};
