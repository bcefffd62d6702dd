/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "imbrex_ops.h"
#include "ops/dtype.h"
#include "tests/test.h"

/* More rows than a chunk; widths off every vector length. */
#define TOKENS 261
#define HIDDEN 37
#define INTERMEDIATE 29
#define A_STRIDE (HIDDEN + 3)
#define D_STRIDE (INTERMEDIATE + 2)
#define CANARY 0x7fc1 /* a NaN that no result is */

static float random_value(uint32_t *random_state)
{
    *random_state = *random_state * 1664525u + 1013904223u;
    return ((float)(*random_state >> 8) * 0x1p-24f - 0.5f) * 2.0f;
}

/* An element of either type, in memory of [count] fp32. */
static void store(void *elements, int32_t dtype, int64_t idx, float value)
{
    if (dtype == IMBREX_DTYPE_BF16) {
        ((uint16_t *)elements)[idx] = bf16_from_float(value);
    } else {
        ((float *)elements)[idx] = value;
    }
}

static float load(const void *elements, int32_t dtype, int64_t idx)
{
    return dtype == IMBREX_DTYPE_BF16 ? bf16_to_float(((const uint16_t *)elements)[idx])
                                      : ((const float *)elements)[idx];
}

static void fill(void *elements, int32_t dtype, int64_t count, uint32_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        store(elements, dtype, i, random_value(&seed));
    }
}

static double dot(const void *a, int32_t a_dtype, int64_t a_begin, const void *b, int32_t b_dtype,
                  int64_t b_begin)
{
    double sum = 0.0;
    for (int k = 0; k < HIDDEN; k++) {
        sum += (double)load(a, a_dtype, a_begin + k) * load(b, b_dtype, b_begin + k);
    }
    return sum;
}

struct operands {
    float a[TOKENS * A_STRIDE], gate[INTERMEDIATE * HIDDEN], up[INTERMEDIATE * HIDDEN];
    float gate_bias[INTERMEDIATE], up_bias[INTERMEDIATE], d[TOKENS * D_STRIDE];
    int32_t dtype, weight_dtype;
};

static struct operands *make_operands(int32_t dtype, int32_t weight_dtype)
{
    struct operands *made = malloc(sizeof(*made));
    assert_non_null(made);
    made->dtype = dtype;
    made->weight_dtype = weight_dtype;
    fill(made->a, dtype, TOKENS * A_STRIDE, 1);
    fill(made->gate, weight_dtype, INTERMEDIATE * HIDDEN, 2);
    fill(made->up, weight_dtype, INTERMEDIATE * HIDDEN, 3);
    fill(made->gate_bias, IMBREX_DTYPE_F32, INTERMEDIATE, 4);
    fill(made->up_bias, IMBREX_DTYPE_F32, INTERMEDIATE, 5);
    for (size_t i = 0; i < sizeof(made->d) / (sizeof(uint16_t)); i++) {
        ((uint16_t *)made->d)[i] = CANARY;
    }
    return made;
}

/* Every result, and that nothing was written between the rows. */
static void check_results(const struct operands *x, bool is_gated)
{
    double bound = x->dtype == IMBREX_DTYPE_BF16 ? 0x1p-8 : 1e-5;
    for (int64_t t = 0; t < TOKENS; t++) {
        for (int64_t i = 0; i < INTERMEDIATE; i++) {
            double gate = dot(x->a, x->dtype, t * A_STRIDE, x->gate, x->weight_dtype, i * HIDDEN) +
                          x->gate_bias[i];
            double up = dot(x->a, x->dtype, t * A_STRIDE, x->up, x->weight_dtype, i * HIDDEN) +
                        x->up_bias[i];
            double expected = is_gated ? gate / (1.0 + exp(-gate)) * up : gate;
            double found = load(x->d, x->dtype, t * D_STRIDE + i);
            if (!(fabs(found - expected) <= bound * (1.0 + fabs(expected)))) {
                fail_msg("row %d, column %d: expected %g, found %g", (int)t, (int)i, expected,
                         found);
            }
        }
        for (int64_t i = INTERMEDIATE; i < D_STRIDE; i++) {
            uint16_t first = 0;
            memcpy(&first,
                   (const unsigned char *)x->d +
                       (size_t)(t * D_STRIDE + i) * (x->dtype == IMBREX_DTYPE_BF16 ? 2 : 4),
                   sizeof(first));
            assert_int_equal(first, CANARY);
        }
    }
}

static struct imbrex_cpu_gemm_swiglu_params swiglu_params(struct operands *x)
{
    return (struct imbrex_cpu_gemm_swiglu_params){
        .a = x->a,
        .gate = x->gate,
        .up = x->up,
        .gate_bias = x->gate_bias,
        .up_bias = x->up_bias,
        .d = x->d,
        .a_stride = A_STRIDE,
        .d_stride = D_STRIDE,
        .num_tokens = TOKENS,
        .hidden_size = HIDDEN,
        .intermediate_size = INTERMEDIATE,
        .dtype = x->dtype,
        .weight_dtype = x->weight_dtype,
    };
}

static struct imbrex_cpu_gemm_params gemm_params(struct operands *x)
{
    return (struct imbrex_cpu_gemm_params){
        .a = x->a,
        .b = x->gate,
        .bias = x->gate_bias,
        .d = x->d,
        .a_stride = A_STRIDE,
        .d_stride = D_STRIDE,
        .num_tokens = TOKENS,
        .in_features = HIDDEN,
        .out_features = INTERMEDIATE,
        .dtype = x->dtype,
        .weight_dtype = x->weight_dtype,
    };
}

/* Catches a chunk that begins at the wrong row, a stride that is ignored in one of the types, rows
 * that are not rounded or rounded twice, biases left out. */
static void test_all_types(void **state)
{
    struct imbrex_cpu *cpu = *state;
    for (int pair = 0; pair < 4; pair++) {
        struct operands *x = make_operands(pair & 1, pair >> 1);
        struct imbrex_cpu_gemm_swiglu_params swiglu = swiglu_params(x);
        assert_int_equal(imbrex_cpu_gemm_swiglu(cpu, &swiglu, NULL), IMBREX_STATUS_OK);
        check_results(x, true);
        free(x);
        x = make_operands(pair & 1, pair >> 1);
        struct imbrex_cpu_gemm_params gemm = gemm_params(x);
        assert_int_equal(imbrex_cpu_gemm(cpu, &gemm, NULL), IMBREX_STATUS_OK);
        check_results(x, false);
        free(x);
    }
}

static void expect_refusal(struct imbrex_cpu *cpu,
                           const struct imbrex_cpu_gemm_swiglu_params *params, const char *message)
{
    struct imbrex_error err = {0};
    assert_int_equal(imbrex_cpu_gemm_swiglu(cpu, params, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    if (strstr(err.message, message) == NULL) {
        fail_msg("expected a message with '%s', found '%s'", message, err.message);
    }
}

/* Catches a rule that is documented and not checked: each would read or write memory that is not
 * the caller's. */
static void test_refusals(void **state)
{
    struct imbrex_cpu *cpu = *state;
    struct operands *x = make_operands(IMBREX_DTYPE_F32, IMBREX_DTYPE_F32);
    struct imbrex_cpu_gemm_swiglu_params params = swiglu_params(x);
#define REFUSE(field, value, message)          \
    do {                                       \
        params = swiglu_params(x);             \
        params.field = (value);                \
        expect_refusal(cpu, &params, message); \
    } while (0)
    REFUSE(num_tokens, -1, "num_tokens: expected 0 or more, found -1");
    REFUSE(hidden_size, 0, "hidden_size: expected 1 or more, found 0");
    REFUSE(intermediate_size, 0, "intermediate_size: expected 1 or more, found 0");
    REFUSE(dtype, 2, "dtype: expected one of enum imbrex_dtype, found 2");
    REFUSE(weight_dtype, -1, "weight_dtype: expected one of enum imbrex_dtype, found -1");
    REFUSE(a, NULL, "a: expected a pointer, found NULL");
    REFUSE(up, (const unsigned char *)x->up + 2, "up: expected an address that is a multiple of 4");
    REFUSE(a_stride, HIDDEN - 1, "a: stride: expected 37 or more, found 36");
    REFUSE(d_stride, -40, "d: stride: expected 29 or more, found -40");
    REFUSE(a_stride, INT64_MAX, "more than there are addresses");
    REFUSE(d, x->a + TOKENS * A_STRIDE - 8, "d: overlaps");
    REFUSE(d, x->gate, "d: overlaps gate");
    REFUSE(gate_bias, (const float *)(const void *)((const unsigned char *)x->gate_bias + 1),
           "gate_bias: expected an address that is a multiple of 4");
#undef REFUSE
    /* No rows: nothing is looked at. */
    params = (struct imbrex_cpu_gemm_swiglu_params){.hidden_size = 1, .intermediate_size = 1};
    assert_int_equal(imbrex_cpu_gemm_swiglu(cpu, &params, NULL), IMBREX_STATUS_OK);
    free(x);
}

/* Catches a number of threads that reaches the pool unchecked. */
static void test_num_threads(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_cpu *cpu = NULL;
    assert_int_equal(imbrex_cpu_open(-1, &cpu, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_string_equal(err.message, "num_threads: expected 0 to 1024, found -1");
    assert_int_equal(imbrex_cpu_open(1 << 20, &cpu, NULL), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_null(cpu);
}

static int open_cpu(void **state)
{
    struct imbrex_cpu *cpu = NULL;
    int status = imbrex_cpu_open(2, &cpu, NULL);
    *state = cpu;
    return status;
}

static int close_cpu(void **state)
{
    imbrex_cpu_close(*state);
    return 0;
}

int run_cpu_api_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_types),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_num_threads),
    };
    return cmocka_run_group_tests_name("cpu_api", tests, open_cpu, close_cpu);
}
