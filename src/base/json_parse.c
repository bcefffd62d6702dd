/* SPDX-License-Identifier: Apache-2.0 */
/* JSON text (RFC 8259) to jansson's values. Not jansson's own parser, for two reasons: that one
 * drops characters when it cannot grow its token buffer, so that lack of memory looks like a broken
 * file or, worse, like another valid one; and it refuses integers beyond 64 bits, which Python
 * writes (they become real numbers here).
 *
 * Refused beyond the grammar: duplicate keys, U+0000 (so every string is a C string), halves of
 * surrogate pairs, invalid UTF-8, numbers beyond double, nesting deeper than JSON_MAX_DEPTH. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/memory.h"
#include "base/utf8.h"

/* Each level costs a C stack frame or two, here and when jansson frees the value. */
#define JSON_MAX_DEPTH 128
/* Digits of the longest number that is read; the largest double has 309. */
#define NUMBER_MAX_DIGITS 320

struct parser {
    const char *path;
    const char *begin, *next, *end;
    char *scratch; /* a stack of strings under construction: keys wait here for their values */
    size_t scratch_used, scratch_bytes;
    int depth;
    struct imbrex_error *err;
};

static enum imbrex_status parse_value(struct parser *parser, json_t **value);

/* The next byte, or -1 at the end. */
static int peek(const struct parser *parser)
{
    return parser->next < parser->end ? (unsigned char)*parser->next : -1;
}

static void skip_space(struct parser *parser)
{
    while (parser->next < parser->end && (*parser->next == ' ' || *parser->next == '\n' ||
                                          *parser->next == '\t' || *parser->next == '\r')) {
        parser->next++;
    }
}

static enum imbrex_status out_of_memory(const struct parser *parser)
{
    return error_set(parser->err, IMBREX_STATUS_OUT_OF_MEMORY,
                     "%s: no memory for a JSON document of %zu bytes", parser->path,
                     (size_t)(parser->end - parser->begin));
}

static enum imbrex_status error_at(const struct parser *parser, const char *position,
                                   const char *expected, const char *found)
{
    size_t line = 1, column = 1;
    for (const char *c = parser->begin; c < position; c++) {
        if (*c == '\n') {
            line++;
            column = 1;
        } else {
            column += ((unsigned char)*c & 0xc0) != 0x80; /* bytes inside a character count not */
        }
    }
    return error_set(parser->err, IMBREX_STATUS_FORMAT,
                     "%s: line %zu, column %zu: expected %s, found %s", parser->path, line, column,
                     expected, found);
}

/* The next byte is not what the grammar allows. */
static enum imbrex_status syntax_error(const struct parser *parser, const char *expected)
{
    char found[24];
    int byte = peek(parser);
    if (byte < 0) {
        snprintf(found, sizeof(found), "the end of the data");
    } else if (byte > 0x20 && byte < 0x7f) {
        snprintf(found, sizeof(found), "'%c'", byte);
    } else {
        snprintf(found, sizeof(found), "byte 0x%02x", (unsigned)byte);
    }
    return error_at(parser, parser->next, expected, found);
}

static enum imbrex_status scratch_push(struct parser *parser, const char *bytes, size_t num_bytes)
{
    size_t needed;
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    if (!size_add(parser->scratch_used, num_bytes, &needed)) {
        return out_of_memory(parser);
    }
    if (needed > parser->scratch_bytes) {
        size_t doubled;
        if (!size_mul(needed, 2, &doubled)) {
            return out_of_memory(parser);
        }
        char *grown = realloc(parser->scratch, doubled);
        if (grown == NULL) {
            return out_of_memory(parser);
        }
        parser->scratch = grown;
        parser->scratch_bytes = doubled;
    }
    memcpy(parser->scratch + parser->scratch_used, bytes, num_bytes);
    parser->scratch_used = needed;
    return IMBREX_STATUS_OK;
}

/* Four hexadecimal digits at the cursor, which moves behind them. */
static enum imbrex_status parse_hex4(struct parser *parser, uint32_t *value)
{
    uint32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        int byte = peek(parser);
        int digit;
        if (byte >= '0' && byte <= '9') {
            digit = byte - '0';
        } else if (byte >= 'a' && byte <= 'f') {
            digit = byte - 'a' + 10;
        } else if (byte >= 'A' && byte <= 'F') {
            digit = byte - 'A' + 10;
        } else {
            return syntax_error(parser, "four hexadecimal digits");
        }
        sum = sum * 16 + (uint32_t)digit;
        parser->next++;
    }
    *value = sum;
    return IMBREX_STATUS_OK;
}

/* An escape, cursor behind "\u", as UTF-8 onto the scratch stack. */
static enum imbrex_status parse_unicode_escape(struct parser *parser)
{
    const char *start = parser->next - 2;
    uint32_t code_point = 0, low = 0;
    char text[UTF8_MAX_BYTES];
    TRY(parse_hex4(parser, &code_point));
    if (code_point == 0) {
        return error_at(parser, start, "a character other than U+0000", "\\u0000");
    }
    if (code_point >= 0xd800 && code_point <= 0xdfff) {
        if (code_point >= 0xdc00 || parser->end - parser->next < 2 || parser->next[0] != '\\' ||
            parser->next[1] != 'u') {
            return error_at(parser, start, "a pair of surrogates", "half of one");
        }
        parser->next += 2;
        TRY(parse_hex4(parser, &low));
        if (low < 0xdc00 || low > 0xdfff) {
            return error_at(parser, start, "a pair of surrogates", "half of one");
        }
        code_point = 0x10000 + ((code_point - 0xd800) << 10) + (low - 0xdc00);
    }
    return scratch_push(parser, text, utf8_write(code_point, text));
}

static enum imbrex_status parse_escape(struct parser *parser)
{
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    parser->next++;
    int byte = peek(parser);
    if (byte == 'u') {
        parser->next++;
        return parse_unicode_escape(parser);
    }
    const char *letter = byte > 0 ? strchr(letters, byte) : NULL;
    if (letter == NULL) {
        return syntax_error(parser, "an escape sequence");
    }
    parser->next++;
    return scratch_push(parser, &meanings[letter - letters], 1);
}

/* A string, cursor at its quote, onto the scratch stack with a NUL behind it. */
static enum imbrex_status parse_string(struct parser *parser)
{
    parser->next++;
    for (;;) {
        const char *run = parser->next;
        while (parser->next < parser->end && *parser->next != '"' && *parser->next != '\\' &&
               (unsigned char)*parser->next >= 0x20) {
            if ((unsigned char)*parser->next < 0x80) {
                parser->next++;
                continue;
            }
            struct utf8_step step = utf8_next(parser->next, (size_t)(parser->end - parser->next));
            if (!step.is_valid) {
                return syntax_error(parser, "valid UTF-8");
            }
            parser->next += step.num_bytes;
        }
        TRY(scratch_push(parser, run, (size_t)(parser->next - run)));
        switch (peek(parser)) {
        case '"':
            parser->next++;
            return scratch_push(parser, "", 1);
        case '\\':
            TRY(parse_escape(parser));
            break;
        default:
            return syntax_error(parser, "the rest of a string");
        }
    }
}

static bool is_digit(int byte)
{
    return byte >= '0' && byte <= '9';
}

/* Digits of a number without sign, point and exponent: value = digits x 10^exponent. */
struct number {
    char digits[NUMBER_MAX_DIGITS + 16]; /* and room for sign and exponent, see to_double */
    size_t num_digits;
    int exponent;
    bool is_negative, is_integer;
};

static enum imbrex_status collect_digits(struct parser *parser, struct number *number)
{
    if (!is_digit(peek(parser))) {
        return syntax_error(parser, "a digit");
    }
    for (; is_digit(peek(parser)); parser->next++) {
        if (number->num_digits == NUMBER_MAX_DIGITS) {
            return error_at(parser, parser->next, "a number of at most 320 digits", "more");
        }
        number->digits[1 + number->num_digits++] = *parser->next;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status scan_number(struct parser *parser, struct number *number)
{
    number->is_integer = true;
    if (peek(parser) == '-') {
        number->is_negative = true;
        parser->next++;
    }
    if (peek(parser) == '0') {
        number->digits[1 + number->num_digits++] = '0';
        parser->next++;
    } else {
        TRY(collect_digits(parser, number));
    }
    if (peek(parser) == '.') {
        size_t num_whole = number->num_digits;
        number->is_integer = false;
        parser->next++;
        TRY(collect_digits(parser, number));
        number->exponent = -(int)(number->num_digits - num_whole);
    }
    if (peek(parser) == 'e' || peek(parser) == 'E') {
        number->is_integer = false;
        parser->next++;
        bool is_negative = peek(parser) == '-';
        if (peek(parser) == '-' || peek(parser) == '+') {
            parser->next++;
        }
        if (!is_digit(peek(parser))) {
            return syntax_error(parser, "a digit");
        }
        int exponent = 0;
        for (; is_digit(peek(parser)); parser->next++) {
            if (exponent < 10000) { /* further digits change nothing: infinity or zero anyhow */
                exponent = exponent * 10 + (*parser->next - '0');
            }
        }
        number->exponent += is_negative ? -exponent : exponent;
    }
    return IMBREX_STATUS_OK;
}

/* strtod without a decimal point in the text, whose form depends on the process's locale. */
static double to_double(struct number *number)
{
    number->digits[0] = number->is_negative ? '-' : '+';
    snprintf(number->digits + 1 + number->num_digits,
             sizeof(number->digits) - 1 - number->num_digits, "e%d", number->exponent);
    return strtod(number->digits, NULL);
}

/* False if the digits do not fit. Counts downwards: the negative range is the larger one. */
static bool to_integer(const struct number *number, json_int_t *integer)
{
    json_int_t sum = 0;
    for (size_t i = 1; i <= number->num_digits; i++) {
        if (__builtin_mul_overflow(sum, 10, &sum) ||
            __builtin_sub_overflow(sum, number->digits[i] - '0', &sum)) {
            return false;
        }
    }
    if (number->is_negative) {
        *integer = sum;
        return true;
    }
    return !__builtin_sub_overflow(0, sum, integer);
}

static enum imbrex_status parse_number(struct parser *parser, json_t **value)
{
    struct number number;
    number.num_digits = 0;
    number.exponent = 0;
    number.is_negative = false;
    const char *start = parser->next;
    TRY(scan_number(parser, &number));
    json_int_t integer;
    json_t *made;
    if (number.is_integer && to_integer(&number, &integer)) {
        made = json_integer(integer);
    } else {
        double real = to_double(&number);
        if (!isfinite(real)) {
            return error_at(parser, start, "a number that fits double precision", "a larger one");
        }
        made = json_real(real);
    }
    if (made == NULL) {
        return out_of_memory(parser);
    }
    *value = made;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_array(struct parser *parser, json_t **value)
{
    enum imbrex_status status;
    json_t *element;
    json_t *array = json_array();
    if (array == NULL) {
        return out_of_memory(parser);
    }
    parser->next++;
    skip_space(parser);
    bool is_done = peek(parser) == ']';
    while (!is_done) {
        TRY_OR_FAIL(parse_value(parser, &element));
        if (json_array_append_new(array, element) != 0) {
            status = out_of_memory(parser);
            goto fail;
        }
        skip_space(parser);
        is_done = peek(parser) == ']';
        if (!is_done && peek(parser) != ',') {
            status = syntax_error(parser, "',' or ']'");
            goto fail;
        }
        parser->next += !is_done;
    }
    parser->next++;
    *value = array;
    return IMBREX_STATUS_OK;

fail:
    json_decref(array);
    return status;
}

/* One "key": value of an object, cursor at the key's quote. */
static enum imbrex_status parse_member(struct parser *parser, json_t *object)
{
    const char *start = parser->next;
    size_t key_offset = parser->scratch_used;
    json_t *value;
    if (peek(parser) != '"') {
        return syntax_error(parser, "a key in double quotes");
    }
    TRY(parse_string(parser));
    if (json_object_get(object, parser->scratch + key_offset) != NULL) {
        char found[64];
        snprintf(found, sizeof(found), "\"%.40s\" again", parser->scratch + key_offset);
        return error_at(parser, start, "every key once", found);
    }
    skip_space(parser);
    if (peek(parser) != ':') {
        return syntax_error(parser, "':'");
    }
    parser->next++;
    TRY(parse_value(parser, &value));
    if (json_object_set_new_nocheck(object, parser->scratch + key_offset, value) != 0) {
        return out_of_memory(parser);
    }
    parser->scratch_used = key_offset;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_object(struct parser *parser, json_t **value)
{
    enum imbrex_status status;
    json_t *object = json_object();
    if (object == NULL) {
        return out_of_memory(parser);
    }
    parser->next++;
    skip_space(parser);
    bool is_done = peek(parser) == '}';
    while (!is_done) {
        skip_space(parser);
        TRY_OR_FAIL(parse_member(parser, object));
        skip_space(parser);
        is_done = peek(parser) == '}';
        if (!is_done && peek(parser) != ',') {
            status = syntax_error(parser, "',' or '}'");
            goto fail;
        }
        parser->next += !is_done;
    }
    parser->next++;
    *value = object;
    return IMBREX_STATUS_OK;

fail:
    json_decref(object);
    return status;
}

static enum imbrex_status parse_string_value(struct parser *parser, json_t **value)
{
    size_t offset = parser->scratch_used;
    TRY(parse_string(parser));
    json_t *string =
        json_stringn_nocheck(parser->scratch + offset, parser->scratch_used - offset - 1);
    if (string == NULL) {
        return out_of_memory(parser);
    }
    parser->scratch_used = offset;
    *value = string;
    return IMBREX_STATUS_OK;
}

/* True, and the cursor behind it, if the word stands at the cursor. */
static bool skip_word(struct parser *parser, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(parser->end - parser->next) < length || memcmp(parser->next, word, length) != 0) {
        return false;
    }
    parser->next += length;
    return true;
}

static enum imbrex_status parse_value(struct parser *parser, json_t **value)
{
    enum imbrex_status status;
    skip_space(parser);
    switch (peek(parser)) {
    case '{':
    case '[':
        if (parser->depth == JSON_MAX_DEPTH) {
            return error_at(parser, parser->next, "at most 128 levels of nesting", "more");
        }
        parser->depth++;
        status = *parser->next == '{' ? parse_object(parser, value) : parse_array(parser, value);
        parser->depth--;
        return status;
    case '"':
        return parse_string_value(parser, value);
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9':
        return parse_number(parser, value);
    default:
        break;
    }
    if (skip_word(parser, "true")) {
        *value = json_true();
    } else if (skip_word(parser, "false")) {
        *value = json_false();
    } else if (skip_word(parser, "null")) {
        *value = json_null();
    } else {
        return syntax_error(parser, "a JSON value");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_document(const char *path, const void *bytes, size_t num_bytes,
                                         json_type type, const char *expected, json_t **root,
                                         struct imbrex_error *err)
{
    const char *text = bytes;
    struct parser parser = {
        .path = path, .begin = text, .next = text, .end = text + num_bytes, .err = err};
    json_t *document = NULL;
    enum imbrex_status status = parse_value(&parser, &document);
    if (status == IMBREX_STATUS_OK) {
        skip_space(&parser);
        if (parser.next != parser.end) {
            status = syntax_error(&parser, "the end of the data");
        } else if (json_typeof(document) != type) {
            status = error_set(err, IMBREX_STATUS_FORMAT, "%s: expected a JSON %s, found %s", path,
                               expected, json_kind(document));
        }
    }
    free(parser.scratch);
    if (status != IMBREX_STATUS_OK) {
        json_decref(document);
        return status;
    }
    *root = document;
    return IMBREX_STATUS_OK;
}

enum imbrex_status json_parse_object(const char *path, const void *bytes, size_t num_bytes,
                                     json_t **root, struct imbrex_error *err)
{
    return parse_document(path, bytes, num_bytes, JSON_OBJECT, "object", root, err);
}

enum imbrex_status json_parse_array(const char *path, const void *bytes, size_t num_bytes,
                                    json_t **root, struct imbrex_error *err)
{
    return parse_document(path, bytes, num_bytes, JSON_ARRAY, "array", root, err);
}
