/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_hints.h"

#include <stdlib.h>

#include "sim/sim_random.h"

#define SOON_NS 300000000000
#define NEVER INT64_MAX

/* returns_ns[i]: until somebody comes back to the whole prompt of request i; NEVER. */
static void find_returns(const struct sim_trace *trace, int32_t *last_request, int64_t *returns_ns)
{
    for (int32_t i = trace->num_requests - 1; i >= 0; i--) {
        const struct sim_request *request = &trace->requests[i];
        returns_ns[i] = NEVER;
        if (trace->is_closed_loop) {
            int32_t follower = request->first_follower;
            for (; follower >= 0; follower = trace->requests[follower].next_follower) {
                int64_t wait_ns = trace->requests[follower].start_ns;
                returns_ns[i] = wait_ns < returns_ns[i] ? wait_ns : returns_ns[i];
            }
            continue;
        }
        const int32_t *path = sim_trace_path(trace, i);
        if (request->num_blocks > 0 && last_request[path[request->num_blocks - 1]] >= 0) {
            int32_t next = last_request[path[request->num_blocks - 1]];
            returns_ns[i] = trace->requests[next].start_ns - request->start_ns;
        }
        for (int32_t k = 0; k < request->num_blocks; k++) {
            last_request[path[k]] = i;
        }
    }
}

static int compare_times(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

/* Of the times in [from, to), at least 1; 0 if there are none. Sorts the times. */
static int64_t median_between(int64_t *times_ns, int32_t num_times, int64_t from, int64_t to)
{
    int32_t begin = 0, end = 0;

    qsort(times_ns, (size_t)num_times, sizeof(*times_ns), compare_times);
    for (int32_t i = 0; i < num_times; i++) {
        begin += times_ns[i] < from;
        end += times_ns[i] < to;
    }
    if (begin == end) {
        return 0;
    }
    int64_t median = times_ns[begin + (end - begin) / 2];
    return median > 0 ? median : 1;
}

enum imbrex_status sim_hints_create(const struct sim_trace *trace, double error, uint64_t seed,
                                    struct sim_hints *hints, struct imbrex_error *err)
{
    size_t num_requests = (size_t)trace->num_requests, num_nodes = (size_t)trace->num_nodes;
    int64_t *returns_ns = malloc(num_requests * sizeof(*returns_ns));
    int32_t *last_request = malloc((num_nodes + 1) * sizeof(*last_request));
    unsigned char *says_soon = malloc(num_requests);
    int64_t soon_ns = trace->is_closed_loop ? SOON_NS : NEVER;
    uint64_t random = seed;

    if (returns_ns == NULL || last_request == NULL || says_soon == NULL) {
        free(returns_ns);
        free(last_request);
        free(says_soon);
        return error_out_of_memory(err, "hints", num_requests * 9 + num_nodes * 4);
    }
    for (size_t i = 0; i < num_nodes; i++) {
        last_request[i] = -1;
    }
    find_returns(trace, last_request, returns_ns);
    for (size_t i = 0; i < num_requests; i++) {
        bool is_wrong = sim_random(&random) < error;
        says_soon[i] = (returns_ns[i] < soon_ns) != is_wrong;
    }
    hints->says_soon = says_soon;
    hints->soon_ns = median_between(returns_ns, trace->num_requests, 0, soon_ns);
    hints->late_ns = median_between(returns_ns, trace->num_requests, soon_ns, NEVER);
    free(returns_ns);
    free(last_request);
    return IMBREX_STATUS_OK;
}

void sim_hints_destroy(struct sim_hints *hints)
{
    free(hints->says_soon);
    *hints = (struct sim_hints){.says_soon = NULL};
}

void sim_hints_fill(const struct sim_hints *hints, int32_t request_idx,
                    struct kv_fingerprint *fingerprint)
{
    if (hints->says_soon[request_idx]) {
        fingerprint->expected_return_ns = hints->soon_ns > 0 ? hints->soon_ns : 1;
    } else if (hints->late_ns > 0) {
        fingerprint->expected_return_ns = hints->late_ns;
    } else {
        fingerprint->is_session_end = true;
    }
}
