/* SPDX-License-Identifier: Apache-2.0 */
/* What lies below a replayed cache: tiers, the nearest first, each with so many blocks, least
 * recently used first out, and a link to the one above it.
 *
 *   down   what the cache forgets is copied to the first tier, and what comes to a tier is copied
 *          on to the next one, oldest first: a block may be in several. One that goes before its
 *          copy has begun is lost
 *   up     a block is read from the nearest tier that has it into each tier above, and from the
 *          first one into the cache (sim_levels_load)
 *   link   blocks one after the other, each as long as its time, both ways at once; what goes up
 *          arrives a latency later, which does not keep the next one waiting
 *
 * Blocks are the trace's, by number. Times never fall from call to call; sim_levels_advance brings
 * all to a moment before it is asked about. */
#ifndef IMBREX_SIM_SIM_LEVELS_H
#define IMBREX_SIM_SIM_LEVELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { SIM_MAX_LEVELS = 4 };

struct sim_level_options {
    int32_t capacity;                /* blocks, >= 1; INT32_MAX: it forgets nothing */
    int64_t up_block_ns, latency_ns; /* to read a block over the link to the tier above */
    int64_t down_block_ns;           /* to write one */
};

struct sim_level_metrics {
    int64_t num_up, num_down; /* blocks over its link */
    int64_t num_lost;         /* that went before they were copied on */
};

struct sim_levels;

enum imbrex_status sim_levels_create(int32_t num_nodes, const struct sim_level_options *options,
                                     int32_t num_levels, struct sim_levels **levels,
                                     struct imbrex_error *err);
/* NULL does nothing. */
void sim_levels_destroy(struct sim_levels *levels);

/* Begins the copies from tier to tier that can begin by now. */
void sim_levels_advance(struct sim_levels *levels, int64_t now_ns);

/* The nearest tier that has the block, or is being given it; -1: none. */
int32_t sim_levels_find(const struct sim_levels *levels, int32_t node);
/* Whether the first tier has it now. */
bool sim_levels_is_near(const struct sim_levels *levels, int32_t node, int64_t now_ns);

/* The cache forgets it. Returns when it has been copied out: now if the first tier has it. */
int64_t sim_levels_put(struct sim_levels *levels, int32_t node, int64_t now_ns);

/* When the first tier would have what is in some tier, if it were asked for now. */
int64_t sim_levels_raise_end(const struct sim_levels *levels, int32_t node, int64_t now_ns);
/* Asks for it; returns that time. The block came from where it was found last: see origin. */
int64_t sim_levels_raise(struct sim_levels *levels, int32_t node, int64_t now_ns);
/* Where the block was before it was raised, if it was since it came to the first tier; else 0. */
int32_t sim_levels_origin(const struct sim_levels *levels, int32_t node);

/* The link between cache and first tier: free from then on. */
int64_t sim_levels_free_ns(const struct sim_levels *levels);
/* A block of the first tier goes up, its last byte at end_ns less the latency. */
void sim_levels_load(struct sim_levels *levels, int32_t node, int64_t end_ns);

void sim_levels_read_metrics(const struct sim_levels *levels, int32_t level_idx,
                             struct sim_level_metrics *metrics);
/* Whether lists, counts and times agree. For tests. */
bool sim_levels_check(const struct sim_levels *levels);

#endif
