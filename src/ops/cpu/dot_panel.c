/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows (one register tile holds them all): weights pass by once, as fast as memory gives them;
 * the rows that come next are prefetched at a fixed distance.
 *
 * Many rows: a panel of columns, all k, stays in L2 and meets one tile of rows after the other.
 * Meanwhile the next tile of rows and, spread over the whole time, the next panel are on their way
 * into L2. Long rows are cut along k; where they are so long that a panel would be narrow, only its
 * block of k stays in L2, and a chunk of many row tiles meets it:
 *
 *   for each panel
 *     for each chunk of row tiles        one, or as many as have their accumulators in scratch
 *       for each block of k              accumulators of the chunk wait in scratch between blocks
 *         for each row tile              activations in L1 or L2
 *           for each tile of columns     accumulators in registers */
#include "ops/cpu/dot_panel.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/dot_sizes.h"

#define LINE_BYTES 64
/* Prefetched beside a tile of few rows: what memory delivers while one line is on its way, several
 * times over. */
#define AHEAD_BYTES (16 * 1024)
#define BLOCK_UNIT_K 32
/* With few row tiles memory decides: a small panel is soon complete, and its successor arrives
 * while it meets the other rows. */
#define FEW_ROW_TILES 4
#define FEW_PANEL_BYTES (64 * 1024)
#define FEW_PANEL_MIN_COLS 16
/* Narrower panels would read activations too often. */
#define PANEL_MIN_COLS 24
/* Scratch: sums of a row tile, then partial sums. */
#define SUMS_BYTES (64 * 1024)
#define PARTIAL_BYTES (256 * 1024)

/* Memory that will be needed, cache lines of rows, in order. */
struct ahead {
    uintptr_t row_at;
    int64_t stride_bytes, row_lines;
    int64_t line;      /* the next one to ask for, in the row at row_at */
    int64_t num_lines; /* in all */
    int64_t num_due;   /* to be asked for in this run */
};

struct walk {
    const struct dot_job *job;
    int64_t element_bytes, row_bytes; /* of weights */
    int64_t block_k;
    int64_t num_tiles;       /* of rows */
    int64_t num_chunk_tiles; /* more than 1: panels are too large for L2, their blocks are not */
    int64_t panel_cols, panel_begin, panel_end, end;
    int64_t sums_stride;
    float *sums;             /* [num_matrices][DOT_TILE_MAX_ROWS][sums_stride] */
    unsigned char *partials; /* [num_chunk_tiles][tile_partial_bytes] */
    int64_t tile_partial_bytes;
    bool is_cold;       /* nobody has prefetched the weights of the run */
    bool is_a_resident; /* all activations stay in L2 anyway */

    /* What a run brings into L2 beside its own work: all of next_a, and of the weights of each
     * matrix one of num_runs parts. */
    struct ahead next_a, next_weights[2];
    int64_t num_runs, num_runs_begun;
};

/* Rows [row, row + num_rows) times k [k, k + num_k). */
struct run {
    int64_t row, k, num_k;
    int32_t num_rows;
    unsigned char *partials;
};

/* Of the row tile that begins with num_left rows left. */
static int32_t tile_rows(const struct dot_tiles *tiles, int64_t num_left)
{
    int32_t num_rows = tiles->most_rows;
    if (num_left < num_rows) {
        num_rows = (int32_t)num_left;
    } else if (num_left > num_rows && num_left < 2 * num_rows) {
        num_rows = (int32_t)(num_left + 1) / 2; /* two alike are faster than most and a rest */
    }
    return tiles->num_cols[num_rows] == 0 ? (num_rows + 1) / 2 : num_rows;
}

static int64_t count_row_tiles(const struct dot_job *job)
{
    int64_t num_tiles = 0;
    for (int64_t row = 0; row < job->num_tokens; num_tiles++) {
        row += tile_rows(job->tiles, job->num_tokens - row);
    }
    return num_tiles;
}

static struct ahead ahead_of(const void *base, int64_t offset, int64_t stride_bytes,
                             int64_t num_rows, int64_t row_bytes)
{
    int64_t row_lines = divide_up(row_bytes, LINE_BYTES);
    return (struct ahead){.row_at = (uintptr_t)base + (uintptr_t)offset,
                          .stride_bytes = stride_bytes,
                          .row_lines = row_lines,
                          .num_lines = num_rows * row_lines};
}

/* Gives each of num_cols addresses of a tile the next num_lines lines of one row; false if nothing
 * is due. */
static bool take_ahead(struct ahead *ahead, int64_t num_lines, int32_t num_cols,
                       uintptr_t *addresses)
{
    if (ahead->num_due <= 0) {
        return false;
    }
    for (int32_t col = 0; col < num_cols; col++) {
        addresses[col] = ahead->row_at + (uintptr_t)(ahead->line * LINE_BYTES);
        ahead->num_due -= min_of(num_lines, ahead->row_lines - ahead->line);
        ahead->line += num_lines;
        if (ahead->line >= ahead->row_lines) {
            ahead->line = 0;
            ahead->row_at += (uintptr_t)ahead->stride_bytes;
        }
    }
    return true;
}

/* What a tile prefetches: rows of activations, then weights, at last nothing new. */
static void choose_ahead(struct walk *walk, int64_t num_lines, int32_t num_cols,
                         struct dot_tile *tile)
{
    if (take_ahead(&walk->next_a, num_lines, num_cols, tile->ahead)) {
        return;
    }
    for (int32_t matrix = 0; matrix < walk->job->num_matrices; matrix++) {
        if (take_ahead(&walk->next_weights[matrix], num_lines, num_cols, tile->ahead)) {
            return;
        }
    }
    for (int32_t col = 0; col < num_cols; col++) {
        tile->ahead[col] = (uintptr_t)tile->weight_rows[col];
    }
}

/* Sums of a tile with two matrices, `width` columns of each, to where those of either are
 * collected. Inlined with constants, so that a copy is one move. */
static inline __attribute__((always_inline)) void split_rows(const float *sums, int32_t num_rows,
                                                             int32_t width, float *const at[2],
                                                             int64_t stride)
{
    for (int32_t row = 0; row < num_rows; row++) {
        for (int32_t matrix = 0; matrix < 2; matrix++) {
            memcpy(at[matrix] + row * stride, sums + (2 * row + matrix) * width,
                   (size_t)width * sizeof(float));
        }
    }
}

static void split_sums(const float *sums, int32_t num_rows, int32_t width, float *const at[2],
                       int64_t stride)
{
    if (width == 2) {
        split_rows(sums, num_rows, 2, at, stride);
    } else if (num_rows == DOT_TILE_MAX_ROWS) {
        split_rows(sums, DOT_TILE_MAX_ROWS, 1, at, stride);
    } else {
        split_rows(sums, num_rows, 1, at, stride);
    }
}

/* How many tiles of columns to prefetch ahead where that is all there is. */
static int64_t tiles_ahead(const struct walk *walk, int32_t num_cols)
{
    int64_t tile_bytes = num_cols * walk->row_bytes;
    return tile_bytes < AHEAD_BYTES ? divide_up(AHEAD_BYTES, tile_bytes) : 1;
}

/* All columns of the panel. */
static void compute_run(struct walk *walk, const struct run *run)
{
    const struct dot_job *job = walk->job;
    const struct dot_tiles *tiles = job->tiles;
    int32_t num_cols = tiles->num_cols[run->num_rows];
    int32_t width = num_cols / job->num_matrices;
    dot_tile_fn *fn = tiles->fns[job->dtype][run->num_rows];
    int64_t partial_bytes = (int64_t)run->num_rows * num_cols * tiles->vector_bytes;
    struct dot_tile tile = {.a = (const unsigned char *)job->a + run->row * job->a_stride_bytes +
                                 run->k * tiles->a_element_bytes,
                            .a_stride_bytes = job->a_stride_bytes,
                            .is_resumed = run->k > 0,
                            .is_continued = run->k + run->num_k < job->num_elements,
                            .num_elements = (int32_t)run->num_k};
    float results[DOT_TILE_MAX_SUMS];
    int64_t num_lines = run->num_k * walk->element_bytes / LINE_BYTES;
    int64_t ahead_bytes = tiles_ahead(walk, num_cols) * width * walk->row_bytes;
    int64_t last_col = walk->panel_end - 1, call_idx = 0;
    num_lines = num_lines < 1 ? 1 : num_lines;
    for (int64_t col = walk->panel_begin; col <= last_col; col += width, call_idx++) {
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            const unsigned char *at =
                job->weights[matrix] + run->k * walk->element_bytes + col * walk->row_bytes;
            for (int32_t idx = 0; idx < width; idx++) {
                tile.weight_rows[matrix * width + idx] = at;
                /* A panel that ends inside a tile repeats its last column. */
                at += col + idx < last_col ? walk->row_bytes : 0;
            }
        }
        if (walk->is_cold) {
            for (int32_t idx = 0; idx < num_cols; idx++) {
                tile.ahead[idx] = (uintptr_t)tile.weight_rows[idx] + (uintptr_t)ahead_bytes;
            }
        } else {
            choose_ahead(walk, num_lines, num_cols, &tile);
        }
        tile.partial = (float *)(void *)(run->partials + call_idx * partial_bytes);
        float *sums = walk->sums + (col - walk->panel_begin);
        if (job->num_matrices == 1) {
            fn(&tile, sums, walk->sums_stride);
            continue;
        }
        fn(&tile, results, num_cols);
        if (!tile.is_continued) {
            float *const at[2] = {sums, sums + DOT_TILE_MAX_ROWS * walk->sums_stride};
            split_sums(results, run->num_rows, width, at, walk->sums_stride);
        }
    }
}

static void store_run(const struct walk *walk, const struct run *run)
{
    const struct dot_job *job = walk->job;
    struct dot_sums sums = {.stride = walk->sums_stride,
                            .first_row = run->row,
                            .first_col = walk->panel_begin,
                            .num_rows = run->num_rows,
                            .num_cols = (int32_t)(walk->panel_end - walk->panel_begin)};
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        sums.at[matrix] = walk->sums + matrix * DOT_TILE_MAX_ROWS * walk->sums_stride;
    }
    job->store(job->params, &sums);
}

/* What is due in a run: the activations of the run after it, and a part of the weights. */
static void plan_run(struct walk *walk, const struct run *run)
{
    const struct dot_job *job = walk->job;
    int64_t row = run->row, k = run->k;
    if (walk->num_chunk_tiles == 1) {
        k += walk->block_k;
    }
    if (walk->num_chunk_tiles > 1 || k >= job->num_elements) {
        row += run->num_rows;
        k = walk->num_chunk_tiles > 1 ? k : 0;
    }
    row = row < job->num_tokens ? row : 0;
    int64_t a_bytes = job->tiles->a_element_bytes;
    walk->next_a = ahead_of(job->a, row * job->a_stride_bytes + k * a_bytes, job->a_stride_bytes,
                            tile_rows(job->tiles, job->num_tokens - row),
                            min_of(walk->block_k, job->num_elements - k) * a_bytes);
    if (!walk->is_a_resident) {
        walk->next_a.num_due = walk->next_a.num_lines;
    }
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        struct ahead *weights = &walk->next_weights[matrix];
        weights->num_due += weights->num_lines * (walk->num_runs_begun + 1) / walk->num_runs -
                            weights->num_lines * walk->num_runs_begun / walk->num_runs;
    }
    walk->num_runs_begun++;
}

/* Columns [begin, end), k [k, k + block_k) of all matrices, while num_runs runs of tiles pass. */
static void plan_weights(struct walk *walk, int64_t begin, int64_t end, int64_t k, int64_t num_runs)
{
    const struct dot_job *job = walk->job;
    int64_t num_k = min_of(walk->block_k, job->num_elements - k);
    if (walk->num_chunk_tiles == 1) {
        num_k = job->num_elements;
    }
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        walk->next_weights[matrix] =
            ahead_of(job->weights[matrix], begin * walk->row_bytes + k * walk->element_bytes,
                     walk->row_bytes, end - begin, num_k * walk->element_bytes);
    }
    walk->num_runs = num_runs;
    walk->num_runs_begun = 0;
}

/* The row tiles of a chunk against the panel; returns the row behind them. */
static int64_t compute_chunk(struct walk *walk, int64_t first_row, int64_t first_tile)
{
    const struct dot_job *job = walk->job;
    int64_t row = first_row;
    for (int64_t k = 0; k < job->num_elements; k += walk->block_k) {
        row = first_row;
        if (walk->num_chunk_tiles > 1) {
            int64_t next_k = k + walk->block_k < job->num_elements ? k + walk->block_k : 0;
            plan_weights(walk, walk->panel_begin, walk->panel_end, next_k,
                         min_of(walk->num_chunk_tiles, walk->num_tiles - first_tile));
        }
        for (int64_t idx = 0; idx < walk->num_chunk_tiles && row < job->num_tokens; idx++) {
            struct run run = {.row = row,
                              .k = k,
                              .num_k = min_of(walk->block_k, job->num_elements - k),
                              .num_rows = tile_rows(job->tiles, job->num_tokens - row),
                              .partials = walk->partials + idx * walk->tile_partial_bytes};
            plan_run(walk, &run);
            compute_run(walk, &run);
            if (k + walk->block_k >= job->num_elements) {
                store_run(walk, &run);
            }
            row += run.num_rows;
        }
    }
    return row;
}

/* Widths of panels and blocks for `num_cols` columns. */
static void plan_walk(struct walk *walk, int64_t num_cols)
{
    const struct dot_job *job = walk->job;
    int64_t max_cols = SUMS_BYTES / (int64_t)sizeof(float) / DOT_TILE_MAX_ROWS / 2 / 16 * 16;
    int64_t col_bytes = walk->row_bytes * job->num_matrices;
    int64_t col_partial_bytes =
        (int64_t)job->tiles->most_rows * job->tiles->vector_bytes * job->num_matrices;
    walk->block_k = job->num_elements;
    walk->num_chunk_tiles = 1;
    walk->panel_cols = max_cols;
    if (walk->num_tiles > 1) {
        int64_t num_blocks = job->num_elements <= job->tiles->max_whole_k
                                 ? 1
                                 : divide_up(job->num_elements, job->tiles->max_block_k);
        bool are_few = walk->num_tiles <= FEW_ROW_TILES;
        int64_t min_cols = (are_few ? FEW_PANEL_MIN_COLS : PANEL_MIN_COLS) / job->num_matrices;
        walk->block_k = round_up(divide_up(job->num_elements, num_blocks), BLOCK_UNIT_K);
        walk->panel_cols = (are_few ? FEW_PANEL_BYTES : job->tiles->panel_bytes) / col_bytes;
        if (walk->panel_cols < min_cols) {
            walk->panel_cols = min_cols;
            if (min_cols * col_bytes > job->tiles->max_panel_bytes) {
                walk->panel_cols = job->tiles->block_panel_cols / job->num_matrices;
                walk->num_chunk_tiles =
                    PARTIAL_BYTES /
                    (round_up(walk->panel_cols, DOT_TILE_MAX_COLS) * col_partial_bytes);
            }
        }
        walk->panel_cols = min_of(walk->panel_cols, max_cols);
    }
    /* Panels alike. */
    walk->panel_cols =
        round_up(divide_up(num_cols, divide_up(num_cols, walk->panel_cols)), DOT_TILE_MAX_COLS);
    walk->sums_stride = round_up(walk->panel_cols, 16);
    walk->tile_partial_bytes = walk->panel_cols * col_partial_bytes;
    assert(walk->sums_stride * DOT_TILE_MAX_ROWS * job->num_matrices * (int64_t)sizeof(float) <=
           SUMS_BYTES);
    assert(SUMS_BYTES + walk->num_chunk_tiles * walk->tile_partial_bytes <= CPU_SCRATCH_BYTES ||
           walk->block_k >= job->num_elements);
}

void dot_panels(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    int64_t element_bytes = (int64_t)dtype_block_bytes(job->dtype);
    struct walk walk = {.job = job,
                        .element_bytes = element_bytes,
                        .row_bytes = job->num_elements * element_bytes,
                        .num_tiles = count_row_tiles(job),
                        .end = end,
                        .sums = (float *)(void *)scratch,
                        .partials = scratch + SUMS_BYTES};
    walk.is_a_resident =
        (int64_t)job->num_tokens * job->num_elements * job->tiles->a_element_bytes <=
        job->tiles->panel_bytes / 2;
    plan_walk(&walk, end - begin);
    for (int64_t col = begin; col < end; col += walk.panel_cols) {
        walk.panel_begin = col;
        walk.panel_end = min_of(col + walk.panel_cols, end);
        if (walk.num_chunk_tiles == 1) {
            int64_t num_runs = walk.num_tiles * divide_up(job->num_elements, walk.block_k);
            plan_weights(&walk, walk.panel_end, min_of(walk.panel_end + walk.panel_cols, end), 0,
                         num_runs);
        }
        int64_t tile_idx = 0;
        for (int64_t row = 0; row < job->num_tokens; tile_idx += walk.num_chunk_tiles) {
            walk.is_cold = walk.num_tiles == 1 || (col == begin && row == 0);
            row = compute_chunk(&walk, row, tile_idx);
        }
    }
}
