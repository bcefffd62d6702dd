/* SPDX-License-Identifier: Apache-2.0 */
/* An open checkpoint: configuration, weights, tokenizer. Immutable once open. */
#ifndef IMBREX_MODEL_MODEL_H
#define IMBREX_MODEL_MODEL_H

#include "base/log.h"
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
};

#endif
