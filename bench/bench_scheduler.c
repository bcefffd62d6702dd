/* SPDX-License-Identifier: Apache-2.0 */
/* What a step costs the scheduler, on one core. usage: bench_scheduler
 *
 * 64 sequences run and 1,000 wait, contexts of 4,096 tokens. Prints the median, the 90th and the
 * 99th percentile of 5,000 steps (plan and finish, ends and arrivals in between) for steady
 * decoding, for a step that loses and gets 8 sequences, and for a pool so small that it must
 * preempt; and what it costs to add a sequence and to look for a deadline that has not come. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/scheduler.h"

enum {
    NUM_RUNNING = 64,
    NUM_WAITING = 1000,
    NUM_SEQUENCES = NUM_RUNNING + NUM_WAITING,
    MAX_TOKENS = 4096,
    NUM_STEPS = 5000,
};

struct bench_case {
    const char *name;
    int32_t num_prompt_tokens, max_tokens;
    int32_t num_blocks;
    int32_t num_ending; /* in each step, beside those that are over */
};

static uint32_t next_random(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    return *random >> 8;
}

static int compare(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* Another sequence in the place of one that is over; returns what adding it took. */
static int64_t add(struct scheduler *scheduler, struct sequence *sequence,
                   const struct bench_case *bench_case, int64_t arrival_ns, uint32_t *random)
{
    *sequence = (struct sequence){
        .arrival_ns = arrival_ns,
        .deadline_ns = INT64_MAX - 1,
        .priority = (int32_t)(next_random(random) % 3),
        .max_tokens = bench_case->max_tokens,
        .num_draws = 1,
        .score_begin = INT32_MAX,
        .num_prompt_tokens = bench_case->num_prompt_tokens,
    };
    int64_t begin_ns = clock_now_ns();
    scheduler_add(scheduler, sequence);
    return clock_now_ns() - begin_ns;
}

static bool run_case(const struct bench_case *bench_case, struct sequence *sequences,
                     int64_t *step_ns)
{
    const struct scheduler_options options = {
        .max_running = NUM_RUNNING,
        .max_step_tokens = 256,
        .max_step_samples = 256 + IMBREX_MAX_CHOICES,
        .max_blocks = MAX_TOKENS / KV_BLOCK_SIZE,
        .priority_step_ns = 1000,
        .has_block_edges = true,
    };
    struct kv_pool pool = {0};
    struct scheduler scheduler = {0};
    struct step_plan plan = {0};
    struct imbrex_error err;
    uint32_t random = 1;
    int64_t num_rows = 0, num_added = 0, add_ns = 0, late_ns = 0;
    bool is_right = true;

    if (kv_pool_create(bench_case->num_blocks, &pool, &err) != IMBREX_STATUS_OK ||
        scheduler_create(&options, &pool, &scheduler, &err) != IMBREX_STATUS_OK ||
        step_plan_create(&options, &plan, &err) != IMBREX_STATUS_OK) {
        fprintf(stderr, "bench_scheduler: %s\n", err.message);
        is_right = false;
        goto end;
    }
    for (int32_t i = 0; i < NUM_SEQUENCES; i++) {
        add(&scheduler, &sequences[i], bench_case, i, &random);
    }
    for (int32_t step = -NUM_STEPS / 10; step < NUM_STEPS; step++) {
        int64_t begin_ns = clock_now_ns();
        scheduler_plan(&scheduler, &plan);
        scheduler_finish_step(&scheduler, &plan);
        int64_t end_ns = clock_now_ns();
        int32_t num_ending = bench_case->num_ending;
        for (int32_t i = 0; i < plan.num_rows; i++) {
            struct sequence *sequence = plan.rows[i].sequence;
            bool is_chosen = num_ending > 0 && next_random(&random) % 8 == 0;
            if (sequence->num_tokens == sequence->max_tokens || is_chosen) {
                num_ending -= is_chosen;
                int64_t from_ns = clock_now_ns();
                scheduler_end(&scheduler, sequence);
                end_ns += clock_now_ns() - from_ns;
                int64_t taken_ns = add(&scheduler, sequence, bench_case,
                                       NUM_SEQUENCES + step + NUM_STEPS, &random);
                add_ns += taken_ns;
                end_ns += taken_ns;
                num_added++;
            }
        }
        int64_t late_begin_ns = clock_now_ns();
        is_right &= scheduler_find_late(&scheduler, 0) == NULL;
        late_ns += clock_now_ns() - late_begin_ns;
        if (step >= 0) {
            step_ns[step] = end_ns - begin_ns;
            num_rows += plan.num_rows;
        }
    }
    is_right &= scheduler_check(&scheduler);
    qsort(step_ns, NUM_STEPS, sizeof(*step_ns), compare);
    printf("%-18s %8.2f %8.2f %8.2f us   %5.1f rows %6d waiting %8llu preempted   add %5.2f us   "
           "late %5.2f us\n",
           bench_case->name, (double)step_ns[NUM_STEPS / 2] / 1e3,
           (double)step_ns[NUM_STEPS / 10 * 9] / 1e3, (double)step_ns[NUM_STEPS / 100 * 99] / 1e3,
           (double)num_rows / NUM_STEPS, scheduler.num_waiting,
           (unsigned long long)scheduler.num_preemptions,
           num_added > 0 ? (double)add_ns / (double)num_added / 1e3 : 0.0,
           (double)late_ns / (NUM_STEPS + NUM_STEPS / 10) / 1e3);
end:
    step_plan_destroy(&plan);
    scheduler_destroy(&scheduler);
    kv_pool_destroy(&pool);
    return is_right;
}

int main(void)
{
    static const struct bench_case cases[] = {
        {"steady decode", 16, MAX_TOKENS, NUM_RUNNING * (MAX_TOKENS / KV_BLOCK_SIZE), 0},
        {"8 end and 8 come", 16, MAX_TOKENS, NUM_RUNNING * (MAX_TOKENS / KV_BLOCK_SIZE), 8},
        {"small pool", 128, 512, NUM_RUNNING * 12, 0},
    };
    struct sequence *sequences = calloc(NUM_SEQUENCES, sizeof(*sequences));
    int64_t *step_ns = calloc(NUM_STEPS, sizeof(*step_ns));
    bool is_right = sequences != NULL && step_ns != NULL;
    printf("%-18s   median      p90      p99\n", "scheduler");
    for (size_t i = 0; is_right && i < sizeof(cases) / sizeof(cases[0]); i++) {
        is_right = run_case(&cases[i], sequences, step_ns);
    }
    free(sequences);
    free(step_ns);
    if (!is_right) {
        fprintf(stderr, "bench_scheduler: failed\n");
    }
    return is_right ? 0 : 1;
}
