/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex_kv_sim_run: for each trace and capacity the rate of the prefill server, a timeline under
 * lru, and on it (or live) one row for each policy, MIN and the infinite cache. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "imbrex_kv.h"
#include "sim/sim_cache.h"
#include "sim/sim_options.h"
#include "sim/sim_service.h"

#define MAX_ABLATIONS 6
#define FIRST_RATE 100000.0 /* tokens/s, where the search begins */
#define MAX_RATE_DOUBLINGS 40
#define MAX_RATE_BISECTIONS 24
#define QUEUE_TOLERANCE 0.01 /* of the target */
#define DECODE_CHAT_S 0.02
#define DECODE_AGENTS_S 0.01

enum {
#define X(name, value, low, high) +2
    NUM_KNOB_ROWS = 0 KV_PREDICTIVE_KNOB_LIST(X)
#undef X
};

/* What one row of the table runs. */
struct row_plan {
    const char *name, *policy; /* policy NULL: not one of the engine's */
    struct kv_policy_options policy_options;
};

struct sim_run {
    const struct imbrex_kv_sim_options *options;
    struct row_plan *plans; /* [num_plans] policies and ablations */
    size_t num_plans;
    size_t rows_a_capacity; /* with MIN and infinite */
    double *starts;
    size_t num_starts;
    bool used_starts; /* a trace has taken them */
    struct imbrex_kv_sim_result *result;
    struct imbrex_kv_sim_trace *traces;
    struct imbrex_kv_sim_row *rows;
    char *names; /* room for the names of traces */
    size_t num_rows;

    /* Progress: steps done of all; a capacity is as many steps as it has rows, and its search. */
    struct imbrex_kv_sim_progress progress;
    double num_done, num_steps;

    /* Of the trace at hand. */
    struct sim_trace trace;
    struct sim_hints hints;
    double decode_s_per_token;
};

const char *imbrex_kv_policy_name(int32_t policy_idx)
{
    return kv_policy_name(policy_idx);
}

bool imbrex_kv_policy_predicts(const char *name)
{
    bool predicts = false;
    return kv_policy_find(name, &predicts) && predicts;
}

struct imbrex_kv_sim_options imbrex_kv_sim_options_default(void)
{
    return (struct imbrex_kv_sim_options){
        .session_span_s = 28800,
        .num_slots = 64,
        .target_queue = 0.3,
        .warm = 0.5,
        .hint_error = -1,
        .fetch_ratio = 8,
    };
}

/* ---- progress ------------------------------------------------------------------------------- */

static bool report(struct sim_run *run, const char *step, const char *policy, double done)
{
    if (run->options->progress == NULL) {
        return true;
    }
    run->progress.step = step;
    run->progress.policy = policy;
    run->progress.done = (run->num_done + done) / run->num_steps;
    return run->options->progress(run->options->user, &run->progress);
}

static enum imbrex_status report_step(struct sim_run *run, const char *step, const char *policy,
                                      struct imbrex_error *err)
{
    return report(run, step, policy, 0)
               ? IMBREX_STATUS_OK
               : error_set(err, IMBREX_STATUS_CANCELLED, "the replay was ended");
}

static bool go_on(void *user, double done)
{
    struct sim_run *run = user;
    return report(run, run->progress.step, run->progress.policy, done);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static enum imbrex_status find_policy(const char *name, const char **found,
                                      struct imbrex_error *err)
{
    for (int32_t i = 0; kv_policy_name(i) != NULL; i++) {
        if (strcmp(kv_policy_name(i), name) == 0) {
            *found = kv_policy_name(i);
            return IMBREX_STATUS_OK;
        }
    }
    struct kv_policy_options policy_options = kv_policy_options_default();
    struct kv_policy *policy = NULL;
    TRY(kv_policy_create(name, &policy_options, &policy, err)); /* says which names there are */
    kv_policy_destroy(policy);
    return error_set(err, IMBREX_STATUS_INTERNAL, "policy '%s' has no name", name);
}

static void add_plan(struct sim_run *run, const char *name, const char *policy)
{
    run->plans[run->num_plans++] = (struct row_plan){
        .name = name, .policy = policy, .policy_options = kv_policy_options_default()};
}

static void add_ablations(struct sim_run *run)
{
    add_plan(run, "predictive -queue", "predictive");
    run->plans[run->num_plans - 1].policy_options.use_queue = false;
    add_plan(run, "predictive -table", "predictive");
    run->plans[run->num_plans - 1].policy_options.use_table = false;
    add_plan(run, "predictive -guard", "predictive");
    run->plans[run->num_plans - 1].policy_options.use_guard = false;
    add_plan(run, "predictive -lookahead", "predictive");
    run->plans[run->num_plans - 1].policy_options.use_lookahead = false;
    add_plan(run, "predictive -ghosts", "predictive");
    run->plans[run->num_plans - 1].policy_options.use_ghosts = false;
    if (run->options->hint_error >= 0) {
        add_plan(run, "predictive -hints", "predictive");
        run->plans[run->num_plans - 1].policy_options.use_hints = false;
    }
}

static void add_knobs(struct sim_run *run)
{
#define X(name, value, low, high)                                   \
    add_plan(run, "predictive " #name " " #low, "predictive");      \
    run->plans[run->num_plans - 1].policy_options.knobs.name = low; \
    add_plan(run, "predictive " #name " " #high, "predictive");     \
    run->plans[run->num_plans - 1].policy_options.knobs.name = high;
    KV_PREDICTIVE_KNOB_LIST(X)
#undef X
}

/* lru first: all others are compared with it. */
static enum imbrex_status plan_rows(struct sim_run *run, struct imbrex_error *err)
{
    const struct imbrex_kv_sim_options *options = run->options;
    size_t num_names = options->num_policies, num_bytes = 0;

    if (options->policies == NULL) {
        for (num_names = 0; kv_policy_name((int32_t)num_names) != NULL; num_names++) {
        }
    }
    if (!size_add(num_names, 1 + MAX_ABLATIONS + NUM_KNOB_ROWS, &num_bytes) ||
        !size_mul(num_bytes, sizeof(*run->plans), &num_bytes) ||
        (run->plans = malloc(num_bytes)) == NULL) {
        return error_out_of_memory(err, "rows", num_bytes);
    }
    add_plan(run, "lru", "lru");
    for (size_t i = 0; i < num_names; i++) {
        const char *name = kv_policy_name((int32_t)i);
        if (options->policies != NULL) {
            TRY(find_policy(options->policies[i], &name, err));
        }
        if (strcmp(name, "lru") == 0) {
            continue;
        }
        add_plan(run, name, name);
        if (options->has_ablations && strcmp(name, "predictive") == 0) {
            add_ablations(run);
        }
        if (options->has_sensitivity && strcmp(name, "predictive") == 0) {
            add_knobs(run);
        }
    }
    run->rows_a_capacity = run->num_plans + (options->is_live ? 1 : 2);
    return IMBREX_STATUS_OK;
}

/* ---- the result ----------------------------------------------------------------------------- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

static bool add_product(size_t *sum, size_t count, size_t element_bytes)
{
    size_t product = 0;
    return size_mul(count, element_bytes, &product) && size_add(*sum, product, sum);
}

/* Replays of a policy beside that of the cache alone. */
static size_t num_below(const struct imbrex_kv_sim_options *options)
{
    return options->num_tiers > 0 ? options->num_tiers : options->has_prefetch;
}

/* result, traces, rows, names: one after the other in one allocation. */
static enum imbrex_status make_result(struct sim_run *run, struct imbrex_error *err)
{
    const struct imbrex_kv_sim_options *options = run->options;
    size_t num_bytes = sizeof(*run->result), names_bytes = 0, max_rows = 0;

    for (size_t i = 0; i < options->num_traces; i++) {
        names_bytes += strlen(base_name(options->traces[i])) + 1;
    }
    if (!size_mul(options->num_traces, options->num_capacities, &max_rows) ||
        !size_mul(max_rows, run->rows_a_capacity, &max_rows) ||
        !add_product(&num_bytes, options->num_traces, sizeof(*run->traces)) ||
        !add_product(&num_bytes, max_rows, sizeof(*run->rows)) ||
        !size_add(num_bytes, names_bytes, &num_bytes) ||
        (run->result = calloc(1, num_bytes)) == NULL) {
        return error_out_of_memory(err, "the result", num_bytes);
    }
    run->traces = (struct imbrex_kv_sim_trace *)(run->result + 1);
    run->rows = (struct imbrex_kv_sim_row *)(run->traces + options->num_traces);
    run->names = (char *)(run->rows + max_rows);
    *run->result = (struct imbrex_kv_sim_result){.traces = run->traces,
                                                 .num_traces = options->num_traces,
                                                 .rows = run->rows,
                                                 .num_rows = max_rows};
    for (size_t i = 0; i < options->num_traces; i++) {
        const char *name = base_name(options->traces[i]);
        run->traces[i].trace = run->names;
        memcpy(run->names, name, strlen(name) + 1);
        run->names += strlen(name) + 1;
    }
    double replays_a_capacity =
        (double)(run->rows_a_capacity + num_below(options) * run->num_plans);
    run->num_steps = (double)options->num_traces *
                     (1 + (double)options->num_capacities * (replays_a_capacity + 1));
    return IMBREX_STATUS_OK;
}

static int compare_floats(const void *left, const void *right)
{
    float a = *(const float *)left, b = *(const float *)right;
    return a < b ? -1 : a > b;
}

/* Sorts the values; there is at least one. */
static struct imbrex_kv_sim_spread spread_of(float *values, int64_t num_values)
{
    double sum = 0;

    qsort(values, (size_t)num_values, sizeof(*values), compare_floats);
    for (int64_t i = 0; i < num_values; i++) {
        sum += (double)values[i];
    }
    return (struct imbrex_kv_sim_spread){
        .mean = sum / (double)num_values,
        .p50 = (double)values[num_values / 2],
        .p90 = (double)values[num_values * 9 / 10],
        .p99 = (double)values[num_values * 99 / 100],
    };
}

/* ---- runs ----------------------------------------------------------------------------------- */

static int32_t capacity_blocks(const struct sim_run *run, int64_t capacity_tokens)
{
    int64_t num_blocks = capacity_tokens / run->trace.block_size;
    return num_blocks < INT32_MAX - 1 ? (int32_t)num_blocks : INT32_MAX - 1;
}

static struct sim_service service_at(const struct sim_run *run, double rate)
{
    return (struct sim_service){.num_slots = run->options->num_slots,
                                .prefill_tokens_per_s = rate,
                                .decode_s_per_token = run->decode_s_per_token,
                                .warm = run->options->warm};
}

/* *mean_queue under lru at a rate. */
static enum imbrex_status try_rate(struct sim_run *run, int32_t capacity, double rate,
                                   double *mean_queue, struct imbrex_error *err)
{
    struct sim_service service = service_at(run, rate);
    struct sim_store *lru = NULL;
    struct sim_outcome outcome = {.num_scored = 0};
    enum imbrex_status status;

    TRY(report_step(run, "calibrating", NULL, err));
    TRY(sim_lru_create(&run->trace, capacity, &lru, err));
    status = sim_service_run(&service, lru, NULL, NULL, NULL, &outcome, err);
    *mean_queue = outcome.mean_queue;
    sim_outcome_free(&outcome);
    sim_store_destroy(lru);
    return status;
}

/* The rate at which as many wait as are asked for. The queue falls with the rate but for noise;
 * where it jumps over the target (agents under load have two states) the nearer side is taken. */
static enum imbrex_status find_rate(struct sim_run *run, int32_t capacity, double *rate,
                                    struct imbrex_error *err)
{
    double target = run->options->target_queue;
    double low = 0, high = 0, tried = FIRST_RATE, best = FIRST_RATE, best_miss = INFINITY;

    for (int32_t i = 0; i < MAX_RATE_DOUBLINGS + MAX_RATE_BISECTIONS; i++) {
        double mean_queue = 0;
        TRY(try_rate(run, capacity, tried, &mean_queue, err));
        double miss = fabs(log((mean_queue + 1e-9) / target));
        if (miss < best_miss) {
            best = tried;
            best_miss = miss;
        }
        if (miss < QUEUE_TOLERANCE) {
            break;
        }
        if (mean_queue > target) {
            low = tried;
        } else {
            high = tried;
        }
        if (low > 0 && high > 0) {
            if (high / low < 1.0001) {
                break;
            }
            tried = sqrt(low * high);
        } else {
            tried = low > 0 ? low * 2 : high / 2;
        }
    }
    *rate = best;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_store(struct sim_run *run, const struct row_plan *plan,
                                       int32_t capacity, const struct sim_timeline *timeline,
                                       const struct sim_tier_options *tier,
                                       struct sim_store **store, struct imbrex_error *err)
{
    struct sim_cache_options options = {
        .policy = plan->policy,
        .policy_options = plan->policy_options,
        .capacity = capacity,
        .max_requests = run->options->is_live ? run->trace.num_requests : timeline->max_live,
        .hints = run->options->hint_error >= 0 ? &run->hints : NULL,
        .is_live = run->options->is_live,
        .tier = tier,
    };

    if (plan->policy != NULL) {
        return sim_cache_create(&run->trace, &options, store, err);
    }
    if (strcmp(plan->name, "MIN") == 0) {
        return sim_min_create(&run->trace, capacity, timeline, store, err);
    }
    return sim_lru_create(&run->trace, INT32_MAX, store, err);
}

static enum imbrex_status run_store(struct sim_run *run, struct sim_store *store,
                                    const struct sim_service *service,
                                    const struct sim_timeline *timeline,
                                    struct sim_outcome *outcome, struct imbrex_error *err)
{
    return run->options->is_live
               ? sim_service_run(service, store, go_on, run, NULL, outcome, err)
               : sim_timeline_replay(timeline, service, store, go_on, run, outcome, err);
}

static double hit_rate_of(const struct sim_outcome *outcome)
{
    return outcome->num_tokens > 0 ? (double)outcome->num_hit_tokens / (double)outcome->num_tokens
                                   : 0;
}

static double share_of(int64_t part, int64_t rest)
{
    return part + rest > 0 ? (double)part / (double)(part + rest) : (double)NAN;
}

/* At least 1, far from overflow. */
static int64_t block_ns_at(const struct sim_run *run, double tokens_per_s)
{
    double block_s = run->trace.block_size / tokens_per_s;
    return block_s < 1e8 ? (int64_t)(block_s * 1e9) + 1 : INT64_C(100000000000000000);
}

/* The policy again, over slower tiers. */
static enum imbrex_status run_over_tiers(struct sim_run *run, const struct row_plan *plan,
                                         int64_t capacity_tokens, const struct sim_service *service,
                                         const struct sim_timeline *timeline,
                                         const struct sim_tier_options *tier,
                                         struct sim_tier_metrics *metrics, int64_t *num_computed,
                                         struct imbrex_kv_sim_prefetch *prefetch,
                                         struct imbrex_error *err)
{
    struct sim_outcome outcome = {.num_scored = 0};
    struct sim_store *store = NULL;
    enum imbrex_status status;

    TRY(report_step(run, tier->waits ? "tiers" : "prefetching", plan->name, err));
    TRY_OR_FAIL(create_store(run, plan, capacity_blocks(run, capacity_tokens), timeline, tier,
                             &store, err));
    TRY_OR_FAIL(run_store(run, store, service, timeline, &outcome, err));
    (void)sim_cache_read_tier(store, metrics);
    *prefetch = (struct imbrex_kv_sim_prefetch){
        .was_replayed = true,
        .num_planned = metrics->num_planned,
        .num_used = metrics->num_used,
        .num_wasted = metrics->num_wasted,
        .num_cancelled = metrics->num_cancelled,
        .num_predicted = metrics->num_predicted,
        .num_predicted_used = metrics->num_predicted_used,
        .num_late = metrics->num_late,
        .num_unforeseen = metrics->num_unforeseen,
        .precision = share_of(metrics->num_used, metrics->num_wasted),
        .recall = share_of(metrics->num_used, metrics->num_late + metrics->num_unforeseen),
        .hit_rate = hit_rate_of(&outcome),
        .ttft = spread_of(outcome.ttft_s, outcome.num_scored),
    };
    *num_computed = outcome.num_tokens - outcome.num_hit_tokens;
    run->num_done += 1;
fail:
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
    return status;
}

/* One tier that never fills, from which only planned moves bring anything. */
static enum imbrex_status run_prefetch(struct sim_run *run, const struct row_plan *plan,
                                       int64_t capacity_tokens, const struct sim_service *service,
                                       const struct sim_timeline *timeline,
                                       struct imbrex_kv_sim_prefetch *prefetch,
                                       struct imbrex_error *err)
{
    double tokens_per_s = run->options->fetch_ratio * service->prefill_tokens_per_s;
    struct sim_tier_options tier = {
        .levels = {{.capacity = INT32_MAX, .up_block_ns = block_ns_at(run, tokens_per_s)}},
        .num_levels = 1,
        .predicts = true,
        .first_scored = sim_service_first_scored(service, run->trace.num_requests),
    };
    struct sim_tier_metrics metrics = {.num_planned = 0};
    int64_t num_computed = 0;

    return run_over_tiers(run, plan, capacity_tokens, service, timeline, &tier, &metrics,
                          &num_computed, prefetch, err);
}

/* The first num_levels of the tiers that were asked for. */
static enum imbrex_status run_stack(struct sim_run *run, const struct row_plan *plan,
                                    int64_t capacity_tokens, const struct sim_service *service,
                                    const struct sim_timeline *timeline, int32_t num_levels,
                                    struct imbrex_kv_sim_stack *stack, struct imbrex_error *err)
{
    int64_t block_size = run->trace.block_size;
    struct sim_tier_options tier = {
        .num_levels = num_levels,
        .predicts = run->options->has_prefetch,
        .waits = true,
        .compute_block_ns = block_ns_at(run, service->prefill_tokens_per_s),
        .first_scored = sim_service_first_scored(service, run->trace.num_requests),
    };
    struct sim_tier_metrics metrics = {.num_planned = 0};

    for (int32_t i = 0; i < num_levels; i++) {
        const struct imbrex_kv_sim_tier *asked = &run->options->tiers[i];
        int32_t capacity = capacity_blocks(run, asked->capacity_tokens);
        int64_t block_ns = block_ns_at(run, asked->tokens_per_s);
        tier.levels[i] =
            (struct sim_level_options){.capacity = capacity > 0 ? capacity : 1,
                                       .up_block_ns = block_ns,
                                       .down_block_ns = block_ns,
                                       .latency_ns = (int64_t)(asked->latency_s * 1e9)};
    }
    TRY(run_over_tiers(run, plan, capacity_tokens, service, timeline, &tier, &metrics,
                       &stack->num_computed, &stack->prefetch, err));
    stack->num_kept = metrics.num_kept * block_size;
    stack->held_s = (double)metrics.held_ns / 1e9;
    for (int32_t i = 0; i < num_levels; i++) {
        stack->num_from[i] = metrics.num_from[i] * block_size;
        stack->num_up[i] = metrics.levels[i].num_up * block_size;
        stack->num_down[i] = metrics.levels[i].num_down * block_size;
        stack->num_lost[i] = metrics.levels[i].num_lost * block_size;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_stacks(struct sim_run *run, const struct row_plan *plan,
                                     int64_t capacity_tokens, const struct sim_service *service,
                                     const struct sim_timeline *timeline,
                                     struct imbrex_kv_sim_row *row, struct imbrex_error *err)
{
    for (size_t i = 0; i < run->options->num_tiers; i++) {
        TRY(run_stack(run, plan, capacity_tokens, service, timeline, (int32_t)i + 1,
                      &row->stacks[i], err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_row(struct sim_run *run, const struct row_plan *plan,
                                  int64_t capacity_tokens, const struct sim_service *service,
                                  const struct sim_timeline *timeline, const char *trace_name,
                                  struct imbrex_error *err)
{
    struct sim_store *store = NULL;
    struct sim_outcome outcome = {.num_scored = 0};
    enum imbrex_status status;

    TRY(report_step(run, "replaying", plan->name, err));
    TRY_OR_FAIL(create_store(run, plan, capacity_blocks(run, capacity_tokens), timeline, NULL,
                             &store, err));
    int64_t begin_ns = clock_now_ns();
    TRY_OR_FAIL(run_store(run, store, service, timeline, &outcome, err));
    double seconds = (double)(clock_now_ns() - begin_ns) / 1e9;
    run->rows[run->num_rows++] = (struct imbrex_kv_sim_row){
        .trace = trace_name,
        .policy = plan->name,
        .capacity_tokens = capacity_tokens,
        .is_live = run->options->is_live,
        .prefill_tokens_per_s = service->prefill_tokens_per_s,
        .hit_rate = hit_rate_of(&outcome),
        .closure = NAN,
        .mean_queue = outcome.mean_queue,
        .ttft = spread_of(outcome.ttft_s, outcome.num_scored),
        .num_requests = outcome.num_scored,
        .num_blocks = outcome.num_accesses,
        .num_evicted = store->num_evicted,
        .accesses_per_s = seconds > 0 ? (double)outcome.num_accesses / seconds : 0,
        .state_bytes = plan->policy != NULL ? sim_cache_state_bytes(store) : 0,
        .prefetch = {.precision = NAN, .recall = NAN},
    };
    run->num_done += 1;
    if (num_below(run->options) > 0 && plan->policy != NULL) {
        struct imbrex_kv_sim_row *row = &run->rows[run->num_rows - 1];
        sim_store_destroy(store);
        store = NULL;
        TRY_OR_FAIL(
            run->options->num_tiers > 0
                ? run_stacks(run, plan, capacity_tokens, service, timeline, row, err)
                : run_prefetch(run, plan, capacity_tokens, service, timeline, &row->prefetch, err));
    }
fail:
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
    return status;
}

/* Once MIN of the capacity is known: the last rows but one, of rows_a_capacity. */
static void fill_closures(struct sim_run *run)
{
    struct imbrex_kv_sim_row *rows = run->rows + run->num_rows - run->rows_a_capacity;
    double lru = rows[0].hit_rate, min = rows[run->num_plans].hit_rate;

    for (size_t i = 0; i < run->rows_a_capacity && min != lru; i++) {
        rows[i].closure = (rows[i].hit_rate - lru) / (min - lru);
    }
}

static enum imbrex_status run_capacity(struct sim_run *run, int64_t capacity_tokens,
                                       const char *trace_name, struct imbrex_error *err)
{
    static const struct row_plan min_plan = {.name = "MIN"}, infinite_plan = {.name = "infinite"};
    int32_t capacity = capacity_blocks(run, capacity_tokens);
    double rate = run->options->prefill_tokens_per_s;
    struct sim_timeline timeline = {.events = NULL};
    struct sim_outcome outcome = {.num_scored = 0};
    struct sim_store *lru = NULL;
    enum imbrex_status status;

    TRY(report_step(run, "calibrating", NULL, err));
    if (rate == 0) {
        TRY(find_rate(run, capacity, &rate, err));
    }
    struct sim_service service = service_at(run, rate);
    if (!run->options->is_live) {
        TRY_OR_FAIL(sim_lru_create(&run->trace, capacity, &lru, err));
        TRY_OR_FAIL(sim_service_run(&service, lru, go_on, run, &timeline, &outcome, err));
    }
    run->num_done += 1;
    for (size_t i = 0; i < run->num_plans; i++) {
        TRY_OR_FAIL(
            run_row(run, &run->plans[i], capacity_tokens, &service, &timeline, trace_name, err));
    }
    if (!run->options->is_live) {
        TRY_OR_FAIL(run_row(run, &min_plan, capacity_tokens, &service, &timeline, trace_name, err));
    }
    TRY_OR_FAIL(
        run_row(run, &infinite_plan, capacity_tokens, &service, &timeline, trace_name, err));
    if (!run->options->is_live) {
        fill_closures(run);
    }
fail:
    sim_store_destroy(lru);
    sim_outcome_free(&outcome);
    sim_timeline_free(&timeline);
    return status;
}

static enum imbrex_status read_trace(struct sim_run *run, const char *path,
                                     struct imbrex_error *err)
{
    struct sim_trace_options options = {.block_size = run->options->block_size,
                                        .starts = run->starts,
                                        .num_starts = run->num_starts,
                                        .session_span_s = run->options->session_span_s,
                                        .seed = run->options->seed};
    struct sim_input *input = NULL;
    enum imbrex_status status;

    TRY(sim_input_open(path, &input, err));
    if (run->options->progress != NULL) {
        sim_input_watch(input, go_on, run);
    }
    status = sim_trace_read(input, &options, &run->trace, err);
    sim_input_close(input);
    return status;
}

/* From the first to the last arrival that the trace itself fixes: in a closed loop the sessions'.
 */
static double span_of(const struct sim_trace *trace)
{
    int64_t first_ns = INT64_MAX, last_ns = 0;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        if (trace->requests[i].predecessor < 0) {
            int64_t start_ns = trace->requests[i].start_ns;
            first_ns = start_ns < first_ns ? start_ns : first_ns;
            last_ns = start_ns > last_ns ? start_ns : last_ns;
        }
    }
    return (double)(last_ns - first_ns) / 1e9;
}

static void describe_trace(const struct sim_trace *trace, struct imbrex_kv_sim_trace *described)
{
    described->format = sim_format_name(trace->format);
    described->num_requests = trace->num_requests;
    described->num_sessions = trace->num_sessions;
    described->num_blocks = trace->num_accesses;
    described->num_tokens = trace->num_tokens;
    described->trace_block_size = trace->trace_block_size;
    described->block_size = trace->block_size;
    described->num_early = trace->num_early;
    described->span_s = span_of(trace);
    described->num_bad_lines = trace->num_bad_lines;
    described->first_bad_line = trace->first_bad_line;
    memcpy(described->first_bad_reason, trace->first_bad_reason,
           sizeof(described->first_bad_reason));
}

static enum imbrex_status run_trace(struct sim_run *run, size_t trace_idx, struct imbrex_error *err)
{
    const struct imbrex_kv_sim_options *options = run->options;
    struct imbrex_kv_sim_trace *described = &run->traces[trace_idx];

    run->progress.trace = described->trace;
    TRY(report_step(run, "reading", NULL, err));
    TRY(read_trace(run, options->traces[trace_idx], err));
    describe_trace(&run->trace, described);
    TRY(sim_options_check_block(options, run->trace.block_size, err));
    run->used_starts = run->used_starts || run->trace.is_closed_loop;
    if (options->starts != NULL && !run->used_starts && trace_idx == options->num_traces - 1) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "starts: expected a trace whose sessions' starts are not in it (weka), "
                         "found %s (%s), which has the time of each request",
                         described->trace, described->format);
    }
    run->num_done += 1;
    run->decode_s_per_token = options->decode_s_per_token;
    if (run->decode_s_per_token == 0) {
        run->decode_s_per_token = run->trace.is_closed_loop ? DECODE_AGENTS_S : DECODE_CHAT_S;
    }
    if (options->hint_error >= 0) {
        TRY(sim_hints_create(&run->trace, options->hint_error, options->seed, &run->hints, err));
    }
    for (size_t i = 0; i < options->num_capacities; i++) {
        TRY(run_capacity(run, options->capacities[i], described->trace, err));
    }
    sim_hints_destroy(&run->hints);
    sim_trace_free(&run->trace);
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_kv_sim_run(const struct imbrex_kv_sim_options *options,
                                     struct imbrex_kv_sim_result **result, struct imbrex_error *err)
{
    struct sim_run run = {.options = options};
    enum imbrex_status status;

    if (result == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "result: expected a place for it, found NULL");
    }
    TRY(sim_options_check(options, err));
    TRY_OR_FAIL(plan_rows(&run, err));
    TRY_OR_FAIL(make_result(&run, err));
    if (options->starts != NULL) {
        TRY_OR_FAIL(sim_starts_read(options->starts, &run.starts, &run.num_starts, err));
    }
    for (size_t i = 0; i < options->num_traces; i++) {
        TRY_OR_FAIL(run_trace(&run, i, err));
    }
    free(run.starts);
    free(run.plans);
    *result = run.result;
    return IMBREX_STATUS_OK;
fail:
    sim_hints_destroy(&run.hints);
    sim_trace_free(&run.trace);
    free(run.starts);
    free(run.plans);
    free(run.result);
    return status;
}
