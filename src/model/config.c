/* SPDX-License-Identifier: Apache-2.0 */
/* config.json, read once into a plain struct. What would change the computation and is not
 * supported is refused by name; fields that change nothing are skipped. */
#include "model/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/config_fields.h"

struct architecture_row {
    const char *model_type, *class_name;
};

static const struct architecture_row architectures[ARCHITECTURE_COUNT] = {
#define ARCHITECTURE_ROW(name, model_type, class_name) \
    [ARCHITECTURE_##name] = {model_type, class_name},
    ARCHITECTURE_LIST(ARCHITECTURE_ROW)
#undef ARCHITECTURE_ROW
};

/* ` or "llama" or "qwen2"`, for messages, which skip the first " or ". */
#define SEPARATOR " or "
#define SEPARATOR_BYTES (sizeof(SEPARATOR) - 1)
#define MODEL_TYPE_QUOTED(name, model_type, class_name) SEPARATOR "\"" model_type "\""
#define CLASS_NAME_QUOTED(name, model_type, class_name) SEPARATOR "\"" class_name "\""
static const char known_model_types[] = ARCHITECTURE_LIST(MODEL_TYPE_QUOTED);
static const char known_class_names[] = ARCHITECTURE_LIST(CLASS_NAME_QUOTED);

struct dim_row {
    const char *field;
    size_t offset; /* of an int32_t in struct model_config */
    int32_t max;
};

#define DIM(field, member, max)                           \
    {                                                     \
        field, offsetof(struct model_config, member), max \
    }

/* Kernels hold extents in int32_t: whatever is multiplied there must stay below 2^31. */
#define MAX_HEADS (1 << 12) /* q, k and v heads of a token: 3 * 2^12 * 2^12 elements */
#define MAX_HEAD_DIM (1 << 12)
static const struct dim_row required_dims[] = {
    /* published models end at 2^14; more is a damaged file, refused before it asks for memory */
    DIM("hidden_size", hidden_size, 1 << 20),
    DIM("intermediate_size", intermediate_size, 1 << 22), /* four times hidden_size, as is usual */
    DIM("num_hidden_layers", num_layers, 1 << 12),        /* published: up to 126 */
    DIM("num_attention_heads", num_heads, MAX_HEADS),
    DIM("vocab_size", vocab_size, 1 << 24), /* published: up to 2^18; 64 MiB of logits a row */
    DIM("max_position_embeddings", max_position_embeddings, 1 << 30), /* + a chunk: below 2^31 */
};

#define MIN_ROPE_THETA 1.0
#define MAX_ROPE_THETA 1e15 /* published: 1e4 to 1e8 */
#define DEFAULT_ROPE_THETA 10000.0
#define MIN_RMS_NORM_EPS 1e-20 /* a normal fp32 number whose reciprocal root is finite */
#define MAX_RMS_NORM_EPS 1.0

const char *architecture_name(enum architecture architecture)
{
    return architectures[architecture].model_type;
}

static bool is_set(const json_t *value)
{
    return value != NULL && !json_is_null(value);
}

/* The string in quotes, or what else the value is. */
static const char *quote(const json_t *value, char *text, size_t text_bytes)
{
    if (json_is_string(value)) {
        snprintf(text, text_bytes, "\"%s\"", json_string_value(value));
    } else {
        snprintf(text, text_bytes, "%s", value == NULL ? "nothing" : json_kind(value));
    }
    return text;
}

static bool is_string(const json_t *value, const char *expected)
{
    return json_is_string(value) && strcmp(json_string_value(value), expected) == 0;
}

static bool array_holds(const json_t *array, const char *expected)
{
    size_t idx;
    const json_t *element;
    json_array_foreach(array, idx, element)
    {
        if (is_string(element, expected)) {
            return true;
        }
    }
    return false;
}

static enum imbrex_status read_model_type(const char *path, const json_t *model_type,
                                          enum architecture *architecture, struct imbrex_error *err)
{
    char found[128];
    if (!json_is_string(model_type)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: model_type: expected a string, found %s",
                         path, json_kind(model_type));
    }
    for (int i = 0; i < ARCHITECTURE_COUNT; i++) {
        if (is_string(model_type, architectures[i].model_type)) {
            *architecture = (enum architecture)i;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: model_type: expected %s, found %s", path,
                     known_model_types + SEPARATOR_BYTES, quote(model_type, found, sizeof(found)));
}

/* By "architectures" alone. */
static enum imbrex_status read_class(const char *path, const json_t *classes,
                                     enum architecture *architecture, struct imbrex_error *err)
{
    char found[128];
    for (int i = 0; i < ARCHITECTURE_COUNT; i++) {
        if (array_holds(classes, architectures[i].class_name)) {
            *architecture = (enum architecture)i;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: architectures: expected %s, found %s",
                     path, known_class_names + SEPARATOR_BYTES,
                     quote(json_array_get(classes, 0), found, sizeof(found)));
}

static enum imbrex_status read_architecture(const char *path, const json_t *root,
                                            struct model_config *config, struct imbrex_error *err)
{
    const json_t *model_type = json_object_get(root, "model_type");
    const json_t *classes = json_object_get(root, "architectures");
    char found[128];
    if (is_set(classes) && !json_is_array(classes)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: architectures: expected an array, found %s", path,
                         json_kind(classes));
    }
    if (!is_set(model_type) && !is_set(classes)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: model_type: expected %s, found neither it nor architectures", path,
                         known_model_types + SEPARATOR_BYTES);
    }
    if (!is_set(model_type)) {
        return read_class(path, classes, &config->architecture, err);
    }
    TRY(read_model_type(path, model_type, &config->architecture, err));
    const char *class_name = architectures[config->architecture].class_name;
    if (is_set(classes) && !array_holds(classes, class_name)) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: architectures: expected \"%s\" (model_type is \"%s\"), found %s",
                         path, class_name, architecture_name(config->architecture),
                         quote(json_array_get(classes, 0), found, sizeof(found)));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_quantization(const char *path, const json_t *root,
                                             struct imbrex_error *err)
{
    const json_t *quantization = json_object_get(root, "quantization_config");
    char found[128];
    if (!is_set(quantization)) {
        return IMBREX_STATUS_OK;
    }
    const json_t *method = json_object_get(quantization, "quant_method");
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: quantization_config: expected none (BF16, F16 or F32 weights), found "
                     "quant_method %s",
                     path, quote(method, found, sizeof(found)));
}

static enum imbrex_status read_dims(const char *path, const json_t *root,
                                    struct model_config *config, struct imbrex_error *err)
{
    for (size_t i = 0; i < sizeof(required_dims) / sizeof(required_dims[0]); i++) {
        const struct dim_row *row = &required_dims[i];
        int32_t *dim = (int32_t *)(void *)((char *)config + row->offset);
        TRY(json_get_int32(path, root, row->field, 1, row->max, dim, err));
    }
    config->num_kv_heads = config->num_heads;
    TRY(json_get_optional_int32(path, root, "num_key_value_heads", 1, MAX_HEADS,
                                &config->num_kv_heads, NULL, err));
    if (config->num_heads % config->num_kv_heads != 0) {
        return error_set(
            err, IMBREX_STATUS_FORMAT,
            "%s: num_key_value_heads: expected a divisor of num_attention_heads %" PRId32
            ", found %" PRId32,
            path, config->num_heads, config->num_kv_heads);
    }
    bool found;
    TRY(json_get_optional_int32(path, root, "head_dim", 1, MAX_HEAD_DIM, &config->head_dim, &found,
                                err));
    if (!found) {
        if (config->hidden_size % config->num_heads != 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: num_attention_heads: expected a divisor of hidden_size %" PRId32
                             ", found %" PRId32,
                             path, config->hidden_size, config->num_heads);
        }
        config->head_dim = config->hidden_size / config->num_heads;
    }
    if (config->head_dim % 2 != 0 || config->head_dim > MAX_HEAD_DIM) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: head_dim: expected an even number of at most %d, found %" PRId32,
                         path, MAX_HEAD_DIM, config->head_dim);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_partial_rotary(const char *path, const json_t *object,
                                               struct imbrex_error *err)
{
    const json_t *factor = json_object_get(object, "partial_rotary_factor");
    char found[32];
    if (!is_set(factor) || json_number_value(factor) == 1.0) {
        return IMBREX_STATUS_OK;
    }
    if (json_is_number(factor)) {
        snprintf(found, sizeof(found), "%.9g", json_number_value(factor));
    } else {
        snprintf(found, sizeof(found), "%s", json_kind(factor));
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: partial_rotary_factor: expected 1 (all of head_dim turns), found %s",
                     path, found);
}

/* rope_parameters, or its older name rope_scaling: {"rope_type": "default", "rope_theta": ...}. */
static enum imbrex_status read_rope_object(const char *path, const json_t *root, const char *name,
                                           double *rope_theta, struct imbrex_error *err)
{
    /* "type" is what "rope_type" was called before; some files carry both. */
    static const char *const type_fields[] = {"rope_type", "type"};
    json_t *rope = json_object_get(root, name);
    char found[128];
    if (!is_set(rope)) {
        return IMBREX_STATUS_OK;
    }
    if (!json_is_object(rope)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected an object, found %s", path,
                         name, json_kind(rope));
    }
    for (size_t i = 0; i < sizeof(type_fields) / sizeof(type_fields[0]); i++) {
        const json_t *type = json_object_get(rope, type_fields[i]);
        if (is_set(type) && !is_string(type, "default")) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %s.%s: expected \"default\", found %s", path, name,
                             type_fields[i], quote(type, found, sizeof(found)));
        }
    }
    const char *key;
    json_t *member;
    json_object_foreach(rope, key, member)
    {
        if (json_is_object(member)) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %s: expected the same parameters for all layers, found an object "
                             "for \"%s\"",
                             path, name, key);
        }
    }
    TRY(check_partial_rotary(path, rope, err));
    return json_get_optional_double(path, rope, "rope_theta", MIN_ROPE_THETA, MAX_ROPE_THETA,
                                    rope_theta, NULL, err);
}

static enum imbrex_status read_rope(const char *path, const json_t *root,
                                    struct model_config *config, struct imbrex_error *err)
{
    config->rope_theta = DEFAULT_ROPE_THETA;
    TRY(json_get_optional_double(path, root, "rope_theta", MIN_ROPE_THETA, MAX_ROPE_THETA,
                                 &config->rope_theta, NULL, err));
    TRY(check_partial_rotary(path, root, err));
    TRY(read_rope_object(path, root, "rope_scaling", &config->rope_theta, err));
    return read_rope_object(path, root, "rope_parameters", &config->rope_theta, err);
}

/* Attention over all earlier positions in every layer is all there is. */
static enum imbrex_status check_attention(const char *path, const json_t *root,
                                          const struct model_config *config,
                                          struct imbrex_error *err)
{
    bool is_sliding = false;
    char found[128];
    /* llama has no such field, its classes ignore it; qwen2 writes a window and switches it off. */
    if (config->architecture == ARCHITECTURE_QWEN2) {
        TRY(json_get_optional_bool(path, root, "use_sliding_window", &is_sliding, err));
    }
    if (is_sliding && is_set(json_object_get(root, "sliding_window"))) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: use_sliding_window: expected false, found true", path);
    }
    const json_t *layer_types = json_object_get(root, "layer_types");
    if (!is_set(layer_types)) {
        return IMBREX_STATUS_OK;
    }
    if (!json_is_array(layer_types) || json_array_size(layer_types) != (size_t)config->num_layers) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: layer_types: expected an array of num_hidden_layers = %" PRId32
                         " names, found %s of %zu",
                         path, config->num_layers, json_kind(layer_types),
                         json_array_size(layer_types));
    }
    size_t idx;
    const json_t *type;
    json_array_foreach(layer_types, idx, type)
    {
        if (!is_string(type, "full_attention")) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: layer_types[%zu]: expected \"full_attention\", found %s", path,
                             idx, quote(type, found, sizeof(found)));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_activation(const char *path, const json_t *root,
                                          struct imbrex_error *err)
{
    const json_t *activation = json_object_get(root, "hidden_act");
    char found[128];
    if (!is_set(activation) || is_string(activation, "silu")) {
        return IMBREX_STATUS_OK; /* the default of both architectures */
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: hidden_act: expected \"silu\", found %s",
                     path, quote(activation, found, sizeof(found)));
}

static enum imbrex_status read_biases(const char *path, const json_t *root,
                                      struct model_config *config, struct imbrex_error *err)
{
    if (config->architecture == ARCHITECTURE_QWEN2) {
        config->qkv_bias = true;
        return IMBREX_STATUS_OK;
    }
    TRY(json_get_optional_bool(path, root, "attention_bias", &config->qkv_bias, err));
    config->o_bias = config->qkv_bias;
    return json_get_optional_bool(path, root, "mlp_bias", &config->mlp_bias, err);
}

enum imbrex_status config_read_eos_token_ids(const char *path, const json_t *root,
                                             int32_t *token_ids, int32_t *num_token_ids,
                                             struct imbrex_error *err)
{
    const json_t *eos = json_object_get(root, "eos_token_id");
    size_t num_ids = json_is_array(eos) ? json_array_size(eos) : is_set(eos);
    if (num_ids > CONFIG_MAX_EOS_TOKENS) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: eos_token_id: expected at most %d ids, found %zu", path,
                         CONFIG_MAX_EOS_TOKENS, num_ids);
    }
    for (size_t i = 0; i < num_ids; i++) {
        const json_t *id = json_is_array(eos) ? json_array_get(eos, i) : eos;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: eos_token_id: expected ids in [0, %" PRId32 "], found %s", path,
                             INT32_MAX, json_is_integer(id) ? "one outside" : json_kind(id));
        }
    }
    for (size_t i = 0; i < num_ids; i++) {
        const json_t *id = json_is_array(eos) ? json_array_get(eos, i) : eos;
        token_ids[i] = (int32_t)json_integer_value(id);
    }
    *num_token_ids = (int32_t)num_ids;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_fields(const char *path, const json_t *root,
                                      struct model_config *config, struct imbrex_error *err)
{
    TRY(read_architecture(path, root, config, err));
    TRY(check_quantization(path, root, err));
    TRY(read_dims(path, root, config, err));
    TRY(json_get_double(path, root, "rms_norm_eps", MIN_RMS_NORM_EPS, MAX_RMS_NORM_EPS,
                        &config->rms_norm_eps, err));
    TRY(read_rope(path, root, config, err));
    TRY(check_attention(path, root, config, err));
    TRY(read_activation(path, root, err));
    TRY(read_biases(path, root, config, err));
    TRY(json_get_optional_bool(path, root, "tie_word_embeddings", &config->tie_word_embeddings,
                               err));
    return config_read_eos_token_ids(path, root, config->eos_token_ids, &config->num_eos_token_ids,
                                     err);
}

enum imbrex_status config_parse(const char *path, const void *bytes, size_t num_bytes,
                                struct model_config *config, struct imbrex_error *err)
{
    json_t *root = NULL;
    struct model_config result = {0};
    TRY(json_parse_object(path, bytes, num_bytes, &root, err));
    enum imbrex_status status = read_fields(path, root, &result, err);
    json_decref(root);
    if (status == IMBREX_STATUS_OK) {
        *config = result;
    }
    return status;
}
