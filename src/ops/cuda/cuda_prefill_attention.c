/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <string.h>

#define LOG2_E 1.44269504f
#define GROUP_THREADS 128
#define BF16_BYTES 2
/* More than any device has: a view of the cache does not say how many blocks there are. */
#define MOST_CACHE_BYTES (UINT64_C(1) << 40)
/* Keys and values that the L2 cache of an H200 (50 MB) holds beside what else passes through. */
#define L2_CACHE_SHARE (INT64_C(24) << 20)

struct prefill_kernel {
    enum op_kernel kernel;
    uint32_t num_rows, shared_bytes;
};

static struct prefill_kernel kernel_for(int32_t head_dim, enum kv_dtype dtype)
{
    bool is_fp8 = dtype == KV_DTYPE_FP8;
    if (head_dim == 64) {
        return kv_dtype_has_scales(dtype)
                   ? (struct prefill_kernel){is_fp8 ? OP_KERNEL_prefill_attention_fp8_sm90_64
                                                    : OP_KERNEL_prefill_attention_int8_sm90_64,
                                             PREFILL_ROWS_64, PREFILL_SCALED_SHARED_64}
                   : (struct prefill_kernel){OP_KERNEL_prefill_attention_bf16_sm90_64,
                                             PREFILL_ROWS_64, PREFILL_SHARED_64};
    }
    return kv_dtype_has_scales(dtype)
               ? (struct prefill_kernel){is_fp8 ? OP_KERNEL_prefill_attention_fp8_sm90_128
                                                : OP_KERNEL_prefill_attention_int8_sm90_128,
                                         PREFILL_ROWS_128, PREFILL_SCALED_SHARED_128}
               : (struct prefill_kernel){OP_KERNEL_prefill_attention_bf16_sm90_128,
                                         PREFILL_ROWS_128, PREFILL_SHARED_128};
}

/* The whole cache; one map serves all layers. */
static enum imbrex_status find_cache_map(struct imbrex_device *device, const struct kv_view *kv,
                                         CUtensorMap *map, struct imbrex_error *err)
{
    struct tensor_map_key key;
    memset(&key, 0, sizeof(key));
    key.base = (uint64_t)(uintptr_t)kv->blocks;
    key.rank = 4;
    key.dims[0] = (uint64_t)kv->head_dim;
    key.dims[1] = PREFILL_BLOCK_SIZE;
    key.dims[2] = 2 * (uint64_t)kv->num_layers * (uint64_t)kv->num_kv_heads;
    key.dims[3] = MOST_CACHE_BYTES / kv->block_bytes;
    key.strides[0] = (uint64_t)kv->head_dim * BF16_BYTES;
    key.strides[1] = key.strides[0] * PREFILL_BLOCK_SIZE;
    key.strides[2] = kv->block_bytes;
    key.box[0] = 64;
    key.box[1] = PREFILL_BLOCK_SIZE;
    key.box[2] = 1;
    key.box[3] = 1;
    key.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    key.l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const CUtensorMap *found = tensor_map_find(&device->maps, &key);
    if (found == NULL) {
        TRY(tensor_map_add(&device->maps, &device->driver, &key, &found, err));
    }
    *map = *found;
    return IMBREX_STATUS_OK;
}

void cuda_prefill_attend(struct backend_cuda *cuda, const struct attend_params *params,
                         int32_t min_query)
{
    const struct kv_view *kv = &params->kv;
    struct prefill_kernel kernel = kernel_for(kv->head_dim, kv->dtype);
    int32_t group_heads = params->num_heads / kv->num_kv_heads;
    int64_t key_bytes = (int64_t)params->max_blocks * 2 * (int64_t)kv_view_plane_bytes(kv);
    struct prefill_attention_params told;

    if (cuda->status != IMBREX_STATUS_OK || params->num_tokens == 0) {
        return;
    }
    if (kv->block_size != PREFILL_BLOCK_SIZE) {
        cuda_keep(cuda, error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                                  "cuda_prefill_attend: block_size: expected %d, found %d",
                                  PREFILL_BLOCK_SIZE, (int)kv->block_size));
        return;
    }
    memset(&told, 0, sizeof(told));
    if (kv->dtype == KV_DTYPE_BF16) {
        cuda_keep(cuda, find_cache_map(cuda->device, kv, &told.kv, &cuda->error));
    }
    told.keys = kv->blocks + kv_view_layer_offset(kv, params->layer_idx);
    told.block_bytes = (int64_t)kv->block_bytes;
    told.value_bytes = (int64_t)kv_view_plane_bytes(kv);
    told.qkv = params->qkv;
    told.d = params->d;
    told.block_tables = params->block_tables;
    told.positions = params->positions;
    told.query_begin = params->query_begin;
    told.seq_lens = params->seq_lens;
    told.scale_log2e = params->scale * LOG2_E;
    told.k_plane = 2 * params->layer_idx * kv->num_kv_heads;
    told.num_seqs = params->num_seqs;
    told.num_kv_heads = kv->num_kv_heads;
    told.group_heads = group_heads;
    told.max_blocks = params->max_blocks;
    told.min_query = min_query;
    told.window = params->window > 0 && params->window < PREFILL_NO_WINDOW ? params->window
                                                                           : PREFILL_NO_WINDOW;
    told.heads_in_turn = key_bytes > L2_CACHE_SHARE ? 1 : 0;
    int64_t num_tiles =
        (int64_t)params->num_tokens * group_heads / kernel.num_rows + params->num_seqs;
    cuda_launch(cuda,
                &(struct op_launch){.kernel = kernel.kernel,
                                    .grid_x = (uint32_t)(num_tiles * kv->num_kv_heads),
                                    .num_threads = kernel.num_rows * 2 + GROUP_THREADS,
                                    .shared_bytes = kernel.shared_bytes},
                &told);
}
