/* Scales and offsets of 256 inputs of a tile as floats, from the forms that GGML's types have.
 *
 * An integer of a few bits times a half is exact in a float, so that nothing is lost.
 */
#ifndef AP_LINEAR_SCALES_H
#define AP_LINEAR_SCALES_H

#include "linear_layout.h"
#include "vector.h"

#define MOST_GROUPS 16 /* of 16 inputs in a super-block */

typedef struct {
    float scale[MOST_GROUPS][AP_LANES];
    float offset[MOST_GROUPS][AP_LANES]; /* of additive kinds only */
} block_scales;

/* 16 lanes of integers from the bytes of a record, times their halves. The compiler makes vectors
 * of these loops. */
#define EACH_LANE for (int j = 0; j < AP_LANES; j++)
typedef const uint8_t (*record_rows)[AP_LANES];

static inline void scales_q2_k(record_rows rows, const float *d, const float *dmin, int g,
                               block_scales *out) {
    EACH_LANE out->scale[g][j] = d[j] * (float)(rows[g][j] & 15);
    EACH_LANE out->offset[g][j] = -dmin[j] * (float)(rows[g][j] >> 4);
}

static inline void scales_q3_k(record_rows rows, const float *d, int g, block_scales *out) {
    const uint8_t *low = rows[g % 8], *high = rows[8 + g % 4];
    int low_bits = g / 8 * 4, high_bits = g / 4 * 2;
    EACH_LANE {
        int scale = (low[j] >> low_bits & 15) | (high[j] >> high_bits & 3) << 4;
        out->scale[g][j] = d[j] * (float)(scale - 32);
    }
}

static inline void scales_q4_k(record_rows rows, const float *d, const float *dmin, int g,
                               block_scales *out) {
    const uint8_t *first = rows[g % 4], *second = rows[4 + g % 4], *third = rows[8 + g % 4];
    if (g < 4) {
        EACH_LANE out->scale[g][j] = d[j] * (float)(first[j] & 63);
        EACH_LANE out->offset[g][j] = -dmin[j] * (float)(second[j] & 63);
    } else {
        EACH_LANE out->scale[g][j] = d[j] * (float)((third[j] & 15) | first[j] >> 6 << 4);
        EACH_LANE out->offset[g][j] = -dmin[j] * (float)(third[j] >> 4 | second[j] >> 6 << 4);
    }
}

static inline void scales_iq4_xs(record_rows rows, const float *d, int g, block_scales *out) {
    const uint8_t *high = rows[g / 4], *low = rows[2 + g / 2];
    int high_bits = g % 4 * 2, low_bits = g % 2 * 4;
    EACH_LANE {
        int scale = (low[j] >> low_bits & 15) | (high[j] >> high_bits & 3) << 4;
        out->scale[g][j] = d[j] * (float)(scale - 32);
    }
}

static void scales_of_record(const ap_linear *w, const uint8_t *record, block_scales *out) {
    record_rows rows = (record_rows)record;
    bool additive = w->offset_kind == AP_ADDITIVE;
    int32_t halves = additive ? 2 : 1;
    int32_t integers = record_bytes(w->scale_format) - 2 * halves;
    float d[AP_LANES], dmin[AP_LANES];
    const uint16_t *half = (const uint16_t *)(record + integers * AP_LANES);
    vf_store(d, vf_load_half(half));
    if (additive) vf_store(dmin, vf_load_half(half + AP_LANES));
    switch (w->scale_format) {
        case AP_SCALES_Q2_K:
            for (int g = 0; g < 16; g++) scales_q2_k(rows, d, dmin, g, out);
            break;
        case AP_SCALES_Q3_K:
            for (int g = 0; g < 16; g++) scales_q3_k(rows, d, g, out);
            break;
        case AP_SCALES_Q4_K:
            for (int g = 0; g < 8; g++) scales_q4_k(rows, d, dmin, g, out);
            break;
        case AP_SCALES_Q6_K:
            for (int g = 0; g < 16; g++)
                EACH_LANE out->scale[g][j] = d[j] * (float)(int8_t)rows[g][j];
            break;
        case AP_SCALES_IQ4_XS:
            for (int g = 0; g < 8; g++) scales_iq4_xs(rows, d, g, out);
            break;
    }
}
#undef EACH_LANE

/* Those of at most 256 inputs from `first` on, a multiple of 256; not inlined, since it comes rarely
 * and every kernel has it. */
static __attribute__((noinline)) void load_block_scales(const ap_linear *w, int32_t tile,
                                                        int32_t first, block_scales *out) {
    if (record_bytes(w->scale_format)) {
        scales_of_record(w, tile_record(w, tile, first / SUPERBLOCK), out);
        return;
    }
    int32_t groups = smaller(w->in_features - first, SUPERBLOCK) / w->group;
    int64_t at = tile * tile_scales(w) + (int64_t)(first / w->group) * AP_LANES;
    for (int32_t g = 0; g < groups; g++, at += AP_LANES) {
        vf_store(out->scale[g], vf_load_half((const uint16_t *)w->scales + at));
        if (w->offset_kind == AP_ADDITIVE)
            vf_store(out->offset[g], vf_load_half((const uint16_t *)w->offsets + at));
    }
}

#endif
