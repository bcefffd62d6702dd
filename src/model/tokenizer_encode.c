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
    const char *text;            /* the whole */
    struct special_rule special; /* for the whole; inputs before the piece at work are dropped */
    size_t num_special;          /* special tokens found */
    struct id_buffer ids;
    struct byte_buffer normalized[2];    /* the piece of text at work */
    struct text_span *normalized_inputs; /* [special.num_inputs] where the inputs lie in it */
    struct pre_scratch pre;
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

static enum imbrex_status encode_bytes(struct encoder *encoder, const char *text, size_t num_bytes)
{
    const int32_t *byte_ids = encoder->tokenizer->byte_ids;
    TRY(id_buffer_reserve(&encoder->ids, num_bytes, encoder->err));
    size_t word_begin = encoder->ids.num_ids;
    int32_t *symbols = encoder->ids.ids + word_begin;
    for (size_t i = 0; i < num_bytes; i++) {
        symbols[i] = byte_ids[(unsigned char)text[i]];
    }
    encoder->ids.num_ids += num_bytes;
    return merge_word(encoder, word_begin);
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

/* Hugging Face merges all of the text as one word; so does this, in pieces where it is the same. */
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

/* One word, as the pre-tokenizer cut it. */
static enum imbrex_status encode_word(void *context, const char *text, size_t num_bytes,
                                      bool is_at_start)
{
    (void)is_at_start;
    struct encoder *encoder = context;
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    if (tokenizer->ignores_merges) {
        int32_t id = text_table_find(&tokenizer->words, text, num_bytes);
        if (id >= 0) {
            return id_buffer_append(&encoder->ids, id, encoder->err);
        }
    }
    return tokenizer->is_byte_level ? encode_bytes(encoder, text, num_bytes)
                                    : encode_chars(encoder, text, num_bytes);
}

/* ---- added tokens --------------------------------------------------------------------------- */

/* Encodes a text between the added tokens in it. */
typedef enum imbrex_status encode_between_fn(struct encoder *encoder, const char *text,
                                             size_t num_bytes, bool is_at_start);

static enum imbrex_status encode_around(struct encoder *encoder, const struct added_tokens *added,
                                        struct special_rule special, const char *text,
                                        size_t num_bytes, bool is_at_start,
                                        encode_between_fn *encode_between)
{
    struct added_match match = {0};
    for (;;) {
        size_t begin = match.end;
        bool is_found = added_tokens_next(added, text, num_bytes, &special, &match, &match);
        size_t end = is_found ? match.begin : num_bytes;
        if (begin < end) {
            TRY(encode_between(encoder, text + begin, end - begin, is_at_start && begin == 0));
        }
        if (!is_found) {
            return IMBREX_STATUS_OK;
        }
        TRY(id_buffer_append(&encoder->ids, match.token->id, encoder->err));
        encoder->num_special += match.token->is_special;
    }
}

static enum imbrex_status encode_normalized(struct encoder *encoder, const char *text,
                                            size_t num_bytes, bool is_at_start)
{
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    return pre_tokenize(tokenizer->pre_steps, tokenizer->num_pre_steps, text, num_bytes,
                        is_at_start, &encoder->pre, encode_word, encoder, encoder->err);
}

/* Makes *special, the rule for a piece as it was, one for the piece after normalisation. */
static enum imbrex_status guard_normalized(struct encoder *encoder, const char *text,
                                           size_t num_bytes, struct special_rule *special)
{
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    struct text_span *inputs = encoder->normalized_inputs;
    size_t num_inputs = 0, origin = special->origin;
    for (; num_inputs < special->num_inputs; num_inputs++) {
        const struct text_span *input = &special->inputs[num_inputs];
        if (input->begin >= origin + num_bytes) {
            break;
        }
        inputs[num_inputs].begin = input->begin > origin ? input->begin - origin : 0;
        inputs[num_inputs].end = input->end - origin < num_bytes ? input->end - origin : num_bytes;
    }
    TRY(normalizer_map_inputs(tokenizer->normalizer, tokenizer->num_normalizer_steps, text,
                              num_bytes, inputs, num_inputs, encoder->err));
    *special = (struct special_rule){
        .parse_special = special->parse_special, .inputs = inputs, .num_inputs = num_inputs};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status encode_raw(struct encoder *encoder, const char *text, size_t num_bytes,
                                     bool is_at_start)
{
    const struct imbrex_tokenizer *tokenizer = encoder->tokenizer;
    special_rule_pass(&encoder->special, (size_t)(text - encoder->text));
    struct special_rule special = encoder->special;
    special.origin = (size_t)(text - encoder->text);
    const char *normalized;
    size_t normalized_bytes;
    TRY(normalizer_run(tokenizer->normalizer, tokenizer->num_normalizer_steps, text, num_bytes,
                       encoder->normalized, &normalized, &normalized_bytes, encoder->err));
    if (special.num_inputs > 0 && tokenizer->normalized_added.num_tokens > 0 &&
        (normalized != text || normalized_bytes != num_bytes)) {
        TRY(guard_normalized(encoder, text, num_bytes, &special));
    }
    return encode_around(encoder, &tokenizer->normalized_added, special, normalized,
                         normalized_bytes, is_at_start, encode_normalized);
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

static void encoder_release(struct encoder *encoder)
{
    free(encoder->ids.ids);
    free(encoder->normalized[0].bytes);
    free(encoder->normalized[1].bytes);
    free(encoder->normalized_inputs);
    pre_scratch_release(&encoder->pre);
    bpe_scratch_release(&encoder->scratch);
}

/* Ids that are special tokens, but for the one that stands for unknown characters. */
static size_t count_special(const struct imbrex_tokenizer *tokenizer, const struct id_buffer *ids)
{
    bool has_unk = !tokenizer->is_byte_level && !tokenizer->has_byte_fallback;
    size_t num_special = 0;
    for (size_t i = 0; i < ids->num_ids; i++) {
        num_special += imbrex_token_is_special(tokenizer, ids->ids[i]) &&
                       !(has_unk && ids->ids[i] == tokenizer->unk_id);
    }
    return num_special;
}

enum imbrex_status tokenizer_encode_guarded(const struct imbrex_tokenizer *tokenizer,
                                            const char *text, size_t text_bytes,
                                            const struct text_span *inputs, size_t num_inputs,
                                            int32_t **token_ids, size_t *num_tokens,
                                            struct imbrex_error *err)
{
    struct encoder encoder = {
        .tokenizer = tokenizer,
        .text = text,
        .special = {.parse_special = true, .inputs = inputs, .num_inputs = num_inputs},
        .err = err,
    };
    enum imbrex_status status;
    size_t inputs_bytes;
    if (!size_mul(num_inputs, sizeof(*inputs), &inputs_bytes)) {
        return error_out_of_memory(err, "parts of the text", SIZE_MAX);
    }
    if (inputs_bytes > 0) {
        encoder.normalized_inputs = malloc(inputs_bytes);
        if (encoder.normalized_inputs == NULL) {
            return error_out_of_memory(err, "parts of the text", inputs_bytes);
        }
    }
    TRY_OR_FAIL(id_buffer_reserve(&encoder.ids, 1, err));
    if (text_bytes > 0) {
        TRY_OR_FAIL(encode_around(&encoder, &tokenizer->raw_added, encoder.special, text,
                                  text_bytes, true, encode_raw));
    }
    if (count_special(tokenizer, &encoder.ids) > encoder.num_special) {
        status = error_set(err, IMBREX_STATUS_UNSUPPORTED,
                           "tokenizer: merges: expected none that make a special token out of "
                           "ordinary text, found such a token in this text");
        goto fail;
    }
    *token_ids = encoder.ids.ids;
    *num_tokens = encoder.ids.num_ids;
    encoder.ids.ids = NULL;
fail:
    encoder_release(&encoder);
    return status;
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
    if (tokenizer == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "tokenizer: expected one, found NULL (a model without a tokenizer?)");
    }
    if (text == NULL && text_bytes > 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "text: expected %zu bytes, found NULL", text_bytes);
    }
    struct encoder encoder = {
        .tokenizer = tokenizer,
        .special = {.parse_special = (flags & IMBREX_TOKENIZE_PARSE_SPECIAL) != 0},
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
        encoder.text = text;
        TRY_OR_FAIL(encode_around(&encoder, &tokenizer->raw_added, encoder.special, text,
                                  text_bytes, true, encode_raw));
    }
    if (add_special) {
        TRY_OR_FAIL(append_template(&encoder, tokenizer->num_before, tokenizer->num_after));
    }
    *token_ids = encoder.ids.ids;
    *num_tokens = encoder.ids.num_ids;
    encoder.ids.ids = NULL;
fail:
    encoder_release(&encoder);
    free(repaired.bytes);
    return status;
}
