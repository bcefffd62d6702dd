/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/gemm_launch.h"

#include <string.h>

#include "ops/cuda/kernels/gemm_mma_params.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

/* Addresses alone matter: nothing is read. */
#define A_BASE 0x10000000
#define W_BASE 0x20000000
#define D_BASE 0x60000000
#define RANGE_BYTES 0x0f000000 /* with unknown memory behind it */

static const void *at(uint64_t address)
{
    return (const void *)(uintptr_t)address;
}

static struct imbrex_device *open_fake(void)
{
    struct imbrex_device *device = NULL;
    struct driver driver;
    fake_reset();
    fake_add_range(at(A_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(W_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(D_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &device, NULL), IMBREX_STATUS_OK);
    return device;
}

/* [gate; up] of the 0.5B model, 256 tokens. */
static struct imbrex_gemm_swiglu_params swiglu_params(void)
{
    return (struct imbrex_gemm_swiglu_params){
        .a = at(A_BASE),
        .gate = at(W_BASE),
        .up = at(W_BASE + 4864 * 896 * 2),
        .d = (void *)at(D_BASE),
        .num_tokens = 256,
        .hidden_size = 896,
        .intermediate_size = 4864,
    };
}

static struct imbrex_gemm_params gemm_params(void)
{
    return (struct imbrex_gemm_params){
        .a = at(A_BASE),
        .b = at(W_BASE),
        .d = (void *)at(D_BASE),
        .num_tokens = 256,
        .in_features = 4864,
        .out_features = 896,
    };
}

static void refuse_swiglu(struct imbrex_device *device,
                          const struct imbrex_gemm_swiglu_params *params, enum imbrex_status status,
                          const char *words)
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

/* Catches each rule of the arguments that is not looked at, or is not named when it is broken. */
static void test_broken_rules_are_named(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params;
    const enum imbrex_status invalid = IMBREX_STATUS_INVALID_ARGUMENT;

#define REFUSE(change, words)                           \
    do {                                                \
        params = swiglu_params();                       \
        change;                                         \
        refuse_swiglu(device, &params, invalid, words); \
    } while (0)
    REFUSE(params.num_tokens = -1, "num_tokens");
    REFUSE(params.hidden_size = 0, "hidden_size");
    REFUSE(params.intermediate_size = 0, "intermediate_size");
    REFUSE(params.a = NULL, "gemm_swiglu: a: expected an address");
    REFUSE(params.gate = NULL, "gemm_swiglu: gate");
    REFUSE(params.up = NULL, "gemm_swiglu: up");
    REFUSE(params.d = NULL, "gemm_swiglu: d");
    REFUSE(params.a = at(A_BASE + 8), "gemm_swiglu: a: expected an address that is a multiple");
    REFUSE(params.up = at(W_BASE + 4864 * 896 * 2 + 2), "gemm_swiglu: up");
    REFUSE(params.d = (void *)at(D_BASE + 4), "gemm_swiglu: d");
    REFUSE(params.a_stride = 888, "at least its 896 columns");
    REFUSE(params.gate_stride = 900, "multiple of 8 elements");
    REFUSE(params.d_stride = 4866, "multiple of 8 elements");
    /* Rows that follow each other without a gap break the same rule. */
    REFUSE(params.hidden_size = 892, "multiple of 8 elements");
    REFUSE(params.d = (void *)at(A_BASE + 1024), "d: expected memory of its own");
    REFUSE(params.d = (void *)at(W_BASE), "overlapping gemm_swiglu: gate");
    REFUSE(params.a = at(0x1000), "does not know");
    REFUSE(params.a = at(A_BASE + RANGE_BYTES - 1024), "last byte");
    REFUSE(params.d = (void *)at(D_BASE + RANGE_BYTES - 1024), "last byte");
#undef REFUSE
    imbrex_device_close(device);
}

/* Catches a limit of TMA that reaches the driver, which names no argument. */
static void test_stride_beyond_tma(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    params.num_tokens = 1;
    params.a_stride = INT64_C(1) << 39;
    refuse_swiglu(device, &params, IMBREX_STATUS_UNSUPPORTED, "2^40");
    imbrex_device_close(device);
}

/* Catches memory or a stream of another GPU being used. */
static void test_other_device_is_refused(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    struct imbrex_error err = {0};
    static int stream;

    fake.ranges[0].device_idx = 1;
    refuse_swiglu(device, &params, IMBREX_STATUS_INVALID_ARGUMENT, "on device 1");
    /* The host's registered memory is everyone's. */
    fake.ranges[0].memory_type = CU_MEMORYTYPE_HOST;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);

    fake.stream_device = 1;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, &stream, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "stream"));
    fake.stream_device = 0;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, &stream, &err), IMBREX_STATUS_OK);
    assert_ptr_equal(fake.config.hStream, &stream);
    /* To ask a stream that is being captured for its device ends the capture. */
    fake.is_capturing = true;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, &stream, &err), IMBREX_STATUS_OK);
    imbrex_device_close(device);
}

/* Catches an empty batch that is launched (a grid of 0 blocks is an error) or whose addresses,
 * which may be anything, are looked at. */
static void test_no_tokens(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params swiglu = swiglu_params();
    struct imbrex_gemm_params gemm = gemm_params();
    swiglu.num_tokens = gemm.num_tokens = 0;
    swiglu.a = swiglu.d = NULL;
    gemm.a = gemm.d = NULL;
    assert_int_equal(imbrex_gemm_swiglu(device, &swiglu, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_gemm(device, &gemm, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_launches, 0);
    imbrex_device_close(device);
}

/* Catches gate and up changing places: where up has the lower address the kernel must be told. */
static void test_weight_orders(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    const uint64_t distance = 4864 * 896 * 2;

    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_non_null(strstr(fake.kernel, "_pair_"));
    assert_int_equal(fake.params.up_first, 0);
    assert_int_equal(fake.params.b.opaque[0], W_BASE);
    assert_int_equal(fake.params.b.opaque[1], 4);
    assert_int_equal(fake.params.b.opaque[3], 8);
    assert_int_equal(fake.params.b.opaque[5], 4864 / 8);
    assert_int_equal(fake.params.b.opaque[11], distance);

    params.up = at(W_BASE);
    params.gate = at(W_BASE + distance);
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.params.up_first, 1);
    assert_int_equal(fake.params.b.opaque[0], W_BASE);
    assert_int_equal(fake.params.b.opaque[11], distance);

    /* Two matrices anywhere are one view too, as long as their rows are alike. */
    params.up = at(W_BASE + 5 * distance);
    params.gate = at(W_BASE);
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.params.up_first, 0);
    assert_int_equal(fake.params.b.opaque[11], 5 * distance);

    params.up_stride = 904;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_non_null(strstr(fake.kernel, "_split_"));
    assert_int_equal(fake.params.b.opaque[0], W_BASE);
    assert_int_equal(fake.params.up.opaque[0], W_BASE + 5 * distance);
    assert_int_equal(fake.params.up.opaque[10], 904 * 2);

    params = swiglu_params();
    params.intermediate_size = 4860;
    params.d_stride = 4864;
    refuse_swiglu(device, &params, IMBREX_STATUS_UNSUPPORTED, "multiple of 8 as n");
    imbrex_device_close(device);
}

/* Catches a launch that does not match its kernel: grid, cluster, shared memory, boxes. */
static void test_launch_of_each_plan(void **state)
{
    (void)state;
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}};
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    struct imbrex_kernel_shape shape = {
        .op = IMBREX_KERNEL_OP_GEMM_SWIGLU, .m = 256, .n = 4864, .k = 896};

    for (int32_t i = 0; i < imbrex_kernel_num_variants(IMBREX_KERNEL_OP_GEMM_SWIGLU); i++) {
        struct imbrex_kernel_variant variant;
        assert_int_equal(
            imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM_SWIGLU, i, &variant, NULL),
            IMBREX_STATUS_OK);
        if (variant.is_portable || variant.is_general) {
            continue;
        }
        for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
            int32_t cluster_m = clusters[j][0], cluster_n = clusters[j][1];
            struct imbrex_kernel_plan plan = {
                .variant_idx = i, .cluster_m = cluster_m, .cluster_n = cluster_n, .group_m = 3};
            bool is_other = variant.is_split || variant.is_general;
            enum imbrex_status expected = is_other ? IMBREX_STATUS_UNSUPPORTED : IMBREX_STATUS_OK;
            assert_int_equal(imbrex_kernel_check(device, &shape, &plan, NULL), expected);
            assert_int_equal(imbrex_gemm_swiglu(device, &params, &plan, NULL, NULL), expected);
            if (is_other) {
                continue;
            }
            int64_t size = cluster_m * cluster_n, columns = variant.block_n / 2;
            assert_string_equal(fake.kernel, variant.name);
            assert_int_equal(fake.config.blockDimX, GEMM_TILE_THREADS);
            assert_int_equal(fake.config.sharedMemBytes, variant.shared_bytes);
            assert_int_equal(fake.attributes[0].value.clusterDim.x, size);
            assert_int_equal(fake.config.gridDimX % size, 0);
            assert_true(fake.config.gridDimX <= 132);
            assert_int_equal(fake.params.num_k_blocks, 14);
            assert_int_equal(fake.params.group_m, 3);
            assert_int_equal(fake.params.cluster_m, cluster_m);
            assert_int_equal(fake.params.cluster_n, cluster_n);
            assert_int_equal(fake.params.num_blocks_m, (256 + variant.block_m * cluster_m - 1) /
                                                           (variant.block_m * cluster_m));
            assert_int_equal(fake.params.num_blocks_n,
                             (4864 + columns * cluster_n - 1) / (columns * cluster_n));
            assert_int_equal(fake.params.a.opaque[7], variant.block_m / cluster_n);
            int64_t share = (variant.block_n / 16 + cluster_m - 1) / cluster_m;
            if (strcmp(variant.schedule, "gate_first") == 0) {
                /* Gate and up through a map each, whatever their layout. */
                assert_int_equal(fake.params.b.opaque[0], W_BASE);
                assert_int_equal(fake.params.b.opaque[7], 8 * share);
                assert_int_equal(fake.params.up.opaque[0], W_BASE + 4864 * 896 * 2);
                assert_int_equal(fake.params.up.opaque[7], 8 * share);
            } else {
                assert_int_equal(fake.params.b.opaque[9], share);
            }
            /* Whole boxes of 64 columns, and the rest of a tile. */
            assert_int_equal(fake.params.d.opaque[6], columns >= 64 ? 64 : 0);
            assert_int_equal(fake.params.d_rest.opaque[6], columns % 64);
            assert_int_equal(fake.params.d_rest_narrow.opaque[6], 0);
            assert_true(fake.params.num_wide >= fake.params.num_blocks_n * cluster_n);
            /* As many tiles as 608 pieces of 8 columns make that are nearly all narrow. */
            plan.num_tiles_n = 608 / (variant.block_n / 16 - 1);
            assert_int_equal(imbrex_gemm_swiglu(device, &params, &plan, NULL, NULL),
                             IMBREX_STATUS_OK);
            assert_int_equal(fake.params.num_blocks_n,
                             (plan.num_tiles_n + cluster_n - 1) / cluster_n);
            int32_t num_wide = 608 - plan.num_tiles_n * (variant.block_n / 16 - 1);
            if (num_wide < plan.num_tiles_n) {
                assert_int_equal(fake.params.num_wide, num_wide);
                assert_int_equal(fake.params.d_rest_narrow.opaque[6], (columns - 8) % 64);
            }
        }
    }
    imbrex_device_close(device);
    assert_int_equal(fake.num_libraries, 0);
}

/* Catches a kernel that is loaded, checked or described again at every launch. */
static void test_second_launch_calls_little(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();

    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_loads, 1);
    int num_encoded = fake.num_encoded;
    fake.num_calls = 0;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_loads, 1);
    assert_int_equal(fake.num_encoded, num_encoded);
    /* Push, launch, pop. */
    assert_int_equal(fake.num_calls, 3);
    assert_int_equal(fake.capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    imbrex_device_close(device);
}

/* Catches host code and kernels of different builds meeting. */
static void test_params_of_another_size(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_params params = gemm_params();
    struct imbrex_error err = {0};
    fake.params_bytes -= 128;
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, &err), IMBREX_STATUS_INTERNAL);
    assert_non_null(strstr(err.message, "params"));
    fake.params_bytes += 128;
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, &err), IMBREX_STATUS_OK);
    imbrex_device_close(device);
}

/* Catches the device option that is not obeyed, and weights that are read early although nobody
 * promised that they are settled. */
static void test_overlap_of_launches_is_an_option(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct imbrex_device *device = NULL;
        struct imbrex_device_options options = imbrex_device_options_default();
        struct imbrex_gemm_params params = gemm_params();
        fake_reset();
        fake_add_range(at(A_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
        fake_add_range(at(W_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
        fake_add_range(at(D_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
        struct driver driver = fake_table();
        options.overlap_launches = i == 1;
        params.weights_settled = true;
        assert_int_equal(cuda_device_create(&driver, 0, &options, &device, NULL), IMBREX_STATUS_OK);
        assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
        assert_int_equal(fake.config.numAttrs, 1 + i);
        assert_int_equal(fake.params.weights_settled, i);
        params.weights_settled = false;
        assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
        assert_int_equal(fake.params.weights_settled, 0);
        imbrex_device_close(device);
    }
}

/* Catches column ranges of one wider matrix, which share no element, being taken for overlapping,
 * and ranges that do overlap being let through. */
static void test_columns_of_one_matrix(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_params params = gemm_params();
    params.in_features = 512;
    params.out_features = 512;
    params.a_stride = params.d_stride = 1024;
    params.d = (void *)at(A_BASE + 512 * 2);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    params.d = (void *)at(A_BASE + 504 * 2);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    params.a = at(A_BASE + 512 * 2);
    params.d = (void *)at(A_BASE);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    params.d = (void *)at(A_BASE + 8 * 2);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    imbrex_device_close(device);
}

/* Catches a bias that cannot be read. */
static void test_bias(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_params params = gemm_params();
    struct imbrex_error err = {0};
    params.bias = at(W_BASE + RANGE_BYTES - 896 * 4);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, &err), IMBREX_STATUS_OK);
    assert_ptr_equal(fake.params.bias, params.bias);
    assert_int_equal(fake.params.num_columns, 896);
    params.bias = at(W_BASE + RANGE_BYTES - 895 * 4);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "bias"));
    params.bias = at(W_BASE + 2);
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    imbrex_device_close(device);
}

/* A life: open, both ops, close. The first failure, or OK. */
static enum imbrex_status live(struct imbrex_error *err)
{
    struct driver driver = fake_table();
    struct imbrex_device *device = NULL;
    struct imbrex_gemm_swiglu_params swiglu = swiglu_params();
    struct imbrex_gemm_params gemm = gemm_params();
    static int stream;
    enum imbrex_status first, second, third;

    TRY(driver_init(&driver, err));
    TRY(cuda_device_create(&driver, 0, NULL, &device, err));
    first = imbrex_gemm_swiglu(device, &swiglu, NULL, &stream, err);
    second = imbrex_gemm(device, &gemm, NULL, NULL, first == IMBREX_STATUS_OK ? err : NULL);
    /* What failed once works afterwards. */
    fake.fail_at = fake.num_calls >= fake.fail_at ? 0 : fake.fail_at;
    third = first != IMBREX_STATUS_OK    ? imbrex_gemm_swiglu(device, &swiglu, NULL, &stream, NULL)
            : second != IMBREX_STATUS_OK ? imbrex_gemm(device, &gemm, NULL, NULL, NULL)
                                         : IMBREX_STATUS_OK;
    assert_int_equal(third, IMBREX_STATUS_OK);
    imbrex_device_close(device);
    return first != IMBREX_STATUS_OK ? first : second;
}

static void reset_life(void)
{
    fake_reset();
    fake_add_range(at(A_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(W_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(D_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
}

/* Catches any failure of the driver that is overlooked, leaks a context or an image, leaves the
 * thread in another context or capture mode, or makes the device unusable. */
static void test_each_call_fails_in_turn(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    reset_life();
    assert_int_equal(live(&err), IMBREX_STATUS_OK);
    int num_calls = fake.num_calls;
    /* Opening and two launches, none of them for free. */
    assert_true(num_calls > 30);

    for (int fail_at = 1; fail_at <= num_calls; fail_at++) {
        err = (struct imbrex_error){0};
        reset_life();
        fake.fail_at = fail_at;
        enum imbrex_status status = live(&err);
        assert_non_null(fake.failed_call);
        bool is_closing = strstr(fake.failed_call, "unload") != NULL ||
                          strstr(fake.failed_call, "release") != NULL;
        assert_int_equal(status, is_closing ? IMBREX_STATUS_OK : IMBREX_STATUS_DEVICE);
        if (!is_closing) {
            assert_int_equal(err.status, IMBREX_STATUS_DEVICE);
            assert_non_null(strstr(err.message, "CUDA_ERROR_LAUNCH_FAILED"));
        }
        assert_int_equal(fake.num_retained, 0);
        assert_int_equal(fake.num_libraries, 0);
        assert_int_equal(fake.num_pushed, 0);
        if (strstr(fake.failed_call, "capture_mode") == NULL) {
            assert_int_equal(fake.capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
        }
    }
}

/* Catches memory that is out on the GPU being reported as a broken one. */
static void test_out_of_memory_of_the_gpu(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    reset_life();
    fake.fail_result = CUDA_ERROR_OUT_OF_MEMORY;
    fake.fail_at = 1;
    assert_int_equal(live(&err), IMBREX_STATUS_OUT_OF_MEMORY);
    assert_int_equal(err.status, IMBREX_STATUS_OUT_OF_MEMORY);
}

/* GPUs that have no kernels of their own, by their data sheets. */
static const struct {
    int major, minor, num_sms, max_shared_bytes;
} portable_gpus[] = {{8, 0, 108, 166912},  {8, 6, 84, 101376},   {8, 9, 128, 101376},
                     {10, 0, 148, 232448}, {12, 0, 170, 101376}, {9, 0, 132, 232448}};
enum { NUM_PORTABLE_GPUS = sizeof(portable_gpus) / sizeof(portable_gpus[0]) };

/* The last is a Hopper GPU that is told to do as the others. */
static struct imbrex_device *open_portable(int gpu_idx)
{
    struct imbrex_device *device = NULL;
    struct imbrex_device_options options = imbrex_device_options_default();
    fake_reset();
    fake.compute_major = portable_gpus[gpu_idx].major;
    fake.compute_minor = portable_gpus[gpu_idx].minor;
    fake.num_sms = portable_gpus[gpu_idx].num_sms;
    fake.max_shared_bytes = portable_gpus[gpu_idx].max_shared_bytes;
    fake_add_range(at(A_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(W_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    fake_add_range(at(D_BASE), RANGE_BYTES, CU_MEMORYTYPE_DEVICE, 0);
    options.portable_kernels = gpu_idx == NUM_PORTABLE_GPUS - 1;
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, &options, &device, NULL), IMBREX_STATUS_OK);
    return device;
}

static const struct gemm_mma_params *portable_params(void)
{
    return (const struct gemm_mma_params *)(const void *)&fake.params;
}

/* Catches a GPU before or after Hopper that is given a kernel of Hopper's, more shared memory than
 * it has, a cluster, or a grid that leaves tiles out; and a fused launch whose gate is its up. */
static void test_portable_launches(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 16, 17, 100, 256, 3000};
    for (int gpu_idx = 0; gpu_idx < NUM_PORTABLE_GPUS; gpu_idx++) {
        struct imbrex_device *device = open_portable(gpu_idx);
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            struct imbrex_gemm_swiglu_params params = swiglu_params();
            struct imbrex_kernel_shape shape = {
                .op = IMBREX_KERNEL_OP_GEMM_SWIGLU, .m = rows[i], .n = 4861, .k = 896};
            struct imbrex_kernel_variant variant;
            struct imbrex_kernel_plan plan;
            /* No copy engine: any width of D. */
            params.num_tokens = rows[i];
            params.intermediate_size = 4861;
            params.d_stride = 4864;
            params.weights_settled = true;
            assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL),
                             IMBREX_STATUS_OK);
            assert_int_equal(
                imbrex_kernel_choose(device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, NULL),
                IMBREX_STATUS_OK);
            assert_int_equal(imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM_SWIGLU,
                                                            plan.variant_idx, &variant, NULL),
                             IMBREX_STATUS_OK);
            assert_true(variant.is_portable && !variant.is_split);
            assert_string_equal(variant.schedule, "multistage");
            assert_string_equal(fake.kernel, variant.name);
            assert_int_equal(fake.config.numAttrs, 0);
            assert_int_equal(fake.config.sharedMemBytes, variant.shared_bytes);
            assert_true(variant.shared_bytes <= portable_gpus[gpu_idx].max_shared_bytes);
            assert_int_equal(fake.config.gridDimX, ((rows[i] - 1) / variant.block_m + 1) *
                                                       ((4861 - 1) / (variant.block_n / 2) + 1));
            assert_ptr_equal(portable_params()->b, params.gate);
            assert_ptr_equal(portable_params()->up, params.up);
            assert_int_equal(portable_params()->up_stride, 896);
            assert_int_equal(portable_params()->d_stride, 4864);
            assert_int_equal(portable_params()->m, rows[i]);
            assert_int_equal(portable_params()->n, 4861);
            assert_int_equal(portable_params()->k, 896);
        }
        imbrex_device_close(device);
    }
}

/* Catches biases, activations or rows that take turns, which a portable launch leaves out. */
static void test_portable_semantics(void **state)
{
    (void)state;
    struct imbrex_device *device = open_portable(2);
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    params.up = at(W_BASE + 8 * 896 * 2);
    params.interleave_rows = 8;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_null(strstr(fake.kernel, "_general_"));
    assert_int_equal(portable_params()->row_group_step, 16);
    assert_int_equal(portable_params()->b_stride, 896);
    params.up = at(W_BASE + 896 * 2);
    params.interleave_rows = 1;
    params.gate_bias = at(A_BASE + 0x01000000);
    params.up_bias = params.gate_bias + 1;
    params.interleave_biases = 1;
    params.gating.alpha = 1.702f;
    params.gating.limit = 7.0f;
    params.gating.up_offset = 1.0f;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_non_null(strstr(fake.kernel, "_sm80_general_"));
    assert_int_equal(portable_params()->row_group_step, 8);
    assert_int_equal(portable_params()->b_stride, 2 * 896);
    assert_int_equal(portable_params()->up_stride, 2 * 896);
    assert_ptr_equal(portable_params()->bias, params.gate_bias);
    assert_ptr_equal(portable_params()->up_bias, params.up_bias);
    assert_int_equal(portable_params()->bias_step, 2);
    assert_int_equal(portable_params()->bias_group_step, 16);
    assert_true(portable_params()->gating.alpha == 1.702f);
    assert_true(portable_params()->gating.limit == 7.0f);
    assert_true(portable_params()->gating.up_offset == 1.0f);
    imbrex_device_close(device);
}

/* Catches plans that only Hopper can launch, without the reason; memory that is not looked at; and
 * a second launch that looks at it again. */
static void test_portable_rules(void **state)
{
    (void)state;
    struct imbrex_device *device = open_portable(0);
    struct imbrex_error err = {.message = ""};
    struct imbrex_gemm_params params = gemm_params();
    struct imbrex_kernel_shape shape = {.op = IMBREX_KERNEL_OP_GEMM, .m = 256, .n = 896, .k = 4864};
    struct imbrex_kernel_plan plan = {
        .variant_idx = 0, .cluster_m = 1, .cluster_n = 1, .group_m = 1};
    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "needs compute capability 9.0"));
    assert_int_equal(imbrex_kernel_choose(device, &shape, 0, &plan, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "needs compute capability 9.0"));

    assert_int_equal(imbrex_kernel_choose(device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, NULL),
                     IMBREX_STATUS_OK);
    plan.cluster_m = 2;
    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "clusters"));
    plan.cluster_m = 1;
    plan.num_tiles_n = 14;
    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, &err), IMBREX_STATUS_UNSUPPORTED);
    plan.num_tiles_n = 0;

    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, NULL), IMBREX_STATUS_OK);
    int num_calls = fake.num_calls;
    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_calls, num_calls + 3); /* enter, launch, leave */
    assert_int_equal(fake.num_encoded, 0);

    params.d = (void *)at(D_BASE + RANGE_BYTES - 64);
    assert_int_equal(imbrex_gemm(device, &params, &plan, NULL, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "gemm: d: expected memory of the GPU, found its last"));
    imbrex_device_close(device);
}

/* Catches portable kernels chosen on a GPU that has faster ones, and refused where they are asked
 * for by number. */
static void test_portable_on_hopper(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct imbrex_gemm_swiglu_params params = swiglu_params();
    int num_portable = 0;
    for (int32_t i = 0; i < imbrex_kernel_num_variants(IMBREX_KERNEL_OP_GEMM_SWIGLU); i++) {
        struct imbrex_kernel_variant variant;
        struct imbrex_kernel_plan plan = {
            .variant_idx = i, .cluster_m = 1, .cluster_n = 1, .group_m = 3};
        assert_int_equal(
            imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM_SWIGLU, i, &variant, NULL),
            IMBREX_STATUS_OK);
        if (variant.is_portable && !variant.is_general) {
            num_portable++;
            assert_int_equal(imbrex_gemm_swiglu(device, &params, &plan, NULL, NULL),
                             IMBREX_STATUS_OK);
            assert_string_equal(fake.kernel, variant.name);
            assert_int_equal(portable_params()->group_m, 3);
        }
    }
    assert_true(num_portable > 0);
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_null(strstr(fake.kernel, "_sm80_"));
    /* What was chosen for the one kind is not taken for the other. */
    device->is_portable = true;
    assert_int_equal(imbrex_gemm_swiglu(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_non_null(strstr(fake.kernel, "_sm80_"));
    imbrex_device_close(device);
}

int run_gemm_launch_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_broken_rules_are_named),
        cmocka_unit_test(test_stride_beyond_tma),
        cmocka_unit_test(test_other_device_is_refused),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_weight_orders),
        cmocka_unit_test(test_launch_of_each_plan),
        cmocka_unit_test(test_second_launch_calls_little),
        cmocka_unit_test(test_params_of_another_size),
        cmocka_unit_test(test_overlap_of_launches_is_an_option),
        cmocka_unit_test(test_columns_of_one_matrix),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_portable_launches),
        cmocka_unit_test(test_portable_semantics),
        cmocka_unit_test(test_portable_rules),
        cmocka_unit_test(test_portable_on_hopper),
        cmocka_unit_test(test_each_call_fails_in_turn),
        cmocka_unit_test(test_out_of_memory_of_the_gpu),
    };
    return cmocka_run_group_tests_name("gemm_launch", tests, NULL, NULL);
}
