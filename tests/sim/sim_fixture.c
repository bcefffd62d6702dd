/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/sim_fixture.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

void sim_text_add(struct sim_text *text, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int num_bytes = vsnprintf(text->bytes + text->num_bytes, sizeof(text->bytes) - text->num_bytes,
                              format, args);
    va_end(args);
    assert_true(num_bytes >= 0 && (size_t)num_bytes < sizeof(text->bytes) - text->num_bytes);
    text->num_bytes += (size_t)num_bytes;
}

void sim_text_add_request(struct sim_text *text, int64_t timestamp_ms, int32_t num_output,
                          const int32_t *ids, int32_t num_ids)
{
    sim_text_add(
        text, "{\"timestamp\": %lld, \"input_length\": %d, \"output_length\": %d, \"hash_ids\": [",
        (long long)timestamp_ms, num_ids * 512, num_output);
    for (int32_t i = 0; i < num_ids; i++) {
        sim_text_add(text, "%s%d", i > 0 ? ", " : "", ids[i]);
    }
    sim_text_add(text, "]}\n");
}

enum imbrex_status sim_fixture_try(const void *text, size_t num_bytes, int32_t block_size,
                                   struct sim_trace *trace, struct imbrex_error *err)
{
    struct sim_trace_options options = {.block_size = block_size, .session_span_s = 100, .seed = 7};
    struct sim_input *input = NULL;
    enum imbrex_status status = sim_input_view("trace", text, num_bytes, &input, err);

    if (status == IMBREX_STATUS_OK) {
        status = sim_trace_read(input, &options, trace, err);
        sim_input_close(input);
    }
    return status;
}

void sim_fixture_read(const char *text, struct sim_trace *trace)
{
    struct imbrex_error err = {0};

    if (sim_fixture_try(text, strlen(text), 512, trace, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

int64_t sim_fixture_hits(const struct sim_outcome *outcome)
{
    return outcome->num_hit_tokens / 512;
}
