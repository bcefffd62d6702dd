/* SPDX-License-Identifier: Apache-2.0 */
/* From the shared options to what the library takes, and back to lines for a person. */
#include "cli/generation_settings.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/output.h"

int generation_settings_check(const struct generation_settings *settings, const char *command)
{
    for (size_t i = 0; i < settings->stop.count; i++) {
        if (settings->stop.values[i][0] == '\0') {
            output_error("%s: --stop: expected a text, found an empty one", command);
            return EXIT_CODE_INPUT;
        }
    }
    if (settings->max_tokens.value > 0 && settings->min_tokens.value > settings->max_tokens.value) {
        output_error("%s: --min-tokens: expected at most the %" PRId64 " of --max-tokens, found "
                     "%" PRId64,
                     command, settings->max_tokens.value, settings->min_tokens.value);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

/* 32 bits are enough to be different each time, and short enough to be typed again. */
static uint64_t random_seed(void)
{
    uint32_t seed;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed)) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        seed = (uint32_t)now.tv_nsec ^ (uint32_t)getpid();
    }
    return seed;
}

/* Room for the lines about sampling and speed. */
#define MESSAGE_BYTES 512

/* Appends to a line that is long enough for all that is ever appended. */
__attribute__((format(printf, 3, 4))) static void append(char *line, size_t line_bytes,
                                                         const char *format, ...)
{
    size_t length = strlen(line);
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(line + length, line_bytes - length, format, arguments);
    va_end(arguments);
}

enum sampling_origin {
    SAMPLING_ORIGIN_CHECKPOINT,
    SAMPLING_ORIGIN_COMMAND_LINE,
    SAMPLING_ORIGIN_DEFAULT,
    NUM_SAMPLING_ORIGINS,
};

static const char *const sampling_origin_names[NUM_SAMPLING_ORIGINS] = {
    [SAMPLING_ORIGIN_CHECKPOINT] = "from generation_config.json",
    [SAMPLING_ORIGIN_COMMAND_LINE] = "from the command line",
    [SAMPLING_ORIGIN_DEFAULT] = "default",
};

/* Appends the sampling values in use that come from `origin`, and its name. */
static void describe_sampling(const struct generation_settings *settings,
                              const struct imbrex_request_options *options,
                              enum sampling_origin origin, char *line)
{
    const struct {
        unsigned field;
        const char *name;
        double value;
        bool given, in_use;
    } values[] = {
        {IMBREX_GENERATION_TEMPERATURE, "temperature", options->temperature,
         settings->temperature.given, options->temperature > 0},
        {IMBREX_GENERATION_TOP_K, "top_k", options->top_k, settings->top_k.given,
         options->temperature > 0 && options->top_k > 0},
        {IMBREX_GENERATION_TOP_P, "top_p", options->top_p, settings->top_p.given,
         options->temperature > 0 && options->top_p < 1},
        {IMBREX_GENERATION_MIN_P, "min_p", options->min_p, settings->min_p.given,
         options->temperature > 0 && options->min_p > 0},
        {IMBREX_GENERATION_REPETITION_PENALTY, "repetition_penalty", options->repetition_penalty,
         settings->repeat_penalty.given, options->repetition_penalty != 1},
        {0, "frequency_penalty", options->frequency_penalty, settings->frequency_penalty.given,
         options->frequency_penalty != 0},
        {0, "presence_penalty", options->presence_penalty, settings->presence_penalty.given,
         options->presence_penalty != 0},
    };
    bool any = false;

    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        enum sampling_origin value_origin = SAMPLING_ORIGIN_DEFAULT;
        if (values[i].given) {
            value_origin = SAMPLING_ORIGIN_COMMAND_LINE;
        } else if ((options->from_checkpoint & values[i].field) != 0) {
            value_origin = SAMPLING_ORIGIN_CHECKPOINT;
        }
        if (values[i].in_use && value_origin == origin) {
            append(line, MESSAGE_BYTES, "%s%s %.7g", any ? ", " : "; ", values[i].name,
                   values[i].value);
            any = true;
        }
    }
    if (any) {
        append(line, MESSAGE_BYTES, " (%s)", sampling_origin_names[origin]);
    }
}

void generation_print_sampling(const struct generation_settings *settings,
                               const struct imbrex_request_options *options)
{
    char line[MESSAGE_BYTES] = "";

    if (options->temperature == 0) {
        append(line, sizeof(line), "; the most likely token");
    }
    for (int origin = 0; origin < NUM_SAMPLING_ORIGINS; origin++) {
        describe_sampling(settings, options, (enum sampling_origin)origin, line);
    }
    if (options->temperature > 0) {
        append(line, sizeof(line), "; seed %" PRIu64, options->seed);
    }
    /* The line begins with the separator. */
    fprintf(stderr, "sampling: %s\n", line + 2);
}

/* A given value goes before the checkpoint's. */
static float choose_real(const struct option_real *given, float value)
{
    return given->given ? (float)given->value : value;
}

static void warn_without_effect(const struct generation_settings *settings)
{
    const struct {
        const char *name;
        bool given;
    } options[] = {
        {"top-k", settings->top_k.given},
        {"top-p", settings->top_p.given},
        {"min-p", settings->min_p.given},
    };

    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        if (options[i].given) {
            output_warning("--%s has no effect at temperature 0; --temp sets one", options[i].name);
        }
    }
}

struct imbrex_request_options generation_settings_to_options(
    const struct generation_settings *settings, const struct imbrex_model *model)
{
    struct imbrex_request_options options = imbrex_request_options_default(model);

    /* Asking for temperature 0 asks for plain argmax. */
    if (settings->temperature.given && (float)settings->temperature.value == 0) {
        options.top_k = 0;
        options.top_p = 1;
        options.min_p = 0;
        options.repetition_penalty = 1;
    }
    options.temperature = choose_real(&settings->temperature, options.temperature);
    options.top_p = choose_real(&settings->top_p, options.top_p);
    options.min_p = choose_real(&settings->min_p, options.min_p);
    options.repetition_penalty = choose_real(&settings->repeat_penalty, options.repetition_penalty);
    options.frequency_penalty =
        choose_real(&settings->frequency_penalty, options.frequency_penalty);
    options.presence_penalty = choose_real(&settings->presence_penalty, options.presence_penalty);
    if (settings->top_k.given) {
        options.top_k = (int32_t)settings->top_k.value;
    }
    options.seed = settings->seed.given ? settings->seed.value : random_seed();
    options.max_tokens = (int32_t)settings->max_tokens.value;
    options.min_tokens = (int32_t)settings->min_tokens.value;
    options.stop = settings->stop.values;
    options.num_stop = settings->stop.count;
    options.ignore_eos = settings->ignore_eos;
    if (options.temperature == 0) {
        warn_without_effect(settings);
    }
    return options;
}

static const char *describe_finish(enum imbrex_finish_reason reason)
{
    switch (reason) {
    case IMBREX_FINISH_REASON_EOS:
        return "end token";
    case IMBREX_FINISH_REASON_STOP_STRING:
        return "stop text";
    case IMBREX_FINISH_REASON_LENGTH:
        return "limit of -n";
    case IMBREX_FINISH_REASON_CONTEXT:
        return "the context is full";
    case IMBREX_FINISH_REASON_CANCELLED:
        return "cancelled";
    case IMBREX_FINISH_REASON_DEADLINE:
    case IMBREX_FINISH_REASON_ERROR:
    case IMBREX_FINISH_REASON_NONE:
        break;
    }
    return imbrex_finish_reason_name(reason);
}

/* Four digits, without an exponent for large numbers. */
static void append_number(char *line, size_t line_bytes, double value)
{
    append(line, line_bytes, value >= 1000 ? "%.0f" : "%.4g", value);
}

static void append_count(char *line, size_t line_bytes, const char *what, int32_t num_tokens)
{
    append(line, line_bytes, "%s %" PRId32 " token%s", what, num_tokens,
           output_plural((uint64_t)num_tokens));
}

/* Appends ", 1.2 ms (4166 tokens/s)"; no rate where nothing was timed. */
static void append_rate(char *line, size_t line_bytes, int32_t num_tokens, int64_t duration_ns)
{
    append(line, line_bytes, ", ");
    append_number(line, line_bytes, (double)duration_ns / 1e6);
    append(line, line_bytes, " ms");
    if (num_tokens > 0 && duration_ns > 0) {
        append(line, line_bytes, " (");
        append_number(line, line_bytes, num_tokens / ((double)duration_ns / 1e9));
        append(line, line_bytes, " tokens/s)");
    }
}

void generation_print_statistics(const struct imbrex_request_metrics *metrics)
{
    char line[MESSAGE_BYTES] = "";

    append_count(line, sizeof(line), "prompt", metrics->num_prompt_tokens);
    if (metrics->num_cached_tokens > 0) {
        append(line, sizeof(line), ", %" PRId32 " cached", metrics->num_cached_tokens);
        if (metrics->num_host_tokens + metrics->num_disk_tokens + metrics->num_remote_tokens > 0) {
            append(line, sizeof(line), " (%" PRId32 " from RAM, %" PRId32 " from disk",
                   metrics->num_host_tokens, metrics->num_disk_tokens);
            if (metrics->num_remote_tokens > 0) {
                append(line, sizeof(line), ", %" PRId32 " from the remote tier",
                       metrics->num_remote_tokens);
            }
            append(line, sizeof(line), ")");
        }
    }
    /* A run that ended within the prompt does not tell how much of it was read. */
    append_rate(line, sizeof(line),
                metrics->num_generated_tokens > 0
                    ? metrics->num_prompt_tokens - metrics->num_cached_tokens
                    : 0,
                metrics->prefill_ns);
    append_count(line, sizeof(line), "; generated", metrics->num_generated_tokens);
    if (metrics->num_generated_tokens > 0) {
        /* The first token comes out of the prefill. */
        append_rate(line, sizeof(line), metrics->num_generated_tokens - 1, metrics->decode_ns);
        append(line, sizeof(line), "; first token after ");
        append_number(line, sizeof(line), (double)metrics->ttft_ns / 1e6);
        append(line, sizeof(line), " ms");
    }
    fprintf(stderr, "%s; end: %s\n", line, describe_finish(metrics->finish_reason));
}
