/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/gpu_check.h"

#include <stdio.h>
#include <stdlib.h>

#include "imbrex_ops.h"

int check_absent(void)
{
    struct imbrex_device *opened = NULL;
    struct imbrex_error err = {0};
    if (imbrex_device_open(0, NULL, &opened, &err) == IMBREX_STATUS_OK) {
        imbrex_device_close(opened);
        return 1;
    }
    printf("%s\n", err.message);
    return SKIPPED;
}

#define MAX_FAILURE_LINES 40

int num_passed, num_failed;

static uint64_t random_state = 1;

void count(bool is_right, const char *what)
{
    if (is_right) {
        num_passed++;
        return;
    }
    num_failed++;
    if (num_failed <= MAX_FAILURE_LINES) {
        printf("FAILED: %s\n", what);
    }
}

void require(bool is_ok, const char *what)
{
    if (!is_ok) {
        printf("%s failed; %d passed, %d failed\n", what, num_passed, num_failed + 1);
        exit(1);
    }
}

uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

double random_normal(void)
{
    double sum = 0.0;
    for (int i = 0; i < 12; i++) {
        sum += (double)random_bits() * 0x1p-31;
    }
    return sum - 6.0;
}
