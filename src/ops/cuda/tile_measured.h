/* SPDX-License-Identifier: Apache-2.0 */
/* Choices that were measured, which the cost model gives way to. Made by tools/make_tile_table.py
 * of sweeps: NVIDIA H200, 2026-11-29; NVIDIA H200, 2026-11-30. Not to be edited.
 *
 *   X(num_sms, form, m, columns, k, schedule, block_m, block_n, cluster_m, cluster_n, group_m,
 *     num_tiles_n, gain)
 *
 * gain: time of the cost model's choice / time of this one, less an allowance for chance. */
#ifndef IMBREX_OPS_CUDA_TILE_MEASURED_H
#define IMBREX_OPS_CUDA_TILE_MEASURED_H

/* clang-format off */
#define TILE_MEASURED(X) \
    X(132, PAIR, 512, 29568, 8192, pingpong, 128, 128, 2, 1, 4, 0, 1.006) \
    X(132, PAIR, 1024, 11008, 2048, pingpong, 128, 176, 1, 1, 8, 132, 1.005) \
    X(132, PAIR, 1024, 13824, 5120, pingpong, 128, 176, 2, 1, 4, 165, 1.005) \
    X(132, PAIR, 2048, 4864, 896, pingpong, 128, 160, 1, 1, 8, 66, 1.004) \
    X(132, PAIR, 2048, 11008, 2048, pingpong, 128, 176, 1, 1, 8, 132, 1.003) \
    X(132, PAIR, 2048, 13824, 5120, pingpong, 128, 176, 1, 1, 16, 165, 1.006) \
    X(132, PAIR, 2048, 27648, 5120, pingpong, 128, 176, 1, 1, 16, 321, 1.004) \
    X(132, PAIR, 8192, 27648, 5120, pingpong, 128, 160, 1, 1, 16, 0, 1.004) \
    X(132, PAIR, 8192, 29568, 8192, pingpong, 128, 176, 2, 1, 16, 0, 1.011) \
    X(132, PAIR, 16384, 13824, 5120, pingpong, 128, 192, 2, 1, 8, 0, 1.002) \
    X(132, PAIR, 16384, 18944, 3584, pingpong, 128, 160, 1, 1, 32, 0, 1.007) \
    X(132, PAIR, 16384, 27648, 5120, pingpong, 128, 192, 2, 1, 16, 0, 1.007) \
    X(132, PLAIN, 512, 2048, 11008, pingpong, 64, 128, 1, 2, 16, 0, 1.037) \
    X(132, PLAIN, 512, 5120, 13824, pingpong, 128, 160, 1, 1, 8, 0, 1.003) \
    X(132, PLAIN, 1024, 896, 4864, pingpong, 64, 128, 1, 1, 16, 0, 1.042) \
    X(132, PLAIN, 1024, 2048, 11008, pingpong, 128, 128, 1, 1, 8, 0, 1.003) \
    X(132, PLAIN, 1024, 5120, 27648, pingpong, 128, 176, 1, 1, 8, 32, 1.004) \
    X(132, PLAIN, 2048, 896, 4864, pingpong, 128, 112, 1, 1, 8, 0, 1.005) \
    X(132, PLAIN, 2048, 1536, 8960, pingpong, 128, 192, 1, 1, 8, 0, 1.003) \
    X(132, PLAIN, 2048, 2048, 11008, pingpong, 128, 128, 1, 1, 16, 0, 1.002) \
    X(132, PLAIN, 2048, 3584, 18944, pingpong, 128, 160, 1, 2, 16, 24, 1.005) \
    X(132, PLAIN, 2048, 5120, 13824, pingpong, 128, 160, 1, 1, 16, 33, 1.018) \
    X(132, PLAIN, 2048, 5120, 27648, pingpong, 128, 160, 1, 1, 16, 33, 1.018) \
    X(132, PLAIN, 2048, 8192, 29568, pingpong, 128, 176, 1, 1, 16, 49, 1.011) \
    X(132, PLAIN, 4096, 2048, 11008, pingpong, 128, 128, 1, 2, 32, 0, 1.003) \
    X(132, PLAIN, 4096, 3584, 18944, pingpong, 128, 128, 2, 1, 4, 0, 1.013) \
    X(132, PLAIN, 4096, 5120, 13824, pingpong, 128, 160, 1, 1, 16, 33, 1.016) \
    X(132, PLAIN, 4096, 5120, 27648, cooperative, 128, 160, 2, 1, 8, 33, 1.013) \
    X(132, PLAIN, 8192, 896, 4864, pingpong, 128, 112, 1, 2, 16, 0, 1.024) \
    X(132, PLAIN, 8192, 2048, 11008, pingpong, 128, 128, 1, 1, 16, 0, 1.007) \
    X(132, PLAIN, 8192, 3584, 18944, pingpong, 128, 128, 1, 2, 8, 0, 1.009) \
    X(132, PLAIN, 8192, 5120, 13824, pingpong, 128, 160, 2, 1, 16, 33, 1.015) \
    X(132, PLAIN, 8192, 5120, 27648, cooperative, 256, 128, 1, 1, 4, 41, 1.014) \
    X(132, PLAIN, 8192, 8192, 29568, pingpong, 128, 128, 1, 2, 32, 66, 1.004)
/* clang-format on */

#endif
