/* SPDX-License-Identifier: Apache-2.0 */
/* Steps made by hand, and what the flat arrays must hold for them. */
#include "engine/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/test.h"

#define CANARY 0x5a

/* A sequence whose id at position p is 1000 * number + p, unknown to the host from first_unknown
 * on. Draws have num_bias biases and num_logprobs alternatives, scored positions
 * num_scored_logprobs. */
struct test_sequence {
    struct sequence sequence; /* first: the source gets it */
    int32_t number, first_unknown, num_bias, num_logprobs, num_scored_logprobs;
};

static int32_t token_id(const struct sequence *sequence, int32_t position)
{
    const struct test_sequence *owner = (const struct test_sequence *)(const void *)sequence;
    return position < owner->first_unknown ? 1000 * owner->number + position : -1;
}

static void fill_sample_row(const struct sequence *sequence, const struct step_row *row,
                            int32_t draw_idx, struct sample_row *sample_row,
                            struct imbrex_logit_bias *bias)
{
    const struct test_sequence *owner = (const struct test_sequence *)(const void *)sequence;
    assert_ptr_equal(row->sequence, sequence);
    sample_row->choice_idx = draw_idx;
    sample_row->seed_low = (uint32_t)owner->number;
    sample_row->num_logprobs = owner->num_scored_logprobs;
    if (sample_row->target_id < 0) {
        sample_row->num_logprobs = owner->num_logprobs;
        sample_row->num_bias = owner->num_bias;
        for (int32_t i = 0; i < owner->num_bias; i++) {
            bias[i] = (struct imbrex_logit_bias){i, (float)(100 * owner->number)};
        }
    }
}

static const struct batch_source source = {token_id, fill_sample_row};

struct batch {
    struct batch_limits limits;
    struct batch_layout layout;
    unsigned char *memory; /* [max_bytes], then a canary of 64 bytes */
    size_t max_bytes;
};

static struct batch fill(const struct batch_limits *limits, const int32_t *block_tables,
                         struct step_row *rows, int32_t num_rows)
{
    struct step_plan plan = {.rows = rows, .num_rows = num_rows};
    struct batch batch = {.limits = *limits};
    assert_true(batch_max_bytes(limits, &batch.max_bytes));
    size_t num_bytes = (batch.max_bytes + 63) / 64 * 64 + 64;
    batch.memory = aligned_alloc(64, num_bytes);
    assert_non_null(batch.memory);
    memset(batch.memory, CANARY, num_bytes);
    batch_fill(&plan, limits, block_tables, &source, batch.memory, &batch.layout);
    for (size_t i = batch.max_bytes; i < num_bytes; i++) {
        assert_int_equal(batch.memory[i], CANARY);
    }
    return batch;
}

/* Catches: arrays that overlap, leave holes of more than the alignment, stand in another order than
 * the header says, or do not end where num_bytes says. */
static void expect_packed(const struct batch *batch)
{
    const struct batch_layout *layout = &batch->layout;
    size_t tokens = (size_t)layout->num_tokens * 4, seqs = (size_t)layout->num_seqs * 4;
    const size_t pieces[][2] = {
        {layout->token_ids, tokens},
        {layout->positions, tokens},
        {layout->slot_mapping, tokens},
        {layout->history_slots, tokens},
        {layout->seq_idx, tokens},
        {layout->query_begin, seqs + 4},
        {layout->seq_lens, seqs},
        {layout->block_tables, seqs * (size_t)layout->max_blocks},
        {layout->logits_tokens, (size_t)layout->num_logits_rows * 4},
        {layout->sample_rows, (size_t)layout->num_samples * sizeof(struct sample_row)},
        {layout->bias, (size_t)layout->num_bias * sizeof(struct imbrex_logit_bias)},
    };
    size_t end = 0;
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        assert_int_equal(pieces[i][0], (end + 63) / 64 * 64);
        end = pieces[i][0] + pieces[i][1];
    }
    assert_int_equal(layout->num_bytes, end);
    assert_true(layout->num_bytes <= batch->max_bytes);
}

static void expect_ints(const struct batch *batch, size_t begin, const int32_t *expected,
                        int32_t num_expected)
{
    const int32_t *ints = (const int32_t *)(const void *)(batch->memory + begin);
    for (int32_t i = 0; i < num_expected; i++) {
        assert_int_equal(ints[i], expected[i]);
    }
}

/* Catches: tokens at the wrong position, slot, sequence or row of the history; a block table of
 * another slot, or of the scheduler's width instead of the step's; a decode row, a chunk of a
 * prompt and several query tokens of one sequence that do not get along. */
static void test_mixed_step(void **state)
{
    (void)state;
    const struct batch_limits limits = {
        .max_tokens = 32, .max_seqs = 4, .max_blocks = 3, .max_samples = 40};
    /* By slot; -9: not of the sequence, never read. */
    const int32_t block_tables[] = {5, 6, -9, -9, -9, -9, 7, -9, -9, 2, 9, -9};
    struct test_sequence decode = {.sequence = {.num_prompt_tokens = 4},
                                   .number = 1,
                                   .first_unknown = 17,
                                   .num_bias = 2,
                                   .num_logprobs = -1};
    struct test_sequence chunk = {
        .sequence = {.num_prompt_tokens = 40}, .number = 2, .first_unknown = 40, .num_logprobs = 3};
    struct test_sequence drafts = {.sequence = {.num_prompt_tokens = 14},
                                   .number = 3,
                                   .first_unknown = 16,
                                   .num_bias = 1,
                                   .num_logprobs = 5};
    struct step_row rows[] = {
        {.sequence = &decode.sequence,
         .slot = 3,
         .position = 17,
         .num_tokens = 1,
         .first_scored = 18,
         .num_draws = 1},
        {.sequence = &chunk.sequence,
         .slot = 2,
         .position = 3,
         .num_tokens = 5,
         .first_scored = 8,
         .num_draws = 0},
        {.sequence = &drafts.sequence,
         .slot = 0,
         .position = 14,
         .num_tokens = 3,
         .first_scored = 17,
         .num_draws = 1},
    };
    struct batch batch = fill(&limits, block_tables, rows, 3);
    const struct batch_layout *layout = &batch.layout;
    expect_packed(&batch);
    assert_int_equal(layout->num_tokens, 9);
    assert_int_equal(layout->num_seqs, 3);
    assert_int_equal(layout->max_blocks, 2);
    assert_int_equal(layout->num_logits_rows, 2);
    assert_int_equal(layout->num_samples, 2);
    assert_int_equal(layout->num_bias, 3);
    assert_int_equal(layout->max_logprobs, 5);
    const int32_t token_ids[] = {-1, 2003, 2004, 2005, 2006, 2007, 3014, 3015, -1};
    const int32_t positions[] = {17, 3, 4, 5, 6, 7, 14, 15, 16};
    const int32_t slots[] = {9 * 16 + 1, 7 * 16 + 3,  7 * 16 + 4,  7 * 16 + 5, 7 * 16 + 6,
                             7 * 16 + 7, 5 * 16 + 14, 5 * 16 + 15, 6 * 16};
    const int32_t history_slots[] = {3, 2, 2, 2, 2, 2, 0, 0, 0};
    const int32_t seq_idx[] = {0, 1, 1, 1, 1, 1, 2, 2, 2};
    const int32_t query_begin[] = {0, 1, 6, 9};
    const int32_t seq_lens[] = {18, 8, 17};
    const int32_t tables[] = {2, 9, 7, 0, 5, 6};
    const int32_t logits_tokens[] = {0, 8};
    expect_ints(&batch, layout->token_ids, token_ids, 9);
    expect_ints(&batch, layout->positions, positions, 9);
    expect_ints(&batch, layout->slot_mapping, slots, 9);
    expect_ints(&batch, layout->history_slots, history_slots, 9);
    expect_ints(&batch, layout->seq_idx, seq_idx, 9);
    expect_ints(&batch, layout->query_begin, query_begin, 4);
    expect_ints(&batch, layout->seq_lens, seq_lens, 3);
    expect_ints(&batch, layout->block_tables, tables, 6);
    expect_ints(&batch, layout->logits_tokens, logits_tokens, 2);

    const struct sample_row *samples =
        BATCH_ARRAY(struct sample_row, batch.memory, layout, sample_rows);
    assert_int_equal(samples[0].logits_row, 0);
    assert_int_equal(samples[0].slot, 3);
    assert_int_equal(samples[0].num_tokens, 18);
    assert_int_equal(samples[0].num_prompt_tokens, 4);
    assert_int_equal(samples[0].target_id, -1);
    assert_int_equal(samples[0].bias_begin, 0);
    assert_int_equal(samples[0].num_bias, 2);
    assert_int_equal(samples[0].seed_low, 1);
    assert_int_equal(samples[1].logits_row, 1);
    assert_int_equal(samples[1].slot, 0);
    assert_int_equal(samples[1].num_tokens, 17);
    assert_int_equal(samples[1].bias_begin, 2);
    assert_int_equal(samples[1].num_bias, 1);
    const struct imbrex_logit_bias *bias =
        BATCH_ARRAY(struct imbrex_logit_bias, batch.memory, layout, bias);
    assert_true(bias[0].bias == 100.0f && bias[1].bias == 100.0f && bias[2].bias == 300.0f);
    assert_true(bias[0].token_id == 0 && bias[1].token_id == 1 && bias[2].token_id == 0);
    free(batch.memory);
}

/* Catches: logits computed or biases stored once for each of n draws, draws that cannot be told
 * apart, biases of one sequence used for another. */
static void test_many_draws(void **state)
{
    (void)state;
    const struct batch_limits limits = {
        .max_tokens = 8, .max_seqs = 2, .max_blocks = 1, .max_samples = 8};
    const int32_t block_tables[] = {0, 1};
    struct test_sequence many = {.sequence = {.num_prompt_tokens = 3},
                                 .number = 1,
                                 .first_unknown = 3,
                                 .num_bias = 1,
                                 .num_logprobs = -1};
    struct test_sequence one = many;
    one.number = 2;
    struct step_row rows[] = {
        {.sequence = &many.sequence, .slot = 0, .num_tokens = 3, .first_scored = 3, .num_draws = 4},
        {.sequence = &one.sequence, .slot = 1, .num_tokens = 3, .first_scored = 3, .num_draws = 1},
    };
    struct batch batch = fill(&limits, block_tables, rows, 2);
    expect_packed(&batch);
    assert_int_equal(batch.layout.num_logits_rows, 2);
    assert_int_equal(batch.layout.num_samples, 5);
    assert_int_equal(batch.layout.num_bias, 2);
    assert_int_equal(batch.layout.max_logprobs, 0);
    expect_ints(&batch, batch.layout.logits_tokens, (const int32_t[]){2, 5}, 2);
    const struct sample_row *samples =
        BATCH_ARRAY(struct sample_row, batch.memory, &batch.layout, sample_rows);
    const struct imbrex_logit_bias *bias =
        BATCH_ARRAY(struct imbrex_logit_bias, batch.memory, &batch.layout, bias);
    for (int32_t i = 0; i < 5; i++) {
        assert_int_equal(samples[i].logits_row, i == 4);
        assert_int_equal(samples[i].choice_idx, i == 4 ? 0 : i);
        assert_int_equal(samples[i].bias_begin, i == 4);
        assert_int_equal(samples[i].num_bias, 1);
    }
    assert_true(bias[0].bias == 100.0f && bias[1].bias == 200.0f);
    free(batch.memory);
}

/* Catches: a scored position that is off by one, scored and drawn, scored against nothing at the
 * prompt's end, or out of order with the others. */
static void test_scored_positions(void **state)
{
    (void)state;
    const struct batch_limits limits = {
        .max_tokens = 32, .max_seqs = 4, .max_blocks = 1, .max_samples = 32};
    const int32_t block_tables[] = {0, 1, 2, 3};
    struct test_sequence sequences[4];
    for (int32_t i = 0; i < 4; i++) {
        sequences[i] = (struct test_sequence){.sequence = {.num_prompt_tokens = 8},
                                              .number = i + 1,
                                              .first_unknown = 8,
                                              .num_bias = 1,
                                              .num_logprobs = -1,
                                              .num_scored_logprobs = 2};
    }
    struct step_row rows[] = {
        /* Inside the prompt, from the third token of the chunk on. */
        {.sequence = &sequences[0].sequence,
         .slot = 0,
         .position = 1,
         .num_tokens = 4,
         .first_scored = 3},
        /* Up to the end of the prompt, where two are drawn. */
        {.sequence = &sequences[1].sequence,
         .slot = 1,
         .position = 5,
         .num_tokens = 3,
         .first_scored = 5,
         .num_draws = 2},
        /* Up to the end of the prompt, where nothing is drawn. */
        {.sequence = &sequences[2].sequence,
         .slot = 2,
         .position = 5,
         .num_tokens = 3,
         .first_scored = 5},
        /* Only its last token, which has no successor. */
        {.sequence = &sequences[3].sequence,
         .slot = 3,
         .position = 6,
         .num_tokens = 2,
         .first_scored = 7},
    };
    assert_int_equal(batch_num_scored(&rows[0]), 2);
    assert_int_equal(batch_num_scored(&rows[1]), 2);
    assert_int_equal(batch_num_scored(&rows[2]), 2);
    assert_int_equal(batch_num_scored(&rows[3]), 0);
    struct batch batch = fill(&limits, block_tables, rows, 4);
    expect_packed(&batch);
    const struct {
        int32_t token, logits_row, num_tokens, target_id;
    } expected[] = {
        {2, 0, 4, 1004}, {3, 1, 5, 1005}, {4, 2, 6, 2006}, {5, 3, 7, 2007},
        {6, 4, 8, -1},   {6, 4, 8, -1},   {7, 5, 6, 3006}, {8, 6, 7, 3007},
    };
    assert_int_equal(batch.layout.num_samples, 8);
    assert_int_equal(batch.layout.num_logits_rows, 7);
    assert_int_equal(batch.layout.num_bias, 1); /* of the draws: scores are the model's own */
    assert_int_equal(batch.layout.max_logprobs, 2);
    const struct sample_row *samples =
        BATCH_ARRAY(struct sample_row, batch.memory, &batch.layout, sample_rows);
    const int32_t *logits_tokens = BATCH_ARRAY(int32_t, batch.memory, &batch.layout, logits_tokens);
    for (int32_t i = 0; i < 8; i++) {
        assert_int_equal(samples[i].logits_row, expected[i].logits_row);
        assert_int_equal(logits_tokens[samples[i].logits_row], expected[i].token);
        assert_int_equal(samples[i].num_tokens, expected[i].num_tokens);
        assert_int_equal(samples[i].target_id, expected[i].target_id);
    }
    free(batch.memory);
}

/* Catches: room for less than the largest step: every limit is reached, every token has logits, and
 * every sequence brings all the biases it may. What lies behind the memory is checked by `fill`. */
static void test_limits_are_reached(void **state)
{
    (void)state;
    enum { TOKENS = 33, SEQS = 3, BLOCKS = 2, SAMPLES = 40 };
    const struct batch_limits limits = {
        .max_tokens = TOKENS, .max_seqs = SEQS, .max_blocks = BLOCKS, .max_samples = SAMPLES};
    const int32_t block_tables[] = {0, 1, 2, 3, 4, 5};
    struct test_sequence sequences[SEQS];
    struct step_row rows[SEQS];
    for (int32_t i = 0; i < SEQS; i++) {
        sequences[i] = (struct test_sequence){.sequence = {.num_prompt_tokens = 32},
                                              .number = i,
                                              .first_unknown = 32,
                                              .num_bias = BATCH_MAX_BIAS,
                                              .num_logprobs = IMBREX_MAX_LOGPROBS};
        rows[i] = (struct step_row){.sequence = &sequences[i].sequence,
                                    .slot = i,
                                    .position = i == 0 ? 1 : 31,
                                    .num_tokens = i == 0 ? 31 : 1,
                                    .first_scored = i == 0 ? 1 : 32,
                                    .num_draws = i == 0 ? 8 : 1};
    }
    struct batch batch = fill(&limits, block_tables, rows, SEQS);
    expect_packed(&batch);
    assert_int_equal(batch.layout.num_tokens, TOKENS);
    assert_int_equal(batch.layout.num_samples, SAMPLES);
    assert_int_equal(batch.layout.num_logits_rows, TOKENS);
    assert_int_equal(batch.layout.max_blocks, BLOCKS);
    assert_int_equal(batch.layout.num_bias, SEQS * BATCH_MAX_BIAS);
    free(batch.memory);
}

/* Catches: padding that is missing, is stored or sampled, or has a shape that depends on the step's
 * sequences; steps that are padded although they do not only decode, or that are not although they
 * do. */
static void test_padding(void **state)
{
    (void)state;
    const struct batch_limits limits = {
        .max_tokens = 7, .max_seqs = 6, .max_blocks = 9, .max_samples = 8, .pads_decode = true};
    int32_t block_tables[6 * 9];
    struct test_sequence sequences[6];
    struct step_row rows[6];
    struct batch_layout before = {0};
    for (int32_t i = 0; i < 6 * 9; i++) {
        block_tables[i] = 100 + i;
    }
    for (int32_t i = 0; i < 6; i++) {
        sequences[i] = (struct test_sequence){
            .sequence = {.num_prompt_tokens = 4}, .number = i, .num_logprobs = -1};
        rows[i] = (struct step_row){.sequence = &sequences[i].sequence,
                                    .slot = 5 - i,
                                    .position = 64 + i,
                                    .num_tokens = 1,
                                    .first_scored = 65 + i,
                                    .num_draws = 1};
    }
    for (int32_t num_rows = 3; num_rows <= 4; num_rows++) {
        struct batch batch = fill(&limits, block_tables, rows, num_rows);
        struct batch_layout *layout = &batch.layout;
        expect_packed(&batch);
        assert_true(layout->is_padded);
        assert_int_equal(layout->num_padding, 4 - num_rows);
        assert_int_equal(layout->num_tokens, 4);
        assert_int_equal(layout->num_seqs, 4);
        assert_int_equal(layout->num_logits_rows, 4);
        assert_int_equal(layout->num_samples, 4);
        assert_int_equal(layout->max_blocks, 8);
        assert_int_equal(layout->max_query, 1);
        const int32_t last = num_rows - 1;
        expect_ints(&batch, layout->query_begin, (const int32_t[]){0, 1, 2, 3, 4}, 5);
        expect_ints(&batch, layout->seq_idx, (const int32_t[]){0, 1, 2, 3}, 4);
        expect_ints(&batch, layout->logits_tokens, (const int32_t[]){0, 1, 2, 3}, 4);
        expect_ints(&batch, layout->history_slots + 4 * (size_t)last,
                    (const int32_t[]){5 - last, -1}, 5 - num_rows);
        expect_ints(&batch, layout->positions + 4 * (size_t)last, (const int32_t[]){64 + last, 0},
                    5 - num_rows);
        expect_ints(&batch, layout->seq_lens + 4 * (size_t)last, (const int32_t[]){65 + last, 1},
                    5 - num_rows);
        expect_ints(&batch, layout->token_ids + 4 * (size_t)last, (const int32_t[]){-1, 0},
                    5 - num_rows);
        int32_t block = 100 + 9 * (5 - last) + 4;
        expect_ints(&batch, layout->slot_mapping + 4 * (size_t)last,
                    (const int32_t[]){16 * block + last, -1}, 5 - num_rows);
        expect_ints(&batch, layout->block_tables + 4 * 8 * (size_t)last + 16,
                    (const int32_t[]){block, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                    num_rows == 3 ? 12 : 4);
        const struct sample_row *samples =
            BATCH_ARRAY(struct sample_row, batch.memory, layout, sample_rows);
        assert_int_equal(samples[last].logits_row, last);
        assert_true(num_rows == 4 || samples[3].logits_row < 0);
        layout->num_padding = 0;
        if (num_rows > 3) {
            assert_memory_equal(layout, &before, sizeof(before));
        }
        before = *layout;
        free(batch.memory);
    }
    /* No more than the limits, whatever the next count would be. */
    struct batch batch = fill(&limits, block_tables, rows, 5);
    expect_packed(&batch);
    assert_int_equal(batch.layout.num_seqs, 6);
    assert_int_equal(batch.layout.num_padding, 1);
    free(batch.memory);

    for (int32_t i = 0; i < 3; i++) {
        struct step_row changed[3] = {rows[0], rows[1], rows[2]};
        changed[1].num_draws = i == 0 ? 2 : i == 1 ? 0 : 1;
        changed[1].num_tokens = i == 2 ? 2 : 1;
        batch = fill(&limits, block_tables, changed, 3);
        expect_packed(&batch);
        assert_false(batch.layout.is_padded);
        assert_int_equal(batch.layout.num_seqs, 3);
        assert_int_equal(batch.layout.max_blocks, 5);
        free(batch.memory);
    }
}

/* Catches: an empty step that reads a row, and sizes that wrap around instead of failing. */
static void test_edges(void **state)
{
    (void)state;
    const struct batch_limits limits = {
        .max_tokens = 1, .max_seqs = 1, .max_blocks = 1, .max_samples = 1};
    struct batch batch = fill(&limits, NULL, NULL, 0);
    expect_packed(&batch);
    assert_int_equal(batch.layout.num_tokens, 0);
    assert_int_equal(batch.layout.num_samples, 0);
    expect_ints(&batch, batch.layout.query_begin, (const int32_t[]){0}, 1);
    free(batch.memory);

    size_t num_bytes = 7;
    const struct batch_limits many_seqs = {
        .max_tokens = 1, .max_seqs = INT32_MAX, .max_blocks = 1, .max_samples = 1};
    assert_false(batch_max_bytes(&many_seqs, &num_bytes));
    assert_int_equal(num_bytes, 7);
}

int run_batch_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixed_step),       cmocka_unit_test(test_many_draws),
        cmocka_unit_test(test_scored_positions), cmocka_unit_test(test_limits_are_reached),
        cmocka_unit_test(test_padding),          cmocka_unit_test(test_edges),
    };
    return cmocka_run_group_tests_name("batch", tests, NULL, NULL);
}
