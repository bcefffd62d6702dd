/* SPDX-License-Identifier: Apache-2.0 */
/* Many rows of activations: arithmetic is the limit, so a panel of columns is unpacked once for all
 * of them, a few blocks deep so that it stays in L1, in the order in which it is multiplied: four
 * consecutive elements of eight columns are a vector, against which four consecutive activations of
 * a row are broadcast. A register tile is four rows by two such vectors.
 *
 *   for each stretch of blocks             sums stay in memory meanwhile
 *     unpack the panel's columns
 *     for each four rows
 *       for each sixteen columns           tile: block by block
 */
#include "ops/cpu/quant_tile_avx2.h"

#if defined(__x86_64__)

#include <assert.h>
#include <stddef.h>

#include "ops/cpu/quant_open_avx2.h"
#include "ops/quant.h"

#define TILE_ROWS 4
#define TILE_VECS 2 /* of eight columns */
#define TILE_COLS (TILE_VECS * VEC_LANES)
#define QUADS (QUANT_BLOCK / 4)
#define QUAD_BYTES (4 * TILE_COLS)
#define LINE_BYTES 64
#define PANEL_TILES (QUANT_PANEL_COLS / TILE_COLS)

/* Blocks of a stretch: a panel of this depth takes 18 KiB (Q8_0), 20 (other blocks of 32) or 23. */
#define STRETCH_WIDE_BLOCKS 4
#define STRETCH_BLOCKS 8
#define STRETCH_K_BLOCKS 1
#define WIDE_ROW_ELEMENTS (STRETCH_WIDE_BLOCKS * QUANT_BLOCK)

/* Q8_0 has no integers that vpmaddubsw takes: its panels and their activations are widened to 16
 * bits for vpmaddwd. */
#define DUOS (QUANT_BLOCK / 2)
struct panel_wide_block {
    int16_t q[DUOS * 2 * TILE_COLS]; /* [duo][vec][2 * column + element % 2] */
    float scales[TILE_VECS][VEC_LANES];
};

/* One block of sixteen columns. */
struct panel_block {
    uint8_t q[QUADS * QUAD_BYTES]; /* [quad][vec][4 * column + element % 4] */
    float scales[TILE_VECS][VEC_LANES];
    float mins[TILE_VECS][VEC_LANES]; /* where quant_has_min */
};

struct panel_k_block {
    uint8_t q[QUANT_K_BLOCK / 4 * QUAD_BYTES];
    int32_t group_scales[16][TILE_VECS][VEC_LANES]; /* twice 16 bits, both the scale */
    /* What sums of activations are multiplied by: two groups of a column. Q4_K and Q5_K: mins, in
     * [0, 4); Q6_K: -32 * scale. */
    int16_t sum_factors[8][TILE_VECS][2 * VEC_LANES];
    float scales[TILE_VECS][VEC_LANES];
    float mins[TILE_VECS][VEC_LANES];
};

_Static_assert(sizeof(struct panel_block) * STRETCH_BLOCKS * PANEL_TILES <= QUANT_PANEL_BYTES, "");
_Static_assert(sizeof(struct panel_k_block) * STRETCH_K_BLOCKS * PANEL_TILES <= QUANT_PANEL_BYTES,
               "");
_Static_assert(sizeof(struct panel_block) % 32 == 0 && sizeof(struct panel_k_block) % 32 == 0, "");

/* ---- unpacking --------------------------------------------------------------------------------*/

/* Vector i of columns becomes quad i of all eight columns. */
VEC_INLINE void store_quads(const __m256i cols[8], void *at)
{
    uint8_t *quads = at;
    __m256i halves[8];
    VEC_UNROLL
    for (int i = 0; i < 8; i += 4) {
        __m256i low_01 = _mm256_unpacklo_epi32(cols[i], cols[i + 1]);
        __m256i high_01 = _mm256_unpackhi_epi32(cols[i], cols[i + 1]);
        __m256i low_23 = _mm256_unpacklo_epi32(cols[i + 2], cols[i + 3]);
        __m256i high_23 = _mm256_unpackhi_epi32(cols[i + 2], cols[i + 3]);
        halves[i] = _mm256_unpacklo_epi64(low_01, low_23);
        halves[i + 1] = _mm256_unpackhi_epi64(low_01, low_23);
        halves[i + 2] = _mm256_unpacklo_epi64(high_01, high_23);
        halves[i + 3] = _mm256_unpackhi_epi64(high_01, high_23);
    }
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        _mm256_store_si256((__m256i *)(void *)(quads + i * QUAD_BYTES),
                           _mm256_permute2x128_si256(halves[i], halves[i + 4], 0x20));
        _mm256_store_si256((__m256i *)(void *)(quads + (i + 4) * QUAD_BYTES),
                           _mm256_permute2x128_si256(halves[i], halves[i + 4], 0x31));
    }
}

/* A byte for each of eight groups of eight columns; row i: group i of all columns. */
VEC_INLINE void transpose_bytes(const uint64_t cols[8], uint8_t groups[8][8])
{
    __m128i pairs[4];
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm_unpacklo_epi8(_mm_cvtsi64_si128((int64_t)cols[2 * i]),
                                     _mm_cvtsi64_si128((int64_t)cols[2 * i + 1]));
    }
    __m128i low_0 = _mm_unpacklo_epi16(pairs[0], pairs[1]);
    __m128i low_1 = _mm_unpackhi_epi16(pairs[0], pairs[1]);
    __m128i high_0 = _mm_unpacklo_epi16(pairs[2], pairs[3]);
    __m128i high_1 = _mm_unpackhi_epi16(pairs[2], pairs[3]);
    _mm_storeu_si128((__m128i *)(void *)groups[0], _mm_unpacklo_epi32(low_0, high_0));
    _mm_storeu_si128((__m128i *)(void *)groups[2], _mm_unpackhi_epi32(low_0, high_0));
    _mm_storeu_si128((__m128i *)(void *)groups[4], _mm_unpacklo_epi32(low_1, high_1));
    _mm_storeu_si128((__m128i *)(void *)groups[6], _mm_unpackhi_epi32(low_1, high_1));
}

VEC_INLINE void store_group_scale(struct panel_k_block *block, int group, int vec, __m256i scales)
{
    __m256i low = _mm256_and_si256(scales, _mm256_set1_epi32(0xffff));
    _mm256_store_si256((__m256i *)(void *)block->group_scales[group][vec],
                       _mm256_or_si256(low, _mm256_slli_epi32(scales, 16)));
}

VEC_INLINE __m128i load_8(const uint8_t *bytes)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)bytes);
}

VEC_INLINE void unpack_k_scales(enum dtype dtype, const unsigned char *const rows[8], int64_t at,
                                struct panel_k_block *block, int vec)
{
    uint8_t groups[16][8], mins[8][8];
    uint64_t scale_bytes[2][8], min_bytes[8];
    for (int col = 0; col < 8; col++) {
        if (dtype == DTYPE_Q6_K) {
            const unsigned char *scales = rows[col] + at + offsetof(struct q6_k_block, scales);
            memcpy(&scale_bytes[0][col], scales, sizeof(uint64_t));
            memcpy(&scale_bytes[1][col], scales + 8, sizeof(uint64_t));
        } else {
            open_k_scales(rows[col] + at, &scale_bytes[0][col], &min_bytes[col]);
        }
    }
    transpose_bytes(scale_bytes[0], groups);
    if (dtype == DTYPE_Q6_K) {
        transpose_bytes(scale_bytes[1], groups + 8);
        for (int group = 0; group < 16; group++) {
            store_group_scale(block, group, vec, _mm256_cvtepi8_epi32(load_8(groups[group])));
        }
        for (int pair = 0; pair < 8; pair++) {
            __m128i both =
                _mm_unpacklo_epi8(load_8(groups[2 * pair]), load_8(groups[2 * pair + 1]));
            __m256i factors = _mm256_slli_epi16(_mm256_cvtepi8_epi16(both), 5);
            _mm256_store_si256((__m256i *)(void *)block->sum_factors[pair][vec],
                               _mm256_sub_epi16(_mm256_setzero_si256(), factors));
        }
        return;
    }
    transpose_bytes(min_bytes, mins);
    for (int group = 0; group < 8; group++) {
        store_group_scale(block, group, vec, _mm256_cvtepu8_epi32(load_8(groups[group])));
    }
    for (int pair = 0; pair < 4; pair++) {
        __m128i both = _mm_unpacklo_epi8(load_8(mins[2 * pair]), load_8(mins[2 * pair + 1]));
        _mm256_store_si256((__m256i *)(void *)block->sum_factors[pair][vec],
                           _mm256_cvtepu8_epi16(both));
    }
}

/* Blocks [first, first + num_blocks) of sixteen columns of Q8_0. */
VEC_INLINE void unpack_wide_tile(const unsigned char *const rows[TILE_COLS], int64_t first,
                                 int64_t num_blocks, unsigned char *panel)
{
    struct panel_wide_block *block = (struct panel_wide_block *)(void *)panel;
    for (int64_t block_idx = 0; block_idx < num_blocks; block_idx++, block++) {
        int64_t at = (first + block_idx) * (int64_t)sizeof(struct q8_0_block);
        for (int vec = 0; vec < TILE_VECS; vec++) {
            const unsigned char *const *vec_rows = rows + vec * VEC_LANES;
            for (int half = 0; half < 2; half++) {
                __m256i cols[8];
                VEC_UNROLL
                for (int col = 0; col < 8; col++) {
                    const unsigned char *q =
                        vec_rows[col] + at + offsetof(struct q8_0_block, q) + 16 * half;
                    cols[col] =
                        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)q));
                }
                store_quads(cols, block->q + half * DUOS * TILE_COLS + vec * 2 * VEC_LANES);
            }
            _mm256_store_ps(block->scales[vec], load_scales(vec_rows, at));
        }
    }
}

/* The same of the other dtypes. */
VEC_INLINE void unpack_tile(enum dtype dtype, const unsigned char *const rows[TILE_COLS],
                            int64_t first, int64_t num_blocks, unsigned char *panel)
{
    int64_t block_bytes = block_bytes_of(dtype);
    for (int64_t block_idx = 0; block_idx < num_blocks; block_idx++) {
        int64_t at = (first + block_idx) * block_bytes;
        struct panel_block *block = (struct panel_block *)(void *)panel + block_idx;
        struct panel_k_block *k_block = (struct panel_k_block *)(void *)panel + block_idx;
        int num_groups = is_k_dtype(dtype) ? 8 : 1;
        for (int vec = 0; vec < TILE_VECS; vec++) {
            const unsigned char *const *vec_rows = rows + vec * VEC_LANES;
            VEC_UNROLL
            for (int group = 0; group < num_groups; group++) {
                __m256i cols[8];
                VEC_UNROLL
                for (int col = 0; col < 8; col++) {
                    cols[col] = open_32(dtype, vec_rows[col] + at, group);
                }
                uint8_t *q = is_k_dtype(dtype) ? k_block->q : block->q;
                store_quads(cols, q + group * QUADS * QUAD_BYTES + vec * 4 * VEC_LANES);
            }
            float *scales = is_k_dtype(dtype) ? k_block->scales[vec] : block->scales[vec];
            float *mins = is_k_dtype(dtype) ? k_block->mins[vec] : block->mins[vec];
            _mm256_store_ps(scales, load_scales(vec_rows, at + scale_offset(dtype)));
            if (quant_has_min(dtype)) {
                _mm256_store_ps(mins, load_scales(vec_rows, at + MIN_OFFSET));
            }
            if (is_k_dtype(dtype)) {
                unpack_k_scales(dtype, vec_rows, at, k_block, vec);
            }
        }
    }
}

/* ---- multiplying ------------------------------------------------------------------------------*/

/* gcc 12 otherwise makes trees of the sums below, for which there are no registers. */
VEC_INLINE __m256i keep_order(__m256i vec)
{
    __asm__("" : "+x"(vec));
    return vec;
}

struct tile {
    const unsigned char *panel;
    const unsigned char *rows; /* of activations, row_bytes apart */
    int64_t row_bytes, num_blocks;
    const int16_t *wide_rows; /* Q8_0: the same widened, WIDE_ROW_ELEMENTS apart */
    float *sums;              /* [num_rows][QUANT_PANEL_COLS] */
};

/* A tile of integers or of floats: rows * TILE_VECS of the vectors are used. */
#define TILE_SUMS (TILE_ROWS * TILE_VECS)

/* dots += over 32 elements; factors: what sums of two products are multiplied by, ones or the
 * scales of the 16 or 32 elements: [half][vec]. */
VEC_INLINE void add_products(enum dtype dtype, int num_rows, const uint8_t *quads,
                             const unsigned char *activations, int64_t row_bytes,
                             const __m256i *factors, __m256i *dots)
{
    int max_pairs = quant_max_pairs(dtype);
    __m256i pairs[TILE_SUMS];
    VEC_UNROLL
    for (int quad = 0; quad < QUADS; quad++) {
        __m256i weights[TILE_VECS];
        VEC_UNROLL
        for (int vec = 0; vec < TILE_VECS; vec++) {
            weights[vec] = _mm256_load_si256(
                (const __m256i *)(const void *)(quads + quad * QUAD_BYTES + vec * 4 * VEC_LANES));
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            __m256i four = broadcast_4(activations + row * row_bytes + 4 * quad);
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                int idx = row * TILE_VECS + vec;
                __m256i products = _mm256_maddubs_epi16(weights[vec], four);
                pairs[idx] =
                    quad % max_pairs == 0 ? products : _mm256_add_epi16(pairs[idx], products);
                pairs[idx] = keep_order(pairs[idx]);
                if ((quad + 1) % max_pairs == 0) {
                    dots[idx] = _mm256_add_epi32(
                        dots[idx],
                        _mm256_madd_epi16(pairs[idx], factors[quad / 4 * TILE_VECS + vec]));
                }
            }
        }
    }
}

VEC_INLINE void load_sums(const struct tile *tile, int num_rows, __m256 *sums)
{
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int vec = 0; vec < TILE_VECS; vec++) {
            sums[row * TILE_VECS + vec] =
                _mm256_load_ps(tile->sums + row * QUANT_PANEL_COLS + vec * VEC_LANES);
        }
    }
}

VEC_INLINE void store_sums(const struct tile *tile, int num_rows, const __m256 *sums)
{
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int vec = 0; vec < TILE_VECS; vec++) {
            _mm256_store_ps(tile->sums + row * QUANT_PANEL_COLS + vec * VEC_LANES,
                            sums[row * TILE_VECS + vec]);
        }
    }
}

VEC_INLINE void multiply_blocks(enum dtype dtype, int num_rows, const struct tile *tile)
{
    const struct panel_block *block = (const struct panel_block *)(const void *)tile->panel;
    const unsigned char *rows = tile->rows;
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i factors[2 * TILE_VECS] = {ones, ones, ones, ones};
    __m256 sums[TILE_SUMS];
    load_sums(tile, num_rows, sums);
    for (int64_t block_idx = 0; block_idx < tile->num_blocks; block_idx++, block++) {
        __m256i dots[TILE_SUMS];
        VEC_UNROLL
        for (int idx = 0; idx < num_rows * TILE_VECS; idx++) {
            dots[idx] = _mm256_setzero_si256();
        }
        add_products(dtype, num_rows, block->q, rows + offsetof(struct q8_activations, q),
                     tile->row_bytes, factors, dots);
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const struct q8_activations *a =
                (const struct q8_activations *)(const void *)(rows + row * tile->row_bytes);
            __m256 activation_scale = _mm256_set1_ps(a->scale);
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                int idx = row * TILE_VECS + vec;
                __m256i dot = dots[idx];
                if (quant_offset(dtype) != 0) {
                    dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(quant_offset(dtype) * a->sum));
                }
                sums[idx] = add_block(
                    dtype, sums[idx], dot, _mm256_load_ps(block->scales[vec]),
                    _mm256_set1_ps((float)a->sum),
                    _mm256_load_ps(quant_has_min(dtype) ? block->mins[vec] : block->scales[vec]),
                    activation_scale);
            }
        }
        rows += sizeof(struct q8_activations);
    }
    store_sums(tile, num_rows, sums);
}

static void widen_rows(const struct tile *tile, int32_t num_rows, int16_t *wide_rows)
{
    for (int32_t row = 0; row < num_rows; row++) {
        const struct q8_activations *block =
            (const struct q8_activations *)(const void *)(tile->rows + row * tile->row_bytes);
        __m256i *wide = (__m256i *)(void *)(wide_rows + row * WIDE_ROW_ELEMENTS);
        for (int64_t block_idx = 0; block_idx < tile->num_blocks; block_idx++, block++) {
            __m256i q = load_32(block->q);
            _mm256_store_si256(wide++, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)));
            _mm256_store_si256(wide++, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1)));
        }
    }
}

VEC_INLINE void multiply_wide_blocks(enum dtype dtype, int num_rows, const struct tile *tile)
{
    const struct panel_wide_block *block =
        (const struct panel_wide_block *)(const void *)tile->panel;
    const unsigned char *rows = tile->rows;
    const int16_t *wide = tile->wide_rows;
    __m256 sums[TILE_SUMS];
    load_sums(tile, num_rows, sums);
    for (int64_t block_idx = 0; block_idx < tile->num_blocks; block_idx++, block++) {
        __m256i dots[TILE_SUMS];
        VEC_UNROLL
        for (int duo = 0; duo < DUOS; duo++) {
            __m256i weights[TILE_VECS];
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                weights[vec] = load_32(block->q + duo * 2 * TILE_COLS + vec * 2 * VEC_LANES);
            }
            VEC_UNROLL
            for (int row = 0; row < num_rows; row++) {
                __m256i two = broadcast_4(wide + row * WIDE_ROW_ELEMENTS + 2 * duo);
                VEC_UNROLL
                for (int vec = 0; vec < TILE_VECS; vec++) {
                    int idx = row * TILE_VECS + vec;
                    __m256i pair = _mm256_madd_epi16(weights[vec], two);
                    dots[idx] = keep_order(duo == 0 ? pair : _mm256_add_epi32(dots[idx], pair));
                }
            }
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const struct q8_activations *a =
                (const struct q8_activations *)(const void *)(rows + row * tile->row_bytes);
            __m256 activation_scale = _mm256_set1_ps(a->scale);
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                int idx = row * TILE_VECS + vec;
                sums[idx] =
                    add_block(dtype, sums[idx], dots[idx], _mm256_load_ps(block->scales[vec]),
                              activation_scale, activation_scale, activation_scale);
            }
        }
        rows += sizeof(struct q8_activations);
        wide += QUANT_BLOCK;
    }
    store_sums(tile, num_rows, sums);
}

/* Sums of activations times what stands in sum_factors, num_pairs of them. */
VEC_INLINE __m256i factor_sums(const struct panel_k_block *block, int vec, const int16_t *sums,
                               int num_pairs)
{
    __m256i total = _mm256_setzero_si256();
    VEC_UNROLL
    for (int pair = 0; pair < num_pairs; pair++) {
        __m256i factors =
            _mm256_load_si256((const __m256i *)(const void *)block->sum_factors[pair][vec]);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(factors, broadcast_4(sums + 2 * pair)));
    }
    return total;
}

VEC_INLINE void multiply_k_blocks(enum dtype dtype, int num_rows, const struct tile *tile)
{
    const struct panel_k_block *block = (const struct panel_k_block *)(const void *)tile->panel;
    const unsigned char *rows = tile->rows;
    __m256 sums[TILE_SUMS];
    load_sums(tile, num_rows, sums);
    for (int64_t block_idx = 0; block_idx < tile->num_blocks; block_idx++, block++) {
        __m256i dots[TILE_SUMS];
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                const struct q8_k_activations *a =
                    (const struct q8_k_activations *)(const void *)(rows + row * tile->row_bytes);
                dots[row * TILE_VECS + vec] = dtype == DTYPE_Q6_K
                                                  ? factor_sums(block, vec, a->sums, 8)
                                                  : _mm256_setzero_si256();
            }
        }
        const unsigned char *q = rows + offsetof(struct q8_k_activations, q);
        for (int group = 0; group < 8; group++) {
            __m256i factors[2 * TILE_VECS];
            VEC_UNROLL
            for (int half = 0; half < 2; half++) {
                VEC_UNROLL
                for (int vec = 0; vec < TILE_VECS; vec++) {
                    int scale_idx = dtype == DTYPE_Q6_K ? 2 * group + half : group;
                    factors[half * TILE_VECS + vec] = _mm256_load_si256(
                        (const __m256i *)(const void *)block->group_scales[scale_idx][vec]);
                }
            }
            add_products(dtype, num_rows, block->q + group * QUADS * QUAD_BYTES, q + 32 * group,
                         tile->row_bytes, factors, dots);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const struct q8_k_activations *a =
                (const struct q8_k_activations *)(const void *)(rows + row * tile->row_bytes);
            int16_t sums_of_32[8];
            _mm_storeu_si128((__m128i *)(void *)sums_of_32, k_sums_of_32(a->sums));
            VEC_UNROLL
            for (int vec = 0; vec < TILE_VECS; vec++) {
                int idx = row * TILE_VECS + vec;
                __m256 min_dots = _mm256_setzero_ps(), mins = min_dots;
                if (quant_has_min(dtype)) {
                    min_dots = _mm256_cvtepi32_ps(factor_sums(block, vec, sums_of_32, 4));
                    mins = _mm256_load_ps(block->mins[vec]);
                }
                sums[idx] =
                    add_block(dtype, sums[idx], dots[idx], _mm256_load_ps(block->scales[vec]),
                              min_dots, mins, _mm256_set1_ps(a->scale));
            }
        }
        rows += sizeof(struct q8_k_activations);
    }
    store_sums(tile, num_rows, sums);
}

/* ---- kernels of each dtype --------------------------------------------------------------------*/

typedef void unpack_fn(const unsigned char *const rows[TILE_COLS], int64_t first,
                       int64_t num_blocks, unsigned char *panel);
typedef void tile_fn(const struct tile *tile);

#define DEFINE_TILE(dtype, multiply, num_rows)                     \
    static void tile_##dtype##_##num_rows(const struct tile *tile) \
    {                                                              \
        multiply(DTYPE_##dtype, num_rows, tile);                   \
    }
#define DEFINE_TILES(dtype, multiply) \
    DEFINE_TILE(dtype, multiply, 1)   \
    DEFINE_TILE(dtype, multiply, 2)   \
    DEFINE_TILE(dtype, multiply, 3)   \
    DEFINE_TILE(dtype, multiply, 4)
DEFINE_TILES(Q8_0, multiply_wide_blocks)
DEFINE_TILES(Q4_0, multiply_blocks)
DEFINE_TILES(Q4_1, multiply_blocks)
DEFINE_TILES(Q5_0, multiply_blocks)
DEFINE_TILES(Q5_1, multiply_blocks)
DEFINE_TILES(Q4_K, multiply_k_blocks)
DEFINE_TILES(Q5_K, multiply_k_blocks)
DEFINE_TILES(Q6_K, multiply_k_blocks)

#define DEFINE_UNPACK(dtype)                                                              \
    static void unpack_##dtype(const unsigned char *const rows[TILE_COLS], int64_t first, \
                               int64_t num_blocks, unsigned char *panel)                  \
    {                                                                                     \
        unpack_tile(DTYPE_##dtype, rows, first, num_blocks, panel);                       \
    }
DEFINE_UNPACK(Q4_0)
DEFINE_UNPACK(Q4_1)
DEFINE_UNPACK(Q5_0)
DEFINE_UNPACK(Q5_1)
DEFINE_UNPACK(Q4_K)
DEFINE_UNPACK(Q5_K)
DEFINE_UNPACK(Q6_K)

static void unpack_Q8_0(const unsigned char *const rows[TILE_COLS], int64_t first,
                        int64_t num_blocks, unsigned char *panel)
{
    unpack_wide_tile(rows, first, num_blocks, panel);
}

#define KERNELS(dtype)                 \
    [DTYPE_##dtype] = {unpack_##dtype, \
                       {tile_##dtype##_1, tile_##dtype##_2, tile_##dtype##_3, tile_##dtype##_4}}
static const struct {
    unpack_fn *unpack;
    tile_fn *tiles[TILE_ROWS];
} kernels[DTYPE_COUNT] = {KERNELS(Q8_0), KERNELS(Q4_0), KERNELS(Q4_1), KERNELS(Q5_0),
                          KERNELS(Q5_1), KERNELS(Q4_K), KERNELS(Q5_K), KERNELS(Q6_K)};

struct quant_product quant_product_of(struct weight_view weight, int32_t in_features,
                                      const struct quant_rows *quant_rows)
{
    enum activation_form form = quant_activation_form(weight.dtype);
    assert(form != ACTIVATION_FORM_PLAIN && quant_rows->rows[form] != NULL);
    return (struct quant_product){.weights = weight.elements,
                                  .rows = quant_rows->rows[form],
                                  .weight_row_bytes =
                                      (int64_t)dtype_row_bytes(weight.dtype, in_features),
                                  .row_bytes = (int64_t)quant_rows->row_bytes[form],
                                  .num_blocks = in_features / dtype_block_elements(weight.dtype),
                                  .dtype = weight.dtype};
}

/* What a stretch of blocks takes. */
struct stretch {
    int64_t num_blocks;
    int64_t tile_bytes;       /* of sixteen columns of the panel */
    int64_t activation_bytes; /* of a block */
};

static struct stretch stretch_of(enum dtype dtype)
{
    if (dtype == DTYPE_Q8_0) {
        return (struct stretch){STRETCH_WIDE_BLOCKS,
                                STRETCH_WIDE_BLOCKS * sizeof(struct panel_wide_block),
                                sizeof(struct q8_activations)};
    }
    if (is_k_dtype(dtype)) {
        return (struct stretch){STRETCH_K_BLOCKS, STRETCH_K_BLOCKS * sizeof(struct panel_k_block),
                                sizeof(struct q8_k_activations)};
    }
    return (struct stretch){STRETCH_BLOCKS, STRETCH_BLOCKS * sizeof(struct panel_block),
                            sizeof(struct q8_activations)};
}

/* Unpacks a stretch of the panel, tile by tile; columns beyond the last repeat it. */
static void unpack_panel(const struct quant_product *product, int64_t col, int32_t num_cols,
                         int64_t first, int64_t num_blocks, unsigned char *panel,
                         int64_t tile_bytes)
{
    for (int32_t tile_col = 0; tile_col < num_cols; tile_col += TILE_COLS) {
        const unsigned char *rows[TILE_COLS];
        for (int32_t i = 0; i < TILE_COLS; i++) {
            int32_t in_panel = tile_col + i < num_cols ? tile_col + i : num_cols - 1;
            rows[i] = product->weights + (col + in_panel) * product->weight_row_bytes;
        }
        kernels[product->dtype].unpack(rows, first, num_blocks,
                                       panel + tile_col / TILE_COLS * tile_bytes);
    }
}

/* The lines of the weights that come next, brought into L2 a few at a time. */
struct prefetch {
    uintptr_t row;           /* of the next line */
    int64_t row_bytes;       /* from one row to the next */
    int64_t line, row_lines; /* of this row */
    int64_t num_rows, lines_at_once;
};

/* Blocks [first, ..) of the columns; or the first ones of as many columns behind them. */
static struct prefetch prefetch_of(const struct quant_product *product, int64_t col,
                                   int32_t num_cols, int64_t first, int64_t num_blocks,
                                   int64_t num_steps)
{
    int64_t block_bytes = product->weight_row_bytes / product->num_blocks;
    if (first >= product->num_blocks) {
        first = 0;
        col += num_cols;
    }
    struct prefetch prefetch = {
        .row = (uintptr_t)product->weights +
               (uintptr_t)(col * product->weight_row_bytes + first * block_bytes),
        .row_bytes = product->weight_row_bytes,
        .row_lines = (num_blocks * block_bytes + 2 * LINE_BYTES - 2) / LINE_BYTES,
        .num_rows = num_cols};
    prefetch.lines_at_once = (num_cols * prefetch.row_lines + num_steps - 1) / num_steps;
    return prefetch;
}

static void prefetch_some(struct prefetch *prefetch)
{
    for (int64_t i = 0; i < prefetch->lines_at_once && prefetch->num_rows > 0; i++) {
        _mm_prefetch((const char *)(prefetch->row + (uintptr_t)(prefetch->line * LINE_BYTES)),
                     _MM_HINT_T1);
        if (++prefetch->line == prefetch->row_lines) {
            prefetch->line = 0;
            prefetch->row += (uintptr_t)prefetch->row_bytes;
            prefetch->num_rows--;
        }
    }
}

void quant_panel(const struct quant_product *product, int64_t row, int32_t num_rows, int64_t col,
                 int32_t num_cols, unsigned char *panel, float *sums)
{
    struct stretch stretch = stretch_of(product->dtype);
    int16_t wide_rows[TILE_ROWS * WIDE_ROW_ELEMENTS] __attribute__((aligned(32)));
    int32_t num_steps = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    assert(num_rows >= 1 && num_rows <= QUANT_PANEL_ROWS);
    assert(num_cols >= 1 && num_cols <= QUANT_PANEL_COLS);
    memset(sums, 0, (size_t)num_rows * QUANT_PANEL_COLS * sizeof(float));
    for (int64_t first = 0; first < product->num_blocks; first += stretch.num_blocks) {
        int64_t num_left = product->num_blocks - first;
        struct tile tile = {.row_bytes = product->row_bytes,
                            .wide_rows = wide_rows,
                            .num_blocks =
                                num_left < stretch.num_blocks ? num_left : stretch.num_blocks};
        struct prefetch next = prefetch_of(product, col, num_cols, first + stretch.num_blocks,
                                           stretch.num_blocks, num_steps);
        unpack_panel(product, col, num_cols, first, tile.num_blocks, panel, stretch.tile_bytes);
        for (int32_t tile_row = 0; tile_row < num_rows; tile_row += TILE_ROWS) {
            int32_t tile_rows = num_rows - tile_row < TILE_ROWS ? num_rows - tile_row : TILE_ROWS;
            tile.rows = product->rows + (row + tile_row) * product->row_bytes +
                        first * stretch.activation_bytes;
            if (product->dtype == DTYPE_Q8_0) {
                widen_rows(&tile, tile_rows, wide_rows);
            }
            prefetch_some(&next);
            for (int32_t tile_col = 0; tile_col < num_cols; tile_col += TILE_COLS) {
                tile.panel = panel + tile_col / TILE_COLS * stretch.tile_bytes;
                tile.sums = sums + tile_row * QUANT_PANEL_COLS + tile_col;
                kernels[product->dtype].tiles[tile_rows - 1](&tile);
            }
        }
    }
}

#endif
