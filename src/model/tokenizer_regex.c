/* SPDX-License-Identifier: Apache-2.0 */
/* Regular expressions of Split pre-tokenizers that are none of those written out by hand. The files
 * are written for Oniguruma (Ruby's syntax), matched here by PCRE2. Most of the two languages is
 * the same; an expression is translated piece by piece, so that each construct is one that is known
 * to mean the same, is spelled differently, or is refused by name:
 *
 *   \s \S       lists: PCRE2 counts U+180E in
 *   \d \p{..}   with what Unicode 15 and 16 added; \p{Han} as the script itself, not its extensions
 *   \v \uHHHH   another spelling
 *   x{1,3}+     greedy and repeated in Ruby, possessive in Perl
 *   refused     \w \b \h \R \X \K \G, back references, named and conditional groups, sets within
 *               sets, "." that takes line breaks, what folds to more than one character under (?i)
 *
 * PCRE2's own limits hold for one match, and do not see how far a repeated set runs: an expression
 * that looks ahead to the text's end at each place would stay below them and take quadratic time.
 * So the translation puts a callout behind each repeat and in front of each group, and what lies
 * between two of them is counted, over all matches of a text. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <inttypes.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"

#define MAX_EXPRESSION_BYTES 4096
#define MAX_DEPTH 64
#define MAX_REPEATS 1000 /* also of all smallest numbers of an expression together */

/* What the matches of a text may take, in bytes that are passed over; a callout counts as several,
 * about as long as it takes. */
#define TEXT_STEPS UINT64_C(10000000)
#define TEXT_STEPS_PER_BYTE UINT64_C(512)
#define CALLOUT_STEPS 16u
#define CALLOUT "(?C)"
#define MATCH_MIB 128u            /* of memory that one match may take */
#define MATCH_BYTES ((size_t)256) /* about what PCRE2 allocates for one, for messages */
#define JIT_STACK_MIN_BYTES ((size_t)32 << 10)

#define SHOWN_BYTES 64 /* of an expression, in messages */

struct split_regex {
    pcre2_code *code;
    char shown[SHOWN_BYTES]; /* how the expression begins */
};

/* ---- translation ---------------------------------------------------------------------------- */

/* What a group began with; restored at its end. */
struct group {
    size_t begin; /* in the output */
    bool folds;
};

struct translator {
    const char *path, *field, *expression;
    size_t at;
    struct byte_buffer output;
    struct group groups[MAX_DEPTH];
    int depth;
    bool folds; /* case-insensitive */
    /* The piece that a quantifier would repeat. */
    bool has_atom;
    size_t atom_begin;
    char last_letter; /* the literal before, while folding */
    long num_repeats; /* that must be there, of all intervals: what is passed over before one fails
                         is seen by no callout */
    struct imbrex_error *err;
};

static enum imbrex_status refuse(const struct translator *translator, const char *what)
{
    return error_set(translator->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: %s: expected a regular expression that PCRE2 reads as Oniguruma does, "
                     "found %s at byte %zu of \"%.60s\"",
                     translator->path, translator->field, what, translator->at,
                     translator->expression);
}

static enum imbrex_status put(struct translator *translator, const char *text)
{
    return byte_buffer_append(&translator->output, text, strlen(text), translator->err);
}

static enum imbrex_status put_code_point(struct translator *translator, uint32_t code_point)
{
    char text[16];
    snprintf(text, sizeof(text), "\\x{%x}", code_point);
    return put(translator, text);
}

static enum imbrex_status put_range(struct translator *translator, uint32_t first, uint32_t last)
{
    TRY(put_code_point(translator, first));
    if (last > first) {
        TRY(put(translator, "-"));
        TRY(put_code_point(translator, last));
    }
    return IMBREX_STATUS_OK;
}

static void begin_atom(struct translator *translator)
{
    translator->has_atom = true;
    translator->atom_begin = translator->output.num_bytes;
    translator->last_letter = '\0';
}

/* White_Space, and what lies between. */
static const struct {
    uint32_t first, last;
} space_ranges[] = {
    {0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
    {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000},
};

static enum imbrex_status put_spaces(struct translator *translator, bool is_negated)
{
    uint32_t next = 0;
    for (size_t i = 0; i < sizeof(space_ranges) / sizeof(space_ranges[0]); i++) {
        if (!is_negated) {
            TRY(put_range(translator, space_ranges[i].first, space_ranges[i].last));
        } else if (next < space_ranges[i].first) {
            TRY(put_range(translator, next, space_ranges[i].first - 1));
        }
        next = space_ranges[i].last + 1;
    }
    /* A range may not begin or end in the surrogates, but may have them inside. */
    return is_negated ? put_range(translator, next, 0x10ffff) : IMBREX_STATUS_OK;
}

/* General categories: one letter or two. The unassigned are left out: which they are depends on the
 * version. */
static bool is_category(const char *name)
{
    static const char *const names[] = {
        "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",
        "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
        "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "Cc", "Cf",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* The inside of a set that is this property. */
static enum imbrex_status put_property(struct translator *translator, const char *name)
{
    char text[16];
    if (strcmp(name, "Han") == 0) {
        /* With the ideographs of Unicode 15.0 and 15.1. */
        return put(translator, "\\p{sc:Han}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}");
    }
    if (!is_category(name)) {
        return refuse(translator, "a property that is neither a general category nor Han");
    }
    bool depends_on_case = name[0] == 'L' && name[1] != '\0' && name[1] != 'm' && name[1] != 'o';
    if (translator->folds && depends_on_case) {
        return refuse(translator, "a property of upper or lower case under (?i)");
    }
    snprintf(text, sizeof(text), "\\p{%s}", name);
    TRY(put(translator, text));
    for (size_t i = 0; i < unicode_num_later_ranges; i++) {
        const struct unicode_later_range *range = &unicode_later_ranges[i];
        if (strncmp(range->category, name, strlen(name)) == 0) {
            TRY(put_range(translator, range->first, range->last));
        }
    }
    return IMBREX_STATUS_OK;
}

/* Reads "{Name}" or "{^Name}" behind \p or \P. */
static enum imbrex_status read_property(struct translator *translator, char *name, size_t max_bytes,
                                        bool *is_negated)
{
    const char *text = translator->expression + translator->at;
    if (*text != '{') {
        return refuse(translator, "\\p without braces");
    }
    text++;
    if (*text == '^') {
        *is_negated = !*is_negated;
        text++;
    }
    size_t num_bytes = strcspn(text, "}");
    if (text[num_bytes] == '\0' || num_bytes == 0 || num_bytes >= max_bytes) {
        return refuse(translator, "a property that is neither a general category nor Han");
    }
    memcpy(name, text, num_bytes);
    name[num_bytes] = '\0';
    translator->at = (size_t)(text - translator->expression) + num_bytes + 1;
    return IMBREX_STATUS_OK;
}

static int hex_value(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* Reads the digits behind \x or \u. */
static enum imbrex_status read_code_point(struct translator *translator, char kind,
                                          uint32_t *code_point)
{
    const char *text = translator->expression + translator->at;
    bool is_braced = kind == 'x' && *text == '{';
    text += is_braced ? 1 : 0;
    int num_digits = 0, max_digits = is_braced ? 6 : kind == 'x' ? 2 : 4;
    uint32_t value = 0;
    while (num_digits < max_digits && hex_value(*text) >= 0) {
        value = value << 4 | (uint32_t)hex_value(*text++);
        num_digits++;
    }
    bool is_whole = is_braced ? num_digits > 0 && *text == '}' : num_digits == max_digits;
    bool is_byte = kind == 'x' && !is_braced && value >= 0x80;
    if (!is_whole || is_byte || value > 0x10ffff || (value >= 0xd800 && value <= 0xdfff)) {
        return refuse(translator, "an escape that is no code point");
    }
    translator->at = (size_t)(text - translator->expression) + (is_braced ? 1 : 0);
    *code_point = value;
    return IMBREX_STATUS_OK;
}

/* An escape in or outside a set; *is_set tells whether it stands for more than one character. */
static enum imbrex_status put_escape(struct translator *translator, bool in_set, bool *is_set)
{
    static const char controls[] = "nrtfae", control_codes[] = "\n\r\t\f\a\033";
    char letter = translator->expression[translator->at + 1];
    const char *control = letter == '\0' ? NULL : strchr(controls, letter);
    translator->at += letter == '\0' ? 1 : 2;
    *is_set = false;
    if (control != NULL) {
        return put_code_point(translator, (uint32_t)control_codes[control - controls]);
    }
    char name[8] = "Nd";
    bool is_negated = letter == 'S' || letter == 'D' || letter == 'P';
    switch (letter) {
    case 'v':
        return put_code_point(translator, '\v');
    case 'x':
    case 'u': {
        uint32_t code_point = 0;
        TRY(read_code_point(translator, letter, &code_point));
        if (translator->folds && code_point >= 0x80) {
            return refuse(translator, "a character beyond ASCII under (?i)");
        }
        return put_code_point(translator, code_point);
    }
    case 's':
    case 'S':
    case 'd':
    case 'D':
    case 'p':
    case 'P':
        *is_set = true;
        break;
    case 'A':
    case 'z':
        if (!in_set) {
            translator->has_atom = false;
            return put(translator, letter == 'A' ? "\\A" : "\\z");
        }
        return refuse(translator, "an anchor in a set");
    default: {
        bool is_punctuation = letter >= ' ' && letter < 0x7f && strchr("_`<>", letter) == NULL &&
                              hex_value(letter) < 0 && !(letter >= 'A' && letter <= 'Z') &&
                              !(letter >= 'a' && letter <= 'z');
        if (!is_punctuation) {
            return refuse(translator, "an escape that the two read differently");
        }
        const char text[] = {'\\', letter, '\0'};
        return put(translator, text);
    }
    }
    bool is_space = letter == 's' || letter == 'S';
    if (letter == 'p' || letter == 'P') {
        TRY(read_property(translator, name, sizeof(name), &is_negated));
    }
    if (in_set) {
        if (is_space) {
            return put_spaces(translator, is_negated);
        }
        return is_negated ? refuse(translator, "a negated property in a set")
                          : put_property(translator, name);
    }
    TRY(put(translator, is_negated ? "[^" : "["));
    TRY(is_space ? put_spaces(translator, false) : put_property(translator, name));
    return put(translator, "]");
}

/* A set, "[" to "]". */
static enum imbrex_status put_set(struct translator *translator)
{
    const char *expression = translator->expression;
    begin_atom(translator);
    TRY(put(translator, "["));
    translator->at++;
    if (expression[translator->at] == '^') {
        TRY(put(translator, "^"));
        translator->at++;
    }
    bool is_first = true, was_set = false, was_dash = false;
    for (;; is_first = false) {
        char letter = expression[translator->at];
        bool is_set = false, is_dash = false;
        if (letter == '\0') {
            return refuse(translator, "a set without an end");
        }
        if (letter == ']' && !is_first) {
            break;
        }
        if (letter == ']' || letter == '[' || strncmp(expression + translator->at, "&&", 2) == 0) {
            return refuse(translator, "a set within a set");
        }
        if (letter == '\\') {
            TRY(put_escape(translator, true, &is_set));
        } else {
            if ((unsigned char)letter >= 0x80 && translator->folds) {
                return refuse(translator, "a character beyond ASCII under (?i)");
            }
            is_dash = letter == '-' && !is_first && expression[translator->at + 1] != ']';
            TRY(byte_buffer_append(&translator->output, &letter, 1, translator->err));
            translator->at++;
        }
        if ((is_set && was_dash) || (is_dash && was_set)) {
            return refuse(translator, "a range from or to a set");
        }
        was_set = is_set;
        was_dash = is_dash;
    }
    translator->at++;
    return put(translator, "]");
}

static enum imbrex_status begin_group(struct translator *translator)
{
    static const char *const starts[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"};
    const char *text = translator->expression + translator->at;
    bool folds = translator->folds;
    size_t num_bytes = 1;
    if (text[1] == '*') {
        return refuse(translator, "\"(*\"");
    }
    if (text[1] == '?') {
        num_bytes = 0;
        for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
            if (strncmp(text, starts[i], strlen(starts[i])) == 0) {
                num_bytes = strlen(starts[i]);
            }
        }
        if (strncmp(text, "(?i:", 4) == 0 || strncmp(text, "(?-i:", 5) == 0) {
            folds = text[2] == 'i';
            num_bytes = folds ? 4 : 5;
        }
    }
    if (strncmp(text, "(?i)", 4) == 0 && translator->at == 0) {
        translator->folds = true;
        translator->at = 4;
        return put(translator, "(?i)");
    }
    if (num_bytes == 0) {
        return refuse(translator, "a group of this kind");
    }
    if (translator->depth == MAX_DEPTH) {
        return refuse(translator, "too many groups in each other");
    }
    translator->groups[translator->depth++] =
        (struct group){.begin = translator->output.num_bytes, .folds = translator->folds};
    translator->folds = folds;
    translator->has_atom = false;
    translator->at += num_bytes;
    TRY(byte_buffer_append(&translator->output, text, num_bytes, translator->err));
    return put(translator, CALLOUT);
}

static enum imbrex_status end_group(struct translator *translator)
{
    if (translator->depth == 0) {
        return refuse(translator, "\")\" without a group");
    }
    struct group group = translator->groups[--translator->depth];
    translator->folds = group.folds;
    TRY(put(translator, ")"));
    translator->at++;
    translator->has_atom = true;
    translator->atom_begin = group.begin;
    return IMBREX_STATUS_OK;
}

/* Reads "{n}", "{n,}" or "{n,m}", n into *min_repeats. */
static bool read_interval(const char *text, size_t *num_bytes, long *min_repeats)
{
    size_t at = 1;
    *min_repeats = strtol(text + at, NULL, 10);
    for (int number = 0; number < 2; number++) {
        size_t num_digits = strspn(text + at, "0123456789");
        if ((number == 0 && num_digits == 0) || num_digits > 4 ||
            (num_digits > 0 && strtol(text + at, NULL, 10) > MAX_REPEATS)) {
            return false;
        }
        at += num_digits;
        if (number == 0 && text[at] == ',') {
            at++;
        } else {
            break;
        }
    }
    *num_bytes = at + 1;
    return text[at] == '}';
}

static enum imbrex_status put_quantifier(struct translator *translator)
{
    const char *text = translator->expression + translator->at;
    size_t num_bytes = 1;
    bool is_interval = *text == '{';
    long min_repeats = 0;
    if (is_interval && !read_interval(text, &num_bytes, &min_repeats)) {
        return refuse(translator, "\"{\" that is no interval");
    }
    translator->num_repeats += min_repeats;
    if (translator->num_repeats > MAX_REPEATS) {
        return refuse(translator, "too many repeats");
    }
    if (!translator->has_atom) {
        return refuse(translator, "a quantifier with nothing to repeat");
    }
    char suffix = text[num_bytes];
    bool is_repeated = is_interval && suffix == '+';
    if (is_interval && suffix == '?') {
        return refuse(translator, "\"?\" behind an interval");
    }
    if (is_repeated && min_repeats == 1) {
        /* One to three, again and again, is one or more: the same matches, tried in the same order,
         * and no loop over groups that has to remember each of them. */
        num_bytes++;
        TRY(put(translator, "+"));
    } else if (is_repeated) {
        TRY(byte_buffer_append(&translator->output, text, num_bytes, translator->err));
        TRY(byte_buffer_reserve(&translator->output, 3, translator->err));
        char *atom = translator->output.bytes + translator->atom_begin;
        memmove(atom + 3, atom, translator->output.num_bytes - translator->atom_begin);
        memcpy(atom, "(?:", 3);
        translator->output.num_bytes += 3;
        TRY(put(translator, ")+"));
        num_bytes++;
    } else {
        num_bytes += suffix == '?' || suffix == '+';
        TRY(byte_buffer_append(&translator->output, text, num_bytes, translator->err));
    }
    translator->at += num_bytes;
    translator->has_atom = false;
    translator->last_letter = '\0';
    return *text == '?' ? IMBREX_STATUS_OK : put(translator, CALLOUT);
}

static enum imbrex_status put_literal(struct translator *translator)
{
    static const char *const folded_pairs[] = {"ff", "fi", "fl", "ss", "st"};
    const char *text = translator->expression + translator->at;
    struct utf8_step step = utf8_next(text, strlen(text));
    char last_letter = translator->last_letter, letter = '\0';
    if (translator->folds) {
        if (step.code_point >= 0x80) {
            return refuse(translator, "a character beyond ASCII under (?i)");
        }
        letter = *text >= 'A' && *text <= 'Z' ? (char)(*text | 0x20) : *text;
        for (size_t i = 0; i < sizeof(folded_pairs) / sizeof(folded_pairs[0]); i++) {
            if (last_letter == folded_pairs[i][0] && letter == folded_pairs[i][1]) {
                return refuse(translator,
                              "letters that also fold to a single character, under (?i)");
            }
        }
    }
    begin_atom(translator);
    translator->last_letter = letter;
    translator->at += step.num_bytes;
    return byte_buffer_append(&translator->output, text, step.num_bytes, translator->err);
}

static enum imbrex_status translate_next(struct translator *translator)
{
    char letter = translator->expression[translator->at];
    bool is_set;
    switch (letter) {
    case '(':
        return begin_group(translator);
    case ')':
        return end_group(translator);
    case '[':
        return put_set(translator);
    case '\\':
        begin_atom(translator);
        return put_escape(translator, false, &is_set);
    case '*':
    case '+':
    case '?':
    case '{':
        return put_quantifier(translator);
    case '}':
    case ']':
        return refuse(translator, "a closing bracket without its opening one");
    case '^':
    case '$':
    case '|':
        translator->has_atom = false;
        translator->last_letter = '\0';
        translator->at++;
        return byte_buffer_append(&translator->output, &letter, 1, translator->err);
    case '.':
        begin_atom(translator);
        translator->at++;
        return put(translator, "[^\\n]");
    default:
        return put_literal(translator);
    }
}

static enum imbrex_status translate(struct translator *translator)
{
    size_t num_bytes = strlen(translator->expression);
    if (num_bytes == 0 || num_bytes > MAX_EXPRESSION_BYTES) {
        return error_set(translator->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: expected 1 to %d bytes, found %zu", translator->path,
                         translator->field, MAX_EXPRESSION_BYTES, num_bytes);
    }
    while (translator->at < num_bytes) {
        TRY(translate_next(translator));
    }
    return translator->depth == 0 ? IMBREX_STATUS_OK : refuse(translator, "a group without an end");
}

/* ---- compiling ------------------------------------------------------------------------------ */

static enum imbrex_status compile(const struct translator *translator, pcre2_code **code)
{
    const struct byte_buffer *output = &translator->output;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context == NULL) {
        return error_out_of_memory(translator->err, "regular expression", output->num_bytes);
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(context, 2 * MAX_DEPTH);
    int error;
    PCRE2_SIZE offset;
    /* Ruby's ^ and $ are those of lines. */
    const uint32_t options =
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
    *code = pcre2_compile((PCRE2_SPTR)output->bytes, output->num_bytes, options, &error, &offset,
                          context);
    pcre2_compile_context_free(context);
    if (*code == NULL && error == PCRE2_ERROR_HEAP_FAILED) {
        return error_out_of_memory(translator->err, "regular expression", output->num_bytes);
    }
    if (*code == NULL) {
        char reason[128];
        pcre2_get_error_message(error, (PCRE2_UCHAR *)reason, sizeof(reason));
        return error_set(translator->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: expected a regular expression, found \"%.60s\": %s",
                         translator->path, translator->field, translator->expression, reason);
    }
    /* Without it, where the system forbids code made at run time, the same matches take longer. */
    (void)pcre2_jit_compile(*code, PCRE2_JIT_COMPLETE);
    return IMBREX_STATUS_OK;
}

enum imbrex_status split_regex_create(const char *path, const char *field, const char *expression,
                                      struct split_regex **regex, struct imbrex_error *err)
{
    struct translator translator = {
        .path = path, .field = field, .expression = expression, .err = err};
    pcre2_code *code = NULL;
    enum imbrex_status status;
    TRY_OR_FAIL(translate(&translator));
    TRY_OR_FAIL(compile(&translator, &code));
    struct split_regex *built = malloc(sizeof(*built));
    if (built == NULL) {
        status = error_out_of_memory(err, "regular expression", sizeof(*built));
        goto fail;
    }
    built->code = code;
    snprintf(built->shown, sizeof(built->shown), "%s", expression);
    *regex = built;
    free(translator.output.bytes);
    return IMBREX_STATUS_OK;
fail:
    pcre2_code_free(code);
    free(translator.output.bytes);
    return status;
}

void split_regex_destroy(struct split_regex *regex)
{
    if (regex != NULL) {
        pcre2_code_free(regex->code);
        free(regex);
    }
}

/* ---- matching ------------------------------------------------------------------------------- */

/* Counts what has been passed over since the last callout of this match, in either direction. */
static int count_steps(pcre2_callout_block *callout, void *context)
{
    struct split_regex_scratch *scratch = context;
    size_t at = callout->current_position, last = scratch->position;
    uint64_t num_steps = CALLOUT_STEPS + (at > last ? at - last : last - at);
    scratch->position = at;
    scratch->steps_left -= num_steps < scratch->steps_left ? num_steps : scratch->steps_left;
    return scratch->steps_left == 0 ? PCRE2_ERROR_CALLOUT : 0;
}

static enum imbrex_status scratch_prepare(const struct split_regex *regex,
                                          struct split_regex_scratch *scratch,
                                          struct imbrex_error *err)
{
    if (scratch->match_data != NULL) {
        return IMBREX_STATUS_OK;
    }
    scratch->match_data = pcre2_match_data_create_from_pattern(regex->code, NULL);
    scratch->context = pcre2_match_context_create(NULL);
    if (scratch->match_data == NULL || scratch->context == NULL) {
        split_regex_scratch_release(scratch);
        return error_out_of_memory(err, "matching of a regular expression", MATCH_BYTES);
    }
    pcre2_set_heap_limit(scratch->context, MATCH_MIB << 10);
    scratch->max_steps = scratch->steps_left = TEXT_STEPS;
    /* Without it, compiled expressions have the 32 KiB that PCRE2 takes of the caller's stack. */
    scratch->jit_stack = pcre2_jit_stack_create(JIT_STACK_MIN_BYTES, (size_t)MATCH_MIB << 20, NULL);
    if (scratch->jit_stack != NULL) {
        pcre2_jit_stack_assign(scratch->context, NULL, scratch->jit_stack);
    }
    return IMBREX_STATUS_OK;
}

void split_regex_scratch_release(struct split_regex_scratch *scratch)
{
    pcre2_match_data_free(scratch->match_data);
    pcre2_match_context_free(scratch->context);
    pcre2_jit_stack_free(scratch->jit_stack);
    *scratch = (struct split_regex_scratch){0};
}

enum imbrex_status split_regex_begin(const struct split_regex *regex,
                                     struct split_regex_scratch *scratch, size_t num_bytes,
                                     struct imbrex_error *err)
{
    TRY(scratch_prepare(regex, scratch, err));
    scratch->max_steps += TEXT_STEPS_PER_BYTE * num_bytes;
    scratch->steps_left += TEXT_STEPS_PER_BYTE * num_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status refuse_text(const struct split_regex *regex, size_t num_bytes,
                                      const char *limit, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_CAPACITY,
                     "text: expected one that the tokenizer's regular expression \"%s\" splits "
                     "within %s, found %zu bytes that take more",
                     regex->shown, limit, num_bytes);
}

enum imbrex_status split_regex_match(const struct split_regex *regex,
                                     struct split_regex_scratch *scratch, const char *text,
                                     size_t num_bytes, size_t from, bool *is_found, size_t *begin,
                                     size_t *end, struct imbrex_error *err)
{
    char limit[64];
    scratch->position = from;
    pcre2_set_callout(scratch->context, count_steps, scratch);
    pcre2_set_match_limit(scratch->context, scratch->steps_left < UINT32_MAX
                                                ? (uint32_t)scratch->steps_left
                                                : UINT32_MAX);
    int result = pcre2_match(regex->code, (PCRE2_SPTR)text, num_bytes, from, PCRE2_NO_UTF_CHECK,
                             scratch->match_data, scratch->context);
    if (result == PCRE2_ERROR_NOMATCH) {
        *is_found = false;
        return IMBREX_STATUS_OK;
    }
    if (result >= 0) {
        const PCRE2_SIZE *bounds = pcre2_get_ovector_pointer(scratch->match_data);
        *is_found = true;
        *begin = bounds[0];
        *end = bounds[1];
        return IMBREX_STATUS_OK;
    }
    switch (result) {
    case PCRE2_ERROR_NOMEMORY:
        return error_out_of_memory(err, "matching of a regular expression", num_bytes);
    case PCRE2_ERROR_CALLOUT:
    case PCRE2_ERROR_MATCHLIMIT:
        snprintf(limit, sizeof(limit), "%" PRIu64 " steps", scratch->max_steps);
        return refuse_text(regex, num_bytes, limit, err);
    case PCRE2_ERROR_DEPTHLIMIT:
    case PCRE2_ERROR_HEAPLIMIT:
    case PCRE2_ERROR_JIT_STACKLIMIT:
        snprintf(limit, sizeof(limit), "%u MiB of memory", MATCH_MIB);
        return refuse_text(regex, num_bytes, limit, err);
    default:
        return error_set(err, IMBREX_STATUS_INTERNAL, "PCRE2: error %d", result);
    }
}
