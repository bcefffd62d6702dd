/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of a tokenizer.json: vocabulary, added tokens, merges. Strings are looked up in
 * jansson's hash table of the vocabulary while the file is read; afterwards only ids are needed,
 * and the bytes that each id stands for. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

/* Ids index tables, so they may not be much more than the tokens that the file has room for. */
#define MAX_TOKENS ((int32_t)1 << 24)
#define MAX_IDS_PER_TOKEN 4
#define MAX_SPARE_IDS 65536

/* Longer added tokens would make the search for them slow, and are no tokens anybody needs. */
#define MAX_ADDED_TOKEN_BYTES 4096

#define BYTE_TOKEN_BYTES 6 /* "<0x0A>" */

/* The vocabulary while it is read: views into the JSON tree. */
struct vocab_reader {
    const struct tokenizer_reader *file;
    const json_t *vocab, *merges, *added;
    const char **texts; /* [vocab_size] each id's token, or NULL */
    bool *is_verbatim;  /* [vocab_size] an added token that the vocabulary does not have */
};

/* ---- the alphabet of bytes ------------------------------------------------------------------ */

/* GPT-2's alphabet writes each byte as one visible character: the printable ones of Latin-1 as they
 * are, the others from U+0100 on, in their order. */
static bool byte_is_printable(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
}

struct byte_alphabet {
    uint32_t char_of_byte[256];
    int16_t byte_of_char[512]; /* -1: not in the alphabet */
};

static void byte_alphabet_init(struct byte_alphabet *alphabet)
{
    for (size_t i = 0; i < 512; i++) {
        alphabet->byte_of_char[i] = -1;
    }
    uint32_t next_char = 0x100;
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t code_point = byte_is_printable(byte) ? byte : next_char++;
        alphabet->char_of_byte[byte] = code_point;
        alphabet->byte_of_char[code_point] = (int16_t)byte;
    }
}

/* ---- what a token stands for ---------------------------------------------------------------- */

/* Each of these writes the bytes of a token to `bytes`, at most as many as the text has, and
 * returns their number. */

static size_t decode_byte_level(const struct byte_alphabet *alphabet, const char *text,
                                size_t text_bytes, char *bytes)
{
    size_t num_bytes = 0;
    for (size_t at = 0; at < text_bytes;) {
        struct utf8_step step = utf8_next(text + at, text_bytes - at);
        int byte = step.code_point < 512 ? alphabet->byte_of_char[step.code_point] : -1;
        if (byte < 0) {
            /* Not spelled in the alphabet: the decoder takes the whole token as it is. */
            memcpy(bytes, text, text_bytes);
            return text_bytes;
        }
        bytes[num_bytes++] = (char)byte;
        at += step.num_bytes;
    }
    return num_bytes;
}

static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

static size_t decode_char_level(const char *text, size_t text_bytes, char *bytes)
{
    if (text_bytes == BYTE_TOKEN_BYTES && memcmp(text, "<0x", 3) == 0 && text[5] == '>' &&
        hex_digit(text[3]) >= 0 && hex_digit(text[4]) >= 0) {
        bytes[0] = (char)(hex_digit(text[3]) << 4 | hex_digit(text[4]));
        return 1;
    }
    size_t num_bytes = 0;
    for (size_t at = 0; at < text_bytes;) {
        if (text_bytes - at >= SPACE_MARK_BYTES &&
            memcmp(text + at, SPACE_MARK, SPACE_MARK_BYTES) == 0) {
            bytes[num_bytes++] = ' ';
            at += SPACE_MARK_BYTES;
        } else {
            bytes[num_bytes++] = text[at++];
        }
    }
    return num_bytes;
}

static enum imbrex_status build_token_bytes(const struct vocab_reader *reader,
                                            const struct byte_alphabet *alphabet)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    size_t max_bytes = 1;
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        max_bytes += reader->texts[id] == NULL ? 0 : strlen(reader->texts[id]);
    }
    tokenizer->token_bytes = malloc(max_bytes);
    if (tokenizer->token_bytes == NULL) {
        return error_out_of_memory(reader->file->err, "bytes of the tokens", max_bytes);
    }
    size_t num_bytes = 0;
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        tokenizer->token_offsets[id] = (uint32_t)num_bytes;
        const char *text = reader->texts[id];
        if (text == NULL) {
            continue;
        }
        size_t text_bytes = strlen(text), token_bytes = text_bytes;
        char *bytes = tokenizer->token_bytes + num_bytes;
        if (!tokenizer->is_byte_level) {
            token_bytes = decode_char_level(text, text_bytes, bytes);
        } else if (reader->is_verbatim[id]) {
            memcpy(bytes, text, text_bytes);
        } else {
            token_bytes = decode_byte_level(alphabet, text, text_bytes, bytes);
        }
        if (token_bytes > tokenizer->max_token_bytes) {
            tokenizer->max_token_bytes = token_bytes;
        }
        num_bytes += token_bytes;
    }
    tokenizer->token_offsets[tokenizer->vocab_size] = (uint32_t)num_bytes;
    return IMBREX_STATUS_OK;
}

/* ---- ids ------------------------------------------------------------------------------------ */

/* The id of a token of the vocabulary, or -1. */
static int32_t vocab_id(const struct vocab_reader *reader, const char *text)
{
    const json_t *id = json_object_get(reader->vocab, text);
    return id == NULL ? -1 : (int32_t)json_integer_value(id);
}

static bool is_id(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 0 &&
           json_integer_value(value) < MAX_TOKENS;
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
                             file->path, text, MAX_TOKENS,
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

static enum imbrex_status allocate_ids(struct vocab_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    size_t num_ids = (size_t)tokenizer->vocab_size;
    tokenizer->token_flags = calloc(num_ids, sizeof(*tokenizer->token_flags));
    tokenizer->token_offsets = calloc(num_ids + 1, sizeof(*tokenizer->token_offsets));
    reader->texts = calloc(num_ids, sizeof(*reader->texts));
    reader->is_verbatim = calloc(num_ids, sizeof(*reader->is_verbatim));
    if (tokenizer->token_flags == NULL || tokenizer->token_offsets == NULL ||
        reader->texts == NULL || reader->is_verbatim == NULL) {
        return error_out_of_memory(reader->file->err, "tables of the token ids",
                                   num_ids * sizeof(*reader->texts));
    }
    return IMBREX_STATUS_OK;
}

/* Gives the id to the token; FORMAT if another one has it. */
static enum imbrex_status claim_id(struct vocab_reader *reader, int32_t id, const char *text)
{
    if (reader->texts[id] != NULL && strcmp(reader->texts[id], text) != 0) {
        return error_set(reader->file->err, IMBREX_STATUS_FORMAT,
                         "%s: id %" PRId32 ": expected one token, found \"%.60s\" and \"%.60s\"",
                         reader->file->path, id, reader->texts[id], text);
    }
    reader->texts[id] = text;
    reader->file->tokenizer->token_flags[id] |= TOKEN_FLAG_ASSIGNED;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_vocab_ids(struct vocab_reader *reader)
{
    const char *text;
    json_t *id;
    json_object_foreach((json_t *)reader->vocab, text, id)
    {
        TRY(claim_id(reader, (int32_t)json_integer_value(id), text));
    }
    return IMBREX_STATUS_OK;
}

/* ---- added tokens --------------------------------------------------------------------------- */

/* One entry of added_tokens as it is read. */
struct added_entry {
    const char *content;
    int32_t id;
    bool is_special, is_normalized;
};

static enum imbrex_status read_added_entry(struct vocab_reader *reader, size_t entry_idx,
                                           struct added_entry *entry)
{
    const struct tokenizer_reader *file = reader->file;
    const json_t *object = json_array_get(reader->added, entry_idx);
    char scope[64 + IMBREX_ERROR_MESSAGE_BYTES], field[64];
    snprintf(field, sizeof(field), "added_tokens[%zu]", entry_idx);
    snprintf(scope, sizeof(scope), "%s: %s", file->path, field);
    *entry = (struct added_entry){0};
    TRY(json_get_string(scope, object, "content", &entry->content, file->err));
    entry->id = (int32_t)json_integer_value(json_object_get(object, "id"));

    size_t num_bytes = strlen(entry->content);
    if (num_bytes == 0 || num_bytes > MAX_ADDED_TOKEN_BYTES) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s: content: expected 1 to %d bytes, found %zu", scope,
                         MAX_ADDED_TOKEN_BYTES, num_bytes);
    }
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        bool is_set = false;
        TRY(json_get_optional_bool(scope, object, refused[i], &is_set, file->err));
        if (is_set) {
            return error_set(file->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s (\"%.60s\"): %s: expected false, found true", scope,
                             entry->content, refused[i]);
        }
    }
    TRY(json_get_optional_bool(scope, object, "special", &entry->is_special, file->err));
    TRY(json_get_optional_bool(scope, object, "normalized", &entry->is_normalized, file->err));
    if (entry->is_normalized && !file->tokenizer->is_byte_level) {
        /* Its content would get a U+2581 in front, and match nowhere else. */
        return error_set(file->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s (\"%.60s\"): normalized: expected false with Prepend and Replace, "
                         "found true",
                         scope, entry->content);
    }
    int32_t id_in_vocab = vocab_id(reader, entry->content);
    if (id_in_vocab >= 0 && id_in_vocab != entry->id) {
        return error_set(file->err, IMBREX_STATUS_FORMAT,
                         "%s (\"%.60s\"): id: expected %" PRId32
                         " as in model.vocab, found %" PRId32,
                         scope, entry->content, id_in_vocab, entry->id);
    }
    TRY(claim_id(reader, entry->id, entry->content));
    reader->is_verbatim[entry->id] = id_in_vocab < 0;
    if (entry->is_special) {
        file->tokenizer->token_flags[entry->id] |= TOKEN_FLAG_SPECIAL;
    }
    return IMBREX_STATUS_OK;
}

/* Appends the content as it will stand in the text: normalised if the entry is. */
static enum imbrex_status append_content(const struct vocab_reader *reader,
                                         const struct added_entry *entry,
                                         struct byte_buffer *contents)
{
    struct imbrex_error *err = reader->file->err;
    size_t num_bytes = strlen(entry->content);
    if (entry->is_normalized && reader->file->tokenizer->has_nfc) {
        TRY(nfc_append(entry->content, num_bytes, contents, err));
    } else {
        TRY(byte_buffer_append(contents, entry->content, num_bytes, err));
    }
    return byte_buffer_append(contents, "", 1, err);
}

/* Builds the tokens of one of the two kinds. Their contents are `contents` from `begin` on, in the
 * order of the entries. */
static enum imbrex_status build_added(const struct vocab_reader *reader,
                                      const struct added_entry *entries, size_t num_entries,
                                      bool is_normalized, const char *contents,
                                      struct added_tokens *added)
{
    struct imbrex_error *err = reader->file->err;
    struct added_token *tokens = malloc((num_entries + 1) * sizeof(*tokens));
    if (tokens == NULL) {
        return error_out_of_memory(err, "added tokens", (num_entries + 1) * sizeof(*tokens));
    }
    int32_t num_tokens = 0;
    for (size_t i = 0; i < num_entries; i++) {
        size_t num_bytes = strlen(contents);
        if (entries[i].is_normalized == is_normalized) {
            tokens[num_tokens++] = (struct added_token){
                .content = contents,
                .num_bytes = num_bytes,
                .id = entries[i].id,
                .is_special = entries[i].is_special,
            };
        }
        contents += num_bytes + 1;
    }
    return added_tokens_build(reader->file->path, tokens, num_tokens, added, err);
}

static enum imbrex_status read_added_tokens(struct vocab_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    struct imbrex_error *err = reader->file->err;
    size_t num_entries = json_array_size(reader->added);
    if (num_entries == 0) {
        return IMBREX_STATUS_OK;
    }
    struct byte_buffer contents = {0};
    enum imbrex_status status;
    struct added_entry *entries = malloc(num_entries * sizeof(*entries));
    if (entries == NULL) {
        return error_out_of_memory(err, "added tokens", num_entries * sizeof(*entries));
    }
    for (size_t i = 0; i < num_entries; i++) {
        TRY_OR_FAIL(read_added_entry(reader, i, &entries[i]));
        TRY_OR_FAIL(append_content(reader, &entries[i], &contents));
    }
    TRY_OR_FAIL(
        build_added(reader, entries, num_entries, false, contents.bytes, &tokenizer->raw_added));
    TRY_OR_FAIL(build_added(reader, entries, num_entries, true, contents.bytes,
                            &tokenizer->normalized_added));
    tokenizer->added_contents = contents.bytes;
    free(entries);
    return IMBREX_STATUS_OK;
fail:
    free(contents.bytes);
    free(entries);
    return status;
}

/* ---- first symbols -------------------------------------------------------------------------- */

static enum imbrex_status read_byte_ids(const struct vocab_reader *reader,
                                        const struct byte_alphabet *alphabet)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[BYTE_TOKEN_BYTES + 1];
        if (tokenizer->is_byte_level) {
            text[utf8_write(alphabet->char_of_byte[byte], text)] = '\0';
        } else {
            snprintf(text, sizeof(text), "<0x%02X>", byte);
        }
        tokenizer->byte_ids[byte] = vocab_id(reader, text);
        if (tokenizer->byte_ids[byte] < 0) {
            return error_set(reader->file->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: model.vocab: expected a token for every byte, found none for "
                             "0x%02x (\"%s\"): text with it would be lost",
                             reader->file->path, byte, text);
        }
    }
    return IMBREX_STATUS_OK;
}

static int char_compare(const void *a, const void *b)
{
    uint32_t left = ((const struct char_token *)a)->code_point;
    uint32_t right = ((const struct char_token *)b)->code_point;
    return (left > right) - (left < right);
}

/* Tokens of one character, but for those that only were added. */
static enum imbrex_status read_chars(const struct vocab_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    size_t max_chars = json_object_size(reader->vocab) + 1;
    tokenizer->chars = malloc(max_chars * sizeof(*tokenizer->chars));
    if (tokenizer->chars == NULL) {
        return error_out_of_memory(reader->file->err, "tokens of one character",
                                   max_chars * sizeof(*tokenizer->chars));
    }
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        const char *text = reader->texts[id];
        size_t text_bytes = text == NULL || reader->is_verbatim[id] ? 0 : strlen(text);
        if (text_bytes == 0) {
            continue;
        }
        struct utf8_step step = utf8_next(text, text_bytes);
        if (step.num_bytes == text_bytes) {
            tokenizer->chars[tokenizer->num_chars++] =
                (struct char_token){.code_point = step.code_point, .id = id};
        }
    }
    qsort(tokenizer->chars, (size_t)tokenizer->num_chars, sizeof(*tokenizer->chars), char_compare);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_unk_id(const struct vocab_reader *reader)
{
    const json_t *unk = json_object_get(json_object_get(reader->file->root, "model"), "unk_token");
    int32_t id = json_is_string(unk) ? vocab_id(reader, json_string_value(unk)) : -1;
    if (id < 0) {
        return tokenizer_reader_refuse(reader->file, IMBREX_STATUS_UNSUPPORTED, "model.unk_token",
                                       "a token of the vocabulary (without byte_fallback)", unk);
    }
    reader->file->tokenizer->unk_id = id;
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
    int32_t left_id = vocab_id(reader, left), right_id = vocab_id(reader, right);
    const char *missing = left_id < 0 ? left : right_id < 0 ? right : NULL;
    int32_t merged_id = -1;
    if (missing == NULL) {
        memmove(right - 1, right, strlen(right) + 1);
        merged_id = vocab_id(reader, left);
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

/* True if the token has U+2581 behind another character. */
static bool has_inner_mark(const char *text)
{
    while (strncmp(text, SPACE_MARK, SPACE_MARK_BYTES) == 0) {
        text += SPACE_MARK_BYTES;
    }
    return strstr(text, SPACE_MARK) != NULL;
}

/* Whether a text may be cut before a U+2581 that follows something else: no merge makes a token
 * with one inside, and U+2581 is a symbol itself, no part of a run of unknown characters. */
static bool can_split_at_mark(const struct vocab_reader *reader, const struct merge *merges,
                              size_t num_merges)
{
    if (vocab_id(reader, SPACE_MARK) < 0) {
        return false;
    }
    for (size_t i = 0; i < num_merges; i++) {
        if (has_inner_mark(reader->texts[merges[i].merged])) {
            return false;
        }
    }
    return true;
}

static enum imbrex_status read_merges(const struct vocab_reader *reader)
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
    file->tokenizer->splits_at_mark =
        !file->tokenizer->is_byte_level && can_split_at_mark(reader, merges, num_merges);
    TRY_OR_FAIL(
        merge_table_build(file->path, merges, num_merges, &file->tokenizer->merges, file->err));
fail:
    free(pair.bytes);
    free(merges);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static enum imbrex_status read_tokens(struct vocab_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->file->tokenizer;
    struct byte_alphabet alphabet;
    byte_alphabet_init(&alphabet);
    TRY(count_ids(reader, &tokenizer->vocab_size));
    TRY(allocate_ids(reader));
    TRY(read_vocab_ids(reader));
    TRY(read_added_tokens(reader));
    TRY(build_token_bytes(reader, &alphabet));
    if (tokenizer->is_byte_level || tokenizer->has_byte_fallback) {
        TRY(read_byte_ids(reader, &alphabet));
    } else {
        TRY(read_unk_id(reader));
    }
    if (!tokenizer->is_byte_level) {
        TRY(read_chars(reader));
    }
    return read_merges(reader);
}

enum imbrex_status tokenizer_read_vocab(const struct tokenizer_reader *reader)
{
    const json_t *model = json_object_get(reader->root, "model");
    struct vocab_reader vocab = {
        .file = reader,
        .vocab = json_object_get(model, "vocab"),
        .merges = json_object_get(model, "merges"),
        .added = json_object_get(reader->root, "added_tokens"),
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
    free(vocab.texts);
    free(vocab.is_verbatim);
    return status;
}
