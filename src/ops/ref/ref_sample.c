/* SPDX-License-Identifier: Apache-2.0 */
/* How a row becomes a token: see sample.h. Biases and penalties change a copy of the row, and only
 * there the ids that they name. Filters that cut the distribution need candidates in order of
 * their probability: a binary heap gives them one by one, so that a vocabulary of 150,000 ids is
 * ordered only as far as top-k and top-p reach. */
#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/memory.h"
#include "ops/ref/ref_kernels.h"
#include "ops/sample.h"

struct candidate {
    double probability;
    float logit;
    int32_t token_id;
};

/* Work memory of one thread; what it holds between two rows means nothing. */
struct row_scratch {
    struct candidate *candidates; /* [vocab_size] */
    float *logits;                /* [vocab_size]: the row after biases and penalties */
    int32_t *num_seen;            /* [vocab_size], see apply_penalties */
};

static void take_scratch(struct arena *arena, int32_t vocab_size, struct row_scratch *scratch)
{
    size_t count = (size_t)vocab_size;
    scratch->candidates = arena_take(arena, count, sizeof(*scratch->candidates));
    scratch->logits = arena_take(arena, count, sizeof(*scratch->logits));
    scratch->num_seen = arena_take(arena, count, sizeof(*scratch->num_seen));
    arena_take(arena, 0, 1); /* the next thread's begins aligned */
}

size_t ref_sample_scratch_bytes(int32_t vocab_size)
{
    struct arena arena = {.base = NULL};
    struct row_scratch scratch;
    take_scratch(&arena, vocab_size, &scratch);
    return arena.overflowed ? SIZE_MAX : arena.num_used;
}

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4])
{
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; round++) {
        uint64_t product_0 = (uint64_t)0xD2511F53u * c[0];
        uint64_t product_2 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(product_2 >> 32) ^ c[1] ^ k[0], (uint32_t)product_2,
                            (uint32_t)(product_0 >> 32) ^ c[3] ^ k[1], (uint32_t)product_0};
        memcpy(c, next, sizeof(c));
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(words, c, sizeof(c));
}

/* Uniform in [0, 1) with 53 bits, for one position of one choice of one seed. */
static double draw_uniform(const struct sample_row *row)
{
    const uint32_t key[2] = {row->seed_low, row->seed_high};
    const uint32_t counter[4] = {(uint32_t)row->num_tokens, 0, (uint32_t)row->choice_idx, 0};
    uint32_t words[4];
    philox4x32(counter, key, words);
    uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 11;
    return (double)bits * 0x1p-53;
}

bool ref_scan_logits(const float *logits, int32_t num_ids, int32_t *best_id)
{
    bool is_finite = true;
    float best_logit = -INFINITY;
    *best_id = 0;
    for (int32_t id = 0; id < num_ids; id++) {
        is_finite = is_finite && isfinite(logits[id]);
        if (logits[id] > best_logit) {
            best_logit = logits[id];
            *best_id = id;
        }
    }
    return is_finite;
}

double ref_sum_exp(const float *logits, int32_t num_ids, float max_logit)
{
    double sum = 0.0;
    for (int32_t id = 0; id < num_ids; id++) {
        sum += exp((double)logits[id] - max_logit);
    }
    return sum;
}

/* ---- biases and penalties --------------------------------------------------------------------*/

/* Gives an id its new logit, unless it is forbidden. False if that is not finite: a sum or a
 * product that overflowed. */
static bool change_logit(float *logits, int32_t token_id, float logit)
{
    if (logits[token_id] == -INFINITY) {
        return true;
    }
    logits[token_id] = logit;
    return isfinite(logit);
}

static bool apply_bias(const struct sample_params *params, const struct sample_row *row,
                       float *logits)
{
    for (int32_t i = 0; i < row->num_bias; i++) {
        const struct imbrex_logit_bias *entry = &params->bias[row->bias_begin + i];
        int32_t id = entry->token_id;
        assert(id >= 0);
        if (id >= params->num_ids) {
            continue;
        }
        if (entry->bias == -INFINITY) {
            logits[id] = -INFINITY;
        } else if (!change_logit(logits, id, logits[id] + entry->bias)) {
            return false;
        }
    }
    return true;
}

static float penalized_logit(const struct sample_row *row, float logit, int32_t num_seen)
{
    if (row->repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? logit / row->repetition_penalty : logit * row->repetition_penalty;
    }
    if (num_seen > 0) {
        logit -= row->frequency_penalty * (float)num_seen;
        logit -= row->presence_penalty;
    }
    return logit;
}

static bool has_output_penalty(const struct sample_row *row)
{
    return row->frequency_penalty != 0.0f || row->presence_penalty != 0.0f;
}

/* Walks the tokens three times rather than the vocabulary once: zeroes the counts of the ids there
 * are, counts those of the output, then changes each id's logit where it is met first, which turns
 * its count negative. */
static bool apply_penalties(const struct sample_params *params, const struct sample_row *row,
                            float *logits, int32_t *num_seen)
{
    const struct token_history *history = &params->history;
    const int32_t *token_ids = history->token_ids + row->slot * history->stride;
    int32_t begin = row->repetition_penalty != 1.0f ? 0 : row->num_prompt_tokens;
    for (int32_t position = begin; position < row->num_tokens; position++) {
        assert(token_ids[position] >= 0 && token_ids[position] < params->vocab_size);
        num_seen[token_ids[position]] = 0;
    }
    for (int32_t position = row->num_prompt_tokens; position < row->num_tokens; position++) {
        num_seen[token_ids[position]]++;
    }
    for (int32_t position = begin; position < row->num_tokens; position++) {
        int32_t id = token_ids[position];
        if (id >= params->num_ids || num_seen[id] < 0) {
            continue;
        }
        if (!change_logit(logits, id, penalized_logit(row, logits[id], num_seen[id]))) {
            return false;
        }
        num_seen[id] = -1;
    }
    return true;
}

/* ---- candidates in order ---------------------------------------------------------------------*/

enum heap_order { HEAP_BEST_ON_TOP, HEAP_WORST_ON_TOP };

/* Higher logit, then lower id, so that the order is total. */
static bool is_better(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->token_id < b->token_id);
}

static bool belongs_above(enum heap_order order, const struct candidate *a,
                          const struct candidate *b)
{
    return order == HEAP_BEST_ON_TOP ? is_better(a, b) : is_better(b, a);
}

/* Moves heap[root] down until it belongs above both children. */
static void heap_sift(enum heap_order order, struct candidate *heap, int32_t num_items,
                      int32_t root)
{
    struct candidate item = heap[root];
    while (root < num_items / 2) { /* it has a child */
        int32_t child = 2 * root + 1;
        if (child + 1 < num_items && belongs_above(order, &heap[child + 1], &heap[child])) {
            child++;
        }
        if (!belongs_above(order, &heap[child], &item)) {
            break;
        }
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = item;
}

static void heap_build(enum heap_order order, struct candidate *heap, int32_t num_items)
{
    for (int32_t root = num_items / 2 - 1; root >= 0; root--) {
        heap_sift(order, heap, num_items, root);
    }
}

/* The best ids, at most max_selected, in no useful order; returns their number. Forbidden ids are
 * left out. */
static int32_t select_best(const float *logits, int32_t num_ids, int32_t max_selected,
                           struct candidate *selected)
{
    int32_t num_selected = 0;
    int32_t id = 0;
    for (; id < num_ids && num_selected < max_selected; id++) {
        if (logits[id] != -INFINITY) {
            selected[num_selected++] = (struct candidate){.logit = logits[id], .token_id = id};
        }
    }
    if (id == num_ids) {
        return num_selected;
    }
    heap_build(HEAP_WORST_ON_TOP, selected, num_selected);
    for (; id < num_ids; id++) {
        if (logits[id] > selected[0].logit) { /* of equal ones, those met before have lower ids */
            selected[0] = (struct candidate){.logit = logits[id], .token_id = id};
            heap_sift(HEAP_WORST_ON_TOP, selected, num_selected, 0);
        }
    }
    return num_selected;
}

/* Moves the best candidates to the *end* of the array, the best one last, and returns their number.
 * Stops once their probabilities sum to top_p_mass or fall under min_probability, but never before
 * the first. */
static int32_t keep_best(struct candidate *candidates, int32_t num_candidates, double top_p_mass,
                         double min_probability)
{
    heap_build(HEAP_BEST_ON_TOP, candidates, num_candidates);
    int32_t num_kept = 0;
    double mass = 0.0;
    while (num_kept < num_candidates) {
        struct candidate best = candidates[0];
        if (num_kept > 0 && (mass >= top_p_mass || best.probability < min_probability)) {
            break;
        }
        int32_t num_left = num_candidates - num_kept - 1;
        candidates[0] = candidates[num_left];
        heap_sift(HEAP_BEST_ON_TOP, candidates, num_left, 0);
        candidates[num_left] = best;
        mass += best.probability;
        num_kept++;
    }
    return num_kept;
}

/* ---- the draw --------------------------------------------------------------------------------*/

/* Draws from logits of which the largest, max_logit, is finite. The ids that are left stand in a
 * line: by id if no filter is on, otherwise from the least to the most likely; the drawn one is
 * the first at which the probabilities so far exceed the uniform number times their sum. */
static int32_t draw(const struct sample_row *row, const float *logits, int32_t num_ids,
                    float max_logit, struct candidate *candidates)
{
    /* top-k by itself, so that top-p sees the probabilities of the k that are left. */
    bool has_top_k = row->top_k > 0 && row->top_k < num_ids;
    int32_t num_candidates =
        select_best(logits, num_ids, has_top_k ? row->top_k : num_ids, candidates);
    if (has_top_k) {
        keep_best(candidates, num_candidates, INFINITY, 0.0); /* all of them, in order */
    }

    double sum = 0.0;
    for (int32_t i = 0; i < num_candidates; i++) {
        double scaled = ((double)candidates[i].logit - max_logit) / row->temperature;
        candidates[i].probability = exp(scaled);
        sum += candidates[i].probability;
    }
    if (row->top_p < 1.0f || row->min_p > 0.0f) {
        /* The best candidate has probability exp(0) = 1 before normalisation. */
        int32_t num_kept = keep_best(candidates, num_candidates,
                                     row->top_p < 1.0f ? row->top_p * sum : INFINITY, row->min_p);
        candidates += num_candidates - num_kept;
        num_candidates = num_kept;
        sum = 0.0;
        for (int32_t i = 0; i < num_candidates; i++) {
            sum += candidates[i].probability;
        }
    }

    double target = draw_uniform(row) * sum;
    double mass = 0.0;
    int32_t drawn = candidates[num_candidates - 1].token_id;
    for (int32_t i = 0; i < num_candidates; i++) {
        mass += candidates[i].probability;
        if (target < mass) {
            drawn = candidates[i].token_id;
            break;
        }
    }
    return drawn;
}

/* ---- one row ---------------------------------------------------------------------------------*/

/* The row's token from its finite logits, of which best_id has the largest; or what sample.h says
 * of a row that has none. */
static int32_t choose_token(const struct sample_params *params, const struct cpu_kernels *kernels,
                            const struct sample_row *row, const float *logits, int32_t best_id,
                            const struct row_scratch *scratch)
{
    bool has_penalty = row->repetition_penalty != 1.0f || has_output_penalty(row);
    if (has_penalty || row->num_bias > 0) {
        memcpy(scratch->logits, logits, (size_t)params->num_ids * sizeof(*logits));
        if (!apply_bias(params, row, scratch->logits) ||
            (has_penalty && !apply_penalties(params, row, scratch->logits, scratch->num_seen))) {
            return SAMPLE_BAD_LOGITS;
        }
        logits = scratch->logits;
        (void)kernels->scan_logits(logits, params->num_ids, &best_id); /* forbidden ones: -inf */
        if (logits[best_id] == -INFINITY) {
            return SAMPLE_ALL_FORBIDDEN;
        }
    }
    return row->temperature == 0.0f
               ? best_id
               : draw(row, logits, params->num_ids, logits[best_id], scratch->candidates);
}

static void store_top(const float *logits, int32_t num_ids, int32_t num_wanted, double log_sum,
                      struct candidate *candidates, struct imbrex_logprob *top, int32_t *num_top)
{
    *num_top = select_best(logits, num_ids, num_wanted, candidates);
    keep_best(candidates, *num_top, INFINITY, 0.0);
    for (int32_t i = 0; i < *num_top; i++) {
        const struct candidate *candidate = &candidates[*num_top - 1 - i];
        top[i].token_id = candidate->token_id;
        top[i].logprob = (float)(candidate->logit - log_sum);
    }
}

static void sample_row(const struct sample_params *params, const struct cpu_kernels *kernels,
                       int64_t row_idx, const struct row_scratch *scratch)
{
    const struct sample_row *row = &params->rows[row_idx];
    int32_t num_ids = params->num_ids;
    const float *logits =
        params->logits + ((int64_t)row->logits_row - params->logits_row_begin) * params->vocab_size;
    struct sample_result result = {.token_id = SAMPLE_BAD_LOGITS};
    int32_t best_id;
    if (kernels->scan_logits(logits, num_ids, &best_id)) {
        result.token_id = row->target_id >= 0
                              ? row->target_id
                              : choose_token(params, kernels, row, logits, best_id, scratch);
    }
    if (result.token_id >= 0 && row->num_logprobs >= 0) {
        double log_sum = logits[best_id] + log(kernels->sum_exp(logits, num_ids, logits[best_id]));
        result.logprob =
            result.token_id < num_ids ? (float)(logits[result.token_id] - log_sum) : -INFINITY;
        if (row->num_logprobs > 0) {
            store_top(logits, num_ids, row->num_logprobs, log_sum, scratch->candidates,
                      params->top_logprobs + row_idx * params->max_logprobs, &result.num_top);
        }
    }
    const struct token_history *history = &params->history;
    if (row->is_stored && row->target_id < 0 && row->num_tokens < history->stride) {
        history->token_ids[row->slot * history->stride + row->num_tokens] =
            result.token_id >= 0 ? result.token_id : 0;
    }
    params->results[row_idx] = result;
}

void ref_sample(const struct sample_params *params, const struct cpu_kernels *kernels,
                int64_t begin, int64_t end, void *scratch)
{
    struct arena arena = {.base = scratch};
    struct row_scratch row_scratch;
    take_scratch(&arena, params->vocab_size, &row_scratch);
    for (int64_t row_idx = begin; row_idx < end; row_idx++) {
        if (params->rows[row_idx].logits_row >= 0) {
            sample_row(params, kernels, row_idx, &row_scratch);
        }
    }
}
