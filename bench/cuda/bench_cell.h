/* SPDX-License-Identifier: Apache-2.0 */
/* One product of a benchmark, those who compute it, and what came of it. */
#ifndef IMBREX_BENCH_CUDA_BENCH_CELL_H
#define IMBREX_BENCH_CUDA_BENCH_CELL_H

#include <stdbool.h>
#include <stdint.h>

#include "bench/cuda/gpu.h"
#include "bench/peers/cublaslt.h"
#include "bench/peers/nvml.h"
#include "cli/bench_ops.h"
#include "cli/spread.h"

#define BENCH_MAX_CONTESTANTS 200

/* Memory that the inputs and outputs of all cells take turns in. Every matrix exists num_sets
 * times, so that what a call reads has left the L2 cache since it was read last. */
struct bench_pools {
    CUdeviceptr a, weights, d, product, workspace, counts;
    CUdeviceptr biases; /* of gate, then of up, fp32 */
    uint64_t a_bytes, weights_bytes, d_bytes, product_bytes, biases_bytes;
};
#define BENCH_WORKSPACE_BYTES (UINT64_C(64) << 20) /* of a stream */

/* What a whole run has in common. */
struct bench {
    const struct bench_ops_settings *settings;
    const struct bench_ops_cells *cells;
    struct gpu gpu;
    struct imbrex_device *device;
    struct imbrex_device_info description;
    bool is_portable; /* kernels of all GPUs from compute capability 8.0 on */
    struct cublaslt *lt;
    struct nvml *nvml;
    struct bench_pools pools;
    struct gate_first_kernels *gate_first; /* NULL: not opened */
    /* Of the baseline that has several; made by bench_streams_create. */
    CUstream streams[BENCH_MAX_STREAMS];
    CUevent begun, ended[BENCH_MAX_STREAMS];
};

enum contestant_kind {
    CONTESTANT_OURS,
    CONTESTANT_GEMM,      /* cuBLASLt, the bare product */
    CONTESTANT_UNFUSED,   /* cuBLASLt and one activation kernel */
    CONTESTANT_HEURISTIC, /* slices of cell.slice_width, in turn */
    CONTESTANT_STREAMS,   /* the same over several streams */
    CONTESTANT_SWISH,     /* a gate_first kernel of gate_first_kernels.h */
    CONTESTANT_KIND_COUNT
};

/* What becomes of Swish in it; kernels/gemm_swiglu_gate_first.cuh has the meanings. */
enum bench_swish {
    BENCH_SWISH_HIDDEN,
    BENCH_SWISH_SERIALISED,
    BENCH_SWISH_REMOVED,
    BENCH_SWISH_HELD,
    BENCH_NUM_SWISH
};

struct contestant {
    enum contestant_kind kind;
    char name[128];
    int gating_idx;                 /* ours, and that of the activation kernel */
    struct imbrex_kernel_plan plan; /* ours, and gate_first */
    enum bench_swish swish;
    CUgraphExec replay;
    int num_calls;               /* in a replay */
    double *us;                  /* [num_pairs], of a call */
    struct spread time_us, gain; /* gain: time of the bare product / own time, pair by pair */
    struct spread over_chosen;   /* own time / time of the first contestant, pair by pair */
    double worst_error;          /* of the allowed one */
    double beyond_ulp;           /* share of the checked results */
    bool has_energy;
    double joules, energy_watts, energy_clock_mhz; /* a call; while it ran alone */
};

struct bench_cell {
    const struct bench_shape *shape;
    int64_t m, n, k;
    int64_t weight_rows;
    uint64_t a_stride, weights_stride, d_stride, product_stride; /* bytes between sets */
    int num_sets;
    struct cublaslt_product *gemm;
    int32_t slice_width, num_slices, num_streams; /* 0: no baselines that have slices */
    struct cublaslt_product *slice_gemm;          /* of gate or up of a slice */
    int algorithm_idx[CONTESTANT_KIND_COUNT];
    struct contestant contestants[BENCH_MAX_CONTESTANTS];
    int num_contestants;
    double flops, bytes; /* bytes: each matrix once */
    double clock_mhz, watts;
    bool has_clock, has_watts;
    /* With all of enum bench_swish as contestants, T being a time, or its sum over pairs_of_share
     * pairs one after the other:
     *   hidden_share           (T serialised - T hidden) / (T serialised - T removed)
     *   hidden_share_of_swish  1 - (T hidden - T removed) / (T serialised - T held)
     * A kernel that serialises Swish also lets the tensor cores run dry before it, which the first
     * counts as a part of what is hidden and the second does not. */
    bool has_hidden_share;
    int pairs_of_share;
    struct spread hidden_share, hidden_share_of_swish;
};

/* Whether it computes slice by slice. */
static inline bool contestant_is_sliced(const struct contestant *contestant)
{
    return contestant->kind == CONTESTANT_HEURISTIC || contestant->kind == CONTESTANT_STREAMS;
}

/* Shape and sets of a cell; nothing is allocated. */
void bench_cell_init(const struct bench *bench, const struct bench_shape *shape, int32_t m,
                     struct bench_cell *cell);
/* Addresses of set set_idx. Up is 0 for a plain product; is_ours: where the option --weights has
 * them, else one matrix with gate first. */
struct bench_operands {
    CUdeviceptr a, gate, up, d, product;
};
struct bench_operands bench_cell_operands(const struct bench *bench, const struct bench_cell *cell,
                                          int set_idx, bool is_ours);
/* Whether a gating of the run asks for more than SwiGLU. */
bool bench_is_general(const struct bench *bench, int gating_idx);
/* Starts one call of a contestant on set set_idx. */
bool bench_cell_call(struct bench *bench, struct bench_cell *cell,
                     const struct contestant *contestant, int set_idx);

/* The streams over which a baseline runs, and what they wait for. Reported on failure; destroying
 * is safe after that and on a zeroed struct. */
bool bench_streams_create(struct bench *bench);
void bench_streams_destroy(struct bench *bench);

/* ---- the measurement ---- */

/* Memory for one cell more, before it is allocated for all of them. */
void bench_pools_include(struct bench *bench, const struct bench_cell *cell);
bool bench_pools_allocate(struct bench *bench);
void bench_pools_free(struct bench *bench);
/* Random weights of the cell's shape, whole when it returns. */
bool bench_fill_weights(struct bench *bench, const struct bench_cell *cell);
/* The library's choice, and beside it what the settings' --plans say. */
bool bench_add_plans(struct bench *bench, struct bench_cell *cell);
/* Leaves out those that are wrong, which is reported: *all_right becomes false. False: nobody is
 * left. */
bool bench_check_contestants(struct bench *bench, struct bench_cell *cell, bool *all_right);
/* Replays all of them in turn, num_pairs times. */
bool bench_time_contestants(struct bench *bench, struct bench_cell *cell);
/* Gives back what the two above took. Contestants and plans stay, and may be timed again. */
void bench_cell_release(struct bench *bench, struct bench_cell *cell);

/* Prints how far several ways to compute a cell are from fp64. False: reported. */
bool bench_numerics(struct bench *bench, struct bench_cell *cell);

/* ---- report ---- */

struct bench_report;

/* NULL: out of memory, reported. */
struct bench_report *bench_report_create(const struct bench *bench);
/* Prints a measured cell and keeps it. */
bool bench_report_add(struct bench_report *report, const struct bench *bench,
                      const struct bench_cell *cell);
/* Prints means over all cells and writes the JSON file that was asked for. An exit code. */
int bench_report_finish(struct bench_report *report, const struct bench *bench);
void bench_report_destroy(struct bench_report *report);

#endif
