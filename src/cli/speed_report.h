/* SPDX-License-Identifier: Apache-2.0 */
/* What `imbrex bench model` prints, row by row, and writes as JSON. */
#ifndef IMBREX_CLI_SPEED_REPORT_H
#define IMBREX_CLI_SPEED_REPORT_H

#include <jansson.h>

#include "cli/speed_run.h"
#include "imbrex.h"

#define SPEED_MODEL_NAME_BYTES 96

struct speed_model {
    struct imbrex_model_info info;
    char name[SPEED_MODEL_NAME_BYTES]; /* "qwen2 494M Q8_0" */
};

/* Describes a model and names it, by its most frequent type if the file names no mixture. */
void speed_model_describe(const struct imbrex_model *model, struct speed_model *described);
/* Whether most of the weights are in blocks of integers. */
bool speed_model_is_quantized(const struct imbrex_model *model);

/* Of a table for a GPU, or for CPUs: NULL. */
void speed_report_print_head(const struct gpu_description *gpu);
/* A row, and one for each engine beside the first. */
void speed_report_print_row(const struct speed_model *model, const struct speed_settings *settings,
                            const struct speed_result *result);
/* The best of each measured roof that the rows of a thread count had. */
void speed_report_print_roofs(const json_t *rows);
/* What of the time a part takes, by an engine that omits it. */
double speed_report_share(const struct speed_series *series);

/* NULL if memory is out. */
json_t *speed_report_row(const struct speed_model *model, const struct speed_settings *settings,
                         const struct speed_result *result);
json_t *speed_report_root(json_t *rows, const struct gpu_description *gpu, bool was_interrupted);

#endif
