/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_service.h"

#include <math.h>
#include <stdlib.h>

#define NS_PER_S 1e9
#define NEVER INT64_MAX
#define LAST_NS (INT64_MAX / 4)
#define EVENTS_A_QUESTION 4096

/* Earliest first, by time and then by number. */
struct heap_entry {
    int64_t time_ns;
    int32_t request_idx;
};

struct heap {
    struct heap_entry *entries; /* [num_entries] */
    int32_t num_entries;
};

static bool is_earlier(struct heap_entry a, struct heap_entry b)
{
    return a.time_ns != b.time_ns ? a.time_ns < b.time_ns : a.request_idx < b.request_idx;
}

static void heap_push(struct heap *heap, int64_t time_ns, int32_t request_idx)
{
    struct heap_entry entry = {.time_ns = time_ns, .request_idx = request_idx};
    int32_t at = heap->num_entries++;

    while (at > 0 && is_earlier(entry, heap->entries[(at - 1) / 2])) {
        heap->entries[at] = heap->entries[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->entries[at] = entry;
}

static struct heap_entry heap_pop(struct heap *heap)
{
    struct heap_entry first = heap->entries[0], last = heap->entries[--heap->num_entries];
    int32_t at = 0;

    for (int32_t child = 1; child < heap->num_entries; child = 2 * at + 1) {
        if (child + 1 < heap->num_entries &&
            is_earlier(heap->entries[child + 1], heap->entries[child])) {
            child++;
        }
        if (!is_earlier(heap->entries[child], last)) {
            break;
        }
        heap->entries[at] = heap->entries[child];
        at = child;
    }
    heap->entries[at] = last;
    return first;
}

/* Times of malicious traces and absurd rates end here, far from overflow. */
static int64_t later(int64_t now_ns, double wait_ns)
{
    return (double)now_ns + wait_ns < (double)LAST_NS ? now_ns + (int64_t)wait_ns : LAST_NS;
}

static int64_t heap_time(const struct heap *heap)
{
    return heap->num_entries > 0 ? heap->entries[0].time_ns : NEVER;
}

struct run {
    const struct sim_service *service;
    const struct sim_trace *trace;
    struct sim_store *store;
    struct sim_timeline *timeline;
    struct sim_outcome *outcome;
    sim_continue_fn *may_continue;
    void *user;
    int32_t first_scored; /* by order of arrival */
    int64_t *arrivals_ns; /* [num_requests] by request */
    int32_t *orders;      /* [num_requests] place among the arrivals, by request */
    int32_t num_arrived, num_admitted, num_finished;
    int64_t num_events;
    double num_seen_waiting;

    /* Of a service that runs, not of a replay. */
    int32_t *queue; /* [num_requests] in order of arrival; waiting: [num_admitted, num_arrived) */
    struct heap coming, running;
    int64_t prefill_end_ns;
};

int32_t sim_service_first_scored(const struct sim_service *service, int32_t num_requests)
{
    double first_scored = floor(service->warm * (double)num_requests);

    if (first_scored >= num_requests) {
        return num_requests - 1;
    }
    return first_scored > 0 ? (int32_t)first_scored : 0;
}

static enum imbrex_status run_init(struct run *run, bool is_service, struct imbrex_error *err)
{
    size_t num_requests = (size_t)run->trace->num_requests;

    run->first_scored = sim_service_first_scored(run->service, run->trace->num_requests);
    run->arrivals_ns = malloc(num_requests * sizeof(*run->arrivals_ns));
    run->orders = malloc(num_requests * sizeof(*run->orders));
    run->outcome->ttft_s = malloc(num_requests * sizeof(*run->outcome->ttft_s));
    if (is_service) {
        run->queue = malloc(num_requests * sizeof(*run->queue));
        run->coming.entries = malloc(num_requests * sizeof(*run->coming.entries));
        run->running.entries = malloc(num_requests * sizeof(*run->running.entries));
    }
    if (run->arrivals_ns == NULL || run->orders == NULL || run->outcome->ttft_s == NULL ||
        (is_service &&
         (run->queue == NULL || run->coming.entries == NULL || run->running.entries == NULL))) {
        return error_out_of_memory(err, "a replay", num_requests * 64);
    }
    if (run->timeline != NULL) {
        run->timeline->events = malloc(num_requests * 3 * sizeof(*run->timeline->events));
        if (run->timeline->events == NULL) {
            return error_out_of_memory(err, "a timeline",
                                       num_requests * 3 * sizeof(*run->timeline->events));
        }
    }
    return IMBREX_STATUS_OK;
}

static void run_deinit(struct run *run)
{
    free(run->arrivals_ns);
    free(run->orders);
    free(run->queue);
    free(run->coming.entries);
    free(run->running.entries);
}

static enum imbrex_status note_event(struct run *run, int64_t time_ns, int32_t request_idx,
                                     enum sim_event_kind kind, struct imbrex_error *err)
{
    struct sim_timeline *timeline = run->timeline;
    int64_t num_events = 3 * (int64_t)run->trace->num_requests;

    if (timeline != NULL) {
        timeline->events[timeline->num_events++] =
            (struct sim_event){.time_ns = time_ns, .request_idx = request_idx, .kind = kind};
        if (run->num_arrived - run->num_finished > timeline->max_live) {
            timeline->max_live = run->num_arrived - run->num_finished;
        }
    }
    if (run->num_events++ % EVENTS_A_QUESTION == 0 && run->may_continue != NULL &&
        !run->may_continue(run->user, (double)run->num_events / (double)num_events)) {
        return error_set(err, IMBREX_STATUS_CANCELLED, "the replay was ended");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status arrive(struct run *run, int32_t request_idx, int64_t now_ns,
                                 struct imbrex_error *err)
{
    int32_t order = run->num_arrived++;

    run->arrivals_ns[request_idx] = now_ns;
    run->orders[request_idx] = order;
    run->outcome->last_arrival_ns = now_ns;
    if (order >= run->first_scored) {
        run->num_seen_waiting += order - run->num_admitted;
    }
    TRY(note_event(run, now_ns, request_idx, SIM_EVENT_ARRIVE, err));
    return run->store->functions->arrive != NULL
               ? run->store->functions->arrive(run->store, request_idx, order, now_ns, err)
               : IMBREX_STATUS_OK;
}

/* *prefill_s: what its prefill takes, with the wait before it. */
static enum imbrex_status admit(struct run *run, int32_t request_idx, int64_t now_ns,
                                double *prefill_s, struct imbrex_error *err)
{
    const struct sim_request *request = &run->trace->requests[request_idx];
    struct sim_outcome *outcome = run->outcome;
    struct sim_found found = {.num_hits = 0};

    TRY(run->store->functions->admit(run->store, request_idx, now_ns, &found, err));
    int64_t num_hit_tokens = (int64_t)found.num_hits * run->trace->block_size;
    double seconds =
        (double)(request->num_tokens - num_hit_tokens) / run->service->prefill_tokens_per_s +
        (double)found.wait_ns / NS_PER_S;
    *prefill_s = seconds;
    outcome->num_accesses += request->num_blocks;
    if (run->orders[request_idx] >= run->first_scored) {
        outcome->ttft_s[outcome->num_scored++] =
            (float)((double)(now_ns - run->arrivals_ns[request_idx]) / NS_PER_S + seconds);
        outcome->num_tokens += request->num_tokens;
        outcome->num_hit_tokens += num_hit_tokens;
    }
    run->num_admitted++;
    return note_event(run, now_ns, request_idx, SIM_EVENT_ADMIT, err);
}

static enum imbrex_status finish(struct run *run, int32_t request_idx, int64_t now_ns,
                                 struct imbrex_error *err)
{
    run->num_finished++;
    run->store->functions->finish(run->store, request_idx, now_ns);
    return note_event(run, now_ns, request_idx, SIM_EVENT_FINISH, err);
}

static void end_run(struct run *run)
{
    int32_t num_scored = run->trace->num_requests - run->first_scored;

    run->outcome->mean_queue = run->num_seen_waiting / num_scored;
    if (run->timeline != NULL) {
        run->timeline->mean_queue = run->outcome->mean_queue;
    }
}

/* Those that waited for its finish come after their clients' time. */
static void release_followers(struct run *run, int32_t request_idx, int64_t now_ns)
{
    const struct sim_request *requests = run->trace->requests;
    int32_t follower = requests[request_idx].first_follower;

    for (; follower >= 0; follower = requests[follower].next_follower) {
        heap_push(&run->coming, later(now_ns, (double)requests[follower].start_ns), follower);
    }
}

static enum imbrex_status admit_what_may(struct run *run, int64_t now_ns, struct imbrex_error *err)
{
    while (run->num_admitted < run->num_arrived && now_ns >= run->prefill_end_ns &&
           run->running.num_entries < run->service->num_slots) {
        int32_t request_idx = run->queue[run->num_admitted];
        const struct sim_request *request = &run->trace->requests[request_idx];
        double prefill_s = 0;

        if (!sim_store_has_room(run->store, request_idx)) {
            break;
        }
        TRY(admit(run, request_idx, now_ns, &prefill_s, err));
        run->prefill_end_ns = later(now_ns, prefill_s * NS_PER_S);
        double decode_s = request->num_output * run->service->decode_s_per_token;
        heap_push(&run->running, later(run->prefill_end_ns, decode_s * NS_PER_S), request_idx);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_service(struct run *run, struct imbrex_error *err)
{
    const struct sim_trace *trace = run->trace;
    int64_t now_ns = 0;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        if (trace->requests[i].predecessor < 0) {
            heap_push(&run->coming, trace->requests[i].start_ns, i);
        }
    }
    while (run->num_finished < trace->num_requests) {
        int64_t next_ns = heap_time(&run->coming);
        if (heap_time(&run->running) < next_ns) {
            next_ns = heap_time(&run->running);
        }
        if (run->num_admitted < run->num_arrived && run->prefill_end_ns > now_ns &&
            run->prefill_end_ns < next_ns) {
            next_ns = run->prefill_end_ns;
        }
        now_ns = next_ns;
        while (heap_time(&run->running) <= now_ns) {
            int32_t request_idx = heap_pop(&run->running).request_idx;
            TRY(finish(run, request_idx, now_ns, err));
            release_followers(run, request_idx, now_ns);
        }
        while (heap_time(&run->coming) <= now_ns) {
            int32_t request_idx = heap_pop(&run->coming).request_idx;
            run->queue[run->num_arrived] = request_idx;
            TRY(arrive(run, request_idx, now_ns, err));
            TRY(admit_what_may(run, now_ns, err));
        }
        TRY(admit_what_may(run, now_ns, err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status replay_events(struct run *run, const struct sim_timeline *timeline,
                                        struct imbrex_error *err)
{
    double prefill_s = 0;

    for (int64_t i = 0; i < timeline->num_events; i++) {
        const struct sim_event *event = &timeline->events[i];
        switch (event->kind) {
        case SIM_EVENT_ARRIVE:
            TRY(arrive(run, event->request_idx, event->time_ns, err));
            break;
        case SIM_EVENT_ADMIT:
            TRY(admit(run, event->request_idx, event->time_ns, &prefill_s, err));
            break;
        case SIM_EVENT_FINISH:
            TRY(finish(run, event->request_idx, event->time_ns, err));
            break;
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_service_run(const struct sim_service *service, struct sim_store *store,
                                   sim_continue_fn *may_continue, void *user,
                                   struct sim_timeline *timeline, struct sim_outcome *outcome,
                                   struct imbrex_error *err)
{
    struct sim_timeline recorded = {.events = NULL};
    struct sim_outcome reached = {.num_scored = 0};
    struct run run = {.service = service,
                      .trace = store->trace,
                      .store = store,
                      .timeline = timeline != NULL ? &recorded : NULL,
                      .outcome = &reached,
                      .may_continue = may_continue,
                      .user = user};
    enum imbrex_status status;

    TRY_OR_FAIL(run_init(&run, true, err));
    TRY_OR_FAIL(run_service(&run, err));
    end_run(&run);
    run_deinit(&run);
    if (timeline != NULL) {
        *timeline = recorded;
    }
    *outcome = reached;
    return IMBREX_STATUS_OK;
fail:
    run_deinit(&run);
    sim_timeline_free(&recorded);
    sim_outcome_free(&reached);
    return status;
}

enum imbrex_status sim_timeline_replay(const struct sim_timeline *timeline,
                                       const struct sim_service *service, struct sim_store *store,
                                       sim_continue_fn *may_continue, void *user,
                                       struct sim_outcome *outcome, struct imbrex_error *err)
{
    struct sim_outcome reached = {.num_scored = 0};
    struct run run = {.service = service,
                      .trace = store->trace,
                      .store = store,
                      .outcome = &reached,
                      .may_continue = may_continue,
                      .user = user};
    enum imbrex_status status;

    TRY_OR_FAIL(run_init(&run, false, err));
    TRY_OR_FAIL(replay_events(&run, timeline, err));
    end_run(&run);
    run_deinit(&run);
    *outcome = reached;
    return IMBREX_STATUS_OK;
fail:
    run_deinit(&run);
    sim_outcome_free(&reached);
    return status;
}

void sim_timeline_free(struct sim_timeline *timeline)
{
    free(timeline->events);
    *timeline = (struct sim_timeline){.events = NULL};
}

void sim_outcome_free(struct sim_outcome *outcome)
{
    free(outcome->ttft_s);
    *outcome = (struct sim_outcome){.num_scored = 0};
}
