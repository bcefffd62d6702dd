/* SPDX-License-Identifier: Apache-2.0 */
/* Finds, maps and merges the weight files of a folder. model.safetensors is preferred to an index,
 * as Hugging Face's loader does. Shard names come from a file, so they may only name files of the
 * folder itself. */
#include "model/checkpoint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/memory.h"

#define WEIGHTS_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"
#define NAME_MAX_BYTES 256 /* of a folder entry in a message, the NUL counted */

/* One entry of the index's weight_map. */
struct placement {
    const char *tensor_name, *shard_name;
};

/* ---- what else a folder may hold ------------------------------------------------------------- */

static bool has_suffix(const char *name, const char *suffix)
{
    size_t name_bytes = strlen(name), suffix_bytes = strlen(suffix);
    return name_bytes > suffix_bytes && strcmp(name + name_bytes - suffix_bytes, suffix) == 0;
}

static bool is_other_weights(const char *name)
{
    static const char *const suffixes[] = {".safetensors", ".gguf", ".bin", ".bin.index.json",
                                           ".pt",          ".pth",  ".ckpt"};
    for (size_t i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++) {
        if (has_suffix(name, suffixes[i])) {
            return true;
        }
    }
    return false;
}

/* The folder has no safetensors that we would open: says what it has instead. */
static enum imbrex_status no_weights(const char *folder, struct imbrex_error *err)
{
    char found[NAME_MAX_BYTES] = "";
    /* Only for the message: without memory or permission it names nothing. */
    DIR *listing = opendir(folder);
    if (listing != NULL) {
        const struct dirent *entry;
        while ((entry = readdir(listing)) != NULL) {
            if (is_other_weights(entry->d_name) &&
                (found[0] == '\0' || strcmp(entry->d_name, found) < 0)) {
                snprintf(found, sizeof(found), "%s", entry->d_name);
            }
        }
        closedir(listing);
    }
    return error_set(err, found[0] != '\0' ? IMBREX_STATUS_UNSUPPORTED : IMBREX_STATUS_NOT_FOUND,
                     "%s: expected " WEIGHTS_NAME " or " INDEX_NAME ", found %s", folder,
                     found[0] != '\0' ? found : "no weights");
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Maps and parses one file of the folder as files[num_files], headers[num_files]. */
static enum imbrex_status add_file(const char *folder, const char *name,
                                   struct checkpoint *checkpoint, struct imbrex_error *err)
{
    char *path;
    struct file *file = &checkpoint->files[checkpoint->num_files];
    struct safetensors *header = &checkpoint->headers[checkpoint->num_files];
    TRY(file_join(folder, name, &path, err));
    enum imbrex_status status = file_map(path, file, err);
    free(path);
    TRY(status);
    status = safetensors_parse(file->path, file->bytes, file->num_bytes, header, err);
    if (status != IMBREX_STATUS_OK) {
        file_close(file);
        return status;
    }
    checkpoint->num_files++;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status reserve_files(struct checkpoint *checkpoint, size_t num_files,
                                        struct imbrex_error *err)
{
    checkpoint->files = calloc(num_files, sizeof(checkpoint->files[0]));
    checkpoint->headers = calloc(num_files, sizeof(checkpoint->headers[0]));
    if (checkpoint->files == NULL || checkpoint->headers == NULL) {
        return error_out_of_memory(err, "a checkpoint's files",
                                   num_files * sizeof(checkpoint->headers[0]));
    }
    return IMBREX_STATUS_OK;
}

/* ---- index ----------------------------------------------------------------------------------- */

static int compare_shards(const void *left, const void *right)
{
    const struct placement *a = left, *b = right;
    int order = strcmp(a->shard_name, b->shard_name);
    return order != 0 ? order : strcmp(a->tensor_name, b->tensor_name);
}

static bool is_plain_file_name(const char *name)
{
    return name[0] != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

/* weight_map as an array sorted by shard; strings are views into `root`. */
static enum imbrex_status read_weight_map(const char *index_path, const json_t *root,
                                          struct placement **placements, size_t *num_placements,
                                          struct imbrex_error *err)
{
    json_t *weight_map = json_object_get(root, "weight_map");
    const char *tensor_name;
    json_t *shard_name;
    size_t num_read = 0, num_bytes;
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: weight_map: expected an object of tensor names, found %s", index_path,
                         json_is_object(weight_map) ? "an empty one" : json_kind(weight_map));
    }
    if (!size_mul(json_object_size(weight_map), sizeof(**placements), &num_bytes)) {
        num_bytes = SIZE_MAX;
    }
    struct placement *list = malloc(num_bytes);
    if (list == NULL) {
        return error_out_of_memory(err, index_path, num_bytes);
    }
    json_object_foreach(weight_map, tensor_name, shard_name)
    {
        const char *name = json_string_value(shard_name);
        if (name == NULL || !is_plain_file_name(name)) {
            enum imbrex_status status = error_set(
                err, IMBREX_STATUS_FORMAT,
                "%s: weight_map: %.128s: expected the name of a file in the folder, found %s%.128s",
                index_path, tensor_name, name == NULL ? json_kind(shard_name) : "",
                name == NULL ? "" : name);
            free(list);
            return status;
        }
        list[num_read++] = (struct placement){tensor_name, name};
    }
    qsort(list, num_read, sizeof(list[0]), compare_shards);
    *placements = list;
    *num_placements = num_read;
    return IMBREX_STATUS_OK;
}

static bool starts_shard(const struct placement *placements, size_t idx)
{
    return idx == 0 || strcmp(placements[idx].shard_name, placements[idx - 1].shard_name) != 0;
}

static enum imbrex_status add_shards(const char *folder, const char *index_path,
                                     const struct placement *placements, size_t num_placements,
                                     struct checkpoint *checkpoint, struct imbrex_error *err)
{
    size_t num_shards = 0;
    for (size_t i = 0; i < num_placements; i++) {
        num_shards += starts_shard(placements, i);
    }
    TRY(reserve_files(checkpoint, num_shards, err));
    for (size_t i = 0; i < num_placements; i++) {
        if (!starts_shard(placements, i)) {
            continue;
        }
        enum imbrex_status status = add_file(folder, placements[i].shard_name, checkpoint, err);
        if (status == IMBREX_STATUS_NOT_FOUND) {
            return error_set(err, status,
                             "%s: weight_map: %.128s: expected the shard %.128s in the folder, "
                             "found no such file",
                             index_path, placements[i].tensor_name, placements[i].shard_name);
        }
        TRY(status);
    }
    return IMBREX_STATUS_OK;
}

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Every tensor of the index is where it says. */
static enum imbrex_status check_placements(const char *index_path,
                                           const struct placement *placements,
                                           size_t num_placements,
                                           const struct checkpoint *checkpoint,
                                           struct imbrex_error *err)
{
    for (size_t i = 0; i < num_placements; i++) {
        const struct placement *placement = &placements[i];
        const struct checkpoint_tensor *tensor =
            checkpoint_find(checkpoint, placement->tensor_name);
        if (tensor == NULL || strcmp(file_name(tensor->file), placement->shard_name) != 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: weight_map: %.128s: expected in %.128s, found %s%.128s",
                             index_path, placement->tensor_name, placement->shard_name,
                             tensor == NULL ? "in no shard" : "in ",
                             tensor == NULL ? "" : file_name(tensor->file));
        }
    }
    return IMBREX_STATUS_OK;
}

/* ---- merging --------------------------------------------------------------------------------- */

static int compare_names(const void *left, const void *right)
{
    const struct checkpoint_tensor *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

static enum imbrex_status merge(struct checkpoint *checkpoint, struct imbrex_error *err)
{
    size_t num_tensors = 0, num_bytes, num_merged = 0;
    for (int32_t i = 0; i < checkpoint->num_files; i++) {
        num_tensors += (size_t)checkpoint->headers[i].num_tensors;
    }
    if (num_tensors == 0) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected tensors, found none",
                         checkpoint->files[0].path);
    }
    if (num_tensors > INT32_MAX ||
        !size_mul(num_tensors, sizeof(checkpoint->tensors[0]), &num_bytes)) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected at most %d tensors, found %zu", checkpoint->files[0].path,
                         INT32_MAX, num_tensors);
    }
    checkpoint->tensors = malloc(num_bytes);
    if (checkpoint->tensors == NULL) {
        return error_out_of_memory(err, "a checkpoint's tensors", num_bytes);
    }
    for (int32_t i = 0; i < checkpoint->num_files; i++) {
        for (int32_t j = 0; j < checkpoint->headers[i].num_tensors; j++) {
            checkpoint->tensors[num_merged++] = &checkpoint->headers[i].tensors[j];
        }
    }
    checkpoint->num_tensors = (int32_t)num_tensors;
    qsort(checkpoint->tensors, num_tensors, sizeof(checkpoint->tensors[0]), compare_names);
    for (size_t i = 1; i < num_tensors; i++) {
        const struct checkpoint_tensor *a = checkpoint->tensors[i - 1], *b = checkpoint->tensors[i];
        if (strcmp(a->name, b->name) == 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: %.128s: expected in one shard, found in %s too", a->file, a->name,
                             file_name(b->file));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_single(const char *folder, struct checkpoint *checkpoint,
                                      struct imbrex_error *err)
{
    TRY(reserve_files(checkpoint, 1, err));
    TRY(add_file(folder, WEIGHTS_NAME, checkpoint, err));
    return merge(checkpoint, err);
}

static enum imbrex_status open_sharded(const char *folder, const char *index_path,
                                       struct checkpoint *checkpoint, struct imbrex_error *err)
{
    json_t *root = NULL;
    struct placement *placements = NULL;
    size_t num_placements = 0;
    enum imbrex_status status;
    /* The index names the tensors that the headers hold: the same limit. */
    TRY(json_read_object(index_path, SAFETENSORS_MAX_HEADER_BYTES, &root, err));
    TRY_OR_FAIL(read_weight_map(index_path, root, &placements, &num_placements, err));
    TRY_OR_FAIL(add_shards(folder, index_path, placements, num_placements, checkpoint, err));
    TRY_OR_FAIL(merge(checkpoint, err));
    TRY_OR_FAIL(check_placements(index_path, placements, num_placements, checkpoint, err));
fail:
    free(placements);
    json_decref(root);
    return status;
}

/* Whether the folder has an entry of this name. */
static enum imbrex_status find_entry(const char *folder, const char *name, char **path,
                                     bool *exists, struct imbrex_error *err)
{
    TRY(file_join(folder, name, path, err));
    *exists = file_exists(*path);
    return IMBREX_STATUS_OK;
}

enum imbrex_status checkpoint_open(const char *folder, struct checkpoint *checkpoint,
                                   struct imbrex_error *err)
{
    struct checkpoint opened = {0};
    char *weights_path = NULL, *index_path = NULL;
    bool has_weights = false, has_index = false;
    enum imbrex_status status;
    TRY_OR_FAIL(find_entry(folder, WEIGHTS_NAME, &weights_path, &has_weights, err));
    TRY_OR_FAIL(find_entry(folder, INDEX_NAME, &index_path, &has_index, err));
    if (has_weights) {
        status = open_single(folder, &opened, err);
    } else if (has_index) {
        status = open_sharded(folder, index_path, &opened, err);
    } else {
        status = no_weights(folder, err);
    }
fail:
    free(weights_path);
    free(index_path);
    if (status != IMBREX_STATUS_OK) {
        checkpoint_close(&opened);
        return status;
    }
    *checkpoint = opened;
    return IMBREX_STATUS_OK;
}

void checkpoint_close(struct checkpoint *checkpoint)
{
    for (int32_t i = 0; i < checkpoint->num_files; i++) {
        if (checkpoint->headers != NULL) {
            safetensors_release(&checkpoint->headers[i]);
        }
        file_close(&checkpoint->files[i]);
    }
    gguf_release(&checkpoint->gguf);
    free(checkpoint->owned_tensors);
    free(checkpoint->owned_names);
    free(checkpoint->owned_vectors);
    memory_region_unmap(&checkpoint->region);
    free(checkpoint->tensors);
    free(checkpoint->headers);
    free(checkpoint->files);
    *checkpoint = (struct checkpoint){0};
}

int32_t checkpoint_find_idx(const struct checkpoint *checkpoint, const char *name)
{
    int32_t begin = 0, end = checkpoint->num_tensors;
    while (begin < end) {
        int32_t middle = begin + (end - begin) / 2;
        int order = strcmp(name, checkpoint->tensors[middle]->name);
        if (order == 0) {
            return middle;
        }
        if (order < 0) {
            end = middle;
        } else {
            begin = middle + 1;
        }
    }
    return -1;
}

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint,
                                                const char *name)
{
    int32_t idx = checkpoint_find_idx(checkpoint, name);
    return idx >= 0 ? checkpoint->tensors[idx] : NULL;
}

const char *checkpoint_file_at(const struct checkpoint *checkpoint, const void *address)
{
    for (int32_t i = 0; i < checkpoint->num_files; i++) {
        const struct file *file = &checkpoint->files[i];
        if ((uintptr_t)address - (uintptr_t)file->bytes < file->num_bytes) {
            return file->path;
        }
    }
    return NULL;
}
