/* SPDX-License-Identifier: Apache-2.0 */
/* RoPE in config.json, in every spelling: rope_theta and rope_scaling beside it, or both inside
 * rope_parameters; the kind of scaling as "rope_type" or, before, "type". */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/config_fields.h"
#include "model/rope.h"

#define MIN_ROPE_THETA 1.0
#define MAX_ROPE_THETA 1e15 /* published: 1e4 to 1e8 */
#define DEFAULT_ROPE_THETA 10000.0
#define MAX_FACTOR 1e6 /* of all factors below; published: up to 64 */
#define MIN_POSITIVE 1e-6
#define MAX_POSITIONS 1e9
#define DEFAULT_BETA_FAST 32.0
#define DEFAULT_BETA_SLOW 1.0

/* ` or "default" or "linear"`, for messages, which skip the first " or ". */
#define SEPARATOR " or "
#define SEPARATOR_BYTES (sizeof(SEPARATOR) - 1)
#define ROPE_TYPE_QUOTED(name, rope_type) SEPARATOR "\"" rope_type "\""
static const char known_rope_types[] = ROPE_SCALING_LIST(ROPE_TYPE_QUOTED);

/* What one object says, before defaults. */
struct rope_fields {
    double rope_theta;
    struct rope_scaling scaling;
};

static enum imbrex_status check_partial_rotary(const char *path, const json_t *object,
                                               struct imbrex_error *err)
{
    const json_t *factor = json_object_get(object, "partial_rotary_factor");
    char found[CONFIG_QUOTE_BYTES];
    if (!config_is_set(factor) || json_number_value(factor) == 1.0) {
        return IMBREX_STATUS_OK;
    }
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: partial_rotary_factor: expected 1 (all of head_dim turns), found %s",
                     path, config_quote(factor, found));
}

static enum imbrex_status read_type(const char *path, const json_t *rope, const char *name,
                                    enum rope_scaling_type *type, struct imbrex_error *err)
{
    static const char *const fields[] = {"rope_type", "type"};
    const char *first = NULL;
    char found[CONFIG_QUOTE_BYTES];
    *type = ROPE_SCALING_NONE;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const json_t *value = json_object_get(rope, fields[i]);
        if (!config_is_set(value)) {
            continue;
        }
        int known = 0;
        while (known < ROPE_SCALING_COUNT &&
               !config_is_string(value, rope_scaling_name((enum rope_scaling_type)known))) {
            known++;
        }
        if (known == ROPE_SCALING_COUNT) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: %s.%s: expected %s, found %s",
                             path, name, fields[i], known_rope_types + SEPARATOR_BYTES,
                             config_quote(value, found));
        }
        if (first != NULL && strcmp(first, json_string_value(value)) != 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: %s.%s: expected \"%s\" as in rope_type, found %s", path, name,
                             fields[i], first, config_quote(value, found));
        }
        first = json_string_value(value);
        *type = (enum rope_scaling_type)known;
    }
    return IMBREX_STATUS_OK;
}

/* The length first trained with: beside the object, in it, or that of the whole model. */
static enum imbrex_status read_original_length(const char *path, const json_t *root,
                                               const json_t *rope,
                                               const struct model_config *config, double *length,
                                               struct imbrex_error *err)
{
    static const char field[] = "original_max_position_embeddings";
    *length = config->max_position_embeddings;
    TRY(json_get_optional_double(path, rope, field, 1.0, MAX_POSITIONS, length, NULL, err));
    return json_get_optional_double(path, root, field, 1.0, MAX_POSITIONS, length, NULL, err);
}

static enum imbrex_status read_llama3(const char *path, const json_t *rope,
                                      struct rope_scaling *scaling, struct imbrex_error *err)
{
    TRY(json_get_double(path, rope, "factor", 1.0, MAX_FACTOR, &scaling->factor, err));
    TRY(json_get_double(path, rope, "low_freq_factor", MIN_POSITIVE, MAX_FACTOR,
                        &scaling->low_freq_factor, err));
    TRY(json_get_double(path, rope, "high_freq_factor", MIN_POSITIVE, MAX_FACTOR,
                        &scaling->high_freq_factor, err));
    if (scaling->low_freq_factor >= scaling->high_freq_factor) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: high_freq_factor: expected more than low_freq_factor %g, found %g",
                         path, scaling->low_freq_factor, scaling->high_freq_factor);
    }
    return IMBREX_STATUS_OK;
}

/* A number of turns; missing, null and 0 mean the default. */
static enum imbrex_status read_turns(const char *path, const json_t *rope, const char *field,
                                     double default_turns, double *num_turns,
                                     struct imbrex_error *err)
{
    *num_turns = 0.0;
    TRY(json_get_optional_double(path, rope, field, 0.0, MAX_FACTOR, num_turns, NULL, err));
    if (*num_turns < MIN_POSITIVE) {
        *num_turns = default_turns;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_yarn(const char *path, const json_t *rope,
                                    const struct model_config *config, struct rope_scaling *scaling,
                                    struct imbrex_error *err)
{
    double mscale = 0.0, mscale_all_dim = 0.0;
    bool found;
    TRY(json_get_optional_double(path, rope, "factor", 1.0, MAX_FACTOR, &scaling->factor, &found,
                                 err));
    if (!found) {
        scaling->factor =
            config->max_position_embeddings / scaling->original_max_position_embeddings;
        if (scaling->factor < 1.0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: original_max_position_embeddings: expected at most "
                             "max_position_embeddings %" PRId32 ", found %.9g",
                             path, config->max_position_embeddings,
                             scaling->original_max_position_embeddings);
        }
    }
    TRY(read_turns(path, rope, "beta_fast", DEFAULT_BETA_FAST, &scaling->beta_fast, err));
    TRY(read_turns(path, rope, "beta_slow", DEFAULT_BETA_SLOW, &scaling->beta_slow, err));
    scaling->truncate = true;
    TRY(json_get_optional_bool(path, rope, "truncate", &scaling->truncate, err));
    TRY(json_get_optional_double(path, rope, "mscale", 0.0, MAX_FACTOR, &mscale, NULL, err));
    TRY(json_get_optional_double(path, rope, "mscale_all_dim", 0.0, MAX_FACTOR, &mscale_all_dim,
                                 NULL, err));
    scaling->attention_factor = rope_yarn_attention_factor(scaling->factor, mscale, mscale_all_dim);
    return json_get_optional_double(path, rope, "attention_factor", MIN_POSITIVE, MAX_FACTOR,
                                    &scaling->attention_factor, NULL, err);
}

static enum imbrex_status check_is_flat(const char *path, json_t *rope, const char *name,
                                        struct imbrex_error *err)
{
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
    return check_partial_rotary(path, rope, err);
}

/* rope_parameters or rope_scaling; fields->rope_theta keeps its value if the object has none. */
static enum imbrex_status read_object(const char *path, const json_t *root, const char *name,
                                      const struct model_config *config, struct rope_fields *fields,
                                      struct imbrex_error *err)
{
    json_t *rope = json_object_get(root, name);
    struct rope_scaling *scaling = &fields->scaling;
    char place[IMBREX_ERROR_MESSAGE_BYTES]; /* for messages about the object's fields */
    if (!json_is_object(rope)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected an object, found %s", path,
                         name, json_kind(rope));
    }
    TRY(read_type(path, rope, name, &scaling->type, err));
    TRY(check_is_flat(path, rope, name, err));
    snprintf(place, sizeof(place), "%s: %s", path, name);
    TRY(json_get_optional_double(place, rope, "rope_theta", MIN_ROPE_THETA, MAX_ROPE_THETA,
                                 &fields->rope_theta, NULL, err));
    if (scaling->type == ROPE_SCALING_LINEAR) {
        return json_get_double(place, rope, "factor", 1.0, MAX_FACTOR, &scaling->factor, err);
    }
    if (scaling->type == ROPE_SCALING_NONE) {
        return IMBREX_STATUS_OK;
    }
    TRY(read_original_length(path, root, rope, config, &scaling->original_max_position_embeddings,
                             err));
    if (scaling->type == ROPE_SCALING_LLAMA3) {
        return read_llama3(place, rope, scaling, err);
    }
    return read_yarn(place, rope, config, scaling, err);
}

static bool scaling_equal(const struct rope_scaling *a, const struct rope_scaling *b)
{
    return a->type == b->type && a->factor == b->factor &&
           a->original_max_position_embeddings == b->original_max_position_embeddings &&
           a->low_freq_factor == b->low_freq_factor && a->high_freq_factor == b->high_freq_factor &&
           a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow &&
           a->truncate == b->truncate && a->attention_factor == b->attention_factor;
}

enum imbrex_status config_read_rope(const char *path, const json_t *root,
                                    struct model_config *config, struct imbrex_error *err)
{
    bool has_scaling = config_is_set(json_object_get(root, "rope_scaling"));
    bool has_parameters = config_is_set(json_object_get(root, "rope_parameters"));
    struct rope_fields fields = {.rope_theta = DEFAULT_ROPE_THETA};
    TRY(json_get_optional_double(path, root, "rope_theta", MIN_ROPE_THETA, MAX_ROPE_THETA,
                                 &fields.rope_theta, NULL, err));
    TRY(check_partial_rotary(path, root, err));
    struct rope_fields parameters = fields;
    if (has_scaling) {
        TRY(read_object(path, root, "rope_scaling", config, &fields, err));
    }
    if (has_parameters) {
        TRY(read_object(path, root, "rope_parameters", config, &parameters, err));
        if (has_scaling && !scaling_equal(&fields.scaling, &parameters.scaling)) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: rope_scaling: expected what rope_parameters says (\"%s\"), found "
                             "\"%s\" or other numbers",
                             path, rope_scaling_name(parameters.scaling.type),
                             rope_scaling_name(fields.scaling.type));
        }
        fields = parameters;
    }
    if (fields.scaling.type == ROPE_SCALING_YARN && fields.rope_theta <= MIN_ROPE_THETA) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: rope_theta: expected more than 1 with \"yarn\", found %g", path,
                         fields.rope_theta);
    }
    config->rope_theta = fields.rope_theta;
    config->rope_scaling = fields.scaling;
    return IMBREX_STATUS_OK;
}
