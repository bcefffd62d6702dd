/* SPDX-License-Identifier: Apache-2.0 */
/* `predictive`: what waiting requests want is above all else, nearest last to go; the rest goes by
 * the benefit of keeping it a second longer, as far as the past of its class tells.
 *
 *   arrival, admission   blocks that a request comes for have returned: a return of their class at
 *                        their age. Dated by arrival if the queue protects them from then on, else
 *                        by admission: a policy blind to the queue must hold them until then
 *   end                  the request's blocks become up to three segments (predictive_segments.h)
 *   now and then         time without return is counted, indices are those of all seen until now
 *   victim               of the segments whose tail is idle and has no descendants, the one of the
 *                        least index (predictive_table.h); its tail goes
 *   guard                a shadow lru; where it leads, lru decides for a while */
#include "kv/policy_predictive.h"

#include <stdlib.h>
#include <string.h>

#include "kv/predictive_guard.h"
#include "kv/predictive_segments.h"
#include "kv/queue_order.h"

enum {
    /* Blocks of one segment that one answer may name. */
    MAX_RUN = 64,
};
/* A class with so many returns is believed by half when it is to say what comes up. In short loads,
 * where a class has a few, three of four blocks came up for nothing otherwise; 8 leaves out many
 * that are used. */
#define DOUBTED_RETURNS 4.0
/* An answer holds for the moment: nothing ages much in it. */
#define SCAN_LIFE_NS INT64_C(10000000)

struct predictive_policy {
    struct kv_policy base;
    struct kv_policy_options options;
    struct predictive_table table;
    struct segments segments;
    struct predictive_guard guard;
    struct queue_order order;  /* all idle blocks while lru decides; their ages always */
    unsigned char *num_parted; /* [num_blocks] children seen, up to fan_out */
    bool *is_idle;             /* [num_blocks] */
    int32_t *num_seen;         /* [max_requests] blocks of its path that others had before */
    int32_t arriving_idx, arriving_depth; /* the request whose misses follow */
    int32_t num_ends;                     /* since the last renewal */
    int32_t scanned_idx;                  /* segment that the last look chose; -1: none */
    int64_t scanned_ns;
    /* Segments whose tails could go when they were put here, each once: all whose tails can go now
     * are here. */
    int32_t *candidates; /* [num_candidates] */
    bool *is_candidate;  /* [num_segments] */
    int32_t num_candidates;
    uint64_t looked_order; /* of the newest segment that was looked at, for that renewal */
    uint32_t looked_renewal;
    bool is_lru; /* the order above decides */
};

static struct predictive_policy *self(struct kv_policy *policy)
{
    return (struct predictive_policy *)policy;
}

static void predictive_destroy(struct kv_policy *policy)
{
    struct predictive_policy *predictive = self(policy);
    predictive_table_deinit(&predictive->table);
    segments_deinit(&predictive->segments);
    predictive_guard_deinit(&predictive->guard);
    queue_order_deinit(&predictive->order);
    free(predictive->num_parted);
    free(predictive->is_idle);
    free(predictive->num_seen);
    free(predictive->candidates);
    free(predictive->is_candidate);
    free(predictive);
}

/* ---- who decides ----------------------------------------------------------------------------- */

static void choose_decider(struct predictive_policy *predictive)
{
    bool is_lru = !predictive->options.use_table ||
                  (predictive->options.use_guard && predictive->guard.follows_lru);
    if (is_lru == predictive->is_lru) {
        return;
    }
    predictive->is_lru = is_lru;
    predictive->scanned_idx = -1;
    block_heap_clear(&predictive->order.heap);
    for (int32_t i = 0; is_lru && i < predictive->options.num_blocks; i++) {
        if (predictive->is_idle[i]) {
            queue_order_restore(&predictive->order, predictive->base.cache, i);
        }
    }
}

/* ---- requests -------------------------------------------------------------------------------- */

static void predictive_arrive(struct kv_policy *policy, const struct kv_policy_request *request,
                              int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);

    predictive->scanned_idx = -1;
    predictive->num_seen[request->request_idx] = request->num_blocks;
    predictive->arriving_idx = request->request_idx;
    predictive->arriving_depth = request->num_blocks;
    if (!predictive->options.use_queue) {
        return;
    }
    for (int32_t i = 0; i < request->num_blocks; i++) {
        segments_return(&predictive->segments, request->blocks[i], now_ns);
    }
    if (predictive->is_lru) {
        queue_order_arrive(&predictive->order, policy->cache, request);
    }
}

static void predictive_miss(struct kv_policy *policy, uint64_t key_hash, int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);

    predictive->arriving_depth++;
    if (segments_find_ghost(&predictive->segments, key_hash, predictive->options.use_queue,
                            now_ns)) {
        predictive->num_seen[predictive->arriving_idx] = predictive->arriving_depth;
    }
}

static void predictive_leave(struct kv_policy *policy, const struct kv_policy_request *request,
                             int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    (void)request;
    (void)now_ns;
    predictive->scanned_idx = -1;
    queue_order_leave(&predictive->order);
}

static void renew(struct predictive_policy *predictive, int64_t now_ns)
{
    if (++predictive->num_ends < predictive->options.knobs.renewal_ends) {
        return;
    }
    predictive->num_ends = 0;
    segments_expose(&predictive->segments, now_ns);
    predictive_table_renew(&predictive->table);
}

static void predictive_finish(struct kv_policy *policy, const struct kv_policy_request *request,
                              int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    const struct kv_policy_options *options = &predictive->options;
    int32_t num_blocks = request->num_blocks;
    int32_t num_seen = predictive->num_seen[request->request_idx];
    int32_t begin = 0, ends[3] = {0, num_seen, num_blocks};

    predictive->scanned_idx = -1;
    for (int32_t i = num_blocks - 1; i >= 0 && ends[0] == 0; i--) {
        if (predictive->num_parted[request->blocks[i]] >= options->knobs.fan_out) {
            ends[0] = i + 1;
        }
    }
    int64_t num_new = request->num_path_blocks > num_seen ? request->num_path_blocks - num_seen : 0;
    for (int32_t region = 0; region < 3; region++) {
        int32_t end = ends[region] < num_blocks ? ends[region] : num_blocks;
        if (end <= begin) {
            continue;
        }
        int32_t class_idx =
            predictive_class(&options->knobs, request->fingerprint, (enum predictive_region)region,
                             num_new * options->block_size, options->use_hints);
        segments_add(&predictive->segments, &request->blocks[begin], end - begin,
                     predictive_table_cell(&predictive->table, class_idx), now_ns);
        begin = end;
    }
    renew(predictive, now_ns);
    if (options->use_guard) {
        for (int32_t i = num_blocks - 1; i >= 0; i--) {
            predictive_guard_release(&predictive->guard,
                                     kv_cache_key_hash(policy->cache, request->blocks[i]));
        }
        if (predictive_guard_judge(&predictive->guard)) {
            choose_decider(predictive);
        }
    }
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The block's segment may have a tail that can go now, if it ends with this block. */
static void add_candidate(struct predictive_policy *predictive, int32_t block_idx)
{
    int32_t segment_idx = predictive->segments.segment_of[block_idx];
    if (segment_idx >= 0 && !predictive->is_candidate[segment_idx] &&
        predictive->segments.segments[segment_idx].blocks.last == block_idx) {
        predictive->is_candidate[segment_idx] = true;
        predictive->candidates[predictive->num_candidates++] = segment_idx;
    }
}

static void predictive_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                              int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    int32_t parent = kv_cache_parent(policy->cache, block_idx);
    uint64_t key = kv_cache_key_hash(policy->cache, block_idx);
    if (request_idx < 0) {
        predictive->num_parted[block_idx] = 0;
        predictive->is_idle[block_idx] = false;
        segments_promote(&predictive->segments, block_idx, parent, key, now_ns);
        return;
    }
    bool is_back = segments_find_ghost(&predictive->segments, key, true, now_ns);

    predictive->num_parted[block_idx] = 0;
    predictive->is_idle[block_idx] = false;
    if (parent >= 0 && !is_back &&
        predictive->num_parted[parent] < predictive->options.knobs.fan_out) {
        predictive->num_parted[parent]++;
    }
    if (predictive->options.use_guard) {
        predictive_guard_use(&predictive->guard, key, false);
    }
}

static void predictive_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                           int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    (void)request_idx;
    segments_return(&predictive->segments, block_idx, now_ns);
    if (predictive->options.use_guard) {
        predictive_guard_use(&predictive->guard, kv_cache_key_hash(policy->cache, block_idx), true);
    }
}

static void predictive_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    (void)now_ns;
    predictive->is_idle[block_idx] = true;
    predictive->scanned_idx = -1;
    add_candidate(predictive, block_idx);
    if (predictive->is_lru) {
        queue_order_idle(&predictive->order, policy->cache, block_idx);
    } else {
        queue_order_stamp(&predictive->order, block_idx);
    }
}

static void predictive_busy(struct kv_policy *policy, int32_t block_idx)
{
    struct predictive_policy *predictive = self(policy);
    predictive->is_idle[block_idx] = false;
    predictive->scanned_idx = -1;
    queue_order_remove(&predictive->order, block_idx);
}

static void predictive_evict(struct kv_policy *policy, int32_t block_idx)
{
    struct predictive_policy *predictive = self(policy);
    int32_t segment_idx = predictive->segments.segment_of[block_idx];
    int32_t parent = kv_cache_parent(policy->cache, block_idx);
    predictive->is_idle[block_idx] = false;
    queue_order_remove(&predictive->order, block_idx);
    segments_evict(&predictive->segments, block_idx, kv_cache_key_hash(policy->cache, block_idx));
    if (parent >= 0) {
        add_candidate(predictive, parent);
    }
    if (segment_idx == predictive->scanned_idx && segment_idx >= 0 &&
        !predictive->segments.segments[segment_idx].is_live) {
        predictive->scanned_idx = -1;
    }
}

/* ---- the victim ------------------------------------------------------------------------------ */

/* INT64_MAX if nobody waits for the block, or the queue is not looked at. */
static int64_t wanted(const struct predictive_policy *predictive, int32_t block_idx)
{
    return predictive->options.use_queue ? kv_cache_wanted(predictive->base.cache, block_idx)
                                         : INT64_MAX;
}

/* Its line is kept in the segment: most looks find that nothing has changed. */
static double index_of(struct predictive_policy *predictive, struct segment *segment,
                       int64_t now_ns)
{
    int64_t age_ns = now_ns - segment->end_ns;
    if (age_ns >= segment->index_until_ns || segment->index_renewal != predictive->table.renewal) {
        predictive_table_index(&predictive->table, segment->cell_idx, age_ns, &segment->index,
                               &segment->index_slope, &segment->index_until_ns);
        segment->index_renewal = predictive->table.renewal;
    }
    return segment->index + segment->index_slope * (double)age_ns;
}

static bool can_go(const struct predictive_policy *predictive, const struct segment *segment)
{
    return segment->is_live && predictive->is_idle[segment->blocks.last] &&
           kv_cache_num_children(predictive->base.cache, segment->blocks.last) == 0;
}

/* The table settles what it tells of a class when it is first asked after a renewal. For all live
 * segments that is at the next choice of a victim, whether their tails can go or not. */
static void look_at_new(struct predictive_policy *predictive, int64_t now_ns)
{
    const struct segments *segments = &predictive->segments;
    bool is_renewed = predictive->looked_renewal != predictive->table.renewal;

    for (int32_t i = segments->live.last;
         i >= 0 && (is_renewed || segments->segments[i].live_order > predictive->looked_order);
         i = segments->links.previous[i]) {
        (void)index_of(predictive, &segments->segments[i], now_ns);
    }
    predictive->looked_order = segments->num_lives;
    predictive->looked_renewal = predictive->table.renewal;
}

/* -1: none. All idle blocks are in segments, and of an idle block all descendants are idle, so one
 * of them ends its segment. Of equals, the segment that ended first goes. */
static int32_t scan(struct predictive_policy *predictive, int64_t now_ns)
{
    struct segment *all = predictive->segments.segments;
    int32_t best_idx = -1, num_left = 0;
    int64_t best_wanted = 0;
    double best_index = 0.0;

    look_at_new(predictive, now_ns);
    for (int32_t i = 0; i < predictive->num_candidates; i++) {
        int32_t segment_idx = predictive->candidates[i];
        struct segment *segment = &all[segment_idx];
        if (!can_go(predictive, segment)) {
            predictive->is_candidate[segment_idx] = false;
            continue;
        }
        predictive->candidates[num_left++] = segment_idx;
        int64_t place = wanted(predictive, segment->blocks.last);
        if (best_idx >= 0 && place < best_wanted) {
            continue;
        }
        double index = index_of(predictive, segment, now_ns);
        if (best_idx < 0 || place > best_wanted || index < best_index ||
            (index == best_index && segment->live_order < all[best_idx].live_order)) {
            best_idx = segment_idx;
            best_wanted = place;
            best_index = index;
        }
    }
    predictive->num_candidates = num_left;
    return best_idx;
}

/* A block that is idle and belongs to no request that ended. */
static int32_t any_idle(const struct predictive_policy *predictive)
{
    int32_t block_idx = 0;
    while (block_idx < predictive->options.num_blocks - 1 && !predictive->is_idle[block_idx]) {
        block_idx++;
    }
    return block_idx;
}

static int32_t predictive_victim(struct kv_policy *policy, int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    const struct segments *segments = &predictive->segments;

    if (predictive->is_lru) {
        return queue_order_victim(&predictive->order, policy->cache);
    }
    int32_t segment_idx = predictive->scanned_idx;
    if (segment_idx < 0 || now_ns - predictive->scanned_ns > SCAN_LIFE_NS ||
        !can_go(predictive, &segments->segments[segment_idx])) {
        segment_idx = scan(predictive, now_ns);
        predictive->scanned_idx = segment_idx;
        predictive->scanned_ns = now_ns;
    }
    if (segment_idx < 0) {
        return any_idle(predictive);
    }
    /* The cache forgets from the tail up to what is named: as far as the blocks are worth the same,
     * one answer is enough. */
    int32_t block_idx = segments->segments[segment_idx].blocks.last;
    int64_t place = wanted(predictive, block_idx);
    for (int32_t i = 1; i < MAX_RUN; i++) {
        int32_t previous = segments->block_links.previous[block_idx];
        if (previous < 0 || !predictive->is_idle[previous] ||
            kv_cache_num_children(policy->cache, previous) > 1) {
            break;
        }
        if (wanted(predictive, previous) != place) {
            /* What is left of the segment has another rank. */
            predictive->scanned_idx = -1;
            break;
        }
        block_idx = previous;
    }
    return block_idx;
}

/* ---- what may be brought up again ------------------------------------------------------------ */

/* What a prediction is worth: its index, by how many returns of its class stand behind that. The
 * largest of many guesses are those that are most wrong. */
static double prediction_of(struct predictive_policy *predictive, struct segment *segment,
                            int64_t now_ns)
{
    double num_returns = predictive_table_num_returns(&predictive->table, segment->cell_idx);
    return index_of(predictive, segment, now_ns) * num_returns / (num_returns + DOUBTED_RETURNS);
}

/* Of segments that have lost blocks to eviction those that are worth most: what the cache would
 * hold if it could choose again now. */
static int32_t predictive_predict(struct kv_policy *policy, struct kv_prediction *predictions,
                                  int32_t max_predictions, int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    const struct segments *segments = &predictive->segments;
    const int32_t firsts[2] = {segments->live.first, segments->ghosts.first};
    int32_t num_predictions = 0;

    for (int32_t list = 0; list < 2 && !predictive->is_lru; list++) {
        for (int32_t i = firsts[list]; i >= 0; i = segments->links.next[i]) {
            struct segment *segment = &predictive->segments.segments[i];
            if (!segment->has_tail_key || segment->num_ghosts == 0) {
                continue;
            }
            /* What the table tells of its class is settled, and asking changes nothing: the many
             * that are worth too little need not be looked for. */
            if (segment->index_renewal == predictive->table.renewal &&
                num_predictions == max_predictions &&
                index_of(predictive, segment, now_ns) <= predictions[max_predictions - 1].value) {
                continue;
            }
            if (key_table_find(&segments->keys, segment->tail_key) != i) {
                continue;
            }
            double value = prediction_of(predictive, segment, now_ns);
            if (value <= 0.0) {
                continue;
            }
            int32_t place = num_predictions;
            while (place > 0 && value > predictions[place - 1].value) {
                if (place < max_predictions) {
                    predictions[place] = predictions[place - 1];
                }
                place--;
            }
            if (place < max_predictions) {
                predictions[place] =
                    (struct kv_prediction){.key_hash = segment->tail_key, .value = value};
                num_predictions += num_predictions < max_predictions;
            }
        }
    }
    return num_predictions;
}

static double predictive_value(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct predictive_policy *predictive = self(policy);
    int32_t segment_idx = predictive->segments.segment_of[block_idx];
    return segment_idx < 0
               ? 0.0
               : index_of(predictive, &predictive->segments.segments[segment_idx], now_ns);
}

/* ---- the rest -------------------------------------------------------------------------------- */

static size_t predictive_state_bytes(const struct kv_policy *policy)
{
    const struct predictive_policy *predictive = (const struct predictive_policy *)policy;
    const struct kv_policy_options *options = &predictive->options;
    return sizeof(*predictive) + predictive_table_bytes(&predictive->table) +
           segments_bytes(&predictive->segments) + predictive_guard_bytes(&predictive->guard) +
           queue_order_bytes(&predictive->order) +
           (size_t)options->num_blocks * (sizeof(*predictive->num_parted) + sizeof(bool)) +
           (size_t)predictive->segments.num_segments *
               (sizeof(*predictive->candidates) + sizeof(bool)) +
           (size_t)options->max_requests * sizeof(*predictive->num_seen);
}

static enum imbrex_status predictive_save(const struct kv_policy *policy, unsigned char **bytes,
                                          size_t *num_bytes, struct imbrex_error *err)
{
    const struct predictive_policy *predictive = (const struct predictive_policy *)policy;
    return predictive_table_save(&predictive->table, bytes, num_bytes, err);
}

/* Segments that there are already name their cells by number: only a fresh policy may load. */
static enum imbrex_status predictive_load(struct kv_policy *policy, const unsigned char *bytes,
                                          size_t num_bytes, struct imbrex_error *err)
{
    struct predictive_policy *predictive = self(policy);
    if (predictive->segments.unused.num_members != predictive->segments.num_segments) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "saved policy: expected a policy that has seen no request");
    }
    return predictive_table_load(&predictive->table, bytes, num_bytes, err);
}

bool kv_policy_predictive_check(const struct kv_policy *policy)
{
    const struct predictive_policy *predictive = (const struct predictive_policy *)policy;
    const struct segments *segments = &predictive->segments;

    for (int32_t i = segments->live.first; i >= 0; i = segments->links.next[i]) {
        if (can_go(predictive, &segments->segments[i]) && !predictive->is_candidate[i]) {
            return false;
        }
    }
    return segments_check(segments);
}

bool kv_policy_predictive_follows_lru(const struct kv_policy *policy)
{
    return ((const struct predictive_policy *)policy)->is_lru;
}

static const struct kv_policy_functions functions = {
    .name = "predictive",
    .destroy = predictive_destroy,
    .arrive = predictive_arrive,
    .finish = predictive_finish,
    .leave = predictive_leave,
    .insert = predictive_insert,
    .hit = predictive_hit,
    .idle = predictive_idle,
    .busy = predictive_busy,
    .evict = predictive_evict,
    .victim = predictive_victim,
    .miss = predictive_miss,
    .predict = predictive_predict,
    .value = predictive_value,
    .state_bytes = predictive_state_bytes,
    .save = predictive_save,
    .load = predictive_load,
};

enum imbrex_status kv_policy_predictive_create(const struct kv_policy_options *options,
                                               struct kv_policy **policy, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct predictive_policy *predictive = calloc(1, sizeof(*predictive));
    if (predictive == NULL) {
        return error_out_of_memory(err, "the policy predictive", sizeof(*predictive));
    }
    predictive->base.functions = &functions;
    predictive->options = *options;
    predictive->scanned_idx = -1;
    predictive->is_lru = !options->use_table;
    TRY_OR_FAIL(predictive_table_init(&options->knobs, &predictive->table, err));
    TRY_OR_FAIL(segments_init(options->num_blocks, &predictive->table, &predictive->segments, err));
    TRY_OR_FAIL(
        predictive_guard_init(&options->knobs, options->num_blocks, &predictive->guard, err));
    predictive->table.looks_ahead = options->use_lookahead;
    predictive->segments.ignores_ghosts = !options->use_ghosts;
    TRY_OR_FAIL(queue_order_init(options->num_blocks, &predictive->order, err));
    predictive->order.ignores_queue = !options->use_queue;
    size_t num_blocks = (size_t)options->num_blocks, num_requests = (size_t)options->max_requests;
    size_t num_segments = (size_t)predictive->segments.num_segments;
    predictive->num_parted = calloc(num_blocks, sizeof(*predictive->num_parted));
    predictive->is_idle = calloc(num_blocks, sizeof(*predictive->is_idle));
    predictive->num_seen = calloc(num_requests, sizeof(*predictive->num_seen));
    predictive->candidates = calloc(num_segments, sizeof(*predictive->candidates));
    predictive->is_candidate = calloc(num_segments, sizeof(*predictive->is_candidate));
    if (predictive->num_parted == NULL || predictive->is_idle == NULL ||
        predictive->num_seen == NULL || predictive->candidates == NULL ||
        predictive->is_candidate == NULL) {
        status = error_out_of_memory(err, "the policy predictive",
                                     (num_segments + num_requests) * sizeof(int32_t));
        goto fail;
    }
    *policy = &predictive->base;
    return IMBREX_STATUS_OK;

fail:
    predictive_destroy(&predictive->base);
    return status;
}
