/* SPDX-License-Identifier: Apache-2.0 */
/* Sends a load to an engine and measures what comes back. The calling thread sends, the engine's
 * own thread computes and takes the times of the tokens. */
#ifndef IMBREX_CLI_LOAD_RUN_H
#define IMBREX_CLI_LOAD_RUN_H

#include "cli/load_plan.h"
#include "cli/load_statistics.h"
#include "imbrex.h"

struct load_settings {
    const struct imbrex_model *model;
    struct imbrex_engine *engine;
    int32_t vocab_size; /* of the ids in prompts */
    int32_t num_choices;
    float temperature;
    int64_t slo_ttft_ns, slo_itl_ns; /* 0: no limit */
    bool has_text;                   /* events carry text, as for most users */
    bool has_progress;               /* a line on standard error */
};

/* The requests of one priority. */
struct load_class {
    int32_t priority;
    size_t num_completed;
    struct load_summary ttft, queue; /* ns */
};

struct load_result {
    /* Together they are what was planned. */
    size_t num_completed, num_failed;
    size_t num_cancelled; /* by a signal: sent and not at their end, or never sent */
    size_t num_good;      /* completed within the limits */
    /* Of all requests, as the steps are, whether completed or not; the prompts of those that had a
     * token. */
    int64_t num_prompt_tokens, num_output_tokens;
    int64_t num_unfinished_prompt_tokens,
        num_unfinished_output_tokens; /* of those, not completed */
    int64_t num_preemptions;
    /* First request sent to last one ended, or to the signal that ended the load. */
    int64_t duration_ns;
    double mean_running; /* requests between their first step and their end, over the duration */
    char first_failure[IMBREX_ERROR_MESSAGE_BYTES]; /* "" if none failed */
    /* ttft: arrival to first token. itl: gaps between the tokens of a choice. tpot: mean gap of a
     * choice. queue: sent to first step. total: arrival to end. Of completed requests. In an open
     * loop a request arrives when it is due, even if it is sent late. */
    struct load_summary ttft, itl, tpot, queue, total;
    struct load_class classes[LOAD_MAX_PRIORITIES]; /* [num_classes], the highest priority first */
    int32_t num_classes;
    /* What the engine's counters grew by: step, forward and overhead are sums of num_steps. */
    uint64_t num_steps, num_failed_steps;
    uint64_t step_ns, forward_ns, overhead_ns;
    /* Prompt tokens that the prefix cache was asked for, and those it had. */
    uint64_t num_queried_tokens, num_cached_tokens, num_host_tokens, num_disk_tokens,
        num_remote_tokens;
    uint64_t num_kv_demoted, num_kv_written, num_kv_lost, num_kv_faults, kv_wait_ns;
    uint64_t num_kv_layered;
    uint64_t num_kv_ahead, num_kv_ahead_used, num_kv_ahead_wasted;
    int64_t kv_block_ns, kv_recompute_ns; /* as the engine had them at the end */
};

/* Runs the whole plan, or until a noted signal (see signals_note_interrupts). Starts the engine's
 * thread and stops it at the end. Failures that end the run are reported; requests that fail are
 * counted. Returns an exit code; the result is written if it is EXIT_CODE_OK. */
int load_run(const struct load_settings *settings, const struct load_plan *plan,
             struct load_result *result);

#endif
