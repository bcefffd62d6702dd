/* SPDX-License-Identifier: Apache-2.0 */
/* Puts a trace together request by request. A block's number is found by the hash of its ids and
 * of all ids before it, 64 bits: with ten million different blocks two of them collide with a
 * probability of about 3 in a million. */
#ifndef IMBREX_SIM_SIM_BUILDER_H
#define IMBREX_SIM_SIM_BUILDER_H

#include "sim/sim_trace.h"

struct sim_builder {
    struct sim_trace *trace;
    int32_t max_requests;
    int64_t max_accesses;
    uint64_t *hashes; /* [num_nodes] */
    int32_t max_nodes;
    int32_t *table; /* [table_size] node or -1, open addressing; a power of two */
    uint32_t table_size;

    /* The path that is being read. */
    uint64_t hash;       /* of all ids so far */
    int32_t ids_a_block; /* of the trace's */
    int32_t num_ids;     /* of the block that is not full yet */
    uint64_t *path;      /* [num_path_blocks] hashes of its full blocks */
    int32_t num_path_blocks, max_path_blocks;
};

/* Where a trace ended before a line, to go back to if the line turns out to be bad. */
struct sim_builder_mark {
    int32_t num_requests;
    int64_t num_accesses, num_tokens, num_early;
};

/* The trace's arrays are the trace's: sim_trace_free. */
enum imbrex_status sim_builder_init(struct sim_builder *builder, struct sim_trace *trace,
                                    struct imbrex_error *err);
void sim_builder_deinit(struct sim_builder *builder);

struct sim_builder_mark sim_builder_mark(const struct sim_builder *builder);
void sim_builder_undo(struct sim_builder *builder, struct sim_builder_mark mark);

/* A request's ids, from the head on; `space`: ids of different spaces are different. */
void sim_builder_begin_path(struct sim_builder *builder, uint64_t space, int32_t ids_a_block);
enum imbrex_status sim_builder_add_id(struct sim_builder *builder, uint64_t id,
                                      struct imbrex_error *err);
/* The request of the path; first_access and num_blocks are filled in, at most as many blocks as
 * its tokens fill. *request_idx is its place. */
enum imbrex_status sim_builder_add_request(struct sim_builder *builder,
                                           const struct sim_request *request, int32_t *request_idx,
                                           struct imbrex_error *err);

#endif
