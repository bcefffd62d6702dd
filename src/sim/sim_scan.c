/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_scan.h"

#include <math.h>
#include <string.h>

struct scan scan_begin(const char *line, size_t num_bytes)
{
    return (struct scan){.at = line, .end = line + num_bytes};
}

bool scan_fail(struct scan *scan, const char *reason)
{
    if (scan->reason == NULL) {
        scan->reason = reason;
    }
    return false;
}

static void skip_blanks(struct scan *scan)
{
    while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\t' || *scan->at == '\r')) {
        scan->at++;
    }
}

/* The next character that is no blank, '\0' at the end. */
static char peek(struct scan *scan)
{
    skip_blanks(scan);
    return scan->at < scan->end ? *scan->at : '\0';
}

static bool take(struct scan *scan, char expected, const char *reason)
{
    if (scan->reason != NULL || peek(scan) != expected || scan->at == scan->end) {
        return scan_fail(scan, scan->at == scan->end ? "the line ends too early" : reason);
    }
    scan->at++;
    return true;
}

bool scan_object(struct scan *scan)
{
    scan->is_first = true;
    return take(scan, '{', "expected an object");
}

bool scan_array(struct scan *scan)
{
    scan->is_first = true;
    return take(scan, '[', "expected an array");
}

/* True if an element follows; passes the comma before it, or the bracket behind the last. */
static bool next_element(struct scan *scan, char bracket)
{
    bool is_first = scan->is_first;

    scan->is_first = false;
    if (scan->reason != NULL) {
        return false;
    }
    if (peek(scan) == bracket) {
        scan->at++;
        return false;
    }
    return is_first || take(scan, ',', "expected a comma or a closing bracket");
}

bool scan_element(struct scan *scan)
{
    return next_element(scan, ']');
}

bool scan_key(struct scan *scan, const char **key, size_t *key_bytes)
{
    return next_element(scan, '}') && scan_string(scan, key, key_bytes) &&
           take(scan, ':', "expected a colon");
}

bool scan_string(struct scan *scan, const char **text, size_t *num_bytes)
{
    if (!take(scan, '"', "expected a string")) {
        return false;
    }
    const char *begin = scan->at;
    while (scan->at < scan->end && *scan->at != '"') {
        scan->at += *scan->at == '\\' && scan->end - scan->at > 1 ? 2 : 1;
    }
    if (scan->at >= scan->end) {
        scan->at = scan->end;
        return scan_fail(scan, "a string does not end");
    }
    *text = begin;
    *num_bytes = (size_t)(scan->at - begin);
    scan->at++;
    return true;
}

static bool is_digit(char character)
{
    return character >= '0' && character <= '9';
}

bool scan_whole(struct scan *scan, uint64_t max, uint64_t *value)
{
    uint64_t whole = 0;

    if (scan->reason != NULL) {
        return false;
    }
    if (!is_digit(peek(scan))) {
        return scan_fail(scan, "expected a whole number of 0 or more");
    }
    for (; scan->at < scan->end && is_digit(*scan->at); scan->at++) {
        if (__builtin_mul_overflow(whole, 10u, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*scan->at - '0'), &whole)) {
            return scan_fail(scan, "a number is too large");
        }
    }
    if (scan->at < scan->end && (*scan->at == '.' || *scan->at == 'e' || *scan->at == 'E')) {
        return scan_fail(scan, "expected a whole number of 0 or more");
    }
    if (whole > max) {
        return scan_fail(scan, "a number is too large");
    }
    *value = whole;
    return true;
}

/* Adds the digits at the cursor to the mantissa while they fit; those that do not only count. */
static int32_t take_digits(struct scan *scan, uint64_t *mantissa, int32_t *num_dropped)
{
    int32_t num_digits = 0;

    for (; scan->at < scan->end && is_digit(*scan->at); scan->at++) {
        if (num_digits < 1000) {
            num_digits++;
        }
        if (*mantissa < UINT64_MAX / 10 - 1) {
            *mantissa = *mantissa * 10 + (uint64_t)(*scan->at - '0');
        } else if (*num_dropped < 1000) {
            (*num_dropped)++;
        }
    }
    return num_digits;
}

bool scan_number(struct scan *scan, double max, double *value)
{
    uint64_t mantissa = 0, exponent = 0;
    int32_t num_dropped = 0, num_unused = 0, scale = 0;

    if (scan->reason != NULL) {
        return false;
    }
    bool is_negative = peek(scan) == '-';
    scan->at += is_negative;
    if (take_digits(scan, &mantissa, &num_dropped) == 0) {
        return scan_fail(scan, "expected a number");
    }
    scale = num_dropped;
    if (scan->at < scan->end && *scan->at == '.') {
        int32_t num_dropped_before = num_dropped;
        scan->at++;
        int32_t num_digits = take_digits(scan, &mantissa, &num_dropped);
        if (num_digits == 0) {
            return scan_fail(scan, "expected digits behind a point");
        }
        scale -= num_digits - (num_dropped - num_dropped_before);
    }
    if (scan->at < scan->end && (*scan->at == 'e' || *scan->at == 'E')) {
        scan->at++;
        bool is_minus = scan->at < scan->end && *scan->at == '-';
        scan->at += scan->at < scan->end && (*scan->at == '-' || *scan->at == '+');
        if (take_digits(scan, &exponent, &num_unused) == 0) {
            return scan_fail(scan, "expected digits in an exponent");
        }
        int32_t bounded = exponent < 1000 ? (int32_t)exponent : 1000;
        scale += is_minus ? -bounded : bounded;
    }
    double magnitude =
        scale < 0 ? (double)mantissa / pow(10, -scale) : (double)mantissa * pow(10, scale);
    if (!(magnitude <= max)) {
        return scan_fail(scan, "a number is too large");
    }
    *value = is_negative ? -magnitude : magnitude;
    return true;
}

static bool skip_word(struct scan *scan)
{
    static const char *const words[] = {"true", "false", "null"};

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        size_t num_bytes = strlen(words[i]);
        if ((size_t)(scan->end - scan->at) >= num_bytes &&
            memcmp(scan->at, words[i], num_bytes) == 0) {
            scan->at += num_bytes;
            return true;
        }
    }
    return scan_fail(scan, "expected a value");
}

static bool skip_at_depth(struct scan *scan, int32_t depth)
{
    const char *text = NULL;
    size_t num_bytes = 0;
    double number = 0;

    if (depth > SCAN_MAX_DEPTH) {
        return scan_fail(scan, "nested too deeply");
    }
    switch (peek(scan)) {
    case '"':
        return scan_string(scan, &text, &num_bytes);
    case '{':
        scan_object(scan);
        while (scan_key(scan, &text, &num_bytes)) {
            skip_at_depth(scan, depth + 1);
        }
        break;
    case '[':
        scan_array(scan);
        while (scan_element(scan)) {
            skip_at_depth(scan, depth + 1);
        }
        break;
    case 't':
    case 'f':
    case 'n':
        return skip_word(scan);
    default:
        return scan_number(scan, INFINITY, &number);
    }
    scan->is_first = false;
    return scan_is_good(scan);
}

bool scan_skip(struct scan *scan)
{
    return scan->reason == NULL && skip_at_depth(scan, 0);
}

bool scan_null(struct scan *scan)
{
    return scan->reason == NULL && peek(scan) == 'n' && skip_word(scan);
}

bool scan_end(struct scan *scan)
{
    skip_blanks(scan);
    if (scan->reason == NULL && scan->at != scan->end) {
        scan_fail(scan, "something follows the object");
    }
    return scan_is_good(scan);
}

bool scan_equal(const char *text, size_t num_bytes, const char *name)
{
    return strlen(name) == num_bytes && memcmp(text, name, num_bytes) == 0;
}
