/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a GGUF file of version 3: metadata and the list of tensors are gathered in memory, the
 * tensors' bytes are streamed. The file appears under its name only when it is whole.
 *
 *   open, put_*..., add_tensor..., begin_tensors, write (all tensors in order, any pieces), commit
 */
#ifndef IMBREX_MODEL_GGUF_WRITER_H
#define IMBREX_MODEL_GGUF_WRITER_H

#include "base/file_writer.h"
#include "model/gguf.h"

#define GGUF_WRITER_ALIGNMENT 32 /* the format's default */

/* Bytes that grow. */
struct gguf_writer_buffer {
    unsigned char *bytes;
    size_t num_bytes, max_bytes;
};

struct gguf_writer {
    struct file_writer file;
    struct gguf_writer_buffer values, tensors; /* as in the file */
    uint64_t num_values, num_tensors;
    uint64_t tensor_bytes; /* of those added, each padded */
    uint64_t data_begin;   /* where the first one's bytes stand; 0: not begun */
};

/* As file_writer_open. */
enum imbrex_status gguf_writer_open(const char *path, bool overwrite, struct gguf_writer *writer,
                                    struct imbrex_error *err);
/* Deletes what was written. Safe on a zeroed struct and after a commit. */
void gguf_writer_abandon(struct gguf_writer *writer);

/* Keys must differ: the writer does not check. */
enum imbrex_status gguf_writer_put_uint32(struct gguf_writer *writer, const char *key,
                                          uint32_t value, struct imbrex_error *err);
enum imbrex_status gguf_writer_put_float32(struct gguf_writer *writer, const char *key, float value,
                                           struct imbrex_error *err);
enum imbrex_status gguf_writer_put_bool(struct gguf_writer *writer, const char *key, bool value,
                                        struct imbrex_error *err);
enum imbrex_status gguf_writer_put_string(struct gguf_writer *writer, const char *key,
                                          const char *text, struct imbrex_error *err);
/* A value of another file as it is. */
enum imbrex_status gguf_writer_put_value(struct gguf_writer *writer, const struct gguf_value *value,
                                         struct imbrex_error *err);
/* An array: num_elements calls of append_string, append_int32 or append_float32 must follow. */
enum imbrex_status gguf_writer_begin_array(struct gguf_writer *writer, const char *key,
                                           enum gguf_type element_type, uint64_t num_elements,
                                           struct imbrex_error *err);
enum imbrex_status gguf_writer_append_string(struct gguf_writer *writer, const char *bytes,
                                             size_t num_bytes, struct imbrex_error *err);
enum imbrex_status gguf_writer_append_int32(struct gguf_writer *writer, int32_t value,
                                            struct imbrex_error *err);
enum imbrex_status gguf_writer_append_float32(struct gguf_writer *writer, float value,
                                              struct imbrex_error *err);

/* A tensor, row-major as everywhere here; its last extent is a multiple of the dtype's block. */
enum imbrex_status gguf_writer_add_tensor(struct gguf_writer *writer, const char *name,
                                          int32_t num_dims, const int64_t *shape, enum dtype dtype,
                                          struct imbrex_error *err);
/* Writes everything before the tensors' bytes. */
enum imbrex_status gguf_writer_begin_tensors(struct gguf_writer *writer, struct imbrex_error *err);
/* The next bytes of the tensors, in the order in which they were added. */
enum imbrex_status gguf_writer_write(struct gguf_writer *writer, const void *bytes,
                                     size_t num_bytes, struct imbrex_error *err);
/* Behind the last byte of each tensor: pads to the alignment. */
enum imbrex_status gguf_writer_end_tensor(struct gguf_writer *writer, struct imbrex_error *err);
/* INTERNAL if the bytes written are not those of the tensors added. */
enum imbrex_status gguf_writer_commit(struct gguf_writer *writer, struct imbrex_error *err);

#endif
