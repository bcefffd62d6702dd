/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/kernel_table.h"

#include "ops/cuda/kernels/gemm_mma_variants.h"
#include "ops/cuda/kernels/gemm_swiglu_params.h"
#include "ops/cuda/kernels/gemm_swiglu_variants.h"

#define KERNEL_ROW(stem, tile_form, image_name, tile_schedule, bm, bn, stage_rows, stages, slots) \
    {.name = stem "_" #tile_schedule "_" #bm "x" #bn,                                             \
     .image = KERNEL_IMAGE_##image_name,                                                          \
     .form = tile_form,                                                                           \
     .schedule = TILE_SCHEDULE_##tile_schedule,                                                   \
     .num_threads = GEMM_TILE_THREADS,                                                            \
     .block_m = (bm),                                                                             \
     .block_n = (bn),                                                                             \
     .num_stages = (stages),                                                                      \
     .num_slots = (slots),                                                                        \
     .shared_bytes = GEMM_TILE_SHARED_BYTES(bm, stage_rows, stages, slots),                       \
     .params_bytes = sizeof(struct gemm_tile_params)},

#define PINGPONG_ROW(schedule, bm, bn, stages, slots)                                            \
    KERNEL_ROW("gemm_swiglu_bf16_sm90_pair", TILE_FORM_PAIR, gemm_swiglu_pingpong, schedule, bm, \
               bn, bn, stages, slots)
#define COOPERATIVE_ROW(schedule, bm, bn, stages, slots)                                        \
    KERNEL_ROW("gemm_swiglu_bf16_sm90_pair", TILE_FORM_PAIR, gemm_swiglu_cooperative, schedule, \
               bm, bn, bn, stages, slots)
#define SPLIT_ROW(schedule, bm, bn, stages, slots)                                              \
    KERNEL_ROW("gemm_swiglu_bf16_sm90_split", TILE_FORM_SPLIT, gemm_swiglu_split, schedule, bm, \
               bn, bn, stages, slots)
/* A stage holds rows of gate or of up. */
#define GATE_FIRST_ROW(schedule, bm, bn, stages, slots)                                            \
    KERNEL_ROW("gemm_swiglu_bf16_sm90", TILE_FORM_SPLIT, gemm_swiglu_gate_first, schedule, bm, bn, \
               (bn) / 2, stages, slots)
#define GENERAL_ROW(schedule, bm, bn, stages, slots)                                         \
    KERNEL_ROW("gemm_swiglu_bf16_sm90_general", TILE_FORM_GENERAL_PAIR, gemm_swiglu_general, \
               schedule, bm, bn, bn, stages, slots)
#define GENERAL_SPLIT_ROW(schedule, bm, bn, stages, slots)                     \
    KERNEL_ROW("gemm_swiglu_bf16_sm90_general_split", TILE_FORM_GENERAL_SPLIT, \
               gemm_swiglu_general_split, schedule, bm, bn, bn, stages, slots)
#define PLAIN_ROW(schedule, bm, bn, stages, slots) \
    KERNEL_ROW("gemm_bf16_sm90_plain", TILE_FORM_PLAIN, gemm, schedule, bm, bn, bn, stages, slots)

#define PORTABLE_ROW(stem, tile_form, image_name, bm, bn, bk, stages, warps_m, warps_n) \
    {.name = stem "_multistage_" #bm "x" #bn,                                           \
     .image = KERNEL_IMAGE_##image_name,                                                \
     .form = tile_form,                                                                 \
     .schedule = TILE_SCHEDULE_multistage,                                              \
     .is_portable = true,                                                               \
     .num_threads = 32 * (warps_m) * (warps_n),                                         \
     .block_m = (bm),                                                                   \
     .block_n = (bn),                                                                   \
     .num_stages = (stages),                                                            \
     .shared_bytes = GEMM_MMA_SHARED_BYTES(bm, bn, bk, stages),                         \
     .params_bytes = sizeof(struct gemm_mma_params)},
#define PORTABLE_SWIGLU_ROW(...) \
    PORTABLE_ROW("gemm_swiglu_bf16_sm80", TILE_FORM_SPLIT, gemm_mma, __VA_ARGS__)
#define PORTABLE_GENERAL_ROW(...)                                                            \
    PORTABLE_ROW("gemm_swiglu_bf16_sm80_general", TILE_FORM_GENERAL_SPLIT, gemm_mma_general, \
                 __VA_ARGS__)
#define PORTABLE_GEMM_ROW(...) \
    PORTABLE_ROW("gemm_bf16_sm80", TILE_FORM_PLAIN, gemm_mma, __VA_ARGS__)

static const struct kernel_variant kernels[] = {
    GEMM_SWIGLU_PAIR_PINGPONG(PINGPONG_ROW) GEMM_SWIGLU_PAIR_COOPERATIVE(COOPERATIVE_ROW)
        GEMM_SWIGLU_SPLIT_VARIANTS(SPLIT_ROW) GEMM_SWIGLU_GATE_FIRST_VARIANTS(GATE_FIRST_ROW)
            GEMM_SWIGLU_GENERAL_VARIANTS(GENERAL_ROW)
                GEMM_SWIGLU_GENERAL_SPLIT_VARIANTS(GENERAL_SPLIT_ROW)
                    GEMM_MMA_VARIANTS(PORTABLE_SWIGLU_ROW)
                        GEMM_MMA_GENERAL_VARIANTS(PORTABLE_GENERAL_ROW) GEMM_VARIANTS(PLAIN_ROW)
                            GEMM_MMA_VARIANTS(PORTABLE_GEMM_ROW)};

#define COUNT_ROW(...) +1
enum {
    NUM_SWIGLU_KERNELS = 0 GEMM_SWIGLU_PAIR_VARIANTS(COUNT_ROW)
        GEMM_SWIGLU_SPLIT_VARIANTS(COUNT_ROW) GEMM_SWIGLU_GATE_FIRST_VARIANTS(COUNT_ROW)
            GEMM_SWIGLU_GENERAL_VARIANTS(COUNT_ROW) GEMM_SWIGLU_GENERAL_SPLIT_VARIANTS(COUNT_ROW)
                GEMM_MMA_VARIANTS(COUNT_ROW) GEMM_MMA_GENERAL_VARIANTS(COUNT_ROW),
    NUM_KERNELS = sizeof(kernels) / sizeof(kernels[0]),
};

int32_t kernel_table_count(void)
{
    return NUM_KERNELS;
}

const struct kernel_variant *kernel_table_at(int32_t kernel_idx)
{
    return &kernels[kernel_idx];
}

void kernel_table_range(enum imbrex_kernel_op op, int32_t *begin, int32_t *end)
{
    *begin = *end = 0;
    switch (op) {
    case IMBREX_KERNEL_OP_GEMM_SWIGLU:
        *end = NUM_SWIGLU_KERNELS;
        break;
    case IMBREX_KERNEL_OP_GEMM:
        *begin = NUM_SWIGLU_KERNELS;
        *end = NUM_KERNELS;
        break;
    }
}
