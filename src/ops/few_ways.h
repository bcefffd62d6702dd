/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the ways to read weights for few rows is the fastest depends on how a processor follows
 * streams, on how many bytes a core takes in a cycle, and on what neighbours leave of memory's
 * rate. All give the same bits, so that each shape tries them in turns, in calls that it gets
 * anyway, and now and then again. One thread at a time. */
#ifndef IMBREX_OPS_FEW_WAYS_H
#define IMBREX_OPS_FEW_WAYS_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"

/* Of each way; the best time counts, so that a busy neighbour decides nothing. */
#define FEW_WAY_TRIALS 8
/* Calls between trials: of a shape of each layer of a model, a hundred tokens or so. */
#define FEW_WAY_CALLS 2048
/* What takes less time, or may stay in a cache, is not tried out. */
#define FEW_WAY_MIN_BYTES (1 << 20)
#define FEW_WAY_MAX_SHAPES 64 /* later ones take the first way */

struct few_shape {
    int64_t num_bytes; /* of weights */
    int32_t num_rows;
    int32_t num_trials; /* of all ways, this time */
    int32_t num_calls;  /* since then */
    int64_t best_ns[FEW_WAY_COUNT];
};

struct few_ways {
    struct few_shape shapes[FEW_WAY_MAX_SHAPES];
    int32_t num_shapes;    /* 0 at the beginning */
    enum few_way the_only; /* FEW_WAY_COUNT: there is a choice */
};

/* The way for a loop. trial: not NULL if it is one of the first, whose time few_ways_note wants. */
enum few_way few_ways_take(struct few_ways *ways, int32_t num_rows, int64_t num_bytes,
                           struct few_shape **trial);
void few_ways_note(struct few_shape *trial, enum few_way way, int64_t ns);

#endif
