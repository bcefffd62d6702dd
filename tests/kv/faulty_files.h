/* SPDX-License-Identifier: Apache-2.0 */
/* A file system that dies in the middle of a write, refuses, hesitates and lies: the system's, with
 * faults between. Any thread. */
#ifndef IMBREX_TESTS_FAULTY_FILES_H
#define IMBREX_TESTS_FAULTY_FILES_H

#include <stdatomic.h>
#include <stdbool.h>

#include "kv/kv_files.h"

struct faulty_files {
    struct kv_files files; /* user: this */
    /* Bytes that can still be written; then the process is dead: the write stops there, and no call
     * changes anything any more. -1: no limit. */
    atomic_int_fast64_t num_bytes_left;
    /* Every so many'th call of that kind fails with this errno; 0: none. */
    atomic_int_fast64_t read_every, write_every, open_every, resize_every;
    atomic_int failure;
    /* Bytes that the disk has room for; what does not fit is ENOSPC, and what is removed is room
     * again. A file takes its room when it is resized, or, is_late, as it is written. -1: no limit.
     */
    atomic_int_fast64_t room_bytes;
    bool is_late;
    bool is_short;                  /* reads and writes move at most half of what was asked for */
    atomic_int_fast64_t flip_every; /* a bit of every so many'th read is wrong; 0: none */
    atomic_int_fast64_t num_reads, num_writes, num_opens, num_resizes;
    atomic_int_fast64_t num_bytes_written;
};

void faulty_files_init(struct faulty_files *faulty);

#endif
