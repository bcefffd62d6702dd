/* SPDX-License-Identifier: Apache-2.0 */
/* One step of the engine: who came, who left, what is planned, what came back. Called by one thread
 * at a time (engine_api.c sees to that).
 *
 * take the inbox in -> end what was cancelled or is late -> plan, fill, submit -> collect the
 * oldest step if no more may be in flight, or nothing new was planned -> tokens, text, events ->
 * requests
 *   of which nothing is left go back to their users */
#include <assert.h>

#include "base/clock.h"
#include "engine/engine.h"

void request_list_append(struct request_list *list, struct imbrex_request *request)
{
    request->previous = list->last;
    request->next = NULL;
    if (list->last == NULL) {
        list->first = request;
    } else {
        list->last->next = request;
    }
    list->last = request;
}

void request_list_remove(struct request_list *list, struct imbrex_request *request)
{
    if (request->previous == NULL) {
        list->first = request->next;
    } else {
        request->previous->next = request->next;
    }
    if (request->next == NULL) {
        list->last = request->previous;
    } else {
        request->next->previous = request->previous;
    }
    request->previous = NULL;
    request->next = NULL;
}

static void begin_range(const struct imbrex_engine *engine, const char *name)
{
    if (engine->range_begin != NULL) {
        engine->range_begin(engine->range_user, name);
    }
}

static void end_range(const struct imbrex_engine *engine)
{
    if (engine->range_end != NULL) {
        engine->range_end(engine->range_user);
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* Takes a choice that has just ended from the scheduler, and its request, if it was the last one,
 * from the live ones. */
static void end_choice(struct imbrex_engine *engine, struct request_choice *choice,
                       enum imbrex_finish_reason reason, int64_t now_ns)
{
    struct imbrex_request *request = choice->request;
    assert(choice->finish_reason == IMBREX_FINISH_REASON_NONE);
    request_end_choice(choice, reason, now_ns, &engine->lock);
    /* The end of the text can hold a stop string, so the reason is the choice's. */
    metrics_add(&engine->metrics.num_ended[choice->finish_reason], 1);
    if (choice->sequence.state != SEQUENCE_STATE_NEW) {
        scheduler_end(&engine->scheduler, &choice->sequence);
    }
    if (request->num_left == 0) {
        if (request->first_step_ns == 0) {
            atomic_fetch_sub(&engine->num_queued, 1);
        }
        request_list_remove(&engine->live, request);
        request_list_append(&engine->ending, request);
    }
}

static void end_request(struct imbrex_engine *engine, struct imbrex_request *request,
                        enum imbrex_finish_reason reason, int64_t now_ns)
{
    for (int32_t i = 0; i < request->num_choices; i++) {
        if (request->choices[i].finish_reason == IMBREX_FINISH_REASON_NONE) {
            end_choice(engine, &request->choices[i], reason, now_ns);
        }
    }
}

/* error says why; the first failure of a request is the one it reports. */
static void fail_request(struct imbrex_engine *engine, struct imbrex_request *request,
                         const struct imbrex_error *error, int64_t now_ns)
{
    if (request->status == IMBREX_STATUS_OK) {
        request->status = error->status;
        request->error = *error;
    }
    end_request(engine, request, IMBREX_FINISH_REASON_ERROR, now_ns);
}

/* Gives requests that no step holds any more back to their users. */
static void release_ended(struct imbrex_engine *engine)
{
    bool has_released = false;
    struct imbrex_request *next;
    for (struct imbrex_request *request = engine->ending.first; request != NULL; request = next) {
        bool is_held = false;
        next = request->next;
        for (int32_t i = 0; i < request->num_choices; i++) {
            enum sequence_state state = request->choices[i].sequence.state;
            is_held |= state != SEQUENCE_STATE_NEW && state != SEQUENCE_STATE_ENDED;
        }
        if (!is_held) {
            request_list_remove(&engine->ending, request);
            pthread_mutex_lock(&engine->lock);
            request->has_ended = true;
            pthread_mutex_unlock(&engine->lock);
            has_released = true;
        }
    }
    if (has_released) {
        pthread_mutex_lock(&engine->lock);
        pthread_cond_broadcast(&engine->changed);
        pthread_mutex_unlock(&engine->lock);
    }
}

/* What the device says about a failure with this status; "" if it does not know. */
static const char *reason_of(const struct imbrex_engine *engine, enum imbrex_status status)
{
    const struct imbrex_error *failure = &engine->device->failure;
    return failure->status == status ? failure->message : "";
}

/* The device has failed for good. */
static void fail_engine(struct imbrex_engine *engine, int64_t now_ns)
{
    const char *reason = reason_of(engine, IMBREX_STATUS_DEVICE);
    error_set(&engine->failure, IMBREX_STATUS_DEVICE,
              "the %s device failed while it ran %s%s%s: the engine takes no more requests",
              device_name(engine->device), engine->model->path, reason[0] != '\0' ? ": " : "",
              reason);
    pthread_mutex_lock(&engine->lock);
    engine->is_failed = true;
    pthread_mutex_unlock(&engine->lock);
    while (engine->live.first != NULL) {
        fail_request(engine, engine->live.first, &engine->failure, now_ns);
    }
}

/* ---- what comes in --------------------------------------------------------------------------- */

/* Returns a time that is no earlier than any request's in it. */
static int64_t take_inbox(struct imbrex_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    struct imbrex_request *request = engine->inbox.first;
    engine->inbox = (struct request_list){NULL, NULL};
    pthread_mutex_unlock(&engine->lock);
    int64_t now_ns = clock_now_ns();
    engine->prefix.now_ns = now_ns;
    while (request != NULL) {
        struct imbrex_request *next = request->next;
        request_list_append(&engine->live, request);
        if (engine->failure.status != IMBREX_STATUS_OK) {
            fail_request(engine, request, &engine->failure, now_ns);
        } else {
            request->num_started = 1;
            scheduler_add(&engine->scheduler, &request->choices[0].sequence);
        }
        /* Cancelled in the inbox, where a look for cancelled ones may have missed it. */
        if (atomic_load(&request->is_cancelled)) {
            atomic_store(&engine->has_cancellation, true);
        }
        request = next;
    }
    return now_ns;
}

static void end_cancelled(struct imbrex_engine *engine, int64_t now_ns)
{
    if (!atomic_exchange(&engine->has_cancellation, false)) {
        return;
    }
    struct imbrex_request *next;
    for (struct imbrex_request *request = engine->live.first; request != NULL; request = next) {
        next = request->next;
        if (atomic_load(&request->is_cancelled)) {
            end_request(engine, request, IMBREX_FINISH_REASON_CANCELLED, now_ns);
        }
    }
}

static void end_late(struct imbrex_engine *engine, int64_t now_ns)
{
    struct sequence *late;
    while ((late = scheduler_find_late(&engine->scheduler, now_ns)) != NULL) {
        const struct request_choice *choice = late->owner;
        end_request(engine, choice->request, IMBREX_FINISH_REASON_DEADLINE, now_ns);
    }
}

/* ---- planning -------------------------------------------------------------------------------- */

static void count_rows(struct imbrex_engine *engine, const struct step_plan *plan, int64_t now_ns)
{
    uint64_t num_prompt_tokens = 0;
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        struct request_choice *choice = row->sequence->owner;
        struct imbrex_request *request = choice->request;
        int32_t num_left = request->num_prompt_ids - row->position;
        if (num_left > 0) {
            num_prompt_tokens +=
                (uint64_t)(row->num_tokens < num_left ? row->num_tokens : num_left);
        }
        if (request->first_step_ns == 0) {
            request->first_step_ns = now_ns;
            request->metrics.queue_ns = now_ns - request->submit_ns;
            metrics_observe(&engine->metrics.queue_time, request->metrics.queue_ns);
            atomic_fetch_sub(&engine->num_queued, 1);
        }
    }
    metrics_add(&engine->metrics.num_prompt_tokens, num_prompt_tokens);
}

/* Whether a step was planned; it is in flight then, even if the device did not take it. */
static bool submit_step(struct imbrex_engine *engine, int64_t now_ns)
{
    struct flight *flight =
        &engine->flights[(engine->first_flight + engine->num_flights) % EXECUTOR_MAX_IN_FLIGHT];
    bool has_tiers = engine->tiers.tiers != NULL;
    begin_range(engine, "schedule");
    if (has_tiers) {
        prefix_tiers_look(&engine->tiers, &engine->scheduler);
    }
    scheduler_plan(&engine->scheduler, &flight->plan);
    if (flight->plan.num_rows > 0) {
        count_rows(engine, &flight->plan, now_ns);
        batch_fill(&flight->plan, &engine->limits, engine->scheduler.block_tables,
                   &request_batch_source, executor_batch_memory(engine->executor), &flight->layout);
    }
    end_range(engine);
    if (flight->plan.num_rows == 0) {
        return false;
    }
    struct executor_waits waits = {.num_waits = 0};
    engine->num_flights++;
    flight->submit_ns = now_ns;
    flight->status = IMBREX_STATUS_OK;
    if (has_tiers) {
        flight->status = prefix_tiers_start(&engine->tiers);
        prefix_tiers_take_waits(&engine->tiers, &waits);
    }
    flight->has_waited = waits.num_waits > 0;
    if (flight->status == IMBREX_STATUS_OK) {
        flight->status = executor_submit(engine->executor, &flight->plan, &flight->layout, &waits);
    }
    return true;
}

/* ---- results --------------------------------------------------------------------------------- */

static void fail_bad_logits(struct imbrex_engine *engine, struct imbrex_request *request,
                            int32_t position, int64_t now_ns)
{
    struct imbrex_error error;
    error_set(&error, IMBREX_STATUS_FORMAT,
              "%s: the weights give logits that are not finite (position %d)", engine->model->path,
              position);
    metrics_add(&engine->metrics.num_bad_logits, 1);
    fail_request(engine, request, &error, now_ns);
}

/* One drawn token of a choice that goes on. */
static void take_draw(struct imbrex_engine *engine, struct request_choice *choice,
                      const struct sample_result *result, const struct imbrex_logprob *top_logprobs,
                      int64_t now_ns)
{
    struct imbrex_request *request = choice->request;
    if (result->token_id == SAMPLE_ALL_FORBIDDEN) {
        struct imbrex_error error;
        error_set(&error, IMBREX_STATUS_INVALID_ARGUMENT,
                  "logit_bias: expected an id that may be drawn, found all of them forbidden");
        fail_request(engine, request, &error, now_ns);
        return;
    }
    if (result->token_id < 0) {
        fail_bad_logits(engine, request, request->num_prompt_ids + choice->num_output - 1, now_ns);
        return;
    }
    metrics_add(&engine->metrics.num_generated_tokens, 1);
    if (request->first_token_ns == 0) {
        metrics_observe(&engine->metrics.ttft, now_ns - request->submit_ns);
    }
    if (choice->last_token_ns != 0) {
        metrics_observe(&engine->metrics.itl, now_ns - choice->last_token_ns);
    }
    enum imbrex_finish_reason reason =
        request_take_token(choice, result, top_logprobs, now_ns, &engine->lock);
    if (reason == IMBREX_FINISH_REASON_ERROR) {
        end_request(engine, request, reason, now_ns);
    } else if (reason != IMBREX_FINISH_REASON_NONE) {
        end_choice(engine, choice, reason, now_ns);
    }
    /* The callback may have said so with the last token of this choice. */
    if (atomic_load(&request->is_cancelled)) {
        end_request(engine, request, IMBREX_FINISH_REASON_CANCELLED, now_ns);
    }
}

/* The other choices begin where the prompt ends, before the first one can end and take its blocks
 * with it. */
static void fork_choices(struct imbrex_engine *engine, struct request_choice *parent)
{
    struct imbrex_request *request = parent->request;
    for (; request->num_started < request->num_choices; request->num_started++) {
        scheduler_fork(&engine->scheduler, &parent->sequence,
                       &request->choices[request->num_started].sequence);
    }
}

/* The results of one row: its scored positions, then its draws. Returns how many there were. */
static int32_t take_row(struct imbrex_engine *engine, const struct step_row *row,
                        const struct sample_result *results,
                        const struct imbrex_logprob *top_logprobs, int32_t max_logprobs,
                        int64_t now_ns)
{
    struct request_choice *choice = row->sequence->owner;
    struct imbrex_request *request = choice->request;
    int32_t num_scored = batch_num_scored(row);
    int32_t num_results = num_scored + row->num_draws;
    if (choice->finish_reason != IMBREX_FINISH_REASON_NONE || row->sequence->is_spoilt) {
        return num_results;
    }
    if (num_scored > 0 && !request_take_prompt_logprobs(request, row->first_scored + 1, results,
                                                        top_logprobs, max_logprobs, num_scored)) {
        fail_bad_logits(engine, request, row->first_scored, now_ns);
        return num_results;
    }
    if (row->sequence->num_draws == 0 &&
        row->position + row->num_tokens == sequence_num_wanted(row->sequence)) {
        end_choice(engine, choice, IMBREX_FINISH_REASON_LENGTH, now_ns);
        return num_results;
    }
    /* A choice of one token needs no place: it ends below. */
    if (row->num_draws > 1 && request->max_output > 1) {
        fork_choices(engine, choice);
    }
    for (int32_t draw_idx = 0; draw_idx < row->num_draws; draw_idx++) {
        struct request_choice *drawn = row->num_draws > 1 ? &request->choices[draw_idx] : choice;
        int64_t result_idx = num_scored + draw_idx;
        if (drawn->finish_reason == IMBREX_FINISH_REASON_NONE) {
            take_draw(engine, drawn, &results[result_idx], top_logprobs + result_idx * max_logprobs,
                      now_ns);
        }
    }
    return num_results;
}

static void take_results(struct imbrex_engine *engine, const struct flight *flight,
                         const struct executor_results *results, int64_t now_ns)
{
    int64_t result_idx = 0;
    int32_t max_logprobs = flight->layout.max_logprobs;
    for (int32_t i = 0; i < flight->plan.num_rows; i++) {
        result_idx +=
            take_row(engine, &flight->plan.rows[i], results->results + result_idx,
                     results->top_logprobs + result_idx * max_logprobs, max_logprobs, now_ns);
    }
    assert(result_idx == flight->layout.num_samples - flight->layout.num_padding);
}

/* Blocks that the step has filled go into the prefix cache. Where the cache has a block of the same
 * contents already, the sequence goes on with that one; a step in flight that was planned before
 * reads the old one still. */
static void keep_blocks(struct imbrex_engine *engine, const struct flight *flight)
{
    struct flight *last =
        &engine->flights[(engine->first_flight + engine->num_flights - 1) % EXECUTOR_MAX_IN_FLIGHT];
    if (engine->prefix.cache == NULL) {
        return;
    }
    for (int32_t i = 0; i < flight->plan.num_rows; i++) {
        const struct step_row *row = &flight->plan.rows[i];
        int32_t *table = engine->scheduler.block_tables +
                         (size_t)row->slot * (size_t)engine->scheduler.options.max_blocks;
        prefix_insert(&engine->prefix, row, table, last->pinned_blocks, &last->num_pinned_blocks);
    }
}

/* Of a choice that has ended, what a step computes is nobody's. */
static void fail_sequence(struct imbrex_engine *engine, const struct sequence *sequence,
                          const struct imbrex_error *error, int64_t now_ns)
{
    const struct request_choice *choice = sequence->owner;
    if (choice->finish_reason == IMBREX_FINISH_REASON_NONE) {
        fail_request(engine, choice->request, error, now_ns);
    }
}

/* A step that failed takes its requests with it, and no others. */
static void fail_step(struct imbrex_engine *engine, const struct flight *flight,
                      enum imbrex_status status, int64_t now_ns)
{
    struct imbrex_error error;
    if (status == IMBREX_STATUS_DEVICE) {
        if (engine->failure.status == IMBREX_STATUS_OK) {
            fail_engine(engine, now_ns);
        }
        return;
    }
    const char *reason = reason_of(engine, status);
    error_set(&error, status, "a step on the %s device failed while it ran %s%s%s",
              device_name(engine->device), engine->model->path, reason[0] != '\0' ? ": " : "",
              reason);
    for (int32_t i = 0; i < flight->plan.num_rows; i++) {
        fail_sequence(engine, flight->plan.rows[i].sequence, &error, now_ns);
    }
    /* A fork that found no room in the step was to get its prompt's ids in it all the same. */
    for (int32_t i = 0; i < flight->plan.num_slot_copies; i++) {
        const struct sequence *fork =
            scheduler_fork_of(&engine->scheduler, &flight->plan.slot_copies[i]);
        if (fork != NULL) {
            fail_sequence(engine, fork, &error, now_ns);
        }
    }
}

/* Collects the oldest step. device_ns: what of it the device computed or the host waited. */
static enum imbrex_status collect_step(struct imbrex_engine *engine, int64_t *device_ns)
{
    struct flight *flight = &engine->flights[engine->first_flight];
    struct executor_results results = {0};
    enum imbrex_status status = flight->status;
    int64_t begin_ns = clock_now_ns();
    if (status == IMBREX_STATUS_OK) {
        status = executor_collect(engine->executor, &results);
    }
    int64_t now_ns = clock_now_ns();
    metrics_add(&engine->metrics.num_steps, 1);
    begin_range(engine, "events");
    engine->prefix.now_ns = now_ns;
    if (status == IMBREX_STATUS_OK) {
        prefix_tiers_collect(&engine->tiers, &engine->scheduler, &flight->plan);
        keep_blocks(engine, flight);
        take_results(engine, flight, &results, now_ns);
        if (results.forward_ns > 0) {
            metrics_observe(&engine->metrics.forward_time, results.forward_ns);
        }
        if (!flight->has_waited) {
            prefix_tiers_observe_step(&engine->tiers, flight->plan.num_tokens,
                                      now_ns - flight->submit_ns);
        }
    } else {
        metrics_add(&engine->metrics.num_failed_steps, 1);
        prefix_tiers_step_failed(&engine->tiers);
        fail_step(engine, flight, status, now_ns);
    }
    scheduler_finish_step(&engine->scheduler, &flight->plan);
    while (flight->num_pinned_blocks > 0) {
        flight->num_pinned_blocks--;
        kv_pool_unpin(&engine->kv_pool, flight->pinned_blocks[flight->num_pinned_blocks]);
    }
    engine->first_flight = (engine->first_flight + 1) % EXECUTOR_MAX_IN_FLIGHT;
    engine->num_flights--;
    end_range(engine);
    *device_ns = device_is_async(engine->device) ? now_ns - begin_ns : results.forward_ns;
    return status;
}

/* ---- the step -------------------------------------------------------------------------------- */

bool engine_loop_has_work(const struct imbrex_engine *engine)
{
    return engine->inbox.first != NULL || engine->live.first != NULL ||
           engine->ending.first != NULL;
}

int64_t engine_loop_due_ns(const struct imbrex_engine *engine)
{
    return engine->failure.status == IMBREX_STATUS_OK ? prefix_tiers_due_ns(&engine->tiers)
                                                      : INT64_MAX;
}

static void publish(struct imbrex_engine *engine)
{
    metrics_set(&engine->metrics.num_running, engine->scheduler.num_running);
    metrics_set(&engine->metrics.num_waiting, engine->scheduler.num_waiting);
    metrics_set(&engine->metrics.kv_num_free, kv_pool_num_available(&engine->kv_pool));
    uint64_t num_counted =
        atomic_load_explicit(&engine->metrics.num_preemptions, memory_order_relaxed);
    metrics_add(&engine->metrics.num_preemptions, engine->scheduler.num_preemptions - num_counted);
    if (engine->tiers.tiers != NULL) {
        prefix_tiers_publish(&engine->tiers);
    }
}

void engine_loop_step(struct imbrex_engine *engine)
{
    int64_t begin_ns = clock_now_ns();
    bool has_planned = false;
    begin_range(engine, "step");
    int64_t now_ns = take_inbox(engine);
    end_cancelled(engine, now_ns);
    end_late(engine, now_ns);
    int32_t max_in_flight = executor_max_in_flight(engine->executor);
    if (engine->failure.status == IMBREX_STATUS_OK && engine->num_flights < max_in_flight) {
        has_planned = submit_step(engine, now_ns);
    }
    const struct flight *newest =
        &engine->flights[(engine->first_flight + engine->num_flights + EXECUTOR_MAX_IN_FLIGHT - 1) %
                         EXECUTOR_MAX_IN_FLIGHT];
    bool has_failed = has_planned && newest->status != IMBREX_STATUS_OK;
    if (engine->num_flights == max_in_flight || (!has_planned && engine->num_flights > 0) ||
        has_failed) {
        int64_t device_ns = 0;
        /* Nothing may be planned on a step that failed: all that is in flight behind it fails. */
        do {
            int64_t collected_ns;
            has_failed |= collect_step(engine, &collected_ns) != IMBREX_STATUS_OK;
            device_ns += collected_ns;
        } while (has_failed && engine->num_flights > 0);
        int64_t step_ns = clock_now_ns() - begin_ns;
        metrics_observe(&engine->metrics.step_time, step_ns);
        metrics_observe(&engine->metrics.overhead, step_ns - device_ns);
    } else if (!has_planned && engine->tiers.tiers != NULL &&
               prefix_tiers_is_moving(&engine->tiers)) {
        prefix_tiers_wait(&engine->tiers);
    }
    if (engine->failure.status == IMBREX_STATUS_OK) {
        prefix_tiers_write(&engine->tiers);
    }
    publish(engine);
    release_ended(engine);
    end_range(engine);
}
