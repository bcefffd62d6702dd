/* SPDX-License-Identifier: Apache-2.0 */
/* Put into .rodata by the assembler, as asset.c does; the folder is where the Makefile has nvcc
 * write. */
#include "ops/cuda/kernel_image.h"

/* The driver reads the header as words. */
#define KERNEL_IMAGE_EMBED(name)                                                               \
    __asm__(".pushsection .rodata, \"a\", %progbits\n"                                         \
            ".balign 64\n"                                                                     \
            ".globl imbrex_kernels_" #name "\n"                                                \
            ".hidden imbrex_kernels_" #name "\n"                                               \
            ".type imbrex_kernels_" #name ", %object\n"                                        \
            "imbrex_kernels_" #name ":\n"                                                      \
            ".incbin \"" KERNEL_FOLDER "/" #name ".fatbin\"\n"                                 \
            ".size imbrex_kernels_" #name ", . - imbrex_kernels_" #name "\n"                   \
            ".globl imbrex_kernels_" #name "_end\n"                                            \
            ".hidden imbrex_kernels_" #name "_end\n"                                           \
            "imbrex_kernels_" #name "_end:\n"                                                  \
            ".byte 0\n"                                                                        \
            ".popsection\n");                                                                  \
    extern const unsigned char imbrex_kernels_##name[] __attribute__((visibility("hidden")));  \
    extern const unsigned char imbrex_kernels_##name##_end[] __attribute__((visibility("hidde" \
                                                                                       "n")));

#define KERNEL_IMAGE_EMBED_PORTABLE(name) KERNEL_IMAGE_EMBED(name##_portable)

KERNEL_IMAGE_LIST(KERNEL_IMAGE_EMBED)
KERNEL_IMAGE_PORTABLE_LIST(KERNEL_IMAGE_EMBED_PORTABLE)

struct embedded_image {
    const char *name;
    const unsigned char *begin, *end; /* NULL: none */
};

static const struct embedded_image hopper_images[KERNEL_IMAGE_COUNT] = {
#define KERNEL_IMAGE_ROW(name) \
    [KERNEL_IMAGE_##name] = {#name, imbrex_kernels_##name, imbrex_kernels_##name##_end},
    KERNEL_IMAGE_LIST(KERNEL_IMAGE_ROW)
#undef KERNEL_IMAGE_ROW
};

static const struct embedded_image portable_images[KERNEL_IMAGE_COUNT] = {
#define KERNEL_IMAGE_ROW(name) \
    [KERNEL_IMAGE_##           \
        name] = {#name, imbrex_kernels_##name##_portable, imbrex_kernels_##name##_portable_end},
    KERNEL_IMAGE_PORTABLE_LIST(KERNEL_IMAGE_ROW)
#undef KERNEL_IMAGE_ROW
};

const unsigned char *kernel_image_bytes(enum kernel_image image, bool is_portable,
                                        size_t *num_bytes)
{
    const struct embedded_image *found =
        is_portable ? &portable_images[image] : &hopper_images[image];
    *num_bytes = (size_t)(found->end - found->begin);
    return found->begin;
}

const char *kernel_image_name(enum kernel_image image)
{
    const char *name = hopper_images[image].name;
    return name != NULL ? name : portable_images[image].name;
}
