/* SPDX-License-Identifier: Apache-2.0 */
/* sample: every path against a plain model of the order that imbrex_request_options gives, in fp64
 * and by sorting everything; logprobs within half a unit in the last place; frequencies of many
 * draws by chi-square. */
#include "ops/sample.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread_pool.h"
#include "ops/harness.h"

enum { MAX_LOGPROBS = 20, MAX_BIAS = 8, MAX_CHECK_THREADS = 5 };

/* Columns of an output row; the alternatives' ids and logprobs follow. */
enum { COL_TOKEN, COL_LOGPROB, COL_NUM_TOP, COL_STORED, COL_TOP_IDS };
enum { COL_TOP_LOGPROBS = COL_TOP_IDS + MAX_LOGPROBS, NUM_COLS = COL_TOP_LOGPROBS + MAX_LOGPROBS };

#define NOT_STORED (-3)

struct sample_case {
    struct sample_params params;
    size_t scratch_bytes;
    float *d; /* [num_rows, NUM_COLS] */
    bool is_timed;
};

static int32_t *stored_at(const struct sample_params *params, const struct sample_row *row)
{
    return &params->history.token_ids[row->slot * params->history.stride + row->num_tokens];
}

static void run_sample(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    const struct sample_case *given = arg;
    struct sample_params params = given->params;
    params.rows += first;
    params.results += first;
    params.top_logprobs += first * params.max_logprobs;
    params.num_rows = count;
    if (!given->is_timed) {
        memset(params.scratch, 0xff, given->scratch_bytes);
    }
    for (int32_t i = 0; i < count; i++) {
        if (params.rows[i].is_stored) {
            *stored_at(&params, &params.rows[i]) = NOT_STORED;
        }
    }
    ops_sample(ops, &params);
    for (int32_t i = 0; i < count; i++) {
        const struct sample_result *result = &params.results[i];
        const struct imbrex_logprob *top = params.top_logprobs + i * params.max_logprobs;
        float *d = given->d + (first + i) * NUM_COLS;
        for (int32_t rank = 0; rank < MAX_LOGPROBS; rank++) {
            bool is_there = result->token_id >= 0 && rank < result->num_top;
            d[COL_TOP_IDS + rank] = is_there ? (float)top[rank].token_id : -1.0f;
            d[COL_TOP_LOGPROBS + rank] = is_there ? top[rank].logprob : 0.0f;
        }
        d[COL_TOKEN] = (float)result->token_id;
        d[COL_LOGPROB] = result->logprob;
        d[COL_NUM_TOP] = (float)result->num_top;
        d[COL_STORED] = params.rows[i].is_stored ? (float)*stored_at(&params, &params.rows[i])
                                                 : (float)NOT_STORED;
    }
}

/* ---- the model -------------------------------------------------------------------------------*/

struct ranked {
    double value, probability;
    int32_t token_id;
};

static int compare_ranked(const void *left, const void *right)
{
    const struct ranked *a = left, *b = right;
    if (a->value != b->value) {
        return a->value > b->value ? -1 : 1;
    }
    return a->token_id - b->token_id;
}

static int compare_ids(const void *left, const void *right)
{
    return ((const struct ranked *)left)->token_id - ((const struct ranked *)right)->token_id;
}

/* Bias and penalties of one id, by looking through everything that might name it. */
static double changed_logit(const struct sample_params *params, const struct sample_row *row,
                            int32_t token_id, double value, bool *is_forbidden)
{
    const int32_t *tokens = params->history.token_ids + row->slot * params->history.stride;
    int32_t num_before = 0, num_output = 0;
    *is_forbidden = false;
    for (int32_t i = 0; i < row->num_bias; i++) {
        const struct imbrex_logit_bias *entry = &params->bias[row->bias_begin + i];
        if (entry->token_id == token_id) {
            *is_forbidden = *is_forbidden || isinf(entry->bias);
            value = (float)(value + (double)entry->bias);
        }
    }
    bool has_penalty = row->repetition_penalty != 1.0f || row->frequency_penalty != 0.0f ||
                       row->presence_penalty != 0.0f;
    for (int32_t position = 0; has_penalty && position < row->num_tokens; position++) {
        if (tokens[position] == token_id) {
            num_before++;
            num_output += position >= row->num_prompt_tokens;
        }
    }
    if (num_before > 0) {
        double penalty = row->repetition_penalty;
        value = (float)(value > 0.0 ? value / penalty : value * penalty);
    }
    if (num_output > 0) {
        value = (float)(value - (double)(row->frequency_penalty * (float)num_output));
        value = (float)(value - (double)row->presence_penalty);
    }
    return value;
}

static double uniform_of(const struct sample_row *row)
{
    const uint32_t counter[4] = {(uint32_t)row->num_tokens, 0, (uint32_t)row->choice_idx, 0};
    const uint32_t key[2] = {row->seed_low, row->seed_high};
    uint32_t words[4];
    philox4x32(counter, key, words);
    return ldexp(words[0], -32) + ldexp(words[1] >> 11, -53);
}

static void set_probabilities(struct ranked *ranked, int32_t count, double temperature)
{
    double sum = 0.0;
    for (int32_t i = 0; i < count; i++) {
        ranked[i].probability = exp((ranked[i].value - ranked[0].value) / temperature);
        sum += ranked[i].probability;
    }
    for (int32_t i = 0; i < count; i++) {
        ranked[i].probability /= sum;
    }
}

/* The token that sampling must give; `ranked` [num_ids] is work space. */
static int32_t model_token(const struct sample_params *params, const struct sample_row *row,
                           const float *logits, struct ranked *ranked)
{
    int32_t count = 0;
    for (int32_t id = 0; id < params->num_ids; id++) {
        bool is_forbidden;
        double value = changed_logit(params, row, id, logits[id], &is_forbidden);
        if (is_forbidden) {
            continue;
        }
        if (!isfinite(value)) {
            return SAMPLE_BAD_LOGITS;
        }
        ranked[count++] = (struct ranked){.value = value, .token_id = id};
    }
    if (count == 0) {
        return SAMPLE_ALL_FORBIDDEN;
    }
    qsort(ranked, (size_t)count, sizeof(*ranked), compare_ranked);
    if (row->temperature == 0.0f) {
        return ranked[0].token_id;
    }
    bool has_top_k = row->top_k > 0 && row->top_k < params->num_ids;
    bool has_filter = has_top_k || row->top_p < 1.0f || row->min_p > 0.0f;
    count = has_top_k && row->top_k < count ? row->top_k : count;
    set_probabilities(ranked, count, row->temperature);
    double mass = 0.0;
    int32_t num_kept = 0;
    while (num_kept < count && (num_kept == 0 || row->top_p >= 1.0f || mass < row->top_p)) {
        mass += ranked[num_kept++].probability;
    }
    while (num_kept > 1 && ranked[num_kept - 1].probability < row->min_p * ranked[0].probability) {
        num_kept--;
    }
    set_probabilities(ranked, num_kept, row->temperature);
    if (!has_filter) {
        qsort(ranked, (size_t)num_kept, sizeof(*ranked), compare_ids);
    }
    double uniform = uniform_of(row);
    mass = 0.0;
    for (int32_t i = 0; i < num_kept; i++) {
        const struct ranked *next = &ranked[has_filter ? num_kept - 1 - i : i];
        mass += next->probability;
        if (uniform < mass) {
            return next->token_id;
        }
    }
    return -9; /* no id: differs from any result */
}

/* What must come out for a row, and how near. */
static void model_row(const struct sample_params *params, const struct sample_row *row,
                      struct ranked *ranked, double *expected, double *bound)
{
    const float *logits =
        params->logits + (int64_t)(row->logits_row - params->logits_row_begin) * params->vocab_size;
    bool is_finite = true;
    double max_logit = -INFINITY, sum = 0.0;
    for (int32_t id = 0; id < params->num_ids; id++) {
        is_finite = is_finite && isfinite(logits[id]);
        max_logit = fmax(max_logit, logits[id]);
    }
    int32_t token_id = SAMPLE_BAD_LOGITS;
    if (is_finite) {
        token_id = row->target_id >= 0 ? row->target_id : model_token(params, row, logits, ranked);
    }
    for (int32_t col = 0; col < NUM_COLS; col++) {
        expected[col] = col >= COL_TOP_IDS && col < COL_TOP_LOGPROBS ? -1.0 : 0.0;
        /* Nothing but the token holds without one. */
        bound[col] = token_id < 0 && (col == COL_LOGPROB || col == COL_NUM_TOP) ? INFINITY : 0.0;
    }
    expected[COL_TOKEN] = token_id;
    expected[COL_STORED] = !row->is_stored || row->target_id >= 0 ? NOT_STORED
                           : token_id >= 0                        ? token_id
                                                                  : 0;
    if (token_id < 0 || row->num_logprobs < 0) {
        return;
    }
    for (int32_t id = 0; id < params->num_ids; id++) {
        sum += exp(logits[id] - max_logit);
        ranked[id] = (struct ranked){.value = logits[id], .token_id = id};
    }
    double log_sum = max_logit + log(sum);
    expected[COL_LOGPROB] = token_id < params->num_ids ? logits[token_id] - log_sum : -INFINITY;
    bound[COL_LOGPROB] = HARNESS_UNIT * fabs(expected[COL_LOGPROB]) + 1e-12 * fabs(log_sum) + 1e-12;
    if (row->num_logprobs == 0) {
        return;
    }
    qsort(ranked, (size_t)params->num_ids, sizeof(*ranked), compare_ranked);
    int32_t num_top = row->num_logprobs < params->num_ids ? row->num_logprobs : params->num_ids;
    expected[COL_NUM_TOP] = num_top;
    for (int32_t rank = 0; rank < num_top; rank++) {
        double logprob = ranked[rank].value - log_sum;
        expected[COL_TOP_IDS + rank] = ranked[rank].token_id;
        expected[COL_TOP_LOGPROBS + rank] = logprob;
        bound[COL_TOP_LOGPROBS + rank] =
            HARNESS_UNIT * fabs(logprob) + 1e-12 * fabs(log_sum) + 1e-12;
    }
}

/* ---- cases -----------------------------------------------------------------------------------*/

enum logits_kind {
    LOGITS_NORMAL,
    LOGITS_TIES,    /* multiples of 1: long runs of equal ones */
    LOGITS_SPREAD,  /* most have no probability at all */
    LOGITS_EXTREME, /* up to 1e38: penalties overflow */
    LOGITS_BROKEN,  /* a NaN or an infinity in every other row */
    LOGITS_KIND_COUNT
};
static const char *const logits_names[] = {"normal", "ties", "spread", "extreme", "broken"};

static double random_unit(struct harness *harness)
{
    return (harness_random_below(harness, 1 << 20) + 0.5) / (1 << 20);
}

static bool coin(struct harness *harness)
{
    return harness_random_below(harness, 2) == 0;
}

static void fill_logits(struct harness *harness, float *logits, enum logits_kind kind,
                        int64_t num_rows, int32_t vocab_size)
{
    static const double scales[LOGITS_KIND_COUNT] = {3.0, 2.0, 300.0, 2.5e37, 3.0};
    static const float broken[] = {NAN, INFINITY, -INFINITY, -NAN};
    harness_fill(harness, logits, num_rows, vocab_size, vocab_size, scales[kind]);
    for (int64_t idx = 0; kind == LOGITS_TIES && idx < num_rows * vocab_size; idx++) {
        logits[idx] = rintf(logits[idx]);
    }
    for (int64_t row = 0; kind == LOGITS_BROKEN && row < num_rows; row += 2) {
        logits[row * vocab_size + harness_random_below(harness, vocab_size)] =
            broken[harness_random_below(harness, 4)];
    }
}

static void fill_row(struct harness *harness, const struct sample_params *params, int32_t row_idx,
                     struct sample_row *row)
{
    static const float temperatures[] = {0.0f, 0.0f, 0.3f, 1.0f, 1.7f, 100.0f};
    *row = (struct sample_row){
        .logits_row =
            params->logits_row_begin + harness_random_below(harness, params->num_logits_rows),
        .slot = row_idx,
        .num_tokens = 1 + harness_random_below(harness, (int32_t)params->history.stride - 1),
        .target_id = -1,
        .choice_idx = harness_random_below(harness, IMBREX_MAX_CHOICES),
        .is_stored = coin(harness),
        .num_logprobs = harness_random_below(harness, MAX_LOGPROBS + 2) - 1,
        .temperature = temperatures[harness_random_below(harness, 6)],
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .seed_low = (uint32_t)harness_random_below(harness, INT32_MAX),
        .seed_high = (uint32_t)harness_random_below(harness, INT32_MAX)};
    row->num_prompt_tokens = 1 + harness_random_below(harness, row->num_tokens);
    if (harness_random_below(harness, 6) == 0) {
        row->target_id = harness_random_below(harness, params->vocab_size);
    }
    if (coin(harness)) {
        row->top_k = 1 + harness_random_below(harness, params->num_ids + 1);
    }
    if (coin(harness)) {
        row->top_p = (float)random_unit(harness);
    }
    if (coin(harness)) {
        row->min_p = (float)(random_unit(harness) * random_unit(harness));
    }
    if (coin(harness)) {
        row->repetition_penalty = (float)exp(2.0 * random_unit(harness) - 1.0);
    }
    if (coin(harness)) {
        row->frequency_penalty = (float)(4.0 * random_unit(harness) - 2.0);
    }
    if (coin(harness)) {
        row->presence_penalty = (float)(4.0 * random_unit(harness) - 2.0);
    }
    if (coin(harness)) {
        row->num_bias = harness_random_below(harness, MAX_BIAS + 1);
        row->bias_begin = harness_random_below(harness, 4 * MAX_BIAS - row->num_bias + 1);
    }
}

/* Places everything of a case; rows and logits are still to be filled. */
static void place_case(struct harness *harness, struct sample_case *given, int32_t num_rows,
                       int32_t num_logits_rows, int32_t num_slots, int32_t stride,
                       int32_t vocab_size, int32_t num_ids)
{
    struct sample_params *params = &given->params;
    int32_t num_threads = thread_pool_num_cpus();
    num_threads = num_threads < MAX_CHECK_THREADS ? MAX_CHECK_THREADS : num_threads;
    size_t count = (size_t)num_rows;
    given->scratch_bytes = sample_scratch_bytes(vocab_size, num_threads);
    given->d = harness_place(harness, count * NUM_COLS * sizeof(float), 0);
    given->is_timed = false;
    *params = (struct sample_params){
        .logits =
            harness_place(harness, (size_t)num_logits_rows * (size_t)vocab_size * sizeof(float), 0),
        .rows = harness_place(harness, count * sizeof(*params->rows), 0),
        .bias = harness_place(harness, (size_t)4 * MAX_BIAS * sizeof(*params->bias), 0),
        .history = {harness_place(harness, (size_t)num_slots * (size_t)stride * sizeof(int32_t), 0),
                    stride},
        .results = harness_place(harness, count * sizeof(*params->results), 0),
        .top_logprobs =
            harness_place(harness, count * MAX_LOGPROBS * sizeof(*params->top_logprobs), 0),
        .scratch = harness_place(harness, given->scratch_bytes, 0),
        .logits_row_begin = 3,
        .num_logits_rows = num_logits_rows,
        .num_rows = num_rows,
        .vocab_size = vocab_size,
        .num_ids = num_ids,
        .max_logprobs = MAX_LOGPROBS};
}

static void fill_history_and_bias(struct harness *harness, const struct sample_params *params,
                                  int32_t num_slots)
{
    struct imbrex_logit_bias *bias = (struct imbrex_logit_bias *)params->bias;
    /* Few ids, so that they occur again and again. */
    int32_t limit = params->vocab_size < 20 ? params->vocab_size : 20;
    for (int64_t idx = 0; idx < num_slots * params->history.stride; idx++) {
        params->history.token_ids[idx] = coin(harness)
                                             ? harness_random_below(harness, limit)
                                             : harness_random_below(harness, params->vocab_size);
    }
    for (int32_t i = 0; i < 4 * MAX_BIAS; i++) {
        bias[i].token_id = harness_random_below(harness, params->vocab_size);
        bias[i].bias = coin(harness) ? -INFINITY : (float)(10.0 * random_unit(harness) - 5.0);
    }
}

/* Computes what must come out; inputs must not change afterwards. */
static void plan_case(struct harness *harness, struct sample_case *given, struct check_plan *plan)
{
    const struct sample_params *params = &given->params;
    size_t num_values = (size_t)params->num_rows * NUM_COLS;
    double *expected = harness_alloc(harness, num_values, sizeof(double));
    double *bound = harness_alloc(harness, num_values, sizeof(double));
    struct ranked *ranked = harness_alloc(harness, (size_t)params->num_ids, sizeof(*ranked));
    for (int64_t row = 0; row < params->num_rows; row++) {
        model_row(params, &params->rows[row], ranked, expected + row * NUM_COLS,
                  bound + row * NUM_COLS);
    }
    harness_seal(harness, params->logits);
    harness_seal(harness, params->rows);
    harness_seal(harness, params->bias);
    *plan = (struct check_plan){.run = run_sample,
                                .arg = given,
                                .num_rows = params->num_rows,
                                .num_outputs = 1,
                                .outputs = {{.at = given->d,
                                             .num_rows = params->num_rows,
                                             .width = NUM_COLS,
                                             .stride = NUM_COLS,
                                             .expected = expected,
                                             .bound = bound}}};
}

static void check_mixed(struct harness *harness, enum logits_kind kind, int32_t num_rows,
                        int32_t vocab_size, int32_t num_ids)
{
    for (int placement = 0; placement < PLACEMENT_COUNT; placement++) {
        struct sample_case given;
        struct check_plan plan;
        int32_t num_logits_rows = num_rows < 5 ? num_rows : 5;
        harness_case(harness, "%d rows of %d ids in %d, placement %d", (int)num_rows, (int)num_ids,
                     (int)vocab_size, placement);
        harness_set_placement(harness, (enum placement)placement);
        place_case(harness, &given, num_rows, num_logits_rows, num_rows, 40, vocab_size, num_ids);
        fill_logits(harness, (float *)given.params.logits, kind, num_logits_rows, vocab_size);
        fill_history_and_bias(harness, &given.params, num_rows);
        for (int32_t row_idx = 0; row_idx < num_rows; row_idx++) {
            fill_row(harness, &given.params, row_idx,
                     (struct sample_row *)&given.params.rows[row_idx]);
        }
        plan_case(harness, &given, &plan);
        harness_check(harness, &plan);
        harness_end_case(harness);
    }
}

/* Where the largest logit stands, and where a broken one: every place of a row, beside it ones that
 * are as large. Catches lanes and blocks that are left out, counted twice or looked at in the wrong
 * order. */
static void check_places(struct harness *harness, int32_t num_ids, bool is_broken)
{
    struct sample_case given;
    struct check_plan plan;
    harness_case(harness, "%d ids, each the %s", (int)num_ids, is_broken ? "broken" : "largest");
    place_case(harness, &given, num_ids, num_ids, 1, 2, num_ids, num_ids);
    harness_fill(harness, (float *)given.params.logits, num_ids, num_ids, num_ids, 1.0);
    given.params.history.token_ids[0] = 0;
    for (int32_t id = 0; id < num_ids; id++) {
        float *logits = (float *)given.params.logits + (int64_t)id * num_ids;
        ((struct sample_row *)given.params.rows)[id] =
            (struct sample_row){.logits_row = given.params.logits_row_begin + id,
                                .num_tokens = 1,
                                .num_prompt_tokens = 1,
                                .target_id = -1,
                                .num_logprobs = -1,
                                .top_p = 1.0f,
                                .repetition_penalty = 1.0f};
        logits[id] = is_broken ? (id % 2 == 0 ? NAN : -INFINITY) : 9.0f;
        for (int32_t other = id + 1; other < num_ids; other += 1 + other % 5) {
            logits[other] = 9.0f;
        }
    }
    plan_case(harness, &given, &plan);
    plan.whole_only = true;
    harness_check(harness, &plan);
    harness_end_case(harness);
}

/* ---- distribution ----------------------------------------------------------------------------*/

struct filters {
    const char *name;
    float temperature, top_p, min_p;
    int32_t top_k;
    bool by_choice; /* 64 draws of each position */
};

/* Many draws from one row of logits: ids as often as their probability says. The probabilities are
 * those of a plain softmax over the ids that were drawn at all, whose set the model has proved. */
static void check_frequencies(struct harness *harness, const struct filters *filters)
{
    enum { NUM_DRAWS = 12800, VOCAB = 48 };
    struct sample_case given;
    struct check_plan plan;
    harness_case(harness, "%s", filters->name);
    place_case(harness, &given, NUM_DRAWS, 1, 1, NUM_DRAWS + 1, VOCAB, VOCAB);
    harness_fill(harness, (float *)given.params.logits, 1, VOCAB, VOCAB, 0.7);
    for (int32_t draw = 0; draw < NUM_DRAWS; draw++) {
        ((struct sample_row *)given.params.rows)[draw] = (struct sample_row){
            .logits_row = given.params.logits_row_begin,
            .num_tokens = filters->by_choice ? 1 + draw / IMBREX_MAX_CHOICES : 1 + draw,
            .num_prompt_tokens = 1,
            .target_id = -1,
            .choice_idx = filters->by_choice ? draw % IMBREX_MAX_CHOICES : 0,
            .num_logprobs = -1,
            .temperature = filters->temperature,
            .top_k = filters->top_k,
            .top_p = filters->top_p,
            .min_p = filters->min_p,
            .repetition_penalty = 1.0f,
            .seed_low = 20};
    }
    plan_case(harness, &given, &plan);
    plan.whole_only = true;
    harness_check(harness, &plan);

    int32_t counts[VOCAB] = {0}, num_kinds = 0;
    double weights[VOCAB] = {0.0}, sum = 0.0, chi_square = 0.0;
    for (int32_t draw = 0; draw < NUM_DRAWS; draw++) {
        int32_t token_id = (int32_t)given.d[draw * NUM_COLS + COL_TOKEN];
        if (token_id >= 0 && token_id < VOCAB) {
            counts[token_id]++;
        }
    }
    for (int32_t id = 0; id < VOCAB; id++) {
        weights[id] =
            counts[id] > 0 ? exp((double)given.params.logits[id] / filters->temperature) : 0.0;
        sum += weights[id];
        num_kinds += counts[id] > 0;
    }
    for (int32_t id = 0; id < VOCAB; id++) {
        double mean = NUM_DRAWS * weights[id] / sum;
        chi_square += counts[id] > 0 ? (counts[id] - mean) * (counts[id] - mean) / mean : 0.0;
    }
    /* Mean k - 1, variance 2 (k - 1). */
    double limit = num_kinds - 1 + 5.0 * sqrt(2.0 * (num_kinds - 1));
    harness_expect(harness, num_kinds > 4 && chi_square < limit,
                   "chi-square of %d ids is %.1f, expected below %.1f", (int)num_kinds, chi_square,
                   limit);
    harness_end_case(harness);
}

static void checks(struct harness *harness)
{
    static const int32_t sizes[][2] = {{1, 1},     {2, 1},     {8, 7},       {31, 31},   {65, 64},
                                       {300, 257}, {600, 512}, {1031, 1031}, {1300, 999}};
    for (int kind = 0; kind < LOGITS_KIND_COUNT; kind++) {
        harness_group(harness, "sample, mixed rows, %s logits", logits_names[kind]);
        for (size_t idx = 0; idx < sizeof(sizes) / sizeof(sizes[0]); idx++) {
            check_mixed(harness, (enum logits_kind)kind, 1, sizes[idx][0], sizes[idx][1]);
            check_mixed(harness, (enum logits_kind)kind, 64, sizes[idx][0], sizes[idx][1]);
        }
    }
    harness_group(harness, "sample, the largest and the broken at each place");
    static const int32_t place_sizes[] = {1, 7, 33, 256, 300, 561};
    for (size_t idx = 0; idx < sizeof(place_sizes) / sizeof(place_sizes[0]); idx++) {
        check_places(harness, place_sizes[idx], false);
        check_places(harness, place_sizes[idx], true);
    }
    static const struct filters filters[] = {
        {"temperature", 0.8f, 1.0f, 0.0f, 0, false}, {"choices", 1.3f, 1.0f, 0.0f, 0, true},
        {"top-k", 1.0f, 1.0f, 0.0f, 17, false},      {"top-p", 1.0f, 0.7f, 0.0f, 0, false},
        {"min-p", 1.0f, 1.0f, 0.25f, 0, false},      {"all filters", 2.0f, 0.9f, 0.1f, 30, true}};
    harness_group(harness, "sample, frequencies of 12,800 draws");
    for (size_t idx = 0; idx < sizeof(filters) / sizeof(filters[0]); idx++) {
        check_frequencies(harness, &filters[idx]);
    }
}

static void bench_one(struct harness *harness, const char *name, int32_t vocab_size,
                      const struct sample_row *options)
{
    enum { NUM_ROWS = 64 };
    struct sample_case given;
    struct check_plan plan;
    harness_case(harness, "sample %s %dx%d", name, (int)NUM_ROWS, (int)vocab_size);
    place_case(harness, &given, NUM_ROWS, NUM_ROWS, NUM_ROWS, 501, vocab_size, vocab_size);
    harness_fill(harness, (float *)given.params.logits, NUM_ROWS, vocab_size, vocab_size, 3.0);
    fill_history_and_bias(harness, &given.params, NUM_ROWS);
    for (int32_t row_idx = 0; row_idx < NUM_ROWS; row_idx++) {
        struct sample_row *row = (struct sample_row *)&given.params.rows[row_idx];
        *row = *options;
        row->logits_row = given.params.logits_row_begin + row_idx;
        row->slot = row_idx;
    }
    plan_case(harness, &given, &plan);
    plan.whole_only = true;
    harness_check(harness, &plan);
    given.is_timed = true;
    harness_bench(harness, &plan, NULL, (double)NUM_ROWS * vocab_size, 4.0 * NUM_ROWS * vocab_size);
    harness_end_case(harness);
}

static void benches(struct harness *harness)
{
    static const int32_t vocab_sizes[] = {4096, 151936};
    const struct sample_row greedy = {.num_tokens = 500,
                                      .num_prompt_tokens = 400,
                                      .target_id = -1,
                                      .is_stored = 1,
                                      .num_logprobs = -1,
                                      .top_p = 1.0f,
                                      .repetition_penalty = 1.0f};
    for (size_t idx = 0; idx < 2; idx++) {
        struct sample_row row = greedy;
        bench_one(harness, "greedy", vocab_sizes[idx], &row);
        row.num_logprobs = 5;
        bench_one(harness, "logprobs", vocab_sizes[idx], &row);
        row = greedy;
        row.temperature = 1.0f;
        row.top_k = 20;
        row.top_p = 0.8f;
        bench_one(harness, "top-k, top-p", vocab_sizes[idx], &row);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
