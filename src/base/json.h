/* SPDX-License-Identifier: Apache-2.0 */
/* jansson with messages a person can act on: each getter names the file, the field, what was
 * expected and found. */
#ifndef IMBREX_BASE_JSON_H
#define IMBREX_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* Parses a whole document that must be an object; duplicate keys and invalid UTF-8 are refused.
 * FORMAT names file, line and column. `path` is for messages only. The caller owns *root
 * (json_decref). */
enum imbrex_status json_parse_object(const char *path, const void *bytes, size_t num_bytes,
                                     json_t **root, struct imbrex_error *err);
/* The same for a document that must be an array. */
enum imbrex_status json_parse_array(const char *path, const void *bytes, size_t num_bytes,
                                    json_t **root, struct imbrex_error *err);
/* file_read and json_parse_object. max_bytes bounds the file. */
enum imbrex_status json_read_object(const char *path, size_t max_bytes, json_t **root,
                                    struct imbrex_error *err);

/* What a value is, for messages: "a string", "null", "nothing" for NULL, ... Static storage. */
const char *json_kind(const json_t *value);

/* Required fields: FORMAT if missing, of another kind or outside [min, max]. `field` is the key in
 * `object`. */
enum imbrex_status json_get_int32(const char *path, const json_t *object, const char *field,
                                  int32_t min, int32_t max, int32_t *value,
                                  struct imbrex_error *err);
enum imbrex_status json_get_double(const char *path, const json_t *object, const char *field,
                                   double min, double max, double *value, struct imbrex_error *err);
enum imbrex_status json_get_string(const char *path, const json_t *object, const char *field,
                                   const char **value, struct imbrex_error *err);

/* Optional fields: missing or null leaves *value as it is; otherwise as above. *found (may be NULL)
 * tells which. */
enum imbrex_status json_get_optional_int32(const char *path, const json_t *object,
                                           const char *field, int32_t min, int32_t max,
                                           int32_t *value, bool *found, struct imbrex_error *err);
enum imbrex_status json_get_optional_double(const char *path, const json_t *object,
                                            const char *field, double min, double max,
                                            double *value, bool *found, struct imbrex_error *err);
enum imbrex_status json_get_optional_bool(const char *path, const json_t *object, const char *field,
                                          bool *value, struct imbrex_error *err);

#endif
