/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a tokenizer and the steps between text and ids, as tokenizer_parse.c builds them and
 * tokenizer_encode.c and detokenizer.c use them:
 *
 *   text -> added tokens cut out -> normalised -> (words) -> symbols -> merged -> ids
 *           tokenizer_added.c      _normalize.c   _split.c             _bpe.c
 *
 * Nothing here changes after tokenizer_parse, so one tokenizer serves any number of threads. */
#ifndef IMBREX_MODEL_TOKENIZER_INTERNAL_H
#define IMBREX_MODEL_TOKENIZER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "model/tokenizer.h"

/* ---- what grows while text is read ---------------------------------------------------------- */

struct byte_buffer {
    char *bytes;
    size_t num_bytes, max_bytes;
};

struct id_buffer {
    int32_t *ids;
    size_t num_ids, max_ids;
};

/* Makes room for num_more behind what is there; on failure the buffer stays as it was. */
enum imbrex_status byte_buffer_reserve(struct byte_buffer *buffer, size_t num_more,
                                       struct imbrex_error *err);
enum imbrex_status id_buffer_reserve(struct id_buffer *buffer, size_t num_more,
                                     struct imbrex_error *err);
enum imbrex_status byte_buffer_append(struct byte_buffer *buffer, const char *bytes,
                                      size_t num_bytes, struct imbrex_error *err);
enum imbrex_status id_buffer_append(struct id_buffer *buffer, int32_t id, struct imbrex_error *err);

/* ---- merges --------------------------------------------------------------------------------- */

/* The symbols left and right, side by side, become `merged`; lower ranks first. */
struct merge {
    uint32_t left, right; /* UINT32_MAX: an empty slot */
    uint32_t rank, merged;
};

#define MERGE_NO_RANK UINT32_MAX

/* Open addressing, at most half full. */
struct merge_table {
    struct merge *slots; /* [2^(64 - shift)] */
    uint64_t multiplier; /* odd */
    unsigned shift;
};

/* Of merges with the same pair the last one counts, as in Hugging Face's tokenizers. FORMAT if the
 * pairs were chosen so that they crowd into a few slots. */
enum imbrex_status merge_table_build(const char *path, const struct merge *merges,
                                     size_t num_merges, struct merge_table *table,
                                     struct imbrex_error *err);
void merge_table_release(struct merge_table *table);

/* Working memory of bpe_merge for long words. Zeroed at first; the caller frees both pointers. */
struct bpe_scratch {
    struct bpe_symbol *symbols; /* [max_symbols] */
    uint64_t *heap;             /* [2 * max_symbols] */
    size_t max_symbols;
};

/* Merges the symbols of one word in place; *num_ids becomes smaller. O(n log n). CAPACITY for 2^32
 * symbols or more. */
enum imbrex_status bpe_merge(const struct merge_table *table, int32_t *ids, size_t *num_ids,
                             struct bpe_scratch *scratch, struct imbrex_error *err);
void bpe_scratch_release(struct bpe_scratch *scratch);

/* ---- added tokens --------------------------------------------------------------------------- */

struct added_token {
    const char *content; /* in imbrex_tokenizer.added_contents */
    size_t num_bytes;    /* >= 1 */
    int32_t id;
    bool is_special;
    bool is_single_word;            /* only where no word character touches it */
    bool strips_left, strips_right; /* takes the white space beside it along */
};

/* Tokens that are found in a text before it is cut into words. */
struct added_tokens {
    struct added_token *tokens; /* [num_tokens] by content, bytewise, each once */
    int32_t num_tokens;
    int32_t first[257]; /* tokens that begin with byte b are [first[b], first[b + 1]) */
};

/* Sorts the tokens (owned from here on, also on failure) and makes the index. FORMAT if two have
 * the same content. */
enum imbrex_status added_tokens_build(const char *path, struct added_token *tokens,
                                      int32_t num_tokens, struct added_tokens *added,
                                      struct imbrex_error *err);
void added_tokens_release(struct added_tokens *added);

/* An added token in a text, and the bytes [begin, end) that it stands for. */
struct added_match {
    const struct added_token *token;
    size_t begin, end;
    size_t search_from; /* where the next one may begin */
};

/* Where in a text special tokens count. Asked about growing positions. */
struct special_rule {
    bool parse_special; /* false: nowhere */
    /* [num_inputs] in order, apart: none that lies in one of these parts or reaches into it. */
    const struct text_span *inputs;
    size_t num_inputs;
    size_t origin; /* position of the text's first byte, as the inputs count */
};

/* Forgets inputs that end at or before the position, as they count. */
void special_rule_pass(struct special_rule *rule, size_t position);

/* The next token in text[0, num_bytes) at or behind previous->search_from, the longest that starts
 * there; false if there is none. Of the text [0, previous->end) is taken. Special ones are passed
 * over unless parse_special: what is written there is text, all of it. Those that the rule's inputs
 * forbid are not there at all, so that they hide no other. The rule forgets inputs that have been
 * passed. */
bool added_tokens_next(const struct added_tokens *added, const char *text, size_t num_bytes,
                       struct special_rule *rule, const struct added_match *previous,
                       struct added_match *match);

/* ---- normalisation -------------------------------------------------------------------------- */

/* X(name in the file, enumerator, compatibility, composed) */
#define UNICODE_FORM_LIST(X)    \
    X("NFC", NFC, false, true)  \
    X("NFD", NFD, false, false) \
    X("NFKC", NFKC, true, true) \
    X("NFKD", NFKD, true, false)

enum unicode_form {
#define UNICODE_FORM_ENUM(name, id, is_compatible, is_composed) UNICODE_FORM_##id,
    UNICODE_FORM_LIST(UNICODE_FORM_ENUM)
#undef UNICODE_FORM_ENUM
};

/* A normalization form of valid UTF-8, appended to `result`. */
enum imbrex_status unicode_form_append(enum unicode_form form, const char *text, size_t num_bytes,
                                       struct byte_buffer *result, struct imbrex_error *err);
/* True if the form cannot change the text, decided from the kinds of characters in it. */
bool unicode_form_is_inert(enum unicode_form form, const char *text, size_t num_bytes);

#define TOKENIZER_MAX_STEPS 8        /* of a normalizer, of a pre-tokenizer */
#define TOKENIZER_MAX_AFFIX_BYTES 64 /* of what a step puts into a text */

enum normalizer_kind {
    NORMALIZER_FORM,
    NORMALIZER_REPLACE, /* content for each pattern */
    NORMALIZER_PREPEND, /* content before a text that is not empty */
    NORMALIZER_STRIP,   /* white space at the ends */
};

struct normalizer_step {
    enum normalizer_kind kind;
    enum unicode_form form;
    char pattern[TOKENIZER_MAX_AFFIX_BYTES], content[TOKENIZER_MAX_AFFIX_BYTES];
    size_t pattern_bytes, content_bytes;
    bool strips_left, strips_right;
};

/* Applies the steps to a text of valid UTF-8. *normalized is the text itself, or in one of the two
 * buffers. CAPACITY if the text becomes more than 64 times as long. */
enum imbrex_status normalizer_run(const struct normalizer_step *steps, size_t num_steps,
                                  const char *text, size_t num_bytes, struct byte_buffer buffers[2],
                                  const char **normalized, size_t *normalized_bytes,
                                  struct imbrex_error *err);

/* Where the inputs of a text lie after normalizer_run, which has the same steps: changes
 * inputs[num_inputs] in place. What may have been joined with an input is part of it. */
enum imbrex_status normalizer_map_inputs(const struct normalizer_step *steps, size_t num_steps,
                                         const char *text, size_t num_bytes,
                                         struct text_span *inputs, size_t num_inputs,
                                         struct imbrex_error *err);

/* Appends the text with `content` for each `pattern`. pattern_bytes >= 1. */
enum imbrex_status replace_append(const char *text, size_t num_bytes, const char *pattern,
                                  size_t pattern_bytes, const char *content, size_t content_bytes,
                                  struct byte_buffer *result, struct imbrex_error *err);

/* ---- cutting into words --------------------------------------------------------------------- */

/* Patterns that are written out by hand. */
enum word_pattern {
    WORD_PATTERN_GPT2,
    WORD_PATTERN_QWEN2,
    WORD_PATTERN_LLAMA3,
    NUM_WORD_PATTERNS,
};

/* The length of the first word, >= 1, of a text of valid UTF-8, num_bytes >= 1. */
size_t word_next(enum word_pattern pattern, const char *text, size_t num_bytes);
/* The regular expression that a pattern stands for, and the pattern of an expression if there is
 * one. */
const char *word_pattern_text(enum word_pattern pattern);
bool word_pattern_find(const char *text, enum word_pattern *pattern);

/* Any other expression, compiled by PCRE2. Never changed once it is built. */
struct split_regex;

/* What a thread needs to match one text with it; zeroed at first. */
struct split_regex_scratch {
    void *match_data, *context, *jit_stack;
    uint64_t max_steps, steps_left; /* for all pieces of the text so far */
    size_t position;                /* where the match at work was when steps were last counted */
};

/* `field` names the expression, written for Oniguruma, in messages. UNSUPPORTED for constructs that
 * PCRE2 does not have, or in another meaning. */
enum imbrex_status split_regex_create(const char *path, const char *field, const char *expression,
                                      struct split_regex **regex, struct imbrex_error *err);
void split_regex_destroy(struct split_regex *regex);
/* Allows the steps that matching in a piece of num_bytes may take, before its first match. */
enum imbrex_status split_regex_begin(const struct split_regex *regex,
                                     struct split_regex_scratch *scratch, size_t num_bytes,
                                     struct imbrex_error *err);
/* The first match at or behind `from`. *is_found is false if there is none. CAPACITY if the limits
 * of steps or memory are hit, which no text hits because it is long. */
enum imbrex_status split_regex_match(const struct split_regex *regex,
                                     struct split_regex_scratch *scratch, const char *text,
                                     size_t num_bytes, size_t from, bool *is_found, size_t *begin,
                                     size_t *end, struct imbrex_error *err);
void split_regex_scratch_release(struct split_regex_scratch *scratch);

enum split_matcher {
    SPLIT_WORDS, /* a pattern written out by hand */
    SPLIT_REGEX,
    SPLIT_STRING,
    SPLIT_NUMBERS, /* each character that is a number */
};

/* X(name in the file, enumerator): what becomes of the matches and what lies between them */
#define SPLIT_BEHAVIOR_LIST(X)                    \
    X("Isolated", ISOLATED)                       \
    X("Removed", REMOVED)                         \
    X("MergedWithPrevious", MERGED_WITH_PREVIOUS) \
    X("MergedWithNext", MERGED_WITH_NEXT)         \
    X("Contiguous", CONTIGUOUS)

enum split_behavior {
#define SPLIT_BEHAVIOR_ENUM(name, id) SPLIT_##id,
    SPLIT_BEHAVIOR_LIST(SPLIT_BEHAVIOR_ENUM)
#undef SPLIT_BEHAVIOR_ENUM
};

enum pre_step_kind {
    PRE_STEP_SPLIT,
    PRE_STEP_MARK_SPACES,  /* U+2581, or another mark, for each space */
    PRE_STEP_PREFIX_MARK,  /* the mark in front, unless it is there */
    PRE_STEP_PREFIX_SPACE, /* a space in front, unless it is there */
};

struct pre_step {
    enum pre_step_kind kind;
    /* SPLIT */
    enum split_matcher matcher;
    enum word_pattern pattern;
    struct split_regex *regex;
    enum split_behavior behavior;
    bool is_inverted;
    bool only_at_start;                   /* PREFIX_MARK: only where the whole text begins */
    char text[TOKENIZER_MAX_AFFIX_BYTES]; /* the string, or the mark */
    size_t text_bytes;
};

/* Encodes one piece of text, which is not empty. `is_at_start`: the whole text begins with it. */
typedef enum imbrex_status piece_fn(void *context, const char *text, size_t num_bytes,
                                    bool is_at_start);

/* Working memory of pre_tokenize; zeroed at first. */
struct pre_scratch {
    struct byte_buffer prefixed[TOKENIZER_MAX_STEPS];
    struct split_regex_scratch regexes[TOKENIZER_MAX_STEPS];
};

/* Cuts a piece of text by the steps and hands each word to `encode`, in their order. */
enum imbrex_status pre_tokenize(const struct pre_step *steps, size_t num_steps, const char *text,
                                size_t num_bytes, bool is_at_start, struct pre_scratch *scratch,
                                piece_fn *encode, void *context, struct imbrex_error *err);
void pre_scratch_release(struct pre_scratch *scratch);

/* ---- texts to ids --------------------------------------------------------------------------- */

struct token_text {
    const char *bytes; /* NULL: no token */
    size_t num_bytes;
};

struct text_slot {
    struct token_text text;
    int32_t id;
};

/* Open addressing, at most half full. The texts are views. */
struct text_table {
    struct text_slot *slots; /* [2^(64 - shift)] */
    uint64_t seed;
    unsigned shift;
};

/* Builds the table of entries[num_entries]; of equal texts the last one counts. FORMAT if they were
 * chosen so that they crowd into a few slots. */
enum imbrex_status text_table_build(const char *path, const struct text_slot *entries,
                                    size_t num_entries, struct text_table *table,
                                    struct imbrex_error *err);
void text_table_release(struct text_table *table);
/* The id, or -1. */
int32_t text_table_find(const struct text_table *table, const char *text, size_t num_bytes);

/* ---- the tokenizer -------------------------------------------------------------------------- */

#define SPACE_MARK "\xe2\x96\x81" /* U+2581, SentencePiece's visible space */
#define SPACE_MARK_BYTES 3
#define SPACE_MARK_CODE_POINT 0x2581u

#define TOKEN_FLAG_ASSIGNED 1u
#define TOKEN_FLAG_SPECIAL 2u
#define TOKEN_FLAG_MARKED 4u /* some of its spaces were marks */

/* A token of one code point. */
struct char_token {
    uint32_t code_point;
    int32_t id;
};

struct imbrex_tokenizer {
    /* What each id stands for: bytes [token_offsets[id], token_offsets[id + 1]) of token_bytes. */
    int32_t vocab_size;
    char *token_bytes;
    uint32_t *token_offsets; /* [vocab_size + 1] */
    uint8_t *token_flags;    /* [vocab_size] */
    size_t max_token_bytes;

    struct normalizer_step normalizer[TOKENIZER_MAX_STEPS];
    size_t num_normalizer_steps;
    struct pre_step pre_steps[TOKENIZER_MAX_STEPS];
    size_t num_pre_steps;

    /* First symbols of a word: one a byte if is_byte_level, else one a character. */
    bool is_byte_level;
    bool has_byte_fallback;   /* a character without a token is spelled in bytes */
    int32_t byte_ids[256];    /* if is_byte_level or has_byte_fallback */
    struct char_token *chars; /* [num_chars] by code point; not if is_byte_level */
    int32_t num_chars;
    int32_t unk_id; /* for characters without a token, if neither of the two holds */
    bool fuse_unk;  /* one for a run of them */
    /* No merge joins U+2581 to a character before it that is another one: the text may be cut there
     * into words that are merged apart. */
    bool splits_at_mark;
    bool ignores_merges;     /* a word that is a token is that token */
    struct text_table words; /* if ignores_merges: the tokens as words are spelled */
    char *word_bytes;        /* what the table looks at */

    struct merge_table merges;
    struct added_tokens raw_added;        /* found in the text as it is */
    struct added_tokens normalized_added; /* found after normalisation */
    char *added_contents;                 /* the strings of both */

    /* Post-processor: special tokens around the whole. */
    int32_t *template_ids; /* [num_before + num_after] */
    size_t num_before, num_after;

    /* Decoder. */
    int32_t num_stripped_spaces; /* at the start of the text, at most */
    bool drops_first_marks;      /* the first token's marks stand for nothing */
};

/* ---- building the vocabulary ---------------------------------------------------------------- */

#define DECODER_MAX_REPLACES 4
#define VOCAB_MAX_TOKENS ((int32_t)1 << 24)
/* Longer added tokens would make the search for them slow, and are no tokens anybody needs. */
#define ADDED_TOKEN_MAX_BYTES 4096

struct decoder_replace {
    char pattern[TOKENIZER_MAX_AFFIX_BYTES], content[TOKENIZER_MAX_AFFIX_BYTES];
    size_t pattern_bytes, content_bytes;
};

/* What a decoder does to each token by itself; the rest of it is in struct imbrex_tokenizer. */
struct decoder_steps {
    bool is_byte_level; /* tokens are spelled in the alphabet of bytes; nothing below holds */
    struct decoder_replace replaces[DECODER_MAX_REPLACES];
    size_t num_replaces;
    struct decoder_replace mark; /* Metaspace: by a space; pattern_bytes 0: none */
    bool has_byte_fallback;      /* "<0x0A>" is a byte */
};

/* Roles of an id. */
#define VOCAB_ROLE_MODEL 1u    /* the model makes it of text */
#define VOCAB_ROLE_VERBATIM 2u /* it stands for its text as it is */

/* Collects what each id is. The texts are views that outlive the builder. */
struct vocab_builder {
    const char *path;
    struct imbrex_tokenizer *tokenizer; /* being built */
    struct imbrex_error *err;
    const struct decoder_steps *decoder;
    struct token_text *texts; /* [vocab_size] */
    uint8_t *roles;           /* [vocab_size] */
    struct text_slot *slots;  /* [num_slots] what merges are looked up in */
    size_t num_slots, max_slots;
    struct text_table table; /* from vocab_builder_index on */
};

/* An added token as a file describes it. */
struct added_entry {
    struct token_text content;
    int32_t id;
    bool is_special, is_normalized, is_single_word, strips_left, strips_right;
};

/* Takes the number of ids, and how many tokens there will be to look up at most. The caller
 * releases the builder, also on failure. */
enum imbrex_status vocab_builder_begin(struct vocab_builder *builder, int32_t vocab_size,
                                       size_t max_slots);
void vocab_builder_release(struct vocab_builder *builder);
/* Gives an id in [0, vocab_size) to a text; FORMAT if another text has it. */
enum imbrex_status vocab_builder_claim(struct vocab_builder *builder, int32_t id,
                                       struct token_text text, uint8_t roles);
/* Makes the text known to merges, as spelled in them. */
void vocab_builder_add_slot(struct vocab_builder *builder, struct token_text text, int32_t id);
enum imbrex_status vocab_builder_index(struct vocab_builder *builder);
/* The id of a text that merges know, or -1. */
int32_t vocab_builder_find(const struct vocab_builder *builder, const char *text, size_t num_bytes);
/* Claims the ids of entries[num_entries] and builds the search for them. */
enum imbrex_status vocab_builder_add_tokens(struct vocab_builder *builder,
                                            const struct added_entry *entries, size_t num_entries);
/* Builds the rest. tokenizer->unk_id is set if it may be needed. */
enum imbrex_status vocab_builder_finish(struct vocab_builder *builder, const struct merge *merges,
                                        size_t num_merges);

/* ---- reading tokenizer.json ----------------------------------------------------------------- */

/* What the steps of tokenizer_parse share. */
struct tokenizer_reader {
    const char *path;
    const json_t *root;
    struct imbrex_tokenizer *tokenizer; /* being built */
    struct imbrex_error *err;
};

/* "path: field: expected ..., found ...", where found describes the value. Returns `status`. */
enum imbrex_status tokenizer_reader_refuse(const struct tokenizer_reader *reader,
                                           enum imbrex_status status, const char *field,
                                           const char *expected, const json_t *found);

/* Fills the ids, symbols, merges and added tokens. Needs the normalizer, is_byte_level and
 * has_byte_fallback. */
enum imbrex_status tokenizer_read_vocab(const struct tokenizer_reader *reader,
                                        const struct decoder_steps *decoder);

#endif
