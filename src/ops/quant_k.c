/* SPDX-License-Identifier: Apache-2.0 */
/* fp32 to K blocks: the search for scales that lose least.
 *
 * What is minimised is the squared error weighted by root mean square + magnitude: large weights
 * matter more to a dot product. First each group is fitted on its own: for candidate steps of the
 * grid, round, then solve for the scale (and min) that are best for those integers; the best
 * candidate is rounded and solved again while that helps. Then the block's scale (and min_scale)
 * are chosen so that the groups' scales fit their few bits, every group picks the best of the
 * neighbouring scales and mins, the block's scales are solved for once more, and so on. Values are
 * brought to a largest magnitude in [1, 2) first, so nothing overflows on the way. */
#include <assert.h>
#include <math.h>

#include "ops/quant.h"
#include "ops/quant_blocks.h"

#define MAX_SCALE 63 /* of a group, 6 bits: Q4_K and Q5_K */
#define NUM_GROUPS 8
#define GROUP 32

#define NUM_GROUPS_6 16 /* Q6_K */
#define GROUP_6 16

#define MAX_F16 65504.0f
#define NUM_BLOCK_ROUNDS 3 /* a fourth took 0.03 to 0.07 % off the error of normal values */

/* The block being quantised. */
struct block_search {
    float a[QUANT_K_BLOCK];       /* as given, times `up`, a power of two */
    float weights[QUANT_K_BLOCK]; /* of the squared error */
    float q[QUANT_K_BLOCK];       /* integers, until they are packed */
    float up, down;               /* 1 / up */
};

/* False if all values are too small for an F16 scale of the block: it is zero then. */
static bool begin_block(const float *a, int group_elements, struct block_search *search)
{
    float largest = 0.0f;
    for (int i = 0; i < QUANT_K_BLOCK; i++) {
        largest = fabsf(a[i]) > largest ? fabsf(a[i]) : largest;
    }
    if (largest < 0x1p-60f) {
        return false;
    }
    int exponent = ilogbf(largest);
    search->up = ldexpf(1.0f, -exponent);
    search->down = ldexpf(1.0f, exponent);
    for (int first = 0; first < QUANT_K_BLOCK; first += group_elements) {
        float sum_squares = 0.0f;
        for (int i = first; i < first + group_elements; i++) {
            search->a[i] = a[i] * search->up;
            sum_squares += search->a[i] * search->a[i];
        }
        float root_mean_square = sqrtf(sum_squares / (float)group_elements);
        for (int i = first; i < first + group_elements; i++) {
            search->weights[i] = root_mean_square + fabsf(search->a[i]);
        }
    }
    return true;
}

/* What F16 makes of a scale of the block, in the units of search->a. One beyond F16 becomes the
 * largest. */
static float rounded_scale(const struct block_search *search, float scale)
{
    float stored = f16_to_float(f16_from_float(scale * search->down));
    stored = stored > MAX_F16 ? MAX_F16 : stored < -MAX_F16 ? -MAX_F16 : stored;
    return stored * search->up;
}

/* To nearest even: in [2^23, 2^24) the last place of fp32 is 1. |value| < 2^22. */
QUANT_INLINE float round_even(float value)
{
    return value + 0x1.8p23f - 0x1.8p23f;
}

/* NaN becomes low. */
QUANT_INLINE float clamp(float value, float low, float high)
{
    value = value > low ? value : low;
    return value < high ? value : high;
}

static float inverse_of(float scale)
{
    float inverse = 1.0f / scale;
    return isfinite(inverse) ? inverse : 0.0f;
}

/* ---- groups with a min: Q4_K and Q5_K ---------------------------------------------------------*/

/* value = scale * q - min, scale and min >= 0 */
struct group_fit {
    float scale, min;
};

/* Weighted sums over a group for given q. */
struct group_sums {
    float q, qq, aq;
};

#define LANES 4 /* partial sums, so that the compiler may use vectors */

QUANT_INLINE float sum_lanes(const float lanes[LANES])
{
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

/* Rounds (a + min) * inverse to integers in [0, max]; adds up what a fit needs. */
static struct group_sums round_group(const float *restrict a, const float *restrict weights,
                                     float inverse, float min, float max, float *restrict q)
{
    float sum_q[LANES] = {0}, sum_qq[LANES] = {0}, sum_aq[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            float rounded = round_even(clamp((a[i + lane] + min) * inverse, 0.0f, max));
            float weighted = weights[i + lane] * rounded;
            q[i + lane] = rounded;
            sum_q[lane] += weighted;
            sum_qq[lane] += weighted * rounded;
            sum_aq[lane] += weighted * a[i + lane];
        }
    }
    return (struct group_sums){sum_lanes(sum_q), sum_lanes(sum_qq), sum_lanes(sum_aq)};
}

static float group_error(const float *restrict a, const float *restrict weights,
                         const float *restrict q, float scale, float min)
{
    float sum[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            float error = scale * q[i + lane] - min - a[i + lane];
            sum[lane] += weights[i + lane] * error * error;
        }
    }
    return sum_lanes(sum);
}

/* The sums over a group that do not depend on q. */
struct group_totals {
    float weight, a;
};

static struct group_totals total_group(const float *a, const float *weights)
{
    struct group_totals totals = {0.0f, 0.0f};
    for (int i = 0; i < GROUP; i++) {
        totals.weight += weights[i];
        totals.a += weights[i] * a[i];
    }
    return totals;
}

/* The fit that is best for given q, min not below 0. The error it leaves is a constant minus
 * *gain. */
static struct group_fit solve_group(struct group_totals totals, struct group_sums sums, float *gain)
{
    struct group_fit fit = {0.0f, 0.0f};
    float determinant = totals.weight * sums.qq - sums.q * sums.q;
    if (determinant > 0.0f) {
        fit.scale = (totals.weight * sums.aq - totals.a * sums.q) / determinant;
        fit.min = (sums.q * sums.aq - sums.qq * totals.a) / determinant;
    }
    if (!(fit.min > 0.0f)) {
        fit.min = 0.0f;
        fit.scale = sums.qq > 0.0f ? sums.aq / sums.qq : 0.0f;
    }
    *gain = fit.scale * sums.aq - fit.min * totals.a;
    return fit;
}

/* The best scale and min of one group, free of any rounding. */
static struct group_fit fit_group(const float *a, const float *weights, float max)
{
    float low = 0.0f, high = a[0], q[GROUP];
    for (int i = 0; i < GROUP; i++) {
        low = a[i] < low ? a[i] : low;
        high = a[i] > high ? a[i] : high;
    }
    struct group_fit best = {0.0f, -low};
    if (high - low <= 0.0f) {
        return best; /* all values are low */
    }
    struct group_totals totals = total_group(a, weights);
    float best_gain = -INFINITY, gain;
    /* From a grid a little wider than the range to one that cuts off its ends. */
    for (float steps = max - 0.9f; steps <= max + 1.2f + max / 16.0f; steps += 0.15f) {
        struct group_sums sums = round_group(a, weights, steps / (high - low), -low, max, q);
        struct group_fit fit = solve_group(totals, sums, &gain);
        if (gain > best_gain && fit.scale > 0.0f) {
            best_gain = gain;
            best = fit;
        }
    }
    for (int round = 0; round < 4; round++) {
        struct group_sums sums = round_group(a, weights, inverse_of(best.scale), best.min, max, q);
        struct group_fit fit = solve_group(totals, sums, &gain);
        if (!(gain > best_gain && fit.scale > 0.0f)) {
            break;
        }
        best_gain = gain;
        best = fit;
    }
    return best;
}

struct k_scales {
    float scale, min_scale; /* of the block, as F16 holds them */
    float scales[NUM_GROUPS], mins[NUM_GROUPS];
};

/* Picks the group's scale next to `wanted` and the min that goes with it best; fills q. The error
 * that is left. */
static float choose_group(const struct block_search *search, int group, struct group_fit wanted,
                          float max, struct k_scales *chosen, float *q)
{
    const float *a = search->a + group * GROUP, *weights = search->weights + group * GROUP;
    struct group_totals totals = total_group(a, weights);
    float inverse_scale = inverse_of(chosen->scale);
    float inverse_min_scale = inverse_of(chosen->min_scale);
    float first_scale = floorf(clamp(wanted.scale * inverse_scale, 0.0f, MAX_SCALE)) - 1.0f;
    float best_error = INFINITY, trial_q[GROUP];
    for (int step = 0; step < 4; step++) {
        float scale_steps = first_scale + (float)step;
        if (scale_steps < 0.0f || scale_steps > MAX_SCALE) {
            continue;
        }
        float scale = chosen->scale * scale_steps, inverse = inverse_of(scale);
        float min_steps = round_even(clamp(wanted.min * inverse_min_scale, 0.0f, (float)MAX_SCALE));
        for (int round = 0; round < 3; round++) {
            float min = chosen->min_scale * min_steps;
            struct group_sums sums = round_group(a, weights, inverse, min, max, trial_q);
            float error = group_error(a, weights, trial_q, scale, min);
            if (error < best_error) {
                best_error = error;
                chosen->scales[group] = scale_steps;
                chosen->mins[group] = min_steps;
                memcpy(q, trial_q, sizeof(trial_q));
            }
            float better = (scale * sums.q - totals.a) / totals.weight * inverse_min_scale;
            better = round_even(clamp(better, 0.0f, (float)MAX_SCALE));
            if (better == min_steps) {
                break;
            }
            min_steps = better;
        }
    }
    return best_error;
}

/* The block's scales that are best for the integers chosen. */
static void solve_block(const struct block_search *search, const struct k_scales *chosen,
                        float *scale, float *min_scale)
{
    double qq = 0.0, qm = 0.0, mm = 0.0, aq = 0.0, am = 0.0;
    for (int i = 0; i < QUANT_K_BLOCK; i++) {
        double q = (double)search->q[i] * chosen->scales[i / GROUP];
        double m = -(double)chosen->mins[i / GROUP], w = search->weights[i], a = search->a[i];
        qq += w * q * q;
        qm += w * q * m;
        mm += w * m * m;
        aq += w * a * q;
        am += w * a * m;
    }
    double determinant = qq * mm - qm * qm;
    *scale = chosen->scale;
    *min_scale = chosen->min_scale;
    if (determinant > 1e-9 * qq * mm) {
        double solved_scale = (aq * mm - am * qm) / determinant;
        double solved_min_scale = (am * qq - aq * qm) / determinant;
        if (solved_scale > 0.0 && solved_min_scale >= 0.0) {
            *scale = (float)solved_scale;
            *min_scale = (float)solved_min_scale;
        }
    } else if (qq > 0.0 && aq > 0.0) {
        *scale = (float)(aq / qq);
    }
}

static void search_block(struct block_search *search, float max, struct k_scales *best)
{
    struct group_fit fits[NUM_GROUPS];
    float largest_scale = 0.0f, largest_min = 0.0f, best_error = INFINITY;
    for (int group = 0; group < NUM_GROUPS; group++) {
        fits[group] = fit_group(search->a + group * GROUP, search->weights + group * GROUP, max);
        largest_scale = fits[group].scale > largest_scale ? fits[group].scale : largest_scale;
        largest_min = fits[group].min > largest_min ? fits[group].min : largest_min;
    }
    float scale = largest_scale / MAX_SCALE, min_scale = largest_min / MAX_SCALE;
    float best_q[QUANT_K_BLOCK] = {0};
    *best = (struct k_scales){.scale = 0.0f};
    for (int round = 0; round < NUM_BLOCK_ROUNDS; round++) {
        struct k_scales chosen = {.scale = rounded_scale(search, scale),
                                  .min_scale = rounded_scale(search, min_scale)};
        float error = 0.0f;
        for (int group = 0; group < NUM_GROUPS; group++) {
            error +=
                choose_group(search, group, fits[group], max, &chosen, search->q + group * GROUP);
        }
        if (!(error < best_error)) {
            break;
        }
        best_error = error;
        *best = chosen;
        memcpy(best_q, search->q, sizeof(best_q));
        solve_block(search, &chosen, &scale, &min_scale);
    }
    memcpy(search->q, best_q, sizeof(best_q));
}

/* See k_scales_unpack. */
static void pack_scales(const struct k_scales *scales, uint8_t packed[12])
{
    for (int g = 0; g < 4; g++) {
        int low_scale = (int)scales->scales[g], high_scale = (int)scales->scales[4 + g];
        int low_min = (int)scales->mins[g], high_min = (int)scales->mins[4 + g];
        packed[g] = (uint8_t)(low_scale | high_scale >> 4 << 6);
        packed[4 + g] = (uint8_t)(low_min | high_min >> 4 << 6);
        packed[8 + g] = (uint8_t)((high_scale & 15) | (high_min & 15) << 4);
    }
}

static void pack_k_nibbles(const float q[QUANT_K_BLOCK], uint8_t nibbles[128])
{
    for (int pair = 0; pair < 4; pair++) {
        for (int i = 0; i < GROUP; i++) {
            int low = (int)q[64 * pair + i], high = (int)q[64 * pair + GROUP + i];
            nibbles[GROUP * pair + i] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
    }
}

/* Q4_K, and with is_5_bits Q5_K. */
static void quantize_with_mins(const float *a, bool is_5_bits, void *at)
{
    struct block_search search;
    struct k_scales scales;
    memset(at, 0, is_5_bits ? sizeof(struct q5_k_block) : sizeof(struct q4_k_block));
    if (!begin_block(a, GROUP, &search)) {
        return;
    }
    search_block(&search, is_5_bits ? 31.0f : 15.0f, &scales);
    struct q4_k_block *block = at; /* Q5_K begins alike */
    quant_store_scale(block->scale, scales.scale * search.down);
    quant_store_scale(block->min_scale, scales.min_scale * search.down);
    pack_scales(&scales, block->packed_scales);
    if (!is_5_bits) {
        pack_k_nibbles(search.q, block->nibbles);
        return;
    }
    struct q5_k_block *block_5 = at;
    pack_k_nibbles(search.q, block_5->nibbles);
    for (int i = 0; i < QUANT_K_BLOCK; i++) {
        uint8_t *bits = &block_5->high_bits[i % GROUP];
        *bits = (uint8_t)(*bits | (int)search.q[i] >> 4 << i / GROUP);
    }
}

/* ---- groups without: Q6_K ---------------------------------------------------------------------*/

/* Rounds a * inverse to integers in [-32, 31]; aq / qq is then the best scale, which leaves an
 * error of a constant minus aq^2 / qq. */
static struct group_sums round_group_6(const float *restrict a, const float *restrict weights,
                                       float inverse, float *restrict q)
{
    float sum_qq[LANES] = {0}, sum_aq[LANES] = {0};
    for (int i = 0; i < GROUP_6; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            float rounded = round_even(clamp(a[i + lane] * inverse, -32.0f, 31.0f));
            float weighted = weights[i + lane] * rounded;
            q[i + lane] = rounded;
            sum_qq[lane] += weighted * rounded;
            sum_aq[lane] += weighted * a[i + lane];
        }
    }
    return (struct group_sums){0.0f, sum_lanes(sum_qq), sum_lanes(sum_aq)};
}

static float gain_of(struct group_sums sums)
{
    return sums.qq > 0.0f ? sums.aq / sums.qq * sums.aq : 0.0f;
}

/* The best scale of one group, which may be negative: the largest magnitude falls on the side that
 * has one integer more. */
static float fit_group_6(const float *a, const float *weights)
{
    float signed_largest = 0.0f, q[GROUP_6], best = 0.0f, best_gain = 0.0f;
    for (int i = 0; i < GROUP_6; i++) {
        signed_largest = fabsf(a[i]) > fabsf(signed_largest) ? a[i] : signed_largest;
    }
    if (fabsf(signed_largest) < 0x1p-60f) {
        return 0.0f;
    }
    for (float steps = 30.5f; steps < 34.6f; steps += 0.25f) {
        struct group_sums sums = round_group_6(a, weights, -steps / signed_largest, q);
        if (gain_of(sums) > best_gain) {
            best_gain = gain_of(sums);
            best = sums.aq / sums.qq;
        }
    }
    for (int round = 0; round < 3; round++) {
        struct group_sums sums = round_group_6(a, weights, inverse_of(best), q);
        if (!(gain_of(sums) > best_gain)) {
            break;
        }
        best_gain = gain_of(sums);
        best = sums.aq / sums.qq;
    }
    return best;
}

/* Picks each group's scale next to `fits` for a scale of the block; fills search->q. Returns the
 * error up to a constant. */
static float choose_groups_6(struct block_search *search, const float *fits, float block_scale,
                             float *scales)
{
    float total = 0.0f, inverse_block_scale = inverse_of(block_scale);
    for (int group = 0; group < NUM_GROUPS_6; group++) {
        const float *a = search->a + group * GROUP_6;
        const float *weights = search->weights + group * GROUP_6;
        float first = floorf(clamp(fits[group] * inverse_block_scale, -128.0f, 127.0f)) - 1.0f;
        float best = INFINITY, trial_q[GROUP_6];
        for (int step = 0; step < 4; step++) {
            float steps = first + (float)step;
            if (steps < -128.0f || steps > 127.0f) {
                continue;
            }
            float scale = block_scale * steps;
            struct group_sums sums = round_group_6(a, weights, inverse_of(scale), trial_q);
            float error = scale * (scale * sums.qq - 2.0f * sums.aq);
            if (error < best) {
                best = error;
                scales[group] = steps;
                memcpy(search->q + group * GROUP_6, trial_q, sizeof(trial_q));
            }
        }
        total += best;
    }
    return total;
}

static void quantize_q6_k(const float *a, struct q6_k_block *block)
{
    struct block_search search;
    float fits[NUM_GROUPS_6], scales[NUM_GROUPS_6], best_scales[NUM_GROUPS_6] = {0};
    float best_q[QUANT_K_BLOCK] = {0}, signed_largest = 0.0f;
    float best_block_scale = 0.0f, best_error = INFINITY;
    memset(block, 0, sizeof(*block));
    if (begin_block(a, GROUP_6, &search)) {
        for (int group = 0; group < NUM_GROUPS_6; group++) {
            fits[group] = fit_group_6(search.a + group * GROUP_6, search.weights + group * GROUP_6);
            signed_largest =
                fabsf(fits[group]) > fabsf(signed_largest) ? fits[group] : signed_largest;
        }
        float scale = signed_largest / -128.0f;
        for (int round = 0; round < NUM_BLOCK_ROUNDS; round++) {
            float block_scale = rounded_scale(&search, scale);
            float error = choose_groups_6(&search, fits, block_scale, scales);
            if (!(error < best_error)) {
                break;
            }
            best_error = error;
            best_block_scale = block_scale;
            memcpy(best_scales, scales, sizeof(scales));
            memcpy(best_q, search.q, sizeof(best_q));
            double qq = 0.0, aq = 0.0;
            for (int i = 0; i < QUANT_K_BLOCK; i++) {
                double q = (double)search.q[i] * scales[i / GROUP_6];
                qq += search.weights[i] * q * q;
                aq += search.weights[i] * q * search.a[i];
            }
            scale = qq > 0.0 ? (float)(aq / qq) : 0.0f;
        }
        quant_store_scale(block->scale, best_block_scale * search.down);
    }
    for (int group = 0; group < NUM_GROUPS_6; group++) {
        block->scales[group] = (int8_t)best_scales[group];
    }
    for (int i = 0; i < QUANT_K_BLOCK; i++) {
        int half = i / 128, p = i % 128 / 32, q = (int)best_q[i] + 32;
        uint8_t *nibbles = &block->nibbles[64 * half + 32 * (p % 2) + i % 32];
        uint8_t *pairs = &block->high_pairs[32 * half + i % 32];
        *nibbles = (uint8_t)(*nibbles | (q & 15) << 4 * (p / 2));
        *pairs = (uint8_t)(*pairs | q >> 4 << 2 * p);
    }
}

void quant_k_quantize_row(enum dtype dtype, const float *a, void *blocks, int64_t num_elements)
{
    unsigned char *at = blocks;
    for (int64_t first = 0; first < num_elements; first += QUANT_K_BLOCK) {
        if (dtype == DTYPE_Q6_K) {
            quantize_q6_k(a + first, (struct q6_k_block *)(void *)at);
        } else {
            quantize_with_mins(a + first, dtype == DTYPE_Q5_K, at);
        }
        at += dtype_block_bytes(dtype);
    }
}
