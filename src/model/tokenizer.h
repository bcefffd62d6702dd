/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json: text to ids and back. The public functions are in imbrex.h (struct
 * imbrex_tokenizer); here is what the engine and the tests need beside them.
 *
 * Supported: model BPE with byte-level alphabet (NFC or no normalizer, Split by Qwen2's pattern,
 * ByteLevel) and SentencePiece-style BPE (Prepend and Replace normalizers, no pre-tokenizer,
 * byte_fallback); added tokens; TemplateProcessing. Anything else is refused by name. */
#ifndef IMBREX_MODEL_TOKENIZER_H
#define IMBREX_MODEL_TOKENIZER_H

#include "imbrex.h"

/* Builds a tokenizer from the bytes of a tokenizer.json, which are not kept. `path` is for
 * messages. */
enum imbrex_status tokenizer_parse(const char *path, const void *bytes, size_t num_bytes,
                                   struct imbrex_tokenizer **tokenizer, struct imbrex_error *err);

/* Bytes of the largest piece that one token can decode to, so that buffers can be planned. */
size_t tokenizer_max_token_bytes(const struct imbrex_tokenizer *tokenizer);

/* ---- streaming detokenizer
 * --------------------------------------------------------------------------- */

/* Ids in, whole UTF-8 characters out. Concatenating all its output equals imbrex_detokenize of all
 * ids. */
struct detokenizer {
    const struct imbrex_tokenizer *tokenizer;
    bool skip_special;
    bool is_at_start;      /* the decoder's "strip one leading space" still applies */
    unsigned char held[4]; /* start of a character that is not complete yet */
    int32_t num_held;      /* 0..3 */
};

void detokenizer_init(struct detokenizer *detokenizer, const struct imbrex_tokenizer *tokenizer,
                      bool skip_special);

/* Bytes that one call of push or flush can write at most. */
size_t detokenizer_max_bytes(const struct imbrex_tokenizer *tokenizer);

/* Writes the characters that this id completes to text, at least detokenizer_max_bytes long;
 * returns the bytes written. Invalid bytes become U+FFFD. token_id in [0, vocab_size). Allocates
 * nothing. */
size_t detokenizer_push(struct detokenizer *detokenizer, int32_t token_id, char *text);

/* Writes what is held back, as U+FFFD, at the end. */
size_t detokenizer_flush(struct detokenizer *detokenizer, char *text);

#endif
