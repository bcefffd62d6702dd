/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass: embedding, then per layer
 *
 *   hidden --rmsnorm--> normed --q,k,v--> qkv --RoPE, KV store--> attention --o_proj--+--> hidden
 *   hidden --rmsnorm--> normed --SwiGLU--> mlp --down_proj----------------------------+--> hidden
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
                          int32_t max_tokens, int32_t max_logit_rows, int32_t max_positions,
                          struct forward_buffers *buffers)
{
    size_t tokens = (size_t)max_tokens;
    size_t rows = (size_t)max_logit_rows;
    size_t hidden_bytes = (size_t)config->hidden_size * sizeof(float);
    size_t attention_width = (size_t)config->num_heads * (size_t)config->head_dim;

    buffers->max_tokens = max_tokens;
    buffers->max_logit_rows = max_logit_rows;
    buffers->max_positions = max_positions;
    buffers->num_positions = 0;
    buffers->hidden = arena_take(arena, tokens, hidden_bytes);
    buffers->normed = arena_take(arena, tokens > rows ? tokens : rows, hidden_bytes);
    buffers->qkv = arena_take(arena, tokens, (size_t)qkv_width(config) * sizeof(float));
    buffers->attention = arena_take(arena, tokens, attention_width * sizeof(float));
    buffers->mlp = arena_take(arena, tokens, (size_t)config->intermediate_size * sizeof(float));
    buffers->logits = arena_take(arena, rows, (size_t)config->vocab_size * sizeof(float));
    buffers->cos_sin =
        arena_take(arena, (size_t)max_positions, (size_t)config->head_dim * sizeof(float));
    buffers->frequencies = arena_take(arena, (size_t)config->head_dim / 2, sizeof(double));
}

/* Fills the RoPE table up to and including max_position. It grows with the sequence, so that a
 * large context costs neither time nor memory before it is used. */
static void extend_cos_sin(const struct model_config *config, const struct weights *weights,
                           struct forward_buffers *buffers, int32_t max_position)
{
    int32_t half = config->head_dim / 2;
    double attention_factor = rope_attention_factor(config);
    assert(max_position < buffers->max_positions);
    if (buffers->num_positions == 0) {
        rope_frequencies(config, weights->rope_factors, buffers->frequencies);
    }
    for (int32_t position = buffers->num_positions; position <= max_position; position++) {
        float *row = buffers->cos_sin + (int64_t)position * config->head_dim;
        for (int32_t i = 0; i < half; i++) {
            double angle = position * buffers->frequencies[i];
            row[i] = (float)(attention_factor * cos(angle));
            row[half + i] = (float)(attention_factor * sin(angle));
        }
    }
    if (max_position >= buffers->num_positions) {
        buffers->num_positions = max_position + 1;
    }
}

static void run_attention(const struct model_config *config, const struct layer_weights *layer,
                          struct ops *ops, const struct kv_view *kv,
                          const struct forward_batch *batch, struct forward_buffers *buffers,
                          int32_t layer_idx)
{
    int32_t width = qkv_width(config);
    int32_t q_width = config->num_heads * config->head_dim;
    int32_t kv_width = config->num_kv_heads * config->head_dim;

    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = buffers->hidden,
                                              .weight = layer->input_layernorm,
                                              .d = buffers->normed,
                                              .num_tokens = batch->num_tokens,
                                              .hidden_size = config->hidden_size,
                                              .eps = (float)config->rms_norm_eps});

    struct linear_params projections[3];
    const struct weight_view weights[3] = {layer->q_proj, layer->k_proj, layer->v_proj};
    const float *const biases[3] = {layer->q_bias, layer->k_bias, layer->v_bias};
    const int32_t offsets[3] = {0, q_width, q_width + kv_width};
    const int32_t widths[3] = {q_width, kv_width, kv_width};
    for (int32_t i = 0; i < 3; i++) {
        projections[i] = (struct linear_params){.a = buffers->normed,
                                                .weight = weights[i],
                                                .bias = biases[i],
                                                .d = buffers->qkv + offsets[i],
                                                .a_stride = config->hidden_size,
                                                .d_stride = width,
                                                .num_tokens = batch->num_tokens,
                                                .in_features = config->hidden_size,
                                                .out_features = widths[i]};
    }
    ops_linear(ops, projections, 3);

    ops_rope_kv(ops, &(struct rope_kv_params){.qkv = buffers->qkv,
                                              .cos_sin = buffers->cos_sin,
                                              .q_norm = layer->q_norm,
                                              .k_norm = layer->k_norm,
                                              .positions = batch->positions,
                                              .slot_mapping = batch->slot_mapping,
                                              .kv = *kv,
                                              .layer_idx = layer_idx,
                                              .num_tokens = batch->num_tokens,
                                              .num_heads = config->num_heads,
                                              .norm_eps = (float)config->rms_norm_eps,
                                              .is_interleaved = config->is_rope_interleaved});

    ops_attention(ops, &(struct attention_params){.q = buffers->qkv,
                                                  .d = buffers->attention,
                                                  .kv = *kv,
                                                  .block_tables = batch->block_tables,
                                                  .seq_idx = batch->seq_idx,
                                                  .positions = batch->positions,
                                                  .q_stride = width,
                                                  .layer_idx = layer_idx,
                                                  .num_tokens = batch->num_tokens,
                                                  .num_heads = config->num_heads,
                                                  .max_blocks = batch->max_blocks,
                                                  .window = config_layer_window(config, layer_idx),
                                                  .scale = (float)(1.0 / sqrt(config->head_dim))});

    ops_linear(ops,
               &(struct linear_params){.a = buffers->attention,
                                       .weight = layer->o_proj,
                                       .bias = layer->o_bias,
                                       .residual = buffers->hidden,
                                       .d = buffers->hidden,
                                       .a_stride = q_width,
                                       .d_stride = config->hidden_size,
                                       .num_tokens = batch->num_tokens,
                                       .in_features = q_width,
                                       .out_features = config->hidden_size},
               1);
}

static void run_mlp(const struct model_config *config, const struct layer_weights *layer,
                    struct ops *ops, int32_t num_tokens, struct forward_buffers *buffers)
{
    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = buffers->hidden,
                                              .weight = layer->post_attention_layernorm,
                                              .d = buffers->normed,
                                              .num_tokens = num_tokens,
                                              .hidden_size = config->hidden_size,
                                              .eps = (float)config->rms_norm_eps});

    ops_gemm_swiglu(ops,
                    &(struct gemm_swiglu_params){.a = buffers->normed,
                                                 .gate = layer->gate_proj,
                                                 .up = layer->up_proj,
                                                 .gate_bias = layer->gate_bias,
                                                 .up_bias = layer->up_bias,
                                                 .d = buffers->mlp,
                                                 .num_tokens = num_tokens,
                                                 .hidden_size = config->hidden_size,
                                                 .intermediate_size = config->intermediate_size});

    ops_linear(ops,
               &(struct linear_params){.a = buffers->mlp,
                                       .weight = layer->down_proj,
                                       .bias = layer->down_bias,
                                       .residual = buffers->hidden,
                                       .d = buffers->hidden,
                                       .a_stride = config->intermediate_size,
                                       .d_stride = config->hidden_size,
                                       .num_tokens = num_tokens,
                                       .in_features = config->intermediate_size,
                                       .out_features = config->hidden_size},
               1);
}

void forward_run(const struct model_config *config, const struct weights *weights, struct ops *ops,
                 const struct kv_view *kv, const struct forward_batch *batch,
                 struct forward_buffers *buffers)
{
    assert(batch->num_tokens <= buffers->max_tokens);
    for (int32_t i = 0; i < batch->num_tokens; i++) {
        extend_cos_sin(config, weights, buffers, batch->positions[i]);
    }
    ops_embedding(ops, &(struct embedding_params){.token_ids = batch->token_ids,
                                                  .table = weights->embed_tokens,
                                                  .d = buffers->hidden,
                                                  .num_tokens = batch->num_tokens,
                                                  .hidden_size = config->hidden_size,
                                                  .vocab_size = config->vocab_size});
    for (int32_t layer_idx = 0; layer_idx < config->num_layers; layer_idx++) {
        const struct layer_weights *layer = &weights->layers[layer_idx];
        run_attention(config, layer, ops, kv, batch, buffers, layer_idx);
        run_mlp(config, layer, ops, batch->num_tokens, buffers);
    }
}

void forward_logits(const struct model_config *config, const struct weights *weights,
                    struct ops *ops, const int32_t *tokens, int32_t num_rows,
                    struct forward_buffers *buffers)
{
    assert(num_rows <= buffers->max_logit_rows);
#ifndef NDEBUG
    for (int32_t row = 0; row < num_rows; row++) {
        assert(tokens[row] >= 0 && tokens[row] < buffers->max_tokens);
    }
#endif
    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = buffers->hidden,
                                              .rows = tokens,
                                              .weight = weights->norm,
                                              .d = buffers->normed,
                                              .num_tokens = num_rows,
                                              .hidden_size = config->hidden_size,
                                              .eps = (float)config->rms_norm_eps});
    ops_linear(ops,
               &(struct linear_params){.a = buffers->normed,
                                       .weight = weights->lm_head,
                                       .d = buffers->logits,
                                       .a_stride = config->hidden_size,
                                       .d_stride = config->vocab_size,
                                       .num_tokens = num_rows,
                                       .in_features = config->hidden_size,
                                       .out_features = config->vocab_size},
               1);
}
