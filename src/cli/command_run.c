/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex run: continues a prompt, streaming text to standard output. What a person wants to know
 * about the run (sampling, speed, why it ended) goes to standard error. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/conversation.h"
#include "cli/engine_settings.h"
#include "cli/generation_settings.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

struct run_settings {
    struct engine_settings engine;
    struct generation_settings generation;
    const char *prompt, *prompt_file, *system, *chat_template;
    bool no_parse_special, no_echo, chat, quiet;
};

/* One text finds nothing of others, unless tiers keep them: no keys are computed for it. */
static const struct run_settings run_defaults = {
    .engine = {.cpu = {.value = IMBREX_CPU_ALL}, .device = "auto", .kv_policy = "none"}};

static const struct option_spec run_options[] = {
    {.long_name = "prompt",
     .short_name = 'p',
     .argument = "TEXT",
     .type = OPTION_TYPE_STRING,
     .group = "Prompt",
     .help = "text to continue, taken as it is, but for special tokens written in it, such as "
             "<|im_end|>",
     .offset = offsetof(struct run_settings, prompt)},
    {.long_name = "file",
     .short_name = 'f',
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "Prompt",
     .help = "read the prompt from a file, its last line end included; - is standard input",
     .offset = offsetof(struct run_settings, prompt_file)},
    {.long_name = "no-parse-special",
     .type = OPTION_TYPE_FLAG,
     .group = "Prompt",
     .help = "read special tokens written in the prompt as ordinary text; with --chat they always "
             "are",
     .offset = offsetof(struct run_settings, no_parse_special)},
    {.long_name = "no-echo",
     .type = OPTION_TYPE_FLAG,
     .group = "Prompt",
     .help = "print the continuation only, without the prompt before it",
     .offset = offsetof(struct run_settings, no_echo)},
    {.long_name = "chat",
     .type = OPTION_TYPE_FLAG,
     .group = "Chat",
     .help = "the prompt is a user's message, put into the model's chat template; the reply alone "
             "is printed",
     .offset = offsetof(struct run_settings, chat)},
    {.long_name = "system",
     .argument = "TEXT",
     .type = OPTION_TYPE_STRING,
     .group = "Chat",
     .help = "system message before it",
     .offset = offsetof(struct run_settings, system)},
    CONVERSATION_OPTION_TEMPLATE(struct run_settings, "Chat", chat_template),
    GENERATION_OPTIONS_LENGTH(struct run_settings),
    GENERATION_OPTIONS_SAMPLING(struct run_settings),
    ENGINE_OPTION_CTX_SIZE(struct run_settings, "prompt and -n, or 4096 without -n; at least 4096; "
                                                "at most what the model was made for"),
    ENGINE_OPTION_KV_TIERS(struct run_settings),
    ENGINE_OPTION_KV_DTYPE(struct run_settings),
    ENGINE_OPTIONS_GPU(struct run_settings),
    ENGINE_OPTION_INVARIANT(struct run_settings),
    ENGINE_OPTION_THREADS(struct run_settings),
    ENGINE_OPTION_CPU(struct run_settings),
    {.long_name = "quiet",
     .short_name = 'q',
     .type = OPTION_TYPE_FLAG,
     .group = "Messages",
     .help = "print neither sampling nor statistics nor a bar to standard error",
     .offset = offsetof(struct run_settings, quiet)},
};

/* Everything that run() releases at its end. */
struct run_state {
    const struct run_settings *settings;
    struct session session;
    struct conversation conversation; /* with --chat */
    char *file_text;                  /* prompt read from a file */
    const char *prompt;
    size_t prompt_bytes;
    int32_t *prompt_ids;
    size_t num_prompt_ids;
    struct imbrex_request *request;
    char last_byte; /* of standard output */
};

static int load_prompt(struct run_state *state, const char *model)
{
    const struct run_settings *settings = state->settings;

    if (!settings->chat && (settings->system != NULL || settings->chat_template != NULL)) {
        output_error("run: --%s: expected --chat with it, found none",
                     settings->system != NULL ? "system" : "chat-template");
        return EXIT_CODE_INPUT;
    }
    if (settings->prompt != NULL && settings->prompt_file != NULL) {
        output_error("run: expected one of -p and -f, found both");
        return EXIT_CODE_INPUT;
    }
    if (settings->prompt_file != NULL) {
        int exit_code =
            input_read_file(settings->prompt_file, &state->file_text, &state->prompt_bytes);
        state->prompt = state->file_text;
        return exit_code;
    }
    if (settings->prompt != NULL) {
        state->prompt = settings->prompt;
        state->prompt_bytes = strlen(settings->prompt);
        return EXIT_CODE_OK;
    }
    /* The built-in model tells a story from its begin token alone. */
    if (!settings->chat && strcmp(model_display_name(model), BUILTIN_MODEL) == 0) {
        state->prompt = "";
        return EXIT_CODE_OK;
    }
    output_error("run: expected a prompt (-p TEXT or -f FILE), found none");
    return EXIT_CODE_INPUT;
}

/* The prompt as the only message of a user. */
static int tokenize_message(struct run_state *state)
{
    struct conversation *conversation = &state->conversation;
    int exit_code =
        conversation_open(conversation, state->session.model, state->settings->chat_template);

    if (exit_code == EXIT_CODE_OK && state->settings->system != NULL) {
        exit_code = conversation_set_system(conversation, state->settings->system);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = conversation_add(conversation, "user", state->prompt, state->prompt_bytes);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = conversation_tokenize(conversation, &state->prompt_ids, &state->num_prompt_ids);
    }
    return exit_code;
}

static int tokenize_text(struct run_state *state)
{
    struct imbrex_error err = {0};
    unsigned flags = IMBREX_TOKENIZE_ADD_SPECIAL;

    if (!state->settings->no_parse_special) {
        flags |= IMBREX_TOKENIZE_PARSE_SPECIAL;
    }
    if (imbrex_tokenize(imbrex_model_tokenizer(state->session.model), state->prompt,
                        state->prompt_bytes, flags, &state->prompt_ids, &state->num_prompt_ids,
                        &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    return EXIT_CODE_OK;
}

static int tokenize_prompt(struct run_state *state)
{
    int exit_code = state->settings->chat ? tokenize_message(state) : tokenize_text(state);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (state->num_prompt_ids == 0) {
        output_error("run: prompt: expected at least one token, found an empty text, and the "
                     "tokenizer of %s adds no begin token",
                     state->session.model_name);
        return EXIT_CODE_INPUT;
    }
    if (state->num_prompt_ids > INT32_MAX) {
        output_error("run: prompt: expected at most %" PRId32 " tokens, found %zu", INT32_MAX,
                     state->num_prompt_ids);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

static bool write_text(struct run_state *state, const char *text, size_t num_bytes)
{
    if (num_bytes == 0) {
        return true;
    }
    state->last_byte = text[num_bytes - 1];
    return output_bytes(text, num_bytes) && output_flush();
}

static bool take_event(void *user, const struct imbrex_token_event *event)
{
    return write_text(user, event->text, event->text_bytes);
}

/* Nothing runs before it is waited for: what comes first may take its time. */
static int submit_request(struct run_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_request_options options =
        generation_settings_to_options(&state->settings->generation, state->session.model);

    options.prompt_ids = state->prompt_ids;
    options.num_prompt_ids = (int32_t)state->num_prompt_ids;
    if (state->settings->chat) {
        conversation_end_replies(&state->conversation, &options);
    }
    options.callback = take_event;
    options.user = state;
    if (imbrex_request_submit(state->session.engine, &options, &state->request, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    signals_set_request(state->request);
    if (!state->settings->quiet) {
        generation_print_sampling(&state->settings->generation, &options);
    }
    return EXIT_CODE_OK;
}

static int generate(struct run_state *state)
{
    struct imbrex_error err = {0};
    struct imbrex_request_metrics metrics;

    bool has_echo = !state->settings->no_echo && !state->settings->chat;
    if (has_echo && !write_text(state, state->prompt, state->prompt_bytes)) {
        return EXIT_CODE_FAILURE;
    }
    enum imbrex_status status = imbrex_request_wait(state->request, &err);
    if (state->last_byte != 0 && state->last_byte != '\n') {
        output_bytes("\n", 1);
    }
    /* The failed write is reported at the end of the program. */
    if (!output_flush()) {
        return EXIT_CODE_FAILURE;
    }
    if (status != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_request_read_metrics(state->request, &metrics);
    if (!state->settings->quiet) {
        generation_print_statistics(&metrics);
    }
    if (signals_interrupt() != 0) {
        return EXIT_CODE_SIGNAL + signals_interrupt();
    }
    return EXIT_CODE_OK;
}

static int run_steps(struct run_state *state, const char *model)
{
    const struct run_settings *settings = state->settings;
    int exit_code = load_prompt(state, model);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = generation_settings_check(&settings->generation, "run");
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = session_open_model(&state->session, model);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = tokenize_prompt(state);
    }
    if (exit_code == EXIT_CODE_OK) {
        signals_watch_interrupts();
        signals_hold_interrupts();
        struct engine_settings engine = settings->engine;
        if (engine_settings_has_tiers(&engine)) {
            engine.kv_policy = ENGINE_KV_POLICY_DEFAULT;
        }
        exit_code = session_create_engine(&state->session, &engine, (int64_t)state->num_prompt_ids,
                                          settings->generation.max_tokens.value);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = submit_request(state);
        }
        signals_release_interrupts();
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = generate(state);
    }
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct run_state state = {.settings = settings};
    state.session.is_quiet = state.settings->quiet;
    int exit_code = run_steps(&state, model);

    signals_set_request(NULL);
    imbrex_request_destroy(state.request);
    imbrex_free(state.prompt_ids);
    conversation_close(&state.conversation);
    session_close(&state.session);
    free(state.file_text);
    return exit_code;
}

const struct command command_run = {
    .name = "run",
    .synopsis = "[MODEL] [-p TEXT | -f FILE] [options]",
    .summary = "write text that continues a prompt",
    .description =
        "Continues a prompt. The text goes to standard output, sampling and speed to standard "
        "error. MODEL is a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or "
        "a GGUF file; without it the built-in model is used, which also tells a story without a "
        "prompt. Ctrl-C ends the text; a second one ends the program at once. With --chat the "
        "prompt is a message that the model answers; imbrex chat goes on with more.",
    .examples = "  imbrex run -p \"Once upon a time\"\n"
                "  imbrex run Qwen2.5-0.5B -p \"The three primary colours are\" -n 40 --temp 0\n"
                "  imbrex run Qwen2.5-0.5B-Instruct --chat -p \"What is a tile?\" -n 100\n"
                "  imbrex run Qwen2.5-0.5B -f notes.txt --stop \"###\" --seed 7 -q > out.txt\n",
    .options = {run_options, sizeof(run_options) / sizeof(run_options[0])},
    .defaults = &run_defaults,
    .settings_bytes = sizeof(run_defaults),
    .run = run,
};
