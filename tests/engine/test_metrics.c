/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/metrics.h"

#include <pthread.h>
#include <string.h>

#include "tests/test.h"

/* Catches: bounds that are rounded up, or drift from the formula: 1024 * 2^(i / 2) lies in
 * [bound, bound + 1), compared by squares. */
static void test_bounds(void **state)
{
    (void)state;
    for (int32_t i = 0; i < IMBREX_HISTOGRAM_NUM_BUCKETS; i++) {
        uint64_t bound = imbrex_histogram_bound(i);
        __extension__ typedef unsigned __int128 wide;
        wide square = (wide)1 << (20 + i);
        assert_true((wide)bound * bound <= square);
        assert_true((wide)(bound + 1) * (bound + 1) > square);
    }
    assert_int_equal(imbrex_histogram_bound(0), 1024);
    assert_int_equal(imbrex_histogram_bound(1), 1448);
    assert_int_equal(imbrex_histogram_bound(-1), 0);
    assert_true(imbrex_histogram_bound(IMBREX_HISTOGRAM_NUM_BUCKETS) == UINT64_MAX);
}

/* Which bucket of an empty histogram counts this value; it must be the only one. */
static int32_t bucket_of(int64_t value, uint64_t *sum)
{
    struct metrics metrics = {0};
    struct imbrex_engine_metrics snapshot;
    int32_t bucket_idx = -1;
    metrics_observe(&metrics.itl, value);
    metrics_read(&metrics, &snapshot);
    assert_int_equal(snapshot.itl.num_values, 1);
    for (int32_t i = 0; i < IMBREX_HISTOGRAM_NUM_BUCKETS; i++) {
        if (snapshot.itl.buckets[i] != 0) {
            assert_int_equal(snapshot.itl.buckets[i], 1);
            assert_int_equal(bucket_idx, -1);
            bucket_idx = i;
        }
    }
    *sum = snapshot.itl.sum;
    return bucket_idx;
}

/* Catches: a value on a bound that is counted one bucket off, and values beyond all bounds or below
 * zero that are counted outside the array. */
static void test_buckets(void **state)
{
    (void)state;
    uint64_t sum;
    for (int32_t i = 0; i < IMBREX_HISTOGRAM_NUM_BUCKETS - 1; i++) {
        int64_t bound = (int64_t)imbrex_histogram_bound(i);
        assert_int_equal(bucket_of(bound, &sum), i);
        assert_int_equal(sum, bound);
        assert_int_equal(bucket_of(bound + 1, &sum), i + 1);
    }
    assert_int_equal(bucket_of(0, &sum), 0);
    assert_int_equal(bucket_of(-5, &sum), 0);
    assert_int_equal(sum, 0);
    assert_int_equal(bucket_of(INT64_MIN, &sum), 0);
    assert_int_equal(bucket_of(INT64_MAX, &sum), IMBREX_HISTOGRAM_NUM_BUCKETS - 1);
    assert_true(sum == INT64_MAX);
}

/* Catches: a counter that is read into another's place, or not at all. */
static void test_snapshot(void **state)
{
    (void)state;
    struct metrics metrics = {0};
    struct imbrex_engine_metrics snapshot;
    struct metrics_histogram *histograms[] = {&metrics.ttft,         &metrics.itl,
                                              &metrics.queue_time,   &metrics.step_time,
                                              &metrics.forward_time, &metrics.overhead};
    metrics_add(&metrics.num_submitted, 1);
    metrics_add(&metrics.num_rejected, 2);
    metrics_add(&metrics.num_prompt_tokens, 3);
    metrics_add(&metrics.num_generated_tokens, 4);
    metrics_add(&metrics.num_preemptions, 5);
    metrics_add(&metrics.num_queried_tokens, 29);
    metrics_add(&metrics.num_cached_tokens, 23);
    metrics_add(&metrics.num_key_collisions, 24);
    metrics_add(&metrics.num_steps, 6);
    metrics_add(&metrics.num_failed_steps, 7);
    metrics_add(&metrics.num_bad_logits, 8);
    metrics_set(&metrics.num_running, 9);
    metrics_set(&metrics.num_waiting, 10);
    metrics_set(&metrics.kv_num_blocks, 11);
    metrics_set(&metrics.kv_num_free, -12);
    for (uint64_t i = 0; i < 8; i++) {
        metrics_add(&metrics.num_ended[i], 20 + i);
    }
    for (int64_t i = 0; i < 6; i++) {
        metrics_observe(histograms[i], 100 + i);
    }
    memset(&snapshot, 0xff, sizeof(snapshot));
    metrics_read(&metrics, &snapshot);
    assert_int_equal(snapshot.num_submitted, 1);
    assert_int_equal(snapshot.num_rejected, 2);
    assert_int_equal(snapshot.num_prompt_tokens, 3);
    assert_int_equal(snapshot.num_generated_tokens, 4);
    assert_int_equal(snapshot.num_preemptions, 5);
    assert_int_equal(snapshot.num_queried_tokens, 29);
    assert_int_equal(snapshot.num_cached_tokens, 23);
    assert_int_equal(snapshot.num_key_collisions, 24);
    assert_int_equal(snapshot.num_steps, 6);
    assert_int_equal(snapshot.num_failed_steps, 7);
    assert_int_equal(snapshot.num_bad_logits, 8);
    assert_int_equal(snapshot.num_running, 9);
    assert_int_equal(snapshot.num_waiting, 10);
    assert_int_equal(snapshot.kv_num_blocks, 11);
    assert_int_equal(snapshot.kv_num_free, -12);
    for (uint64_t i = 0; i < 8; i++) {
        assert_int_equal(snapshot.num_ended[i], 20 + i);
    }
    assert_int_equal(snapshot.ttft.sum, 100);
    assert_int_equal(snapshot.itl.sum, 101);
    assert_int_equal(snapshot.queue_time.sum, 102);
    assert_int_equal(snapshot.step_time.sum, 103);
    assert_int_equal(snapshot.forward_time.sum, 104);
    assert_int_equal(snapshot.overhead.sum, 105);
    assert_int_equal(snapshot.overhead.buckets[0], 1);
    assert_int_equal(snapshot.overhead.buckets[IMBREX_HISTOGRAM_NUM_BUCKETS - 1], 0);
}

#define NUM_OBSERVED 10000

static void *observe_many(void *metrics)
{
    for (int32_t i = 0; i < NUM_OBSERVED; i++) {
        metrics_observe(&((struct metrics *)metrics)->ttft, i);
        metrics_add(&((struct metrics *)metrics)->num_submitted, 1);
    }
    return NULL;
}

/* Catches: counts lost between threads, and a race with the reader (under TSan). */
static void test_threads(void **state)
{
    (void)state;
    struct metrics metrics = {0};
    struct imbrex_engine_metrics snapshot;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, observe_many, &metrics), 0);
    }
    metrics_read(&metrics, &snapshot);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    metrics_read(&metrics, &snapshot);
    assert_int_equal(snapshot.num_submitted, 2 * NUM_OBSERVED);
    assert_int_equal(snapshot.ttft.num_values, 2 * NUM_OBSERVED);
    assert_int_equal(snapshot.ttft.sum, NUM_OBSERVED * (NUM_OBSERVED - 1));
}

/* Catches: a reason without a name, or with another's. */
static void test_finish_reason_names(void **state)
{
    (void)state;
    static const char *const names[] = {"none",    "eos",       "stop_string", "length",
                                        "context", "cancelled", "error",       "deadline"};
    for (int i = 0; i < 8; i++) {
        assert_string_equal(imbrex_finish_reason_name((enum imbrex_finish_reason)i), names[i]);
    }
    assert_string_equal(imbrex_finish_reason_name((enum imbrex_finish_reason)8), "unknown");
}

int run_metrics_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_finish_reason_names),
    };
    return cmocka_run_group_tests_name("metrics", tests, NULL, NULL);
}
