/* SPDX-License-Identifier: Apache-2.0 */
/* A running model: compute threads, KV cache and the memory of one step, all planned at creation.
 *
 *   weights         mapped from the checkpoint, shared by all engines of the model
 *   kv_pool         [num_blocks] blocks, one region
 *   arena           one region: activations, logits, RoPE table, batch arrays, sampler
 *
 * An engine runs one sequence at a time. */
#ifndef IMBREX_ENGINE_ENGINE_H
#define IMBREX_ENGINE_ENGINE_H

#include <stdatomic.h>

#include "engine/sampler.h"
#include "kv/kv_pool.h"
#include "model/forward.h"
#include "model/model.h"
#include "ops/ops.h"

/* The batch arrays of a step and the block table of the sequence, in the arena. */
struct step_arrays {
    int32_t *token_ids, *positions, *slot_mapping, *seq_idx; /* [max_step_tokens] */
    int32_t *block_table;                                    /* [kv_num_blocks] */
};

struct imbrex_engine {
    const struct imbrex_model *model;
    struct imbrex_memory_plan plan;
    struct ops *ops;
    struct kv_pool kv_pool;
    struct memory_region arena_region;
    struct forward_buffers buffers;
    struct step_arrays step;
    struct sampler sampler;
    void *ops_scratch; /* [ops_scratch_bytes], see ops_create; NULL without quantised weights */
    size_t ops_scratch_bytes;
    int32_t num_blocks; /* of the running sequence: block_table[0, num_blocks) */
    int32_t num_tokens; /* of the running sequence: positions [0, num_tokens) are in the cache */
    atomic_bool is_busy;
};

/* Claims the engine for one sequence and empties it. INVALID_ARGUMENT if it is claimed already. */
enum imbrex_status engine_begin(struct imbrex_engine *engine, struct imbrex_error *err);
/* Returns the sequence's blocks and the claim. */
void engine_end(struct imbrex_engine *engine);

/* Runs one step over the next num_tokens (<= max_step_tokens) ids of the sequence and leaves their
 * hidden states for forward_logits. The caller has checked the ids and that they fit the context.
 * CAPACITY if the KV cache has no free block. Allocates nothing. */
enum imbrex_status engine_step(struct imbrex_engine *engine, const int32_t *token_ids,
                               int32_t num_tokens, struct imbrex_error *err);

/* FORMAT, for logits that are NaN or infinite: nothing but the weights makes them so. */
enum imbrex_status engine_bad_logits(const struct imbrex_engine *engine, int32_t position,
                                     struct imbrex_error *err);

#endif
