/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim_scan.h"
#include "tests/sim/sim_fixture.h"
#include "tests/test.h"

#define TRACES "tests/sim/traces/"

static enum imbrex_status read_file(const char *path, struct sim_trace *trace,
                                    struct imbrex_error *err)
{
    struct sim_trace_options options = {.block_size = 512, .session_span_s = 100, .seed = 7};
    struct sim_input *input = NULL;
    enum imbrex_status status = sim_input_open(path, &input, err);

    if (status == IMBREX_STATUS_OK) {
        status = sim_trace_read(input, &options, trace, err);
        sim_input_close(input);
    }
    return status;
}

/* Catches: numbers read wrongly at their edges, whole numbers that lose digits, a missing digit
 * that passes. */
static void test_numbers(void **state)
{
    (void)state;
    static const struct number {
        const char *text;
        double value;
    } good[] = {{"0", 0},
                {"-1.5", -1.5},
                {"12.25", 12.25},
                {"1e3", 1000},
                {"2.5e-2", 0.025},
                {"1E+2", 100},
                {"0.1", 0.1},
                {" 7", 7},
                {"123456789012345678901234567890", 123456789012345678901234567890.0},
                {"0.000000000000000000000000000001", 1e-30}};
    static const char *const bad[] = {"", "-", "1.", "1e", ".5", "x", "1e999"};

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        double value = 0;
        struct scan scan = scan_begin(good[i].text, strlen(good[i].text));
        assert_true(scan_number(&scan, 1e300, &value) && scan_end(&scan));
        assert_true(value >= good[i].value - 1e-15 * (value > 0 ? value : -value));
        assert_true(value <= good[i].value + 1e-15 * (value > 0 ? value : -value));
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        double value = 3;
        struct scan scan = scan_begin(bad[i], strlen(bad[i]));
        assert_false(scan_number(&scan, 1e300, &value));
        assert_int_equal(strncmp(scan.reason, "expected ", 9), 0);
        assert_true(value == 3);
    }
    uint64_t whole = 0;
    struct scan scan = scan_begin("18446744073709551615", 20);
    assert_true(scan_whole(&scan, UINT64_MAX, &whole));
    assert_true(whole == UINT64_MAX);
    scan = scan_begin("18446744073709551616", 20);
    assert_false(scan_whole(&scan, UINT64_MAX, &whole));
    scan = scan_begin("1.0", 3);
    assert_false(scan_whole(&scan, UINT64_MAX, &whole));
    scan = scan_begin("11", 2);
    assert_false(scan_whole(&scan, 10, &whole));
}

/* Catches: a value that is skipped too far or not far enough, nesting without an end. */
static void test_skip(void **state)
{
    (void)state;
    static const char *const good[] = {
        "{}",     "[]",       "{\"a\": [1, {\"b\": \"]\\\"}\"}, null], \"c\": true}",
        "-1.5e3", "\"\\\\\"", "[[], [[]], {}]"};
    static const char *const bad[] = {"{",   "[1 2]",  "{\"a\" 1}", "\"a", "[1,",
                                      "nul", "{1: 2}", "\"\\\"",    "[}"};
    char deep[200];

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct scan scan = scan_begin(good[i], strlen(good[i]));
        assert_true(scan_skip(&scan) && scan_end(&scan));
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct scan scan = scan_begin(bad[i], strlen(bad[i]));
        assert_false(scan_skip(&scan) && scan_end(&scan));
    }
    memset(deep, '[', 100);
    memset(deep + 100, ']', 100);
    struct scan scan = scan_begin(deep, sizeof(deep));
    assert_false(scan_skip(&scan));
    assert_string_equal(scan.reason, "expected at most 64 values in one another, found [");
}

/* Catches: blocks that are one although their prefixes differ or two although all is equal, a
 * partial last block that counts, equal times that stay equal or leave their step. */
static void test_mooncake(void **state)
{
    (void)state;
    struct sim_trace trace;

    sim_fixture_read("{\"timestamp\": 3000, \"input_length\": 1030, \"output_length\": 5,"
                     " \"hash_ids\": [1, 2, 9]}\n"
                     "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 6,"
                     " \"hash_ids\": [1, 2]}\r\n"
                     "\n"
                     "{\"timestamp\": 3000, \"input_length\": 1024, \"output_length\": 7,"
                     " \"hash_ids\": [3, 2], \"more\": {\"x\": [1]}}\n"
                     "{\"timestamp\": 6000, \"input_length\": 511, \"output_length\": 8,"
                     " \"hash_ids\": [1]}",
                     &trace);
    assert_int_equal(trace.format, SIM_FORMAT_MOONCAKE);
    assert_int_equal(trace.trace_block_size, 512);
    assert_int_equal(trace.num_requests, 4);
    assert_int_equal(trace.num_accesses, 6);
    assert_int_equal(trace.num_nodes, 4);
    assert_int_equal(trace.num_tokens, 1030 + 1024 + 1024 + 511);
    assert_int_equal(trace.num_bad_lines, 0);
    assert_int_equal(trace.requests[0].num_output, 6);
    assert_int_equal(trace.requests[1].start_ns, 3000000000);
    assert_int_equal(trace.requests[2].start_ns, 4500000000);
    assert_int_equal(trace.requests[3].num_blocks, 0);
    assert_int_equal(sim_trace_path(&trace, 0)[1], sim_trace_path(&trace, 1)[1]);
    assert_int_not_equal(sim_trace_path(&trace, 0)[1], sim_trace_path(&trace, 2)[1]);
    sim_trace_free(&trace);
}

/* Catches: ids that are grouped wrongly: a block of 32 tokens is two of the trace's. */
static void test_bailian(void **state)
{
    (void)state;
    const char *text =
        "{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 1.5, "
        "\"input_length\": 70, \"output_length\": 1, \"type\": \"text\", \"turn\": 1, "
        "\"hash_ids\": [5, 6, 7, 8, 9]}\n"
        "{\"chat_id\": 2, \"parent_chat_id\": 1, \"timestamp\": 2.5, "
        "\"input_length\": 64, \"output_length\": 1, \"type\": \"text\", \"turn\": 2, "
        "\"hash_ids\": [5, 6, 7, 10]}\n";
    struct sim_trace trace;
    struct imbrex_error err = {0};

    assert_int_equal(sim_fixture_try(text, strlen(text), 32, &trace, &err), IMBREX_STATUS_OK);
    assert_int_equal(trace.format, SIM_FORMAT_BAILIAN);
    assert_int_equal(trace.num_sessions, 1);
    assert_int_equal(trace.num_accesses, 4);
    assert_int_equal(trace.num_nodes, 3);
    assert_int_equal(trace.requests[1].start_ns, 2500000000);
    assert_int_equal(sim_trace_path(&trace, 0)[0], sim_trace_path(&trace, 1)[0]);
    assert_int_not_equal(sim_trace_path(&trace, 0)[1], sim_trace_path(&trace, 1)[1]);
    sim_trace_free(&trace);
    assert_int_equal(sim_fixture_try(text, strlen(text), 24, &trace, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
}

/* Catches: a wait that counts the server's time of then, an agent that starts when it ended or
 * delays its session, local ids that two sessions share, global ones that they do not. */
static void test_weka(void **state)
{
    (void)state;
    static const char session[] =
        "{\"id\": \"a\", \"requests\": ["
        "{\"t\": 0.0, \"type\": \"n\", \"in\": 512, \"out\": 3, \"hash_ids\": [1, 2], \"stop\": "
        "\"tool_use\", \"api_time\": 4.0, \"think_time\": 0.0},"
        "{\"t\": 30.0, \"type\": \"subagent\", \"duration_ms\": 20000, \"requests\": ["
        "{\"t\": 0.0, \"in\": 256, \"out\": 1, \"hash_ids\": [7], \"stop\": \"end_turn\", "
        "\"api_time\": 1, \"think_time\": 0},"
        "{\"t\": 5.0, \"in\": 256, \"out\": 1, \"hash_ids\": [7], \"stop\": null, "
        "\"api_time\": 1, \"think_time\": 4}]},"
        "{\"t\": 11.0, \"in\": 512, \"out\": 4, \"hash_ids\": [1, 2], \"stop\": \"\", "
        "\"think_time\": 6.5},"
        "{\"t\": 20.0, \"in\": 512, \"out\": 4, \"hash_ids\": [1, 3], \"stop\": \"max_tokens\", "
        "\"think_time\": 17}], \"block_size\": 256, \"hash_id_scope\": \"%s\"}\n";
    static struct sim_text text;
    struct sim_trace trace;
    struct imbrex_error err = {0};

    text.num_bytes = 0;
    sim_text_add(&text, session, "local");
    sim_text_add(&text, session, "local");
    assert_int_equal(sim_fixture_try(text.bytes, text.num_bytes, 256, &trace, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(trace.format, SIM_FORMAT_WEKA);
    assert_true(trace.is_closed_loop);
    assert_int_equal(trace.num_sessions, 2);
    assert_int_equal(trace.num_requests, 10);
    assert_int_equal(trace.num_nodes, 8);
    const struct sim_request *requests = trace.requests;
    assert_int_equal(requests[0].predecessor, -1);
    assert_int_equal(requests[0].finish, KV_FINISH_TOOL);
    /* The agent: started at 30 - 20 s, 6 s after the first request's end. */
    assert_int_equal(requests[1].predecessor, 0);
    assert_int_equal(requests[1].start_ns, 6000000000);
    assert_int_equal(requests[1].finish, KV_FINISH_STOP);
    assert_int_equal(requests[2].predecessor, 1);
    assert_int_equal(requests[2].start_ns, 4000000000);
    /* The session goes on from its own last request. */
    assert_int_equal(requests[3].predecessor, 0);
    assert_int_equal(requests[3].start_ns, 6500000000);
    /* Its predecessor's end is unknown: what it says about its wait counts from an earlier one. */
    assert_int_equal(requests[4].predecessor, 3);
    assert_int_equal(requests[4].start_ns, 9000000000);
    assert_int_equal(requests[4].finish, KV_FINISH_LENGTH);
    assert_int_equal(requests[0].first_follower, 1);
    assert_int_equal(requests[1].next_follower, 3);
    assert_int_equal(requests[5].predecessor, -1);
    assert_true(requests[0].start_ns > 0 && requests[5].start_ns > 0);
    assert_true(requests[0].start_ns != requests[5].start_ns);
    sim_trace_free(&trace);

    text.num_bytes = 0;
    sim_text_add(&text, session, "global");
    sim_text_add(&text, session, "global");
    assert_int_equal(sim_fixture_try(text.bytes, text.num_bytes, 256, &trace, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(trace.num_nodes, 4);
    sim_trace_free(&trace);
}

/* Catches: a bad line that ends the run, is not counted, leaves something of itself behind or is
 * reported with another's number or reason. */
static void test_bad_lines(void **state)
{
    (void)state;
    static const char *const good =
        "{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 5, \"hash_ids\": [1]}\n";
    static const struct bad_line {
        const char *line, *reason;
    } bad[] = {
        {"{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 5, \"hash_ids\": [1]",
         "hash_ids: expected a comma or a closing bracket, found the end of the line"},
        {"{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [2, -1]}",
         "hash_ids: expected a whole number of 0 or more, found -1"},
        {"{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [\"2\"]}",
         "hash_ids: expected a whole number of 0 or more, found \"2\""},
        {"{\"timestamp\": 0, \"input_length\": 1024, \"hash_ids\": [2]}",
         "hash_ids: expected 2 or more, for 1024 tokens in blocks of 512, found 1"},
        {"{\"input_length\": 512, \"hash_ids\": [2]}",
         "timestamp: expected a number of 0 or more, found none"},
        {"{\"timestamp\": -5, \"input_length\": 512, \"hash_ids\": [2]}",
         "timestamp: expected a number of 0 or more, found -5"},
        {"{\"timestamp\": \"\x1b[2J\", \"input_length\": 512, \"hash_ids\": [2]}",
         "timestamp: expected a number, found \"?[2J\""},
        {"{\"timestamp\": 0, \"hash_ids\": [2]}",
         "input_length: expected a whole number, found none"},
        {"{\"timestamp\": 0, \"input_length\": 99999999999, \"hash_ids\": [2]}",
         "input_length: expected a whole number of at most 2147483647, found 99999999999"},
        {"{\"timestamp\": 0, \"block_size\": 16, \"input_length\": 512, \"hash_ids\": [2]}",
         "block_size: expected 512 as in the lines before, found 16"},
        {"[1]", "expected an object, found ["},
        {"{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [2]} x",
         "expected the end of the line, found x"},
        {"{\"timestamp\": 0, \"input_length\": 512}", "hash_ids: expected an array, found none"},
        {"\xff\xfe", "expected an object, found ??"},
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        static struct sim_text text;
        struct sim_trace trace;
        text.num_bytes = 0;
        sim_text_add(&text, "%s\n%s\n%s\n%s", good, bad[i].line, good, bad[i].line);
        sim_fixture_read(text.bytes, &trace);
        assert_int_equal(trace.num_requests, 2);
        assert_int_equal(trace.num_accesses, 2);
        assert_int_equal(trace.num_tokens, 1024);
        assert_int_equal(trace.num_bad_lines, 2);
        assert_int_equal(trace.first_bad_line, 3);
        assert_string_equal(trace.first_bad_reason, bad[i].reason);
        sim_trace_free(&trace);
    }
}

/* Catches: a session of which the first half stays although its second half is bad. */
static void test_bad_session(void **state)
{
    (void)state;
    const char *text =
        "{\"block_size\": 512, \"hash_id_scope\": \"local\", \"requests\": [{\"t\": 0, \"in\": "
        "512, "
        "\"out\": 1, \"hash_ids\": [1]}]}\n"
        "{\"block_size\": 512, \"requests\": [{\"t\": 0, \"in\": 512, \"out\": 1, \"hash_ids\": "
        "[1]}, {\"t\": 1, \"out\": 1, \"hash_ids\": []}]}\n"
        "{\"block_size\": 256, \"requests\": []}\n"
        "{\"block_size\": 512, \"requests\": [{\"type\": \"subagent\", \"t\": 3}]}\n"
        "{\"block_size\": 512, \"requests\": [{\"type\": \"subagent\", \"t\": 3, \"requests\": "
        "[{\"in\": true}]}]}\n";
    struct sim_trace trace;

    sim_fixture_read(text, &trace);
    assert_int_equal(trace.num_requests, 1);
    assert_int_equal(trace.num_sessions, 1);
    assert_int_equal(trace.num_accesses, 1);
    assert_int_equal(trace.num_bad_lines, 4);
    assert_int_equal(trace.first_bad_line, 2);
    assert_string_equal(trace.first_bad_reason,
                        "in: expected a whole number in each request, found none");
    sim_trace_free(&trace);
}

/* Catches: files that are no traces and pass, or are refused without saying why. */
static void test_refused(void **state)
{
    (void)state;
    static const struct refused {
        const char *text;
        enum imbrex_status status;
        const char *message;
    } refused[] = {
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
         IMBREX_STATUS_UNSUPPORTED,
         "trace: a csv trace of Azure has no block ids, so nothing can be found in a cache; "
         "`imbrex bench engine --trace` takes it"},
        {"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
         IMBREX_STATUS_UNSUPPORTED,
         "trace: a csv trace of BurstGPT has no block ids, so nothing can be found in a cache; "
         "`imbrex bench engine --trace` takes it"},
        {"", IMBREX_STATUS_FORMAT, "trace: expected requests, found none"},
        {"\x7f"
         "ELF\x02\x01\n",
         IMBREX_STATUS_FORMAT,
         "trace: expected a trace as lines of JSON (Mooncake, Bailian, WEKA), or such a file in "
         "zstd, found a binary file"},
        {"\nhello\n", IMBREX_STATUS_FORMAT,
         "trace: no line can be read as a trace; line 2: expected a number, found hello"},
        {"{\"a\": 1}", IMBREX_STATUS_FORMAT,
         "trace: no line can be read as a trace; line 1: expected a request (timestamp, hash_ids) "
         "or a session (requests), found neither field"},
    };

    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        struct sim_trace trace = {.num_requests = -1};
        struct imbrex_error err = {0};
        assert_int_equal(
            sim_fixture_try(refused[i].text, strlen(refused[i].text), 512, &trace, &err),
            refused[i].status);
        assert_string_equal(err.message, refused[i].message);
        assert_int_equal(trace.num_requests, -1);
    }
    struct sim_trace trace;
    struct imbrex_error err = {0};
    assert_int_equal(read_file(TRACES "nothing.jsonl", &trace, &err), IMBREX_STATUS_NOT_FOUND);
}

/* Catches: lines that are cut where a read or a decompressed piece ends; a file that was cut
 * passing for a whole one. */
static void test_compressed(void **state)
{
    (void)state;
    struct sim_trace plain, compressed;
    struct imbrex_error err = {0};

    assert_int_equal(read_file(TRACES "mooncake_excerpt.jsonl", &plain, &err), IMBREX_STATUS_OK);
    assert_int_equal(plain.num_requests, 60);
    enum imbrex_status status = read_file(TRACES "mooncake_excerpt.jsonl.zst", &compressed, &err);
#if IMBREX_HAS_ZSTD
    static unsigned char bytes[65536];
    FILE *file = fopen(TRACES "mooncake_excerpt.jsonl.zst", "rb");
    assert_non_null(file);
    size_t num_bytes = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);

    assert_int_equal(status, IMBREX_STATUS_OK);
    assert_int_equal(compressed.num_accesses, plain.num_accesses);
    assert_memory_equal(compressed.accesses, plain.accesses,
                        (size_t)plain.num_accesses * sizeof(*plain.accesses));
    sim_trace_free(&compressed);
    assert_int_equal(sim_fixture_try(bytes, num_bytes / 2, 512, &compressed, &err),
                     IMBREX_STATUS_FORMAT);
    assert_string_equal(err.message, "trace: the compressed file ends too early");
    memset(bytes + 8, 0x55, 8);
    assert_int_equal(sim_fixture_try(bytes, num_bytes, 512, &compressed, &err),
                     IMBREX_STATUS_FORMAT);
#else
    assert_int_equal(status, IMBREX_STATUS_UNSUPPORTED);
#endif
    sim_trace_free(&plain);
}

/* Catches: a line longer than the buffer that loses its begin or end. */
static void test_long_line(void **state)
{
    (void)state;
    enum { NUM_IDS = 200000 };
    size_t num_bytes = 0, max_bytes = (size_t)NUM_IDS * 8 + 200;
    char *text = malloc(max_bytes);
    struct sim_trace trace;

    assert_non_null(text);
    num_bytes += (size_t)snprintf(text, max_bytes,
                                  "{\"timestamp\": 1, \"input_length\": %d, \"hash_ids\": [0",
                                  NUM_IDS * 512);
    for (int32_t i = 1; i < NUM_IDS; i++) {
        num_bytes += (size_t)snprintf(text + num_bytes, max_bytes - num_bytes, ",%d", i);
    }
    snprintf(text + num_bytes, max_bytes - num_bytes, "]}\n");
    sim_fixture_read(text, &trace);
    assert_int_equal(trace.num_requests, 1);
    assert_int_equal(trace.num_accesses, NUM_IDS);
    assert_int_equal(trace.num_nodes, NUM_IDS);
    sim_trace_free(&trace);
    free(text);
}

/* Catches: real files that do not read. The figures were counted with another program. */
static void test_excerpts(void **state)
{
    (void)state;
    struct sim_trace trace;
    struct imbrex_error err = {0};

    assert_int_equal(read_file(TRACES "weka_excerpt.jsonl", &trace, &err), IMBREX_STATUS_OK);
    assert_int_equal(trace.num_sessions, 5);
    assert_int_equal(trace.num_bad_lines, 0);
    assert_int_equal(trace.trace_block_size, 64);
    assert_int_equal(trace.num_requests, 15);
    assert_int_equal(trace.num_tokens, 224473);
    assert_int_equal(trace.num_accesses, 431);
    sim_trace_free(&trace);
}

/* Catches: starts that are given to other sessions, or too few that pass. */
static void test_starts(void **state)
{
    (void)state;
    const char *path = TEST_BUILD_DIR "/starts.txt";
    const char *text = "{\"block_size\": 512, \"requests\": [{\"in\": 1, \"hash_ids\": []}]}\nbad\n"
                       "{\"block_size\": 512, \"requests\": [{\"in\": 2, \"hash_ids\": []}]}\n";
    struct sim_trace_options options = {.block_size = 512};
    struct sim_input *input = NULL;
    struct sim_trace trace;
    struct imbrex_error err = {0};
    double *starts = NULL;
    size_t num_starts = 0;
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs("1.5\n2\n3.25\n", file);
    fclose(file);
    assert_int_equal(sim_starts_read(path, &starts, &num_starts, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_starts, 3);
    options.starts = starts;
    options.num_starts = num_starts;
    assert_int_equal(sim_input_view("trace", text, strlen(text), &input, &err), IMBREX_STATUS_OK);
    assert_int_equal(sim_trace_read(input, &options, &trace, &err), IMBREX_STATUS_OK);
    sim_input_close(input);
    assert_int_equal(trace.requests[0].start_ns, 1500000000);
    assert_int_equal(trace.requests[1].start_ns, 3250000000);
    sim_trace_free(&trace);

    options.num_starts = 2;
    assert_int_equal(sim_input_view("trace", text, strlen(text), &input, &err), IMBREX_STATUS_OK);
    assert_int_equal(sim_trace_read(input, &options, &trace, &err), IMBREX_STATUS_FORMAT);
    assert_string_equal(err.message, "trace: expected a start for each of 3 sessions, found 2");
    sim_input_close(input);
    free(starts);

    file = fopen(path, "w");
    assert_non_null(file);
    fputs("1.5\n-2\n", file);
    fclose(file);
    assert_int_equal(sim_starts_read(path, &starts, &num_starts, &err), IMBREX_STATUS_FORMAT);
    assert_non_null(strstr(err.message, "line 2: expected a start in s, 0 or more, found -2"));
}

/* Catches: a block size that is not what the trace says that its engine had, counts for traces that
 * say nothing of that, or is none of the lines behind; one that was asked for and is not taken. */
static void test_block_size(void **state)
{
    (void)state;
    static const char named[] =
        "{\"chat_id\": 0, \"timestamp\": 0, \"input_length\": 96, \"hash_ids\": [1, 2, 3], "
        "\"block_size\": 32}\n"
        "{\"chat_id\": 1, \"timestamp\": 1, \"input_length\": 32, \"hash_ids\": [1]}\n";
    static const char single[] = "{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [1]}\n";
    static const char session[] =
        "{\"block_size\": 64, \"requests\": [{\"in\": 1, \"hash_ids\": []}]}\n";
    static const struct asked {
        const char *text;
        int32_t block_size, expected, trace_block_size;
    } asked[] = {{named, 0, 32, 32},        {named, 64, 64, 32},   {single, 0, 512, 512},
                 {single, 1024, 1024, 512}, {session, 0, 512, 64}, {session, 128, 128, 64}};

    for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
        struct sim_trace trace;
        struct imbrex_error err = {0};
        assert_int_equal(sim_fixture_try(asked[i].text, strlen(asked[i].text), asked[i].block_size,
                                         &trace, &err),
                         IMBREX_STATUS_OK);
        assert_int_equal(trace.block_size, asked[i].expected);
        assert_int_equal(trace.trace_block_size, asked[i].trace_block_size);
        assert_int_equal(trace.num_bad_lines, asked[i].text == named);
        if (asked[i].text == named) {
            assert_int_equal(trace.num_accesses, 96 / asked[i].expected);
            assert_string_equal(trace.first_bad_reason,
                                "block_size: expected 32 as in the lines before, found none");
        }
        sim_trace_free(&trace);
    }
    struct sim_trace trace;
    struct imbrex_error err = {0};
    assert_int_equal(sim_fixture_try(named, strlen(named), 48, &trace, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_string_equal(
        err.message,
        "block_size: expected a multiple of the 32 tokens of an id in trace, found 48");
}

/* Catches: requests in another order than that of their times, or sorted without a word. */
static void test_early(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    const int64_t times_ms[] = {0, 3000, 1000, 2000, 3000};

    text.num_bytes = 0;
    for (size_t i = 0; i < 5; i++) {
        const int32_t id = (int32_t)i;
        sim_text_add_request(&text, times_ms[i], 5, &id, 1);
    }
    sim_fixture_read(text.bytes, &trace);
    assert_int_equal(trace.num_early, 2);
    for (int32_t i = 1; i < trace.num_requests; i++) {
        assert_true(trace.requests[i].start_ns > trace.requests[i - 1].start_ns);
    }
    sim_trace_free(&trace);
    /* In a session the list is the order; a time that is not there is before none, and what a bad
     * line had counts for nothing. */
    sim_fixture_read(
        "{\"block_size\": 512, \"requests\": [{\"t\": 5, \"in\": 1, \"hash_ids\": []}, "
        "{\"t\": 4, \"in\": 2, \"hash_ids\": []}, {\"in\": 3, \"hash_ids\": []}, "
        "{\"t\": 6, \"in\": 4, \"hash_ids\": []}]}\n"
        "{\"block_size\": 512, \"requests\": [{\"t\": 5, \"in\": 1, \"hash_ids\": []}, "
        "{\"t\": 4, \"in\": 2, \"hash_ids\": []}, {\"in\": -1}]}\n",
        &trace);
    assert_int_equal(trace.num_early, 1);
    assert_int_equal(trace.num_bad_lines, 1);
    for (int32_t i = 0; i < 4; i++) {
        assert_int_equal(trace.requests[i].num_tokens, i + 1);
    }
    sim_trace_free(&trace);
}

int run_sim_trace_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),     cmocka_unit_test(test_skip),
        cmocka_unit_test(test_mooncake),    cmocka_unit_test(test_bailian),
        cmocka_unit_test(test_weka),        cmocka_unit_test(test_bad_lines),
        cmocka_unit_test(test_bad_session), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_compressed),  cmocka_unit_test(test_long_line),
        cmocka_unit_test(test_excerpts),    cmocka_unit_test(test_starts),
        cmocka_unit_test(test_block_size),  cmocka_unit_test(test_early),
    };
    return cmocka_run_group_tests_name("sim_trace", tests, NULL, NULL);
}
