/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/test.h"

enum { VOCAB = 64, NUM_SLOTS = 3, STRIDE = 40100, MAX_LOGPROBS = 20, NUM_THREADS = 2 };

struct fixture {
    struct ops *ops;
    void *scratch;
    struct token_history history; /* [NUM_SLOTS, STRIDE] */
    struct imbrex_logit_bias bias[VOCAB];
    struct imbrex_logprob top[MAX_LOGPROBS];
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    struct imbrex_error err;
    size_t num_bytes = sample_scratch_bytes(VOCAB, NUM_THREADS);
    if (fixture == NULL ||
        ops_create(NUM_THREADS, UINT32_MAX, NULL, 0, &fixture->ops, &err) != IMBREX_STATUS_OK) {
        free(fixture);
        return 1;
    }
    *state = fixture;
    fixture->scratch = aligned_alloc(ARENA_ALIGNMENT, num_bytes);
    fixture->history.stride = STRIDE;
    fixture->history.token_ids =
        calloc((size_t)NUM_SLOTS * STRIDE, sizeof(*fixture->history.token_ids));
    if (fixture->scratch == NULL || fixture->history.token_ids == NULL) {
        return 1;
    }
    memset(fixture->scratch, 0xa5, num_bytes); /* its contents mean nothing */
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    ops_destroy(fixture->ops);
    free(fixture->scratch);
    free(fixture->history.token_ids);
    free(fixture);
    return 0;
}

static struct sample_row plain(float temperature)
{
    return (struct sample_row){.num_tokens = 1,
                               .num_prompt_tokens = 1,
                               .target_id = -1,
                               .num_logprobs = -1,
                               .temperature = temperature,
                               .top_p = 1.0f,
                               .repetition_penalty = 1.0f,
                               .seed_low = 1};
}

static struct sample_result sample(struct fixture *fixture, const struct sample_row *row,
                                   const float *logits, int32_t num_ids)
{
    struct sample_result result = {-7, NAN, -7};
    ops_sample(fixture->ops, &(struct sample_params){.logits = logits,
                                                     .rows = row,
                                                     .bias = fixture->bias,
                                                     .history = fixture->history,
                                                     .results = &result,
                                                     .top_logprobs = fixture->top,
                                                     .scratch = fixture->scratch,
                                                     .num_logits_rows = 1,
                                                     .num_rows = 1,
                                                     .vocab_size = VOCAB,
                                                     .num_ids = num_ids,
                                                     .max_logprobs = MAX_LOGPROBS});
    return result;
}

/* The id at a position of the row, which must be one. */
static int32_t pick_at(struct fixture *fixture, struct sample_row row, const float *logits,
                       int32_t position)
{
    row.num_tokens = position;
    int32_t token_id = sample(fixture, &row, logits, VOCAB).token_id;
    assert_in_range(token_id, 0, VOCAB - 1);
    return token_id;
}

/* The id that follows these tokens of slot 0. */
static int32_t pick_after(struct fixture *fixture, struct sample_row row, const float *logits,
                          const int32_t *token_ids, int32_t num_tokens)
{
    memcpy(fixture->history.token_ids, token_ids, (size_t)num_tokens * sizeof(*token_ids));
    return pick_at(fixture, row, logits, num_tokens);
}

static void fill(float *logits, float value)
{
    for (int32_t id = 0; id < VOCAB; id++) {
        logits[id] = value;
    }
}

static void spread_logits(float *logits)
{
    for (int32_t i = 0; i < VOCAB; i++) {
        logits[i] = (float)((i * 37) % VOCAB) * 0.125f - 4.0f;
    }
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

/* Catches: a change of what a seed gives, which would break texts that were recorded. The ids are
 * of the first sampler, which worked on one row; positions 22 to 45, each third id seen before. */
static void test_recorded_draws(void **state)
{
    enum { NUM_DRAWS = 24, FIRST = 22 };
    struct fixture *fixture = *state;
    const struct {
        float temperature, top_p, min_p, repetition_penalty;
        int32_t top_k;
        uint64_t seed;
        int32_t expected[NUM_DRAWS];
    } cases[] = {
        {1.5f, 1.0f, 0.0f, 1.0f, 0, 1, {12, 24, 5,  17, 19, 12, 10, 46, 5,  48, 50, 15,
                                        36, 17, 29, 55, 27, 29, 57, 14, 43, 57, 57, 10}},
        {0.7f, 1.0f, 0.0f, 1.0f, 12, 0x123456789abcdef, {36, 38, 19, 24, 62, 24, 31, 19,
                                                         12, 38, 38, 5,  19, 62, 57, 36,
                                                         24, 5,  57, 31, 5,  12, 31, 36}},
        {1.5f, 0.6f, 0.0f, 1.0f, 0, 7, {31, 31, 38, 31, 19, 31, 50, 19, 38, 19, 43, 24,
                                        62, 12, 50, 62, 17, 19, 50, 19, 57, 50, 57, 5}},
        {1.0f, 1.0f, 0.2f, 1.0f, 0, 42, {19, 5,  24, 38, 62, 57, 31, 62, 12, 31, 57, 50,
                                         12, 12, 57, 43, 57, 5,  24, 36, 43, 57, 38, 50}},
        {2.0f, 0.8f, 0.1f, 1.3f, 20, UINT64_MAX, {31, 17, 12, 5,  10, 29, 17, 5,  57, 62, 43, 43,
                                                  43, 55, 57, 38, 29, 19, 12, 55, 5,  62, 19, 55}},
        {3.0f, 0.95f, 0.0f, 0.5f, 0, 99, {24, 3,  39, 60, 24, 51, 57, 34, 10, 3,  43, 48,
                                          12, 15, 12, 12, 24, 22, 38, 54, 30, 15, 60, 57}},
    };
    float logits[VOCAB];
    spread_logits(logits);
    for (int32_t i = 0; i < FIRST; i++) {
        fixture->history.token_ids[i] = 3 * i;
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sample_row row = plain(cases[i].temperature);
        row.num_prompt_tokens = 9;
        row.top_k = cases[i].top_k;
        row.top_p = cases[i].top_p;
        row.min_p = cases[i].min_p;
        row.repetition_penalty = cases[i].repetition_penalty;
        row.seed_low = (uint32_t)cases[i].seed;
        row.seed_high = (uint32_t)(cases[i].seed >> 32);
        for (int32_t draw = 0; draw < NUM_DRAWS; draw++) {
            fixture->history.token_ids[FIRST + draw] = 0; /* one of the ids seen */
            assert_int_equal(pick_at(fixture, row, logits, FIRST + draw), cases[i].expected[draw]);
        }
    }
}

/* Catches: an argmax that depends on the filters, or breaks a tie towards a higher id. */
static void test_greedy(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    struct sample_row row = plain(0.0f);
    row.top_k = 1;
    row.top_p = 0.1f;
    assert_int_equal(pick_at(fixture, row, logits, 1), 0);
    logits[9] = logits[40] = 2.0f;
    assert_int_equal(pick_at(fixture, row, logits, 1), 9);
}

/* Catches: a draw that depends on anything but seed, choice, position and logits; one that leaves
 * out the upper half of the seed, or the choice. */
static void test_draw_is_a_function_of_seed_choice_and_position(void **state)
{
    enum { NUM_DRAWS = 200 };
    struct fixture *fixture = *state;
    float logits[VOCAB];
    int32_t first[NUM_DRAWS];
    struct sample_row row = plain(1.5f);
    spread_logits(logits);
    for (int32_t i = 0; i < NUM_DRAWS; i++) {
        first[i] = pick_at(fixture, row, logits, i + 1);
    }
    for (int32_t i = NUM_DRAWS - 1; i >= 0; i--) {
        assert_int_equal(pick_at(fixture, row, logits, i + 1), first[i]);
    }
    struct sample_row others[3] = {row, row, row};
    others[0].seed_low = 2;
    others[1].seed_high = 1;
    others[2].choice_idx = 1;
    for (int32_t other = 0; other < 3; other++) {
        int32_t num_different = 0;
        for (int32_t i = 0; i < NUM_DRAWS; i++) {
            num_different += pick_at(fixture, others[other], logits, i + 1) != first[i];
        }
        assert_true(num_different > NUM_DRAWS / 2);
    }
}

/* Share of each id over many positions against the softmax of what the filters should keep:
 * 40,000 draws, 6 standard deviations. */
static void check_distribution(struct fixture *fixture, const struct sample_row *row,
                               const float *logits, const double *expected)
{
    enum { NUM_DRAWS = 40000 };
    int32_t counts[VOCAB] = {0};
    for (int32_t i = 0; i < NUM_DRAWS; i++) {
        counts[pick_at(fixture, *row, logits, i + 1)]++;
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
    struct sample_row row = plain(0.7f);
    spread_logits(logits);
    memset(is_kept, true, sizeof(is_kept));
    softmax(logits, is_kept, 0.7f, expected);
    check_distribution(fixture, &row, logits, expected);
}

/* Catches: a top-k that keeps k - 1 or k + 1 ids, or the wrong ones. */
static void test_top_k(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_kept[VOCAB];
    double expected[VOCAB];
    struct sample_row row = plain(2.0f);
    row.top_k = 5;
    spread_logits(logits);
    for (int32_t id = 0; id < VOCAB; id++) {
        is_kept[id] = rank_of(logits, id) < 5;
    }
    softmax(logits, is_kept, 2.0, expected);
    check_distribution(fixture, &row, logits, expected);
}

/* Catches: a top-p that leaves out the id that crosses p, is measured before top-k, or ignores the
 * temperature; a min-p measured against something else than the best id. */
static void test_top_p_and_min_p(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_kept[VOCAB];
    double expected[VOCAB];
    struct sample_row row = plain(1.5f);
    row.top_k = 12;
    row.top_p = 0.6f;
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
    check_distribution(fixture, &row, logits, expected);

    row = plain(1.5f);
    row.min_p = 0.5f;
    for (int32_t id = 0; id < VOCAB; id++) {
        double best = 63 * 0.125 - 4.0;
        is_kept[id] = exp((logits[id] - best) / 1.5) >= 0.5;
    }
    softmax(logits, is_kept, 1.5, expected);
    check_distribution(fixture, &row, logits, expected);
}

/* Catches: a penalty that raises negative logits, counts an id twice, leaves out the prompt or the
 * output, or is still there for the next row. */
static void test_repetition_penalty(void **state)
{
    struct fixture *fixture = *state;
    const int32_t tokens[] = {3, 3, 5}; /* the prompt is 3 */
    float logits[VOCAB];
    struct sample_row row = plain(0.0f);
    row.repetition_penalty = 2.0f;
    fill(logits, -10.0f);
    logits[3] = 4.0f;
    logits[5] = 2.5f;
    assert_int_equal(pick_after(fixture, row, logits, tokens + 2, 1), 3);
    assert_int_equal(pick_after(fixture, row, logits, tokens, 2), 5); /* 4 / 2 = 2 < 2.5 < 4 / 1 */
    assert_int_equal(pick_after(fixture, row, logits, tokens, 3), 3); /* 2.5 / 2; 4 / 4 if twice */
    logits[3] = -1.0f;
    logits[5] = -1.5f;
    logits[7] = -1.75f; /* unseen: beats -2 and -3 */
    assert_int_equal(pick_after(fixture, row, logits, tokens, 3), 7);
    row.repetition_penalty = 1.0f;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 3), 3);
}

/* Catches: a frequency penalty taken once, or a presence penalty taken for each time; either of
 * them for ids of the prompt; one with the wrong sign; the token behind num_tokens counted. */
static void test_output_penalties(void **state)
{
    struct fixture *fixture = *state;
    const int32_t tokens[] = {9, 9, 9, 9, 3, 3, 3, 5, 7, 7, 7, 7}; /* the prompt is the 9s */
    float logits[VOCAB];
    struct sample_row row = plain(0.0f);
    row.num_prompt_tokens = 4;
    row.frequency_penalty = 1.0f;
    fill(logits, -10.0f);
    logits[3] = 5.0f;
    logits[5] = 2.5f; /* 1.5 once it is there; 3 becomes 2 */
    logits[7] = 0.5f;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 7), 5);
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 3);
    logits[9] = 4.0f;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 9);
    row.num_prompt_tokens = 0;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 3); /* 9: 4 - 4 */

    row.num_prompt_tokens = 4;
    row.frequency_penalty = 0.0f;
    row.presence_penalty = 2.0f;
    logits[3] = 4.5f; /* 2.5 however often */
    logits[5] = 4.0f; /* 2 */
    logits[9] = 2.25f;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 3);
    logits[9] = 2.75f;
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 9);
    row.presence_penalty = -2.0f;
    logits[9] = 6.25f; /* 3 becomes 6.5 */
    assert_int_equal(pick_after(fixture, row, logits, tokens, 8), 3);
}

/* Catches: a bias that is not added, is added to the wrong row's ids, touches an id beyond num_ids,
 * or comes after the penalty: (2 + 2) / 2 = 2 and 2 / 2 + 2 = 3 lie on both sides of 2.5. */
static void test_bias(void **state)
{
    struct fixture *fixture = *state;
    const int32_t tokens[] = {3};
    float logits[VOCAB];
    struct sample_row row = plain(0.0f);
    fill(logits, -1.0f);
    logits[3] = 2.0f;
    logits[8] = 2.5f;
    fixture->bias[0] = (struct imbrex_logit_bias){8, -INFINITY}; /* of a row before */
    fixture->bias[1] = (struct imbrex_logit_bias){60, 99.0f};    /* beyond num_ids */
    fixture->bias[2] = (struct imbrex_logit_bias){3, 2.0f};
    row.bias_begin = 1;
    row.num_bias = 2;
    assert_int_equal(sample(fixture, &row, logits, 60).token_id, 3);
    assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, 60);
    row.repetition_penalty = 2.0f;
    fixture->history.token_ids[0] = tokens[0];
    assert_int_equal(sample(fixture, &row, logits, 60).token_id, 8);
    row.num_bias = 0;
    assert_int_equal(pick_after(fixture, plain(0.0f), logits, tokens, 1), 8);
    assert_float_equal(logits[3], 2.0f, 0.0f); /* the row itself is not written */
}

/* Catches: a forbidden id that is drawn after all, by argmax, by any filter, by a penalty that
 * turns it around, or because an allowed one is too unlikely; one that takes a place of top-k. */
static void test_forbidden_ids(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB];
    bool is_seen[VOCAB] = {false};
    spread_logits(logits);
    for (int32_t id = 0; id < VOCAB; id++) {
        fixture->history.token_ids[id] = id;
        fixture->bias[id] = (struct imbrex_logit_bias){id, -INFINITY};
    }
    for (int32_t option = 0; option < 6; option++) {
        struct sample_row row = plain(option == 0 ? 0.0f : 1.0f);
        row.num_bias = VOCAB - 1; /* all but the last id, by far the least likely */
        row.top_k = option == 2 ? 3 : 0;
        row.top_p = option == 3 ? 0.5f : 1.0f;
        row.min_p = option == 4 ? 0.9f : 0.0f;
        row.repetition_penalty = option == 5 ? 0.1f : 1.0f;
        row.frequency_penalty = option == 5 ? -2.0f : 0.0f;
        row.num_prompt_tokens = 0;
        logits[VOCAB - 1] = -1000.0f;
        for (int32_t position = VOCAB; position < VOCAB + 10; position++) {
            assert_int_equal(pick_at(fixture, row, logits, position), VOCAB - 1);
        }
        row.num_bias = VOCAB;
        assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, SAMPLE_ALL_FORBIDDEN);
    }
    struct sample_row row = plain(100.0f);
    row.num_bias = VOCAB - 4;
    row.top_k = 3;
    logits[VOCAB - 1] = -5.0f;
    for (int32_t position = 1; position < 200; position++) {
        is_seen[pick_at(fixture, row, logits, position)] = true;
    }
    int32_t num_seen = 0;
    for (int32_t id = 0; id < VOCAB; id++) {
        num_seen += is_seen[id];
        assert_true(!is_seen[id] || (id >= VOCAB - 4 && id != VOCAB - 1));
    }
    assert_int_equal(num_seen, 3);
}

/* Catches: a NaN or infinity that is sampled from or scored instead of reported, at any place; one
 * that only the penalty, or the bias, makes; an infinite logit beyond num_ids that is reported. */
static void test_non_finite(void **state)
{
    struct fixture *fixture = *state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int32_t places[] = {0, 31, VOCAB - 2};
    fixture->history.token_ids[0] = 31;
    for (int32_t i = 0; i < 3; i++) {
        for (int32_t j = 0; j < 3; j++) {
            for (int32_t k = 0; k < 3; k++) {
                float logits[VOCAB] = {0};
                struct sample_row row = plain(k == 0 ? 0.0f : 1.0f);
                row.target_id = k == 2 ? 5 : -1;
                row.num_logprobs = k == 2 ? 3 : -1;
                logits[places[j]] = bad[i];
                assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, SAMPLE_BAD_LOGITS);
                /* Not even where the id is forbidden. */
                fixture->bias[0] = (struct imbrex_logit_bias){places[j], -INFINITY};
                row.num_bias = 1;
                assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, SAMPLE_BAD_LOGITS);
                logits[places[j]] = 0.0f;
                logits[VOCAB - 1] = bad[i];
                assert_in_range(sample(fixture, &row, logits, VOCAB - 1).token_id, 0, VOCAB - 2);
            }
        }
    }
    /* Finite, but not after a step. */
    for (int32_t k = 0; k < 8; k++) {
        float logits[VOCAB] = {0};
        struct sample_row row = plain((float)(k % 2));
        bool is_high = (k & 2) == 0;
        logits[31] = is_high ? 3e38f : -3e38f;
        if (k < 4) {
            row.repetition_penalty = is_high ? 0.01f : 100.0f;
        } else {
            fixture->bias[0] = (struct imbrex_logit_bias){31, logits[31]};
            row.num_bias = 1;
        }
        assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, SAMPLE_BAD_LOGITS);
    }
}

/* Catches: an id beyond num_ids that is picked although it has the best logit, that a penalty
 * changes, or that has a share in logprobs. */
static void test_masks_ids_beyond_the_tokenizer(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    fixture->history.token_ids[0] = 20; /* a prompt may hold it */
    logits[20] = 50.0f;
    logits[10] = 30.0f;
    for (int32_t i = 0; i < 3; i++) {
        struct sample_row row = plain(i == 0 ? 0.0f : 1.0f);
        row.num_logprobs = 20;
        row.repetition_penalty = i == 2 ? 1.5f : 1.0f;
        struct sample_result result = sample(fixture, &row, logits, 20);
        assert_int_equal(result.token_id, 10);
        assert_float_equal(result.logprob, 0.0f, 1e-6f);
        assert_int_equal(result.num_top, 20);
        for (int32_t rank = 0; rank < 20; rank++) {
            assert_in_range(fixture->top[rank].token_id, 0, 19);
        }
    }
    struct sample_row row = plain(1.0f);
    row.target_id = 20;
    row.num_logprobs = 0;
    struct sample_result result = sample(fixture, &row, logits, 20);
    assert_int_equal(result.token_id, 20);
    assert_true(result.logprob == -INFINITY);
}

/* Catches: logprobs of the distribution after bias, penalty or temperature; alternatives in another
 * order than the likeliest and then the lowest id first; entries written beyond those there are. */
static void test_logprobs(void **state)
{
    struct fixture *fixture = *state;
    /* exp of them sums to 16; the rest is nothing beside it. */
    const int32_t ids[] = {40, 7, 21, 3};
    const double shares[] = {8.0, 4.0, 2.0, 2.0};
    const int32_t ordered[] = {40, 7, 3, 21};
    float logits[VOCAB];
    fill(logits, -200.0f);
    for (int32_t i = 0; i < 4; i++) {
        logits[ids[i]] = (float)log(shares[i]);
    }
    struct sample_row row = plain(0.0f);
    row.num_logprobs = 4;
    row.num_bias = 1;
    row.repetition_penalty = 3.0f;
    fixture->history.token_ids[0] = 7;
    fixture->bias[0] = (struct imbrex_logit_bias){40, -INFINITY};
    fixture->top[4] = (struct imbrex_logprob){-5, 5.0f};
    struct sample_result result = sample(fixture, &row, logits, VOCAB);
    assert_int_equal(result.token_id, 3); /* 40 is forbidden, 7 penalised to less than log 2 */
    assert_float_equal(result.logprob, log(2.0 / 16.0), 1e-6);
    assert_int_equal(result.num_top, 4);
    for (int32_t rank = 0; rank < 4; rank++) {
        const double expected[] = {8.0, 4.0, 2.0, 2.0};
        assert_int_equal(fixture->top[rank].token_id, ordered[rank]);
        assert_float_equal(fixture->top[rank].logprob, log(expected[rank] / 16.0), 1e-6);
    }
    assert_int_equal(fixture->top[4].token_id, -5);

    row.num_logprobs = 20;
    assert_int_equal(sample(fixture, &row, logits, 8).num_top, 8);
    row.num_logprobs = 0;
    result = sample(fixture, &row, logits, VOCAB);
    assert_float_equal(result.logprob, log(2.0 / 16.0), 1e-6);
    assert_int_equal(result.num_top, 0);
}

/* Catches: a scored position that draws, or writes into the history. */
static void test_target(void **state)
{
    struct fixture *fixture = *state;
    float logits[VOCAB] = {0};
    struct sample_row row = plain(1.0f);
    row.target_id = 5;
    row.num_logprobs = 1;
    row.is_stored = 1;
    row.slot = 1;
    fixture->history.token_ids[STRIDE + 1] = 99;
    logits[6] = 1.0f;
    struct sample_result result = sample(fixture, &row, logits, VOCAB);
    assert_int_equal(result.token_id, 5);
    assert_float_equal(result.logprob, -log(63.0 + exp(1.0)), 1e-6);
    assert_int_equal(result.num_top, 1);
    assert_int_equal(fixture->top[0].token_id, 6);
    assert_int_equal(fixture->history.token_ids[STRIDE + 1], 99);
}

/* Catches: a drawn id that is stored at another place, in another slot when its own is full, or
 * although it is not to be; a row without a token that leaves something in the history which a
 * step already under way would read as an id. */
static void test_storing(void **state)
{
    struct fixture *fixture = *state;
    int32_t *slot = fixture->history.token_ids + 2 * STRIDE;
    float logits[VOCAB] = {0};
    struct sample_row row = plain(0.0f);
    row.slot = 2;
    row.num_tokens = 4;
    logits[33] = 1.0f;
    for (int32_t position = 0; position < 8; position++) {
        slot[position] = 50 + position;
    }
    (void)sample(fixture, &row, logits, VOCAB);
    assert_int_equal(slot[4], 54);
    row.is_stored = 1;
    (void)sample(fixture, &row, logits, VOCAB);
    for (int32_t position = 0; position < 8; position++) {
        assert_int_equal(slot[position], position == 4 ? 33 : 50 + position);
    }
    logits[1] = NAN;
    (void)sample(fixture, &row, logits, VOCAB);
    assert_int_equal(slot[4], 0);
    row.num_tokens = STRIDE - 1; /* the last place */
    logits[1] = 0.0f;
    (void)sample(fixture, &row, logits, VOCAB);
    assert_int_equal(slot[STRIDE - 1], 33);
    row.slot = 1;
    row.num_tokens = STRIDE; /* none left: the next slot begins there */
    assert_int_equal(sample(fixture, &row, logits, VOCAB).token_id, 33);
    assert_int_equal(slot[0], 50);
}

/* Catches: a row that reads another row's logits when they begin in the middle of the step, or
 * writes to another row's place among the results. */
static void test_rows_of_a_part(void **state)
{
    struct fixture *fixture = *state;
    float logits[2 * VOCAB] = {0};
    struct sample_row rows[3];
    struct sample_result results[3];
    struct imbrex_logprob top[3 * 2];
    logits[11] = 1.0f;
    logits[VOCAB + 22] = 1.0f;
    for (int32_t i = 0; i < 3; i++) {
        rows[i] = plain(0.0f);
        rows[i].logits_row = i == 0 ? 5 : 6;
        rows[i].num_logprobs = i;
    }
    ops_sample(fixture->ops, &(struct sample_params){.logits = logits,
                                                     .rows = rows,
                                                     .history = fixture->history,
                                                     .results = results,
                                                     .top_logprobs = top,
                                                     .scratch = fixture->scratch,
                                                     .logits_row_begin = 5,
                                                     .num_logits_rows = 2,
                                                     .num_rows = 3,
                                                     .vocab_size = VOCAB,
                                                     .num_ids = VOCAB,
                                                     .max_logprobs = 2});
    assert_int_equal(results[0].token_id, 11);
    assert_int_equal(results[1].token_id, 22);
    assert_int_equal(results[2].token_id, 22);
    assert_int_equal(results[2].num_top, 2);
    assert_int_equal(top[2].token_id, 22);
    assert_int_equal(top[4].token_id, 22);
    assert_int_equal(top[5].token_id, 0);
}

/* Catches: an id that is not stored, one that is read from another position or slot. */
static void test_history(void **state)
{
    struct fixture *fixture = *state;
    const int32_t token_ids[] = {12, -1, 0, -1};
    const int32_t slots[] = {0, 2, 1, 0};
    const int32_t positions[] = {STRIDE - 1, 6, 0, 3};
    int32_t *history = fixture->history.token_ids;
    int32_t ids[4] = {-9, -9, -9, -9};
    history[2 * STRIDE + 6] = 77;
    history[STRIDE] = 5;
    history[3] = 31;
    history[4] = 32;
    ops_history(fixture->ops, &(struct history_params){.token_ids = token_ids,
                                                       .slots = slots,
                                                       .positions = positions,
                                                       .history = fixture->history,
                                                       .d = ids,
                                                       .num_tokens = 4});
    const int32_t expected[] = {12, 77, 0, 31};
    assert_memory_equal(ids, expected, sizeof(expected));
    assert_int_equal(history[STRIDE - 1], 12);
    assert_int_equal(history[STRIDE], 0);
    assert_int_equal(history[3], 31);
    assert_int_equal(history[4], 32);
    assert_int_equal(history[2 * STRIDE + 6], 77);
}

/* Catches: threads whose scratch overlaps or is not aligned. */
static void test_scratch_bytes(void **state)
{
    (void)state;
    for (int32_t vocab_size = 1; vocab_size < 300; vocab_size += 13) {
        size_t one = sample_scratch_bytes(vocab_size, 1);
        assert_int_equal(one % ARENA_ALIGNMENT, 0);
        assert_int_equal(sample_scratch_bytes(vocab_size, 7), 7 * one);
        assert_true(one >= (size_t)vocab_size * 24);
    }
}

int run_sample_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_recorded_draws),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_draw_is_a_function_of_seed_choice_and_position),
        cmocka_unit_test(test_temperature),
        cmocka_unit_test(test_top_k),
        cmocka_unit_test(test_top_p_and_min_p),
        cmocka_unit_test(test_repetition_penalty),
        cmocka_unit_test(test_output_penalties),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_forbidden_ids),
        cmocka_unit_test(test_non_finite),
        cmocka_unit_test(test_masks_ids_beyond_the_tokenizer),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_target),
        cmocka_unit_test(test_storing),
        cmocka_unit_test(test_rows_of_a_part),
        cmocka_unit_test(test_history),
        cmocka_unit_test(test_scratch_bytes),
    };
    return cmocka_run_group_tests_name("sample", tests, set_up, tear_down);
}
