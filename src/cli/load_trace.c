/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of real traffic as csv files. The first line names the columns, in any order and among
 * others; letters may be of either case:
 *   arrival   "arrival_s", "arrival_ms" (numbers) or "TIMESTAMP" (2023-11-16 18:15:46.6805900)
 *   prompt    "prompt_tokens" or "ContextTokens"
 *   output    "output_tokens" or "GeneratedTokens"
 * The second names are those of the Azure LLM inference traces. Times count from the first line's
 * and never fall. Fields may be quoted ("a, ""b"""), but not over the end of a line; a byte order
 * mark before the names is skipped. */
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/input.h"
#include "cli/load_plan.h"
#include "cli/output.h"

#define MAX_COLUMNS 64
#define MAX_FIELD_BYTES 64

enum column_kind {
    COLUMN_ARRIVAL,
    COLUMN_PROMPT,
    COLUMN_OUTPUT,
    NUM_COLUMN_KINDS,
};

enum time_format {
    TIME_FORMAT_SECONDS,
    TIME_FORMAT_MILLISECONDS,
    TIME_FORMAT_DATE,
};

static const struct column_name {
    const char *name;
    enum column_kind kind;
    enum time_format time_format;
} column_names[] = {
    {"arrival_s", COLUMN_ARRIVAL, TIME_FORMAT_SECONDS},
    {"arrival_ms", COLUMN_ARRIVAL, TIME_FORMAT_MILLISECONDS},
    {"TIMESTAMP", COLUMN_ARRIVAL, TIME_FORMAT_DATE},
    {"prompt_tokens", COLUMN_PROMPT, 0},
    {"ContextTokens", COLUMN_PROMPT, 0},
    {"output_tokens", COLUMN_OUTPUT, 0},
    {"GeneratedTokens", COLUMN_OUTPUT, 0},
};
#define NUM_COLUMN_NAMES (sizeof(column_names) / sizeof(column_names[0]))

static const char *const column_choices[NUM_COLUMN_KINDS] = {
    [COLUMN_ARRIVAL] = "arrival_s, arrival_ms or TIMESTAMP",
    [COLUMN_PROMPT] = "prompt_tokens or ContextTokens",
    [COLUMN_OUTPUT] = "output_tokens or GeneratedTokens",
};

struct trace {
    struct load_plan *plan;
    const char *path;
    size_t max_requests, capacity;
    bool has_header;
    bool has_times;                    /* the arrival column is read */
    int32_t columns[NUM_COLUMN_KINDS]; /* index of each, -1: not named */
    const struct column_name *names[NUM_COLUMN_KINDS];
    int64_t first_ns;
};

/* "FILE: line 3, column 2 (prompt_tokens): expected ..., found "x"". */
static int report_field(const struct trace *trace, size_t line_number, enum column_kind kind,
                        const char *expected, const char *found)
{
    output_error("%s: line %zu, column %" PRId32 " (%s): expected %s, found \"%s\"",
                 input_display_name(trace->path), line_number, trace->columns[kind] + 1,
                 trace->names[kind]->name, expected, found);
    return EXIT_CODE_INPUT;
}

static const char *skip_spaces(const char *at, const char *end)
{
    while (at < end && isspace((unsigned char)*at)) {
        at++;
    }
    return at;
}

/* Reads a field from behind its opening quote; returns what is behind the closing one and the
 * spaces there, or NULL if that one is missing. Two quotes are one of the text. */
static const char *take_quoted(const char *at, const char *end, char field[MAX_FIELD_BYTES])
{
    size_t length = 0;

    for (; at < end; at++) {
        if (*at == '"' && (++at == end || *at != '"')) {
            field[length] = '\0';
            return skip_spaces(at, end);
        }
        if (length < MAX_FIELD_BYTES - 1) {
            field[length++] = *at;
        }
    }
    return NULL;
}

/* Copies the next field, without the spaces around it, cut to the buffer. *at moves behind its
 * comma, and is NULL after the last one. False if a quoted field does not end where it should. */
static bool take_field(const char **at, const char *end, char field[MAX_FIELD_BYTES])
{
    const char *begin = skip_spaces(*at, end);

    if (begin < end && *begin == '"') {
        const char *behind = take_quoted(begin + 1, end, field);
        *at = behind == NULL || behind == end ? NULL : behind + 1;
        return behind != NULL && (behind == end || *behind == ',');
    }
    const char *stop = memchr(begin, ',', (size_t)(end - begin));
    const char *behind = stop != NULL ? stop : end;
    while (behind > begin && isspace((unsigned char)behind[-1])) {
        behind--;
    }
    size_t length = (size_t)(behind - begin);
    if (length >= MAX_FIELD_BYTES) {
        length = MAX_FIELD_BYTES - 1;
    }
    memcpy(field, begin, length);
    field[length] = '\0';
    *at = stop != NULL ? stop + 1 : NULL;
    return true;
}

static bool is_read(const struct trace *trace, int32_t kind)
{
    return kind != COLUMN_ARRIVAL || trace->has_times;
}

static int report_quotes(const struct trace *trace, size_t line_number, int32_t column)
{
    output_error("%s: line %zu, column %" PRId32
                 ": expected a quoted field to end with '\"' before "
                 "a comma or the end of the line, found none there",
                 input_display_name(trace->path), line_number, column + 1);
    return EXIT_CODE_INPUT;
}

static int take_header(struct trace *trace, const char *at, const char *end, size_t line_number)
{
    char field[MAX_FIELD_BYTES];

    for (int32_t kind = 0; kind < NUM_COLUMN_KINDS; kind++) {
        trace->columns[kind] = -1;
    }
    for (int32_t idx = 0; at != NULL && idx < MAX_COLUMNS; idx++) {
        if (!take_field(&at, end, field)) {
            return report_quotes(trace, line_number, idx);
        }
        for (size_t i = 0; i < NUM_COLUMN_NAMES; i++) {
            const struct column_name *name = &column_names[i];
            if (strcasecmp(name->name, field) != 0 || !is_read(trace, name->kind)) {
                continue;
            }
            if (trace->columns[name->kind] >= 0) {
                output_error("%s: line %zu, column %" PRId32 ": expected one of %s, found two",
                             input_display_name(trace->path), line_number, idx + 1,
                             column_choices[name->kind]);
                return EXIT_CODE_INPUT;
            }
            trace->columns[name->kind] = idx;
            trace->names[name->kind] = name;
        }
    }
    for (int32_t kind = 0; kind < NUM_COLUMN_KINDS; kind++) {
        if (trace->columns[kind] < 0 && is_read(trace, kind)) {
            output_error("%s: line %zu: expected a column named %s, found none",
                         input_display_name(trace->path), line_number, column_choices[kind]);
            return EXIT_CODE_INPUT;
        }
    }
    trace->has_header = true;
    return EXIT_CODE_OK;
}

static bool read_digits(const char **at, int32_t num_digits, int *value)
{
    *value = 0;
    for (int32_t i = 0; i < num_digits; i++, (*at)++) {
        if (!isdigit((unsigned char)**at)) {
            return false;
        }
        *value = *value * 10 + (**at - '0');
    }
    return true;
}

static bool skip_one_of(const char **at, const char *characters)
{
    if (**at == '\0' || strchr(characters, **at) == NULL) {
        return false;
    }
    (*at)++;
    return true;
}

/* Nanoseconds since 1970 of "2023-11-16 18:15:46", with a fraction behind it or not, and a zone
 * that is the same in all lines: it is not read. */
static bool read_date(const char *text, int64_t *time_ns)
{
    struct tm date = {.tm_year = 0};
    int64_t fraction_ns = 0, digit_ns = 100000000;

    bool is_good = read_digits(&text, 4, &date.tm_year) && skip_one_of(&text, "-") &&
                   read_digits(&text, 2, &date.tm_mon) && skip_one_of(&text, "-") &&
                   read_digits(&text, 2, &date.tm_mday) && skip_one_of(&text, " T") &&
                   read_digits(&text, 2, &date.tm_hour) && skip_one_of(&text, ":") &&
                   read_digits(&text, 2, &date.tm_min) && skip_one_of(&text, ":") &&
                   read_digits(&text, 2, &date.tm_sec);
    if (!is_good || date.tm_year < 1970 || date.tm_year > 2200 || date.tm_mon < 1 ||
        date.tm_mon > 12 || date.tm_mday < 1 || date.tm_mday > 31 || date.tm_hour > 23 ||
        date.tm_min > 59 || date.tm_sec > 60) {
        return false;
    }
    if (skip_one_of(&text, ".")) {
        for (; isdigit((unsigned char)*text); text++, digit_ns /= 10) {
            fraction_ns += (*text - '0') * digit_ns;
        }
    }
    if (*text != '\0' && strcmp(text, "Z") != 0 && *text != '+' && *text != '-') {
        return false;
    }
    date.tm_year -= 1900;
    date.tm_mon -= 1;
    *time_ns = (int64_t)timegm(&date) * 1000000000 + fraction_ns;
    return true;
}

static int read_arrival(const struct trace *trace, size_t line_number, const char *field,
                        int64_t *arrival_ns)
{
    enum time_format format = trace->names[COLUMN_ARRIVAL]->time_format;

    if (format == TIME_FORMAT_DATE) {
        return read_date(field, arrival_ns)
                   ? EXIT_CODE_OK
                   : report_field(trace, line_number, COLUMN_ARRIVAL,
                                  "a time such as 2023-11-16 18:15:46.68", field);
    }
    char *end = NULL;
    double value = strtod(field, &end);
    bool is_seconds = format == TIME_FORMAT_SECONDS;
    double unit_ns = is_seconds ? 1e9 : 1e6;
    if (end == field || *end != '\0' || !(value >= 0) || value * unit_ns > 9e18) {
        return report_field(trace, line_number, COLUMN_ARRIVAL,
                            is_seconds ? "a time in [0, 9e9] s" : "a time in [0, 9e12] ms", field);
    }
    *arrival_ns = (int64_t)(value * unit_ns);
    return EXIT_CODE_OK;
}

static int read_tokens(const struct trace *trace, size_t line_number, enum column_kind kind,
                       const char *field, int32_t *num_tokens)
{
    char *end = NULL;
    char expected[64];
    long value = isdigit((unsigned char)field[0]) ? strtol(field, &end, 10) : 0;

    if (end == NULL || *end != '\0' || value < 1 || value > IMBREX_MAX_CONTEXT_SIZE) {
        snprintf(expected, sizeof(expected), "a number of tokens in [1, %d]",
                 IMBREX_MAX_CONTEXT_SIZE);
        return report_field(trace, line_number, kind, expected, field);
    }
    *num_tokens = (int32_t)value;
    return EXIT_CODE_OK;
}

static int append_request(struct trace *trace, const struct load_request *request)
{
    struct load_plan *plan = trace->plan;

    if (plan->count == trace->capacity) {
        size_t capacity = trace->capacity > 0 ? 2 * trace->capacity : 1024;
        struct load_request *requests = realloc(plan->requests, capacity * sizeof(*requests));
        if (requests == NULL) {
            output_error("%s: out of memory", input_display_name(trace->path));
            return EXIT_CODE_FAILURE;
        }
        plan->requests = requests;
        trace->capacity = capacity;
    }
    plan->requests[plan->count++] = *request;
    return EXIT_CODE_OK;
}

/* Times count from the first one. */
static int place_arrival(struct trace *trace, const char *field, struct load_request *request)
{
    const struct load_plan *plan = trace->plan;
    int64_t arrival_ns = 0;

    int exit_code = read_arrival(trace, request->line_number, field, &arrival_ns);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (plan->count == 0) {
        trace->first_ns = arrival_ns;
    }
    request->arrival_ns = arrival_ns - trace->first_ns;
    int64_t before_ns = plan->count > 0 ? plan->requests[plan->count - 1].arrival_ns : 0;
    if (request->arrival_ns < before_ns) {
        return report_field(trace, request->line_number, COLUMN_ARRIVAL,
                            "a time not before that of the line above", field);
    }
    return EXIT_CODE_OK;
}

static int take_row(struct trace *trace, const char *at, const char *end, size_t line_number)
{
    char fields[NUM_COLUMN_KINDS][MAX_FIELD_BYTES], field[MAX_FIELD_BYTES];
    struct load_request request = {.line_number = line_number};
    int32_t num_fields = 0;
    int exit_code = EXIT_CODE_OK;

    for (; at != NULL && num_fields < MAX_COLUMNS; num_fields++) {
        if (!take_field(&at, end, field)) {
            return report_quotes(trace, line_number, num_fields);
        }
        for (int32_t kind = 0; kind < NUM_COLUMN_KINDS; kind++) {
            if (trace->columns[kind] == num_fields) {
                memcpy(fields[kind], field, sizeof(field));
            }
        }
    }
    for (int32_t kind = 0; kind < NUM_COLUMN_KINDS; kind++) {
        if (trace->columns[kind] >= num_fields) {
            return report_field(trace, line_number, (enum column_kind)kind, "a field",
                                "the end of the line");
        }
    }
    if (trace->has_times) {
        exit_code = place_arrival(trace, fields[COLUMN_ARRIVAL], &request);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_tokens(trace, line_number, COLUMN_PROMPT, fields[COLUMN_PROMPT],
                                &request.num_prompt_tokens);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_tokens(trace, line_number, COLUMN_OUTPUT, fields[COLUMN_OUTPUT],
                                &request.num_output_tokens);
    }
    return exit_code == EXIT_CODE_OK ? append_request(trace, &request) : exit_code;
}

/* An input_line_fn. Lines without a character are skipped. */
static int take_line(void *user, const char *line, size_t num_bytes, size_t line_number)
{
    static const char byte_order_mark[] = {'\xef', '\xbb', '\xbf'};
    struct trace *trace = user;

    if (line_number == 1 && num_bytes >= sizeof(byte_order_mark) &&
        memcmp(line, byte_order_mark, sizeof(byte_order_mark)) == 0) {
        line += sizeof(byte_order_mark);
        num_bytes -= sizeof(byte_order_mark);
    }
    if (num_bytes > 0 && line[num_bytes - 1] == '\r') {
        num_bytes--;
    }
    if (num_bytes == 0 || trace->plan->count == trace->max_requests) {
        return EXIT_CODE_OK;
    }
    if (!trace->has_header) {
        return take_header(trace, line, line + num_bytes, line_number);
    }
    return take_row(trace, line, line + num_bytes, line_number);
}

int load_plan_read_trace(struct load_plan *plan, const char *path, size_t max_requests,
                         bool has_times, uint64_t seed)
{
    struct trace trace = {
        .plan = plan, .path = path, .max_requests = max_requests, .has_times = has_times};

    *plan = (struct load_plan){.seed = seed};
    int exit_code = input_read_lines(path, take_line, &trace);
    if (exit_code == EXIT_CODE_OK && plan->count == 0) {
        output_error("%s: expected a line of column names and at least one request, found %s",
                     input_display_name(path), trace.has_header ? "no request" : "an empty file");
        exit_code = EXIT_CODE_INPUT;
    }
    if (exit_code != EXIT_CODE_OK) {
        load_plan_release(plan);
    }
    return exit_code;
}
