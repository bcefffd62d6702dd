/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/kv_dtype.h"

#include <float.h>
#include <math.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ref/ref_kernels.h"
#include "tests/test.h"

#define MAX_HEAD_DIM 80
#define CANARY 0xa5

/* A row by itself: elements, scales behind them, canaries behind both. */
struct stored_row {
    uint8_t elements[MAX_HEAD_DIM * sizeof(float) + 64];
    uint16_t scales[4];
};

static struct kv_row clear_row(struct stored_row *stored)
{
    memset(stored, CANARY, sizeof(*stored));
    return (struct kv_row){stored->elements, stored->scales};
}

/* In [-1, 1), the same numbers in every run. */
static float next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

/* Catches a code of E4M3 that is widened wrongly: every one against its definition. */
static void test_fp8_every_value(void **state)
{
    (void)state;
    for (int bits = 0; bits < 0x100; bits++) {
        int mantissa = bits & 7, exponent = bits >> 3 & 0xf;
        double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
        float value = fp8_to_float((uint8_t)bits);
        if ((bits & 0x7f) == 0x7f) {
            assert_true(isnan(value));
            continue;
        }
        assert_true(fabs((double)value) == magnitude);
        assert_int_equal(signbit(value) != 0, bits >> 7);
        assert_int_equal(fp8_from_float(value), bits);
    }
}

/* Catches a rounding that is not to nearest even, in every binade, among subnormals and at the
 * largest number, beyond which there is none. */
static void test_fp8_from_float(void **state)
{
    (void)state;
    for (int bits = 0; bits < 0x7e; bits++) {
        float value = fp8_to_float((uint8_t)bits), next = fp8_to_float((uint8_t)(bits + 1));
        float halfway = value + (next - value) / 2.0f;
        int even = bits % 2 == 0 ? bits : bits + 1;
        assert_int_equal(fp8_from_float(halfway), even);
        assert_int_equal(fp8_from_float(-halfway), 0x80 | even);
        assert_int_equal(fp8_from_float(nextafterf(halfway, 0.0f)), bits);
        assert_int_equal(fp8_from_float(nextafterf(halfway, INFINITY)), bits + 1);
    }
    assert_int_equal(fp8_from_float(1e30f), 0x7e);
    assert_int_equal(fp8_from_float(-INFINITY), 0xfe);
    assert_int_equal(fp8_from_float(1e-40f), 0);
    assert_int_equal(fp8_from_float(NAN) & 0x7f, 0x7f);
}

/* Of one element whose group has `scale`: half a step. */
static double error_bound(enum kv_dtype dtype, double x, double scale)
{
    switch (dtype) {
    case KV_DTYPE_F32:
        return 0.0;
    case KV_DTYPE_F16:
        return fmax(fabs(x) * 0x1p-11, 0x1p-25);
    case KV_DTYPE_BF16:
        return fmax(fabs(x) * 0x1p-8, 0x1p-134);
    case KV_DTYPE_INT8:
        return scale * 0.5;
    default:
        return fmax(fabs(x) * 0x1p-4, scale * 0x1p-10);
    }
}

/* Catches scales that are too small, so that the largest elements are cut, or too large, so that
 * bits are lost, groups with each other's scales, and sizes for which a scale fails: each element
 * is off by half a step of its group at most. */
static void test_bounds(void **state)
{
    (void)state;
    static const float sizes[] = {1.0f, 300.0f, 1e-3f, 1e-20f, 1e-32f, 1e30f};
    uint64_t random = 1;
    for (int dtype = 0; dtype < KV_DTYPE_COUNT; dtype++) {
        for (int round = 0; round < 600; round++) {
            float x[MAX_HEAD_DIM], found[MAX_HEAD_DIM], size = sizes[round % 6];
            struct stored_row stored;
            struct kv_row row = clear_row(&stored);
            if (dtype == KV_DTYPE_F16 && size > 300.0f) {
                continue; /* beyond its range */
            }
            for (int i = 0; i < MAX_HEAD_DIM; i++) {
                /* Groups of very different sizes side by side, some of one element alone. */
                float group_size = i < 32 ? size : i < 64 ? size * 0x1p-6f : size * 0.25f;
                bool is_single = round % 4 == 3 && i % 32 != round % 32;
                x[i] = is_single ? 0.0f : next_random(&random) * group_size;
            }
            ref_kv_store((enum kv_dtype)dtype, x, MAX_HEAD_DIM, row);
            ref_kv_load((enum kv_dtype)dtype, row, MAX_HEAD_DIM, found);
            for (int i = 0; i < MAX_HEAD_DIM; i++) {
                double largest = 0.0;
                for (int j = i / 32 * 32; j < MAX_HEAD_DIM && j < i / 32 * 32 + 32; j++) {
                    largest = fmax(largest, fabs((double)x[j]));
                }
                /* The scale itself is rounded, and fp8's is at most twice the smallest. */
                double scale = dtype == KV_DTYPE_INT8 ? largest / 127.0 : 2.0 * largest / 448.0;
                double bound =
                    error_bound((enum kv_dtype)dtype, x[i], scale * (1.0 + 0x1p-8)) + 0x1p-140;
                if (!(fabs((double)found[i] - x[i]) <= bound)) {
                    fail_msg("%s, element %d: %.9g became %.9g, allowed is %.3g",
                             kv_dtype_name((enum kv_dtype)dtype), i, (double)x[i], (double)found[i],
                             bound);
                }
            }
        }
    }
}

/* Catches a NaN or infinity that becomes a number, and one that spoils another group; zeros, and
 * elements too small for any scale, that do not become zeros. */
static void test_special(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int dtype = KV_DTYPE_INT8; dtype < KV_DTYPE_COUNT; dtype++) {
        float x[MAX_HEAD_DIM], found[MAX_HEAD_DIM];
        struct stored_row stored;
        struct kv_row row = clear_row(&stored);
        for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++) {
            for (int i = 0; i < MAX_HEAD_DIM; i++) {
                x[i] = i == 40 ? bad[k] : 1.0f;
            }
            ref_kv_store((enum kv_dtype)dtype, x, MAX_HEAD_DIM, row);
            ref_kv_load((enum kv_dtype)dtype, row, MAX_HEAD_DIM, found);
            for (int i = 0; i < MAX_HEAD_DIM; i++) {
                bool is_spoilt = i >= 32 && i < 64;
                assert_true(is_spoilt ? isnan(found[i]) : fabsf(found[i] - 1.0f) < 0.01f);
            }
        }
        for (int i = 0; i < MAX_HEAD_DIM; i++) {
            x[i] = i < 32 ? 0.0f : 1e-44f;
        }
        ref_kv_store((enum kv_dtype)dtype, x, MAX_HEAD_DIM, row);
        ref_kv_load((enum kv_dtype)dtype, row, MAX_HEAD_DIM, found);
        for (int i = 0; i < MAX_HEAD_DIM; i++) {
            assert_true(found[i] == 0.0f);
        }
    }
}

/* Through rope_kv with no rotation: what a path stores for one token at one slot. */
static void store_on_path(const struct cpu_kernels *kernels, enum kv_dtype dtype, const float *x,
                          int32_t head_dim, unsigned char *blocks, size_t block_bytes)
{
    float qkv[3 * MAX_HEAD_DIM], cos_sin[MAX_HEAD_DIM];
    const int32_t position = 0, slot = 1;
    struct rope_kv_params params = {.qkv = qkv,
                                    .cos_sin = cos_sin,
                                    .positions = &position,
                                    .slot_mapping = &slot,
                                    .kv = {.blocks = blocks,
                                           .block_bytes = block_bytes,
                                           .dtype = dtype,
                                           .num_layers = 1,
                                           .num_kv_heads = 1,
                                           .block_size = 3,
                                           .head_dim = head_dim},
                                    .num_tokens = 1,
                                    .num_heads = 1};
    for (int32_t i = 0; i < head_dim; i++) {
        qkv[i] = 0.0f;
        qkv[head_dim + i] = qkv[2 * head_dim + i] = x[i];
        cos_sin[i] = i < head_dim / 2 ? 1.0f : 0.0f;
    }
    kernels->rope_kv(&params, 0, 1);
}

/* Catches a path whose stored bits differ from the reference's, in any type, for any length of a
 * row and of its last group, or that writes beyond the slot: whole blocks are compared. */
static void test_store_paths(void **state)
{
    (void)state;
    static const float sizes[] = {1.0f, 1e4f, 1e-3f, 1e-36f, 1e-41f, 3e38f};
    struct cpu_kernels ref;
    uint64_t random = 2;
    cpu_kernels_select(0, &ref);
    for (int path = 1; path < CPU_NUM_FP32_PATHS; path++) {
        struct cpu_kernels kernels;
        if (cpu_features_detect(cpu_paths[path].features) != cpu_paths[path].features) {
            continue;
        }
        cpu_kernels_select(cpu_paths[path].features, &kernels);
        for (int32_t i = 0; i < KV_DTYPE_COUNT * MAX_HEAD_DIM / 2 * 24; i++) {
            enum kv_dtype dtype = (enum kv_dtype)(i % KV_DTYPE_COUNT);
            int32_t head_dim = i / KV_DTYPE_COUNT % (MAX_HEAD_DIM / 2) * 2 + 2;
            int32_t round = i / KV_DTYPE_COUNT / (MAX_HEAD_DIM / 2);
            size_t block_bytes = 2 * 3 * kv_dtype_row_bytes(dtype, head_dim);
            float x[MAX_HEAD_DIM];
            _Alignas(4) unsigned char expected[6 * MAX_HEAD_DIM * sizeof(float)];
            _Alignas(4) unsigned char found[6 * MAX_HEAD_DIM * sizeof(float)];
            for (int32_t j = 0; j < head_dim; j++) {
                x[j] = next_random(&random) * sizes[round % 6];
            }
            x[head_dim - 1] = round >= 18 && round < 23 ? INFINITY : x[head_dim - 1];
            memset(expected, CANARY, sizeof(expected));
            memset(found, CANARY, sizeof(found));
            store_on_path(&ref, dtype, x, head_dim, expected, block_bytes);
            store_on_path(&kernels, dtype, x, head_dim, found, block_bytes);
            if (memcmp(expected, found, sizeof(expected)) != 0) {
                fail_msg("path %s, %s, head_dim %d, size %g: other bytes than the reference's",
                         kernels.name, kv_dtype_name(dtype), (int)head_dim,
                         (double)sizes[round % 6]);
            }
        }
    }
}

int run_kv_dtype_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_every_value), cmocka_unit_test(test_fp8_from_float),
        cmocka_unit_test(test_bounds),          cmocka_unit_test(test_special),
        cmocka_unit_test(test_store_paths),
    };
    return cmocka_run_group_tests_name("kv_dtype", tests, NULL, NULL);
}
