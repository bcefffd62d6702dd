/* SPDX-License-Identifier: Apache-2.0 */
/* Regular files as bytes, and nothing but regular files: a FIFO would hang the reader, a device may
 * act when it is opened. So the type is looked at before the open, and once more behind it, because
 * the name may stand for something else by then; O_NONBLOCK keeps even that from hanging. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/asset.h"
#include "base/memory.h"

/* One read() moves at most this much: Linux stops at 2 GiB - 4 KiB anyhow. */
#define READ_MAX_BYTES ((size_t)1 << 30)

static const char *type_name(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFDIR:
        return "a folder";
    case S_IFIFO:
        return "a FIFO";
    case S_IFCHR:
        return "a character device";
    case S_IFBLK:
        return "a block device";
    case S_IFSOCK:
        return "a socket";
    default:
        return "something else";
    }
}

static enum imbrex_status system_error(const char *path, int error, struct imbrex_error *err)
{
    enum imbrex_status status = IMBREX_STATUS_IO;
    if (error == ENOENT || error == ENOTDIR) {
        status = IMBREX_STATUS_NOT_FOUND;
    } else if (error == ENOMEM) {
        status = IMBREX_STATUS_OUT_OF_MEMORY;
    }
    return error_set(err, status, "%s: expected a readable file, found: %s", path,
                     system_error_text(error));
}

static enum imbrex_status check_type(const char *path, const struct stat *meta,
                                     struct imbrex_error *err)
{
    if (!S_ISREG(meta->st_mode)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected a regular file, found %s", path,
                         type_name(meta->st_mode));
    }
    if (meta->st_size <= 0) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected data, found an empty file", path);
    }
    if ((uintmax_t)meta->st_size > SIZE_MAX) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected at most %zu bytes (the address space), found %" PRIdMAX,
                         path, (size_t)SIZE_MAX, (intmax_t)meta->st_size);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_regular(const char *path, int *descriptor, size_t *num_bytes,
                                       struct imbrex_error *err)
{
    struct stat meta;
    if (stat(path, &meta) != 0) {
        return system_error(path, errno, err);
    }
    TRY(check_type(path, &meta, err));
    int opened;
    do {
        opened = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    } while (opened < 0 && errno == EINTR);
    if (opened < 0) {
        return system_error(path, errno, err);
    }
    enum imbrex_status status;
    if (fstat(opened, &meta) != 0) {
        status = system_error(path, errno, err);
    } else {
        status = check_type(path, &meta, err);
    }
    if (status != IMBREX_STATUS_OK) {
        close(opened);
        return status;
    }
    *descriptor = opened;
    *num_bytes = (size_t)meta.st_size;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status copy_path(const char *path, char **copy, struct imbrex_error *err)
{
    size_t num_bytes = strlen(path) + 1;
    char *bytes = malloc(num_bytes);
    if (bytes == NULL) {
        return error_out_of_memory(err, path, num_bytes);
    }
    memcpy(bytes, path, num_bytes);
    *copy = bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_embedded(const char *path, struct file *file,
                                        struct imbrex_error *err)
{
    struct file embedded = {.storage = FILE_STORAGE_EMBEDDED};
    embedded.bytes = asset_find(path, &embedded.num_bytes);
    if (embedded.bytes == NULL && asset_is_folder(path)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected a regular file, found a folder",
                         path);
    }
    if (embedded.bytes == NULL) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "%s: expected a file of the built-in model %s, found none of that name",
                         path, ASSET_DEFAULT_MODEL);
    }
    TRY(copy_path(path, &embedded.path, err));
    *file = embedded;
    return IMBREX_STATUS_OK;
}

enum imbrex_status file_map(const char *path, struct file *file, struct imbrex_error *err)
{
    if (asset_is_path(path)) {
        return open_embedded(path, file, err);
    }
    int descriptor;
    struct file mapped = {.storage = FILE_STORAGE_MAPPED};
    TRY(open_regular(path, &descriptor, &mapped.num_bytes, err));
    enum imbrex_status status = copy_path(path, &mapped.path, err);
    if (status == IMBREX_STATUS_OK) {
        /* Private and shared read-only mappings use the same page-cache pages and commit no memory;
         * private also works on file systems that refuse shared ones (FUSE with direct_io). */
        void *base = mmap(NULL, mapped.num_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (base == MAP_FAILED) {
            int error = errno;
            status = error == ENOMEM
                         ? error_out_of_memory(err, path, mapped.num_bytes)
                         : error_set(err, IMBREX_STATUS_IO,
                                     "%s: expected a file that can be mapped, found: %s", path,
                                     system_error_text(error));
            free(mapped.path);
        } else {
            /* What is read from disk after this comes into the page cache as huge pages, where the
             * file system has them, and spares decoding a page walk every 4 KiB. It reads nothing
             * by itself. */
            (void)madvise(base, mapped.num_bytes, MADV_HUGEPAGE);
            mapped.bytes = base;
        }
    }
    close(descriptor);
    if (status == IMBREX_STATUS_OK) {
        *file = mapped;
    }
    return status;
}

static enum imbrex_status check_max_bytes(const char *path, size_t num_bytes, size_t max_bytes,
                                          struct imbrex_error *err)
{
    if (num_bytes > max_bytes) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected at most %zu bytes, found %zu",
                         path, max_bytes, num_bytes);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_all(const char *path, int descriptor, unsigned char *bytes,
                                   size_t num_bytes, struct imbrex_error *err)
{
    size_t num_read = 0;
    while (num_read < num_bytes) {
        size_t left = num_bytes - num_read;
        ssize_t got =
            read(descriptor, bytes + num_read, left < READ_MAX_BYTES ? left : READ_MAX_BYTES);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return system_error(path, errno, err);
        }
        if (got == 0) {
            return error_set(err, IMBREX_STATUS_IO,
                             "%s: expected %zu bytes, found %zu (the file shrank while it was "
                             "read)",
                             path, num_bytes, num_read);
        }
        num_read += (size_t)got;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status file_read(const char *path, size_t max_bytes, struct file *file,
                             struct imbrex_error *err)
{
    struct file heap = {.storage = FILE_STORAGE_HEAP};
    if (asset_is_path(path)) {
        TRY(open_embedded(path, &heap, err));
        enum imbrex_status fits = check_max_bytes(path, heap.num_bytes, max_bytes, err);
        if (fits != IMBREX_STATUS_OK) {
            file_close(&heap);
            return fits;
        }
        *file = heap;
        return IMBREX_STATUS_OK;
    }

    int descriptor;
    unsigned char *bytes = NULL;
    enum imbrex_status status;
    TRY(open_regular(path, &descriptor, &heap.num_bytes, err));
    TRY_OR_FAIL(check_max_bytes(path, heap.num_bytes, max_bytes, err));
    bytes = malloc(heap.num_bytes);
    if (bytes == NULL) {
        status = error_out_of_memory(err, path, heap.num_bytes);
        goto fail;
    }
    TRY_OR_FAIL(read_all(path, descriptor, bytes, heap.num_bytes, err));
    TRY_OR_FAIL(copy_path(path, &heap.path, err));
    close(descriptor);
    heap.bytes = bytes;
    *file = heap;
    return IMBREX_STATUS_OK;

fail:
    free(bytes);
    close(descriptor);
    return status;
}

void file_close(struct file *file)
{
    if (file->bytes != NULL && file->storage == FILE_STORAGE_MAPPED) {
        munmap((void *)(uintptr_t)file->bytes, file->num_bytes);
    } else if (file->storage == FILE_STORAGE_HEAP) {
        free((void *)(uintptr_t)file->bytes);
    }
    free(file->path);
    *file = (struct file){0};
}

/* Whatever keeps us from looking (permissions, a link that leads nowhere) counts as existing: the
 * open that follows then says what is wrong, where "no such file" would mislead. */
bool file_exists(const char *path)
{
    if (asset_is_path(path)) {
        size_t num_bytes;
        return asset_is_folder(path) || asset_find(path, &num_bytes) != NULL;
    }
    struct stat meta;
    return lstat(path, &meta) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool file_is_same(const char *path, const char *other_path)
{
    struct stat meta, other_meta;
    return !asset_is_path(path) && !asset_is_path(other_path) && stat(path, &meta) == 0 &&
           stat(other_path, &other_meta) == 0 && meta.st_dev == other_meta.st_dev &&
           meta.st_ino == other_meta.st_ino;
}

bool file_is_folder(const char *path)
{
    if (asset_is_path(path)) {
        return asset_is_folder(path);
    }
    struct stat meta;
    return stat(path, &meta) == 0 && S_ISDIR(meta.st_mode);
}

enum imbrex_status file_join(const char *folder, const char *name, char **path,
                             struct imbrex_error *err)
{
    size_t folder_bytes = strlen(folder), name_bytes = strlen(name);
    bool needs_slash = folder_bytes > 0 && folder[folder_bytes - 1] != '/';
    size_t num_bytes;
    if (!size_add(folder_bytes, name_bytes, &num_bytes) || !size_add(num_bytes, 2, &num_bytes)) {
        return error_out_of_memory(err, "a path", SIZE_MAX);
    }
    char *joined = malloc(num_bytes);
    if (joined == NULL) {
        return error_out_of_memory(err, "a path", num_bytes);
    }
    memcpy(joined, folder, folder_bytes);
    if (needs_slash) {
        joined[folder_bytes++] = '/';
    }
    memcpy(joined + folder_bytes, name, name_bytes + 1);
    *path = joined;
    return IMBREX_STATUS_OK;
}
