/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "sim/sim_random.h"
#include "sim/sim_trace_line.h"

#define NS_PER_S 1e9
#define MAX_STARTS ((size_t)1 << 27)

const char *sim_format_name(enum sim_format format)
{
    static const char *const names[] = {
        [SIM_FORMAT_NONE] = "none",
        [SIM_FORMAT_MOONCAKE] = "mooncake",
        [SIM_FORMAT_WEKA] = "weka",
        [SIM_FORMAT_BAILIAN] = "bailian",
    };
    return names[format];
}

void sim_trace_free(struct sim_trace *trace)
{
    free(trace->requests);
    free(trace->accesses);
    *trace = (struct sim_trace){.format = SIM_FORMAT_NONE};
}

static bool is_blank(const char *line, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++) {
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r') {
            return false;
        }
    }
    return true;
}

static void count_bad_line(struct sim_trace *trace, int64_t line_number, const char *reason)
{
    if (trace->num_bad_lines++ == 0) {
        trace->first_bad_line = line_number;
        (void)snprintf(trace->first_bad_reason, sizeof(trace->first_bad_reason), "%s", reason);
    }
}

/* By file order, where times are equal. */
static int compare_arrivals(const void *left, const void *right)
{
    const struct sim_request *a = left, *b = right;

    if (a->start_ns != b->start_ns) {
        return a->start_ns < b->start_ns ? -1 : 1;
    }
    return a->first_access < b->first_access ? -1 : a->first_access > b->first_access;
}

/* Recorders write times in steps (Mooncake: 3 s). Requests of the same time are spread evenly over
 * the smallest step that the trace has, in the file's order. */
static void spread_arrivals(struct sim_trace *trace)
{
    struct sim_request *requests = trace->requests;
    int64_t step_ns = 0, latest_ns = 0;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        trace->num_early += requests[i].start_ns < latest_ns;
        latest_ns = requests[i].start_ns > latest_ns ? requests[i].start_ns : latest_ns;
    }
    qsort(requests, (size_t)trace->num_requests, sizeof(*requests), compare_arrivals);
    for (int32_t i = 1; i < trace->num_requests; i++) {
        int64_t gap_ns = requests[i].start_ns - requests[i - 1].start_ns;
        if (gap_ns > 0 && (step_ns == 0 || gap_ns < step_ns)) {
            step_ns = gap_ns;
        }
    }
    for (int32_t begin = 0, end; begin < trace->num_requests; begin = end) {
        int64_t start_ns = requests[begin].start_ns;
        for (end = begin + 1; end < trace->num_requests && requests[end].start_ns == start_ns;) {
            end++;
        }
        for (int32_t i = begin; i < end; i++) {
            double share = (double)(i - begin) / (double)(end - begin);
            requests[i].start_ns = start_ns + (int64_t)(share * (double)step_ns);
        }
    }
}

/* Requests without a predecessor count from their session's start. */
static enum imbrex_status add_starts(struct sim_trace *trace,
                                     const struct sim_trace_options *options, int32_t num_lines,
                                     const char *path, struct imbrex_error *err)
{
    uint64_t random = options->seed;
    double start_s = 0;
    int32_t line_idx = -1;

    if (options->starts != NULL && options->num_starts < (size_t)num_lines) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: expected a start for each of %d sessions, found %zu", path, num_lines,
                         options->num_starts);
    }
    for (int32_t i = 0; i < trace->num_requests; i++) {
        struct sim_request *request = &trace->requests[i];
        for (; line_idx < request->session; line_idx++) {
            start_s = options->starts != NULL ? options->starts[line_idx + 1]
                                              : sim_random(&random) * options->session_span_s;
        }
        if (request->predecessor < 0) {
            request->start_ns += (int64_t)(start_s * NS_PER_S);
        }
    }
    return IMBREX_STATUS_OK;
}

static void link_followers(struct sim_trace *trace)
{
    struct sim_request *requests = trace->requests;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        requests[i].first_follower = -1;
        requests[i].next_follower = -1;
    }
    for (int32_t i = trace->num_requests - 1; i >= 0; i--) {
        int32_t predecessor = requests[i].predecessor;
        if (predecessor >= 0) {
            requests[i].next_follower = requests[predecessor].first_follower;
            requests[predecessor].first_follower = i;
        }
    }
}

static enum imbrex_status refuse_csv(const char *path, const char *name, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: a csv trace of %s has no block ids, so nothing can be found in a cache; "
                     "`imbrex bench engine --trace` takes it",
                     path, name);
}

/* Whether a line has bytes that no text has. */
static bool is_binary(const char *line, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++) {
        unsigned char byte = (unsigned char)line[i];
        if (byte < 0x20 && byte != '\t' && byte != '\r') {
            return true;
        }
    }
    return false;
}

/* By the first line that is good. */
static void choose_format(struct sim_trace *trace, const char *line, size_t num_bytes,
                          int32_t block_size)
{
    trace->format = sim_line_format(line, num_bytes, &trace->named_block_size);
    if (trace->format == SIM_FORMAT_WEKA) {
        trace->named_block_size = 0; /* each session has one, which is no engine's */
    }
    trace->block_size = block_size > 0                ? block_size
                        : trace->named_block_size > 0 ? trace->named_block_size
                                                      : SIM_DEFAULT_BLOCK_SIZE;
}

/* block_size: as in the options. */
static enum imbrex_status read_lines(struct sim_input *input, struct sim_line_reader *reader,
                                     int32_t block_size, struct imbrex_error *err)
{
    struct sim_trace *trace = reader->builder.trace;
    const char *path = sim_input_path(input), *line = NULL;
    size_t num_bytes = 0;

    for (;;) {
        TRY(sim_input_line(input, &line, &num_bytes, err));
        if (line == NULL) {
            return IMBREX_STATUS_OK;
        }
        if (is_blank(line, num_bytes)) {
            continue;
        }
        if (reader->line_idx == 0 && sim_line_csv_name(line, num_bytes) != NULL) {
            return refuse_csv(path, sim_line_csv_name(line, num_bytes), err);
        }
        if (reader->line_idx == 0 && is_binary(line, num_bytes)) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: expected a trace as lines of JSON (Mooncake, Bailian, WEKA), or "
                             "such a file in zstd, found a binary file",
                             path);
        }
        if (trace->num_requests == 0) {
            choose_format(trace, line, num_bytes, block_size);
        }
        struct scan scan = scan_begin(line, num_bytes);
        if (trace->format == SIM_FORMAT_NONE) {
            scan_skip(&scan);
            scan_end(&scan);
            scan_refuse(&scan, NULL, "a request (timestamp, hash_ids) or a session (requests)",
                        "neither field");
        } else {
            TRY(sim_line_read(reader, &scan, err));
        }
        if (!scan_is_good(&scan)) {
            count_bad_line(trace, sim_input_line_number(input), scan.reason);
        } else if (trace->block_size % trace->trace_block_size != 0) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "block_size",
                                   ": expected a multiple of the %d tokens of an id in %s, found "
                                   "%d",
                                   trace->trace_block_size, path, trace->block_size);
        }
        if (reader->line_idx++ == INT32_MAX - 1) {
            return error_set(err, IMBREX_STATUS_CAPACITY,
                             "%s: expected at most %d lines, found more", path, INT32_MAX - 1);
        }
    }
}

/* Gives back what doubling took too much; keeping it is no failure. */
static void shrink(struct sim_trace *trace)
{
    void *accesses =
        trace->num_accesses > 0
            ? realloc(trace->accesses, (size_t)trace->num_accesses * sizeof(*trace->accesses))
            : NULL;
    if (accesses != NULL) {
        trace->accesses = accesses;
    }
}

enum imbrex_status sim_trace_read(struct sim_input *input, const struct sim_trace_options *options,
                                  struct sim_trace *trace, struct imbrex_error *err)
{
    struct sim_trace read = {.format = SIM_FORMAT_NONE};
    struct sim_line_reader reader = {.line_idx = 0};
    const char *path = sim_input_path(input);
    enum imbrex_status status;

    if (options->block_size < 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "block_size",
                               ": expected 0 or more, found %d", options->block_size);
    }
    TRY(sim_builder_init(&reader.builder, &read, err));
    TRY_OR_FAIL(read_lines(input, &reader, options->block_size, err));
    sim_builder_deinit(&reader.builder);
    if (read.num_requests == 0) {
        status =
            read.num_bad_lines > 0
                ? error_set(err, IMBREX_STATUS_FORMAT,
                            "%s: no line can be read as a trace; line %lld: %s", path,
                            (long long)read.first_bad_line, read.first_bad_reason)
                : error_set(err, IMBREX_STATUS_FORMAT, "%s: expected requests, found none", path);
        goto fail;
    }
    read.is_closed_loop = read.format == SIM_FORMAT_WEKA;
    if (read.is_closed_loop) {
        TRY_OR_FAIL(add_starts(&read, options, reader.line_idx, path, err));
    } else {
        spread_arrivals(&read);
    }
    link_followers(&read);
    shrink(&read);
    *trace = read;
    return IMBREX_STATUS_OK;
fail:
    sim_builder_deinit(&reader.builder);
    sim_trace_free(&read);
    return status;
}

enum imbrex_status sim_starts_read(const char *path, double **starts, size_t *num_starts,
                                   struct imbrex_error *err)
{
    struct sim_input *input = NULL;
    double *values = NULL;
    size_t num_values = 0, max_values = 0, num_bytes = 0;
    const char *line = NULL;
    enum imbrex_status status;

    TRY(sim_input_open(path, &input, err));
    for (;;) {
        TRY_OR_FAIL(sim_input_line(input, &line, &num_bytes, err));
        if (line == NULL) {
            break;
        }
        if (is_blank(line, num_bytes)) {
            continue;
        }
        if (num_values == max_values) {
            max_values = max_values > 0 ? max_values * 2 : 256;
            double *grown =
                max_values <= MAX_STARTS ? realloc(values, max_values * sizeof(*values)) : NULL;
            if (grown == NULL) {
                status =
                    error_out_of_memory(err, "starts of sessions", max_values * sizeof(*values));
                goto fail;
            }
            values = grown;
        }
        struct scan scan = scan_begin(line, num_bytes);
        if (scan_number(&scan, NS_PER_S, &values[num_values]) && scan_end(&scan) &&
            values[num_values] < 0) {
            scan_refuse(&scan, NULL, "a start in s, 0 or more", "%g", values[num_values]);
        }
        if (!scan_is_good(&scan)) {
            status = error_set(err, IMBREX_STATUS_FORMAT, "%s: line %lld: %s", path,
                               (long long)sim_input_line_number(input), scan.reason);
            goto fail;
        }
        num_values++;
    }
    if (num_values == 0) {
        status = error_set(err, IMBREX_STATUS_FORMAT, "%s: expected starts, found none", path);
        goto fail;
    }
    sim_input_close(input);
    *starts = values;
    *num_starts = num_values;
    return IMBREX_STATUS_OK;
fail:
    sim_input_close(input);
    free(values);
    return status;
}
