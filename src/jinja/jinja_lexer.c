/* SPDX-License-Identifier: Apache-2.0 */
/* Template text to tokens, with Jinja's rules for white space around tags:
 *   {%-  -%}    strip all white space on that side
 *   {%+  +%}    strip nothing there, whatever the two rules below say
 *   trim_blocks    the newline right behind a block tag or comment goes
 *   lstrip_blocks  blanks before a block tag or comment that begins its line go
 * Both rules are always on, as Hugging Face has them. */
#include <string.h>

#include "base/utf8.h"
#include "jinja/jinja_syntax.h"

void jinja_lexer_init(struct jinja_lexer *lexer, const char *name, const char *source,
                      size_t num_bytes, struct imbrex_error *err)
{
    *lexer = (struct jinja_lexer){
        .name = name, .source = source, .num_bytes = num_bytes, .line = 1, .err = err};
}

static bool has(const struct jinja_lexer *lexer, size_t position, const char *text)
{
    size_t num_bytes = strlen(text);
    return position <= lexer->num_bytes && lexer->num_bytes - position >= num_bytes &&
           memcmp(lexer->source + position, text, num_bytes) == 0;
}

static int byte_at(const struct jinja_lexer *lexer, size_t position)
{
    return position < lexer->num_bytes ? (unsigned char)lexer->source[position] : -1;
}

static size_t skip_space(const struct jinja_lexer *lexer, size_t position)
{
    while (position < lexer->num_bytes) {
        struct utf8_step step = utf8_next(lexer->source + position, lexer->num_bytes - position);
        if (!jinja_is_space(step.code_point)) {
            break;
        }
        position += step.num_bytes;
    }
    return position;
}

/* Where the white space that ends source[begin, end) begins. */
static size_t strip_right(const struct jinja_lexer *lexer, size_t begin, size_t end)
{
    while (end > begin) {
        size_t last = end - 1;
        while (last > begin && ((unsigned char)lexer->source[last] & 0xc0) == 0x80) {
            last--;
        }
        struct utf8_step step = utf8_next(lexer->source + last, end - last);
        if (!jinja_is_space(step.code_point)) {
            break;
        }
        end = last;
    }
    return end;
}

static void advance(struct jinja_lexer *lexer, size_t position)
{
    for (size_t i = lexer->position; i < position; i++) {
        lexer->line += lexer->source[i] == '\n';
    }
    lexer->position = position;
}

static bool is_sign(int byte)
{
    return byte == '-' || byte == '+';
}

/* End of a tag that closes with `closing` at `position`, sign included, or 0. Tags that print keep
 * the newline behind them. */
static size_t match_closing(const struct jinja_lexer *lexer, size_t position, const char *closing,
                            bool is_print)
{
    int sign = byte_at(lexer, position);
    if (sign == '-' && has(lexer, position + 1, closing)) {
        return skip_space(lexer, position + 3);
    }
    if (sign == '+' && !is_print && has(lexer, position + 1, closing)) {
        return position + 3;
    }
    if (has(lexer, position, closing)) {
        position += 2;
        return position + (!is_print && byte_at(lexer, position) == '\n');
    }
    return 0;
}

/* If the tag at `position` is {% raw %}: where the raw text begins; otherwise 0. */
static size_t match_raw(const struct jinja_lexer *lexer, size_t position)
{
    position += 2 + (size_t)is_sign(byte_at(lexer, position + 2));
    position = skip_space(lexer, position);
    if (!has(lexer, position, "raw")) {
        return 0;
    }
    position = skip_space(lexer, position + 3);
    if (has(lexer, position, "-%}")) {
        return skip_space(lexer, position + 3);
    }
    return has(lexer, position, "%}") ? position + 2 : 0;
}

/* If there is an {% endraw %} at `position`: where it ends; otherwise 0. */
static size_t match_end_raw(const struct jinja_lexer *lexer, size_t position)
{
    position += 2 + (size_t)is_sign(byte_at(lexer, position + 2));
    position = skip_space(lexer, position);
    if (!has(lexer, position, "endraw")) {
        return 0;
    }
    position = skip_space(lexer, position + 6);
    return match_closing(lexer, position, "%}", false);
}

/* End of the text [begin, tag) that is left of a tag once the rules have been applied. */
static size_t strip_before(const struct jinja_lexer *lexer, size_t begin, size_t tag, bool is_print)
{
    int sign = byte_at(lexer, tag + 2);
    if (sign == '-') {
        return strip_right(lexer, begin, tag);
    }
    if (sign == '+' || is_print) {
        return tag;
    }
    size_t line_begin = tag;
    while (line_begin > begin && lexer->source[line_begin - 1] != '\n') {
        line_begin--;
    }
    bool begins_line = line_begin == 0 || lexer->source[line_begin - 1] == '\n';
    if (begins_line && strip_right(lexer, line_begin, tag) == line_begin) {
        return line_begin;
    }
    return tag;
}

static enum imbrex_status fail_at(const struct jinja_lexer *lexer, const char *message)
{
    return error_set(lexer->err, IMBREX_STATUS_FORMAT, "%s:%d: %s", lexer->name, lexer->line,
                     message);
}

/* The next tag at or after the position; num_bytes if there is none. */
static size_t find_tag(const struct jinja_lexer *lexer, size_t position)
{
    for (; position + 1 < lexer->num_bytes; position++) {
        const char *brace = memchr(lexer->source + position, '{', lexer->num_bytes - position);
        if (brace == NULL) {
            break;
        }
        position = (size_t)(brace - lexer->source);
        int second = byte_at(lexer, position + 1);
        if (second == '{' || second == '%' || second == '#') {
            return position;
        }
    }
    return lexer->num_bytes;
}

/* Position at a comment; moves behind it. */
static enum imbrex_status skip_comment(struct jinja_lexer *lexer)
{
    size_t begin = lexer->position + 2;
    begin += (size_t)is_sign(byte_at(lexer, begin));
    for (size_t i = begin; i + 1 < lexer->num_bytes; i++) {
        if (has(lexer, i, "#}")) {
            size_t closing = i > begin && is_sign(byte_at(lexer, i - 1)) ? i - 1 : i;
            advance(lexer, match_closing(lexer, closing, "#}", false));
            return IMBREX_STATUS_OK;
        }
    }
    return fail_at(lexer, "a comment without its end");
}

/* Position behind {% raw %}: the text up to {% endraw %}, and moves behind that. */
static enum imbrex_status read_raw(struct jinja_lexer *lexer, struct jinja_token *token)
{
    size_t begin = lexer->position;
    for (size_t i = begin; i + 1 < lexer->num_bytes; i++) {
        size_t end = has(lexer, i, "{%") ? match_end_raw(lexer, i) : 0;
        if (end != 0) {
            token->text = lexer->source + begin;
            token->num_bytes = strip_before(lexer, begin, i, false) - begin;
            advance(lexer, end);
            return IMBREX_STATUS_OK;
        }
    }
    return fail_at(lexer, "{% raw %} without its {% endraw %}");
}

/* Outside of tags: data, or the begin of a tag. */
static enum imbrex_status next_data(struct jinja_lexer *lexer, struct jinja_token *token)
{
    while (lexer->position < lexer->num_bytes) {
        size_t begin = lexer->position;
        size_t tag = find_tag(lexer, begin);
        bool is_print = has(lexer, tag, "{{");
        size_t end = tag == lexer->num_bytes ? tag : strip_before(lexer, begin, tag, is_print);
        if (end > begin) {
            *token = (struct jinja_token){.kind = JINJA_TOKEN_DATA,
                                          .line = lexer->line,
                                          .text = lexer->source + begin,
                                          .num_bytes = end - begin};
            advance(lexer, tag);
            return IMBREX_STATUS_OK;
        }
        advance(lexer, tag);
        if (tag == lexer->num_bytes) {
            break;
        }
        if (has(lexer, tag, "{#")) {
            TRY(skip_comment(lexer));
            continue;
        }
        size_t raw = is_print ? 0 : match_raw(lexer, tag);
        *token = (struct jinja_token){.line = lexer->line};
        if (raw != 0) {
            advance(lexer, raw);
            token->kind = JINJA_TOKEN_DATA;
            TRY(read_raw(lexer, token));
            if (token->num_bytes != 0) {
                return IMBREX_STATUS_OK;
            }
            continue;
        }
        token->kind = is_print ? JINJA_TOKEN_VARIABLE_BEGIN : JINJA_TOKEN_BLOCK_BEGIN;
        lexer->state = is_print ? JINJA_LEXER_VARIABLE : JINJA_LEXER_BLOCK;
        advance(lexer, tag + 2 + (size_t)is_sign(byte_at(lexer, tag + 2)));
        return IMBREX_STATUS_OK;
    }
    *token = (struct jinja_token){.kind = JINJA_TOKEN_END, .line = lexer->line};
    return IMBREX_STATUS_OK;
}

static bool is_digit(int byte)
{
    return byte >= '0' && byte <= '9';
}

static bool is_name_start(int byte)
{
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte == '_';
}

static bool is_base_digit(int byte, int base)
{
    if (base == 16) {
        return is_digit(byte) || (byte >= 'a' && byte <= 'f') || (byte >= 'A' && byte <= 'F');
    }
    return byte >= '0' && byte < '0' + base;
}

/* End of digits that single underscores may separate; `position` itself if there are none. */
static size_t skip_digits(const struct jinja_lexer *lexer, size_t position, int base)
{
    if (!is_base_digit(byte_at(lexer, position), base)) {
        return position;
    }
    for (;;) {
        size_t next = position + (byte_at(lexer, position) == '_');
        if (!is_base_digit(byte_at(lexer, next), base)) {
            return position;
        }
        position = next + 1;
    }
}

/* End of a float at `position`, or 0. */
static size_t match_float(const struct jinja_lexer *lexer, size_t position)
{
    if (position > 0 && lexer->source[position - 1] == '.') {
        return 0;
    }
    size_t end = skip_digits(lexer, position, 10);
    bool is_float = false;
    if (byte_at(lexer, end) == '.' && is_digit(byte_at(lexer, end + 1))) {
        end = skip_digits(lexer, end + 1, 10);
        is_float = true;
    }
    if (byte_at(lexer, end) == 'e' || byte_at(lexer, end) == 'E') {
        size_t exponent = end + 1 + (size_t)is_sign(byte_at(lexer, end + 1));
        if (is_digit(byte_at(lexer, exponent))) {
            end = skip_digits(lexer, exponent, 10);
            is_float = true;
        }
    }
    return is_float ? end : 0;
}

static size_t match_integer(const struct jinja_lexer *lexer, size_t position)
{
    if (lexer->source[position] != '0') {
        return skip_digits(lexer, position, 10);
    }
    int letter = byte_at(lexer, position + 1) | 0x20;
    int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
    if (base != 0) {
        size_t digits = position + 2 + (byte_at(lexer, position + 2) == '_');
        if (is_base_digit(byte_at(lexer, digits), base)) {
            return skip_digits(lexer, digits, base);
        }
    }
    position++;
    for (;;) { /* further zeros, and nothing else */
        size_t next = position + (byte_at(lexer, position) == '_');
        if (byte_at(lexer, next) != '0') {
            return position;
        }
        position = next + 1;
    }
}

static size_t match_string(const struct jinja_lexer *lexer, size_t position)
{
    int quote = byte_at(lexer, position);
    for (size_t i = position + 1; i < lexer->num_bytes; i++) {
        if (lexer->source[i] == '\\') {
            i++;
        } else if (lexer->source[i] == quote) {
            return i + 1;
        }
    }
    return 0;
}

static const struct {
    const char text[3];
    enum jinja_operator op;
} operators[] = {
    /* the longer ones first */
    {"//", JINJA_OP_FLOORDIV}, {"**", JINJA_OP_POW},      {"==", JINJA_OP_EQ},
    {"!=", JINJA_OP_NE},       {">=", JINJA_OP_GE},       {"<=", JINJA_OP_LE},
    {"+", JINJA_OP_ADD},       {"-", JINJA_OP_SUB},       {"*", JINJA_OP_MUL},
    {"/", JINJA_OP_DIV},       {"%", JINJA_OP_MOD},       {"~", JINJA_OP_TILDE},
    {"<", JINJA_OP_LT},        {">", JINJA_OP_GT},        {"=", JINJA_OP_ASSIGN},
    {".", JINJA_OP_DOT},       {":", JINJA_OP_COLON},     {"|", JINJA_OP_PIPE},
    {",", JINJA_OP_COMMA},     {";", JINJA_OP_SEMICOLON}, {"(", JINJA_OP_LPAREN},
    {")", JINJA_OP_RPAREN},    {"[", JINJA_OP_LBRACKET},  {"]", JINJA_OP_RBRACKET},
    {"{", JINJA_OP_LBRACE},    {"}", JINJA_OP_RBRACE},
};

static enum imbrex_status track_bracket(struct jinja_lexer *lexer, char bracket)
{
    const char *opening = strchr("([{", bracket);
    if (opening != NULL) {
        if (lexer->num_brackets == JINJA_MAX_BRACKETS) {
            return error_set(lexer->err, IMBREX_STATUS_CAPACITY,
                             "%s:%d: brackets nested deeper than %d", lexer->name, lexer->line,
                             JINJA_MAX_BRACKETS);
        }
        lexer->brackets[lexer->num_brackets++] = ")]}"[opening - "([{"];
    } else if (strchr(")]}", bracket) != NULL) {
        if (lexer->num_brackets == 0 || lexer->brackets[lexer->num_brackets - 1] != bracket) {
            return error_set(lexer->err, IMBREX_STATUS_FORMAT,
                             "%s:%d: '%c' does not match an opening bracket", lexer->name,
                             lexer->line, bracket);
        }
        lexer->num_brackets--;
    }
    return IMBREX_STATUS_OK;
}

/* Inside a tag, at something that is not white space. */
static enum imbrex_status next_in_tag(struct jinja_lexer *lexer, struct jinja_token *token)
{
    size_t begin = lexer->position, end;
    int byte = byte_at(lexer, begin);
    token->text = lexer->source + begin;
    if (is_digit(byte)) {
        end = match_float(lexer, begin);
        token->kind = end != 0 ? JINJA_TOKEN_FLOAT : JINJA_TOKEN_INTEGER;
        end = end != 0 ? end : match_integer(lexer, begin);
    } else if (is_name_start(byte)) {
        token->kind = JINJA_TOKEN_NAME;
        for (end = begin + 1; is_name_start(byte_at(lexer, end)) || is_digit(byte_at(lexer, end));
             end++) {
        }
    } else if (byte == '"' || byte == '\'') {
        token->kind = JINJA_TOKEN_STRING;
        end = match_string(lexer, begin);
        if (end == 0) {
            return fail_at(lexer, "a string without its closing quote");
        }
    } else {
        size_t i = 0;
        while (i < sizeof(operators) / sizeof(operators[0]) &&
               !has(lexer, begin, operators[i].text)) {
            i++;
        }
        if (i == sizeof(operators) / sizeof(operators[0])) {
            struct utf8_step step = utf8_next(token->text, lexer->num_bytes - begin);
            return error_set(lexer->err, IMBREX_STATUS_FORMAT,
                             "%s:%d: unexpected character '%.*s' in a tag", lexer->name,
                             lexer->line, (int)step.num_bytes, token->text);
        }
        token->kind = JINJA_TOKEN_OPERATOR;
        token->op = operators[i].op;
        end = begin + strlen(operators[i].text);
        if (end == begin + 1) {
            TRY(track_bracket(lexer, (char)byte));
        }
    }
    token->num_bytes = end - begin;
    advance(lexer, end);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_lexer_next(struct jinja_lexer *lexer, struct jinja_token *token)
{
    if (lexer->state == JINJA_LEXER_DATA) {
        return next_data(lexer, token);
    }
    bool is_print = lexer->state == JINJA_LEXER_VARIABLE;
    for (int round = 0; round < 2; round++) { /* before and behind white space */
        *token = (struct jinja_token){.kind = JINJA_TOKEN_END, .line = lexer->line};
        size_t end = lexer->num_brackets != 0
                         ? 0
                         : match_closing(lexer, lexer->position, is_print ? "}}" : "%}", is_print);
        if (end != 0) {
            token->kind = is_print ? JINJA_TOKEN_VARIABLE_END : JINJA_TOKEN_BLOCK_END;
            lexer->state = JINJA_LEXER_DATA;
            advance(lexer, end);
            return IMBREX_STATUS_OK;
        }
        if (round == 0) {
            advance(lexer, skip_space(lexer, lexer->position));
        }
    }
    return lexer->position == lexer->num_bytes ? IMBREX_STATUS_OK : next_in_tag(lexer, token);
}
