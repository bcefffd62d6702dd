/* SPDX-License-Identifier: Apache-2.0 */
/* Scoring a text in windows: each alone, from its second id on, so that figures can be compared
 * between machines and programs. */
#ifndef IMBREX_CLI_SCORE_H
#define IMBREX_CLI_SCORE_H

#include <stddef.h>
#include <stdint.h>

#include "imbrex.h"

#define SCORE_DEFAULT_WINDOW 512 /* tokens */

struct score {
    double nll_sum;
    size_t num_scored; /* tokens */
};

/* Scores token_ids[0, num_tokens) in windows of `window` ids, with a progress line on a terminal.
 * Failures are reported; returns an exit code. */
int score_windows(struct imbrex_engine *engine, const int32_t *token_ids, size_t num_tokens,
                  size_t window, struct score *score);

#endif
