/* SPDX-License-Identifier: Apache-2.0 */
/* Binds tensors by name. The same walk over the architecture runs twice: first it checks everything
 * and counts the fp32 copies, so that only a checkpoint that fits is given memory; then it copies.
 * Tensors that the walk did not ask for are an error: leaving one out silently would run a
 * different model. */
#include "model/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/quant.h"

#define TENSOR_NAME_BYTES 96 /* of names that we look for */
#define SHAPE_TEXT_BYTES (IMBREX_MAX_TENSOR_DIMS * 22 + 3)

/* "F32 F16 ... Q6_K" */
#define DTYPE_WORD(name, block_elements, block_bytes) " " #name
static const char known_dtypes[] = "one of" DTYPE_LIST(DTYPE_WORD);

struct binder {
    const struct checkpoint *checkpoint;
    const char *path;
    struct imbrex_error *err;
    struct weights *weights;
    bool *used; /* [num_tensors] of the checkpoint; those bound or ignored on purpose */
};

/* The tensor stored under this name, marked as used, or NULL. */
static const struct checkpoint_tensor *take(struct binder *binder, const char *stored_name)
{
    const struct checkpoint *checkpoint = binder->checkpoint;
    int32_t idx = checkpoint_find_idx(checkpoint, stored_name);
    if (idx < 0) {
        return NULL;
    }
    binder->used[idx] = true;
    return checkpoint->tensors[idx];
}

/* "[896, 4864]" */
static const char *shape_text(const int64_t *shape, int32_t num_dims, char text[SHAPE_TEXT_BYTES])
{
    size_t length = 1;
    snprintf(text, SHAPE_TEXT_BYTES, "[");
    for (int32_t i = 0; i < num_dims; i++) {
        length += (size_t)snprintf(text + length, SHAPE_TEXT_BYTES - length, "%s%" PRId64,
                                   i > 0 ? ", " : "", shape[i]);
    }
    snprintf(text + length, SHAPE_TEXT_BYTES - length, "]");
    return text;
}

/* Finds a tensor and checks its dtype and shape. */
static enum imbrex_status bind_tensor(struct binder *binder, const char *name, const int64_t *shape,
                                      int32_t num_dims, const struct checkpoint_tensor **bound)
{
    char expected[SHAPE_TEXT_BYTES], found[SHAPE_TEXT_BYTES];
    char stored[CHECKPOINT_NAME_BYTES];
    name = checkpoint_stored_name(binder->checkpoint, name, stored);
    const struct checkpoint_tensor *tensor = take(binder, name);
    if (tensor == NULL) {
        return error_set(binder->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected a tensor of shape %s, found none of that name",
                         binder->path, name, shape_text(shape, num_dims, expected));
    }
    if (tensor->dtype == DTYPE_COUNT) {
        return error_set(binder->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: dtype: expected %s, found %s", tensor->file, name,
                         binder->checkpoint->is_gguf ? known_dtypes : "F32, F16 or BF16",
                         tensor->dtype_name);
    }
    if (tensor->num_dims != num_dims ||
        memcmp(tensor->shape, shape, (size_t)num_dims * sizeof(shape[0])) != 0) {
        return error_set(binder->err, IMBREX_STATUS_FORMAT, "%s: %s: shape: expected %s, found %s",
                         tensor->file, name, shape_text(shape, num_dims, expected),
                         shape_text(tensor->shape, tensor->num_dims, found));
    }
    *bound = tensor;
    return IMBREX_STATUS_OK;
}

static bool is_second_walk(const struct binder *binder)
{
    return binder->weights->converted != NULL;
}

/* Once for every tensor in use: the first walk reaches all of them. */
static void count(struct binder *binder, const struct checkpoint_tensor *tensor)
{
    if (!is_second_walk(binder)) {
        binder->weights->num_parameters +=
            (int64_t)(tensor->num_bytes / dtype_block_bytes(tensor->dtype)) *
            dtype_block_elements(tensor->dtype);
        binder->weights->num_bytes += tensor->num_bytes;
    }
}

static enum imbrex_status bind_matrix(struct binder *binder, const char *name, int64_t rows,
                                      int64_t columns, struct weight_view *view)
{
    const struct checkpoint_tensor *tensor = NULL;
    const int64_t shape[] = {rows, columns};
    TRY(bind_tensor(binder, name, shape, 2, &tensor));
    int32_t block_elements = dtype_block_elements(tensor->dtype);
    if (columns % block_elements != 0) {
        return error_set(binder->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected rows of a multiple of %" PRId32
                         " elements, a block of %s, found %" PRId64,
                         tensor->file, tensor->name, block_elements, dtype_name(tensor->dtype),
                         columns);
    }
    if (dtype_is_quantized(tensor->dtype) && columns > binder->weights->max_quantized_columns) {
        binder->weights->max_quantized_columns = columns;
    }
    if (tensor->dtype == DTYPE_BF16 && columns > binder->weights->max_bf16_columns) {
        binder->weights->max_bf16_columns = columns;
    }
    count(binder, tensor);
    *view = (struct weight_view){tensor->elements, tensor->dtype};
    return IMBREX_STATUS_OK;
}

/* A norm or bias: takes its place among the fp32 copies, and is widened on the second walk. */
static enum imbrex_status bind_vector(struct binder *binder, const char *name, int64_t length,
                                      const float **copy)
{
    const struct checkpoint_tensor *tensor = NULL;
    struct weights *weights = binder->weights;
    TRY(bind_tensor(binder, name, &length, 1, &tensor));
    if (dtype_is_quantized(tensor->dtype)) {
        return error_set(binder->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: dtype: expected F32, F16 or BF16 for a norm or bias, found %s",
                         tensor->file, tensor->name, dtype_name(tensor->dtype));
    }
    count(binder, tensor);
    if (is_second_walk(binder)) {
        float *values = weights->converted + weights->num_converted;
        quant_dequantize_row(tensor->dtype, tensor->elements, values, length);
        *copy = values;
    }
    weights->num_converted += (size_t)length;
    return IMBREX_STATUS_OK;
}

/* "model.layers.7.mlp.up_proj.weight" */
static const char *layer_tensor_name(int32_t layer_idx, const char *suffix, const char *kind,
                                     char name[TENSOR_NAME_BYTES])
{
    snprintf(name, TENSOR_NAME_BYTES, "model.layers.%" PRId32 ".%s.%s", layer_idx, suffix, kind);
    return name;
}

/* A projection of one layer: its matrix and, if it has one, its bias. */
static enum imbrex_status bind_projection(struct binder *binder, int32_t layer_idx,
                                          const char *suffix, int64_t rows, int64_t columns,
                                          bool has_bias, struct weight_view *matrix,
                                          const float **bias)
{
    char name[TENSOR_NAME_BYTES];
    TRY(bind_matrix(binder, layer_tensor_name(layer_idx, suffix, "weight", name), rows, columns,
                    matrix));
    if (has_bias) {
        return bind_vector(binder, layer_tensor_name(layer_idx, suffix, "bias", name), rows, bias);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status bind_layer(struct binder *binder, const struct model_config *config,
                                     int32_t layer_idx)
{
    struct layer_weights *layer = &binder->weights->layers[layer_idx];
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = (int64_t)config->num_heads * config->head_dim;
    int64_t kv_rows = (int64_t)config->num_kv_heads * config->head_dim;
    bool qkv_bias = config->qkv_bias, mlp_bias = config->mlp_bias;
    char name[TENSOR_NAME_BYTES];

    TRY(bind_vector(binder, layer_tensor_name(layer_idx, "input_layernorm", "weight", name), hidden,
                    &layer->input_layernorm));
    TRY(bind_vector(binder,
                    layer_tensor_name(layer_idx, "post_attention_layernorm", "weight", name),
                    hidden, &layer->post_attention_layernorm));
    if (config->qk_norm) {
        TRY(bind_vector(binder, layer_tensor_name(layer_idx, "self_attn.q_norm", "weight", name),
                        config->head_dim, &layer->q_norm));
        TRY(bind_vector(binder, layer_tensor_name(layer_idx, "self_attn.k_norm", "weight", name),
                        config->head_dim, &layer->k_norm));
    }
    TRY(bind_projection(binder, layer_idx, "self_attn.q_proj", q_rows, hidden, qkv_bias,
                        &layer->q_proj, &layer->q_bias));
    TRY(bind_projection(binder, layer_idx, "self_attn.k_proj", kv_rows, hidden, qkv_bias,
                        &layer->k_proj, &layer->k_bias));
    TRY(bind_projection(binder, layer_idx, "self_attn.v_proj", kv_rows, hidden, qkv_bias,
                        &layer->v_proj, &layer->v_bias));
    TRY(bind_projection(binder, layer_idx, "self_attn.o_proj", hidden, q_rows, config->o_bias,
                        &layer->o_proj, &layer->o_bias));
    TRY(bind_projection(binder, layer_idx, "mlp.gate_proj", intermediate, hidden, mlp_bias,
                        &layer->gate_proj, &layer->gate_bias));
    TRY(bind_projection(binder, layer_idx, "mlp.up_proj", intermediate, hidden, mlp_bias,
                        &layer->up_proj, &layer->up_bias));
    return bind_projection(binder, layer_idx, "mlp.down_proj", hidden, intermediate, mlp_bias,
                           &layer->down_proj, &layer->down_bias);
}

/* lm_head is embed_tokens if config says so or if there is no other. */
static enum imbrex_status bind_lm_head(struct binder *binder, const struct model_config *config)
{
    struct weights *weights = binder->weights;
    char stored[CHECKPOINT_NAME_BYTES];
    const char *name = checkpoint_stored_name(binder->checkpoint, "lm_head.weight", stored);
    bool is_stored = checkpoint_find(binder->checkpoint, name) != NULL;
    weights->tied = config->tie_word_embeddings || !is_stored;
    if (!weights->tied) {
        weights->tied_reason = binder->checkpoint->is_gguf ? "the file has an output.weight"
                                                           : "the checkpoint has an lm_head.weight";
        return bind_matrix(binder, "lm_head.weight", config->vocab_size, config->hidden_size,
                           &weights->lm_head);
    }
    if (binder->checkpoint->is_gguf) {
        weights->tied_reason = "the file has no output.weight";
    } else if (!config->tie_word_embeddings) {
        weights->tied_reason = "the checkpoint has no lm_head.weight";
    } else if (is_stored) {
        weights->tied_reason = "config.json sets tie_word_embeddings; lm_head.weight is ignored";
        (void)take(binder, name);
    } else {
        weights->tied_reason = "config.json sets tie_word_embeddings";
    }
    weights->lm_head = weights->embed_tokens;
    return IMBREX_STATUS_OK;
}

/* GGUF files say Llama 3's RoPE with a tensor. */
static enum imbrex_status bind_rope_factors(struct binder *binder,
                                            const struct model_config *config)
{
    static const char name[] = "rope_freqs.weight";
    const struct checkpoint *checkpoint = binder->checkpoint;
    if (!checkpoint->is_gguf || checkpoint_find(checkpoint, name) == NULL) {
        return IMBREX_STATUS_OK;
    }
    const float *factors = NULL;
    int32_t num_factors = config->head_dim / 2;
    TRY(bind_vector(binder, name, num_factors, &factors));
    for (int32_t i = 0; factors != NULL && i < num_factors; i++) {
        if (!(factors[i] > 0.0f && factors[i] < INFINITY)) {
            return error_set(binder->err, IMBREX_STATUS_FORMAT,
                             "%s: %s: expected positive numbers, found %g", binder->path, name,
                             (double)factors[i]);
        }
    }
    binder->weights->rope_factors = factors;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status walk(struct binder *binder, const struct model_config *config)
{
    struct weights *weights = binder->weights;
    weights->num_converted = 0;
    TRY(bind_matrix(binder, "model.embed_tokens.weight", config->vocab_size, config->hidden_size,
                    &weights->embed_tokens));
    for (int32_t i = 0; i < config->num_layers; i++) {
        TRY(bind_layer(binder, config, i));
    }
    TRY(bind_vector(binder, "model.norm.weight", config->hidden_size, &weights->norm));
    TRY(bind_rope_factors(binder, config));
    return bind_lm_head(binder, config);
}

/* Old checkpoints store the RoPE frequencies, which follow from config. */
bool weights_is_ignored(const char *name)
{
    static const char suffix[] = ".rotary_emb.inv_freq";
    size_t name_bytes = strlen(name), suffix_bytes = sizeof(suffix) - 1;
    return name_bytes > suffix_bytes && strcmp(name + name_bytes - suffix_bytes, suffix) == 0;
}

static enum imbrex_status check_all_used(const struct binder *binder,
                                         const struct model_config *config)
{
    char shape[SHAPE_TEXT_BYTES];
    for (int32_t i = 0; i < binder->checkpoint->num_tensors; i++) {
        const struct checkpoint_tensor *tensor = binder->checkpoint->tensors[i];
        if (!binder->used[i] && !weights_is_ignored(tensor->name)) {
            return error_set(binder->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %.128s: expected only the tensors of \"%s\" with this "
                             "configuration, found this one of shape %s",
                             tensor->file, tensor->name, architecture_name(config->architecture),
                             shape_text(tensor->shape, tensor->num_dims, shape));
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status weights_bind(const struct checkpoint *checkpoint,
                                const struct model_config *config, const char *path,
                                struct weights *weights, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct weights bound = {0};
    struct binder binder = {.checkpoint = checkpoint, .path = path, .err = err, .weights = &bound};
    size_t num_layers = (size_t)config->num_layers, converted_bytes;
    bound.layers = calloc(num_layers, sizeof(bound.layers[0]));
    binder.used = calloc((size_t)checkpoint->num_tensors + 1, sizeof(binder.used[0]));
    if (bound.layers == NULL || binder.used == NULL) {
        status = error_out_of_memory(err, "a model's layers", num_layers * sizeof(bound.layers[0]));
        goto fail;
    }
    TRY_OR_FAIL(walk(&binder, config));
    TRY_OR_FAIL(check_all_used(&binder, config));
    if (!size_mul(bound.num_converted, sizeof(bound.converted[0]), &converted_bytes)) {
        converted_bytes = SIZE_MAX;
    }
    bound.converted = malloc(converted_bytes);
    if (bound.converted == NULL) {
        status = error_out_of_memory(err, "norms and biases in fp32", converted_bytes);
        goto fail;
    }
    TRY_OR_FAIL(walk(&binder, config));
    free(binder.used);
    *weights = bound;
    return IMBREX_STATUS_OK;

fail:
    free(binder.used);
    weights_release(&bound);
    return status;
}

void weights_rebase(struct weights *weights, int32_t num_layers, const unsigned char *base)
{
    weights->embed_tokens.elements = base + (uintptr_t)weights->embed_tokens.elements;
    weights->lm_head.elements = base + (uintptr_t)weights->lm_head.elements;
    for (int32_t i = 0; i < num_layers; i++) {
        struct layer_weights *layer = &weights->layers[i];
        struct weight_view *const views[] = {&layer->q_proj,   &layer->k_proj,    &layer->v_proj,
                                             &layer->o_proj,   &layer->gate_proj, &layer->up_proj,
                                             &layer->down_proj};
        for (size_t j = 0; j < sizeof(views) / sizeof(views[0]); j++) {
            views[j]->elements = base + (uintptr_t)views[j]->elements;
        }
    }
}

void weights_release(struct weights *weights)
{
    free(weights->converted);
    free(weights->layers);
    *weights = (struct weights){0};
}
