/* SPDX-License-Identifier: Apache-2.0 */
/* The Hopper GEMM: one persistent kernel of three warpgroups. The third, the producer, is one
 * thread that asks the copy engine for k-blocks of A and B; the other two, the consumers, multiply
 * them and write tiles of D. docs/kernels.md has the reasons.
 *
 *   pingpong     a consumer has a tile of its own, and they take turns at the tensor cores:
 *
 *     consumer 0  | mainloop 0   | epilogue 0 |  wait  | mainloop 2   | epilogue 2 |
 *     consumer 1  |     wait     | mainloop 1   | epilogue 1 |  wait  | mainloop 3 ...
 *
 *   cooperative  a consumer has half the rows of each tile:
 *
 *     consumer 0  | mainloop 0, upper half | epilogue 0 | mainloop 1, upper half | epilogue 1 |
 *     consumer 1  | mainloop 0, lower half | epilogue 0 | mainloop 1, lower half | epilogue 1 |
 *
 * Shared memory: num_stages x (A block, B block), 2 x num_slots output chunks, then the barriers
 * full[num_stages] and empty[num_stages]. k-block i of all that a CTA computes lives in stage
 * i % num_stages; full completes when its bytes have come, empty when every consumer of every CTA
 * that this CTA's copies reach is done with it.
 */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_TILE_CUH
#define IMBREX_OPS_CUDA_KERNELS_GEMM_TILE_CUH

#include "ops/cuda/kernels/gating.cuh"
#include "ops/cuda/kernels/gemm_swiglu_params.h"
#include "ops/cuda/kernels/ptx.cuh"

/* Template arguments, spelled as the variants list spells them. */
enum gemm_tile_schedule { pingpong, cooperative };
enum gemm_tile_form { pair, split, plain, general_pair, general_split };

enum {
    THREADS_OF_GROUP = 128,
    PRODUCER_GROUP = 2,
    SWIZZLE_ATOM_BYTES = 1024, /* 8 rows of 128 bytes; boxes in shared memory align to it */
    ROW_BYTES = GEMM_TILE_BLOCK_K * 2,
    CHUNK_COLUMNS = 64,
    GATING_COLUMNS = 32,
};

/* Weights that come as those of the form pair, or split: the general forms differ from them in what
 * they make of the accumulators alone. */
__host__ __device__ constexpr bool is_pair(int form)
{
    return form == pair || form == general_pair;
}
__host__ __device__ constexpr bool is_split(int form)
{
    return form == split || form == general_split;
}
__host__ __device__ constexpr bool is_general(int form)
{
    return form == general_pair || form == general_split;
}

/* Named barriers; 0 is that of __syncthreads. */
enum { BARRIER_TURN = 1 };

struct tile_position {
    int m;
    int n;
    int piece; /* first of its pieces of 16 columns (8 of D in the fused kernels) */
};

/* The tile of this CTA in block `block` of the cluster's walk: group_m blocks of m, then the next
 * n, so that what the device works on at one time shares rows of A and of B in the L2 cache. */
template <int BLOCK_N>
__device__ __forceinline__ tile_position tile_at(const struct gemm_tile_params &p, int block,
                                                 int rank_m, int rank_n)
{
    int blocks_of_group = p.group_m * p.num_blocks_n;
    int group = block / blocks_of_group;
    int within = block - group * blocks_of_group;
    int height = min(p.group_m, p.num_blocks_m - group * p.group_m);
    int column = within / height;
    tile_position tile;
    tile.m = (group * p.group_m + within - column * height) * p.cluster_m + rank_m;
    tile.n = column * p.cluster_n + rank_n;
    tile.piece = tile.n * (BLOCK_N / 16) - max(0, tile.n - p.num_wide);
    return tile;
}

/* silu(gate) in fp32: gate / (1 + e^-gate), infinities and NaN included. Below -87.33 it is -0
 * instead of at most 1.03e-36, as the reciprocal is no normal number there. Scaling it would be a
 * multiplication more: at the power limit each instruction here is time (docs/kernels.md). */
__device__ __forceinline__ float swish(float gate)
{
    return gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.44269504f));
}

/* One formula for all kernels: with the order of k, which is theirs in common too, it gives a row
 * the same bits in every tile shape. */
__device__ __forceinline__ float swiglu(float gate, float up)
{
    return swish(gate) * up;
}

/* Asks for one k-block of B: this CTA's slice, sent to the CTAs in `mask`. */
template <int FORM, int BLOCK_N>
__device__ __forceinline__ void load_b(const struct gemm_tile_params &p, uint32_t b_block,
                                       uint32_t barrier, int k, int tile_piece, int first_piece,
                                       uint16_t mask)
{
    constexpr int PIECE_BYTES = 16 * ROW_BYTES;
    const int piece = tile_piece + first_piece;
    if constexpr (is_pair(FORM)) {
        const uint32_t b = b_block + first_piece * PIECE_BYTES;
        if (p.cluster_m > 1)
            tensor_load_4d_multicast(b, &p.b, barrier, k, piece, mask);
        else
            tensor_load_4d(b, &p.b, barrier, k, piece);
    } else if constexpr (FORM == plain) {
        const uint32_t b = b_block + first_piece * PIECE_BYTES;
        if (p.cluster_m > 1)
            tensor_load_2d_multicast(b, &p.b, barrier, k, piece * 16, mask);
        else
            tensor_load_2d(b, &p.b, barrier, k, piece * 16);
    } else {
        /* Gate rows fill the first half of the B block, up rows the second. */
        const uint32_t b = b_block + first_piece * (PIECE_BYTES / 2);
        const uint32_t up = b + BLOCK_N / 2 * ROW_BYTES;
        if (p.cluster_m > 1) {
            tensor_load_2d_multicast(b, &p.b, barrier, k, piece * 8, mask);
            tensor_load_2d_multicast(up, &p.up, barrier, k, piece * 8, mask);
        } else {
            tensor_load_2d(b, &p.b, barrier, k, piece * 8);
            tensor_load_2d(up, &p.up, barrier, k, piece * 8);
        }
    }
}

/* Asks for one k-block of A: the rows from `first_row` of its block on, this CTA's slice. */
__device__ __forceinline__ void load_a(const struct gemm_tile_params &p, uint32_t a_block,
                                       uint32_t barrier, int k, int row, int first_row,
                                       uint16_t mask)
{
    const uint32_t a = a_block + first_row * ROW_BYTES;
    if (p.cluster_n > 1)
        tensor_load_2d_multicast(a, &p.a, barrier, k, row, mask);
    else
        tensor_load_2d(a, &p.a, barrier, k, row);
}

/* Of what the CTAs of a cluster share each loads a slice and sends it to all: `slice` pieces of 16
 * rows of B, the last slices overlapping where the pieces do not divide (the same bytes are then
 * written twice). */
struct cluster_share {
    int slice, first_piece;
    int a_first; /* row of the A block */
    uint16_t b_mask, a_mask;
};

template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ cluster_share share_of(const struct gemm_tile_params &p, int rank_m,
                                                  int rank_n)
{
    struct cluster_share share;
    share.slice = (BLOCK_N / 16 + p.cluster_m - 1) / p.cluster_m;
    share.first_piece = min(rank_m * share.slice, BLOCK_N / 16 - share.slice);
    share.a_first = rank_n * (BLOCK_M / p.cluster_n);
    share.b_mask = ((1 << p.cluster_m) - 1) << (rank_n * p.cluster_m);
    share.a_mask = (p.cluster_n == 1 ? 1 : p.cluster_n == 4 ? 15 : 1 | 1 << p.cluster_m) << rank_m;
    return share;
}

/* Brings the k-blocks of all tiles of this CTA, one stage after another. */
template <int FORM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void produce(const struct gemm_tile_params &p, uint32_t stages,
                                        int rank_m, int rank_n, int first_block, int block_step)
{
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const struct cluster_share share = share_of<BLOCK_M, BLOCK_N>(p, rank_m, rank_n);
    const uint32_t bytes = A_BYTES + p.cluster_m * share.slice * 16 * ROW_BYTES;
    const int num_blocks = p.num_blocks_m * p.num_blocks_n;
    int k_block = 0;

    /* Weights need not wait for the previous grid to end. */
    if (p.weights_settled != 0 && first_block < num_blocks) {
        const tile_position tile = tile_at<BLOCK_N>(p, first_block, rank_m, rank_n);
        const int early = min(min(NUM_STAGES, p.num_early), p.num_k_blocks);
#pragma unroll 1
        for (; k_block < early; k_block++) {
            const uint32_t barrier = stages + FULL + 8 * k_block;
            mbarrier_expect_bytes(barrier, bytes);
            load_b<FORM, BLOCK_N>(p, stages + k_block * STAGE_BYTES + A_BYTES, barrier,
                                  k_block * GEMM_TILE_BLOCK_K, tile.piece, share.first_piece,
                                  share.b_mask);
        }
        grid_wait_for_previous();
#pragma unroll 1
        for (int i = 0; i < early; i++)
            load_a(p, stages + i * STAGE_BYTES, stages + FULL + 8 * i, i * GEMM_TILE_BLOCK_K,
                   tile.m * BLOCK_M + share.a_first, share.a_first, share.a_mask);
    } else {
        grid_wait_for_previous();
    }

    uint32_t stage = k_block % NUM_STAGES;
    uint32_t parity = 1 ^ k_block / NUM_STAGES;
    for (int block = first_block; block < num_blocks; block += block_step) {
        const tile_position tile = tile_at<BLOCK_N>(p, block, rank_m, rank_n);
#pragma unroll 1
        for (; k_block < p.num_k_blocks; k_block++) {
            const uint32_t barrier = stages + FULL + 8 * stage;
            const uint32_t a = stages + stage * STAGE_BYTES;
            mbarrier_wait(barrier + 8 * NUM_STAGES, parity);
            mbarrier_expect_bytes(barrier, bytes);
            load_a(p, a, barrier, k_block * GEMM_TILE_BLOCK_K, tile.m * BLOCK_M + share.a_first,
                   share.a_first, share.a_mask);
            load_b<FORM, BLOCK_N>(p, a + A_BYTES, barrier, k_block * GEMM_TILE_BLOCK_K, tile.piece,
                                  share.first_piece, share.b_mask);
            if (++stage == NUM_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        k_block = 0;
    }
}

/* Where lane (l % 16, l / 16) of a warp writes its row of 16 bytes of the first two 8-column groups
 * of a chunk `columns` wide; group pair j is at this address XOR j * 32, or plus it where the chunk
 * is not swizzled. */
template <int COLUMNS> __device__ __forceinline__ uint32_t chunk_offset(int row, int group)
{
    if constexpr (COLUMNS == 64)
        return row * 128 + ((group ^ (row & 7)) << 4);
    else if constexpr (COLUMNS == 32)
        return row * 64 + ((group ^ (row >> 1 & 3)) << 4);
    else if constexpr (COLUMNS == 16)
        return row * 32 + ((group ^ (row >> 2 & 1)) << 4);
    else
        return row * COLUMNS * 2 + (group << 4);
}

/* Output group `group`, 8 columns of which a thread has 2, as bf16: rows[0] for row r, rows[1] for
 * row r + 8. */
template <int FORM, int HALVES, int WIDTH>
__device__ __forceinline__ void finish_group(const float (&accum)[HALVES][WIDTH], int group,
                                             bool up_first, uint32_t (&rows)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int k = (is_pair(FORM) ? 8 : 4) * group + 2 * i;
        float result[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float x = accum[0][k + j];
            if constexpr (FORM == plain) {
                result[j] = x;
            } else {
                const float y = is_pair(FORM) ? accum[0][k + 4 + j] : accum[HALVES - 1][k + j];
                const bool swapped = FORM == pair && up_first;
                result[j] = swiglu(swapped ? y : x, swapped ? x : y);
            }
        }
        rows[i] = bf16x2_round(result[0], result[1]);
    }
}

/* Adds bias[column0 + c] to column c of the accumulators of a plain tile. */
template <int WIDTH>
__device__ __forceinline__ void add_bias(float (&accum)[WIDTH], const float *bias, int column0,
                                         int num_columns)
{
    const int column = column0 + threadIdx.x % 4 * 2;
    const int columns_left = num_columns - column;
    bias += column;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float value = 2 * i + j < columns_left ? __ldg(bias + 2 * i + j) : 0.0f;
            accum[i + j] += value;
            accum[i + 2 + j] += value;
        }
    }
}

/* values[4 g + i]: row r (i / 2: r + 8) and column 8 g + threadIdx.x % 4 * 2 + i % 2 of what begins
 * at column0, a multiple of 8 like the number of columns. */
template <int COUNT>
__device__ __forceinline__ void add_gating_bias(const struct gemm_tile_params &p, const float *bias,
                                                float (&values)[COUNT], int column0)
{
    const int columns_left = p.num_columns - column0;
    bias += column0 / 8 * p.bias_group_step + threadIdx.x % 4 * 2 * p.bias_step;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const bool is_inside = 2 * i < columns_left;
        const float first = is_inside ? __ldg(bias) : 0.0f;
        const float second = is_inside ? __ldg(bias + p.bias_step) : 0.0f;
        values[i] += first;
        values[i + 1] += second;
        values[i + 2] += first;
        values[i + 3] += second;
        bias += p.bias_group_step;
    }
}

/* Output columns [FIRST + AT, FIRST + COLUMNS) of a general form, as finish_group has them: biases,
 * gating and the products, GATING_COLUMNS at a time, for more are more than registers can hold. */
template <int FORM, int FIRST, int COLUMNS, int AT, int HALVES, int WIDTH>
__device__ __forceinline__ void finish_general(const struct gemm_tile_params &p,
                                               const float (&accum)[HALVES][WIDTH], int column0,
                                               uint32_t (&rows)[COLUMNS / 8][2])
{
    constexpr int COUNT = (COLUMNS - AT < GATING_COLUMNS ? COLUMNS - AT : GATING_COLUMNS) / 2;
    const int column = column0 + FIRST + AT;
    float gate[COUNT], up[COUNT];

#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = FORM == general_pair ? FIRST + AT + i / 4 * 8 + i % 4 : (FIRST + AT) / 2 + i;
        gate[i] = accum[0][at];
        up[i] = FORM == general_pair ? accum[0][at + 4] : accum[HALVES - 1][at];
    }
    if (FORM == general_pair && p.up_first != 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float other = gate[i];
            gate[i] = up[i];
            up[i] = other;
        }
    }
    if (p.bias != nullptr)
        add_gating_bias(p, p.bias, gate, column);
    if (p.up_bias != nullptr)
        add_gating_bias(p, p.up_bias, up, column);
    round_products(p.gating, gate, up);
    apply_gating(p.gating, gate, up);
#pragma unroll
    for (int i = 0; i < COUNT; i += 2)
        rows[AT / 8 + i / 4][i / 2 % 2] = bf16x2_round(gate[i] * up[i], gate[i + 1] * up[i + 1]);
    if constexpr (AT + GATING_COLUMNS < COLUMNS)
        finish_general<FORM, FIRST, COLUMNS, AT + GATING_COLUMNS>(p, accum, column0, rows);
}

/* Columns [FIRST, FIRST + COLUMNS) of the 16 rows of a warp: registers, shared memory, copy engine.
 * Warps work alone: no barrier of the warpgroup stands in an epilogue. */
template <int FORM, int FIRST, int COLUMNS, int HALVES, int WIDTH>
__device__ __forceinline__ void write_chunk(const struct gemm_tile_params &p,
                                            const CUtensorMap *map, uint32_t slot,
                                            const float (&accum)[HALVES][WIDTH], int lane, int row0,
                                            int column0)
{
    constexpr bool SWIZZLED = COLUMNS == 64 || COLUMNS == 32 || COLUMNS == 16;
    const uint32_t address = slot + chunk_offset<COLUMNS>(lane & 15, lane >> 4);
    const bool up_first = p.up_first != 0;
    uint32_t rows[COLUMNS / 8][2]; /* of the groups of 8 columns */

    if constexpr (is_general(FORM))
        finish_general<FORM, FIRST, COLUMNS, 0>(p, accum, column0, rows);
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
        if constexpr (!is_general(FORM)) {
            finish_group<FORM>(accum, FIRST / 8 + 2 * j, up_first, rows[2 * j]);
            finish_group<FORM>(accum, FIRST / 8 + 2 * j + 1, up_first, rows[2 * j + 1]);
        }
        const uint32_t tiles[4] = {rows[2 * j][0], rows[2 * j][1], rows[2 * j + 1][0],
                                   rows[2 * j + 1][1]};
        matrix_store_x4(SWIZZLED ? address ^ j * 32 : address + j * 32, tiles);
    }
    if constexpr (COLUMNS % 16 != 0) {
        constexpr int LAST = COLUMNS / 8 - 1;
        if constexpr (!is_general(FORM))
            finish_group<FORM>(accum, FIRST / 8 + LAST, up_first, rows[LAST]);
        matrix_store_x2(slot + (lane & 15) * COLUMNS * 2 + LAST * 16, rows[LAST][0], rows[LAST][1]);
    }
    fence_to_copy_engine();
    __syncwarp();
    if (lane == 0)
        tensor_store_2d(map, slot, column0 + FIRST, row0);
}

/* Waits for a free slot of the warp; slots are used in turn. */
template <int NUM_SLOTS>
__device__ __forceinline__ uint32_t next_slot(uint32_t slots, int &turn, int lane)
{
    uint32_t slot = slots + turn * GEMM_TILE_SLOT_BYTES;
    turn = turn + 1 == NUM_SLOTS ? 0 : turn + 1;
    if (lane == 0)
        tensor_store_wait_read<NUM_SLOTS - 1>();
    __syncwarp();
    return slot;
}

template <int FORM, int NUM_SLOTS, int OUTPUTS, int CHUNK, int HALVES, int WIDTH>
__device__ __forceinline__ void write_chunks(const struct gemm_tile_params &p,
                                             const CUtensorMap *rest, uint32_t slots, int &turn,
                                             const float (&accum)[HALVES][WIDTH], int lane,
                                             int row0, int column0)
{
    constexpr int FIRST = CHUNK * CHUNK_COLUMNS;
    if constexpr (FIRST < OUTPUTS) {
        constexpr int COLUMNS = OUTPUTS - FIRST < CHUNK_COLUMNS ? OUTPUTS - FIRST : CHUNK_COLUMNS;
        const uint32_t slot = next_slot<NUM_SLOTS>(slots, turn, lane);
        write_chunk<FORM, FIRST, COLUMNS>(p, COLUMNS == CHUNK_COLUMNS ? &p.d : rest, slot, accum,
                                          lane, row0, column0);
        write_chunks<FORM, NUM_SLOTS, OUTPUTS, CHUNK + 1>(p, rest, slots, turn, accum, lane, row0,
                                                          column0);
    }
}

/* One k-block: rows [64 m, 64 m + 64) of the warpgroup's share of A by all columns of B. FIRST: the
 * accumulators begin with it. */
template <bool FIRST, int NUM_M, int HALVES, int COLUMNS, int HALF_ROWS>
__device__ __forceinline__ void multiply_block(float (&accum)[NUM_M][HALVES][COLUMNS / 2],
                                               uint32_t a, uint32_t b)
{
    const uint64_t a_descriptor = wgmma_descriptor(a);
    const uint64_t b_descriptor = wgmma_descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            wgmma<COLUMNS, FIRST>(accum[m][half], a_descriptor + m * 64 * ROW_BYTES / 16,
                                  b_descriptor + half * HALF_ROWS * ROW_BYTES / 16);
#pragma unroll
    for (int k = 1; k < GEMM_TILE_BLOCK_K / 16; k++)
#pragma unroll
        for (int m = 0; m < NUM_M; m++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                wgmma<COLUMNS, false>(accum[m][half],
                                      a_descriptor + (m * 64 * ROW_BYTES + k * 32) / 16,
                                      b_descriptor + (half * HALF_ROWS * ROW_BYTES + k * 32) / 16);
    wgmma_commit();
}

/* What a consumer knows of itself and of where it stands. */
struct consumer {
    uint32_t slots;      /* output chunks of this warp */
    uint32_t peer_empty; /* the empty barriers of the CTA that this thread tells */
    bool tells;
    int group;
    int lane;
    int first_row; /* of the tile, that this warp multiplies and writes */
    int turn;      /* slot that comes next */
};

/* SLOTS and EMPTY: where output chunks and empty barriers begin behind the first stage; group_row:
 * of the tile, that the warpgroup begins at. */
template <int SLOTS, int EMPTY, int NUM_SLOTS>
__device__ __forceinline__ consumer consumer_of(const struct gemm_tile_params &p, uint32_t stages,
                                                int group, int rank, int rank_m, int rank_n,
                                                int group_row)
{
    const int thread = threadIdx.x % THREADS_OF_GROUP;
    const int warp = thread / 32;
    struct consumer self;

    self.group = group;
    self.lane = thread % 32;
    self.first_row = group_row + warp * 16;
    self.slots = stages + SLOTS + group * NUM_SLOTS * GEMM_TILE_SLOT_BYTES +
                 warp * (GEMM_TILE_SLOT_BYTES / 4);
    self.turn = 0;
    /* Thread i tells CTA i of the cluster that a stage is free, if that CTA's copies come here. */
    self.tells = thread < p.cluster_m * p.cluster_n &&
                 (thread % p.cluster_m == rank_m || thread / p.cluster_m == rank_n);
    self.peer_empty = cluster_address(stages + EMPTY, self.tells ? thread : rank);
    return self;
}

/* All k-blocks of a product, the first of them in `stage`, the last in what `stage` is then: that
 * one stays in flight and its stage held. FULL: where the full barriers begin. */
template <int NUM_M, int HALVES, int COLUMNS, int HALF_ROWS, int A_BYTES, int STAGE_BYTES,
          int NUM_STAGES, int FULL>
__device__ __forceinline__ void multiply_blocks(const struct gemm_tile_params &p,
                                                float (&accum)[NUM_M][HALVES][COLUMNS / 2],
                                                const struct consumer &self, uint32_t stages,
                                                uint32_t a_offset, uint32_t &stage,
                                                uint32_t &parity)
{
    uint32_t held;

    mbarrier_wait(stages + FULL + 8 * stage, parity);
    multiply_block<true, NUM_M, HALVES, COLUMNS, HALF_ROWS>(
        accum, stages + stage * STAGE_BYTES + a_offset, stages + stage * STAGE_BYTES + A_BYTES);
#pragma unroll 1
    for (int k_block = 1; k_block < p.num_k_blocks; k_block++) {
        held = stage;
        if (++stage == NUM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
        mbarrier_wait(stages + FULL + 8 * stage, parity);
        multiply_block<false, NUM_M, HALVES, COLUMNS, HALF_ROWS>(
            accum, stages + stage * STAGE_BYTES + a_offset, stages + stage * STAGE_BYTES + A_BYTES);
        /* One k-block stays in flight; the one before it has been read. */
        wgmma_wait<1>();
        if (self.tells)
            mbarrier_arrive_cluster(self.peer_empty + 8 * held);
    }
}

/* One tile, WIDTH <= BLOCK_N columns of it: mainloop from k-block `position` of all that the CTA
 * computes on, then the epilogue. */
template <int FORM, int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS,
          int WIDTH>
__device__ __forceinline__ void compute_tile(const struct gemm_tile_params &p, uint32_t stages,
                                             struct consumer &self, int block, int rank_m,
                                             int rank_n, uint32_t position)
{
    constexpr int NUM_M = SCHEDULE == pingpong ? BLOCK_M / 64 : BLOCK_M / 128;
    constexpr int HALVES = is_split(FORM) ? 2 : 1;
    constexpr int COLUMNS = WIDTH / HALVES;
    constexpr int OUTPUTS = FORM == plain ? WIDTH : WIDTH / 2;
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    float accum[NUM_M][HALVES][COLUMNS / 2];
    uint32_t stage = position % NUM_STAGES;
    uint32_t parity = position / NUM_STAGES & 1;
    const uint32_t a_offset = (SCHEDULE == pingpong ? 0 : self.group * NUM_M * 64) * ROW_BYTES;

    if (SCHEDULE == pingpong)
        named_barrier_wait(BARRIER_TURN + self.group, 2 * THREADS_OF_GROUP);
    multiply_blocks<NUM_M, HALVES, COLUMNS, BLOCK_N / HALVES, A_BYTES, STAGE_BYTES, NUM_STAGES,
                    FULL>(p, accum, self, stages, a_offset, stage, parity);
    /* Found again: kept through the mainloop it would take registers from it. The tensor cores are
     * still busy here. */
    const tile_position tile = tile_at<BLOCK_N>(p, block, rank_m, rank_n);
    if (SCHEDULE == pingpong)
        named_barrier_arrive(BARRIER_TURN + 1 - self.group, 2 * THREADS_OF_GROUP);
    wgmma_wait<0>();
    if (self.tells)
        mbarrier_arrive_cluster(self.peer_empty + 8 * stage);

    /* Nothing is written, nor a bias read, before the previous grid has ended. */
    grid_wait_for_previous();
    const int column0 = tile.piece * (FORM == plain ? 16 : 8);
#pragma unroll
    for (int m = 0; m < NUM_M; m++) {
        if (FORM == plain && p.bias != nullptr)
            add_bias(accum[m][0], p.bias, column0, p.num_columns);
        write_chunks<FORM, NUM_SLOTS, OUTPUTS, 0>(
            p, WIDTH == BLOCK_N ? &p.d_rest : &p.d_rest_narrow, self.slots, self.turn, accum[m],
            self.lane, tile.m * BLOCK_M + self.first_row + m * 64, column0);
    }
}

/* All tiles of a consumer warpgroup. */
template <int FORM, int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void consume(const struct gemm_tile_params &p, uint32_t stages,
                                        int group, int rank, int rank_m, int rank_n,
                                        int first_block, int block_step)
{
    constexpr int SLOTS = NUM_STAGES * (BLOCK_M + BLOCK_N) * ROW_BYTES;
    constexpr int EMPTY = SLOTS + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES + 8 * NUM_STAGES;
    uint32_t position = 0; /* of the next k-block in all that the CTA computes */
    uint32_t position_step = p.num_k_blocks;
    struct consumer self = consumer_of<SLOTS, EMPTY, NUM_SLOTS>(
        p, stages, group, rank, rank_m, rank_n, SCHEDULE == pingpong ? 0 : group * (BLOCK_M / 2));

    if (SCHEDULE == pingpong) {
        if (group == 1) {
            named_barrier_arrive(BARRIER_TURN, 2 * THREADS_OF_GROUP);
            first_block += block_step;
            position += p.num_k_blocks;
        }
        block_step *= 2;
        position_step *= 2;
    }

    for (int block = first_block; block < p.num_blocks_m * p.num_blocks_n; block += block_step) {
        if (is_general(FORM) || tile_at<BLOCK_N>(p, block, rank_m, rank_n).n < p.num_wide)
            compute_tile<FORM, SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, BLOCK_N>(
                p, stages, self, block, rank_m, rank_n, position);
        else
            compute_tile<FORM, SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, BLOCK_N - 16>(
                p, stages, self, block, rank_m, rank_n, position);
        position += position_step;
    }
    if (self.lane == 0)
        tensor_store_wait_read<0>();
}

/* Where a CTA stands in its cluster and in the walk over the tiles. */
struct cta_place {
    uint32_t stages; /* the first one */
    int group;       /* warpgroup of this thread */
    int cluster;     /* CTAs in it */
    int rank, rank_m, rank_n;
    int first_block, block_step;
};

/* Barriers, then the cluster is met and the next grid let in. BLOCK_N:
 * rows of B in a stage; READERS: consumers of a CTA that read each stage. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int READERS>
__device__ __forceinline__ cta_place begin_cta(const struct gemm_tile_params &p)
{
    extern __shared__ unsigned char shared[];
    struct cta_place place;
    place.stages = (shared_address(shared) + SWIZZLE_ATOM_BYTES - 1) & ~(SWIZZLE_ATOM_BYTES - 1);
    const uint32_t full = place.stages + NUM_STAGES * (BLOCK_M + BLOCK_N) * ROW_BYTES +
                          2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const uint32_t empty = full + 8 * NUM_STAGES;
    place.group = threadIdx.x / THREADS_OF_GROUP;
    place.cluster = p.cluster_m * p.cluster_n;
    place.rank = cluster_cta_rank();
    place.rank_n = place.rank / p.cluster_m;
    place.rank_m = place.rank - place.rank_n * p.cluster_m;
    place.first_block = blockIdx.x / place.cluster;
    place.block_step = gridDim.x / place.cluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, (p.cluster_m + p.cluster_n - 1) * READERS);
        }
        mbarrier_init_fence();
    } else if (threadIdx.x == PRODUCER_GROUP * THREADS_OF_GROUP) {
        tensor_map_prefetch(&p.a);
        tensor_map_prefetch(&p.b);
    } else if (threadIdx.x == 32) {
        tensor_map_prefetch(&p.d);
    }
    if (place.cluster > 1)
        cluster_sync();
    else
        __syncthreads();
    grid_release_next();
    return place;
}

template <int FORM, int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void gemm_tile(const struct gemm_tile_params &p)
{
    constexpr int ACCUMULATORS =
        BLOCK_M * BLOCK_N / THREADS_OF_GROUP / (SCHEDULE == pingpong ? 1 : 2);
    static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "columns of wgmma; pairs of 8");
    static_assert(BLOCK_M % (SCHEDULE == pingpong ? 64 : 128) == 0, "rows of wgmma");
    static_assert(ACCUMULATORS <= 192, "accumulators and addresses share 232 registers");
    static_assert(GEMM_TILE_SHARED_BYTES(BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS) <=
                      GEMM_TILE_SHARED_LIMIT,
                  "shared memory of a CTA");
    const struct cta_place place = begin_cta < BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS,
                           SCHEDULE == pingpong ? 1 : 2 > (p);

    if (place.group == PRODUCER_GROUP) {
        registers_shrink<40>();
        if (threadIdx.x == PRODUCER_GROUP * THREADS_OF_GROUP)
            produce<FORM, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
                p, place.stages, place.rank_m, place.rank_n, place.first_block, place.block_step);
    } else {
        registers_grow<232>();
        consume<FORM, SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
            p, place.stages, place.group, place.rank, place.rank_m, place.rank_n, place.first_block,
            place.block_step);
    }
    /* No CTA ends while another may still write into its shared memory. */
    if (place.cluster > 1)
        cluster_sync();
}

#endif
