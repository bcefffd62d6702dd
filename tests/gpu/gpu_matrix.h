/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix on both sides, for programs that check kernels on a GPU. */
#ifndef IMBREX_TESTS_GPU_GPU_MATRIX_H
#define IMBREX_TESTS_GPU_GPU_MATRIX_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

/* What lies around a matrix that was cleared. */
#define CANARY 0xcaca
#define CANARY_ELEMENTS 256

/* [rows, columns] bf16 with a row stride; canaries before, behind and between the rows. */
struct matrix {
    uint16_t *host;
    CUdeviceptr buffer, base; /* base: element 0 */
    int64_t rows, columns, stride, num_elements;
};

/* Normal values of this scale; everything around them is NaN: what is read by mistake shows. */
struct matrix matrix_create(int64_t rows, int64_t columns, int64_t stride, double scale);
void matrix_destroy(struct matrix *matrix);
uint16_t *matrix_at(const struct matrix *matrix, int64_t row, int64_t column);
/* The host's elements to the GPU, and back when the stream has ended. */
void matrix_upload(struct matrix *matrix);
void matrix_download(struct matrix *matrix);
/* All elements become canaries, on both sides. */
void matrix_clear(struct matrix *matrix);

#endif
