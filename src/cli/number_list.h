/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers between commas, as options of the benchmarks take them. */
#ifndef IMBREX_CLI_NUMBER_LIST_H
#define IMBREX_CLI_NUMBER_LIST_H

#include <stdint.h>

#define NUMBER_LIST_MAX 32

struct number_list {
    int32_t values[NUMBER_LIST_MAX]; /* [count] */
    int32_t count;
};

/* Whole numbers in [min, max]. A message names the command and the option, "--m". Returns an exit
 * code. */
int number_list_parse(const char *command, const char *option, const char *text, int32_t min,
                      int32_t max, struct number_list *list);
int32_t number_list_max(const struct number_list *list);

#endif
