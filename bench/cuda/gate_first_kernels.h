/* SPDX-License-Identifier: Apache-2.0 */
/* The gate_first kernels that exist to be looked at: with Swish hidden, serialised, removed, and
 * with the turn held but no Swish (kernels/gemm_swiglu_gate_first.cuh says what each does), and one
 * that traces itself. An image of their own: the library has none of them. */
#ifndef IMBREX_BENCH_CUDA_GATE_FIRST_KERNELS_H
#define IMBREX_BENCH_CUDA_GATE_FIRST_KERNELS_H

/* X(block_m, block_n, num_stages, num_slots), as the library's list has them. */
#define GATE_FIRST_BENCH_TILES(X) \
    X(64, 384, 6, 2)              \
    X(128, 192, 6, 2)

/* X(swish): symbols are bench_gate_first_<swish>_<block_m>x<block_n>, and _traced_. */
#define GATE_FIRST_BENCH_SWISH(X) X(hidden) X(serialised) X(removed) X(held)

#endif
