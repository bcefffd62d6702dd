/* SPDX-License-Identifier: Apache-2.0 */
/* Templates from anywhere: parsed and rendered under tight limits. The input is a template,
 * perhaps followed by a line "=====" and the variables as JSON. What must hold whatever the input:
 * no crash, no leak, bounded time and memory, spans that cover valid UTF-8 text, the same result
 * twice. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static const char default_variables[] =
    "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\","
    " \"content\": \"\\u00c7a <|im_end|>\\n\"}, {\"role\": \"assistant\", \"content\": null,"
    " \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {\"a\": 1.5}}}]}],"
    " \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\":"
    " {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"number\"}}}}}],"
    " \"add_generation_prompt\": true, \"bos_token\": \"<s>\", \"x\": 5, \"y\": -2.5, \"z\": null,"
    " \"l\": [3, 1, 2], \"d\": {\"b\": [1], \"a\": \"A\"}}";

/* Stops where a debugger sees it, in every build. */
static void require(int holds)
{
    if (!holds) {
        abort();
    }
}

static void check_output(const struct jinja_output *output)
{
    size_t end = 0;
    require(utf8_valid_prefix(output->text, output->num_bytes) == output->num_bytes);
    require(output->text[output->num_bytes] == '\0');
    for (size_t i = 0; i < output->num_spans; i++) {
        const struct jinja_span *span = &output->spans[i];
        require(span->begin == end && span->end > span->begin);
        require(i == 0 || span->is_input != output->spans[i - 1].is_input);
        end = span->end;
    }
    require(end == output->num_bytes);
}

static void render_twice(const struct jinja_template *template, const json_t *variables)
{
    struct jinja_options options = jinja_options_default();
    struct jinja_output outputs[2] = {{0}, {0}};
    struct imbrex_error errors[2] = {{.message = ""}, {.message = ""}};
    enum imbrex_status statuses[2];
    options.max_steps = 100000;
    options.max_output_bytes = 1 << 20;
    options.max_memory_bytes = 8 << 20;
    options.max_depth = 100;
    for (int i = 0; i < 2; i++) {
        statuses[i] = jinja_template_render(template, variables, &options, &outputs[i], &errors[i]);
        require(statuses[i] != IMBREX_STATUS_INTERNAL);
        if (statuses[i] == IMBREX_STATUS_OK) {
            check_output(&outputs[i]);
        } else {
            require(errors[i].status == statuses[i] && errors[i].message[0] != '\0');
        }
    }
    require(statuses[0] == statuses[1] && strcmp(errors[0].message, errors[1].message) == 0);
    require(outputs[0].num_bytes == outputs[1].num_bytes &&
            (outputs[0].num_bytes == 0 ||
             memcmp(outputs[0].text, outputs[1].text, outputs[0].num_bytes) == 0));
    jinja_output_release(&outputs[0]);
    jinja_output_release(&outputs[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    static const char separator[] = "\n=====\n";
    const char *source = num_bytes != 0 ? (const char *)bytes : "";
    const char *end = memmem(source, num_bytes, separator, strlen(separator));
    size_t source_bytes = end != NULL ? (size_t)(end - source) : num_bytes;
    struct jinja_template *template;
    struct imbrex_error err;
    json_t *variables;
    const char *json = default_variables;
    size_t json_bytes = strlen(default_variables);
    if (end != NULL) {
        json = end + strlen(separator);
        json_bytes = num_bytes - source_bytes - strlen(separator);
    }
    if (jinja_template_parse("fuzz", source, source_bytes, &template, &err) != IMBREX_STATUS_OK) {
        require(err.message[0] != '\0' && err.status != IMBREX_STATUS_INTERNAL);
        return 0;
    }
    if (json_parse_object("fuzz", json, json_bytes, &variables, &err) == IMBREX_STATUS_OK) {
        render_twice(template, variables);
        json_decref(variables);
    }
    jinja_template_destroy(template);
    return 0;
}
