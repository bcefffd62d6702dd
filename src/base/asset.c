/* SPDX-License-Identifier: Apache-2.0 */
/* The files of models/stories260K, put into .rodata by the assembler's .incbin: megabytes cost no
 * compile time, and nothing is copied at run time. The paths are relative to the root of the tree,
 * where the compiler must be started. Symbols are global and hidden, so that link-time optimisation
 * may move the C code to another unit than the assembly. */
#include "base/asset.h"

#include <string.h>

/* %progbits and .balign mean the same on every ELF target; 16 bytes is the widest alignment that a
 * caller is promised. */
#define ASSET_EMBED(symbol, file)                                              \
    __asm__(".pushsection .rodata, \"a\", %progbits\n"                         \
            ".balign 16\n"                                                     \
            ".globl " #symbol "\n"                                             \
            ".hidden " #symbol "\n"                                            \
            ".type " #symbol ", %object\n" #symbol ":\n"                       \
            ".incbin \"models/stories260K/" file "\"\n"                        \
            ".size " #symbol ", . - " #symbol "\n"                             \
            ".globl " #symbol "_end\n"                                         \
            ".hidden " #symbol "_end\n" #symbol "_end:\n"                      \
            ".byte 0\n"                                                        \
            ".popsection\n");                                                  \
    extern const unsigned char symbol[] __attribute__((visibility("hidden"))); \
    extern const unsigned char symbol##_end[] __attribute__((visibility("hidden")));

/* X(symbol, file name) */
#define ASSET_LIST(X)                                           \
    X(imbrex_asset_config, "config.json")                       \
    X(imbrex_asset_generation_config, "generation_config.json") \
    X(imbrex_asset_tokenizer, "tokenizer.json")                 \
    X(imbrex_asset_tokenizer_config, "tokenizer_config.json")   \
    X(imbrex_asset_weights, "model.safetensors")

ASSET_LIST(ASSET_EMBED)

struct asset {
    const char *path;
    const unsigned char *begin, *end;
};

#define ASSET_ROW(symbol, file) {ASSET_DEFAULT_MODEL "/" file, symbol, symbol##_end},
static const struct asset assets[] = {ASSET_LIST(ASSET_ROW)};

bool asset_is_path(const char *path)
{
    return strncmp(path, ASSET_PREFIX, strlen(ASSET_PREFIX)) == 0;
}

bool asset_is_folder(const char *path)
{
    size_t length = strlen(ASSET_DEFAULT_MODEL);
    return strncmp(path, ASSET_DEFAULT_MODEL, length) == 0 &&
           (path[length] == '\0' || strcmp(path + length, "/") == 0);
}

const unsigned char *asset_find(const char *path, size_t *num_bytes)
{
    for (size_t i = 0; i < sizeof(assets) / sizeof(assets[0]); i++) {
        if (strcmp(path, assets[i].path) == 0) {
            *num_bytes = (size_t)(assets[i].end - assets[i].begin);
            return assets[i].begin;
        }
    }
    return NULL;
}
