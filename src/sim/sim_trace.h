/* SPDX-License-Identifier: Apache-2.0 */
/* A trace as the replayer keeps it: for each request its times and the path of its blocks. Blocks
 * have numbers of their own: equal number, equal content and equal everything before it. So a path
 * is a walk from a root, and two prompts share exactly the numbers that they begin with.
 *
 * Only full blocks count: the rest of a prompt is never cached. Outputs have no ids in any trace
 * and are not cached either. Kept are 4 bytes a block access and 48 a request. */
#ifndef IMBREX_SIM_SIM_TRACE_H
#define IMBREX_SIM_SIM_TRACE_H

#include <stdbool.h>

#include "kv/kv_policy.h"
#include "sim/sim_input.h"

enum sim_format {
    SIM_FORMAT_NONE,
    SIM_FORMAT_MOONCAKE,
    SIM_FORMAT_WEKA,
    SIM_FORMAT_BAILIAN,
};

struct sim_request {
    int64_t start_ns;     /* its arrival, or with a predecessor the wait from its finish on */
    int64_t first_access; /* in the trace's accesses */
    int32_t num_blocks;
    int32_t num_tokens, num_output;
    int32_t predecessor;    /* -1: it arrives by itself */
    int32_t first_follower; /* of those that wait for its finish; -1: none */
    int32_t next_follower;  /* of the same predecessor */
    int32_t session;        /* of the trace's sessions, -1: it names none */
    int32_t finish;         /* enum kv_finish */
};

struct sim_trace {
    enum sim_format format;
    int32_t trace_block_size, block_size; /* tokens: of its ids; of its accesses here */
    int32_t named_block_size;             /* of its ids, if its first line says it; 0 */
    struct sim_request *requests;         /* [num_requests], the order of the file */
    int32_t *accesses;                    /* [num_accesses] block numbers */
    int64_t num_accesses;
    int32_t num_requests, num_sessions;
    int32_t num_nodes; /* different blocks: numbers are below */
    int64_t num_tokens;
    bool is_closed_loop; /* a session's next request waits for the last one's end */

    int64_t num_bad_lines, first_bad_line;
    char first_bad_reason[160];
    /* Requests with a time before one above them: sorted, or left where they stand in a session. */
    int64_t num_early;
};

#define SIM_DEFAULT_BLOCK_SIZE 512

struct sim_trace_options {
    /* Tokens. 0: what the lines of requests say of themselves, else SIM_DEFAULT_BLOCK_SIZE. */
    int32_t block_size;
    const double *starts; /* [num_starts] s, of the sessions in the file's order; NULL: drawn */
    size_t num_starts;
    double session_span_s;
    uint64_t seed;
};

/* Reads all lines. FORMAT if not one can be used, or the block size is no multiple of the trace's;
 * UNSUPPORTED for traces without block ids. */
enum imbrex_status sim_trace_read(struct sim_input *input, const struct sim_trace_options *options,
                                  struct sim_trace *trace, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void sim_trace_free(struct sim_trace *trace);

/* The numbers of the file at `path`, one a line; the caller frees *starts. */
enum imbrex_status sim_starts_read(const char *path, double **starts, size_t *num_starts,
                                   struct imbrex_error *err);

const char *sim_format_name(enum sim_format format);

static inline const int32_t *sim_trace_path(const struct sim_trace *trace, int32_t request_idx)
{
    return trace->accesses + trace->requests[request_idx].first_access;
}

#endif
