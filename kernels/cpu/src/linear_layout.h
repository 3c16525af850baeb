/* How a weight lies in its tiles: the same for packing and for every instruction set. */
#ifndef AP_LINEAR_LAYOUT_H
#define AP_LINEAR_LAYOUT_H

#include <stdbool.h>

#include "appliance_cpu.h"

static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

static inline bool has_groups(const ap_linear *w) {
    return w->format == AP_INT4 || w->format == AP_INT8 || w->format == AP_E2M1;
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
        default:
            return 4;
    }
}

/* bytes of a tile's codes */
static inline int64_t tile_bytes(const ap_linear *w) {
    return (int64_t)w->in_features * AP_LANES * format_bits(w->format) / 8;
}

/* elements of a tile's scales, or of its offsets */
static inline int64_t tile_scales(const ap_linear *w) { return (int64_t)num_groups(w) * AP_LANES; }

static inline const uint8_t *tile_codes(const ap_linear *w, int32_t tile) {
    return (const uint8_t *)w->codes + tile * tile_bytes(w);
}

/* whether the kernels can multiply by this weight */
static inline bool linear_supported(const ap_linear *w) {
    if (w->in_features < 1 || w->out_features < 1 || !w->codes) return false;
    if (w->format == AP_F32 || w->format == AP_F16 || w->format == AP_BF16) return true;
    if (!has_groups(w)) return false;
    if (w->group != 32 && w->group != 64 && w->group != 128 &&
        (w->group != 16 || w->format != AP_E2M1))
        return false;
    if (w->in_features % w->group || !w->scales) return false;
    if (w->scale_format != AP_F16 && w->scale_format != AP_F32) return false;
    if (w->offset_kind == AP_CENTERED) return true;
    if (w->format == AP_E2M1) return false;
    return (w->offset_kind == AP_ADDITIVE || w->offset_kind == AP_ZERO_POINT) && w->offsets;
}

#endif
