/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table from 64-bit key hashes to small integers, of bounded size: open addressing, linear
 * probing, entries move back when one leaves, so there are no marks of deleted ones. */
#ifndef IMBREX_KV_KEY_TABLE_H
#define IMBREX_KV_KEY_TABLE_H

#include "base/status.h"

struct key_table {
    uint64_t *keys;
    int32_t *values; /* -1: the place is empty */
    uint32_t mask;
    int32_t max_entries, num_entries;
};

/* Room for max_entries, at least 1. */
enum imbrex_status key_table_init(int32_t max_entries, struct key_table *table,
                                  struct imbrex_error *err);
void key_table_deinit(struct key_table *table);
size_t key_table_bytes(const struct key_table *table);

/* -1: not there. */
int32_t key_table_find(const struct key_table *table, uint64_t key);
/* Adds the key or changes its value, which is not negative. False: it is new and the table full. */
bool key_table_put(struct key_table *table, uint64_t key, int32_t value);
/* Does nothing if it is not there. */
void key_table_remove(struct key_table *table, uint64_t key);

#endif
