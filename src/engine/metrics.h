/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's counters: written by the thread that runs it (num_submitted and num_rejected by
 * those that submit), read by anyone without a lock. */
#ifndef IMBREX_ENGINE_METRICS_H
#define IMBREX_ENGINE_METRICS_H

#include <stdatomic.h>

#include "base/status.h"

struct metrics_histogram {
    atomic_uint_fast64_t num_values, sum;
    atomic_uint_fast64_t buckets[IMBREX_HISTOGRAM_NUM_BUCKETS];
};

struct metrics {
    atomic_uint_fast64_t num_submitted, num_rejected;
    atomic_uint_fast64_t num_ended[8]; /* by enum imbrex_finish_reason */
    atomic_uint_fast64_t num_prompt_tokens, num_generated_tokens, num_preemptions;
    atomic_uint_fast64_t num_queried_tokens, num_cached_tokens, num_key_collisions;
    atomic_uint_fast64_t num_host_tokens, num_disk_tokens, num_remote_tokens, kv_wait_ns;
    atomic_uint_fast64_t num_kv_layered;
    /* As the tiers count them. */
    atomic_int_fast64_t num_kv_demoted, num_kv_written, num_kv_lost, num_kv_faults;
    atomic_int_fast64_t num_kv_ahead, num_kv_ahead_used, num_kv_ahead_wasted;
    atomic_uint_fast64_t num_steps, num_failed_steps, num_bad_logits;
    atomic_int_fast64_t num_running, num_waiting, kv_num_blocks, kv_num_free;
    atomic_int_fast64_t kv_host_blocks, kv_disk_blocks, kv_remote_up, kv_block_ns, kv_recompute_ns;
    struct metrics_histogram ttft, itl, queue_time, step_time, forward_time, overhead; /* ns */
};

static inline void metrics_add(atomic_uint_fast64_t *counter, uint64_t value)
{
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

static inline void metrics_set(atomic_int_fast64_t *gauge, int64_t value)
{
    atomic_store_explicit(gauge, value, memory_order_relaxed);
}

/* Counts a value; negative ones (a clock that went back) as 0. */
void metrics_observe(struct metrics_histogram *histogram, int64_t value);

void metrics_read(const struct metrics *metrics, struct imbrex_engine_metrics *snapshot);

#endif
