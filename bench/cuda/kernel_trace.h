/* SPDX-License-Identifier: Apache-2.0 */
/* What a traced gate_first kernel left, as a Chrome trace and in figures. Calls no driver. */
#ifndef IMBREX_BENCH_CUDA_KERNEL_TRACE_H
#define IMBREX_BENCH_CUDA_KERNEL_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "ops/cuda/kernels/gate_first_trace.h"

/* Views; the caller's. */
struct kernel_trace {
    const struct gate_first_track *tracks; /* [num_ctas][GATE_FIRST_TRACKS] */
    const struct gate_first_event *events; /* [num_ctas][GATE_FIRST_TRACKS][max_events] */
    int32_t num_ctas;
    uint32_t max_events;
};

/* Times are microseconds after the first warpgroup began. */
struct kernel_trace_figures {
    double stage_us[GATE_FIRST_NUM_STAGES]; /* mean length of a stage; 0: there was none */
    double total_us;                        /* from the first begin to the last end */
    double
        hidden_share; /* of the time in Swish, with the other consumer in a k-loop; 0: no Swish */
    int64_t num_lost; /* events that had no room */
};

struct kernel_trace_figures kernel_trace_figures(const struct kernel_trace *trace);

/* An object with "traceEvents": an SM is a process, a warpgroup a thread, a stage a complete event
 * ("ph": "X"). `kernel` names the whole. A new reference; NULL: out of memory. */
json_t *kernel_trace_json(const struct kernel_trace *trace, const char *kernel);

#endif
