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
    const char *content; /* NUL-terminated, in imbrex_tokenizer.added_contents */
    size_t num_bytes;    /* >= 1 */
    int32_t id;
    bool is_special;
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
/* The first added token at or behind `begin`, the longest one that starts there; NULL if there is
 * none, else *position is where it is. Special ones count only if parse_special. */
const struct added_token *added_tokens_find(const struct added_tokens *added, const char *text,
                                            size_t num_bytes, size_t begin, bool parse_special,
                                            size_t *position);

/* ---- the tokenizer -------------------------------------------------------------------------- */

#define SPACE_MARK "\xe2\x96\x81" /* U+2581, SentencePiece's visible space */
#define SPACE_MARK_BYTES 3
#define SPACE_MARK_CODE_POINT 0x2581u

#define TOKEN_FLAG_ASSIGNED 1u
#define TOKEN_FLAG_SPECIAL 2u

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

    /* Normalizer. */
    bool has_nfc;
    bool has_prepend; /* U+2581 before each piece of text */
    bool has_replace; /* U+2581 for each space */

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

    struct merge_table merges;
    struct added_tokens raw_added;        /* found in the text as it is */
    struct added_tokens normalized_added; /* found after normalisation */
    char *added_contents;                 /* the strings of both */

    /* Post-processor: special tokens around the whole. */
    int32_t *template_ids; /* [num_before + num_after] */
    size_t num_before, num_after;

    bool strips_space; /* the decoder drops one space at the start of the text */
};

/* The length of the first word, >= 1, of a text of valid UTF-8, num_bytes >= 1, as Qwen2's
 * pre-tokenizer pattern (QWEN2_SPLIT_PATTERN) cuts it. */
size_t qwen2_split_next(const char *text, size_t num_bytes);
extern const char qwen2_split_pattern[];

/* NFC of valid UTF-8, appended to `result`. */
enum imbrex_status nfc_append(const char *text, size_t num_bytes, struct byte_buffer *result,
                              struct imbrex_error *err);
/* True if NFC cannot change the text, decided from the kinds of characters in it. */
bool nfc_is_inert(const char *text, size_t num_bytes);

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

/* Fills the ids, symbols, merges and added tokens. Needs is_byte_level, has_byte_fallback and
 * has_nfc. */
enum imbrex_status tokenizer_read_vocab(const struct tokenizer_reader *reader);

#endif
