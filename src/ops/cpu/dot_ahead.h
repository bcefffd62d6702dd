/* SPDX-License-Identifier: Apache-2.0 */
/* What is prefetched while a unit of rows of weights is computed, where few rows of activations
 * read weights in the order of their addresses: the unit behind it, line by line. */
#ifndef IMBREX_OPS_CPU_DOT_AHEAD_H
#define IMBREX_OPS_CPU_DOT_AHEAD_H

#if defined(__x86_64__)

#include <stddef.h>
#include <stdint.h>
#include <xmmintrin.h>

#include "ops/cpu/dot_columns.h"
#include "ops/cpu/vec_unroll.h"

/* Columns of each matrix in turn: where the one ends and the other begins, memory is slower for a
 * moment. The last segment may have up to a unit more. */
#define SEGMENT_COLS 1024
#define SEGMENT_STRIDE (SEGMENT_COLS + 16) /* of sums; whole vectors of any instruction set */
/* Of the row that is needed last, beside the rows before it. */
#define AHEAD_BYTES 2048

struct unit_ahead {
    uintptr_t line, end; /* behind the last one comes what is at end + wrap_bytes */
    int64_t wrap_bytes;
};

/* Columns of one matrix, and where the weights are that come behind; NULL: none do. */
struct segment {
    int32_t matrix;
    int64_t begin, end;
    const unsigned char *next;
};

/* Columns [begin, end) of a matrix of a job. */
static inline struct segment segment_of(const struct dot_job *job, int32_t matrix, int64_t begin,
                                        int64_t end)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    struct segment segment = {.matrix = matrix, .begin = begin, .end = end};
    if (matrix + 1 < job->num_matrices) {
        segment.next = job->weights[matrix + 1] + begin * row_bytes;
    } else if (end < job->num_cols) {
        segment.next = job->weights[0] + end * row_bytes;
    }
    return segment;
}

/* Of the segment that begins there, where there are columns up to `end`. */
static inline int64_t segment_end_of(int64_t begin, int64_t end, int64_t unit_cols)
{
    return end - begin < SEGMENT_COLS + unit_cols ? end : begin + SEGMENT_COLS;
}

/* For the units of a segment. */
struct segment_ahead {
    uintptr_t end, next; /* next 0: nothing comes behind */
    int64_t lead;        /* from the first line of a unit to what is prefetched beside it */
};

static inline struct segment_ahead segment_ahead_of(const struct dot_job *job,
                                                    const struct segment *segment,
                                                    int64_t unit_cols)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    return (struct segment_ahead){.end = (uintptr_t)job->weights[segment->matrix] +
                                         (uintptr_t)(segment->end * row_bytes),
                                  .next = (uintptr_t)segment->next,
                                  .lead = (unit_cols - 1) * row_bytes + AHEAD_BYTES};
}

/* Of the unit that begins at an address. */
VEC_INLINE struct unit_ahead unit_ahead_of(const struct segment_ahead *segment,
                                           const unsigned char *unit)
{
    /* Where nothing comes behind, what is there already. */
    uintptr_t next = segment->next != 0 ? segment->next : (uintptr_t)unit;
    struct unit_ahead ahead = {.line = (uintptr_t)unit + (uintptr_t)segment->lead,
                               .end = segment->end,
                               .wrap_bytes = (int64_t)(next - segment->end)};
    if (ahead.line >= ahead.end) {
        ahead.line += (uintptr_t)ahead.wrap_bytes;
        ahead.end = UINTPTR_MAX;
    }
    return ahead;
}

/* The next lines. */
VEC_INLINE void prefetch_lines(struct unit_ahead *ahead, int num_lines)
{
    VEC_UNROLL
    for (int idx = 0; idx < num_lines; idx++) {
        _mm_prefetch((const char *)(ahead->line + (uintptr_t)(idx * LINE_BYTES)), _MM_HINT_T0);
    }
    ahead->line += (uintptr_t)(num_lines * LINE_BYTES);
    if (ahead->line >= ahead->end) {
        ahead->line += (uintptr_t)ahead->wrap_bytes;
        ahead->end = UINTPTR_MAX;
    }
}

#endif
#endif
