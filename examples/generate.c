/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a model and writes a prompt and its continuation: generate [PROMPT [MODEL]] */
#include <imbrex.h>
#include <stdio.h>
#include <string.h>

static bool print_text(void *user, const struct imbrex_token_event *event)
{
    return fwrite(event->text, 1, event->text_bytes, user) == event->text_bytes;
}

int main(int argc, char **argv)
{
    const char *prompt = argc > 1 ? argv[1] : "Once upon a time";
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    struct imbrex_engine *engine = NULL;
    struct imbrex_request *request = NULL;

    /* NULL: the built-in model, default options. */
    bool ok = imbrex_model_open(argc > 2 ? argv[2] : NULL, NULL, &model, &err) == 0 &&
              imbrex_engine_create(model, NULL, &engine, &err) == 0;
    if (ok) {
        struct imbrex_request_options options = imbrex_request_options_default(model);
        options.prompt_text = prompt;
        options.prompt_text_bytes = strlen(prompt);
        options.prompt_text_flags = IMBREX_TOKENIZE_ADD_SPECIAL;
        options.max_tokens = 100;
        options.callback = print_text;
        options.user = stdout;
        ok = imbrex_request_submit(engine, &options, &request, &err) == 0;
    }
    if (ok) {
        /* The engine runs, and calls back, while this thread waits. */
        printf("%s", prompt);
        ok = imbrex_request_wait(request, &err) == 0;
        printf("\n");
    }
    if (!ok) {
        fprintf(stderr, "%s: %s\n", imbrex_status_name(err.status), err.message);
    }
    imbrex_request_destroy(request);
    imbrex_engine_destroy(engine);
    imbrex_model_close(model);
    return ok ? 0 : 1;
}
