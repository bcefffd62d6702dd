/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex: LLM inference engine. Public C API: open a model, tokenize, generate, score, close.
 *
 * Objects, from the one that lives longest:
 *   imbrex_tokenizer   text <-> token ids; immutable, any thread
 *   imbrex_model       configuration, mapped weights, tokenizer; immutable, any thread, shared
 *                      by engines
 *   imbrex_engine      threads, KV cache, activation memory; runs many requests at once
 *   imbrex_request     one prompt and its continuations
 * Each must outlive the ones below it that were created from it. Several engines may live in one
 * process.
 *
 * Rules that hold everywhere:
 *   - Functions that can fail return enum imbrex_status and write results through their last
 *     pointers. On failure the results are untouched and ownership stays with the caller.
 *   - `err` may be NULL; otherwise it is filled on failure and left alone on success. Any other
 *     pointer may be NULL only where its comment says so.
 *   - What a comment calls "allocated" is freed with imbrex_free(), and nothing else is.
 *   - Destroying or closing NULL does nothing.
 *   - The library never exits, aborts, prints, reads the environment or installs signal handlers.
 */
#ifndef IMBREX_H
#define IMBREX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define IMBREX_API __attribute__((visibility("default")))
#define IMBREX_MUST_USE __attribute__((warn_unused_result))
#else
#define IMBREX_API
#define IMBREX_MUST_USE
#endif

#define IMBREX_VERSION "0.1.0"

/* ---- status and errors ----------------------------------------------------------------------- */

/* X(name, value, text). The one list of status codes. */
#define IMBREX_STATUS_LIST(X)                                      \
    X(OK, 0, "success")                                            \
    X(INVALID_ARGUMENT, 1, "an argument breaks a documented rule") \
    X(OUT_OF_MEMORY, 2, "memory could not be allocated")           \
    X(IO, 3, "the operating system refused to read or write")      \
    X(FORMAT, 4, "a file is damaged or breaks its format")         \
    X(UNSUPPORTED, 5, "valid, but not supported here")             \
    X(NOT_FOUND, 6, "no such file, tensor or name")                \
    X(CAPACITY, 7, "more than there is room for")                  \
    X(CANCELLED, 8, "cancelled by the caller")                     \
    X(DEVICE, 9, "the compute device failed")                      \
    X(INTERNAL, 10, "a defect in imbrex")                          \
    X(OUTPUT, 11, "a file could not be written")

enum imbrex_status {
#define IMBREX_STATUS_ENUM(name, value, text) IMBREX_STATUS_##name = value,
    IMBREX_STATUS_LIST(IMBREX_STATUS_ENUM)
#undef IMBREX_STATUS_ENUM
};

#define IMBREX_ERROR_MESSAGE_BYTES 512

/* Why a call failed: one line without control characters, NUL-terminated. Names the file, the field
 * or tensor, what was expected and what was found.
 *   field  the field of an options struct that the message begins with, such as "kv_host_bytes", so
 *          that whoever calls it by another name can put that one in its place; static storage.
 *          NULL: the message begins with something else */
struct imbrex_error {
    enum imbrex_status status;
    const char *field;
    char message[IMBREX_ERROR_MESSAGE_BYTES];
};

/* "OUT_OF_MEMORY"; "UNKNOWN" for a value that is not in the list. Static storage. */
IMBREX_API const char *imbrex_status_name(enum imbrex_status status);
/* The sentence beside the name in IMBREX_STATUS_LIST. Static storage. */
IMBREX_API const char *imbrex_status_text(enum imbrex_status status);
/* Version of the library that runs, such as "0.1.0". Static storage. */
IMBREX_API const char *imbrex_version(void);
/* Frees memory that this library handed out. NULL does nothing. */
IMBREX_API void imbrex_free(void *memory);

enum imbrex_log_level {
    IMBREX_LOG_LEVEL_DEBUG = 0,
    IMBREX_LOG_LEVEL_INFO = 1,
    IMBREX_LOG_LEVEL_WARNING = 2,
};

/* Receives one line without its newline. Called on the thread that made the call which logs. */
typedef void imbrex_log_fn(void *user, enum imbrex_log_level level, const char *message);

/* ---- tokenizer ------------------------------------------------------------------------------- */

struct imbrex_tokenizer;

/* How text is read. Zero means: no begin/end tokens, and "<|im_end|>" is ordinary text. */
enum imbrex_tokenize_flags {
    /* Apply the tokenizer's post-processor (BOS, EOS). */
    IMBREX_TOKENIZE_ADD_SPECIAL = 1 << 0,
    /* Special tokens written in the text become their ids. */
    IMBREX_TOKENIZE_PARSE_SPECIAL = 1 << 1,
};

/* Opens the tokenizer of a model without its weights. `path` is a folder with a tokenizer.json,
 * such a file, a GGUF file, or "builtin:stories260K" (NULL means that one). UNSUPPORTED names the
 * first feature of the file that imbrex does not have. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tokenizer_open(
    const char *path, struct imbrex_tokenizer **tokenizer, struct imbrex_error *err);
IMBREX_API void imbrex_tokenizer_close(struct imbrex_tokenizer *tokenizer);

/* Text to token ids.
 *   text       [text_bytes] UTF-8, NUL allowed; each invalid sequence is read as U+FFFD
 *   flags      bits of enum imbrex_tokenize_flags
 *   token_ids  [num_tokens], allocated; not NULL even for zero tokens
 * INVALID_ARGUMENT for a NULL tokenizer. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tokenize(
    const struct imbrex_tokenizer *tokenizer, const char *text, size_t text_bytes, unsigned flags,
    int32_t **token_ids, size_t *num_tokens, struct imbrex_error *err);

/* Token ids to text, as one whole: always valid UTF-8, incomplete characters become U+FFFD.
 *   text  [text_bytes] plus a terminating NUL, allocated
 * INVALID_ARGUMENT for an id outside [0, imbrex_tokenizer_vocab_size) or a NULL tokenizer. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_detokenize(
    const struct imbrex_tokenizer *tokenizer, const int32_t *token_ids, size_t num_tokens,
    bool skip_special, char **text, size_t *text_bytes, struct imbrex_error *err);

/* Ids are [0, vocab_size), added tokens counted. The weights may have more rows; those ids are
 * never sampled. */
IMBREX_API int32_t imbrex_tokenizer_vocab_size(const struct imbrex_tokenizer *tokenizer);
/* Whether the id is one of the tokenizer's special tokens. */
IMBREX_API bool imbrex_token_is_special(const struct imbrex_tokenizer *tokenizer, int32_t token_id);
/* The bytes one token stands for inside a text: may be a part of a character. A view, valid until
 * the tokenizer is closed; NULL for an id out of range or unassigned. */
IMBREX_API const char *imbrex_token_bytes(const struct imbrex_tokenizer *tokenizer,
                                          int32_t token_id, size_t *num_bytes);

/* ---- model ----------------------------------------------------------------------------------- */

struct imbrex_model;

struct imbrex_model_options {
    imbrex_log_fn *log; /* NULL: silent */
    void *log_user;
};

IMBREX_API struct imbrex_model_options imbrex_model_options_default(void);

/* Opens a checkpoint: weights are mapped, every tensor's dtype and shape is checked, the tokenizer
 * is loaded.
 *   path     a Hugging Face folder (config.json, *.safetensors, tokenizer.json), a GGUF file,
 *            "builtin:stories260K" (NULL means that one), or "random:<shape>[:<seed>]" with a shape
 *            such as "qwen2.5-7b": no files, no tokenizer, weights made when an engine is
 *   options  NULL for the defaults
 * The mapped files must not change while the model is open: a file truncated under it raises SIGBUS
 * in the thread that reads it (see imbrex_model_file_at). */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_model_open(
    const char *path, const struct imbrex_model_options *options, struct imbrex_model **model,
    struct imbrex_error *err);
IMBREX_API void imbrex_model_close(struct imbrex_model *model);

/* The model's tokenizer, a view that lives as long as the model. NULL if the checkpoint has none:
 * such a model takes and gives token ids only. */
IMBREX_API const struct imbrex_tokenizer *imbrex_model_tokenizer(const struct imbrex_model *model);

/* What the checkpoint says. Pointers are views that live as long as the model. */
struct imbrex_model_info {
    const char *path;
    const char *format;       /* "safetensors", "GGUF v2", "GGUF v3", "random" */
    const char *file_type;    /* what a GGUF file calls its mixture of types ("Q4_K_M"), or NULL */
    const char *architecture; /* "llama", "qwen2", "qwen3", "mistral" */
    int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    int32_t vocab_size;              /* rows of embed_tokens */
    int32_t max_position_embeddings; /* tokens the model was made for */
    double rope_theta, rms_norm_eps;
    const char *rope_scaling;   /* "default", "linear", "llama3", "yarn" */
    double rope_scaling_factor; /* 1 for "default" */
    int32_t sliding_window;     /* last positions that a token sees in sliding layers; 0: all */
    int32_t num_sliding_layers;
    bool tied;               /* lm_head is embed_tokens */
    const char *tied_reason; /* what decided it */
    int64_t num_parameters;
    size_t weight_bytes;       /* bytes of the tensors in use, as mapped */
    size_t kv_bytes_per_token; /* all layers, K and V, in fp32 */
    const int32_t *eos_token_ids;
    int32_t num_eos_token_ids;
};

IMBREX_API void imbrex_model_describe(const struct imbrex_model *model,
                                      struct imbrex_model_info *info);

#define IMBREX_MAX_TENSOR_DIMS 8

/* One tensor of the checkpoint. Pointers are views that live as long as the model. */
struct imbrex_tensor_info {
    const char *name;
    const char *dtype; /* "BF16", "F16", "F32"; in GGUF files also "Q8_0" and so on */
    const char *file;
    int32_t num_dims;
    int64_t shape[IMBREX_MAX_TENSOR_DIMS];
    size_t num_bytes;
};

IMBREX_API int32_t imbrex_model_num_tensors(const struct imbrex_model *model);
/* Tensors in the order of their names. INVALID_ARGUMENT for an index out of range. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_model_tensor(
    const struct imbrex_model *model, int32_t tensor_idx, struct imbrex_tensor_info *tensor);

/* Path of the weight file that is mapped at this address, or NULL. Async-signal-safe, so that a
 * SIGBUS handler can say which file shrank. */
IMBREX_API const char *imbrex_model_file_at(const struct imbrex_model *model, const void *address);

/* ---- chat ------------------------------------------------------------------------------------ */

struct imbrex_chat_options {
    const char *tools_json; /* JSON array of tools as the template wants them; NULL: none */
    /* NULL: the checkpoint's own (chat_template.jinja or tokenizer_config.json; of named ones
     * "tool_use" if tools are given and it is there, else "default"). "chatml", "llama3": templates
     * that imbrex brings. Anything else is the text of a Jinja template. */
    const char *chat_template;
    const char *chat_template_name; /* what messages call such a text; NULL: "chat_template" */
    bool add_generation_prompt;     /* end with the begin of the assistant's turn */
    int64_t now; /* what strftime_now() shows: seconds since 1970-01-01 00:00 of the local clock */
};

/* The checkpoint's template, no tools, add_generation_prompt, now 0. */
IMBREX_API struct imbrex_chat_options imbrex_chat_options_default(void);

/* A conversation to text and ids, by a chat template.
 *   messages_json  JSON array of at least one object with a string "role", a "content" and
 *                  whatever else the template knows
 *   options        NULL for the defaults
 *   token_ids      [num_tokens], allocated
 *   text           [text_bytes] plus a terminating NUL, allocated; text and text_bytes may be NULL
 * The template writes begin tokens itself, so no post-processor is applied. What messages and tools
 * contain can never become a special token: "<|im_end|>" in a content is ordinary text.
 *   NOT_FOUND         the model has no template (or no tokenizer), and options give none
 *   INVALID_ARGUMENT  the template refuses the conversation; the message is the template's
 *   FORMAT            broken JSON or Jinja, or a template that fails on this conversation
 *   UNSUPPORTED       the template uses something that imbrex does not have
 *   CAPACITY          it takes too many steps, too much memory or output */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_chat_tokenize(
    const struct imbrex_model *model, const char *messages_json,
    const struct imbrex_chat_options *options, int32_t **token_ids, size_t *num_tokens, char **text,
    size_t *text_bytes, struct imbrex_error *err);

/* The special token that the template puts behind an assistant's reply, for
 * imbrex_request_options.end_token_ids: not all checkpoints list it among their end tokens. -1
 * if the template has none. Fails as imbrex_chat_tokenize does. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_chat_end_token(
    const struct imbrex_model *model, const struct imbrex_chat_options *options, int32_t *token_id,
    struct imbrex_error *err);

/* ---- quantize -------------------------------------------------------------------------------- */

/* A tensor as it was written. Pointers are views, valid during the call that gets them. */
struct imbrex_quantized_tensor {
    const char *name;      /* in the file */
    const char *from, *to; /* types */
    const char *reason;    /* why `to` is not the type asked for; NULL: it is */
    int32_t num_dims;
    int64_t shape[IMBREX_MAX_TENSOR_DIMS];
    size_t from_bytes, to_bytes;
    double rms_error; /* root mean square of the error, relative to that of the elements */
};

struct imbrex_quantize_progress {
    const struct imbrex_quantized_tensor *tensor; /* just finished, or NULL */
    int32_t num_finished, num_tensors;
    uint64_t bytes_done, bytes_total; /* of the tensors as they are read */
};

/* Called on the thread that quantises: after each piece of a tensor, and once for each tensor.
 * Returns false to end it: CANCELLED, and no file. */
typedef bool imbrex_quantize_fn(void *user, const struct imbrex_quantize_progress *progress);

/* The types a file can get, in either case of letters. */
#define IMBREX_QUANTIZE_TYPES "f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or q6_k"

struct imbrex_quantize_options {
    const char *path;             /* of the GGUF file to write */
    const char *type;             /* one of IMBREX_QUANTIZE_TYPES */
    bool overwrite;               /* replace a file at the path */
    int32_t num_threads;          /* 0: as many as this process may run on */
    imbrex_quantize_fn *progress; /* NULL: none */
    void *user;
};

/* Type q8_0, everything else zero. */
IMBREX_API struct imbrex_quantize_options imbrex_quantize_options_default(void);

struct imbrex_quantize_report {
    int32_t num_tensors;
    uint64_t from_bytes, to_bytes; /* of the tensors */
    uint64_t file_bytes;
    double rms_error; /* as above, of all tensors together */
};

/* Writes the model, tokenizer and chat template included, as one GGUF file. Matrices get the type
 * asked for; rows that are no multiple of its block get Q5_0 for Q4_K, Q8_0 for Q6_K, and F16 where
 * they are no multiple of 32; the output matrix of a Q4_K file is Q6_K; norms and biases are F32.
 * The file appears at its path when it is whole, or not at all.
 *   report  may be NULL
 * INVALID_ARGUMENT if there is a file and overwrite is false, or while another call writes to the
 * path; OUTPUT if the disk is full or fails; UNSUPPORTED, by name, for what a GGUF file cannot say.
 */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_quantize(
    struct imbrex_model *model, const struct imbrex_quantize_options *options,
    struct imbrex_quantize_report *report, struct imbrex_error *err);

/* ---- engine ---------------------------------------------------------------------------------- */

struct imbrex_engine;

/* CPU instruction sets that the kernels may use, as bits of imbrex_engine_options.cpu_features. */
enum imbrex_cpu_features {
    IMBREX_CPU_AVX2 = 1 << 0,        /* AVX2, FMA and F16C */
    IMBREX_CPU_AVX512 = 1 << 1,      /* AVX-512 F, BW, DQ and VL; with AVX2 */
    IMBREX_CPU_AVX512_VNNI = 1 << 2, /* with AVX512 */
    /* Used only when asked for, all with AVX512_VNNI. The first two round activations to bf16 where
     * weights are bf16; the third is for quantised weights, exact, and no faster than VNNI where it
     * was measured. */
    IMBREX_CPU_AMX_BF16 = 1 << 16,
    IMBREX_CPU_AVX512_BF16 = 1 << 17,
    IMBREX_CPU_AMX_INT8 = 1 << 18,
};
#define IMBREX_CPU_ALL 0xffffu /* all but these three, as far as the machine has them */

/* Called around the parts of an engine's step, nested, on the thread that runs it: what NVTX and
 * other tracers want. name is static ("step", "schedule", "forward", "sample", "events"). */
typedef void imbrex_range_begin_fn(void *user, const char *name);
typedef void imbrex_range_end_fn(void *user);

#define IMBREX_MAX_CONTEXT_SIZE (1 << 24)
#define IMBREX_MAX_WAITING (1 << 20)
#define IMBREX_MAX_KV_CACHE_TOKENS (1 << 30) /* places of tokens are int32 */
#define IMBREX_MAX_RUNNING 4096              /* sequences; a step plans all of them */
#define IMBREX_MAX_STEP_TOKENS (1 << 16)     /* more only costs memory */
/* Requests that begin in one step take together at most so many tokens out of the prefix cache for
 * each of max_step_tokens, or those of one context if these are more: the rest begin in the steps
 * that follow. Bounds what a step is told, 52 bytes for each such token. */
#define IMBREX_STEP_CACHED_TOKENS 16

/* What activations are kept in. */
enum imbrex_compute {
    IMBREX_COMPUTE_AUTO = 0, /* F32 on a CPU, BF16 on a GPU */
    IMBREX_COMPUTE_F32 = 1,  /* on a GPU with plain kernels, for comparisons */
    IMBREX_COMPUTE_BF16 = 2, /* GPU only */
};

/* What keys and values are kept in. INT8 and FP8 (E4M3) have a bf16 scale for each 32 elements of a
 * head. On a GPU: that of the activations, or with BF16 ones INT8 and FP8. */
enum imbrex_kv_dtype {
    IMBREX_KV_DTYPE_AUTO = 0, /* that of the activations */
    IMBREX_KV_DTYPE_FP32 = 1,
    IMBREX_KV_DTYPE_FP16 = 2, /* what is beyond +-65504 becomes infinite */
    IMBREX_KV_DTYPE_BF16 = 3,
    IMBREX_KV_DTYPE_INT8 = 4,
    IMBREX_KV_DTYPE_FP8 = 5,
};

/* When KV blocks are written to the folder on a disk and to the server. */
enum imbrex_kv_write {
    IMBREX_KV_WRITE_COMPUTED = 0, /* as soon as they are computed, in the background */
    IMBREX_KV_WRITE_DEMOTED = 1,  /* when the KV cache has no room for them, and at the end */
};

/* Whether a token's bits depend on the tokens beside it. */
enum imbrex_invariance {
    IMBREX_INVARIANCE_OFF = 0,
    IMBREX_INVARIANCE_ON = 1,
    IMBREX_INVARIANCE_AUTO = 2, /* ON on a CPU, OFF on a GPU, where ON is slower */
};

/* Without effect on a CPU. */
enum imbrex_ablation {
    IMBREX_ABLATE_MLP = 1,       /* gate, up and the activation as three kernels */
    IMBREX_ABLATE_ATTENTION = 2, /* the plain attention kernel */
    IMBREX_ABLATE_PDL = 4,       /* no kernel begins before the one ahead of it has ended */
    IMBREX_ABLATE_GRAPH = 8,     /* every kernel of a decode step is launched by itself */
    IMBREX_ABLATE_HOPPER = 16,   /* the kernels of all GPUs from compute capability 8.0 on */
    /* Not computed at all, for their share in the time: what is generated is nonsense. */
    IMBREX_OMIT_MLP = 1 << 16,       /* gate, up and down */
    IMBREX_OMIT_ATTENTION = 1 << 17, /* without the products around it */
};

/* Called now and then on the thread that creates an engine while it brings the weights to a GPU.
 * Returns false to end it: CANCELLED. */
typedef bool imbrex_load_fn(void *user, size_t bytes_done, size_t bytes_total);

/* Each number has an upper limit, which the message that refuses it names. What cannot be used is
 * lowered, and imbrex_engine_memory_plan tells: max_step_tokens to the tokens of the cache,
 * max_running to max_step_tokens - kv_block_size + 1, so that each step has room for a prompt. */
struct imbrex_engine_options {
    int32_t num_threads;     /* compute threads, the caller's counted; 0: all CPUs it may use */
    int32_t context_size;    /* tokens of one sequence; 0: min(max_position_embeddings, 4096) */
    int32_t kv_cache_tokens; /* of all sequences together, >= context_size; 0: context_size */
    int32_t max_running;     /* sequences in one step; 0: 64 */
    /* Tokens of one step, decode and prefill together; 0: 128, on a GPU 4096. */
    int32_t max_step_tokens;
    int32_t max_waiting; /* requests that may wait before submit says CAPACITY; 0: 1024 */
    /* What one step of priority is worth: a request goes ahead of those of the next lower priority
     * that came up to this much earlier. So every request's turn comes. 0: one second. */
    int64_t priority_step_ns;
    /* ON: chunks of a prompt begin on the edges of KV blocks, and on a GPU products and attention
     * of all sizes take the same kernels: a request's bits then depend on nothing but the request.
     */
    enum imbrex_invariance batch_invariant;
    /* Which KV blocks of finished requests stay for those with the same beginning: a name that
     * imbrex_kv_policy_name (imbrex_kv.h) gives; NULL: "lru"; "none": none stay. */
    const char *kv_policy;
    /* Where blocks go that the KV cache has no room for, to come back instead of being computed
     * again: RAM (0: none; more than the machine has left is refused), and a folder on a disk
     * (NULL: none), which a later engine finds as this one left it, and which one engine uses at a
     * time. With a folder, all weights are read once for their digest. */
    size_t kv_host_bytes;
    const char *kv_disk_path;
    size_t kv_disk_bytes; /* that the folder may grow to */
    /* 1 to 19: blocks lie there packed with zstd at that level; 0: as they are. Either kind is
     * read, whatever is set. */
    int32_t kv_disk_zstd_level;
    /* Of the time in which blocks can be brought up, how much may go to those that the policy
     * expects to be asked for, when no request waits for any; 0..100, 0: none. The default is 50;
     * "predictive" and "seed" are the policies that expect something. */
    int32_t kv_prefetch_percent;
    /* A Redis or Valkey server that blocks go to as well, for other engines of the same model and
     * for those that come after: redis://[[USER]:PASSWORD@]HOST[:PORT][/DB][?ttl=SECONDS]
     * [&zstd=LEVEL]; NULL: none. It keeps a block for ttl seconds, from 1 to ten years, a day
     * unless said. An engine runs without it as long as it is not there. All weights are read once
     * for their digest. UNSUPPORTED in a build without hiredis.
     * kv_remote_secret_path: a file of 32 bytes or more that these engines share and nobody else
     * has; NULL: none, and whoever may write to the server may make the engines take wrong blocks
     * (docs/kv-cache.md). */
    const char *kv_remote_url;
    const char *kv_remote_secret_path;
    /* With a folder or a server. COMPUTED: other engines find a block on the server while this one
     * runs, and a process that is killed loses only the newest ones. */
    enum imbrex_kv_write kv_write;
    uint32_t cpu_features; /* bits of enum imbrex_cpu_features; 0: the plain C reference */
    /* Where the model runs: "cpu", "cuda" (the first GPU), "cuda:N", or "auto": a GPU if there is
     * one that can, else the CPU, with a note in the log. NULL: "cpu". */
    const char *device;
    enum imbrex_compute compute;
    enum imbrex_kv_dtype kv_dtype;
    /* Of a GPU: plans that imbrex tune measured, a file or a folder; NULL: none. If optional, a
     * file that is not there or is no table is done without, with a note in the log; see
     * imbrex_device_options (imbrex_ops.h). */
    const char *tuned;
    bool tuned_is_optional;
    uint32_t ablations; /* bits of enum imbrex_ablation: what to do without, for measurements */
    imbrex_load_fn *load_progress; /* NULL: none */
    void *load_user;
    imbrex_range_begin_fn *range_begin; /* NULL: none */
    imbrex_range_end_fn *range_end;
    void *range_user;
};

/* Zeros, batch_invariant AUTO, all CPU features. */
IMBREX_API struct imbrex_engine_options imbrex_engine_options_default(void);

/* Opens the device, plans and reserves all memory of a running model, brings the weights to a GPU;
 * afterwards a steady step allocates nothing. What a request gives depends neither on num_threads
 * nor, with batch_invariant, on the requests beside it, bit for bit.
 *   INVALID_ARGUMENT  an option breaks its rule, there is no such device, or another engine uses
 *                     the KV folder
 *   UNSUPPORTED       the device cannot compute so, or no GPU can be used
 *   NOT_FOUND         there is no such policy, or no file with the remote tier's secret
 *   IO                the KV folder, or that file, cannot be used
 *   OUT_OF_MEMORY     of the host or of the device */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_engine_create(
    struct imbrex_model *model, const struct imbrex_engine_options *options,
    struct imbrex_engine **engine, struct imbrex_error *err);
/* Stops the engine's thread, and waits until the KV folder has what the cache has. All its requests
 * must have been destroyed. */
IMBREX_API void imbrex_engine_destroy(struct imbrex_engine *engine);

/* Gives the engine a thread of its own, which runs requests as they come; until imbrex_engine_stop
 * nobody else may step it. Start and stop: any thread but in a callback; start is refused there,
 * and while there is a thread, with INVALID_ARGUMENT. Without, the engine runs on the threads that
 * wait for their requests (imbrex_request_wait, imbrex_request_poll), one at a time, or in
 * imbrex_engine_step. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_engine_start(struct imbrex_engine *engine,
                                                                  struct imbrex_error *err);
/* Ends that thread after its step. Requests stay as they are. Does nothing without one, nor in a
 * callback. */
IMBREX_API void imbrex_engine_stop(struct imbrex_engine *engine);

/* One step on the calling thread, for hosts with a loop of their own: takes new requests in, plans,
 * computes, hands out events.
 *   has_work  written: there are requests left; false also after a failure
 * INVALID_ARGUMENT while another thread runs the engine; DEVICE once the device has failed (see
 * imbrex_request_submit). */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_engine_step(struct imbrex_engine *engine,
                                                                 bool *has_work,
                                                                 struct imbrex_error *err);

/* Memory as planned, in bytes. KV and activations are the device's; on a CPU reserved address
 * space, committed when first touched. */
struct imbrex_memory_plan {
    size_t weight_bytes;        /* mapped from the checkpoint */
    size_t converted_bytes;     /* norms and biases, widened to fp32 */
    size_t device_weight_bytes; /* the weights' copy in a GPU's memory; 0 on a CPU */
    size_t kv_bytes;            /* kv_num_blocks blocks */
    size_t activation_bytes;    /* one step's tensors, logits and sampler included */
    size_t batch_bytes;         /* the steps' inputs and results, on host and device */
    size_t kv_host_bytes;       /* of KV blocks below the first tier, in RAM; a disk needs some */
    size_t kv_disk_bytes;       /* at most, in the KV folder */
    int32_t kv_block_size;      /* tokens of a KV block */
    int32_t kv_num_blocks;
    int32_t context_size;    /* tokens of one sequence */
    int32_t max_step_tokens; /* tokens */
    int32_t max_running;     /* sequences */
    int32_t max_waiting;     /* requests */
    int32_t num_threads;
    const char *kernels; /* the path in use: "ref", "avx2", "avx512", "vnni", ...; static storage */
    const char *device;  /* "cpu" or "cuda"; static storage */
    int32_t device_idx;  /* of the GPU */
    const char *compute; /* of activations: "F32" or "BF16"; static storage */
    const char *kv_dtype;  /* "fp32", "fp16", "bf16", "int8" or "fp8"; static storage */
    size_t kv_token_bytes; /* K and V of a token in all layers, scales included */
};

IMBREX_API void imbrex_engine_memory_plan(const struct imbrex_engine *engine,
                                          struct imbrex_memory_plan *plan);
/* The plan that imbrex_engine_create() would make, without making it. Fails for the options and
 * sizes that create refuses; whether the memory is there, only create finds out, as whether there
 * is the GPU of a "cuda": it is not opened. "auto" is decided by opening it. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_engine_plan(
    const struct imbrex_model *model, const struct imbrex_engine_options *options,
    struct imbrex_memory_plan *plan, struct imbrex_error *err);

/* Negative log-likelihood of each id given the ones before it, natural logarithm: a request with
 * prompt logprobs that generates nothing, waited for.
 *   token_ids  [num_tokens], 2 <= num_tokens <= context_size
 *   nll        [num_tokens - 1], written: nll[i] belongs to token_ids[i + 1]
 * FORMAT if the weights give logits that are not finite; CAPACITY for more ids than the context
 * holds or if the queue is full; INVALID_ARGUMENT in a callback. After a failure the contents of
 * nll are undefined. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_engine_score(struct imbrex_engine *engine,
                                                                  const int32_t *token_ids,
                                                                  int32_t num_tokens, double *nll,
                                                                  struct imbrex_error *err);

/* ---- requests -------------------------------------------------------------------------------- */

struct imbrex_request;

enum imbrex_finish_reason {
    IMBREX_FINISH_REASON_NONE = 0,        /* still running */
    IMBREX_FINISH_REASON_EOS = 1,         /* an end token */
    IMBREX_FINISH_REASON_STOP_STRING = 2, /* a stop string */
    IMBREX_FINISH_REASON_LENGTH = 3,      /* max_tokens */
    IMBREX_FINISH_REASON_CONTEXT = 4,     /* the context is full */
    IMBREX_FINISH_REASON_CANCELLED = 5,   /* cancelled, or the callback returned false */
    IMBREX_FINISH_REASON_ERROR = 6,       /* the request failed */
    IMBREX_FINISH_REASON_DEADLINE = 7,    /* its time was over */
};

/* "stop_string" and so on. Static storage. */
IMBREX_API const char *imbrex_finish_reason_name(enum imbrex_finish_reason reason);

/* An id and the natural logarithm of its probability in the model's own distribution: before
 * biases, penalties, temperature and filters. */
struct imbrex_logprob {
    int32_t token_id;
    float logprob;
};

/* Added to the logit of an id: in [-1e30, 1e30], or -INFINITY, which forbids it. */
struct imbrex_logit_bias {
    int32_t token_id;
    float bias;
};

#define IMBREX_MAX_CHOICES 64      /* of one request */
#define IMBREX_MAX_LOGPROBS 20     /* alternatives shown beside a token */
#define IMBREX_MAX_LOGIT_BIAS 1024 /* entries of one request */
#define IMBREX_MAX_END_TOKENS 64   /* of one request, the model's not counted */
#define IMBREX_MAX_PRIORITY 1000   /* and the lowest is its negative */
#define IMBREX_NO_TOKENS (-1)      /* max_tokens of a request that only reads its prompt */

/* One generated token, or the end of a choice. The end comes once for each choice, last, with
 * finish_reason set, token_id -1 and whatever text was still held back. `text` is whole UTF-8
 * characters that no stop string can begin any more: it may be empty, and may belong to earlier
 * tokens. An end token is a token as any other: it has its event, with its text if it is not a
 * special one, and the end follows. Pointers are views, valid during the callback, or until the
 * request is polled again. */
struct imbrex_token_event {
    int32_t choice_idx;
    int32_t token_id;
    const char *text;
    size_t text_bytes;
    enum imbrex_finish_reason finish_reason;
    bool is_last;                              /* no event of the request follows */
    float logprob;                             /* of token_id, if num_logprobs >= 0 */
    const struct imbrex_logprob *top_logprobs; /* [num_top_logprobs], the most likely first */
    int32_t num_top_logprobs;
};

/* Returns false to cancel the request, all its choices. Called on the thread that runs the engine;
 * it may submit, cancel and read metrics. What would wait for the engine is refused there (wait,
 * poll, score, step, start) or does nothing (stop); destroying a request there is not allowed. */
typedef bool imbrex_token_fn(void *user, const struct imbrex_token_event *event);

/* Bits of imbrex_request_options.from_checkpoint: fields that the checkpoint's
 * generation_config.json set. */
enum imbrex_generation_field {
    IMBREX_GENERATION_TEMPERATURE = 1 << 0,
    IMBREX_GENERATION_TOP_K = 1 << 1,
    IMBREX_GENERATION_TOP_P = 1 << 2,
    IMBREX_GENERATION_MIN_P = 1 << 3,
    IMBREX_GENERATION_REPETITION_PENALTY = 1 << 4,
};

/* Everything a request says; submit copies all of it. Logits go through, in this order: logit_bias
 * (and end tokens forbidden before min_tokens), repetition penalty, frequency and presence penalty,
 * temperature, top-k, top-p, min-p, draw. */
struct imbrex_request_options {
    /* [num_prompt_ids], each in [0, rows of embed_tokens); NULL and 0 with a prompt_text. */
    const int32_t *prompt_ids;
    int32_t num_prompt_ids;
    /* Instead of ids: text that submit tokenizes with these bits of enum imbrex_tokenize_flags;
     * NULL with ids. */
    const char *prompt_text;
    size_t prompt_text_bytes;
    unsigned prompt_text_flags;

    /* Tokens to generate; 0: until an end token or the context is full; IMBREX_NO_TOKENS: none, for
     * the logprobs of a prompt of at least 2 tokens, with one choice. */
    int32_t max_tokens;
    /* No end token before that many; stop strings and max_tokens end it all the same. */
    int32_t min_tokens;
    int32_t num_choices; /* continuations of the one prompt, 1 .. IMBREX_MAX_CHOICES */

    float temperature; /* 0: the most likely token (lowest id on a tie); else up to 100 */
    int32_t top_k;     /* keep the k most likely; 0: all */
    float top_p;       /* keep the most likely whose probabilities sum to p, in (0, 1] */
    float min_p;       /* keep those with at least min_p x the best probability, in [0, 1) */
    /* Divides positive, multiplies negative logits of ids in the prompt or the output; in
     * [0.01, 100], 1 is off. */
    float repetition_penalty;
    float frequency_penalty; /* subtracted once for each time the output has the id; in [-2, 2] */
    float presence_penalty;  /* subtracted if the output has the id; in [-2, 2] */
    const struct imbrex_logit_bias *logit_bias; /* [num_logit_bias], ids all different */
    size_t num_logit_bias;
    /* Same seed, same text: one draw for each (seed, choice, position), independent of all else. */
    uint64_t seed;

    const char *const
        *stop; /* [num_stop] strings, any number; the text ends before the first found */
    size_t num_stop;
    const int32_t *end_token_ids; /* [num_end_token_ids]: end tokens beside the model's */
    size_t num_end_token_ids;
    bool ignore_eos; /* do not end at end tokens */

    /* Logprobs of generated tokens with that many alternatives, up to IMBREX_MAX_LOGPROBS; -1: no
     * logprobs. The same for the prompt's tokens, see imbrex_request_prompt_logprobs. */
    int32_t num_logprobs, num_prompt_logprobs;

    int32_t priority; /* higher is sooner; see imbrex_engine_options.priority_step_ns */
    /* From submit; a request that has not ended by then ends with DEADLINE. 0: no limit. */
    int64_t timeout_ns;
    /* [salt_bytes], up to 256: whatever requests share of the KV cache, they share with equal salt
     * only. NULL with 0. */
    const void *salt;
    size_t salt_bytes;
    /* What helps the prefix cache to guess whether the prompt's beginning will be wanted again; all
     * may be 0. session and tenant are numbers of the caller's choice. */
    uint64_t session;           /* requests of one conversation have the same */
    int32_t turn;               /* 1: the first of its session */
    uint32_t tenant;            /* who pays: requests of one tenant behave alike */
    int64_t expected_return_ns; /* when the session's next request is expected, from the end on */
    bool is_session_end;        /* no other will follow */
    bool no_text;               /* events carry no text; not together with stop strings */

    imbrex_token_fn *callback; /* NULL: events are kept for imbrex_request_poll */
    void *user;
    /* Bits of enum imbrex_generation_field; told by the defaults, ignored by submit. */
    unsigned from_checkpoint;
};

/* One choice, no logprobs. Sampling as the checkpoint's generation_config.json says where there is
 * one (do_sample false or absent means temperature 0), greedy otherwise. */
IMBREX_API struct imbrex_request_options imbrex_request_options_default(
    const struct imbrex_model *model);

/* Queues a request. Any thread.
 *   INVALID_ARGUMENT  an option breaks its rule; the message names it
 *   CAPACITY          the prompt does not fit the context (with both numbers), or max_waiting
 *                     requests wait already: try later
 *   DEVICE            the device has failed: the engine ended all requests with this status and
 *                     takes no more */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_request_submit(
    struct imbrex_engine *engine, const struct imbrex_request_options *options,
    struct imbrex_request **request, struct imbrex_error *err);

/* Cancels the request if it has not ended, waits for its end, frees it. Not from a callback. */
IMBREX_API void imbrex_request_destroy(struct imbrex_request *request);

/* Asks the request to end before its next step. Any thread; async-signal-safe. */
IMBREX_API void imbrex_request_cancel(struct imbrex_request *request);

/* Waits for the end of all choices; runs the engine meanwhile if no other thread does. The status
 * is the request's: OK also when cancelled or late (the events and the metrics tell the finish
 * reason); FORMAT if the weights give logits that are not finite; DEVICE. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_request_wait(struct imbrex_request *request,
                                                                  struct imbrex_error *err);

/* Takes the next event of a request without a callback. Waits up to timeout_ns for one (negative:
 * without limit) and runs the engine meanwhile, for whole steps, if no other thread does. 0 takes
 * what is there and runs nothing: for engines that another thread runs. One thread polls a request
 * at a time.
 *   has_event  written: false if none came in time, or the last one has been taken
 *   event      written if has_event
 * Events that are not taken stay in memory; OUT_OF_MEMORY if that was short: the request has ended
 * with ERROR then. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_request_poll(struct imbrex_request *request,
                                                                  int64_t timeout_ns,
                                                                  bool *has_event,
                                                                  struct imbrex_token_event *event,
                                                                  struct imbrex_error *err);

/* Logprobs of the prompt, there from the first event on.
 *   logprobs  [num_prompt_tokens], of each token given those before it; [0] is 0
 * top       [num_prompt_tokens, num_prompt_logprobs], the most likely first; row 0 is (-1, 0). The
 *             pointer to it may be NULL
 * Both are views, valid as long as the request. Any thread. NOT_FOUND if it has none (yet). */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_request_prompt_logprobs(
    const struct imbrex_request *request, const float **logprobs, const struct imbrex_logprob **top,
    struct imbrex_error *err);

struct imbrex_request_metrics {
    int32_t num_prompt_tokens;
    int32_t num_generated_tokens; /* of all choices, end tokens counted */
    int32_t num_cached_tokens;    /* of the prompt, found in the prefix cache */
    /* Of these, the ones that came up from RAM, the disk or the server since they were last used.
     */
    int32_t num_host_tokens, num_disk_tokens, num_remote_tokens;
    int32_t num_preemptions; /* times its KV blocks were taken away */
    int64_t queue_ns;        /* submit to the first step, or to the end without one */
    int64_t prefill_ns;      /* first step to the first token, or to the end without one */
    int64_t decode_ns;       /* from there to the end */
    int64_t ttft_ns;         /* submit to the first token; 0 without one */
    enum imbrex_finish_reason finish_reason; /* of choice 0 */
};

/* Read in a callback of the request, or once its last event has come; decode_ns is 0 until that
 * one. */
IMBREX_API void imbrex_request_read_metrics(const struct imbrex_request *request,
                                            struct imbrex_request_metrics *metrics);

/* ---- metrics --------------------------------------------------------------------------------- */

#define IMBREX_HISTOGRAM_NUM_BUCKETS 64

/* Bucket i counts values <= imbrex_histogram_bound(i) and above the bound before; the last one has
 * no upper bound. */
struct imbrex_histogram {
    uint64_t num_values, sum;
    uint64_t buckets[IMBREX_HISTOGRAM_NUM_BUCKETS];
};

/* 1024 * 2^(i / 2), rounded down: from 1 us to some 50 minutes in ns. */
IMBREX_API uint64_t imbrex_histogram_bound(int32_t bucket_idx);

struct imbrex_engine_metrics {
    /* Since creation. */
    uint64_t num_submitted, num_rejected; /* requests; rejected: the queue was full */
    uint64_t num_ended[8];                /* choices, by enum imbrex_finish_reason */
    uint64_t num_prompt_tokens;           /* computed, recomputed ones counted again */
    uint64_t num_generated_tokens;
    uint64_t num_preemptions;
    /* Prompt tokens that the prefix cache was asked for, and those it had; of each request the
     * first time that it ran. */
    uint64_t num_queried_tokens, num_cached_tokens;
    /* Of the cached ones, as in imbrex_request_metrics. */
    uint64_t num_host_tokens, num_disk_tokens, num_remote_tokens;
    uint64_t num_kv_demoted; /* blocks copied down from the first tier */
    uint64_t num_kv_written; /* the same, while it keeps them (IMBREX_KV_WRITE_COMPUTED) */
    uint64_t num_kv_lost;    /* blocks that went while no tier below had a copy or room for one */
    uint64_t num_kv_faults;  /* blocks lost to disk, server or a failed copy, damaged ones too */
    /* Blocks brought up before anybody asked for them; of these, used by a request, and forgotten
     * unused. */
    uint64_t num_kv_ahead, num_kv_ahead_used, num_kv_ahead_wasted;
    /* Times that a request ran while its blocks were still coming up from RAM, layer by layer. */
    uint64_t num_kv_layered;
    uint64_t kv_wait_ns;         /* time that the next request waited for blocks on their way */
    uint64_t num_key_collisions; /* equal keys of different tokens, seen and not taken for a hit */
    uint64_t num_steps, num_failed_steps;
    uint64_t num_bad_logits; /* rows that were not finite */
    /* Now. */
    int64_t num_running, num_waiting;       /* sequences */
    int64_t kv_num_blocks, kv_num_free;     /* free: those that can be given out, cached ones too */
    int64_t kv_host_blocks, kv_disk_blocks; /* that can be found there */
    /* ns that a KV block takes to come up from RAM, as measured at first, and to be computed, as
     * prompts were lately; 0: unknown. A request waits for blocks no longer than computing them
     * would take. */
    int64_t kv_block_ns, kv_recompute_ns;
    int64_t kv_remote_up; /* 1: the server answers */
    /* ns. ITL is the gap between two tokens of one choice. Overhead is a step without its forward
     * pass: planning, sampling, events. Of a GPU forward time is that of all its work for a step,
     * from when it was given or the step before was done, and overhead is a step without what the
     * host waited. */
    struct imbrex_histogram ttft, itl, queue_time, step_time, forward_time, overhead;
};

/* A snapshot, without locks: counters may be a step apart from each other. Any thread. */
IMBREX_API void imbrex_engine_read_metrics(const struct imbrex_engine *engine,
                                           struct imbrex_engine_metrics *metrics);

#ifdef __cplusplus
}
#endif
#endif
