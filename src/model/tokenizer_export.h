/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer.json as the tokenizer.ggml.* keys of a GGUF file. */
#ifndef IMBREX_MODEL_TOKENIZER_EXPORT_H
#define IMBREX_MODEL_TOKENIZER_EXPORT_H

#include "model/gguf_writer.h"

/* Puts the keys of the tokenizer.json at `path`, which tokenizer_parse has accepted; num_rows: rows
 * of embed_tokens, the length of the list of tokens in the file. UNSUPPORTED, by name, for what
 * GGUF's keys cannot say. */
enum imbrex_status tokenizer_export_gguf(const char *path, int32_t num_rows,
                                         struct gguf_writer *writer, struct imbrex_error *err);

#endif
