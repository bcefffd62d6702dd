/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions to syntax trees, by precedence climbing. Precedences, from loose to tight: if-else,
 * or, and, not, comparisons, + -, ~, * / // %, **, unary + -, postfix and filters. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "jinja/jinja_parser.h"
#include "jinja/jinja_render.h"

enum level {
    LEVEL_OR,
    LEVEL_AND,
    LEVEL_NOT,
    LEVEL_COMPARE,
    LEVEL_SUM,
    LEVEL_CONCAT,
    LEVEL_PRODUCT,
    LEVEL_POWER
};

static enum imbrex_status parse_unary(struct jinja_parser *parser, bool with_filters,
                                      struct jinja_node **node_out);

/* ---- literals -------------------------------------------------------------------------------- */

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Python's "unicode-escape" of the escape at source[*position], the byte behind the backslash.
 * Writes at most 11 bytes. */
static enum imbrex_status unescape(struct jinja_parser *parser, const char *source,
                                   size_t num_bytes, size_t *position, char *out, size_t *used)
{
    static const char letters[] = "\\'\"abfnrtv", meanings[] = "\\'\"\a\b\f\n\r\t\v";
    char letter = source[(*position)++];
    const char *simple = strchr(letters, letter);
    if (letter == '\n') {
        return IMBREX_STATUS_OK;
    }
    if (simple != NULL && letter != '\0') {
        out[(*used)++] = meanings[simple - letters];
        return IMBREX_STATUS_OK;
    }
    if (letter == 'N') {
        return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, parser->token.line,
                                "the escape \\N{...} is not supported");
    }
    uint32_t code_point = 0;
    if (letter >= '0' && letter <= '7') {
        code_point = (uint32_t)(letter - '0');
        for (int i = 0;
             i < 2 && *position < num_bytes && source[*position] >= '0' && source[*position] <= '7';
             i++) {
            code_point = code_point * 8 + (uint32_t)(source[(*position)++] - '0');
        }
    } else if (letter == 'x' || letter == 'u' || letter == 'U') {
        int num_digits = letter == 'x' ? 2 : letter == 'u' ? 4 : 8;
        for (int i = 0; i < num_digits; i++) {
            int digit = *position < num_bytes ? hex_digit(source[*position]) : -1;
            if (digit < 0) {
                return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, parser->token.line,
                                        "the escape \\%c needs %d hexadecimal digits", letter,
                                        num_digits);
            }
            code_point = code_point * 16 + (uint32_t)digit;
            (*position)++;
        }
        if (code_point > 0x10ffff || (code_point >= 0xd800 && code_point <= 0xdfff)) {
            return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, parser->token.line,
                                    "the escape \\%c%0*x is not a character", letter, num_digits,
                                    code_point);
        }
    } else if ((unsigned char)letter < 0x80) { /* unknown: stays as it is */
        out[(*used)++] = '\\';
        out[(*used)++] = letter;
        return IMBREX_STATUS_OK;
    } else { /* Jinja turns the character into an escape first, whose backslash this one escapes */
        (*position)--;
        struct utf8_step step = utf8_next(source + *position, num_bytes - *position);
        *position += step.num_bytes;
        *used += (size_t)snprintf(out + *used, 12,
                                  step.code_point < 0x100     ? "\\x%02x"
                                  : step.code_point < 0x10000 ? "\\u%04x"
                                                              : "\\U%08x",
                                  step.code_point);
        return IMBREX_STATUS_OK;
    }
    *used += utf8_write(code_point, out + *used);
    return IMBREX_STATUS_OK;
}

/* Adjacent string literals are one string. */
static enum imbrex_status parse_string(struct jinja_parser *parser, struct jinja_node *node)
{
    char *bytes = NULL;
    size_t used = 0, capacity = 0;
    while (parser->token.kind == JINJA_TOKEN_STRING) {
        const char *source = parser->token.text + 1;
        size_t num_bytes = parser->token.num_bytes - 2;
        if (capacity - used < 6 * num_bytes + 12) { /* an escape of 2 bytes can become 10 */
            capacity = 2 * used + 6 * num_bytes + 12;
            char *grown;
            TRY(jinja_parse_take(parser, capacity, &grown));
            if (used != 0) {
                memcpy(grown, bytes, used);
            }
            bytes = grown;
        }
        for (size_t i = 0; i < num_bytes;) {
            if (source[i] != '\\') {
                bytes[used++] = source[i++];
            } else {
                i++;
                TRY(unescape(parser, source, num_bytes, &i, bytes, &used));
            }
        }
        TRY(jinja_parse_advance(parser));
    }
    struct jinja_string *string;
    TRY(jinja_parse_take(parser, sizeof(*string), &string));
    jinja_string_view(bytes, used, false, string);
    node->constant = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_number(struct jinja_parser *parser, struct jinja_node *node)
{
    char digits[400];
    size_t used = 0;
    const struct jinja_token *token = &parser->token;
    for (size_t i = 0; i < token->num_bytes; i++) {
        if (token->text[i] != '_') {
            if (used + 1 == sizeof(digits)) {
                return jinja_parse_fail(parser, IMBREX_STATUS_CAPACITY, token->line,
                                        "a number of more than %zu digits", used);
            }
            digits[used++] = token->text[i];
        }
    }
    digits[used] = '\0';
    if (token->kind == JINJA_TOKEN_FLOAT) {
        double real = 0;
        if (!jinja_parse_float(digits, used, &real)) {
            return jinja_parse_unexpected(parser, "a number");
        }
        node->constant = jinja_float(real);
        return jinja_parse_advance(parser);
    }
    char letter = used > 1 ? (char)(digits[1] | 0x20) : '0';
    int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    int64_t integer = 0;
    for (size_t i = base == 10 ? 0 : 2; i < used; i++) {
        if (__builtin_mul_overflow(integer, base, &integer) ||
            __builtin_add_overflow(integer, hex_digit(digits[i]), &integer)) {
            return jinja_parse_fail(parser, IMBREX_STATUS_CAPACITY, token->line,
                                    "the integer %.40s does not fit 64 bits", digits);
        }
    }
    node->constant = jinja_int(integer);
    return jinja_parse_advance(parser);
}

/* ---- containers and arguments ---------------------------------------------------------------- */

/* Items up to the closing bracket, with commas between them and perhaps one behind the last. */
static enum imbrex_status parse_items(struct jinja_parser *parser, struct jinja_node *node,
                                      enum jinja_operator closing)
{
    struct jinja_node_list items = {0};
    TRY(jinja_parse_advance(parser));
    while (!jinja_token_is_op(&parser->token, closing)) {
        if (items.num_nodes != 0) {
            TRY(jinja_parse_expect_op(parser, JINJA_OP_COMMA, "',' or a closing bracket"));
            if (jinja_token_is_op(&parser->token, closing)) {
                break;
            }
        }
        struct jinja_node *item;
        TRY(jinja_parse_expression(parser, true, &item));
        if (node->kind == JINJA_NODE_DICT) {
            struct jinja_node *pair;
            TRY(jinja_parse_node(parser, JINJA_NODE_PAIR, item->line, &pair));
            pair->a = item;
            TRY(jinja_parse_expect_op(parser, JINJA_OP_COLON, "':'"));
            TRY(jinja_parse_expression(parser, true, &pair->b));
            item = pair;
        }
        jinja_node_list_append(&items, item);
    }
    node->first = items.first;
    node->num_children = items.num_nodes;
    return jinja_parse_advance(parser);
}

/* (arguments) into node->first. */
static enum imbrex_status parse_arguments(struct jinja_parser *parser, struct jinja_node *node)
{
    struct jinja_node_list arguments = {0};
    bool has_star = false, has_star_star = false, has_keyword = false;
    TRY(jinja_parse_advance(parser));
    while (!jinja_token_is_op(&parser->token, JINJA_OP_RPAREN)) {
        if (arguments.num_nodes != 0) {
            TRY(jinja_parse_expect_op(parser, JINJA_OP_COMMA, "',' or ')'"));
            if (jinja_token_is_op(&parser->token, JINJA_OP_RPAREN)) {
                break;
            }
        }
        struct jinja_node *argument;
        int32_t line = parser->token.line;
        bool is_misplaced = has_star_star;
        if (jinja_token_is_op(&parser->token, JINJA_OP_MUL)) {
            is_misplaced |= has_star;
            has_star = true;
            TRY(jinja_parse_node(parser, JINJA_NODE_STAR, line, &argument));
            TRY(jinja_parse_advance(parser));
            TRY(jinja_parse_expression(parser, true, &argument->a));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_POW)) {
            has_star_star = true;
            TRY(jinja_parse_node(parser, JINJA_NODE_STAR_STAR, line, &argument));
            TRY(jinja_parse_advance(parser));
            TRY(jinja_parse_expression(parser, true, &argument->a));
        } else if (parser->token.kind == JINJA_TOKEN_NAME &&
                   jinja_token_is_op(&parser->ahead, JINJA_OP_ASSIGN)) {
            has_keyword = true;
            TRY(jinja_parse_node(parser, JINJA_NODE_KEYWORD, line, &argument));
            TRY(jinja_parse_identifier(parser, &argument->text));
            TRY(jinja_parse_advance(parser));
            TRY(jinja_parse_expression(parser, true, &argument->a));
        } else {
            is_misplaced |= has_star || has_keyword;
            TRY(jinja_parse_expression(parser, true, &argument));
        }
        if (is_misplaced) {
            return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, line,
                                    "an argument stands behind one that must come later");
        }
        jinja_node_list_append(&arguments, argument);
    }
    node->first = arguments.first;
    node->num_children = arguments.num_nodes;
    return jinja_parse_advance(parser);
}

/* ---- postfix --------------------------------------------------------------------------------- */

/* Between [ and ]: an expression, or a slice. */
static enum imbrex_status parse_subscript(struct jinja_parser *parser, struct jinja_node **node_out)
{
    struct jinja_node *parts[3] = {NULL, NULL, NULL};
    struct jinja_node *slice = NULL;
    int part_idx = 0;
    while (!jinja_token_is_op(&parser->token, JINJA_OP_RBRACKET) &&
           !jinja_token_is_op(&parser->token, JINJA_OP_COMMA)) {
        if (jinja_token_is_op(&parser->token, JINJA_OP_COLON)) {
            if (++part_idx == 3) {
                return jinja_parse_unexpected(parser, "']'");
            }
            if (slice == NULL) {
                TRY(jinja_parse_node(parser, JINJA_NODE_SLICE, parser->token.line, &slice));
            }
            TRY(jinja_parse_advance(parser));
        } else if (parts[part_idx] == NULL) {
            TRY(jinja_parse_expression(parser, true, &parts[part_idx]));
        } else {
            return jinja_parse_unexpected(parser, "']'");
        }
    }
    if (slice == NULL) {
        if (parts[0] == NULL) {
            return jinja_parse_unexpected(parser, "an index");
        }
        *node_out = parts[0];
        return IMBREX_STATUS_OK;
    }
    slice->a = parts[0];
    slice->b = parts[1];
    slice->c = parts[2];
    *node_out = slice;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_brackets(struct jinja_parser *parser, struct jinja_node *object,
                                         struct jinja_node **node_out)
{
    struct jinja_node *node, *key;
    TRY(jinja_parse_node(parser, JINJA_NODE_ITEM, parser->token.line, &node));
    TRY(jinja_parse_advance(parser));
    TRY(parse_subscript(parser, &key));
    if (jinja_token_is_op(&parser->token, JINJA_OP_COMMA)) {
        struct jinja_node_list keys = {0};
        jinja_node_list_append(&keys, key);
        while (jinja_token_is_op(&parser->token, JINJA_OP_COMMA)) {
            TRY(jinja_parse_advance(parser));
            TRY(parse_subscript(parser, &key));
            jinja_node_list_append(&keys, key);
        }
        for (const struct jinja_node *each = keys.first; each != NULL; each = each->next) {
            if (each->kind == JINJA_NODE_SLICE) {
                return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, node->line,
                                        "slices in several dimensions are not supported");
            }
        }
        TRY(jinja_parse_node(parser, JINJA_NODE_TUPLE, node->line, &key));
        key->first = keys.first;
        key->num_children = keys.num_nodes;
    }
    TRY(jinja_parse_expect_op(parser, JINJA_OP_RBRACKET, "']'"));
    node->a = object;
    node->b = key;
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_dot(struct jinja_parser *parser, struct jinja_node *object,
                                    struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_node(parser, JINJA_NODE_ATTRIBUTE, parser->token.line, &node));
    TRY(jinja_parse_advance(parser));
    node->a = object;
    if (parser->token.kind == JINJA_TOKEN_INTEGER) {
        node->kind = JINJA_NODE_ITEM;
        TRY(jinja_parse_node(parser, JINJA_NODE_CONST, node->line, &node->b));
        TRY(parse_number(parser, node->b));
    } else if (parser->token.kind == JINJA_TOKEN_NAME) {
        TRY(jinja_parse_identifier(parser, &node->text));
    } else {
        return jinja_parse_unexpected(parser, "a name or an index behind '.'");
    }
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_call(struct jinja_parser *parser, struct jinja_node *callee,
                                     struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_node(parser, JINJA_NODE_CALL, parser->token.line, &node));
    node->a = callee;
    TRY(parse_arguments(parser, node));
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_postfix(struct jinja_parser *parser, struct jinja_node **node)
{
    for (;;) {
        if (jinja_token_is_op(&parser->token, JINJA_OP_DOT)) {
            TRY(parse_dot(parser, *node, node));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_LBRACKET)) {
            TRY(parse_brackets(parser, *node, node));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_LPAREN)) {
            TRY(parse_call(parser, *node, node));
        } else {
            return IMBREX_STATUS_OK;
        }
    }
}

/* Name of a filter or test, resolved; `what` is "filter" or "test". */
static enum imbrex_status parse_entry(struct jinja_parser *parser, const char *what,
                                      const struct jinja_entry_point *(*find)(const char *, size_t),
                                      struct jinja_node *node)
{
    if (parser->token.kind != JINJA_TOKEN_NAME) {
        return jinja_parse_unexpected(parser, what);
    }
    const struct jinja_string *name;
    int32_t line = parser->token.line;
    TRY(jinja_parse_identifier(parser, &name));
    node->entry = find(name->bytes, name->num_bytes);
    if (node->entry == NULL || jinja_token_is_op(&parser->token, JINJA_OP_DOT)) {
        return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, line, "there is no %s '%.*s'",
                                what, (int)(name->num_bytes < 60 ? name->num_bytes : 60),
                                name->bytes);
    }
    if (node->entry->function == NULL) {
        return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, line,
                                "the %s '%s' is not supported", what, node->entry->name);
    }
    return IMBREX_STATUS_OK;
}

/* map, select and their like name another filter or test in an argument: resolve it now. */
static enum imbrex_status check_named_entry(struct jinja_parser *parser,
                                            const struct jinja_node *node)
{
    bool is_map = strcmp(node->entry->name, "map") == 0;
    bool by_attribute = strcmp(node->entry->name, "selectattr") == 0 ||
                        strcmp(node->entry->name, "rejectattr") == 0;
    bool is_select =
        strcmp(node->entry->name, "select") == 0 || strcmp(node->entry->name, "reject") == 0;
    if (!is_map && !by_attribute && !is_select) {
        return IMBREX_STATUS_OK;
    }
    const struct jinja_node *argument = node->first;
    if (by_attribute && argument != NULL) {
        argument = argument->next;
    }
    if (argument == NULL || argument->kind != JINJA_NODE_CONST ||
        argument->constant.kind != JINJA_STRING) {
        return IMBREX_STATUS_OK;
    }
    const struct jinja_string *name = argument->constant.as.string;
    const struct jinja_entry_point *entry = is_map ? jinja_filter_find(name->bytes, name->num_bytes)
                                                   : jinja_test_find(name->bytes, name->num_bytes);
    if (entry == NULL || entry->function == NULL) {
        return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, argument->line, "%s %s '%.*s'%s",
                                entry == NULL ? "there is no" : "the", is_map ? "filter" : "test",
                                (int)(name->num_bytes < 60 ? name->num_bytes : 60), name->bytes,
                                entry == NULL ? "" : " is not supported");
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_filters(struct jinja_parser *parser, struct jinja_node *input,
                                       bool is_inline, struct jinja_node **node_out)
{
    while (is_inline || jinja_token_is_op(&parser->token, JINJA_OP_PIPE)) {
        if (!is_inline) {
            TRY(jinja_parse_advance(parser));
        }
        is_inline = false;
        struct jinja_node *node;
        TRY(jinja_parse_node(parser, JINJA_NODE_FILTER, parser->token.line, &node));
        TRY(parse_entry(parser, "filter", jinja_filter_find, node));
        if (jinja_token_is_op(&parser->token, JINJA_OP_LPAREN)) {
            TRY(parse_arguments(parser, node));
        }
        TRY(check_named_entry(parser, node));
        node->a = input;
        input = node;
    }
    *node_out = input;
    return IMBREX_STATUS_OK;
}

/* is [not] name [argument] */
static enum imbrex_status parse_test(struct jinja_parser *parser, struct jinja_node **node_out)
{
    struct jinja_node *node;
    bool is_negated;
    TRY(jinja_parse_node(parser, JINJA_NODE_TEST, parser->token.line, &node));
    TRY(jinja_parse_advance(parser));
    TRY(jinja_parse_skip_name(parser, "not", &is_negated));
    TRY(parse_entry(parser, "test", jinja_test_find, node));
    node->a = *node_out;
    const struct jinja_token *token = &parser->token;
    if (jinja_token_is_op(token, JINJA_OP_LPAREN)) {
        TRY(parse_arguments(parser, node));
    } else if (jinja_token_is_name(token, "is")) {
        return jinja_parse_unexpected(parser, "an operator: tests cannot be chained");
    } else if ((token->kind == JINJA_TOKEN_NAME && !jinja_token_is_name(token, "else") &&
                !jinja_token_is_name(token, "or") && !jinja_token_is_name(token, "and")) ||
               token->kind == JINJA_TOKEN_STRING || token->kind == JINJA_TOKEN_INTEGER ||
               token->kind == JINJA_TOKEN_FLOAT || jinja_token_is_op(token, JINJA_OP_LBRACKET) ||
               jinja_token_is_op(token, JINJA_OP_LBRACE)) {
        TRY(jinja_parse_primary(parser, &node->first));
        TRY(parse_postfix(parser, &node->first));
        node->num_children = 1;
    }
    *node_out = node;
    if (is_negated) {
        struct jinja_node *negation;
        TRY(jinja_parse_node(parser, JINJA_NODE_NOT, node->line, &negation));
        negation->a = node;
        *node_out = negation;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_filters_and_tests(struct jinja_parser *parser,
                                                  struct jinja_node **node)
{
    for (;;) {
        if (jinja_token_is_op(&parser->token, JINJA_OP_PIPE)) {
            TRY(jinja_parse_filters(parser, *node, false, node));
        } else if (jinja_token_is_name(&parser->token, "is")) {
            TRY(parse_test(parser, node));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_LPAREN)) {
            TRY(parse_call(parser, *node, node));
        } else {
            return IMBREX_STATUS_OK;
        }
    }
}

/* ---- operands and operators ------------------------------------------------------------------ */

static enum imbrex_status parse_word(struct jinja_parser *parser, struct jinja_node *node)
{
    const struct jinja_token *token = &parser->token;
    bool is_true = jinja_token_is_name(token, "true") || jinja_token_is_name(token, "True");
    if (is_true || jinja_token_is_name(token, "false") || jinja_token_is_name(token, "False")) {
        node->constant = jinja_bool(is_true);
        return jinja_parse_advance(parser);
    }
    if (jinja_token_is_name(token, "none") || jinja_token_is_name(token, "None")) {
        node->constant = jinja_none();
        return jinja_parse_advance(parser);
    }
    node->kind = JINJA_NODE_NAME;
    if (parser->macro != NULL) {
        parser->macro->uses_varargs |= jinja_token_is_name(token, "varargs");
        parser->macro->uses_kwargs |= jinja_token_is_name(token, "kwargs");
        parser->macro->uses_caller |= jinja_token_is_name(token, "caller");
    }
    return jinja_parse_name(parser, node);
}

enum imbrex_status jinja_parse_primary(struct jinja_parser *parser, struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_node(parser, JINJA_NODE_CONST, parser->token.line, &node));
    switch (parser->token.kind) {
    case JINJA_TOKEN_NAME:
        TRY(parse_word(parser, node));
        break;
    case JINJA_TOKEN_STRING:
        TRY(parse_string(parser, node));
        break;
    case JINJA_TOKEN_INTEGER:
    case JINJA_TOKEN_FLOAT:
        TRY(parse_number(parser, node));
        break;
    default:
        if (jinja_token_is_op(&parser->token, JINJA_OP_LPAREN)) {
            TRY(jinja_parse_advance(parser));
            TRY(jinja_parse_tuple(parser, JINJA_TUPLE_PARENS, &node));
            TRY(jinja_parse_expect_op(parser, JINJA_OP_RPAREN, "')'"));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_LBRACKET)) {
            node->kind = JINJA_NODE_LIST;
            TRY(parse_items(parser, node, JINJA_OP_RBRACKET));
        } else if (jinja_token_is_op(&parser->token, JINJA_OP_LBRACE)) {
            node->kind = JINJA_NODE_DICT;
            TRY(parse_items(parser, node, JINJA_OP_RBRACE));
        } else {
            return jinja_parse_unexpected(parser, "an expression");
        }
    }
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_unary(struct jinja_parser *parser, bool with_filters,
                                      struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_enter(parser));
    bool is_negative = jinja_token_is_op(&parser->token, JINJA_OP_SUB);
    if (is_negative || jinja_token_is_op(&parser->token, JINJA_OP_ADD)) {
        TRY(jinja_parse_node(parser, is_negative ? JINJA_NODE_NEGATE : JINJA_NODE_PLUS,
                             parser->token.line, &node));
        TRY(jinja_parse_advance(parser));
        TRY(parse_unary(parser, false, &node->a));
    } else {
        TRY(jinja_parse_primary(parser, &node));
    }
    TRY(parse_postfix(parser, &node));
    if (with_filters) {
        TRY(parse_filters_and_tests(parser, &node));
    }
    parser->depth--;
    *node_out = node;
    return IMBREX_STATUS_OK;
}

/* The operator at the current token and its level; NONE if there is none. */
static enum jinja_operator binary_operator(const struct jinja_parser *parser, enum level *level)
{
    const struct jinja_token *token = &parser->token;
    if (token->kind == JINJA_TOKEN_NAME) {
        *level = LEVEL_COMPARE;
        return jinja_token_is_name(token, "in") ? JINJA_OP_IN
               : jinja_token_is_name(token, "not") && jinja_token_is_name(&parser->ahead, "in")
                   ? JINJA_OP_NOT_IN
                   : JINJA_OP_NONE;
    }
    switch (token->kind == JINJA_TOKEN_OPERATOR ? token->op : JINJA_OP_NONE) {
    case JINJA_OP_EQ:
    case JINJA_OP_NE:
    case JINJA_OP_LT:
    case JINJA_OP_LE:
    case JINJA_OP_GT:
    case JINJA_OP_GE:
        *level = LEVEL_COMPARE;
        return token->op;
    case JINJA_OP_ADD:
    case JINJA_OP_SUB:
        *level = LEVEL_SUM;
        return token->op;
    case JINJA_OP_TILDE:
        *level = LEVEL_CONCAT;
        return token->op;
    case JINJA_OP_MUL:
    case JINJA_OP_DIV:
    case JINJA_OP_FLOORDIV:
    case JINJA_OP_MOD:
        *level = LEVEL_PRODUCT;
        return token->op;
    case JINJA_OP_POW:
        *level = LEVEL_POWER;
        return token->op;
    default:
        return JINJA_OP_NONE;
    }
}

static enum imbrex_status parse_level(struct jinja_parser *parser, enum level min_level,
                                      struct jinja_node **node_out);

/* `a < b < c` and `a ~ b ~ c` are one node each. */
static enum imbrex_status parse_chain(struct jinja_parser *parser, enum level level,
                                      struct jinja_node *left, struct jinja_node **node_out)
{
    struct jinja_node_list operands = {0};
    struct jinja_node *node, *operand;
    enum jinja_operator op;
    enum level op_level = level;
    bool is_concat = level == LEVEL_CONCAT;
    TRY(jinja_parse_node(parser, is_concat ? JINJA_NODE_CONCAT : JINJA_NODE_COMPARE, left->line,
                         &node));
    if (is_concat) {
        jinja_node_list_append(&operands, left);
    } else {
        node->a = left;
    }
    while ((op = binary_operator(parser, &op_level)) != JINJA_OP_NONE && op_level == level) {
        TRY(jinja_parse_advance(parser));
        if (op == JINJA_OP_NOT_IN) {
            TRY(jinja_parse_advance(parser));
        }
        TRY(parse_level(parser, is_concat ? LEVEL_PRODUCT : LEVEL_SUM, &operand));
        if (!is_concat) {
            struct jinja_node *value = operand;
            TRY(jinja_parse_node(parser, JINJA_NODE_OPERAND, value->line, &operand));
            operand->op = op;
            operand->a = value;
        }
        jinja_node_list_append(&operands, operand);
    }
    node->first = operands.first;
    node->num_children = operands.num_nodes;
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_binary(struct jinja_parser *parser, enum jinja_node_kind kind,
                                       enum jinja_operator op, enum level right_level,
                                       struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_node(parser, kind, (*node_out)->line, &node));
    TRY(jinja_parse_advance(parser));
    node->op = op;
    node->a = *node_out;
    TRY(parse_level(parser, right_level, &node->b));
    *node_out = node;
    return IMBREX_STATUS_OK;
}

/* Everything that binds at least as tightly as min_level. All operators are left-associative, even
 * `**`: Jinja has it so. */
static enum imbrex_status parse_level(struct jinja_parser *parser, enum level min_level,
                                      struct jinja_node **node_out)
{
    struct jinja_node *node;
    enum level level = LEVEL_OR;
    enum jinja_operator op;
    TRY(jinja_parse_enter(parser));
    if (min_level <= LEVEL_NOT && jinja_token_is_name(&parser->token, "not")) {
        TRY(jinja_parse_node(parser, JINJA_NODE_NOT, parser->token.line, &node));
        TRY(jinja_parse_advance(parser));
        TRY(parse_level(parser, LEVEL_NOT, &node->a));
    } else {
        TRY(parse_unary(parser, true, &node));
        while ((op = binary_operator(parser, &level)) != JINJA_OP_NONE && level >= min_level) {
            if (level == LEVEL_COMPARE || level == LEVEL_CONCAT) {
                TRY(parse_chain(parser, level, node, &node));
            } else {
                TRY(parse_binary(parser, JINJA_NODE_BINARY, op, level + 1, &node));
            }
        }
    }
    while (min_level <= LEVEL_AND && jinja_token_is_name(&parser->token, "and")) {
        TRY(parse_binary(parser, JINJA_NODE_AND, JINJA_OP_NONE, LEVEL_NOT, &node));
    }
    while (min_level <= LEVEL_OR && jinja_token_is_name(&parser->token, "or")) {
        TRY(parse_binary(parser, JINJA_NODE_OR, JINJA_OP_NONE, LEVEL_AND, &node));
    }
    parser->depth--;
    *node_out = node;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_expression(struct jinja_parser *parser, bool with_if_else,
                                          struct jinja_node **node_out)
{
    struct jinja_node *node;
    TRY(jinja_parse_enter(parser));
    TRY(parse_level(parser, LEVEL_OR, &node));
    while (with_if_else && jinja_token_is_name(&parser->token, "if")) {
        struct jinja_node *choice;
        bool has_else;
        TRY(jinja_parse_node(parser, JINJA_NODE_IF_ELSE, node->line, &choice));
        TRY(jinja_parse_advance(parser));
        choice->a = node;
        TRY(parse_level(parser, LEVEL_OR, &choice->b));
        TRY(jinja_parse_skip_name(parser, "else", &has_else));
        if (has_else) {
            TRY(jinja_parse_expression(parser, true, &choice->c));
        }
        node = choice;
    }
    parser->depth--;
    *node_out = node;
    return IMBREX_STATUS_OK;
}

static bool is_tuple_end(const struct jinja_parser *parser, enum jinja_tuple_end end)
{
    const struct jinja_token *token = &parser->token;
    return token->kind == JINJA_TOKEN_VARIABLE_END || token->kind == JINJA_TOKEN_BLOCK_END ||
           jinja_token_is_op(token, JINJA_OP_RPAREN) ||
           (end == JINJA_TUPLE_ITERABLE && jinja_token_is_name(token, "recursive"));
}

enum imbrex_status jinja_parse_tuple(struct jinja_parser *parser, enum jinja_tuple_end end,
                                     struct jinja_node **node_out)
{
    struct jinja_node_list items = {0};
    bool is_tuple = false;
    int32_t line = parser->token.line;
    bool with_if_else = end != JINJA_TUPLE_ITERABLE && end != JINJA_TUPLE_CONDITION;
    while (!is_tuple_end(parser, end)) {
        struct jinja_node *item;
        bool has_comma;
        TRY(jinja_parse_expression(parser, with_if_else, &item));
        jinja_node_list_append(&items, item);
        TRY(jinja_parse_skip_op(parser, JINJA_OP_COMMA, &has_comma));
        is_tuple |= has_comma;
        if (!has_comma) {
            break;
        }
    }
    if (!is_tuple && items.num_nodes == 1) {
        *node_out = items.first;
        return IMBREX_STATUS_OK;
    }
    if (!is_tuple && end != JINJA_TUPLE_PARENS) {
        return jinja_parse_unexpected(parser, "an expression");
    }
    TRY(jinja_parse_node(parser, JINJA_NODE_TUPLE, line, node_out));
    (*node_out)->first = items.first;
    (*node_out)->num_children = items.num_nodes;
    return IMBREX_STATUS_OK;
}
