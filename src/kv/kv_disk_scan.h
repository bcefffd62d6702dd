/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what a folder has into the disk tier's index: headers and entries, no blocks. */
#ifndef IMBREX_KV_KV_DISK_SCAN_H
#define IMBREX_KV_KV_DISK_SCAN_H

#include "kv/kv_disk_index.h"
#include "kv/kv_disk_job.h"

/* Before there are workers; the index is empty. What has no room in it is removed, and so are
 * segments that were never finished. has_packed: written: some blocks are. IO if the folder cannot
 * be read, OUT_OF_MEMORY. */
enum imbrex_status kv_disk_scan(const struct kv_disk_work *work, struct kv_disk_index *index,
                                bool *has_packed, struct imbrex_error *err);

#endif
