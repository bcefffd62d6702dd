/* SPDX-License-Identifier: Apache-2.0 */
/* The plain kernels of a layer on a GPU against fp64 on the host: sizes of models and odd ones,
 * fp32 and bf16, sequences at any place of the cache, padding. Skipped where there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define GUARD_BYTES 256
#define CANARY 0xca
#define NAN_BYTE 0xff /* all bytes: NaN in fp32 and in bf16, -1 in int32 */
#define BLOCK_SIZE 16
#define NUM_LAYERS 2
#define LAYER_IDX 1
#define EPS 1e-5f

/* ---- arrays on both sides ---- */

/* Canaries before and behind the elements. int32 arrays count as F32. */
struct array {
    unsigned char *host; /* element 0 */
    CUdeviceptr base;    /* likewise */
    enum dtype dtype;
    int64_t num_elements;
    size_t num_bytes;
};

static struct array array_create(enum dtype dtype, int64_t num_elements)
{
    struct array array = {.dtype = dtype, .num_elements = num_elements};
    array.num_bytes = (size_t)num_elements * dtype_block_bytes(dtype);
    unsigned char *host = malloc(array.num_bytes + 2 * GUARD_BYTES);
    require(host != NULL, "memory");
    require(GPU_CALL(&gpu, mem_alloc, &array.base, array.num_bytes + 2 * GUARD_BYTES),
            "memory of the GPU");
    array.host = host + GUARD_BYTES;
    array.base += GUARD_BYTES;
    memset(host, CANARY, array.num_bytes + 2 * GUARD_BYTES);
    memset(array.host, NAN_BYTE, array.num_bytes);
    return array;
}

static void array_upload(struct array *array)
{
    require(copied_to_gpu(array->base - GUARD_BYTES, array->host - GUARD_BYTES,
                          array->num_bytes + 2 * GUARD_BYTES),
            "copy to the GPU");
}

/* False if something beside the elements was written. */
static bool array_download(struct array *array)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, array->host - GUARD_BYTES, array->base - GUARD_BYTES,
                         array->num_bytes + 2 * GUARD_BYTES),
            "copy from the GPU");
    bool is_whole = true;
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        is_whole &= array->host[-1 - (ptrdiff_t)i] == CANARY;
        is_whole &= array->host[array->num_bytes + i] == CANARY;
    }
    return is_whole;
}

static void array_poison(struct array *array)
{
    memset(array->host, NAN_BYTE, array->num_bytes);
    array_upload(array);
}

static void array_destroy(struct array *array)
{
    (void)gpu.mem_free(array->base - GUARD_BYTES);
    free(array->host - GUARD_BYTES);
}

static double array_at(const struct array *array, int64_t idx)
{
    return weight_load((struct weight_view){array->host, array->dtype}, idx);
}

static void array_set(struct array *array, int64_t idx, double value)
{
    float single = (float)value;
    uint16_t half = bf16_from_float(single);
    if (array->dtype == DTYPE_BF16) {
        memcpy(array->host + 2 * idx, &half, sizeof(half));
    } else {
        memcpy(array->host + 4 * idx, &single, sizeof(single));
    }
}

static struct array array_random(enum dtype dtype, int64_t num_elements, double mean, double scale)
{
    struct array array = array_create(dtype, num_elements);
    for (int64_t i = 0; i < num_elements; i++) {
        array_set(&array, i, mean + scale * random_normal());
    }
    array_upload(&array);
    return array;
}

static int32_t *array_ids(struct array *array)
{
    return (int32_t *)(void *)array->host;
}

/* The device's address, for a params struct. */
static void *device_at(const struct array *array, int64_t idx)
{
    return (void *)(array->base + (CUdeviceptr)idx * dtype_block_bytes(array->dtype));
}

/* ---- a layer and a step ---- */

struct shape {
    int32_t hidden, intermediate, vocab, num_heads, num_kv_heads, head_dim;
    bool has_biases, has_head_norms, is_interleaved;
    int32_t window;
};

#define MAX_SEQS 4
struct step {
    int32_t num_seqs, num_padding;
    int32_t num_past[MAX_SEQS], num_new[MAX_SEQS];
};

struct layer {
    struct shape shape;
    enum dtype dtype;
    int32_t num_tokens, num_padding, num_seqs, max_blocks, max_query, num_slots, max_position;
    int32_t qkv_width, q_width;
    size_t block_bytes;
    struct array hidden, norm, qkv_weight, qkv_bias, q_norm, k_norm, cos_sin, normed, qkv, kv;
    struct array attention, o_weight, o_bias, gate_up, gate_up_bias, mlp, vocab_weight, logits;
    struct array positions, slots, seq_idx, tables, query_begin, seq_lens, rows;
    struct backend *backend;
};

/* clang-format off */
#define LAYER_ARRAYS(X) \
    X(hidden) X(norm) X(qkv_weight) X(qkv_bias) X(q_norm) X(k_norm) X(cos_sin) X(normed) \
    X(qkv) X(kv) X(attention) X(o_weight) X(o_bias) X(gate_up) X(gate_up_bias) X(mlp) \
    X(vocab_weight) X(logits) X(positions) X(slots) X(seq_idx) X(tables) X(query_begin) \
    X(seq_lens) X(rows)
/* clang-format on */

#define NUM_ROWS 5 /* of logits */

/* Sequences in blocks in any order; what a table does not need points nowhere. */
static void place_step(struct layer *layer, const struct step *step)
{
    int32_t num_blocks = 0, num_tokens = 0, most_blocks = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        int32_t num_keys = step->num_past[i] + step->num_new[i];
        int32_t blocks = (num_keys + BLOCK_SIZE - 1) / BLOCK_SIZE;
        num_blocks += blocks;
        num_tokens += step->num_new[i];
        most_blocks = blocks > most_blocks ? blocks : most_blocks;
        layer->max_query =
            step->num_new[i] > layer->max_query ? step->num_new[i] : layer->max_query;
        layer->max_position = num_keys > layer->max_position ? num_keys : layer->max_position;
    }
    layer->num_tokens = num_tokens + step->num_padding;
    layer->num_padding = step->num_padding;
    layer->num_seqs = step->num_seqs;
    layer->max_blocks = most_blocks + 1;
    layer->num_slots = (num_blocks + 2) * BLOCK_SIZE;
    layer->positions = array_create(DTYPE_F32, layer->num_tokens);
    layer->slots = array_create(DTYPE_F32, layer->num_tokens);
    layer->seq_idx = array_create(DTYPE_F32, layer->num_tokens);
    layer->tables = array_create(DTYPE_F32, (int64_t)step->num_seqs * layer->max_blocks);
    layer->query_begin = array_create(DTYPE_F32, step->num_seqs + 1);
    layer->seq_lens = array_create(DTYPE_F32, step->num_seqs);

    int32_t *order = malloc((size_t)(num_blocks + 2) * sizeof(*order));
    require(order != NULL, "memory");
    for (int32_t i = 0; i < num_blocks + 2; i++) {
        int32_t at = (int32_t)(random_bits() % (uint32_t)(i + 1));
        order[i] = order[at];
        order[at] = i;
    }
    int32_t token = 0, block = 0;
    array_ids(&layer->query_begin)[0] = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        int32_t num_keys = step->num_past[i] + step->num_new[i];
        int32_t *table = array_ids(&layer->tables) + i * layer->max_blocks;
        for (int32_t j = 0; j < layer->max_blocks; j++) {
            table[j] = j * BLOCK_SIZE < num_keys ? order[block++] : 1 << 30;
        }
        for (int32_t j = step->num_past[i]; j < num_keys; j++, token++) {
            array_ids(&layer->positions)[token] = j;
            array_ids(&layer->slots)[token] = table[j / BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE;
            array_ids(&layer->seq_idx)[token] = i;
        }
        array_ids(&layer->query_begin)[i + 1] = token;
        array_ids(&layer->seq_lens)[i] = num_keys;
    }
    for (; token < layer->num_tokens; token++) {
        array_ids(&layer->positions)[token] = 0;
        array_ids(&layer->slots)[token] = -1;
        array_ids(&layer->seq_idx)[token] = 0;
    }
    free(order);
}

/* Element of the cache: of keys or values. */
static int64_t kv_element(const struct layer *layer, int32_t slot, int32_t kv_head, bool is_value,
                          int32_t i)
{
    const struct shape *shape = &layer->shape;
    int64_t plane = (int64_t)shape->num_kv_heads * BLOCK_SIZE * shape->head_dim;
    int64_t block_elements = (int64_t)(layer->block_bytes / dtype_block_bytes(layer->dtype));
    return slot / BLOCK_SIZE * block_elements + (2 * LAYER_IDX + (is_value ? 1 : 0)) * plane +
           ((int64_t)kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * shape->head_dim + i;
}

static int32_t slot_of(struct layer *layer, int32_t seq, int32_t position)
{
    return array_ids(&layer->tables)[seq * layer->max_blocks + position / BLOCK_SIZE] * BLOCK_SIZE +
           position % BLOCK_SIZE;
}

static uint32_t ablations; /* of all backends */

static struct layer layer_create(const struct shape *shape, enum dtype dtype,
                                 const struct step *step)
{
    struct layer layer = {.shape = *shape, .dtype = dtype};
    int32_t width = shape->hidden;
    place_step(&layer, step);
    layer.q_width = shape->num_heads * shape->head_dim;
    layer.qkv_width = layer.q_width + 2 * shape->num_kv_heads * shape->head_dim;
    size_t used_bytes = (size_t)NUM_LAYERS * 2 * (size_t)shape->num_kv_heads * BLOCK_SIZE *
                        (size_t)shape->head_dim * dtype_block_bytes(dtype);
    layer.block_bytes = (used_bytes + 4095) / 4096 * 4096;

    layer.hidden = array_random(DTYPE_F32, (int64_t)layer.num_tokens * width, 0.0, 2.0);
    layer.norm = array_random(DTYPE_F32, width, 1.0, 0.2);
    layer.qkv_weight =
        array_random(dtype, (int64_t)layer.qkv_width * width, 0.0, 1.0 / sqrt(width));
    layer.qkv_bias = array_random(DTYPE_F32, layer.qkv_width, 0.0, 1.0);
    layer.q_norm = array_random(DTYPE_F32, shape->head_dim, 1.0, 0.2);
    layer.k_norm = array_random(DTYPE_F32, shape->head_dim, 1.0, 0.2);
    layer.cos_sin = array_create(DTYPE_F32, ((int64_t)layer.max_position + 1) * shape->head_dim);
    for (int64_t i = 0; i <= layer.max_position; i++) {
        for (int32_t j = 0; j < shape->head_dim / 2; j++) {
            double angle = (double)i * pow(100.0, -2.0 * j / shape->head_dim);
            array_set(&layer.cos_sin, i * shape->head_dim + j, cos(angle));
            array_set(&layer.cos_sin, i * shape->head_dim + shape->head_dim / 2 + j, sin(angle));
        }
    }
    layer.normed = array_create(
        dtype, (int64_t)(layer.num_tokens > NUM_ROWS ? layer.num_tokens : NUM_ROWS) * width);
    layer.qkv = array_create(dtype, (int64_t)layer.num_tokens * layer.qkv_width);
    layer.kv = array_create(dtype, (int64_t)(layer.num_slots / BLOCK_SIZE) *
                                       (int64_t)(layer.block_bytes / dtype_block_bytes(dtype)));
    layer.attention = array_create(dtype, (int64_t)layer.num_tokens * layer.q_width);
    layer.o_weight =
        array_random(dtype, (int64_t)width * layer.q_width, 0.0, 1.0 / sqrt(layer.q_width));
    layer.o_bias = array_random(DTYPE_F32, width, 0.0, 1.0);
    layer.gate_up =
        array_random(dtype, (int64_t)2 * shape->intermediate * width, 0.0, 1.5 / sqrt(width));
    layer.gate_up_bias = array_random(DTYPE_F32, (int64_t)2 * shape->intermediate, 0.0, 1.0);
    layer.mlp = array_create(dtype, (int64_t)layer.num_tokens * shape->intermediate);
    layer.vocab_weight = array_random(dtype, (int64_t)shape->vocab * width, 0.0, 1.0 / sqrt(width));
    layer.logits = array_create(DTYPE_F32, (int64_t)NUM_ROWS * shape->vocab);
    layer.rows = array_create(DTYPE_F32, NUM_ROWS);
    for (int32_t i = 0; i < NUM_ROWS; i++) {
        array_ids(&layer.rows)[i] = (int32_t)(random_bits() % (uint32_t)layer.num_tokens);
    }
#define UPLOAD(name) array_upload(&layer.name);
    LAYER_ARRAYS(UPLOAD)
#undef UPLOAD

    struct backend_cuda_options options = {.activation_dtype = dtype, .ablations = ablations};
    struct backend_shape sizes = {.hidden_size = width,
                                  .intermediate_size = shape->intermediate,
                                  .vocab_size = shape->vocab,
                                  .num_heads = shape->num_heads,
                                  .num_kv_heads = shape->num_kv_heads,
                                  .head_dim = shape->head_dim,
                                  .max_tokens = layer.num_tokens,
                                  .max_seqs = layer.num_seqs,
                                  .max_logit_rows = NUM_ROWS,
                                  .activation_dtype = dtype};
    require(backend_cuda_create_on(device, &options, &sizes, NULL, 0, &layer.backend, NULL) ==
                IMBREX_STATUS_OK,
            "backend");
    backend_begin(layer.backend, gpu.stream);
    return layer;
}

static void layer_destroy(struct layer *layer)
{
    count(backend_end(layer->backend) == IMBREX_STATUS_OK, "status of the launches");
    backend_destroy(layer->backend);
#define DESTROY(name) array_destroy(&layer->name);
    LAYER_ARRAYS(DESTROY)
#undef DESTROY
}

static struct backend_cuda *cuda_of(const struct layer *layer)
{
    return (struct backend_cuda *)(void *)layer->backend;
}

static struct kv_view kv_of(const struct layer *layer)
{
    return (struct kv_view){.blocks = device_at(&layer->kv, 0),
                            .block_bytes = layer->block_bytes,
                            .dtype = kv_dtype_of(layer->dtype),
                            .num_layers = NUM_LAYERS,
                            .num_kv_heads = layer->shape.num_kv_heads,
                            .block_size = BLOCK_SIZE,
                            .head_dim = layer->shape.head_dim};
}

/* ---- references: a value and how far from it a right one may be ---- */

struct expected {
    double value, bound;
};

/* Half an ulp of the type in which results are kept, relative. */
static double rounding_of(const struct layer *layer)
{
    return layer->dtype == DTYPE_BF16 ? 0x1p-8 : 0x1p-24;
}

/* What fp32 sums of so many terms may lose, relative to the sum of magnitudes. */
static double sum_step(int32_t num_terms)
{
    return (num_terms / 32.0 + 40.0) * 0x1p-24;
}

/* x: from here on the value of type T that is nearest. */
static void round_to(const struct layer *layer, struct expected *x)
{
    x->bound += rounding_of(layer) * (fabs(x->value) + x->bound);
}

static void expect_norm(const struct expected *x, const struct array *weight, int32_t width,
                        struct expected *d)
{
    double square = 0.0, bound_square = 0.0;
    for (int32_t i = 0; i < width; i++) {
        square += x[i].value * x[i].value;
        bound_square += x[i].bound * x[i].bound;
    }
    double scale = 1.0 / sqrt(square / width + (double)EPS);
    double relative = sqrt(bound_square / (square + 1e-30)) + sum_step(width);
    for (int32_t i = 0; i < width; i++) {
        double w = array_at(weight, i);
        d[i] =
            (struct expected){x[i].value * scale * w,
                              1.01 * fabs(w) * scale * (x[i].bound + fabs(x[i].value) * relative)};
    }
}

static void expect_norm_row(const struct layer *layer, int64_t row, struct expected *d)
{
    int32_t width = layer->shape.hidden;
    for (int32_t i = 0; i < width; i++) {
        d[i] = (struct expected){array_at(&layer->hidden, row * width + i), 0.0};
    }
    expect_norm(d, &layer->norm, width, d);
    for (int32_t i = 0; i < width; i++) {
        round_to(layer, &d[i]);
    }
}

static struct expected expect_product(const struct expected *a, const struct array *weight,
                                      int64_t row, int32_t width, double bias)
{
    struct expected d = {bias, 0.0};
    double size = fabs(bias);
    for (int32_t i = 0; i < width; i++) {
        double w = array_at(weight, row * width + i);
        d.value += a[i].value * w;
        d.bound += a[i].bound * fabs(w);
        size += fabs(a[i].value * w);
    }
    d.bound += sum_step(width) * size;
    return d;
}

/* Norm and rotation of a head of T. */
static void expect_turn(const struct layer *layer, const struct array *norm, int32_t position,
                        struct expected *head)
{
    const struct shape *shape = &layer->shape;
    int32_t head_dim = shape->head_dim, half = head_dim / 2;
    if (shape->has_head_norms) {
        expect_norm(head, norm, head_dim, head);
    }
    for (int32_t i = 0; i < half; i++) {
        struct expected *low = shape->is_interleaved ? head + (ptrdiff_t)2 * i : head + i;
        struct expected *high = shape->is_interleaved ? low + 1 : low + half;
        double c = array_at(&layer->cos_sin, (int64_t)position * head_dim + i);
        double s = array_at(&layer->cos_sin, (int64_t)position * head_dim + half + i);
        struct expected x = *low, y = *high;
        double lost = (fabs(x.value) + fabs(y.value)) * 0x1p-22;
        *low = (struct expected){x.value * c - y.value * s,
                                 x.bound * fabs(c) + y.bound * fabs(s) + lost};
        *high = (struct expected){y.value * c + x.value * s,
                                  y.bound * fabs(c) + x.bound * fabs(s) + lost};
        round_to(layer, low);
        round_to(layer, high);
    }
}

static bool is_near(struct expected expected, double found, double *worst)
{
    double error = fabs(found - expected.value);
    *worst = fmax(*worst, error / expected.bound);
    return error <= expected.bound;
}

/* ---- checks ---- */

static void run_qkv(const struct layer *layer, int64_t first, int32_t num_tokens,
                    const struct array *qkv, int64_t qkv_row)
{
    const struct shape *shape = &layer->shape;
    struct weight_view weight = {device_at(&layer->qkv_weight, 0), layer->dtype};
    float *bias = shape->has_biases ? device_at(&layer->qkv_bias, 0) : NULL;
    int64_t k_row = layer->q_width, v_row = (layer->q_width + layer->qkv_width) / 2;
    cuda_plain_qkv(
        cuda_of(layer),
        &(struct qkv_params){
            .hidden = device_at(&layer->hidden, first * shape->hidden),
            .norm = {device_at(&layer->norm, 0), EPS},
            .q_proj = weight,
            .k_proj = {device_at(&layer->qkv_weight, k_row * shape->hidden), layer->dtype},
            .v_proj = {device_at(&layer->qkv_weight, v_row * shape->hidden), layer->dtype},
            .q_bias = bias,
            .k_bias = bias == NULL ? NULL : bias + k_row,
            .v_bias = bias == NULL ? NULL : bias + v_row,
            .q_norm = shape->has_head_norms ? device_at(&layer->q_norm, 0) : NULL,
            .k_norm = shape->has_head_norms ? device_at(&layer->k_norm, 0) : NULL,
            .cos_sin = device_at(&layer->cos_sin, 0),
            .positions = device_at(&layer->positions, first),
            .slot_mapping = device_at(&layer->slots, first),
            .kv = kv_of(layer),
            .normed = device_at(&layer->normed, first * shape->hidden),
            .qkv = device_at(qkv, qkv_row * layer->qkv_width),
            .layer_idx = LAYER_IDX,
            .num_tokens = num_tokens,
            .hidden_size = shape->hidden,
            .num_heads = shape->num_heads,
            .head_norm_eps = EPS,
            .is_interleaved = shape->is_interleaved,
        });
}

/* One token's q in qkv, its k and v in the cache. Marks what it wrote there. */
static bool token_is_right(struct layer *layer, int32_t token, unsigned char *is_written,
                           double *worst)
{
    const struct shape *shape = &layer->shape;
    int32_t head_dim = shape->head_dim, num_all = shape->num_heads + 2 * shape->num_kv_heads;
    int32_t position = array_ids(&layer->positions)[token];
    int32_t slot = array_ids(&layer->slots)[token];
    struct expected *normed = calloc((size_t)shape->hidden, sizeof(*normed));
    struct expected *head = calloc((size_t)head_dim, sizeof(*head));
    require(normed != NULL && head != NULL, "memory");
    bool is_right = true;
    expect_norm_row(layer, token, normed);
    for (int32_t h = 0; h < num_all; h++) {
        bool is_value = h >= shape->num_heads + shape->num_kv_heads;
        for (int32_t i = 0; i < head_dim; i++) {
            int64_t column = (int64_t)h * head_dim + i;
            head[i] = expect_product(normed, &layer->qkv_weight, column, shape->hidden,
                                     shape->has_biases ? array_at(&layer->qkv_bias, column) : 0.0);
            round_to(layer, &head[i]);
        }
        if (!is_value) {
            expect_turn(layer, h < shape->num_heads ? &layer->q_norm : &layer->k_norm, position,
                        head);
        }
        for (int32_t i = 0; i < head_dim; i++) {
            int64_t at = (int64_t)token * layer->qkv_width + (int64_t)h * head_dim + i;
            double found = array_at(&layer->qkv, at);
            if (h >= shape->num_heads) {
                at = kv_element(layer, slot, (h - shape->num_heads) % shape->num_kv_heads, is_value,
                                i);
                found = array_at(&layer->kv, at);
                is_written[at] = 1;
            }
            is_right &= is_near(head[i], found, worst);
        }
    }
    free(normed);
    free(head);
    return is_right;
}

/* Catches wrong norms, biases, heads, angles and slots, and whatever is written beside them. */
static void check_qkv(struct layer *layer, const char *name)
{
    char what[200];
    double worst = 0.0;
    unsigned char *is_written = calloc((size_t)layer->kv.num_elements, 1);
    int32_t num_real = layer->num_tokens - layer->num_padding;
    require(is_written != NULL, "memory");
    array_poison(&layer->kv);
    array_poison(&layer->qkv);
    run_qkv(layer, 0, layer->num_tokens, &layer->qkv, 0);
    bool is_right = array_download(&layer->qkv) && array_download(&layer->kv);
    for (int32_t token = 0; token < num_real; token++) {
        is_right &= token_is_right(layer, token, is_written, &worst);
    }
    for (int64_t i = 0; i < layer->kv.num_elements; i++) {
        is_right &= is_written[i] != 0 || isnan(array_at(&layer->kv, i));
    }
    snprintf(what, sizeof(what), "%s: qkv, worst %.2f of its bound", name, worst);
    count(is_right, what);

    /* One token alone has the same bits. */
    struct array alone = array_create(layer->dtype, layer->qkv_width);
    int32_t token = num_real - 1;
    size_t element_bytes = dtype_block_bytes(layer->dtype);
    array_upload(&alone);
    run_qkv(layer, token, 1, &alone, 0);
    is_right = array_download(&alone);
    is_right &= memcmp(alone.host,
                       layer->qkv.host + (size_t)token * (size_t)layer->qkv_width * element_bytes,
                       (size_t)layer->q_width * element_bytes) == 0;
    unsigned char *kept = malloc(layer->kv.num_bytes);
    require(kept != NULL, "memory");
    memcpy(kept, layer->kv.host, layer->kv.num_bytes);
    is_right &= array_download(&layer->kv);
    is_right &= memcmp(kept, layer->kv.host, layer->kv.num_bytes) == 0;
    snprintf(what, sizeof(what), "%s: qkv of one token alone", name);
    count(is_right, what);
    array_destroy(&alone);
    free(kept);
    free(is_written);
}

static void run_attend(const struct layer *layer, int64_t first, int32_t num_tokens,
                       const struct array *d, int64_t d_row)
{
    cuda_plain_attend(cuda_of(layer), &(struct attend_params){
                                          .qkv = device_at(&layer->qkv, first * layer->qkv_width),
                                          .d = device_at(d, d_row * layer->q_width),
                                          .kv = kv_of(layer),
                                          .block_tables = device_at(&layer->tables, 0),
                                          .seq_idx = device_at(&layer->seq_idx, first),
                                          .positions = device_at(&layer->positions, first),
                                          .query_begin = device_at(&layer->query_begin, 0),
                                          .seq_lens = device_at(&layer->seq_lens, 0),
                                          .layer_idx = LAYER_IDX,
                                          .num_tokens = num_tokens,
                                          .num_seqs = layer->num_seqs,
                                          .num_heads = layer->shape.num_heads,
                                          .max_blocks = layer->max_blocks,
                                          .max_query = layer->max_query,
                                          .window = layer->shape.window,
                                          .scale = (float)(1.0 / sqrt(layer->shape.head_dim)),
                                      });
}

/* One head of one token. scores: room for all keys. */
static bool head_is_right(struct layer *layer, int32_t token, int32_t head, double *scores,
                          double *worst)
{
    const struct shape *shape = &layer->shape;
    int32_t head_dim = shape->head_dim;
    int32_t kv_head = head / (shape->num_heads / shape->num_kv_heads);
    int32_t seq = array_ids(&layer->seq_idx)[token];
    int32_t num_keys = array_ids(&layer->positions)[token] + 1;
    int32_t first = shape->window > 0 && num_keys > shape->window ? num_keys - shape->window : 0;
    int64_t q = (int64_t)token * layer->qkv_width + (int64_t)head * head_dim;
    double largest = -INFINITY, total = 0.0, score_bound = 0.0;
    for (int32_t key = first; key < num_keys; key++) {
        double size = 0.0;
        int32_t slot = slot_of(layer, seq, key);
        scores[key] = 0.0;
        for (int32_t i = 0; i < head_dim; i++) {
            double product = array_at(&layer->qkv, q + i) *
                             array_at(&layer->kv, kv_element(layer, slot, kv_head, false, i)) /
                             sqrt(head_dim);
            scores[key] += product;
            size += fabs(product);
        }
        largest = fmax(largest, scores[key]);
        score_bound = fmax(score_bound, size * (head_dim / 4.0 + 8.0) * 0x1p-24);
    }
    for (int32_t key = first; key < num_keys; key++) {
        scores[key] = exp(scores[key] - largest);
        total += scores[key];
    }
    bool is_right = true;
    for (int32_t i = 0; i < head_dim; i++) {
        struct expected d = {0};
        double size = 0.0;
        for (int32_t key = first; key < num_keys; key++) {
            double value =
                array_at(&layer->kv, kv_element(layer, slot_of(layer, seq, key), kv_head, true, i));
            d.value += scores[key] / total * value;
            size += scores[key] / total * fabs(value);
        }
        d.bound = size * (2.0 * score_bound + ((num_keys - first) / 8.0 + 64.0) * 0x1p-24);
        round_to(layer, &d);
        is_right &= is_near(d,
                            array_at(&layer->attention, (int64_t)token * layer->q_width +
                                                            (int64_t)head * head_dim + i),
                            worst);
    }
    return is_right;
}

/* Catches keys of another sequence, beyond the token or before the window, wrong heads and slots:
 * all that a token must not read is NaN. */
static void check_attend(struct layer *layer, const char *name)
{
    char what[200];
    double worst = 0.0;
    const struct shape *shape = &layer->shape;
    int32_t num_real = layer->num_tokens - layer->num_padding;
    double *scores = malloc(((size_t)layer->max_position + 1) * sizeof(*scores));
    require(scores != NULL, "memory");
    memset(layer->kv.host, NAN_BYTE, layer->kv.num_bytes);
    for (int32_t seq = 0; seq < layer->num_seqs; seq++) {
        for (int32_t position = 0; position < array_ids(&layer->seq_lens)[seq]; position++) {
            for (int32_t j = 0; j < 2 * shape->num_kv_heads; j++) {
                for (int32_t i = 0; i < shape->head_dim; i++) {
                    array_set(
                        &layer->kv,
                        kv_element(layer, slot_of(layer, seq, position), j / 2, j % 2 == 1, i),
                        random_normal());
                }
            }
        }
    }
    for (int64_t i = 0; i < layer->qkv.num_elements; i++) {
        array_set(&layer->qkv, i, 2.0 * random_normal());
    }
    array_upload(&layer->kv);
    array_upload(&layer->qkv);
    array_poison(&layer->attention);
    run_attend(layer, 0, layer->num_tokens, &layer->attention, 0);
    bool is_right = array_download(&layer->attention);
    for (int32_t token = 0; token < num_real; token++) {
        for (int32_t head = 0; head < shape->num_heads; head++) {
            is_right &= head_is_right(layer, token, head, scores, &worst);
        }
    }
    snprintf(what, sizeof(what), "%s: attention, worst %.2f of its bound", name, worst);
    count(is_right, what);

    struct array alone = array_create(layer->dtype, layer->q_width);
    size_t row_bytes = (size_t)layer->q_width * dtype_block_bytes(layer->dtype);
    array_upload(&alone);
    run_attend(layer, num_real - 1, 1, &alone, 0);
    is_right = array_download(&alone);
    is_right &= memcmp(alone.host, layer->attention.host + (size_t)(num_real - 1) * row_bytes,
                       row_bytes) == 0;
    snprintf(what, sizeof(what), "%s: attention of one token alone", name);
    count(is_right, what);
    array_destroy(&alone);
    free(scores);
}

/* Whether row `row` of `whole` has the bits of `alone`, downloaded here. */
static bool row_is_same(const struct array *whole, int64_t row, struct array *alone)
{
    bool is_whole = array_download(alone);
    return is_whole &&
           memcmp(whole->host + (size_t)row * alone->num_bytes, alone->host, alone->num_bytes) == 0;
}

static void run_project(const struct layer *layer, int64_t first, int32_t num_tokens,
                        const struct array *hidden)
{
    cuda_plain_project(cuda_of(layer),
                       &(struct project_params){
                           .a = device_at(&layer->attention, first * layer->q_width),
                           .weight = {device_at(&layer->o_weight, 0), layer->dtype},
                           .bias = layer->shape.has_biases ? device_at(&layer->o_bias, 0) : NULL,
                           .hidden = device_at(hidden, 0),
                           .num_tokens = num_tokens,
                           .in_features = layer->q_width,
                           .hidden_size = layer->shape.hidden,
                       });
}

/* Catches residuals that are lost or added twice, and biases. */
static void check_project(struct layer *layer, const char *name)
{
    char what[200];
    double worst = 0.0;
    int32_t width = layer->shape.hidden, last = layer->num_tokens - 1;
    struct array d = array_create(DTYPE_F32, (int64_t)layer->num_tokens * width);
    struct array alone = array_create(DTYPE_F32, width);
    struct expected *a = calloc((size_t)layer->q_width, sizeof(*a));
    require(a != NULL, "memory");
    for (int64_t i = 0; i < layer->attention.num_elements; i++) {
        array_set(&layer->attention, i, random_normal());
    }
    array_upload(&layer->attention);
    memcpy(d.host, layer->hidden.host, d.num_bytes);
    memcpy(alone.host, layer->hidden.host + (size_t)last * alone.num_bytes, alone.num_bytes);
    array_upload(&d);
    array_upload(&alone);
    run_project(layer, 0, layer->num_tokens, &d);
    run_project(layer, last, 1, &alone);
    bool is_right = array_download(&d);
    for (int32_t token = 0; token < layer->num_tokens; token++) {
        for (int32_t i = 0; i < layer->q_width; i++) {
            a[i].value = array_at(&layer->attention, (int64_t)token * layer->q_width + i);
        }
        for (int32_t column = 0; column < width; column++) {
            int64_t at = (int64_t)token * width + column;
            struct expected expected =
                expect_product(a, &layer->o_weight, column, layer->q_width,
                               layer->shape.has_biases ? array_at(&layer->o_bias, column) : 0.0);
            double residual = array_at(&layer->hidden, at);
            expected.value += residual;
            expected.bound += (fabs(expected.value) + fabs(residual)) * 0x1p-23;
            is_right &= is_near(expected, array_at(&d, at), &worst);
        }
    }
    snprintf(what, sizeof(what), "%s: o_proj, worst %.2f of its bound", name, worst);
    count(is_right, what);
    snprintf(what, sizeof(what), "%s: o_proj of one token alone", name);
    count(row_is_same(&d, last, &alone), what);
    array_destroy(&d);
    array_destroy(&alone);
    free(a);
}

static void run_mlp(const struct layer *layer, int64_t first, int32_t num_tokens,
                    const struct array *d)
{
    const struct shape *shape = &layer->shape;
    float *bias = shape->has_biases ? device_at(&layer->gate_up_bias, 0) : NULL;
    int64_t up_row = shape->intermediate;
    cuda_plain_mlp(cuda_of(layer),
                   &(struct mlp_params){
                       .hidden = device_at(&layer->hidden, first * shape->hidden),
                       .norm = {device_at(&layer->norm, 0), EPS},
                       .gate = {device_at(&layer->gate_up, 0), layer->dtype},
                       .up = {device_at(&layer->gate_up, up_row * shape->hidden), layer->dtype},
                       .gate_bias = bias,
                       .up_bias = bias == NULL ? NULL : bias + up_row,
                       .normed = device_at(&layer->normed, first * shape->hidden),
                       .d = device_at(d, 0),
                       .num_tokens = num_tokens,
                       .hidden_size = shape->hidden,
                       .intermediate_size = shape->intermediate,
                   });
}

/* Catches gate and up changing places, and an activation that is nearly right. */
static void check_mlp(struct layer *layer, const char *name)
{
    char what[200];
    double worst = 0.0;
    const struct shape *shape = &layer->shape;
    int32_t inner = shape->intermediate, last = layer->num_tokens - 1;
    struct array alone = array_create(layer->dtype, inner);
    struct expected *normed = calloc((size_t)shape->hidden, sizeof(*normed));
    require(normed != NULL, "memory");
    array_upload(&alone);
    array_poison(&layer->mlp);
    run_mlp(layer, 0, layer->num_tokens, &layer->mlp);
    run_mlp(layer, last, 1, &alone);
    bool is_right = array_download(&layer->mlp);
    for (int32_t token = 0; token < layer->num_tokens; token++) {
        expect_norm_row(layer, token, normed);
        for (int32_t column = 0; column < inner; column++) {
            struct expected sides[2];
            for (int32_t i = 0; i < 2; i++) {
                int64_t row = (int64_t)i * inner + column;
                sides[i] =
                    expect_product(normed, &layer->gate_up, row, shape->hidden,
                                   shape->has_biases ? array_at(&layer->gate_up_bias, row) : 0.0);
            }
            double silu = sides[0].value / (1.0 + exp(-sides[0].value));
            struct expected d = {silu * sides[1].value, 0.0};
            /* |silu'| <= 1.1 */
            double silu_bound = 1.1 * sides[0].bound + fabs(silu) * 0x1p-21;
            d.bound = silu_bound * (fabs(sides[1].value) + sides[1].bound) +
                      fabs(silu) * sides[1].bound + 1e-37;
            round_to(layer, &d);
            is_right &= is_near(d, array_at(&layer->mlp, (int64_t)token * inner + column), &worst);
        }
    }
    snprintf(what, sizeof(what), "%s: mlp, worst %.2f of its bound", name, worst);
    count(is_right, what);
    snprintf(what, sizeof(what), "%s: mlp of one token alone", name);
    count(row_is_same(&layer->mlp, last, &alone), what);
    array_destroy(&alone);
    free(normed);
}

static void run_logits(const struct layer *layer, int64_t first, int32_t num_rows,
                       const struct array *d)
{
    cuda_plain_logits(cuda_of(layer),
                      &(struct logits_params){
                          .hidden = device_at(&layer->hidden, 0),
                          .rows = device_at(&layer->rows, first),
                          .norm = {device_at(&layer->norm, 0), EPS},
                          .weight = {device_at(&layer->vocab_weight, 0), layer->dtype},
                          .normed = device_at(&layer->normed, 0),
                          .logits = device_at(d, 0),
                          .num_rows = num_rows,
                          .hidden_size = layer->shape.hidden,
                          .vocab_size = layer->shape.vocab,
                      });
}

/* Catches rows that are not gathered, and logits rounded to bf16. */
static void check_logits(struct layer *layer, const char *name)
{
    char what[200];
    double worst = 0.0;
    int32_t vocab = layer->shape.vocab;
    struct array alone = array_create(DTYPE_F32, vocab);
    struct expected *normed = calloc((size_t)layer->shape.hidden, sizeof(*normed));
    require(normed != NULL, "memory");
    array_upload(&alone);
    array_poison(&layer->logits);
    run_logits(layer, 0, NUM_ROWS, &layer->logits);
    run_logits(layer, NUM_ROWS - 1, 1, &alone);
    bool is_right = array_download(&layer->logits);
    for (int32_t row = 0; row < NUM_ROWS; row++) {
        expect_norm_row(layer, array_ids(&layer->rows)[row], normed);
        for (int32_t id = 0; id < vocab; id++) {
            struct expected d =
                expect_product(normed, &layer->vocab_weight, id, layer->shape.hidden, 0.0);
            is_right &= is_near(d, array_at(&layer->logits, (int64_t)row * vocab + id), &worst);
        }
    }
    snprintf(what, sizeof(what), "%s: logits, worst %.2f of its bound", name, worst);
    count(is_right, what);
    snprintf(what, sizeof(what), "%s: logits of one row alone", name);
    count(row_is_same(&layer->logits, NUM_ROWS - 1, &alone), what);
    array_destroy(&alone);
    free(normed);
}

/* Catches launches of nothing that are refused by the driver. */
static void check_nothing(struct layer *layer)
{
    run_qkv(layer, 0, 0, &layer->qkv, 0);
    run_attend(layer, 0, 0, &layer->attention, 0);
    run_project(layer, 0, 0, &layer->hidden);
    run_mlp(layer, 0, 0, &layer->mlp);
    run_logits(layer, 0, 0, &layer->logits);
}

static void check_layer(const struct shape *shape, enum dtype dtype, const struct step *step)
{
    char name[100];
    struct layer layer = layer_create(shape, dtype, step);
    snprintf(name, sizeof(name), "hidden %d, head_dim %d, %s, %d tokens", (int)shape->hidden,
             (int)shape->head_dim, dtype_name(dtype), (int)layer.num_tokens);
    check_nothing(&layer);
    check_qkv(&layer, name);
    check_attend(&layer, name);
    check_project(&layer, name);
    check_mlp(&layer, name);
    check_logits(&layer, name);
    layer_destroy(&layer);
}

static void run_all(void)
{
    static const struct shape shapes[] = {
        {64, 172, 512, 8, 4, 8, .is_interleaved = true},
        {90, 77, 131, 3, 1, 30, .has_biases = true, .window = 20},
        {256, 320, 300, 4, 2, 128, .has_head_norms = true},
        {130, 64, 65, 2, 2, 512, .has_biases = true, .has_head_norms = true, .window = 33},
    };
    static const struct step steps[] = {
        {.num_seqs = 1, .num_past = {0}, .num_new = {1}},
        {.num_seqs = 3, .num_past = {47, 300, 15}, .num_new = {1, 1, 1}, .num_padding = 2},
        {.num_seqs = 3, .num_past = {40, 0, 33}, .num_new = {1, 75, 5}, .num_padding = 3},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        for (size_t j = 0; j < sizeof(steps) / sizeof(steps[0]); j++) {
            check_layer(&shapes[i], DTYPE_F32, &steps[j]);
            check_layer(&shapes[i], DTYPE_BF16, &steps[j]);
        }
    }
}

int main(void)
{
    int exit_code = 0;
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    run_all();
    /* As the driver compiles them for other GPUs than Hopper. */
    ablations = IMBREX_ABLATE_HOPPER;
    run_all();
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
