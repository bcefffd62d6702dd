/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench kv: one load of conversations, or of a trace whose prompts share blocks, for engines
 * that differ in what their prefix cache keeps, and in what lies below it. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/bench_kv.h"
#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/engine_settings.h"
#include "cli/make_folders.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/session.h"
#include "cli/signals.h"

#define MAX_ROUNDS 16
#define MAX_WAITING 1048576 /* requests that the engine is asked to let wait */
#define WARMUP_REQUESTS 4
/* --tiers: the load's different tokens are so many times the KV cache, and the RAM below it. */
#define WORKING_SETS 3
#define LEAST_HOST_BLOCKS 16
/* No folder is smaller: a disk is filled in segments. */
#define LEAST_DISK_BYTES ((size_t)128 << 20)
#define DEFAULT_FOLDER "/tmp"

struct kv_settings {
    struct engine_settings engine;
    struct option_integer num_requests, concurrency, rounds, seed, max_running;
    struct option_integer num_sessions, system_tokens;
    struct option_real scale, speed, session_rate, think;
    const char *trace, *starts, *policies, *turns, *turn_tokens, *output_tokens, *write_trace,
        *json;
    bool tiers;
};

static const struct kv_settings kv_defaults = {
    .engine = ENGINE_SETTINGS_DEFAULT,
    .rounds = {.value = 1},
    .seed = {.value = 1},
    .num_sessions = {.value = 16},
    .system_tokens = {.value = 64},
    .scale = {.value = 1},
    .speed = {.value = 1},
    .session_rate = {.value = 4},
    .think = {.value = 1},
    .policies = "lru,predictive",
    .turns = "2-6",
    .turn_tokens = "16-48",
    .output_tokens = "16",
};

static const struct option_spec kv_options[] = {
    {.long_name = "sessions",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Conversations",
     .help = "how many; their prompts are drawn, each turn's is all before it and a new message",
     .min = 1,
     .max = 1000000,
     .offset = offsetof(struct kv_settings, num_sessions)},
    {.long_name = "session-rate",
     .argument = "R",
     .type = OPTION_TYPE_REAL,
     .group = "Conversations",
     .help = "R of them begin in a second on average, at random times (Poisson)",
     .min = 1e-6,
     .max = 1e6,
     .is_double = true,
     .offset = offsetof(struct kv_settings, session_rate)},
    {.long_name = "turns",
     .argument = "LENGTH",
     .type = OPTION_TYPE_STRING,
     .group = "Conversations",
     .help = "turns of a conversation: N, MIN-MAX (uniform), or lognormal:MEAN,SIGMA",
     .default_text = "2-6",
     .offset = offsetof(struct kv_settings, turns)},
    {.long_name = "think",
     .argument = "S",
     .type = OPTION_TYPE_REAL,
     .group = "Conversations",
     .help = "seconds from one turn to the next, on average (exponential)",
     .max = 1e6,
     .is_double = true,
     .offset = offsetof(struct kv_settings, think)},
    {.long_name = "system-tokens",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Conversations",
     .help = "tokens with which all of them begin",
     .max = IMBREX_MAX_CONTEXT_SIZE,
     .offset = offsetof(struct kv_settings, system_tokens)},
    {.long_name = "turn-tokens",
     .argument = "LENGTH",
     .type = OPTION_TYPE_STRING,
     .group = "Conversations",
     .help = "tokens of a message, in the forms of --turns",
     .default_text = "16-48",
     .offset = offsetof(struct kv_settings, turn_tokens)},
    {.long_name = "output-tokens",
     .argument = "LENGTH",
     .type = OPTION_TYPE_STRING,
     .group = "Conversations",
     .help = "tokens of a reply; the next prompt has as many drawn ones in its place",
     .default_text = "16",
     .offset = offsetof(struct kv_settings, output_tokens)},
    {.long_name = "trace",
     .argument = "FILE.jsonl",
     .type = OPTION_TYPE_STRING,
     .group = "Trace",
     .help = "instead of conversations: lengths, times and blocks from a Mooncake, Bailian or WEKA "
             "trace, as imbrex kv-sim reads them; the same id is the same tokens; - is standard "
             "input",
     .offset = offsetof(struct kv_settings, trace)},
    {.long_name = "starts",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Trace",
     .help = "when each session of a WEKA trace starts: a number of seconds a line",
     .default_text = "drawn, --session-rate",
     .offset = offsetof(struct kv_settings, starts)},
    {.long_name = "requests",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Trace",
     .help = "the first N of it; of a WEKA trace, of the sessions in front that have so many",
     .default_text = "all",
     .min = 1,
     .max = 10000000,
     .offset = offsetof(struct kv_settings, num_requests)},
    {.long_name = "scale",
     .argument = "F",
     .type = OPTION_TYPE_REAL,
     .group = "Trace",
     .help = "multiply all its numbers of tokens by F: 0.03125 makes a block one of 16 tokens",
     .min = 0.001,
     .max = 1,
     .is_double = true,
     .offset = offsetof(struct kv_settings, scale)},
    {.long_name = "speed",
     .argument = "F",
     .type = OPTION_TYPE_REAL,
     .group = "Load",
     .help = "play all times F times as fast",
     .min = 1e-6,
     .max = 1e6,
     .is_double = true,
     .offset = offsetof(struct kv_settings, speed)},
    {.long_name = "concurrency",
     .argument = "C",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "closed loop: C requests at once, in the order of their times, the next one as soon "
             "as one ends",
     .default_text = "requests come at their times",
     .min = 1,
     .max = MAX_WAITING,
     .offset = offsetof(struct kv_settings, concurrency)},
    {.long_name = "seed",
     .argument = "S",
     .type = OPTION_TYPE_INTEGER,
     .group = "Load",
     .help = "the same seed makes the same load",
     .max = UINT32_MAX,
     .offset = offsetof(struct kv_settings, seed)},
    {.long_name = "policy",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "policies to compare, names with commas between them, as in imbrex kv-sim; none is an "
             "engine without a prefix cache",
     .default_text = "lru,predictive",
     .offset = offsetof(struct kv_settings, policies)},
    {.long_name = "rounds",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Engine",
     .help = "run each policy N times, in turns, every second round in the opposite order",
     .min = 1,
     .max = MAX_ROUNDS,
     .offset = offsetof(struct kv_settings, rounds)},
    ENGINE_OPTION_KV_CACHE(struct kv_settings,
                           "a quarter of the load's different tokens, at least one context"),
    ENGINE_OPTION_MAX_RUNNING(struct kv_settings),
    {.long_name = "tiers",
     .type = OPTION_TYPE_FLAG,
     .group = "Engine",
     .help = "run each policy with the KV cache alone, with RAM below it, and with RAM and a disk; "
             "sizes that are not given are a third of the load's different tokens for the KV "
             "cache, as much for RAM, and room for twice all of them on the disk",
     .offset = offsetof(struct kv_settings, tiers)},
    {.long_name = "kv-host",
     .fields = "kv_host_bytes",
     .argument = "SIZE",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help =
         "run each policy once more with that much RAM below the KV cache, such as 1G, for what "
         "it has no room for",
     .default_text = "none, but for --tiers",
     .offset = offsetof(struct kv_settings, engine.kv_host)},
    {.long_name = "kv-disk",
     .fields = "kv_disk_path kv_disk_bytes kv_disk_zstd_level",
     .argument = "DIR:SIZE",
     .type = OPTION_TYPE_STRING,
     .group = "Engine",
     .help = "and once more with a disk below that; each such run has a new folder in DIR, which "
             "is removed when it ends",
     .default_text = "none, but for --tiers, which uses " DEFAULT_FOLDER,
     .offset = offsetof(struct kv_settings, engine.kv_disk)},
    {.long_name = "kv-prefetch",
     .fields = "kv_prefetch_percent",
     .argument = "PERCENT",
     .type = OPTION_TYPE_INTEGER,
     .group = "Engine",
     .help = "of the time, that the links may be busy with blocks that nobody waits for yet, in "
             "runs with tiers; 0: none are fetched ahead of requests",
     .max = 100,
     .offset = offsetof(struct kv_settings, engine.kv_prefetch)},
    ENGINE_OPTION_KV_WRITE(struct kv_settings),
    ENGINE_OPTION_CTX_SIZE(struct kv_settings,
                           "the longest request, at most what the model was made for; longer "
                           "prompts are cut"),
    ENGINE_OPTION_DEVICE(struct kv_settings),
    ENGINE_OPTION_KV_DTYPE(struct kv_settings),
    ENGINE_OPTION_THREADS(struct kv_settings),
    ENGINE_OPTION_CPU(struct kv_settings),
    {.long_name = "write-trace",
     .argument = "FILE.jsonl",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help =
         "write the load as a trace in the format of Bailian, with the engine's block size, which "
         "imbrex kv-sim replays and --trace takes; - is standard output",
     .offset = offsetof(struct kv_settings, write_trace)},
    {.long_name = "json",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help = "write the report to a JSON file too; -: to standard output, instead of the table",
     .offset = offsetof(struct kv_settings, json)},
};

/* ---- options --------------------------------------------------------------------------------- */

static int read_policies(struct kv_bench *bench)
{
    const char *at = bench->settings->policies;

    for (;;) {
        size_t length = strcspn(at, ",");
        if (bench->num_policies == KV_BENCH_MAX_POLICIES) {
            output_error("bench kv: --policy: expected at most %d names, found more",
                         KV_BENCH_MAX_POLICIES);
            return EXIT_CODE_INPUT;
        }
        char *name = bench->policies[bench->num_policies];
        snprintf(name, KV_BENCH_NAME_BYTES, "%.*s",
                 (int)(length < KV_BENCH_NAME_BYTES ? length : 0), at);
        int exit_code = engine_settings_check_policy("policy", name);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
        bench->num_policies++;
        if (at[length] == '\0') {
            return EXIT_CODE_OK;
        }
        at += length + 1;
    }
}

static int make_sessions(struct kv_bench *bench)
{
    const struct kv_settings *settings = bench->settings;
    struct load_sessions sessions = {
        .num_sessions = (size_t)settings->num_sessions.value,
        .system_tokens = (int32_t)settings->system_tokens.value,
        .session_rate = settings->session_rate.value,
        .think_s = settings->think.value,
    };
    int exit_code = load_lengths_parse("bench kv", "turns", settings->turns, &sessions.turns);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = load_lengths_parse("bench kv", "turn-tokens", settings->turn_tokens,
                                       &sessions.turn_tokens);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = load_lengths_parse("bench kv", "output-tokens", settings->output_tokens,
                                       &sessions.output_tokens);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            load_plan_create_sessions(&bench->load, &sessions, (uint64_t)settings->seed.value);
    }
    return exit_code;
}

static int make_load(struct kv_bench *bench)
{
    const struct kv_settings *settings = bench->settings;
    int exit_code;

    if (settings->trace == NULL && (settings->num_requests.given || settings->scale.given)) {
        output_error("bench kv: --%s: expected --trace with it, found none",
                     settings->num_requests.given ? "requests" : "scale");
        return EXIT_CODE_INPUT;
    }
    if (settings->trace == NULL && settings->starts != NULL) {
        output_error("bench kv: --starts: expected --trace with it, found none");
        return EXIT_CODE_INPUT;
    }
    if (settings->write_trace != NULL && settings->concurrency.given) {
        output_error("bench kv: --write-trace: expected requests that come at their times, found "
                     "--concurrency");
        return EXIT_CODE_INPUT;
    }
    if (settings->speed.given && settings->concurrency.given) {
        output_error("bench kv: expected one of --speed and --concurrency, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->trace != NULL) {
        struct load_block_source source = {
            .path = settings->trace,
            .starts = settings->starts,
            .session_rate = settings->session_rate.value,
            .max_requests =
                settings->num_requests.given ? (size_t)settings->num_requests.value : SIZE_MAX,
            .scale = settings->scale.value,
        };
        exit_code = load_plan_read_blocks(&bench->load, &source, (uint64_t)settings->seed.value);
    } else {
        exit_code = make_sessions(bench);
    }
    if (exit_code == EXIT_CODE_OK) {
        load_plan_scale_arrivals(&bench->load, settings->speed.value);
        bench->load.concurrency = settings->concurrency.value;
    }
    return exit_code;
}

/* ---- model and engine ------------------------------------------------------------------------ */

static int open_model(struct kv_bench *bench, const char *model)
{
    int exit_code = session_open(model, &bench->model);

    if (exit_code == EXIT_CODE_OK) {
        imbrex_model_describe(bench->model, &bench->description);
    }
    return exit_code;
}

static int32_t choose_context_size(struct kv_bench *bench)
{
    const struct option_integer *given = &bench->settings->engine.ctx_size;
    const struct load_request *longest = &bench->load.requests[load_plan_longest(&bench->load)];
    int64_t needed = (int64_t)longest->num_prompt_tokens + longest->num_output_tokens;
    int64_t limit = given->given ? given->value : bench->description.max_position_embeddings;

    if (needed > limit) {
        bench->num_cut = load_plan_clip(&bench->load, limit);
        needed = limit;
    }
    return (int32_t)needed;
}

/* What --kv-host and --kv-disk say; --tiers adds what they do not. The folders of the runs are made
 * in bench->kv_folder. */
static int choose_tiers(struct kv_bench *bench, int64_t distinct_tokens)
{
    struct imbrex_engine_options *options = &bench->options;
    const struct engine_settings *settings = &bench->settings->engine;
    bool has_tiers = bench->settings->tiers || engine_settings_has_tiers(settings);
    int exit_code = engine_settings_check_prefetch(settings, has_tiers, NULL);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_check_write(settings, bench->settings->tiers ||
                                                              settings->kv_disk != NULL);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_choose_tiers(settings, bench->kv_folder, options);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (bench->settings->tiers) {
        size_t distinct_bytes = (size_t)distinct_tokens * bench->token_bytes;
        size_t least = LEAST_HOST_BLOCKS * (size_t)bench->plan.kv_block_size * bench->token_bytes;
        if (options->kv_host_bytes == 0) {
            options->kv_host_bytes = distinct_bytes / WORKING_SETS;
            options->kv_host_bytes =
                options->kv_host_bytes > least ? options->kv_host_bytes : least;
        }
        if (options->kv_disk_bytes == 0) {
            (void)snprintf(bench->kv_folder, sizeof(bench->kv_folder), "%s", DEFAULT_FOLDER);
            options->kv_disk_bytes =
                2 * distinct_bytes > LEAST_DISK_BYTES ? 2 * distinct_bytes : LEAST_DISK_BYTES;
        }
    }
    bench->kv_host_bytes = options->kv_host_bytes;
    bench->kv_disk_bytes = options->kv_disk_bytes;
    options->kv_host_bytes = 0;
    options->kv_disk_bytes = 0;
    options->kv_disk_path = NULL;
    return EXIT_CODE_OK;
}

/* The same for all policies. */
static int choose_options(struct kv_bench *bench)
{
    const struct kv_settings *settings = bench->settings;
    int32_t context_size = choose_context_size(bench);
    int64_t distinct_tokens = load_plan_distinct_tokens(&bench->load);
    int64_t kv_tokens = distinct_tokens / (settings->tiers ? WORKING_SETS : 4);

    int exit_code = engine_settings_to_options(&settings->engine, context_size, &bench->options);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    context_size = bench->options.context_size;
    kv_tokens = kv_tokens > context_size ? kv_tokens : context_size;
    bench->options.kv_cache_tokens =
        (int32_t)(kv_tokens < IMBREX_MAX_KV_CACHE_TOKENS ? kv_tokens : IMBREX_MAX_KV_CACHE_TOKENS);
    bench->options.max_running = (int32_t)settings->max_running.value;
    if (bench->load.count > 1024) {
        bench->options.max_waiting =
            (int32_t)(bench->load.count < MAX_WAITING ? bench->load.count : MAX_WAITING);
    }
    exit_code = engine_settings_choose_kv_cache(&settings->engine, bench->model, &bench->options);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_plan(bench->model, &bench->options, &bench->plan);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    bench->token_bytes = bench->plan.kv_bytes / (size_t)bench->plan.kv_num_blocks /
                         (size_t)bench->plan.kv_block_size;
    exit_code = choose_tiers(bench, distinct_tokens);
    return exit_code == EXIT_CODE_OK ? engine_settings_check(&settings->engine, &bench->plan)
                                     : exit_code;
}

/* ---- folders --------------------------------------------------------------------------------- */

/* A new folder for one run, which the options point to then. */
static int make_folder(struct kv_bench *bench, char path[ENGINE_MAX_PATH_BYTES])
{
    size_t made_length = 0;
    int failure = make_folders(bench->kv_folder, &made_length);
    int length =
        snprintf(path, ENGINE_MAX_PATH_BYTES, "%s/imbrex-bench-kv-XXXXXX", bench->kv_folder);

    /* Later runs find it made. */
    bench->made_length = bench->made_length > 0 ? bench->made_length : made_length;
    if (failure == 0 && length >= ENGINE_MAX_PATH_BYTES) {
        failure = ENAMETOOLONG;
    }
    if (failure == 0 && mkdtemp(path) == NULL) {
        failure = errno;
    }
    if (failure != 0) {
        output_error("bench kv: --kv-disk: cannot make a folder in %s: %s", bench->kv_folder,
                     output_system_error(failure));
        return EXIT_CODE_INPUT;
    }
    bench->options.kv_disk_path = path;
    return EXIT_CODE_OK;
}

/* With the files that the engine left in it. */
static void remove_folder(const char *path)
{
    DIR *folder = opendir(path);

    if (folder != NULL) {
        for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
            (void)unlinkat(dirfd(folder), entry->d_name, 0);
        }
        (void)closedir(folder);
    }
    if (rmdir(path) != 0) {
        output_warning("bench kv: %s: cannot be removed: %s", path, output_system_error(errno));
    }
}

/* ---- runs ------------------------------------------------------------------------------------ */

#if IMBREX_CUDA
static int open_meter(struct kv_bench *bench)
{
    if (!engine_settings_has_gpu(&bench->plan)) {
        return EXIT_CODE_OK;
    }
    int exit_code = gpu_meter_open(bench->plan.device_idx, &bench->meter);
    if (exit_code == EXIT_CODE_OK) {
        gpu_meter_describe(bench->meter, &bench->gpu);
    }
    return exit_code;
}

static void close_meter(struct kv_bench *bench)
{
    gpu_meter_close(bench->meter);
}

/* Nothing is asked of the GPU while the load runs: its power is counted by itself. */
static int run_load(struct kv_bench *bench, const struct load_settings *settings,
                    struct kv_run *kv_run)
{
    if (bench->meter == NULL) {
        return load_run(settings, &bench->load, &kv_run->result);
    }
    gpu_meter_begin(bench->meter);
    gpu_meter_sample(bench->meter);
    int exit_code = load_run(settings, &bench->load, &kv_run->result);
    gpu_meter_sample(bench->meter);
    gpu_meter_end(bench->meter, &kv_run->reading);
    return exit_code;
}
#else
static int open_meter(struct kv_bench *bench)
{
    (void)bench;
    return EXIT_CODE_OK;
}

static void close_meter(struct kv_bench *bench)
{
    (void)bench;
}

static int run_load(struct kv_bench *bench, const struct load_settings *settings,
                    struct kv_run *kv_run)
{
    return load_run(settings, &bench->load, &kv_run->result);
}
#endif

/* Other tokens than the load's. */
static int warm_up(const struct kv_bench *bench, const struct load_settings *settings)
{
    struct load_plan warmup = bench->load;
    struct load_result ignored;

    warmup.count = warmup.count < WARMUP_REQUESTS ? warmup.count : WARMUP_REQUESTS;
    warmup.concurrency = WARMUP_REQUESTS;
    warmup.seed++;
    return load_run(settings, &warmup, &ignored);
}

/* How fast a prompt is computed, and a token generated, by an engine that does nothing else: the
 * longest request, with other tokens. */
static int measure_alone(struct kv_bench *bench, const struct load_settings *settings)
{
    struct load_request longest = bench->load.requests[load_plan_longest(&bench->load)];
    struct load_plan alone = bench->load;
    struct load_result result;

    longest.arrival_ns = 0;
    alone.requests = &longest;
    alone.count = 1;
    alone.concurrency = 1;
    alone.seed += 2;
    int exit_code = load_run(settings, &alone, &result);
    if (exit_code == EXIT_CODE_OK && result.num_completed == 1 && result.ttft.p50 > 0) {
        bench->prefill_tokens_per_s = longest.num_prompt_tokens / (result.ttft.p50 / 1e9);
        bench->decode_s_per_token = result.tpot.p50 / 1e9;
    }
    return exit_code;
}

/* The load on an engine whose options are chosen. */
static int run_engine(struct kv_bench *bench, struct kv_run *kv_run)
{
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(bench->model);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct load_settings settings = {
        .model = bench->model,
        .vocab_size = bench->description.vocab_size,
        .num_choices = 1,
        .has_progress = isatty(STDERR_FILENO) == 1,
    };

    if (tokenizer != NULL && imbrex_tokenizer_vocab_size(tokenizer) < settings.vocab_size) {
        settings.vocab_size = imbrex_tokenizer_vocab_size(tokenizer);
    }
    if (imbrex_engine_create(bench->model, &bench->options, &settings.engine, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    int exit_code = warm_up(bench, &settings);
    if (exit_code == EXIT_CODE_OK && bench->num_runs == 0 && signals_interrupt() == 0) {
        exit_code = measure_alone(bench, &settings);
    }
    if (exit_code == EXIT_CODE_OK && signals_interrupt() == 0) {
        exit_code = run_load(bench, &settings, kv_run);
    }
    imbrex_engine_destroy(settings.engine);
    return exit_code;
}

/* On an engine of its own: what an earlier run left would be found. */
static int run_policy(struct kv_bench *bench, const char *policy, int32_t round, bool has_host,
                      bool has_disk)
{
    struct kv_run *kv_run = &bench->runs[bench->num_runs];
    char folder[ENGINE_MAX_PATH_BYTES];

    *kv_run = (struct kv_run){
        .policy = policy, .round = round, .has_host = has_host, .has_disk = has_disk};
    bench->options.kv_policy = policy;
    bench->options.kv_host_bytes = has_host ? bench->kv_host_bytes : 0;
    bench->options.kv_disk_bytes = has_disk ? bench->kv_disk_bytes : 0;
    bench->options.kv_disk_path = NULL;
    int exit_code = has_disk ? make_folder(bench, folder) : EXIT_CODE_OK;
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = run_engine(bench, kv_run);
    if (has_disk) {
        remove_folder(folder);
    }
    if (exit_code == EXIT_CODE_OK && kv_run->result.num_failed > 0) {
        output_error("bench kv: %zu of %zu requests failed; the first: %s",
                     kv_run->result.num_failed, bench->load.count, kv_run->result.first_failure);
        exit_code = EXIT_CODE_FAILURE;
    }
    /* A run that a signal ended early is compared with nothing. */
    bench->num_runs += exit_code == EXIT_CODE_OK && signals_interrupt() == 0;
    return exit_code;
}

/* The KV cache alone, then with each tier that there is below it. */
static int run_stacks(struct kv_bench *bench, const char *policy, int32_t round)
{
    bool is_cached = strcmp(policy, "none") != 0;
    bool has_host = bench->kv_host_bytes > 0 && is_cached;
    bool has_disk = bench->kv_disk_bytes > 0 && is_cached;
    int exit_code = run_policy(bench, policy, round, false, false);

    if (exit_code == EXIT_CODE_OK && has_host && signals_interrupt() == 0) {
        exit_code = run_policy(bench, policy, round, true, false);
    }
    if (exit_code == EXIT_CODE_OK && has_disk && signals_interrupt() == 0) {
        exit_code = run_policy(bench, policy, round, has_host, true);
    }
    return exit_code;
}

static int run_all(struct kv_bench *bench)
{
    int32_t num_rounds = (int32_t)bench->settings->rounds.value;

    for (int32_t round = 0; round < num_rounds; round++) {
        for (int32_t i = 0; i < bench->num_policies && signals_interrupt() == 0; i++) {
            int32_t policy = round % 2 == 0 ? i : bench->num_policies - 1 - i;
            int exit_code = run_stacks(bench, bench->policies[policy], round);
            if (exit_code != EXIT_CODE_OK) {
                return exit_code;
            }
        }
    }
    return EXIT_CODE_OK;
}

static void add_integer(FILE *file, const char *name, const struct option_integer *integer)
{
    if (integer->given) {
        fprintf(file, " --%s %" PRId64, name, integer->value);
    }
}

static void add_choice(FILE *file, const char *name, const struct option_integer *chosen,
                       const struct option_choice *choices)
{
    while (chosen->given && choices->name != NULL && choices->value != chosen->value) {
        choices++;
    }
    if (chosen->given) {
        command_line_add_text(file, name, choices->name);
    }
}

static void add_load(FILE *file, const struct kv_settings *settings)
{
    if (settings->trace != NULL) {
        command_line_add_text(file, "trace", settings->trace);
        command_line_add_text(file, "starts", settings->starts);
        add_integer(file, "requests", &settings->num_requests);
        fprintf(file, " --scale %.15g", settings->scale.value);
        return;
    }
    fprintf(file, " --sessions %" PRId64 " --session-rate %.15g", settings->num_sessions.value,
            settings->session_rate.value);
    command_line_add_text(file, "turns", settings->turns);
    fprintf(file, " --think %.15g --system-tokens %" PRId64, settings->think.value,
            settings->system_tokens.value);
    command_line_add_text(file, "turn-tokens", settings->turn_tokens);
    command_line_add_text(file, "output-tokens", settings->output_tokens);
}

/* Of the load with its defaults, and what was chosen of the engine. */
static int format_command_line(struct kv_bench *bench, const char *model)
{
    const struct kv_settings *settings = bench->settings;
    size_t num_bytes;
    FILE *file = open_memstream(&bench->command_line, &num_bytes);

    if (file == NULL) {
        return output_out_of_memory();
    }
    fprintf(file, "imbrex bench kv%s%s", model != NULL ? " " : "", model != NULL ? model : "");
    add_load(file, settings);
    command_line_add_real(file, "speed", &settings->speed);
    add_integer(file, "concurrency", &settings->concurrency);
    fprintf(file, " --seed %" PRId64, settings->seed.value);
    command_line_add_text(file, "policy", settings->policies);
    add_integer(file, "rounds", &settings->rounds);
    command_line_add_text(file, "kv-cache", settings->engine.kv_cache);
    add_integer(file, "max-running", &settings->max_running);
    fputs(settings->tiers ? " --tiers" : "", file);
    command_line_add_text(file, "kv-host", settings->engine.kv_host);
    command_line_add_text(file, "kv-disk", settings->engine.kv_disk);
    add_integer(file, "kv-prefetch", &settings->engine.kv_prefetch);
    add_choice(file, "kv-write", &settings->engine.kv_write, engine_kv_write_choices);
    add_integer(file, "ctx-size", &settings->engine.ctx_size);
    command_line_add_text(file, "device", settings->engine.device);
    add_choice(file, "kv-dtype", &settings->engine.kv_dtype, engine_kv_dtype_choices);
    add_choice(file, "cpu", &settings->engine.cpu, engine_cpu_choices);
    add_integer(file, "threads", &settings->engine.threads);
    bool is_written = ferror(file) == 0;
    if (fclose(file) != 0 || !is_written) {
        return output_out_of_memory();
    }
    return EXIT_CODE_OK;
}

static int show_report(struct kv_bench *bench)
{
    const char *json = bench->settings->json;
    char *text = NULL;
    int exit_code = EXIT_CODE_OK;

    if (!report_is_dash(json)) {
        kv_bench_print(bench);
    }
    if (json != NULL) {
        exit_code = kv_bench_format_json(bench, &text);
    }
    if (exit_code == EXIT_CODE_OK && bench->json_file != NULL) {
        exit_code = report_write_text(json, bench->json_file, text);
    } else if (exit_code == EXIT_CODE_OK && json != NULL) {
        output_printf("%s\n", text);
    }
    free(text);
    return exit_code;
}

static int measure(struct kv_bench *bench)
{
    size_t num_runs = 3 * (size_t)bench->num_policies * (size_t)bench->settings->rounds.value;

    bench->runs = calloc(num_runs, sizeof(*bench->runs));
    if (bench->runs == NULL) {
        return output_out_of_memory();
    }
    signals_note_interrupts(true);
    signals_watch_interrupts();
    int exit_code = run_all(bench);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = show_report(bench);
    }
    int signal_number = signals_interrupt();
    return exit_code == EXIT_CODE_OK && signal_number != 0 ? EXIT_CODE_SIGNAL + signal_number
                                                           : exit_code;
}

static int open_files(struct kv_bench *bench)
{
    const struct kv_settings *settings = bench->settings;
    int exit_code = report_check_name("bench kv", "json", settings->json);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = report_check_name("bench kv", "write-trace", settings->write_trace);
    }
    if (exit_code == EXIT_CODE_OK && report_is_dash(settings->json) &&
        report_is_dash(settings->write_trace)) {
        output_error("bench kv: expected one of --json and --write-trace to be -, found both");
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code == EXIT_CODE_OK && settings->json != NULL && !report_is_dash(settings->json)
               ? report_open(settings->json, &bench->json_file)
               : exit_code;
}

static int run(const void *settings, const char *model)
{
    struct kv_bench bench = {.settings = settings};
    int exit_code = read_policies(&bench);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = make_load(&bench);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_files(&bench);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_model(&bench, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_options(&bench);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = format_command_line(&bench, model);
    }
    if (exit_code == EXIT_CODE_OK && bench.settings->write_trace != NULL) {
        exit_code = load_plan_write_blocks(&bench.load, bench.settings->write_trace,
                                           bench.plan.kv_block_size);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_meter(&bench);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = measure(&bench);
    }
    close_meter(&bench);
    remove_folders(bench.kv_folder, bench.made_length);
    if (bench.json_file != NULL) {
        fclose(bench.json_file);
    }
    free(bench.runs);
    free(bench.command_line);
    signals_set_model(NULL);
    imbrex_model_close(bench.model);
    load_plan_release(&bench.load);
    return exit_code;
}

const struct command bench_kv = {
    .name = "bench kv",
    .synopsis = "[MODEL] [options]",
    .summary = "prefix cache: policies side by side on conversations or a trace",
    .description =
        "Sends the same load to engines that differ in what their prefix cache keeps, one after "
        "the other, and prints for each the share of prompt tokens that were found (hit rate), "
        "how many need not be computed, and the time to the first token (TTFT). The load is "
        "conversations with the same beginning, whose turns come back, or a trace of block ids. "
        "imbrex kv-sim tells the hit rates of long traces without computing anything, and of this "
        "load if --write-trace gives it one. MODEL is a Hugging Face folder, a GGUF file or "
        "random:SHAPE; without it the built-in model is used.",
    .examples = "  imbrex bench kv --sessions 32 --policy lru,lfu,predictive --rounds 2\n"
                "  imbrex bench kv --system-tokens 128 --turns 4-8 --kv-cache 1024\n"
                "  imbrex bench kv random:qwen2.5-0.5b --tiers --write-trace load.jsonl\n"
                "  imbrex bench kv --trace mooncake.jsonl --requests 500 --scale 0.03125\n",
    .options = {kv_options, sizeof(kv_options) / sizeof(kv_options[0])},
    .defaults = &kv_defaults,
    .settings_bytes = sizeof(kv_defaults),
    .run = run,
};
