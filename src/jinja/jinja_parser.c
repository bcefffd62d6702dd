/* SPDX-License-Identifier: Apache-2.0 */
/* Statements to syntax trees, and the tools that the expressions share. What Jinja has and imbrex
 * has not is refused here, by name and line, before anything is rendered. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/utf8.h"
#include "jinja/jinja.h"
#include "jinja/jinja_parser.h"
#include "jinja/jinja_render.h"

/* Nested expressions and blocks: a level costs up to 1 KiB of C stack. */
#define MAX_NESTING 400
/* A node for each byte of source would take about 200 times its size. */
#define POOL_BYTES_PER_SOURCE_BYTE 256

static enum imbrex_status parse_body(struct jinja_parser *parser, const char *const *end_tags,
                                     int32_t line, struct jinja_node **body_out);

/* ---- tools ----------------------------------------------------------------------------------- */

void jinja_node_list_append(struct jinja_node_list *list, struct jinja_node *node)
{
    if (list->last == NULL) {
        list->first = node;
    } else {
        list->last->next = node;
    }
    list->last = node;
    list->num_nodes++;
}

enum imbrex_status jinja_parse_fail(const struct jinja_parser *parser, enum imbrex_status status,
                                    int32_t line, const char *format, ...)
{
    char message[IMBREX_ERROR_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return error_set(parser->err, status, "%s:%d: %s", parser->template->name, line, message);
}

enum imbrex_status jinja_parse_unexpected(const struct jinja_parser *parser, const char *expected)
{
    const struct jinja_token *token = &parser->token;
    switch (token->kind) {
    case JINJA_TOKEN_END:
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, token->line,
                                "expected %s, found the end of the template", expected);
    case JINJA_TOKEN_DATA:
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, token->line,
                                "expected %s, found text", expected);
    case JINJA_TOKEN_VARIABLE_BEGIN:
    case JINJA_TOKEN_BLOCK_BEGIN:
    case JINJA_TOKEN_VARIABLE_END:
    case JINJA_TOKEN_BLOCK_END:
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, token->line,
                                "expected %s, found the %s of a tag", expected,
                                token->kind == JINJA_TOKEN_VARIABLE_END ||
                                        token->kind == JINJA_TOKEN_BLOCK_END
                                    ? "end"
                                    : "begin");
    default:
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, token->line,
                                "expected %s, found '%.*s'", expected,
                                (int)(token->num_bytes < 40 ? token->num_bytes : 40), token->text);
    }
}

enum imbrex_status jinja_parse_take(struct jinja_parser *parser, size_t num_bytes, void *memory_out)
{
    void *memory = jinja_pool_take(&parser->template->pool, num_bytes);
    memcpy(memory_out, &memory, sizeof(memory));
    if (memory == NULL) {
        if (parser->template->pool.is_full) {
            return jinja_parse_fail(parser, IMBREX_STATUS_CAPACITY, parser->token.line,
                                    "the template needs more than %zu bytes of memory",
                                    parser->template->pool.max_bytes);
        }
        return error_out_of_memory(parser->err, "a chat template", num_bytes);
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_node(struct jinja_parser *parser, enum jinja_node_kind kind,
                                    int32_t line, struct jinja_node **node_out)
{
    TRY(jinja_parse_take(parser, sizeof(**node_out), node_out));
    **node_out = (struct jinja_node){.kind = kind, .line = line, .name_id = -1};
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_enter(struct jinja_parser *parser)
{
    if (parser->depth == MAX_NESTING) {
        return jinja_parse_fail(parser, IMBREX_STATUS_CAPACITY, parser->token.line,
                                "expressions and blocks nested deeper than %d", MAX_NESTING);
    }
    parser->depth++;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_advance(struct jinja_parser *parser)
{
    parser->token = parser->ahead;
    if (parser->token.kind == JINJA_TOKEN_END) {
        return IMBREX_STATUS_OK;
    }
    return jinja_lexer_next(&parser->lexer, &parser->ahead);
}

bool jinja_token_is_name(const struct jinja_token *token, const char *name)
{
    return token->kind == JINJA_TOKEN_NAME && token->num_bytes == strlen(name) &&
           memcmp(token->text, name, token->num_bytes) == 0;
}

bool jinja_token_is_op(const struct jinja_token *token, enum jinja_operator op)
{
    return token->kind == JINJA_TOKEN_OPERATOR && token->op == op;
}

enum imbrex_status jinja_parse_skip_name(struct jinja_parser *parser, const char *name, bool *taken)
{
    *taken = jinja_token_is_name(&parser->token, name);
    return *taken ? jinja_parse_advance(parser) : IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_skip_op(struct jinja_parser *parser, enum jinja_operator op,
                                       bool *taken)
{
    *taken = jinja_token_is_op(&parser->token, op);
    return *taken ? jinja_parse_advance(parser) : IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_expect_op(struct jinja_parser *parser, enum jinja_operator op,
                                         const char *expected)
{
    if (!jinja_token_is_op(&parser->token, op)) {
        return jinja_parse_unexpected(parser, expected);
    }
    return jinja_parse_advance(parser);
}

/* ---- names ----------------------------------------------------------------------------------- */

static uint64_t name_hash(const char *bytes, size_t num_bytes)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < num_bytes; i++) {
        hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    }
    return hash ^ (hash >> 32);
}

/* The slot that holds the name, or the empty one where it belongs. */
static int32_t *name_slot(const struct jinja_parser *parser, const char *bytes, size_t num_bytes)
{
    size_t mask = parser->num_name_slots - 1;
    for (size_t i = (size_t)name_hash(bytes, num_bytes) & mask;; i = (i + 1) & mask) {
        int32_t *slot = &parser->name_slots[i];
        if (*slot == 0) {
            return slot;
        }
        const struct jinja_string *name = parser->template->names[*slot - 1];
        if (name->num_bytes == num_bytes && memcmp(name->bytes, bytes, num_bytes) == 0) {
            return slot;
        }
    }
}

static enum imbrex_status names_grow(struct jinja_parser *parser)
{
    struct jinja_template *template = parser->template;
    int32_t capacity = parser->name_capacity == 0 ? 32 : parser->name_capacity * 2;
    const struct jinja_string **names;
    int32_t *slots;
    TRY(jinja_parse_take(parser, (size_t)capacity * sizeof(*names), &names));
    TRY(jinja_parse_take(parser, (size_t)capacity * 2 * sizeof(*slots), &slots));
    memset(slots, 0, (size_t)capacity * 2 * sizeof(*slots));
    if (template->num_names != 0) {
        memcpy(names, template->names, (size_t) template->num_names * sizeof(*names));
    }
    template->names = names;
    parser->name_capacity = capacity;
    parser->name_slots = slots;
    parser->num_name_slots = (size_t)capacity * 2;
    for (int32_t i = 0; i < template->num_names; i++) {
        *name_slot(parser, names[i]->bytes, names[i]->num_bytes) = i + 1;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status name_intern(struct jinja_parser *parser, const struct jinja_string *name,
                                      int32_t *name_id)
{
    struct jinja_template *template = parser->template;
    if (template->num_names == parser->name_capacity) {
        TRY(names_grow(parser));
    }
    int32_t *slot = name_slot(parser, name->bytes, name->num_bytes);
    if (*slot == 0) {
        template->names[template->num_names++] = name;
        *slot = template->num_names;
        static const char *const special[] = {"loop", "caller", "kwargs", "varargs"};
        for (int i = 0; i < JINJA_NUM_SPECIAL; i++) {
            if (jinja_string_is(name, special[i])) {
                template->special_ids[i] = template->num_names - 1;
            }
        }
    }
    *name_id = *slot - 1;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_parse_identifier(struct jinja_parser *parser,
                                          const struct jinja_string **name)
{
    if (parser->token.kind != JINJA_TOKEN_NAME) {
        return jinja_parse_unexpected(parser, "a name");
    }
    struct jinja_string *string;
    TRY(jinja_parse_take(parser, sizeof(*string), &string));
    jinja_string_view(parser->token.text, parser->token.num_bytes, false, string);
    *name = string;
    return jinja_parse_advance(parser);
}

enum imbrex_status jinja_parse_name(struct jinja_parser *parser, struct jinja_node *node)
{
    TRY(jinja_parse_identifier(parser, &node->text));
    return name_intern(parser, node->text, &node->name_id);
}

/* ---- statements ------------------------------------------------------------------------------ */

static enum imbrex_status expect_block_end(struct jinja_parser *parser)
{
    if (parser->token.kind != JINJA_TOKEN_BLOCK_END) {
        return jinja_parse_unexpected(parser, "the end of the tag");
    }
    return jinja_parse_advance(parser);
}

static enum imbrex_status expect_name(struct jinja_parser *parser, const char *name)
{
    if (!jinja_token_is_name(&parser->token, name)) {
        return jinja_parse_unexpected(parser, name);
    }
    return jinja_parse_advance(parser);
}

/* The rest of an opening tag, and the statements up to one of the end tags, whose name is then the
 * current token. */
static enum imbrex_status parse_statements(struct jinja_parser *parser, const char *const *end_tags,
                                           struct jinja_node **body)
{
    bool has_colon;
    TRY(jinja_parse_skip_op(parser, JINJA_OP_COLON, &has_colon));
    int32_t line = parser->token.line;
    TRY(expect_block_end(parser));
    return parse_body(parser, end_tags, line, body);
}

/* The same up to one end tag, whose name is taken. */
static enum imbrex_status parse_block(struct jinja_parser *parser, const char *end_tag,
                                      struct jinja_node **body)
{
    TRY(parse_statements(parser, (const char *const[]){end_tag, NULL}, body));
    return jinja_parse_advance(parser);
}

static enum imbrex_status check_assignable(struct jinja_parser *parser,
                                           const struct jinja_node *target)
{
    if (target->kind == JINJA_NODE_NAME || target->kind == JINJA_NODE_NAMESPACE_ATTRIBUTE) {
        return IMBREX_STATUS_OK;
    }
    if (target->kind != JINJA_NODE_TUPLE) {
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, target->line,
                                "expected a name to assign to, found a value");
    }
    TRY(jinja_parse_enter(parser));
    for (const struct jinja_node *item = target->first; item != NULL; item = item->next) {
        TRY(check_assignable(parser, item));
    }
    parser->depth--;
    return IMBREX_STATUS_OK;
}

/* A name, a namespace's attribute (if allowed), or several of them. */
static enum imbrex_status parse_target(struct jinja_parser *parser, bool with_namespace,
                                       struct jinja_node **target_out)
{
    struct jinja_node_list items = {0};
    bool is_tuple = false, has_comma = true;
    int32_t line = parser->token.line;
    while (has_comma && !jinja_token_is_name(&parser->token, "in") &&
           parser->token.kind != JINJA_TOKEN_BLOCK_END &&
           !jinja_token_is_op(&parser->token, JINJA_OP_RPAREN)) {
        struct jinja_node *item;
        bool is_attribute = with_namespace && jinja_token_is_op(&parser->ahead, JINJA_OP_DOT);
        if (parser->macro != NULL && jinja_token_is_name(&parser->token, "caller")) {
            parser->macro->uses_caller = true;
        }
        TRY(jinja_parse_primary(parser, &item));
        if (is_attribute && item->kind == JINJA_NODE_NAME) {
            TRY(jinja_parse_advance(parser));
            item->kind = JINJA_NODE_NAMESPACE_ATTRIBUTE;
            TRY(jinja_parse_identifier(parser, &item->text));
        }
        jinja_node_list_append(&items, item);
        TRY(jinja_parse_skip_op(parser, JINJA_OP_COMMA, &has_comma));
        is_tuple |= has_comma;
    }
    struct jinja_node *target = items.first;
    if (target == NULL) {
        return jinja_parse_unexpected(parser, "a name to assign to");
    }
    if (is_tuple) {
        TRY(jinja_parse_node(parser, JINJA_NODE_TUPLE, line, &target));
        target->first = items.first;
        target->num_children = items.num_nodes;
    }
    TRY(check_assignable(parser, target));
    *target_out = target;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_set(struct jinja_parser *parser, struct jinja_node *node)
{
    bool has_value;
    TRY(parse_target(parser, true, &node->a));
    TRY(jinja_parse_skip_op(parser, JINJA_OP_ASSIGN, &has_value));
    if (has_value) {
        node->kind = JINJA_NODE_SET;
        return jinja_parse_tuple(parser, JINJA_TUPLE_PLAIN, &node->b);
    }
    node->kind = JINJA_NODE_SET_BLOCK;
    TRY(jinja_parse_filters(parser, NULL, false, &node->b));
    return parse_block(parser, "endset", &node->body);
}

static enum imbrex_status parse_for(struct jinja_parser *parser, struct jinja_node *node)
{
    bool has_condition, is_else;
    node->kind = JINJA_NODE_FOR;
    TRY(parse_target(parser, false, &node->a));
    for (const struct jinja_node *name = node->a->kind == JINJA_NODE_TUPLE ? node->a->first
                                                                           : node->a;
         name != NULL; name = name->next) {
        if (name->kind == JINJA_NODE_NAME && jinja_string_is(name->text, "loop")) {
            return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, name->line,
                                    "a for loop cannot assign to its special variable 'loop'");
        }
    }
    TRY(expect_name(parser, "in"));
    TRY(jinja_parse_tuple(parser, JINJA_TUPLE_ITERABLE, &node->b));
    TRY(jinja_parse_skip_name(parser, "if", &has_condition));
    if (has_condition) {
        TRY(jinja_parse_expression(parser, true, &node->c));
    }
    TRY(jinja_parse_skip_name(parser, "recursive", &node->flag));
    parser->num_loops++;
    TRY(parse_statements(parser, (const char *const[]){"else", "endfor", NULL}, &node->body));
    parser->num_loops--;
    TRY(jinja_parse_skip_name(parser, "else", &is_else));
    if (!is_else) {
        return jinja_parse_advance(parser);
    }
    return parse_block(parser, "endfor", &node->else_body);
}

static enum imbrex_status parse_if(struct jinja_parser *parser, struct jinja_node *node)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct jinja_node *branch = node;
    bool is_elif, is_else;
    node->kind = JINJA_NODE_IF;
    for (;;) {
        TRY(jinja_parse_tuple(parser, JINJA_TUPLE_CONDITION, &branch->a));
        TRY(parse_statements(parser, ends, &branch->body));
        int32_t line = parser->token.line;
        TRY(jinja_parse_skip_name(parser, "elif", &is_elif));
        if (!is_elif) {
            break;
        }
        TRY(jinja_parse_node(parser, JINJA_NODE_IF, line, &branch->b));
        branch = branch->b;
    }
    TRY(jinja_parse_skip_name(parser, "else", &is_else));
    if (!is_else) {
        return jinja_parse_advance(parser);
    }
    return parse_block(parser, "endif", &branch->else_body);
}

/* (a, b=1) of a macro or call block. */
static enum imbrex_status parse_signature(struct jinja_parser *parser, struct jinja_node *macro)
{
    struct jinja_node_list params = {0};
    bool has_default = false, has_defaults = false;
    TRY(jinja_parse_expect_op(parser, JINJA_OP_LPAREN, "'('"));
    while (!jinja_token_is_op(&parser->token, JINJA_OP_RPAREN)) {
        struct jinja_node *param;
        if (params.num_nodes != 0) {
            TRY(jinja_parse_expect_op(parser, JINJA_OP_COMMA, "',' or ')'"));
        }
        TRY(jinja_parse_node(parser, JINJA_NODE_PARAM, parser->token.line, &param));
        TRY(jinja_parse_name(parser, param));
        for (const struct jinja_node *other = params.first; other != NULL; other = other->next) {
            if (other->name_id == param->name_id) {
                return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, param->line,
                                        "two parameters with the same name");
            }
        }
        TRY(jinja_parse_skip_op(parser, JINJA_OP_ASSIGN, &has_default));
        if (has_default) {
            TRY(jinja_parse_expression(parser, true, &param->a));
        } else if (has_defaults) {
            return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, param->line,
                                    "a parameter without a default behind one that has one");
        }
        has_defaults |= has_default;
        if (jinja_string_is(param->text, "caller")) {
            if (!has_default) {
                return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, param->line,
                                        "the special parameter 'caller' needs a default");
            }
            macro->has_caller_param = true;
        }
        jinja_node_list_append(&params, param);
        if (params.num_nodes > 200) {
            return jinja_parse_fail(parser, IMBREX_STATUS_CAPACITY, param->line,
                                    "a macro with more than 200 parameters");
        }
    }
    macro->first = params.first;
    macro->num_children = params.num_nodes;
    return jinja_parse_advance(parser);
}

/* Signature, if there is one, and body. `header` parses what stands between the two. */
static enum imbrex_status parse_macro_parts(struct jinja_parser *parser, struct jinja_node *macro,
                                            struct jinja_node *call_block, const char *end_tag)
{
    struct jinja_node *outer = parser->macro;
    int32_t outer_loops = parser->num_loops;
    parser->macro = macro;
    if (call_block == NULL || jinja_token_is_op(&parser->token, JINJA_OP_LPAREN)) {
        TRY(parse_signature(parser, macro));
    }
    if (call_block != NULL) {
        parser->macro = outer;
        TRY(jinja_parse_expression(parser, true, &call_block->a));
        if (call_block->a->kind != JINJA_NODE_CALL) {
            return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, call_block->line,
                                    "expected a call behind 'call'");
        }
        parser->macro = macro;
    }
    parser->num_loops = 0;
    TRY(parse_block(parser, end_tag, &macro->body));
    parser->num_loops = outer_loops;
    parser->macro = outer;
    if (outer != NULL) { /* what an inner macro uses, the outer one must catch for it */
        outer->uses_varargs |= macro->uses_varargs;
        outer->uses_kwargs |= macro->uses_kwargs;
        outer->uses_caller |= macro->uses_caller;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_macro(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_MACRO;
    TRY(jinja_parse_name(parser, node));
    return parse_macro_parts(parser, node, NULL, "endmacro");
}

static enum imbrex_status parse_call_block(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_CALL_BLOCK;
    TRY(jinja_parse_node(parser, JINJA_NODE_MACRO, node->line, &node->b));
    return parse_macro_parts(parser, node->b, node, "endcall");
}

static enum imbrex_status parse_filter_block(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_FILTER_BLOCK;
    TRY(jinja_parse_filters(parser, NULL, true, &node->b));
    return parse_block(parser, "endfilter", &node->body);
}

static enum imbrex_status parse_with(struct jinja_parser *parser, struct jinja_node *node)
{
    struct jinja_node_list pairs = {0};
    node->kind = JINJA_NODE_WITH;
    while (parser->token.kind != JINJA_TOKEN_BLOCK_END) {
        struct jinja_node *pair;
        if (pairs.num_nodes != 0) {
            TRY(jinja_parse_expect_op(parser, JINJA_OP_COMMA, "',' or the end of the tag"));
        }
        TRY(jinja_parse_node(parser, JINJA_NODE_PAIR, parser->token.line, &pair));
        TRY(parse_target(parser, false, &pair->a));
        TRY(jinja_parse_expect_op(parser, JINJA_OP_ASSIGN, "'='"));
        TRY(jinja_parse_expression(parser, true, &pair->b));
        jinja_node_list_append(&pairs, pair);
    }
    node->first = pairs.first;
    node->num_children = pairs.num_nodes;
    return parse_block(parser, "endwith", &node->body);
}

static enum imbrex_status parse_generation(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_SCOPE;
    return parse_block(parser, "endgeneration", &node->body);
}

static enum imbrex_status parse_break(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_BREAK;
    if (parser->num_loops == 0) {
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, node->line,
                                "break outside of a loop");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status parse_continue(struct jinja_parser *parser, struct jinja_node *node)
{
    node->kind = JINJA_NODE_CONTINUE;
    if (parser->num_loops == 0) {
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, node->line,
                                "continue outside of a loop");
    }
    return IMBREX_STATUS_OK;
}

static const struct {
    const char *name;
    enum imbrex_status (*parse)(struct jinja_parser *parser, struct jinja_node *node);
} tags[] = {
    {"set", parse_set},
    {"for", parse_for},
    {"if", parse_if},
    {"macro", parse_macro},
    {"call", parse_call_block},
    {"filter", parse_filter_block},
    {"with", parse_with},
    {"generation", parse_generation},
    {"break", parse_break},
    {"continue", parse_continue},
    /* Jinja's, refused by name */
    {"autoescape", NULL},
    {"block", NULL},
    {"debug", NULL},
    {"do", NULL},
    {"extends", NULL},
    {"from", NULL},
    {"import", NULL},
    {"include", NULL},
    {"pluralize", NULL},
    {"print", NULL},
    {"trans", NULL},
};

static enum imbrex_status parse_statement(struct jinja_parser *parser, struct jinja_node **node_out)
{
    const struct jinja_token *token = &parser->token;
    if (token->kind != JINJA_TOKEN_NAME) {
        return jinja_parse_unexpected(parser, "the name of a tag");
    }
    for (size_t i = 0; i < sizeof(tags) / sizeof(tags[0]); i++) {
        if (!jinja_token_is_name(token, tags[i].name)) {
            continue;
        }
        if (tags[i].parse == NULL) {
            return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, token->line,
                                    "the tag '%s' is not supported", tags[i].name);
        }
        TRY(jinja_parse_enter(parser));
        TRY(jinja_parse_node(parser, JINJA_NODE_SCOPE, token->line, node_out));
        TRY(jinja_parse_advance(parser));
        TRY(tags[i].parse(parser, *node_out));
        parser->depth--;
        return expect_block_end(parser);
    }
    size_t shown_bytes = token->num_bytes < 40 ? token->num_bytes : 40;
    bool is_end = token->num_bytes > 3 && memcmp(token->text, "end", 3) == 0;
    if (is_end || jinja_token_is_name(token, "else") || jinja_token_is_name(token, "elif")) {
        return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, token->line,
                                "the tag '%.*s' does not belong here", (int)shown_bytes,
                                token->text);
    }
    return jinja_parse_fail(parser, IMBREX_STATUS_UNSUPPORTED, token->line,
                            "there is no tag '%.*s'", (int)shown_bytes, token->text);
}

static bool is_end_tag(const struct jinja_token *token, const char *const *end_tags)
{
    for (; *end_tags != NULL; end_tags++) {
        if (jinja_token_is_name(token, *end_tags)) {
            return true;
        }
    }
    return false;
}

/* Text and statements up to one of the end tags, or up to the template's end if there are none.
 * `line` is that of the tag before. */
static enum imbrex_status parse_body(struct jinja_parser *parser, const char *const *end_tags,
                                     int32_t line, struct jinja_node **body_out)
{
    struct jinja_node_list body = {0};
    for (;;) {
        struct jinja_node *node = NULL;
        switch (parser->token.kind) {
        case JINJA_TOKEN_DATA: {
            struct jinja_string *string;
            TRY(jinja_parse_node(parser, JINJA_NODE_DATA, parser->token.line, &node));
            TRY(jinja_parse_take(parser, sizeof(*string), &string));
            jinja_string_view(parser->token.text, parser->token.num_bytes, false, string);
            node->text = string;
            TRY(jinja_parse_advance(parser));
            break;
        }
        case JINJA_TOKEN_VARIABLE_BEGIN:
            TRY(jinja_parse_node(parser, JINJA_NODE_PRINT, parser->token.line, &node));
            TRY(jinja_parse_advance(parser));
            TRY(jinja_parse_tuple(parser, JINJA_TUPLE_PLAIN, &node->a));
            if (parser->token.kind != JINJA_TOKEN_VARIABLE_END) {
                return jinja_parse_unexpected(parser, "'}}'");
            }
            TRY(jinja_parse_advance(parser));
            break;
        case JINJA_TOKEN_BLOCK_BEGIN:
            TRY(jinja_parse_advance(parser));
            if (end_tags != NULL && is_end_tag(&parser->token, end_tags)) {
                *body_out = body.first;
                return IMBREX_STATUS_OK;
            }
            TRY(parse_statement(parser, &node));
            break;
        default:
            if (end_tags != NULL) {
                while (end_tags[1] != NULL) { /* the last one always does */
                    end_tags++;
                }
                return jinja_parse_fail(parser, IMBREX_STATUS_FORMAT, parser->token.line,
                                        "expected the tag '%s' of the block that begins in line "
                                        "%d, found the end of the template",
                                        end_tags[0], line);
            }
            *body_out = body.first;
            return IMBREX_STATUS_OK;
        }
        jinja_node_list_append(&body, node);
    }
}

/* ---- templates ------------------------------------------------------------------------------- */

/* Python reads a template's newlines as "\n", and Jinja drops the last one. */
static size_t copy_source(const char *source, size_t num_bytes, char *copy)
{
    size_t used = 0;
    for (size_t i = 0; i < num_bytes; i++) {
        if (source[i] == '\r') {
            i += i + 1 < num_bytes && source[i + 1] == '\n';
            copy[used++] = '\n';
        } else {
            copy[used++] = source[i];
        }
    }
    return used - (used != 0 && copy[used - 1] == '\n');
}

static enum imbrex_status parse_source(struct jinja_parser *parser, const char *name,
                                       const char *source, size_t num_bytes)
{
    char *copy, *name_copy;
    parser->template->name = name;
    TRY(jinja_parse_take(parser, strlen(name) + 1, &name_copy));
    memcpy(name_copy, name, strlen(name) + 1);
    parser->template->name = name_copy;
    TRY(jinja_parse_take(parser, num_bytes + 1, &copy));
    size_t copy_bytes = copy_source(source, num_bytes, copy);
    jinja_lexer_init(&parser->lexer, name_copy, copy, copy_bytes, parser->err);
    TRY(jinja_lexer_next(&parser->lexer, &parser->ahead));
    TRY(jinja_parse_advance(parser));
    return parse_body(parser, NULL, 1, &parser->template->body);
}

enum imbrex_status jinja_template_parse(const char *name, const char *source, size_t num_bytes,
                                        struct jinja_template **template_out,
                                        struct imbrex_error *err)
{
    if (name == NULL || source == NULL || template_out == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "jinja_template_parse: an argument is NULL");
    }
    if (num_bytes > JINJA_MAX_SOURCE_BYTES) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "%s: a chat template of %zu bytes, more than %d", name, num_bytes,
                         JINJA_MAX_SOURCE_BYTES);
    }
    size_t valid_bytes = utf8_valid_prefix(source, num_bytes);
    if (valid_bytes != num_bytes) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: byte %zu is not valid UTF-8", name,
                         valid_bytes);
    }
    struct jinja_template *template = calloc(1, sizeof(*template));
    if (template == NULL) {
        return error_out_of_memory(err, "a chat template", sizeof(*template));
    }
    for (int i = 0; i < JINJA_NUM_SPECIAL; i++) {
        template->special_ids[i] = -1;
    }
    jinja_pool_init(&template->pool, 65536 + num_bytes * POOL_BYTES_PER_SOURCE_BYTE);
    struct jinja_parser parser = {.template = template, .err = err};
    enum imbrex_status status = parse_source(&parser, name, source, num_bytes);
    if (status != IMBREX_STATUS_OK) {
        jinja_template_destroy(template);
        return status;
    }
    *template_out = template;
    return IMBREX_STATUS_OK;
}

void jinja_template_destroy(struct jinja_template *template)
{
    if (template != NULL) {
        jinja_pool_deinit(&template->pool);
        free(template);
    }
}
