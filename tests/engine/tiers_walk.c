/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/engine/tiers_walk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/prefix_tiers.h"
#include "engine/request.h"
#include "kv/kv_remote_link.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/faulty_files.h"
#include "tests/kv/tiers_set_up.h"
#include "tests/test.h"

enum {
    TOKEN_WORDS = 32,                    /* of a token's place in a block */
    NUM_LAYERS = 4,                      /* that a block is copied in, as if it had them */
    HEAD_DIM = TOKEN_WORDS / NUM_LAYERS, /* fp32, one head, K and V */
    BLOCK_BYTES = KV_BLOCK_SIZE * TOKEN_WORDS * 8,
    MAX_TOKENS = 160, /* of a sequence */
    MAX_BLOCKS = (MAX_TOKENS + KV_BLOCK_SIZE - 1) / KV_BLOCK_SIZE,
    MAX_RUNNING = 6,
    MAX_STEP_TOKENS = 96,
    MAX_CHOICES = 3,
    MAX_LIVE = 16,
    MAX_DEPTH = 2,
    NUM_STORIES = 10, /* what prompts begin with */
    NUM_PAST = 8,     /* requests that are over and that others go on */
    NUM_SALTS = 3,
    SEGMENT_BLOCKS = 8,
    FAULT_STEPS = 100, /* a server does wrong in one way */
    /* Steps until what is being promoted is there: a move of the fake device's streams comes with
     * each of its calls, of which a step has several. */
    PROMOTION_STEPS = 100,
    /* With patience without end: reads that a disk has begun and answers of a server, waited for a
     * millisecond at a time. */
    PATIENT_STEPS = 30000,
};

struct walk_request {
    struct imbrex_request request; /* what prefix.c sees of one */
    struct request_choice choices[MAX_CHOICES];
    int32_t prompt_ids[MAX_TOKENS];
    int32_t output_ids[MAX_CHOICES][MAX_TOKENS];
    int64_t key; /* computed here, not by the scheduler */
    uint64_t idx;
    uint32_t salt;
    int64_t first_step, bound, own_bound;
};

struct past {
    int32_t ids[MAX_TOKENS];
    int32_t num_ids;
};

/* A step as the device gets it. */
struct walk_flight {
    struct walk *walk;
    struct step_plan plan;
    struct device_event *event;
    enum imbrex_status status; /* of its submission */
    struct executor_waits waits;
    int64_t submit_ns;
    int32_t tables[MAX_RUNNING][MAX_BLOCKS];
    int32_t ids[MAX_RUNNING][MAX_TOKENS]; /* by row and position; -1: the host does not know it */
    uint64_t roots[MAX_RUNNING];
    int32_t draws[MAX_RUNNING][MAX_CHOICES];
    bool is_wrong[MAX_RUNNING]; /* it read something else than what was to be there */
    int32_t pinned_blocks[MAX_RUNNING * MAX_BLOCKS];
    int32_t num_pinned_blocks;
};

struct walk {
    const struct tiers_walk_options *options;
    struct tiers_walk_totals *totals;
    uint64_t random;
    int64_t step, now_ns;

    /* Drawn once. */
    struct scheduler_options scheduler_options;
    int32_t depth, max_tokens, num_blocks, num_slots, prefetch_percent, num_groups;
    int32_t arrival_odds, end_odds, cancel_odds, evict_odds,
        fault_odds; /* one in so many; 0: never */
    int64_t tick_ns, patience_ns;
    int64_t hold_steps;
    const char *policy;
    bool has_disk, has_remote, writes_through;

    struct device *device;
    unsigned char *blocks; /* [num_blocks * BLOCK_BYTES] device memory */
    struct faulty_files files;
    struct fake_redis *redis;
    struct imbrex_model model; /* of which only the path is looked at */
    struct log log;

    /* Of one life. */
    struct kv_pool pool;
    struct scheduler scheduler;
    struct prefix_cache prefix;
    struct prefix_tiers tiers;
    struct metrics metrics;
    struct walk_flight flights[MAX_DEPTH];
    int32_t first_flight, num_flights;
    int32_t history[MAX_RUNNING][MAX_TOKENS]; /* by slot: the device's */
    struct walk_request *live[MAX_LIVE];      /* [num_live] */
    int32_t num_live;
    uint64_t num_requests;
    /* Steps, one after the other, in which nothing ran although somebody waits; nothing moved
     * either. */
    int64_t num_idle, num_still;

    int32_t stories[NUM_STORIES][MAX_TOKENS];
    struct past past[NUM_PAST];
};

#define CHECK(walk, condition)                                                              \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fail_msg("walk %llu, step %lld: %s", (unsigned long long)(walk)->options->seed, \
                     (long long)(walk)->step, #condition);                                  \
        }                                                                                   \
    } while (0)

/* Uniform enough in [begin, end]. */
static int32_t random_in(struct walk *walk, int32_t begin, int32_t end)
{
    walk->random = walk->random * 6364136223846793005u + 1442695040888963407u;
    uint64_t range = (uint64_t)((int64_t)end - begin + 1);
    return begin + (int32_t)(((walk->random >> 33) * range) >> 31);
}

static bool one_in(struct walk *walk, int32_t count)
{
    return count > 0 && random_in(walk, 1, count) == 1;
}

static int32_t divide_up(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

static struct walk_request *walk_request_of(const struct request_choice *choice)
{
    return (struct walk_request *)choice->request;
}

/* ---- the device's work ----------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

static uint64_t *place_at(const struct walk *walk, const int32_t *table, int32_t position)
{
    size_t block_idx = (size_t)table[position / KV_BLOCK_SIZE];
    size_t at = (size_t)(position % KV_BLOCK_SIZE) * TOKEN_WORDS * sizeof(uint64_t);
    return (uint64_t *)(void *)(walk->blocks + block_idx * BLOCK_BYTES + at);
}

static bool holds(const uint64_t *place, uint64_t hash)
{
    bool is_same = true;
    for (int32_t i = 0; i < TOKEN_WORDS; i++) {
        is_same &= place[i] == hash + (uint64_t)i;
    }
    return is_same;
}

static void run_row(struct walk *walk, struct walk_flight *flight, int32_t row_idx)
{
    const struct step_row *row = &flight->plan.rows[row_idx];
    int32_t *history = walk->history[row->slot];
    int32_t end = row->position + row->num_tokens;
    uint64_t hash = flight->roots[row_idx];
    flight->is_wrong[row_idx] = false;
    for (int32_t at = 0; at < end; at++) {
        int32_t id = flight->ids[row_idx][at];
        if (at < row->num_history || (at >= row->position && id >= 0)) {
            history[at] = id;
        }
        CHECK(walk, id < 0 || history[at] == id);
        hash = mix(hash, (uint64_t)history[at] + 1);
        uint64_t *place = place_at(walk, flight->tables[row_idx], at);
        if (at < row->position) {
            flight->is_wrong[row_idx] |= !holds(place, hash);
        } else {
            for (int32_t i = 0; i < TOKEN_WORDS; i++) {
                place[i] = hash + (uint64_t)i;
            }
        }
    }
    for (int32_t i = 0; i < row->num_draws; i++) {
        flight->draws[row_idx][i] = (int32_t)(mix(hash, (uint64_t)i) % 1000);
    }
    if (row->num_draws > 0) {
        history[end] = flight->draws[row_idx][0];
    }
}

static enum imbrex_status run_step(void *arg, void *stream_handle)
{
    struct walk_flight *flight = arg;
    struct walk *walk = flight->walk;
    const struct step_plan *plan = &flight->plan;
    (void)stream_handle;
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        const struct step_block_copy *copy = &plan->block_copies[i];
        memcpy(walk->blocks + (size_t)copy->destination * BLOCK_BYTES,
               walk->blocks + (size_t)copy->source * BLOCK_BYTES, BLOCK_BYTES);
    }
    for (int32_t i = 0; i < plan->num_slot_copies; i++) {
        const struct step_slot_copy *copy = &plan->slot_copies[i];
        memcpy(walk->history[copy->destination], walk->history[copy->source],
               (size_t)copy->num_tokens * sizeof(int32_t));
    }
    for (int32_t i = 0; i < plan->num_rows; i++) {
        run_row(walk, flight, i);
    }
    return IMBREX_STATUS_OK;
}

/* The cache forgets a block that nothing uses any more: what it holds follows on what the block
 * before it does. */
static void on_forget(void *user, const struct kv_key *key, const int32_t *token_ids,
                      int32_t block_idx)
{
    struct walk *walk = user;
    int32_t parent = kv_cache_parent(walk->prefix.cache, block_idx);
    for (int32_t at = parent == -1; at < KV_BLOCK_SIZE; at++) {
        const int32_t *before = at > 0 ? &block_idx : &parent;
        uint64_t hash = *place_at(walk, before, (at + KV_BLOCK_SIZE - 1) % KV_BLOCK_SIZE);
        CHECK(walk, holds(place_at(walk, &block_idx, at), mix(hash, (uint64_t)token_ids[at] + 1)));
    }
    prefix_tiers_forget(&walk->tiers, key, token_ids, block_idx);
}

/* ---- a life: open and close ------------------------------------------------------------------ */

static enum imbrex_status open_tiers(struct walk *walk, struct imbrex_error *err)
{
    const struct tiers_set_up set_up = {.device = walk->device,
                                        .blocks = walk->blocks,
                                        .block_bytes = BLOCK_BYTES,
                                        .num_slots = walk->num_slots,
                                        .folder = walk->has_disk ? &walk->tiers.folder : NULL,
                                        .files = &walk->files,
                                        .segment_blocks = SEGMENT_BLOCKS,
                                        .num_segments = 8,
                                        .forbids_ring = true, /* read by the system's files alone */
                                        .redis = walk->has_remote ? walk->redis : NULL,
                                        .log = &walk->log};
    TRY(tiers_set_up(&set_up, &walk->tiers.tiers, err));
    prefix_tiers_set_groups(&walk->tiers,
                            &(struct kv_view){.blocks = walk->blocks,
                                              .block_bytes = BLOCK_BYTES,
                                              .dtype = KV_DTYPE_F32,
                                              .num_layers = NUM_LAYERS,
                                              .num_kv_heads = 1,
                                              .block_size = KV_BLOCK_SIZE,
                                              .head_dim = HEAD_DIM},
                            walk->num_groups);
    walk->tiers.max_layered_ns = walk->num_groups % 2 == 0 ? 1000 * walk->tick_ns : 0;
    if (walk->writes_through) {
        TRY(prefix_write_create(&walk->prefix, walk->tiers.tiers, walk->num_blocks,
                                walk->tiers.block_ns, &walk->tiers.write, err));
    }
    const struct kv_policy_functions *policy = kv_cache_policy(walk->prefix.cache)->functions;
    if (walk->prefetch_percent == 0 || policy->predict == NULL || policy->value == NULL) {
        return IMBREX_STATUS_OK;
    }
    return prefix_prefetch_create(
        &(struct prefix_prefetch_options){.num_blocks = walk->num_blocks,
                                          .max_known = 256,
                                          .block_ns = walk->tiers.block_ns,
                                          .percent = walk->prefetch_percent},
        &walk->prefix, walk->tiers.tiers, &walk->tiers.prefetch, err);
}

/* Also of what could not be opened as a whole. */
static void close_parts(struct walk *walk, bool keeps)
{
    prefix_tiers_destroy(&walk->tiers, keeps);
    if (walk->prefix.cache != NULL) {
        kv_cache_clear(walk->prefix.cache, walk->now_ns);
        CHECK(walk, walk->pool.num_free == walk->num_blocks);
    }
    prefix_cache_destroy(&walk->prefix);
    for (int32_t i = 0; i < MAX_DEPTH; i++) {
        step_plan_destroy(&walk->flights[i].plan);
        device_event_destroy(walk->device, walk->flights[i].event);
        walk->flights[i].event = NULL;
    }
    scheduler_destroy(&walk->scheduler);
    kv_pool_destroy(&walk->pool);
}

static enum imbrex_status try_parts(struct walk *walk, struct imbrex_error *err)
{
    static const unsigned char shared_secret[32] = {1, 2, 3};
    TRY(kv_pool_create(walk->num_blocks, &walk->pool, err));
    TRY(scheduler_create(&walk->scheduler_options, &walk->pool, &walk->scheduler, err));
    for (int32_t i = 0; i < MAX_DEPTH; i++) {
        walk->flights[i].walk = walk;
        TRY(step_plan_create(&walk->scheduler_options, &walk->flights[i].plan, err));
        TRY(device_event_create(walk->device, &walk->flights[i].event, err));
    }
    walk->tiers.origins = calloc((size_t)walk->num_blocks, sizeof(*walk->tiers.origins));
    if (walk->tiers.origins == NULL) {
        return error_out_of_memory(err, "origins", (size_t)walk->num_blocks);
    }
    if (walk->has_disk) {
        TRY(kv_folder_open(walk->options->folder, &walk->tiers.folder, err));
    }
    const struct prefix_cache_options cache_options = {
        .cache = {.max_requests = MAX_LIVE * MAX_CHOICES,
                  .block_size = KV_BLOCK_SIZE,
                  .has_token_ids = true,
                  .forgets = on_forget,
                  .user = walk,
                  .policy = walk->policy,
                  .policy_options = kv_policy_options_default()},
        .computation = "walk",
        .kept_secret = walk->has_remote ? shared_secret
                       : walk->has_disk ? walk->tiers.folder.secret
                                        : NULL,
    };
    TRY(prefix_cache_create(&walk->model, &cache_options, &walk->pool, &walk->prefix, err));
    walk->prefix.metrics = &walk->metrics;
    walk->scheduler.cache = prefix_scheduler_cache(&walk->prefix);
    TRY(open_tiers(walk, err));
    walk->prefix.tiers = &walk->tiers;
    return IMBREX_STATUS_OK;
}

/* The parts of an engine, as engine.c and prefix_tiers.c create them, with files and a server that
 * fail. */
static enum imbrex_status open_parts(struct walk *walk, struct imbrex_error *err)
{
    walk->tiers = (struct prefix_tiers){
        .folder = {.lock_fd = -1},
        .cache = &walk->prefix,
        .block_ns = walk->tick_ns / 4 + 1,
        .patience_ns = walk->patience_ns,
    };
    enum imbrex_status status = try_parts(walk, err);
    if (status != IMBREX_STATUS_OK) {
        close_parts(walk, false);
    }
    return status;
}

/* Not beside the fake server, whose thread allocates too. */
static void arm(struct walk *walk, int32_t max_countdown)
{
    if (walk->options->fail_allocation != NULL && !walk->has_remote) {
        walk->options->fail_allocation(random_in(walk, 1, max_countdown));
    }
}

/* Whether an allocation failed. */
static bool disarm(const struct walk *walk)
{
    return walk->options->fail_allocation != NULL && walk->options->stop_failing();
}

static void open_life(struct walk *walk)
{
    struct imbrex_error err = {0};
    int64_t num_left = walk->files.num_bytes_left;
    memset(&walk->metrics, 0, sizeof(walk->metrics));
    if (one_in(walk, 2)) {
        arm(walk, 100);
    }
    enum imbrex_status status = open_parts(walk, &err);
    if (disarm(walk) && status != IMBREX_STATUS_OK) {
        CHECK(walk, status == IMBREX_STATUS_OUT_OF_MEMORY && strlen(err.message) > 0);
        walk->totals->num_refused++;
        walk->files.num_bytes_left = num_left;
        status = open_parts(walk, &err);
    }
    if (status != IMBREX_STATUS_OK) {
        fail_msg("walk %llu: %s", (unsigned long long)walk->options->seed, err.message);
    }
}

static void count_life(struct walk *walk)
{
    struct tiers_walk_totals *totals = walk->totals;
    struct kv_tiers_metrics counted;
    struct prefetch_metrics ahead;
    kv_tiers_read_metrics(walk->tiers.tiers, &counted);
    prefix_prefetch_read_metrics(walk->tiers.prefetch, &ahead);
    totals->num_ahead += (int64_t)ahead.num_planned;
    totals->num_ahead_used += (int64_t)ahead.num_used;
    totals->num_written += (int64_t)counted.num_written;
    totals->num_copy_faults += (int64_t)counted.num_copy_faults;
    totals->num_disk_faults += (int64_t)(counted.disk.num_damaged + counted.disk.num_read_faults +
                                         counted.disk.num_write_faults);
    totals->num_remote_faults += (int64_t)kv_remote_num_faults(&counted.remote);
    totals->num_preemptions += (int64_t)walk->scheduler.num_preemptions;
    totals->num_found[KV_TIER_NONE] += (int64_t)walk->metrics.num_cached_tokens / KV_BLOCK_SIZE;
    totals->num_found[KV_TIER_HOST] += (int64_t)walk->metrics.num_host_tokens / KV_BLOCK_SIZE;
    totals->num_found[KV_TIER_DISK] += (int64_t)walk->metrics.num_disk_tokens / KV_BLOCK_SIZE;
    totals->num_found[KV_TIER_REMOTE] += (int64_t)walk->metrics.num_remote_tokens / KV_BLOCK_SIZE;
}

/* Nobody is there any more. */
static void close_life(struct walk *walk)
{
    bool crashes = walk->files.num_bytes_left == 0;
    CHECK(walk, walk->num_live == 0 && walk->num_flights == 0);
    CHECK(walk, scheduler_is_idle(&walk->scheduler));
    /* What comes up ahead may be on its way still. */
    CHECK(walk, kv_pool_num_available(&walk->pool) + walk->pool.num_pinned == walk->num_blocks);
    count_life(walk);
    walk->totals->num_crashes += crashes;
    close_parts(walk, !crashes && !one_in(walk, 4));
    CHECK(walk, device_fake_num_pending(walk->device) == 0);
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool comes_before(const struct walk_request *a, const struct walk_request *b)
{
    return a->key != b->key ? a->key < b->key : a->idx < b->idx;
}

/* Rows that so many tokens of the first sequence take at most. */
static int32_t prefill_rows(const struct walk *walk, int32_t num_tokens)
{
    const struct scheduler_options *options = &walk->scheduler_options;
    int32_t least = options->has_block_edges ? KV_BLOCK_SIZE
                                             : options->max_step_tokens - options->max_running + 1;
    return divide_up(num_tokens, least);
}

static int64_t rows_bound(const struct walk *walk, int32_t num_rows)
{
    return (int64_t)walk->depth * (num_rows + 2) + walk->hold_steps + PROMOTION_STEPS;
}

/* A prompt that begins like others: a story, or what came of a request. */
static int32_t make_prompt(struct walk *walk, int32_t prompt_ids[MAX_TOKENS])
{
    const struct past *past = &walk->past[random_in(walk, 0, NUM_PAST - 1)];
    const int32_t *begin = walk->stories[random_in(walk, 0, NUM_STORIES - 1)];
    int32_t max_prompt = walk->max_tokens - 2, num_begin = random_in(walk, 0, max_prompt);
    if (past->num_ids > 0 && one_in(walk, 2)) {
        begin = past->ids;
        num_begin = past->num_ids < max_prompt ? past->num_ids : max_prompt;
    }
    memcpy(prompt_ids, begin, (size_t)num_begin * sizeof(*prompt_ids));
    int32_t num_more = random_in(walk, 1, 24), max_more = max_prompt + 1 - num_begin;
    num_more = num_more < max_more ? num_more : max_more;
    for (int32_t i = 0; i < num_more; i++) {
        prompt_ids[num_begin + i] = random_in(walk, 0, 999);
    }
    return num_begin + num_more;
}

/* False, and nothing was added: there was no memory for its keys. */
static bool create_prefix(struct walk *walk, struct walk_request *created)
{
    struct imbrex_error err;
    if (one_in(walk, 50)) {
        arm(walk, 6);
    }
    enum imbrex_status status = request_prefix_create(
        &(struct request_prefix_options){.identity = &walk->prefix.identity,
                                         .salt = &created->salt,
                                         .salt_bytes = created->salt > 0 ? sizeof(uint32_t) : 0,
                                         .prompt_ids = created->prompt_ids,
                                         .num_prompt_ids = created->request.num_prompt_ids,
                                         .max_tokens = created->choices[0].sequence.max_tokens},
        &created->request.prefix, &err);
    if (disarm(walk) && status == IMBREX_STATUS_OUT_OF_MEMORY) {
        walk->totals->num_refused++;
        return false;
    }
    CHECK(walk, status == IMBREX_STATUS_OK);
    return true;
}

static void raise_bounds(struct walk *walk, struct walk_request *created)
{
    const struct walk_request *first = NULL;
    const struct sequence *sequence = &created->choices[0].sequence;
    int32_t num_rows = prefill_rows(walk, sequence->num_prompt_tokens) + sequence->max_tokens -
                       sequence->num_prompt_tokens;
    created->own_bound = created->request.num_choices * rows_bound(walk, num_rows);
    created->bound = created->own_bound;
    for (int32_t i = 0; i < walk->num_live; i++) {
        if (first == NULL || comes_before(walk->live[i], first)) {
            first = walk->live[i];
        }
    }
    for (int32_t i = 0; i < walk->num_live; i++) {
        struct walk_request *other = walk->live[i];
        if (comes_before(other, created)) {
            created->bound += other->own_bound;
        } else {
            other->bound += created->own_bound;
        }
        if (comes_before(created, first)) {
            int32_t max_tokens = first->choices[0].sequence.max_tokens;
            other->bound +=
                first->request.num_choices * rows_bound(walk, prefill_rows(walk, max_tokens));
        }
    }
}

static void add_request(struct walk *walk)
{
    struct walk_request *created = calloc(1, sizeof(*created));
    assert_non_null(created);
    struct imbrex_request *request = &created->request;
    created->salt = one_in(walk, 4) ? (uint32_t)random_in(walk, 1, NUM_SALTS - 1) : 0;
    created->idx = walk->num_requests;
    created->first_step = walk->step;
    request->prompt_ids = created->prompt_ids;
    request->num_prompt_ids = make_prompt(walk, created->prompt_ids);
    request->max_output = random_in(walk, 1, walk->max_tokens - request->num_prompt_ids);
    request->num_choices = one_in(walk, 6) ? random_in(walk, 2, MAX_CHOICES) : 1;
    request->num_left = request->num_choices;
    request->num_started = 1;
    request->choices = created->choices;
    for (int32_t i = 0; i < request->num_choices; i++) {
        struct request_choice *choice = &created->choices[i];
        *choice = (struct request_choice){
            .request = request, .choice_idx = i, .output_ids = created->output_ids[i]};
        choice->sequence = (struct sequence){
            .owner = choice,
            .arrival_ns = walk->now_ns,
            .deadline_ns = INT64_MAX,
            .max_tokens = request->num_prompt_ids + request->max_output,
            .num_draws = i == 0 ? request->num_choices : 1,
            .score_begin = INT32_MAX,
            .num_prompt_tokens = request->num_prompt_ids,
        };
    }
    struct sequence *sequence = &created->choices[0].sequence;
    sequence->deadline_ns =
        one_in(walk, 30) ? walk->now_ns + random_in(walk, 1, 60) * walk->tick_ns : INT64_MAX;
    sequence->priority = one_in(walk, 4) ? random_in(walk, -2, 2) : 0;
    created->key =
        sequence->arrival_ns - sequence->priority * walk->scheduler_options.priority_step_ns;
    for (int32_t i = 1; i < request->num_choices; i++) {
        created->choices[i].sequence.priority = sequence->priority;
    }
    if (!create_prefix(walk, created)) {
        free(created);
        return;
    }
    raise_bounds(walk, created);
    walk->live[walk->num_live++] = created;
    walk->num_requests++;
    walk->totals->num_requests++;
    scheduler_add(&walk->scheduler, sequence);
}

static void end_choice(struct walk *walk, struct request_choice *choice,
                       enum imbrex_finish_reason reason)
{
    if (choice->finish_reason == IMBREX_FINISH_REASON_NONE) {
        choice->finish_reason = reason;
        choice->request->num_left--;
        if (choice->sequence.state != SEQUENCE_STATE_NEW) {
            scheduler_end(&walk->scheduler, &choice->sequence);
        }
    }
}

static void end_request(struct walk *walk, struct imbrex_request *request,
                        enum imbrex_finish_reason reason)
{
    for (int32_t i = 0; i < request->num_choices; i++) {
        end_choice(walk, &request->choices[i], reason);
    }
}

static void remember(struct walk *walk, const struct walk_request *request)
{
    struct past *past = &walk->past[random_in(walk, 0, NUM_PAST - 1)];
    const struct request_choice *choice = &request->choices[0];
    int32_t num_prompt_ids = request->request.num_prompt_ids;
    past->num_ids = num_prompt_ids + choice->num_output;
    memcpy(past->ids, request->prompt_ids, (size_t)num_prompt_ids * sizeof(int32_t));
    memcpy(past->ids + num_prompt_ids, choice->output_ids,
           (size_t)choice->num_output * sizeof(int32_t));
}

/* Lets go of requests that no step holds, and checks that none takes too long. */
static void reap_requests(struct walk *walk)
{
    int32_t num_left = 0;
    for (int32_t i = 0; i < walk->num_live; i++) {
        struct walk_request *request = walk->live[i];
        bool is_over = request->request.num_left == 0;
        for (int32_t k = 0; k < request->request.num_choices; k++) {
            enum sequence_state state = request->choices[k].sequence.state;
            is_over &= state == SEQUENCE_STATE_NEW || state == SEQUENCE_STATE_ENDED;
        }
        int64_t num_steps = walk->step - request->first_step;
        CHECK(walk, num_steps <= request->bound);
        double share = (double)num_steps / (double)request->bound;
        if (walk->hold_steps < PATIENT_STEPS && share > walk->totals->largest_share) {
            walk->totals->largest_share = share;
        }
        if (!is_over) {
            walk->live[num_left++] = request;
            continue;
        }
        remember(walk, request);
        request_prefix_destroy(&request->request.prefix);
        free(request);
    }
    walk->num_live = num_left;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Takes down what the device is given. */
static void fill_flight(struct walk *walk, struct walk_flight *flight)
{
    const struct step_plan *plan = &flight->plan;
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        const struct request_choice *choice = row->sequence->owner;
        const struct walk_request *request = walk_request_of(choice);
        int32_t num_prompt_ids = request->request.num_prompt_ids;
        CHECK(walk, row->num_tokens > 0 && row->num_history <= row->position);
        memcpy(flight->tables[i],
               walk->scheduler.block_tables + row->slot * walk->scheduler_options.max_blocks,
               (size_t)row->sequence->num_blocks * sizeof(int32_t));
        flight->roots[i] = mix(7, request->salt);
        for (int32_t at = 0; at < row->position + row->num_tokens; at++) {
            int32_t output_idx = at - num_prompt_ids;
            flight->ids[i][at] = output_idx < 0                    ? request->prompt_ids[at]
                                 : output_idx < choice->num_output ? choice->output_ids[output_idx]
                                                                   : -1;
        }
    }
}

static enum imbrex_status give_step(struct walk *walk, struct walk_flight *flight)
{
    fill_flight(walk, flight);
    if (one_in(walk, 4 * walk->fault_odds)) {
        return IMBREX_STATUS_IO; /* the executor could not submit it */
    }
    if (one_in(walk, 4 * walk->fault_odds)) {
        device_fake_fail(walk->device, DEVICE_FAKE_FAULT_WORK, 1, IMBREX_STATUS_IO);
    }
    for (int32_t i = 0; i < flight->waits.num_waits; i++) {
        TRY(device_event_wait(walk->device, flight->waits.events[i], DEVICE_STREAM_STEP));
    }
    TRY(device_run_async(walk->device, DEVICE_STREAM_STEP, run_step, flight));
    return device_event_record(walk->device, flight->event, DEVICE_STREAM_STEP);
}

/* Copies up and down, and the calls that give them, may fail. */
static void arm_copies(struct walk *walk)
{
    if (one_in(walk, walk->fault_odds)) {
        device_fake_fail(walk->device, DEVICE_FAKE_FAULT_COPY, random_in(walk, 1, 3),
                         IMBREX_STATUS_IO);
    }
    if (one_in(walk, walk->fault_odds)) {
        device_fake_fail(walk->device, DEVICE_FAKE_FAULT_CALL, random_in(walk, 1, 8),
                         IMBREX_STATUS_IO);
    }
}

static bool submit_step(struct walk *walk)
{
    struct walk_flight *flight =
        &walk->flights[(walk->first_flight + walk->num_flights) % MAX_DEPTH];
    arm_copies(walk);
    prefix_tiers_look(&walk->tiers, &walk->scheduler);
    scheduler_plan(&walk->scheduler, &flight->plan);
    if (flight->plan.num_rows > 0) {
        walk->num_flights++;
        flight->submit_ns = walk->now_ns;
        flight->status = prefix_tiers_start(&walk->tiers);
        prefix_tiers_take_waits(&walk->tiers, &flight->waits);
        walk->totals->num_layered += flight->waits.num_waits > 0;
        CHECK(walk, flight->status == IMBREX_STATUS_OK);
    }
    device_fake_fail(walk->device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
    if (flight->plan.num_rows > 0) {
        flight->status = give_step(walk, flight);
    }
    return flight->plan.num_rows > 0;
}

static void take_draw(struct walk *walk, struct request_choice *choice, int32_t id)
{
    choice->output_ids[choice->num_output] = id;
    choice->num_output++;
    if (choice->num_output == choice->request->max_output) {
        end_choice(walk, choice, IMBREX_FINISH_REASON_LENGTH);
    } else if (id % walk->end_odds == 0) {
        end_choice(walk, choice, IMBREX_FINISH_REASON_EOS);
    }
}

static void take_row(struct walk *walk, const struct walk_flight *flight, int32_t row_idx)
{
    const struct step_row *row = &flight->plan.rows[row_idx];
    struct request_choice *choice = row->sequence->owner;
    struct imbrex_request *request = choice->request;
    if (choice->finish_reason != IMBREX_FINISH_REASON_NONE || row->sequence->is_spoilt) {
        return;
    }
    for (; row->num_draws > 1 && request->max_output > 1 &&
           request->num_started < request->num_choices;
         request->num_started++) {
        scheduler_fork(&walk->scheduler, &choice->sequence,
                       &request->choices[request->num_started].sequence);
        walk->totals->num_forks++;
    }
    for (int32_t i = 0; i < row->num_draws; i++) {
        struct request_choice *drawn = row->num_draws > 1 ? &request->choices[i] : choice;
        if (drawn->finish_reason == IMBREX_FINISH_REASON_NONE) {
            take_draw(walk, drawn, flight->draws[row_idx][i]);
        }
    }
}

static void fail_sequence(struct walk *walk, const struct sequence *sequence)
{
    const struct request_choice *choice = sequence->owner;
    if (choice->finish_reason == IMBREX_FINISH_REASON_NONE) {
        end_request(walk, choice->request, IMBREX_FINISH_REASON_ERROR);
    }
}

static void fail_step(struct walk *walk, const struct walk_flight *flight)
{
    for (int32_t i = 0; i < flight->plan.num_rows; i++) {
        fail_sequence(walk, flight->plan.rows[i].sequence);
    }
    for (int32_t i = 0; i < flight->plan.num_slot_copies; i++) {
        const struct sequence *fork =
            scheduler_fork_of(&walk->scheduler, &flight->plan.slot_copies[i]);
        if (fork != NULL) {
            fail_sequence(walk, fork);
        }
    }
    walk->totals->num_failed_steps++;
}

static enum imbrex_status collect_step(struct walk *walk)
{
    struct walk_flight *flight = &walk->flights[walk->first_flight];
    struct walk_flight *last =
        &walk->flights[(walk->first_flight + walk->num_flights - 1) % MAX_DEPTH];
    enum imbrex_status status = flight->status;
    if (status == IMBREX_STATUS_OK) {
        status = device_event_synchronize(walk->device, flight->event);
    }
    if (status == IMBREX_STATUS_OK) {
        prefix_tiers_collect(&walk->tiers, &walk->scheduler, &flight->plan);
    } else {
        prefix_tiers_step_failed(&walk->tiers);
    }
    for (int32_t i = 0; status == IMBREX_STATUS_OK && i < flight->plan.num_rows; i++) {
        const struct step_row *row = &flight->plan.rows[i];
        CHECK(walk, !flight->is_wrong[i] || row->sequence->is_spoilt);
        walk->totals->num_spoilt += row->sequence->is_spoilt;
        prefix_insert(&walk->prefix, row,
                      walk->scheduler.block_tables + row->slot * walk->scheduler_options.max_blocks,
                      last->pinned_blocks, &last->num_pinned_blocks);
    }
    for (int32_t i = 0; status == IMBREX_STATUS_OK && i < flight->plan.num_rows; i++) {
        take_row(walk, flight, i);
    }
    if (status != IMBREX_STATUS_OK) {
        fail_step(walk, flight);
    } else if (flight->waits.num_waits == 0) {
        prefix_tiers_observe_step(&walk->tiers, flight->plan.num_tokens,
                                  walk->now_ns - flight->submit_ns);
    }
    scheduler_finish_step(&walk->scheduler, &flight->plan);
    while (flight->num_pinned_blocks > 0) {
        flight->num_pinned_blocks--;
        kv_pool_unpin(&walk->pool, flight->pinned_blocks[flight->num_pinned_blocks]);
    }
    walk->first_flight = (walk->first_flight + 1) % MAX_DEPTH;
    walk->num_flights--;
    return status;
}

/* Nothing runs. While somebody waits, that is for what comes up, and not for ever. The fetch whose
 * end it waited for may have been taken back at the end of the look; the next look begins its own.
 */
static void idle(struct walk *walk)
{
    bool is_moving = prefix_tiers_is_moving(&walk->tiers);
    if (walk->scheduler.first_waiting != NULL) {
        walk->num_idle++;
        walk->num_still = is_moving || walk->pool.num_pinned > 0 ? 0 : walk->num_still + 1;
        CHECK(walk, walk->num_idle <= walk->hold_steps + PROMOTION_STEPS);
        CHECK(walk, walk->num_still <= 1);
        walk->totals->num_held++;
    }
    if (is_moving) {
        prefix_tiers_wait(&walk->tiers);
    }
}

static void check_state(struct walk *walk)
{
    CHECK(walk, scheduler_check(&walk->scheduler));
    CHECK(walk, kv_pool_check(&walk->pool));
    CHECK(walk, kv_cache_check(walk->prefix.cache));
    CHECK(walk, kv_tiers_check(walk->tiers.tiers));
    CHECK(walk, prefix_write_check(walk->tiers.write));
}

static void walk_step(struct walk *walk)
{
    bool has_planned = submit_step(walk);
    const struct walk_flight *newest =
        &walk->flights[(walk->first_flight + walk->num_flights + MAX_DEPTH - 1) % MAX_DEPTH];
    bool has_failed = has_planned && newest->status != IMBREX_STATUS_OK;
    if (has_planned || walk->num_flights > 0) {
        walk->num_idle = 0;
        walk->num_still = 0;
    }
    if (walk->num_flights == walk->depth || (!has_planned && walk->num_flights > 0) || has_failed) {
        do {
            has_failed |= collect_step(walk) != IMBREX_STATUS_OK;
        } while (has_failed && walk->num_flights > 0);
    } else if (!has_planned) {
        idle(walk);
    }
    prefix_tiers_write(&walk->tiers);
    walk->step++;
    reap_requests(walk);
}

/* What may happen between two steps. */
static void walk_events(struct walk *walk, bool is_draining)
{
    struct sequence *late;
    walk->now_ns += walk->tick_ns * random_in(walk, 1, 4);
    walk->prefix.now_ns = walk->now_ns;
    if (!is_draining && walk->num_live < MAX_LIVE && one_in(walk, walk->arrival_odds)) {
        add_request(walk);
    }
    if (walk->num_live > 0 && one_in(walk, walk->cancel_odds)) {
        struct walk_request *request = walk->live[random_in(walk, 0, walk->num_live - 1)];
        end_request(walk, &request->request, IMBREX_FINISH_REASON_CANCELLED);
        walk->totals->num_cancelled++;
    }
    while ((late = scheduler_find_late(&walk->scheduler, walk->now_ns)) != NULL) {
        const struct request_choice *choice = late->owner;
        CHECK(walk, late->deadline_ns <= walk->now_ns);
        end_request(walk, choice->request, IMBREX_FINISH_REASON_DEADLINE);
        walk->totals->num_cancelled++;
    }
    if (one_in(walk, walk->evict_odds)) {
        kv_cache_make_room(walk->prefix.cache, random_in(walk, 1, walk->num_blocks), walk->now_ns);
    }
    if (walk->has_remote && walk->fault_odds > 0 && walk->step % FAULT_STEPS == 0) {
        int32_t fault = (int32_t)(walk->step / FAULT_STEPS % FAKE_REDIS_NUM_FAULTS);
        fake_redis_set_error(walk->redis, "LOADING", false);
        fake_redis_set_fault(walk->redis, (enum fake_redis_fault)fault, 5);
    }
}

/* ---- a walk ---------------------------------------------------------------------------------- */

static void draw_scheduler(struct walk *walk)
{
    static const int64_t priority_ticks[] = {0, 3, 100};
    struct scheduler_options *options = &walk->scheduler_options;
    options->max_running = one_in(walk, 3) ? MAX_RUNNING : random_in(walk, 1, MAX_RUNNING);
    options->has_block_edges = one_in(walk, 2);
    int32_t least = options->max_running + (options->has_block_edges ? KV_BLOCK_SIZE - 1 : 0);
    options->max_step_tokens = one_in(walk, 3) ? least : random_in(walk, least, MAX_STEP_TOKENS);
    options->max_step_samples = options->max_step_tokens + IMBREX_MAX_CHOICES;
    options->max_step_history = MAX_TOKENS * (one_in(walk, 2) ? 1 : MAX_RUNNING);
    options->max_blocks = divide_up(walk->max_tokens - 1, KV_BLOCK_SIZE);
    options->priority_step_ns = priority_ticks[random_in(walk, 0, 2)] * walk->tick_ns;
    walk->num_blocks =
        options->max_blocks + random_in(walk, 0, options->max_blocks * options->max_running);
}

/* The most steps for which a request is held. */
static int64_t count_hold_steps(const struct walk *walk)
{
    /* prefix_tiers.c: of a token, until a step has been measured, and the longest step. */
    int64_t max_token_ns = 4 * (walk->depth + 1) * walk->tick_ns / KV_BLOCK_SIZE + 1;
    max_token_ns = max_token_ns > 1000000 ? max_token_ns : 1000000;
    int64_t patience_ns = walk->patience_ns != 0 ? walk->patience_ns : max_token_ns * MAX_TOKENS;
    return patience_ns == INT64_MAX ? PATIENT_STEPS : patience_ns / walk->tick_ns + 2;
}

static void draw_faults(struct walk *walk)
{
    struct faulty_files *files = &walk->files;
    faulty_files_init(files);
    walk->fault_odds = one_in(walk, 3) ? 0 : random_in(walk, 20, 200);
    if (walk->fault_odds > 0) {
        files->read_every = random_in(walk, 5, 40);
        files->write_every = random_in(walk, 5, 40);
        files->flip_every = random_in(walk, 5, 40);
        files->resize_every = random_in(walk, 5, 40);
        files->failure = one_in(walk, 2) ? ENOSPC : EIO;
    }
}

static void draw_walk(struct walk *walk)
{
    static const char *const policies[] = {"lru",  "lfu",  "s3fifo", "arc",
                                           "gdsf", "seed", "queue",  "predictive"};
    static const int64_t ticks_ns[] = {20000, 1000000, 50000000};
    walk->tick_ns = ticks_ns[random_in(walk, 0, 2)];
    walk->depth = random_in(walk, 1, MAX_DEPTH);
    walk->max_tokens = random_in(walk, 40, MAX_TOKENS);
    draw_scheduler(walk);
    const int64_t patiences_ns[] = {1, 0, 50 * walk->tick_ns, INT64_MAX};
    walk->patience_ns = patiences_ns[random_in(walk, 0, 3)];
    walk->hold_steps = count_hold_steps(walk);
    walk->policy = policies[one_in(walk, 2) ? random_in(walk, 5, 7) : random_in(walk, 0, 7)];
    walk->num_groups = random_in(walk, 1, NUM_LAYERS);
    walk->prefetch_percent = one_in(walk, 4) ? 0 : random_in(walk, 1, 100);
    walk->num_slots = KV_TIERS_MIN_SLOTS + random_in(walk, 0, 40);
    walk->has_disk = one_in(walk, 2);
    walk->has_remote = one_in(walk, 4) && kv_remote_link_is_built();
    walk->writes_through = (walk->has_disk || walk->has_remote) && one_in(walk, 2);
    walk->arrival_odds = random_in(walk, 1, 12);
    walk->end_odds = one_in(walk, 3) ? 16 : 1000;
    walk->cancel_odds = random_in(walk, 20, 200);
    walk->evict_odds = one_in(walk, 2) ? 0 : random_in(walk, 20, 200);
    draw_faults(walk);
    for (int32_t i = 0; i < NUM_STORIES * MAX_TOKENS; i++) {
        walk->stories[i / MAX_TOKENS][i % MAX_TOKENS] = random_in(walk, 0, 999);
    }
}

static void live(struct walk *walk)
{
    /* From some write on, the process is dead as far as its files can tell. */
    bool crashes = walk->has_disk && one_in(walk, 3);
    walk->files.num_bytes_left = crashes ? random_in(walk, 0, 200 * BLOCK_BYTES) : -1;
    open_life(walk);
    int64_t end = walk->step + walk->options->life_steps;
    while (walk->step < end) {
        walk_events(walk, false);
        walk_step(walk);
        check_state(walk);
    }
    /* No more come: all end, within their bounds. */
    while (walk->num_live > 0 || walk->num_flights > 0) {
        walk_events(walk, true);
        walk_step(walk);
    }
    check_state(walk);
    close_life(walk);
}

void tiers_walk(const struct tiers_walk_options *options, struct tiers_walk_totals *totals)
{
    struct walk *walk = calloc(1, sizeof(*walk));
    char path[] = "walk";
    void *blocks;
    assert_non_null(walk);
    walk->options = options;
    walk->totals = totals;
    walk->random = options->seed * 0x9e3779b97f4a7c15u + 1;
    walk->model.path = path;
    draw_walk(walk);
    fixture_empty_folder(options->folder);
    walk->redis = walk->has_remote ? fake_redis_create() : NULL;
    assert_int_equal(device_fake_create(options->seed, &walk->device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(walk->device, "blocks", (size_t)walk->num_blocks * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    walk->blocks = blocks;
    for (int32_t i = 0; i < options->num_lives; i++) {
        live(walk);
    }
    totals->num_steps += walk->step;
    device_free(walk->device, blocks);
    device_destroy(walk->device);
    if (walk->redis != NULL) {
        fake_redis_destroy(walk->redis);
    }
    fixture_empty_folder(options->folder);
    free(walk);
}

void tiers_walk_print(const struct tiers_walk_totals *totals)
{
    print_message("%lld steps, %lld requests: %lld cancelled or late, %lld failed steps, %lld "
                  "preemptions, %lld forks, %lld steps held; at most %.0f %% of a bound\n",
                  (long long)totals->num_steps, (long long)totals->num_requests,
                  (long long)totals->num_cancelled, (long long)totals->num_failed_steps,
                  (long long)totals->num_preemptions, (long long)totals->num_forks,
                  (long long)totals->num_held, 100 * totals->largest_share);
    print_message(
        "%lld blocks found, of them %lld from RAM, %lld from disk, %lld from a server; "
        "%lld ahead, %lld of them used; %lld written through; %lld starts in layers, %lld rows "
        "spoilt\n",
        (long long)totals->num_found[KV_TIER_NONE], (long long)totals->num_found[KV_TIER_HOST],
        (long long)totals->num_found[KV_TIER_DISK], (long long)totals->num_found[KV_TIER_REMOTE],
        (long long)totals->num_ahead, (long long)totals->num_ahead_used,
        (long long)totals->num_written, (long long)totals->num_layered,
        (long long)totals->num_spoilt);
    print_message("faults: %lld copies, %lld of the disk, %lld of a server, %lld allocations, "
                  "%lld crashes\n",
                  (long long)totals->num_copy_faults, (long long)totals->num_disk_faults,
                  (long long)totals->num_remote_faults, (long long)totals->num_refused,
                  (long long)totals->num_crashes);
}
