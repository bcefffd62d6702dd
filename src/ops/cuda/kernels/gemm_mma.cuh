/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix kernels for every GPU from compute capability 8.0 on: mma.sync on what ldmatrix takes out
 * of shared memory, into which cp.async brings it. A CTA makes one tile, in stages along k:
 *
 *   copies   0 1 2 | 3       | 4       | 5       | ...    num_stages - 1 stages ahead
 *   ldmatrix       | 0 0 0 1 | 1 1 1 2 | 2 2 2 3 | ...    16 of k ahead of the products
 *   mma.sync       | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | ...
 *
 * In the fused kernels rows of gate and of up alternate by 8 in shared memory, so that products of
 * both for one element of D are in one thread. Sums grow by 16 of k at a time in every tile shape,
 * fused or plain: a row of D has the same bits in all of them. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_CUH
#define IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_CUH

#include "ops/cuda/kernels/gating.cuh"
#include "ops/cuda/kernels/gemm_mma_variants.h"
#include "ops/cuda/kernels/ptx_warp.cuh"

#define BF16_BYTES 2
#define CHUNK_BYTES 16 /* of one copy */
#define CHUNK_ELEMENTS 8
#define STEP_K 16 /* of the instruction */

/* general: a pair with biases and any gating. */
enum form { plain, pair, general };

/* Where a 16-byte chunk of a row lies, in chunks of the row: eight rows that ldmatrix reads at one
 * chunk, and eight neighbouring chunks that cp.async writes, are in different banks. */
template <int BLOCK_K> static __device__ __forceinline__ int swizzle(int row, int chunk)
{
    return BLOCK_K == 64 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
}

/* What a thread copies of one matrix: a chunk of some rows, in each stage. */
struct copy_source {
    const uint16_t *first; /* of the first row, at the thread's chunk */
    int64_t step;          /* elements from one of its rows to the next */
    uint32_t rows_there;   /* a bit each: those that exist */
};

/* Rows row, row + row_step, ... below num_rows, of which 8 lie one behind the other and group_step
 * rows before the next 8; row_step is a multiple of 8. */
template <int TILE_ROWS, int ROWS>
static __device__ __forceinline__ struct copy_source source_of(const uint16_t *matrix,
                                                               int64_t stride, int32_t row,
                                                               int32_t row_step, int32_t num_rows,
                                                               int32_t k, int32_t group_step)
{
    const int64_t place = (int64_t)(row / 8) * group_step + row % 8;
    struct copy_source source = {
        .first = row < num_rows ? matrix + place * stride + k : matrix,
        .step = row_step / 8 * group_step * stride,
        .rows_there = 0,
    };
#pragma unroll
    for (int i = 0; i < (TILE_ROWS + ROWS - 1) / ROWS; i++)
        source.rows_there |= (uint32_t)(row + i * row_step < num_rows) << i;
    return source;
}

/* One stage of a matrix, which begins at k. Rows that do not exist become zeros, and so do the
 * elements of a row from num_left of the thread's first chunk on. */
template <int TILE_ROWS, int BLOCK_K, int THREADS>
static __device__ __forceinline__ void copy_stage(uint32_t shared, const struct copy_source &source,
                                                  int32_t k, int32_t num_left)
{
    constexpr int ROWS = THREADS / (BLOCK_K / CHUNK_ELEMENTS);
    const int row = threadIdx.x / (BLOCK_K / CHUNK_ELEMENTS);
    const uint32_t num_bytes = (uint32_t)max(0, min(num_left - k, CHUNK_ELEMENTS)) * BF16_BYTES;
#pragma unroll
    for (int i = 0; i < (TILE_ROWS + ROWS - 1) / ROWS; i++) {
        const bool is_there = (source.rows_there >> i & 1) != 0 && num_bytes > 0;
        if (TILE_ROWS % ROWS == 0 || row + i * ROWS < TILE_ROWS)
            copy_async_16(shared + i * ROWS * BLOCK_K * BF16_BYTES,
                          is_there ? source.first + i * source.step + k : source.first,
                          is_there ? num_bytes : 0);
    }
}

/* Four results of gate and up: two neighbouring columns, of two rows. */
template <enum form FORM>
static __device__ __forceinline__ void combine(const struct gemm_mma_params &p,
                                               const float (&gate)[4], const float (&up)[4],
                                               int32_t column, float (&d)[4])
{
    if constexpr (FORM == pair) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            d[i] = silu(gate[i], -1.44269504f) * up[i];
    } else {
        float factor[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t at = column + i % 2;
            const int64_t place = (int64_t)(at / 8) * p.bias_group_step + at % 8 * p.bias_step;
            d[i] = gate[i] + (p.bias != nullptr && at < p.n ? p.bias[place] : 0.0f);
            factor[i] = up[i] + (p.up_bias != nullptr && at < p.n ? p.up_bias[place] : 0.0f);
        }
        round_products(p.gating, d, factor);
        apply_gating(p.gating, d, factor);
#pragma unroll
        for (int i = 0; i < 4; i++)
            d[i] *= factor[i];
    }
}

static __device__ __forceinline__ float bias_at(const struct gemm_mma_params &p, int32_t column)
{
    return p.bias != nullptr && column < p.n ? p.bias[column] : 0.0f;
}

/* Two neighbours of a row of fp32. */
static __device__ __forceinline__ void store_floats(const struct gemm_mma_params &p, int32_t row,
                                                    int32_t column, float first, float second)
{
    if (row >= p.m || column >= p.n)
        return;
    float *d = (float *)p.d + row * p.d_stride + column;
    const bool has_second = column + 1 < p.n;
    if (p.end == GEMM_MMA_ADD_F32) {
        first += d[0];
        second += has_second ? d[1] : 0.0f;
    }
    if (has_second && (uintptr_t)d % sizeof(float2) == 0) {
        *(float2 *)d = make_float2(first, second);
        return;
    }
    d[0] = first;
    if (has_second)
        d[1] = second;
}

/* A tile of bf16 out of shared memory: 16 bytes at a time, and what is left of a row by element. */
template <int BLOCK_M, int COLUMNS, int THREADS>
static __device__ __forceinline__ void store_tile(const struct gemm_mma_params &p,
                                                  const uint16_t *staged, int32_t first_row,
                                                  int32_t first_column)
{
    constexpr int PIECES = COLUMNS / CHUNK_ELEMENTS, STRIDE = COLUMNS + CHUNK_ELEMENTS;
    for (int i = threadIdx.x; i < BLOCK_M * PIECES; i += THREADS) {
        const int32_t row = i / PIECES, piece = i % PIECES * CHUNK_ELEMENTS;
        const int32_t column = first_column + piece;
        if (first_row + row >= p.m || column >= p.n)
            continue;
        const uint16_t *from = staged + row * STRIDE + piece;
        uint16_t *to = (uint16_t *)p.d + (first_row + row) * p.d_stride + column;
        if (column + CHUNK_ELEMENTS <= p.n) {
            *(uint4 *)to = *(const uint4 *)from;
        } else {
            for (int j = 0; j < p.n - column; j++)
                to[j] = from[j];
        }
    }
}

/* Fragments of 16 of k: of A 16-row tiles, of the weights pairs of 8-row tiles. */
template <int TILES, int ROW_BYTES>
static __device__ __forceinline__ void load_parts(uint32_t (&parts)[TILES][4], uint32_t from)
{
#pragma unroll
    for (int i = 0; i < TILES; i++)
        matrix_load_x4(parts[i], from + i * 16 * ROW_BYTES);
}

template <int M_TILES, int N_PAIRS>
static __device__ __forceinline__ void multiply(float (&accum)[M_TILES][2 * N_PAIRS][4],
                                                const uint32_t (&a)[M_TILES][4],
                                                const uint32_t (&b)[N_PAIRS][4])
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < N_PAIRS; n++) {
            matrix_multiply_add(accum[m][2 * n], a[m], b[n][0], b[n][1]);
            matrix_multiply_add(accum[m][2 * n + 1], a[m], b[n][2], b[n][3]);
        }
    }
}

/* A tile of D: BLOCK_M rows, BLOCK_N columns, or half as many in the fused kernels. */
template <enum form FORM, int BLOCK_M, int BLOCK_N, int BLOCK_K, int STAGES, int WARPS_M,
          int WARPS_N>
static __device__ __forceinline__ void gemm_tile(const struct gemm_mma_params &p)
{
    constexpr int THREADS = 32 * WARPS_M * WARPS_N, CHUNKS = BLOCK_K / CHUNK_ELEMENTS;
    constexpr int ROWS = THREADS / CHUNKS; /* that are copied at a time */
    constexpr int M_TILES = BLOCK_M / WARPS_M / 16, N_PAIRS = BLOCK_N / WARPS_N / 16;
    constexpr int STEPS = BLOCK_K / STEP_K, ROW_BYTES = BLOCK_K * BF16_BYTES;
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES, STAGE_BYTES = A_BYTES + BLOCK_N * ROW_BYTES;
    constexpr int COLUMNS = FORM == plain ? BLOCK_N : BLOCK_N / 2;
    constexpr int COPY_COLUMNS = FORM == plain ? ROWS : ROWS / 2;
    constexpr int STAGED_STRIDE = COLUMNS + CHUNK_ELEMENTS;
    static_assert(ROWS % 16 == 0 && BLOCK_N % ROWS == 0, "a thread copies of gate or of up");
    static_assert(STEPS % 2 == 0 && M_TILES >= 1 && N_PAIRS >= 1, "fragments alternate");
    static_assert(BLOCK_M * STAGED_STRIDE * BF16_BYTES <= STAGES * STAGE_BYTES,
                  "a tile is staged where its operands were");
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    /* Which tile: group_m tiles of rows share weights before the next columns come. */
    const int32_t num_tiles_m = (p.m - 1) / BLOCK_M + 1, num_tiles_n = (p.n - 1) / COLUMNS + 1;
    const int64_t tiles_of_group = (int64_t)p.group_m * num_tiles_n;
    const int32_t group = (int32_t)(blockIdx.x / tiles_of_group);
    const int32_t within = (int32_t)(blockIdx.x - group * tiles_of_group);
    const int32_t height = min(p.group_m, num_tiles_m - group * p.group_m);
    const int32_t first_row = (group * p.group_m + within % height) * BLOCK_M;
    const int32_t first_column = within / height * COLUMNS;

    /* What this thread copies. */
    const int copy_row = threadIdx.x / CHUNKS, copy_chunk = threadIdx.x % CHUNKS;
    const int32_t copy_k = copy_chunk * CHUNK_ELEMENTS;
    const uint32_t copy_to =
        shared + copy_row * ROW_BYTES + swizzle<BLOCK_K>(copy_row, copy_chunk) * CHUNK_BYTES;
    const bool is_up = FORM != plain && copy_row / 8 % 2 != 0;
    const struct copy_source a = source_of<BLOCK_M, ROWS>(
        (const uint16_t *)p.a, p.a_stride, first_row + copy_row, ROWS, p.m, copy_k, 8);
    const struct copy_source b = source_of<BLOCK_N, ROWS>(
        (const uint16_t *)(is_up ? p.up : p.b), is_up ? p.up_stride : p.b_stride,
        first_column + (FORM == plain ? copy_row : copy_row / 16 * 8 + copy_row % 8), COPY_COLUMNS,
        p.n, copy_k, FORM == plain ? 8 : p.row_group_step);

    /* Where this lane reads the first 16 of k: rows of A in tiles of 16, of B in pairs of 8. The
     * chunks of a later step differ from it in bits that the swizzle leaves alone. */
    const int a_row = warp / WARPS_N * (BLOCK_M / WARPS_M) + lane % 16;
    const int b_row = warp % WARPS_N * (BLOCK_N / WARPS_N) + lane / 16 * 8 + lane % 8;
    const uint32_t a_from = a_row * ROW_BYTES + swizzle<BLOCK_K>(a_row, lane / 16) * CHUNK_BYTES;
    const uint32_t b_from =
        A_BYTES + b_row * ROW_BYTES + swizzle<BLOCK_K>(b_row, lane / 8 % 2) * CHUNK_BYTES;

    const int32_t num_k_blocks = (p.k - 1) / BLOCK_K + 1;
    float accum[M_TILES][2 * N_PAIRS][4] = {};
    uint32_t a_parts[2][M_TILES][4], b_parts[2][N_PAIRS][4];
    int read = 0, write = STAGES - 1;

#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        copy_stage<BLOCK_M, BLOCK_K, THREADS>(copy_to + i * STAGE_BYTES, a, i * BLOCK_K,
                                              p.k - copy_k);
        copy_stage<BLOCK_N, BLOCK_K, THREADS>(copy_to + i * STAGE_BYTES + A_BYTES, b, i * BLOCK_K,
                                              p.k - copy_k);
        copy_async_commit();
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load_parts<M_TILES, ROW_BYTES>(a_parts[0], shared + a_from);
    load_parts<N_PAIRS, ROW_BYTES>(b_parts[0], shared + b_from);

    for (int32_t block = 0; block < num_k_blocks; block++) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int next = (step + 1) % STEPS;
            if (next == 0) {
                /* The next stage is there, and nobody reads the one before this any more. */
                copy_async_wait<STAGES - 2>();
                __syncthreads();
                read = read + 1 == STAGES ? 0 : read + 1;
            }
            const uint32_t stage = shared + read * STAGE_BYTES;
            load_parts<M_TILES, ROW_BYTES>(a_parts[(step + 1) % 2],
                                           stage + (a_from ^ next * 2 * CHUNK_BYTES));
            load_parts<N_PAIRS, ROW_BYTES>(b_parts[(step + 1) % 2],
                                           stage + (b_from ^ next * 2 * CHUNK_BYTES));
            if (step == 0) {
                const int32_t k = (block + STAGES - 1) * BLOCK_K;
                const uint32_t to = copy_to + write * STAGE_BYTES;
                if (block + STAGES - 1 < num_k_blocks) {
                    copy_stage<BLOCK_M, BLOCK_K, THREADS>(to, a, k, p.k - copy_k);
                    copy_stage<BLOCK_N, BLOCK_K, THREADS>(to + A_BYTES, b, k, p.k - copy_k);
                }
                copy_async_commit();
                write = write + 1 == STAGES ? 0 : write + 1;
            }
            multiply<M_TILES, N_PAIRS>(accum, a_parts[step % 2], b_parts[step % 2]);
        }
    }

    /* In a thread: two neighbouring columns of rows lane / 4 and + 8 of each 16 x 8 tile. */
    const int warp_row = warp / WARPS_N * (BLOCK_M / WARPS_M) + lane / 4;
    const int warp_column = warp % WARPS_N * (COLUMNS / WARPS_N) + lane % 4 * 2;
    if (FORM == plain && p.end != GEMM_MMA_STORE_BF16) {
#pragma unroll
        for (int n = 0; n < 2 * N_PAIRS; n++) {
            const int32_t column = first_column + warp_column + n * 8;
            const float low = bias_at(p, column), high = bias_at(p, column + 1);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const int32_t row = first_row + warp_row + m * 16;
                const float(&sums)[4] = accum[m][n];
                store_floats(p, row, column, sums[0] + low, sums[1] + high);
                store_floats(p, row + 8, column, sums[2] + low, sums[3] + high);
            }
        }
        return;
    }
    uint32_t *staged = (uint32_t *)memory;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < (FORM == plain ? 2 * N_PAIRS : N_PAIRS); n++) {
        const int column = warp_column + n * 8;
        float low = 0.0f, high = 0.0f;
        if (FORM == plain) {
            low = bias_at(p, first_column + column);
            high = bias_at(p, first_column + column + 1);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float values[4];
            if constexpr (FORM != plain) {
                combine<FORM>(p, accum[m][2 * n], accum[m][2 * n + 1], first_column + column,
                              values);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    values[i] = accum[m][n][i] + (i % 2 == 0 ? low : high);
            }
            const int at = (warp_row + m * 16) * STAGED_STRIDE + column;
            staged[at / 2] = bf16x2_round(values[0], values[1]);
            staged[(at + 8 * STAGED_STRIDE) / 2] = bf16x2_round(values[2], values[3]);
        }
    }
    __syncthreads();
    store_tile<BLOCK_M, COLUMNS, THREADS>(p, (const uint16_t *)memory, first_row, first_column);
}

/* Two thread blocks on an SM where they have the registers for it. */
#define MIN_BLOCKS(warps_m, warps_n) ((warps_m) * (warps_n) > 4 ? 1 : 2)

#define GEMM_MMA_KERNEL(stem, form, block_m, block_n, block_k, num_stages, warps_m, warps_n) \
    extern "C" __global__ void __launch_bounds__(32 * (warps_m) * (warps_n),                 \
                                                 MIN_BLOCKS(warps_m, warps_n))               \
        stem##_multistage_##block_m##x##block_n(                                             \
            const __grid_constant__ struct gemm_mma_params params)                           \
    {                                                                                        \
        gemm_tile<form, block_m, block_n, block_k, num_stages, warps_m, warps_n>(params);    \
    }

#endif
