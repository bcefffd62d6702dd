/* SPDX-License-Identifier: Apache-2.0 */
/* A random walk of scheduler, pool, prefix cache and tiers, put together as the engine does it, on
 * a fake clock and a fake device whose copies come late: requests with common beginnings come,
 * fork, are preempted, cancelled or late; copies, steps, files, a server and allocations fail; the
 * process ends and begins again, sometimes in the middle of a write.
 *
 * There is no model. Each token's place in a block holds a chained hash of the ids up to it and of
 * the request's salt, every step reads all places before its own, and what is drawn is a hash of
 * what was read: so a block that is another one, or was read too early or written too late, is
 * seen.
 *
 * Waiting is bounded, in steps. With d steps in flight the first of all sequences has a row in one
 * of any d steps, but while it is held for what comes up, h steps at most (its patience over the
 * clock's shortest tick), or while blocks are pinned by promotions, that are over after s steps. So
 * a request of n choices, p prompt tokens and at most m tokens, whose rows have g tokens at least,
 * is over after
 *   own = n * (d * (ceil(p / g) + m - p + 2) + h + s)
 * and the own bounds of all that come before it and live at the same time; a request that comes
 * before the first sequence makes that one begin anew. Nothing is ever idle for more than h + s
 * steps while somebody waits. */
#ifndef IMBREX_TESTS_TIERS_WALK_H
#define IMBREX_TESTS_TIERS_WALK_H

#include <stdbool.h>
#include <stdint.h>

#include "kv/kv_tiers.h"

struct tiers_walk_options {
    uint64_t seed; /* decides everything but what the threads of disk and server do first */
    int32_t num_lives, life_steps; /* of the process; each until all requests are over */
    const char *folder;            /* of the disk tier, emptied before and after */
    /* Makes allocation number `countdown` from now on fail, and stops that: says whether one did.
     * NULL: none fails. */
    void (*fail_allocation)(int64_t countdown);
    bool (*stop_failing)(void);
};

struct tiers_walk_totals {
    int64_t num_steps, num_requests, num_cancelled, num_failed_steps, num_preemptions, num_forks;
    int64_t num_held;                /* steps in which the first request waited for its blocks */
    int64_t num_found[KV_NUM_TIERS]; /* blocks, by where they had been; NONE: the first tier */
    int64_t num_ahead, num_ahead_used, num_written;
    int64_t num_layered, num_spoilt; /* starts while blocks came up; rows for which they did not */
    int64_t num_copy_faults, num_disk_faults, num_remote_faults, num_refused; /* allocations */
    int64_t num_crashes;
    double largest_share; /* of its bound that a request took */
};

/* Adds to totals. Fails the test at the first thing that is wrong. */
void tiers_walk(const struct tiers_walk_options *options, struct tiers_walk_totals *totals);
void tiers_walk_print(const struct tiers_walk_totals *totals);

#endif
