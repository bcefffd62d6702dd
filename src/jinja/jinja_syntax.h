/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens and the syntax tree. */
#ifndef IMBREX_JINJA_JINJA_SYNTAX_H
#define IMBREX_JINJA_JINJA_SYNTAX_H

#include "jinja/jinja_value.h"

struct jinja_entry_point;

enum jinja_token_kind {
    JINJA_TOKEN_END,
    JINJA_TOKEN_DATA,
    JINJA_TOKEN_VARIABLE_BEGIN,
    JINJA_TOKEN_VARIABLE_END,
    JINJA_TOKEN_BLOCK_BEGIN,
    JINJA_TOKEN_BLOCK_END,
    JINJA_TOKEN_NAME,
    JINJA_TOKEN_STRING, /* text: with its quotes */
    JINJA_TOKEN_INTEGER,
    JINJA_TOKEN_FLOAT,
    JINJA_TOKEN_OPERATOR,
};

enum jinja_operator {
    JINJA_OP_NONE,
    JINJA_OP_ADD,
    JINJA_OP_SUB,
    JINJA_OP_MUL,
    JINJA_OP_DIV,
    JINJA_OP_FLOORDIV,
    JINJA_OP_MOD,
    JINJA_OP_POW,
    JINJA_OP_TILDE,
    JINJA_OP_EQ,
    JINJA_OP_NE,
    JINJA_OP_LT,
    JINJA_OP_LE,
    JINJA_OP_GT,
    JINJA_OP_GE,
    JINJA_OP_IN,
    JINJA_OP_NOT_IN,
    JINJA_OP_ASSIGN,
    JINJA_OP_DOT,
    JINJA_OP_COLON,
    JINJA_OP_PIPE,
    JINJA_OP_COMMA,
    JINJA_OP_SEMICOLON,
    JINJA_OP_LPAREN,
    JINJA_OP_RPAREN,
    JINJA_OP_LBRACKET,
    JINJA_OP_RBRACKET,
    JINJA_OP_LBRACE,
    JINJA_OP_RBRACE,
};

struct jinja_token {
    enum jinja_token_kind kind;
    enum jinja_operator op;
    int32_t line;
    const char *text;
    size_t num_bytes;
};

#define JINJA_MAX_BRACKETS 256

struct jinja_lexer {
    const char *name;
    const char *source; /* newlines are "\n" */
    size_t num_bytes, position;
    int32_t line;
    enum { JINJA_LEXER_DATA, JINJA_LEXER_VARIABLE, JINJA_LEXER_BLOCK } state;
    char brackets[JINJA_MAX_BRACKETS]; /* the closing ones that are awaited */
    size_t num_brackets;
    struct imbrex_error *err;
};

/* source[num_bytes]: UTF-8 with "\n" for newlines, without the one at its end. */
void jinja_lexer_init(struct jinja_lexer *lexer, const char *name, const char *source,
                      size_t num_bytes, struct imbrex_error *err);
enum imbrex_status jinja_lexer_next(struct jinja_lexer *lexer, struct jinja_token *token);

enum jinja_node_kind {
    /* expressions; what the fields of the node mean: */
    JINJA_NODE_CONST,     /* constant */
    JINJA_NODE_NAME,      /* name_id, text */
    JINJA_NODE_TUPLE,     /* first: items */
    JINJA_NODE_LIST,      /* first: items */
    JINJA_NODE_DICT,      /* first: PAIR a: b */
    JINJA_NODE_PAIR,      /* a, b */
    JINJA_NODE_IF_ELSE,   /* a if b else c; c may be NULL */
    JINJA_NODE_AND,       /* a, b */
    JINJA_NODE_OR,        /* a, b */
    JINJA_NODE_NOT,       /* a */
    JINJA_NODE_NEGATE,    /* a */
    JINJA_NODE_PLUS,      /* a */
    JINJA_NODE_BINARY,    /* a op b */
    JINJA_NODE_CONCAT,    /* first: strings */
    JINJA_NODE_COMPARE,   /* a, then first: OPERAND */
    JINJA_NODE_OPERAND,   /* op a */
    JINJA_NODE_ATTRIBUTE, /* a.text */
    JINJA_NODE_ITEM,      /* a[b] */
    JINJA_NODE_SLICE,     /* of ITEM's b: a:b:c, each may be NULL */
    JINJA_NODE_CALL,      /* a(first: arguments) */
    JINJA_NODE_FILTER,    /* a|entry(first: arguments); a NULL: the text of a block */
    JINJA_NODE_TEST,      /* a is entry(first: arguments) */
    JINJA_NODE_KEYWORD,   /* argument: text=a */
    JINJA_NODE_STAR,      /* argument: *a */
    JINJA_NODE_STAR_STAR, /* argument: **a */
    /* statements */
    JINJA_NODE_DATA,  /* text */
    JINJA_NODE_PRINT, /* a */
    JINJA_NODE_IF,    /* a, body, b: the next IF (elif), else_body */
    JINJA_NODE_FOR,   /* a: target, b: iterable, c: condition, body, else_body, flag: recursive */
    JINJA_NODE_SET,   /* a: target, b */
    JINJA_NODE_SET_BLOCK,    /* a: target, b: filters, body */
    JINJA_NODE_MACRO,        /* name_id, text, first: PARAM, body, uses_* */
    JINJA_NODE_PARAM,        /* name_id, text, a: default or NULL */
    JINJA_NODE_CALL_BLOCK,   /* a: CALL, b: MACRO without a name */
    JINJA_NODE_FILTER_BLOCK, /* b: filters, body */
    JINJA_NODE_WITH,         /* first: PAIR target a, value b; body */
    JINJA_NODE_SCOPE,        /* body (generation) */
    JINJA_NODE_BREAK,
    JINJA_NODE_CONTINUE,
    /* targets of assignments, beside NAME and TUPLE */
    JINJA_NODE_NAMESPACE_ATTRIBUTE, /* name_id.text */
};

struct jinja_node {
    enum jinja_node_kind kind;
    enum jinja_operator op;
    int32_t line;
    int32_t name_id;
    bool flag;
    bool uses_varargs, uses_kwargs, uses_caller, has_caller_param; /* of a MACRO */
    size_t num_children;                                           /* of `first` */
    const struct jinja_string *text;
    const struct jinja_entry_point *entry;
    struct jinja_value constant;
    struct jinja_node *a, *b, *c;
    struct jinja_node *first, *body, *else_body;
    struct jinja_node *next; /* in the list that this node is in */
};

/* Names that have a meaning of their own in loops and macros. */
enum jinja_special {
    JINJA_SPECIAL_LOOP,
    JINJA_SPECIAL_CALLER,
    JINJA_SPECIAL_KWARGS,
    JINJA_SPECIAL_VARARGS,
    JINJA_NUM_SPECIAL,
};

struct jinja_template {
    struct jinja_pool pool;
    const char *name;
    const struct jinja_string **names; /* [num_names] every name in the template, by name_id */
    int32_t num_names;
    int32_t special_ids[JINJA_NUM_SPECIAL]; /* name_id, or -1 if the template does not use it */
    struct jinja_node *body;
};

#endif
