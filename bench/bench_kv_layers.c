/* SPDX-License-Identifier: Apache-2.0 */
/* The time to the first token of a prompt whose beginning lies in RAM: held until all blocks are
 * up, or computed behind them layer by layer.
 * usage: bench_kv_layers DEVICE MODEL CACHED NEW ROUNDS JSON
 *
 * The prompt has CACHED + NEW random ids, CACHED in whole blocks. In each round, one after the
 * other, every second round the other way round, alone in the engine, with a salt that nobody had
 * before:
 *
 *   computed   the cache has nothing of it
 *   resident   it has the first CACHED in the first tier
 *   held       they lie in RAM, and come up before the step
 *   2, 4, 8    they lie in RAM, and come up in so many groups of layers under the step
 *
 * Checked: how many tokens were cached and came from RAM, that the start was layer-wise or not, and
 * that all but `computed`, whose prompt is cut otherwise, draw the same ids. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/report_header.h"
#include "engine/engine.h"

enum {
    MAX_ROUNDS = 64,
    MAX_TOKENS = 1 << 16,
    NUM_DRAWN = 8,
    NUM_WARM_ROUNDS = 2,
    SETTLE_NS = 5000000,
};

enum mode { MODE_COMPUTED, MODE_RESIDENT, MODE_HELD, MODE_2, MODE_4, MODE_8, NUM_MODES };

static const char *const mode_names[NUM_MODES] = {"computed", "resident", "held",
                                                  "2 groups", "4 groups", "8 groups"};
static const int32_t mode_groups[NUM_MODES] = {1, 1, 1, 2, 4, 8};

struct bench {
    const char *model_path, *device_text;
    struct imbrex_model *model;
    struct imbrex_engine *engine;
    int32_t num_cached, num_new, num_rounds;
    int32_t prompt_ids[MAX_TOKENS];
    int32_t expected_ids[NUM_DRAWN]; /* of all modes but one; [num_expected] */
    int32_t num_expected;
    uint64_t salt; /* of the last prompt */
    double ttft_ms[NUM_MODES][MAX_ROUNDS];
    int64_t block_ns[NUM_MODES]; /* as measured when the groups were made */
};

struct drawn {
    int32_t ids[NUM_DRAWN];
    int32_t num_ids;
};

static int fail(const char *what, const struct imbrex_error *err)
{
    fprintf(stderr, "bench_kv_layers: %s%s%s\n", what, err != NULL ? ": " : "",
            err != NULL ? err->message : "");
    return 1;
}

static int compare(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static double quantile(const double *values, int32_t num_values, double share)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, (size_t)num_values * sizeof(*sorted));
    qsort(sorted, (size_t)num_values, sizeof(*sorted), compare);
    return sorted[(int32_t)(share * (num_values - 1) + 0.5)];
}

/* ---- one request ----------------------------------------------------------------------------- */

static bool take_token(void *user, const struct imbrex_token_event *event)
{
    struct drawn *drawn = user;
    if (event->token_id >= 0 && drawn->num_ids < NUM_DRAWN) {
        drawn->ids[drawn->num_ids] = event->token_id;
        drawn->num_ids++;
    }
    return true;
}

static enum imbrex_status run_prompt(struct bench *bench, int32_t num_ids, int32_t max_tokens,
                                     struct drawn *drawn, struct imbrex_request_metrics *metrics,
                                     struct imbrex_error *err)
{
    struct imbrex_request *request;
    struct imbrex_request_options options = imbrex_request_options_default(bench->model);
    options.prompt_ids = bench->prompt_ids;
    options.num_prompt_ids = num_ids;
    options.salt = &bench->salt;
    options.salt_bytes = sizeof(bench->salt);
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    options.temperature = 0.0f;
    options.callback = take_token;
    options.user = drawn;
    *drawn = (struct drawn){.num_ids = 0};
    TRY(imbrex_request_submit(bench->engine, &options, &request, err));
    enum imbrex_status status = imbrex_request_wait(request, err);
    imbrex_request_read_metrics(request, metrics);
    imbrex_request_destroy(request);
    return status;
}

/* All that is idle goes down; then nothing is under way any more, and the tiers know it. */
static enum imbrex_status clear(struct bench *bench)
{
    struct prefix_tiers *tiers = &bench->engine->tiers;
    struct kv_tiers_metrics before, after;
    kv_cache_clear(bench->engine->prefix.cache, clock_now_ns());
    TRY(prefix_tiers_start(tiers));
    kv_tiers_read_metrics(tiers->tiers, &before);
    for (int64_t until_ns = clock_now_ns() + SETTLE_NS; clock_now_ns() < until_ns;) {
        kv_tiers_update(tiers->tiers, clock_now_ns());
        kv_tiers_read_metrics(tiers->tiers, &after);
        if (after.num_demoted != before.num_demoted) {
            until_ns = clock_now_ns() + SETTLE_NS;
            before = after;
        }
    }
    return IMBREX_STATUS_OK;
}

/* The first CACHED tokens are where the mode wants them, and nothing else of the prompt is
 * anywhere. */
static enum imbrex_status prepare(struct bench *bench, enum mode mode, struct imbrex_error *err)
{
    struct prefix_tiers *tiers = &bench->engine->tiers;
    struct drawn drawn;
    struct imbrex_request_metrics metrics;
    TRY(clear(bench));
    bench->salt++;
    prefix_tiers_set_groups(tiers, executor_kv(bench->engine->executor), mode_groups[mode]);
    if (mode_groups[mode] > 1) {
        TRY(kv_tiers_measure_sliced(tiers->tiers, bench->engine->kv_pool.num_blocks,
                                    &tiers->sliced_block_ns));
    }
    bench->block_ns[mode] = tiers->sliced_block_ns;
    if (mode == MODE_COMPUTED) {
        return IMBREX_STATUS_OK;
    }
    TRY(run_prompt(bench, bench->num_cached + 1, 1, &drawn, &metrics, err));
    return mode == MODE_RESIDENT ? IMBREX_STATUS_OK : clear(bench);
}

static bool are_expected(struct bench *bench, enum mode mode, const struct drawn *drawn)
{
    if (mode == MODE_COMPUTED) {
        return drawn->num_ids == NUM_DRAWN;
    }
    if (bench->num_expected == 0) {
        bench->num_expected = drawn->num_ids;
        memcpy(bench->expected_ids, drawn->ids, sizeof(drawn->ids));
    }
    return drawn->num_ids == NUM_DRAWN && bench->num_expected == NUM_DRAWN &&
           memcmp(bench->expected_ids, drawn->ids, sizeof(drawn->ids)) == 0;
}

/* round: negative: it does not count. */
static int run_mode(struct bench *bench, enum mode mode, int32_t round, struct imbrex_error *err)
{
    struct drawn drawn;
    struct imbrex_request_metrics metrics;
    struct imbrex_engine_metrics before, after;
    if (prepare(bench, mode, err) != IMBREX_STATUS_OK) {
        return fail(mode_names[mode], err);
    }
    imbrex_engine_read_metrics(bench->engine, &before);
    if (run_prompt(bench, bench->num_cached + bench->num_new, NUM_DRAWN, &drawn, &metrics, err) !=
        IMBREX_STATUS_OK) {
        return fail(mode_names[mode], err);
    }
    imbrex_engine_read_metrics(bench->engine, &after);
    uint64_t num_layered = after.num_kv_layered - before.num_kv_layered;
    int32_t num_cached = mode == MODE_COMPUTED ? 0 : bench->num_cached;
    int32_t num_host = mode <= MODE_RESIDENT ? 0 : bench->num_cached;
    if (metrics.num_cached_tokens != num_cached || metrics.num_host_tokens != num_host ||
        num_layered != (mode > MODE_HELD) || !are_expected(bench, mode, &drawn)) {
        fprintf(stderr, "%s: %d tokens cached, %d from RAM, %" PRIu64 " starts in layers\n",
                mode_names[mode], metrics.num_cached_tokens, metrics.num_host_tokens, num_layered);
        return fail("not what was to be measured, or other ids", NULL);
    }
    if (round >= 0) {
        bench->ttft_ms[mode][round] = (double)metrics.ttft_ns / 1e6;
    }
    return 0;
}

static int measure(struct bench *bench, struct imbrex_error *err)
{
    for (int32_t round = -NUM_WARM_ROUNDS; round < bench->num_rounds; round++) {
        for (int32_t i = 0; i < NUM_MODES; i++) {
            int32_t mode = round % 2 == 0 ? i : NUM_MODES - 1 - i;
            if (run_mode(bench, (enum mode)mode, round, err) != 0) {
                return 1;
            }
        }
    }
    return 0;
}

/* ---- the bench ------------------------------------------------------------------------------- */

static enum imbrex_status create(struct bench *bench, struct imbrex_error *err)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    struct imbrex_model_info info;
    int32_t num_tokens = bench->num_cached + bench->num_new + NUM_DRAWN;
    uint64_t state = 1;
    TRY(imbrex_model_open(bench->model_path, NULL, &bench->model, err));
    imbrex_model_describe(bench->model, &info);
    for (int32_t i = 0; i < num_tokens - NUM_DRAWN; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bench->prompt_ids[i] = (int32_t)((state >> 33) % (uint64_t)info.vocab_size);
    }
    options.device = bench->device_text;
    options.context_size = num_tokens;
    options.kv_cache_tokens = 4 * num_tokens;
    options.max_running = 4;
    options.kv_host_bytes = (size_t)2 << 30;
    TRY(imbrex_engine_create(bench->model, &options, &bench->engine, err));
    bench->engine->tiers.patience_ns = INT64_MAX; /* nothing is computed that could come up */
    return IMBREX_STATUS_OK;
}

static int report(const struct bench *bench, const char *path, FILE *file)
{
    json_t *root = report_header("kv_layers");
    json_t *rows = json_array();
    struct imbrex_memory_plan plan;
    imbrex_engine_memory_plan(bench->engine, &plan);
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        json_t *values = json_array();
        const double *ttft_ms = bench->ttft_ms[mode];
        for (int32_t i = 0; i < bench->num_rounds; i++) {
            (void)json_array_append_new(values, json_real(ttft_ms[i]));
        }
        double median = quantile(ttft_ms, bench->num_rounds, 0.5);
        double p10 = quantile(ttft_ms, bench->num_rounds, 0.1);
        double p90 = quantile(ttft_ms, bench->num_rounds, 0.9);
        printf("%-9s %8.2f ms to the first token (p10 %.2f, p90 %.2f); a block comes up in "
               "%.1f us\n",
               mode_names[mode], median, p10, p90, (double)bench->block_ns[mode] / 1e3);
        (void)json_array_append_new(
            rows,
            json_pack("{s:s, s:i, s:f, s:f, s:f, s:I, s:o}", "mode", mode_names[mode], "groups",
                      (int)mode_groups[mode], "ttft_ms", median, "p10_ms", p10, "p90_ms", p90,
                      "block_ns", (json_int_t)bench->block_ns[mode], "rounds", values));
    }
    (void)json_object_set_new(root, "device", json_string(plan.device));
    (void)json_object_set_new(root, "kernels", json_string(plan.kernels));
    (void)json_object_set_new(root, "model", json_string(bench->model_path));
    (void)json_object_set_new(root, "kv_dtype", json_string(plan.kv_dtype));
    (void)json_object_set_new(
        root, "block_bytes",
        json_integer((json_int_t)executor_kv(bench->engine->executor)->block_bytes));
    (void)json_object_set_new(root, "cached_tokens", json_integer(bench->num_cached));
    (void)json_object_set_new(root, "new_tokens", json_integer(bench->num_new));
    (void)json_object_set_new(root, "rows", rows);
    int exit_code = report_write(path, file, root);
    json_decref(root);
    return exit_code;
}

static int32_t read_count(const char *text, int32_t max)
{
    long count = strtol(text, NULL, 10);
    return count >= 1 && count <= max ? (int32_t)count : 0;
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    static struct bench bench;
    FILE *file;
    if (argc != 7 || (bench.num_cached = read_count(argv[3], MAX_TOKENS / 2)) == 0 ||
        bench.num_cached % KV_BLOCK_SIZE != 0 ||
        (bench.num_new = read_count(argv[4], MAX_TOKENS / 2)) == 0 ||
        (bench.num_rounds = read_count(argv[5], MAX_ROUNDS)) == 0) {
        fprintf(stderr,
                "usage: bench_kv_layers DEVICE MODEL CACHED NEW ROUNDS JSON; CACHED is a "
                "multiple of %d\n",
                KV_BLOCK_SIZE);
        return 2;
    }
    bench.device_text = argv[1];
    bench.model_path = argv[2];
    if (report_open(argv[6], &file) != 0) {
        return 1;
    }
    if (create(&bench, &err) != IMBREX_STATUS_OK) {
        return fail("no run", &err);
    }
    int exit_code = measure(&bench, &err);
    if (exit_code == 0) {
        exit_code = report(&bench, argv[6], file);
    }
    fclose(file);
    imbrex_engine_destroy(bench.engine);
    imbrex_model_close(bench.model);
    return exit_code;
}
