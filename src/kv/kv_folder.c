/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_folder.h"

#include <dirent.h>
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
#include "kv/kv_segment.h"

#define PATH_BYTES 4096

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

/* Opens and locks it. 0 or -errno; -EWOULDBLOCK: *holder has it. Then *what is what could not be
 * done. */
static int lock_file(struct kv_folder *folder, const char *path, const char **what, long *holder)
{
    char text[24];
    struct stat status;
    *what = "its lock cannot be opened";
    int fd = kv_files_system.open(NULL, path, O_RDWR | O_CREAT, 0600);
    if (fd < 0) {
        return fd;
    }
    *what = "its lock cannot be taken";
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int failure = -errno;
        *holder = read_holder(fd);
        (void)close(fd);
        return failure;
    }
    /* For the message of who finds it locked: on a full disk that says less. */
    int length = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    bool is_written = pwrite(fd, text, (size_t)length, 0) == length;
    *what = "its lock cannot be written";
    if (ftruncate(fd, is_written ? length : 0) != 0 || stat(path, &status) != 0) {
        int failure = -errno;
        (void)close(fd);
        return failure;
    }
    folder->lock_fd = fd;
    folder->lock_device = status.st_dev;
    folder->lock_inode = status.st_ino;
    return 0;
}

static enum imbrex_status take_lock(struct kv_folder *folder, struct imbrex_error *err)
{
    char *path;
    const char *what;
    long holder = 0;
    TRY(file_join(folder->path, "imbrex-kv.lock", &path, err));
    int failure = lock_file(folder, path, &what, &holder);
    free(path);
    if (failure == -EWOULDBLOCK) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "KV folder %.200s: expected one that nobody else uses, found it locked by "
                         "process %ld",
                         folder->path, holder);
    }
    return failure == 0 ? IMBREX_STATUS_OK : refuse_file(folder->path, "lock", what, -failure, err);
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

/* ---- taking it again ------------------------------------------------------------------------- */

bool kv_folder_is_ours(const struct kv_folder *folder)
{
    char path[PATH_BYTES];
    struct stat status;
    int length = snprintf(path, sizeof(path), "%s/imbrex-kv.lock", folder->path);
    return length >= 0 && length < PATH_BYTES && stat(path, &status) == 0 &&
           status.st_dev == folder->lock_device && status.st_ino == folder->lock_inode;
}

/* Puts the secret there, unless it is. */
static int keep_secret(const unsigned char secret[32], const char *path, const char *partial_path)
{
    unsigned char found[32];
    int fd = kv_files_system.open(NULL, path, O_RDONLY, 0);
    if (fd == -ENOENT) {
        return write_secret(path, partial_path, secret);
    }
    if (fd < 0) {
        return fd;
    }
    int failure = kv_files_read_all(&kv_files_system, fd, found, sizeof(found), 0);
    (void)close(fd);
    return failure == 0 && memcmp(found, secret, sizeof(found)) == 0 ? 0 : -EEXIST;
}

static bool has_segments(const char *path)
{
    bool is_found = false, is_partial;
    uint32_t number;
    DIR *folder = opendir(path);
    for (const struct dirent *item;
         folder != NULL && !is_found && (item = readdir(folder)) != NULL;) {
        is_found = kv_segment_parse_name(item->d_name, &number, &is_partial) && !is_partial;
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return is_found;
}

static int take_again(struct kv_folder *taken)
{
    char lock_path[PATH_BYTES], secret_path[PATH_BYTES], partial_path[PATH_BYTES];
    const char *what;
    long holder;
    (void)snprintf(lock_path, PATH_BYTES, "%s/imbrex-kv.lock", taken->path);
    (void)snprintf(secret_path, PATH_BYTES, "%s/imbrex-kv.secret", taken->path);
    int length = snprintf(partial_path, PATH_BYTES, "%s/imbrex-kv.secret.part", taken->path);
    if (length < 0 || length >= PATH_BYTES) {
        return -ENAMETOOLONG;
    }
    /* The path is read by others meanwhile. */
    char *path = strdup(taken->path);
    int failure = path != NULL ? make_folder(path) : -ENOMEM;
    free(path);
    if (failure == 0) {
        failure = lock_file(taken, lock_path, &what, &holder);
    }
    if (failure == 0) {
        failure = keep_secret(taken->secret, secret_path, partial_path);
        if (failure != 0) {
            (void)close(taken->lock_fd);
        }
    }
    return failure;
}

int kv_folder_retake(struct kv_folder *folder, bool *is_empty)
{
    struct kv_folder taken = *folder;
    int failure = take_again(&taken);
    if (failure == 0) {
        *is_empty = !has_segments(folder->path);
        (void)close(folder->lock_fd);
        folder->lock_fd = taken.lock_fd;
        folder->lock_device = taken.lock_device;
        folder->lock_inode = taken.lock_inode;
    }
    return failure;
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
