/* SPDX-License-Identifier: Apache-2.0 */
/* The two forms that most models without a template of their own were trained on. Content may be a
 * text or a list of parts with texts. Neither has a form for tools, which are refused rather than
 * left out. */
#include "model/chat_builtin.h"

#include <stddef.h>
#include <string.h>

#define REFUSE_TOOLS(name)                                                  \
    "{%- if tools %}"                                                       \
    "{{- raise_exception('the template " name " has no form for tools') }}" \
    "{%- endif %}"

/* text_of(message) */
#define TEXT_OF                                              \
    "{%- macro text_of(message) %}"                          \
    "{%- if message.content is string %}"                    \
    "{{- message.content }}"                                 \
    "{%- else %}"                                            \
    "{%- for part in message.content or [] %}"               \
    "{%- if part.type != 'text' %}"                          \
    "{{- raise_exception('content: expected texts only') }}" \
    "{%- endif %}"                                           \
    "{{- part.text }}"                                       \
    "{%- endfor %}"                                          \
    "{%- endif %}"                                           \
    "{%- endmacro %}"

static const struct {
    const char *name, *source;
} builtins[] = {
    {"chatml", REFUSE_TOOLS("chatml") TEXT_OF
     "{%- for message in messages %}"
     "{{- '<|im_start|>' + message.role + '\\n' + text_of(message) + '<|im_end|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}"
     "{{- '<|im_start|>assistant\\n' }}"
     "{%- endif %}"},
    {"llama3", REFUSE_TOOLS("llama3") TEXT_OF
     "{{- bos_token or '<|begin_of_text|>' }}"
     "{%- for message in messages %}"
     "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
     "{{- text_of(message) | trim + '<|eot_id|>' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}"
     "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
     "{%- endif %}"},
};

const char *chat_builtin_find(const char *name)
{
    for (size_t i = 0; i < sizeof(builtins) / sizeof(builtins[0]); i++) {
        if (strcmp(builtins[i].name, name) == 0) {
            return builtins[i].source;
        }
    }
    return NULL;
}
