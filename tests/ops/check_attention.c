/* SPDX-License-Identifier: Apache-2.0 */
/* attention: batches of several sequences over scattered blocks. Blocks outside of the tables, the
 * places behind each sequence's last position and before its first window, other layers and other
 * heads hold NaN: a kernel that reads one of them shows it. Table entries before the first window
 * name no block: one that reads it crashes. */
#include <math.h>
#include <string.h>

#include "ops/harness.h"
#include "ops/ref/ref_kernels.h"

#define NUM_LAYERS 2
#define LAYER_IDX 1
#define NUM_SEQS 3
/* Measured 0.02 at most; one key of 4097 left out makes 0.3. */
#define GLOBAL_RATIO 0.03
#define NO_BLOCK (1 << 30)
#define NUM_VICTIMS 5 /* places for a non-finite value */
/* A sanitizer, which makes a case many times slower, looks for wrong accesses: it gets every shape,
 * type and placement, but not each with every window. */
#define WINDOW_STEP (TEST_SANITIZED ? 3 : 1)

struct attention_shape {
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t context, num_new; /* tokens of the longest sequence; of each, how many are queries */
    int32_t q_gap;            /* elements between two rows of q */
};

static void run_attention(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    struct attention_params params = *(const struct attention_params *)arg;
    params.q += first * params.q_stride;
    params.d += (int64_t)first * params.num_heads * params.kv.head_dim;
    params.seq_idx += first;
    params.positions += first;
    params.num_tokens = count;
    ops_attention(ops, &params);
}

/* The key or value of a position, as the type of the cache defines it. */
static void load_row(const struct kv_view *kv, unsigned char *head, int32_t position, float *row)
{
    ref_kv_load(kv->dtype, kv_view_row(kv, head, position % kv->block_size), kv->head_dim, row);
}

/* What one kv head of a sequence holds, of the positions that its tokens see. */
struct widened {
    float *keys, *values; /* [positions, head_dim] */
};

/* Positions [first, end) of a sequence. */
static void widen_head(const struct attention_params *params, int32_t seq, int32_t kv_head,
                       int64_t first, int64_t end, const struct widened *widened)
{
    const struct kv_view *kv = &params->kv;
    const int32_t *table = params->block_tables + (int64_t)seq * params->max_blocks;
    for (int64_t position = first; position < end; position++) {
        int32_t block_idx = table[position / kv->block_size];
        load_row(kv, kv_view_keys(kv, block_idx, params->layer_idx, kv_head), (int32_t)position,
                 widened->keys + position * kv->head_dim);
        load_row(kv, kv_view_values(kv, block_idx, params->layer_idx, kv_head), (int32_t)position,
                 widened->values + position * kv->head_dim);
    }
}

/* One query head of one token, in fp64. */
static void expect_head(const struct attention_params *params, int64_t token, int32_t head,
                        const struct widened *widened, double *scores, double *expected,
                        double *bound)
{
    int32_t head_dim = params->kv.head_dim;
    const float *q = params->q + token * params->q_stride + (int64_t)head * head_dim;
    int32_t num_keys = params->positions[token] + 1;
    int32_t first = params->window > 0 && num_keys > params->window ? num_keys - params->window : 0;
    double largest = -INFINITY, score_error = 0.0;
    for (int32_t key = first; key < num_keys; key++) {
        const float *row = widened->keys + (int64_t)key * head_dim;
        double sum = 0.0, magnitude = 0.0;
        for (int32_t dim = 0; dim < head_dim; dim++) {
            sum += (double)q[dim] * row[dim];
            magnitude += fabs((double)q[dim] * row[dim]);
        }
        scores[key] = params->scale * sum;
        largest = fmax(largest, scores[key]);
        if (isfinite(magnitude)) {
            double error = (head_dim / 4.0 + 6.0) * HARNESS_UNIT * params->scale * magnitude;
            score_error = fmax(score_error, error);
        }
    }
    double total = 0.0, spread = 0.0;
    for (int32_t dim = 0; dim < head_dim; dim++) {
        expected[dim] = bound[dim] = 0.0;
    }
    for (int32_t key = first; key < num_keys; key++) {
        const float *row = widened->values + (int64_t)key * head_dim;
        double weight = exp(scores[key] - largest);
        total += weight;
        /* Weights below exp(-88) add nothing that fp32 could see. */
        spread = fmax(spread, fmin(largest - scores[key], 88.0));
        for (int32_t dim = 0; dim < head_dim; dim++) {
            expected[dim] += weight * row[dim];
            bound[dim] += weight * fabs((double)row[dim]);
        }
    }
    /* Relative errors: of a weight, twice that of a score (its own and the largest's) plus the
     * rounding of their difference and exp's own; of sums over the keys, one rounding a key. */
    double relative = 2.0 * expm1(2.0 * score_error + (spread + 4.0) * HARNESS_UNIT) +
                      (2.0 * num_keys + 8.0) * HARNESS_UNIT;
    for (int32_t dim = 0; dim < head_dim; dim++) {
        expected[dim] /= total;
        bound[dim] =
            isfinite(expected[dim]) ? relative * bound[dim] / total + num_keys * 0x1p-126 : 0.0;
    }
}

static void fill_blocks(struct harness *harness, const struct attention_shape *shape,
                        const struct kv_view *kv, const int32_t *table, int32_t first,
                        int32_t num_tokens, double k_scale)
{
    float *row = harness_alloc(harness, (size_t)shape->head_dim, sizeof(*row));
    for (int32_t position = first; position < num_tokens; position++) {
        for (int32_t head = 0; head < shape->num_kv_heads; head++) {
            int32_t block_idx = table[position / shape->block_size];
            int32_t offset = position % shape->block_size;
            unsigned char *keys = kv_view_keys(kv, block_idx, LAYER_IDX, head);
            unsigned char *values = kv_view_values(kv, block_idx, LAYER_IDX, head);
            harness_fill(harness, row, 1, shape->head_dim, shape->head_dim, k_scale);
            ref_kv_store(kv->dtype, row, kv->head_dim, kv_view_row(kv, keys, offset));
            harness_fill(harness, row, 1, shape->head_dim, shape->head_dim, 1.0);
            ref_kv_store(kv->dtype, row, kv->head_dim, kv_view_row(kv, values, offset));
        }
    }
}

struct attention_case {
    struct attention_params params;
    struct check_plan plan;
    float *q; /* still writable until finish_case */
    unsigned char *cache;
    int32_t num_seqs;
    int32_t context[NUM_SEQS];
};

static void build_case(struct harness *harness, struct attention_shape shape, int32_t window,
                       int32_t num_seqs, double k_scale, bool is_shuffled, enum kv_dtype dtype,
                       struct attention_case *attention)
{
    int32_t max_blocks = (shape.context + shape.block_size - 1) / shape.block_size + 1;
    int32_t num_blocks = num_seqs * max_blocks + 2;
    struct kv_view kv = {.dtype = dtype,
                         .num_layers = NUM_LAYERS,
                         .num_kv_heads = shape.num_kv_heads,
                         .block_size = shape.block_size,
                         .head_dim = shape.head_dim};
    kv.block_bytes = (kv_view_layer_offset(&kv, NUM_LAYERS) + 23) / 4 * 4;
    size_t cache_bytes = (size_t)num_blocks * kv.block_bytes;
    kv.blocks = harness_place(harness, cache_bytes, 0);
    /* NaN in every type. */
    memset(kv.blocks, 0xff, cache_bytes);
    int32_t *tables = harness_place(harness, (size_t)(num_seqs * max_blocks) * sizeof(int32_t), 0);
    int32_t num_tokens = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        /* The last block of the cache is used, block 0 is not; neighbours are far apart. */
        for (int32_t idx = 0; idx < max_blocks; idx++) {
            int32_t place = idx * num_seqs + seq;
            tables[seq * max_blocks + idx] = num_blocks - 1 - place;
        }
        int32_t context = shape.context - seq * (shape.context / 3);
        attention->context[seq] = context;
        int32_t num_new = context < shape.num_new ? context : shape.num_new;
        num_tokens += num_new;
        /* The first position that the first new token sees. */
        int32_t first = context - num_new + 1 - window;
        first = window > 0 && first > 0 ? first : 0;
        fill_blocks(harness, &shape, &kv, tables + seq * max_blocks, first, context, k_scale);
        for (int32_t idx = 0; idx < first / shape.block_size; idx++) {
            tables[seq * max_blocks + idx] = NO_BLOCK;
        }
    }
    int64_t width = (int64_t)shape.num_heads * shape.head_dim, q_stride = width + shape.q_gap;
    size_t q_elements = (size_t)((num_tokens - 1) * q_stride + width);
    float *q = harness_place(harness, q_elements * sizeof(float), 0);
    float *d = harness_place(harness, (size_t)(num_tokens * width) * sizeof(float), 0);
    int32_t *seq_idx = harness_place(harness, (size_t)num_tokens * sizeof(int32_t), 0);
    int32_t *positions = harness_place(harness, (size_t)num_tokens * sizeof(int32_t), 0);
    harness_fill(harness, q, num_tokens, width, q_stride, 1.0);
    int32_t token = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        int32_t context = attention->context[seq];
        int32_t num_new = context < shape.num_new ? context : shape.num_new;
        for (int32_t idx = 0; idx < num_new; idx++, token++) {
            seq_idx[token] = seq;
            positions[token] = context - num_new + idx;
        }
    }
    for (int32_t idx = num_tokens - 1; is_shuffled && idx > 0; idx--) {
        int32_t other = harness_random_below(harness, idx + 1);
        int32_t seq = seq_idx[idx], position = positions[idx];
        seq_idx[idx] = seq_idx[other];
        positions[idx] = positions[other];
        seq_idx[other] = seq;
        positions[other] = position;
    }
    harness_seal(harness, tables);
    harness_seal(harness, seq_idx);
    harness_seal(harness, positions);
    attention->q = q;
    attention->num_seqs = num_seqs;
    attention->cache = kv.blocks;
    attention->params = (struct attention_params){.q = q,
                                                  .d = d,
                                                  .kv = kv,
                                                  .block_tables = tables,
                                                  .seq_idx = seq_idx,
                                                  .positions = positions,
                                                  .q_stride = q_stride,
                                                  .layer_idx = LAYER_IDX,
                                                  .num_tokens = num_tokens,
                                                  .num_heads = shape.num_heads,
                                                  .max_blocks = max_blocks,
                                                  .window = window,
                                                  .scale = 1.0f / sqrtf((float)shape.head_dim)};
}

/* What the tokens of a sequence must get of one kv head; those that token_step leaves out may get
 * anything. */
static void expect_sequence(const struct attention_params *params, int32_t seq, int32_t kv_head,
                            int32_t token_step, const struct widened *widened, double *scores,
                            double *expected, double *bound)
{
    int32_t head_dim = params->kv.head_dim;
    int32_t group_heads = params->num_heads / params->kv.num_kv_heads;
    int64_t first = INT64_MAX, end = 0;
    for (int64_t token = 0; token < params->num_tokens; token++) {
        if (params->seq_idx[token] == seq) {
            int64_t first_key = attention_first_key(params, token);
            first = first_key < first ? first_key : first;
            end = params->positions[token] + 1 > end ? params->positions[token] + 1 : end;
        }
    }
    widen_head(params, seq, kv_head, first, end, widened);
    for (int64_t token = 0; token < params->num_tokens; token++) {
        bool is_expected = token % token_step == 0 || token + 1 == params->num_tokens;
        for (int32_t i = 0; i < group_heads && params->seq_idx[token] == seq; i++) {
            int32_t head = kv_head * group_heads + i;
            int64_t idx = (token * params->num_heads + head) * head_dim;
            if (is_expected) {
                expect_head(params, token, head, widened, scores, expected + idx, bound + idx);
                continue;
            }
            for (int32_t dim = 0; dim < head_dim; dim++) {
                bound[idx + dim] = INFINITY;
            }
        }
    }
}

/* Computes what must come out, of every token_step-th token, and seals the inputs. */
static void finish_case(struct harness *harness, struct attention_case *attention,
                        int32_t token_step, double global_ratio)
{
    const struct attention_params *params = &attention->params;
    int64_t width = (int64_t)params->num_heads * params->kv.head_dim;
    int64_t num_outputs = params->num_tokens * width;
    size_t num_positions = (size_t)params->max_blocks * (size_t)params->kv.block_size;
    size_t num_elements = num_positions * (size_t)params->kv.head_dim;
    double *expected = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    double *scores = harness_alloc(harness, num_positions, sizeof(double));
    struct widened widened = {.keys = harness_alloc(harness, num_elements, sizeof(float)),
                              .values = harness_alloc(harness, num_elements, sizeof(float))};
    for (int32_t seq = 0; seq < attention->num_seqs; seq++) {
        for (int32_t kv_head = 0; kv_head < params->kv.num_kv_heads; kv_head++) {
            expect_sequence(params, seq, kv_head, token_step, &widened, scores, expected, bound);
        }
    }
    harness_seal(harness, attention->q);
    harness_seal(harness, attention->cache);
    attention->plan = (struct check_plan){.run = run_attention,
                                          .arg = &attention->params,
                                          .num_rows = params->num_tokens,
                                          .num_outputs = 1,
                                          .outputs = {{.at = params->d,
                                                       .num_rows = params->num_tokens,
                                                       .width = width,
                                                       .stride = width,
                                                       .expected = expected,
                                                       .bound = bound,
                                                       .global_ratio = global_ratio}}};
}

static void name_case(struct harness *harness, const struct attention_shape *shape, int32_t window,
                      enum kv_dtype dtype)
{
    harness_case(harness, "%d/%d heads of %d, %s blocks of %d, context %d, %d new, window %d",
                 (int)shape->num_heads, (int)shape->num_kv_heads, (int)shape->head_dim,
                 kv_dtype_name(dtype), (int)shape->block_size, (int)shape->context,
                 (int)shape->num_new, (int)window);
}

/* is_shuffled: the tokens of all sequences stand in random order. */
static void check_order(struct harness *harness, struct attention_shape shape, int32_t window,
                        double k_scale, bool is_shuffled, enum kv_dtype dtype)
{
    for (int placement = 0; placement < PLACEMENT_COUNT; placement++) {
        struct attention_case attention;
        name_case(harness, &shape, window, dtype);
        harness_set_placement(harness, (enum placement)placement);
        build_case(harness, shape, window, NUM_SEQS, k_scale, is_shuffled, dtype, &attention);
        finish_case(harness, &attention, 1, GLOBAL_RATIO);
        harness_check(harness, &attention.plan);
        harness_end_case(harness);
    }
}

static void check_shape(struct harness *harness, struct attention_shape shape, int32_t window,
                        double k_scale)
{
    check_order(harness, shape, window, k_scale, false, KV_DTYPE_F32);
}

/* Puts `value` into a row of the cache. */
static void set_element(struct harness *harness, const struct kv_view *kv, unsigned char *head,
                        int32_t position, int32_t dim, float value)
{
    float *row = harness_alloc(harness, (size_t)kv->head_dim, sizeof(*row));
    load_row(kv, head, position, row);
    row[dim] = value;
    ref_kv_store(kv->dtype, row, kv->head_dim, kv_view_row(kv, head, position % kv->block_size));
}

/* One key of a sequence is infinite or NaN, or every score is -inf: what IEEE arithmetic makes of
 * softmax; the other sequences are untouched. */
static void check_non_finite(struct harness *harness, enum kv_dtype dtype)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct attention_shape shape = {4, 2, 32, 16, 37, 5, 0};
    harness_group(harness, "attention, non-finite keys, queries and values, %s",
                  kv_dtype_name(dtype));
    for (size_t idx = 0; idx < NUM_VICTIMS * sizeof(bad) / sizeof(bad[0]); idx++) {
        struct attention_case attention;
        float value = bad[idx / NUM_VICTIMS];
        name_case(harness, &shape, 0, dtype);
        harness_set_placement(harness, PLACEMENT_END);
        build_case(harness, shape, 0, NUM_SEQS, 1.0, false, dtype, &attention);
        const struct attention_params *params = &attention.params;
        const struct kv_view *kv = &params->kv;
        /* Position 20 of sequence 0, kv head 1; q of its tokens is positive in that place. */
        int32_t block_idx = params->block_tables[20 / shape.block_size];
        for (int32_t row = 0; row < params->num_tokens * shape.num_heads; row++) {
            float *q = attention.q + (int64_t)row * shape.head_dim + 3;
            *q = fabsf(*q) + 0.5f;
        }
        switch (idx % NUM_VICTIMS) {
        case 0:
            set_element(harness, kv, kv_view_keys(kv, block_idx, LAYER_IDX, 1), 20, 3, value);
            break;
        case 1:
            set_element(harness, kv, kv_view_values(kv, block_idx, LAYER_IDX, 1), 20, 3, value);
            break;
        case 2:
            attention.q[params->q_stride + 2 * shape.head_dim + 3] = value;
            break;
        default: { /* every key of the sequence, or the first 20: scores of -inf weigh nothing */
            int32_t num_bad = idx % NUM_VICTIMS == 3 ? attention.context[0] : 20;
            for (int32_t position = 0; position < num_bad; position++) {
                int32_t block = params->block_tables[position / shape.block_size];
                set_element(harness, kv, kv_view_keys(kv, block, LAYER_IDX, 1), position, 3, value);
            }
            break;
        }
        }
        finish_case(harness, &attention, 1, 0.0);
        harness_check(harness, &attention.plan);
        harness_end_case(harness);
    }
}

/* Windows of one position, that begin and end at edges of blocks and beside them, that are longer
 * than some or all of the sequences. */
static void check_windows(struct harness *harness)
{
    static const struct attention_shape shapes[] = {
        {4, 2, 32, 16, 65, 1, 0},   {4, 2, 32, 16, 64, 9, 3},   {3, 1, 6, 7, 40, 40, 2},
        {14, 2, 64, 16, 96, 33, 7}, {2, 2, 64, 100, 230, 4, 0}, {2, 1, 320, 16, 40, 3, 0},
        {2, 1, 8, 1, 9, 3, 0},
    };
    static const int32_t windows[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 101, 4096};
    harness_group(harness, "attention, sliding windows");
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++) {
        for (size_t window = 0; window < sizeof(windows) / sizeof(windows[0]);
             window += WINDOW_STEP) {
            check_shape(harness, shapes[idx], windows[window], 1.0);
        }
    }
}

/* Kernels may take many tokens at once and the keys of one token in several pieces. Catches rows
 * that see keys of their neighbours, rows mixed up, and anything that depends on where a batch, a
 * piece or a thread begins. */
static void check_tiles(struct harness *harness)
{
    static const struct attention_shape shapes[] = {
        {14, 2, 64, 16, 70, 70, 0},  {14, 2, 64, 16, 200, 97, 3}, {6, 2, 128, 16, 130, 65, 0},
        {2, 2, 32, 16, 300, 129, 0}, {14, 2, 64, 16, 100, 40, 1}, {3, 1, 6, 7, 80, 60, 0},
        {40, 1, 16, 16, 90, 45, 0},  {300, 1, 4, 16, 140, 3, 0},  {2, 1, 320, 16, 100, 50, 0},
        {2, 1, 1026, 16, 5, 2, 0},   {10, 2, 20, 3, 150, 100, 0},
    };
    static const int32_t windows[] = {0, 1, 31, 63, 64, 65, 100};
    harness_group(harness, "attention, many tokens of a sequence, windows among them");
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++) {
        for (size_t window = 0; window < sizeof(windows) / sizeof(windows[0]);
             window += WINDOW_STEP) {
            check_order(harness, shapes[idx], windows[window], 1.0, idx % 3 == 2, KV_DTYPE_F32);
        }
    }
    /* Edges at 512 and its multiples, and at 16,384 keys, from where splits are longer. */
    static const struct attention_shape long_shapes[] = {
        {14, 2, 64, 16, 515, 6, 0}, {4, 2, 32, 16, 1100, 1, 0}, {4, 1, 80, 16, 1030, 40, 0},
        {2, 1, 8, 16, 1537, 2, 0},  {2, 1, 8, 16, 16387, 6, 0}, {1, 1, 8, 100, 16384, 1, 0},
    };
    static const int32_t long_windows[] = {0, 3, 511, 512, 1000};
    harness_group(harness, "attention, keys in several splits");
    for (size_t idx = 0; idx < sizeof(long_shapes) / sizeof(long_shapes[0]); idx++) {
        for (size_t window = 0; window < sizeof(long_windows) / sizeof(long_windows[0]);
             window += WINDOW_STEP) {
            check_order(harness, long_shapes[idx], long_windows[window], 1.0, idx % 3 == 2,
                        KV_DTYPE_F32);
        }
    }
}

/* A key or value that some rows of a batch see and others do not is infinite or NaN: the results of
 * the others must not know. Catches masks that multiply by zero. */
static void check_hidden_non_finite(struct harness *harness, enum kv_dtype dtype)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const int32_t windows[] = {0, 20};
    struct attention_shape shape = {6, 2, 32, 16, 100, 50, 0};
    harness_group(harness, "attention, non-finite keys and values that few rows see, %s",
                  kv_dtype_name(dtype));
    for (size_t idx = 0; idx < 2 * 2 * 3 * sizeof(bad) / sizeof(bad[0]); idx++) {
        struct attention_case attention;
        float value = bad[idx / 12];
        int32_t window = windows[idx / 6 % 2];
        name_case(harness, &shape, window, dtype);
        harness_set_placement(harness, PLACEMENT_END);
        build_case(harness, shape, window, NUM_SEQS, 1.0, false, dtype, &attention);
        const struct attention_params *params = &attention.params;
        const struct kv_view *kv = &params->kv;
        /* Of the first sequence's queries at positions 50 to 99: seen by the first ones of them if
         * there is a window, from the middle on, by the last. */
        int32_t position = idx % 3 == 0 ? 45 : idx % 3 == 1 ? 75 : 99;
        int32_t block_idx = params->block_tables[position / shape.block_size];
        unsigned char *head = idx / 3 % 2 == 0 ? kv_view_keys(kv, block_idx, LAYER_IDX, 1)
                                               : kv_view_values(kv, block_idx, LAYER_IDX, 1);
        set_element(harness, kv, head, position, 3, value);
        for (int32_t row = 0; row < params->num_tokens * shape.num_heads; row++) {
            float *q = attention.q + (int64_t)row * shape.head_dim + 3;
            *q = fabsf(*q) + 0.5f;
        }
        finish_case(harness, &attention, 1, 0.0);
        harness_check(harness, &attention.plan);
        harness_end_case(harness);
    }
}

/* Catches elements read with another row's scale or with none, rows widened for the wrong keys or
 * beyond their end, scales of a group that is cut short, and whatever a window, a split, a tile or
 * a thread changes: what is expected is computed from the elements one by one. */
static void check_kv_dtypes(struct harness *harness, enum kv_dtype dtype)
{
    static const struct attention_shape shapes[] = {
        {1, 1, 2, 1, 1, 1, 0},      {3, 1, 6, 7, 80, 60, 0},    {8, 4, 8, 16, 65, 9, 0},
        {10, 2, 20, 3, 150, 50, 0}, {4, 2, 34, 16, 70, 7, 8},   {14, 2, 64, 16, 70, 70, 0},
        {5, 5, 80, 16, 50, 5, 1},   {4, 1, 128, 32, 100, 4, 0}, {2, 1, 320, 16, 40, 3, 0},
        {2, 1, 514, 16, 5, 2, 0},   {4, 2, 32, 16, 1100, 1, 0}, {300, 1, 4, 16, 140, 3, 0},
    };
    static const int32_t windows[] = {0, 33};
    harness_group(harness, "attention, %s keys and values", kv_dtype_name(dtype));
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++) {
        for (size_t window = 0; window < sizeof(windows) / sizeof(windows[0]); window++) {
            check_order(harness, shapes[idx], windows[window], 1.0, idx % 3 == 2, dtype);
        }
    }
    /* The smallest scales, and none at all. */
    check_order(harness, shapes[4], 0, 1e-37, false, dtype);
    check_order(harness, shapes[4], 0, 1e-43, false, dtype);
}

static void checks(struct harness *harness)
{
    static const struct attention_shape shapes[] = {
        {1, 1, 2, 1, 1, 1, 0},     {2, 1, 8, 16, 7, 7, 3},     {8, 4, 8, 16, 65, 9, 0},
        {4, 2, 32, 4, 63, 7, 8},   {14, 2, 64, 16, 65, 9, 7},  {14, 2, 64, 16, 1, 1, 0},
        {5, 5, 80, 16, 50, 5, 1},  {4, 1, 128, 32, 100, 4, 0}, {3, 1, 6, 7, 40, 40, 2},
        {16, 1, 20, 16, 33, 3, 0}, {2, 2, 64, 100, 130, 4, 0}, {2, 1, 256, 16, 20, 3, 0},
        {2, 1, 320, 16, 20, 3, 0}, {1, 1, 8, 16, 4097, 2, 0},
    };
    size_t num_shapes = sizeof(shapes) / sizeof(shapes[0]);
    harness_group(harness, "attention, normal scores");
    for (size_t idx = 0; idx < num_shapes; idx++) {
        check_shape(harness, shapes[idx], 0, 1.0);
    }
    /* Scores up to some hundreds: most weights vanish, the largest score changes often. */
    harness_group(harness, "attention, scores far apart");
    for (size_t idx = 0; idx < num_shapes; idx++) {
        check_shape(harness, shapes[idx], 0, 50.0);
    }
    harness_group(harness, "attention, denormal keys");
    for (size_t idx = 0; idx < 6; idx++) {
        check_shape(harness, shapes[idx], 0, 1e-40);
    }
    harness_group(harness, "attention Qwen2.5-0.5B, context 600");
    check_shape(harness, (struct attention_shape){14, 2, 64, 16, 600, 6, 256}, 0, 1.0);
    check_windows(harness);
    check_tiles(harness);
    for (int dtype = 0; dtype < KV_DTYPE_COUNT; dtype++) {
        if (dtype != KV_DTYPE_F32) {
            check_kv_dtypes(harness, (enum kv_dtype)dtype);
        }
        check_non_finite(harness, (enum kv_dtype)dtype);
        check_hidden_non_finite(harness, (enum kv_dtype)dtype);
    }
}

static void benches(struct harness *harness)
{
    static const struct attention_shape shapes[] = {
        {14, 2, 64, 16, 512, 1, 256},   {14, 2, 64, 16, 4096, 1, 256},
        {14, 2, 64, 16, 128, 128, 256}, {14, 2, 64, 16, 1024, 128, 256},
        {32, 8, 128, 16, 1024, 32, 0},  {14, 2, 64, 16, 4096, 1, 256},
        {14, 2, 64, 16, 4096, 128, 0},  {14, 2, 64, 16, 32768, 1, 0},
    };
    static const int32_t windows[sizeof(shapes) / sizeof(shapes[0])] = {[5] = 512};
    size_t num_shapes = sizeof(shapes) / sizeof(shapes[0]);
    for (size_t i = 0; i < num_shapes * KV_DTYPE_COUNT; i++) {
        size_t idx = i % num_shapes;
        enum kv_dtype dtype = (enum kv_dtype)(i / num_shapes);
        struct attention_case attention;
        struct attention_shape shape = shapes[idx];
        build_case(harness, shape, windows[idx], 1, 1.0, false, dtype, &attention);
        harness_case(harness, "attention %d/%d x %d, %d keys, %d new, %s%s", (int)shape.num_heads,
                     (int)shape.num_kv_heads, (int)shape.head_dim, (int)shape.context,
                     (int)shape.num_new, kv_dtype_name(dtype), windows[idx] > 0 ? ", window" : "");
        finish_case(harness, &attention, 17, 0.0);
        attention.plan.whole_only = true;
        attention.plan.fast_only = shape.context >= 4096;
        harness_check(harness, &attention.plan);
        double num_keys = 0.0;
        for (int32_t token = 0; token < attention.params.num_tokens; token++) {
            num_keys += attention.params.positions[token] + 1.0 -
                        (double)attention_first_key(&attention.params, token);
        }
        harness_bench(harness, &attention.plan, NULL,
                      num_keys * 4.0 * shape.num_heads * shape.head_dim,
                      num_keys * 2.0 * shape.num_kv_heads *
                          (double)kv_dtype_row_bytes(dtype, shape.head_dim));
        harness_end_case(harness);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
