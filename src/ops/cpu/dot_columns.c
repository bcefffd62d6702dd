/* SPDX-License-Identifier: Apache-2.0 */
/* A panel of groups of columns is turned once for each block of k and stays in L2. A group of
 * gemm_swiglu is half of gate, half of up.
 *
 *   for each panel
 *     for each chunk of rows         as many as have their sums in scratch, where k is cut
 *       for each block of k          sums wait in scratch between blocks
 *         for each tile of rows      activations in L1; the next ones on their way to L2
 *           for each group           sums in registers; meanwhile the next panel's weights come in
 */
#include "ops/cpu/dot_columns.h"

#include <assert.h>
#include <stddef.h>

#include "ops/cpu/cpu_kernels.h"

/* With few row tiles memory decides: a small panel is soon complete. */
#define FEW_ROW_TILES 4
#define FEW_PANEL_COLS 64

/* Memory that will be needed, rows in parts of what a tile prefetches from one address. */
struct ahead {
    uintptr_t row_at;
    int64_t stride_bytes, part_bytes, row_parts;
    int64_t part, num_left; /* the next one, in the row at row_at; and how many there are with it */
};

struct walk {
    const struct dot_columns *columns;
    const struct dot_job *job;
    unsigned char *panel; /* [num_groups][group_bytes] */
    float *partials;      /* [rows of a chunk][num_groups][group_cols], by tiles */
    int64_t end;          /* of columns */
    int64_t matrix_cols;  /* of each matrix in a group */
    int64_t panel_groups, block_k;
    int64_t group_bytes; /* of a turned group and block of k */
    bool is_cut;         /* along k */
    /* Of the panel and block at hand: */
    int64_t first_col, num_groups, k, num_k, chunk_end;
    /* On their way to L2: the next tile of activations, the next block of each matrix. */
    struct ahead next_a, next_weights[2];
};

/* Of the tile that begins with num_left rows left. */
static int32_t tile_rows(const struct dot_columns *columns, int64_t num_left)
{
    int32_t most = columns->most_rows;
    return num_left >= 2 * most ? most
           : num_left > most    ? (int32_t)(num_left + 1) / 2
                                : (int32_t)num_left;
}

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

/* Of the group at an index of the panel: the first column, and what there is of its two halves. */
static int64_t group_col(const struct walk *walk, int64_t idx)
{
    return walk->first_col + idx * walk->matrix_cols;
}

static int group_halves(const struct walk *walk, int64_t idx)
{
    int64_t num_cols = min_of(walk->matrix_cols, walk->end - group_col(walk, idx));
    bool is_half = walk->job->num_matrices == 1 && num_cols <= walk->matrix_cols / 2;
    return is_half ? 1 : DOT_GROUP_HALVES;
}

static void fill_panel(const struct walk *walk)
{
    const struct dot_job *job = walk->job;
    dot_column_fill_fn *fill = walk->columns->fill[job->dtype];
    for (int64_t idx = 0; idx < walk->num_groups; idx++) {
        const unsigned char *rows[DOT_GROUP_MAX_COLS];
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            rows_at(job, matrix, group_col(walk, idx), walk->end, walk->k, walk->matrix_cols,
                    rows + matrix * walk->matrix_cols);
        }
        fill(rows, group_halves(walk, idx), walk->num_k, walk->panel + idx * walk->group_bytes);
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
    int64_t panel_cols = walk->panel_groups * walk->matrix_cols;
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
    int64_t num_rows = min_of(walk->columns->most_rows, walk->chunk_end - next_token);
    int64_t element_bytes = walk->columns->a_element_bytes;
    walk->next_a =
        ahead_of(job->a, next_token * job->a_stride_bytes + walk->k * element_bytes,
                 job->a_stride_bytes, num_rows, walk->num_k * element_bytes, part_bytes(walk));
}

/* What a tile prefetches: what is left of the activations; then rows of weights, as late as
 * num_later addresses of tiles after this one allow, for much passes through L2 meanwhile; then
 * what is there already. All at once, so that most tiles have nothing to prefetch. */
static void choose_ahead(struct walk *walk, int64_t num_later, struct dot_column_tile *tile)
{
    const int32_t num_aheads = walk->columns->num_aheads;
    struct ahead *next = walk->next_weights;
    int32_t slot = 0;
    while (slot < num_aheads && walk->next_a.num_left > 0) {
        tile->ahead[slot++] = take_ahead(&walk->next_a);
    }
    num_later = num_later > walk->next_a.num_left ? num_later - walk->next_a.num_left : 0;
    while (slot < num_aheads && next[0].num_left + next[1].num_left > num_later) {
        tile->ahead[slot++] = take_ahead(next[1].num_left > next[0].num_left ? &next[1] : next);
    }
    tile->has_aheads = slot > 0;
    for (; slot < num_aheads; slot++) {
        tile->ahead[slot] = (uintptr_t)tile->group;
    }
}

/* Sums of some rows and one group of columns. */
static void store_group(const struct walk *walk, const float *sums, int64_t first_row,
                        int32_t num_rows, int64_t first_col)
{
    int64_t stride = walk->columns->group_cols;
    struct dot_sums stored = {.at = {sums, sums + stride / 2},
                              .stride = stride,
                              .first_row = first_row,
                              .first_col = first_col,
                              .num_rows = num_rows,
                              .num_cols =
                                  (int32_t)min_of(walk->matrix_cols, walk->end - first_col)};
    walk->job->store(walk->job->params, &stored);
}

/* Rows [token, token + num_rows) against the panel. */
static void compute_tiles(struct walk *walk, int64_t token, int32_t num_rows, float *partials)
{
    const struct dot_columns *columns = walk->columns;
    const struct dot_job *job = walk->job;
    int64_t num_tiles_after =
        divide_up(walk->chunk_end - token - num_rows, columns->most_rows) * walk->num_groups;
    bool is_last = walk->k + walk->num_k >= job->num_elements;
    struct dot_column_tile tile = {.a = (const unsigned char *)job->a +
                                        token * job->a_stride_bytes +
                                        walk->k * columns->a_element_bytes,
                                   .a_stride_bytes = job->a_stride_bytes,
                                   .num_elements = walk->num_k,
                                   .is_resumed = walk->k > 0};
    plan_activations(walk, token + num_rows);
    /* Addresses for weights after this tile of rows. */
    int64_t num_later = num_tiles_after * columns->num_aheads -
                        num_tiles_after / walk->num_groups * walk->next_a.num_left;
    for (int64_t idx = 0; idx < walk->num_groups; idx++) {
        tile.group = walk->panel + idx * walk->group_bytes;
        tile.sums = partials + (walk->is_cut ? idx * num_rows * columns->group_cols : 0);
        choose_ahead(walk, num_later + (walk->num_groups - 1 - idx) * columns->num_aheads, &tile);
        columns->tiles[num_rows][group_halves(walk, idx) - 1](&tile);
        if (is_last) {
            store_group(walk, tile.sums, token, num_rows, group_col(walk, idx));
        }
    }
}

/* From a row on, as many tiles as have room for their sums against all blocks of the panel; returns
 * the row behind them. */
static int64_t compute_chunk(struct walk *walk, int64_t first_token)
{
    const struct dot_job *job = walk->job;
    int64_t num_sums = walk->num_groups * walk->columns->group_cols; /* of a row */
    int64_t max_rows = walk->columns->partial_bytes / (int64_t)sizeof(float) / num_sums;
    int64_t token = first_token;
    walk->chunk_end =
        walk->is_cut ? min_of(job->num_tokens, first_token + max_rows) : job->num_tokens;
    for (walk->k = 0; walk->k < job->num_elements; walk->k += walk->block_k) {
        walk->num_k = min_of(walk->block_k, job->num_elements - walk->k);
        plan_weights(walk);
        fill_panel(walk);
        token = first_token;
        while (token < job->num_tokens) {
            int32_t num_rows = tile_rows(walk->columns, job->num_tokens - token);
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

void dot_columns(const struct dot_columns *columns, const struct dot_job *job,
                 unsigned char *scratch, int64_t begin, int64_t end)
{
    struct walk walk = {.columns = columns,
                        .job = job,
                        .panel = scratch,
                        .partials = (float *)(void *)(scratch + columns->panel_bytes),
                        .end = end,
                        .matrix_cols = columns->group_cols / job->num_matrices,
                        .block_k = block_k_at_most(job, columns->max_block_k)};
    assert(columns->panel_bytes + columns->partial_bytes <= CPU_SCRATCH_BYTES);
    assert(columns->tiles[tile_rows(columns, job->num_tokens)][0] != NULL);
    int64_t all_groups = divide_up(end - begin, walk.matrix_cols);
    walk.group_bytes = walk.block_k * columns->group_cols * columns->panel_element_bytes;
    int64_t max_groups = job->num_tokens <= FEW_ROW_TILES * columns->most_rows
                             ? FEW_PANEL_COLS / columns->group_cols
                             : columns->panel_bytes / walk.group_bytes;
    assert(max_groups * walk.group_bytes <= columns->panel_bytes);
    walk.is_cut = walk.block_k < job->num_elements;
    walk.panel_groups = divide_up(all_groups, divide_up(all_groups, max_groups)); /* alike */
    int64_t panel_cols = walk.panel_groups * walk.matrix_cols;
    for (walk.first_col = begin; walk.first_col < end; walk.first_col += panel_cols) {
        walk.num_groups = divide_up(min_of(panel_cols, end - walk.first_col), walk.matrix_cols);
        for (int64_t token = 0; token < job->num_tokens;) {
            token = compute_chunk(&walk, token);
        }
    }
}
