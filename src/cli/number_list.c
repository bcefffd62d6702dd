/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/number_list.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/output.h"

int number_list_parse(const char *command, const char *option, const char *text, int32_t min,
                      int32_t max, struct number_list *list)
{
    const char *word = text;

    *list = (struct number_list){.count = 0};
    for (;;) {
        size_t length = strcspn(word, ",");
        char *end = NULL;
        errno = 0;
        long long value = strtoll(word, &end, 10);
        bool begins_well = word[0] >= '0' && word[0] <= '9';
        if (!begins_well || end != word + length || errno != 0 || value < min || value > max) {
            output_error("%s: %s: expected whole numbers from %" PRId32 " to %" PRId32
                         ", found \"%.*s\"",
                         command, option, min, max, (int)length, word);
            return EXIT_CODE_INPUT;
        }
        if (list->count == NUMBER_LIST_MAX) {
            output_error("%s: %s: expected at most %d numbers, found more", command, option,
                         NUMBER_LIST_MAX);
            return EXIT_CODE_INPUT;
        }
        list->values[list->count++] = (int32_t)value;
        if (word[length] == '\0') {
            return EXIT_CODE_OK;
        }
        word += length + 1;
    }
}

int32_t number_list_max(const struct number_list *list)
{
    int32_t max = list->values[0];

    for (int32_t i = 1; i < list->count; i++) {
        max = list->values[i] > max ? list->values[i] : max;
    }
    return max;
}
