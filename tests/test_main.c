/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every suite, or those named on the command line. `--list` prints their names, `--threaded`
 * the names of those that start threads. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define X(name) int run_##name##_tests(void);
#include "tests/suites.h"
#undef X

struct suite {
    const char *name;
    int (*run)(void);
    bool is_threaded;
};

static const struct suite suites[] = {
#define X(name) {#name, run_##name##_tests, false},
#define X_THREADED(name) {#name, run_##name##_tests, true},
#include "tests/suites.h"
#undef X
};

#define NUM_SUITES (sizeof(suites) / sizeof(suites[0]))

/* The linker sends every call of pthread_create here. */
static atomic_int num_threads_started;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument)
{
    num_threads_started++;
    return __real_pthread_create(thread, attributes, start, argument);
}

/* Whether it passed. A suite with threads that is not listed as one would miss ThreadSanitizer. */
static bool suite_run(const struct suite *suite)
{
    num_threads_started = 0;
    bool has_passed = suite->run() == 0;
    if (!suite->is_threaded && num_threads_started > 0) {
        fprintf(stderr, "tests/suites.h: expected X_THREADED(%s), as it starts threads, found X\n",
                suite->name);
        return false;
    }
    return has_passed;
}

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
    bool is_threaded_asked = argc == 2 && strcmp(argv[1], "--threaded") == 0;
    if (is_threaded_asked || (argc == 2 && strcmp(argv[1], "--list") == 0)) {
        for (size_t i = 0; i < NUM_SUITES; i++) {
            if (suites[i].is_threaded || !is_threaded_asked) {
                puts(suites[i].name);
            }
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
        has_failed |= !suite_run(&suites[i]);
    }
    for (int i = 1; i < argc; i++) {
        has_failed |= !suite_run(suite_find(argv[i]));
    }
    return has_failed ? 1 : 0;
}
