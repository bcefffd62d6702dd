/* SPDX-License-Identifier: Apache-2.0 */
/* Splits each op along its parallel axis and runs the selected kernels on the pieces. */
#include "ops/ops.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/thread_pool.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/ops_loop.h"

/* A loop this small is done before another thread would have joined it: 20,000 flop take 1 us. */
#define INLINE_FLOPS 20e3
/* Enough pieces that threads which finish early find more, few enough that each reads long runs of
 * memory. */
#define PIECES_PER_THREAD 4
/* Columns of a piece of a linear op come in multiples of the widest tile. */
#define COLUMN_UNIT 8

/* Of bringing one activation into blocks, for grain_for. */
#define QUANTIZE_FLOPS 8.0

struct ops {
    struct thread_pool *pool;
    struct cpu_kernels kernels;
    unsigned char *scratch; /* the caller's: activations in blocks, row by row, form by form */
    size_t scratch_bytes;
};

size_t ops_scratch_token_bytes(int64_t max_in_features)
{
    /* A row may be needed in both forms: q_proj Q4_K and v_proj Q8_0, say. */
    return quant_activation_row_bytes(ACTIVATION_FORM_Q8, max_in_features / 32 * 32) +
           quant_activation_row_bytes(ACTIVATION_FORM_Q8_K, max_in_features / 256 * 256);
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
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    cpu_kernels_select(cpu_features, &created->kernels);
    created->scratch = scratch;
    created->scratch_bytes = scratch_bytes;
    *ops = created;
    return IMBREX_STATUS_OK;
}

void ops_destroy(struct ops *ops)
{
    if (ops == NULL) {
        return;
    }
    thread_pool_destroy(ops->pool);
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

/* What a piece needs to find its kernel: passed through the pool's `arg`. */
struct loop {
    const struct cpu_kernels *kernels;
    const void *params;
    int32_t num_linears;                 /* linear only */
    const struct quant_rows *quant_rows; /* linear, gemm_swiglu and what quantises for them */
};

static void run_loop(struct ops *ops, thread_pool_fn *piece, struct loop loop, int64_t count,
                     double item_flops, int64_t unit)
{
    if (count == 0) {
        return;
    }
    loop.kernels = &ops->kernels;
    thread_pool_run(ops->pool, count, grain_for(ops, count, item_flops, unit), piece, &loop);
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
DEFINE_PIECE(attention)

static void gemm_swiglu_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    (void)thread_idx;
    loop->kernels->gemm_swiglu(loop->params, loop->quant_rows, begin, end);
}

/* The columns of all linears stand in one row: [0, out of the first), then the second's, ... */
static void linear_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct linear_params *params = loop->params;
    (void)thread_idx;
    int64_t first_col = 0;
    for (int32_t linear_idx = 0; linear_idx < loop->num_linears && first_col < end; linear_idx++) {
        int64_t end_col = first_col + params[linear_idx].out_features;
        int64_t piece_begin = begin > first_col ? begin : first_col;
        int64_t piece_end = end < end_col ? end : end_col;
        if (piece_begin < piece_end) {
            loop->kernels->linear(&params[linear_idx], loop->quant_rows, piece_begin - first_col,
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
};

static void quantize_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct loop *loop = arg;
    const struct quantize_params *params = loop->params;
    const struct quant_rows *quant_rows = loop->quant_rows;
    (void)thread_idx;
    for (int form = 0; form < ACTIVATION_FORM_COUNT; form++) {
        for (int64_t token = begin; token < end && quant_rows->rows[form] != NULL; token++) {
            quant_quantize_activations(
                (enum activation_form)form, params->a + token * params->a_stride,
                quant_rows->rows[form] + token * (int64_t)quant_rows->row_bytes[form],
                params->in_features);
        }
    }
}

/* Brings all rows into the forms wanted; does nothing if that is PLAIN alone. */
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
    assert(num_used <= ops->scratch_bytes);
    if (num_used > 0) {
        run_loop(ops, quantize_piece, (struct loop){.params = params, .quant_rows = quant_rows},
                 params->num_tokens, QUANTIZE_FLOPS * params->in_features, 1);
    }
}

/* What the asserts below ask. */
__attribute__((unused)) static bool view_is_valid(struct weight_view view)
{
    return view.elements != NULL && (unsigned)view.dtype < DTYPE_COUNT;
}

__attribute__((unused)) static bool kv_is_valid(const struct kv_view *kv, int32_t layer_idx)
{
    return kv->blocks != NULL && kv->head_dim > 0 && kv->head_dim % 2 == 0 && kv->block_size > 0 &&
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
    double flops = 0.0;
    struct quantize_params quantize = {.a = NULL};
    struct quant_rows quant_rows;
    for (int32_t linear_idx = 0; linear_idx < num_linears; linear_idx++) {
        const struct linear_params *linear = &params[linear_idx];
        assert(linear->num_tokens == params[0].num_tokens && linear->num_tokens >= 0);
        assert(linear->in_features > 0 && linear->out_features >= 0);
        assert(linear->out_features == 0 || view_is_valid(linear->weight));
        num_cols += linear->out_features;
        flops += 2.0 * linear->num_tokens * linear->in_features * linear->out_features;
        if (linear->out_features > 0 && dtype_is_quantized(linear->weight.dtype)) {
            assert(quantize.a == NULL ||
                   (quantize.a == linear->a && quantize.a_stride == linear->a_stride &&
                    quantize.in_features == linear->in_features));
            quantize.a = linear->a;
            quantize.a_stride = linear->a_stride;
            quantize.num_tokens = linear->num_tokens;
            quantize.in_features = linear->in_features;
            quantize.forms[quant_activation_form(linear->weight.dtype)] = true;
        }
    }
    if (num_cols == 0 || params[0].num_tokens == 0) {
        return;
    }
    quantize_rows(ops, &quantize, &quant_rows);
    run_loop(ops, linear_piece,
             (struct loop){.params = params, .num_linears = num_linears, .quant_rows = &quant_rows},
             num_cols, flops / (double)num_cols, COLUMN_UNIT);
}

void ops_rope_kv(struct ops *ops, const struct rope_kv_params *params)
{
    assert(params->num_tokens >= 0 && params->num_heads > 0);
    assert(kv_is_valid(&params->kv, params->layer_idx));
    double width = (double)(params->num_heads + 2 * params->kv.num_kv_heads) * params->kv.head_dim;
    run_loop(ops, rope_kv_piece, (struct loop){.params = params}, params->num_tokens, 3.0 * width,
             1);
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
    double key_flops = 4.0 * params->num_heads / kv->num_kv_heads * kv->head_dim;
    run_loop(ops, attention_piece, (struct loop){.params = params},
             (int64_t)params->num_tokens * kv->num_kv_heads,
             num_keys / params->num_tokens * key_flops, 1);
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
    quantize.forms[quant_activation_form(params->gate.dtype)] = true;
    quantize.forms[quant_activation_form(params->up.dtype)] = true;
    quantize_rows(ops, &quantize, &quant_rows);
    run_loop(ops, gemm_swiglu_piece, (struct loop){.params = params, .quant_rows = &quant_rows},
             params->intermediate_size, 4.0 * params->num_tokens * params->hidden_size,
             COLUMN_UNIT);
}
