/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers: text to ids and back. The public functions are in imbrex.h (struct imbrex_tokenizer);
 * here is what the engine and the tests need beside them.
 *
 * Supported: BPE as Hugging Face's tokenizer.json has it, byte-level (GPT-2, Llama-3, Qwen2 and 3,
 * other split patterns) and SentencePiece-style (Llama-2, Mistral), and the vocabularies of GGUF
 * files ("gpt2", "llama"). Which steps: tokenizer_parse.c, tokenizer_gguf.c. Anything else is
 * refused by name. */
#ifndef IMBREX_MODEL_TOKENIZER_H
#define IMBREX_MODEL_TOKENIZER_H

#include "imbrex.h"

struct gguf;

/* Builds a tokenizer from the bytes of a tokenizer.json, which are not kept. `path` is for
 * messages. */
enum imbrex_status tokenizer_parse(const char *path, const void *bytes, size_t num_bytes,
                                   struct imbrex_tokenizer **tokenizer, struct imbrex_error *err);

/* Builds a tokenizer from the metadata of a GGUF file, which is not kept. */
enum imbrex_status tokenizer_from_gguf(const struct gguf *gguf, struct imbrex_tokenizer **tokenizer,
                                       struct imbrex_error *err);

/* text[begin, end) */
struct text_span {
    size_t begin, end;
};

/* Text to ids, for a text of which parts were written by somebody who must not write special
 * tokens: those written in text[input] or reaching into it are ordinary text, those elsewhere
 * become their ids. Splitting and merging run over the whole text, so the ids differ from those of
 * IMBREX_TOKENIZE_PARSE_SPECIAL in nothing else. No post-processor.
 *   text        [text_bytes] valid UTF-8
 *   inputs      [num_inputs] in order, apart, at the edges of characters
 *   token_ids   as imbrex_tokenize
 * UNSUPPORTED if the tokenizer's merges made a special token out of ordinary text. */
enum imbrex_status tokenizer_encode_guarded(const struct imbrex_tokenizer *tokenizer,
                                            const char *text, size_t text_bytes,
                                            const struct text_span *inputs, size_t num_inputs,
                                            int32_t **token_ids, size_t *num_tokens,
                                            struct imbrex_error *err);

/* The one token that the post-processor puts in front of a text; -1 if it is none or several. */
int32_t tokenizer_bos_id(const struct imbrex_tokenizer *tokenizer);

/* Bytes of the largest piece that one token can decode to, so that buffers can be planned. */
size_t tokenizer_max_token_bytes(const struct imbrex_tokenizer *tokenizer);

/* ---- streaming detokenizer ------------------------------------------------------------------- */

/* Ids in, whole UTF-8 characters out. Concatenating all its output equals imbrex_detokenize of all
 * ids. */
struct detokenizer {
    const struct imbrex_tokenizer *tokenizer;
    bool skip_special;
    bool is_first;         /* no token has been decoded yet */
    int32_t num_stripped;  /* spaces that the decoder still strips at the start of the text */
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
