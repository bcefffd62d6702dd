/* SPDX-License-Identifier: Apache-2.0 */
/* What a GGUF file's metadata says about its model. */
#ifndef IMBREX_MODEL_GGUF_CONFIG_H
#define IMBREX_MODEL_GGUF_CONFIG_H

#include "model/config.h"
#include "model/gguf.h"

/* The configuration that metadata and tensors describe. UNSUPPORTED, by name, for architectures and
 * keys that would change the computation; FORMAT for missing or wrong ones. */
enum imbrex_status gguf_read_config(const struct gguf *gguf, struct model_config *config,
                                    struct imbrex_error *err);

/* general.file_type as llama.cpp calls it ("Q4_K_M"), "unknown" for other numbers, NULL if the file
 * has none. Static storage. */
const char *gguf_file_type_name(const struct gguf *gguf);

#endif
