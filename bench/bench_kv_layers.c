/* SPDX-License-Identifier: Apache-2.0 */
/* The time to the first token of a prompt whose beginning lies in RAM: held until all blocks are
 * up, or computed behind them layer by layer; and what others that decode meanwhile lose by it.
 * usage: bench_kv_layers DEVICE MODEL CACHED NEW ROUNDS DECODERS JSON
 *
 * The prompt has CACHED + NEW random ids, CACHED in whole blocks. In each round, one after the
 * other, every second round the other way round, with a salt that nobody had before:
 *
 *   computed   the cache has nothing of it
 *   resident   it has the first CACHED in the first tier
 *   held       they lie in RAM, and come up before the step
 *   2, 4, 8    they lie in RAM, and come up in so many groups of layers under the step, whatever
 *              others lose by it
 *   own        the same in as many groups as the engine chooses, if it does so
 *
 * first alone in the engine, then, with DECODERS, beside so many sequences that decode behind 2,048
 * tokens and more. Before each such prompt they decode by themselves; their gaps between two tokens
 * are told of then, and from the prompt's arrival to its first token.
 *
 * Checked: how many tokens were cached and came from RAM, that the start was layer-wise or not, and
 * that all but `computed`, whose prompt is cut otherwise, draw the same ids. Beside decoders, whose
 * growing contexts may change how attention is cut, ids are looked at up to the first, and at most
 * one in ten may be another. Clock and power of a GPU are those of rounds that are not timed. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/gpu_meter.h"
#include "cli/report_header.h"
#include "cli/spread.h"
#include "engine/engine.h"

enum {
    MAX_ROUNDS = 64,
    MAX_TOKENS = 1 << 16,
    NUM_DRAWN = 8,
    NUM_WARM_ROUNDS = 2,
    SETTLE_NS = 5000000,
    MAX_DECODERS = 64,
    DECODER_TOKENS = 2048,
    MAX_DECODED = 1024, /* of each, in a round */
    NUM_WARM_STEPS = 4, /* of the decoders, after a pause */
    NUM_STEPS = 20,     /* of the decoders by themselves, before each prompt */
    MAX_GAPS = 1 << 16,
};

enum mode {
    MODE_COMPUTED,
    MODE_RESIDENT,
    MODE_HELD,
    MODE_2,
    MODE_4,
    MODE_8,
    MODE_OWN,
    NUM_MODES,
};

static const char *const mode_names[NUM_MODES] = {"computed", "resident", "held", "2 groups",
                                                  "4 groups", "8 groups", "own"};

/* Times between two tokens of a decoder. */
struct gaps {
    double ms[MAX_GAPS];
    int32_t num_gaps;
};

struct decoder {
    struct imbrex_request *request;
    struct gaps **gaps; /* where its gaps go; NULL there: nowhere */
    int64_t last_ns;    /* of its last token; 0: none yet */
    bool has_ended;
};

/* What was measured of a mode, [num_rounds]. */
struct outcome {
    double ttft_ms[MAX_ROUNDS];
    double lost_ms[MAX_ROUNDS]; /* by which the decoders are later for it */
    struct gaps gaps;           /* from the prompt's arrival to its first token */
    int32_t num_layered;        /* starts */
};

/* Of all modes, alone or beside decoders. */
struct setting {
    int32_t num_decoders;
    struct outcome outcomes[NUM_MODES];
    struct gaps before; /* the decoders by themselves */
    int32_t expected_ids[NUM_DRAWN];
    int32_t num_expected; /* 0: not known yet */
    int32_t num_other;    /* prompts that drew others */
    struct gpu_reading reading;
};

struct bench {
    const char *model_path, *device_text;
    struct imbrex_model *model;
    struct imbrex_engine *engine;
    int32_t num_cached, num_new, num_rounds, num_decoders;
    int32_t prompt_ids[MAX_TOKENS];
    int32_t decoder_ids[DECODER_TOKENS + MAX_DECODERS]; /* each begins one further in */
    struct decoder decoders[MAX_DECODERS];
    struct gaps *gaps; /* of the decoders, now */
    uint64_t salt;     /* of the last prompt */
    int32_t num_groups[NUM_MODES];
    int64_t block_ns[NUM_MODES]; /* to bring a block up, as measured when the engine was made */
    struct setting alone, beside;
    struct gpu_meter *meter;
    struct gpu_description gpu;
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

/* ---- those that decode ----------------------------------------------------------------------- */

static bool take_decoded(void *user, const struct imbrex_token_event *event)
{
    struct decoder *decoder = user;
    int64_t now_ns = clock_now_ns();
    struct gaps *gaps = *decoder->gaps;
    decoder->has_ended |= event->token_id < 0;
    if (gaps != NULL && decoder->last_ns > 0 && gaps->num_gaps < MAX_GAPS) {
        gaps->ms[gaps->num_gaps] = (double)(now_ns - decoder->last_ns) / 1e6;
        gaps->num_gaps++;
    }
    decoder->last_ns = now_ns;
    return true;
}

static enum imbrex_status step(struct bench *bench, struct imbrex_error *err)
{
    bool has_work;
    return imbrex_engine_step(bench->engine, &has_work, err);
}

static enum imbrex_status start_decoders(struct bench *bench, int32_t num_decoders,
                                         struct imbrex_error *err)
{
    for (int32_t i = 0; i < num_decoders; i++) {
        struct decoder *decoder = &bench->decoders[i];
        struct imbrex_request_options options = imbrex_request_options_default(bench->model);
        *decoder = (struct decoder){.gaps = &bench->gaps};
        options.prompt_ids = bench->decoder_ids + i;
        options.num_prompt_ids = DECODER_TOKENS;
        options.max_tokens = MAX_DECODED;
        options.ignore_eos = true;
        options.temperature = 0.0f;
        options.callback = take_decoded;
        options.user = decoder;
        TRY(imbrex_request_submit(bench->engine, &options, &decoder->request, err));
    }
    for (int32_t i = 0; i < num_decoders; i++) {
        while (bench->decoders[i].last_ns == 0) {
            TRY(step(bench, err));
        }
    }
    return IMBREX_STATUS_OK;
}

static void stop_decoders(struct bench *bench)
{
    bench->gaps = NULL;
    for (int32_t i = 0; i < MAX_DECODERS; i++) {
        imbrex_request_destroy(bench->decoders[i].request);
        bench->decoders[i].request = NULL;
    }
}

static enum imbrex_status decode(struct bench *bench, struct gaps *gaps, int32_t num_steps,
                                 struct imbrex_error *err)
{
    bench->gaps = gaps;
    for (int32_t i = 0; i < num_steps; i++) {
        TRY(step(bench, err));
    }
    bench->gaps = NULL;
    return IMBREX_STATUS_OK;
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

/* gaps: of the decoders until the first token; NULL: nowhere. */
static enum imbrex_status run_prompt(struct bench *bench, int32_t num_ids, int32_t max_tokens,
                                     struct gaps *gaps, struct drawn *drawn,
                                     struct imbrex_request_metrics *metrics,
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
    enum imbrex_status status = IMBREX_STATUS_OK;
    bench->gaps = gaps;
    while (status == IMBREX_STATUS_OK && drawn->num_ids == 0) {
        status = step(bench, err);
    }
    bench->gaps = NULL;
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_request_wait(request, err);
    }
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
    prefix_tiers_set_groups(tiers, executor_kv(bench->engine->executor), bench->num_groups[mode]);
    tiers->sliced_block_ns = bench->block_ns[mode];
    tiers->max_layered_ns = mode == MODE_OWN ? 0 : INT64_MAX;
    if (mode == MODE_COMPUTED) {
        return IMBREX_STATUS_OK;
    }
    TRY(run_prompt(bench, bench->num_cached + 1, 1, NULL, &drawn, &metrics, err));
    return mode == MODE_RESIDENT ? IMBREX_STATUS_OK : clear(bench);
}

static bool are_expected(struct setting *setting, enum mode mode, const struct drawn *drawn)
{
    size_t num_compared = setting->num_decoders == 0 ? NUM_DRAWN : 1;
    if (mode == MODE_COMPUTED || drawn->num_ids < NUM_DRAWN) {
        return drawn->num_ids == NUM_DRAWN;
    }
    if (setting->num_expected == 0) {
        setting->num_expected = drawn->num_ids;
        memcpy(setting->expected_ids, drawn->ids, sizeof(drawn->ids));
    }
    bool are_same =
        memcmp(setting->expected_ids, drawn->ids, num_compared * sizeof(*drawn->ids)) == 0;
    setting->num_other += !are_same;
    return are_same || setting->num_decoders > 0;
}

/* The decoders by themselves, then the prompt. lost_ms: by which it makes each of them later. */
static enum imbrex_status run_both(struct bench *bench, struct setting *setting,
                                   struct outcome *outcome, double *lost_ms, struct drawn *drawn,
                                   struct imbrex_request_metrics *metrics, struct imbrex_error *err)
{
    int32_t begin = setting->before.num_gaps, first = outcome->gaps.num_gaps;
    if (setting->num_decoders > 0) {
        TRY(decode(bench, NULL, NUM_WARM_STEPS, err));
        TRY(decode(bench, &setting->before, NUM_STEPS, err));
    }
    TRY(run_prompt(bench, bench->num_cached + bench->num_new, NUM_DRAWN, &outcome->gaps, drawn,
                   metrics, err));
    double usual_ms =
        spread_quantile(setting->before.ms + begin, setting->before.num_gaps - begin, 0.5);
    *lost_ms = 0;
    for (int32_t i = first; i < outcome->gaps.num_gaps; i++) {
        *lost_ms += (outcome->gaps.ms[i] - usual_ms) / setting->num_decoders;
    }
    return IMBREX_STATUS_OK;
}

static bool have_ended(const struct bench *bench, const struct setting *setting)
{
    for (int32_t i = 0; i < setting->num_decoders; i++) {
        if (bench->decoders[i].has_ended) {
            return true;
        }
    }
    return setting->before.num_gaps == MAX_GAPS;
}

/* round: negative: it does not count. */
static int run_mode(struct bench *bench, struct setting *setting, enum mode mode, int32_t round,
                    struct imbrex_error *err)
{
    static struct outcome ignored;
    struct outcome *outcome = round >= 0 ? &setting->outcomes[mode] : &ignored;
    int32_t num_before = setting->before.num_gaps;
    double lost_ms;
    struct drawn drawn;
    struct imbrex_request_metrics metrics;
    struct imbrex_engine_metrics before, after;
    ignored.gaps.num_gaps = 0;
    if (prepare(bench, mode, err) != IMBREX_STATUS_OK) {
        return fail(mode_names[mode], err);
    }
    imbrex_engine_read_metrics(bench->engine, &before);
    if (run_both(bench, setting, outcome, &lost_ms, &drawn, &metrics, err) != IMBREX_STATUS_OK) {
        return fail(mode_names[mode], err);
    }
    imbrex_engine_read_metrics(bench->engine, &after);
    uint64_t num_layered = after.num_kv_layered - before.num_kv_layered;
    int32_t num_cached = mode == MODE_COMPUTED ? 0 : bench->num_cached;
    int32_t num_host = mode <= MODE_RESIDENT ? 0 : bench->num_cached;
    if (metrics.num_cached_tokens != num_cached || metrics.num_host_tokens != num_host ||
        (mode != MODE_OWN && num_layered != (mode > MODE_HELD)) ||
        !are_expected(setting, mode, &drawn) || have_ended(bench, setting)) {
        fprintf(stderr, "%s: %d tokens cached, %d from RAM, %" PRIu64 " starts in layers\n",
                mode_names[mode], metrics.num_cached_tokens, metrics.num_host_tokens, num_layered);
        return fail("not what was to be measured, or other ids", NULL);
    }
    if (round >= 0) {
        outcome->ttft_ms[round] = (double)metrics.ttft_ns / 1e6;
        outcome->lost_ms[round] = lost_ms;
        outcome->num_layered += (int32_t)num_layered;
    } else {
        setting->before.num_gaps = num_before;
    }
    return 0;
}

#if IMBREX_CUDA
static void see_gpu(struct bench *bench, struct setting *setting, int32_t round, bool is_begun)
{
    if (bench->meter != NULL && round == -NUM_WARM_ROUNDS && !is_begun) {
        gpu_meter_begin(bench->meter);
    } else if (bench->meter != NULL && round < 0) {
        gpu_meter_sample(bench->meter);
    } else if (bench->meter != NULL && round == 0 && !is_begun) {
        gpu_meter_end(bench->meter, &setting->reading);
    }
}
#else
static void see_gpu(struct bench *bench, struct setting *setting, int32_t round, bool is_begun)
{
    (void)bench;
    (void)setting;
    (void)round;
    (void)is_begun;
}
#endif

static int measure(struct bench *bench, struct setting *setting, struct imbrex_error *err)
{
    for (int32_t round = -NUM_WARM_ROUNDS; round < bench->num_rounds; round++) {
        see_gpu(bench, setting, round, false);
        if (start_decoders(bench, setting->num_decoders, err) != IMBREX_STATUS_OK) {
            return fail("decoders", err);
        }
        for (int32_t i = 0; i < NUM_MODES; i++) {
            int32_t mode = round % 2 == 0 ? i : NUM_MODES - 1 - i;
            if (run_mode(bench, setting, (enum mode)mode, round, err) != 0) {
                return 1;
            }
            see_gpu(bench, setting, round, true);
        }
        stop_decoders(bench);
    }
    int32_t num_prompts = (bench->num_rounds + NUM_WARM_ROUNDS) * (NUM_MODES - 1);
    return setting->num_other <= num_prompts / 10 ? 0 : fail("too many other ids", NULL);
}

/* ---- the bench ------------------------------------------------------------------------------- */

static void draw_ids(uint64_t *state, int32_t vocab_size, int32_t num_ids, int32_t *ids)
{
    for (int32_t i = 0; i < num_ids; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((*state >> 33) % (uint64_t)vocab_size);
    }
}

/* Into blocks that nobody uses yet. */
static enum imbrex_status measure_groups(struct bench *bench)
{
    static const int32_t num_groups[NUM_MODES] = {1, 1, 1, 2, 4, 8, 1};
    struct prefix_tiers *tiers = &bench->engine->tiers;
    memcpy(bench->num_groups, num_groups, sizeof(num_groups));
    bench->num_groups[MODE_OWN] = tiers->num_groups;
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        prefix_tiers_set_groups(tiers, executor_kv(bench->engine->executor),
                                bench->num_groups[mode]);
        bench->block_ns[mode] = tiers->block_ns;
        if (tiers->num_groups > 1) {
            TRY(kv_tiers_measure_sliced(tiers->tiers, bench->engine->kv_pool.num_blocks,
                                        &bench->block_ns[mode]));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_meter(struct bench *bench, struct imbrex_error *err)
{
#if IMBREX_CUDA
    struct imbrex_memory_plan plan;
    imbrex_engine_memory_plan(bench->engine, &plan);
    if (strcmp(plan.device, "cuda") == 0) {
        if (gpu_meter_open(plan.device_idx, &bench->meter) != 0) {
            return error_set(err, IMBREX_STATUS_DEVICE, "expected a meter of the GPU");
        }
        gpu_meter_describe(bench->meter, &bench->gpu);
    }
#else
    (void)bench;
    (void)err;
#endif
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create(struct bench *bench, struct imbrex_error *err)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    struct imbrex_model_info info;
    int32_t num_tokens = bench->num_cached + bench->num_new + NUM_DRAWN;
    int32_t num_decoded = bench->num_decoders > 0 ? DECODER_TOKENS + MAX_DECODED : 0;
    uint64_t state = 1;
    TRY(imbrex_model_open(bench->model_path, NULL, &bench->model, err));
    imbrex_model_describe(bench->model, &info);
    draw_ids(&state, info.vocab_size, num_tokens - NUM_DRAWN, bench->prompt_ids);
    draw_ids(&state, info.vocab_size, DECODER_TOKENS + MAX_DECODERS, bench->decoder_ids);
    options.device = bench->device_text;
    options.context_size = num_tokens > num_decoded ? num_tokens : num_decoded;
    options.kv_cache_tokens = 4 * num_tokens + bench->num_decoders * (num_decoded + KV_BLOCK_SIZE);
    options.max_running = 4 + bench->num_decoders;
    options.kv_host_bytes = (size_t)2 << 30;
    TRY(imbrex_engine_create(bench->model, &options, &bench->engine, err));
    bench->engine->tiers.patience_ns = INT64_MAX; /* nothing is computed that could come up */
    bench->beside.num_decoders = bench->num_decoders;
    TRY(measure_groups(bench));
    return open_meter(bench, err);
}

static json_t *report_gaps(const struct gaps *gaps)
{
    return json_pack("{s:i, s:f, s:f, s:f}", "gaps", (int)gaps->num_gaps, "p50_ms",
                     spread_quantile(gaps->ms, gaps->num_gaps, 0.5), "p99_ms",
                     spread_quantile(gaps->ms, gaps->num_gaps, 0.99), "longest_ms",
                     spread_quantile(gaps->ms, gaps->num_gaps, 1));
}

static json_t *report_mode(const struct bench *bench, const struct setting *setting, enum mode mode)
{
    const struct outcome *outcome = &setting->outcomes[mode];
    const double *ttft_ms = outcome->ttft_ms;
    json_t *values = json_array();
    for (int32_t i = 0; i < bench->num_rounds; i++) {
        (void)json_array_append_new(values, json_real(ttft_ms[i]));
    }
    double median = spread_quantile(ttft_ms, bench->num_rounds, 0.5);
    double p10 = spread_quantile(ttft_ms, bench->num_rounds, 0.1);
    double p90 = spread_quantile(ttft_ms, bench->num_rounds, 0.9);
    json_t *row = json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:I, s:o}", "mode", mode_names[mode],
                            "groups", (int)bench->num_groups[mode], "layered",
                            (int)outcome->num_layered, "ttft_ms", median, "p10_ms", p10, "p90_ms",
                            p90, "block_ns", (json_int_t)bench->block_ns[mode], "rounds", values);
    printf("%-9s %8.2f ms to the first token (p10 %.2f, p90 %.2f), %d starts in layers",
           mode_names[mode], median, p10, p90, (int)outcome->num_layered);
    if (setting->num_decoders > 0) {
        double lost_ms = spread_quantile(outcome->lost_ms, bench->num_rounds, 0.5);
        printf("; decoders: p50 %.2f, p99 %.2f ms a token, %.2f ms lost",
               spread_quantile(outcome->gaps.ms, outcome->gaps.num_gaps, 0.5),
               spread_quantile(outcome->gaps.ms, outcome->gaps.num_gaps, 0.99), lost_ms);
        (void)json_object_set_new(row, "decoders", report_gaps(&outcome->gaps));
        (void)json_object_set_new(row, "lost_ms", json_real(lost_ms));
        (void)json_object_set_new(
            row, "lost_p90_ms",
            json_real(spread_quantile(outcome->lost_ms, bench->num_rounds, 0.9)));
    }
    printf("\n");
    return row;
}

static json_t *report_setting(const struct bench *bench, const struct setting *setting)
{
    json_t *root = json_object(), *rows = json_array();
    if (setting->num_decoders > 0) {
        printf("beside %d sequences, which need %.2f ms a token by themselves (p99 %.2f):\n",
               (int)setting->num_decoders,
               spread_quantile(setting->before.ms, setting->before.num_gaps, 0.5),
               spread_quantile(setting->before.ms, setting->before.num_gaps, 0.99));
        (void)json_object_set_new(root, "sequences", json_integer(setting->num_decoders));
        (void)json_object_set_new(root, "context", json_integer(DECODER_TOKENS));
        (void)json_object_set_new(root, "by_themselves", report_gaps(&setting->before));
        (void)json_object_set_new(root, "other_ids", json_integer(setting->num_other));
    }
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        (void)json_array_append_new(rows, report_mode(bench, setting, (enum mode)mode));
    }
    if (bench->meter != NULL) {
        (void)json_object_set_new(root, "sm_clock_mhz", json_real(setting->reading.sm_clock_mhz));
        (void)json_object_set_new(root, "watts", json_real(setting->reading.watts));
    }
    (void)json_object_set_new(root, "rows", rows);
    return root;
}

static int report(const struct bench *bench, const char *path, FILE *file)
{
    json_t *root = report_header("kv_layers");
    struct imbrex_memory_plan plan;
    imbrex_engine_memory_plan(bench->engine, &plan);
    json_t *gpu = bench->meter != NULL ? json_pack("{s:s, s:s}", "name", bench->gpu.name, "driver",
                                                   bench->gpu.driver)
                                       : json_null();
    json_t *shape =
        json_pack("{s:s, s:s, s:s, s:s, s:I, s:i, s:i, s:i}", "device", plan.device, "kernels",
                  plan.kernels, "model", bench->model_path, "kv_dtype", plan.kv_dtype,
                  "block_bytes", (json_int_t)executor_kv(bench->engine->executor)->block_bytes,
                  "cached_tokens", (int)bench->num_cached, "new_tokens", (int)bench->num_new,
                  "rounds", (int)bench->num_rounds);
    (void)json_object_update(root, shape);
    json_decref(shape);
    (void)json_object_set_new(root, "gpu", gpu);
    (void)json_object_set_new(root, "alone", report_setting(bench, &bench->alone));
    if (bench->num_decoders > 0) {
        (void)json_object_set_new(root, "beside", report_setting(bench, &bench->beside));
    }
    int exit_code = report_write(path, file, root);
    json_decref(root);
    return exit_code;
}

/* In [least, most]; -1: it is not such a number. */
static int32_t read_count(const char *text, int32_t least, int32_t most)
{
    char *end;
    long value = strtol(text, &end, 10);
    return end != text && *end == '\0' && value >= least && value <= most ? (int32_t)value : -1;
}

static bool read_arguments(struct bench *bench, int argc, char **argv)
{
    if (argc != 8) {
        return false;
    }
    bench->device_text = argv[1];
    bench->model_path = argv[2];
    bench->num_cached = read_count(argv[3], 1, MAX_TOKENS / 2);
    bench->num_new = read_count(argv[4], 1, MAX_TOKENS / 2);
    bench->num_rounds = read_count(argv[5], 1, MAX_ROUNDS);
    bench->num_decoders = read_count(argv[6], 0, MAX_DECODERS);
    return bench->num_cached % KV_BLOCK_SIZE == 0 && bench->num_new > 0 && bench->num_rounds > 0 &&
           bench->num_decoders >= 0;
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    static struct bench bench;
    FILE *file;
    if (!read_arguments(&bench, argc, argv)) {
        fprintf(stderr,
                "usage: bench_kv_layers DEVICE MODEL CACHED NEW ROUNDS DECODERS JSON; CACHED is a "
                "multiple of %d, ROUNDS at most %d, DECODERS from 0 to %d\n",
                KV_BLOCK_SIZE, MAX_ROUNDS, MAX_DECODERS);
        return 2;
    }
    if (report_open(argv[7], &file) != 0) {
        return 1;
    }
    if (create(&bench, &err) != IMBREX_STATUS_OK) {
        return fail("no run", &err);
    }
    int exit_code = measure(&bench, &bench.alone, &err);
    if (exit_code == 0 && bench.num_decoders > 0) {
        exit_code = measure(&bench, &bench.beside, &err);
    }
    if (exit_code == 0) {
        exit_code = report(&bench, argv[7], file);
    }
    fclose(file);
    stop_decoders(&bench);
#if IMBREX_CUDA
    gpu_meter_close(bench.meter);
#endif
    imbrex_engine_destroy(bench.engine);
    imbrex_model_close(bench.model);
    return exit_code;
}
