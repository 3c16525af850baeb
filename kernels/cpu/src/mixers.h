/* The structs of mixers other than plain attention; included by appliance_cpu.h. */
#ifndef AP_MIXERS_H
#define AP_MIXERS_H

#define AP_MOST_LATENT 1024

/* Multi-head latent attention, in addition to ap_attention. Its qkv has two linears: one yields
 * queries, the other tokens: a latent and a rotary key. Tokens are the cache's only KV head; its
 * keys and values, of head_dim each, are the two halves of a token. */
typedef struct {
    int32_t latent;        /* elements that make values */
    int32_t plain_dim;     /* of a query head, before the rotary ones */
    int32_t value_dim;     /* of a head */
    int32_t reserved;
    ap_norm query_norm;    /* of the input of `queries`; weight NULL: qkv yields queries */
    ap_linear queries;     /* -> query heads; codes NULL: the same */
    ap_norm norm;          /* of latents */
    const ap_linear *keys;   /* (num_heads,), of a float format: plain_dim -> latent */
    const ap_linear *values; /* (num_heads,), the same: latent -> value_dim */
} ap_latent;

#define AP_MOST_TAPS 16

/* Causal convolution of each channel over the latest positions. */
typedef struct {
    int32_t width;        /* channels */
    int32_t taps;         /* positions, the row's own included; from 2 to AP_MOST_TAPS */
    const float *filters; /* (taps, width); the last tap is for the row itself */
    const float *bias;    /* (width,), or NULL */
    int64_t state;        /* byte offset in a state slot of the latest inputs, (taps - 1, width) */
} ap_filters;

/* Gated short convolution: output(c * filters(b * x)). */
typedef struct {
    ap_filters filters;
    ap_linear input;  /* hidden -> b, c and x */
    ap_linear output; /* width -> hidden */
} ap_short_conv;

/* Gated DeltaNet: out(norm(S^T q) * silu(gate)), where S follows the gated delta rule. */
typedef struct {
    int32_t num_key_heads;
    int32_t num_value_heads; /* a multiple; adjacent ones share a key head */
    int32_t key_dim;         /* of a head, a multiple of 16 */
    int32_t value_dim;       /* the same */
    int32_t num_inputs;      /* 1 to 4 linears, whose outputs are concatenated */
    ap_filters filters;      /* of queries, keys and values */
    ap_linear inputs[4];     /* hidden -> queries, keys and values; gates; shares; decays */
    ap_linear output;        /* value heads -> hidden */
    ap_norm norm;            /* of each value head */
    const float *rates;      /* (num_value_heads,), decay = exp(-rate * softplus(x + bias)) */
    const float *decay_bias; /* (num_value_heads,) */
    int64_t state;           /* byte offset in a slot of (num_value_heads, key_dim, value_dim) */
} ap_gated_delta;

/* Mamba-2: out(norm((S^T q + skip * v) * silu(gate))), S = exp(-rate * step) S + k (step * v)^T,
 * where step = softplus(x + step_bias). Norms are of groups of heads. Ranks may divide the heads of
 * a group; they then sum the squares for its norm. */
typedef struct {
    int32_t num_heads;
    int32_t num_groups;  /* divides num_heads; adjacent heads share a group's key and query */
    int32_t head_dim;    /* a multiple of 16 */
    int32_t state_dim;   /* of a key, the same */
    int32_t split_groups; /* groups of all ranks, if ranks divide groups; 0: groups are whole */
    int32_t split_group; /* the group of which this rank has a part */
    int32_t split_width; /* values of a whole group */
    ap_filters filters;  /* of values, keys and queries */
    ap_linear input;     /* hidden -> gates; values, keys and queries; steps */
    ap_linear output;    /* heads -> hidden */
    ap_norm norm;        /* weight (num_heads * head_dim,) */
    const float *step_bias; /* (num_heads,), like the next two */
    const float *rates;
    const float *skip;
    int64_t state;       /* byte offset in a slot of (num_heads, state_dim, head_dim) */
} ap_mamba2;

#endif
