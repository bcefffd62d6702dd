/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/scheduler.h"

#include <stdint.h>

#include "tests/test.h"

/* A scheduler over a pool, and two plans: of the step that is planned and of the one before. */
struct stage {
    struct kv_pool pool;
    struct scheduler scheduler;
    struct step_plan plans[2];
};

enum { MAX_BLOCKS = 8 };

static struct scheduler_options options_of(int32_t max_running, int32_t max_step_tokens)
{
    return (struct scheduler_options){
        .max_running = max_running,
        .max_step_tokens = max_step_tokens,
        .max_step_samples = max_step_tokens + IMBREX_MAX_CHOICES,
        .max_blocks = MAX_BLOCKS,
        .priority_step_ns = 1000,
        .has_block_edges = true,
    };
}

static void stage_open(struct stage *stage, int32_t num_blocks,
                       const struct scheduler_options *options)
{
    *stage = (struct stage){0};
    assert_int_equal(kv_pool_create(num_blocks, &stage->pool, NULL), IMBREX_STATUS_OK);
    assert_int_equal(scheduler_create(options, &stage->pool, &stage->scheduler, NULL),
                     IMBREX_STATUS_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(step_plan_create(options, &stage->plans[i], NULL), IMBREX_STATUS_OK);
    }
    assert_true(scheduler_is_idle(&stage->scheduler));
}

/* Everything must have come back. */
static void stage_close(struct stage *stage)
{
    assert_true(scheduler_check(&stage->scheduler));
    assert_true(scheduler_is_idle(&stage->scheduler));
    assert_int_equal(stage->pool.num_free, stage->pool.num_blocks);
    for (int i = 0; i < 2; i++) {
        step_plan_destroy(&stage->plans[i]);
    }
    scheduler_destroy(&stage->scheduler);
    scheduler_destroy(&stage->scheduler);
    kv_pool_destroy(&stage->pool);
}

static struct sequence sequence_of(int32_t num_prompt_tokens, int32_t max_tokens)
{
    return (struct sequence){
        .deadline_ns = INT64_MAX,
        .max_tokens = max_tokens,
        .num_draws = 1,
        .score_begin = INT32_MAX,
        .num_prompt_tokens = num_prompt_tokens,
    };
}

static struct step_plan *plan(struct stage *stage, int i)
{
    scheduler_plan(&stage->scheduler, &stage->plans[i]);
    assert_true(scheduler_check(&stage->scheduler));
    return &stage->plans[i];
}

static void finish(struct stage *stage, int i)
{
    scheduler_finish_step(&stage->scheduler, &stage->plans[i]);
    assert_true(scheduler_check(&stage->scheduler));
}

/* A step that is finished before the next one is planned. */
static const struct step_plan *step(struct stage *stage)
{
    plan(stage, 0);
    finish(stage, 0);
    return &stage->plans[0];
}

static void end(struct stage *stage, struct sequence *sequence)
{
    scheduler_end(&stage->scheduler, sequence);
    assert_true(scheduler_check(&stage->scheduler));
}

#define ASSERT_ROW(row, of, begin, count, draws)     \
    do {                                             \
        assert_ptr_equal((row).sequence, (of));      \
        assert_int_equal((row).slot, (of)->slot);    \
        assert_int_equal((row).position, (begin));   \
        assert_int_equal((row).num_tokens, (count)); \
        assert_int_equal((row).num_draws, (draws));  \
    } while (0)

/* Catches: chunks off the block edges or beyond the budget, a draw that is missing, planned twice
 * or inside the prompt, a token behind max_tokens. */
static void test_one_request(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 40);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(80, 83);
    scheduler_add(&stage.scheduler, &a);
    assert_int_equal(a.state, SEQUENCE_STATE_WAITING);
    assert_false(scheduler_is_idle(&stage.scheduler));
    const struct step_plan *p = plan(&stage, 0);
    assert_int_equal(a.state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(a.num_blocks, 5);
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &a, 0, 32, 0);
    assert_int_equal(p->rows[0].first_scored, 32);
    assert_int_equal(p->num_samples, 0);
    finish(&stage, 0);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 32, 32, 0);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 64, 16, 1);
    assert_int_equal(p->num_samples, 1);
    assert_int_equal(a.num_tokens, 81);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 80, 1, 1);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 81, 1, 1);
    assert_int_equal(a.num_tokens, 83);
    p = step(&stage);
    assert_int_equal(p->num_rows, 0);
    end(&stage, &a);
    assert_int_equal(a.state, SEQUENCE_STATE_ENDED);
    assert_int_equal(a.slot, -1);
    end(&stage, &a); /* ending twice is ending once */
    stage_close(&stage);
}

/* Catches: prompts that push decodes out of a step, a budget that is left lying while a later
 * prompt could use it, chunks on edges though nobody asked for them. */
static void test_decode_first(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 19);
    stage_open(&stage, 16, &options);
    struct sequence a = sequence_of(3, 20), b = sequence_of(16, 20), c = sequence_of(40, 50);
    struct sequence d = sequence_of(2, 20);
    scheduler_add(&stage.scheduler, &b);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &c);
    scheduler_add(&stage.scheduler, &d);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &b, 0, 16, 1);
    ASSERT_ROW(p->rows[1], &a, 0, 3, 1);
    p = step(&stage);
    assert_int_equal(p->num_rows, 3);
    ASSERT_ROW(p->rows[0], &b, 16, 1, 1);
    ASSERT_ROW(p->rows[1], &a, 3, 1, 1);
    ASSERT_ROW(p->rows[2], &c, 0, 16, 0);
    assert_int_equal(p->num_tokens, 18); /* d's two do not fit */
    p = step(&stage);
    assert_int_equal(p->num_rows, 3);
    ASSERT_ROW(p->rows[2], &c, 16, 16, 0);
    end(&stage, &a);
    p = step(&stage);
    assert_int_equal(p->num_rows, 3);
    ASSERT_ROW(p->rows[1], &c, 32, 8, 1);
    ASSERT_ROW(p->rows[2], &d, 0, 2, 1);
    end(&stage, &b);
    end(&stage, &c);
    end(&stage, &d);
    stage_close(&stage);

    options.has_block_edges = false;
    stage_open(&stage, 16, &options);
    c = sequence_of(40, 50);
    scheduler_add(&stage.scheduler, &c);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &c, 0, 19, 0);
    end(&stage, &c);
    stage_close(&stage);
}

/* Catches: a later prompt that gets nothing since an earlier one cannot use what is left. */
static void test_leftover_budget(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 20);
    stage_open(&stage, 16, &options);
    struct sequence a = sequence_of(40, 50), b = sequence_of(4, 20);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &a, 0, 16, 0);
    ASSERT_ROW(p->rows[1], &b, 0, 4, 1);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &b, 4, 1, 1);
    ASSERT_ROW(p->rows[1], &a, 16, 16, 0);
    end(&stage, &a);
    end(&stage, &b);
    stage_close(&stage);
}

/* Catches: order by arrival alone or by priority alone, ties that are broken at random, keys that
 * overflow. */
static void test_order(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(1, 16);
    stage_open(&stage, 8, &options);
    enum { COUNT = 7 };
    const struct {
        int64_t arrival_ns;
        int32_t priority, place;
    } cases[COUNT] = {
        {5000, 0, 3}, {5500, 0, 5}, {5500, 0, 6},         {5999, 1, 2},
        {6000, 1, 4}, {7000, 3, 1}, {INT64_MIN, 1000, 0},
    };
    struct sequence sequences[COUNT];
    for (int i = 0; i < COUNT; i++) {
        sequences[i] = sequence_of(4, 10);
        sequences[i].arrival_ns = cases[i].arrival_ns;
        sequences[i].priority = cases[i].priority;
        scheduler_add(&stage.scheduler, &sequences[i]);
        assert_true(scheduler_check(&stage.scheduler));
    }
    for (int place = 0; place < COUNT; place++) {
        const struct step_plan *p = step(&stage);
        assert_int_equal(p->num_rows, 1);
        int64_t found = p->rows[0].sequence - sequences;
        assert_int_equal(cases[found].place, place);
        end(&stage, p->rows[0].sequence);
    }
    stage_close(&stage);
}

/* Catches: somebody small who overtakes the head of the waiting list, a margin that is not kept,
 * a margin that locks out the only one. */
static void test_admission(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 4, &options);
    struct sequence a = sequence_of(20, 32), b = sequence_of(30, 40), c = sequence_of(4, 10);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    scheduler_add(&stage.scheduler, &c);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 1); /* b needs 2 of 2 free blocks and one to spare */
    assert_ptr_equal(p->rows[0].sequence, &a);
    assert_int_equal(c.state, SEQUENCE_STATE_WAITING);
    end(&stage, &a);
    p = step(&stage); /* b has its 2, then c fits with one to spare */
    assert_int_equal(p->num_rows, 2);
    assert_ptr_equal(p->rows[0].sequence, &b);
    assert_ptr_equal(p->rows[1].sequence, &c);
    end(&stage, &b);
    end(&stage, &c);
    struct sequence d = sequence_of(64, 65); /* the whole pool */
    scheduler_add(&stage.scheduler, &d);
    p = step(&stage);
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &d, 0, 64, 1);
    end(&stage, &d);
    stage_close(&stage);
}

/* Catches: an urgent request that waits for one that comes after it, the wrong victim, a victim for
 * nothing, work that is lost or drawn twice in the recomputation. */
static void test_preempted_by_priority(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    stage_open(&stage, 5, &options);
    struct sequence a = sequence_of(17, 40), b = sequence_of(15, 40), c = sequence_of(60, 80);
    struct sequence d = sequence_of(70, 80);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    step(&stage);
    step(&stage);
    step(&stage); /* b has 17 tokens in 2 blocks: one of 5 is free */
    assert_int_equal(b.num_tokens, 18);
    assert_int_equal(b.num_blocks, 2);
    c.arrival_ns = 100;
    c.priority = 1;
    d.arrival_ns = 100;
    scheduler_add(&stage.scheduler, &d);
    step(&stage);
    assert_int_equal(stage.scheduler.num_preemptions, 0); /* d comes last */
    scheduler_end(&stage.scheduler, &d);
    scheduler_add(&stage.scheduler, &c);
    const struct step_plan *p = step(&stage);
    /* It needs 4 blocks: one is free, b has two, a has two. */
    assert_int_equal(stage.scheduler.num_preemptions, 2);
    assert_int_equal(a.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(b.num_preemptions, 1);
    assert_int_equal(b.num_computed, 0);
    assert_int_equal(b.num_tokens, 19);
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &c, 0, 60, 1);
    assert_ptr_equal(stage.scheduler.first_waiting, &a);
    end(&stage, &c);
    p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &a, 0, 21, 1);
    ASSERT_ROW(p->rows[1], &b, 0, 19, 1);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 21, 1, 1);
    ASSERT_ROW(p->rows[1], &b, 19, 1, 1);
    end(&stage, &a);
    end(&stage, &b);

    /* A first one that cannot be moved: what comes later is not preempted in vain. */
    a = sequence_of(50, 64);
    a.priority = 3;
    b = sequence_of(10, 40);
    c = sequence_of(20, 40);
    c.priority = 1;
    scheduler_add(&stage.scheduler, &a);
    step(&stage);
    end(&stage, &a);
    a = sequence_of(40, 64);
    a.priority = 3;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    step(&stage);
    assert_int_equal(b.state, SEQUENCE_STATE_RUNNING);
    uint64_t num_before = stage.scheduler.num_preemptions;
    c.num_prompt_tokens = 48;
    c.max_tokens = 64;
    scheduler_add(&stage.scheduler, &c);
    p = step(&stage);
    assert_int_equal(stage.scheduler.num_preemptions, num_before);
    assert_int_equal(c.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(p->num_rows, 2);
    end(&stage, &a);
    end(&stage, &b);
    end(&stage, &c);
    stage_close(&stage);
}

/* Catches: a slot that stays with one who comes later. */
static void test_slot_by_priority(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(1, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(4, 40), b = sequence_of(4, 40);
    scheduler_add(&stage.scheduler, &a);
    step(&stage);
    b.priority = 1;
    scheduler_add(&stage.scheduler, &b);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 1);
    assert_ptr_equal(p->rows[0].sequence, &b);
    assert_int_equal(a.state, SEQUENCE_STATE_WAITING);
    end(&stage, &b);
    end(&stage, &a);
    stage_close(&stage);
}

/* Catches: a decode without a block that stops, takes the wrong victim, or preempts the first. */
static void test_preempted_by_decode(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    stage_open(&stage, 4, &options);
    struct sequence a = sequence_of(15, 60), b = sequence_of(15, 60);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    for (int i = 0; i < 18; i++) {
        assert_int_equal(step(&stage)->num_rows, 2);
    }
    assert_int_equal(stage.pool.num_free, 0);
    assert_int_equal(a.num_computed, 32);
    const struct step_plan *p = step(&stage); /* both are at an edge */
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &a, 32, 1, 1);
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(stage.pool.num_free, 1);
    while (a.num_tokens < 60) {
        assert_int_equal(step(&stage)->num_rows, 1);
    }
    assert_int_equal(a.num_preemptions, 0);
    end(&stage, &a);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &b, 0, 33, 1);
    end(&stage, &b);

    /* The last one that needs a block is its own victim. */
    a = sequence_of(31, 60);
    b = sequence_of(16, 60);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    assert_int_equal(step(&stage)->num_rows, 2);
    assert_int_equal(stage.pool.num_free, 1);
    p = step(&stage); /* b takes the last block */
    assert_int_equal(p->num_rows, 2);
    assert_int_equal(stage.pool.num_free, 0);
    scheduler_truncate(&stage.scheduler, &b, 17);
    assert_int_equal(stage.pool.num_free, 1);
    p = step(&stage); /* now a does */
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &a, 32, 1, 1);
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(a.num_preemptions, 0);
    end(&stage, &a);
    end(&stage, &b);
    stage_close(&stage);
}

/* Catches: blocks or slots given out while a step in flight holds them, a preempted sequence that
 * is admitted too early or overtaken, a sequence that ends in flight and is lost. */
static void test_in_flight(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    stage_open(&stage, 4, &options);
    struct sequence a = sequence_of(15, 60), b = sequence_of(15, 60), c = sequence_of(2, 4);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    for (int i = 0; i < 17; i++) {
        step(&stage);
    }
    plan(&stage, 0); /* both compute position 31 */
    assert_int_equal(stage.plans[0].num_rows, 2);
    scheduler_add(&stage.scheduler, &c);
    const struct step_plan *p = plan(&stage, 1);
    /* b is preempted but held: a is left out, b's blocks suffice for it. */
    assert_int_equal(p->num_rows, 0);
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    assert_true(b.is_preempted);
    assert_int_equal(b.num_blocks, 2);
    assert_true(b.slot >= 0);
    assert_int_equal(a.state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(a.num_preemptions, 0);
    finish(&stage, 0);
    assert_false(b.is_preempted);
    assert_int_equal(b.slot, -1);
    assert_int_equal(stage.pool.num_free, 2);
    p = plan(&stage, 1);
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &a, 32, 1, 1);
    assert_int_equal(c.state, SEQUENCE_STATE_WAITING); /* b comes first */

    /* a ends while step 1 holds it. */
    end(&stage, &a);
    assert_true(a.is_ending);
    assert_int_not_equal(a.state, SEQUENCE_STATE_ENDED);
    assert_true(a.slot >= 0);
    assert_int_equal(a.num_blocks, 3);
    p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 0); /* 3 blocks for b: only one is free */
    finish(&stage, 1);
    assert_int_equal(a.state, SEQUENCE_STATE_ENDED);
    assert_false(a.is_ending);
    p = plan(&stage, 0);
    ASSERT_ROW(p->rows[0], &b, 0, 33, 1);

    /* Preempted, then ended, all in flight. */
    struct sequence d = sequence_of(20, 40);
    d.priority = 1;
    scheduler_add(&stage.scheduler, &d);
    p = plan(&stage, 1);
    assert_int_equal(p->num_rows, 0);
    assert_true(b.is_preempted);
    end(&stage, &b);
    assert_true(b.is_ending);
    assert_false(b.is_preempted);
    finish(&stage, 0);
    assert_int_equal(b.state, SEQUENCE_STATE_ENDED);
    p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &d, 0, 20, 1);
    ASSERT_ROW(p->rows[1], &c, 0, 2, 1);
    end(&stage, &c);
    end(&stage, &d);
    stage_close(&stage);
}

/* Catches: more victims than the one whose blocks come back with the step in flight, blocks that
 * two count on, a block that only a copy keeps and that is not waited for. */
static void test_returning_blocks(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    struct sequence sequences[4];
    for (int round = 0; round < 2; round++) {
        stage_open(&stage, 8, &options);
        for (int i = 0; i < 4; i++) {
            sequences[i] = sequence_of(15, 60);
            scheduler_add(&stage.scheduler, &sequences[i]);
        }
        for (int i = 0; i < 17; i++) {
            assert_int_equal(step(&stage)->num_rows, 4);
        }
        if (round == 1) { /* one block is free, the last one has one */
            scheduler_truncate(&stage.scheduler, &sequences[3], 16);
        }
        assert_int_equal(plan(&stage, 0)->num_rows, 4);
        /* All need a block, but for the last one in the second round. */
        const struct step_plan *p = plan(&stage, 1);
        assert_int_equal(sequences[0].state, SEQUENCE_STATE_RUNNING);
        assert_int_equal(sequences[1].state, SEQUENCE_STATE_RUNNING);
        assert_true(sequences[3].is_preempted);
        if (round == 0) {
            /* Two come back: for the first and the second; the third is its own victim. */
            assert_int_equal(p->num_rows, 0);
        } else {
            /* One is free, one comes back. */
            assert_int_equal(p->num_rows, 1);
            ASSERT_ROW(p->rows[0], &sequences[0], 32, 1, 1);
        }
        assert_true(sequences[2].is_preempted);
        finish(&stage, 0);
        finish(&stage, 1);
        for (int i = 0; i < 4; i++) {
            end(&stage, &sequences[i]);
        }
        stage_close(&stage);
    }

    stage_open(&stage, 6, &options);
    for (int i = 0; i < 3; i++) {
        sequences[i] = sequence_of(15 - i, 60);
        scheduler_add(&stage.scheduler, &sequences[i]);
    }
    for (int i = 0; i < 17; i++) {
        step(&stage);
    }
    plan(&stage, 0);
    assert_int_equal(stage.pool.num_free, 0);
    const struct step_plan *p = plan(&stage, 1);
    assert_int_equal(p->num_rows, 1); /* the second has room in its block */
    ASSERT_ROW(p->rows[0], &sequences[1], 31, 1, 1);
    assert_int_equal(stage.scheduler.num_preemptions, 1);
    finish(&stage, 0);
    finish(&stage, 1);
    for (int i = 0; i < 3; i++) {
        end(&stage, &sequences[i]);
    }
    stage_close(&stage);

    stage_open(&stage, 4, &options);
    int32_t block_idx;
    sequences[0] = sequence_of(16, 60);
    sequences[1] = sequence_of(14, 60);
    scheduler_add(&stage.scheduler, &sequences[0]);
    scheduler_add(&stage.scheduler, &sequences[1]);
    step(&stage);
    for (int i = 0; i < 2; i++) { /* as if two copies read them */
        assert_int_equal(kv_pool_acquire(&stage.pool, &block_idx), IMBREX_STATUS_OK);
        kv_pool_pin(&stage.pool, block_idx);
        kv_pool_release(&stage.pool, block_idx);
    }
    p = step(&stage);
    assert_int_equal(p->num_rows, 1);
    ASSERT_ROW(p->rows[0], &sequences[1], 14, 1, 1);
    assert_int_equal(stage.scheduler.num_preemptions, 0);
    for (int32_t i = 0; i < stage.pool.num_blocks; i++) {
        if (stage.pool.num_pins[i] > 0) {
            kv_pool_unpin(&stage.pool, i);
        }
    }
    end(&stage, &sequences[0]);
    end(&stage, &sequences[1]);
    stage_close(&stage);
}

/* Catches: a preempted sequence that is admitted again while a step still computes for it, although
 * there is room, or whose forks share blocks that are about to go. */
static void test_preempted_waits_for_its_step(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 20);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(40, 60), b = sequence_of(4, 60), fork = sequence_of(4, 60);
    struct sequence urgent = sequence_of(115, 116);
    b.num_draws = 2;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    const struct step_plan *p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &a, 0, 16, 0);
    ASSERT_ROW(p->rows[1], &b, 0, 4, 2);
    urgent.priority = 1;
    scheduler_add(&stage.scheduler, &urgent); /* needs the whole pool */
    assert_int_equal(plan(&stage, 1)->num_rows, 0);
    assert_true(a.is_preempted);
    assert_true(b.is_preempted);
    end(&stage, &urgent);
    scheduler_fork(&stage.scheduler, &b, &fork);
    assert_int_equal(fork.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(stage.pool.num_free, 4);
    assert_int_equal(plan(&stage, 1)->num_rows, 0);
    assert_int_equal(a.state, SEQUENCE_STATE_WAITING);
    finish(&stage, 0);
    p = step(&stage);
    assert_int_equal(p->num_rows, 1); /* b's five are more than what is left */
    ASSERT_ROW(p->rows[0], &a, 0, 16, 0);
    end(&stage, &a);
    p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &b, 0, 5, 1);
    ASSERT_ROW(p->rows[1], &fork, 0, 5, 1);
    end(&stage, &b);
    end(&stage, &fork);
    stage_close(&stage);
}

/* Catches: a sequence planned once though two steps may be in flight, or drawn beyond its end. */
static void test_two_in_flight(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    stage_open(&stage, 4, &options);
    struct sequence a = sequence_of(5, 8);
    scheduler_add(&stage.scheduler, &a);
    const struct step_plan *p = plan(&stage, 0);
    ASSERT_ROW(p->rows[0], &a, 0, 5, 1);
    p = plan(&stage, 1);
    ASSERT_ROW(p->rows[0], &a, 5, 1, 1);
    assert_int_equal(a.num_in_flight, 2);
    finish(&stage, 0);
    p = plan(&stage, 0);
    ASSERT_ROW(p->rows[0], &a, 6, 1, 1);
    finish(&stage, 1);
    assert_int_equal(plan(&stage, 1)->num_rows, 0);
    end(&stage, &a);
    assert_false(scheduler_is_idle(&stage.scheduler));
    finish(&stage, 0);
    stage_close(&stage);
}

/* Catches: a fork that writes into blocks of its parent or the other way round, a copy too many, a
 * source that is given out before it has been copied, slots copied wrong, forks out of order. */
static void test_fork(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(20, 40), b = sequence_of(20, 40), c = sequence_of(20, 40);
    struct sequence later = sequence_of(4, 40);
    a.num_draws = 3;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &later);
    const struct step_plan *p = plan(&stage, 0);
    ASSERT_ROW(p->rows[0], &a, 0, 20, 3);
    assert_int_equal(p->num_samples, 4);
    assert_int_equal(a.num_tokens, 21);
    scheduler_fork(&stage.scheduler, &a, &b);
    scheduler_fork(&stage.scheduler, &a, &c);
    finish(&stage, 0);
    assert_int_equal(b.num_tokens, 21);
    assert_int_equal(b.num_computed, 20);
    assert_int_equal(stage.pool.num_free, 8 - 3);
    int32_t shared = stage.scheduler.block_tables[a.slot * MAX_BLOCKS + 1];
    p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 4);
    ASSERT_ROW(p->rows[0], &a, 20, 1, 1);
    ASSERT_ROW(p->rows[1], &b, 20, 1, 1);
    ASSERT_ROW(p->rows[2], &c, 20, 1, 1);
    ASSERT_ROW(p->rows[3], &later, 4, 1, 1);
    assert_int_equal(p->num_block_copies, 2); /* the last one keeps the original */
    assert_int_equal(p->block_copies[0].source, shared);
    assert_int_equal(p->block_copies[1].source, shared);
    assert_int_equal(p->block_copies[0].destination,
                     stage.scheduler.block_tables[a.slot * MAX_BLOCKS + 1]);
    assert_int_equal(stage.scheduler.block_tables[c.slot * MAX_BLOCKS + 1], shared);
    assert_int_equal(p->num_slot_copies, 2);
    assert_int_equal(p->slot_copies[0].source, a.slot);
    assert_int_equal(p->slot_copies[0].destination, b.slot);
    assert_int_equal(p->slot_copies[0].num_tokens, 20);
    assert_int_equal(p->slot_copies[1].destination, c.slot);
    finish(&stage, 0);
    assert_int_equal(stage.pool.num_free, 8 - 5);
    p = step(&stage);
    assert_int_equal(p->num_block_copies + p->num_slot_copies, 0);
    end(&stage, &a);
    end(&stage, &b);
    end(&stage, &c);
    end(&stage, &later);
    stage_close(&stage);
}

/* Catches: the source of a copy in flight that is given out because its last user has left. */
static void test_copy_source_is_kept(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 4, &options);
    struct sequence a = sequence_of(4, 10), b = sequence_of(4, 10), c = sequence_of(4, 10);
    struct sequence leaving = sequence_of(20, 40);
    a.num_draws = 3;
    scheduler_add(&stage.scheduler, &leaving);
    scheduler_add(&stage.scheduler, &a);
    assert_int_equal(plan(&stage, 0)->num_rows, 2);
    scheduler_fork(&stage.scheduler, &a, &b);
    scheduler_fork(&stage.scheduler, &a, &c);
    end(&stage, &leaving);
    /* a gets the one free block; b and c wait for those of the one that leaves. */
    const struct step_plan *p = plan(&stage, 1);
    assert_int_equal(p->num_rows, 1);
    assert_int_equal(p->num_block_copies, 1);
    assert_int_equal(stage.scheduler.num_preemptions, 0);
    end(&stage, &b);
    end(&stage, &c);
    assert_int_equal(stage.pool.num_users[p->block_copies[0].source], 0);
    assert_int_equal(stage.pool.num_free, 0);
    finish(&stage, 0);
    assert_int_equal(stage.pool.num_free, 2);
    finish(&stage, 1);
    assert_int_equal(stage.pool.num_free, 3);
    end(&stage, &a);
    stage_close(&stage);
}

/* Catches: copies on a block edge, where nothing is shared that is written. */
static void test_fork_on_edge(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(32, 40), b = sequence_of(32, 40);
    a.num_draws = 2;
    scheduler_add(&stage.scheduler, &a);
    step(&stage);
    scheduler_fork(&stage.scheduler, &a, &b);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    assert_int_equal(p->num_block_copies, 0);
    assert_int_equal(stage.pool.num_free, 8 - 4);
    end(&stage, &a);
    end(&stage, &b);
    stage_close(&stage);
}

/* Catches: forks that are lost without a slot, that share blocks which are gone, that score the
 * prompt again, or that come after others. */
static void test_fork_without_parent(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(20, 40), b = sequence_of(20, 40), c = sequence_of(20, 40);
    struct sequence other = sequence_of(4, 40);
    a.num_draws = 3;
    a.score_begin = 0;
    b.score_begin = 0;
    c.score_begin = 0;
    scheduler_add(&stage.scheduler, &other);
    step(&stage);
    a.priority = 1;
    b.priority = 1;
    c.priority = 1;
    scheduler_add(&stage.scheduler, &a);
    step(&stage);
    scheduler_fork(&stage.scheduler, &a, &b); /* other has the second slot */
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    assert_int_equal(b.num_computed, 0);
    assert_int_equal(b.num_tokens, 21);
    end(&stage, &a);
    scheduler_fork(&stage.scheduler, &a, &c); /* there is a slot but no parent */
    assert_int_equal(c.state, SEQUENCE_STATE_WAITING);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_slot_copies, 0);
    assert_int_equal(p->num_rows, 2); /* both forks come before the other one */
    ASSERT_ROW(p->rows[0], &b, 0, 21, 1);
    ASSERT_ROW(p->rows[1], &c, 0, 21, 1);
    assert_int_equal(p->num_samples, 2);
    assert_int_equal(other.state, SEQUENCE_STATE_WAITING);
    end(&stage, &other);
    end(&stage, &b);
    end(&stage, &c);
    stage_close(&stage);
}

/* Catches: a fork that overtakes somebody who waits for a slot. */
static void test_fork_in_order(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 32);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(4, 20), b = sequence_of(4, 20), urgent = sequence_of(4, 20);
    a.num_draws = 2;
    urgent.priority = 1;
    scheduler_add(&stage.scheduler, &a);
    step(&stage);
    scheduler_add(&stage.scheduler, &urgent);
    scheduler_fork(&stage.scheduler, &a, &b);
    assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &a, 4, 1, 1);
    ASSERT_ROW(p->rows[1], &urgent, 0, 4, 1);
    end(&stage, &a);
    end(&stage, &b);
    end(&stage, &urgent);
    stage_close(&stage);
}

/* Catches: a request that takes the slots which the choices of an earlier one are about to need, so
 * that they compute the prompt again. */
static void test_fork_slots_are_kept(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(4, 20), b = sequence_of(4, 20), c = sequence_of(4, 20);
    struct sequence later[2] = {sequence_of(4, 20), sequence_of(4, 20)};
    a.num_draws = 3;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &later[0]);
    scheduler_add(&stage.scheduler, &later[1]);
    const struct step_plan *p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &a, 0, 4, 3);
    ASSERT_ROW(p->rows[1], &later[0], 0, 4, 1);
    scheduler_fork(&stage.scheduler, &a, &b);
    scheduler_fork(&stage.scheduler, &a, &c);
    finish(&stage, 0);
    assert_int_equal(b.state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(c.state, SEQUENCE_STATE_RUNNING);
    p = step(&stage);
    assert_int_equal(p->num_rows, 4);
    assert_int_equal(later[1].state, SEQUENCE_STATE_WAITING);
    end(&stage, &b);
    step(&stage);
    assert_int_equal(later[1].state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(stage.scheduler.num_preemptions, 0);
    end(&stage, &a);
    end(&stage, &c);
    end(&stage, &later[0]);
    end(&stage, &later[1]);
    stage_close(&stage);
}

/* Catches: slot copies of one step that depend on each other, or that a fork without a step leaves
 * behind. */
static void test_fork_slots(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(20, 40), b = sequence_of(20, 40), c = sequence_of(20, 40);
    struct sequence d = sequence_of(4, 40), e = sequence_of(4, 40);
    a.num_draws = 3;
    d.num_draws = 2;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &d);
    plan(&stage, 0);
    scheduler_fork(&stage.scheduler, &a, &b);
    struct step_slot_copy copy = stage.scheduler.slot_copies[0];
    assert_ptr_equal(scheduler_fork_of(&stage.scheduler, &copy), &b);
    end(&stage, &b); /* without a step: its copy goes with it */
    assert_int_equal(stage.scheduler.num_slot_copies, 0);
    assert_null(scheduler_fork_of(&stage.scheduler, &copy));
    end(&stage, &a); /* step 0 holds it: its blocks can be shared */
    scheduler_fork(&stage.scheduler, &a, &c);
    assert_int_equal(c.state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(c.slot, copy.destination);
    assert_null(scheduler_fork_of(&stage.scheduler, &copy)); /* another one's slot by now */
    finish(&stage, 0);
    assert_int_equal(a.state, SEQUENCE_STATE_ENDED);
    int32_t parent_slot = stage.scheduler.slot_copies[0].source;
    assert_null(stage.scheduler.owners[parent_slot]);
    scheduler_fork(&stage.scheduler, &d, &e);
    assert_int_equal(e.state, SEQUENCE_STATE_RUNNING);
    assert_int_not_equal(e.slot, parent_slot);
    const struct step_plan *p = step(&stage);
    assert_int_equal(p->num_slot_copies, 2);
    assert_int_equal(p->slot_copies[0].source, parent_slot);
    assert_int_equal(p->slot_copies[0].destination, c.slot);
    assert_int_equal(p->slot_copies[1].source, d.slot);
    assert_int_equal(p->slot_copies[1].destination, e.slot);
    end(&stage, &c);
    end(&stage, &d);
    end(&stage, &e);
    stage_close(&stage);
}

/* Catches: a first sequence that preempts itself when its only block is shared with one that is
 * about to leave. */
static void test_first_waits_for_sharer(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 16 + 1);
    stage_open(&stage, 1, &options);
    struct sequence a = sequence_of(4, 10), b = sequence_of(4, 10);
    a.num_draws = 2;
    scheduler_add(&stage.scheduler, &a);
    plan(&stage, 0);
    plan(&stage, 1);
    scheduler_fork(&stage.scheduler, &a, &b);
    end(&stage, &a); /* step 1 holds it */
    finish(&stage, 0);
    const struct step_plan *p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 0);
    assert_int_equal(b.state, SEQUENCE_STATE_RUNNING);
    finish(&stage, 1);
    p = plan(&stage, 0);
    assert_int_equal(p->num_rows, 1);
    assert_int_equal(p->num_block_copies, 0);
    assert_int_equal(p->num_slot_copies, 1); /* kept over the empty plan */
    assert_int_equal(b.num_preemptions, 0);
    finish(&stage, 0);
    end(&stage, &b);
    stage_close(&stage);
}

static void ignore_block(void *user, int32_t block_idx)
{
    (void)user, (void)block_idx;
}

/* Of a pool whose block 0 alone is ever kept. */
static void forget_first(void *user)
{
    kv_pool_forget(user, 0);
}

/* The parent has filled the block that it shares, so that it is kept, and is gone when its fork
 * comes to write. Catches: a fork that writes into what others may find, or that waits for ever
 * where there is no second block. */
static void test_fork_beside_kept_block(void **state)
{
    (void)state;
    for (int32_t num_blocks = 1; num_blocks <= 2; num_blocks++) {
        struct stage stage;
        struct scheduler_options options = options_of(2, 16 + 1);
        stage_open(&stage, num_blocks, &options);
        stage.pool.keeper = (struct kv_pool_keeper){.user = &stage.pool,
                                                    .idle = ignore_block,
                                                    .busy = ignore_block,
                                                    .make_room = forget_first};
        struct sequence a = sequence_of(15, 20), b = sequence_of(15, 20);
        a.num_draws = 2;
        scheduler_add(&stage.scheduler, &a);
        plan(&stage, 0);
        assert_int_equal(plan(&stage, 1)->num_rows, 1); /* fills the block */
        scheduler_fork(&stage.scheduler, &a, &b);
        finish(&stage, 0);
        assert_int_equal(stage.scheduler.block_tables[a.slot * MAX_BLOCKS], 0);
        kv_pool_keep(&stage.pool, 0);
        end(&stage, &a);
        finish(&stage, 1);
        const struct step_plan *p = step(&stage);
        if (num_blocks == 2) {
            assert_int_equal(p->num_block_copies, 1);
            assert_int_equal(p->block_copies[0].source, 0);
            ASSERT_ROW(p->rows[0], &b, 15, 1, 1);
        } else {
            assert_int_equal(p->num_rows, 0);
            assert_int_equal(b.state, SEQUENCE_STATE_WAITING);
            p = step(&stage);
            ASSERT_ROW(p->rows[0], &b, 0, 16, 1);
        }
        assert_int_equal(b.num_preemptions, num_blocks == 1);
        end(&stage, &b);
        if (kv_pool_is_cached(&stage.pool, 0)) {
            kv_pool_forget(&stage.pool, 0);
        }
        stage_close(&stage);
    }
}

/* Catches: scored positions counted wrong at the prompt's end, scored twice after a preemption, a
 * prompt that is only scored and draws, or computes its last token. */
static void test_scores(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 32);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(40, 50);
    a.score_begin = 3;
    scheduler_add(&stage.scheduler, &a);
    const struct step_plan *p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 0, 32, 0);
    assert_int_equal(p->rows[0].first_scored, 3);
    assert_int_equal(p->num_samples, 29);
    struct sequence urgent = sequence_of(100, 101);
    urgent.priority = 1;
    scheduler_add(&stage.scheduler, &urgent); /* 7 blocks: a has 3 of 8 */
    p = step(&stage);
    assert_int_equal(a.state, SEQUENCE_STATE_WAITING);
    end(&stage, &urgent);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 0, 32, 0);
    assert_int_equal(p->rows[0].first_scored, 32);
    assert_int_equal(p->num_samples, 0);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 32, 8, 1);
    assert_int_equal(p->rows[0].first_scored, 32);
    assert_int_equal(p->num_samples, 8); /* 7 scored, the last is drawn */
    p = step(&stage);
    assert_int_equal(p->rows[0].first_scored, 41);
    assert_int_equal(p->num_samples, 1);
    end(&stage, &a);

    struct sequence b = sequence_of(33, 33), c = sequence_of(1, 1);
    b.num_draws = 0;
    b.score_begin = 0;
    c.num_draws = 0;
    c.score_begin = 0;
    scheduler_add(&stage.scheduler, &b);
    scheduler_add(&stage.scheduler, &c);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &b, 0, 32, 0);
    assert_int_equal(p->num_samples, 32);
    assert_int_equal(b.num_blocks, 2);
    assert_int_equal(b.num_computed, sequence_num_wanted(&b));
    p = step(&stage);
    assert_int_equal(p->num_rows, 1); /* nothing is left of b */
    ASSERT_ROW(p->rows[0], &c, 0, 1, 0);
    assert_int_equal(p->num_samples, 0);
    assert_int_equal(p->rows[0].first_scored, 1);
    assert_int_equal(c.num_computed, sequence_num_wanted(&c));
    assert_int_equal(step(&stage)->num_rows, 0);
    end(&stage, &b);
    end(&stage, &c);
    stage_close(&stage);
}

/* Catches: more samples in a step than there is room for, a row that is shortened off the edges, a
 * first prompt that never gets its draws. */
static void test_sample_budget(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    stage_open(&stage, 16, &options); /* 128 samples */
    struct sequence patient = sequence_of(100, 120), urgent = sequence_of(4, 20);
    patient.num_draws = 50;
    patient.score_begin = 64;
    urgent.num_draws = 64;
    urgent.priority = 1;
    scheduler_add(&stage.scheduler, &patient);
    const struct step_plan *p = step(&stage);
    ASSERT_ROW(p->rows[0], &patient, 0, 64, 0);
    assert_int_equal(p->num_samples, 0);
    scheduler_add(&stage.scheduler, &urgent);
    /* 64 samples are left: the draws and the 35 scored positions of the rest do not fit. */
    p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[0], &urgent, 0, 4, 64);
    ASSERT_ROW(p->rows[1], &patient, 64, 32, 0);
    assert_int_equal(p->num_samples, 64 + 32);
    p = step(&stage);
    assert_int_equal(p->num_rows, 2);
    ASSERT_ROW(p->rows[1], &patient, 96, 4, 50);
    assert_int_equal(p->num_samples, 1 + 3 + 50);
    end(&stage, &patient);
    end(&stage, &urgent);
    stage_close(&stage);
}

/* Catches: refused drafts that stay in the cache, blocks that stay behind. */
static void test_truncate(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 32);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(14, 60);
    scheduler_add(&stage.scheduler, &a);
    while (a.num_tokens < 35) {
        step(&stage);
    }
    assert_int_equal(a.num_blocks, 3);
    scheduler_truncate(&stage.scheduler, &a, 33);
    assert_int_equal(a.num_computed, 32);
    assert_int_equal(a.num_blocks, 2);
    const struct step_plan *p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 32, 1, 1);
    assert_int_equal(a.num_blocks, 3);
    scheduler_truncate(&stage.scheduler, &a, 15);
    assert_int_equal(a.num_blocks, 1);
    assert_int_equal(a.num_computed, 14);
    assert_true(scheduler_check(&stage.scheduler));
    while (a.num_tokens < 40) {
        step(&stage);
    }
    /* While it is computed again it keeps the blocks of what is left. */
    struct sequence urgent = sequence_of(100, 101);
    urgent.priority = 1;
    scheduler_add(&stage.scheduler, &urgent);
    step(&stage);
    end(&stage, &urgent);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 0, 32, 0);
    scheduler_truncate(&stage.scheduler, &a, 36);
    assert_int_equal(a.num_blocks, 3);
    p = step(&stage);
    ASSERT_ROW(p->rows[0], &a, 32, 4, 1);
    end(&stage, &a);
    stage_close(&stage);
}

/* Catches: a deadline that is missed, found early, found in one that has ended, or found only while
 * its sequence runs. */
static void test_deadlines(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(1, 32);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(4, 60), b = sequence_of(4, 60), c = sequence_of(4, 60);
    a.deadline_ns = 300;
    b.deadline_ns = 100;
    c.deadline_ns = 200;
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    scheduler_add(&stage.scheduler, &c);
    step(&stage);
    assert_int_equal(a.state, SEQUENCE_STATE_RUNNING);
    assert_null(scheduler_find_late(&stage.scheduler, 99));
    assert_ptr_equal(scheduler_find_late(&stage.scheduler, 100), &b);
    end(&stage, &b);
    assert_null(scheduler_find_late(&stage.scheduler, 100));
    assert_int_equal(stage.scheduler.next_deadline_ns, 200);
    assert_ptr_equal(scheduler_find_late(&stage.scheduler, 250), &c);
    end(&stage, &c);
    assert_ptr_equal(scheduler_find_late(&stage.scheduler, 300), &a);
    end(&stage, &a);
    assert_null(scheduler_find_late(&stage.scheduler, INT64_MAX - 1));
    stage_close(&stage);
}

/* Catches: a low priority that starves. Every step brings a new request of the highest priority, as
 * much as the pool can hold; the low one, two priorities below, came at time 0. One step is 100 ns
 * long, a priority 1000: those that arrive before 2000 go ahead of it, 20 requests of 4 steps each
 * (one prefill, three draws in all, and the step in which its end is seen); behind them it must be
 * done 4 steps later. */
static void test_low_priority_ends(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(1, 32);
    stage_open(&stage, 2, &options);
    enum { COUNT = 120 };
    struct sequence low = sequence_of(20, 23), high[COUNT];
    scheduler_add(&stage.scheduler, &low);
    int32_t num_steps = 0;
    while (low.state != SEQUENCE_STATE_ENDED) {
        assert_in_range(num_steps, 0, 20 * 4 + 4);
        high[num_steps] = sequence_of(20, 23);
        high[num_steps].arrival_ns = (int64_t)num_steps * 100;
        high[num_steps].priority = 2;
        scheduler_add(&stage.scheduler, &high[num_steps]);
        num_steps++;
        const struct step_plan *p = step(&stage);
        assert_int_equal(p->num_rows, 1);
        struct sequence *running = p->rows[0].sequence;
        if (running->num_tokens == running->max_tokens) {
            end(&stage, running);
        }
    }
    assert_true(num_steps > 20 * 3); /* the others did go ahead */
    for (int32_t i = 0; i < num_steps; i++) {
        end(&stage, &high[i]);
    }
    stage_close(&stage);
}

/* A cache that has up to max_found blocks of everybody's beginning, in blocks of their own. */
struct fake_cache {
    struct kv_pool *pool;
    int32_t max_found, num_arrived, num_left, num_admitted, num_finished;
    const struct sequence *held; /* whose blocks are on their way; NULL: nobody's */
};

static void fake_arrive(void *user, struct sequence *sequence)
{
    assert_int_equal(sequence->num_computed, 0);
    ((struct fake_cache *)user)->num_arrived++;
}

static void fake_leave(void *user, struct sequence *sequence)
{
    assert_int_equal(sequence->slot, -1);
    ((struct fake_cache *)user)->num_left++;
}

static int32_t fake_admit(void *user, struct sequence *sequence, int32_t max_blocks, int32_t *table)
{
    struct fake_cache *cache = user;
    int32_t num_blocks = max_blocks < cache->max_found ? max_blocks : cache->max_found;
    assert_int_equal(sequence->num_blocks, 0);
    for (int32_t i = 0; i < num_blocks; i++) {
        assert_int_equal(kv_pool_acquire(cache->pool, &table[i]), IMBREX_STATUS_OK);
    }
    cache->num_admitted++;
    return num_blocks;
}

static void fake_finish(void *user, struct sequence *sequence)
{
    assert_true(sequence->num_blocks > 0); /* not released yet */
    ((struct fake_cache *)user)->num_finished++;
}

static bool fake_is_held(void *user, const struct sequence *sequence)
{
    return ((struct fake_cache *)user)->held == sequence;
}

/* Catches: a sequence that is admitted while its blocks are on their way, one that overtakes it,
 * one that runs and has no rows meanwhile, one that is held for ever. */
static void test_held(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    stage_open(&stage, 16, &options);
    struct fake_cache cache = {.pool = &stage.pool};
    stage.scheduler.cache = (struct scheduler_cache){
        .user = &cache,
        .arrive = fake_arrive,
        .leave = fake_leave,
        .is_held = fake_is_held,
        .admit = fake_admit,
        .finish = fake_finish,
    };
    struct sequence first = sequence_of(20, 60), second = sequence_of(20, 60);
    struct sequence third = sequence_of(20, 60), urgent = sequence_of(20, 60);
    cache.held = &second;
    scheduler_add(&stage.scheduler, &first);
    scheduler_add(&stage.scheduler, &second);
    scheduler_add(&stage.scheduler, &third);
    assert_int_equal(step(&stage)->num_rows, 1);
    const struct step_plan *planned = step(&stage);
    assert_int_equal(planned->num_rows, 1);
    ASSERT_ROW(planned->rows[0], &first, 20, 1, 1);
    assert_int_equal(cache.num_admitted, 1);
    /* Who goes before it waits for nobody. */
    urgent.priority = 1000;
    scheduler_add(&stage.scheduler, &urgent);
    assert_int_equal(step(&stage)->num_rows, 2);
    cache.held = NULL;
    assert_int_equal(step(&stage)->num_rows, 3);
    assert_int_equal(cache.num_admitted, 3);
    assert_int_equal(second.state, SEQUENCE_STATE_RUNNING);
    assert_int_equal(third.state, SEQUENCE_STATE_WAITING);
    cache.held = &third;
    end(&stage, &third);
    assert_int_equal(cache.num_left, 1);
    end(&stage, &first);
    end(&stage, &second);
    end(&stage, &urgent);
    stage_close(&stage);
}

/* One that was admitted with what turned out to be nothing. Catches: tokens that were planned since
 * and are still counted, scores that are not asked for again, blocks or a slot that come back while
 * a step in flight writes there, or never; an end or a preemption before it that is forgotten. */
static void test_restart(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(3, 64);
    options.max_step_history = 4 * KV_BLOCK_SIZE;
    stage_open(&stage, 16, &options);
    struct fake_cache cache = {.pool = &stage.pool, .max_found = 1};
    stage.scheduler.cache = (struct scheduler_cache){
        .user = &cache,
        .arrive = fake_arrive,
        .leave = fake_leave,
        .admit = fake_admit,
        .finish = fake_finish,
    };
    struct sequence first = sequence_of(40, 60), ending = sequence_of(20, 60);
    first.score_begin = 20;
    scheduler_add(&stage.scheduler, &first);
    scheduler_add(&stage.scheduler, &ending);
    plan(&stage, 0);
    plan(&stage, 1);
    assert_true(first.num_tokens == 42 && first.score_begin == 41);
    scheduler_restart(&stage.scheduler, &first, 40, 20);
    assert_true(scheduler_check(&stage.scheduler) && first.is_spoilt);
    assert_int_equal(first.num_tokens, 40);
    end(&stage, &ending);
    scheduler_restart(&stage.scheduler, &ending, 20, INT32_MAX);
    finish(&stage, 0);
    assert_true(first.is_spoilt && ending.is_spoilt && first.slot >= 0);
    finish(&stage, 1);
    assert_false(first.is_spoilt || ending.is_spoilt);
    assert_int_equal(ending.state, SEQUENCE_STATE_ENDED);
    assert_int_equal(first.slot, -1);
    assert_int_equal(stage.pool.num_free, 16);
    const struct step_plan *planned = step(&stage);
    ASSERT_ROW(planned->rows[0], &first, 16, 24, 1);
    assert_int_equal(planned->rows[0].first_scored, 20);

    /* No step holds it; then one does, but it was preempted before. */
    scheduler_restart(&stage.scheduler, &first, 40, 20);
    assert_true(first.slot == -1 && !first.is_spoilt);
    plan(&stage, 0);
    struct sequence urgent[3];
    for (int32_t i = 0; i < 3; i++) {
        urgent[i] = sequence_of(20, 60);
        urgent[i].priority = 1000;
        scheduler_add(&stage.scheduler, &urgent[i]);
    }
    plan(&stage, 1);
    assert_true(first.is_preempted);
    scheduler_restart(&stage.scheduler, &first, 40, 20);
    assert_true(first.is_spoilt);
    finish(&stage, 0);
    assert_false(first.is_spoilt);
    finish(&stage, 1);
    for (int32_t i = 0; i < 3; i++) {
        end(&stage, &urgent[i]);
    }
    planned = step(&stage);
    ASSERT_ROW(planned->rows[0], &first, 16, 24, 1);
    end(&stage, &first);
    stage_close(&stage);
}

/* Catches: tokens of cached blocks that are computed again or that the history never gets, a prompt
 * without a token left to draw from, a scored position that is skipped, more ids for the history
 * than a step has room for; a cache that is not told of a preemption or an end. */
static void test_cache(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(4, 64);
    options.max_step_history = 3 * KV_BLOCK_SIZE;
    stage_open(&stage, 16, &options);
    struct fake_cache cache = {.pool = &stage.pool, .max_found = 2};
    stage.scheduler.cache = (struct scheduler_cache){
        .user = &cache,
        .arrive = fake_arrive,
        .leave = fake_leave,
        .admit = fake_admit,
        .finish = fake_finish,
    };
    struct sequence first = sequence_of(40, 60), second = sequence_of(32, 60);
    struct sequence third = sequence_of(40, 60), scored = sequence_of(40, 60);
    scored.score_begin = 20;
    scheduler_add(&stage.scheduler, &first);
    scheduler_add(&stage.scheduler, &second);
    scheduler_add(&stage.scheduler, &third);
    scheduler_add(&stage.scheduler, &scored);
    assert_int_equal(cache.num_arrived, 4);

    const struct step_plan *planned = step(&stage);
    assert_int_equal(cache.num_admitted, 4);
    assert_int_equal(planned->num_rows, 2);
    ASSERT_ROW(planned->rows[0], &first, 32, 8, 1);
    assert_int_equal(planned->rows[0].num_history, 32);
    /* Of two whole blocks one is computed, for the draw. */
    ASSERT_ROW(planned->rows[1], &second, 16, 16, 1);
    assert_int_equal(planned->rows[1].num_history, 16);
    assert_int_equal(planned->num_history, 48);

    planned = step(&stage);
    assert_int_equal(planned->num_rows, 4);
    ASSERT_ROW(planned->rows[0], &first, 40, 1, 1);
    assert_int_equal(planned->rows[0].num_history, 0);
    ASSERT_ROW(planned->rows[2], &third, 32, 8, 1);
    ASSERT_ROW(planned->rows[3], &scored, 16, 24, 1);
    assert_int_equal(planned->rows[3].first_scored, 20);
    assert_int_equal(planned->num_history, 48);

    /* One that goes before all others takes a slot. */
    struct sequence urgent = sequence_of(20, 60), waiting = sequence_of(20, 60);
    urgent.priority = 1000;
    scheduler_add(&stage.scheduler, &urgent);
    scheduler_add(&stage.scheduler, &waiting);
    assert_int_equal(cache.num_arrived, 6);
    step(&stage);
    assert_int_equal(scored.num_preemptions, 1);
    assert_int_equal(scored.num_computed, 0);
    assert_int_equal(cache.num_finished, 1);
    assert_int_equal(cache.num_arrived, 7);
    assert_int_equal(cache.num_admitted, 5);
    end(&stage, &waiting);
    end(&stage, &scored);
    assert_int_equal(cache.num_left, 2);
    end(&stage, &first);
    end(&stage, &second);
    end(&stage, &third);
    end(&stage, &urgent);
    assert_int_equal(cache.num_finished, 5);
    stage_close(&stage);
}

/* Catches: a check that sees nothing. */
static void test_check_sees_damage(void **state)
{
    (void)state;
    struct stage stage;
    struct scheduler_options options = options_of(2, 32);
    stage_open(&stage, 8, &options);
    struct sequence a = sequence_of(20, 60), b = sequence_of(4, 60), c = sequence_of(4, 60);
    scheduler_add(&stage.scheduler, &a);
    scheduler_add(&stage.scheduler, &b);
    scheduler_add(&stage.scheduler, &c);
    step(&stage);
    struct scheduler *scheduler = &stage.scheduler;
    assert_true(scheduler_check(scheduler));

#define ASSERT_SEEN(place, value)                 \
    do {                                          \
        __typeof__(place) saved = (place);        \
        (place) = (value);                        \
        assert_false(scheduler_check(scheduler)); \
        (place) = saved;                          \
        assert_true(scheduler_check(scheduler));  \
    } while (0)
    ASSERT_SEEN(a.num_blocks, 1);
    ASSERT_SEEN(a.slot, b.slot);
    ASSERT_SEEN(a.num_computed, 40);
    ASSERT_SEEN(b.state, SEQUENCE_STATE_WAITING);
    ASSERT_SEEN(b.order_key, a.order_key - 1);
    ASSERT_SEEN(b.deadline_ns, INT64_MAX - 1);
    ASSERT_SEEN(c.num_in_flight, 1);
    ASSERT_SEEN(c.num_computed, 1);
    ASSERT_SEEN(c.previous, &a);
    ASSERT_SEEN(scheduler->num_waiting, 2);
    ASSERT_SEEN(scheduler->num_running, 1);
    ASSERT_SEEN(scheduler->num_returning, 1);
    ASSERT_SEEN(scheduler->num_free_slots, 1);
    ASSERT_SEEN(scheduler->owners[a.slot], NULL);
    ASSERT_SEEN(scheduler->running[1], &a);
    int32_t *entry = &scheduler->block_tables[a.slot * MAX_BLOCKS];
    ASSERT_SEEN(entry[0], entry[1]);
    ASSERT_SEEN(stage.pool.num_users[entry[0]], 2);
#undef ASSERT_SEEN
    end(&stage, &a);
    end(&stage, &b);
    end(&stage, &c);
    stage_close(&stage);
}

int run_scheduler_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_request),
        cmocka_unit_test(test_decode_first),
        cmocka_unit_test(test_leftover_budget),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_preempted_by_priority),
        cmocka_unit_test(test_slot_by_priority),
        cmocka_unit_test(test_preempted_by_decode),
        cmocka_unit_test(test_in_flight),
        cmocka_unit_test(test_returning_blocks),
        cmocka_unit_test(test_preempted_waits_for_its_step),
        cmocka_unit_test(test_two_in_flight),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_copy_source_is_kept),
        cmocka_unit_test(test_fork_on_edge),
        cmocka_unit_test(test_fork_without_parent),
        cmocka_unit_test(test_fork_in_order),
        cmocka_unit_test(test_fork_slots_are_kept),
        cmocka_unit_test(test_fork_slots),
        cmocka_unit_test(test_first_waits_for_sharer),
        cmocka_unit_test(test_fork_beside_kept_block),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_sample_budget),
        cmocka_unit_test(test_truncate),
        cmocka_unit_test(test_deadlines),
        cmocka_unit_test(test_low_priority_ends),
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_check_sees_damage),
    };
    return cmocka_run_group_tests_name("scheduler", tests, NULL, NULL);
}
