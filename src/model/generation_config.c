/* SPDX-License-Identifier: Apache-2.0 */
/* generation_config.json: how its authors want a model to be sampled. */
#include "base/json.h"
#include "model/config.h"
#include "model/config_fields.h"

struct float_row {
    const char *field;
    double min, max;
    size_t offset; /* of a float in struct generation_config */
    unsigned bit;  /* of enum imbrex_generation_field */
};

#define FLOAT(member, min, max, bit)                                       \
    {                                                                      \
#member, min, max, offsetof(struct generation_config, member), bit \
    }

/* Open ends of an interval (a top_p of 0, a min_p of 1 would keep nothing) are given as the nearest
 * value that makes sense and stays inside as a float. */
static const struct float_row float_rows[] = {
    FLOAT(temperature, 0.0, GENERATION_MAX_TEMPERATURE, IMBREX_GENERATION_TEMPERATURE),
    FLOAT(top_p, 1e-9, 1.0, IMBREX_GENERATION_TOP_P),
    FLOAT(min_p, 0.0, 0.999999, IMBREX_GENERATION_MIN_P),
    FLOAT(repetition_penalty, GENERATION_MIN_REPETITION_PENALTY, GENERATION_MAX_REPETITION_PENALTY,
          IMBREX_GENERATION_REPETITION_PENALTY),
};

struct generation_config generation_config_default(void)
{
    return (struct generation_config){
        .do_sample = false, .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f};
}

static enum imbrex_status read_fields(const char *path, const json_t *root, int32_t vocab_size,
                                      struct generation_config *config, struct imbrex_error *err)
{
    bool found;
    TRY(json_get_optional_bool(path, root, "do_sample", &config->do_sample, err));
    for (size_t i = 0; i < sizeof(float_rows) / sizeof(float_rows[0]); i++) {
        const struct float_row *row = &float_rows[i];
        double value;
        TRY(json_get_optional_double(path, root, row->field, row->min, row->max, &value, &found,
                                     err));
        if (found) {
            *(float *)(void *)((char *)config + row->offset) = (float)value;
            config->present |= row->bit;
        }
    }
    /* do_sample decides the temperature: 0 without it, whatever the file says; 1 if it is alone. */
    if (config->do_sample) {
        config->present |= IMBREX_GENERATION_TEMPERATURE;
    } else {
        config->present &= ~(unsigned)IMBREX_GENERATION_TEMPERATURE;
    }
    /* 0 switches it off, and so does -1 in files written for vLLM. */
    TRY(json_get_optional_int32(path, root, "top_k", -1, INT32_MAX, &config->top_k, &found, err));
    if (found) {
        config->top_k = config->top_k < 0 ? 0 : config->top_k;
        config->present |= IMBREX_GENERATION_TOP_K;
    }
    return config_read_eos_token_ids(path, root, vocab_size, config->eos_token_ids,
                                     &config->num_eos_token_ids, err);
}

enum imbrex_status generation_config_parse(const char *path, const void *bytes, size_t num_bytes,
                                           int32_t vocab_size, struct generation_config *config,
                                           struct imbrex_error *err)
{
    json_t *root = NULL;
    struct generation_config result = generation_config_default();
    TRY(json_parse_object(path, bytes, num_bytes, &root, err));
    enum imbrex_status status = read_fields(path, root, vocab_size, &result, err);
    json_decref(root);
    if (status == IMBREX_STATUS_OK) {
        *config = result;
    }
    return status;
}
