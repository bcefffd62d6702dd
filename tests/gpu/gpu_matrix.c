/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/gpu_matrix.h"

#include <stdlib.h>

#include "ops/dtype.h"
#include "tests/gpu/gpu_session.h"

void matrix_upload(struct matrix *matrix)
{
    require(copied_to_gpu(matrix->buffer, matrix->host, (size_t)matrix->num_elements * 2),
            "copy to the GPU");
}

void matrix_download(struct matrix *matrix)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, matrix->host, matrix->buffer,
                         (size_t)matrix->num_elements * 2),
            "copy from the GPU");
}

uint16_t *matrix_at(const struct matrix *matrix, int64_t row, int64_t column)
{
    return matrix->host + CANARY_ELEMENTS + row * matrix->stride + column;
}

void matrix_clear(struct matrix *matrix)
{
    for (int64_t i = 0; i < matrix->num_elements; i++) {
        matrix->host[i] = CANARY;
    }
    matrix_upload(matrix);
}

struct matrix matrix_create(int64_t rows, int64_t columns, int64_t stride, double scale)
{
    struct matrix matrix = {.rows = rows, .columns = columns, .stride = stride};
    matrix.num_elements = rows * stride + 2 * CANARY_ELEMENTS;
    matrix.host = malloc((size_t)matrix.num_elements * 2);
    require(matrix.host != NULL, "memory");
    require(GPU_CALL(&gpu, mem_alloc, &matrix.buffer, (size_t)matrix.num_elements * 2),
            "memory of the GPU");
    matrix.base = matrix.buffer + CANARY_ELEMENTS * 2;
    for (int64_t i = 0; i < matrix.num_elements; i++) {
        matrix.host[i] = 0x7fc0; /* NaN: what is read by mistake shows */
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            *matrix_at(&matrix, i, j) = bf16_from_float((float)(scale * random_normal()));
        }
    }
    matrix_upload(&matrix);
    return matrix;
}

void matrix_destroy(struct matrix *matrix)
{
    (void)gpu.mem_free(matrix->buffer);
    free(matrix->host);
}
