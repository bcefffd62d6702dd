/* SPDX-License-Identifier: Apache-2.0 */
/* The Hopper kernels on a GPU, through the public API, against fp64 on the host: every variant and
 * cluster, odd shapes, strides, orders of gate and up, special values, graphs, a second GPU.
 * Skipped where there is none. With a number as its argument every number-th variant only, for
 * tools that make kernels slow; with `portable` only the kernels for other GPUs, with `second` only
 * what needs a second GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/dtype.h"
#include "tests/gpu/gpu_matrix.h"
#include "tests/gpu/gpu_session.h"

/* The device was opened for portable kernels, and which GPU it is. */
static bool is_portable;
static int device_idx;

/* ---- the product and its reference ---- */

struct problem {
    int64_t m, n, k;
    bool is_swiglu, weights_settled;
    struct matrix a, gate, up, d; /* of a plain product gate is B, and there is no up */
    float *bias;                  /* [n] or NULL */
    CUdeviceptr bias_buffer;
    double *expected, *bound; /* [m, n] */
};

static struct problem problem_create(bool is_swiglu, int64_t m, int64_t n, int64_t k,
                                     int64_t padding, bool has_bias)
{
    struct problem problem = {.m = m, .n = n, .k = k, .is_swiglu = is_swiglu};
    int64_t k_stride = (k + 7) / 8 * 8 + padding, n_stride = (n + 7) / 8 * 8 + padding;
    problem.a = matrix_create(m, k, k_stride, 1.0);
    problem.gate = matrix_create(n, k, k_stride, 1.0 / sqrt((double)k));
    if (is_swiglu) {
        /* Other widths of rows than gate's where there is padding: no view covers both. */
        problem.up = matrix_create(n, k, k_stride + padding, 2.0 / sqrt((double)k));
    }
    problem.d = matrix_create(m, n, n_stride, 0.0);
    problem.expected = malloc((size_t)(m * n) * sizeof(double));
    problem.bound = malloc((size_t)(m * n) * sizeof(double));
    require(problem.expected != NULL && problem.bound != NULL, "memory");
    if (has_bias) {
        problem.bias = malloc((size_t)n * sizeof(float));
        require(problem.bias != NULL, "memory");
        for (int64_t i = 0; i < n; i++) {
            problem.bias[i] = (float)random_normal();
        }
        require(GPU_CALL(&gpu, mem_alloc, &problem.bias_buffer, (size_t)n * sizeof(float)) &&
                    copied_to_gpu(problem.bias_buffer, problem.bias, (size_t)n * sizeof(float)),
                "bias");
    }
    return problem;
}

static void problem_destroy(struct problem *problem)
{
    matrix_destroy(&problem->a);
    matrix_destroy(&problem->gate);
    if (problem->is_swiglu) {
        matrix_destroy(&problem->up);
    }
    matrix_destroy(&problem->d);
    if (problem->bias != NULL) {
        (void)gpu.mem_free(problem->bias_buffer);
    }
    free(problem->bias);
    free(problem->expected);
    free(problem->bound);
}

/* *size: sum of magnitudes. */
static double dot(const struct problem *problem, const struct matrix *weights, int64_t row,
                  int64_t column, double *size)
{
    double sum = 0.0;
    *size = 0.0;
    for (int64_t i = 0; i < problem->k; i++) {
        double product = (double)bf16_to_float(*matrix_at(&problem->a, row, i)) *
                         (double)bf16_to_float(*matrix_at(weights, column, i));
        sum += product;
        *size += fabs(product);
    }
    return sum;
}

/* Half an ulp of the result, and what fp32 sums that a tensor core truncates may lose. */
static void reference_element(const struct problem *problem, int64_t row, int64_t column,
                              double *expected, double *bound)
{
    double step = ((double)problem->k / 16.0 + 16.0) * 0x1p-22, gate_size, up_size;
    double gate = dot(problem, &problem->gate, row, column, &gate_size);
    if (!problem->is_swiglu) {
        *expected = gate + (problem->bias != NULL ? problem->bias[column] : 0.0);
        *bound = fabs(*expected) * 0x1p-8 + step * (gate_size + fabs(*expected));
        return;
    }
    double up = dot(problem, &problem->up, row, column, &up_size);
    double silu = gate / (1.0 + exp(-gate));
    *expected = silu * up;
    /* |silu'| <= 1.1; the fast exponential and reciprocal err by a few 2^-22. */
    *bound = fabs(*expected) * (0x1p-8 + 0x1p-18) + 1.1 * step * gate_size * fabs(up) +
             fabs(silu) * step * up_size + 1e-37;
}

static void make_reference(struct problem *problem)
{
    for (int64_t i = 0; i < problem->m; i++) {
        for (int64_t j = 0; j < problem->n; j++) {
            reference_element(problem, i, j, &problem->expected[i * problem->n + j],
                              &problem->bound[i * problem->n + j]);
        }
    }
}

static enum imbrex_status run_rows(const struct problem *problem,
                                   const struct imbrex_kernel_plan *plan, int64_t first,
                                   int64_t num_rows, struct imbrex_error *err)
{
    const void *a = (const void *)(problem->a.base + (CUdeviceptr)(first * problem->a.stride * 2));
    void *d = (void *)(problem->d.base + (CUdeviceptr)(first * problem->d.stride * 2));
    if (problem->is_swiglu) {
        struct imbrex_gemm_swiglu_params params = {
            .a = a,
            .gate = (const void *)problem->gate.base,
            .up = (const void *)problem->up.base,
            .d = d,
            .a_stride = problem->a.stride,
            .gate_stride = problem->gate.stride,
            .up_stride = problem->up.stride,
            .d_stride = problem->d.stride,
            .num_tokens = (int32_t)num_rows,
            .hidden_size = (int32_t)problem->k,
            .intermediate_size = (int32_t)problem->n,
            .weights_settled = problem->weights_settled,
        };
        return imbrex_gemm_swiglu(device, &params, plan, gpu.stream, err);
    }
    struct imbrex_gemm_params params = {
        .a = a,
        .b = (const void *)problem->gate.base,
        .bias = (const float *)problem->bias_buffer,
        .d = d,
        .a_stride = problem->a.stride,
        .b_stride = problem->gate.stride,
        .d_stride = problem->d.stride,
        .num_tokens = (int32_t)num_rows,
        .in_features = (int32_t)problem->k,
        .out_features = (int32_t)problem->n,
        .weights_settled = problem->weights_settled,
    };
    return imbrex_gemm(device, &params, plan, gpu.stream, err);
}

/* Whether d, downloaded, is right and nothing beside it was written. */
static bool result_is_right(const struct problem *problem, char *why, size_t why_bytes)
{
    const struct matrix *d = &problem->d;
    for (int64_t i = 0; i < problem->m; i++) {
        for (int64_t j = 0; j < problem->n; j++) {
            double found = bf16_to_float(*matrix_at(d, i, j));
            double expected = problem->expected[i * problem->n + j];
            double bound = problem->bound[i * problem->n + j];
            bool is_same = isnan(expected)                   ? isnan(found)
                           : isinf(expected) || isinf(found) ? found == expected
                                                             : fabs(found - expected) <= bound;
            if (!is_same) {
                snprintf(why, why_bytes, "[%d, %d] is %g, expected %g within %g", (int)i, (int)j,
                         found, expected, bound);
                return false;
            }
        }
    }
    for (int64_t i = 0; i < d->num_elements; i++) {
        int64_t at = i - CANARY_ELEMENTS;
        bool is_inside = at >= 0 && at < d->rows * d->stride && at % d->stride < problem->n;
        if (!is_inside && d->host[i] != CANARY) {
            snprintf(why, why_bytes, "element %d beside the result was written", (int)at);
            return false;
        }
    }
    return true;
}

static void check_plan(struct problem *problem, const struct imbrex_kernel_plan *plan,
                       const char *name)
{
    struct imbrex_error err = {0};
    char why[160] = "", what[400];

    matrix_clear(&problem->d);
    enum imbrex_status status = run_rows(problem, plan, 0, problem->m, &err);
    bool is_right = status == IMBREX_STATUS_OK;
    if (is_right) {
        matrix_download(&problem->d);
        is_right = result_is_right(problem, why, sizeof(why));
    } else {
        snprintf(why, sizeof(why), "%.150s", err.message);
    }
    snprintf(what, sizeof(what), "m %d, n %d, k %d, %s: %s", (int)problem->m, (int)problem->n,
             (int)problem->k, name, why);
    count(is_right, what);
}

/* ---- checks ---- */

/* The most tiles that can make up n with some of them narrower, or 0 where none can. */
static int32_t mixed_tiles(const struct imbrex_kernel_variant *variant,
                           const struct problem *problem)
{
    int64_t piece_columns = problem->is_swiglu ? 8 : 16;
    int64_t num_pieces = (problem->n + piece_columns - 1) / piece_columns;
    int64_t wide_pieces = variant->block_n / 16;
    int64_t most = num_pieces / (wide_pieces - 1);
    return most * wide_pieces >= num_pieces ? (int32_t)most : 0;
}

/* Catches a kernel that is wrong in a tail of rows, columns or k, under a cluster, with tiles of
 * two widths or another walk over them. */
static void check_variants(enum imbrex_kernel_op op, int variant_step)
{
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {4, 1}, {2, 2}, {1, 4}};
    static const int64_t sides[][3] = {{129, 264, 192}, {300, 520, 136}, {64, 1000, 64}};
    bool is_swiglu = op == IMBREX_KERNEL_OP_GEMM_SWIGLU;

    for (size_t s = 0; s < sizeof(sides) / sizeof(sides[0]); s++) {
        for (int padding = 0; padding < (is_swiglu ? 16 : 8); padding += 8) {
            struct problem problem = problem_create(is_swiglu, sides[s][0], sides[s][1],
                                                    sides[s][2], padding, !is_swiglu);
            struct imbrex_kernel_shape shape = {.op = op,
                                                .m = (int32_t)problem.m,
                                                .n = (int32_t)problem.n,
                                                .k = (int32_t)problem.k,
                                                .is_split = is_swiglu && padding != 0};
            make_reference(&problem);
            for (int32_t i = 0; i < imbrex_kernel_num_variants(op); i += variant_step) {
                for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
                    struct imbrex_kernel_variant variant;
                    struct imbrex_kernel_plan plan = {.variant_idx = i,
                                                      .cluster_m = clusters[j][0],
                                                      .cluster_n = clusters[j][1],
                                                      .group_m = 1 + (int32_t)j};
                    require(imbrex_kernel_variant_describe(op, i, &variant, NULL) ==
                                IMBREX_STATUS_OK,
                            "variant");
                    problem.weights_settled = j % 2 == 1;
                    if (j >= 3) {
                        plan.num_tiles_n = mixed_tiles(&variant, &problem);
                    }
                    if (imbrex_kernel_check(device, &shape, &plan, NULL) == IMBREX_STATUS_OK) {
                        char name[200];
                        snprintf(name, sizeof(name), "%s cluster %dx%d tiles %d%s", variant.name,
                                 (int)plan.cluster_m, (int)plan.cluster_n, (int)plan.num_tiles_n,
                                 problem.weights_settled ? " settled" : "");
                        check_plan(&problem, &plan, name);
                    }
                }
            }
            problem_destroy(&problem);
        }
    }
}

/* Catches shapes that the choice sends to a kernel which is not made for them. */
static void check_shapes(void)
{
    static const int64_t rows[] = {1, 7, 63, 64, 65, 127, 128, 129, 257};
    static const int64_t sides[][2] = {{8, 8},    {1, 1},    {100, 52},  {200, 264},
                                       {333, 77}, {72, 320}, {1032, 520}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (size_t j = 0; j < sizeof(sides) / sizeof(sides[0]); j++) {
            for (int is_swiglu = 0; is_swiglu < 2; is_swiglu++) {
                struct problem problem = problem_create(is_swiglu != 0, rows[i], sides[j][0],
                                                        sides[j][1], 0, j % 2 == 0 && !is_swiglu);
                if (problem.n % 8 == 0 || is_portable) {
                    make_reference(&problem);
                    check_plan(&problem, NULL, "chosen");
                } else {
                    count(run_rows(&problem, NULL, 0, problem.m, NULL) == IMBREX_STATUS_UNSUPPORTED,
                          "a width of d that is stored in part is refused");
                }
                problem_destroy(&problem);
            }
        }
    }
}

/* Catches gate and up changing places in one of the forms of their memory: their scales differ, so
 * that swapped ones are wrong. */
static void check_orders(void)
{
    int64_t m = 130, n = 136, k = 200;
    for (int order = 0; order < 2; order++) {
        struct problem problem = problem_create(true, m, n, k, 0, false);
        struct matrix whole = matrix_create(2 * n, k, k, 1.0 / sqrt((double)k));
        struct matrix gate = problem.gate, up = problem.up;
        make_reference(&problem);
        int64_t gate_row = order == 0 ? 0 : n, up_row = order == 0 ? n : 0;
        for (int64_t i = 0; i < n; i++) {
            memcpy(matrix_at(&whole, gate_row + i, 0), matrix_at(&gate, i, 0), (size_t)k * 2);
            memcpy(matrix_at(&whole, up_row + i, 0), matrix_at(&up, i, 0), (size_t)k * 2);
        }
        matrix_upload(&whole);
        problem.gate.base = whole.base + (CUdeviceptr)(gate_row * k * 2);
        problem.up.base = whole.base + (CUdeviceptr)(up_row * k * 2);
        check_plan(&problem, NULL, order == 0 ? "[gate; up]" : "[up; gate]");
        problem.gate = gate;
        problem.up = up;
        check_plan(&problem, NULL, "gate and up apart");
        matrix_destroy(&whole);
        problem_destroy(&problem);
    }
}

static bool is_gate_first(int32_t variant_idx)
{
    struct imbrex_kernel_variant variant;
    require(imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM_SWIGLU, variant_idx, &variant,
                                           NULL) == IMBREX_STATUS_OK,
            "variant");
    return strcmp(variant.schedule, "gate_first") == 0;
}

static struct imbrex_kernel_plan first_gate_first(void)
{
    struct imbrex_kernel_plan plan = {.cluster_m = 1, .cluster_n = 2, .group_m = 1};
    while (!is_gate_first(plan.variant_idx)) {
        plan.variant_idx++;
    }
    return plan;
}

/* The bits of d as a kernel that takes gate and up together has them; the caller's to free. */
static uint16_t *bits_of_both_at_once(struct problem *problem,
                                      const struct imbrex_kernel_shape *shape)
{
    struct imbrex_kernel_plan plan = {.cluster_m = 1, .cluster_n = 1, .group_m = 8};
    size_t num_bytes = (size_t)problem->d.num_elements * 2;
    uint16_t *bits = malloc(num_bytes);
    require(bits != NULL, "memory");
    while (plan.variant_idx < imbrex_kernel_num_variants(shape->op) &&
           (is_gate_first(plan.variant_idx) ||
            imbrex_kernel_check(device, shape, &plan, NULL) != IMBREX_STATUS_OK)) {
        plan.variant_idx++;
    }
    matrix_clear(&problem->d);
    require(run_rows(problem, &plan, 0, problem->m, NULL) == IMBREX_STATUS_OK, "launch");
    matrix_download(&problem->d);
    memcpy(bits, problem->d.host, num_bytes);
    return bits;
}

/* Every gate_first kernel on one problem, whose reference is made. */
static void check_gate_first_on(struct problem *problem, bool is_split, int variant_step)
{
    static const int32_t clusters[][2] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}};
    struct imbrex_kernel_shape shape = {.op = IMBREX_KERNEL_OP_GEMM_SWIGLU,
                                        .m = (int32_t)problem->m,
                                        .n = (int32_t)problem->n,
                                        .k = (int32_t)problem->k,
                                        .is_split = is_split};
    uint16_t *bits = bits_of_both_at_once(problem, &shape);
    int num_kernels = 0;

    for (int32_t i = 0; i < imbrex_kernel_num_variants(shape.op); i++) {
        if (!is_gate_first(i) || num_kernels++ % variant_step != 0) {
            continue;
        }
        for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
            struct imbrex_kernel_variant variant;
            struct imbrex_kernel_plan plan = {.variant_idx = i,
                                              .cluster_m = clusters[j][0],
                                              .cluster_n = clusters[j][1],
                                              .group_m = 1 + (int32_t)j};
            char name[200];
            require(imbrex_kernel_variant_describe(shape.op, i, &variant, NULL) == IMBREX_STATUS_OK,
                    "variant");
            plan.num_tiles_n = j % 2 == 1 ? mixed_tiles(&variant, problem) : 0;
            problem->weights_settled = j >= 2;
            snprintf(name, sizeof(name), "%s cluster %dx%d tiles %d", variant.name,
                     (int)plan.cluster_m, (int)plan.cluster_n, (int)plan.num_tiles_n);
            check_plan(problem, &plan, name);
            count(memcmp(bits, problem->d.host, (size_t)problem->d.num_elements * 2) == 0,
                  "bits of gate_first differ from those of gate and up at once");
        }
    }
    count(num_kernels > 0, "there are kernels of gate_first");
    free(bits);
}

/* Catches gate_first computing other bits than the kernels that take gate and up together: at other
 * scales of its input, in tails, and where the two consumers of a CTA take turns, or one of them
 * has a tile more than the other. */
static void check_gate_first(int variant_step)
{
    static const double scales[] = {0.3, 1.0, 3.0, 10.0};
    /* The first makes more tiles than an H200 has SMs, so that CTAs have one, two and three. */
    static const int64_t sides[][3] = {{641, 3464, 72}, {129, 264, 200}, {1, 8, 8},
                                       {63, 104, 52},   {7, 1000, 1},    {257, 72, 328}};
    for (size_t s = 0; s < sizeof(sides) / sizeof(sides[0]); s++) {
        int64_t m = sides[s][0], n = sides[s][1], k = sides[s][2];
        for (size_t i = 0; i < (s < 2 ? sizeof(scales) / sizeof(scales[0]) : 1); i++) {
            int64_t padding = i % 2 == 1 ? 8 : 0;
            struct problem problem = problem_create(true, m, n, k, padding, false);
            for (int64_t row = 0; row < m; row++) {
                for (int64_t column = 0; column < k; column++) {
                    uint16_t *a = matrix_at(&problem.a, row, column);
                    *a = bf16_from_float((float)(scales[(i + 1) % 4] * bf16_to_float(*a)));
                }
            }
            matrix_upload(&problem.a);
            make_reference(&problem);
            check_gate_first_on(&problem, padding != 0, variant_step);
            problem_destroy(&problem);
        }
    }
}

/* Catches results that depend on the run, on the other rows, or on how many there are. */
static void check_same_bits(void)
{
    struct problem problem = problem_create(true, 300, 264, 512, 0, false);
    size_t num_bytes = (size_t)problem.d.num_elements * 2;
    uint16_t *first = malloc(num_bytes);
    require(first != NULL, "memory");
    struct imbrex_kernel_shape shape = {
        .op = IMBREX_KERNEL_OP_GEMM_SWIGLU, .m = 300, .n = 264, .k = 512};
    struct imbrex_kernel_plan plan;
    require(imbrex_kernel_choose(device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, NULL) ==
                IMBREX_STATUS_OK,
            "choice");

    matrix_clear(&problem.d);
    require(run_rows(&problem, &plan, 0, 300, NULL) == IMBREX_STATUS_OK, "launch");
    matrix_download(&problem.d);
    memcpy(first, problem.d.host, num_bytes);
    matrix_clear(&problem.d);
    require(run_rows(&problem, &plan, 0, 300, NULL) == IMBREX_STATUS_OK, "launch");
    matrix_download(&problem.d);
    count(memcmp(first, problem.d.host, num_bytes) == 0, "two runs differ");

    matrix_clear(&problem.d);
    static const int64_t pieces[] = {1, 7, 64, 128, 100};
    int64_t row = 0;
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        require(run_rows(&problem, &plan, row, pieces[i], NULL) == IMBREX_STATUS_OK, "launch");
        row += pieces[i];
    }
    matrix_download(&problem.d);
    count(memcmp(first, problem.d.host, num_bytes) == 0, "rows depend on the rows beside them");
    free(first);
    problem_destroy(&problem);
}

/* Catches values at the edge of the formats that come out otherwise than fp32 arithmetic has them:
 * one element of a row of A is special, the rest of the row is zero. */
static void check_special_values(void)
{
    static const struct {
        float gate, up;
    } cases[] = {{INFINITY, 1.0f}, {1e4f, 1.0f},     {-1e4f, 1.0f},   {100.0f, -100.0f},
                 {-80.0f, 1e4f},   {-87.5f, 1e4f},   {-100.0f, 1e4f}, {NAN, 1.0f},
                 {1.0f, NAN},      {0.0f, 5.0f},     {-0.0f, 5.0f},   {1e-20f, 1e-10f},
                 {1e35f, 1.0f},    {1.0f, -INFINITY}};
    enum { NUM_CASES = sizeof(cases) / sizeof(cases[0]) };
    struct problem problem = problem_create(true, NUM_CASES, 8, 16, 0, false);

    /* Column 0 of A carries the gate's value, column 1 that of up. */
    for (int64_t i = 0; i < NUM_CASES; i++) {
        for (int64_t j = 0; j < 16; j++) {
            *matrix_at(&problem.a, i, j) = 0;
        }
        *matrix_at(&problem.a, i, 0) = bf16_from_float(cases[i].gate);
        *matrix_at(&problem.a, i, 1) = bf16_from_float(cases[i].up);
    }
    for (int64_t i = 0; i < 8; i++) {
        for (int64_t j = 0; j < 16; j++) {
            *matrix_at(&problem.gate, i, j) = j == 0 ? bf16_from_float(1.0f) : 0;
            *matrix_at(&problem.up, i, j) = j == 1 ? bf16_from_float(1.0f) : 0;
        }
    }
    matrix_upload(&problem.a);
    matrix_upload(&problem.gate);
    matrix_upload(&problem.up);
    for (int64_t i = 0; i < NUM_CASES; i++) {
        float gate = bf16_to_float(bf16_from_float(cases[i].gate));
        float up = bf16_to_float(bf16_from_float(cases[i].up));
        /* 0 x infinity: the other element of the row makes the sum NaN. */
        double g = isinf(up) || isnan(up) ? NAN : (double)gate;
        double u = isinf(gate) || isnan(gate) ? NAN : (double)up;
        double silu = g / (1.0 + exp(-g)), expected = silu * u;
        /* Where e^-gate is no more than a factor of 4 from the end of fp32, silu may be 0. */
        double flushed = fabs(silu) < 0x1.6p-120 ? fabs(expected) : 0.0;
        for (int64_t j = 0; j < 8; j++) {
            problem.expected[i * 8 + j] = expected;
            problem.bound[i * 8 + j] = fabs(expected) * (0x1p-8 + 0x1p-16) + flushed + 1e-37;
        }
    }
    check_plan(&problem, NULL, "special values");
    problem_destroy(&problem);
}

/* Two launches in a graph; NULL if any of it failed. */
static CUgraphExec capture(const struct problem *problem, const struct imbrex_kernel_plan *plan)
{
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    bool is_ok = GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL) &&
                 run_rows(problem, plan, 0, problem->m, NULL) == IMBREX_STATUS_OK &&
                 run_rows(problem, plan, 0, problem->m, NULL) == IMBREX_STATUS_OK;
    is_ok = GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) && is_ok &&
            GPU_CALL(&gpu, graph_instantiate, &replay, graph, 0);
    if (graph != NULL) {
        (void)gpu.graph_destroy(graph);
    }
    return is_ok ? replay : NULL;
}

/* Opens the device once more: one that has launched nothing yet. */
static struct imbrex_device *open_anew(void)
{
    struct imbrex_device *opened = NULL;
    struct imbrex_device_options options = imbrex_device_options_default();
    options.portable_kernels = is_portable;
    require(imbrex_device_open(device_idx, &options, &opened, NULL) == IMBREX_STATUS_OK,
            "second open");
    return opened;
}

/* Catches work in a launch that a capture forbids (this device has launched nothing before), a
 * graph that keeps what was in memory instead of where it lies, and launches that share something
 * with those of another graph that is replayed on another stream at the same time. */
static void check_graphs(const struct imbrex_kernel_plan *plan)
{
    enum { NUM_GRAPHS = 2, NUM_REPLAYS = 50 };
    static const int64_t sides[NUM_GRAPHS][3] = {{200, 136, 128}, {500, 1032, 320}};
    struct imbrex_device *used = device;
    struct problem problems[NUM_GRAPHS];
    CUgraphExec replays[NUM_GRAPHS] = {NULL};
    CUstream streams[NUM_GRAPHS] = {NULL};
    char why[160] = "";
    bool is_ok = true;

    device = open_anew();
    for (int i = 0; i < NUM_GRAPHS; i++) {
        struct problem *problem = &problems[i];
        *problem = problem_create(true, sides[i][0], sides[i][1], sides[i][2], 0, false);
        matrix_clear(&problem->d);
        replays[i] = capture(problem, plan);
        is_ok = is_ok && replays[i] != NULL &&
                GPU_CALL(&gpu, stream_create, &streams[i], CU_STREAM_NON_BLOCKING);
        for (int64_t j = 0; j < problem->k; j++) {
            *matrix_at(&problem->a, 3, j) = bf16_from_float((float)random_normal());
        }
        matrix_upload(&problem->a);
        make_reference(problem);
    }
    for (int replay = 0; is_ok && replay < NUM_REPLAYS; replay++) {
        for (int i = 0; i < NUM_GRAPHS; i++) {
            is_ok = is_ok && GPU_CALL(&gpu, graph_launch, replays[i], streams[i]);
        }
    }
    for (int i = 0; is_ok && i < NUM_GRAPHS; i++) {
        is_ok = GPU_CALL(&gpu, stream_synchronize, streams[i]);
    }
    for (int i = 0; is_ok && i < NUM_GRAPHS; i++) {
        matrix_download(&problems[i].d);
        is_ok = result_is_right(&problems[i], why, sizeof(why));
    }
    count(is_ok, "graphs on two streams");
    if (!is_ok) {
        printf("graphs: %s\n", why);
    }
    for (int i = 0; i < NUM_GRAPHS; i++) {
        if (replays[i] != NULL) {
            (void)gpu.graph_exec_destroy(replays[i]);
        }
        if (streams[i] != NULL) {
            (void)gpu.stream_destroy(streams[i]);
        }
        problem_destroy(&problems[i]);
    }
    imbrex_device_close(device);
    device = used;
}

/* A launch by a thread whose context is another one, or none. */
static void check_foreign_context(struct problem *problem, const struct imbrex_kernel_plan *plan,
                                  CUcontext context, const char *name)
{
    CUcontext current = NULL;
    char why[160] = "", what[300];

    matrix_clear(&problem->d);
    require(GPU_CALL(&gpu, ctx_set_current, context), "context");
    bool is_right = run_rows(problem, plan, 0, problem->m, NULL) == IMBREX_STATUS_OK &&
                    GPU_CALL(&gpu, ctx_get_current, &current) && current == context;
    require(GPU_CALL(&gpu, ctx_set_current, gpu.context), "context");
    matrix_download(&problem->d);
    is_right = is_right && result_is_right(problem, why, sizeof(why));
    snprintf(what, sizeof(what), "%s: %s", name, why);
    count(is_right, what);
}

/* Catches a launch that needs a stream of the caller's, or a context that is current already; and
 * one that leaves another context behind. */
static void check_default_stream(void)
{
    struct problem problem = problem_create(true, 70, 64, 64, 0, false);
    CUstream stream = gpu.stream;

    make_reference(&problem);
    gpu.stream = NULL;
    check_plan(&problem, NULL, "default stream");
    gpu.stream = stream;
    check_foreign_context(&problem, NULL, NULL, "no current context");
    problem_destroy(&problem);
}

/* Catches offsets in 32 bits: a result of more than 2^31 elements, looked at in its last rows. */
static void check_many_elements(void)
{
    enum { COLUMNS = 131072, ROWS = 16400, K = 64, LAST = 4 };
    struct problem problem = {.m = LAST, .n = COLUMNS, .k = K, .is_swiglu = true};
    CUdeviceptr a = 0, d = 0;
    size_t row_bytes = (size_t)COLUMNS * 2;
    uint16_t *found = malloc(row_bytes * LAST);
    require(found != NULL, "memory");
    /* The last rows of A are the problem's A; the others do not matter. */
    problem.a = matrix_create(LAST, K, K, 1.0);
    problem.gate = matrix_create(COLUMNS, K, K, 0.125);
    problem.up = matrix_create(COLUMNS, K, K, 0.25);
    require(GPU_CALL(&gpu, mem_alloc, &a, (size_t)ROWS * K * 2) &&
                GPU_CALL(&gpu, mem_alloc, &d, (size_t)ROWS * row_bytes) &&
                GPU_CALL(&gpu, memset_d8_async, a, 0, (size_t)ROWS * K * 2, gpu.stream) &&
                GPU_CALL(&gpu, memset_d8_async, d, 0xff, (size_t)ROWS * row_bytes, gpu.stream) &&
                GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                copied_to_gpu(a + (size_t)(ROWS - LAST) * K * 2, matrix_at(&problem.a, 0, 0),
                              (size_t)LAST * K * 2),
            "memory of the GPU");
    struct imbrex_gemm_swiglu_params params = {
        .a = (const void *)a,
        .gate = (const void *)problem.gate.base,
        .up = (const void *)problem.up.base,
        .d = (void *)d,
        .num_tokens = ROWS,
        .hidden_size = K,
        .intermediate_size = COLUMNS,
    };
    bool is_right =
        imbrex_gemm_swiglu(device, &params, NULL, gpu.stream, NULL) == IMBREX_STATUS_OK &&
        GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
        GPU_CALL(&gpu, memcpy_dtoh, found, d + (size_t)(ROWS - LAST) * row_bytes, row_bytes * LAST);
    for (int64_t i = 0; is_right && i < LAST; i++) {
        for (int64_t j = 0; j < COLUMNS; j++) {
            double expected, bound;
            reference_element(&problem, i, j, &expected, &bound);
            is_right &= fabs(bf16_to_float(found[i * COLUMNS + j]) - expected) <= bound;
        }
    }
    count(is_right, "more than 2^31 elements");
    (void)gpu.mem_free(a);
    (void)gpu.mem_free(d);
    matrix_destroy(&problem.a);
    matrix_destroy(&problem.gate);
    matrix_destroy(&problem.up);
    free(found);
}

/* Catches memory that is not the GPU's reaching a kernel. */
static void check_foreign_memory(void)
{
    struct problem problem = problem_create(false, 64, 64, 64, 0, false);
    struct imbrex_error err = {0};
    CUdeviceptr base = problem.a.base;
    problem.a.base = (CUdeviceptr)(uintptr_t)problem.a.host;
    count(run_rows(&problem, NULL, 0, 64, &err) == IMBREX_STATUS_INVALID_ARGUMENT,
          "an address of the host is refused");
    problem.a.base = base;
    problem_destroy(&problem);
}

/* All portable variants on a problem of odd sides, against the bits of the first one. */
static void check_tile_bits(void)
{
    for (int is_swiglu = 0; is_swiglu < 2; is_swiglu++) {
        enum imbrex_kernel_op op =
            is_swiglu != 0 ? IMBREX_KERNEL_OP_GEMM_SWIGLU : IMBREX_KERNEL_OP_GEMM;
        struct problem problem = problem_create(is_swiglu != 0, 200, 333, 1000, 8, is_swiglu == 0);
        size_t num_bytes = (size_t)problem.d.num_elements * 2;
        uint16_t *first = calloc(1, num_bytes);
        int num_compared = 0;
        require(first != NULL, "memory");
        make_reference(&problem);
        for (int32_t i = 0; i < imbrex_kernel_num_variants(op); i++) {
            struct imbrex_kernel_variant variant;
            struct imbrex_kernel_plan plan = {
                .variant_idx = i, .cluster_m = 1, .cluster_n = 1, .group_m = 2};
            require(imbrex_kernel_variant_describe(op, i, &variant, NULL) == IMBREX_STATUS_OK,
                    "variant");
            if (!variant.is_portable || variant.is_general) {
                continue;
            }
            check_plan(&problem, &plan, variant.name);
            if (num_compared++ == 0) {
                memcpy(first, problem.d.host, num_bytes);
            }
            count(memcmp(first, problem.d.host, num_bytes) == 0, variant.name);
        }
        count(num_compared > 1, "portable variants");
        free(first);
        problem_destroy(&problem);
    }
}

static void run_all(int variant_step)
{
    /* First what only Hopper has. */
    if (!is_portable) {
        struct imbrex_kernel_plan plan = first_gate_first();
        check_gate_first(variant_step);
        check_graphs(&plan);
    }
    check_variants(IMBREX_KERNEL_OP_GEMM_SWIGLU, variant_step);
    check_variants(IMBREX_KERNEL_OP_GEMM, variant_step);
    check_orders();
    check_same_bits();
    check_special_values();
    check_graphs(NULL);
    check_default_stream();
    check_foreign_memory();
    if (variant_step == 1) {
        check_shapes();
        check_many_elements();
    }
}

/* Catches all of that in the kernels for other GPUs than Hopper, as the driver compiles them; and
 * rows that have other bits in another tile shape of theirs. */
static void check_portable(int variant_step)
{
    struct imbrex_device *hopper = device;
    struct imbrex_device_info description;
    is_portable = true;
    device = open_anew();
    run_all(variant_step);
    check_tile_bits();
    is_portable = false;
    imbrex_device_describe(device, &description);
    printf("portable: %lld bytes of kernels loaded in %.2f ms\n",
           (long long)description.kernel_image_bytes, (double)description.kernel_load_ns * 1e-6);
    imbrex_device_close(device);
    device = hopper;
}

/* Kernels of both ops on whichever GPU is the device, launched by a thread that uses the GPU of
 * another context as well. */
static void check_on_second_gpu(int variant_step, CUcontext context_of_first)
{
    struct problem problem = problem_create(true, 300, 264, 200, 0, false);
    struct imbrex_kernel_plan plan = first_gate_first();
    make_reference(&problem);
    check_variants(IMBREX_KERNEL_OP_GEMM_SWIGLU, variant_step * 5);
    check_variants(IMBREX_KERNEL_OP_GEMM, variant_step * 5);
    check_orders();
    check_graphs(NULL);
    check_foreign_context(&problem, NULL, context_of_first, "context of the first GPU");
    if (is_portable) {
        check_tile_bits();
    } else {
        check_gate_first_on(&problem, false, variant_step);
        check_graphs(&plan);
        check_foreign_context(&problem, &plan, context_of_first,
                              "gate_first, context of the first GPU");
    }
    problem_destroy(&problem);
}

/* Catches what works on the first GPU only: contexts, kernels and descriptors are each device's. */
static void check_second_gpu(int variant_step)
{
    struct gpu first_gpu = gpu;
    struct imbrex_device *first = device;
    struct imbrex_error err = {0};

    if (imbrex_device_open(1, NULL, &device, &err) != IMBREX_STATUS_OK) {
        printf("second GPU not checked: %s\n", err.message);
        device = first;
        return;
    }
    require(gpu_open(1, &gpu), "second GPU");
    device_idx = 1;
    struct imbrex_device *second = device;
    check_on_second_gpu(variant_step, first_gpu.context);
    is_portable = true;
    device = open_anew();
    check_on_second_gpu(variant_step, first_gpu.context);
    imbrex_device_close(device);
    is_portable = false;
    struct problem problem = problem_create(true, 64, 64, 64, 0, false);
    device = first;
    count(run_rows(&problem, NULL, 0, 64, &err) == IMBREX_STATUS_INVALID_ARGUMENT,
          "memory of the other GPU is refused");
    device = second;
    problem_destroy(&problem);
    imbrex_device_close(second);
    gpu_close(&gpu);
    device = first;
    device_idx = 0;
    gpu = first_gpu;
    /* gpu_close left no context current. */
    require(GPU_CALL(&gpu, ctx_set_current, gpu.context), "context");
}

int main(int argc, char **argv)
{
    int exit_code = 0;
    int variant_step = 1;
    bool is_portable_only = false, is_second_only = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "portable") == 0) {
            is_portable_only = true;
        } else if (strcmp(argv[i], "second") == 0) {
            is_second_only = true;
        } else {
            variant_step = atoi(argv[i]);
        }
    }
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(variant_step > 0, "argument");
    if (!is_portable_only && !is_second_only) {
        run_all(variant_step);
    }
    if (!is_portable_only) {
        check_second_gpu(variant_step);
    }
    if (!is_second_only) {
        check_portable(variant_step);
    }
    struct imbrex_device_info description;
    imbrex_device_describe(device, &description);
    printf("%lld bytes of kernels loaded in %.2f ms\n", (long long)description.kernel_image_bytes,
           (double)description.kernel_load_ns * 1e-6);
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
