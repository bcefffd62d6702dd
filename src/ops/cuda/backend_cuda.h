/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a layer on a GPU: which kernels each one is made of is decided here, by the number
 * of tokens; cuda_*.c launch them.
 *
 * Rules of all kernels here. They wait for the kernel ahead of them on the stream
 * (grid_wait_for_previous, every thread of every CTA) before they touch anything that a kernel
 * writes: all but weights and what weights_place stored. They let the next one begin early
 * (grid_release_next). Nothing is allocated, nothing synchronises, and a launch may be captured:
 * grids follow from what the host knows of a step (counts, widest table), the rest is read on the
 * device. Rows of a step may be padding: then slot_mapping is negative and what they compute is
 * never looked at, but they read no memory outside of the step's. */
#ifndef IMBREX_OPS_CUDA_BACKEND_CUDA_H
#define IMBREX_OPS_CUDA_BACKEND_CUDA_H

#include "ops/backend.h"
#include "ops/cuda/cuda_device.h"
#include "ops/cuda/gemm_qkv.h"
#include "ops/cuda/gemm_residual.h"
#include "ops/cuda/op_kernels.h"

struct backend_cuda {
    struct backend backend; /* first: the table's functions get it */
    struct imbrex_device *device;
    struct backend_cuda_options options;
    struct backend_shape shape;
    bool is_plain;    /* sizes that only the plain kernels take, or fp32 */
    bool is_portable; /* kernels of the portable images alone, see cuda_device.h */
    CUstream stream;
    unsigned char *scratch;
    size_t scratch_bytes;
    enum imbrex_status status; /* of the first failure since begin */
    struct imbrex_error error;
    struct residual_choice residual_choices[NUM_RESIDUAL_CHOICES]; /* by a hash of the product */
    struct qkv_choice qkv_choices[NUM_QKV_CHOICES];
};

/* backend_cuda_create without a struct device: for tests of kernels. */
enum imbrex_status backend_cuda_create_on(struct imbrex_device *device,
                                          const struct backend_cuda_options *options,
                                          const struct backend_shape *shape, void *scratch,
                                          size_t scratch_bytes, struct backend **backend,
                                          struct imbrex_error *err);

/* How a kernel is launched. */
struct op_launch {
    enum op_kernel kernel;
    uint32_t grid_x, grid_y, grid_z; /* 0 counts as 1 for y and z; a grid_x of 0 launches nothing */
    uint32_t num_threads;
    uint32_t shared_bytes; /* dynamic */
    uint32_t cluster_x;    /* CTAs of a cluster; 0 or 1: none */
};

/* Launches on the backend's stream, with programmatic overlap unless ablated. After a failure it
 * does nothing. */
void cuda_launch(struct backend_cuda *cuda, const struct op_launch *launch, const void *params);
static inline int32_t divide_up(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

/* Whether a part was ablated. */
bool cuda_is_without(const struct backend_cuda *cuda, enum imbrex_ablation part);
/* Keeps the first failure. */
void cuda_keep(struct backend_cuda *cuda, enum imbrex_status status);

/* ---- products, by number of tokens; bf16 ----------------------------------------------------- */

/* Most tokens of the cuda_small_* calls. */
#define CUDA_SMALL_TOKENS 64
/* Whether the GPU has the shared memory that so many take; 8 always. */
bool cuda_small_takes(const struct backend_cuda *cuda, int32_t num_tokens);

void cuda_small_qkv(struct backend_cuda *cuda, const struct qkv_params *params);
void cuda_small_project(struct backend_cuda *cuda, const struct project_params *params);
void cuda_small_mlp(struct backend_cuda *cuda, const struct mlp_params *params);
void cuda_small_logits(struct backend_cuda *cuda, const struct logits_params *params);

/* Any number of tokens, on the Hopper GEMM or the portable one. In batch-invariant mode the order
 * of summation depends on nothing but the matrix. */
void cuda_large_qkv(struct backend_cuda *cuda, const struct qkv_params *params);
void cuda_large_project(struct backend_cuda *cuda, const struct project_params *params);
void cuda_large_mlp(struct backend_cuda *cuda, const struct mlp_params *params);
void cuda_large_logits(struct backend_cuda *cuda, const struct logits_params *params);
size_t cuda_large_scratch_bytes(const struct backend_shape *shape);

/* ---- attention ------------------------------------------------------------------------------- */

/* bf16, or a cache of 8-bit elements with scales; head_dim 64 or 128. Sequences with one token in
 * the step; the others are left alone. */
void cuda_decode_attend(struct backend_cuda *cuda, const struct attend_params *params);
size_t cuda_decode_attention_scratch_bytes(const struct backend_shape *shape);

/* The same types and head_dims, block_size 16. Sequences with at least min_query tokens in the
 * step, min_query >= 1. */
void cuda_prefill_attend(struct backend_cuda *cuda, const struct attend_params *params,
                         int32_t min_query);

/* bf16, any head_dim up to 256 that is a multiple of 16, on mma.sync: for the head_dims that the
 * two above do not take, and to measure them against. All sequences. */
void cuda_tensor_attend(struct backend_cuda *cuda, const struct attend_params *params);
/* Whether there is a kernel for the head_dim that has the shared memory it needs. */
bool cuda_tensor_attend_takes(const struct backend_cuda *cuda, int32_t head_dim);

/* ---- single rows ----------------------------------------------------------------------------- */

void cuda_embedding(struct backend_cuda *cuda, const struct embedding_params *params);
void cuda_rope_table(struct backend_cuda *cuda, const struct rope_table_params *params);

/* bf16. d [num_rows, hidden_size]: norms of the rows of a that `rows` names, or of the first ones
 * where it is NULL. hidden_size is a multiple of 4; all addresses are of 16 bytes. */
void cuda_rmsnorm(struct backend_cuda *cuda, const float *a, const int32_t *rows,
                  const struct norm_params *norm, void *d, int32_t num_rows, int32_t hidden_size);
/* bf16. What follows the product in qkv: norms of heads, RoPE, the KV store. */
void cuda_rope_kv(struct backend_cuda *cuda, const struct qkv_params *params);
/* The last of it alone, of a cache with scales: k and v out of qkv. */
void cuda_kv_store(struct backend_cuda *cuda, const struct qkv_params *params);
bool cuda_rope_kv_takes(int32_t head_dim);
/* Whether scratch memory holds gate and up of so many tokens, where they are a product of their
 * own; if not, that is kept as the step's failure. */
bool cuda_has_unfused_scratch(struct backend_cuda *cuda, int32_t num_tokens,
                              int32_t intermediate_size);
/* d = silu(gate + gate_bias) * (up + up_bias); bf16. gate_up [num_tokens, 2 * intermediate_size] */
void cuda_silu_mul(struct backend_cuda *cuda, const void *gate_up, const float *gate_bias,
                   const float *up_bias, void *d, int32_t num_tokens, int32_t intermediate_size);
/* hidden += bias + partial products [num_splits] x split_stride elements, in their order. */
void cuda_split_add(struct backend_cuda *cuda, float *hidden, const float *partial,
                    int64_t split_stride, const float *bias, int32_t num_tokens,
                    int32_t num_columns, int32_t num_splits);

/* ---- sampling -------------------------------------------------------------------------------- */

void cuda_history(struct backend_cuda *cuda, const struct history_params *params);
/* params->scratch is not used, the backend's is. */
void cuda_sample(struct backend_cuda *cuda, const struct sample_params *params);
size_t cuda_sample_scratch_bytes(const struct backend_shape *shape);

/* ---- plain kernels: fp32 or bf16, any size, no tensor cores ---------------------------------- */

void cuda_plain_qkv(struct backend_cuda *cuda, const struct qkv_params *params);
void cuda_plain_attend(struct backend_cuda *cuda, const struct attend_params *params);
void cuda_plain_project(struct backend_cuda *cuda, const struct project_params *params);
void cuda_plain_mlp(struct backend_cuda *cuda, const struct mlp_params *params);
void cuda_plain_logits(struct backend_cuda *cuda, const struct logits_params *params);

#endif
