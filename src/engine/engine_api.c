/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls on requests, and which thread runs the engine: its own between start and stop,
 * otherwise whoever waits, one at a time. A waiter that finds another at work sleeps until
 * something changes; when the one at work leaves, another takes over. */
#include <assert.h>
#include <errno.h>
#include <time.h>

#include "base/clock.h"
#include "engine/engine.h"

/* ---- running --------------------------------------------------------------------------------- */

/* Whether the caller stands in a callback; the lock is held. */
static bool is_runner(const struct imbrex_engine *engine)
{
    return engine->is_run && pthread_equal(engine->runner, pthread_self()) != 0;
}

static enum imbrex_status refuse_runner(const char *call, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                     "%s: expected a call from outside of the engine's callbacks, found one inside",
                     call);
}

enum imbrex_status engine_check_outside(struct imbrex_engine *engine, const char *call,
                                        struct imbrex_error *err)
{
    pthread_mutex_lock(&engine->lock);
    bool is_inside = is_runner(engine);
    pthread_mutex_unlock(&engine->lock);
    return is_inside ? refuse_runner(call, err) : IMBREX_STATUS_OK;
}

/* Sleeps until something changes or the time (INT64_MAX: never) has come; the lock is held. */
static void wait_locked(struct imbrex_engine *engine, int64_t until_ns)
{
    if (until_ns == INT64_MAX) {
        pthread_cond_wait(&engine->changed, &engine->lock);
    } else {
        struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                 .tv_nsec = (long)(until_ns % 1000000000)};
        pthread_cond_timedwait(&engine->changed, &engine->lock, &until);
    }
}

static void *engine_main(void *arg)
{
    struct imbrex_engine *engine = arg;
    pthread_mutex_lock(&engine->lock);
    engine->runner = pthread_self();
    while (!engine->is_stopping) {
        int64_t due_ns = engine_loop_due_ns(engine);
        if (engine_loop_has_work(engine) || (due_ns != INT64_MAX && clock_now_ns() >= due_ns)) {
            pthread_mutex_unlock(&engine->lock);
            engine_loop_step(engine);
            pthread_mutex_lock(&engine->lock);
        } else {
            wait_locked(engine, due_ns);
        }
    }
    /* Before the thread ends, since another one may get its identity. */
    engine->is_run = false;
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

enum imbrex_status imbrex_engine_start(struct imbrex_engine *engine, struct imbrex_error *err)
{
    enum imbrex_status status = IMBREX_STATUS_OK;
    int error_code = 0;
    pthread_mutex_lock(&engine->lock);
    if (is_runner(engine)) {
        status = refuse_runner("engine start", err);
    }
    /* A waiter that runs it leaves after its step, a thread that is stopping when it is joined. */
    while (status == IMBREX_STATUS_OK && (engine->is_run || engine->has_thread)) {
        if (engine->has_thread && !engine->is_stopping) {
            status =
                error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                          "engine start: expected an engine without a thread, found one started");
        } else {
            pthread_cond_wait(&engine->changed, &engine->lock);
        }
    }
    if (status == IMBREX_STATUS_OK) {
        error_code = pthread_create(&engine->thread, NULL, engine_main, engine);
        if (error_code != 0) {
            status = error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "the engine's thread: %s",
                               system_error_text(error_code));
        } else {
            engine->has_thread = true;
            engine->is_run = true;
            engine->runner = engine->thread;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

void imbrex_engine_stop(struct imbrex_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    if (is_runner(engine)) {
        pthread_mutex_unlock(&engine->lock);
        return;
    }
    while (engine->is_stopping) {
        pthread_cond_wait(&engine->changed, &engine->lock);
    }
    if (engine->has_thread) {
        pthread_t thread = engine->thread;
        engine->is_stopping = true;
        pthread_cond_broadcast(&engine->changed);
        pthread_mutex_unlock(&engine->lock);
        pthread_join(thread, NULL);
        pthread_mutex_lock(&engine->lock);
        engine->has_thread = false;
        engine->is_stopping = false;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* Runs one step on the calling thread. The lock is held before and after, not meanwhile; nobody
 * runs the engine. */
static void run_step_locked(struct imbrex_engine *engine)
{
    engine->is_run = true;
    engine->runner = pthread_self();
    pthread_mutex_unlock(&engine->lock);
    engine_loop_step(engine);
    pthread_mutex_lock(&engine->lock);
    engine->is_run = false;
    pthread_cond_broadcast(&engine->changed);
}

enum imbrex_status imbrex_engine_step(struct imbrex_engine *engine, bool *has_work,
                                      struct imbrex_error *err)
{
    enum imbrex_status status = IMBREX_STATUS_OK;
    bool has_more = false;
    pthread_mutex_lock(&engine->lock);
    if (engine->is_run || engine->has_thread) {
        status = error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                           "engine step: expected that no other thread runs the engine, found one");
    } else {
        if (engine_loop_has_work(engine)) {
            run_step_locked(engine);
        }
        has_more = engine_loop_has_work(engine);
        if (engine->is_failed && !has_more) {
            status = error_set(err, IMBREX_STATUS_DEVICE, "%s", engine->failure.message);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    *has_work = has_more && status == IMBREX_STATUS_OK;
    return status;
}

/* ---- requests -------------------------------------------------------------------------------- */

enum imbrex_status imbrex_request_submit(struct imbrex_engine *engine,
                                         const struct imbrex_request_options *options,
                                         struct imbrex_request **request, struct imbrex_error *err)
{
    struct imbrex_request *created;
    enum imbrex_status status = IMBREX_STATUS_OK;
    TRY(request_create(engine->model, &engine->request_limits, options, &created, err));
    created->engine = engine;

    pthread_mutex_lock(&engine->lock);
    int32_t num_queued = atomic_load(&engine->num_queued);
    if (engine->is_failed) {
        status = error_set(err, IMBREX_STATUS_DEVICE, "%s", engine->failure.message);
    } else if (num_queued >= engine->plan.max_waiting) {
        status = error_set(err, IMBREX_STATUS_CAPACITY,
                           "the queue is full: expected fewer than %d waiting requests, found %d",
                           engine->plan.max_waiting, num_queued);
    } else {
        int64_t now_ns = clock_now_ns();
        created->submit_ns = now_ns;
        for (int32_t i = 0; i < created->num_choices; i++) {
            struct sequence *sequence = &created->choices[i].sequence;
            sequence->arrival_ns = now_ns;
            sequence->deadline_ns =
                options->timeout_ns == 0 || options->timeout_ns > INT64_MAX - now_ns
                    ? INT64_MAX
                    : now_ns + options->timeout_ns;
        }
        atomic_fetch_add(&engine->num_queued, 1);
        /* The caller's before the engine's thread can send the first event. */
        *request = created;
        request_list_append(&engine->inbox, created);
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);

    if (status == IMBREX_STATUS_OK) {
        metrics_add(&engine->metrics.num_submitted, 1);
    } else {
        metrics_add(&engine->metrics.num_rejected, status == IMBREX_STATUS_CAPACITY ? 1 : 0);
        request_free(created);
    }
    return status;
}

void imbrex_request_cancel(struct imbrex_request *request)
{
    atomic_store(&request->is_cancelled, true);
    atomic_store(&request->engine->has_cancellation, true);
}

/* Runs or waits until the request has ended; the lock is held. */
static void wait_for_end_locked(struct imbrex_request *request)
{
    struct imbrex_engine *engine = request->engine;
    while (!request->has_ended) {
        if (engine->is_run || engine->has_thread) {
            wait_locked(engine, INT64_MAX);
        } else {
            run_step_locked(engine);
        }
    }
}

enum imbrex_status imbrex_request_wait(struct imbrex_request *request, struct imbrex_error *err)
{
    struct imbrex_engine *engine = request->engine;
    pthread_mutex_lock(&engine->lock);
    if (is_runner(engine) && !request->has_ended) {
        pthread_mutex_unlock(&engine->lock);
        return refuse_runner("request wait", err);
    }
    wait_for_end_locked(request);
    enum imbrex_status status = request->status;
    pthread_mutex_unlock(&engine->lock);
    if (status != IMBREX_STATUS_OK && err != NULL) {
        *err = request->error;
    }
    return status;
}

void imbrex_request_destroy(struct imbrex_request *request)
{
    if (request == NULL) {
        return;
    }
    struct imbrex_engine *engine = request->engine;
    pthread_mutex_lock(&engine->lock);
    if (!request->has_ended) {
        imbrex_request_cancel(request);
        wait_for_end_locked(request);
    }
    pthread_mutex_unlock(&engine->lock);
    request_free(request);
}

enum imbrex_status imbrex_request_poll(struct imbrex_request *request, int64_t timeout_ns,
                                       bool *has_event, struct imbrex_token_event *event,
                                       struct imbrex_error *err)
{
    struct imbrex_engine *engine = request->engine;
    if (request->callback != NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "request poll: expected a request without a callback, found one with it");
    }
    int64_t now_ns = clock_now_ns();
    int64_t until_ns =
        timeout_ns < 0 || timeout_ns > INT64_MAX - now_ns ? INT64_MAX : now_ns + timeout_ns;
    enum imbrex_status status = IMBREX_STATUS_OK;
    bool has_found = false;

    pthread_mutex_lock(&engine->lock);
    if (is_runner(engine)) {
        pthread_mutex_unlock(&engine->lock);
        return refuse_runner("request poll", err);
    }
    while (event_queue_is_empty(&request->events) && !request->has_taken_last &&
           (until_ns == INT64_MAX || clock_now_ns() < until_ns)) {
        if (engine->is_run || engine->has_thread) {
            wait_locked(engine, until_ns);
        } else {
            run_step_locked(engine);
        }
    }
    if (!event_queue_is_empty(&request->events)) {
        has_found = event_queue_pop(&request->events, event);
        if (!has_found) {
            status = error_out_of_memory(err, "an event", sizeof(*event));
        } else {
            request->has_taken_last = event->is_last;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    if (status == IMBREX_STATUS_OK) {
        *has_event = has_found;
    }
    return status;
}

enum imbrex_status imbrex_request_prompt_logprobs(const struct imbrex_request *request,
                                                  const float **logprobs,
                                                  const struct imbrex_logprob **top,
                                                  struct imbrex_error *err)
{
    if (!atomic_load(&request->has_prompt_logprobs)) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "prompt logprobs: expected a request that has read its prompt with "
                         "num_prompt_logprobs >= 0, found none");
    }
    *logprobs = request->prompt_logprobs;
    if (top != NULL) {
        *top = request->top_prompt_logprobs;
    }
    return IMBREX_STATUS_OK;
}

void imbrex_request_read_metrics(const struct imbrex_request *request,
                                 struct imbrex_request_metrics *metrics)
{
    *metrics = request->metrics;
}
