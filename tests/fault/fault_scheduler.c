/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler and its pool, with every single request for memory refused in turn: the right
 * status, nothing leaked, the results untouched; and no request at all once they are created. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "engine/scheduler.h"
#include "fault.h"

static struct sequence sequence_of(int32_t num_draws)
{
    return (struct sequence){
        .deadline_ns = INT64_MAX,
        .max_tokens = 60,
        .num_draws = num_draws,
        .score_begin = INT32_MAX,
        .num_prompt_tokens = 20,
    };
}

/* Two requests, one of them with a fork, in a pool that is too small for all. */
static void run(struct scheduler *scheduler, struct step_plan *plan)
{
    struct sequence first = sequence_of(2), fork = sequence_of(1), last = sequence_of(1);
    struct sequence *sequences[] = {&first, &fork, &last};
    scheduler_add(scheduler, &first);
    scheduler_add(scheduler, &last);
    scheduler_plan(scheduler, plan);
    scheduler_fork(scheduler, &first, &fork);
    scheduler_finish_step(scheduler, plan);
    while (!scheduler_is_idle(scheduler)) {
        scheduler_plan(scheduler, plan);
        scheduler_finish_step(scheduler, plan);
        for (int i = 0; i < 3; i++) {
            if (sequences[i]->num_tokens == 60) {
                scheduler_end(scheduler, sequences[i]);
            }
        }
    }
}

static enum imbrex_status live(void *arg)
{
    (void)arg;
    const struct scheduler_options options = {
        .max_running = 3,
        .max_step_tokens = 32,
        .max_step_samples = 32 + IMBREX_MAX_CHOICES,
        .max_blocks = 4,
    };
    struct kv_pool pool = {0}, no_pool = {0};
    struct scheduler scheduler = {0}, no_scheduler = {0};
    struct step_plan plan = {0}, no_plan = {0};
    struct imbrex_error err = {0};
    enum imbrex_status status = kv_pool_create(7, &pool, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_memory_equal(&pool, &no_pool, sizeof(pool));
        goto end;
    }
    status = scheduler_create(&options, &pool, &scheduler, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_memory_equal(&scheduler, &no_scheduler, sizeof(scheduler));
        goto end;
    }
    status = step_plan_create(&options, &plan, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_memory_equal(&plan, &no_plan, sizeof(plan));
        goto end;
    }
    int64_t num_calls = fault_num_calls(FAULT_MEMORY);
    run(&scheduler, &plan);
    assert_int_equal(fault_num_calls(FAULT_MEMORY), num_calls);
    assert_true(scheduler.num_preemptions > 0);
end:
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    step_plan_destroy(&plan);
    scheduler_destroy(&scheduler);
    kv_pool_destroy(&pool);
    return status;
}

/* Catches: an allocation that is not checked or not freed, a step that allocates. */
static void test_memory(void **state)
{
    (void)state;
    assert_true(fault_each_call(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live, NULL) >=
                13);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("fault_scheduler", tests, NULL, NULL);
}
