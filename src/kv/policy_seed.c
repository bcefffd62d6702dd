/* SPDX-License-Identifier: Apache-2.0 */
/* `seed`: the idea this cache began with, kept as a baseline under its own name. A request's
 * fingerprint is a pattern; a table of n-grams (n = 3) of the patterns of arriving requests says
 * which pattern comes next; a block's score is the probability of the pattern that used it last
 * times its recency, and the least score goes. The three likeliest patterns are its prefetch list.
 *
 * It knows neither the queue nor when something returns, and patterns of unrelated clients are one
 * sequence to it. */
#include "kv/policy_seed.h"

#include <math.h>
#include <stdlib.h>

#include "kv/block_list.h"

enum {
    NUM_PATTERNS = 256,
    NUM_CONTEXTS = 4096, /* pairs of patterns, by hash */
    NUM_NEXT = 8,        /* successors counted of each */
    MAX_COUNT = 1 << 12, /* then all of a context are halved */
};

struct seed_context {
    int32_t total;
    int16_t pattern[NUM_NEXT];
    int16_t count[NUM_NEXT]; /* 0: unused */
};

struct seed_policy {
    struct kv_policy base;
    struct block_links links;
    struct block_list idle[NUM_PATTERNS]; /* by the pattern of the last user, longest idle first */
    int16_t *pattern;                     /* [num_blocks] */
    bool *is_idle;                        /* [num_blocks] */
    int64_t *used;                        /* [num_blocks] number of arrivals before its last use */
    int16_t *request_pattern;             /* [max_requests] */
    struct seed_context *contexts;        /* [NUM_CONTEXTS] */
    int64_t num_of[NUM_PATTERNS];         /* arrivals */
    uint64_t last_key[NUM_PATTERNS];      /* of the last block of the last request that ended */
    bool has_key[NUM_PATTERNS];
    /* Of the patterns since the last arrival, which changes all of them: so an eviction costs a
     * look at the scores, not at the table. */
    double chance[NUM_PATTERNS], score[NUM_PATTERNS]; /* score: INFINITY, nothing is idle */
    bool is_stale;                                    /* an arrival has not been looked at */
    int64_t num_arrivals;
    int32_t previous, last; /* the patterns of the last two arrivals */
    int32_t num_blocks, max_requests;
};

static struct seed_policy *self(struct kv_policy *policy)
{
    return (struct seed_policy *)policy;
}

static void seed_destroy(struct kv_policy *policy)
{
    struct seed_policy *seed = self(policy);
    free(seed->links.previous);
    free(seed->links.next);
    free(seed->pattern);
    free(seed->is_idle);
    free(seed->used);
    free(seed->request_pattern);
    free(seed->contexts);
    free(seed);
}

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Lengths and turns count by their order of magnitude. */
static uint64_t magnitude(int64_t value)
{
    uint64_t bits = 0;
    for (; value > 0; value >>= 1) {
        bits++;
    }
    return bits;
}

int32_t kv_policy_seed_pattern(const struct kv_fingerprint *fingerprint)
{
    uint64_t hash = mix(fingerprint->tenant, fingerprint->prefix_class);
    hash = mix(hash, magnitude(fingerprint->turn));
    hash = mix(hash, magnitude(fingerprint->num_prompt_tokens));
    return (int32_t)(hash >> 40) % NUM_PATTERNS;
}

static struct seed_context *context_of(const struct seed_policy *seed, int32_t previous,
                                       int32_t last)
{
    uint64_t hash = mix(mix(1, (uint64_t)previous), (uint64_t)last);
    return &seed->contexts[(hash >> 40) % NUM_CONTEXTS];
}

/* One more follows; the rarest makes place. */
static void count_next(struct seed_context *context, int32_t pattern)
{
    int32_t place = 0;
    for (int32_t i = 0; i < NUM_NEXT; i++) {
        if (context->count[i] > 0 && context->pattern[i] == pattern) {
            place = i;
            break;
        }
        if (context->count[i] < context->count[place]) {
            place = i;
        }
    }
    if (context->count[place] == 0 || context->pattern[place] != pattern) {
        context->total -= context->count[place];
        context->pattern[place] = (int16_t)pattern;
        context->count[place] = 0;
    }
    context->count[place]++;
    context->total++;
    if (context->count[place] == MAX_COUNT) {
        context->total = 0;
        for (int32_t i = 0; i < NUM_NEXT; i++) {
            context->count[i] = (int16_t)(context->count[i] / 2);
            context->total += context->count[i];
        }
    }
}

static void seed_arrive(struct kv_policy *policy, const struct kv_policy_request *request,
                        int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    int32_t pattern = kv_policy_seed_pattern(request->fingerprint);
    (void)now_ns;
    count_next(context_of(seed, seed->previous, seed->last), pattern);
    seed->request_pattern[request->request_idx] = (int16_t)pattern;
    seed->num_of[pattern]++;
    seed->num_arrivals++;
    seed->previous = seed->last;
    seed->last = pattern;
    seed->is_stale = true;
}

static double score_of(const struct seed_policy *seed, int32_t block_idx)
{
    double recency = 1.0 / (1.0 + (double)(seed->num_arrivals - seed->used[block_idx]));
    return seed->chance[seed->pattern[block_idx]] * recency;
}

/* In a pattern the longest idle block has the least score. */
static void look_at(struct seed_policy *seed, int32_t pattern)
{
    int32_t block_idx = seed->idle[pattern].first;
    seed->score[pattern] = block_idx >= 0 ? score_of(seed, block_idx) : INFINITY;
}

/* Where the context was never seen, or not with this pattern, its share of all arrivals counts a
 * little. */
static void look_again(struct seed_policy *seed)
{
    const struct seed_context *context = context_of(seed, seed->previous, seed->last);
    double counts[NUM_PATTERNS] = {0};
    if (!seed->is_stale) {
        return;
    }
    seed->is_stale = false;
    for (int32_t i = 0; i < NUM_NEXT; i++) {
        if (context->count[i] > 0) {
            counts[context->pattern[i]] = context->count[i];
        }
    }
    for (int32_t pattern = 0; pattern < NUM_PATTERNS; pattern++) {
        double prior =
            ((double)seed->num_of[pattern] + 1.0) / ((double)seed->num_arrivals + NUM_PATTERNS);
        seed->chance[pattern] = (counts[pattern] + prior) / (context->total + 1.0);
        look_at(seed, pattern);
    }
}

static void seed_finish(struct kv_policy *policy, const struct kv_policy_request *request,
                        int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    int32_t pattern = seed->request_pattern[request->request_idx];
    (void)now_ns;
    if (request->num_blocks > 0) {
        seed->last_key[pattern] =
            kv_cache_key_hash(policy->cache, request->blocks[request->num_blocks - 1]);
        seed->has_key[pattern] = true;
    }
}

static void seed_remove(struct kv_policy *policy, int32_t block_idx)
{
    struct seed_policy *seed = self(policy);
    if (seed->is_idle[block_idx]) {
        block_list_remove(&seed->idle[seed->pattern[block_idx]], seed->links, block_idx);
        seed->is_idle[block_idx] = false;
        look_at(seed, seed->pattern[block_idx]);
    }
}

static void add_idle(struct seed_policy *seed, int32_t block_idx)
{
    block_list_append(&seed->idle[seed->pattern[block_idx]], seed->links, block_idx);
    seed->is_idle[block_idx] = true;
    look_at(seed, seed->pattern[block_idx]);
}

static void seed_use(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                     int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    bool was_idle = seed->is_idle[block_idx];
    (void)now_ns;
    seed_remove(policy, block_idx);
    /* What comes up from a slower tier comes for what is expected. */
    seed->pattern[block_idx] =
        request_idx >= 0 ? seed->request_pattern[request_idx] : (int16_t)seed->last;
    if (was_idle) {
        add_idle(seed, block_idx);
    }
}

static void seed_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    (void)now_ns;
    seed->used[block_idx] = seed->num_arrivals;
    add_idle(seed, block_idx);
}

static int32_t seed_victim(struct kv_policy *policy, int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    int32_t least = 0;
    (void)now_ns;
    look_again(seed);
    for (int32_t pattern = 1; pattern < NUM_PATTERNS; pattern++) {
        if (seed->score[pattern] < seed->score[least]) {
            least = pattern;
        }
    }
    return seed->idle[least].first;
}

int32_t kv_policy_seed_prefetch(const struct kv_policy *policy, int32_t patterns[SEED_NUM_PREFETCH])
{
    const struct seed_policy *seed = (const struct seed_policy *)policy;
    const struct seed_context *context = context_of(seed, seed->previous, seed->last);
    bool is_listed[NUM_NEXT] = {false};
    int32_t num_patterns = 0;
    while (num_patterns < SEED_NUM_PREFETCH) {
        int32_t best = -1;
        for (int32_t i = 0; i < NUM_NEXT; i++) {
            if (!is_listed[i] && context->count[i] > 0 &&
                (best < 0 || context->count[i] > context->count[best])) {
                best = i;
            }
        }
        if (best < 0) {
            break;
        }
        is_listed[best] = true;
        patterns[num_patterns++] = context->pattern[best];
    }
    return num_patterns;
}

/* Of each pattern of its list, what the last such request had. */
static int32_t seed_predict(struct kv_policy *policy, struct kv_prediction *predictions,
                            int32_t max_predictions, int64_t now_ns)
{
    struct seed_policy *seed = self(policy);
    int32_t patterns[SEED_NUM_PREFETCH], num_predictions = 0;
    int32_t num_patterns = kv_policy_seed_prefetch(policy, patterns);
    (void)now_ns;
    look_again(seed);
    for (int32_t i = 0; i < num_patterns && num_predictions < max_predictions; i++) {
        if (seed->has_key[patterns[i]]) {
            predictions[num_predictions++] = (struct kv_prediction){
                .key_hash = seed->last_key[patterns[i]], .value = seed->chance[patterns[i]]};
        }
    }
    return num_predictions;
}

static double seed_value(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    (void)now_ns;
    look_again(self(policy));
    return score_of(self(policy), block_idx);
}

static size_t seed_state_bytes(const struct kv_policy *policy)
{
    const struct seed_policy *seed = (const struct seed_policy *)policy;
    return sizeof(*seed) + NUM_CONTEXTS * sizeof(*seed->contexts) +
           (size_t)seed->num_blocks *
               (2 * sizeof(int32_t) + sizeof(*seed->pattern) + sizeof(bool) + sizeof(*seed->used)) +
           (size_t)seed->max_requests * sizeof(*seed->request_pattern);
}

static const struct kv_policy_functions functions = {
    .name = "seed",
    .destroy = seed_destroy,
    .arrive = seed_arrive,
    .finish = seed_finish,
    .insert = seed_use,
    .hit = seed_use,
    .idle = seed_idle,
    .busy = seed_remove,
    .evict = seed_remove,
    .victim = seed_victim,
    .predict = seed_predict,
    .value = seed_value,
    .state_bytes = seed_state_bytes,
};

enum imbrex_status kv_policy_seed_create(const struct kv_policy_options *options,
                                         struct kv_policy **policy, struct imbrex_error *err)
{
    size_t num = (size_t)options->num_blocks;
    struct seed_policy *seed = calloc(1, sizeof(*seed));
    if (seed == NULL) {
        return error_out_of_memory(err, "the policy seed", sizeof(*seed));
    }
    seed->base.functions = &functions;
    seed->is_stale = true;
    seed->num_blocks = options->num_blocks;
    seed->max_requests = options->max_requests;
    seed->links.previous = calloc(num, sizeof(*seed->links.previous));
    seed->links.next = calloc(num, sizeof(*seed->links.next));
    seed->pattern = calloc(num, sizeof(*seed->pattern));
    seed->is_idle = calloc(num, sizeof(*seed->is_idle));
    seed->used = calloc(num, sizeof(*seed->used));
    seed->request_pattern = calloc((size_t)options->max_requests, sizeof(*seed->request_pattern));
    seed->contexts = calloc(NUM_CONTEXTS, sizeof(*seed->contexts));
    if (seed->links.previous == NULL || seed->links.next == NULL || seed->pattern == NULL ||
        seed->is_idle == NULL || seed->used == NULL || seed->request_pattern == NULL ||
        seed->contexts == NULL) {
        seed_destroy(&seed->base);
        return error_out_of_memory(err, "the policy seed", num * sizeof(*seed->used));
    }
    for (int32_t i = 0; i < NUM_PATTERNS; i++) {
        seed->idle[i] = BLOCK_LIST_EMPTY;
        seed->score[i] = INFINITY;
    }
    *policy = &seed->base;
    return IMBREX_STATUS_OK;
}
