/* SPDX-License-Identifier: Apache-2.0 */
/* Two threads meet here: the engine's, in take_event, and the one that sends. A request's record
 * belongs to the sender until it is submitted, to the engine's thread until its last event, and to
 * the sender again once it stands in the list of ended ones, which a lock guards. */
#include "cli/load_run.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/signals.h"

/* A signal is noticed after at most that long. */
#define MAX_WAIT_NS 100000000

enum record_outcome {
    RECORD_OUTCOME_NONE = 0, /* not sent, or not ended */
    RECORD_OUTCOME_COMPLETED,
    RECORD_OUTCOME_FAILED,
    RECORD_OUTCOME_CANCELLED,
};

struct choice_times {
    int64_t first_ns, last_ns; /* of its tokens */
    int32_t num_tokens;
};

struct record {
    struct load_runner *runner;
    struct record *next_ended;
    struct imbrex_request *request; /* NULL: not sent, or destroyed */
    struct choice_times *choices;   /* [num_choices] */
    struct load_samples gaps;       /* of all choices; its values lie in the runner's */
    int64_t arrival_ns, first_token_ns, end_ns;
    enum record_outcome outcome;
    struct imbrex_request_metrics metrics;
};

struct load_runner {
    const struct load_settings *settings;
    const struct load_plan *plan;
    struct record *records;       /* [plan->count] */
    struct choice_times *choices; /* of all records */
    int64_t *gaps;                /* of all records */
    int32_t *prompt_ids;          /* room for the longest prompt */
    size_t num_sent, num_ended, num_outstanding;
    int64_t begin_ns, end_ns, shown_ns;
    int64_t num_output_tokens; /* of ended requests */
    bool is_cancelled;
    struct imbrex_error first_failure;

    pthread_mutex_t lock;
    pthread_cond_t ended;
    struct record *first_ended; /* under the lock */
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- on the engine's thread ------------------------------------------------------------------ */

static void take_token(struct record *record, int32_t choice_idx, int64_t now)
{
    struct choice_times *times = &record->choices[choice_idx];

    if (record->first_token_ns == 0) {
        record->first_token_ns = now;
    }
    if (times->num_tokens == 0) {
        times->first_ns = now;
    } else {
        load_samples_add(&record->gaps, now - times->last_ns);
    }
    times->last_ns = now;
    times->num_tokens++;
}

static bool take_event(void *user, const struct imbrex_token_event *event)
{
    struct record *record = user;
    struct load_runner *runner = record->runner;
    int64_t now = now_ns();

    if (event->token_id >= 0 && event->choice_idx < runner->settings->num_choices) {
        take_token(record, event->choice_idx, now);
    }
    if (event->is_last) {
        record->end_ns = now;
        pthread_mutex_lock(&runner->lock);
        record->next_ended = runner->first_ended;
        runner->first_ended = record;
        pthread_cond_signal(&runner->ended);
        pthread_mutex_unlock(&runner->lock);
    }
    return true;
}

/* ---- sending --------------------------------------------------------------------------------- */

static bool is_due(const struct load_runner *runner, int64_t now)
{
    const struct load_plan *plan = runner->plan;

    if (runner->num_sent == plan->count || runner->is_cancelled) {
        return false;
    }
    if (plan->concurrency > 0) {
        return runner->num_outstanding < (size_t)plan->concurrency;
    }
    return now - runner->begin_ns >= plan->requests[runner->num_sent].arrival_ns;
}

static void note_failure(struct load_runner *runner, struct record *record,
                         const struct imbrex_error *err)
{
    record->outcome = RECORD_OUTCOME_FAILED;
    if (runner->first_failure.status == IMBREX_STATUS_OK) {
        runner->first_failure = *err;
    }
}

/* A request that finds the queue full has failed, as it would for a user; any other refusal ends
 * the run: reported. */
static int send_request(struct load_runner *runner, int64_t now)
{
    const struct load_settings *settings = runner->settings;
    const struct load_request *planned = &runner->plan->requests[runner->num_sent];
    struct record *record = &runner->records[runner->num_sent];
    struct imbrex_request_options options = imbrex_request_options_default(settings->model);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    load_plan_draw_prompt(runner->plan, runner->num_sent, settings->vocab_size, runner->prompt_ids);
    options.prompt_ids = runner->prompt_ids;
    options.num_prompt_ids = planned->num_prompt_tokens;
    options.max_tokens = planned->num_output_tokens;
    options.num_choices = settings->num_choices;
    options.temperature = settings->temperature;
    options.top_k = 0;
    options.top_p = 1;
    options.min_p = 0;
    options.repetition_penalty = 1;
    options.seed = runner->plan->seed + runner->num_sent;
    options.ignore_eos = true;
    options.priority = planned->priority;
    options.no_text = !settings->has_text;
    options.callback = take_event;
    options.user = record;
    record->arrival_ns =
        runner->plan->concurrency > 0 ? now : runner->begin_ns + planned->arrival_ns;
    runner->num_sent++;
    enum imbrex_status status =
        imbrex_request_submit(settings->engine, &options, &record->request, &err);
    if (status == IMBREX_STATUS_OK) {
        runner->num_outstanding++;
        return EXIT_CODE_OK;
    }
    record->request = NULL;
    note_failure(runner, record, &err);
    if (status == IMBREX_STATUS_CAPACITY) {
        runner->num_ended++;
        runner->end_ns = now_ns();
        return EXIT_CODE_OK;
    }
    return output_library_error(&err);
}

static int send_due(struct load_runner *runner)
{
    int exit_code = EXIT_CODE_OK;

    while (exit_code == EXIT_CODE_OK && is_due(runner, now_ns())) {
        exit_code = send_request(runner, now_ns());
    }
    return exit_code;
}

/* ---- what has ended -------------------------------------------------------------------------- */

/* Waits for requests that end, at most until `until_ns`. Returns their list, or NULL. */
static struct record *wait_for_ended(struct load_runner *runner, int64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                             .tv_nsec = (long)(until_ns % 1000000000)};
    int outcome = 0;

    pthread_mutex_lock(&runner->lock);
    while (runner->first_ended == NULL && outcome == 0) {
        outcome = pthread_cond_timedwait(&runner->ended, &runner->lock, &until);
    }
    struct record *first = runner->first_ended;
    runner->first_ended = NULL;
    pthread_mutex_unlock(&runner->lock);
    return first;
}

static void settle(struct load_runner *runner, struct record *record)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    enum imbrex_status status = imbrex_request_wait(record->request, &err);
    imbrex_request_read_metrics(record->request, &record->metrics);
    imbrex_request_destroy(record->request);
    record->request = NULL;
    runner->num_outstanding--;
    runner->num_ended++;
    runner->num_output_tokens += record->metrics.num_generated_tokens;
    if (record->end_ns > runner->end_ns) {
        runner->end_ns = record->end_ns;
    }
    if (status != IMBREX_STATUS_OK) {
        note_failure(runner, record, &err);
    } else if (record->metrics.finish_reason == IMBREX_FINISH_REASON_CANCELLED) {
        record->outcome = RECORD_OUTCOME_CANCELLED;
    } else {
        record->outcome = RECORD_OUTCOME_COMPLETED;
    }
}

static void show_progress(struct load_runner *runner)
{
    int64_t now = now_ns();

    if (!runner->settings->has_progress || now - runner->shown_ns < MAX_WAIT_NS) {
        return;
    }
    runner->shown_ns = now;
    fprintf(stderr, "\r\033[K%zu of %zu requests, %zu running or waiting, %.1f output tokens/s ",
            runner->num_ended, runner->plan->count, runner->num_outstanding,
            (double)runner->num_output_tokens / ((double)(now - runner->begin_ns) / 1e9));
}

static void cancel_all(struct load_runner *runner)
{
    runner->is_cancelled = true;
    /* Also the time in which nothing ran belongs to the load. */
    runner->end_ns = now_ns();
    for (size_t i = 0; i < runner->num_sent; i++) {
        if (runner->records[i].request != NULL) {
            imbrex_request_cancel(runner->records[i].request);
        }
    }
}

/* Waits until something ended, a request is due or a signal may have come. */
static void wait_and_settle(struct load_runner *runner)
{
    const struct load_plan *plan = runner->plan;
    int64_t until_ns = now_ns() + MAX_WAIT_NS;

    if (plan->concurrency == 0 && runner->num_sent < plan->count && !runner->is_cancelled) {
        int64_t due_ns = runner->begin_ns + plan->requests[runner->num_sent].arrival_ns;
        until_ns = due_ns < until_ns ? due_ns : until_ns;
    }
    struct record *record = wait_for_ended(runner, until_ns);
    while (record != NULL) {
        struct record *next = record->next_ended;
        settle(runner, record);
        record = next;
    }
}

static int send_and_settle(struct load_runner *runner)
{
    int exit_code = EXIT_CODE_OK;

    runner->begin_ns = now_ns();
    runner->end_ns = runner->begin_ns;
    runner->shown_ns = runner->begin_ns;
    for (;;) {
        if (exit_code == EXIT_CODE_OK) {
            exit_code = send_due(runner);
        }
        bool must_end = exit_code != EXIT_CODE_OK || signals_interrupt() != 0;
        if (must_end && !runner->is_cancelled) {
            cancel_all(runner);
        }
        if (runner->num_outstanding == 0 &&
            (runner->num_sent == runner->plan->count || runner->is_cancelled)) {
            break;
        }
        wait_and_settle(runner);
        show_progress(runner);
    }
    if (runner->settings->has_progress) {
        fprintf(stderr, "\r\033[K");
    }
    return exit_code;
}

/* ---- the result ------------------------------------------------------------------------------ */

/* Samples of all completed requests, one array a measure. */
struct measures {
    struct load_samples ttft, itl, tpot, queue, total;
};

static void add_record(const struct load_runner *runner, const struct record *record,
                       struct measures *measures, struct load_result *result)
{
    const struct load_settings *settings = runner->settings;
    int64_t worst_tpot_ns = 0;

    for (int32_t i = 0; i < settings->num_choices; i++) {
        const struct choice_times *times = &record->choices[i];
        if (times->num_tokens > 1) {
            int64_t tpot_ns = (times->last_ns - times->first_ns) / (times->num_tokens - 1);
            load_samples_add(&measures->tpot, tpot_ns);
            worst_tpot_ns = tpot_ns > worst_tpot_ns ? tpot_ns : worst_tpot_ns;
        }
    }
    for (size_t i = 0; i < record->gaps.count; i++) {
        load_samples_add(&measures->itl, record->gaps.values[i]);
    }
    int64_t ttft_ns = record->first_token_ns - record->arrival_ns;
    load_samples_add(&measures->ttft, ttft_ns);
    load_samples_add(&measures->queue, record->metrics.queue_ns);
    load_samples_add(&measures->total, record->end_ns - record->arrival_ns);
    result->num_good += (settings->slo_ttft_ns == 0 || ttft_ns <= settings->slo_ttft_ns) &&
                        (settings->slo_itl_ns == 0 || worst_tpot_ns <= settings->slo_itl_ns);
}

/* What the engine did for a request that has ended in any way. */
static void add_work(const struct record *record, struct load_result *result)
{
    const struct imbrex_request_metrics *metrics = &record->metrics;
    int64_t num_prompt_tokens = metrics->num_generated_tokens > 0 ? metrics->num_prompt_tokens : 0;

    result->num_prompt_tokens += num_prompt_tokens;
    result->num_output_tokens += metrics->num_generated_tokens;
    if (record->outcome != RECORD_OUTCOME_COMPLETED) {
        result->num_unfinished_prompt_tokens += num_prompt_tokens;
        result->num_unfinished_output_tokens += metrics->num_generated_tokens;
    }
    result->num_preemptions += metrics->num_preemptions;
    /* Summed up here, divided by the duration in the end. */
    result->mean_running += (double)(metrics->prefill_ns + metrics->decode_ns);
}

static size_t count_gaps(const struct load_runner *runner, size_t request_idx)
{
    return (size_t)(runner->plan->requests[request_idx].num_output_tokens - 1) *
           (size_t)runner->settings->num_choices;
}

static bool init_measures(const struct load_runner *runner, struct measures *measures)
{
    size_t count = runner->plan->count, num_gaps = 0;

    for (size_t i = 0; i < count; i++) {
        num_gaps += count_gaps(runner, i);
    }
    return load_samples_init(&measures->ttft, count) &&
           load_samples_init(&measures->queue, count) &&
           load_samples_init(&measures->total, count) &&
           load_samples_init(&measures->itl, num_gaps) &&
           load_samples_init(&measures->tpot, count * (size_t)runner->settings->num_choices);
}

static void release_measures(struct measures *measures)
{
    load_samples_release(&measures->ttft);
    load_samples_release(&measures->itl);
    load_samples_release(&measures->tpot);
    load_samples_release(&measures->queue);
    load_samples_release(&measures->total);
}

/* Finds the priorities of the load. */
static void list_classes(const struct load_plan *plan, struct load_result *result)
{
    for (size_t i = 0; i < plan->count; i++) {
        int32_t priority = plan->requests[i].priority, at = 0;
        while (at < result->num_classes && result->classes[at].priority > priority) {
            at++;
        }
        bool is_known = at < result->num_classes && result->classes[at].priority == priority;
        if (is_known || result->num_classes == LOAD_MAX_PRIORITIES) {
            continue;
        }
        memmove(&result->classes[at + 1], &result->classes[at],
                (size_t)(result->num_classes - at) * sizeof(result->classes[0]));
        result->classes[at] = (struct load_class){.priority = priority};
        result->num_classes++;
    }
}

/* Uses the arrays of measures that have been summarized. */
static void summarize_class(const struct load_runner *runner, struct measures *measures,
                            struct load_class *group)
{
    measures->ttft.count = 0;
    measures->queue.count = 0;
    for (size_t i = 0; i < runner->plan->count; i++) {
        const struct record *record = &runner->records[i];
        if (record->outcome == RECORD_OUTCOME_COMPLETED &&
            runner->plan->requests[i].priority == group->priority) {
            load_samples_add(&measures->ttft, record->first_token_ns - record->arrival_ns);
            load_samples_add(&measures->queue, record->metrics.queue_ns);
            group->num_completed++;
        }
    }
    group->ttft = load_samples_summarize(&measures->ttft);
    group->queue = load_samples_summarize(&measures->queue);
}

static int summarize(const struct load_runner *runner, struct load_result *result)
{
    struct measures measures = {.ttft = {.values = NULL}};

    if (!init_measures(runner, &measures)) {
        release_measures(&measures);
        return output_out_of_memory();
    }
    for (size_t i = 0; i < runner->plan->count; i++) {
        const struct record *record = &runner->records[i];
        add_work(record, result);
        switch (record->outcome) {
        case RECORD_OUTCOME_COMPLETED:
            result->num_completed++;
            add_record(runner, record, &measures, result);
            break;
        case RECORD_OUTCOME_FAILED:
            result->num_failed++;
            break;
        case RECORD_OUTCOME_CANCELLED:
        case RECORD_OUTCOME_NONE:
            result->num_cancelled++;
            break;
        }
    }
    result->duration_ns = runner->end_ns - runner->begin_ns;
    result->mean_running /= result->duration_ns > 0 ? (double)result->duration_ns : 1;
    memcpy(result->first_failure, runner->first_failure.message, sizeof(result->first_failure));
    result->ttft = load_samples_summarize(&measures.ttft);
    result->itl = load_samples_summarize(&measures.itl);
    result->tpot = load_samples_summarize(&measures.tpot);
    result->queue = load_samples_summarize(&measures.queue);
    result->total = load_samples_summarize(&measures.total);
    list_classes(runner->plan, result);
    for (int32_t i = 0; i < result->num_classes; i++) {
        summarize_class(runner, &measures, &result->classes[i]);
    }
    release_measures(&measures);
    return EXIT_CODE_OK;
}

static void take_growth(const struct imbrex_engine_metrics *before,
                        const struct imbrex_engine_metrics *after, struct load_result *result)
{
    result->num_steps = after->num_steps - before->num_steps;
    result->num_failed_steps = after->num_failed_steps - before->num_failed_steps;
    result->step_ns = after->step_time.sum - before->step_time.sum;
    result->forward_ns = after->forward_time.sum - before->forward_time.sum;
    result->overhead_ns = after->overhead.sum - before->overhead.sum;
    result->num_queried_tokens = after->num_queried_tokens - before->num_queried_tokens;
    result->num_cached_tokens = after->num_cached_tokens - before->num_cached_tokens;
    result->num_host_tokens = after->num_host_tokens - before->num_host_tokens;
    result->num_disk_tokens = after->num_disk_tokens - before->num_disk_tokens;
    result->num_remote_tokens = after->num_remote_tokens - before->num_remote_tokens;
    result->num_kv_demoted = after->num_kv_demoted - before->num_kv_demoted;
    result->num_kv_written = after->num_kv_written - before->num_kv_written;
    result->num_kv_lost = after->num_kv_lost - before->num_kv_lost;
    result->num_kv_faults = after->num_kv_faults - before->num_kv_faults;
    result->num_kv_layered = after->num_kv_layered - before->num_kv_layered;
    result->kv_wait_ns = after->kv_wait_ns - before->kv_wait_ns;
    result->kv_block_ns = after->kv_block_ns;
    result->kv_recompute_ns = after->kv_recompute_ns;
    result->num_kv_ahead = after->num_kv_ahead - before->num_kv_ahead;
    result->num_kv_ahead_used = after->num_kv_ahead_used - before->num_kv_ahead_used;
    result->num_kv_ahead_wasted = after->num_kv_ahead_wasted - before->num_kv_ahead_wasted;
}

/* ---- all together ---------------------------------------------------------------------------- */

/* All that taking times needs is allocated before the load begins. False if memory is out. */
static bool prepare_records(struct load_runner *runner)
{
    const struct load_plan *plan = runner->plan;
    size_t num_choices = (size_t)runner->settings->num_choices, num_gaps = 0, gap = 0;
    int32_t longest_prompt = 1;

    for (size_t i = 0; i < plan->count; i++) {
        num_gaps += count_gaps(runner, i);
        if (plan->requests[i].num_prompt_tokens > longest_prompt) {
            longest_prompt = plan->requests[i].num_prompt_tokens;
        }
    }
    runner->records = calloc(plan->count, sizeof(*runner->records));
    runner->choices = calloc(plan->count * num_choices, sizeof(*runner->choices));
    runner->gaps = malloc((num_gaps + 1) * sizeof(*runner->gaps));
    runner->prompt_ids = malloc((size_t)longest_prompt * sizeof(*runner->prompt_ids));
    if (runner->records == NULL || runner->choices == NULL || runner->gaps == NULL ||
        runner->prompt_ids == NULL) {
        return false;
    }
    for (size_t i = 0; i < plan->count; i++) {
        struct record *record = &runner->records[i];
        record->runner = runner;
        record->choices = &runner->choices[i * num_choices];
        record->gaps.values = &runner->gaps[gap];
        record->gaps.capacity = count_gaps(runner, i);
        gap += record->gaps.capacity;
    }
    return true;
}

static bool init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;

    if (pthread_condattr_init(&attributes) != 0) {
        return false;
    }
    bool is_good = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                   pthread_cond_init(condition, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    return is_good;
}

static int run_started(struct load_runner *runner, struct load_result *result)
{
    struct imbrex_engine *engine = runner->settings->engine;
    struct imbrex_engine_metrics before, after;
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    imbrex_engine_read_metrics(engine, &before);
    if (imbrex_engine_start(engine, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    int exit_code = send_and_settle(runner);
    /* Then the last step has been counted. */
    imbrex_engine_stop(engine);
    imbrex_engine_read_metrics(engine, &after);
    if (exit_code == EXIT_CODE_OK) {
        take_growth(&before, &after, result);
        exit_code = summarize(runner, result);
    }
    return exit_code;
}

static int run_prepared(struct load_runner *runner, struct load_result *result)
{
    if (!prepare_records(runner) || pthread_mutex_init(&runner->lock, NULL) != 0) {
        return output_out_of_memory();
    }
    int exit_code = EXIT_CODE_FAILURE;
    if (init_condition(&runner->ended)) {
        exit_code = run_started(runner, result);
        pthread_cond_destroy(&runner->ended);
    } else {
        (void)output_out_of_memory();
    }
    pthread_mutex_destroy(&runner->lock);
    return exit_code;
}

int load_run(const struct load_settings *settings, const struct load_plan *plan,
             struct load_result *result)
{
    struct load_runner runner = {.settings = settings, .plan = plan};
    struct load_result measured = {.num_completed = 0};
    int exit_code = run_prepared(&runner, &measured);

    if (exit_code == EXIT_CODE_OK) {
        *result = measured;
    }
    free(runner.records);
    free(runner.choices);
    free(runner.gaps);
    free(runner.prompt_ids);
    return exit_code;
}
