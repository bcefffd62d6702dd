/* SPDX-License-Identifier: Apache-2.0 */
/* One step as flat arrays in one piece of memory, so that one copy brings it to the device. The
 * host fills it, packed: arrays follow each other at the next multiple of 64 bytes, and only what
 * the step uses is copied.
 *
 * Behind the step's num_tokens there are num_history ids more for the history only: the cache has
 * these tokens.
 *
 *   token_ids       [num_tokens + num_history]  negative: sampled by an earlier step, the device
 *                   knows it
 *   positions       [num_tokens + num_history]  in the sequence
 *   slot_mapping    [num_tokens]  KV slot (block * block_size + offset) that the token fills
 *   history_slots   [num_tokens + num_history]  row of the token history
 *   seq_idx         [num_tokens]  row of the arrays below
 *   query_begin     [num_seqs + 1]  tokens of sequence i are [query_begin[i], query_begin[i + 1])
 *   seq_lens        [num_seqs]    tokens in the cache after the step
 *   block_tables    [num_seqs, max_blocks]  max_blocks: the widest of this step
 *   logits_tokens   [num_logits_rows]  tokens whose logits are wanted, ascending
 *   sample_rows     [num_samples]  ordered by logits_row, which counts in logits_tokens
 *   bias            [num_bias]    of all draws; those of one sequence share theirs
 *
 * A step that decodes can be padded, so that its shape is one of a few. The last num_padding tokens
 * are then padding, each a sequence with a logits row and a sample of its own: of no id, stored
 * nowhere (slot_mapping and history_slots are negative) and not sampled (logits_row is negative).
 * What a device computes for them is never looked at.
 */
#ifndef IMBREX_ENGINE_BATCH_H
#define IMBREX_ENGINE_BATCH_H

#include "engine/scheduler.h"
#include "ops/sample.h"

/* Where each array begins, in bytes from the start, and how long it is. */
struct batch_layout {
    size_t token_ids, positions, slot_mapping, history_slots, seq_idx;
    size_t query_begin, seq_lens, block_tables, logits_tokens, sample_rows, bias;
    size_t num_bytes;
    int32_t num_tokens, num_history, num_seqs, max_blocks, num_logits_rows, num_samples, num_bias;
    int32_t max_query;    /* the most tokens of a sequence */
    int32_t max_logprobs; /* the most alternatives that a row wants; 0: none */
    int32_t num_padding;  /* of num_tokens, num_seqs, num_logits_rows and num_samples each */
    /* Offsets and counts but num_padding, num_bias, num_bytes and max_logprobs follow from num_seqs
     * and max_blocks alone. */
    bool is_padded;
};

/* The largest step an engine can have. */
struct batch_limits {
    int32_t max_tokens, max_history, max_seqs, max_blocks, max_samples;
    /* Steps in which each sequence has one token and one sample are padded: their sequences to one
     * of a few counts, their block tables to one of a few widths. */
    bool pads_decode;
};

/* Bytes that any step within the limits fits into; false if they do not fit size_t. */
bool batch_max_bytes(const struct batch_limits *limits, size_t *num_bytes);

/* Entries of a sample row's bias: the request's, and the end tokens it may not draw yet. */
#define BATCH_MAX_BIAS (IMBREX_MAX_LOGIT_BIAS + IMBREX_MAX_END_TOKENS + 64)

/* What the batch asks of a sequence's owner. */
struct batch_source {
    /* The id at a position of the row's sequence; negative if only the device knows it yet. */
    int32_t (*token_id)(const struct sequence *sequence, int32_t position);
    /* Fills what sampling needs to know of draw choice_idx of the row, or, with target_id >= 0, of
     * that scored position: everything from choice_idx on but bias_begin. bias [BATCH_MAX_BIAS] is
     * written and num_bias set: the same for all draws of the row, none for a scored position. */
    void (*sample_row)(const struct sequence *sequence, const struct step_row *row,
                       int32_t draw_idx, struct sample_row *sample_row,
                       struct imbrex_logit_bias *bias);
};

/* Scored positions of a row: from first_scored to the last one that has a next prompt token, one
 * that is drawn from excepted. The samples of a step are those of its rows in order: of each its
 * scored positions, then its draws. */
int32_t batch_num_scored(const struct step_row *row);

/* Writes the plan's step into memory of batch_max_bytes, which begins at a multiple of 64 bytes;
 * what it does not use is left alone. `block_tables` are the scheduler's,
 * [max_running, limits->max_blocks] by slot. Allocates nothing. */
void batch_fill(const struct step_plan *plan, const struct batch_limits *limits,
                const int32_t *block_tables, const struct batch_source *source, void *memory,
                struct batch_layout *layout);

/* An array of the batch, in whatever memory it was copied to. */
#define BATCH_ARRAY(type, memory, layout, array) \
    ((type *)(void *)((unsigned char *)(memory) + (layout)->array))

#endif
