/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that a benchmark needs beside those it measures: random inputs, the activation as a
 * kernel of its own (the baseline), and references in double precision. */
#include <cuda_bf16.h>
#include <stdint.h>

#define BENCH_KERNEL extern "C" __global__ void

static __device__ __forceinline__ uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* Element i is normal with this scale, the same for the same seed (Box and Muller 1958). */
BENCH_KERNEL bench_fill(__nv_bfloat16 *p, uint64_t count, float scale, uint32_t seed)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t x = mix((uint32_t)i ^ mix(seed + (uint32_t)(i >> 32)));
        uint32_t y = mix(x + 0x9e3779b9u);
        float u = ((x >> 8) + 0.5f) * 0x1p-24f, v = (y >> 8) * 0x1p-24f;
        p[i] = __float2bfloat16(scale * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
    }
}

/* Reads and does nothing else: the roof of whatever streams its weights. *sum is written only so
 * that the loads stay, and never is. */
BENCH_KERNEL bench_read(const uint4 *p, uint64_t count, uint32_t *sum)
{
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    uint32_t x = 0;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = __ldcs(&p[i + j * stride]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += stride) {
        const uint4 v = __ldcs(&p[i]);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345678u)
        *sum = x;
}

static __device__ __forceinline__ float silu(float x)
{
    return __fdividef(x, 1.0f + __expf(-x));
}

/* d[m, n] = silu(gate) * up of gate_up[m, 2 n], gate in columns [0, n); 8 columns a thread, n % 8
 * == 0. What a framework launches after its merged product. */
BENCH_KERNEL bench_silu_mul(const uint4 *gate_up, uint4 *d, int64_t m, int32_t n)
{
    const int32_t row_vectors = n / 8;
    const int64_t count = m * row_vectors;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / row_vectors, column = i - row * row_vectors;
        const uint4 gate = gate_up[row * 2 * row_vectors + column];
        const uint4 up = gate_up[row * 2 * row_vectors + row_vectors + column];
        uint4 result;
        const __nv_bfloat162 *g = (const __nv_bfloat162 *)&gate, *u = (const __nv_bfloat162 *)&up;
        __nv_bfloat162 *r = (__nv_bfloat162 *)&result;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = __bfloat1622float2(g[j]), y = __bfloat1622float2(u[j]);
            r[j] = __floats2bfloat162_rn(silu(x.x) * y.x, silu(x.y) * y.y);
        }
        d[i] = result;
    }
}

/* The same as bench_silu_mul of fp32 products, one rounding. */
BENCH_KERNEL bench_silu_mul_fp32(const float *gate_up, __nv_bfloat16 *d, int64_t m, int32_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < m * n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / n, column = i - row * n;
        const float x = gate_up[row * 2 * n + column], y = gate_up[row * 2 * n + n + column];
        d[i] = __float2bfloat16(x / (1.0f + expf(-x)) * y);
    }
}

/* Eager PyTorch: the products, silu and the result are each rounded. */
BENCH_KERNEL bench_silu_mul_eager(const __nv_bfloat16 *gate_up, __nv_bfloat16 *d, int64_t m,
                                  int32_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < m * n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / n, column = i - row * n;
        const float x = __bfloat162float(gate_up[row * 2 * n + column]);
        const float y = __bfloat162float(gate_up[row * 2 * n + n + column]);
        const float z = __bfloat162float(__float2bfloat16(x / (1.0f + expf(-x))));
        d[i] = __float2bfloat16(z * y);
    }
}

BENCH_KERNEL bench_widen(const __nv_bfloat16 *from, float *to, uint64_t count)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x)
        to[i] = __bfloat162float(from[i]);
}

/* Order of bf16 values as integers: neighbours differ by one. */
static __device__ __forceinline__ int32_t rank_of(uint16_t bits)
{
    return bits & 0x8000 ? -(int32_t)(bits & 0x7fff) : (int32_t)bits;
}

static __device__ __forceinline__ int32_t ulps_apart(__nv_bfloat16 a, __nv_bfloat16 b)
{
    return abs(rank_of(__bfloat16_as_ushort(a)) - rank_of(__bfloat16_as_ushort(b)));
}

static __device__ __forceinline__ double swiglu_double(double gate, double up)
{
    return gate / (1.0 + exp(-gate)) * up;
}

/* counts[0]: elements never written (still poisoned with 0xffff); counts[1]: |d - exact| beyond its
 * bound; counts[2]: more than 1 ulp from the rounded reference. worst: largest |d - exact| / bound,
 * as the bits of a float. Of `count` outputs one warp each: the last 64 of the matrix, then random
 * ones. up NULL: a plain product. The bound is half an ulp of the result, plus what fp32 sums that
 * a tensor core truncates may lose: k / 16 steps of 2^-22 of the sum of magnitudes. */
struct gating_value {
    double activated, up;
};

/* struct imbrex_gating as imbrex_ops.h lays it out and defines it. */
struct bench_gating_params {
    int32_t activation; /* SiLU, GeLU by erf, by tanh, ReLU */
    float alpha, limit, up_offset;
};

static __device__ __forceinline__ gating_value gate_double(const bench_gating_params &p, double x,
                                                           double y)
{
    const double limit = p.limit;
    if (limit != 0.0) {
        x = x > limit ? limit : x;
        y = y > limit ? limit : y < -limit ? -limit : y;
    }
    y += p.up_offset;
    switch (p.activation) {
    case 0:
        return {x / (1.0 + exp(-(p.alpha == 0.0f ? 1.0 : (double)p.alpha) * x)), y};
    case 1:
        return {0.5 * x * erfc(-x * 0.70710678118654752440), y};
    case 2:
        return {x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))), y};
    default:
        return {x < 0.0 ? 0.0 : x, y};
    }
}

BENCH_KERNEL bench_check(const __nv_bfloat16 *a, const __nv_bfloat16 *gate, const __nv_bfloat16 *up,
                         const __nv_bfloat16 *d, int64_t m, int32_t n, int32_t k, uint32_t seed,
                         uint32_t roundings, uint32_t *counts, int32_t *worst,
                         const float *gate_bias, const float *up_bias, int32_t interleave,
                         struct bench_gating_params gating)
{
    const uint32_t x = mix(blockIdx.x ^ seed), y = mix(x + 0x9e3779b9u);
    int64_t row = (((uint64_t)x << 32) | y) % (uint64_t)m;
    int32_t column = mix(y) % (uint32_t)n;
    if (blockIdx.x < 64) {
        row = m - 1 - (blockIdx.x % 8 < m ? blockIdx.x % 8 : 0);
        column = n - 1 - (int32_t)(blockIdx.x / 8 < n ? blockIdx.x / 8 : 0);
    }
    const int64_t weights =
        (int64_t)(column + (interleave != 0 ? column / interleave * interleave : 0)) * k;
    double g = 0.0, g_size = 0.0, u = 0.0, u_size = 0.0;
    for (int32_t i = threadIdx.x; i < k; i += 32) {
        const double v = __bfloat162float(a[row * k + i]);
        const double gate_product = v * (double)__bfloat162float(gate[weights + i]);
        g += gate_product;
        g_size += fabs(gate_product);
        if (up != nullptr) {
            const double up_product = v * (double)__bfloat162float(up[weights + i]);
            u += up_product;
            u_size += fabs(up_product);
        }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        g += __shfl_down_sync(~0u, g, offset);
        g_size += __shfl_down_sync(~0u, g_size, offset);
        u += __shfl_down_sync(~0u, u, offset);
        u_size += __shfl_down_sync(~0u, u_size, offset);
    }
    if (threadIdx.x != 0)
        return;
    const __nv_bfloat16 found = d[row * n + column];
    if (gate_bias != nullptr)
        g += gate_bias[column];
    if (up_bias != nullptr)
        u += up_bias[column];
    const double step = (k / 16 + 16) * 0x1p-22;
    /* The slope of an activation is at most 1.13. A product that is rounded to bf16 on the way adds
     * 2^-9 of itself, mostly; steps of an activation and the argument of an exponential, 2^-8. */
    const double g_error = step * g_size + (roundings > 1 ? fabs(g) * 0x1p-9 : 0.0);
    const double u_error = step * u_size + (roundings > 1 ? fabs(u) * 0x1p-9 : 0.0);
    const gating_value value = gate_double(gating, g, u);
    const double exact = up != nullptr ? value.activated * value.up : g;
    const double inner = up != nullptr ? 1.13 * g_error * (fabs(value.up) + u_error) +
                                             fabs(value.activated) * u_error
                                       : g_error;
    const double share = roundings > 2 ? (5.0 + 2.0 * fabs(g)) * 0x1p-8 : 0x1p-8;
    const double bound = fabs(exact) * share + inner + 1e-30;
    const double error = fabs((double)__bfloat162float(found) - exact);
    float ratio = (float)(error / bound);
    if (!(ratio >= 0.0f))
        ratio = 1e9f; /* NaN */
    if (ratio > 1.0f)
        atomicAdd(&counts[1], 1u);
    if (ulps_apart(found, __double2bfloat16(exact)) > 1)
        atomicAdd(&counts[2], 1u);
    atomicMax(worst, __float_as_int(ratio));
}

/* Counts the elements that still hold the poison. */
BENCH_KERNEL bench_count_poison(const uint16_t *d, uint64_t count, uint32_t *counts)
{
    uint32_t found = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x)
        found += d[i] == 0xffff;
    if (found != 0)
        atomicAdd(&counts[0], found);
}

/* counts[0]: elements of two matrices without gaps that have the same bits. */
BENCH_KERNEL bench_count_equal(const uint16_t *x, const uint16_t *y, uint64_t count,
                               uint32_t *counts)
{
    uint32_t found = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x)
        found += x[i] == y[i];
    atomicAdd(&counts[0], found);
}

/* reference[r, column] of rows first_row + r * row_step, in double precision. One thread an output,
 * 16 x 16 of them a block, columns along the x of the grid. */
BENCH_KERNEL bench_reference(const __nv_bfloat16 *a, const __nv_bfloat16 *gate,
                             const __nv_bfloat16 *up, double *reference, int32_t num_rows,
                             int64_t row_step, int32_t n, int32_t k, int32_t blocks_of_columns)
{
    __shared__ double a_tile[16][17], gate_tile[16][17], up_tile[16][17];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int32_t column0 = (int32_t)(blockIdx.x % blocks_of_columns) * 16;
    const int32_t row0 = (int32_t)(blockIdx.x / blocks_of_columns) * 16;
    double g = 0.0, u = 0.0;
    for (int32_t k0 = 0; k0 < k; k0 += 16) {
        const bool in_k = k0 + x < k;
        const bool in_row = row0 + y < num_rows, in_column = column0 + y < n;
        const int64_t weight = (int64_t)(column0 + y) * k + k0 + x;
        a_tile[y][x] =
            in_k && in_row ? (double)__bfloat162float(a[(row0 + y) * row_step * k + k0 + x]) : 0.0;
        gate_tile[y][x] = in_k && in_column ? (double)__bfloat162float(gate[weight]) : 0.0;
        if (up != nullptr)
            up_tile[y][x] = in_k && in_column ? (double)__bfloat162float(up[weight]) : 0.0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            g += a_tile[y][i] * gate_tile[x][i];
            if (up != nullptr)
                u += a_tile[y][i] * up_tile[x][i];
        }
        __syncthreads();
    }
    if (row0 + y < num_rows && column0 + x < n)
        reference[(int64_t)(row0 + y) * n + column0 + x] = up != nullptr ? swiglu_double(g, u) : g;
}

/* counts[0]: elements whose bits differ from the reference rounded once; counts[1]: those more than
 * 1 ulp from it. */
BENCH_KERNEL bench_compare(const __nv_bfloat16 *d, const double *reference, int32_t num_rows,
                           int64_t row_step, int32_t n, uint32_t *counts)
{
    uint32_t differing = 0, far = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)num_rows * n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / n;
        const __nv_bfloat16 expected = __double2bfloat16(reference[i]);
        const int32_t apart = ulps_apart(d[row * row_step * n + i - row * n], expected);
        differing += apart != 0;
        far += apart > 1;
    }
    atomicAdd(&counts[0], differing);
    atomicAdd(&counts[1], far);
}
