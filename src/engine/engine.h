/* SPDX-License-Identifier: Apache-2.0 */
/* A running model: scheduler, executor and the requests they work for.
 *
 *   any thread                      the thread that runs the engine
 *   ----------                      -------------------------------
 *   submit -> inbox  (lock)  ->     scheduler <-> kv_pool
 *   cancel -> flag   (atomic)  ->      |  plan
 *   wait, poll <- has_ended,           v
 *                 event queue (lock) <- batch -> executor -> results -> tokens, text, events
 *
 * One thread at a time runs the engine: its own, or whoever waits for a request. All state without
 * a mark below belongs to it; it changes hands under the lock. */
#ifndef IMBREX_ENGINE_ENGINE_H
#define IMBREX_ENGINE_ENGINE_H

#include "engine/executor.h"
#include "engine/metrics.h"
#include "engine/prefix_tiers.h"
#include "engine/request.h"

/* Requests as a list, each in one at a time. */
struct request_list {
    struct imbrex_request *first, *last;
};

/* A step between its planning and its results. */
struct flight {
    struct step_plan plan;
    struct batch_layout layout;
    enum imbrex_status status; /* of its submission; not OK: there is nothing to collect */
    int32_t *pinned_blocks;    /* [num_pinned_blocks] duplicates that it still reads */
    int32_t num_pinned_blocks;
    bool has_waited; /* for KV blocks, so that its time is not that of computing */
    int64_t submit_ns;
};

struct imbrex_engine {
    struct imbrex_model *model;
    struct imbrex_memory_plan plan;
    struct batch_limits limits;
    struct request_limits request_limits;
    struct device *device; /* the engine's if owns_device */
    bool owns_device;
    imbrex_range_begin_fn *range_begin;
    imbrex_range_end_fn *range_end;
    void *range_user;

    struct executor *executor;
    struct kv_pool kv_pool;
    struct scheduler scheduler;
    struct prefix_cache prefix;                    /* zeroed: none */
    struct prefix_tiers tiers;                     /* below it; zeroed: none */
    struct flight flights[EXECUTOR_MAX_IN_FLIGHT]; /* ring: num_flights from first_flight on */
    int32_t first_flight, num_flights;
    struct request_list live;    /* have choices left, or are not known to the scheduler yet */
    struct request_list ending;  /* all choices have ended; steps in flight may hold some */
    struct imbrex_error failure; /* the sticky one; status OK: none */

    struct metrics metrics;       /* atomic */
    atomic_int num_queued;        /* requests submitted that no step has held yet */
    atomic_bool has_cancellation; /* some request's is_cancelled was set */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* any of the below, or an event, or an end; on the monotonic clock */
    struct request_list inbox;
    bool is_failed;   /* the failure's mark for those that submit */
    bool is_run;      /* a thread runs the engine */
    pthread_t runner; /* that thread, if is_run */
    bool has_thread;  /* its own */
    bool is_stopping;
    pthread_t thread; /* if has_thread */
};

/* imbrex_engine_create on a device of the caller's, whatever the options name. It stays the
 * caller's and outlives the engine. NULL: the one that the options name. */
enum imbrex_status engine_create_on(struct imbrex_model *model,
                                    const struct imbrex_engine_options *options,
                                    struct device *device, struct imbrex_engine **engine,
                                    struct imbrex_error *err);

/* INVALID_ARGUMENT in a callback of the engine, where `call` would wait for itself. */
enum imbrex_status engine_check_outside(struct imbrex_engine *engine, const char *call,
                                        struct imbrex_error *err);

/* One step; the caller runs the engine. */
void engine_loop_step(struct imbrex_engine *engine);
/* Whether engine_loop_step would find something to do. The caller runs the engine and holds the
 * lock. */
bool engine_loop_has_work(const struct imbrex_engine *engine);
/* When a step is due without that, for what is expected to be asked for; INT64_MAX: never. The
 * caller runs the engine. */
int64_t engine_loop_due_ns(const struct imbrex_engine *engine);

void request_list_append(struct request_list *list, struct imbrex_request *request);
void request_list_remove(struct request_list *list, struct imbrex_request *request);

#endif
