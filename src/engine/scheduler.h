/* SPDX-License-Identifier: Apache-2.0 */
/* Who gets the next step's tokens and blocks. Sees counts and block ids only: no text, no tensors,
 * no clock of its own.
 *
 * One sequence is one choice of one request. Its life:
 *
 *            add                    admit                     end, then its last step finishes
 *   (new) --------> WAITING ----------------------> RUNNING --------------------------> ENDED
 *                      ^  preempt: its blocks go back  |
 *                      +-------------------------------+
 *
 * Order. Each sequence has one key for life: arrival - priority * priority_step. Smaller goes
 * first, everywhere: admission is strictly in this order, tokens are given in this order, and what
 * is preempted is the running sequence that comes last. So the first of all sequences gets tokens
 * in every step, or in every second one if two are in flight, and is preempted for nobody but one
 * that comes before it; when it has ended the next one is first. A request of priority p waits for
 * those that arrived before it and those of priority q > p that arrive less than
 * (q - p) * priority_step after it, and for no others: nobody starves.
 *
 * A step. First the head of the waiting list is admitted, again and again, while there is a slot
 * and room for all tokens it has, with one block to spare for each running sequence before it; what
 * comes later in order is preempted for it if that makes the room. Slots that the forks of
 * sequences before it are about to need are not there for it. Then come the running sequences that
 * have one token left to compute (decode), all of them; for one that lacks a block the last in
 * order is preempted. What remains of the token budget goes to prompts, in order, in chunks that
 * end on block edges. max_running <= max_step_tokens - block_size + 1 leaves a whole block for the
 * first prompt.
 *
 * Steps in flight. On an asynchronous device step i+1 is planned while step i runs: planning counts
 * a sampled token as soon as its step is planned (the device knows the id, the host not yet). The
 * blocks and the slot of a sequence return only when no step in flight holds it, and a block that a
 * step copies from returns when that step is finished. So a step that lacks a block which a step in
 * flight will give back leaves that sequence out, once. */
#ifndef IMBREX_ENGINE_SCHEDULER_H
#define IMBREX_ENGINE_SCHEDULER_H

#include "kv/kv_pool.h"

enum sequence_state {
    SEQUENCE_STATE_NEW = 0,
    SEQUENCE_STATE_WAITING = 1,
    SEQUENCE_STATE_RUNNING = 2,
    SEQUENCE_STATE_ENDED = 3,
};

/* The scheduler's view of one choice; lies in the request, which fills the first part before
 * scheduler_add or scheduler_fork and leaves it alone then. */
struct sequence {
    void *owner;         /* the choice it belongs to */
    int64_t arrival_ns;  /* scheduler's time */
    int64_t deadline_ns; /* INT64_MAX: none */
    int32_t priority;
    int32_t max_tokens;  /* most tokens it ever has; the last one is never computed */
    int32_t num_draws;   /* choices drawn at the end of its prompt: 1, or n for the first of n; 0:
                            * nothing is drawn, it is over when all tokens are computed */
    int32_t score_begin; /* logits are wanted of positions from here to the end of the prompt too;
                            * INT32_MAX: none. Moves on as they are planned, so that a
                            * recomputation does not ask again */
    int32_t num_prompt_tokens; /* < max_tokens, unless nothing is drawn */

    /* Written by the scheduler, read by all. */
    enum sequence_state state;
    int32_t num_tokens;    /* prompt and sampled ones, those of planned steps counted */
    int32_t num_computed;  /* positions [0, num_computed) are in the cache once the steps in flight
                           * are done */
    int32_t slot;          /* row of the device's arrays and of block_tables; -1 unless it runs or a
                           * step in flight holds it */
    int32_t num_blocks;    /* of its row of block_tables */
    int32_t num_in_flight; /* planned steps that hold it and are not finished */
    int32_t num_preemptions;
    int32_t num_skipped; /* tokens found in the cache that no row has entered into the history yet:
                          * [0, num_skipped) = [0, num_computed), or 0 */
    bool is_ending;      /* ended, but a step in flight still holds it; state is what it was */
    bool is_preempted;   /* waits, but a step in flight still holds its blocks and its slot */
    bool is_spoilt;      /* what steps in flight compute for it is nothing (scheduler_restart) */

    int64_t order_key;
    uint64_t order_idx; /* of equal keys the one that was added first; a fork has its parent's */
    uint64_t fork_idx;  /* of equal indices the parent (0), then its forks as they came */
    struct sequence *previous, *next; /* in the waiting list */
};

/* Positions that the cache must have before the sequence can go on: those of all its tokens; if
 * nothing is drawn, all but the prompt's last, whose logits nobody wants, but at least one. A row
 * that reaches it draws, or completes a sequence that draws nothing. */
static inline int32_t sequence_num_wanted(const struct sequence *sequence)
{
    if (sequence->num_draws > 0 || sequence->num_tokens == 1) {
        return sequence->num_tokens;
    }
    return sequence->num_tokens - 1;
}

/* Tokens of its beginning that a cache may have for it: one at least is computed, and so is each
 * position that is scored. */
static inline int32_t sequence_max_cached(const struct sequence *sequence)
{
    int32_t max_tokens = sequence_num_wanted(sequence) - 1;
    return sequence->score_begin < max_tokens ? sequence->score_begin : max_tokens;
}

/* What one sequence does in a step: tokens [position, position + num_tokens). */
struct step_row {
    struct sequence *sequence;
    int32_t slot;
    int32_t position, num_tokens;
    /* Ids of [0, num_history) go into the history with this row: the cache had these tokens. */
    int32_t num_history;
    /* Positions [first_scored, position + num_tokens) have their logits scored against the next
     * prompt token, a drawn one excepted; = end if none. */
    int32_t first_scored;
    int32_t num_draws; /* drawn from the logits of the last token; 0: it ends inside the prompt */
};

/* Block contents that must be copied before the step computes. No block is the destination of one
 * and the source or destination of another, so their order does not matter. */
struct step_block_copy {
    int32_t source, destination;
};

/* Ids of [0, num_tokens) that a slot takes over from another before the step computes. The order
 * does not matter either. */
struct step_slot_copy {
    int32_t source, destination, num_tokens;
    uint64_t fork_idx; /* of the sequence that needs it */
};

/* One step as planned. Arrays have room for max_running rows and copies. */
struct step_plan {
    struct step_row *rows;                /* [num_rows]; decode first, both kinds in order */
    struct step_block_copy *block_copies; /* [num_block_copies] */
    struct step_slot_copy *slot_copies;   /* [num_slot_copies] */
    int32_t num_rows, num_block_copies, num_slot_copies;
    int32_t num_tokens;  /* of all rows, <= max_step_tokens */
    int32_t num_history; /* of all rows, <= max_step_history */
    int32_t num_samples; /* draws and scored positions, <= max_step_samples */
};

/* The prefix cache as the scheduler sees it; zeroed: none. It is told of all sequences, forks too,
 * and may leave any of them out. */
struct scheduler_cache {
    void *user;
    /* The sequence waits without blocks: it is new, or has been preempted. */
    void (*arrive)(void *user, struct sequence *sequence);
    /* It ended while it waited so. */
    void (*leave)(void *user, struct sequence *sequence);
    /* Blocks of it are on their way: it is not admitted yet, nor those behind it. The cache sees to
     * it that this does not last. NULL: never. */
    bool (*is_held)(void *user, const struct sequence *sequence);
    /* It runs: of the blocks that hold its first tokens at most max_blocks are written to the
     * table, one user more each. Returns how many; their tokens are not computed again. There is
     * room for all blocks of the sequence, so that some may be acquired for what is still to come
     * into them. */
    int32_t (*admit)(void *user, struct sequence *sequence, int32_t max_blocks, int32_t *table);
    /* It is about to release the blocks of its table, tails first. */
    void (*finish)(void *user, struct sequence *sequence);
};

struct scheduler_options {
    int32_t max_running, max_step_tokens; /* max_running <= max_step_tokens, see above */
    int32_t max_step_samples;             /* >= max_step_tokens + IMBREX_MAX_CHOICES */
    int32_t max_blocks;                   /* of one sequence */
    int64_t priority_step_ns;
    int32_t max_step_history; /* tokens found in the cache that the rows of one step enter into the
                               * history; with a cache at least those of one sequence */
    bool has_block_edges;     /* chunks end on block edges, the last of a prompt excepted */
};

struct scheduler {
    struct scheduler_options options;
    struct kv_pool *pool;
    struct scheduler_cache cache;       /* set right after creation, or never */
    int32_t *block_tables;              /* [max_running, max_blocks] by slot */
    int32_t *free_slots;                /* [num_free_slots] stack */
    struct sequence **owners;           /* [max_running] by slot; NULL: the slot is free */
    struct sequence **running;          /* [num_running] in order */
    struct step_slot_copy *slot_copies; /* [num_slot_copies] of forks since the last step */
    int32_t *num_seen;                  /* [pool->num_blocks] what scheduler_check counts in */
    struct sequence *first_waiting, *last_waiting;
    int32_t num_free_slots, num_running, num_waiting, num_slot_copies;
    int32_t num_returning;    /* sequences that only steps in flight hold: ending or preempted */
    int64_t next_deadline_ns; /* no sequence has an earlier one */
    uint64_t next_order_idx, next_fork_idx;
    uint64_t num_preemptions;
};

/* The pool must outlive it. */
enum imbrex_status scheduler_create(const struct scheduler_options *options, struct kv_pool *pool,
                                    struct scheduler *scheduler, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void scheduler_destroy(struct scheduler *scheduler);

/* Room for one step's plan. */
enum imbrex_status step_plan_create(const struct scheduler_options *options, struct step_plan *plan,
                                    struct imbrex_error *err);
void step_plan_destroy(struct step_plan *plan);

/* Queues a new sequence of num_prompt_tokens tokens. The caller has seen to it that the tokens it
 * computes, max_tokens - 1 or those of its prompt, need no more than max_blocks blocks, nor more
 * than the pool has. */
void scheduler_add(struct scheduler *scheduler, struct sequence *sequence);

/* Another choice of the parent, whose prompt has been computed and whose first tokens have been
 * drawn: the child gets a slot and shares the blocks of the prompt, or waits and computes them
 * again if there is no slot, the parent's blocks are gone, or others wait before it. It has
 * num_prompt_tokens + 1 tokens, the last one not computed; the parent may have gone on, or be
 * ending. */
void scheduler_fork(struct scheduler *scheduler, const struct sequence *parent,
                    struct sequence *child);

/* The fork that a planned copy is for, be it in the plan's rows or not; NULL if it has its slot no
 * longer. */
struct sequence *scheduler_fork_of(const struct scheduler *scheduler,
                                   const struct step_slot_copy *copy);

/* Plans the next step; the plan may be empty (no rows): then it needs neither be done nor finished.
 * Allocates nothing. */
void scheduler_plan(struct scheduler *scheduler, struct step_plan *plan);

/* The step's work is done, or has failed: releases what it held. Steps finish in the order in which
 * they were planned. Afterwards a sequence that was ending is ENDED. */
void scheduler_finish_step(struct scheduler *scheduler, const struct step_plan *plan);

/* No more tokens for this sequence. Its state becomes ENDED at once, or when the last step in
 * flight that holds it finishes; it is the scheduler's until then. Does nothing if it has ended
 * already. */
void scheduler_end(struct scheduler *scheduler, struct sequence *sequence);

/* Takes back the last tokens of a running sequence that is in no step in flight (drafts that were
 * refused): num_tokens are left, at least one behind the prompt; the cache keeps no more than
 * [0, num_tokens - 1) and blocks beyond are released. */
void scheduler_truncate(struct scheduler *scheduler, struct sequence *sequence, int32_t num_tokens);

/* What a sequence was admitted with turned out to be nothing, so nothing counts that was planned
 * for it since: it goes back to the num_tokens and the score_begin that it had then, and waits for
 * its turn to be computed anew, as if it had been preempted; one that is ending just ends.
 * is_spoilt until no step in flight holds it. It may have no forks since then. */
void scheduler_restart(struct scheduler *scheduler, struct sequence *sequence, int32_t num_tokens,
                       int32_t score_begin);

/* Whether a waiting sequence, were it the head of the list, would be admitted now without anybody
 * being preempted for it. */
bool scheduler_has_room(const struct scheduler *scheduler, const struct sequence *sequence);

/* A sequence whose deadline is <= now_ns and which has not been ended, or NULL. Cheap while no
 * deadline is due. */
struct sequence *scheduler_find_late(struct scheduler *scheduler, int64_t now_ns);

/* Nothing waits, runs or is in flight. */
bool scheduler_is_idle(const struct scheduler *scheduler);

/* True if lists, slots, tables and pool agree with each other. For tests and idle moments. */
bool scheduler_check(const struct scheduler *scheduler);

#endif
