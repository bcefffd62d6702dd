/* SPDX-License-Identifier: Apache-2.0 */
/* A log that keeps its last line and counts all: warnings only. */
#ifndef IMBREX_TESTS_NOTED_LINES_H
#define IMBREX_TESTS_NOTED_LINES_H

#include <stdio.h>

#include "imbrex.h"
#include "tests/test.h"

struct noted_lines {
    int32_t num_lines;
    char last[512];
};

/* An imbrex_log_fn; user: a struct noted_lines. */
static inline void note_line(void *user, enum imbrex_log_level level, const char *message)
{
    struct noted_lines *lines = user;
    assert_int_equal(level, IMBREX_LOG_LEVEL_WARNING);
    lines->num_lines++;
    (void)snprintf(lines->last, sizeof(lines->last), "%s", message);
}

#endif
