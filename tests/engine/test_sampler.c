/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

enum { VOCAB = 64 };

struct fixture {
    struct sampler sampler;
    struct memory_region region;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    struct imbrex_error err;
    struct arena arena = {0};
    struct sampler measured;
    sampler_take(&arena, VOCAB, &measured);
    if (memory_region_map("test", arena.num_used, &fixture.region, &err) != IMBREX_STATUS_OK) {
        return 1;
    }
    arena = (struct arena){.base = fixture.region.base};
    sampler_take(&arena, VOCAB, &fixture.sampler);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    memory_region_unmap(&((struct fixture *)*state)->region);
    return 0;
}

static struct sampler_options plain(float temperature)
{
    return (struct sampler_options){
        .temperature = temperature, .top_p = 1.0f, .repetition_penalty = 1.0f, .seed = 1};
}

static int32_t pick(struct sampler *sampler, const struct sampler_options *options,
                    const float *logits, int64_t position)
{
    int32_t token_id = -1;
    assert_true(sampler_pick(sampler, options, logits, VOCAB, position, &token_id));
    assert_in_range(token_id, 0, VOCAB - 1);
    return token_id;
}

/* Catches: a generator that is not Philox4x32-10. Known answers from the Random123 distribution. */
static void test_philox_known_answers(void **state)
{
    (void)state;
    const struct {
        uint32_t counter[4], key[2], words[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint32_t words[4];
        philox4x32(cases[i].counter, cases[i].key, words);
        assert_memory_equal(words, cases[i].words, sizeof(words));
    }
}

static void spread_logits(float *logits)
{
    for (int32_t i = 0; i < VOCAB; i++) {
        logits[i] = (float)((i * 37) % VOCAB) * 0.125f - 4.0f;
    }
}

/* Catches: an argmax that depends on the filters, or breaks a tie towards a higher id. */
static void test_greedy(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    struct sampler_options options = plain(0.0f);
    options.top_k = 1;
    options.top_p = 0.1f;
    sampler_reset(&fixture->sampler);
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 0);
    logits[9] = logits[40] = 2.0f;
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 9);
}

/* Catches: a draw that depends on anything but seed, position and logits. */
static void test_draw_is_a_function_of_seed_and_position(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    struct sampler_options options = plain(1.5f);
    int32_t first[200];
    int32_t num_other_seed = 0;
    spread_logits(logits);
    sampler_reset(&fixture->sampler);
    for (int32_t i = 0; i < 200; i++) {
        first[i] = pick(&fixture->sampler, &options, logits, i);
    }
    for (int32_t i = 199; i >= 0; i--) {
        assert_int_equal(pick(&fixture->sampler, &options, logits, i), first[i]);
    }
    options.seed = 2;
    for (int32_t i = 0; i < 200; i++) {
        num_other_seed += pick(&fixture->sampler, &options, logits, i) != first[i];
    }
    assert_true(num_other_seed > 100);
}

/* Share of each id over many positions against the softmax of what the filters should keep:
 * 40,000 draws, 6 standard deviations. */
static void check_distribution(struct sampler *sampler, const struct sampler_options *options,
                               const float *logits, const double *expected)
{
    enum { NUM_DRAWS = 40000 };
    int32_t counts[VOCAB] = {0};
    for (int32_t i = 0; i < NUM_DRAWS; i++) {
        counts[pick(sampler, options, logits, i)]++;
    }
    for (int32_t id = 0; id < VOCAB; id++) {
        double mean = NUM_DRAWS * expected[id];
        double slack = 6.0 * sqrt(mean) + (expected[id] > 0.0 ? 3.0 : 0.0);
        if (!(fabs(counts[id] - mean) <= slack)) {
            fail_msg("id %d: expected %.1f +- %.1f draws, found %d", id, mean, slack, counts[id]);
        }
    }
}

/* softmax(logits / temperature) over the ids that are kept. */
static void softmax(const float *logits, const bool *is_kept, double temperature, double *expected)
{
    double sum = 0.0;
    for (int32_t id = 0; id < VOCAB; id++) {
        expected[id] = is_kept[id] ? exp(logits[id] / temperature) : 0.0;
        sum += expected[id];
    }
    for (int32_t id = 0; id < VOCAB; id++) {
        expected[id] /= sum;
    }
}

/* Number of ids with a larger logit (spread_logits makes all different). */
static int32_t rank_of(const float *logits, int32_t id)
{
    int32_t rank = 0;
    for (int32_t other = 0; other < VOCAB; other++) {
        rank += logits[other] > logits[id];
    }
    return rank;
}

/* Catches: a temperature applied twice or not at all, a biased draw. */
static void test_temperature(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_kept[VOCAB];
    double expected[VOCAB];
    struct sampler_options options = plain(0.7f);
    spread_logits(logits);
    memset(is_kept, true, sizeof(is_kept));
    softmax(logits, is_kept, 0.7f, expected);
    sampler_reset(&fixture->sampler);
    check_distribution(&fixture->sampler, &options, logits, expected);
}

/* Catches: a top-k that keeps k - 1 or k + 1 ids, or the wrong ones. */
static void test_top_k(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_kept[VOCAB];
    double expected[VOCAB];
    struct sampler_options options = plain(2.0f);
    options.top_k = 5;
    spread_logits(logits);
    for (int32_t id = 0; id < VOCAB; id++) {
        is_kept[id] = rank_of(logits, id) < 5;
    }
    softmax(logits, is_kept, 2.0, expected);
    sampler_reset(&fixture->sampler);
    check_distribution(&fixture->sampler, &options, logits, expected);
}

/* Catches: a top-p that leaves out the id that crosses p, is measured before top-k, or ignores the
 * temperature; a min-p measured against something else than the best id. */
static void test_top_p_and_min_p(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_kept[VOCAB];
    double expected[VOCAB];
    struct sampler_options options = plain(1.5f);
    options.top_k = 12;
    options.top_p = 0.6f;
    spread_logits(logits);
    for (int32_t id = 0; id < VOCAB; id++) {
        is_kept[id] = rank_of(logits, id) < 12;
    }
    softmax(logits, is_kept, 1.5, expected);
    for (int32_t id = 0; id < VOCAB; id++) {
        double better = 0.0;
        for (int32_t other = 0; other < VOCAB; other++) {
            better += logits[other] > logits[id] ? expected[other] : 0.0;
        }
        is_kept[id] = is_kept[id] && better < 0.6;
    }
    softmax(logits, is_kept, 1.5, expected);
    sampler_reset(&fixture->sampler);
    check_distribution(&fixture->sampler, &options, logits, expected);

    options = plain(1.5f);
    options.min_p = 0.5f;
    for (int32_t id = 0; id < VOCAB; id++) {
        double best = 63 * 0.125 - 4.0;
        is_kept[id] = exp((logits[id] - best) / 1.5) >= 0.5;
    }
    softmax(logits, is_kept, 1.5, expected);
    check_distribution(&fixture->sampler, &options, logits, expected);
}

/* Catches: a penalty that raises negative logits, counts an id twice, or survives a reset. */
static void test_repetition_penalty(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    struct sampler_options options = plain(0.0f);
    options.repetition_penalty = 2.0f;
    for (int32_t id = 0; id < VOCAB; id++) {
        logits[id] = -10.0f;
    }
    logits[3] = 4.0f;
    logits[5] = 2.5f;
    sampler_reset(&fixture->sampler);
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 3);
    sampler_note(&fixture->sampler, 3);
    sampler_note(&fixture->sampler, 3); /* 4 / 2 = 2 < 2.5 < 4 / 1 */
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 5);
    sampler_note(&fixture->sampler, 5); /* 2.5 / 2 = 1.25 < 4 / 2; 4 / 4 = 1 if counted twice */
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 3);
    logits[3] = -1.0f;
    logits[5] = -1.5f;
    logits[7] = -1.75f; /* unseen: beats -2 and -3 */
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 7);
    sampler_reset(&fixture->sampler);
    assert_int_equal(pick(&fixture->sampler, &options, logits, 0), 3);
}

/* Catches: a NaN or infinity that is sampled from instead of reported, at any place. */
static void test_non_finite(void **state)
{
    struct fixture *fixture = *state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int32_t places[] = {0, 31, VOCAB - 1};
    const float temperatures[] = {0.0f, 1.0f};
    sampler_reset(&fixture->sampler);
    for (int32_t i = 0; i < 3; i++) {
        for (int32_t j = 0; j < 3; j++) {
            for (int32_t k = 0; k < 2; k++) {
                float logits[VOCAB] = {0};
                int32_t token_id = -7;
                struct sampler_options options = plain(temperatures[k]);
                logits[places[j]] = bad[i];
                assert_false(
                    sampler_pick(&fixture->sampler, &options, logits, VOCAB, 0, &token_id));
                assert_int_equal(token_id, -7);
            }
        }
    }
    /* Finite, but not under the penalty. */
    sampler_note(&fixture->sampler, 31);
    for (int32_t k = 0; k < 4; k++) {
        float logits[VOCAB] = {0};
        int32_t token_id = -7;
        struct sampler_options options = plain(temperatures[k % 2]);
        options.repetition_penalty = k < 2 ? 0.01f : 100.0f;
        logits[31] = k < 2 ? 1e38f : -1e38f;
        assert_false(sampler_pick(&fixture->sampler, &options, logits, VOCAB, 0, &token_id));
        assert_int_equal(token_id, -7);
    }
    sampler_reset(&fixture->sampler);
}

/* Catches: an id beyond num_ids that is picked although it has the best logit. */
static void test_masks_ids_beyond_the_tokenizer(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    const float temperatures[] = {0.0f, 1.0f};
    logits[20] = 50.0f;
    logits[10] = 30.0f;
    sampler_reset(&fixture->sampler);
    for (int32_t i = 0; i < 2; i++) {
        struct sampler_options options = plain(temperatures[i]);
        int32_t token_id;
        assert_true(sampler_pick(&fixture->sampler, &options, logits, 20, 0, &token_id));
        assert_int_equal(token_id, 10);
    }
}

int run_sampler_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_draw_is_a_function_of_seed_and_position),
        cmocka_unit_test(test_temperature),
        cmocka_unit_test(test_top_k),
        cmocka_unit_test(test_top_p_and_min_p),
        cmocka_unit_test(test_repetition_penalty),
        cmocka_unit_test(test_non_finite),
        cmocka_unit_test(test_masks_ids_beyond_the_tokenizer),
    };
    return cmocka_run_group_tests_name("sampler", tests, set_up, tear_down);
}
