/* SPDX-License-Identifier: Apache-2.0 */
/* embedding: widening is exact, so every bit must match: all dtypes, odd addresses, first and last
 * row, repeated ids, infinities, NaN and subnormals in tables of plain types. */
#include <math.h>

#include "ops/harness.h"

struct embedding_case {
    struct embedding_params params;
};

static void run_embedding(struct ops *ops, void *arg, int32_t first, int32_t count)
{
    struct embedding_params params = ((const struct embedding_case *)arg)->params;
    params.token_ids += first;
    params.d += (int64_t)first * params.hidden_size;
    params.num_tokens = count;
    ops_embedding(ops, &params);
}

static void build_case(struct harness *harness, int32_t num_tokens, int32_t hidden_size,
                       int32_t vocab_size, enum dtype dtype, size_t shift,
                       struct embedding_case *embedding, struct check_plan *plan)
{
    int64_t num_weights = (int64_t)vocab_size * hidden_size;
    int64_t num_outputs = (int64_t)num_tokens * hidden_size;
    void *table = harness_place(harness, dtype_row_bytes(dtype, num_weights), shift);
    int32_t *token_ids = harness_place(harness, (size_t)num_tokens * sizeof(int32_t), 0);
    float *d = harness_place(harness, (size_t)num_outputs * sizeof(float), 0);
    harness_fill_weights(harness, table, dtype, num_weights, 1.0);
    /* What widening could get wrong, in the first row. */
    static const double special[] = {-0.0,    INFINITY,     -INFINITY, NAN,
                                     0x1p-24, -0x1.ff8p-15, 0x1p-14,   65504.0};
    for (int32_t idx = 0; idx < 8 && idx < hidden_size && !dtype_is_quantized(dtype); idx++) {
        harness_store_weight(table, dtype, idx, special[idx]);
    }
    for (int32_t token = 0; token < num_tokens; token++) {
        token_ids[token] = token == 0   ? 0
                           : token == 1 ? vocab_size - 1
                                        : harness_random_below(harness, vocab_size);
    }
    harness_seal(harness, table);
    harness_seal(harness, token_ids);
    double *expected = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    double *bound = harness_alloc(harness, (size_t)num_outputs, sizeof(double));
    for (int64_t token = 0; token < num_tokens; token++) {
        harness_weight_row(harness, (struct weight_view){table, dtype}, token_ids[token],
                           hidden_size, expected + token * hidden_size);
    }
    embedding->params = (struct embedding_params){.token_ids = token_ids,
                                                  .table = {table, dtype},
                                                  .d = d,
                                                  .num_tokens = num_tokens,
                                                  .hidden_size = hidden_size,
                                                  .vocab_size = vocab_size};
    *plan = (struct check_plan){.run = run_embedding,
                                .arg = embedding,
                                .num_rows = num_tokens,
                                .num_outputs = 1,
                                .outputs = {{.at = d,
                                             .num_rows = num_tokens,
                                             .width = hidden_size,
                                             .stride = hidden_size,
                                             .expected = expected,
                                             .bound = bound}}};
}

static void checks(struct harness *harness)
{
    static const int32_t num_tokens[] = {1, 7, 65}, plain_widths[] = {1, 7, 63, 65, 896, 4097},
                         block_widths[] = {1, 2, 3, 4, 7, 16}; /* in blocks */
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        bool is_plain = dtype < DTYPE_NUM_PLAIN;
        const int32_t *widths = is_plain ? plain_widths : block_widths;
        harness_group(harness, "embedding %s", dtype_name((enum dtype)dtype));
        for (size_t idx = 0; idx < 3 * 6 * PLACEMENT_COUNT; idx++) {
            int32_t tokens = num_tokens[idx % 3];
            int32_t width = widths[idx / 3 % 6] * dtype_block_elements((enum dtype)dtype);
            struct embedding_case embedding;
            struct check_plan plan;
            harness_case(harness, "%d tokens x %d, case %zu", (int)tokens, (int)width, idx);
            harness_set_placement(harness, (enum placement)(idx / 18));
            build_case(harness, tokens, width, 61, (enum dtype)dtype, idx % 4, &embedding, &plan);
            harness_check(harness, &plan);
            harness_end_case(harness);
        }
    }
}

static void benches(struct harness *harness)
{
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        struct embedding_case embedding;
        struct check_plan plan;
        harness_case(harness, "embedding %s 128x1024", dtype_name((enum dtype)dtype));
        build_case(harness, 128, 1024, 4096, (enum dtype)dtype, 0, &embedding, &plan);
        harness_check(harness, &plan);
        harness_bench(harness, &plan, NULL, 0.0,
                      128.0 * (1024.0 * 4.0 + (double)dtype_row_bytes((enum dtype)dtype, 1024)));
        harness_end_case(harness);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
