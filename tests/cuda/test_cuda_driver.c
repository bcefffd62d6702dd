/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/driver.h"

#include <stdio.h>
#include <string.h>

#include "ops/cuda/cuda_device.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

/* Catches a driver that is too old being used until some call fails in it, and a message that does
 * not say which one is needed. */
static void test_old_driver_is_refused(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    fake_reset();
    fake.version = 12090;
    struct driver driver = fake_table();
    assert_int_equal(driver_init(&driver, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "580"));
    assert_non_null(strstr(err.message, "12.9"));
}

/* Catches a machine with a driver and no GPU being reported as a failure of the GPU. */
static void test_no_gpu_is_unsupported(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    fake_reset();
    fake.init_result = CUDA_ERROR_NO_DEVICE;
    struct driver driver = fake_table();
    assert_int_equal(driver_init(&driver, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "no GPU"));
}

/* Catches a failure of the driver that is lost or takes the wrong status. */
static void test_results_become_statuses(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    fake_reset();
    struct driver driver = fake_table();
    assert_int_equal(driver_check(&driver, CUDA_SUCCESS, "call", &err), IMBREX_STATUS_OK);
    assert_int_equal(driver_check(&driver, CUDA_ERROR_OUT_OF_MEMORY, "call", &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_non_null(strstr(err.message, "unknown error"));
    assert_int_equal(driver_check(&driver, CUDA_ERROR_LAUNCH_FAILED, "launch", &err),
                     IMBREX_STATUS_DEVICE);
    assert_non_null(strstr(err.message, "launch: CUDA_ERROR_LAUNCH_FAILED"));
}

static enum imbrex_status create(int32_t device_idx, struct imbrex_device **device,
                                 struct imbrex_error *err)
{
    struct driver driver = fake_table();
    return cuda_device_create(&driver, device_idx, NULL, device, err);
}

/* Catches: a machine whose driver counts no GPUs told as a number out of range. */
static void test_no_gpu_counted(void **state)
{
    (void)state;
    struct imbrex_device *device = NULL;
    struct imbrex_error err = {.message = ""};
    fake_reset();
    fake.num_gpus = 0;
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &device, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "finds no GPU"));
    assert_int_equal(fake.num_retained, 0);
}

/* Catches a number beyond the last GPU reaching the driver, and GPU 1 being opened as GPU 0. */
static void test_device_number(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_device *device = NULL;
    struct imbrex_device_info description;

    fake_reset();
    fake.num_gpus = 2;
    assert_int_equal(create(2, &device, &err), IMBREX_STATUS_NOT_FOUND);
    assert_int_equal(create(-1, &device, &err), IMBREX_STATUS_NOT_FOUND);
    assert_null(device);
    assert_int_equal(create(1, &device, &err), IMBREX_STATUS_OK);
    imbrex_device_describe(device, &description);
    assert_int_equal(description.device_idx, 1);
    assert_string_equal(description.name, "Fake GPU 1");
    assert_int_equal(description.num_sms, 132);
    assert_int_equal(description.compute_capability, 90);
    imbrex_device_close(device);
    assert_int_equal(fake.num_retained, 0);
}

/* Catches a GPU that multiplies no bf16 being taken, and a newer one being refused. */
static void test_old_gpus_are_refused(void **state)
{
    (void)state;
    static const struct {
        int major, minor;
        bool is_taken, is_portable;
    } cases[] = {{7, 0, false, false}, {7, 5, false, false}, {8, 0, true, true},
                 {8, 6, true, true},   {8, 9, true, true},   {9, 0, true, false},
                 {10, 0, true, true},  {12, 0, true, true}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct imbrex_error err = {.message = ""};
        struct imbrex_device *device = NULL;
        char found[40];
        fake_reset();
        fake.compute_major = cases[i].major;
        fake.compute_minor = cases[i].minor;
        enum imbrex_status status = create(0, &device, &err);
        if (!cases[i].is_taken) {
            snprintf(found, sizeof(found), "found %d.%d", cases[i].major, cases[i].minor);
            assert_int_equal(status, IMBREX_STATUS_UNSUPPORTED);
            assert_non_null(strstr(err.message, "8.0"));
            assert_non_null(strstr(err.message, found));
            assert_int_equal(fake.num_retained, 0);
            continue;
        }
        assert_int_equal(status, IMBREX_STATUS_OK);
        assert_int_equal(device->is_portable, cases[i].is_portable);
        /* Portable kernels know nothing of a grid that has not ended. */
        assert_int_equal(device->overlap_launches, !cases[i].is_portable);
        imbrex_device_close(device);
        assert_int_equal(fake.num_retained, 0);
    }
}

/* Catches an option that is not looked at, and kernels of one kind found where the other is meant:
 * each is loaded from an image of its own. */
static void test_both_kinds_of_kernels(void **state)
{
    (void)state;
    struct imbrex_error err = {.message = ""};
    struct imbrex_device *device = NULL;
    struct imbrex_device_options options = imbrex_device_options_default();
    CUfunction function = NULL;
    assert_false(options.portable_kernels);
    fake_reset();
    struct driver driver = fake_table();
    options.portable_kernels = true;
    assert_int_equal(cuda_device_create(&driver, 0, &options, &device, &err), IMBREX_STATUS_OK);
    assert_true(device->is_portable);
    assert_int_equal(cuda_device_op_function(device, OP_KERNEL_silu_mul, &function, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(fake.num_loads, 1);
    assert_int_equal(
        cuda_device_op_function(device, OP_KERNEL_decode_attention_merge, &function, &err),
        IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "decode_attention: made for compute capability 9.0"));
    device->is_portable = false;
    assert_int_equal(cuda_device_op_function(device, OP_KERNEL_silu_mul, &function, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(fake.num_loads, 2);
    imbrex_device_close(device);
    assert_int_equal(fake.num_libraries, 0);
}

/* Catches options outside their range. */
static void test_options_are_checked(void **state)
{
    (void)state;
    static const int32_t counts[] = {0, -1, INT32_MAX};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct imbrex_error err = {0};
        struct imbrex_device *device = NULL;
        struct imbrex_device_options options = imbrex_device_options_default();
        fake_reset();
        struct driver driver = fake_table();
        options.max_tensor_maps = counts[i];
        assert_int_equal(cuda_device_create(&driver, 0, &options, &device, &err),
                         IMBREX_STATUS_INVALID_ARGUMENT);
        assert_non_null(strstr(err.message, "max_tensor_maps"));
    }
}

/* Catches a table entry whose kernel is in no image, in two, or twice under one name. */
static void test_kernel_table(void **state)
{
    (void)state;
    int32_t begin, end, next = 0;
    kernel_table_range(IMBREX_KERNEL_OP_GEMM_SWIGLU, &begin, &end);
    assert_int_equal(begin, 0);
    next = end;
    kernel_table_range(IMBREX_KERNEL_OP_GEMM, &begin, &end);
    assert_int_equal(begin, next);
    assert_int_equal(end, kernel_table_count());
    for (int32_t i = 0; i < kernel_table_count(); i++) {
        const struct kernel_variant *kernel = kernel_table_at(i);
        assert_int_equal(kernel->form == TILE_FORM_PLAIN, i >= begin);
        size_t num_bytes = 0;
        assert_non_null(kernel_image_bytes(kernel->image, kernel->is_portable, &num_bytes));
        assert_true(num_bytes > 0);
        for (int32_t j = 0; j < i; j++) {
            assert_string_not_equal(kernel->name, kernel_table_at(j)->name);
        }
    }
}

int run_cuda_driver_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_old_driver_is_refused),
        cmocka_unit_test(test_no_gpu_is_unsupported),
        cmocka_unit_test(test_results_become_statuses),
        cmocka_unit_test(test_no_gpu_counted),
        cmocka_unit_test(test_device_number),
        cmocka_unit_test(test_old_gpus_are_refused),
        cmocka_unit_test(test_both_kinds_of_kernels),
        cmocka_unit_test(test_options_are_checked),
        cmocka_unit_test(test_kernel_table),
    };
    return cmocka_run_group_tests_name("cuda_driver", tests, NULL, NULL);
}
