/* SPDX-License-Identifier: Apache-2.0 */
/* What becomes of a request's tokens, and what the batch must know of it.
 *
 *   id -> detokenizer -> stop matcher -> event -> callback, or queue
 */
#include <assert.h>
#include <string.h>

#include "engine/request.h"

bool request_is_end_token(const struct imbrex_request *request, int32_t token_id)
{
    for (int32_t i = 0; i < request->num_end_token_ids; i++) {
        if (request->end_token_ids[i] == token_id) {
            return true;
        }
    }
    return false;
}

/* ---- batch ----------------------------------------------------------------------------------- */

static const struct request_choice *choice_of(const struct sequence *sequence)
{
    return (const struct request_choice *)(const void *)sequence;
}

static int32_t source_token_id(const struct sequence *sequence, int32_t position)
{
    const struct request_choice *choice = choice_of(sequence);
    const struct imbrex_request *request = choice->request;
    if (position < request->num_prompt_ids) {
        return request->prompt_ids[position];
    }
    int32_t output_idx = position - request->num_prompt_ids;
    return output_idx < choice->num_output ? choice->output_ids[output_idx] : -1;
}

static void source_sample_row(const struct sequence *sequence, const struct step_row *row,
                              int32_t draw_idx, struct sample_row *sample_row,
                              struct imbrex_logit_bias *bias)
{
    const struct request_choice *choice = choice_of(sequence);
    const struct imbrex_request *request = choice->request;
    struct sample_row filled = request->sampling;
    filled.logits_row = sample_row->logits_row;
    filled.slot = sample_row->slot;
    filled.num_tokens = sample_row->num_tokens;
    filled.num_prompt_tokens = sample_row->num_prompt_tokens;
    filled.target_id = sample_row->target_id;
    filled.bias_begin = sample_row->bias_begin;
    filled.choice_idx = choice->choice_idx;
    if (sample_row->target_id >= 0) {
        filled.num_logprobs = request->num_prompt_logprobs;
        *sample_row = filled;
        return;
    }
    /* Draws beyond the first begin other choices, which have no row in the history yet. */
    filled.choice_idx += draw_idx;
    filled.is_stored = draw_idx == 0;
    /* Tokens of planned steps count, whose ids the host may not know yet. */
    int32_t num_output = row->position + row->num_tokens - request->num_prompt_ids;
    filled.num_bias = request->num_bias;
    if (num_output < request->min_tokens) {
        filled.num_bias += request->num_end_bias;
    }
    if (filled.num_bias > 0) {
        memcpy(bias, request->bias, (size_t)filled.num_bias * sizeof(*bias));
    }
    *sample_row = filled;
}

const struct batch_source request_batch_source = {
    .token_id = source_token_id,
    .sample_row = source_sample_row,
};

/* ---- events ---------------------------------------------------------------------------------- */

/* The callback's answer holds for the whole request. */
static bool call_back(struct imbrex_request *request, const struct imbrex_token_event *event)
{
    bool goes_on = request->callback(request->user, event);
    if (!goes_on) {
        atomic_store(&request->is_cancelled, true);
    }
    return goes_on;
}

/* False without memory: the request's status says so then. */
static bool queue_token(struct imbrex_request *request, const struct imbrex_token_event *event,
                        pthread_mutex_t *lock)
{
    pthread_mutex_lock(lock);
    bool is_kept = event_queue_push(&request->events, event);
    if (!is_kept) {
        request->status = error_out_of_memory(&request->error, "an event", event->text_bytes);
    }
    pthread_mutex_unlock(lock);
    return is_kept;
}

/* Why the choice ends with its newest token, if the token's event went out and nothing else ended
 * it. */
static enum imbrex_finish_reason reason_to_end(const struct request_choice *choice)
{
    const struct imbrex_request *request = choice->request;
    if (request_is_end_token(request, choice->output_ids[choice->num_output - 1])) {
        return IMBREX_FINISH_REASON_EOS;
    }
    if (choice->num_output == request->max_output) {
        return request->is_context_limit ? IMBREX_FINISH_REASON_CONTEXT
                                         : IMBREX_FINISH_REASON_LENGTH;
    }
    return IMBREX_FINISH_REASON_NONE;
}

enum imbrex_finish_reason request_take_token(struct request_choice *choice,
                                             const struct sample_result *result,
                                             const struct imbrex_logprob *top_logprobs,
                                             int64_t now_ns, pthread_mutex_t *lock)
{
    struct imbrex_request *request = choice->request;
    struct stop_matcher *matcher = &choice->stop_matcher;
    struct imbrex_token_event event = {
        .choice_idx = choice->choice_idx, .token_id = result->token_id, .text = ""};
    bool is_stopped = false, goes_on = true;

    assert(choice->finish_reason == IMBREX_FINISH_REASON_NONE);
    assert(result->token_id >= 0 && choice->num_output < request->max_output);
    choice->output_ids[choice->num_output++] = result->token_id;
    choice->last_token_ns = now_ns;
    request->metrics.num_generated_tokens++;
    if (request->first_token_ns == 0) {
        request->first_token_ns = now_ns;
        request->metrics.ttft_ns = now_ns - request->submit_ns;
        request->metrics.prefill_ns = now_ns - request->first_step_ns;
    }
    if (request->has_text) {
        size_t num_bytes =
            detokenizer_push(&choice->detokenizer, result->token_id, stop_matcher_piece(matcher));
        is_stopped = stop_matcher_push(matcher, num_bytes, false, &event.text_bytes);
        event.text = matcher->text;
    }
    if (request->sampling.num_logprobs >= 0) {
        event.logprob = result->logprob;
        event.num_top_logprobs = result->num_top < request->sampling.num_logprobs
                                     ? result->num_top
                                     : request->sampling.num_logprobs;
        event.top_logprobs = event.num_top_logprobs > 0 ? top_logprobs : NULL;
    }
    if (request->callback != NULL) {
        goes_on = call_back(request, &event);
    } else if (!queue_token(request, &event, lock)) {
        /* Its text is still in the matcher and goes out with the end. */
        return IMBREX_FINISH_REASON_ERROR;
    }
    if (request->has_text) {
        stop_matcher_drop(matcher, event.text_bytes);
    }
    if (is_stopped) {
        return IMBREX_FINISH_REASON_STOP_STRING;
    }
    return goes_on ? reason_to_end(choice) : IMBREX_FINISH_REASON_CANCELLED;
}

/* Whoever has the last event may read all metrics. */
static void end_times(struct imbrex_request *request, int64_t now_ns)
{
    struct imbrex_request_metrics *metrics = &request->metrics;
    request->end_ns = now_ns;
    if (request->first_step_ns == 0) {
        metrics->queue_ns = now_ns - request->submit_ns;
    } else if (request->first_token_ns == 0) {
        metrics->prefill_ns = now_ns - request->first_step_ns;
    } else {
        metrics->decode_ns = now_ns - request->first_token_ns;
    }
}

void request_end_choice(struct request_choice *choice, enum imbrex_finish_reason reason,
                        int64_t now_ns, pthread_mutex_t *lock)
{
    struct imbrex_request *request = choice->request;
    struct stop_matcher *matcher = &choice->stop_matcher;
    struct imbrex_token_event event = {
        .choice_idx = choice->choice_idx, .token_id = -1, .text = ""};

    assert(choice->finish_reason == IMBREX_FINISH_REASON_NONE);
    assert(reason != IMBREX_FINISH_REASON_NONE);
    if (request->has_text && reason != IMBREX_FINISH_REASON_STOP_STRING) {
        size_t num_bytes = detokenizer_flush(&choice->detokenizer, stop_matcher_piece(matcher));
        bool is_stopped = stop_matcher_push(matcher, num_bytes, true, &event.text_bytes);
        event.text = matcher->text;
        if (is_stopped && reason != IMBREX_FINISH_REASON_ERROR) {
            reason = IMBREX_FINISH_REASON_STOP_STRING;
        }
    }
    choice->finish_reason = reason;
    if (choice->choice_idx == 0) {
        request->metrics.finish_reason = reason;
    }
    request->metrics.num_preemptions += choice->sequence.num_preemptions;
    request->num_left--;
    if (request->num_left == 0) {
        end_times(request, now_ns);
    }
    event.finish_reason = reason;
    event.is_last = request->num_left == 0;
    if (request->callback != NULL) {
        (void)call_back(request, &event);
    } else {
        pthread_mutex_lock(lock);
        event_queue_push_reserved(&request->events, &event);
        pthread_mutex_unlock(lock);
    }
}

/* ---- prompt logprobs ------------------------------------------------------------------------- */

bool request_take_prompt_logprobs(struct imbrex_request *request, int32_t begin,
                                  const struct sample_result *results,
                                  const struct imbrex_logprob *top_logprobs, int32_t max_logprobs,
                                  int32_t num_results)
{
    assert(request->prompt_logprobs != NULL);
    assert(begin >= 1 && num_results <= request->num_prompt_ids - begin);
    for (int32_t i = 0; i < num_results; i++) {
        const struct sample_result *result = &results[i];
        if (result->token_id < 0) {
            return false;
        }
        request->prompt_logprobs[begin + i] = result->logprob;
        int32_t num_top = result->num_top < request->num_prompt_logprobs
                              ? result->num_top
                              : request->num_prompt_logprobs;
        if (num_top > 0) {
            memcpy(request->top_prompt_logprobs +
                       (size_t)(begin + i) * (size_t)request->num_prompt_logprobs,
                   top_logprobs + (size_t)i * (size_t)max_logprobs,
                   (size_t)num_top * sizeof(*top_logprobs));
        }
    }
    if (begin + num_results == request->num_prompt_ids) {
        atomic_store(&request->has_prompt_logprobs, true);
    }
    return true;
}
