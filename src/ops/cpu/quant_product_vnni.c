/* SPDX-License-Identifier: Apache-2.0 */
/* Up to DIRECT_ROWS rows: sixteen rows of weights are read side by side, each block is opened and
 * meets all rows at once. They lie as far apart as a run of columns has such groups, so that each
 * reads on where it was when the next group begins: memory sees sixteen long streams, and what each
 * comes to next is prefetched. More rows: some blocks of 32 columns
 * are opened into a panel that stays in L1, and all rows pass by it, six at a time; their sums wait
 * in L2 for the next blocks.
 *
 * vpdpbusd multiplies unsigned by signed bytes: weights with a sign are held with an offset, whose
 * share, offset * sum of activations, is what the integer sums begin with. */
#include "ops/cpu/quant_product_vnni.h"

#if defined(__x86_64__)

#include "ops/cpu/quant_ordered_vnni.h"
#include "ops/cpu/quant_panel_vnni.h"
#include "ops/cpu/quant_row_vnni.h"

#define DIRECT_ROWS 32
#define DIRECT_TILE_ROWS 4 /* that meet a block at once */
/* Groups of a run. An odd number: streams a multiple of 4 KiB apart would have the same place in
 * L1. */
#define RUN_GROUPS 31
#define STREAM_AHEAD 512 /* of each stream, in bytes */
#define LINE_BYTES 64
#define TILE_ROWS 6
#define PANEL_ELEMENTS 512 /* of k: two panels of at most 10 KiB, and the tile's activations */

/* ---- one block ---- */

VEC_INLINE int32_t load_dword(const void *at)
{
    int32_t dword;
    memcpy(&dword, at, sizeof(dword));
    return dword;
}

VEC_INLINE __m512i load_vector(const __m512i *panel)
{
    return _mm512_load_si512(panel);
}

/* What a tile is made of; all constants where it is used. */
struct tile_shape {
    enum panel_kind kind;
    int offset_log2;
    int num_rows, num_panels;
};

/* sums[r][p] += the products of four-element steps [begin, end) of row r and panel p. */
VEC_INLINE void add_steps(struct tile_shape shape, int begin, int end,
                          const __m512i *const panels[2], const int8_t *const q[TILE_ROWS],
                          __m512i sums[TILE_ROWS][2])
{
    VEC_UNROLL
    for (int step = begin; step < end; step++) {
        __m512i weights[2];
        VEC_UNROLL
        for (int p = 0; p < shape.num_panels; p++) {
            weights[p] = load_vector(panels[p] + step);
        }
        VEC_UNROLL
        for (int r = 0; r < shape.num_rows; r++) {
            __m512i a = _mm512_set1_epi32(load_dword(q[r] + 4 * step));
            VEC_UNROLL
            for (int p = 0; p < shape.num_panels; p++) {
                sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], weights[p], a);
            }
        }
    }
}

/* Steps [0, num_steps), where a single sum is made in two chains: alone it would wait four cycles
 * for each vpdpbusd. */
VEC_INLINE void add_group(struct tile_shape shape, int num_steps, const __m512i *const panels[2],
                          const int8_t *const q[TILE_ROWS], __m512i sums[TILE_ROWS][2])
{
    if (shape.num_rows * shape.num_panels > 1) {
        add_steps(shape, 0, num_steps, panels, q, sums);
        return;
    }
    __m512i others[TILE_ROWS][2];
    others[0][0] = _mm512_setzero_si512();
    add_steps(shape, 0, num_steps / 2, panels, q, sums);
    add_steps(shape, num_steps / 2, num_steps, panels, q, others);
    sums[0][0] = _mm512_add_epi32(sums[0][0], others[0][0]);
}

/* Takes a block of 32 elements of each row into acc. */
VEC_INLINE void add_block_32(struct tile_shape shape, const __m512i *const panels[2],
                             const struct q8_activations *const a[TILE_ROWS],
                             __m512 acc[TILE_ROWS][2])
{
    __m512i sums[TILE_ROWS][2];
    const int8_t *q[TILE_ROWS];
    VEC_UNROLL
    for (int r = 0; r < shape.num_rows; r++) {
        __m512i start = _mm512_setzero_si512();
        if (shape.kind == PANEL_OFFSET) {
            start = _mm512_sub_epi32(start, _mm512_slli_epi32(_mm512_set1_epi32(a[r]->sum),
                                                              (unsigned)shape.offset_log2));
        }
        q[r] = a[r]->q;
        sums[r][0] = sums[r][1] = start;
    }
    add_group(shape, 8, panels, q, sums);
    VEC_UNROLL
    for (int p = 0; p < shape.num_panels; p++) {
        __m512 scale = _mm512_castsi512_ps(load_vector(panels[p] + 8));
        __m512 min = shape.kind == PANEL_MIN ? _mm512_castsi512_ps(load_vector(panels[p] + 9))
                                             : _mm512_setzero_ps();
        VEC_UNROLL
        for (int r = 0; r < shape.num_rows; r++) {
            __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][p]), scale);
            if (shape.kind == PANEL_MIN) {
                __m512 a_sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(a[r]->sum));
                term = _mm512_fmadd_ps(min, a_sum, term);
            }
            acc[r][p] = _mm512_fmadd_ps(term, _mm512_set1_ps(a[r]->scale), acc[r][p]);
        }
    }
}

/* Subtracts min_scale * (sum over groups of mins[g] * sum of activations) from terms: an exact
 * integer, two groups a dword. */
VEC_INLINE void subtract_mins(struct tile_shape shape, const __m512i *const panels[2],
                              const struct q8_k_activations *const a[TILE_ROWS],
                              __m512 terms[TILE_ROWS][2])
{
    VEC_UNROLL
    for (int r = 0; r < shape.num_rows; r++) {
        __m256i sums_16 = _mm256_loadu_si256((const __m256i *)(const void *)a[r]->sums);
        __m256i sums_32 = _mm256_madd_epi16(sums_16, _mm256_set1_epi16(1));
        __m128i words = _mm256_cvtepi32_epi16(sums_32); /* at most 32 * 127 */
        __m512i pairs = _mm512_broadcast_i32x4(words);
        __m512i a_pairs[4] = {_mm512_shuffle_epi32(pairs, 0x00), _mm512_shuffle_epi32(pairs, 0x55),
                              _mm512_shuffle_epi32(pairs, 0xaa), _mm512_shuffle_epi32(pairs, 0xff)};
        VEC_UNROLL
        for (int p = 0; p < shape.num_panels; p++) {
            __m512i sum = _mm512_setzero_si512();
            VEC_UNROLL
            for (int pair = 0; pair < 4; pair++) {
                sum = _mm512_dpwssd_epi32(sum, load_vector(panels[p] + 72 + pair), a_pairs[pair]);
            }
            __m512 min_scale = _mm512_castsi512_ps(load_vector(panels[p] + 76));
            terms[r][p] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), min_scale, terms[r][p]);
        }
    }
}

/* Takes a block of 256 elements of each row into acc. */
VEC_INLINE void add_block_k(struct tile_shape shape, const __m512i *const panels[2],
                            const struct q8_k_activations *const a[TILE_ROWS],
                            __m512 acc[TILE_ROWS][2])
{
    int num_steps = shape.kind == PANEL_K_OFFSET ? 4 : 8;
    __m512 terms[TILE_ROWS][2];
    const __m512i *at[2] = {panels[0], panels[1]};
    VEC_UNROLL
    for (int r = 0; r < shape.num_rows; r++) {
        terms[r][0] = terms[r][1] = _mm512_setzero_ps();
    }
    for (int group = 0; group < 64 / num_steps; group++) {
        __m512i sums[TILE_ROWS][2];
        const int8_t *q[TILE_ROWS];
        VEC_UNROLL
        for (int r = 0; r < shape.num_rows; r++) {
            __m512i start = _mm512_setzero_si512();
            if (shape.kind == PANEL_K_OFFSET) {
                start =
                    _mm512_sub_epi32(start, _mm512_slli_epi32(_mm512_set1_epi32(a[r]->sums[group]),
                                                              (unsigned)shape.offset_log2));
            }
            q[r] = a[r]->q + 4 * num_steps * group;
            sums[r][0] = sums[r][1] = start;
        }
        add_group(shape, num_steps, at, q, sums);
        VEC_UNROLL
        for (int p = 0; p < shape.num_panels; p++) {
            __m512 scale = _mm512_castsi512_ps(load_vector(at[p] + num_steps));
            VEC_UNROLL
            for (int r = 0; r < shape.num_rows; r++) {
                terms[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][p]), scale, terms[r][p]);
            }
            at[p] += num_steps + 1;
        }
    }
    if (shape.kind == PANEL_K_MIN) {
        subtract_mins(shape, panels, a, terms);
    }
    VEC_UNROLL
    for (int r = 0; r < shape.num_rows; r++) {
        VEC_UNROLL
        for (int p = 0; p < shape.num_panels; p++) {
            acc[r][p] = _mm512_fmadd_ps(terms[r][p], _mm512_set1_ps(a[r]->scale), acc[r][p]);
        }
    }
}

VEC_INLINE bool kind_is_k(enum panel_kind kind)
{
    return kind == PANEL_K_MIN || kind == PANEL_K_OFFSET;
}

/* Blocks [block, block + num_blocks) of the rows of activations a; the panels begin with block. */
VEC_INLINE void add_blocks(struct tile_shape shape, const __m512i *const panels[2],
                           const unsigned char *const a[TILE_ROWS], int64_t block,
                           int64_t num_blocks, __m512 acc[TILE_ROWS][2])
{
    int32_t num_vectors = panel_vectors(shape.kind);
    for (int64_t idx = 0; idx < num_blocks; idx++) {
        const __m512i *at[2] = {panels[0] + idx * num_vectors, panels[1] + idx * num_vectors};
        if (kind_is_k(shape.kind)) {
            const struct q8_k_activations *blocks[TILE_ROWS];
            VEC_UNROLL
            for (int r = 0; r < shape.num_rows; r++) {
                blocks[r] = (const struct q8_k_activations *)(const void *)a[r] + block + idx;
            }
            add_block_k(shape, at, blocks, acc);
        } else {
            const struct q8_activations *blocks[TILE_ROWS];
            VEC_UNROLL
            for (int r = 0; r < shape.num_rows; r++) {
                blocks[r] = (const struct q8_activations *)(const void *)a[r] + block + idx;
            }
            add_block_32(shape, at, blocks, acc);
        }
    }
}

/* ---- few rows ---- */

/* Up to sixteen rows of weights. */
struct weight_rows {
    struct panel_rows rows;
    int32_t num_rows;
};

static struct weight_rows weight_rows_of(const struct vnni_product *product, int64_t col,
                                         int32_t num_cols)
{
    return (struct weight_rows){.rows = {product->weights + col * product->weight_row_bytes,
                                         product->col_step * product->weight_row_bytes},
                                .num_rows = num_cols < PANEL_COLS ? num_cols : PANEL_COLS};
}

VEC_INLINE int64_t lines_of(int64_t num_bytes)
{
    return (num_bytes + LINE_BYTES - 1) / LINE_BYTES;
}

/* Opens a block; of fewer than sixteen rows, by way of a copy that has sixteen. dtype is a
 * constant. */
VEC_INLINE void open_block(enum dtype dtype, const struct weight_rows *weights, int64_t block,
                           __m512i *panel)
{
    int64_t block_bytes = panel_block_bytes(dtype);
    struct panel_rows rows = weights->rows;
    unsigned char copies[PANEL_COLS * PANEL_MAX_BLOCK_BYTES];
    rows.first += block * block_bytes;
    if (weights->num_rows < PANEL_COLS) {
        for (int32_t idx = 0; idx < PANEL_COLS; idx++) {
            int32_t row = idx < weights->num_rows ? idx : 0;
            memcpy(copies + idx * block_bytes, rows.first + row * rows.stride, (size_t)block_bytes);
        }
        rows = (struct panel_rows){copies, block_bytes};
    }
    panel_open(dtype, rows, panel);
}

/* What is asked for next: rounds of one line at each of sixteen places. */
struct ahead {
    uintptr_t at;
    int64_t step;        /* to the next place */
    int64_t round_bytes; /* to the next round */
    int64_t rounds_left; /* before the gap, if that is more than zero */
    int64_t gap_bytes;
    int64_t rounds_due; /* times num_blocks */
    int64_t row_lines;
};

VEC_INLINE struct ahead ahead_of(const struct vnni_product *product,
                                 const struct weight_rows *weights)
{
    const uintptr_t first = (uintptr_t)weights->rows.first;
    struct ahead ahead = {.row_lines = lines_of(product->weight_row_bytes)};
    ahead.step = weights->rows.stride;
    ahead.round_bytes = LINE_BYTES;
    ahead.rounds_left = lines_of(product->weight_row_bytes - STREAM_AHEAD);
    int64_t gap_bytes = ahead.rounds_left > 0 ? 0 : product->gap_bytes;
    ahead.gap_bytes = product->gap_bytes - gap_bytes;
    ahead.at = first + (uintptr_t)(STREAM_AHEAD + gap_bytes);
    return ahead;
}

/* As much as num_blocks blocks of sixteen rows. */
VEC_INLINE void prefetch_blocks(const struct vnni_product *product, int32_t num_blocks,
                                struct ahead *ahead)
{
    ahead->rounds_due += num_blocks * ahead->row_lines;
    for (; ahead->rounds_due > 0; ahead->rounds_due -= product->num_blocks) {
        uintptr_t at = ahead->at;
        VEC_UNROLL
        for (int32_t idx = 0; idx < PANEL_COLS; idx++) {
            _mm_prefetch((const char *)at, _MM_HINT_T0);
            at += (uintptr_t)ahead->step;
        }
        ahead->at += (uintptr_t)ahead->round_bytes;
        ahead->at += (uintptr_t)(--ahead->rounds_left == 0 ? ahead->gap_bytes : 0);
    }
}

/* One row of activations: its sums stay in a register, and no panel is stored. */
VEC_INLINE void compute_one_row(enum dtype dtype, const struct vnni_product *product, int64_t row,
                                const struct weight_rows *weights, float *sums)
{
    const struct tile_shape shape = {panel_kind(dtype), panel_offset_log2(dtype), 1, 1};
    const unsigned char *const a[TILE_ROWS] = {product->activations +
                                               row * product->activation_row_bytes};
    struct ahead ahead = ahead_of(product, weights);
    __m512i panel[PANEL_MAX_VECTORS];
    const __m512i *const panels[2] = {panel, panel};
    __m512 acc[TILE_ROWS][2];
    acc[0][0] = _mm512_setzero_ps();
    int64_t block = 0;
    int32_t step_blocks = row_step_blocks(dtype);
    if (step_blocks > 0 && weights->num_rows == PANEL_COLS) {
        struct panel_bases bases = panel_bases_of(weights->rows);
        for (; block + step_blocks <= product->num_blocks; block += step_blocks) {
            prefetch_blocks(product, step_blocks, &ahead);
            row_add(dtype, &bases, (const struct q8_activations *)(const void *)a[0] + block,
                    &acc[0][0]);
            panel_bases_advance(&bases, step_blocks * panel_block_bytes(dtype));
        }
    }
    for (; block < product->num_blocks; block++) {
        prefetch_blocks(product, 1, &ahead);
        open_block(dtype, weights, block, panel);
        add_blocks(shape, panels, a, block, 1, acc);
    }
    _mm512_store_ps(sums, acc[0][0]);
}

/* An opened block meets num_rows rows of activations; num_rows is a constant. */
VEC_INLINE void add_direct(enum dtype dtype, int num_rows, const __m512i *panel,
                           const unsigned char *a, int64_t a_row_bytes, int64_t block, float *sums)
{
    const struct tile_shape shape = {panel_kind(dtype), panel_offset_log2(dtype), num_rows, 1};
    const __m512i *const panels[2] = {panel, panel};
    const unsigned char *a_rows[TILE_ROWS];
    __m512 acc[TILE_ROWS][2];
    VEC_UNROLL
    for (int r = 0; r < num_rows; r++) {
        a_rows[r] = a + r * a_row_bytes;
        acc[r][0] = _mm512_load_ps(sums + r * VNNI_PRODUCT_COLS);
    }
    add_blocks(shape, panels, a_rows, block, 1, acc);
    VEC_UNROLL
    for (int r = 0; r < num_rows; r++) {
        _mm512_store_ps(sums + r * VNNI_PRODUCT_COLS, acc[r][0]);
    }
}

/* dtype is a constant. */
VEC_INLINE void compute_direct(enum dtype dtype, const struct vnni_product *product, int64_t row,
                               int32_t num_rows, const struct weight_rows *weights, float *sums)
{
    if (num_rows == 1) {
        compute_one_row(dtype, product, row, weights, sums);
        return;
    }
    const int64_t a_row_bytes = product->activation_row_bytes;
    const unsigned char *a = product->activations + row * a_row_bytes;
    struct ahead ahead = ahead_of(product, weights);
    __m512i panel[PANEL_MAX_VECTORS];
    for (int32_t r = 0; r < num_rows; r++) {
        _mm512_store_ps(sums + r * VNNI_PRODUCT_COLS, _mm512_setzero_ps());
    }
    for (int64_t block = 0; block < product->num_blocks; block++) {
        prefetch_blocks(product, 1, &ahead);
        open_block(dtype, weights, block, panel);
        int32_t r = 0;
        for (; r + DIRECT_TILE_ROWS <= num_rows; r += DIRECT_TILE_ROWS) {
            add_direct(dtype, DIRECT_TILE_ROWS, panel, a + r * a_row_bytes, a_row_bytes, block,
                       sums + r * VNNI_PRODUCT_COLS);
        }
        for (; r < num_rows; r++) {
            add_direct(dtype, 1, panel, a + r * a_row_bytes, a_row_bytes, block,
                       sums + r * VNNI_PRODUCT_COLS);
        }
    }
}

void vnni_product_prefetch(const struct vnni_product *product, int64_t num_rows, int64_t begin,
                           int64_t end)
{
    if (num_rows > DIRECT_ROWS) {
        return;
    }
    if (ordered_takes(product, num_rows)) {
        ordered_prefetch_first(product, begin);
        return;
    }
    int64_t num_groups = (end - begin) / PANEL_COLS;
    num_groups = num_groups < RUN_GROUPS ? num_groups : RUN_GROUPS;
    for (int64_t row = 0; row < PANEL_COLS; row++) {
        uintptr_t first = vnni_address_of(product, begin + row * num_groups);
        for (uintptr_t at = first; at < first + STREAM_AHEAD; at += LINE_BYTES) {
            _mm_prefetch((const char *)at, _MM_HINT_T0);
        }
    }
}

/* ---- many rows ---- */

/* Blocks [block, block + num_blocks) of each row; dtype is a constant. */
VEC_INLINE void open_panel(enum dtype dtype, const struct weight_rows *weights, int64_t block,
                           int64_t num_blocks, __m512i *panel)
{
    int32_t num_vectors = panel_vectors(panel_kind(dtype));
    for (int64_t idx = 0; idx < num_blocks; idx++) {
        open_block(dtype, weights, block + idx, panel + idx * num_vectors);
    }
}

void vnni_prefetch_part(const struct vnni_tile_run *run, int32_t part, int32_t num_parts)
{
    int32_t num_rows = run->num_panels * PANEL_COLS;
    int32_t share = (num_rows + num_parts - 1) / num_parts;
    for (int32_t idx = part * share; idx < (part + 1) * share; idx++) {
        if (idx < num_rows) {
            uintptr_t row = run->ahead + (uintptr_t)(idx * run->ahead_stride);
            for (uintptr_t at = row; at < row + (uintptr_t)run->ahead_bytes; at += 64) {
                _mm_prefetch((const char *)at, _MM_HINT_T1);
            }
        }
    }
}

/* shape is a constant. A tile's rows beyond the last are the last once more. */
VEC_INLINE void run_tiles(struct tile_shape shape, const struct vnni_tile_run *run)
{
    const __m512i *const panels[2] = {(const __m512i *)(const void *)run->panels[0],
                                      (const __m512i *)(const void *)run->panels[1]};
    int32_t num_tiles = (run->num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int32_t first = 0; first < run->num_rows; first += TILE_ROWS) {
        const unsigned char *a[TILE_ROWS];
        float *sums[TILE_ROWS];
        __m512 acc[TILE_ROWS][2];
        VEC_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            int64_t row = first + r < run->num_rows ? first + r : run->num_rows - 1;
            a[r] = run->activations + row * run->activation_row_bytes;
            sums[r] = run->sums + row * VNNI_PRODUCT_COLS;
            VEC_UNROLL
            for (int p = 0; p < shape.num_panels; p++) {
                acc[r][p] =
                    run->block == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums[r] + 16 * p);
            }
        }
        vnni_prefetch_part(run, first / TILE_ROWS, num_tiles);
        add_blocks(shape, panels, a, run->block, run->num_blocks, acc);
        VEC_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            VEC_UNROLL
            for (int p = 0; p < shape.num_panels; p++) {
                _mm512_store_ps(sums[r] + 16 * p, acc[r][p]);
            }
        }
    }
}

/* ---- one function a format ---- */

typedef void direct_fn(const struct vnni_product *product, int64_t row, int32_t num_rows,
                       const struct weight_rows *weights, float *sums);
typedef void open_fn(const struct weight_rows *weights, int64_t block, int64_t num_blocks,
                     __m512i *panel);

#define DEFINE_FORMAT(name)                                                                       \
    static void direct_##name(const struct vnni_product *product, int64_t row, int32_t num_rows,  \
                              const struct weight_rows *weights, float *sums)                     \
    {                                                                                             \
        compute_direct(DTYPE_##name, product, row, num_rows, weights, sums);                      \
    }                                                                                             \
    static void open_##name(const struct weight_rows *weights, int64_t block, int64_t num_blocks, \
                            __m512i *panel)                                                       \
    {                                                                                             \
        open_panel(DTYPE_##name, weights, block, num_blocks, panel);                              \
    }
DEFINE_FORMAT(Q8_0)
DEFINE_FORMAT(Q4_0)
DEFINE_FORMAT(Q4_1)
DEFINE_FORMAT(Q5_0)
DEFINE_FORMAT(Q5_1)
DEFINE_FORMAT(Q4_K)
DEFINE_FORMAT(Q5_K)
DEFINE_FORMAT(Q6_K)

/* Formats of one kind and offset share their tiles. */
#define DEFINE_TILES(name, kind, offset_log2)                                 \
    static void tiles_16_##name(const struct vnni_tile_run *run)              \
    {                                                                         \
        run_tiles((struct tile_shape){kind, offset_log2, TILE_ROWS, 1}, run); \
    }                                                                         \
    static void tiles_32_##name(const struct vnni_tile_run *run)              \
    {                                                                         \
        run_tiles((struct tile_shape){kind, offset_log2, TILE_ROWS, 2}, run); \
    }
DEFINE_TILES(offset_8, PANEL_OFFSET, 3)
DEFINE_TILES(offset_16, PANEL_OFFSET, 4)
DEFINE_TILES(offset_128, PANEL_OFFSET, 7)
DEFINE_TILES(min, PANEL_MIN, 0)
DEFINE_TILES(k_min, PANEL_K_MIN, 0)
DEFINE_TILES(k_offset, PANEL_K_OFFSET, 5)

static const struct format {
    direct_fn *direct;
    open_fn *open;
    vnni_tiles_fn *tiles[2]; /* of 16 and of 32 columns */
} formats[DTYPE_COUNT] = {
    [DTYPE_Q8_0] = {direct_Q8_0, open_Q8_0, {tiles_16_offset_128, tiles_32_offset_128}},
    [DTYPE_Q4_0] = {direct_Q4_0, open_Q4_0, {tiles_16_offset_8, tiles_32_offset_8}},
    [DTYPE_Q4_1] = {direct_Q4_1, open_Q4_1, {tiles_16_min, tiles_32_min}},
    [DTYPE_Q5_0] = {direct_Q5_0, open_Q5_0, {tiles_16_offset_16, tiles_32_offset_16}},
    [DTYPE_Q5_1] = {direct_Q5_1, open_Q5_1, {tiles_16_min, tiles_32_min}},
    [DTYPE_Q4_K] = {direct_Q4_K, open_Q4_K, {tiles_16_k_min, tiles_32_k_min}},
    [DTYPE_Q5_K] = {direct_Q5_K, open_Q5_K, {tiles_16_k_min, tiles_32_k_min}},
    [DTYPE_Q6_K] = {direct_Q6_K, open_Q6_K, {tiles_16_k_offset, tiles_32_k_offset}},
};

void vnni_product_compute_panels(const struct vnni_product *product, int64_t row, int32_t num_rows,
                                 int64_t col, int32_t num_cols, float *sums, unsigned char *panel,
                                 vnni_tiles_fn *tiles)
{
    const struct format *format = &formats[product->dtype];
    int64_t panel_blocks = PANEL_ELEMENTS / dtype_block_elements(product->dtype);
    int64_t panel_bytes = panel_blocks * panel_vectors(panel_kind(product->dtype)) * 64;
    int64_t block_bytes = (int64_t)dtype_block_bytes(product->dtype);
    uintptr_t first = vnni_address_of(product, col);
    int64_t next_bytes = product->weight_row_bytes + product->gap_bytes;
    struct weight_rows weights[2] = {weight_rows_of(product, col, num_cols)};
    struct vnni_tile_run run = {.dtype = product->dtype,
                                .num_panels = num_cols > PANEL_COLS ? 2 : 1,
                                .num_rows = num_rows,
                                .panels = {panel, panel + panel_bytes},
                                .activations =
                                    product->activations + row * product->activation_row_bytes,
                                .activation_row_bytes = product->activation_row_bytes,
                                .sums = sums,
                                .ahead_stride = product->col_step * product->weight_row_bytes,
                                .ahead_bytes = panel_blocks * block_bytes};
    if (run.num_panels == 2) {
        weights[1] = weight_rows_of(product, col + PANEL_COLS, num_cols - PANEL_COLS);
    }
    for (run.block = 0; run.block < product->num_blocks; run.block += panel_blocks) {
        int64_t num_left = product->num_blocks - run.block;
        run.num_blocks = num_left < panel_blocks ? num_left : panel_blocks;
        for (int32_t p = 0; p < run.num_panels; p++) {
            format->open(&weights[p], run.block, run.num_blocks, (__m512i *)(void *)run.panels[p]);
        }
        bool is_last = run.block + panel_blocks >= product->num_blocks;
        run.ahead =
            first + (uintptr_t)(is_last ? next_bytes : (run.block + panel_blocks) * block_bytes);
        tiles(&run);
    }
}

struct vnni_product vnni_product_of(struct weight_view weight, const struct quant_rows *rows,
                                    int64_t num_elements)
{
    enum activation_form form = quant_activation_form(weight.dtype);
    return (struct vnni_product){.dtype = weight.dtype,
                                 .weights = weight.elements,
                                 .weight_row_bytes =
                                     (int64_t)dtype_row_bytes(weight.dtype, num_elements),
                                 .num_blocks = num_elements / dtype_block_elements(weight.dtype),
                                 .col_step = 1,
                                 .activations = rows->rows[form],
                                 .activation_row_bytes = (int64_t)rows->row_bytes[form]};
}

void vnni_product_compute(const struct vnni_product *product, int64_t row, int32_t num_rows,
                          int64_t col, int32_t num_cols, float *sums, unsigned char *panel)
{
    if (num_rows <= DIRECT_ROWS && num_cols <= PANEL_COLS) {
        const struct weight_rows weights = weight_rows_of(product, col, num_cols);
        formats[product->dtype].direct(product, row, num_rows, &weights, sums);
    } else {
        vnni_tiles_fn *tiles = formats[product->dtype].tiles[num_cols > PANEL_COLS];
        vnni_product_compute_panels(product, row, num_rows, col, num_cols, sums, panel, tiles);
    }
}

/* ---- runs ---- */

static void compute_ordered(const struct vnni_run *run, const struct vnni_product *product,
                            float *sums)
{
    if (product->dtype == DTYPE_Q8_0) {
        ordered_compute(DTYPE_Q8_0, run, product, sums);
    } else {
        ordered_compute(DTYPE_Q4_0, run, product, sums);
    }
}

int32_t vnni_run_cols(int64_t num_rows)
{
    return num_rows <= DIRECT_ROWS ? RUN_GROUPS * PANEL_COLS : VNNI_PRODUCT_COLS;
}

_Static_assert(DIRECT_ROWS *RUN_GROUPS *PANEL_COLS <= VNNI_SUMS, "sums of a run");

void vnni_run_compute(const struct vnni_run *run, const struct vnni_product *product, float *sums)
{
    struct vnni_product part = *product;
    if (ordered_takes(product, run->num_rows)) {
        compute_ordered(run, product, sums);
        return;
    }
    if (run->num_rows > DIRECT_ROWS) {
        part.gap_bytes = (int64_t)(run->next - vnni_address_of(product, run->col + 1));
        run->compute(&part, run->row, run->num_rows, run->col, run->num_cols, sums, run->panel);
        return;
    }
    const int32_t stride = vnni_run_cols(run->num_rows);
    const int32_t num_groups = run->num_cols / PANEL_COLS, num_left = run->num_cols % PANEL_COLS;
    for (int32_t group = 0; group < num_groups + (num_left > 0); group++) {
        _Alignas(64) float found[DIRECT_ROWS * VNNI_PRODUCT_COLS];
        /* The last columns, fewer than sixteen, are a group beside each other. */
        bool is_rest = group == num_groups;
        int32_t first = is_rest ? num_groups * PANEL_COLS : group;
        int32_t num_cols = is_rest ? num_left : PANEL_COLS;
        part.col_step = is_rest ? 1 : num_groups;
        part.gap_bytes = 0;
        if (group + 1 >= num_groups) {
            part.gap_bytes = (int64_t)(run->next - vnni_address_of(product, run->col + first + 1));
        }
        run->compute(&part, run->row, run->num_rows, run->col + first, num_cols, found, run->panel);
        for (int32_t row = 0; row < run->num_rows; row++) {
            for (int32_t idx = 0; idx < num_cols; idx++) {
                sums[row * stride + first + idx * (int32_t)part.col_step] =
                    found[row * VNNI_PRODUCT_COLS + idx];
            }
        }
    }
}

#endif
