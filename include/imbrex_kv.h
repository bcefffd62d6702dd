/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex: replaying request traces through the engine's own prefix cache. For each trace, capacity
 * and policy: what was found, beside the clairvoyant optimum and the infinite cache.
 *
 * A trace holds no text: arrival times, token counts, block ids. A simple service model gives the
 * times at which requests are admitted and end: a first-come queue, a number of slots, one prefill
 * server of so many uncached tokens a second, a constant time for each output token.
 *
 *   frozen  the timeline is recorded under lru and is the same for every policy, MIN too: order,
 *           pins and queue are equal, so that a policy's share of the way from lru to MIN (its
 *           closure) means something
 *   live    the policy's hits shorten its own queue; there is no MIN then */
#ifndef IMBREX_KV_H
#define IMBREX_KV_H

#include "imbrex.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The idx'th policy that a name may be given for, NULL beyond the last: "lru" first. Static. */
IMBREX_API const char *imbrex_kv_policy_name(int32_t policy_idx);
/* Whether the policy expects blocks before anybody asks for them: with the others, prefetching
 * brings up nothing. False for a name that is none. */
IMBREX_API bool imbrex_kv_policy_predicts(const char *name);

struct imbrex_kv_sim_progress {
    const char *step;           /* "reading", "calibrating", "replaying", "prefetching",
                               * "tiers"; static */
    const char *trace, *policy; /* policy: NULL while there is none */
    double done;                /* of the whole run, 0 to 1 */
};
/* Returns false to end the run: CANCELLED. */
typedef bool imbrex_kv_sim_progress_fn(void *user, const struct imbrex_kv_sim_progress *progress);

#define IMBREX_KV_SIM_MAX_TIERS 4

/* A tier below the cache. What the cache forgets is copied to the first one, and what comes to a
 * tier is copied on to the next; each forgets what was used longest ago. Blocks cross its link one
 * after the other, both ways at once. */
struct imbrex_kv_sim_tier {
    int64_t capacity_tokens; /* at least a block */
    double tokens_per_s;     /* of its link, each way */
    double latency_s; /* from when a block has crossed the link upwards to when it is there */
};

struct imbrex_kv_sim_options {
    /* [num_traces] paths: Mooncake or Bailian jsonl, WEKA jsonl; also compressed (.zst). The format
     * is found by looking. "-": standard input. */
    const char *const *traces;
    size_t num_traces;
    const char *starts; /* file with the start of each session in s, one a line (WEKA); NULL: drawn
                         * uniformly over session_span_s with the seed */
    double session_span_s;       /* 28800 */
    const char *const *policies; /* [num_policies] names, each once; "lru" runs always. NULL: all */
    size_t num_policies;
    const int64_t *capacities; /* [num_capacities] tokens */
    size_t num_capacities;
    /* Tokens, a multiple of those of a trace's ids. 0: what the trace says that the engine had (a
     * block_size in lines of requests, as imbrex bench kv writes them), else 512. */
    int32_t block_size;
    int32_t num_slots;           /* requests that run at once; 64 */
    double prefill_tokens_per_s; /* uncached; 0: found by bisection for target_queue */
    double target_queue;         /* mean number waiting under lru, seen at arrival; 0.3 */
    double decode_s_per_token;   /* 0: 0.02 for chat traces, 0.01 for agents' */
    uint64_t seed;
    double warm; /* share of the requests that are not scored, only learned from; 0.5 */
    bool is_live;
    /* "Will it return" hints, made from the trace's future and wrong with this probability; < 0: no
     * hints. */
    double hint_error;
    /* Rows for `predictive` with one component off each, beside the whole. */
    bool has_ablations;
    /* And two for each number that it was given, with that number changed: "predictive fan_out 2".
     */
    bool has_sensitivity;
    /* Each policy is replayed once more, over a slower tier that keeps what the cache forgets and
     * from which the engine's planner fetches ahead: imbrex_kv_sim_row.prefetch. All other figures
     * are those of the cache alone. */
    bool has_prefetch;
    double fetch_ratio; /* tokens that are fetched in the time that computing one takes; 8 */
    /* [num_tiers] the nearest first. Each policy is replayed once more over the first, over the
     * first two, and so on: imbrex_kv_sim_row.stacks. What waiting requests need is fetched ahead,
     * with has_prefetch also what the policy expects; fetch_ratio does not count then, nor is there
     * an imbrex_kv_sim_row.prefetch. NULL: none. */
    const struct imbrex_kv_sim_tier *tiers;
    size_t num_tiers;
    imbrex_kv_sim_progress_fn *progress;
    void *user;
};

IMBREX_API struct imbrex_kv_sim_options imbrex_kv_sim_options_default(void);

/* Of times in s. */
struct imbrex_kv_sim_spread {
    double mean, p50, p90, p99;
};

/* What a policy's replay over a slower tier gave. Blocks; of scored requests, or planned since the
 * first of them came. */
struct imbrex_kv_sim_prefetch {
    bool was_replayed; /* else nothing below counts */
    /* Planned to be fetched; of these used by a request, forgotten again unused, taken back before
     * they began. The rest was still there or on its way at the end. */
    int64_t num_planned, num_used, num_wasted, num_cancelled;
    /* Of those planned and used: for nobody who waited, because the policy expected it. */
    int64_t num_predicted, num_predicted_used;
    /* Computed again although the slower tier had them: their request had waited, so that it could
     * have been told; or it had not, and only a prediction could have. */
    int64_t num_late, num_unforeseen;
    double precision; /* used / (used + wasted); NaN: neither */
    double recall;    /* used / (used + late + unforeseen); NaN: none of them */
    double hit_rate;  /* of tokens in the cache, the fetched among them */
    struct imbrex_kv_sim_spread ttft;
};

/* What a policy's replay over the first tiers gave. Tokens, in whole blocks; of scored requests, or
 * since the first of them came. */
struct imbrex_kv_sim_stack {
    int64_t num_kept;                          /* found in the cache, where they were computed */
    int64_t num_from[IMBREX_KV_SIM_MAX_TIERS]; /* found that came from each tier */
    int64_t num_computed;                      /* all others, with those in no full block */
    int64_t num_up[IMBREX_KV_SIM_MAX_TIERS];   /* over each tier's link, towards the cache */
    int64_t num_down[IMBREX_KV_SIM_MAX_TIERS]; /* and to the tier */
    int64_t num_lost[IMBREX_KV_SIM_MAX_TIERS]; /* that went before they were copied on */
    double held_s;                             /* requests waited so long for blocks, in sum */
    /* Of what was fetched ahead. hit_rate and ttft: of the whole replay. */
    struct imbrex_kv_sim_prefetch prefetch;
};

/* One policy on one trace at one capacity. Rates in [0, 1], of tokens of scored requests. */
struct imbrex_kv_sim_row {
    const char *trace;  /* file name without folders */
    const char *policy; /* "lru", ..., "predictive -queue" (an ablation), "MIN", "infinite" */
    int64_t capacity_tokens;
    bool is_live;
    double prefill_tokens_per_s;
    double hit_rate;
    double closure;    /* (hit_rate - lru) / (MIN - lru), NaN without MIN or where they are equal */
    double mean_queue; /* waiting requests seen at arrival */
    /* s; of the frozen timeline: what the hits would have given. */
    struct imbrex_kv_sim_spread ttft;
    int64_t num_requests, num_blocks; /* scored requests; accesses of all */
    int64_t num_evicted;
    double accesses_per_s; /* of the replay, on this machine */
    size_t state_bytes;    /* the policy's, at its largest */
    struct imbrex_kv_sim_prefetch prefetch;
    struct imbrex_kv_sim_stack stacks[IMBREX_KV_SIM_MAX_TIERS]; /* [num_tiers of the options] */
};

struct imbrex_kv_sim_trace {
    const char *trace, *format; /* "mooncake", "weka", "bailian" */
    /* num_blocks: full ones of block_size, of all prompts. */
    int64_t num_requests, num_sessions, num_blocks, num_tokens;
    int32_t trace_block_size; /* tokens of one id in the file */
    int32_t block_size;       /* tokens of a block in the replay */
    double span_s;
    int64_t num_bad_lines, first_bad_line; /* lines skipped; the first one's number, 1-based */
    char first_bad_reason[160];
    /* Requests with a time before one above them: put in order of time, but left where they stand
     * in a session (weka). */
    int64_t num_early;
};

/* What a run gave, in the order of the options: by trace, capacity, policy; MIN and infinite last
 * of each capacity. One allocation for all of it: imbrex_free(result). */
struct imbrex_kv_sim_result {
    const struct imbrex_kv_sim_trace *traces; /* [num_traces] */
    size_t num_traces;
    const struct imbrex_kv_sim_row *rows; /* [num_rows] */
    size_t num_rows;
};

/*   INVALID_ARGUMENT  an option or pointer; starts where no trace takes them
 *   CANCELLED    by the progress function, which is also asked while a trace is read
 *   UNSUPPORTED  a trace without block ids (Azure, BurstGPT), by name; .zst without libzstd
 *   FORMAT       no line of a trace can be read; the message has the first line's number and reason
 *   NOT_FOUND    no such file or policy */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_kv_sim_run(
    const struct imbrex_kv_sim_options *options, struct imbrex_kv_sim_result **result,
    struct imbrex_error *err);

#ifdef __cplusplus
}
#endif
#endif
