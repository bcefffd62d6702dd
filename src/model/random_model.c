/* SPDX-License-Identifier: Apache-2.0 */
/* Each element is drawn by its tensor's name and its place, so that threads may fill in any order.
 * Matrices are uniform with variance 1 / in_features, norms about 1: activations stay finite and
 * logits differ. */
#include "model/random_model.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/machine_memory.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "model/config_fields.h"

#define PREFIX "random:"
#define NORM_DEVIATION 0.05f
#define BIAS_DEVIATION 0.1f
#define GRAIN 65536 /* elements that a thread takes at once, a multiple of 4 */

/* X(name, hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size, tied) */
#define SHAPE_LIST(X)                                   \
    X("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151936, 1)  \
    X("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 151936, 1) \
    X("qwen2.5-3b", 2048, 11008, 36, 16, 2, 151936, 1)  \
    X("qwen2.5-7b", 3584, 18944, 28, 28, 4, 152064, 0)  \
    X("qwen2.5-14b", 5120, 13824, 48, 40, 8, 152064, 0) \
    X("qwen2.5-32b", 5120, 27648, 64, 40, 8, 152064, 0) \
    X("qwen2.5-72b", 8192, 29568, 80, 64, 8, 152064, 0)

struct shape {
    const char *name;
    int hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, vocab_size, tied;
};

static const struct shape shapes[] = {
#define SHAPE_ROW(name, hidden, intermediate, layers, heads, kv_heads, vocab, tied) \
    {name, hidden, intermediate, layers, heads, kv_heads, vocab, tied},
    SHAPE_LIST(SHAPE_ROW)
#undef SHAPE_ROW
};
#define SHAPE_NAME(name, hidden, intermediate, layers, heads, kv_heads, vocab, tied) " " name
static const char known_shapes[] = SHAPE_LIST(SHAPE_NAME);

bool random_model_is_path(const char *path)
{
    return strncmp(path, PREFIX, strlen(PREFIX)) == 0;
}

/* ---- names and sizes ------------------------------------------------------------------------- */

static enum imbrex_status parse_path(const char *path, const struct shape **shape, uint64_t *seed,
                                     struct imbrex_error *err)
{
    const char *name = path + strlen(PREFIX);
    const char *colon = strchr(name, ':');
    size_t name_bytes = colon != NULL ? (size_t)(colon - name) : strlen(name);
    *shape = NULL;
    *seed = 0;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (strlen(shapes[i].name) == name_bytes && memcmp(shapes[i].name, name, name_bytes) == 0) {
            *shape = &shapes[i];
        }
    }
    if (*shape == NULL) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND, "%s: expected one of%s, found \"%.*s\"",
                         path, known_shapes, (int)(name_bytes < 64 ? name_bytes : 64), name);
    }
    if (colon == NULL) {
        return IMBREX_STATUS_OK;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end != '\0' || errno != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected a seed in [0, 2^64), found \"%.64s\"", path, colon + 1);
    }
    *seed = value;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_shape(const char *path, const struct shape *shape,
                                     struct model_config *config, struct imbrex_error *err)
{
    json_t *root = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:f, s:f, s:b, s:i}", "model_type", "qwen2",
        "hidden_size", shape->hidden_size, "intermediate_size", shape->intermediate_size,
        "num_hidden_layers", shape->num_layers, "num_attention_heads", shape->num_heads,
        "num_key_value_heads", shape->num_kv_heads, "vocab_size", shape->vocab_size,
        "tie_word_embeddings", shape->tied, "max_position_embeddings", 32768, "rope_theta", 1e6,
        "rms_norm_eps", 1e-6, "use_sliding_window", 0, "eos_token_id", 151645);
    if (root == NULL) {
        return error_out_of_memory(err, path, 0);
    }
    enum imbrex_status status = config_read(path, root, config, err);
    json_decref(root);
    return status;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* The list is made twice, first to count tensors and bytes. */
struct placer {
    struct checkpoint *checkpoint;
    struct checkpoint_tensor *tensors; /* NULL while counting */
    int32_t num_tensors;
    size_t vector_bytes, matrix_bytes, name_bytes;
    const char *path;
};

static void place(struct placer *placer, const char *name, int64_t rows, int64_t columns)
{
    size_t num_bytes = (size_t)rows * (size_t)(columns > 0 ? columns : 1) * sizeof(uint16_t);
    size_t *end = columns > 0 ? &placer->matrix_bytes : &placer->vector_bytes;
    if (placer->tensors != NULL) {
        char *copy = placer->checkpoint->owned_names + placer->name_bytes;
        memcpy(copy, name, strlen(name) + 1);
        placer->tensors[placer->num_tensors] = (struct checkpoint_tensor){
            .name = copy,
            .dtype_name = dtype_name(DTYPE_BF16),
            .dtype = DTYPE_BF16,
            .num_dims = columns > 0 ? 2 : 1,
            .shape = {rows, columns},
            /* Of a matrix the distance alone, until there is memory to add it to. */
            .elements = columns > 0 ? (const unsigned char *)(uintptr_t)*end
                                    : placer->checkpoint->owned_vectors + *end,
            .num_bytes = num_bytes,
            .file = placer->path,
        };
    }
    placer->num_tensors++;
    placer->name_bytes += strlen(name) + 1;
    *end += (num_bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
}

static void place_all(struct placer *placer, const struct model_config *config)
{
    char name[CHECKPOINT_NAME_BYTES];
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = (int64_t)config->num_heads * config->head_dim;
    int64_t kv_rows = (int64_t)config->num_kv_heads * config->head_dim;
    const struct {
        const char *name;
        int64_t rows, columns;
    } layer[] = {
        {"input_layernorm.weight", hidden, 0},
        {"post_attention_layernorm.weight", hidden, 0},
        {"self_attn.q_proj.weight", q_rows, hidden},
        {"self_attn.q_proj.bias", q_rows, 0},
        {"self_attn.k_proj.weight", kv_rows, hidden},
        {"self_attn.k_proj.bias", kv_rows, 0},
        {"self_attn.v_proj.weight", kv_rows, hidden},
        {"self_attn.v_proj.bias", kv_rows, 0},
        {"self_attn.o_proj.weight", hidden, q_rows},
        {"mlp.gate_proj.weight", intermediate, hidden},
        {"mlp.up_proj.weight", intermediate, hidden},
        {"mlp.down_proj.weight", hidden, intermediate},
    };
    place(placer, "model.embed_tokens.weight", config->vocab_size, hidden);
    for (int32_t i = 0; i < config->num_layers; i++) {
        for (size_t j = 0; j < sizeof(layer) / sizeof(layer[0]); j++) {
            snprintf(name, sizeof(name), "model.layers.%" PRId32 ".%s", i, layer[j].name);
            place(placer, name, layer[j].rows, layer[j].columns);
        }
    }
    place(placer, "model.norm.weight", hidden, 0);
    if (!config->tie_word_embeddings) {
        place(placer, "lm_head.weight", config->vocab_size, hidden);
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Source: Steele et al., "Fast splittable pseudorandom number generators", 2014. */
static uint64_t splitmix64(uint64_t state)
{
    state += 0x9e3779b97f4a7c15u;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
    return state ^ (state >> 31);
}

struct fill {
    uint16_t *elements;
    int64_t num_elements;
    uint64_t key;
    float mean, half_width;
};

/* Elements [begin, end) of a tensor: four to a draw. begin is a multiple of 4. */
static void fill_elements(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct fill *fill = arg;
    float step = fill->half_width / 32768.0f;
    (void)thread_idx;
    for (int64_t i = begin; i < end; i += 4) {
        uint64_t draw = splitmix64(fill->key + (uint64_t)i);
        for (int64_t j = i; j < i + 4 && j < end; j++) {
            float value = fill->mean + (float)((int32_t)(draw & 0xffff) - 32768) * step;
            uint32_t bits;
            memcpy(&bits, &value, sizeof(bits));
            fill->elements[j] = (uint16_t)(bits >> 16);
            draw >>= 16;
        }
    }
}

static struct fill fill_of(const struct checkpoint *checkpoint,
                           const struct checkpoint_tensor *tensor)
{
    uint64_t key = splitmix64(checkpoint->seed);
    struct fill fill = {
        .elements = (uint16_t *)(uintptr_t)tensor->elements,
        .num_elements = (int64_t)(tensor->num_bytes / sizeof(uint16_t)),
    };
    for (const char *name = tensor->name; *name != '\0'; name++) {
        key = splitmix64(key ^ (unsigned char)*name);
    }
    fill.key = key;
    float deviation;
    if (tensor->num_dims == 2) {
        deviation = 1.0f / sqrtf((float)tensor->shape[1]);
    } else {
        bool is_norm = strstr(tensor->name, "norm") != NULL;
        deviation = is_norm ? NORM_DEVIATION : BIAS_DEVIATION;
        fill.mean = is_norm ? 1.0f : 0.0f;
    }
    fill.half_width = deviation * sqrtf(3.0f); /* of a uniform distribution */
    return fill;
}

static int compare_names(const void *left, const void *right)
{
    const struct checkpoint_tensor *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

static enum imbrex_status make_tensors(const char *path, const struct model_config *config,
                                       struct checkpoint *checkpoint, struct imbrex_error *err)
{
    struct placer placer = {.checkpoint = checkpoint, .path = path};
    place_all(&placer, config);
    size_t num_tensors = (size_t)placer.num_tensors;
    checkpoint->owned_names = malloc(placer.name_bytes);
    checkpoint->owned_tensors = calloc(num_tensors, sizeof(checkpoint->owned_tensors[0]));
    checkpoint->tensors = calloc(num_tensors, sizeof(checkpoint->tensors[0]));
    checkpoint->owned_vectors = calloc(1, placer.vector_bytes);
    if (checkpoint->owned_names == NULL || checkpoint->owned_tensors == NULL ||
        checkpoint->tensors == NULL || checkpoint->owned_vectors == NULL) {
        return error_out_of_memory(err, path, num_tensors * sizeof(checkpoint->owned_tensors[0]));
    }
    checkpoint->is_random = true;
    checkpoint->region_bytes = placer.matrix_bytes;
    placer = (struct placer){
        .checkpoint = checkpoint, .path = path, .tensors = checkpoint->owned_tensors};
    place_all(&placer, config);
    checkpoint->num_tensors = placer.num_tensors;
    for (size_t i = 0; i < num_tensors; i++) {
        const struct checkpoint_tensor *tensor = &checkpoint->owned_tensors[i];
        checkpoint->tensors[i] = tensor;
        if (tensor->num_dims == 1) {
            struct fill fill = fill_of(checkpoint, tensor);
            fill_elements(&fill, 0, fill.num_elements, 0);
        }
    }
    qsort(checkpoint->tensors, num_tensors, sizeof(checkpoint->tensors[0]), compare_names);
    return IMBREX_STATUS_OK;
}

enum imbrex_status random_model_open(const char *path, struct model_config *config,
                                     struct checkpoint *checkpoint, struct imbrex_error *err)
{
    const struct shape *shape = NULL;
    struct checkpoint opened = {0};
    struct model_config result = {0};
    TRY(parse_path(path, &shape, &opened.seed, err));
    TRY(read_shape(path, shape, &result, err));
    enum imbrex_status status = make_tensors(path, &result, &opened, err);
    if (status != IMBREX_STATUS_OK) {
        checkpoint_close(&opened);
        return status;
    }
    *config = result;
    *checkpoint = opened;
    return IMBREX_STATUS_OK;
}

enum imbrex_status random_model_fill(struct checkpoint *checkpoint, struct imbrex_error *err)
{
    struct thread_pool *pool = NULL;
    const char *path = checkpoint->owned_tensors[0].file;
    size_t num_bytes = machine_memory_bytes("");
    if (checkpoint->region_bytes > num_bytes) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected weights of at most the %zu bytes (%zu MiB) that this "
                         "machine, or the process's memory limit, has left, found %zu (%zu MiB)",
                         path, num_bytes, num_bytes >> 20, checkpoint->region_bytes,
                         checkpoint->region_bytes >> 20);
    }
    TRY(memory_region_map(path, checkpoint->region_bytes, &checkpoint->region, err));
    enum imbrex_status status = thread_pool_create(thread_pool_num_cpus(), &pool, err);
    if (status != IMBREX_STATUS_OK) {
        memory_region_unmap(&checkpoint->region);
        return status;
    }
    for (int32_t i = 0; i < checkpoint->num_tensors; i++) {
        struct checkpoint_tensor *tensor = &checkpoint->owned_tensors[i];
        if (tensor->num_dims == 2) {
            tensor->elements = checkpoint->region.base + (uintptr_t)tensor->elements;
            struct fill fill = fill_of(checkpoint, tensor);
            thread_pool_run(pool, fill.num_elements, GRAIN, fill_elements, &fill);
        }
    }
    thread_pool_destroy(pool);
    return IMBREX_STATUS_OK;
}
