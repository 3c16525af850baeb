/* Converts scales and offsets of 256 inputs of a tile from the forms of GGML's types to floats.
 *
 * An integer of a few bits times a half is exact in a float, so nothing is lost.
 */
#ifndef AP_LINEAR_SCALES_H
#define AP_LINEAR_SCALES_H

#include "linear_layout.h"
#include "vector.h"

#define MOST_GROUPS 16 /* of 16 inputs in a super-block */

typedef struct {
    float scale[MOST_GROUPS][AP_LANES];
    float offset[MOST_GROUPS][AP_LANES]; /* not of AP_CENTERED; of zero points what they add */
} block_scales;

/* the values of codes, plus 128; NULL if they stand for themselves */
static inline const uint8_t *code_values(int32_t format) {
    return names_values(format) ? named_values[format - AP_IQ4] : NULL;
}

/* one row of a record's integers, 16 lanes */
typedef uint8_t lane_bytes __attribute__((vector_size(16)));

INLINE lane_bytes record_row(const uint8_t *record, int row) {
    lane_bytes r;
    memcpy(&r, record + row * AP_LANES, sizeof r);
    return r;
}
INLINE void put_scale(float *out, vfloat half, lane_bytes integers) {
    vf_store(out, vf_mul(half, vf_load_unsigned((const uint8_t *)&integers)));
}
INLINE void put_signed_scale(float *out, vfloat half, lane_bytes integers) {
    vf_store(out, vf_mul(half, vf_load_signed((const int8_t *)&integers)));
}

INLINE void scales_q2_k(const uint8_t *record, vfloat d, vfloat minus_dmin, block_scales *out) {
    for (int g = 0; g < 16; g++) {
        lane_bytes both = record_row(record, g);
        put_scale(out->scale[g], d, both & 15);
        put_scale(out->offset[g], minus_dmin, both >> 4);
    }
}

INLINE void scales_q3_k(const uint8_t *record, vfloat d, block_scales *out) {
    for (int i = 0; i < 4; i++) {
        lane_bytes high = record_row(record, 8 + i), one = record_row(record, i);
        lane_bytes two = record_row(record, 4 + i);
        put_signed_scale(out->scale[i], d, ((one & 15) | (high & 3) << 4) - 32);
        put_signed_scale(out->scale[4 + i], d, ((two & 15) | (high >> 2 & 3) << 4) - 32);
        put_signed_scale(out->scale[8 + i], d, (one >> 4 | (high >> 4 & 3) << 4) - 32);
        put_signed_scale(out->scale[12 + i], d, (two >> 4 | high >> 6 << 4) - 32);
    }
}

INLINE void scales_q4_k(const uint8_t *record, vfloat d, vfloat minus_dmin, block_scales *out) {
    for (int i = 0; i < 4; i++) {
        lane_bytes first = record_row(record, i), second = record_row(record, 4 + i);
        lane_bytes third = record_row(record, 8 + i);
        put_scale(out->scale[i], d, first & 63);
        put_scale(out->offset[i], minus_dmin, second & 63);
        put_scale(out->scale[4 + i], d, (third & 15) | first >> 6 << 4);
        put_scale(out->offset[4 + i], minus_dmin, third >> 4 | second >> 6 << 4);
    }
}

INLINE void scales_iq4_xs(const uint8_t *record, vfloat d, block_scales *out) {
    for (int i = 0; i < 4; i++) {
        lane_bytes low = record_row(record, 2 + i), high = record_row(record, i / 2) >> i % 2 * 4;
        put_signed_scale(out->scale[2 * i], d, ((low & 15) | (high & 3) << 4) - 32);
        put_signed_scale(out->scale[2 * i + 1], d, (low >> 4 | (high >> 2 & 3) << 4) - 32);
    }
}

INLINE void scales_odd(const uint8_t *record, vfloat d, int groups, block_scales *out) {
    vfloat eighth = vf_mul(d, vf_set(0.125f));
    for (int i = 0; i < groups / 2; i++) {
        lane_bytes both = record_row(record, i);
        put_scale(out->scale[2 * i], eighth, (both & 15) * 2 + 1);
        put_scale(out->scale[2 * i + 1], eighth, (both >> 4) * 2 + 1);
    }
}

static void scales_of_record(const ap_linear *w, const uint8_t *record, block_scales *out) {
    bool additive = w->offset_kind == AP_ADDITIVE;
    int32_t halves = additive ? 2 : 1;
    int32_t integers = record_bytes(w->scale_format) - 2 * halves;
    const uint16_t *half = (const uint16_t *)(record + integers * AP_LANES);
    vfloat d = vf_load_half(half), minus_dmin = vf_zero();
    if (additive) minus_dmin = vf_sub(vf_zero(), vf_load_half(half + AP_LANES));
    switch (w->scale_format) {
        case AP_SCALES_Q2_K:
            scales_q2_k(record, d, minus_dmin, out);
            break;
        case AP_SCALES_Q3_K:
            scales_q3_k(record, d, out);
            break;
        case AP_SCALES_Q4_K:
            scales_q4_k(record, d, minus_dmin, out);
            break;
        case AP_SCALES_Q6_K:
            for (int g = 0; g < 16; g++)
                put_signed_scale(out->scale[g], d, record_row(record, g));
            break;
        case AP_SCALES_IQ4_XS:
            scales_iq4_xs(record, d, out);
            break;
        case AP_SCALES_ODD_32:
        case AP_SCALES_ODD_16:
            scales_odd(record, d, SUPERBLOCK / w->group, out);
            break;
    }
}

INLINE vfloat load_factor(const ap_linear *w, const void *values, int64_t at) {
    return w->scale_format == AP_F16 ? vf_load_half((const uint16_t *)values + at)
                                     : vf_load((const float *)values + at);
}

/* Convert the scales and offsets of at most 256 inputs from `first` on, a multiple of 256. Not
 * inlined, as every kernel calls it. */
static __attribute__((noinline)) void load_block_scales(const ap_linear *w, int32_t tile,
                                                        int32_t first, block_scales *out) {
    if (record_bytes(w->scale_format)) {
        scales_of_record(w, tile_record(w, tile, first / SUPERBLOCK), out);
        return;
    }
    int32_t groups = smaller(w->in_features - first, SUPERBLOCK) / w->group;
    int64_t at = tile * tile_scales(w) + (int64_t)(first / w->group) * AP_LANES;
    for (int32_t g = 0; g < groups; g++, at += AP_LANES) {
        vf_store(out->scale[g], load_factor(w, w->scales, at));
        if (w->offset_kind == AP_CENTERED) continue;
        vfloat offset = load_factor(w, w->offsets, at);
        if (w->offset_kind == AP_ZERO_POINT)
            offset = vf_mul(vf_sub(vf_zero(), offset), vf_load(out->scale[g]));
        vf_store(out->offset[g], offset);
    }
}

#endif
