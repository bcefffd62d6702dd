/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cuda/bench_gate_first.h"

#include <stdlib.h>
#include <string.h>

#include "bench/cuda/bench_image.h"
#include "bench/cuda/gate_first_kernels.h"
#include "bench/cuda/kernel_trace.h"
#include "cli/output.h"

#define BF16_BYTES 2
#define PIECE_ROWS 8 /* of gate or of up, that slices are made of */
#define STORE_ROWS 16
#define STORE_COLUMNS 64
#define ALL_WIDE (1 << 28)
/* As the library launches: k-blocks of settled weights ahead of the rows of A. */
#define EARLY_STAGES 2
#define EARLY_STAGES_UNSHARED 3
#define TRACED BENCH_NUM_SWISH
#define NUM_WARM_CALLS 8 /* ahead of the one that is traced */

struct tile {
    int32_t block_m, block_n, num_stages, num_slots;
    const char *symbols[BENCH_NUM_SWISH + 1];
};

static const struct tile tiles[] = {
#define TILE_ROW(bm, bn, stages, slots)                              \
    {.block_m = (bm),                                                \
     .block_n = (bn),                                                \
     .num_stages = (stages),                                         \
     .num_slots = (slots),                                           \
     .symbols = {                                                    \
         [BENCH_SWISH_HIDDEN] = TILE_SYMBOL(hidden, bm, bn),         \
         [BENCH_SWISH_SERIALISED] = TILE_SYMBOL(serialised, bm, bn), \
         [BENCH_SWISH_REMOVED] = TILE_SYMBOL(removed, bm, bn),       \
         [BENCH_SWISH_HELD] = TILE_SYMBOL(held, bm, bn),             \
         [TRACED] = TILE_SYMBOL(traced, bm, bn),                     \
     }},
#define TILE_SYMBOL(what, bm, bn) "bench_gate_first_" #what "_" #bm "x" #bn
    GATE_FIRST_BENCH_TILES(TILE_ROW)
#undef TILE_SYMBOL
#undef TILE_ROW
};
#define NUM_TILES (int)(sizeof(tiles) / sizeof(tiles[0]))

struct gate_first_kernels {
    CUlibrary library;
    CUkernel kernels[NUM_TILES][BENCH_NUM_SWISH + 1];
};

static int32_t shared_bytes(const struct tile *tile)
{
    return GEMM_TILE_SHARED_BYTES(tile->block_m, tile->block_n / 2, tile->num_stages,
                                  tile->num_slots);
}

bool bench_gate_first_open(struct bench *bench)
{
    struct gpu *gpu = &bench->gpu;
    struct gate_first_kernels *opened = calloc(1, sizeof(*opened));

    if (opened == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    bench->gate_first = opened;
    bool is_ok = GPU_CALL(gpu, library_load_data, &opened->library, bench_gate_first_image(), NULL,
                          NULL, 0, NULL, NULL, 0);
    for (int i = 0; is_ok && i < NUM_TILES; i++) {
        for (int j = 0; is_ok && j <= TRACED; j++) {
            CUkernel *kernel = &opened->kernels[i][j];
            is_ok =
                GPU_CALL(gpu, library_get_kernel, kernel, opened->library, tiles[i].symbols[j]) &&
                GPU_CALL(gpu, kernel_set_attribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                         shared_bytes(&tiles[i]), *kernel, gpu->device);
        }
    }
    return is_ok;
}

void bench_gate_first_close(struct bench *bench)
{
    if (bench->gate_first != NULL && bench->gate_first->library != NULL) {
        (void)bench->gpu.library_unload(bench->gate_first->library);
    }
    free(bench->gate_first);
    bench->gate_first = NULL;
}

/* Number of the tile of a variant; -1: the image has none of it. */
static int find_tile(const struct imbrex_kernel_variant *variant)
{
    for (int i = 0; i < NUM_TILES; i++) {
        if (strcmp(variant->schedule, "gate_first") == 0 && variant->block_m == tiles[i].block_m &&
            variant->block_n == tiles[i].block_n) {
            return i;
        }
    }
    return -1;
}

bool bench_gate_first_plan(const struct bench *bench, const struct bench_cell *cell,
                           struct imbrex_kernel_plan *plan)
{
    const enum imbrex_kernel_op op = IMBREX_KERNEL_OP_GEMM_SWIGLU;
    struct imbrex_kernel_shape shape = {
        .op = op, .m = (int32_t)cell->m, .n = (int32_t)cell->n, .k = (int32_t)cell->k};
    bool is_found = false;

    for (int32_t i = 0; i < imbrex_kernel_num_variants(op); i++) {
        struct imbrex_kernel_variant variant;
        struct imbrex_kernel_plan candidate;
        if (imbrex_kernel_variant_describe(op, i, &variant, NULL) == IMBREX_STATUS_OK &&
            find_tile(&variant) >= 0 &&
            imbrex_kernel_choose(bench->device, &shape, i, &candidate, NULL) == IMBREX_STATUS_OK &&
            (!is_found || candidate.expected_us < plan->expected_us)) {
            *plan = candidate;
            is_found = true;
        }
    }
    plan->num_tiles_n = 0;
    if (!is_found) {
        output_error("bench ops: %s: m %d: no gate_first kernel can compute it", cell->shape->name,
                     (int)cell->m);
    }
    return is_found;
}

/* Of a matrix [rows, columns] without gaps. */
static bool encode_map(struct gpu *gpu, CUdeviceptr base, int64_t rows, int64_t columns,
                       int32_t box_columns, int32_t box_rows, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion l2_promotion, CUtensorMap *map)
{
    const cuuint64_t dims[2] = {(cuuint64_t)columns, (cuuint64_t)rows};
    const cuuint64_t strides[1] = {(cuuint64_t)columns * BF16_BYTES};
    const cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows};
    const cuuint32_t element_strides[2] = {1, 1};
    return GPU_CALL(gpu, tensor_map_encode, map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                    (void *)(uintptr_t)base, dims, strides, box, element_strides,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, l2_promotion,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* kernels/gemm_swiglu_params.h says what belongs where. */
static bool fill_params(struct bench *bench, const struct bench_cell *cell, const struct tile *tile,
                        const struct imbrex_kernel_plan *plan, int set_idx,
                        struct gemm_tile_params *params)
{
    const CUtensorMapSwizzle whole = CU_TENSOR_MAP_SWIZZLE_128B;
    const CUtensorMapL2promotion far = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    struct bench_operands operands = bench_cell_operands(bench, cell, set_idx, true);
    struct gpu *gpu = &bench->gpu;
    int32_t columns = tile->block_n / 2, rest = columns % STORE_COLUMNS;
    int32_t share = (columns / PIECE_ROWS + plan->cluster_m - 1) / plan->cluster_m * PIECE_ROWS;
    CUtensorMapSwizzle rest_swizzle = rest == 32   ? CU_TENSOR_MAP_SWIZZLE_64B
                                      : rest == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                   : CU_TENSOR_MAP_SWIZZLE_NONE;
    int64_t rows_of_cluster = (int64_t)tile->block_m * plan->cluster_m;
    int64_t num_tiles_n = (cell->n + columns - 1) / columns;

    memset(params, 0, sizeof(*params));
    params->num_k_blocks = (int32_t)((cell->k + GEMM_TILE_BLOCK_K - 1) / GEMM_TILE_BLOCK_K);
    params->num_blocks_m = (int32_t)((cell->m + rows_of_cluster - 1) / rows_of_cluster);
    params->num_blocks_n = (int32_t)((num_tiles_n + plan->cluster_n - 1) / plan->cluster_n);
    params->group_m = plan->group_m;
    params->num_columns = (int32_t)cell->n;
    params->num_wide = ALL_WIDE;
    params->cluster_m = plan->cluster_m;
    params->cluster_n = plan->cluster_n;
    params->weights_settled = bench->settings->no_overlap ? 0 : 1;
    params->num_early = params->num_blocks_m > 1 ? EARLY_STAGES : EARLY_STAGES_UNSHARED;
    return encode_map(gpu, operands.a, cell->m, cell->k, GEMM_TILE_BLOCK_K,
                      tile->block_m / plan->cluster_n, whole, far, &params->a) &&
           encode_map(gpu, operands.gate, cell->n, cell->k, GEMM_TILE_BLOCK_K, share, whole, far,
                      &params->b) &&
           encode_map(gpu, operands.up, cell->n, cell->k, GEMM_TILE_BLOCK_K, share, whole, far,
                      &params->up) &&
           encode_map(gpu, operands.d, cell->m, cell->n, STORE_COLUMNS, STORE_ROWS, whole,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, &params->d) &&
           (rest == 0 ||
            encode_map(gpu, operands.d, cell->m, cell->n, rest, STORE_ROWS, rest_swizzle,
                       CU_TENSOR_MAP_L2_PROMOTION_NONE, &params->d_rest));
}

static int32_t num_ctas_of(const struct bench *bench, const struct gemm_tile_params *params)
{
    int32_t cluster_size = params->cluster_m * params->cluster_n;
    int64_t num_blocks = (int64_t)params->num_blocks_m * params->num_blocks_n;
    int32_t num_clusters = bench->description.num_sms / cluster_size;
    return (num_blocks < num_clusters ? (int32_t)num_blocks : num_clusters) * cluster_size;
}

/* argument: the params struct of the kernel, of which gemm is the first member or the whole. */
static bool launch(struct bench *bench, int tile_idx, int kernel_idx,
                   const struct gemm_tile_params *gemm, void *argument)
{
    CUlaunchAttribute attributes[2] = {
        {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
         .value.clusterDim = {(unsigned int)(gemm->cluster_m * gemm->cluster_n), 1, 1}},
        {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
         .value.programmaticStreamSerializationAllowed = 1},
    };
    CUlaunchConfig config = {
        .gridDimX = (unsigned int)num_ctas_of(bench, gemm),
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = GEMM_TILE_THREADS,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = (unsigned int)shared_bytes(&tiles[tile_idx]),
        .hStream = bench->gpu.stream,
        .attrs = attributes,
        .numAttrs = bench->settings->no_overlap ? 1 : 2,
    };
    void *arguments[] = {argument};
    return GPU_CALL(&bench->gpu, launch_kernel_ex, &config,
                    (CUfunction)bench->gate_first->kernels[tile_idx][kernel_idx], arguments, NULL);
}

/* The tile of a plan, as a number; -1: reported. */
static int tile_of_plan(const struct imbrex_kernel_plan *plan)
{
    struct imbrex_kernel_variant variant;
    struct imbrex_error err = {0};
    if (imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM_SWIGLU, plan->variant_idx, &variant,
                                       &err) != IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return -1;
    }
    int tile_idx = find_tile(&variant);
    if (tile_idx < 0) {
        output_error("bench ops: %s: expected a tile of gate_first_kernels.h", variant.name);
    }
    return tile_idx;
}

bool bench_gate_first_call(struct bench *bench, const struct bench_cell *cell,
                           enum bench_swish swish, const struct imbrex_kernel_plan *plan,
                           int set_idx)
{
    struct gemm_tile_params params;
    int tile_idx = tile_of_plan(plan);
    return tile_idx >= 0 && fill_params(bench, cell, &tiles[tile_idx], plan, set_idx, &params) &&
           launch(bench, tile_idx, swish, &params, &params);
}

/* ---- trace ---- */

static void print_figures(const char *kernel, const struct kernel_trace *trace)
{
    static const char *const names[GATE_FIRST_NUM_STAGES] = {
#define STAGE_NAME(stage, text) [GATE_FIRST_STAGE_##stage] = #stage,
        GATE_FIRST_STAGES(STAGE_NAME)
#undef STAGE_NAME
    };
    struct kernel_trace_figures figures = kernel_trace_figures(trace);
    output_printf("%s: %.2f us; means in us:", kernel, figures.total_us);
    for (int i = 0; i < GATE_FIRST_NUM_STAGES; i++) {
        output_printf("%s %s %.3f", i == 0 ? "" : ",", names[i], figures.stage_us[i]);
    }
    output_printf("; %.1f %% of swish with the other consumer in a k-loop\n",
                  100.0 * figures.hidden_share);
    if (figures.num_lost > 0) {
        output_printf("%lld events had no room\n", (long long)figures.num_lost);
    }
}

static bool write_trace(const struct kernel_trace *trace, const char *kernel, const char *path)
{
    json_t *json = kernel_trace_json(trace, kernel);
    bool is_ok = json != NULL && json_dump_file(json, path, JSON_REAL_PRECISION(9)) == 0;
    json_decref(json);
    if (!is_ok) {
        output_error("%s: cannot be written", path);
        return false;
    }
    print_figures(kernel, trace);
    return true;
}

/* Of the first `tracks` memory, events lie behind it. */
static bool run_traced(struct bench *bench, const struct bench_cell *cell, int tile_idx,
                       const struct imbrex_kernel_plan *plan,
                       struct gate_first_traced_params *params, CUdeviceptr memory,
                       unsigned char *host, size_t num_bytes)
{
    struct gpu *gpu = &bench->gpu;
    bool is_ok = GPU_CALL(gpu, memset_d8_async, memory, 0, num_bytes, gpu->stream);
    /* Each call writes over what the one before has left. */
    for (int i = 0; is_ok && i <= NUM_WARM_CALLS; i++) {
        is_ok =
            fill_params(bench, cell, &tiles[tile_idx], plan, i % cell->num_sets, &params->gemm) &&
            launch(bench, tile_idx, TRACED, &params->gemm, params);
    }
    return is_ok && GPU_CALL(gpu, stream_synchronize, gpu->stream) &&
           GPU_CALL(gpu, memcpy_dtoh, host, memory, num_bytes);
}

bool bench_gate_first_trace(struct bench *bench, const struct bench_cell *cell, const char *path)
{
    struct imbrex_kernel_plan plan = {0};
    struct gate_first_traced_params params;
    CUdeviceptr memory = 0;
    int tile_idx;

    memset(&params, 0, sizeof(params));
    if (!bench_gate_first_plan(bench, cell, &plan) || (tile_idx = tile_of_plan(&plan)) < 0 ||
        !fill_params(bench, cell, &tiles[tile_idx], &plan, 0, &params.gemm)) {
        return false;
    }
    int32_t num_ctas = num_ctas_of(bench, &params.gemm);
    int64_t num_blocks = (int64_t)params.gemm.num_blocks_m * params.gemm.num_blocks_n;
    int64_t num_clusters = num_ctas / (params.gemm.cluster_m * params.gemm.cluster_n);
    int64_t most_tiles = (num_blocks + num_clusters - 1) / num_clusters;
    size_t num_tracks = (size_t)num_ctas * GATE_FIRST_TRACKS;
    params.trace.max_events = (uint32_t)(most_tiles * GATE_FIRST_NUM_STAGES);
    size_t tracks_bytes = num_tracks * sizeof(struct gate_first_track);
    size_t num_bytes =
        tracks_bytes + num_tracks * params.trace.max_events * sizeof(struct gate_first_event);
    unsigned char *host = malloc(num_bytes);
    if (host == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    bool is_ok = GPU_CALL(&bench->gpu, mem_alloc, &memory, num_bytes);
    params.trace.tracks = (struct gate_first_track *)(uintptr_t)memory;
    params.trace.events = (struct gate_first_event *)(uintptr_t)(memory + tracks_bytes);
    is_ok = is_ok && run_traced(bench, cell, tile_idx, &plan, &params, memory, host, num_bytes);
    if (is_ok) {
        struct kernel_trace trace = {(const struct gate_first_track *)host,
                                     (const struct gate_first_event *)(host + tracks_bytes),
                                     num_ctas, params.trace.max_events};
        is_ok = write_trace(&trace, tiles[tile_idx].symbols[TRACED], path);
    }
    if (memory != 0) {
        (void)bench->gpu.mem_free(memory);
    }
    free(host);
    return is_ok;
}
