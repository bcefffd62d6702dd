/* SPDX-License-Identifier: Apache-2.0 */
/* The activation of a gated MLP as a kernel of its own: reads two matrices, writes one, and is as
 * fast as the memory. */
#include "ops/cuda/kernels/gated_activation_params.h"
#include "ops/cuda/kernels/gating.cuh"

/* Value i of 8 that lie in 16 bytes. */
static __device__ __forceinline__ void widen_piece(const uint4 &piece, float (&values)[8])
{
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

extern "C" __global__ void __launch_bounds__(GATED_ACTIVATION_MAX_THREADS)
    gated_activation_bf16(const __grid_constant__ struct gated_activation_kernel_params params)
{
    const int32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    const uint4 *gate = (const uint4 *)params.gate + column;
    const uint4 *up = (const uint4 *)params.up + column;
    uint4 *d = (uint4 *)params.d + column;

    grid_wait_for_previous();
    grid_release_next();
    if (column >= params.row_pieces)
        return;
    for (int64_t row0 = (int64_t)blockIdx.y * GATED_ACTIVATION_ROWS; row0 < params.num_rows;
         row0 += (int64_t)gridDim.y * GATED_ACTIVATION_ROWS) {
        uint4 gates[GATED_ACTIVATION_ROWS], ups[GATED_ACTIVATION_ROWS];
#pragma unroll
        for (int i = 0; i < GATED_ACTIVATION_ROWS; i++) {
            if (row0 + i < params.num_rows) {
                gates[i] = gate[(row0 + i) * params.gate_stride];
                ups[i] = up[(row0 + i) * params.up_stride];
            }
        }
#pragma unroll
        for (int i = 0; i < GATED_ACTIVATION_ROWS; i++) {
            float values[2][GATED_ACTIVATION_COLUMNS];
            uint32_t words[4];
            if (row0 + i >= params.num_rows)
                break;
            widen_piece(gates[i], values[0]);
            widen_piece(ups[i], values[1]);
            apply_gating(params.gating, values[0], values[1]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                words[j] = bf16x2_round(values[0][2 * j] * values[1][2 * j],
                                        values[0][2 * j + 1] * values[1][2 * j + 1]);
            d[(row0 + i) * params.d_stride] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
