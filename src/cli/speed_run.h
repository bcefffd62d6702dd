/* SPDX-License-Identifier: Apache-2.0 */
/* How fast one sequence is read and written: tests in llama-bench's sense, each of them a prompt
 * (pp512) or a number of generated tokens (tg128), behind a context of `depth` tokens. */
#ifndef IMBREX_CLI_SPEED_RUN_H
#define IMBREX_CLI_SPEED_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "cli/roofs.h"
#include "imbrex.h"

struct speed_test {
    int32_t num_tokens; /* of the prompt, or to generate */
    int32_t depth;      /* tokens in the context before them */
    bool is_prompt;
};

#define SPEED_TEST_NAME_BYTES 48
/* "pp512", "tg128 @ d4096". Returns `name`. */
const char *speed_test_name(const struct speed_test *test, char name[SPEED_TEST_NAME_BYTES]);

/* What the test's tokens take in all. */
struct speed_work {
    double flops; /* of products with weights, keys and values */
    double bytes; /* of generating: weights and KV cache, once for each token */
};
struct speed_work speed_work_of(const struct imbrex_model *model, const struct speed_test *test);

struct speed_result {
    struct speed_test test;
    int32_t num_threads;
    const char *kernels; /* static storage */
    int64_t *samples_ns; /* [num_samples] */
    double *roof_rates;  /* [num_samples], measured before each; 0: not */
    enum roof_kind roof; /* read of generated tokens */
    int32_t num_samples;
    double mean_rate, rate_deviation; /* tokens/s, with the deviation of a sample */
    double median_rate;
    /* Medians over the samples, percent of the roof before each; 0: not measured. */
    double roof_percent;
    struct speed_work work;
};

struct speed_settings {
    const struct imbrex_model *model;
    struct imbrex_engine *engine; /* with a prefix cache if any depth is above 0 */
    struct roofs *roofs;          /* NULL: not measured */
    int32_t num_samples;
    int32_t vocab_size;         /* random ids are below */
    enum roof_kind prompt_roof; /* what the products of a prompt are measured by */
    bool has_warmup;
    const int32_t *prefix_ids; /* [the largest depth] */
};

/* Runs one test. With a noted signal, *result may have fewer samples. Returns an exit code; the
 * result is to be released in any case. */
int speed_run(const struct speed_settings *settings, const struct speed_test *test,
              struct speed_result *result);
void speed_result_release(struct speed_result *result);

/* The same ids for everybody: a small generator of its own, seeded. */
void speed_random_ids(uint64_t *state, int32_t vocab_size, int32_t *token_ids, int32_t count);

#endif
