/* SPDX-License-Identifier: Apache-2.0 */
/* Small tokenizers for tests, as JSON documents that a test may change before it parses them. */
#ifndef IMBREX_TESTS_MODEL_TOKENIZER_FIXTURE_H
#define IMBREX_TESTS_MODEL_TOKENIZER_FIXTURE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/tokenizer.h"

/* Byte-level, as Qwen2's: ids 0 to 255 are the bytes, then the merges "h e", "l l", "he ll",
 * "hell o" and "G h" (a space and h; 256 to 260), then "<|end|>" (261, special) and "<tool>" (262,
 * not special). */
json_t *tokenizer_fixture_bytes(void);
#define FIXTURE_BYTES_END 261
#define FIXTURE_BYTES_TOOL 262

/* SentencePiece-style, as stories260K's: "<unk>" (0), "<s>" (1), "</s>" (2), 256 byte tokens from 3
 * on, then U+2581 (259), "a" (260), "b" (261), "ab" (262), U+2581 "a" (263). "<s>" goes in front of
 * a text. */
json_t *tokenizer_fixture_chars(void);

/* Parses and frees the document; fails the test with the message if it is refused. */
struct imbrex_tokenizer *tokenizer_fixture_open(json_t *root);
/* The same for a file of the tree. */
struct imbrex_tokenizer *tokenizer_fixture_open_path(const char *path);

/* Appends a token to model.vocab; returns its id. */
int32_t tokenizer_fixture_add_token(json_t *root, const char *token);
/* Appends a merge, and the token that it makes unless there is one. */
void tokenizer_fixture_add_merge(json_t *root, const char *left, const char *right);
/* Appends an added token with the next free id (or that of the vocabulary); returns the id. */
int32_t tokenizer_fixture_add_added(json_t *root, const char *content, bool special,
                                    bool normalized);

/* Fails unless the text gives these ids; the list ends with -1. */
void expect_ids(const struct imbrex_tokenizer *tokenizer, unsigned flags, const char *text,
                size_t text_bytes, const int32_t *expected);
/* The ids of a text, and the text of ids, as a whole. The caller frees them with imbrex_free. */
int32_t *fixture_tokenize(const struct imbrex_tokenizer *tokenizer, unsigned flags,
                          const char *text, size_t text_bytes, size_t *num_ids);
char *fixture_detokenize(const struct imbrex_tokenizer *tokenizer, const int32_t *ids,
                         size_t num_ids, bool skip_special, size_t *text_bytes);

/* A reproducible sequence of numbers. */
uint32_t fixture_random(uint64_t *random_state);

#endif
