/* SPDX-License-Identifier: Apache-2.0 */
/* How fast texts become ids on one core. usage: bench_tokenizer TOKENIZER TEXT_FILE...
 *
 * Prints MB per second of processor time, the best of five, for each text file and for 1 MB of each
 * text that has made tokenizers slow: one letter, digit, space, line break or mark again and again,
 * and one long word. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "imbrex.h"

#define NUM_RUNS 5
#define MADE_BYTES 1000000

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static bool time_text(const struct imbrex_tokenizer *tokenizer, const char *name, const char *text,
                      size_t num_bytes)
{
    double best = 1e30;
    size_t num_ids = 0;
    for (int run = 0; run < NUM_RUNS; run++) {
        int32_t *ids = NULL;
        struct imbrex_error err;
        double begin = seconds();
        if (imbrex_tokenize(tokenizer, text, num_bytes, 0, &ids, &num_ids, &err) !=
            IMBREX_STATUS_OK) {
            fprintf(stderr, "bench_tokenizer: %s: %s\n", name, err.message);
            return false;
        }
        double taken = seconds() - begin;
        best = taken < best ? taken : best;
        imbrex_free(ids);
    }
    printf("%-28s %8.1f MB/s %10zu bytes %9zu ids\n", name, (double)num_bytes / best / 1e6,
           num_bytes, num_ids);
    return true;
}

static bool time_file(const struct imbrex_tokenizer *tokenizer, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return false;
    }
    fseek(file, 0, SEEK_END);
    size_t num_bytes = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(num_bytes + 1);
    bool is_done = text != NULL && fread(text, 1, num_bytes, file) == num_bytes &&
                   time_text(tokenizer, path, text, num_bytes);
    free(text);
    fclose(file);
    return is_done;
}

/* 1 MB of one pattern again and again. */
static bool time_repeated(const struct imbrex_tokenizer *tokenizer, const char *name,
                          const char *pattern)
{
    size_t pattern_bytes = strlen(pattern), num_bytes = 0;
    char *text = malloc(MADE_BYTES + pattern_bytes);
    if (text == NULL) {
        return false;
    }
    while (num_bytes < MADE_BYTES) {
        memcpy(text + num_bytes, pattern, pattern_bytes);
        num_bytes += pattern_bytes;
    }
    bool is_done = time_text(tokenizer, name, text, num_bytes);
    free(text);
    return is_done;
}

int main(int num_arguments, char **arguments)
{
    static const char *const patterns[][2] = {
        {"letter a", "a"},
        {"digit 7", "7"},
        {"space", " "},
        {"line break", "\n"},
        {"mark !", "!"},
        {"apostrophe", "'"},
        {"word abcxyz", "abcxyz"},
        {"spaces, letter", "   a"},
        {"Han", "\xe4\xb8\xad"},
        {"combining marks", "\xcc\x81\xcc\xa7"},
        {"angle brackets", "<|"},
    };
    if (num_arguments < 2) {
        fprintf(stderr, "usage: bench_tokenizer TOKENIZER TEXT_FILE...\n");
        return 2;
    }
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err;
    double begin = seconds();
    if (imbrex_tokenizer_open(arguments[1], &tokenizer, &err) != IMBREX_STATUS_OK) {
        fprintf(stderr, "bench_tokenizer: %s\n", err.message);
        return 1;
    }
    printf("%s: opened in %.0f ms\n", arguments[1], (seconds() - begin) * 1e3);
    bool is_done = true;
    for (int i = 2; i < num_arguments; i++) {
        is_done &= time_file(tokenizer, arguments[i]);
    }
    for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
        is_done &= time_repeated(tokenizer, patterns[i][0], patterns[i][1]);
    }
    imbrex_tokenizer_close(tokenizer);
    return is_done ? 0 : 1;
}
