/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex run: continues a prompt, streaming text to standard output. What a person wants to know
 * about the run (sampling, speed, why it ended) goes to standard error. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "imbrex.h"

/* Context without --ctx-size, if the model allows it and the prompt needs no more. */
#define DEFAULT_CONTEXT_TOKENS 4096

struct run_settings {
    struct engine_settings engine;
    const char *prompt, *prompt_file;
    bool no_echo, ignore_eos, quiet;
    struct option_integer max_tokens;
    struct option_real temperature, top_p, min_p, repeat_penalty;
    struct option_integer top_k;
    struct option_unsigned seed;
    struct option_strings stop;
};

static const struct run_settings run_defaults = {.engine = ENGINE_SETTINGS_DEFAULT};

#define CHECKPOINT_DEFAULT "generation_config.json, else off"

static const struct option_spec run_options[] = {
    {.long_name = "prompt",
     .short_name = 'p',
     .argument = "TEXT",
     .type = OPTION_TYPE_STRING,
     .group = "Prompt",
     .help = "text to continue, taken as it is",
     .offset = offsetof(struct run_settings, prompt)},
    {.long_name = "file",
     .short_name = 'f',
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Prompt",
     .help = "read the prompt from a file, its last line end included; - is standard input",
     .offset = offsetof(struct run_settings, prompt_file)},
    {.long_name = "no-echo",
     .type = OPTION_TYPE_FLAG,
     .group = "Prompt",
     .help = "print the continuation only, without the prompt before it",
     .offset = offsetof(struct run_settings, no_echo)},
    {.long_name = "max-tokens",
     .short_name = 'n',
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Length",
     .help = "end after N tokens; 0: at an end token or when the context is full",
     .max = INT32_MAX,
     .offset = offsetof(struct run_settings, max_tokens)},
    {.long_name = "stop",
     .argument = "TEXT",
     .type = OPTION_TYPE_STRINGS,
     .group = "Length",
     .help = "end before this text; may be given several times",
     .offset = offsetof(struct run_settings, stop)},
    {.long_name = "ignore-eos",
     .type = OPTION_TYPE_FLAG,
     .group = "Length",
     .help = "do not end at the model's end tokens",
     .offset = offsetof(struct run_settings, ignore_eos)},
    {.long_name = "temp",
     .argument = "T",
     .type = OPTION_TYPE_REAL,
     .group = "Sampling",
     .help = "temperature; 0: always the most likely token, and what generation_config.json says "
             "about sampling is ignored",
     .default_text = "generation_config.json, else 0",
     .max = 100,
     .offset = offsetof(struct run_settings, temperature)},
    {.long_name = "top-k",
     .argument = "K",
     .type = OPTION_TYPE_INTEGER,
     .group = "Sampling",
     .help = "choose among the K most likely tokens; 0: off",
     .default_text = CHECKPOINT_DEFAULT,
     .max = INT32_MAX,
     .offset = offsetof(struct run_settings, top_k)},
    {.long_name = "top-p",
     .argument = "P",
     .type = OPTION_TYPE_REAL,
     .group = "Sampling",
     .help = "choose among the most likely tokens whose probabilities sum to P; 1: off",
     .default_text = CHECKPOINT_DEFAULT,
     .max = 1,
     .above_min = true,
     .offset = offsetof(struct run_settings, top_p)},
    {.long_name = "min-p",
     .argument = "P",
     .type = OPTION_TYPE_REAL,
     .group = "Sampling",
     .help = "leave out tokens less likely than P times the most likely; 0: off",
     .default_text = CHECKPOINT_DEFAULT,
     .max = 1,
     .below_max = true,
     .offset = offsetof(struct run_settings, min_p)},
    {.long_name = "repeat-penalty",
     .argument = "R",
     .type = OPTION_TYPE_REAL,
     .group = "Sampling",
     .help = "make tokens seen before less likely; 1: off",
     .default_text = CHECKPOINT_DEFAULT,
     .max = 100,
     .above_min = true,
     .offset = offsetof(struct run_settings, repeat_penalty)},
    {.long_name = "seed",
     .argument = "S",
     .type = OPTION_TYPE_UNSIGNED,
     .group = "Sampling",
     .help = "the same seed gives the same text",
     .default_text = "random, and printed",
     .offset = offsetof(struct run_settings, seed)},
    ENGINE_OPTION_CTX_SIZE(struct run_settings, "4096, or what prompt and -n need, up to what the "
                                                "model was made for"),
    ENGINE_OPTION_THREADS(struct run_settings),
    ENGINE_OPTION_CPU(struct run_settings),
    {.long_name = "quiet",
     .short_name = 'q',
     .type = OPTION_TYPE_FLAG,
     .group = "Messages",
     .help = "print neither sampling nor statistics to standard error",
     .offset = offsetof(struct run_settings, quiet)},
};

/* Everything that run() releases at its end. */
struct run_state {
    const struct run_settings *settings;
    const char *model_name;
    struct imbrex_model *model;
    char *file_text; /* prompt read from a file */
    const char *prompt;
    size_t prompt_bytes;
    int32_t *prompt_ids;
    size_t num_prompt_ids;
    struct imbrex_engine *engine;
    struct imbrex_generation *generation;
    char last_byte; /* of standard output */
};

static int load_prompt(struct run_state *state)
{
    const struct run_settings *settings = state->settings;

    if (settings->prompt != NULL && settings->prompt_file != NULL) {
        output_error("run: expected one of -p and -f, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->prompt_file != NULL) {
        int exit_code =
            input_read_file(settings->prompt_file, &state->file_text, &state->prompt_bytes);
        state->prompt = state->file_text;
        return exit_code;
    }
    if (settings->prompt != NULL) {
        state->prompt = settings->prompt;
        state->prompt_bytes = strlen(settings->prompt);
        return EXIT_CODE_OK;
    }
    /* The built-in model tells a story from its begin token alone. */
    if (strcmp(state->model_name, BUILTIN_MODEL) == 0) {
        state->prompt = "";
        return EXIT_CODE_OK;
    }
    output_error("run: no prompt: give one with -p TEXT or -f FILE");
    return EXIT_CODE_INPUT;
}

static int open_model(struct run_state *state, const char *model)
{
    struct imbrex_error err = {0};
    struct imbrex_model_options options = imbrex_model_options_default();

    options.log = output_log;
    if (imbrex_model_open(model, &options, &state->model, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_model(state->model);
    return EXIT_CODE_OK;
}

static int tokenize_prompt(struct run_state *state)
{
    struct imbrex_error err = {0};
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(state->model);

    if (tokenizer == NULL) {
        output_error("%s: expected a tokenizer.json, found none", state->model_name);
        return EXIT_CODE_INPUT;
    }
    if (imbrex_tokenize(tokenizer, state->prompt, state->prompt_bytes,
                        IMBREX_TOKENIZE_ADD_SPECIAL | IMBREX_TOKENIZE_PARSE_SPECIAL,
                        &state->prompt_ids, &state->num_prompt_ids, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    if (state->num_prompt_ids == 0) {
        output_error("run: prompt: expected at least one token, found an empty text, and the "
                     "tokenizer of %s adds no begin token",
                     state->model_name);
        return EXIT_CODE_INPUT;
    }
    if (state->num_prompt_ids > INT32_MAX) {
        output_error("run: prompt: expected at most %" PRId32 " tokens, found %zu", INT32_MAX,
                     state->num_prompt_ids);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

/* Room for what was asked for, if the model was made for that much. */
static int32_t choose_context_size(const struct run_state *state)
{
    struct imbrex_model_info description;
    int64_t wanted = (int64_t)state->num_prompt_ids + state->settings->max_tokens.value;

    imbrex_model_describe(state->model, &description);
    if (wanted < DEFAULT_CONTEXT_TOKENS) {
        wanted = DEFAULT_CONTEXT_TOKENS;
    }
    if (wanted > description.max_position_embeddings) {
        wanted = description.max_position_embeddings;
    }
    return (int32_t)wanted;
}

static int create_engine(struct run_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options =
        engine_settings_to_options(&state->settings->engine, choose_context_size(state));

    if (imbrex_engine_create(state->model, &options, &state->engine, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_engine_memory_plan(state->engine, &plan);
    return engine_settings_check(&state->settings->engine, &plan);
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

/* Appends the sampling values in use whose origin is (or is not) the checkpoint, and the origin. */
static void describe_sampling(const struct imbrex_generation_options *options,
                              unsigned from_checkpoint, bool checkpoint, char *line)
{
    const struct {
        unsigned field;
        const char *name;
        double value;
        bool in_use;
    } values[] = {
        {IMBREX_GENERATION_TEMPERATURE, "temperature", options->temperature,
         options->temperature > 0},
        {IMBREX_GENERATION_TOP_K, "top_k", options->top_k,
         options->temperature > 0 && options->top_k > 0},
        {IMBREX_GENERATION_TOP_P, "top_p", options->top_p,
         options->temperature > 0 && options->top_p < 1},
        {IMBREX_GENERATION_MIN_P, "min_p", options->min_p,
         options->temperature > 0 && options->min_p > 0},
        {IMBREX_GENERATION_REPETITION_PENALTY, "repetition_penalty", options->repetition_penalty,
         options->repetition_penalty != 1},
    };
    bool any = false;

    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        if (values[i].in_use && ((from_checkpoint & values[i].field) != 0) == checkpoint) {
            append(line, MESSAGE_BYTES, "%s%s %.7g", any ? ", " : "; ", values[i].name,
                   values[i].value);
            any = true;
        }
    }
    if (any) {
        append(line, MESSAGE_BYTES, " (%s)",
               checkpoint ? "from generation_config.json" : "from the command line");
    }
}

static void print_sampling(const struct imbrex_generation_options *options,
                           unsigned from_checkpoint)
{
    char line[MESSAGE_BYTES] = "";

    if (options->temperature == 0) {
        append(line, sizeof(line), "; the most likely token");
    }
    describe_sampling(options, from_checkpoint, true, line);
    describe_sampling(options, from_checkpoint, false, line);
    if (options->temperature > 0) {
        append(line, sizeof(line), "; seed %" PRIu64, options->seed);
    }
    /* The line begins with the separator. */
    fprintf(stderr, "sampling: %s\n", line + 2);
}

/* Overwrites the checkpoint's value with a given one and notes where it came from. */
static float choose_real(const struct option_real *given, float value,
                         enum imbrex_generation_field field, unsigned *from_checkpoint)
{
    if (!given->given) {
        return value;
    }
    *from_checkpoint &= ~(unsigned)field;
    return (float)given->value;
}

static void warn_without_effect(const struct run_settings *settings)
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

/* The checkpoint's sampling defaults under what the command line says. */
static struct imbrex_generation_options choose_generation_options(const struct run_state *state)
{
    const struct run_settings *settings = state->settings;
    struct imbrex_generation_options options = imbrex_generation_options_default(state->model);
    unsigned *from_checkpoint = &options.from_checkpoint;

    /* Asking for temperature 0 asks for plain argmax. */
    if (settings->temperature.given && (float)settings->temperature.value == 0) {
        options.top_k = 0;
        options.top_p = 1;
        options.min_p = 0;
        options.repetition_penalty = 1;
        *from_checkpoint = 0;
    }
    options.temperature = choose_real(&settings->temperature, options.temperature,
                                      IMBREX_GENERATION_TEMPERATURE, from_checkpoint);
    options.top_p =
        choose_real(&settings->top_p, options.top_p, IMBREX_GENERATION_TOP_P, from_checkpoint);
    options.min_p =
        choose_real(&settings->min_p, options.min_p, IMBREX_GENERATION_MIN_P, from_checkpoint);
    options.repetition_penalty = choose_real(&settings->repeat_penalty, options.repetition_penalty,
                                             IMBREX_GENERATION_REPETITION_PENALTY, from_checkpoint);
    if (settings->top_k.given) {
        options.top_k = (int32_t)settings->top_k.value;
        *from_checkpoint &= ~(unsigned)IMBREX_GENERATION_TOP_K;
    }
    options.seed = settings->seed.given ? settings->seed.value : random_seed();
    options.prompt_ids = state->prompt_ids;
    options.num_prompt_ids = (int32_t)state->num_prompt_ids;
    options.max_tokens = (int32_t)settings->max_tokens.value;
    options.stop = settings->stop.values;
    options.num_stop = settings->stop.count;
    options.ignore_eos = settings->ignore_eos;
    return options;
}

static int create_generation(struct run_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_generation_options options = choose_generation_options(state);

    if (imbrex_generation_create(state->engine, &options, &state->generation, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_generation(state->generation);
    if (options.temperature == 0) {
        warn_without_effect(state->settings);
    }
    if (!state->settings->quiet) {
        print_sampling(&options, options.from_checkpoint);
    }
    return EXIT_CODE_OK;
}

static bool write_text(struct run_state *state, const char *text, size_t num_bytes)
{
    if (num_bytes == 0) {
        return true;
    }
    state->last_byte = text[num_bytes - 1];
    return output_bytes(text, num_bytes) && output_flush();
}

static bool take_event(void *user, const struct imbrex_token_event *event)
{
    return write_text(user, event->text, event->text_bytes);
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
           num_tokens == 1 ? "" : "s");
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

static void print_statistics(const struct imbrex_generation_metrics *metrics)
{
    char line[MESSAGE_BYTES] = "";

    append_count(line, sizeof(line), "prompt", metrics->num_prompt_tokens);
    append_rate(line, sizeof(line), metrics->num_prompt_tokens, metrics->prefill_ns);
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

static int generate(struct run_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_generation_metrics metrics;

    if (!state->settings->no_echo && !write_text(state, state->prompt, state->prompt_bytes)) {
        return EXIT_CODE_FAILURE;
    }
    enum imbrex_status status = imbrex_generation_run(state->generation, take_event, state, &err);
    if (state->last_byte != 0 && state->last_byte != '\n') {
        output_bytes("\n", 1);
    }
    /* The failed write is reported at the end of the program. */
    if (!output_flush()) {
        return EXIT_CODE_FAILURE;
    }
    if (status != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_generation_read_metrics(state->generation, &metrics);
    if (!state->settings->quiet) {
        print_statistics(&metrics);
    }
    if (signals_interrupt() != 0) {
        return EXIT_CODE_SIGNAL + signals_interrupt();
    }
    return EXIT_CODE_OK;
}

static int run_steps(struct run_state *state, const char *model)
{
    int exit_code = load_prompt(state);

    for (size_t i = 0; exit_code == EXIT_CODE_OK && i < state->settings->stop.count; i++) {
        if (state->settings->stop.values[i][0] == '\0') {
            output_error("run: --stop: expected a text, found an empty one");
            exit_code = EXIT_CODE_INPUT;
        }
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_model(state, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = tokenize_prompt(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        signals_watch_interrupts();
        signals_hold_interrupts();
        exit_code = create_engine(state);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = create_generation(state);
        }
        signals_release_interrupts();
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = generate(state);
    }
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct run_state state = {.settings = settings, .model_name = model_display_name(model)};
    int exit_code = run_steps(&state, model);

    signals_set_generation(NULL);
    imbrex_generation_destroy(state.generation);
    imbrex_engine_destroy(state.engine);
    imbrex_free(state.prompt_ids);
    signals_set_model(NULL);
    imbrex_model_close(state.model);
    free(state.file_text);
    return exit_code;
}

const struct command command_run = {
    .name = "run",
    .synopsis = "[MODEL] [-p TEXT | -f FILE] [options]",
    .summary = "write text that continues a prompt",
    .description =
        "Continues a prompt. The text goes to standard output, sampling and speed to standard "
        "error. MODEL is a Hugging Face folder (config.json, *.safetensors, tokenizer.json); "
        "without it the built-in model is used, which also tells a story without a prompt. "
        "Ctrl-C ends the text; a second one ends the program at once.",
    .examples = "  imbrex run -p \"Once upon a time\"\n"
                "  imbrex run Qwen2.5-0.5B -p \"The three primary colours are\" -n 40 --temp 0\n"
                "  imbrex run Qwen2.5-0.5B -f notes.txt --stop \"###\" --seed 7 -q > out.txt\n",
    .options = {run_options, sizeof(run_options) / sizeof(run_options[0])},
    .defaults = &run_defaults,
    .settings_bytes = sizeof(run_defaults),
    .run = run,
};
