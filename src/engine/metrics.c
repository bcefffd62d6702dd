/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/metrics.h"

#define FINISH_REASON_LIST(X)     \
    X(NONE, "none")               \
    X(EOS, "eos")                 \
    X(STOP_STRING, "stop_string") \
    X(LENGTH, "length")           \
    X(CONTEXT, "context")         \
    X(CANCELLED, "cancelled")     \
    X(ERROR, "error")             \
    X(DEADLINE, "deadline")

const char *imbrex_finish_reason_name(enum imbrex_finish_reason reason)
{
    switch (reason) {
#define FINISH_REASON_CASE(name, text) \
    case IMBREX_FINISH_REASON_##name:  \
        return text;
        FINISH_REASON_LIST(FINISH_REASON_CASE)
#undef FINISH_REASON_CASE
    }
    return "unknown";
}

/* ---- histograms ------------------------------------------------------------------------------ */

#define FIRST_BOUND_LOG2 10

/* sqrt(2) * 2^62, rounded down: the bounds between the powers of two are its leading bits. */
#define SQRT_2_BITS UINT64_C(0x5a827999fcef3242)

uint64_t imbrex_histogram_bound(int32_t bucket_idx)
{
    if (bucket_idx < 0) {
        return 0;
    }
    if (bucket_idx >= IMBREX_HISTOGRAM_NUM_BUCKETS) {
        return UINT64_MAX;
    }
    int32_t log2 = FIRST_BOUND_LOG2 + bucket_idx / 2;
    return bucket_idx % 2 == 0 ? UINT64_C(1) << log2 : SQRT_2_BITS >> (62 - log2);
}

static int32_t bucket_of(uint64_t value)
{
    if (value <= UINT64_C(1) << FIRST_BOUND_LOG2) {
        return 0;
    }
    /* The bound of bucket_idx is the power of two at or below the value. */
    int32_t log2 = 63 - __builtin_clzll(value);
    int32_t bucket_idx = 2 * (log2 - FIRST_BOUND_LOG2);
    while (bucket_idx < IMBREX_HISTOGRAM_NUM_BUCKETS - 1 &&
           value > imbrex_histogram_bound(bucket_idx)) {
        bucket_idx++;
    }
    return bucket_idx < IMBREX_HISTOGRAM_NUM_BUCKETS ? bucket_idx
                                                     : IMBREX_HISTOGRAM_NUM_BUCKETS - 1;
}

void metrics_observe(struct metrics_histogram *histogram, int64_t value)
{
    uint64_t counted = value < 0 ? 0 : (uint64_t)value;
    metrics_add(&histogram->buckets[bucket_of(counted)], 1);
    metrics_add(&histogram->sum, counted);
    metrics_add(&histogram->num_values, 1);
}

/* ---- snapshot -------------------------------------------------------------------------------- */

static uint64_t read_counter(const atomic_uint_fast64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static int64_t read_gauge(const atomic_int_fast64_t *gauge)
{
    return atomic_load_explicit(gauge, memory_order_relaxed);
}

static void read_histogram(const struct metrics_histogram *histogram,
                           struct imbrex_histogram *snapshot)
{
    snapshot->num_values = read_counter(&histogram->num_values);
    snapshot->sum = read_counter(&histogram->sum);
    for (int32_t i = 0; i < IMBREX_HISTOGRAM_NUM_BUCKETS; i++) {
        snapshot->buckets[i] = read_counter(&histogram->buckets[i]);
    }
}

void metrics_read(const struct metrics *metrics, struct imbrex_engine_metrics *snapshot)
{
    *snapshot = (struct imbrex_engine_metrics){
        .num_submitted = read_counter(&metrics->num_submitted),
        .num_rejected = read_counter(&metrics->num_rejected),
        .num_prompt_tokens = read_counter(&metrics->num_prompt_tokens),
        .num_generated_tokens = read_counter(&metrics->num_generated_tokens),
        .num_preemptions = read_counter(&metrics->num_preemptions),
        .num_queried_tokens = read_counter(&metrics->num_queried_tokens),
        .num_cached_tokens = read_counter(&metrics->num_cached_tokens),
        .num_host_tokens = read_counter(&metrics->num_host_tokens),
        .num_disk_tokens = read_counter(&metrics->num_disk_tokens),
        .num_remote_tokens = read_counter(&metrics->num_remote_tokens),
        .num_kv_demoted = (uint64_t)read_gauge(&metrics->num_kv_demoted),
        .num_kv_written = (uint64_t)read_gauge(&metrics->num_kv_written),
        .num_kv_lost = (uint64_t)read_gauge(&metrics->num_kv_lost),
        .num_kv_faults = (uint64_t)read_gauge(&metrics->num_kv_faults),
        .num_kv_ahead = (uint64_t)read_gauge(&metrics->num_kv_ahead),
        .num_kv_ahead_used = (uint64_t)read_gauge(&metrics->num_kv_ahead_used),
        .num_kv_ahead_wasted = (uint64_t)read_gauge(&metrics->num_kv_ahead_wasted),
        .num_kv_layered = read_counter(&metrics->num_kv_layered),
        .kv_wait_ns = read_counter(&metrics->kv_wait_ns),
        .num_key_collisions = read_counter(&metrics->num_key_collisions),
        .num_steps = read_counter(&metrics->num_steps),
        .num_failed_steps = read_counter(&metrics->num_failed_steps),
        .num_bad_logits = read_counter(&metrics->num_bad_logits),
        .num_running = read_gauge(&metrics->num_running),
        .num_waiting = read_gauge(&metrics->num_waiting),
        .kv_num_blocks = read_gauge(&metrics->kv_num_blocks),
        .kv_num_free = read_gauge(&metrics->kv_num_free),
        .kv_host_blocks = read_gauge(&metrics->kv_host_blocks),
        .kv_disk_blocks = read_gauge(&metrics->kv_disk_blocks),
        .kv_block_ns = read_gauge(&metrics->kv_block_ns),
        .kv_recompute_ns = read_gauge(&metrics->kv_recompute_ns),
        .kv_remote_up = read_gauge(&metrics->kv_remote_up),
    };
    for (size_t i = 0; i < sizeof(snapshot->num_ended) / sizeof(snapshot->num_ended[0]); i++) {
        snapshot->num_ended[i] = read_counter(&metrics->num_ended[i]);
    }
    read_histogram(&metrics->ttft, &snapshot->ttft);
    read_histogram(&metrics->itl, &snapshot->itl);
    read_histogram(&metrics->queue_time, &snapshot->queue_time);
    read_histogram(&metrics->step_time, &snapshot->step_time);
    read_histogram(&metrics->forward_time, &snapshot->forward_time);
    read_histogram(&metrics->overhead, &snapshot->overhead);
}
