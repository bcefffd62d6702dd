/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_trace_line.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define MOONCAKE_BLOCK_SIZE 512
#define BAILIAN_BLOCK_SIZE 16
#define MAX_AGENT_DEPTH 8
#define MAX_SECONDS 1e8
#define NS_PER_S 1e9

static void read_int32(struct scan *scan, int32_t *value)
{
    uint64_t whole = 0;

    if (scan_whole(scan, INT32_MAX, &whole)) {
        *value = (int32_t)whole;
    }
}

enum sim_format sim_line_format(const char *line, size_t num_bytes, int32_t *block_size)
{
    struct scan scan = scan_begin(line, num_bytes);
    const char *key = NULL;
    size_t key_bytes = 0;
    bool has_timestamp = false, has_ids = false, has_chat = false, has_requests = false;

    *block_size = 0;
    scan_object(&scan);
    while (scan_key(&scan, &key, &key_bytes)) {
        has_timestamp = has_timestamp || scan_equal(key, key_bytes, "timestamp");
        has_ids = has_ids || scan_equal(key, key_bytes, "hash_ids");
        has_chat = has_chat || scan_equal(key, key_bytes, "chat_id");
        has_requests = has_requests || scan_equal(key, key_bytes, "requests");
        if (scan_equal(key, key_bytes, "block_size")) {
            read_int32(&scan, block_size);
        } else {
            scan_skip(&scan);
        }
    }
    if (!scan_is_good(&scan)) {
        return SIM_FORMAT_NONE;
    }
    if (has_requests) {
        return SIM_FORMAT_WEKA;
    }
    if (has_timestamp && has_ids) {
        return has_chat ? SIM_FORMAT_BAILIAN : SIM_FORMAT_MOONCAKE;
    }
    return SIM_FORMAT_NONE;
}

const char *sim_line_csv_name(const char *line, size_t num_bytes)
{
    static const struct csv_header {
        const char *begin, *name;
    } headers[] = {
        {"TIMESTAMP,ContextTokens,", "Azure"},
        {"Timestamp,Model,Request tokens,", "BurstGPT"},
        {"Timestamp,Session ID,", "BurstGPT"},
    };

    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        size_t begin_bytes = strlen(headers[i].begin);
        if (num_bytes >= begin_bytes && strncasecmp(line, headers[i].begin, begin_bytes) == 0) {
            return headers[i].name;
        }
    }
    return NULL;
}

/* The ids of an array become the path of the next request. */
static enum imbrex_status read_ids(struct sim_builder *builder, struct scan *scan, int64_t *num_ids,
                                   struct imbrex_error *err)
{
    uint64_t id = 0;

    *num_ids = 0;
    scan_array(scan);
    while (scan_element(scan)) {
        if (scan_whole(scan, UINT64_MAX, &id)) {
            TRY(sim_builder_add_id(builder, id, err));
            (*num_ids)++;
        }
    }
    return IMBREX_STATUS_OK;
}

/* Each full block of a prompt has an id. */
static void check_ids(struct scan *scan, int32_t num_tokens, int32_t block_size, int64_t num_ids)
{
    char expected[80];
    int32_t num_blocks = num_tokens / block_size;

    (void)snprintf(expected, sizeof(expected), "%d or more, for %d tokens in blocks of %d",
                   num_blocks, num_tokens, block_size);
    if (num_ids < 0) {
        scan_refuse(scan, "hash_ids", "an array", "none");
    } else if (num_ids < num_blocks) {
        scan_refuse(scan, "hash_ids", expected, "%lld", (long long)num_ids);
    }
}

/* `found` is 0 if a line has none. */
static void check_block_size(struct scan *scan, int32_t expected, int32_t found)
{
    char text[64];

    (void)snprintf(text, sizeof(text), "%d as in the lines before", expected);
    if (found == 0) {
        scan_refuse(scan, "block_size", text, "none");
    } else if (found != expected) {
        scan_refuse(scan, "block_size", text, "%d", found);
    }
}

/* Mooncake and Bailian. */
static enum imbrex_status read_single(struct sim_line_reader *reader, struct scan *scan,
                                      struct imbrex_error *err)
{
    struct sim_builder *builder = &reader->builder;
    struct sim_trace *trace = builder->trace;
    bool is_bailian = trace->format == SIM_FORMAT_BAILIAN;
    const char *key = NULL;
    size_t key_bytes = 0;
    double timestamp = (double)NAN, parent = 0;
    int64_t num_ids = -1;
    int32_t request_idx = -1, block_size = 0;
    struct sim_request request = {.predecessor = -1, .session = -1, .num_tokens = -1};

    trace->trace_block_size = trace->named_block_size > 0 ? trace->named_block_size
                              : is_bailian                ? BAILIAN_BLOCK_SIZE
                                                          : MOONCAKE_BLOCK_SIZE;
    if (trace->block_size % trace->trace_block_size != 0) {
        return IMBREX_STATUS_OK; /* the reader of the file says so */
    }
    sim_builder_begin_path(builder, 0, trace->block_size / trace->trace_block_size);
    scan_object(scan);
    while (scan_key(scan, &key, &key_bytes)) {
        if (scan_equal(key, key_bytes, "timestamp")) {
            scan_number(scan, MAX_SECONDS * 1e3, &timestamp);
        } else if (scan_equal(key, key_bytes, "input_length")) {
            read_int32(scan, &request.num_tokens);
        } else if (scan_equal(key, key_bytes, "output_length")) {
            read_int32(scan, &request.num_output);
        } else if (scan_equal(key, key_bytes, "parent_chat_id")) {
            scan_number(scan, INFINITY, &parent);
        } else if (scan_equal(key, key_bytes, "block_size")) {
            read_int32(scan, &block_size);
        } else if (scan_equal(key, key_bytes, "hash_ids") && num_ids < 0) {
            TRY(read_ids(builder, scan, &num_ids, err));
        } else {
            scan_skip(scan);
        }
    }
    scan_end(scan);
    if (isnan(timestamp)) {
        scan_refuse(scan, "timestamp", "a number of 0 or more", "none");
    } else if (timestamp < 0) {
        scan_refuse(scan, "timestamp", "a number of 0 or more", "%g", timestamp);
    }
    if (request.num_tokens < 0) {
        scan_refuse(scan, "input_length", "a whole number", "none");
    }
    if (trace->named_block_size > 0 || block_size > 0) {
        check_block_size(scan, trace->trace_block_size, block_size);
    }
    check_ids(scan, request.num_tokens, trace->trace_block_size, num_ids);
    if (!scan_is_good(scan)) {
        return IMBREX_STATUS_OK;
    }
    request.start_ns = (int64_t)(timestamp * (is_bailian ? NS_PER_S : NS_PER_S / 1e3));
    trace->num_sessions += is_bailian && parent < 0;
    return sim_builder_add_request(builder, &request, &request_idx, err);
}

/* A session, or an agent that a session started. */
struct weka_list {
    uint64_t space;
    int32_t depth;
    int32_t previous;      /* request that the next one waits for; -1: none */
    double previous_end_s; /* as recorded, on the session's clock */
    double begin_s;        /* of the list, on the session's clock */
    bool has_known_end;    /* of previous, which is of this list */
    double latest_t;       /* of its requests so far */
};

/* What stands in one element of a list. */
struct weka_request {
    struct sim_request request;
    double t, api_time, think_time, duration; /* s; api_time, think_time < 0: not said */
    int64_t num_ids;
    bool is_agent, has_time;
    struct scan nested; /* at the agent's list, which is read when all about it is known */
    bool has_nested;
};

static int32_t finish_of(const char *text, size_t num_bytes)
{
    if (scan_equal(text, num_bytes, "tool_use")) {
        return KV_FINISH_TOOL;
    }
    if (scan_equal(text, num_bytes, "end_turn") || scan_equal(text, num_bytes, "stop_sequence")) {
        return KV_FINISH_STOP;
    }
    return scan_equal(text, num_bytes, "max_tokens") ? KV_FINISH_LENGTH : KV_FINISH_UNKNOWN;
}

/* A time that may be null, in seconds or parts of them; below 0 counts as 0. */
static void read_time(struct scan *scan, double units_a_second, double *value)
{
    double time = 0;

    if (!scan_null(scan) && scan_number(scan, MAX_SECONDS * units_a_second, &time)) {
        *value = time > 0 ? time / units_a_second : 0;
    }
}

static enum imbrex_status read_weka_fields(struct sim_line_reader *reader, struct scan *scan,
                                           const struct weka_list *list,
                                           struct weka_request *element, struct imbrex_error *err)
{
    struct sim_builder *builder = &reader->builder;
    const char *key = NULL, *text = NULL;
    size_t key_bytes = 0, num_bytes = 0;

    *element = (struct weka_request){
        .request = {.predecessor = -1, .session = reader->line_idx, .num_tokens = -1},
        .t = -1,
        .api_time = -1,
        .think_time = -1,
        .num_ids = -1};
    sim_builder_begin_path(builder, list->space,
                           builder->trace->block_size / builder->trace->trace_block_size);
    scan_object(scan);
    while (scan_key(scan, &key, &key_bytes)) {
        if (scan_equal(key, key_bytes, "hash_ids") && element->num_ids < 0) {
            TRY(read_ids(builder, scan, &element->num_ids, err));
        } else if (scan_equal(key, key_bytes, "in")) {
            read_int32(scan, &element->request.num_tokens);
        } else if (scan_equal(key, key_bytes, "out")) {
            read_int32(scan, &element->request.num_output);
        } else if (scan_equal(key, key_bytes, "t")) {
            read_time(scan, 1, &element->t);
        } else if (scan_equal(key, key_bytes, "api_time")) {
            read_time(scan, 1, &element->api_time);
        } else if (scan_equal(key, key_bytes, "think_time")) {
            read_time(scan, 1, &element->think_time);
        } else if (scan_equal(key, key_bytes, "duration_ms")) {
            read_time(scan, 1e3, &element->duration);
        } else if (scan_equal(key, key_bytes, "stop") && !scan_null(scan)) {
            if (scan_string(scan, &text, &num_bytes)) {
                element->request.finish = finish_of(text, num_bytes);
            }
        } else if (scan_equal(key, key_bytes, "type")) {
            element->is_agent =
                scan_string(scan, &text, &num_bytes) && scan_equal(text, num_bytes, "subagent");
        } else if (scan_equal(key, key_bytes, "requests")) {
            element->nested = *scan;
            element->has_nested = true;
            scan_skip(scan);
        } else if (!scan_equal(key, key_bytes, "stop")) {
            scan_skip(scan);
        }
    }
    element->has_time = element->t >= 0;
    element->t = element->has_time ? element->t : 0;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_weka_list(struct sim_line_reader *reader, struct scan *scan,
                                         struct weka_list *list, struct imbrex_error *err);

/* An agent starts after its list's last request as long as it did when it was recorded. Its own
 * times count from its start; t is when it ended. */
static enum imbrex_status read_weka_agent(struct sim_line_reader *reader, struct scan *scan,
                                          const struct weka_list *list,
                                          struct weka_request *element, struct imbrex_error *err)
{
    struct weka_list agent = {.space = list->space,
                              .depth = list->depth + 1,
                              .previous = list->previous,
                              .previous_end_s = list->previous_end_s,
                              .begin_s = element->t - element->duration};

    if (!element->has_nested) {
        scan_refuse(scan, "requests", "an array in a subagent", "none");
        return IMBREX_STATUS_OK;
    }
    if (agent.depth > MAX_AGENT_DEPTH) {
        scan_refuse(scan, "requests", "at most 8 subagents in one another", "more");
        return IMBREX_STATUS_OK;
    }
    if (agent.begin_s < 0) {
        agent.begin_s = 0;
    }
    TRY(read_weka_list(reader, &element->nested, &agent, err));
    if (!scan_is_good(&element->nested)) {
        scan_fail_as(scan, &element->nested);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status add_weka_request(struct sim_line_reader *reader, struct scan *scan,
                                           struct weka_list *list, struct weka_request *element,
                                           struct imbrex_error *err)
{
    struct sim_trace *trace = reader->builder.trace;
    double at_s = list->begin_s + element->t;
    double wait_s = list->previous < 0 ? at_s : at_s - list->previous_end_s;

    if (element->request.num_tokens < 0) {
        scan_refuse(scan, "in", "a whole number in each request", "none");
    } else {
        check_ids(scan, element->request.num_tokens, trace->trace_block_size, element->num_ids);
    }
    if (!scan_is_good(scan)) {
        return IMBREX_STATUS_OK;
    }
    /* The client's wait as it was recorded. It counts from the last request whose end is known, so
     * it says something only if that was the one before; else all the time between the two starts
     * is taken for the client's. */
    if (list->has_known_end && element->think_time >= 0) {
        wait_s = element->think_time;
    }
    element->request.predecessor = list->previous;
    element->request.start_ns = wait_s > 0 ? (int64_t)(wait_s * NS_PER_S) : 0;
    TRY(sim_builder_add_request(&reader->builder, &element->request, &list->previous, err));
    trace->num_early += element->has_time && element->t < list->latest_t;
    list->latest_t = element->t > list->latest_t ? element->t : list->latest_t;
    list->has_known_end = element->api_time >= 0;
    list->previous_end_s = at_s + (list->has_known_end ? element->api_time : 0);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_weka_list(struct sim_line_reader *reader, struct scan *scan,
                                         struct weka_list *list, struct imbrex_error *err)
{
    struct weka_request element;

    scan_array(scan);
    while (scan_element(scan)) {
        TRY(read_weka_fields(reader, scan, list, &element, err));
        if (!scan_is_good(scan)) {
            break;
        }
        if (element.is_agent) {
            TRY(read_weka_agent(reader, scan, list, &element, err));
        } else {
            TRY(add_weka_request(reader, scan, list, &element, err));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_weka(struct sim_line_reader *reader, struct scan *scan,
                                    struct imbrex_error *err)
{
    struct sim_trace *trace = reader->builder.trace;
    const char *key = NULL, *text = NULL;
    size_t key_bytes = 0, num_bytes = 0;
    int32_t trace_block_size = 0;
    bool is_global = false, has_requests = false, has_block_size = false;
    struct scan requests = {.at = NULL};
    struct weka_list list = {.previous = -1};

    scan_object(scan);
    while (scan_key(scan, &key, &key_bytes)) {
        if (scan_equal(key, key_bytes, "block_size")) {
            read_int32(scan, &trace_block_size);
            has_block_size = true;
        } else if (scan_equal(key, key_bytes, "hash_id_scope")) {
            is_global =
                scan_string(scan, &text, &num_bytes) && scan_equal(text, num_bytes, "global");
        } else if (scan_equal(key, key_bytes, "requests") && !has_requests) {
            requests = *scan;
            has_requests = true;
            scan_skip(scan);
        } else {
            scan_skip(scan);
        }
    }
    scan_end(scan);
    if (!has_requests) {
        scan_refuse(scan, "requests", "an array", "none");
    }
    if (trace->num_requests > 0) {
        check_block_size(scan, trace->trace_block_size, trace_block_size);
    } else if (trace_block_size < 1) {
        scan_refuse(scan, "block_size", "a whole number of 1 or more", "%s",
                    has_block_size ? "0" : "none");
    }
    if (!scan_is_good(scan)) {
        return IMBREX_STATUS_OK;
    }
    trace->trace_block_size = trace_block_size;
    if (trace->block_size % trace_block_size != 0) {
        return IMBREX_STATUS_OK; /* the reader of the file says so */
    }
    list.space = is_global ? 0 : (uint64_t)reader->line_idx + 1;
    TRY(read_weka_list(reader, &requests, &list, err));
    if (!scan_is_good(&requests)) {
        scan_fail_as(scan, &requests);
        return IMBREX_STATUS_OK;
    }
    trace->num_sessions++;
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_line_read(struct sim_line_reader *reader, struct scan *scan,
                                 struct imbrex_error *err)
{
    struct sim_builder_mark mark = sim_builder_mark(&reader->builder);
    enum imbrex_status status = reader->builder.trace->format == SIM_FORMAT_WEKA
                                    ? read_weka(reader, scan, err)
                                    : read_single(reader, scan, err);

    if (status == IMBREX_STATUS_OK && !scan_is_good(scan)) {
        sim_builder_undo(&reader->builder, mark);
    }
    return status;
}
