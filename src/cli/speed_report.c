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

#define GPU_READ "a kernel that only reads"
#define GPU_PEAK "wgmma, by the data sheet"

/* ---- table ----------------------------------------------------------------------------------- */

static void print_cpu_head(void)
{
    output_printf("| %-24s | %10s | %9s | %-10s | %7s | %-16s | %19s | %-15s |\n", "model", "size",
                  "params", "backend", "threads", "test", "t/s", "of the roof");
    output_printf("| ------------------------ | ---------: | --------: | ---------- | ------: | "
                  "---------------- | ------------------: | --------------- |\n");
}

static void print_gpu_head(const struct gpu_description *gpu)
{
    output_printf("%s, %" PRId32 " SMs, driver %s; bf16 peak %.0f TFLOP/s (data sheet)\n\n",
                  gpu->name, gpu->num_sms, gpu->driver[0] != '\0' ? gpu->driver : "unknown",
                  gpu->nominal_flops / 1e12);
    output_printf("| %-20s | %-10s | %-20s | %19s | %9s | %8s | %-14s | %8s | %5s | %5s |\n",
                  "model", "backend", "test", "t/s", "ms/step", "GB/step", "of the roof", "J/token",
                  "MHz", "W");
    output_printf("| -------------------- | ---------- | -------------------- | "
                  "------------------: | --------: | -------: | -------------- | -------: | ----: "
                  "| ----: |\n");
}

void speed_report_print_head(const struct gpu_description *gpu)
{
    if (gpu != NULL) {
        print_gpu_head(gpu);
    } else {
        print_cpu_head();
    }
}

static void print_cpu_row(const struct speed_model *model, const struct speed_result *result)
{
    char size[32], params[32], backend[32], rate[48], roof[32] = "", test[SPEED_TEST_NAME_BYTES];
    double num_bytes = (double)model->info.weight_bytes;
    double count = (double)model->info.num_parameters;

    snprintf(size, sizeof(size), num_bytes < 1073741824.0 ? "%.2f MiB" : "%.2f GiB",
             num_bytes < 1073741824.0 ? num_bytes / 1048576.0 : num_bytes / 1073741824.0);
    snprintf(params, sizeof(params), count < 1e9 ? "%.2f M" : "%.2f B",
             count < 1e9 ? count / 1e6 : count / 1e9);
    snprintf(backend, sizeof(backend), "CPU %s", result->kernels);
    snprintf(rate, sizeof(rate), "%.2f ± %.2f", result->series[0].mean_rate,
             result->series[0].rate_deviation);
    if (result->roof_percent > 0.0) {
        snprintf(roof, sizeof(roof), "%.1f %% of %s", result->roof_percent,
                 roof_kind_name(result->roof));
    }
    /* The sign between the figures has two bytes for one column. */
    output_printf("| %-24s | %10s | %9s | %-10s | %7" PRId32 " | %-16s | %20s | %-15s |\n",
                  model->name, size, params, backend, result->num_threads,
                  speed_test_name(&result->test, test), rate, roof);
}

/* "" for what is not known. */
static const char *known_text(char text[24], const char *format, double value)
{
    text[0] = '\0';
    if (value >= 0.0) {
        snprintf(text, 24, format, value);
    }
    return text;
}

/* The whole of a prompt counts as one step. */
static double step_ms(const struct speed_result *result, const struct speed_series *series)
{
    return result->test.is_prompt ? 1e3 * (double)result->test.num_tokens / series->median_rate
                                  : series->step_ms;
}

static double step_bytes(const struct speed_result *result)
{
    return result->test.is_prompt ? -1.0 : result->work.bytes / result->test.num_tokens;
}

static void print_gpu_row(const struct speed_model *model, const struct speed_result *result)
{
    char backend[32], rate[48], roof[32] = "", test[SPEED_TEST_NAME_BYTES];
    char bytes[24], joules[24], clock[24], watts[24];
    const struct speed_series *full = &result->series[0];

    snprintf(backend, sizeof(backend), "CUDA %s", result->kernels);
    snprintf(rate, sizeof(rate), "%.2f ± %.2f", full->mean_rate, full->rate_deviation);
    if (result->roof_percent > 0.0) {
        snprintf(roof, sizeof(roof), "%.1f %% of %s", result->roof_percent,
                 roof_kind_name(result->roof));
    }
    output_printf(
        "| %-20s | %-10s | %-20s | %20s | %9.3f | %8s | %-14s | %8s | %5s | %5s |\n", model->name,
        backend, speed_test_name(&result->test, test), rate, step_ms(result, full),
        known_text(bytes, "%.3f", step_bytes(result) / 1e9), roof,
        known_text(joules, "%.4f", result->joules_per_token),
        known_text(clock, "%.0f", result->has_reading ? result->reading.sm_clock_mhz : -1.0),
        known_text(watts, "%.0f", result->has_reading ? result->reading.watts : -1.0));
}

double speed_report_share(const struct speed_series *series)
{
    return 1.0 - series->over_full.median;
}

static void print_engine_row(const struct speed_engine *engine, const struct speed_result *result,
                             const struct speed_series *series)
{
    if (engine->is_omission) {
        output_printf("|   %s: %.1f %% of the time\n", engine->name,
                      100.0 * speed_report_share(series));
    } else {
        output_printf("|   %s %s: %.2f t/s, %.3f ms/step, %.3f times as long (%.3f-%.3f)\n",
                      engine->has_kv_dtype ? "keys and values in" : "without", engine->name,
                      series->mean_rate, step_ms(result, series), series->over_full.median,
                      series->over_full.p10, series->over_full.p90);
    }
}

void speed_report_print_row(const struct speed_model *model, const struct speed_settings *settings,
                            const struct speed_result *result)
{
    if (settings->meter != NULL) {
        print_gpu_row(model, result);
    } else {
        print_cpu_row(model, result);
    }
    for (int32_t i = 1; i < result->num_series; i++) {
        print_engine_row(&settings->engines[i], result, &result->series[i]);
    }
    (void)output_flush();
}

void speed_report_print_roofs(const json_t *rows)
{
    double best[ROOF_KIND_COUNT] = {0.0};
    const char *instructions[ROOF_KIND_COUNT] = {NULL};
    const json_t *row, *sample;
    size_t row_idx, sample_idx;
    int num_roofs = 0;

    json_array_foreach(rows, row_idx, row)
    {
        const json_t *roof = json_object_get(row, "roof");
        const char *kind = json_string_value(json_object_get(roof, "kind"));
        bool is_measured = json_is_true(json_object_get(roof, "measured"));
        json_array_foreach(json_object_get(roof, "samples"), sample_idx, sample)
        {
            for (int i = 0; i < ROOF_KIND_COUNT && kind != NULL && is_measured; i++) {
                if (strcmp(kind, roof_kind_name((enum roof_kind)i)) == 0 &&
                    json_real_value(sample) > best[i]) {
                    best[i] = json_real_value(sample);
                    instructions[i] = json_string_value(json_object_get(roof, "instructions"));
                }
            }
        }
    }
    for (int i = 0; i < ROOF_KIND_COUNT; i++) {
        if (best[i] > 0.0) {
            output_printf("%sroof %s: at best %.1f %s (%s)\n", num_roofs++ == 0 ? "\n" : "",
                          roof_kind_name((enum roof_kind)i), best[i] / 1e9,
                          i == ROOF_KIND_READ ? "GB/s" : "Gop/s", instructions[i]);
        }
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_samples(const struct speed_result *result, const struct speed_series *series)
{
    json_t *samples = json_array();

    for (int32_t i = 0; i < result->num_samples; i++) {
        if (json_array_append_new(samples, json_integer(series->samples_ns[i])) != 0) {
            json_decref(samples);
            return NULL;
        }
    }
    return samples;
}

static json_t *json_roof(const struct speed_result *result, bool is_gpu)
{
    json_t *samples = json_array();
    bool is_measured = !is_gpu || result->roof == ROOF_KIND_READ;
    const char *instructions =
        is_gpu ? (is_measured ? GPU_READ : GPU_PEAK) : result->roof_instructions;

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
    return json_pack("{s:s, s:s, s:b, s:f, s:o}", "kind", roof_kind_name(result->roof),
                     "instructions", instructions, "measured", (int)is_measured, "percent",
                     result->roof_percent, "samples", samples);
}

/* null for what is not known. */
static json_t *json_known(double value)
{
    return value >= 0.0 ? json_real(value) : json_null();
}

/* What the other engines took: those that keep keys and values as another type, or those that do
 * without something. */
static json_t *json_engines(const struct speed_settings *settings,
                            const struct speed_result *result, bool has_kv_dtype)
{
    json_t *engines = json_array();

    for (int32_t i = 1; i < result->num_series; i++) {
        if (settings->engines[i].has_kv_dtype != has_kv_dtype) {
            continue;
        }
        const struct speed_series *series = &result->series[i];
        json_t *engine = json_pack(
            "{s:s, s:b, s:f, s:f, s:{s:f, s:f, s:f}, s:o}", "name", settings->engines[i].name,
            "omitted", (int)settings->engines[i].is_omission, "tokens_per_s", series->mean_rate,
            "step_ms", step_ms(result, series), "time_over_full", "median",
            series->over_full.median, "p10", series->over_full.p10, "p90", series->over_full.p90,
            "samples_ns", json_samples(result, series));
        if (json_array_append_new(engines, engine) != 0) {
            json_decref(engines);
            return NULL;
        }
    }
    return engines;
}

/* What is told of a GPU only. False if memory is out. */
static bool add_gpu(const struct speed_settings *settings, const struct speed_result *result,
                    json_t *row)
{
    bool has_reading = result->has_reading;
    json_t *gpu =
        json_pack("{s:o, s:o, s:o, s:o, s:o}", "step_bytes", json_known(step_bytes(result)),
                  "joules_per_token", json_known(result->joules_per_token), "sm_clock_mhz",
                  json_known(has_reading ? result->reading.sm_clock_mhz : -1.0), "watts",
                  json_known(has_reading ? result->reading.watts : -1.0), "without",
                  json_engines(settings, result, false));

    bool is_ok = gpu != NULL && json_object_update(row, gpu) == 0;
    json_decref(gpu);
    return is_ok;
}

json_t *speed_report_row(const struct speed_model *model, const struct speed_settings *settings,
                         const struct speed_result *result)
{
    char test[SPEED_TEST_NAME_BYTES], device[32] = "cpu";
    const struct imbrex_model_info *info = &model->info;
    const struct imbrex_memory_plan *plan = settings->plan;
    const struct speed_series *full = &result->series[0];
    bool is_gpu = settings->meter != NULL;

    if (is_gpu) {
        snprintf(device, sizeof(device), "%s:%" PRId32, plan->device, plan->device_idx);
    }
    json_t *row = json_pack(
        "{s:s, s:o, s:o, s:I, s:I, s:s, s:s, s:s, s:s, s:i, s:i, s:s, s:i, s:i, s:i, s:f, s:i, "
        "s:f, "
        "s:f, "
        "s:f, s:f, s:f, s:f, s:o, s:o}",
        "model", model->name, "path", report_text(info->path), "file_type",
        report_text(info->file_type), "weight_bytes", (json_int_t)info->weight_bytes, "parameters",
        (json_int_t)info->num_parameters, "device", device, "compute", plan->compute, "kv_dtype",
        plan->kv_dtype, "kernels", result->kernels, "threads", (int)result->num_threads,
        "max_step_tokens", (int)plan->max_step_tokens, "test", speed_test_name(&result->test, test),
        "prompt", result->test.is_prompt ? (int)result->test.num_tokens : 0, "generate",
        result->test.is_prompt ? 0 : (int)result->test.num_tokens, "depth", (int)result->test.depth,
        "mean_context", result->depth, "batch", (int)result->test.batch, "tokens_per_s",
        full->mean_rate, "deviation", full->rate_deviation, "median_tokens_per_s",
        full->median_rate, "step_ms", step_ms(result, full), "flops", result->work.flops, "bytes",
        result->work.bytes, "roof", json_roof(result, is_gpu), "samples_ns",
        json_samples(result, full));
    bool is_ok = row != NULL &&
                 json_object_set_new(row, "beside_kv", json_engines(settings, result, true)) == 0;
    if (row != NULL && (!is_ok || (is_gpu && !add_gpu(settings, result, row)))) {
        json_decref(row);
        return NULL;
    }
    return row;
}

json_t *speed_report_root(json_t *rows, const struct gpu_description *gpu, bool was_interrupted)
{
    json_t *root = report_header("model");
    json_t *described = gpu == NULL
                            ? json_null()
                            : json_pack("{s:s, s:s, s:i, s:i, s:f}", "name", gpu->name, "driver",
                                        gpu->driver, "device_idx", (int)gpu->device_idx, "num_sms",
                                        (int)gpu->num_sms, "nominal_flops", gpu->nominal_flops);

    if (json_object_set_new(root, "interrupted", json_boolean(was_interrupted)) != 0 ||
        json_object_set_new(root, "gpu", described) != 0 ||
        json_object_set(root, "rows", rows) != 0) {
        json_decref(root);
        return NULL;
    }
    return root;
}
