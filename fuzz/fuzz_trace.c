/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of all formats, plain or compressed: what is read holds together, and can be replayed. */
#include <stdlib.h>

#include "sim/sim_service.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check(const struct sim_trace *trace)
{
    int64_t num_accesses = 0, num_tokens = 0;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        const struct sim_request *request = &trace->requests[i];
        require(request->predecessor < i && request->start_ns >= 0);
        require(request->first_access >= 0 && request->num_blocks >= 0);
        require(request->first_access + request->num_blocks <= trace->num_accesses);
        require(request->num_blocks <= request->num_tokens / trace->block_size);
        for (int32_t k = 0; k < request->num_blocks; k++) {
            int32_t node = sim_trace_path(trace, i)[k];
            require(node >= 0 && node < trace->num_nodes);
        }
        num_accesses += request->num_blocks;
        num_tokens += request->num_tokens;
    }
    require(num_accesses == trace->num_accesses && num_tokens == trace->num_tokens);
    require((trace->num_bad_lines > 0) == (trace->first_bad_reason[0] != '\0'));
}

static void replay(const struct sim_trace *trace)
{
    const struct sim_service service = {
        .num_slots = 4, .prefill_tokens_per_s = 1000, .decode_s_per_token = 0.01, .warm = 0.5};
    struct imbrex_error err = {0};
    struct sim_store *store = NULL;
    struct sim_outcome outcome;

    require(sim_lru_create(trace, 7, &store, &err) == IMBREX_STATUS_OK);
    require(sim_service_run(&service, store, NULL, NULL, NULL, &outcome, &err) == IMBREX_STATUS_OK);
    require(store->num_used == 0 && outcome.num_hit_tokens <= outcome.num_tokens);
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct sim_trace_options options = {.block_size = 512, .session_span_s = 100};
    struct imbrex_error err = {0};
    struct sim_input *input = NULL;
    struct sim_trace trace = {.num_requests = 0};

    enum imbrex_status status = sim_input_view("fuzz", bytes, num_bytes, &input, &err);
    if (status == IMBREX_STATUS_OK) {
        status = sim_trace_read(input, &options, &trace, &err);
        sim_input_close(input);
    }
    if (status == IMBREX_STATUS_OK) {
        require(trace.num_requests > 0);
        check(&trace);
        replay(&trace);
        sim_trace_free(&trace);
    } else {
        require(err.message[0] != '\0');
    }
    return 0;
}
