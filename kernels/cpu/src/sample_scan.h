/* Scans of a whole row of logits for sampling: maximum, masses, thresholds; all in vectors.
 *
 * A row is scanned in blocks, whose maxima tell later scans which blocks to skip.
 */
#ifndef AP_SAMPLE_SCAN_H
#define AP_SAMPLE_SCAN_H

#include <float.h>

#include "pointwise.h"

#define SCAN_BLOCK 256 /* logits */

static int32_t scan_blocks(int32_t count) { return (count + SCAN_BLOCK - 1) / SCAN_BLOCK; }

static int32_t scan_block_size(int32_t count, int32_t block) {
    int32_t left = count - block * SCAN_BLOCK;
    return left < SCAN_BLOCK ? left : SCAN_BLOCK;
}

/* The next 16 logits, or as many as are left; the other lanes are banned. */
INLINE vfloat next_logits(const float *logits, int32_t left) {
    if (left >= AP_LANES) return vf_load(logits);
    return vf_first(left, vf_load_first(logits, left), vf_set(-INFINITY));
}

/* ---- the maximum ---- */

INLINE float block_maximum(const float *logits, int32_t count, bool *has_nan) {
    vfloat lowest = vf_set(-INFINITY);
    vfloat best[4] = {lowest, lowest, lowest, lowest};
    uint32_t numbers = 0xffff;
    int32_t i = 0;
    for (; i + 4 * AP_LANES <= count; i += 4 * AP_LANES)
        for (int j = 0; j < 4; j++) {
            vfloat a = vf_load(logits + i + j * AP_LANES);
            numbers &= vf_at_least(a, lowest);
            best[j] = vf_max(best[j], a);
        }
    for (; i < count; i += AP_LANES) {
        vfloat a = next_logits(logits + i, count - i);
        numbers &= vf_at_least(a, lowest);
        best[0] = vf_max(best[0], a);
    }
    *has_nan |= numbers != 0xffff;
    return vf_highest(vf_max(vf_max(best[0], best[1]), vf_max(best[2], best[3])));
}

/* The first of `count` values that is at least `value`, -1 if none is. */
static int32_t first_at_least(const float *values, int32_t count, float value) {
    for (int32_t i = 0; i < count; i += AP_LANES) {
        uint32_t hits = vf_at_least(next_logits(values + i, count - i), vf_set(value));
        if (hits) return i + __builtin_ctz(hits);
    }
    return -1;
}

/* The first token of the highest logit, or for a row without one the code that ap_sample returns.
 * Writes the maximum of each block, unless maxima is NULL. */
static int32_t likeliest_token(const float *logits, int32_t vocab_size, float *maxima) {
    float highest = -INFINITY;
    int32_t best_block = 0;
    bool has_nan = false;
    for (int32_t b = 0; b < scan_blocks(vocab_size); b++) {
        float maximum =
            block_maximum(logits + b * SCAN_BLOCK, scan_block_size(vocab_size, b), &has_nan);
        if (maxima) maxima[b] = maximum;
        if (maximum > highest) {
            highest = maximum;
            best_block = b;
        }
    }
    if (has_nan || highest == -INFINITY) return -1;
    if (highest == INFINITY) return -2;
    int32_t begin = best_block * SCAN_BLOCK;
    return begin + first_at_least(logits + begin, vocab_size - begin, highest);
}

/* ---- weights ---- */

/* A logit's weight: e^((logit - highest) / temperature), 0 below `lowest`. */
typedef struct {
    float highest;
    float inverse_temperature;
    float lowest;
} weight_curve;

INLINE vfloat weights_of(vfloat logits, weight_curve curve) {
    vfloat distance = vf_sub(logits, vf_set(curve.highest));
    vfloat weights = vf_exp(vf_mul(distance, vf_set(curve.inverse_temperature)));
    return vf_choose(logits, vf_set(curve.lowest), weights, vf_zero());
}

static void weigh(const float *logits, int32_t count, weight_curve curve, float *weights) {
    for (int32_t i = 0; i < count; i += AP_LANES) {
        vfloat w = weights_of(next_logits(logits + i, count - i), curve);
        store_next(weights + i, w, count - i);
    }
}

INLINE float block_mass(const float *logits, int32_t count, weight_curve curve) {
    vfloat sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 4 * AP_LANES <= count; i += 4 * AP_LANES)
        for (int j = 0; j < 4; j++)
            sums[j] = vf_add(sums[j], weights_of(vf_load(logits + i + j * AP_LANES), curve));
    for (; i < count; i += AP_LANES)
        sums[0] = vf_add(sums[0], weights_of(next_logits(logits + i, count - i), curve));
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

/* The mass of the row; writes that of each block. */
static double row_mass(const float *logits, int32_t vocab_size, const float *maxima,
                       weight_curve curve, float *masses) {
    double total = 0.0;
    for (int32_t b = 0; b < scan_blocks(vocab_size); b++) {
        masses[b] = 0.0f;
        if (maxima[b] >= curve.lowest)
            masses[b] = block_mass(logits + b * SCAN_BLOCK, scan_block_size(vocab_size, b), curve);
        total += masses[b];
    }
    return total;
}

/* ---- thresholds ---- */

/* Unsigned integers in the order of the floats. */
static uint32_t order_key(float x) {
    uint32_t bits;
    x += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static float order_value(uint32_t key) {
    uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The smallest finite float that is at least `bound`; -inf is a ban. */
static float float_at_least(double bound) {
    if (bound <= -(double)FLT_MAX) return -FLT_MAX;
    float x = (float)bound;
    return (double)x < bound ? nextafterf(x, INFINITY) : x;
}

typedef struct {
    int64_t count;
    double mass;
} share;

/* Count and mass of the values that are at least `threshold`; without weights each has mass 1. */
static share share_above(const float *values, const float *weights, int32_t count,
                         float threshold) {
    share above = {0, 0.0};
    vfloat thresholds = vf_set(threshold);
    for (int32_t b = 0; b < scan_blocks(count); b++) {
        vfloat sum = vf_zero(); /* of one block, so that float32 suffices */
        int32_t begin = b * SCAN_BLOCK, end = begin + scan_block_size(count, b);
        for (int32_t i = begin; i < end; i += AP_LANES) {
            vfloat a = next_logits(values + i, end - i);
            above.count += __builtin_popcount(vf_at_least(a, thresholds));
            if (weights)
                sum = vf_add(sum, vf_choose(a, thresholds, load_next(weights + i, end - i),
                                            vf_zero()));
        }
        above.mass += vf_sum(sum);
    }
    if (!weights) above.mass = (double)above.count;
    return above;
}

#define SPARE 24 /* surplus values, so few that a closer threshold does not pay */

/* Raise the threshold `low` by bisection until few values too many reach it; those that do still
 * have at least the `wanted` mass. */
static float raised_threshold(const float *values, const float *weights, int32_t count, float low,
                              float highest, double wanted) {
    uint32_t low_key = order_key(low), high_key = order_key(highest) + 1;
    int64_t above_low = count, above_high = 0;
    while (high_key - low_key > 1 && above_low - above_high > SPARE + above_high / 8) {
        uint32_t middle = low_key + (high_key - low_key) / 2;
        share above = share_above(values, weights, count, order_value(middle));
        if (above.mass >= wanted) {
            low_key = middle;
            above_low = above.count;
        } else {
            high_key = middle;
            above_high = above.count;
        }
    }
    return order_value(low_key);
}

#endif
