/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that work on single rows. What long prompts pass through moves 16 bytes an access; the
 * others are far from any roof, so they are plain. */
#include <cuda_bf16.h>

#include "ops/cuda/kernels/kv_elements.cuh"
#include "ops/cuda/kernels/ptx.cuh"
#include "ops/cuda/kernels/row_params.h"

static __device__ __forceinline__ float widen(float value)
{
    return value;
}

static __device__ __forceinline__ float widen(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

template <typename ELEMENT>
static __device__ void embed(const struct embedding_kernel_params &params)
{
    int64_t token = blockIdx.x;
    grid_wait_for_previous();
    grid_release_next();
    const ELEMENT *row =
        (const ELEMENT *)params.table + (int64_t)params.token_ids[token] * params.hidden_size;
    for (int32_t i = threadIdx.x; i < params.hidden_size; i += blockDim.x) {
        params.d[token * params.hidden_size + i] = widen(row[i]);
    }
}

extern "C" __global__ void embedding_bf16(
    const __grid_constant__ struct embedding_kernel_params params)
{
    embed<__nv_bfloat16>(params);
}

extern "C" __global__ void embedding_f32(
    const __grid_constant__ struct embedding_kernel_params params)
{
    embed<float>(params);
}

extern "C" __global__ void rope_table(
    const __grid_constant__ struct rope_table_kernel_params params)
{
    int32_t position = params.position_begin + (int32_t)blockIdx.x;
    grid_wait_for_previous();
    grid_release_next();
    float *row = params.cos_sin + (int64_t)position * 2 * params.num_pairs;
    for (int32_t i = threadIdx.x; i < params.num_pairs; i += blockDim.x) {
        double angle = position * params.frequencies[i];
        row[i] = (float)(params.factor * cos(angle));
        row[params.num_pairs + i] = (float)(params.factor * sin(angle));
    }
}

/* ---- norm ------------------------------------------------------------------------------------ */

/* The sum of all threads of a CTA, in all of them, in an order that their number alone decides. */
static __device__ __forceinline__ float sum_over_cta(float value)
{
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32;
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffff, value, distance);
    if (blockDim.x == 32)
        return value;
    if (lane == 0)
        sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < blockDim.x / 32 ? sums[lane] : 0.0f;
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

template <int QUADS> static __device__ void rmsnorm(const struct rmsnorm_kernel_params &params)
{
    const int num_quads = params.hidden_size / 4;
    const float4 *weights = (const float4 *)params.weight;
    float4 weight[QUADS], value[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = threadIdx.x + i * blockDim.x;
        if (quad < num_quads)
            weight[i] = __ldg(weights + quad);
    }
    grid_wait_for_previous();
    grid_release_next();

    int64_t row = blockIdx.x;
    if (params.rows != nullptr)
        row = params.rows[row];
    const float4 *a = (const float4 *)(params.a + row * params.hidden_size);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = threadIdx.x + i * blockDim.x;
        value[i] = quad < num_quads ? a[quad] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++)
        sum += value[i].x * value[i].x + value[i].y * value[i].y + value[i].z * value[i].z +
               value[i].w * value[i].w;
    sum = sum_over_cta(sum);
    const float scale = 1.0f / sqrtf(sum / (float)params.hidden_size + params.eps);

    uint2 *d = (uint2 *)((__nv_bfloat16 *)params.d + (int64_t)blockIdx.x * params.hidden_size);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = threadIdx.x + i * blockDim.x;
        if (quad < num_quads)
            d[quad] = make_uint2(
                bf16x2_round(value[i].x * scale * weight[i].x, value[i].y * scale * weight[i].y),
                bf16x2_round(value[i].z * scale * weight[i].z, value[i].w * scale * weight[i].w));
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    rmsnorm_2(const __grid_constant__ struct rmsnorm_kernel_params params)
{
    rmsnorm<2>(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    rmsnorm_4(const __grid_constant__ struct rmsnorm_kernel_params params)
{
    rmsnorm<4>(params);
}

extern "C" __global__ void __launch_bounds__(512)
    rmsnorm_8(const __grid_constant__ struct rmsnorm_kernel_params params)
{
    rmsnorm<8>(params);
}

/* ---- q and k --------------------------------------------------------------------------------- */

/* COUNT elements of bf16, 8 or 4, in one access of 16 or 8 bytes. */
template <int COUNT> struct element_run {
    uint32_t pairs[COUNT / 2];
};

template <int COUNT>
static __device__ __forceinline__ element_run<COUNT> load_run(const __nv_bfloat16 *from)
{
    element_run<COUNT> run;
    if constexpr (COUNT == 8) {
        const uint4 bits = *(const uint4 *)from;
        run.pairs[0] = bits.x, run.pairs[1] = bits.y;
        run.pairs[2] = bits.z, run.pairs[3] = bits.w;
    } else {
        const uint2 bits = *(const uint2 *)from;
        run.pairs[0] = bits.x, run.pairs[1] = bits.y;
    }
    return run;
}

template <int COUNT>
static __device__ __forceinline__ void widen_run(float (&values)[COUNT],
                                                 const element_run<COUNT> &run)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        values[2 * i] = __uint_as_float(run.pairs[i] << 16);
        values[2 * i + 1] = __uint_as_float(run.pairs[i] & 0xffff0000u);
    }
}

template <int COUNT>
static __device__ __forceinline__ void load_elements(float (&values)[COUNT],
                                                     const __nv_bfloat16 *from)
{
    widen_run(values, load_run<COUNT>(from));
}

template <int COUNT>
static __device__ __forceinline__ void store_elements(__nv_bfloat16 *to,
                                                      const float (&values)[COUNT])
{
    if constexpr (COUNT == 8)
        *(uint4 *)to =
            make_uint4(bf16x2_round(values[0], values[1]), bf16x2_round(values[2], values[3]),
                       bf16x2_round(values[4], values[5]), bf16x2_round(values[6], values[7]));
    else
        *(uint2 *)to =
            make_uint2(bf16x2_round(values[0], values[1]), bf16x2_round(values[2], values[3]));
}

template <int COUNT>
static __device__ __forceinline__ void load_floats(float (&values)[COUNT], const float *from)
{
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 quad = *(const float4 *)(from + i);
        values[i] = quad.x, values[i + 1] = quad.y, values[i + 2] = quad.z, values[i + 3] = quad.w;
    }
}

/* Turns pairs (x[i], y[i]), or, where pairs are neighbours, those of x and then y as one row. */
template <int PAIRS>
static __device__ __forceinline__ void rotate(float (&x)[PAIRS], float (&y)[PAIRS],
                                              const float (&cosine)[PAIRS],
                                              const float (&sine)[PAIRS], bool is_interleaved)
{
#pragma unroll
    for (int i = 0; i < PAIRS && is_interleaved; i++) {
        float &low = 2 * i < PAIRS ? x[2 * i] : y[2 * i - PAIRS];
        float &high = 2 * i < PAIRS ? x[2 * i + 1] : y[2 * i + 1 - PAIRS];
        const float turned = low * cosine[i] - high * sine[i];
        high = high * cosine[i] + low * sine[i];
        low = turned;
    }
#pragma unroll
    for (int i = 0; i < PAIRS && !is_interleaved; i++) {
        const float turned = x[i] * cosine[i] - y[i] * sine[i];
        y[i] = y[i] * cosine[i] + x[i] * sine[i];
        x[i] = turned;
    }
}

/* A thread has two runs of PAIRS elements in each of its heads: the same place of both halves, or,
 * where pairs are neighbours, two runs that follow each other. All heads are asked for before the
 * first is used. */
template <int PAIRS> static __device__ void rope_kv(const struct rope_kv_kernel_params &params)
{
    const int64_t thread = (int64_t)blockIdx.x * ROPE_KV_THREADS + threadIdx.x;
    const int64_t group = thread / params.group_threads;
    const int lane = (int)thread & (params.group_threads - 1);
    const bool has_work = group < params.num_groups && lane < params.threads_of_head;
    const int64_t token = has_work ? group / params.groups_of_token : 0;
    const int first_head =
        has_work ? (int)(group - token * params.groups_of_token) * ROPE_KV_HEADS : 0;
    const int num_rotated = params.num_heads + params.num_kv_heads;
    const int half = params.head_dim / 2;
    const bool is_interleaved = params.is_interleaved != 0;
    const int first = is_interleaved ? 2 * PAIRS * lane : PAIRS * lane;
    const int second = first + (is_interleaved ? PAIRS : half);
    __nv_bfloat16 *const heads =
        (__nv_bfloat16 *)params.qkv + (token * params.num_all_heads + first_head) * params.head_dim;
    element_run<PAIRS> x_runs[ROPE_KV_HEADS] = {}, y_runs[ROPE_KV_HEADS] = {};
    float cosine[PAIRS], sine[PAIRS];
    int32_t slot = -1;

    grid_wait_for_previous();
    grid_release_next();
    if (has_work) {
        const int32_t position = params.positions[token];
        slot = params.slot_mapping[token];
#pragma unroll
        for (int i = 0; i < ROPE_KV_HEADS; i++) {
            if (first_head + i < params.num_all_heads) {
                x_runs[i] = load_run<PAIRS>(heads + i * params.head_dim + first);
                y_runs[i] = load_run<PAIRS>(heads + i * params.head_dim + second);
            }
        }
        const float *row = params.cos_sin + (int64_t)position * params.head_dim + PAIRS * lane;
        load_floats(cosine, row);
        load_floats(sine, row + half);
    }
    /* The block of the cache that the token's row is in. */
    const int32_t block = slot / params.block_size;
    __nv_bfloat16 *const rows =
        (__nv_bfloat16 *)(params.blocks + block * params.block_bytes + params.layer_offset) +
        (int64_t)(slot - block * params.block_size) * params.head_dim;

#pragma unroll
    for (int i = 0; i < ROPE_KV_HEADS; i++) {
        const int head = first_head + i;
        const bool is_q = head < params.num_heads, is_v = head >= num_rotated;
        float x[PAIRS], y[PAIRS];
        widen_run(x, x_runs[i]);
        widen_run(y, y_runs[i]);
        /* The same for all: no lane of a group that exchanges sums is elsewhere. */
        if (params.q_norm != nullptr || params.k_norm != nullptr) {
            const float *norm = is_q ? params.q_norm : params.k_norm;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PAIRS; j++)
                sum += x[j] * x[j] + y[j] * y[j];
            for (int distance = params.group_threads / 2; distance > 0; distance /= 2)
                sum += __shfl_xor_sync(0xffffffff, sum, distance);
            if (has_work && !is_v && norm != nullptr) {
                const float scale = 1.0f / sqrtf(sum / (float)params.head_dim + params.norm_eps);
                float weight[PAIRS];
                load_floats(weight, norm + first);
#pragma unroll
                for (int j = 0; j < PAIRS; j++)
                    x[j] *= scale * weight[j];
                load_floats(weight, norm + second);
#pragma unroll
                for (int j = 0; j < PAIRS; j++)
                    y[j] *= scale * weight[j];
            }
        }
        if (!is_v)
            rotate(x, y, cosine, sine, is_interleaved);
        const bool stays = is_q || params.keeps_kv != 0;
        __nv_bfloat16 *to =
            stays ? heads + i * params.head_dim
                  : rows + (int64_t)(head - params.num_heads) * params.block_size * params.head_dim;
        if (has_work && head < params.num_all_heads && (stays || slot >= 0)) {
            store_elements(to + first, x);
            store_elements(to + second, y);
        }
    }
}

extern "C" __global__ void __launch_bounds__(ROPE_KV_THREADS)
    rope_kv_8(const __grid_constant__ struct rope_kv_kernel_params params)
{
    rope_kv<8>(params);
}

extern "C" __global__ void __launch_bounds__(ROPE_KV_THREADS)
    rope_kv_4(const __grid_constant__ struct rope_kv_kernel_params params)
{
    rope_kv<4>(params);
}

/* ---- a cache with scales --------------------------------------------------------------------- */

/* In the order in which the reference adds, so that both choose the same scale: eight sums of every
 * eighth value, then those. */
static __device__ __forceinline__ float sum_over_group(float value)
{
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int i = 0; i < 4; i++)
        sum += __shfl_sync(0xffffffff, value, lane % 8 + 8 * i);
    for (int distance = 1; distance < 8; distance *= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    return sum;
}

/* The first of the scales from `least` on whose errors have the smallest sum of squares. */
static __device__ __forceinline__ uint32_t choose_fp8_scale(float x, uint32_t least)
{
    uint32_t best = least;
    float smallest = INFINITY;
    for (uint32_t i = 0; i < 8 && least > 0; i++) {
        const uint32_t bits = least + 16 * i;
        const float scale = __uint_as_float(bits << 16);
        const float error = __fsub_rn(__fmul_rn(fp8_widen(fp8_round(x / scale)), scale), x);
        const float sum = sum_over_group(__fmul_rn(error, error));
        if (sum < smallest) {
            smallest = sum;
            best = bits;
        }
    }
    return best;
}

template <bool IS_FP8> static __device__ void kv_store(const struct kv_store_kernel_params &params)
{
    const int64_t warp = ((int64_t)blockIdx.x * KV_STORE_THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (params.is_early != 0)
        grid_release_next();
    grid_wait_for_previous();
    grid_release_next();
    if (warp >= params.num_warps)
        return;
    const int64_t row = warp / params.row_groups; /* K heads, then V heads, of all tokens */
    const int group = (int)(warp - row * params.row_groups), dim = group * 32 + lane;
    const int64_t token = row / (2 * params.num_kv_heads);
    const int head = (int)(row - token * 2 * params.num_kv_heads);
    const int32_t slot = params.slot_mapping[token];
    if (slot < 0)
        return;
    const int64_t first =
        (token * (params.num_heads + 2 * params.num_kv_heads) + params.num_heads + head) *
        params.head_dim;
    const float x = dim < params.head_dim
                        ? __bfloat162float(((const __nv_bfloat16 *)params.qkv)[first + dim])
                        : 0.0f;
    const uint32_t largest = __reduce_max_sync(0xffffffff, __float_as_uint(fabsf(x)));
    const bool is_finite = largest < 0x7f800000u;
    uint32_t scale_bits = is_finite ? __bfloat16_as_ushort(__float2bfloat16_rn(
                                          __uint_as_float(largest) / (IS_FP8 ? 448.0f : 127.0f)))
                                    : 0x7fc0u; /* NaN */
    if (IS_FP8 && is_finite)
        scale_bits = choose_fp8_scale(x, scale_bits);
    const float scale = __uint_as_float(scale_bits << 16);
    const float quotient = scale > 0.0f ? x / scale : 0.0f;
    const int32_t block = slot / params.block_size, offset = slot - block * params.block_size;
    unsigned char *to =
        params.blocks + block * params.block_bytes + params.layer_offset + head * params.head_bytes;
    if (dim < params.head_dim)
        to[offset * params.head_dim + dim] =
            (unsigned char)(IS_FP8 ? fp8_round(quotient) : int8_round(quotient));
    if (lane == 0)
        ((uint16_t *)(to +
                      params.block_size * params.head_dim))[offset * params.row_groups + group] =
            (uint16_t)scale_bits;
}

extern "C" __global__ void __launch_bounds__(KV_STORE_THREADS)
    kv_store_int8(const __grid_constant__ struct kv_store_kernel_params params)
{
    kv_store<false>(params);
}

extern "C" __global__ void __launch_bounds__(KV_STORE_THREADS)
    kv_store_fp8(const __grid_constant__ struct kv_store_kernel_params params)
{
    kv_store<true>(params);
}

/* ---- activation and sums --------------------------------------------------------------------- */

static __device__ __forceinline__ void add_floats(float (&values)[8], const float *bias, int column)
{
    if (bias != nullptr) {
        float terms[8];
        load_floats(terms, bias + column);
#pragma unroll
        for (int i = 0; i < 8; i++)
            values[i] += terms[i];
    }
}

extern "C" __global__ void silu_mul(const __grid_constant__ struct silu_mul_kernel_params params)
{
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    grid_wait_for_previous();
    grid_release_next();
    if (column >= params.intermediate_size)
        return;
    const __nv_bfloat16 *row = (const __nv_bfloat16 *)params.gate_up +
                               (int64_t)blockIdx.y * 2 * params.intermediate_size + column;
    float gate[8], up[8];
    load_elements(gate, row);
    load_elements(up, row + params.intermediate_size);
    add_floats(gate, params.gate_bias, column);
    add_floats(up, params.up_bias, column);
#pragma unroll
    for (int i = 0; i < 8; i++)
        gate[i] = gate[i] / (1.0f + exp2_approx(gate[i] * -1.44269504f)) * up[i];
    store_elements(
        (__nv_bfloat16 *)params.d + (int64_t)blockIdx.y * params.intermediate_size + column, gate);
}

extern "C" __global__ void split_add(const __grid_constant__ struct split_add_kernel_params params)
{
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const int64_t place = (int64_t)blockIdx.y * params.num_columns + column;
    grid_wait_for_previous();
    grid_release_next();
    if (column >= params.num_columns)
        return;
    const float4 residual = *(const float4 *)(params.hidden + place);
    float4 sum = *(const float4 *)(params.partial + place);
    for (int split = 1; split < params.num_splits; split++) {
        const float4 part = *(const float4 *)(params.partial + split * params.split_stride + place);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    if (params.bias != nullptr) {
        const float4 bias = *(const float4 *)(params.bias + column);
        sum.x += bias.x, sum.y += bias.y, sum.z += bias.z, sum.w += bias.w;
    }
    *(float4 *)(params.hidden + place) =
        make_float4(residual.x + sum.x, residual.y + sum.y, residual.z + sum.z, residual.w + sum.w);
}
