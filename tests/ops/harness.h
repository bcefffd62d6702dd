/* SPDX-License-Identifier: Apache-2.0 */
/* The frame of all check_<op> programs: proves an op on every kernel path against fp64, and times
 * what it has proved.
 *
 * A check program builds cases. A case places its buffers with harness_place (against guard pages,
 * between canaries), fills them, computes in fp64 what must come out and how far a result may be
 * from it, and calls harness_check, which runs the op
 *   - on each path the machine has, with 1, 1 again, 2 and 5 threads: within the bound, then bit
 *     for bit the same
 *   - in two halves and row by row: bit for bit what the whole batch gave
 * (of the reference with 1 and 5 threads and in halves alone: it takes a row at a time in any case)
 * and looks after each run whether anything beside the outputs was written. Inputs are read-only
 * while the op runs. */
#ifndef IMBREX_TESTS_OPS_HARNESS_H
#define IMBREX_TESTS_OPS_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/ops.h"

#define HARNESS_UNIT 0x1p-24 /* rounding error of one fp32 operation, relative */

struct harness;

/* The program: parses argv (--bench), calls `checks`, then `benches` if asked to and if nothing
 * failed; prints the summary. The exit status. */
int harness_main(int argc, char **argv, void (*checks)(struct harness *harness),
                 void (*benches)(struct harness *harness));

/* ---- case groups ---- */

/* Starts a group of cases; the line printed for the one before is complete. */
__attribute__((format(printf, 2, 3))) void harness_group(struct harness *harness,
                                                         const char *format, ...);
/* Names the case being built, for failure messages. */
__attribute__((format(printf, 2, 3))) void harness_case(struct harness *harness, const char *format,
                                                        ...);

/* ---- buffers of a case; all are gone after harness_end_case ---- */

/* On which side a buffer touches its guard page. */
enum placement { PLACEMENT_END, PLACEMENT_BEGIN, PLACEMENT_COUNT };
void harness_set_placement(struct harness *harness, enum placement placement);

/* num_bytes against a guard page, `shift` bytes (< 64) away from it for odd alignments; the rest of
 * its pages is canary. */
void *harness_place(struct harness *harness, size_t num_bytes, size_t shift);
/* Plain zeroed memory of the check itself, freed with the case. */
void *harness_alloc(struct harness *harness, size_t count, size_t element_bytes);
/* Makes a placed buffer read-only until the end of the case. */
void harness_seal(struct harness *harness, const void *buffer);
void harness_end_case(struct harness *harness);

/* ---- inputs ---- */

enum input_kind {
    INPUT_NORMAL,   /* about [-4, 4], mean 0, standard deviation 1 */
    INPUT_LARGE,    /* the same times 1e15 */
    INPUT_DENORMAL, /* the same times 1e-40 */
    INPUT_KIND_COUNT
};
const char *input_kind_name(enum input_kind kind);
double input_kind_scale(enum input_kind kind);

double harness_random(struct harness *harness);                       /* standard normal, about */
int32_t harness_random_below(struct harness *harness, int32_t limit); /* uniform in [0, limit) */
/* rows x width random values times scale; the gaps between rows are filled with NaN. */
void harness_fill(struct harness *harness, float *rows, int64_t num_rows, int64_t width,
                  int64_t stride, double scale);
/* `count` random weights of a dtype times scale, rounded to it; blocks get random bits and scales
 * that make values of about this size. */
void harness_fill_weights(struct harness *harness, void *weights, enum dtype dtype, int64_t count,
                          double scale);
void harness_store_weight(void *weights, enum dtype dtype, int64_t idx, double value);
/* The scale of the block that holds element idx. */
void harness_store_scale(void *weights, enum dtype dtype, int64_t idx, double scale);
/* Widened by code of its own, not by the library's. Plain types. */
double harness_weight(const void *weights, enum dtype dtype, int64_t idx);
/* Row row_idx of [.., count] weights of any dtype, widened; blocks by quant_dequantize_row, which
 * golden_quant proves. */
void harness_weight_row(struct harness *harness, struct weight_view weight, int64_t row_idx,
                        int64_t count, double *row);
/* Activations as the product with weights of a dtype sees them: unchanged, or brought into blocks
 * and back. */
void harness_activations(struct harness *harness, enum dtype dtype, const float *a, int64_t count,
                         double *row);
/* Whether the machine has the path that rounds activations to bf16 where weights are bf16. What is
 * expected of it stands apart, in the rounded_* of struct check_output. */
bool harness_rounds(const struct harness *harness);
/* Activations as that path sees them. */
void harness_rounded_activations(const float *a, int64_t count, double *row);
/* harness_product_bound of that path; weights and activations add up to these magnitudes. Numbers
 * below 2^-126 count as zero there. */
double harness_rounded_bound(int64_t count, double magnitude, double weight_magnitude,
                             double a_magnitude);
/* The scale of activations of a kind that the dtype can meet: F16 scales end at 65504. */
double harness_activation_scale(enum dtype dtype, enum input_kind kind);
/* How far fp32 may be from the exact product of `count` activations and weights, whose magnitudes
 * add up to `magnitude`. */
double harness_product_bound(enum dtype dtype, int64_t count, double magnitude);

/* ---- checking ---- */

struct check_output {
    float *at; /* placed, [num_rows, width], stride */
    int64_t num_rows, width, stride;
    const float *initial;   /* packed [num_rows, width], before each run; NULL: NaN */
    const double *expected; /* packed; infinite or NaN must come out as such */
    const double *bound;    /* packed, of |result - expected|; INFINITY: any number */
    /* Likewise, for the path that rounds activations; NULL: as for the others. */
    const double *rounded_expected, *rounded_bound;
    double global_ratio; /* of the root mean square of |result - expected| / bound; 0: any */
};

#define HARNESS_MAX_OUTPUTS 4

/* Runs rows [first, first + count) of the case. */
typedef void check_run_fn(struct ops *ops, void *arg, int32_t first, int32_t count);

struct check_plan {
    check_run_fn *run;
    void *arg;
    int32_t num_rows; /* of the batch */
    struct check_output outputs[HARNESS_MAX_OUTPUTS];
    int32_t num_outputs;
    bool whole_only; /* rows alone and halves are left out: too slow for a large shape */
    bool fast_only;  /* the reference path is left out, for the same reason */
};

/* One case: counted as passed or failed. */
bool harness_check(struct harness *harness, const struct check_plan *plan);
/* A condition of the case beside that; counts only when it fails. */
__attribute__((format(printf, 3, 4))) bool harness_expect(struct harness *harness, bool condition,
                                                          const char *format, ...);

/* ---- timing ---- */

/* Times the plan (which must have passed harness_check, or it refuses) on each path with 1 thread
 * and with as many as there are CPUs, interleaved, and prints medians. before_run may rotate
 * buffers. */
void harness_bench(struct harness *harness, const struct check_plan *plan,
                   void (*before_run)(void *arg), double flops, double bytes);

#endif
