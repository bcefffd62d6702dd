/* SPDX-License-Identifier: Apache-2.0 */
/* Messages are kept as the JSON that the library takes. */
#include "cli/conversation.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/command.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/replace_file.h"

/* A template goes through a parser that keeps a tree of it; real ones have some KiB. */
#define MAX_TEMPLATE_BYTES ((size_t)1 << 20)

/* ---- the template --------------------------------------------------------------------------- */

static bool is_builtin_template(const char *name)
{
    return strcmp(name, "chatml") == 0 || strcmp(name, "llama3") == 0;
}

/* Seconds since 1970 as the local clock shows them. */
static int64_t local_time(void)
{
    time_t now = time(NULL);
    struct tm local;

    if (localtime_r(&now, &local) == NULL) {
        return now;
    }
    return (int64_t)now + local.tm_gmtoff;
}

static int read_template(struct conversation *conversation, const char *path)
{
    size_t num_bytes;
    int exit_code =
        input_read_text(path, MAX_TEMPLATE_BYTES, &conversation->template_text, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (!output_is_utf8(conversation->template_text, num_bytes)) {
        output_error("%s: expected a Jinja template in UTF-8, found other bytes",
                     input_display_name(path));
        return EXIT_CODE_INPUT;
    }
    conversation->options.chat_template = conversation->template_text;
    conversation->options.chat_template_name = input_display_name(path);
    return EXIT_CODE_OK;
}

int conversation_open(struct conversation *conversation, const struct imbrex_model *model,
                      const char *template_choice)
{
    struct imbrex_error err = {0};

    conversation->model = model;
    conversation->options = imbrex_chat_options_default();
    conversation->options.now = local_time();
    conversation->messages = json_array();
    if (conversation->messages == NULL) {
        return output_out_of_memory();
    }
    if (template_choice != NULL && is_builtin_template(template_choice)) {
        conversation->options.chat_template = template_choice;
    } else if (template_choice != NULL) {
        int exit_code = read_template(conversation, template_choice);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
    }
    enum imbrex_status status =
        imbrex_chat_end_token(model, &conversation->options, &conversation->end_token_id, &err);
    if (status == IMBREX_STATUS_NOT_FOUND) {
        output_error("%s; --chat-template gives one: chatml, llama3 or a Jinja file", err.message);
        return EXIT_CODE_INPUT;
    }
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

void conversation_close(struct conversation *conversation)
{
    json_decref(conversation->messages);
    free(conversation->template_text);
    *conversation = (struct conversation){0};
}

/* ---- messages ------------------------------------------------------------------------------- */

/* NULL if the text is refused or memory is out: reported, with the exit code in *exit_code. */
static json_t *make_message(const char *role, const char *text, size_t num_bytes, int *exit_code)
{
    if (!output_is_utf8(text, num_bytes) || memchr(text, 0, num_bytes) != NULL) {
        output_error("%s message: expected a text in UTF-8 without NUL bytes, found other bytes",
                     role);
        *exit_code = EXIT_CODE_INPUT;
        return NULL;
    }
    json_t *message = json_pack("{s:s, s:s%}", "role", role, "content", text, num_bytes);
    if (message == NULL) {
        *exit_code = output_out_of_memory();
    }
    return message;
}

int conversation_add(struct conversation *conversation, const char *role, const char *text,
                     size_t num_bytes)
{
    int exit_code = EXIT_CODE_OK;
    json_t *message = make_message(role, text, num_bytes, &exit_code);

    if (message != NULL && json_array_append_new(conversation->messages, message) != 0) {
        exit_code = output_out_of_memory();
    }
    return exit_code;
}

void conversation_drop_last(struct conversation *conversation)
{
    size_t count = json_array_size(conversation->messages);

    if (count > 0) {
        json_array_remove(conversation->messages, count - 1);
    }
}

static bool has_system(const struct conversation *conversation)
{
    const json_t *first = json_array_get(conversation->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));

    return role != NULL && strcmp(role, "system") == 0;
}

int conversation_set_system(struct conversation *conversation, const char *text)
{
    int exit_code = EXIT_CODE_OK;
    json_t *message = NULL;

    if (text != NULL) {
        message = make_message("system", text, strlen(text), &exit_code);
        if (message == NULL) {
            return exit_code;
        }
    }
    if (has_system(conversation)) {
        json_array_remove(conversation->messages, 0);
    }
    if (message != NULL && json_array_insert_new(conversation->messages, 0, message) != 0) {
        return output_out_of_memory();
    }
    return EXIT_CODE_OK;
}

void conversation_clear(struct conversation *conversation)
{
    size_t num_kept = has_system(conversation) ? 1 : 0;

    while (json_array_size(conversation->messages) > num_kept) {
        conversation_drop_last(conversation);
    }
}

/* ---- files ---------------------------------------------------------------------------------- */

int conversation_save(const struct conversation *conversation, const char *path)
{
    char *text = json_dumps(conversation->messages, JSON_INDENT(2));

    if (text == NULL) {
        return output_out_of_memory();
    }
    bool is_saved = replace_file(path, text, strlen(text));
    if (!is_saved) {
        output_error("%s: cannot write: %s", path, output_system_error(errno));
    }
    free(text);
    return is_saved ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

int conversation_load(struct conversation *conversation, const char *path)
{
    char *bytes;
    size_t num_bytes;
    json_error_t json_error;
    int exit_code = input_read_file(path, &bytes, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    json_t *messages = json_loadb(bytes, num_bytes, JSON_REJECT_DUPLICATES, &json_error);
    free(bytes);
    if (messages == NULL && json_error_code(&json_error) == json_error_out_of_memory) {
        return output_out_of_memory();
    }
    if (messages == NULL) {
        output_error("%s: line %d, column %d: expected a JSON array of messages, found %s",
                     input_display_name(path), json_error.line, json_error.column,
                     json_error_code(&json_error) == json_error_duplicate_key
                         ? "the same key twice in an object"
                         : "what is not JSON");
        return EXIT_CODE_INPUT;
    }
    bool has_messages = json_is_array(messages) && json_array_size(messages) > 0;
    for (size_t i = 0; has_messages && i < json_array_size(messages); i++) {
        has_messages = json_is_string(json_object_get(json_array_get(messages, i), "role"));
    }
    if (!has_messages) {
        output_error("%s: expected a JSON array of messages with a \"role\", found something else",
                     input_display_name(path));
        json_decref(messages);
        return EXIT_CODE_INPUT;
    }
    json_decref(conversation->messages);
    conversation->messages = messages;
    return EXIT_CODE_OK;
}

/* ---- the prompt ----------------------------------------------------------------------------- */

void conversation_end_replies(const struct conversation *conversation,
                              struct imbrex_request_options *options)
{
    if (conversation->end_token_id < 0) {
        output_warning("the chat template ends a reply with no special token of this model: "
                       "replies may go on without an end");
        return;
    }
    options->end_token_ids = &conversation->end_token_id;
    options->num_end_token_ids = 1;
}

int conversation_tokenize(const struct conversation *conversation, int32_t **token_ids,
                          size_t *num_tokens)
{
    struct imbrex_error err = {0};
    char *messages_json = json_dumps(conversation->messages, JSON_COMPACT);

    if (messages_json == NULL) {
        return output_out_of_memory();
    }
    enum imbrex_status status =
        imbrex_chat_tokenize(conversation->model, messages_json, &conversation->options, token_ids,
                             num_tokens, NULL, NULL, &err);
    free(messages_json);
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}
