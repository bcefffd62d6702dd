/* SPDX-License-Identifier: Apache-2.0 */
/* What to bring up from a slower tier, and what may go for it: pure logic, executed by the tiers.
 *
 *   order     waiting requests first, nearest first; then predicted ones, most valuable first; of
 *             each the blocks from the head on, for a block without those before it is useless
 *   deadline  a block that cannot be there when its request runs is not loaded, nor any after it:
 *             the request computes them again
 *   room      free blocks first, then victims; none that a nearer request, or the same, wants, and
 *             for a prediction none that anybody wants or that is worth as much
 *   budget    one block at a time, so many ns each, planned no further ahead than the horizon: what
 *             has not begun can still be taken back
 *   credit    a predicted block costs one; it comes back fourfold when the block is used, once when
 *             it is taken back. Wrong predictions are left with one move in so many of the link's
 *             time, and half as many with each that is wrong again: else an idle link would fetch
 *             and forget the same blocks for ever
 *
 * Each planned block is followed until it is used or lost; what was loaded for nothing is waste. */
#ifndef IMBREX_KV_PREFETCH_PLAN_H
#define IMBREX_KV_PREFETCH_PLAN_H

#include "base/status.h"

/* What predictions may cost at first, and the most that they save up. */
#define PREFETCH_CREDIT_BLOCKS 256
/* Moves of the link in whose time one block of credit comes back; twice as many with each block
 * that was spent so and lost, up to the second number, until one is used. */
#define PREFETCH_RENEWAL_BLOCKS 64
#define PREFETCH_MAX_RENEWAL_BLOCKS (1 << 18)
/* For whoever asks a policy what to bring up: how many paths it may name (a session has up to three
 * segments), and how long they count. A path that was expected a second ago has often been run
 * meanwhile: with a life of 1 s hardly any of a load of agents that think for 0.3 s was used. */
#define PREFETCH_MAX_PREDICTIONS 24
#define PREFETCH_PREDICTION_LIFE_NS INT64_C(100000000)
/* A prediction must be worth so many times what goes for it: without a margin, blocks whose worth
 * rises and falls are moved to and fro and seldom used. Chosen on chat at a light load. */
#define PREFETCH_PREDICTION_MARGIN 4.0
/* Of a predicted block that was used: predictions of which one in four is right go on. */
#define PREFETCH_CREDIT_OF_USE 4

struct prefetch_options {
    int64_t block_ns;    /* to move one block; > 0 */
    int64_t horizon_ns;  /* a move begins at most so long after it is planned; >= 0 */
    int32_t max_tracked; /* blocks that are followed at once; >= 1 */
};

/* A request that waits or is expected, with its blocks that are not in the fast tier. */
struct prefetch_request {
    int32_t request_idx;  /* unique among those of a plan and those whose blocks are followed */
    int64_t place;        /* in the queue: smaller is sooner; INT64_MAX: predicted */
    int64_t needed_ns;    /* when it is expected to run */
    double value;         /* of a predicted one: chance of use, as of victims; else ignored */
    const uint64_t *keys; /* [num_keys] from the head on */
    int32_t num_keys;
};

/* An idle block of the fast tier, in the order in which the policy would forget them: unwanted ones
 * first, then those of the farthest waiter. */
struct prefetch_victim {
    int32_t block_idx;
    int64_t place; /* of its nearest waiter; INT64_MAX: none */
    double value;
};

struct prefetch_step {
    uint64_t key;
    int32_t request_idx;
    int32_t victim_block; /* goes before; -1: a free block is taken */
    int64_t begin_ns, end_ns;
};

struct prefetch_metrics {
    uint64_t num_planned, num_used;
    uint64_t num_wasted;    /* moved, or being moved, and never used */
    uint64_t num_cancelled; /* taken back before they began */
    uint64_t num_late;      /* wanted, but not to be had in time; in each plan */
    uint64_t num_predicted, num_predicted_used; /* of those planned and used */
};

struct prefetch_planner;

enum imbrex_status prefetch_planner_create(const struct prefetch_options *options,
                                           struct prefetch_planner **planner,
                                           struct imbrex_error *err);
/* NULL does nothing. */
void prefetch_planner_destroy(struct prefetch_planner *planner);

/* From now on a move takes so long; > 0. */
void prefetch_set_block_ns(struct prefetch_planner *planner, int64_t block_ns);

/* The next moves: at most max_steps into steps, in order. requests and victims are in the orders
 * said above: INVALID_ARGUMENT if places or values are not. What is followed already is not planned
 * again. Allocates nothing. */
enum imbrex_status prefetch_plan(struct prefetch_planner *planner, int64_t now_ns,
                                 const struct prefetch_request *requests, int32_t num_requests,
                                 const struct prefetch_victim *victims, int32_t num_victims,
                                 int32_t num_free, struct prefetch_step *steps, int32_t max_steps,
                                 int32_t *num_steps);

/* The request was given up: its moves that have not begun are off, their keys are written to keys,
 * which has room for max_tracked. Returns their number. */
int32_t prefetch_cancel(struct prefetch_planner *planner, int32_t request_idx, int64_t now_ns,
                        uint64_t *keys);
/* A request uses the block; it is no longer needed there. Unknown keys are ignored. */
void prefetch_used(struct prefetch_planner *planner, uint64_t key);
/* It was forgotten or its move failed. */
void prefetch_lost(struct prefetch_planner *planner, uint64_t key);

void prefetch_read_metrics(const struct prefetch_planner *planner,
                           struct prefetch_metrics *metrics);

#endif
