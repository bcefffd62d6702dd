/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that a device knows: all of it, in pieces that no copied unit crosses, and none of it
 * once anything has failed. */
#include "ops/pinned_region.h"

#include <string.h>
#include <sys/mman.h>

#include "ops/fake/device_fake.h"
#include "tests/test.h"

enum { UNIT_BYTES = 20480, NUM_UNITS = 2000, CHUNK_BYTES = 5 << 20 };

static struct device *create_fake(void)
{
    struct device *device = NULL;
    assert_int_equal(device_fake_create(1, &device, NULL), IMBREX_STATUS_OK);
    return device;
}

/* Catches: chunks that leave a part of the region out, that cut a unit in two, or that are one;
 * pages that are not there when the device is told of them. */
static void test_all_is_registered(void **state)
{
    (void)state;
    struct device *device = create_fake();
    struct pinned_region region;
    static unsigned char residency[NUM_UNITS * UNIT_BYTES / 4096];
    assert_int_equal(
        pinned_region_map(device, "slots", NUM_UNITS, UNIT_BYTES, CHUNK_BYTES, &region, NULL),
        IMBREX_STATUS_OK);
    assert_int_equal(region.num_bytes, (size_t)NUM_UNITS * UNIT_BYTES);
    assert_int_equal(region.chunk_bytes % UNIT_BYTES, 0);
    assert_true(region.chunk_bytes <= CHUNK_BYTES);
    assert_int_equal(region.num_registered, region.num_chunks);
    assert_true(region.num_chunks * region.chunk_bytes >= region.num_bytes);
    assert_true((region.num_chunks - 1) * region.chunk_bytes < region.num_bytes);
    assert_true(region.num_chunks > 1 && region.num_threads >= 1);
    assert_int_equal(mincore(region.base, region.num_bytes, residency), 0);
    for (size_t i = 0; i < sizeof(residency); i++) {
        assert_true(residency[i] & 1);
        assert_int_equal(region.base[4096 * i], 0);
    }
    pinned_region_unmap(&region);
    pinned_region_unmap(&region);
    device_destroy(device); /* asserts that nothing is registered */
}

/* Catches: a chunk that stays registered when a later one is refused, memory that is not given
 * back, a thread that still touches it, a failure without its reason. */
static void test_each_chunk_refused(void **state)
{
    (void)state;
    int32_t num_chunks = 0;
    for (int64_t num_good = 0; num_chunks == 0; num_good++) {
        struct device *device = create_fake();
        struct imbrex_error err = {0};
        struct pinned_region region = {0};
        device_fake_limit_registrations(device, num_good);
        enum imbrex_status status =
            pinned_region_map(device, "slots", NUM_UNITS, UNIT_BYTES, CHUNK_BYTES, &region, &err);
        if (status == IMBREX_STATUS_OK) {
            num_chunks = region.num_chunks;
            assert_int_equal(num_chunks, num_good);
            pinned_region_unmap(&region);
        } else {
            assert_int_equal(status, IMBREX_STATUS_OUT_OF_MEMORY);
            assert_non_null(strstr(err.message, "refused"));
            assert_null(region.base);
        }
        device_destroy(device);
    }
    assert_true(num_chunks > 3);
}

/* Catches: memory of a CPU's host tier that is taken before it is used, a unit larger than a chunk,
 * a size that wraps round. */
static void test_small_and_large(void **state)
{
    (void)state;
    struct device *device = NULL;
    struct pinned_region region;
    unsigned char residency[3];
    assert_int_equal(device_cpu_create(&device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(pinned_region_map(device, "slots", 3, 4096, 0, &region, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(region.num_threads, 0);
    assert_int_equal(mincore(region.base, region.num_bytes, residency), 0);
    assert_int_equal(residency[0] & 1, 0);
    pinned_region_unmap(&region);
    assert_int_equal(pinned_region_map(device, "slots", 3, 8192, 4096, &region, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(region.num_chunks, 3);
    pinned_region_unmap(&region);
    assert_int_equal(pinned_region_map(device, "slots", SIZE_MAX / 4096, 8192, 0, &region, NULL),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    device_destroy(device);
}

int run_pinned_region_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_is_registered),
        cmocka_unit_test(test_each_chunk_refused),
        cmocka_unit_test(test_small_and_large),
    };
    return cmocka_run_group_tests_name("pinned_region", tests, NULL, NULL);
}
