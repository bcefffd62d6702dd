/* SPDX-License-Identifier: Apache-2.0 */
/* The Hopper GEMM with an fp32 result, stored or added to what is there. Pipeline, schedules and
 * walk are those of gemm_tile.cuh, and so are the products: the order of k is the same, so a row
 * has the same bits in every tile shape. What differs: tiles may cover a part of K, and
 * accumulators leave as they are.
 *
 * Adding is the copy engine's: the residual is read and written once in L2, by no thread, and each
 * element is added to once in a launch, so the result does not depend on the order of tiles. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_RESIDUAL_CUH
#define IMBREX_OPS_CUDA_KERNELS_GEMM_RESIDUAL_CUH

#include "ops/cuda/kernels/gemm_residual_params.h"
#include "ops/cuda/kernels/gemm_tile.cuh"

/* k-blocks [begin, end) of a tile, and the row of tiles of A that it takes. */
struct split_position {
    int begin, end;
    int m;
};

__device__ __forceinline__ split_position split_at(const struct gemm_residual_params &p, int tile_m)
{
    split_position position = {0, p.tile.num_k_blocks, tile_m};
    if (p.num_splits > 1) {
        const int split = tile_m / p.tiles_of_split;
        position.begin = split * p.tile.num_k_blocks / p.num_splits;
        position.end = (split + 1) * p.tile.num_k_blocks / p.num_splits;
        position.m = tile_m - split * p.tiles_of_split;
    }
    return position;
}

/* As produce, over the k-blocks of each tile's split. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void produce_splits(const struct gemm_residual_params &p,
                                               uint32_t stages, int rank_m, int rank_n,
                                               int first_block, int block_step)
{
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const struct gemm_tile_params &t = p.tile;
    const int slice = (BLOCK_N / 16 + t.cluster_m - 1) / t.cluster_m;
    const int first_piece = min(rank_m * slice, BLOCK_N / 16 - slice);
    const int a_first = rank_n * (BLOCK_M / t.cluster_n);
    const uint16_t b_mask = ((1 << t.cluster_m) - 1) << (rank_n * t.cluster_m);
    const uint16_t a_mask = (t.cluster_n == 1   ? 1
                             : t.cluster_n == 4 ? 15
                                                : 1 | 1 << t.cluster_m)
                            << rank_m;
    const uint32_t bytes = A_BYTES + t.cluster_m * slice * 16 * ROW_BYTES;
    const int num_blocks = t.num_blocks_m * t.num_blocks_n;
    int early = 0;

    /* Weights need not wait for the previous grid to end. */
    if (t.weights_settled != 0 && first_block < num_blocks) {
        const tile_position tile = tile_at<BLOCK_N>(t, first_block, rank_m, rank_n);
        const split_position k = split_at(p, tile.m);
        early = min(min(NUM_STAGES, t.num_early), k.end - k.begin);
#pragma unroll 1
        for (int i = 0; i < early; i++) {
            const uint32_t barrier = stages + FULL + 8 * i;
            mbarrier_expect_bytes(barrier, bytes);
            load_b<plain, BLOCK_N>(t, stages + i * STAGE_BYTES + A_BYTES, barrier,
                                   (k.begin + i) * GEMM_TILE_BLOCK_K, tile.piece, first_piece,
                                   b_mask);
        }
        grid_wait_for_previous();
#pragma unroll 1
        for (int i = 0; i < early; i++)
            load_a(t, stages + i * STAGE_BYTES, stages + FULL + 8 * i,
                   (k.begin + i) * GEMM_TILE_BLOCK_K, k.m * BLOCK_M + a_first, a_first, a_mask);
    } else {
        grid_wait_for_previous();
    }

    uint32_t stage = early % NUM_STAGES;
    uint32_t parity = 1 ^ early / NUM_STAGES;
    for (int block = first_block; block < num_blocks; block += block_step) {
        const tile_position tile = tile_at<BLOCK_N>(t, block, rank_m, rank_n);
        const split_position k = split_at(p, tile.m);
#pragma unroll 1
        for (int k_block = k.begin + early; k_block < k.end; k_block++) {
            const uint32_t barrier = stages + FULL + 8 * stage;
            const uint32_t a = stages + stage * STAGE_BYTES;
            mbarrier_wait(barrier + 8 * NUM_STAGES, parity);
            mbarrier_expect_bytes(barrier, bytes);
            load_a(t, a, barrier, k_block * GEMM_TILE_BLOCK_K, k.m * BLOCK_M + a_first, a_first,
                   a_mask);
            load_b<plain, BLOCK_N>(t, a + A_BYTES, barrier, k_block * GEMM_TILE_BLOCK_K, tile.piece,
                                   first_piece, b_mask);
            if (++stage == NUM_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        early = 0;
    }
}

/* Columns [FIRST, FIRST + COLUMNS) of the 16 rows of a warp. Lane l has columns 2 (l % 4) and the
 * next of each group of 8, in rows l / 4 and l / 4 + 8; the XOR is the swizzle of the map. */
template <int FIRST, int COLUMNS, int WIDTH>
__device__ __forceinline__ void write_wide_chunk(const CUtensorMap *map, bool adds, uint32_t slot,
                                                 const float (&accum)[WIDTH], int lane, int row0,
                                                 int column0)
{
    constexpr int PITCH = COLUMNS * 4;
    static_assert(COLUMNS == 32 || COLUMNS == 16, "swizzles of 128 and 64 bytes");
    const int row = lane >> 2;
    const int mix = COLUMNS == 32 ? row : row >> 1 & 3;
    const uint32_t address =
        slot + row * PITCH + (((lane >> 1 & 1) ^ mix) << 4) + ((lane & 1) << 3);
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; group++) {
        const int i = (FIRST / 8 + group) * 4;
        const uint32_t place = address ^ group * 32;
        shared_store_f32x2(place, accum[i], accum[i + 1]);
        shared_store_f32x2(place + 8 * PITCH, accum[i + 2], accum[i + 3]);
    }
    fence_to_copy_engine();
    __syncwarp();
    if (lane == 0) {
        if (adds)
            tensor_add_2d(map, slot, column0 + FIRST, row0);
        else
            tensor_store_2d(map, slot, column0 + FIRST, row0);
    }
}

template <int NUM_SLOTS, int OUTPUTS, int CHUNK, int WIDTH>
__device__ __forceinline__ void write_wide_chunks(const struct gemm_residual_params &p,
                                                  uint32_t slots, int &turn,
                                                  const float (&accum)[WIDTH], int lane, int row0,
                                                  int column0)
{
    constexpr int FIRST = CHUNK * GEMM_RESIDUAL_CHUNK_COLUMNS;
    if constexpr (FIRST < OUTPUTS) {
        constexpr bool IS_WHOLE = OUTPUTS - FIRST >= GEMM_RESIDUAL_CHUNK_COLUMNS;
        constexpr int COLUMNS = IS_WHOLE ? GEMM_RESIDUAL_CHUNK_COLUMNS : OUTPUTS - FIRST;
        const uint32_t slot = next_slot<NUM_SLOTS>(slots, turn, lane);
        write_wide_chunk<FIRST, COLUMNS>(IS_WHOLE ? &p.tile.d : &p.tile.d_rest, p.adds != 0, slot,
                                         accum, lane, row0, column0);
        write_wide_chunks<NUM_SLOTS, OUTPUTS, CHUNK + 1>(p, slots, turn, accum, lane, row0,
                                                         column0);
    }
}

/* The mainloop of compute_tile, over num_k_blocks of K, and the turn passed on. */
template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int NUM_M,
          int WIDTH>
__device__ __forceinline__ void multiply_tile(float (&accum)[NUM_M][1][WIDTH], uint32_t stages,
                                              const struct consumer &self, uint32_t position,
                                              int num_k_blocks)
{
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    uint32_t stage = position % NUM_STAGES;
    uint32_t parity = position / NUM_STAGES & 1;
    uint32_t held;
    const uint32_t a_offset = (SCHEDULE == pingpong ? 0 : self.group * NUM_M * 64) * ROW_BYTES;

    if (SCHEDULE == pingpong)
        named_barrier_wait(BARRIER_TURN + self.group, 2 * THREADS_OF_GROUP);
    mbarrier_wait(stages + FULL + 8 * stage, parity);
    multiply_block<true, NUM_M, 1, 2 * WIDTH, BLOCK_N>(
        accum, stages + stage * STAGE_BYTES + a_offset, stages + stage * STAGE_BYTES + A_BYTES);
#pragma unroll 1
    for (int k_block = 1; k_block < num_k_blocks; k_block++) {
        held = stage;
        if (++stage == NUM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
        mbarrier_wait(stages + FULL + 8 * stage, parity);
        multiply_block<false, NUM_M, 1, 2 * WIDTH, BLOCK_N>(
            accum, stages + stage * STAGE_BYTES + a_offset, stages + stage * STAGE_BYTES + A_BYTES);
        wgmma_wait<1>();
        if (self.tells)
            mbarrier_arrive_cluster(self.peer_empty + 8 * held);
    }
    if (SCHEDULE == pingpong)
        named_barrier_arrive(BARRIER_TURN + 1 - self.group, 2 * THREADS_OF_GROUP);
    wgmma_wait<0>();
    if (self.tells)
        mbarrier_arrive_cluster(self.peer_empty + 8 * stage);
}

/* As compute_tile, over num_k_blocks of K. */
template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int WIDTH>
__device__ __forceinline__ void compute_wide_tile(const struct gemm_residual_params &p,
                                                  uint32_t stages, struct consumer &self, int block,
                                                  int rank_m, int rank_n, uint32_t position,
                                                  int num_k_blocks)
{
    constexpr int NUM_M = SCHEDULE == pingpong ? BLOCK_M / 64 : BLOCK_M / 128;
    float accum[NUM_M][1][WIDTH / 2];

    multiply_tile<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(accum, stages, self, position,
                                                                     num_k_blocks);
    /* Found again: kept through the mainloop it would take registers from it. */
    const tile_position tile = tile_at<BLOCK_N>(p.tile, block, rank_m, rank_n);
    /* Nothing is written, nor a bias read, before the previous grid has ended. */
    grid_wait_for_previous();
    const int column0 = tile.piece * 16;
#pragma unroll
    for (int m = 0; m < NUM_M; m++) {
        if (p.tile.bias != nullptr)
            add_bias(accum[m][0], p.tile.bias, column0, p.tile.num_columns);
        write_wide_chunks<NUM_SLOTS, WIDTH, 0>(p, self.slots, self.turn, accum[m][0], self.lane,
                                               tile.m * BLOCK_M + self.first_row + m * 64, column0);
    }
}

/* What a consumer begins with, and the first turn. */
template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ consumer consumer_begin(const struct gemm_tile_params &p,
                                                   uint32_t stages, int group, int rank, int rank_m,
                                                   int rank_n)
{
    constexpr int SLOTS = NUM_STAGES * (BLOCK_M + BLOCK_N) * ROW_BYTES;
    constexpr int EMPTY = SLOTS + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES + 8 * NUM_STAGES;
    const int thread = threadIdx.x % THREADS_OF_GROUP;
    const int warp = thread / 32;
    struct consumer self;

    self.group = group;
    self.lane = thread % 32;
    self.first_row = (SCHEDULE == pingpong ? 0 : group * (BLOCK_M / 2)) + warp * 16;
    self.slots = stages + SLOTS + group * NUM_SLOTS * GEMM_TILE_SLOT_BYTES +
                 warp * (GEMM_TILE_SLOT_BYTES / 4);
    self.turn = 0;
    self.tells = thread < p.cluster_m * p.cluster_n &&
                 (thread % p.cluster_m == rank_m || thread / p.cluster_m == rank_n);
    self.peer_empty = cluster_address(stages + EMPTY, self.tells ? thread : rank);
    if (SCHEDULE == pingpong && group == 1)
        named_barrier_arrive(BARRIER_TURN, 2 * THREADS_OF_GROUP);
    return self;
}

/* As consume; a tile's k-blocks are counted one tile after another, since splits differ by one. */
template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void consume_splits(const struct gemm_residual_params &p,
                                               uint32_t stages, int group, int rank, int rank_m,
                                               int rank_n, int first_block, int block_step)
{
    const int num_blocks = p.tile.num_blocks_m * p.tile.num_blocks_n;
    uint32_t position = 0; /* of the next k-block in all that the CTA computes */
    bool is_mine = SCHEDULE == cooperative || group == 0;
    struct consumer self = consumer_begin<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
        p.tile, stages, group, rank, rank_m, rank_n);

#pragma unroll 1
    for (int block = first_block; block < num_blocks; block += block_step) {
        const tile_position tile = tile_at<BLOCK_N>(p.tile, block, rank_m, rank_n);
        const split_position k = split_at(p, tile.m);
        const int num_k_blocks = k.end - k.begin;
        if (is_mine) {
            if (tile.n < p.tile.num_wide)
                compute_wide_tile<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, BLOCK_N>(
                    p, stages, self, block, rank_m, rank_n, position, num_k_blocks);
            else
                compute_wide_tile<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, BLOCK_N - 16>(
                    p, stages, self, block, rank_m, rank_n, position, num_k_blocks);
        }
        position += num_k_blocks;
        is_mine = SCHEDULE == cooperative || !is_mine;
    }
    if (self.lane == 0)
        tensor_store_wait_read<0>();
}

/* What gemm_tile does ahead of its roles. */
template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ cta_place cta_begin(const struct gemm_tile_params &p)
{
    static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "columns of wgmma");
    static_assert(BLOCK_M % (SCHEDULE == pingpong ? 64 : 128) == 0, "rows of wgmma");
    static_assert(GEMM_TILE_SHARED_BYTES(BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS) <=
                      GEMM_TILE_SHARED_LIMIT,
                  "shared memory of a CTA");
    extern __shared__ unsigned char shared[];
    struct cta_place place;
    place.cluster = p.cluster_m * p.cluster_n;
    place.stages = (shared_address(shared) + SWIZZLE_ATOM_BYTES - 1) & ~(SWIZZLE_ATOM_BYTES - 1);
    place.group = threadIdx.x / THREADS_OF_GROUP;
    place.rank = cluster_cta_rank();
    place.rank_n = place.rank / p.cluster_m;
    place.rank_m = place.rank - place.rank_n * p.cluster_m;
    place.first_block = blockIdx.x / place.cluster;
    place.block_step = gridDim.x / place.cluster;

    const uint32_t full = place.stages + NUM_STAGES * (BLOCK_M + BLOCK_N) * ROW_BYTES +
                          2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const uint32_t empty = full + 8 * NUM_STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i,
                          (p.cluster_m + p.cluster_n - 1) * (SCHEDULE == pingpong ? 1 : 2));
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

template <int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
__device__ __forceinline__ void gemm_residual(const struct gemm_residual_params &p)
{
    const cta_place cta = cta_begin<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(p.tile);

    if (cta.group == PRODUCER_GROUP) {
        registers_shrink<40>();
        if (threadIdx.x == PRODUCER_GROUP * THREADS_OF_GROUP)
            produce_splits<BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
                p, cta.stages, cta.rank_m, cta.rank_n, cta.first_block, cta.block_step);
    } else {
        registers_grow<232>();
        consume_splits<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
            p, cta.stages, cta.group, cta.rank, cta.rank_m, cta.rank_n, cta.first_block,
            cta.block_step);
    }
    /* No CTA ends while another may still write into its shared memory. */
    if (p.tile.cluster_m * p.tile.cluster_n > 1)
        cluster_sync();
}

#endif
