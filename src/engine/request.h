/* SPDX-License-Identifier: Apache-2.0 */
/* A request and its choices: what the user asked for, the ids they have so far (their only home on
 * the host), the text that goes out. Created by any thread; from the moment it is queued it belongs
 * to the thread that runs the engine, but for the fields that say otherwise. */
#ifndef IMBREX_ENGINE_REQUEST_H
#define IMBREX_ENGINE_REQUEST_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/batch.h"
#include "engine/event_queue.h"
#include "engine/prefix.h"
#include "engine/scheduler.h"
#include "engine/stop_matcher.h"
#include "model/model.h"
#include "model/tokenizer.h"

struct request_choice {
    struct sequence sequence; /* first: batch_source gets it and finds the choice */
    struct imbrex_request *request;
    int32_t choice_idx;
    int32_t *output_ids;            /* [max_output] */
    int32_t num_output;             /* ids the host knows */
    struct detokenizer detokenizer; /* not used without text */
    struct stop_matcher stop_matcher;
    enum imbrex_finish_reason finish_reason; /* NONE: goes on */
    int64_t last_token_ns;
};

struct imbrex_request {
    struct imbrex_engine *engine;
    const struct imbrex_model *model;

    int32_t *prompt_ids; /* [num_prompt_ids] */
    int32_t num_prompt_ids;
    int32_t max_output; /* tokens that a choice can get: max_tokens, or what the context leaves */
    bool is_context_limit; /* max_output is the context's: the end has reason CONTEXT */
    int32_t min_tokens;
    int32_t num_choices;
    bool has_text;
    bool ignore_eos;
    struct sample_row sampling; /* of choice 0: options in place, the rest is set for each row */
    /* [num_bias] of the request, then [num_end_bias] end tokens with -INFINITY, which hold until
     * min_tokens. */
    struct imbrex_logit_bias *bias;
    int32_t num_bias, num_end_bias;
    int32_t *end_token_ids; /* [num_end_token_ids] the model's and the request's; none if ignored */
    int32_t num_end_token_ids;
    int32_t num_prompt_logprobs;
    float *prompt_logprobs;                     /* [num_prompt_ids] or NULL */
    struct imbrex_logprob *top_prompt_logprobs; /* [num_prompt_ids, num_prompt_logprobs] or NULL */
    atomic_bool has_prompt_logprobs;            /* all of them are there; any thread reads it */
    unsigned char *salt;
    size_t salt_bytes;
    struct request_prefix prefix; /* of choice 0, the only one that the prefix cache knows */
    imbrex_token_fn *callback;    /* NULL: events go to the queue */
    void *user;

    struct request_choice
        *choices;        /* [num_choices]; those from 1 on start when the prompt is read */
    int32_t num_started; /* choices that the scheduler knows or has known */
    int32_t num_left;    /* choices that have not ended */
    int64_t submit_ns, first_step_ns, first_token_ns, end_ns; /* 0: not yet */
    struct imbrex_request_metrics metrics;

    atomic_bool is_cancelled; /* any thread sets it */
    struct imbrex_request
        *next; /* in the engine's inbox (its lock), then in its list of live ones */
    struct imbrex_request *previous;

    /* Under the engine's lock. */
    struct event_queue events;
    enum imbrex_status status; /* OK until it fails; final once has_ended */
    struct imbrex_error error; /* if status is not OK */
    bool has_ended;            /* no step holds it, no event follows: it may be freed */
    bool has_taken_last;       /* the poller has had its last event */
};

/* What request_create must know of the engine. */
struct request_limits {
    int32_t context_size;
    int64_t priority_step_ns;
    const struct kv_identity *identity; /* of the blocks; NULL: there is no prefix cache */
};

/* Checks and copies the options, tokenizes a prompt_text, fills the sequences (all but arrival_ns
 * and deadline_ns) and prepares the detokenizers. Takes no lock. */
enum imbrex_status request_create(const struct imbrex_model *model,
                                  const struct request_limits *limits,
                                  const struct imbrex_request_options *options,
                                  struct imbrex_request **request, struct imbrex_error *err);
/* NULL does nothing. */
void request_free(struct imbrex_request *request);

/* Whether a choice ends with that id. */
bool request_is_end_token(const struct imbrex_request *request, int32_t token_id);

/* The batch's questions, answered from a request_choice. */
extern const struct batch_source request_batch_source;

/* Appends a drawn token to the choice, counts it in the request's metrics, sends its event, and
 * says whether the choice ends with it (the end is not sent yet). `lock` is the engine's, taken
 * around the event queue only. Reasons, in this order: STOP_STRING, CANCELLED (the callback said
 * so; is_cancelled is set then, also beside STOP_STRING), EOS, LENGTH or CONTEXT. ERROR if the
 * event could not be kept: status and error are set then, and the whole request should end so. */
enum imbrex_finish_reason request_take_token(struct request_choice *choice,
                                             const struct sample_result *result,
                                             const struct imbrex_logprob *top_logprobs,
                                             int64_t now_ns, pthread_mutex_t *lock);

/* Keeps the logprobs of prompt positions [begin, begin + num_results): result i is of the token at
 * begin + i. False if a logit was not finite. */
bool request_take_prompt_logprobs(struct imbrex_request *request, int32_t begin,
                                  const struct sample_result *results,
                                  const struct imbrex_logprob *top_logprobs, int32_t max_logprobs,
                                  int32_t num_results);

/* Ends a choice that has not ended: sends its end with the text that was held back. A stop string
 * in that text makes the reason STOP_STRING, unless it is ERROR. Always succeeds. */
void request_end_choice(struct request_choice *choice, enum imbrex_finish_reason reason,
                        int64_t now_ns, pthread_mutex_t *lock);

#endif
