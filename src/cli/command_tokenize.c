/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex tokenize: text to token ids, of one text or of a stream of JSON lines. Needs a tokenizer
 * only, no weights. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

struct tokenize_settings {
    const char *text, *file, *jsonl, *chat, *tools, *chat_template;
    bool json, no_special, no_parse_special, no_generation_prompt;
};

static const struct tokenize_settings tokenize_defaults = {0};

static const struct option_spec tokenize_options[] = {
    {.long_name = "text",
     .argument = "TEXT",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "the text",
     .offset = offsetof(struct tokenize_settings, text)},
    {.long_name = "file",
     .short_name = 'f',
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "the text of a whole file, its last line end included; - is standard input",
     .offset = offsetof(struct tokenize_settings, file)},
    {.long_name = "jsonl",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "many texts: on each line a JSON object whose \"text\" is a string; gives a JSON "
             "array of ids for each line, as soon as it is read; - is standard input",
     .offset = offsetof(struct tokenize_settings, jsonl)},
    {.long_name = "chat",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Input (one of these)",
     .help = "a conversation, put into the model's chat template: a JSON array of messages such as "
             "{\"role\": \"user\", \"content\": \"Hello\"}; - is standard input",
     .offset = offsetof(struct tokenize_settings, chat)},
    {.long_name = "tools",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Chat",
     .help = "a JSON array of tools for the template",
     .offset = offsetof(struct tokenize_settings, tools)},
    {.long_name = "no-generation-prompt",
     .type = OPTION_TYPE_FLAG,
     .group = "Chat",
     .help = "do not end with the begin of a reply",
     .offset = offsetof(struct tokenize_settings, no_generation_prompt)},
    CONVERSATION_OPTION_TEMPLATE(struct tokenize_settings, "Chat", chat_template),
    {.long_name = "json",
     .type = OPTION_TYPE_FLAG,
     .group = "Output",
     .help = "print a JSON array of ids instead of a line for each token; of a conversation an "
             "object with its \"text\" and its \"ids\"",
     .offset = offsetof(struct tokenize_settings, json)},
    {.long_name = "no-special",
     .type = OPTION_TYPE_FLAG,
     .group = "Special tokens",
     .help = "do not add the begin and end tokens that the tokenizer adds",
     .offset = offsetof(struct tokenize_settings, no_special)},
    {.long_name = "no-parse-special",
     .type = OPTION_TYPE_FLAG,
     .group = "Special tokens",
     .help = "read special tokens written in the text, such as <|im_end|>, as ordinary text",
     .offset = offsetof(struct tokenize_settings, no_parse_special)},
};

struct tokenize_state {
    const struct tokenize_settings *settings;
    struct imbrex_tokenizer *tokenizer;
};

static int tokenize(const struct tokenize_state *state, const char *text, size_t num_bytes,
                    int32_t **token_ids, size_t *num_tokens)
{
    struct imbrex_error err = {0};
    unsigned flags = 0;

    if (!state->settings->no_special) {
        flags |= IMBREX_TOKENIZE_ADD_SPECIAL;
    }
    if (!state->settings->no_parse_special) {
        flags |= IMBREX_TOKENIZE_PARSE_SPECIAL;
    }
    if (imbrex_tokenize(state->tokenizer, text, num_bytes, flags, token_ids, num_tokens, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    return EXIT_CODE_OK;
}

static void print_json_ids(const int32_t *token_ids, size_t num_tokens)
{
    output_printf("[");
    for (size_t i = 0; i < num_tokens; i++) {
        output_printf("%s%" PRId32, i == 0 ? "" : ", ", token_ids[i]);
    }
    output_printf("]");
}

static void print_tokens(const struct imbrex_tokenizer *tokenizer, const int32_t *token_ids,
                         size_t num_tokens)
{
    for (size_t i = 0; i < num_tokens; i++) {
        size_t num_bytes = 0;
        const char *bytes = imbrex_token_bytes(tokenizer, token_ids[i], &num_bytes);
        output_printf("%7" PRId32 "  '", token_ids[i]);
        if (bytes != NULL) {
            output_escaped(bytes, num_bytes);
        }
        output_printf(imbrex_token_is_special(tokenizer, token_ids[i]) ? "' special\n" : "'\n");
    }
    output_printf("%zu token%s\n", num_tokens, output_plural((uint64_t)num_tokens));
}

static int tokenize_text(const struct tokenize_state *state, const char *text, size_t num_bytes)
{
    int32_t *token_ids;
    size_t num_tokens;
    int exit_code = tokenize(state, text, num_bytes, &token_ids, &num_tokens);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (state->settings->json) {
        print_json_ids(token_ids, num_tokens);
        output_printf("\n");
    } else {
        print_tokens(state->tokenizer, token_ids, num_tokens);
    }
    imbrex_free(token_ids);
    return EXIT_CODE_OK;
}

static int tokenize_file(const struct tokenize_state *state)
{
    char *text;
    size_t num_bytes;
    int exit_code = input_read_file(state->settings->file, &text, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = tokenize_text(state, text, num_bytes);
    free(text);
    return exit_code;
}

/* An input_line_fn. */
static int tokenize_json_line(void *user, const char *line, size_t num_bytes, size_t line_number)
{
    const struct tokenize_state *state = user;
    const char *path = input_display_name(state->settings->jsonl);
    json_error_t json_error;
    json_t *root = json_loadb(line, num_bytes, JSON_ALLOW_NUL | JSON_DECODE_ANY, &json_error);

    if (root == NULL && json_error_code(&json_error) == json_error_out_of_memory) {
        output_error("%s: line %zu: out of memory", path, line_number);
        return EXIT_CODE_FAILURE;
    }
    if (root == NULL) {
        output_error("%s: line %zu: expected a JSON object, found: %s", path, line_number,
                     json_error.text);
        return EXIT_CODE_INPUT;
    }
    /* Of anything but an object, no member is found. */
    const json_t *text = json_object_get(root, "text");
    if (!json_is_string(text)) {
        const char *found = !json_is_object(root) ? "no object"
                            : text == NULL        ? "an object without it"
                                                  : "another type";
        output_error("%s: line %zu: text: expected a JSON object with a string \"text\", found %s",
                     path, line_number, found);
        json_decref(root);
        return EXIT_CODE_INPUT;
    }

    int32_t *token_ids;
    size_t num_tokens;
    int exit_code =
        tokenize(state, json_string_value(text), json_string_length(text), &token_ids, &num_tokens);
    json_decref(root);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    print_json_ids(token_ids, num_tokens);
    output_printf("\n");
    imbrex_free(token_ids);
    /* Whoever feeds us through a pipe may wait for this line; and output nobody reads ends us. */
    return output_flush() ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

/* ---- conversations -------------------------------------------------------------------------- */

static int print_json_chat(const char *text, size_t text_bytes, const int32_t *token_ids,
                           size_t num_tokens)
{
    json_t *string = json_stringn(text, text_bytes);
    char *quoted = string != NULL ? json_dumps(string, JSON_ENCODE_ANY) : NULL;

    json_decref(string);
    if (quoted == NULL) {
        return output_out_of_memory();
    }
    output_printf("{\"text\": %s, \"ids\": ", quoted);
    print_json_ids(token_ids, num_tokens);
    output_printf("}\n");
    free(quoted);
    return EXIT_CODE_OK;
}

/* The library names its arguments, "messages: ..." or "messages[0]...": the user gave files. */
static int report_chat_error(const struct tokenize_settings *settings,
                             const struct imbrex_error *err)
{
    const struct {
        const char *argument, *path;
    } sources[] = {{"messages", settings->chat}, {"tools", settings->tools}};

    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
        size_t length = strlen(sources[i].argument);
        const char *rest = err->message + length;
        if (sources[i].path != NULL && strncmp(err->message, sources[i].argument, length) == 0 &&
            (rest[0] == '[' || (rest[0] == ':' && rest[1] == ' '))) {
            struct imbrex_error named = {.status = err->status};
            int written = snprintf(named.message, sizeof(named.message), "%s: %s",
                                   input_display_name(sources[i].path), err->message);
            if (written >= 0 && (size_t)written < sizeof(named.message)) {
                return output_library_error(&named);
            }
        }
    }
    return output_library_error(err);
}

static int print_chat(const struct tokenize_settings *settings, const struct imbrex_model *model,
                      const char *messages, const struct imbrex_chat_options *options)
{
    struct imbrex_error err = {0};
    int32_t *token_ids;
    size_t num_tokens, text_bytes;
    char *text;
    int exit_code = EXIT_CODE_OK;

    if (imbrex_chat_tokenize(model, messages, options, &token_ids, &num_tokens, &text, &text_bytes,
                             &err) != IMBREX_STATUS_OK) {
        return report_chat_error(settings, &err);
    }
    if (settings->json) {
        exit_code = print_json_chat(text, text_bytes, token_ids, num_tokens);
    } else {
        print_tokens(imbrex_model_tokenizer(model), token_ids, num_tokens);
    }
    imbrex_free(token_ids);
    imbrex_free(text);
    return exit_code;
}

/* A chat template belongs to a model, so the whole model is opened. */
static int tokenize_chat(const struct tokenize_settings *settings, const char *model)
{
    struct session session = {0};
    struct conversation conversation = {0};
    char *messages = NULL, *tools = NULL;
    size_t num_bytes;
    int exit_code = input_read_text(settings->chat, INPUT_MAX_BYTES, &messages, &num_bytes);

    if (exit_code == EXIT_CODE_OK && settings->tools != NULL) {
        exit_code = input_read_text(settings->tools, INPUT_MAX_BYTES, &tools, &num_bytes);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = session_open_model(&session, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = conversation_open(&conversation, session.model, settings->chat_template);
    }
    if (exit_code == EXIT_CODE_OK) {
        conversation.options.tools_json = tools;
        conversation.options.add_generation_prompt = !settings->no_generation_prompt;
        exit_code = print_chat(settings, session.model, messages, &conversation.options);
    }
    conversation_close(&conversation);
    session_close(&session);
    free(tools);
    free(messages);
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct tokenize_state state = {.settings = settings};
    struct imbrex_error err = {0};
    int exit_code;
    int num_inputs = (state.settings->text != NULL) + (state.settings->file != NULL) +
                     (state.settings->jsonl != NULL) + (state.settings->chat != NULL);

    if (num_inputs != 1) {
        output_error("tokenize: expected one of --text, --file, --jsonl and --chat, found %s",
                     num_inputs == 0 ? "none" : "several");
        return EXIT_CODE_INPUT;
    }
    if (state.settings->chat != NULL &&
        (state.settings->no_special || state.settings->no_parse_special)) {
        output_error("tokenize: expected no --no-special and no --no-parse-special with --chat, "
                     "where the template alone makes special tokens, found one");
        return EXIT_CODE_INPUT;
    }
    if (state.settings->chat != NULL) {
        return tokenize_chat(state.settings, model);
    }
    if (state.settings->tools != NULL || state.settings->chat_template != NULL ||
        state.settings->no_generation_prompt) {
        output_error("tokenize: expected --chat with --tools, --chat-template and "
                     "--no-generation-prompt, found none");
        return EXIT_CODE_INPUT;
    }
    if (imbrex_tokenizer_open(model_display_name(model), &state.tokenizer, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    if (state.settings->jsonl != NULL) {
        exit_code = input_read_lines(state.settings->jsonl, tokenize_json_line, &state);
    } else if (state.settings->file != NULL) {
        exit_code = tokenize_file(&state);
    } else {
        exit_code = tokenize_text(&state, state.settings->text, strlen(state.settings->text));
    }
    imbrex_tokenizer_close(state.tokenizer);
    return exit_code;
}

const struct command command_tokenize = {
    .name = "tokenize",
    .synopsis = "[MODEL] (--text | --file | --jsonl | --chat) [options]",
    .summary = "show the tokens of a text or a conversation",
    .description =
        "Prints the tokens of a text: id and bytes of each, then their number. MODEL is a Hugging "
        "Face folder of which only tokenizer.json is read, such a file or a GGUF file; without it "
        "the built-in model's tokenizer is used. --chat reads the model's chat template, too.",
    .examples = "  imbrex tokenize --text \"Once upon a time\"\n"
                "  imbrex tokenize Qwen2.5-0.5B --file notes.txt --json\n"
                "  imbrex tokenize Qwen2.5-0.5B --jsonl texts.jsonl > ids.jsonl\n",
    .options = {tokenize_options, sizeof(tokenize_options) / sizeof(tokenize_options[0])},
    .defaults = &tokenize_defaults,
    .settings_bytes = sizeof(tokenize_defaults),
    .run = run,
};
