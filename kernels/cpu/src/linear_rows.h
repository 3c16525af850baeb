/* Single outputs of a weight as floats: the rows of an embedding. */
#ifndef AP_LINEAR_ROWS_H
#define AP_LINEAR_ROWS_H

#include "half.h"
#include "linear_layout.h"

static float element_at(const void *elements, int64_t index, int32_t format) {
    if (format == AP_F32) return ((const float *)elements)[index];
    uint16_t bits = ((const uint16_t *)elements)[index];
    return format == AP_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

/* the code of input k, where codes is that of input 0 in a tile; what it stands for in E2M1 */
static float code_at(const uint8_t *codes, int32_t k, int32_t format) {
    static const float twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    if (format == AP_INT8) return (float)codes[k / 4 * 64 + k % 4];
    uint8_t pair = codes[k / 8 * 64 + k % 4];
    int32_t code = k % 8 < 4 ? pair & 15 : pair >> 4;
    if (format == AP_INT4) return (float)code;
    return code < 8 ? twice[code] : -twice[code - 8];
}

static void integer_row(const ap_linear *w, int32_t tile, int32_t lane, float *out) {
    const uint8_t *codes = tile_codes(w, tile) + lane * 4;
    int64_t index = tile * tile_scales(w) + lane;
    for (int32_t first = 0; first < w->in_features; first += w->group, index += AP_LANES) {
        float scale = element_at(w->scales, index, w->scale_format);
        float offset = w->format == AP_INT4 ? 8.0f : w->format == AP_INT8 ? 128.0f : 0.0f;
        if (w->offset_kind != AP_CENTERED) offset = element_at(w->offsets, index, w->scale_format);
        for (int32_t k = first; k < first + w->group; k++) {
            float code = code_at(codes, k, w->format);
            bool additive = w->offset_kind == AP_ADDITIVE;
            int32_t input = w->input_order ? w->input_order[k] : k;
            out[input] = additive ? code * scale + offset : (code - offset) * scale;
        }
    }
}

/* output `index` of a weight: out (in_features,) */
static void linear_row(const ap_linear *linear, int64_t index, float *out) {
    int32_t tile = (int32_t)(index / AP_LANES), lane = index % AP_LANES;
    if (has_groups(linear)) {
        integer_row(linear, tile, lane, out);
        return;
    }
    const uint8_t *codes = tile_codes(linear, tile);
    for (int32_t k = 0; k < linear->in_features; k++)
        out[k] = element_at(codes, (int64_t)k * AP_LANES + lane, linear->format);
}

#endif
