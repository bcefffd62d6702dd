/* SPDX-License-Identifier: Apache-2.0 */
/* Splits each op along its parallel axis and runs the selected kernels on the pieces. */
#include "ops/ops.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "ops/column_ranges.h"
#include "ops/cpu/attention_split.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/few_ways.h"
#include "ops/ops_loop.h"

/* A loop this small is done before another thread would have joined it: 20,000 flop take 1 us. */
#define INLINE_FLOPS 20e3
/* Enough pieces that threads which finish early find more, few enough that each reads long runs of
 * memory. */
#define PIECES_PER_THREAD 4
/* Of weights for few rows: a piece begins a little slowly, until its first weights have come from
 * memory. */
#define MIN_PIECE_BYTES (192 * 1024)
#define FEW_ROWS 8
/* Columns of a piece of a linear op come in multiples of the widest tile. */
#define COLUMN_UNIT 16
/* Of many rows, the last quarter of the columns, or the last piece of each thread, goes in small
 * pieces, so that threads of which one was held up end together: of a quarter of the others' size,
 * wide enough for a panel. */
#define SMALL_PARTS 4
#define SMALL_UNIT 64

/* Of bringing one activation into blocks or groups, for grain_for. */
#define QUANTIZE_FLOPS 8.0
#define PACK_BF16_FLOPS 2.0

struct ops {
    struct thread_pool *pool;
    struct cpu_kernels kernels;
    unsigned char *scratch; /* the caller's: activations in blocks, row by row, form by form */
    size_t scratch_bytes;
    struct memory_region thread_scratch; /* [num_threads] x CPU_SCRATCH_BYTES */
    struct column_range *ranges;         /* [num_threads] */
    struct few_ways few_ways;
};

size_t ops_thread_scratch_bytes(int32_t num_threads)
{
    return (size_t)num_threads * CPU_SCRATCH_BYTES;
}

size_t ops_scratch_token_bytes(int64_t max_in_features)
{
    /* A row may be needed in both forms: q_proj Q4_K and v_proj Q8_0, say. */
    return quant_activation_row_bytes(ACTIVATION_FORM_Q8, max_in_features / 32 * 32) +
           quant_activation_row_bytes(ACTIVATION_FORM_Q8_K, max_in_features / 256 * 256);
}

/* Of a row of bf16_groups. */
static size_t bf16_row_bytes(int64_t in_features)
{
    return (size_t)(in_features + BF16_TILE_FEATURES - 1) / BF16_TILE_FEATURES *
           BF16_TILE_FEATURES * sizeof(uint16_t);
}

size_t ops_bf16_token_bytes(uint32_t cpu_features, int64_t max_in_features)
{
    struct cpu_kernels kernels;
    cpu_kernels_select(cpu_features, &kernels);
    /* The groups begin at the next multiple of 64 bytes. */
    return kernels.pack_bf16 == NULL || max_in_features == 0 ? 0
                                                             : bf16_row_bytes(max_in_features) + 64;
}

enum imbrex_status ops_create(int32_t num_threads, uint32_t cpu_features, void *scratch,
                              size_t scratch_bytes, struct ops **ops, struct imbrex_error *err)
{
    assert((uintptr_t)scratch % 4 == 0);
    struct ops *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "ops", sizeof(*created));
    }
    enum imbrex_status status = thread_pool_create(num_threads, &created->pool, err);
    if (status == IMBREX_STATUS_OK) {
        status =
            memory_region_map("scratch memory of the threads",
                              ops_thread_scratch_bytes(num_threads), &created->thread_scratch, err);
    }
    if (status == IMBREX_STATUS_OK) {
        size_t num_bytes = (size_t)num_threads * sizeof(*created->ranges);
        created->ranges = calloc((size_t)num_threads, sizeof(*created->ranges));
        if (created->ranges == NULL) {
            status = error_out_of_memory(err, "ranges of the threads", num_bytes);
        }
    }
    if (status != IMBREX_STATUS_OK) {
        ops_destroy(created);
        return status;
    }
    cpu_kernels_select(cpu_features, &created->kernels);
    created->scratch = scratch;
    created->scratch_bytes = scratch_bytes;
    created->few_ways.the_only = FEW_WAY_COUNT;
    *ops = created;
    return IMBREX_STATUS_OK;
}

void ops_destroy(struct ops *ops)
{
    if (ops == NULL) {
        return;
    }
    thread_pool_destroy(ops->pool);
    memory_region_unmap(&ops->thread_scratch);
    free(ops->ranges);
    free(ops);
}

const char *ops_kernels_name(const struct ops *ops)
{
    return ops->kernels.name;
}

int32_t ops_num_threads(const struct ops *ops)
{
    return thread_pool_num_threads(ops->pool);
}

const char *ops_kernels_name_for(uint32_t cpu_features)
{
    struct cpu_kernels kernels;
    cpu_kernels_select(cpu_features, &kernels);
    return kernels.name;
}

/* Items of a piece: a multiple of `unit`, or all of them if the loop is not worth sharing. */
static int64_t grain_for(const struct ops *ops, int64_t count, double item_flops, int64_t unit)
{
    int64_t num_pieces = (int64_t)ops_num_threads(ops) * PIECES_PER_THREAD;
    if ((double)count * item_flops < INLINE_FLOPS) {
        return count;
    }
    int64_t min_items = (int64_t)(INLINE_FLOPS / 2 / item_flops) + 1;
    int64_t grain = (count + num_pieces - 1) / num_pieces;
    grain = grain < min_items ? min_items : grain;
    return (grain + unit - 1) / unit * unit;
}

/* Columns in pieces: num_large of a size, then small ones. */
struct column_split {
    thread_pool_fn *piece;
    int64_t count, large, small, num_large;
};

/* Where piece `idx` begins, and the one before it ends. */
static int64_t column_edge(const struct column_split *split, int64_t idx)
{
    int64_t num_small = idx > split->num_large ? idx - split->num_large : 0;
    int64_t edge = (idx - num_small) * split->large + num_small * split->small;
    return edge < split->count ? edge : split->count;
}

/* What a piece needs to find its kernel: passed through the pool's `arg`. */
struct loop {
    const struct cpu_kernels *kernels;
    unsigned char *thread_scratch;
    const void *params;
    int32_t num_linears;                 /* linear only */
    const struct quant_rows *quant_rows; /* linear, gemm_swiglu and what quantises for them */
    const struct attention_parts *parts; /* attention in splits only */
    double item_bytes;                   /* of weights, for few rows */
    enum few_way few_way;                /* linear, gemm_swiglu */
    struct column_split columns;         /* linear, gemm_swiglu of many rows */
    struct column_ranges ranges;         /* of few rows, through this piece of a range */
    thread_pool_fn *range_piece;
};

static void run_loop(struct ops *ops, thread_pool_fn *piece, struct loop loop, int64_t count,
                     double item_flops, int64_t unit)
{
    if (count == 0) {
        return;
    }
    loop.kernels = &ops->kernels;
    loop.thread_scratch = ops->thread_scratch.base;
    thread_pool_run(ops->pool, count, grain_for(ops, count, item_flops, unit), piece, &loop);
}

static void columns_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    for (int64_t idx = begin; idx < end; idx++) {
        loop->columns.piece(arg, column_edge(&loop->columns, idx),
                            column_edge(&loop->columns, idx + 1), thread_idx);
    }
}

/* What there is for a thread. The pool's pieces only say how many threads are wanted. */
static void range_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct loop *loop = arg;
    int64_t col, end_col;
    (void)begin;
    (void)end;
    while (column_ranges_take(&loop->ranges, thread_idx, &col, &end_col)) {
        loop->range_piece(arg, col, end_col, thread_idx);
    }
}

static void run_columns(struct ops *ops, thread_pool_fn *piece, struct loop loop, int64_t count,
                        double item_flops)
{
    int64_t num_threads = ops_num_threads(ops);
    if (count == 0) {
        return;
    }
    int64_t large = num_threads == 1 ? count : grain_for(ops, count, item_flops, COLUMN_UNIT);
    int64_t small = (large / SMALL_PARTS + SMALL_UNIT - 1) / SMALL_UNIT * SMALL_UNIT;
    int64_t num_large = count / large * 3 / 4 / num_threads * num_threads;
    if (small >= large || num_large == 0) {
        num_large = (count + large - 1) / large;
        small = large;
    }
    loop.kernels = &ops->kernels;
    loop.thread_scratch = ops->thread_scratch.base;
    loop.columns = (struct column_split){
        .piece = piece, .count = count, .large = large, .small = small, .num_large = num_large};
    int64_t num_left = count - num_large * large;
    int64_t num_pieces = num_large + (num_left > 0 ? (num_left + small - 1) / small : 0);
    thread_pool_run(ops->pool, num_pieces, 1, columns_piece, &loop);
}

static bool has_ways(const struct ops *ops, bool are_quantised, int32_t num_rows)
{
    return are_quantised ? ops->kernels.has_quant_ways && num_rows == 1 : ops->kernels.has_few_ways;
}

/* Of few rows; if there are several ways to read weights, in the one that is the fastest for them
 * or is tried out. */
static void run_few_columns(struct ops *ops, thread_pool_fn *piece, struct loop loop, int64_t count,
                            double item_flops, int32_t num_rows, bool is_choice)
{
    struct few_shape *trial = NULL;
    int64_t num_bytes = (int64_t)(loop.item_bytes * (double)count);
    int32_t num_threads = ops_num_threads(ops);
    if (count == 0) {
        return;
    }
    if (is_choice) {
        loop.few_way = few_ways_take(&ops->few_ways, num_rows, num_bytes, &trial);
    }
    int64_t begin_ns = trial != NULL ? clock_now_ns() : 0;
    loop.kernels = &ops->kernels;
    loop.thread_scratch = ops->thread_scratch.base;
    if (num_threads == 1 || (double)count * item_flops < INLINE_FLOPS) {
        piece(&loop, 0, count, 0);
    } else {
        /* No more threads are woken than have something to do. */
        double num_worth = (double)count * item_flops / (INLINE_FLOPS / 2);
        int32_t num_parts = num_worth < num_threads ? (int32_t)num_worth : num_threads;
        loop.range_piece = piece;
        loop.ranges = (struct column_ranges){.ranges = ops->ranges,
                                             .num_threads = num_threads,
                                             .num_parts = num_parts,
                                             .count = count,
                                             .unit = COLUMN_UNIT,
                                             .least = (int64_t)(MIN_PIECE_BYTES / loop.item_bytes)};
        column_ranges_split(&loop.ranges);
        thread_pool_run(ops->pool, num_parts, 1, range_piece, &loop);
    }
    if (trial != NULL) {
        few_ways_note(trial, loop.few_way, clock_now_ns() - begin_ns);
    }
}

void ops_set_few_way(struct ops *ops, enum few_way way)
{
    ops->few_ways.the_only = way;
}

const struct cpu_kernels *ops_kernels(const struct ops *ops)
{
    return &ops->kernels;
}

void ops_run_loop(struct ops *ops, thread_pool_fn *fn, void *arg, int64_t count, double item_flops)
{
    if (count > 0) {
        thread_pool_run(ops->pool, count, grain_for(ops, count, item_flops, 1), fn, arg);
    }
}

#define DEFINE_PIECE(op)                                                              \
    static void op##_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx) \
    {                                                                                 \
        const struct loop *loop = arg;                                                \
        (void)thread_idx;                                                             \
        loop->kernels->op(loop->params, begin, end);                                  \
    }
DEFINE_PIECE(embedding)
DEFINE_PIECE(rmsnorm)
DEFINE_PIECE(rope_kv)

static struct cpu_work work_of(const struct loop *loop, int32_t thread_idx)
{
    return (struct cpu_work){.quant_rows = loop->quant_rows,
                             .few_way = loop->few_way,
                             .scratch =
                                 loop->thread_scratch + (int64_t)thread_idx * CPU_SCRATCH_BYTES};
}

static void attention_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct attention_params *params = loop->params;
    int64_t count = (int64_t)params->num_tokens * params->kv.num_kv_heads;
    struct cpu_work work = work_of(loop, thread_idx);
    /* Last tokens first: they see the most keys, and short pieces at the end even out the
     * threads. */
    loop->kernels->attention(params, &work, count - end, count - begin);
}

static void attention_split_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    struct cpu_work work = work_of(loop, thread_idx);
    loop->kernels->attention_split(loop->params, loop->parts, &work, begin, end);
}

static void attention_merge_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    struct cpu_work work = work_of(loop, thread_idx);
    loop->kernels->attention_merge(loop->params, loop->parts, &work, begin, end);
}

static void gemm_swiglu_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    struct cpu_work work = work_of(loop, thread_idx);
    loop->kernels->gemm_swiglu(loop->params, &work, begin, end);
}

/* The columns of all linears stand in one row: [0, out of the first), then the second's, ... */
static void linear_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct linear_params *params = loop->params;
    struct cpu_work work = work_of(loop, thread_idx);
    int64_t first_col = 0;
    for (int32_t linear_idx = 0; linear_idx < loop->num_linears && first_col < end; linear_idx++) {
        int64_t end_col = first_col + params[linear_idx].out_features;
        int64_t piece_begin = begin > first_col ? begin : first_col;
        int64_t piece_end = end < end_col ? end : end_col;
        if (piece_begin < piece_end) {
            loop->kernels->linear(&params[linear_idx], &work, piece_begin - first_col,
                                  piece_end - first_col);
        }
        first_col = end_col;
    }
}

struct quantize_params {
    const float *a; /* [num_tokens, in_features], a_stride */
    int64_t a_stride;
    int32_t num_tokens, in_features;
    bool forms[ACTIVATION_FORM_COUNT]; /* wanted */
    bool bf16;                         /* bf16_groups wanted */
};

/* What weights of a dtype want. */
static void want_form(const struct ops *ops, enum dtype dtype, struct quantize_params *params)
{
    params->forms[quant_activation_form(dtype)] = true;
    params->bf16 |= dtype == DTYPE_BF16 && ops->kernels.pack_bf16 != NULL;
}

/* Whole groups, but the last one. */
static void pack_bf16_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct quantize_params *params = loop->params;
    size_t row_bytes = bf16_row_bytes(params->in_features);
    (void)thread_idx;
    for (int64_t token = begin; token < end; token += BF16_GROUP_TOKENS) {
        int64_t num_left = end - token;
        loop->kernels->pack_bf16(
            params->a + token * params->a_stride, params->a_stride,
            num_left < BF16_GROUP_TOKENS ? (int32_t)num_left : BF16_GROUP_TOKENS,
            params->in_features, loop->quant_rows->bf16_groups + token * (int64_t)row_bytes);
    }
}

static void quantize_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct quantize_params *params = loop->params;
    const struct quant_rows *quant_rows = loop->quant_rows;
    (void)thread_idx;
    for (int form = 0; form < ACTIVATION_FORM_COUNT; form++) {
        for (int64_t token = begin; token < end && quant_rows->rows[form] != NULL; token++) {
            loop->kernels->quantize(
                (enum activation_form)form, params->a + token * params->a_stride,
                quant_rows->rows[form] + token * (int64_t)quant_rows->row_bytes[form],
                params->in_features);
        }
    }
}

/* Brings all rows into the forms wanted; does nothing if these are fp32 alone. */
static void quantize_rows(struct ops *ops, const struct quantize_params *params,
                          struct quant_rows *quant_rows)
{
    size_t num_used = 0;
    *quant_rows = (struct quant_rows){.rows = {NULL}};
    for (int form = ACTIVATION_FORM_PLAIN + 1; form < ACTIVATION_FORM_COUNT; form++) {
        if (params->forms[form]) {
            size_t row_bytes =
                quant_activation_row_bytes((enum activation_form)form, params->in_features);
            assert(row_bytes > 0);
            quant_rows->rows[form] = ops->scratch + num_used;
            quant_rows->row_bytes[form] = row_bytes;
            num_used += row_bytes * (size_t)params->num_tokens;
        }
    }
    if (num_used > 0) {
        run_loop(ops, quantize_piece, (struct loop){.params = params, .quant_rows = quant_rows},
                 params->num_tokens, QUANTIZE_FLOPS * params->in_features, 1);
    }
    if (params->bf16) {
        num_used += (uintptr_t)(-(uintptr_t)(ops->scratch + num_used) % 64);
        quant_rows->bf16_groups = ops->scratch + num_used;
        num_used += bf16_row_bytes(params->in_features) * (size_t)params->num_tokens;
        run_loop(ops, pack_bf16_piece, (struct loop){.params = params, .quant_rows = quant_rows},
                 params->num_tokens, PACK_BF16_FLOPS * params->in_features, BF16_GROUP_TOKENS);
    }
    assert(num_used <= ops->scratch_bytes);
}

/* What the asserts below ask. */
__attribute__((unused)) static bool view_is_valid(struct weight_view view)
{
    return view.elements != NULL && (unsigned)view.dtype < DTYPE_COUNT;
}

__attribute__((unused)) static bool kv_is_valid(const struct kv_view *kv, int32_t layer_idx)
{
    return kv->blocks != NULL && kv->head_dim > 0 && kv->head_dim % 2 == 0 && kv->block_size > 0 &&
           (unsigned)kv->dtype < KV_DTYPE_COUNT && (uintptr_t)kv->blocks % 4 == 0 &&
           kv->num_kv_heads > 0 && layer_idx >= 0 && layer_idx < kv->num_layers;
}

void ops_embedding(struct ops *ops, const struct embedding_params *params)
{
    assert(params->num_tokens >= 0 && params->hidden_size > 0 && view_is_valid(params->table));
#ifndef NDEBUG
    for (int32_t token = 0; token < params->num_tokens; token++) {
        assert(params->token_ids[token] >= 0 && params->token_ids[token] < params->vocab_size);
    }
#endif
    run_loop(ops, embedding_piece, (struct loop){.params = params}, params->num_tokens,
             params->hidden_size, 1);
}

void ops_rmsnorm(struct ops *ops, const struct rmsnorm_params *params)
{
    assert(params->num_tokens >= 0 && params->hidden_size > 0);
    run_loop(ops, rmsnorm_piece, (struct loop){.params = params}, params->num_tokens,
             4.0 * params->hidden_size, 1);
}

void ops_linear(struct ops *ops, const struct linear_params *params, int32_t num_linears)
{
    int64_t num_cols = 0;
    double flops = 0.0, weight_bytes = 0.0;
    struct quantize_params quantize = {.a = NULL};
    struct quant_rows quant_rows;
    for (int32_t linear_idx = 0; linear_idx < num_linears; linear_idx++) {
        const struct linear_params *linear = &params[linear_idx];
        assert(linear->num_tokens == params[0].num_tokens && linear->num_tokens >= 0);
        assert(linear->in_features > 0 && linear->out_features >= 0);
        assert(linear->out_features == 0 || view_is_valid(linear->weight));
        num_cols += linear->out_features;
        flops += 2.0 * linear->num_tokens * linear->in_features * linear->out_features;
        weight_bytes += (double)linear->out_features *
                        (double)dtype_row_bytes(linear->weight.dtype, linear->in_features);
        bool is_bf16 = linear->weight.dtype == DTYPE_BF16 && ops->kernels.pack_bf16 != NULL;
        if (linear->out_features > 0 && (is_bf16 || dtype_is_quantized(linear->weight.dtype))) {
            assert(quantize.a == NULL ||
                   (quantize.a == linear->a && quantize.a_stride == linear->a_stride &&
                    quantize.in_features == linear->in_features));
            quantize.a = linear->a;
            quantize.a_stride = linear->a_stride;
            quantize.num_tokens = linear->num_tokens;
            quantize.in_features = linear->in_features;
            want_form(ops, linear->weight.dtype, &quantize);
        }
    }
    if (num_cols == 0 || params[0].num_tokens == 0) {
        return;
    }
    quantize_rows(ops, &quantize, &quant_rows);
    struct loop loop = {.params = params, .num_linears = num_linears, .quant_rows = &quant_rows};
    if (params[0].num_tokens > FEW_ROWS) {
        run_columns(ops, linear_piece, loop, num_cols, flops / (double)num_cols);
        return;
    }
    loop.item_bytes = weight_bytes / (double)num_cols;
    run_few_columns(ops, linear_piece, loop, num_cols, flops / (double)num_cols,
                    params[0].num_tokens, has_ways(ops, quantize.a != NULL, params[0].num_tokens));
}

void ops_rope_kv(struct ops *ops, const struct rope_kv_params *params)
{
    assert(params->num_tokens >= 0 && params->num_heads > 0);
    assert(kv_is_valid(&params->kv, params->layer_idx));
    double width = (double)(params->num_heads + 2 * params->kv.num_kv_heads) * params->kv.head_dim;
    run_loop(ops, rope_kv_piece, (struct loop){.params = params}, params->num_tokens, 3.0 * width,
             1);
}

/* Whether the longest rows would keep a thread busy while others have nothing left to do. */
static bool attention_is_uneven(const struct ops *ops, const struct attention_params *params,
                                double num_keys)
{
    double longest = 0.0;
    for (int32_t token = 0; token < params->num_tokens; token++) {
        longest = fmax(longest,
                       params->positions[token] + 1.0 - (double)attention_first_key(params, token));
    }
    return longest * ops_num_threads(ops) * 2.0 > num_keys * params->kv.num_kv_heads;
}

/* Two loops, the second over what the first has left in scratch memory. */
static void run_attention_parts(struct ops *ops, const struct attention_params *params,
                                const struct attention_parts *parts, double flops)
{
    struct loop loop = {.params = params, .parts = parts};
    run_loop(ops, attention_split_piece, loop, parts->count, flops / (double)parts->count, 1);
    run_loop(ops, attention_merge_piece, loop, (int64_t)params->num_tokens * params->num_heads,
             (double)parts->max_splits * params->kv.head_dim, 1);
}

void ops_attention(struct ops *ops, const struct attention_params *params)
{
    const struct kv_view *kv = &params->kv;
    assert(params->num_tokens >= 0 && kv_is_valid(kv, params->layer_idx));
    assert(params->num_heads > 0 && params->num_heads % kv->num_kv_heads == 0);
    assert(params->window >= 0);
    if (params->num_tokens == 0) {
        return;
    }
    double num_keys = 0.0;
    for (int32_t token = 0; token < params->num_tokens; token++) {
        assert(params->positions[token] >= 0 &&
               params->positions[token] / kv->block_size < params->max_blocks);
        num_keys += params->positions[token] + 1.0 - (double)attention_first_key(params, token);
    }
    double flops = 4.0 * params->num_heads * kv->head_dim * num_keys;
    struct attention_parts parts;
    if (ops->kernels.attention_split != NULL && ops_num_threads(ops) > 1 &&
        attention_is_uneven(ops, params, num_keys) &&
        attention_parts_plan(params, ops->thread_scratch.base, ops_num_threads(ops), &parts) &&
        parts.max_splits > 1) {
        run_attention_parts(ops, params, &parts, flops);
        return;
    }
    /* Later tokens of a prompt see more keys: with pieces longer than a tile, the last ones to be
     * taken would be the longest. */
    int64_t count = (int64_t)params->num_tokens * kv->num_kv_heads;
    int64_t grain = grain_for(ops, count, flops / (double)count, 1);
    if (grain > ATTENTION_TILE_TOKENS && grain < count) {
        grain = ATTENTION_TILE_TOKENS;
    }
    struct loop loop = {
        .params = params, .kernels = &ops->kernels, .thread_scratch = ops->thread_scratch.base};
    thread_pool_run(ops->pool, count, grain, attention_piece, &loop);
}

void ops_gemm_swiglu(struct ops *ops, const struct gemm_swiglu_params *params)
{
    assert(params->num_tokens >= 0 && params->hidden_size > 0 && params->intermediate_size >= 0);
    assert(view_is_valid(params->gate) && view_is_valid(params->up));
    if (params->num_tokens == 0) {
        return;
    }
    struct quantize_params quantize = {.a = params->a,
                                       .a_stride = params->hidden_size,
                                       .num_tokens = params->num_tokens,
                                       .in_features = params->hidden_size};
    struct quant_rows quant_rows;
    want_form(ops, params->gate.dtype, &quantize);
    want_form(ops, params->up.dtype, &quantize);
    quantize_rows(ops, &quantize, &quant_rows);
    struct loop loop = {.params = params, .quant_rows = &quant_rows};
    double item_flops = 4.0 * params->num_tokens * params->hidden_size;
    if (params->num_tokens > FEW_ROWS) {
        run_columns(ops, gemm_swiglu_piece, loop, params->intermediate_size, item_flops);
        return;
    }
    loop.item_bytes = (double)dtype_row_bytes(params->gate.dtype, params->hidden_size) +
                      (double)dtype_row_bytes(params->up.dtype, params->hidden_size);
    run_few_columns(
        ops, gemm_swiglu_piece, loop, params->intermediate_size, item_flops, params->num_tokens,
        has_ways(ops,
                 dtype_is_quantized(params->gate.dtype) || dtype_is_quantized(params->up.dtype),
                 params->num_tokens));
}
