/* SPDX-License-Identifier: Apache-2.0 */
/* What the type of keys and values costs a model: nll of texts that it is given (qwen2-tiny: its
 * validation ids; stories260K: stories that it told before). */
#include <math.h>
#include <stdlib.h>

#include "golden.h"

#define QWEN "tests/golden/qwen2-tiny-4m"
#define STORIES "builtin:stories260K"
#define MAX_IDS 256 /* of a text */
#define MAX_TEXTS 40
#define NUM_STORIES (TEST_SANITIZED ? 2 : MAX_TEXTS)
#define NUM_ROWS (TEST_SANITIZED ? 2 : 16)
#define BOS 1 /* of stories260K */

struct texts {
    int32_t ids[MAX_TEXTS][MAX_IDS];
    int32_t num_ids[MAX_TEXTS];
    int32_t num_texts;
};

static struct imbrex_engine *create_engine(struct imbrex_model *model,
                                           enum imbrex_kv_dtype kv_dtype)
{
    struct imbrex_error err;
    struct imbrex_engine *engine = NULL;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = MAX_IDS;
    options.kv_cache_tokens = MAX_TEXTS * MAX_IDS;
    options.num_threads = 2;
    options.kv_dtype = kv_dtype;
    golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
    return engine;
}

static double mean_nll(struct imbrex_model *model, enum imbrex_kv_dtype kv_dtype,
                       const struct texts *texts)
{
    struct imbrex_error err;
    struct imbrex_engine *engine = create_engine(model, kv_dtype);
    double nll[MAX_IDS], sum = 0.0;
    int32_t num_scored = 0;
    for (int32_t i = 0; i < texts->num_texts; i++) {
        golden_check(imbrex_engine_score(engine, texts->ids[i], texts->num_ids[i], nll, &err),
                     &err);
        for (int32_t j = 0; j < texts->num_ids[i] - 1; j++, num_scored++) {
            sum += nll[j];
        }
    }
    imbrex_engine_destroy(engine);
    return sum / num_scored;
}

/* Catches: a type that loses more than its bits: a scale that is not used or not the best, a row
 * that is read with another's, a rounding that is not to nearest; and one that is not in use. */
static void check_nll(struct imbrex_model *model, const char *name, const struct texts *texts)
{
    static const struct {
        const char *name;
        enum imbrex_kv_dtype kv_dtype;
        double max_change; /* of nll, relative */
    } rows[] = {{"fp16", IMBREX_KV_DTYPE_FP16, 0.0005},
                {"bf16", IMBREX_KV_DTYPE_BF16, 0.002},
                {"int8", IMBREX_KV_DTYPE_INT8, 0.005},
                {"fp8", IMBREX_KV_DTYPE_FP8, 0.005}};
    double plain = mean_nll(model, IMBREX_KV_DTYPE_AUTO, texts);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        double found = mean_nll(model, rows[i].kv_dtype, texts), change = found / plain - 1.0;
        print_message("%s, %s: nll %.5f, fp32 %.5f, %+.3f %%\n", name, rows[i].name, found, plain,
                      100.0 * change);
        /* Of two texts the mean says little. */
        double allowed = rows[i].max_change * (TEST_SANITIZED ? 4.0 : 1.0);
        if (!(fabs(change) < allowed) || found == plain) {
            fail_msg("%s, %s: nll %.5f instead of %.5f: %+.3f %%, allowed %.3f %%", name,
                     rows[i].name, found, plain, 100.0 * change, 100.0 * allowed);
        }
    }
}

static void test_qwen2_tiny(void **state)
{
    (void)state;
    struct texts *texts = calloc(1, sizeof(*texts));
    json_t *rows = golden_read_json(QWEN "/val_ids.json");
    struct imbrex_model *model = golden_open(QWEN);
    int32_t num_ids;
    int32_t *ids = golden_ids(rows, &num_ids);
    assert_true(texts != NULL && num_ids >= NUM_ROWS * MAX_IDS);
    texts->num_texts = NUM_ROWS;
    for (int32_t i = 0; i < NUM_ROWS; i++) {
        texts->num_ids[i] = MAX_IDS;
        for (int32_t j = 0; j < MAX_IDS; j++) {
            texts->ids[i][j] = ids[i * MAX_IDS + j];
        }
    }
    check_nll(model, "qwen2-tiny", texts);
    imbrex_model_close(model);
    json_decref(rows);
    free(ids);
    free(texts);
}

struct story {
    int32_t *ids, *num_ids;
};

static bool append_id(void *user, const struct imbrex_token_event *event)
{
    struct story *story = user;
    if (event->token_id >= 0 && *story->num_ids < MAX_IDS) {
        story->ids[(*story->num_ids)++] = event->token_id;
    }
    return true;
}

/* Sampled, as greedy texts are those that any change makes less likely. */
static void tell_stories(struct imbrex_model *model, struct texts *texts)
{
    static const int32_t bos = BOS;
    struct imbrex_error err;
    struct imbrex_engine *engine = create_engine(model, IMBREX_KV_DTYPE_AUTO);
    texts->num_texts = NUM_STORIES;
    for (int32_t i = 0; i < NUM_STORIES; i++) {
        struct story story = {texts->ids[i], &texts->num_ids[i]};
        struct imbrex_request *request;
        struct imbrex_request_options options = imbrex_request_options_default(model);
        options.prompt_ids = &bos;
        options.num_prompt_ids = 1;
        options.max_tokens = MAX_IDS - 1;
        options.temperature = 1.0f;
        options.seed = (uint64_t)i + 1;
        options.callback = append_id;
        options.user = &story;
        texts->ids[i][0] = bos;
        texts->num_ids[i] = 1;
        golden_check(imbrex_request_submit(engine, &options, &request, &err), &err);
        golden_check(imbrex_request_wait(request, &err), &err);
        imbrex_request_destroy(request);
        assert_true(texts->num_ids[i] > 16);
    }
    imbrex_engine_destroy(engine);
}

static void test_stories(void **state)
{
    (void)state;
    struct texts *texts = calloc(1, sizeof(*texts));
    struct imbrex_model *model = golden_open(STORIES);
    assert_non_null(texts);
    tell_stories(model, texts);
    check_nll(model, "stories260K", texts);
    imbrex_model_close(model);
    free(texts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qwen2_tiny),
        cmocka_unit_test(test_stories),
    };
    return cmocka_run_group_tests_name("golden kv_dtype", tests, NULL, NULL);
}
