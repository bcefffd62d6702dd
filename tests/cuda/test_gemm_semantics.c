/* SPDX-License-Identifier: Apache-2.0 */
/* What imbrex_gemm_swiglu is told beside SwiGLU, and the activation's own kernel, on the fake
 * driver: rules, views of interleaved weights, which kernel, with which numbers. */
#include <math.h>
#include <string.h>

#include "ops/cuda/cuda_device.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

/* Addresses alone matter: nothing is read. */
#define A_BASE 0x10000000
#define W_BASE 0x20000000
#define D_BASE 0x60000000
#define RANGE_BYTES 0x0f000000 /* with unknown memory behind it */
#define BIASES (W_BASE + 0x0e000000)
#define N 4864
#define K 896
#define ROW_BYTES (K * 2)

static const void *at(uint64_t address)
{
    return (const void *)(uintptr_t)address;
}

static struct imbrex_device *open_fake(void)
{
    struct imbrex_device *device = NULL;
    fake_reset();
    fake_add_range(at(A_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(W_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(D_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &device, NULL), IMBREX_STATUS_OK);
    return device;
}

static struct imbrex_gemm_swiglu_params swiglu_params(void)
{
    return (struct imbrex_gemm_swiglu_params){
        .a = at(A_BASE),
        .gate = at(W_BASE),
        .up = at(W_BASE + N * ROW_BYTES),
        .d = (void *)at(D_BASE),
        .num_tokens = 256,
        .hidden_size = K,
        .intermediate_size = N,
    };
}

static void launch(struct imbrex_device *device, const struct imbrex_gemm_swiglu_params *params)
{
    struct imbrex_error err = {0};
    if (imbrex_gemm_swiglu(device, params, NULL, NULL, &err) != IMBREX_STATUS_OK) {
        fail_msg("expected a launch, found: %s", err.message);
    }
}

static void refuse(struct imbrex_device *device, const struct imbrex_gemm_swiglu_params *params,
                   enum imbrex_status status, const char *words)
{
    struct imbrex_error err = {0};
    int num_launches = fake.num_launches;
    assert_int_equal(imbrex_gemm_swiglu(device, params, NULL, NULL, &err), status);
    if (strstr(err.message, words) == NULL) {
        fail_msg("expected \"%s\" in: %s", words, err.message);
    }
    assert_int_equal(fake.num_launches, num_launches);
    assert_int_equal(fake.num_pushed, 0);
}

/* Catches a rule of the semantics that is not looked at, or not named when it is broken. */
static void test_broken_rules_are_named(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params;
    const enum imbrex_status invalid = IMBREX_STATUS_INVALID_ARGUMENT;

#define REFUSE(change, words)                    \
    do {                                         \
        params = swiglu_params();                \
        change;                                  \
        refuse(device, &params, invalid, words); \
    } while (0)
#define BY_8 params.interleave_rows = 8, params.up = at(W_BASE + 8 * ROW_BYTES)
    REFUSE(params.interleave_rows = 2, "interleave_rows: expected 0, 1 or 8, found 2");
    REFUSE(params.interleave_biases = -1, "interleave_biases: expected 0, 1 or 8, found -1");
    REFUSE(params.interleave_rows = 1, "1 rows, 1792 bytes, before or behind gate, found 8716288");
    REFUSE((BY_8, params.interleave_rows = 1), "found 14336 bytes");
    REFUSE((BY_8, params.gate_stride = 904), "expected the row stride of gate, 904");
    REFUSE((BY_8, params.gate_stride = params.up_stride = 904), "8 rows, 14464 bytes");
    REFUSE((BY_8, params.intermediate_size = 4860, params.d_stride = N),
           "intermediate_size: expected a multiple of interleave_rows = 8, found 4860");
    REFUSE((BY_8, params.d = (void *)at(W_BASE + (2 * N - 9) * ROW_BYTES)), "overlapping");
    REFUSE((BY_8, params.gate = at(W_BASE + RANGE_BYTES - 4096 * ROW_BYTES),
            params.up = at(W_BASE + RANGE_BYTES - 4088 * ROW_BYTES)),
           "last byte");
    REFUSE(params.gate_bias = at(BIASES + 2), "gate_bias: expected an address");
    REFUSE(params.up_bias = at(BIASES + 1), "up_bias: expected an address");
    REFUSE(params.gate_bias = at(0x1000), "gate_bias: expected memory of the GPU");
    REFUSE(params.up_bias = at(W_BASE + RANGE_BYTES - (N - 1) * 4), "up_bias");
    REFUSE(params.rounding = (enum imbrex_rounding)2, "rounding");
    REFUSE(params.gating.activation = (enum imbrex_activation)4, "activation");
    REFUSE(params.gating.activation = (enum imbrex_activation)(-1), "activation");
    REFUSE(params.gating.alpha = INFINITY, "alpha");
    REFUSE(params.gating.alpha = NAN, "alpha");
    REFUSE((params.gating.activation = IMBREX_ACTIVATION_RELU, params.gating.alpha = 1.702f),
           "alpha: expected a finite number with SiLU and 0 or 1 with other");
    REFUSE(params.gating.limit = -7.0f, "limit: expected 0 (none) or a positive number, found -7");
    REFUSE(params.gating.limit = NAN, "limit");
    REFUSE(params.gating.up_offset = INFINITY, "up_offset");
    /* Of an empty batch too. */
    REFUSE((params.num_tokens = 0, params.gating.limit = -1.0f), "limit");
#undef REFUSE
    params = swiglu_params();
    params.num_tokens = 1;
    params.a = at(D_BASE);
    params.d = (void *)at(A_BASE);
    params.interleave_rows = 8;
    params.gate_stride = params.up_stride = INT64_C(1) << 35;
    params.up = at(W_BASE + (UINT64_C(8) << 36));
    refuse(device, &params, IMBREX_STATUS_UNSUPPORTED, "16 rows in less than 2^40 bytes");
    imbrex_device_close(device);
}

/* Catches rows of interleaved weights that are found in the wrong places: strides of the view, in
 * bytes, are in opaque[10 ..]. */
static void test_interleaved_weights(void **state)
{
    (void)state;
    static const int32_t interleaves[] = {1, 8};
    struct imbrex_device *device = open_fake();
    for (int i = 0; i < 2; i++) {
        for (int up_first = 0; up_first < 2; up_first++) {
            struct imbrex_gemm_swiglu_params params = swiglu_params();
            int32_t interleave = interleaves[i];
            const void *first = at(W_BASE), *second = at(W_BASE + interleave * ROW_BYTES);
            params.interleave_rows = interleave;
            params.gate = up_first ? second : first;
            params.up = up_first ? first : second;
            launch(device, &params);
            /* A layout is no reason for another kernel. */
            assert_non_null(strstr(fake.kernel, "_pair_"));
            assert_int_equal(fake.params.up_first, up_first);
            assert_int_equal(fake.params.b.opaque[0], W_BASE);
            assert_int_equal(fake.params.b.opaque[1], 4);
            assert_int_equal(fake.params.b.opaque[3], 8);
            assert_int_equal(fake.params.b.opaque[4], 2);
            assert_int_equal(fake.params.b.opaque[5], N / 8);
            assert_int_equal(fake.params.b.opaque[10], (interleave == 1 ? 2 : 1) * ROW_BYTES);
            assert_int_equal(fake.params.b.opaque[11], interleave * ROW_BYTES);
            assert_int_equal(fake.params.b.opaque[12], 16 * ROW_BYTES);
        }
    }
    /* The last row ends where the memory does. */
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    params.interleave_rows = 8;
    params.gate = at(W_BASE + RANGE_BYTES - 2 * N * ROW_BYTES);
    params.up = at(W_BASE + RANGE_BYTES - (2 * N - 8) * ROW_BYTES);
    launch(device, &params);
    imbrex_device_close(device);
}

/* Catches a choice of kernel that a semantic is lost on, or one that does without the kernels of
 * SwiGLU alone; and one that is remembered for the other. */
static void test_general_kernels(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params;

#define EXPECT(change, word)                        \
    do {                                            \
        params = swiglu_params();                   \
        change;                                     \
        launch(device, &params);                    \
        assert_non_null(strstr(fake.kernel, word)); \
    } while (0)
    EXPECT(params.gating.alpha = 1.0f, "_pair_");
    EXPECT(params.gating.limit = INFINITY, "_pair_");
    EXPECT(params.interleave_biases = 8, "_pair_");
    EXPECT(params.gate_bias = at(BIASES), "_general_");
    EXPECT(params.up_bias = at(BIASES), "_general_");
    EXPECT(params.gating.activation = IMBREX_ACTIVATION_RELU, "_general_");
    EXPECT(params.gating.alpha = 1.702f, "_general_");
    EXPECT(params.gating.limit = 7.0f, "_general_");
    EXPECT(params.gating.up_offset = 1.0f, "_general_");
    EXPECT(params.rounding = IMBREX_ROUNDING_MATCH_UNFUSED, "_general_");
    EXPECT(params.num_tokens = 256, "_pair_");
    EXPECT(params.up_stride = 904, "_split_");
    EXPECT((params.up_stride = 904, params.gating.limit = 7.0f), "_general_split_");
#undef EXPECT
    imbrex_device_close(device);
}

/* Catches tiles of two widths being asked of kernels that have one: columns would be left out. */
static void test_general_tiles_are_of_one_width(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_kernel_shape shape = {
        .op = IMBREX_KERNEL_OP_GEMM_SWIGLU, .m = 512, .n = 8960, .k = 1536, .is_general = true};
    int num_general = 0;
    for (int32_t i = 0; i < imbrex_kernel_num_variants(shape.op); i++) {
        struct imbrex_kernel_variant variant;
        struct imbrex_kernel_plan plan = {
            .variant_idx = i, .cluster_m = 1, .cluster_n = 1, .group_m = 1};
        struct imbrex_error err = {0};
        assert_int_equal(imbrex_kernel_variant_describe(shape.op, i, &variant, NULL),
                         IMBREX_STATUS_OK);
        shape.is_split = variant.is_split;
        if (!variant.is_general) {
            continue;
        }
        num_general++;
        assert_int_equal(imbrex_kernel_check(device, &shape, &plan, NULL), IMBREX_STATUS_OK);
        plan.num_tiles_n = 8960 / 8 / (variant.block_n / 16 - 1);
        assert_int_equal(imbrex_kernel_check(device, &shape, &plan, &err),
                         IMBREX_STATUS_UNSUPPORTED);
        assert_non_null(strstr(err.message, "one width"));
        assert_int_equal(imbrex_kernel_choose(device, &shape, i, &plan, NULL), IMBREX_STATUS_OK);
        assert_int_equal(plan.num_tiles_n, 0);
    }
    assert_true(num_general > 0);
    imbrex_device_close(device);
}

/* Catches numbers of a gating that reach the kernel as others. */
static void test_gating_of_a_launch(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    const struct gating_params *gating = &fake.params.gating;

    params.gating = (struct imbrex_gating){.alpha = 1.702f, .limit = 7.01f, .up_offset = 1.0f};
    launch(device, &params);
    assert_int_equal(gating->activation, GATING_SILU);
    assert_int_equal(gating->is_unfused, 0);
    assert_true(gating->alpha == 1.702f && gating->limit == 7.01f && gating->up_offset == 1.0f);

    /* A clamp of a bf16 has the nearest bf16 as its result. */
    params.rounding = IMBREX_ROUNDING_MATCH_UNFUSED;
    launch(device, &params);
    assert_int_equal(gating->activation, GATING_SILU_IN_STEPS);
    assert_int_equal(gating->is_unfused, 1);
    assert_true(gating->alpha == 1.702f && gating->limit == 7.0f);

    params.gating = (struct imbrex_gating){.activation = IMBREX_ACTIVATION_GELU_TANH};
    launch(device, &params);
    assert_int_equal(gating->activation, GATING_GELU_TANH);
    assert_true(gating->alpha == 1.0f && isinf(gating->limit) && gating->up_offset == 0.0f);

    params.gating.activation = IMBREX_ACTIVATION_SILU;
    launch(device, &params);
    assert_int_equal(gating->activation, GATING_SILU);

    static const int32_t interleaves[] = {0, 1, 8};
    static const int32_t steps[][2] = {{1, 8}, {2, 16}, {1, 16}};
    for (int i = 0; i < 3; i++) {
        params.gate_bias = at(BIASES);
        params.up_bias = at(BIASES + 4 * N);
        params.interleave_biases = interleaves[i];
        launch(device, &params);
        assert_ptr_equal(fake.params.bias, params.gate_bias);
        assert_ptr_equal(fake.params.up_bias, params.up_bias);
        assert_int_equal(fake.params.bias_step, steps[i][0]);
        assert_int_equal(fake.params.bias_group_step, steps[i][1]);
        /* Value N - 1 is the last of the memory. */
        int64_t last = interleaves[i] == 0 ? N - 1 : interleaves[i] == 1 ? 2 * N - 2 : 2 * N - 9;
        params.up_bias = at(W_BASE + RANGE_BYTES - (uint64_t)(last + 1) * 4);
        launch(device, &params);
        params.up_bias += 1;
        refuse(device, &params, IMBREX_STATUS_INVALID_ARGUMENT, "up_bias");
    }
    imbrex_device_close(device);
}

static struct imbrex_gated_activation_params activation_params(void)
{
    return (struct imbrex_gated_activation_params){
        .gate = at(A_BASE),
        .up = at(A_BASE + N * 2),
        .d = (void *)at(D_BASE),
        .gate_stride = 2 * N,
        .up_stride = 2 * N,
        .num_tokens = 257,
        .intermediate_size = N,
    };
}

/* Catches a grid that leaves columns or rows out, or numbers in other units than the kernel's. */
static void test_activation_launch(void **state)
{
    (void)state;
    static const int32_t widths[] = {8, 16, 256, 4096, 4104, N, 18944};
    struct imbrex_device *device = open_fake();
    struct gated_activation_kernel_params found;
    struct imbrex_gated_activation_params params = activation_params();

    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++) {
        params.intermediate_size = widths[i];
        params.gate_stride = params.up_stride = 2 * 18944;
        assert_int_equal(imbrex_gated_activation(device, &params, NULL, NULL), IMBREX_STATUS_OK);
        memcpy(&found, &fake.params, sizeof(found));
        assert_string_equal(fake.kernel, "gated_activation_bf16");
        assert_ptr_equal(found.gate, params.gate);
        assert_ptr_equal(found.up, params.up);
        assert_ptr_equal(found.d, params.d);
        assert_int_equal(found.gate_stride, 2 * 18944 / 8);
        assert_int_equal(found.d_stride, widths[i] / 8);
        assert_int_equal(found.num_rows, 257);
        assert_int_equal(found.row_pieces, widths[i] / 8);
        assert_true(fake.config.blockDimX <= GATED_ACTIVATION_MAX_THREADS);
        assert_int_equal(fake.config.blockDimX % 32, 0);
        assert_true(fake.config.gridDimX * fake.config.blockDimX >= (unsigned)widths[i] / 8);
        assert_true((fake.config.gridDimX - 1) * fake.config.blockDimX < (unsigned)widths[i] / 8);
        assert_int_equal(fake.config.gridDimY, 129);
    }
    params = activation_params();
    params.num_tokens = 200000;
    params.intermediate_size = 8;
    params.gate_stride = params.up_stride = 16;
    assert_int_equal(imbrex_gated_activation(device, &params, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.config.gridDimY, 65535);
    int num_launches = fake.num_launches;
    params.num_tokens = 0;
    params.gate = NULL;
    assert_int_equal(imbrex_gated_activation(device, &params, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_launches, num_launches);
    imbrex_device_close(device);
}

/* Catches a rule of the activation that is not looked at, or not named when it is broken. */
static void test_activation_rules_are_named(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gated_activation_params params;
    struct imbrex_error err;

#define REFUSE(change, status, words)                                                   \
    do {                                                                                \
        params = activation_params();                                                   \
        change;                                                                         \
        assert_int_equal(imbrex_gated_activation(device, &params, NULL, &err), status); \
        assert_non_null(strstr(err.message, words));                                    \
        assert_int_equal(fake.num_launches, 0);                                         \
        assert_int_equal(fake.num_pushed, 0);                                           \
    } while (0)
    REFUSE(params.num_tokens = -1, IMBREX_STATUS_INVALID_ARGUMENT, "num_tokens");
    REFUSE(params.intermediate_size = 0, IMBREX_STATUS_INVALID_ARGUMENT, "intermediate_size");
    REFUSE(params.intermediate_size = 4860, IMBREX_STATUS_UNSUPPORTED, "multiple of 8");
    REFUSE(params.gate = NULL, IMBREX_STATUS_INVALID_ARGUMENT, "gated_activation: gate");
    REFUSE(params.up = at(A_BASE + 2), IMBREX_STATUS_INVALID_ARGUMENT, "gated_activation: up");
    REFUSE(params.d_stride = 8, IMBREX_STATUS_INVALID_ARGUMENT, "gated_activation: d");
    REFUSE(params.d = (void *)at(A_BASE), IMBREX_STATUS_INVALID_ARGUMENT, "overlapping");
    REFUSE(params.up = at(0x1000), IMBREX_STATUS_INVALID_ARGUMENT, "does not know");
    REFUSE(params.gating.limit = -1.0f, IMBREX_STATUS_INVALID_ARGUMENT, "gated_activation: limit");
    REFUSE(params.rounding = (enum imbrex_rounding)7, IMBREX_STATUS_INVALID_ARGUMENT, "rounding");
    fake.ranges[0].device_idx = 1;
    REFUSE(params.num_tokens = 1, IMBREX_STATUS_INVALID_ARGUMENT, "on device 1");
#undef REFUSE
    imbrex_device_close(device);
}

int run_gemm_semantics_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_broken_rules_are_named),
        cmocka_unit_test(test_interleaved_weights),
        cmocka_unit_test(test_general_kernels),
        cmocka_unit_test(test_general_tiles_are_of_one_width),
        cmocka_unit_test(test_gating_of_a_launch),
        cmocka_unit_test(test_activation_launch),
        cmocka_unit_test(test_activation_rules_are_named),
    };
    return cmocka_run_group_tests_name("gemm_semantics", tests, NULL, NULL);
}
