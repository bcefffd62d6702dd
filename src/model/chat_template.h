/* SPDX-License-Identifier: Apache-2.0 */
/* Conversations to text and ids. Where a template comes from, first found:
 *
 *   options             "chatml", "llama3" (ours, for models without one), or a Jinja text
 *   chat_template.jinja, and additional_chat_templates/tool_use.jinja for conversations with tools
 *   tokenizer_config.json   chat_template: a text, or a list of {name, template} with "default" and
 *                           "tool_use"
 *   tokenizer.chat_template and tokenizer.chat_template.tool_use of a GGUF file
 *
 * imbrex.h has the public functions. */
#ifndef IMBREX_MODEL_CHAT_TEMPLATE_H
#define IMBREX_MODEL_CHAT_TEMPLATE_H

#include <jansson.h>

#include "imbrex.h"

struct imbrex_model;

/* What a model folder says about conversations beside its template. */
struct chat_source {
    char *
        template_name; /* the file (and field) that the template was read from; NULL: model->path */
    char *tool_template; /* used in place of the template when tools are given; NULL: none */
    char *tool_template_name;
    /* bos_token, eos_token and so on, as far as they are set; NULL: there is nothing that says so,
     * and the tokenizer tells the two. */
    json_t *special_tokens;
};

/* Reads the files of the folder model->path into model->chat_template and model->chat_source, both
 * empty. Templates are not parsed: a model with one that imbrex cannot run is of use without. */
enum imbrex_status chat_source_read(struct imbrex_model *model, struct imbrex_error *err);
/* The same for the metadata of a GGUF file, model->checkpoint.gguf. Needs model->tokenizer. */
enum imbrex_status chat_source_read_gguf(struct imbrex_model *model, struct imbrex_error *err);
/* Frees both. */
void chat_source_release(struct imbrex_model *model);

#endif
