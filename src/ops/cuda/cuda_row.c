/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <string.h>

#define ROW_THREADS 256
#define WARP_THREADS 32

void cuda_embedding(struct backend_cuda *cuda, const struct embedding_params *params)
{
    struct embedding_kernel_params told = {.token_ids = params->token_ids,
                                           .table = params->table.elements,
                                           .d = params->d,
                                           .hidden_size = params->hidden_size};
    cuda_launch(cuda,
                &(struct op_launch){.kernel = params->table.dtype == DTYPE_BF16
                                                  ? OP_KERNEL_embedding_bf16
                                                  : OP_KERNEL_embedding_f32,
                                    .grid_x = (uint32_t)params->num_tokens,
                                    .num_threads = ROW_THREADS},
                &told);
}

void cuda_rope_table(struct backend_cuda *cuda, const struct rope_table_params *params)
{
    int32_t num_pairs = params->head_dim / 2;
    struct rope_table_kernel_params told = {.cos_sin = params->cos_sin,
                                            .factor = params->attention_factor,
                                            .num_pairs = num_pairs,
                                            .position_begin = params->begin};
    memcpy(told.frequencies, params->frequencies, (size_t)num_pairs * sizeof(double));
    cuda_launch(cuda,
                &(struct op_launch){.kernel = OP_KERNEL_rope_table,
                                    .grid_x = (uint32_t)(params->end - params->begin),
                                    .num_threads = ROW_THREADS},
                &told);
}

void cuda_rmsnorm(struct backend_cuda *cuda, const float *a, const int32_t *rows,
                  const struct norm_params *norm, void *d, int32_t num_rows, int32_t hidden_size)
{
    static const struct {
        enum op_kernel kernel;
        int32_t quads, max_threads;
    } kernels[] = {{OP_KERNEL_rmsnorm_2, 2, 128},
                   {OP_KERNEL_rmsnorm_4, 4, 128},
                   {OP_KERNEL_rmsnorm_8, 8, 512}};
    enum { NUM_KERNELS = sizeof(kernels) / sizeof(kernels[0]) };
    struct rmsnorm_kernel_params told = {.a = a,
                                         .rows = rows,
                                         .weight = norm->weight,
                                         .d = d,
                                         .hidden_size = hidden_size,
                                         .eps = norm->eps};
    for (int i = 0; i < NUM_KERNELS; i++) {
        int32_t num_warps = divide_up(hidden_size, 4 * kernels[i].quads * WARP_THREADS);
        if (num_warps * WARP_THREADS <= kernels[i].max_threads) {
            cuda_launch(cuda,
                        &(struct op_launch){.kernel = kernels[i].kernel,
                                            .grid_x = (uint32_t)num_rows,
                                            .num_threads = (uint32_t)(num_warps * WARP_THREADS)},
                        &told);
            return;
        }
    }
    cuda_keep(cuda,
              error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                        "CUDA: hidden_size: expected at most %d, found %d",
                        4 * kernels[NUM_KERNELS - 1].quads * kernels[NUM_KERNELS - 1].max_threads,
                        (int)hidden_size));
}

/* Pairs of elements of a thread: 16-byte accesses where head_dim allows them. */
static int32_t rope_pairs(int32_t head_dim)
{
    return head_dim % 16 == 0 ? 8 : 4;
}

bool cuda_rope_kv_takes(int32_t head_dim)
{
    return head_dim % 8 == 0 && head_dim / (2 * rope_pairs(head_dim)) <= WARP_THREADS;
}

void cuda_kv_store(struct backend_cuda *cuda, const struct qkv_params *params)
{
    const struct kv_view *kv = &params->kv;
    int32_t row_groups = kv_dtype_row_groups(kv->dtype, kv->head_dim);
    struct kv_store_kernel_params told = {
        .qkv = params->qkv,
        .slot_mapping = params->slot_mapping,
        .blocks = kv->blocks,
        .block_bytes = (int64_t)kv->block_bytes,
        .layer_offset = (int64_t)kv_view_layer_offset(kv, params->layer_idx),
        .head_bytes = (int64_t)kv_view_head_bytes(kv),
        .num_warps = (int64_t)params->num_tokens * 2 * kv->num_kv_heads * row_groups,
        .num_heads = params->num_heads,
        .num_kv_heads = kv->num_kv_heads,
        .head_dim = kv->head_dim,
        .block_size = kv->block_size,
        .row_groups = row_groups,
        /* With more tokens attention takes places on the SMs that the product ahead still needs. */
        .is_early = params->num_tokens == 1 ? 1 : 0};
    int64_t num_threads = told.num_warps * WARP_THREADS;
    cuda_launch(
        cuda,
        &(struct op_launch){
            .kernel = kv->dtype == KV_DTYPE_INT8 ? OP_KERNEL_kv_store_int8 : OP_KERNEL_kv_store_fp8,
            .grid_x = (uint32_t)((num_threads + KV_STORE_THREADS - 1) / KV_STORE_THREADS),
            .num_threads = KV_STORE_THREADS},
        &told);
}

void cuda_rope_kv(struct backend_cuda *cuda, const struct qkv_params *params)
{
    const struct kv_view *kv = &params->kv;
    int32_t num_all_heads = params->num_heads + 2 * kv->num_kv_heads;
    int32_t pairs = rope_pairs(kv->head_dim);
    int32_t groups_of_token = divide_up(num_all_heads, ROPE_KV_HEADS);
    int32_t threads_of_head = kv->head_dim / (2 * pairs), group_threads = 1;
    while (group_threads < threads_of_head) {
        group_threads *= 2;
    }
    struct rope_kv_kernel_params told = {
        .qkv = params->qkv,
        .cos_sin = params->cos_sin,
        .q_norm = params->q_norm,
        .k_norm = params->k_norm,
        .positions = params->positions,
        .slot_mapping = params->slot_mapping,
        .blocks = kv->blocks,
        .block_bytes = (int64_t)kv->block_bytes,
        .layer_offset = (int64_t)kv_view_layer_offset(kv, params->layer_idx),
        .num_groups = (int64_t)params->num_tokens * groups_of_token,
        .num_heads = params->num_heads,
        .num_kv_heads = kv->num_kv_heads,
        .num_all_heads = num_all_heads,
        .head_dim = kv->head_dim,
        .block_size = kv->block_size,
        .group_threads = group_threads,
        .threads_of_head = threads_of_head,
        .is_interleaved = params->is_interleaved ? 1 : 0,
        .groups_of_token = groups_of_token,
        .norm_eps = params->head_norm_eps,
        .keeps_kv = kv_dtype_has_scales(kv->dtype) ? 1 : 0};
    int64_t num_threads = told.num_groups * group_threads;
    cuda_launch(cuda,
                &(struct op_launch){
                    .kernel = pairs == 8 ? OP_KERNEL_rope_kv_8 : OP_KERNEL_rope_kv_4,
                    .grid_x = (uint32_t)((num_threads + ROPE_KV_THREADS - 1) / ROPE_KV_THREADS),
                    .num_threads = ROPE_KV_THREADS},
                &told);
    if (kv_dtype_has_scales(kv->dtype)) {
        cuda_kv_store(cuda, params);
    }
}

void cuda_silu_mul(struct backend_cuda *cuda, const void *gate_up, const float *gate_bias,
                   const float *up_bias, void *d, int32_t num_tokens, int32_t intermediate_size)
{
    struct silu_mul_kernel_params told = {.gate_up = gate_up,
                                          .gate_bias = gate_bias,
                                          .up_bias = up_bias,
                                          .d = d,
                                          .intermediate_size = intermediate_size};
    cuda_launch(
        cuda,
        &(struct op_launch){.kernel = OP_KERNEL_silu_mul,
                            .grid_x = (uint32_t)divide_up(intermediate_size / 8, ROW_THREADS),
                            .grid_y = (uint32_t)num_tokens,
                            .num_threads = ROW_THREADS},
        &told);
}

void cuda_split_add(struct backend_cuda *cuda, float *hidden, const float *partial,
                    int64_t split_stride, const float *bias, int32_t num_tokens,
                    int32_t num_columns, int32_t num_splits)
{
    struct split_add_kernel_params told = {.hidden = hidden,
                                           .partial = partial,
                                           .bias = bias,
                                           .split_stride = split_stride,
                                           .num_columns = num_columns,
                                           .num_splits = num_splits};
    cuda_launch(cuda,
                &(struct op_launch){.kernel = OP_KERNEL_split_add,
                                    .grid_x = (uint32_t)divide_up(num_columns / 4, ROW_THREADS),
                                    .grid_y = (uint32_t)num_tokens,
                                    .num_threads = ROW_THREADS},
                &told);
}
