/* SPDX-License-Identifier: Apache-2.0 */
/* embedding: widening is exact, so every bit must match: all dtypes, odd addresses, first and last
 * row, repeated ids, infinities, NaN and subnormals in the table. */
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
    void *table = harness_place(harness, (size_t)num_weights * dtype_bytes(dtype), shift);
    int32_t *token_ids = harness_place(harness, (size_t)num_tokens * sizeof(int32_t), 0);
    float *d = harness_place(harness, (size_t)num_outputs * sizeof(float), 0);
    harness_fill_weights(harness, table, dtype, num_weights, 1.0);
    /* What widening could get wrong, in the first row. */
    static const double special[] = {-0.0,    INFINITY,     -INFINITY, NAN,
                                     0x1p-24, -0x1.ff8p-15, 0x1p-14,   65504.0};
    for (int32_t idx = 0; idx < 8 && idx < hidden_size; idx++) {
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
    for (int64_t idx = 0; idx < num_outputs; idx++) {
        int64_t row = token_ids[idx / hidden_size];
        expected[idx] = harness_weight(table, dtype, row * hidden_size + idx % hidden_size);
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
    static const int32_t num_tokens[] = {1, 7, 65}, widths[] = {1, 7, 63, 65, 896, 4097};
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        harness_group(harness, "embedding %s", dtype_name((enum dtype)dtype));
        for (size_t idx = 0; idx < 3 * 6 * PLACEMENT_COUNT; idx++) {
            int32_t tokens = num_tokens[idx % 3], width = widths[idx / 3 % 6];
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
        harness_case(harness, "embedding %s 128x896", dtype_name((enum dtype)dtype));
        build_case(harness, 128, 896, 4096, (enum dtype)dtype, 0, &embedding, &plan);
        harness_check(harness, &plan);
        harness_bench(harness, &plan, NULL, 0.0,
                      128.0 * 896.0 * (4.0 + (double)dtype_bytes((enum dtype)dtype)));
        harness_end_case(harness);
    }
}

int main(int argc, char **argv)
{
    return harness_main(argc, argv, checks, benches);
}
