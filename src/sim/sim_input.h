/* SPDX-License-Identifier: Apache-2.0 */
/* The lines of a trace, one at a time: from a file, standard input or memory; a file that begins
 * as zstd does is decompressed on the way. */
#ifndef IMBREX_SIM_SIM_INPUT_H
#define IMBREX_SIM_SIM_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* A line is kept whole while it is read. The longest sessions of agents are some 10 MB. */
#define SIM_MAX_LINE_BYTES ((size_t)1 << 30)

struct sim_input;

/* Asked now and then: true goes on, false ends with CANCELLED. done: 0 to 1. */
typedef bool sim_continue_fn(void *user, double done);

/* "-" is standard input. NOT_FOUND, IO. Nothing is read before the first line is asked for. */
enum imbrex_status sim_input_open(const char *path, struct sim_input **input,
                                  struct imbrex_error *err);
/* The bytes stay the caller's and outlive the input; `path` is for messages. */
enum imbrex_status sim_input_view(const char *path, const void *bytes, size_t num_bytes,
                                  struct sim_input **input, struct imbrex_error *err);
/* Whoever reads may be stopped from now on, also while nothing comes. How much there is to read is
 * not known: done is 0. */
void sim_input_watch(struct sim_input *input, sim_continue_fn *may_continue, void *user);
void sim_input_close(struct sim_input *input);

/* The next line without its end, *line NULL behind the last; valid until the next call. UNSUPPORTED
 * for zstd where the library was built without it. */
enum imbrex_status sim_input_line(struct sim_input *input, const char **line, size_t *num_bytes,
                                  struct imbrex_error *err);
/* 1-based, of the line that was given last. */
int64_t sim_input_line_number(const struct sim_input *input);
const char *sim_input_path(const struct sim_input *input);

#endif
