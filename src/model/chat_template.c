/* SPDX-License-Identifier: Apache-2.0 */
/* Rendering a conversation and turning the text into ids. The render says which bytes came from the
 * conversation; the tokenizer takes no special token from those. */
#include "model/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/memory.h"
#include "base/utf8.h"
#include "jinja/jinja.h"
#include "model/chat_builtin.h"
#include "model/model.h"

/* Where conversations stand in messages. */
#define MESSAGES_NAME "messages"
#define TOOLS_NAME "tools"

/* A template as text. */
struct chosen_template {
    const char *name, *source;
};

struct imbrex_chat_options imbrex_chat_options_default(void)
{
    return (struct imbrex_chat_options){.add_generation_prompt = true};
}

/* ---- the template --------------------------------------------------------------------------- */

static enum imbrex_status refuse_without_template(const struct imbrex_model *model,
                                                  struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_NOT_FOUND,
                     "%s: expected a chat template (chat_template.jinja, chat_template in "
                     "tokenizer_config.json, or tokenizer.chat_template in a GGUF file), found "
                     "none",
                     model->path);
}

static enum imbrex_status choose_template(const struct imbrex_model *model,
                                          const struct imbrex_chat_options *options,
                                          struct chosen_template *chosen, struct imbrex_error *err)
{
    const struct chat_source *source = &model->chat_source;
    if (options->chat_template != NULL) {
        const char *builtin = chat_builtin_find(options->chat_template);
        if (builtin != NULL) {
            *chosen = (struct chosen_template){options->chat_template, builtin};
        } else {
            const char *name = options->chat_template_name;
            *chosen = (struct chosen_template){name != NULL ? name : "chat_template",
                                               options->chat_template};
        }
        return IMBREX_STATUS_OK;
    }
    if (options->tools_json != NULL && source->tool_template != NULL) {
        *chosen = (struct chosen_template){source->tool_template_name, source->tool_template};
        return IMBREX_STATUS_OK;
    }
    if (model->chat_template == NULL) {
        return refuse_without_template(model, err);
    }
    *chosen = (struct chosen_template){
        source->template_name != NULL ? source->template_name : model->path, model->chat_template};
    return IMBREX_STATUS_OK;
}

/* ---- its variables -------------------------------------------------------------------------- */

static enum imbrex_status parse_messages(const char *messages_json, json_t **messages,
                                         struct imbrex_error *err)
{
    if (messages_json == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         MESSAGES_NAME ": expected a JSON array, found NULL");
    }
    json_t *parsed;
    TRY(json_parse_array(MESSAGES_NAME, messages_json, strlen(messages_json), &parsed, err));
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (json_array_size(parsed) == 0) {
        status = error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                           MESSAGES_NAME ": expected at least one message, found an empty array");
    }
    for (size_t i = 0; i < json_array_size(parsed) && status == IMBREX_STATUS_OK; i++) {
        const json_t *message = json_array_get(parsed, i);
        const json_t *role = json_object_get(message, "role");
        if (!json_is_object(message)) {
            status = error_set(err, IMBREX_STATUS_FORMAT,
                               MESSAGES_NAME "[%zu]: expected an object, found %s", i,
                               json_kind(message));
        } else if (!json_is_string(role)) {
            status = error_set(err, IMBREX_STATUS_FORMAT,
                               MESSAGES_NAME "[%zu].role: expected a string, found %s", i,
                               json_kind(role));
        }
    }
    if (status != IMBREX_STATUS_OK) {
        json_decref(parsed);
        return status;
    }
    *messages = parsed;
    return IMBREX_STATUS_OK;
}

/* Adds a variable, whose value it takes over also on failure; NULL is a failed allocation. */
static enum imbrex_status add_variable(json_t *variables, const char *name, json_t *value,
                                       struct imbrex_error *err)
{
    if (json_object_set_new(variables, name, value) != 0) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "no memory for the variable %s", name);
    }
    return IMBREX_STATUS_OK;
}

/* The text of a token as a variable; nothing if it is no text. */
static enum imbrex_status add_token(json_t *variables, const char *name,
                                    const struct imbrex_tokenizer *tokenizer, int32_t token_id,
                                    struct imbrex_error *err)
{
    size_t num_bytes;
    const char *bytes = imbrex_token_bytes(tokenizer, token_id, &num_bytes);
    if (bytes == NULL || memchr(bytes, 0, num_bytes) != NULL ||
        utf8_valid_prefix(bytes, num_bytes) < num_bytes) {
        return IMBREX_STATUS_OK;
    }
    return add_variable(variables, name, json_stringn_nocheck(bytes, num_bytes), err);
}

/* The tokens that templates write themselves: as tokenizer_config.json has them, or else the one
 * that the tokenizer puts in front of a text, and the one that ends a generation. */
static enum imbrex_status add_special_tokens(const struct imbrex_model *model, json_t *variables,
                                             struct imbrex_error *err)
{
    const json_t *tokens = model->chat_source.special_tokens;
    if (tokens != NULL) {
        if (json_object_update(variables, (json_t *)tokens) != 0) {
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "no memory for special tokens");
        }
        return IMBREX_STATUS_OK;
    }
    struct imbrex_model_info description;
    imbrex_model_describe(model, &description);
    int32_t bos_id = tokenizer_bos_id(model->tokenizer);
    if (bos_id >= 0) {
        TRY(add_token(variables, "bos_token", model->tokenizer, bos_id, err));
    }
    if (description.num_eos_token_ids > 0) {
        TRY(add_token(variables, "eos_token", model->tokenizer, description.eos_token_ids[0], err));
    }
    return IMBREX_STATUS_OK;
}

/* The variables that Hugging Face gives a template. */
static enum imbrex_status make_variables(const struct imbrex_model *model,
                                         const char *messages_json,
                                         const struct imbrex_chat_options *options,
                                         json_t **variables, struct imbrex_error *err)
{
    enum imbrex_status status;
    json_t *value = NULL;
    json_t *made = json_object();
    if (made == NULL) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "no memory for a conversation");
    }
    TRY_OR_FAIL(add_special_tokens(model, made, err));
    TRY_OR_FAIL(parse_messages(messages_json, &value, err));
    TRY_OR_FAIL(add_variable(made, "messages", value, err));
    value = json_null();
    if (options->tools_json != NULL) {
        TRY_OR_FAIL(json_parse_array(TOOLS_NAME, options->tools_json, strlen(options->tools_json),
                                     &value, err));
    }
    TRY_OR_FAIL(add_variable(made, "tools", value, err));
    TRY_OR_FAIL(add_variable(made, "documents", json_null(), err));
    TRY_OR_FAIL(add_variable(made, "add_generation_prompt",
                             json_boolean(options->add_generation_prompt), err));
    *variables = made;
    return IMBREX_STATUS_OK;
fail:
    json_decref(made);
    return status;
}

/* ---- text and ids --------------------------------------------------------------------------- */

static enum imbrex_status render(const struct imbrex_model *model, const char *messages_json,
                                 const struct imbrex_chat_options *options,
                                 struct jinja_output *output, struct imbrex_error *err)
{
    struct chosen_template chosen = {0};
    struct jinja_template *template = NULL;
    json_t *variables = NULL;
    struct jinja_options limits = jinja_options_default();
    enum imbrex_status status;

    limits.now = options->now;
    TRY_OR_FAIL(choose_template(model, options, &chosen, err));
    TRY_OR_FAIL(
        jinja_template_parse(chosen.name, chosen.source, strlen(chosen.source), &template, err));
    TRY_OR_FAIL(make_variables(model, messages_json, options, &variables, err));
    TRY_OR_FAIL(jinja_template_render(template, variables, &limits, output, err));
fail:
    json_decref(variables);
    jinja_template_destroy(template);
    return status;
}

/* The ids of a render. */
static enum imbrex_status encode(const struct imbrex_tokenizer *tokenizer,
                                 const struct jinja_output *output, int32_t **token_ids,
                                 size_t *num_tokens, struct imbrex_error *err)
{
    struct text_span *inputs = NULL;
    size_t num_inputs = 0, inputs_bytes;
    if (!size_mul(output->num_spans, sizeof(*inputs), &inputs_bytes)) {
        return error_out_of_memory(err, "a conversation", SIZE_MAX);
    }
    if (inputs_bytes > 0) {
        inputs = malloc(inputs_bytes);
        if (inputs == NULL) {
            return error_out_of_memory(err, "a conversation", inputs_bytes);
        }
    }
    for (size_t i = 0; i < output->num_spans; i++) {
        if (output->spans[i].is_input) {
            inputs[num_inputs++] = (struct text_span){output->spans[i].begin, output->spans[i].end};
        }
    }
    enum imbrex_status status = tokenizer_encode_guarded(
        tokenizer, output->text, output->num_bytes, inputs, num_inputs, token_ids, num_tokens, err);
    free(inputs);
    return status;
}

static enum imbrex_status check_tokenizer(const struct imbrex_model *model,
                                          struct imbrex_error *err)
{
    if (model->tokenizer == NULL) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "%s: expected a model with a tokenizer, found none", model->path);
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_chat_tokenize(const struct imbrex_model *model, const char *messages_json,
                                        const struct imbrex_chat_options *options,
                                        int32_t **token_ids, size_t *num_tokens, char **text,
                                        size_t *text_bytes, struct imbrex_error *err)
{
    const struct imbrex_chat_options defaults = imbrex_chat_options_default();
    struct jinja_output output = {0};
    enum imbrex_status status;

    TRY(check_tokenizer(model, err));
    TRY(render(model, messages_json, options != NULL ? options : &defaults, &output, err));
    TRY_OR_FAIL(encode(model->tokenizer, &output, token_ids, num_tokens, err));
    if (text != NULL) {
        *text = output.text;
        output.text = NULL;
        if (text_bytes != NULL) {
            *text_bytes = output.num_bytes;
        }
    }
fail:
    jinja_output_release(&output);
    return status;
}

/* ---- the end of a turn ---------------------------------------------------------------------- */

/* A reply that no template contains. */
#define PROBE_REPLY "imbrex-probe-of-a-reply"
#define PROBE_MESSAGES                        \
    "[{\"role\":\"user\",\"content\":\"x\"}," \
    "{\"role\":\"assistant\",\"content\":\"" PROBE_REPLY "\"}]"

/* The last place of `word` in text[num_bytes], which ends in a NUL; NULL if there is none. */
static const char *find_last(const char *text, const char *word)
{
    const char *last = NULL;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at++) {
        last = at;
    }
    return last;
}

/* The special token that text begins with, spaces aside, or -1. */
static enum imbrex_status read_end_token(const struct imbrex_tokenizer *tokenizer, const char *text,
                                         int32_t *token_id, struct imbrex_error *err)
{
    int32_t *ids;
    size_t num_ids;
    text += strspn(text, " \n");
    TRY(tokenizer_encode_guarded(tokenizer, text, strlen(text), NULL, 0, &ids, &num_ids, err));
    *token_id = num_ids > 0 && imbrex_token_is_special(tokenizer, ids[0]) ? ids[0] : -1;
    imbrex_free(ids);
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_chat_end_token(const struct imbrex_model *model,
                                         const struct imbrex_chat_options *options,
                                         int32_t *token_id, struct imbrex_error *err)
{
    struct imbrex_chat_options probe = options != NULL ? *options : imbrex_chat_options_default();
    struct jinja_output output = {0};
    struct imbrex_error refusal;
    enum imbrex_status status;

    probe.tools_json = NULL;
    probe.add_generation_prompt = false;
    TRY(check_tokenizer(model, err));
    status = render(model, PROBE_MESSAGES, &probe, &output, &refusal);
    if (status == IMBREX_STATUS_INVALID_ARGUMENT) {
        /* The template refuses this conversation; others may please it. */
        *token_id = -1;
        return IMBREX_STATUS_OK;
    }
    if (status != IMBREX_STATUS_OK) {
        return error_set(err, status, "%s", refusal.message);
    }
    const char *reply = find_last(output.text, PROBE_REPLY);
    if (reply == NULL) {
        *token_id = -1;
    } else {
        TRY_OR_FAIL(read_end_token(model->tokenizer, reply + strlen(PROBE_REPLY), token_id, err));
    }
fail:
    jinja_output_release(&output);
    return status;
}
