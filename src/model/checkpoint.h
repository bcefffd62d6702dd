/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a checkpoint: those of a Hugging Face folder (model.safetensors, or the shards
 * that model.safetensors.index.json lists) or those of a GGUF file. */
#ifndef IMBREX_MODEL_CHECKPOINT_H
#define IMBREX_MODEL_CHECKPOINT_H

#include "base/file.h"
#include "base/memory.h"
#include "model/gguf.h"
#include "model/safetensors.h"

struct checkpoint {
    struct file *files;          /* [num_files], mapped */
    struct safetensors *headers; /* [num_files]; NULL for GGUF */
    int32_t num_files;
    const struct checkpoint_tensor **tensors; /* [num_tensors] over all files, by name */
    int32_t num_tensors;
    bool is_gguf;
    struct gguf gguf; /* if is_gguf; else zeroed */
    struct checkpoint_tensor
        *owned_tensors; /* [num_tensors], what `tensors` points to without headers */
    char *owned_names;  /* theirs */
    /* Of a model without files, see random_model.h: */
    bool is_random;
    unsigned char *owned_vectors; /* their elements */
    struct memory_region region;  /* matrices, once they are filled */
    size_t region_bytes;          /* it will have */
    uint64_t seed;
};

/* Maps the files and merges their headers. Refused: a shard that is missing or lies outside the
 * folder, a tensor in two shards, a tensor that is not in the shard the index names for it. */
enum imbrex_status checkpoint_open(const char *folder, struct checkpoint *checkpoint,
                                   struct imbrex_error *err);
/* The same for one GGUF file. UNSUPPORTED for a file that is one of several. */
enum imbrex_status checkpoint_open_gguf(const char *path, struct checkpoint *checkpoint,
                                        struct imbrex_error *err);
/* The same for the bytes of such a file, which must outlive the checkpoint, as must path. */
enum imbrex_status checkpoint_read_gguf(const char *path, const unsigned char *bytes,
                                        size_t num_bytes, struct checkpoint *checkpoint,
                                        struct imbrex_error *err);
/* Safe on a zeroed struct. */
void checkpoint_close(struct checkpoint *checkpoint);

#define CHECKPOINT_NAME_BYTES 128 /* of names that the forward pass has a place for */

/* The name under which the checkpoint stores the tensor that Hugging Face's classes call `name`:
 * the same, or GGUF's. Written to `stored`, which is returned. */
const char *checkpoint_stored_name(const struct checkpoint *checkpoint, const char *name,
                                   char stored[CHECKPOINT_NAME_BYTES]);
/* GGUF's name of a tensor, by Hugging Face's. Names that GGUF has no other name for stay. */
const char *gguf_name_of(const char *name, char stored[CHECKPOINT_NAME_BYTES]);
/* The tensor stored under this name, or NULL. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint,
                                                const char *name);
/* Its index in `tensors`, or -1. */
int32_t checkpoint_find_idx(const struct checkpoint *checkpoint, const char *name);
/* Path of the mapped file that holds the address, or NULL. Async-signal-safe. */
const char *checkpoint_file_at(const struct checkpoint *checkpoint, const void *address);

#endif
