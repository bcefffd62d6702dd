/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

/* Byte pair encoding as its definition has it: look at all pairs, merge the leftmost of the lowest
 * rank, start again. */
static size_t merge_by_definition(const struct merge *merges, size_t num_merges, int32_t *ids,
                                  size_t num_ids)
{
    for (;;) {
        size_t best_at = 0;
        const struct merge *best = NULL;
        for (size_t i = 0; i + 1 < num_ids; i++) {
            for (size_t j = 0; j < num_merges; j++) {
                if ((int32_t)merges[j].left == ids[i] && (int32_t)merges[j].right == ids[i + 1] &&
                    (best == NULL || merges[j].rank < best->rank)) {
                    best = &merges[j];
                    best_at = i;
                }
            }
        }
        if (best == NULL) {
            return num_ids;
        }
        ids[best_at] = (int32_t)best->merged;
        memmove(ids + best_at + 1, ids + best_at + 2, (num_ids - best_at - 2) * sizeof(*ids));
        num_ids--;
    }
}

static void expect_merged(const struct merge_table *table, const struct merge *merges,
                          size_t num_merges, const int32_t *word, size_t num_ids)
{
    int32_t expected[512], found[512];
    memcpy(expected, word, num_ids * sizeof(*word));
    memcpy(found, word, num_ids * sizeof(*word));
    size_t num_expected = merge_by_definition(merges, num_merges, expected, num_ids);
    size_t num_found = num_ids;
    struct bpe_scratch scratch = {0};
    struct imbrex_error err;
    assert_int_equal(bpe_merge(table, found, &num_found, &scratch, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_found, num_expected);
    assert_memory_equal(found, expected, num_found * sizeof(*found));
    bpe_scratch_release(&scratch);
}

/* Catches a wrong order of merges in short or long words: random vocabularies, where pairs overlap
 * and merged tokens merge again, with a rank each or shared by two, against the definition. */
static void test_bpe_equals_its_definition(void **state)
{
    (void)state;
    uint64_t random_state = 7;
    for (int round = 0; round < 60; round++) {
        struct merge merges[40];
        size_t num_merges = 1 + fixture_random(&random_state) % 40;
        uint32_t num_symbols = 1 + fixture_random(&random_state) % 4, num_tokens = num_symbols;
        for (size_t i = 0; i < num_merges; i++) {
            bool is_known = true;
            while (is_known) {
                merges[i] = (struct merge){.left = fixture_random(&random_state) % num_tokens,
                                           .right = fixture_random(&random_state) % num_tokens,
                                           .rank = (uint32_t)(round % 2 == 0 ? i : i / 2),
                                           .merged = num_tokens};
                is_known = false;
                for (size_t j = 0; j < i; j++) {
                    is_known = is_known || (merges[j].left == merges[i].left &&
                                            merges[j].right == merges[i].right);
                }
            }
            num_tokens++;
        }
        struct merge_table table;
        struct imbrex_error err;
        assert_int_equal(merge_table_build("t", merges, num_merges, &table, &err),
                         IMBREX_STATUS_OK);
        for (int word_idx = 0; word_idx < 30; word_idx++) {
            int32_t word[512];
            size_t num_ids = 1 + fixture_random(&random_state) % (word_idx % 3 == 0 ? 400 : 60);
            for (size_t i = 0; i < num_ids; i++) {
                word[i] = (int32_t)(fixture_random(&random_state) % num_symbols);
            }
            expect_merged(&table, merges, num_merges, word, num_ids);
        }
        merge_table_release(&table);
    }
}

/* Catches a table that keeps the first of two merges with the same pair (Hugging Face keeps the
 * last), and one that cannot be empty. */
static void test_bpe_repeated_and_no_merges(void **state)
{
    (void)state;
    const struct merge merges[] = {{.left = 0, .right = 1, .rank = 0, .merged = 2},
                                   {.left = 1, .right = 0, .rank = 1, .merged = 3},
                                   {.left = 0, .right = 1, .rank = 2, .merged = 2}};
    struct merge_table table;
    struct bpe_scratch scratch = {0};
    struct imbrex_error err;
    int32_t ids[] = {0, 1, 0};
    size_t num_ids = 3;
    assert_int_equal(merge_table_build("t", merges, 3, &table, &err), IMBREX_STATUS_OK);
    assert_int_equal(bpe_merge(&table, ids, &num_ids, &scratch, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_ids, 2);
    assert_int_equal(ids[0], 0);
    assert_int_equal(ids[1], 3);
    merge_table_release(&table);

    num_ids = 2;
    assert_int_equal(merge_table_build("t", merges, 0, &table, &err), IMBREX_STATUS_OK);
    assert_int_equal(bpe_merge(&table, ids, &num_ids, &scratch, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_ids, 2);
    merge_table_release(&table);
}

/* Catches a hash that crowds ids as real files have them: all pairs of small ids, of consecutive
 * ids, of multiples of a power of two. */
static void test_bpe_table_takes_regular_ids(void **state)
{
    (void)state;
    const size_t num_merges = 1 << 16;
    struct merge *merges = malloc(num_merges * sizeof(*merges));
    assert_non_null(merges);
    for (int pattern = 0; pattern < 4; pattern++) {
        for (uint32_t i = 0; i < num_merges; i++) {
            merges[i] = (struct merge){.left = pattern == 1   ? i
                                               : pattern == 2 ? 5
                                               : pattern == 3 ? i << 8
                                                              : i & 255,
                                       .right = pattern == 1   ? i + 1
                                                : pattern == 2 ? i
                                                : pattern == 3 ? 0
                                                               : i >> 8,
                                       .rank = i};
        }
        struct merge_table table;
        struct imbrex_error err = {0};
        assert_int_equal(merge_table_build("t", merges, num_merges, &table, &err),
                         IMBREX_STATUS_OK);
        merge_table_release(&table);
    }
    free(merges);
}

/* Catches a loader that a file can make take quadratic time: 2^10 pairs for a table of 2^11 slots
 * are chosen so that they all begin in its first quarter, under the first multiplier or under each.
 * Another multiplier is taken in the first case, the file is refused in the second. */
static void test_bpe_table_refuses_crowded_pairs(void **state)
{
    (void)state;
    static const uint64_t multipliers[] = {
        UINT64_C(0x9e3779b97f4a7c15), UINT64_C(0xd6e8feb86659fd93), UINT64_C(0xa0761d6478bd642f),
        UINT64_C(0xe7037ed1a0b428db)};
    const size_t num_merges = 1 << 10;
    struct merge *merges = malloc(num_merges * sizeof(*merges));
    assert_non_null(merges);
    for (size_t num_crowded = 1; num_crowded <= 4; num_crowded += 3) {
        size_t num_found = 0;
        for (uint32_t right = 0; num_found < num_merges; right++) {
            uint64_t key = UINT64_C(1) << 32 | right;
            bool is_crowded = true;
            for (size_t i = 0; i < num_crowded; i++) {
                is_crowded = is_crowded && (key ^ key >> 29) * multipliers[i] >> 62 == 0;
            }
            if (is_crowded) {
                merges[num_found++] = (struct merge){.left = 1, .right = right};
            }
        }
        struct merge_table table = {0};
        struct imbrex_error err = {0};
        enum imbrex_status status = merge_table_build("t.json", merges, num_merges, &table, &err);
        if (num_crowded == 1) {
            assert_int_equal(status, IMBREX_STATUS_OK);
            assert_true(table.multiplier != multipliers[0]);
        } else {
            expect_error(status, IMBREX_STATUS_FORMAT, &err, "t.json|model.merges|evenly");
        }
        merge_table_release(&table);
    }
    free(merges);
}

int run_tokenizer_bpe_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe_equals_its_definition),
        cmocka_unit_test(test_bpe_repeated_and_no_merges),
        cmocka_unit_test(test_bpe_table_takes_regular_ids),
        cmocka_unit_test(test_bpe_table_refuses_crowded_pairs),
    };
    return cmocka_run_group_tests_name("tokenizer_bpe", tests, NULL, NULL);
}
