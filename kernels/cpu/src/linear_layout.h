/* The layout of a weight's tiles, for packing and for every instruction set. */
#ifndef AP_LINEAR_LAYOUT_H
#define AP_LINEAR_LAYOUT_H

#include <stdbool.h>

#include "appliance_cpu.h"
#include "trellis.h"

static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

static inline bool has_groups(const ap_linear *w) {
    return w->format == AP_INT4 || w->format == AP_INT8 || w->format >= AP_E2M1;
}

/* true if codes are in planes, or their scales in records of super-blocks */
static inline bool has_planes(const ap_linear *w) {
    return w->format > AP_E2M1 || w->scale_format > AP_E8M0;
}

static inline int32_t num_groups(const ap_linear *w) { return w->in_features / w->group; }

static inline int32_t num_tiles(const ap_linear *w) {
    return (w->out_features + AP_LANES - 1) / AP_LANES;
}

/* outputs of a tile that exist; the last one may have fewer than 16 */
static inline int32_t outputs_of(const ap_linear *w, int32_t tile) {
    return smaller(w->out_features - tile * AP_LANES, AP_LANES);
}

static inline int32_t format_bits(int32_t format) {
    switch (format) {
        case AP_F32:
            return 32;
        case AP_F16:
        case AP_BF16:
            return 16;
        case AP_INT8:
            return 8;
        case AP_INT6:
            return 6;
        case AP_INT5:
            return 5;
        case AP_INT3:
        case AP_IQ2:
        case AP_IQ1:
            return 3;
        case AP_INT2:
            return 2;
        default:
            return 4;
    }
}

/* true if codes name values */
static inline bool names_values(int32_t format) { return format >= AP_IQ4; }

/* the code of weight 0 in a centered format */
static inline int32_t middle_code(int32_t format) { return 1 << (format_bits(format) - 1); }

#define SUPERBLOCK 256 /* inputs whose scales are one record */

/* bytes of one output in a record, halves included; 0 if the scales are not in records */
static inline int32_t record_bytes(int32_t scale_format) {
    switch (scale_format) {
        case AP_SCALES_Q2_K:
            return 16 + 4;
        case AP_SCALES_Q3_K:
            return 12 + 2;
        case AP_SCALES_Q4_K:
            return 12 + 4;
        case AP_SCALES_Q6_K:
            return 16 + 2;
        case AP_SCALES_IQ4_XS:
            return 6 + 2;
        case AP_SCALES_ODD_32:
            return 4 + 2;
        case AP_SCALES_ODD_16:
            return 8 + 2;
        default:
            return 0;
    }
}

static inline bool is_trellis(const ap_linear *w) { return w->scale_format == AP_SCALES_TRELLIS; }

static inline int32_t scale_bytes(int32_t scale_format) {
    return scale_format == AP_E8M0 ? 1 : scale_format == AP_F16 ? 2 : 4;
}

/* bytes of a tile's codes */
static inline int64_t tile_bytes(const ap_linear *w) {
    return (int64_t)w->in_features * AP_LANES * format_bits(w->format) / 8;
}

/* tiles whose codes are stored: sequences of a trellis go over four */
static inline int32_t stored_tiles(const ap_linear *w) {
    int32_t together = is_trellis(w) ? TRELLIS_BLOCK / AP_LANES : 1;
    return (num_tiles(w) + together - 1) / together * together;
}

/* elements of a tile's scales, or of its offsets */
static inline int64_t tile_scales(const ap_linear *w) { return (int64_t)num_groups(w) * AP_LANES; }

/* the scales of 256 inputs of a tile */
static inline const uint8_t *tile_record(const ap_linear *w, int32_t tile, int32_t superblock) {
    int64_t index = (int64_t)tile * (w->in_features / SUPERBLOCK) + superblock;
    return (const uint8_t *)w->scales + index * record_bytes(w->scale_format) * AP_LANES;
}

static inline const uint8_t *tile_codes(const ap_linear *w, int32_t tile) {
    return (const uint8_t *)w->codes + tile * tile_bytes(w);
}

/* store 32 codes, a byte each, of output j in a piece of a tile of planes; see ap_linear */
void put_piece(const uint8_t *codes, int32_t j, int32_t bits, uint8_t *out);

/* true if a weight with scales in records is one of the GGML types */
static inline bool superblock_supported(const ap_linear *w) {
    bool centered = w->offset_kind == AP_CENTERED, additive = w->offset_kind == AP_ADDITIVE;
    if (is_trellis(w))
        return (w->format == AP_INT4 || (w->format >= AP_INT2 && w->format <= AP_INT5)) &&
               centered && w->group == TRELLIS_BLOCK && w->in_features % TRELLIS_BLOCK == 0 &&
               !w->offsets && !w->input_order;
    if (w->in_features % SUPERBLOCK || w->offsets) return false;
    switch (w->scale_format) {
        case AP_SCALES_Q2_K:
            return w->format == AP_INT2 && w->group == 16 && additive;
        case AP_SCALES_Q3_K:
            return w->format == AP_INT3 && w->group == 16 && centered;
        case AP_SCALES_Q4_K:
            return (w->format == AP_INT4 || w->format == AP_INT5) && w->group == 32 && additive;
        case AP_SCALES_Q6_K:
            return w->format == AP_INT6 && w->group == 16 && centered;
        case AP_SCALES_IQ4_XS:
            return w->format == AP_IQ4 && w->group == 32 && centered;
        case AP_SCALES_ODD_32:
            return w->format > AP_IQ4 && w->group == 32 && centered;
        case AP_SCALES_ODD_16:
            return (w->format == AP_IQ2 || w->format == AP_IQ1) && w->group == 16 && centered;
        default:
            return false;
    }
}

/* true if the kernels can multiply by this weight */
static inline bool linear_supported(const ap_linear *w) {
    if (w->in_features < 1 || w->out_features < 1 || !w->codes) return false;
    if (w->format == AP_F32 || w->format == AP_F16 || w->format == AP_BF16) return true;
    if (!has_groups(w) || w->format > AP_IQ1) return false;
    if (w->scale_format == AP_SCALES_NONE)
        return w->format == AP_INT8 && w->offset_kind == AP_CENTERED && w->group == AP_LANES &&
               w->in_features % AP_LANES == 0;
    if (!w->scales) return false;
    if (w->scale_format > AP_E8M0) return superblock_supported(w);
    if (w->group != 32 && w->group != 64 && w->group != 128 &&
        (w->group != 16 || w->format != AP_E2M1))
        return false;
    if (w->in_features % w->group) return false;
    if (w->scale_format == AP_E8M0) return w->format == AP_E2M1 && w->offset_kind == AP_CENTERED;
    if (w->scale_format != AP_F16 && w->scale_format != AP_F32) return false;
    if (w->format > AP_IQ4) return false;
    bool of_folders = w->format == AP_INT2 || w->format == AP_INT3;
    if (has_planes(w) && (w->scale_format != AP_F16 || w->group != 32) && !of_folders) return false;
    if (w->offset_kind == AP_CENTERED) return true;
    if (w->format == AP_E2M1 || names_values(w->format)) return false;
    if (has_planes(w) && w->offset_kind == AP_ZERO_POINT && !of_folders) return false;
    return (w->offset_kind == AP_ADDITIVE || w->offset_kind == AP_ZERO_POINT) && w->offsets;
}

#endif
