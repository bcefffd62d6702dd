/* SPDX-License-Identifier: Apache-2.0 */
/* What went wrong in the tiers of RAM and disk; the remote one tells for itself. */
#ifndef IMBREX_KV_KV_TIERS_FAULTS_H
#define IMBREX_KV_KV_TIERS_FAULTS_H

#include "kv/kv_fault_log.h"
#include "kv/kv_tiers.h"

/* Blocks that were lost, the remote tier's not counted. */
uint64_t kv_tiers_num_faults(const struct kv_tiers_metrics *metrics);

/* Tells of faults that are new: what was lost, why and where. folder: NULL without a disk. */
void kv_tiers_tell_faults(struct kv_fault_log *told, const struct kv_tiers_metrics *metrics,
                          const char *folder, const struct log *log, int64_t now_ns);

/* Tells, once, that the disk is full before the folder has what it may have. */
void kv_tiers_tell_full(bool *has_told, const struct kv_disk_metrics *metrics, const char *folder,
                        const struct log *log);

/* Tells that the folder was removed, or another put in its place, and what came of it. */
void kv_tiers_tell_folder(struct kv_fault_log *told, const struct kv_disk_metrics *metrics,
                          const char *folder, const struct log *log, int64_t now_ns);

/* Tells of files in the folder that are named like segments and are none. */
void kv_tiers_tell_strange(const struct kv_disk_metrics *metrics, const char *folder,
                           const struct log *log);

#endif
