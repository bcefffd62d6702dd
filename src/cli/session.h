/* SPDX-License-Identifier: Apache-2.0 */
/* The model and the engine of a command that generates text, and the order in which they come and
 * go. Failures are reported; the functions return an exit code. */
#ifndef IMBREX_CLI_SESSION_H
#define IMBREX_CLI_SESSION_H

#include "cli/engine_settings.h"
#include <jansson.h>

#include "imbrex.h"

struct session {
    json_t *held_warnings;  /* while the model is opened, else NULL */
    const char *model_name; /* for messages */
    bool is_quiet;          /* no bar while weights are loaded */
    struct imbrex_model *model;
    struct imbrex_engine *engine;
};

/* A model that is measured, scored or looked at: its warnings are printed as they come, and signals
 * know of it until signals_set_model(NULL). `path` is NULL for the built-in one. */
int session_open(const char *path, struct imbrex_model **model);

/* `model` is the operand, NULL if omitted. The session must be closed also after a failure. */
int session_open_model(struct session *session, const char *model);
/* Context where no more is asked for, and room for text of which nobody says how long it gets. */
#define SESSION_CONTEXT_TOKENS 4096
/* Room for the prompt and max_tokens behind it (0: SESSION_CONTEXT_TOKENS), at least for
 * SESSION_CONTEXT_TOKENS together, as far as the model was made for that much, unless --ctx-size
 * says otherwise. */
int session_create_engine(struct session *session, const struct engine_settings *settings,
                          int64_t num_prompt_tokens, int64_t max_tokens);
void session_close(struct session *session);

#endif
