/* SPDX-License-Identifier: Apache-2.0 */
/* Ids to text. Both ways, streaming and whole, go through detokenizer_push, so that they cannot
 * differ.
 *
 * Where Hugging Face's ByteFallback decoder replaces a whole run of byte tokens by U+FFFD, one a
 * byte, because a part of it is no UTF-8, here only that part is replaced: a stream cannot wait for
 * the end of the run. Added tokens stand for their content, also where Hugging Face's ByteLevel
 * decoder takes its letters for the alphabet of bytes and garbles it. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

void detokenizer_init(struct detokenizer *detokenizer, const struct imbrex_tokenizer *tokenizer,
                      bool skip_special)
{
    *detokenizer = (struct detokenizer){
        .tokenizer = tokenizer,
        .skip_special = skip_special,
        .is_first = true,
        .num_stripped = tokenizer->num_stripped_spaces,
    };
}

/* Each byte may become U+FFFD, those held back included. */
static size_t max_output_bytes(size_t token_bytes)
{
    return (token_bytes + UTF8_MAX_BYTES - 1) * UTF8_REPLACEMENT_BYTES;
}

size_t detokenizer_max_bytes(const struct imbrex_tokenizer *tokenizer)
{
    return max_output_bytes(tokenizer->max_token_bytes);
}

/* Writes what one step stands for; returns the bytes written. */
static size_t write_step(struct detokenizer *detokenizer, struct utf8_step step, char *text)
{
    if (detokenizer->num_stripped > 0 && step.code_point == ' ') {
        detokenizer->num_stripped--;
        return 0;
    }
    detokenizer->num_stripped = 0;
    return utf8_write(step.code_point, text);
}

size_t detokenizer_push(struct detokenizer *detokenizer, int32_t token_id, char *text)
{
    const struct imbrex_tokenizer *tokenizer = detokenizer->tokenizer;
    if (detokenizer->skip_special && imbrex_token_is_special(tokenizer, token_id)) {
        return 0;
    }
    size_t num_bytes, num_written = 0, at = 0;
    const char *bytes = imbrex_token_bytes(tokenizer, token_id, &num_bytes);
    if (bytes == NULL) {
        return 0;
    }
    bool drops_marks = detokenizer->is_first && tokenizer->drops_first_marks &&
                       (tokenizer->token_flags[token_id] & TOKEN_FLAG_MARKED) != 0;
    detokenizer->is_first = false;
    while (detokenizer->num_held > 0 && at < num_bytes) {
        /* The start of a character and what may be its rest. It is held because it was cut, so one
         * step takes all of it. */
        char character[UTF8_MAX_BYTES];
        size_t num_held = (size_t)detokenizer->num_held;
        size_t num_more = UTF8_MAX_BYTES - num_held;
        num_more = num_more < num_bytes - at ? num_more : num_bytes - at;
        memcpy(character, detokenizer->held, num_held);
        memcpy(character + num_held, bytes + at, num_more);
        struct utf8_step step = utf8_next(character, num_held + num_more);
        at += step.num_bytes - num_held;
        if (step.is_cut) {
            memcpy(detokenizer->held, character, step.num_bytes);
            detokenizer->num_held = step.num_bytes;
        } else {
            detokenizer->num_held = 0;
            num_written += write_step(detokenizer, step, text + num_written);
        }
    }
    while (at < num_bytes) {
        struct utf8_step step = utf8_next(bytes + at, num_bytes - at);
        if (step.is_cut) {
            memcpy(detokenizer->held, bytes + at, step.num_bytes);
            detokenizer->num_held = step.num_bytes;
        } else if (!drops_marks || step.code_point != ' ') {
            num_written += write_step(detokenizer, step, text + num_written);
        }
        at += step.num_bytes;
    }
    return num_written;
}

size_t detokenizer_flush(struct detokenizer *detokenizer, char *text)
{
    if (detokenizer->num_held == 0) {
        return 0;
    }
    detokenizer->num_held = 0;
    detokenizer->num_stripped = 0;
    return utf8_write(UTF8_REPLACEMENT, text);
}

enum imbrex_status imbrex_detokenize(const struct imbrex_tokenizer *tokenizer,
                                     const int32_t *token_ids, size_t num_tokens, bool skip_special,
                                     char **text, size_t *text_bytes, struct imbrex_error *err)
{
    struct byte_buffer buffer = {0};
    struct detokenizer detokenizer;
    if (tokenizer == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "tokenizer: expected one, found NULL (a model without a tokenizer?)");
    }
    detokenizer_init(&detokenizer, tokenizer, skip_special);
    enum imbrex_status status;
    for (size_t i = 0; i < num_tokens; i++) {
        if (token_ids[i] < 0 || token_ids[i] >= tokenizer->vocab_size) {
            status = error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                               "token id %zu: expected one in [0, %d), found %d", i,
                               tokenizer->vocab_size, token_ids[i]);
            goto fail;
        }
        size_t token_bytes = 0;
        (void)imbrex_token_bytes(tokenizer, token_ids[i], &token_bytes);
        TRY_OR_FAIL(byte_buffer_reserve(&buffer, max_output_bytes(token_bytes), err));
        buffer.num_bytes +=
            detokenizer_push(&detokenizer, token_ids[i], buffer.bytes + buffer.num_bytes);
    }
    TRY_OR_FAIL(byte_buffer_reserve(&buffer, UTF8_MAX_BYTES + 1, err));
    buffer.num_bytes += detokenizer_flush(&detokenizer, buffer.bytes + buffer.num_bytes);
    buffer.bytes[buffer.num_bytes] = '\0';
    *text = buffer.bytes;
    *text_bytes = buffer.num_bytes;
    return IMBREX_STATUS_OK;
fail:
    free(buffer.bytes);
    return status;
}
