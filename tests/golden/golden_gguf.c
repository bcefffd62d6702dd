/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files that imbrex writes, run: the golden ids of stories260K come out of them, and types
 * with fewer bits cost as little as they should. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"

#define STORIES "tests/golden/stories260K"
#define TINY "tests/golden/qwen2-tiny-4m"
#define NUM_GOLDEN 255
#define WINDOW 512
#define NUM_WINDOWS (TEST_SANITIZED ? 1 : 8)

static const char *out_path(const char *name)
{
    static char path[512];
    snprintf(path, sizeof(path), TEST_BUILD_DIR "/golden-%s.gguf", name);
    return path;
}

/* A tensor that the report must name, and what it must say. */
struct expectation {
    const char *tensor, *to, *reason;
    bool is_met;
};

static bool compare_tensor(void *user, const struct imbrex_quantize_progress *progress)
{
    struct expectation *expected = user;
    const struct imbrex_quantized_tensor *tensor = progress->tensor;
    for (; tensor != NULL && expected != NULL && expected->tensor != NULL; expected++) {
        if (strcmp(tensor->name, expected->tensor) == 0) {
            assert_string_equal(tensor->to, expected->to);
            if (expected->reason == NULL) {
                assert_null(tensor->reason);
            } else {
                assert_non_null(tensor->reason);
                assert_string_equal(tensor->reason, expected->reason);
            }
            expected->is_met = true;
        }
    }
    return true;
}

/* Writes and opens again; `expected` ends with a NULL tensor, or is NULL. */
static struct imbrex_model *convert(struct imbrex_model *model, const char *type, const char *name,
                                    struct expectation *expected)
{
    struct imbrex_error err;
    struct imbrex_quantize_options options = imbrex_quantize_options_default();
    options.path = out_path(name);
    options.type = type;
    options.overwrite = true;
    options.num_threads = 2;
    options.progress = compare_tensor;
    options.user = expected;
    golden_check(imbrex_quantize(model, &options, NULL, &err), &err);
    for (; expected != NULL && expected->tensor != NULL; expected++) {
        assert_true(expected->is_met);
    }
    return golden_open(options.path);
}

static void expect_golden_ids(struct imbrex_model *model, const char *what)
{
    json_t *root = golden_read_json(STORIES "/greedy_golden.json");
    int32_t num_prompt_ids, num_expected, found[NUM_GOLDEN];
    int32_t *prompt_ids = golden_ids(json_object_get(root, "prompt_ids"), &num_prompt_ids);
    int32_t *expected = golden_ids(json_object_get(root, "ids"), &num_expected);
    assert_int_equal(num_expected, NUM_GOLDEN);
    for (int32_t i = 0; i < CPU_NUM_FP32_PATHS; i++) {
        if (!golden_has_path(i)) {
            continue;
        }
        struct imbrex_engine *engine = golden_engine(model, cpu_paths[i].features, 2);
        assert_int_equal(
            golden_greedy(engine, model, prompt_ids, num_prompt_ids, NUM_GOLDEN, found),
            NUM_GOLDEN);
        for (int32_t step = 0; step < NUM_GOLDEN; step++) {
            if (found[step] != expected[step]) {
                fail_msg("%s, path %d, step %d: expected %d, found %d", what, i, step,
                         expected[step], found[step]);
            }
        }
        imbrex_engine_destroy(engine);
    }
    free(prompt_ids);
    free(expected);
    json_decref(root);
}

/* Catches: rows of q and k in the wrong order, RoPE over the wrong pairs, norms or dims that are
 * lost on the way, and a file that changes when it is written once more. */
static void test_stories_f16(void **state)
{
    (void)state;
    struct imbrex_model *model = golden_open(NULL);
    struct imbrex_model *written = convert(model, "f16", "stories-f16", NULL);
    expect_golden_ids(written, "written from the folder");
    struct imbrex_model *again = convert(written, "f16", "stories-f16-again", NULL);
    expect_golden_ids(again, "written from GGUF");
    imbrex_model_close(again);
    imbrex_model_close(written);
    imbrex_model_close(model);
}

/* Catches: the tokenizer of the file giving other ids than the folder's. */
static void test_stories_tokenizer(void **state)
{
    (void)state;
    static const char text[] = "Once upon a time, there was  a little girl\nnamed Lily \xc3\xa9.";
    struct imbrex_error err;
    struct imbrex_model *model = golden_open(NULL);
    struct imbrex_model *written = convert(model, "f32", "stories-f32", NULL);
    int32_t *expected = NULL, *found = NULL;
    size_t num_expected, num_found;
    assert_non_null(imbrex_model_tokenizer(written));
    golden_check(imbrex_tokenize(imbrex_model_tokenizer(model), text, sizeof(text) - 1,
                                 IMBREX_TOKENIZE_ADD_SPECIAL, &expected, &num_expected, &err),
                 &err);
    golden_check(imbrex_tokenize(imbrex_model_tokenizer(written), text, sizeof(text) - 1,
                                 IMBREX_TOKENIZE_ADD_SPECIAL, &found, &num_found, &err),
                 &err);
    assert_int_equal(num_found, num_expected);
    assert_memory_equal(found, expected, num_found * sizeof(found[0]));
    imbrex_free(expected);
    imbrex_free(found);
    imbrex_model_close(written);
    imbrex_model_close(model);
}

/* Catches: a fallback that is another one than llama.cpp's, or that the report does not name. */
static void test_fallbacks(void **state)
{
    (void)state;
    struct expectation q4_k[] = {
        {"blk.0.ffn_down.weight", "F16", "rows of 172 are no multiple of 32", false},
        {"blk.0.ffn_up.weight", "Q5_0", "rows of 64 are no multiple of 256", false},
        {"token_embd.weight", "Q8_0", "rows of 64 are no multiple of 256", false},
        {"output_norm.weight", "F32", "norms and biases are F32", false},
        {NULL, NULL, NULL, false}};
    struct expectation q6_k[] = {
        {"blk.1.ffn_down.weight", "F16", "rows of 172 are no multiple of 32", false},
        {"blk.1.attn_q.weight", "Q8_0", "rows of 64 are no multiple of 256", false},
        {NULL, NULL, NULL, false}};
    struct expectation q8_0[] = {
        {"blk.4.ffn_down.weight", "F16", "rows of 172 are no multiple of 32", false},
        {"blk.4.attn_k.weight", "Q8_0", NULL, false},
        {NULL, NULL, NULL, false}};
    struct imbrex_model *model = golden_open(NULL);
    imbrex_model_close(convert(model, "q4_k", "stories-q4_k", q4_k));
    imbrex_model_close(convert(model, "q6_k", "stories-q6_k", q6_k));
    imbrex_model_close(convert(model, "q8_0", "stories-q8_0", q8_0));
    imbrex_model_close(model);
}

static double score(struct imbrex_model *model, const int32_t *ids)
{
    struct imbrex_error err;
    double nll[WINDOW - 1], sum = 0.0;
    struct imbrex_engine *engine = golden_engine(model, IMBREX_CPU_ALL, 2);
    for (int32_t window = 0; window < NUM_WINDOWS; window++) {
        golden_check(imbrex_engine_score(engine, ids + window * WINDOW, WINDOW, nll, &err), &err);
        for (int32_t i = 0; i < WINDOW - 1; i++) {
            sum += nll[i];
        }
    }
    imbrex_engine_destroy(engine);
    return sum / (NUM_WINDOWS * (WINDOW - 1));
}

/* Catches: a quantiser or a dot product that loses more than the format must, biases or tied
 * embeddings of qwen2 that are lost. The bounds are the project's own. */
static void test_tiny_nll(void **state)
{
    (void)state;
    static const struct {
        const char *type, *name;
        double max_rise; /* of nll, relative */
    } rows[] = {
        {"bf16", "tiny-bf16", 1e-9},
        {"q8_0", "tiny-q8_0", 0.003},
        {"q4_0", "tiny-q4_0", 0.05},
    };
    json_t *root = golden_read_json(TINY "/val_ids.json");
    int32_t num_ids;
    int32_t *ids = golden_ids(root, &num_ids);
    struct imbrex_model *model = golden_open(TINY);
    double before = score(model, ids);
    assert_true(num_ids >= NUM_WINDOWS * WINDOW);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct imbrex_model *written = convert(model, rows[i].type, rows[i].name, NULL);
        double after = score(written, ids);
        print_message("%s: nll %.6f -> %.6f\n", rows[i].type, before, after);
        if (!(after <= before * (1.0 + rows[i].max_rise) && after >= 0.97 * before)) {
            fail_msg("%s: nll: expected a rise of less than %g %%, found %.6f -> %.6f",
                     rows[i].type, 100 * rows[i].max_rise, before, after);
        }
        imbrex_model_close(written);
    }
    imbrex_model_close(model);
    free(ids);
    json_decref(root);
}

/* Catches: RoPE scaling, sliding windows, norms of heads or biases that a written file loses. The
 * order of the sums over a head differs for llama and mistral, and so the last digits. */
static void test_architectures(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "qwen3",      "qwen3-bias",         "mistral-window", "llama3-rope", "llama-linear-bias",
        "qwen2-yarn", "llama-yarn-factors",
    };
    enum { NUM_IDS = 100 };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[128];
        struct imbrex_error err;
        int32_t ids[NUM_IDS];
        double before[NUM_IDS - 1], after[NUM_IDS - 1];
        snprintf(path, sizeof(path), "tests/golden/architectures/%s", cases[i]);
        struct imbrex_model *model = golden_open(path);
        struct imbrex_model *written = convert(model, "f32", cases[i], NULL);
        struct imbrex_engine *engine = golden_engine(model, IMBREX_CPU_ALL, 2);
        struct imbrex_engine *engine_written = golden_engine(written, IMBREX_CPU_ALL, 2);
        for (int32_t j = 0; j < NUM_IDS; j++) {
            ids[j] = (7 * j * j + 3 * j) % 64;
        }
        golden_check(imbrex_engine_score(engine, ids, NUM_IDS, before, &err), &err);
        golden_check(imbrex_engine_score(engine_written, ids, NUM_IDS, after, &err), &err);
        for (int32_t j = 0; j < NUM_IDS - 1; j++) {
            if (!(fabs(after[j] - before[j]) < 1e-4)) {
                fail_msg("%s, id %d: expected an nll of %.6f, found %.6f", cases[i], j, before[j],
                         after[j]);
            }
        }
        imbrex_engine_destroy(engine);
        imbrex_engine_destroy(engine_written);
        imbrex_model_close(written);
        imbrex_model_close(model);
    }
    /* What no key of GGUF says. */
    struct imbrex_error err;
    struct imbrex_model *model = golden_open("tests/golden/architectures/qwen2-window");
    struct imbrex_quantize_options options = imbrex_quantize_options_default();
    options.path = out_path("qwen2-window");
    assert_int_equal(imbrex_quantize(model, &options, NULL, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "that a GGUF file can hold"));
    imbrex_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stories_f16),   cmocka_unit_test(test_stories_tokenizer),
        cmocka_unit_test(test_fallbacks),     cmocka_unit_test(test_tiny_nll),
        cmocka_unit_test(test_architectures),
    };
    return cmocka_run_group_tests_name("golden_gguf", tests, NULL, NULL);
}
