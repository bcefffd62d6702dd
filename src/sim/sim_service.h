/* SPDX-License-Identifier: Apache-2.0 */
/* A server of one queue, simple enough to be stated whole. Requests wait in the order in which
 * they arrive. The first one is admitted when a slot is free, the prefill server is idle, and its
 * blocks fit beside those of the requests that run. It may be held until blocks have come from a
 * slower tier. Its prefill takes as long as its tokens that were not found need at a constant rate;
 * then the first token is out and the prefill server is idle; each token of the output takes a
 * constant time, and then it ends. While it runs its blocks stay.
 *
 *   arrival --- waits --- admission --- held --- prefill --- first token --- decode --- finish */
#ifndef IMBREX_SIM_SIM_SERVICE_H
#define IMBREX_SIM_SIM_SERVICE_H

#include "sim/sim_store.h"

struct sim_service {
    int32_t num_slots;
    double prefill_tokens_per_s, decode_s_per_token;
    double warm; /* share of the requests, by arrival, that are not scored */
};

enum sim_event_kind {
    SIM_EVENT_ARRIVE,
    SIM_EVENT_ADMIT,
    SIM_EVENT_FINISH,
};

struct sim_event {
    int64_t time_ns;
    int32_t request_idx;
    enum sim_event_kind kind;
};

/* What happened in a run, in order. */
struct sim_timeline {
    struct sim_event *events; /* [num_events] three for each request */
    int64_t num_events;
    int32_t max_live; /* requests that waited or ran at once */
    double mean_queue;
};

struct sim_outcome {
    int64_t num_scored, num_tokens, num_hit_tokens; /* of scored requests */
    double mean_queue;    /* waiting when one of them arrived, without it */
    float *ttft_s;        /* [num_scored], the caller frees it */
    int64_t num_accesses; /* of all requests */
    int64_t last_arrival_ns;
};

/* The first request, by order of arrival, that is scored. */
int32_t sim_service_first_scored(const struct sim_service *service, int32_t num_requests);

/* The service drives the store. *timeline, if not NULL, is written and is the caller's
 * (sim_timeline_free). */
enum imbrex_status sim_service_run(const struct sim_service *service, struct sim_store *store,
                                   sim_continue_fn *may_continue, void *user,
                                   struct sim_timeline *timeline, struct sim_outcome *outcome,
                                   struct imbrex_error *err);

/* The store sees what was recorded. TTFT: the recorded wait and the prefill of what was not found.
 */
enum imbrex_status sim_timeline_replay(const struct sim_timeline *timeline,
                                       const struct sim_service *service, struct sim_store *store,
                                       sim_continue_fn *may_continue, void *user,
                                       struct sim_outcome *outcome, struct imbrex_error *err);

/* Both safe on a zeroed struct. */
void sim_timeline_free(struct sim_timeline *timeline);
void sim_outcome_free(struct sim_outcome *outcome);

#endif
