/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

/* The kernel of that name for the backend's type. */
#define KERNEL(cuda, name)                                                          \
    ((cuda)->options.activation_dtype == DTYPE_BF16 ? OP_KERNEL_plain_##name##_bf16 \
                                                    : OP_KERNEL_plain_##name##_f32)

#define WARP_THREADS 32

static uint32_t num_parts(int64_t count, int64_t part)
{
    return (uint32_t)((count + part - 1) / part);
}

/* rows: NULL, all. */
static void launch_norm(struct backend_cuda *cuda, const float *hidden, const int32_t *rows,
                        const struct norm_params *norm, int32_t num_rows, int32_t width, void *d)
{
    struct plain_norm_params told = {.a = hidden,
                                     .rows = rows,
                                     .weight = norm->weight,
                                     .d = d,
                                     .width = width,
                                     .eps = norm->eps};
    cuda_launch(cuda,
                &(struct op_launch){.kernel = KERNEL(cuda, norm),
                                    .grid_x = (uint32_t)num_rows,
                                    .num_threads = PLAIN_THREADS},
                &told);
}

static void launch_product(struct backend_cuda *cuda, enum op_kernel kernel,
                           const struct plain_product_params *told)
{
    if (told->num_rows > 0) {
        cuda_launch(cuda,
                    &(struct op_launch){.kernel = kernel,
                                        .grid_x = num_parts(told->out_features, PLAIN_TILE_COLUMNS),
                                        .grid_y = num_parts(told->num_rows, PLAIN_TILE_ROWS),
                                        .num_threads = PLAIN_THREADS},
                    told);
    }
}

static struct plain_kv layer_of(const struct kv_view *kv, int32_t layer_idx)
{
    return (struct plain_kv){.blocks = kv->blocks + kv_view_layer_offset(kv, layer_idx),
                             .block_bytes = (int64_t)kv->block_bytes,
                             .num_kv_heads = kv->num_kv_heads,
                             .block_size = kv->block_size,
                             .head_dim = kv->head_dim};
}

void cuda_plain_qkv(struct backend_cuda *cuda, const struct qkv_params *params)
{
    int32_t num_all_heads = params->num_heads + 2 * params->kv.num_kv_heads;
    launch_norm(cuda, params->hidden, NULL, &params->norm, params->num_tokens, params->hidden_size,
                params->normed);
    launch_product(
        cuda, KERNEL(cuda, store),
        &(struct plain_product_params){.a = params->normed,
                                       .weight = params->q_proj.elements,
                                       .bias = params->q_bias,
                                       .d = params->qkv,
                                       .num_rows = params->num_tokens,
                                       .in_features = params->hidden_size,
                                       .out_features = num_all_heads * params->kv.head_dim});
    struct plain_rope_params told = {.qkv = params->qkv,
                                     .cos_sin = params->cos_sin,
                                     .q_norm = params->q_norm,
                                     .k_norm = params->k_norm,
                                     .positions = params->positions,
                                     .slot_mapping = params->slot_mapping,
                                     .kv = layer_of(&params->kv, params->layer_idx),
                                     .num_tokens = params->num_tokens,
                                     .num_heads = params->num_heads,
                                     .norm_eps = params->head_norm_eps,
                                     .is_interleaved = params->is_interleaved};
    cuda_launch(cuda,
                &(struct op_launch){.kernel = KERNEL(cuda, rope),
                                    .grid_x = num_parts((int64_t)params->num_tokens * num_all_heads,
                                                        PLAIN_THREADS / WARP_THREADS),
                                    .num_threads = PLAIN_THREADS},
                &told);
}

void cuda_plain_attend(struct backend_cuda *cuda, const struct attend_params *params)
{
    struct plain_attend_params told = {.qkv = params->qkv,
                                       .d = params->d,
                                       .kv = layer_of(&params->kv, params->layer_idx),
                                       .block_tables = params->block_tables,
                                       .seq_idx = params->seq_idx,
                                       .positions = params->positions,
                                       .num_heads = params->num_heads,
                                       .max_blocks = params->max_blocks,
                                       .window = params->window,
                                       .scale = params->scale};
    cuda_launch(cuda,
                &(struct op_launch){.kernel = KERNEL(cuda, attend),
                                    .grid_x = (uint32_t)params->num_tokens,
                                    .grid_y = (uint32_t)params->num_heads,
                                    .num_threads = PLAIN_THREADS},
                &told);
}

void cuda_plain_project(struct backend_cuda *cuda, const struct project_params *params)
{
    launch_product(cuda, KERNEL(cuda, add),
                   &(struct plain_product_params){.a = params->a,
                                                  .weight = params->weight.elements,
                                                  .bias = params->bias,
                                                  .d = params->hidden,
                                                  .num_rows = params->num_tokens,
                                                  .in_features = params->in_features,
                                                  .out_features = params->hidden_size});
}

void cuda_plain_mlp(struct backend_cuda *cuda, const struct mlp_params *params)
{
    launch_norm(cuda, params->hidden, NULL, &params->norm, params->num_tokens, params->hidden_size,
                params->normed);
    launch_product(cuda, KERNEL(cuda, swiglu),
                   &(struct plain_product_params){.a = params->normed,
                                                  .weight = params->gate.elements,
                                                  .up_weight = params->up.elements,
                                                  .bias = params->gate_bias,
                                                  .up_bias = params->up_bias,
                                                  .d = params->d,
                                                  .num_rows = params->num_tokens,
                                                  .in_features = params->hidden_size,
                                                  .out_features = params->intermediate_size});
}

void cuda_plain_logits(struct backend_cuda *cuda, const struct logits_params *params)
{
    launch_norm(cuda, params->hidden, params->rows, &params->norm, params->num_rows,
                params->hidden_size, params->normed);
    launch_product(cuda, KERNEL(cuda, logits),
                   &(struct plain_product_params){.a = params->normed,
                                                  .weight = params->weight.elements,
                                                  .d = params->logits,
                                                  .num_rows = params->num_rows,
                                                  .in_features = params->hidden_size,
                                                  .out_features = params->vocab_size});
}
