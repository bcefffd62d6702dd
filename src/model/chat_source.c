/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of a model say about conversations: templates and special tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"
#include "jinja/jinja.h"
#include "model/chat_template.h"
#include "model/gguf.h"
#include "model/model.h"

#define CONFIG_NAME "tokenizer_config.json"
/* The largest published ones list a few hundred thousand added tokens. */
#define MAX_CONFIG_BYTES ((size_t)64 << 20)

/* "prefix: field", or a copy of the prefix if field is NULL. */
static enum imbrex_status make_text(const char *prefix, const char *field, char **text,
                                    struct imbrex_error *err)
{
    size_t num_bytes = strlen(prefix) + (field != NULL ? 2 + strlen(field) : 0) + 1;
    char *made = malloc(num_bytes);
    if (made == NULL) {
        return error_out_of_memory(err, "a chat template", num_bytes);
    }
    snprintf(made, num_bytes, "%s%s%s", prefix, field != NULL ? ": " : "",
             field != NULL ? field : "");
    *text = made;
    return IMBREX_STATUS_OK;
}

/* ---- Jinja files ---------------------------------------------------------------------------- */

/* A template as text: *source and *name stay NULL if the folder has no such file. */
static enum imbrex_status read_jinja_file(const char *folder, const char *file_name, char **source,
                                          char **name, struct imbrex_error *err)
{
    char *path = NULL, *text = NULL;
    struct file file = {0};
    enum imbrex_status status;

    TRY_OR_FAIL(file_join(folder, file_name, &path, err));
    if (!file_exists(path)) {
        goto fail;
    }
    TRY_OR_FAIL(file_read(path, JINJA_MAX_SOURCE_BYTES, &file, err));
    const char *bytes = (const char *)file.bytes;
    if (memchr(bytes, 0, file.num_bytes) != NULL ||
        utf8_valid_prefix(bytes, file.num_bytes) < file.num_bytes) {
        status = error_set(err, IMBREX_STATUS_FORMAT,
                           "%s: expected a text in UTF-8, found other bytes", path);
        goto fail;
    }
    text = malloc(file.num_bytes + 1);
    if (text == NULL) {
        status = error_out_of_memory(err, "a chat template", file.num_bytes + 1);
        goto fail;
    }
    memcpy(text, bytes, file.num_bytes);
    text[file.num_bytes] = '\0';
    *source = text;
    *name = path;
    path = NULL;
fail:
    file_close(&file);
    free(path);
    return status;
}

/* ---- tokenizer_config.json ------------------------------------------------------------------ */

static enum imbrex_status take_template(const char *path, const char *field, const json_t *text,
                                        char **source, char **name, struct imbrex_error *err)
{
    char *taken = NULL;
    if (!json_is_string(text)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected a string, found %s", path,
                         field, json_kind(text));
    }
    TRY(make_text(json_string_value(text), NULL, &taken, err));
    enum imbrex_status status = make_text(path, field, name, err);
    if (status != IMBREX_STATUS_OK) {
        free(taken);
        return status;
    }
    *source = taken;
    return IMBREX_STATUS_OK;
}

/* The two of a list of named templates that are used by themselves. */
static enum imbrex_status take_named_templates(const char *path, const json_t *list,
                                               struct imbrex_model *model, struct imbrex_error *err)
{
    struct chat_source *source = &model->chat_source;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const json_t *name = json_object_get(entry, "name");
        char field[64];
        snprintf(field, sizeof(field), "chat_template[%zu].template", i);
        if (!json_is_string(name)) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: chat_template[%zu].name: expected a string, found %s", path, i,
                             json_is_object(entry) ? json_kind(name) : "no object around it");
        }
        bool is_default = strcmp(json_string_value(name), "default") == 0;
        bool is_for_tools = strcmp(json_string_value(name), "tool_use") == 0;
        if ((is_default && model->chat_template != NULL) ||
            (is_for_tools && source->tool_template != NULL)) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: chat_template[%zu].name: expected each name once, found \"%s\" "
                             "again",
                             path, i, json_string_value(name));
        }
        if (is_default) {
            TRY(take_template(path, field, json_object_get(entry, "template"),
                              &model->chat_template, &source->template_name, err));
        } else if (is_for_tools) {
            TRY(take_template(path, field, json_object_get(entry, "template"),
                              &source->tool_template, &source->tool_template_name, err));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status take_templates(const char *path, const json_t *root,
                                         struct imbrex_model *model, struct imbrex_error *err)
{
    const json_t *value = json_object_get(root, "chat_template");
    if (value == NULL || json_is_null(value)) {
        return IMBREX_STATUS_OK;
    }
    if (json_is_array(value)) {
        return take_named_templates(path, value, model, err);
    }
    if (!json_is_string(value)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: chat_template: expected a string or a list of named templates, found "
                         "%s",
                         path, json_kind(value));
    }
    return take_template(path, "chat_template", value, &model->chat_template,
                         &model->chat_source.template_name, err);
}

/* Each is a text, or an object whose content is one. */
static enum imbrex_status take_special_tokens(const char *path, const json_t *root,
                                              struct chat_source *source, struct imbrex_error *err)
{
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    source->special_tokens = json_object();
    if (source->special_tokens == NULL) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: no memory for special tokens",
                         path);
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        json_t *token = json_object_get(root, names[i]);
        if (token == NULL || json_is_null(token)) {
            continue;
        }
        json_t *content = json_is_object(token) ? json_object_get(token, "content") : token;
        if (!json_is_string(content)) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: %s: expected a string or an object with a content, found %s%s",
                             path, names[i], json_is_object(token) ? "as its content " : "",
                             json_kind(content));
        }
        if (json_object_set(source->special_tokens, names[i], content) != 0) {
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: no memory for special tokens",
                             path);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_tokenizer_config(struct imbrex_model *model,
                                                struct imbrex_error *err)
{
    bool has_template = model->chat_template != NULL;
    char *path = NULL;
    json_t *root = NULL;
    enum imbrex_status status;

    TRY_OR_FAIL(file_join(model->path, CONFIG_NAME, &path, err));
    if (!file_exists(path)) {
        goto fail;
    }
    TRY_OR_FAIL(json_read_object(path, MAX_CONFIG_BYTES, &root, err));
    TRY_OR_FAIL(take_special_tokens(path, root, &model->chat_source, err));
    if (!has_template) {
        TRY_OR_FAIL(take_templates(path, root, model, err));
    }
fail:
    json_decref(root);
    free(path);
    return status;
}

/* ---- the folder ----------------------------------------------------------------------------- */

enum imbrex_status chat_source_read(struct imbrex_model *model, struct imbrex_error *err)
{
    struct chat_source *source = &model->chat_source;
    enum imbrex_status status;

    TRY_OR_FAIL(read_jinja_file(model->path, "chat_template.jinja", &model->chat_template,
                                &source->template_name, err));
    if (model->chat_template != NULL) {
        TRY_OR_FAIL(read_jinja_file(model->path, "additional_chat_templates/tool_use.jinja",
                                    &source->tool_template, &source->tool_template_name, err));
    }
    TRY_OR_FAIL(read_tokenizer_config(model, err));
    return IMBREX_STATUS_OK;
fail:
    chat_source_release(model);
    return status;
}

/* ---- GGUF files ----------------------------------------------------------------------------- */

/* A template as text: *source and *name stay NULL if the file has no such key. */
static enum imbrex_status read_gguf_template(const struct imbrex_model *model, const char *key,
                                             char **source, char **name, struct imbrex_error *err)
{
    const struct gguf *gguf = &model->checkpoint.gguf;
    struct gguf_string text;
    if (gguf_find(gguf, key) == NULL) {
        return IMBREX_STATUS_OK;
    }
    TRY(gguf_get_string(gguf, key, &text, err));
    if (memchr(text.bytes, 0, text.num_bytes) != NULL ||
        utf8_valid_prefix(text.bytes, text.num_bytes) < text.num_bytes) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected a text in UTF-8, found other bytes", model->path, key);
    }
    char *copy = malloc(text.num_bytes + 1);
    if (copy == NULL) {
        return error_out_of_memory(err, "a chat template", text.num_bytes + 1);
    }
    memcpy(copy, text.bytes, text.num_bytes);
    copy[text.num_bytes] = '\0';
    enum imbrex_status status = make_text(model->path, key, name, err);
    if (status != IMBREX_STATUS_OK) {
        free(copy);
        return status;
    }
    *source = copy;
    return IMBREX_STATUS_OK;
}

/* The tokens that the file names by their ids; tokens that are no text are left out. */
static enum imbrex_status read_gguf_tokens(struct imbrex_model *model, struct imbrex_error *err)
{
    static const char *const keys[][2] = {
        {"tokenizer.ggml.bos_token_id", "bos_token"},
        {"tokenizer.ggml.eos_token_id", "eos_token"},
        {"tokenizer.ggml.unknown_token_id", "unk_token"},
        {"tokenizer.ggml.seperator_token_id", "sep_token"}, /* spelled so in the format */
        {"tokenizer.ggml.padding_token_id", "pad_token"},
        {"tokenizer.ggml.cls_token_id", "cls_token"},
        {"tokenizer.ggml.mask_token_id", "mask_token"},
    };
    const struct gguf *gguf = &model->checkpoint.gguf;
    json_t *tokens = json_object();
    if (tokens == NULL) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: no memory for special tokens",
                         model->path);
    }
    model->chat_source.special_tokens = tokens;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        int32_t token_id;
        size_t num_bytes;
        if (gguf_find(gguf, keys[i][0]) == NULL) {
            continue;
        }
        TRY(gguf_get_int32(gguf, keys[i][0], 0, INT32_MAX, &token_id, err));
        const char *bytes = imbrex_token_bytes(model->tokenizer, token_id, &num_bytes);
        if (bytes == NULL || memchr(bytes, 0, num_bytes) != NULL ||
            utf8_valid_prefix(bytes, num_bytes) < num_bytes) {
            continue;
        }
        if (json_object_set_new(tokens, keys[i][1], json_stringn_nocheck(bytes, num_bytes)) != 0) {
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: no memory for special tokens",
                             model->path);
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status chat_source_read_gguf(struct imbrex_model *model, struct imbrex_error *err)
{
    struct chat_source *source = &model->chat_source;
    enum imbrex_status status;

    TRY_OR_FAIL(read_gguf_template(model, "tokenizer.chat_template", &model->chat_template,
                                   &source->template_name, err));
    TRY_OR_FAIL(read_gguf_template(model, "tokenizer.chat_template.tool_use",
                                   &source->tool_template, &source->tool_template_name, err));
    if (model->tokenizer != NULL) {
        TRY_OR_FAIL(read_gguf_tokens(model, err));
    }
    return IMBREX_STATUS_OK;
fail:
    chat_source_release(model);
    return status;
}

void chat_source_release(struct imbrex_model *model)
{
    free(model->chat_template);
    free(model->chat_source.template_name);
    free(model->chat_source.tool_template);
    free(model->chat_source.tool_template_name);
    json_decref(model->chat_source.special_tokens);
    model->chat_template = NULL;
    model->chat_source = (struct chat_source){0};
}
