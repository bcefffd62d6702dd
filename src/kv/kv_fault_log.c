/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_fault_log.h"

#include <inttypes.h>
#include <stdio.h>

#define INTERVAL_NS INT64_C(60000000000)

bool kv_fault_log_is_due(struct kv_fault_log *log, uint64_t num_faults, int64_t now_ns)
{
    if (num_faults == log->num_told || (log->has_told && now_ns - log->last_ns < INTERVAL_NS)) {
        return false;
    }
    *log = (struct kv_fault_log){.num_told = num_faults, .last_ns = now_ns, .has_told = true};
    return true;
}

void kv_fault_text_add(struct kv_fault_text *text, uint64_t count, const char *one,
                       const char *many, const char *why)
{
    size_t room = sizeof(text->bytes) - text->length;
    if (count == 0) {
        return;
    }
    int length = snprintf(text->bytes + text->length, room, "%s%" PRIu64 " %s%s%s%s",
                          text->length > 0 ? ", " : "", count, count == 1 ? one : many,
                          why[0] != '\0' ? " (" : "", why, why[0] != '\0' ? ")" : "");
    if (length < 0 || (size_t)length >= room) {
        text->bytes[text->length] = '\0';
        return;
    }
    text->length += (size_t)length;
}
