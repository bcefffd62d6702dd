/* SPDX-License-Identifier: Apache-2.0 */
/* qwen2-tiny-4m against Hugging Face transformers (fp32 arithmetic over its bf16 weights; golden
 * files: tests/golden/qwen2-tiny-4m/README.md). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "forward_fp64.h"
#include "golden.h"

#define FOLDER "tests/golden/qwen2-tiny-4m"
#define NUM_GREEDY 64
/* Of these on each path: a sanitizer sees in a few steps all that there is. */
#define NUM_STEPS (TEST_SANITIZED ? 12 : NUM_GREEDY)
#define WINDOW 512
/* Activations rounded to bf16 may choose another id where the best two logits are this close. */
#define ROUNDED_GAP 0.5
/* Two correct fp32 programs may pick different ids when the best two logits are this close. */
#define TIE_GAP 0.01

struct fixture {
    struct imbrex_model *model;
    json_t *golden;
};

static int open_fixture(void **state)
{
    static struct fixture fixture;
    fixture.model = golden_open(FOLDER);
    fixture.golden = golden_read_json(FOLDER "/golden.json");
    *state = &fixture;
    return 0;
}

static int close_fixture(void **state)
{
    struct fixture *fixture = *state;
    imbrex_model_close(fixture->model);
    json_decref(fixture->golden);
    return 0;
}

/* Gap of the fp64 reference's two best logits after `num_tokens` ids. */
static double reference_gap(const struct imbrex_model *model, const int32_t *ids, int32_t num_ids)
{
    struct forward_fp64 reference;
    forward_fp64_init(&reference, model, num_ids);
    for (int32_t i = 0; i < num_ids; i++) {
        forward_fp64_push(&reference, ids[i]);
    }
    double gap = forward_fp64_top_two_gap(&reference);
    forward_fp64_deinit(&reference);
    return gap;
}

/* Catches: any error of the qwen2 forward pass (bias, GQA, RoPE, tied head) that changes a greedy
 * id, on any path and thread count. A first difference is let pass, and printed, only where the
 * fp64 reference itself sees a tie. */
static void test_greedy(void **state)
{
    struct fixture *fixture = *state;
    json_t *prompts = json_object_get(fixture->golden, "prompts");
    const int32_t thread_counts[2] = {2, 1};
    assert_int_equal(json_array_size(prompts), 5);
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        json_t *prompt = json_array_get(prompts, i);
        int32_t num_prompt_ids, num_expected;
        int32_t *ids = golden_ids(json_object_get(prompt, "prompt_ids"), &num_prompt_ids);
        int32_t *expected = golden_ids(json_object_get(prompt, "fp32_greedy_ids"), &num_expected);
        assert_int_equal(num_expected, NUM_GREEDY);
        ids = realloc(ids, (size_t)(num_prompt_ids + NUM_GREEDY) * sizeof(*ids));
        assert_non_null(ids);
        memcpy(ids + num_prompt_ids, expected, NUM_GREEDY * sizeof(*ids));
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            struct imbrex_engine *engine =
                golden_engine(fixture->model, cpu_paths[path].features, thread_counts[path % 2]);
            int32_t found[NUM_STEPS];
            int32_t num_found =
                golden_greedy(engine, fixture->model, ids, num_prompt_ids, NUM_STEPS, found);
            assert_int_equal(num_found, NUM_STEPS);
            for (int32_t step = 0; step < NUM_STEPS; step++) {
                if (found[step] == expected[step]) {
                    continue;
                }
                double gap = reference_gap(fixture->model, ids, num_prompt_ids + step);
                if (gap >= TIE_GAP) {
                    fail_msg("prompt %zu, path %d, step %d: expected %d, found %d, fp64 gap %.4f",
                             i, path, step, expected[step], found[step], gap);
                }
                print_message("prompt %zu, path %d: tie at step %d (fp64 gap %.6f): the rest is "
                              "not compared\n",
                              i, path, step, gap);
                break;
            }
            imbrex_engine_destroy(engine);
        }
        free(ids);
        free(expected);
    }
}

/* Catches: logits that are nearly right. Against Hugging Face's ten best, and all of them against
 * the fp64 reference. */
static void test_logits(void **state)
{
    struct fixture *fixture = *state;
    json_t *prompts = json_object_get(fixture->golden, "prompts");
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        json_t *prompt = json_array_get(prompts, i);
        json_t *top_logits = json_object_get(prompt, "fp32_last_top10_logits");
        int32_t num_ids, num_top;
        int32_t *ids = golden_ids(json_object_get(prompt, "prompt_ids"), &num_ids);
        int32_t *top_ids = golden_ids(json_object_get(prompt, "fp32_last_top10_ids"), &num_top);
        struct forward_fp64 reference;
        assert_int_equal(num_top, 10);
        forward_fp64_init(&reference, fixture->model, num_ids);
        for (int32_t j = 0; j < num_ids; j++) {
            forward_fp64_push(&reference, ids[j]);
        }
        for (int32_t path = 0; path < CPU_NUM_FP32_PATHS; path++) {
            if (!golden_has_path(path)) {
                continue;
            }
            struct imbrex_engine *engine =
                golden_engine(fixture->model, cpu_paths[path].features, 2);
            const float *logits = golden_logits(engine, ids, num_ids);
            for (int32_t j = 0; j < num_top; j++) {
                double expected = json_real_value(json_array_get(top_logits, (size_t)j));
                if (!(fabs(logits[top_ids[j]] - expected) < 2e-2)) {
                    fail_msg("prompt %zu, path %d, id %d: expected %.5f, found %.5f", i, path,
                             top_ids[j], expected, logits[top_ids[j]]);
                }
            }
            for (int32_t id = 0; id < fixture->model->config.vocab_size; id++) {
                if (!(fabs(logits[id] - reference.logits[id]) < 1e-3)) {
                    fail_msg("prompt %zu, path %d, id %d: fp64 %.6f, found %.6f", i, path, id,
                             reference.logits[id], logits[id]);
                }
            }
            imbrex_engine_destroy(engine);
        }
        forward_fp64_deinit(&reference);
        free(ids);
        free(top_ids);
    }
}

/* Catches: results that depend on the number of threads or on how the prompt was cut. */
static void test_bit_equal(void **state)
{
    struct fixture *fixture = *state;
    json_t *rows = golden_read_json(FOLDER "/val_ids.json");
    int32_t num_ids;
    int32_t *ids = golden_ids(rows, &num_ids);
    golden_expect_bit_equal(fixture->model, ids, 150, CPU_NUM_PATHS);
    free(ids);
    json_decref(rows);
}

/* nll per token over the first num_rows rows of the validation ids, each row scored alone. */
static double validation_nll(struct imbrex_engine *engine, const int32_t *ids, int32_t num_rows)
{
    struct imbrex_error err;
    double nll[WINDOW];
    double sum = 0.0;
    for (int32_t row = 0; row < num_rows; row++) {
        golden_check(imbrex_engine_score(engine, ids + row * WINDOW, WINDOW, nll, &err), &err);
        for (int32_t i = 0; i < WINDOW - 1; i++) {
            sum += nll[i];
        }
    }
    return sum / ((double)num_rows * (WINDOW - 1));
}

/* Catches: errors too small to change a greedy id that add up over long contexts. The slow
 * reference scores a part, which must agree with the fast path on the same part. */
static void test_validation_nll(void **state)
{
    struct fixture *fixture = *state;
    json_t *rows = golden_read_json(FOLDER "/val_ids.json");
    int32_t num_ids;
    int32_t *ids = golden_ids(rows, &num_ids);
    double golden = json_real_value(json_object_get(fixture->golden, "val_nll_per_token"));
    int32_t num_rows = num_ids / WINDOW;
    assert_int_equal(num_rows, 116);

    struct imbrex_engine *engine = golden_engine(fixture->model, IMBREX_CPU_ALL, 2);
    struct imbrex_engine *reference = golden_engine(fixture->model, 0, 2);
    /* All rows take minutes under a sanitizer and hold nothing for it that those below do not. */
    int32_t num_compared = TEST_SANITIZED ? 1 : 4;
    if (!TEST_SANITIZED) {
        double found = validation_nll(engine, ids, num_rows);
        print_message("nll per token: golden %.6f, found %.6f\n", golden, found);
        assert_true(fabs(found - golden) < 0.002 * golden);
    }
    double part = validation_nll(engine, ids, num_compared);
    double reference_part = validation_nll(reference, ids, num_compared);
    assert_true(fabs(part - reference_part) < 1e-5 * reference_part);
    imbrex_engine_destroy(engine);
    imbrex_engine_destroy(reference);
    free(ids);
    json_decref(rows);
}

/* An engine on the best path that rounds activations, or the running test is skipped. */
static struct imbrex_engine *rounding_engine(struct imbrex_model *model)
{
    for (int32_t path_idx = CPU_NUM_PATHS - 1; path_idx >= CPU_NUM_FP32_PATHS; path_idx--) {
        const struct cpu_path *path = &cpu_paths[path_idx];
        struct imbrex_memory_plan plan;
        struct imbrex_engine *engine = golden_engine(model, path->features, 2);
        imbrex_engine_memory_plan(engine, &plan);
        if (strcmp(plan.kernels, path->name) == 0) {
            print_message("path %s\n", path->name);
            return engine;
        }
        imbrex_engine_destroy(engine);
    }
    print_message("skipped: this CPU has no path that rounds activations\n");
    skip();
    return NULL;
}

/* Catches: activations of the path bf16 that are rounded twice, cut, or packed in a wrong place,
 * where a bound of bf16 on each product alone would let a small bias pass. */
static void test_rounded_nll(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = rounding_engine(fixture->model);
    struct imbrex_engine *exact = golden_engine(fixture->model, IMBREX_CPU_ALL, 2);
    json_t *rows = golden_read_json(FOLDER "/val_ids.json");
    int32_t num_ids;
    int32_t *ids = golden_ids(rows, &num_ids);
    int32_t num_rows = TEST_SANITIZED ? 1 : 16;
    double expected = validation_nll(exact, ids, num_rows);
    double found = validation_nll(engine, ids, num_rows);
    print_message("nll per token: fp32 activations %.6f, bf16 %.6f\n", expected, found);
    assert_true(fabs(found - expected) < 0.001 * expected);
    imbrex_engine_destroy(engine);
    imbrex_engine_destroy(exact);
    free(ids);
    json_decref(rows);
}

static int32_t best_id(const float *logits, int32_t num_ids)
{
    int32_t best = 0;
    for (int32_t id = 1; id < num_ids; id++) {
        best = logits[id] > logits[best] ? id : best;
    }
    return best;
}

/* Catches: errors of the path bf16 that are larger than its rounding, after each id of the golden
 * texts. */
static void test_rounded_argmax(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = rounding_engine(fixture->model);
    json_t *prompts = json_object_get(fixture->golden, "prompts");
    int32_t num_differing = 0;
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        json_t *prompt = json_array_get(prompts, i);
        int32_t num_prompt_ids, num_expected;
        int32_t *ids = golden_ids(json_object_get(prompt, "prompt_ids"), &num_prompt_ids);
        int32_t *expected = golden_ids(json_object_get(prompt, "fp32_greedy_ids"), &num_expected);
        ids = realloc(ids, (size_t)(num_prompt_ids + num_expected) * sizeof(*ids));
        assert_non_null(ids);
        memcpy(ids + num_prompt_ids, expected, (size_t)num_expected * sizeof(*ids));
        for (int32_t step = 0; step < num_expected; step++) {
            const float *logits = golden_logits(engine, ids, num_prompt_ids + step);
            int32_t found = best_id(logits, fixture->model->config.vocab_size);
            if (found == expected[step]) {
                continue;
            }
            double gap = reference_gap(fixture->model, ids, num_prompt_ids + step);
            if (gap >= ROUNDED_GAP) {
                fail_msg("prompt %zu, step %d: expected %d, found %d, fp64 gap %.4f", i, step,
                         expected[step], found, gap);
            }
            num_differing++;
        }
        free(ids);
        free(expected);
    }
    print_message("%d ids differ where the fp64 gap is below %.1f\n", num_differing, ROUNDED_GAP);
    imbrex_engine_destroy(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),      cmocka_unit_test(test_logits),
        cmocka_unit_test(test_bit_equal),   cmocka_unit_test(test_validation_nll),
        cmocka_unit_test(test_rounded_nll), cmocka_unit_test(test_rounded_argmax),
    };
    return cmocka_run_group_tests_name("golden_qwen2_tiny", tests, open_fixture, close_fixture);
}
