/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a Hugging Face folder: model.safetensors, or the shards that
 * model.safetensors.index.json lists. */
#ifndef IMBREX_MODEL_CHECKPOINT_H
#define IMBREX_MODEL_CHECKPOINT_H

#include "base/file.h"
#include "model/safetensors.h"

struct checkpoint {
    struct file *files;          /* [num_files], mapped */
    struct safetensors *headers; /* [num_files] */
    int32_t num_files;
    const struct safetensor **tensors; /* [num_tensors] over all files, by name */
    int32_t num_tensors;
};

/* Maps the files and merges their headers. Refused: a shard that is missing or lies outside the
 * folder, a tensor in two shards, a tensor that is not in the shard the index names for it. */
enum imbrex_status checkpoint_open(const char *folder, struct checkpoint *checkpoint,
                                   struct imbrex_error *err);
/* Safe on a zeroed struct. */
void checkpoint_close(struct checkpoint *checkpoint);
/* The tensor of this name, or NULL. */
const struct safetensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);
/* Path of the mapped file that holds the address, or NULL. Async-signal-safe. */
const char *checkpoint_file_at(const struct checkpoint *checkpoint, const void *address);

#endif
