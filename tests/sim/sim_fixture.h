/* SPDX-License-Identifier: Apache-2.0 */
/* Small traces for the tests of the replayer. */
#ifndef IMBREX_TESTS_SIM_SIM_FIXTURE_H
#define IMBREX_TESTS_SIM_SIM_FIXTURE_H

#include "sim/sim_service.h"

#define SIM_TEXT_BYTES 65536

/* A text that grows line by line. */
struct sim_text {
    char bytes[SIM_TEXT_BYTES];
    size_t num_bytes;
};

void sim_text_add(struct sim_text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A Mooncake line of full blocks of 512 tokens. */
void sim_text_add_request(struct sim_text *text, int64_t timestamp_ms, int32_t num_output,
                          const int32_t *ids, int32_t num_ids);

/* Fails the test if the text is no trace. Blocks of 512 tokens; session starts are drawn over 100
 * s with seed 7. */
void sim_fixture_read(const char *text, struct sim_trace *trace);
enum imbrex_status sim_fixture_try(const void *text, size_t num_bytes, int32_t block_size,
                                   struct sim_trace *trace, struct imbrex_error *err);

/* Blocks found in all of its requests, scored from the first on. */
int64_t sim_fixture_hits(const struct sim_outcome *outcome);

#endif
