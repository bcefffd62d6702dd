/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_scan.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_SHOWN_BYTES 32 /* of a key, and of what was found */

struct scan scan_begin(const char *line, size_t num_bytes)
{
    return (struct scan){.at = line, .end = line + num_bytes};
}

/* At most MAX_SHOWN_BYTES, and what does not print replaced: a line may hold any bytes. */
static void copy_printable(const char *text, size_t num_bytes, char shown[MAX_SHOWN_BYTES + 4])
{
    size_t length = num_bytes < MAX_SHOWN_BYTES ? num_bytes : MAX_SHOWN_BYTES;

    for (size_t i = 0; i < length; i++) {
        shown[i] = text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?';
    }
    memcpy(shown + length, length < num_bytes ? "..." : "", length < num_bytes ? 4 : 1);
}

static bool fail(struct scan *scan, const char *field, const char *expected, const char *found)
{
    if (!scan->has_failed) {
        scan->has_failed = true;
        (void)snprintf(scan->reason, sizeof(scan->reason), "%s%sexpected %s, found %s", field,
                       field[0] != '\0' ? ": " : "", expected, found);
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

/* Bytes of the value, the word or the mark at the cursor. */
static size_t length_of_next(const struct scan *scan)
{
    bool is_mark = strchr(",:[]{}", scan->at[0]) != NULL;
    size_t length = 1;

    while (!is_mark && scan->at + length < scan->end &&
           strchr(",:]} \t\r", scan->at[length]) == NULL) {
        length++;
    }
    return length;
}

bool scan_fail(struct scan *scan, const char *expected)
{
    char field[MAX_SHOWN_BYTES + 4] = "", found[MAX_SHOWN_BYTES + 4];

    skip_blanks(scan);
    if (scan->key != NULL) {
        copy_printable(scan->key, scan->key_bytes, field);
    }
    if (scan->at == scan->end) {
        return fail(scan, field, expected, "the end of the line");
    }
    copy_printable(scan->at, length_of_next(scan), found);
    return fail(scan, field, expected, found);
}

bool scan_refuse(struct scan *scan, const char *field, const char *expected, const char *found, ...)
{
    char text[MAX_SHOWN_BYTES + 1];
    va_list arguments;

    va_start(arguments, found);
    (void)vsnprintf(text, sizeof(text), found, arguments);
    va_end(arguments);
    return fail(scan, field != NULL ? field : "", expected, text);
}

bool scan_fail_as(struct scan *scan, const struct scan *failed)
{
    if (!scan->has_failed) {
        scan->has_failed = true;
        memcpy(scan->reason, failed->reason, sizeof(scan->reason));
    }
    return false;
}

static bool take(struct scan *scan, char mark, const char *expected)
{
    if (scan->has_failed || peek(scan) != mark || scan->at == scan->end) {
        return scan_fail(scan, expected);
    }
    scan->at++;
    return true;
}

bool scan_object(struct scan *scan)
{
    scan->is_first = true;
    return take(scan, '{', "an object");
}

bool scan_array(struct scan *scan)
{
    scan->is_first = true;
    return take(scan, '[', "an array");
}

/* True if an element follows; passes the comma before it, or the bracket behind the last. */
static bool next_element(struct scan *scan, char bracket)
{
    bool is_first = scan->is_first;

    scan->is_first = false;
    if (scan->has_failed) {
        return false;
    }
    if (peek(scan) == bracket) {
        scan->at++;
        return false;
    }
    return is_first || take(scan, ',', "a comma or a closing bracket");
}

bool scan_element(struct scan *scan)
{
    return next_element(scan, ']');
}

bool scan_key(struct scan *scan, const char **key, size_t *key_bytes)
{
    if (!next_element(scan, '}') || !scan_string(scan, key, key_bytes)) {
        return false;
    }
    scan->key = *key;
    scan->key_bytes = *key_bytes;
    return take(scan, ':', "a colon");
}

bool scan_string(struct scan *scan, const char **text, size_t *num_bytes)
{
    if (!take(scan, '"', "a string")) {
        return false;
    }
    const char *begin = scan->at;
    while (scan->at < scan->end && *scan->at != '"') {
        scan->at += *scan->at == '\\' && scan->end - scan->at > 1 ? 2 : 1;
    }
    if (scan->at >= scan->end) {
        scan->at = scan->end;
        return scan_fail(scan, "the end of a string");
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

/* What begins at `begin`, if it is all right but for its size. */
static bool refuse_number(struct scan *scan, const char *begin, const char *expected)
{
    scan->at = begin;
    return scan_fail(scan, expected);
}

bool scan_whole(struct scan *scan, uint64_t max, uint64_t *value)
{
    uint64_t whole = 0;
    char expected[48];

    if (scan->has_failed) {
        return false;
    }
    if (!is_digit(peek(scan))) {
        return scan_fail(scan, "a whole number of 0 or more");
    }
    const char *begin = scan->at;
    bool is_good = true;
    for (; scan->at < scan->end && is_digit(*scan->at) && is_good; scan->at++) {
        is_good = !__builtin_mul_overflow(whole, 10u, &whole) &&
                  !__builtin_add_overflow(whole, (uint64_t)(*scan->at - '0'), &whole);
    }
    if (is_good && scan->at < scan->end &&
        (*scan->at == '.' || *scan->at == 'e' || *scan->at == 'E')) {
        return refuse_number(scan, begin, "a whole number of 0 or more");
    }
    if (!is_good || whole > max) {
        (void)snprintf(expected, sizeof(expected), "a whole number of at most %" PRIu64, max);
        return refuse_number(scan, begin, expected);
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

    if (scan->has_failed) {
        return false;
    }
    bool is_negative = peek(scan) == '-';
    const char *begin = scan->at;
    scan->at += is_negative;
    if (take_digits(scan, &mantissa, &num_dropped) == 0) {
        return scan_fail(scan, "a number");
    }
    scale = num_dropped;
    if (scan->at < scan->end && *scan->at == '.') {
        int32_t num_dropped_before = num_dropped;
        scan->at++;
        int32_t num_digits = take_digits(scan, &mantissa, &num_dropped);
        if (num_digits == 0) {
            return scan_fail(scan, "digits behind a point");
        }
        scale -= num_digits - (num_dropped - num_dropped_before);
    }
    if (scan->at < scan->end && (*scan->at == 'e' || *scan->at == 'E')) {
        scan->at++;
        bool is_minus = scan->at < scan->end && *scan->at == '-';
        scan->at += scan->at < scan->end && (*scan->at == '-' || *scan->at == '+');
        if (take_digits(scan, &exponent, &num_unused) == 0) {
            return scan_fail(scan, "digits in an exponent");
        }
        int32_t bounded = exponent < 1000 ? (int32_t)exponent : 1000;
        scale += is_minus ? -bounded : bounded;
    }
    double magnitude =
        scale < 0 ? (double)mantissa / pow(10, -scale) : (double)mantissa * pow(10, scale);
    if (!(magnitude <= max)) {
        char expected[48];
        (void)snprintf(expected, sizeof(expected), "a number from %g to %g", -max, max);
        return refuse_number(scan, begin, expected);
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
    return scan_fail(scan, "a value");
}

static bool skip_at_depth(struct scan *scan, int32_t depth)
{
    const char *text = NULL;
    size_t num_bytes = 0;
    double number = 0;

    if (depth > SCAN_MAX_DEPTH) {
        return scan_fail(scan, "at most 64 values in one another");
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
    return !scan->has_failed && skip_at_depth(scan, 0);
}

bool scan_null(struct scan *scan)
{
    return !scan->has_failed && peek(scan) == 'n' && skip_word(scan);
}

bool scan_end(struct scan *scan)
{
    skip_blanks(scan);
    scan->key = NULL;
    if (!scan->has_failed && scan->at != scan->end) {
        scan_fail(scan, "the end of the line");
    }
    return scan_is_good(scan);
}

bool scan_equal(const char *text, size_t num_bytes, const char *name)
{
    return strlen(name) == num_bytes && memcmp(text, name, num_bytes) == 0;
}
