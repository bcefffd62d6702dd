/* SPDX-License-Identifier: Apache-2.0 */
/* Products of many tokens: a norm, a GEMM and what belongs to its result, each a kernel. Where the
 * mainloop of the GEMM is the limit, more fusion gains nothing but what the norms move. */
#include "ops/cuda/backend_cuda.h"

#include "ops/cuda/gemm_residual.h"

#define BF16_BYTES 2
/* Tokens that the unfused products of gate and up take at a time: as many as a GEMM needs to be as
 * fast as with more, since scratch memory holds the products. */
#define UNFUSED_TOKENS 2048

/* d = a · bᵀ in bf16. */
static void gemm(struct backend_cuda *cuda, const void *a, const void *b, const float *bias,
                 void *d, int32_t num_tokens, int32_t in_features, int32_t out_features)
{
    if (cuda->status != IMBREX_STATUS_OK) {
        return;
    }
    struct imbrex_gemm_params params = {.a = a,
                                        .b = b,
                                        .bias = bias,
                                        .d = d,
                                        .num_tokens = num_tokens,
                                        .in_features = in_features,
                                        .out_features = out_features,
                                        .weights_settled = true};
    cuda_keep(cuda, imbrex_gemm(cuda->device, &params, NULL, cuda->stream, &cuda->error));
}

void cuda_large_qkv(struct backend_cuda *cuda, const struct qkv_params *params)
{
    int32_t num_all_heads = params->num_heads + 2 * params->kv.num_kv_heads;
    bool is_scaled = kv_dtype_has_scales(params->kv.dtype);
    /* What stays beside q has q's norm in the fused kernel. */
    bool has_norms = params->q_norm != NULL || params->k_norm != NULL;

    if (!cuda_rope_kv_takes(params->kv.head_dim)) {
        cuda_plain_qkv(cuda, params);
        return;
    }
    if (params->num_tokens == 0) {
        return;
    }
    cuda_rmsnorm(cuda, params->hidden, NULL, &params->norm, params->normed, params->num_tokens,
                 params->hidden_size);
    if (!cuda->device->is_portable && !(is_scaled && has_norms) &&
        gemm_qkv_is_worth_it(cuda, params)) {
        cuda_gemm_qkv(cuda, params, NULL);
        if (is_scaled) {
            cuda_kv_store(cuda, params);
        }
        return;
    }
    gemm(cuda, params->normed, params->q_proj.elements, params->q_bias, params->qkv,
         params->num_tokens, params->hidden_size, num_all_heads * params->kv.head_dim);
    cuda_rope_kv(cuda, params);
}

void cuda_large_project(struct backend_cuda *cuda, const struct project_params *params)
{
    cuda_gemm_residual(cuda,
                       &(struct residual_product){.a = params->a,
                                                  .b = params->weight.elements,
                                                  .bias = params->bias,
                                                  .d = params->hidden,
                                                  .m = params->num_tokens,
                                                  .n = params->hidden_size,
                                                  .k = params->in_features,
                                                  .adds = true},
                       NULL);
}

static size_t unfused_bytes(int32_t num_tokens, int32_t intermediate_size)
{
    return (size_t)num_tokens * 2 * (size_t)intermediate_size * BF16_BYTES;
}

bool cuda_has_unfused_scratch(struct backend_cuda *cuda, int32_t num_tokens,
                              int32_t intermediate_size)
{
    size_t num_bytes = unfused_bytes(num_tokens, intermediate_size);
    if (cuda->scratch_bytes < num_bytes) {
        cuda_keep(cuda,
                  error_set(&cuda->error, IMBREX_STATUS_INTERNAL,
                            "gate and up of %d tokens, unfused: expected %zu bytes of scratch "
                            "memory, found %zu",
                            (int)num_tokens, num_bytes, cuda->scratch_bytes));
        return false;
    }
    return true;
}

/* gate | up as one product into scratch memory, then the activation. */
static void mlp_unfused(struct backend_cuda *cuda, const struct mlp_params *params)
{
    int32_t width = params->intermediate_size;
    for (int32_t begin = 0; begin < params->num_tokens; begin += UNFUSED_TOKENS) {
        int32_t num_tokens = params->num_tokens - begin;
        num_tokens = num_tokens < UNFUSED_TOKENS ? num_tokens : UNFUSED_TOKENS;
        const unsigned char *normed = params->normed;
        unsigned char *d = params->d;
        if (!cuda_has_unfused_scratch(cuda, num_tokens, width)) {
            return;
        }
        gemm(cuda, normed + (size_t)begin * (size_t)params->hidden_size * BF16_BYTES,
             params->gate.elements, NULL, cuda->scratch, num_tokens, params->hidden_size,
             2 * width);
        cuda_silu_mul(cuda, cuda->scratch, params->gate_bias, params->up_bias,
                      d + (size_t)begin * (size_t)width * BF16_BYTES, num_tokens, width);
    }
}

void cuda_large_mlp(struct backend_cuda *cuda, const struct mlp_params *params)
{
    if (params->num_tokens == 0) {
        return;
    }
    cuda_rmsnorm(cuda, params->hidden, NULL, &params->norm, params->normed, params->num_tokens,
                 params->hidden_size);
    if (cuda->status != IMBREX_STATUS_OK) {
        return;
    }
    if (params->gate_bias != NULL || params->up_bias != NULL ||
        cuda_is_without(cuda, IMBREX_ABLATE_MLP)) {
        mlp_unfused(cuda, params);
        return;
    }
    struct imbrex_gemm_swiglu_params product = {.a = params->normed,
                                                .gate = params->gate.elements,
                                                .up = params->up.elements,
                                                .d = params->d,
                                                .num_tokens = params->num_tokens,
                                                .hidden_size = params->hidden_size,
                                                .intermediate_size = params->intermediate_size,
                                                .weights_settled = true};
    cuda_keep(cuda, imbrex_gemm_swiglu(cuda->device, &product, NULL, cuda->stream, &cuda->error));
}

void cuda_large_logits(struct backend_cuda *cuda, const struct logits_params *params)
{
    /* The copy engine stores whole pieces of 16 bytes, and its rows begin at such. */
    if (params->vocab_size % TILE_STORE_COLUMNS != 0 && !cuda->device->is_portable) {
        cuda_plain_logits(cuda, params);
        return;
    }
    if (params->num_rows == 0) {
        return;
    }
    cuda_rmsnorm(cuda, params->hidden, params->rows, &params->norm, params->normed,
                 params->num_rows, params->hidden_size);
    cuda_gemm_residual(cuda,
                       &(struct residual_product){.a = params->normed,
                                                  .b = params->weight.elements,
                                                  .d = params->logits,
                                                  .m = params->num_rows,
                                                  .n = params->vocab_size,
                                                  .k = params->hidden_size,
                                                  .adds = false},
                       NULL);
}

size_t cuda_large_scratch_bytes(const struct backend_shape *shape)
{
    int32_t num_tokens = shape->max_tokens < UNFUSED_TOKENS ? shape->max_tokens : UNFUSED_TOKENS;
    size_t mlp_bytes =
        shape->has_unfused_mlp ? unfused_bytes(num_tokens, shape->intermediate_size) : 0;
    size_t split_bytes = gemm_residual_scratch_bytes(shape->max_tokens, shape->hidden_size);
    return mlp_bytes > split_bytes ? mlp_bytes : split_bytes;
}
