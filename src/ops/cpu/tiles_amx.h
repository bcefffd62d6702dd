/* SPDX-License-Identifier: Apache-2.0 */
/* What the AMX kernels share. Tile registers belong to a thread: a kernel loads their shapes when
 * it begins a piece and releases them at its end, so that other code finds them as after a thread's
 * start. Included by *_amx.c only. */
#ifndef IMBREX_OPS_CPU_TILES_AMX_H
#define IMBREX_OPS_CPU_TILES_AMX_H

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define TILE_ROWS 16
#define TILE_ROW_BYTES 64
#define TILE_BYTES (TILE_ROWS * TILE_ROW_BYTES)
#define TILE_LANES 16 /* fp32 or int32 of a row */

#define TILE_INLINE static inline __attribute__((always_inline))

/* The memory operand of ldtilecfg. Source: Intel's Software Developer's Manual, LDTILECFG. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};
_Static_assert(sizeof(struct tile_shapes) == 64, "the processor's size");

TILE_INLINE void tile_shape_set(struct tile_shapes *shapes, int tile, int32_t num_rows,
                                int32_t row_bytes)
{
    shapes->palette = 1;
    shapes->num_rows[tile] = (uint8_t)num_rows;
    shapes->row_bytes[tile] = (uint16_t)row_bytes;
}

/* Between stores and the tile load that reads them: gcc's intrinsics do not say that they read
 * memory. */
TILE_INLINE void tile_fence(void)
{
    __asm__ volatile("" ::: "memory");
}

/* Four rows, 4 * quad and on, of the transpose of tile [16][16]. */
TILE_INLINE void tile_transpose_quad(const float *tile, int quad, __m512 rows[4])
{
    __m512 mixed[4];
    const float *at = tile + 4 * quad;
    for (int i = 0; i < 4; i++, at += TILE_LANES) {
        /* Four values each of rows i, 4 + i, 8 + i and 12 + i. */
        __m512 vec = _mm512_broadcast_f32x4(_mm_loadu_ps(at));
        vec = _mm512_mask_broadcast_f32x4(vec, 0x00f0, _mm_loadu_ps(at + 4 * TILE_LANES));
        vec = _mm512_mask_broadcast_f32x4(vec, 0x0f00, _mm_loadu_ps(at + 8 * TILE_LANES));
        mixed[i] = _mm512_mask_broadcast_f32x4(vec, 0xf000, _mm_loadu_ps(at + 12 * TILE_LANES));
    }
    __m512d low_01 = _mm512_castps_pd(_mm512_unpacklo_ps(mixed[0], mixed[1]));
    __m512d low_23 = _mm512_castps_pd(_mm512_unpacklo_ps(mixed[2], mixed[3]));
    __m512d high_01 = _mm512_castps_pd(_mm512_unpackhi_ps(mixed[0], mixed[1]));
    __m512d high_23 = _mm512_castps_pd(_mm512_unpackhi_ps(mixed[2], mixed[3]));
    rows[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_01, low_23));
    rows[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_01, low_23));
    rows[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_01, high_23));
    rows[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_01, high_23));
}

#endif
#endif
