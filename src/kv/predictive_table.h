/* SPDX-License-Identifier: Apache-2.0 */
/* What `predictive` learns: for each class of segments, when they return.
 *
 *   class     how the request ended x region x hint, then x turn, then x last gap x new tokens x
 *             prompt length: three levels; a cell for each, and one for everything
 *   cell      per bin of age, returns seen and time exposed to a return; weighted
 *   hazard    returns / exposure, each level drawn towards the one above it by pseudo-events
 *   index     G(class, age) = max over h of P(return within h | age) / E[time held until the return
 *             or h | age]: the benefit of a block-second of cache under the best time to give up
 *             (Gittins index). It looks ahead: a fresh block's hazard is small exactly when it must
 *             be kept, because think times lie before the returns.
 *
 * Arithmetic is plain IEEE operations in a fixed order: equal on all machines. */
#ifndef IMBREX_KV_PREDICTIVE_TABLE_H
#define IMBREX_KV_PREDICTIVE_TABLE_H

#include "kv/kv_policy.h"

enum {
    /* [0, 1 s), then two to an octave up to 8,192 s; the last takes what is older. */
    PREDICTIVE_NUM_BINS = 27,
    PREDICTIVE_NUM_STOPS = 3,
    PREDICTIVE_NUM_REGIONS = 3,
    PREDICTIVE_NUM_HINTS = 5,
    PREDICTIVE_NUM_TURNS = 7,
    PREDICTIVE_NUM_DETAILS = 4 * 3 * 4, /* last gap x new tokens x prompt length */
    PREDICTIVE_NUM_COARSE = PREDICTIVE_NUM_STOPS * PREDICTIVE_NUM_REGIONS * PREDICTIVE_NUM_HINTS,
    PREDICTIVE_NUM_MIDDLE = PREDICTIVE_NUM_COARSE * PREDICTIVE_NUM_TURNS,
    PREDICTIVE_NUM_CLASSES = PREDICTIVE_NUM_MIDDLE * PREDICTIVE_NUM_DETAILS,
    /* Classes with cells of their own; those that come later share their middle cell. */
    PREDICTIVE_MAX_FINE = 2048,
    PREDICTIVE_MAX_CELLS = 1 + PREDICTIVE_NUM_COARSE + PREDICTIVE_NUM_MIDDLE + PREDICTIVE_MAX_FINE,
};

/* Part of a finished request's path. */
enum predictive_region {
    PREDICTIVE_HEAD = 0,   /* up to the last block after which prompts part */
    PREDICTIVE_MIDDLE = 1, /* seen before this request */
    PREDICTIVE_TAIL = 2,   /* new with it */
};

struct predictive_cell {
    double events[PREDICTIVE_NUM_BINS];
    double exposure[PREDICTIVE_NUM_BINS]; /* s */
    double hazard[PREDICTIVE_NUM_BINS];   /* 1/s, of the last renewal */
    float index[PREDICTIVE_NUM_BINS];     /* 1/s, of the last renewal */
    uint32_t renewal;                     /* of the table when they were computed */
    int32_t parent;                       /* -1: the cell of everything */
    int32_t class_idx;                    /* of fine cells */
};

struct predictive_table {
    struct predictive_cell *cells; /* [PREDICTIVE_MAX_CELLS] */
    int32_t *cell_of_class;        /* [PREDICTIVE_NUM_CLASSES]; -1: none yet */
    struct kv_predictive_knobs knobs;
    bool looks_ahead; /* else the index is the hazard */
    int32_t num_cells;
    uint32_t renewal;
};

enum imbrex_status predictive_table_init(const struct kv_predictive_knobs *knobs,
                                         struct predictive_table *table, struct imbrex_error *err);
void predictive_table_deinit(struct predictive_table *table);
size_t predictive_table_bytes(const struct predictive_table *table);

/* The class of a part of a finished request. num_new_tokens: of its prompt, not seen before. */
int32_t predictive_class(const struct kv_predictive_knobs *knobs,
                         const struct kv_fingerprint *fingerprint, enum predictive_region region,
                         int64_t num_new_tokens, bool use_hints);
/* Its cell, made if there is room. */
int32_t predictive_table_cell(struct predictive_table *table, int32_t class_idx);

int32_t predictive_bin(int64_t age_ns);
/* A return at this age. */
void predictive_table_return(struct predictive_table *table, int32_t cell_idx, int64_t age_ns,
                             double weight);
/* No return from one age to the other. */
void predictive_table_expose(struct predictive_table *table, int32_t cell_idx, int64_t from_ns,
                             int64_t to_ns, double weight);
/* Returns of the class so far. */
double predictive_table_num_returns(const struct predictive_table *table, int32_t cell_idx);
/* From now on indices are those of what was learned until now. */
void predictive_table_renew(struct predictive_table *table);
/* The index in 1/s around this age: *index + *slope * age in ns, up to the age *until_ns. Between
 * the edges of bins it is a line. */
void predictive_table_index(struct predictive_table *table, int32_t cell_idx, int64_t age_ns,
                            double *index, double *slope, int64_t *until_ns);

/* Little endian, versioned, with a checksum. load replaces everything or, on FORMAT, nothing. */
enum imbrex_status predictive_table_save(const struct predictive_table *table,
                                         unsigned char **bytes, size_t *num_bytes,
                                         struct imbrex_error *err);
enum imbrex_status predictive_table_load(struct predictive_table *table, const unsigned char *bytes,
                                         size_t num_bytes, struct imbrex_error *err);

#endif
