/* SPDX-License-Identifier: Apache-2.0 */
/* How fast sequences are read and written: tests in llama-bench's sense, each of them a prompt
 * (pp512) or a number of tokens that one or several sequences generate together (tg128), behind a
 * context of `depth` tokens. */
#ifndef IMBREX_CLI_SPEED_RUN_H
#define IMBREX_CLI_SPEED_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "cli/gpu_meter.h"
#include "cli/roofs.h"
#include "cli/spread.h"
#include "imbrex.h"

struct speed_test {
    int32_t num_tokens; /* of the prompt, or to generate for each sequence */
    int32_t depth;      /* tokens in the context before them */
    int32_t batch;      /* sequences that generate together; 1 of a prompt */
    bool is_prompt;
};

#define SPEED_TEST_NAME_BYTES 64
/* "pp512", "tg128 @ d4096", "tg128 x8 @ d4096". Returns `name`. */
const char *speed_test_name(const struct speed_test *test, char name[SPEED_TEST_NAME_BYTES]);

/* Tokens that a sequence of the test has at most, if a step takes so many. A batch's first sequence
 * has begun to generate while the last one is still read. */
int32_t speed_context_tokens(const struct speed_test *test, int32_t max_step_tokens);
/* KV cache that holds the contexts and two samples behind them: the older one is given up first. */
int64_t speed_kv_tokens(const struct speed_test *test, int32_t max_step_tokens);

/* What the test's tokens take in all, behind a context of `depth` tokens each. */
struct speed_work {
    double flops; /* of products with weights, keys and values */
    double bytes; /* of generating: weights once for each step, the KV cache of each sequence */
};
struct speed_work speed_work_of(const struct imbrex_model *model,
                                const struct imbrex_memory_plan *plan,
                                const struct speed_test *test, double depth);

/* One engine's samples. */
struct speed_series {
    int64_t *samples_ns;              /* [num_samples] */
    double *step_ns;                  /* [num_samples], the median step of each; of a prompt 0 */
    double mean_rate, rate_deviation; /* tokens/s, with the deviation of a sample */
    double median_rate;
    double step_ms;          /* median over the samples */
    struct spread over_full; /* time of a sample by that of the first engine beside it */
};

#define SPEED_MAX_ENGINES 16

struct speed_engine {
    struct imbrex_engine *engine; /* with a prefix cache if any depth is above 0 */
    const char *name;             /* of what it does without, or of kv_dtype; NULL: the first one */
    uint32_t ablations;           /* the same as bits of enum imbrex_ablation */
    bool is_omission;             /* the part is not computed at all: for its share */
    bool has_kv_dtype; /* nothing is left out, keys and values are kept as another type */
    enum imbrex_kv_dtype kv_dtype;
};

struct speed_result {
    struct speed_test test;
    int32_t num_threads;
    const char *kernels;                           /* static storage */
    struct speed_series series[SPEED_MAX_ENGINES]; /* of each engine */
    int32_t num_series;
    double *roof_rates;  /* [num_samples], mean of before and after each; 0: not measured */
    enum roof_kind roof; /* read of generated tokens */
    const char *roof_instructions; /* of a CPU; static storage */
    int32_t num_samples;
    /* Medians over the samples of the first engine, percent of the roof beside each; 0: not
     * measured. */
    double roof_percent;
    struct speed_work work;
    double depth; /* mean context: sequences of a batch begin one after the other */
    bool has_reading;
    struct gpu_reading reading; /* of a run of its own */
    double joules_per_token;    /* below 0: not known */
};

struct speed_settings {
    const struct imbrex_model *model;
    const struct imbrex_memory_plan *plan; /* of the first engine */
    struct speed_engine engines[SPEED_MAX_ENGINES];
    int32_t num_engines;
    struct roofs *roofs;     /* NULL: not measured */
    struct gpu_meter *meter; /* of a GPU, whose roofs are measured if has_gpu_roofs; or NULL */
    bool has_gpu_roofs;
    double energy_ms; /* how long the run is whose energy is read; 0: none */
    int32_t num_samples;
    int32_t vocab_size;         /* random ids are below */
    enum roof_kind prompt_roof; /* what the products of a prompt are measured by */
    bool has_warmup;
    const int32_t *prefix_ids; /* [the largest batch, prefix_stride] */
    int32_t prefix_stride;     /* the largest depth */
};

/* Runs one test. With a noted signal, *result may have fewer samples. Returns an exit code; the
 * result is to be released in any case. */
int speed_run(const struct speed_settings *settings, const struct speed_test *test,
              struct speed_result *result);
void speed_result_release(struct speed_result *result);

/* The same ids for everybody: a small generator of its own, seeded. */
void speed_random_ids(uint64_t *state, int32_t vocab_size, int32_t *token_ids, int64_t count);

#endif
