/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/quant.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cpu/cpu_kernels.h"
#include "tests/test.h"

#define NUM_VALUES 4096
#define BLOCK_BYTES_MAX (NUM_VALUES * 4)
#define LONG_ROW (4096 * 32) /* what quant.h promises an error for */

static double random_normal(uint64_t *random_state)
{
    double sum = 0.0;
    for (int i = 0; i < 12; i++) {
        *random_state = *random_state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(*random_state >> 33) * 0x1p-31;
    }
    return sum - 6.0;
}

static void fill_normal(float *a, int64_t count, double scale, uint64_t seed)
{
    uint64_t random_state = seed;
    for (int64_t i = 0; i < count; i++) {
        a[i] = (float)(random_normal(&random_state) * scale);
    }
}

/* Into blocks and back. */
static void round_trip(enum dtype dtype, const float *a, float *d)
{
    static unsigned char blocks[BLOCK_BYTES_MAX];
    quant_quantize_row(dtype, a, blocks, NUM_VALUES);
    quant_dequantize_row(dtype, blocks, d, NUM_VALUES);
}

/* Root mean square of d - a, relative to that of a. */
static double relative_error(const float *a, const float *d)
{
    double error = 0.0, size = 0.0;
    for (int i = 0; i < NUM_VALUES; i++) {
        error += ((double)d[i] - a[i]) * ((double)d[i] - a[i]);
        size += (double)a[i] * a[i];
    }
    return sqrt(error / size);
}

/* Catches a format whose error is larger than its bits allow: a scale search that has lost its way,
 * elements in the wrong order, a high bit dropped. The K formats must not be worse than ggml's
 * reference quantisers, which leave 0.0706, 0.0356 and 0.0176 on the same values. */
static void test_error_on_normal_values(void **state)
{
    (void)state;
    static const double limits[DTYPE_COUNT] = {
        [DTYPE_F32] = 0.0,     [DTYPE_F16] = 0.0003,  [DTYPE_BF16] = 0.0018, [DTYPE_Q8_0] = 0.0060,
        [DTYPE_Q4_0] = 0.0950, [DTYPE_Q4_1] = 0.0850, [DTYPE_Q5_0] = 0.0460, [DTYPE_Q5_1] = 0.0410,
        [DTYPE_Q4_K] = 0.0706, [DTYPE_Q5_K] = 0.0356, [DTYPE_Q6_K] = 0.0176,
    };
    static float a[NUM_VALUES], d[NUM_VALUES];
    const int num_rounds = 16;
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        double sum_squares = 0.0;
        assert_true(quant_can_quantize((enum dtype)dtype));
        for (int round = 0; round < num_rounds; round++) {
            fill_normal(a, NUM_VALUES, 0.02, (uint64_t)round);
            round_trip((enum dtype)dtype, a, d);
            sum_squares += pow(relative_error(a, d), 2.0);
        }
        double error = sqrt(sum_squares / num_rounds);
        if (!(error <= limits[dtype])) {
            fail_msg("%s: relative error %.5f, expected at most %.5f",
                     dtype_name((enum dtype)dtype), error, limits[dtype]);
        }
        print_message("%s: relative error %.5f\n", dtype_name((enum dtype)dtype), error);
    }
}

/* The largest error of one element, as a part of the range of its block. */
static double element_limit(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_F32:
        return 0.0;
    case DTYPE_F16:
        return 0x1p-11;
    case DTYPE_BF16:
        return 0x1p-8;
    case DTYPE_Q8_0:
        return 1.0 / 253.0;
    case DTYPE_Q4_0: /* the end of the shorter side is cut off */
        return 1.0 / 7.9;
    case DTYPE_Q5_0:
        return 1.0 / 15.8;
    case DTYPE_Q4_1:
        return 1.0 / 29.9;
    case DTYPE_Q5_1:
        return 1.0 / 61.9;
    case DTYPE_Q4_K:
        return 1.0 / 14.0;
    case DTYPE_Q5_K:
        return 1.0 / 28.0;
    default:
        return 1.0 / 28.0;
    }
}

/* Fails if an element is further off than its block's range allows, or not finite. */
static void expect_close(enum dtype dtype, const char *what, const float *a, const float *d)
{
    int block = dtype_is_quantized(dtype) ? dtype_block_elements(dtype) : 1;
    for (int first = 0; first < NUM_VALUES; first += block) {
        double low = 0.0, high = 0.0;
        for (int i = first; i < first + block; i++) {
            low = fmin(low, a[i]);
            high = fmax(high, a[i]);
        }
        double limit = element_limit(dtype) * (high - low);
        if (dtype == DTYPE_BF16) {
            limit += 0x1p-134; /* half the smallest */
        }
        if (dtype != DTYPE_F32 && dtype != DTYPE_BF16) {
            /* The scale is an F16, and a multiple of 2^-24. */
            limit += 0x1p-11 * (high - low) + 128.0 * 0x1p-24;
        }
        for (int i = first; i < first + block; i++) {
            double error = fabs((double)d[i] - a[i]);
            if (!(error <= limit)) {
                fail_msg("%s, %s: element %d: %.9g came back as %.9g, allowed +-%.3g",
                         dtype_name(dtype), what, i, (double)a[i], (double)d[i], limit);
            }
        }
    }
}

/* Catches what a search for scales may stumble over: no range, one sign, one value that dwarfs the
 * rest, numbers whose inverse overflows, sums of squares that overflow. */
static void test_difficult_rows(void **state)
{
    (void)state;
    static float a[NUM_VALUES], d[NUM_VALUES];
    static const char *const names[] = {
        "zeros",      "constant", "negative constant", "positive", "negative",  "one huge element",
        "subnormals", "tiny",     "smallest",          "large",    "two signs", "a block of zeros"};
    for (size_t kind = 0; kind < sizeof(names) / sizeof(names[0]); kind++) {
        fill_normal(a, NUM_VALUES, 1.0, kind);
        for (int i = 0; i < NUM_VALUES; i++) {
            float normal = a[i];
            const float values[] = {0.0f,
                                    0.37f,
                                    -2.5f,
                                    fabsf(normal),
                                    -fabsf(normal),
                                    i % 512 == 77 ? -60000.0f : normal,
                                    normal * 1e-40f,
                                    normal * 1e-30f,
                                    i % 2 == 0 ? FLT_TRUE_MIN : FLT_MIN,
                                    normal * 1e4f,
                                    i % 32 == 31 ? -1.0f : 1.0f,
                                    i / 256 % 2 == 0 ? 0.0f : normal};
            a[i] = values[kind];
        }
        for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
            round_trip((enum dtype)dtype, a, d);
            expect_close((enum dtype)dtype, names[kind], a, d);
        }
    }
}

/* Catches a constant row that is only nearly so: its error must be that of an F16 scale. */
static void test_constant_rows(void **state)
{
    (void)state;
    static float a[NUM_VALUES], d[NUM_VALUES];
    static const float values[] = {1.0f, 0.37f, -0.37f, -123.4f, 33.3f};
    for (size_t idx = 0; idx < sizeof(values) / sizeof(values[0]); idx++) {
        for (int i = 0; i < NUM_VALUES; i++) {
            a[i] = values[idx];
        }
        for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
            /* The positive side of the symmetric formats is one step shorter; the largest value
             * sets the sign, so a constant reaches the longer one. */
            round_trip((enum dtype)dtype, a, d);
            for (int i = 0; i < NUM_VALUES; i++) {
                double error = fabs((double)d[i] - a[i]) / fabs(a[i]);
                if (!(error <= (dtype == DTYPE_BF16 ? 0x1p-8 : 0x1p-10))) {
                    fail_msg("%s: %.9g came back as %.9g", dtype_name((enum dtype)dtype),
                             (double)a[i], (double)d[i]);
                }
            }
        }
    }
}

/* Catches a format that does not reach every one of its integers: a grid of them comes back bit for
 * bit. */
static void test_grids(void **state)
{
    (void)state;
    static const struct {
        enum dtype dtype;
        int low, high;
    } grids[] = {{DTYPE_Q8_0, -127, 127}, {DTYPE_Q4_0, -8, 7},  {DTYPE_Q4_1, -3, 12},
                 {DTYPE_Q5_0, -16, 15},   {DTYPE_Q5_1, -9, 22}, {DTYPE_Q6_K, -32, 31}};
    static float a[NUM_VALUES], d[NUM_VALUES];
    for (size_t grid = 0; grid < sizeof(grids) / sizeof(grids[0]); grid++) {
        int count = grids[grid].high - grids[grid].low + 1;
        for (int i = 0; i < NUM_VALUES; i++) {
            /* Both ends in every 16 elements, what lies between in turn. */
            int q = i % 16 == 3   ? grids[grid].low
                    : i % 16 == 8 ? grids[grid].high
                                  : grids[grid].low + i * 7 % count;
            a[i] = (float)q * 0.25f;
        }
        round_trip(grids[grid].dtype, a, d);
        for (int i = 0; i < NUM_VALUES; i++) {
            if (d[i] != a[i]) {
                fail_msg("%s: element %d: %.9g came back as %.9g", dtype_name(grids[grid].dtype), i,
                         (double)a[i], (double)d[i]);
            }
        }
    }
}

/* Catches values beyond F16 that turn into wrong finite ones where infinity is promised, or into
 * infinity where clipping is; and undefined conversions on the way (under UBSan). */
static void test_beyond_f16(void **state)
{
    (void)state;
    static float a[NUM_VALUES], d[NUM_VALUES];
    for (int i = 0; i < NUM_VALUES; i++) {
        a[i] = (i % 2 == 0 ? 1e38f : -3e38f) / (float)(1 + i % 7);
    }
    for (int dtype = DTYPE_F16; dtype < DTYPE_COUNT; dtype++) {
        round_trip((enum dtype)dtype, a, d);
        bool is_clipped = dtype == DTYPE_BF16 || dtype == DTYPE_Q4_K || dtype == DTYPE_Q5_K ||
                          dtype == DTYPE_Q6_K;
        for (int i = 0; i < NUM_VALUES; i++) {
            assert_int_equal(isfinite(d[i]), is_clipped);
        }
    }
    round_trip(DTYPE_Q6_K, a, d);
    assert_true(d[0] > 1e8f && d[7] < -1e8f);
}

/* Catches a load or store that needs alignment (under UBSan), or that touches a byte beside the
 * blocks. */
static void test_any_address(void **state)
{
    (void)state;
    enum { NUM = 512 };
    static float a[NUM], expected[NUM], d[NUM];
    static unsigned char aligned[NUM * 4], shifted[NUM * 4 + 16];
    static float activations[NUM * 2];
    fill_normal(a, NUM, 1.0, 5);
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        size_t num_bytes = dtype_row_bytes((enum dtype)dtype, NUM);
        enum activation_form form = quant_activation_form((enum dtype)dtype);
        quant_quantize_row((enum dtype)dtype, a, aligned, NUM);
        quant_dequantize_row((enum dtype)dtype, aligned, expected, NUM);
        for (size_t shift = 1; shift < 8; shift++) {
            memset(shifted, 0x5a, sizeof(shifted));
            quant_quantize_row((enum dtype)dtype, a, shifted + shift, NUM);
            assert_memory_equal(shifted + shift, aligned, num_bytes);
            assert_int_equal(shifted[shift - 1], 0x5a);
            assert_int_equal(shifted[shift + num_bytes], 0x5a);
            quant_dequantize_row((enum dtype)dtype, shifted + shift, d, NUM);
            assert_memory_equal(d, expected, sizeof(d));
            if (form != ACTIVATION_FORM_PLAIN) {
                quant_quantize_activations(form, a, activations, NUM);
                float dot = quant_dot((enum dtype)dtype, aligned, activations, NUM);
                assert_true(dot == quant_dot((enum dtype)dtype, shifted + shift, activations, NUM));
            }
        }
    }
}

/* ---- activations ------------------------------------------------------------------------------*/

/* Catches a form that does not fit its dtype, or row sizes that do not fit their structs. */
static void test_activation_forms(void **state)
{
    (void)state;
    assert_int_equal(quant_activation_form(DTYPE_BF16), ACTIVATION_FORM_PLAIN);
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        assert_int_equal(quant_activation_form((enum dtype)dtype),
                         dtype_block_elements((enum dtype)dtype) == 32 ? ACTIVATION_FORM_Q8
                                                                       : ACTIVATION_FORM_Q8_K);
    }
    assert_int_equal(quant_activation_row_bytes(ACTIVATION_FORM_PLAIN, 256), 0);
    assert_int_equal(quant_activation_row_bytes(ACTIVATION_FORM_Q8, 96),
                     3 * sizeof(struct q8_activations));
    assert_int_equal(quant_activation_row_bytes(ACTIVATION_FORM_Q8, 90), 0);
    assert_int_equal(quant_activation_row_bytes(ACTIVATION_FORM_Q8_K, 512),
                     2 * sizeof(struct q8_k_activations));
    assert_int_equal(quant_activation_row_bytes(ACTIVATION_FORM_Q8_K, 128), 0);
}

/* Catches Q8 activations that are not ggml's Q8_0 blocks (which golden_quant proves), and a sum
 * that does not belong to them. */
static void test_q8_activations_are_q8_0(void **state)
{
    (void)state;
    static float a[NUM_VALUES];
    static unsigned char blocks[BLOCK_BYTES_MAX];
    static struct q8_activations activations[NUM_VALUES / 32];
    static const double scales[] = {1.0, 1e4, 1e-3, 1e-7, 1e-41, 0.0};
    for (size_t idx = 0; idx < sizeof(scales) / sizeof(scales[0]); idx++) {
        fill_normal(a, NUM_VALUES, scales[idx], 11);
        a[40] = a[33] = 63.5f * (float)scales[idx]; /* halves, after division by 127 */
        a[41] = 127.0f * (float)scales[idx];
        quant_quantize_row(DTYPE_Q8_0, a, blocks, NUM_VALUES);
        quant_quantize_activations(ACTIVATION_FORM_Q8, a, activations, NUM_VALUES);
        for (int block = 0; block < NUM_VALUES / 32; block++) {
            uint16_t scale_bits;
            int32_t sum = 0;
            memcpy(&scale_bits, blocks + 34 * block, sizeof(scale_bits));
            assert_true(activations[block].scale == f16_to_float(scale_bits));
            assert_memory_equal(activations[block].q, blocks + 34 * block + 2, 32);
            for (int i = 0; i < 32; i++) {
                sum += activations[block].q[i];
            }
            assert_int_equal(activations[block].sum, sum);
        }
    }
}

/* Catches Q8_K activations that lose more than half a step, whose largest value is not -127, or
 * whose sums belong to other elements. */
static void test_q8_k_activations(void **state)
{
    (void)state;
    static float a[NUM_VALUES], d[NUM_VALUES];
    static struct q8_k_activations activations[NUM_VALUES / 256];
    static const double scales[] = {1.0, 1e30, 1e-30, 0.0, 1e-41};
    for (size_t idx = 0; idx < sizeof(scales) / sizeof(scales[0]); idx++) {
        fill_normal(a, NUM_VALUES, scales[idx], 12);
        quant_quantize_activations(ACTIVATION_FORM_Q8_K, a, activations, NUM_VALUES);
        quant_dequantize_activations(ACTIVATION_FORM_Q8_K, activations, d, NUM_VALUES);
        for (int i = 0; i < NUM_VALUES; i++) {
            const struct q8_k_activations *block = &activations[i / 256];
            double step = fabs((double)block->scale);
            double limit = scales[idx] < 1e-37 ? 1e-36 : 0.5 * step * (1.0 + 1e-5);
            assert_true(fabs((double)d[i] - a[i]) <= limit);
            if (i % 16 == 0) {
                int32_t sum = 0;
                for (int j = 0; j < 16; j++) {
                    sum += block->q[i % 256 + j];
                }
                assert_int_equal(block->sums[i % 256 / 16], sum);
            }
        }
        for (int block = 0; block < NUM_VALUES / 256 && scales[idx] > 1e-37; block++) {
            int lowest = 0;
            for (int i = 0; i < 256; i++) {
                lowest = activations[block].q[i] < lowest ? activations[block].q[i] : lowest;
            }
            assert_int_equal(lowest, -127);
        }
    }
}

/* Catches an infinite or NaN activation that is lost on the way (or converted to an integer, which
 * is undefined): the whole dot product must be NaN; and a block that it should not reach. */
static void test_non_finite_activations(void **state)
{
    (void)state;
    enum { NUM = 512 };
    static float a[NUM], d[NUM];
    static unsigned char weights[NUM * 4];
    static float activations[NUM * 2];
    static const float values[] = {NAN, INFINITY, -INFINITY};
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        enum activation_form form = quant_activation_form((enum dtype)dtype);
        for (size_t idx = 0; idx < 3; idx++) {
            fill_normal(a, NUM, 1.0, 3);
            quant_quantize_row((enum dtype)dtype, a, weights, NUM);
            a[300] = values[idx];
            quant_quantize_activations(form, a, activations, NUM);
            quant_dequantize_activations(form, activations, d, NUM);
            assert_true(isnan(d[300]) && isnan(d[319]) && isfinite(d[255]));
            assert_true(isnan(quant_dot((enum dtype)dtype, weights, activations, NUM)));
        }
    }
}

/* Fails unless every path brings a[count] into the blocks that quant_quantize_activations gives,
 * bit for bit, and writes nothing behind them. */
static void expect_same_blocks(const char *what, const float *a, int64_t count)
{
    static unsigned char expected[NUM_VALUES * 2], found[NUM_VALUES * 2 + 4];
    for (int form = ACTIVATION_FORM_Q8; form < ACTIVATION_FORM_COUNT; form++) {
        size_t num_bytes = quant_activation_row_bytes((enum activation_form)form, count);
        assert_true(num_bytes > 0 && num_bytes <= sizeof(expected));
        quant_quantize_activations((enum activation_form)form, a, expected, count);
        for (int32_t path = 0; path < CPU_NUM_PATHS; path++) {
            struct cpu_kernels kernels;
            cpu_kernels_select(cpu_paths[path].features, &kernels);
            memset(found, 0x5a, sizeof(found));
            kernels.quantize((enum activation_form)form, a, found, count);
            for (size_t i = 0; i < num_bytes; i++) {
                if (found[i] != expected[i]) {
                    fail_msg("%s, path %s, form %d: byte %zu: expected 0x%02x, found 0x%02x", what,
                             kernels.name, form, i, expected[i], found[i]);
                }
            }
            assert_int_equal(found[num_bytes], 0x5a);
        }
    }
}

/* Catches a kernel that rounds halves another way, takes another of two values of the largest
 * magnitude, or treats zeros, NaN, infinities, subnormals, scales beyond F16 in any other way than
 * the definition: random values of all sizes, random bits, special values among ordinary ones. */
static void test_quantize_kernels(void **state)
{
    (void)state;
    static float a[NUM_VALUES];
    static const float special[] = {0.0f,     -0.0f,   NAN,      INFINITY, -INFINITY,     FLT_MAX,
                                    -FLT_MAX, FLT_MIN, -FLT_MIN, 1e-45f,   -1e-45f,       8.3e6f,
                                    8.33e6f,  3.7e-6f, 3.8e-6f,  3.7e-37f, -3.75e-37f,    2.9e-39f,
                                    3.8e-39f, 1e-41f,  127.0f,   -127.0f,  3.738453e-37f, 0.5f};
    char what[64];
    uint64_t random_state = 1;
    for (int exponent = -150; exponent <= 128; exponent += 2) {
        snprintf(what, sizeof(what), "normal values times 2^%d", exponent);
        fill_normal(a, NUM_VALUES, ldexp(1.0, exponent), (uint64_t)exponent);
        expect_same_blocks(what, a, NUM_VALUES);
    }
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < NUM_VALUES; i++) {
            (void)random_normal(&random_state);
            uint32_t bits = (uint32_t)(random_state >> 32);
            /* The blocks of every other round hold no NaN or infinity and few sizes. */
            bits = round % 2 == 0 ? bits : (bits & 0x807fffff) | ((bits >> 23 & 3) + 120) << 23;
            memcpy(&a[i], &bits, sizeof(bits));
        }
        expect_same_blocks("random bits", a, NUM_VALUES);
    }
    /* Multiples of half a step, both ends of the range there: every one a tie. */
    for (int power = -20; power <= 20; power += 5) {
        for (int i = 0; i < NUM_VALUES; i++) {
            int halves = i % 32 == 5 ? 254 : i % 32 == 9 ? -254 : (i * 37 + i / 32) % 509 - 254;
            a[i] = ldexpf(0.5f * (float)halves, power);
        }
        expect_same_blocks("ties", a, NUM_VALUES);
    }
    for (size_t idx = 0; idx < sizeof(special) / sizeof(special[0]); idx++) {
        for (int place = 0; place < 64; place++) {
            fill_normal(a, 512, place % 2 == 0 ? 1.0 : 0.0, idx * 64 + (uint64_t)place);
            a[place * 4 + 3] = special[idx];
            a[place] = place % 3 == 0 ? -special[idx] : a[place];
            snprintf(what, sizeof(what), "%g at %d", (double)special[idx], place);
            expect_same_blocks(what, a, 512);
        }
        for (int i = 0; i < 512; i++) {
            a[i] = i % 2 == 0 ? special[idx] : -special[idx];
        }
        expect_same_blocks("special values alone", a, 512);
    }
}

/* ---- dot products -----------------------------------------------------------------------------*/

/* |quant_dot - exact| relative to the sum of magnitudes. */
static double dot_error(enum dtype dtype, const unsigned char *weights, const float *a,
                        int64_t count)
{
    enum activation_form form = quant_activation_form(dtype);
    float *wide = malloc((size_t)count * sizeof(float));
    float *seen = malloc((size_t)count * sizeof(float));
    void *activations = malloc(quant_activation_row_bytes(form, count));
    assert_true(wide != NULL && seen != NULL && activations != NULL);
    quant_dequantize_row(dtype, weights, wide, count);
    quant_quantize_activations(form, a, activations, count);
    quant_dequantize_activations(form, activations, seen, count);
    double sum = 0.0, magnitude = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += (double)wide[i] * seen[i];
        magnitude += fabs((double)wide[i] * seen[i]);
    }
    double error = fabs(quant_dot(dtype, weights, activations, count) - sum);
    free(wide);
    free(seen);
    free(activations);
    return magnitude > 0.0 ? error / magnitude : error;
}

/* Catches a dot product that is not that of the two dequantised rows: 1e-6 of the sum of
 * magnitudes, for normal rows and for those where fp32 sums go wrong: one sign and one size, where
 * every rounding goes the same way; values near zero that are a difference of large ones. */
static void test_dot_is_exact(void **state)
{
    (void)state;
    static float weights[LONG_ROW], a[LONG_ROW];
    static const int32_t counts[] = {256, 768, 4864, LONG_ROW};
    static const char *const kinds[] = {"normal", "constant", "positive", "far from zero"};
    unsigned char *blocks = malloc((size_t)LONG_ROW * 2);
    assert_non_null(blocks);
    for (size_t kind = 0; kind < 4; kind++) {
        fill_normal(weights, LONG_ROW, 1.0, 20 + kind);
        fill_normal(a, LONG_ROW, 1.0, 30 + kind);
        for (int64_t i = 0; i < LONG_ROW; i++) {
            weights[i] = kind == 0   ? weights[i]
                         : kind == 1 ? 0.7193f
                         : kind == 2 ? fabsf(weights[i])
                                     : -100.0f + 1e-2f * weights[i] + (i % 32 == 0 ? 100.0f : 0.0f);
            a[i] = kind == 0 || kind == 3 ? a[i] : kind == 1 ? 1.3417f : fabsf(a[i]);
        }
        for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
            quant_quantize_row((enum dtype)dtype, weights, blocks, LONG_ROW);
            for (size_t idx = 0; idx < sizeof(counts) / sizeof(counts[0]); idx++) {
                double error = dot_error((enum dtype)dtype, blocks, a, counts[idx]);
                if (!(error <= 1e-6)) {
                    fail_msg("%s, %s, %d elements: off by %.3g of the sum of magnitudes",
                             dtype_name((enum dtype)dtype), kinds[kind], (int)counts[idx], error);
                }
            }
        }
    }
    free(blocks);
}

/* Catches integer sums that overflow at the ends of their ranges: every bit of the integers set,
 * activations of the largest size. */
static void test_dot_at_the_limits(void **state)
{
    (void)state;
    enum { NUM = 512 };
    static float a[NUM];
    static unsigned char blocks[NUM * 2];
    static const unsigned char fills[] = {0xff, 0x00, 0x80, 0x7f};
    const uint16_t one = 0x3c00;
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        size_t block_bytes = dtype_block_bytes((enum dtype)dtype);
        for (size_t fill = 0; fill < sizeof(fills); fill++) {
            memset(blocks, fills[fill], sizeof(blocks));
            for (size_t at = 0; at < dtype_row_bytes((enum dtype)dtype, NUM); at += block_bytes) {
                memcpy(blocks + at + (dtype == DTYPE_Q6_K ? 208 : 0), &one, sizeof(one));
                if (dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 || dtype == DTYPE_Q4_K ||
                    dtype == DTYPE_Q5_K) {
                    memcpy(blocks + at + 2, &one, sizeof(one));
                }
            }
            for (int sign = -1; sign <= 1; sign += 2) {
                for (int i = 0; i < NUM; i++) {
                    a[i] = (float)sign * 127.0f;
                }
                assert_true(dot_error((enum dtype)dtype, blocks, a, NUM) <= 1e-6);
            }
        }
    }
}

int run_quant_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_on_normal_values),
        cmocka_unit_test(test_difficult_rows),
        cmocka_unit_test(test_constant_rows),
        cmocka_unit_test(test_grids),
        cmocka_unit_test(test_beyond_f16),
        cmocka_unit_test(test_any_address),
        cmocka_unit_test(test_activation_forms),
        cmocka_unit_test(test_q8_activations_are_q8_0),
        cmocka_unit_test(test_q8_k_activations),
        cmocka_unit_test(test_non_finite_activations),
        cmocka_unit_test(test_quantize_kernels),
        cmocka_unit_test(test_dot_is_exact),
        cmocka_unit_test(test_dot_at_the_limits),
    };
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
