/* SPDX-License-Identifier: Apache-2.0 */
/* Products of up to 64 tokens, whose activations come through shared memory stage by stage; and
 * what stands beside them: the norm before, heads that are normalised after.
 *
 * As in small_resident.cu, weights are A of mma.m16n8k16 and each thread copies what it multiplies;
 * 8 tokens are a column tile. A CTA has 4 tiles of 16 rows, a warp a tile and every other chunk.
 * The CTAs of a cluster have the same rows and share k: what each has added up lies in its shared
 * memory at the end, and they divide the adding, in the order of k, among them.
 *
 *   weights      copy stages 0 1 2 | .............. | 3 ...   (they wait for nobody)
 *   activations                    | wait | 0 1 2   | 3 ...
 *   multiply                                       0 | 1 ... */
#include "ops/cuda/kernels/small_ops.cuh"

struct stream_place {
    const unsigned char *low, *high; /* this lane's piece of chunk 0 in its rows */
    uint32_t weights;                /* its place in stage 0 */
    int warp_k;
};

static __device__ __forceinline__ void stage_copy_weights(const struct small_kernel_params &params,
                                                          const struct stream_place &place,
                                                          int stage, uint32_t stage_offset)
{
    int chunk = stage * SMALL_STREAM_WARPS_K + place.warp_k;
    if (chunk * SMALL_CHUNK < params.in_features) {
        int64_t offset = (int64_t)chunk * (SMALL_CHUNK * 2);
        uint32_t shared = place.weights + stage_offset;
        copy_async(shared, place.low + offset);
        copy_async(shared + 512, place.low + offset + 64);
        copy_async(shared + 1024, place.high + offset);
        copy_async(shared + 1536, place.high + offset + 64);
    }
}

/* Zero for tokens that are not there. */
template <int TILES_N>
static __device__ __forceinline__ void stage_copy_activations(
    const struct small_kernel_params &params, int stage, uint32_t shared)
{
    constexpr int ROW_PIECES = SMALL_STREAM_WARPS_K * SMALL_CHUNK / 8;
#pragma unroll
    for (int i = 0; i < (8 * TILES_N * ROW_PIECES + SMALL_THREADS - 1) / SMALL_THREADS; i++) {
        int piece = threadIdx.x + i * SMALL_THREADS;
        int token = piece / ROW_PIECES, k = piece % ROW_PIECES * 8;
        uint32_t place = shared + token * SMALL_STREAM_ROW_BYTES + k * 2;
        k += stage * (SMALL_STREAM_WARPS_K * SMALL_CHUNK);
        if (token < 8 * TILES_N) {
            bool is_there = token < params.num_tokens && k < params.in_features;
            const __nv_bfloat16 *a = (const __nv_bfloat16 *)params.a;
            copy_async_16(place, is_there ? a + (int64_t)token * params.in_features + k : a,
                          is_there ? 16 : 0);
        }
    }
}

template <int OP, int TILES_N>
static __device__ __forceinline__ void stream(const struct small_kernel_params &params)
{
    constexpr int STAGES = SMALL_STREAM_STAGES(TILES_N);
    constexpr int STAGE_BYTES = SMALL_STREAM_STAGE_BYTES(TILES_N);
    constexpr int WEIGHT_BYTES = SMALL_WARPS * SMALL_CHUNK_BYTES;
    extern __shared__ __align__(128) unsigned char shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int num_ranks = (int)cluster_num_ctas(), rank = (int)cluster_cta_rank();
    int tile_begin = (int)(blockIdx.x / num_ranks) * SMALL_STREAM_TILES;
    int warp_tile = warp / SMALL_STREAM_WARPS_K;
    constexpr int STAGE_K = SMALL_STREAM_WARPS_K * SMALL_CHUNK;
    int num_stages = (params.in_features + STAGE_K - 1) / STAGE_K;
    int stage_begin = num_stages * rank / num_ranks;
    int stage_end = num_stages * (rank + 1) / num_ranks;
    uint32_t base = shared_address(shared);

    grid_release_next();
    struct tile_rows rows =
        tile_rows_of<OP>(params, min(tile_begin + warp_tile, params.num_tiles - 1), lane / 4);
    const unsigned char *weight = (const unsigned char *)params.weight + lane % 4 * 16;
    struct stream_place place = {.low = weight + (int64_t)rows.low * params.in_features * 2,
                                 .high = weight + (int64_t)rows.high * params.in_features * 2,
                                 .weights = base + warp * SMALL_CHUNK_BYTES + lane * 16,
                                 .warp_k = warp % SMALL_STREAM_WARPS_K};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (stage_begin + i < stage_end) {
            stage_copy_weights(params, place, stage_begin + i, i * STAGE_BYTES);
        }
    }
    grid_wait_for_previous();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (stage_begin + i < stage_end) {
            stage_copy_activations<TILES_N>(params, stage_begin + i,
                                            base + i * STAGE_BYTES + WEIGHT_BYTES);
        }
        copy_async_commit();
    }

    /* Fragments, 16 rows of 8 tokens, are finished by CTA and warp in turn. */
    int fragment = rank + warp * num_ranks;
    struct tile_operands operands = {};
    if (fragment < SMALL_STREAM_TILES * TILES_N &&
        tile_begin + fragment / TILES_N < params.num_tiles) {
        int token_begin = fragment % TILES_N * 8;
        operands =
            tile_operands_of<OP, 2>(params, token_places_of<OP, 2>(params, token_begin, lane),
                                    tile_begin + fragment / TILES_N, token_begin, lane);
    }

    float4 sums[TILES_N];
#pragma unroll
    for (int i = 0; i < TILES_N; i++) {
        sums[i] = make_float4(0, 0, 0, 0);
    }
    int slot = 0;
    for (int stage = stage_begin; stage < stage_end; stage++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        const unsigned char *weights = shared + slot * STAGE_BYTES + warp * SMALL_CHUNK_BYTES;
        const unsigned char *activations = shared + slot * STAGE_BYTES + WEIGHT_BYTES +
                                           lane / 4 * SMALL_STREAM_ROW_BYTES +
                                           place.warp_k * (SMALL_CHUNK * 2) + lane % 4 * 16;
        int ahead = stage + STAGES - 1;
        int slot_ahead = slot == 0 ? STAGES - 1 : slot - 1;
        if (ahead < stage_end) {
            stage_copy_weights(params, place, ahead, slot_ahead * STAGE_BYTES);
            stage_copy_activations<TILES_N>(params, ahead,
                                            base + slot_ahead * STAGE_BYTES + WEIGHT_BYTES);
        }
        copy_async_commit();
        if ((stage * SMALL_STREAM_WARPS_K + place.warp_k) * SMALL_CHUNK < params.in_features) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 low = *(const uint4 *)(weights + i * 512 + lane * 16);
                uint4 high = *(const uint4 *)(weights + 1024 + i * 512 + lane * 16);
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    uint4 b =
                        *(const uint4 *)(activations + j * 8 * SMALL_STREAM_ROW_BYTES + i * 64);
                    mma_bf16(sums[j], low.x, high.x, low.y, high.y, b.x, b.y);
                    mma_bf16(sums[j], low.z, high.z, low.w, high.w, b.z, b.w);
                }
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    copy_async_wait<0>();
    __syncthreads();
    float4 *partials = (float4 *)shared; /* [warp][column tile][lane] */
#pragma unroll
    for (int i = 0; i < TILES_N; i++) {
        partials[(warp * TILES_N + i) * 32 + lane] = sums[i];
    }
    cluster_sync();
    for (; fragment < SMALL_STREAM_TILES * TILES_N; fragment += SMALL_WARPS * num_ranks) {
        int part_tile = fragment / TILES_N, column = fragment % TILES_N;
        int tile = tile_begin + part_tile;
        if (tile >= params.num_tiles) {
            break;
        }
        if (fragment != rank + warp * num_ranks) {
            operands = tile_operands_of<OP, 2>(
                params, token_places_of<OP, 2>(params, column * 8, lane), tile, column * 8, lane);
        }
        float4 total = make_float4(0, 0, 0, 0);
        for (int i = 0; i < num_ranks; i++) {
#pragma unroll
            for (int j = 0; j < SMALL_STREAM_WARPS_K; j++) {
                int part = (part_tile * SMALL_STREAM_WARPS_K + j) * TILES_N + column;
                float4 value = cluster_load(cluster_address(base + (part * 32 + lane) * 16, i));
                total = make_float4(total.x + value.x, total.y + value.y, total.z + value.z,
                                    total.w + value.w);
            }
        }
        tile_finish<OP, 2>(operands, total);
    }
    /* The others may still be reading from here. */
    cluster_sync();
}

#define SMALL_STREAM_KERNEL(name, op, tiles_n)                          \
    extern "C" __global__ void __launch_bounds__(SMALL_THREADS, 2)      \
        name(const __grid_constant__ struct small_kernel_params params) \
    {                                                                   \
        stream<op, tiles_n>(params);                                    \
    }
#define SMALL_STREAM(name, op)            \
    SMALL_STREAM_KERNEL(name##_8, op, 1)  \
    SMALL_STREAM_KERNEL(name##_16, op, 2) \
    SMALL_STREAM_KERNEL(name##_32, op, 4) \
    SMALL_STREAM_KERNEL(name##_64, op, 8)

SMALL_STREAM(small_stream_qkv, SMALL_QKV)
SMALL_STREAM(small_stream_project, SMALL_PROJECT)
SMALL_STREAM(small_stream_mlp, SMALL_MLP)
SMALL_STREAM(small_stream_logits, SMALL_LOGITS)

extern "C" __global__ void __launch_bounds__(SMALL_THREADS)
    small_norm(const __grid_constant__ struct small_norm_params params)
{
    __shared__ float warp_sums[SMALL_WARPS];
    struct norm_row<4> row = {
        .source = (const float4 *)params.hidden, .weight = (const float4 *)params.weight,
        .num_vectors = params.hidden_size / 4, .lane = (int)threadIdx.x, .num_lanes = SMALL_THREADS
    };
    grid_release_next();
    norm_row_prepare(row);
    grid_wait_for_previous();
    int64_t source = params.rows != NULL ? __ldcg(params.rows + blockIdx.x) : (int)blockIdx.x;
    row.source += source * row.num_vectors;
    float sum = warp_sum(norm_row_load(row));
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SMALL_WARPS; i++) {
        total += warp_sums[i];
    }
    norm_row_store(row, norm_scale(total, params.hidden_size, params.eps),
                   (uint2 *)params.normed + (int64_t)blockIdx.x * row.num_vectors);
}

/* Pairs of a head that a lane holds. */
#define HEAD_LANE_PAIRS 8

extern "C" __global__ void __launch_bounds__(32)
    small_heads(const __grid_constant__ struct small_heads_params params)
{
    int head = blockIdx.x, token = blockIdx.y, lane = threadIdx.x;
    int half = params.head_dim / 2, distance = params.is_interleaved ? 1 : half;
    int step = params.is_interleaved ? 2 : 1;
    int kv_head = head - params.num_heads;
    bool is_value = kv_head >= params.num_kv_heads;
    const float *norm = is_value ? NULL : kv_head >= 0 ? params.k_norm : params.q_norm;
    float low[HEAD_LANE_PAIRS], high[HEAD_LANE_PAIRS], sum = 0.0f;

    grid_release_next();
    grid_wait_for_previous();
    __nv_bfloat16 *source =
        (__nv_bfloat16 *)params.qkv +
        ((int64_t)token * (params.num_heads + 2 * params.num_kv_heads) + head) * params.head_dim;
    __nv_bfloat16 *place = source;
    int slot = kv_head >= 0 ? __ldcg(params.slot_mapping + token) : 0;
    if (slot < 0) {
        return;
    }
    if (kv_head >= 0) {
        place = kv_place(params.kv_layer, params.kv_block_bytes, params.block_size,
                         params.num_kv_heads, params.head_dim, slot, is_value,
                         is_value ? kv_head - params.num_kv_heads : kv_head);
    }
#pragma unroll
    for (int i = 0; i < HEAD_LANE_PAIRS; i++) {
        int pair = lane + i * 32;
        low[i] = pair < half ? __bfloat162float(source[pair * step]) : 0.0f;
        high[i] = pair < half ? __bfloat162float(source[pair * step + distance]) : 0.0f;
        sum += low[i] * low[i] + high[i] * high[i];
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)params.head_dim + params.eps);
    const float *cos_sin =
        params.cos_sin + (int64_t)__ldcg(params.positions + token) * params.head_dim;
#pragma unroll
    for (int i = 0; i < HEAD_LANE_PAIRS; i++) {
        int pair = lane + i * 32;
        if (pair >= half) {
            break;
        }
        if (norm != NULL) {
            low[i] *= scale * norm[pair * step];
            high[i] *= scale * norm[pair * step + distance];
        }
        if (!is_value) {
            float cosine = __ldcg(cos_sin + pair), sine = __ldcg(cos_sin + half + pair);
            float turned = low[i] * cosine - high[i] * sine;
            high[i] = high[i] * cosine + low[i] * sine;
            low[i] = turned;
        }
        place[pair * step] = __float2bfloat16_rn(low[i]);
        place[pair * step + distance] = __float2bfloat16_rn(high[i]);
    }
}
