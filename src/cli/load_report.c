/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/load_report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "imbrex_kv.h"

/* ---- figures --------------------------------------------------------------------------------- */

static double per_second(int64_t count, int64_t duration_ns)
{
    return duration_ns > 0 ? (double)count / ((double)duration_ns / 1e9) : 0;
}

/* Milliseconds of one step. */
static double step_share_ms(const struct load_result *result, uint64_t sum_ns)
{
    return result->num_steps > 0 ? (double)sum_ns / (double)result->num_steps / 1e6 : 0;
}

static double overhead_percent(const struct load_result *result)
{
    return result->step_ns > 0 ? 100 * (double)result->overhead_ns / (double)result->step_ns : 0;
}

static double cached_share(const struct load_result *result)
{
    return result->num_queried_tokens > 0
               ? (double)result->num_cached_tokens / (double)result->num_queried_tokens
               : 0;
}

static double output_rate(const struct load_result *result)
{
    return per_second(result->num_output_tokens, result->duration_ns);
}

/* How much less comes out with batch_invariant, in percent of what comes out without it. */
static double pair_cost_percent(const struct load_comparison *comparison, int32_t pair)
{
    double on = output_rate(&comparison->on[pair]), off = output_rate(&comparison->off[pair]);

    return off > 0 ? 100 * (off - on) / off : 0;
}

static int compare_rising(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;

    return (left > right) - (left < right);
}

struct cost {
    double median; /* percent; the mean of the middle ones if the number of pairs is even */
    double min, max;
    bool is_noise; /* the pairs differ by more than what the median says */
};

/* Of at least one pair. */
static struct cost cost_of(const struct load_comparison *comparison)
{
    double costs[LOAD_COMPARISON_PAIRS];
    int32_t count = comparison->num_pairs;

    for (int32_t i = 0; i < count; i++) {
        costs[i] = pair_cost_percent(comparison, i);
    }
    qsort(costs, (size_t)count, sizeof(costs[0]), compare_rising);
    struct cost cost = {.median = (costs[count / 2] + costs[(count - 1) / 2]) / 2,
                        .min = costs[0],
                        .max = costs[count - 1]};
    cost.is_noise = cost.max - cost.min > fabs(cost.median);
    return cost;
}

/* The measures, in the order in which they are shown. */
static const struct {
    const char *label, *key;
    size_t offset; /* of the struct load_summary in the result */
} measures[] = {
    {"TTFT", "ttft_ms", offsetof(struct load_result, ttft)},
    {"ITL", "itl_ms", offsetof(struct load_result, itl)},
    {"TPOT", "tpot_ms", offsetof(struct load_result, tpot)},
    {"queue time", "queue_ms", offsetof(struct load_result, queue)},
    {"end to end", "end_to_end_ms", offsetof(struct load_result, total)},
};
#define NUM_MEASURES (sizeof(measures) / sizeof(measures[0]))

static const struct load_summary *measure_of(const struct load_result *result, size_t idx)
{
    return (const struct load_summary *)(const void *)((const unsigned char *)result +
                                                       measures[idx].offset);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_label(const char *label)
{
    output_printf("%-14s", label);
}

/* Four digits, without an exponent for large numbers. */
static void print_number(const char *before, double value, const char *after)
{
    output_printf(value >= 1000 ? "%s%.0f%s" : "%s%.4g%s", before, value, after);
}

static void print_load(const struct load_report *report)
{
    const struct load_plan *load = report->load;

    print_label("load");
    output_printf("%zu request%s", load->count, output_plural((uint64_t)load->count));
    if (load->concurrency > 0) {
        output_printf(", %" PRId64 " at once", load->concurrency);
    } else if (report->rate > 0) {
        output_printf(", %g a second (Poisson)", report->rate);
    } else {
        output_printf(", at the times of the trace, speed %g", report->speed);
    }
    output_printf(", seed %" PRIu64 "\n", load->seed);
    print_label("");
    if (report->trace != NULL) {
        output_printf("lengths of ");
        output_escaped(report->trace, strlen(report->trace));
    } else {
        output_printf("prompts of %s token%s, outputs of %s", report->prompt_lengths,
                      strcmp(report->prompt_lengths, "1") == 0 ? "" : "s", report->output_lengths);
    }
    if (report->num_cut > 0) {
        output_printf(", %zu cut to %" PRId32 " together", report->num_cut,
                      report->plan.context_size);
    }
    output_printf(", %" PRId32 " choice%s, temperature %g, %" PRId64 " to warm up\n",
                  report->settings->num_choices,
                  output_plural((uint64_t)report->settings->num_choices),
                  (double)report->settings->temperature, report->num_warmup);
}

/* What blocks go to from the KV cache. */
static void print_tier_sizes(const struct load_report *report)
{
    const struct imbrex_memory_plan *plan = &report->plan;
    char size[SIZE_TEXT_BYTES];

    if (plan->kv_host_bytes == 0) {
        return;
    }
    print_label("");
    output_printf("below it: RAM %s", output_format_size(size, plan->kv_host_bytes));
    if (plan->kv_disk_bytes > 0) {
        output_printf(", disk %s", output_format_size(size, plan->kv_disk_bytes));
    }
    if (report->kv_disk_zstd_level > 0) {
        output_printf(", zstd %" PRId32, report->kv_disk_zstd_level);
    }
    output_printf("\n");
    if (report->kv_remote != NULL) {
        print_label("");
        output_printf("remote ");
        output_escaped(report->kv_remote, strlen(report->kv_remote));
        output_printf("\n");
    }
    if (imbrex_kv_policy_predicts(report->kv_policy)) {
        print_label("");
        output_printf("up to %" PRId32 " %% of the time for copies up ahead of requests\n",
                      report->kv_prefetch_percent);
    }
}

static void print_circumstances(const struct load_report *report)
{
    const struct imbrex_memory_plan *plan = &report->plan;
    struct machine machine;

    machine_describe(&machine);
    print_label("model");
    output_escaped(report->model.path, strlen(report->model.path));
    output_printf(" (%s, %" PRId64 " parameters)\n", report->model.architecture,
                  report->model.num_parameters);
    print_label("machine");
    output_escaped(machine.cpu_name, strlen(machine.cpu_name));
    output_printf(", %" PRId32 " CPU%s; imbrex %s", machine.num_cpus,
                  output_plural((uint64_t)machine.num_cpus), machine.version);
    if (machine.commit != NULL) {
        output_printf(" (%s)", machine.commit);
    }
    output_printf("\n");
    print_label("engine");
    if (strcmp(plan->device, "cpu") != 0) {
        output_printf("%s:%" PRId32 ", %s, ", plan->device, plan->device_idx, plan->compute);
    } else {
        output_printf("%" PRId32 " thread%s, ", plan->num_threads,
                      output_plural((uint64_t)plan->num_threads));
    }
    output_printf(
        "%s kernels, context %" PRId32 ", %" PRId32 " KV block%s of %" PRId32 " tokens in %s,\n",
        plan->kernels, plan->context_size, plan->kv_num_blocks,
        output_plural((uint64_t)plan->kv_num_blocks), plan->kv_block_size, plan->kv_dtype);
    print_label("");
    output_printf("at most %" PRId32 " sequence%s and %" PRId32 " token%s a step%s\n",
                  plan->max_running, output_plural((uint64_t)plan->max_running),
                  plan->max_step_tokens, output_plural((uint64_t)plan->max_step_tokens),
                  report->comparison != NULL ? ""
                  : report->batch_invariant  ? ", batch-invariant"
                                             : ", not batch-invariant");
    print_label("");
    output_printf("KV policy %s\n", report->kv_policy);
    print_tier_sizes(report);
    print_load(report);
}

static void print_tokens(const char *label, int64_t count, int64_t num_unfinished,
                         int64_t duration_ns)
{
    print_label(label);
    print_number("", per_second(count, duration_ns), " tokens/s");
    output_printf(" (%" PRId64 " token%s", count, output_plural((uint64_t)count));
    if (num_unfinished > 0) {
        output_printf(", %" PRId64 " of unfinished requests", num_unfinished);
    }
    output_printf(")\n");
}

static void print_tiers(const struct imbrex_memory_plan *plan, const struct load_result *result)
{
    if (plan->kv_host_bytes == 0) {
        return;
    }
    print_label("");
    output_printf("of them %" PRIu64 " from RAM, %" PRIu64 " from disk, %" PRIu64
                  " from the remote tier, waited for ",
                  result->num_host_tokens, result->num_disk_tokens, result->num_remote_tokens);
    print_number("", (double)result->kv_wait_ns / 1e6, " ms");
    output_printf("; %" PRIu64 " requests ran while theirs came up\n", result->num_kv_layered);
    print_label("");
    uint64_t num_down = result->num_kv_demoted + result->num_kv_written;
    output_printf("%" PRIu64 " block%s copied down, %" PRIu64
                  " of them while the KV cache kept them; %" PRIu64
                  " gone for want of room below, %" PRIu64 " lost by faults\n",
                  num_down, output_plural(num_down), result->num_kv_written, result->num_kv_lost,
                  result->num_kv_faults);
    print_label("");
    print_number("a block takes ", (double)result->kv_block_ns / 1e3, " us");
    print_number(" to come up from RAM, ", (double)result->kv_recompute_ns / 1e3, " us");
    output_printf(" to compute\n");
    if (result->num_kv_ahead > 0) {
        print_label("");
        output_printf("%" PRIu64 " block%s brought up ahead: %" PRIu64 " used, %" PRIu64
                      " forgotten unused\n",
                      result->num_kv_ahead, output_plural(result->num_kv_ahead),
                      result->num_kv_ahead_used, result->num_kv_ahead_wasted);
    }
}

static void print_counts(const struct load_report *report)
{
    const struct load_result *result = report->result;
    const struct load_settings *settings = report->settings;

    print_label("requests");
    output_printf("%zu completed, %zu failed", result->num_completed, result->num_failed);
    if (result->num_cancelled > 0) {
        output_printf(", %zu not run to their end", result->num_cancelled);
    }
    output_printf("\n");
    print_label("duration");
    print_number("", (double)result->duration_ns / 1e9, " s");
    output_printf(report->was_interrupted ? ", until the signal\n" : "\n");
    print_tokens("prompts", result->num_prompt_tokens, result->num_unfinished_prompt_tokens,
                 result->duration_ns);
    if (strcmp(report->kv_policy, "none") != 0) {
        print_label("cached");
        output_printf("%" PRIu64 " of %" PRIu64 " prompt tokens (%.1f %%)\n",
                      result->num_cached_tokens, result->num_queried_tokens,
                      100 * cached_share(result));
        print_tiers(&report->plan, result);
    }
    print_tokens("outputs", result->num_output_tokens, result->num_unfinished_output_tokens,
                 result->duration_ns);
    print_label("goodput");
    print_number("", per_second((int64_t)result->num_good, result->duration_ns), " requests/s");
    if (settings->slo_ttft_ns > 0) {
        output_printf(", TTFT at most %g ms", (double)settings->slo_ttft_ns / 1e6);
    }
    if (settings->slo_itl_ns > 0) {
        output_printf(", mean ITL at most %g ms", (double)settings->slo_itl_ns / 1e6);
    }
    if (settings->slo_ttft_ns == 0 && settings->slo_itl_ns == 0) {
        output_printf(" (all: neither --slo-ttft nor --slo-itl)");
    }
    output_printf("\n");
}

static void print_summary(const struct load_summary *summary)
{
    if (summary->count == 0) {
        output_printf("%11s%11s%11s%11s\n", "-", "-", "-", "-");
        return;
    }
    output_printf("%11.3f%11.3f%11.3f%11.3f\n", summary->mean / 1e6, summary->p50 / 1e6,
                  summary->p90 / 1e6, summary->p99 / 1e6);
}

static void print_measures(const struct load_result *result)
{
    output_printf("\n%-14s%11s%11s%11s%11s\n", "ms", "mean", "p50", "p90", "p99");
    for (size_t i = 0; i < NUM_MEASURES; i++) {
        print_label(measures[i].label);
        print_summary(measure_of(result, i));
    }
    for (int32_t i = 0; i < result->num_classes && result->num_classes > 1; i++) {
        output_printf("TTFT of %-6" PRId32, result->classes[i].priority);
        print_summary(&result->classes[i].ttft);
    }
    output_printf("\n");
}

static void print_steps(const struct load_result *result)
{
    print_label("steps");
    output_printf("%" PRIu64 ", %" PRIu64 " failed\n", result->num_steps, result->num_failed_steps);
    print_label("step");
    output_printf("%.3f ms: forward %.3f ms, overhead %.3f ms (%.1f %%)\n",
                  step_share_ms(result, result->step_ns), step_share_ms(result, result->forward_ns),
                  step_share_ms(result, result->overhead_ns), overhead_percent(result));
    print_label("mean running");
    print_number("", result->mean_running, " requests\n");
    print_label("preemptions");
    output_printf("%" PRId64 "\n", result->num_preemptions);
}

static void print_comparison(const struct load_comparison *comparison)
{
    output_printf("\n%-14s%18s%18s%11s\n", "batch-invariant", "on, tokens/s", "off, tokens/s",
                  "cost");
    for (int32_t i = 0; i < comparison->num_pairs; i++) {
        output_printf("pair %-10" PRId32 "%18.1f%18.1f%9.2f %%\n", i + 1,
                      output_rate(&comparison->on[i]), output_rate(&comparison->off[i]),
                      pair_cost_percent(comparison, i));
    }
    if (comparison->num_pairs > 0) {
        struct cost cost = cost_of(comparison);
        output_printf("%-50s%9.2f %%, min %.2f %%, max %.2f %%\n", "median", cost.median, cost.min,
                      cost.max);
        output_printf("cost: (off - on) / off, the share of throughput lost by being on\n");
        if (cost.is_noise) {
            output_printf("noise: the pairs differ by %.2f %%, more than the median cost\n",
                          cost.max - cost.min);
        }
    }
}

void load_report_print(const struct load_report *report)
{
    print_circumstances(report);
    output_printf("\n");
    if (report->was_interrupted) {
        output_printf("ended early by a signal\n");
    }
    if (report->result != NULL) {
        print_counts(report);
        print_measures(report->result);
        print_steps(report->result);
    }
    if (report->comparison != NULL) {
        print_comparison(report->comparison);
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_count(uint64_t count)
{
    return json_integer((json_int_t)count);
}

/* A limit that was not given is null. */
static json_t *json_given(double value, bool is_given)
{
    return is_given ? json_real(value) : json_null();
}

static json_t *json_model(const struct imbrex_model_info *model)
{
    return json_pack("{s:o, s:s, s:s, s:I, s:o}", "path", report_text(model->path), "architecture",
                     model->architecture, "format", model->format, "parameters",
                     (json_int_t)model->num_parameters, "weight_bytes",
                     json_count(model->weight_bytes));
}

static json_t *json_engine(const struct load_report *report)
{
    const struct imbrex_memory_plan *plan = &report->plan;
    json_t *batch_invariant =
        report->comparison != NULL ? json_null() : json_boolean(report->batch_invariant);

    return json_pack(
        "{s:s, s:i, s:s, s:s, s:i, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:o, s:o, s:o, s:i, "
        "s:o, s:i, s:s}",
        "device", plan->device, "device_idx", (int)plan->device_idx, "compute", plan->compute,
        "kv_dtype", plan->kv_dtype, "num_threads", (int)plan->num_threads, "kernels", plan->kernels,
        "context_size", (int)plan->context_size, "kv_num_blocks", (int)plan->kv_num_blocks,
        "kv_block_size", (int)plan->kv_block_size, "max_running", (int)plan->max_running,
        "max_step_tokens", (int)plan->max_step_tokens, "max_waiting", (int)plan->max_waiting,
        "kv_policy", report->kv_policy, "batch_invariant", batch_invariant, "kv_host_bytes",
        json_count(plan->kv_host_bytes), "kv_disk_bytes", json_count(plan->kv_disk_bytes),
        "kv_disk_zstd_level", (int)report->kv_disk_zstd_level, "kv_remote",
        report_text(report->kv_remote), "kv_prefetch_percent", (int)report->kv_prefetch_percent,
        "kv_write", report->kv_write == IMBREX_KV_WRITE_COMPUTED ? "computed" : "demoted");
}

static json_t *json_load(const struct load_report *report)
{
    const struct load_plan *load = report->load;
    const struct load_settings *settings = report->settings;
    json_t *concurrency = load->concurrency > 0 ? json_integer(load->concurrency) : json_null();
    bool has_trace_times = load->concurrency == 0 && report->rate == 0;

    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:s?, s:s?, s:o, s:f, s:o, s:o, s:o, s:o, s:b, s:o, s:i}",
        "requests", json_count(load->count), "concurrency", concurrency, "rate",
        json_given(report->rate, report->rate > 0), "trace", report_text(report->trace), "speed",
        json_given(report->speed, has_trace_times), "prompt_tokens", report->prompt_lengths,
        "output_tokens", report->output_lengths, "choices", json_integer(settings->num_choices),
        "temperature", (double)settings->temperature, "seed", json_count(load->seed), "warmup",
        json_integer(report->num_warmup), "slo_ttft_ms",
        json_given((double)settings->slo_ttft_ns / 1e6, settings->slo_ttft_ns > 0), "slo_itl_ms",
        json_given((double)settings->slo_itl_ns / 1e6, settings->slo_itl_ns > 0), "has_text",
        (int)settings->has_text, "cut", json_count(report->num_cut), "shared_prefix",
        (int)load->shared_prefix);
}

static json_t *json_summary(const struct load_summary *summary)
{
    return json_pack("{s:o, s:f, s:f, s:f, s:f, s:f, s:f}", "count", json_count(summary->count),
                     "mean", summary->mean / 1e6, "min", summary->min / 1e6, "p50",
                     summary->p50 / 1e6, "p90", summary->p90 / 1e6, "p99", summary->p99 / 1e6,
                     "max", summary->max / 1e6);
}

static json_t *json_steps(const struct load_result *result)
{
    return json_pack(
        "{s:o, s:o, s:f, s:f, s:f, s:f}", "count", json_count(result->num_steps), "failed",
        json_count(result->num_failed_steps), "mean_ms", step_share_ms(result, result->step_ns),
        "forward_ms", step_share_ms(result, result->forward_ns), "overhead_ms",
        step_share_ms(result, result->overhead_ns), "overhead_percent", overhead_percent(result));
}

static json_t *json_classes(const struct load_result *result)
{
    json_t *classes = json_array();

    for (int32_t i = 0; i < result->num_classes; i++) {
        const struct load_class *group = &result->classes[i];
        json_t *entry =
            json_pack("{s:i, s:o, s:o, s:o}", "priority", (int)group->priority, "completed",
                      json_count(group->num_completed), "ttft_ms", json_summary(&group->ttft),
                      "queue_ms", json_summary(&group->queue));
        if (json_array_append_new(classes, entry) != 0) {
            json_decref(classes);
            return NULL;
        }
    }
    return classes;
}

static json_t *json_result(const struct load_result *result)
{
    json_t *root = json_pack(
        "{s:o, s:o, s:o, s:o, s:s?, s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:I, s:o, s:o, "
        "s:o, s:o, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I}",
        "completed", json_count(result->num_completed), "failed", json_count(result->num_failed),
        "cancelled", json_count(result->num_cancelled), "good", json_count(result->num_good),
        "first_failure", result->first_failure[0] != '\0' ? result->first_failure : NULL,
        "duration_s", (double)result->duration_ns / 1e9, "prompt_tokens",
        (json_int_t)result->num_prompt_tokens, "output_tokens",
        (json_int_t)result->num_output_tokens, "unfinished_prompt_tokens",
        (json_int_t)result->num_unfinished_prompt_tokens, "unfinished_output_tokens",
        (json_int_t)result->num_unfinished_output_tokens, "prompt_tokens_per_s",
        per_second(result->num_prompt_tokens, result->duration_ns), "output_tokens_per_s",
        output_rate(result), "goodput_per_s",
        per_second((int64_t)result->num_good, result->duration_ns), "mean_running",
        result->mean_running, "preemptions", (json_int_t)result->num_preemptions, "steps",
        json_steps(result), "priorities", json_classes(result), "queried_tokens",
        json_count(result->num_queried_tokens), "cached_tokens",
        json_count(result->num_cached_tokens), "cached_share", cached_share(result), "host_tokens",
        json_count(result->num_host_tokens), "disk_tokens", json_count(result->num_disk_tokens),
        "remote_tokens", json_count(result->num_remote_tokens), "kv_demoted",
        json_count(result->num_kv_demoted), "kv_written", json_count(result->num_kv_written),
        "kv_lost", json_count(result->num_kv_lost), "kv_faults", json_count(result->num_kv_faults),
        "kv_wait_ns", json_count(result->kv_wait_ns), "kv_layered",
        json_count(result->num_kv_layered), "kv_ahead", json_count(result->num_kv_ahead),
        "kv_ahead_used", json_count(result->num_kv_ahead_used), "kv_ahead_wasted",
        json_count(result->num_kv_ahead_wasted), "kv_block_ns", (json_int_t)result->kv_block_ns,
        "kv_recompute_ns", (json_int_t)result->kv_recompute_ns);

    for (size_t i = 0; i < NUM_MEASURES && root != NULL; i++) {
        if (json_object_set_new(root, measures[i].key, json_summary(measure_of(result, i))) != 0) {
            json_decref(root);
            root = NULL;
        }
    }
    return root;
}

static json_t *json_comparison(const struct load_comparison *comparison)
{
    json_t *pairs = json_array();

    for (int32_t i = 0; i < comparison->num_pairs; i++) {
        json_t *pair = json_pack("{s:o, s:o, s:f}", "on", json_result(&comparison->on[i]), "off",
                                 json_result(&comparison->off[i]), "cost_percent",
                                 pair_cost_percent(comparison, i));
        if (json_array_append_new(pairs, pair) != 0) {
            json_decref(pairs);
            return NULL;
        }
    }
    if (comparison->num_pairs == 0) {
        return json_pack("{s:o, s:n, s:n, s:n, s:n}", "pairs", pairs, "cost_percent",
                         "cost_min_percent", "cost_max_percent", "is_noise");
    }
    struct cost cost = cost_of(comparison);
    return json_pack("{s:o, s:f, s:f, s:f, s:b}", "pairs", pairs, "cost_percent", cost.median,
                     "cost_min_percent", cost.min, "cost_max_percent", cost.max, "is_noise",
                     (int)cost.is_noise);
}

int load_report_format_json(const struct load_report *report, char **text)
{
    json_t *result = report->result != NULL ? json_result(report->result) : json_null();
    json_t *comparison =
        report->comparison != NULL ? json_comparison(report->comparison) : json_null();
    /* json_pack fails only for want of memory: what it packs is made above. */
    json_t *root = json_pack("{s:o, s:o, s:o, s:o, s:b, s:o, s:o}", "machine", report_machine(),
                             "model", json_model(&report->model), "engine", json_engine(report),
                             "load", json_load(report), "interrupted", (int)report->was_interrupted,
                             "result", result, "compare_invariant", comparison);

    return report_dump(root, REPORT_DIGITS, text);
}
