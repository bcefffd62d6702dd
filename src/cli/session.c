/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a model for text, and an engine with a context of a sensible size. */
#include "cli/session.h"

#include "cli/command.h"
#include "cli/output.h"
#include "cli/signals.h"

/* An imbrex_log_fn. */
static void take_log(void *user, enum imbrex_log_level level, const char *message)
{
    const struct session *session = user;
    bool is_held = session->held_warnings != NULL && level >= IMBREX_LOG_LEVEL_WARNING &&
                   json_array_append_new(session->held_warnings, json_string(message)) == 0;

    if (!is_held) {
        output_log(NULL, level, message);
    }
}

/* Prints them, or drops what an error makes needless. */
static void release_warnings(struct session *session, bool is_needed)
{
    for (size_t i = 0; is_needed && i < json_array_size(session->held_warnings); i++) {
        output_warning("%s", json_string_value(json_array_get(session->held_warnings, i)));
    }
    json_decref(session->held_warnings);
    session->held_warnings = NULL;
}

int session_open(const char *path, struct imbrex_model **model)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_model_options options = imbrex_model_options_default();

    options.log = output_log;
    if (imbrex_model_open(path, &options, model, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_model(*model);
    return EXIT_CODE_OK;
}

int session_open_model(struct session *session, const char *model)
{
    struct imbrex_error err = {0};
    struct imbrex_model_options options = imbrex_model_options_default();

    session->model_name = model_display_name(model);
    options.log = take_log;
    options.log_user = session;
    /* Without memory for them, warnings are printed at once. */
    session->held_warnings = json_array();
    enum imbrex_status status = imbrex_model_open(model, &options, &session->model, &err);
    bool has_tokenizer =
        status == IMBREX_STATUS_OK && imbrex_model_tokenizer(session->model) != NULL;
    release_warnings(session, status != IMBREX_STATUS_OK || has_tokenizer);
    if (status != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_model(session->model);
    if (!has_tokenizer) {
        output_error("%s: expected a model with a tokenizer, found none", session->model_name);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

static int32_t choose_context_size(const struct session *session, int64_t num_prompt_tokens,
                                   int64_t max_tokens)
{
    struct imbrex_model_info description;
    int64_t num_tokens = num_prompt_tokens + (max_tokens > 0 ? max_tokens : SESSION_CONTEXT_TOKENS);

    imbrex_model_describe(session->model, &description);
    if (num_tokens < SESSION_CONTEXT_TOKENS) {
        num_tokens = SESSION_CONTEXT_TOKENS;
    }
    if (num_tokens > description.max_position_embeddings) {
        num_tokens = description.max_position_embeddings;
    }
    return (int32_t)num_tokens;
}

int session_create_engine(struct session *session, const struct engine_settings *settings,
                          int64_t num_prompt_tokens, int64_t max_tokens)
{
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options;
    char kv_folder[ENGINE_MAX_PATH_BYTES];
    int exit_code = engine_settings_to_options(
        settings, choose_context_size(session, num_prompt_tokens, max_tokens), &options);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    /* One text at a time. */
    options.max_running = 1;
    options.max_waiting = 1;
    exit_code = engine_settings_choose_kv(settings, session->model, kv_folder, &options);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    return engine_settings_create(settings, session->model, &options, !session->is_quiet,
                                  &session->engine, &plan);
}

void session_close(struct session *session)
{
    imbrex_engine_destroy(session->engine);
    signals_set_model(NULL);
    imbrex_model_close(session->model);
    session->engine = NULL;
    session->model = NULL;
}
