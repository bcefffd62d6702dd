/* SPDX-License-Identifier: Apache-2.0 */
/* A field that config.json and generation_config.json share. */
#ifndef IMBREX_MODEL_CONFIG_FIELDS_H
#define IMBREX_MODEL_CONFIG_FIELDS_H

#include "base/json.h"

/* eos_token_id: one id, an array of up to CONFIG_MAX_EOS_TOKENS, or none (missing or null). Writes
 * token_ids[0, *num_token_ids). */
enum imbrex_status config_read_eos_token_ids(const char *path, const json_t *root,
                                             int32_t *token_ids, int32_t *num_token_ids,
                                             struct imbrex_error *err);

#endif
