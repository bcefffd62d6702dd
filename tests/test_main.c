/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every suite, or those named on the command line. `--list` prints their names. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define X(name) int run_##name##_tests(void);
#include "tests/suites.h"
#undef X

struct suite {
    const char *name;
    int (*run)(void);
};

static const struct suite suites[] = {
#define X(name) {#name, run_##name##_tests},
#include "tests/suites.h"
#undef X
};

#define NUM_SUITES (sizeof(suites) / sizeof(suites[0]))

static const struct suite *suite_find(const char *name)
{
    for (size_t i = 0; i < NUM_SUITES; i++) {
        if (strcmp(suites[i].name, name) == 0) {
            return &suites[i];
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < NUM_SUITES; i++) {
            puts(suites[i].name);
        }
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        if (!suite_find(argv[i])) {
            fprintf(stderr, "%s: no such suite (--list names them)\n", argv[i]);
            return 2;
        }
    }
    bool has_failed = false;
    for (size_t i = 0; argc == 1 && i < NUM_SUITES; i++) {
        has_failed |= suites[i].run() != 0;
    }
    for (int i = 1; i < argc; i++) {
        has_failed |= suite_find(argv[i])->run() != 0;
    }
    return has_failed ? 1 : 0;
}
