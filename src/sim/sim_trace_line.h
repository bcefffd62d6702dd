/* SPDX-License-Identifier: Apache-2.0 */
/* One line of a trace, in each of the formats:
 *
 *   mooncake  a request: timestamp (ms), input_length, output_length, hash_ids of 512 tokens each
 *             (the last may be partial)
 *             https://github.com/kvcache-ai/Mooncake, FAST25-release
 *   bailian   a request: timestamp (s), chat_id, parent_chat_id, turn, input_length, output_length,
 *             hash_ids of 16 tokens each; those that imbrex bench kv writes also have a block_size,
 *             of the engine and so of the ids, which counts for mooncake too
 *             https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon
 *   weka      a session: block_size, hash_id_scope, requests: t (s), in, out, hash_ids (of full
 *             blocks), stop, api_time, think_time (s, the client's, before the request); type
 *             "subagent": requests of its own, t when it ended, duration_ms
 *             https://github.com/callanjfox/kv-cache-tester
 */
#ifndef IMBREX_SIM_SIM_TRACE_LINE_H
#define IMBREX_SIM_SIM_TRACE_LINE_H

#include "sim/sim_builder.h"
#include "sim/sim_scan.h"

/* What the lines of one file have in common. */
struct sim_line_reader {
    struct sim_builder builder;
    int32_t line_idx; /* of lines that are not blank, from 0; a session is named by it */
};

/* By what the fields of the first line are called. *block_size: what it says of that itself, 0 if
 * nothing, or nothing that can be one. */
enum sim_format sim_line_format(const char *line, size_t num_bytes, int32_t *block_size);
/* A csv header of a trace that has no block ids: its name, else NULL. */
const char *sim_line_csv_name(const char *line, size_t num_bytes);

/* A bad line fails the scan and leaves the trace as it was; statuses are of memory and limits. */
enum imbrex_status sim_line_read(struct sim_line_reader *reader, struct scan *scan,
                                 struct imbrex_error *err);

#endif
