/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* A step while it is planned. */
struct planner {
    struct scheduler *scheduler;
    struct step_plan *plan;
    /* Blocks that come back when steps in flight finish, at least; the pool's pinned ones apart. */
    int32_t num_returning_blocks;
    int32_t num_claimed_blocks; /* how many of them are waited for by sequences left out */
};

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t max_int32(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static int32_t blocks_of_tokens(int32_t num_tokens)
{
    return num_tokens / KV_BLOCK_SIZE + (num_tokens % KV_BLOCK_SIZE != 0);
}

/* arrival - priority * step, as far as numbers go. */
static int64_t order_key(int64_t arrival_ns, int32_t priority, int64_t priority_step_ns)
{
    int64_t lead_ns, key;
    if (__builtin_mul_overflow((int64_t)priority, priority_step_ns, &lead_ns)) {
        lead_ns = priority > 0 ? INT64_MAX : INT64_MIN;
    }
    if (__builtin_sub_overflow(arrival_ns, lead_ns, &key)) {
        key = lead_ns > 0 ? INT64_MIN : INT64_MAX;
    }
    return key;
}

static bool is_before(const struct sequence *a, const struct sequence *b)
{
    if (a->order_key != b->order_key) {
        return a->order_key < b->order_key;
    }
    if (a->order_idx != b->order_idx) {
        return a->order_idx < b->order_idx;
    }
    return a->fork_idx < b->fork_idx;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status scheduler_create(const struct scheduler_options *options, struct kv_pool *pool,
                                    struct scheduler *scheduler, struct imbrex_error *err)
{
    size_t max_running = (size_t)options->max_running;
    size_t max_blocks = (size_t)options->max_blocks;
    struct scheduler created = {
        .options = *options,
        .pool = pool,
        .num_free_slots = options->max_running,
        .next_deadline_ns = INT64_MAX,
    };

    assert(options->max_running >= 1 && options->max_blocks >= 1);
    assert(options->max_running <= options->max_step_tokens);
    assert(!options->has_block_edges ||
           options->max_running <= options->max_step_tokens - KV_BLOCK_SIZE + 1);
    assert(options->max_step_samples >= options->max_step_tokens + IMBREX_MAX_CHOICES);
    created.block_tables = calloc(max_running, max_blocks * sizeof(*created.block_tables));
    created.free_slots = calloc(max_running, sizeof(*created.free_slots));
    created.owners = calloc(max_running, sizeof(struct sequence *));
    created.running = calloc(max_running, sizeof(struct sequence *));
    created.slot_copies = calloc(max_running, sizeof(*created.slot_copies));
    created.num_seen = calloc((size_t)pool->num_blocks, sizeof(*created.num_seen));
    if (created.block_tables == NULL || created.free_slots == NULL || created.owners == NULL ||
        created.running == NULL || created.slot_copies == NULL || created.num_seen == NULL) {
        scheduler_destroy(&created);
        return error_out_of_memory(err, "the scheduler's tables",
                                   max_running * max_blocks * sizeof(*created.block_tables));
    }
    for (int32_t i = 0; i < options->max_running; i++) {
        created.free_slots[i] = options->max_running - 1 - i;
    }
    *scheduler = created;
    return IMBREX_STATUS_OK;
}

void scheduler_destroy(struct scheduler *scheduler)
{
    free(scheduler->block_tables);
    free(scheduler->free_slots);
    free(scheduler->owners);
    free(scheduler->running);
    free(scheduler->slot_copies);
    free(scheduler->num_seen);
    *scheduler = (struct scheduler){0};
}

enum imbrex_status step_plan_create(const struct scheduler_options *options, struct step_plan *plan,
                                    struct imbrex_error *err)
{
    size_t max_running = (size_t)options->max_running;
    struct step_plan created = {
        .rows = calloc(max_running, sizeof(*created.rows)),
        .block_copies = calloc(max_running, sizeof(*created.block_copies)),
        .slot_copies = calloc(max_running, sizeof(*created.slot_copies)),
    };
    if (created.rows == NULL || created.block_copies == NULL || created.slot_copies == NULL) {
        step_plan_destroy(&created);
        return error_out_of_memory(err, "the plan of a step", max_running * sizeof(*created.rows));
    }
    *plan = created;
    return IMBREX_STATUS_OK;
}

void step_plan_destroy(struct step_plan *plan)
{
    free(plan->rows);
    free(plan->block_copies);
    free(plan->slot_copies);
    *plan = (struct step_plan){0};
}

/* ---- the waiting list and the running array, both in order ----------------------------------- */

/* Puts the sequence between two neighbours of the list; NULL is the list's end. */
static void waiting_link(struct scheduler *scheduler, struct sequence *sequence,
                         struct sequence *previous, struct sequence *next)
{
    sequence->state = SEQUENCE_STATE_WAITING;
    sequence->previous = previous;
    sequence->next = next;
    *(previous != NULL ? &previous->next : &scheduler->first_waiting) = sequence;
    *(next != NULL ? &next->previous : &scheduler->last_waiting) = sequence;
    scheduler->num_waiting++;
}

/* New sequences are mostly the last in order, ... */
static void waiting_insert_from_tail(struct scheduler *scheduler, struct sequence *sequence)
{
    struct sequence *previous = scheduler->last_waiting;
    while (previous != NULL && is_before(sequence, previous)) {
        previous = previous->previous;
    }
    waiting_link(scheduler, sequence, previous,
                 previous != NULL ? previous->next : scheduler->first_waiting);
}

/* ... those that ran are among the first. */
static void waiting_insert_from_head(struct scheduler *scheduler, struct sequence *sequence)
{
    struct sequence *next = scheduler->first_waiting;
    while (next != NULL && is_before(next, sequence)) {
        next = next->next;
    }
    waiting_link(scheduler, sequence, next != NULL ? next->previous : scheduler->last_waiting,
                 next);
}

static void waiting_remove(struct scheduler *scheduler, struct sequence *sequence)
{
    struct sequence *previous = sequence->previous, *next = sequence->next;
    *(previous != NULL ? &previous->next : &scheduler->first_waiting) = next;
    *(next != NULL ? &next->previous : &scheduler->last_waiting) = previous;
    sequence->previous = NULL;
    sequence->next = NULL;
    scheduler->num_waiting--;
}

static void running_insert(struct scheduler *scheduler, struct sequence *sequence)
{
    int32_t i = scheduler->num_running;
    while (i > 0 && is_before(sequence, scheduler->running[i - 1])) {
        scheduler->running[i] = scheduler->running[i - 1];
        i--;
    }
    scheduler->running[i] = sequence;
    scheduler->num_running++;
    sequence->state = SEQUENCE_STATE_RUNNING;
}

static void running_remove(struct scheduler *scheduler, const struct sequence *sequence)
{
    int32_t i = scheduler->num_running - 1;
    while (scheduler->running[i] != sequence) {
        assert(i > 0);
        i--;
    }
    scheduler->num_running--;
    for (; i < scheduler->num_running; i++) {
        scheduler->running[i] = scheduler->running[i + 1];
    }
}

/* ---- blocks and slots ------------------------------------------------------------------------ */

static int32_t *table_of(const struct scheduler *scheduler, const struct sequence *sequence)
{
    assert(sequence->slot >= 0);
    return scheduler->block_tables + (size_t)sequence->slot * (size_t)scheduler->options.max_blocks;
}

static void take_slot(struct scheduler *scheduler, struct sequence *sequence)
{
    assert(scheduler->num_free_slots > 0);
    scheduler->num_free_slots--;
    sequence->slot = scheduler->free_slots[scheduler->num_free_slots];
    sequence->num_blocks = 0;
    scheduler->owners[sequence->slot] = sequence;
}

/* Releases the blocks beyond the first num_kept. */
static void release_blocks(struct scheduler *scheduler, struct sequence *sequence, int32_t num_kept)
{
    const int32_t *table = table_of(scheduler, sequence);
    while (sequence->num_blocks > num_kept) {
        sequence->num_blocks--;
        kv_pool_release(scheduler->pool, table[sequence->num_blocks]);
    }
}

/* Gives back everything the sequence holds; no step in flight does so any more. */
static void release_all(struct scheduler *scheduler, struct sequence *sequence)
{
    assert(sequence->num_in_flight == 0);
    if (scheduler->cache.finish != NULL) {
        scheduler->cache.finish(scheduler->cache.user, sequence);
    }
    release_blocks(scheduler, sequence, 0);
    sequence->num_skipped = 0;
    sequence->is_spoilt = false;
    /* A fork that ends before its first step needs no ids, and its slot may get another owner. */
    for (int32_t i = 0; i < scheduler->num_slot_copies; i++) {
        if (scheduler->slot_copies[i].destination == sequence->slot) {
            scheduler->num_slot_copies--;
            scheduler->slot_copies[i] = scheduler->slot_copies[scheduler->num_slot_copies];
            break;
        }
    }
    scheduler->owners[sequence->slot] = NULL;
    scheduler->free_slots[scheduler->num_free_slots] = sequence->slot;
    scheduler->num_free_slots++;
    sequence->slot = -1;
}

/* Blocks that nobody else uses. */
static int32_t count_own_blocks(const struct scheduler *scheduler, const struct sequence *sequence)
{
    const int32_t *table = table_of(scheduler, sequence);
    int32_t num_own = 0;
    for (int32_t i = 0; i < sequence->num_blocks; i++) {
        num_own += !kv_pool_is_shared(scheduler->pool, table[i]);
    }
    return num_own;
}

/* ---- preemption ------------------------------------------------------------------------------ */

/* Blocks that the steps in flight will give back and nobody counts on yet. */
static int32_t count_returning(const struct planner *planner)
{
    return planner->num_returning_blocks + planner->scheduler->pool->num_pinned -
           planner->num_claimed_blocks;
}

static void tell_arrival(const struct scheduler *scheduler, struct sequence *sequence)
{
    if (scheduler->cache.arrive != NULL) {
        scheduler->cache.arrive(scheduler->cache.user, sequence);
    }
}

static void forget_cache(struct scheduler *scheduler, struct sequence *sequence)
{
    release_all(scheduler, sequence);
    sequence->num_computed = 0;
    tell_arrival(scheduler, sequence);
}

/* Sends the last of the running sequences back to the waiting list. */
static void preempt_last(struct planner *planner)
{
    struct scheduler *scheduler = planner->scheduler;
    scheduler->num_running--;
    struct sequence *last = scheduler->running[scheduler->num_running];

    if (last->num_in_flight == 0) {
        forget_cache(scheduler, last);
    } else {
        last->is_preempted = true;
        scheduler->num_returning++;
        planner->num_returning_blocks += count_own_blocks(scheduler, last);
    }
    last->num_preemptions++;
    scheduler->num_preemptions++;
    waiting_insert_from_head(scheduler, last);
}

/* ---- admission ------------------------------------------------------------------------------- */

/* What the next of the waiting list must find. */
struct room {
    int32_t num_blocks;
    int32_t num_promised_slots; /* of the free ones, those that are kept for others */
};

static bool has_room(const struct scheduler *scheduler, const struct room *room)
{
    return scheduler->num_free_slots > room->num_promised_slots &&
           kv_pool_num_available(scheduler->pool) >= room->num_blocks;
}

/* Slots that the first num_earlier running sequences will want for their forks: a fork without one
 * computes its prompt again. */
static int32_t count_promised_slots(const struct scheduler *scheduler, int32_t num_earlier)
{
    int32_t num_promised = 0;
    for (int32_t i = 0; i < num_earlier; i++) {
        const struct sequence *sequence = scheduler->running[i];
        if (sequence->num_tokens == sequence->num_prompt_tokens && sequence->num_draws > 1) {
            num_promised += sequence->num_draws - 1;
        }
    }
    return num_promised;
}

/* What a sequence needs behind the first num_earlier running ones: its blocks, and one to spare for
 * each of these. */
static struct room room_of(const struct scheduler *scheduler, const struct sequence *sequence,
                           int32_t num_earlier)
{
    return (struct room){
        .num_blocks = blocks_of_tokens(sequence_num_wanted(sequence)) + num_earlier,
        .num_promised_slots = count_promised_slots(scheduler, num_earlier),
    };
}

bool scheduler_has_room(const struct scheduler *scheduler, const struct sequence *sequence)
{
    int32_t num_earlier = scheduler->num_running;
    while (num_earlier > 0 && is_before(sequence, scheduler->running[num_earlier - 1])) {
        num_earlier--;
    }
    const struct room room = room_of(scheduler, sequence, num_earlier);
    return has_room(scheduler, &room);
}

/* Whether the head of the waiting list has its room now, once what comes later has been preempted
 * where that helps. If that room comes only when a step in flight is finished, those that come
 * later and stay may take a block each before, so that room is made for these too: the first of all
 * waits for one step only. */
static bool make_room(struct planner *planner, const struct sequence *head)
{
    struct scheduler *scheduler = planner->scheduler;
    const struct kv_pool *pool = scheduler->pool;
    int32_t num_later = 0;
    int64_t num_later_blocks = 0;

    while (num_later < scheduler->num_running &&
           is_before(head, scheduler->running[scheduler->num_running - 1 - num_later])) {
        num_later++;
        num_later_blocks += scheduler->running[scheduler->num_running - num_later]->num_blocks;
    }
    int32_t num_earlier = scheduler->num_running - num_later;
    const struct room room = room_of(scheduler, head, num_earlier);
    /* If even all of them do not make the room, they go on. Shared blocks may count twice here: the
     * first of all sequences must not wait for a doubt. */
    if (kv_pool_num_available(pool) + count_returning(planner) + num_later_blocks <
        room.num_blocks) {
        return false;
    }
    while (num_later > 0 && !has_room(scheduler, &room) &&
           (scheduler->num_free_slots + scheduler->num_returning <= room.num_promised_slots ||
            kv_pool_num_available(pool) + count_returning(planner) < room.num_blocks + num_later)) {
        preempt_last(planner);
        num_later--;
    }
    return has_room(scheduler, &room);
}

static bool is_held(const struct scheduler *scheduler, const struct sequence *sequence)
{
    return scheduler->cache.is_held != NULL &&
           scheduler->cache.is_held(scheduler->cache.user, sequence);
}

/* Starts the table with what the cache has of the sequence. */
static void take_cached(struct scheduler *scheduler, struct sequence *sequence, int32_t *table)
{
    int32_t max_tokens = sequence_max_cached(sequence);
    if (scheduler->cache.admit != NULL) {
        sequence->num_blocks = scheduler->cache.admit(scheduler->cache.user, sequence,
                                                      max_tokens / KV_BLOCK_SIZE, table);
        sequence->num_computed = sequence->num_blocks * KV_BLOCK_SIZE;
        sequence->num_skipped = sequence->num_computed;
        assert(sequence->num_computed <= max_tokens);
    }
}

static void admit_waiting(struct planner *planner)
{
    struct scheduler *scheduler = planner->scheduler;
    struct sequence *head;

    while ((head = scheduler->first_waiting) != NULL && !head->is_preempted &&
           !is_held(scheduler, head) && make_room(planner, head)) {
        int32_t num_needed = blocks_of_tokens(sequence_num_wanted(head));
        waiting_remove(scheduler, head);
        take_slot(scheduler, head);
        int32_t *table = table_of(scheduler, head);
        assert(num_needed <= scheduler->options.max_blocks);
        take_cached(scheduler, head, table);
        while (head->num_blocks < num_needed) {
            enum imbrex_status status = kv_pool_acquire(scheduler->pool, &table[head->num_blocks]);
            assert(status == IMBREX_STATUS_OK);
            (void)status;
            head->num_blocks++;
        }
        running_insert(scheduler, head);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool needs_tokens(const struct sequence *sequence)
{
    return sequence->num_computed < sequence_num_wanted(sequence) &&
           (sequence->num_draws == 0 || sequence->num_tokens < sequence->max_tokens);
}

static bool is_decode(const struct sequence *sequence)
{
    return sequence->num_computed >= sequence->num_prompt_tokens &&
           sequence->num_tokens - sequence->num_computed == 1;
}

/* What is drawn where the tokens end. */
static int32_t draws_at_end(const struct sequence *sequence)
{
    bool is_prompt_end = sequence->num_tokens == sequence->num_prompt_tokens;
    return is_prompt_end ? sequence->num_draws : 1;
}

/* Of positions [begin, end), those that have a next prompt token and are wanted. */
static int32_t count_scored(const struct sequence *sequence, int32_t begin, int32_t end)
{
    int32_t first = max_int32(begin, sequence->score_begin);
    int32_t behind = min_int32(end, sequence->num_prompt_tokens - 1);
    return behind > first ? behind - first : 0;
}

static void add_row(struct planner *planner, struct sequence *sequence, int32_t num_tokens)
{
    struct step_plan *plan = planner->plan;
    int32_t begin = sequence->num_computed, end = begin + num_tokens;
    int32_t num_draws = end == sequence_num_wanted(sequence) ? draws_at_end(sequence) : 0;
    int32_t num_scored = count_scored(sequence, begin, end);

    /* Positions are scored up to the end of the row, or to the one that is drawn from. */
    plan->rows[plan->num_rows] = (struct step_row){
        .sequence = sequence,
        .slot = sequence->slot,
        .position = begin,
        .num_tokens = num_tokens,
        .num_history = sequence->num_skipped,
        .first_scored = num_scored > 0 ? max_int32(begin, sequence->score_begin) : end,
        .num_draws = num_draws,
    };
    plan->num_rows++;
    plan->num_tokens += num_tokens;
    plan->num_history += sequence->num_skipped;
    plan->num_samples += num_scored + num_draws;
    assert(sequence->num_blocks >= blocks_of_tokens(end));
    assert(plan->num_tokens <= planner->scheduler->options.max_step_tokens);
    assert(plan->num_samples <= planner->scheduler->options.max_step_samples);
    sequence->num_in_flight++;
    sequence->num_computed = end;
    sequence->num_skipped = 0;
    sequence->num_tokens += num_draws > 0;
    sequence->score_begin = max_int32(sequence->score_begin, end);
}

static bool has_history_room(const struct planner *planner, const struct sequence *sequence)
{
    return planner->plan->num_history + sequence->num_skipped <=
           planner->scheduler->options.max_step_history;
}

/* A block of its own for the token at num_computed. False if the sequence cannot be in this step;
 * then it may have been preempted. */
static bool take_write_block(struct planner *planner, struct sequence *sequence)
{
    struct scheduler *scheduler = planner->scheduler;
    struct kv_pool *pool = scheduler->pool;
    int32_t *table = table_of(scheduler, sequence);
    int32_t i = sequence->num_computed / KV_BLOCK_SIZE;

    for (;;) {
        bool has_block = i < sequence->num_blocks;
        int32_t block_idx;
        /* What a fork shares with its parent may have been filled by that one, and kept. */
        if (has_block && kv_pool_is_writable(pool, table[i])) {
            return true;
        }
        if (kv_pool_acquire(pool, &block_idx) == IMBREX_STATUS_OK) {
            if (has_block) {
                struct step_plan *plan = planner->plan;
                plan->block_copies[plan->num_block_copies] =
                    (struct step_block_copy){.source = table[i], .destination = block_idx};
                plan->num_block_copies++;
                kv_pool_pin(pool, table[i]);
                kv_pool_release(pool, table[i]);
            } else {
                assert(i == sequence->num_blocks && i < scheduler->options.max_blocks);
                sequence->num_blocks++;
            }
            table[i] = block_idx;
            return true;
        }
        if (count_returning(planner) > 0) {
            planner->num_claimed_blocks++;
            return false;
        }
        /* The only one has the whole pool, but for what steps in flight and moves hold. One that
         * lacks a second block for one that is kept begins anew. */
        if (scheduler->num_running == 1 && (scheduler->num_returning > 0 || pool->num_pinned > 0)) {
            return false;
        }
        assert(scheduler->num_running > 1 || has_block);
        bool is_last = scheduler->running[scheduler->num_running - 1] == sequence;
        preempt_last(planner);
        if (is_last) {
            return false;
        }
    }
}

static void plan_decode(struct planner *planner)
{
    struct scheduler *scheduler = planner->scheduler;
    for (int32_t i = 0; i < scheduler->num_running; i++) {
        struct sequence *sequence = scheduler->running[i];
        if (needs_tokens(sequence) && is_decode(sequence) && has_history_room(planner, sequence) &&
            take_write_block(planner, sequence)) {
            add_row(planner, sequence, 1);
        }
    }
}

/* How many tokens of its prompt (and of what followed, after a preemption) a sequence gets. */
static int32_t count_prefill_tokens(const struct planner *planner, const struct sequence *sequence)
{
    const struct scheduler_options *options = &planner->scheduler->options;
    int32_t begin = sequence->num_computed;
    int32_t wanted = sequence_num_wanted(sequence);
    int32_t num_tokens_left = options->max_step_tokens - planner->plan->num_tokens;
    int32_t num_samples_left = options->max_step_samples - planner->plan->num_samples;
    int32_t end = begin + min_int32(wanted - begin, num_tokens_left);
    int32_t num_draws = end == wanted ? draws_at_end(sequence) : 0;

    if (count_scored(sequence, begin, end) + num_draws > num_samples_left) {
        end = min_int32(end, wanted - 1);
        if (count_scored(sequence, begin, end) > num_samples_left) {
            end = max_int32(begin, sequence->score_begin) + num_samples_left;
        }
    }
    if (options->has_block_edges && end < wanted) {
        end -= end % KV_BLOCK_SIZE;
    }
    return max_int32(end - begin, 0);
}

static void plan_prefill(struct planner *planner)
{
    struct scheduler *scheduler = planner->scheduler;
    for (int32_t i = 0; i < scheduler->num_running; i++) {
        struct sequence *sequence = scheduler->running[i];
        if (needs_tokens(sequence) && !is_decode(sequence) && has_history_room(planner, sequence)) {
            int32_t num_tokens = count_prefill_tokens(planner, sequence);
            if (num_tokens > 0) {
                add_row(planner, sequence, num_tokens);
            }
        }
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

void scheduler_plan(struct scheduler *scheduler, struct step_plan *plan)
{
    struct planner planner = {.scheduler = scheduler, .plan = plan};
    int32_t num_left = scheduler->num_returning;

    plan->num_rows = 0;
    plan->num_block_copies = 0;
    plan->num_slot_copies = 0;
    plan->num_tokens = 0;
    plan->num_history = 0;
    plan->num_samples = 0;
    for (int32_t slot = 0; num_left > 0; slot++) {
        const struct sequence *owner = scheduler->owners[slot];
        if (owner != NULL && (owner->is_ending || owner->is_preempted)) {
            planner.num_returning_blocks += count_own_blocks(scheduler, owner);
            num_left--;
        }
    }
    admit_waiting(&planner);
    plan_decode(&planner);
    plan_prefill(&planner);
    if (plan->num_rows > 0) {
        plan->num_slot_copies = scheduler->num_slot_copies;
        memcpy(plan->slot_copies, scheduler->slot_copies,
               (size_t)scheduler->num_slot_copies * sizeof(*plan->slot_copies));
        scheduler->num_slot_copies = 0;
    }
}

void scheduler_finish_step(struct scheduler *scheduler, const struct step_plan *plan)
{
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        kv_pool_unpin(scheduler->pool, plan->block_copies[i].source);
    }
    for (int32_t i = 0; i < plan->num_rows; i++) {
        struct sequence *sequence = plan->rows[i].sequence;
        assert(sequence->num_in_flight > 0);
        sequence->num_in_flight--;
        if (sequence->num_in_flight > 0) {
            continue;
        }
        if (sequence->is_ending) {
            release_all(scheduler, sequence);
            sequence->is_ending = false;
            sequence->state = SEQUENCE_STATE_ENDED;
            scheduler->num_returning--;
        } else if (sequence->is_preempted) {
            forget_cache(scheduler, sequence);
            sequence->is_preempted = false;
            scheduler->num_returning--;
        }
    }
}

/* ---- sequences come and go ------------------------------------------------------------------- */

/* Sets what the scheduler writes, but for the order and what add and fork do differently. */
static void start(struct scheduler *scheduler, struct sequence *sequence, int32_t num_tokens)
{
    sequence->num_tokens = num_tokens;
    sequence->num_computed = 0;
    sequence->slot = -1;
    sequence->num_blocks = 0;
    sequence->num_in_flight = 0;
    sequence->num_preemptions = 0;
    sequence->num_skipped = 0;
    sequence->is_ending = false;
    sequence->is_preempted = false;
    sequence->is_spoilt = false;
    sequence->previous = NULL;
    sequence->next = NULL;
    if (sequence->deadline_ns < scheduler->next_deadline_ns) {
        scheduler->next_deadline_ns = sequence->deadline_ns;
    }
}

void scheduler_add(struct scheduler *scheduler, struct sequence *sequence)
{
    assert(sequence->num_prompt_tokens >= 1);
    assert(sequence->num_draws == 0 || sequence->num_prompt_tokens < sequence->max_tokens);
    start(scheduler, sequence, sequence->num_prompt_tokens);
    sequence->order_key =
        order_key(sequence->arrival_ns, sequence->priority, scheduler->options.priority_step_ns);
    sequence->order_idx = scheduler->next_order_idx++;
    sequence->fork_idx = 0;
    waiting_insert_from_tail(scheduler, sequence);
    tell_arrival(scheduler, sequence);
}

/* Puts on top of the stack a free slot that no slot copy reads, so that the copies of one step can
 * be done in any order. False if there is none. */
static bool choose_fork_slot(struct scheduler *scheduler)
{
    int32_t *slots = scheduler->free_slots;
    int32_t top = scheduler->num_free_slots - 1;
    for (int32_t i = top; i >= 0; i--) {
        bool is_source = false;
        for (int32_t copy = 0; copy < scheduler->num_slot_copies; copy++) {
            is_source |= scheduler->slot_copies[copy].source == slots[i];
        }
        if (!is_source) {
            int32_t chosen = slots[i];
            slots[i] = slots[top];
            slots[top] = chosen;
            return true;
        }
    }
    return false;
}

void scheduler_fork(struct scheduler *scheduler, const struct sequence *parent,
                    struct sequence *child)
{
    int32_t num_prompt_tokens = parent->num_prompt_tokens;

    assert(child->num_prompt_tokens == num_prompt_tokens);
    assert(child->num_draws == 1 && num_prompt_tokens < child->max_tokens);
    start(scheduler, child, num_prompt_tokens + 1);
    child->score_begin = INT32_MAX; /* the parent has asked for the prompt's */
    child->order_key = parent->order_key;
    child->order_idx = parent->order_idx;
    child->fork_idx = ++scheduler->next_fork_idx;
    /* It does not overtake those that wait for a slot either, its parent among them. */
    bool is_overtaking =
        scheduler->first_waiting != NULL && is_before(scheduler->first_waiting, child);
    if (parent->slot < 0 || is_overtaking || !choose_fork_slot(scheduler)) {
        waiting_insert_from_head(scheduler, child);
        return;
    }
    assert(parent->num_computed >= num_prompt_tokens);
    take_slot(scheduler, child);
    child->num_blocks = blocks_of_tokens(num_prompt_tokens);
    child->num_computed = num_prompt_tokens;
    const int32_t *parent_table = table_of(scheduler, parent);
    int32_t *table = table_of(scheduler, child);
    for (int32_t i = 0; i < child->num_blocks; i++) {
        kv_pool_retain(scheduler->pool, parent_table[i]);
        table[i] = parent_table[i];
    }
    scheduler->slot_copies[scheduler->num_slot_copies] =
        (struct step_slot_copy){.source = parent->slot,
                                .destination = child->slot,
                                .num_tokens = num_prompt_tokens,
                                .fork_idx = child->fork_idx};
    scheduler->num_slot_copies++;
    running_insert(scheduler, child);
}

struct sequence *scheduler_fork_of(const struct scheduler *scheduler,
                                   const struct step_slot_copy *copy)
{
    struct sequence *owner = scheduler->owners[copy->destination];
    return owner != NULL && owner->fork_idx == copy->fork_idx ? owner : NULL;
}

void scheduler_end(struct scheduler *scheduler, struct sequence *sequence)
{
    if (sequence->is_ending || sequence->state == SEQUENCE_STATE_ENDED) {
        return;
    }
    if (sequence->state == SEQUENCE_STATE_WAITING) {
        waiting_remove(scheduler, sequence);
        if (sequence->slot < 0 && scheduler->cache.leave != NULL) {
            scheduler->cache.leave(scheduler->cache.user, sequence);
        }
    } else {
        assert(sequence->state == SEQUENCE_STATE_RUNNING);
        running_remove(scheduler, sequence);
    }
    if (sequence->num_in_flight > 0) {
        sequence->is_ending = true;
        scheduler->num_returning += !sequence->is_preempted;
        sequence->is_preempted = false;
        return;
    }
    if (sequence->slot >= 0) {
        release_all(scheduler, sequence);
    }
    sequence->state = SEQUENCE_STATE_ENDED;
}

void scheduler_truncate(struct scheduler *scheduler, struct sequence *sequence, int32_t num_tokens)
{
    assert(sequence->state == SEQUENCE_STATE_RUNNING && sequence->num_in_flight == 0);
    assert(num_tokens > sequence->num_prompt_tokens && num_tokens <= sequence->num_tokens);
    sequence->num_tokens = num_tokens;
    sequence->num_computed = min_int32(sequence->num_computed, num_tokens - 1);
    /* While it is being computed again it keeps the blocks of all its tokens, as admission gave
     * them. */
    bool is_complete = sequence->num_computed == num_tokens - 1;
    release_blocks(scheduler, sequence, blocks_of_tokens(num_tokens - is_complete));
}

void scheduler_restart(struct scheduler *scheduler, struct sequence *sequence, int32_t num_tokens,
                       int32_t score_begin)
{
    assert(sequence->slot >= 0 && num_tokens >= sequence->num_prompt_tokens);
    sequence->is_spoilt = sequence->num_in_flight > 0;
    if (sequence->is_ending) {
        return;
    }
    sequence->num_tokens = num_tokens;
    sequence->num_computed = min_int32(sequence->num_computed, num_tokens);
    sequence->score_begin = score_begin;
    if (sequence->is_preempted) {
        return;
    }
    running_remove(scheduler, sequence);
    if (sequence->num_in_flight == 0) {
        forget_cache(scheduler, sequence);
    } else {
        sequence->is_preempted = true;
        scheduler->num_returning++;
    }
    sequence->num_preemptions++;
    scheduler->num_preemptions++;
    waiting_insert_from_head(scheduler, sequence);
}

struct sequence *scheduler_find_late(struct scheduler *scheduler, int64_t now_ns)
{
    int64_t next_deadline_ns = INT64_MAX;

    if (now_ns < scheduler->next_deadline_ns) {
        return NULL;
    }
    for (int32_t i = 0; i < scheduler->num_running; i++) {
        struct sequence *sequence = scheduler->running[i];
        if (sequence->deadline_ns <= now_ns) {
            return sequence;
        }
        if (sequence->deadline_ns < next_deadline_ns) {
            next_deadline_ns = sequence->deadline_ns;
        }
    }
    for (struct sequence *sequence = scheduler->first_waiting; sequence != NULL;
         sequence = sequence->next) {
        if (sequence->deadline_ns <= now_ns) {
            return sequence;
        }
        if (sequence->deadline_ns < next_deadline_ns) {
            next_deadline_ns = sequence->deadline_ns;
        }
    }
    scheduler->next_deadline_ns = next_deadline_ns;
    return NULL;
}

bool scheduler_is_idle(const struct scheduler *scheduler)
{
    return scheduler->num_running == 0 && scheduler->num_waiting == 0 &&
           scheduler->num_returning == 0;
}

/* ---- check ----------------------------------------------------------------------------------- */

/* What holds for every sequence, running, waiting or ending. */
static bool check_sequence(const struct scheduler *scheduler, const struct sequence *sequence)
{
    if (sequence->slot < 0) {
        return sequence->slot == -1 && sequence->num_blocks == 0 && sequence->num_computed == 0 &&
               sequence->num_in_flight == 0 && !sequence->is_preempted && !sequence->is_ending;
    }
    return sequence->slot < scheduler->options.max_running &&
           scheduler->owners[sequence->slot] == sequence &&
           sequence->num_blocks <= scheduler->options.max_blocks &&
           sequence->num_computed <= sequence->num_blocks * KV_BLOCK_SIZE &&
           sequence->num_computed <= sequence->num_tokens && sequence->num_in_flight >= 0;
}

static bool check_running(const struct scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->num_running; i++) {
        const struct sequence *sequence = scheduler->running[i];
        if (sequence->state != SEQUENCE_STATE_RUNNING || sequence->slot < 0 ||
            sequence->is_ending || sequence->is_preempted ||
            sequence->deadline_ns < scheduler->next_deadline_ns ||
            !check_sequence(scheduler, sequence) ||
            (i > 0 && !is_before(scheduler->running[i - 1], sequence))) {
            return false;
        }
    }
    return true;
}

static bool check_waiting(const struct scheduler *scheduler)
{
    const struct sequence *previous = NULL;
    int32_t num_waiting = 0;
    for (const struct sequence *sequence = scheduler->first_waiting; sequence != NULL;
         sequence = sequence->next) {
        if (num_waiting == scheduler->num_waiting || sequence->previous != previous ||
            sequence->state != SEQUENCE_STATE_WAITING || sequence->is_ending ||
            sequence->is_preempted != (sequence->num_in_flight > 0) ||
            sequence->is_preempted != (sequence->slot >= 0) ||
            sequence->deadline_ns < scheduler->next_deadline_ns ||
            !check_sequence(scheduler, sequence) ||
            (previous != NULL && !is_before(previous, sequence))) {
            return false;
        }
        previous = sequence;
        num_waiting++;
    }
    return num_waiting == scheduler->num_waiting && scheduler->last_waiting == previous;
}

/* Every slot is free or has an owner, and every user of a block is an entry of an owner's table. */
static bool check_slots(const struct scheduler *scheduler)
{
    const struct kv_pool *pool = scheduler->pool;
    int32_t num_owners = 0, num_returning = 0;

    memset(scheduler->num_seen, 0, (size_t)pool->num_blocks * sizeof(*scheduler->num_seen));
    for (int32_t slot = 0; slot < scheduler->options.max_running; slot++) {
        const struct sequence *owner = scheduler->owners[slot];
        if (owner == NULL) {
            continue;
        }
        if (owner->slot != slot || !check_sequence(scheduler, owner)) {
            return false;
        }
        num_owners++;
        num_returning += owner->is_ending || owner->is_preempted;
        for (int32_t i = 0; i < owner->num_blocks; i++) {
            int32_t block_idx = table_of(scheduler, owner)[i];
            if (block_idx < 0 || block_idx >= pool->num_blocks) {
                return false;
            }
            scheduler->num_seen[block_idx]++;
        }
    }
    for (int32_t i = 0; i < scheduler->num_free_slots; i++) {
        if (scheduler->owners[scheduler->free_slots[i]] != NULL) {
            return false;
        }
        for (int32_t j = 0; j < i; j++) {
            if (scheduler->free_slots[i] == scheduler->free_slots[j]) {
                return false;
            }
        }
    }
    return num_owners + scheduler->num_free_slots == scheduler->options.max_running &&
           num_returning == scheduler->num_returning &&
           num_owners == scheduler->num_running + num_returning &&
           memcmp(scheduler->num_seen, pool->num_users,
                  (size_t)pool->num_blocks * sizeof(*pool->num_users)) == 0;
}

static bool check_slot_copies(const struct scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->num_slot_copies; i++) {
        int32_t destination = scheduler->slot_copies[i].destination;
        if (scheduler->owners[destination] == NULL) {
            return false;
        }
        for (int32_t j = 0; j < scheduler->num_slot_copies; j++) {
            if (scheduler->slot_copies[j].source == destination ||
                (j != i && scheduler->slot_copies[j].destination == destination)) {
                return false;
            }
        }
    }
    return true;
}

bool scheduler_check(const struct scheduler *scheduler)
{
    return check_running(scheduler) && check_waiting(scheduler) && check_slots(scheduler) &&
           check_slot_copies(scheduler) && kv_pool_check(scheduler->pool);
}
