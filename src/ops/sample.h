/* SPDX-License-Identifier: Apache-2.0 */
/* From the logits of one position to the next token, for many rows at once, and the tokens that a
 * device keeps of each sequence. The one definition of sampling; the order is that of
 * imbrex_request_options. A row depends on its own logits, options and tokens alone. */
#ifndef IMBREX_OPS_SAMPLE_H
#define IMBREX_OPS_SAMPLE_H

#include "ops/ops.h"
#include "ops/sample_row.h"

/* Brings the batch's ids and the history together: an id >= 0 is stored at its position; one that
 * is negative was sampled on the device and is read from there. Rows with a negative slot are
 * padding and have id 0: nothing is stored. */
struct history_params {
    const int32_t *token_ids; /* [num_tokens] */
    const int32_t *slots;     /* [num_tokens] of the history; negative: padding */
    const int32_t *positions; /* [num_tokens] */
    struct token_history history;
    int32_t *d; /* [num_tokens] the ids, all >= 0 */
    int32_t num_tokens;
};
void ops_history(struct ops *ops, const struct history_params *params);

struct sample_params {
    const float *logits;           /* [num_logits_rows, vocab_size]; not written */
    const struct sample_row *rows; /* [num_rows] */
    const struct imbrex_logit_bias *bias;
    struct token_history history;
    struct sample_result *results; /* [num_rows] */
    /* [num_rows, max_logprobs] the most likely first, lowest id on a tie */
    struct imbrex_logprob *top_logprobs;
    void *scratch; /* [sample_scratch_bytes], 64-byte aligned */
    int32_t logits_row_begin, num_logits_rows;
    int32_t num_rows, vocab_size;
    /* <= vocab_size: ids beyond are never drawn nor shown, and count for nothing */
    int32_t num_ids;
    int32_t max_logprobs;
};
void ops_sample(struct ops *ops, const struct sample_params *params);

/* Scratch of ops_sample for this many threads; SIZE_MAX if it does not fit. */
size_t sample_scratch_bytes(int32_t vocab_size, int32_t num_threads);

/* Philox4x32-10: four random words for a 128-bit counter and a 64-bit key. A counter-based
 * generator needs no state and gives the same stream on every device. The counter of a draw is
 * {position low, position high, choice_idx, 0}.
 * Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. */
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

#endif
