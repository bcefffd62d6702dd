/* SPDX-License-Identifier: Apache-2.0 */
/* What a GGUF file says about a model beside its tensors. */
#ifndef IMBREX_MODEL_GGUF_EXPORT_H
#define IMBREX_MODEL_GGUF_EXPORT_H

#include "model/gguf_writer.h"
#include "model/model.h"

#define GGUF_ROPE_FACTORS "rope_freqs.weight"

/* Whether GGUF files this architecture under "llama". */
bool gguf_export_is_llama(const struct model_config *config);

/* Puts all keys. A model that came from a GGUF file keeps its own, but for those that speak of the
 * types of its tensors. */
enum imbrex_status gguf_export_metadata(const struct imbrex_model *model, uint32_t file_type,
                                        bool is_quantized, struct gguf_writer *writer,
                                        struct imbrex_error *err);

/* What RoPE's frequencies are divided by, where only a tensor of the file can say it: [head_dim /
 * 2], allocated with malloc; NULL if there is no such thing. */
enum imbrex_status gguf_export_rope_factors(const struct imbrex_model *model, float **factors,
                                            struct imbrex_error *err);

#endif
