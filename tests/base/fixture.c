/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/base/fixture.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/test.h"

static void make_folder(const char *path)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST) {
        fail_msg("mkdir %s: %s", path, strerror(errno));
    }
}

const char *fixture_path(char path[FIXTURE_PATH_BYTES], const char *name)
{
    make_folder(TEST_BUILD_DIR);
    make_folder(TEST_BUILD_DIR "/scratch");
    snprintf(path, FIXTURE_PATH_BYTES, "%s/scratch/%s", TEST_BUILD_DIR, name);
    if (remove(path) != 0 && errno != ENOENT) {
        fail_msg("remove %s: %s", path, strerror(errno));
    }
    return path;
}

void fixture_empty_folder(const char *path)
{
    char entry_path[2 * FIXTURE_PATH_BYTES];
    DIR *listing = opendir(path);
    if (listing == NULL) {
        return;
    }
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            snprintf(entry_path, sizeof(entry_path), "%s/%s", path, entry->d_name);
            remove(entry_path);
        }
    }
    closedir(listing);
}

const char *fixture_folder(char path[FIXTURE_PATH_BYTES], const char *name)
{
    snprintf(path, FIXTURE_PATH_BYTES, "%s/scratch/%s", TEST_BUILD_DIR, name);
    fixture_empty_folder(path);
    fixture_path(path, name);
    make_folder(path);
    return path;
}

void fixture_write(const char *path, const void *bytes, size_t num_bytes)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        fail_msg("%s: %s", path, strerror(errno));
        return;
    }
    size_t num_written = num_bytes > 0 ? fwrite(bytes, 1, num_bytes, file) : 0;
    assert_int_equal(fclose(file), 0);
    assert_int_equal(num_written, num_bytes);
}

void fixture_write_in(const char *folder, const char *name, const void *bytes, size_t num_bytes)
{
    char path[2 * FIXTURE_PATH_BYTES];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    fixture_write(path, bytes, num_bytes);
}

void fixture_write_text(const char *folder, const char *name, const char *text)
{
    fixture_write_in(folder, name, text, strlen(text));
}

char *fixture_read(const char *path, size_t *num_bytes)
{
    FILE *file = fopen(path, "rb");
    struct stat meta;
    if (file == NULL || fstat(fileno(file), &meta) != 0) {
        fail_msg("%s: %s", path, strerror(errno));
        return NULL;
    }
    char *bytes = malloc((size_t)meta.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)meta.st_size, file), meta.st_size);
    bytes[meta.st_size] = '\0';
    fclose(file);
    *num_bytes = (size_t)meta.st_size;
    return bytes;
}

void expect_error(enum imbrex_status status, enum imbrex_status expected,
                  const struct imbrex_error *err, const char *fragments)
{
    char fragment[256];
    if (status != expected || err->status != expected) {
        fail_msg("expected %s, returned %s, err %s: %s", imbrex_status_name(expected),
                 imbrex_status_name(status), imbrex_status_name(err->status), err->message);
    }
    assert_null(strchr(err->message, '\n'));
    while (*fragments != '\0') {
        size_t length = strcspn(fragments, "|");
        assert_true(length < sizeof(fragment));
        memcpy(fragment, fragments, length);
        fragment[length] = '\0';
        if (strstr(err->message, fragment) == NULL) {
            fail_msg("expected \"%s\" in: %s", fragment, err->message);
        }
        fragments += length + (fragments[length] == '|');
    }
}
