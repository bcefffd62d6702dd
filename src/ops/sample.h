/* SPDX-License-Identifier: Apache-2.0 */
/* From the logits of one position to the next token, for many rows at once, and the tokens that a
 * device keeps of each sequence. The one definition of sampling; the order is that of
 * imbrex_request_options. A row depends on its own logits, options and tokens alone. */
#ifndef IMBREX_OPS_SAMPLE_H
#define IMBREX_OPS_SAMPLE_H

#include "ops/ops.h"

/* What a device remembers of its sequences: token_ids[slot * stride + position]. */
struct token_history {
    int32_t *token_ids; /* [num_slots, stride] */
    int64_t stride;     /* positions of a slot */
};

/* Brings the batch's ids and the history together: an id >= 0 is stored at its position; one that
 * is negative was sampled on the device and is read from there. */
struct history_params {
    const int32_t *token_ids; /* [num_tokens] */
    const int32_t *slots;     /* [num_tokens] of the history */
    const int32_t *positions; /* [num_tokens] */
    struct token_history history;
    int32_t *d; /* [num_tokens] the ids, all >= 0 */
    int32_t num_tokens;
};
void ops_history(struct ops *ops, const struct history_params *params);

/* How one row becomes a token. Plain numbers: it is uploaded as it is. */
struct sample_row {
    int32_t logits_row;        /* of the step: row logits_row - logits_row_begin of logits */
    int32_t slot;              /* of the history: ids of [0, num_tokens) are the sequence so far */
    int32_t num_tokens;        /* the row's logits are of position num_tokens - 1 */
    int32_t num_prompt_tokens; /* the first of them: not counted as output */
    /* -1: draw. Otherwise nothing is drawn: this id's logprob is wanted. */
    int32_t target_id;
    int32_t choice_idx;
    /* The drawn id is stored at position num_tokens of the history if set. The one that follows a
     * full slot has no place there and is not. */
    int32_t is_stored;
    int32_t num_logprobs;                      /* alternatives wanted; -1: not even the logprob */
    int32_t bias_begin, num_bias;              /* of params.bias */
    float temperature;                         /* 0: argmax, lowest id on a tie */
    int32_t top_k;                             /* 0: off */
    float top_p;                               /* 1: off */
    float min_p;                               /* 0: off */
    float repetition_penalty;                  /* 1: off */
    float frequency_penalty, presence_penalty; /* 0: off */
    uint32_t seed_low, seed_high;
};

/* Instead of a token; nothing else of the result holds then, and a row that is stored stores 0.
 * Bad: a logit is NaN or infinite, or becomes so by a penalty or a finite bias. All forbidden: each
 * of the ids has a bias of -INFINITY. */
#define SAMPLE_BAD_LOGITS (-1)
#define SAMPLE_ALL_FORBIDDEN (-2)

/* What became of it. */
struct sample_result {
    int32_t token_id; /* drawn, or target_id, or one of the two above */
    float logprob;    /* if num_logprobs >= 0; -inf of a target_id beyond num_ids */
    int32_t num_top; /* filled entries of the row's top_logprobs: fewer ids may exist than wanted */
};

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
