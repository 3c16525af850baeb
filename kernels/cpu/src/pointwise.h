/* Norms, rotary embedding, activations: one row at a time, any width. */
#ifndef AP_POINTWISE_H
#define AP_POINTWISE_H

#include "engine.h"
#include "vector.h"

/* Load the next 16 elements, or fewer at the end; other lanes are 0. */
INLINE vfloat load_next(const float *p, int32_t left) {
    return left >= AP_LANES ? vf_load(p) : vf_load_first(p, left);
}

INLINE void store_next(float *p, vfloat a, int32_t left) {
    if (left >= AP_LANES)
        vf_store(p, a);
    else
        vf_store_first(p, a, left);
}

/* ---- norms and the residual stream ---- */

static float sum_of_squares(const float *x, int32_t width) {
    /* four sums, as each addition waits for the one before it in its sum */
    vfloat sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 4 * AP_LANES <= width; i += 4 * AP_LANES)
        for (int j = 0; j < 4; j++) {
            vfloat a = vf_load(x + i + j * AP_LANES);
            sums[j] = vf_fma(a, a, sums[j]);
        }
    for (; i < width; i += AP_LANES) {
        vfloat a = load_next(x + i, width - i);
        sums[0] = vf_fma(a, a, sums[0]);
    }
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

/* x / sqrt(mean_square + eps) * weight; out may be x */
static void norm_row_by(const float *x, const ap_norm *norm, float mean_square, int32_t width,
                        float *out) {
    vfloat factor = vf_set(1.0f / sqrtf(mean_square + norm->eps));
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat normed = vf_mul(load_next(x + i, left), factor);
        store_next(out + i, vf_mul(normed, load_next(norm->weight + i, left)), left);
    }
}

/* x / sqrt(mean(x^2) + eps) * weight; out may be x */
static void rms_norm_row(const float *x, const ap_norm *norm, int32_t width, float *out) {
    norm_row_by(x, norm, sum_of_squares(x, width) / (float)width, width, out);
}

static float sum_of(const float *x, int32_t width) {
    vfloat sum = vf_zero();
    for (int32_t i = 0; i < width; i += AP_LANES) sum = vf_add(sum, load_next(x + i, width - i));
    return vf_sum(sum);
}

/* (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; out is not x */
static void layer_norm_row(const float *x, const ap_norm *norm, int32_t width, float *out) {
    vfloat mean = vf_set(sum_of(x, width) / (float)width);
    for (int32_t i = 0; i < width; i += AP_LANES)
        store_next(out + i, vf_sub(load_next(x + i, width - i), mean), width - i);
    float variance = sum_of_squares(out, width) / (float)width;
    vfloat factor = vf_set(1.0f / sqrtf(variance + norm->eps));
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat normed = vf_mul(load_next(out + i, left), factor);
        vfloat bias = load_next(norm->bias + i, left);
        store_next(out + i, vf_fma(normed, load_next(norm->weight + i, left), bias), left);
    }
}

/* stream += added */
static void add_row(float *stream, const float *added, int32_t width) {
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat sum = vf_add(load_next(stream + i, left), load_next(added + i, left));
        store_next(stream + i, sum, left);
    }
}

static void scale_row(float *x, float factor, int32_t width) {
    for (int32_t i = 0; i < width; i += AP_LANES)
        store_next(x + i, vf_mul(load_next(x + i, width - i), vf_set(factor)), width - i);
}

static void clip_row(float *x, float least, float most, int32_t width) {
    for (int32_t i = 0; i < width; i++) x[i] = fminf(fmaxf(x[i], least), most);
}

/* Clip outputs `first` to `last` - 1 of a linear, which begin at x. */
static void clip_outputs(float *x, const ap_linear *linear, int32_t first, int32_t last) {
    const float *least = linear->bounds + 2, *most = least + linear->out_features;
    for (int32_t i = first; i < last; i++)
        x[i - first] = fminf(fmaxf(x[i - first], least[i]), most[i]);
}

/* cap * tanh(x / cap) */
static void softcap_row(float *x, float cap, int32_t width) {
    vfloat caps = vf_set(cap);
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat share = vf_div(load_next(x + i, left), caps);
        store_next(x + i, vf_mul(vf_tanh(share), caps), left);
    }
}

/* ---- rotary embedding ---- */

/* Cosine and sine of one row, (rotary_dim / 2,) each. Its positions are one for each axis; without
 * axes, the first. */
static void rope_angles(const ap_rope *rope, const int64_t *positions, float *cosine, float *sine) {
    for (int32_t i = 0; i < rope->rotary_dim / 2; i++) {
        float angle = (float)positions[rope->axes ? rope->axes[i] : 0] * rope->frequencies[i];
        cosine[i] = cosf(angle) * rope->amplitude;
        sine[i] = sinf(angle) * rope->amplitude;
    }
}

/* The factor of a query at a position, besides the scale of all scores. */
static float query_scale(const ap_rope *rope, int64_t position) {
    int64_t periods = (position + rope->query_shift) / rope->original_context;
    return 1.0f + rope->query_beta * logf(1.0f + (float)periods);
}

/* Rotate element i with element i + rotary_dim / 2, in place; others stay. */
static void rotate_head(float *head, const float *cosine, const float *sine, int32_t rotary_dim) {
    int32_t half = rotary_dim / 2;
    for (int32_t i = 0; i < half; i += AP_LANES) {
        int32_t left = half - i;
        vfloat c = load_next(cosine + i, left), s = load_next(sine + i, left);
        vfloat a = load_next(head + i, left), b = load_next(head + half + i, left);
        store_next(head + i, vf_sub(vf_mul(a, c), vf_mul(b, s)), left);
        store_next(head + half + i, vf_add(vf_mul(b, c), vf_mul(a, s)), left);
    }
}

/* ---- activations ---- */

/* x times the normal distribution function at x. The share above |x| is a polynomial of
 * 1 / (1 + 0.3275911 z), z = |x| / sqrt(2), times e^(-z^2) / 2, to 1.5e-7 (Abramowitz and Stegun,
 * 7.1.26). */
INLINE vfloat gelu(vfloat x) {
    vfloat size = vf_max(vf_sub(vf_zero(), x), x); /* NaN stays NaN, as below */
    vfloat z = vf_mul(size, vf_set(0.70710678f)), one = vf_set(1.0f);
    vfloat t = vf_div(one, vf_fma(z, vf_set(0.3275911f), one));
    vfloat sum = vf_fma(t, vf_set(1.061405429f), vf_set(-1.453152027f));
    sum = vf_fma(sum, t, vf_set(1.421413741f));
    sum = vf_fma(sum, t, vf_set(-0.284496736f));
    sum = vf_mul(vf_fma(sum, t, vf_set(0.254829592f)), t);
    vfloat above = vf_mul(vf_mul(sum, vf_set(0.5f)), vf_exp(vf_sub(vf_zero(), vf_mul(z, z))));
    return vf_sub(vf_max(vf_zero(), x), vf_mul(size, above));
}

/* The last three are x * sigmoid(y): SiLU has y = x, and (1 + tanh(z)) / 2 is sigmoid(2z). */
INLINE vfloat activated(vfloat x, int32_t activation) {
    vfloat minus_y = vf_sub(vf_zero(), x);
    if (activation == AP_RELU_SQUARED || activation == AP_RELU) {
        vfloat above = vf_max(vf_zero(), x); /* NaN stays NaN: max gives its second argument */
        return activation == AP_RELU ? above : vf_mul(above, above);
    }
    if (activation == AP_GELU) return gelu(x);
    if (activation == AP_GELU_TANH) {
        /* -2 sqrt(2 / pi) * (x + 0.044715 x^3) */
        vfloat inner = vf_fma(vf_mul(x, x), vf_set(0.044715f), vf_set(1.0f));
        minus_y = vf_mul(vf_mul(x, inner), vf_set(-1.5957691216057308f));
    }
    if (activation == AP_QUICK_GELU) minus_y = vf_mul(x, vf_set(-1.702f));
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(minus_y)));
}

/* log(1 + e^x), bounded as torch bounds it */
static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* x *= sigmoid(gate) */
static void sigmoid_gate_row(float *x, const float *gate, int32_t width) {
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat down = vf_exp(vf_sub(vf_zero(), load_next(gate + i, left)));
        vfloat share = vf_div(load_next(x + i, left), vf_add(vf_set(1.0f), down));
        store_next(x + i, share, left);
    }
}

/* act(gate) * up; out may be either */
INLINE void gate_with(const float *gate, const float *up, int32_t activation, int32_t width,
                      float *out) {
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat a = activated(load_next(gate + i, left), activation);
        store_next(out + i, vf_mul(a, load_next(up + i, left)), left);
    }
}

/* NaN stays NaN: min and max give their second argument then. */
static void gate_clamped(const float *gate, const float *up, const ap_gating *gating,
                         int32_t width, float *out) {
    vfloat limit = vf_set(gating->limit), lowest = vf_set(-gating->limit);
    vfloat minus_alpha = vf_set(-gating->alpha), one = vf_set(1.0f);
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat g = vf_min(limit, load_next(gate + i, left));
        vfloat u = vf_max(lowest, vf_min(limit, load_next(up + i, left)));
        vfloat a = vf_div(g, vf_add(one, vf_exp(vf_mul(g, minus_alpha))));
        store_next(out + i, vf_mul(a, vf_add(u, one)), left);
    }
}

static void gate_bounded(const float *gate, const float *up, float bound, int32_t width,
                         float *out) {
    vfloat limit = vf_set(bound), lowest = vf_set(-bound);
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat a = vf_min(limit, activated(load_next(gate + i, left), AP_SILU));
        vfloat u = vf_max(lowest, vf_min(limit, load_next(up + i, left)));
        store_next(out + i, vf_mul(a, u), left);
    }
}

/* act(x); out may be x */
INLINE void activate_with(const float *x, int32_t activation, int32_t width, float *out) {
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        store_next(out + i, activated(load_next(x + i, left), activation), left);
    }
}

static void activated_row(const float *x, const ap_gating *gating, int32_t width, float *out) {
    if (gating->activation == AP_RELU_SQUARED)
        activate_with(x, AP_RELU_SQUARED, width, out);
    else if (gating->activation == AP_RELU)
        activate_with(x, AP_RELU, width, out);
    else if (gating->activation == AP_GELU)
        activate_with(x, AP_GELU, width, out);
    else if (gating->activation == AP_GELU_TANH)
        activate_with(x, AP_GELU_TANH, width, out);
    else if (gating->activation == AP_QUICK_GELU)
        activate_with(x, AP_QUICK_GELU, width, out);
    else
        activate_with(x, AP_SILU, width, out);
}

/* See ap_gating; out may be gate. Without a gate `up` is NULL and `gate` is activated. */
static void gated_row(const float *gate, const float *up, const ap_gating *gating, int32_t width,
                      float *out) {
    if (!up)
        activated_row(gate, gating, width, out);
    else if (gating->activation == AP_CLAMPED_SWIGLU)
        gate_clamped(gate, up, gating, width, out);
    else if (gating->activation == AP_BOUNDED_SWIGLU)
        gate_bounded(gate, up, gating->limit, width, out);
    else if (gating->activation == AP_RELU_SQUARED)
        gate_with(gate, up, AP_RELU_SQUARED, width, out);
    else if (gating->activation == AP_RELU)
        gate_with(gate, up, AP_RELU, width, out);
    else if (gating->activation == AP_GELU)
        gate_with(gate, up, AP_GELU, width, out);
    else if (gating->activation == AP_GELU_TANH)
        gate_with(gate, up, AP_GELU_TANH, width, out);
    else if (gating->activation == AP_QUICK_GELU)
        gate_with(gate, up, AP_QUICK_GELU, width, out);
    else
        gate_with(gate, up, AP_SILU, width, out);
}

#endif
