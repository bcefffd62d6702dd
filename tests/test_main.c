/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every suite, or those named on the command line. `--list` prints their names. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

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

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The number of failed tests. The line about its time is what tools/run_tests reads. */
static int suite_run(const struct suite *suite)
{
    int64_t begin_ms = now_ms();
    int num_failed = suite->run();
    fflush(stderr);
    printf("[  TIME    ] %" PRId64 " ms: %s\n", now_ms() - begin_ms, suite->name);
    fflush(stdout);
    return num_failed;
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
        has_failed |= suite_run(&suites[i]) != 0;
    }
    for (int i = 1; i < argc; i++) {
        has_failed |= suite_run(suite_find(argv[i])) != 0;
    }
    return has_failed ? 1 : 0;
}
