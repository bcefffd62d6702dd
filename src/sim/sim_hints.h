/* SPDX-License-Identifier: Apache-2.0 */
/* What clients would say about their return, made from the trace's future and then made wrong now
 * and then: one bit a request. In an open loop: whether somebody comes back to the whole of its
 * prompt. In a closed one almost everybody does, so the bit is whether that is within 300 s. The
 * bit becomes the hints of the API: a return after the median time of those of its kind, or the
 * end of the session. */
#ifndef IMBREX_SIM_SIM_HINTS_H
#define IMBREX_SIM_SIM_HINTS_H

#include "sim/sim_trace.h"

struct sim_hints {
    unsigned char *says_soon; /* [num_requests] */
    int64_t soon_ns, late_ns; /* expected return; late 0: the session ends */
};

/* Each bit is wrong with probability `error`. */
enum imbrex_status sim_hints_create(const struct sim_trace *trace, double error, uint64_t seed,
                                    struct sim_hints *hints, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void sim_hints_destroy(struct sim_hints *hints);
void sim_hints_fill(const struct sim_hints *hints, int32_t request_idx,
                    struct kv_fingerprint *fingerprint);

#endif
