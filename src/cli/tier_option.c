/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/tier_option.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/scaled_number.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"

#define MAX_TOKENS 1e12
#define MAX_RATE 1e15 /* tokens/s */
#define MAX_LATENCY_S 1e6
#define MAX_TOKEN_BYTES 1e9
#define MAX_PARTS 4

struct unit {
    const char *name;
    double scale;
};

static const struct unit byte_units[] = {
    {"B", 1},        {"kB", 1e3},     {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9}, {"TB", 1e12},
    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {NULL, 0},
};
static const struct unit time_units[] = {
    {"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {NULL, 0},
};

/* A part of the value, not ended by a zero. */
struct part {
    const char *text;
    size_t num_bytes;
};

static int refuse(const char *text, const char *name, const char *expected, struct part found)
{
    output_error("kv-sim: --tier \"%s\": %s: expected %s, found \"%.*s\"", text, name, expected,
                 (int)found.num_bytes, found.text);
    return EXIT_CODE_INPUT;
}

/* A number and one of the units behind it. False for anything else. */
static bool read_with_unit(struct part part, const struct unit *units, double *value)
{
    size_t length = scaled_number_length(part.text);

    for (const struct unit *unit = units; length < part.num_bytes && unit->name != NULL; unit++) {
        if (strlen(unit->name) == part.num_bytes - length &&
            memcmp(unit->name, part.text + length, part.num_bytes - length) == 0) {
            bool is_good = scaled_number_read(part.text, length, value);
            *value *= unit->scale;
            return is_good;
        }
    }
    return false;
}

/* Tokens, or bytes as tokens. False: it is neither. *is_missing: bytes without --token-bytes. */
static bool read_tokens(struct part part, double token_bytes, double *tokens, bool *is_missing)
{
    if (scaled_number_read(part.text, part.num_bytes, tokens)) {
        return true;
    }
    if (!read_with_unit(part, byte_units, tokens)) {
        return false;
    }
    *is_missing = token_bytes == 0;
    *tokens /= *is_missing ? 1 : token_bytes;
    return true;
}

static int refuse_bytes(const char *text, const char *name, struct part found)
{
    return refuse(text, name, "tokens, or bytes with --token-bytes", found);
}

static int read_name(const char *text, struct part part, struct tier_option *tiers, size_t tier_idx)
{
    char *name = tiers[tier_idx].name;
    bool is_good = part.num_bytes > 0 && part.num_bytes < TIER_OPTION_NAME_BYTES;

    for (size_t i = 0; i < part.num_bytes && is_good; i++) {
        is_good = strchr("abcdefghijklmnopqrstuvwxyz0123456789-_", part.text[i]) != NULL;
    }
    if (!is_good) {
        return refuse(text, "NAME", "1 to 15 of a-z, 0-9, - and _", part);
    }
    memcpy(name, part.text, part.num_bytes);
    name[part.num_bytes] = '\0';
    for (size_t i = 0; i < tier_idx; i++) {
        if (strcmp(tiers[i].name, name) == 0) {
            return refuse(text, "NAME", "each name once", part);
        }
    }
    return EXIT_CODE_OK;
}

static int read_size(const char *text, struct part part, double token_bytes, int32_t block_size,
                     struct imbrex_kv_sim_tier *options)
{
    bool is_missing = false;
    double tokens = 0;

    if (!read_tokens(part, token_bytes, &tokens, &is_missing)) {
        return refuse(text, "SIZE", "tokens such as 3M, or bytes such as 64GiB", part);
    }
    if (is_missing) {
        return refuse_bytes(text, "SIZE", part);
    }
    if (!(tokens >= block_size && tokens <= MAX_TOKENS)) {
        return refuse(text, "SIZE", "at least a block (--block), at most 1e12 tokens", part);
    }
    options->capacity_tokens = (int64_t)tokens;
    return EXIT_CODE_OK;
}

static int read_rate(const char *text, struct part part, double token_bytes,
                     struct imbrex_kv_sim_tier *options)
{
    bool is_missing = false;
    struct part amount = part;

    if (amount.num_bytes > 2 && memcmp(amount.text + amount.num_bytes - 2, "/s", 2) == 0) {
        amount.num_bytes -= 2;
    }
    if (!read_tokens(amount, token_bytes, &options->tokens_per_s, &is_missing)) {
        return refuse(text, "RATE", "tokens a second such as 400k, or bytes such as 50GB/s", part);
    }
    if (is_missing) {
        return refuse_bytes(text, "RATE", part);
    }
    if (!(options->tokens_per_s > 0 && options->tokens_per_s <= MAX_RATE)) {
        return refuse(text, "RATE", "more than 0, at most 1e15 tokens a second", part);
    }
    return EXIT_CODE_OK;
}

static int read_latency(const char *text, struct part part, struct imbrex_kv_sim_tier *options)
{
    if (!read_with_unit(part, time_units, &options->latency_s) ||
        !(options->latency_s <= MAX_LATENCY_S)) {
        return refuse(text, "LATENCY", "a time such as 20us, 5ms or 0.1s, at most 1e6 s", part);
    }
    return EXIT_CODE_OK;
}

int tier_option_parse(const char *text, double token_bytes, int32_t block_size,
                      struct tier_option *tiers, size_t tier_idx)
{
    struct part parts[MAX_PARTS] = {{.text = ""}};
    size_t num_parts = 0;
    const char *at = text;
    bool is_last = false;

    for (; !is_last && num_parts < MAX_PARTS; num_parts++) {
        size_t length = strcspn(at, ":");
        parts[num_parts] = (struct part){.text = at, .num_bytes = length};
        is_last = at[length] == '\0';
        at += length + !is_last;
    }
    if (num_parts < MAX_PARTS - 1 || !is_last) {
        output_error("kv-sim: --tier: expected NAME:SIZE:RATE[:LATENCY] such as host:3M:400k:20us, "
                     "found \"%s\"",
                     text);
        return EXIT_CODE_INPUT;
    }
    struct imbrex_kv_sim_tier *options = &tiers[tier_idx].options;
    *options = (struct imbrex_kv_sim_tier){.latency_s = 0};
    int exit_code = read_name(text, parts[0], tiers, tier_idx);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_size(text, parts[1], token_bytes, block_size, options);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = read_rate(text, parts[2], token_bytes, options);
    }
    if (exit_code == EXIT_CODE_OK && num_parts == MAX_PARTS) {
        exit_code = read_latency(text, parts[3], options);
    }
    return exit_code;
}

/* By its layers and heads. */
static int model_token_bytes(const char *path, double *token_bytes)
{
    struct imbrex_model_info description;
    struct imbrex_model *model = NULL;
    int exit_code = session_open(path, &model);

    if (exit_code == EXIT_CODE_OK) {
        imbrex_model_describe(model, &description);
        /* Those are of fp32. */
        *token_bytes = (double)description.kv_bytes_per_token / 2;
    }
    signals_set_model(NULL);
    imbrex_model_close(model);
    return exit_code;
}

int tier_option_token_bytes(const char *text, double *token_bytes)
{
    if (text[0] < '0' || text[0] > '9') {
        return model_token_bytes(text, token_bytes);
    }
    if (!scaled_number_read(text, strlen(text), token_bytes) ||
        !(*token_bytes > 0 && *token_bytes <= MAX_TOKEN_BYTES)) {
        output_error("kv-sim: --token-bytes: expected more than 0, at most 1e9 bytes, or a model, "
                     "found \"%s\"",
                     text);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}
