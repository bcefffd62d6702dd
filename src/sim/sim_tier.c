/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_tier.h"

#include <assert.h>
#include <stdlib.h>

#include "base/memory.h"
#include "kv/key_table.h"
#include "sim/sim_random.h"

enum {
    /* Waiting requests whose missing blocks one plan is told, and blocks of each: many times what
     * may be planned at once. */
    MAX_PLANNED_REQUESTS = 16,
    MAX_PLANNED_KEYS = 4 * SIM_TIER_MAX_MOVES,
    /* An estimate forgets over some so many admissions. */
    ADMISSIONS_REMEMBERED = 16,
    MAX_NODES = 1 << 28, /* the tables of keys take twice as many */
};
/* Later than any time of a replay. */
#define WHENEVER_NS (INT64_MAX / 2)

/* Of a block: it is in the cache; it was forgotten once. */
enum { IN_CACHE = 1, WAS_FORGOTTEN = 2 };
/* From the deeper tiers so many blocks are read at once, at most. */
#define MAX_FETCHES 8

struct move {
    int32_t node, block_idx, request_idx;
    int64_t begin_ns, end_ns;
};

struct sim_tier {
    const struct sim_trace *trace;
    struct sim_tier_options options;
    struct kv_cache *cache;
    struct kv_pool *pool;
    struct prefetch_planner *planner;
    struct sim_levels *levels;
    struct key_table nodes;  /* hash of a block's key -> node, of those that were forgotten once */
    unsigned char *places;   /* [num_nodes] */
    signed char *origins;    /* [num_nodes] 1 + the tier from which it came, until it is used; 0 */
    int32_t *users, *depths; /* [num_nodes] a request whose path has it, and its place there */
    int32_t *queue, *orders; /* [num_requests] in order of arrival; [num_requests] by request */
    int64_t *arrivals_ns;    /* [num_requests] by request */
    int64_t *held_until_ns;  /* [num_requests] by request; 0: not known yet */
    int32_t num_arrived, num_admitted;
    uint64_t *cancelled_keys; /* [max_tracked] */

    struct move moves[SIM_TIER_MAX_MOVES]; /* [num_moves] in the order of their times */
    int32_t num_moves;
    int64_t fetch_ends_ns[MAX_FETCHES]; /* [num_fetches] rising: reads from deeper tiers */
    int32_t num_fetches;

    /* Of the request that was admitted last. */
    int32_t num_loaded;
    int64_t ready_ns, copied_ns; /* what it loads is there; what goes for it is copied down */
    struct kv_prediction predictions[PREFETCH_MAX_PREDICTIONS];
    int32_t predicted_nodes[PREFETCH_MAX_PREDICTIONS];
    int32_t num_predictions;
    int64_t predicted_ns; /* when the policy was asked; -1: never */

    int64_t now_ns, last_admission_ns;
    bool has_waited;    /* somebody was left waiting at the last admission */
    double interval_ns; /* between admissions while somebody waits; 0: not known yet */

    bool is_scoring;
    struct prefetch_metrics unscored; /* of the planner, when scoring began */
    struct sim_tier_metrics metrics;  /* levels: when scoring began */

    /* What a plan is told, as far as it has asked: it seldom gets beyond the first request. */
    int32_t num_requests, next_waiting, next_prediction;
    int32_t num_waiting_keys; /* of requests that wait */
    struct prefetch_request requests[MAX_PLANNED_REQUESTS + PREFETCH_MAX_PREDICTIONS];
    uint64_t keys[MAX_PLANNED_REQUESTS + PREFETCH_MAX_PREDICTIONS][MAX_PLANNED_KEYS];
};

struct kv_key sim_node_key(int32_t node)
{
    uint64_t word = (uint64_t)(uint32_t)node + 1;
    return (struct kv_key){{sim_mix(word * 0x9e3779b97f4a7c15u), sim_mix(word), word, 0}};
}

static int32_t node_of(const struct kv_key *key)
{
    return (int32_t)(key->words[2] - 1);
}

/* The planner's name of a block. */
static uint64_t plan_key(int32_t node)
{
    return (uint64_t)node + 1;
}

/* Predicted requests have numbers of their own. */
static int32_t predicted_request(int32_t node)
{
    return -1 - node;
}

/* -1: it is a head. */
static int32_t parent_of(const struct sim_tier *tier, int32_t node)
{
    int32_t depth = tier->depths[node];
    return depth > 0 ? sim_trace_path(tier->trace, tier->users[node])[depth - 1] : -1;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

static void find_paths(struct sim_tier *tier)
{
    for (int32_t i = 0; i < tier->trace->num_requests; i++) {
        const int32_t *path = sim_trace_path(tier->trace, i);
        for (int32_t k = 0; k < tier->trace->requests[i].num_blocks; k++) {
            tier->users[path[k]] = i;
            tier->depths[path[k]] = k;
        }
    }
}

enum imbrex_status sim_tier_create(const struct sim_trace *trace,
                                   const struct sim_tier_options *options, int32_t num_blocks,
                                   struct sim_tier **tier, struct imbrex_error *err)
{
    size_t num_nodes = (size_t)trace->num_nodes + 1, num_requests = (size_t)trace->num_requests;
    /* A block is followed while it is in the cache or on its way. */
    struct prefetch_options planner_options = {
        .block_ns = options->levels[0].up_block_ns,
        .horizon_ns = (SIM_TIER_MAX_MOVES - 1) * options->levels[0].up_block_ns,
        .max_tracked = num_blocks + SIM_TIER_MAX_MOVES,
    };
    struct sim_tier *created = NULL;
    enum imbrex_status status;

    if (trace->num_nodes >= MAX_NODES) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "a slower tier: expected a trace of fewer than %d different blocks, "
                         "found %d",
                         MAX_NODES, trace->num_nodes);
    }
    created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "a slower tier", sizeof(*created));
    }
    created->trace = trace;
    created->options = *options;
    created->predicted_ns = -1;
    TRY_OR_FAIL(prefetch_planner_create(&planner_options, &created->planner, err));
    TRY_OR_FAIL(sim_levels_create((int32_t)num_nodes, options->levels, options->num_levels,
                                  &created->levels, err));
    TRY_OR_FAIL(key_table_init((int32_t)num_nodes, &created->nodes, err));
    created->places = calloc(num_nodes, sizeof(*created->places));
    created->origins = calloc(num_nodes, sizeof(*created->origins));
    created->users = malloc(num_nodes * sizeof(*created->users));
    created->depths = malloc(num_nodes * sizeof(*created->depths));
    created->queue = malloc(num_requests * sizeof(*created->queue));
    created->orders = malloc(num_requests * sizeof(*created->orders));
    created->arrivals_ns = malloc(num_requests * sizeof(*created->arrivals_ns));
    created->held_until_ns = calloc(num_requests, sizeof(*created->held_until_ns));
    created->cancelled_keys =
        malloc((size_t)planner_options.max_tracked * sizeof(*created->cancelled_keys));
    if (created->places == NULL || created->origins == NULL || created->users == NULL ||
        created->depths == NULL || created->queue == NULL || created->orders == NULL ||
        created->arrivals_ns == NULL || created->held_until_ns == NULL ||
        created->cancelled_keys == NULL) {
        status = error_out_of_memory(err, "a slower tier", num_nodes * sizeof(int32_t));
        goto fail;
    }
    find_paths(created);
    *tier = created;
    return IMBREX_STATUS_OK;
fail:
    sim_tier_destroy(created);
    return status;
}

void sim_tier_destroy(struct sim_tier *tier)
{
    if (tier != NULL) {
        prefetch_planner_destroy(tier->planner);
        sim_levels_destroy(tier->levels);
        key_table_deinit(&tier->nodes);
        free(tier->places);
        free(tier->origins);
        free(tier->users);
        free(tier->depths);
        free(tier->queue);
        free(tier->orders);
        free(tier->arrivals_ns);
        free(tier->held_until_ns);
        free(tier->cancelled_keys);
        free(tier);
    }
}

void sim_tier_attach(struct sim_tier *tier, struct kv_cache *cache, struct kv_pool *pool)
{
    tier->cache = cache;
    tier->pool = pool;
}

void sim_tier_forgets(void *user, const struct kv_key *key, const int32_t *token_ids,
                      int32_t block_idx)
{
    (void)token_ids;
    struct sim_tier *tier = user;
    int32_t node = node_of(key);
    (void)block_idx;
    if ((tier->places[node] & WAS_FORGOTTEN) == 0) {
        (void)key_table_put(&tier->nodes, key->words[0], node);
    }
    tier->places[node] = WAS_FORGOTTEN;
    tier->origins[node] = 0;
    int64_t copied_ns = sim_levels_put(tier->levels, node, tier->now_ns);
    tier->copied_ns = copied_ns > tier->copied_ns ? copied_ns : tier->copied_ns;
    prefetch_lost(tier->planner, plan_key(node));
}

/* ---- moves ----------------------------------------------------------------------------------- */

static void drop_move(struct sim_tier *tier, int32_t move_idx)
{
    kv_pool_release(tier->pool, tier->moves[move_idx].block_idx);
    tier->num_moves--;
    for (int32_t i = move_idx; i < tier->num_moves; i++) {
        tier->moves[i] = tier->moves[i + 1];
    }
}

/* It has not begun. */
static bool is_pending(const struct sim_tier *tier, const struct move *move)
{
    return move->begin_ns > tier->now_ns;
}

/* The request's moves that have not begun are taken back. */
static void cancel(struct sim_tier *tier, int32_t request_idx)
{
    int32_t num_cancelled =
        prefetch_cancel(tier->planner, request_idx, tier->now_ns, tier->cancelled_keys);
    for (int32_t i = 0; i < num_cancelled; i++) {
        for (int32_t k = tier->num_moves - 1; k >= 0; k--) {
            if (plan_key(tier->moves[k].node) == tier->cancelled_keys[i]) {
                drop_move(tier, k);
            }
        }
    }
}

/* Those of all requests that have a pending move for which this holds. */
static void cancel_where(struct sim_tier *tier,
                         bool (*is_needless)(const struct sim_tier *tier, const struct move *move))
{
    for (int32_t i = 0; i < tier->num_moves;) {
        const struct move *move = &tier->moves[i];
        if (is_pending(tier, move) && is_needless(tier, move)) {
            cancel(tier, move->request_idx);
            i = 0;
        } else {
            i++;
        }
    }
}

/* The block goes up into the cache. */
static void note_origin(struct sim_tier *tier, int32_t node)
{
    tier->origins[node] = (signed char)(1 + sim_levels_origin(tier->levels, node));
}

static void set_now(struct sim_tier *tier, int64_t now_ns)
{
    tier->now_ns = now_ns;
    sim_levels_advance(tier->levels, now_ns);
}

static void end_first_move(struct sim_tier *tier)
{
    struct move move = tier->moves[0];
    int32_t parent = parent_of(tier, move.node);
    struct kv_key key = sim_node_key(move.node), parent_key = sim_node_key(parent);

    set_now(tier, move.end_ns);
    if (kv_cache_promote(tier->cache, &key, parent >= 0 ? &parent_key : NULL, NULL, move.block_idx,
                         move.end_ns)) {
        tier->places[move.node] |= IN_CACHE;
        note_origin(tier, move.node);
        sim_levels_load(tier->levels, move.node, move.end_ns);
        tier->num_moves--;
        for (int32_t i = 0; i < tier->num_moves; i++) {
            tier->moves[i] = tier->moves[i + 1];
        }
    } else {
        prefetch_lost(tier->planner, plan_key(move.node));
        drop_move(tier, 0);
    }
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* How much of the path is in the cache, which holds paths from a head on. */
static int32_t num_cached(const struct sim_tier *tier, const int32_t *path, int32_t num_blocks)
{
    int32_t low = 0, high = num_blocks;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if ((tier->places[path[middle]] & IN_CACHE) != 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Reads what of the path lies in deeper tiers into the first one, from the head on, as long as no
 * more than so many reads are under way. */
static void fetch(struct sim_tier *tier, const int32_t *path, int32_t num_blocks,
                  int32_t max_fetches)
{
    for (int32_t i = 0; i < num_blocks && tier->num_fetches < max_fetches; i++) {
        int32_t level_idx = sim_levels_find(tier->levels, path[i]);
        if (level_idx < 0) {
            return;
        }
        if (level_idx > 0) {
            tier->fetch_ends_ns[tier->num_fetches++] =
                sim_levels_raise(tier->levels, path[i], tier->now_ns);
        }
    }
}

/* Tells of a request with what of the path, from the head on, is in the first tier alone. False:
 * nothing is. */
static bool tell_request(struct sim_tier *tier, int32_t request_idx, const int32_t *path,
                         int32_t num_blocks)
{
    uint64_t *keys = tier->keys[tier->num_requests];
    int32_t num_keys = 0, i = num_cached(tier, path, num_blocks);

    if (tier->options.num_levels > 1) {
        fetch(tier, path + i, num_blocks - i, request_idx >= 0 ? MAX_FETCHES : 1);
    }
    for (; i < num_blocks && num_keys < MAX_PLANNED_KEYS &&
           sim_levels_is_near(tier->levels, path[i], tier->now_ns);
         i++) {
        keys[num_keys++] = plan_key(path[i]);
    }
    if (num_keys == 0) {
        return false;
    }
    tier->requests[tier->num_requests++] = (struct prefetch_request){
        .request_idx = request_idx,
        .place = INT64_MAX,
        .needed_ns = WHENEVER_NS,
        .keys = keys,
        .num_keys = num_keys,
    };
    return true;
}

/* Of the one at this place of the queue. */
static bool tell_waiting(struct sim_tier *tier, int32_t queue_idx)
{
    int32_t request_idx = tier->queue[queue_idx];
    int32_t num_blocks = tier->trace->requests[request_idx].num_blocks;
    if (num_blocks > tier->pool->num_blocks) {
        num_blocks = tier->pool->num_blocks;
    }
    if (!tell_request(tier, request_idx, sim_trace_path(tier->trace, request_idx), num_blocks)) {
        return false;
    }
    struct prefetch_request *told = &tier->requests[tier->num_requests - 1];
    told->place = tier->orders[request_idx];
    tier->num_waiting_keys += told->num_keys;
    if (tier->interval_ns > 0) {
        double wait_ns = tier->interval_ns * (double)(queue_idx - tier->num_admitted + 1);
        told->needed_ns = wait_ns < (double)WHENEVER_NS - (double)tier->now_ns
                              ? tier->now_ns + (int64_t)wait_ns
                              : WHENEVER_NS;
        told->needed_ns -= tier->options.levels[0].latency_ns;
    }
    return true;
}

static bool is_predicted(const struct sim_tier *tier, int32_t request_idx)
{
    for (int32_t i = 0; i < tier->num_predictions; i++) {
        if (predicted_request(tier->predicted_nodes[i]) == request_idx) {
            return true;
        }
    }
    return false;
}

static bool is_unexpected(const struct sim_tier *tier, const struct move *move)
{
    return move->request_idx < 0 && !is_predicted(tier, move->request_idx);
}

static bool is_there(const struct sim_tier *tier, const struct move *move)
{
    return (tier->places[move->node] & IN_CACHE) != 0;
}

static bool is_admitted(const struct sim_tier *tier, const struct move *move)
{
    return move->request_idx == tier->queue[tier->num_admitted - 1];
}

/* What is expected no longer is not fetched. */
static void renew_predictions(struct sim_tier *tier)
{
    struct kv_policy *policy = kv_cache_policy(tier->cache);
    int32_t num_told;

    if (policy->functions->predict == NULL || !tier->options.predicts ||
        (tier->predicted_ns >= 0 &&
         tier->now_ns - tier->predicted_ns < PREFETCH_PREDICTION_LIFE_NS)) {
        return;
    }
    tier->predicted_ns = tier->now_ns;
    num_told = policy->functions->predict(policy, tier->predictions, PREFETCH_MAX_PREDICTIONS,
                                          tier->now_ns);
    tier->num_predictions = 0;
    for (int32_t i = 0; i < num_told; i++) {
        struct kv_prediction prediction = tier->predictions[i];
        int32_t node = key_table_find(&tier->nodes, prediction.key_hash);
        if (node < 0 || is_predicted(tier, predicted_request(node))) {
            continue;
        }
        /* Most valuable first. */
        int32_t place = tier->num_predictions++;
        for (; place > 0 && tier->predictions[place - 1].value < prediction.value; place--) {
            tier->predictions[place] = tier->predictions[place - 1];
            tier->predicted_nodes[place] = tier->predicted_nodes[place - 1];
        }
        tier->predictions[place] = prediction;
        tier->predicted_nodes[place] = node;
    }
    cancel_where(tier, is_unexpected);
}

/* The path to the node, as far as it is not in the cache: what was forgotten is in the tier. */
static bool tell_prediction(struct sim_tier *tier, int32_t prediction_idx)
{
    int32_t node = tier->predicted_nodes[prediction_idx];

    if (!tell_request(tier, predicted_request(node), sim_trace_path(tier->trace, tier->users[node]),
                      tier->depths[node] + 1)) {
        return false;
    }
    tier->requests[tier->num_requests - 1].value =
        tier->predictions[prediction_idx].value / PREFETCH_PREDICTION_MARGIN;
    return true;
}

/* Those that wait come first: with so many blocks of theirs, followed already or not, no prediction
 * has its turn. False: there is no more to tell. */
static bool tell_next(struct sim_tier *tier)
{
    bool was_told = false;

    while (!was_told && tier->next_waiting < tier->num_arrived &&
           tier->num_requests < MAX_PLANNED_REQUESTS) {
        was_told = tell_waiting(tier, tier->next_waiting++);
    }
    while (!was_told && tier->next_prediction < tier->num_predictions &&
           tier->num_waiting_keys < 2 * SIM_TIER_MAX_MOVES) {
        was_told = tell_prediction(tier, tier->next_prediction++);
    }
    return was_told;
}

/* The block that would go for the next move. False: none may. */
static bool find_victim(struct sim_tier *tier, struct prefetch_victim *victim)
{
    struct kv_policy *policy = kv_cache_policy(tier->cache);
    int32_t block_idx = kv_cache_next_victim(tier->cache, tier->now_ns);

    if (block_idx < 0) {
        return false;
    }
    *victim = (struct prefetch_victim){
        .block_idx = block_idx,
        .place = kv_cache_wanted(tier->cache, block_idx),
        .value = policy->functions->value != NULL
                     ? policy->functions->value(policy, block_idx, tier->now_ns)
                     : 0,
    };
    return true;
}

/* Whether the request's missing blocks follow on this one, without which they are useless. The
 * queue protects what it follows on; a prediction's value does not. */
static bool is_behind(const struct sim_tier *tier, const struct prefetch_request *request,
                      int32_t block_idx)
{
    int32_t parent = parent_of(tier, (int32_t)(request->keys[0] - 1));
    return parent >= 0 &&
           sim_node_key(parent).words[0] == kv_cache_key_hash(tier->cache, block_idx);
}

/* Moves begin from then on: what requests loaded for themselves, the planner does not know. */
static int64_t link_free_ns(const struct sim_tier *tier)
{
    int64_t free_ns = sim_levels_free_ns(tier->levels);
    return free_ns > tier->now_ns ? free_ns : tier->now_ns;
}

/* Plans one move. The policy is asked for a victim at a time: who goes after it depends on it. What
 * may not go for a request may not go for those after it: one at a time gives what all give. */
static bool plan_move(struct sim_tier *tier)
{
    struct prefetch_victim victim;
    struct prefetch_step step;
    int32_t num_steps = 0;
    bool has_victim = tier->pool->num_free == 0 && find_victim(tier, &victim);

    for (int32_t i = 0; num_steps == 0 && (i < tier->num_requests || tell_next(tier)); i++) {
        if (has_victim && is_behind(tier, &tier->requests[i], victim.block_idx)) {
            continue;
        }
        enum imbrex_status status =
            prefetch_plan(tier->planner, link_free_ns(tier), &tier->requests[i], 1, &victim,
                          has_victim, tier->pool->num_free, &step, 1, &num_steps);
        assert(status == IMBREX_STATUS_OK);
        (void)status;
    }
    if (num_steps == 0) {
        return false;
    }
    /* A plan is told what is missing when it begins, before its victims go. */
    while (step.victim_block >= 0 && tier->num_moves < SIM_TIER_MAX_MOVES - 1 && tell_next(tier)) {
    }
    struct move *move = &tier->moves[tier->num_moves];
    *move = (struct move){
        .node = (int32_t)(step.key - 1),
        .request_idx = step.request_idx,
        .begin_ns = step.begin_ns,
        .end_ns = step.end_ns + tier->options.levels[0].latency_ns,
    };
    if (tier->options.sees_move != NULL) {
        struct sim_tier_move seen = {
            .node = move->node,
            .request_idx = move->request_idx,
            .has_victim = step.victim_block >= 0,
            .now_ns = tier->now_ns,
            .begin_ns = move->begin_ns,
            .end_ns = move->end_ns,
        };
        if (seen.has_victim) {
            seen.victim_key_hash = kv_cache_key_hash(tier->cache, step.victim_block);
        }
        tier->options.sees_move(tier->options.user, &seen);
    }
    if (step.victim_block >= 0) {
        kv_cache_make_room(tier->cache, 1, tier->now_ns);
    }
    if (kv_pool_acquire(tier->pool, &move->block_idx) != IMBREX_STATUS_OK) {
        assert(!"a victim makes room");
        prefetch_lost(tier->planner, step.key);
        return false;
    }
    tier->num_moves++;
    return true;
}

static void plan(struct sim_tier *tier)
{
    if (tier->num_moves == SIM_TIER_MAX_MOVES) {
        return;
    }
    renew_predictions(tier);
    tier->num_requests = 0;
    tier->num_waiting_keys = 0;
    tier->next_waiting = tier->num_admitted;
    tier->next_prediction = 0;
    while (tier->num_moves < SIM_TIER_MAX_MOVES && plan_move(tier)) {
    }
}

/* Reads that have ended make room for others. */
static void end_fetches(struct sim_tier *tier)
{
    int32_t num_ended = 0;

    while (num_ended < tier->num_fetches && tier->fetch_ends_ns[num_ended] <= tier->now_ns) {
        num_ended++;
    }
    tier->num_fetches -= num_ended;
    for (int32_t i = 0; i < tier->num_fetches; i++) {
        tier->fetch_ends_ns[i] = tier->fetch_ends_ns[i + num_ended];
    }
}

/* The next end of a move or of a read. */
static int64_t next_end_ns(const struct sim_tier *tier)
{
    int64_t next_ns = tier->num_moves > 0 ? tier->moves[0].end_ns : INT64_MAX;

    return tier->num_fetches > 0 && tier->fetch_ends_ns[0] < next_ns ? tier->fetch_ends_ns[0]
                                                                     : next_ns;
}

void sim_tier_advance(struct sim_tier *tier, int64_t now_ns)
{
    if (now_ns > tier->now_ns) {
        plan(tier);
    }
    for (int64_t end_ns = next_end_ns(tier); end_ns <= now_ns; end_ns = next_end_ns(tier)) {
        if (tier->num_moves > 0 && tier->moves[0].end_ns == end_ns) {
            end_first_move(tier);
        }
        set_now(tier, end_ns);
        end_fetches(tier);
        if (tier->now_ns < now_ns) {
            plan(tier);
        }
    }
    set_now(tier, now_ns);
}

/* ---- events ---------------------------------------------------------------------------------- */

/* From the first time on that some of its blocks are below. */
static void note_patience(struct sim_tier *tier, int32_t request_idx, int64_t now_ns)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);
    int32_t num_blocks = tier->trace->requests[request_idx].num_blocks;
    int32_t first = num_cached(tier, path, num_blocks), i = first;

    while (i < num_blocks && sim_levels_find(tier->levels, path[i]) >= 0) {
        i++;
    }
    if (i > first && tier->held_until_ns[request_idx] == 0) {
        double patience_ns = (double)(i - first) * (double)tier->options.compute_block_ns;
        tier->held_until_ns[request_idx] = patience_ns < (double)WHENEVER_NS - (double)now_ns
                                               ? now_ns + (int64_t)patience_ns
                                               : WHENEVER_NS;
    }
}

void sim_tier_arrive(struct sim_tier *tier, int32_t request_idx, int32_t order, int64_t now_ns)
{
    if (order >= tier->options.first_scored && !tier->is_scoring) {
        tier->is_scoring = true;
        prefetch_read_metrics(tier->planner, &tier->unscored);
        for (int32_t i = 0; i < tier->options.num_levels; i++) {
            sim_levels_read_metrics(tier->levels, i, &tier->metrics.levels[i]);
        }
    }
    tier->queue[tier->num_arrived++] = request_idx;
    tier->orders[request_idx] = order;
    tier->arrivals_ns[request_idx] = now_ns;
    if (tier->options.waits) {
        note_patience(tier, request_idx, now_ns);
    }
}

static void note_interval(struct sim_tier *tier, int64_t now_ns)
{
    if (tier->has_waited) {
        double passed_ns = (double)(now_ns - tier->last_admission_ns);
        tier->interval_ns += tier->interval_ns > 0
                                 ? (passed_ns - tier->interval_ns) / ADMISSIONS_REMEMBERED
                                 : passed_ns;
    }
    tier->last_admission_ns = now_ns;
    tier->has_waited = tier->num_admitted < tier->num_arrived;
}

/* num_there: blocks that were found or have come from below. */
static void count_missed(struct sim_tier *tier, int32_t request_idx, int32_t num_there,
                         int32_t num_blocks, int64_t now_ns)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);
    int64_t num_missed = 0;

    while (num_there + num_missed < num_blocks &&
           sim_levels_find(tier->levels, path[num_there + num_missed]) >= 0) {
        num_missed++;
    }
    if (tier->orders[request_idx] < tier->options.first_scored) {
        return;
    }
    if (tier->arrivals_ns[request_idx] < now_ns) {
        tier->metrics.num_late += num_missed;
    } else {
        tier->metrics.num_unforeseen += num_missed;
    }
}

/* The blocks that it uses need not come from anywhere again. */
static void count_used(struct sim_tier *tier, int32_t request_idx, int32_t num_there)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);
    bool is_scored = tier->orders[request_idx] >= tier->options.first_scored;

    for (int32_t i = 0; i < num_there; i++) {
        int32_t origin = tier->origins[path[i]];
        if (is_scored && origin > 0) {
            tier->metrics.num_from[origin - 1]++;
        } else if (is_scored) {
            tier->metrics.num_kept++;
        }
        tier->origins[path[i]] = 0;
    }
}

/* -1: it is not planned. */
static int32_t find_move(const struct sim_tier *tier, int32_t node)
{
    for (int32_t i = 0; i < tier->num_moves; i++) {
        if (tier->moves[i].node == node) {
            return i;
        }
    }
    return -1;
}

/* Brings the block up for the request that is admitted, which takes it as its own, if it is there
 * by then. False: it is not, and is computed. */
static bool load(struct sim_tier *tier, int32_t node, int64_t until_ns)
{
    const struct sim_level_options *level = &tier->options.levels[0];
    int32_t move_idx = find_move(tier, node);
    int64_t end_ns;

    if (move_idx >= 0) {
        end_ns = tier->moves[move_idx].end_ns;
        if (end_ns > until_ns) {
            return false;
        }
        prefetch_used(tier->planner, plan_key(node));
        drop_move(tier, move_idx);
    } else {
        int64_t begin_ns = sim_levels_raise_end(tier->levels, node, tier->now_ns);
        int64_t free_ns = link_free_ns(tier);
        if (tier->num_moves > 0) {
            int64_t moved_ns = tier->moves[tier->num_moves - 1].end_ns - level->latency_ns;
            free_ns = moved_ns > free_ns ? moved_ns : free_ns;
        }
        begin_ns = free_ns > begin_ns ? free_ns : begin_ns;
        end_ns = begin_ns + level->up_block_ns + level->latency_ns;
        if (end_ns > until_ns) {
            return false;
        }
        (void)sim_levels_raise(tier->levels, node, tier->now_ns);
    }
    note_origin(tier, node);
    sim_levels_load(tier->levels, node, end_ns);
    tier->ready_ns = end_ns > tier->ready_ns ? end_ns : tier->ready_ns;
    return true;
}

/* What lies below and can be had in time comes up; a request that waits in vain has waited. */
static void load_blocks(struct sim_tier *tier, int32_t request_idx, int32_t num_hits,
                        int32_t num_blocks, int64_t now_ns)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);

    note_patience(tier, request_idx, now_ns);
    int64_t until_ns = tier->held_until_ns[request_idx];
    for (int32_t i = num_hits; i < num_blocks; i++) {
        bool is_below = sim_levels_find(tier->levels, path[i]) >= 0;
        if (!is_below || !load(tier, path[i], until_ns)) {
            if (is_below && until_ns > tier->ready_ns) {
                tier->ready_ns = until_ns;
            }
            return;
        }
        tier->num_loaded++;
    }
}

void sim_tier_admit(struct sim_tier *tier, int32_t request_idx, int32_t num_hits,
                    int32_t num_blocks, int64_t now_ns)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);

    assert(tier->queue[tier->num_admitted] == request_idx);
    tier->num_admitted++;
    note_interval(tier, now_ns);
    for (int32_t i = 0; i < num_hits; i++) {
        prefetch_used(tier->planner, plan_key(path[i]));
    }
    tier->num_loaded = 0;
    tier->ready_ns = now_ns;
    tier->copied_ns = now_ns;
    if (tier->options.waits) {
        load_blocks(tier, request_idx, num_hits, num_blocks, now_ns);
    }
    count_missed(tier, request_idx, num_hits + tier->num_loaded, num_blocks, now_ns);
    count_used(tier, request_idx, num_hits + tier->num_loaded);
    cancel_where(tier, is_admitted);
    while (tier->num_moves > 0 && kv_pool_num_available(tier->pool) < num_blocks - num_hits) {
        const struct move *last = &tier->moves[tier->num_moves - 1];
        if (is_pending(tier, last)) {
            cancel(tier, last->request_idx);
        } else {
            prefetch_lost(tier->planner, plan_key(last->node));
            drop_move(tier, tier->num_moves - 1);
        }
    }
}

int32_t sim_tier_num_loaded(const struct sim_tier *tier)
{
    return tier->num_loaded;
}

int64_t sim_tier_computed(struct sim_tier *tier, int32_t request_idx, int32_t num_blocks,
                          int64_t now_ns)
{
    const int32_t *path = sim_trace_path(tier->trace, request_idx);
    int64_t ready_ns = tier->copied_ns > tier->ready_ns ? tier->copied_ns : tier->ready_ns;

    for (int32_t i = 0; i < num_blocks; i++) {
        tier->places[path[i]] |= IN_CACHE;
    }
    /* What was to be fetched for a prediction, or for who waits behind, is there now. */
    cancel_where(tier, is_there);
    if (!tier->options.waits) {
        return 0;
    }
    if (tier->orders[request_idx] >= tier->options.first_scored &&
        tier->metrics.held_ns < WHENEVER_NS) {
        tier->metrics.held_ns += ready_ns - now_ns;
    }
    return ready_ns - now_ns;
}

void sim_tier_read_metrics(const struct sim_tier *tier, struct sim_tier_metrics *metrics)
{
    struct prefetch_metrics planned;

    prefetch_read_metrics(tier->planner, &planned);
    *metrics = tier->metrics;
    metrics->num_planned = (int64_t)(planned.num_planned - tier->unscored.num_planned);
    metrics->num_used = (int64_t)(planned.num_used - tier->unscored.num_used);
    metrics->num_wasted = (int64_t)(planned.num_wasted - tier->unscored.num_wasted);
    metrics->num_cancelled = (int64_t)(planned.num_cancelled - tier->unscored.num_cancelled);
    metrics->num_predicted = (int64_t)(planned.num_predicted - tier->unscored.num_predicted);
    metrics->num_predicted_used =
        (int64_t)(planned.num_predicted_used - tier->unscored.num_predicted_used);
    for (int32_t i = 0; i < tier->options.num_levels; i++) {
        const struct sim_level_metrics *unscored = &tier->metrics.levels[i];
        struct sim_level_metrics *level = &metrics->levels[i];
        sim_levels_read_metrics(tier->levels, i, level);
        level->num_up -= unscored->num_up;
        level->num_down -= unscored->num_down;
        level->num_lost -= unscored->num_lost;
    }
}

/* A path that is in the cache is there from its head on. */
bool sim_tier_check(const struct sim_tier *tier)
{
    for (int32_t node = 0; node < tier->trace->num_nodes; node++) {
        int32_t parent = parent_of(tier, node);
        bool is_cached = (tier->places[node] & IN_CACHE) != 0;
        if ((is_cached && parent >= 0 && (tier->places[parent] & IN_CACHE) == 0) ||
            (!is_cached && tier->origins[node] != 0)) {
            return false;
        }
    }
    for (int32_t i = 1; i < tier->num_moves; i++) {
        if (tier->moves[i].end_ns < tier->moves[i - 1].end_ns) {
            return false;
        }
    }
    return sim_levels_check(tier->levels);
}
