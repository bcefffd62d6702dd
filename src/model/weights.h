/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a checkpoint bound to their places in the forward pass. Every name, dtype and
 * shape is checked here, once, so that the forward pass checks nothing. */
#ifndef IMBREX_MODEL_WEIGHTS_H
#define IMBREX_MODEL_WEIGHTS_H

#include "model/checkpoint.h"
#include "model/config.h"
#include "ops/dtype.h"

/* Matrices are views into the mapped files; norms and biases are fp32 copies. Biases are NULL where
 * there are none. */
struct layer_weights {
    const float *input_layernorm;          /* [hidden_size] */
    const float *post_attention_layernorm; /* [hidden_size] */
    const float *q_norm, *k_norm;          /* [head_dim]; NULL without config's qk_norm */
    struct weight_view q_proj;             /* [num_heads * head_dim, hidden_size] */
    struct weight_view k_proj, v_proj;     /* [num_kv_heads * head_dim, hidden_size] */
    struct weight_view o_proj;             /* [hidden_size, num_heads * head_dim] */
    struct weight_view gate_proj, up_proj; /* [intermediate_size, hidden_size] */
    struct weight_view down_proj;          /* [hidden_size, intermediate_size] */
    const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
};

struct weights {
    struct weight_view embed_tokens; /* [vocab_size, hidden_size] */
    struct weight_view lm_head;      /* [vocab_size, hidden_size]; embed_tokens when tied */
    const float *norm;               /* [hidden_size] */
    const float *rope_factors;       /* [head_dim / 2], all > 0: RoPE's frequencies are divided by
                                        them; NULL in a Hugging Face folder */
    struct layer_weights *layers;    /* [num_layers] */
    bool tied;
    const char
        *tied_reason; /* static storage: what decided it, of config.json and the tensors present */
    int64_t num_parameters;        /* elements of the tensors in use, a tied matrix counted once */
    size_t num_bytes;              /* of those tensors, as stored */
    int64_t max_quantized_columns; /* of the matrices in quantised dtypes; 0: there are none */
    int64_t max_bf16_columns;      /* likewise */
    float *converted;              /* [num_converted] the fp32 copies */
    size_t num_converted;
};

/* lm_head: tied if config says so (a stored lm_head is then ignored) or if there is no
 * lm_head.weight. FORMAT: missing tensor, wrong shape, a row that is no whole number of blocks, a
 * norm or bias in blocks. UNSUPPORTED: a dtype without kernels, a
 * tensor this architecture does not have (it would be left out silently); rotary_emb.inv_freq
 * buffers are ignored. Views live as long as checkpoint. */
enum imbrex_status weights_bind(const struct checkpoint *checkpoint,
                                const struct model_config *config, const char *path,
                                struct weights *weights, struct imbrex_error *err);
/* Whether a tensor of this name changes nothing: weights_bind skips it. */
bool weights_is_ignored(const char *name);
/* Of matrices that were bound by their distances from a place that is only now known. */
void weights_rebase(struct weights *weights, int32_t num_layers, const unsigned char *base);
/* Safe on a zeroed struct. */
void weights_release(struct weights *weights);

#endif
