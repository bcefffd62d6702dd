/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass once more, in double and independent of src/ops (but for the widening of
 * weights): plain loops over whole rows, contiguous keys and values, no blocks, no tiles. What the
 * engine's logits are held against. */
#ifndef IMBREX_TESTS_FORWARD_FP64_H
#define IMBREX_TESTS_FORWARD_FP64_H

#include "model/model.h"

struct forward_fp64 {
    const struct imbrex_model *model;
    int32_t num_tokens, max_tokens;
    double *keys, *values; /* [num_layers, max_tokens, num_kv_heads * head_dim] */
    double *logits;        /* [vocab_size] of the last token */
};

/* Fails the running test if memory is short. */
void forward_fp64_init(struct forward_fp64 *sequence, const struct imbrex_model *model,
                       int32_t max_tokens);
void forward_fp64_deinit(struct forward_fp64 *sequence);
/* Appends a token; its logits are in sequence->logits afterwards. */
void forward_fp64_push(struct forward_fp64 *sequence, int32_t token_id);
/* Difference of the two largest logits. */
double forward_fp64_top_two_gap(const struct forward_fp64 *sequence);

#endif
