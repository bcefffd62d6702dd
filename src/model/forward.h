/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass of a decoder-only transformer (llama, qwen2, qwen3, mistral), in terms of a
 * backend's calls only: the same on every device. */
#ifndef IMBREX_MODEL_FORWARD_H
#define IMBREX_MODEL_FORWARD_H

#include "base/memory.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/backend.h"

/* The tokens of one step as flat arrays: several sequences, several tokens each, in any mixture. */
struct forward_batch {
    const int32_t *token_ids; /* [num_tokens] */
    const int32_t *positions; /* [num_tokens] in their sequence, < max_positions of the buffers */
    const int32_t *slot_mapping; /* [num_tokens] KV slot that each token fills */
    const int32_t *seq_idx;      /* [num_tokens] row of block_tables */
    const int32_t *query_begin;  /* [num_seqs + 1], see attend_params; a host does without, and */
    const int32_t *seq_lens;     /* [num_seqs] without these */
    const int32_t *block_tables; /* [num_seqs, max_blocks] */
    int32_t num_tokens, num_seqs, max_blocks;
    int32_t max_query; /* the most tokens of a sequence */
};

struct forward_limits {
    int32_t max_tokens, max_logit_rows, max_positions;
    enum dtype activation_dtype; /* of normed, qkv, attention and mlp */
};

/* Activations of one step, planned once. Pointers into the caller's arena, on the device. */
struct forward_buffers {
    float *hidden;   /* [max_tokens, hidden_size] residual stream */
    void *normed;    /* [max(max_tokens, max_logit_rows), hidden_size] */
    void *qkv;       /* [max_tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
    void *attention; /* [max_tokens, num_heads * head_dim] */
    void *mlp;       /* [max_tokens, intermediate_size] */
    float *logits;   /* [max_logit_rows, vocab_size] */
    float *cos_sin;  /* [max_positions, head_dim], see rope_kv_params; [0, num_positions) filled */
    double frequencies[CONFIG_MAX_HEAD_DIM / 2]; /* see rope.h */
    struct forward_limits limits;
    int32_t num_positions;
};

/* Takes the buffers from an arena that may only be measuring; then the pointers are NULL. */
void forward_buffers_take(struct arena *arena, const struct model_config *config,
                          const struct forward_limits *limits, struct forward_buffers *buffers);

/* Fills the RoPE table for positions [0, num_positions) as far as it is not. A host does so as
 * sequences grow, in forward_run, so that a large context costs neither time nor memory before it
 * is used; for other devices it is called once, with the context size, before the first step. */
void forward_extend_positions(const struct model_config *config, const struct weights *weights,
                              struct backend *backend, struct forward_buffers *buffers,
                              int32_t num_positions);

/* Runs layers [begin, end) over the batch, behind those before them, the embedding before layer 0:
 * fills the KV slots of its tokens in these layers and leaves the hidden states in buffers->hidden.
 * What other tokens have in the cache is read of these layers only. Allocates nothing. */
void forward_layers(const struct model_config *config, const struct weights *weights,
                    struct backend *backend, const struct kv_view *kv,
                    const struct forward_batch *batch, int32_t begin, int32_t end,
                    struct forward_buffers *buffers);

/* All layers. */
void forward_run(const struct model_config *config, const struct weights *weights,
                 struct backend *backend, const struct kv_view *kv,
                 const struct forward_batch *batch, struct forward_buffers *buffers);

/* logits[i, :] of batch token tokens[i] of the last forward_run, i in [0, num_rows), num_rows <=
 * max_logit_rows. Can be called several times. Allocates nothing. */
void forward_logits(const struct model_config *config, const struct weights *weights,
                    struct backend *backend, const int32_t *tokens, int32_t num_rows,
                    struct forward_buffers *buffers);

#endif
