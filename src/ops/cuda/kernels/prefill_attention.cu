/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of many tokens of a sequence over the paged cache, on the tensor cores of Hopper. A CTA
 * has a tile of rows (prefill_attention_params.h) and walks the keys in tiles of 128, which begin
 * at multiples of 128 from key 0. Warpgroup 0, the producer, is one warp that asks the copy engine
 * for the 8 cache blocks of each tile; each other warpgroup, a consumer, has 64 of the rows:
 *
 *   S = Q · Kᵀ of tile j, and beside it O += P · V of tile j - 1, on the tensor cores
 *   P = exp2(S - max), the row sums, O scaled to the new max, while others have the tensor cores
 *
 *   consumer 0  | S 1, PV 0 | softmax 1 | S 2, PV 1 | softmax 2 |
 *   consumer 1  | softmax 0 | S 1, PV 0 | softmax 1 | S 2, PV 1 | softmax 2 |
 *
 * The technique is FlashAttention-3's (arXiv 2407.08608).
 *
 * What a row adds up in which order follows from its position alone: a tile in which all its keys
 * are masked changes nothing (max as before, O times exactly 1, P exactly 0), so it does not matter
 * which rows share its tile, nor how the prompt was cut.
 *
 * Of a cache of 8-bit elements with scales, all four warps of the producer have blocks of their own
 * to bring: each asks the copy engine for them as they are, several tiles ahead, widens those that
 * have come to bf16, scale and all, rounded once, and stores them where boxes of bf16 would have
 * come. Consumers do not know the difference, and the bits are those of a bf16 cache that holds the
 * rounded elements.
 *
 *   copies    K 0 V 0 K 1 | V 1 | K 2 | V 2 ...
 *   widen                 | K 0 | V 0 | K 1 ...
 *
 * Shared memory: Q [consumers][panels][64 rows], K and V [stages][panels][128 keys], a panel being
 * 64 columns in rows of 128 bytes, swizzled; then the barriers; then what the producer's warps have
 * yet to widen, and its barriers. K and V of a tile each have their own full and empty barrier. */
#include "ops/cuda/kernels/kv_elements.cuh"
#include "ops/cuda/kernels/prefill_attention_params.h"
#include "ops/cuda/kernels/ptx_attention.cuh"

enum {
    THREADS_OF_GROUP = 128,
    GROUP_ROWS = 64, /* of a consumer */
    TILE_KEYS = PREFILL_TILE_KEYS,
    BLOCKS_OF_TILE = TILE_KEYS / PREFILL_BLOCK_SIZE,
    PANEL_COLUMNS = 64,
    ROW_BYTES = PANEL_COLUMNS * 2,
    SWIZZLE_ATOM_BYTES = 1024, /* 8 rows of 128 bytes */
    Q_PANEL_BYTES = GROUP_ROWS * ROW_BYTES,
    KV_PANEL_BYTES = TILE_KEYS * ROW_BYTES,
    BOX_BYTES = PREFILL_BLOCK_SIZE * ROW_BYTES,
};

/* Named barriers; 0 is that of __syncthreads. */
enum { BARRIER_TURN = 1, BARRIER_GROUP = 5 };

#define MINUS_INFINITY __int_as_float(0xff800000)

/* The work of a CTA. */
struct prefill_tile {
    int seq, kv_head;
    int token_begin;    /* first token of the sequence in the step */
    int first_row;      /* of the tile, among the rows of the sequence */
    int num_rows;       /* of the sequence */
    int first_position; /* of the sequence's first token in the step */
    int num_keys;       /* of the sequence */
    int key_tile_begin, key_tile_end;
};

/* Tiles of a sequence with num_tokens tokens in the step. */
template <int ROWS>
__device__ __forceinline__ int tiles_of(const struct prefill_attention_params &p, int num_tokens)
{
    return num_tokens < p.min_query ? 0 : (num_tokens * p.group_heads + ROWS - 1) / ROWS;
}

/* Finds tile `idx` in the row of all tiles, which has the sequences one after the other and of each
 * the last tile, which has most keys, first. The same in all lanes of a warp. False: there are
 * fewer tiles. */
template <int ROWS>
__device__ __forceinline__ bool find_tile(const struct prefill_attention_params &p, int idx,
                                          struct prefill_tile &tile)
{
    const int lane = threadIdx.x % 32;
    int tiles_before = 0;

    for (int first_seq = 0; first_seq < p.num_seqs; first_seq += 32) {
        const int seq = first_seq + lane;
        int begin = 0, num_tokens = 0;
        if (seq < p.num_seqs) {
            begin = p.query_begin[seq];
            num_tokens = p.query_begin[seq + 1] - begin;
        }
        const int num_tiles = tiles_of<ROWS>(p, num_tokens);
        int end = num_tiles;
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, end, step);
            end += lane >= step ? before : 0;
        }
        end += tiles_before;
        const unsigned found = __ballot_sync(~0u, end > idx);
        if (found != 0) {
            const int owner = __ffs(found) - 1;
            tile.seq = first_seq + owner;
            tile.token_begin = __shfl_sync(~0u, begin, owner);
            tile.num_rows = __shfl_sync(~0u, num_tokens, owner) * p.group_heads;
            tile.first_row = (__shfl_sync(~0u, end, owner) - 1 - idx) * ROWS;
            return true;
        }
        tiles_before = __shfl_sync(~0u, end, 31);
    }
    return false;
}

/* Position of a row; of rows beyond the sequence's that of its last. */
__device__ __forceinline__ int position_of(const struct prefill_attention_params &p,
                                           const struct prefill_tile &tile, int row)
{
    return tile.first_position + min(row, tile.num_rows - 1) / p.group_heads;
}

template <int ROWS>
__device__ __forceinline__ bool start_tile(const struct prefill_attention_params &p,
                                           struct prefill_tile &tile)
{
    const int num_slots = gridDim.x / p.num_kv_heads;
    const int head_in_turn = blockIdx.x / num_slots;
    const int beside = blockIdx.x / p.num_kv_heads;

    tile.kv_head = p.heads_in_turn ? head_in_turn : blockIdx.x - beside * p.num_kv_heads;
    if (!find_tile<ROWS>(p, p.heads_in_turn ? blockIdx.x - head_in_turn * num_slots : beside, tile))
        return false;
    tile.first_position = p.positions[tile.token_begin];
    tile.num_keys = p.seq_lens[tile.seq];
    const int first_key = position_of(p, tile, tile.first_row) - p.window + 1;
    const int end_key = min(position_of(p, tile, tile.first_row + ROWS - 1) + 1, tile.num_keys);
    tile.key_tile_begin = max(first_key, 0) / TILE_KEYS;
    tile.key_tile_end = (end_key + TILE_KEYS - 1) / TILE_KEYS;
    return true;
}

/* ---- producer ------------------------------------------------------------------------------- */

/* Where stage i % STAGES of K or of V is, and whose turn it is there. */
template <int STAGES> struct ring {
    uint32_t stages, full, empty; /* shared addresses */
};

/* What a lane of the producer loads: of a block of the tile one panel. */
template <int HEAD_DIM, int STAGES>
__device__ __forceinline__ void load_tile(const struct prefill_attention_params &p,
                                          const ring<STAGES> &ring, int i, int plane, int block_idx,
                                          int num_boxes, uint32_t full)
{
    constexpr int PANELS = HEAD_DIM / PANEL_COLUMNS;
    const int lane = threadIdx.x % 32;
    const int stage = i % STAGES;
    const int block = lane / PANELS, panel = lane % PANELS;

    if (i >= STAGES)
        mbarrier_wait(ring.empty + 8 * stage, i / STAGES - 1 & 1);
    if (lane == 0)
        mbarrier_expect_bytes(full, num_boxes * BOX_BYTES);
    __syncwarp();
    if (lane < num_boxes)
        tensor_load_box_4d(ring.stages + (stage * PANELS + panel) * KV_PANEL_BYTES +
                               block * BOX_BYTES,
                           &p.kv, full, panel * PANEL_COLUMNS, 0, plane, block_idx);
}

/* Zero times what lies behind the last key (nothing was stored there, or it was not even loaded)
 * must be zero. */
template <int HEAD_DIM> __device__ __forceinline__ void clear_rows(uint32_t values, int first_row)
{
    const int lane = threadIdx.x % 32;
    for (int panel = 0; panel < HEAD_DIM / PANEL_COLUMNS; panel++)
        for (int at = first_row * ROW_BYTES + lane * 16; at < KV_PANEL_BYTES; at += 32 * 16)
            shared_store(values + panel * KV_PANEL_BYTES + at, make_uint4(0, 0, 0, 0));
}

template <int HEAD_DIM, int STAGES>
__device__ __forceinline__ void produce(const struct prefill_attention_params &p,
                                        const struct prefill_tile &tile, const ring<STAGES> &keys,
                                        const ring<STAGES> &values, uint32_t landed)
{
    constexpr int PANELS = HEAD_DIM / PANEL_COLUMNS;
    const int lane = threadIdx.x % 32;
    const int num_blocks = (tile.num_keys + PREFILL_BLOCK_SIZE - 1) / PREFILL_BLOCK_SIZE;
    const int k_plane = p.k_plane + tile.kv_head, v_plane = k_plane + p.num_kv_heads;
    const int num_tiles = tile.key_tile_end - tile.key_tile_begin;
    const int32_t *table = p.block_tables + (int64_t)tile.seq * p.max_blocks;
    int block = tile.key_tile_begin * BLOCKS_OF_TILE + lane / PANELS;
    int next = block < num_blocks ? table[block] : 0;
    int current, previous = 0;

    /* V of a tile is wanted one tile later than K. */
    for (int i = 0; i <= num_tiles; i++) {
        const int blocks_left = num_blocks - (tile.key_tile_begin + i) * BLOCKS_OF_TILE;
        current = next;
        block += BLOCKS_OF_TILE;
        next = block < num_blocks ? table[block] : 0;
        if (i < num_tiles)
            load_tile<HEAD_DIM>(p, keys, i, k_plane, current,
                                min(blocks_left, BLOCKS_OF_TILE) * PANELS,
                                keys.full + 8 * (i % STAGES));
        if (i > 0) {
            const int stage = (i - 1) % STAGES;
            const uint32_t full = values.full + 8 * stage;
            const int keys_left = tile.num_keys - (tile.key_tile_begin + i - 1) * TILE_KEYS;
            const bool is_partial = keys_left < TILE_KEYS;
            load_tile<HEAD_DIM>(p, values, i - 1, v_plane, previous,
                                min(blocks_left + BLOCKS_OF_TILE, BLOCKS_OF_TILE) * PANELS,
                                is_partial ? landed : full);
            if (is_partial) { /* the last of the sequence, so landed is used once */
                mbarrier_wait(landed, 0);
                clear_rows<HEAD_DIM>(values.stages + stage * PANELS * KV_PANEL_BYTES, keys_left);
                fence_to_copy_engine();
                __syncwarp();
                if (lane == 0)
                    mbarrier_arrive_cluster(full);
            }
        }
        previous = current;
    }
}

/* ---- producer of 8-bit elements -------------------------------------------------------------- */

enum prefill_kind { PREFILL_BF16, PREFILL_INT8, PREFILL_FP8 };

/* Four codes times their scale (of INT8 2^6 times it). */
template <int KIND>
__device__ __forceinline__ void widen_word(uint32_t codes, uint32_t scales, uint32_t &first,
                                           uint32_t &second)
{
    /* Bytes 0 and 1 are neighbours, and so must they be in bf16. */
    split_codes<KIND == PREFILL_FP8>(__byte_perm(codes, 0, 0x3120), first, second);
    if constexpr (KIND == PREFILL_FP8) {
        first = bf16x2_multiply(first, BF16X2_POWER(120));
        second = bf16x2_multiply(second, BF16X2_POWER(120));
    } else {
        first = int8_centre(first);
        second = int8_centre(second);
    }
    first = bf16x2_multiply(first, scales);
    second = bf16x2_multiply(second, scales);
}

/* A block's elements of one head, from where they were copied to a stage: rows first_row and on of
 * its tile. Rows from end_row on become zeros. Each lane takes pieces of 16 elements, in an order
 * in which eight lanes meet all banks, both where they load and where they store. */
template <int KIND, int HEAD_DIM>
__device__ __forceinline__ void widen_block(uint32_t from, uint32_t stage, int first_row,
                                            int end_row)
{
    constexpr int PIECES = HEAD_DIM / 16, GROUPS = HEAD_DIM / 32; /* of a row */
    const int lane = threadIdx.x % 32;
    const int piece = lane % PIECES;

#pragma unroll(HEAD_DIM == 64 && KIND == PREFILL_INT8 ? 1 : 4) /* few registers there */
    for (int i = 0; i < PREFILL_BLOCK_SIZE * PIECES / 32; i++) {
        /* 64 columns: rows in turn. 128: the second panel's pieces are of the other row of two. */
        const int row =
            PIECES == 4 ? i * 8 + lane / 4 : i * 4 + lane / 16 * 2 + (piece / 4 ^ lane / 8 % 2);
        const int tile_row = first_row + row;
        const uint4 codes = shared_load_16(from + row * HEAD_DIM + piece * 16);
        uint32_t scale =
            shared_load_2(from + PREFILL_BLOCK_SIZE * HEAD_DIM + (row * GROUPS + piece / 2) * 2);
        const uint32_t place = stage + piece / 4 * KV_PANEL_BYTES + tile_row * ROW_BYTES;
        scale = tile_row < end_row ? scale | scale << 16 : 0;
        if constexpr (KIND == PREFILL_INT8)
            scale = bf16x2_multiply(scale, BF16X2_POWER(6));
        uint4 wide;
        widen_word<KIND>(codes.x, scale, wide.x, wide.y);
        widen_word<KIND>(codes.y, scale, wide.z, wide.w);
        shared_store(place + ((piece % 4 * 2 ^ row % 8) << 4), wide);
        widen_word<KIND>(codes.z, scale, wide.x, wide.y);
        widen_word<KIND>(codes.w, scale, wide.z, wide.w);
        shared_store(place + ((piece % 4 * 2 + 1 ^ row % 8) << 4), wide);
    }
}

/* Of the tiles of a warp, K and V in turn: load 2 i is K of tile i, load 2 i + 1 its V. */
template <int HEAD_DIM, int SLOTS> struct raw_ring {
    uint32_t slots, full; /* shared addresses, of this warp */
    int entry;            /* lane l: of the table, block l % 2 of this warp in tile l / 2 of 16 */
};

template <int HEAD_DIM, int SLOTS>
__device__ __forceinline__ void request_blocks(const struct prefill_attention_params &p,
                                               const struct prefill_tile &tile, int num_blocks,
                                               int load, raw_ring<HEAD_DIM, SLOTS> &raw)
{
    const int lane = threadIdx.x % 32;
    const int i = load / 2, slot = load % SLOTS;
    const int first = (tile.key_tile_begin + i) * BLOCKS_OF_TILE + threadIdx.x / 32 * 2;
    const int num_present = min(max(num_blocks - first, 0), 2);

    if (load % 32 == 0) {
        const int block = first + lane / 2 * BLOCKS_OF_TILE + lane % 2;
        raw.entry =
            block < num_blocks ? p.block_tables[(int64_t)tile.seq * p.max_blocks + block] : 0;
    }
    const int block = __shfl_sync(~0u, raw.entry, i % 16 * 2 + lane % 2);
    const uint32_t full = raw.full + 8 * slot;
    if (lane == 0)
        mbarrier_expect_bytes(full, num_present * PREFILL_HEAD_BYTES(HEAD_DIM));
    __syncwarp();
    if (lane < num_present)
        bulk_load(raw.slots + slot * PREFILL_SLOT_BYTES(HEAD_DIM) +
                      lane * PREFILL_HEAD_BYTES(HEAD_DIM),
                  p.keys + block * p.block_bytes + load % 2 * p.value_bytes +
                      tile.kv_head * PREFILL_HEAD_BYTES(HEAD_DIM),
                  PREFILL_HEAD_BYTES(HEAD_DIM), full);
}

template <int KIND, int HEAD_DIM, int STAGES, int SLOTS>
__device__ __forceinline__ void produce_widened(const struct prefill_attention_params &p,
                                                const struct prefill_tile &tile,
                                                const ring<STAGES> &keys,
                                                const ring<STAGES> &values,
                                                raw_ring<HEAD_DIM, SLOTS> raw)
{
    constexpr int STAGE_BYTES = HEAD_DIM / PANEL_COLUMNS * KV_PANEL_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_blocks = (tile.num_keys + PREFILL_BLOCK_SIZE - 1) / PREFILL_BLOCK_SIZE;
    const int num_loads = 2 * (tile.key_tile_end - tile.key_tile_begin);

    for (int load = 0; load < min(SLOTS, num_loads); load++)
        request_blocks(p, tile, num_blocks, load, raw);
#pragma unroll 1
    for (int load = 0; load < num_loads; load++) {
        const int i = load / 2, stage = i % STAGES, slot = load % SLOTS;
        const bool is_value = load % 2 != 0;
        const uint32_t from = raw.slots + slot * PREFILL_SLOT_BYTES(HEAD_DIM);
        const int end_row = tile.num_keys - (tile.key_tile_begin + i) * TILE_KEYS;
        mbarrier_wait(raw.full + 8 * slot, load / SLOTS & 1);
        if (i >= STAGES)
            mbarrier_wait((is_value ? values.empty : keys.empty) + 8 * stage, i / STAGES - 1 & 1);
#pragma unroll 1
        for (int block = 0; block < 2; block++)
            widen_block<KIND, HEAD_DIM>(from + block * PREFILL_HEAD_BYTES(HEAD_DIM),
                                        (is_value ? values.stages : keys.stages) +
                                            stage * STAGE_BYTES,
                                        (warp * 2 + block) * PREFILL_BLOCK_SIZE, end_row);
        fence_to_copy_engine();
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive_cluster((is_value ? values.full : keys.full) + 8 * stage);
        if (load + SLOTS < num_loads)
            request_blocks(p, tile, num_blocks, load + SLOTS, raw);
    }
}

/* ---- consumers ------------------------------------------------------------------------------ */

/* What a thread knows of its two rows, r and r + 8 of the warp's 16. */
struct softmax {
    float max[2];
    float sum[2]; /* of this thread's columns */
    float factor[2];
};

/* Where to find row `row` of the tile in qkv or d, in elements. */
__device__ __forceinline__ int64_t row_offset(const struct prefill_attention_params &p,
                                              const struct prefill_tile &tile, int row,
                                              int64_t token_stride, int head_dim)
{
    const int token = row / p.group_heads;
    const int head = tile.kv_head * p.group_heads + row - token * p.group_heads;
    return (tile.token_begin + token) * token_stride + head * head_dim;
}

/* Brings the consumer's 64 rows of Q into shared memory; rows that do not exist are zero. */
template <int HEAD_DIM>
__device__ __forceinline__ void load_q(const struct prefill_attention_params &p,
                                       const struct prefill_tile &tile, uint32_t q, int first_row)
{
    constexpr int CHUNKS = HEAD_DIM / 8; /* of 16 bytes in a row */
    constexpr int ROUNDS = GROUP_ROWS * CHUNKS / THREADS_OF_GROUP;
    const int thread = threadIdx.x % THREADS_OF_GROUP;
    const int chunk = thread % CHUNKS;
    const int64_t stride = (int64_t)(p.group_heads + 2) * p.num_kv_heads * HEAD_DIM;
    uint4 loaded[ROUNDS];

#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int row = first_row + thread / CHUNKS + i * (THREADS_OF_GROUP / CHUNKS);
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (row < tile.num_rows)
            loaded[i] = *(const uint4 *)((const uint16_t *)p.qkv +
                                         row_offset(p, tile, row, stride, HEAD_DIM) + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int row = thread / CHUNKS + i * (THREADS_OF_GROUP / CHUNKS);
        shared_store(q + chunk / 8 * Q_PANEL_BYTES + row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4),
                     loaded[i]);
    }
}

template <int HEAD_DIM>
__device__ __forceinline__ void multiply_keys(float (&scores)[TILE_KEYS / 2], uint32_t q,
                                              uint32_t keys)
{
    const uint64_t a = wgmma_descriptor(q), b = wgmma_descriptor(keys);
    wgmma<TILE_KEYS, true>(scores, a, b);
#pragma unroll
    for (int k = 1; k < HEAD_DIM / 16; k++)
        wgmma<TILE_KEYS, false>(scores, a + (k / 4 * Q_PANEL_BYTES + k % 4 * 32) / 16,
                                b + (k / 4 * KV_PANEL_BYTES + k % 4 * 32) / 16);
    wgmma_commit();
}

template <int HEAD_DIM>
__device__ __forceinline__ void multiply_values(float (&output)[HEAD_DIM / 2],
                                                const uint32_t (&weights)[TILE_KEYS / 16][4],
                                                uint32_t values)
{
    const uint64_t b = wgmma_descriptor_columns(values, KV_PANEL_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++)
        wgmma_from_registers<HEAD_DIM>(output, weights[k], b + k * 16 * ROW_BYTES / 16);
    wgmma_commit();
}

/* Takes out the keys after a row's position and those before its window. limit: the position of
 * each row less the key of the thread's first column. */
__device__ __forceinline__ void mask_scores(float (&scores)[TILE_KEYS / 2], const int (&limit)[2],
                                            int window)
{
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 2; i++) {
        const int key = i / 4 * 8 + i % 2, row = i / 2 % 2;
        if (key > limit[row] || key <= limit[row] - window)
            scores[i] = MINUS_INFINITY;
    }
}

/* scores become weights, exp2(scale * (score - max)). A row that has met no key yet has -infinity
 * for its max and gets weights of zero. */
__device__ __forceinline__ void weigh_scores(float (&scores)[TILE_KEYS / 2], struct softmax &rows,
                                             float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
        for (int i = 4; i < TILE_KEYS / 2; i += 4)
            largest = fmaxf(largest, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = fmaxf(largest, rows.max[r]);
        const float reference = largest == MINUS_INFINITY ? 0.0f : largest;
        /* The difference first: where the max stays, the factor is exactly 1. */
        rows.factor[r] = exp2_approx((rows.max[r] - reference) * scale);
        rows.max[r] = largest;
        const float offset = reference * scale;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < TILE_KEYS / 2; i += 4) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float &score = scores[i + 2 * r + j];
                score = exp2_approx(fmaf(score, scale, -offset));
                sums[j] += score;
            }
        }
        rows.sum[r] = fmaf(rows.sum[r], rows.factor[r], sums[0] + sums[1]);
    }
}

__device__ __forceinline__ void round_weights(const float (&scores)[TILE_KEYS / 2],
                                              uint32_t (&weights)[TILE_KEYS / 16][4])
{
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 4; i++)
        weights[i / 4][i % 4] = bf16x2_round(scores[2 * i], scores[2 * i + 1]);
}

/* The warp's 16 rows of O / sum: through its rows of Q's place, so that rows leave in whole
 * pieces. */
template <int HEAD_DIM>
__device__ __forceinline__ void write_output(const struct prefill_attention_params &p,
                                             const struct prefill_tile &tile, uint32_t q,
                                             int first_row, float (&output)[HEAD_DIM / 2],
                                             const struct softmax &rows)
{
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS_OF_GROUP / 32;
    const uint32_t place = q + warp * 16 * ROW_BYTES;
    const int64_t stride = (int64_t)p.group_heads * p.num_kv_heads * HEAD_DIM;
    float inverse[2];

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        inverse[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 16; j++) {
        uint32_t tiles[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            tiles[i] = bf16x2_round(output[8 * j + 2 * i] * inverse[i % 2],
                                    output[8 * j + 2 * i + 1] * inverse[i % 2]);
        const int row = lane & 15, chunk = j % 4 * 2 + (lane >> 4);
        matrix_store_x4(place + j / 4 * Q_PANEL_BYTES + row * ROW_BYTES + ((chunk ^ row % 8) << 4),
                        tiles);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS / 32; i++) {
        const int row = lane / CHUNKS + i * (32 / CHUNKS), chunk = lane % CHUNKS;
        const int sequence_row = first_row + warp * 16 + row;
        if (sequence_row < tile.num_rows)
            *(uint4 *)((uint16_t *)p.d + row_offset(p, tile, sequence_row, stride, HEAD_DIM) +
                       chunk * 8) = shared_load_16(place + chunk / 8 * Q_PANEL_BYTES +
                                                   row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4));
    }
}

template <int HEAD_DIM, int GROUPS, int STAGES>
__device__ __forceinline__ void consume(const struct prefill_attention_params &p,
                                        const struct prefill_tile &tile, uint32_t q, int group,
                                        const ring<STAGES> &keys, const ring<STAGES> &values)
{
    constexpr int STAGE_BYTES = HEAD_DIM / PANEL_COLUMNS * KV_PANEL_BYTES;
    const int thread = threadIdx.x % THREADS_OF_GROUP, lane = thread % 32;
    const int first_row = tile.first_row + group * GROUP_ROWS;
    const int num_tiles = tile.key_tile_end - tile.key_tile_begin;
    const int lowest = position_of(p, tile, first_row);
    const int highest = position_of(p, tile, first_row + GROUP_ROWS - 1);
    float output[HEAD_DIM / 2], scores[TILE_KEYS / 2];
    uint32_t weights[TILE_KEYS / 16][4];
    struct softmax rows = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    int limit[2];
    int first_key = tile.key_tile_begin * TILE_KEYS; /* of the tile at hand */

    for (int r = 0; r < 2; r++)
        limit[r] = position_of(p, tile, first_row + thread / 32 * 16 + lane / 4 + r * 8) -
                   first_key - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++)
        output[i] = 0.0f;
    load_q<HEAD_DIM>(p, tile, q, first_row);
    fence_to_copy_engine();
    named_barrier_wait(BARRIER_GROUP + group, THREADS_OF_GROUP);
    if (num_tiles > 0) {
        if (group == GROUPS - 1 && num_tiles > 1)
            named_barrier_arrive(BARRIER_TURN, 2 * THREADS_OF_GROUP);
        mbarrier_wait(keys.full, 0);
        wgmma_fence();
        multiply_keys<HEAD_DIM>(scores, q, keys.stages);
        wgmma_wait<0>();
        wgmma_pin(scores);
        if (thread == 0)
            mbarrier_arrive_cluster(keys.empty);
        if (first_key + TILE_KEYS - 1 > lowest || first_key <= highest - p.window)
            mask_scores(scores, limit, p.window);
        weigh_scores(scores, rows, p.scale_log2e);
        round_weights(scores, weights);
        wgmma_pin(weights);
#pragma unroll 1
        for (int i = 1; i < num_tiles; i++) {
            const int stage = i % STAGES, before = (i - 1) % STAGES;
            first_key += TILE_KEYS;
            limit[0] -= TILE_KEYS;
            limit[1] -= TILE_KEYS;
            mbarrier_wait(keys.full + 8 * stage, i / STAGES & 1);
            named_barrier_wait(BARRIER_TURN + group, 2 * THREADS_OF_GROUP);
            wgmma_fence();
            multiply_keys<HEAD_DIM>(scores, q, keys.stages + stage * STAGE_BYTES);
            mbarrier_wait(values.full + 8 * before, (i - 1) / STAGES & 1);
            wgmma_fence();
            multiply_values<HEAD_DIM>(output, weights, values.stages + before * STAGE_BYTES);
            if (group < GROUPS - 1 || i < num_tiles - 1)
                named_barrier_arrive(BARRIER_TURN + (group + 1) % GROUPS, 2 * THREADS_OF_GROUP);
            wgmma_wait<1>();
            wgmma_pin(scores);
            if (thread == 0)
                mbarrier_arrive_cluster(keys.empty + 8 * stage);
            if (first_key + TILE_KEYS - 1 > lowest || first_key <= highest - p.window)
                mask_scores(scores, limit, p.window);
            weigh_scores(scores, rows, p.scale_log2e);
            wgmma_wait<0>();
            wgmma_pin(output);
            if (thread == 0)
                mbarrier_arrive_cluster(values.empty + 8 * before);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 2; j++)
                output[j] *= rows.factor[j / 2 % 2];
            wgmma_pin(output);
            round_weights(scores, weights);
            wgmma_pin(weights);
        }
        const int last = (num_tiles - 1) % STAGES;
        mbarrier_wait(values.full + 8 * last, (num_tiles - 1) / STAGES & 1);
        wgmma_fence();
        multiply_values<HEAD_DIM>(output, weights, values.stages + last * STAGE_BYTES);
        wgmma_wait<0>();
        wgmma_pin(output);
    }
    /* All products of the group have read Q. */
    named_barrier_wait(BARRIER_GROUP + group, THREADS_OF_GROUP);
    write_output<HEAD_DIM>(p, tile, q, first_row, output, rows);
}

template <int KIND, int HEAD_DIM, int ROWS, int STAGES, int SLOTS, int PRODUCER_REGISTERS,
          int CONSUMER_REGISTERS>
__device__ __forceinline__ void prefill_attention(const struct prefill_attention_params &p)
{
    constexpr int GROUPS = ROWS / GROUP_ROWS;
    constexpr int STAGE_BYTES = HEAD_DIM / PANEL_COLUMNS * KV_PANEL_BYTES;
    extern __shared__ unsigned char shared[];
    const uint32_t q =
        (shared_address(shared) + SWIZZLE_ATOM_BYTES - 1) & ~(SWIZZLE_ATOM_BYTES - 1);
    ring<STAGES> keys, values;
    keys.stages = q + ROWS * HEAD_DIM * 2;
    values.stages = keys.stages + STAGES * STAGE_BYTES;
    keys.full = values.stages + STAGES * STAGE_BYTES;
    keys.empty = keys.full + 8 * STAGES;
    values.full = keys.empty + 8 * STAGES;
    values.empty = values.full + 8 * STAGES;
    const uint32_t landed = values.empty + 8 * STAGES;
    const uint32_t slots = landed + 16; /* barriers are an odd number of 8 bytes */
    const uint32_t slots_full =
        slots + PREFILL_PRODUCER_WARPS * SLOTS * PREFILL_SLOT_BYTES(HEAD_DIM);
    const int group = threadIdx.x / THREADS_OF_GROUP;
    struct prefill_tile tile;

    if (threadIdx.x == 0) {
        if constexpr (KIND == PREFILL_BF16)
            tensor_map_prefetch(&p.kv);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(keys.full + 8 * i, KIND == PREFILL_BF16 ? 1 : PREFILL_PRODUCER_WARPS);
            mbarrier_init(keys.empty + 8 * i, GROUPS);
            mbarrier_init(values.full + 8 * i, KIND == PREFILL_BF16 ? 1 : PREFILL_PRODUCER_WARPS);
            mbarrier_init(values.empty + 8 * i, GROUPS);
        }
        if constexpr (KIND == PREFILL_BF16) {
            mbarrier_init(landed, 1);
        } else {
            for (int i = 0; i < PREFILL_PRODUCER_WARPS * SLOTS; i++)
                mbarrier_init(slots_full + 8 * i, 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    grid_wait_for_previous();
    grid_release_next();
    if (!start_tile<ROWS>(p, tile))
        return;
    if (group == 0) {
        registers_shrink<PRODUCER_REGISTERS>();
        if constexpr (KIND != PREFILL_BF16) {
            const int warp = threadIdx.x / 32;
            const raw_ring<HEAD_DIM, SLOTS> raw = {slots +
                                                       warp * SLOTS * PREFILL_SLOT_BYTES(HEAD_DIM),
                                                   slots_full + warp * SLOTS * 8, 0};
            produce_widened<KIND>(p, tile, keys, values, raw);
        } else if (threadIdx.x < 32) {
            produce<HEAD_DIM>(p, tile, keys, values, landed);
        }
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<HEAD_DIM, GROUPS>(p, tile, q + (group - 1) * GROUP_ROWS * HEAD_DIM * 2, group - 1,
                                  keys, values);
    }
}

/* Registers of the producer's threads and of the consumers', as many as all have together at the
 * start. */
#define PREFILL_64(kind, number, producer, consumer)                                        \
    extern "C" __global__ void __launch_bounds__(PREFILL_ROWS_64 * 2 + THREADS_OF_GROUP, 1) \
        prefill_attention_##kind##_sm90_64(                                                 \
            const __grid_constant__ struct prefill_attention_params params)                 \
    {                                                                                       \
        prefill_attention<number, 64, PREFILL_ROWS_64, PREFILL_STAGES_64, PREFILL_SLOTS_64, \
                          producer, consumer>(params);                                      \
    }
#define PREFILL_128(kind, number, producer, consumer)                                           \
    extern "C" __global__ void __launch_bounds__(PREFILL_ROWS_128 * 2 + THREADS_OF_GROUP, 1)    \
        prefill_attention_##kind##_sm90_128(                                                    \
            const __grid_constant__ struct prefill_attention_params params)                     \
    {                                                                                           \
        prefill_attention<number, 128, PREFILL_ROWS_128, PREFILL_STAGES_128, PREFILL_SLOTS_128, \
                          producer, consumer>(params);                                          \
    }
PREFILL_64(bf16, PREFILL_BF16, 32, 160)
PREFILL_64(int8, PREFILL_INT8, 32, 160)
PREFILL_64(fp8, PREFILL_FP8, 32, 160)
PREFILL_128(bf16, PREFILL_BF16, 40, 232)
PREFILL_128(int8, PREFILL_INT8, 56, 224)
PREFILL_128(fp8, PREFILL_FP8, 56, 224)
