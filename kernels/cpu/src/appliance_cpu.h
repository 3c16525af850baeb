/* The C ABI of the CPU library: everything that Python calls, and every struct that it fills.
 *
 * Plain data and plain functions. No function keeps a pointer after it returns, except that an
 * engine owns its threads and its workspace. Functions that can fail return an ap_status.
 */
#ifndef APPLIANCE_CPU_H
#define APPLIANCE_CPU_H

#include <stdint.h>

#pragma GCC visibility push(default)

#define AP_ABI 4  /* changes with every change of a struct or a signature below */
#define AP_LANES 16 /* outputs in a weight tile, tokens in a cache page */

typedef enum { AP_OK = 0, AP_NO_MEMORY = 1, AP_BAD_ARGUMENT = 2, AP_UNSUPPORTED_ISA = 3 } ap_status;

typedef enum { AP_SCALAR = 0, AP_AVX2 = 1, AP_AVXVNNI = 2, AP_AVX512 = 3, AP_NUM_ISAS = 4 } ap_isa;

/* How the elements of a weight or a cache are stored. */
typedef enum {
    AP_F32 = 0,
    AP_F16 = 1,
    AP_BF16 = 2,
    AP_INT8 = 3,
    AP_INT4 = 4,
    AP_SEALED = 5, /* caches only, like those below: 4 bits, keys by dimension over a block */
    AP_FP8 = 6,    /* E4M3 */
    AP_K8V4 = 7,   /* keys of 8 bits, values of 4; sealed, too */
    AP_NUM_FORMATS = 8,
} ap_format;

/* What an integer weight's code q stands for; scale and offset are per output and group. */
typedef enum {
    AP_CENTERED = 0,   /* w = (q - 8) * scale with 4 bits, (q - 128) * scale with 8 */
    AP_ADDITIVE = 1,   /* w = q * scale + offset */
    AP_ZERO_POINT = 2, /* w = (q - offset) * scale */
} ap_offset_kind;

/* A weight matrix (out_features, in_features) in tiles of 16 outputs; `in` below is in_features.
 *
 * The last tile is filled up with zeros. Codes by format, per tile:
 *   AP_INT4  (in / 8, 16, 4) bytes: byte [k][j][t] holds the codes of output j for inputs
 *            8k + t (low nibble) and 8k + 4 + t (high nibble)
 *   AP_INT8  (in / 4, 16, 4) bytes: byte [k][j][t] holds output j, input 4k + t; unsigned
 *   AP_F32, AP_F16, AP_BF16  (in, 16) elements: element [k][j] is output j, input k
 * Scales and offsets of integer weights: (tiles, in / group, 16), each AP_F16 or AP_F32.
 */
typedef struct {
    int32_t format;       /* ap_format of the codes */
    int32_t offset_kind;  /* ap_offset_kind */
    int32_t scale_format; /* of scales and offsets: AP_F16 or AP_F32 */
    int32_t group;        /* inputs that share a scale: 32, 64 or 128; divides in_features */
    int32_t in_features;
    int32_t out_features;
    const void *codes;   /* 64-byte aligned */
    const void *scales;  /* 64-byte aligned; NULL for float formats */
    const void *offsets; /* the same; NULL for AP_CENTERED */
    const float *bias;   /* (out_features,), or NULL */
    /* (in_features,), the input that each column of the codes belongs to; NULL: its own. Of integer
     * formats only. */
    const int32_t *input_order;
} ap_linear;

typedef struct {
    const float *weight; /* (width,); NULL: there is no such norm */
    float eps;
} ap_norm;

typedef enum { AP_SILU = 0, AP_GELU_TANH = 1 } ap_activation;

typedef struct {
    int32_t rotary_dim;       /* even; element i pairs with i + rotary_dim / 2 */
    float amplitude;          /* multiplies cosine and sine */
    const float *frequencies; /* (rotary_dim / 2,), radians per position */
} ap_rope;

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;    /* a multiple of 16, at most 256 */
    int32_t window;      /* a query sees this many latest positions, its own included; 0: all */
    float scale;         /* multiplies q . k */
    float softcap;       /* scores become cap * tanh(scores / cap); 0: none */
    int32_t rope;        /* index into ap_model.ropes */
    int32_t num_qkv;     /* 1 to 3 linears, whose outputs lie one after another */
    ap_linear qkv[3];    /* hidden -> query heads, key heads, value heads */
    ap_linear output;    /* query heads -> hidden */
    ap_norm query_norm;  /* of each head, before RoPE */
    ap_norm key_norm;
} ap_attention;

typedef struct {
    ap_attention attention;
    ap_linear gate;
    ap_linear up;
    ap_linear down;
    int32_t activation; /* ap_activation */
    ap_norm attention_norm;
    ap_norm attention_post_norm;
    ap_norm mlp_norm;
    ap_norm mlp_post_norm;
} ap_layer;

typedef struct {
    int32_t hidden_size;
    int32_t vocab_size;
    int32_t num_layers;
    int32_t num_ropes;
    const ap_layer *layers;
    const ap_rope *ropes;
    ap_norm final_norm;
    ap_linear embedding; /* (vocab_size, hidden_size); may be the head's own tiles */
    ap_linear head;
    float embedding_scale;
    float logit_softcap; /* 0: none */
} ap_model;

/* The KV cache: one arena, block after block; a block holds its tokens of all layers.
 *
 * Block b begins at base + b * block_bytes; layer l lies in it at layers[l].offset, as
 * (num_kv_heads, block_size / 16) pages of ap_page_bytes each. A page holds the keys and values of
 * 16 tokens of one head; page.h says how.
 *
 * Blocks of a sealed layer (AP_SEALED, AP_K8V4) are made when all their tokens are known. Until
 * then the tokens lie as AP_INT8 in an open page of a second arena, laid out in the same way: open
 * page i begins at open_base + i * open_bytes, layer l in it at layers[l].open_offset.
 */
typedef struct {
    int64_t offset;           /* bytes, a multiple of 64 */
    int64_t open_offset;      /* the same among the open pages */
    const float *head_scales; /* AP_FP8: (2, num_kv_heads), of keys and of values */
    const float *key_mean;    /* (num_kv_heads, head_dim), taken off all keys; NULL: nothing is */
    int32_t format;           /* ap_format */
    int32_t reserved;
} ap_cache_layer;

typedef struct {
    uint8_t *base; /* 64-byte aligned */
    int64_t block_bytes;
    int32_t num_blocks;
    int32_t block_size; /* tokens, a multiple of 16; 32 with sealed layers */
    const ap_cache_layer *layers;
    uint8_t *open_base; /* 64-byte aligned; NULL without sealed layers */
    int64_t open_bytes;
    int32_t num_open;
    int32_t reserved;
} ap_cache;

/* One step's rows: sequence i owns rows query_start[i] .. query_start[i + 1], which are the last
 * ones of its context_lens[i] tokens.
 *
 * With sealed layers the rows of a sequence lie in one block, whose tokens they read from its
 * open page, and those of all blocks before it in the sealed form. So a longer chunk comes as
 * several sequences, one for each block. The blocks that the step fills are sealed in it. */
typedef struct {
    int32_t num_tokens;
    int32_t num_seqs;
    int32_t table_width; /* entries in a row of block_tables */
    int32_t num_rows;    /* rows whose logits are wanted */
    const int64_t *token_ids;    /* (num_tokens,) */
    const int64_t *positions;    /* (num_tokens,) */
    const int64_t *slot_mapping; /* (num_tokens,), block * block_size + offset */
    const int32_t *query_start;  /* (num_seqs + 1,) */
    const int32_t *context_lens; /* (num_seqs,), this step's rows included */
    const int32_t *block_tables; /* (num_seqs, table_width) */
    const int64_t *rows;         /* (num_rows,); NULL: all rows, in order */
    const int32_t *open_pages;   /* (num_seqs,), of the block of its rows; with sealed layers */
} ap_batch;

/* What each row asks of sampling, arrays of num_rows. */
typedef struct {
    const float *temperature; /* below 1e-5: greedy */
    const int64_t *top_k;     /* 0 keeps all */
    const float *top_p;
    const float *min_p;
    const double *uniform;    /* [0, 1) */
} ap_sampling;

typedef struct ap_engine ap_engine; /* threads and workspace */

/* ---- library ---- */
int32_t ap_abi(void);                 /* AP_ABI of the library */
const char *ap_build_version(void);   /* version of the package that it was built for */
int64_t ap_struct_bytes(const char *name); /* sizeof, -1 for an unknown name */
int32_t ap_isa_supported(int32_t isa); /* 1: built in, and this CPU has it */
int32_t ap_use_isa(int32_t isa);      /* for all calls from now on; AP_UNSUPPORTED_ISA */
int32_t ap_current_isa(void);         /* the best supported one, until ap_use_isa is called */

/* ---- engine ---- */
/* threads >= 1, the caller's included. A step that would need a larger workspace than
 * max_workspace_bytes (0: no limit), or more than the system gives, returns AP_NO_MEMORY. */
ap_engine *ap_engine_create(int32_t threads, int64_t max_workspace_bytes); /* NULL: no memory */
void ap_engine_destroy(ap_engine *engine);
int64_t ap_workspace_bytes(const ap_engine *engine);
/* From now on `ap_step` adds to *progress as it goes on, some times a layer, so that a watcher can
 * tell a long step from one that hangs; NULL: nobody watches. */
void ap_engine_watch(ap_engine *engine, uint64_t *progress);

/* ---- the whole step: logits (num_rows, vocab_size) ---- */
int32_t ap_step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                const ap_batch *batch, float *logits);

/* Choose a token per row; logits (num_rows, vocab_size) are not changed.
 * tokens (num_rows,): the id, -1 if the row holds NaN or no finite value, -2 if it holds +inf. */
int32_t ap_sample(ap_engine *engine, const float *logits, int32_t num_rows, int32_t vocab_size,
                  const ap_sampling *sampling, int64_t *tokens);

/* Ban tokens in some rows of logits (..., vocab_size): those without a bit in words (num_masks,
 * words_stride), of which token 32 * w + i has bit i of word w, become -inf. */
void ap_mask_logits(float *logits, int32_t vocab_size, int32_t num_masks, const int64_t *rows,
                    const uint32_t *words, int32_t words_stride);

/* ---- what a model and a cache are made with ---- */
/* Lay out row-major codes in the tiles of `linear`, whose codes, scales and offsets are written
 * here; the sources are laid out as in PackedWeight: codes (out, in * bits / 8), scales and offsets
 * (out, in / source_group) in source_scale_format. source_group is a multiple of linear->group.
 * Float formats: codes (out, in) elements of linear->format. */
int32_t ap_linear_pack(ap_engine *engine, const ap_linear *linear, const void *codes,
                       const void *scales, const void *offsets, int32_t source_scale_format,
                       int32_t source_group);
int64_t ap_page_bytes(int32_t format, int32_t head_dim); /* multiple of 64; -1: unsupported */

#pragma GCC visibility pop

#endif
