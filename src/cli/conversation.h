/* SPDX-License-Identifier: Apache-2.0 */
/* A conversation: its messages, and the template that makes a prompt of them. Failures are
 * reported; the functions return an exit code. */
#ifndef IMBREX_CLI_CONVERSATION_H
#define IMBREX_CLI_CONVERSATION_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/options.h"
#include "imbrex.h"

struct conversation {
    const struct imbrex_model *model;
    struct imbrex_chat_options options;
    char *template_text;  /* of a template file */
    int32_t end_token_id; /* ends a reply; -1: the model's end tokens alone do */
    json_t *messages;
};

/* A line of an option table. `target` is the const char * that template_choice is taken from. */
/* clang-format off */
#define CONVERSATION_OPTION_TEMPLATE(settings, option_group, target)                   \
    {.long_name = "chat-template",                                                     \
     .argument = "NAME",                                                               \
     .type = OPTION_TYPE_STRING,                                                       \
     .group = option_group,                                                            \
     .help = "use the template chatml or llama3, or the one in the Jinja file of this " \
             "name, instead of the model's",                                           \
     .offset = offsetof(settings, target)}
/* clang-format on */

/* Without messages. template_choice is a name, a file, or NULL for the model's own template.
 * Refuses a model without one. To be closed also after a failure. */
int conversation_open(struct conversation *conversation, const struct imbrex_model *model,
                      const char *template_choice);
void conversation_close(struct conversation *conversation);

/* Appends a message. Refuses text that is not UTF-8, or has NUL bytes in it. */
int conversation_add(struct conversation *conversation, const char *role, const char *text,
                     size_t num_bytes);
void conversation_drop_last(struct conversation *conversation);
/* Makes `text` the first message, a system message, in place of the one there may be; NULL:
 * none. */
int conversation_set_system(struct conversation *conversation, const char *text);
/* Drops all but the system message. */
void conversation_clear(struct conversation *conversation);

/* Files with the messages as a JSON array. Loading replaces all messages, or none if it fails. */
int conversation_save(const struct conversation *conversation, const char *path);
int conversation_load(struct conversation *conversation, const char *path);

/* Lets requests end where the template ends a reply; warns if it has no special token there. The
 * conversation must outlive the options. */
void conversation_end_replies(const struct conversation *conversation,
                              struct imbrex_request_options *options);
/* The prompt for the next reply; *token_ids is freed with imbrex_free(). */
int conversation_tokenize(const struct conversation *conversation, int32_t **token_ids,
                          size_t *num_tokens);

#endif
