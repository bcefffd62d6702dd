/* SPDX-License-Identifier: Apache-2.0 */
/* See sampler.h. Filters that cut the distribution need candidates in order of their probability.
 * A binary heap gives them one by one, so that a vocabulary of 150,000 ids is ordered only as far
 * as top-k and top-p reach. */
#include "engine/sampler.h"

#include <assert.h>
#include <math.h>
#include <string.h>

void sampler_take(struct arena *arena, int32_t vocab_size, struct sampler *sampler)
{
    sampler->vocab_size = vocab_size;
    sampler->candidates = arena_take(arena, (size_t)vocab_size, sizeof(*sampler->candidates));
    sampler->is_seen = arena_take(arena, (size_t)vocab_size, sizeof(*sampler->is_seen));
}

void sampler_reset(struct sampler *sampler)
{
    memset(sampler->is_seen, 0, (size_t)sampler->vocab_size * sizeof(*sampler->is_seen));
}

void sampler_note(struct sampler *sampler, int32_t token_id)
{
    assert(token_id >= 0 && token_id < sampler->vocab_size);
    sampler->is_seen[token_id] = true;
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

/* Uniform in [0, 1) with 53 bits, for one position of one seed. */
static double draw_uniform(uint64_t seed, int64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32), 0, 0};
    uint32_t words[4];
    philox4x32(counter, key, words);
    uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 11;
    return (double)bits * 0x1p-53;
}

static float penalized_logit(const struct sampler *sampler, const struct sampler_options *options,
                             const float *logits, int32_t token_id)
{
    float logit = logits[token_id];
    if (options->repetition_penalty != 1.0f && sampler->is_seen[token_id]) {
        logit = logit > 0.0f ? logit / options->repetition_penalty
                             : logit * options->repetition_penalty;
    }
    return logit;
}

/* Whether a comes before b: higher logit, then lower id, so that the order is total. */
static bool comes_before(const struct sampler_candidate *a, const struct sampler_candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->token_id < b->token_id);
}

/* Moves heap[root] down until both children come after it. */
static void heap_sift(struct sampler_candidate *heap, int32_t num_items, int32_t root)
{
    struct sampler_candidate item = heap[root];
    for (;;) {
        int32_t child = 2 * root + 1;
        if (child >= num_items) {
            break;
        }
        if (child + 1 < num_items && comes_before(&heap[child + 1], &heap[child])) {
            child++;
        }
        if (!comes_before(&heap[child], &item)) {
            break;
        }
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = item;
}

/* Moves the best candidates, at most max_kept, to the *end* of the array, the best one last, and
 * returns their number. Stops once their probabilities sum to top_p_mass or fall under
 * min_probability, but never before the first. */
static int32_t keep_best(struct sampler_candidate *candidates, int32_t num_candidates,
                         int32_t max_kept, double top_p_mass, double min_probability)
{
    for (int32_t root = num_candidates / 2 - 1; root >= 0; root--) {
        heap_sift(candidates, num_candidates, root);
    }
    int32_t num_kept = 0;
    double mass = 0.0;
    while (num_kept < max_kept && num_kept < num_candidates) {
        struct sampler_candidate best = candidates[0];
        if (num_kept > 0 && (mass >= top_p_mass || best.probability < min_probability)) {
            break;
        }
        int32_t num_left = num_candidates - num_kept - 1;
        candidates[0] = candidates[num_left];
        heap_sift(candidates, num_left, 0);
        candidates[num_left] = best;
        mass += best.probability;
        num_kept++;
    }
    return num_kept;
}

static bool pick_argmax(const float *logits, const struct sampler *sampler,
                        const struct sampler_options *options, int32_t num_ids, int32_t *token_id)
{
    int32_t best_id = 0;
    float best_logit = -INFINITY;
    for (int32_t id = 0; id < num_ids; id++) {
        float logit = penalized_logit(sampler, options, logits, id);
        if (!isfinite(logit)) {
            return false;
        }
        if (logit > best_logit) {
            best_logit = logit;
            best_id = id;
        }
    }
    *token_id = best_id;
    return true;
}

bool sampler_pick(struct sampler *sampler, const struct sampler_options *options,
                  const float *logits, int32_t num_ids, int64_t position, int32_t *token_id)
{
    assert(num_ids >= 1 && num_ids <= sampler->vocab_size);
    if (options->temperature == 0.0f) {
        return pick_argmax(logits, sampler, options, num_ids, token_id);
    }

    struct sampler_candidate *candidates = sampler->candidates;
    float max_logit = -INFINITY;
    for (int32_t id = 0; id < num_ids; id++) {
        candidates[id].token_id = id;
        candidates[id].probability = 0.0;
        candidates[id].logit = penalized_logit(sampler, options, logits, id);
        if (!isfinite(candidates[id].logit)) {
            return false;
        }
        max_logit = fmaxf(max_logit, candidates[id].logit);
    }

    /* top-k by itself: order first, so that top-p sees the probabilities of the k that are left. */
    int32_t num_candidates = num_ids;
    if (options->top_k > 0 && options->top_k < num_ids) {
        int32_t num_kept = keep_best(candidates, num_ids, options->top_k, INFINITY, 0.0);
        candidates += num_ids - num_kept;
        num_candidates = num_kept;
    }

    double sum = 0.0;
    for (int32_t i = 0; i < num_candidates; i++) {
        double scaled = ((double)candidates[i].logit - max_logit) / options->temperature;
        candidates[i].probability = exp(scaled);
        sum += candidates[i].probability;
    }
    if (options->top_p < 1.0f || options->min_p > 0.0f) {
        /* The best candidate has probability exp(0) = 1 before normalisation. */
        int32_t num_kept =
            keep_best(candidates, num_candidates, num_candidates,
                      options->top_p < 1.0f ? options->top_p * sum : INFINITY, options->min_p);
        candidates += num_candidates - num_kept;
        num_candidates = num_kept;
        sum = 0.0;
        for (int32_t i = 0; i < num_candidates; i++) {
            sum += candidates[i].probability;
        }
    }

    double target = draw_uniform(options->seed, position) * sum;
    double mass = 0.0;
    int32_t picked = candidates[num_candidates - 1].token_id;
    for (int32_t i = 0; i < num_candidates; i++) {
        mass += candidates[i].probability;
        if (target < mass) {
            picked = candidates[i].token_id;
            break;
        }
    }
    *token_id = picked;
    return true;
}
