/* SPDX-License-Identifier: Apache-2.0 */
/* Our JSON parser against jansson's: the same documents pass, and with the same values, but for the
 * differences that json_parse.c states (integers beyond 64 bits, nesting, digits). */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Refused by us alone, for a stated reason. */
static bool is_beyond_limits(const char *message)
{
    return strstr(message, "levels of nesting") != NULL || strstr(message, "320 digits") != NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct imbrex_error err = {0};
    json_error_t error = {0};
    json_t *ours = NULL;
    json_t *theirs = json_loadb((const char *)bytes, num_bytes,
                                JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    enum imbrex_status status = json_parse_object("fuzz", bytes, num_bytes, &ours, &err);
    if (status == IMBREX_STATUS_OK && theirs != NULL) {
        require(json_equal(ours, theirs));
    } else if (status == IMBREX_STATUS_OK) {
        require(json_error_code(&error) == json_error_numeric_overflow);
    } else {
        require(status == IMBREX_STATUS_FORMAT && err.message[0] != '\0' && ours == NULL);
        /* jansson swallows a NUL byte after a number; no JSON text has one. */
        require(!json_is_object(theirs) || is_beyond_limits(err.message) ||
                memchr(bytes, '\0', num_bytes) != NULL);
    }
    json_decref(ours);
    json_decref(theirs);
    return 0;
}
