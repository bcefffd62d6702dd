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

#define BENCH_MAX_CONTESTANTS 200

/* Memory that the inputs and outputs of all cells take turns in. Every matrix exists num_sets
 * times, so that what a call reads has left the L2 cache since it was read last. */
struct bench_pools {
    CUdeviceptr a, weights, d, product, workspace, counts;
    CUdeviceptr biases; /* of gate, then of up, fp32 */
    uint64_t a_bytes, weights_bytes, d_bytes, product_bytes, biases_bytes;
};
#define BENCH_WORKSPACE_BYTES (UINT64_C(64) << 20)

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
};

struct spread {
    double median, p10, p90;
};

enum contestant_kind {
    CONTESTANT_OURS,
    CONTESTANT_GEMM,    /* cuBLASLt, the bare product */
    CONTESTANT_UNFUSED, /* cuBLASLt and one activation kernel */
};

struct contestant {
    enum contestant_kind kind;
    char name[128];
    int gating_idx;                 /* ours, and that of the activation kernel */
    struct imbrex_kernel_plan plan; /* ours */
    CUgraphExec replay;
    int num_calls;               /* in a replay */
    double *us;                  /* [num_pairs], of a call */
    struct spread time_us, gain; /* gain: time of the bare product / own time, pair by pair */
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
    int algorithm_idx;
    struct contestant contestants[BENCH_MAX_CONTESTANTS];
    int num_contestants;
    double flops, bytes; /* bytes: each matrix once */
    double clock_mhz, watts;
    bool has_clock, has_watts;
};

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
