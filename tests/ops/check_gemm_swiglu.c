/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_swiglu: tails, biases, all dtypes at odd addresses, gate and up of different dtypes, the
 * whole range of SiLU, non-finite inputs, layers of Qwen2.5-0.5B. */
#include <math.h>
#include <stdio.h>

#include "ops/harness.h"

struct swiglu_shape {
    int32_t num_tokens, hidden_size, intermediate_size;
};

static void run_swiglu(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    struct gemm_swiglu_params params = *(const struct gemm_swiglu_params *)arg;
    params.a += (int64_t)first * params.hidden_size;
    params.d += (int64_t)first * params.intermediate_size;
    params.num_tokens = count;
    ops_gemm_swiglu(ops, &params);
}

/* A product in fp64 and what fp32 may make of it, as in check_linear. */
struct product {
    double value, bound;
};

static struct product dot(enum dtype dtype, bool rounded, const double *a, const double *weights,
                          int32_t count, double bias)
{
    double sum = 0.0, magnitude = 0.0, weight_magnitude = 0.0, a_magnitude = 0.0;
    for (int32_t k = 0; k < count; k++) {
        double term = a[k] * weights[k];
        sum += term;
        magnitude += fabs(term);
        weight_magnitude += fabs(weights[k]);
        a_magnitude += fabs(a[k]);
    }
    double bound = rounded ? harness_rounded_bound(count, magnitude, weight_magnitude, a_magnitude)
                           : harness_product_bound(dtype, count, magnitude);
    return (struct product){sum + bias, bound + 2.0 * HARNESS_UNIT * (magnitude + fabs(bias))};
}

static void expect_element(struct product gate, struct product up, double *expected, double *bound)
{
    /* exp overflows below about -88.7 in fp32, and the quotient becomes -0. */
    double silu = gate.value / (1.0 + exp(-gate.value));
    *expected = silu * up.value;
    if (!isfinite(*expected)) {
        *bound = 0.0;
        return;
    }
    /* The slope of SiLU is at most 1.1; exp, sum and quotient are off by a few units, and exp's
     * argument is exact; where exp overflows the true value is below 1e-36. */
    double silu_bound = 1.1 * gate.bound + 8.0 * HARNESS_UNIT * fabs(silu) + 1e-36;
    *bound = (fabs(silu) + silu_bound) * up.bound + fabs(up.value) * silu_bound +
             HARNESS_UNIT * fabs(*expected) + 0x1p-149;
}

/* On the path that rounds activations, only if both matrices are bf16. */
static void expect_elements(struct harness *harness, const struct gemm_swiglu_params *params,
                            int32_t row_step, bool rounded, const double **expected_elements,
                            const double **bounds)
{
    int64_t num_outputs = (int64_t)params->num_tokens * params->intermediate_size;
    double *expected = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    int32_t k = params->hidden_size;
    double *gate_row = harness_alloc(harness, (size_t)k, sizeof(double));
    double *up_row = harness_alloc(harness, (size_t)k, sizeof(double));
    size_t num_inputs = (size_t)params->num_tokens * (size_t)k;
    double *gate_seen = harness_alloc(harness, num_inputs, sizeof(double));
    double *up_seen = harness_alloc(harness, num_inputs, sizeof(double));
    for (int64_t token = 0; token < params->num_tokens; token++) {
        const float *a = params->a + token * k;
        if (rounded) {
            harness_rounded_activations(a, k, gate_seen + token * k);
            harness_rounded_activations(a, k, up_seen + token * k);
            continue;
        }
        harness_activations(harness, params->gate.dtype, a, k, gate_seen + token * k);
        harness_activations(harness, params->up.dtype, a, k, up_seen + token * k);
    }
    for (int64_t col = 0; col < params->intermediate_size; col++) {
        double gate_bias = params->gate_bias == NULL ? 0.0 : params->gate_bias[col];
        double up_bias = params->up_bias == NULL ? 0.0 : params->up_bias[col];
        harness_weight_row(harness, params->gate, col, k, gate_row);
        harness_weight_row(harness, params->up, col, k, up_row);
        for (int64_t token = 0; token < params->num_tokens; token++) {
            int64_t idx = token * params->intermediate_size + col;
            if (token % row_step != 0 && token + 1 != params->num_tokens) {
                bound[idx] = INFINITY;
                continue;
            }
            expect_element(
                dot(params->gate.dtype, rounded, gate_seen + token * k, gate_row, k, gate_bias),
                dot(params->up.dtype, rounded, up_seen + token * k, up_row, k, up_bias),
                &expected[idx], &bound[idx]);
        }
    }
    *expected_elements = expected;
    *bounds = bound;
}

static void expect_swiglu(struct harness *harness, const struct gemm_swiglu_params *params,
                          int32_t row_step, struct check_output *output)
{
    double max_roundings = params->hidden_size / 4.0 + 8.0;
    bool is_quantized = dtype_is_quantized(params->gate.dtype);
    *output =
        (struct check_output){.at = params->d,
                              .num_rows = params->num_tokens,
                              .width = params->intermediate_size,
                              .stride = params->intermediate_size,
                              .global_ratio = is_quantized ? 0.2 : fmin(0.5, 8.0 / max_roundings)};
    expect_elements(harness, params, row_step, false, &output->expected, &output->bound);
    if (params->gate.dtype == DTYPE_BF16 && params->up.dtype == DTYPE_BF16 &&
        harness_rounds(harness)) {
        expect_elements(harness, params, row_step, true, &output->rounded_expected,
                        &output->rounded_bound);
    }
}

static void build_case(struct harness *harness, struct swiglu_shape shape, enum dtype gate_dtype,
                       enum dtype up_dtype, double a_scale, bool biases, size_t shift,
                       struct gemm_swiglu_params *params, struct check_plan *plan)
{
    int64_t m = shape.num_tokens, k = shape.hidden_size, n = shape.intermediate_size;
    float *a = harness_place(harness, (size_t)(m * k) * sizeof(float), 0);
    void *gate = harness_place(harness, dtype_row_bytes(gate_dtype, n * k), shift);
    void *up = harness_place(harness, dtype_row_bytes(up_dtype, n * k), (shift + 1) % 4);
    float *d = harness_place(harness, (size_t)(m * n) * sizeof(float), 0);
    harness_fill(harness, a, m, k, k, a_scale);
    harness_fill_weights(harness, gate, gate_dtype, n * k, 1.0);
    harness_fill_weights(harness, up, up_dtype, n * k, 1.0);
    harness_seal(harness, a);
    harness_seal(harness, gate);
    harness_seal(harness, up);
    *params = (struct gemm_swiglu_params){.a = a,
                                          .gate = {gate, gate_dtype},
                                          .up = {up, up_dtype},
                                          .d = d,
                                          .num_tokens = shape.num_tokens,
                                          .hidden_size = shape.hidden_size,
                                          .intermediate_size = shape.intermediate_size};
    if (biases) {
        float *gate_bias = harness_place(harness, (size_t)n * sizeof(float), 0);
        float *up_bias = harness_place(harness, (size_t)n * sizeof(float), 0);
        harness_fill(harness, gate_bias, 1, n, n, a_scale);
        harness_fill(harness, up_bias, 1, n, n, a_scale);
        harness_seal(harness, gate_bias);
        harness_seal(harness, up_bias);
        params->gate_bias = gate_bias;
        params->up_bias = up_bias;
    }
    *plan = (struct check_plan){
        .run = run_swiglu, .arg = params, .num_rows = shape.num_tokens, .num_outputs = 1};
}

static void check_shape(struct harness *harness, struct swiglu_shape shape, enum dtype gate_dtype,
                        enum dtype up_dtype, double a_scale, size_t variant)
{
    for (int placement = 0; placement < PLACEMENT_COUNT; placement++) {
        struct gemm_swiglu_params params;
        struct check_plan plan;
        size_t shift = (variant + (size_t)placement) % 4;
        harness_case(harness, "%dx%dx%d, biases %d, shift %zu, placement %d", (int)shape.num_tokens,
                     (int)shape.hidden_size, (int)shape.intermediate_size, (int)(variant % 2),
                     shift, placement);
        harness_set_placement(harness, (enum placement)placement);
        build_case(harness, shape, gate_dtype, up_dtype, a_scale, variant % 2 == 1, shift, &params,
                   &plan);
        expect_swiglu(harness, &params, 1, &plan.outputs[0]);
        harness_check(harness, &plan);
        harness_end_case(harness);
    }
}

/* hidden_size 1, gate weight 1, up weight 1: gate = up = a, through the whole range of SiLU. */
static void check_silu(struct harness *harness)
{
    static const float special[] = {0.0f,   -0.0f, INFINITY, -INFINITY, NAN,    1e-40f, -1e-40f,
                                    88.72f, -88.f, -88.73f,  -89.0f,    -103.f, -104.f, -1e4f,
                                    1e4f,   1e15f, -1e15f,   -1e-30f,   20.0f,  17.4f};
    int32_t num_special = (int32_t)(sizeof(special) / sizeof(special[0]));
    int32_t num_tokens = num_special + 2001;
    struct gemm_swiglu_params params;
    struct check_plan plan;
    harness_group(harness, "gemm_swiglu, range of SiLU");
    harness_case(harness, "from -110 to 110 and special values");
    harness_set_placement(harness, PLACEMENT_END);
    float *a = harness_place(harness, (size_t)num_tokens * sizeof(float), 0);
    float *ones = harness_place(harness, 3 * sizeof(float), 0);
    float *d = harness_place(harness, (size_t)num_tokens * 3 * sizeof(float), 0);
    ones[0] = ones[1] = ones[2] = 1.0f;
    for (int32_t token = 0; token < num_tokens; token++) {
        a[token] =
            token < num_special ? special[token] : (float)(token - num_special - 1000) * 0.11f;
    }
    harness_seal(harness, a);
    harness_seal(harness, ones);
    params = (struct gemm_swiglu_params){.a = a,
                                         .gate = {ones, DTYPE_F32},
                                         .up = {ones, DTYPE_F32},
                                         .d = d,
                                         .num_tokens = num_tokens,
                                         .hidden_size = 1,
                                         .intermediate_size = 3};
    plan = (struct check_plan){
        .run = run_swiglu, .arg = &params, .num_rows = num_tokens, .num_outputs = 1};
    expect_swiglu(harness, &params, 1, &plan.outputs[0]);
    harness_check(harness, &plan);
    harness_end_case(harness);
}

/* There is nothing to compare, and guards around the memory are all that is looked at. Catches: a
 * division by the number of columns, which ends the program; writes outside. */
static void check_no_columns(struct harness *harness)
{
    struct gemm_swiglu_params params;
    struct check_plan plan;
    harness_group(harness, "gemm_swiglu, no columns");
    harness_case(harness, "5 x 16 x 0");
    harness_set_placement(harness, PLACEMENT_END);
    build_case(harness, (struct swiglu_shape){5, 16, 0}, DTYPE_BF16, DTYPE_BF16, 1.0, false, 0,
               &params, &plan);
    plan.num_outputs = 0;
    harness_check(harness, &plan);
    harness_end_case(harness);
}

static void checks(struct harness *harness)
{
    static const struct swiglu_shape tails[] = {
        {1, 1, 1},   {1, 7, 63}, {2, 8, 65},   {3, 63, 7},  {4, 65, 8},   {5, 64, 172},
        {6, 172, 3}, {7, 9, 17}, {13, 31, 66}, {65, 65, 7}, {1, 4097, 7}, {7, 64, 4097},
    };
    /* More than kernels take at a time: of rows, features and columns. */
    static const struct swiglu_shape blocks[] = {{35, 290, 560}, {530, 33, 20}};
    /* hidden_size in blocks */
    static const struct swiglu_shape block_tails[] = {{3, 1, 65},   {1, 3, 7},    {2, 2, 8},
                                                      {7, 5, 17},   {13, 1, 9},   {65, 3, 3},
                                                      {258, 1, 70}, {35, 18, 49}, {515, 1, 5}};
    /* As in check_linear: gate and up that are continued from each other's sums. */
    static const struct swiglu_shape panels[] = {{8, 2081, 19}, {31, 1100, 120}, {135, 6241, 18}};
    static const struct swiglu_shape layers[] = {{1, 896, 4864}, {7, 896, 200}};
    static const double scales[INPUT_KIND_COUNT] = {1.0, 1e15, 1e-40};
    size_t num_tails = sizeof(tails) / sizeof(tails[0]);
    for (int dtype = 0; dtype < DTYPE_NUM_PLAIN; dtype++) {
        enum dtype both = (enum dtype)dtype;
        for (int kind = 0; kind < INPUT_KIND_COUNT; kind++) {
            harness_group(harness, "gemm_swiglu %s tails, %s", dtype_name(both),
                          input_kind_name((enum input_kind)kind));
            for (size_t idx = 0; idx < num_tails; idx++) {
                check_shape(harness, tails[idx], both, both, scales[kind], idx + (size_t)dtype);
            }
        }
        harness_group(harness, "gemm_swiglu %s panels", dtype_name(both));
        for (size_t idx = 0; idx < sizeof(panels) / sizeof(panels[0]); idx++) {
            check_shape(harness, panels[idx], both, both, 0.02, idx + (size_t)dtype);
        }
        harness_group(harness, "gemm_swiglu %s Qwen2.5-0.5B", dtype_name(both));
        check_shape(harness, layers[0], both, both, 0.05, 0);
        check_shape(harness, layers[1], both, both, 0.05, 1);
        harness_group(harness, "gemm_swiglu %s blocks", dtype_name(both));
        check_shape(harness, blocks[0], both, both, 0.05, 0);
        check_shape(harness, blocks[1], both, both, 0.05, 1);
    }
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        enum dtype both = (enum dtype)dtype;
        harness_group(harness, "gemm_swiglu %s", dtype_name(both));
        for (size_t idx = 0; idx < sizeof(block_tails) / sizeof(block_tails[0]); idx++) {
            struct swiglu_shape shape = block_tails[idx];
            shape.hidden_size *= dtype_block_elements(both);
            check_shape(harness, shape, both, both, idx == 0 ? 20.0 : 0.05, idx);
        }
    }
    check_no_columns(harness);
    harness_group(harness, "gemm_swiglu, gate and up of two dtypes");
    check_shape(harness, tails[4], DTYPE_BF16, DTYPE_F32, 1.0, 0);
    check_shape(harness, tails[5], DTYPE_F16, DTYPE_BF16, 1.0, 1);
    check_shape(harness, (struct swiglu_shape){5, 896, 9}, DTYPE_Q5_0, DTYPE_Q8_0, 0.05, 0);
    check_shape(harness, (struct swiglu_shape){4, 512, 7}, DTYPE_Q4_K, DTYPE_Q6_K, 0.05, 1);
    check_shape(harness, (struct swiglu_shape){3, 256, 8}, DTYPE_Q8_0, DTYPE_Q5_K, 0.05, 2);
    check_shape(harness, (struct swiglu_shape){2, 64, 17}, DTYPE_BF16, DTYPE_Q4_1, 0.05, 3);
    check_shape(harness, (struct swiglu_shape){37, 64, 17}, DTYPE_Q8_0, DTYPE_F16, 0.05, 0);
    check_shape(harness, (struct swiglu_shape){5, 256, 66}, DTYPE_Q6_K, DTYPE_Q4_0, 0.05, 1);
    check_silu(harness);
}

static void bench_shape(struct harness *harness, struct swiglu_shape shape, enum dtype dtype,
                        bool fast_only)
{
    struct gemm_swiglu_params params;
    struct check_plan plan;
    double m = shape.num_tokens, k = shape.hidden_size, n = shape.intermediate_size;
    harness_case(harness, "swiglu %s %dx%dx%d", dtype_name(dtype), (int)shape.num_tokens,
                 (int)shape.hidden_size, (int)shape.intermediate_size);
    build_case(harness, shape, dtype, dtype, 0.05, false, 0, &params, &plan);
    expect_swiglu(harness, &params, 37, &plan.outputs[0]);
    plan.fast_only = fast_only;
    plan.whole_only = !fast_only;
    harness_check(harness, &plan);
    harness_bench(harness, &plan, NULL, 4.0 * m * k * n,
                  2.0 * (double)dtype_row_bytes(dtype, (int64_t)(n * k)) + 4.0 * m * (k + n));
    harness_end_case(harness);
}

static void benches(struct harness *harness)
{
    /* 74 MB of weights at the larger shape: more than the caches hold. */
    static const struct swiglu_shape qwen_0_5b = {1, 896, 4864}, qwen_3b = {1, 2048, 11008};
    bench_shape(harness, qwen_0_5b, DTYPE_BF16, false);
    bench_shape(harness, qwen_3b, DTYPE_BF16, false);
    bench_shape(harness, (struct swiglu_shape){128, 896, 4864}, DTYPE_BF16, true);
    bench_shape(harness, (struct swiglu_shape){512, 896, 4864}, DTYPE_BF16, true);
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
