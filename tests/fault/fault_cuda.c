/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU opened, used and closed with every single request for memory refused in turn, on a driver
 * without a GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"

#if IMBREX_CUDA
#include "ops/cuda/cuda_device.h"
#include "tests/cuda/fake_driver.h"

static enum imbrex_status live(void *arg)
{
    (void)arg;
    struct imbrex_device *device = NULL;
    struct imbrex_error err = {.message = ""};
    const void *memory = (const void *)(uintptr_t)0x10000000;
    struct imbrex_gemm_params params = {
        .a = memory,
        .b = (const void *)(uintptr_t)0x11000000,
        .d = (void *)(uintptr_t)0x12000000,
        .num_tokens = 64,
        .in_features = 128,
        .out_features = 256,
    };
    fake_reset();
    fake_add_range(memory, 0x10000000, CU_MEMORYTYPE_DEVICE, 0);
    struct driver driver = fake_table();
    enum imbrex_status status = cuda_device_create(&driver, 0, NULL, &device, &err);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_gemm(device, &params, NULL, NULL, &err);
    }
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    imbrex_device_close(device);
    assert_int_equal(fake.num_retained, 0);
    return status;
}

/* Catches: an unchecked allocation, a context or memory that is not given back when one fails. */
static void test_each_allocation(void **state)
{
    (void)state;
    /* The device, its kernels, its tensor maps; a launch takes none. */
    assert_int_equal(fault_each_call(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live, NULL),
                     3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_allocation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    printf("built without CUDA\n");
    return 77;
}

#endif
