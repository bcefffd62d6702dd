/* SPDX-License-Identifier: Apache-2.0 */
/* Fields of JSON documents, and messages about them. json_parse.c makes the documents. */
#include "base/json.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/file.h"

/* Room for any number as describe() prints it, and for the longest kind. */
#define FOUND_MAX_BYTES 32

enum imbrex_status json_read_object(const char *path, size_t max_bytes, json_t **root,
                                    struct imbrex_error *err)
{
    struct file file;
    TRY(file_read(path, max_bytes, &file, err));
    enum imbrex_status status = json_parse_object(path, file.bytes, file.num_bytes, root, err);
    file_close(&file);
    return status;
}

const char *json_kind(const json_t *value)
{
    if (value == NULL) {
        return "nothing";
    }
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    case JSON_NULL:
        return "null";
    }
    return "a value";
}

/* Numbers are quoted, everything else is named by its kind. */
static const char *describe(const json_t *value, char found[FOUND_MAX_BYTES])
{
    if (json_is_integer(value)) {
        snprintf(found, FOUND_MAX_BYTES, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    } else if (json_is_real(value)) {
        snprintf(found, FOUND_MAX_BYTES, "%.9g", json_real_value(value));
    } else {
        snprintf(found, FOUND_MAX_BYTES, "%s", json_kind(value));
    }
    return found;
}

static enum imbrex_status read_int32(const char *path, const json_t *value, const char *field,
                                     int32_t min, int32_t max, int32_t *result,
                                     struct imbrex_error *err)
{
    char found[FOUND_MAX_BYTES];
    if (!json_is_integer(value) || json_integer_value(value) < min ||
        json_integer_value(value) > max) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected an integer in [%" PRId32 ", %" PRId32 "], found %s",
                         path, field, min, max, describe(value, found));
    }
    *result = (int32_t)json_integer_value(value);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_double(const char *path, const json_t *value, const char *field,
                                      double min, double max, double *result,
                                      struct imbrex_error *err)
{
    char found[FOUND_MAX_BYTES];
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected a number in [%.9g, %.9g], found %s", path, field, min,
                         max, describe(value, found));
    }
    *result = number;
    return IMBREX_STATUS_OK;
}

enum imbrex_status json_get_int32(const char *path, const json_t *object, const char *field,
                                  int32_t min, int32_t max, int32_t *value,
                                  struct imbrex_error *err)
{
    return read_int32(path, json_object_get(object, field), field, min, max, value, err);
}

enum imbrex_status json_get_double(const char *path, const json_t *object, const char *field,
                                   double min, double max, double *value, struct imbrex_error *err)
{
    return read_double(path, json_object_get(object, field), field, min, max, value, err);
}

enum imbrex_status json_get_string(const char *path, const json_t *object, const char *field,
                                   const char **value, struct imbrex_error *err)
{
    const json_t *found = json_object_get(object, field);
    char description[FOUND_MAX_BYTES];
    if (!json_is_string(found)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected a string, found %s", path,
                         field, describe(found, description));
    }
    *value = json_string_value(found);
    return IMBREX_STATUS_OK;
}

enum imbrex_status json_get_optional_int32(const char *path, const json_t *object,
                                           const char *field, int32_t min, int32_t max,
                                           int32_t *value, bool *found, struct imbrex_error *err)
{
    const json_t *stored = json_object_get(object, field);
    bool is_there = stored != NULL && !json_is_null(stored);
    if (is_there) {
        TRY(read_int32(path, stored, field, min, max, value, err));
    }
    if (found != NULL) {
        *found = is_there;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status json_get_optional_double(const char *path, const json_t *object,
                                            const char *field, double min, double max,
                                            double *value, bool *found, struct imbrex_error *err)
{
    const json_t *stored = json_object_get(object, field);
    bool is_there = stored != NULL && !json_is_null(stored);
    if (is_there) {
        TRY(read_double(path, stored, field, min, max, value, err));
    }
    if (found != NULL) {
        *found = is_there;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status json_get_optional_bool(const char *path, const json_t *object, const char *field,
                                          bool *value, struct imbrex_error *err)
{
    const json_t *stored = json_object_get(object, field);
    if (stored == NULL || json_is_null(stored)) {
        return IMBREX_STATUS_OK;
    }
    char found[FOUND_MAX_BYTES];
    if (!json_is_boolean(stored)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected true or false, found %s",
                         path, field, describe(stored, found));
    }
    *value = json_is_true(stored);
    return IMBREX_STATUS_OK;
}
