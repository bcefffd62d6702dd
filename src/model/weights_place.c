/* SPDX-License-Identifier: Apache-2.0 */
/* A walk over the weights gives each tensor its place on the device; what it gives is one list of
 * pieces. They are sorted by where they come from, so that files are read front to back, cut into
 * tasks that fit a pinned buffer, converted by all threads, and sent: neighbouring tasks whose
 * elements are neighbours on the device too are one copy. */
#include "model/weights_place.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/thread_pool.h"
#include "ops/quant.h"

#define PLACE_ALIGNMENT 256 /* of matrices and vectors, see backend_cuda_create */
#define MAX_BUFFER_BYTES ((size_t)32 << 20)
#define BUFFER_ALIGNMENT 4096 /* what can be registered */
#define NUM_BUFFERS 2
/* Elements of a task: a multiple of every block of dtype_block_elements and of BATCH_ELEMENTS, and
 * so few that the threads end together. */
#define TASK_ELEMENTS (1 << 16)
#define MAX_TASKS 1024     /* of a buffer */
#define BATCH_ELEMENTS 256 /* converted at once, in loops of a constant length */

static_assert(TASK_ELEMENTS % BATCH_ELEMENTS == 0, "tasks are whole batches");

/* A tensor, or what is left of it to be sent. */
struct piece {
    const unsigned char *source;
    size_t place; /* bytes from the start of the device's memory */
    int64_t num_elements;
    enum dtype from, to;
};

struct piece_list {
    struct piece *pieces; /* NULL while counting */
    int32_t count;
};

struct walker {
    const struct weights *weights; /* the host's */
    enum dtype dtype;              /* of matrices on the device */
    size_t num_bytes;              /* placed so far */
    bool overflowed;
    struct piece_list list;
    unsigned char *memory; /* of the device; NULL while measuring */
};

/* A part of a piece in a buffer. */
struct task {
    const unsigned char *source;
    unsigned char *destination; /* in the buffer */
    int64_t num_elements;
    enum dtype from, to;
};

struct buffer {
    unsigned char *memory; /* [MAX_BUFFER_BYTES] or fewer */
    struct device_event *event;
    size_t num_sent; /* bytes of the device that are on their way */
};

struct placer {
    struct device *device;
    struct thread_pool *pool;
    struct memory_region region; /* all buffers */
    void *registered;
    size_t buffer_bytes; /* of one */
    struct buffer buffers[NUM_BUFFERS];
    struct task tasks[MAX_TASKS];
    struct device_copy copies[MAX_TASKS];
    int32_t num_tasks, num_copies;
    weights_progress_fn *progress;
    void *progress_user;
    size_t num_done, num_bytes;
};

/* ---- where everything lies --------------------------------------------------------------------*/

/* Begins a matrix or vector of its own. */
static void align_place(struct walker *walker)
{
    size_t aligned;
    if (!size_add(walker->num_bytes, PLACE_ALIGNMENT - 1, &aligned)) {
        walker->overflowed = true;
        return;
    }
    walker->num_bytes = aligned / PLACE_ALIGNMENT * PLACE_ALIGNMENT;
}

/* Puts num_elements right behind what was put before. Returns the device's address. */
static const void *put(struct walker *walker, const void *source, enum dtype from, enum dtype to,
                       int64_t num_elements)
{
    size_t place = walker->num_bytes, num_bytes;
    if (!size_mul((size_t)num_elements, dtype_block_bytes(to), &num_bytes) ||
        !size_add(place, num_bytes, &walker->num_bytes)) {
        walker->overflowed = true;
    }
    if (walker->list.pieces != NULL) {
        walker->list.pieces[walker->list.count] = (struct piece){
            .source = source, .place = place, .num_elements = num_elements, .from = from, .to = to};
    }
    walker->list.count++;
    return walker->memory == NULL ? NULL : walker->memory + place;
}

static struct weight_view put_matrix(struct walker *walker, struct weight_view view, int64_t rows,
                                     int64_t columns)
{
    return (struct weight_view){
        .elements = put(walker, view.elements, view.dtype, walker->dtype, rows * columns),
        .dtype = walker->dtype};
}

/* NULL stays NULL. */
static const float *put_vector(struct walker *walker, const float *vector, int64_t length)
{
    return vector == NULL ? NULL : put(walker, vector, DTYPE_F32, DTYPE_F32, length);
}

static const float *put_own_vector(struct walker *walker, const float *vector, int64_t length)
{
    align_place(walker);
    return put_vector(walker, vector, length);
}

static void put_layer(struct walker *walker, const struct model_config *config,
                      const struct layer_weights *host, struct layer_weights *placed)
{
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = (int64_t)config->num_heads * config->head_dim;
    int64_t kv_rows = (int64_t)config->num_kv_heads * config->head_dim;

    placed->input_layernorm = put_own_vector(walker, host->input_layernorm, hidden);
    placed->post_attention_layernorm =
        put_own_vector(walker, host->post_attention_layernorm, hidden);
    placed->q_norm = put_own_vector(walker, host->q_norm, config->head_dim);
    placed->k_norm = put_own_vector(walker, host->k_norm, config->head_dim);
    align_place(walker);
    placed->q_proj = put_matrix(walker, host->q_proj, q_rows, hidden);
    placed->k_proj = put_matrix(walker, host->k_proj, kv_rows, hidden);
    placed->v_proj = put_matrix(walker, host->v_proj, kv_rows, hidden);
    align_place(walker);
    placed->q_bias = put_vector(walker, host->q_bias, q_rows);
    placed->k_bias = put_vector(walker, host->k_bias, kv_rows);
    placed->v_bias = put_vector(walker, host->v_bias, kv_rows);
    align_place(walker);
    placed->o_proj = put_matrix(walker, host->o_proj, hidden, q_rows);
    placed->o_bias = put_own_vector(walker, host->o_bias, hidden);
    align_place(walker);
    placed->gate_proj = put_matrix(walker, host->gate_proj, intermediate, hidden);
    placed->up_proj = put_matrix(walker, host->up_proj, intermediate, hidden);
    align_place(walker);
    placed->gate_bias = put_vector(walker, host->gate_bias, intermediate);
    placed->up_bias = put_vector(walker, host->up_bias, intermediate);
    align_place(walker);
    placed->down_proj = put_matrix(walker, host->down_proj, hidden, intermediate);
    placed->down_bias = put_own_vector(walker, host->down_bias, hidden);
}

/* The one statement of what lies where. `placed` has room for the layers, or is NULL. */
static void walk(struct walker *walker, const struct model_config *config, struct weights *placed)
{
    const struct weights *host = walker->weights;
    int64_t vocab = config->vocab_size, hidden = config->hidden_size;
    struct layer_weights ignored;
    struct weight_view embed_tokens = put_matrix(walker, host->embed_tokens, vocab, hidden);
    for (int32_t i = 0; i < config->num_layers; i++) {
        put_layer(walker, config, &host->layers[i], placed == NULL ? &ignored : &placed->layers[i]);
    }
    const float *norm = put_own_vector(walker, host->norm, hidden);
    struct weight_view lm_head = embed_tokens;
    if (!host->tied) {
        align_place(walker);
        lm_head = put_matrix(walker, host->lm_head, vocab, hidden);
    }
    align_place(walker);
    if (placed != NULL) {
        placed->embed_tokens = embed_tokens;
        placed->norm = norm;
        placed->lm_head = lm_head;
    }
}

bool weights_place_bytes(const struct imbrex_model *model, enum dtype dtype, size_t *num_bytes)
{
    struct walker walker = {.weights = &model->weights, .dtype = dtype};
    walk(&walker, &model->config, NULL);
    if (walker.overflowed) {
        return false;
    }
    *num_bytes = walker.num_bytes;
    return true;
}

/* ---- conversion -------------------------------------------------------------------------------*/

/* Loops without branches over arrays of their own, which compilers turn into vector instructions
 * where `count` is a constant. What is not done so is left to quant_dequantize_row. */
#define PLACE_INLINE static inline __attribute__((always_inline))

/* A batch in all its forms: `bits` are those of fp32 values. */
struct batch {
    float values[BATCH_ELEMENTS];
    uint32_t bits[BATCH_ELEMENTS], wide[BATCH_ELEMENTS];
    uint16_t halves[BATCH_ELEMENTS];
};

/* halves to bits. Exponent and mantissa go where fp32 has them; the exponents' zero points differ
 * by 112. So subnormals come right too, and of infinity and NaN the exponent alone is missing. */
PLACE_INLINE void widen_f16(struct batch *batch, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        batch->wide[i] = (uint32_t)(batch->halves[i] & 0x7fff) << 13;
    }
    memcpy(batch->values, batch->wide, (size_t)count * sizeof(float));
    for (int32_t i = 0; i < count; i++) {
        batch->values[i] *= 0x1p112f;
    }
    memcpy(batch->bits, batch->values, (size_t)count * sizeof(float));
    for (int32_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(batch->halves[i] & 0x8000) << 16;
        uint32_t exponent = batch->wide[i] >= 0x0f800000u ? 0x7f800000u : 0;
        batch->bits[i] |= sign | exponent;
    }
}

PLACE_INLINE void widen_bf16(struct batch *batch, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        batch->bits[i] = (uint32_t)batch->halves[i] << 16;
    }
}

/* bits to halves, as bf16_from_float. */
PLACE_INLINE void round_bf16(struct batch *batch, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        uint32_t bits = batch->bits[i];
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        uint32_t nan = bits >> 16 | 0x40;
        batch->halves[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

PLACE_INLINE void convert_batch(enum dtype from, enum dtype to, const unsigned char *source,
                                unsigned char *destination, int32_t count)
{
    struct batch batch;
    size_t half_bytes = (size_t)count * sizeof(batch.halves[0]);
    size_t value_bytes = (size_t)count * sizeof(batch.values[0]);
    switch (from) {
    case DTYPE_F32:
        memcpy(batch.bits, source, value_bytes);
        break;
    case DTYPE_F16:
        memcpy(batch.halves, source, half_bytes);
        widen_f16(&batch, count);
        break;
    case DTYPE_BF16:
        memcpy(batch.halves, source, half_bytes);
        widen_bf16(&batch, count);
        break;
    default:
        quant_dequantize_row(from, source, batch.values, count);
        memcpy(batch.bits, batch.values, value_bytes);
        break;
    }
    if (to == DTYPE_BF16) {
        round_bf16(&batch, count);
        memcpy(destination, batch.halves, half_bytes);
    } else {
        memcpy(destination, batch.bits, value_bytes);
    }
}

static void convert(const struct task *task)
{
    size_t to_bytes = dtype_block_bytes(task->to);
    if (task->from == task->to) {
        memcpy(task->destination, task->source, (size_t)task->num_elements * to_bytes);
        return;
    }
    const unsigned char *source = task->source;
    unsigned char *destination = task->destination;
    int64_t num_left = task->num_elements;
    size_t batch_bytes = dtype_row_bytes(task->from, BATCH_ELEMENTS);
    for (; num_left >= BATCH_ELEMENTS; num_left -= BATCH_ELEMENTS) {
        convert_batch(task->from, task->to, source, destination, BATCH_ELEMENTS);
        source += batch_bytes;
        destination += BATCH_ELEMENTS * to_bytes;
    }
    convert_batch(task->from, task->to, source, destination, (int32_t)num_left);
}

static void run_tasks(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct placer *placer = arg;
    (void)thread_idx;
    for (int64_t i = begin; i < end; i++) {
        convert(&placer->tasks[i]);
    }
}

/* ---- on their way -----------------------------------------------------------------------------*/

/* Waits until the device has what was sent from a buffer. */
static enum imbrex_status await_buffer(struct placer *placer, struct buffer *buffer,
                                       struct imbrex_error *err)
{
    enum imbrex_status status = device_event_synchronize(placer->device, buffer->event);
    if (status != IMBREX_STATUS_OK) {
        return error_set(err, status, "the weights: a copy to the %s device failed",
                         device_name(placer->device));
    }
    placer->num_done += buffer->num_sent;
    buffer->num_sent = 0;
    if (placer->progress != NULL &&
        !placer->progress(placer->progress_user, placer->num_done, placer->num_bytes)) {
        return error_set(err, IMBREX_STATUS_CANCELLED, "the weights: cancelled");
    }
    return IMBREX_STATUS_OK;
}

/* Plans tasks from the pieces on until the buffer is full or none are left. */
static void plan_buffer(struct placer *placer, struct buffer *buffer, unsigned char *device_memory,
                        struct piece_list *list)
{
    size_t num_used = 0;
    placer->num_tasks = placer->num_copies = 0;
    while (list->count > 0 && placer->num_tasks < MAX_TASKS) {
        struct piece *piece = &list->pieces[0];
        size_t to_bytes = dtype_block_bytes(piece->to);
        size_t begin = (num_used + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
        int64_t num_elements =
            piece->num_elements < TASK_ELEMENTS ? piece->num_elements : TASK_ELEMENTS;
        size_t num_bytes = (size_t)num_elements * to_bytes;
        if (begin + num_bytes > placer->buffer_bytes) {
            break;
        }
        struct device_copy copy = {device_memory + piece->place, buffer->memory + begin, num_bytes};
        struct device_copy *last =
            placer->num_copies > 0 ? &placer->copies[placer->num_copies - 1] : NULL;
        placer->tasks[placer->num_tasks++] = (struct task){.source = piece->source,
                                                           .destination = buffer->memory + begin,
                                                           .num_elements = num_elements,
                                                           .from = piece->from,
                                                           .to = piece->to};
        if (last != NULL &&
            (unsigned char *)last->destination + last->num_bytes ==
                (unsigned char *)copy.destination &&
            (const unsigned char *)last->source + last->num_bytes ==
                (const unsigned char *)copy.source) {
            last->num_bytes += num_bytes;
        } else {
            placer->copies[placer->num_copies++] = copy;
        }
        num_used = begin + num_bytes;
        buffer->num_sent += num_bytes;
        piece->source += dtype_row_bytes(piece->from, num_elements);
        piece->place += num_bytes;
        piece->num_elements -= num_elements;
        if (piece->num_elements == 0) {
            list->pieces++;
            list->count--;
        }
    }
}

static enum imbrex_status send_buffer(struct placer *placer, struct buffer *buffer,
                                      struct imbrex_error *err)
{
    struct device *device = placer->device;
    enum imbrex_status status =
        device_copy_batch_async(device, DEVICE_STREAM_KV_IN, placer->copies, placer->num_copies);
    if (status == IMBREX_STATUS_OK) {
        status = device_event_record(device, buffer->event, DEVICE_STREAM_KV_IN);
    }
    if (status != IMBREX_STATUS_OK) {
        return error_set(err, status, "the weights: the %s device does not take a copy",
                         device_name(device));
    }
    return IMBREX_STATUS_OK;
}

/* Sends all pieces; the list is used up. */
static enum imbrex_status send_all(struct placer *placer, unsigned char *device_memory,
                                   struct piece_list *list, struct imbrex_error *err)
{
    int32_t buffer_idx = 0;
    while (list->count > 0) {
        struct buffer *buffer = &placer->buffers[buffer_idx];
        TRY(await_buffer(placer, buffer, err));
        plan_buffer(placer, buffer, device_memory, list);
        assert(placer->num_tasks > 0);
        thread_pool_run(placer->pool, placer->num_tasks, 1, run_tasks, placer);
        TRY(send_buffer(placer, buffer, err));
        buffer_idx = (buffer_idx + 1) % NUM_BUFFERS;
    }
    for (int32_t i = 0; i < NUM_BUFFERS; i++) {
        TRY(await_buffer(placer, &placer->buffers[(buffer_idx + i) % NUM_BUFFERS], err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_placer(struct placer *placer, int32_t num_threads,
                                      struct imbrex_error *err)
{
    /* Of a small model too, something is converted while something is on its way; and a whole task
     * fits in any case. */
    size_t bytes = placer->num_bytes / 8, least = (size_t)TASK_ELEMENTS * sizeof(float);
    bytes = bytes < MAX_BUFFER_BYTES ? bytes : MAX_BUFFER_BYTES;
    bytes = bytes > least ? bytes : least;
    placer->buffer_bytes = (bytes + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
    TRY(memory_region_map("weights on their way", NUM_BUFFERS * placer->buffer_bytes,
                          &placer->region, err));
    TRY(device_host_register(placer->device, placer->region.base, placer->region.num_bytes, err));
    placer->registered = placer->region.base;
    for (int32_t i = 0; i < NUM_BUFFERS; i++) {
        placer->buffers[i].memory = placer->region.base + (size_t)i * placer->buffer_bytes;
        TRY(device_event_create(placer->device, &placer->buffers[i].event, err));
    }
    return thread_pool_create(num_threads, &placer->pool, err);
}

/* Nothing may be left of a buffer's copies when it goes: after a failure, or when cancelled, some
 * may be on their way still. */
static void close_placer(struct placer *placer)
{
    for (int32_t i = 0; i < NUM_BUFFERS; i++) {
        struct device_event *event = placer->buffers[i].event;
        if (event != NULL && placer->num_done < placer->num_bytes) {
            (void)device_event_record(placer->device, event, DEVICE_STREAM_KV_IN);
            (void)device_event_synchronize(placer->device, event);
        }
        device_event_destroy(placer->device, event);
    }
    thread_pool_destroy(placer->pool);
    device_host_unregister(placer->device, placer->registered);
    memory_region_unmap(&placer->region);
}

/* ---- all of it --------------------------------------------------------------------------------*/

static int compare_sources(const void *a, const void *b)
{
    uintptr_t a_source = (uintptr_t)((const struct piece *)a)->source;
    uintptr_t b_source = (uintptr_t)((const struct piece *)b)->source;
    return a_source < b_source ? -1 : a_source > b_source;
}

/* Bytes of the device that are sent: all but the gaps between tensors. */
static size_t sum_bytes(const struct piece_list *list)
{
    size_t num_bytes = 0;
    for (int32_t i = 0; i < list->count; i++) {
        num_bytes += (size_t)list->pieces[i].num_elements * dtype_block_bytes(list->pieces[i].to);
    }
    return num_bytes;
}

static enum imbrex_status stream(struct device *device, struct piece_list list,
                                 unsigned char *device_memory, int32_t num_threads,
                                 weights_progress_fn *progress, void *user,
                                 struct imbrex_error *err)
{
    struct placer *placer = calloc(1, sizeof(*placer));
    if (placer == NULL) {
        return error_out_of_memory(err, "weights on their way", sizeof(*placer));
    }
    placer->device = device;
    placer->progress = progress;
    placer->progress_user = user;
    placer->num_bytes = sum_bytes(&list);
    enum imbrex_status status = open_placer(placer, num_threads, err);
    if (status == IMBREX_STATUS_OK) {
        status = send_all(placer, device_memory, &list, err);
    }
    close_placer(placer);
    free(placer);
    return status;
}

static int64_t max_columns(const struct model_config *config)
{
    int64_t q_rows = (int64_t)config->num_heads * config->head_dim;
    int64_t most = config->hidden_size > config->intermediate_size ? config->hidden_size
                                                                   : config->intermediate_size;
    return most > q_rows ? most : q_rows;
}

enum imbrex_status weights_place(const struct imbrex_model *model, struct device *device,
                                 enum dtype dtype, int32_t num_threads,
                                 weights_progress_fn *progress, void *user,
                                 struct placed_weights *placed, struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    struct placed_weights created = {.weights = model->weights};
    struct walker walker = {.weights = &model->weights, .dtype = dtype};
    enum imbrex_status status;
    assert(dtype == DTYPE_F32 || dtype == DTYPE_BF16);
    walk(&walker, config, NULL);
    if (walker.overflowed) {
        return error_out_of_memory(err, "the weights on a device", SIZE_MAX);
    }
    size_t num_layers = (size_t)config->num_layers, num_pieces = (size_t)walker.list.count;
    created.num_bytes = walker.num_bytes;
    created.weights.max_quantized_columns = 0;
    created.weights.max_bf16_columns = dtype == DTYPE_BF16 ? max_columns(config) : 0;
    created.weights.converted = NULL;
    created.weights.num_converted = 0;
    created.weights.layers = calloc(num_layers, sizeof(created.weights.layers[0]));
    struct piece *pieces = calloc(num_pieces, sizeof(*pieces));
    if (created.weights.layers == NULL || pieces == NULL) {
        status = error_out_of_memory(err, "the weights' places", num_pieces * sizeof(*pieces));
        goto fail;
    }
    TRY_OR_FAIL(device_alloc(device, "the weights", created.num_bytes, &created.memory, err));
    walker.num_bytes = 0;
    walker.list = (struct piece_list){.pieces = pieces};
    walker.memory = created.memory;
    walk(&walker, config, &created.weights);
    qsort(pieces, num_pieces, sizeof(*pieces), compare_sources);
    TRY_OR_FAIL(stream(device, walker.list, created.memory, num_threads, progress, user, err));
    free(pieces);
    *placed = created;
    return IMBREX_STATUS_OK;
fail:
    free(pieces);
    weights_place_release(device, &created);
    return status;
}

void weights_place_release(struct device *device, struct placed_weights *placed)
{
    device_free(device, placed->memory);
    free(placed->weights.layers);
    *placed = (struct placed_weights){0};
}
