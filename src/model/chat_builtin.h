/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates that come with imbrex, for models that bring none. */
#ifndef IMBREX_MODEL_CHAT_BUILTIN_H
#define IMBREX_MODEL_CHAT_BUILTIN_H

/* The Jinja text of a template, or NULL if there is none of that name. Static storage. */
const char *chat_builtin_find(const char *name);

#endif
