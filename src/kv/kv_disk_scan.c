/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_disk_scan.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A file that is named like a segment, or like one that was never finished. */
struct listed {
    uint32_t number;
    bool is_partial;
};

/* Those in the folder, in no order. */
static enum imbrex_status list_segments(const struct kv_disk_work *work, struct listed **files,
                                        int32_t *num_files, struct imbrex_error *err)
{
    const char *folder_path = work->folder->path;
    struct listed *listed = NULL;
    int32_t num_listed = 0, max_listed = 0;
    DIR *folder = opendir(folder_path);
    if (folder == NULL) {
        return error_set(err, IMBREX_STATUS_IO, "KV folder %.200s: it cannot be read: %s",
                         folder_path, system_error_text(errno));
    }
    for (const struct dirent *item; (item = readdir(folder)) != NULL;) {
        struct listed found;
        if (!kv_segment_parse_name(item->d_name, &found.number, &found.is_partial)) {
            continue;
        }
        if (num_listed == max_listed) {
            max_listed = max_listed == 0 ? 64 : 2 * max_listed;
            struct listed *grown = realloc(listed, (size_t)max_listed * sizeof(*grown));
            if (grown == NULL) {
                free(listed);
                (void)closedir(folder);
                return error_out_of_memory(err, "the list of KV segments",
                                           (size_t)max_listed * sizeof(*grown));
            }
            listed = grown;
        }
        listed[num_listed] = found;
        num_listed++;
    }
    (void)closedir(folder);
    *files = listed;
    *num_files = num_listed;
    return IMBREX_STATUS_OK;
}

static int compare_listed(const void *a, const void *b)
{
    const struct listed *x = a, *y = b;
    if (x->number != y->number) {
        return x->number < y->number ? -1 : 1;
    }
    return x->is_partial - y->is_partial;
}

struct scan {
    const struct kv_disk_work *work;
    struct kv_disk_index *index;
    struct kv_segment_entry *entries; /* [num_slots] of the file that is looked at */
    bool has_packed;
};

/* One file less. */
static bool evict(struct scan *scan)
{
    const struct kv_files *files = scan->work->files;
    char path[KV_DISK_WORK_PATH_BYTES];
    uint32_t number;
    int32_t segment_idx;
    if (!kv_disk_index_evict(scan->index, &number, &segment_idx)) {
        return false;
    }
    if (kv_disk_work_path(scan->work, number, false, path) != 0 ||
        files->remove(files->user, path) != 0) {
        scan->index->metrics.num_remove_faults++;
    }
    return true;
}

/* Takes a segment of ours into the index: what it has can be found, what it has not can be filled.
 */
static void adopt(struct scan *scan, uint32_t number, int32_t num_blocks)
{
    struct kv_disk_index *index = scan->index;
    const struct kv_segment_entry *entries = scan->entries;
    static const struct kv_segment_entry empty;
    int32_t place;
    while ((place = kv_disk_index_free_place(index)) == -1) {
        (void)evict(scan);
    }
    struct kv_disk_segment *segment = kv_disk_index_begin(index, place, number, num_blocks);
    segment->last_use = ++index->num_uses;
    segment->is_made = true;
    for (int32_t i = 0; i < index->layout.num_slots; i++) {
        if (memcmp(&entries[i], &empty, sizeof(empty)) == 0) {
            continue;
        }
        segment->num_taken = i + 1;
        uint32_t end_page = entries[i].first_page + kv_segment_num_pages(entries[i].stored_bytes);
        segment->next_page = end_page > segment->next_page ? end_page : segment->next_page;
        bool is_packed = entries[i].stored_bytes < index->layout.block_bytes;
        if (is_packed && !kv_codec_is_available()) {
            continue;
        }
        scan->has_packed |= is_packed;
        /* Moved, and the process ended before the older segment went: that one goes first. */
        int32_t older = kv_table_find(&index->table, &entries[i].key);
        if (older != -1) {
            kv_disk_index_drop(index, older);
        }
        kv_disk_index_add(index, place, i, &entries[i]);
    }
}

/* Not ours to touch: whatever it is, it stays. */
static void note_strange(struct kv_disk_index *index, const struct listed *file, int failure)
{
    if (index->metrics.num_strange == 0) {
        kv_segment_name(file->number, file->is_partial, index->metrics.strange_name);
        index->metrics.strange_failure = -failure;
    }
    index->strange[index->metrics.num_strange] = file->number;
    index->metrics.num_strange++;
}

/* A name without a header is what a power failure may leave of a segment of ours, by its size. */
static bool is_segment_size(const struct kv_disk_index *index, int64_t num_bytes)
{
    for (int32_t num_blocks = 1; num_blocks <= index->layout.num_blocks; num_blocks++) {
        struct kv_segment_layout layout = kv_segment_with_blocks(&index->layout, num_blocks);
        if (kv_segment_file_bytes(&layout) == num_bytes) {
            return true;
        }
    }
    return false;
}

static void scan_file(struct scan *scan, const struct listed *file)
{
    const struct kv_files *files = scan->work->files;
    struct kv_disk_index *index = scan->index;
    char path[KV_DISK_WORK_PATH_BYTES];
    struct kv_segment_contents found = {.kind = KV_SEGMENT_UNKNOWN};
    int failure = kv_disk_work_path(scan->work, file->number, file->is_partial, path);
    if (failure == 0) {
        failure = kv_segment_scan(files, path, &index->layout, scan->entries, &found);
    }
    /* What ended before it had its name. */
    if (file->is_partial && found.kind != KV_SEGMENT_UNKNOWN) {
        (void)files->remove(files->user, path);
        return;
    }
    index->next_number = file->number + 1;
    if (found.kind == KV_SEGMENT_UNKNOWN ||
        (found.kind == KV_SEGMENT_UNWRITTEN && !is_segment_size(index, found.num_bytes))) {
        note_strange(index, file, failure);
        return;
    }
    index->metrics.num_damaged += (uint64_t)found.num_broken;
    if (failure == 0 && found.kind == KV_SEGMENT_OURS) {
        adopt(scan, file->number, found.num_blocks);
        return;
    }
    if (failure != 0) {
        index->metrics.num_read_faults++;
        index->metrics.read_failure = -failure;
    }
    index->foreign[index->num_foreign] =
        (struct kv_disk_foreign){.number = file->number, .num_bytes = found.num_bytes};
    index->num_foreign++;
    index->metrics.num_bytes += found.num_bytes;
    index->metrics.num_foreign_bytes += found.num_bytes;
}

enum imbrex_status kv_disk_scan(const struct kv_disk_work *work, struct kv_disk_index *index,
                                bool *has_packed, struct imbrex_error *err)
{
    struct scan scan = {.work = work, .index = index};
    struct listed *files = NULL;
    int32_t num_files = 0;
    size_t table_bytes = (size_t)index->layout.num_slots * sizeof(struct kv_segment_entry);
    TRY(list_segments(work, &files, &num_files, err));
    scan.entries = malloc(table_bytes);
    index->foreign = calloc((size_t)num_files + 1, sizeof(*index->foreign));
    index->strange = calloc((size_t)num_files + 1, sizeof(*index->strange));
    if (scan.entries == NULL || index->foreign == NULL || index->strange == NULL) {
        free(files);
        free(scan.entries);
        return error_out_of_memory(err, "the disk tier's index", table_bytes);
    }
    if (num_files > 0) {
        qsort(files, (size_t)num_files, sizeof(*files), compare_listed);
    }
    for (int32_t i = 0; i < num_files; i++) {
        scan_file(&scan, &files[i]);
    }
    free(files);
    free(scan.entries);
    while (index->metrics.num_bytes > index->max_bytes && evict(&scan)) {
    }
    *has_packed = scan.has_packed;
    return IMBREX_STATUS_OK;
}
