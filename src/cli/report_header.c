/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/report_header.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "cli/replace_file.h"

#define DATE_BYTES 32

json_t *report_text(const char *text)
{
    json_t *string = text != NULL ? json_string(text) : NULL;

    return string != NULL ? string : json_null();
}

json_t *report_machine(void)
{
    struct machine machine;

    machine_describe(&machine);
    return json_pack("{s:o, s:i, s:s, s:s?}", "cpu", report_text(machine.cpu_name), "num_cpus",
                     (int)machine.num_cpus, "version", machine.version, "commit", machine.commit);
}

json_t *report_header(const char *benchmark)
{
    char date[DATE_BYTES] = "";
    struct tm parts;
    time_t now = time(NULL);

    if (gmtime_r(&now, &parts) != NULL) {
        (void)strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &parts);
    }
    return json_pack("{s:s, s:s, s:o}", "benchmark", benchmark, "date", date, "machine",
                     report_machine());
}

/* NULL: reported. */
static char *dump(const json_t *root, size_t num_digits)
{
    char *text =
        root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(num_digits)) : NULL;

    if (text == NULL) {
        (void)output_out_of_memory();
    }
    return text;
}

int report_dump(json_t *root, size_t num_digits, char **text)
{
    *text = dump(root, num_digits);
    json_decref(root);
    return *text != NULL ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

int report_print(json_t *root, size_t num_digits)
{
    char *text;
    int exit_code = report_dump(root, num_digits, &text);

    if (exit_code == EXIT_CODE_OK) {
        output_printf("%s\n", text);
        free(text);
    }
    return exit_code;
}

bool report_is_dash(const char *path)
{
    return path != NULL && strcmp(path, "-") == 0;
}

int report_check_name(const char *command, const char *option, const char *path)
{
    if (path != NULL && path[0] == '\0') {
        output_error("%s: --%s: expected the name of a file or -, found \"\"", command, option);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

int report_open(const char *path, FILE **file)
{
    /* A file that was not there is gone again until the report is: a run that fails leaves none. */
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
        (void)unlink(path);
    } else {
        fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    }
    *file = fd >= 0 ? fdopen(fd, "a") : NULL;
    if (*file == NULL) {
        output_error("%s: cannot write: %s", path, output_system_error(errno));
        if (fd >= 0) {
            (void)close(fd);
        }
        return EXIT_CODE_FAILURE;
    }
    return EXIT_CODE_OK;
}

int report_write_text(const char *path, FILE *file, const char *text)
{
    struct stat status;
    size_t length = strlen(text);
    char *lines = malloc(length + 2);

    if (lines == NULL) {
        return output_out_of_memory();
    }
    memcpy(lines, text, length);
    memcpy(lines + length, "\n", 2);
    /* A pipe stays open from the beginning, for whoever reads it. */
    bool is_regular =
        file == NULL || (fstat(fileno(file), &status) == 0 && S_ISREG(status.st_mode));
    bool is_written = is_regular ? replace_file(path, lines, length + 1)
                                 : fputs(lines, file) >= 0 && fflush(file) == 0;
    if (!is_written) {
        output_error("%s: cannot write: %s", path, output_system_error(errno));
    }
    free(lines);
    return is_written ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

int report_write(const char *path, FILE *file, const json_t *root)
{
    char *text = dump(root, REPORT_DIGITS);

    if (text == NULL) {
        return EXIT_CODE_FAILURE;
    }
    int exit_code = report_write_text(path, file, text);
    free(text);
    return exit_code;
}
