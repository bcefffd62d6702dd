/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of a load: how long they are and when they come. The same seed makes the same load;
 * lengths and prompts do not depend on how requests arrive. Failures are reported; the functions
 * return an exit code. */
#ifndef IMBREX_CLI_LOAD_PLAN_H
#define IMBREX_CLI_LOAD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum load_lengths_kind {
    LOAD_LENGTHS_UNIFORM,   /* min to max, both included */
    LOAD_LENGTHS_LOGNORMAL, /* rounded, at least 1 */
};

/* How many tokens a prompt or an output has. */
struct load_lengths {
    enum load_lengths_kind kind;
    int64_t min, max; /* UNIFORM */
    double mean;      /* LOGNORMAL: of the tokens */
    double sigma;     /* LOGNORMAL: standard deviation of their logarithm */
};

#define LOAD_LENGTHS_FORMS "N, MIN-MAX or lognormal:MEAN,SIGMA"

/* Reads one of LOAD_LENGTHS_FORMS; `command` and `option` are for the message. */
int load_lengths_parse(const char *command, const char *option, const char *text,
                       struct load_lengths *lengths);

#define LOAD_MAX_PRIORITIES 8

/* Which priorities requests have, and how often. */
struct load_priorities {
    int32_t priorities[LOAD_MAX_PRIORITIES];
    double weights[LOAD_MAX_PRIORITIES]; /* the largest is 1 */
    int32_t count;                       /* 0: all have priority 0 */
};

/* Reads "PRIORITY=WEIGHT,..."; `option` is for the message. */
int load_priorities_parse(const char *option, const char *text, struct load_priorities *priorities);

struct load_request {
    int64_t arrival_ns; /* after the begin of the load; open loop only */
    int32_t num_prompt_tokens, num_output_tokens;
    int32_t priority;
    size_t first_block; /* of the prompt, in the plan's block_ids */
    size_t line_number; /* of the trace; 0: not from one */
};

struct load_plan {
    struct load_request *requests; /* [count] in the order of their arrival */
    size_t count;
    int64_t concurrency; /* requests that are never exceeded at once; 0: open loop, by arrival_ns */
    uint64_t seed;
    int32_t shared_prefix; /* ids with which all prompts begin alike */
    /* Where prompts are made of blocks: equal ids stand for equal tokens, block_tokens of them. The
     * prompt of a request begins at its first_block. NULL: random prompts. */
    uint64_t *block_ids; /* [num_block_ids] */
    size_t num_block_ids;
    int32_t block_tokens;
};

/* Draws the lengths and priorities of `count` requests. */
int load_plan_create(struct load_plan *plan, size_t count, const struct load_lengths *prompts,
                     const struct load_lengths *outputs, uint64_t seed);
void load_plan_release(struct load_plan *plan);

/* Takes lengths, and times if has_times, from a csv file (see load_trace.c), at most
 * max_requests. */
int load_plan_read_trace(struct load_plan *plan, const char *path, size_t max_requests,
                         bool has_times, uint64_t seed);

/* Conversations that begin with the same system prompt. Each turn's prompt is all that was said
 * before it, as planned, and a new message. */
struct load_sessions {
    size_t num_sessions;
    int32_t system_tokens;
    struct load_lengths turns, turn_tokens, output_tokens;
    double session_rate; /* sessions that begin, a second: Poisson */
    double think_s;      /* mean time from one turn to the next, exponential */
};

int load_plan_create_sessions(struct load_plan *plan, const struct load_sessions *sessions,
                              uint64_t seed);

struct load_block_source {
    const char *path, *starts; /* starts: seconds at which sessions begin, one a line, or NULL */
    double session_rate;       /* without starts: sessions that begin, a second */
    size_t max_requests;       /* the first by their arrival; of sessions, of those in front */
    double scale;              /* of all numbers of tokens */
};

/* Takes block ids, lengths and times from a Mooncake, Bailian or WEKA trace (see load_blocks.c). */
int load_plan_read_blocks(struct load_plan *plan, const struct load_block_source *source,
                          uint64_t seed);
/* The load as a trace whose blocks have block_size tokens (see load_blocks_write.c). Prompts are
 * made of blocks. path "-": standard output. */
int load_plan_write_blocks(const struct load_plan *plan, const char *path, int32_t block_size);
/* Seconds between the begins of a session and the next one. */
double load_plan_draw_gap(uint64_t seed, size_t session_idx, double session_rate);
/* By arrival. */
void load_plan_sort(struct load_plan *plan);
/* Tokens of all different blocks together. 0: no memory for it. */
int64_t load_plan_distinct_tokens(const struct load_plan *plan);

/* Poisson arrivals, `rate` a second. */
void load_plan_draw_arrivals(struct load_plan *plan, double rate);
/* Divides the times by `speed`. */
void load_plan_scale_arrivals(struct load_plan *plan, double speed);
void load_plan_draw_priorities(struct load_plan *plan, const struct load_priorities *priorities);

/* Cuts prompts, then outputs, so that each request fits a context. Returns how many it cut. */
size_t load_plan_clip(struct load_plan *plan, int64_t context_size);
/* Index of the request with the most tokens of prompt and output together. */
size_t load_plan_longest(const struct load_plan *plan);
/* Tokens of the `num_sequences` longest sequences, when each request has num_choices of them and
 * each one's tokens are rounded up to a multiple of block_size. */
int64_t load_plan_peak_tokens(const struct load_plan *plan, int64_t num_sequences,
                              int32_t num_choices, int32_t block_size);

/* The ids of a request's prompt: num_prompt_tokens ids in [0, vocab_size). */
void load_plan_draw_prompt(const struct load_plan *plan, size_t request_idx, int32_t vocab_size,
                           int32_t *token_ids);

#endif
