/* SPDX-License-Identifier: Apache-2.0 */
/* Columns shared by threads. Catches: a column that nobody or two threads get, at any number of
 * threads, of columns and least size, whoever comes when; pieces that begin within a unit or are
 * shorter than asked for within a range; a thread that does not go on behind its own piece. */
#include "ops/column_ranges.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#define MAX_THREADS 9
#define MAX_COUNT 5000
#define UNIT 16

struct fixture {
    struct column_range lines[MAX_THREADS];
    struct column_ranges ranges;
    _Atomic int32_t num_takers[MAX_COUNT];
};

static void begin(struct fixture *fixture, int32_t num_threads, int32_t num_parts, int64_t count,
                  int64_t least)
{
    memset(fixture, 0, sizeof(*fixture));
    fixture->ranges = (struct column_ranges){.ranges = fixture->lines,
                                             .num_threads = num_threads,
                                             .num_parts = num_parts,
                                             .count = count,
                                             .unit = UNIT,
                                             .least = least};
    column_ranges_split(&fixture->ranges);
}

static bool take(struct fixture *fixture, int32_t thread_idx, int64_t *first, int64_t *end)
{
    if (!column_ranges_take(&fixture->ranges, thread_idx, first, end)) {
        return false;
    }
    assert_int_equal(*first % UNIT, 0);
    assert_true(*first < *end && *end <= fixture->ranges.count);
    assert_true(*end % UNIT == 0 || *end == fixture->ranges.count);
    for (int64_t col = *first; col < *end; col++) {
        fixture->num_takers[col]++;
    }
    return true;
}

static void expect_all_taken(const struct fixture *fixture)
{
    for (int64_t col = 0; col < fixture->ranges.count; col++) {
        assert_int_equal(fixture->num_takers[col], 1);
    }
}

/* Threads come in a random order, some never. */
static void test_any_order(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    uint32_t random = 1;
    (void)state;
    assert_non_null(fixture);
    for (int32_t round = 0; round < 3000; round++) {
        random = random * 1664525u + 1013904223u;
        int32_t num_threads = 1 + (int32_t)(random >> 8) % MAX_THREADS;
        int64_t count = 1 + (random >> 4) % (round % 2 == 0 ? 100 : MAX_COUNT);
        int64_t first, end;
        int32_t num_parts = 1 + (int32_t)(random >> 20) % num_threads;
        begin(fixture, num_threads, num_parts, count, (random >> 12) % 300);
        int32_t num_present = 1 + (int32_t)(random >> 16) % num_threads, thread_idx;
        do {
            random = random * 1664525u + 1013904223u;
            thread_idx = (int32_t)(random >> 8) % num_present;
        } while (take(fixture, thread_idx, &first, &end));
        expect_all_taken(fixture);
    }
    free(fixture);
}

static void test_pieces_follow_each_other(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    int64_t first, end, next = 0;
    (void)state;
    assert_non_null(fixture);
    begin(fixture, 2, 2, 4864, 100);
    while (next < 2432) {
        assert_true(take(fixture, 0, &first, &end));
        assert_int_equal(first, next);
        assert_true(end - first >= 100 || end == 2432);
        assert_true(end - first <= 608);
        next = end;
    }
    /* Half of the other range, from its middle on. */
    assert_true(take(fixture, 0, &first, &end));
    assert_int_equal(first, 3648);
    free(fixture);
}

struct taker {
    struct fixture *fixture;
    int32_t thread_idx;
};

static void *take_all(void *arg)
{
    struct taker *taker = arg;
    struct fixture *fixture = taker->fixture;
    int64_t first, end;
    while (column_ranges_take(&fixture->ranges, taker->thread_idx, &first, &end)) {
        for (int64_t col = first; col < end; col++) {
            fixture->num_takers[col]++;
        }
    }
    return NULL;
}

static void test_threads_at_once(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    (void)state;
    assert_non_null(fixture);
    for (int32_t round = 0; round < 100; round++) {
        struct taker takers[MAX_THREADS];
        pthread_t threads[MAX_THREADS];
        begin(fixture, MAX_THREADS, MAX_THREADS - round % 3, MAX_COUNT, 1);
        for (int32_t idx = 0; idx < MAX_THREADS; idx++) {
            takers[idx] = (struct taker){fixture, idx};
            assert_int_equal(pthread_create(&threads[idx], NULL, take_all, &takers[idx]), 0);
        }
        for (int32_t idx = 0; idx < MAX_THREADS; idx++) {
            pthread_join(threads[idx], NULL);
        }
        expect_all_taken(fixture);
    }
    free(fixture);
}

int run_column_ranges_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_pieces_follow_each_other),
        cmocka_unit_test(test_threads_at_once),
    };
    return cmocka_run_group_tests_name("column_ranges", tests, NULL, NULL);
}
