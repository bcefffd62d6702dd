/* SPDX-License-Identifier: Apache-2.0 */
/* From the logits of one position to the next token. The one definition of sampling: repetition
 * penalty, temperature, top-k, top-p, min-p, draw, in this order, which is the order of Hugging
 * Face's processors. The draw for a position depends on (seed, position) and the logits alone. */
#ifndef IMBREX_ENGINE_SAMPLER_H
#define IMBREX_ENGINE_SAMPLER_H

#include <stdbool.h>

#include "base/memory.h"
#include "base/status.h"

struct sampler_options {
    float temperature; /* 0: argmax, lowest id on a tie; the filters below have no effect then */
    int32_t top_k;     /* 0: off */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    float repetition_penalty; /* 1: off */
    uint64_t seed;
};

struct sampler_candidate {
    float logit;
    int32_t token_id;
    double probability;
};

/* Work memory of one sampler, planned with the engine. */
struct sampler {
    struct sampler_candidate *candidates; /* [vocab_size] */
    bool *is_seen; /* [vocab_size]: id occurs in the prompt or the output so far */
    int32_t vocab_size;
};

void sampler_take(struct arena *arena, int32_t vocab_size, struct sampler *sampler);

/* Forgets which ids were seen. */
void sampler_reset(struct sampler *sampler);
/* Notes an id in [0, vocab_size) for the repetition penalty. */
void sampler_note(struct sampler *sampler, int32_t token_id);

/* Picks the token at `position` (index in the sequence, prompt counted).
 *   logits  [num_ids], num_ids <= vocab_size; ids beyond are never picked
 * False if a logit is NaN or infinite, or becomes so by the penalty. Allocates nothing. */
bool sampler_pick(struct sampler *sampler, const struct sampler_options *options,
                  const float *logits, int32_t num_ids, int64_t position, int32_t *token_id);

/* Philox4x32-10: four random words for a 128-bit counter and a 64-bit key. A counter-based
 * generator needs no state and gives the same stream on every device.
 * Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. */
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

#endif
