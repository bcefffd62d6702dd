/* SPDX-License-Identifier: Apache-2.0 */
/* Text to ids: the steps of tokenizer_internal.h in their order. What is working memory lives in
 * one struct encoder a call, so that the tokenizer itself stays untouched. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

struct encoder {
    const struct imbrex_tokenizer *tokenizer;
    bool parse_special;
    struct id_buffer ids;
    struct byte_buffer normalized; /* the piece of text at work */
    struct bpe_scratch scratch;
    struct imbrex_error *err;
};

/* ---- buffers -------------------------------------------------------------------------------- */

/* At least num_used + num_more, and by half more than before, so that appending stays linear. */
static bool grown_capacity(size_t num_used, size_t num_more, size_t max_before, size_t *grown)
{
    size_t needed, generous;
    if (!size_add(num_used, num_more, &needed)) {
        return false;
    }
    if (!size_add(max_before, max_before / 2 + 64, &generous)) {
        generous = needed;
    }
    *grown = needed > generous ? needed : generous;
    return true;
}

enum imbrex_status byte_buffer_reserve(struct byte_buffer *buffer, size_t num_more,
                                       struct imbrex_error *err)
{
    size_t grown;
    if (num_more <= buffer->max_bytes - buffer->num_bytes) {
        return IMBREX_STATUS_OK;
    }
    if (!grown_capacity(buffer->num_bytes, num_more, buffer->max_bytes, &grown)) {
        return error_out_of_memory(err, "text", SIZE_MAX);
    }
    char *bytes = realloc(buffer->bytes, grown);
    if (bytes == NULL) {
        return error_out_of_memory(err, "text", grown);
    }
    buffer->bytes = bytes;
    buffer->max_bytes = grown;
    return IMBREX_STATUS_OK;
}

enum imbrex_status id_buffer_reserve(struct id_buffer *buffer, size_t num_more,
                                     struct imbrex_error *err)
{
    size_t grown, grown_bytes;
    if (num_more <= buffer->max_ids - buffer->num_ids) {
        return IMBREX_STATUS_OK;
    }
    if (!grown_capacity(buffer->num_ids, num_more, buffer->max_ids, &grown) ||
        !size_mul(grown, sizeof(*buffer->ids), &grown_bytes)) {
        return error_out_of_memory(err, "token ids", SIZE_MAX);
    }
    int32_t *ids = realloc(buffer->ids, grown_bytes);
    if (ids == NULL) {
        return error_out_of_memory(err, "token ids", grown_bytes);
    }
    buffer->ids = ids;
    buffer->max_ids = grown;
    return IMBREX_STATUS_OK;
}

enum imbrex_status byte_buffer_append(struct byte_buffer *buffer, const char *bytes,
                                      size_t num_bytes, struct imbrex_error *err)
{
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(byte_buffer_reserve(buffer, num_bytes, err));
    memcpy(buffer->bytes + buffer->num_bytes, bytes, num_bytes);
    buffer->num_bytes += num_bytes;
    return IMBREX_STATUS_OK;
}

enum imbrex_status id_buffer_append(struct id_buffer *buffer, int32_t id, struct imbrex_error *err)
{
    TRY(id_buffer_reserve(buffer, 1, err));
    buffer->ids[buffer->num_ids++] = id;
    return IMBREX_STATUS_OK;
}

/* ---- words ---------------------------------------------------------------------------------- */

/* Merges what was appended since the buffer had word_begin ids. */
static enum imbrex_status merge_word(struct encoder *encoder, size_t word_begin)
{
    size_t num_ids = encoder->ids.num_ids - word_begin;
    if (num_ids > 1) {
        TRY(bpe_merge(&encoder->tokenizer->merges, encoder->ids.ids + word_begin, &num_ids,
                      &encoder->scratch, encoder->err));
    }
    encoder->ids.num_ids = word_begin + num_ids;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status encode_byte_words(struct encoder *encoder, const char *text,
                                            size_t num_bytes)
{
    const int32_t *byte_ids = encoder->tokenizer->byte_ids;
    for (size_t at = 0; at < num_bytes;) {
        size_t word_bytes = qwen2_split_next(text + at, num_bytes - at);
        TRY(id_buffer_reserve(&encoder->ids, word_bytes, encoder->err));
        size_t word_begin = encoder->ids.num_ids;
        int32_t *symbols = encoder->ids.ids + word_begin;
        for (size_t i = 0; i < word_bytes; i++) {
            symbols[i] = byte_ids[(unsigned char)text[at + i]];
        }
        encoder->ids.num_ids += word_bytes;
        TRY(merge_word(encoder, word_begin));
        at += word_bytes;
    }
    return IMBREX_STATUS_OK;
}

/* The id of a character's token, or -1. */
static int32_t char_id(const struct imbrex_tokenizer *tokenizer, uint32_t code_point)
{
    int32_t low = 0, high = tokenizer->num_chars;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (tokenizer->chars[middle].code_point < code_point) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < tokenizer->num_chars && tokenizer->chars[low].code_point == code_point
               ? tokenizer->chars[low].id
               : -1;
}

/* Hugging Face merges the whole text as one word; so does this, in pieces where it is the same. */
static enum imbrex_status encode_chars(struct encoder *encoder, const char *text, size_t num_bytes)
{
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    struct id_buffer *ids = &encoder->ids;
    size_t word_begin = ids->num_ids;
    uint32_t previous = SPACE_MARK_CODE_POINT;
    bool follows_unknown = false;
    for (size_t at = 0; at < num_bytes;) {
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        if (step.code_point == SPACE_MARK_CODE_POINT && previous != SPACE_MARK_CODE_POINT &&
            tokenizer->splits_at_mark) {
            TRY(merge_word(encoder, word_begin));
            word_begin = ids->num_ids;
        }
        int32_t id = char_id(tokenizer, step.code_point);
        bool is_unknown = id < 0 && !tokenizer->has_byte_fallback;
        if (id >= 0) {
            TRY(id_buffer_append(ids, id, encoder->err));
        } else if (!is_unknown) {
            for (size_t i = 0; i < step.num_bytes; i++) {
                unsigned char byte = (unsigned char)text[at + i];
                TRY(id_buffer_append(ids, tokenizer->byte_ids[byte], encoder->err));
            }
        } else if (!follows_unknown || !tokenizer->fuse_unk) {
            TRY(id_buffer_append(ids, tokenizer->unk_id, encoder->err));
        }
        follows_unknown = is_unknown;
        previous = step.code_point;
        at += step.num_bytes;
    }
    return merge_word(encoder, word_begin);
}

static enum imbrex_status encode_words(struct encoder *encoder, const char *text, size_t num_bytes)
{
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    return encoder->tokenizer->is_byte_level ? encode_byte_words(encoder, text, num_bytes)
                                             : encode_chars(encoder, text, num_bytes);
}

/* ---- normalisation -------------------------------------------------------------------------- */

/* Text with U+2581 in front and for each space, as far as the tokenizer wants it. */
static enum imbrex_status mark_spaces(const struct imbrex_tokenizer *tokenizer, const char *text,
                                      size_t num_bytes, struct byte_buffer *result,
                                      struct imbrex_error *err)
{
    if (tokenizer->has_prepend) {
        TRY(byte_buffer_append(result, SPACE_MARK, SPACE_MARK_BYTES, err));
    }
    for (size_t at = 0; at < num_bytes;) {
        const char *space = tokenizer->has_replace ? memchr(text + at, ' ', num_bytes - at) : NULL;
        size_t end = space == NULL ? num_bytes : (size_t)(space - text);
        TRY(byte_buffer_append(result, text + at, end - at, err));
        if (space != NULL) {
            TRY(byte_buffer_append(result, SPACE_MARK, SPACE_MARK_BYTES, err));
            end++;
        }
        at = end;
    }
    return IMBREX_STATUS_OK;
}

/* Sets *normalized to the text itself, or to encoder->normalized. num_bytes >= 1. */
static enum imbrex_status normalize(struct encoder *encoder, const char *text, size_t num_bytes,
                                    const char **normalized, size_t *normalized_bytes)
{
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    struct byte_buffer *buffer = &encoder->normalized;
    bool has_marks = tokenizer->has_prepend || tokenizer->has_replace;
    *normalized = text;
    *normalized_bytes = num_bytes;
    if (!has_marks && (!tokenizer->has_nfc || nfc_is_inert(text, num_bytes))) {
        return IMBREX_STATUS_OK;
    }
    buffer->num_bytes = 0;
    if (has_marks) {
        TRY(mark_spaces(tokenizer, text, num_bytes, buffer, encoder->err));
    } else {
        TRY(nfc_append(text, num_bytes, buffer, encoder->err));
    }
    *normalized = buffer->bytes;
    *normalized_bytes = buffer->num_bytes;
    return IMBREX_STATUS_OK;
}

/* ---- added tokens --------------------------------------------------------------------------- */

/* Encodes a text between the added tokens in it. */
typedef enum imbrex_status encode_between_fn(struct encoder *encoder, const char *text,
                                             size_t num_bytes);

static enum imbrex_status encode_around(struct encoder *encoder, const struct added_tokens *added,
                                        const char *text, size_t num_bytes,
                                        encode_between_fn *encode_between)
{
    size_t at = 0, position;
    for (;;) {
        const struct added_token *token =
            added_tokens_find(added, text, num_bytes, at, encoder->parse_special, &position);
        if (token == NULL) {
            return encode_between(encoder, text + at, num_bytes - at);
        }
        TRY(encode_between(encoder, text + at, position - at));
        TRY(id_buffer_append(&encoder->ids, token->id, encoder->err));
        at = position + token->num_bytes;
    }
}

static enum imbrex_status encode_raw(struct encoder *encoder, const char *text, size_t num_bytes)
{
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    const char *normalized;
    size_t normalized_bytes;
    TRY(normalize(encoder, text, num_bytes, &normalized, &normalized_bytes));
    return encode_around(encoder, &encoder->tokenizer->normalized_added, normalized,
                         normalized_bytes, encode_words);
}

/* ---- the whole ------------------------------------------------------------------------------ */

/* A copy of the text in which U+FFFD stands for what is not UTF-8. */
static enum imbrex_status repair_utf8(const char *text, size_t num_bytes,
                                      struct byte_buffer *repaired, struct imbrex_error *err)
{
    for (size_t at = 0; at < num_bytes;) {
        size_t valid_bytes = utf8_valid_prefix(text + at, num_bytes - at);
        TRY(byte_buffer_append(repaired, text + at, valid_bytes, err));
        at += valid_bytes;
        if (at < num_bytes) {
            char replacement[UTF8_MAX_BYTES];
            TRY(byte_buffer_append(repaired, replacement, utf8_write(UTF8_REPLACEMENT, replacement),
                                   err));
            at += utf8_next(text + at, num_bytes - at).num_bytes;
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status append_template(struct encoder *encoder, size_t begin, size_t num_ids)
{
    for (size_t i = 0; i < num_ids; i++) {
        TRY(id_buffer_append(&encoder->ids, encoder->tokenizer->template_ids[begin + i],
                             encoder->err));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_tokenize(const struct imbrex_tokenizer *tokenizer, const char *text,
                                   size_t text_bytes, unsigned flags, int32_t **token_ids,
                                   size_t *num_tokens, struct imbrex_error *err)
{
    const unsigned known = IMBREX_TOKENIZE_ADD_SPECIAL | IMBREX_TOKENIZE_PARSE_SPECIAL;
    if ((flags & ~known) != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "flags: expected bits of 0x%x, found 0x%x", known, flags);
    }
    if (text == NULL && text_bytes > 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "text: expected %zu bytes, found NULL", text_bytes);
    }
    struct encoder encoder = {
        .tokenizer = tokenizer,
        .parse_special = (flags & IMBREX_TOKENIZE_PARSE_SPECIAL) != 0,
        .err = err,
    };
    bool add_special = (flags & IMBREX_TOKENIZE_ADD_SPECIAL) != 0;
    struct byte_buffer repaired = {0};
    enum imbrex_status status;
    /* One id at least, so that the result is not NULL. */
    TRY_OR_FAIL(id_buffer_reserve(&encoder.ids, 1, err));
    if (add_special) {
        TRY_OR_FAIL(append_template(&encoder, 0, tokenizer->num_before));
    }
    if (text_bytes > 0) {
        if (utf8_valid_prefix(text, text_bytes) < text_bytes) {
            TRY_OR_FAIL(repair_utf8(text, text_bytes, &repaired, err));
            text = repaired.bytes;
            text_bytes = repaired.num_bytes;
        }
        TRY_OR_FAIL(encode_around(&encoder, &tokenizer->raw_added, text, text_bytes, encode_raw));
    }
    if (add_special) {
        TRY_OR_FAIL(append_template(&encoder, tokenizer->num_before, tokenizer->num_after));
    }
    *token_ids = encoder.ids.ids;
    *num_tokens = encoder.ids.num_ids;
    encoder.ids.ids = NULL;
fail:
    free(encoder.ids.ids);
    free(encoder.normalized.bytes);
    bpe_scratch_release(&encoder.scratch);
    free(repaired.bytes);
    return status;
}
