/* SPDX-License-Identifier: Apache-2.0 */
/* What sampling reads and writes for each row, in plain numbers: compiled by gcc and, for kernels,
 * by nvcc. */
#ifndef IMBREX_OPS_SAMPLE_ROW_H
#define IMBREX_OPS_SAMPLE_ROW_H

#include <stdint.h>

/* What a device remembers of its sequences: token_ids[slot * stride + position]. */
struct token_history {
    int32_t *token_ids; /* [num_slots, stride] */
    int64_t stride;     /* positions of a slot */
};

/* How one row becomes a token. Plain numbers: it is uploaded as it is. */
struct sample_row {
    /* Of the step: row logits_row - logits_row_begin of logits. Negative: padding, no result; only
     * a device may be given such rows. */
    int32_t logits_row;
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

#endif
