/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers as options take them: 3.1M, 500k, 2e6. */
#ifndef IMBREX_CLI_SCALED_NUMBER_H
#define IMBREX_CLI_SCALED_NUMBER_H

#include <stdbool.h>
#include <stddef.h>

/* The length of a number in front: digits, one point, an exponent. */
size_t scaled_number_length(const char *text);
/* [num_bytes] of text: a number, and one of k, M, G (powers of 1000) or nothing. False for anything
 * else. */
bool scaled_number_read(const char *text, size_t num_bytes, double *value);
/* To a whole number, if it is as good as one: 3.1M is no exact double times a million. */
bool scaled_number_round(double *value);

#endif
