/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_remote_url.h"

#include <stdbool.h>
#include <string.h>

static const char scheme[] = "redis://";
static const char tls_scheme[] = "rediss://";

static enum imbrex_status refuse(const char *expected, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                     "kv_remote_url: expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]"
                     "[?ttl=SECONDS][&zstd=LEVEL], %s",
                     expected);
}

static int32_t hex_digit(char c)
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *at = c != '\0' ? strchr(digits, c) : NULL;
    return at != NULL ? (int32_t)(at - digits) % 16 : -1;
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

/* All of the text as a number in [0, max]. */
static bool read_number(const char *text, size_t length, int32_t max, int32_t *number)
{
    int64_t read = 0;
    if (length == 0 || length > 10) {
        return false;
    }
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        read = 10 * read + (text[i] - '0');
    }
    if (read > max) {
        return false;
    }
    *number = (int32_t)read;
    return true;
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

static bool read_place(const char *text, size_t length, struct kv_remote_url *url)
{
    const char *host = text, *rest;
    size_t host_length;
    if (length > 0 && text[0] == '[') {
        const char *end = memchr(text, ']', length);
        if (end == NULL) {
            return false;
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
    if (host_length == 0 || !decode(host, host_length, url->host, sizeof(url->host))) {
        return false;
    }
    return rest_length == 0 ||
           (rest[0] == ':' && read_number(rest + 1, rest_length - 1, 65535, &url->port) &&
            url->port > 0);
}

static bool read_setting(const char *text, size_t length, struct kv_remote_url *url)
{
    static const char ttl[] = "ttl=", zstd[] = "zstd=";
    if (length > strlen(ttl) && strncmp(text, ttl, strlen(ttl)) == 0) {
        return read_number(text + strlen(ttl), length - strlen(ttl), KV_REMOTE_MAX_TTL_S,
                           &url->ttl_s);
    }
    return length > strlen(zstd) && strncmp(text, zstd, strlen(zstd)) == 0 &&
           read_number(text + strlen(zstd), length - strlen(zstd), KV_REMOTE_MAX_ZSTD_LEVEL,
                       &url->zstd_level);
}

enum imbrex_status kv_remote_url_parse(const char *text, struct kv_remote_url *url,
                                       struct imbrex_error *err)
{
    struct kv_remote_url parsed = {.port = KV_REMOTE_DEFAULT_PORT,
                                   .ttl_s = KV_REMOTE_DEFAULT_TTL_S};
    if (strncmp(text, tls_scheme, strlen(tls_scheme)) == 0) {
        return refuse("found rediss://: there is no TLS", err);
    }
    if (strncmp(text, scheme, strlen(scheme)) != 0) {
        return refuse("found another beginning", err);
    }
    const char *place = text + strlen(scheme);
    const char *settings = place + strcspn(place, "?");
    /* A password may have a slash in it, a place has no '@'. */
    for (const char *at = settings; at > place; at--) {
        if (at[-1] == '@') {
            if (!read_login(place, (size_t)(at - 1 - place), &parsed)) {
                return refuse("found no USER:PASSWORD before the @", err);
            }
            place = at;
            break;
        }
    }
    size_t place_length = strcspn(place, "/?");
    if (!read_place(place, place_length, &parsed)) {
        return refuse("found no HOST:PORT", err);
    }
    if (place[place_length] == '/' && place + place_length + 1 != settings &&
        !read_number(place + place_length + 1, (size_t)(settings - place) - place_length - 1,
                     INT32_MAX, &parsed.database)) {
        return refuse("found a DB that is no number", err);
    }
    while (*settings != '\0') {
        size_t length = strcspn(settings + 1, "&");
        if (!read_setting(settings + 1, length, &parsed)) {
            return refuse("found a setting that is none of these, or out of its range", err);
        }
        settings += 1 + length;
    }
#if !IMBREX_HAS_ZSTD
    if (parsed.zstd_level > 0) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "kv_remote_url: zstd: expected a build with libzstd (libzstd-dev), found "
                         "one without");
    }
#endif
    *url = parsed;
    return IMBREX_STATUS_OK;
}
