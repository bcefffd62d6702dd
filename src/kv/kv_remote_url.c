/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_remote_url.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const char scheme[] = "redis://";
static const char tls_scheme[] = "rediss://";
static const char digits[] = "0123456789";

#define MAX_SHOWN_BYTES 24 /* of a setting */

/* What is wrong with the form as a whole. `found` is none of the text, which may be a password. */
static enum imbrex_status refuse(const char *found, struct imbrex_error *err)
{
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_url",
                           ": expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]"
                           "[?ttl=SECONDS][&zstd=LEVEL], found %s",
                           found);
}

/* Of a number in [min, max]. is_public: what stands there can be shown; else digits alone can,
 * since other bytes may be a password whose @HOST was forgotten. */
static enum imbrex_status refuse_number(const char *name, const char *text, size_t length,
                                        int32_t min, int32_t max, bool is_public,
                                        struct imbrex_error *err)
{
    char found[2 * MAX_SHOWN_BYTES] = "what is not shown, since it is no number";
    if (length == 0) {
        (void)snprintf(found, sizeof(found), "nothing");
    } else if (length <= MAX_SHOWN_BYTES && (is_public || strspn(text, digits) >= length)) {
        (void)snprintf(found, sizeof(found), "\"%.*s\"", (int)length, text);
    }
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_url",
                           ": %s: expected a number from %d to %d, found %s", name, (int)min,
                           (int)max, found);
}

static int32_t hex_digit(char c)
{
    static const char hex_digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *at = c != '\0' ? strchr(hex_digits, c) : NULL;
    return at != NULL ? (int32_t)(at - hex_digits) % 16 : -1;
}

/* A part with its %XX replaced. False: too long, or with a byte 0 or a broken %XX in it. */
static bool decode(const char *text, size_t length, char *part, size_t part_bytes)
{
    size_t num_written = 0;
    for (size_t i = 0; i < length; i++) {
        int32_t byte = (unsigned char)text[i];
        if (text[i] == '%') {
            int32_t high = i + 2 < length ? hex_digit(text[i + 1]) : -1;
            int32_t low = high >= 0 ? hex_digit(text[i + 2]) : -1;
            if (low < 0) {
                return false;
            }
            byte = 16 * high + low;
            i += 2;
        }
        if (byte == 0 || num_written + 1 >= part_bytes) {
            return false;
        }
        part[num_written] = (char)byte;
        num_written++;
    }
    part[num_written] = '\0';
    return true;
}

/* All of the text as a number in [min, max]; it has a name for messages. */
static enum imbrex_status read_number(const char *name, const char *text, size_t length,
                                      int32_t min, int32_t max, bool is_public, int32_t *number,
                                      struct imbrex_error *err)
{
    int64_t read = 0;
    bool is_number = length > 0 && length <= 10;
    for (size_t i = 0; is_number && i < length; i++) {
        is_number = text[i] >= '0' && text[i] <= '9';
        read = 10 * read + (text[i] - '0');
    }
    if (!is_number || read < min || read > max) {
        return refuse_number(name, text, length, min, max, is_public, err);
    }
    *number = (int32_t)read;
    return IMBREX_STATUS_OK;
}

static bool read_login(const char *text, size_t length, struct kv_remote_url *url)
{
    const char *colon = memchr(text, ':', length);
    if (colon == NULL) {
        return false;
    }
    size_t user_length = (size_t)(colon - text);
    return decode(text, user_length, url->user, sizeof(url->user)) &&
           decode(colon + 1, length - user_length - 1, url->password, sizeof(url->password)) &&
           url->password[0] != '\0';
}

static enum imbrex_status read_place(const char *text, size_t length, struct kv_remote_url *url,
                                     struct imbrex_error *err)
{
    const char *host = text, *rest;
    size_t host_length;
    if (length > 0 && text[0] == '[') {
        const char *end = memchr(text, ']', length);
        if (end == NULL) {
            return refuse("a HOST that begins with [ and has no ]", err);
        }
        host = text + 1;
        host_length = (size_t)(end - host);
        rest = end + 1;
    } else {
        const char *colon = memchr(text, ':', length);
        rest = colon != NULL ? colon : text + length;
        host_length = (size_t)(rest - text);
    }
    size_t rest_length = length - (size_t)(rest - text);
    if (host_length == 0) {
        return refuse("no HOST", err);
    }
    if (!decode(host, host_length, url->host, sizeof(url->host))) {
        return refuse("a HOST that is too long, or has a % without two hexadecimal digits", err);
    }
    if (rest_length > 0 && rest[0] != ':') {
        return refuse("more than :PORT behind the ] of HOST", err);
    }
    return rest_length == 0
               ? IMBREX_STATUS_OK
               : read_number("PORT", rest + 1, rest_length - 1, 1, 65535, false, &url->port, err);
}

/* ---- settings -------------------------------------------------------------------------------- */

enum { SETTING_TTL, SETTING_ZSTD, NUM_SETTINGS };

static const struct {
    const char *name;
    int32_t min, max;
} settings_known[NUM_SETTINGS] = {
    [SETTING_TTL] = {"ttl", 1, KV_REMOTE_MAX_TTL_S},
    [SETTING_ZSTD] = {"zstd", 0, KV_REMOTE_MAX_ZSTD_LEVEL},
};

static enum imbrex_status refuse_setting(const char *text, size_t length, struct imbrex_error *err)
{
    size_t name_length = strspn(text, "abcdefghijklmnopqrstuvwxyz_-");
    name_length = name_length < length ? name_length : length;
    if (name_length == 0 || name_length > MAX_SHOWN_BYTES ||
        (name_length < length && text[name_length] != '=')) {
        return refuse(length == 0 ? "an empty setting" : "a setting that is none of these", err);
    }
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_url",
                           ": expected the settings ttl=SECONDS and zstd=LEVEL, found %s %.*s",
                           name_length < length ? "an unknown one," : "one without a value,",
                           (int)name_length, text);
}

/* is_given: [NUM_SETTINGS] */
static enum imbrex_status read_setting(const char *text, size_t length, struct kv_remote_url *url,
                                       bool *is_given, struct imbrex_error *err)
{
    int32_t *values[NUM_SETTINGS] = {
        [SETTING_TTL] = &url->ttl_s, [SETTING_ZSTD] = &url->zstd_level};
    for (int32_t i = 0; i < NUM_SETTINGS; i++) {
        const char *name = settings_known[i].name;
        size_t name_length = strlen(name);
        if (length <= name_length || strncmp(text, name, name_length) != 0 ||
            text[name_length] != '=') {
            continue;
        }
        if (is_given[i]) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_url",
                                   ": %s: expected it once, found it twice", name);
        }
        is_given[i] = true;
        return read_number(name, text + name_length + 1, length - name_length - 1,
                           settings_known[i].min, settings_known[i].max, true, values[i], err);
    }
    return refuse_setting(text, length, err);
}

static enum imbrex_status read_settings(const char *settings, struct kv_remote_url *url,
                                        struct imbrex_error *err)
{
    bool is_given[NUM_SETTINGS] = {false};
    if (strchr(settings, '@') != NULL) {
        return refuse("an @ behind the ?, which is written %3F in a password", err);
    }
    while (*settings != '\0') {
        size_t length = strcspn(settings + 1, "&");
        TRY(read_setting(settings + 1, length, url, is_given, err));
        settings += 1 + length;
    }
#if !IMBREX_HAS_ZSTD
    if (url->zstd_level > 0) {
        return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "kv_remote_url",
                               ": zstd: expected a build with libzstd (libzstd-dev), found one "
                               "without");
    }
#endif
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_remote_url_parse(const char *text, struct kv_remote_url *url,
                                       struct imbrex_error *err)
{
    struct kv_remote_url parsed = {.port = KV_REMOTE_DEFAULT_PORT,
                                   .ttl_s = KV_REMOTE_DEFAULT_TTL_S};
    if (strncmp(text, tls_scheme, strlen(tls_scheme)) == 0) {
        return refuse("rediss://: there is no TLS", err);
    }
    if (strncmp(text, scheme, strlen(scheme)) != 0) {
        return refuse("another beginning", err);
    }
    const char *place = text + strlen(scheme);
    const char *settings = place + strcspn(place, "?");
    /* A password may have a slash in it, a place has no '@'. */
    for (const char *at = settings; at > place; at--) {
        if (at[-1] == '@') {
            if (!read_login(place, (size_t)(at - 1 - place), &parsed)) {
                return refuse("no [USER]:PASSWORD before the @, or one that is too long or has a % "
                              "without two hexadecimal digits",
                              err);
            }
            place = at;
            break;
        }
    }
    size_t place_length = strcspn(place, "/?");
    TRY(read_place(place, place_length, &parsed, err));
    if (place[place_length] == '/' && place + place_length + 1 != settings) {
        TRY(read_number("DB", place + place_length + 1,
                        (size_t)(settings - place) - place_length - 1, 0, INT32_MAX, false,
                        &parsed.database, err));
    }
    TRY(read_settings(settings, &parsed, err));
    *url = parsed;
    return IMBREX_STATUS_OK;
}
