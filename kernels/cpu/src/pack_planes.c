/* Packs codes into tiles of planes, see ap_linear: of the blocks of GGML's types, as GGUF files
 * store them (their layouts are those of llama.cpp's ggml-common.h), and symbols of a trellis. */
#include <string.h>

#include "engine.h"
#include "linear_layout.h"

/* The offsets of a block's parts, and the weight that it becomes. */
typedef struct {
    int32_t type;
    int32_t format;
    int32_t kind;
    int32_t scale_format;
    int32_t group;
    int32_t inputs; /* of a block */
    int32_t bytes;
    int32_t halves;   /* offset of its one or two halves */
    int32_t integers; /* offset of the integers of scales */
    int32_t codes;    /* offset of the lower bits of codes */
    int32_t uppers;   /* offset of the upper ones */
} ggml_type;

static const ggml_type ggml_types[] = {
    {AP_GGML_Q5_0, AP_INT5, AP_CENTERED, AP_F16, 32, 32, 22, 0, 0, 6, 2},
    {AP_GGML_Q5_1, AP_INT5, AP_ADDITIVE, AP_F16, 32, 32, 24, 0, 0, 8, 4},
    {AP_GGML_IQ4_NL, AP_IQ4, AP_CENTERED, AP_F16, 32, 32, 18, 0, 0, 2, 0},
    {AP_GGML_Q2_K, AP_INT2, AP_ADDITIVE, AP_SCALES_Q2_K, 16, 256, 84, 80, 0, 16, 0},
    {AP_GGML_Q3_K, AP_INT3, AP_CENTERED, AP_SCALES_Q3_K, 16, 256, 110, 108, 96, 32, 0},
    {AP_GGML_Q4_K, AP_INT4, AP_ADDITIVE, AP_SCALES_Q4_K, 32, 256, 144, 0, 4, 16, 0},
    {AP_GGML_Q5_K, AP_INT5, AP_ADDITIVE, AP_SCALES_Q4_K, 32, 256, 176, 0, 4, 48, 16},
    {AP_GGML_Q6_K, AP_INT6, AP_CENTERED, AP_SCALES_Q6_K, 16, 256, 210, 208, 192, 0, 128},
    {AP_GGML_IQ4_XS, AP_IQ4, AP_CENTERED, AP_SCALES_IQ4_XS, 32, 256, 136, 0, 2, 8, 0},
    {AP_GGML_IQ3_S, AP_IQ3_S, AP_CENTERED, AP_SCALES_ODD_32, 32, 256, 134, 0, 2, 6, 0},
    {AP_GGML_IQ3_XXS, AP_IQ3_XXS, AP_CENTERED, AP_SCALES_ODD_32, 32, 256, 134, 0, 2, 6, 0},
    {AP_GGML_IQ2_XXS, AP_IQ2, AP_CENTERED, AP_SCALES_ODD_32, 32, 256, 102, 0, 2, 38, 6},
    {AP_GGML_IQ2_XS, AP_IQ2, AP_CENTERED, AP_SCALES_ODD_16, 16, 256, 106, 0, 2, 42, 10},
    {AP_GGML_IQ2_S, AP_IQ2, AP_CENTERED, AP_SCALES_ODD_16, 16, 256, 106, 0, 2, 42, 10},
    {AP_GGML_IQ1_S, AP_IQ1, AP_CENTERED, AP_SCALES_ODD_32, 32, 256, 102, 0, 2, 38, 6},
    {AP_GGML_IQ1_M, AP_IQ1, AP_CENTERED, AP_SCALES_ODD_16, 16, 256, 106, 0, 2, 42, 10},
};

static const ggml_type *find_type(int32_t type) {
    for (size_t i = 0; i < sizeof ggml_types / sizeof *ggml_types; i++)
        if (ggml_types[i].type == type) return &ggml_types[i];
    return NULL;
}

/* ---- codes, in the order of the inputs ---- */

/* runs of `run` bytes: the lower nibbles of a run, then its upper ones */
static void nibbles(const uint8_t *from, int32_t run, int32_t count, uint8_t *codes) {
    for (; count > 0; from += run, codes += 2 * run, count -= 2 * run)
        for (int32_t i = 0; i < run; i++) {
            codes[i] = from[i] & 15;
            codes[run + i] = from[i] >> 4;
        }
}

/* four runs of 32 in the pairs of bits of 32 bytes, moved to bit `to` */
static void add_pairs(const uint8_t *from, int to, uint8_t *codes) {
    for (int32_t half = 0; half < 2; half++, from += 32)
        for (int pair = 0; pair < 4; pair++, codes += 32)
            for (int32_t i = 0; i < 32; i++) codes[i] |= (from[i] >> 2 * pair & 3) << to;
}

/* eight runs of 32 in the bits of 32 bytes, moved to bit `to` */
static void add_bits(const uint8_t *from, int to, uint8_t *codes) {
    for (int bit = 0; bit < 8; bit++, codes += 32)
        for (int32_t i = 0; i < 32; i++) codes[i] |= (from[i] >> bit & 1) << to;
}

static void codes_of(const ggml_type *t, const uint8_t *block, uint8_t *codes) {
    const uint8_t *low = block + t->codes, *high = block + t->uppers;
    switch (t->type) {
        case AP_GGML_Q5_0:
        case AP_GGML_Q5_1:
            nibbles(low, 16, 32, codes);
            for (int32_t i = 0; i < 32; i++) codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
            break;
        case AP_GGML_IQ4_NL:
            nibbles(low, 16, 32, codes);
            break;
        case AP_GGML_IQ4_XS:
        case AP_GGML_IQ3_S:
        case AP_GGML_IQ3_XXS:
            nibbles(low, 16, SUPERBLOCK, codes);
            break;
        case AP_GGML_Q2_K:
        case AP_GGML_Q3_K:
        case AP_GGML_IQ2_XXS:
        case AP_GGML_IQ2_XS:
        case AP_GGML_IQ2_S:
        case AP_GGML_IQ1_S:
        case AP_GGML_IQ1_M:
            memset(codes, 0, SUPERBLOCK);
            add_pairs(low, 0, codes);
            if (t->type != AP_GGML_Q2_K) add_bits(high, 2, codes);
            break;
        case AP_GGML_Q4_K:
        case AP_GGML_Q5_K:
            nibbles(low, 32, SUPERBLOCK, codes);
            if (t->type == AP_GGML_Q5_K) add_bits(high, 4, codes);
            break;
        case AP_GGML_Q6_K:
            nibbles(low, 64, SUPERBLOCK, codes);
            add_pairs(high, 4, codes);
            break;
    }
}

/* ---- tiles ---- */

/* bits of four bytes at a time, from bit `low` on: `mask` in each byte */
static inline uint32_t four_of(const uint8_t *codes, int32_t low, uint32_t mask) {
    uint32_t four;
    memcpy(&four, codes, 4);
    return four >> low & mask;
}

static inline uint8_t *put_word(uint8_t *out, uint32_t word) {
    memcpy(out, &word, 4);
    return out + 4 * AP_LANES;
}

void put_piece(const uint8_t *codes, int32_t j, int32_t bits, uint8_t *out) {
    out += 4 * j;
    int32_t low = 0;
    if (bits > 3) {
        for (int32_t i = 0; i < 32; i += 8) {
            uint32_t upper = four_of(codes + i + 4, 0, 0x0f0f0f0f) << 4;
            out = put_word(out, four_of(codes + i, 0, 0x0f0f0f0f) | upper);
        }
        low = 4;
    }
    if (bits == 2 || bits == 3 || bits == 6) {
        for (int32_t i = 0; i < 32; i += 16) {
            uint32_t word = 0;
            for (int32_t pair = 0; pair < 4; pair++)
                word |= four_of(codes + i + 4 * pair, low, 0x03030303) << 2 * pair;
            out = put_word(out, word);
        }
        low += 2;
    }
    if (bits % 2) {
        uint32_t word = 0;
        for (int32_t bit = 0; bit < 8; bit++)
            word |= four_of(codes + 4 * bit, low, 0x01010101) << bit;
        put_word(out, word);
    }
}

typedef struct {
    const ap_linear *w;
    const ggml_type *type;
    const uint8_t *blocks;
} packing;

/* store the halves and integers of a block of output j */
static void put_scales(const packing *p, const uint8_t *block, int32_t tile, int32_t index,
                       int32_t j) {
    const ap_linear *w = p->w;
    const ggml_type *t = p->type;
    int32_t halves = t->kind == AP_ADDITIVE ? 2 : 1;
    if (t->inputs < SUPERBLOCK) {
        int64_t at = tile * tile_scales(w) + (int64_t)index * AP_LANES + j;
        memcpy((uint16_t *)w->scales + at, block + t->halves, 2);
        if (halves > 1) memcpy((uint16_t *)w->offsets + at, block + t->halves + 2, 2);
        return;
    }
    uint8_t *record = (uint8_t *)tile_record(w, tile, index);
    int32_t integers = record_bytes(t->scale_format) - 2 * halves;
    for (int32_t i = 0; i < integers; i++, record += AP_LANES) record[j] = block[t->integers + i];
    for (int32_t i = 0; i < halves; i++)
        memcpy(record + (i * AP_LANES + j) * 2, block + t->halves + 2 * i, 2);
}

static void zero_scales(const ap_linear *w, int32_t tile) {
    if (record_bytes(w->scale_format)) {
        int32_t records = w->in_features / SUPERBLOCK;
        size_t bytes = (size_t)records * (size_t)record_bytes(w->scale_format) * AP_LANES;
        memset((uint8_t *)tile_record(w, tile, 0), 0, bytes);
        return;
    }
    size_t bytes = (size_t)tile_scales(w) * 2;
    memset((uint16_t *)w->scales + tile * tile_scales(w), 0, bytes);
    if (w->offsets) memset((uint16_t *)w->offsets + tile * tile_scales(w), 0, bytes);
}

static void pack_tile(void *context, int32_t tile, int32_t worker) {
    const packing *p = context;
    const ggml_type *t = p->type;
    const ap_linear *w = p->w;
    (void)worker;
    uint8_t *out = (uint8_t *)w->codes + tile * tile_bytes(w);
    if (outputs_of(w, tile) < AP_LANES) {
        memset(out, 0, (size_t)tile_bytes(w));
        zero_scales(w, tile);
    }
    int32_t blocks = w->in_features / t->inputs, bits = format_bits(t->format);
    const uint8_t *first = p->blocks + (int64_t)tile * AP_LANES * blocks * t->bytes;
    for (int32_t i = 0; i < blocks; i++, first += t->bytes, out += t->inputs * bits * 2)
        for (int32_t j = 0; j < outputs_of(w, tile); j++) {
            const uint8_t *block = first + (int64_t)j * blocks * t->bytes;
            uint8_t codes[SUPERBLOCK];
            codes_of(t, block, codes);
            put_scales(p, block, tile, i, j);
            for (int32_t k = 0; k < t->inputs; k += 32)
                put_piece(codes + k, j, bits, out + k * bits * 2);
        }
}

int32_t ap_linear_pack_ggml(ap_engine *engine, const ap_linear *linear, int32_t type,
                            const void *blocks) {
    const ggml_type *t = find_type(type);
    if (!t || !blocks || !linear_supported(linear)) return AP_BAD_ARGUMENT;
    if (linear->format != t->format || linear->offset_kind != t->kind) return AP_BAD_ARGUMENT;
    if (linear->scale_format != t->scale_format || linear->group != t->group)
        return AP_BAD_ARGUMENT;
    packing p = {linear, t, blocks};
    ap_pool_run(engine->pool, pack_tile, &p, num_tiles(linear));
    return AP_OK;
}

/* ---- symbols of a trellis ---- */

typedef struct {
    const ap_linear *w;
    const uint8_t *symbols;
    const float *scales;
} trellis_packing;

static void pack_trellis_tile(void *context, int32_t tile, int32_t worker) {
    const trellis_packing *p = context;
    const ap_linear *w = p->w;
    (void)worker;
    int32_t bits = format_bits(w->format), first = tile * AP_LANES % TRELLIS_BLOCK;
    uint8_t *out = (uint8_t *)w->codes + tile * tile_bytes(w);
    const uint8_t *block = p->symbols + (int64_t)(tile * AP_LANES / TRELLIS_BLOCK) *
                                            w->in_features * bits * (TRELLIS_BLOCK / 8);
    for (int32_t k = 0; k < w->in_features; k += 32, out += bits * 64)
        for (int32_t j = 0; j < AP_LANES; j++) {
            uint8_t codes[32];
            int32_t bit = (first + j) * bits;
            for (int32_t i = 0; i < 32; i++) {
                const uint8_t *sequence = block + (int64_t)(k + i) * bits * (TRELLIS_BLOCK / 8);
                uint32_t two = sequence[bit / 8];
                if (bit % 8 + bits > 8) two |= (uint32_t)sequence[bit / 8 + 1] << 8;
                codes[i] = two >> bit % 8 & ((1u << bits) - 1);
            }
            put_piece(codes, j, bits, out);
        }
    for (int32_t j = 0; j < AP_LANES && tile < num_tiles(w); j++) {
        int32_t output = tile * AP_LANES + j;
        ((float *)w->scales)[output] = output < w->out_features ? p->scales[output] : 0.0f;
    }
}

int32_t ap_linear_pack_trellis(ap_engine *engine, const ap_linear *linear, const uint8_t *symbols,
                               const float *scales) {
    if (!symbols || !scales || !is_trellis(linear) || !linear_supported(linear))
        return AP_BAD_ARGUMENT;
    trellis_packing p = {linear, symbols, scales};
    ap_pool_run(engine->pool, pack_trellis_tile, &p, stored_tiles(linear));
    return AP_OK;
}
