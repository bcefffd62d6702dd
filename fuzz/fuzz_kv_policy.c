/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as what the policy predictive saved: what is taken must be saved again as it was, and
 * give finite indices. Half of the inputs get the checksum that they should have, so that what lies
 * behind it is reached too. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kv/predictive_table.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check_loaded(struct predictive_table *table)
{
    predictive_table_renew(table);
    for (int32_t class_idx = 0; class_idx < PREDICTIVE_NUM_CLASSES; class_idx += 97) {
        int32_t cell_idx = predictive_table_cell(table, class_idx);
        for (int64_t age_ns = 1; age_ns < INT64_MAX / 8; age_ns *= 8) {
            double index, slope;
            int64_t until_ns;
            predictive_table_index(table, cell_idx, age_ns, &index, &slope, &until_ns);
            require(isfinite(index) && isfinite(slope) && until_ns > age_ns);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct predictive_table table;
    struct imbrex_error err;
    unsigned char *input = malloc(num_bytes + 8);
    if (input == NULL ||
        predictive_table_init(&kv_predictive_knobs_default, &table, &err) != IMBREX_STATUS_OK) {
        free(input);
        return 0;
    }
    memcpy(input, bytes, num_bytes);
    if (num_bytes >= 8 && num_bytes % 2 == 0) {
        uint64_t sum = 0xcbf29ce484222325u;
        for (size_t i = 0; i < num_bytes - 8; i++) {
            sum = (sum ^ input[i]) * 0x100000001b3u;
        }
        for (size_t i = 0; i < 8; i++) {
            input[num_bytes - 8 + i] = (unsigned char)(sum >> 8 * i);
        }
    }
    enum imbrex_status status = predictive_table_load(&table, input, num_bytes, &err);
    require(status == IMBREX_STATUS_OK || status == IMBREX_STATUS_FORMAT);
    if (status == IMBREX_STATUS_OK) {
        unsigned char *saved;
        size_t num_saved;
        require(predictive_table_save(&table, &saved, &num_saved, &err) == IMBREX_STATUS_OK);
        require(num_saved == num_bytes && memcmp(saved, input, num_bytes) == 0);
        free(saved);
        check_loaded(&table);
    }
    predictive_table_deinit(&table);
    free(input);
    return 0;
}
