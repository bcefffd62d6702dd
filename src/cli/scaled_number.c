/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/scaled_number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

size_t scaled_number_length(const char *text)
{
    size_t length = strspn(text, "0123456789.");

    if (length > 0 && (text[length] == 'e' || text[length] == 'E')) {
        size_t sign = length + 1 + (text[length + 1] == '+');
        size_t num_exponent = strspn(text + sign, "0123456789");
        return num_exponent > 0 ? sign + num_exponent : length;
    }
    return length;
}

bool scaled_number_read(const char *text, size_t num_bytes, double *value)
{
    char number[32], *end;
    size_t num_digits = scaled_number_length(text);
    double scale = 1;

    if (num_digits + 1 == num_bytes) {
        char suffix = text[num_digits];
        scale = suffix == 'k' || suffix == 'K' ? 1e3
                : suffix == 'M'                ? 1e6
                : suffix == 'G'                ? 1e9
                                               : 0;
    }
    if (num_digits == 0 || num_digits >= sizeof(number) || num_digits > num_bytes ||
        num_digits + 1 < num_bytes || scale == 0) {
        return false;
    }
    memcpy(number, text, num_digits);
    number[num_digits] = '\0';
    *value = strtod(number, &end) * scale;
    return end == number + num_digits;
}

bool scaled_number_round(double *value)
{
    double whole = round(*value);

    if (fabs(*value - whole) > 1e-9 * whole) {
        return false;
    }
    *value = whole;
    return true;
}
