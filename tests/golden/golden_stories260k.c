/* SPDX-License-Identifier: Apache-2.0 */
/* stories260K against its published greedy text and against a NumPy forward pass (golden files:
 * tests/golden/stories260K/README.md). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "forward_fp64.h"
#include "golden.h"

#define FOLDER "tests/golden/stories260K"
#define NUM_GOLDEN 255
/* On each path with each number of threads. A sanitizer sees in a few steps all that there is. */
#define NUM_STEPS (TEST_SANITIZED ? 40 : NUM_GOLDEN)

static void check_greedy(const char *path)
{
    json_t *root = golden_read_json(FOLDER "/greedy_golden.json");
    int32_t num_prompt_ids, num_expected;
    int32_t *prompt_ids = golden_ids(json_object_get(root, "prompt_ids"), &num_prompt_ids);
    int32_t *expected = golden_ids(json_object_get(root, "ids"), &num_expected);
    struct imbrex_model *model = golden_open(path);
    const int32_t thread_counts[] = {1, 2, 5};
    int32_t found[NUM_STEPS];
    assert_int_equal(num_expected, NUM_GOLDEN);
    for (int32_t i = 0; i < CPU_NUM_FP32_PATHS; i++) {
        if (!golden_has_path(i)) {
            continue;
        }
        for (size_t j = 0; j < sizeof(thread_counts) / sizeof(thread_counts[0]); j++) {
            struct imbrex_engine *engine =
                golden_engine(model, cpu_paths[i].features, thread_counts[j]);
            assert_int_equal(
                golden_greedy(engine, model, prompt_ids, num_prompt_ids, NUM_STEPS, found),
                NUM_STEPS);
            for (int32_t step = 0; step < NUM_STEPS; step++) {
                if (found[step] != expected[step]) {
                    fail_msg("%s, path %d, %d threads, step %d: expected %d, found %d", path, i,
                             thread_counts[j], step, expected[step], found[step]);
                }
            }
            imbrex_engine_destroy(engine);
        }
    }
    imbrex_model_close(model);
    free(prompt_ids);
    free(expected);
    json_decref(root);
}

/* Catches: any error of the llama forward pass on F16 weights, on any path or thread count. */
static void test_greedy_built_in(void **state)
{
    (void)state;
    check_greedy("builtin:stories260K");
}

/* Catches: the same on F32 weights, and a loader that mixes the two up. */
static void test_greedy_f32(void **state)
{
    (void)state;
    check_greedy(FOLDER);
}

struct text {
    char bytes[4096];
    size_t num_bytes;
};

static bool append_text(void *user, const struct imbrex_token_event *event)
{
    struct text *text = user;
    assert_true(text->num_bytes + event->text_bytes < sizeof(text->bytes));
    memcpy(text->bytes + text->num_bytes, event->text, event->text_bytes);
    text->num_bytes += event->text_bytes;
    return true;
}

/* Catches: streamed text that differs from the published one (a leading space kept or lost, held
 * text not flushed), and end tokens that do not end it. */
static void test_text(void **state)
{
    (void)state;
    struct imbrex_error err;
    json_t *root = golden_read_json(FOLDER "/greedy_golden.json");
    const char *expected = json_string_value(json_object_get(root, "text"));
    struct imbrex_model *model = golden_open(NULL);
    struct imbrex_engine *engine = golden_engine(model, IMBREX_CPU_ALL, 0);
    struct imbrex_request *request = NULL;
    struct imbrex_request_options options = imbrex_request_options_default(model);
    const int32_t bos = 1;
    struct text text = {0};
    options.prompt_ids = &bos;
    options.num_prompt_ids = 1;
    options.max_tokens = NUM_GOLDEN;
    options.callback = append_text;
    options.user = &text;
    golden_check(imbrex_request_submit(engine, &options, &request, &err), &err);
    golden_check(imbrex_request_wait(request, &err), &err);
    text.bytes[text.num_bytes] = '\0';
    assert_string_equal(text.bytes, expected);
    imbrex_request_destroy(request);
    imbrex_engine_destroy(engine);
    imbrex_model_close(model);
    json_decref(root);
}

/* Catches: a forward pass that is only nearly right (wrong eps, RoPE pairing, scale), which greedy
 * ids can hide. Bound: NumPy's own fp32 rounding over five layers. */
static void test_logits(void **state)
{
    (void)state;
    json_t *root = golden_read_json(FOLDER "/logits_golden.json");
    json_t *expected = json_object_get(root, "last_logits_f32");
    int32_t num_ids;
    int32_t *ids = golden_ids(json_object_get(root, "ids"), &num_ids);
    struct imbrex_model *model = golden_open(FOLDER);
    struct forward_fp64 reference;
    assert_int_equal(json_array_size(expected), model->config.vocab_size);
    forward_fp64_init(&reference, model, num_ids);
    for (int32_t i = 0; i < num_ids; i++) {
        forward_fp64_push(&reference, ids[i]);
    }
    for (int32_t i = 0; i < CPU_NUM_FP32_PATHS; i++) {
        if (!golden_has_path(i)) {
            continue;
        }
        struct imbrex_engine *engine = golden_engine(model, cpu_paths[i].features, 2);
        const float *logits = golden_logits(engine, ids, num_ids);
        for (int32_t id = 0; id < model->config.vocab_size; id++) {
            double golden = json_real_value(json_array_get(expected, (size_t)id));
            if (!(fabs(logits[id] - golden) < 2e-4)) {
                fail_msg("path %d, id %d: expected %.6f, found %.6f", i, id, golden, logits[id]);
            }
            if (!(fabs(logits[id] - reference.logits[id]) < 2e-4)) {
                fail_msg("path %d, id %d: fp64 reference %.6f, found %.6f", i, id,
                         reference.logits[id], logits[id]);
            }
        }
        imbrex_engine_destroy(engine);
    }
    forward_fp64_deinit(&reference);
    imbrex_model_close(model);
    free(ids);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_built_in),
        cmocka_unit_test(test_greedy_f32),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_logits),
    };
    return cmocka_run_group_tests_name("golden_stories260k", tests, NULL, NULL);
}
