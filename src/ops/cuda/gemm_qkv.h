/* SPDX-License-Identifier: Apache-2.0 */
/* The product for q, k and v with what follows it in the same kernel: norms of heads, RoPE, the KV
 * store. */
#ifndef IMBREX_OPS_CUDA_GEMM_QKV_H
#define IMBREX_OPS_CUDA_GEMM_QKV_H

#include "ops/backend.h"
#include "ops/cuda/tile_choice.h"

struct backend_cuda;

/* How a product is launched. */
struct qkv_plan {
    struct tile_plan tile; /* whose kernel_idx is that of the plain twin */
    int32_t variant_idx;   /* of GEMM_QKV_VARIANTS */
};

/* What was chosen for a product. */
struct qkv_choice {
    int32_t m, n, k; /* m 0: free */
    bool is_worth_it;
    struct qkv_plan plan;
};
#define NUM_QKV_CHOICES 32

/* Whether head_dim is one of the kernels', 64 or 128, and they are expected to be faster than the
 * plain product and what follows it as a kernel of its own. In batch-invariant mode head_dim alone
 * decides. */
bool gemm_qkv_is_worth_it(struct backend_cuda *cuda, const struct qkv_params *params);
/* From params->normed on, asynchronous on the backend's stream; without a plan the one that is
 * expected to be the fastest. A row's bits do not depend on the plan. */
void cuda_gemm_qkv(struct backend_cuda *cuda, const struct qkv_params *params,
                   const struct qkv_plan *plan);

int32_t gemm_qkv_num_variants(void);
/* The best plan of one kernel; false if it is not for this head_dim. *cost_us: of the cost model.
 */
bool gemm_qkv_plan(const struct backend_cuda *cuda, const struct qkv_params *params,
                   int32_t variant_idx, struct qkv_plan *plan, double *cost_us);

#endif
