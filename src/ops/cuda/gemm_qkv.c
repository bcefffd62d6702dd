/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernel: costs are those of the plain twin (tile_choice.h) with tiles of one width, which
 * hold whole heads. So the last wave may be nearly empty where that of the plain product is not. */
#include "ops/cuda/gemm_qkv.h"

#include <math.h>
#include <string.h>

#include "ops/cuda/gemm_launch.h"
#include "ops/cuda/kernels/gemm_qkv_params.h"
#include "ops/cuda/matrix_map.h"

#define BF16_BYTES 2
#define ALL_WIDE (1 << 28) /* more tiles along n than there can be */
#define EARLY_STAGES 2     /* as in gemm_launch.c */
#define EARLY_STAGES_UNSHARED 3
#define CHUNK_ROWS 16 /* of D, that one warp stores at a time */
#define CHUNK_COLUMNS 64
/* Seen on an H200: what RoPE as a kernel of its own takes, and what it adds to the product's. */
#define ROPE_LAUNCH_US 1.8
#define ROPE_BYTES_PER_US 4.0e6
#define EPILOGUE_US 1.0

struct qkv_variant {
    enum op_kernel kernel;
    enum tile_schedule schedule;
    int32_t head_dim, block_m, block_n, shared_bytes;
};

static const struct qkv_variant variants[] = {
#define QKV_VARIANT(with, dim, tile_schedule, bm, bn, stages, slots)                   \
    {.kernel = OP_KERNEL_gemm_qkv_bf16_sm90_head##dim##_##tile_schedule##_##bm##x##bn, \
     .schedule = TILE_SCHEDULE_##tile_schedule,                                        \
     .head_dim = (dim),                                                                \
     .block_m = (bm),                                                                  \
     .block_n = (bn),                                                                  \
     .shared_bytes = GEMM_TILE_SHARED_BYTES(bm, bn, stages, slots)},
    GEMM_QKV_VARIANTS(QKV_VARIANT, )
#undef QKV_VARIANT
};
enum { NUM_VARIANTS = sizeof(variants) / sizeof(variants[0]) };

int32_t gemm_qkv_num_variants(void)
{
    return NUM_VARIANTS;
}

static int32_t num_columns(const struct qkv_params *params)
{
    return (params->num_heads + 2 * params->kv.num_kv_heads) * params->kv.head_dim;
}

static struct tile_problem problem_of(const struct qkv_params *params)
{
    return (struct tile_problem){.form = TILE_FORM_PLAIN,
                                 .m = params->num_tokens,
                                 .columns = num_columns(params),
                                 .k = params->hidden_size};
}

/* Every variant has a twin. */
static int32_t find_twin(const struct qkv_variant *variant)
{
    int32_t begin, end;
    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    for (; begin + 1 < end; begin++) {
        const struct kernel_variant *kernel = kernel_table_at(begin);
        if (kernel->schedule == variant->schedule && kernel->block_m == variant->block_m &&
            kernel->block_n == variant->block_n) {
            break;
        }
    }
    return begin;
}

bool gemm_qkv_plan(const struct backend_cuda *cuda, const struct qkv_params *params,
                   int32_t variant_idx, struct qkv_plan *plan, double *cost_us)
{
    const struct qkv_variant *variant = &variants[variant_idx];
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_problem problem = problem_of(params);
    struct qkv_plan found = {.variant_idx = variant_idx};
    int32_t kernel_idx = find_twin(variant);

    if (variant->head_dim != params->kv.head_dim ||
        tile_choose(&machine, &problem, kernel_idx, kernel_idx + 1, &found.tile, NULL) !=
            IMBREX_STATUS_OK) {
        return false;
    }
    found.tile.num_tiles_n = 0;
    *plan = found;
    *cost_us = tile_cost_us(&machine, &problem, &found.tile);
    return true;
}

/* The plain product and a kernel behind it. */
static double apart_us(const struct backend_cuda *cuda, const struct tile_problem *problem)
{
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_plan plan;
    int32_t begin, end;

    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    if (tile_choose(&machine, problem, begin, end, &plan, NULL) != IMBREX_STATUS_OK) {
        return INFINITY;
    }
    double moved_bytes = 2.0 * BF16_BYTES * problem->m * problem->columns;
    return tile_cost_us(&machine, problem, &plan) + ROPE_LAUNCH_US +
           moved_bytes / ROPE_BYTES_PER_US;
}

/* NULL: no kernel is for this head_dim. */
static const struct qkv_choice *find_choice(struct backend_cuda *cuda,
                                            const struct qkv_params *params)
{
    struct tile_problem problem = problem_of(params);
    struct qkv_choice *entry =
        &cuda->qkv_choices[((uint32_t)problem.m * 2654435761u >> 16) % NUM_QKV_CHOICES];
    if (entry->m != problem.m || entry->n != problem.columns || entry->k != problem.k) {
        struct qkv_choice chosen = {.m = problem.m, .n = problem.columns, .k = problem.k};
        double best_us = INFINITY, cost_us;
        for (int32_t i = 0; i < NUM_VARIANTS; i++) {
            struct qkv_plan found;
            if (gemm_qkv_plan(cuda, params, i, &found, &cost_us) && cost_us < best_us) {
                chosen.plan = found;
                best_us = cost_us;
            }
        }
        if (isinf(best_us)) {
            return NULL;
        }
        /* With more waves the epilogues, which wait for cosines, hold up the products behind them.
         */
        struct tile_machine machine = cuda_device_machine(cuda->device);
        chosen.is_worth_it = tile_grid_of(&machine, &problem, &chosen.plan.tile).num_waves == 1 &&
                             best_us + EPILOGUE_US < apart_us(cuda, &problem);
        *entry = chosen;
    }
    return entry;
}

bool gemm_qkv_is_worth_it(struct backend_cuda *cuda, const struct qkv_params *params)
{
    const struct qkv_choice *choice = find_choice(cuda, params);
    return choice != NULL && (choice->is_worth_it || cuda->options.batch_invariant);
}

static enum imbrex_status fill_params(struct backend_cuda *cuda, const struct qkv_params *params,
                                      const struct qkv_plan *plan, const struct tile_grid *grid,
                                      struct gemm_qkv_params *told)
{
    const struct qkv_variant *variant = &variants[plan->variant_idx];
    const struct kv_view *kv = &params->kv;
    int32_t num_pieces = variant->block_n / TILE_PIECE_ROWS;
    int32_t share = (num_pieces + plan->tile.cluster_m - 1) / plan->tile.cluster_m;
    struct gemm_tile_params *tile = &told->tile;

    TRY(matrix_map_find(cuda,
                        &(struct matrix_map){.base = params->normed,
                                             .num_rows = params->num_tokens,
                                             .num_columns = params->hidden_size,
                                             .box_columns = GEMM_TILE_BLOCK_K,
                                             .box_rows = variant->block_m / plan->tile.cluster_n,
                                             .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                                             .is_input = true},
                        &tile->a));
    TRY(matrix_map_find(cuda,
                        &(struct matrix_map){.base = params->q_proj.elements,
                                             .num_rows = num_columns(params),
                                             .num_columns = params->hidden_size,
                                             .box_columns = GEMM_TILE_BLOCK_K,
                                             .box_rows = TILE_PIECE_ROWS * share,
                                             .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                                             .is_input = true},
                        &tile->b));
    TRY(matrix_map_find(cuda,
                        &(struct matrix_map){.base = params->qkv,
                                             .num_rows = params->num_tokens,
                                             .num_columns = num_columns(params),
                                             .box_columns = CHUNK_COLUMNS,
                                             .box_rows = CHUNK_ROWS,
                                             .swizzle = CU_TENSOR_MAP_SWIZZLE_128B},
                        &tile->d));
    tile->bias = params->q_bias;
    tile->num_k_blocks = (params->hidden_size + GEMM_TILE_BLOCK_K - 1) / GEMM_TILE_BLOCK_K;
    tile->num_blocks_m = (int32_t)grid->num_blocks_m;
    tile->num_blocks_n = (int32_t)grid->num_blocks_n;
    tile->group_m = plan->tile.group_m;
    tile->num_columns = num_columns(params);
    tile->num_wide = ALL_WIDE;
    tile->cluster_m = plan->tile.cluster_m;
    tile->cluster_n = plan->tile.cluster_n;
    tile->weights_settled = cuda->device->overlap_launches ? 1 : 0;
    tile->num_early = grid->num_blocks_m > 1 ? EARLY_STAGES : EARLY_STAGES_UNSHARED;
    told->cos_sin = params->cos_sin;
    told->q_norm = params->q_norm;
    told->k_norm = params->k_norm;
    told->positions = params->positions;
    told->slot_mapping = params->slot_mapping;
    told->blocks = kv->blocks;
    told->block_bytes = (int64_t)kv->block_bytes;
    told->layer_offset = (int64_t)kv_view_layer_offset(kv, params->layer_idx);
    told->num_rows = params->num_tokens;
    /* All columns, where k and v are to stay beside q. */
    told->q_columns =
        kv_dtype_has_scales(kv->dtype) ? num_columns(params) : params->num_heads * kv->head_dim;
    told->rotated_columns = (params->num_heads + kv->num_kv_heads) * kv->head_dim;
    told->block_size = kv->block_size;
    told->is_interleaved = params->is_interleaved ? 1 : 0;
    told->norm_eps = params->head_norm_eps;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status launch(struct backend_cuda *cuda, const struct qkv_params *params,
                                 const struct qkv_plan *asked)
{
    struct qkv_plan plan;
    struct gemm_qkv_params told;

    if (asked != NULL) {
        plan = *asked;
    } else {
        const struct qkv_choice *choice = find_choice(cuda, params);
        if (choice == NULL) {
            return error_set(&cuda->error, IMBREX_STATUS_UNSUPPORTED,
                             "gemm_qkv: head_dim: expected 64 or 128, found %d",
                             (int)params->kv.head_dim);
        }
        plan = choice->plan;
    }
    const struct qkv_variant *variant = &variants[plan.variant_idx];
    struct tile_machine machine = cuda_device_machine(cuda->device);
    struct tile_problem problem = problem_of(params);
    struct tile_grid grid = tile_grid_of(&machine, &problem, &plan.tile);
    uint32_t cluster_size = (uint32_t)(plan.tile.cluster_m * plan.tile.cluster_n);
    memset(&told, 0, sizeof(told));
    TRY(fill_params(cuda, params, &plan, &grid, &told));
    cuda_launch(cuda,
                &(struct op_launch){.kernel = variant->kernel,
                                    .grid_x = (uint32_t)grid.num_clusters * cluster_size,
                                    .num_threads = GEMM_TILE_THREADS,
                                    .shared_bytes = (uint32_t)variant->shared_bytes,
                                    .cluster_x = cluster_size},
                &told);
    return IMBREX_STATUS_OK;
}

void cuda_gemm_qkv(struct backend_cuda *cuda, const struct qkv_params *params,
                   const struct qkv_plan *plan)
{
    if (cuda->status == IMBREX_STATUS_OK && params->num_tokens > 0) {
        cuda_keep(cuda, launch(cuda, params, plan));
    }
}
