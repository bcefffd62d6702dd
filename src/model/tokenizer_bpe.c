/* SPDX-License-Identifier: Apache-2.0 */
/* Byte pair encoding: the pair of neighbours with the lowest rank is merged, the leftmost of equal
 * ones, until no pair has a rank. Short words look for the pair by walking over all of them; long
 * ones (somebody's 1 MB of "aaaa") keep the symbols in a linked list and in a heap those pairs that
 * come before both of their neighbours, so that a word costs O(n log n) whatever is in it, and
 * hardly more than n where it is one letter again and again. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "model/tokenizer_internal.h"

/* Where walking stops being faster than the heap. */
#define SHORT_WORD_SYMBOLS 48

/* Slots that a lookup may pass before it finds its pair or an empty one. Pairs that hash evenly
 * pass a few dozen at most in a table that is half empty. */
#define MERGE_MAX_PROBES 512

/* Odd constants without structure; one that crowds the pairs is given up for the next. */
static const uint64_t multipliers[] = {
    UINT64_C(0x9e3779b97f4a7c15),
    UINT64_C(0xd6e8feb86659fd93),
    UINT64_C(0xa0761d6478bd642f),
    UINT64_C(0xe7037ed1a0b428db),
};

struct bpe_symbol {
    int32_t id;
    uint32_t prev, next;   /* symbol_none: the word ends here */
    uint32_t rank, merged; /* of the pair with the next one; MERGE_NO_RANK: no pair, or absorbed */
};

static const uint32_t symbol_none = UINT32_MAX;

/* ---- table ---------------------------------------------------------------------------------- */

static size_t merge_slot(const struct merge_table *table, uint32_t left, uint32_t right)
{
    uint64_t key = (uint64_t)left << 32 | right;
    return (size_t)((key ^ key >> 29) * table->multiplier >> table->shift);
}

/* Reads the rank of a pair and what it merges to; MERGE_NO_RANK if it does not merge. */
static inline uint32_t merge_rank(const struct merge_table *table, int32_t left, int32_t right,
                                  uint32_t *merged)
{
    size_t mask = ((size_t)1 << (64 - table->shift)) - 1;
    size_t slot_idx = merge_slot(table, (uint32_t)left, (uint32_t)right);
    for (;;) {
        const struct merge *slot = &table->slots[slot_idx];
        if (slot->left == (uint32_t)left && slot->right == (uint32_t)right) {
            *merged = slot->merged;
            return slot->rank;
        }
        if (slot->left == UINT32_MAX) {
            return MERGE_NO_RANK;
        }
        slot_idx = (slot_idx + 1) & mask;
    }
}

static bool merge_table_fill(const struct merge *merges, size_t num_merges,
                             struct merge_table *table)
{
    size_t num_slots = (size_t)1 << (64 - table->shift);
    memset(table->slots, 0xff, num_slots * sizeof(*table->slots));
    for (size_t i = 0; i < num_merges; i++) {
        size_t slot_idx = merge_slot(table, merges[i].left, merges[i].right);
        size_t num_probes = 0;
        while (table->slots[slot_idx].left != UINT32_MAX &&
               (table->slots[slot_idx].left != merges[i].left ||
                table->slots[slot_idx].right != merges[i].right)) {
            if (++num_probes == MERGE_MAX_PROBES) {
                return false;
            }
            slot_idx = (slot_idx + 1) & (num_slots - 1);
        }
        table->slots[slot_idx] = merges[i];
    }
    return true;
}

enum imbrex_status merge_table_build(const char *path, const struct merge *merges,
                                     size_t num_merges, struct merge_table *table,
                                     struct imbrex_error *err)
{
    unsigned num_bits = 4;
    while (num_merges > (size_t)1 << (num_bits - 1)) {
        num_bits++;
    }
    struct merge_table built = {.shift = 64 - num_bits};
    size_t num_table_bytes = sizeof(*built.slots) << num_bits;
    built.slots = malloc(num_table_bytes);
    if (built.slots == NULL) {
        return error_out_of_memory(err, "merges of the tokenizer", num_table_bytes);
    }
    for (size_t i = 0; i < sizeof(multipliers) / sizeof(multipliers[0]); i++) {
        built.multiplier = multipliers[i];
        if (merge_table_fill(merges, num_merges, &built)) {
            *table = built;
            return IMBREX_STATUS_OK;
        }
    }
    free(built.slots);
    return error_set(err, IMBREX_STATUS_FORMAT,
                     "%s: model.merges: expected pairs of ids that hash evenly, found more than %d "
                     "in a row of slots",
                     path, MERGE_MAX_PROBES);
}

void merge_table_release(struct merge_table *table)
{
    free(table->slots);
    table->slots = NULL;
}

/* ---- short words ---------------------------------------------------------------------------- */

static size_t merge_short_word(const struct merge_table *table, int32_t *ids, size_t num_ids)
{
    uint32_t ranks[SHORT_WORD_SYMBOLS], merged[SHORT_WORD_SYMBOLS]; /* of the pair i, i + 1 */
    for (size_t i = 0; i + 1 < num_ids; i++) {
        ranks[i] = merge_rank(table, ids[i], ids[i + 1], &merged[i]);
    }
    while (num_ids > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < num_ids; i++) {
            if (ranks[i] < ranks[best]) {
                best = i;
            }
        }
        if (ranks[best] == MERGE_NO_RANK) {
            break;
        }
        ids[best] = (int32_t)merged[best];
        for (size_t i = best + 1; i + 1 < num_ids; i++) {
            ids[i] = ids[i + 1];
            ranks[i - 1] = ranks[i];
            merged[i - 1] = merged[i];
        }
        num_ids--;
        if (best > 0) {
            ranks[best - 1] = merge_rank(table, ids[best - 1], ids[best], &merged[best - 1]);
        }
        if (best + 1 < num_ids) {
            ranks[best] = merge_rank(table, ids[best], ids[best + 1], &merged[best]);
        }
    }
    return num_ids;
}

/* ---- long words ----------------------------------------------------------------------------- */

/* Heap of rank << 32 | symbol: the smallest key is the lowest rank, then the leftmost symbol. It
 * holds each pair whose key is below those of the pairs on both sides, the smallest of all among
 * them; a pair that is not needs no entry before one beside it has been merged. An entry is out of
 * date when the symbol's rank is another by now. */
struct pair_heap {
    uint64_t *keys;
    size_t num_keys;
};

static void heap_sift_down(struct pair_heap *heap, size_t at)
{
    uint64_t key = heap->keys[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= heap->num_keys) {
            break;
        }
        if (child + 1 < heap->num_keys && heap->keys[child + 1] < heap->keys[child]) {
            child++;
        }
        if (heap->keys[child] >= key) {
            break;
        }
        heap->keys[at] = heap->keys[child];
        at = child;
    }
    heap->keys[at] = key;
}

static void heap_push(struct pair_heap *heap, uint64_t key)
{
    size_t at = heap->num_keys++;
    while (at > 0 && heap->keys[(at - 1) / 2] > key) {
        heap->keys[at] = heap->keys[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->keys[at] = key;
}

static uint64_t heap_pop(struct pair_heap *heap)
{
    uint64_t key = heap->keys[0];
    heap->keys[0] = heap->keys[--heap->num_keys];
    if (heap->num_keys > 0) {
        heap_sift_down(heap, 0);
    }
    return key;
}

/* Looks up the pair that begins at a symbol. */
static void symbol_pair(const struct merge_table *table, struct bpe_symbol *symbols, uint32_t at)
{
    struct bpe_symbol *symbol = &symbols[at];
    symbol->rank = symbol->next == symbol_none
                       ? MERGE_NO_RANK
                       : merge_rank(table, symbol->id, symbols[symbol->next].id, &symbol->merged);
}

/* Queues the pair that begins at a symbol if it comes before both of its neighbours. */
static void symbol_queue(const struct bpe_symbol *symbols, uint32_t at, struct pair_heap *heap)
{
    const struct bpe_symbol *symbol = &symbols[at];
    if (symbol->rank == MERGE_NO_RANK) {
        return;
    }
    if ((symbol->prev == symbol_none || symbols[symbol->prev].rank > symbol->rank) &&
        symbols[symbol->next].rank >= symbol->rank) {
        heap_push(heap, (uint64_t)symbol->rank << 32 | at);
    }
}

static enum imbrex_status scratch_reserve(struct bpe_scratch *scratch, size_t num_symbols,
                                          struct imbrex_error *err)
{
    if (num_symbols <= scratch->max_symbols) {
        return IMBREX_STATUS_OK;
    }
    bpe_scratch_release(scratch);
    /* Below 2^32 symbols (bpe_merge) neither product overflows where size_t has 64 bits. */
    size_t symbol_bytes, heap_bytes;
    if (!size_mul(num_symbols, sizeof(*scratch->symbols), &symbol_bytes) ||
        !size_mul(num_symbols, 2 * sizeof(*scratch->heap), &heap_bytes)) {
        return error_out_of_memory(err, "symbols of a long word", SIZE_MAX);
    }
    scratch->symbols = malloc(symbol_bytes);
    if (scratch->symbols == NULL) {
        return error_out_of_memory(err, "symbols of a long word", symbol_bytes);
    }
    scratch->heap = malloc(heap_bytes);
    if (scratch->heap == NULL) {
        bpe_scratch_release(scratch);
        return error_out_of_memory(err, "symbol pairs of a long word", heap_bytes);
    }
    scratch->max_symbols = num_symbols;
    return IMBREX_STATUS_OK;
}

void bpe_scratch_release(struct bpe_scratch *scratch)
{
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (struct bpe_scratch){0};
}

static size_t merge_long_word(const struct merge_table *table, int32_t *ids, size_t num_ids,
                              struct bpe_scratch *scratch)
{
    struct bpe_symbol *symbols = scratch->symbols;
    /* No two neighbours are queued, so n / 2 keys at first. Each of the n - 1 merges at most takes
     * one out and looks at four pairs in a row, of which it puts in two: 2 n keys fit. */
    struct pair_heap heap = {.keys = scratch->heap};
    uint32_t num_symbols = (uint32_t)num_ids;
    for (uint32_t i = 0; i < num_symbols; i++) {
        symbols[i] = (struct bpe_symbol){
            .id = ids[i],
            .prev = i == 0 ? symbol_none : i - 1,
            .next = i + 1 == num_symbols ? symbol_none : i + 1,
            .rank = MERGE_NO_RANK,
        };
    }
    for (uint32_t i = 0; i < num_symbols; i++) {
        symbol_pair(table, symbols, i);
    }
    for (uint32_t i = 0; i < num_symbols; i++) {
        symbol_queue(symbols, i, &heap);
    }
    while (heap.num_keys > 0) {
        uint64_t key = heap_pop(&heap);
        uint32_t at = (uint32_t)key;
        struct bpe_symbol *symbol = &symbols[at];
        if (symbol->rank != key >> 32) {
            continue;
        }
        struct bpe_symbol *absorbed = &symbols[symbol->next];
        uint32_t absorbed_rank = absorbed->rank;
        symbol->id = (int32_t)symbol->merged;
        symbol->next = absorbed->next;
        absorbed->rank = MERGE_NO_RANK;
        if (symbol->next != symbol_none) {
            symbols[symbol->next].prev = at;
        }
        symbol_pair(table, symbols, at);
        /* Of the pairs further out, those are queued already that came before the ones gone. */
        if (symbol->prev != symbol_none) {
            struct bpe_symbol *prev = &symbols[symbol->prev];
            uint32_t prev_rank = prev->rank;
            symbol_pair(table, symbols, symbol->prev);
            if (prev->prev != symbol_none && prev_rank < symbols[prev->prev].rank) {
                symbol_queue(symbols, prev->prev, &heap);
            }
            symbol_queue(symbols, symbol->prev, &heap);
        }
        symbol_queue(symbols, at, &heap);
        if (symbol->next != symbol_none && absorbed_rank <= symbols[symbol->next].rank) {
            symbol_queue(symbols, symbol->next, &heap);
        }
    }
    size_t num_left = 0;
    for (uint32_t i = 0; i != symbol_none; i = symbols[i].next) {
        ids[num_left++] = symbols[i].id;
    }
    return num_left;
}

enum imbrex_status bpe_merge(const struct merge_table *table, int32_t *ids, size_t *num_ids,
                             struct bpe_scratch *scratch, struct imbrex_error *err)
{
    if (*num_ids <= SHORT_WORD_SYMBOLS) {
        *num_ids = merge_short_word(table, ids, *num_ids);
        return IMBREX_STATUS_OK;
    }
    if (*num_ids >= UINT32_MAX) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "text: expected words of at most %u symbols, found one of %zu",
                         UINT32_MAX - 1, *num_ids);
    }
    TRY(scratch_reserve(scratch, *num_ids, err));
    *num_ids = merge_long_word(table, ids, *num_ids, scratch);
    return IMBREX_STATUS_OK;
}
