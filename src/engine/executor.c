/* SPDX-License-Identifier: Apache-2.0 */
/* One stream carries everything: what a step reads was left there by the steps before it, so steps
 * in flight need no events between them. Each has a place of its own for inputs and results, twice:
 * on the host and on the device, laid out alike. */
#include "engine/executor.h"

#include <assert.h>
#include <stdlib.h>

#include "base/clock.h"

#define DEFAULT_LOGITS_BYTES ((size_t)64 << 20)

/* A step's inputs and results in one kind of memory. */
struct place_memory {
    unsigned char *batch;   /* [batch_max_bytes] */
    unsigned char *results; /* see results_layout */
};

/* Where a step that is filled, in flight or read stands. */
struct executor_place {
    struct executor *executor;
    struct place_memory host, device;
    struct device_event *event; /* behind the step */
    struct batch_layout layout;
    int64_t forward_ns, sample_ns; /* written by the step's work */
};

struct executor {
    const struct imbrex_model *model;
    struct device *device;
    struct executor_options options;
    struct ops *ops;
    struct kv_view kv; /* its blocks: device memory, the executor's */

    void *activations; /* device memory that the pieces below lie in */
    struct forward_buffers buffers;
    struct token_history history; /* [max_seqs, context_size] */
    int32_t *token_ids;           /* [max_tokens + max_history] of the step, all known */
    void *ops_scratch;            /* see ops_create; NULL without quantised weights */
    size_t ops_scratch_bytes;
    void *sample_scratch;

    struct memory_region host_places; /* the host memory of all places */
    void *registered;                 /* the same, once the device knows it */
    void *device_places;
    struct executor_place places[EXECUTOR_MAX_IN_FLIGHT];
    int32_t num_in_flight;
    int64_t num_submitted; /* the next step's place follows from it */
};

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* The one statement of what lies in the activations. With arena->base NULL it measures. */
static void take_activations(struct arena *arena, const struct imbrex_model *model,
                             const struct executor_options *options, struct executor *executor)
{
    const struct model_config *config = &model->config;
    int32_t max_tokens = options->limits.max_tokens;
    size_t row_bytes = (size_t)config->vocab_size * sizeof(float);
    size_t logits_bytes =
        options->max_logits_bytes > 0 ? options->max_logits_bytes : DEFAULT_LOGITS_BYTES;
    size_t max_rows = logits_bytes / row_bytes;
    max_rows = max_rows < (size_t)max_tokens ? max_rows : (size_t)max_tokens;

    forward_buffers_take(arena, config, max_tokens, max_rows > 0 ? (int32_t)max_rows : 1,
                         options->context_size, &executor->buffers);
    executor->history.token_ids = arena_take(arena, (size_t)options->limits.max_seqs,
                                             (size_t)options->context_size * sizeof(int32_t));
    executor->history.stride = options->context_size;
    executor->token_ids = arena_take(
        arena, (size_t)max_tokens + (size_t)options->limits.max_history, sizeof(int32_t));
    executor->sample_scratch =
        arena_take(arena, 1, sample_scratch_bytes(config->vocab_size, options->num_threads));
    size_t token_bytes =
        ops_scratch_token_bytes(model->weights.max_quantized_columns) +
        ops_bf16_token_bytes(options->cpu_features, model->weights.max_bf16_columns);
    if (token_bytes > 0) {
        executor->ops_scratch = arena_take(arena, (size_t)max_tokens, token_bytes);
        executor->ops_scratch_bytes = (size_t)max_tokens * token_bytes;
    }
}

/* Results of a step: [num_samples] sample_result, then [num_samples, max_logprobs] imbrex_logprob.
 */
static size_t results_top_begin(size_t num_samples)
{
    return (num_samples * sizeof(struct sample_result) + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT *
           ARENA_ALIGNMENT;
}

static size_t results_bytes(size_t num_samples, size_t max_logprobs)
{
    return results_top_begin(num_samples) +
           num_samples * max_logprobs * sizeof(struct imbrex_logprob);
}

/* The memory of all places in one arena, on the host and on the device alike. */
static void take_places(struct arena *arena, const struct executor_options *options,
                        struct place_memory places[EXECUTOR_MAX_IN_FLIGHT])
{
    size_t batch_bytes = 0;
    if (!batch_max_bytes(&options->limits, &batch_bytes)) {
        arena->overflowed = true;
    }
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        places[i].batch = arena_take(arena, 1, batch_bytes);
        places[i].results = arena_take(
            arena, 1, results_bytes((size_t)options->limits.max_samples, IMBREX_MAX_LOGPROBS));
    }
}

enum imbrex_status executor_plan(const struct imbrex_model *model,
                                 const struct executor_options *options, struct executor_plan *plan,
                                 struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    struct executor_plan planned;
    struct executor measured;
    struct place_memory memory[EXECUTOR_MAX_IN_FLIGHT];
    struct arena activations = {0};
    struct arena places = {0};
    size_t block_bytes;
    take_activations(&activations, model, options, &measured);
    take_places(&places, options, memory);
    planned.activation_bytes = activations.num_used;
    if (activations.overflowed || places.overflowed ||
        !size_mul(places.num_used, 2, &planned.batch_bytes) ||
        !kv_block_bytes(config->num_layers, config->num_kv_heads, config->head_dim, &block_bytes) ||
        !size_mul(block_bytes, (size_t)options->num_blocks, &planned.kv_bytes)) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "%s: %d tokens of context, %d KV blocks and %d sequences in steps of %d "
                         "tokens need more memory than can be addressed",
                         model->path, options->context_size, options->num_blocks,
                         options->limits.max_seqs, options->limits.max_tokens);
    }
    *plan = planned;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_kv(struct executor *executor, size_t kv_bytes,
                                    struct imbrex_error *err)
{
    const struct model_config *config = &executor->model->config;
    void *blocks;
    TRY(device_alloc(executor->device, "the KV cache", kv_bytes, &blocks, err));
    executor->kv = (struct kv_view){
        .blocks = blocks,
        .block_bytes = kv_bytes / (size_t)executor->options.num_blocks,
        .num_layers = config->num_layers,
        .num_kv_heads = config->num_kv_heads,
        .block_size = KV_BLOCK_SIZE,
        .head_dim = config->head_dim,
    };
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_places(struct executor *executor, size_t places_bytes,
                                        struct imbrex_error *err)
{
    struct device *device = executor->device;
    struct place_memory host[EXECUTOR_MAX_IN_FLIGHT];
    struct place_memory on_device[EXECUTOR_MAX_IN_FLIGHT];
    TRY(memory_region_map("the steps' inputs and results", places_bytes, &executor->host_places,
                          err));
    TRY(device_host_register(device, executor->host_places.base, executor->host_places.num_bytes,
                             err));
    executor->registered = executor->host_places.base;
    TRY(device_alloc(device, "the steps' inputs and results", places_bytes,
                     &executor->device_places, err));
    take_places(&(struct arena){.base = executor->host_places.base}, &executor->options, host);
    take_places(&(struct arena){.base = executor->device_places}, &executor->options, on_device);
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        struct executor_place *place = &executor->places[i];
        place->executor = executor;
        place->host = host[i];
        place->device = on_device[i];
        TRY(device_event_create(device, &place->event, err));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_create(struct imbrex_model *model, struct device *device,
                                   const struct executor_options *options,
                                   struct executor **executor, struct imbrex_error *err)
{
    struct executor_plan plan;
    enum imbrex_status status;
    struct executor *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the executor", sizeof(*created));
    }
    created->model = model;
    created->device = device;
    created->options = *options;
    TRY_OR_FAIL(executor_plan(model, options, &plan, err));
    TRY_OR_FAIL(model_fill(model, err));
    TRY_OR_FAIL(create_kv(created, plan.kv_bytes, err));
    TRY_OR_FAIL(
        device_alloc(device, "activations", plan.activation_bytes, &created->activations, err));
    take_activations(&(struct arena){.base = created->activations}, model, options, created);
    TRY_OR_FAIL(create_places(created, plan.batch_bytes / 2, err));
    TRY_OR_FAIL(ops_create(options->num_threads, options->cpu_features, created->ops_scratch,
                           created->ops_scratch_bytes, &created->ops, err));
    *executor = created;
    return IMBREX_STATUS_OK;
fail:
    executor_destroy(created);
    return status;
}

void executor_destroy(struct executor *executor)
{
    if (executor == NULL) {
        return;
    }
    assert(executor->num_in_flight == 0 || executor->device->has_failed);
    ops_destroy(executor->ops);
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        device_event_destroy(executor->device, executor->places[i].event);
    }
    device_free(executor->device, executor->device_places);
    device_host_unregister(executor->device, executor->registered);
    memory_region_unmap(&executor->host_places);
    device_free(executor->device, executor->activations);
    device_free(executor->device, executor->kv.blocks);
    free(executor);
}

int32_t executor_max_in_flight(const struct executor *executor)
{
    return device_is_async(executor->device) ? EXECUTOR_MAX_IN_FLIGHT : 1;
}

const char *executor_kernels_name(const struct executor *executor)
{
    return ops_kernels_name(executor->ops);
}

/* The place of step number `step_idx`. */
static struct executor_place *place_of(struct executor *executor, int64_t step_idx)
{
    return &executor->places[step_idx % executor_max_in_flight(executor)];
}

void *executor_batch_memory(struct executor *executor)
{
    assert(executor->num_in_flight < executor_max_in_flight(executor));
    return place_of(executor, executor->num_submitted)->host.batch;
}

/* Begins a part of a step's work; returns the time. */
static int64_t begin_part(const struct executor *executor, const char *name)
{
    const struct executor_options *options = &executor->options;
    if (options->range_begin != NULL) {
        options->range_begin(options->range_user, name);
    }
    return clock_now_ns();
}

static void end_part(const struct executor *executor, int64_t begin_ns, int64_t *total_ns)
{
    const struct executor_options *options = &executor->options;
    *total_ns += clock_now_ns() - begin_ns;
    if (options->range_end != NULL) {
        options->range_end(options->range_user);
    }
}

/* All layers, over all tokens of the step. */
static void run_forward(struct executor_place *place)
{
    struct executor *executor = place->executor;
    const struct batch_layout *layout = &place->layout;
    void *batch = place->device.batch;
    int64_t begin_ns = begin_part(executor, "forward");
    ops_history(executor->ops, &(struct history_params){
                                   .token_ids = BATCH_ARRAY(int32_t, batch, layout, token_ids),
                                   .slots = BATCH_ARRAY(int32_t, batch, layout, history_slots),
                                   .positions = BATCH_ARRAY(int32_t, batch, layout, positions),
                                   .history = executor->history,
                                   .d = executor->token_ids,
                                   .num_tokens = layout->num_tokens + layout->num_history});
    forward_run(
        &executor->model->config, &executor->model->weights, executor->ops, &executor->kv,
        &(struct forward_batch){.token_ids = executor->token_ids,
                                .positions = BATCH_ARRAY(int32_t, batch, layout, positions),
                                .slot_mapping = BATCH_ARRAY(int32_t, batch, layout, slot_mapping),
                                .seq_idx = BATCH_ARRAY(int32_t, batch, layout, seq_idx),
                                .block_tables = BATCH_ARRAY(int32_t, batch, layout, block_tables),
                                .num_tokens = layout->num_tokens,
                                .max_blocks = layout->max_blocks},
        &executor->buffers);
    end_part(executor, begin_ns, &place->forward_ns);
}

/* Of the step's logits rows [begin, begin + num_rows). */
static void run_logits(struct executor_place *place, int32_t begin, int32_t num_rows)
{
    struct executor *executor = place->executor;
    int64_t begin_ns = begin_part(executor, "forward");
    forward_logits(&executor->model->config, &executor->model->weights, executor->ops,
                   BATCH_ARRAY(int32_t, place->device.batch, &place->layout, logits_tokens) + begin,
                   num_rows, &executor->buffers);
    end_part(executor, begin_ns, &place->forward_ns);
}

/* Ids that can be drawn: the weights may have more rows than the tokenizer ids. */
static int32_t num_drawn_ids(const struct imbrex_model *model)
{
    int32_t vocab_size = model->config.vocab_size;
    return model->tokenizer == NULL
               ? vocab_size
               : min_int32(vocab_size, imbrex_tokenizer_vocab_size(model->tokenizer));
}

/* The step's samples [begin, end), all of logits rows [logits_begin, logits_begin + num_rows). */
static void run_samples(struct executor_place *place, int32_t begin, int32_t end,
                        int32_t logits_begin, int32_t num_rows)
{
    struct executor *executor = place->executor;
    const struct batch_layout *layout = &place->layout;
    void *batch = place->device.batch;
    unsigned char *results = place->device.results;
    struct sample_result *sample_results = (struct sample_result *)(void *)results;
    struct imbrex_logprob *top_logprobs =
        (struct imbrex_logprob *)(void *)(results + results_top_begin((size_t)layout->num_samples));
    int64_t begin_ns = begin_part(executor, "sample");
    ops_sample(executor->ops,
               &(struct sample_params){
                   .logits = executor->buffers.logits,
                   .rows = BATCH_ARRAY(struct sample_row, batch, layout, sample_rows) + begin,
                   .bias = BATCH_ARRAY(struct imbrex_logit_bias, batch, layout, bias),
                   .history = executor->history,
                   .results = sample_results + begin,
                   .top_logprobs = top_logprobs + (int64_t)begin * layout->max_logprobs,
                   .scratch = executor->sample_scratch,
                   .logits_row_begin = logits_begin,
                   .num_logits_rows = num_rows,
                   .num_rows = end - begin,
                   .vocab_size = executor->model->config.vocab_size,
                   .num_ids = num_drawn_ids(executor->model),
                   .max_logprobs = layout->max_logprobs});
    end_part(executor, begin_ns, &place->sample_ns);
}

/* A step's work on its stream. The logits of as many rows as fit are there at once. */
static enum imbrex_status run_step(void *arg, void *stream_handle)
{
    struct executor_place *place = arg;
    const struct batch_layout *layout = &place->layout;
    /* Which samples belong to which rows is looked up on the host, where it was written. */
    const struct sample_row *rows =
        BATCH_ARRAY(struct sample_row, place->host.batch, layout, sample_rows);
    int32_t max_rows = place->executor->buffers.max_logit_rows;
    int32_t sample = 0;
    (void)stream_handle;
    place->forward_ns = 0;
    place->sample_ns = 0;
    run_forward(place);
    for (int32_t begin = 0; begin < layout->num_logits_rows; begin += max_rows) {
        int32_t num_rows = min_int32(max_rows, layout->num_logits_rows - begin);
        int32_t first_sample = sample;
        while (sample < layout->num_samples && rows[sample].logits_row < begin + num_rows) {
            sample++;
        }
        run_logits(place, begin, num_rows);
        run_samples(place, first_sample, sample, begin, num_rows);
    }
    return IMBREX_STATUS_OK;
}

/* Copies of one step follow each other: one may read what the one before it wrote. */
static enum imbrex_status give_copy(struct executor *executor, void *destination,
                                    const void *source, size_t num_bytes)
{
    return device_copy_batch_async(
        executor->device, DEVICE_STREAM_STEP,
        &(struct device_copy){.destination = destination, .source = source, .num_bytes = num_bytes},
        1);
}

static enum imbrex_status give_plan_copies(struct executor *executor, const struct step_plan *plan)
{
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        const struct step_block_copy *copy = &plan->block_copies[i];
        size_t block_bytes = executor->kv.block_bytes;
        assert(copy->source < executor->options.num_blocks &&
               copy->destination < executor->options.num_blocks);
        TRY(give_copy(executor, executor->kv.blocks + (size_t)copy->destination * block_bytes,
                      executor->kv.blocks + (size_t)copy->source * block_bytes, block_bytes));
    }
    for (int32_t i = 0; i < plan->num_slot_copies; i++) {
        const struct step_slot_copy *copy = &plan->slot_copies[i];
        const struct token_history *history = &executor->history;
        assert(copy->num_tokens <= history->stride);
        TRY(give_copy(executor, history->token_ids + copy->destination * history->stride,
                      history->token_ids + copy->source * history->stride,
                      (size_t)copy->num_tokens * sizeof(int32_t)));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status give_step(struct executor *executor, struct executor_place *place,
                                    const struct step_plan *plan)
{
    const struct batch_layout *layout = &place->layout;
    size_t num_samples = (size_t)layout->num_samples;
    if (executor->num_in_flight == 0) {
        /* What failed before was told by another place's event; this one's begins to count here.
         * Behind a step in flight it counts that one's failures too, on which this one builds. */
        TRY(device_event_record(executor->device, place->event, DEVICE_STREAM_STEP));
    }
    TRY(give_plan_copies(executor, plan));
    TRY(give_copy(executor, place->device.batch, place->host.batch, layout->num_bytes));
    TRY(device_run_async(executor->device, DEVICE_STREAM_STEP, run_step, place));
    if (num_samples > 0) {
        TRY(give_copy(executor, place->host.results, place->device.results,
                      results_bytes(num_samples, (size_t)layout->max_logprobs)));
    }
    return device_event_record(executor->device, place->event, DEVICE_STREAM_STEP);
}

/* Waits until nothing of a step that could not be given as a whole is left on the stream. A device
 * that does not even let us wait has failed. */
static enum imbrex_status drain(struct executor *executor, struct executor_place *place)
{
    if (device_event_record(executor->device, place->event, DEVICE_STREAM_STEP) !=
            IMBREX_STATUS_OK ||
        device_event_synchronize(executor->device, place->event) == IMBREX_STATUS_DEVICE) {
        return IMBREX_STATUS_DEVICE;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_submit(struct executor *executor, const struct step_plan *plan,
                                   const struct batch_layout *layout)
{
    struct executor_place *place = place_of(executor, executor->num_submitted);
    assert(executor->num_in_flight < executor_max_in_flight(executor));
    assert(layout->num_tokens <= executor->options.limits.max_tokens);
    assert(layout->num_samples <= executor->options.limits.max_samples);
    place->layout = *layout;
    enum imbrex_status status = give_step(executor, place, plan);
    if (status != IMBREX_STATUS_OK) {
        TRY(drain(executor, place));
        return status;
    }
    executor->num_submitted++;
    executor->num_in_flight++;
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_collect(struct executor *executor, struct executor_results *results)
{
    assert(executor->num_in_flight > 0);
    struct executor_place *place =
        place_of(executor, executor->num_submitted - executor->num_in_flight);
    enum imbrex_status status = device_event_synchronize(executor->device, place->event);
    executor->num_in_flight--;
    TRY(status);
    const struct batch_layout *layout = &place->layout;
    *results = (struct executor_results){
        .results = (const struct sample_result *)(const void *)place->host.results,
        .top_logprobs =
            (const struct imbrex_logprob *)(const void *)(place->host.results +
                                                          results_top_begin(
                                                              (size_t)layout->num_samples)),
        .forward_ns = place->forward_ns,
        .sample_ns = place->sample_ns,
    };
    return IMBREX_STATUS_OK;
}
