/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex chat: a conversation on a terminal, or one turn for each line of a pipe. Replies go to
 * standard output, everything else to standard error. */
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/engine_settings.h"
#include "cli/generation_settings.h"
#include "cli/output.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "cli/turn_input.h"
#include "imbrex.h"

struct chat_settings {
    struct engine_settings engine;
    struct generation_settings generation;
    const char *system, *chat_template;
    bool verbose, quiet;
};

static const struct chat_settings chat_defaults = {.engine = ENGINE_SETTINGS_DEFAULT};

static const struct option_spec chat_options[] = {
    {.long_name = "system",
     .argument = "TEXT",
     .type = OPTION_TYPE_STRING,
     .group = "Conversation",
     .help = "begin with this system message",
     .offset = offsetof(struct chat_settings, system)},
    CONVERSATION_OPTION_TEMPLATE(struct chat_settings, "Conversation", chat_template),
    GENERATION_OPTIONS_LENGTH(struct chat_settings),
    GENERATION_OPTIONS_SAMPLING(struct chat_settings),
    ENGINE_OPTION_CTX_SIZE(struct chat_settings, "4096 beside --system and -n; at "
                                                 "most what the model was made for"),
    ENGINE_OPTION_KV_POLICY(struct chat_settings, ENGINE_KV_POLICY_DEFAULT),
    ENGINE_OPTION_KV_CACHE(struct chat_settings, "one context"),
    ENGINE_OPTION_KV_TIERS(struct chat_settings),
    ENGINE_OPTION_KV_PREFETCH(struct chat_settings),
    ENGINE_OPTION_KV_DTYPE(struct chat_settings),
    ENGINE_OPTIONS_GPU(struct chat_settings),
    ENGINE_OPTION_INVARIANT(struct chat_settings),
    ENGINE_OPTION_THREADS(struct chat_settings),
    ENGINE_OPTION_CPU(struct chat_settings),
    {.long_name = "verbose",
     .short_name = 'v',
     .type = OPTION_TYPE_FLAG,
     .group = "Messages",
     .help = "print sampling, and statistics of each reply, to standard error",
     .offset = offsetof(struct chat_settings, verbose)},
    {.long_name = "quiet",
     .short_name = 'q',
     .type = OPTION_TYPE_FLAG,
     .group = "Messages",
     .help = "print neither notes nor a bar to standard error",
     .offset = offsetof(struct chat_settings, quiet)},
};

struct chat_state {
    const struct chat_settings *settings;
    struct session session;
    struct conversation conversation;
    struct turn_input input;
    struct imbrex_request_options options;
    struct turn_bytes reply;
    bool is_reply_whole;  /* false: no memory for all of it */
    char last_byte;       /* of the reply, on standard output */
    bool was_interrupted; /* by the signal before, at the prompt */
};

/* What the loop does after a turn. */
enum next_step {
    NEXT_STEP_GO_ON,
    NEXT_STEP_END,
};

/* A line in parentheses, for the person at the terminal. */
__attribute__((format(printf, 2, 3))) static void print_note(const struct chat_state *state,
                                                             const char *format, ...)
{
    va_list arguments;

    if (state->settings->quiet) {
        return;
    }
    va_start(arguments, format);
    fputs("(", stderr);
    vfprintf(stderr, format, arguments);
    fputs(")\n", stderr);
    va_end(arguments);
}

/* ---- a reply -------------------------------------------------------------------------------- */

/* Keeps the text for the history, in which no NUL may stand. */
static void keep_reply(struct chat_state *state, const char *text, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes && state->is_reply_whole; i++) {
        if (text[i] != '\0') {
            state->is_reply_whole = turn_bytes_append(&state->reply, &text[i], 1);
        }
    }
}

static bool take_event(void *user, const struct imbrex_token_event *event)
{
    struct chat_state *state = user;

    if (event->text_bytes == 0) {
        return true;
    }
    keep_reply(state, event->text, event->text_bytes);
    state->last_byte = event->text[event->text_bytes - 1];
    return output_bytes(event->text, event->text_bytes) && output_flush() && state->is_reply_whole;
}

static int submit_request(struct chat_state *state, const int32_t *prompt_ids,
                          size_t num_prompt_ids, struct imbrex_request **request)
{
    struct imbrex_error err = {0};
    struct imbrex_request_options options = state->options;

    options.prompt_ids = prompt_ids;
    options.num_prompt_ids = num_prompt_ids < INT32_MAX ? (int32_t)num_prompt_ids : INT32_MAX;
    options.callback = take_event;
    options.user = state;
    enum imbrex_status status =
        imbrex_request_submit(state->session.engine, &options, request, &err);
    if (status == IMBREX_STATUS_CAPACITY) {
        output_error("%s; /clear begins a new conversation, --ctx-size makes room", err.message);
        return EXIT_CODE_INPUT;
    }
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

/* Runs the request with signals released, and tells how it ended. */
static int stream_reply(struct chat_state *state, struct imbrex_request *request,
                        struct imbrex_request_metrics *metrics)
{
    struct imbrex_error err = {0};

    state->reply.num_bytes = 0;
    state->is_reply_whole = true;
    state->last_byte = '\n';
    signals_set_request(request);
    signals_release_interrupts();
    enum imbrex_status status = imbrex_request_wait(request, &err);
    signals_hold_interrupts();
    signals_set_request(NULL);
    imbrex_request_read_metrics(request, metrics);
    if (state->last_byte != '\n') {
        output_bytes("\n", 1);
    }
    /* The failed write is reported at the end of the program. */
    if (!output_flush() || !state->is_reply_whole) {
        return EXIT_CODE_FAILURE;
    }
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

static void report_end(const struct chat_state *state, const struct imbrex_request_metrics *metrics)
{
    if (metrics->finish_reason == IMBREX_FINISH_REASON_CONTEXT) {
        struct imbrex_memory_plan plan;
        imbrex_engine_memory_plan(state->session.engine, &plan);
        output_warning("the context is full (%" PRId32 " tokens of conversation, %" PRId32
                       " of this reply, room for %" PRId32 "): the reply ends here; /clear begins "
                       "a new conversation, --ctx-size makes room",
                       metrics->num_prompt_tokens, metrics->num_generated_tokens,
                       plan.context_size);
    }
    if (state->settings->verbose) {
        generation_print_statistics(metrics);
    }
}

/* Answers the last message, a user's, and appends the reply; a message without a reply is dropped.
 */
static int answer(struct chat_state *state)
{
    struct imbrex_request *request = NULL;
    struct imbrex_request_metrics metrics = {0};
    int32_t *prompt_ids = NULL;
    size_t num_prompt_ids;
    int exit_code = conversation_tokenize(&state->conversation, &prompt_ids, &num_prompt_ids);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = submit_request(state, prompt_ids, num_prompt_ids, &request);
    }
    imbrex_free(prompt_ids);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = stream_reply(state, request, &metrics);
    }
    imbrex_request_destroy(request);
    if (exit_code != EXIT_CODE_OK) {
        conversation_drop_last(&state->conversation);
        return exit_code;
    }
    report_end(state, &metrics);
    if (metrics.finish_reason == IMBREX_FINISH_REASON_CANCELLED && state->reply.num_bytes == 0) {
        conversation_drop_last(&state->conversation);
        print_note(state, "stopped before the reply began: your message is not kept");
        return EXIT_CODE_OK;
    }
    const char *reply = state->reply.num_bytes > 0 ? state->reply.bytes : "";
    return conversation_add(&state->conversation, "assistant", reply, state->reply.num_bytes);
}

/* ---- commands ------------------------------------------------------------------------------- */

static int show_help(struct chat_state *state, const char *argument);

static int clear(struct chat_state *state, const char *argument)
{
    (void)argument;
    conversation_clear(&state->conversation);
    print_note(state, "a new conversation");
    return EXIT_CODE_OK;
}

static int set_system(struct chat_state *state, const char *argument)
{
    int exit_code =
        conversation_set_system(&state->conversation, argument[0] != '\0' ? argument : NULL);

    if (exit_code == EXIT_CODE_OK) {
        print_note(state, argument[0] != '\0' ? "the system message is set"
                                              : "there is no system message now");
    }
    return exit_code;
}

static int save(struct chat_state *state, const char *argument)
{
    return conversation_save(&state->conversation, argument);
}

static int load(struct chat_state *state, const char *argument)
{
    int exit_code = conversation_load(&state->conversation, argument);

    if (exit_code == EXIT_CODE_OK) {
        size_t count = json_array_size(state->conversation.messages);
        print_note(state, "%zu message%s", count, output_plural(count));
    }
    return exit_code;
}

static const struct chat_command {
    const char *name;
    const char *argument; /* what /help calls it; NULL: none */
    bool is_argument_required;
    const char *help;
    int (*run)(struct chat_state *state, const char *argument); /* NULL: ends the program */
} chat_commands[] = {
    {"/help", NULL, false, "show this list", show_help},
    {"/clear", NULL, false, "begin a new conversation; the system message stays", clear},
    {"/system", "TEXT", false, "set the system message; without TEXT: none", set_system},
    {"/save", "FILE", true, "write the messages to a JSON file", save},
    {"/load", "FILE", true, "go on from the messages in a JSON file", load},
    {"/exit", NULL, false, "end; so do Ctrl-D, and Ctrl-C twice", NULL},
};
#define NUM_CHAT_COMMANDS (sizeof(chat_commands) / sizeof(chat_commands[0]))

static int show_help(struct chat_state *state, const char *argument)
{
    (void)state;
    (void)argument;
    for (size_t i = 0; i < NUM_CHAT_COMMANDS; i++) {
        const struct chat_command *command = &chat_commands[i];
        fprintf(stderr, "%-8s %-5s %s\n", command->name,
                command->argument != NULL ? command->argument : "", command->help);
    }
    fputs("A line that ends with \\ goes on in the next. All lines between two lines that are\n"
          "\"\"\" are one message, also if it begins with /. Ctrl-C stops a reply.\n",
          stderr);
    return EXIT_CODE_OK;
}

/* Splits "/name argument" at the first space; changes the line. */
static char *split_argument(char *line)
{
    char *argument = line + strcspn(line, " \t\n");

    if (*argument != '\0') {
        *argument++ = '\0';
        argument += strspn(argument, " \t\n");
    }
    for (size_t length = strlen(argument);
         length > 0 && strchr(" \t\r\n", argument[length - 1]) != NULL;) {
        argument[--length] = '\0';
    }
    return argument;
}

static int run_command(struct chat_state *state, char *line, enum next_step *next)
{
    const char *argument = split_argument(line);

    for (size_t i = 0; i < NUM_CHAT_COMMANDS; i++) {
        const struct chat_command *command = &chat_commands[i];
        if (strcmp(command->name, line) != 0) {
            continue;
        }
        if (command->is_argument_required && argument[0] == '\0') {
            output_error("%s: expected %s, found nothing", line, command->argument);
            return EXIT_CODE_INPUT;
        }
        if (command->argument == NULL && argument[0] != '\0') {
            output_error("%s: expected nothing behind it, found \"%s\"", line, argument);
            return EXIT_CODE_INPUT;
        }
        if (command->run == NULL) {
            *next = NEXT_STEP_END;
            return EXIT_CODE_OK;
        }
        int exit_code = command->run(state, argument);
        /* The conversation is whole: the person may save it elsewhere. */
        bool may_retry = exit_code == EXIT_CODE_FAILURE && state->input.is_terminal;
        return may_retry ? EXIT_CODE_INPUT : exit_code;
    }
    output_error(
        "unknown command %s; /help lists them, and a space before the / makes it a message", line);
    return EXIT_CODE_INPUT;
}

/* ---- the loop ------------------------------------------------------------------------------- */

/* At the prompt, or in the middle of a message, which is given up. */
static int take_interrupt(struct chat_state *state, enum next_step *next)
{
    int signal_number = signals_take_interrupt();

    fputs("\n", stderr);
    if (state->was_interrupted || signal_number != SIGINT) {
        *next = NEXT_STEP_END;
        return EXIT_CODE_SIGNAL + signal_number;
    }
    state->was_interrupted = true;
    print_note(state, "Ctrl-C again, Ctrl-D or /exit ends");
    return EXIT_CODE_OK;
}

static int take_message(struct chat_state *state, enum next_step *next)
{
    int exit_code = conversation_add(&state->conversation, "user", state->input.text.bytes,
                                     state->input.text.num_bytes);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = answer(state);
    }
    int signal_number = signals_take_interrupt();
    if (signal_number != 0) {
        turn_input_drop_pending(&state->input);
    }
    if (signal_number != 0 && (signal_number != SIGINT || !state->input.is_terminal)) {
        *next = NEXT_STEP_END;
        return EXIT_CODE_SIGNAL + signal_number;
    }
    return exit_code;
}

static int take_turn(struct chat_state *state, enum next_step *next)
{
    enum turn_result result = turn_input_read(&state->input);

    if (result == TURN_RESULT_INTERRUPTED) {
        return take_interrupt(state, next);
    }
    state->was_interrupted = false;
    switch (result) {
    case TURN_RESULT_TEXT:
        return take_message(state, next);
    case TURN_RESULT_COMMAND:
        return run_command(state, state->input.text.bytes, next);
    case TURN_RESULT_END:
        if (state->input.is_terminal) {
            fputs("\n", stderr);
        }
        *next = NEXT_STEP_END;
        return EXIT_CODE_OK;
    case TURN_RESULT_INTERRUPTED:
    case TURN_RESULT_FAILED:
        break;
    }
    return EXIT_CODE_FAILURE;
}

/* A person may try again after bad input or a failed command; a pipe ends there, so that nothing
 * goes unnoticed. */
static int converse(struct chat_state *state)
{
    enum next_step next = NEXT_STEP_GO_ON;
    int exit_code = EXIT_CODE_OK;

    if (state->input.is_terminal) {
        print_note(state, "%s; /help lists commands", state->session.model_name);
    }
    while (next == NEXT_STEP_GO_ON) {
        exit_code = take_turn(state, &next);
        if (exit_code != EXIT_CODE_OK &&
            (exit_code != EXIT_CODE_INPUT || !state->input.is_terminal)) {
            break;
        }
    }
    return exit_code;
}

/* The context must have room for a long system message beside the conversation. */
static int count_system_tokens(const struct chat_state *state, size_t *num_tokens)
{
    struct imbrex_error err = {0};
    const char *system = state->settings->system;
    int32_t *token_ids = NULL;

    *num_tokens = 0;
    if (system == NULL) {
        return EXIT_CODE_OK;
    }
    if (imbrex_tokenize(imbrex_model_tokenizer(state->session.model), system, strlen(system), 0,
                        &token_ids, num_tokens, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_free(token_ids);
    return EXIT_CODE_OK;
}

static int prepare(struct chat_state *state, const char *model)
{
    const struct chat_settings *settings = state->settings;
    size_t num_tokens;
    int exit_code = generation_settings_check(&settings->generation, "chat");

    if (exit_code == EXIT_CODE_OK && settings->verbose && settings->quiet) {
        output_error("chat: expected one of --verbose and --quiet, found both");
        return EXIT_CODE_INPUT;
    }
    state->session.is_quiet = settings->quiet;
    if (exit_code == EXIT_CODE_OK) {
        exit_code = session_open_model(&state->session, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            conversation_open(&state->conversation, state->session.model, settings->chat_template);
    }
    if (exit_code == EXIT_CODE_OK && settings->system != NULL) {
        exit_code = conversation_set_system(&state->conversation, settings->system);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    signals_watch_interrupts();
    signals_hold_interrupts();
    turn_input_init(&state->input);
    if (state->input.is_terminal) {
        signals_note_interrupts(true);
    }
    /* -n is the length of one reply; there are others, and messages. */
    int64_t max_tokens = settings->generation.max_tokens.value + SESSION_CONTEXT_TOKENS;
    exit_code = count_system_tokens(state, &num_tokens);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = session_create_engine(&state->session, &settings->engine, (int64_t)num_tokens,
                                          max_tokens);
    }
    if (exit_code == EXIT_CODE_OK) {
        state->options =
            generation_settings_to_options(&settings->generation, state->session.model);
        conversation_end_replies(&state->conversation, &state->options);
        if (settings->verbose) {
            generation_print_sampling(&settings->generation, &state->options);
        }
    }
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct chat_state state = {.settings = settings};
    int exit_code = prepare(&state, model);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = converse(&state);
    }
    turn_input_release(&state.input);
    conversation_close(&state.conversation);
    session_close(&state.session);
    free(state.reply.bytes);
    return exit_code;
}

const struct command command_chat = {
    .name = "chat",
    .synopsis = "[MODEL] [options]",
    .summary = "talk with a model",
    .description =
        "A conversation on the terminal: replies appear as they are written, what was said is "
        "remembered, Ctrl-C stops a reply, /help lists commands. From a pipe each line is a "
        "message, and bad input ends the program. MODEL is a Hugging Face folder with a chat "
        "template (chat_template.jinja, or chat_template in tokenizer_config.json), or a GGUF file "
        "with one. Text that is "
        "typed can never become a special token.",
    .examples = "  imbrex chat Qwen2.5-0.5B-Instruct\n"
                "  imbrex chat Qwen2.5-0.5B-Instruct --system \"Answer in one line.\" --temp 0\n"
                "  imbrex chat Qwen2.5-0.5B-Instruct < questions.txt > answers.txt\n",
    .options = {chat_options, sizeof(chat_options) / sizeof(chat_options[0])},
    .defaults = &chat_defaults,
    .settings_bytes = sizeof(chat_defaults),
    .run = run,
};
