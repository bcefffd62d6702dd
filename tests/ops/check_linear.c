/* SPDX-License-Identifier: Apache-2.0 */
/* linear: tails in every dimension, row gaps, bias, residual (also in place), all dtypes at odd
 * addresses, several linears in one call, non-finite inputs, layers of Qwen2.5-0.5B. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops/harness.h"

#define MAX_LINEARS 3

struct linear_shape {
    int32_t num_tokens, in_features, out_features;
};

struct linear_case {
    struct linear_params params[MAX_LINEARS];
    int32_t num_linears;
    /* Bench: copies of the weights to rotate through, so that they come from memory. */
    const unsigned char *weight_copies;
    size_t copy_bytes;
    int32_t num_copies, copy_idx;
};

enum extras { EXTRA_NONE, EXTRA_BIAS, EXTRA_RESIDUAL, EXTRA_BOTH, EXTRA_IN_PLACE, EXTRA_COUNT };

static void run_linear(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    const struct linear_case *linear = arg;
    struct linear_params params[MAX_LINEARS];
    for (int32_t idx = 0; idx < linear->num_linears; idx++) {
        params[idx] = linear->params[idx];
        params[idx].a += first * params[idx].a_stride;
        params[idx].d += first * params[idx].d_stride;
        if (params[idx].residual != NULL) {
            params[idx].residual += first * params[idx].d_stride;
        }
        params[idx].num_tokens = count;
    }
    ops_linear(ops, params, linear->num_linears);
}

/* What one linear must give; bias and residual add a rounding each. row_step > 1 leaves rows
 * out. */
static void expect_sums(struct harness *harness, const struct linear_params *params,
                        const float *residual, int64_t residual_stride, int32_t row_step,
                        bool rounded, const double **expected_sums, const double **bounds)
{
    int64_t num_outputs = (int64_t)params->num_tokens * params->out_features;
    double *expected = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    int64_t num_inputs = (int64_t)params->num_tokens * params->in_features;
    double *row = harness_alloc(harness, (size_t)params->in_features, sizeof(double));
    double *seen = harness_alloc(harness, (size_t)num_inputs, sizeof(double));
    for (int64_t token = 0; token < params->num_tokens; token++) {
        const float *a = params->a + token * params->a_stride;
        if (rounded) {
            harness_rounded_activations(a, params->in_features, seen + token * params->in_features);
        } else {
            harness_activations(harness, params->weight.dtype, a, params->in_features,
                                seen + token * params->in_features);
        }
    }
    for (int64_t col = 0; col < params->out_features; col++) {
        harness_weight_row(harness, params->weight, col, params->in_features, row);
        for (int64_t token = 0; token < params->num_tokens; token++) {
            int64_t idx = token * params->out_features + col;
            if (token % row_step != 0 && token + 1 != params->num_tokens) {
                bound[idx] = INFINITY;
                continue;
            }
            const double *a = seen + token * params->in_features;
            double sum = 0.0, magnitude = 0.0, weight_magnitude = 0.0, a_magnitude = 0.0;
            for (int64_t k = 0; k < params->in_features; k++) {
                sum += a[k] * row[k];
                magnitude += fabs(a[k] * row[k]);
                weight_magnitude += fabs(row[k]);
                a_magnitude += fabs(a[k]);
            }
            double bias = params->bias == NULL ? 0.0 : params->bias[col];
            double added = residual == NULL ? 0.0 : residual[token * residual_stride + col];
            expected[idx] = sum + bias + added;
            bound[idx] = (rounded ? harness_rounded_bound(params->in_features, magnitude,
                                                          weight_magnitude, a_magnitude)
                                  : harness_product_bound(params->weight.dtype, params->in_features,
                                                          magnitude)) +
                         2.0 * HARNESS_UNIT * (magnitude + fabs(bias) + fabs(added));
            if (!isfinite(expected[idx])) {
                bound[idx] = 0.0;
            }
        }
    }
    *expected_sums = expected;
    *bounds = bound;
}

static void expect_linear(struct harness *harness, const struct linear_params *params,
                          const float *residual, int64_t residual_stride, int32_t row_step,
                          struct check_output *output)
{
    double max_roundings = params->in_features / 4.0 + 8.0;
    bool is_quantized = dtype_is_quantized(params->weight.dtype);
    *output = (struct check_output){.at = params->d,
                                    .num_rows = params->num_tokens,
                                    .width = params->out_features,
                                    .stride = params->d_stride,
                                    /* Roundings are random: on the average far below the sum. */
                                    .global_ratio = is_quantized ? 0.2 : 4.0 / max_roundings};
    expect_sums(harness, params, residual, residual_stride, row_step, false, &output->expected,
                &output->bound);
    if (params->weight.dtype == DTYPE_BF16 && harness_rounds(harness)) {
        expect_sums(harness, params, residual, residual_stride, row_step, true,
                    &output->rounded_expected, &output->rounded_bound);
    }
}

static double weight_scale(enum input_kind kind)
{
    return kind == INPUT_LARGE ? 1e3 : 1.0;
}

static void fill_case(struct harness *harness, struct linear_shape shape, enum dtype dtype,
                      enum input_kind kind, enum extras extras, int32_t gap, size_t shift,
                      struct linear_case *linear, struct check_plan *plan)
{
    int64_t m = shape.num_tokens, k = shape.in_features, n = shape.out_features;
    struct linear_params *params = &linear->params[0];
    *params = (struct linear_params){.a_stride = k + gap,
                                     .d_stride = n + gap,
                                     .num_tokens = shape.num_tokens,
                                     .in_features = shape.in_features,
                                     .out_features = shape.out_features};
    linear->num_linears = 1;
    size_t a_elements = (size_t)((m - 1) * params->a_stride + k);
    size_t d_elements = (size_t)((m - 1) * params->d_stride + n);
    float *a = harness_place(harness, a_elements * sizeof(float), 0);
    void *weight = harness_place(harness, dtype_row_bytes(dtype, n * k), shift);
    double a_scale = harness_activation_scale(dtype, kind);
    params->d = harness_place(harness, d_elements * sizeof(float), 0);
    harness_fill(harness, a, m, k, params->a_stride, a_scale);
    harness_fill_weights(harness, weight, dtype, n * k, weight_scale(kind));
    params->a = a;
    params->weight = (struct weight_view){weight, dtype};
    if (extras == EXTRA_BIAS || extras == EXTRA_BOTH) {
        float *bias = harness_place(harness, (size_t)n * sizeof(float), 0);
        harness_fill(harness, bias, 1, n, n, a_scale);
        harness_seal(harness, bias);
        params->bias = bias;
    }
    float *residual = NULL;
    if (extras == EXTRA_RESIDUAL || extras == EXTRA_BOTH) {
        residual = harness_place(harness, d_elements * sizeof(float), 0);
        harness_fill(harness, residual, m, n, params->d_stride, a_scale);
        harness_seal(harness, residual);
        params->residual = residual;
    }
    float *initial = NULL;
    if (extras == EXTRA_IN_PLACE) {
        initial = harness_alloc(harness, (size_t)(m * n), sizeof(float));
        harness_fill(harness, initial, m, n, n, a_scale);
        params->residual = params->d;
    }
    harness_seal(harness, a);
    harness_seal(harness, weight);
    *plan = (struct check_plan){
        .run = run_linear, .arg = linear, .num_rows = shape.num_tokens, .num_outputs = 1};
    expect_linear(harness, params, initial != NULL ? initial : residual,
                  initial != NULL ? n : params->d_stride, 1, &plan->outputs[0]);
    plan->outputs[0].initial = initial;
    if (kind == INPUT_DENORMAL) {
        plan->outputs[0].global_ratio = 0.0; /* errors are half units of 2^-149, not relative */
    }
}

/* in_features of the shapes are counted in blocks of each dtype in [first, end). */
static void check_shapes(struct harness *harness, const char *group, enum dtype first,
                         enum dtype end, const struct linear_shape *shapes, size_t num_shapes,
                         enum input_kind kind)
{
    for (int dtype = (int)first; dtype < (int)end; dtype++) {
        harness_group(harness, "linear %s %s, %s", dtype_name((enum dtype)dtype), group,
                      input_kind_name(kind));
        for (size_t idx = 0; idx < num_shapes; idx++) {
            for (int placement = 0; placement < PLACEMENT_COUNT; placement++) {
                enum extras extras = (enum extras)((idx + (size_t)dtype) % EXTRA_COUNT);
                int32_t gap = (int32_t)(idx % 3) * 5;
                size_t shift = (idx + (size_t)placement) % 4;
                struct linear_shape shape = shapes[idx];
                struct linear_case linear = {0};
                struct check_plan plan;
                shape.in_features *= dtype_block_elements((enum dtype)dtype);
                harness_case(harness, "%dx%dx%d, extras %d, gap %d, shift %zu, placement %d",
                             (int)shape.num_tokens, (int)shape.in_features, (int)shape.out_features,
                             (int)extras, (int)gap, shift, placement);
                harness_set_placement(harness, (enum placement)placement);
                fill_case(harness, shape, (enum dtype)dtype, kind, extras, gap, shift, &linear,
                          &plan);
                harness_check(harness, &plan);
                harness_end_case(harness);
            }
        }
    }
}

/* q, k and v: different widths and dtypes, one destination row. */
static void check_several(struct harness *harness)
{
    static const struct linear_shape shapes[] = {{1, 64, 9},   {5, 172, 64}, {7, 65, 33},
                                                 {3, 256, 17}, {1, 512, 9},  {7, 256, 12}};
    static const enum dtype dtypes[][MAX_LINEARS] = {
        {DTYPE_F32, DTYPE_F16, DTYPE_BF16},   {DTYPE_F32, DTYPE_F16, DTYPE_BF16},
        {DTYPE_BF16, DTYPE_F32, DTYPE_F16},   {DTYPE_Q4_K, DTYPE_Q8_0, DTYPE_Q6_K},
        {DTYPE_Q4_1, DTYPE_BF16, DTYPE_Q5_0}, {DTYPE_F16, DTYPE_Q5_K, DTYPE_Q4_0}};
    harness_group(harness, "linear, three in one call");
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++) {
        int32_t m = shapes[idx].num_tokens, k = shapes[idx].in_features;
        int32_t widths[MAX_LINEARS] = {shapes[idx].out_features, 7, 11};
        int32_t d_stride = widths[0] + widths[1] + widths[2];
        struct linear_case linear = {.num_linears = MAX_LINEARS};
        struct check_plan plan = {
            .run = run_linear, .arg = &linear, .num_rows = m, .num_outputs = MAX_LINEARS};
        harness_case(harness, "%dx%dx(%d + 7 + 11)", (int)m, (int)k, (int)widths[0]);
        harness_set_placement(harness, PLACEMENT_END);
        float *a = harness_place(harness, (size_t)(m * k) * sizeof(float), 0);
        float *d = harness_place(harness, (size_t)(m * d_stride) * sizeof(float), 0);
        harness_fill(harness, a, m, k, k, 1.0);
        harness_seal(harness, a);
        for (int32_t part = 0; part < MAX_LINEARS; part++) {
            enum dtype dtype = dtypes[idx][part];
            int64_t num_weights = (int64_t)widths[part] * k;
            void *weight =
                harness_place(harness, dtype_row_bytes(dtype, num_weights), (size_t)part);
            harness_fill_weights(harness, weight, dtype, num_weights, 1.0);
            harness_seal(harness, weight);
            linear.params[part] = (struct linear_params){.a = a,
                                                         .weight = {weight, dtype},
                                                         .d = d,
                                                         .a_stride = k,
                                                         .d_stride = d_stride,
                                                         .num_tokens = m,
                                                         .in_features = k,
                                                         .out_features = widths[part]};
            expect_linear(harness, &linear.params[part], NULL, 0, 1, &plan.outputs[part]);
            d += widths[part];
        }
        harness_check(harness, &plan);
        harness_end_case(harness);
    }
}

/* An infinite or NaN activation reaches its own row only, a NaN weight its own column. */
static void check_non_finite(struct harness *harness)
{
    static const struct linear_shape shapes[] = {{7, 8, 12}, {5, 19, 9}, {6, 5, 8}};
    harness_group(harness, "linear, non-finite inputs");
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]) * DTYPE_COUNT; idx++) {
        struct linear_shape shape = shapes[idx / DTYPE_COUNT];
        enum dtype dtype = (enum dtype)(idx % DTYPE_COUNT);
        bool is_quantized = dtype_is_quantized(dtype);
        shape.in_features *= dtype_block_elements(dtype);
        int32_t m = shape.num_tokens, k = shape.in_features, n = shape.out_features;
        struct linear_case linear = {.num_linears = 1};
        struct check_plan plan = {
            .run = run_linear, .arg = &linear, .num_rows = m, .num_outputs = 1};
        harness_case(harness, "%dx%dx%d %s", (int)m, (int)k, (int)n, dtype_name(dtype));
        harness_set_placement(harness, PLACEMENT_END);
        float *a = harness_place(harness, (size_t)(m * k) * sizeof(float), 0);
        void *weight = harness_place(harness, dtype_row_bytes(dtype, (int64_t)n * k), 0);
        float *d = harness_place(harness, (size_t)(m * n) * sizeof(float), 0);
        harness_fill(harness, a, m, k, k, 1.0);
        harness_fill_weights(harness, weight, dtype, (int64_t)n * k, 1.0);
        a[1 * k + k - 1] = INFINITY;
        a[2 * k] = NAN;
        a[3 * k] = INFINITY;
        a[3 * k + 1] = -INFINITY;
        if (is_quantized) {
            harness_store_scale(weight, dtype, (int64_t)4 * k, NAN);
        } else {
            harness_store_weight(weight, dtype, 4 * k + k - 1, NAN);
            harness_store_weight(weight, dtype, 5 * k, -INFINITY);
            harness_store_weight(weight, dtype, 6 * k + k - 1, 0.0); /* inf * 0 */
        }
        harness_seal(harness, a);
        harness_seal(harness, weight);
        linear.params[0] = (struct linear_params){.a = a,
                                                  .weight = {weight, dtype},
                                                  .d = d,
                                                  .a_stride = k,
                                                  .d_stride = n,
                                                  .num_tokens = m,
                                                  .in_features = k,
                                                  .out_features = n};
        expect_linear(harness, &linear.params[0], NULL, 0, 1, &plan.outputs[0]);
        harness_check(harness, &plan);
        harness_end_case(harness);
    }
}

/* One block and three whose integers are the ends of their ranges (every bit of them alike, or any
 * ends at random), activations of the largest size, scales of one: sums of integers that have no
 * room to saturate or to wrap, since they must come out exactly as long as fp32 holds them. */
static void check_limits(struct harness *harness)
{
    static const unsigned char fills[] = {0x00, 0xff, 0x80, 0x7f, 0x08, 0xf0};
    const int32_t num_fills = (int32_t)sizeof(fills) + 2, n = 9;
    harness_group(harness, "linear, integers at their limits");
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        size_t block_bytes = dtype_block_bytes((enum dtype)dtype);
        int32_t block = dtype_block_elements((enum dtype)dtype);
        for (int32_t variant = 0; variant < 2 * num_fills; variant++) {
            int32_t fill = variant / 2, k = variant % 2 == 0 ? block : 3 * block, m = 6;
            struct linear_case linear = {.num_linears = 1};
            struct check_plan plan = {
                .run = run_linear, .arg = &linear, .num_rows = m, .num_outputs = 1};
            harness_case(harness, "%s, fill %d, %d elements", dtype_name((enum dtype)dtype),
                         (int)fill, (int)k);
            harness_set_placement(harness, PLACEMENT_END);
            size_t num_bytes = dtype_row_bytes((enum dtype)dtype, (int64_t)n * k);
            float *a = harness_place(harness, (size_t)(m * k) * sizeof(float), 0);
            unsigned char *weight = harness_place(harness, num_bytes, 0);
            float *d = harness_place(harness, (size_t)(m * n) * sizeof(float), 0);
            for (size_t idx = 0; idx < num_bytes; idx++) {
                weight[idx] = fill < (int32_t)sizeof(fills)
                                  ? fills[fill]
                                  : fills[harness_random_below(harness, (int32_t)sizeof(fills))];
            }
            for (size_t at = 0; at < num_bytes; at += block_bytes) {
                int64_t idx = (int64_t)(at / block_bytes) * block;
                if (dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 || dtype == DTYPE_Q4_K ||
                    dtype == DTYPE_Q5_K) {
                    memset(weight + at, 0, 4); /* no min */
                }
                harness_store_scale(weight, (enum dtype)dtype, idx, 1.0);
            }
            for (int32_t idx = 0; idx < m * k; idx++) {
                /* All of one sign, in turn, at random. */
                int32_t row = idx / k;
                bool negative = row < 2   ? row == 1
                                : row < 4 ? idx % 2 == row - 2
                                          : harness_random_below(harness, 2) == 0;
                a[idx] = negative ? -127.0f : 127.0f;
            }
            harness_seal(harness, a);
            harness_seal(harness, weight);
            linear.params[0] = (struct linear_params){.a = a,
                                                      .weight = {weight, (enum dtype)dtype},
                                                      .d = d,
                                                      .a_stride = k,
                                                      .d_stride = n,
                                                      .num_tokens = m,
                                                      .in_features = k,
                                                      .out_features = n};
            expect_linear(harness, &linear.params[0], NULL, 0, 1, &plan.outputs[0]);
            double *bound = harness_alloc(harness, (size_t)(m * n), sizeof(double));
            for (int32_t idx = 0; idx < m * n; idx++) {
                /* 1e-6 of what stands in `bound` is the sum of magnitudes. */
                bool is_exact = plan.outputs[0].bound[idx] < 0x1p24 * 1e-6;
                bound[idx] = is_exact ? 0.0 : plan.outputs[0].bound[idx];
            }
            plan.outputs[0].bound = bound;
            harness_check(harness, &plan);
            harness_end_case(harness);
        }
    }
}

static void checks(struct harness *harness)
{
    static const struct linear_shape tails[] = {
        {1, 1, 1},    {1, 7, 63},  {2, 8, 65},   {3, 63, 7},   {4, 65, 8},
        {5, 172, 64}, {6, 64, 3},  {7, 100, 17}, {8, 9, 33},   {13, 31, 66},
        {65, 65, 63}, {63, 15, 9}, {1, 4097, 7}, {7, 4097, 5}, {6, 7, 4097},
    };
    /* More than one block of k, and more than one panel, or more than one chunk of row tiles: sums
     * that are not continued where they stopped, or by the wrong row tile or columns. */
    static const struct linear_shape panels[] = {
        {8, 2081, 37}, {31, 1100, 230}, {50, 3201, 70}, {135, 6241, 37}, {530, 460, 130}};
    static const struct linear_shape layers[] = {
        {1, 896, 896}, {7, 896, 128}, {1, 896, 4864}, {2, 4864, 896}, {12, 896, 152},
    };
    /* More than kernels take at a time: of rows, features and columns. */
    static const struct linear_shape blocks[] = {{37, 300, 67}, {33, 260, 1100}, {530, 33, 20}};
    /* in_features in blocks */
    static const struct linear_shape block_tails[] = {
        {1, 1, 1},  {1, 3, 63},  {2, 1, 65}, {3, 2, 7},    {5, 4, 16},
        {7, 7, 17}, {13, 1, 66}, {65, 3, 9}, {259, 2, 70}, {37, 19, 45},
    };
    static const struct linear_shape block_layers[] = {{1, 28, 896}, {7, 28, 128}, {2, 152, 96}};
    static const struct linear_shape k_layers[] = {{1, 19, 896}, {7, 19, 65}};
    /* More k, rows and columns than the fast paths take at a time: sums that are not carried on,
     * or rows and columns that are left out. */
    static const struct linear_shape block_panels[] = {{35, 35, 49}, {515, 2, 17}};
    static const struct linear_shape k_panels[] = {{35, 5, 49}, {515, 1, 17}};
    size_t num_tails = sizeof(tails) / sizeof(tails[0]);
    size_t num_block_tails = sizeof(block_tails) / sizeof(block_tails[0]);
    for (int kind = 0; kind < INPUT_KIND_COUNT; kind++) {
        check_shapes(harness, "tails", DTYPE_F32, DTYPE_NUM_PLAIN, tails, num_tails,
                     (enum input_kind)kind);
        check_shapes(harness, "tails", DTYPE_NUM_PLAIN, DTYPE_COUNT, block_tails, num_block_tails,
                     (enum input_kind)kind);
    }
    check_shapes(harness, "blocks", DTYPE_F32, DTYPE_NUM_PLAIN, blocks,
                 sizeof(blocks) / sizeof(blocks[0]), INPUT_NORMAL);
    check_shapes(harness, "panels", DTYPE_F32, DTYPE_NUM_PLAIN, panels,
                 sizeof(panels) / sizeof(panels[0]), INPUT_NORMAL);
    check_shapes(harness, "Qwen2.5-0.5B", DTYPE_F32, DTYPE_NUM_PLAIN, layers,
                 sizeof(layers) / sizeof(layers[0]), INPUT_NORMAL);
    check_shapes(harness, "Qwen2.5-0.5B", DTYPE_Q8_0, DTYPE_Q4_K, block_layers,
                 sizeof(block_layers) / sizeof(block_layers[0]), INPUT_NORMAL);
    check_shapes(harness, "Qwen2.5-0.5B", DTYPE_Q4_K, DTYPE_COUNT, k_layers,
                 sizeof(k_layers) / sizeof(k_layers[0]), INPUT_NORMAL);
    check_shapes(harness, "panels", DTYPE_Q8_0, DTYPE_Q4_K, block_panels,
                 sizeof(block_panels) / sizeof(block_panels[0]), INPUT_NORMAL);
    check_shapes(harness, "panels", DTYPE_Q4_K, DTYPE_COUNT, k_panels,
                 sizeof(k_panels) / sizeof(k_panels[0]), INPUT_NORMAL);
    check_several(harness);
    check_non_finite(harness);
    check_limits(harness);
}

static void rotate_weights(void *arg)
{
    struct linear_case *linear = arg;
    linear->copy_idx = (linear->copy_idx + 1) % linear->num_copies;
    linear->params[0].weight.elements =
        linear->weight_copies + (size_t)linear->copy_idx * linear->copy_bytes;
}

/* More than the last-level cache of most machines. */
#define ROTATED_BYTES ((size_t)192 << 20)

static void bench_shape(struct harness *harness, struct linear_shape shape, enum dtype dtype,
                        bool fast_only)
{
    int64_t m = shape.num_tokens, k = shape.in_features, n = shape.out_features;
    size_t weight_bytes = dtype_row_bytes(dtype, n * k);
    struct linear_case linear = {.num_linears = 1, .copy_bytes = (weight_bytes + 63) / 64 * 64};
    linear.num_copies = shape.num_tokens > 16 ? 1 : (int32_t)(ROTATED_BYTES / weight_bytes) + 1;
    harness_case(harness, "linear %s %dx%dx%d", dtype_name(dtype), (int)m, (int)k, (int)n);
    float *a = harness_place(harness, (size_t)(m * k) * sizeof(float), 0);
    float *d = harness_place(harness, (size_t)(m * n) * sizeof(float), 0);
    unsigned char *weights = harness_alloc(harness, (size_t)linear.num_copies, linear.copy_bytes);
    harness_fill(harness, a, m, k, k, 1.0);
    for (int32_t copy = 0; copy < linear.num_copies; copy++) {
        unsigned char *at = weights + (size_t)copy * linear.copy_bytes;
        if (copy == 0) {
            harness_fill_weights(harness, at, dtype, n * k, 1.0);
        } else {
            for (size_t idx = 0; idx < weight_bytes; idx++) {
                at[idx] = weights[idx];
            }
        }
    }
    linear.weight_copies = weights;
    linear.params[0] = (struct linear_params){.a = a,
                                              .weight = {weights, dtype},
                                              .d = d,
                                              .a_stride = k,
                                              .d_stride = n,
                                              .num_tokens = shape.num_tokens,
                                              .in_features = shape.in_features,
                                              .out_features = shape.out_features};
    struct check_plan plan = {.run = run_linear,
                              .arg = &linear,
                              .num_rows = shape.num_tokens,
                              .num_outputs = 1,
                              .fast_only = fast_only,
                              .whole_only = !fast_only};
    expect_linear(harness, &linear.params[0], NULL, 0, 37, &plan.outputs[0]);
    harness_check(harness, &plan);
    harness_bench(harness, &plan, rotate_weights, 2.0 * (double)(m * n * k),
                  (double)weight_bytes + 4.0 * (double)(m * k + m * n));
    harness_end_case(harness);
}

static void benches(struct harness *harness)
{
    static const struct linear_shape decode[] = {
        {1, 896, 896}, {1, 896, 9728}, {1, 4864, 896}, {4, 896, 9728}};
    static const struct linear_shape prefill[] = {
        {128, 896, 896}, {128, 4864, 896}, {512, 896, 9728}, {512, 4864, 896}};
    for (size_t idx = 0; idx < sizeof(decode) / sizeof(decode[0]); idx++) {
        bench_shape(harness, decode[idx], DTYPE_BF16, false);
    }
    bench_shape(harness, decode[1], DTYPE_F16, false);
    bench_shape(harness, decode[1], DTYPE_F32, false);
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        bench_shape(harness, (struct linear_shape){1, 1024, 4096}, (enum dtype)dtype, false);
    }
    bench_shape(harness, (struct linear_shape){16, 896, 896}, DTYPE_BF16, false);
    for (size_t idx = 0; idx < sizeof(prefill) / sizeof(prefill[0]); idx++) {
        bench_shape(harness, prefill[idx], DTYPE_BF16, true);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
