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
    struct imbrex_generation *generation = NULL;
    int32_t *ids = NULL;
    size_t num_ids = 0;

    /* NULL: the built-in model, default options. */
    bool ok = imbrex_model_open(argc > 2 ? argv[2] : NULL, NULL, &model, &err) == 0 &&
              imbrex_tokenize(imbrex_model_tokenizer(model), prompt, strlen(prompt),
                              IMBREX_TOKENIZE_ADD_SPECIAL, &ids, &num_ids, &err) == 0 &&
              imbrex_engine_create(model, NULL, &engine, &err) == 0;
    if (ok) {
        struct imbrex_generation_options options = imbrex_generation_options_default(model);
        options.prompt_ids = ids;
        options.num_prompt_ids = (int32_t)num_ids;
        options.max_tokens = 100;
        printf("%s", prompt);
        ok = imbrex_generation_create(engine, &options, &generation, &err) == 0 &&
             imbrex_generation_run(generation, print_text, stdout, &err) == 0;
        printf("\n");
    }
    if (!ok) {
        fprintf(stderr, "%s: %s\n", imbrex_status_name(err.status), err.message);
    }
    imbrex_generation_destroy(generation);
    imbrex_engine_destroy(engine);
    imbrex_free(ids);
    imbrex_model_close(model);
    return ok ? 0 : 1;
}
