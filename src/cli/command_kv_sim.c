/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex kv-sim: request traces replayed through the engine's prefix cache, one run a load. Tables
 * are printed as each load is done; what was asked for as a file is written at the end. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/kv_report.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/scaled_number.h"
#include "cli/signals.h"
#include "cli/tier_option.h"
#include "imbrex_kv.h"

#define BAR_COLUMNS 30
#define BAR_NAME_BYTES 32    /* of a trace beside the bar */
#define MAX_POLICY_NAMES 64  /* more than there are */
#define MAX_CAPACITY 1e12    /* tokens */
#define MAX_PREFILL_RATE 1e9 /* tokens/s */
#define MAX_QUEUE 1e6        /* requests */

struct kv_sim_settings {
    struct option_strings traces, tiers;
    const char *token_bytes, *starts, *policies, *capacities, *prefill_rates, *target_queues, *json,
        *html;
    struct option_integer block_size, num_slots, seed;
    struct option_real decode_ms, session_span_s, warm, hint_error, fetch_ratio;
    bool is_live, has_ablations, has_sensitivity, has_prefetch;
};

static const struct kv_sim_settings kv_sim_defaults = {
    .policies = "all",
    .num_slots = {.value = 64},
    .seed = {.value = 1},
    .session_span_s = {.value = 28800},
    .warm = {.value = 0.5},
    .fetch_ratio = {.value = 8},
};

static const struct option_spec kv_sim_options[] = {
    {.long_name = "trace",
     .fields = "traces",
     .argument = "FILE",
     .type = OPTION_TYPE_STRINGS,
     .group = "Traces",
     .help = "a trace with block ids: Mooncake or Bailian jsonl, WEKA jsonl, also compressed "
             "(.zst); may be given several times; - is standard input",
     .offset = offsetof(struct kv_sim_settings, traces)},
    {.long_name = "starts",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Traces",
     .help = "when each session of a WEKA trace starts: a number of seconds a line",
     .default_text = "drawn with the seed",
     .offset = offsetof(struct kv_sim_settings, starts)},
    {.long_name = "session-span",
     .fields = "session_span_s",
     .argument = "S",
     .type = OPTION_TYPE_REAL,
     .group = "Traces",
     .help = "starts are drawn from so many seconds",
     .max = 1e9,
     .above_min = true,
     .is_double = true,
     .offset = offsetof(struct kv_sim_settings, session_span_s)},
    {.long_name = "warm",
     .fields = "warm",
     .argument = "W",
     .type = OPTION_TYPE_REAL,
     .group = "Traces",
     .help = "share of the requests, the first ones, that fill the cache and are learned from but "
             "not scored",
     .max = 1,
     .below_max = true,
     .is_double = true,
     .offset = offsetof(struct kv_sim_settings, warm)},
    {.long_name = "hint-error",
     .fields = "hint_error",
     .argument = "P",
     .type = OPTION_TYPE_REAL,
     .group = "Traces",
     .help = "give hints whether a prefix will return, made from the trace's future and wrong with "
             "this probability",
     .default_text = "no hints",
     .max = 1,
     .is_double = true,
     .offset = offsetof(struct kv_sim_settings, hint_error)},
    {.long_name = "seed",
     .argument = "S",
     .type = OPTION_TYPE_INTEGER,
     .group = "Traces",
     .help = "the same seed gives the same figures",
     .max = UINT32_MAX,
     .offset = offsetof(struct kv_sim_settings, seed)},
    {.long_name = "policy",
     .fields = "policies",
     .argument = "all|LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Cache",
     .help = "names with commas between them; lru, MIN and infinite are always shown",
     .default_text = "all",
     .offset = offsetof(struct kv_sim_settings, policies)},
    {.long_name = "ablations",
     .type = OPTION_TYPE_FLAG,
     .group = "Cache",
     .help = "also show predictive with one of its components off, for each of them",
     .offset = offsetof(struct kv_sim_settings, has_ablations)},
    {.long_name = "sensitivity",
     .type = OPTION_TYPE_FLAG,
     .group = "Cache",
     .help = "also show predictive with each number that it was given, not learned, changed both "
             "ways, and what that does to its average closure",
     .offset = offsetof(struct kv_sim_settings, has_sensitivity)},
    {.long_name = "capacity",
     .fields = "capacities",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Cache",
     .help = "tokens that the cache holds, such as 1M,3.1M,500k",
     .offset = offsetof(struct kv_sim_settings, capacities)},
    {.long_name = "block",
     .fields = "block_size",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Cache",
     .help = "tokens of a block; a multiple of those of an id in the trace",
     .default_text = "what a trace of imbrex bench kv says, else 512",
     .min = 1,
     .max = 1048576,
     .offset = offsetof(struct kv_sim_settings, block_size)},
    {.long_name = "tier",
     .fields = "tiers",
     .argument = "NAME:SIZE:RATE[:LATENCY]",
     .type = OPTION_TYPE_STRINGS,
     .group = "Tiers",
     .help = "replay each policy once more over a tier below the cache, such as "
             "host:3M:400k:20us; given again, over that one below the first, and so on, up to 4; "
             "SIZE in tokens, RATE of its link in tokens a second, or both in bytes (64GiB, "
             "50GB/s) with --token-bytes; what does not come in time is computed again",
     .offset = offsetof(struct kv_sim_settings, tiers)},
    {.long_name = "token-bytes",
     .argument = "N|MODEL",
     .type = OPTION_TYPE_STRING,
     .group = "Tiers",
     .help = "bytes of keys and values of a token: a number, or a model whose layers and heads say "
             "it for bf16, such as random:qwen2.5-7b; tables tell bytes then",
     .offset = offsetof(struct kv_sim_settings, token_bytes)},
    {.long_name = "slots",
     .fields = "num_slots",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Service",
     .help = "requests that run at once",
     .min = 1,
     .max = 1048576,
     .offset = offsetof(struct kv_sim_settings, num_slots)},
    {.long_name = "target-queue",
     .fields = "target_queue",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Service",
     .help = "loads: for each, the prefill rate under which lru lets so many requests wait on "
             "average is looked for",
     .default_text = "0.3",
     .offset = offsetof(struct kv_sim_settings, target_queues)},
    {.long_name = "prefill-rate",
     .fields = "prefill_tokens_per_s",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "Service",
     .help = "loads: instead, uncached prompt tokens a second, such as 190k",
     .offset = offsetof(struct kv_sim_settings, prefill_rates)},
    {.long_name = "decode-ms",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "Service",
     .help = "time of an output token",
     .default_text = "20 for chats, 10 for agents",
     .max = 1e6,
     .above_min = true,
     .is_double = true,
     .offset = offsetof(struct kv_sim_settings, decode_ms)},
    {.long_name = "prefetch",
     .type = OPTION_TYPE_FLAG,
     .group = "Service",
     .help =
         "replay each policy once more over a slower tier that keeps what the cache forgets and "
         "from which waiting and expected requests' blocks are fetched ahead; all other "
         "figures are those of the cache alone; with --tier: also fetch what the policy expects",
     .offset = offsetof(struct kv_sim_settings, has_prefetch)},
    {.long_name = "fetch-ratio",
     .fields = "fetch_ratio",
     .argument = "R",
     .type = OPTION_TYPE_REAL,
     .group = "Service",
     .help = "tokens that --prefetch fetches in the time that computing one takes",
     .max = 1e6,
     .above_min = true,
     .is_double = true,
     .offset = offsetof(struct kv_sim_settings, fetch_ratio)},
    {.long_name = "live",
     .type = OPTION_TYPE_FLAG,
     .group = "Service",
     .help = "let each policy's hits shorten its own queue; without, all are replayed on the times "
             "that lru gives",
     .offset = offsetof(struct kv_sim_settings, is_live)},
    {.long_name = "json",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help = "write the figures to a JSON file too; -: to standard output, instead of the tables",
     .offset = offsetof(struct kv_sim_settings, json)},
    {.long_name = "html",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Report",
     .help = "write a page with charts too, which needs no other file; -: as above",
     .offset = offsetof(struct kv_sim_settings, html)},
};

/* A file of the report. */
struct report_file {
    const char *path; /* NULL: not asked for */
    FILE *file;       /* NULL: standard output */
};

struct kv_sim_state {
    const struct kv_sim_settings *settings;
    struct imbrex_kv_sim_options options;
    struct kv_load *loads; /* [report.num_loads] */
    int64_t *capacities;
    char *policy_text; /* what policy_names point into, but for lru */
    const char *policy_names[MAX_POLICY_NAMES];
    char *command_line;
    struct tier_option tiers[IMBREX_KV_SIM_MAX_TIERS];
    struct imbrex_kv_sim_tier tier_options[IMBREX_KV_SIM_MAX_TIERS];
    struct kv_report report;
    struct report_file json, html;
    size_t load_idx;
    bool has_bar; /* standard error is a terminal */
    struct imbrex_kv_sim_progress shown;
    int shown_percent;
};

/* ---- lists of numbers ------------------------------------------------------------------------ */

struct number_kind {
    const char *option, *expected;
    double max;
    bool is_whole;
};

static int parse_number(const struct number_kind *kind, const char *item, size_t num_bytes,
                        const double *before, size_t num_before, double *value)
{
    if (!scaled_number_read(item, num_bytes, value) ||
        (kind->is_whole && !scaled_number_round(value)) || *value <= 0 || *value > kind->max) {
        output_error("kv-sim: --%s: expected %s in (0, %g], found \"%.*s\"", kind->option,
                     kind->expected, kind->max, (int)num_bytes, item);
        return EXIT_CODE_INPUT;
    }
    for (size_t i = 0; i < num_before; i++) {
        if (before[i] == *value) {
            output_error("kv-sim: --%s: expected each number once, found \"%.*s\" again",
                         kind->option, (int)num_bytes, item);
            return EXIT_CODE_INPUT;
        }
    }
    return EXIT_CODE_OK;
}

/* *numbers is [*count], at least one, freed by the caller. */
static int parse_numbers(const struct number_kind *kind, const char *text, double **numbers,
                         size_t *count)
{
    size_t max_numbers = 1, num_parsed = 0;

    for (const char *at = text; *at != '\0'; at++) {
        max_numbers += *at == ',';
    }
    double *parsed = calloc(max_numbers, sizeof(*parsed));
    if (parsed == NULL) {
        return output_out_of_memory();
    }
    for (const char *item = text; num_parsed < max_numbers; num_parsed++) {
        size_t num_bytes = strcspn(item, ",");
        int exit_code =
            parse_number(kind, item, num_bytes, parsed, num_parsed, &parsed[num_parsed]);
        if (exit_code != EXIT_CODE_OK) {
            free(parsed);
            return exit_code;
        }
        item += num_bytes + 1;
    }
    *numbers = parsed;
    *count = num_parsed;
    return EXIT_CODE_OK;
}

/* ---- options --------------------------------------------------------------------------------- */

static int report_needs(const char *option, const char *expected)
{
    output_error("kv-sim: --%s: expected %s; see imbrex kv-sim --help", option, expected);
    return EXIT_CODE_INPUT;
}

static int choose_capacities(struct kv_sim_state *state)
{
    static const struct number_kind kind = {"capacity", "tokens such as 3.1M", MAX_CAPACITY,
                                            .is_whole = true};
    double *numbers = NULL;
    size_t count = 0;
    int exit_code = parse_numbers(&kind, state->settings->capacities, &numbers, &count);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state->capacities = calloc(count, sizeof(*state->capacities));
    if (state->capacities == NULL) {
        free(numbers);
        return output_out_of_memory();
    }
    for (size_t i = 0; i < count; i++) {
        state->capacities[i] = (int64_t)numbers[i];
    }
    free(numbers);
    state->options.capacities = state->capacities;
    state->options.num_capacities = count;
    return EXIT_CODE_OK;
}

static int choose_loads(struct kv_sim_state *state)
{
    static const struct number_kind rate_kind = {"prefill-rate", "tokens a second such as 190k",
                                                 MAX_PREFILL_RATE, .is_whole = false},
                                    queue_kind = {"target-queue", "a number of requests", MAX_QUEUE,
                                                  .is_whole = false};
    const struct kv_sim_settings *settings = state->settings;
    bool has_rates = settings->prefill_rates != NULL;
    const char *queues = settings->target_queues != NULL ? settings->target_queues : "0.3";
    double *numbers = NULL;
    size_t count = 0;
    int exit_code = parse_numbers(has_rates ? &rate_kind : &queue_kind,
                                  has_rates ? settings->prefill_rates : queues, &numbers, &count);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state->loads = calloc(count, sizeof(*state->loads));
    if (state->loads == NULL) {
        free(numbers);
        return output_out_of_memory();
    }
    for (size_t i = 0; i < count; i++) {
        state->loads[i] = (struct kv_load){
            .prefill_tokens_per_s = has_rates ? numbers[i] : 0,
            .target_queue = has_rates ? state->options.target_queue : numbers[i],
        };
    }
    free(numbers);
    state->report.loads = state->loads;
    state->report.num_loads = count;
    return EXIT_CODE_OK;
}

static int check_policy(const char *name, const char *const *before, size_t num_before)
{
    const char *names[MAX_POLICY_NAMES];
    size_t count = 0;

    for (; count < MAX_POLICY_NAMES; count++) {
        names[count] = imbrex_kv_policy_name((int32_t)count);
        if (names[count] == NULL) {
            break;
        }
        if (strcmp(names[count], name) == 0) {
            for (size_t i = 0; i < num_before; i++) {
                if (strcmp(before[i], name) == 0) {
                    output_error("kv-sim: --policy: expected each name once, found \"%s\" again",
                                 name);
                    return EXIT_CODE_INPUT;
                }
            }
            return EXIT_CODE_OK;
        }
    }
    char list[256] = "";
    size_t length = 0;
    for (size_t i = 0; i < count && length < sizeof(list); i++) {
        length += (size_t)snprintf(list + length, sizeof(list) - length, ", %s", names[i]);
    }
    const char *nearest = options_nearest_name(name, names, count, sizeof(names[0]));
    output_error("kv-sim: --policy: expected all or some of %s, found \"%s\"%s%s%s",
                 list + strlen(", "), name, nearest != NULL ? " (did you mean " : "",
                 nearest != NULL ? nearest : "", nearest != NULL ? "?)" : "");
    return EXIT_CODE_INPUT;
}

/* lru stands first, wherever it is named: it is what the others are compared with. */
static int choose_policies(struct kv_sim_state *state)
{
    bool was_lru_named = false, has_predictive = false;
    size_t count = 1;

    if (strcmp(state->settings->policies, "all") == 0) {
        return EXIT_CODE_OK;
    }
    state->policy_names[0] = imbrex_kv_policy_name(0);
    state->policy_text = strdup(state->settings->policies);
    if (state->policy_text == NULL) {
        return output_out_of_memory();
    }
    char *rest = state->policy_text;
    for (char *name = strsep(&rest, ","); name != NULL; name = strsep(&rest, ",")) {
        bool is_lru = strcmp(name, state->policy_names[0]) == 0 && !was_lru_named;
        if (is_lru) {
            was_lru_named = true;
            continue;
        }
        int exit_code = check_policy(name, state->policy_names, count);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
        has_predictive = has_predictive || strcmp(name, "predictive") == 0;
        state->policy_names[count++] = name;
    }
    if (state->settings->has_ablations && !has_predictive) {
        return report_needs("ablations", "predictive among the policies of --policy, found none");
    }
    if (state->settings->has_sensitivity && !has_predictive) {
        return report_needs("sensitivity", "predictive among the policies of --policy, found none");
    }
    state->options.policies = state->policy_names;
    state->options.num_policies = count;
    return EXIT_CODE_OK;
}

/* Whether both name one file that is there, or are the same text. */
static bool is_same_file(const char *a, const char *b)
{
    struct stat a_stat, b_stat;
    if (a == NULL || b == NULL || report_is_dash(a) || report_is_dash(b)) {
        return false;
    }
    return strcmp(a, b) == 0 ||
           (stat(a, &a_stat) == 0 && stat(b, &b_stat) == 0 && S_ISREG(a_stat.st_mode) &&
            a_stat.st_dev == b_stat.st_dev && a_stat.st_ino == b_stat.st_ino);
}

/* A report may not replace what the run reads, nor the other report. */
static int check_outputs(const struct kv_sim_settings *settings)
{
    const char *const outputs[] = {settings->json, settings->html};
    const char *const names[] = {"json", "html"};

    if (is_same_file(settings->json, settings->html)) {
        output_error("kv-sim: expected --json and --html to be two files, found %s twice",
                     settings->json);
        return EXIT_CODE_INPUT;
    }
    for (int i = 0; i < 2; i++) {
        for (size_t j = 0; j < settings->traces.count; j++) {
            if (is_same_file(outputs[i], settings->traces.values[j])) {
                output_error("kv-sim: --%s: expected a file of its own, found the trace %s",
                             names[i], outputs[i]);
                return EXIT_CODE_INPUT;
            }
        }
        if (is_same_file(outputs[i], settings->starts)) {
            output_error("kv-sim: --%s: expected a file of its own, found the starts %s", names[i],
                         outputs[i]);
            return EXIT_CODE_INPUT;
        }
    }
    return EXIT_CODE_OK;
}

static int check_settings(const struct kv_sim_settings *settings, const char *operand)
{
    size_t num_from_stdin = 0;

    if (operand != NULL) {
        output_error("kv-sim: unexpected argument \"%s\": a trace is given by --trace", operand);
        return EXIT_CODE_INPUT;
    }
    if (settings->traces.count == 0) {
        return report_needs("trace", "at least one file, found none");
    }
    if (settings->capacities == NULL) {
        return report_needs("capacity", "tokens such as 1M,3.1M, found none");
    }
    if (settings->prefill_rates != NULL && settings->target_queues != NULL) {
        output_error("kv-sim: expected one of --target-queue and --prefill-rate, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->has_sensitivity && settings->is_live) {
        output_error("kv-sim: --sensitivity: expected the frozen timeline, on which closure is "
                     "defined, found --live");
        return EXIT_CODE_INPUT;
    }
    if (settings->token_bytes != NULL && settings->tiers.count == 0) {
        return report_needs("token-bytes", "--tier beside it, found none");
    }
    if (settings->fetch_ratio.given && settings->tiers.count > 0) {
        output_error("kv-sim: --fetch-ratio: expected a tier that never fills, found --tier, which "
                     "says the rate of its link");
        return EXIT_CODE_INPUT;
    }
    if (settings->fetch_ratio.given && !settings->has_prefetch) {
        return report_needs("fetch-ratio", "--prefetch beside it, found none");
    }
    if (report_is_dash(settings->json) && report_is_dash(settings->html)) {
        output_error("kv-sim: expected one of --json and --html to be -, found both");
        return EXIT_CODE_INPUT;
    }
    int exit_code = check_outputs(settings);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    for (size_t i = 0; i < settings->traces.count; i++) {
        num_from_stdin += report_is_dash(settings->traces.values[i]);
    }
    if (num_from_stdin > 1) {
        return report_needs("trace", "- once, found it again");
    }
    return EXIT_CODE_OK;
}

static int choose_tiers(struct kv_sim_state *state)
{
    const struct kv_sim_settings *settings = state->settings;
    size_t count = settings->tiers.count;
    double token_bytes = 0;

    if (count > IMBREX_KV_SIM_MAX_TIERS) {
        output_error("kv-sim: --tier: expected at most %d tiers, found %zu",
                     IMBREX_KV_SIM_MAX_TIERS, count);
        return EXIT_CODE_INPUT;
    }
    int exit_code = settings->token_bytes != NULL
                        ? tier_option_token_bytes(settings->token_bytes, &token_bytes)
                        : EXIT_CODE_OK;
    for (size_t i = 0; i < count && exit_code == EXIT_CODE_OK; i++) {
        /* A block of a size that the trace says is checked when that is known. */
        int32_t block_size = settings->block_size.given ? (int32_t)settings->block_size.value : 1;
        exit_code =
            tier_option_parse(settings->tiers.values[i], token_bytes, block_size, state->tiers, i);
        state->tier_options[i] = state->tiers[i].options;
    }
    state->options.tiers = count > 0 ? state->tier_options : NULL;
    state->options.num_tiers = count;
    state->report.tiers = state->tiers;
    state->report.token_bytes = token_bytes;
    return exit_code;
}

static int choose_options(struct kv_sim_state *state)
{
    const struct kv_sim_settings *settings = state->settings;
    struct imbrex_kv_sim_options *options = &state->options;

    *options = imbrex_kv_sim_options_default();
    options->traces = settings->traces.values;
    options->num_traces = settings->traces.count;
    options->starts = settings->starts;
    options->session_span_s = settings->session_span_s.value;
    options->block_size = (int32_t)settings->block_size.value;
    options->num_slots = (int32_t)settings->num_slots.value;
    options->decode_s_per_token = settings->decode_ms.value / 1e3;
    options->seed = (uint64_t)settings->seed.value;
    options->warm = settings->warm.value;
    options->is_live = settings->is_live;
    options->hint_error = settings->hint_error.given ? settings->hint_error.value : -1;
    options->has_prefetch = settings->has_prefetch;
    options->fetch_ratio = settings->fetch_ratio.value;
    options->has_ablations = settings->has_ablations;
    options->has_sensitivity = settings->has_sensitivity;

    int exit_code = choose_capacities(state);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_tiers(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_loads(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_policies(state);
    }
    if (exit_code == EXIT_CODE_OK && state->report.num_loads > 1) {
        for (size_t i = 0; i < options->num_traces; i++) {
            if (report_is_dash(options->traces[i])) {
                /* Each load reads the traces again. */
                return report_needs("trace", "a file with several loads, found standard input");
            }
        }
    }
    return exit_code;
}

/* ---- the command line ------------------------------------------------------------------------ */

/* That all traces were replayed with; 0: they differ, or none was. */
static int32_t block_size_of(const struct kv_sim_state *state)
{
    const struct imbrex_kv_sim_result *result = state->loads[0].result;
    int32_t block_size = state->options.block_size;

    for (size_t i = 0; result != NULL && i < result->num_traces; i++) {
        int32_t of_trace = result->traces[i].block_size;
        block_size = i == 0 || of_trace == block_size ? of_trace : 0;
    }
    return block_size;
}

/* All that the figures depend on is written out, defaults that may change with a version too: when
 * the loads are done. */
static int format_command_line(struct kv_sim_state *state)
{
    const struct kv_sim_settings *settings = state->settings;
    size_t num_bytes;
    FILE *file = open_memstream(&state->command_line, &num_bytes);

    if (file == NULL) {
        return output_out_of_memory();
    }
    fputs("imbrex kv-sim", file);
    for (size_t i = 0; i < settings->traces.count; i++) {
        command_line_add_text(file, "trace", settings->traces.values[i]);
    }
    command_line_add_text(file, "starts", settings->starts);
    command_line_add_text(file, "policy", settings->policies);
    command_line_add_text(file, "capacity", settings->capacities);
    if (state->options.block_size > 0) {
        fprintf(file, " --block %" PRId32, state->options.block_size);
    }
    fprintf(file, " --slots %" PRId64, settings->num_slots.value);
    command_line_add_text(file, "prefill-rate", settings->prefill_rates);
    if (settings->prefill_rates == NULL) {
        command_line_add_text(file, "target-queue",
                              settings->target_queues != NULL ? settings->target_queues : "0.3");
    }
    command_line_add_real(file, "decode-ms", &settings->decode_ms);
    command_line_add_real(file, "session-span", &settings->session_span_s);
    fprintf(file, " --warm %.15g --seed %" PRId64, settings->warm.value, settings->seed.value);
    command_line_add_real(file, "hint-error", &settings->hint_error);
    fputs(settings->is_live ? " --live" : "", file);
    for (size_t i = 0; i < settings->tiers.count; i++) {
        command_line_add_text(file, "tier", settings->tiers.values[i]);
    }
    command_line_add_text(file, "token-bytes", settings->token_bytes);
    fputs(settings->has_prefetch ? " --prefetch" : "", file);
    if (settings->has_prefetch && settings->tiers.count == 0) {
        fprintf(file, " --fetch-ratio %.15g", settings->fetch_ratio.value);
    }
    fputs(settings->has_ablations ? " --ablations" : "", file);
    fputs(settings->has_sensitivity ? " --sensitivity" : "", file);
    bool is_written = ferror(file) == 0;
    if (fclose(file) != 0 || !is_written) {
        return output_out_of_memory();
    }
    return EXIT_CODE_OK;
}

/* ---- the report's files ---------------------------------------------------------------------- */

static int open_report_file(struct report_file *report_file, const char *path)
{
    report_file->path = path;
    if (path == NULL || report_is_dash(path)) {
        return EXIT_CODE_OK;
    }
    return report_open(path, &report_file->file);
}

/* Frees the text. */
static int write_report_file(const struct report_file *report_file, char *text)
{
    int exit_code = EXIT_CODE_OK;

    if (report_file->file == NULL) {
        output_printf("%s\n", text);
    } else {
        exit_code = report_write_text(report_file->path, report_file->file, text);
    }
    free(text);
    return exit_code;
}

static int write_report_files(struct kv_sim_state *state)
{
    int exit_code = EXIT_CODE_OK;
    char *text;

    if (state->json.path != NULL) {
        exit_code = kv_report_format_json(&state->report, &text);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = write_report_file(&state->json, text);
        }
    }
    if (exit_code == EXIT_CODE_OK && state->html.path != NULL) {
        exit_code = kv_report_format_html(&state->report, &text);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = write_report_file(&state->html, text);
        }
    }
    return exit_code;
}

/* ---- the run --------------------------------------------------------------------------------- */

static void clear_bar(const struct kv_sim_state *state)
{
    if (state->has_bar) {
        fprintf(stderr, "\r\033[K");
    }
}

/* The front of a file's name, with what would move the cursor replaced. */
static void copy_shown_name(char shown[BAR_NAME_BYTES + 1], const char *name)
{
    size_t length = 0;

    for (; name[length] != '\0' && length < BAR_NAME_BYTES; length++) {
        unsigned char byte = (unsigned char)name[length];
        shown[length] = byte < 0x20 || byte > 0x7e ? '?' : name[length];
    }
    shown[length] = '\0';
}

static bool show_progress(void *user, const struct imbrex_kv_sim_progress *progress)
{
    struct kv_sim_state *state = user;
    double done = ((double)state->load_idx + progress->done) / (double)state->report.num_loads;
    int percent = (int)(100 * done);
    bool is_new = percent != state->shown_percent || progress->step != state->shown.step ||
                  progress->trace != state->shown.trace || progress->policy != state->shown.policy;

    if (state->has_bar && is_new) {
        char name[BAR_NAME_BYTES + 1] = "";
        int num_marks = (int)(done * BAR_COLUMNS);
        if (progress->trace != NULL) {
            copy_shown_name(name, progress->trace);
        }
        fprintf(stderr, "\r\033[K[%.*s%*s] %3d %% %s %s %s", num_marks,
                "##############################", BAR_COLUMNS - num_marks, "", percent,
                progress->step, name, progress->policy != NULL ? progress->policy : "");
        state->shown = *progress;
        state->shown_percent = percent;
    }
    return signals_interrupt() == 0;
}

static bool has_tables(const struct kv_sim_state *state)
{
    return !report_is_dash(state->settings->json) && !report_is_dash(state->settings->html);
}

/* Where no table tells of them. */
static void warn_of_lines(const struct imbrex_kv_sim_result *result)
{
    for (size_t i = 0; i < result->num_traces; i++) {
        const struct imbrex_kv_sim_trace *trace = &result->traces[i];
        if (trace->num_early > 0) {
            output_warning("kv-sim: %s: %" PRId64 " request%s with a time before one above: %s",
                           trace->trace, trace->num_early,
                           output_plural((uint64_t)trace->num_early), kv_report_early_text(trace));
        }
        if (trace->num_bad_lines > 0) {
            output_warning(
                "kv-sim: %s: %" PRId64 " line%s skipped; the first is line %" PRId64 ": %s",
                trace->trace, trace->num_bad_lines, output_plural((uint64_t)trace->num_bad_lines),
                trace->first_bad_line, trace->first_bad_reason);
        }
    }
}

static int run_load(struct kv_sim_state *state, struct kv_load *load)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_kv_sim_options options = state->options;

    options.prefill_tokens_per_s = load->prefill_tokens_per_s;
    options.target_queue = load->target_queue;
    options.progress = show_progress;
    options.user = state;
    enum imbrex_status status = imbrex_kv_sim_run(&options, &load->result, &err);
    clear_bar(state);
    if (status == IMBREX_STATUS_CANCELLED && signals_interrupt() != 0) {
        return EXIT_CODE_OK;
    }
    if (status != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    if (has_tables(state)) {
        kv_report_print_load(&state->report, state->load_idx);
        output_flush();
    } else if (state->load_idx == 0) {
        warn_of_lines(load->result);
    }
    return EXIT_CODE_OK;
}

static int run_loads(struct kv_sim_state *state)
{
    int exit_code = EXIT_CODE_OK;
    bool is_shown = has_tables(state);

    if (is_shown) {
        kv_report_print_head(&state->report);
    }
    for (; state->load_idx < state->report.num_loads && exit_code == EXIT_CODE_OK &&
           signals_interrupt() == 0;
         state->load_idx++) {
        exit_code = run_load(state, &state->loads[state->load_idx]);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    int signal_number = signals_interrupt();
    state->report.was_interrupted = signal_number != 0;
    if (is_shown) {
        kv_report_print_sensitivity(&state->report);
        kv_report_print_terms(&state->report);
    }
    state->options.block_size = block_size_of(state);
    exit_code = format_command_line(state);
    if (exit_code == EXIT_CODE_OK) {
        state->report.command_line = state->command_line;
        exit_code = write_report_files(state);
    }
    if (exit_code == EXIT_CODE_OK && signal_number != 0) {
        exit_code = EXIT_CODE_SIGNAL + signal_number;
    }
    return exit_code;
}

static int replay(struct kv_sim_state *state, const char *operand)
{
    int exit_code = check_settings(state->settings, operand);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = choose_options(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_report_file(&state->json, state->settings->json);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_report_file(&state->html, state->settings->html);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state->report.options = &state->options;
    signals_note_interrupts(true);
    signals_watch_interrupts();
    return run_loads(state);
}

static void close_report_file(struct report_file *report_file)
{
    if (report_file->file != NULL) {
        fclose(report_file->file);
    }
}

static int run(const void *settings, const char *operand)
{
    struct kv_sim_state state = {
        .settings = settings, .has_bar = isatty(STDERR_FILENO) == 1, .shown_percent = -1};
    int exit_code = replay(&state, operand);

    close_report_file(&state.json);
    close_report_file(&state.html);
    for (size_t i = 0; i < state.report.num_loads; i++) {
        imbrex_free(state.loads[i].result);
    }
    free(state.loads);
    free(state.capacities);
    free(state.policy_text);
    free(state.command_line);
    return exit_code;
}

const struct command command_kv_sim = {
    .name = "kv-sim",
    .synopsis = "--trace FILE --capacity LIST [options]",
    .summary = "replay a request trace through the prefix cache",
    .description =
        "Replays traces of requests through the engine's own prefix cache and its policies, and "
        "shows what each policy found, beside plain lru, the optimum that knows the future (MIN) "
        "and a cache that never forgets (infinite). A trace holds arrival times, token counts and "
        "block ids, no text. A simple service model gives the times: requests wait in a queue, so "
        "many run at once, one at a time is prefilled at so many uncached tokens a second, and "
        "each output token takes a constant time. Lines that cannot be read are skipped, counted "
        "and reported. Ctrl-C ends the run; loads that are done are shown.",
    .examples = "  imbrex kv-sim --trace chat.jsonl.zst --capacity 1M,3.1M,6.1M --html chat.html\n"
                "  imbrex kv-sim --trace agents.jsonl --starts starts.txt --capacity 2.6M \\\n"
                "    --target-queue 0.3,20 --policy queue,predictive --ablations\n"
                "  imbrex kv-sim --trace agents.jsonl --capacity 2.6M --prefill-rate 190k --live\n"
                "  imbrex kv-sim --trace chat.jsonl --capacity 1M --prefill-rate 40k --live \\\n"
                "    --tier host:64GiB:50GB/s:20us --tier disk:1TiB:6GB/s:100us \\\n"
                "    --token-bytes random:qwen2.5-7b --prefetch\n",
    .options = {kv_sim_options, sizeof(kv_sim_options) / sizeof(kv_sim_options[0])},
    .defaults = &kv_sim_defaults,
    .settings_bytes = sizeof(kv_sim_defaults),
    .run = run,
};
