/* SPDX-License-Identifier: Apache-2.0 */
/* A first look at the plan's rows says where each array begins, a second one fills them. Only the
 * biases, whose number their owners say, grow while they are written: they come last. */
#include "engine/batch.h"

#include <assert.h>
#include <string.h>

#include "base/memory.h"

bool batch_max_bytes(const struct batch_limits *limits, size_t *num_bytes)
{
    size_t max_tokens = (size_t)limits->max_tokens;
    size_t max_ids = max_tokens + (size_t)limits->max_history;
    size_t max_seqs = (size_t)limits->max_seqs;
    size_t max_samples = (size_t)limits->max_samples;
    size_t max_bias;
    size_t max_table;
    if (!size_mul(max_seqs, BATCH_MAX_BIAS, &max_bias) || max_bias > INT32_MAX ||
        !size_mul(max_seqs, (size_t)limits->max_blocks, &max_table)) {
        return false;
    }
    struct arena arena = {0};
    (void)arena_take(&arena, max_ids, sizeof(int32_t));      /* token_ids */
    (void)arena_take(&arena, max_ids, sizeof(int32_t));      /* positions */
    (void)arena_take(&arena, max_tokens, sizeof(int32_t));   /* slot_mapping */
    (void)arena_take(&arena, max_ids, sizeof(int32_t));      /* history_slots */
    (void)arena_take(&arena, max_tokens, sizeof(int32_t));   /* seq_idx */
    (void)arena_take(&arena, max_seqs + 1, sizeof(int32_t)); /* query_begin */
    (void)arena_take(&arena, max_seqs, sizeof(int32_t));     /* seq_lens */
    (void)arena_take(&arena, max_table, sizeof(int32_t));
    (void)arena_take(&arena, max_tokens, sizeof(int32_t)); /* logits_tokens */
    (void)arena_take(&arena, max_samples, sizeof(struct sample_row));
    (void)arena_take(&arena, max_bias, sizeof(struct imbrex_logit_bias));
    if (arena.overflowed) {
        return false;
    }
    *num_bytes = arena.num_used;
    return true;
}

int32_t batch_num_scored(const struct step_row *row)
{
    int32_t end = row->position + row->num_tokens - (row->num_draws > 0 ? 1 : 0);
    int32_t last = row->sequence->num_prompt_tokens - 1;
    end = end < last ? end : last;
    return end > row->first_scored ? end - row->first_scored : 0;
}

/* Begins an array behind those so far; returns where. */
static size_t append_array(struct batch_layout *layout, size_t count, size_t element_bytes)
{
    size_t begin = (layout->num_bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    layout->num_bytes = begin + count * element_bytes;
    return begin;
}

static int32_t row_num_blocks(const struct step_row *row)
{
    return (row->position + row->num_tokens + KV_BLOCK_SIZE - 1) / KV_BLOCK_SIZE;
}

/* The next count of sequences: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... */
static int32_t next_bucket(int32_t bucket)
{
    bool is_power_of_two = (bucket & (bucket - 1)) == 0;
    if (bucket < 16) {
        return 2 * bucket;
    }
    return is_power_of_two ? bucket / 2 * 3 : bucket / 3 * 4;
}

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Whether each of the plan's sequences has one token and one sample. */
static bool is_decode(const struct step_plan *plan, const struct batch_layout *layout)
{
    return plan->num_rows > 0 && layout->max_query == 1 && layout->num_history == 0 &&
           layout->num_logits_rows == plan->num_rows && layout->num_samples == plan->num_rows;
}

static void pad(const struct batch_limits *limits, struct batch_layout *layout)
{
    int32_t most = min_int32(limits->max_seqs, min_int32(limits->max_tokens, limits->max_samples));
    int32_t bucket = 1, width = 4;
    while (bucket < layout->num_seqs) {
        bucket = next_bucket(bucket);
    }
    while (width < layout->max_blocks) {
        width *= 2;
    }
    bucket = min_int32(bucket, most);
    layout->is_padded = true;
    layout->num_padding = bucket - layout->num_seqs;
    layout->num_tokens = layout->num_logits_rows = layout->num_samples = bucket;
    layout->num_seqs = bucket;
    layout->max_blocks = min_int32(width, limits->max_blocks);
}

static void place_arrays(const struct step_plan *plan, const struct batch_limits *limits,
                         struct batch_layout *layout)
{
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        int32_t num_blocks = row_num_blocks(row);
        int32_t num_scored = batch_num_scored(row);
        layout->max_blocks = num_blocks > layout->max_blocks ? num_blocks : layout->max_blocks;
        layout->max_query =
            row->num_tokens > layout->max_query ? row->num_tokens : layout->max_query;
        layout->num_tokens += row->num_tokens;
        layout->num_history += row->num_history;
        layout->num_logits_rows += num_scored + (row->num_draws > 0 ? 1 : 0);
        layout->num_samples += num_scored + row->num_draws;
    }
    layout->num_seqs = plan->num_rows;
    if (limits->pads_decode && is_decode(plan, layout)) {
        pad(limits, layout);
    }
    size_t num_tokens = (size_t)layout->num_tokens;
    size_t num_ids = num_tokens + (size_t)layout->num_history;
    size_t num_seqs = (size_t)layout->num_seqs;
    layout->token_ids = append_array(layout, num_ids, sizeof(int32_t));
    layout->positions = append_array(layout, num_ids, sizeof(int32_t));
    layout->slot_mapping = append_array(layout, num_tokens, sizeof(int32_t));
    layout->history_slots = append_array(layout, num_ids, sizeof(int32_t));
    layout->seq_idx = append_array(layout, num_tokens, sizeof(int32_t));
    layout->query_begin = append_array(layout, num_seqs + 1, sizeof(int32_t));
    layout->seq_lens = append_array(layout, num_seqs, sizeof(int32_t));
    layout->block_tables =
        append_array(layout, num_seqs * (size_t)layout->max_blocks, sizeof(int32_t));
    layout->logits_tokens = append_array(layout, (size_t)layout->num_logits_rows, sizeof(int32_t));
    layout->sample_rows =
        append_array(layout, (size_t)layout->num_samples, sizeof(struct sample_row));
    layout->bias = append_array(layout, 0, sizeof(struct imbrex_logit_bias));
}

/* Where the samples of a step are written, and how far. */
struct sample_writer {
    const struct batch_source *source;
    struct sample_row *rows;
    struct imbrex_logit_bias *bias;
    int32_t num_rows, num_bias, max_logprobs;
};

/* The next sample row, of the logits at `position` of the row's sequence. Its biases are written
 * where those of the sequence are, or would be; the caller counts them. */
static const struct sample_row *write_sample(struct sample_writer *writer,
                                             const struct step_row *row, int32_t logits_row,
                                             int32_t position, int32_t target_id, int32_t draw_idx)
{
    struct sample_row *sample_row = &writer->rows[writer->num_rows++];
    *sample_row = (struct sample_row){.logits_row = logits_row,
                                      .slot = row->slot,
                                      .num_tokens = position + 1,
                                      .num_prompt_tokens = row->sequence->num_prompt_tokens,
                                      .target_id = target_id,
                                      .bias_begin = writer->num_bias};
    writer->source->sample_row(row->sequence, row, draw_idx, sample_row,
                               writer->bias + writer->num_bias);
    assert(sample_row->num_bias >= 0 && sample_row->num_bias <= BATCH_MAX_BIAS);
    if (sample_row->num_logprobs > writer->max_logprobs) {
        writer->max_logprobs = sample_row->num_logprobs;
    }
    return sample_row;
}

void batch_fill(const struct step_plan *plan, const struct batch_limits *limits,
                const int32_t *block_tables, const struct batch_source *source, void *memory,
                struct batch_layout *layout)
{
    struct batch_layout placed = {0};
    assert((uintptr_t)memory % ARENA_ALIGNMENT == 0);
    place_arrays(plan, limits, &placed);
    assert(placed.num_tokens <= limits->max_tokens && placed.num_seqs <= limits->max_seqs);
    assert(placed.max_blocks <= limits->max_blocks && placed.num_samples <= limits->max_samples);

    int32_t *token_ids = BATCH_ARRAY(int32_t, memory, &placed, token_ids);
    int32_t *positions = BATCH_ARRAY(int32_t, memory, &placed, positions);
    int32_t *slot_mapping = BATCH_ARRAY(int32_t, memory, &placed, slot_mapping);
    int32_t *history_slots = BATCH_ARRAY(int32_t, memory, &placed, history_slots);
    int32_t *seq_idx = BATCH_ARRAY(int32_t, memory, &placed, seq_idx);
    int32_t *query_begin = BATCH_ARRAY(int32_t, memory, &placed, query_begin);
    int32_t *seq_lens = BATCH_ARRAY(int32_t, memory, &placed, seq_lens);
    int32_t *tables = BATCH_ARRAY(int32_t, memory, &placed, block_tables);
    int32_t *logits_tokens = BATCH_ARRAY(int32_t, memory, &placed, logits_tokens);
    struct sample_writer writer = {
        .source = source,
        .rows = BATCH_ARRAY(struct sample_row, memory, &placed, sample_rows),
        .bias = BATCH_ARRAY(struct imbrex_logit_bias, memory, &placed, bias),
    };
    int32_t token = 0;
    int32_t logits_row = 0;
    for (int32_t row_idx = 0; row_idx < plan->num_rows; row_idx++) {
        const struct step_row *row = &plan->rows[row_idx];
        const int32_t *block_table = block_tables + (int64_t)row->slot * limits->max_blocks;
        int32_t *table = tables + (int64_t)row_idx * placed.max_blocks;
        int32_t first_token = token;
        int32_t num_blocks = row_num_blocks(row);
        memcpy(table, block_table, (size_t)num_blocks * sizeof(*table));
        memset(table + num_blocks, 0, (size_t)(placed.max_blocks - num_blocks) * sizeof(*table));
        query_begin[row_idx] = token;
        seq_lens[row_idx] = row->position + row->num_tokens;
        for (int32_t i = 0; i < row->num_tokens; i++, token++) {
            int32_t position = row->position + i;
            token_ids[token] = source->token_id(row->sequence, position);
            positions[token] = position;
            slot_mapping[token] =
                block_table[position / KV_BLOCK_SIZE] * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE;
            history_slots[token] = row->slot;
            seq_idx[token] = row_idx;
        }
        int32_t num_scored = batch_num_scored(row);
        for (int32_t i = 0; i < num_scored; i++) {
            int32_t position = row->first_scored + i;
            logits_tokens[logits_row] = first_token + position - row->position;
            const struct sample_row *scored =
                write_sample(&writer, row, logits_row++, position,
                             source->token_id(row->sequence, position + 1), 0);
            assert(scored->num_bias == 0);
            (void)scored;
        }
        if (row->num_draws > 0) {
            logits_tokens[logits_row] = token - 1;
            int32_t num_bias = 0;
            for (int32_t i = 0; i < row->num_draws; i++) {
                num_bias =
                    write_sample(&writer, row, logits_row, seq_lens[row_idx] - 1, -1, i)->num_bias;
            }
            writer.num_bias += num_bias;
            logits_row++;
        }
    }
    for (int32_t i = 0; i < placed.num_padding; i++, token++, logits_row++) {
        int32_t row_idx = plan->num_rows + i;
        token_ids[token] = 0;
        positions[token] = 0;
        slot_mapping[token] = -1;
        history_slots[token] = -1;
        seq_idx[token] = row_idx;
        query_begin[row_idx] = token;
        seq_lens[row_idx] = 1;
        memset(tables + (int64_t)row_idx * placed.max_blocks, 0,
               (size_t)placed.max_blocks * sizeof(*tables));
        logits_tokens[logits_row] = token;
        writer.rows[writer.num_rows++] = (struct sample_row){.logits_row = -1};
    }
    query_begin[placed.num_seqs] = token;
    int32_t id = token;
    for (int32_t row_idx = 0; row_idx < plan->num_rows; row_idx++) {
        const struct step_row *row = &plan->rows[row_idx];
        for (int32_t position = 0; position < row->num_history; position++, id++) {
            token_ids[id] = source->token_id(row->sequence, position);
            positions[id] = position;
            history_slots[id] = row->slot;
            assert(token_ids[id] >= 0);
        }
    }
    assert(id == token + placed.num_history && placed.num_history <= limits->max_history);
    assert(token == placed.num_tokens && logits_row == placed.num_logits_rows);
    assert(writer.num_rows == placed.num_samples);
    placed.num_bias = writer.num_bias;
    placed.num_bytes += (size_t)writer.num_bias * sizeof(struct imbrex_logit_bias);
    placed.max_logprobs = writer.max_logprobs;
    *layout = placed;
}
