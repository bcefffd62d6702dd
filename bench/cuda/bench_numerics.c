/* SPDX-License-Identifier: Apache-2.0 */
/* How many results lie more than one bf16 ulp from the fp64 reference rounded once: ours, beside
 * other ways to the same values. Tensor cores truncate while they accumulate, so the one to be
 * compared with is cuBLASLt's product in fp32 with the activation in fp32. */
#include <math.h>
#include <stdlib.h>

#include "bench/cuda/bench_cell.h"
#include "cli/output.h"

#define MAX_REFERENCE_ROWS 256

struct numerics {
    struct bench *bench;
    struct bench_cell *cell;
    CUdeviceptr reference; /* [num_rows, n] double */
    CUdeviceptr product;   /* [m, 2 n] float */
    CUdeviceptr a32, weights32;
    int32_t num_rows;
    int64_t row_step;
};

static bool launch(struct numerics *numerics, const char *kernel, void **arguments)
{
    return gpu_launch(&numerics->bench->gpu, kernel,
                      8 * (int64_t)numerics->bench->description.num_sms, 256, arguments);
}

static bool make_reference(struct numerics *numerics, const struct bench_operands *operands)
{
    struct bench_cell *cell = numerics->cell;
    int32_t n = (int32_t)cell->n, k = (int32_t)cell->k, blocks_of_columns = (n + 15) / 16;
    CUdeviceptr a = operands->a, gate = operands->gate, up = operands->up;
    void *arguments[] = {&a,
                         &gate,
                         &up,
                         &numerics->reference,
                         &numerics->num_rows,
                         &numerics->row_step,
                         &n,
                         &k,
                         &blocks_of_columns};
    return gpu_launch(&numerics->bench->gpu, "bench_reference",
                      (int64_t)blocks_of_columns * ((numerics->num_rows + 15) / 16), 256,
                      arguments);
}

/* Compares what lies in d with the reference and prints a line. */
static bool compare(struct numerics *numerics, CUdeviceptr d, float scale, const char *who)
{
    struct gpu *gpu = &numerics->bench->gpu;
    struct bench_cell *cell = numerics->cell;
    CUdeviceptr counts_at = numerics->bench->pools.counts;
    int32_t n = (int32_t)cell->n;
    uint32_t counts[2];
    void *arguments[] = {
        &d, &numerics->reference, &numerics->num_rows, &numerics->row_step, &n, &counts_at};
    if (!GPU_CALL(gpu, memset_d8_async, counts_at, 0, sizeof(counts), gpu->stream) ||
        !launch(numerics, "bench_compare", arguments) ||
        !GPU_CALL(gpu, stream_synchronize, gpu->stream) ||
        !GPU_CALL(gpu, memcpy_dtoh, counts, counts_at, sizeof(counts))) {
        return false;
    }
    double count = (double)numerics->num_rows * (double)cell->n;
    output_printf("%-6s %6d %5g  %10.6f %% %9u of %.0f  %9.4f %%  %s\n", cell->shape->name,
                  (int)cell->m, (double)scale, 100.0 * counts[1] / count, counts[1], count,
                  100.0 * counts[0] / count, who);
    return true;
}

/* A product of cuBLASLt of one type each, then an activation kernel on it. */
static bool run_peer(struct numerics *numerics, const struct bench_operands *operands,
                     enum cublaslt_type input, enum cublaslt_type output, const char *activation)
{
    struct bench *bench = numerics->bench;
    struct bench_cell *cell = numerics->cell;
    struct cublaslt_product *product = NULL;
    bool is_wide = input == CUBLASLT_TYPE_F32;
    CUdeviceptr a = is_wide ? numerics->a32 : operands->a;
    CUdeviceptr weights = is_wide ? numerics->weights32 : operands->gate;
    CUdeviceptr out =
        cell->product_stride != 0 || output == CUBLASLT_TYPE_F32 ? numerics->product : operands->d;
    CUdeviceptr d = operands->d;
    int32_t n = (int32_t)cell->n;
    void *arguments[] = {&out, &d, &cell->m, &n};

    bool is_ok =
        cublaslt_product_create(bench->lt, cell->m, cell->weight_rows, cell->k, input, output,
                                BENCH_WORKSPACE_BYTES, &product) &&
        cublaslt_product_run(product, 0, (const void *)a, (const void *)weights, (void *)out,
                             (void *)bench->pools.workspace, bench->gpu.stream) &&
        launch(numerics, activation, arguments) &&
        GPU_CALL(&bench->gpu, stream_synchronize, bench->gpu.stream);
    cublaslt_product_destroy(product);
    return is_ok;
}

static bool widen(struct numerics *numerics, CUdeviceptr from, CUdeviceptr to, int64_t elements)
{
    uint64_t count = (uint64_t)elements;
    void *arguments[] = {&from, &to, &count};
    return launch(numerics, "bench_widen", arguments);
}

/* The share of results that are equal, bit by bit, to what eager operations left in d. */
static bool compare_unfused(struct numerics *numerics, struct imbrex_gemm_swiglu_params params,
                            const struct bench_operands *operands, float scale)
{
    struct bench *bench = numerics->bench;
    struct gpu *gpu = &bench->gpu;
    struct bench_cell *cell = numerics->cell;
    struct imbrex_error err = {0};
    CUdeviceptr counts_at = bench->pools.counts, eager = operands->d, ours = operands->product;
    uint64_t count = (uint64_t)(cell->m * cell->n);
    uint32_t num_equal = 0;
    void *arguments[] = {&eager, &ours, &count, &counts_at};

    params.d = (void *)ours;
    params.rounding = IMBREX_ROUNDING_MATCH_UNFUSED;
    if (imbrex_gemm_swiglu(bench->device, &params, NULL, gpu->stream, &err) != IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return false;
    }
    if (!GPU_CALL(gpu, memset_d8_async, counts_at, 0, sizeof(num_equal), gpu->stream) ||
        !launch(numerics, "bench_count_equal", arguments) ||
        !GPU_CALL(gpu, stream_synchronize, gpu->stream) ||
        !GPU_CALL(gpu, memcpy_dtoh, &num_equal, counts_at, sizeof(num_equal))) {
        return false;
    }
    output_printf("%-6s %6d %5g  %10.6f %% of all results of imbrex, rounded as unfused, equal "
                  "those of cuBLASLt and eager operations\n",
                  cell->shape->name, (int)cell->m, (double)scale,
                  100.0 * (double)num_equal / (double)count);
    return true;
}

/* One scale of the inputs. */
static bool compare_all(struct numerics *numerics, float scale)
{
    struct bench *bench = numerics->bench;
    struct bench_cell *cell = numerics->cell;
    struct bench_operands operands = bench_cell_operands(bench, cell, 0, false);
    struct contestant ours = {.kind = CONTESTANT_OURS, .name = "imbrex"};
    struct imbrex_kernel_shape shape = {
        .op = IMBREX_KERNEL_OP_GEMM_SWIGLU,
        .m = (int32_t)cell->m,
        .n = (int32_t)cell->n,
        .k = (int32_t)cell->k,
    };
    struct imbrex_error err = {0};
    CUdeviceptr a = operands.a;
    uint64_t count = (uint64_t)(cell->m * cell->k);
    uint32_t seed = 99;
    void *fill_arguments[] = {&a, &count, &scale, &seed};

    if (imbrex_kernel_choose(bench->device, &shape, IMBREX_KERNEL_ANY_VARIANT, &ours.plan, &err) !=
        IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return false;
    }
    if (!launch(numerics, "bench_fill", fill_arguments) || !make_reference(numerics, &operands)) {
        return false;
    }
    /* Gate first, whatever --weights says: all take the same matrices. */
    struct imbrex_gemm_swiglu_params params = {
        .a = (const void *)operands.a,
        .gate = (const void *)operands.gate,
        .up = (const void *)operands.up,
        .d = (void *)operands.d,
        .num_tokens = (int32_t)cell->m,
        .hidden_size = (int32_t)cell->k,
        .intermediate_size = (int32_t)cell->n,
    };
    if (imbrex_gemm_swiglu(bench->device, &params, &ours.plan, bench->gpu.stream, &err) !=
        IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return false;
    }
    return compare(numerics, operands.d, scale, "imbrex") &&
           run_peer(numerics, &operands, CUBLASLT_TYPE_BF16, CUBLASLT_TYPE_F32,
                    "bench_silu_mul_fp32") &&
           compare(numerics, operands.d, scale, "cuBLASLt bf16 GEMM to fp32, fp32 activation") &&
           run_peer(numerics, &operands, CUBLASLT_TYPE_BF16, CUBLASLT_TYPE_BF16,
                    "bench_silu_mul") &&
           compare(numerics, operands.d, scale, "cuBLASLt bf16 GEMM, one activation kernel") &&
           run_peer(numerics, &operands, CUBLASLT_TYPE_BF16, CUBLASLT_TYPE_BF16,
                    "bench_silu_mul_eager") &&
           compare(numerics, operands.d, scale, "eager: products, silu and result rounded") &&
           compare_unfused(numerics, params, &operands, scale) &&
           widen(numerics, operands.a, numerics->a32, cell->m * cell->k) &&
           run_peer(numerics, &operands, CUBLASLT_TYPE_F32, CUBLASLT_TYPE_F32,
                    "bench_silu_mul_fp32") &&
           compare(numerics, operands.d, scale, "SGEMM of widened inputs, fp32 activation");
}

bool bench_numerics(struct bench *bench, struct bench_cell *cell)
{
    static const float scales[] = {0.3f, 1.0f, 3.0f, 10.0f};
    struct numerics numerics = {.bench = bench, .cell = cell};
    struct gpu *gpu = &bench->gpu;

    if (cell->product_stride == 0) {
        output_error("bench ops: --numerics: expected --op gemm_swiglu with it, found another");
        return false;
    }
    numerics.num_rows = (int32_t)(cell->m < MAX_REFERENCE_ROWS ? cell->m : MAX_REFERENCE_ROWS);
    numerics.row_step = cell->m / numerics.num_rows;
    uint64_t a_elements = (uint64_t)(cell->m * cell->k);
    uint64_t weight_elements = (uint64_t)(cell->weight_rows * cell->k);
    bool is_ok = GPU_CALL(gpu, mem_alloc, &numerics.reference,
                          (uint64_t)numerics.num_rows * (uint64_t)cell->n * sizeof(double)) &&
                 GPU_CALL(gpu, mem_alloc, &numerics.product,
                          (uint64_t)(cell->m * cell->weight_rows) * sizeof(float)) &&
                 GPU_CALL(gpu, mem_alloc, &numerics.a32, a_elements * sizeof(float)) &&
                 GPU_CALL(gpu, mem_alloc, &numerics.weights32, weight_elements * sizeof(float)) &&
                 widen(&numerics, bench_cell_operands(bench, cell, 0, false).gate,
                       numerics.weights32, cell->weight_rows * cell->k);
    if (is_ok) {
        output_printf("%-6s %6s %5s  %12s %9s    %21s  who\n", "shape", "m", "scale",
                      "beyond 1 ulp", "count", "other bits");
    }
    for (size_t i = 0; is_ok && i < sizeof(scales) / sizeof(scales[0]); i++) {
        is_ok = compare_all(&numerics, scales[i]);
    }
    const CUdeviceptr taken[] = {numerics.reference, numerics.product, numerics.a32,
                                 numerics.weights32};
    for (size_t i = 0; i < sizeof(taken) / sizeof(taken[0]); i++) {
        if (taken[i] != 0) {
            (void)gpu->mem_free(taken[i]);
        }
    }
    return is_ok && output_flush();
}
