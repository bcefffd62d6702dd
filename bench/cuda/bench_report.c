/* SPDX-License-Identifier: Apache-2.0 */
/* The table that a person reads and the JSON file that a README's figure comes from. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "bench/cuda/bench_cell.h"
#include "bench/cuda/bench_image.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/report_header.h"

/* Dense bf16 by the data sheet of the H100 and H200 SXM, and what it is made of: 132 SMs of 4096
 * operations a clock, at 1.83 GHz. Memory by the data sheet of the H200. */
#define NOMINAL_TFLOPS 989.0
#define FLOPS_PER_SM_CLOCK 4096.0
#define NOMINAL_MEMORY_TBS 4.8

#define DATE_BYTES 32

struct bench_report {
    json_t *root, *rows;
    double log_gain_sum, log_unfused_sum;         /* of ours, the first contestant */
    double log_slices_sum[CONTESTANT_KIND_COUNT]; /* time of the baselines over ours */
    int num_slices[CONTESTANT_KIND_COUNT];
    double log_gate_first_sum, log_gate_first_ours_sum; /* of the best plan of each cell */
    double least_gain, best_tflops;
    int num_cells, num_unfused, num_gate_first, num_at_least_one, num_below_095;
};

static json_t *spread_json(const struct spread *spread)
{
    return json_pack("{s:f, s:f, s:f}", "median", spread->median, "p10", spread->p10, "p90",
                     spread->p90);
}

static const char *now_text(char text[DATE_BYTES])
{
    time_t now = time(NULL);
    struct tm parts;
    if (gmtime_r(&now, &parts) == NULL ||
        strftime(text, DATE_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
        text[0] = '\0';
    }
    return text;
}

static const char *choice_name(int64_t value, const char *const *names, int64_t count)
{
    return value >= 0 && value < count ? names[value] : "?";
}

/* What gemm_swiglu computes beside SwiGLU. */
static bool add_semantics(const struct bench *bench, json_t *header)
{
    const struct bench_ops_settings *settings = bench->settings;
    bool is_exact = settings->rounding.value == IMBREX_ROUNDING_EXACT;
    return json_object_set_new(
               header, "activations",
               json_string(settings->activations != NULL ? settings->activations : "silu")) == 0 &&
           json_object_set_new(header, "rounding",
                               json_string(is_exact ? "exact" : "match-unfused")) == 0 &&
           json_object_set_new(header, "interleave_rows",
                               json_integer((json_int_t)settings->interleave.value)) == 0 &&
           json_object_set_new(header, "bias", json_boolean(settings->bias)) == 0;
}

static json_t *header_json(const struct bench *bench)
{
    static const char *const clocks[] = {"warm", "burst", "sustained"};
    static const char *const weights[] = {"gate-up", "up-gate", "separate"};
    char release[NVML_TEXT_BYTES] = "", date[DATE_BYTES];
    const struct imbrex_device_info *description = &bench->description;

    (void)nvml_driver_release(bench->nvml, release);
    bool is_plain = bench->settings->op.value == IMBREX_KERNEL_OP_GEMM;
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:f, s:f, s:s, s:s, "
                     "s:b, s:b, s:I, s:f, s:f, s:s?, s:i}",
                     "benchmark", "ops", "op", is_plain ? "gemm" : "gemm_swiglu", "version",
                     imbrex_version(), "commit", bench_commit(), "date", now_text(date), "gpu",
                     description->name, "driver", release, "cuda_driver",
                     (int)description->driver_version, "num_sms", (int)description->num_sms,
                     "l2_bytes", (json_int_t)description->l2_bytes, "cublaslt",
                     (json_int_t)cublaslt_version(bench->lt), "nominal_tflops", NOMINAL_TFLOPS,
                     "nominal_memory_tbs", NOMINAL_MEMORY_TBS, "clock",
                     choice_name(bench->settings->clock.value, clocks, 3), "weights",
                     choice_name(bench->settings->weights.value, weights, 3), "overlap_launches",
                     !bench->settings->no_overlap, "portable", bench->is_portable, "pairs",
                     (json_int_t)bench->settings->num_pairs.value, "replay_ms",
                     bench->settings->replay_ms.value, "rest_ms", bench->settings->rest_ms.value,
                     "tuned", description->tuned, "num_tuned", (int)description->num_tuned);
}

struct bench_report *bench_report_create(const struct bench *bench)
{
    struct bench_report *report = calloc(1, sizeof(*report));
    if (report != NULL) {
        report->root = header_json(bench);
        report->rows = json_array();
    }
    if (report == NULL || report->root == NULL || report->rows == NULL ||
        (bench->settings->op.value == IMBREX_KERNEL_OP_GEMM_SWIGLU &&
         !add_semantics(bench, report->root))) {
        (void)output_out_of_memory();
        bench_report_destroy(report);
        return NULL;
    }
    report->least_gain = INFINITY;
    char release[NVML_TEXT_BYTES] = "unknown";
    (void)nvml_driver_release(bench->nvml, release);
    output_printf("%s, %d SMs, driver %s, cuBLASLt %zu, commit %s\n", bench->description.name,
                  (int)bench->description.num_sms, release, cublaslt_version(bench->lt),
                  bench_commit());
    if (bench->description.tuned != NULL) {
        output_printf("tuned plans: %s, %d in use\n", bench->description.tuned,
                      (int)bench->description.num_tuned);
    } else {
        output_printf("tuned plans: none\n");
    }
    return report;
}

void bench_report_destroy(struct bench_report *report)
{
    if (report != NULL) {
        json_decref(report->root);
        json_decref(report->rows);
        free(report);
    }
}

/* The least time that the data sheet allows, microseconds, and by which of its two rates. */
static double roof_us(const struct bench_cell *cell, bool *is_memory)
{
    double compute_us = cell->flops / (NOMINAL_TFLOPS * 1e6);
    double memory_us = cell->bytes / (NOMINAL_MEMORY_TBS * 1e6);
    *is_memory = memory_us > compute_us;
    return *is_memory ? memory_us : compute_us;
}

static double tflops_of(const struct bench_cell *cell, const struct contestant *contestant)
{
    return cell->flops / contestant->time_us.median * 1e-6;
}

/* Of what the SMs could do at the clock they had; 0: unknown. */
static double clock_percent(const struct bench *bench, const struct bench_cell *cell, double tflops)
{
    double peak =
        bench->description.num_sms * FLOPS_PER_SM_CLOCK * cell->clock_mhz * 1e-6; /* TFLOP/s */
    return cell->has_clock && peak > 0.0 ? 100.0 * tflops / peak : 0.0;
}

static json_t *contestant_json(const struct bench *bench, const struct bench_cell *cell,
                               const struct contestant *contestant)
{
    static const char *const kinds[CONTESTANT_KIND_COUNT] = {
        "imbrex", "gemm", "gemm and activation", "heuristic", "streams", "gate_first"};
    double tflops = tflops_of(cell, contestant);
    json_t *row = json_pack(
        "{s:s, s:s, s:i, s:o, s:o, s:o, s:f, s:f, s:f, s:f}", "kind", kinds[contestant->kind],
        "name", contestant->name, "calls", contestant->num_calls, "us",
        spread_json(&contestant->time_us), "speedup_over_gemm", spread_json(&contestant->gain),
        "time_over_first", spread_json(&contestant->over_chosen), "tflops", tflops,
        "percent_of_nominal", 100.0 * tflops / NOMINAL_TFLOPS, "worst_error_of_bound",
        contestant->worst_error, "share_beyond_ulp", contestant->beyond_ulp);
    bool is_ok = row != NULL;
    if (is_ok && cell->has_clock) {
        is_ok = json_object_set_new(row, "percent_at_clock",
                                    json_real(clock_percent(bench, cell, tflops))) == 0;
    }
    if (is_ok && cell->has_watts) {
        is_ok =
            json_object_set_new(row, "joules_at_mean_power",
                                json_real(cell->watts * contestant->time_us.median * 1e-6)) == 0;
    }
    if (is_ok && (contestant->kind == CONTESTANT_OURS || contestant->kind == CONTESTANT_SWISH)) {
        struct imbrex_kernel_variant variant;
        is_ok =
            imbrex_kernel_variant_describe((enum imbrex_kernel_op)bench->settings->op.value,
                                           contestant->plan.variant_idx, &variant,
                                           NULL) == IMBREX_STATUS_OK &&
            json_object_set_new(
                row, "plan",
                json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "kernel",
                          variant.name, "schedule", variant.schedule, "block_m",
                          (int)variant.block_m, "block_n", (int)variant.block_n, "cluster_m",
                          (int)contestant->plan.cluster_m, "cluster_n",
                          (int)contestant->plan.cluster_n, "group_m", (int)contestant->plan.group_m,
                          "num_tiles_n", (int)contestant->plan.num_tiles_n, "waves",
                          (int)contestant->plan.num_waves, "expected_us",
                          contestant->plan.expected_us)) == 0;
    }
    if (is_ok && contestant->kind != CONTESTANT_GEMM &&
        bench->settings->op.value == IMBREX_KERNEL_OP_GEMM_SWIGLU) {
        is_ok = json_object_set_new(
                    row, "activation",
                    json_string(bench->cells->gatings[contestant->gating_idx].name)) == 0;
    }
    if (is_ok && contestant_is_sliced(contestant)) {
        is_ok = json_object_set_new(row, "slices",
                                    json_pack("{s:i, s:i, s:i}", "width", (int)cell->slice_width,
                                              "count", (int)cell->num_slices, "streams",
                                              contestant->kind == CONTESTANT_STREAMS
                                                  ? (int)cell->num_streams
                                                  : 1)) == 0;
    }
    if (is_ok && contestant->has_energy) {
        is_ok = json_object_set_new(row, "alone",
                                    json_pack("{s:f, s:f, s:f}", "joules", contestant->joules,
                                              "watts", contestant->energy_watts, "sm_clock_mhz",
                                              contestant->energy_clock_mhz)) == 0;
    }
    if (!is_ok) {
        json_decref(row);
        return NULL;
    }
    return row;
}

static json_t *cell_json(const struct bench *bench, const struct bench_cell *cell)
{
    bool is_memory;
    double least_us = roof_us(cell, &is_memory);
    json_t *contestants = json_array();
    bool is_ok = contestants != NULL;
    for (int i = 0; is_ok && i < cell->num_contestants; i++) {
        json_t *row = contestant_json(bench, cell, &cell->contestants[i]);
        is_ok = row != NULL && json_array_append_new(contestants, row) == 0;
    }
    if (!is_ok) {
        json_decref(contestants);
        return NULL;
    }
    json_t *hidden = cell->has_hidden_share
                         ? json_pack("{s:o, s:o, s:i}", "share", spread_json(&cell->hidden_share),
                                     "share_of_swish", spread_json(&cell->hidden_share_of_swish),
                                     "pairs_of_share", cell->pairs_of_share)
                         : NULL;
    return json_pack("{s:s, s:i, s:i, s:I, s:i, s:f, s:f, s:f, s:s, s:f, s:o, s:o, s:o, s:o*}",
                     "shape", cell->shape->name, "hidden_size", (int)cell->shape->hidden_size,
                     "intermediate_size", (int)cell->shape->intermediate_size, "m",
                     (json_int_t)cell->m, "input_sets", cell->num_sets, "flops", cell->flops,
                     "bytes", cell->bytes, "flops_per_byte", cell->flops / cell->bytes, "bound_by",
                     is_memory ? "memory" : "tensor cores", "roof_us", least_us, "sm_clock_mhz",
                     cell->has_clock ? json_real(cell->clock_mhz) : json_null(), "watts",
                     cell->has_watts ? json_real(cell->watts) : json_null(), "contestants",
                     contestants, "hidden", hidden);
}

static void print_cell(const struct bench_report *report, const struct bench *bench,
                       const struct bench_cell *cell)
{
    bool is_memory;
    (void)roof_us(cell, &is_memory);
    if (report->num_cells == 0) {
        output_printf("%-6s %6s %9s %19s %6s %5s %5s %6s %-15s  %s\n", "shape", "m", "us",
                      "p10 - p90", "TF/s", "%989", "%clk", "x gemm", "p10 - p90", "who");
    }
    for (int i = 0; i < cell->num_contestants; i++) {
        const struct contestant *contestant = &cell->contestants[i];
        double tflops = tflops_of(cell, contestant);
        output_printf("%-6s %6d %9.2f %9.2f-%9.2f %6.1f %5.1f %5.1f %6.3f %.3f-%.3f      %s",
                      i == 0 ? cell->shape->name : "", (int)cell->m, contestant->time_us.median,
                      contestant->time_us.p10, contestant->time_us.p90, tflops,
                      100.0 * tflops / NOMINAL_TFLOPS, clock_percent(bench, cell, tflops),
                      contestant->gain.median, contestant->gain.p10, contestant->gain.p90,
                      contestant->name);
        if (contestant->kind == CONTESTANT_STREAMS) {
            output_printf(" over %d streams", (int)cell->num_streams);
        }
        if (contestant_is_sliced(contestant) && cell->contestants[0].kind == CONTESTANT_OURS) {
            output_printf("; %.3f (%.3f-%.3f) x the time of the first",
                          contestant->over_chosen.median, contestant->over_chosen.p10,
                          contestant->over_chosen.p90);
        }
        if (contestant->has_energy) {
            output_printf("; alone %.4g J, %.0f W, %.0f MHz", contestant->joules,
                          contestant->energy_watts, contestant->energy_clock_mhz);
        }
        if (i == 0) {
            output_printf("; %.0f FLOP/B, %s", cell->flops / cell->bytes,
                          is_memory ? "memory" : "tensor cores");
            if (cell->has_clock) {
                output_printf(", %.0f MHz", cell->clock_mhz);
            }
            if (cell->has_watts) {
                output_printf(", %.0f W", cell->watts);
            }
        }
        output_printf("\n");
    }
    if (cell->has_hidden_share) {
        const struct spread *share = &cell->hidden_share, *of_swish = &cell->hidden_share_of_swish;
        output_printf("%-6s %6d hidden: %.1f %% (%.1f - %.1f) of what serialised Swish costs, "
                      "%.1f %% (%.1f - %.1f) without the wait ahead of it\n",
                      "", (int)cell->m, 100.0 * share->median, 100.0 * share->p10,
                      100.0 * share->p90, 100.0 * of_swish->median, 100.0 * of_swish->p10,
                      100.0 * of_swish->p90);
    }
    (void)output_flush();
}

/* Of the contestants that run gate_first, the fastest; NULL: there is none. */
static const struct contestant *best_gate_first(const struct bench *bench,
                                                const struct bench_cell *cell)
{
    const struct contestant *best = NULL;
    for (int i = 0; i < cell->num_contestants; i++) {
        const struct contestant *contestant = &cell->contestants[i];
        struct imbrex_kernel_variant variant;
        if (contestant->kind == CONTESTANT_OURS &&
            imbrex_kernel_variant_describe((enum imbrex_kernel_op)bench->settings->op.value,
                                           contestant->plan.variant_idx, &variant,
                                           NULL) == IMBREX_STATUS_OK &&
            strcmp(variant.schedule, "gate_first") == 0 &&
            (best == NULL || contestant->time_us.median < best->time_us.median)) {
            best = contestant;
        }
    }
    return best;
}

bool bench_report_add(struct bench_report *report, const struct bench *bench,
                      const struct bench_cell *cell)
{
    print_cell(report, bench, cell);
    json_t *row = cell_json(bench, cell);
    if (row == NULL || json_array_append_new(report->rows, row) != 0) {
        (void)output_out_of_memory();
        return false;
    }
    report->num_cells++;
    const struct contestant *ours = &cell->contestants[0];
    if (ours->kind != CONTESTANT_OURS || ours->gain.median <= 0.0) {
        return true;
    }
    report->log_gain_sum += log(ours->gain.median);
    report->num_at_least_one += ours->gain.median >= 1.0;
    report->num_below_095 += ours->gain.median < 0.95;
    report->least_gain = fmin(report->least_gain, ours->gain.median);
    report->best_tflops = fmax(report->best_tflops, tflops_of(cell, ours));
    const struct contestant *gate_first = best_gate_first(bench, cell);
    if (gate_first != NULL) {
        report->log_gate_first_sum += log(gate_first->gain.median);
        report->log_gate_first_ours_sum += log(ours->time_us.median / gate_first->time_us.median);
        report->num_gate_first++;
    }
    for (int i = 0; i < cell->num_contestants; i++) {
        if (cell->contestants[i].kind == CONTESTANT_UNFUSED) {
            report->log_unfused_sum +=
                log(cell->contestants[i].time_us.median / ours->time_us.median);
            report->num_unfused++;
        }
        enum contestant_kind kind = cell->contestants[i].kind;
        report->log_slices_sum[kind] += log(cell->contestants[i].over_chosen.median);
        report->num_slices[kind]++;
    }
    return true;
}

/* Of a baseline's times over ours; 0: it did not run. */
static double slices_geomean(const struct bench_report *report, enum contestant_kind kind)
{
    return report->num_slices[kind] > 0
               ? exp(report->log_slices_sum[kind] / report->num_slices[kind])
               : 0.0;
}

/* Of cells that hold no bare GEMM to compare with, their number alone. */
static json_t *summary_json(const struct bench_report *report,
                            const struct imbrex_device_info *description)
{
    if (isinf(report->least_gain)) {
        return json_pack("{s:i}", "cells", report->num_cells);
    }
    return json_pack(
        "{s:i, s:f, s:f, s:f, s:f, s:f, s:i, s:i, s:f, s:I, s:I}", "cells", report->num_cells,
        "geomean_over_gemm", exp(report->log_gain_sum / report->num_cells),
        "geomean_over_gemm_and_activation",
        report->num_unfused > 0 ? exp(report->log_unfused_sum / report->num_unfused) : 0.0,
        "geomean_heuristic_over_imbrex", slices_geomean(report, CONTESTANT_HEURISTIC),
        "geomean_streams_over_imbrex", slices_geomean(report, CONTESTANT_STREAMS),
        "least_over_gemm", report->least_gain, "cells_at_least_one", report->num_at_least_one,
        "cells_below_0.95", report->num_below_095, "best_tflops", report->best_tflops,
        "kernel_load_ns", (json_int_t)description->kernel_load_ns, "kernel_image_bytes",
        (json_int_t)description->kernel_image_bytes);
}

static bool write_json(struct bench_report *report, const struct bench *bench)
{
    struct imbrex_device_info description;
    imbrex_device_describe(bench->device, &description);
    json_t *summary = summary_json(report, &description);
    double num_gate_first = report->num_gate_first;
    bool is_ok =
        summary != NULL && json_object_set_new(report->root, "summary", summary) == 0 &&
        (report->num_gate_first == 0 ||
         json_object_set_new(
             summary, "gate_first",
             json_pack("{s:i, s:f, s:f}", "cells", report->num_gate_first, "geomean_over_gemm",
                       exp(report->log_gate_first_sum / num_gate_first), "geomean_over_chosen",
                       exp(report->log_gate_first_ours_sum / num_gate_first))) == 0) &&
        json_object_set(report->root, "rows", report->rows) == 0;
    if (!is_ok) {
        (void)output_out_of_memory();
        return false;
    }
    return report_write(bench->settings->output, NULL, report->root) == EXIT_CODE_OK;
}

int bench_report_finish(struct bench_report *report, const struct bench *bench)
{
    struct imbrex_device_info description;
    if (report->num_cells == 0) {
        return EXIT_CODE_OK;
    }
    imbrex_device_describe(bench->device, &description);
    if (bench->settings->hidden_share) {
        return bench->settings->output == NULL || write_json(report, bench) ? EXIT_CODE_OK
                                                                            : EXIT_CODE_FAILURE;
    }
    output_printf("%d cells: %.3f x the bare GEMM in geometric mean, at least 1 in %d, below 0.95 "
                  "in %d, least %.3f\n",
                  report->num_cells, exp(report->log_gain_sum / report->num_cells),
                  report->num_at_least_one, report->num_below_095, report->least_gain);
    if (report->num_unfused > 0) {
        output_printf("%.3f x GEMM and activation in geometric mean\n",
                      exp(report->log_unfused_sum / report->num_unfused));
    }
    if (report->num_gate_first > 0) {
        output_printf("gate_first: %.3f x the bare GEMM, %.3f x the chosen kernel in geometric "
                      "mean\n",
                      exp(report->log_gate_first_sum / report->num_gate_first),
                      exp(report->log_gate_first_ours_sum / report->num_gate_first));
    }
    static const struct {
        enum contestant_kind kind;
        const char *name;
    } sliced[] = {{CONTESTANT_HEURISTIC, "heuristic"}, {CONTESTANT_STREAMS, "streams"}};
    for (size_t i = 0; i < sizeof(sliced) / sizeof(sliced[0]); i++) {
        if (report->num_slices[sliced[i].kind] > 0) {
            output_printf("%s: %.3f x our time in geometric mean\n", sliced[i].name,
                          slices_geomean(report, sliced[i].kind));
        }
    }
    output_printf("kernels loaded: %lld bytes in %.1f ms\n",
                  (long long)description.kernel_image_bytes,
                  (double)description.kernel_load_ns * 1e-6);
    if (bench->settings->output != NULL && !write_json(report, bench)) {
        return EXIT_CODE_FAILURE;
    }
    return EXIT_CODE_OK;
}
