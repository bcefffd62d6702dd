/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass: embedding, then per layer
 *
 *   hidden --norm, q,k,v, RoPE, KV store--> qkv --attention--> attention --o_proj--+--> hidden
 *   hidden --norm, SwiGLU--> mlp --down_proj---------------------------------------+--> hidden
 *
 * and the logits of the rows that are asked for. The residual adds happen inside o_proj and
 * down_proj; the gate and up products never exist in memory. */
#include "model/forward.h"

#include <assert.h>
#include <math.h>

#include "model/rope.h"

static int32_t qkv_width(const struct model_config *config)
{
    return (config->num_heads + 2 * config->num_kv_heads) * config->head_dim;
}

void forward_buffers_take(struct arena *arena, const struct model_config *config,
                          const struct forward_limits *limits, struct forward_buffers *buffers)
{
    size_t tokens = (size_t)limits->max_tokens;
    size_t rows = (size_t)limits->max_logit_rows;
    size_t hidden = (size_t)config->hidden_size;
    size_t element_bytes = dtype_block_bytes(limits->activation_dtype);
    size_t attention_width = (size_t)config->num_heads * (size_t)config->head_dim;

    buffers->limits = *limits;
    buffers->num_positions = 0;
    buffers->hidden = arena_take(arena, tokens, hidden * sizeof(float));
    buffers->normed = arena_take(arena, tokens > rows ? tokens : rows, hidden * element_bytes);
    buffers->qkv = arena_take(arena, tokens, (size_t)qkv_width(config) * element_bytes);
    buffers->attention = arena_take(arena, tokens, attention_width * element_bytes);
    buffers->mlp = arena_take(arena, tokens, (size_t)config->intermediate_size * element_bytes);
    buffers->logits = arena_take(arena, rows, (size_t)config->vocab_size * sizeof(float));
    buffers->cos_sin =
        arena_take(arena, (size_t)limits->max_positions, (size_t)config->head_dim * sizeof(float));
}

void forward_extend_positions(const struct model_config *config, const struct weights *weights,
                              struct backend *backend, struct forward_buffers *buffers,
                              int32_t num_positions)
{
    assert(num_positions <= buffers->limits.max_positions);
    if (num_positions <= buffers->num_positions) {
        return;
    }
    if (buffers->num_positions == 0) {
        rope_frequencies(config, weights->rope_factors, buffers->frequencies);
    }
    backend_rope_table(
        backend, &(struct rope_table_params){.frequencies = buffers->frequencies,
                                             .attention_factor = rope_attention_factor(config),
                                             .cos_sin = buffers->cos_sin,
                                             .head_dim = config->head_dim,
                                             .begin = buffers->num_positions,
                                             .end = num_positions});
    buffers->num_positions = num_positions;
}

static void run_attention(const struct model_config *config, const struct layer_weights *layer,
                          struct backend *backend, const struct kv_view *kv,
                          const struct forward_batch *batch, struct forward_buffers *buffers,
                          int32_t layer_idx)
{
    backend_qkv(backend,
                &(struct qkv_params){.hidden = buffers->hidden,
                                     .norm = {layer->input_layernorm, (float)config->rms_norm_eps},
                                     .q_proj = layer->q_proj,
                                     .k_proj = layer->k_proj,
                                     .v_proj = layer->v_proj,
                                     .q_bias = layer->q_bias,
                                     .k_bias = layer->k_bias,
                                     .v_bias = layer->v_bias,
                                     .q_norm = layer->q_norm,
                                     .k_norm = layer->k_norm,
                                     .cos_sin = buffers->cos_sin,
                                     .positions = batch->positions,
                                     .slot_mapping = batch->slot_mapping,
                                     .kv = *kv,
                                     .normed = buffers->normed,
                                     .qkv = buffers->qkv,
                                     .layer_idx = layer_idx,
                                     .num_tokens = batch->num_tokens,
                                     .hidden_size = config->hidden_size,
                                     .num_heads = config->num_heads,
                                     .head_norm_eps = (float)config->rms_norm_eps,
                                     .is_interleaved = config->is_rope_interleaved});
    backend_attend(backend,
                   &(struct attend_params){.qkv = buffers->qkv,
                                           .d = buffers->attention,
                                           .kv = *kv,
                                           .block_tables = batch->block_tables,
                                           .seq_idx = batch->seq_idx,
                                           .positions = batch->positions,
                                           .query_begin = batch->query_begin,
                                           .seq_lens = batch->seq_lens,
                                           .layer_idx = layer_idx,
                                           .num_tokens = batch->num_tokens,
                                           .num_seqs = batch->num_seqs,
                                           .num_heads = config->num_heads,
                                           .max_blocks = batch->max_blocks,
                                           .max_query = batch->max_query,
                                           .window = config_layer_window(config, layer_idx),
                                           .scale = (float)(1.0 / sqrt(config->head_dim))});
    backend_project(backend,
                    &(struct project_params){.a = buffers->attention,
                                             .weight = layer->o_proj,
                                             .bias = layer->o_bias,
                                             .hidden = buffers->hidden,
                                             .num_tokens = batch->num_tokens,
                                             .in_features = config->num_heads * config->head_dim,
                                             .hidden_size = config->hidden_size});
}

static void run_mlp(const struct model_config *config, const struct layer_weights *layer,
                    struct backend *backend, int32_t num_tokens, struct forward_buffers *buffers)
{
    backend_mlp(backend, &(struct mlp_params){
                             .hidden = buffers->hidden,
                             .norm = {layer->post_attention_layernorm, (float)config->rms_norm_eps},
                             .gate = layer->gate_proj,
                             .up = layer->up_proj,
                             .gate_bias = layer->gate_bias,
                             .up_bias = layer->up_bias,
                             .normed = buffers->normed,
                             .d = buffers->mlp,
                             .num_tokens = num_tokens,
                             .hidden_size = config->hidden_size,
                             .intermediate_size = config->intermediate_size});
    backend_project(backend, &(struct project_params){.a = buffers->mlp,
                                                      .weight = layer->down_proj,
                                                      .bias = layer->down_bias,
                                                      .hidden = buffers->hidden,
                                                      .num_tokens = num_tokens,
                                                      .in_features = config->intermediate_size,
                                                      .hidden_size = config->hidden_size});
}

static void run_embedding(const struct model_config *config, const struct weights *weights,
                          struct backend *backend, const struct forward_batch *batch,
                          struct forward_buffers *buffers)
{
    for (int32_t i = 0; backend->is_host && i < batch->num_tokens; i++) {
        forward_extend_positions(config, weights, backend, buffers, batch->positions[i] + 1);
    }
    backend_embedding(backend, &(struct embedding_params){.token_ids = batch->token_ids,
                                                          .table = weights->embed_tokens,
                                                          .d = buffers->hidden,
                                                          .num_tokens = batch->num_tokens,
                                                          .hidden_size = config->hidden_size,
                                                          .vocab_size = config->vocab_size});
}

void forward_layers(const struct model_config *config, const struct weights *weights,
                    struct backend *backend, const struct kv_view *kv,
                    const struct forward_batch *batch, int32_t begin, int32_t end,
                    struct forward_buffers *buffers)
{
    assert(batch->num_tokens <= buffers->limits.max_tokens);
    assert(begin >= 0 && begin < end && end <= config->num_layers);
    if (begin == 0) {
        run_embedding(config, weights, backend, batch, buffers);
    }
    for (int32_t layer_idx = begin; layer_idx < end; layer_idx++) {
        const struct layer_weights *layer = &weights->layers[layer_idx];
        run_attention(config, layer, backend, kv, batch, buffers, layer_idx);
        run_mlp(config, layer, backend, batch->num_tokens, buffers);
    }
}

void forward_run(const struct model_config *config, const struct weights *weights,
                 struct backend *backend, const struct kv_view *kv,
                 const struct forward_batch *batch, struct forward_buffers *buffers)
{
    forward_layers(config, weights, backend, kv, batch, 0, config->num_layers, buffers);
}

void forward_logits(const struct model_config *config, const struct weights *weights,
                    struct backend *backend, const int32_t *tokens, int32_t num_rows,
                    struct forward_buffers *buffers)
{
    assert(num_rows <= buffers->limits.max_logit_rows);
    backend_logits(backend,
                   &(struct logits_params){.hidden = buffers->hidden,
                                           .rows = tokens,
                                           .norm = {weights->norm, (float)config->rms_norm_eps},
                                           .weight = weights->lm_head,
                                           .normed = buffers->normed,
                                           .logits = buffers->logits,
                                           .num_rows = num_rows,
                                           .hidden_size = config->hidden_size,
                                           .vocab_size = config->vocab_size});
}
