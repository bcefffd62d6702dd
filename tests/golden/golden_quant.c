/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's block formats against the gguf package (tests/golden/quant/README.md), and a whole model
 * with its weights quantised: what the formats are for. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "forward_fp64.h"
#include "golden.h"
#include "ops/ops.h"
#include "ops/quant.h"

#define FOLDER "tests/golden/quant/"
#define MODEL "tests/golden/qwen2-tiny-4m"
#define WINDOW 512
#define NUM_LOGIT_TOKENS 24
#define NUM_GREEDY (TEST_SANITIZED ? 8 : 64)
/* Activations in blocks may choose another id where the best two logits are this close: each path's
 * logits are 0.05 to 0.2 off (rms over the vocabulary), and as much from another path's. */
#define TIE_GAP 0.5
/* A sanitizer looks for wrong accesses, which check_linear makes with every type: of whole models
 * it gets every third. */
#define DTYPE_STEP (TEST_SANITIZED ? 3 : 1)

/* Of a file whose name ends in `suffix`; malloc'ed. NULL if there is none. */
static unsigned char *read_golden(const char *name, const char *suffix, size_t *num_bytes)
{
    char path[128];
    snprintf(path, sizeof(path), FOLDER "%s%s", name, suffix);
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return NULL;
    }
    unsigned char *bytes = malloc(1 << 16);
    assert_non_null(bytes);
    *num_bytes = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    assert_true(*num_bytes > 0 && *num_bytes < 1 << 16);
    return bytes;
}

/* Catches: any bit of a block read as something else. Every value must be that of the package, bit
 * for bit; NaN (from random scales) must be NaN. */
static void test_dequantize(void **state)
{
    (void)state;
    for (int dtype = DTYPE_F16; dtype < DTYPE_COUNT; dtype++) {
        const char *name = dtype_name((enum dtype)dtype);
        size_t block_bytes, value_bytes;
        unsigned char *blocks = read_golden(name, ".blocks", &block_bytes);
        unsigned char *values = read_golden(name, ".f32", &value_bytes);
        assert_true(blocks != NULL && values != NULL);
        int64_t count = (int64_t)(value_bytes / sizeof(float));
        assert_int_equal(dtype_row_bytes((enum dtype)dtype, count), block_bytes);
        float *d = malloc(value_bytes);
        assert_non_null(d);
        quant_dequantize_row((enum dtype)dtype, blocks, d, count);
        for (int64_t i = 0; i < count; i++) {
            float expected;
            memcpy(&expected, values + 4 * i, sizeof(expected));
            if (memcmp(&d[i], &expected, sizeof(expected)) != 0 &&
                !(isnan(d[i]) && isnan(expected))) {
                fail_msg("%s: element %d: expected %.9g, found %.9g", name, (int)i,
                         (double)expected, (double)d[i]);
            }
        }
        free(blocks);
        free(values);
        free(d);
    }
}

/* Catches: a scale, a rounding or a tie that differs from the package in any block it writes. */
static void test_quantize(void **state)
{
    (void)state;
    size_t row_bytes, expected_bytes;
    int num_formats = 0;
    unsigned char *rows = read_golden("rows", ".f32", &row_bytes);
    assert_non_null(rows);
    int64_t count = (int64_t)(row_bytes / sizeof(float));
    unsigned char *blocks = malloc(row_bytes);
    float *a = malloc(row_bytes);
    assert_true(blocks != NULL && a != NULL);
    memcpy(a, rows, row_bytes);
    for (int dtype = DTYPE_F16; dtype < DTYPE_COUNT; dtype++) {
        const char *name = dtype_name((enum dtype)dtype);
        unsigned char *expected = read_golden(name, ".quantized", &expected_bytes);
        if (expected == NULL) {
            continue;
        }
        num_formats++;
        assert_int_equal(dtype_row_bytes((enum dtype)dtype, count), expected_bytes);
        quant_quantize_row((enum dtype)dtype, a, blocks, count);
        for (size_t i = 0; i < expected_bytes; i++) {
            if (blocks[i] != expected[i]) {
                size_t block = i / dtype_block_bytes((enum dtype)dtype);
                fail_msg("%s: block %zu, byte %zu: expected 0x%02x, found 0x%02x", name, block,
                         i % dtype_block_bytes((enum dtype)dtype), expected[i], blocks[i]);
            }
        }
        free(expected);
    }
    assert_int_equal(num_formats, 7);
    free(rows);
    free(blocks);
    free(a);
}

/* ---- a quantised model ------------------------------------------------------------------------*/

#define MAX_MATRICES 256

/* A model whose matrices have been replaced. */
struct quantized_model {
    struct imbrex_model *model;
    void *blocks[MAX_MATRICES];
    int32_t num_blocks;
};

/* Replaces a matrix by its quantised copy. */
static void replace(struct quantized_model *quantized, struct weight_view *view, int64_t rows,
                    int64_t columns, enum dtype dtype)
{
    struct weights *weights = &quantized->model->weights;
    assert_int_equal(columns % dtype_block_elements(dtype), 0);
    assert_true(quantized->num_blocks < MAX_MATRICES);
    float *wide = malloc((size_t)(rows * columns) * sizeof(float));
    /* At an odd address, as in many files. */
    unsigned char *blocks = malloc(dtype_row_bytes(dtype, rows * columns) + 1);
    assert_true(wide != NULL && blocks != NULL);
    quant_dequantize_row(view->dtype, view->elements, wide, rows * columns);
    quant_quantize_row(dtype, wide, blocks + 1, rows * columns);
    free(wide);
    quantized->blocks[quantized->num_blocks++] = blocks;
    *view = (struct weight_view){blocks + 1, dtype};
    if (dtype_is_quantized(dtype) && columns > weights->max_quantized_columns) {
        weights->max_quantized_columns = columns;
    }
}

/* dtypes[7]: q, k, v, o, gate, up, down; and of embeddings and logits. */
static void quantize_model(struct quantized_model *quantized, const enum dtype dtypes[7],
                           enum dtype embed_dtype)
{
    *quantized = (struct quantized_model){.model = golden_open(MODEL)};
    const struct model_config *config = &quantized->model->config;
    struct weights *weights = &quantized->model->weights;
    int64_t hidden = config->hidden_size, inner = config->intermediate_size;
    int64_t q_rows = config->num_heads * config->head_dim;
    int64_t kv_rows = config->num_kv_heads * config->head_dim;
    assert_true(weights->tied);
    replace(quantized, &weights->embed_tokens, config->vocab_size, hidden, embed_dtype);
    weights->lm_head = weights->embed_tokens;
    for (int32_t i = 0; i < config->num_layers; i++) {
        struct layer_weights *layer = &weights->layers[i];
        replace(quantized, &layer->q_proj, q_rows, hidden, dtypes[0]);
        replace(quantized, &layer->k_proj, kv_rows, hidden, dtypes[1]);
        replace(quantized, &layer->v_proj, kv_rows, hidden, dtypes[2]);
        replace(quantized, &layer->o_proj, hidden, q_rows, dtypes[3]);
        replace(quantized, &layer->gate_proj, inner, hidden, dtypes[4]);
        replace(quantized, &layer->up_proj, inner, hidden, dtypes[5]);
        replace(quantized, &layer->down_proj, hidden, inner, dtypes[6]);
    }
}

/* Replaces every matrix by what its blocks stand for, in fp32: the same weights, whose activations
 * are no longer brought into blocks. */
static void widen_model(struct quantized_model *quantized)
{
    const struct model_config *config = &quantized->model->config;
    struct weights *weights = &quantized->model->weights;
    int64_t hidden = config->hidden_size, inner = config->intermediate_size;
    int64_t q_rows = config->num_heads * config->head_dim;
    int64_t kv_rows = config->num_kv_heads * config->head_dim;
    replace(quantized, &weights->embed_tokens, config->vocab_size, hidden, DTYPE_F32);
    weights->lm_head = weights->embed_tokens;
    for (int32_t i = 0; i < config->num_layers; i++) {
        struct layer_weights *layer = &weights->layers[i];
        replace(quantized, &layer->q_proj, q_rows, hidden, DTYPE_F32);
        replace(quantized, &layer->k_proj, kv_rows, hidden, DTYPE_F32);
        replace(quantized, &layer->v_proj, kv_rows, hidden, DTYPE_F32);
        replace(quantized, &layer->o_proj, hidden, q_rows, DTYPE_F32);
        replace(quantized, &layer->gate_proj, inner, hidden, DTYPE_F32);
        replace(quantized, &layer->up_proj, inner, hidden, DTYPE_F32);
        replace(quantized, &layer->down_proj, hidden, inner, DTYPE_F32);
    }
}

static void quantize_model_to(struct quantized_model *quantized, enum dtype dtype)
{
    const enum dtype dtypes[7] = {dtype, dtype, dtype, dtype, dtype, dtype, dtype};
    quantize_model(quantized, dtypes, dtype);
}

static void close_model(struct quantized_model *quantized)
{
    imbrex_model_close(quantized->model);
    for (int32_t i = 0; i < quantized->num_blocks; i++) {
        free(quantized->blocks[i]);
    }
}

/* As a mixed file has them: several forms of activations in one call, gate and up apart. */
static const enum dtype mixed_dtypes[7] = {DTYPE_Q8_0, DTYPE_Q5_0, DTYPE_F16, DTYPE_Q4_1,
                                           DTYPE_Q5_1, DTYPE_Q8_0, DTYPE_Q6_K};

static int32_t *read_validation_ids(int32_t *num_ids)
{
    json_t *rows = golden_read_json(MODEL "/val_ids.json");
    int32_t *ids = golden_ids(rows, num_ids);
    json_decref(rows);
    return ids;
}

/* nll per token over the first rows of the validation ids. */
static double validation_nll_on(struct imbrex_model *model, uint32_t cpu_features,
                                const int32_t *ids, int32_t num_rows)
{
    struct imbrex_error err;
    struct imbrex_engine *engine = golden_engine(model, cpu_features, 2);
    double nll[WINDOW], sum = 0.0;
    for (int32_t row = 0; row < num_rows; row++) {
        golden_check(imbrex_engine_score(engine, ids + row * WINDOW, WINDOW, nll, &err), &err);
        for (int32_t i = 0; i < WINDOW - 1; i++) {
            sum += nll[i];
        }
    }
    imbrex_engine_destroy(engine);
    return sum / ((double)num_rows * (WINDOW - 1));
}

static double validation_nll(struct imbrex_model *model, const int32_t *ids, int32_t num_rows)
{
    return validation_nll_on(model, IMBREX_CPU_ALL, ids, num_rows);
}

/* Catches: weights or activations that lose more than their bits: what the formats cost a model. */
static void test_model_nll(void **state)
{
    (void)state;
    static const struct {
        enum dtype dtype;
        double max_rise;
    } rows[] = {{DTYPE_F16, 0.0001}, {DTYPE_Q8_0, 0.003}, {DTYPE_Q5_1, 0.02},
                {DTYPE_Q5_0, 0.02},  {DTYPE_Q4_1, 0.05},  {DTYPE_Q4_0, 0.05}};
    int32_t num_ids, num_rows = TEST_SANITIZED ? 1 : 2;
    int32_t *ids = read_validation_ids(&num_ids);
    assert_true(num_ids >= num_rows * WINDOW);
    struct imbrex_model *model = golden_open(MODEL);
    double plain = validation_nll(model, ids, num_rows);
    imbrex_model_close(model);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i += DTYPE_STEP) {
        struct quantized_model quantized;
        quantize_model_to(&quantized, rows[i].dtype);
        double found = validation_nll(quantized.model, ids, num_rows);
        double rise = found / plain - 1.0;
        print_message("%s: nll %.5f, %+.2f %%\n", dtype_name(rows[i].dtype), found, 100.0 * rise);
        close_model(&quantized);
        if (!(rise < rows[i].max_rise)) {
            fail_msg("%s: nll %.5f instead of %.5f: up by %.2f %%, allowed %.2f %%",
                     dtype_name(rows[i].dtype), found, plain, 100.0 * rise,
                     100.0 * rows[i].max_rise);
        }
    }
    free(ids);
}

/* Catches: activations in blocks that cost more than they may on any path: 0.3 % of nll over fp32
 * activations and the same weights. (Between paths, roundings now and then move an activation over
 * the edge of its step, and all layers behind see it: paths are as far apart as blocks from
 * fp32.) */
static void test_activations_nll(void **state)
{
    (void)state;
    const double max_cost = 0.003;
    static const enum dtype dtypes[] = {DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0,
                                        DTYPE_Q5_1, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
    int32_t num_ids, num_rows = TEST_SANITIZED ? 1 : 2;
    int32_t *ids = read_validation_ids(&num_ids);
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i += DTYPE_STEP) {
        const char *name = dtype_name(dtypes[i]);
        struct quantized_model quantized;
        /* Where rows are no multiple of 256, as in many files, Q5_0 stands in for a K format. */
        enum dtype rest = dtype_block_elements(dtypes[i]) == 256 ? DTYPE_Q5_0 : dtypes[i];
        const enum dtype of_model[7] = {rest, rest, rest, rest, rest, rest, dtypes[i]};
        quantize_model(&quantized, of_model, rest);
        double found[CPU_NUM_PATHS];
        /* The reference is slow: with every third dtype, and not under sanitizers. */
        int32_t first_path = i % 3 == 0 && !TEST_SANITIZED ? 0 : 1;
        for (int32_t path = first_path; path < CPU_NUM_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            found[path] =
                validation_nll_on(quantized.model, cpu_paths[path].features, ids, num_rows);
        }
        widen_model(&quantized);
        double plain = validation_nll(quantized.model, ids, num_rows);
        print_message("%s: nll %.5f", name, plain);
        for (int32_t path = first_path; path < CPU_NUM_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            double cost = found[path] / plain - 1.0;
            print_message(", %s %+.3f %%", cpu_paths[path].name, 100.0 * cost);
            if (!(fabs(cost) < max_cost)) {
                fail_msg("%s, path %s: nll %.5f, but %.5f with fp32 activations", name,
                         cpu_paths[path].name, found[path], plain);
            }
        }
        print_message("\n");
        close_model(&quantized);
    }
    free(ids);
}

/* ---- products of all paths --------------------------------------------------------------------*/

#define MAX_PRODUCT_ROWS 7

/* weights [num_cols, count] in blocks of a dtype times a [MAX_PRODUCT_ROWS, count]; every path
 * within 1e-4 of the reference, relative to the size of a row of results. */
static void expect_paths_agree(enum dtype dtype, const char *what, const float *weights,
                               int32_t num_cols, const float *a, int32_t count)
{
    static float found[CPU_NUM_PATHS][MAX_PRODUCT_ROWS * 1024];
    assert_true(num_cols <= 1024);
    int64_t num_weights = (int64_t)num_cols * count;
    unsigned char *blocks = malloc(dtype_row_bytes(dtype, num_weights) + 1);
    size_t scratch_bytes = MAX_PRODUCT_ROWS * ops_scratch_token_bytes(count);
    void *scratch = malloc(scratch_bytes);
    assert_true(blocks != NULL && scratch != NULL);
    quant_quantize_row(dtype, weights, blocks + 1, num_weights);
    double worst = 0.0;
    for (int32_t path = 0; path < CPU_NUM_PATHS; path++) {
        if (!golden_has_path(path)) {
            continue;
        }
        struct imbrex_error err;
        struct ops *ops = NULL;
        golden_check(ops_create(2, cpu_paths[path].features, scratch, scratch_bytes, &ops, &err),
                     &err);
        struct linear_params params = {.a = a,
                                       .weight = {blocks + 1, dtype},
                                       .d = found[path],
                                       .a_stride = count,
                                       .d_stride = num_cols,
                                       .num_tokens = MAX_PRODUCT_ROWS,
                                       .in_features = count,
                                       .out_features = num_cols};
        ops_linear(ops, &params, 1);
        ops_destroy(ops);
        for (int32_t row = 0; row < MAX_PRODUCT_ROWS; row++) {
            const float *expected = found[0] + row * num_cols;
            double size = 0.0;
            for (int32_t col = 0; col < num_cols; col++) {
                size += pow(expected[col], 2.0) / num_cols;
            }
            for (int32_t col = 0; col < num_cols; col++) {
                double apart = fabs((double)found[path][row * num_cols + col] - expected[col]);
                worst = fmax(worst, apart / sqrt(size));
                if (!(apart <= 1e-4 * sqrt(size))) {
                    fail_msg("%s, %s, path %s, row %d, column %d: %.9g, the reference %.9g",
                             dtype_name(dtype), what, cpu_paths[path].name, row, col,
                             (double)found[path][row * num_cols + col], (double)expected[col]);
                }
            }
        }
    }
    print_message("%s, %s: paths within %.1e\n", dtype_name(dtype), what, worst);
    free(blocks);
    free(scratch);
}

/* Catches: a path whose products are not those of the reference: on matrices of the model with
 * embeddings of its tokens, and on rows as long as those of Qwen2.5-0.5B, whose values lie about
 * zero or all on one side, where roundings add up. */
static void test_paths_agree(void **state)
{
    (void)state;
    static const int32_t counts[] = {896, 4864};
    const int32_t num_cols = 37;
    int32_t num_ids;
    int32_t *ids = read_validation_ids(&num_ids);
    struct imbrex_model *model = golden_open(MODEL);
    const struct model_config *config = &model->config;
    int32_t hidden = config->hidden_size, inner = config->intermediate_size;
    float *weights = malloc((size_t)hidden * (size_t)inner * sizeof(float));
    float *long_rows = malloc((size_t)num_cols * 4864 * sizeof(float));
    float *a = malloc((size_t)MAX_PRODUCT_ROWS * 4864 * sizeof(float));
    assert_true(weights != NULL && long_rows != NULL && a != NULL && hidden < 4864);
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        int32_t block = dtype_block_elements((enum dtype)dtype);
        const struct weight_view *embed = &model->weights.embed_tokens;
        for (int32_t i = 0; i * hidden < MAX_PRODUCT_ROWS * inner; i++) {
            size_t row_bytes = dtype_row_bytes(embed->dtype, hidden);
            quant_dequantize_row(
                embed->dtype, (const unsigned char *)embed->elements + (size_t)ids[i] * row_bytes,
                a + i * hidden, hidden);
        }
        const struct layer_weights *layer = &model->weights.layers[config->num_layers / 2];
        quant_dequantize_row(layer->down_proj.dtype, layer->down_proj.elements, weights,
                             (int64_t)hidden * inner);
        if (inner % block == 0) {
            expect_paths_agree((enum dtype)dtype, "down_proj", weights, hidden, a, inner);
        }
        quant_dequantize_row(layer->gate_proj.dtype, layer->gate_proj.elements, weights,
                             (int64_t)hidden * inner);
        if (hidden % block == 0) {
            expect_paths_agree((enum dtype)dtype, "gate_proj", weights, inner, a, hidden);
        }
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            int32_t count = counts[i] / block * block;
            for (int one_sided = 0; one_sided < 2; one_sided++) {
                uint32_t random_state = 1;
                for (int32_t k = 0; k < (num_cols + MAX_PRODUCT_ROWS) * count; k++) {
                    random_state = random_state * 1664525u + 1013904223u;
                    float value = (float)(random_state >> 8) * 0x1p-24f - (one_sided ? 0.0f : 0.5f);
                    *(k < num_cols * count ? &long_rows[k] : &a[k - num_cols * count]) = value;
                }
                char what[64];
                snprintf(what, sizeof(what), "rows of %d, %s", count,
                         one_sided ? "one sign" : "both signs");
                expect_paths_agree((enum dtype)dtype, what, long_rows, num_cols, a, count);
            }
        }
    }
    free(weights);
    free(long_rows);
    free(a);
    free(ids);
    imbrex_model_close(model);
}

/* Catches: a matrix that meets the wrong activations or none, in a model of mixed formats: its
 * logits against the fp64 pass over the same weights, whose activations are not quantised. */
static void test_mixed_logits(void **state)
{
    (void)state;
    int32_t num_ids;
    int32_t *ids = read_validation_ids(&num_ids);
    struct quantized_model quantized;
    quantize_model(&quantized, mixed_dtypes, DTYPE_Q8_0);
    struct forward_fp64 reference;
    forward_fp64_init(&reference, quantized.model, NUM_LOGIT_TOKENS);
    for (int32_t i = 0; i < NUM_LOGIT_TOKENS; i++) {
        forward_fp64_push(&reference, ids[i]);
    }
    for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
        if (!golden_has_path(path)) {
            continue;
        }
        struct imbrex_engine *engine = golden_engine(quantized.model, cpu_paths[path].features, 2);
        const float *logits = golden_logits(engine, ids, NUM_LOGIT_TOKENS);
        double error = 0.0, size = 0.0;
        for (int32_t id = 0; id < quantized.model->config.vocab_size; id++) {
            error += pow(logits[id] - reference.logits[id], 2.0);
            size += pow(reference.logits[id], 2.0);
        }
        error = sqrt(error / size);
        print_message("path %d: logits differ by %.4f of their size\n", path, error);
        /* Each activation is off by 1/254 of its block's largest at most; eight layers add up. */
        assert_true(error < 0.03);
        imbrex_engine_destroy(engine);
    }
    forward_fp64_deinit(&reference);
    close_model(&quantized);
    free(ids);
}

/* Catches: results that depend on threads or on how the prompt was cut; scratch that is planned too
 * small (the op asserts it); a plan that does not count it. */
static void test_mixed_bit_equal(void **state)
{
    (void)state;
    int32_t num_ids;
    int32_t *ids = read_validation_ids(&num_ids);
    struct quantized_model quantized;
    quantize_model(&quantized, mixed_dtypes, DTYPE_Q8_0);
    golden_expect_bit_equal(quantized.model, ids, 150, CPU_NUM_FP32_PATHS);
    struct imbrex_error err;
    struct imbrex_memory_plan with_blocks, plain;
    golden_check(imbrex_engine_plan(quantized.model, NULL, &with_blocks, &err), &err);
    quantized.model->weights.max_quantized_columns = 0;
    golden_check(imbrex_engine_plan(quantized.model, NULL, &plain, &err), &err);
    size_t scratch_bytes =
        (size_t)plain.max_step_tokens *
        (512 / 32 * sizeof(struct q8_activations) + 512 / 256 * sizeof(struct q8_k_activations));
    assert_true(with_blocks.activation_bytes >= plain.activation_bytes + scratch_bytes &&
                with_blocks.activation_bytes < plain.activation_bytes + scratch_bytes + 64);
    close_model(&quantized);
    free(ids);
}

/* Greedy ids of a path against those of the reference: how many they have in common, and the gap
 * of the two best logits of the fp64 pass over the same weights, behind those; all alike:
 * NUM_GREEDY and 0. */
static int32_t count_common(struct imbrex_model *model, const int32_t *prompt_ids,
                            int32_t num_prompt_ids, const int32_t *expected, int32_t path,
                            double *gap)
{
    int32_t found[NUM_GREEDY], num_common = 0;
    struct imbrex_engine *engine = golden_engine(model, cpu_paths[path].features, 2);
    assert_int_equal(golden_greedy(engine, model, prompt_ids, num_prompt_ids, NUM_GREEDY, found),
                     NUM_GREEDY);
    imbrex_engine_destroy(engine);
    while (num_common < NUM_GREEDY && found[num_common] == expected[num_common]) {
        num_common++;
    }
    *gap = 0.0;
    if (num_common < NUM_GREEDY) {
        struct forward_fp64 reference;
        forward_fp64_init(&reference, model, num_prompt_ids + num_common);
        for (int32_t i = 0; i < num_prompt_ids; i++) {
            forward_fp64_push(&reference, prompt_ids[i]);
        }
        for (int32_t i = 0; i < num_common; i++) {
            forward_fp64_push(&reference, expected[i]);
        }
        *gap = forward_fp64_top_two_gap(&reference);
        forward_fp64_deinit(&reference);
    }
    return num_common;
}

/* Catches: a path that writes another text than the reference where the model is sure of it. Blocks
 * of activations move logits (test_activations_nll), on each path at other places; so texts may
 * part where the fp64 pass, whose activations are not in blocks, sees two logits about equal. */
static void test_greedy_paths(void **state)
{
    (void)state;
    static const enum dtype dtypes[] = {DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_K};
    json_t *golden = golden_read_json(MODEL "/golden.json");
    json_t *prompts = json_object_get(golden, "prompts");
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i += DTYPE_STEP) {
        struct quantized_model quantized;
        enum dtype rest = dtype_block_elements(dtypes[i]) == 256 ? DTYPE_Q5_0 : dtypes[i];
        const enum dtype of_model[7] = {rest, rest, rest, rest, rest, rest, dtypes[i]};
        quantize_model(&quantized, of_model, rest);
        for (size_t j = 0; j < json_array_size(prompts); j++) {
            int32_t num_ids, expected[NUM_GREEDY];
            int32_t *ids =
                golden_ids(json_object_get(json_array_get(prompts, j), "prompt_ids"), &num_ids);
            struct imbrex_engine *reference = golden_engine(quantized.model, 0, 2);
            assert_int_equal(
                golden_greedy(reference, quantized.model, ids, num_ids, NUM_GREEDY, expected),
                NUM_GREEDY);
            imbrex_engine_destroy(reference);
            for (int32_t path = 1; path < CPU_NUM_FP32_PATHS; path++) {
                double gap;
                int32_t num_common =
                    golden_has_path(path)
                        ? count_common(quantized.model, ids, num_ids, expected, path, &gap)
                        : NUM_GREEDY;
                if (num_common < NUM_GREEDY) {
                    print_message("%s, prompt %zu, path %s: parts at step %d, fp64 gap %.4f\n",
                                  dtype_name(dtypes[i]), j, cpu_paths[path].name, num_common, gap);
                    assert_true(gap < TIE_GAP);
                }
            }
            free(ids);
        }
        close_model(&quantized);
    }
    json_decref(golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dequantize),      cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_model_nll),       cmocka_unit_test(test_mixed_logits),
        cmocka_unit_test(test_mixed_bit_equal), cmocka_unit_test(test_activations_nll),
        cmocka_unit_test(test_paths_agree),     cmocka_unit_test(test_greedy_paths),
    };
    return cmocka_run_group_tests_name("golden_quant", tests, NULL, NULL);
}
