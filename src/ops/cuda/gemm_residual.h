/* SPDX-License-Identifier: Apache-2.0 */
/* Products with an fp32 result: the projections onto the residual stream, and logits. */
#ifndef IMBREX_OPS_CUDA_GEMM_RESIDUAL_H
#define IMBREX_OPS_CUDA_GEMM_RESIDUAL_H

#include "ops/cuda/tile_choice.h"

struct backend_cuda;

/* d = a · bᵀ + bias, or added to d. Rows without gaps, addresses multiples of 16 bytes. */
struct residual_product {
    const void *a;     /* [m, k] bf16 */
    const void *b;     /* [n, k] bf16, which no kernel on the stream writes */
    const float *bias; /* [n] or NULL */
    float *d;          /* [m, n] */
    int32_t m, n, k;   /* n and k multiples of 8 */
    bool adds;
};

/* How a product is launched. */
struct residual_plan {
    struct tile_plan tile;  /* whose kernel_idx is that of the plain twin */
    int32_t variant_idx;    /* of GEMM_RESIDUAL_VARIANTS */
    int32_t num_splits;     /* of k */
    int32_t tiles_of_split; /* along m */
};

/* What was chosen for a product. */
struct residual_choice {
    int32_t m, n, k; /* m 0: free */
    bool may_split;
    struct residual_plan plan;
};
#define NUM_RESIDUAL_CHOICES 64

/* Asynchronous on the backend's stream. Without a plan the one that is expected to be the fastest:
 * k is split only where the result is added, and not in batch-invariant mode. Where it is not
 * split, a row's bits depend neither on m, nor on the rows beside it, nor on the plan. A portable
 * device takes any n, splits nothing and looks at no plan. */
void cuda_gemm_residual(struct backend_cuda *cuda, const struct residual_product *product,
                        const struct residual_plan *plan);

int32_t gemm_residual_num_variants(void);
/* The best plan of one kernel for a number of splits, 1 to 8; false if there is none, or the
 * scratch memory is too small. *cost_us: of the cost model. */
bool gemm_residual_plan(const struct backend_cuda *cuda, const struct residual_product *product,
                        int32_t variant_idx, int32_t num_splits, struct residual_plan *plan,
                        double *cost_us);

/* Of the scratch memory, for products of at most this many rows and columns: without it, k is not
 * split. */
size_t gemm_residual_scratch_bytes(int32_t max_rows, int32_t max_columns);

#endif
