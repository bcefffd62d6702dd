/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs that check on a GPU share: results that are counted, random numbers. One of
 * each, since a program checks one thing after the other on one thread. */
#ifndef IMBREX_TESTS_GPU_GPU_CHECK_H
#define IMBREX_TESTS_GPU_GPU_CHECK_H

#include <stdbool.h>
#include <stdint.h>

/* The test runner's code for a program that had nothing to run on. */
#define SKIPPED 77

/* The exit code in a build without CUDA: that it cannot open a GPU is right, that it can is not. */
int check_absent(void);

extern int num_passed, num_failed;

/* Of each failure a line, up to the first 40. */
void count(bool is_right, const char *what);
/* For what the rest needs: ends the program otherwise. */
void require(bool is_ok, const char *what);

/* 31 bits, the same in each run. */
uint32_t random_bits(void);
double random_normal(void);

#endif
