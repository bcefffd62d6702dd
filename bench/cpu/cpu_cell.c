/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cpu/cpu_cell.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/output.h"
#include "ops/ops_loop.h"
#include "ops/quant.h"

#define ROTATE_BYTES ((size_t)256 << 20) /* several times what caches hold */
#define MAX_COPIES 256
#define KV_BLOCK_TOKENS 16
#define MAX_DECODE_ROWS 16 /* of attention: fewer are sequences that decode, more a prompt */
#define DECODE_CONTEXT 1024
#define PATTERN_ROWS 16 /* different rows of weights */
#define CHECK_COLS 16   /* in one place: the widest tile's */
#define CHECK_PLACES 3

/* A piece of a call: all of it, or what the reference repeats. */
struct cpu_slice {
    int32_t first_row, num_rows, first_col, num_cols;
    float *d; /* where row first_row, column first_col goes */
    int64_t d_stride;
};

/* ---- shapes ---------------------------------------------------------------------------------- */

static int32_t q_size(const struct bench_shape *shape)
{
    return shape->num_heads * shape->head_dim;
}

static int32_t kv_size(const struct bench_shape *shape)
{
    return shape->num_kv_heads * shape->head_dim;
}

bool cpu_op_has_weights(enum bench_op op)
{
    return op != BENCH_OP_RMSNORM && op != BENCH_OP_ROPE_KV && op != BENCH_OP_ATTENTION;
}

bool cpu_op_reads_memory(enum bench_op op)
{
    return cpu_op_has_weights(op) || op == BENCH_OP_ATTENTION;
}

static void choose_features(enum bench_op op, const struct bench_shape *shape, int32_t *in,
                            int32_t *out)
{
    int32_t hidden = shape->hidden_size, qkv = q_size(shape) + 2 * kv_size(shape);
    switch (op) {
    case BENCH_OP_QKV_PROJ:
        *in = hidden;
        *out = qkv;
        break;
    case BENCH_OP_O_PROJ:
        *in = q_size(shape);
        *out = hidden;
        break;
    case BENCH_OP_DOWN_PROJ:
        *in = shape->intermediate_size;
        *out = hidden;
        break;
    case BENCH_OP_GEMM_SWIGLU:
        *in = hidden;
        *out = shape->intermediate_size;
        break;
    case BENCH_OP_LM_HEAD:
        *in = hidden;
        *out = shape->vocab_size;
        break;
    case BENCH_OP_ROPE_KV:
        *in = qkv;
        *out = qkv;
        break;
    case BENCH_OP_ATTENTION:
        *in = qkv;
        *out = q_size(shape);
        break;
    default: /* embedding, rmsnorm */
        *in = hidden;
        *out = hidden;
        break;
    }
}

/* Rows of weights in a copy. */
static int64_t weight_rows(enum bench_op op, const struct bench_shape *shape)
{
    int32_t in, out;
    choose_features(op, shape, &in, &out);
    return !cpu_op_has_weights(op)      ? 0
           : op == BENCH_OP_GEMM_SWIGLU ? 2 * (int64_t)out
           : op == BENCH_OP_EMBEDDING   ? shape->vocab_size
                                        : out;
}

const char *cpu_cell_refusal(enum bench_op op, const struct bench_shape *shape, enum dtype dtype)
{
    bool needs_heads =
        op != BENCH_OP_GEMM_SWIGLU && op != BENCH_OP_DOWN_PROJ && op != BENCH_OP_RMSNORM;
    int32_t in, out;

    choose_features(op, shape, &in, &out);
    if (needs_heads && shape->num_heads == 0) {
        return "the shape has no heads and no vocabulary";
    }
    if (cpu_op_has_weights(op) && in % dtype_block_elements(dtype) != 0) {
        return "its rows are no multiple of the type's block";
    }
    return NULL;
}

/* Keys that attention reads in all, and of how many sequences. */
static int32_t num_sequences(const struct cpu_cell *cell)
{
    return cell->num_rows <= MAX_DECODE_ROWS ? cell->num_rows : 1;
}

static int32_t keys_of(const struct cpu_cell *cell, int32_t row)
{
    return cell->num_rows <= MAX_DECODE_ROWS ? cell->context : row + 1;
}

static int64_t kv_tokens(int32_t max_rows)
{
    int64_t decoded =
        (int64_t)(max_rows < MAX_DECODE_ROWS ? max_rows : MAX_DECODE_ROWS) * DECODE_CONTEXT;
    int64_t prompt = (max_rows + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    return decoded > prompt ? decoded : prompt;
}

static size_t kv_layer_bytes(const struct bench_shape *shape, int32_t max_rows)
{
    return 2 * (size_t)kv_tokens(max_rows) * (size_t)kv_size(shape) * sizeof(float);
}

static bool has_kv(enum bench_op op)
{
    return op == BENCH_OP_ROPE_KV || op == BENCH_OP_ATTENTION;
}

static int32_t copies_for(size_t copy_bytes)
{
    size_t count = (ROTATE_BYTES + copy_bytes - 1) / copy_bytes;
    return (int32_t)(count > MAX_COPIES ? MAX_COPIES : count);
}

/* Of the part that is there in copies. */
static size_t rotated_bytes(enum bench_op op, const struct bench_shape *shape, enum dtype dtype,
                            int32_t max_rows)
{
    int32_t in, out;
    choose_features(op, shape, &in, &out);
    if (cpu_op_has_weights(op)) {
        return (size_t)weight_rows(op, shape) * dtype_row_bytes(dtype, in);
    }
    return has_kv(op) ? kv_layer_bytes(shape, max_rows) : 0;
}

size_t cpu_cell_bytes(enum bench_op op, const struct bench_shape *shape, enum dtype dtype,
                      int32_t max_rows)
{
    int32_t in, out;
    size_t rotated = rotated_bytes(op, shape, dtype, max_rows);

    choose_features(op, shape, &in, &out);
    size_t row_floats = (size_t)in + 2 * (size_t)out;
    row_floats += op == BENCH_OP_GEMM_SWIGLU ? 2 * (size_t)out : 0;
    return (rotated > 0 ? (size_t)copies_for(rotated) * rotated : 0) +
           (size_t)max_rows * row_floats * sizeof(float);
}

double cpu_cell_flops(const struct cpu_cell *cell)
{
    double rows = cell->num_rows, flops = 0.0;

    switch (cell->op) {
    case BENCH_OP_QKV_PROJ:
    case BENCH_OP_O_PROJ:
    case BENCH_OP_DOWN_PROJ:
    case BENCH_OP_LM_HEAD:
        return 2.0 * rows * cell->in_features * cell->out_features;
    case BENCH_OP_GEMM_SWIGLU:
        return 4.0 * rows * cell->in_features * cell->out_features;
    case BENCH_OP_ATTENTION:
        for (int32_t row = 0; row < cell->num_rows; row++) {
            flops += 4.0 * q_size(cell->shape) * keys_of(cell, row);
        }
        return flops;
    default:
        return 4.0 * rows * cell->in_features;
    }
}

double cpu_cell_num_bytes(const struct cpu_cell *cell)
{
    double rows = cell->num_rows;
    double activations = rows * ((double)cell->in_features + cell->out_features) * sizeof(float);
    double keys = (double)num_sequences(cell) * keys_of(cell, cell->num_rows - 1);

    switch (cell->op) {
    case BENCH_OP_EMBEDDING:
        return rows * ((double)cell->row_bytes + cell->out_features * sizeof(float));
    case BENCH_OP_RMSNORM:
        return activations;
    case BENCH_OP_ROPE_KV:
        return activations + 2.0 * rows * kv_size(cell->shape) * sizeof(float);
    case BENCH_OP_ATTENTION:
        return 2.0 * rows * q_size(cell->shape) * sizeof(float) +
               2.0 * keys * kv_size(cell->shape) * sizeof(float);
    default:
        return (double)cell->copy_bytes + activations;
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

static float random_float(uint64_t *state)
{
    /* Source: xorshift64*, S. Vigna 2016. */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (float)((double)(*state * 2685821657736338717u >> 11) * 0x1p-52 - 1.0);
}

static void fill_floats(float *d, size_t count, double scale, uint64_t *state)
{
    for (size_t i = 0; i < count; i++) {
        d[i] = (float)scale * random_float(state);
    }
}

/* Rows in an order without a short period, of which PATTERN_ROWS differ: to quantise all of them
 * would take longer than to measure. */
static bool fill_weights(struct cpu_cell *cell, uint64_t *state)
{
    size_t in = (size_t)cell->in_features;
    float *row = calloc(in, sizeof(*row));
    unsigned char *pattern = malloc(PATTERN_ROWS * cell->row_bytes);
    int64_t num_rows = (int64_t)(cell->copy_bytes / cell->row_bytes) * cell->num_copies;

    for (size_t i = 0; i < PATTERN_ROWS && row != NULL && pattern != NULL; i++) {
        fill_floats(row, in, 1.7 / sqrt((double)in), state);
        quant_quantize_row(cell->dtype, row, pattern + i * cell->row_bytes, cell->in_features);
    }
    for (int64_t i = 0; i < num_rows && row != NULL && pattern != NULL; i++) {
        size_t chosen = (size_t)((i * 7 + i / PATTERN_ROWS * 3) % PATTERN_ROWS);
        memcpy(cell->weights + (size_t)i * cell->row_bytes, pattern + chosen * cell->row_bytes,
               cell->row_bytes);
    }
    bool is_filled = row != NULL && pattern != NULL;
    free(row);
    free(pattern);
    return is_filled;
}

static bool allocate_kv(struct cpu_cell *cell, uint64_t *state)
{
    const struct bench_shape *shape = cell->shape;
    size_t num_blocks = (size_t)kv_tokens(cell->max_rows) / KV_BLOCK_TOKENS;
    size_t plane_bytes = 2 * KV_BLOCK_TOKENS * (size_t)kv_size(shape) * sizeof(float);
    size_t num_bytes = num_blocks * plane_bytes * (size_t)cell->num_copies;
    int32_t longest = cell->max_rows > DECODE_CONTEXT ? cell->max_rows : DECODE_CONTEXT;

    cell->context = DECODE_CONTEXT;
    cell->max_blocks = (longest + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    cell->kv = (struct kv_view){.blocks = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096),
                                .block_bytes = plane_bytes * (size_t)cell->num_copies,
                                .num_layers = cell->num_copies,
                                .num_kv_heads = shape->num_kv_heads,
                                .block_size = KV_BLOCK_TOKENS,
                                .head_dim = shape->head_dim};
    cell->block_tables =
        calloc((size_t)MAX_DECODE_ROWS * (size_t)cell->max_blocks, sizeof(*cell->block_tables));
    cell->cos_sin = calloc((size_t)longest * (size_t)shape->head_dim, sizeof(float));
    if (cell->kv.blocks == NULL || cell->block_tables == NULL || cell->cos_sin == NULL) {
        return false;
    }
    fill_floats((float *)(void *)cell->kv.blocks, plane_bytes / sizeof(float), 1.0, state);
    for (size_t at = plane_bytes; at < num_bytes; at += plane_bytes) {
        memcpy(cell->kv.blocks + at, cell->kv.blocks, plane_bytes);
    }
    for (int32_t position = 0; position < longest; position++) {
        float *row = cell->cos_sin + (int64_t)position * shape->head_dim;
        int32_t half = shape->head_dim / 2;
        for (int32_t i = 0; i < half; i++) {
            double angle = position * pow(1e6, -2.0 * i / shape->head_dim);
            row[i] = (float)cos(angle);
            row[half + i] = (float)sin(angle);
        }
    }
    return true;
}

static bool allocate_rows(struct cpu_cell *cell, uint64_t *state)
{
    size_t rows = (size_t)cell->max_rows, in = (size_t)cell->in_features;
    size_t out = (size_t)cell->out_features, width = in > out ? in : out;

    cell->a = calloc(rows * in, sizeof(float));
    cell->d = calloc(rows * out, sizeof(float));
    cell->vector = calloc(width, sizeof(float));
    cell->positions = calloc(rows, sizeof(int32_t));
    cell->seq_idx = calloc(rows, sizeof(int32_t));
    cell->slots = calloc(rows, sizeof(int32_t));
    cell->token_ids = calloc(rows, sizeof(int32_t));
    if (cell->op == BENCH_OP_GEMM_SWIGLU) {
        cell->products = calloc(2 * rows * out, sizeof(float));
    }
    if (cell->a == NULL || cell->d == NULL || cell->vector == NULL || cell->positions == NULL ||
        cell->seq_idx == NULL || cell->slots == NULL || cell->token_ids == NULL ||
        (cell->op == BENCH_OP_GEMM_SWIGLU && cell->products == NULL)) {
        return false;
    }
    fill_floats(cell->a, rows * in, 1.0, state);
    fill_floats(cell->vector, width, 1.0, state);
    return true;
}

static bool allocate(struct cpu_cell *cell)
{
    uint64_t state = 88172645463325252u;
    size_t rotated = rotated_bytes(cell->op, cell->shape, cell->dtype, cell->max_rows);

    cell->num_copies = rotated > 0 ? copies_for(rotated) : 1;
    if (!allocate_rows(cell, &state)) {
        return false;
    }
    if (cpu_op_has_weights(cell->op)) {
        cell->copy_bytes = rotated;
        cell->row_bytes = dtype_row_bytes(cell->dtype, cell->in_features);
        cell->weights = malloc(rotated * (size_t)cell->num_copies);
        return cell->weights != NULL && fill_weights(cell, &state);
    }
    return !has_kv(cell->op) || allocate_kv(cell, &state);
}

int cpu_cell_init(struct cpu_cell *cell, enum bench_op op, const struct bench_shape *shape,
                  enum dtype dtype, int32_t max_rows)
{
    *cell = (struct cpu_cell){.op = op, .shape = shape, .dtype = dtype, .max_rows = max_rows};
    choose_features(op, shape, &cell->in_features, &cell->out_features);
    if (!allocate(cell)) {
        return output_out_of_memory();
    }
    cpu_cell_set_rows(cell, max_rows);
    return EXIT_CODE_OK;
}

void cpu_cell_release(struct cpu_cell *cell)
{
    free(cell->weights);
    free(cell->a);
    free(cell->d);
    free(cell->vector);
    free(cell->products);
    free(cell->kv.blocks);
    free(cell->positions);
    free(cell->seq_idx);
    free(cell->slots);
    free(cell->token_ids);
    free(cell->block_tables);
    free(cell->cos_sin);
    *cell = (struct cpu_cell){.num_rows = 0};
}

void cpu_cell_set_rows(struct cpu_cell *cell, int32_t num_rows)
{
    cell->num_rows = num_rows;
    bool is_decode = num_rows <= MAX_DECODE_ROWS;
    for (int32_t row = 0; row < num_rows; row++) {
        int32_t seq = is_decode ? row : 0;
        int32_t position = has_kv(cell->op) ? keys_of(cell, row) - 1 : 0;
        cell->seq_idx[row] = seq;
        cell->positions[row] = position;
        /* Blocks of a sequence follow each other. */
        cell->slots[row] = seq * cell->context + position;
        cell->token_ids[row] = cell->shape->vocab_size > 0
                                   ? (int32_t)((int64_t)row * 7919 % cell->shape->vocab_size)
                                   : 0;
    }
    for (int32_t seq = 0; seq < num_sequences(cell) && has_kv(cell->op); seq++) {
        for (int32_t i = 0; i < cell->max_blocks; i++) {
            cell->block_tables[seq * cell->max_blocks + i] =
                seq * (cell->context / KV_BLOCK_TOKENS) + i;
        }
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

static struct weight_view weights_at(const struct cpu_cell *cell, int32_t copy_idx, int64_t row)
{
    return (struct weight_view){cell->weights + (size_t)copy_idx * cell->copy_bytes +
                                    (size_t)row * cell->row_bytes,
                                cell->dtype};
}

/* Columns [begin, end) of a matrix whose rows are weight rows [first_weight_row + begin, ...). */
static struct linear_params linear_of(const struct cpu_cell *cell, const struct cpu_slice *slice,
                                      int32_t copy_idx, int32_t begin, int32_t end)
{
    return (struct linear_params){.a = cell->a + (int64_t)slice->first_row * cell->in_features,
                                  .weight = weights_at(cell, copy_idx, begin),
                                  .bias =
                                      cell->op == BENCH_OP_QKV_PROJ ? cell->vector + begin : NULL,
                                  .d = slice->d + begin - slice->first_col,
                                  .a_stride = cell->in_features,
                                  .d_stride = slice->d_stride,
                                  .num_tokens = slice->num_rows,
                                  .in_features = cell->in_features,
                                  .out_features = end - begin};
}

static void call_linear(const struct cpu_cell *cell, struct ops *ops, const struct cpu_slice *slice,
                        int32_t copy_idx)
{
    struct linear_params params[3];
    int32_t num_linears = 0, first = slice->first_col, last = first + slice->num_cols;
    /* q, k and v are three products in one call; the others are one. */
    int32_t edges[4] = {0, cell->out_features, cell->out_features, cell->out_features};

    if (cell->op == BENCH_OP_QKV_PROJ) {
        edges[1] = q_size(cell->shape);
        edges[2] = edges[1] + kv_size(cell->shape);
    }
    for (int32_t i = 0; i < 3; i++) {
        int32_t begin = first > edges[i] ? first : edges[i];
        int32_t end = last < edges[i + 1] ? last : edges[i + 1];
        if (begin < end) {
            params[num_linears++] = linear_of(cell, slice, copy_idx, begin, end);
        }
    }
    ops_linear(ops, params, num_linears);
}

static void call_gemm_swiglu(const struct cpu_cell *cell, struct ops *ops,
                             const struct cpu_slice *slice, int32_t copy_idx)
{
    ops_gemm_swiglu(
        ops, &(struct gemm_swiglu_params){
                 .a = cell->a + (int64_t)slice->first_row * cell->in_features,
                 .gate = weights_at(cell, copy_idx, slice->first_col),
                 .up = weights_at(cell, copy_idx, (int64_t)cell->out_features + slice->first_col),
                 .d = slice->d,
                 .num_tokens = slice->num_rows,
                 .hidden_size = cell->in_features,
                 .intermediate_size = slice->num_cols});
}

static void call_attention(const struct cpu_cell *cell, struct ops *ops,
                           const struct cpu_slice *slice, int32_t copy_idx)
{
    ops_attention(ops, &(struct attention_params){
                           .q = cell->a + (int64_t)slice->first_row * cell->in_features,
                           .d = slice->d,
                           .kv = cell->kv,
                           .block_tables = cell->block_tables,
                           .seq_idx = cell->seq_idx + slice->first_row,
                           .positions = cell->positions + slice->first_row,
                           .q_stride = cell->in_features,
                           .layer_idx = copy_idx,
                           .num_tokens = slice->num_rows,
                           .num_heads = cell->shape->num_heads,
                           .max_blocks = cell->max_blocks,
                           .scale = (float)(1.0 / sqrt(cell->shape->head_dim))});
}

/* In place: over rows of a, or of what the slice names. */
static void call_rope_kv(const struct cpu_cell *cell, struct ops *ops, float *qkv,
                         const struct cpu_slice *slice, int32_t copy_idx)
{
    ops_rope_kv(ops, &(struct rope_kv_params){.qkv = qkv,
                                              .cos_sin = cell->cos_sin,
                                              .positions = cell->positions + slice->first_row,
                                              .slot_mapping = cell->slots + slice->first_row,
                                              .kv = cell->kv,
                                              .layer_idx = copy_idx,
                                              .num_tokens = slice->num_rows,
                                              .num_heads = cell->shape->num_heads,
                                              .norm_eps = 1e-6f});
}

static void call_slice(const struct cpu_cell *cell, struct ops *ops, const struct cpu_slice *slice,
                       int32_t copy_idx)
{
    int64_t a_offset = (int64_t)slice->first_row * cell->in_features;

    switch (cell->op) {
    case BENCH_OP_EMBEDDING:
        ops_embedding(ops,
                      &(struct embedding_params){.token_ids = cell->token_ids + slice->first_row,
                                                 .table = weights_at(cell, copy_idx, 0),
                                                 .d = slice->d,
                                                 .num_tokens = slice->num_rows,
                                                 .hidden_size = cell->out_features,
                                                 .vocab_size = cell->shape->vocab_size});
        break;
    case BENCH_OP_RMSNORM:
        ops_rmsnorm(ops, &(struct rmsnorm_params){.a = cell->a + a_offset,
                                                  .weight = cell->vector,
                                                  .d = slice->d,
                                                  .num_tokens = slice->num_rows,
                                                  .hidden_size = cell->in_features,
                                                  .eps = 1e-6f});
        break;
    case BENCH_OP_ROPE_KV:
        call_rope_kv(cell, ops, slice->d, slice, copy_idx);
        break;
    case BENCH_OP_ATTENTION:
        call_attention(cell, ops, slice, copy_idx);
        break;
    case BENCH_OP_GEMM_SWIGLU:
        call_gemm_swiglu(cell, ops, slice, copy_idx);
        break;
    default:
        call_linear(cell, ops, slice, copy_idx);
        break;
    }
}

static struct cpu_slice whole(const struct cpu_cell *cell)
{
    return (struct cpu_slice){.num_rows = cell->num_rows,
                              .num_cols = cell->out_features,
                              .d = cell->d,
                              .d_stride = cell->out_features};
}

/* ---- the unfused pair ------------------------------------------------------------------------ */

void silu_product(const float *gate, const float *up, float *d, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        d[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

struct silu_pass {
    const struct cpu_cell *cell;
    bool has_avx2;
};

static void silu_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct silu_pass *pass = arg;
    const struct cpu_cell *cell = pass->cell;
    const float *gate = cell->products + begin;
    const float *up = gate + (int64_t)cell->num_rows * cell->out_features;

    (void)thread_idx;
#if defined(__x86_64__)
    if (pass->has_avx2) {
        silu_product_avx2(gate, up, cell->d + begin, end - begin);
        return;
    }
#endif
    silu_product(gate, up, cell->d + begin, end - begin);
}

static void call_unfused(const struct cpu_cell *cell, struct ops *ops, int32_t copy_idx)
{
    int64_t count = (int64_t)cell->num_rows * cell->out_features;
    struct linear_params params[2];
    struct cpu_slice slice = whole(cell);
    struct silu_pass pass = {cell, strcmp(ops_kernels_name(ops), "ref") != 0};

    for (int32_t i = 0; i < 2; i++) {
        slice.d = cell->products + i * count;
        params[i] = linear_of(cell, &slice, copy_idx, 0, cell->out_features);
        params[i].weight = weights_at(cell, copy_idx, (int64_t)i * cell->out_features);
    }
    ops_linear(ops, params, 2);
    ops_run_loop(ops, silu_piece, &pass, count, 12.0);
}

void cpu_cell_call(struct cpu_cell *cell, struct ops *ops, bool is_unfused, int32_t copy_idx)
{
    struct cpu_slice slice = whole(cell);

    if (is_unfused) {
        call_unfused(cell, ops, copy_idx);
    } else {
        call_slice(cell, ops, &slice, copy_idx);
    }
}

/* ---- proof ----------------------------------------------------------------------------------- */

struct comparison {
    double worst, largest;
    bool is_written;
};

static void compare(struct comparison *comparison, const float *found, const float *expected,
                    int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        double difference = fabs((double)found[i] - expected[i]);
        comparison->is_written &= isfinite(found[i]);
        comparison->worst = fmax(comparison->worst, difference);
        comparison->largest = fmax(comparison->largest, fabs((double)expected[i]));
    }
}

/* Whether an op's columns are computed one by one, so that some of them can be. */
static bool has_columns(const struct cpu_cell *cell)
{
    return cpu_op_has_weights(cell->op) && cell->op != BENCH_OP_EMBEDDING;
}

/* What the cache got: the row's own k and v, bit for bit. */
static bool kv_is_stored(const struct cpu_cell *cell, int32_t row)
{
    const struct bench_shape *shape = cell->shape;
    size_t head_bytes = (size_t)shape->head_dim * sizeof(float);
    const float *k = cell->d + (int64_t)row * cell->out_features + q_size(shape);
    int32_t slot = cell->slots[row];
    size_t offset = (size_t)(slot % KV_BLOCK_TOKENS) * head_bytes;

    for (int32_t head = 0; head < shape->num_kv_heads; head++, k += shape->head_dim) {
        int32_t block = slot / KV_BLOCK_TOKENS;
        if (memcmp(kv_view_keys(&cell->kv, block, 0, head) + offset, k, head_bytes) != 0 ||
            memcmp(kv_view_values(&cell->kv, block, 0, head) + offset, k + kv_size(shape),
                   head_bytes) != 0) {
            return false;
        }
    }
    return true;
}

static void check_row(struct cpu_cell *cell, struct ops *reference, int32_t row, float *expected,
                      struct comparison *comparison)
{
    int32_t width =
        has_columns(cell) && cell->out_features > CHECK_COLS ? CHECK_COLS : cell->out_features;
    int32_t last_col = cell->out_features - width;
    int32_t num_places = last_col > 0 ? CHECK_PLACES : 1;

    for (int32_t place = 0; place < num_places; place++) {
        /* Multiples of the tile: one of q, k and v has all of them. */
        int32_t col = place == 0   ? 0
                      : place == 1 ? last_col / 2 / CHECK_COLS * CHECK_COLS
                                   : last_col;
        struct cpu_slice slice = {row, 1, col, width, expected, width};
        if (cell->op == BENCH_OP_ROPE_KV) {
            memcpy(expected, cell->a + (int64_t)row * cell->in_features,
                   (size_t)cell->in_features * sizeof(float));
        }
        call_slice(cell, reference, &slice, 0);
        compare(comparison, cell->d + (int64_t)row * cell->out_features + col, expected, width);
    }
}

bool cpu_cell_check(struct cpu_cell *cell, struct ops *ops, struct ops *reference, bool is_unfused,
                    double *error)
{
    const int32_t rows[CHECK_PLACES] = {0, cell->num_rows / 2, cell->num_rows - 1};
    size_t count = (size_t)cell->num_rows * (size_t)cell->out_features;
    float *expected = calloc((size_t)cell->out_features, sizeof(*expected));
    struct comparison comparison = {.is_written = expected != NULL};

    if (cell->op == BENCH_OP_ROPE_KV) {
        memcpy(cell->d, cell->a, count * sizeof(*cell->d));
    } else {
        memset(cell->d, 0xff, count * sizeof(*cell->d)); /* NaN */
    }
    cpu_cell_call(cell, ops, is_unfused, 0);
    for (size_t i = 0; i < count; i++) {
        comparison.is_written &= isfinite(cell->d[i]) != 0;
    }
    for (int32_t i = 0; i < CHECK_PLACES && cell->op == BENCH_OP_ROPE_KV; i++) {
        comparison.is_written &= kv_is_stored(cell, rows[i]);
    }
    for (int32_t i = 0; i < CHECK_PLACES && expected != NULL; i++) {
        if (i == 0 || rows[i] != rows[i - 1]) {
            check_row(cell, reference, rows[i], expected, &comparison);
        }
    }
    free(expected);
    *error = comparison.largest > 0.0 ? comparison.worst / comparison.largest : comparison.worst;
    return comparison.is_written;
}
