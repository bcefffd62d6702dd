/* SPDX-License-Identifier: Apache-2.0 */
/* The GEMM for q, k and v: heads are normalised and rotated in the accumulators. A head's columns
 * lie in one tile, and columns i and i + head_dim / 2 of a row in one thread, so that RoPE needs no
 * exchange; a head's norm is a sum over four lanes. */
#include "ops/cuda/kernels/gemm_qkv_params.h"
#include "ops/cuda/kernels/gemm_residual.cuh"

/* Normalises the heads of 16 rows that have a norm. Lane l has columns 2 (l % 4) and the next of
 * each group of 8, in rows l / 4 and l / 4 + 8. */
template <int HEAD_DIM, int WIDTH>
static __device__ __forceinline__ void normalize_heads(const struct gemm_qkv_params &p,
                                                       float (&accum)[WIDTH], int lane, int column0)
{
    constexpr int GROUPS = HEAD_DIM / 8;
#pragma unroll
    for (int head = 0; head < 2 * WIDTH / HEAD_DIM; head++) {
        const int column = column0 + head * HEAD_DIM;
        const float *norm = column < p.q_columns         ? p.q_norm
                            : column < p.rotated_columns ? p.k_norm
                                                         : nullptr;
        if (norm == nullptr)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0.0f;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int i = (head * GROUPS + group) * 4 + half * 2;
                sum += accum[i] * accum[i] + accum[i + 1] * accum[i + 1];
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            const float scale = 1.0f / sqrtf(sum / (float)HEAD_DIM + p.norm_eps);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int i = (head * GROUPS + group) * 4 + half * 2;
                const float2 weight = *(const float2 *)(norm + group * 8 + lane % 4 * 2);
                accum[i] *= scale * weight.x;
                accum[i + 1] *= scale * weight.y;
            }
        }
    }
}

static __device__ __forceinline__ void turn(float &x, float &y, float cosine, float sine)
{
    const float turned = x * cosine - y * sine;
    y = y * cosine + x * sine;
    x = turned;
}

/* Rotates the heads of q and k of 16 rows, a lane's two at positions[0] and positions[1]. */
template <int HEAD_DIM, int WIDTH>
static __device__ __forceinline__ void rotate_heads(const struct gemm_qkv_params &p,
                                                    float (&accum)[WIDTH],
                                                    const int32_t (&positions)[2], int lane,
                                                    int column0)
{
    constexpr int GROUPS = HEAD_DIM / 8;
    constexpr int HEADS = 2 * WIDTH / HEAD_DIM;
    if (column0 >= p.rotated_columns)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *cosines = p.cos_sin + (int64_t)positions[half] * HEAD_DIM;
        const float *sines = cosines + HEAD_DIM / 2;
        if (p.is_interleaved != 0) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float cosine = cosines[group * 4 + lane % 4];
                const float sine = sines[group * 4 + lane % 4];
#pragma unroll
                for (int head = 0; head < HEADS; head++) {
                    const int i = (head * GROUPS + group) * 4 + half * 2;
                    if (column0 + head * HEAD_DIM < p.rotated_columns)
                        turn(accum[i], accum[i + 1], cosine, sine);
                }
            }
        } else {
            /* All are on their way before the first is used. */
            float2 cosine[GROUPS / 2], sine[GROUPS / 2];
#pragma unroll
            for (int group = 0; group < GROUPS / 2; group++) {
                cosine[group] = *(const float2 *)(cosines + group * 8 + lane % 4 * 2);
                sine[group] = *(const float2 *)(sines + group * 8 + lane % 4 * 2);
            }
#pragma unroll
            for (int head = 0; head < HEADS; head++) {
                if (column0 + head * HEAD_DIM >= p.rotated_columns)
                    continue;
#pragma unroll
                for (int group = 0; group < GROUPS / 2; group++) {
                    const int i = (head * GROUPS + group) * 4 + half * 2;
                    turn(accum[i], accum[i + GROUPS * 2], cosine[group].x, sine[group].x);
                    turn(accum[i + 1], accum[i + GROUPS * 2 + 1], cosine[group].y, sine[group].y);
                }
            }
        }
    }
}

/* Columns [FIRST, FIRST + 64) of 16 rows, of one head of k or v, into the cache: through shared
 * memory, so that a row's 128 bytes are stored together. places: slots of rows lane / 8 + 4 i. */
template <int HEAD_DIM, int FIRST, int WIDTH>
static __device__ __forceinline__ void store_cached(const struct gemm_qkv_params &p, uint32_t slot,
                                                    const float (&accum)[1][WIDTH],
                                                    const int32_t (&places)[4], int lane,
                                                    int column0)
{
    const uint32_t address = slot + chunk_offset<CHUNK_COLUMNS>(lane & 15, lane >> 4);
#pragma unroll
    for (int j = 0; j < CHUNK_COLUMNS / 16; j++) {
        uint32_t first[2], second[2];
        finish_group<plain>(accum, FIRST / 8 + 2 * j, false, first);
        finish_group<plain>(accum, FIRST / 8 + 2 * j + 1, false, second);
        const uint32_t tiles[4] = {first[0], first[1], second[0], second[1]};
        matrix_store_x4(address ^ j * 32, tiles);
    }
    __syncwarp();

    /* k heads, then v heads: as they lie in a layer of a block. */
    const int column = column0 + FIRST - p.q_columns;
    const int64_t head_bytes = (int64_t)p.block_size * HEAD_DIM * 2;
    unsigned char *const layer = p.blocks + p.layer_offset + column / HEAD_DIM * head_bytes +
                                 column % HEAD_DIM * 2 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 4 + lane / 8;
        const uint4 bits = shared_load_16(slot + row * 128 + ((lane % 8 ^ (row & 7)) << 4));
        if (places[i] >= 0) {
            const int32_t block = places[i] / p.block_size;
            *(uint4 *)(layer + block * p.block_bytes +
                       (places[i] - block * p.block_size) * (HEAD_DIM * 2)) = bits;
        }
    }
    __syncwarp();
    if (lane == 0)
        tensor_store_none();
}

template <int HEAD_DIM, int NUM_SLOTS, int CHUNK, int WIDTH>
static __device__ __forceinline__ void write_heads(const struct gemm_qkv_params &p, uint32_t slots,
                                                   int &turn_idx, const float (&accum)[1][WIDTH],
                                                   const int32_t (&places)[4], int lane, int row0,
                                                   int column0)
{
    constexpr int FIRST = CHUNK * CHUNK_COLUMNS;
    if constexpr (FIRST < 2 * WIDTH) {
        if (column0 + FIRST < p.tile.num_columns) {
            const uint32_t slot = next_slot<NUM_SLOTS>(slots, turn_idx, lane);
            if (column0 + FIRST < p.q_columns)
                write_chunk<plain, FIRST, CHUNK_COLUMNS>(p.tile, &p.tile.d, slot, accum, lane, row0,
                                                         column0);
            else
                store_cached<HEAD_DIM, FIRST>(p, slot, accum, places, lane, column0);
        }
        write_heads<HEAD_DIM, NUM_SLOTS, CHUNK + 1>(p, slots, turn_idx, accum, places, lane, row0,
                                                    column0);
    }
}

template <int HEAD_DIM, int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
static __device__ __forceinline__ void consume_heads(const struct gemm_qkv_params &p,
                                                     const struct cta_place &cta)
{
    constexpr int NUM_M = SCHEDULE == pingpong ? BLOCK_M / 64 : BLOCK_M / 128;
    const int num_blocks = p.tile.num_blocks_m * p.tile.num_blocks_n;
    const int skipped = SCHEDULE == pingpong ? cta.group : 0;
    const int pace = SCHEDULE == pingpong ? 2 : 1;
    uint32_t position = skipped * p.tile.num_k_blocks;
    struct consumer self = consumer_begin<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
        p.tile, cta.stages, cta.group, cta.rank, cta.rank_m, cta.rank_n);

    /* The products wait for the previous grid anyway. */
    grid_wait_for_previous();
#pragma unroll 1
    for (int block = cta.first_block + skipped * cta.block_step; block < num_blocks;
         block += pace * cta.block_step) {
        float accum[NUM_M][1][BLOCK_N / 2];
        /* What the epilogue would wait for. Rows beyond the last are computed and not stored. */
        int32_t positions[NUM_M][2];
        const int rows =
            tile_at<BLOCK_N>(p.tile, block, cta.rank_m, cta.rank_n).m * BLOCK_M + self.first_row;
#pragma unroll
        for (int i = 0; i < 2 * NUM_M; i++)
            positions[i / 2][i % 2] =
                p.positions[min(rows + i / 2 * 64 + i % 2 * 8 + self.lane / 4, p.num_rows - 1)];

        multiply_tile<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
            accum, cta.stages, self, position, p.tile.num_k_blocks);
        position += pace * p.tile.num_k_blocks;
        const tile_position tile = tile_at<BLOCK_N>(p.tile, block, cta.rank_m, cta.rank_n);
        const int column0 = tile.n * BLOCK_N;
        const int row0 = tile.m * BLOCK_M + self.first_row;
        int32_t places[NUM_M][4];
#pragma unroll
        for (int i = 0; i < 4 * NUM_M; i++) {
            const int row = row0 + i / 4 * 64 + i % 4 * 4 + self.lane / 8;
            places[i / 4][i % 4] =
                column0 + BLOCK_N > p.q_columns && row < p.num_rows ? p.slot_mapping[row] : -1;
        }
#pragma unroll
        for (int m = 0; m < NUM_M; m++) {
            if (p.tile.bias != nullptr)
                add_bias(accum[m][0], p.tile.bias, column0, p.tile.num_columns);
            if (p.q_norm != nullptr || p.k_norm != nullptr)
                normalize_heads<HEAD_DIM>(p, accum[m][0], self.lane, column0);
            rotate_heads<HEAD_DIM>(p, accum[m][0], positions[m], self.lane, column0);
        }
#pragma unroll
        for (int m = 0; m < NUM_M; m++)
            write_heads<HEAD_DIM, NUM_SLOTS, 0>(p, self.slots, self.turn, accum[m], places[m],
                                                self.lane, row0 + m * 64, column0);
    }
    if (self.lane == 0)
        tensor_store_wait_read<0>();
}

template <int HEAD_DIM, int SCHEDULE, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS>
static __device__ __forceinline__ void gemm_qkv(const struct gemm_qkv_params &p)
{
    static_assert(BLOCK_N % HEAD_DIM == 0, "whole heads in a tile");
    const cta_place cta = cta_begin<SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(p.tile);

    if (cta.group == PRODUCER_GROUP) {
        registers_shrink<40>();
        if (threadIdx.x == PRODUCER_GROUP * THREADS_OF_GROUP)
            produce<plain, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(
                p.tile, cta.stages, cta.rank_m, cta.rank_n, cta.first_block, cta.block_step);
    } else {
        registers_grow<232>();
        consume_heads<HEAD_DIM, SCHEDULE, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS>(p, cta);
    }
    /* No CTA ends while another may still write into its shared memory. */
    if (p.tile.cluster_m * p.tile.cluster_n > 1)
        cluster_sync();
}

#define KERNEL(with, head_dim, schedule, block_m, block_n, num_stages, num_slots)      \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)                 \
        gemm_qkv_bf16_sm90_head##head_dim##_##schedule##_##block_m##x##block_n(        \
            const __grid_constant__ struct gemm_qkv_params params)                     \
    {                                                                                  \
        gemm_qkv<head_dim, schedule, block_m, block_n, num_stages, num_slots>(params); \
    }
GEMM_QKV_VARIANTS(KERNEL, )
