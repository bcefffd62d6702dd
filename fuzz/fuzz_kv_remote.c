/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a value of the remote tier, and as its address. A value that is taken must be the
 * block that making it again gives; half of the inputs get the checksums that they should have, so
 * that what lies behind them is reached too. */
#include <stdlib.h>
#include <string.h>

#include "kv/kv_remote_url.h"
#include "kv/kv_remote_value.h"

#define BLOCK_BYTES 4096
#define MAX_VALUE_BYTES (2 * BLOCK_BYTES)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check_url(const uint8_t *bytes, size_t num_bytes)
{
    struct kv_remote_url url;
    char text[1024];
    size_t length = num_bytes < sizeof(text) - 1 ? num_bytes : sizeof(text) - 1;
    memcpy(text, bytes, length);
    text[length] = '\0';
    if (kv_remote_url_parse(text, &url, NULL) == IMBREX_STATUS_OK) {
        require(url.port > 0 && url.port <= 65535 && url.database >= 0 && url.host[0] != '\0');
        require(url.ttl_s >= 1 && url.zstd_level >= 0 &&
                url.zstd_level <= KV_REMOTE_MAX_ZSTD_LEVEL);
        require(memchr(url.password, '\0', sizeof(url.password)) != NULL);
    }
}

/* The first byte says what is made right: checksums, and all of the header but what it packs. */
static void check_value(const uint8_t *bytes, size_t num_bytes)
{
    static const int32_t token_ids[KV_BLOCK_SIZE] = {1, 2, 3};
    static const struct kv_key key = {{5, 6, 7, 8}};
    static unsigned char value[MAX_VALUE_BYTES], block[BLOCK_BYTES], again[BLOCK_BYTES];
    struct kv_remote_codec *codec;
    const struct kv_remote_codec_options options = {.owner = {{1, 2, 3, 4}},
                                                    .block_bytes = BLOCK_BYTES};
    size_t made_bytes;
    uint8_t choice = num_bytes > 0 ? bytes[0] : 0;
    size_t value_bytes = num_bytes > 0 ? num_bytes - 1 : 0;
    if (value_bytes > sizeof(value)) {
        return;
    }
    require(kv_remote_codec_create(&options, &codec, NULL) == IMBREX_STATUS_OK);
    memcpy(value, bytes + (num_bytes > 0), value_bytes);
    if (choice % 2 == 1 && value_bytes >= sizeof(struct kv_remote_header)) {
        struct kv_remote_header given, header;
        const unsigned char *made =
            kv_remote_value_make(codec, &key, token_ids, block, &made_bytes);
        memcpy(&given, value, sizeof(given));
        memcpy(&header, made, sizeof(header));
        header.packing = given.packing;
        header.payload_bytes = choice % 4 == 1 ? value_bytes - sizeof(header) : given.payload_bytes;
        memcpy(value, &header, sizeof(header));
        kv_remote_value_seal(codec, value, value_bytes);
    }
    if (kv_remote_value_open(codec, &key, token_ids, value, value_bytes, block)) {
        const unsigned char *made =
            kv_remote_value_make(codec, &key, token_ids, block, &made_bytes);
        require(kv_remote_value_open(codec, &key, token_ids, made, made_bytes, again));
        require(memcmp(block, again, sizeof(block)) == 0);
    }
    kv_remote_codec_destroy(codec);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    check_url(bytes, num_bytes);
    check_value(bytes, num_bytes);
    return 0;
}
