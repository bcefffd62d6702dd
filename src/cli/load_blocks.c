/* SPDX-License-Identifier: Apache-2.0 */
/* Loads whose prompts share blocks, from lines of JSON. Equal ids are equal tokens; other fields
 * than these are ignored.
 *   Mooncake  a request a line, blocks of 512 tokens, times that never fall:
 *             {"timestamp": ms, "input_length": N, "output_length": N, "hash_ids": [...]}
 *   Bailian   the same in seconds, with a chat_id, and blocks of 16 tokens or of a block_size,
 *             which load_blocks_write.c writes
 *   WEKA      a session a line, t in seconds from its begin, ids its own unless they are global:
 *             {"block_size": N, "hash_id_scope": "local", "requests": [
 *               {"t": s, "in": N, "out": N, "hash_ids": [...]},
 *               {"type": "subagent", "t": its end, "duration_ms": ms, "requests": [...]}]}
 * Tokens behind the last block that has an id are left out of a prompt: nothing tells what they
 * are. Requests come when they came in the recording, however long the ones before take here. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/input.h"
#include "cli/load_plan.h"
#include "cli/output.h"

#define MOONCAKE_BLOCK_TOKENS 512
#define BAILIAN_BLOCK_TOKENS 16
#define MAX_TIME_S 9e9
#define MAX_AGENT_DEPTH 8

struct block_trace {
    struct load_plan *plan;
    const struct load_block_source *source;
    size_t line_number;
    size_t request_capacity, block_capacity;
    json_int_t trace_block_tokens; /* before scaling; 0: no line yet */
    double first_s;                /* Mooncake, Bailian */
    /* WEKA. */
    bool has_sessions;
    size_t num_sessions;
    double begin_s;    /* of the next session, without starts */
    uint64_t id_space; /* added to the line's ids */
    double *starts_s;  /* [num_starts], or NULL */
    size_t num_starts, start_capacity;
};

/* found: NULL if it is not there. */
static int report_field(const struct block_trace *trace, const char *field, const char *expected,
                        const json_t *found)
{
    char text[INPUT_SHOWN_BYTES];

    output_error("%s: line %zu: %s: expected %s, found %s", input_display_name(trace->source->path),
                 trace->line_number, field, expected, input_show_json(found, text));
    return EXIT_CODE_INPUT;
}

static int report_memory(const struct block_trace *trace)
{
    output_error("%s: out of memory", input_display_name(trace->source->path));
    return EXIT_CODE_FAILURE;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Room for one request and its blocks. False if memory is out. */
static bool reserve(struct block_trace *trace, size_t num_blocks)
{
    struct load_plan *plan = trace->plan;

    if (plan->count == trace->request_capacity) {
        size_t capacity = trace->request_capacity > 0 ? 2 * trace->request_capacity : 1024;
        struct load_request *requests = realloc(plan->requests, capacity * sizeof(*requests));
        if (requests == NULL) {
            return false;
        }
        plan->requests = requests;
        trace->request_capacity = capacity;
    }
    if (trace->block_capacity - plan->num_block_ids < num_blocks) {
        size_t capacity = 2 * trace->block_capacity + num_blocks + 1024;
        uint64_t *block_ids = realloc(plan->block_ids, capacity * sizeof(*block_ids));
        if (block_ids == NULL) {
            return false;
        }
        plan->block_ids = block_ids;
        trace->block_capacity = capacity;
    }
    return true;
}

/* Blocks of all lines are of one size, scaled to whole tokens. */
static int set_block_tokens(struct block_trace *trace, const json_t *block_size,
                            json_int_t otherwise)
{
    json_int_t block_tokens = block_size != NULL ? json_integer_value(block_size) : otherwise;

    if (block_tokens < 1 || block_tokens > IMBREX_MAX_CONTEXT_SIZE ||
        (trace->trace_block_tokens > 0 && trace->trace_block_tokens != block_tokens)) {
        return report_field(trace, "block_size", "1 or more, the same in all lines", block_size);
    }
    trace->trace_block_tokens = block_tokens;
    trace->plan->block_tokens =
        (int32_t)fmax(round((double)block_tokens * trace->source->scale), 1);
    return EXIT_CODE_OK;
}

/* What the fields of a request are called. */
struct request_fields {
    const char *input, *output;
};

/* Tokens of the trace, scaled, at least 1. */
static int read_length(const struct block_trace *trace, const json_t *object, const char *field,
                       int64_t *num_tokens)
{
    const json_t *value = json_object_get(object, field);
    json_int_t length = json_is_integer(value) ? json_integer_value(value) : -1;
    char expected[64];

    if (length < 0 || length > IMBREX_MAX_CONTEXT_SIZE) {
        (void)snprintf(expected, sizeof(expected), "a number of tokens from 0 to %d",
                       IMBREX_MAX_CONTEXT_SIZE);
        return report_field(trace, field, expected, value);
    }
    *num_tokens = (int64_t)fmax(round((double)length * trace->source->scale), 1);
    return EXIT_CODE_OK;
}

static int append_blocks(struct block_trace *trace, const json_t *ids)
{
    struct load_plan *plan = trace->plan;
    size_t num_ids = json_array_size(ids);

    if (!reserve(trace, num_ids)) {
        return report_memory(trace);
    }
    for (size_t i = 0; i < num_ids; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            return report_field(trace, "hash_ids", "whole numbers of 0 or more", id);
        }
        plan->block_ids[plan->num_block_ids + i] =
            trace->id_space + (uint64_t)json_integer_value(id);
    }
    plan->num_block_ids += num_ids;
    return EXIT_CODE_OK;
}

/* Each full block of the input has an id. */
static int check_ids(const struct block_trace *trace, json_int_t input_length, const json_t *ids)
{
    json_int_t num_blocks = input_length / trace->trace_block_tokens;

    if (num_blocks > 0 && !json_is_array(ids)) {
        return report_field(trace, "hash_ids", "an array", ids);
    }
    if ((json_int_t)json_array_size(ids) < num_blocks) {
        output_error("%s: line %zu: hash_ids: expected %" JSON_INTEGER_FORMAT
                     " or more, for %" JSON_INTEGER_FORMAT
                     " tokens in blocks of %" JSON_INTEGER_FORMAT ", found %zu",
                     input_display_name(trace->source->path), trace->line_number, num_blocks,
                     input_length, trace->trace_block_tokens, json_array_size(ids));
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

static int append_request(struct block_trace *trace, double arrival_s, const json_t *object,
                          const struct request_fields *fields)
{
    struct load_plan *plan = trace->plan;
    const json_t *ids = json_object_get(object, "hash_ids");
    struct load_request request = {.line_number = trace->line_number,
                                   .arrival_ns = (int64_t)(fmin(arrival_s, MAX_TIME_S) * 1e9),
                                   .first_block = plan->num_block_ids};
    int64_t num_prompt_tokens = 0, num_output_tokens = 0, num_ids = (int64_t)json_array_size(ids);
    int exit_code = read_length(trace, object, fields->input, &num_prompt_tokens);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_length(trace, object, fields->output, &num_output_tokens);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            check_ids(trace, json_integer_value(json_object_get(object, fields->input)), ids);
    }
    if (exit_code != EXIT_CODE_OK || num_ids == 0) {
        return exit_code; /* without ids shorter than a block: nothing is known of it */
    }
    if (num_prompt_tokens > num_ids * plan->block_tokens) {
        num_prompt_tokens = num_ids * plan->block_tokens;
    }
    request.num_prompt_tokens = (int32_t)num_prompt_tokens;
    request.num_output_tokens = (int32_t)num_output_tokens;
    exit_code = append_blocks(trace, ids);
    if (exit_code == EXIT_CODE_OK) {
        plan->requests[plan->count++] = request;
    }
    return exit_code;
}

/* ---- Mooncake and Bailian -------------------------------------------------------------------- */

static int take_single(struct block_trace *trace, const json_t *object)
{
    static const struct request_fields fields = {"input_length", "output_length"};
    const struct load_plan *plan = trace->plan;
    bool is_bailian = json_object_get(object, "chat_id") != NULL;
    const json_t *timestamp = json_object_get(object, "timestamp");
    double time_s =
        json_is_number(timestamp) ? json_number_value(timestamp) / (is_bailian ? 1 : 1e3) : -1;

    if (!(time_s >= 0 && time_s <= MAX_TIME_S)) {
        return report_field(
            trace, "timestamp",
            is_bailian ? "a number of s in [0, 9e9]" : "a number of ms in [0, 9e12]", timestamp);
    }
    if (plan->count == 0) {
        trace->first_s = time_s;
    }
    int64_t before_ns = plan->count > 0 ? plan->requests[plan->count - 1].arrival_ns : 0;
    if ((int64_t)((time_s - trace->first_s) * 1e9) < before_ns) {
        return report_field(trace, "timestamp", "a time not before that of the line above",
                            timestamp);
    }
    int exit_code = set_block_tokens(trace, json_object_get(object, "block_size"),
                                     is_bailian ? BAILIAN_BLOCK_TOKENS : MOONCAKE_BLOCK_TOKENS);
    return exit_code == EXIT_CODE_OK
               ? append_request(trace, time_s - trace->first_s, object, &fields)
               : exit_code;
}

/* ---- WEKA ------------------------------------------------------------------------------------ */

/* Seconds, 0 where nothing is said. */
static double read_time(const json_t *value, double units_a_second)
{
    double time_s = json_number_value(value) / units_a_second;

    return time_s > 0 && time_s <= MAX_TIME_S ? time_s : 0;
}

static int take_list(struct block_trace *trace, const json_t *requests, double begin_s,
                     int32_t depth)
{
    static const struct request_fields fields = {"in", "out"};
    int exit_code = EXIT_CODE_OK;

    if (!json_is_array(requests)) {
        return report_field(trace, "requests", "an array", requests);
    }
    if (depth > MAX_AGENT_DEPTH) {
        output_error("%s: line %zu: requests: expected at most %d subagents in one another, found "
                     "more",
                     input_display_name(trace->source->path), trace->line_number, MAX_AGENT_DEPTH);
        return EXIT_CODE_INPUT;
    }
    for (size_t i = 0; i < json_array_size(requests) && exit_code == EXIT_CODE_OK; i++) {
        const json_t *element = json_array_get(requests, i);
        const char *type = json_string_value(json_object_get(element, "type"));
        double at_s = begin_s + read_time(json_object_get(element, "t"), 1);
        if (type != NULL && strcmp(type, "subagent") == 0) {
            at_s -= read_time(json_object_get(element, "duration_ms"), 1e3);
            exit_code = take_list(trace, json_object_get(element, "requests"),
                                  at_s > begin_s ? at_s : begin_s, depth + 1);
        } else {
            exit_code = append_request(trace, at_s, element, &fields);
        }
    }
    return exit_code;
}

static int take_weka(struct block_trace *trace, const json_t *object)
{
    const char *scope = json_string_value(json_object_get(object, "hash_id_scope"));
    bool is_global = scope != NULL && strcmp(scope, "global") == 0;
    double begin_s = trace->begin_s;

    trace->has_sessions = true;
    if (trace->starts_s != NULL) {
        if (trace->num_sessions == trace->num_starts) {
            output_error("%s: expected a start for each session of %s, found only %zu",
                         trace->source->starts, input_display_name(trace->source->path),
                         trace->num_starts);
            return EXIT_CODE_INPUT;
        }
        begin_s = trace->starts_s[trace->num_sessions];
    }
    trace->begin_s +=
        load_plan_draw_gap(trace->plan->seed, trace->num_sessions, trace->source->session_rate);
    trace->num_sessions++;
    /* An odd factor keeps the spaces of the sessions apart. */
    trace->id_space = is_global ? 0 : trace->num_sessions * UINT64_C(0x9e3779b97f4a7c15);
    int exit_code = set_block_tokens(trace, json_object_get(object, "block_size"), 0);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = take_list(trace, json_object_get(object, "requests"), begin_s, 0);
    }
    return exit_code;
}

/* An input_line_fn. */
static int take_start(void *user, const char *line, size_t num_bytes, size_t line_number)
{
    struct block_trace *trace = user;
    char *end = NULL;
    double start_s = num_bytes > 0 ? strtod(line, &end) : -1;

    if (num_bytes == 0) {
        return EXIT_CODE_OK;
    }
    if (end != line + num_bytes || !(start_s >= 0 && start_s <= MAX_TIME_S)) {
        output_error("%s: line %zu: expected a start in [0, 9e9] s, found \"%.*s\"",
                     trace->source->starts, line_number, (int)(num_bytes < 80 ? num_bytes : 80),
                     line);
        return EXIT_CODE_INPUT;
    }
    if (trace->num_starts == trace->start_capacity) {
        size_t capacity = trace->start_capacity > 0 ? 2 * trace->start_capacity : 256;
        double *starts_s = realloc(trace->starts_s, capacity * sizeof(*starts_s));
        if (starts_s == NULL) {
            return report_memory(trace);
        }
        trace->starts_s = starts_s;
        trace->start_capacity = capacity;
    }
    trace->starts_s[trace->num_starts++] = start_s;
    return EXIT_CODE_OK;
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* An input_line_fn. Empty lines are skipped. */
static int take_line(void *user, const char *line, size_t num_bytes, size_t line_number)
{
    struct block_trace *trace = user;
    json_error_t error;

    trace->line_number = line_number;
    if (num_bytes == 0 || trace->plan->count >= trace->source->max_requests) {
        return EXIT_CODE_OK;
    }
    json_t *object = json_loadb(line, num_bytes, 0, &error);
    if (!json_is_object(object)) {
        output_error("%s: line %zu: expected a JSON object, found %s",
                     input_display_name(trace->source->path), line_number,
                     object != NULL ? "another value" : error.text);
        json_decref(object);
        return EXIT_CODE_INPUT;
    }
    bool is_session = json_object_get(object, "requests") != NULL;
    int exit_code = is_session ? take_weka(trace, object) : take_single(trace, object);
    json_decref(object);
    return exit_code;
}

static int read_trace(struct block_trace *trace)
{
    const struct load_block_source *source = trace->source;
    struct load_plan *plan = trace->plan;
    int exit_code = EXIT_CODE_OK;

    if (source->starts != NULL) {
        exit_code = input_read_lines(source->starts, take_start, trace);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = input_read_lines(source->path, take_line, trace);
    }
    if (exit_code == EXIT_CODE_OK && plan->count == 0) {
        output_error("%s: expected at least one request, found none",
                     input_display_name(source->path));
        exit_code = EXIT_CODE_INPUT;
    }
    if (exit_code == EXIT_CODE_OK && source->starts != NULL && !trace->has_sessions) {
        output_error("%s: expected a trace of sessions with --starts, found one of requests",
                     input_display_name(source->path));
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

int load_plan_read_blocks(struct load_plan *plan, const struct load_block_source *source,
                          uint64_t seed)
{
    struct block_trace trace = {.plan = plan, .source = source};

    *plan = (struct load_plan){.seed = seed};
    int exit_code = read_trace(&trace);
    free(trace.starts_s);
    if (exit_code != EXIT_CODE_OK) {
        load_plan_release(plan);
        return exit_code;
    }
    load_plan_sort(plan);
    /* Sessions may begin long after the load does. */
    for (size_t i = plan->count; i > 0; i--) {
        plan->requests[i - 1].arrival_ns -= plan->requests[0].arrival_ns;
    }
    plan->count = plan->count < source->max_requests ? plan->count : source->max_requests;
    return EXIT_CODE_OK;
}

static int compare_rising(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

    return (left > right) - (left < right);
}

int64_t load_plan_distinct_tokens(const struct load_plan *plan)
{
    uint64_t *ids = malloc((plan->num_block_ids + 1) * sizeof(*ids));
    bool *is_used = calloc(plan->num_block_ids + 1, sizeof(*is_used));
    int64_t num_distinct = 0;
    size_t num_ids = 0;

    if (ids == NULL || is_used == NULL) {
        free(ids);
        free(is_used);
        return 0;
    }
    /* Prompts may lie in one another, and those that were cut or left out have ids all the same. */
    for (size_t i = 0; i < plan->count; i++) {
        const struct load_request *request = &plan->requests[i];
        int32_t num_tokens = request->num_prompt_tokens + plan->block_tokens - 1;
        for (int32_t block = 0; block < num_tokens / plan->block_tokens; block++) {
            is_used[request->first_block + (size_t)block] = true;
        }
    }
    for (size_t i = 0; i < plan->num_block_ids; i++) {
        if (is_used[i]) {
            ids[num_ids++] = plan->block_ids[i];
        }
    }
    qsort(ids, num_ids, sizeof(*ids), compare_rising);
    for (size_t i = 0; i < num_ids; i++) {
        num_distinct += i == 0 || ids[i] != ids[i - 1];
    }
    free(is_used);
    free(ids);
    return num_distinct * plan->block_tokens;
}
