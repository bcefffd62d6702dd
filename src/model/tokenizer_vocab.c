/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of a tokenizer, from whatever file they come: which id stands for which bytes, which
 * symbols a word begins as, what merges, what is cut out first. Texts are looked up in one table
 * while a file is read; afterwards only ids are needed, and the bytes that each id stands for. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

#define BYTE_TOKEN_BYTES 6 /* "<0x0A>" */

/* Offsets of token bytes have 32 bits. */
#define MAX_TOKEN_BYTES ((size_t)1 << 30)

/* How much of a text messages show. */
static int shown(struct token_text text)
{
    return text.num_bytes < 60 ? (int)text.num_bytes : 60;
}

/* ---- ids ------------------------------------------------------------------------------------ */

enum imbrex_status vocab_builder_begin(struct vocab_builder *builder, int32_t vocab_size,
                                       size_t max_slots)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    size_t num_ids = (size_t)vocab_size;
    tokenizer->vocab_size = vocab_size;
    tokenizer->token_flags = calloc(num_ids, sizeof(*tokenizer->token_flags));
    tokenizer->token_offsets = calloc(num_ids + 1, sizeof(*tokenizer->token_offsets));
    builder->texts = calloc(num_ids, sizeof(*builder->texts));
    builder->roles = calloc(num_ids, sizeof(*builder->roles));
    builder->slots = calloc(max_slots + 1, sizeof(*builder->slots));
    builder->max_slots = max_slots;
    if (tokenizer->token_flags == NULL || tokenizer->token_offsets == NULL ||
        builder->texts == NULL || builder->roles == NULL || builder->slots == NULL) {
        return error_out_of_memory(builder->err, "tables of the token ids",
                                   num_ids * sizeof(*builder->texts));
    }
    return IMBREX_STATUS_OK;
}

void vocab_builder_release(struct vocab_builder *builder)
{
    free(builder->texts);
    free(builder->roles);
    free(builder->slots);
    text_table_release(&builder->table);
}

static bool texts_equal(struct token_text a, struct token_text b)
{
    return a.num_bytes == b.num_bytes && memcmp(a.bytes, b.bytes, a.num_bytes) == 0;
}

enum imbrex_status vocab_builder_claim(struct vocab_builder *builder, int32_t id,
                                       struct token_text text, uint8_t roles)
{
    struct token_text known = builder->texts[id];
    if (known.bytes != NULL && !texts_equal(known, text)) {
        return error_set(builder->err, IMBREX_STATUS_FORMAT,
                         "%s: id %" PRId32 ": expected one token, found \"%.*s\" and \"%.*s\"",
                         builder->path, id, shown(known), known.bytes, shown(text), text.bytes);
    }
    builder->texts[id] = text;
    builder->roles[id] |= roles;
    builder->tokenizer->token_flags[id] |= TOKEN_FLAG_ASSIGNED;
    return IMBREX_STATUS_OK;
}

void vocab_builder_add_slot(struct vocab_builder *builder, struct token_text text, int32_t id)
{
    if (builder->num_slots < builder->max_slots) {
        builder->slots[builder->num_slots++] = (struct text_slot){.text = text, .id = id};
    }
}

enum imbrex_status vocab_builder_index(struct vocab_builder *builder)
{
    return text_table_build(builder->path, builder->slots, builder->num_slots, &builder->table,
                            builder->err);
}

int32_t vocab_builder_find(const struct vocab_builder *builder, const char *text, size_t num_bytes)
{
    return text_table_find(&builder->table, text, num_bytes);
}

/* ---- the alphabet of bytes ------------------------------------------------------------------ */

/* GPT-2's alphabet writes each byte as one visible character: the printable ones of Latin-1 as they
 * are, the others from U+0100 on, in their order. */
static bool byte_is_printable(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
}

struct byte_alphabet {
    uint32_t char_of_byte[256];
    int16_t byte_of_char[512]; /* -1: not in the alphabet */
};

static void byte_alphabet_init(struct byte_alphabet *alphabet)
{
    for (size_t i = 0; i < 512; i++) {
        alphabet->byte_of_char[i] = -1;
    }
    uint32_t next_char = 0x100;
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t code_point = byte_is_printable(byte) ? byte : next_char++;
        alphabet->char_of_byte[byte] = code_point;
        alphabet->byte_of_char[code_point] = (int16_t)byte;
    }
}

/* Writes the bytes that a text in the alphabet spells, at most as many as the text has. False if it
 * has other characters. */
static bool spell_bytes(const struct byte_alphabet *alphabet, struct token_text text, char *bytes,
                        size_t *num_bytes)
{
    *num_bytes = 0;
    for (size_t at = 0; at < text.num_bytes;) {
        struct utf8_step step = utf8_next(text.bytes + at, text.num_bytes - at);
        int byte = step.code_point < 512 ? alphabet->byte_of_char[step.code_point] : -1;
        if (byte < 0) {
            return false;
        }
        bytes[(*num_bytes)++] = (char)byte;
        at += step.num_bytes;
    }
    return true;
}

/* ---- what a token stands for ---------------------------------------------------------------- */

static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* The byte that a token such as "<0x0A>" stands for, or -1. */
static int byte_of_token(const char *text, size_t num_bytes)
{
    if (num_bytes != BYTE_TOKEN_BYTES || memcmp(text, "<0x", 3) != 0 || text[5] != '>' ||
        hex_digit(text[3]) < 0 || hex_digit(text[4]) < 0) {
        return -1;
    }
    return hex_digit(text[3]) << 4 | hex_digit(text[4]);
}

/* Working memory of decoding: the token as the steps change it. */
struct decoding {
    struct byte_buffer text, next;
};

static enum imbrex_status run_replace(struct decoding *decoding,
                                      const struct decoder_replace *replace,
                                      struct imbrex_error *err)
{
    decoding->next.num_bytes = 0;
    TRY(replace_append(decoding->text.bytes, decoding->text.num_bytes, replace->pattern,
                       replace->pattern_bytes, replace->content, replace->content_bytes,
                       &decoding->next, err));
    struct byte_buffer swapped = decoding->text;
    decoding->text = decoding->next;
    decoding->next = swapped;
    return IMBREX_STATUS_OK;
}

/* Metaspace: marks become spaces, but in the first token nothing; so a token must show which of its
 * spaces were marks. */
static enum imbrex_status run_mark(struct vocab_builder *builder, int32_t id,
                                   struct decoding *decoding)
{
    const struct decoder_replace *mark = &builder->decoder->mark;
    const struct byte_buffer *text = &decoding->text;
    if (mark->pattern_bytes == 0 || text->num_bytes == 0 ||
        memmem(text->bytes, text->num_bytes, mark->pattern, mark->pattern_bytes) == NULL) {
        return IMBREX_STATUS_OK;
    }
    if (builder->tokenizer->drops_first_marks &&
        memchr(text->bytes, ' ', text->num_bytes) != NULL) {
        return error_set(builder->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: id %" PRId32 ": expected marks or spaces (decoder Metaspace), found "
                         "both",
                         builder->path, id);
    }
    builder->tokenizer->token_flags[id] |= TOKEN_FLAG_MARKED;
    return run_replace(decoding, mark, builder->err);
}

/* Leaves in decoding->text the bytes that a token stands for. */
static enum imbrex_status decode_token(struct vocab_builder *builder,
                                       const struct byte_alphabet *alphabet, int32_t id,
                                       struct decoding *decoding)
{
    const struct decoder_steps *decoder = builder->decoder;
    struct imbrex_error *err = builder->err;
    struct token_text text = builder->texts[id];
    decoding->text.num_bytes = 0;
    TRY(byte_buffer_append(&decoding->text, text.bytes, text.num_bytes, err));
    if ((builder->roles[id] & VOCAB_ROLE_VERBATIM) != 0 || text.num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    if (decoder->is_byte_level) {
        size_t num_bytes;
        if (spell_bytes(alphabet, text, decoding->text.bytes, &num_bytes)) {
            decoding->text.num_bytes = num_bytes;
        } else {
            /* Not spelled in the alphabet: the decoder takes the whole token as it is. */
            memcpy(decoding->text.bytes, text.bytes, text.num_bytes);
        }
        return IMBREX_STATUS_OK;
    }
    for (size_t i = 0; i < decoder->num_replaces; i++) {
        TRY(run_replace(decoding, &decoder->replaces[i], err));
    }
    int byte = decoder->has_byte_fallback
                   ? byte_of_token(decoding->text.bytes, decoding->text.num_bytes)
                   : -1;
    if (byte >= 0) {
        decoding->text.bytes[0] = (char)byte;
        decoding->text.num_bytes = 1;
        return IMBREX_STATUS_OK;
    }
    return run_mark(builder, id, decoding);
}

static enum imbrex_status build_token_bytes(struct vocab_builder *builder,
                                            const struct byte_alphabet *alphabet)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    struct decoding decoding = {0};
    struct byte_buffer all = {0};
    enum imbrex_status status;
    /* One byte at least, so that no token's bytes are NULL. */
    TRY_OR_FAIL(byte_buffer_reserve(&all, 1, builder->err));
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        tokenizer->token_offsets[id] = (uint32_t)all.num_bytes;
        if (builder->texts[id].bytes == NULL) {
            continue;
        }
        TRY_OR_FAIL(decode_token(builder, alphabet, id, &decoding));
        size_t num_bytes = decoding.text.num_bytes;
        if (num_bytes > MAX_TOKEN_BYTES - all.num_bytes) {
            status = error_set(builder->err, IMBREX_STATUS_FORMAT,
                               "%s: tokens: expected at most %zu bytes together, found more",
                               builder->path, MAX_TOKEN_BYTES);
            goto fail;
        }
        TRY_OR_FAIL(byte_buffer_append(&all, decoding.text.bytes, num_bytes, builder->err));
        if (num_bytes > tokenizer->max_token_bytes) {
            tokenizer->max_token_bytes = num_bytes;
        }
    }
    tokenizer->token_offsets[tokenizer->vocab_size] = (uint32_t)all.num_bytes;
    tokenizer->token_bytes = all.bytes;
    all.bytes = NULL;
fail:
    free(decoding.text.bytes);
    free(decoding.next.bytes);
    free(all.bytes);
    return status;
}

/* ---- added tokens --------------------------------------------------------------------------- */

static enum imbrex_status check_added_entry(const struct vocab_builder *builder,
                                            const struct added_entry *entry)
{
    if (entry->content.num_bytes == 0 || entry->content.num_bytes > ADDED_TOKEN_MAX_BYTES) {
        return error_set(builder->err, IMBREX_STATUS_FORMAT,
                         "%s: added token %" PRId32 ": content: expected 1 to %d bytes, found %zu",
                         builder->path, entry->id, ADDED_TOKEN_MAX_BYTES, entry->content.num_bytes);
    }
    return IMBREX_STATUS_OK;
}

/* Where a token's content begins in the buffer of all, and its length there. */
struct added_place {
    size_t begin, num_bytes;
};

/* Appends the content as it will stand in the text: normalised if the entry is. */
static enum imbrex_status append_content(const struct vocab_builder *builder,
                                         const struct added_entry *entry,
                                         struct byte_buffer scratch[2],
                                         struct byte_buffer *contents, struct added_place *place)
{
    const struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    const char *content = entry->content.bytes;
    size_t num_bytes = entry->content.num_bytes;
    if (entry->is_normalized) {
        TRY(normalizer_run(tokenizer->normalizer, tokenizer->num_normalizer_steps, content,
                           num_bytes, scratch, &content, &num_bytes, builder->err));
        if (num_bytes == 0) {
            return error_set(builder->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: added token %" PRId32 " (\"%.*s\"): expected content that the "
                             "normalizer leaves something of, found none",
                             builder->path, entry->id, shown(entry->content), entry->content.bytes);
        }
    }
    *place = (struct added_place){.begin = contents->num_bytes, .num_bytes = num_bytes};
    return byte_buffer_append(contents, content, num_bytes, builder->err);
}

/* Builds the tokens of one of the two kinds. */
static enum imbrex_status build_added(const struct vocab_builder *builder,
                                      const struct added_entry *entries,
                                      const struct added_place *places, size_t num_entries,
                                      bool is_normalized, const char *contents,
                                      struct added_tokens *added)
{
    struct added_token *tokens = malloc((num_entries + 1) * sizeof(*tokens));
    if (tokens == NULL) {
        return error_out_of_memory(builder->err, "added tokens",
                                   (num_entries + 1) * sizeof(*tokens));
    }
    int32_t num_tokens = 0;
    for (size_t i = 0; i < num_entries; i++) {
        if (entries[i].is_normalized == is_normalized) {
            tokens[num_tokens++] = (struct added_token){
                .content = contents + places[i].begin,
                .num_bytes = places[i].num_bytes,
                .id = entries[i].id,
                .is_special = entries[i].is_special,
                .is_single_word = entries[i].is_single_word,
                .strips_left = entries[i].strips_left,
                .strips_right = entries[i].strips_right,
            };
        }
    }
    return added_tokens_build(builder->path, tokens, num_tokens, added, builder->err);
}

enum imbrex_status vocab_builder_add_tokens(struct vocab_builder *builder,
                                            const struct added_entry *entries, size_t num_entries)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    struct byte_buffer contents = {0}, scratch[2] = {{0}};
    if (num_entries == 0) {
        return IMBREX_STATUS_OK;
    }
    struct added_place *places = malloc(num_entries * sizeof(*places));
    enum imbrex_status status;
    if (places == NULL) {
        return error_out_of_memory(builder->err, "added tokens", num_entries * sizeof(*places));
    }
    for (size_t i = 0; i < num_entries; i++) {
        TRY_OR_FAIL(check_added_entry(builder, &entries[i]));
        TRY_OR_FAIL(append_content(builder, &entries[i], scratch, &contents, &places[i]));
        if (entries[i].is_special) {
            tokenizer->token_flags[entries[i].id] |= TOKEN_FLAG_SPECIAL;
        }
    }
    tokenizer->added_contents = contents.bytes;
    TRY_OR_FAIL(build_added(builder, entries, places, num_entries, false, contents.bytes,
                            &tokenizer->raw_added));
    TRY_OR_FAIL(build_added(builder, entries, places, num_entries, true, contents.bytes,
                            &tokenizer->normalized_added));
    contents.bytes = NULL;
fail:
    if (contents.bytes != NULL && tokenizer->added_contents != contents.bytes) {
        free(contents.bytes);
    }
    free(scratch[0].bytes);
    free(scratch[1].bytes);
    free(places);
    return status;
}

/* ---- first symbols -------------------------------------------------------------------------- */

/* Bytes that UTF-8 has none of: a byte-level vocabulary may do without them. */
static bool byte_is_used(unsigned byte)
{
    return byte != 0xc0 && byte != 0xc1 && byte < 0xf5;
}

static enum imbrex_status read_byte_ids(struct vocab_builder *builder,
                                        const struct byte_alphabet *alphabet)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[BYTE_TOKEN_BYTES + 1];
        size_t num_bytes = BYTE_TOKEN_BYTES;
        if (tokenizer->is_byte_level) {
            num_bytes = utf8_write(alphabet->char_of_byte[byte], text);
            text[num_bytes] = '\0';
        } else {
            snprintf(text, sizeof(text), "<0x%02X>", byte);
        }
        tokenizer->byte_ids[byte] = vocab_builder_find(builder, text, num_bytes);
        if (tokenizer->byte_ids[byte] < 0 && byte_is_used(byte)) {
            return error_set(builder->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: model.vocab: expected a token for every byte, found none for "
                             "0x%02x (\"%s\"): text with it would be lost",
                             builder->path, byte, text);
        }
    }
    return IMBREX_STATUS_OK;
}

static int char_compare(const void *a, const void *b)
{
    uint32_t left = ((const struct char_token *)a)->code_point;
    uint32_t right = ((const struct char_token *)b)->code_point;
    return (left > right) - (left < right);
}

/* Tokens of one character. */
static enum imbrex_status read_chars(struct vocab_builder *builder)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    size_t max_chars = (size_t)tokenizer->vocab_size;
    tokenizer->chars = malloc(max_chars * sizeof(*tokenizer->chars));
    if (tokenizer->chars == NULL) {
        return error_out_of_memory(builder->err, "tokens of one character",
                                   max_chars * sizeof(*tokenizer->chars));
    }
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        struct token_text text = builder->texts[id];
        if ((builder->roles[id] & VOCAB_ROLE_MODEL) == 0 || text.num_bytes == 0) {
            continue;
        }
        struct utf8_step step = utf8_next(text.bytes, text.num_bytes);
        if (step.is_valid && step.num_bytes == text.num_bytes) {
            tokenizer->chars[tokenizer->num_chars++] =
                (struct char_token){.code_point = step.code_point, .id = id};
        }
    }
    qsort(tokenizer->chars, (size_t)tokenizer->num_chars, sizeof(*tokenizer->chars), char_compare);
    return IMBREX_STATUS_OK;
}

/* Words that are tokens, for ignores_merges: in bytes where words are bytes. */
static enum imbrex_status build_words(struct vocab_builder *builder,
                                      const struct byte_alphabet *alphabet)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    size_t max_bytes = 1, num_bytes = 0, num_words = 0;
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        max_bytes += builder->texts[id].num_bytes;
    }
    enum imbrex_status status;
    char *bytes = malloc(max_bytes);
    struct text_slot *words = malloc((size_t)tokenizer->vocab_size * sizeof(*words));
    if (bytes == NULL || words == NULL) {
        status = error_out_of_memory(builder->err, "words of the tokenizer", max_bytes);
        goto fail;
    }
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        struct token_text text = builder->texts[id];
        size_t word_bytes = text.num_bytes;
        if ((builder->roles[id] & VOCAB_ROLE_MODEL) == 0) {
            continue;
        }
        if (!tokenizer->is_byte_level) {
            memcpy(bytes + num_bytes, text.bytes, text.num_bytes);
        } else if (!spell_bytes(alphabet, text, bytes + num_bytes, &word_bytes)) {
            continue;
        }
        words[num_words++] = (struct text_slot){
            .text = {.bytes = bytes + num_bytes, .num_bytes = word_bytes}, .id = id};
        num_bytes += word_bytes;
    }
    TRY_OR_FAIL(text_table_build(builder->path, words, num_words, &tokenizer->words, builder->err));
    tokenizer->word_bytes = bytes;
    bytes = NULL;
fail:
    free(bytes);
    free(words);
    return status;
}

/* ---- merges --------------------------------------------------------------------------------- */

/* True if the token has U+2581 behind another character. */
static bool has_inner_mark(struct token_text text)
{
    while (text.num_bytes >= SPACE_MARK_BYTES &&
           memcmp(text.bytes, SPACE_MARK, SPACE_MARK_BYTES) == 0) {
        text.bytes += SPACE_MARK_BYTES;
        text.num_bytes -= SPACE_MARK_BYTES;
    }
    return memmem(text.bytes, text.num_bytes, SPACE_MARK, SPACE_MARK_BYTES) != NULL;
}

/* Whether a text may be cut before a U+2581 that follows something else: no merge makes a token
 * with one inside, and U+2581 is a symbol itself, no part of a run of unknown characters. */
static bool can_split_at_mark(const struct vocab_builder *builder, const struct merge *merges,
                              size_t num_merges)
{
    if (vocab_builder_find(builder, SPACE_MARK, SPACE_MARK_BYTES) < 0) {
        return false;
    }
    for (size_t i = 0; i < num_merges; i++) {
        if (has_inner_mark(builder->texts[merges[i].merged])) {
            return false;
        }
    }
    return true;
}

enum imbrex_status vocab_builder_finish(struct vocab_builder *builder, const struct merge *merges,
                                        size_t num_merges)
{
    struct imbrex_tokenizer *tokenizer = builder->tokenizer;
    struct byte_alphabet alphabet;
    byte_alphabet_init(&alphabet);
    TRY(build_token_bytes(builder, &alphabet));
    if (tokenizer->is_byte_level || tokenizer->has_byte_fallback) {
        TRY(read_byte_ids(builder, &alphabet));
    }
    if (!tokenizer->is_byte_level) {
        TRY(read_chars(builder));
        tokenizer->splits_at_mark = can_split_at_mark(builder, merges, num_merges);
    }
    if (tokenizer->ignores_merges) {
        TRY(build_words(builder, &alphabet));
    }
    return merge_table_build(builder->path, merges, num_merges, &tokenizer->merges, builder->err);
}
