/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/command_line.h"

#include <string.h>

/* A word as a shell takes it. */
static void add_word(FILE *file, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_./,:=+-";

    fputc(' ', file);
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        fputs(word, file);
        return;
    }
    fputc('\'', file);
    for (; *word != '\0'; word++) {
        if (*word == '\'') {
            fputs("'\\''", file);
        } else {
            fputc(*word, file);
        }
    }
    fputc('\'', file);
}

void command_line_add_text(FILE *file, const char *name, const char *value)
{
    if (value != NULL) {
        fprintf(file, " --%s", name);
        add_word(file, value);
    }
}

void command_line_add_real(FILE *file, const char *name, const struct option_real *real)
{
    if (real->given) {
        fprintf(file, " --%s %.15g", name, real->value);
    }
}
