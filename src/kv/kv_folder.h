/* SPDX-License-Identifier: Apache-2.0 */
/* The folder of a disk tier: one process at a time has it, and it keeps the secret that its blocks'
 * keys begin with, so that they are found again after a restart.
 *
 *   imbrex-kv.lock    locked as long as the folder is open; whoever has it wrote its pid there
 *   imbrex-kv.secret  32 bytes, readable by their owner only
 *   *.imbrex-kv       segments (kv_segment.h)
 *
 * Other files are left alone. */
#ifndef IMBREX_KV_KV_FOLDER_H
#define IMBREX_KV_KV_FOLDER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

struct kv_folder {
    char *path;
    int lock_fd; /* -1: not open */
    dev_t lock_device;
    ino_t lock_inode;
    unsigned char secret[32];
    /* Of the file that was there instead of a secret, which this one has replaced; -1: none was. */
    int64_t replaced_bytes;
};

/* Makes the folder and its parents if they are missing. INVALID_ARGUMENT if another process, or
 * another engine of this one, has it open, or if lock or secret is no regular file; IO, with what
 * the system says. A secret that is not there or has another length is drawn anew: blocks that
 * were kept under the old one are not found any more. */
enum imbrex_status kv_folder_open(const char *path, struct kv_folder *folder,
                                  struct imbrex_error *err);

/* Whether the folder at that path is still the one that was opened, going by its lock. */
bool kv_folder_is_ours(const struct kv_folder *folder);
/* When it is not: takes what is at that path, with the secret that the folder had, or makes it
 * anew. *is_empty: it has no segments. 0 or -errno, and the folder is as before: -EWOULDBLOCK if
 * somebody else has locked what is there, -EEXIST if that has another secret. path and secret stay.
 */
int kv_folder_retake(struct kv_folder *folder, bool *is_empty);

/* Safe on a zeroed struct and after close. */
void kv_folder_close(struct kv_folder *folder);

#endif
