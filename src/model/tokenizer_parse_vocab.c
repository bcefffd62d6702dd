/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of a tokenizer.json: model.vocab, model.merges, added_tokens. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "model/tokenizer_internal.h"

/* Ids index tables, so they may not be much more than the tokens that the file has room for. */
#define MAX_IDS_PER_TOKEN 4
#define MAX_SPARE_IDS 65536

/* The parts of the JSON tree. */
struct vocab_reader {
    const struct tokenizer_reader *file;
    const json_t *vocab, *merges, *added;
    struct vocab_builder builder;
};

static struct token_text view(const char *text)
{
    return (struct token_text){.bytes = text, .num_bytes = strlen(text)};
}

/* ---- ids ------------------------------------------------------------------------------------ */

static bool is_id(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 0 &&
           json_integer_value(value) < VOCAB_MAX_TOKENS;
}

/* Checks the range of all ids and reads how many there are. */
static enum imbrex_status count_ids(const struct vocab_reader *reader, int32_t *vocab_size)
{
    const struct tokenizer_reader *file = reader->file;
    int32_t max_id = -1;
    const char *text;
    json_t *id;
    json_object_foreach((json_t *)reader->vocab, text, id)
    {
        if (!is_id(id)) {
            return error_set(file->err, IMBREX_STATUS_FORMAT,
                             "%s: model.vocab: \"%.60s\": expected an id in [0, %" PRId32
                             "), found %s",
                             file->path, text, VOCAB_MAX_TOKENS,
                             json_is_integer(id) ? "another number" : json_kind(id));
        }
        max_id = json_integer_value(id) > max_id ? (int32_t)json_integer_value(id) : max_id;
    }
    for (size_t i = 0; i < json_array_size(reader->added); i++) {
        char field[64];
        snprintf(field, sizeof(field), "added_tokens[%zu].id", i);
        id = json_object_get(json_array_get(reader->added, i), "id");
        if (!is_id(id)) {
            return tokenizer_reader_refuse(file, IMBREX_STATUS_FORMAT, field,
                                           "an id in [0, 16777216)", id);
        }
        max_id = json_integer_value(id) > max_id ? (int32_t)json_integer_value(id) : max_id;
    }
    size_t num_tokens = json_object_size(reader->vocab) + json_array_size(reader->added);
    size_t max_ids = num_tokens * MAX_IDS_PER_TOKEN + MAX_SPARE_IDS;
    if ((size_t)(max_id + 1) > max_ids) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s: model.vocab: expected ids below %zu for %zu tokens, found %" PRId32
                         " (tables over the ids would be mostly empty)",
                         file->path, max_ids, num_tokens, max_id);
    }
    if (max_id < 0) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s: model.vocab: expected tokens, found none", file->path);
    }
    *vocab_size = max_id + 1;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_vocab_ids(struct vocab_reader *reader)
{
    const char *text;
    json_t *id;
    json_object_foreach((json_t *)reader->vocab, text, id)
    {
        int32_t token_id = (int32_t)json_integer_value(id);
        TRY(vocab_builder_claim(&reader->builder, token_id, view(text), VOCAB_ROLE_MODEL));
        vocab_builder_add_slot(&reader->builder, view(text), token_id);
    }
    return vocab_builder_index(&reader->builder);
}

static int32_t find_text(const struct vocab_reader *reader, const char *text)
{
    return vocab_builder_find(&reader->builder, text, strlen(text));
}

/* ---- added tokens --------------------------------------------------------------------------- */

static enum imbrex_status read_added_entry(struct vocab_reader *reader, size_t entry_idx,
                                           struct added_entry *entry)
{
    const struct tokenizer_reader *file = reader->file;
    const json_t *object = json_array_get(reader->added, entry_idx);
    char field[64], scope[sizeof(field) + IMBREX_ERROR_MESSAGE_BYTES];
    snprintf(field, sizeof(field), "added_tokens[%zu]", entry_idx);
    snprintf(scope, sizeof(scope), "%s: %s", file->path, field);
    *entry = (struct added_entry){0};
    const char *content;
    TRY(json_get_string(scope, object, "content", &content, file->err));
    entry->content = view(content);
    entry->id = (int32_t)json_integer_value(json_object_get(object, "id"));
    if (entry->content.num_bytes == 0 || entry->content.num_bytes > ADDED_TOKEN_MAX_BYTES) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s: content: expected 1 to %d bytes, found %zu", scope,
                         ADDED_TOKEN_MAX_BYTES, entry->content.num_bytes);
    }
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {
        {"single_word", &entry->is_single_word}, {"lstrip", &entry->strips_left},
        {"rstrip", &entry->strips_right},        {"special", &entry->is_special},
        {"normalized", &entry->is_normalized},
    };
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        TRY(json_get_optional_bool(scope, object, flags[i].name, flags[i].flag, file->err));
    }
    int32_t id_in_vocab = find_text(reader, content);
    if (id_in_vocab >= 0 && id_in_vocab != entry->id) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s (\"%.60s\"): id: expected %" PRId32
                         " as in model.vocab, found %" PRId32,
                         scope, content, id_in_vocab, entry->id);
    }
    /* A byte-level decoder would take letters of what is not spelled in its alphabet for it. */
    bool is_verbatim = id_in_vocab < 0 && reader->builder.decoder->is_byte_level;
    return vocab_builder_claim(&reader->builder, entry->id, entry->content,
                               is_verbatim ? VOCAB_ROLE_VERBATIM : 0);
}

static enum imbrex_status read_added_tokens(struct vocab_reader *reader)
{
    size_t num_entries = json_array_size(reader->added);
    if (num_entries == 0) {
        return IMBREX_STATUS_OK;
    }
    enum imbrex_status status;
    struct added_entry *entries = malloc(num_entries * sizeof(*entries));
    if (entries == NULL) {
        return error_out_of_memory(reader->file->err, "added tokens",
                                   num_entries * sizeof(*entries));
    }
    for (size_t i = 0; i < num_entries; i++) {
        TRY_OR_FAIL(read_added_entry(reader, i, &entries[i]));
    }
    TRY_OR_FAIL(vocab_builder_add_tokens(&reader->builder, entries, num_entries));
fail:
    free(entries);
    return status;
}

static enum imbrex_status read_unk_id(struct vocab_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    if (tokenizer->is_byte_level || tokenizer->has_byte_fallback) {
        return IMBREX_STATUS_OK;
    }
    const json_t *unk = json_object_get(json_object_get(reader->file->root, "model"), "unk_token");
    int32_t id = json_is_string(unk) ? find_text(reader, json_string_value(unk)) : -1;
    if (id < 0) {
        return tokenizer_reader_refuse(reader->file, IMBREX_STATUS_UNSUPPORTED, "model.unk_token",
                                       "a token of the vocabulary (without byte_fallback)", unk);
    }
    tokenizer->unk_id = id;
    return IMBREX_STATUS_OK;
}

/* ---- merges --------------------------------------------------------------------------------- */

/* Writes "left", NUL, "right", NUL into the buffer. Sets *is_pair to false if the entry is neither
 * ["left", "right"] nor "left right". */
static enum imbrex_status split_merge(const struct vocab_reader *reader, const json_t *entry,
                                      struct byte_buffer *pair, bool *is_pair)
{
    struct imbrex_error *err = reader->file->err;
    const json_t *left = json_array_get(entry, 0), *right = json_array_get(entry, 1);
    pair->num_bytes = 0;
    *is_pair = false;
    if (json_array_size(entry) == 2 && json_is_string(left) && json_is_string(right)) {
        TRY(byte_buffer_append(pair, json_string_value(left), json_string_length(left) + 1, err));
        TRY(byte_buffer_append(pair, json_string_value(right), json_string_length(right) + 1, err));
        *is_pair = true;
    } else if (json_is_string(entry)) {
        TRY(byte_buffer_append(pair, json_string_value(entry), json_string_length(entry) + 1, err));
        char *space = memchr(pair->bytes, ' ', pair->num_bytes);
        if (space != NULL && strchr(space + 1, ' ') == NULL) {
            *space = '\0';
            *is_pair = true;
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_merge(const struct vocab_reader *reader, size_t merge_idx,
                                     struct byte_buffer *pair, struct merge *merge)
{
    const struct tokenizer_reader *file = reader->file;
    const json_t *entry = json_array_get(reader->merges, merge_idx);
    bool is_pair;
    TRY(split_merge(reader, entry, pair, &is_pair));
    if (!is_pair) {
        char field[64];
        snprintf(field, sizeof(field), "model.merges[%zu]", merge_idx);
        return tokenizer_reader_refuse(file, IMBREX_STATUS_FORMAT, field,
                                       "\"left right\" or [\"left\", \"right\"]", entry);
    }
    char *left = pair->bytes, *right = pair->bytes + strlen(pair->bytes) + 1;
    int32_t left_id = find_text(reader, left), right_id = find_text(reader, right);
    const char *missing = left_id < 0 ? left : right_id < 0 ? right : NULL;
    int32_t merged_id = -1;
    if (missing == NULL) {
        memmove(right - 1, right, strlen(right) + 1);
        merged_id = find_text(reader, left);
        missing = merged_id < 0 ? left : NULL;
    }
    if (missing != NULL) {
        return error_set(
            file->err, IMBREX_STATUS_FORMAT,
            "%s: model.merges[%zu]: expected tokens of the vocabulary, found \"%.60s\"", file->path,
            merge_idx, missing);
    }
    *merge = (struct merge){
        .left = (uint32_t)left_id,
        .right = (uint32_t)right_id,
        .rank = (uint32_t)merge_idx,
        .merged = (uint32_t)merged_id,
    };
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_merges(struct vocab_reader *reader)
{
    const struct tokenizer_reader *file = reader->file;
    size_t num_merges = json_array_size(reader->merges);
    struct byte_buffer pair = {0};
    enum imbrex_status status;
    struct merge *merges = malloc((num_merges + 1) * sizeof(*merges));
    if (merges == NULL) {
        return error_out_of_memory(file->err, "merges of the tokenizer",
                                   (num_merges + 1) * sizeof(*merges));
    }
    for (size_t i = 0; i < num_merges; i++) {
        TRY_OR_FAIL(read_merge(reader, i, &pair, &merges[i]));
    }
    TRY_OR_FAIL(vocab_builder_finish(&reader->builder, merges, num_merges));
fail:
    free(pair.bytes);
    free(merges);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static enum imbrex_status read_tokens(struct vocab_reader *reader)
{
    int32_t vocab_size = 0;
    TRY(count_ids(reader, &vocab_size));
    TRY(vocab_builder_begin(&reader->builder, vocab_size, json_object_size(reader->vocab)));
    TRY(read_vocab_ids(reader));
    TRY(read_added_tokens(reader));
    TRY(read_unk_id(reader));
    return read_merges(reader);
}

enum imbrex_status tokenizer_read_vocab(const struct tokenizer_reader *reader,
                                        const struct decoder_steps *decoder)
{
    const json_t *model = json_object_get(reader->root, "model");
    struct vocab_reader vocab = {
        .file = reader,
        .vocab = json_object_get(model, "vocab"),
        .merges = json_object_get(model, "merges"),
        .added = json_object_get(reader->root, "added_tokens"),
        .builder = {.path = reader->path,
                    .tokenizer = reader->tokenizer,
                    .err = reader->err,
                    .decoder = decoder},
    };
    if (!json_is_object(vocab.vocab)) {
        return tokenizer_reader_refuse(reader, IMBREX_STATUS_FORMAT, "model.vocab", "an object",
                                       vocab.vocab);
    }
    if (!json_is_array(vocab.merges)) {
        return tokenizer_reader_refuse(reader, IMBREX_STATUS_FORMAT, "model.merges", "an array",
                                       vocab.merges);
    }
    if (vocab.added != NULL && !json_is_array(vocab.added)) {
        return tokenizer_reader_refuse(reader, IMBREX_STATUS_FORMAT, "added_tokens", "an array",
                                       vocab.added);
    }
    enum imbrex_status status = read_tokens(&vocab);
    vocab_builder_release(&vocab.builder);
    return status;
}
