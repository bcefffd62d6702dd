/* SPDX-License-Identifier: Apache-2.0 */
/* Tiny models of each architecture and RoPE variant against Hugging Face transformers and against
 * the fp64 forward pass (golden files: tests/golden/architectures/README.md). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "forward_fp64.h"
#include "golden.h"
#include "model/rope.h"

#define FOLDER "tests/golden/architectures"
#define MAX_PROMPT 128
#define NUM_GREEDY 24
/* Of the largest logit. Measured 4.2e-6 at most against Hugging Face, which rounds angles to fp32,
 * and 2.0e-6 against fp64. */
#define GOLDEN_RATIO 2e-5
#define REFERENCE_RATIO 1e-5
/* Two correct fp32 programs may pick different ids when the best two logits are this close. */
#define TIE_GAP 0.01

static const char *const cases[] = {
    "qwen3",       "qwen3-bias",        "mistral-window", "qwen2-window",
    "llama3-rope", "llama-linear-bias", "qwen2-yarn",     "llama-yarn-factors",
};
#define NUM_CASES ((int32_t)(sizeof(cases) / sizeof(cases[0])))

struct architecture_case {
    const char *name;
    struct imbrex_model *model;
    json_t *golden;
    int32_t *prompt_ids;
    int32_t num_prompt_ids;
    double scale; /* largest logit of the golden ones, at least 1 */
};

static struct architecture_case open_case(int32_t idx)
{
    char path[128];
    struct architecture_case opened = {.name = cases[idx], .scale = 1.0};
    snprintf(path, sizeof(path), "%s/%s", FOLDER, opened.name);
    opened.model = golden_open(path);
    snprintf(path, sizeof(path), "%s/%s/golden.json", FOLDER, opened.name);
    opened.golden = golden_read_json(path);
    opened.prompt_ids =
        golden_ids(json_object_get(opened.golden, "prompt_ids"), &opened.num_prompt_ids);
    assert_in_range(opened.num_prompt_ids, 2, MAX_PROMPT);
    json_t *logits = json_object_get(opened.golden, "last_logits");
    assert_int_equal(json_array_size(logits), opened.model->config.vocab_size);
    for (size_t i = 0; i < json_array_size(logits); i++) {
        opened.scale = fmax(opened.scale, fabs(json_real_value(json_array_get(logits, i))));
    }
    return opened;
}

static void close_case(struct architecture_case *opened)
{
    imbrex_model_close(opened->model);
    json_decref(opened->golden);
    free(opened->prompt_ids);
}

static void push_all(struct forward_fp64 *reference, const struct imbrex_model *model,
                     const int32_t *ids, int32_t num_ids)
{
    forward_fp64_init(reference, model, num_ids);
    for (int32_t i = 0; i < num_ids; i++) {
        forward_fp64_push(reference, ids[i]);
    }
}

/* Catches: an architecture, scaling or window read or computed wrongly (config field, q/k norm and
 * its order, window off by one, attention factor), on either path: all logits behind the prompt,
 * against Hugging Face's and against fp64. */
static void test_logits(void **state)
{
    (void)state;
    for (int32_t idx = 0; idx < NUM_CASES; idx++) {
        struct architecture_case opened = open_case(idx);
        struct forward_fp64 reference;
        json_t *golden = json_object_get(opened.golden, "last_logits");
        push_all(&reference, opened.model, opened.prompt_ids, opened.num_prompt_ids);
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            double golden_error = 0.0, reference_error = 0.0;
            struct imbrex_engine *engine = golden_engine(opened.model, cpu_paths[path].features, 2);
            const float *logits = golden_logits(engine, opened.prompt_ids, opened.num_prompt_ids);
            for (int32_t id = 0; id < opened.model->config.vocab_size; id++) {
                double expected = json_real_value(json_array_get(golden, (size_t)id));
                assert_true(isfinite(logits[id]));
                golden_error = fmax(golden_error, fabs(logits[id] - expected));
                reference_error = fmax(reference_error, fabs(logits[id] - reference.logits[id]));
            }
            golden_error /= opened.scale;
            reference_error /= opened.scale;
            print_message("%-18s path %d: of the largest logit %5.1f, off by %.1e from Hugging "
                          "Face, %.1e from fp64\n",
                          opened.name, path, opened.scale, golden_error, reference_error);
            assert_true(golden_error < GOLDEN_RATIO);
            assert_true(reference_error < REFERENCE_RATIO);
            imbrex_engine_destroy(engine);
        }
        forward_fp64_deinit(&reference);
        close_case(&opened);
    }
}

/* Catches: the same at every position, so that a window's or a table's first rows count too. */
static void test_nll(void **state)
{
    (void)state;
    for (int32_t idx = 0; idx < NUM_CASES; idx++) {
        struct architecture_case opened = open_case(idx);
        json_t *golden = json_object_get(opened.golden, "nll");
        size_t num_scored = (size_t)opened.num_prompt_ids - 1;
        assert_int_equal(json_array_size(golden), num_scored);
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            struct imbrex_error err;
            double nll[MAX_PROMPT];
            struct imbrex_engine *engine = golden_engine(opened.model, cpu_paths[path].features, 1);
            golden_check(
                imbrex_engine_score(engine, opened.prompt_ids, opened.num_prompt_ids, nll, &err),
                &err);
            for (size_t i = 0; i < num_scored; i++) {
                double expected = json_real_value(json_array_get(golden, i));
                if (!(fabs(nll[i] - expected) < 2.0 * GOLDEN_RATIO * opened.scale)) {
                    fail_msg("%s, path %d, position %zu: nll: expected %.6f, found %.6f",
                             opened.name, path, i, expected, nll[i]);
                }
            }
            imbrex_engine_destroy(engine);
        }
        close_case(&opened);
    }
}

/* Catches: errors of the decode path alone. A first difference is let pass, and printed, only where
 * the fp64 reference itself sees a tie. */
static void test_greedy(void **state)
{
    (void)state;
    for (int32_t idx = 0; idx < NUM_CASES; idx++) {
        struct architecture_case opened = open_case(idx);
        int32_t num_expected;
        int32_t *expected = golden_ids(json_object_get(opened.golden, "greedy_ids"), &num_expected);
        assert_int_equal(num_expected, NUM_GREEDY);
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            int32_t found[NUM_GREEDY], step = 0;
            struct imbrex_engine *engine = golden_engine(opened.model, cpu_paths[path].features, 1);
            assert_int_equal(golden_greedy(engine, opened.model, opened.prompt_ids,
                                           opened.num_prompt_ids, NUM_GREEDY, found),
                             NUM_GREEDY);
            imbrex_engine_destroy(engine);
            while (step < NUM_GREEDY && found[step] == expected[step]) {
                step++;
            }
            if (step == NUM_GREEDY) {
                continue;
            }
            struct forward_fp64 reference;
            int32_t ids[MAX_PROMPT + NUM_GREEDY];
            memcpy(ids, opened.prompt_ids, (size_t)opened.num_prompt_ids * sizeof(ids[0]));
            memcpy(ids + opened.num_prompt_ids, expected, (size_t)step * sizeof(ids[0]));
            push_all(&reference, opened.model, ids, opened.num_prompt_ids + step);
            double gap = forward_fp64_top_two_gap(&reference);
            forward_fp64_deinit(&reference);
            if (gap >= TIE_GAP) {
                fail_msg("%s, path %d, step %d: expected %d, found %d, fp64 gap %.4f", opened.name,
                         path, step, expected[step], found[step], gap);
            }
            print_message("%s, path %d: tie at step %d (fp64 gap %.6f): the rest is not compared\n",
                          opened.name, path, step, gap);
        }
        free(expected);
        close_case(&opened);
    }
}

/* Catches: results that depend on the number of threads or on how the prompt was cut, with a window
 * or norms. */
static void test_bit_equal(void **state)
{
    (void)state;
    for (int32_t idx = 0; idx < NUM_CASES; idx++) {
        struct architecture_case opened = open_case(idx);
        golden_expect_bit_equal(opened.model, opened.prompt_ids, opened.num_prompt_ids,
                                CPU_NUM_FP32_PATHS);
        close_case(&opened);
    }
}

/* Rows of a projection, elements of a bias or of a norm, head by head: from halves to pairs, as
 * llama.cpp's converter stores q and k of llama models. The caller frees the copy. */
static void *interleave(const void *source, size_t row_bytes, int32_t num_heads, int32_t head_dim)
{
    unsigned char *copy = malloc((size_t)num_heads * (size_t)head_dim * row_bytes);
    assert_non_null(copy);
    for (int32_t row = 0; row < num_heads * head_dim; row++) {
        int32_t dim = row % head_dim, half = head_dim / 2;
        int32_t from = row - dim + (dim % 2) * half + dim / 2;
        memcpy(copy + (size_t)row * row_bytes,
               (const unsigned char *)source + (size_t)from * row_bytes, row_bytes);
    }
    return copy;
}

#define INTERLEAVED_PER_LAYER 6

static void interleave_layer(struct architecture_case *opened, int32_t layer_idx,
                             void *copies[INTERLEAVED_PER_LAYER])
{
    const struct model_config *config = &opened->model->config;
    struct layer_weights *layer = &opened->model->weights.layers[layer_idx];
    int32_t head_dim = config->head_dim;
    size_t row_bytes = (size_t)config->hidden_size * dtype_block_bytes(layer->q_proj.dtype);
    const float **vectors[] = {&layer->q_bias, &layer->k_bias, &layer->q_norm, &layer->k_norm};
    const int32_t vector_heads[] = {config->num_heads, config->num_kv_heads, 1, 1};
    copies[0] = interleave(layer->q_proj.elements, row_bytes, config->num_heads, head_dim);
    copies[1] = interleave(layer->k_proj.elements, row_bytes, config->num_kv_heads, head_dim);
    layer->q_proj.elements = copies[0];
    layer->k_proj.elements = copies[1];
    for (int32_t i = 0; i < 4; i++) {
        copies[2 + i] = NULL;
        if (*vectors[i] != NULL) {
            copies[2 + i] = interleave(*vectors[i], sizeof(float), vector_heads[i], head_dim);
            *vectors[i] = copies[2 + i];
        }
    }
}

/* Catches: interleaved RoPE that pairs or turns other elements than RoPE in halves does over the
 * same model with its q and k rows in the other order. */
static void test_interleaved(void **state)
{
    (void)state;
    for (int32_t idx = 0; idx < NUM_CASES; idx++) {
        struct architecture_case opened = open_case(idx);
        int32_t vocab_size = opened.model->config.vocab_size;
        int32_t num_layers = opened.model->config.num_layers;
        float *expected[CPU_NUM_FP32_PATHS];
        void *(*copies)[INTERLEAVED_PER_LAYER] = calloc((size_t)num_layers, sizeof(*copies));
        assert_non_null(copies);
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            struct imbrex_engine *engine = golden_engine(opened.model, cpu_paths[path].features, 1);
            expected[path] = malloc((size_t)vocab_size * sizeof(float));
            assert_non_null(expected[path]);
            memcpy(expected[path], golden_logits(engine, opened.prompt_ids, opened.num_prompt_ids),
                   (size_t)vocab_size * sizeof(float));
            imbrex_engine_destroy(engine);
        }
        for (int32_t i = 0; i < num_layers; i++) {
            interleave_layer(&opened, i, copies[i]);
        }
        opened.model->config.is_rope_interleaved = true;
        struct forward_fp64 reference;
        push_all(&reference, opened.model, opened.prompt_ids, opened.num_prompt_ids);
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            struct imbrex_engine *engine = golden_engine(opened.model, cpu_paths[path].features, 1);
            const float *logits = golden_logits(engine, opened.prompt_ids, opened.num_prompt_ids);
            for (int32_t id = 0; id < vocab_size; id++) {
                double bound = REFERENCE_RATIO * opened.scale;
                if (!(fabs((double)logits[id] - expected[path][id]) < bound) ||
                    !(fabs(logits[id] - reference.logits[id]) < bound)) {
                    fail_msg("%s, path %d, id %d: halves %.6f, fp64 %.6f, pairs %.6f", opened.name,
                             path, id, expected[path][id], reference.logits[id], logits[id]);
                }
            }
            imbrex_engine_destroy(engine);
            free(expected[path]);
        }
        forward_fp64_deinit(&reference);
        for (int32_t i = 0; i < num_layers; i++) {
            for (int32_t j = 0; j < INTERLEAVED_PER_LAYER; j++) {
                free(copies[i][j]);
            }
        }
        free(copies);
        close_case(&opened);
    }
}

/* Catches: frequency factors that multiply instead of divide, or that are left out: llama3's
 * scaling written as factors, as GGUF files have it, gives the same logits. */
static void test_rope_factors(void **state)
{
    (void)state;
    struct architecture_case opened = open_case(4);
    struct model_config *config = &opened.model->config;
    double scaled[64], plain[64];
    float factors[64];
    assert_string_equal(opened.name, "llama3-rope");
    assert_in_range(config->head_dim, 2, 128);
    rope_frequencies(config, NULL, scaled);
    config->rope_scaling = (struct rope_scaling){.type = ROPE_SCALING_NONE};
    rope_frequencies(config, NULL, plain);
    for (int32_t i = 0; i < config->head_dim / 2; i++) {
        factors[i] = (float)(plain[i] / scaled[i]);
    }
    assert_true(factors[0] == 1.0f && factors[config->head_dim / 2 - 1] == 8.0f);
    opened.model->weights.rope_factors = factors;
    struct imbrex_engine *engine = golden_engine(opened.model, IMBREX_CPU_ALL, 1);
    const float *logits = golden_logits(engine, opened.prompt_ids, opened.num_prompt_ids);
    json_t *golden = json_object_get(opened.golden, "last_logits");
    for (int32_t id = 0; id < config->vocab_size; id++) {
        double expected = json_real_value(json_array_get(golden, (size_t)id));
        assert_true(fabs(logits[id] - expected) < GOLDEN_RATIO * opened.scale);
    }
    imbrex_engine_destroy(engine);
    close_case(&opened);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),      cmocka_unit_test(test_nll),
        cmocka_unit_test(test_greedy),      cmocka_unit_test(test_bit_equal),
        cmocka_unit_test(test_interleaved), cmocka_unit_test(test_rope_factors),
    };
    return cmocka_run_group_tests_name("golden_architectures", tests, NULL, NULL);
}
