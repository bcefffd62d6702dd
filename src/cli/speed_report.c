/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/speed_report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/output.h"
#include "cli/report_header.h"

/* ---- models ---------------------------------------------------------------------------------- */

/* The type of most bytes. */
static const char *main_dtype(const struct imbrex_model *model)
{
    struct imbrex_tensor_info tensor;
    const char *best = "";
    size_t best_bytes = 0;

    for (int32_t i = 0; i < imbrex_model_num_tensors(model); i++) {
        size_t num_bytes = 0;
        const char *dtype =
            imbrex_model_tensor(model, i, &tensor) == IMBREX_STATUS_OK ? tensor.dtype : "";
        for (int32_t j = 0; j < imbrex_model_num_tensors(model); j++) {
            if (imbrex_model_tensor(model, j, &tensor) == IMBREX_STATUS_OK &&
                strcmp(tensor.dtype, dtype) == 0) {
                num_bytes += tensor.num_bytes;
            }
        }
        if (num_bytes > best_bytes) {
            best = dtype;
            best_bytes = num_bytes;
        }
    }
    return best;
}

bool speed_model_is_quantized(const struct imbrex_model *model)
{
    const char *dtype = main_dtype(model);
    return dtype[0] == 'Q';
}

void speed_model_describe(const struct imbrex_model *model, struct speed_model *described)
{
    imbrex_model_describe(model, &described->info);
    double count = (double)described->info.num_parameters;
    const char *type = described->info.file_type;
    double unit = count < 1e6 ? 1e3 : count < 1e9 ? 1e6 : 1e9;
    snprintf(described->name, sizeof(described->name), "%s %.3g%c %s", described->info.architecture,
             count / unit,
             unit < 1e6   ? 'K'
             : unit < 1e9 ? 'M'
                          : 'B',
             type != NULL ? type : main_dtype(model));
}

/* ---- table ----------------------------------------------------------------------------------- */

void speed_report_print_head(void)
{
    output_printf("| %-24s | %10s | %9s | %-10s | %7s | %-16s | %19s | %-15s |\n", "model", "size",
                  "params", "backend", "threads", "test", "t/s", "of the roof");
    output_printf("| ------------------------ | ---------: | --------: | ---------- | ------: | "
                  "---------------- | ------------------: | --------------- |\n");
}

void speed_report_print_row(const struct speed_model *model, const struct speed_result *result)
{
    char size[32], params[32], backend[32], rate[48], roof[32] = "", test[SPEED_TEST_NAME_BYTES];
    double num_bytes = (double)model->info.weight_bytes;
    double count = (double)model->info.num_parameters;

    snprintf(size, sizeof(size), num_bytes < 1073741824.0 ? "%.2f MiB" : "%.2f GiB",
             num_bytes < 1073741824.0 ? num_bytes / 1048576.0 : num_bytes / 1073741824.0);
    snprintf(params, sizeof(params), count < 1e9 ? "%.2f M" : "%.2f B",
             count < 1e9 ? count / 1e6 : count / 1e9);
    snprintf(backend, sizeof(backend), "CPU %s", result->kernels);
    snprintf(rate, sizeof(rate), "%.2f ± %.2f", result->mean_rate, result->rate_deviation);
    if (result->roof_percent > 0.0) {
        snprintf(roof, sizeof(roof), "%.1f %% of %s", result->roof_percent,
                 roof_kind_name(result->roof));
    }
    /* The sign between the figures has two bytes for one column. */
    output_printf("| %-24s | %10s | %9s | %-10s | %7" PRId32 " | %-16s | %20s | %-15s |\n",
                  model->name, size, params, backend, result->num_threads,
                  speed_test_name(&result->test, test), rate, roof);
    (void)output_flush();
}

void speed_report_print_roofs(const json_t *rows)
{
    double best[ROOF_KIND_COUNT] = {0.0};
    const json_t *row, *sample;
    size_t row_idx, sample_idx;
    int num_roofs = 0;

    json_array_foreach(rows, row_idx, row)
    {
        const json_t *roof = json_object_get(row, "roof");
        const char *kind = json_string_value(json_object_get(roof, "kind"));
        json_array_foreach(json_object_get(roof, "samples"), sample_idx, sample)
        {
            for (int i = 0; i < ROOF_KIND_COUNT && kind != NULL; i++) {
                if (strcmp(kind, roof_kind_name((enum roof_kind)i)) == 0) {
                    best[i] = fmax(best[i], json_real_value(sample));
                }
            }
        }
    }
    for (int i = 0; i < ROOF_KIND_COUNT; i++) {
        if (best[i] > 0.0) {
            output_printf("%sroof %s: at best %.1f %s (%s)\n", num_roofs++ == 0 ? "\n" : "",
                          roof_kind_name((enum roof_kind)i), best[i] / 1e9,
                          i == ROOF_KIND_READ ? "GB/s" : "Gop/s",
                          roof_instructions((enum roof_kind)i));
        }
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_samples(const struct speed_result *result)
{
    json_t *samples = json_array();

    for (int32_t i = 0; i < result->num_samples; i++) {
        if (json_array_append_new(samples, json_integer(result->samples_ns[i])) != 0) {
            json_decref(samples);
            return NULL;
        }
    }
    return samples;
}

static json_t *json_roof(const struct speed_result *result)
{
    json_t *samples = json_array();

    if (result->num_samples == 0 || result->roof_rates[0] <= 0.0) {
        json_decref(samples);
        return json_null();
    }
    for (int32_t i = 0; i < result->num_samples; i++) {
        if (json_array_append_new(samples, json_real(result->roof_rates[i])) != 0) {
            json_decref(samples);
            return NULL;
        }
    }
    return json_pack("{s:s, s:s, s:f, s:o}", "kind", roof_kind_name(result->roof), "instructions",
                     roof_instructions(result->roof), "percent", result->roof_percent, "samples",
                     samples);
}

json_t *speed_report_row(const struct speed_model *model, const struct speed_result *result,
                         int32_t max_step_tokens)
{
    char test[SPEED_TEST_NAME_BYTES];
    const struct imbrex_model_info *info = &model->info;

    return json_pack(
        "{s:s, s:o, s:o, s:I, s:I, s:s, s:s, s:i, s:i, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, "
        "s:f, s:o, s:o}",
        "model", model->name, "path", report_text(info->path), "file_type",
        report_text(info->file_type), "weight_bytes", (json_int_t)info->weight_bytes, "parameters",
        (json_int_t)info->num_parameters, "device", "cpu", "kernels", result->kernels, "threads",
        (int)result->num_threads, "max_step_tokens", (int)max_step_tokens, "test",
        speed_test_name(&result->test, test), "prompt",
        result->test.is_prompt ? (int)result->test.num_tokens : 0, "generate",
        result->test.is_prompt ? 0 : (int)result->test.num_tokens, "depth", (int)result->test.depth,
        "tokens_per_s", result->mean_rate, "deviation", result->rate_deviation,
        "median_tokens_per_s", result->median_rate, "flops", result->work.flops, "bytes",
        result->work.bytes, "roof", json_roof(result), "samples_ns", json_samples(result));
}

json_t *speed_report_root(json_t *rows, bool was_interrupted)
{
    json_t *root = report_header("model");

    if (json_object_set_new(root, "interrupted", json_boolean(was_interrupted)) != 0 ||
        json_object_set(root, "rows", rows) != 0) {
        json_decref(root);
        return NULL;
    }
    return root;
}
