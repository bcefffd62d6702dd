/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/dtype.h"

#include <math.h>

#include "tests/test.h"

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Catches a row of the table in the wrong place. */
static void test_dtype_names(void **state)
{
    (void)state;
    assert_string_equal(dtype_name(DTYPE_F32), "F32");
    assert_string_equal(dtype_name(DTYPE_F16), "F16");
    assert_string_equal(dtype_name(DTYPE_BF16), "BF16");
    assert_int_equal(dtype_block_bytes(DTYPE_F32), 4);
    assert_int_equal(dtype_block_bytes(DTYPE_F16), 2);
    assert_int_equal(dtype_block_bytes(DTYPE_BF16), 2);
}

/* Catches any of the 65,536 halves that is not widened exactly: subnormals, infinities, NaN kept
 * NaN with its sign, zeros with theirs. */
static void test_dtype_f16_every_value(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        int mantissa = (int)(bits & 0x3ff), exponent = (int)(bits >> 10 & 0x1f);
        double magnitude = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                           : exponent == 0 ? ldexp(mantissa, -24)
                                           : ldexp(1024 + mantissa, exponent - 25);
        float value = f16_to_float((uint16_t)bits);
        int is_negative = bits >> 15 != 0;
        int is_right = isnan(magnitude) ? isnan(value) : fabs((double)value) == magnitude;
        if (!is_right || (signbit(value) != 0) != is_negative) {
            fail_msg("0x%04x: widened to %.9g, expected %s%.9g", bits, (double)value,
                     is_negative ? "-" : "", magnitude);
        }
    }
}

/* Catches a bf16 whose bits do not become the upper half of the float. */
static void test_dtype_bf16_every_value(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        uint32_t wide = float_bits(bf16_to_float((uint16_t)bits));
        if (wide != bits << 16) {
            fail_msg("0x%04x: widened to 0x%08x", bits, wide);
        }
    }
}

/* Catches a rounding that is not to nearest even: every f16 keeps its bits, halfway values go to
 * the even neighbour, values beside halfway to the nearer one, in every binade and at the
 * overflow. */
static void test_dtype_f16_from_float(void **state)
{
    (void)state;
    for (uint16_t bits = 0; bits < 0x7c00; bits++) {
        float value = f16_to_float(bits);
        /* Of 65504, the next would be 2^16, which is infinity. */
        float next = bits == 0x7bff ? 65536.0f : f16_to_float((uint16_t)(bits + 1));
        float halfway = value + (next - value) / 2.0f;
        uint16_t even = bits % 2 == 0 ? bits : (uint16_t)(bits + 1);
        assert_int_equal(f16_from_float(value), bits);
        assert_int_equal(f16_from_float(-value), 0x8000 | bits);
        assert_int_equal(f16_from_float(halfway), even);
        assert_int_equal(f16_from_float(-halfway), 0x8000 | even);
        assert_int_equal(f16_from_float(nextafterf(halfway, 0.0f)), bits);
        assert_int_equal(f16_from_float(nextafterf(halfway, INFINITY)), bits + 1);
    }
    assert_int_equal(f16_from_float(INFINITY), 0x7c00);
    assert_int_equal(f16_from_float(-3e38f), 0xfc00);
    assert_int_equal(f16_from_float(1e-40f), 0);
    assert_true(isnan(f16_to_float(f16_from_float(NAN))));
}

/* The same of bf16. */
static void test_dtype_bf16_from_float(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7f80; bits++) {
        uint32_t halfway_bits = bits << 16 | 0x8000;
        float halfway;
        memcpy(&halfway, &halfway_bits, sizeof(halfway));
        uint32_t even = bits % 2 == 0 ? bits : bits + 1;
        assert_int_equal(bf16_from_float(bf16_to_float((uint16_t)bits)), bits);
        assert_int_equal(bf16_from_float(halfway), even);
        assert_int_equal(bf16_from_float(-halfway), 0x8000 | even);
        assert_int_equal(bf16_from_float(nextafterf(halfway, 0.0f)), bits);
        assert_int_equal(bf16_from_float(nextafterf(halfway, INFINITY)), bits + 1);
    }
    assert_int_equal(bf16_from_float(-INFINITY), 0xff80);
    uint32_t nan_bits = 0x7f800001; /* its upper half alone would be infinity */
    float nan_value;
    memcpy(&nan_value, &nan_bits, sizeof(nan_value));
    assert_true(isnan(bf16_to_float(bf16_from_float(nan_value))));
}

/* Catches a load that needs alignment (under UBSan) or takes the wrong element. */
static void test_dtype_load_at_any_address(void **state)
{
    (void)state;
    static const uint16_t f16_bits[] = {0x3c00, 0xc000, 0x7bff}; /* 1, -2, 65504 */
    static const uint16_t bf16_bits[] = {0x3f80, 0xc000, 0x7f7f};
    static const float f32_values[] = {1.0f, -2.0f, 3.5f};
    for (size_t shift = 0; shift < 4; shift++) {
        unsigned char bytes[4 + sizeof(f32_values)];
        unsigned char *at = bytes + shift;
        memcpy(at, f16_bits, sizeof(f16_bits));
        struct weight_view view = {at, DTYPE_F16};
        assert_int_equal(float_bits(weight_load(view, 1)), float_bits(-2.0f));
        assert_int_equal(float_bits(weight_load(view, 2)), float_bits(65504.0f));
        memcpy(at, bf16_bits, sizeof(bf16_bits));
        view.dtype = DTYPE_BF16;
        assert_int_equal(float_bits(weight_load(view, 0)), float_bits(1.0f));
        assert_int_equal(float_bits(weight_load(view, 2)), 0x7f7f0000);
        memcpy(at, f32_values, sizeof(f32_values));
        view.dtype = DTYPE_F32;
        assert_int_equal(float_bits(weight_load(view, 2)), float_bits(3.5f));
    }
}

int run_dtype_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtype_names),
        cmocka_unit_test(test_dtype_f16_every_value),
        cmocka_unit_test(test_dtype_bf16_every_value),
        cmocka_unit_test(test_dtype_f16_from_float),
        cmocka_unit_test(test_dtype_bf16_from_float),
        cmocka_unit_test(test_dtype_load_at_any_address),
    };
    return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
