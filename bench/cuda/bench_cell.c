/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cuda/bench_cell.h"

#include "bench/cuda/bench_gate_first.h"
#include "cli/output.h"

#define BF16_BYTES 2
#define SET_ALIGNMENT 4096
/* Inputs of all sets together, in sizes of the L2 cache. */
#define ROTATION_OF_L2 4
#define MAX_SETS 64
#define SLICE_ALIGNMENT 256
/* Between gate and up that are matrices of their own. */
#define SEPARATE_GAP_BYTES (UINT64_C(1) << 20)

static uint64_t align_up(uint64_t num_bytes)
{
    return (num_bytes + SET_ALIGNMENT - 1) / SET_ALIGNMENT * SET_ALIGNMENT;
}

void bench_cell_init(const struct bench *bench, const struct bench_shape *shape, int32_t m,
                     struct bench_cell *cell)
{
    bool is_swiglu = bench->settings->op.value == IMBREX_KERNEL_OP_GEMM_SWIGLU;

    *cell = (struct bench_cell){.shape = shape, .m = m};
    cell->n = is_swiglu ? shape->intermediate_size : shape->hidden_size;
    cell->k = is_swiglu ? shape->hidden_size : shape->intermediate_size;
    cell->weight_rows = is_swiglu ? 2 * cell->n : cell->n;
    uint64_t a_bytes = (uint64_t)(cell->m * cell->k) * BF16_BYTES;
    uint64_t weights_bytes = (uint64_t)(cell->weight_rows * cell->k) * BF16_BYTES;
    uint64_t d_bytes = (uint64_t)(cell->m * cell->n) * BF16_BYTES;
    cell->a_stride = align_up(a_bytes);
    cell->weights_stride = align_up(weights_bytes + (is_swiglu ? SEPARATE_GAP_BYTES : 0));
    cell->d_stride = align_up(d_bytes);
    cell->product_stride = is_swiglu ? align_up(2 * d_bytes) : 0;
    uint64_t wanted = ROTATION_OF_L2 * (uint64_t)bench->description.l2_bytes;
    uint64_t num_sets = (wanted + a_bytes + weights_bytes - 1) / (a_bytes + weights_bytes);
    cell->num_sets = num_sets < 2 ? 2 : num_sets > MAX_SETS ? MAX_SETS : (int)num_sets;
    /* Slices have the activation of SwiGLU alone. */
    if (is_swiglu && bench->settings->baselines.value != BENCH_BASELINES_NONE &&
        !bench_is_general(bench, 0)) {
        int32_t width = imbrex_slice_width(bench->description.name, m, (int32_t)cell->n, 16);
        /* Addresses that cuBLASLt has its fast algorithms for. */
        if (width * cell->k * BF16_BYTES % SLICE_ALIGNMENT == 0 &&
            width * cell->m * BF16_BYTES % SLICE_ALIGNMENT == 0) {
            cell->slice_width = width;
            cell->num_slices = (int32_t)cell->n / width;
            int64_t num_streams = bench->settings->num_streams.value;
            cell->num_streams =
                num_streams < cell->num_slices ? (int32_t)num_streams : cell->num_slices;
        }
    }
    cell->flops = 2.0 * (double)cell->m * (double)cell->weight_rows * (double)cell->k;
    cell->bytes = (double)(a_bytes + weights_bytes + d_bytes);
}

struct bench_operands bench_cell_operands(const struct bench *bench, const struct bench_cell *cell,
                                          int set_idx, bool is_ours)
{
    const struct bench_pools *pools = &bench->pools;
    uint64_t set = (uint64_t)set_idx;
    CUdeviceptr weights = pools->weights + set * cell->weights_stride;
    struct bench_operands operands = {
        .a = pools->a + set * cell->a_stride,
        .gate = weights,
        .d = pools->d + set * cell->d_stride,
        .product = pools->product + set * cell->product_stride,
    };
    if (cell->weight_rows != cell->n) {
        CUdeviceptr second = weights + (uint64_t)(cell->n * cell->k) * BF16_BYTES;
        operands.up = second;
        if (is_ours && bench->settings->interleave.value != 0) {
            second = weights + (uint64_t)(bench->settings->interleave.value * cell->k) * BF16_BYTES;
            operands.up = second;
        }
        if (is_ours && bench->settings->weights.value == BENCH_WEIGHTS_UP_GATE) {
            operands.gate = second;
            operands.up = weights;
        } else if (is_ours && bench->settings->weights.value == BENCH_WEIGHTS_SEPARATE) {
            operands.up = second + SEPARATE_GAP_BYTES / 2;
        }
    }
    return operands;
}

bool bench_is_general(const struct bench *bench, int gating_idx)
{
    const struct imbrex_gating *gating = &bench->cells->gatings[gating_idx].gating;
    return bench->settings->bias || bench->settings->rounding.value != IMBREX_ROUNDING_EXACT ||
           gating->activation != IMBREX_ACTIVATION_SILU || gating->alpha != 0.0f ||
           gating->limit != 0.0f || gating->up_offset != 0.0f;
}

static bool call_ours(struct bench *bench, const struct bench_cell *cell,
                      const struct contestant *contestant, const struct bench_operands *operands)
{
    const struct imbrex_kernel_plan *plan = &contestant->plan;
    struct imbrex_error err = {0};
    enum imbrex_status status;

    if (cell->weight_rows != cell->n) {
        struct imbrex_gemm_swiglu_params params = {
            .a = (const void *)operands->a,
            .gate = (const void *)operands->gate,
            .up = (const void *)operands->up,
            .d = (void *)operands->d,
            .num_tokens = (int32_t)cell->m,
            .hidden_size = (int32_t)cell->k,
            .intermediate_size = (int32_t)cell->n,
            .weights_settled = true,
            .interleave_rows = (int32_t)bench->settings->interleave.value,
            .rounding = (enum imbrex_rounding)bench->settings->rounding.value,
            .gating = bench->cells->gatings[contestant->gating_idx].gating,
        };
        if (bench->settings->bias) {
            params.gate_bias = (const float *)bench->pools.biases;
            params.up_bias = params.gate_bias + cell->n;
        }
        status = imbrex_gemm_swiglu(bench->device, &params, plan, bench->gpu.stream, &err);
    } else {
        struct imbrex_gemm_params params = {
            .a = (const void *)operands->a,
            .b = (const void *)operands->gate,
            .d = (void *)operands->d,
            .num_tokens = (int32_t)cell->m,
            .in_features = (int32_t)cell->k,
            .out_features = (int32_t)cell->n,
            .weights_settled = true,
        };
        status = imbrex_gemm(bench->device, &params, plan, bench->gpu.stream, &err);
    }
    if (status != IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
    }
    return status == IMBREX_STATUS_OK;
}

/* The library's kernel, d = act(gate) * up over [m, width]: gate and up with rows of
 * product_stride, d those of the cell. */
static bool activate(struct bench *bench, const struct bench_cell *cell, int gating_idx,
                     CUdeviceptr gate, CUdeviceptr up, int64_t product_stride, CUdeviceptr d,
                     int64_t width, CUstream stream)
{
    struct imbrex_error err = {0};
    struct imbrex_gated_activation_params params = {
        .gate = (const void *)gate,
        .up = (const void *)up,
        .d = (void *)d,
        .gate_stride = product_stride,
        .up_stride = product_stride,
        .d_stride = cell->n,
        .num_tokens = (int32_t)cell->m,
        .intermediate_size = (int32_t)width,
        .rounding = (enum imbrex_rounding)bench->settings->rounding.value,
        .gating = bench->cells->gatings[gating_idx].gating,
    };
    if (imbrex_gated_activation(bench->device, &params, stream, &err) != IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return false;
    }
    return true;
}

/* ---- slices ---- */

bool bench_streams_create(struct bench *bench)
{
    struct gpu *gpu = &bench->gpu;
    bool is_ok = GPU_CALL(gpu, event_create, &bench->begun, CU_EVENT_DISABLE_TIMING);
    for (int i = 0; is_ok && i < bench->settings->num_streams.value; i++) {
        is_ok = GPU_CALL(gpu, stream_create, &bench->streams[i], CU_STREAM_NON_BLOCKING) &&
                GPU_CALL(gpu, event_create, &bench->ended[i], CU_EVENT_DISABLE_TIMING);
    }
    return is_ok;
}

void bench_streams_destroy(struct bench *bench)
{
    for (int i = 0; i < BENCH_MAX_STREAMS; i++) {
        if (bench->streams[i] != NULL) {
            (void)bench->gpu.stream_destroy(bench->streams[i]);
        }
        if (bench->ended[i] != NULL) {
            (void)bench->gpu.event_destroy(bench->ended[i]);
        }
    }
    if (bench->begun != NULL) {
        (void)bench->gpu.event_destroy(bench->begun);
    }
}

/* Two products, each in a part of `product` of its own, and the activation. */
static bool call_slice(struct bench *bench, struct bench_cell *cell, int algorithm_idx,
                       const struct bench_operands *operands, int slice_idx, int stream_idx,
                       CUstream stream)
{
    int64_t slice = slice_idx, width = cell->slice_width;
    uint64_t weights_at = (uint64_t)(slice * width * cell->k) * BF16_BYTES;
    uint64_t product_bytes = (uint64_t)(cell->m * width) * BF16_BYTES;
    CUdeviceptr gate = operands->product + 2 * (uint64_t)slice * product_bytes;
    CUdeviceptr up = gate + product_bytes;
    CUdeviceptr d = operands->d + (uint64_t)(slice * width) * BF16_BYTES;
    CUdeviceptr workspace = bench->pools.workspace + (uint64_t)stream_idx * BENCH_WORKSPACE_BYTES;

    return cublaslt_product_run(cell->slice_gemm, algorithm_idx, (const void *)operands->a,
                                (const void *)(operands->gate + weights_at), (void *)gate,
                                (void *)workspace, stream) &&
           cublaslt_product_run(cell->slice_gemm, algorithm_idx, (const void *)operands->a,
                                (const void *)(operands->up + weights_at), (void *)up,
                                (void *)workspace, stream) &&
           activate(bench, cell, 0, gate, up, width, d, width, stream);
}

/* Over streams that begin behind gpu.stream, and that it waits for. */
static bool call_streams(struct bench *bench, struct bench_cell *cell,
                         const struct bench_operands *operands)
{
    struct gpu *gpu = &bench->gpu;
    int algorithm_idx = cell->algorithm_idx[CONTESTANT_STREAMS];
    bool is_ok = GPU_CALL(gpu, event_record, bench->begun, gpu->stream);
    for (int i = 0; is_ok && i < cell->num_streams; i++) {
        is_ok = GPU_CALL(gpu, stream_wait_event, bench->streams[i], bench->begun, 0);
    }
    for (int i = 0; is_ok && i < cell->num_slices; i++) {
        int stream_idx = i % cell->num_streams;
        is_ok = call_slice(bench, cell, algorithm_idx, operands, i, stream_idx,
                           bench->streams[stream_idx]);
    }
    for (int i = 0; is_ok && i < cell->num_streams; i++) {
        is_ok = GPU_CALL(gpu, event_record, bench->ended[i], bench->streams[i]) &&
                GPU_CALL(gpu, stream_wait_event, gpu->stream, bench->ended[i], 0);
    }
    return is_ok;
}

bool bench_cell_call(struct bench *bench, struct bench_cell *cell,
                     const struct contestant *contestant, int set_idx)
{
    bool is_ours = contestant->kind == CONTESTANT_OURS;

    if (contestant->kind == CONTESTANT_SWISH) {
        return bench_gate_first_call(bench, cell, contestant->swish, &contestant->plan, set_idx);
    }
    struct bench_operands operands = bench_cell_operands(bench, cell, set_idx, is_ours);
    /* The bare product of gate and up has its own output; a plain product writes where ours does.
     * */
    CUdeviceptr product = cell->product_stride != 0 ? operands.product : operands.d;

    if (is_ours) {
        return call_ours(bench, cell, contestant, &operands);
    }
    if (contestant->kind == CONTESTANT_STREAMS) {
        return call_streams(bench, cell, &operands);
    }
    if (contestant->kind == CONTESTANT_HEURISTIC) {
        bool is_ok = true;
        for (int i = 0; is_ok && i < cell->num_slices; i++) {
            is_ok = call_slice(bench, cell, cell->algorithm_idx[CONTESTANT_HEURISTIC], &operands, i,
                               0, bench->gpu.stream);
        }
        return is_ok;
    }
    if (!cublaslt_product_run(cell->gemm, cell->algorithm_idx[CONTESTANT_GEMM],
                              (const void *)operands.a, (const void *)operands.gate,
                              (void *)product, (void *)bench->pools.workspace, bench->gpu.stream)) {
        return false;
    }
    if (contestant->kind != CONTESTANT_UNFUSED) {
        return true;
    }
    int32_t n = (int32_t)cell->n;
    if (bench_is_general(bench, contestant->gating_idx)) {
        return activate(bench, cell, contestant->gating_idx, product,
                        product + (uint64_t)n * BF16_BYTES, 2 * cell->n, operands.d, n,
                        bench->gpu.stream);
    }
    void *arguments[] = {&product, &operands.d, &cell->m, &n};
    return gpu_launch(&bench->gpu, "bench_silu_mul", 8 * (int64_t)bench->description.num_sms, 256,
                      arguments);
}
