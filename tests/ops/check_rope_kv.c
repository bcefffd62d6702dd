/* SPDX-License-Identifier: Apache-2.0 */
/* rope_kv: norms and rotation in place, of halves and of pairs, and the cache: only the mapped
 * slots of one layer change. */
#include <math.h>
#include <string.h>

#include "ops/harness.h"

#define THETA 10000.0
#define NUM_LAYERS 3
#define LAYER_IDX 1

#define NORM_EPS 1e-6f

struct rope_shape {
    int32_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
};

struct rope_variant {
    const char *name;
    bool has_q_norm, has_k_norm, is_interleaved;
    double scale; /* of the inputs */
};

static void run_rope_kv(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    struct rope_kv_params params = *(const struct rope_kv_params *)arg;
    int64_t row = (int64_t)(params.num_heads + 2 * params.kv.num_kv_heads) * params.kv.head_dim;
    params.qkv += first * row;
    params.positions += first;
    params.slot_mapping += first;
    params.num_tokens = count;
    ops_rope_kv(ops, &params);
}

/* Distinct slots in random order. */
static void fill_slots(struct harness *harness, int32_t *slots, int32_t num_tokens,
                       int32_t num_slots)
{
    int32_t *order = harness_alloc(harness, (size_t)num_slots, sizeof(int32_t));
    for (int32_t idx = 0; idx < num_slots; idx++) {
        order[idx] = idx;
    }
    for (int32_t idx = 0; idx < num_tokens; idx++) {
        int32_t other = idx + harness_random_below(harness, num_slots - idx);
        int32_t slot = order[other];
        order[other] = order[idx];
        slots[idx] = order[idx] = slot;
    }
}

/* q and k of one token after their norms, if there are any; v as it is. errors: relative. */
static void expect_norms(const struct rope_kv_params *params, const float *initial, double *normed,
                         double *errors)
{
    int32_t head_dim = params->kv.head_dim;
    int32_t num_heads = params->num_heads + 2 * params->kv.num_kv_heads;
    for (int32_t head = 0; head < num_heads; head++) {
        bool is_q = head < params->num_heads;
        bool is_k = !is_q && head < params->num_heads + params->kv.num_kv_heads;
        const float *weight = is_q ? params->q_norm : is_k ? params->k_norm : NULL;
        double sum = 0.0;
        for (int32_t dim = 0; dim < head_dim; dim++) {
            double x = initial[head * head_dim + dim];
            sum += x * x;
        }
        double scale = 1.0 / sqrt(sum / head_dim + (double)params->norm_eps);
        for (int32_t dim = 0; dim < head_dim; dim++) {
            int32_t idx = head * head_dim + dim;
            normed[idx] = initial[idx] * (weight == NULL ? 1.0 : scale * weight[dim]);
            /* As in check_rmsnorm: a sum without cancellation, of which a root is taken, and six
             * more roundings. */
            errors[idx] = weight == NULL ? 0.0 : (head_dim / 8.0 + 10.0) * HARNESS_UNIT;
        }
    }
}

static void expect_rotation(struct harness *harness, const struct rope_kv_params *params,
                            const float *initial, double *expected, double *bound)
{
    int32_t head_dim = params->kv.head_dim, half = head_dim / 2;
    int32_t num_rotated = params->num_heads + params->kv.num_kv_heads;
    int64_t width = (int64_t)(params->num_heads + 2 * params->kv.num_kv_heads) * head_dim;
    double *normed = harness_alloc(harness, (size_t)width, sizeof(double));
    double *errors = harness_alloc(harness, (size_t)width, sizeof(double));
    for (int64_t idx = 0; idx < params->num_tokens * width; idx++) {
        int64_t token = idx / width, head = idx % width / head_dim, at = idx % width;
        int32_t dim = (int32_t)(idx % head_dim);
        if (at == 0) {
            expect_norms(params, initial + idx, normed, errors);
        }
        expected[idx] = initial[idx];
        if (head < num_rotated) {
            const float *angles = params->cos_sin + (int64_t)params->positions[token] * head_dim;
            int32_t pair = params->is_interleaved ? dim / 2 : dim % half;
            int32_t distance = params->is_interleaved ? 1 : half;
            bool is_low = params->is_interleaved ? dim % 2 == 0 : dim < half;
            double cosine = angles[pair],
                   sine = is_low ? -angles[half + pair] : angles[half + pair];
            double other = normed[is_low ? at + distance : at - distance];
            expected[idx] = normed[at] * cosine + other * sine;
            bound[idx] = (2.0 * HARNESS_UNIT + errors[at]) *
                             (fabs(normed[at] * cosine) + fabs(other * sine)) +
                         0x1p-149;
        }
    }
}

/* The whole cache as one row: what it held, but for the mapped slots, which hold k and v. */
static void expect_cache(const struct rope_kv_params *params, const double *qkv,
                         const double *qkv_bound, float *initial_cache, int64_t num_cached,
                         double *expected, double *bound)
{
    const struct kv_view *kv = &params->kv;
    int64_t head_dim = kv->head_dim, k_width = kv->num_kv_heads * head_dim;
    int64_t q_width = params->num_heads * head_dim;
    for (int64_t idx = 0; idx < num_cached; idx++) {
        expected[idx] = initial_cache[idx];
    }
    for (int64_t token = 0; token < params->num_tokens; token++) {
        int32_t block_idx = params->slot_mapping[token] / kv->block_size;
        int64_t offset = params->slot_mapping[token] % kv->block_size * head_dim;
        for (int32_t head = 0; head < kv->num_kv_heads; head++) {
            const float *keys =
                (float *)(void *)kv_view_keys(kv, block_idx, params->layer_idx, head) + offset;
            const float *values =
                (float *)(void *)kv_view_values(kv, block_idx, params->layer_idx, head) + offset;
            int64_t k_idx = token * (q_width + 2 * k_width) + q_width + head * head_dim;
            int64_t v_idx = k_idx + k_width;
            int64_t k_at = keys - (const float *)(void *)kv->blocks;
            int64_t v_at = values - (const float *)(void *)kv->blocks;
            for (int64_t dim = 0; dim < head_dim; dim++) {
                expected[k_at + dim] = qkv[k_idx + dim];
                bound[k_at + dim] = qkv_bound[k_idx + dim];
                expected[v_at + dim] = qkv[v_idx + dim];
            }
        }
    }
}

static void build_case(struct harness *harness, struct rope_shape shape,
                       struct rope_variant variant, struct rope_kv_params *params,
                       struct check_plan *plan)
{
    int64_t width = (int64_t)(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
    int64_t num_elements = shape.num_tokens * width;
    int32_t num_positions = shape.num_tokens + 100;
    int32_t num_blocks = shape.num_tokens / shape.block_size + 2;
    /* Blocks are longer than their contents, as when they are rounded up to pages. */
    size_t plane_elements =
        (size_t)shape.num_kv_heads * (size_t)shape.block_size * (size_t)shape.head_dim;
    size_t block_bytes = (NUM_LAYERS * 2 * plane_elements + 13) * sizeof(float);
    int64_t num_cached = (int64_t)((size_t)num_blocks * block_bytes / sizeof(float));

    float *qkv = harness_place(harness, (size_t)num_elements * sizeof(float), 0);
    float *cos_sin =
        harness_place(harness, (size_t)(num_positions * shape.head_dim) * sizeof(float), 0);
    int32_t *positions = harness_place(harness, (size_t)shape.num_tokens * sizeof(int32_t), 0);
    int32_t *slots = harness_place(harness, (size_t)shape.num_tokens * sizeof(int32_t), 0);
    float *cache = harness_place(harness, (size_t)num_blocks * block_bytes, 0);
    float *norms[2];
    for (int idx = 0; idx < 2; idx++) {
        norms[idx] = harness_place(harness, (size_t)shape.head_dim * sizeof(float), 0);
        harness_fill(harness, norms[idx], 1, shape.head_dim, shape.head_dim, 1.0);
        harness_seal(harness, norms[idx]);
    }
    int32_t half = shape.head_dim / 2;
    for (int32_t position = 0; position < num_positions; position++) {
        for (int32_t pair = 0; pair < half; pair++) {
            double angle = position * pow(THETA, -2.0 * pair / shape.head_dim);
            cos_sin[position * shape.head_dim + pair] = (float)cos(angle);
            cos_sin[position * shape.head_dim + half + pair] = (float)sin(angle);
        }
    }
    for (int32_t token = 0; token < shape.num_tokens; token++) {
        positions[token] = token == 0 ? num_positions - 1 /* the last row of cos_sin */
                                      : harness_random_below(harness, num_positions);
    }
    fill_slots(harness, slots, shape.num_tokens, num_blocks * shape.block_size);
    harness_seal(harness, cos_sin);
    harness_seal(harness, positions);
    harness_seal(harness, slots);
    *params = (struct rope_kv_params){.qkv = qkv,
                                      .cos_sin = cos_sin,
                                      .q_norm = variant.has_q_norm ? norms[0] : NULL,
                                      .k_norm = variant.has_k_norm ? norms[1] : NULL,
                                      .positions = positions,
                                      .slot_mapping = slots,
                                      .kv = {.blocks = (unsigned char *)cache,
                                             .block_bytes = block_bytes,
                                             .num_layers = NUM_LAYERS,
                                             .num_kv_heads = shape.num_kv_heads,
                                             .block_size = shape.block_size,
                                             .head_dim = shape.head_dim},
                                      .layer_idx = LAYER_IDX,
                                      .num_tokens = shape.num_tokens,
                                      .num_heads = shape.num_heads,
                                      .norm_eps = NORM_EPS,
                                      .is_interleaved = variant.is_interleaved};

    float *initial = harness_alloc(harness, (size_t)num_elements, sizeof(float));
    float *initial_cache = harness_alloc(harness, (size_t)num_cached, sizeof(float));
    double *expected = harness_alloc(harness, (size_t)num_elements, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_elements, sizeof(double));
    double *expected_cache = harness_alloc(harness, (size_t)num_cached, sizeof(double));
    double *bound_cache = harness_alloc(harness, (size_t)num_cached, sizeof(double));
    harness_fill(harness, initial, 1, num_elements, num_elements, variant.scale);
    harness_fill(harness, initial_cache, 1, num_cached, num_cached, 1.0);
    expect_rotation(harness, params, initial, expected, bound);
    expect_cache(params, expected, bound, initial_cache, num_cached, expected_cache, bound_cache);
    *plan = (struct check_plan){.run = run_rope_kv,
                                .arg = params,
                                .num_rows = shape.num_tokens,
                                .num_outputs = 2,
                                .outputs = {{.at = qkv,
                                             .num_rows = shape.num_tokens,
                                             .width = width,
                                             .stride = width,
                                             .initial = initial,
                                             .expected = expected,
                                             .bound = bound},
                                            {.at = cache,
                                             .num_rows = 1,
                                             .width = num_cached,
                                             .stride = num_cached,
                                             .initial = initial_cache,
                                             .expected = expected_cache,
                                             .bound = bound_cache}}};
}

/* The cached k is the rotated k, bit for bit (after the last run of the case). */
static void check_copies(struct harness *harness, const struct rope_kv_params *params)
{
    const struct kv_view *kv = &params->kv;
    int64_t head_dim = kv->head_dim, q_width = params->num_heads * head_dim;
    int64_t width = q_width + 2 * kv->num_kv_heads * head_dim;
    for (int64_t token = 0; token < params->num_tokens; token++) {
        for (int32_t head = 0; head < kv->num_kv_heads; head++) {
            int32_t slot = params->slot_mapping[token];
            struct kv_row cached =
                kv_view_row(kv, kv_view_keys(kv, slot / kv->block_size, params->layer_idx, head),
                            slot % kv->block_size);
            const float *k = params->qkv + token * width + q_width + head * head_dim;
            harness_expect(harness,
                           memcmp(cached.elements, k, (size_t)head_dim * sizeof(float)) == 0,
                           "token %d, kv head %d: the cached key is not the rotated key",
                           (int)token, (int)head);
        }
    }
}

static void checks(struct harness *harness)
{
    static const struct rope_shape shapes[] = {
        {1, 1, 1, 2, 1},    {7, 2, 1, 8, 16},    {5, 4, 2, 32, 4},  {63, 8, 4, 8, 16},
        {9, 14, 2, 64, 16}, {65, 14, 2, 64, 16}, {6, 5, 5, 80, 16}, {4, 4, 1, 128, 32},
        {3, 3, 1, 6, 7},    {2, 2, 1, 320, 3},
    };
    static const struct rope_variant variants[] = {
        {"rope_kv", false, false, false, 1.0},
        {"rope_kv, pairs", false, false, true, 1.0},
        {"rope_kv, norms", true, true, false, 1.0},
        {"rope_kv, norms, small rows", true, true, false, 1e-3},
        {"rope_kv, norms, pairs", true, true, true, 1e6},
        {"rope_kv, norm of q", true, false, false, 1.0},
        {"rope_kv, norm of k", false, true, true, 1.0},
    };
    for (size_t variant = 0; variant < sizeof(variants) / sizeof(variants[0]); variant++) {
        harness_group(harness, "%s", variants[variant].name);
        for (size_t idx = 0; idx < PLACEMENT_COUNT * sizeof(shapes) / sizeof(shapes[0]); idx++) {
            struct rope_kv_params params;
            struct check_plan plan;
            struct rope_shape shape = shapes[idx / PLACEMENT_COUNT];
            harness_case(harness, "%s, %d tokens, %d/%d heads of %d, blocks of %d",
                         variants[variant].name, (int)shape.num_tokens, (int)shape.num_heads,
                         (int)shape.num_kv_heads, (int)shape.head_dim, (int)shape.block_size);
            harness_set_placement(harness, (enum placement)(idx % PLACEMENT_COUNT));
            build_case(harness, shape, variants[variant], &params, &plan);
            harness_check(harness, &plan);
            check_copies(harness, &params);
            harness_end_case(harness);
        }
    }
}

static void benches(struct harness *harness)
{
    static const struct rope_shape shapes[] = {
        {1, 14, 2, 64, 16}, {128, 14, 2, 64, 16}, {128, 16, 8, 128, 16}, {128, 32, 8, 128, 16}};
    static const struct rope_variant variants[] = {{"", false, false, false, 1.0},
                                                   {"", false, false, false, 1.0},
                                                   {", norms", true, true, false, 1.0},
                                                   {", pairs", false, false, true, 1.0}};
    for (size_t idx = 0; idx < sizeof(shapes) / sizeof(shapes[0]); idx++) {
        struct rope_kv_params params;
        struct check_plan plan;
        struct rope_shape shape = shapes[idx];
        double rotated =
            (double)shape.num_tokens * (shape.num_heads + shape.num_kv_heads) * shape.head_dim;
        /* v is read, k and v are stored. */
        double copied = 3.0 * shape.num_tokens * shape.num_kv_heads * shape.head_dim;
        harness_case(harness, "rope_kv %d tokens, %d/%d heads of %d%s", (int)shape.num_tokens,
                     (int)shape.num_heads, (int)shape.num_kv_heads, (int)shape.head_dim,
                     variants[idx].name);
        build_case(harness, shape, variants[idx], &params, &plan);
        harness_check(harness, &plan);
        harness_bench(harness, &plan, NULL, rotated * (variants[idx].has_q_norm ? 7.0 : 3.0),
                      4.0 * (2.0 * rotated + copied));
        harness_end_case(harness);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
