/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"

/* Catches a size that wraps round: the bug behind a small buffer for a large tensor. */
static void test_size_arithmetic(void **state)
{
    (void)state;
    size_t result = 7;
    assert_true(size_mul(SIZE_MAX, 1, &result));
    assert_true(result == SIZE_MAX);
    assert_false(size_mul(SIZE_MAX / 2 + 1, 2, &result));
    assert_true(size_add(SIZE_MAX - 1, 1, &result));
    assert_true(result == SIZE_MAX);
    assert_false(size_add(SIZE_MAX, 1, &result));
}

/* Catches a region that is smaller than asked for, not zeroed or not writable to its last byte. */
static void test_region_is_zeroed_and_whole_pages(void **state)
{
    (void)state;
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    struct memory_region region = {0};
    assert_int_equal(memory_region_map("cache", page_bytes + 1, &region, NULL), IMBREX_STATUS_OK);
    assert_non_null(region.base);
    assert_int_equal(region.num_bytes, 2 * page_bytes);
    for (size_t i = 0; i < region.num_bytes; i++) {
        assert_int_equal(region.base[i], 0);
        region.base[i] = 0xff;
    }
    memory_region_unmap(&region);
    assert_null(region.base);
    assert_int_equal(region.num_bytes, 0);
    memory_region_unmap(&region);
}

/* Catches an mmap of length 0, which fails. */
static void test_region_of_nothing(void **state)
{
    (void)state;
    struct memory_region region = {.num_bytes = 1};
    assert_int_equal(memory_region_map("nothing", 0, &region, NULL), IMBREX_STATUS_OK);
    assert_null(region.base);
    assert_int_equal(region.num_bytes, 0);
    memory_region_unmap(&region);
}

/* Catches rounding that wraps to zero, an output touched on failure, and an error that does not say
 * what the memory was for. */
static void test_region_too_large(void **state)
{
    (void)state;
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 4096, SIZE_MAX / 2};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        unsigned char byte;
        struct memory_region region = {.base = &byte, .num_bytes = 1};
        struct imbrex_error err = {0};
        assert_int_equal(memory_region_map("KV cache", sizes[i], &region, &err),
                         IMBREX_STATUS_OUT_OF_MEMORY);
        assert_ptr_equal(region.base, &byte);
        assert_int_equal(region.num_bytes, 1);
        assert_int_equal(err.status, IMBREX_STATUS_OUT_OF_MEMORY);
        assert_non_null(strstr(err.message, "KV cache"));
    }
}

/* Catches memory that is committed when reserved: 64 GiB are to be had where they are not used. A
 * sanitizer or a limit on address space may refuse them; then only the refusal is checked. */
static void test_region_is_committed_when_touched(void **state)
{
    (void)state;
    size_t num_bytes = (size_t)64 << 30;
    struct memory_region region = {0};
    enum imbrex_status status = memory_region_map("large", num_bytes, &region, NULL);
    if (status != IMBREX_STATUS_OK) {
        assert_int_equal(status, IMBREX_STATUS_OUT_OF_MEMORY);
        skip();
    }
    region.base[num_bytes - 1] = 1;
    assert_int_equal(region.base[0], 0);
    memory_region_unmap(&region);
}

/* Three pieces, one of them empty: the plan that measuring and placing must agree on. */
static void take_three(struct arena *arena, void *pieces[3])
{
    pieces[0] = arena_take(arena, 3, sizeof(float));
    pieces[1] = arena_take(arena, 0, sizeof(double));
    pieces[2] = arena_take(arena, 65, 1);
}

/* Catches a measuring pass and a placing pass that disagree, which would write past the arena, and
 * pieces that overlap or are not aligned. */
static void test_arena_measures_what_it_places(void **state)
{
    (void)state;
    void *pieces[3];
    struct arena measure = {0};
    take_three(&measure, pieces);
    assert_null(pieces[0]);
    assert_null(pieces[2]);
    assert_false(measure.overflowed);
    assert_int_equal(measure.num_used, ARENA_ALIGNMENT + 65);

    unsigned char *base = aligned_alloc(ARENA_ALIGNMENT, 4 * (size_t)ARENA_ALIGNMENT);
    assert_non_null(base);
    struct arena place = {.base = base};
    take_three(&place, pieces);
    assert_int_equal(place.num_used, measure.num_used);
    assert_ptr_equal(pieces[0], base);
    assert_ptr_equal(pieces[2], base + ARENA_ALIGNMENT);
    assert_int_equal((uintptr_t)pieces[1] % ARENA_ALIGNMENT, 0);
    free(base);
}

/* Catches an overflow that is forgotten by the next piece, or that hands out a pointer. */
static void test_arena_overflow_stays(void **state)
{
    (void)state;
    unsigned char base[1];
    const struct {
        size_t count, element_bytes, num_used;
    } cases[] = {
        {SIZE_MAX / 2, 4, 0},     /* the product */
        {SIZE_MAX - 100, 1, 128}, /* the end of the piece */
        {1, 1, SIZE_MAX - 1},     /* the alignment */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct arena arena = {.base = base, .num_used = cases[i].num_used};
        assert_null(arena_take(&arena, cases[i].count, cases[i].element_bytes));
        assert_true(arena.overflowed);
        assert_null(arena_take(&arena, 1, 1));
        assert_true(arena.overflowed);
    }
}

/* Catches seconds and nanoseconds put together wrongly, and a clock that can be set back. */
static void test_clock_is_monotonic(void **state)
{
    (void)state;
    int64_t previous_ns = clock_now_ns();
    assert_true(previous_ns > 0);
    for (int i = 0; i < 100000; i++) {
        int64_t now_ns = clock_now_ns();
        assert_true(now_ns >= previous_ns);
        previous_ns = now_ns;
    }
}

int run_memory_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_size_arithmetic),
        cmocka_unit_test(test_region_is_zeroed_and_whole_pages),
        cmocka_unit_test(test_region_of_nothing),
        cmocka_unit_test(test_region_too_large),
        cmocka_unit_test(test_region_is_committed_when_touched),
        cmocka_unit_test(test_arena_measures_what_it_places),
        cmocka_unit_test(test_arena_overflow_stays),
        cmocka_unit_test(test_clock_is_monotonic),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
