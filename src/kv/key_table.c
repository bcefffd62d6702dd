/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/key_table.h"

#include <assert.h>
#include <stdlib.h>

enum imbrex_status key_table_init(int32_t max_entries, struct key_table *table,
                                  struct imbrex_error *err)
{
    struct key_table created = {.max_entries = max_entries};
    size_t num_places = 4;

    assert(max_entries >= 1 && max_entries <= (1 << 29));
    /* At most half full. */
    while (num_places < 2 * (size_t)max_entries) {
        num_places *= 2;
    }
    created.mask = (uint32_t)(num_places - 1);
    created.keys = calloc(num_places, sizeof(*created.keys));
    created.values = calloc(num_places, sizeof(*created.values));
    if (created.keys == NULL || created.values == NULL) {
        key_table_deinit(&created);
        return error_out_of_memory(err, "a table of KV keys", num_places * sizeof(*created.keys));
    }
    for (size_t i = 0; i < num_places; i++) {
        created.values[i] = -1;
    }
    *table = created;
    return IMBREX_STATUS_OK;
}

void key_table_deinit(struct key_table *table)
{
    free(table->keys);
    free(table->values);
    *table = (struct key_table){0};
}

size_t key_table_bytes(const struct key_table *table)
{
    return table->keys == NULL
               ? 0
               : ((size_t)table->mask + 1) * (sizeof(*table->keys) + sizeof(*table->values));
}

/* Keys may be small integers in a replay: their bits are spread. */
static uint32_t home(const struct key_table *table, uint64_t key)
{
    return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & table->mask;
}

/* Of the key, or the empty place where it would be. */
static uint32_t place_of(const struct key_table *table, uint64_t key)
{
    uint32_t place = home(table, key);
    while (table->values[place] >= 0 && table->keys[place] != key) {
        place = (place + 1) & table->mask;
    }
    return place;
}

int32_t key_table_find(const struct key_table *table, uint64_t key)
{
    return table->values[place_of(table, key)];
}

bool key_table_put(struct key_table *table, uint64_t key, int32_t value)
{
    uint32_t place = place_of(table, key);

    assert(value >= 0);
    if (table->values[place] < 0) {
        if (table->num_entries == table->max_entries) {
            return false;
        }
        table->num_entries++;
        table->keys[place] = key;
    }
    table->values[place] = value;
    return true;
}

void key_table_remove(struct key_table *table, uint64_t key)
{
    uint32_t hole = place_of(table, key);
    if (table->values[hole] < 0) {
        return;
    }
    table->num_entries--;
    for (uint32_t place = (hole + 1) & table->mask; table->values[place] >= 0;
         place = (place + 1) & table->mask) {
        /* An entry may fill the hole unless its home lies cyclically behind the hole. */
        uint32_t from_home = (place - home(table, table->keys[place])) & table->mask;
        if (from_home >= ((place - hole) & table->mask)) {
            table->keys[hole] = table->keys[place];
            table->values[hole] = table->values[place];
            hole = place;
        }
    }
    table->values[hole] = -1;
}
