/* Packs row-major weights into tiles; see ap_linear. The same for every instruction set. */
#include <string.h>

#include "engine.h"
#include "half.h"
#include "linear_layout.h"

typedef struct {
    const ap_linear *w;
    const uint8_t *codes;
    const void *scales;
    const void *offsets;
    int32_t source_format; /* of scales and offsets */
    int32_t source_group;
} packing;

/* the nibbles of two bytes, each in a byte, the lower of a byte first */
static inline uint32_t bytes_of_nibbles(const uint8_t *two) {
    uint8_t bytes[4] = {two[0] & 15, two[0] >> 4, two[1] & 15, two[1] >> 4};
    uint32_t word;
    memcpy(&word, bytes, 4);
    return word;
}

static void pack_codes(const packing *p, int32_t tile) {
    const ap_linear *w = p->w;
    int32_t width = w->in_features, count = outputs_of(w, tile);
    int32_t bits = format_bits(w->format);
    int64_t row_bytes = (int64_t)width * (bits < 4 ? 4 : bits) / 8;
    const uint8_t *source = p->codes + (int64_t)tile * AP_LANES * row_bytes;
    uint8_t *out = (uint8_t *)w->codes + tile * tile_bytes(w);
    if (count < AP_LANES) memset(out, 0, (size_t)tile_bytes(w));
    if (bits < 4) {
        for (int32_t k = 0; k < row_bytes; k += 16, out += bits * 64)
            for (int32_t j = 0; j < count; j++) {
                uint8_t codes[32];
                for (int32_t i = 0; i < 32; i++)
                    codes[i] = source[j * row_bytes + k + i / 2] >> i % 2 * 4 & 15;
                put_piece(codes, j, bits, out);
            }
        return;
    }
    if (bits == 4) {
        for (int32_t k = 0; k < row_bytes; k += 4, out += 64)
            for (int32_t j = 0; j < count; j++) {
                const uint8_t *eight = source + j * row_bytes + k; /* inputs in pairs */
                uint32_t word = bytes_of_nibbles(eight) | bytes_of_nibbles(eight + 2) << 4;
                memcpy(out + 4 * j, &word, 4);
            }
        return;
    }
    if (bits == 16) {
        for (int64_t k = 0; k < row_bytes; k += 2, out += AP_LANES * 2)
            for (int32_t j = 0; j < count; j++) memcpy(out + j * 2, source + j * row_bytes + k, 2);
        return;
    }
    /* 8 bits: four inputs at a time; 32: one */
    for (int64_t k = 0; k < row_bytes; k += 4, out += AP_LANES * 4)
        for (int32_t j = 0; j < count; j++) memcpy(out + j * 4, source + j * row_bytes + k, 4);
}

static float source_scale(const void *scales, int64_t index, int32_t format) {
    if (format == AP_F32) return ((const float *)scales)[index];
    uint16_t half = ((const uint16_t *)scales)[index];
    return format == AP_F16 ? half_to_float(half) : bfloat_to_float(half);
}

static void pack_scales(const packing *p, int32_t tile, const void *source, const void *scales) {
    const ap_linear *w = p->w;
    int32_t count = outputs_of(w, tile), source_groups = w->in_features / p->source_group;
    bool same = w->scale_format == AP_F16 && p->source_format == AP_F16;
    int64_t at = tile * tile_scales(w);
    for (int32_t g = 0; g < num_groups(w); g++) {
        int64_t index = (int64_t)g * w->group / p->source_group;
        index += (int64_t)tile * AP_LANES * source_groups;
        for (int32_t j = 0; j < AP_LANES; j++, at++, index += source_groups) {
            if (w->scale_format == AP_E8M0) {
                ((uint8_t *)scales)[at] = j < count ? ((const uint8_t *)source)[index] : 0;
                continue;
            }
            if (same) {
                ((uint16_t *)scales)[at] = j < count ? ((const uint16_t *)source)[index] : 0;
                continue;
            }
            float value = j < count ? source_scale(source, index, p->source_format) : 0.0f;
            if (w->scale_format == AP_F32)
                ((float *)scales)[at] = value;
            else
                ((uint16_t *)scales)[at] = float_to_half(value);
        }
    }
}

static void pack_tile(void *context, int32_t tile, int32_t worker) {
    const packing *p = context;
    (void)worker;
    pack_codes(p, tile);
    if (!has_groups(p->w) || p->w->scale_format == AP_SCALES_NONE) return;
    pack_scales(p, tile, p->scales, p->w->scales);
    if (p->w->offset_kind != AP_CENTERED) pack_scales(p, tile, p->offsets, p->w->offsets);
}

int32_t ap_linear_pack(ap_engine *engine, const ap_linear *linear, const void *codes,
                       const void *scales, const void *offsets, int32_t source_scale_format,
                       int32_t source_group) {
    if (!linear_supported(linear) || !codes) return AP_BAD_ARGUMENT;
    bool of_folders = linear->format == AP_INT2 || linear->format == AP_INT3;
    if (has_planes(linear) && (!of_folders || linear->scale_format > AP_E8M0))
        return AP_BAD_ARGUMENT;
    if (has_groups(linear) && linear->scale_format != AP_SCALES_NONE) {
        if ((source_scale_format == AP_E8M0) != (linear->scale_format == AP_E8M0))
            return AP_BAD_ARGUMENT;
        if (source_scale_format != AP_E8M0 && source_scale_format != AP_F32 &&
            source_scale_format != AP_F16 && source_scale_format != AP_BF16)
            return AP_BAD_ARGUMENT;
        if (source_group < 1 || source_group % linear->group) return AP_BAD_ARGUMENT;
        if (linear->in_features % source_group || !scales) return AP_BAD_ARGUMENT;
        if (linear->offset_kind != AP_CENTERED && !offsets) return AP_BAD_ARGUMENT;
    }
    packing p = {linear, codes, scales, offsets, source_scale_format, source_group};
    ap_pool_run(engine->pool, pack_tile, &p, num_tiles(linear));
    return AP_OK;
}
