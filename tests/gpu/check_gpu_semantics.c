/* SPDX-License-Identifier: Apache-2.0 */
/* What imbrex_gemm_swiglu does beside SwiGLU, on a GPU: interleaved weights, biases, activations,
 * clamps and roundings against fp64 on the host; equal bits where the definition says so; the
 * activation as a kernel of its own over all bf16; graphs on two streams; a second GPU. Skipped
 * where there is none. With a number as its argument every number-th case only, for tools that make
 * kernels slow; with `portable` only the kernels for other GPUs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gating_reference.h"
#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/dtype.h"
#include "tests/gpu/gpu_matrix.h"
#include "tests/gpu/gpu_session.h"

/* The device was opened for portable kernels. */
static bool is_portable;

/* ---- the product in all layouts ---- */

enum layout {
    LAYOUT_GATE_UP,
    LAYOUT_UP_GATE,
    LAYOUT_APART, /* strides that differ: no view covers both */
    LAYOUT_INTERLEAVED_1,
    LAYOUT_INTERLEAVED_1_UP_FIRST,
    LAYOUT_INTERLEAVED_8,
    LAYOUT_INTERLEAVED_8_UP_FIRST,
    NUM_LAYOUTS
};
static const char *const layout_names[NUM_LAYOUTS] = {
    "[gate; up]",     "[up; gate]",       "apart",         "by 1, gate first",
    "by 1, up first", "by 8, gate first", "by 8, up first"};
static const int32_t layout_interleave[NUM_LAYOUTS] = {0, 0, 0, 1, 1, 8, 8};

enum biases {
    BIASES_NONE,
    BIASES_BOTH,
    BIASES_GATE,
    BIASES_UP,
    BIASES_BY_1,
    BIASES_BY_8,
    NUM_BIASES
};

/* The same weights lie in memory in each layout, the same biases in each way. */
struct product {
    int64_t m, n, k;
    struct matrix a, d;
    struct matrix weights[NUM_LAYOUTS]; /* one matrix; of LAYOUT_APART gate */
    struct matrix up_apart;
    float *gate_bias, *up_bias;                   /* [n] */
    CUdeviceptr gate_bias_buffer, up_bias_buffer; /* likewise */
    CUdeviceptr bias_buffers[2];                  /* [2 n] by 1, by 8; gate first */
    double *gate, *up, *gate_size, *up_size;      /* [m, n], without bias; magnitudes */
};

static int64_t interleaved_row(int64_t row, int64_t interleave, bool is_second)
{
    return row + row / interleave * interleave + (is_second ? interleave : 0);
}

/* Where row `row` of gate or up lies in the one matrix of a layout. */
static int64_t layout_row(enum layout layout, int64_t n, int64_t row, bool is_up)
{
    bool up_first = layout == LAYOUT_UP_GATE || layout == LAYOUT_INTERLEAVED_1_UP_FIRST ||
                    layout == LAYOUT_INTERLEAVED_8_UP_FIRST;
    bool is_second = is_up != up_first;
    return layout_interleave[layout] == 0
               ? row + (is_second ? n : 0)
               : interleaved_row(row, layout_interleave[layout], is_second);
}

static CUdeviceptr upload_floats(const float *values, int64_t count)
{
    CUdeviceptr buffer = 0;
    require(GPU_CALL(&gpu, mem_alloc, &buffer, (size_t)count * sizeof(float)), "biases");
    require(copied_to_gpu(buffer, values, (size_t)count * sizeof(float)), "copy to the GPU");
    return buffer;
}

static void create_biases(struct product *product, double scale)
{
    int64_t n = product->n;
    float *both = malloc((size_t)n * 2 * sizeof(float));
    product->gate_bias = malloc((size_t)n * sizeof(float));
    product->up_bias = malloc((size_t)n * sizeof(float));
    require(both != NULL && product->gate_bias != NULL && product->up_bias != NULL, "memory");
    for (int64_t i = 0; i < n; i++) {
        product->gate_bias[i] = (float)(scale * random_normal());
        product->up_bias[i] = (float)(scale * random_normal());
    }
    product->gate_bias_buffer = upload_floats(product->gate_bias, n);
    product->up_bias_buffer = upload_floats(product->up_bias, n);
    for (int way = 0; way < 2; way++) {
        for (int64_t i = 0; i < n; i++) {
            both[interleaved_row(i, way == 0 ? 1 : 8, false)] = product->gate_bias[i];
            both[interleaved_row(i, way == 0 ? 1 : 8, true)] = product->up_bias[i];
        }
        product->bias_buffers[way] = upload_floats(both, 2 * n);
    }
    free(both);
}

static double dot(const uint16_t *x, const uint16_t *y, int64_t count, double *size)
{
    double sum = 0.0;
    *size = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double term = (double)bf16_to_float(x[i]) * (double)bf16_to_float(y[i]);
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

static void create_reference(struct product *product)
{
    int64_t n = product->n;
    size_t num_bytes = (size_t)(product->m * n) * sizeof(double);
    product->gate = malloc(num_bytes);
    product->up = malloc(num_bytes);
    product->gate_size = malloc(num_bytes);
    product->up_size = malloc(num_bytes);
    require(product->gate != NULL && product->up != NULL && product->gate_size != NULL &&
                product->up_size != NULL,
            "memory");
    const struct matrix *weights = &product->weights[LAYOUT_GATE_UP];
    for (int64_t i = 0; i < product->m; i++) {
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * n + j;
            product->gate[at] = dot(matrix_at(&product->a, i, 0), matrix_at(weights, j, 0),
                                    product->k, &product->gate_size[at]);
            product->up[at] = dot(matrix_at(&product->a, i, 0), matrix_at(weights, n + j, 0),
                                  product->k, &product->up_size[at]);
        }
    }
}

/* scale: of the products. */
static struct product product_create(int64_t m, int64_t n, int64_t k, double scale)
{
    struct product product = {.m = m, .n = n, .k = k};
    int64_t stride = (k + 7) / 8 * 8;
    product.a = matrix_create(m, k, stride, 1.0);
    product.d = matrix_create(m, n, n + 8, 0.0);
    product.weights[0] = matrix_create(2 * n, k, stride, scale / sqrt((double)k));
    const struct matrix *first = &product.weights[LAYOUT_GATE_UP];
    for (int layout = 1; layout < NUM_LAYOUTS; layout++) {
        bool is_apart = layout == LAYOUT_APART;
        struct matrix weights = matrix_create(is_apart ? n : 2 * n, k, stride, 0.0);
        if (is_apart) {
            product.up_apart = matrix_create(n, k, stride + 8, 0.0);
        }
        for (int64_t row = 0; row < n; row++) {
            for (int is_up = 0; is_up < 2; is_up++) {
                uint16_t *to =
                    !is_apart ? matrix_at(&weights,
                                          layout_row((enum layout)layout, n, row, is_up != 0), 0)
                    : is_up   ? matrix_at(&product.up_apart, row, 0)
                              : matrix_at(&weights, row, 0);
                memcpy(to, matrix_at(first, row + (is_up ? n : 0), 0), (size_t)k * 2);
            }
        }
        matrix_upload(&weights);
        product.weights[layout] = weights;
    }
    matrix_upload(&product.up_apart);
    create_biases(&product, scale);
    create_reference(&product);
    return product;
}

static void product_destroy(struct product *product)
{
    matrix_destroy(&product->a);
    matrix_destroy(&product->d);
    for (int i = 0; i < NUM_LAYOUTS; i++) {
        matrix_destroy(&product->weights[i]);
    }
    matrix_destroy(&product->up_apart);
    (void)gpu.mem_free(product->gate_bias_buffer);
    (void)gpu.mem_free(product->up_bias_buffer);
    (void)gpu.mem_free(product->bias_buffers[0]);
    (void)gpu.mem_free(product->bias_buffers[1]);
    free(product->gate_bias);
    free(product->up_bias);
    free(product->gate);
    free(product->up);
    free(product->gate_size);
    free(product->up_size);
}

/* ---- a case ---- */

struct semantics {
    enum layout layout;
    enum biases biases;
    enum imbrex_rounding rounding;
    struct imbrex_gating gating;
};

static struct imbrex_gemm_swiglu_params params_of(const struct product *product,
                                                  const struct semantics *semantics)
{
    enum layout layout = semantics->layout;
    const struct matrix *weights = &product->weights[layout];
    CUdeviceptr row_bytes = (CUdeviceptr)weights->stride * 2;
    struct imbrex_gemm_swiglu_params params = {
        .a = (const void *)product->a.base,
        .d = (void *)product->d.base,
        .a_stride = product->a.stride,
        .gate_stride = weights->stride,
        .up_stride = weights->stride,
        .d_stride = product->d.stride,
        .num_tokens = (int32_t)product->m,
        .hidden_size = (int32_t)product->k,
        .intermediate_size = (int32_t)product->n,
        .interleave_rows = layout_interleave[layout],
        .rounding = semantics->rounding,
        .gating = semantics->gating,
    };
    if (layout == LAYOUT_APART) {
        params.gate = (const void *)weights->base;
        params.up = (const void *)product->up_apart.base;
        params.up_stride = product->up_apart.stride;
    } else {
        int64_t gate_row = layout_row(layout, product->n, 0, false);
        int64_t up_row = layout_row(layout, product->n, 0, true);
        params.gate = (const void *)(weights->base + (CUdeviceptr)gate_row * row_bytes);
        params.up = (const void *)(weights->base + (CUdeviceptr)up_row * row_bytes);
    }
    if (semantics->biases == BIASES_BY_1 || semantics->biases == BIASES_BY_8) {
        params.interleave_biases = semantics->biases == BIASES_BY_1 ? 1 : 8;
        params.gate_bias =
            (const float *)product->bias_buffers[semantics->biases == BIASES_BY_1 ? 0 : 1];
        params.up_bias = params.gate_bias + params.interleave_biases;
    } else if (semantics->biases != BIASES_NONE) {
        params.gate_bias =
            semantics->biases == BIASES_UP ? NULL : (const float *)product->gate_bias_buffer;
        params.up_bias =
            semantics->biases == BIASES_GATE ? NULL : (const float *)product->up_bias_buffer;
    }
    return params;
}

static void name_case(const struct product *product, const struct semantics *semantics, char *text,
                      size_t num_bytes)
{
    snprintf(text, num_bytes,
             "m %d, n %d, k %d, %s, biases %d, activation %d, alpha %g, limit %g, offset %g, %s",
             (int)product->m, (int)product->n, (int)product->k, layout_names[semantics->layout],
             (int)semantics->biases, (int)semantics->gating.activation,
             (double)semantics->gating.alpha, (double)semantics->gating.limit,
             (double)semantics->gating.up_offset,
             semantics->rounding == IMBREX_ROUNDING_EXACT ? "exact" : "unfused");
}

/* Runs into a cleared d and downloads it. */
static bool run_case(struct product *product, const struct semantics *semantics,
                     const struct imbrex_kernel_plan *plan, const char *name)
{
    struct imbrex_gemm_swiglu_params params = params_of(product, semantics);
    struct imbrex_error err = {0};
    matrix_clear(&product->d);
    if (imbrex_gemm_swiglu(device, &params, plan, gpu.stream, &err) != IMBREX_STATUS_OK) {
        char what[600];
        snprintf(what, sizeof(what), "%s: %s", name, err.message);
        count(false, what);
        return false;
    }
    matrix_download(&product->d);
    return true;
}

/* Half an ulp of the result; what fp32 sums that a tensor core truncates may lose, through the
 * slope of the activation, at most 1.13; 2^-15 of the activation's own, of which its fp32 exponent
 * is the larger part far below zero. */
static bool element_is_right(const struct product *product, const struct semantics *semantics,
                             int64_t at, int64_t column, double found, double *expected,
                             double *bound)
{
    bool has_gate = semantics->biases != BIASES_NONE && semantics->biases != BIASES_UP;
    bool has_up = semantics->biases != BIASES_NONE && semantics->biases != BIASES_GATE;
    double gate_bias = has_gate ? (double)product->gate_bias[column] : 0.0;
    double up_bias = has_up ? (double)product->up_bias[column] : 0.0;
    double gate = product->gate[at] + gate_bias, up = product->up[at] + up_bias;
    double step = ((double)product->k / 16.0 + 16.0) * 0x1p-22;
    double gate_error = 1.13 * step * (product->gate_size[at] + fabs(gate_bias));
    double up_error =
        step * (product->up_size[at] + fabs(up_bias) + fabs((double)semantics->gating.up_offset));
    struct gating_value value = gating_exact(&semantics->gating, gate, up);
    *expected = value.activated * value.up;
    *bound = fabs(*expected) * (0x1p-8 + 0x1p-15) + gate_error * (fabs(value.up) + up_error) +
             fabs(value.activated) * up_error + 1e-37;
    return fabs(found - *expected) <= *bound;
}

static bool canaries_are_whole(const struct matrix *d, int64_t *where)
{
    for (int64_t i = 0; i < d->num_elements; i++) {
        int64_t at = i - CANARY_ELEMENTS;
        bool is_inside = at >= 0 && at < d->rows * d->stride && at % d->stride < d->columns;
        if (!is_inside && d->host[i] != CANARY) {
            *where = at;
            return false;
        }
    }
    return true;
}

/* What is in d, downloaded, against fp64. */
static void check_values(const struct product *product, const struct semantics *semantics,
                         const char *name)
{
    char what[600] = "";
    bool is_right = true;
    for (int64_t i = 0; is_right && i < product->m; i++) {
        for (int64_t j = 0; is_right && j < product->n; j++) {
            double found = (double)bf16_to_float(*matrix_at(&product->d, i, j)), expected, bound;
            is_right = element_is_right(product, semantics, i * product->n + j, j, found, &expected,
                                        &bound);
            if (!is_right) {
                snprintf(what, sizeof(what), "%s: [%d, %d] is %g, expected %g within %g", name,
                         (int)i, (int)j, found, expected, bound);
            }
        }
    }
    int64_t where = 0;
    if (is_right && !canaries_are_whole(&product->d, &where)) {
        is_right = false;
        snprintf(what, sizeof(what), "%s: element %d beside the result was written", name,
                 (int)where);
    }
    count(is_right, what);
}

/* What is in d, downloaded, against bits that it must have. */
static void check_bits(const struct product *product, const uint16_t *bits, const char *name)
{
    char what[600] = "";
    int64_t num_differing = 0, first = 0;
    for (int64_t i = 0; i < product->d.num_elements; i++) {
        if (product->d.host[i] != bits[i]) {
            first = num_differing == 0 ? i : first;
            num_differing++;
        }
    }
    if (num_differing > 0) {
        snprintf(what, sizeof(what), "%s: %d elements have other bits, the first %04x for %04x",
                 name, (int)num_differing, product->d.host[first], bits[first]);
    }
    count(num_differing == 0, what);
}

/* ---- the unfused pair ---- */

/* d as two products and the activation's kernel leave it. */
static void run_unfused(struct product *product, const struct semantics *semantics, uint16_t *bits)
{
    struct semantics plain = *semantics;
    plain.layout = LAYOUT_GATE_UP;
    plain.biases = semantics->biases == BIASES_BY_1 || semantics->biases == BIASES_BY_8
                       ? BIASES_BOTH
                       : semantics->biases;
    struct imbrex_gemm_swiglu_params fused = params_of(product, &plain);
    struct matrix gate = matrix_create(product->m, product->n, product->n + 8, 0.0);
    struct matrix up = matrix_create(product->m, product->n, product->n, 0.0);
    struct imbrex_gemm_params products[2];
    for (int i = 0; i < 2; i++) {
        const struct matrix *to = i == 0 ? &gate : &up;
        products[i] = (struct imbrex_gemm_params){
            .a = fused.a,
            .b = i == 0 ? fused.gate : fused.up,
            .bias = i == 0 ? fused.gate_bias : fused.up_bias,
            .d = (void *)to->base,
            .a_stride = fused.a_stride,
            .b_stride = fused.gate_stride,
            .d_stride = to->stride,
            .num_tokens = fused.num_tokens,
            .in_features = fused.hidden_size,
            .out_features = fused.intermediate_size,
        };
    }
    struct imbrex_gated_activation_params activation = {
        .gate = (const void *)gate.base,
        .up = (const void *)up.base,
        .d = fused.d,
        .gate_stride = gate.stride,
        .up_stride = up.stride,
        .d_stride = fused.d_stride,
        .num_tokens = fused.num_tokens,
        .intermediate_size = fused.intermediate_size,
        .rounding = IMBREX_ROUNDING_MATCH_UNFUSED,
        .gating = semantics->gating,
    };
    matrix_clear(&product->d);
    require(imbrex_gemm(device, &products[0], NULL, gpu.stream, NULL) == IMBREX_STATUS_OK &&
                imbrex_gemm(device, &products[1], NULL, gpu.stream, NULL) == IMBREX_STATUS_OK &&
                imbrex_gated_activation(device, &activation, gpu.stream, NULL) == IMBREX_STATUS_OK,
            "unfused pair");
    matrix_download(&product->d);
    memcpy(bits, product->d.host, (size_t)product->d.num_elements * 2);
    matrix_destroy(&gate);
    matrix_destroy(&up);
}

/* ---- checks ---- */

static const struct imbrex_gating gatings[] = {
    {.activation = IMBREX_ACTIVATION_SILU},
    {.activation = IMBREX_ACTIVATION_GELU_ERF},
    {.activation = IMBREX_ACTIVATION_GELU_TANH},
    {.activation = IMBREX_ACTIVATION_RELU},
    {.activation = IMBREX_ACTIVATION_SILU, .alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f},
    {.activation = IMBREX_ACTIVATION_SILU, .alpha = 1.702f},
    {.activation = IMBREX_ACTIVATION_SILU, .limit = 1.0f},
    {.activation = IMBREX_ACTIVATION_SILU, .up_offset = -0.3f},
    {.activation = IMBREX_ACTIVATION_GELU_ERF, .limit = 0.7f, .up_offset = 1.0f},
    {.activation = IMBREX_ACTIVATION_GELU_TANH, .limit = 2.1f},
    {.activation = IMBREX_ACTIVATION_RELU, .limit = 6.0f, .up_offset = 0.5f},
};
#define NUM_GATINGS (sizeof(gatings) / sizeof(gatings[0]))

/* All gatings in one layout and one way to have biases: exact ones against fp64, unfused ones
 * against the bits of the unfused pair. */
static void check_gatings(struct product *product, enum layout layout, enum biases biases, int step)
{
    uint16_t *bits = malloc((size_t)product->d.num_elements * 2);
    require(bits != NULL, "memory");
    for (size_t g = 0; g < NUM_GATINGS; g += (size_t)step) {
        struct semantics semantics = {.layout = layout, .biases = biases, .gating = gatings[g]};
        char name[300];
        name_case(product, &semantics, name, sizeof(name));
        if (run_case(product, &semantics, NULL, name)) {
            check_values(product, &semantics, name);
        }
        semantics.rounding = IMBREX_ROUNDING_MATCH_UNFUSED;
        name_case(product, &semantics, name, sizeof(name));
        run_unfused(product, &semantics, bits);
        if (run_case(product, &semantics, NULL, name)) {
            check_bits(product, bits, name);
        }
    }
    free(bits);
}

/* Catches a step that is left out, out of order or rounded otherwise; a bias that is not that of
 * its column; gate and up that change places; rows of a layout read as those of another. */
static void check_all_semantics(int step)
{
    static const int64_t sides[][3] = {{129, 264, 192}, {1, 8, 8},     {300, 520, 136},
                                       {63, 72, 320},   {7, 1032, 77}, {257, 200, 64}};
    static const double scales[] = {1.0, 3.0, 0.05, 12.0, 1.0, 100.0};
    int case_idx = 0;
    for (size_t s = 0; s < sizeof(sides) / sizeof(sides[0]); s++) {
        struct product product = product_create(sides[s][0], sides[s][1], sides[s][2], scales[s]);
        for (int layout = 0; layout < NUM_LAYOUTS; layout++) {
            for (int biases = 0; biases < NUM_BIASES; biases++) {
                /* Each layout with each way of biases in one of the shapes, and all with both. */
                bool is_taken =
                    biases == BIASES_BOTH ||
                    (layout + biases) % (int)(sizeof(sides) / sizeof(sides[0])) == (int)s;
                if (is_taken && case_idx++ % step == 0) {
                    check_gatings(&product, (enum layout)layout, (enum biases)biases, step);
                }
            }
        }
        product_destroy(&product);
    }
}

/* Catches a general kernel that is wrong in a tail, under a cluster or with tiles of two widths;
 * and bits that depend on the tile or on the layout of the weights, or are not those of the kernel
 * that knows SwiGLU alone. */
static void check_variants(int step)
{
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {4, 1}, {2, 2}};
    struct product product = product_create(300, 520, 136, 1.0);
    uint16_t *bits = malloc((size_t)product.d.num_elements * 2);
    uint16_t *default_bits = malloc((size_t)product.d.num_elements * 2);
    require(bits != NULL && default_bits != NULL, "memory");
    struct semantics swiglu = {.layout = LAYOUT_GATE_UP};
    require(run_case(&product, &swiglu, NULL, "SwiGLU"), "SwiGLU");
    memcpy(default_bits, product.d.host, (size_t)product.d.num_elements * 2);
    for (int layout = 0; layout < NUM_LAYOUTS; layout++) {
        swiglu.layout = (enum layout)layout;
        if (run_case(&product, &swiglu, NULL, layout_names[layout])) {
            check_bits(&product, default_bits, layout_names[layout]);
        }
    }
    /* A limit beyond all values asks for a general kernel and changes nothing. */
    const struct imbrex_gating pair_of_gatings[2] = {gatings[4], {.limit = 1e30f}};
    for (int g = 0; g < 2; g++) {
        for (int layout = 0; layout < NUM_LAYOUTS; layout++) {
            struct semantics semantics = {.layout = (enum layout)layout,
                                          .biases = g == 0 ? BIASES_BOTH : BIASES_NONE,
                                          .gating = pair_of_gatings[g]};
            struct imbrex_kernel_shape shape = {.op = IMBREX_KERNEL_OP_GEMM_SWIGLU,
                                                .m = (int32_t)product.m,
                                                .n = (int32_t)product.n,
                                                .k = (int32_t)product.k,
                                                .is_split = layout == LAYOUT_APART,
                                                .is_general = true};
            int num_run = 0;
            for (int32_t i = 0; i < imbrex_kernel_num_variants(shape.op); i += step) {
                for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
                    struct imbrex_kernel_variant variant;
                    struct imbrex_kernel_plan plan = {.variant_idx = i,
                                                      .cluster_m = clusters[j][0],
                                                      .cluster_n = clusters[j][1],
                                                      .group_m = 1 + (int32_t)j};
                    char name[300];
                    require(imbrex_kernel_variant_describe(shape.op, i, &variant, NULL) ==
                                IMBREX_STATUS_OK,
                            "variant");
                    if (variant.is_portable != is_portable ||
                        imbrex_kernel_check(device, &shape, &plan, NULL) != IMBREX_STATUS_OK) {
                        continue;
                    }
                    snprintf(name, sizeof(name), "%s cluster %dx%d, %s, gating %d", variant.name,
                             (int)plan.cluster_m, (int)plan.cluster_n, layout_names[layout], g);
                    if (!run_case(&product, &semantics, &plan, name)) {
                        continue;
                    }
                    if (g == 0 && layout == LAYOUT_GATE_UP && num_run == 0) {
                        check_values(&product, &semantics, name);
                        memcpy(bits, product.d.host, (size_t)product.d.num_elements * 2);
                    } else {
                        check_bits(&product, g == 0 ? bits : default_bits, name);
                    }
                    num_run++;
                }
            }
            count(step > 1 || num_run >= (is_portable ? 4 : 6), "general kernels were found");
        }
    }
    free(bits);
    free(default_bits);
    product_destroy(&product);
}

/* An activation below 1e-36 may come out as 0. */
static double flushed_error(struct gating_value value)
{
    return 1e-36 * fmax(1.0, fabs(value.up));
}

static bool is_close(double found, double expected, double bound)
{
    /* The bound too: 0 times infinity where there is a tiny number times infinity. */
    if (isinf(expected) && isinf(bound) && isnan(found)) {
        return true;
    }
    if (isnan(expected)) {
        return isnan(found);
    }
    /* At the end of the format a rounding may reach infinity or not. */
    if (fabs(expected) > 3.3e38) {
        return fabs(found) > 3.3e38 && signbit(found) == signbit(expected);
    }
    return fabs(found - expected) <= bound;
}

/* Catches an activation that is not accurate at some scale, or takes infinities, NaN and huge
 * values otherwise than its formula: A is zero, so a bias alone is what is activated, in fp32. */
static void check_scales_of_values(void)
{
    enum { N = 8192, ROWS = 65 };
    static const float specials[] = {0.0f,  -0.0f,  INFINITY, -INFINITY, NAN,    1e30f, -1e30f,
                                     88.0f, -88.0f, 127.0f,   -127.0f,   1e-40f, 13.3f, -13.3f};
    enum { NUM_SPECIALS = sizeof(specials) / sizeof(specials[0]) };
    struct product product = product_create(ROWS, N, 8, 1.0);
    for (int64_t i = 0; i < ROWS; i++) {
        memset(matrix_at(&product.a, i, 0), 0, 8 * 2);
    }
    matrix_upload(&product.a);
    for (int64_t j = 0; j < N; j++) {
        double exponent = -30.0 + 60.0 * (double)(j % 512) / 512.0;
        double magnitude = j < N / 2 ? exp2(exponent) : 16.0 * (double)(j - N / 2) / (N / 2);
        product.gate_bias[j] = (float)(j % 2 == 0 ? magnitude : -magnitude);
        product.up_bias[j] = j % 3 == 0 ? 1.0f : 0.75f;
    }
    for (int j = 0; j < NUM_SPECIALS; j++) {
        for (int u = 0; u < NUM_SPECIALS; u++) {
            product.gate_bias[16 * j + u] = specials[j];
            product.up_bias[16 * j + u] = specials[u];
        }
    }
    require(copied_to_gpu(product.gate_bias_buffer, product.gate_bias, N * sizeof(float)),
            "copy to the GPU");
    require(copied_to_gpu(product.up_bias_buffer, product.up_bias, N * sizeof(float)),
            "copy to the GPU");
    for (size_t g = 0; g < NUM_GATINGS; g++) {
        struct semantics semantics = {.biases = BIASES_BOTH, .gating = gatings[g]};
        char name[300], what[600] = "";
        bool is_right = true;
        double worst = 0.0;
        name_case(&product, &semantics, name, sizeof(name));
        if (!run_case(&product, &semantics, NULL, name)) {
            continue;
        }
        for (int64_t j = 0; is_right && j < N; j++) {
            struct gating_value value =
                gating_exact(&gatings[g], (double)product.gate_bias[j], (double)product.up_bias[j]);
            double expected = value.activated * value.up;
            double found = (double)bf16_to_float(*matrix_at(&product.d, ROWS - 1, j));
            /* Half an ulp, and the offset's own rounding in fp32. */
            double bound = fabs(expected) * (0x1p-8 + 0x1p-15) +
                           fabs(value.activated) * 0x1p-24 * (1.0 + fabs(value.up)) +
                           (fabs(value.activated) < 1e-36 ? flushed_error(value) : 1e-37);
            is_right = is_close(found, expected, bound);
            if (fabs(value.activated) > 1e-36 && fabs(expected) > 1e-30 && fabs(expected) < 1e36) {
                worst = fmax(worst, fabs(found - expected) / fabs(expected));
            }
            if (!is_right) {
                snprintf(what, sizeof(what), "%s: of gate %g and up %g: %g, expected %g", name,
                         (double)product.gate_bias[j], (double)product.up_bias[j], found, expected);
            }
        }
        count(is_right, what);
        printf("activation %d alpha %g limit %g: at most %.6f of half an ulp of bf16\n",
               (int)gatings[g].activation, (double)gatings[g].alpha, (double)gatings[g].limit,
               worst * 0x1p8);
    }
    product_destroy(&product);
}

static int32_t rank_of(uint16_t bits)
{
    return (bits & 0x8000) != 0 ? -(int32_t)(bits & 0x7fff) : (int32_t)bits;
}

/* Catches the activation's kernel being wrong for any bf16 or in a tail of rows or columns: every
 * gate with several up, both roundings. */
static void check_activation_kernel(void)
{
    static const float ups[] = {1.0f, -0.6015625f, 3e38f, 0.0f, INFINITY, NAN, 9.5f, -1e-30f};
    enum { NUM_UPS = sizeof(ups) / sizeof(ups[0]), COLUMNS = 2104, ROWS = 32 };
    struct matrix gate = matrix_create(ROWS, COLUMNS, COLUMNS + 16, 0.0);
    struct matrix up = matrix_create(ROWS, COLUMNS, COLUMNS + 8, 0.0);
    struct matrix d = matrix_create(ROWS, COLUMNS, COLUMNS + 24, 0.0);
    for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
        *matrix_at(&gate, i / COLUMNS, i % COLUMNS) = (uint16_t)i;
    }
    matrix_upload(&gate);
    for (size_t g = 0; g < NUM_GATINGS; g++) {
        for (int rounding = 0; rounding < 2; rounding++) {
            int64_t num_equal = 0, num_compared = 0, num_wrong = 0, where = 0;
            char what[600] = "";
            for (int u = 0; u < NUM_UPS; u++) {
                for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
                    *matrix_at(&up, i / COLUMNS, i % COLUMNS) = bf16_from_float(ups[u]);
                }
                matrix_upload(&up);
                matrix_clear(&d);
                struct imbrex_gated_activation_params params = {
                    .gate = (const void *)gate.base,
                    .up = (const void *)up.base,
                    .d = (void *)d.base,
                    .gate_stride = gate.stride,
                    .up_stride = up.stride,
                    .d_stride = d.stride,
                    .num_tokens = ROWS - u % 2,
                    .intermediate_size = COLUMNS,
                    .rounding = (enum imbrex_rounding)rounding,
                    .gating = gatings[g],
                };
                require(imbrex_gated_activation(device, &params, gpu.stream, NULL) ==
                            IMBREX_STATUS_OK,
                        "activation");
                matrix_download(&d);
                for (int64_t i = 0; i < (int64_t)(ROWS - u % 2) * COLUMNS; i++) {
                    uint16_t x = *matrix_at(&gate, i / COLUMNS, i % COLUMNS);
                    uint16_t y = *matrix_at(&up, i / COLUMNS, i % COLUMNS);
                    uint16_t bits = *matrix_at(&d, i / COLUMNS, i % COLUMNS);
                    struct gating_value value = gating_exact(&gatings[g], (double)bf16_to_float(x),
                                                             (double)bf16_to_float(y));
                    uint16_t expected = rounding == IMBREX_ROUNDING_EXACT
                                            ? bf16_from_float((float)(value.activated * value.up))
                                            : gating_unfused(&gatings[g], x, y);
                    double wanted = (double)bf16_to_float(expected);
                    /* Two steps that fall on the other side each: of the activation, and then of
                     * the product. */
                    double flushed = fabs(value.activated) < 1e-36 ? flushed_error(value) : 1e-36;
                    bool is_right = is_close((double)bf16_to_float(bits), wanted, flushed) ||
                                    (!isnan(wanted) && abs(rank_of(bits) - rank_of(expected)) <= 2);
                    num_compared++;
                    num_equal += (double)bf16_to_float(bits) == wanted || isnan(wanted);
                    num_wrong += !is_right;
                    if (!is_right && what[0] == '\0') {
                        snprintf(what, sizeof(what),
                                 "activation kernel, gating %d, rounding %d: of %04x and %04x: "
                                 "%04x, expected %04x",
                                 (int)g, rounding, x, y, bits, expected);
                    }
                }
            }
            bool is_whole = canaries_are_whole(&d, &where);
            double share = (double)num_equal / (double)num_compared;
            printf("activation kernel, gating %d, rounding %d: %.4f %% equal to fp64 rounded "
                   "likewise\n",
                   (int)g, rounding, 100.0 * share);
            count(num_wrong == 0, what);
            count(is_whole && share > 0.99, "activation kernel: beside the result, or its share");
        }
    }
    matrix_destroy(&gate);
    matrix_destroy(&up);
    matrix_destroy(&d);
}

/* ---- graphs ---- */

static bool capture_case(struct product *product, const struct semantics *semantics,
                         CUgraphExec *replay)
{
    struct imbrex_gemm_swiglu_params params = params_of(product, semantics);
    CUgraph graph = NULL;
    bool is_ok = GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (int i = 0; is_ok && i < 3; i++) {
        is_ok = imbrex_gemm_swiglu(device, &params, NULL, gpu.stream, NULL) == IMBREX_STATUS_OK;
    }
    is_ok = GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) && is_ok &&
            GPU_CALL(&gpu, graph_instantiate, replay, graph, 0);
    if (graph != NULL) {
        (void)gpu.graph_destroy(graph);
    }
    return is_ok;
}

/* Catches launches that share something: two graphs, captured on a device that has launched nothing
 * yet, replayed on two streams at once. */
static void check_two_streams(void)
{
    enum { NUM_REPLAYS = 50 };
    struct imbrex_device *used = device;
    struct product products[2];
    const struct semantics semantics[2] = {
        {.layout = LAYOUT_INTERLEAVED_1, .biases = BIASES_BY_1, .gating = gatings[4]},
        {.layout = LAYOUT_APART,
         .biases = BIASES_GATE,
         .rounding = IMBREX_ROUNDING_MATCH_UNFUSED,
         .gating = gatings[1]}};
    uint16_t *bits[2];
    CUgraphExec replays[2] = {NULL, NULL};
    CUstream streams[2] = {NULL, NULL};

    for (int i = 0; i < 2; i++) {
        products[i] = product_create(i == 0 ? 200 : 500, i == 0 ? 1024 : 136, 256, 1.0);
        size_t num_bytes = (size_t)products[i].d.num_elements * 2;
        bits[i] = malloc(num_bytes);
        require(bits[i] != NULL && run_case(&products[i], &semantics[i], NULL, "before a graph"),
                "before a graph");
        memcpy(bits[i], products[i].d.host, num_bytes);
        matrix_clear(&products[i].d);
    }
    require(imbrex_device_open(0, NULL, &device, NULL) == IMBREX_STATUS_OK, "second open");
    bool is_ok = true;
    for (int i = 0; i < 2; i++) {
        is_ok = is_ok && capture_case(&products[i], &semantics[i], &replays[i]) &&
                GPU_CALL(&gpu, stream_create, &streams[i], CU_STREAM_NON_BLOCKING);
    }
    for (int replay = 0; is_ok && replay < NUM_REPLAYS; replay++) {
        for (int i = 0; i < 2; i++) {
            is_ok = is_ok && GPU_CALL(&gpu, graph_launch, replays[i], streams[i]);
        }
    }
    for (int i = 0; is_ok && i < 2; i++) {
        is_ok = GPU_CALL(&gpu, stream_synchronize, streams[i]);
    }
    count(is_ok, "graphs on two streams");
    for (int i = 0; i < 2; i++) {
        if (is_ok) {
            matrix_download(&products[i].d);
            check_bits(&products[i], bits[i], "graphs on two streams");
        }
        if (replays[i] != NULL) {
            (void)gpu.graph_exec_destroy(replays[i]);
        }
        if (streams[i] != NULL) {
            (void)gpu.stream_destroy(streams[i]);
        }
        free(bits[i]);
        product_destroy(&products[i]);
    }
    imbrex_device_close(device);
    device = used;
}

/* On whichever GPU is the device, by a thread that uses the GPU of another context as well. */
static void check_on_second_gpu(int step, CUcontext context_of_first)
{
    struct product product = product_create(129, 264, 192, 1.0);
    struct semantics semantics = {.layout = LAYOUT_INTERLEAVED_8, .biases = BIASES_BOTH};
    struct imbrex_gemm_swiglu_params params = params_of(&product, &semantics);

    check_gatings(&product, LAYOUT_INTERLEAVED_1, BIASES_BY_1, step);
    check_gatings(&product, LAYOUT_APART, BIASES_BOTH, step);
    matrix_clear(&product.d);
    require(GPU_CALL(&gpu, ctx_set_current, context_of_first), "context");
    count(imbrex_gemm_swiglu(device, &params, NULL, gpu.stream, NULL) == IMBREX_STATUS_OK,
          "context of the first GPU");
    require(GPU_CALL(&gpu, ctx_set_current, gpu.context), "context");
    matrix_download(&product.d);
    check_values(&product, &semantics, "context of the first GPU");
    product_destroy(&product);
}

/* Catches what works on the first GPU only, in the kernels of both kinds. */
static void check_second_gpu(int step)
{
    struct gpu first_gpu = gpu;
    struct imbrex_device *first = device;
    struct imbrex_error err = {0};
    struct imbrex_device_options options = imbrex_device_options_default();

    if (imbrex_device_open(1, &options, &device, &err) != IMBREX_STATUS_OK) {
        printf("1 check skipped, second GPU: %s\n", err.message);
        device = first;
        return;
    }
    require(gpu_open(1, &gpu), "second GPU");
    check_on_second_gpu(step, first_gpu.context);
    imbrex_device_close(device);
    options.portable_kernels = true;
    require(imbrex_device_open(1, &options, &device, NULL) == IMBREX_STATUS_OK, "portable device");
    check_on_second_gpu(step, first_gpu.context);
    struct product product = product_create(8, 8, 8, 1.0);
    struct semantics semantics = {.layout = LAYOUT_GATE_UP};
    struct imbrex_gemm_swiglu_params params = params_of(&product, &semantics);
    count(imbrex_gemm_swiglu(first, &params, NULL, NULL, &err) == IMBREX_STATUS_INVALID_ARGUMENT,
          "memory of the other GPU is refused");
    product_destroy(&product);
    imbrex_device_close(device);
    gpu_close(&gpu);
    device = first;
    gpu = first_gpu;
    /* gpu_close left no context current. */
    require(GPU_CALL(&gpu, ctx_set_current, gpu.context), "context");
}

/* Catches all of that in the kernels for other GPUs than Hopper. */
static void check_portable(int step)
{
    struct imbrex_device *hopper = device;
    struct imbrex_device_options options = imbrex_device_options_default();
    options.portable_kernels = true;
    require(imbrex_device_open(0, &options, &device, NULL) == IMBREX_STATUS_OK, "portable device");
    is_portable = true;
    check_variants(step);
    check_all_semantics(step);
    if (step == 1) {
        check_scales_of_values();
        check_activation_kernel();
    }
    is_portable = false;
    imbrex_device_close(device);
    device = hopper;
}

int main(int argc, char **argv)
{
    int exit_code = 0;
    int step = 1;
    bool is_portable_only = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "portable") == 0) {
            is_portable_only = true;
        } else {
            step = atoi(argv[i]);
        }
    }
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(step > 0, "argument");
    if (is_portable_only) {
        check_portable(step);
        return check_end();
    }
    check_variants(step);
    check_all_semantics(step);
    check_two_streams();
    if (step == 1) {
        check_scales_of_values();
        check_activation_kernel();
    }
    check_portable(step);
    check_second_gpu(step);
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
