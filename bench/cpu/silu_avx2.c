/* SPDX-License-Identifier: Apache-2.0 */
/* The second pass of the unfused MLP, with the exp that the fused kernels use. */
#include "bench/cpu/cpu_cell.h"
#include "ops/cpu/vec_avx2.h"

void silu_product_avx2(const float *gate, const float *up, float *d, int64_t count)
{
    int64_t i = 0;

    for (; i + 8 <= count; i += 8) {
        __m256 product =
            _mm256_mul_ps(vec_silu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i));
        _mm256_storeu_ps(d + i, product);
    }
    silu_product(gate + i, up + i, d + i, count - i);
}
