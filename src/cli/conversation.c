/* SPDX-License-Identifier: Apache-2.0 */
/* Messages are kept as the JSON that the library takes. */
#include "cli/conversation.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/input.h"
#include "cli/output.h"

/* A template goes through a parser that keeps a tree of it; real ones have some KiB. */
#define MAX_TEMPLATE_BYTES ((size_t)1 << 20)

static int report_out_of_memory(void)
{
    output_error("out of memory");
    return EXIT_CODE_FAILURE;
}

/* ---- the template --------------------------------------------------------------------------- */

static bool is_builtin_template(const char *name)
{
    return strcmp(name, "chatml") == 0 || strcmp(name, "llama3") == 0;
}

/* Seconds since 1970 as the local clock shows them. */
static int64_t local_time(void)
{
    time_t now = time(NULL);
    struct tm local;

    if (localtime_r(&now, &local) == NULL) {
        return now;
    }
    return (int64_t)now + local.tm_gmtoff;
}

static int read_template(struct conversation *conversation, const char *path)
{
    size_t num_bytes;
    int exit_code =
        input_read_text(path, MAX_TEMPLATE_BYTES, &conversation->template_text, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (!output_is_utf8(conversation->template_text, num_bytes)) {
        output_error("%s: expected a Jinja template in UTF-8, found other bytes",
                     input_display_name(path));
        return EXIT_CODE_INPUT;
    }
    conversation->options.chat_template = conversation->template_text;
    conversation->options.chat_template_name = input_display_name(path);
    return EXIT_CODE_OK;
}

int conversation_open(struct conversation *conversation, const struct imbrex_model *model,
                      const char *template_choice)
{
    struct imbrex_error err = {0};

    conversation->model = model;
    conversation->options = imbrex_chat_options_default();
    conversation->options.now = local_time();
    conversation->messages = json_array();
    if (conversation->messages == NULL) {
        return report_out_of_memory();
    }
    if (template_choice != NULL && is_builtin_template(template_choice)) {
        conversation->options.chat_template = template_choice;
    } else if (template_choice != NULL) {
        int exit_code = read_template(conversation, template_choice);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
    }
    enum imbrex_status status =
        imbrex_chat_end_token(model, &conversation->options, &conversation->end_token_id, &err);
    if (status == IMBREX_STATUS_NOT_FOUND) {
        output_error("%s; --chat-template gives one: chatml, llama3 or a Jinja file", err.message);
        return EXIT_CODE_INPUT;
    }
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

void conversation_close(struct conversation *conversation)
{
    json_decref(conversation->messages);
    free(conversation->template_text);
    *conversation = (struct conversation){0};
}

/* ---- messages ------------------------------------------------------------------------------- */

/* NULL if the text is refused or memory is out: reported, with the exit code in *exit_code. */
static json_t *make_message(const char *role, const char *text, size_t num_bytes, int *exit_code)
{
    if (!output_is_utf8(text, num_bytes) || memchr(text, 0, num_bytes) != NULL) {
        output_error("%s message: expected a text in UTF-8 without NUL bytes, found other bytes",
                     role);
        *exit_code = EXIT_CODE_INPUT;
        return NULL;
    }
    json_t *message = json_pack("{s:s, s:s%}", "role", role, "content", text, num_bytes);
    if (message == NULL) {
        *exit_code = report_out_of_memory();
    }
    return message;
}

int conversation_add(struct conversation *conversation, const char *role, const char *text,
                     size_t num_bytes)
{
    int exit_code = EXIT_CODE_OK;
    json_t *message = make_message(role, text, num_bytes, &exit_code);

    if (message != NULL && json_array_append_new(conversation->messages, message) != 0) {
        exit_code = report_out_of_memory();
    }
    return exit_code;
}

void conversation_drop_last(struct conversation *conversation)
{
    size_t count = json_array_size(conversation->messages);

    if (count > 0) {
        json_array_remove(conversation->messages, count - 1);
    }
}

static bool has_system(const struct conversation *conversation)
{
    const json_t *first = json_array_get(conversation->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));

    return role != NULL && strcmp(role, "system") == 0;
}

int conversation_set_system(struct conversation *conversation, const char *text)
{
    int exit_code = EXIT_CODE_OK;
    json_t *message = NULL;

    if (text != NULL) {
        message = make_message("system", text, strlen(text), &exit_code);
        if (message == NULL) {
            return exit_code;
        }
    }
    if (has_system(conversation)) {
        json_array_remove(conversation->messages, 0);
    }
    if (message != NULL && json_array_insert_new(conversation->messages, 0, message) != 0) {
        return report_out_of_memory();
    }
    return EXIT_CODE_OK;
}

void conversation_clear(struct conversation *conversation)
{
    size_t num_kept = has_system(conversation) ? 1 : 0;

    while (json_array_size(conversation->messages) > num_kept) {
        conversation_drop_last(conversation);
    }
}

/* ---- files ---------------------------------------------------------------------------------- */

static bool write_all(int fd, const char *bytes, size_t num_bytes)
{
    while (num_bytes > 0) {
        ssize_t count = write(fd, bytes, num_bytes);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return false;
        }
        bytes += count;
        num_bytes -= (size_t)count;
    }
    return true;
}

/* Closes the file too. `mode` is the file's that will be replaced, or 0. errno tells why not. */
static bool write_new_file(int fd, mode_t mode, const char *bytes, size_t num_bytes)
{
    bool is_written =
        write_all(fd, bytes, num_bytes) && (mode == 0 || fchmod(fd, mode) == 0) && fsync(fd) == 0;
    int cause = errno;
    bool is_closed = close(fd) == 0;

    if (!is_written) {
        errno = cause;
    }
    return is_written && is_closed;
}

/* What stands in the file stays until the new bytes are on the disk. errno tells why not. */
static bool replace_regular_file(const char *path, mode_t mode, const char *bytes, size_t num_bytes)
{
    char partial[PATH_MAX + sizeof(".partial")];
    int length = snprintf(partial, sizeof(partial), "%s.partial", path);

    if (length < 0 || (size_t)length >= sizeof(partial)) {
        errno = ENAMETOOLONG;
        return false;
    }
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) {
        return false;
    }
    if (!write_new_file(fd, mode, bytes, num_bytes) || rename(partial, path) != 0) {
        int cause = errno;
        unlink(partial);
        errno = cause;
        return false;
    }
    return true;
}

static bool replace_file(const char *path, const char *bytes, size_t num_bytes)
{
    struct stat status;
    char target[PATH_MAX];

    /* A link goes on pointing to the file. */
    if (stat(path, &status) != 0 || realpath(path, target) == NULL) {
        return errno == ENOENT && replace_regular_file(path, 0, bytes, num_bytes);
    }
    if (S_ISREG(status.st_mode)) {
        return replace_regular_file(target, status.st_mode & 07777, bytes, num_bytes);
    }
    /* A device or a pipe has nothing to lose, and must not become a file. */
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    bool is_written = write_all(fd, bytes, num_bytes);
    int cause = errno;
    close(fd);
    errno = cause;
    return is_written;
}

int conversation_save(const struct conversation *conversation, const char *path)
{
    char *text = json_dumps(conversation->messages, JSON_INDENT(2));

    if (text == NULL) {
        return report_out_of_memory();
    }
    bool is_saved = replace_file(path, text, strlen(text));
    if (!is_saved) {
        output_error("%s: cannot write: %s", path, strerror(errno));
    }
    free(text);
    return is_saved ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

int conversation_load(struct conversation *conversation, const char *path)
{
    char *bytes;
    size_t num_bytes;
    json_error_t json_error;
    int exit_code = input_read_file(path, &bytes, &num_bytes);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    json_t *messages = json_loadb(bytes, num_bytes, JSON_REJECT_DUPLICATES, &json_error);
    free(bytes);
    if (messages == NULL && json_error_code(&json_error) == json_error_out_of_memory) {
        return report_out_of_memory();
    }
    if (messages == NULL) {
        output_error("%s: line %d, column %d: expected a JSON array of messages, found %s",
                     input_display_name(path), json_error.line, json_error.column,
                     json_error_code(&json_error) == json_error_duplicate_key
                         ? "the same key twice in an object"
                         : "what is not JSON");
        return EXIT_CODE_INPUT;
    }
    bool has_messages = json_is_array(messages) && json_array_size(messages) > 0;
    for (size_t i = 0; has_messages && i < json_array_size(messages); i++) {
        has_messages = json_is_string(json_object_get(json_array_get(messages, i), "role"));
    }
    if (!has_messages) {
        output_error("%s: expected a JSON array of messages with a \"role\", found something else",
                     input_display_name(path));
        json_decref(messages);
        return EXIT_CODE_INPUT;
    }
    json_decref(conversation->messages);
    conversation->messages = messages;
    return EXIT_CODE_OK;
}

/* ---- the prompt ----------------------------------------------------------------------------- */

void conversation_end_replies(const struct conversation *conversation,
                              struct imbrex_request_options *options)
{
    if (conversation->end_token_id < 0) {
        output_warning("the chat template ends a reply with no special token of this model: "
                       "replies may go on without an end");
        return;
    }
    options->end_token_ids = &conversation->end_token_id;
    options->num_end_token_ids = 1;
}

int conversation_tokenize(const struct conversation *conversation, int32_t **token_ids,
                          size_t *num_tokens)
{
    struct imbrex_error err = {0};
    char *messages_json = json_dumps(conversation->messages, JSON_COMPACT);

    if (messages_json == NULL) {
        return report_out_of_memory();
    }
    enum imbrex_status status =
        imbrex_chat_tokenize(conversation->model, messages_json, &conversation->options, token_ids,
                             num_tokens, NULL, NULL, &err);
    free(messages_json);
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}
