/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/progress_bar.h"

#include <stdarg.h>
#include <stdio.h>

#define BAR_COLUMNS 30

void progress_bar_draw(double share, const char *format, ...)
{
    char text[128];
    int num_marks = (int)(share * BAR_COLUMNS);
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "\r[%.*s%*s] %3d %%, %s", num_marks, "##############################",
            BAR_COLUMNS - num_marks, "", (int)(100 * share), text);
}

void progress_bar_clear(void)
{
    fprintf(stderr, "\r\033[K");
}
