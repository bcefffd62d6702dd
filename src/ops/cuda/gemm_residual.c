/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernel, and in how many parts of k. Costs are nearly those of the plain twin
 * (tile_choice.h): a product split S times along k has the tiles of one with S times the rows and
 * an S-th of k. The parts go to scratch memory and are added up by a kernel behind it, always in
 * the same order. */
#include "ops/cuda/gemm_residual.h"

#include <string.h>

#include "ops/cuda/backend_cuda.h"
#include "ops/cuda/gemm_launch.h"
#include "ops/cuda/gemm_mma_launch.h"
#include "ops/cuda/kernels/gemm_residual_params.h"
#include "ops/cuda/matrix_map.h"

#define F32_ELEMENTS 4     /* of the 16 bytes that the copy engine moves at least */
#define ALL_WIDE (1 << 28) /* more tiles along n than there can be */
#define EARLY_STAGES 2     /* as in gemm_launch.c */
#define EARLY_STAGES_UNSHARED 3
#define BOX_ROWS 16 /* of D, that one warp stores at a time */
#define MAX_SPLITS 8
#define MIN_SPLIT_BLOCKS 4 /* k-blocks of a split */
/* A split product is one wave, so this holds all of them: 132 tiles of 256 x 128. */
#define SCRATCH_ELEMENTS (132 * 256 * 128)
/* What adding up takes: the kernel, and moving the parts, which are in L2. */
#define SPLIT_LAUNCH_US 2.5
#define SPLIT_PART_US 0.5 /* of each part */
#define SPLIT_BYTES_PER_US 3.0e6
/* What the model leaves out and splitting makes up for, seen in a sweep on an H200 of 18 products
 * of 128 to 8192 rows: steps along k of tiles smaller than SMALL_TILE take longer than their
 * products and loads, and so do, by less, those of two warpgroups that share a tile. */
#define SMALL_TILE (128 * 112)
#define SMALL_TILE_STEP_US 0.08
#define SHARED_TILE_STEP_US 0.02

struct residual_variant {
    enum op_kernel kernel;
    enum tile_schedule schedule;
    int32_t block_m, block_n, shared_bytes;
};

static const struct residual_variant variants[] = {
#define RESIDUAL_VARIANT(with, tile_schedule, bm, bn, stages, slots)            \
    {.kernel = OP_KERNEL_gemm_residual_bf16_sm90_##tile_schedule##_##bm##x##bn, \
     .schedule = TILE_SCHEDULE_##tile_schedule,                                 \
     .block_m = (bm),                                                           \
     .block_n = (bn),                                                           \
     .shared_bytes = GEMM_TILE_SHARED_BYTES(bm, bn, stages, slots)},
    GEMM_RESIDUAL_VARIANTS(RESIDUAL_VARIANT, )
#undef RESIDUAL_VARIANT
};
enum { NUM_VARIANTS = sizeof(variants) / sizeof(variants[0]) };

size_t gemm_residual_scratch_bytes(int32_t max_rows, int32_t max_columns)
{
    size_t rows = ((size_t)max_rows + 255) / 256 * 256;
    size_t elements = MAX_SPLITS * rows * (size_t)max_columns;
    return sizeof(float) * (elements < SCRATCH_ELEMENTS ? elements : SCRATCH_ELEMENTS);
}

static bool is_twin(const struct residual_variant *variant, const struct kernel_variant *kernel)
{
    return kernel->schedule == variant->schedule && kernel->block_m == variant->block_m &&
           kernel->block_n == variant->block_n;
}

/* -1: no variant is the twin of this kernel. */
static int32_t find_variant(int32_t kernel_idx)
{
    for (int32_t i = 0; i < NUM_VARIANTS; i++) {
        if (is_twin(&variants[i], kernel_table_at(kernel_idx))) {
            return i;
        }
    }
    return -1;
}

/* Every variant has a twin. */
static int32_t find_twin(int32_t variant_idx)
{
    int32_t begin, end;
    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    while (begin + 1 < end && !is_twin(&variants[variant_idx], kernel_table_at(begin))) {
        begin++;
    }
    return begin;
}

static int32_t num_k_blocks(const struct residual_product *product)
{
    return (product->k + GEMM_TILE_BLOCK_K - 1) / GEMM_TILE_BLOCK_K;
}

/* The product that has the tiles of a split one. */
static struct tile_problem problem_of(const struct residual_product *product,
                                      const struct residual_plan *plan)
{
    struct tile_problem problem = {
        .form = TILE_FORM_PLAIN, .m = product->m, .columns = product->n, .k = product->k};
    if (plan->num_splits > 1) {
        int32_t block_m = variants[plan->variant_idx].block_m;
        problem.m = plan->num_splits * plan->tiles_of_split * block_m;
        problem.k =
            (num_k_blocks(product) + plan->num_splits - 1) / plan->num_splits * GEMM_TILE_BLOCK_K;
    }
    return problem;
}

static size_t split_bytes(const struct residual_product *product, const struct residual_plan *plan)
{
    return sizeof(float) * (size_t)plan->num_splits * (size_t)plan->tiles_of_split *
           (size_t)variants[plan->variant_idx].block_m * (size_t)product->n;
}

int32_t gemm_residual_num_variants(void)
{
    return NUM_VARIANTS;
}

bool gemm_residual_plan(const struct backend_cuda *cuda, const struct residual_product *product,
                        int32_t variant_idx, int32_t num_splits, struct residual_plan *plan,
                        double *cost_us)
{
    struct tile_machine machine = cuda_device_machine(cuda->device);
    int32_t block_m = variants[variant_idx].block_m, kernel_idx = find_twin(variant_idx);
    struct residual_plan found = {.variant_idx = variant_idx,
                                  .num_splits = num_splits,
                                  .tiles_of_split = (product->m + block_m - 1) / block_m};
    struct tile_problem problem = problem_of(product, &found);

    if (num_splits > num_k_blocks(product) ||
        tile_choose(&machine, &problem, kernel_idx, kernel_idx + 1, &found.tile, NULL) !=
            IMBREX_STATUS_OK) {
        return false;
    }
    double added_us = 0.0;
    if (num_splits > 1) {
        /* A cluster lies in one split. */
        if (found.tiles_of_split % found.tile.cluster_m != 0) {
            found.tile.cluster_m = 1;
        }
        if (split_bytes(product, &found) > cuda->scratch_bytes) {
            return false;
        }
        double moved_bytes = sizeof(float) * (num_splits + 2.0) * product->m * product->n;
        added_us = SPLIT_LAUNCH_US + SPLIT_PART_US * num_splits + moved_bytes / SPLIT_BYTES_PER_US;
    }
    const struct residual_variant *variant = &variants[variant_idx];
    double steps = (double)problem.k / GEMM_TILE_BLOCK_K;
    added_us += variant->block_m * variant->block_n < SMALL_TILE ? SMALL_TILE_STEP_US * steps : 0.0;
    added_us += variant->schedule == TILE_SCHEDULE_cooperative ? SHARED_TILE_STEP_US * steps : 0.0;
    *plan = found;
    *cost_us = tile_cost_us(&machine, &problem, &found.tile) + added_us;
    return true;
}

/* Whether all tiles are computed at the same time. */
static bool is_one_wave(const struct backend_cuda *cuda, const struct residual_product *product,
                        const struct residual_plan *plan)
{
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_problem problem = problem_of(product, plan);
    return tile_grid_of(&machine, &problem, &plan->tile).num_waves == 1;
}

static bool is_same_plan(const struct tile_plan *a, const struct tile_plan *b)
{
    return a->kernel_idx == b->kernel_idx && a->cluster_m == b->cluster_m &&
           a->cluster_n == b->cluster_n && a->group_m == b->group_m &&
           a->num_tiles_n == b->num_tiles_n;
}

/* The plan that was measured to be the plain twin's best, if one was and its kernel is here. */
static bool find_measured(const struct backend_cuda *cuda, const struct residual_product *product,
                          struct residual_plan *plan)
{
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_problem problem = {
        .form = TILE_FORM_PLAIN, .m = product->m, .columns = product->n, .k = product->k};
    int32_t begin, end;
    struct tile_plan measured, modelled;

    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    if (cuda_device_choose(cuda->device, &problem, begin, end, &measured, NULL) !=
            IMBREX_STATUS_OK ||
        tile_choose(&machine, &problem, begin, end, &modelled, NULL) != IMBREX_STATUS_OK) {
        return false;
    }
    int32_t variant_idx = find_variant(measured.kernel_idx);
    if (variant_idx < 0 || is_same_plan(&measured, &modelled)) {
        return false;
    }
    *plan = (struct residual_plan){.tile = measured, .variant_idx = variant_idx, .num_splits = 1};
    return true;
}

static enum imbrex_status choose(struct backend_cuda *cuda, const struct residual_product *product,
                                 bool may_split, struct residual_plan *plan)
{
    struct residual_plan best = {.num_splits = 0}, found;
    double best_us = 0.0, cost_us;
    int32_t max_splits = may_split ? num_k_blocks(product) / MIN_SPLIT_BLOCKS : 1;
    max_splits = max_splits < MAX_SPLITS ? max_splits : MAX_SPLITS;

    for (int32_t i = 0; i < NUM_VARIANTS; i++) {
        for (int32_t splits = 1; splits == 1 || splits <= max_splits; splits++) {
            if (gemm_residual_plan(cuda, product, i, splits, &found, &cost_us) &&
                (splits == 1 || is_one_wave(cuda, product, &found)) &&
                (best.num_splits == 0 || cost_us < best_us)) {
                best = found;
                best_us = cost_us;
            }
        }
    }
    if (best.num_splits == 0) {
        return error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                         "gemm_residual: no kernel for m %d, n %d, k %d", (int)product->m,
                         (int)product->n, (int)product->k);
    }
    if (best.num_splits == 1 && find_measured(cuda, product, &found)) {
        best = found;
    }
    *plan = best;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status find_plan(struct backend_cuda *cuda,
                                    const struct residual_product *product,
                                    struct residual_plan *plan)
{
    bool may_split = product->adds && !cuda->options.batch_invariant;
    uint32_t hash = (uint32_t)product->m * 2654435761u ^ (uint32_t)product->n * 2246822519u ^
                    (uint32_t)product->k * 3266489917u ^ (may_split ? 1u << 16 : 0u);
    struct residual_choice *entry = &cuda->residual_choices[(hash >> 16) % NUM_RESIDUAL_CHOICES];
    if (entry->m != product->m || entry->n != product->n || entry->k != product->k ||
        entry->may_split != may_split) {
        struct residual_choice chosen = {
            .m = product->m, .n = product->n, .k = product->k, .may_split = may_split};
        TRY(choose(cuda, product, may_split, &chosen.plan));
        *entry = chosen;
    }
    *plan = entry->plan;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status fill_params(struct backend_cuda *cuda,
                                      const struct residual_product *product,
                                      const struct residual_plan *plan,
                                      const struct tile_grid *grid,
                                      struct gemm_residual_params *params)
{
    const struct residual_variant *variant = &variants[plan->variant_idx];
    bool is_split = plan->num_splits > 1;
    bool is_mixed = grid->num_wide < grid->num_tiles_n;
    int32_t num_pieces = variant->block_n / TILE_PIECE_ROWS;
    int32_t share = (num_pieces + plan->tile.cluster_m - 1) / plan->tile.cluster_m;
    const void *d = is_split ? (const void *)cuda->scratch : product->d;
    int64_t d_rows =
        is_split ? (int64_t)plan->num_splits * plan->tiles_of_split * variant->block_m : product->m;
    struct gemm_tile_params *tile = &params->tile;

    struct matrix_map d_map = {.base = d,
                               .num_rows = d_rows,
                               .num_columns = product->n,
                               .box_columns = GEMM_RESIDUAL_CHUNK_COLUMNS,
                               .box_rows = BOX_ROWS,
                               .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                               .is_f32 = true};
    TRY(matrix_map_find(cuda,
                        &(struct matrix_map){.base = product->a,
                                             .num_rows = product->m,
                                             .num_columns = product->k,
                                             .box_columns = GEMM_TILE_BLOCK_K,
                                             .box_rows = variant->block_m / plan->tile.cluster_n,
                                             .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                                             .is_input = true},
                        &tile->a));
    TRY(matrix_map_find(cuda,
                        &(struct matrix_map){.base = product->b,
                                             .num_rows = product->n,
                                             .num_columns = product->k,
                                             .box_columns = GEMM_TILE_BLOCK_K,
                                             .box_rows = TILE_PIECE_ROWS * share,
                                             .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                                             .is_input = true},
                        &tile->b));
    TRY(matrix_map_find(cuda, &d_map, &tile->d));
    if (is_mixed || variant->block_n % GEMM_RESIDUAL_CHUNK_COLUMNS != 0) {
        d_map.box_columns = GEMM_RESIDUAL_CHUNK_COLUMNS / 2;
        d_map.swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
        TRY(matrix_map_find(cuda, &d_map, &tile->d_rest));
    }
    tile->bias = is_split ? NULL : product->bias;
    tile->num_k_blocks = num_k_blocks(product);
    tile->num_blocks_m = (int32_t)grid->num_blocks_m;
    tile->num_blocks_n = (int32_t)grid->num_blocks_n;
    tile->group_m = plan->tile.group_m;
    tile->num_columns = product->n;
    tile->num_wide = is_mixed ? (int32_t)grid->num_wide : ALL_WIDE;
    tile->cluster_m = plan->tile.cluster_m;
    tile->cluster_n = plan->tile.cluster_n;
    tile->weights_settled = cuda->device->overlap_launches ? 1 : 0;
    tile->num_early = grid->num_blocks_m > 1 ? EARLY_STAGES : EARLY_STAGES_UNSHARED;
    params->num_splits = plan->num_splits;
    params->tiles_of_split = plan->tiles_of_split;
    params->adds = product->adds && !is_split ? 1 : 0;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status launch(struct backend_cuda *cuda, const struct residual_product *product,
                                 const struct residual_plan *asked)
{
    struct residual_plan plan;
    struct gemm_residual_params params;

    if (product->n % TILE_STORE_COLUMNS != 0 || product->k % TILE_STORE_COLUMNS != 0 ||
        (uintptr_t)product->d % (F32_ELEMENTS * sizeof(float)) != 0) {
        return error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                         "gemm_residual: expected n and k as multiples of %d and rows on 16 bytes, "
                         "found n %d, k %d, d %p",
                         TILE_STORE_COLUMNS, (int)product->n, (int)product->k, (void *)product->d);
    }
    if (asked != NULL) {
        plan = *asked;
    } else {
        TRY(find_plan(cuda, product, &plan));
    }
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_problem problem = problem_of(product, &plan);
    struct tile_grid grid = tile_grid_of(&machine, &problem, &plan.tile);
    memset(&params, 0, sizeof(params));
    TRY(fill_params(cuda, product, &plan, &grid, &params));

    const struct residual_variant *variant = &variants[plan.variant_idx];
    uint32_t cluster_size = (uint32_t)(plan.tile.cluster_m * plan.tile.cluster_n);
    cuda_launch(cuda,
                &(struct op_launch){.kernel = variant->kernel,
                                    .grid_x = (uint32_t)grid.num_clusters * cluster_size,
                                    .num_threads = GEMM_TILE_THREADS,
                                    .shared_bytes = (uint32_t)variant->shared_bytes,
                                    .cluster_x = cluster_size},
                &params);
    if (plan.num_splits > 1) {
        cuda_split_add(cuda, product->d, (const float *)(const void *)cuda->scratch,
                       (int64_t)plan.tiles_of_split * variant->block_m * product->n, product->bias,
                       product->m, product->n, plan.num_splits);
    }
    return IMBREX_STATUS_OK;
}

/* Without splits: in the order of k alone. */
static enum imbrex_status launch_portable(struct backend_cuda *cuda,
                                          const struct residual_product *product)
{
    struct tile_problem problem = {
        .form = TILE_FORM_PLAIN, .m = product->m, .columns = product->n, .k = product->k};
    struct gemm_mma_params params = {.a = product->a,
                                     .b = product->b,
                                     .bias = product->bias,
                                     .d = product->d,
                                     .a_stride = product->k,
                                     .b_stride = product->k,
                                     .d_stride = product->n,
                                     .m = product->m,
                                     .n = product->n,
                                     .k = product->k,
                                     .end = product->adds ? GEMM_MMA_ADD_F32 : GEMM_MMA_STORE_F32};
    struct tile_plan plan;
    int32_t begin, end;

    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    TRY(cuda_device_choose(cuda->device, &problem, begin, end, &plan, &cuda->error));
    return gemm_mma_launch(cuda->device, &plan, &params, cuda->stream, &cuda->error);
}

void cuda_gemm_residual(struct backend_cuda *cuda, const struct residual_product *product,
                        const struct residual_plan *plan)
{
    if (cuda->status == IMBREX_STATUS_OK && product->m > 0) {
        cuda_keep(cuda, cuda->device->is_portable ? launch_portable(cuda, product)
                                                  : launch(cuda, product, plan));
    }
}
