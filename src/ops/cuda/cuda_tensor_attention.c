/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <math.h>

struct tensor_choice {
    enum op_kernel kernel, scaled_kernel;
    int32_t head_dim;
    int32_t tile_rows, shared_bytes;
};

/* By head_dim: the first that is wide enough. */
#define TENSOR_CHOICE(rest, kernel_head_dim, m_tiles, keys)                \
    {.kernel = OP_KERNEL_tensor_attention_##kernel_head_dim,               \
     .scaled_kernel = OP_KERNEL_tensor_attention_scaled_##kernel_head_dim, \
     .head_dim = (kernel_head_dim),                                        \
     .tile_rows = TENSOR_ATTENTION_THREADS / 2 * (m_tiles),                \
     .shared_bytes = TENSOR_ATTENTION_SHARED(kernel_head_dim, m_tiles, keys)},
static const struct tensor_choice choices[] = {TENSOR_ATTENTION_LIST(TENSOR_CHOICE, )};

static const struct tensor_choice *choose(int32_t head_dim)
{
    for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]); i++) {
        if (head_dim <= choices[i].head_dim && head_dim % 16 == 0) {
            return &choices[i];
        }
    }
    return NULL;
}

bool cuda_tensor_attend_takes(const struct backend_cuda *cuda, int32_t head_dim)
{
    const struct tensor_choice *choice = choose(head_dim);
    return choice != NULL &&
           choice->shared_bytes + OP_KERNEL_STATIC_BYTES <= cuda->device->max_shared_bytes;
}

void cuda_tensor_attend(struct backend_cuda *cuda, const struct attend_params *params)
{
    const struct kv_view *kv = &params->kv;
    const struct tensor_choice *choice = choose(kv->head_dim);
    bool is_scaled = kv_dtype_has_scales(kv->dtype);
    if (choice == NULL || kv->block_size != ATTENTION_BLOCK_SIZE ||
        (kv->dtype != KV_DTYPE_BF16 && !is_scaled)) {
        cuda_keep(cuda,
                  error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                            "attention on tensor cores: expected head_dim a multiple of 16 up "
                            "to 256 and bf16, int8 or fp8 blocks of %d, found head_dim %d and %s "
                            "blocks of %d",
                            ATTENTION_BLOCK_SIZE, (int)kv->head_dim, kv_dtype_name(kv->dtype),
                            (int)kv->block_size));
        return;
    }
    int32_t group_heads = params->num_heads / kv->num_kv_heads;
    int64_t num_tiles =
        (int64_t)params->num_tokens * group_heads / choice->tile_rows + params->num_seqs;
    struct tensor_attention_kernel_params told = {
        .qkv = params->qkv,
        .d = params->d,
        .keys = kv->blocks + kv_view_layer_offset(kv, params->layer_idx),
        .block_tables = params->block_tables,
        .positions = params->positions,
        .query_begin = params->query_begin,
        .block_bytes = (int64_t)kv->block_bytes,
        .value_bytes = (int64_t)kv_view_plane_bytes(kv),
        .num_seqs = params->num_seqs,
        .num_tiles = (int32_t)num_tiles,
        .num_heads = params->num_heads,
        .num_kv_heads = kv->num_kv_heads,
        .group_heads = group_heads,
        .head_dim = kv->head_dim,
        .max_blocks = params->max_blocks,
        .window = params->window,
        .exp2_scale = params->scale * (float)M_LOG2E,
        .is_fp8 = kv->dtype == KV_DTYPE_FP8,
    };
    cuda_launch(cuda,
                &(struct op_launch){.kernel = is_scaled ? choice->scaled_kernel : choice->kernel,
                                    .grid_x = (uint32_t)(num_tiles * kv->num_kv_heads),
                                    .num_threads = TENSOR_ATTENTION_THREADS,
                                    .shared_bytes = (uint32_t)choice->shared_bytes},
                &told);
}
