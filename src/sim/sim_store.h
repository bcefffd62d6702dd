/* SPDX-License-Identifier: Apache-2.0 */
/* What holds a trace's blocks during a replay. The service model and a recorded timeline drive any
 * of them with the same three events; at most `capacity` blocks of a prompt are looked up and
 * kept, a longer prompt goes without its tail.
 *
 *   lru       least recently used, tails first, infinite if its capacity is; on plain arrays, so
 *             that the search for a rate takes seconds
 *   min       clairvoyant: farthest next admission goes first (Belady), dead blocks before all
 *   cache     the engine's own pool, cache and policies */
#ifndef IMBREX_SIM_SIM_STORE_H
#define IMBREX_SIM_SIM_STORE_H

#include "sim/sim_trace.h"

struct sim_store;
struct sim_timeline;

/* What an admitted request need not compute, and what for that it waits for. */
struct sim_found {
    int32_t num_hits; /* blocks */
    int64_t wait_ns;  /* before its prefill begins */
};

struct sim_store_functions {
    void (*destroy)(struct sim_store *store);
    /* order: of arrival, unique. NULL where a store does not care. */
    enum imbrex_status (*arrive)(struct sim_store *store, int32_t request_idx, int64_t order,
                                 int64_t now_ns, struct imbrex_error *err);
    /* The request's blocks are in use from now on, those that were not there are there now. There
     * is room: see sim_store_has_room. */
    enum imbrex_status (*admit)(struct sim_store *store, int32_t request_idx, int64_t now_ns,
                                struct sim_found *found, struct imbrex_error *err);
    void (*finish)(struct sim_store *store, int32_t request_idx, int64_t now_ns);
};

struct sim_store {
    const struct sim_store_functions *functions;
    const struct sim_trace *trace;
    int32_t capacity; /* blocks; INT32_MAX: infinite */
    /* [trace->num_nodes] requests that use the block, if more than 0. A block that is in use has
     * all blocks before it in use. */
    int32_t *users;
    int32_t num_used; /* blocks in use */
    int64_t num_evicted;
};

/* Blocks of its prompt that a request uses in a store. */
static inline int32_t sim_store_num_blocks(const struct sim_store *store, int32_t request_idx)
{
    int32_t num_blocks = store->trace->requests[request_idx].num_blocks;
    return num_blocks < store->capacity ? num_blocks : store->capacity;
}

/* Whether the request's blocks fit beside those that are in use. */
bool sim_store_has_room(const struct sim_store *store, int32_t request_idx);

/* NULL does nothing. */
void sim_store_destroy(struct sim_store *store);

enum imbrex_status sim_lru_create(const struct sim_trace *trace, int32_t capacity,
                                  struct sim_store **store, struct imbrex_error *err);
/* Only for a replay of the timeline. */
enum imbrex_status sim_min_create(const struct sim_trace *trace, int32_t capacity,
                                  const struct sim_timeline *timeline, struct sim_store **store,
                                  struct imbrex_error *err);

#endif
