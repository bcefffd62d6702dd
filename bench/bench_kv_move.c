/* SPDX-License-Identifier: Apache-2.0 */
/* KV blocks on their way while sequences decode: how fast they move, and what the steps lose by it.
 * usage: bench_kv_move DEVICE MODEL SEQUENCES CONTEXT ROUNDS JSON
 *
 * Each of SEQUENCES decodes a token a step, always the same one behind CONTEXT drawn ones, with as
 * many steps in flight as the engine has. Before a step the tiers are given moves, once, as the
 * engine does it. In each round, one after the other, every second round the other way round:
 *
 *   none     decode alone
 *   full     promotions out of RAM, as many as the tiers take
 *   budget   promotions that nobody waits for: what the planner lets through by default
 *   both     promotions, each into a block that is demoted for it
 *   pinned   no blocks, but copies of 256 MiB of pinned memory: what the link does beside decode
 *
 * and before them, without decode: the same copies one way, the other way, and both at once, and
 * promotions. Checked: each sequence draws the same id in every step, whatever moves, and what has
 * moved is, byte for byte, what it was. Clock and power of a GPU are read in runs of their own. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "cli/gpu_meter.h"
#include "cli/report_header.h"
#include "cli/spread.h"
#include "engine/executor.h"
#include "engine/prefix_prefetch.h"
#include "kv/kv_tiers.h"
#include "ops/pinned_region.h"

enum {
    COPY_BYTES = 256 << 20,
    NUM_COPIES = 4,     /* of pinned memory that are under way beside decode */
    NUM_TARGETS = 1280, /* more blocks than the tiers move at once */
    /* Between two promotions of one block each other target is demoted once: its slot stays. */
    NUM_SLOTS = 2 * NUM_TARGETS + 64,
    NUM_CHECKED = 64, /* of the last demoted blocks */
    MAX_STEP_TOKENS = 2048,
    MAX_SEQUENCES = 256,
    MAX_ROUNDS = 32,
    MAX_SAMPLES = 4096, /* steps of a mode in a round */
    NUM_WARM_STEPS = 8,
    MIN_STEPS = 16,
    SEGMENT_NS = 400000000,
    READING_NS = 700000000,
};

enum mode { MODE_NONE, MODE_FULL, MODE_BUDGET, MODE_BOTH, MODE_PINNED, NUM_MODES };

static const char *const mode_names[NUM_MODES] = {"none", "full", "budget", "both", "pinned"};

enum link { LINK_IN, LINK_OUT, LINK_BOTH_IN, LINK_BOTH_OUT, LINK_PROMOTIONS, NUM_LINKS };

static const char *const link_names[NUM_LINKS] = {"pinned in", "pinned out", "pinned in of both",
                                                  "pinned out of both", "promotions"};

/* Bytes that were seen to have arrived, from one moment of looking to another. */
struct arrivals {
    int64_t begin_ns, last_ns; /* begin_ns 0: nothing was seen yet */
    double num_bytes;
};

struct bench {
    const char *model_path, *device_text;
    int32_t num_seqs, context, num_rounds;
    struct device *device;
    enum device_kind kind;
    struct imbrex_model *model;
    struct executor *executor;
    struct batch_limits limits;
    struct kv_tiers *tiers;
    int64_t block_ns; /* as the tiers measured it */
    size_t block_bytes;
    struct prefetch_planner *planner;
    int32_t percent;

    /* The decoding sequences. */
    struct sequence sequences[MAX_SEQUENCES];
    int32_t *token_ids;    /* [num_seqs, context + 1] */
    int32_t *block_tables; /* [num_seqs, limits.max_blocks] */
    struct step_row rows[MAX_SEQUENCES];
    int32_t drawn[MAX_SEQUENCES]; /* -1: not yet */
    int32_t num_in_flight;
    int64_t collected_ns;

    /* Blocks [first_target, first_target + NUM_TARGETS) are nobody's. */
    int32_t first_target;
    int64_t num_promotions;        /* that were asked for */
    int64_t next_key;              /* of a demotion; those below NUM_TARGETS are promoted */
    int64_t contents[NUM_TARGETS]; /* whose bytes a target has */
    int64_t demoted[NUM_CHECKED];  /* whose bytes the last demoted keys have */

    struct pinned_region pinned; /* COPY_BYTES in, COPY_BYTES out */
    unsigned char *copied;       /* of the device, likewise */
    struct device_event *events[NUM_COPIES];
    int32_t first_copy, num_copies;
    struct arrivals in, out;

    double *steps[NUM_MODES]; /* [num_steps] ms, of all rounds */
    int32_t num_steps[NUM_MODES];
    double step_ms[NUM_MODES][MAX_ROUNDS];                                  /* medians */
    double in_rate[NUM_MODES][MAX_ROUNDS], out_rate[NUM_MODES][MAX_ROUNDS]; /* GB/s */
    double link_rate[NUM_LINKS][MAX_ROUNDS];
    struct gpu_meter *meter;
    struct gpu_description gpu;
    struct gpu_reading readings[NUM_MODES];
};

static int fail(const char *what, const struct imbrex_error *err)
{
    fprintf(stderr, "bench_kv_move: %s%s%s\n", what, err != NULL ? ": " : "",
            err != NULL ? err->message : "");
    return 1;
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Source: Steele et al., "Fast splittable pseudorandom number generators", 2014. */
static uint64_t mix(uint64_t state)
{
    state += UINT64_C(0x9e3779b97f4a7c15);
    state = (state ^ (state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    state = (state ^ (state >> 27)) * UINT64_C(0x94d049bb133111eb);
    return state ^ (state >> 31);
}

static void see_arrivals(struct arrivals *arrivals, double num_bytes, int64_t now_ns)
{
    if (num_bytes > 0 && arrivals->begin_ns == 0) {
        arrivals->begin_ns = now_ns;
        arrivals->last_ns = now_ns;
    } else if (num_bytes > 0) {
        arrivals->num_bytes += num_bytes;
        arrivals->last_ns = now_ns;
    }
}

static double arrival_rate(const struct arrivals *arrivals)
{
    int64_t taken_ns = arrivals->last_ns - arrivals->begin_ns;
    return taken_ns > 0 ? arrivals->num_bytes / (double)taken_ns : 0;
}

/* ---- decode ---------------------------------------------------------------------------------- */

static int32_t source_token_id(const struct sequence *sequence, int32_t position)
{
    const int32_t *token_ids = sequence->owner;
    return token_ids[position];
}

static void source_sample_row(const struct sequence *sequence, const struct step_row *row,
                              int32_t draw_idx, struct sample_row *sample_row,
                              struct imbrex_logit_bias *bias)
{
    (void)sequence;
    (void)row;
    (void)bias;
    sample_row->choice_idx = draw_idx;
    sample_row->num_logprobs = -1;
    sample_row->top_p = 1.0f;
    sample_row->repetition_penalty = 1.0f;
}

static const struct batch_source source = {.token_id = source_token_id,
                                           .sample_row = source_sample_row};

static enum imbrex_status submit_rows(struct bench *bench, struct step_row *rows, int32_t num_rows)
{
    struct batch_layout layout;
    struct step_plan plan = {.rows = rows, .num_rows = num_rows};
    for (int32_t i = 0; i < num_rows; i++) {
        plan.num_tokens += rows[i].num_tokens;
        plan.num_samples += rows[i].num_draws;
    }
    batch_fill(&plan, &bench->limits, bench->block_tables, &source,
               executor_batch_memory(bench->executor), &layout);
    TRY(executor_submit(bench->executor, &plan, &layout, NULL));
    bench->num_in_flight++;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status collect(struct bench *bench, bool has_draws)
{
    struct executor_results results;
    bench->num_in_flight--;
    TRY(executor_collect(bench->executor, &results));
    for (int32_t i = 0; has_draws && i < bench->num_seqs; i++) {
        int32_t token_id = results.results[i].token_id;
        if (token_id < 0 || (bench->drawn[i] != -1 && bench->drawn[i] != token_id)) {
            fprintf(stderr, "bench_kv_move: sequence %d drew %d before, and %d now\n", (int)i,
                    (int)bench->drawn[i], (int)token_id);
            return IMBREX_STATUS_INTERNAL;
        }
        bench->drawn[i] = token_id;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_prompts(struct bench *bench)
{
    for (int32_t i = 0; i < bench->num_seqs; i++) {
        for (int32_t begin = 0; begin < bench->context; begin += MAX_STEP_TOKENS) {
            int32_t num_left = bench->context - begin;
            int32_t num_tokens = num_left < MAX_STEP_TOKENS ? num_left : MAX_STEP_TOKENS;
            struct step_row row = {.sequence = &bench->sequences[i],
                                   .slot = i,
                                   .position = begin,
                                   .num_tokens = num_tokens,
                                   .first_scored = begin + num_tokens};
            TRY(submit_rows(bench, &row, 1));
            TRY(collect(bench, false));
        }
    }
    return IMBREX_STATUS_OK;
}

/* ---- moves ----------------------------------------------------------------------------------- */

static struct kv_key key_of(int64_t key_idx, int32_t token_ids[KV_BLOCK_SIZE])
{
    memset(token_ids, 0, KV_BLOCK_SIZE * sizeof(*token_ids));
    token_ids[0] = (int32_t)key_idx;
    return (struct kv_key){.words = {mix((uint64_t)key_idx), (uint64_t)key_idx, 1, 2}};
}

/* A target block's number among all. */
static int32_t block_of(const struct bench *bench, int32_t target)
{
    return bench->first_target + target;
}

static void take_promotions(struct bench *bench)
{
    struct kv_promotion promotion;
    double num_bytes = 0;
    while (kv_tiers_poll(bench->tiers, &promotion)) {
        if (promotion.is_good) {
            bench->contents[promotion.block_idx - bench->first_target] =
                (int64_t)promotion.key.words[1];
            num_bytes += (double)bench->block_bytes;
        }
        prefetch_used(bench->planner, promotion.key.words[0]); /* if the planner knows it */
    }
    see_arrivals(&bench->in, num_bytes, clock_now_ns());
}

/* Whether the planner lets the block come up for nobody. */
static bool is_planned(struct bench *bench, const struct kv_key *key)
{
    struct prefetch_step step;
    int32_t num_steps = 0;
    const struct prefetch_request request = {.place = INT64_MAX,
                                             .needed_ns = INT64_MAX,
                                             .value = 1,
                                             .keys = &key->words[0],
                                             .num_keys = 1};
    return prefetch_plan(bench->planner, clock_now_ns(), &request, 1, NULL, 0, 1, &step, 1,
                         &num_steps) == IMBREX_STATUS_OK &&
           num_steps == 1;
}

static void demote(struct bench *bench, int32_t target)
{
    int32_t token_ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(bench->next_key, token_ids);
    bench->demoted[bench->next_key % NUM_CHECKED] = bench->contents[target];
    bench->next_key++;
    kv_tiers_demote(bench->tiers, &key, token_ids, block_of(bench, target));
}

/* The next promotion. Each time round, a target gets another block. False: not now. */
static bool promote_next(struct bench *bench, enum mode mode)
{
    int32_t token_ids[KV_BLOCK_SIZE];
    int64_t key_idx = bench->num_promotions % NUM_TARGETS;
    int64_t turn = bench->num_promotions / NUM_TARGETS;
    int32_t target = (int32_t)((bench->num_promotions + turn) % NUM_TARGETS);
    struct kv_key key = key_of(key_idx, token_ids);
    if (!kv_tiers_can_promote(bench->tiers) ||
        kv_tiers_look(bench->tiers, &key, token_ids) != KV_PLACE_HOST ||
        (mode == MODE_BUDGET && !is_planned(bench, &key))) {
        return false;
    }
    if (mode == MODE_BOTH) {
        demote(bench, target);
    }
    if (!kv_tiers_promote(bench->tiers, &key, NULL, token_ids, block_of(bench, target))) {
        return false;
    }
    bench->num_promotions++;
    return true;
}

/* Copies of pinned memory: those that are done, and new ones in their place. */
static enum imbrex_status move_pinned(struct bench *bench, bool gives)
{
    bool is_done = true;
    while (bench->num_copies > 0) {
        TRY(device_event_query(bench->device, bench->events[bench->first_copy], &is_done));
        if (!is_done) {
            break;
        }
        bench->first_copy = (bench->first_copy + 1) % NUM_COPIES;
        bench->num_copies--;
        see_arrivals(&bench->in, COPY_BYTES, clock_now_ns());
    }
    const struct device_copy copy = {
        .destination = bench->copied, .source = bench->pinned.base, .num_bytes = COPY_BYTES};
    while (gives && bench->num_copies < NUM_COPIES) {
        int32_t last = (bench->first_copy + bench->num_copies) % NUM_COPIES;
        TRY(device_copy_batch_async(bench->device, DEVICE_STREAM_KV_IN, &copy, 1));
        TRY(device_event_record(bench->device, bench->events[last], DEVICE_STREAM_KV_IN));
        bench->num_copies++;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status move(struct bench *bench, enum mode mode)
{
    struct kv_tiers_metrics before, after;
    kv_tiers_read_metrics(bench->tiers, &before);
    kv_tiers_update(bench->tiers, clock_now_ns());
    kv_tiers_read_metrics(bench->tiers, &after);
    see_arrivals(&bench->out,
                 (double)(after.num_demoted - before.num_demoted) * (double)bench->block_bytes,
                 clock_now_ns());
    take_promotions(bench);
    TRY(move_pinned(bench, mode == MODE_PINNED));
    if (mode == MODE_BUDGET) {
        prefetch_set_block_ns(bench->planner,
                              kv_tiers_block_ns(bench->tiers) * 100 / bench->percent);
    }
    if (mode == MODE_FULL || mode == MODE_BUDGET || mode == MODE_BOTH) {
        int32_t most =
            mode == MODE_BUDGET ? PREFIX_PREFETCH_MAX_PROMOTIONS : NUM_TARGETS - NUM_CHECKED;
        kv_tiers_begin_look(bench->tiers);
        for (int32_t i = 0; i < most && promote_next(bench, mode); i++) {
        }
        kv_tiers_end_look(bench->tiers);
    }
    return kv_tiers_start(bench->tiers);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static enum imbrex_status step(struct bench *bench, enum mode mode, double *step_ms)
{
    TRY(move(bench, mode));
    TRY(submit_rows(bench, bench->rows, bench->num_seqs));
    if (bench->num_in_flight == executor_max_in_flight(bench->executor)) {
        TRY(collect(bench, true));
    }
    int64_t now_ns = clock_now_ns();
    *step_ms = (double)(now_ns - bench->collected_ns) / 1e6;
    bench->collected_ns = now_ns;
    return IMBREX_STATUS_OK;
}

/* Nothing moves any more, and no step is in flight. */
static enum imbrex_status settle(struct bench *bench)
{
    while (bench->num_in_flight > 0) {
        TRY(collect(bench, true));
    }
    do {
        kv_tiers_wait(bench->tiers, 1000000);
        TRY(move(bench, MODE_NONE));
    } while (kv_tiers_is_promoting(bench->tiers) || bench->num_copies > 0);
    return IMBREX_STATUS_OK;
}

/* Steps in the mode, until it is how it stays; then counts from here. */
static enum imbrex_status begin_mode(struct bench *bench, enum mode mode)
{
    double ignored;
    TRY(settle(bench));
    for (int32_t i = 0; i < NUM_WARM_STEPS; i++) {
        TRY(step(bench, mode, &ignored));
    }
    bench->in = (struct arrivals){0};
    bench->out = (struct arrivals){0};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_mode(struct bench *bench, enum mode mode, int32_t round)
{
    double *samples = bench->steps[mode] + bench->num_steps[mode];
    int32_t num_samples = 0;
    TRY(begin_mode(bench, mode));
    int64_t begin_ns = clock_now_ns();
    while (num_samples < MAX_SAMPLES &&
           (num_samples < MIN_STEPS || clock_now_ns() - begin_ns < SEGMENT_NS)) {
        TRY(step(bench, mode, &samples[num_samples]));
        num_samples++;
    }
    bench->num_steps[mode] += num_samples;
    bench->step_ms[mode][round] = spread_quantile(samples, num_samples, 0.5);
    bench->in_rate[mode][round] = arrival_rate(&bench->in);
    bench->out_rate[mode][round] = arrival_rate(&bench->out);
    return IMBREX_STATUS_OK;
}

/* GB/s each way of so many copies of pinned memory. */
static enum imbrex_status run_link(struct bench *bench, bool is_in, bool is_out, double *gb_per_s)
{
    unsigned char *host = bench->pinned.base;
    const struct device_copy in = {
        .destination = bench->copied, .source = host, .num_bytes = COPY_BYTES};
    const struct device_copy out = {.destination = host + COPY_BYTES,
                                    .source = bench->copied + COPY_BYTES,
                                    .num_bytes = COPY_BYTES};
    int64_t begin_ns = clock_now_ns();
    for (int32_t i = 0; i < NUM_COPIES; i++) {
        if (is_in) {
            TRY(device_copy_batch_async(bench->device, DEVICE_STREAM_KV_IN, &in, 1));
        }
        if (is_out) {
            TRY(device_copy_batch_async(bench->device, DEVICE_STREAM_KV_OUT, &out, 1));
        }
    }
    TRY(device_event_record(bench->device, bench->events[0], DEVICE_STREAM_KV_IN));
    TRY(device_event_record(bench->device, bench->events[1], DEVICE_STREAM_KV_OUT));
    TRY(device_event_synchronize(bench->device, bench->events[is_in ? 0 : 1]));
    gb_per_s[0] = (double)NUM_COPIES * COPY_BYTES / (double)(clock_now_ns() - begin_ns);
    TRY(device_event_synchronize(bench->device, bench->events[is_in ? 1 : 0]));
    gb_per_s[1] = (double)NUM_COPIES * COPY_BYTES / (double)(clock_now_ns() - begin_ns);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_links(struct bench *bench, int32_t round)
{
    double rates[2];
    TRY(settle(bench));
    TRY(run_link(bench, true, false, rates));
    bench->link_rate[LINK_IN][round] = rates[0];
    TRY(run_link(bench, false, true, rates));
    bench->link_rate[LINK_OUT][round] = rates[0];
    TRY(run_link(bench, true, true, rates));
    bench->link_rate[LINK_BOTH_IN][round] = rates[0];
    bench->link_rate[LINK_BOTH_OUT][round] = rates[1];
    bench->in = (struct arrivals){0};
    for (int64_t begin_ns = clock_now_ns(); clock_now_ns() - begin_ns < SEGMENT_NS / 2;) {
        TRY(move(bench, MODE_FULL));
        kv_tiers_wait(bench->tiers, 1000000);
    }
    bench->link_rate[LINK_PROMOTIONS][round] = arrival_rate(&bench->in);
    return IMBREX_STATUS_OK;
}

#if IMBREX_CUDA
/* Clock and power of each mode: reading them takes a while, so it is not done beside timing. */
static enum imbrex_status read_gpu(struct bench *bench)
{
    double ignored;
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        TRY(begin_mode(bench, (enum mode)mode));
        gpu_meter_begin(bench->meter);
        for (int64_t begin_ns = clock_now_ns(); clock_now_ns() - begin_ns < READING_NS;) {
            TRY(step(bench, (enum mode)mode, &ignored));
            gpu_meter_sample(bench->meter);
        }
        gpu_meter_end(bench->meter, &bench->readings[mode]);
    }
    return IMBREX_STATUS_OK;
}
#endif

static enum imbrex_status run_all(struct bench *bench)
{
    double ignored[2];
    TRY(run_link(bench, true, true, ignored)); /* touches the memory */
    for (int32_t round = 0; round < bench->num_rounds; round++) {
        TRY(run_links(bench, round));
        for (int32_t i = 0; i < NUM_MODES; i++) {
            TRY(run_mode(bench, (enum mode)(round % 2 == 0 ? i : NUM_MODES - 1 - i), round));
        }
    }
#if IMBREX_CUDA
    if (bench->meter != NULL) {
        TRY(read_gpu(bench));
    }
#endif
    return settle(bench);
}

/* ---- contents -------------------------------------------------------------------------------- */

static void fill_block(const struct bench *bench, int64_t key_idx, unsigned char *block)
{
    for (size_t i = 0; i < bench->block_bytes / sizeof(uint64_t); i++) {
        uint64_t word = mix((uint64_t)key_idx << 32 | i);
        memcpy(block + i * sizeof(word), &word, sizeof(word));
    }
}

static bool is_filled(const struct bench *bench, int64_t key_idx, const unsigned char *block)
{
    for (size_t i = 0; i < bench->block_bytes / sizeof(uint64_t); i++) {
        uint64_t word;
        memcpy(&word, block + i * sizeof(word), sizeof(word));
        if (word != mix((uint64_t)key_idx << 32 | i)) {
            return false;
        }
    }
    return true;
}

/* Targets [begin, end) and pinned memory, one way or the other. */
static enum imbrex_status copy_targets(struct bench *bench, int32_t begin, int32_t end, bool is_in)
{
    for (int32_t i = begin; i < end; i++) {
        unsigned char *host = bench->pinned.base + (size_t)(i - begin) * bench->block_bytes;
        unsigned char *target =
            executor_kv(bench->executor)->blocks + (size_t)block_of(bench, i) * bench->block_bytes;
        TRY(device_copy_batch_async(bench->device, DEVICE_STREAM_KV_IN,
                                    &(struct device_copy){.destination = is_in ? target : host,
                                                          .source = is_in ? host : target,
                                                          .num_bytes = bench->block_bytes},
                                    1));
    }
    TRY(device_event_record(bench->device, bench->events[0], DEVICE_STREAM_KV_IN));
    return device_event_synchronize(bench->device, bench->events[0]);
}

static int32_t targets_at_once(const struct bench *bench)
{
    size_t num_blocks = COPY_BYTES / bench->block_bytes;
    return num_blocks < NUM_TARGETS ? (int32_t)num_blocks : NUM_TARGETS;
}

/* Block i of RAM gets the bytes of key i, by way of the device. */
static enum imbrex_status fill_slots(struct bench *bench)
{
    int32_t most = targets_at_once(bench);
    for (int32_t begin = 0; begin < NUM_TARGETS; begin += most) {
        int32_t end = begin + most < NUM_TARGETS ? begin + most : NUM_TARGETS;
        for (int32_t i = begin; i < end; i++) {
            fill_block(bench, i, bench->pinned.base + (size_t)(i - begin) * bench->block_bytes);
            bench->contents[i] = i;
        }
        TRY(copy_targets(bench, begin, end, true));
        for (int32_t i = begin; i < end; i++) {
            demote(bench, i);
        }
        TRY(kv_tiers_start(bench->tiers));
    }
    struct kv_tiers_metrics metrics;
    do {
        kv_tiers_update(bench->tiers, clock_now_ns());
        kv_tiers_read_metrics(bench->tiers, &metrics);
    } while (metrics.num_demoted + metrics.num_lost < NUM_TARGETS);
    return metrics.num_lost == 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_INTERNAL;
}

/* The last demoted blocks come up once more; then all targets must have the right bytes. */
static enum imbrex_status check_contents(struct bench *bench)
{
    int32_t most = targets_at_once(bench), token_ids[KV_BLOCK_SIZE];
    for (int32_t i = 0; i < NUM_CHECKED; i++) {
        struct kv_key key = key_of(bench->next_key - NUM_CHECKED + i, token_ids);
        if (kv_tiers_look(bench->tiers, &key, token_ids) != KV_PLACE_HOST ||
            !kv_tiers_promote(bench->tiers, &key, NULL, token_ids, block_of(bench, i))) {
            return IMBREX_STATUS_NOT_FOUND;
        }
    }
    TRY(kv_tiers_start(bench->tiers));
    TRY(settle(bench));
    for (int32_t begin = 0; begin < NUM_TARGETS; begin += most) {
        int32_t end = begin + most < NUM_TARGETS ? begin + most : NUM_TARGETS;
        TRY(copy_targets(bench, begin, end, false));
        for (int32_t i = begin; i < end; i++) {
            int64_t key_idx = bench->contents[i];
            if (key_idx >= NUM_TARGETS) { /* what was demoted has the bytes that it had */
                key_idx = bench->demoted[key_idx % NUM_CHECKED];
            }
            if (!is_filled(bench, key_idx,
                           bench->pinned.base + (size_t)(i - begin) * bench->block_bytes)) {
                fprintf(stderr,
                        "bench_kv_move: block %d: expected the bytes of block %" PRId64 "\n",
                        (int)i, key_idx);
                return IMBREX_STATUS_INTERNAL;
            }
        }
    }
    return IMBREX_STATUS_OK;
}

/* ---- report ---------------------------------------------------------------------------------- */

static json_t *spread_json(const double *values, int32_t num_values)
{
    return json_pack("{s:f, s:f, s:f}", "median", spread_quantile(values, num_values, 0.5), "p10",
                     spread_quantile(values, num_values, 0.1), "p90",
                     spread_quantile(values, num_values, 0.9));
}

/* Of each round values / others. */
static void divide(const double *values, const double *others, int32_t num_values, double *shares)
{
    for (int32_t i = 0; i < num_values; i++) {
        shares[i] = others[i] > 0 ? values[i] / others[i] : 0;
    }
}

static json_t *share_of(const double *values, const double *others, int32_t num_values)
{
    double shares[MAX_ROUNDS];
    divide(values, others, num_values, shares);
    return spread_json(shares, num_values);
}

static void print_mode(const struct bench *bench, enum mode mode)
{
    double of_step[MAX_ROUNDS], of_link[MAX_ROUNDS], of_pinned[MAX_ROUNDS];
    int32_t num_rounds = bench->num_rounds;
    divide(bench->step_ms[mode], bench->step_ms[MODE_NONE], num_rounds, of_step);
    divide(bench->in_rate[mode], bench->link_rate[LINK_IN], num_rounds, of_link);
    divide(bench->in_rate[mode], bench->in_rate[MODE_PINNED], num_rounds, of_pinned);
    printf("%-7s step %8.3f ms (p10 %8.3f, p90 %8.3f), %+6.2f %%; in %6.2f GB/s, %5.1f %% of "
           "pinned alone, %5.1f %% of pinned beside decode; out %6.2f GB/s; %4.0f MHz, %3.0f W\n",
           mode_names[mode], spread_quantile(bench->steps[mode], bench->num_steps[mode], 0.5),
           spread_quantile(bench->steps[mode], bench->num_steps[mode], 0.1),
           spread_quantile(bench->steps[mode], bench->num_steps[mode], 0.9),
           100 * (spread_quantile(of_step, num_rounds, 0.5) - 1),
           spread_quantile(bench->in_rate[mode], num_rounds, 0.5),
           100 * spread_quantile(of_link, num_rounds, 0.5),
           100 * spread_quantile(of_pinned, num_rounds, 0.5),
           spread_quantile(bench->out_rate[mode], num_rounds, 0.5),
           bench->readings[mode].sm_clock_mhz, bench->readings[mode].watts);
}

static json_t *report_mode(const struct bench *bench, enum mode mode)
{
    int32_t num_rounds = bench->num_rounds;
    json_t *row =
        json_pack("{s:s, s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "mode", mode_names[mode], "steps",
                  (int)bench->num_steps[mode], "step_ms",
                  spread_json(bench->steps[mode], bench->num_steps[mode]), "step_over_none",
                  share_of(bench->step_ms[mode], bench->step_ms[MODE_NONE], num_rounds),
                  "in_gb_per_s", spread_json(bench->in_rate[mode], num_rounds), "in_over_pinned",
                  share_of(bench->in_rate[mode], bench->link_rate[LINK_IN], num_rounds),
                  "in_over_pinned_beside_decode",
                  share_of(bench->in_rate[mode], bench->in_rate[MODE_PINNED], num_rounds),
                  "out_gb_per_s", spread_json(bench->out_rate[mode], num_rounds));
    if (bench->meter != NULL) {
        (void)json_object_set_new(row, "sm_clock_mhz",
                                  json_real(bench->readings[mode].sm_clock_mhz));
        (void)json_object_set_new(row, "watts", json_real(bench->readings[mode].watts));
    }
    return row;
}

static int report(const struct bench *bench, const char *path, FILE *file)
{
    json_t *root = report_header("kv_move");
    json_t *links = json_object(), *modes = json_array();
    for (int32_t link = 0; link < NUM_LINKS; link++) {
        printf("%-18s %6.2f GB/s without decode\n", link_names[link],
               spread_quantile(bench->link_rate[link], bench->num_rounds, 0.5));
        (void)json_object_set_new(links, link_names[link],
                                  spread_json(bench->link_rate[link], bench->num_rounds));
    }
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        print_mode(bench, (enum mode)mode);
        (void)json_array_append_new(modes, report_mode(bench, (enum mode)mode));
    }
    json_t *gpu = bench->meter != NULL ? json_pack("{s:s, s:s}", "name", bench->gpu.name, "driver",
                                                   bench->gpu.driver)
                                       : json_null();
    json_t *shape =
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:i, s:i}", "model", bench->model_path,
                  "device", device_name(bench->device), "sequences", (int)bench->num_seqs,
                  "context", (int)bench->context, "steps_in_flight",
                  (int)executor_max_in_flight(bench->executor), "block_bytes",
                  (json_int_t)bench->block_bytes, "measured_block_ns", (json_int_t)bench->block_ns,
                  "learned_block_ns", (json_int_t)kv_tiers_block_ns(bench->tiers), "budget_percent",
                  (int)bench->percent, "rounds", (int)bench->num_rounds);
    (void)json_object_update(root, shape);
    json_decref(shape);
    (void)json_object_set_new(root, "gpu", gpu);
    (void)json_object_set_new(root, "idle_gb_per_s", links);
    (void)json_object_set_new(root, "modes", modes);
    int exit_code = report_write(path, file, root);
    json_decref(root);
    return exit_code;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

static struct executor_options executor_options_of(const struct bench *bench, bool is_async)
{
    enum dtype dtype = bench->kind == DEVICE_KIND_CUDA ? DTYPE_BF16 : DTYPE_F32;
    return (struct executor_options){.limits = bench->limits,
                                     .context_size = bench->context + 2,
                                     .num_blocks = bench->first_target + NUM_TARGETS,
                                     .num_threads = thread_pool_num_cpus(),
                                     .cpu_features = IMBREX_CPU_ALL,
                                     .kind = bench->kind,
                                     .dtype = dtype,
                                     .kv_dtype = kv_dtype_of(dtype),
                                     .places_weights = is_async,
                                     .batch_invariant = bench->kind == DEVICE_KIND_CPU};
}

static enum imbrex_status create_executor(struct bench *bench, struct imbrex_error *err)
{
    bool is_async = device_is_async(bench->device);
    int32_t max_blocks = bench->context / KV_BLOCK_SIZE + 1;
    bench->limits = (struct batch_limits){.max_tokens = MAX_STEP_TOKENS,
                                          .max_seqs = bench->num_seqs,
                                          .max_blocks = max_blocks,
                                          .max_samples = MAX_STEP_TOKENS,
                                          .pads_decode = is_async};
    bench->first_target = bench->num_seqs * max_blocks;
    TRY(imbrex_model_open(bench->model_path, NULL, &bench->model, err));
    const struct executor_options options = executor_options_of(bench, is_async);
    TRY(executor_create(bench->model, bench->device, &options, &bench->executor, err));
    bench->block_bytes = executor_kv(bench->executor)->block_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_tiers(struct bench *bench, struct imbrex_error *err)
{
    static const struct log log;
    bench->percent = imbrex_engine_options_default().kv_prefetch_percent;
    TRY(kv_tiers_create(
        &(struct kv_tiers_options){.device = bench->device,
                                   .blocks = executor_kv(bench->executor)->blocks,
                                   .block_bytes = bench->block_bytes,
                                   .host_bytes = (size_t)NUM_SLOTS * bench->block_bytes,
                                   .log = &log},
        &bench->tiers, err));
    TRY(kv_tiers_measure(bench->tiers, bench->first_target + NUM_TARGETS, &bench->block_ns));
    return prefetch_planner_create(
        &(struct prefetch_options){.block_ns = bench->block_ns * 100 / bench->percent,
                                   .horizon_ns = PREFIX_PREFETCH_HORIZON_NS,
                                   .max_tracked = NUM_TARGETS},
        &bench->planner, err);
}

static enum imbrex_status create_sequences(struct bench *bench, struct imbrex_error *err)
{
    size_t num_ids = (size_t)bench->num_seqs * ((size_t)bench->context + 1);
    size_t num_entries = (size_t)bench->num_seqs * (size_t)bench->limits.max_blocks;
    bench->token_ids = malloc(num_ids * sizeof(*bench->token_ids));
    bench->block_tables = malloc(num_entries * sizeof(*bench->block_tables));
    if (bench->token_ids == NULL || bench->block_tables == NULL) {
        return error_out_of_memory(err, "the sequences", num_ids * sizeof(*bench->token_ids));
    }
    for (size_t i = 0; i < num_ids; i++) {
        bench->token_ids[i] =
            (int32_t)(mix(UINT64_C(7) << 48 | i) % (uint64_t)bench->model->config.vocab_size);
    }
    for (size_t i = 0; i < num_entries; i++) {
        bench->block_tables[i] = (int32_t)i;
    }
    for (int32_t i = 0; i < bench->num_seqs; i++) {
        struct sequence *sequence = &bench->sequences[i];
        sequence->owner = bench->token_ids + (size_t)i * ((size_t)bench->context + 1);
        sequence->num_prompt_tokens = bench->context + 1;
        bench->rows[i] = (struct step_row){.sequence = sequence,
                                           .slot = i,
                                           .position = bench->context,
                                           .num_tokens = 1,
                                           .first_scored = bench->context + 1,
                                           .num_draws = 1};
        bench->drawn[i] = -1;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create(struct bench *bench, struct imbrex_error *err)
{
    void *copied = NULL;
    struct device_choice choice, opened;
    static const struct log log;
    TRY(device_parse(bench->device_text, &choice, err));
    TRY(device_open(&choice, &log, &bench->device, &opened, err));
    bench->kind = opened.kind;
#if IMBREX_CUDA
    if (bench->kind == DEVICE_KIND_CUDA) {
        if (gpu_meter_open(opened.idx, &bench->meter) != 0) {
            return error_set(err, IMBREX_STATUS_DEVICE, "expected a meter of the GPU");
        }
        gpu_meter_describe(bench->meter, &bench->gpu);
    }
#endif
    TRY(create_executor(bench, err));
    TRY(create_tiers(bench, err));
    TRY(create_sequences(bench, err));
    TRY(pinned_region_map(bench->device, "pinned memory", 2, COPY_BYTES, 0, &bench->pinned, err));
    TRY(device_alloc(bench->device, "copies of it", 2 * (size_t)COPY_BYTES, &copied, err));
    bench->copied = copied;
    for (int32_t i = 0; i < NUM_COPIES; i++) {
        TRY(device_event_create(bench->device, &bench->events[i], err));
    }
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        size_t num_samples = (size_t)bench->num_rounds * MAX_SAMPLES;
        bench->steps[mode] = malloc(num_samples * sizeof(*bench->steps[mode]));
        if (bench->steps[mode] == NULL) {
            return error_out_of_memory(err, "samples", num_samples * sizeof(*bench->steps[mode]));
        }
    }
    return IMBREX_STATUS_OK;
}

static void destroy(struct bench *bench)
{
    for (int32_t mode = 0; mode < NUM_MODES; mode++) {
        free(bench->steps[mode]);
    }
    for (int32_t i = 0; i < NUM_COPIES; i++) {
        device_event_destroy(bench->device, bench->events[i]);
    }
    device_free(bench->device, bench->copied);
    pinned_region_unmap(&bench->pinned);
    free(bench->token_ids);
    free(bench->block_tables);
    prefetch_planner_destroy(bench->planner);
    kv_tiers_destroy(bench->tiers);
    executor_destroy(bench->executor);
    imbrex_model_close(bench->model);
#if IMBREX_CUDA
    gpu_meter_close(bench->meter);
#endif
    device_destroy(bench->device);
}

static int measure(struct bench *bench)
{
    enum imbrex_status status = fill_slots(bench);
    if (status != IMBREX_STATUS_OK) {
        return fail("the blocks could not be brought to RAM", NULL);
    }
    if ((status = read_prompts(bench)) != IMBREX_STATUS_OK ||
        (status = run_all(bench)) != IMBREX_STATUS_OK ||
        (status = check_contents(bench)) != IMBREX_STATUS_OK) {
        return fail(imbrex_status_text(status),
                    bench->device->failure.message[0] != '\0' ? &bench->device->failure : NULL);
    }
    return 0;
}

/* In [1, most]; 0: it is not such a number. */
static int32_t read_count(const char *text, int32_t most)
{
    char *end;
    long value = strtol(text, &end, 10);
    return *end == '\0' && value >= 1 && value <= most ? (int32_t)value : 0;
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    static struct bench bench;
    FILE *file;
    if (argc != 7 || (bench.num_seqs = read_count(argv[3], MAX_SEQUENCES)) == 0 ||
        (bench.context = read_count(argv[4], 1 << 20)) == 0 ||
        (bench.num_rounds = read_count(argv[5], MAX_ROUNDS)) == 0) {
        fprintf(stderr, "usage: bench_kv_move DEVICE MODEL SEQUENCES CONTEXT ROUNDS JSON\n");
        return 2;
    }
    bench.device_text = argv[1];
    bench.model_path = argv[2];
    if (report_open(argv[6], &file) != 0) {
        return 1;
    }
    int exit_code =
        create(&bench, &err) == IMBREX_STATUS_OK ? measure(&bench) : fail("no run", &err);
    if (exit_code == 0) {
        exit_code = report(&bench, argv[6], file);
    }
    fclose(file);
    /* After a failure what is under way is not waited for: the process ends. */
    if (exit_code == 0) {
        destroy(&bench);
    }
    return exit_code;
}
