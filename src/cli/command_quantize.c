/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex quantize: a model as one GGUF file of another type, and a report of what that cost. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/progress_bar.h"
#include "cli/report_header.h"
#include "cli/score.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

struct quantize_settings {
    struct engine_settings engine;
    const char *out, *type, *ids_file;
    bool force, json;
};

static const struct quantize_settings quantize_defaults = {
    .engine = {.cpu = {.value = IMBREX_CPU_ALL}},
    .type = "q8_0",
};
static const size_t out_operand = offsetof(struct quantize_settings, out);

static const struct option_spec quantize_options[] = {
    {.long_name = "type",
     .argument = "TYPE",
     .type = OPTION_TYPE_STRING,
     .group = "Quantisation",
     .help = "type of the matrices: " IMBREX_QUANTIZE_TYPES "; rows that are no "
             "multiple of its block get another one, which the report names; norms and biases are "
             "F32, the output matrix of a q4_k or q5_k file Q6_K",
     .default_text = "q8_0",
     .offset = offsetof(struct quantize_settings, type)},
    {.long_name = "force",
     .type = OPTION_TYPE_FLAG,
     .group = "Quantisation",
     .help = "replace OUT.gguf if it exists",
     .offset = offsetof(struct quantize_settings, force)},
    {.long_name = "perplexity",
     .argument = "IDS.json",
     .type = OPTION_TYPE_STRING,
     .group = "Output",
     .help = "score these token ids, a JSON array of integers, with the model before and after; "
             "- is standard input",
     .offset = offsetof(struct quantize_settings, ids_file)},
    {.long_name = "json",
     .type = OPTION_TYPE_FLAG,
     .group = "Output",
     .help = "print the report as a JSON object",
     .offset = offsetof(struct quantize_settings, json)},
    ENGINE_OPTION_THREADS(struct quantize_settings),
    ENGINE_OPTION_CPU(struct quantize_settings),
};

struct quantize_state {
    const struct quantize_settings *settings;
    bool has_bar; /* standard error is a terminal */
    bool out_of_memory;
    json_t *tensors; /* with --json: what has been written */
    int32_t *token_ids;
    size_t num_token_ids;
    double nll_before, nll_after;
};

/* ---- while it runs ---- */

static void clear_bar(const struct quantize_state *state)
{
    if (state->has_bar) {
        progress_bar_clear();
    }
}

static void draw_bar(const struct quantize_state *state,
                     const struct imbrex_quantize_progress *progress)
{
    if (!state->has_bar) {
        return;
    }
    double done = progress->bytes_total > 0
                      ? (double)progress->bytes_done / (double)progress->bytes_total
                      : 1.0;
    progress_bar_draw(done, "%" PRId32 " of %" PRId32 " tensors", progress->num_finished,
                      progress->num_tensors);
}

static void print_tensor(const struct imbrex_quantized_tensor *tensor)
{
    output_escaped(tensor->name, strlen(tensor->name));
    output_printf("  [");
    for (int32_t i = 0; i < tensor->num_dims; i++) {
        output_printf("%s%" PRId64, i == 0 ? "" : ", ", tensor->shape[i]);
    }
    output_printf("]  %s -> %s  %zu -> %zu bytes  rms error %.3g", tensor->from, tensor->to,
                  tensor->from_bytes, tensor->to_bytes, tensor->rms_error);
    if (tensor->reason != NULL) {
        output_printf("  (%s)", tensor->reason);
    }
    output_printf("\n");
}

/* NULL if there is no memory. */
static json_t *json_of_tensor(const struct imbrex_quantized_tensor *tensor)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->num_dims; i++) {
        if (json_array_append_new(shape, json_integer(tensor->shape[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:s, s:o, s:s, s:s, s:I, s:I, s:f, s:s?}", "name", tensor->name, "shape",
                     shape, "from", tensor->from, "to", tensor->to, "from_bytes",
                     (json_int_t)tensor->from_bytes, "to_bytes", (json_int_t)tensor->to_bytes,
                     "rms_error", tensor->rms_error, "reason", tensor->reason);
}

static bool show_progress(void *user, const struct imbrex_quantize_progress *progress)
{
    struct quantize_state *state = user;

    if (progress->tensor != NULL && state->settings->json) {
        state->out_of_memory =
            json_array_append_new(state->tensors, json_of_tensor(progress->tensor)) != 0;
    } else if (progress->tensor != NULL) {
        clear_bar(state);
        print_tensor(progress->tensor);
        output_flush();
    }
    draw_bar(state, progress);
    return signals_interrupt() == 0 && !state->out_of_memory;
}

/* ---- scores ---- */

static int score_model(const struct quantize_state *state, struct imbrex_model *model, double *nll)
{
    struct imbrex_engine *engine = NULL;
    struct imbrex_memory_plan plan;
    struct imbrex_model_info description;
    struct score score = {0};

    imbrex_model_describe(model, &description);
    int32_t window = description.max_position_embeddings < SCORE_DEFAULT_WINDOW
                         ? description.max_position_embeddings
                         : SCORE_DEFAULT_WINDOW;
    struct imbrex_engine_options options;
    int exit_code = engine_settings_to_options(&state->settings->engine, window, &options);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_create(&state->settings->engine, model, &options, false,
                                           &engine, &plan);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            score_windows(engine, state->token_ids, state->num_token_ids, (size_t)window, &score);
    }
    imbrex_engine_destroy(engine);
    if (exit_code == EXIT_CODE_OK) {
        *nll = score.nll_sum / (double)score.num_scored;
    }
    return exit_code;
}

static int read_ids(struct quantize_state *state, const struct imbrex_model *model)
{
    const char *path = state->settings->ids_file;
    struct imbrex_model_info description;

    imbrex_model_describe(model, &description);
    int exit_code =
        input_read_ids(path, description.vocab_size, &state->token_ids, &state->num_token_ids);
    if (exit_code == EXIT_CODE_OK && state->num_token_ids < 2) {
        output_error("%s: expected at least 2 tokens, found %zu", input_display_name(path),
                     state->num_token_ids);
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

static int score_output(struct quantize_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    struct imbrex_model_options options = imbrex_model_options_default();

    options.log = output_log;
    if (imbrex_model_open(state->settings->out, &options, &model, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    int exit_code = score_model(state, model, &state->nll_after);
    imbrex_model_close(model);
    return exit_code;
}

/* ---- the report ---- */

static void print_totals(const struct quantize_state *state,
                         const struct imbrex_quantize_report *report)
{
    char from[SIZE_TEXT_BYTES], to[SIZE_TEXT_BYTES], file[SIZE_TEXT_BYTES];
    double ratio = report->from_bytes > 0
                       ? 100.0 * (double)report->to_bytes / (double)report->from_bytes
                       : 100.0;

    output_printf("\n%" PRId32 " tensor%s: %s -> %s, %.1f %%, rms error %.3g\n",
                  report->num_tensors, output_plural((uint64_t)report->num_tensors),
                  output_format_size(from, (size_t)report->from_bytes),
                  output_format_size(to, (size_t)report->to_bytes), ratio, report->rms_error);
    output_printf("file: %s\n", output_format_size(file, (size_t)report->file_bytes));
    if (state->settings->ids_file != NULL) {
        output_printf("nll %.6f -> %.6f per token (%+.3f %%), perplexity %.4f -> %.4f\n",
                      state->nll_before, state->nll_after,
                      100.0 * (state->nll_after / state->nll_before - 1.0), exp(state->nll_before),
                      exp(state->nll_after));
    }
}

static int print_json(struct quantize_state *state, const struct imbrex_quantize_report *report)
{
    bool is_scored = state->settings->ids_file != NULL;
    json_t *root =
        json_pack("{s:s, s:O, s:i, s:I, s:I, s:I, s:f, s:o, s:o}", "type", state->settings->type,
                  "tensors", state->tensors, "num_tensors", (int)report->num_tensors, "from_bytes",
                  (json_int_t)report->from_bytes, "to_bytes", (json_int_t)report->to_bytes,
                  "file_bytes", (json_int_t)report->file_bytes, "rms_error", report->rms_error,
                  "nll_before", is_scored ? json_real(state->nll_before) : json_null(), "nll_after",
                  is_scored ? json_real(state->nll_after) : json_null());
    return report_print(root, REPORT_DIGITS);
}

/* ---- command ---- */

static int quantize(struct quantize_state *state, struct imbrex_model *model)
{
    struct imbrex_error err = {0};
    struct imbrex_quantize_report report = {0};
    struct imbrex_quantize_options options = imbrex_quantize_options_default();

    options.path = state->settings->out;
    options.type = state->settings->type;
    options.overwrite = state->settings->force;
    options.num_threads = (int32_t)state->settings->engine.threads.value;
    options.progress = show_progress;
    options.user = state;
    if (state->settings->ids_file != NULL) {
        int exit_code = read_ids(state, model);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = score_model(state, model, &state->nll_before);
        }
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
    }
    signals_note_interrupts(true);
    signals_watch_interrupts();
    enum imbrex_status status = imbrex_quantize(model, &options, &report, &err);
    signals_note_interrupts(false);
    clear_bar(state);
    if (status == IMBREX_STATUS_CANCELLED && !state->out_of_memory) {
        return EXIT_CODE_SIGNAL + signals_interrupt();
    }
    if (state->out_of_memory) {
        return output_out_of_memory();
    }
    if (status == IMBREX_STATUS_INVALID_ARGUMENT && strncmp(err.message, "type: ", 6) == 0) {
        output_error("--%s", err.message);
        return EXIT_CODE_INPUT;
    }
    if (status != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    if (state->settings->ids_file != NULL) {
        int exit_code = score_output(state);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
    }
    if (state->settings->json) {
        return print_json(state, &report);
    }
    print_totals(state, &report);
    return EXIT_CODE_OK;
}

/* An engine only runs with --perplexity, but kernels that this machine has not are refused without
 * it too, before the file is written. */
static int check_cpu(const struct quantize_state *state, const struct imbrex_model *model)
{
    struct imbrex_engine_options options;
    struct imbrex_memory_plan plan;

    if (!state->settings->engine.cpu.given) {
        return EXIT_CODE_OK;
    }
    int exit_code = engine_settings_to_options(&state->settings->engine, 0, &options);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_plan(model, &options, &plan);
    }
    return exit_code == EXIT_CODE_OK ? engine_settings_check(&state->settings->engine, &plan)
                                     : exit_code;
}

static int run(const void *settings, const char *model_path)
{
    struct quantize_state state = {.settings = settings, .has_bar = isatty(STDERR_FILENO) == 1};
    struct imbrex_model *model = NULL;
    struct stat file;
    int exit_code;

    if (state.settings->out == NULL) {
        output_error("quantize: expected MODEL and OUT.gguf, found %s; see imbrex quantize --help",
                     model_path == NULL ? "neither" : "one of them");
        return EXIT_CODE_INPUT;
    }
    if (state.settings->out[0] == '\0') {
        output_error("quantize: OUT.gguf: expected the name of a new file, found \"\"");
        return EXIT_CODE_INPUT;
    }
    if (!state.settings->force && stat(state.settings->out, &file) == 0 && S_ISREG(file.st_mode)) {
        output_error("%s: expected the name of a new file, found a file there; --force replaces it",
                     state.settings->out);
        return EXIT_CODE_INPUT;
    }
    exit_code = session_open(model_path, &model);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    state.tensors = json_array();
    if (state.tensors == NULL) {
        exit_code = output_out_of_memory();
    } else {
        exit_code = check_cpu(&state, model);
        exit_code = exit_code == EXIT_CODE_OK ? quantize(&state, model) : exit_code;
    }
    json_decref(state.tensors);
    free(state.token_ids);
    signals_set_model(NULL);
    imbrex_model_close(model);
    return exit_code;
}

const struct command command_quantize = {
    .name = "quantize",
    .synopsis = "MODEL OUT.gguf [options]",
    .summary = "write a model as a GGUF file of another type",
    .description =
        "Reads a Hugging Face folder, a GGUF file, \"builtin:stories260K\" or \"random:SHAPE\" and "
        "writes one GGUF file with its tensors, tokenizer and chat template. Prints for each "
        "tensor what it became, its bytes and the root mean square of the error relative to that "
        "of its elements. The file appears when it is whole: until then it is OUT.gguf.partial.",
    .examples = "  imbrex quantize Qwen2.5-0.5B qwen.gguf --type q8_0\n"
                "  imbrex quantize Qwen2.5-0.5B qwen.gguf --type q4_k --perplexity ids.json\n",
    .options = {quantize_options, sizeof(quantize_options) / sizeof(quantize_options[0])},
    .defaults = &quantize_defaults,
    .settings_bytes = sizeof(quantize_defaults),
    .second_operand = &out_operand,
    .run = run,
};
