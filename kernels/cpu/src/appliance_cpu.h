/* The C ABI of the CPU library: everything that Python calls, and every struct that it fills.
 *
 * Plain data and plain functions. No function keeps a pointer after it returns, except that an
 * engine owns its threads and its workspace. Functions that can fail return an ap_status.
 */
#ifndef APPLIANCE_CPU_H
#define APPLIANCE_CPU_H

#include <stdint.h>

#pragma GCC visibility push(default)

#define AP_AXES 3 /* time, height and width */
#define AP_ABI 28 /* changes with every change of a struct or a signature below */
#define AP_LANES 16 /* outputs in a weight tile, tokens in a cache page */
#define AP_MOST_EXPERTS 4096 /* of a layer */
#define AP_MOST_RANKS 64

typedef enum {
    AP_OK = 0,
    AP_NO_MEMORY = 1,
    AP_BAD_ARGUMENT = 2,
    AP_UNSUPPORTED_ISA = 3,
    AP_RANK_LOST = 4, /* another process of the group has ended */
} ap_status;

typedef enum {
    AP_SCALAR = 0,
    AP_AVX2 = 1,
    AP_AVXVNNI = 2,
    AP_AVX512 = 3,
    AP_AMX = 4,  /* AVX-512 and tiles */
    AP_NEON = 5, /* of ARM, with dot products */
    AP_I8MM = 6,
    AP_NUM_ISAS = 7,
} ap_isa;

#include "formats.h"

typedef struct {
    const float *weight; /* (width,); NULL: no norm */
    float eps;
    const float *bias; /* (width,), of a LayerNorm of the stream; NULL: an RMSNorm */
} ap_norm;

typedef enum {
    AP_SILU = 0,
    AP_GELU_TANH = 1,
    AP_CLAMPED_SWIGLU = 2,
    AP_RELU_SQUARED = 3,
    AP_RELU = 4,
    AP_GELU = 5, /* by the error function */
    AP_BOUNDED_SWIGLU = 6,
    AP_QUICK_GELU = 7, /* x * sigmoid(1.702 x) */
} ap_activation;

/* The middle of an MLP: act(gate) * up, or with AP_CLAMPED_SWIGLU
 * g * sigmoid(alpha * g) * (u + 1), where g is the gate clamped to at most the limit, and u is up
 * clamped to -limit .. limit; with AP_BOUNDED_SWIGLU min(silu(gate), limit) * u. Without a gate the
 * middle is act(up). */
typedef struct {
    int32_t activation; /* ap_activation */
    float limit;        /* of AP_CLAMPED_SWIGLU and AP_BOUNDED_SWIGLU */
    float alpha;        /* of AP_CLAMPED_SWIGLU */
} ap_gating;

typedef struct {
    int32_t rotary_dim;       /* even; element i pairs with i + rotary_dim / 2 */
    float amplitude;          /* multiplies cosine and sine */
    const float *frequencies; /* (rotary_dim / 2,), radians per position */
    /* queries are multiplied by
     * 1 + query_beta * log(1 + floor((position + query_shift) / original_context)) */
    float query_beta; /* 0: no factor */
    int32_t original_context;
    int32_t query_shift;
    int32_t reserved;
    const int32_t *axes; /* (rotary_dim / 2,), which of ap_batch's axes each frequency rotates by;
                          * NULL: none, but by the row's position */
} ap_rope;

/* Gates, which the last linear of the input computes; their sigmoid multiplies heads' outputs. */
typedef enum {
    AP_GATE_NONE = 0,
    AP_GATE_ELEMENTS = 1, /* a gate for each element */
    AP_GATE_HEADS = 2,    /* a gate for each whole head */
} ap_output_gate;

/* The numbers that a norm of queries or keys covers, and when it is applied. */
typedef enum {
    AP_NORM_EACH = 0,    /* each head, before RoPE */
    AP_NORM_ALL = 1,     /* all heads of a token, before RoPE */
    AP_NORM_ROTATED = 2, /* each head, after RoPE */
} ap_head_norms;

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;    /* a multiple of 16, at most 512 */
    int32_t window;      /* a query sees this many latest positions, its own included; 0: all */
    int32_t chunk;       /* a query sees its chunk of this many positions, up to its own; 0: all */
    float scale;         /* multiplies q . k */
    float softcap;       /* scores become cap * tanh(scores / cap); 0: none */
    int32_t rope;        /* index into ap_model.ropes */
    int32_t num_qkv;     /* 1 to 4 linears, whose outputs are concatenated */
    int32_t output_gate; /* ap_output_gate */
    ap_linear qkv[4];    /* hidden -> query heads, key heads, value heads, gates */
    ap_linear output;    /* query heads -> hidden */
    ap_norm query_norm;  /* as head_norms says */
    ap_norm key_norm;
    ap_norm value_norm;  /* of each head */
    const float *sinks;  /* (num_heads,), a score without a value in each softmax, or NULL */
    int32_t only_reads;  /* 1: another layer writes its cache; qkv has only query heads */
    int32_t keys_are_values; /* 1: values are the keys before norm and RoPE; qkv has no values */
    int32_t looks_ahead; /* 1: a query sees as many positions after its own, too; not if sealed */
    int32_t head_norms;  /* ap_head_norms */
    int32_t sees_picture; /* 1: a row sees as many tokens as ap_batch.sees says */
    int32_t reserved;
} ap_attention;

#include "mixers.h"
#include "routed.h"

/* The token's own addition to the stream at the end of a layer:
 * norm(up(act(gate(stream)) * input)), where the input is the layer's part of ap_token_inputs. */
typedef struct {
    ap_linear gate; /* hidden -> width; codes NULL: none */
    ap_linear up;   /* width -> hidden */
    ap_norm norm;
} ap_token_input;

/* The inputs of all layers, (num_layers, width) of a row:
 * (norm(projection(x) * projection_scale) + embedding * embedding_scale) * scale. */
typedef struct {
    int32_t width;        /* of one layer; 0: none */
    int32_t activation;   /* ap_activation of the layers' gates */
    ap_linear embedding;  /* (vocab_size, num_layers * width) */
    ap_linear projection; /* hidden -> num_layers * width */
    ap_norm norm;         /* of a layer's part */
    float embedding_scale;
    float projection_scale;
    float scale;
    int32_t reserved;
} ap_token_inputs;

typedef struct {
    ap_attention attention; /* unused with another mixer; num_qkv 0: none */
    const ap_latent *latent;           /* of latent attention, or NULL */
    const ap_short_conv *short_conv;   /* the mixer instead of attention, or NULL */
    const ap_gated_delta *gated_delta; /* the same */
    const ap_mamba2 *mamba2;           /* the same */
    const ap_experts *experts; /* NULL: none */
    /* the MLP of all rows; with experts, the shared expert; codes NULL: none */
    ap_linear gate; /* in an MLP without a gate the weight of up, and up has no codes */
    ap_linear up;
    ap_linear down;
    ap_gating gating;         /* of that MLP */
    ap_gating expert_gating;  /* of the experts */
    int32_t cache_layer; /* of attention, index into ap_cache.layers */
    ap_norm mixer_norm;
    ap_norm mixer_post_norm;
    ap_norm mlp_norm;
    ap_norm mlp_post_norm;
    ap_token_input token_input;
    float output_scale; /* multiplies the stream at the end of the layer; 0: no factor */
    int32_t is_parallel; /* 1: the MLP reads the stream before the mixer; no post norms */
    int32_t mixer_is_part; /* 1: its output is this rank's part of a sum */
    int32_t mlp_is_part;   /* the same */
} ap_layer;

/* The start of a drafting head, from two halves of a row: norm(embedding) and norm(given). Its
 * stream is a linear of both; without one it is `given`, and the first layer's attention reads both
 * halves instead of the normed stream. */
typedef struct {
    ap_norm token_norm; /* weight NULL: not a drafting head; the stream is the embedding */
    ap_norm hidden_norm;
    ap_linear linear;         /* 2 * hidden -> hidden; codes NULL: none */
    int32_t stream_is_normed; /* without a linear: 1: the stream is norm(given) */
    int32_t reserved;
} ap_join;

typedef struct {
    int32_t hidden_size;
    int32_t vocab_size; /* of the logits; a drafting head may read more tokens */
    int32_t num_layers;
    int32_t num_ropes;
    const ap_layer *layers;
    const ap_rope *ropes;
    ap_norm final_norm;
    ap_linear embedding; /* (vocab_size, hidden_size); may be the head's own tiles */
    ap_linear head;      /* codes NULL, in either: another process has it and the layers beyond */
    float embedding_scale;
    float logit_scale;   /* multiplies the logits */
    float logit_softcap; /* 0: none */
    ap_token_inputs token_inputs;
    ap_linear positions;   /* (positions, hidden_size), added to embeddings; codes NULL: none */
    /* A rank has the rows of embedding and head from its first token on. */
    const int32_t *first_tokens; /* (ranks + 1,), first_token of each rank, then vocab_size */
    int32_t first_token;
    int32_t widest_vocab; /* of all ranks */
    int32_t norms_replace; /* 1: the normed stream replaces the stream; 2: only for the embedding */
    ap_join join;          /* of a drafting head */
} ap_model;

/* The places of a layer that an adapter may change. A place is the linears of one input, with their
 * outputs concatenated: those of the mixer's input linears in order; those of gate, then of up. */
typedef enum { AP_INTO_MIXER, AP_OUT_OF_MIXER, AP_INTO_MLP, AP_OUT_OF_MLP, AP_NUM_PLACES } ap_place;

/* A part of a place's outputs, and the shrunk numbers that it is expanded from. */
typedef struct {
    ap_linear linear;     /* ranks -> outputs, of a float format; with AP_SCALES_NONE 16 ranks */
    int32_t first_output; /* a multiple of 16 from the first output of each linear */
    int32_t first_rank;   /* with AP_SCALES_NONE a multiple of 16 */
} ap_expansion;

/* Added to a place's outputs: expand(scales * shrink(x)). All of its linears are of one float
 * format, or where `ap_quantized_at` allows it AP_INT8 with AP_SCALES_NONE. */
typedef struct {
    ap_linear shrink;    /* inputs -> ranks of all parts; codes NULL: none */
    const float *scales; /* (ranks,) */
    const ap_expansion *expansions;
    int32_t num_expansions;
} ap_low_rank;

typedef struct {
    const ap_low_rank *places; /* (num_layers, AP_NUM_PLACES) */
    int32_t most_ranks;        /* of one place */
} ap_adapter;

/* The KV cache: one arena of consecutive blocks; a block holds its tokens in all layers.
 *
 * Block b begins at base + b * block_bytes, and layer l lies in it at layers[l].offset, as
 * (num_kv_heads, block_size / 16) pages of ap_page_bytes each. A page holds the keys and values of
 * 16 tokens of one head; page.h says how.
 *
 * Blocks of a sealed layer (AP_SEALED, AP_K8V4) are made when all their tokens are known. Until
 * then the tokens are AP_INT8 in an open block of a second arena, laid out in the same way: open
 * block i begins at open_base + i * open_bytes, layer l in it at layers[l].open_offset.
 */
typedef struct {
    int64_t offset;           /* bytes, a multiple of 64 */
    int64_t open_offset;      /* the same in open blocks */
    const float *head_scales; /* AP_FP8: (2, num_kv_heads), of keys and of values */
    const float *key_mean;    /* (num_kv_heads, head_dim), subtracted from all keys, or NULL */
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
    int32_t num_states;
    uint8_t *states;     /* state slots, 64-byte aligned; NULL without recurrent layers */
    int64_t state_bytes; /* of a slot, a multiple of 64 */
    int32_t state_format; /* of its numbers: AP_F32, AP_F16 or AP_BF16 */
    int32_t reserved;
} ap_cache;

/* One step's rows: sequence i owns rows query_start[i] .. query_start[i + 1] - 1, the last of its
 * context_lens[i] tokens.
 *
 * With sealed layers all rows of a sequence lie in one block. They read that block's tokens from
 * its open block, and all earlier blocks in the sealed form. So a longer chunk is passed as several
 * sequences, one for each block. The step seals the blocks that it fills.
 *
 * With recurrent layers a sequence continues from the state in its slot, or from zeros if its first
 * row has position 0, and writes back the state after its last row, rounded only then. Consecutive
 * sequences of the same slot are one sequence; otherwise no two sequences share a slot. */
typedef struct {
    int32_t num_tokens;
    int32_t num_seqs;
    int32_t table_width; /* entries in a row of block_tables */
    int32_t num_rows;    /* rows that yield logits, at most num_tokens */
    const int64_t *token_ids;    /* (num_tokens,) */
    const int64_t *positions;    /* (num_tokens,) */
    const int64_t *slot_mapping; /* (num_tokens,), block * block_size + offset */
    const int32_t *query_start;  /* (num_seqs + 1,) */
    const int32_t *context_lens; /* (num_seqs,), this step's rows included */
    const int32_t *block_tables; /* (num_seqs, table_width) */
    const int64_t *rows;         /* (num_rows,); NULL: all rows, in order */
    const int32_t *open_blocks;  /* (num_seqs,), of the rows' block; with sealed layers */
    const int32_t *state_slots;  /* (num_seqs,); with recurrent layers */
    const int32_t *adapter_slots; /* (num_seqs,), index into adapters, negative: none; or NULL */
    const ap_adapter *adapters;   /* (num_adapters,) */
    int32_t num_adapters;
    const float *given; /* (num_tokens, hidden_size), input of a join beside the embedding, or the
                         * stream before the first layer of a part without an embedding */
    float *streams;     /* (num_rows, hidden_size), the stream before the last norm, or after the
                         * last layer of a part without a head; or NULL */
    const int32_t *recorded_layers; /* (num_recorded,), the stream is recorded before each */
    float *recorded;                /* (num_tokens, num_recorded, hidden_size) */
    int32_t num_recorded;
    int32_t num_embeddings;
    /* Rows whose embedding is not that of a token. */
    const int32_t *sources;  /* (num_tokens,), place in embeddings, negative: looked up; or NULL */
    const float *embeddings; /* (num_embeddings, hidden_size), not to be scaled */
    const float *addends;    /* (num_addends, num_embeddings, hidden_size), of the stream after each
                              * of the first layers */
    int32_t num_addends;     /* less than the model's layers */
    int32_t reserved;
    const int64_t *axes; /* (3, num_tokens), positions in time, height and width; NULL: each row's
                          * position is all three */
    const int32_t *sees; /* (num_tokens,), leading tokens of its sequence that a row sees in layers
                          * with sees_picture, never fewer than for the row before; NULL: those up
                          * to its own. With open_blocks, tokens behind a sequence's block belong to
                          * the next sequences, which go on with its tokens */
} ap_batch;

/* The sampling parameters of each row, arrays of num_rows. */
typedef struct {
    const float *temperature; /* below 1e-5: greedy */
    const int64_t *top_k;     /* 0 keeps all */
    const float *top_p;
    const float *min_p;
    const double *uniform;    /* [0, 1) */
} ap_sampling;

typedef struct ap_engine ap_engine; /* threads and workspace */
typedef struct ap_group ap_group;   /* this process among the ranks of a model */

/* ---- library ---- */
int32_t ap_abi(void);                 /* AP_ABI of the library */
const char *ap_build_version(void);   /* version of the package that it was built for */
int64_t ap_struct_bytes(const char *name); /* sizeof, -1 for an unknown name */
int32_t ap_isa_supported(int32_t isa); /* 1: built in, and this CPU has it */
int32_t ap_use_isa(int32_t isa);      /* for all later calls; or AP_UNSUPPORTED_ISA */
int32_t ap_current_isa(void);         /* before ap_use_isa: the best supported one */

/* ---- engine ---- */
/* threads >= 1, the caller's included. A step that would need a larger workspace than
 * max_workspace_bytes (0: no limit), or more than the system gives, returns AP_NO_MEMORY. */
ap_engine *ap_engine_create(int32_t threads, int64_t max_workspace_bytes); /* NULL: no memory */
void ap_engine_destroy(ap_engine *engine);
int64_t ap_workspace_bytes(const ap_engine *engine);
/* Let `ap_step` add to *progress a few times per layer, so that a watcher can tell a long step from
 * one that hangs; NULL stops it. */
void ap_engine_watch(ap_engine *engine, uint64_t *progress);

/* ---- ranks ----
 * Each rank is a process with a part of the model: some heads, some of its MLPs' middle, and some
 * of its vocabulary.
 * All run the same steps; see group.h. Rank 0 leads: it waits for the others, writes the next
 * order, and meets them. */
int64_t ap_group_bytes(int32_t size, int64_t floats); /* of shared memory; -1: invalid */
/* memory: zeroed, shared by all ranks. floats: the size of a slot. processes (size,): descriptors
 * that become readable when their rank ends, negative for ranks that are not watched; or NULL. */
ap_group *ap_group_create(void *memory, int32_t rank, int32_t size, int64_t floats,
                          const int32_t *processes);
void ap_group_destroy(ap_group *group);
int32_t ap_group_await(ap_group *group); /* wait until the others reach the next meeting */
int32_t ap_group_meet(ap_group *group);  /* reach it and wait for all */
int32_t ap_group_sum(ap_group *group, float *values, int64_t count); /* of all ranks, in place */
/* One exchange: meet, and return the worst status of all ranks. The others may then read what a
 * rank wrote to its slot, until the end of the next exchange. */
int32_t ap_group_exchange(ap_group *group, int32_t status);
/* A rank's slot in the current exchange, or in the one before. */
float *ap_group_slot(const ap_group *group, int32_t rank, int32_t is_before);
void ap_engine_join(ap_engine *engine, ap_group *group); /* for the engine's steps; NULL: leave */

/* ---- the whole step ----
 * hidden (num_rows, hidden_size): the input of the head, after the last norm; logits (num_rows,
 * vocab_size). Either may be NULL if it is not wanted. */
int32_t ap_step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                const ap_batch *batch, float *hidden, float *logits);

/* Check a step and reserve its workspace, so that `ap_step` does not run out of memory. */
int32_t ap_make_room(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                     const ap_batch *batch);

/* Logits (rows, vocab_size) of hidden states (rows, hidden_size) that a step gave. */
int32_t ap_head(ap_engine *engine, const ap_model *model, const float *hidden, int32_t rows,
                float *logits);

/* The first linear in an ap_place of a layer whose inputs a step quantizes, not rotated; or NULL.
 * Factors of adapters may be AP_INT8 there, with the input_order of this linear. */
const ap_linear *ap_quantized_at(const ap_model *model, int32_t layer, int32_t place);

/* Run the experts of one layer for a caller that computes the rest of the model elsewhere. It uses
 * the router's num_experts and top_k, gate, up and down. No row depends on the others. */
int32_t ap_run_experts(ap_engine *engine, const ap_experts *experts, const ap_gating *gating,
                       const ap_routed *routed);

/* Choose a token per row; logits (num_rows, vocab_size) are not changed.
 * tokens (num_rows,): the id, -1 if the row holds NaN or no finite value, -2 if it holds +inf. */
int32_t ap_sample(ap_engine *engine, const float *logits, int32_t num_rows, int32_t vocab_size,
                  const ap_sampling *sampling, int64_t *tokens);

/* Score a token per row: targets (num_rows,). chosen (num_rows,): its log probability; top_logprobs
 * and top_ids (num_rows, top): the likeliest tokens, likeliest first, equal ones by rising id. They
 * are NaN and 0 in a row that ap_sample would not choose from. */
int32_t ap_score(ap_engine *engine, const float *logits, int32_t num_rows, int32_t vocab_size,
                 const int64_t *targets, int32_t top, float *chosen, float *top_logprobs,
                 int64_t *top_ids);

/* Ban tokens in some rows of logits (..., vocab_size): a token becomes -inf if its bit in words
 * (num_masks, words_stride) is 0. Token 32 * w + i has bit i of word w. */
void ap_mask_logits(float *logits, int32_t vocab_size, int32_t num_masks, const int64_t *rows,
                    const uint32_t *words, int32_t words_stride);

/* ---- packing weights, sizing caches ---- */
/* Lay out row-major codes in tiles: writes the codes, scales and offsets of `linear`. The sources
 * are laid out as in PackedWeight: codes (out, in * bits / 8), of AP_INT2 and AP_INT3 4 bits each,
 * scales and offsets
 * (out, in / source_group) in source_scale_format. source_group is a multiple of linear->group.
 * Float formats: codes (out, in) elements of linear->format. Scales of AP_E8M0 are bytes in the
 * source, too. */
int32_t ap_linear_pack(ap_engine *engine, const ap_linear *linear, const void *codes,
                       const void *scales, const void *offsets, int32_t source_scale_format,
                       int32_t source_group);
/* The same for rows of a GGML type's blocks, as GGUF files store them: (out, in / inputs of a
 * block) blocks. The format, kind, scales and group of `linear` must be those of the type. */
int32_t ap_linear_pack_ggml(ap_engine *engine, const ap_linear *linear, int32_t type,
                            const void *blocks);
/* The same for symbols of a trellis, (blocks, in, 8 * bits) bytes: 64 symbols of a block's outputs,
 * the first in the lowest bits; scales (out,) float32. */
int32_t ap_linear_pack_trellis(ap_engine *engine, const ap_linear *linear, const uint8_t *symbols,
                               const float *scales);
/* Choose symbols of 2 to 5 bits for sequences x (count, 64), so that the values found (count, 64)
 * are near: the sum of squared errors, each times its weight (count, 64), is least. The values are
 * integers from -128 to 127. symbols (count, 64): one in a byte. */
int32_t ap_trellis_encode(ap_engine *engine, int32_t bits, const float *x, const float *weights,
                          int32_t count, uint8_t *symbols, float *found);
int64_t ap_page_bytes(int32_t format, int32_t head_dim); /* multiple of 64; -1: unsupported */
#define AP_SUMMED (1 << 20) /* bytes of one sum */
#define AP_SUM_STEP 64
/* Write a sum of each AP_SUMMED bytes of memory, and one of the rest. It tells damage, not attack.
 * nbytes: multiple of AP_SUM_STEP. Runs on the caller's thread alone. */
int32_t ap_sums(const void *data, int64_t nbytes, uint64_t *sums);

#pragma GCC visibility pop

#endif
