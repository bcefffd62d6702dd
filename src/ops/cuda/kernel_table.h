/* SPDX-License-Identifier: Apache-2.0 */
/* The host's table of compiled kernels, from the same list that nvcc makes them of. */
#ifndef IMBREX_OPS_CUDA_KERNEL_TABLE_H
#define IMBREX_OPS_CUDA_KERNEL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "imbrex_ops.h"
#include "ops/cuda/kernel_image.h"

/* How the weights reach a kernel; see kernels/gemm_swiglu_params.h. */
enum tile_form {
    TILE_FORM_PAIR,          /* gate and up interleaved by 8 rows out of one view of both */
    TILE_FORM_SPLIT,         /* gate and up through a tensor map each; portable: any two matrices */
    TILE_FORM_PLAIN,         /* one matrix, no activation */
    TILE_FORM_GENERAL_PAIR,  /* as pair, with biases and any gating */
    TILE_FORM_GENERAL_SPLIT, /* as split, likewise */
};

static inline bool tile_form_is_general(enum tile_form form)
{
    return form == TILE_FORM_GENERAL_PAIR || form == TILE_FORM_GENERAL_SPLIT;
}
static inline enum tile_form tile_fused_form(bool is_split, bool is_general)
{
    return is_general ? (is_split ? TILE_FORM_GENERAL_SPLIT : TILE_FORM_GENERAL_PAIR)
                      : (is_split ? TILE_FORM_SPLIT : TILE_FORM_PAIR);
}

enum tile_schedule {
    TILE_SCHEDULE_pingpong,
    TILE_SCHEDULE_cooperative,
    TILE_SCHEDULE_multistage, /* the portable kernels, see kernels/gemm_mma.cu */
    TILE_SCHEDULE_gate_first, /* TILE_FORM_SPLIT, though it takes matrices of any layout */
};

struct kernel_variant {
    const char *name; /* the symbol */
    enum kernel_image image;
    enum tile_form form;
    enum tile_schedule schedule;
    bool is_portable; /* for compute capability 8.0 and newer; else for 9.0 alone */
    int32_t num_threads;
    int32_t block_m, block_n, num_stages, num_slots;
    int32_t shared_bytes;
    size_t params_bytes;
};

/* Whether it can take weights that lie in this form. */
static inline bool kernel_serves(const struct kernel_variant *kernel, enum tile_form form)
{
    bool takes_any_layout = kernel->is_portable || kernel->schedule == TILE_SCHEDULE_gate_first;
    return kernel->form == form ||
           (takes_any_layout &&
            ((kernel->form == TILE_FORM_SPLIT && form == TILE_FORM_PAIR) ||
             (kernel->form == TILE_FORM_GENERAL_SPLIT && form == TILE_FORM_GENERAL_PAIR)));
}

/* Kernels of all ops, [0, kernel_table_count()). */
int32_t kernel_table_count(void);
const struct kernel_variant *kernel_table_at(int32_t kernel_idx);
/* The kernels of an op are [*begin, *end) of the table; none for an op that does not exist. */
void kernel_table_range(enum imbrex_kernel_op op, int32_t *begin, int32_t *end);

#endif
