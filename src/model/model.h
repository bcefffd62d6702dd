/* SPDX-License-Identifier: Apache-2.0 */
/* An open checkpoint: configuration, weights, tokenizer. Immutable once open. */
#ifndef IMBREX_MODEL_MODEL_H
#define IMBREX_MODEL_MODEL_H

#include <pthread.h>

#include "base/log.h"
#include "model/chat_template.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/tokenizer.h"
#include "model/weights.h"

struct imbrex_model {
    char *path; /* as given */
    struct log log;
    struct model_config config;
    struct generation_config generation_config;
    struct checkpoint checkpoint;
    struct weights weights;
    struct imbrex_tokenizer *tokenizer;
    char *chat_template; /* Jinja, NUL-terminated; NULL: none */
    struct chat_source chat_source;
    pthread_mutex_t filling; /* held while is_filled is read or changed */
    bool is_filled;          /* the weights of a "random:" model are there */
};

/* Fills the weights of a "random:" model, once. Whatever reads matrices calls it first. Any thread.
 */
enum imbrex_status model_fill(struct imbrex_model *model, struct imbrex_error *err);

#endif
