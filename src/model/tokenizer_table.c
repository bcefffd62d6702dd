/* SPDX-License-Identifier: Apache-2.0 */
/* Texts to ids, by hashing. The texts come from files, so the table holds its own against texts
 * that were chosen to collide: a lookup never passes more than a fixed number of slots. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "model/tokenizer_internal.h"

/* Slots that a lookup may pass. In a table that is half empty an even hash passes a few dozen. */
#define MAX_PROBES 512

/* One that crowds the texts is given up for the next. */
static const uint64_t seeds[] = {
    UINT64_C(0x9e3779b97f4a7c15),
    UINT64_C(0xc2b2ae3d27d4eb4f),
    UINT64_C(0x165667b19e3779f9),
    UINT64_C(0x27d4eb2f165667c5),
};

static uint64_t mix(uint64_t hash)
{
    hash ^= hash >> 32;
    hash *= UINT64_C(0xd6e8feb86659fd93);
    return hash ^ hash >> 29;
}

static uint64_t text_hash(uint64_t seed, const char *text, size_t num_bytes)
{
    uint64_t hash = seed ^ num_bytes, word;
    for (; num_bytes >= sizeof(word); num_bytes -= sizeof(word), text += sizeof(word)) {
        memcpy(&word, text, sizeof(word));
        hash = mix(hash ^ word) + seed;
    }
    word = 0;
    if (num_bytes > 0) {
        memcpy(&word, text, num_bytes);
    }
    return mix(mix(hash ^ word));
}

/* The slot of a text, or the empty one where it would be; NULL if there is none within reach. */
static struct text_slot *find_slot(const struct text_table *table, const char *text,
                                   size_t num_bytes)
{
    size_t mask = ((size_t)1 << (64 - table->shift)) - 1;
    size_t slot_idx = (size_t)(text_hash(table->seed, text, num_bytes) >> table->shift);
    for (int probe = 0; probe < MAX_PROBES; probe++) {
        struct text_slot *slot = &table->slots[slot_idx];
        if (slot->text.bytes == NULL ||
            (slot->text.num_bytes == num_bytes && memcmp(slot->text.bytes, text, num_bytes) == 0)) {
            return slot;
        }
        slot_idx = (slot_idx + 1) & mask;
    }
    return NULL;
}

static bool fill(struct text_table *table, const struct text_slot *entries, size_t num_entries)
{
    memset(table->slots, 0, sizeof(*table->slots) << (64 - table->shift));
    for (size_t i = 0; i < num_entries; i++) {
        struct text_slot *slot = find_slot(table, entries[i].text.bytes, entries[i].text.num_bytes);
        if (slot == NULL) {
            return false;
        }
        *slot = entries[i];
    }
    return true;
}

enum imbrex_status text_table_build(const char *path, const struct text_slot *entries,
                                    size_t num_entries, struct text_table *table,
                                    struct imbrex_error *err)
{
    unsigned num_bits = 4;
    while (num_entries > (size_t)1 << (num_bits - 1)) {
        num_bits++;
    }
    struct text_table built = {.shift = 64 - num_bits};
    size_t num_table_bytes = sizeof(*built.slots) << num_bits;
    built.slots = malloc(num_table_bytes);
    if (built.slots == NULL) {
        return error_out_of_memory(err, "texts of the tokens", num_table_bytes);
    }
    for (size_t i = 0; i < sizeof(seeds) / sizeof(seeds[0]); i++) {
        built.seed = seeds[i];
        if (fill(&built, entries, num_entries)) {
            *table = built;
            return IMBREX_STATUS_OK;
        }
    }
    free(built.slots);
    return error_set(err, IMBREX_STATUS_FORMAT,
                     "%s: tokens: expected texts that hash evenly, found more than %d in a row of "
                     "slots",
                     path, MAX_PROBES);
}

void text_table_release(struct text_table *table)
{
    free(table->slots);
    table->slots = NULL;
}

int32_t text_table_find(const struct text_table *table, const char *text, size_t num_bytes)
{
    const struct text_slot *slot = find_slot(table, text, num_bytes);
    return slot == NULL || slot->text.bytes == NULL ? -1 : slot->id;
}
