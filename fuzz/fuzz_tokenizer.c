/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer.json, a NUL, and a text (all of it the file if there is no NUL): what passes must
 * encode the text in all ways, also with parts of it marked as a user's, and decode it, and any
 * other ids, in a stream as on the whole. */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"

#define MAX_INPUT_BYTES (1 << 16)
#define MAX_RANDOM_IDS 64
#define MAX_INPUTS 64

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check_decoding(const struct imbrex_tokenizer *tokenizer, const int32_t *ids,
                           size_t num_ids, bool skip_special)
{
    char *text;
    size_t text_bytes, at = 0;
    require(imbrex_detokenize(tokenizer, ids, num_ids, skip_special, &text, &text_bytes, NULL) ==
            IMBREX_STATUS_OK);
    require(text[text_bytes] == '\0' && utf8_valid_prefix(text, text_bytes) == text_bytes);

    struct detokenizer detokenizer;
    detokenizer_init(&detokenizer, tokenizer, skip_special);
    char *piece = malloc(detokenizer_max_bytes(tokenizer));
    require(piece != NULL);
    for (size_t i = 0; i <= num_ids; i++) {
        size_t piece_bytes = i < num_ids ? detokenizer_push(&detokenizer, ids[i], piece)
                                         : detokenizer_flush(&detokenizer, piece);
        require(piece_bytes <= text_bytes - at && memcmp(piece, text + at, piece_bytes) == 0);
        require(utf8_valid_prefix(piece, piece_bytes) == piece_bytes);
        at += piece_bytes;
    }
    require(at == text_bytes);
    free(piece);
    imbrex_free(text);
}

static void check_encoding(const struct imbrex_tokenizer *tokenizer, const char *text,
                           size_t text_bytes, unsigned flags)
{
    int32_t *ids;
    size_t num_ids;
    enum imbrex_status status =
        imbrex_tokenize(tokenizer, text, text_bytes, flags, &ids, &num_ids, NULL);
    if (status == IMBREX_STATUS_CAPACITY) {
        /* Normalizers that make the text too long, expressions that hit their limits. */
        return;
    }
    require(status == IMBREX_STATUS_OK && ids != NULL);
    for (size_t i = 0; i < num_ids; i++) {
        size_t token_bytes;
        require(imbrex_token_bytes(tokenizer, ids[i], &token_bytes) != NULL);
        require(token_bytes <= tokenizer_max_token_bytes(tokenizer));
    }
    check_decoding(tokenizer, ids, num_ids, false);
    imbrex_free(ids);
}

/* The text with every second piece of `stride` characters marked as a user's, or all of it (0): no
 * special token may stand for marked text, but that of unknown characters. */
static void check_guarding(const struct imbrex_tokenizer *tokenizer, const char *text,
                           size_t text_bytes, size_t stride)
{
    struct text_span inputs[MAX_INPUTS] = {{0, text_bytes}};
    size_t num_inputs = stride == 0, num_chars = 0, num_ids;
    int32_t *ids;
    for (size_t at = 0; stride > 0 && at < text_bytes && num_inputs < MAX_INPUTS; num_chars++) {
        if (num_chars % (2 * stride) == stride) {
            inputs[num_inputs].begin = at;
        }
        at += utf8_next(text + at, text_bytes - at).num_bytes;
        if (num_chars % (2 * stride) == 2 * stride - 1) {
            inputs[num_inputs++].end = at;
        }
    }
    enum imbrex_status status = tokenizer_encode_guarded(tokenizer, text, text_bytes, inputs,
                                                         num_inputs, &ids, &num_ids, NULL);
    if (status != IMBREX_STATUS_OK) {
        require(status == IMBREX_STATUS_UNSUPPORTED);
        return;
    }
    for (size_t i = 0; i < num_ids && stride == 0; i++) {
        require(!imbrex_token_is_special(tokenizer, ids[i]) || ids[i] == tokenizer->unk_id);
    }
    imbrex_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    if (num_bytes > MAX_INPUT_BYTES) {
        return 0;
    }
    const uint8_t *separator = num_bytes == 0 ? NULL : memchr(bytes, 0, num_bytes);
    size_t file_bytes = separator == NULL ? num_bytes : (size_t)(separator - bytes);
    struct imbrex_error err = {0};
    struct imbrex_tokenizer *tokenizer = NULL;
    enum imbrex_status status = tokenizer_parse("fuzz", bytes, file_bytes, &tokenizer, &err);
    if (status != IMBREX_STATUS_OK) {
        require(tokenizer == NULL && err.status == status && err.message[0] != '\0');
        return 0;
    }
    const char *text = separator == NULL ? "" : (const char *)separator + 1;
    size_t text_bytes = separator == NULL ? 0 : num_bytes - file_bytes - 1;
    for (unsigned flags = 0; flags < 4; flags++) {
        check_encoding(tokenizer, text, text_bytes, flags);
    }
    for (size_t stride = 0; stride < 3 && utf8_valid_prefix(text, text_bytes) == text_bytes;
         stride++) {
        check_guarding(tokenizer, text, text_bytes, stride);
    }
    int32_t ids[MAX_RANDOM_IDS];
    size_t num_ids = text_bytes < MAX_RANDOM_IDS ? text_bytes : MAX_RANDOM_IDS;
    uint32_t vocab_size = (uint32_t)imbrex_tokenizer_vocab_size(tokenizer);
    require(vocab_size > 0);
    for (size_t i = 0; i < num_ids; i++) {
        ids[i] = (int32_t)((unsigned char)text[i] * UINT32_C(2654435761) % vocab_size);
    }
    check_decoding(tokenizer, ids, num_ids, false);
    check_decoding(tokenizer, ids, num_ids, true);
    imbrex_tokenizer_close(tokenizer);
    return 0;
}
