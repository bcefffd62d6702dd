/* SPDX-License-Identifier: Apache-2.0 */
/* Who decides what the prefix cache forgets. A policy sees events and answers one question: which
 * idle block goes next. It has no clock, does no I/O, draws no random numbers: the same events give
 * the same answers, in the engine and in the replayer. Its memory is bounded by the number of
 * blocks and said in bytes.
 *
 * A block is busy while a request uses it, else idle. A block's ancestors are the blocks before it
 * in the prompts that use it; the cache forgets tails before heads: if the victim has descendants,
 * they go first (they are idle too). So a policy may name any idle block, and had better name one
 * whose descendants are worth no more. */
#ifndef IMBREX_KV_KV_POLICY_H
#define IMBREX_KV_KV_POLICY_H

#include <stdbool.h>
#include <stdio.h>

#include "base/status.h"

struct kv_cache;

enum kv_finish {
    KV_FINISH_UNKNOWN = 0,
    KV_FINISH_STOP = 1,   /* the model ended its turn */
    KV_FINISH_TOOL = 2,   /* it called a tool: somebody will answer */
    KV_FINISH_LENGTH = 3, /* a limit ended it */
    KV_FINISH_CANCELLED = 4,
};

/* What may tell whether and when a request's prefix returns. */
struct kv_fingerprint {
    uint32_t tenant; /* 0: unknown */
    uint64_t
        prefix_class; /* of the first block: requests of one kind begin alike; the cache fills it */
    uint64_t session; /* the client's, 0: unknown */
    int32_t turn;     /* 1: the first of its session; 0: unknown, the cache infers it */
    int64_t last_gap_ns; /* from the end of the session's last request to this arrival; -1: none;
                            * inferred with the turn */
    int32_t num_prompt_tokens, num_output_tokens, context_size;
    float temperature;
    enum kv_finish finish;      /* at its end */
    int64_t expected_return_ns; /* the client's hint, from the end on; 0: none */
    bool is_session_end;        /* the client's hint: nothing will follow */
};

/* A request as the policy sees it, valid during the event. */
struct kv_policy_request {
    int32_t
        request_idx; /* of live ones unique, below the cache's max_requests; given again later */
    const struct kv_fingerprint *fingerprint;
    const int32_t *blocks; /* [num_blocks] its resident blocks from the head of the prompt on */
    int32_t num_blocks;
    int32_t num_path_blocks;          /* full blocks of its prompt, resident or not */
    int64_t arrival_ns, admission_ns; /* admission: -1 before */
};

/* X(name, value, low, high): the numbers that `predictive` was given and did not learn, each with
 * its neighbours, by which the replayer shows how much hangs on it. */
#define KV_PREDICTIVE_KNOB_LIST(X)                                                               \
    /* Pseudo-events by which a level of classes is drawn towards the one above it. */           \
    X(coarse_shrinkage, 1, 0.5, 2)                                                               \
    X(middle_shrinkage, 3, 1.5, 6)                                                               \
    X(fine_shrinkage, 5, 2.5, 10)                                                                \
    /* Limits between classes of age of the session, new tokens and prompt length, times it. */  \
    X(gap_limits, 1, 0.5, 2)                                                                     \
    X(new_limits, 1, 0.5, 2)                                                                     \
    X(length_limits, 1, 0.5, 2)                                                                  \
    /* A block of a segment of n counts 1 / n^that: 0, 0.5 or 1. */                              \
    X(length_discount, 0.5, 0, 1)                                                                \
    /* Children of a block, counted as they come, from which on prompts part there. */           \
    X(fan_out, 3, 2, 4)                                                                          \
    /* Ends between two looks at what was learned. */                                            \
    X(renewal_ends, 64, 32, 128)                                                                 \
    X(ghost_life_s, 7200, 3600, 14400)                                                           \
    /* An hour of the busiest trace at hand has 8,800 ghosts. */                                 \
    X(max_ghosts, 16384, 8192, 32768)                                                            \
    /* The guard: requests over which its counters forget, and its first rest; by how much the \
     * next rest is longer; the lead of lru at which it falls, times it. */ \
    X(guard_horizon, 1000, 500, 2000)                                                            \
    X(guard_growth, 4, 2, 8)                                                                     \
    X(guard_lead, 1, 0.5, 2)

struct kv_predictive_knobs {
#define X(name, value, low, high) double name;
    KV_PREDICTIVE_KNOB_LIST(X)
#undef X
};
extern const struct kv_predictive_knobs kv_predictive_knobs_default;

struct kv_policy_options {
    int32_t num_blocks, max_requests;
    int32_t block_size; /* tokens */
    /* Switches of `predictive`, each a row in the replayer's tables; all on by default. */
    bool use_queue, use_table, use_guard, use_hints;
    bool use_lookahead; /* else a block is worth the chance that it returns now */
    bool use_ghosts;    /* else evicted blocks count for nothing */
    struct kv_predictive_knobs knobs;
};

/* A path that a policy expects to be asked for, whose end is not resident. */
struct kv_prediction {
    uint64_t key_hash; /* of its last block */
    double value;      /* comparable with kv_policy_functions.value, more than 0 */
};

struct kv_policy {
    const struct kv_policy_functions *functions;
    const struct kv_cache *cache; /* for the questions below; set by the cache */
};

struct kv_policy_functions {
    const char *name;
    void (*destroy)(struct kv_policy *policy);
    /* Requests. arrive: blocks are those that are resident now. admit: the same, now busy.
     * finish: all its full blocks that are in the cache; they become idle right after it, unless
     * others use them. leave: it waited and was given up. NULL where a policy does not care. */
    void (*arrive)(struct kv_policy *policy, const struct kv_policy_request *request,
                   int64_t now_ns);
    void (*admit)(struct kv_policy *policy, const struct kv_policy_request *request,
                  int64_t now_ns);
    void (*finish)(struct kv_policy *policy, const struct kv_policy_request *request,
                   int64_t now_ns);
    void (*leave)(struct kv_policy *policy, const struct kv_policy_request *request,
                  int64_t now_ns);
    /* Blocks. insert: a block came into the cache, busy, for this request; -1: from a slower tier,
     * for nobody yet, and becomes idle right after it, or for a request that runs already, which
     * hits it right after it. hit: a busy or idle block of the cache is used by a request that was
     * admitted. idle, busy: it may, may not be a victim; of one request the tails become idle
     * first. evict: it is forgotten. */
    void (*insert)(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                   int64_t now_ns);
    void (*hit)(struct kv_policy *policy, int32_t block_idx, int32_t request_idx, int64_t now_ns);
    void (*idle)(struct kv_policy *policy, int32_t block_idx, int64_t now_ns);
    void (*busy)(struct kv_policy *policy, int32_t block_idx);
    void (*evict)(struct kv_policy *policy, int32_t block_idx);
    /* An idle block; there is one. The cache then forgets it or some of its descendants, and asks
     * again if it needs more. */
    int32_t (*victim)(struct kv_policy *policy, int64_t now_ns);
    /* Keys of evicted blocks that come back are news to a policy unless it keeps ghosts: called for
     * each key of an arriving request that is not resident, nearest the head first, at most one
     * call chain a request. NULL: it keeps none. */
    void (*miss)(struct kv_policy *policy, uint64_t key_hash, int64_t now_ns);
    /* For who can bring blocks up from a slower tier. predict: at most max_predictions, the most
     * valuable first, perhaps one path twice; returns their number. value: of an idle block, what
     * keeping it is worth, in the same unit. Both NULL: the policy expects nothing. */
    int32_t (*predict)(struct kv_policy *policy, struct kv_prediction *predictions,
                       int32_t max_predictions, int64_t now_ns);
    double (*value)(struct kv_policy *policy, int32_t block_idx, int64_t now_ns);
    size_t (*state_bytes)(const struct kv_policy *policy);
    /* What it learned, to go on after a restart; NULL: nothing to keep. The text is versioned;
     * FORMAT if it is not this policy's. */
    enum imbrex_status (*save)(const struct kv_policy *policy, unsigned char **bytes,
                               size_t *num_bytes, struct imbrex_error *err);
    enum imbrex_status (*load)(struct kv_policy *policy, const unsigned char *bytes,
                               size_t num_bytes, struct imbrex_error *err);
};

/* Questions a policy may ask about a block of the cache. */
int32_t kv_cache_parent(const struct kv_cache *cache, int32_t block_idx); /* -1: it is a head */
int32_t kv_cache_depth(const struct kv_cache *cache, int32_t block_idx);  /* 0: a head */
bool kv_cache_is_idle(const struct kv_cache *cache, int32_t block_idx);
int32_t kv_cache_num_children(const struct kv_cache *cache, int32_t block_idx);
uint64_t kv_cache_key_hash(const struct kv_cache *cache, int32_t block_idx);
/* Place in the queue of the nearest waiting request that wants the block: smaller is sooner.
 * INT64_MAX: nobody waits for it. */
int64_t kv_cache_wanted(const struct kv_cache *cache, int32_t block_idx);

/* X(name, predicts): the built-in ones, in the order in which tables show them; whether they have
 * the functions predict and value. */
#define KV_POLICY_LIST(X) \
    X(lru, false)         \
    X(lfu, false)         \
    X(s3fifo, false)      \
    X(arc, false)         \
    X(gdsf, false)        \
    X(seed, true)         \
    X(queue, false)       \
    X(predictive, true)

#define KV_POLICY_DECLARE(name, predicts)                                                 \
    enum imbrex_status kv_policy_##name##_create(const struct kv_policy_options *options, \
                                                 struct kv_policy **policy,               \
                                                 struct imbrex_error *err);
KV_POLICY_LIST(KV_POLICY_DECLARE)
#undef KV_POLICY_DECLARE

struct kv_policy_options kv_policy_options_default(void);
/* By name; NOT_FOUND lists the names there are. */
enum imbrex_status kv_policy_create(const char *name, const struct kv_policy_options *options,
                                    struct kv_policy **policy, struct imbrex_error *err);
/* NULL does nothing. */
void kv_policy_destroy(struct kv_policy *policy);
/* The idx'th name, NULL beyond the last. Static storage. */
const char *kv_policy_name(int32_t policy_idx);
/* " lru lfu ...": all names, for messages. Static storage. */
const char *kv_policy_names(void);
/* Whether there is such a policy; *predicts, which may be NULL: whether it expects blocks before
 * anybody asks for them, so that prefetching can do something. */
bool kv_policy_find(const char *name, bool *predicts);

#endif
