/* SPDX-License-Identifier: Apache-2.0 */
/* Hand-made steps on the built-in model, on the CPU and on fake devices, against the forward pass
 * called directly. */
#include "engine/executor.h"

#include <stdlib.h>
#include <string.h>

#include "ops/fake/device_fake.h"
#include "tests/test.h"

enum {
    NUM_SEEDS = TEST_SANITIZED ? 4 : 30, /* of the fake device; seed -1 stands for the CPU */
    NUM_SEQS = 3,
    NUM_SLOTS = 4,
    MAX_BLOCKS = 3,
    NUM_BLOCKS = 9,
    CONTEXT_SIZE = 40,
    NUM_STEPS = 11,
    NUM_LOGPROBS = 2,     /* alternatives of each sample */
    LAST_PROMPT_ID = 357, /* of A and C */
};

/* A choice as the engine would keep it: ids the host knows, how it draws, what came with the draws.
 */
struct test_sequence {
    struct sequence sequence; /* first: the batch's source gets it */
    int32_t choice_idx;
    int32_t ids[CONTEXT_SIZE];
    int32_t num_known;
    struct sample_row sampling;
    bool is_plain; /* no biases, no alternatives: what can be a graph */
    struct sample_result results[CONTEXT_SIZE]; /* of the id at that position */
    struct imbrex_logprob top_logprobs[CONTEXT_SIZE][NUM_LOGPROBS];
};

static int32_t token_id(const struct sequence *sequence, int32_t position)
{
    const struct test_sequence *owner = (const struct test_sequence *)(const void *)sequence;
    return position < owner->num_known ? owner->ids[position] : -1;
}

/* Sampling of a draw or a scored position; the rest of the row is left as it is. */
static void set_sampling(const struct test_sequence *sequence, int32_t choice_idx,
                         struct sample_row *row)
{
    struct sample_row filled = sequence->sampling;
    filled.logits_row = row->logits_row;
    filled.slot = row->slot;
    filled.num_tokens = row->num_tokens;
    filled.num_prompt_tokens = row->num_prompt_tokens;
    filled.target_id = row->target_id;
    filled.bias_begin = row->bias_begin;
    filled.choice_idx = choice_idx;
    filled.is_stored = row->target_id < 0 && choice_idx == sequence->choice_idx;
    filled.num_logprobs = sequence->is_plain ? 0 : NUM_LOGPROBS;
    filled.num_bias = row->target_id < 0 && !sequence->is_plain ? 2 : 0;
    *row = filled;
}

/* Of a draw: LAST_PROMPT_ID is likely unless the history knows that it was there, and the last
 * entry decides now and then, so that neither can be missing or stale unseen. */
static void set_bias(const struct sample_row *row, struct imbrex_logit_bias bias[2])
{
    bias[0] = (struct imbrex_logit_bias){.token_id = LAST_PROMPT_ID, .bias = 12.0f};
    bias[1] = (struct imbrex_logit_bias){.token_id = 400 + row->num_tokens,
                                         .bias = row->num_tokens % 3 == 0 ? 40.0f : 0.0f};
}

static void fill_sample_row(const struct sequence *sequence, const struct step_row *row,
                            int32_t draw_idx, struct sample_row *sample_row,
                            struct imbrex_logit_bias *bias)
{
    const struct test_sequence *owner = (const struct test_sequence *)(const void *)sequence;
    (void)row;
    set_sampling(owner, owner->choice_idx + draw_idx, sample_row);
    if (sample_row->num_bias > 0) {
        set_bias(sample_row, bias);
    }
}

static const struct batch_source source = {token_id, fill_sample_row};

struct fixture {
    struct imbrex_model *model;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    *state = &fixture;
    return imbrex_model_open(NULL, NULL, &fixture.model, NULL) != IMBREX_STATUS_OK;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    imbrex_model_close(fixture->model);
    return 0;
}

/* An executor and the steps of one scenario:
 *
 *   step 0     A [0, 7)
 *   step 1     A [7, 20), two draws: A's and C's first token; B [0, 5), scored, and drawn
 *   step 2     A, B decode
 *   step 3..   A, B, C decode, C in copies of A's second block and of its history
 *
 * The copies go by way of another block and another slot, so that their order matters. */
struct scenario {
    struct device *device;
    struct executor *executor;
    struct batch_limits limits;
    int32_t block_tables[NUM_SLOTS * MAX_BLOCKS];
    struct test_sequence sequences[NUM_SEQS];
    struct step_row rows[NUM_STEPS][NUM_SEQS];
    struct step_plan plans[NUM_STEPS];
    struct batch_layout layouts[NUM_STEPS];
    struct step_block_copy block_copies[2];
    struct step_slot_copy slot_copies[2];
    int32_t num_submitted, num_collected; /* steps */
    bool is_plain;                        /* its sequences are */
    struct executor_waits waits;          /* of all steps */
};

static struct executor_options options_of(void)
{
    return (struct executor_options){
        .limits = {.max_tokens = 18,
                   .max_seqs = NUM_SLOTS,
                   .max_blocks = MAX_BLOCKS,
                   .max_samples = 24},
        .context_size = CONTEXT_SIZE,
        .num_blocks = NUM_BLOCKS,
        .num_threads = 1,
        .cpu_features = IMBREX_CPU_ALL,
    };
}

static struct device *create_device(int32_t seed)
{
    struct device *device = NULL;
    assert_int_equal(seed < 0 ? device_cpu_create(&device, NULL)
                              : device_fake_create((uint64_t)seed, &device, NULL),
                     IMBREX_STATUS_OK);
    return device;
}

static struct scenario *create(const struct fixture *fixture, int32_t seed,
                               const struct executor_options *options)
{
    struct imbrex_error err;
    struct scenario *scenario = calloc(1, sizeof(*scenario));
    assert_non_null(scenario);
    scenario->device = create_device(seed);
    scenario->limits = options->limits;
    if (executor_create(fixture->model, scenario->device, options, &scenario->executor, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return scenario;
}

static void destroy(struct scenario *scenario)
{
    executor_destroy(scenario->executor);
    device_destroy(scenario->device);
    free(scenario);
}

static void add_row(struct scenario *scenario, int32_t step, int32_t seq, int32_t position,
                    int32_t num_tokens, int32_t num_draws)
{
    struct step_plan *plan = &scenario->plans[step];
    plan->rows = scenario->rows[step];
    plan->rows[plan->num_rows++] = (struct step_row){
        .sequence = &scenario->sequences[seq].sequence,
        .slot = seq == 2 ? 3 : seq,
        .position = position,
        .num_tokens = num_tokens,
        .first_scored = position + num_tokens,
        .num_draws = num_draws,
    };
    plan->num_tokens += num_tokens;
}

/* Sets the scenario to its beginning; what is on the device stays as it is. */
static void begin(struct scenario *scenario)
{
    const int32_t tables[] = {8, 2, 5, /* A */ 1, 7, -1, /* B */ -1, -1, -1, 8, 0, 3 /* C */};
    const int32_t prompt_lengths[NUM_SEQS] = {20, 5, 20};
    memcpy(scenario->block_tables, tables, sizeof(tables));
    memset(scenario->plans, 0, sizeof(scenario->plans));
    scenario->num_submitted = scenario->num_collected = 0;
    for (int32_t i = 0; i < NUM_SEQS; i++) {
        struct test_sequence *sequence = &scenario->sequences[i];
        *sequence = (struct test_sequence){
            .sequence = {.num_prompt_tokens = prompt_lengths[i]},
            .choice_idx = i == 2,
            .num_known = prompt_lengths[i],
            .is_plain = scenario->is_plain,
            .sampling = {.temperature = i == 1 ? 0.0f : 0.9f,
                         .top_p = 0.95f,
                         .repetition_penalty = 2.0f,
                         .presence_penalty = 0.5f,
                         .seed_low = 11},
        };
        for (int32_t j = 0; j < prompt_lengths[i]; j++) {
            sequence->ids[j] = j == 0 ? 1 : 300 + (i == 1 ? 7 : 3) * j % 101;
        }
        assert_true(i == 1 || sequence->ids[19] == LAST_PROMPT_ID);
    }
    add_row(scenario, 0, 0, 0, 7, 0);
    add_row(scenario, 1, 0, 7, 13, 2);
    add_row(scenario, 1, 1, 0, 5, 1);
    scenario->rows[1][1].first_scored = 1;
    for (int32_t step = 2; step < NUM_STEPS; step++) {
        add_row(scenario, step, 0, 20 + step - 2, 1, 1);
        add_row(scenario, step, 1, 5 + step - 2, 1, 1);
        if (step > 2) {
            add_row(scenario, step, 2, 20 + step - 3, 1, 1);
        }
    }
    scenario->block_copies[0] = (struct step_block_copy){.source = 2, .destination = 4};
    scenario->block_copies[1] = (struct step_block_copy){.source = 4, .destination = 0};
    scenario->slot_copies[0] = (struct step_slot_copy){0, 2, 20, 0};
    scenario->slot_copies[1] = (struct step_slot_copy){2, 3, 20, 0};
    scenario->plans[3].block_copies = scenario->block_copies;
    scenario->plans[3].num_block_copies = 2;
    scenario->plans[3].slot_copies = scenario->slot_copies;
    scenario->plans[3].num_slot_copies = 2;
}

static enum imbrex_status submit(struct scenario *scenario)
{
    int32_t step = scenario->num_submitted;
    batch_fill(&scenario->plans[step], &scenario->limits, scenario->block_tables, &source,
               executor_batch_memory(scenario->executor), &scenario->layouts[step]);
    enum imbrex_status status = executor_submit(scenario->executor, &scenario->plans[step],
                                                &scenario->layouts[step], &scenario->waits);
    scenario->num_submitted += status == IMBREX_STATUS_OK;
    return status;
}

/* Collects a step and gives its ids to their sequences. */
static enum imbrex_status collect(struct scenario *scenario)
{
    struct executor_results results;
    int32_t step = scenario->num_collected++;
    const struct step_plan *plan = &scenario->plans[step];
    enum imbrex_status status = executor_collect(scenario->executor, &results);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    assert_int_equal(scenario->layouts[step].max_logprobs,
                     scenario->layouts[step].num_samples > 0 && !scenario->is_plain ? NUM_LOGPROBS
                                                                                    : 0);
    int32_t sample = 0;
    for (int32_t i = 0; i < plan->num_rows; i++) {
        const struct step_row *row = &plan->rows[i];
        struct test_sequence *owner = (struct test_sequence *)(void *)row->sequence;
        int32_t num_scored = batch_num_scored(row);
        for (int32_t j = 0; j < num_scored + row->num_draws; j++, sample++) {
            /* A's second draw is C's first token. */
            bool is_fork = j > num_scored;
            struct test_sequence *taker = is_fork ? &scenario->sequences[2] : owner;
            int32_t position =
                j < num_scored ? row->first_scored + j + 1 : row->position + row->num_tokens;
            taker->results[position] = results.results[sample];
            if (!scenario->is_plain) {
                memcpy(taker->top_logprobs[position],
                       results.top_logprobs + (ptrdiff_t)sample * NUM_LOGPROBS,
                       sizeof(taker->top_logprobs[position]));
            }
            if (j >= num_scored) {
                assert_int_equal(taker->num_known, position);
                taker->ids[taker->num_known++] = results.results[sample].token_id;
            }
        }
    }
    assert_int_equal(sample,
                     scenario->layouts[step].num_samples - scenario->layouts[step].num_padding);
    return IMBREX_STATUS_OK;
}

/* Runs what is left of the scenario, as many steps in flight as the executor allows. Returns the
 * first failure, with no step left in flight. */
static enum imbrex_status run(struct scenario *scenario)
{
    int32_t max_in_flight = executor_max_in_flight(scenario->executor);
    enum imbrex_status status = IMBREX_STATUS_OK;
    while (scenario->num_collected < NUM_STEPS && status == IMBREX_STATUS_OK) {
        int32_t num_in_flight = scenario->num_submitted - scenario->num_collected;
        if (num_in_flight < max_in_flight && scenario->num_submitted < NUM_STEPS) {
            status = submit(scenario);
        } else {
            status = collect(scenario);
        }
    }
    while (scenario->num_collected < scenario->num_submitted) {
        enum imbrex_status later = collect(scenario);
        status = status == IMBREX_STATUS_OK ? later : status;
    }
    return status;
}

/* Memory of the forward pass called directly. */
struct direct {
    const struct imbrex_model *model;
    struct backend *backend;
    struct forward_buffers buffers;
    struct memory_region arena_region, kv_region, scratch_region;
    struct kv_view kv;
};

static void direct_create(const struct imbrex_model *model, struct direct *direct)
{
    const struct model_config *config = &model->config;
    struct arena arena = {0};
    size_t block_bytes;
    const struct forward_limits limits = {.max_tokens = CONTEXT_SIZE,
                                          .max_logit_rows = CONTEXT_SIZE,
                                          .max_positions = CONTEXT_SIZE,
                                          .activation_dtype = DTYPE_F32};
    *direct = (struct direct){.model = model};
    forward_buffers_take(&arena, config, &limits, &direct->buffers);
    assert_int_equal(memory_region_map("arena", arena.num_used, &direct->arena_region, NULL),
                     IMBREX_STATUS_OK);
    arena = (struct arena){.base = direct->arena_region.base};
    forward_buffers_take(&arena, config, &limits, &direct->buffers);
    assert_int_equal(memory_region_map("scratch", sample_scratch_bytes(config->vocab_size, 1),
                                       &direct->scratch_region, NULL),
                     IMBREX_STATUS_OK);
    assert_true(kv_block_bytes(config->num_layers, config->num_kv_heads, config->head_dim,
                               KV_DTYPE_F32, &block_bytes));
    assert_int_equal(memory_region_map("kv", MAX_BLOCKS * block_bytes, &direct->kv_region, NULL),
                     IMBREX_STATUS_OK);
    direct->kv = (struct kv_view){.blocks = direct->kv_region.base,
                                  .block_bytes = block_bytes,
                                  .num_layers = config->num_layers,
                                  .num_kv_heads = config->num_kv_heads,
                                  .block_size = KV_BLOCK_SIZE,
                                  .head_dim = config->head_dim};
    assert_int_equal(backend_cpu_create(1, IMBREX_CPU_ALL, NULL, 0, &direct->backend, NULL),
                     IMBREX_STATUS_OK);
}

static void direct_destroy(struct direct *direct)
{
    backend_destroy(direct->backend);
    memory_region_unmap(&direct->arena_region);
    memory_region_unmap(&direct->kv_region);
    memory_region_unmap(&direct->scratch_region);
}

/* Computes the sequence as one chunk, alone, and compares what was drawn and scored of positions
 * [first_result, num_known), bit for bit. */
static void expect_direct(struct direct *direct, const struct test_sequence *sequence,
                          int32_t first_result)
{
    const struct imbrex_model *model = direct->model;
    int32_t num_tokens = sequence->num_known - 1;
    int32_t positions[CONTEXT_SIZE], seq_idx[CONTEXT_SIZE] = {0}, history[CONTEXT_SIZE];
    const int32_t block_table[MAX_BLOCKS] = {0, 1, 2};
    for (int32_t i = 0; i < CONTEXT_SIZE; i++) {
        positions[i] = i;
        history[i] = sequence->ids[i];
    }
    forward_run(&model->config, &model->weights, direct->backend, &direct->kv,
                &(struct forward_batch){.token_ids = sequence->ids,
                                        .positions = positions,
                                        .slot_mapping = positions,
                                        .seq_idx = seq_idx,
                                        .block_tables = block_table,
                                        .num_tokens = num_tokens,
                                        .max_blocks = MAX_BLOCKS},
                &direct->buffers);
    forward_logits(&model->config, &model->weights, direct->backend, positions, num_tokens,
                   &direct->buffers);
    for (int32_t position = first_result; position < sequence->num_known; position++) {
        bool is_drawn = position >= sequence->sequence.num_prompt_tokens;
        struct sample_result result;
        struct imbrex_logprob top_logprobs[NUM_LOGPROBS];
        struct imbrex_logit_bias bias[2];
        struct sample_row row = {.logits_row = position - 1,
                                 .num_tokens = position,
                                 .num_prompt_tokens = sequence->sequence.num_prompt_tokens,
                                 .target_id = is_drawn ? -1 : sequence->ids[position]};
        set_sampling(sequence, sequence->choice_idx, &row);
        row.is_stored = 0;
        set_bias(&row, bias);
        backend_sample(
            direct->backend,
            &(struct sample_params){.logits = direct->buffers.logits,
                                    .rows = &row,
                                    .bias = bias,
                                    .history = {.token_ids = history, .stride = CONTEXT_SIZE},
                                    .results = &result,
                                    .top_logprobs = top_logprobs,
                                    .scratch = direct->scratch_region.base,
                                    .num_logits_rows = num_tokens,
                                    .num_rows = 1,
                                    .vocab_size = model->config.vocab_size,
                                    .num_ids = model->config.vocab_size,
                                    .max_logprobs = NUM_LOGPROBS});
        const struct sample_result *found = &sequence->results[position];
        assert_int_equal(found->token_id, result.token_id);
        assert_int_equal(found->token_id, sequence->ids[position]);
        assert_memory_equal(&found->logprob, &result.logprob, sizeof(float));
        assert_int_equal(found->num_top, sequence->is_plain ? 0 : NUM_LOGPROBS);
        if (!sequence->is_plain) {
            assert_memory_equal(sequence->top_logprobs[position], top_logprobs,
                                sizeof(top_logprobs));
        }
    }
}

static void expect_all_direct(const struct fixture *fixture, const struct scenario *scenario)
{
    struct direct direct;
    direct_create(fixture->model, &direct);
    assert_int_equal(scenario->sequences[0].num_known, 20 + NUM_STEPS - 1);
    assert_int_equal(scenario->sequences[1].num_known, 5 + NUM_STEPS - 1);
    assert_int_equal(scenario->sequences[2].num_known, 20 + NUM_STEPS - 2);
    expect_direct(&direct, &scenario->sequences[0], 20);
    expect_direct(&direct, &scenario->sequences[1], 2); /* its scores begin at position 1 */
    expect_direct(&direct, &scenario->sequences[2], 20);
    direct_destroy(&direct);
}

/* Catches: chunks, mixed batches, forks, copies in the wrong order, ids that only the device knows,
 * scored positions: all must give what the forward pass gives for the sequence alone. On fake
 * devices: results read before they are there, inputs overwritten while a step still reads them,
 * anything that relies on work being done when the call returns. */
static void test_scenario(void **state)
{
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct executor_options options = options_of();
        struct scenario *scenario = create(*state, seed, &options);
        assert_int_equal(executor_max_in_flight(scenario->executor), seed < 0 ? 1 : 2);
        for (int32_t pass = 0; pass < 2; pass++) {
            begin(scenario);
            assert_int_equal(run(scenario), IMBREX_STATUS_OK);
            expect_all_direct(*state, scenario);
        }
        /* Or the fork proves nothing. */
        assert_memory_not_equal(scenario->sequences[0].ids, scenario->sequences[2].ids,
                                29 * sizeof(int32_t));
        destroy(scenario);
    }
}

/* Steps of the scenario's end, which decode three sequences. */
enum { NUM_DECODE_STEPS = NUM_STEPS - 3 };

/* Catches: padding that changes what others compute or is sampled from, in steps that are no graphs
 * because they have biases and alternatives; a copy of the weights that differs from the model's.
 */
static void test_padded(void **state)
{
    for (int32_t seed = -1; seed < NUM_SEEDS / 3; seed++) {
        struct executor_options options = options_of();
        options.limits.pads_decode = true;
        options.places_weights = true;
        options.max_logits_bytes = (size_t)(seed + 2) * 1024; /* logits in pieces too */
        struct scenario *scenario = create(*state, seed, &options);
        begin(scenario);
        assert_int_equal(run(scenario), IMBREX_STATUS_OK);
        expect_all_direct(*state, scenario);
        assert_int_equal(scenario->layouts[NUM_STEPS - 1].num_padding, 1);
        assert_true(seed < 0 || device_fake_num_launches(scenario->device) == 0);
        destroy(scenario);
    }
}

/* Catches: a graph of another place or shape, inputs that a graph does not see because they were
 * captured instead of read, graphs that are never launched. The scenario is run twice: then each
 * place has its graph, of three sequences padded to four. */
static void test_graphs(void **state)
{
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct executor_options options = options_of();
        options.limits.pads_decode = true;
        struct scenario *scenario = create(*state, seed, &options);
        scenario->is_plain = true;
        for (int32_t pass = 0; pass < 2; pass++) {
            begin(scenario);
            assert_int_equal(run(scenario), IMBREX_STATUS_OK);
            expect_all_direct(*state, scenario);
        }
        if (seed >= 0) {
            /* All of them but the first in each place; step 2 has a shape of its own, which comes
             * twice, in different places. */
            assert_int_equal(device_fake_num_launches(scenario->device), 2 * NUM_DECODE_STEPS - 2);
        }
        destroy(scenario);
    }
}

/* Work of another stream that a step waits for. */
static enum imbrex_status count_done(void *arg, void *stream_handle)
{
    (void)stream_handle;
    ++*(int32_t *)arg;
    return IMBREX_STATUS_OK;
}

/* Every step in parts, each behind an event of another stream. Catches: a layer that is left out or
 * computed twice where parts meet, an embedding, a history, logits or draws that are not done or
 * done with each part, a step that waits and is launched as a graph, an event that is not waited
 * for. */
static void test_waits(void **state)
{
    static const int32_t first_layers[][EXECUTOR_MAX_WAITS] = {
        {0}, {0, 1}, {0, 1, 2, 3, 4}, {0, 4}, {0, 2, 3}};
    static const int32_t num_waits[] = {1, 2, 5, 2, 3};
    for (int32_t seed = -1; seed < NUM_SEEDS / 2; seed++) {
        struct executor_options options = options_of();
        options.limits.pads_decode = true;
        struct scenario *scenario = create(*state, seed, &options);
        int32_t num_done = 0, variant = (seed + 1) % 5;
        scenario->is_plain = true;
        scenario->waits.num_waits = num_waits[variant];
        memcpy(scenario->waits.first_layers, first_layers[variant], sizeof(first_layers[0]));
        for (int32_t i = 0; i < num_waits[variant]; i++) {
            assert_int_equal(
                device_event_create(scenario->device, &scenario->waits.events[i], NULL),
                IMBREX_STATUS_OK);
            assert_int_equal(
                device_run_async(scenario->device, DEVICE_STREAM_KV_IN, count_done, &num_done),
                IMBREX_STATUS_OK);
            assert_int_equal(device_event_record(scenario->device, scenario->waits.events[i],
                                                 DEVICE_STREAM_KV_IN),
                             IMBREX_STATUS_OK);
        }
        for (int32_t pass = 0; pass < 2; pass++) {
            begin(scenario);
            assert_int_equal(submit(scenario), IMBREX_STATUS_OK);
            assert_int_equal(collect(scenario), IMBREX_STATUS_OK);
            assert_int_equal(num_done, num_waits[variant]); /* it was waited for */
            assert_int_equal(run(scenario), IMBREX_STATUS_OK);
            expect_all_direct(*state, scenario);
        }
        assert_true(seed < 0 || device_fake_num_launches(scenario->device) == 0);
        for (int32_t i = 0; i < num_waits[variant]; i++) {
            device_event_destroy(scenario->device, scenario->waits.events[i]);
        }
        destroy(scenario);
    }
}

/* Catches: a device without graphs that is asked again and again, or does not compute. */
static void test_refused_graphs(void **state)
{
    struct executor_options options = options_of();
    options.limits.pads_decode = true;
    struct scenario *scenario = create(*state, 3, &options);
    scenario->is_plain = true;
    device_fake_refuse_graphs(scenario->device);
    begin(scenario);
    assert_int_equal(run(scenario), IMBREX_STATUS_OK);
    expect_all_direct(*state, scenario);
    assert_int_equal(device_fake_num_launches(scenario->device), 0);
    destroy(scenario);
}

/* Catches: more shapes than graphs are kept of: one that is thrown away while a step in flight has
 * it, one that is kept for good, one of the wrong shape. Each shape comes six times: seen once in
 * each of two places, then captured, then launched again. */
static void test_many_shapes(void **state)
{
    enum { SEQS = 64, BLOCKS = 32, USES = 6 };
    static struct test_sequence sequences[SEQS];
    static struct step_row rows[SEQS];
    static int32_t tables[SEQS * BLOCKS];
    const int32_t counts[] = {1, 2, 3, 7, 13, 24, 25, 40, 64};
    const int32_t padded[] = {1, 2, 4, 8, 16, 24, 32, 48, 64};
    const int32_t positions[] = {0, 70, 200, 511}; /* 4, 8, 16 and 32 blocks */
    struct executor_options options = options_of();
    options.limits = (struct batch_limits){.max_tokens = SEQS,
                                           .max_seqs = SEQS,
                                           .max_blocks = BLOCKS,
                                           .max_samples = SEQS,
                                           .pads_decode = true};
    options.context_size = BLOCKS * KV_BLOCK_SIZE;
    options.num_blocks = SEQS;
    struct scenario *scenario = create(*state, 1, &options);
    int32_t num_in_flight = 0;
    for (int32_t i = 0; i < SEQS * BLOCKS; i++) {
        tables[i] = (i / BLOCKS + i % BLOCKS) % SEQS;
    }
    for (int32_t i = 0; i < SEQS; i++) {
        sequences[i] =
            (struct test_sequence){.sequence = {.num_prompt_tokens = 1},
                                   .sampling = {.top_p = 1.0f, .repetition_penalty = 1.0f},
                                   .is_plain = true};
    }
    for (int32_t step = 0; step < 9 * 4 * USES; step++) {
        int32_t count_idx = step / USES / 4, width_idx = step / USES % 4;
        struct step_plan plan = {.rows = rows, .num_rows = counts[count_idx]};
        struct batch_layout layout;
        struct executor_results results;
        for (int32_t i = 0; i < plan.num_rows; i++) {
            rows[i] = (struct step_row){.sequence = &sequences[i].sequence,
                                        .slot = i,
                                        .position = i == 0 ? positions[width_idx] : i,
                                        .num_tokens = 1,
                                        .first_scored = i == 0 ? positions[width_idx] + 1 : i + 1,
                                        .num_draws = 1};
        }
        batch_fill(&plan, &options.limits, tables, &source,
                   executor_batch_memory(scenario->executor), &layout);
        assert_int_equal(layout.num_seqs, padded[count_idx]);
        assert_int_equal(layout.max_blocks, 4 << width_idx);
        assert_int_equal(executor_submit(scenario->executor, &plan, &layout, NULL),
                         IMBREX_STATUS_OK);
        if (++num_in_flight == 2) {
            assert_int_equal(executor_collect(scenario->executor, &results), IMBREX_STATUS_OK);
            assert_true(results.results[0].token_id >= 0);
            num_in_flight--;
        }
    }
    struct executor_results results;
    assert_int_equal(executor_collect(scenario->executor, &results), IMBREX_STATUS_OK);
    assert_int_equal(device_fake_num_launches(scenario->device), 9 * 4 * (USES - 2));
    destroy(scenario);
}

/* Catches: logits that are computed in several pieces and sampled from another piece's rows: room
 * for one, two, three rows, and for a part of one. */
static void test_logits_in_pieces(void **state)
{
    const struct fixture *fixture = *state;
    size_t row_bytes = (size_t)fixture->model->config.vocab_size * sizeof(float);
    const size_t rooms[] = {1, row_bytes, 2 * row_bytes + 1, 3 * row_bytes};
    for (int32_t i = 0; i < 4; i++) {
        struct executor_options options = options_of();
        options.max_logits_bytes = rooms[i];
        struct scenario *scenario = create(fixture, i - 1, &options);
        begin(scenario);
        assert_int_equal(run(scenario), IMBREX_STATUS_OK);
        expect_all_direct(fixture, scenario);
        destroy(scenario);
    }
}

/* Catches: results that depend on the number of threads. */
static void test_threads(void **state)
{
    struct executor_options options = options_of();
    options.num_threads = 3;
    struct scenario *scenario = create(*state, -1, &options);
    begin(scenario);
    assert_int_equal(run(scenario), IMBREX_STATUS_OK);
    expect_all_direct(*state, scenario);
    destroy(scenario);
}

/* Catches: for every call of a whole run that can fail: a status that is lost, a step left on the
 * stream after its submit failed, a later run that feels the failure. */
static void test_failing_calls(void **state)
{
    struct executor_options options = options_of();
    options.limits.pads_decode = true;
    struct scenario *scenario = create(*state, 5, &options);
    scenario->is_plain = true;
    bool has_failed = true;
    int64_t num_failed = 0;
    for (int64_t countdown = 1; has_failed; countdown++) {
        begin(scenario);
        device_fake_fail(scenario->device, DEVICE_FAKE_FAULT_CALL, countdown, IMBREX_STATUS_IO);
        enum imbrex_status status = IMBREX_STATUS_OK;
        while (status == IMBREX_STATUS_OK && scenario->num_submitted < NUM_STEPS) {
            if (scenario->num_submitted - scenario->num_collected == 2) {
                assert_int_equal(collect(scenario), IMBREX_STATUS_OK);
            }
            status = submit(scenario);
        }
        has_failed = status != IMBREX_STATUS_OK;
        if (has_failed) {
            assert_int_equal(status, IMBREX_STATUS_IO);
            assert_int_equal(device_fake_num_pending(scenario->device), 0);
            num_failed++;
        }
        while (scenario->num_collected < scenario->num_submitted) {
            assert_int_equal(collect(scenario), IMBREX_STATUS_OK);
        }
        device_fake_fail(scenario->device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
        if (countdown % 5 == 1) {
            begin(scenario);
            assert_int_equal(run(scenario), IMBREX_STATUS_OK);
            expect_all_direct(*state, scenario);
        }
    }
    /* Upload, work, download and the record of each step but the first, which has no download. */
    assert_true(num_failed > 4 * NUM_STEPS - 1);
    destroy(scenario);
}

/* Catches: failed work or a failed copy that is not told, or told of a step that was submitted when
 * it was known and over; a step behind a failed one that counts as good. */
static void test_failing_steps(void **state)
{
    struct executor_options options = options_of();
    for (int32_t seed = 0; seed < (TEST_SANITIZED ? 1 : 4); seed++) {
        options.limits.pads_decode = seed % 2 == 1;
        struct scenario *scenario = create(*state, seed, &options);
        scenario->is_plain = options.limits.pads_decode;
        for (int32_t fault = DEVICE_FAKE_FAULT_WORK; fault <= DEVICE_FAKE_FAULT_COPY; fault++) {
            enum imbrex_status status = IMBREX_STATUS_CAPACITY;
            int64_t num_failed = 0;
            for (int64_t countdown = 1; status != IMBREX_STATUS_OK; countdown++) {
                begin(scenario);
                device_fake_fail(scenario->device, (enum device_fake_fault)fault, countdown,
                                 IMBREX_STATUS_CAPACITY);
                status = run(scenario);
                if (status != IMBREX_STATUS_OK) {
                    assert_int_equal(status, IMBREX_STATUS_CAPACITY);
                    num_failed++;
                }
                device_fake_fail(scenario->device, (enum device_fake_fault)fault, 0,
                                 IMBREX_STATUS_OK);
                begin(scenario);
                assert_int_equal(run(scenario), IMBREX_STATUS_OK);
            }
            expect_all_direct(*state, scenario);
            /* Copies: an upload for each step, a download but for the first, four of the plan. */
            assert_int_equal(num_failed,
                             fault == DEVICE_FAKE_FAULT_WORK ? NUM_STEPS : 2 * NUM_STEPS - 1 + 4);
        }
        begin(scenario);
        device_fake_fail(scenario->device, DEVICE_FAKE_FAULT_WORK, 1, IMBREX_STATUS_CAPACITY);
        assert_int_equal(submit(scenario), IMBREX_STATUS_OK);
        assert_int_equal(submit(scenario), IMBREX_STATUS_OK);
        assert_int_equal(collect(scenario), IMBREX_STATUS_CAPACITY);
        assert_int_equal(collect(scenario), IMBREX_STATUS_CAPACITY);
        destroy(scenario);
    }
}

/* Catches: a device that failed and is used on, and an executor that cannot be taken down then,
 * with steps in flight. */
static void test_failed_device(void **state)
{
    struct executor_options options = options_of();
    for (int32_t fault = 0; fault < DEVICE_FAKE_FAULT_COUNT; fault++) {
        struct scenario *scenario = create(*state, fault, &options);
        begin(scenario);
        device_fake_fail(scenario->device, (enum device_fake_fault)fault, 9, IMBREX_STATUS_DEVICE);
        assert_int_equal(run(scenario), IMBREX_STATUS_DEVICE);
        begin(scenario);
        assert_int_equal(submit(scenario), IMBREX_STATUS_DEVICE);
        assert_int_equal(device_fake_num_pending(scenario->device), 0);
        destroy(scenario);

        scenario = create(*state, fault, &options);
        begin(scenario);
        device_fake_fail(scenario->device, DEVICE_FAKE_FAULT_WORK, 1, IMBREX_STATUS_DEVICE);
        enum imbrex_status status = submit(scenario);
        status = status == IMBREX_STATUS_OK ? submit(scenario) : status;
        status = status == IMBREX_STATUS_OK ? collect(scenario) : status;
        assert_int_equal(status, IMBREX_STATUS_DEVICE);
        destroy(scenario);
    }
}

struct ranges {
    int32_t depth, num_forward, num_sample, num_other;
};

static void range_begin(void *user, const char *name)
{
    struct ranges *ranges = user;
    assert_int_equal(ranges->depth, 0);
    ranges->depth++;
    if (strcmp(name, "forward") == 0) {
        ranges->num_forward++;
    } else if (strcmp(name, "sample") == 0) {
        ranges->num_sample++;
    } else {
        ranges->num_other++;
    }
}

static void range_end(void *user)
{
    struct ranges *ranges = user;
    ranges->depth--;
}

/* Catches: ranges that do not end, or that are not named as promised. Each step has a forward pass,
 * all but the first have logits and samples too. */
static void test_ranges(void **state)
{
    struct ranges ranges = {0};
    struct executor_options options = options_of();
    options.range_begin = range_begin;
    options.range_end = range_end;
    options.range_user = &ranges;
    struct scenario *scenario = create(*state, -1, &options);
    begin(scenario);
    assert_int_equal(run(scenario), IMBREX_STATUS_OK);
    assert_int_equal(ranges.depth, 0);
    assert_int_equal(ranges.num_forward, 2 * NUM_STEPS - 1);
    assert_int_equal(ranges.num_sample, NUM_STEPS - 1);
    assert_int_equal(ranges.num_other, 0);
    destroy(scenario);
}

/* Catches: sizes that wrap around, a plan that forgets a part which grows with an option. */
static void test_plan(void **state)
{
    const struct fixture *fixture = *state;
    struct imbrex_error err;
    struct executor_plan small, large;
    struct executor_options options = options_of();
    assert_int_equal(executor_plan(fixture->model, &options, &small, &err), IMBREX_STATUS_OK);
    assert_true(small.kv_bytes % (NUM_BLOCKS * KV_BLOCK_ALIGNMENT) == 0);
    options.num_blocks *= 2;
    assert_int_equal(executor_plan(fixture->model, &options, &large, &err), IMBREX_STATUS_OK);
    assert_true(large.kv_bytes == 2 * small.kv_bytes);
    assert_true(large.activation_bytes == small.activation_bytes);
    options.limits.max_samples += 10;
    assert_int_equal(executor_plan(fixture->model, &options, &large, &err), IMBREX_STATUS_OK);
    /* Inputs and results of two steps, on host and device. */
    assert_true(large.batch_bytes >=
                small.batch_bytes + 4 * 10 *
                                        (sizeof(struct sample_row) + sizeof(struct sample_result) +
                                         IMBREX_MAX_LOGPROBS * sizeof(struct imbrex_logprob)));
    options.limits.max_seqs += 100;
    assert_int_equal(executor_plan(fixture->model, &options, &large, &err), IMBREX_STATUS_OK);
    assert_true(large.activation_bytes >=
                small.activation_bytes + 100 * CONTEXT_SIZE * sizeof(int32_t));
    assert_true(large.batch_bytes >=
                small.batch_bytes + 4 * 100 * BATCH_MAX_BIAS * sizeof(struct imbrex_logit_bias));
    options.limits.max_seqs = INT32_MAX;
    struct executor_plan before = large;
    assert_int_equal(executor_plan(fixture->model, &options, &large, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_memory_equal(&large, &before, sizeof(large));
    struct executor *executor = NULL;
    struct device *device = create_device(-1);
    assert_int_equal(executor_create(fixture->model, device, &options, &executor, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_null(executor);
    executor_destroy(NULL);
    device_destroy(device);
}

int run_executor_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scenario),       cmocka_unit_test(test_logits_in_pieces),
        cmocka_unit_test(test_threads),        cmocka_unit_test(test_failing_calls),
        cmocka_unit_test(test_failing_steps),  cmocka_unit_test(test_failed_device),
        cmocka_unit_test(test_ranges),         cmocka_unit_test(test_plan),
        cmocka_unit_test(test_padded),         cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_refused_graphs), cmocka_unit_test(test_many_shapes),
        cmocka_unit_test(test_waits),
    };
    return cmocka_run_group_tests_name("executor", tests, set_up, tear_down);
}
