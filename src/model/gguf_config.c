/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF's metadata is rewritten as the config.json that it was made from, and that is read as any
 * other: limits, defaults and RoPE's scaling are then the same for both. Messages get the file's
 * names back. Keys that ask for a computation that no config.json of these architectures asks for
 * are refused here. */
#include "model/gguf_config.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/config_fields.h"
#include "model/rope.h"

#define KEY_BYTES 128
#define ARCHITECTURE_BYTES 32

/* X(general.architecture, model_type) */
#define GGUF_ARCHITECTURE_LIST(X) \
    X("llama", "llama")           \
    X("qwen2", "qwen2")           \
    X("qwen3", "qwen3")

#define ARCHITECTURE_QUOTED(name, model_type) " or \"" name "\""
static const char known_architectures[] = GGUF_ARCHITECTURE_LIST(ARCHITECTURE_QUOTED);
#define SEPARATOR_BYTES 4 /* the first " or " */

struct metadata {
    const struct gguf *gguf;
    char architecture[ARCHITECTURE_BYTES]; /* the prefix of its keys */
    json_t *root;                          /* config.json as far as it is written */
    struct imbrex_error *err;
};

/* "llama.block_count" */
static const char *model_key(const struct metadata *metadata, const char *suffix,
                             char key[KEY_BYTES])
{
    snprintf(key, KEY_BYTES, "%s.%s", metadata->architecture, suffix);
    return key;
}

static bool has_key(const struct metadata *metadata, const char *suffix)
{
    char key[KEY_BYTES];
    return gguf_find(metadata->gguf, model_key(metadata, suffix, key)) != NULL;
}

static enum imbrex_status refuse(const struct metadata *metadata, const char *suffix,
                                 const char *expected, double found)
{
    char key[KEY_BYTES];
    return error_set(metadata->err, IMBREX_STATUS_UNSUPPORTED, "%s: %s: expected %s, found %.9g",
                     metadata->gguf->path, model_key(metadata, suffix, key), expected, found);
}

/* Takes `value` over, also on failure. */
static enum imbrex_status set_field(json_t *object, const char *field, json_t *value,
                                    struct imbrex_error *err)
{
    if (json_object_set_new(object, field, value) != 0) {
        return error_out_of_memory(err, "a configuration", 0);
    }
    return IMBREX_STATUS_OK;
}

/* ---- names ----------------------------------------------------------------------------------- */

struct field_row {
    const char *suffix; /* of the key */
    const char *field;  /* of config.json, as messages name it */
    bool is_required;
};

static const struct field_row dim_rows[] = {
    {"block_count", "num_hidden_layers", true},
    {"embedding_length", "hidden_size", true},
    {"feed_forward_length", "intermediate_size", true},
    {"attention.head_count", "num_attention_heads", true},
    {"attention.head_count_kv", "num_key_value_heads", false},
    {"attention.key_length", "head_dim", false},
    {"context_length", "max_position_embeddings", true},
};

#define EPSILON_SUFFIX "attention.layer_norm_rms_epsilon"
#define WINDOW_SUFFIX "attention.sliding_window"
#define THETA_SUFFIX "rope.freq_base"
#define FACTOR_SUFFIX "rope.scaling.factor"
#define OLD_FACTOR_SUFFIX "rope.scale_linear" /* what older files have */
#define ATTENTION_FACTOR_SUFFIX "rope.scaling.attn_factor"
#define SCALING "rope_scaling: "

/* The same of what is copied one by one. Put into messages first: their names hold names of those
 * above. */
static const char *const other_rows[][2] = {
    {EPSILON_SUFFIX, "rms_norm_eps"},
    {WINDOW_SUFFIX, "sliding_window"},
    {THETA_SUFFIX, "rope_theta"},
    {"rope.scaling.original_context_length", "original_max_position_embeddings"},
    {"rope.scaling.yarn_beta_fast", SCALING "beta_fast"},
    {"rope.scaling.yarn_beta_slow", SCALING "beta_slow"},
    {ATTENTION_FACTOR_SUFFIX, SCALING "attention_factor"},
};

static bool is_name_byte(char byte)
{
    return (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9') || byte == '_';
}

/* Puts the key for each field in the message, where it is a whole word behind the file's path. */
static void name_key(const struct metadata *metadata, const char *field, const char *key)
{
    struct imbrex_error *err = metadata->err;
    size_t path_bytes = strlen(metadata->gguf->path), field_bytes = strlen(field);
    bool has_path = strncmp(err->message, metadata->gguf->path, path_bytes) == 0;
    size_t from = has_path ? path_bytes : 0;
    for (;;) {
        const char *found = strstr(err->message + from, field);
        if (found == NULL) {
            return;
        }
        size_t at = (size_t)(found - err->message), end = at + field_bytes;
        bool is_whole = (at == 0 || !is_name_byte(found[-1])) && !is_name_byte(found[field_bytes]);
        if (is_whole) {
            error_set(err, err->status, "%.*s%s%s", (int)at, err->message, key,
                      found + field_bytes);
            end = at + strlen(key);
        }
        from = end < strlen(err->message) ? end : strlen(err->message);
    }
}

static void name_keys(const struct metadata *metadata)
{
    char key[KEY_BYTES];
    if (metadata->err == NULL) {
        return;
    }
    const char *factor = has_key(metadata, FACTOR_SUFFIX) ? FACTOR_SUFFIX : OLD_FACTOR_SUFFIX;
    name_key(metadata, SCALING "factor", model_key(metadata, factor, key));
    for (size_t i = 0; i < sizeof(other_rows) / sizeof(other_rows[0]); i++) {
        name_key(metadata, other_rows[i][1], model_key(metadata, other_rows[i][0], key));
    }
    for (size_t i = 0; i < sizeof(dim_rows) / sizeof(dim_rows[0]); i++) {
        name_key(metadata, dim_rows[i].field, model_key(metadata, dim_rows[i].suffix, key));
    }
    name_key(metadata, "vocab_size", "rows of token_embd.weight");
}

/* ---- fields ---------------------------------------------------------------------------------- */

/* An integer, or an array with one for each layer, all the same. */
static enum imbrex_status get_uniform_int32(const struct metadata *metadata, const char *key,
                                            int32_t *value)
{
    const struct gguf_value *found = gguf_find(metadata->gguf, key);
    if (found == NULL || found->type != GGUF_TYPE_ARRAY ||
        found->element_type == GGUF_TYPE_STRING || found->num_elements == 0) {
        return gguf_get_int32(metadata->gguf, key, 0, INT32_MAX, value, metadata->err);
    }
    double first = gguf_value_number(found, 0);
    if (!(first >= 0 && first <= INT32_MAX) || first != (int32_t)first) {
        return error_set(metadata->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected integers in [0, %" PRId32 "], found %g",
                         metadata->gguf->path, key, INT32_MAX, first);
    }
    for (uint64_t i = 1; i < found->num_elements; i++) {
        double other = gguf_value_number(found, i);
        if (other != first) {
            return error_set(metadata->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %s: expected the same number for all layers, found %g and %g",
                             metadata->gguf->path, key, first, other);
        }
    }
    *value = (int32_t)first;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status copy_int32(const struct metadata *metadata, const struct field_row *row)
{
    char key[KEY_BYTES];
    int32_t value;
    if (!row->is_required && !has_key(metadata, row->suffix)) {
        return IMBREX_STATUS_OK;
    }
    TRY(get_uniform_int32(metadata, model_key(metadata, row->suffix, key), &value));
    return set_field(metadata->root, row->field, json_integer(value), metadata->err);
}

/* *value keeps its default if the key is missing. */
static enum imbrex_status get_optional_double(const struct metadata *metadata, const char *suffix,
                                              double *value)
{
    char key[KEY_BYTES];
    if (!has_key(metadata, suffix)) {
        return IMBREX_STATUS_OK;
    }
    return gguf_get_double(metadata->gguf, model_key(metadata, suffix, key), value, metadata->err);
}

static enum imbrex_status copy_dims(const struct metadata *metadata)
{
    for (size_t i = 0; i < sizeof(dim_rows) / sizeof(dim_rows[0]); i++) {
        TRY(copy_int32(metadata, &dim_rows[i]));
    }
    const struct gguf_tensor *embedding = gguf_find_tensor(metadata->gguf, "token_embd.weight");
    if (embedding == NULL || embedding->num_dims != 2) {
        return error_set(metadata->err, IMBREX_STATUS_FORMAT,
                         "%s: token_embd.weight: expected a tensor of two dimensions, found %s",
                         metadata->gguf->path, embedding == NULL ? "none" : "others");
    }
    return set_field(metadata->root, "vocab_size", json_integer(embedding->shape[0]),
                     metadata->err);
}

static enum imbrex_status copy_norm_epsilon(const struct metadata *metadata)
{
    char key[KEY_BYTES];
    double epsilon;
    model_key(metadata, EPSILON_SUFFIX, key);
    TRY(gguf_get_double(metadata->gguf, key, &epsilon, metadata->err));
    return set_field(metadata->root, "rms_norm_eps", json_real(epsilon), metadata->err);
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* YaRN's numbers, if the file has them. */
static enum imbrex_status copy_yarn(const struct metadata *metadata, json_t *rope, double factor)
{
    static const struct {
        const char *suffix, *field;
    } rows[] = {
        {"rope.scaling.original_context_length", "original_max_position_embeddings"},
        {"rope.scaling.yarn_beta_fast", "beta_fast"},
        {"rope.scaling.yarn_beta_slow", "beta_slow"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        double value = 0.0;
        TRY(get_optional_double(metadata, rows[i].suffix, &value));
        if (value != 0.0) {
            TRY(set_field(rope, rows[i].field, json_real(value), metadata->err));
        }
    }
    /* llama.cpp multiplies its attention factor with the one that follows from `factor`. */
    if (has_key(metadata, ATTENTION_FACTOR_SUFFIX)) {
        double attention_factor;
        TRY(get_optional_double(metadata, ATTENTION_FACTOR_SUFFIX, &attention_factor));
        attention_factor *= rope_yarn_attention_factor(factor, 0.0, 0.0);
        TRY(set_field(rope, "attention_factor", json_real(attention_factor), metadata->err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status copy_rope_scaling(const struct metadata *metadata)
{
    char key[KEY_BYTES], type[16] = "";
    double factor = 0.0;
    struct gguf_string text;
    bool has_factor = has_key(metadata, OLD_FACTOR_SUFFIX) || has_key(metadata, FACTOR_SUFFIX);
    TRY(get_optional_double(metadata, OLD_FACTOR_SUFFIX, &factor));
    TRY(get_optional_double(metadata, FACTOR_SUFFIX, &factor));
    model_key(metadata, "rope.scaling.type", key);
    if (gguf_find(metadata->gguf, key) != NULL) {
        TRY(gguf_get_string(metadata->gguf, key, &text, metadata->err));
        snprintf(type, sizeof(type), "%.*s",
                 (int)(text.num_bytes < sizeof(type) ? text.num_bytes : sizeof(type)), text.bytes);
    } else if (factor != 0.0 && factor != 1.0) {
        snprintf(type, sizeof(type), "linear");
    }
    if (type[0] == '\0' || strcmp(type, "none") == 0) {
        return IMBREX_STATUS_OK;
    }
    if (strcmp(type, "linear") != 0 && strcmp(type, "yarn") != 0) {
        return error_set(metadata->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: expected \"none\", \"linear\" or \"yarn\", found \"%s\"",
                         metadata->gguf->path, key, type);
    }
    if (!has_factor) {
        return error_set(metadata->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected a number with rope.scaling.type \"%s\", found no such "
                         "key",
                         metadata->gguf->path, model_key(metadata, FACTOR_SUFFIX, key), type);
    }
    json_t *rope = json_object();
    TRY(set_field(metadata->root, "rope_scaling", rope, metadata->err));
    TRY(set_field(rope, "rope_type", json_string(type), metadata->err));
    TRY(set_field(rope, "factor", json_real(factor), metadata->err));
    return strcmp(type, "yarn") == 0 ? copy_yarn(metadata, rope, factor) : IMBREX_STATUS_OK;
}

static enum imbrex_status copy_rope(const struct metadata *metadata)
{
    if (has_key(metadata, THETA_SUFFIX)) {
        double theta;
        TRY(get_optional_double(metadata, THETA_SUFFIX, &theta));
        TRY(set_field(metadata->root, "rope_theta", json_real(theta), metadata->err));
    }
    return copy_rope_scaling(metadata);
}

/* ---- what is read from elsewhere ------------------------------------------------------------- */

/* End of sequence, of turn, of message: any of them ends a text. One without a row could never
 * come. */
static enum imbrex_status read_end_tokens(const struct metadata *metadata,
                                          struct model_config *config)
{
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        bool is_known = false;
        int32_t id;
        if (gguf_find(metadata->gguf, keys[i]) == NULL) {
            continue;
        }
        TRY(gguf_get_int32(metadata->gguf, keys[i], 0, config->vocab_size - 1, &id, metadata->err));
        for (int32_t j = 0; j < config->num_eos_token_ids; j++) {
            is_known = is_known || config->eos_token_ids[j] == id;
        }
        if (!is_known) {
            config->eos_token_ids[config->num_eos_token_ids++] = id;
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_architecture(struct metadata *metadata)
{
    static const struct {
        const char *name, *model_type;
    } rows[] = {
#define ARCHITECTURE_ROW(name, model_type) {name, model_type},
        GGUF_ARCHITECTURE_LIST(ARCHITECTURE_ROW)
#undef ARCHITECTURE_ROW
    };
    static const char key[] = "general.architecture";
    struct gguf_string name;
    TRY(gguf_get_string(metadata->gguf, key, &name, metadata->err));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (name.num_bytes == strlen(rows[i].name) &&
            memcmp(name.bytes, rows[i].name, name.num_bytes) == 0) {
            snprintf(metadata->architecture, sizeof(metadata->architecture), "%s", rows[i].name);
            /* Only mistral has windows among what is filed under llama. */
            bool is_mistral = has_key(metadata, WINDOW_SUFFIX);
            return set_field(metadata->root, "model_type",
                             json_string(is_mistral && i == 0 ? "mistral" : rows[i].model_type),
                             metadata->err);
        }
    }
    return error_set(metadata->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: %s: expected %s, found \"%.*s\"", metadata->gguf->path, key,
                     known_architectures + SEPARATOR_BYTES,
                     (int)(name.num_bytes < KEY_BYTES ? name.num_bytes : KEY_BYTES), name.bytes);
}

static enum imbrex_status copy_window(const struct metadata *metadata)
{
    int32_t window = 0;
    char key[KEY_BYTES];
    if (!has_key(metadata, WINDOW_SUFFIX)) {
        return IMBREX_STATUS_OK;
    }
    TRY(gguf_get_int32(metadata->gguf, model_key(metadata, WINDOW_SUFFIX, key), 0, INT32_MAX,
                       &window, metadata->err));
    if (window == 0) {
        return IMBREX_STATUS_OK;
    }
    if (strcmp(metadata->architecture, "llama") != 0) {
        return refuse(metadata, WINDOW_SUFFIX, "none", window);
    }
    return set_field(metadata->root, "sliding_window", json_integer(window), metadata->err);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static enum imbrex_status check_kind(const struct metadata *metadata)
{
    struct gguf_string kind;
    if (gguf_find(metadata->gguf, "general.type") == NULL) {
        return IMBREX_STATUS_OK;
    }
    TRY(gguf_get_string(metadata->gguf, "general.type", &kind, metadata->err));
    if (kind.num_bytes != 5 || memcmp(kind.bytes, "model", 5) != 0) {
        return error_set(
            metadata->err, IMBREX_STATUS_UNSUPPORTED,
            "%s: general.type: expected \"model\", found \"%.*s\"", metadata->gguf->path,
            (int)(kind.num_bytes < KEY_BYTES ? kind.num_bytes : KEY_BYTES), kind.bytes);
    }
    return IMBREX_STATUS_OK;
}

/* Keys of other models with the same tensors, and the value with which they change nothing. */
static enum imbrex_status check_plain(const struct metadata *metadata)
{
    static const struct {
        const char *suffix;
        double neutral;
        const char *expected;
    } rows[] = {
        {"expert_count", 0.0, "0 (no mixture of experts)"},
        {"attention.causal", 1.0, "true"},
        {"attention.max_alibi_bias", 0.0, "0"},
        {"attention.clamp_kqv", 0.0, "0"},
        {"attn_logit_softcapping", 0.0, "0"},
        {"final_logit_softcapping", 0.0, "0"},
        {"logit_scale", 1.0, "1"},
        {"residual_scale", 1.0, "1"},
        {"embedding_scale", 1.0, "1"},
        {"attention.scale", 0.0, "none"},
        {"nextn_predict_layers", 0.0, "0"},
        {"rope.scaling.yarn_log_multiplier", 0.0, "0"},
    };
    char key[KEY_BYTES];
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        model_key(metadata, rows[i].suffix, key);
        const struct gguf_value *value = gguf_find(metadata->gguf, key);
        if (value == NULL) {
            continue;
        }
        if (value->type == GGUF_TYPE_ARRAY || value->type == GGUF_TYPE_STRING) {
            return error_set(metadata->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %s: expected %s, found an array or a string",
                             metadata->gguf->path, key, rows[i].expected);
        }
        double found = gguf_value_number(value, 0);
        if (found != rows[i].neutral) {
            return refuse(metadata, rows[i].suffix, rows[i].expected, found);
        }
    }
    return IMBREX_STATUS_OK;
}

/* Heads are all of one length, and RoPE turns all of it. */
static enum imbrex_status check_head_dim(const struct metadata *metadata,
                                         const struct model_config *config)
{
    static const char *const suffixes[] = {"attention.value_length", "rope.dimension_count"};
    char key[KEY_BYTES], expected[64];
    for (size_t i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++) {
        int32_t length;
        if (!has_key(metadata, suffixes[i])) {
            continue;
        }
        TRY(get_uniform_int32(metadata, model_key(metadata, suffixes[i], key), &length));
        if (length != config->head_dim) {
            snprintf(expected, sizeof(expected), "the length of a head, %" PRId32,
                     config->head_dim);
            return refuse(metadata, suffixes[i], expected, length);
        }
    }
    return IMBREX_STATUS_OK;
}

static bool has_tensor(const struct metadata *metadata, const char *name)
{
    return gguf_find_tensor(metadata->gguf, name) != NULL;
}

static enum imbrex_status read_metadata(struct metadata *metadata, struct model_config *config)
{
    TRY(check_kind(metadata));
    TRY(read_architecture(metadata));
    TRY(check_plain(metadata));
    TRY(copy_dims(metadata));
    TRY(copy_norm_epsilon(metadata));
    TRY(copy_rope(metadata));
    TRY(copy_window(metadata));
    enum imbrex_status status =
        config_read(metadata->gguf->path, metadata->root, config, metadata->err);
    if (status != IMBREX_STATUS_OK) {
        name_keys(metadata);
        return status;
    }
    TRY(read_end_tokens(metadata, config));
    TRY(check_head_dim(metadata, config));
    /* What config.json would say about tensors, the tensors say. */
    config->tie_word_embeddings = !has_tensor(metadata, "output.weight");
    config->qkv_bias = has_tensor(metadata, "blk.0.attn_q.bias");
    config->o_bias = has_tensor(metadata, "blk.0.attn_output.bias");
    config->mlp_bias = has_tensor(metadata, "blk.0.ffn_up.bias");
    /* Converters reorder the rows of q and k of these for RoPE over neighbours. */
    config->is_rope_interleaved = strcmp(metadata->architecture, "llama") == 0;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_read_config(const struct gguf *gguf, struct model_config *config,
                                    struct imbrex_error *err)
{
    struct metadata metadata = {.gguf = gguf, .root = json_object(), .err = err};
    struct model_config result = {0};
    if (metadata.root == NULL) {
        return error_out_of_memory(err, "a configuration", 0);
    }
    enum imbrex_status status = read_metadata(&metadata, &result);
    json_decref(metadata.root);
    if (status == IMBREX_STATUS_OK) {
        *config = result;
    }
    return status;
}

/* llama.cpp's numbers for the mixture of types in a file. */
const char *gguf_file_type_name(const struct gguf *gguf)
{
    static const char *const names[] = {
        [0] = "F32",      [1] = "F16",      [2] = "Q4_0",    [3] = "Q4_1",    [7] = "Q8_0",
        [8] = "Q5_0",     [9] = "Q5_1",     [10] = "Q2_K",   [11] = "Q3_K_S", [12] = "Q3_K_M",
        [13] = "Q3_K_L",  [14] = "Q4_K_S",  [15] = "Q4_K_M", [16] = "Q5_K_S", [17] = "Q5_K_M",
        [18] = "Q6_K",    [19] = "IQ2_XXS", [20] = "IQ2_XS", [21] = "Q2_K_S", [22] = "IQ3_XS",
        [23] = "IQ3_XXS", [24] = "IQ1_S",   [25] = "IQ4_NL", [26] = "IQ3_S",  [27] = "IQ3_M",
        [28] = "IQ2_S",   [29] = "IQ2_M",   [30] = "IQ4_XS", [31] = "IQ1_M",  [32] = "BF16",
        [36] = "TQ1_0",   [37] = "TQ2_0",   [38] = "MXFP4",
    };
    static const char key[] = "general.file_type";
    int32_t type;
    if (gguf_find(gguf, key) == NULL) {
        return NULL;
    }
    if (gguf_get_int32(gguf, key, 0, sizeof(names) / sizeof(names[0]) - 1, &type, NULL) !=
            IMBREX_STATUS_OK ||
        names[type] == NULL) {
        return "unknown";
    }
    return names[type];
}
