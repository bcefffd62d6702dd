/* SPDX-License-Identifier: Apache-2.0 */
#include "base/clock.h"

#include <time.h>

int64_t clock_now_ns(void)
{
    struct timespec now;
    /* Cannot fail: every Linux has this clock and the pointer is valid. */
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
