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

static void pack_codes(const packing *p, int32_t tile) {
    const ap_linear *w = p->w;
    int32_t width = w->in_features, count = outputs_of(w, tile);
    int32_t bits = format_bits(w->format);
    int64_t row_bytes = (int64_t)width * (bits < 4 ? 4 : bits) / 8;
    const uint8_t *source = p->codes + (int64_t)tile * AP_LANES * row_bytes;
    uint8_t *out = (uint8_t *)w->codes + tile * tile_bytes(w);
    if (count < AP_LANES || bits < 4) memset(out, 0, (size_t)tile_bytes(w));
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
                out[4 * j] = (uint8_t)((eight[0] & 15) | eight[2] << 4);
                out[4 * j + 1] = (uint8_t)(eight[0] >> 4 | (eight[2] & 0xf0));
                out[4 * j + 2] = (uint8_t)((eight[1] & 15) | eight[3] << 4);
                out[4 * j + 3] = (uint8_t)(eight[1] >> 4 | (eight[3] & 0xf0));
            }
        return;
    }
    /* 8 bits: four inputs at a time; floats: one */
    int32_t piece = bits == 8 ? 4 : bits / 8;
    for (int64_t k = 0; k < row_bytes; k += piece, out += AP_LANES * piece)
        for (int32_t j = 0; j < count; j++)
            memcpy(out + j * piece, source + j * row_bytes + k, (size_t)piece);
}

static float source_scale(const void *scales, int64_t index, int32_t format) {
    if (format == AP_F32) return ((const float *)scales)[index];
    uint16_t half = ((const uint16_t *)scales)[index];
    return format == AP_F16 ? half_to_float(half) : bfloat_to_float(half);
}

static void pack_scales(const packing *p, int32_t tile, const void *source, const void *scales) {
    const ap_linear *w = p->w;
    int32_t count = outputs_of(w, tile), source_groups = w->in_features / p->source_group;
    int64_t at = tile * tile_scales(w);
    for (int32_t g = 0; g < num_groups(w); g++)
        for (int32_t j = 0; j < AP_LANES; j++, at++) {
            int64_t output = (int64_t)tile * AP_LANES + j;
            int64_t index = output * source_groups + (int64_t)g * w->group / p->source_group;
            if (w->scale_format == AP_E8M0) {
                ((uint8_t *)scales)[at] = j < count ? ((const uint8_t *)source)[index] : 0;
                continue;
            }
            float value = j < count ? source_scale(source, index, p->source_format) : 0.0f;
            if (w->scale_format == AP_F32)
                ((float *)scales)[at] = value;
            else
                ((uint16_t *)scales)[at] = float_to_half(value);
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
