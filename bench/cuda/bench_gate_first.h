/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of gate_first_kernels.h beside the library: launched, and one of them traced. */
#ifndef IMBREX_BENCH_CUDA_BENCH_GATE_FIRST_H
#define IMBREX_BENCH_CUDA_BENCH_GATE_FIRST_H

#include "bench/cuda/bench_cell.h"

/* Loads their image. False: reported. */
bool bench_gate_first_open(struct bench *bench);
/* Safe where nothing was opened. */
void bench_gate_first_close(struct bench *bench);

/* Of the tiles that the image has, the one that the library expects to be the fastest for a cell of
 * gemm_swiglu, in tiles of one width. False: reported. */
bool bench_gate_first_plan(const struct bench *bench, const struct bench_cell *cell,
                           struct imbrex_kernel_plan *plan);

/* Starts one call on set set_idx. False: reported. */
bool bench_gate_first_call(struct bench *bench, const struct bench_cell *cell,
                           enum bench_swish swish, const struct imbrex_kernel_plan *plan,
                           int set_idx);

/* Runs the traced kernel on the cell, writes what its warpgroups did as a trace that Perfetto and
 * chrome://tracing open, and prints means of it. False: reported. */
bool bench_gate_first_trace(struct bench *bench, const struct bench_cell *cell, const char *path);

#endif
