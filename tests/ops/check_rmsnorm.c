/* SPDX-License-Identifier: Apache-2.0 */
/* rmsnorm: tails, in place, listed rows, large and denormal rows, rows of zeros or not finite. */
#include <math.h>
#include <stdbool.h>

#include "ops/harness.h"

static void run_rmsnorm(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    struct rmsnorm_params params = *(const struct rmsnorm_params *)arg;
    if (params.rows != NULL) {
        params.rows += first;
    } else {
        params.a += (int64_t)first * params.hidden_size;
    }
    params.d += (int64_t)first * params.hidden_size;
    params.num_tokens = count;
    ops_rmsnorm(ops, &params);
}

/* Where row t of d comes from: row t of a, the same place, or a row that a list names. */
enum row_source { ROWS_SAME, ROWS_IN_PLACE, ROWS_LISTED };

enum special_rows { SPECIAL_NONE, SPECIAL_NON_FINITE, SPECIAL_ZERO };

static void build_case(struct harness *harness, int32_t num_tokens, int32_t width,
                       enum input_kind kind, enum row_source source, enum special_rows special,
                       struct rmsnorm_params *params, struct check_plan *plan)
{
    bool in_place = source == ROWS_IN_PLACE;
    int32_t num_source_rows = source == ROWS_LISTED ? 2 * num_tokens + 1 : num_tokens;
    int64_t num_elements = (int64_t)num_tokens * width;
    size_t num_bytes = (size_t)num_elements * sizeof(float);
    size_t num_source = (size_t)num_source_rows * (size_t)width;
    float *weight = harness_place(harness, (size_t)width * sizeof(float), 0);
    float *d = harness_place(harness, num_bytes, 0);
    float *a = in_place ? harness_alloc(harness, num_source, sizeof(float))
                        : harness_place(harness, num_source * sizeof(float), 0);
    int32_t *rows = NULL;
    harness_fill(harness, weight, 1, width, width, 1.0);
    harness_fill(harness, a, num_source_rows, width, width, input_kind_scale(kind));
    if (source == ROWS_LISTED) {
        rows = harness_place(harness, (size_t)num_tokens * sizeof(*rows), 0);
        for (int32_t token = 0; token < num_tokens; token++) {
            rows[token] =
                token == 0 ? num_source_rows - 1 : harness_random_below(harness, num_source_rows);
        }
        harness_seal(harness, rows);
    }
    if (special == SPECIAL_NON_FINITE) {
        a[width - 1] = NAN;
        a[2 * width - 1] = INFINITY; /* an infinite mean: that element NaN, the others 0 */
    }
    for (int32_t col = 0; special == SPECIAL_ZERO && col < width; col++) {
        a[col] = 0.0f;
    }
    harness_seal(harness, weight);
    if (!in_place) {
        harness_seal(harness, a);
    }
    *params = (struct rmsnorm_params){.a = in_place ? d : a,
                                      .rows = rows,
                                      .weight = weight,
                                      .d = d,
                                      .num_tokens = num_tokens,
                                      .hidden_size = width,
                                      .eps = 1e-6f};
    double *expected = harness_alloc(harness, (size_t)num_elements, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_elements, sizeof(double));
    /* The sum has no cancellation, and the root halves its error; then mean, eps, root, quotient
     * and two products. */
    double max_roundings = width / 8.0 + 10.0;
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *row = a + (rows != NULL ? rows[token] : token) * width;
        double sum = 0.0;
        for (int32_t col = 0; col < width; col++) {
            double x = row[col];
            sum += x * x;
        }
        double scale = 1.0 / sqrt(sum / width + (double)params->eps);
        for (int32_t col = 0; col < width; col++) {
            int64_t idx = token * width + col;
            expected[idx] = row[col] * scale * weight[col];
            /* A subnormal a * scale is off by half of 2^-149, and so is the product. */
            bound[idx] = max_roundings * HARNESS_UNIT * fabs(expected[idx]) +
                         0x1p-150 * (1.0 + fabs((double)weight[col]));
            if (!isfinite(expected[idx])) {
                bound[idx] = 0.0;
            }
        }
    }
    *plan = (struct check_plan){
        .run = run_rmsnorm,
        .arg = params,
        .num_rows = num_tokens,
        .num_outputs = 1,
        .outputs = {{.at = d,
                     .num_rows = num_tokens,
                     .width = width,
                     .stride = width,
                     .initial = in_place ? a : NULL,
                     .expected = expected,
                     .bound = bound,
                     .global_ratio = kind == INPUT_DENORMAL ? 0.0 : 8.0 / max_roundings}}};
}

static void check_one(struct harness *harness, int32_t num_tokens, int32_t width,
                      enum input_kind kind, enum row_source source, enum special_rows special)
{
    static const char *const suffixes[] = {"", " in place", " of listed rows"};
    for (int placement = 0; placement < PLACEMENT_COUNT; placement++) {
        struct rmsnorm_params params;
        struct check_plan plan;
        harness_case(harness, "%dx%d%s, placement %d", (int)num_tokens, (int)width,
                     suffixes[source], placement);
        harness_set_placement(harness, (enum placement)placement);
        build_case(harness, num_tokens, width, kind, source, special, &params, &plan);
        harness_check(harness, &plan);
        harness_end_case(harness);
    }
}

static void checks(struct harness *harness)
{
    static const int32_t num_tokens[] = {1, 7, 65}, widths[] = {1, 7, 31, 63, 64, 65, 172, 4097};
    for (int kind = 0; kind < INPUT_KIND_COUNT; kind++) {
        harness_group(harness, "rmsnorm tails, %s", input_kind_name((enum input_kind)kind));
        for (size_t idx = 0; idx < 3 * 8; idx++) {
            check_one(harness, num_tokens[idx % 3], widths[idx / 3], (enum input_kind)kind,
                      (enum row_source)((idx + idx / 3) % 3), SPECIAL_NONE);
        }
    }
    harness_group(harness, "rmsnorm Qwen2.5-0.5B");
    check_one(harness, 1, 896, INPUT_NORMAL, ROWS_SAME, SPECIAL_NONE);
    check_one(harness, 37, 896, INPUT_NORMAL, ROWS_IN_PLACE, SPECIAL_NONE);
    check_one(harness, 37, 896, INPUT_NORMAL, ROWS_LISTED, SPECIAL_NONE);
    harness_group(harness, "rmsnorm, rows of NaN, infinity and zeros");
    check_one(harness, 3, 9, INPUT_NORMAL, ROWS_SAME, SPECIAL_NON_FINITE);
    check_one(harness, 3, 172, INPUT_NORMAL, ROWS_IN_PLACE, SPECIAL_NON_FINITE);
    check_one(harness, 2, 172, INPUT_NORMAL, ROWS_SAME, SPECIAL_ZERO);
}

static void benches(struct harness *harness)
{
    static const int32_t num_tokens[] = {1, 128};
    for (size_t idx = 0; idx < 2; idx++) {
        struct rmsnorm_params params;
        struct check_plan plan;
        harness_case(harness, "rmsnorm %dx896", (int)num_tokens[idx]);
        build_case(harness, num_tokens[idx], 896, INPUT_NORMAL, ROWS_SAME, SPECIAL_NONE, &params,
                   &plan);
        harness_check(harness, &plan);
        harness_bench(harness, &plan, NULL, 4.0 * 896.0 * num_tokens[idx],
                      8.0 * 896.0 * num_tokens[idx]);
        harness_end_case(harness);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
