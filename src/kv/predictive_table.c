/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/predictive_table.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* 1/s: back within a nanosecond. Sums that were learned stay far below; those of a file need not,
 * and an index must be finite. */
#define MAX_HAZARD 1e9

#define SECOND_NS INT64_C(1000000000)
#define ROOT_OF_TWO_NS INT64_C(1414213562)

/* From the age at which the bin begins; the end of the last one is nominal. */
static int64_t bin_begin_ns(int32_t bin)
{
    if (bin == 0) {
        return 0;
    }
    return ((bin - 1) % 2 == 0 ? SECOND_NS : ROOT_OF_TWO_NS) << ((bin - 1) / 2);
}

int32_t predictive_bin(int64_t age_ns)
{
    if (age_ns < SECOND_NS) {
        return 0;
    }
    int32_t octave = 63 - __builtin_clzll((unsigned long long)(age_ns / SECOND_NS));
    if (octave >= 13) {
        return PREDICTIVE_NUM_BINS - 1;
    }
    return 1 + 2 * octave + (age_ns >= ROOT_OF_TWO_NS << octave);
}

static double seconds(int64_t duration_ns)
{
    return (double)duration_ns * 1e-9;
}

static void clear(struct predictive_table *table)
{
    memset(table->cells, 0, PREDICTIVE_MAX_CELLS * sizeof(*table->cells));
    table->cells[0].parent = -1;
    for (int32_t i = 0; i < PREDICTIVE_NUM_COARSE; i++) {
        table->cells[1 + i].parent = 0;
    }
    for (int32_t i = 0; i < PREDICTIVE_NUM_MIDDLE; i++) {
        table->cells[1 + PREDICTIVE_NUM_COARSE + i].parent = 1 + i / PREDICTIVE_NUM_TURNS;
    }
    table->num_cells = 1 + PREDICTIVE_NUM_COARSE + PREDICTIVE_NUM_MIDDLE;
    for (int32_t i = 0; i < PREDICTIVE_NUM_CLASSES; i++) {
        table->cell_of_class[i] = -1;
    }
    table->renewal = 1;
}

enum imbrex_status predictive_table_init(const struct kv_predictive_knobs *knobs,
                                         struct predictive_table *table, struct imbrex_error *err)
{
    struct predictive_table created = {.knobs = *knobs, .looks_ahead = true};

    created.cells = calloc(PREDICTIVE_MAX_CELLS, sizeof(*created.cells));
    created.cell_of_class = calloc(PREDICTIVE_NUM_CLASSES, sizeof(*created.cell_of_class));
    if (created.cells == NULL || created.cell_of_class == NULL) {
        predictive_table_deinit(&created);
        return error_out_of_memory(err, "the table of return times",
                                   PREDICTIVE_MAX_CELLS * sizeof(*created.cells));
    }
    clear(&created);
    *table = created;
    return IMBREX_STATUS_OK;
}

void predictive_table_deinit(struct predictive_table *table)
{
    free(table->cells);
    free(table->cell_of_class);
    *table = (struct predictive_table){0};
}

size_t predictive_table_bytes(const struct predictive_table *table)
{
    return PREDICTIVE_MAX_CELLS * sizeof(*table->cells) +
           PREDICTIVE_NUM_CLASSES * sizeof(*table->cell_of_class);
}

/* The number of limits, times scale, that the value reaches. */
static int32_t cut(int64_t value, const int64_t *limits, int32_t num_limits, double scale)
{
    int32_t i = 0;
    while (i < num_limits && (double)value >= (double)limits[i] * scale) {
        i++;
    }
    return i;
}

int32_t predictive_class(const struct kv_predictive_knobs *knobs,
                         const struct kv_fingerprint *fingerprint, enum predictive_region region,
                         int64_t num_new_tokens, bool use_hints)
{
    static const int64_t turn_limits[] = {1, 2, 3, 5, 9, 22};
    static const int64_t gap_limits[] = {0, 12 * SECOND_NS, 90 * SECOND_NS};
    static const int64_t new_limits[] = {513, 4097};
    static const int64_t length_limits[] = {8192, 65536, 131072};
    static const int64_t return_limits[] = {60 * SECOND_NS, 300 * SECOND_NS};
    int32_t stop = fingerprint->finish == KV_FINISH_TOOL   ? 2
                   : fingerprint->finish == KV_FINISH_STOP ? 1
                                                           : 0;
    int32_t hint = 0;

    if (use_hints && fingerprint->is_session_end) {
        hint = 1;
    } else if (use_hints && fingerprint->expected_return_ns > 0) {
        hint = 2 + cut(fingerprint->expected_return_ns, return_limits, 2, 1.0);
    }
    int32_t class_idx =
        (stop * PREDICTIVE_NUM_REGIONS + (int32_t)region) * PREDICTIVE_NUM_HINTS + hint;
    class_idx = class_idx * PREDICTIVE_NUM_TURNS + cut(fingerprint->turn, turn_limits, 6, 1.0);
    class_idx = class_idx * 4 + cut(fingerprint->last_gap_ns, gap_limits, 3, knobs->gap_limits);
    class_idx = class_idx * 3 + cut(num_new_tokens, new_limits, 2, knobs->new_limits);
    return class_idx * 4 +
           cut(fingerprint->num_prompt_tokens, length_limits, 3, knobs->length_limits);
}

static int32_t middle_cell(int32_t class_idx)
{
    return 1 + PREDICTIVE_NUM_COARSE + class_idx / PREDICTIVE_NUM_DETAILS;
}

int32_t predictive_table_cell(struct predictive_table *table, int32_t class_idx)
{
    assert(class_idx >= 0 && class_idx < PREDICTIVE_NUM_CLASSES);
    if (table->cell_of_class[class_idx] >= 0) {
        return table->cell_of_class[class_idx];
    }
    if (table->num_cells == PREDICTIVE_MAX_CELLS) {
        return middle_cell(class_idx);
    }
    int32_t cell_idx = table->num_cells++;
    table->cell_of_class[class_idx] = cell_idx;
    table->cells[cell_idx].parent = middle_cell(class_idx);
    table->cells[cell_idx].class_idx = class_idx;
    return cell_idx;
}

void predictive_table_return(struct predictive_table *table, int32_t cell_idx, int64_t age_ns,
                             double weight)
{
    int32_t bin = predictive_bin(age_ns);
    for (; cell_idx >= 0; cell_idx = table->cells[cell_idx].parent) {
        table->cells[cell_idx].events[bin] += weight;
    }
}

void predictive_table_expose(struct predictive_table *table, int32_t cell_idx, int64_t from_ns,
                             int64_t to_ns, double weight)
{
    if (from_ns >= to_ns) {
        return;
    }
    int32_t last_bin = predictive_bin(to_ns);
    for (int32_t bin = predictive_bin(from_ns); bin <= last_bin; bin++) {
        int64_t end_ns = bin == last_bin ? to_ns : bin_begin_ns(bin + 1);
        double exposure = weight * seconds(end_ns - from_ns);
        for (int32_t i = cell_idx; i >= 0; i = table->cells[i].parent) {
            table->cells[i].exposure[bin] += exposure;
        }
        from_ns = end_ns;
    }
}

void predictive_table_renew(struct predictive_table *table)
{
    table->renewal++;
}

/* e^-x for x >= 0 by its series and squaring: libm's last bit differs between machines. */
static double decay(double x)
{
    if (x > 700.0) {
        return 0.0;
    }
    int32_t num_squarings = 0;
    while (x > 0.25) {
        x *= 0.5;
        num_squarings++;
    }
    double term = 1.0, sum = 1.0;
    for (int32_t i = 1; i <= 9; i++) {
        term *= -x / i;
        sum += term;
    }
    for (; num_squarings > 0; num_squarings--) {
        sum *= sum;
    }
    return sum;
}

double predictive_table_num_returns(const struct predictive_table *table, int32_t cell_idx)
{
    const struct predictive_cell *cell = &table->cells[cell_idx];
    double num_returns = 0.0;
    for (int32_t bin = 0; bin < PREDICTIVE_NUM_BINS; bin++) {
        num_returns += cell->events[bin];
    }
    return num_returns;
}

static void compute_hazards(struct predictive_table *table, int32_t cell_idx)
{
    struct predictive_cell *cell = &table->cells[cell_idx];
    const struct kv_predictive_knobs *knobs = &table->knobs;
    double shrinkage = cell->parent < 0                        ? 1.0
                       : cell->parent == 0                     ? knobs->coarse_shrinkage
                       : cell->parent <= PREDICTIVE_NUM_COARSE ? knobs->middle_shrinkage
                                                               : knobs->fine_shrinkage;
    if (cell->renewal == table->renewal) {
        return;
    }
    if (cell->parent >= 0) {
        compute_hazards(table, cell->parent);
    }
    for (int32_t bin = 0; bin < PREDICTIVE_NUM_BINS; bin++) {
        /* Of what nothing is known, half is back when its age has doubled. */
        double prior = cell->parent < 0 ? 0.5 / seconds(bin_begin_ns(bin + 1))
                                        : table->cells[cell->parent].hazard[bin];
        double hazard = (cell->events[bin] + shrinkage) / (cell->exposure[bin] + shrinkage / prior);
        cell->hazard[bin] = hazard < MAX_HAZARD ? hazard : MAX_HAZARD;
    }
    cell->renewal = table->renewal;
    cell->index[0] = -1.0f;
}

static void compute_index(struct predictive_cell *cell)
{
    double lost[PREDICTIVE_NUM_BINS], kept[PREDICTIVE_NUM_BINS], held[PREDICTIVE_NUM_BINS];

    for (int32_t bin = 0; bin < PREDICTIVE_NUM_BINS; bin++) {
        double width = seconds(bin_begin_ns(bin + 1) - bin_begin_ns(bin));
        kept[bin] = decay(cell->hazard[bin] * width);
        lost[bin] = 1.0 - kept[bin];
        held[bin] = lost[bin] > 1e-9 ? lost[bin] / cell->hazard[bin] : width;
    }
    for (int32_t first = 0; first < PREDICTIVE_NUM_BINS; first++) {
        double open = 1.0, returned = 0.0, time = 0.0, best = 0.0;
        for (int32_t bin = first; bin < PREDICTIVE_NUM_BINS; bin++) {
            returned += open * lost[bin];
            time += open * held[bin];
            open *= kept[bin];
            if (returned > best * time) {
                best = returned / time;
            }
        }
        cell->index[first] = (float)best;
    }
}

void predictive_table_index(struct predictive_table *table, int32_t cell_idx, int64_t age_ns,
                            double *index, double *slope, int64_t *until_ns)
{
    struct predictive_cell *cell = &table->cells[cell_idx];
    int32_t bin = predictive_bin(age_ns);

    if (cell->renewal != table->renewal) {
        compute_hazards(table, cell_idx);
    }
    if (cell->index[0] < 0.0f && table->looks_ahead) {
        compute_index(cell);
    } else if (cell->index[0] < 0.0f) {
        for (int32_t i = 0; i < PREDICTIVE_NUM_BINS; i++) {
            cell->index[i] = (float)cell->hazard[i];
        }
    }
    if (bin == PREDICTIVE_NUM_BINS - 1) {
        *index = cell->index[bin];
        *slope = 0.0;
        *until_ns = INT64_MAX;
        return;
    }
    int64_t begin_ns = bin_begin_ns(bin), end_ns = bin_begin_ns(bin + 1);
    double rise = (double)cell->index[bin + 1] - (double)cell->index[bin];
    *slope = rise / (double)(end_ns - begin_ns);
    *index = (double)cell->index[bin] - *slope * (double)begin_ns;
    *until_ns = end_ns;
}

/* ---- saved form -------------------------------------------------------------------------------
 * magic, version, number of bins, number of fine cells; per cell its class, then events and
 * exposure of each bin; a checksum of all before it. Coarser levels are sums, made again when
 * loading. */
static const unsigned char magic[8] = {'I', 'M', 'B', 'X', 'K', 'V', 'P', 'R'};
enum {
    SAVED_VERSION = 1,
    SAVED_HEADER_BYTES = 8 + 3 * 4,
    SAVED_CELL_BYTES = 4 + 2 * 8 * PREDICTIVE_NUM_BINS,
};

static void put_word(unsigned char **place, uint64_t value, int32_t num_bytes)
{
    for (int32_t i = 0; i < num_bytes; i++) {
        *(*place)++ = (unsigned char)(value >> 8 * i);
    }
}

static uint64_t take_word(const unsigned char **place, int32_t num_bytes)
{
    uint64_t value = 0;
    for (int32_t i = 0; i < num_bytes; i++) {
        value |= (uint64_t) * (*place)++ << 8 * i;
    }
    return value;
}

/* FNV-1a. */
static uint64_t checksum(const unsigned char *bytes, size_t num_bytes)
{
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < num_bytes; i++) {
        sum = (sum ^ bytes[i]) * 0x100000001b3u;
    }
    return sum;
}

static void put_number(unsigned char **place, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof(bits));
    put_word(place, bits, 8);
}

enum imbrex_status predictive_table_save(const struct predictive_table *table,
                                         unsigned char **bytes, size_t *num_bytes,
                                         struct imbrex_error *err)
{
    int32_t first_fine = 1 + PREDICTIVE_NUM_COARSE + PREDICTIVE_NUM_MIDDLE;
    int32_t num_saved = table->num_cells - first_fine;
    size_t total = SAVED_HEADER_BYTES + (size_t)num_saved * SAVED_CELL_BYTES + 8;
    unsigned char *saved = malloc(total);
    unsigned char *place = saved;

    if (saved == NULL) {
        return error_out_of_memory(err, "the saved table of return times", total);
    }
    memcpy(place, magic, sizeof(magic));
    place += sizeof(magic);
    put_word(&place, SAVED_VERSION, 4);
    put_word(&place, PREDICTIVE_NUM_BINS, 4);
    put_word(&place, (uint32_t)num_saved, 4);
    for (int32_t cell_idx = first_fine; cell_idx < table->num_cells; cell_idx++) {
        const struct predictive_cell *cell = &table->cells[cell_idx];
        put_word(&place, (uint32_t)cell->class_idx, 4);
        for (int32_t bin = 0; bin < PREDICTIVE_NUM_BINS; bin++) {
            put_number(&place, cell->events[bin]);
            put_number(&place, cell->exposure[bin]);
        }
    }
    put_word(&place, checksum(saved, total - 8), 8);
    *bytes = saved;
    *num_bytes = total;
    return IMBREX_STATUS_OK;
}

/* A sum of weights or times: without a sign, and far from where sums overflow. */
static bool take_number(const unsigned char **place, double *number)
{
    uint64_t bits = take_word(place, 8);
    memcpy(number, &bits, sizeof(bits));
    return bits >> 63 == 0 && *number <= 1e30;
}

static enum imbrex_status load_cells(struct predictive_table *table, const unsigned char *place,
                                     uint32_t num_cells, struct imbrex_error *err)
{
    for (uint32_t i = 0; i < num_cells; i++) {
        uint32_t class_idx = (uint32_t)take_word(&place, 4);
        if (class_idx >= PREDICTIVE_NUM_CLASSES || table->cell_of_class[class_idx] >= 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "saved policy: class %u of cell %u: expected one below %d, each once",
                             class_idx, i, (int)PREDICTIVE_NUM_CLASSES);
        }
        int32_t cell_idx = predictive_table_cell(table, (int32_t)class_idx);
        for (int32_t bin = 0; bin < PREDICTIVE_NUM_BINS; bin++) {
            double events, exposure;
            bool are_good = take_number(&place, &events);
            are_good = take_number(&place, &exposure) && are_good;
            if (!are_good) {
                return error_set(err, IMBREX_STATUS_FORMAT,
                                 "saved policy: cell %u, bin %d: expected sums from 0 to 1e30", i,
                                 (int)bin);
            }
            for (int32_t j = cell_idx; j >= 0; j = table->cells[j].parent) {
                table->cells[j].events[bin] += events;
                table->cells[j].exposure[bin] += exposure;
            }
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status predictive_table_load(struct predictive_table *table, const unsigned char *bytes,
                                         size_t num_bytes, struct imbrex_error *err)
{
    const unsigned char *place = bytes + sizeof(magic);

    if (num_bytes < SAVED_HEADER_BYTES + 8 || memcmp(bytes, magic, sizeof(magic)) != 0) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "saved policy: expected what predictive saves, found %zu other bytes",
                         num_bytes);
    }
    uint32_t version = (uint32_t)take_word(&place, 4);
    uint32_t num_bins = (uint32_t)take_word(&place, 4);
    uint32_t num_cells = (uint32_t)take_word(&place, 4);
    if (version != SAVED_VERSION || num_bins != PREDICTIVE_NUM_BINS) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "saved policy: version %u with %u bins: expected version %d with %d",
                         version, num_bins, (int)SAVED_VERSION, (int)PREDICTIVE_NUM_BINS);
    }
    if (num_cells > PREDICTIVE_MAX_FINE ||
        num_bytes != SAVED_HEADER_BYTES + (size_t)num_cells * SAVED_CELL_BYTES + 8) {
        return error_set(err, IMBREX_STATUS_FORMAT, "saved policy: %zu bytes do not hold %u cells",
                         num_bytes, num_cells);
    }
    const unsigned char *sum = bytes + num_bytes - 8;
    if (take_word(&sum, 8) != checksum(bytes, num_bytes - 8)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "saved policy: the checksum differs");
    }
    struct predictive_table loaded;
    TRY(predictive_table_init(&table->knobs, &loaded, err));
    enum imbrex_status status = load_cells(&loaded, place, num_cells, err);
    if (status != IMBREX_STATUS_OK) {
        predictive_table_deinit(&loaded);
        return status;
    }
    loaded.looks_ahead = table->looks_ahead;
    predictive_table_deinit(table);
    *table = loaded;
    return IMBREX_STATUS_OK;
}
