/* Dequantizes single outputs of a weight: the rows of an embedding. */
#ifndef AP_LINEAR_ROWS_H
#define AP_LINEAR_ROWS_H

#include "half.h"
#include "linear_scales.h"
#include "trellis.h"

static float element_at(const void *elements, int64_t index, int32_t format) {
    if (format == AP_F32) return ((const float *)elements)[index];
    if (format == AP_E8M0) { /* a code is twice its value */
        uint32_t exponent = ((const uint8_t *)elements)[index];
        return 0.5f * from_bits(exponent ? exponent << 23 : E8M0_ZERO);
    }
    uint16_t bits = ((const uint16_t *)elements)[index];
    return format == AP_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

/* the code of input k, in E2M1 twice its value; `codes` begins at input 0 */
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
        bool scaled = w->scale_format != AP_SCALES_NONE;
        float scale = scaled ? element_at(w->scales, index, w->scale_format) : 1.0f;
        float offset = w->format == AP_E2M1 ? 0.0f : (float)middle_code(w->format);
        if (w->offset_kind != AP_CENTERED) offset = element_at(w->offsets, index, w->scale_format);
        for (int32_t k = first; k < first + w->group; k++) {
            float code = code_at(codes, k, w->format);
            bool additive = w->offset_kind == AP_ADDITIVE;
            int32_t input = w->input_order ? w->input_order[k] : k;
            out[input] = additive ? code * scale + offset : (code - offset) * scale;
        }
    }
}

/* the code of input k in planes, or the value that it names */
static float plane_code_at(const uint8_t *codes, int32_t k, int32_t format) {
    int32_t bits = format_bits(format), within = k % 16, byte = k % 4, code = 0, low = 0;
    codes += k / 32 * bits * 64;
    if (bits > 3) {
        uint8_t pair = codes[k % 32 / 8 * 64 + byte];
        code = k % 8 < 4 ? pair & 15 : pair >> 4;
        codes += 256;
        low = 4;
    }
    if (bits == 2 || bits == 3 || bits == 6) {
        code |= (codes[k % 32 / 16 * 64 + byte] >> within / 4 * 2 & 3) << low;
        codes += 128;
        low += 2;
    }
    if (bits % 2) code |= (codes[byte] >> k % 32 / 4 & 1) << low;
    return names_values(format) ? (float)code_values(format)[code] - 128.0f : (float)code;
}

static void plane_row(const ap_linear *w, int32_t tile, int32_t lane, float *out) {
    const uint8_t *codes = tile_codes(w, tile) + lane * 4;
    bool additive = w->offset_kind != AP_CENTERED;
    float middle = names_values(w->format) ? 0.0f : (float)middle_code(w->format);
    block_scales scales;
    for (int32_t k = 0; k < w->in_features; k++) {
        if (k % SUPERBLOCK == 0) load_block_scales(w, tile, k, &scales);
        int32_t g = k % SUPERBLOCK / w->group, input = w->input_order ? w->input_order[k] : k;
        float code = plane_code_at(codes, k, w->format), scale = scales.scale[g][lane];
        out[input] = additive ? code * scale + scales.offset[g][lane] : (code - middle) * scale;
    }
}

/* output `index` of a weight: out (in_features,) */
static void trellis_row(const ap_linear *w, int64_t index, float *out) {
    const int32_t bits = format_bits(w->format), within = (int32_t)(index % TRELLIS_BLOCK);
    const int32_t first_tile = (int32_t)(index / TRELLIS_BLOCK) * (TRELLIS_BLOCK / AP_LANES);
    const float scale = ((const float *)w->scales)[index];
    for (int32_t k = 0; k < w->in_features; k++) {
        uint32_t state = 0;
        for (int32_t i = 11 / bits; i >= 0; i--) {
            int32_t output = (within - i + TRELLIS_BLOCK) % TRELLIS_BLOCK;
            const uint8_t *codes = tile_codes(w, first_tile + output / AP_LANES);
            float code = plane_code_at(codes + output % AP_LANES * 4, k, w->format);
            state = (state << bits | (uint32_t)code) & (TRELLIS_STATES - 1);
        }
        out[k] = (float)trellis_value(bits, state) * scale;
    }
    for (int32_t k = 0; k < w->in_features; k += TRELLIS_BLOCK) {
        trellis_transform(out + k);
        trellis_change_signs(out + k);
    }
}

/* output `index` of a weight: out (in_features,) */
static void linear_row(const ap_linear *linear, int64_t index, float *out) {
    int32_t tile = (int32_t)(index / AP_LANES), lane = index % AP_LANES;
    if (is_trellis(linear)) {
        trellis_row(linear, index, out);
        return;
    }
    if (has_planes(linear)) {
        plane_row(linear, tile, lane, out);
        return;
    }
    if (has_groups(linear)) {
        integer_row(linear, tile, lane, out);
        return;
    }
    const uint8_t *codes = tile_codes(linear, tile);
    for (int32_t k = 0; k < linear->in_features; k++)
        out[k] = element_at(codes, (int64_t)k * AP_LANES + lane, linear->format);
}

#endif
