/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex tune: which products are measured. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/input.h"
#include "cli/number_list.h"
#include "cli/output.h"
#include "cli/tune.h"

#define DEFAULT_ROWS "128,256,512,1024,2048,4096"
#define MAX_FILE_BYTES ((size_t)1 << 20)
#define MAX_WORD_BYTES 64

static const struct tune_settings tune_defaults = {
    .shapes = "qwen2.5",
    .rows = DEFAULT_ROWS,
    .near = {.value = 1.25},
};

static const struct option_choice ops_choices[] = {{"both", TUNE_OPS_BOTH},
                                                   {"gemm_swiglu", TUNE_OPS_GEMM_SWIGLU},
                                                   {"gemm", TUNE_OPS_GEMM},
                                                   {NULL, 0}};

static const struct option_spec tune_options[] = {
    {.long_name = "device",
     .argument = "NAME",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "cuda, or cuda:1 for the second GPU",
     .default_text = "cuda",
     .offset = offsetof(struct tune_settings, device)},
    {.long_name = "shapes",
     .argument = "LIST|FILE",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "qwen2.5 (its seven models), some of them (7B,72B), HxI: hidden_size x "
             "intermediate_size; or a file: lines with one of these, or with OP M N K, # begins a "
             "comment; or a JSON array of such strings and of objects with op, m, n and k",
     .offset = offsetof(struct tune_settings, shapes)},
    {.long_name = "m",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "numbers of tokens; up to 63 fewer take the same plan",
     .offset = offsetof(struct tune_settings, rows)},
    {.long_name = "op",
     .argument = "NAME",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "gemm_swiglu (gate_proj, up_proj and the activation), gemm (down_proj), or both",
     .choices = ops_choices,
     .offset = offsetof(struct tune_settings, ops)},
    {.long_name = "near",
     .argument = "FACTOR",
     .type = OPTION_TYPE_REAL,
     .group = "How",
     .help = "measure plans that are expected to take less than this times the least",
     .min = 1,
     .max = 100,
     .offset = offsetof(struct tune_settings, near)},
    {.long_name = "seconds",
     .argument = "S",
     .type = OPTION_TYPE_REAL,
     .group = "How",
     .help = "begin no product after so long; the next run goes on",
     .default_text = "no limit",
     .min = 0,
     .max = 1e9,
     .above_min = true,
     .offset = offsetof(struct tune_settings, seconds)},
    {.long_name = "again",
     .type = OPTION_TYPE_FLAG,
     .group = "How",
     .help = "forget what the table has",
     .offset = offsetof(struct tune_settings, again)},
    {.long_name = "dry-run",
     .type = OPTION_TYPE_FLAG,
     .group = "How",
     .help = "list what would be measured",
     .offset = offsetof(struct tune_settings, dry_run)},
    {.long_name = "output",
     .short_name = 'o',
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "How",
     .help = "the table",
     .default_text = "one for the card in $XDG_CACHE_HOME/imbrex/tune, where all commands look",
     .offset = offsetof(struct tune_settings, output)},
};

/* ---- lists ---- */

/* Of what is read. */
struct tune_reader {
    const struct tune_settings *settings;
    struct number_list rows;
    struct tune_list *list;
    const char *path;
};

static bool is_same_item(const struct tune_item *a, const struct tune_item *b)
{
    return a->op == b->op && a->m == b->m && a->shape.hidden_size == b->shape.hidden_size &&
           a->shape.intermediate_size == b->shape.intermediate_size;
}

/* What is there already is not measured twice. */
static int add_item(struct tune_list *list, const struct tune_item *item)
{
    for (int i = 0; i < list->count; i++) {
        if (is_same_item(&list->items[i], item)) {
            return EXIT_CODE_OK;
        }
    }
    if (list->count == TUNE_MAX_ITEMS) {
        output_error("tune: --shapes: expected at most %d products, found more", TUNE_MAX_ITEMS);
        return EXIT_CODE_INPUT;
    }
    if (list->count == list->capacity) {
        int capacity = list->capacity == 0 ? 64 : 2 * list->capacity;
        struct tune_item *items = realloc(list->items, (size_t)capacity * sizeof(items[0]));
        if (items == NULL) {
            return output_out_of_memory();
        }
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = *item;
    return EXIT_CODE_OK;
}

/* A model's products. */
static int add_shape(struct tune_reader *reader, const struct bench_shape *shape)
{
    static const enum imbrex_kernel_op ops[] = {IMBREX_KERNEL_OP_GEMM_SWIGLU,
                                                IMBREX_KERNEL_OP_GEMM};
    int64_t asked = reader->settings->ops.value;
    int exit_code = EXIT_CODE_OK;

    for (int i = 0; i < 2; i++) {
        if (asked != TUNE_OPS_BOTH && (asked == TUNE_OPS_GEMM) != (i == 1)) {
            continue;
        }
        for (int32_t j = 0; exit_code == EXIT_CODE_OK && j < reader->rows.count; j++) {
            struct tune_item item = {.op = ops[i], .shape = *shape, .m = reader->rows.values[j]};
            exit_code = add_item(reader->list, &item);
        }
    }
    return exit_code;
}

/* qwen2.5, a model of it or HxI. *is_known: it is one of them. */
static int add_word(struct tune_reader *reader, const char *word, bool *is_known)
{
    struct bench_shape shapes[BENCH_MAX_SHAPES];
    int num_shapes = bench_shapes_of_word(word, shapes), exit_code = EXIT_CODE_OK;

    *is_known = num_shapes > 0;
    for (int i = 0; exit_code == EXIT_CODE_OK && i < num_shapes; i++) {
        exit_code = add_shape(reader, &shapes[i]);
    }
    return exit_code;
}

/* D[m, n] over k. */
static int add_product(struct tune_reader *reader, bool is_swiglu, int32_t m, int32_t n, int32_t k)
{
    struct tune_item item = {
        .op = is_swiglu ? IMBREX_KERNEL_OP_GEMM_SWIGLU : IMBREX_KERNEL_OP_GEMM,
        .shape = {.hidden_size = is_swiglu ? k : n, .intermediate_size = is_swiglu ? n : k},
        .m = m,
    };
    snprintf(item.shape.name, sizeof(item.shape.name), "%dx%d", (int)item.shape.hidden_size,
             (int)item.shape.intermediate_size);
    return add_item(reader->list, &item);
}

/* ---- files ---- */

static bool parse_op(const char *word, bool *is_swiglu)
{
    *is_swiglu = strcmp(word, "gemm_swiglu") == 0;
    return *is_swiglu || strcmp(word, "gemm") == 0;
}

static bool parse_number(const char *word, int32_t *number)
{
    int64_t value = 0;
    for (const char *c = word; *c != '\0'; c++) {
        if (*c < '0' || *c > '9' || value > BENCH_MAX_SIDE) {
            return false;
        }
        value = 10 * value + (*c - '0');
    }
    *number = (int32_t)value;
    return value >= 1 && value <= BENCH_MAX_SIDE;
}

static int refuse_line(const struct tune_reader *reader, size_t line_number, const char *line,
                       size_t num_bytes)
{
    output_error("%s: line %zu: expected a model of qwen2.5 (7B), two whole numbers from 1 to %d "
                 "(3584x18944), or gemm_swiglu or gemm and M N K, found \"%.*s\"",
                 input_display_name(reader->path), line_number, BENCH_MAX_SIDE,
                 (int)(num_bytes < 80 ? num_bytes : 80), line);
    return EXIT_CODE_INPUT;
}

static int read_line(void *user, const char *line, size_t num_bytes, size_t line_number)
{
    struct tune_reader *reader = user;
    char words[4][MAX_WORD_BYTES];
    int32_t sides[3];
    int num_words = 0;

    for (size_t at = 0; at < num_bytes && line[at] != '#';) {
        size_t end = at;
        while (end < num_bytes && line[end] != '#' && !isspace((unsigned char)line[end])) {
            end++;
        }
        if (end == at) {
            at++;
            continue;
        }
        if (num_words == 4 || end - at >= MAX_WORD_BYTES) {
            return refuse_line(reader, line_number, line, num_bytes);
        }
        memcpy(words[num_words], line + at, end - at);
        words[num_words++][end - at] = '\0';
        at = end;
    }
    if (num_words == 0) {
        return EXIT_CODE_OK;
    }
    bool is_swiglu = false, is_known = false;
    if (num_words == 1) {
        int exit_code = add_word(reader, words[0], &is_known);
        return exit_code == EXIT_CODE_OK && !is_known
                   ? refuse_line(reader, line_number, line, num_bytes)
                   : exit_code;
    }
    if (num_words != 4 || !parse_op(words[0], &is_swiglu) || !parse_number(words[1], &sides[0]) ||
        !parse_number(words[2], &sides[1]) || !parse_number(words[3], &sides[2])) {
        return refuse_line(reader, line_number, line, num_bytes);
    }
    return add_product(reader, is_swiglu, sides[0], sides[1], sides[2]);
}

/* found: NULL if it is not there. */
static int refuse_entry(const struct tune_reader *reader, size_t entry_idx, const char *field,
                        const char *expected, const json_t *found)
{
    char text[INPUT_SHOWN_BYTES];

    output_error("%s: shapes[%zu]%s%s: expected %s, found %s", input_display_name(reader->path),
                 entry_idx, field[0] != '\0' ? ": " : "", field, expected,
                 input_show_json(found, text));
    return EXIT_CODE_INPUT;
}

static int read_entry(struct tune_reader *reader, size_t entry_idx, const json_t *entry)
{
    static const char *const fields[] = {"m", "n", "k"};
    int32_t sides[3];
    bool is_swiglu = false, is_known = false;

    if (json_is_string(entry)) {
        int exit_code = add_word(reader, json_string_value(entry), &is_known);
        return exit_code == EXIT_CODE_OK && !is_known
                   ? refuse_entry(reader, entry_idx, "",
                                  "a model of qwen2.5 (7B) or two whole numbers (3584x18944)",
                                  entry)
                   : exit_code;
    }
    if (!json_is_object(entry)) {
        return refuse_entry(reader, entry_idx, "", "a string, or an object with op, m, n and k",
                            entry);
    }
    const char *op = json_string_value(json_object_get(entry, "op"));
    if (op == NULL || !parse_op(op, &is_swiglu)) {
        return refuse_entry(reader, entry_idx, "op", "\"gemm_swiglu\" or \"gemm\"",
                            json_object_get(entry, "op"));
    }
    for (int i = 0; i < 3; i++) {
        const json_t *value = json_object_get(entry, fields[i]);
        if (!json_is_integer(value) || json_integer_value(value) < 1 ||
            json_integer_value(value) > BENCH_MAX_SIDE) {
            return refuse_entry(reader, entry_idx, fields[i], "a whole number from 1 to 16777216",
                                value);
        }
        sides[i] = (int32_t)json_integer_value(value);
    }
    return add_product(reader, is_swiglu, sides[0], sides[1], sides[2]);
}

static int read_json(struct tune_reader *reader, const char *text, size_t num_bytes)
{
    json_error_t error;
    json_t *root = json_loadb(text, num_bytes, JSON_REJECT_DUPLICATES, &error);
    int exit_code = EXIT_CODE_OK;

    if (root == NULL) {
        output_error("%s:%d:%d: JSON: %s", input_display_name(reader->path), error.line,
                     error.column, error.text);
        return EXIT_CODE_INPUT;
    }
    if (!json_is_array(root)) {
        output_error("%s: expected an array of shapes, found an object",
                     input_display_name(reader->path));
        exit_code = EXIT_CODE_INPUT;
    }
    for (size_t i = 0; exit_code == EXIT_CODE_OK && i < json_array_size(root); i++) {
        exit_code = read_entry(reader, i, json_array_get(root, i));
    }
    json_decref(root);
    return exit_code;
}

static int read_text(struct tune_reader *reader, const char *text)
{
    size_t line_number = 1;
    int exit_code = EXIT_CODE_OK;

    for (const char *line = text; exit_code == EXIT_CODE_OK && *line != '\0'; line_number++) {
        size_t num_bytes = strcspn(line, "\n");
        exit_code = read_line(reader, line, num_bytes, line_number);
        line += num_bytes + (line[num_bytes] == '\n');
    }
    return exit_code;
}

static int read_file(struct tune_reader *reader)
{
    char *text = NULL;
    size_t num_bytes = 0;
    int exit_code = input_read_text(reader->path, MAX_FILE_BYTES, &text, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    size_t begin = strspn(text, " \t\r\n");
    exit_code = text[begin] == '[' || text[begin] == '{' ? read_json(reader, text, num_bytes)
                                                         : read_text(reader, text);
    free(text);
    if (exit_code == EXIT_CODE_OK && reader->list->count == 0) {
        output_error("%s: expected shapes, found none", input_display_name(reader->path));
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

/* ---- command ---- */

/* A list of words, or else a file. */
static int read_shapes(struct tune_reader *reader)
{
    const char *shapes = reader->settings->shapes;
    struct stat status;
    bool is_known = true;
    char *copy = strdup(shapes), *rest = copy, *word = NULL;
    int exit_code = EXIT_CODE_OK;

    if (copy == NULL) {
        return output_out_of_memory();
    }
    while (exit_code == EXIT_CODE_OK && is_known && rest != NULL) {
        word = strsep(&rest, ",");
        exit_code = add_word(reader, word, &is_known);
    }
    if (exit_code == EXIT_CODE_OK && !is_known) {
        if (strcmp(shapes, "-") == 0 || stat(shapes, &status) == 0) {
            reader->list->count = 0;
            reader->path = shapes;
            exit_code = read_file(reader);
        } else {
            output_error("tune: --shapes: expected qwen2.5, one of its models (7B), two whole "
                         "numbers from 1 to %d (3584x18944), or a file, found \"%s\"",
                         BENCH_MAX_SIDE, word);
            exit_code = EXIT_CODE_INPUT;
        }
    }
    free(copy);
    return exit_code;
}

static int measure(const struct tune_settings *settings, int32_t device_idx,
                   const struct tune_list *list)
{
#if IMBREX_CUDA
    return tune_cuda(settings, device_idx, list);
#else
    (void)settings;
    (void)device_idx;
    (void)list;
    output_error("tune: this program was built without the CUDA toolkit");
    return EXIT_CODE_INPUT;
#endif
}

static int run(const void *settings_bytes, const char *model)
{
    const struct tune_settings *settings = settings_bytes;
    struct tune_list list = {.count = 0};
    struct tune_reader reader = {.settings = settings, .list = &list};
    int32_t device_idx = 0;

    if (model != NULL) {
        output_error("tune: expected no model, found \"%s\"; see imbrex help tune", model);
        return EXIT_CODE_INPUT;
    }
    if (!bench_parse_gpu(settings->device, &device_idx)) {
        output_error("tune: --device: expected cuda or cuda:N, found \"%s\"", settings->device);
        return EXIT_CODE_INPUT;
    }
    int exit_code =
        number_list_parse("tune", "--m", settings->rows, 1, BENCH_MAX_SIDE, &reader.rows);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_shapes(&reader);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = measure(settings, device_idx, &list);
    }
    free(list.items);
    return exit_code;
}

const struct command command_tune = {
    .name = "tune",
    .synopsis = "[options]",
    .summary = "measure which kernels are the fastest on this GPU",
    .description =
        "Measures the plans (kernel, clusters, walk) that may be the fastest of each product, "
        "proves them against fp64 first, and keeps those that beat the library's own choice beyond "
        "chance in a table for this card, driver and version, which all commands use from then on. "
        "It can be ended at any time: what was measured is kept, and the next run goes on.",
    .examples = "  imbrex tune\n"
                "  imbrex tune --shapes 7B --m 512,2048 --seconds 60\n"
                "  imbrex tune --shapes my-shapes.txt --dry-run\n"
                "  imbrex tune --shapes 7B -o here.json && imbrex bench ops --tuned here.json\n",
    .options = {tune_options, sizeof(tune_options) / sizeof(tune_options[0])},
    .defaults = &tune_defaults,
    .settings_bytes = sizeof(tune_defaults),
    .run = run,
};
