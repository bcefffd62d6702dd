/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/lineage.h"

#include "tests/test.h"

#define SECOND INT64_C(1000000000)

enum { MAX_KEYS = 40 };

/* A prompt that has `shared` blocks of the conversation `name` and then some of its own. */
static void fill(struct kv_key *keys, int32_t num_keys, uint64_t name, int32_t shared, uint64_t own)
{
    for (int32_t i = 0; i < num_keys; i++) {
        keys[i] = (struct kv_key){{(i < shared ? name : own) * 1000 + (uint64_t)i, 0, 0, 0}};
    }
}

static struct kv_fingerprint use(struct lineage *lineage, const struct kv_key *keys,
                                 int32_t num_keys, int64_t arrival_ns, int64_t end_ns)
{
    struct kv_fingerprint fingerprint = {.last_gap_ns = 77};
    lineage_arrive(lineage, keys, num_keys, arrival_ns, &fingerprint);
    lineage_finish(lineage, keys, num_keys, end_ns, &fingerprint);
    return fingerprint;
}

/* Catches: turns that are not counted on, gaps from the wrong end, sessions that change, an edited
 * last block that breaks the session. */
static void test_turns(void **state)
{
    (void)state;
    struct lineage *lineage;
    struct imbrex_error err;
    struct kv_key keys[MAX_KEYS];
    assert_int_equal(lineage_create(100, &lineage, &err), IMBREX_STATUS_OK);
    fill(keys, 10, 1, 10, 0);
    struct kv_fingerprint first = use(lineage, keys, 10, 0, 5 * SECOND);
    assert_int_equal(first.turn, 1);
    assert_int_equal(first.last_gap_ns, -1);
    fill(keys, 14, 1, 10, 2);
    struct kv_fingerprint second = use(lineage, keys, 14, 25 * SECOND, 30 * SECOND);
    assert_int_equal(second.turn, 2);
    assert_int_equal(second.last_gap_ns, 20 * SECOND);
    assert_true(second.session == first.session && first.session != 0);
    keys[13].words[0] = 99999; /* its last block is another one now */
    struct kv_fingerprint edited = use(lineage, keys, 14, 31 * SECOND, 32 * SECOND);
    assert_int_equal(edited.turn, 3);
    assert_int_equal(edited.last_gap_ns, SECOND);
    fill(keys, 10, 3, 10, 0);
    struct kv_fingerprint other = use(lineage, keys, 10, 40 * SECOND, 41 * SECOND);
    assert_int_equal(other.turn, 1);
    assert_true(other.session != first.session);
    lineage_destroy(lineage);
}

/* Catches: what the client said that is overwritten. */
static void test_known_turns_stay(void **state)
{
    (void)state;
    struct lineage *lineage;
    struct imbrex_error err;
    struct kv_key keys[MAX_KEYS];
    struct kv_fingerprint fingerprint = {.turn = 7, .session = 5, .last_gap_ns = 3};
    assert_int_equal(lineage_create(1, &lineage, &err), IMBREX_STATUS_OK);
    fill(keys, 3, 1, 3, 0);
    lineage_arrive(lineage, keys, 3, 0, &fingerprint);
    assert_true(fingerprint.turn == 7 && fingerprint.session == 5 && fingerprint.last_gap_ns == 3);
    lineage_finish(lineage, keys, 3, SECOND, &fingerprint);
    assert_int_equal(use(lineage, keys, 0, 2 * SECOND, 2 * SECOND).turn, 1);
    lineage_destroy(lineage);
    lineage_destroy(NULL);
}

/* Catches: a beginning common to all, which is a whole prompt of some, taken for a session that
 * everybody continues. */
static void test_common_beginning(void **state)
{
    (void)state;
    struct lineage *lineage;
    struct imbrex_error err;
    struct kv_key keys[MAX_KEYS];
    assert_int_equal(lineage_create(1000, &lineage, &err), IMBREX_STATUS_OK);
    fill(keys, 2, 1, 2, 0);
    use(lineage, keys, 2, 0, SECOND);
    int32_t num_first = 0;
    for (uint64_t i = 0; i < 50; i++) {
        fill(keys, 9, 1, 2, 10 + i);
        num_first += use(lineage, keys, 9, 2 * SECOND, 3 * SECOND).turn == 1;
        fill(keys, 2, 1, 2, 0);
        use(lineage, keys, 2, 3 * SECOND, 3 * SECOND);
    }
    assert_true(num_first >= 47);
    lineage_destroy(lineage);
}

/* Catches: a table that grows or keeps the oldest for ever. */
static void test_bounded(void **state)
{
    (void)state;
    struct lineage *lineage;
    struct imbrex_error err;
    struct kv_key keys[MAX_KEYS];
    assert_int_equal(lineage_create(20, &lineage, &err), IMBREX_STATUS_OK);
    size_t num_bytes = lineage_bytes(lineage);
    for (uint64_t name = 1; name <= 100; name++) {
        fill(keys, 8, name, 8, 0);
        use(lineage, keys, 8, 0, SECOND);
    }
    assert_int_equal(lineage_bytes(lineage), num_bytes);
    fill(keys, 8, 100, 8, 0);
    assert_int_equal(use(lineage, keys, 8, 2 * SECOND, 2 * SECOND).turn, 2);
    fill(keys, 8, 1, 8, 0);
    assert_int_equal(use(lineage, keys, 8, 2 * SECOND, 2 * SECOND).turn, 1);
    lineage_destroy(lineage);
}

int run_lineage_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_known_turns_stay),
        cmocka_unit_test(test_common_beginning),
        cmocka_unit_test(test_bounded),
    };
    return cmocka_run_group_tests_name("lineage", tests, NULL, NULL);
}
