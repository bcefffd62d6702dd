/* SPDX-License-Identifier: Apache-2.0 */
/* What `imbrex bench kv` measured, and how it is shown. */
#ifndef IMBREX_CLI_BENCH_KV_H
#define IMBREX_CLI_BENCH_KV_H

#include <stdio.h>

#include "cli/engine_settings.h"
#include "cli/gpu_meter.h"
#include "cli/load_plan.h"
#include "cli/load_run.h"
#include "imbrex.h"

#define KV_BENCH_MAX_POLICIES 16
#define KV_BENCH_NAME_BYTES 32

struct kv_run {
    const char *policy;
    int32_t round;           /* from 0 */
    bool has_host, has_disk; /* below the KV cache */
    struct load_result result;
    struct gpu_reading reading; /* with a meter; of the clock, the mean of before and behind */
};

struct kv_settings;

struct kv_bench {
    const struct kv_settings *settings;
    struct imbrex_model *model;
    struct imbrex_model_info description;
    struct load_plan load;
    size_t num_cut; /* requests that were longer than the context */
    struct imbrex_engine_options options;
    struct imbrex_memory_plan plan;
    size_t token_bytes;                  /* of keys and values */
    size_t kv_host_bytes, kv_disk_bytes; /* of the runs that have them; 0: there are none */
    char kv_folder[ENGINE_MAX_PATH_BYTES];
    size_t made_length; /* of the outermost folder in kv_folder that was made here; 0: none was */
    char policies[KV_BENCH_MAX_POLICIES][KV_BENCH_NAME_BYTES]; /* [num_policies] */
    int32_t num_policies;
    /* Of one request alone: of its prompt, and of a token of its output; 0: not measured. */
    double prefill_tokens_per_s, decode_s_per_token;
    struct kv_run *runs; /* [num_runs], in the order of time */
    int32_t num_runs;
    struct gpu_meter *meter; /* NULL: no GPU */
    struct gpu_description gpu;
    char *command_line; /* that gives the same load again */
    FILE *json_file;    /* NULL: none, or standard output */
};

/* The table, to standard output. */
void kv_bench_print(const struct kv_bench *bench);
/* *text is freed by the caller with free(). Returns an exit code; a failure is reported. */
int kv_bench_format_json(const struct kv_bench *bench, char **text);

#endif
