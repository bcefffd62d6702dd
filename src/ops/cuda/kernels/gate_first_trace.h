/* SPDX-License-Identifier: Apache-2.0 */
/* What a traced gate_first kernel is told, and what it leaves: which warpgroup did what when.
 * Compiled by gcc and by nvcc. No kernel of the library is traced; those of bench/cuda are. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GATE_FIRST_TRACE_H
#define IMBREX_OPS_CUDA_KERNELS_GATE_FIRST_TRACE_H

#include "ops/cuda/kernels/gemm_swiglu_params.h"

/* X(stage, text), in the order that a consumer goes through them; then those of the producer. */
#define GATE_FIRST_STAGES(X)           \
    X(wait_for_gate, "wait for turn")  \
    X(gate, "gate k-loop")             \
    X(swish, "swish")                  \
    X(wait_for_up, "wait for turn")    \
    X(up, "up k-loop")                 \
    X(epilogue, "multiply and store")  \
    X(load_gate, "ask for gate and A") \
    X(load_up, "ask for up and A")

enum gate_first_stage {
#define GATE_FIRST_STAGE(stage, text) GATE_FIRST_STAGE_##stage,
    GATE_FIRST_STAGES(GATE_FIRST_STAGE)
#undef GATE_FIRST_STAGE
        GATE_FIRST_NUM_STAGES
};

#define GATE_FIRST_TRACKS 3 /* of a CTA: two consumer warpgroups, the producer */

/* A stage begins; it ends where the next one of the track does. */
struct gate_first_event {
    uint64_t clock; /* of the SM */
    uint32_t stage;
    uint32_t block; /* of the cluster's walk */
};

/* A warpgroup from its first to its last stage. Two points in time by the SM's clock and by the
 * device's, from which the rest follows. */
struct gate_first_track {
    uint64_t begin_ns, end_ns, begin_clock, end_clock;
    uint32_t sm;
    uint32_t num_events; /* that there were; those beyond max_events were not kept */
};

struct gate_first_trace {
    struct gate_first_track *tracks; /* [CTAs][GATE_FIRST_TRACKS], device memory */
    struct gate_first_event *events; /* [CTAs][GATE_FIRST_TRACKS][max_events], device memory */
    uint32_t max_events;
    uint32_t reserved;
};

struct gate_first_traced_params {
    struct gemm_tile_params gemm;
    struct gate_first_trace trace;
};

#ifdef __cplusplus
static_assert(sizeof(struct gate_first_event) == 16, "gcc and nvcc must agree");
static_assert(sizeof(struct gate_first_track) == 40, "gcc and nvcc must agree");
static_assert(sizeof(struct gate_first_traced_params) == sizeof(struct gemm_tile_params) + 128,
              "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gate_first_event) == 16, "gcc and nvcc must agree");
_Static_assert(sizeof(struct gate_first_track) == 40, "gcc and nvcc must agree");
_Static_assert(sizeof(struct gate_first_traced_params) == sizeof(struct gemm_tile_params) + 128,
               "gcc and nvcc must agree");
#endif

#endif
