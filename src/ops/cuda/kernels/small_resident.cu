/* SPDX-License-Identifier: Apache-2.0 */
/* Products of at most 8 tokens. Weights are A of mma.m16n8k16, tokens its 8 columns, so that the
 * matrix is read once at the speed of memory whatever their number.
 *
 * A CTA has tiles of 16 rows one after the other; its warps share k, chunk by chunk. Each thread
 * copies the 16-byte pieces that it will multiply itself, chunks ahead and across the ends of
 * tiles, into a place of its own in shared memory: no barrier stands between memory and tensor
 * core. A permutation of k that weights and activations share makes 16 consecutive bytes of a row
 * what a thread holds of two products: bytes 16 c of piece i are k 32 i + 8 c to 32 i + 8 c + 7.
 *
 *   weights     copy chunks 0-3 | ........................ | 4 5 6 7 ...   (they wait for nobody)
 *   previous grid ------------->| end
 *   this one                     wait | norm of the rows -> shared | multiply 0 1 2 3 ...
 *
 * Sums of the warps meet in shared memory and are added in the order of the warps by one of them,
 * which does it a tile later, when they are likely to be there: nobody waits for the slowest. */
#include "ops/cuda/kernels/small_ops.cuh"

/* The chunks of a warp, in the order in which it multiplies them. */
struct chunk_cursor {
    const unsigned char *low, *high; /* this lane's piece of chunk 0 in its rows */
    int tile, chunk;
};

/* To the tile that the chunk is in. */
template <int OP>
static __device__ __forceinline__ void cursor_settle(const struct small_kernel_params &params,
                                                     struct chunk_cursor &cursor, int num_chunks,
                                                     int tile_end, int lane)
{
    while (cursor.chunk >= num_chunks) {
        cursor.chunk -= num_chunks;
        cursor.tile++;
    }
    if (cursor.tile < tile_end) {
        struct tile_rows rows = tile_rows_of<OP>(params, cursor.tile, lane / 4);
        const unsigned char *weight = (const unsigned char *)params.weight + lane % 4 * 16;
        cursor.low = weight + (int64_t)rows.low * params.in_features * 2;
        cursor.high = weight + (int64_t)rows.high * params.in_features * 2;
        if (OP == SMALL_PROJECT && params.num_parts == 2) {
            cursor.high += params.in_features;
        }
    }
}

template <int OP>
static __device__ __forceinline__ void chunk_copy(const struct small_kernel_params &params,
                                                  struct chunk_cursor &cursor, int num_chunks,
                                                  int tile_end, int lane, uint32_t place)
{
    if (cursor.tile < tile_end) {
        int64_t offset = (int64_t)cursor.chunk * (SMALL_CHUNK * 2);
        copy_async(place, cursor.low + offset);
        copy_async(place + 512, cursor.low + offset + 64);
        copy_async(place + 1024, cursor.high + offset);
        copy_async(place + 1536, cursor.high + offset + 64);
        cursor.chunk += SMALL_WARPS;
        if (cursor.chunk >= num_chunks) {
            cursor_settle<OP>(params, cursor, num_chunks, tile_end, lane);
        }
    }
    copy_async_commit();
}

/* How many warps take a token's row together. */
template <bool SINGLE> static __device__ __forceinline__ int row_warps_of(int num_tokens)
{
    return SINGLE            ? SMALL_WARPS
           : num_tokens == 2 ? SMALL_WARPS / 2
           : num_tokens <= 4 ? SMALL_WARPS / 4
                             : 1;
}

template <int KEPT>
static __device__ __forceinline__ struct norm_row<KEPT> norm_row_of(
    const struct small_kernel_params &params, int row_warps) {
    int warp = threadIdx.x / 32, token = warp / row_warps;
    struct norm_row<KEPT> row = {
        .source = (const float4 *)params.a, .weight = (const float4 *)params.norm_weight,
        .num_vectors = token < params.num_tokens ? params.in_features / 4 : 0,
        .lane = (int)threadIdx.x - token * row_warps * 32, .num_lanes = row_warps * 32,
    };
    norm_row_prepare(row);
    return row;
}

/* Rows of hidden, normalised, to shared memory. */
template <int KEPT>
static __device__ __forceinline__ void normalize_rows(const struct small_kernel_params &params,
                                                      struct norm_row<KEPT> &row, int row_warps,
                                                      unsigned char *activations, int row_bytes,
                                                      float *warp_sums)
{
    int warp = threadIdx.x / 32, token = warp / row_warps;
    if (row.num_vectors != 0) {
        int64_t source = params.rows != NULL ? __ldcg(params.rows + token) : token;
        row.source += source * row.num_vectors;
    }
    float sum = warp_sum(norm_row_load(row));
    if (threadIdx.x % 32 == 0) {
        warp_sums[warp] = sum;
    }
    __syncthreads();
    /* A row's warps are a power of two: all warps' sums, masked, in one order. */
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SMALL_WARPS; i++) {
        float other = warp_sums[i];
        total += (i ^ warp) < row_warps ? other : 0.0f;
    }
    norm_row_store(row, norm_scale(total, params.in_features, params.eps),
                   (uint2 *)(activations + token * row_bytes));
}

/* Rows of a to shared memory. */
template <int KEPT>
static __device__ __forceinline__ void copy_rows(const struct small_kernel_params &params,
                                                 int row_warps, unsigned char *activations,
                                                 int row_bytes)
{
    int token = threadIdx.x / 32 / row_warps, num_vectors = params.in_features / 8;
    int num_lanes = row_warps * 32, lane = threadIdx.x - token * num_lanes;
    const float4 *source = (const float4 *)params.a + (int64_t)token * num_vectors;
    float4 *row = (float4 *)(activations + token * row_bytes);
    if (token >= params.num_tokens) {
        return;
    }
#pragma unroll 1
    for (; lane < num_vectors; lane += KEPT * num_lanes) {
        float4 vectors[KEPT];
        vectors_load(source, num_vectors, lane, num_lanes, vectors);
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            if (lane + i * num_lanes < num_vectors) {
                row[lane + i * num_lanes] = vectors[i];
            }
        }
    }
}

static __device__ __forceinline__ float4 sum_of(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Sums of a warp, of which a lane's pair of tokens comes to num_pairs in all. */
template <bool SINGLE>
static __device__ __forceinline__ void sums_put(unsigned char *sums, int warp, int g, int c,
                                                int num_pairs, float4 value)
{
    if constexpr (SINGLE) {
        if (c == 0) {
            ((float2 *)sums)[warp * 8 + g] = make_float2(value.x, value.z);
        }
    } else if (c < num_pairs) {
        ((float4 *)sums)[(warp * num_pairs + c) * 8 + g] = value;
    }
}

template <bool SINGLE>
static __device__ __forceinline__ float4 sums_get(const unsigned char *sums, int g, int c,
                                                  int num_pairs)
{
    float4 total = make_float4(0, 0, 0, 0);
    if (SINGLE && c == 0) {
        float2 parts[SMALL_WARPS];
#pragma unroll
        for (int i = 0; i < SMALL_WARPS; i++) {
            parts[i] = ((const float2 *)sums)[i * 8 + g];
        }
#pragma unroll
        for (int i = 0; i < SMALL_WARPS; i++) {
            total.x += parts[i].x;
            total.z += parts[i].y;
        }
    } else if (!SINGLE && c < num_pairs) {
#pragma unroll
        for (int i = 0; i < SMALL_WARPS; i++) {
            total = sum_of(total, ((const float4 *)sums)[(i * num_pairs + c) * 8 + g]);
        }
    }
    return total;
}

template <int OP, int CHUNKS, bool SINGLE>
static __device__ __forceinline__ void resident(const struct small_kernel_params &params)
{
    constexpr int SLOT_BYTES = SMALL_WARPS * SMALL_CHUNK_BYTES;
    constexpr int COUNT = SINGLE ? 1 : 2, KEPT = SINGLE ? 4 : 8;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float warp_sums[SMALL_WARPS];
    __shared__ uint64_t barriers[2 * SMALL_RESIDENT_SUMS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    bool has_parts = SINGLE && OP == SMALL_PROJECT && params.num_parts == 2;
    int row_bytes = params.in_features * 2 + 64;
    int num_chunks = params.in_features / (has_parts ? 2 * SMALL_CHUNK : SMALL_CHUNK);
    int num_pairs = (params.num_tokens + 1) / 2; /* of tokens */
    int set_bytes = SMALL_WARPS * (SINGLE ? 64 : 128 * num_pairs);
    unsigned char *activations = shared + SMALL_RESIDENT_SUMS * set_bytes;
    unsigned char *ring =
        activations + params.num_tokens * row_bytes + warp * SMALL_CHUNK_BYTES + lane * 16;
    int cta = blockIdx.x;
    int tile_begin = cta * params.cta_tiles + min(cta, params.extra_tiles);
    int num_tiles = params.cta_tiles + (cta < params.extra_tiles);
    int tile_end = tile_begin + num_tiles;
    uint32_t ring_address = shared_address(ring);
    /* Told by each lane that has put sums: full[set]; that has read them: empty[set]. */
    bool has_sums = c < (SINGLE ? 1 : num_pairs);
    int sum_lanes = 8 * (SINGLE ? 1 : num_pairs);
    uint32_t full = shared_address(barriers), empty = full + SMALL_RESIDENT_SUMS * 8;

    grid_release_next();
    struct chunk_cursor cursor = {.low = NULL, .high = NULL, .tile = tile_begin, .chunk = warp};
    cursor_settle<OP>(params, cursor, num_chunks, tile_end, lane);
#pragma unroll 1
    for (int i = 0; i < CHUNKS; i++) {
        chunk_copy<OP>(params, cursor, num_chunks, tile_end, lane, ring_address + i * SLOT_BYTES);
    }
    if (threadIdx.x < SMALL_RESIDENT_SUMS) {
        mbarrier_init(full + threadIdx.x * 8, SMALL_WARPS * sum_lanes);
        mbarrier_init(empty + threadIdx.x * 8, sum_lanes);
        mbarrier_init_fence();
    }

    /* The warp that finishes a tile has asked for its operands long before. */
    int finish_tile = tile_begin + warp, row_warps = row_warps_of<SINGLE>(params.num_tokens);
    struct tile_operands operands = {};
    struct token_places places;
    if constexpr (OP == SMALL_PROJECT) {
        grid_wait_for_previous();
        places = token_places_of<OP, COUNT>(params, 0, lane);
        if (finish_tile < tile_end) {
            operands = tile_operands_of<OP, COUNT>(params, places, finish_tile, 0, lane);
        }
        copy_rows<2 * KEPT>(params, row_warps, activations, row_bytes);
    } else {
        struct norm_row<KEPT> row = norm_row_of<KEPT>(params, row_warps);
        grid_wait_for_previous();
        places = token_places_of<OP, COUNT>(params, 0, lane);
        normalize_rows(params, row, row_warps, activations, row_bytes, warp_sums);
        if (finish_tile < tile_end) {
            operands = tile_operands_of<OP, COUNT>(params, places, finish_tile, 0, lane);
        }
    }
    __syncthreads();

    /* Where there are parts of k, column 1 is the second one of the token. */
    bool has_token = g < (has_parts ? 2 : params.num_tokens);
    const unsigned char *fragment =
        activations + g * (has_parts ? params.in_features : row_bytes) + c * 16;
    int chunk = warp, slot = 0, set = 0;
    uint32_t set_parity = 0;
    for (int i = 0; i <= num_tiles; i++) {
        if (i < num_tiles) {
            float4 even = make_float4(0, 0, 0, 0), odd = even;
#pragma unroll 1
            for (; chunk < num_chunks; chunk += SMALL_WARPS) {
                uint4 b[2] = {};
                copy_async_wait<CHUNKS - 1>();
                const unsigned char *place = ring + slot * SLOT_BYTES;
                if (has_token) {
                    b[0] = *(const uint4 *)(fragment + chunk * (SMALL_CHUNK * 2));
                    b[1] = *(const uint4 *)(fragment + chunk * (SMALL_CHUNK * 2) + 64);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint4 low = *(const uint4 *)(place + j * 512);
                    uint4 high = *(const uint4 *)(place + 1024 + j * 512);
                    mma_bf16(even, low.x, high.x, low.y, high.y, b[j].x, b[j].y);
                    mma_bf16(odd, low.z, high.z, low.w, high.w, b[j].z, b[j].w);
                }
                chunk_copy<OP>(params, cursor, num_chunks, tile_end, lane,
                               ring_address + slot * SLOT_BYTES);
                slot = slot + 1 == CHUNKS ? 0 : slot + 1;
            }
            chunk -= num_chunks;
            float4 sums = sum_of(even, odd);
            if (has_parts) {
                sums.x += sums.w;
            }
            if (i >= SMALL_RESIDENT_SUMS) {
                mbarrier_wait(empty + set * 8, set_parity ^ 1);
            }
            sums_put<SINGLE>(shared + set * set_bytes, warp, g, c, num_pairs, sums);
            if (has_sums) {
                mbarrier_arrive(full + set * 8);
            }
            if (++set == SMALL_RESIDENT_SUMS) {
                set = 0;
                set_parity ^= 1;
            }
        }
        /* Tile i - 1, or none. */
        if (i > 0 && tile_begin + i - 1 == finish_tile) {
            int done_set = (i - 1) % SMALL_RESIDENT_SUMS;
            mbarrier_wait(full + done_set * 8, (i - 1) / SMALL_RESIDENT_SUMS & 1);
            float4 total = sums_get<SINGLE>(shared + done_set * set_bytes, g, c, num_pairs);
            if (has_sums) {
                mbarrier_arrive(empty + done_set * 8);
            }
            tile_finish<OP, COUNT>(operands, total);
            finish_tile += SMALL_WARPS;
            if (finish_tile < tile_end) {
                operands = tile_operands_of<OP, COUNT>(params, places, finish_tile, 0, lane);
            }
        }
    }
    copy_async_wait<0>();
}

#define SMALL_RESIDENT_KERNEL_OF(name, op, chunks, is_single, ctas)     \
    extern "C" __global__ void __launch_bounds__(SMALL_THREADS, ctas)   \
        name(const __grid_constant__ struct small_kernel_params params) \
    {                                                                   \
        resident<op, chunks, is_single>(params);                        \
    }
#define SMALL_RESIDENT(name, op)                                         \
    SMALL_RESIDENT_KERNEL_OF(small_resident_##name##_4, op, 4, false, 2) \
    SMALL_RESIDENT_KERNEL_OF(small_resident_##name##_8, op, 8, false, 2) \
    SMALL_RESIDENT_KERNEL_OF(small_single_##name##_4, op, 4, true, 3)    \
    SMALL_RESIDENT_KERNEL_OF(small_single_##name##_8, op, 8, true, 3)

SMALL_RESIDENT(qkv, SMALL_QKV)
SMALL_RESIDENT(project, SMALL_PROJECT)
SMALL_RESIDENT(mlp, SMALL_MLP)
SMALL_RESIDENT(logits, SMALL_LOGITS)
