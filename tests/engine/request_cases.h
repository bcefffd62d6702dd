/* SPDX-License-Identifier: Apache-2.0 */
/* Random requests, what came of them, and whether that is what came of them alone. */
#ifndef IMBREX_TESTS_REQUEST_CASES_H
#define IMBREX_TESTS_REQUEST_CASES_H

#include "imbrex.h"
#include "tests/test.h"

#define REQUEST_CASE_MAX_CHOICES 4

/* Everything a choice gave. */
struct choice_record {
    int32_t *token_ids; /* [num_tokens] */
    float *logprobs;    /* [num_tokens] */
    double top_sum;     /* of all alternatives: ids and logprobs */
    int32_t num_tokens;
    char *text; /* [text_bytes] */
    size_t text_bytes;
    enum imbrex_finish_reason reason; /* NONE: no end came */
};

struct request_record {
    struct choice_record choices[REQUEST_CASE_MAX_CHOICES];
    float *prompt_logprobs; /* [num_prompt_ids] or NULL */
    enum imbrex_status status;
    int32_t num_ends, num_preemptions, num_cached_tokens;
    bool has_last; /* the last event said so */
};

/* One random request with its own memory. */
struct request_case {
    struct imbrex_request_options options;
    int32_t *prompt_ids;
    struct imbrex_logit_bias bias[3];
    const char *stop[2];
    struct request_record alone, mixed;
    struct imbrex_request *request;
    int32_t cancel_after; /* tokens of choice 0; 0: never */
    /* Of a greedy request whose bits may depend on others: by how much logprobs may differ, those
     * of the two ids where the texts part included. 0: bit for bit. */
    float tie_gap;
};

struct request_case_limits {
    int32_t max_prompt, max_output, max_choices;
    bool has_cancels;
};

/* A small generator of its own, so that a seed gives the same cases everywhere. */
uint32_t request_case_random(uint64_t *state, uint32_t bound);

void request_case_init(struct request_case *request_case, const struct imbrex_model *model,
                       const struct request_case_limits *limits, uint64_t *state);
void request_case_deinit(struct request_case *request_case);

/* Submits it; what comes goes to case->mixed. */
enum imbrex_status request_case_submit(struct request_case *request_case,
                                       struct imbrex_engine *engine);
/* Waits, keeps status and prompt logprobs, destroys the request. */
void request_case_finish(struct request_case *request_case);
/* The same with nobody beside it, into case->alone. */
void request_case_run_alone(struct request_case *request_case, struct imbrex_engine *engine);

#define REQUEST_CASE_MAX_PROMPT 200 /* of those that begin alike */

/* Inits all of cases [num_cases] with prompts that begin like one of three, by any number of ids,
 * and runs each alone. */
void request_cases_begin_alike(struct request_case *cases, int32_t num_cases,
                               const struct imbrex_model *model, struct imbrex_engine *engine,
                               uint64_t seed);
void request_cases_deinit(struct request_case *cases, int32_t num_cases);

struct device;

/* An engine on the device; NULL: on the one that the options name. Fails the test with the reason.
 * A request waits for what is in its tiers however long that takes. */
struct imbrex_engine *request_cases_engine(struct imbrex_model *model,
                                           const struct imbrex_engine_options *options,
                                           struct device *device);

/* Fails the test unless scheduler, pool, cache and tiers agree. */
void request_cases_check(const struct imbrex_engine *engine);

/* Beside a step, counted from 1; num_submitted: cases that have come. */
typedef void request_cases_step_fn(void *user, struct imbrex_engine *engine, int32_t step,
                                   int32_t num_submitted);

/* How cases come to an engine, and what is done meanwhile. */
struct request_round {
    int32_t num_at_once;    /* cases that come together, before a step; 0: two */
    int32_t num_idle_steps; /* without one, behind each that brought some */
    request_cases_step_fn *before_step, *after_step;                            /* NULL: nothing */
    void (*before_finish)(void *user, const struct request_case *request_case); /* NULL: nothing */
    void *user;
    bool may_fail; /* requests may end with another status than OK */
};

/* All of cases [num_cases]; behind each step the engine is checked, and each case gives what it
 * gave alone. round: NULL: two before each step. How many failed, if they may. */
int32_t request_cases_run(struct request_case *cases, int32_t num_cases,
                          struct imbrex_engine *engine, const struct request_round *round);

/* The built-in model, and requests on it that begin alike and have run alone. */
#define CASE_BED_MAX_CASES 100
struct case_bed {
    struct imbrex_model *model;
    struct request_case cases[CASE_BED_MAX_CASES];
    int32_t num_cases;
};
/* options: of the model; NULL: the defaults. Fails the test with the reason. */
void case_bed_open(struct case_bed *bed, const struct imbrex_model_options *options,
                   int32_t num_cases, int32_t context_size, uint64_t seed);
void case_bed_close(struct case_bed *bed);

/* ---- one greedy prompt ---- */

#define PLAIN_PROMPT_TOKENS 203
/* The same ids each time. */
void plain_prompt_fill(int32_t ids[PLAIN_PROMPT_TOKENS]);
/* ids [num_ids]; salt: NULL: none. It goes on whatever it says. */
struct imbrex_request *plain_prompt_submit(struct imbrex_engine *engine, const int32_t *ids,
                                           int32_t num_ids, int32_t max_tokens, const char *salt);
/* Steps until it has ended well; destroys it. */
struct imbrex_request_metrics plain_prompt_end(struct imbrex_request *request);
/* Both, for one token. */
struct imbrex_request_metrics plain_prompt_run(struct imbrex_engine *engine, const int32_t *ids,
                                               int32_t num_ids);

/* Forgets what came of it in a mix. */
void request_case_reset(struct request_case *request_case);

/* Makes it greedy, without what moves logits, with the logprob of each id, and sets tie_gap. Before
 * it runs alone. */
void request_case_allow_ties(struct request_case *request_case, float tie_gap);
/* Whether the texts of a request with a tie_gap part. */
bool request_case_has_tie(const struct request_case *request_case);
/* By how much logprobs of a request with a tie_gap differ, up to where its texts part, and of the
 * two ids there: written to gaps [max_tokens of all choices], so many are returned. */
int32_t request_case_gaps(const struct request_case *request_case, float *gaps);

/* Fails the test unless both records agree, bit for bit, or as tie_gap says; of a cancelled one
 * only the tokens that both have. */
void request_case_compare(const struct request_case *request_case, int32_t case_idx);

#endif
