/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of the matrix kernels: every rule that a kernel relies on is checked here and named when
 * it is broken, because a kernel that runs on wrong numbers ends the whole context. */
#include "ops/cuda/gemm_launch.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "ops/cuda/gemm_mma_launch.h"
#include "ops/cuda/kernels/gemm_swiglu_params.h"
#include "ops/dtype.h"

#define BF16_BYTES 2
#define TMA_ALIGNMENT 16 /* bytes, of base addresses and strides */
#define TMA_STRIDE_LIMIT (INT64_C(1) << 40)
#define TMA_BOX_ROWS 16 /* of D, that one warp stores at a time */
#define TMA_BOX_COLUMNS 64
/* Stages whose weights are asked for ahead of A, while the previous grid ends. Measured on an H200:
 * with all of them, rows of A come in last of all and the first product waits for them. Weights
 * that CTAs with other rows ask for as well come sooner. */
#define EARLY_STAGES 2
#define EARLY_STAGES_UNSHARED 3
#define ALL_WIDE (1 << 28) /* more tiles along n than there can be */
#define STRIDE_ELEMENTS (TMA_ALIGNMENT / BF16_BYTES)
#define MAX_GRID_Y 65535

/* A matrix argument of an op. */
struct operand {
    const char *name; /* "gemm_swiglu: gate" */
    const void *base;
    int64_t num_rows, num_columns;
    int64_t stride; /* elements */
};

static int64_t operand_bytes(const struct operand *operand)
{
    return ((operand->num_rows - 1) * operand->stride + operand->num_columns) * BF16_BYTES;
}

static enum imbrex_status check_side(const char *name, int32_t side, int32_t least,
                                     struct imbrex_error *err)
{
    if (side < least) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "%s: expected at least %d, found %d",
                         name, (int)least, (int)side);
    }
    return IMBREX_STATUS_OK;
}

/* Fills in the stride of rows without gaps. */
static enum imbrex_status check_operand(struct operand *operand, struct imbrex_error *err)
{
    if (operand->stride == 0) {
        operand->stride = operand->num_columns;
    }
    if (operand->base == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "%s: expected an address, found NULL",
                         operand->name);
    }
    if ((uintptr_t)operand->base % TMA_ALIGNMENT != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected an address that is a multiple of %d bytes, found %p",
                         operand->name, TMA_ALIGNMENT, operand->base);
    }
    if (operand->stride < operand->num_columns) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected a row stride of at least its %" PRId64
                         " columns, found %" PRId64,
                         operand->name, operand->num_columns, operand->stride);
    }
    if (operand->stride % STRIDE_ELEMENTS != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected a row stride that is a multiple of %d elements (%d bytes, "
                         "TMA), found %" PRId64,
                         operand->name, STRIDE_ELEMENTS, TMA_ALIGNMENT, operand->stride);
    }
    if (operand->stride >= TMA_STRIDE_LIMIT / BF16_BYTES) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected a row stride below 2^40 bytes (TMA), found %" PRId64
                         " elements",
                         operand->name, operand->stride);
    }
    return IMBREX_STATUS_OK;
}

/* Whether two matrices have an element in common. Of two column ranges of one wider matrix the
 * bytes interleave and the elements do not. */
static bool operands_overlap(const struct operand *a, const struct operand *b)
{
    uint64_t a_base = (uint64_t)(uintptr_t)a->base, b_base = (uint64_t)(uintptr_t)b->base;
    if (a_base > b_base) {
        return operands_overlap(b, a);
    }
    if (b_base - a_base >= (uint64_t)operand_bytes(a)) {
        return false;
    }
    if (a->stride != b->stride) {
        return true;
    }
    int64_t offset = (int64_t)((b_base - a_base) / BF16_BYTES) % a->stride;
    return offset < a->num_columns || offset + b->num_columns > a->stride;
}

static enum imbrex_status check_overlap(const struct operand *output, const struct operand *input,
                                        struct imbrex_error *err)
{
    if (operands_overlap(output, input)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected memory of its own, found it overlapping %s", output->name,
                         input->name);
    }
    return IMBREX_STATUS_OK;
}

/* One end of a matrix. The driver knows nothing of addresses that it did not hand out. */
static enum imbrex_status check_address(const struct imbrex_device *device, const char *name,
                                        const char *end, uint64_t address, struct imbrex_error *err)
{
    unsigned int memory_type = 0;
    int ordinal = -1;
    unsigned int is_managed = 0;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                        CU_POINTER_ATTRIBUTE_IS_MANAGED};
    void *values[] = {&memory_type, &ordinal, &is_managed};

    TRY(DRIVER_CALL(&device->driver, err, pointer_get_attributes,
                    sizeof(attributes) / sizeof(attributes[0]), attributes, values,
                    (CUdeviceptr)address));
    if (memory_type != CU_MEMORYTYPE_DEVICE && memory_type != CU_MEMORYTYPE_HOST) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected memory of the GPU, found its %s byte, 0x%" PRIx64
                         ", in memory that CUDA does not know",
                         name, end, address);
    }
    if (memory_type == CU_MEMORYTYPE_DEVICE && is_managed == 0 &&
        ordinal != device->description.device_idx) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected memory of device %d, found its %s byte on device %d", name,
                         (int)device->description.device_idx, end, ordinal);
    }
    return IMBREX_STATUS_OK;
}

/* Both ends, because a range may be made of several allocations. */
static enum imbrex_status check_memory(const struct imbrex_device *device, const char *name,
                                       const void *base, int64_t num_bytes,
                                       struct imbrex_error *err)
{
    uint64_t first = (uint64_t)(uintptr_t)base;
    TRY(check_address(device, name, "first", first, err));
    return check_address(device, name, "last", first + (uint64_t)num_bytes - 1, err);
}

/* The driver's special handles are streams of whatever context is current: ours. A stream that is
 * being captured may not be asked; on another GPU's the launch itself fails. */
static enum imbrex_status check_stream(const struct imbrex_device *device, CUstream stream,
                                       struct imbrex_error *err)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUdevice gpu = -1;

    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
        return IMBREX_STATUS_OK;
    }
    TRY(DRIVER_CALL(&device->driver, err, stream_is_capturing, stream, &capture));
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        return IMBREX_STATUS_OK;
    }
    TRY(DRIVER_CALL(&device->driver, err, stream_get_device, stream, &gpu));
    if (gpu != device->gpu) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "stream: expected one of device %d, found one of device %d",
                         (int)device->description.device_idx, (int)gpu);
    }
    return IMBREX_STATUS_OK;
}

/* The descriptor of a view of an operand; the memory of a view that is new is looked at first. */
static enum imbrex_status find_map(struct imbrex_device *device, const struct tensor_map_key *key,
                                   const struct operand *const *operands, int num_operands,
                                   CUtensorMap *map, struct imbrex_error *err)
{
    const CUtensorMap *found = tensor_map_find(&device->maps, key);
    if (found == NULL) {
        for (int i = 0; i < num_operands; i++) {
            TRY(check_memory(device, operands[i]->name, operands[i]->base,
                             operand_bytes(operands[i]), err));
        }
        TRY(tensor_map_add(&device->maps, &device->driver, key, &found, err));
    }
    *map = *found;
    return IMBREX_STATUS_OK;
}

/* A whole matrix, from which boxes of box_columns x box_rows are copied. */
static enum imbrex_status find_matrix_map(struct imbrex_device *device,
                                          const struct operand *operand, int32_t box_columns,
                                          int32_t box_rows, CUtensorMapSwizzle swizzle,
                                          CUtensorMapL2promotion l2_promotion, CUtensorMap *map,
                                          struct imbrex_error *err)
{
    struct tensor_map_key key;
    memset(&key, 0, sizeof(key));
    key.base = (uint64_t)(uintptr_t)operand->base;
    key.rank = 2;
    key.dims[0] = (uint64_t)operand->num_columns;
    key.dims[1] = (uint64_t)operand->num_rows;
    key.strides[0] = (uint64_t)operand->stride * BF16_BYTES;
    key.box[0] = (uint32_t)box_columns;
    key.box[1] = (uint32_t)box_rows;
    key.swizzle = swizzle;
    key.l2_promotion = l2_promotion;
    return find_map(device, &key, &operand, 1, map, err);
}

/* What a product is, whichever op it belongs to. */
struct product {
    struct tile_problem problem;
    struct operand a, b, up, d; /* b: gate in gemm_swiglu; up: there alone */
    int32_t interleave_rows; /* of b and up; 0: none. Of 1, the strides are twice the matrix's. */
    const float *bias, *up_bias;
    const char *bias_name, *up_bias_name;
    int32_t interleave_biases;
    struct gating_params gating; /* of a general form */
    bool weights_settled;
};

/* Rows from 8 of a matrix to its next 8. */
static int64_t pair_group_rows(const struct product *product)
{
    return product->interleave_rows == TILE_PAIR_ROWS ? 2 * TILE_PAIR_ROWS : TILE_PAIR_ROWS;
}

/* Gate and up as one tensor [rows / 8][gate or up][8 rows][columns], so that a box holds rows of
 * both interleaved by 8. Which of the two comes first is where the lower address is. */
static enum imbrex_status find_pair_map(struct imbrex_device *device, const struct product *product,
                                        int32_t share, CUtensorMap *map, int32_t *up_first,
                                        struct imbrex_error *err)
{
    const struct operand *gate = &product->b, *up = &product->up;
    const struct operand *operands[2] = {gate, up};
    bool is_up_first = (uintptr_t)up->base < (uintptr_t)gate->base;
    const struct operand *first = is_up_first ? up : gate, *second = is_up_first ? gate : up;
    struct tensor_map_key key;
    memset(&key, 0, sizeof(key));
    key.base = (uint64_t)(uintptr_t)first->base;
    key.rank = 4;
    key.dims[0] = (uint64_t)first->num_columns;
    key.dims[1] = TILE_PAIR_ROWS;
    key.dims[2] = 2;
    key.dims[3] = (uint64_t)product->problem.columns / TILE_PAIR_ROWS;
    key.strides[0] = (uint64_t)first->stride * BF16_BYTES;
    key.strides[1] = (uint64_t)(uintptr_t)second->base - key.base;
    key.strides[2] = key.strides[0] * (uint64_t)pair_group_rows(product);
    key.box[0] = GEMM_TILE_BLOCK_K;
    key.box[1] = TILE_PAIR_ROWS;
    key.box[2] = 2;
    key.box[3] = (uint32_t)share;
    key.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    key.l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    *up_first = is_up_first ? 1 : 0;
    return find_map(device, &key, operands, 2, map, err);
}

static bool is_pair(const struct product *product)
{
    const struct operand *gate = &product->b, *up = &product->up;
    uint64_t gate_base = (uint64_t)(uintptr_t)gate->base, up_base = (uint64_t)(uintptr_t)up->base;
    uint64_t distance = gate_base < up_base ? up_base - gate_base : gate_base - up_base;
    return gate->stride == up->stride && distance > 0 && distance < (uint64_t)TMA_STRIDE_LIMIT &&
           gate->stride < TMA_STRIDE_LIMIT / (BF16_BYTES * pair_group_rows(product));
}

static enum imbrex_status fill_weight_maps(struct imbrex_device *device,
                                           const struct product *product,
                                           const struct kernel_variant *kernel,
                                           const struct tile_plan *plan,
                                           struct gemm_tile_params *params,
                                           struct imbrex_error *err)
{
    int32_t num_pieces = kernel->block_n / TILE_PIECE_ROWS;
    int32_t share = (num_pieces + plan->cluster_m - 1) / plan->cluster_m;

    switch (kernel->form) {
    case TILE_FORM_PAIR:
    case TILE_FORM_GENERAL_PAIR:
        return find_pair_map(device, product, share, &params->b, &params->up_first, err);
    case TILE_FORM_SPLIT:
    case TILE_FORM_GENERAL_SPLIT:
        TRY(find_matrix_map(device, &product->b, GEMM_TILE_BLOCK_K, TILE_PAIR_ROWS * share,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            &params->b, err));
        return find_matrix_map(device, &product->up, GEMM_TILE_BLOCK_K, TILE_PAIR_ROWS * share,
                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               &params->up, err);
    case TILE_FORM_PLAIN:
        break;
    }
    return find_matrix_map(device, &product->b, GEMM_TILE_BLOCK_K, TILE_PIECE_ROWS * share,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           &params->b, err);
}

/* The rest of a tile's columns beyond whole boxes takes the widest swizzle that divides it. */
static CUtensorMapSwizzle rest_swizzle(int32_t rest)
{
    return rest == 32   ? CU_TENSOR_MAP_SWIZZLE_64B
           : rest == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                        : CU_TENSOR_MAP_SWIZZLE_NONE;
}

static enum imbrex_status check_bias_memory(const struct imbrex_device *device,
                                            const struct product *product, const char *name,
                                            const float *bias, struct imbrex_error *err)
{
    if (bias == NULL) {
        return IMBREX_STATUS_OK;
    }
    int64_t last = product->problem.columns - 1;
    if (product->interleave_biases != 0) {
        last += last / product->interleave_biases * product->interleave_biases;
    }
    if (last > INT32_MAX) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected at most 2^31 values of both biases, which are counted in 32 "
                         "bits, found %" PRId64,
                         name, last + 1);
    }
    return check_memory(device, name, bias, (last + 1) * (int64_t)sizeof(float), err);
}

/* From a value of a bias to the next of the same 8, and to the next 8. */
static int32_t bias_step(const struct product *product)
{
    return product->interleave_biases == 1 ? 2 : 1;
}

static int32_t bias_group_step(const struct product *product)
{
    return product->interleave_biases != 0 ? 2 * TILE_PAIR_ROWS : TILE_PAIR_ROWS;
}

static enum imbrex_status fill_params(struct imbrex_device *device, const struct product *product,
                                      const struct tile_plan *plan, const struct tile_grid *grid,
                                      struct gemm_tile_params *params, struct imbrex_error *err)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    int32_t rest = tile_columns(kernel) % TMA_BOX_COLUMNS;
    bool is_mixed = grid->num_wide < grid->num_tiles_n;
    int32_t narrow_rest = (tile_columns(kernel) - tile_piece_columns(kernel)) % TMA_BOX_COLUMNS;

    TRY(find_matrix_map(device, &product->a, GEMM_TILE_BLOCK_K, kernel->block_m / plan->cluster_n,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &params->a,
                        err));
    TRY(fill_weight_maps(device, product, kernel, plan, params, err));
    if (tile_columns(kernel) >= TMA_BOX_COLUMNS) {
        TRY(find_matrix_map(device, &product->d, TMA_BOX_COLUMNS, TMA_BOX_ROWS,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, &params->d,
                            err));
    }
    if (rest != 0) {
        TRY(find_matrix_map(device, &product->d, rest, TMA_BOX_ROWS, rest_swizzle(rest),
                            CU_TENSOR_MAP_L2_PROMOTION_NONE, &params->d_rest, err));
    }
    if (narrow_rest != 0 && is_mixed) {
        TRY(find_matrix_map(device, &product->d, narrow_rest, TMA_BOX_ROWS,
                            rest_swizzle(narrow_rest), CU_TENSOR_MAP_L2_PROMOTION_NONE,
                            &params->d_rest_narrow, err));
    }
    TRY(check_bias_memory(device, product, product->bias_name, product->bias, err));
    TRY(check_bias_memory(device, product, product->up_bias_name, product->up_bias, err));
    params->bias = product->bias;
    params->up_bias = product->up_bias;
    params->bias_step = bias_step(product);
    params->bias_group_step = bias_group_step(product);
    params->gating = product->gating;
    params->num_k_blocks =
        (int32_t)(((int64_t)product->problem.k + GEMM_TILE_BLOCK_K - 1) / GEMM_TILE_BLOCK_K);
    params->num_blocks_m = (int32_t)grid->num_blocks_m;
    params->num_blocks_n = (int32_t)grid->num_blocks_n;
    params->group_m = plan->group_m;
    params->num_columns = product->problem.columns;
    /* A cluster may reach beyond the last tile: there too, no tile is narrow if none is. */
    params->num_wide = is_mixed ? (int32_t)grid->num_wide : ALL_WIDE;
    params->cluster_m = plan->cluster_m;
    params->cluster_n = plan->cluster_n;
    params->weights_settled = product->weights_settled && device->overlap_launches ? 1 : 0;
    params->num_early = grid->num_blocks_m > 1 ? EARLY_STAGES : EARLY_STAGES_UNSHARED;
    return IMBREX_STATUS_OK;
}

/* The memory of an operand that no descriptor is made for. */
static enum imbrex_status check_operand_memory(struct imbrex_device *device,
                                               const struct operand *operand,
                                               struct imbrex_error *err)
{
    struct tensor_map_key key;
    CUtensorMap none;
    memset(&key, 0, sizeof(key));
    key.base = (uint64_t)(uintptr_t)operand->base;
    key.dims[0] = (uint64_t)operand_bytes(operand);
    return find_map(device, &key, &operand, 1, &none, err);
}

static enum imbrex_status launch_portable(struct imbrex_device *device,
                                          const struct product *product,
                                          const struct tile_plan *plan, CUstream stream,
                                          struct imbrex_error *err)
{
    const struct tile_problem *problem = &product->problem;
    bool is_fused = problem->form != TILE_FORM_PLAIN;
    TRY(check_operand_memory(device, &product->a, err));
    TRY(check_operand_memory(device, &product->b, err));
    if (is_fused) {
        TRY(check_operand_memory(device, &product->up, err));
    }
    TRY(check_operand_memory(device, &product->d, err));
    TRY(check_bias_memory(device, product, product->bias_name, product->bias, err));
    TRY(check_bias_memory(device, product, product->up_bias_name, product->up_bias, err));
    struct gemm_mma_params params = {.a = product->a.base,
                                     .b = product->b.base,
                                     .up = product->up.base,
                                     .bias = product->bias,
                                     .up_bias = product->up_bias,
                                     .d = (void *)(uintptr_t)product->d.base,
                                     .a_stride = product->a.stride,
                                     .b_stride = product->b.stride,
                                     .up_stride = product->up.stride,
                                     .d_stride = product->d.stride,
                                     .m = problem->m,
                                     .n = problem->columns,
                                     .k = problem->k,
                                     .end = GEMM_MMA_STORE_BF16,
                                     .row_group_step = (int32_t)pair_group_rows(product),
                                     .bias_step = bias_step(product),
                                     .bias_group_step = bias_group_step(product),
                                     .gating = product->gating};
    return gemm_mma_launch(device, plan, &params, stream, err);
}

static enum imbrex_status launch_entered(struct imbrex_device *device,
                                         const struct product *product,
                                         const struct tile_plan *plan, CUstream stream,
                                         struct imbrex_error *err)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    struct tile_machine machine = cuda_device_machine(device);
    struct tile_grid grid = tile_grid_of(&machine, &product->problem, plan);
    unsigned int cluster_size = (unsigned int)(plan->cluster_m * plan->cluster_n);
    struct gemm_tile_params params;
    CUfunction function = NULL;

    memset(&params, 0, sizeof(params));
    TRY(check_stream(device, stream, err));
    if (kernel->is_portable) {
        return launch_portable(device, product, plan, stream, err);
    }
    TRY(fill_params(device, product, plan, &grid, &params, err));
    TRY(cuda_device_function(device, plan->kernel_idx, &function, err));

    CUlaunchAttribute attributes[2] = {
        {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
         .value.clusterDim = {.x = cluster_size, .y = 1, .z = 1}},
        {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
         .value.programmaticStreamSerializationAllowed = 1},
    };
    CUlaunchConfig config = {
        .gridDimX = (unsigned int)grid.num_clusters * cluster_size,
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = GEMM_TILE_THREADS,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = (unsigned int)kernel->shared_bytes,
        .hStream = stream,
        .attrs = attributes,
        .numAttrs = device->overlap_launches ? 2 : 1,
    };
    void *arguments[] = {&params};
    return DRIVER_CALL(&device->driver, err, launch_kernel_ex, &config, function, arguments, NULL);
}

/* The plan of the caller, checked, or the one that was or is now chosen. */
static enum imbrex_status find_plan(struct imbrex_device *device, enum imbrex_kernel_op op,
                                    const struct tile_problem *problem,
                                    const struct imbrex_kernel_plan *asked, struct tile_plan *plan,
                                    struct imbrex_error *err)
{
    struct tile_machine machine = cuda_device_machine(device);

    if (asked != NULL) {
        struct tile_plan tile;
        TRY(kernel_plan_tile(op, asked, &tile, err));
        TRY(tile_check(&machine, problem, &tile, err));
        *plan = tile;
        return IMBREX_STATUS_OK;
    }
    uint32_t hash = (uint32_t)problem->m * 2654435761u ^ (uint32_t)problem->columns * 2246822519u ^
                    (uint32_t)problem->k * 3266489917u ^ (uint32_t)problem->form;
    struct tile_choice_entry *entry = &device->choices[(hash >> 16) % NUM_TILE_CHOICES];
    if (entry->problem.m != problem->m || entry->problem.columns != problem->columns ||
        entry->problem.k != problem->k || entry->problem.form != problem->form ||
        entry->is_portable != device->is_portable) {
        struct tile_choice_entry chosen = {.problem = *problem, .is_portable = device->is_portable};
        int32_t begin, end;
        kernel_table_range(op, &begin, &end);
        TRY(cuda_device_choose(device, problem, begin, end, &chosen.plan, err));
        *entry = chosen;
    }
    *plan = entry->plan;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status launch(struct imbrex_device *device, enum imbrex_kernel_op op,
                                 const struct product *product,
                                 const struct imbrex_kernel_plan *asked, void *stream,
                                 struct imbrex_error *err)
{
    struct tile_plan plan;

    TRY(find_plan(device, op, &product->problem, asked, &plan, err));
    TRY(cuda_device_enter(device, err));
    return cuda_device_leave(device, launch_entered(device, product, &plan, stream, err), err);
}

static enum imbrex_status check_bias(const char *name, const float *bias, struct imbrex_error *err)
{
    if ((uintptr_t)bias % sizeof(float) != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected an address that is a multiple of %zu bytes, found %p", name,
                         sizeof(float), (const void *)bias);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_interleave(const char *name, int32_t interleave,
                                           struct imbrex_error *err)
{
    if (interleave != 0 && interleave != 1 && interleave != TILE_PAIR_ROWS) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "%s: expected 0, 1 or %d, found %d",
                         name, TILE_PAIR_ROWS, (int)interleave);
    }
    return IMBREX_STATUS_OK;
}

/* Checked operands of gate and up whose rows take turns in one matrix become two matrices as the
 * maps want them. */
static enum imbrex_status lay_interleaved(struct product *product, struct imbrex_error *err)
{
    struct operand *gate = &product->b, *up = &product->up;
    int64_t interleave = product->interleave_rows, columns = product->problem.columns;

    if (up->stride != gate->stride) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected the row stride of gate, %" PRId64
                         " elements, because interleave_rows makes them one matrix, found %" PRId64,
                         up->name, gate->stride, up->stride);
    }
    int64_t expected = interleave * gate->stride * BF16_BYTES;
    int64_t found = (int64_t)((uintptr_t)up->base - (uintptr_t)gate->base);
    if (found != expected && found != -expected) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected an address interleave_rows = %d rows, %" PRId64
                         " bytes, before or behind gate, found %" PRId64 " bytes behind it",
                         up->name, (int)interleave, expected, found);
    }
    if (columns % interleave != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "gemm_swiglu: intermediate_size: expected a multiple of interleave_rows = "
                         "%d, found %d",
                         (int)interleave, (int)columns);
    }
    if (interleave == 1) {
        gate->stride *= 2;
        up->stride *= 2;
    } else {
        /* From the first row to the last. */
        gate->num_rows = up->num_rows = 2 * columns - interleave;
    }
    return IMBREX_STATUS_OK;
}

/* The rules of imbrex_gating, and what it is to a kernel. */
static enum imbrex_status fill_gating(const char *op, const struct imbrex_gating *gating,
                                      enum imbrex_rounding rounding, struct gating_params *params,
                                      struct imbrex_error *err)
{
    static const enum gating_activation activations[] = {
        [IMBREX_ACTIVATION_SILU] = GATING_SILU,
        [IMBREX_ACTIVATION_GELU_ERF] = GATING_GELU_ERF,
        [IMBREX_ACTIVATION_GELU_TANH] = GATING_GELU_TANH,
        [IMBREX_ACTIVATION_RELU] = GATING_RELU,
    };
    const int num_activations = (int)(sizeof(activations) / sizeof(activations[0]));
    bool is_unfused = rounding == IMBREX_ROUNDING_MATCH_UNFUSED;
    float alpha = gating->alpha == 0.0f ? 1.0f : gating->alpha;

    if (!is_unfused && rounding != IMBREX_ROUNDING_EXACT) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: rounding: expected one of enum imbrex_rounding, found %d", op,
                         (int)rounding);
    }
    if ((int)gating->activation < 0 || (int)gating->activation >= num_activations) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: activation: expected one of enum imbrex_activation, found %d", op,
                         (int)gating->activation);
    }
    if (!isfinite(alpha) || (gating->activation != IMBREX_ACTIVATION_SILU && alpha != 1.0f)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: alpha: expected a finite number with SiLU and 0 or 1 with other "
                         "activations, found %g",
                         op, (double)gating->alpha);
    }
    if (!(gating->limit >= 0.0f)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: limit: expected 0 (none) or a positive number, found %g", op,
                         (double)gating->limit);
    }
    if (!isfinite(gating->up_offset)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: up_offset: expected a finite number, found %g", op,
                         (double)gating->up_offset);
    }
    *params = (struct gating_params){
        .activation = activations[gating->activation],
        .is_unfused = is_unfused ? 1 : 0,
        .alpha = alpha,
        .limit = gating->limit == 0.0f ? INFINITY
                 : is_unfused          ? bf16_to_float(bf16_from_float(gating->limit))
                                       : gating->limit,
        .up_offset = gating->up_offset,
    };
    if (is_unfused && alpha != 1.0f) {
        params->activation = GATING_SILU_IN_STEPS;
    }
    return IMBREX_STATUS_OK;
}

static bool gating_is_general(const struct gating_params *gating)
{
    return gating->activation != GATING_SILU || gating->is_unfused != 0 || gating->alpha != 1.0f ||
           gating->limit < INFINITY || gating->up_offset != 0.0f;
}

enum imbrex_status imbrex_gemm_swiglu(struct imbrex_device *device,
                                      const struct imbrex_gemm_swiglu_params *params,
                                      const struct imbrex_kernel_plan *plan, void *stream,
                                      struct imbrex_error *err)
{
    int32_t m = params->num_tokens, k = params->hidden_size, n = params->intermediate_size;
    struct product product = {
        .problem = {.m = m, .columns = n, .k = k},
        .a = {"gemm_swiglu: a", params->a, m, k, params->a_stride},
        .b = {"gemm_swiglu: gate", params->gate, n, k, params->gate_stride},
        .up = {"gemm_swiglu: up", params->up, n, k, params->up_stride},
        .d = {"gemm_swiglu: d", params->d, m, n, params->d_stride},
        .interleave_rows = params->interleave_rows,
        .bias = params->gate_bias,
        .up_bias = params->up_bias,
        .bias_name = "gemm_swiglu: gate_bias",
        .up_bias_name = "gemm_swiglu: up_bias",
        .interleave_biases = params->interleave_biases,
        .weights_settled = params->weights_settled,
    };

    TRY(check_side("gemm_swiglu: num_tokens", m, 0, err));
    TRY(check_side("gemm_swiglu: hidden_size", k, 1, err));
    TRY(check_side("gemm_swiglu: intermediate_size", n, 1, err));
    TRY(fill_gating("gemm_swiglu", &params->gating, params->rounding, &product.gating, err));
    TRY(check_interleave("gemm_swiglu: interleave_rows", params->interleave_rows, err));
    TRY(check_interleave("gemm_swiglu: interleave_biases", params->interleave_biases, err));
    if (m == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(check_operand(&product.a, err));
    TRY(check_operand(&product.b, err));
    TRY(check_operand(&product.up, err));
    TRY(check_operand(&product.d, err));
    TRY(check_bias(product.bias_name, product.bias, err));
    TRY(check_bias(product.up_bias_name, product.up_bias, err));
    if (product.interleave_rows != 0) {
        TRY(lay_interleaved(&product, err));
    }
    TRY(check_overlap(&product.d, &product.a, err));
    TRY(check_overlap(&product.d, &product.b, err));
    TRY(check_overlap(&product.d, &product.up, err));
    bool is_general =
        product.bias != NULL || product.up_bias != NULL || gating_is_general(&product.gating);
    bool is_split = !is_pair(&product);
    if (is_split && product.interleave_rows == TILE_PAIR_ROWS) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "gemm_swiglu: gate: expected 16 rows in less than 2^40 bytes (TMA), found "
                         "a row stride of %" PRId64 " elements",
                         product.b.stride);
    }
    product.problem.form = tile_fused_form(is_split, is_general);
    return launch(device, IMBREX_KERNEL_OP_GEMM_SWIGLU, &product, plan, stream, err);
}

enum imbrex_status imbrex_gemm(struct imbrex_device *device,
                               const struct imbrex_gemm_params *params,
                               const struct imbrex_kernel_plan *plan, void *stream,
                               struct imbrex_error *err)
{
    int32_t m = params->num_tokens, k = params->in_features, n = params->out_features;
    struct product product = {
        .problem = {.form = TILE_FORM_PLAIN, .m = m, .columns = n, .k = k},
        .a = {"gemm: a", params->a, m, k, params->a_stride},
        .b = {"gemm: b", params->b, n, k, params->b_stride},
        .d = {"gemm: d", params->d, m, n, params->d_stride},
        .bias = params->bias,
        .bias_name = "gemm: bias",
        .weights_settled = params->weights_settled,
    };

    TRY(check_side("gemm: num_tokens", m, 0, err));
    TRY(check_side("gemm: in_features", k, 1, err));
    TRY(check_side("gemm: out_features", n, 1, err));
    if (m == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(check_operand(&product.a, err));
    TRY(check_operand(&product.b, err));
    TRY(check_operand(&product.d, err));
    TRY(check_overlap(&product.d, &product.a, err));
    TRY(check_overlap(&product.d, &product.b, err));
    TRY(check_bias(product.bias_name, product.bias, err));
    return launch(device, IMBREX_KERNEL_OP_GEMM, &product, plan, stream, err);
}

static enum imbrex_status launch_gated_activation(
    struct imbrex_device *device, const struct gated_activation_kernel_params *params,
    const struct operand *operands /* gate, up, d */, CUstream stream, struct imbrex_error *err)
{
    CUfunction function = NULL;
    /* CTAs of a size that wastes few threads on the last columns. */
    unsigned int row_pieces = (unsigned int)params->row_pieces;
    unsigned int num_columns =
        (row_pieces + GATED_ACTIVATION_MAX_THREADS - 1) / GATED_ACTIVATION_MAX_THREADS;
    unsigned int threads = ((row_pieces + num_columns - 1) / num_columns + 31) / 32 * 32;
    unsigned int row_groups =
        ((unsigned int)params->num_rows + GATED_ACTIVATION_ROWS - 1) / GATED_ACTIVATION_ROWS;

    TRY(check_stream(device, stream, err));
    for (int i = 0; i < 3; i++) {
        TRY(check_memory(device, operands[i].name, operands[i].base, operand_bytes(&operands[i]),
                         err));
    }
    TRY(cuda_device_op_function(device, OP_KERNEL_gated_activation_bf16, &function, err));
    CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                   .value.programmaticStreamSerializationAllowed = 1};
    CUlaunchConfig config = {
        .gridDimX = (row_pieces + threads - 1) / threads,
        .gridDimY = row_groups < MAX_GRID_Y ? row_groups : MAX_GRID_Y,
        .gridDimZ = 1,
        .blockDimX = threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .hStream = stream,
        .attrs = &attribute,
        .numAttrs = device->overlap_launches ? 1 : 0,
    };
    struct gated_activation_kernel_params argument = *params;
    void *arguments[] = {&argument};
    return DRIVER_CALL(&device->driver, err, launch_kernel_ex, &config, function, arguments, NULL);
}

enum imbrex_status imbrex_gated_activation(struct imbrex_device *device,
                                           const struct imbrex_gated_activation_params *params,
                                           void *stream, struct imbrex_error *err)
{
    int32_t m = params->num_tokens, n = params->intermediate_size;
    struct operand operands[3] = {
        {"gated_activation: gate", params->gate, m, n, params->gate_stride},
        {"gated_activation: up", params->up, m, n, params->up_stride},
        {"gated_activation: d", params->d, m, n, params->d_stride},
    };
    struct operand *gate = &operands[0], *up = &operands[1], *d = &operands[2];
    struct gating_params gating;

    TRY(check_side("gated_activation: num_tokens", m, 0, err));
    TRY(check_side("gated_activation: intermediate_size", n, 1, err));
    TRY(fill_gating("gated_activation", &params->gating, params->rounding, &gating, err));
    if (m == 0) {
        return IMBREX_STATUS_OK;
    }
    if (n % GATED_ACTIVATION_COLUMNS != 0) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "gated_activation: intermediate_size: expected a multiple of %d, because "
                         "a thread takes that many columns, found %d",
                         GATED_ACTIVATION_COLUMNS, (int)n);
    }
    TRY(check_operand(gate, err));
    TRY(check_operand(up, err));
    TRY(check_operand(d, err));
    TRY(check_overlap(d, gate, err));
    TRY(check_overlap(d, up, err));
    struct gated_activation_kernel_params argument = {
        .gate = gate->base,
        .up = up->base,
        .d = params->d,
        .gate_stride = gate->stride / GATED_ACTIVATION_COLUMNS,
        .up_stride = up->stride / GATED_ACTIVATION_COLUMNS,
        .d_stride = d->stride / GATED_ACTIVATION_COLUMNS,
        .num_rows = m,
        .row_pieces = n / GATED_ACTIVATION_COLUMNS,
        .gating = gating,
    };
    TRY(cuda_device_enter(device, err));
    return cuda_device_leave(
        device, launch_gated_activation(device, &argument, operands, stream, err), err);
}
