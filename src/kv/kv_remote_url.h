/* SPDX-License-Identifier: Apache-2.0 */
/* Where the remote tier is, as its user writes it:
 *
 *   redis://[[USER]:PASSWORD@]HOST[:PORT][/DB][?ttl=SECONDS][&zstd=LEVEL]
 *
 * USER, PASSWORD and HOST may have %XX for bytes that mean something else there; an IPv6 address
 * stands in brackets. ttl: how long the server keeps a block, a day unless said. zstd: values are
 * compressed at that level; 0, the default: they are not. There is no TLS: rediss:// is refused. */
#ifndef IMBREX_KV_KV_REMOTE_URL_H
#define IMBREX_KV_KV_REMOTE_URL_H

#include "base/status.h"

#define KV_REMOTE_DEFAULT_PORT 6379
#define KV_REMOTE_DEFAULT_TTL_S 86400
#define KV_REMOTE_MAX_TTL_S 315360000 /* ten years */
#define KV_REMOTE_MAX_ZSTD_LEVEL 19

struct kv_remote_url {
    char host[256];
    char user[128];     /* "": the server's default user */
    char password[256]; /* "": none is sent */
    int32_t port, database;
    int32_t ttl_s;      /* 1 to KV_REMOTE_MAX_TTL_S */
    int32_t zstd_level; /* 0: as they are */
};

/* INVALID_ARGUMENT; UNSUPPORTED for what this build has no library for. Messages name the part that
 * is wrong and show numbers and names of settings: nothing else of the text, which may be a
 * password. */
enum imbrex_status kv_remote_url_parse(const char *text, struct kv_remote_url *url,
                                       struct imbrex_error *err);

#endif
