/* SPDX-License-Identifier: Apache-2.0 */
/* A million random steps of the scheduler on a fake clock, with a fake device that keeps the ids of
 * every KV block and of every slot's history. A step is carried out late, when it is collected,
 * from what was planned then; whatever is free, or about to be written, is spoilt at once. So a
 * block that is given out while a step in flight needs it, a copy that is missing, or a chunk that
 * is left out shows as a wrong id in the cache.
 *
 * Waiting is bounded. Of all living sequences the first one in order has a row in every step or,
 * with two steps in flight, in one of any two; that is asserted in each step. A row of a prompt has
 * at least
 *   g = block_size tokens, or max_step_tokens - max_running + 1 where chunks have no edges,
 * so that a choice with p prompt tokens and at most m tokens needs ceil(p / g) + m - p - 1 rows
 * from the moment when it is the first one; if it has t > p tokens by then and must compute all of
 * them again, ceil(t / g) + m - t - 1 is not more. To these come one step until it is admitted and
 * one until its end is seen. With n choices and d steps in flight:
 *   own = n * d * (ceil(p / g) + m - p + 2)
 * A request is over after as many steps as its own bound and those of all requests say that come
 * before it and live at the same time, and
 *   d * tokens                when tokens of one of these are taken back,
 * d * (ceil(m / g) + 2)     when a new request comes before the first sequence, which may lose what
 *                             it has computed: for that sequence's request and those behind it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/scheduler.h"
#include "tests/test.h"

enum {
    NUM_WALKS = TEST_SANITIZED ? 200 : 1000,
    WALK_STEPS = 1000,
    MAX_TOKENS = 100, /* of a sequence */
    MAX_BLOCKS = (MAX_TOKENS + KV_BLOCK_SIZE - 1) / KV_BLOCK_SIZE,
    MAX_RUNNING = 8,
    MAX_STEP_TOKENS = 64,
    MAX_CHOICES = 4,
    MAX_LIVE = 20, /* requests */
    MAX_POOL = MAX_BLOCKS * MAX_RUNNING,
    SPOILT = -7,
};

struct walk_request;

struct walk_choice {
    struct sequence sequence;
    struct walk_request *request;
    int32_t choice_idx;
    int32_t num_planned; /* tokens that it has once every planned step is done */
    int32_t num_known;   /* tokens that the host knows */
    int32_t epoch;       /* how often tokens were taken back: what follows differs */
    bool is_started, is_over;
    /* [num_known] the host's; behind them what steps in flight have drawn, for comparison only. */
    int32_t ids[MAX_TOKENS];
};

struct walk_request {
    struct walk_choice choices[MAX_CHOICES];
    uint8_t num_scored[MAX_TOKENS]; /* results for each position of the prompt */
    int32_t num_choices, score_begin;
    int64_t key; /* computed here, not by the scheduler */
    uint64_t idx;
    int64_t first_step, bound, own_bound;
    bool is_live, is_forked, is_cancelled;
};

/* A planned step as a device would have it. */
struct walk_flight {
    struct step_plan plan;
    int32_t tables[MAX_RUNNING][MAX_BLOCKS];
    int32_t ids[MAX_RUNNING][MAX_TOKENS]; /* by row and position; -1: the host does not know it */
    int32_t draws[MAX_RUNNING][MAX_CHOICES];
};

struct walk {
    uint32_t seed, random;
    struct scheduler_options options;
    struct kv_pool pool;
    struct scheduler scheduler;
    struct walk_flight flights[2];
    int32_t depth, max_tokens, first_flight, num_flights;
    int32_t arrival_odds, end_odds, max_live; /* one in so many steps, tokens; requests */
    bool ends_before_finish;
    int64_t now_ns, step, total_steps;
    uint64_t num_requests;
    struct walk_request requests[MAX_LIVE];
    const struct walk_choice *first; /* of all living, in the last plan */
    int32_t num_left_out;            /* how many plans it has had no row, one after the other */
    int32_t cache[MAX_POOL][KV_BLOCK_SIZE];
    int32_t history[MAX_RUNNING][MAX_TOKENS];
    int64_t num_preemptions, num_block_copies, num_shared_forks, num_late, num_truncated;
};

#define CHECK(walk, condition)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fail_msg("walk %u, step %lld: %s", (walk)->seed, (long long)(walk)->step, #condition); \
        }                                                                                          \
    } while (0)

/* Uniform enough in [begin, end]. */
static int32_t random_in(struct walk *walk, int32_t begin, int32_t end)
{
    walk->random = walk->random * 1664525u + 1013904223u;
    uint64_t range = (uint64_t)((int64_t)end - begin + 1);
    return begin + (int32_t)(((uint64_t)walk->random * range) >> 32);
}

static bool one_in(struct walk *walk, int32_t count)
{
    return random_in(walk, 1, count) == 1;
}

static int32_t divide_up(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

static struct walk_choice *choice_of(struct sequence *sequence)
{
    return sequence->owner;
}

static bool comes_before(const struct walk_choice *a, const struct walk_choice *b)
{
    if (a->request->key != b->request->key) {
        return a->request->key < b->request->key;
    }
    if (a->request->idx != b->request->idx) {
        return a->request->idx < b->request->idx;
    }
    return a->choice_idx < b->choice_idx;
}

static bool request_before(const struct walk_request *a, const struct walk_request *b)
{
    return comes_before(&a->choices[0], &b->choices[0]);
}

/* ---- the fake device ------------------------------------------------------------------------- */

static int32_t *cache_at(struct walk *walk, const int32_t *table, int32_t position)
{
    return &walk->cache[table[position / KV_BLOCK_SIZE]][position % KV_BLOCK_SIZE];
}

static void spoil_block(struct walk *walk, int32_t block_idx)
{
    for (int32_t i = 0; i < KV_BLOCK_SIZE; i++) {
        walk->cache[block_idx][i] = SPOILT;
    }
}

static void spoil_free_blocks(struct walk *walk)
{
    for (int32_t i = 0; i < walk->pool.num_free; i++) {
        spoil_block(walk, walk->pool.free_blocks[i]);
    }
}

/* Takes down what the device would be given, and spoils what it is going to write, unless the same
 * step copies it for another sequence first. */
static void device_submit(struct walk *walk, struct walk_flight *flight)
{
    const struct step_plan *plan = &flight->plan;
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        spoil_block(walk, plan->block_copies[i].destination);
    }
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        const struct walk_choice *choice = choice_of(row->sequence);
        memcpy(flight->tables[i],
               walk->scheduler.block_tables + row->slot * walk->options.max_blocks,
               (size_t)row->sequence->num_blocks * sizeof(int32_t));
        for (int32_t at = row->position; at < row->position + row->num_tokens; at++) {
            flight->ids[i][at] = at < choice->num_known ? choice->ids[at] : -1;
            if (walk->pool.num_pins[flight->tables[i][at / KV_BLOCK_SIZE]] == 0) {
                *cache_at(walk, flight->tables[i], at) = SPOILT;
            }
        }
    }
    spoil_free_blocks(walk);
}

/* The fake model: what follows is a hash of what the cache holds. */
static int32_t draw(uint32_t hash, int32_t choice_idx, int32_t epoch)
{
    hash ^= (uint32_t)choice_idx * 0x9e3779b9u ^ (uint32_t)epoch * 0x85ebca6bu;
    hash ^= hash >> 15;
    hash *= 0x2c1b3c6du;
    hash ^= hash >> 13;
    return (int32_t)(hash & 0xffff);
}

static void device_run_row(struct walk *walk, struct walk_flight *flight, int32_t row_idx)
{
    const struct step_row *row = &flight->plan.rows[row_idx];
    struct walk_choice *choice = choice_of(row->sequence);
    const int32_t *table = flight->tables[row_idx];
    int32_t end = row->position + row->num_tokens;
    uint32_t hash = 2166136261u;
    bool is_same = true;

    for (int32_t at = row->position; at < end; at++) {
        if (flight->ids[row_idx][at] >= 0) {
            walk->history[row->slot][at] = flight->ids[row_idx][at];
        }
        *cache_at(walk, table, at) = walk->history[row->slot][at];
    }
    for (int32_t at = 0; at < end; at++) {
        int32_t id = *cache_at(walk, table, at);
        is_same &= id == choice->ids[at] && id == walk->history[row->slot][at];
        hash = (hash ^ (uint32_t)id) * 16777619u;
    }
    CHECK(walk, is_same);
    for (int32_t i = 0; i < row->num_draws; i++) {
        int32_t id = draw(hash, choice->choice_idx + i, choice->epoch);
        flight->draws[row_idx][i] = id;
        if (i == 0) {
            walk->history[row->slot][end] = id;
            choice->ids[end] = id;
        }
    }
}

/* Copies in whatever order, then the rows. */
static void device_run(struct walk *walk, struct walk_flight *flight)
{
    const struct step_plan *plan = &flight->plan;
    bool is_reversed = one_in(walk, 2);

    spoil_free_blocks(walk);
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        const struct step_block_copy *copy =
            &plan->block_copies[is_reversed ? plan->num_block_copies - 1 - i : i];
        memcpy(walk->cache[copy->destination], walk->cache[copy->source], sizeof(walk->cache[0]));
    }
    for (int32_t i = 0; i < plan->num_slot_copies; i++) {
        const struct step_slot_copy *copy =
            &plan->slot_copies[is_reversed ? plan->num_slot_copies - 1 - i : i];
        memcpy(walk->history[copy->destination], walk->history[copy->source],
               (size_t)copy->num_tokens * sizeof(int32_t));
    }
    /* All rows read before any of another sequence writes, or after: it must not matter. */
    for (int32_t i = 0; i < plan->num_rows; i++) {
        device_run_row(walk, flight, is_reversed ? plan->num_rows - 1 - i : i);
    }
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Rows that so many tokens of the first sequence take at most. */
static int32_t prefill_rows(const struct walk *walk, int32_t num_tokens)
{
    const struct scheduler_options *options = &walk->options;
    int32_t least = options->has_block_edges ? KV_BLOCK_SIZE
                                             : options->max_step_tokens - options->max_running + 1;
    return divide_up(num_tokens, least);
}

/* Steps that the request may take from the moment when it is the first one. */
static int64_t request_bound(const struct walk *walk, const struct walk_request *request)
{
    const struct sequence *sequence = &request->choices[0].sequence;
    int32_t num_rows = prefill_rows(walk, sequence->num_prompt_tokens) + 2;
    if (sequence->num_draws > 0) {
        num_rows += sequence->max_tokens - sequence->num_prompt_tokens;
    }
    return (int64_t)request->num_choices * walk->depth * num_rows;
}

static const struct walk_choice *find_first(const struct walk *walk)
{
    const struct walk_choice *first = NULL;
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        const struct walk_request *request = &walk->requests[i];
        for (int32_t k = 0; request->is_live && k < request->num_choices; k++) {
            const struct walk_choice *choice = &request->choices[k];
            if (choice->is_started && !choice->is_over &&
                (first == NULL || comes_before(choice, first))) {
                first = choice;
            }
        }
    }
    return first;
}

static void add_request(struct walk *walk, struct walk_request *request)
{
    const struct walk_choice *first = find_first(walk);
    *request = (struct walk_request){
        .is_live = true,
        .idx = walk->num_requests++,
        .first_step = walk->step,
        .num_choices = one_in(walk, 4) ? random_in(walk, 2, MAX_CHOICES) : 1,
        .score_begin = INT32_MAX,
    };
    bool only_scores = one_in(walk, 12);
    int32_t max_tokens = one_in(walk, 3) ? walk->max_tokens : random_in(walk, 2, walk->max_tokens);
    int32_t num_prompt_tokens = only_scores ? max_tokens : random_in(walk, 1, max_tokens - 1);
    if (one_in(walk, 2) && max_tokens - num_prompt_tokens > 12) {
        max_tokens = num_prompt_tokens + random_in(walk, 1, 12);
    }
    if (only_scores) {
        request->num_choices = 1;
    }
    if (only_scores || one_in(walk, 4)) {
        request->score_begin = random_in(walk, 0, num_prompt_tokens - 1);
    }
    struct sequence sequence = {
        .arrival_ns = walk->now_ns,
        .deadline_ns = one_in(walk, 16) ? walk->now_ns + random_in(walk, 0, 8000) : INT64_MAX,
        .priority = one_in(walk, 2) ? 0 : random_in(walk, -3, 3),
        .max_tokens = max_tokens,
        .num_draws = 1,
        .score_begin = request->score_begin,
        .num_prompt_tokens = num_prompt_tokens,
    };
    request->key = sequence.arrival_ns - sequence.priority * walk->options.priority_step_ns;
    for (int32_t i = 0; i < request->num_choices; i++) {
        struct walk_choice *choice = &request->choices[i];
        choice->request = request;
        choice->choice_idx = i;
        choice->sequence = sequence;
        choice->sequence.owner = choice;
        choice->num_planned = num_prompt_tokens;
        choice->num_known = num_prompt_tokens;
        for (int32_t at = 0; at < num_prompt_tokens; at++) {
            choice->ids[at] = i == 0 ? random_in(walk, 0, 0xffff) : request->choices[0].ids[at];
        }
    }
    request->choices[0].sequence.num_draws = only_scores ? 0 : request->num_choices;
    request->choices[0].is_started = true;
    scheduler_add(&walk->scheduler, &request->choices[0].sequence);

    request->own_bound = request_bound(walk, request);
    request->bound = request->own_bound;
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        struct walk_request *other = &walk->requests[i];
        if (!other->is_live || other == request) {
            continue;
        }
        if (request_before(other, request)) {
            request->bound += other->own_bound;
        } else {
            other->bound += request->own_bound;
        }
        if (first != NULL && request_before(request, first->request) &&
            !request_before(other, first->request)) {
            other->bound +=
                (int64_t)walk->depth * (prefill_rows(walk, first->sequence.max_tokens) + 2);
        }
    }
}

static void end_choice(struct walk *walk, struct walk_choice *choice)
{
    if (choice->is_started && !choice->is_over) {
        scheduler_end(&walk->scheduler, &choice->sequence);
    }
    choice->is_over = true;
}

static void cancel_request(struct walk *walk, struct walk_request *request)
{
    request->is_cancelled = true;
    for (int32_t i = 0; i < request->num_choices; i++) {
        end_choice(walk, &request->choices[i]);
    }
}

/* Lets go of requests that no step holds, and checks that none waits too long. */
static void reap_requests(struct walk *walk)
{
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        struct walk_request *request = &walk->requests[i];
        bool is_over = request->is_live;
        for (int32_t k = 0; k < request->num_choices && is_over; k++) {
            const struct walk_choice *choice = &request->choices[k];
            is_over = choice->is_over &&
                      (!choice->is_started || choice->sequence.state == SEQUENCE_STATE_ENDED);
        }
        if (is_over && !request->is_cancelled) {
            /* Every position that was asked for has been scored once, however often computed. */
            for (int32_t at = 0; at < request->choices[0].sequence.num_prompt_tokens - 1; at++) {
                CHECK(walk, request->num_scored[at] == (at >= request->score_begin));
            }
        }
        if (request->is_live) {
            CHECK(walk, walk->step - request->first_step <= request->bound);
        }
        request->is_live &= !is_over;
    }
}

/* Takes tokens back from somebody whom no step holds. */
static void truncate_one(struct walk *walk)
{
    if (walk->scheduler.num_running == 0) {
        return;
    }
    int32_t chosen = random_in(walk, 0, walk->scheduler.num_running - 1);
    struct sequence *sequence = walk->scheduler.running[chosen];
    struct walk_choice *choice = choice_of(sequence);
    int32_t num_least = sequence->num_prompt_tokens + 1;
    if (sequence->num_in_flight > 0 || sequence->num_tokens <= num_least) {
        return;
    }
    int32_t num_left = random_in(walk, num_least, sequence->num_tokens - 1);
    int32_t num_taken = sequence->num_tokens - num_left;
    scheduler_truncate(&walk->scheduler, sequence, num_left);
    choice->num_planned = num_left;
    choice->num_known = num_left;
    choice->epoch++;
    walk->num_truncated++;
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        struct walk_request *other = &walk->requests[i];
        if (other->is_live && !request_before(other, choice->request)) {
            other->bound += (int64_t)walk->depth * num_taken;
        }
    }
    choice->request->own_bound += (int64_t)walk->depth * num_taken;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static bool wants_row(const struct walk_choice *choice)
{
    const struct sequence *sequence = &choice->sequence;
    if (sequence->num_draws == 0) {
        return sequence->num_computed < sequence_num_wanted(sequence);
    }
    return choice->num_planned < sequence->max_tokens;
}

/* The first of all sequences is never left out but while a step in flight has what it needs. */
static void check_progress(struct walk *walk, const struct step_plan *plan,
                           const struct walk_choice *first, bool did_want)
{
    bool has_row = false;
    for (int32_t i = 0; i < plan->num_rows; i++) {
        has_row |= choice_of(plan->rows[i].sequence) == first;
    }
    if (first != walk->first || has_row || !did_want) {
        walk->num_left_out = 0;
    }
    walk->num_left_out += first != NULL && did_want && !has_row;
    walk->first = first;
    CHECK(walk, walk->num_left_out < walk->depth);
}

/* The rows against what this file knows of their sequences. */
static void check_plan(struct walk *walk, const struct step_plan *plan)
{
    const struct scheduler_options *options = &walk->options;
    int32_t num_tokens = 0, num_samples = 0;
    const struct walk_choice *previous = NULL;
    bool has_prefill = false;

    CHECK(walk, plan->num_rows <= options->max_running);
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        struct walk_choice *choice = choice_of(row->sequence);
        int32_t num_prompt_tokens = row->sequence->num_prompt_tokens;
        int32_t end = row->position + row->num_tokens;
        bool only_scores = row->sequence->num_draws == 0;
        bool is_decode = row->num_tokens == 1 && row->position >= num_prompt_tokens &&
                         end == choice->num_planned;
        CHECK(walk, !choice->is_over && row->sequence->state == SEQUENCE_STATE_RUNNING);
        CHECK(walk, row->slot == row->sequence->slot && row->num_tokens > 0);
        if (!is_decode && !has_prefill) {
            has_prefill = true;
            previous = NULL;
        }
        CHECK(walk, is_decode != has_prefill);
        CHECK(walk, previous == NULL || comes_before(previous, choice));
        previous = choice;

        int32_t wanted = choice->num_planned;
        if (only_scores && num_prompt_tokens > 1) {
            wanted--;
        }
        CHECK(walk, end <= wanted);
        CHECK(walk, end == wanted || !options->has_block_edges || end % KV_BLOCK_SIZE == 0);
        int32_t num_draws = 0;
        if (end == wanted && !only_scores) {
            num_draws = wanted == num_prompt_tokens ? choice->request->num_choices : 1;
        }
        if (choice->choice_idx > 0) {
            CHECK(walk, wanted > num_prompt_tokens);
        }
        CHECK(walk, row->num_draws == num_draws);
        choice->num_planned += num_draws > 0;
        CHECK(walk, only_scores || choice->num_planned <= row->sequence->max_tokens);
        CHECK(walk, row->sequence->num_tokens == choice->num_planned);
        CHECK(walk, row->sequence->num_computed == end);
        CHECK(walk, row->first_scored >= row->position && row->first_scored <= end);
        int32_t last = num_draws > 0 ? end - 1 : end;
        int32_t num_scored = last > row->first_scored ? last - row->first_scored : 0;
        CHECK(walk, num_scored == 0 || last <= num_prompt_tokens - 1);
        num_samples += num_scored + num_draws;
        num_tokens += row->num_tokens;
    }
    CHECK(walk, plan->num_tokens == num_tokens && num_tokens <= options->max_step_tokens);
    CHECK(walk, plan->num_samples == num_samples && num_samples <= options->max_step_samples);
    CHECK(walk, plan->num_rows > 0 || plan->num_block_copies + plan->num_slot_copies == 0);
    walk->num_block_copies += plan->num_block_copies;
    walk->num_shared_forks += plan->num_slot_copies;
}

static void check_state(struct walk *walk)
{
    int32_t num_pins = 0, num_copies = 0;
    CHECK(walk, kv_pool_check(&walk->pool));
    CHECK(walk, scheduler_check(&walk->scheduler));
    for (int32_t i = 0; i < walk->pool.num_blocks; i++) {
        num_pins += walk->pool.num_pins[i];
    }
    for (int32_t i = 0; i < walk->num_flights; i++) {
        num_copies += walk->flights[(walk->first_flight + i) % 2].plan.num_block_copies;
    }
    CHECK(walk, num_pins == num_copies);
}

static void fork_choices(struct walk *walk, struct walk_request *request, const int32_t *draws)
{
    struct walk_choice *parent = &request->choices[0];
    int32_t num_tokens = parent->sequence.num_prompt_tokens + 1;
    request->is_forked = true;
    for (int32_t i = 1; i < request->num_choices; i++) {
        struct walk_choice *child = &request->choices[i];
        child->ids[num_tokens - 1] = draws[i];
        child->num_known = num_tokens;
        child->num_planned = num_tokens;
        if (num_tokens == child->sequence.max_tokens || draws[i] % walk->end_odds == 0) {
            child->is_over = true; /* its first token was its last */
            continue;
        }
        child->is_started = true;
        scheduler_fork(&walk->scheduler, &parent->sequence, &child->sequence);
    }
}

static void take_row(struct walk *walk, const struct walk_flight *flight, int32_t row_idx)
{
    const struct step_row *row = &flight->plan.rows[row_idx];
    struct walk_choice *choice = choice_of(row->sequence);
    struct walk_request *request = choice->request;
    int32_t end = row->position + row->num_tokens;
    int32_t last = row->num_draws > 0 ? end - 1 : end;

    for (int32_t at = row->first_scored; at < last; at++) {
        request->num_scored[at]++;
    }
    if (row->sequence->num_draws == 0 && end == sequence_num_wanted(row->sequence)) {
        end_choice(walk, choice);
    }
    if (row->num_draws == 0 || choice->is_over) {
        return;
    }
    bool is_prompt_end = end == row->sequence->num_prompt_tokens && choice->choice_idx == 0;
    bool forks_first = one_in(walk, 2);
    CHECK(walk, choice->num_known == end && choice->ids[end] == flight->draws[row_idx][0]);
    choice->num_known++;
    if (is_prompt_end && forks_first) {
        fork_choices(walk, request, flight->draws[row_idx]);
    }
    if (choice->num_known == row->sequence->max_tokens || choice->ids[end] % walk->end_odds == 0) {
        end_choice(walk, choice);
    }
    if (is_prompt_end && !forks_first) {
        fork_choices(walk, request, flight->draws[row_idx]);
    }
}

static void collect(struct walk *walk)
{
    struct walk_flight *flight = &walk->flights[walk->first_flight];
    device_run(walk, flight);
    if (!walk->ends_before_finish) {
        scheduler_finish_step(&walk->scheduler, &flight->plan);
    }
    for (int32_t i = 0; i < flight->plan.num_rows; i++) {
        take_row(walk, flight, i);
    }
    if (walk->ends_before_finish) {
        scheduler_finish_step(&walk->scheduler, &flight->plan);
    }
    walk->first_flight = (walk->first_flight + 1) % 2;
    walk->num_flights--;
    check_state(walk);
}

static void walk_step(struct walk *walk)
{
    struct walk_flight *flight = &walk->flights[(walk->first_flight + walk->num_flights) % 2];
    const struct walk_choice *first = find_first(walk);
    bool did_want = first != NULL && wants_row(first);

    scheduler_plan(&walk->scheduler, &flight->plan);
    walk->step++;
    check_plan(walk, &flight->plan);
    check_progress(walk, &flight->plan, first, did_want);
    if (flight->plan.num_rows > 0) {
        device_submit(walk, flight);
        walk->num_flights++;
    }
    check_state(walk);
    if (walk->num_flights == walk->depth || (flight->plan.num_rows == 0 && walk->num_flights > 0)) {
        collect(walk);
    }
    reap_requests(walk);
}

/* ---- a walk ---------------------------------------------------------------------------------- */

static void walk_open(struct walk *walk, uint32_t seed)
{
    static const int64_t priority_steps[] = {0, 1, 300, 5000};
    memset(walk, 0, sizeof(*walk));
    walk->seed = seed;
    walk->random = seed * 2654435761u + 1;
    walk->depth = random_in(walk, 1, 2);
    walk->max_tokens = one_in(walk, 4) ? random_in(walk, 2, 20) : random_in(walk, 20, MAX_TOKENS);
    walk->ends_before_finish = one_in(walk, 2);
    walk->arrival_odds = one_in(walk, 2) ? 1 : random_in(walk, 2, 6);
    walk->end_odds = one_in(walk, 3) ? 16 : 1000;
    walk->max_live = one_in(walk, 2) ? MAX_LIVE : random_in(walk, 1, MAX_LIVE);
    struct scheduler_options *options = &walk->options;
    options->max_running = one_in(walk, 3) ? MAX_RUNNING : random_in(walk, 1, MAX_RUNNING);
    options->has_block_edges = one_in(walk, 2);
    int32_t least = options->max_running + (options->has_block_edges ? KV_BLOCK_SIZE - 1 : 0);
    options->max_step_tokens = one_in(walk, 3) ? least : random_in(walk, least, MAX_STEP_TOKENS);
    options->max_step_samples = options->max_step_tokens + IMBREX_MAX_CHOICES;
    options->max_blocks = divide_up(walk->max_tokens - 1, KV_BLOCK_SIZE);
    options->priority_step_ns = priority_steps[random_in(walk, 0, 3)];
    int32_t num_blocks = options->max_blocks;
    if (!one_in(walk, 4)) {
        int32_t num_more = num_blocks * (options->max_running - 1);
        num_blocks += random_in(walk, 0, one_in(walk, 2) ? num_more : num_more / 3);
    }
    assert_int_equal(kv_pool_create(num_blocks, &walk->pool, NULL), IMBREX_STATUS_OK);
    assert_int_equal(scheduler_create(options, &walk->pool, &walk->scheduler, NULL),
                     IMBREX_STATUS_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(step_plan_create(options, &walk->flights[i].plan, NULL), IMBREX_STATUS_OK);
    }
}

static void walk_close(struct walk *walk)
{
    for (int i = 0; i < 2; i++) {
        step_plan_destroy(&walk->flights[i].plan);
    }
    scheduler_destroy(&walk->scheduler);
    kv_pool_destroy(&walk->pool);
}

/* What may happen between two steps. */
static void walk_events(struct walk *walk, bool is_draining)
{
    walk->now_ns += random_in(walk, 0, 200);
    struct walk_request *free_request = NULL;
    int32_t num_live = 0;
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        if (walk->requests[i].is_live) {
            num_live++;
        } else {
            free_request = &walk->requests[i];
        }
    }
    if (!is_draining && num_live < walk->max_live && one_in(walk, walk->arrival_odds)) {
        add_request(walk, free_request);
    }
    if (one_in(walk, 200)) {
        struct walk_request *request = &walk->requests[random_in(walk, 0, MAX_LIVE - 1)];
        if (request->is_live) {
            cancel_request(walk, request);
        }
    }
    if (one_in(walk, 10)) {
        truncate_one(walk);
    }
    struct sequence *late;
    while ((late = scheduler_find_late(&walk->scheduler, walk->now_ns)) != NULL) {
        CHECK(walk, late->deadline_ns <= walk->now_ns && !choice_of(late)->is_over);
        cancel_request(walk, choice_of(late)->request);
        walk->num_late++;
    }
    for (int32_t i = 0; i < MAX_LIVE; i++) {
        const struct walk_request *request = &walk->requests[i];
        CHECK(walk, !request->is_live || request->is_cancelled ||
                        request->choices[0].sequence.deadline_ns > walk->now_ns ||
                        request->choices[0].is_over);
    }
}

/* Catches: all that can go wrong in a long life; see the head of this file. */
static void test_walk(void **state)
{
    (void)state;
    struct walk *walk = calloc(1, sizeof(*walk));
    int64_t num_steps = 0, num_preemptions = 0, num_block_copies = 0, num_shared_forks = 0;
    int64_t num_late = 0, num_truncated = 0;
    assert_non_null(walk);
    for (uint32_t seed = 1; seed <= NUM_WALKS; seed++) {
        walk_open(walk, seed);
        while (walk->step < WALK_STEPS) {
            walk_events(walk, false);
            walk_step(walk);
        }
        /* No more come: all end, within their bounds. */
        while (!scheduler_is_idle(&walk->scheduler) || walk->num_flights > 0) {
            walk_events(walk, true);
            walk_step(walk);
        }
        for (int32_t i = 0; i < MAX_LIVE; i++) {
            CHECK(walk, !walk->requests[i].is_live);
        }
        CHECK(walk, walk->pool.num_free == walk->pool.num_blocks);
        num_steps += walk->step;
        num_preemptions += (int64_t)walk->scheduler.num_preemptions;
        num_block_copies += walk->num_block_copies;
        num_shared_forks += walk->num_shared_forks;
        num_late += walk->num_late;
        num_truncated += walk->num_truncated;
        walk_close(walk);
    }
    free(walk);
    /* The walk went where it was meant to go. */
    assert_true(num_steps >= (int64_t)NUM_WALKS * WALK_STEPS);
    assert_true(num_preemptions > num_steps / 500);
    assert_true(num_block_copies > num_steps / 500);
    assert_true(num_shared_forks > num_steps / 500);
    assert_true(num_late > num_steps / 1000);
    assert_true(num_truncated > num_steps / 500);
    print_message("%lld steps: %lld preemptions, %lld block copies, %lld forks that share, %lld "
                  "late, %lld taken back\n",
                  (long long)num_steps, (long long)num_preemptions, (long long)num_block_copies,
                  (long long)num_shared_forks, (long long)num_late, (long long)num_truncated);
}

int run_scheduler_walk_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk),
    };
    return cmocka_run_group_tests_name("scheduler_walk", tests, NULL, NULL);
}
