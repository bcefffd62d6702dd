/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of the products of few tokens: which of the two kinds of kernels, how many CTAs. */
#include "ops/cuda/backend_cuda.h"

/* What the launches of the four products differ in. */
struct small_product {
    struct small_kernel_params params;
    enum op_kernel resident[2], single[2]; /* 4 and 8 chunks */
    enum op_kernel stream[4];              /* for 8, 16, 32, 64 tokens */
    const struct norm_params *norm;
    const int32_t *norm_rows;
    void *normed;
};

#define RESIDENT_KERNELS(op)                                                 \
    {                                                                        \
        OP_KERNEL_small_resident_##op##_4, OP_KERNEL_small_resident_##op##_8 \
    }
#define SINGLE_KERNELS(op)                                               \
    {                                                                    \
        OP_KERNEL_small_single_##op##_4, OP_KERNEL_small_single_##op##_8 \
    }
#define STREAM_KERNELS(op)                                                     \
    {                                                                          \
        OP_KERNEL_small_stream_##op##_8, OP_KERNEL_small_stream_##op##_16,     \
            OP_KERNEL_small_stream_##op##_32, OP_KERNEL_small_stream_##op##_64 \
    }

/* What a resident kernel keeps beside the chunks under way. */
static uint32_t resident_base_bytes(const struct small_kernel_params *params)
{
    return (uint32_t)SMALL_RESIDENT_SUM_BYTES(params->num_tokens) +
           (uint32_t)params->num_tokens * ((uint32_t)params->in_features * 2 + 64);
}

/* Dynamic shared memory that a CTA can have. */
static uint32_t shared_room(const struct backend_cuda *cuda)
{
    return (uint32_t)(cuda->device->max_shared_bytes - OP_KERNEL_STATIC_BYTES);
}

#define CHUNKS_BYTES(num_chunks) ((num_chunks)*SMALL_WARPS * SMALL_CHUNK_BYTES)

static bool is_resident(const struct backend_cuda *cuda, const struct small_kernel_params *params)
{
    return params->num_tokens <= SMALL_RESIDENT_TOKENS &&
           resident_base_bytes(params) <= SMALL_RESIDENT_MAX_BASE_BYTES &&
           resident_base_bytes(params) + CHUNKS_BYTES(4) <= shared_room(cuda);
}

bool cuda_small_takes(const struct backend_cuda *cuda, int32_t num_tokens)
{
    return num_tokens <= 8 || (num_tokens <= CUDA_SMALL_TOKENS &&
                               (uint32_t)SMALL_STREAM_BYTES(8) <= shared_room(cuda));
}

/* Few rows make few CTAs: half as many a tile, then. */
static void choose_parts(struct small_kernel_params *params, int32_t num_sms)
{
    params->num_parts = 1;
    if (params->num_tokens == 1 && params->in_features % (2 * SMALL_CHUNK) == 0 &&
        params->num_tiles * 4 < num_sms * 3) {
        params->num_parts = 2;
        params->num_tiles = divide_up(params->out_features, 8);
    }
}

/* Chunks of a warp under way, and most CTAs. A matrix of which most is under way before the kernel
 * ahead has ended is divided finely. Of a larger one an SM has as much under way in one CTA that
 * stays, and of one that takes so long that SMs drift apart, CTAs are handed out as others end: for
 * one token, since each CTA normalises all rows. Measured on an H200: fine against not at Qwen2.5
 * 0.5B and 1.5B, handed out against not at the MLP of 7B and the logits of all sizes. */
#define FINE_BYTES_PER_SM (160 << 10)
#define LONG_BYTES_PER_SM (1536 << 10)

struct resident_plan {
    bool has_few_chunks; /* 4, or 8 */
    int32_t most_ctas;
};

static struct resident_plan choose_plan(const struct small_kernel_params *params, int32_t num_sms)
{
    int64_t sm_bytes = (int64_t)params->out_features * params->in_features * 2 / num_sms;
    if (sm_bytes <= FINE_BYTES_PER_SM) {
        return (struct resident_plan){true, 2 * num_sms};
    }
    if (sm_bytes >= LONG_BYTES_PER_SM && params->num_tokens == 1) {
        return (struct resident_plan){true, 8 * num_sms};
    }
    return (struct resident_plan){false, num_sms};
}

static void launch_resident(struct backend_cuda *cuda, struct small_product *product)
{
    struct small_kernel_params *params = &product->params;
    int32_t num_sms = cuda->device->description.num_sms;
    if (product->norm == NULL) {
        choose_parts(params, num_sms);
    } else {
        params->num_parts = 1;
        params->rows = product->norm_rows;
        params->norm_weight = product->norm->weight;
        params->eps = product->norm->eps;
    }
    struct resident_plan plan = choose_plan(params, num_sms);
    plan.has_few_chunks |= resident_base_bytes(params) + CHUNKS_BYTES(8) > shared_room(cuda);
    int32_t most_chunks = plan.has_few_chunks ? 4 : 8;
    int32_t num_ctas = params->num_tiles < plan.most_ctas ? params->num_tiles : plan.most_ctas;
    int32_t tile_chunks = params->in_features / (params->num_parts * SMALL_CHUNK);
    int32_t warp_chunks =
        divide_up(divide_up(params->num_tiles, num_ctas) * tile_chunks, SMALL_WARPS);
    int32_t chunks = warp_chunks < most_chunks ? warp_chunks : most_chunks;
    params->cta_tiles = params->num_tiles / num_ctas;
    params->extra_tiles = params->num_tiles % num_ctas;
    cuda_launch(
        cuda,
        &(struct op_launch){
            .kernel = (params->num_tokens == 1 ? product->single
                                               : product->resident)[plan.has_few_chunks ? 0 : 1],
            .grid_x = (uint32_t)num_ctas,
            .num_threads = SMALL_THREADS,
            .shared_bytes = resident_base_bytes(params) + CHUNKS_BYTES((uint32_t)chunks)},
        params);
}

/* CTAs that share k, until there are about two for each SM or two stages for each. Clusters of 8
 * that need more than 3 SMs of 4 twice wait long for room (measured on an H200: down_proj of
 * Qwen2.5 3B). */
static uint32_t stream_ranks(const struct backend_cuda *cuda,
                             const struct small_kernel_params *params, uint32_t num_groups)
{
    uint32_t num_sms = (uint32_t)cuda->device->description.num_sms, num_ranks = 1;
    uint32_t num_stages = (uint32_t)params->in_features / (SMALL_STREAM_WARPS_K * SMALL_CHUNK);
    if (cuda->is_portable) {
        return 1; /* no clusters */
    }
    while (num_ranks < 4 && num_groups * num_ranks <= num_sms && num_stages >= num_ranks * 4) {
        num_ranks *= 2;
    }
    if (num_ranks == 4 && num_groups * 16 <= num_sms * 3 && num_stages >= 16) {
        num_ranks = 8;
    }
    return num_ranks;
}

static void launch_stream(struct backend_cuda *cuda, struct small_product *product)
{
    static const uint32_t shared_bytes[4] = {SMALL_STREAM_BYTES(1), SMALL_STREAM_BYTES(2),
                                             SMALL_STREAM_BYTES(4), SMALL_STREAM_BYTES(8)};
    struct small_kernel_params *params = &product->params;
    if (product->norm != NULL) {
        struct small_norm_params norm = {.hidden = params->a,
                                         .rows = product->norm_rows,
                                         .weight = product->norm->weight,
                                         .normed = product->normed,
                                         .hidden_size = params->in_features,
                                         .eps = product->norm->eps};
        cuda_launch(cuda,
                    &(struct op_launch){.kernel = OP_KERNEL_small_norm,
                                        .grid_x = (uint32_t)params->num_tokens,
                                        .num_threads = SMALL_THREADS},
                    &norm);
        params->a = product->normed;
    }
    int width = params->num_tokens <= 8    ? 0
                : params->num_tokens <= 16 ? 1
                : params->num_tokens <= 32 ? 2
                                           : 3;
    uint32_t num_groups =
        ((uint32_t)params->num_tiles + SMALL_STREAM_TILES - 1) / SMALL_STREAM_TILES;
    uint32_t num_ranks = stream_ranks(cuda, params, num_groups);
    cuda_launch(cuda,
                &(struct op_launch){.kernel = product->stream[width],
                                    .grid_x = num_groups * num_ranks,
                                    .num_threads = SMALL_THREADS,
                                    .shared_bytes = shared_bytes[width],
                                    .cluster_x = num_ranks},
                params);
}

static void launch(struct backend_cuda *cuda, struct small_product *product)
{
    if (product->params.num_tokens == 0) {
        return;
    }
    if (is_resident(cuda, &product->params)) {
        launch_resident(cuda, product);
    } else {
        launch_stream(cuda, product);
    }
}

void cuda_small_qkv(struct backend_cuda *cuda, const struct qkv_params *params)
{
    const struct kv_view *kv = &params->kv;
    int32_t num_all_heads = params->num_heads + 2 * kv->num_kv_heads;
    int32_t tiles_per_head = (kv->head_dim / 2 + 7) / 8;
    bool keeps_heads = params->q_norm != NULL || params->k_norm != NULL;
    bool is_scaled = kv_dtype_has_scales(kv->dtype);
    unsigned char *kv_layer = kv->blocks + kv_view_layer_offset(kv, params->layer_idx);
    struct small_product product = {
        .params = {.weight = params->q_proj.elements,
                   .a = params->hidden,
                   .bias = params->q_bias,
                   .d = params->qkv,
                   .cos_sin = params->cos_sin,
                   .positions = params->positions,
                   .slot_mapping = params->slot_mapping,
                   .kv_layer = kv_layer,
                   .kv_block_bytes = (int64_t)kv->block_bytes,
                   .num_tokens = params->num_tokens,
                   .in_features = params->hidden_size,
                   .out_features = num_all_heads * kv->head_dim,
                   .num_tiles = num_all_heads * tiles_per_head,
                   .head_dim = kv->head_dim,
                   .num_heads = params->num_heads,
                   .num_kv_heads = kv->num_kv_heads,
                   .block_size = kv->block_size,
                   .tiles_per_head = tiles_per_head,
                   .is_interleaved = params->is_interleaved,
                   .keeps_heads = keeps_heads,
                   .keeps_kv = is_scaled},
        .resident = RESIDENT_KERNELS(qkv),
        .single = SINGLE_KERNELS(qkv),
        .stream = STREAM_KERNELS(qkv),
        .norm = &params->norm,
        .normed = params->normed,
    };
    launch(cuda, &product);
    if (is_scaled) {
        if (params->num_tokens > 0) {
            (keeps_heads ? cuda_rope_kv : cuda_kv_store)(cuda, params);
        }
    } else if (keeps_heads) {
        struct small_heads_params heads = {.qkv = params->qkv,
                                           .q_norm = params->q_norm,
                                           .k_norm = params->k_norm,
                                           .cos_sin = params->cos_sin,
                                           .positions = params->positions,
                                           .slot_mapping = params->slot_mapping,
                                           .kv_layer = kv_layer,
                                           .kv_block_bytes = (int64_t)kv->block_bytes,
                                           .head_dim = kv->head_dim,
                                           .num_heads = params->num_heads,
                                           .num_kv_heads = kv->num_kv_heads,
                                           .block_size = kv->block_size,
                                           .is_interleaved = params->is_interleaved,
                                           .eps = params->head_norm_eps};
        cuda_launch(
            cuda,
            &(struct op_launch){.kernel = OP_KERNEL_small_heads,
                                .grid_x = params->num_tokens == 0 ? 0 : (uint32_t)num_all_heads,
                                .grid_y = (uint32_t)params->num_tokens,
                                .num_threads = 32},
            &heads);
    }
}

void cuda_small_project(struct backend_cuda *cuda, const struct project_params *params)
{
    struct small_product product = {
        .params = {.weight = params->weight.elements,
                   .a = params->a,
                   .bias = params->bias,
                   .d = params->hidden,
                   .num_tokens = params->num_tokens,
                   .in_features = params->in_features,
                   .out_features = params->hidden_size,
                   .num_tiles = (params->hidden_size + 15) / 16},
        .resident = RESIDENT_KERNELS(project),
        .single = SINGLE_KERNELS(project),
        .stream = STREAM_KERNELS(project),
    };
    launch(cuda, &product);
}

/* Gate and up as the plain rows of one product, then the activation. The product is that of qkv,
 * for heads of one tile each that nobody rotates or stores; positions and slots are read and not
 * used. */
static void mlp_unfused(struct backend_cuda *cuda, const struct mlp_params *params)
{
    int32_t num_tiles = 2 * params->intermediate_size / 16;
    const int32_t *unused = (const int32_t *)(const void *)params->hidden;
    struct small_product product = {
        .params = {.weight = params->gate.elements,
                   .a = params->hidden,
                   .d = cuda->scratch,
                   .positions = unused,
                   .slot_mapping = unused,
                   .num_tokens = params->num_tokens,
                   .in_features = params->hidden_size,
                   .out_features = 2 * params->intermediate_size,
                   .num_tiles = num_tiles,
                   .head_dim = 16,
                   .num_heads = num_tiles,
                   .block_size = 1,
                   .tiles_per_head = 1,
                   .keeps_heads = true},
        .resident = RESIDENT_KERNELS(qkv),
        .single = SINGLE_KERNELS(qkv),
        .stream = STREAM_KERNELS(qkv),
        .norm = &params->norm,
        .normed = params->normed,
    };
    if (!cuda_has_unfused_scratch(cuda, params->num_tokens, params->intermediate_size)) {
        return;
    }
    launch(cuda, &product);
    cuda_silu_mul(cuda, cuda->scratch, params->gate_bias, params->up_bias, params->d,
                  params->num_tokens, params->intermediate_size);
}

void cuda_small_mlp(struct backend_cuda *cuda, const struct mlp_params *params)
{
    if (cuda_is_without(cuda, IMBREX_ABLATE_MLP)) {
        mlp_unfused(cuda, params);
        return;
    }
    struct small_product product = {
        .params = {.weight = params->gate.elements,
                   .a = params->hidden,
                   .bias = params->gate_bias,
                   .d = params->d,
                   .num_tokens = params->num_tokens,
                   .in_features = params->hidden_size,
                   .out_features = 2 * params->intermediate_size,
                   .num_tiles = params->intermediate_size / 8},
        .resident = RESIDENT_KERNELS(mlp),
        .single = SINGLE_KERNELS(mlp),
        .stream = STREAM_KERNELS(mlp),
        .norm = &params->norm,
        .normed = params->normed,
    };
    launch(cuda, &product);
}

void cuda_small_logits(struct backend_cuda *cuda, const struct logits_params *params)
{
    struct small_product product = {
        .params = {.weight = params->weight.elements,
                   .a = params->hidden,
                   .d = params->logits,
                   .num_tokens = params->num_rows,
                   .in_features = params->hidden_size,
                   .out_features = params->vocab_size,
                   .num_tiles = (params->vocab_size + 15) / 16},
        .resident = RESIDENT_KERNELS(logits),
        .single = SINGLE_KERNELS(logits),
        .stream = STREAM_KERNELS(logits),
        .norm = &params->norm,
        .norm_rows = params->rows,
        .normed = params->normed,
    };
    launch(cuda, &product);
}
