/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of plain weights. Lanes are columns: the weights of 16 rows of the
 * checkpoint, a group, are turned on the way into vectors of one element of each, widened, which
 * meet broadcast activations. Few rows: dot_few_avx2.c.
 *
 * Many rows: a group of gemm_swiglu is 8 rows of gate and 8 of up. A panel of groups is turned once
 * for each block of k and stays in L2.
 *
 *   for each panel
 *     for each chunk of rows         as many as have their sums in scratch, where k is cut
 *       for each block of k          sums wait in scratch between blocks
 *         for each tile of 6 rows    activations in L1; the next ones on their way to L2
 *           for each group           12 accumulators; meanwhile the next panel's weights come in
 *
 * An output is, for each block of k, one accumulator that takes elements in ascending order; the
 * sums of blocks are added up in ascending order. Blocks depend on the length of a row alone. */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/dot_turn_avx2.h"

#define TILE_MAX_ROWS 6
/* Prefetched lines in a step, of as many places. */
#define TILE_AHEADS 8
/* What memory delivers while a line is on its way, for each of the rows of a group. */
#define AHEAD_ROW_BYTES 1024
#define PANEL_BYTES (256 * 1024)
#define PARTIAL_BYTES (256 * 1024)
/* With few row tiles memory decides: a small panel is soon complete. */
#define FEW_ROW_TILES 4
#define FEW_PANEL_GROUPS 2

_Static_assert(PANEL_BYTES + PARTIAL_BYTES <= CPU_SCRATCH_BYTES, "a panel and its sums");
_Static_assert(FEW_PANEL_GROUPS *MAX_BLOCK_K *GROUP_COLS * sizeof(float) <= PANEL_BYTES,
               "the narrowest panel");

/* X(num_rows): the tiles there are. */
#define TILE_SHAPES(X) X(3) X(4) X(5) X(6)

/* Columns of each matrix in a group. */
static int64_t group_cols(const struct dot_job *job)
{
    return GROUP_COLS / job->num_matrices;
}

/* Columns [col, col + group_cols) of all matrices. */
static struct group group_at(const struct dot_job *job, int64_t col, int64_t end, int64_t k)
{
    int64_t width = group_cols(job);
    struct group group;
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        rows_at(job, matrix, col, end, k, width, group.rows + matrix * width);
    }
    return group;
}

/* Rows of activations times a turned group. */
struct tile {
    const unsigned char *a; /* a_stride_bytes apart */
    int64_t a_stride_bytes;
    const float *group; /* [num_elements][GROUP_COLS] */
    int64_t num_elements;
    /* A cache line from each is prefetched in every step. */
    uintptr_t ahead[TILE_AHEADS];
    float *sums; /* [num_rows][GROUP_COLS] */
    bool is_resumed;
};

#define BASE_ROWS 3
#define NUM_BASES (TILE_MAX_ROWS / BASE_ROWS)

/* Addresses of a tile as they move along k. */
struct tile_walk {
    const unsigned char *a[NUM_BASES]; /* of every third row */
    int64_t a_stride_bytes;
    const float *group;
};

VEC_INLINE void tile_elements(struct tile_walk *at, int num_rows, int num_elements, __m256 *sums)
{
    VEC_UNROLL
    for (int k = 0; k < num_elements; k++) {
        __m256 weights[HALVES];
        VEC_UNROLL
        for (int half = 0; half < HALVES; half++) {
            weights[half] = vec_load_here(at->group + k * GROUP_COLS + half * VEC_LANES);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const unsigned char *base = at->a[row / BASE_ROWS];
            const unsigned char *from = base + row % BASE_ROWS * at->a_stride_bytes;
            __m256 value = vec_broadcast_here((const float *)(const void *)from + k);
            VEC_UNROLL
            for (int half = 0; half < HALVES; half++) {
                __m256 *sum = &sums[row * HALVES + half];
                *sum = vec_add_product(*sum, value, weights[half]);
            }
        }
    }
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at->a[idx] += num_elements * (int64_t)sizeof(float);
    }
    at->group += num_elements * GROUP_COLS;
    /* gcc 12 otherwise derives further pointers from these, and spills. */
    __asm__("" : "+r"(at->a[0]), "+r"(at->a[1]), "+r"(at->group));
}

VEC_INLINE void tile_compute(const struct tile *tile, int num_rows)
{
    struct tile_walk at = {.a = {tile->a, tile->a + BASE_ROWS * tile->a_stride_bytes},
                           .a_stride_bytes = tile->a_stride_bytes,
                           .group = tile->group};
    __m256 sums[TILE_MAX_ROWS * HALVES];
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * HALVES; idx++) {
        sums[idx] = _mm256_setzero_ps();
    }
    int64_t num_left = tile->num_elements, line = 0;
    for (; num_left >= STEP_ELEMENTS; num_left -= STEP_ELEMENTS, line += LINE_BYTES) {
        for (int idx = 0; idx < TILE_AHEADS; idx++) {
            _mm_prefetch((const char *)(tile->ahead[idx] + (uintptr_t)line), _MM_HINT_T1);
            tile_elements(&at, num_rows, STEP_ELEMENTS / TILE_AHEADS, sums);
        }
    }
    for (; num_left > 0; num_left--) {
        tile_elements(&at, num_rows, 1, sums);
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * HALVES; idx++) {
        float *to = tile->sums + idx * VEC_LANES;
        _mm256_store_ps(to, tile->is_resumed ? _mm256_add_ps(_mm256_load_ps(to), sums[idx])
                                             : sums[idx]);
    }
}

#define DEFINE_TILE(num_rows)                            \
    static void tile_##num_rows(const struct tile *tile) \
    {                                                    \
        tile_compute(tile, num_rows);                    \
    }
TILE_SHAPES(DEFINE_TILE)

typedef void tile_fn(const struct tile *tile);
#define TILE_ENTRY(num_rows) [num_rows] = tile_##num_rows,
static tile_fn *const tile_fns[TILE_MAX_ROWS + 1] = {TILE_SHAPES(TILE_ENTRY)};

/* Of the tile that begins with num_left rows left of more than FEW_MAX_ROWS. */
static int32_t tile_rows(int64_t num_left)
{
    return num_left >= 2 * TILE_MAX_ROWS ? TILE_MAX_ROWS
           : num_left > TILE_MAX_ROWS    ? (int32_t)(num_left + 1) / 2
                                         : (int32_t)num_left;
}

/* Memory that will be needed, rows in parts of what a tile prefetches from one address. */
struct ahead {
    uintptr_t row_at;
    int64_t stride_bytes, part_bytes, row_parts;
    int64_t part, num_left; /* the next one, in the row at row_at; and how many there are with it */
};

static struct ahead ahead_of(const void *base, int64_t offset, int64_t stride_bytes,
                             int64_t num_rows, int64_t row_bytes, int64_t part_bytes)
{
    int64_t row_parts = divide_up(row_bytes, part_bytes);
    return (struct ahead){.row_at = (uintptr_t)base + (uintptr_t)offset,
                          .stride_bytes = stride_bytes,
                          .part_bytes = part_bytes,
                          .row_parts = row_parts,
                          .num_left = num_rows * row_parts};
}

static uintptr_t take_ahead(struct ahead *ahead)
{
    uintptr_t at = ahead->row_at + (uintptr_t)(ahead->part * ahead->part_bytes);
    ahead->num_left--;
    if (++ahead->part == ahead->row_parts) {
        ahead->part = 0;
        ahead->row_at += (uintptr_t)ahead->stride_bytes;
    }
    return at;
}

struct walk {
    const struct dot_job *job;
    float *panel;    /* [num_groups][num_k][GROUP_COLS] */
    float *partials; /* [rows of a chunk][num_groups][GROUP_COLS], by tiles */
    int64_t end;     /* of columns */
    int64_t panel_groups, block_k;
    bool is_cut;  /* along k */
    bool is_cold; /* nobody has prefetched the weights of the panel */
    /* Of the panel and block at hand: */
    int64_t first_col, num_groups, k, num_k, chunk_end;
    /* On their way to L2: the next tile of activations, the next block of each matrix. */
    struct ahead next_a, next_weights[2];
};

/* Eight elements of a group, or the first num_left of them where `is_rest`. */
VEC_INLINE void fill_step(enum dtype dtype, const struct group *group, int64_t offset, bool is_rest,
                          int64_t num_left, float *to)
{
    const int num_elements = elements_of_word(dtype);
    VEC_UNROLL
    for (int half = 0; half < HALVES; half++) {
        VEC_UNROLL
        for (int part = 0; part < VEC_LANES / WORDS / num_elements; part++) {
            __m256i words[WORDS];
            turn_part(dtype, group->rows + half * VEC_LANES, offset, part, words);
            VEC_UNROLL
            for (int element = 0; element < WORDS * num_elements; element++) {
                int k = part * WORDS + element;
                if (is_rest && k >= num_left) {
                    break;
                }
                _mm256_store_ps(
                    to + k * GROUP_COLS + half * VEC_LANES,
                    element_of_word(dtype, words[element / num_elements], element % num_elements));
            }
        }
    }
}

/* Elements [0, num_k) of a group to [num_k][GROUP_COLS]. */
VEC_INLINE void fill_group(enum dtype dtype, const struct group *group, int64_t num_k,
                           int64_t ahead_bytes, float *to)
{
    const int64_t element_bytes = dtype == DTYPE_F32 ? 4 : 2;
    int64_t k = 0;
    for (; k + VEC_LANES <= num_k; k += VEC_LANES, to += VEC_LANES * GROUP_COLS) {
        int64_t offset = k * element_bytes;
        if (offset % LINE_BYTES == 0 && offset < ahead_bytes) {
            prefetch_rows(group, offset + AHEAD_ROW_BYTES);
        }
        fill_step(dtype, group, offset, false, 0, to);
    }
    if (k < num_k) {
        struct rest rest;
        struct group copied = copy_rest(group->rows, GROUP_COLS, k * element_bytes,
                                        (num_k - k) * element_bytes, &rest);
        fill_step(dtype, &copied, 0, true, num_k - k, to);
    }
}

static void fill_panel(const struct walk *walk)
{
    const struct dot_job *job = walk->job;
    const int64_t row_bytes = walk->num_k * element_bytes_of(job);
    int64_t ahead_bytes = walk->is_cold ? row_bytes - AHEAD_ROW_BYTES : 0;
    float *to = walk->panel;
    for (int64_t idx = 0; idx < walk->num_groups; idx++, to += walk->num_k * GROUP_COLS) {
        struct group group =
            group_at(job, walk->first_col + idx * group_cols(job), walk->end, walk->k);
        if (job->dtype == DTYPE_BF16) {
            fill_group(DTYPE_BF16, &group, walk->num_k, ahead_bytes, to);
        } else if (job->dtype == DTYPE_F16) {
            fill_group(DTYPE_F16, &group, walk->num_k, ahead_bytes, to);
        } else {
            fill_group(DTYPE_F32, &group, walk->num_k, ahead_bytes, to);
        }
    }
}

/* Bytes that a tile prefetches from one address. */
static int64_t part_bytes(const struct walk *walk)
{
    return walk->num_k < STEP_ELEMENTS ? LINE_BYTES : walk->num_k / STEP_ELEMENTS * LINE_BYTES;
}

/* The weights that come after the panel and block at hand. */
static void plan_weights(struct walk *walk)
{
    const struct dot_job *job = walk->job;
    int64_t element_bytes = element_bytes_of(job);
    int64_t panel_cols = walk->panel_groups * group_cols(job);
    int64_t col = walk->first_col, k = walk->k + walk->block_k;
    if (k >= job->num_elements) {
        k = 0;
        col += walk->chunk_end < job->num_tokens ? 0 : panel_cols;
    }
    int64_t num_cols = min_of(panel_cols, walk->end - col);
    int64_t row_bytes = min_of(walk->block_k, job->num_elements - k) * element_bytes;
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        walk->next_weights[matrix] =
            ahead_of(job->weights[matrix], (col * job->num_elements + k) * element_bytes,
                     job->num_elements * element_bytes, num_cols < 0 ? 0 : num_cols, row_bytes,
                     part_bytes(walk));
    }
}

static void plan_activations(struct walk *walk, int64_t next_token)
{
    const struct dot_job *job = walk->job;
    int64_t num_rows = min_of(TILE_MAX_ROWS, walk->chunk_end - next_token);
    walk->next_a = ahead_of(
        job->a, next_token * job->a_stride_bytes + walk->k * (int64_t)sizeof(float),
        job->a_stride_bytes, num_rows, walk->num_k * (int64_t)sizeof(float), part_bytes(walk));
}

/* What a tile prefetches: of the activations what is due, spread over num_groups_left tiles; then
 * rows of weights, as late as num_calls_left tiles allow, for much passes through L2 meanwhile;
 * then what is there already. */
static void choose_ahead(struct walk *walk, int64_t num_groups_left, int64_t num_calls_left,
                         struct tile *tile)
{
    int64_t num_due = min_of(divide_up(walk->next_a.num_left, num_groups_left), TILE_AHEADS - 1);
    int64_t num_later = (num_calls_left - 1) * (TILE_AHEADS - num_due);
    struct ahead *next = walk->next_weights;
    int slot = 0;
    for (; slot < num_due; slot++) {
        tile->ahead[slot] = take_ahead(&walk->next_a);
    }
    for (; slot < TILE_AHEADS; slot++) {
        struct ahead *from = next[1].num_left > next[0].num_left ? &next[1] : &next[0];
        tile->ahead[slot] = next[0].num_left + next[1].num_left > num_later
                                ? take_ahead(from)
                                : (uintptr_t)tile->group;
    }
}

/* Sums of some rows and one group of columns. */
static void store_group(const struct dot_job *job, const float *sums, int64_t first_row,
                        int32_t num_rows, int64_t first_col, int64_t end)
{
    struct dot_sums stored = {.at = {sums, sums + VEC_LANES},
                              .stride = GROUP_COLS,
                              .first_row = first_row,
                              .first_col = first_col,
                              .num_rows = num_rows,
                              .num_cols = (int32_t)min_of(group_cols(job), end - first_col)};
    job->store(job->params, &stored);
}

/* Rows [token, token + num_rows) against the panel. */
static void compute_tiles(struct walk *walk, int64_t token, int32_t num_rows, float *partials)
{
    const struct dot_job *job = walk->job;
    int64_t num_calls_left = divide_up(walk->chunk_end - token, TILE_MAX_ROWS) * walk->num_groups;
    bool is_last = walk->k + walk->num_k >= job->num_elements;
    struct tile tile = {.a = (const unsigned char *)job->a + token * job->a_stride_bytes +
                             walk->k * (int64_t)sizeof(float),
                        .a_stride_bytes = job->a_stride_bytes,
                        .num_elements = walk->num_k,
                        .is_resumed = walk->k > 0};
    plan_activations(walk, token + num_rows);
    for (int64_t idx = 0; idx < walk->num_groups; idx++) {
        tile.group = walk->panel + idx * walk->num_k * GROUP_COLS;
        tile.sums = partials + (walk->is_cut ? idx * num_rows * GROUP_COLS : 0);
        choose_ahead(walk, walk->num_groups - idx, num_calls_left - idx, &tile);
        tile_fns[num_rows](&tile);
        if (is_last) {
            store_group(job, tile.sums, token, num_rows, walk->first_col + idx * group_cols(job),
                        walk->end);
        }
    }
}

/* From a row on, as many tiles as have room for their sums against all blocks of the panel; returns
 * the row behind them. */
static int64_t compute_chunk(struct walk *walk, int64_t first_token)
{
    const struct dot_job *job = walk->job;
    int64_t num_sums = walk->num_groups * GROUP_COLS; /* of a row */
    int64_t max_rows = PARTIAL_BYTES / (int64_t)sizeof(float) / num_sums;
    int64_t token = first_token;
    walk->chunk_end =
        walk->is_cut ? min_of(job->num_tokens, first_token + max_rows) : job->num_tokens;
    for (walk->k = 0; walk->k < job->num_elements; walk->k += walk->block_k) {
        walk->num_k = min_of(walk->block_k, job->num_elements - walk->k);
        plan_weights(walk);
        fill_panel(walk);
        walk->is_cold = false;
        token = first_token;
        while (token < job->num_tokens) {
            int32_t num_rows = tile_rows(job->num_tokens - token);
            int64_t num_before = walk->is_cut ? token - first_token : 0;
            if (token + num_rows > walk->chunk_end) {
                break;
            }
            compute_tiles(walk, token, num_rows, walk->partials + num_before * num_sums);
            token += num_rows;
        }
    }
    return token;
}

void avx2_dot_columns(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    if (job->num_tokens <= FEW_MAX_ROWS) {
        avx2_dot_few(job, scratch, begin, end);
        return;
    }
    struct walk walk = {.job = job,
                        .panel = (float *)(void *)scratch,
                        .partials = (float *)(void *)(scratch + PANEL_BYTES),
                        .end = end,
                        .block_k = block_k_of(job),
                        .is_cold = true};
    int64_t all_groups = divide_up(end - begin, group_cols(job));
    int64_t group_bytes = walk.block_k * GROUP_COLS * (int64_t)sizeof(float);
    int64_t max_groups = job->num_tokens <= FEW_ROW_TILES * TILE_MAX_ROWS
                             ? FEW_PANEL_GROUPS
                             : PANEL_BYTES / group_bytes;
    walk.is_cut = walk.block_k < job->num_elements;
    walk.panel_groups = divide_up(all_groups, divide_up(all_groups, max_groups)); /* alike */
    int64_t panel_cols = walk.panel_groups * group_cols(job);
    for (walk.first_col = begin; walk.first_col < end; walk.first_col += panel_cols) {
        walk.num_groups = divide_up(min_of(panel_cols, end - walk.first_col), group_cols(job));
        for (int64_t token = 0; token < job->num_tokens;) {
            token = compute_chunk(&walk, token);
        }
    }
}

#endif
