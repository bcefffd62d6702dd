/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers are drawn by SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
 * Generators, OOPSLA 2014): any seed is a good one, so that each purpose and each prompt has a
 * sequence of its own. */
#include "cli/load_plan.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/output.h"

/* What numbers are drawn for. */
enum stream {
    STREAM_LENGTHS = 1,
    STREAM_ARRIVALS = 2,
    STREAM_PRIORITIES = 3,
    STREAM_PROMPTS = 4,
    STREAM_PREFIX = 5,
    STREAM_BLOCKS = 6,
    STREAM_SESSIONS = 7,
};

static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static uint64_t next_number(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return mix(*state);
}

static uint64_t begin_stream(uint64_t seed, enum stream stream, size_t idx)
{
    return mix(mix(seed + (uint64_t)stream * UINT64_C(0x9e3779b97f4a7c15)) + (uint64_t)idx);
}

/* Uniform in (0, 1]. */
static double next_fraction(uint64_t *state)
{
    return ((double)(next_number(state) >> 11) + 1) * 0x1p-53;
}

/* Box and Muller's; the second number of the pair is not used. */
static double next_normal(uint64_t *state)
{
    const double two_pi = 6.283185307179586;
    double radius = sqrt(-2 * log(next_fraction(state)));

    return radius * cos(two_pi * next_fraction(state));
}

/* ---- what the options say -------------------------------------------------------------------- */

static int report_lengths(const char *command, const char *option, const char *text)
{
    output_error("%s: --%s: expected " LOAD_LENGTHS_FORMS
                 " with 1 <= MIN <= MAX <= %d, 1 <= MEAN <= %d and 0 <= SIGMA <= 5, found \"%s\"",
                 command, option, IMBREX_MAX_CONTEXT_SIZE, IMBREX_MAX_CONTEXT_SIZE, text);
    return EXIT_CODE_INPUT;
}

/* Digits only; *end is behind them. False if there are none or too many. */
static bool read_count(const char *text, const char **end, int64_t *value)
{
    int64_t parsed = 0;
    size_t length = 0;

    for (; text[length] >= '0' && text[length] <= '9' && length < 12; length++) {
        parsed = parsed * 10 + (text[length] - '0');
    }
    *end = text + length;
    *value = parsed;
    return length > 0 && length < 12;
}

static bool read_real(const char *text, char **end, double *value)
{
    bool begins_well = (text[0] >= '0' && text[0] <= '9') || text[0] == '.';

    *value = begins_well ? strtod(text, end) : 0;
    return begins_well && *end != text && isfinite(*value);
}

int load_lengths_parse(const char *command, const char *option, const char *text,
                       struct load_lengths *lengths)
{
    static const char prefix[] = "lognormal:";
    struct load_lengths parsed = {.kind = LOAD_LENGTHS_UNIFORM};
    bool is_good;

    if (strncmp(text, prefix, strlen(prefix)) == 0) {
        char *end = NULL;
        parsed.kind = LOAD_LENGTHS_LOGNORMAL;
        is_good = read_real(text + strlen(prefix), &end, &parsed.mean) && *end == ',' &&
                  read_real(end + 1, &end, &parsed.sigma) && *end == '\0' && parsed.mean >= 1 &&
                  parsed.mean <= IMBREX_MAX_CONTEXT_SIZE && parsed.sigma <= 5;
    } else {
        const char *end;
        is_good = read_count(text, &end, &parsed.min);
        parsed.max = parsed.min;
        if (is_good && *end == '-') {
            is_good = read_count(end + 1, &end, &parsed.max);
        }
        is_good = is_good && *end == '\0' && parsed.min >= 1 && parsed.max >= parsed.min &&
                  parsed.max <= IMBREX_MAX_CONTEXT_SIZE;
    }
    if (!is_good) {
        return report_lengths(command, option, text);
    }
    *lengths = parsed;
    return EXIT_CODE_OK;
}

/* The sum of weights as they are given can be infinite. */
static void scale_weights(struct load_priorities *priorities)
{
    double largest = 0;

    for (int32_t i = 0; i < priorities->count; i++) {
        largest = fmax(largest, priorities->weights[i]);
    }
    for (int32_t i = 0; i < priorities->count; i++) {
        priorities->weights[i] /= largest;
    }
}

int load_priorities_parse(const char *option, const char *text, struct load_priorities *priorities)
{
    struct load_priorities parsed = {.count = 0};
    const char *at = text;
    bool is_good = true;

    while (is_good && parsed.count < LOAD_MAX_PRIORITIES) {
        char *end = NULL;
        long priority = strtol(at, &end, 10);
        double weight = 0;
        is_good = end != at && *end == '=' && labs(priority) <= IMBREX_MAX_PRIORITY &&
                  read_real(end + 1, &end, &weight) && weight > 0;
        if (!is_good) {
            break;
        }
        parsed.priorities[parsed.count] = (int32_t)priority;
        parsed.weights[parsed.count++] = weight;
        if (*end == '\0') {
            scale_weights(&parsed);
            *priorities = parsed;
            return EXIT_CODE_OK;
        }
        is_good = *end == ',';
        at = end + 1;
    }
    output_error("bench engine: --%s: expected up to %d of PRIORITY=WEIGHT with commas between, "
                 "priorities in [-%d, %d] and weights above 0, found \"%s\"",
                 option, LOAD_MAX_PRIORITIES, IMBREX_MAX_PRIORITY, IMBREX_MAX_PRIORITY, text);
    return EXIT_CODE_INPUT;
}

/* ---- drawing --------------------------------------------------------------------------------- */

static int32_t draw_length(const struct load_lengths *lengths, uint64_t *state)
{
    double length;

    if (lengths->kind == LOAD_LENGTHS_UNIFORM) {
        /* The range is far below 2^64: no value is noticeably more likely. */
        uint64_t num_values = (uint64_t)(lengths->max - lengths->min) + 1;
        return (int32_t)(lengths->min + (int64_t)(next_number(state) % num_values));
    }
    /* The mean of exp(x), x normal, is exp(mu + sigma^2 / 2). */
    double mu = log(lengths->mean) - lengths->sigma * lengths->sigma / 2;
    length = round(exp(mu + lengths->sigma * next_normal(state)));
    return (int32_t)fmin(fmax(length, 1), IMBREX_MAX_CONTEXT_SIZE);
}

int load_plan_create(struct load_plan *plan, size_t count, const struct load_lengths *prompts,
                     const struct load_lengths *outputs, uint64_t seed)
{
    struct load_request *requests = calloc(count, sizeof(*requests));
    uint64_t state = begin_stream(seed, STREAM_LENGTHS, 0);

    if (requests == NULL) {
        return output_out_of_memory();
    }
    for (size_t i = 0; i < count; i++) {
        requests[i].num_prompt_tokens = draw_length(prompts, &state);
        requests[i].num_output_tokens = draw_length(outputs, &state);
    }
    *plan = (struct load_plan){.requests = requests, .count = count, .seed = seed};
    return EXIT_CODE_OK;
}

void load_plan_release(struct load_plan *plan)
{
    free(plan->requests);
    free(plan->block_ids);
    *plan = (struct load_plan){.requests = NULL};
}

/* The session's own tokens and those of the system prompt. */
static uint64_t session_block(const struct load_sessions *sessions, size_t session_idx,
                              int32_t position)
{
    uint64_t owner = position < sessions->system_tokens ? 0 : (uint64_t)session_idx + 1;

    return (owner << 32) | (uint64_t)(uint32_t)position;
}

/* The turns of one session; what they say in common is in the plan once: a prompt is a part of the
 * session's last one. False if a conversation is too long for any context. */
static bool draw_session(struct load_plan *plan, const struct load_sessions *sessions,
                         size_t num_turns, double begin_s, uint64_t *state)
{
    int64_t num_tokens = sessions->system_tokens;
    double at_s = begin_s;

    for (size_t i = 0; i < num_turns; i++) {
        struct load_request *request = &plan->requests[plan->count];
        num_tokens += draw_length(&sessions->turn_tokens, state);
        *request = (struct load_request){
            .arrival_ns = (int64_t)(fmin(at_s, 1e9) * 1e9),
            .num_output_tokens = draw_length(&sessions->output_tokens, state),
            .first_block = plan->num_block_ids,
        };
        if (num_tokens + request->num_output_tokens > IMBREX_MAX_CONTEXT_SIZE) {
            return false;
        }
        request->num_prompt_tokens = (int32_t)num_tokens;
        num_tokens += request->num_output_tokens;
        at_s += -log(next_fraction(state)) * sessions->think_s;
        plan->count++;
    }
    return true;
}

/* Appends the tokens of the session's longest prompt. False if memory is out. */
static bool append_session(struct load_plan *plan, const struct load_sessions *sessions,
                           size_t session_idx)
{
    int32_t num_tokens = plan->requests[plan->count - 1].num_prompt_tokens;
    size_t count = plan->num_block_ids + (size_t)num_tokens;
    uint64_t *block_ids = realloc(plan->block_ids, count * sizeof(*block_ids));

    if (block_ids == NULL) {
        return false;
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        block_ids[plan->num_block_ids + (size_t)i] = session_block(sessions, session_idx, i);
    }
    plan->block_ids = block_ids;
    plan->num_block_ids = count;
    return true;
}

static int compare_arrivals(const void *a, const void *b)
{
    const struct load_request *left = a, *right = b;

    if (left->arrival_ns != right->arrival_ns) {
        return left->arrival_ns < right->arrival_ns ? -1 : 1;
    }
    /* Of one session the shorter prompt is the earlier one. */
    if (left->first_block != right->first_block) {
        return left->first_block < right->first_block ? -1 : 1;
    }
    return (left->num_prompt_tokens > right->num_prompt_tokens) -
           (left->num_prompt_tokens < right->num_prompt_tokens);
}

double load_plan_draw_gap(uint64_t seed, size_t session_idx, double session_rate)
{
    uint64_t state = begin_stream(seed, STREAM_ARRIVALS, session_idx);

    return -log(next_fraction(&state)) / session_rate;
}

void load_plan_sort(struct load_plan *plan)
{
    qsort(plan->requests, plan->count, sizeof(*plan->requests), compare_arrivals);
}

static int draw_sessions(struct load_plan *plan, const struct load_sessions *sessions)
{
    double begin_s = 0;

    for (size_t i = 0; i < sessions->num_sessions; i++) {
        uint64_t state = begin_stream(plan->seed, STREAM_SESSIONS, i);
        size_t num_turns = (size_t)draw_length(&sessions->turns, &state);
        struct load_request *requests =
            realloc(plan->requests, (plan->count + num_turns) * sizeof(*requests));
        if (requests == NULL) {
            return output_out_of_memory();
        }
        plan->requests = requests;
        if (!draw_session(plan, sessions, num_turns, begin_s, &state)) {
            output_error("bench kv: expected conversations of at most %d tokens, found a longer "
                         "one",
                         IMBREX_MAX_CONTEXT_SIZE);
            return EXIT_CODE_INPUT;
        }
        if (!append_session(plan, sessions, i)) {
            return output_out_of_memory();
        }
        begin_s += load_plan_draw_gap(plan->seed, i, sessions->session_rate);
    }
    return EXIT_CODE_OK;
}

int load_plan_create_sessions(struct load_plan *plan, const struct load_sessions *sessions,
                              uint64_t seed)
{
    *plan = (struct load_plan){.seed = seed, .block_tokens = 1};
    int exit_code = draw_sessions(plan, sessions);

    if (exit_code != EXIT_CODE_OK) {
        load_plan_release(plan);
        return exit_code;
    }
    load_plan_sort(plan);
    return EXIT_CODE_OK;
}

void load_plan_draw_arrivals(struct load_plan *plan, double rate)
{
    uint64_t state = begin_stream(plan->seed, STREAM_ARRIVALS, 0);
    double arrival_s = 0;

    for (size_t i = 0; i < plan->count; i++) {
        plan->requests[i].arrival_ns = (int64_t)(fmin(arrival_s, 1e9) * 1e9);
        arrival_s += -log(next_fraction(&state)) / rate;
    }
}

void load_plan_scale_arrivals(struct load_plan *plan, double speed)
{
    for (size_t i = 0; i < plan->count; i++) {
        double arrival_ns = (double)plan->requests[i].arrival_ns / speed;
        plan->requests[i].arrival_ns = (int64_t)fmin(arrival_ns, 1e18);
    }
}

void load_plan_draw_priorities(struct load_plan *plan, const struct load_priorities *priorities)
{
    uint64_t state = begin_stream(plan->seed, STREAM_PRIORITIES, 0);
    double weight_sum = 0;

    for (int32_t i = 0; i < priorities->count; i++) {
        weight_sum += priorities->weights[i];
    }
    for (size_t i = 0; i < plan->count; i++) {
        double at = next_fraction(&state) * weight_sum;
        int32_t chosen = 0;
        while (chosen + 1 < priorities->count && at > priorities->weights[chosen]) {
            at -= priorities->weights[chosen++];
        }
        plan->requests[i].priority = priorities->count > 0 ? priorities->priorities[chosen] : 0;
    }
}

/* The same for every request whose prompt has this block. */
static void draw_blocks(const struct load_plan *plan, const struct load_request *request,
                        int32_t vocab_size, int32_t *token_ids)
{
    uint64_t state = 0;

    for (int32_t i = 0; i < request->num_prompt_tokens; i++) {
        if (i % plan->block_tokens == 0) {
            size_t block = request->first_block + (size_t)(i / plan->block_tokens);
            state = begin_stream(plan->seed, STREAM_BLOCKS, (size_t)plan->block_ids[block]);
        }
        token_ids[i] = (int32_t)(next_number(&state) % (uint64_t)vocab_size);
    }
}

void load_plan_draw_prompt(const struct load_plan *plan, size_t request_idx, int32_t vocab_size,
                           int32_t *token_ids)
{
    const struct load_request *request = &plan->requests[request_idx];
    uint64_t state = begin_stream(plan->seed, STREAM_PROMPTS, request_idx);
    uint64_t prefix_state = begin_stream(plan->seed, STREAM_PREFIX, 0);

    if (plan->block_ids != NULL) {
        draw_blocks(plan, request, vocab_size, token_ids);
        return;
    }
    for (int32_t i = 0; i < request->num_prompt_tokens; i++) {
        uint64_t *source = i < plan->shared_prefix ? &prefix_state : &state;
        token_ids[i] = (int32_t)(next_number(source) % (uint64_t)vocab_size);
    }
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static int64_t total_tokens(const struct load_request *request)
{
    return (int64_t)request->num_prompt_tokens + request->num_output_tokens;
}

size_t load_plan_clip(struct load_plan *plan, int64_t context_size)
{
    size_t num_cut = 0;

    for (size_t i = 0; i < plan->count; i++) {
        struct load_request *request = &plan->requests[i];
        int64_t excess = total_tokens(request) - context_size;
        if (excess > 0) {
            int64_t cut =
                excess < request->num_prompt_tokens ? excess : request->num_prompt_tokens - 1;
            request->num_prompt_tokens -= (int32_t)cut;
            request->num_output_tokens -= (int32_t)(excess - cut);
            num_cut++;
        }
    }
    return num_cut;
}

size_t load_plan_longest(const struct load_plan *plan)
{
    size_t longest = 0;

    for (size_t i = 1; i < plan->count; i++) {
        if (total_tokens(&plan->requests[i]) > total_tokens(&plan->requests[longest])) {
            longest = i;
        }
    }
    return longest;
}

static int compare_falling(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;

    return (left < right) - (left > right);
}

int64_t load_plan_peak_tokens(const struct load_plan *plan, int64_t num_sequences,
                              int32_t num_choices, int32_t block_size)
{
    int64_t *totals = malloc(plan->count * sizeof(*totals));
    int64_t sum = 0;

    if (totals == NULL) {
        /* Without memory to sort them, all count as the longest. */
        int64_t longest = total_tokens(&plan->requests[load_plan_longest(plan)]);
        return num_sequences * (longest + block_size);
    }
    for (size_t i = 0; i < plan->count; i++) {
        int64_t num_blocks = (total_tokens(&plan->requests[i]) + block_size - 1) / block_size;
        totals[i] = num_blocks * block_size;
    }
    qsort(totals, plan->count, sizeof(*totals), compare_falling);
    for (size_t i = 0; i < plan->count && num_sequences > 0; i++) {
        int64_t count = num_sequences < num_choices ? num_sequences : num_choices;
        sum += count * totals[i];
        num_sequences -= count;
    }
    free(totals);
    return sum;
}
