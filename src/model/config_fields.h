/* SPDX-License-Identifier: Apache-2.0 */
/* What the files that read config.json and generation_config.json share. */
#ifndef IMBREX_MODEL_CONFIG_FIELDS_H
#define IMBREX_MODEL_CONFIG_FIELDS_H

#include "base/json.h"
#include "model/config.h"

/* The fields of a config.json that has been parsed, or was made from something else. */
enum imbrex_status config_read(const char *path, const json_t *root, struct model_config *config,
                               struct imbrex_error *err);

#define CONFIG_QUOTE_BYTES 128

/* There and not null. */
bool config_is_set(const json_t *value);
bool config_is_string(const json_t *value, const char *expected);
/* The string in quotes, the number, or what else the value is: for messages. Returns text. */
const char *config_quote(const json_t *value, char text[CONFIG_QUOTE_BYTES]);

/* rope_theta and rope_scaling of config, whose dimensions have been read. In config_rope.c. */
enum imbrex_status config_read_rope(const char *path, const json_t *root,
                                    struct model_config *config, struct imbrex_error *err);

/* eos_token_id: one id in [0, vocab_size), an array of up to CONFIG_MAX_EOS_TOKENS of them, or none
 * (missing or null). FORMAT for an id beyond: it could never come, and no text would end. Writes
 * token_ids[0, *num_token_ids). */
enum imbrex_status config_read_eos_token_ids(const char *path, const json_t *root,
                                             int32_t vocab_size, int32_t *token_ids,
                                             int32_t *num_token_ids, struct imbrex_error *err);

#endif
