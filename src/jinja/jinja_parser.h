/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of the parser, statements and expressions, share. */
#ifndef IMBREX_JINJA_JINJA_PARSER_H
#define IMBREX_JINJA_JINJA_PARSER_H

#include "jinja/jinja_syntax.h"

struct jinja_parser {
    struct jinja_template *template;
    struct jinja_lexer lexer;
    struct jinja_token token, ahead; /* the current one and the one behind it */
    int32_t depth;
    int32_t num_loops;        /* around this place, within the same macro */
    struct jinja_node *macro; /* the innermost macro around this place, or NULL */
    int32_t *name_slots;      /* hash table: name_id + 1 or 0 */
    size_t num_name_slots;    /* a power of two, or 0 */
    int32_t name_capacity;    /* of template->names */
    struct imbrex_error *err;
};

/* Items in order, as they are parsed. */
struct jinja_node_list {
    struct jinja_node *first;
    struct jinja_node *last;
    size_t num_nodes;
};

void jinja_node_list_append(struct jinja_node_list *list, struct jinja_node *node);

enum imbrex_status jinja_parse_fail(const struct jinja_parser *parser, enum imbrex_status status,
                                    int32_t line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* "expected X, found Y" about the current token. */
enum imbrex_status jinja_parse_unexpected(const struct jinja_parser *parser, const char *expected);
/* Memory of the template's pool, also through memory_out: NULL on failure. */
enum imbrex_status jinja_parse_take(struct jinja_parser *parser, size_t num_bytes,
                                    void *memory_out);
enum imbrex_status jinja_parse_node(struct jinja_parser *parser, enum jinja_node_kind kind,
                                    int32_t line, struct jinja_node **node);
enum imbrex_status jinja_parse_enter(struct jinja_parser *parser);

enum imbrex_status jinja_parse_advance(struct jinja_parser *parser);
bool jinja_token_is_name(const struct jinja_token *token, const char *name);
bool jinja_token_is_op(const struct jinja_token *token, enum jinja_operator op);
/* Takes the token if it is the current one. */
enum imbrex_status jinja_parse_skip_name(struct jinja_parser *parser, const char *name,
                                         bool *taken);
enum imbrex_status jinja_parse_skip_op(struct jinja_parser *parser, enum jinja_operator op,
                                       bool *taken);
enum imbrex_status jinja_parse_expect_op(struct jinja_parser *parser, enum jinja_operator op,
                                         const char *expected);

/* The current token, a name, as node->text and node->name_id, and takes it. */
enum imbrex_status jinja_parse_name(struct jinja_parser *parser, struct jinja_node *node);
/* The current token, a name, as a string without an id, and takes it. */
enum imbrex_status jinja_parse_identifier(struct jinja_parser *parser,
                                          const struct jinja_string **name);

enum imbrex_status jinja_parse_primary(struct jinja_parser *parser, struct jinja_node **node);
enum imbrex_status jinja_parse_expression(struct jinja_parser *parser, bool with_if_else,
                                          struct jinja_node **node);

enum jinja_tuple_end {
    JINJA_TUPLE_PLAIN,     /* ends where a tag or parenthesis does */
    JINJA_TUPLE_PARENS,    /* inside (): may be empty */
    JINJA_TUPLE_ITERABLE,  /* of a for: ends at `recursive` too; `if` is not part of it */
    JINJA_TUPLE_CONDITION, /* of an if: `if` is not part of it */
};
/* One expression, or a tuple without parentheses. */
enum imbrex_status jinja_parse_tuple(struct jinja_parser *parser, enum jinja_tuple_end end,
                                     struct jinja_node **node);
/* |name(arguments)... applied to `input` (NULL: a block's text). With is_inline, the first name
 * comes without its '|'. */
enum imbrex_status jinja_parse_filters(struct jinja_parser *parser, struct jinja_node *input,
                                       bool is_inline, struct jinja_node **node);

#endif
