/* The structs of a layer's experts; a part of appliance_cpu.h, which includes it. */
#ifndef AP_ROUTED_H
#define AP_ROUTED_H

/* The function of a router's logits: over all experts, of each alone, or over the chosen. */
typedef enum {
    AP_SOFTMAX = 0,
    AP_SIGMOID = 1,
    AP_SOFTMAX_OF_CHOSEN = 2, /* logits choose; weights are a softmax of the chosen */
} ap_scoring;

/* The rules by which a row chooses experts and their weights: see kernels/routing.py. */
typedef struct {
    int32_t num_experts;
    int32_t top_k;
    int32_t scoring;     /* ap_scoring */
    int32_t renormalize; /* weights are divided by their sum + epsilon */
    int32_t num_groups;
    int32_t top_groups;
    int32_t best_of_group; /* a group's score is the sum of its 1 or 2 best */
    float scale;
    float epsilon;
    const float *selection_bias; /* (num_experts,), or NULL */
    const float *expert_scale;   /* (num_experts,), multiplies the weights, or NULL */
} ap_router;

/* MLPs of equal shape; a row runs through those that it chooses. Experts whose weights lie on other
 * ranks add nothing here.
 *
 * With norms of their own, router and experts read the stream instead of the input of the layer's
 * MLP; the outputs of that MLP and of the experts are normed before they are added. */
typedef struct {
    ap_router router;
    ap_linear logits;      /* hidden -> num_experts, of a float format */
    ap_linear shared_gate; /* hidden -> 1, of a float format; codes NULL: none */
    int32_t first_expert;  /* the first one of this rank */
    int32_t num_here;      /* of num_experts */
    int32_t weighs_inputs; /* 1: weights multiply the experts' inputs, not their outputs */
    int32_t reserved;
    const ap_linear *gate; /* (num_here,); without gates this is up */
    const ap_linear *up;   /* NULL without gates */
    const ap_linear *down;
    ap_norm router_norm; /* of the stream; this and the next three: all or none */
    ap_norm input_norm;  /* of the stream, for the experts */
    ap_norm shared_norm; /* of the output of the layer's MLP */
    ap_norm output_norm; /* of the experts' output */
    /* hidden -> the experts' input, and their output -> hidden; codes NULL: both have the hidden
     * size. With these there are neither norms of their own nor a shared gate. */
    ap_linear into_latent;
    ap_linear out_of_latent;
} ap_experts;

/* Rows of a caller who has the rest of the model, and the experts that its router chose. */
typedef struct {
    int32_t rows;
    const float *hidden;  /* (rows, hidden_size) */
    const int64_t *ids;   /* (rows, top_k) */
    const float *weights; /* (rows, top_k), of the sum */
    float *out;           /* (rows, hidden_size), weighted sum of the chosen experts' outputs */
} ap_routed;

#endif
