/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a model for text, and an engine with a context of a sensible size. */
#include "cli/session.h"

#include "cli/command.h"
#include "cli/output.h"
#include "cli/signals.h"

int session_open_model(struct session *session, const char *model)
{
    struct imbrex_error err = {0};
    struct imbrex_model_options options = imbrex_model_options_default();

    session->model_name = model_display_name(model);
    options.log = output_log;
    if (imbrex_model_open(model, &options, &session->model, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_model(session->model);
    if (imbrex_model_tokenizer(session->model) == NULL) {
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
    struct imbrex_error err = {0};
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options = engine_settings_to_options(
        settings, choose_context_size(session, num_prompt_tokens, max_tokens));

    if (imbrex_engine_create(session->model, &options, &session->engine, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_engine_memory_plan(session->engine, &plan);
    return engine_settings_check(settings, &plan);
}

void session_close(struct session *session)
{
    imbrex_engine_destroy(session->engine);
    signals_set_model(NULL);
    imbrex_model_close(session->model);
    session->engine = NULL;
    session->model = NULL;
}
