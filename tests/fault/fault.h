/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the n-th request for memory, a thread or a file fail. The linker sends every such call of
 * imbrex and of the libraries linked statically to the __wrap_ functions in fault.c. */
#ifndef IMBREX_TESTS_FAULT_H
#define IMBREX_TESTS_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#include "imbrex.h"

enum fault_kind {
    FAULT_MEMORY, /* malloc, calloc, realloc, mmap, pthread_create */
    FAULT_FILE,   /* open, read */
};

/* Call `fail_at` (counted from 1) of this kind fails, and all later ones too if `is_lasting`. */
void fault_arm(enum fault_kind kind, int64_t fail_at, bool is_lasting);
/* Nothing fails any more. Returns whether something did. */
bool fault_disarm(void);

/* Calls of the kind since the program began. */
int64_t fault_num_calls(enum fault_kind kind);
/* Heap blocks and mappings that are allocated and not yet freed. */
int64_t fault_num_live(void);

/* What is under test from its creation to its end, nothing left of it; looks itself at what came of
 * it. */
typedef enum imbrex_status fault_life(void *arg);
/* Lives with call 1, 2, 3, ... of the kind failing, until a life passes without. Fails the test
 * unless those end with `expected`, the last one with OK, and none leaks. How many calls failed. */
int64_t fault_each_call(enum fault_kind kind, bool is_lasting, enum imbrex_status expected,
                        fault_life *life, void *arg);

/* The same of something that outlives its faults, such as a folder or a server. is_again: a life
 * behind one in which a call failed, of which nothing may be left but what was kept. *is_whole:
 * whether all was as it should be. */
typedef enum imbrex_status fault_kept_life(void *arg, bool is_again, bool *is_whole);
/* Lives with call 1, 2, 3, ... failing, each followed by one without, until one passes. Those that
 * failed end with `expected`, or with OK if must_end is false; the others with OK, and whole. */
int64_t fault_each_call_of_kept(enum fault_kind kind, bool must_end, enum imbrex_status expected,
                                fault_kept_life *life, void *arg);

#endif
