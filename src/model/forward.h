/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass of a decoder-only transformer (llama, qwen2, qwen3, mistral), in terms of ops
 * only. */
#ifndef IMBREX_MODEL_FORWARD_H
#define IMBREX_MODEL_FORWARD_H

#include "base/memory.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/ops.h"

/* The tokens of one step as flat arrays: several sequences, several tokens each, in any mixture. */
struct forward_batch {
    const int32_t *token_ids; /* [num_tokens] */
    const int32_t *positions; /* [num_tokens] in their sequence, < max_positions of the buffers */
    const int32_t *slot_mapping; /* [num_tokens] KV slot that each token fills */
    const int32_t *seq_idx;      /* [num_tokens] row of block_tables */
    const int32_t *block_tables; /* [num_seqs, max_blocks] */
    int32_t num_tokens, max_blocks;
};

/* Activations of one step, planned once. Pointers into the caller's arena. */
struct forward_buffers {
    float *hidden;    /* [max_tokens, hidden_size] residual stream */
    float *normed;    /* [max(max_tokens, max_logit_rows), hidden_size] */
    float *qkv;       /* [max_tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
    float *attention; /* [max_tokens, num_heads * head_dim] */
    float *mlp;       /* [max_tokens, intermediate_size] */
    float *logits;    /* [max_logit_rows, vocab_size] */
    float *cos_sin;   /* [max_positions, head_dim], see rope_kv_params; [0, num_positions) filled */
    double *frequencies; /* [head_dim / 2], see rope.h; filled with the first position */
    int32_t max_tokens, max_logit_rows, max_positions, num_positions;
};

/* Takes the buffers from an arena that may only be measuring; then the pointers are NULL. */
void forward_buffers_take(struct arena *arena, const struct model_config *config,
                          int32_t max_tokens, int32_t max_logit_rows, int32_t max_positions,
                          struct forward_buffers *buffers);

/* Runs all layers over the batch: fills the KV slots of its tokens and leaves their last hidden
 * states in buffers->hidden. Allocates nothing. */
void forward_run(const struct model_config *config, const struct weights *weights, struct ops *ops,
                 const struct kv_view *kv, const struct forward_batch *batch,
                 struct forward_buffers *buffers);

/* logits[i, :] of batch token tokens[i] of the last forward_run, i in [0, num_rows), num_rows <=
 * max_logit_rows. Can be called several times. Allocates nothing. */
void forward_logits(const struct model_config *config, const struct weights *weights,
                    struct ops *ops, const int32_t *tokens, int32_t num_rows,
                    struct forward_buffers *buffers);

#endif
