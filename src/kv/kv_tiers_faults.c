/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_tiers_faults.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "base/line.h"
#include "base/status.h"
#include "kv/kv_disk_room.h"

uint64_t kv_tiers_num_faults(const struct kv_tiers_metrics *metrics)
{
    const struct kv_disk_metrics *disk = &metrics->disk;
    return metrics->num_copy_faults + disk->num_write_faults + disk->num_left_out +
           disk->num_read_faults + disk->num_damaged + disk->num_gone;
}

static const char *reason(int failure)
{
    return failure != 0 ? system_error_text(failure) : "";
}

/* Why no segment could be made, and what would have been enough. */
static void write_segment_reason(const struct kv_disk_metrics *disk, char text[128])
{
    int length = snprintf(text, 128, "%s", reason(disk->segment_failure));
    if (disk->needed_bytes > 0 && kv_disk_is_full(-disk->segment_failure) && length < 64) {
        (void)snprintf(text + length, 128 - (size_t)length,
                       ": expected room for one block, %" PRId64 " bytes", disk->needed_bytes);
    }
}

void kv_tiers_tell_faults(struct kv_fault_log *told, const struct kv_tiers_metrics *metrics,
                          const char *folder, const struct log *log, int64_t now_ns)
{
    const struct kv_disk_metrics *disk = &metrics->disk;
    struct kv_fault_text text = {.length = 0};
    char lost[96] = "", segment_reason[128];
    uint64_t num_lost = kv_tiers_num_faults(metrics);
    if (!kv_fault_log_is_due(told, num_lost + disk->num_segment_faults + disk->num_remove_faults,
                             now_ns)) {
        return;
    }
    if (num_lost > 0) {
        (void)snprintf(lost, sizeof(lost),
                       "%" PRIu64 " block%s lost, computed again when asked for: ", num_lost,
                       line_plural(num_lost));
    }
    write_segment_reason(disk, segment_reason);
    kv_fault_text_add(&text, disk->num_write_faults, "not written to the disk",
                      "not written to the disk", reason(disk->write_failure));
    const char *left_out = kv_disk_is_full(-disk->segment_failure) ? "without room on the disk"
                                                                   : "without a file on the disk";
    kv_fault_text_add(&text, disk->num_left_out, left_out, left_out, segment_reason);
    kv_fault_text_add(&text, disk->num_read_faults, "not read from the disk",
                      "not read from the disk", reason(disk->read_failure));
    kv_fault_text_add(&text, disk->num_damaged, "damaged on the disk", "damaged on the disk", "");
    kv_fault_text_add(&text, disk->num_gone, "gone with its file", "gone with their files", "");
    kv_fault_text_add(&text, metrics->num_copy_faults, "not copied by the device",
                      "not copied by the device", "");
    kv_fault_text_add(&text, disk->num_segment_faults, "file that could not be made",
                      "files that could not be made", reason(disk->segment_failure));
    kv_fault_text_add(&text, disk->num_remove_faults, "file that could not be removed",
                      "files that could not be removed", "");
    log_write(log, IMBREX_LOG_LEVEL_WARNING, "KV tiers%s%s: %s%s", folder != NULL ? " in " : "",
              folder != NULL ? folder : "", lost, text.bytes);
}

void kv_tiers_tell_full(bool *has_told, const struct kv_disk_metrics *metrics, const char *folder,
                        const struct log *log)
{
    if (metrics->num_full == 0 || metrics->num_blocks == 0 || *has_told) {
        return;
    }
    *has_told = true;
    log_write(log, IMBREX_LOG_LEVEL_WARNING,
              "KV folder %s: the disk is full before it has the %" PRId64
              " bytes of KV blocks that it may have: from now on the oldest go for new ones",
              folder, metrics->max_bytes);
}

void kv_tiers_tell_folder(struct kv_fault_log *told, const struct kv_disk_metrics *metrics,
                          const char *folder, const struct log *log, int64_t now_ns)
{
    int failure = metrics->folder_failure;
    if (!kv_fault_log_is_due(told, metrics->num_folder_losses, now_ns)) {
        return;
    }
    log_write(log, IMBREX_LOG_LEVEL_WARNING,
              "KV folder %s: it or its lock was removed, or is out of reach: it %s%s", folder,
              failure == 0 ? "was made anew" : "is not used until it is free again: ",
              failure == 0             ? ""
              : failure == EWOULDBLOCK ? "another process has locked what is there"
              : failure == EEXIST      ? "what is there has another secret"
                                       : system_error_text(failure));
}

void kv_tiers_tell_strange(const struct kv_disk_metrics *metrics, const char *folder,
                           const struct log *log)
{
    char more[64] = "";
    int failure = metrics->strange_failure;
    uint64_t num_more = (uint64_t)metrics->num_strange - 1;
    if (metrics->num_strange == 0) {
        return;
    }
    if (num_more > 0) {
        (void)snprintf(more, sizeof(more), ", and so %s %" PRIu64 " other%s",
                       num_more == 1 ? "is" : "are", num_more, line_plural(num_more));
    }
    log_write(log, IMBREX_LOG_LEVEL_WARNING,
              "KV folder: %s/%s: expected a file of KV blocks, as its name says, found %s%s: it is "
              "left alone%s",
              folder, metrics->strange_name,
              failure == 0         ? "something else"
              : failure == ENOTSUP ? "no regular file"
                                   : "one that cannot be read: ",
              failure == 0 || failure == ENOTSUP ? "" : system_error_text(failure), more);
}
