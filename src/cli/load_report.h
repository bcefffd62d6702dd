/* SPDX-License-Identifier: Apache-2.0 */
/* What `imbrex bench engine` shows: a table for people, JSON for programs. */
#ifndef IMBREX_CLI_LOAD_REPORT_H
#define IMBREX_CLI_LOAD_REPORT_H

#include "cli/load_plan.h"
#include "cli/load_run.h"
#include "imbrex.h"

#define LOAD_COMPARISON_PAIRS 3

/* The same load with batch_invariant on and off, in turns. */
struct load_comparison {
    int32_t num_pairs; /* that ran to their end */
    struct load_result on[LOAD_COMPARISON_PAIRS], off[LOAD_COMPARISON_PAIRS];
};

/* Everything that is shown. */
struct load_report {
    struct imbrex_model_info model;
    struct imbrex_memory_plan plan;
    const struct load_plan *load;
    const struct load_settings *settings;
    const char *prompt_lengths, *output_lengths; /* as asked for; NULL: the trace's */
    const char *trace;                           /* path, or NULL */
    double rate;                                 /* requests a second; 0: not given */
    double speed;                                /* of the trace's times */
    int64_t num_warmup;
    size_t num_cut;       /* requests that were longer than the context */
    bool batch_invariant; /* of the result's engine */
    const char *kv_policy;
    const char *kv_remote; /* address without its login; NULL: none */
    int32_t kv_disk_zstd_level, kv_prefetch_percent;
    enum imbrex_kv_write kv_write;
    bool was_interrupted;                     /* by a signal */
    const struct load_result *result;         /* NULL: there is a comparison instead */
    const struct load_comparison *comparison; /* NULL: there is a result instead */
};

void load_report_print(const struct load_report *report);
/* One JSON object: *text is freed by the caller with free(). Returns an exit code; want of memory
 * is reported. */
int load_report_format_json(const struct load_report *report, char **text);

#endif
