/* SPDX-License-Identifier: Apache-2.0 */
/* The length of a text (two bytes, little-endian), the text, and a GGUF file whose metadata hold a
 * tokenizer: what passes must encode the text, and decode what it made. */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

#define MAX_INPUT_BYTES (1 << 16)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check_tokenizer(const struct imbrex_tokenizer *tokenizer, const char *text,
                            size_t text_bytes, unsigned flags)
{
    int32_t *ids;
    size_t num_ids, again_bytes;
    char *again;
    enum imbrex_status status =
        imbrex_tokenize(tokenizer, text, text_bytes, flags, &ids, &num_ids, NULL);
    if (status == IMBREX_STATUS_CAPACITY) {
        return;
    }
    require(status == IMBREX_STATUS_OK);
    for (size_t i = 0; i < num_ids; i++) {
        require(ids[i] >= 0 && ids[i] < imbrex_tokenizer_vocab_size(tokenizer));
    }
    require(imbrex_detokenize(tokenizer, ids, num_ids, false, &again, &again_bytes, NULL) ==
            IMBREX_STATUS_OK);
    require(utf8_valid_prefix(again, again_bytes) == again_bytes);
    imbrex_free(again);
    imbrex_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    if (num_bytes < 2 || num_bytes > MAX_INPUT_BYTES) {
        return 0;
    }
    size_t text_bytes = (size_t)bytes[0] | (size_t)bytes[1] << 8;
    text_bytes = text_bytes < num_bytes - 2 ? text_bytes : num_bytes - 2;
    const char *text = (const char *)bytes + 2;
    struct gguf gguf = {0};
    struct imbrex_error err = {0};
    struct imbrex_tokenizer *tokenizer = NULL;
    if (gguf_parse("fuzz", bytes + 2 + text_bytes, num_bytes - 2 - text_bytes, &gguf, &err) !=
        IMBREX_STATUS_OK) {
        return 0;
    }
    enum imbrex_status status = tokenizer_from_gguf(&gguf, &tokenizer, &err);
    gguf_release(&gguf);
    if (status != IMBREX_STATUS_OK) {
        require(tokenizer == NULL && err.status == status && err.message[0] != '\0');
        return 0;
    }
    for (unsigned flags = 0; flags < 4; flags++) {
        check_tokenizer(tokenizer, text, text_bytes, flags);
    }
    imbrex_tokenizer_close(tokenizer);
    return 0;
}
