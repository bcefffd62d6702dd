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
static const struct dim_row required_dims[] = {
    /* published models end at 2^14; more is a damaged file, refused before it asks for memory */
    DIM("hidden_size", hidden_size, 1 << 20),
    DIM("intermediate_size", intermediate_size, 1 << 22), /* four times hidden_size, as is usual */
    DIM("num_hidden_layers", num_layers, CONFIG_MAX_LAYERS),
    DIM("num_attention_heads", num_heads, MAX_HEADS),
    DIM("vocab_size", vocab_size, 1 << 24), /* published: up to 2^18; 64 MiB of logits a row */
    DIM("max_position_embeddings", max_position_embeddings, 1 << 30), /* + a chunk: below 2^31 */
};

#define MIN_RMS_NORM_EPS 1e-20 /* a normal fp32 number whose reciprocal root is finite */
#define MAX_RMS_NORM_EPS 1.0
#define QWEN3_HEAD_DIM 128 /* where config.json has none; the others divide hidden_size */
#define DEFAULT_SLIDING_WINDOW 4096
#define DEFAULT_MAX_WINDOW_LAYERS 28
#define MAX_SLIDING_WINDOW (1 << 30)

const char *architecture_name(enum architecture architecture)
{
    return architectures[architecture].model_type;
}

int32_t config_layer_window(const struct model_config *config, int32_t layer_idx)
{
    bool is_sliding = (config->sliding_layers[layer_idx / 64] >> (layer_idx % 64) & 1) != 0;
    return is_sliding ? config->sliding_window : 0;
}

bool config_is_set(const json_t *value)
{
    return value != NULL && !json_is_null(value);
}

bool config_is_string(const json_t *value, const char *expected)
{
    return json_is_string(value) && strcmp(json_string_value(value), expected) == 0;
}

const char *config_quote(const json_t *value, char text[CONFIG_QUOTE_BYTES])
{
    if (json_is_string(value)) {
        snprintf(text, CONFIG_QUOTE_BYTES, "\"%s\"", json_string_value(value));
    } else if (json_is_number(value)) {
        snprintf(text, CONFIG_QUOTE_BYTES, "%.9g", json_number_value(value));
    } else {
        snprintf(text, CONFIG_QUOTE_BYTES, "%s", json_kind(value));
    }
    return text;
}

static bool array_holds(const json_t *array, const char *expected)
{
    size_t idx;
    const json_t *element;
    json_array_foreach(array, idx, element)
    {
        if (config_is_string(element, expected)) {
            return true;
        }
    }
    return false;
}

/* ` (a mixture of experts)` where a model_type or class name tells more than that it is unknown. */
static const char *kind_of_name(const json_t *name)
{
    static const char *const kinds[][2] = {
        {"moe", " (a mixture of experts)"},     {"Moe", " (a mixture of experts)"},
        {"mixtral", " (a mixture of experts)"}, {"Mixtral", " (a mixture of experts)"},
        {"_vl", " (a vision model)"},           {"VLFor", " (a vision model)"},
        {"llava", " (a vision model)"},         {"Llava", " (a vision model)"},
        {"mllama", " (a vision model)"},        {"Mllama", " (a vision model)"},
    };
    for (size_t i = 0; json_is_string(name) && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strstr(json_string_value(name), kinds[i][0]) != NULL) {
            return kinds[i][1];
        }
    }
    return "";
}

/* Fields that make another kind of model of any architecture. */
static enum imbrex_status check_kind(const char *path, const json_t *root, struct imbrex_error *err)
{
    static const char *const fields[][2] = {
        {"num_experts", "a mixture of experts"},      {"num_local_experts", "a mixture of experts"},
        {"n_routed_experts", "a mixture of experts"}, {"vision_config", "a vision model"},
        {"audio_config", "an audio model"},
    };
    char found[CONFIG_QUOTE_BYTES], model_type[CONFIG_QUOTE_BYTES];
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const json_t *value = json_object_get(root, fields[i][0]);
        if (config_is_set(value) && !(json_is_number(value) && json_number_value(value) == 0.0)) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %s: expected none (a dense text model), found %s: model_type %s "
                             "is %s",
                             path, fields[i][0], config_quote(value, found),
                             config_quote(json_object_get(root, "model_type"), model_type),
                             fields[i][1]);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_model_type(const char *path, const json_t *model_type,
                                          enum architecture *architecture, struct imbrex_error *err)
{
    char found[CONFIG_QUOTE_BYTES];
    if (!json_is_string(model_type)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: model_type: expected a string, found %s",
                         path, json_kind(model_type));
    }
    for (int i = 0; i < ARCHITECTURE_COUNT; i++) {
        if (config_is_string(model_type, architectures[i].model_type)) {
            *architecture = (enum architecture)i;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: model_type: expected %s, found %s%s",
                     path, known_model_types + SEPARATOR_BYTES, config_quote(model_type, found),
                     kind_of_name(model_type));
}

/* By "architectures" alone. */
static enum imbrex_status read_class(const char *path, const json_t *classes,
                                     enum architecture *architecture, struct imbrex_error *err)
{
    char found[CONFIG_QUOTE_BYTES];
    for (int i = 0; i < ARCHITECTURE_COUNT; i++) {
        if (array_holds(classes, architectures[i].class_name)) {
            *architecture = (enum architecture)i;
            return IMBREX_STATUS_OK;
        }
    }
    const json_t *class_name = json_array_get(classes, 0);
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: architectures: expected %s, found %s%s",
                     path, known_class_names + SEPARATOR_BYTES, config_quote(class_name, found),
                     kind_of_name(class_name));
}

static enum imbrex_status read_architecture(const char *path, const json_t *root,
                                            struct model_config *config, struct imbrex_error *err)
{
    const json_t *model_type = json_object_get(root, "model_type");
    const json_t *classes = json_object_get(root, "architectures");
    char found[CONFIG_QUOTE_BYTES];
    if (config_is_set(classes) && !json_is_array(classes)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: architectures: expected an array, found %s", path,
                         json_kind(classes));
    }
    if (!config_is_set(model_type) && !config_is_set(classes)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: model_type: expected %s, found neither it nor architectures", path,
                         known_model_types + SEPARATOR_BYTES);
    }
    if (!config_is_set(model_type)) {
        return read_class(path, classes, &config->architecture, err);
    }
    TRY(read_model_type(path, model_type, &config->architecture, err));
    const char *class_name = architectures[config->architecture].class_name;
    if (config_is_set(classes) && !array_holds(classes, class_name)) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: architectures: expected \"%s\" (model_type is \"%s\"), found %s",
                         path, class_name, architecture_name(config->architecture),
                         config_quote(json_array_get(classes, 0), found));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_quantization(const char *path, const json_t *root,
                                             struct imbrex_error *err)
{
    /* The second is what compressed-tensors wrote at first. */
    static const char *const fields[] = {"quantization_config", "compression_config"};
    char found[CONFIG_QUOTE_BYTES];
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const json_t *quantization = json_object_get(root, fields[i]);
        if (!config_is_set(quantization)) {
            continue;
        }
        const char *method = config_quote(json_object_get(quantization, "quant_method"), found);
        /* Early files of bitsandbytes do not name it. */
        if (json_is_true(json_object_get(quantization, "load_in_4bit")) ||
            json_is_true(json_object_get(quantization, "load_in_8bit"))) {
            method = "\"bitsandbytes\"";
        }
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: expected none (BF16, F16 or F32 weights), found quant_method %s",
                         path, fields[i], method);
    }
    return IMBREX_STATUS_OK;
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
    TRY(json_get_optional_int32(path, root, "head_dim", 1, CONFIG_MAX_HEAD_DIM, &config->head_dim,
                                &found, err));
    if (!found && config->architecture == ARCHITECTURE_QWEN3) {
        config->head_dim = QWEN3_HEAD_DIM;
    } else if (!found) {
        if (config->hidden_size % config->num_heads != 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: num_attention_heads: expected a divisor of hidden_size %" PRId32
                             ", found %" PRId32,
                             path, config->hidden_size, config->num_heads);
        }
        config->head_dim = config->hidden_size / config->num_heads;
    }
    if (config->head_dim % 2 != 0 || config->head_dim > CONFIG_MAX_HEAD_DIM) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: head_dim: expected an even number of at most %d, found %" PRId32,
                         path, CONFIG_MAX_HEAD_DIM, config->head_dim);
    }
    return IMBREX_STATUS_OK;
}

/* The window that sliding layers have, and the layers that slide where layer_types does not say.
 * Defaults are those of Hugging Face's classes. */
struct windows {
    bool has_window;
    int32_t window, first_layer;
};

static enum imbrex_status read_window(const char *path, const json_t *root,
                                      enum architecture architecture, struct windows *windows,
                                      struct imbrex_error *err)
{
    *windows = (struct windows){.window = DEFAULT_SLIDING_WINDOW};
    if (architecture == ARCHITECTURE_LLAMA) {
        return IMBREX_STATUS_OK; /* has no such field, its classes ignore it */
    }
    windows->has_window = true;
    if (architecture != ARCHITECTURE_MISTRAL) {
        /* qwen writes a window and switches it off. */
        windows->has_window = false;
        windows->first_layer = DEFAULT_MAX_WINDOW_LAYERS;
        TRY(json_get_optional_bool(path, root, "use_sliding_window", &windows->has_window, err));
    }
    if (!windows->has_window || json_is_null(json_object_get(root, "sliding_window"))) {
        windows->has_window = false;
        return IMBREX_STATUS_OK;
    }
    if (architecture != ARCHITECTURE_MISTRAL) {
        TRY(json_get_optional_int32(path, root, "max_window_layers", 0, INT32_MAX,
                                    &windows->first_layer, NULL, err));
    }
    return json_get_optional_int32(path, root, "sliding_window", 1, MAX_SLIDING_WINDOW,
                                   &windows->window, NULL, err);
}

static enum imbrex_status read_layer_type(const char *path, const json_t *layer_types, int32_t idx,
                                          bool has_window, bool *is_sliding,
                                          struct imbrex_error *err)
{
    const json_t *type = json_array_get(layer_types, (size_t)idx);
    char found[CONFIG_QUOTE_BYTES];
    *is_sliding = config_is_string(type, "sliding_attention");
    if (config_is_string(type, "full_attention") || (*is_sliding && has_window)) {
        return IMBREX_STATUS_OK;
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: layer_types[%" PRId32 "]: expected \"full_attention\"%s, found %s", path,
                     idx, has_window ? " or \"sliding_attention\"" : " (no sliding_window in use)",
                     config_quote(type, found));
}

static enum imbrex_status read_windows(const char *path, const json_t *root,
                                       struct model_config *config, struct imbrex_error *err)
{
    struct windows windows;
    TRY(read_window(path, root, config->architecture, &windows, err));
    const json_t *layer_types = json_object_get(root, "layer_types");
    bool has_types = config_is_set(layer_types);
    if (has_types && (!json_is_array(layer_types) ||
                      json_array_size(layer_types) != (size_t)config->num_layers)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: layer_types: expected an array of num_hidden_layers = %" PRId32
                         " names, found %s of %zu",
                         path, config->num_layers, json_kind(layer_types),
                         json_array_size(layer_types));
    }
    for (int32_t i = 0; i < config->num_layers; i++) {
        bool is_sliding = windows.has_window && i >= windows.first_layer;
        if (has_types) {
            TRY(read_layer_type(path, layer_types, i, windows.has_window, &is_sliding, err));
        }
        if (is_sliding) {
            config->sliding_window = windows.window;
            config->sliding_layers[i / 64] |= (uint64_t)1 << (i % 64);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_activation(const char *path, const json_t *root,
                                          struct imbrex_error *err)
{
    const json_t *activation = json_object_get(root, "hidden_act");
    char found[CONFIG_QUOTE_BYTES];
    if (!config_is_set(activation) || config_is_string(activation, "silu")) {
        return IMBREX_STATUS_OK; /* the default of all architectures */
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: hidden_act: expected \"silu\", found %s",
                     path, config_quote(activation, found));
}

static enum imbrex_status read_biases(const char *path, const json_t *root,
                                      struct model_config *config, struct imbrex_error *err)
{
    switch (config->architecture) {
    case ARCHITECTURE_QWEN2:
        config->qkv_bias = true;
        return IMBREX_STATUS_OK;
    case ARCHITECTURE_MISTRAL:
        return IMBREX_STATUS_OK;
    default:
        break;
    }
    TRY(json_get_optional_bool(path, root, "attention_bias", &config->qkv_bias, err));
    config->o_bias = config->qkv_bias;
    if (config->architecture == ARCHITECTURE_QWEN3) {
        return IMBREX_STATUS_OK;
    }
    return json_get_optional_bool(path, root, "mlp_bias", &config->mlp_bias, err);
}

enum imbrex_status config_read_eos_token_ids(const char *path, const json_t *root,
                                             int32_t vocab_size, int32_t *token_ids,
                                             int32_t *num_token_ids, struct imbrex_error *err)
{
    char found[CONFIG_QUOTE_BYTES];
    const json_t *eos = json_object_get(root, "eos_token_id");
    size_t num_ids = json_is_array(eos) ? json_array_size(eos) : config_is_set(eos);
    if (num_ids > CONFIG_MAX_EOS_TOKENS) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: eos_token_id: expected at most %d ids, found %zu", path,
                         CONFIG_MAX_EOS_TOKENS, num_ids);
    }
    for (size_t i = 0; i < num_ids; i++) {
        const json_t *id = json_is_array(eos) ? json_array_get(eos, i) : eos;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= vocab_size) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: eos_token_id: expected ids in [0, %" PRId32
                             "), vocab_size of config.json, found %s",
                             path, vocab_size,
                             json_is_integer(id) ? config_quote(id, found) : json_kind(id));
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
    TRY(check_kind(path, root, err));
    TRY(read_architecture(path, root, config, err));
    TRY(check_quantization(path, root, err));
    TRY(read_dims(path, root, config, err));
    TRY(json_get_double(path, root, "rms_norm_eps", MIN_RMS_NORM_EPS, MAX_RMS_NORM_EPS,
                        &config->rms_norm_eps, err));
    TRY(config_read_rope(path, root, config, err));
    TRY(read_windows(path, root, config, err));
    TRY(read_activation(path, root, err));
    TRY(read_biases(path, root, config, err));
    config->qk_norm = config->architecture == ARCHITECTURE_QWEN3;
    TRY(json_get_optional_bool(path, root, "tie_word_embeddings", &config->tie_word_embeddings,
                               err));
    return config_read_eos_token_ids(path, root, config->vocab_size, config->eos_token_ids,
                                     &config->num_eos_token_ids, err);
}

enum imbrex_status config_read(const char *path, const json_t *root, struct model_config *config,
                               struct imbrex_error *err)
{
    struct model_config result = {0};
    TRY(read_fields(path, root, &result, err));
    *config = result;
    return IMBREX_STATUS_OK;
}

enum imbrex_status config_parse(const char *path, const void *bytes, size_t num_bytes,
                                struct model_config *config, struct imbrex_error *err)
{
    json_t *root = NULL;
    TRY(json_parse_object(path, bytes, num_bytes, &root, err));
    enum imbrex_status status = config_read(path, root, config, err);
    json_decref(root);
    return status;
}
