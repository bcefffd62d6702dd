/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/score.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/output.h"

static void clear_progress(bool progress)
{
    if (progress) {
        fprintf(stderr, "\r\033[K");
    }
}

int score_windows(struct imbrex_engine *engine, const int32_t *token_ids, size_t num_tokens,
                  size_t window, struct score *score)
{
    struct imbrex_error err = {0};
    int exit_code = EXIT_CODE_OK;
    bool progress = isatty(STDERR_FILENO) == 1;
    double *nll = malloc((window < num_tokens ? window : num_tokens) * sizeof(*nll));

    *score = (struct score){0};
    if (nll == NULL) {
        return output_out_of_memory();
    }
    for (size_t begin = 0; exit_code == EXIT_CODE_OK && num_tokens - begin >= 2;) {
        size_t count = num_tokens - begin < window ? num_tokens - begin : window;
        if (imbrex_engine_score(engine, token_ids + begin, (int32_t)count, nll, &err) !=
            IMBREX_STATUS_OK) {
            clear_progress(progress);
            exit_code = output_library_error(&err);
            break;
        }
        for (size_t i = 0; i + 1 < count; i++) {
            score->nll_sum += nll[i];
        }
        score->num_scored += count - 1;
        begin += count;
        if (progress) {
            fprintf(stderr, "\r%zu of %zu tokens, nll %.4f ", begin, num_tokens,
                    score->nll_sum / (double)score->num_scored);
        }
    }
    clear_progress(progress);
    free(nll);
    return exit_code;
}
