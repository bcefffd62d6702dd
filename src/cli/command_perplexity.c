/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex perplexity: how well a model predicts a text. The text is cut into windows; each is scored
 * alone, from its second id on, so that figures can be compared between machines and programs. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/score.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

struct perplexity_settings {
    struct engine_settings engine;
    const char *ids_file, *text_file;
    struct option_integer window;
    bool json;
};

static const struct perplexity_settings perplexity_defaults = {
    .engine = ENGINE_SETTINGS_DEFAULT,
    .window = {.value = SCORE_DEFAULT_WINDOW},
};

static const struct option_spec perplexity_options[] = {
    {.long_name = "ids",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "token ids: a JSON array of integers; - is standard input",
     .offset = offsetof(struct perplexity_settings, ids_file)},
    {.long_name = "text",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "a text, read with the model's tokenizer; special tokens written in it are ordinary "
             "text; - is standard input",
     .offset = offsetof(struct perplexity_settings, text_file)},
    {.long_name = "window",
     .short_name = 'w',
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "Scoring",
     .help = "tokens scored together, at most what the model was made for; the last window may be "
             "shorter",
     .min = 2,
     .max = IMBREX_MAX_CONTEXT_SIZE,
     .offset = offsetof(struct perplexity_settings, window)},
    {.long_name = "json",
     .type = OPTION_TYPE_FLAG,
     .group = "Output",
     .help = "print a JSON object: nll (mean, natural logarithm), perplexity, tokens",
     .offset = offsetof(struct perplexity_settings, json)},
    ENGINE_OPTION_KV_DTYPE(struct perplexity_settings),
    ENGINE_OPTIONS_GPU(struct perplexity_settings),
    ENGINE_OPTION_INVARIANT(struct perplexity_settings),
    ENGINE_OPTION_THREADS(struct perplexity_settings),
    ENGINE_OPTION_CPU(struct perplexity_settings),
};

struct perplexity_state {
    const struct perplexity_settings *settings;
    const char *model_name;
    struct imbrex_model *model;
    struct imbrex_model_info description;
    struct imbrex_engine *engine;
    int64_t window; /* tokens */
    struct score score;
};

static int open_model(struct perplexity_state *state, const char *model)
{
    int exit_code = session_open(model, &state->model);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    imbrex_model_describe(state->model, &state->description);
    int32_t max_window = state->description.max_position_embeddings;
    state->window = state->settings->window.value;
    if (state->window > max_window && state->settings->window.given) {
        output_error("perplexity: --window: expected at most %" PRId32
                     " tokens, the max_position_embeddings of %s, found %" PRId64,
                     max_window, state->model_name, state->window);
        return EXIT_CODE_INPUT;
    }
    if (state->window > max_window) {
        state->window = max_window;
    }
    return EXIT_CODE_OK;
}

/* *token_ids is freed with free(). */
static int tokenize_file(const struct perplexity_state *state, const char *path,
                         int32_t **token_ids, size_t *num_tokens)
{
    struct imbrex_error err = {0};
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(state->model);
    char *text;
    size_t num_bytes;

    if (tokenizer == NULL) {
        output_error("%s: expected a model with a tokenizer, found none; --ids needs none",
                     state->model_name);
        return EXIT_CODE_INPUT;
    }
    int exit_code = input_read_file(path, &text, &num_bytes);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (imbrex_tokenize(tokenizer, text, num_bytes, IMBREX_TOKENIZE_ADD_SPECIAL, token_ids,
                        num_tokens, &err) != IMBREX_STATUS_OK) {
        exit_code = output_library_error(&err);
    }
    free(text);
    return exit_code;
}

static int create_engine(struct perplexity_state *state)
{
    const struct engine_settings *settings = &state->settings->engine;
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options;
    int exit_code = engine_settings_to_options(settings, (int32_t)state->window, &options);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    return engine_settings_create(settings, state->model, &options, true, &state->engine, &plan);
}

static void print_result(const struct perplexity_state *state)
{
    double nll = state->score.nll_sum / (double)state->score.num_scored;

    if (state->settings->json) {
        output_printf("{\"nll\": %.9g, \"perplexity\": %.9g, \"tokens\": %zu}\n", nll, exp(nll),
                      state->score.num_scored);
    } else {
        output_printf("nll %.6f per token, perplexity %.4f, %zu token%s scored in windows of "
                      "%" PRId64 "\n",
                      nll, exp(nll), state->score.num_scored,
                      output_plural(state->score.num_scored), state->window);
    }
}

static int score_input(struct perplexity_state *state, const char *path)
{
    int32_t *token_ids = NULL;
    size_t num_tokens = 0;
    bool from_text = state->settings->text_file != NULL;
    int exit_code =
        from_text ? tokenize_file(state, path, &token_ids, &num_tokens)
                  : input_read_ids(path, state->description.vocab_size, &token_ids, &num_tokens);

    if (exit_code == EXIT_CODE_OK && num_tokens < 2) {
        output_error("%s: expected at least 2 tokens, found %zu", input_display_name(path),
                     num_tokens);
        exit_code = EXIT_CODE_INPUT;
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = create_engine(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = score_windows(state->engine, token_ids, num_tokens, (size_t)state->window,
                                  &state->score);
    }
    if (exit_code == EXIT_CODE_OK) {
        print_result(state);
    }
    if (from_text) {
        imbrex_free(token_ids);
    } else {
        free(token_ids);
    }
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct perplexity_state state = {.settings = settings, .model_name = model_display_name(model)};
    const char *ids_file = state.settings->ids_file, *text_file = state.settings->text_file;

    if ((ids_file == NULL) == (text_file == NULL)) {
        output_error("perplexity: expected one of --ids and --text, found %s",
                     ids_file == NULL ? "none" : "both");
        return EXIT_CODE_INPUT;
    }
    int exit_code = open_model(&state, model);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = score_input(&state, ids_file != NULL ? ids_file : text_file);
    }
    imbrex_engine_destroy(state.engine);
    signals_set_model(NULL);
    imbrex_model_close(state.model);
    return exit_code;
}

const struct command command_perplexity = {
    .name = "perplexity",
    .synopsis = "[MODEL] (--ids FILE | --text FILE) [options]",
    .summary = "score how well a model predicts a text",
    .description =
        "Prints the mean negative log-likelihood (nll, natural logarithm) of a text's tokens and "
        "its exponential, the perplexity. The tokens are cut into windows; each is scored alone, "
        "from its second token on. MODEL is a Hugging Face folder, a GGUF file or, with --ids, "
        "random:SHAPE; without it the built-in model is used.",
    .examples = "  imbrex perplexity Qwen2.5-0.5B --text book.txt\n"
                "  imbrex perplexity Qwen2.5-0.5B --ids ids.json --window 1024 --json\n",
    .options = {perplexity_options, sizeof(perplexity_options) / sizeof(perplexity_options[0])},
    .defaults = &perplexity_defaults,
    .settings_bytes = sizeof(perplexity_defaults),
    .run = run,
};
