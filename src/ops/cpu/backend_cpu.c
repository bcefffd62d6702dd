/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a layer out of the host's ops, one after the other. Activations are fp32. */
#include <math.h>
#include <stdlib.h>

#include "ops/backend.h"

struct backend_cpu {
    struct backend backend; /* first: the table's functions get it */
    struct ops *ops;
};

static struct ops *ops_of(struct backend *backend)
{
    return ((struct backend_cpu *)(void *)backend)->ops;
}

static void cpu_destroy(struct backend *backend)
{
    ops_destroy(ops_of(backend));
    free(backend);
}

static void cpu_begin(struct backend *backend, void *stream_handle)
{
    (void)backend, (void)stream_handle;
}

static enum imbrex_status cpu_end(struct backend *backend)
{
    (void)backend;
    return IMBREX_STATUS_OK;
}

static void cpu_rope_table(struct backend *backend, const struct rope_table_params *params)
{
    int32_t half = params->head_dim / 2;
    (void)backend;
    for (int32_t position = params->begin; position < params->end; position++) {
        float *row = params->cos_sin + (int64_t)position * params->head_dim;
        for (int32_t i = 0; i < half; i++) {
            double angle = position * params->frequencies[i];
            row[i] = (float)(params->attention_factor * cos(angle));
            row[half + i] = (float)(params->attention_factor * sin(angle));
        }
    }
}

static void cpu_history(struct backend *backend, const struct history_params *params)
{
    ops_history(ops_of(backend), params);
}

static void cpu_embedding(struct backend *backend, const struct embedding_params *params)
{
    ops_embedding(ops_of(backend), params);
}

static void cpu_qkv(struct backend *backend, const struct qkv_params *params)
{
    struct ops *ops = ops_of(backend);
    int32_t head_dim = params->kv.head_dim;
    int32_t q_width = params->num_heads * head_dim;
    int32_t kv_width = params->kv.num_kv_heads * head_dim;
    struct linear_params projections[3];
    const struct weight_view weights[3] = {params->q_proj, params->k_proj, params->v_proj};
    const float *const biases[3] = {params->q_bias, params->k_bias, params->v_bias};
    const int32_t offsets[3] = {0, q_width, q_width + kv_width};
    const int32_t widths[3] = {q_width, kv_width, kv_width};

    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = params->hidden,
                                              .weight = params->norm.weight,
                                              .d = params->normed,
                                              .num_tokens = params->num_tokens,
                                              .hidden_size = params->hidden_size,
                                              .eps = params->norm.eps});
    for (int32_t i = 0; i < 3; i++) {
        projections[i] = (struct linear_params){.a = params->normed,
                                                .weight = weights[i],
                                                .bias = biases[i],
                                                .d = (float *)params->qkv + offsets[i],
                                                .a_stride = params->hidden_size,
                                                .d_stride = q_width + 2 * kv_width,
                                                .num_tokens = params->num_tokens,
                                                .in_features = params->hidden_size,
                                                .out_features = widths[i]};
    }
    ops_linear(ops, projections, 3);
    ops_rope_kv(ops, &(struct rope_kv_params){.qkv = params->qkv,
                                              .cos_sin = params->cos_sin,
                                              .q_norm = params->q_norm,
                                              .k_norm = params->k_norm,
                                              .positions = params->positions,
                                              .slot_mapping = params->slot_mapping,
                                              .kv = params->kv,
                                              .layer_idx = params->layer_idx,
                                              .num_tokens = params->num_tokens,
                                              .num_heads = params->num_heads,
                                              .norm_eps = params->head_norm_eps,
                                              .is_interleaved = params->is_interleaved});
}

static void cpu_attend(struct backend *backend, const struct attend_params *params)
{
    int32_t num_all_heads = params->num_heads + 2 * params->kv.num_kv_heads;
    ops_attention(ops_of(backend),
                  &(struct attention_params){.q = params->qkv,
                                             .d = params->d,
                                             .kv = params->kv,
                                             .block_tables = params->block_tables,
                                             .seq_idx = params->seq_idx,
                                             .positions = params->positions,
                                             .q_stride = num_all_heads * params->kv.head_dim,
                                             .layer_idx = params->layer_idx,
                                             .num_tokens = params->num_tokens,
                                             .num_heads = params->num_heads,
                                             .max_blocks = params->max_blocks,
                                             .window = params->window,
                                             .scale = params->scale});
}

static void cpu_project(struct backend *backend, const struct project_params *params)
{
    ops_linear(ops_of(backend),
               &(struct linear_params){.a = params->a,
                                       .weight = params->weight,
                                       .bias = params->bias,
                                       .residual = params->hidden,
                                       .d = params->hidden,
                                       .a_stride = params->in_features,
                                       .d_stride = params->hidden_size,
                                       .num_tokens = params->num_tokens,
                                       .in_features = params->in_features,
                                       .out_features = params->hidden_size},
               1);
}

static void cpu_mlp(struct backend *backend, const struct mlp_params *params)
{
    struct ops *ops = ops_of(backend);
    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = params->hidden,
                                              .weight = params->norm.weight,
                                              .d = params->normed,
                                              .num_tokens = params->num_tokens,
                                              .hidden_size = params->hidden_size,
                                              .eps = params->norm.eps});
    ops_gemm_swiglu(ops,
                    &(struct gemm_swiglu_params){.a = params->normed,
                                                 .gate = params->gate,
                                                 .up = params->up,
                                                 .gate_bias = params->gate_bias,
                                                 .up_bias = params->up_bias,
                                                 .d = params->d,
                                                 .num_tokens = params->num_tokens,
                                                 .hidden_size = params->hidden_size,
                                                 .intermediate_size = params->intermediate_size});
}

static void cpu_logits(struct backend *backend, const struct logits_params *params)
{
    struct ops *ops = ops_of(backend);
    ops_rmsnorm(ops, &(struct rmsnorm_params){.a = params->hidden,
                                              .rows = params->rows,
                                              .weight = params->norm.weight,
                                              .d = params->normed,
                                              .num_tokens = params->num_rows,
                                              .hidden_size = params->hidden_size,
                                              .eps = params->norm.eps});
    ops_linear(ops,
               &(struct linear_params){.a = params->normed,
                                       .weight = params->weight,
                                       .d = params->logits,
                                       .a_stride = params->hidden_size,
                                       .d_stride = params->vocab_size,
                                       .num_tokens = params->num_rows,
                                       .in_features = params->hidden_size,
                                       .out_features = params->vocab_size},
               1);
}

static void cpu_sample(struct backend *backend, const struct sample_params *params)
{
    ops_sample(ops_of(backend), params);
}

static const struct backend_functions cpu_functions = {
    .name = "cpu",
    .destroy = cpu_destroy,
    .begin = cpu_begin,
    .end = cpu_end,
    .rope_table = cpu_rope_table,
    .history = cpu_history,
    .embedding = cpu_embedding,
    .qkv = cpu_qkv,
    .attend = cpu_attend,
    .project = cpu_project,
    .mlp = cpu_mlp,
    .logits = cpu_logits,
    .sample = cpu_sample,
};

enum imbrex_status backend_cpu_create(int32_t num_threads, uint32_t cpu_features, void *scratch,
                                      size_t scratch_bytes, struct backend **backend,
                                      struct imbrex_error *err)
{
    struct backend_cpu *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "backend", sizeof(*created));
    }
    enum imbrex_status status =
        ops_create(num_threads, cpu_features, scratch, scratch_bytes, &created->ops, err);
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    created->backend = (struct backend){.functions = &cpu_functions,
                                        .activation_dtype = DTYPE_F32,
                                        .is_host = true,
                                        .kernels_name = ops_kernels_name(created->ops)};
    *backend = &created->backend;
    return IMBREX_STATUS_OK;
}
