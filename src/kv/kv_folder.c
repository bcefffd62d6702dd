/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "kv/kv_files.h"
#include "kv/kv_key.h"

static enum imbrex_status refuse(const char *path, const char *what, int error,
                                 struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_IO, "KV folder %.200s: %s: %s", path, what,
                     system_error_text(error));
}

static enum imbrex_status refuse_file(const char *path, const char *name, const char *what,
                                      int error, struct imbrex_error *err)
{
    if (error == ELOOP || error == ENOTSUP) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "KV folder %.200s: imbrex-kv.%s: expected a regular file, found %s", path,
                         name, error == ELOOP ? "a symbolic link" : "something else");
    }
    return refuse(path, what, error, err);
}

/* Of the process that has the lock, 0 if it cannot be read. */
static long read_holder(int fd)
{
    char text[24];
    ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
    text[length > 0 ? length : 0] = '\0';
    return strtol(text, NULL, 10);
}

static enum imbrex_status take_lock(struct kv_folder *folder, struct imbrex_error *err)
{
    char *path, text[24];
    TRY(file_join(folder->path, "imbrex-kv.lock", &path, err));
    int fd = kv_files_system.open(NULL, path, O_RDWR | O_CREAT, 0600);
    free(path);
    if (fd < 0) {
        return refuse_file(folder->path, "lock", "its lock cannot be opened", -fd, err);
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int error = errno;
        long holder = read_holder(fd);
        (void)close(fd);
        if (error != EWOULDBLOCK) {
            return refuse(folder->path, "its lock cannot be taken", error, err);
        }
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "KV folder %.200s: expected one that nobody else uses, found it locked by "
                         "process %ld",
                         folder->path, holder);
    }
    folder->lock_fd = fd;
    /* For the message above alone. */
    int length = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)length, 0) != length) {
        return refuse(folder->path, "its lock cannot be written", errno, err);
    }
    return IMBREX_STATUS_OK;
}

static int write_secret(const char *path, const char *partial_path, const unsigned char secret[32])
{
    const struct kv_files *files = &kv_files_system;
    int fd = files->open(NULL, partial_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) {
        return fd;
    }
    int failure = kv_files_write_all(files, fd, secret, 32, 0);
    if (failure == 0 && fsync(fd) != 0) {
        failure = -errno;
    }
    files->close(NULL, fd);
    return failure == 0 ? files->rename(NULL, partial_path, path) : failure;
}

static enum imbrex_status take_secret(struct kv_folder *folder, struct imbrex_error *err)
{
    enum imbrex_status status;
    char *path = NULL, *partial_path = NULL;
    struct stat file_status = {0};
    int failure;
    TRY_OR_FAIL(file_join(folder->path, "imbrex-kv.secret", &path, err));
    TRY_OR_FAIL(file_join(folder->path, "imbrex-kv.secret.part", &partial_path, err));
    int fd = kv_files_system.open(NULL, path, O_RDONLY, 0);
    bool is_there = fd >= 0;
    if (is_there) {
        failure = fstat(fd, &file_status) != 0
                      ? -errno
                      : kv_files_read_all(&kv_files_system, fd, folder->secret, 32, 0);
        (void)close(fd);
    } else {
        failure = fd == -ENOENT ? -ENODATA : fd;
    }
    if (failure == -ENODATA || (failure == 0 && file_status.st_size != 32)) {
        folder->replaced_bytes = is_there ? (int64_t)file_status.st_size : -1;
        TRY_OR_FAIL(kv_random_secret(folder->secret, err));
        failure = write_secret(path, partial_path, folder->secret);
    }
    status = failure == 0 ? IMBREX_STATUS_OK
                          : refuse_file(folder->path, "secret",
                                        "its secret cannot be read or written", -failure, err);
fail:
    free(path);
    free(partial_path);
    return status;
}

/* With its parents; only the folder itself is the owner's alone. */
static int make_folder(char *path)
{
    for (char *end = path + 1; *path != '\0' && (end = strchr(end, '/')) != NULL; end++) {
        *end = '\0';
        int failure = mkdir(path, 0777) != 0 && errno != EEXIST ? -errno : 0;
        *end = '/';
        if (failure != 0) {
            return failure;
        }
    }
    return mkdir(path, 0700) != 0 && errno != EEXIST ? -errno : 0;
}

enum imbrex_status kv_folder_open(const char *path, struct kv_folder *folder,
                                  struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t path_bytes = strlen(path) + 1;
    struct kv_folder opened = {.path = malloc(path_bytes), .lock_fd = -1, .replaced_bytes = -1};
    if (opened.path == NULL) {
        return error_out_of_memory(err, "the KV folder's path", path_bytes);
    }
    memcpy(opened.path, path, path_bytes);
    int failure = make_folder(opened.path);
    if (failure != 0) {
        status = refuse(path, "it cannot be made", -failure, err);
        goto fail;
    }
    if (!file_is_folder(path)) {
        status = error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                           "KV folder %.200s: expected a folder, found something else", path);
        goto fail;
    }
    TRY_OR_FAIL(take_lock(&opened, err));
    TRY_OR_FAIL(take_secret(&opened, err));
    *folder = opened;
    return IMBREX_STATUS_OK;
fail:
    kv_folder_close(&opened);
    return status;
}

void kv_folder_close(struct kv_folder *folder)
{
    if (folder->path != NULL) {
        if (folder->lock_fd >= 0) {
            (void)close(folder->lock_fd);
        }
        free(folder->path);
    }
    *folder = (struct kv_folder){.lock_fd = -1};
}
