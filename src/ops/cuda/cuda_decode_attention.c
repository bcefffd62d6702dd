/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <math.h>

/* How the heads of a model are given to CTAs. */
struct head_split {
    int32_t cta_heads; /* query heads of a KV head that a CTA takes */
    int32_t num_columns, most_parts;
};

static struct head_split split_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                                     bool is_scaled)
{
    int32_t group_heads = num_heads / num_kv_heads;
    int32_t cta_heads = group_heads <= 8 ? 8 : 16;
    int32_t num_columns = num_kv_heads * ((group_heads + cta_heads - 1) / cta_heads);
    int32_t most_parts = is_scaled ? DECODE_SCALED_MOST_PARTS(head_dim, num_columns)
                                   : DECODE_MOST_PARTS(head_dim, num_columns);
    return (struct head_split){cta_heads, num_columns, most_parts};
}

/* By head_dim and heads of a CTA; once: for launches of no more items than clusters. */
#define DECODE_KERNELS(kind)                                                                      \
    {                                                                                             \
        {OP_KERNEL_decode_attention_##kind##_64_8, OP_KERNEL_decode_attention_##kind##_64_16},    \
        {                                                                                         \
            OP_KERNEL_decode_attention_##kind##_128_8, OP_KERNEL_decode_attention_##kind##_128_16 \
        }                                                                                         \
    }
static const enum op_kernel kernels[3][2][2] = {[DECODE_BF16] = DECODE_KERNELS(bf16),
                                                [DECODE_INT8] = DECODE_KERNELS(int8),
                                                [DECODE_FP8] = DECODE_KERNELS(fp8)};
static const enum op_kernel once_kernels[3][2][2] = {[DECODE_BF16] = DECODE_KERNELS(once_bf16),
                                                     [DECODE_INT8] = DECODE_KERNELS(once_int8),
                                                     [DECODE_FP8] = DECODE_KERNELS(once_fp8)};

static int kind_of(enum kv_dtype dtype)
{
    return dtype == KV_DTYPE_INT8 ? DECODE_INT8 : dtype == KV_DTYPE_FP8 ? DECODE_FP8 : DECODE_BF16;
}

static int32_t clusters_of(const struct backend_cuda *cuda, int32_t head_dim, int32_t cta_heads,
                           bool is_scaled)
{
    int32_t most_clusters = is_scaled ? DECODE_SCALED_CLUSTERS(head_dim, cta_heads)
                                      : DECODE_CLUSTERS(head_dim, cta_heads);
    int32_t num_clusters = most_clusters * cuda->device->description.num_sms / DECODE_CLUSTERS_SMS;
    return num_clusters > 0 ? num_clusters : 1;
}

void cuda_decode_attend(struct backend_cuda *cuda, const struct attend_params *params)
{
    const struct kv_view *kv = &params->kv;
    bool is_scaled = kv_dtype_has_scales(kv->dtype);
    if ((kv->head_dim != 64 && kv->head_dim != 128) || kv->block_size != ATTENTION_BLOCK_SIZE ||
        (kv->dtype != KV_DTYPE_BF16 && !is_scaled)) {
        cuda_keep(cuda,
                  error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                            "attention of single tokens: expected head_dim 64 or 128 and bf16, "
                            "int8 or fp8 blocks of %d, found head_dim %d and %s blocks of %d",
                            ATTENTION_BLOCK_SIZE, (int)kv->head_dim, kv_dtype_name(kv->dtype),
                            (int)kv->block_size));
        return;
    }
    struct head_split split =
        split_heads(params->num_heads, kv->num_kv_heads, kv->head_dim, is_scaled);
    int32_t max_parts = DECODE_PARTS(params->max_blocks, split.most_parts);
    int32_t num_rows = params->num_seqs * split.num_columns, num_items = num_rows * max_parts;
    int32_t most_clusters = clusters_of(cuda, kv->head_dim, split.cta_heads, is_scaled);
    int32_t num_clusters = num_items < most_clusters ? num_items : most_clusters;
    int64_t num_partials = (int64_t)params->num_seqs * params->num_heads * max_parts;
    float *partials = (float *)(void *)cuda->scratch;
    if (max_parts > 1 &&
        (size_t)num_partials * (size_t)(kv->head_dim + 2) * sizeof(float) > cuda->scratch_bytes) {
        cuda_keep(cuda,
                  error_set(&cuda->error, IMBREX_STATUS_INTERNAL,
                            "attention of single tokens: %d sequences of %d blocks, which is more "
                            "than the scratch memory was made for",
                            (int)params->num_seqs, (int)params->max_blocks));
        return;
    }
    struct decode_attention_kernel_params told = {
        .qkv = params->qkv,
        .d = params->d,
        .keys = kv->blocks + kv_view_layer_offset(kv, params->layer_idx),
        .block_tables = params->block_tables,
        .query_begin = params->query_begin,
        .seq_lens = params->seq_lens,
        .accums = partials,
        .extremes = partials + num_partials * kv->head_dim,
        .block_bytes = (int64_t)kv->block_bytes,
        .value_bytes = (int64_t)kv_view_plane_bytes(kv),
        .num_heads = params->num_heads,
        .num_kv_heads = kv->num_kv_heads,
        .group_heads = params->num_heads / kv->num_kv_heads,
        .max_blocks = params->max_blocks,
        .max_parts = max_parts,
        .num_columns = split.num_columns,
        .num_rows = num_rows,
        .num_items = num_items,
        .num_clusters = num_clusters,
        .most_parts = split.most_parts,
        .window = params->window,
        .exp2_scale = params->scale * (float)M_LOG2E *
                      (kv->dtype == KV_DTYPE_FP8    ? DECODE_FP8_SCORE_UNIT
                       : kv->dtype == KV_DTYPE_INT8 ? DECODE_INT8_SCORE_UNIT
                                                    : 1.0f),
    };
    int kind = kind_of(kv->dtype), width = kv->head_dim == 64 ? 0 : 1;
    int heads = split.cta_heads == 8 ? 0 : 1;
    bool is_once = num_items <= most_clusters;
    int32_t shared_bytes = is_once     ? DECODE_ONCE_SHARED(kind, kv->head_dim, split.cta_heads)
                           : is_scaled ? DECODE_SCALED_SHARED(kv->head_dim, split.cta_heads)
                                       : DECODE_SHARED(kv->head_dim, split.cta_heads);
    cuda_launch(
        cuda,
        &(struct op_launch){.kernel = (is_once ? once_kernels : kernels)[kind][width][heads],
                            .grid_x = (uint32_t)(DECODE_CLUSTER(kv->head_dim) * num_clusters),
                            .num_threads = DECODE_THREADS,
                            .shared_bytes = (uint32_t)shared_bytes,
                            .cluster_x = (uint32_t)DECODE_CLUSTER(kv->head_dim)},
        &told);
    if (max_parts > 1) {
        cuda_launch(cuda,
                    &(struct op_launch){.kernel = OP_KERNEL_decode_attention_merge,
                                        .grid_x = (uint32_t)params->num_heads,
                                        .grid_y = (uint32_t)params->num_seqs,
                                        .num_threads = (uint32_t)kv->head_dim},
                    &told);
    }
}

size_t cuda_decode_attention_scratch_bytes(const struct backend_shape *shape)
{
    /* Tables of a captured step may be wider than the context, by less than a factor of 2. */
    int32_t num_blocks = 2 * (shape->context_size / ATTENTION_BLOCK_SIZE + 1);
    struct head_split split = split_heads(shape->num_heads, shape->num_kv_heads, shape->head_dim,
                                          kv_dtype_has_scales(shape->kv_dtype));
    size_t num_partials = (size_t)shape->max_seqs * (size_t)shape->num_heads *
                          (size_t)DECODE_PARTS(num_blocks, split.most_parts);
    return num_partials * (size_t)(shape->head_dim + 2) * sizeof(float);
}
