/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/bench_kv.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/signals.h"

#define MIB 1048576.0

static double hit_rate(const struct load_result *result)
{
    return result->num_queried_tokens > 0
               ? (double)result->num_cached_tokens / (double)result->num_queried_tokens
               : 0;
}

/* Prompt tokens that no tier had. */
static int64_t computed_tokens(const struct load_result *result)
{
    return result->num_prompt_tokens - (int64_t)result->num_cached_tokens;
}

static const char *tiers_text(const struct kv_run *kv_run)
{
    return kv_run->has_host   ? kv_run->has_disk ? " +host+disk" : " +host"
           : kv_run->has_disk ? " +disk"
                              : "";
}

static void print_tiers(const struct kv_bench *bench)
{
    if (bench->kv_host_bytes > 0 || bench->kv_disk_bytes > 0) {
        output_printf("tiers         %.1f MiB of KV cache", (double)bench->plan.kv_bytes / MIB);
        if (bench->kv_host_bytes > 0) {
            output_printf(", %.1f MiB of RAM below it", (double)bench->kv_host_bytes / MIB);
        }
        if (bench->kv_disk_bytes > 0) {
            output_printf(", %.1f MiB of a disk", (double)bench->kv_disk_bytes / MIB);
        }
        output_printf("\n");
    }
    if (bench->prefill_tokens_per_s > 0) {
        output_printf("alone         %.1f prompt tokens/s, %.3f ms a token of output\n",
                      bench->prefill_tokens_per_s, 1e3 * bench->decode_s_per_token);
    }
}

void kv_bench_print(const struct kv_bench *bench)
{
    const struct load_plan *load = &bench->load;

    output_printf("model         ");
    output_escaped(bench->description.path, strlen(bench->description.path));
    output_printf("\nengine        %" PRId32 " thread%s, %s kernels, context %" PRId32 ", %" PRId32
                  " KV block%s of %" PRId32 " tokens, at most %" PRId32 " running\n",
                  bench->plan.num_threads, output_plural((uint64_t)bench->plan.num_threads),
                  bench->plan.kernels, bench->plan.context_size, bench->plan.kv_num_blocks,
                  output_plural((uint64_t)bench->plan.kv_num_blocks), bench->plan.kv_block_size,
                  bench->plan.max_running);
    output_printf("load          %zu request%s, %" PRId64 " different tokens", load->count,
                  output_plural(load->count), load_plan_distinct_tokens(load));
    if (load->concurrency > 0) {
        output_printf(", %" PRId64 " at once", load->concurrency);
    }
    if (bench->num_cut > 0) {
        output_printf(", %zu cut to the context", bench->num_cut);
    }
    output_printf(", seed %" PRIu64 "\n", load->seed);
    print_tiers(bench);
    output_printf("\n%-22s%6s%10s%12s%12s%12s%10s%10s%10s%10s%10s\n", "policy", "round", "hit rate",
                  "saved", "prompts", "computed", "of host", "of disk", "TTFT p50", "p99", "mean");
    output_printf("%-22s%6s%10s%12s%12s%12s%10s%10s%10s%10s%10s\n", "", "", "%", "tokens", "tokens",
                  "tokens", "tokens", "tokens", "ms", "ms", "ms");
    for (int32_t i = 0; i < bench->num_runs; i++) {
        const struct load_result *result = &bench->runs[i].result;
        char name[KV_BENCH_NAME_BYTES + 16];
        (void)snprintf(name, sizeof(name), "%s%s", bench->runs[i].policy,
                       tiers_text(&bench->runs[i]));
        output_printf("%-22s%6" PRId32 "%10.2f%12" PRIu64 "%12" PRId64 "%12" PRId64 "%10" PRIu64
                      "%10" PRIu64 "%10.3f%10.3f%10.3f\n",
                      name, bench->runs[i].round + 1, 100 * hit_rate(result),
                      result->num_cached_tokens, result->num_prompt_tokens, computed_tokens(result),
                      result->num_host_tokens, result->num_disk_tokens, result->ttft.p50 / 1e6,
                      result->ttft.p99 / 1e6, result->ttft.mean / 1e6);
    }
}

static json_t *json_run(const struct kv_bench *bench, const struct kv_run *kv_run)
{
    const struct load_result *result = &kv_run->result;

    json_t *row = json_pack(
        "{s:s, s:i, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, "
        "s:I, "
        "s:I, s:I, s:I, s:I, s:I, "
        "s:I, s:f, s:{s:f, s:f, s:f, s:f, s:f}}",
        "policy", kv_run->policy, "round", (int)kv_run->round + 1, "has_host",
        (int)kv_run->has_host, "has_disk", (int)kv_run->has_disk, "host_tokens",
        (json_int_t)result->num_host_tokens, "disk_tokens", (json_int_t)result->num_disk_tokens,
        "kv_demoted", (json_int_t)result->num_kv_demoted, "kv_written",
        (json_int_t)result->num_kv_written, "kv_lost", (json_int_t)result->num_kv_lost, "kv_faults",
        (json_int_t)result->num_kv_faults, "kv_ahead", (json_int_t)result->num_kv_ahead,
        "kv_ahead_used", (json_int_t)result->num_kv_ahead_used, "kv_ahead_wasted",
        (json_int_t)result->num_kv_ahead_wasted, "kv_block_ns", (json_int_t)result->kv_block_ns,
        "kv_recompute_ns", (json_int_t)result->kv_recompute_ns, "kv_wait_ns",
        (json_int_t)result->kv_wait_ns, "hit_rate", hit_rate(result), "prompt_tokens",
        (json_int_t)result->num_prompt_tokens, "queried_tokens",
        (json_int_t)result->num_queried_tokens, "cached_tokens",
        (json_int_t)result->num_cached_tokens, "computed_tokens",
        (json_int_t)computed_tokens(result), "output_tokens", (json_int_t)result->num_output_tokens,
        "completed", (json_int_t)result->num_completed, "preemptions",
        (json_int_t)result->num_preemptions, "duration_s", (double)result->duration_ns / 1e9,
        "ttft_ms", "mean", result->ttft.mean / 1e6, "p50", result->ttft.p50 / 1e6, "p90",
        result->ttft.p90 / 1e6, "p99", result->ttft.p99 / 1e6, "max", result->ttft.max / 1e6);
    if (row != NULL && bench->meter != NULL &&
        (json_object_set_new(row, "sm_clock_mhz", json_real(kv_run->reading.sm_clock_mhz)) != 0 ||
         json_object_set_new(row, "watts", json_real(kv_run->reading.watts)) != 0)) {
        json_decref(row);
        return NULL;
    }
    return row;
}

static json_t *json_gpu(const struct kv_bench *bench)
{
    return bench->meter == NULL
               ? json_null()
               : json_pack("{s:s, s:s}", "name", bench->gpu.name, "driver", bench->gpu.driver);
}

static json_t *json_engine(const struct kv_bench *bench)
{
    return json_pack("{s:i, s:s, s:s?, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "num_threads",
                     (int)bench->plan.num_threads, "kernels", bench->plan.kernels, "device",
                     bench->plan.device, "context_size", (int)bench->plan.context_size,
                     "kv_num_blocks", (int)bench->plan.kv_num_blocks, "kv_block_size",
                     (int)bench->plan.kv_block_size, "max_running", (int)bench->plan.max_running,
                     "kv_token_bytes", (json_int_t)bench->token_bytes, "kv_host_bytes",
                     (json_int_t)bench->kv_host_bytes, "kv_disk_bytes",
                     (json_int_t)bench->kv_disk_bytes);
}

static json_t *json_load(const struct kv_bench *bench)
{
    const struct load_plan *load = &bench->load;

    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "requests", (json_int_t)load->count,
                     "block_tokens", (json_int_t)load->block_tokens, "different_tokens",
                     (json_int_t)load_plan_distinct_tokens(load), "concurrency",
                     (json_int_t)load->concurrency, "cut", (json_int_t)bench->num_cut, "seed",
                     (json_int_t)load->seed);
}

int kv_bench_format_json(const struct kv_bench *bench, char **text)
{
    json_t *root = report_header("kv"), *runs = json_array();
    bool is_good = root != NULL;

    for (int32_t i = 0; i < bench->num_runs && is_good; i++) {
        is_good = json_array_append_new(runs, json_run(bench, &bench->runs[i])) == 0;
    }
    is_good =
        json_object_set_new(root, "command_line", report_text(bench->command_line)) == 0 &&
        json_object_set_new(root, "model", report_text(bench->description.path)) == 0 &&
        json_object_set_new(root, "engine", json_engine(bench)) == 0 &&
        json_object_set_new(root, "gpu", json_gpu(bench)) == 0 &&
        json_object_set_new(root, "load", json_load(bench)) == 0 &&
        json_object_set_new(root, "alone",
                            json_pack("{s:f, s:f}", "prefill_tokens_per_s",
                                      bench->prefill_tokens_per_s, "decode_s_per_token",
                                      bench->decode_s_per_token)) == 0 &&
        json_object_set_new(root, "interrupted", json_boolean(signals_interrupt() != 0)) == 0 &&
        json_object_set(root, "runs", runs) == 0 && is_good;
    json_decref(runs);
    if (!is_good) {
        json_decref(root);
        root = NULL;
    }
    return report_dump(root, REPORT_DIGITS, text);
}
