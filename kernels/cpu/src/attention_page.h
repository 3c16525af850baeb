/* Writes a token into its page; page.h defines the layout. */
#ifndef AP_ATTENTION_PAGE_H
#define AP_ATTENTION_PAGE_H

#include "engine.h"
#include "page.h"

enum { MAX_HEAD_DIM = 512 };

/* Column j of the 16 x 16 Hadamard matrix: the sign of element i is the parity of i & j. */
#define SIGN(i, j) (0x6996 >> ((i) & (j)) & 1 ? -1.0f : 1.0f)
#define SIGNS(j)                                                                            \
    {SIGN(0, j), SIGN(1, j), SIGN(2, j),  SIGN(3, j),  SIGN(4, j),  SIGN(5, j),             \
     SIGN(6, j), SIGN(7, j), SIGN(8, j),  SIGN(9, j),  SIGN(10, j), SIGN(11, j),            \
     SIGN(12, j), SIGN(13, j), SIGN(14, j), SIGN(15, j)}
static const float hadamard[16][16] = {
    SIGNS(0), SIGNS(1), SIGNS(2),  SIGNS(3),  SIGNS(4),  SIGNS(5),  SIGNS(6),  SIGNS(7),
    SIGNS(8), SIGNS(9), SIGNS(10), SIGNS(11), SIGNS(12), SIGNS(13), SIGNS(14), SIGNS(15),
};
#undef SIGNS
#undef SIGN

/* The normalized Hadamard transform of each part of `size` elements, the largest power of two that
 * divides head_dim. It spreads outliers over a head, and q . k is the same if both are rotated. */
static void rotate(const float *x, int32_t head_dim, float *out) {
    int32_t size = head_dim & -head_dim;
    for (int32_t d = 0; d < head_dim; d += 16) {
        vfloat sum = vf_zero();
        for (int32_t j = 0; j < 16; j++)
            sum = vf_fma(vf_set(x[d + j]), vf_load(hadamard[j]), sum);
        vf_store(out + d, sum);
    }
    for (int32_t step = 16; step < size; step *= 2)
        for (int32_t d = 0; d < head_dim; d += 16) {
            if (d & step) continue;
            vfloat a = vf_load(out + d), b = vf_load(out + d + step);
            vf_store(out + d, vf_add(a, b));
            vf_store(out + d + step, vf_sub(a, b));
        }
    vfloat norm = vf_set(1.0f / sqrtf((float)size));
    for (int32_t d = 0; d < head_dim; d += 16)
        vf_store(out + d, vf_mul(vf_load(out + d), norm));
}

/* NaN if an element is NaN or infinite */
INLINE float highest_magnitude(const float *x, int32_t count) {
    vint highest = vi_zero();
    for (int32_t i = 0; i < count; i += 16)
        highest = vi_max(highest, vi_magnitude_bits(vf_load(x + i)));
    int32_t bits = vi_highest(highest);
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude < INFINITY ? magnitude : NAN;
}

/* NaN if one of these magnitudes is NaN, else 0. It is added to all scales of a token, so that
 * values that are not finite become NaN. */
INLINE float not_finite(float of_key, float of_value) { return of_key * 0.0f + of_value * 0.0f; }

/* Store x rounded to float16, saturated; return the stored value. */
INLINE float store_half(uint8_t *out, float x) {
    uint16_t halves[16];
    float floats[16];
    vfloat limited = vf_min(vf_set(65504.0f), vf_max(vf_set(-65504.0f), vf_set(x)));
    vf_store_half(halves, limited);
    vf_store(floats, vf_load_half(halves));
    memcpy(out, halves, 2);
    return floats[0];
}

/* codes[i] = round(x[i] / scale - offset), within lowest .. highest; 0 if the scale is 0 */
INLINE void quantize_codes(const float *x, int32_t count, float scale, float offset,
                           float lowest, float highest, uint8_t *codes) {
    if (scale == 0.0f) {
        memset(codes, 0, (size_t)count);
        return;
    }
    for (int32_t i = 0; i < count; i += 16) {
        vfloat q = vf_sub(vf_div(vf_load(x + i), vf_set(scale)), vf_set(offset));
        q = vf_max(vf_min(q, vf_set(highest)), vf_set(lowest));
        vi_store_bytes(codes + i, vi_round(q));
    }
}

/* Quantize with one scale: the largest magnitude becomes 127. `check` is 0 or NaN. */
INLINE void quantize_symmetric(const float *x, int32_t count, float magnitude, float check,
                               uint8_t *codes, uint8_t *scale) {
    float stored = store_half(scale, magnitude / 127.0f + check);
    quantize_codes(x, count, stored, 0.0f, -127.0f, 127.0f, codes);
}

/* Quantize over the range of x, widened if needed so that float16 offsets are exact to one code. */
INLINE void quantize_nibbles(const float *x, int32_t count, float check, uint8_t *codes,
                             uint8_t *scale, uint8_t *offset) {
    vfloat low = vf_load(x), high = low;
    for (int32_t i = 16; i < count; i += 16) {
        low = vf_min(low, vf_load(x + i));
        high = vf_max(high, vf_load(x + i));
    }
    float lowest = -vf_highest(vf_sub(vf_zero(), low)), highest = vf_highest(high);
    float range = (highest - lowest) / 15.0f, least = fmaxf(-lowest, highest) / 2048.0f;
    float step = store_half(scale, fmaxf(range, least) + check);
    float stored = store_half(offset, (step == 0.0f ? 0.0f : lowest / step) + check);
    quantize_codes(x, count, step, stored, 0.0f, 15.0f, codes);
}

/* E4M3 codes of x * inverse, rounded to nearest even, saturated; NaN if x is not finite. */
static void quantize_fp8(const float *x, int32_t count, float inverse, uint8_t *codes) {
    for (int32_t i = 0; i < count; i++) {
        float scaled = x[i] * inverse, magnitude = fabsf(scaled);
        uint32_t sign = scaled < 0.0f ? 128 : 0, bits, small;
        magnitude = magnitude > 448.0f ? 448.0f : magnitude;
        float steps = magnitude * 512.0f + VI_BIAS_FLOAT; /* below 2^-6 codes are steps of 2^-9 */
        memcpy(&bits, &magnitude, sizeof bits);
        memcpy(&small, &steps, sizeof small);
        uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        uint32_t code = magnitude < 0x1p-6f ? small & 15 : normal;
        codes[i] = (uint8_t)(x[i] - x[i] == 0.0f ? sign | code : 0x7f);
    }
}

INLINE void write_floats(int format, uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                         const float *key, const float *value) {
    for (int32_t d = 0; d < dim; d += 16) {
        vfloat k = vf_load(key + d), v = vf_load(value + d);
        if (format == AP_F32) {
            for (int32_t i = 0; i < 16; i++)
                memcpy(page + 4 * (16 * (d + i) + lane), key + d + i, 4);
            memcpy(page + at->values + 4 * (dim * lane + d), value + d, 64);
            continue;
        }
        uint16_t keys[16], values[16];
        if (format == AP_F16) {
            vf_store_half(keys, k);
            vf_store_half(values, v);
        } else {
            vf_store_bfloat(keys, k);
            vf_store_bfloat(values, v);
        }
        for (int32_t i = 0; i < 16; i++) memcpy(page + 2 * (16 * (d + i) + lane), keys + i, 2);
        memcpy(page + at->values + 2 * (dim * lane + d), values, 32);
    }
}

/* scales: of the key and the value of this head */
static void write_fp8(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                      const float *key, const float *value, const float scales[2]) {
    uint8_t codes[MAX_HEAD_DIM];
    quantize_fp8(key, dim, 1.0f / scales[0], codes);
    for (int32_t d = 0; d < dim; d++) page[16 * d + lane] = codes[d];
    quantize_fp8(value, dim, 1.0f / scales[1], page + at->values + dim * lane);
}

static void write_byte_key(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                           const float *key, float magnitude, float check) {
    uint8_t codes[MAX_HEAD_DIM];
    quantize_symmetric(key, dim, magnitude, check, codes, page + at->scales + 2 * lane);
    for (int32_t d = 0; d < dim; d++) codes[d] ^= 128;
    for (int32_t d = 0; d < dim; d += 4) memcpy(page + 16 * d + 4 * lane, codes + d, 4);
}

INLINE void store_nibble_key(uint8_t *page, int32_t dim, int32_t lane, const uint8_t *codes) {
    for (int32_t d = 0; d < dim; d += 8)
        for (int32_t t = 0; t < 4; t++)
            page[8 * d + 4 * lane + t] = (uint8_t)(codes[d + t] | codes[d + 4 + t] << 4);
}

static void write_nibble_value(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                               const float *value, float check) {
    uint8_t codes[MAX_HEAD_DIM + 16], *scales = page + at->value_scales + 2 * lane;
    quantize_nibbles(value, dim, check, codes, scales, scales + 32);
    memset(codes + dim, 0, 16); /* pads an odd number of groups of 16 dimensions */
    int32_t pairs = (dim + 31) / 32;
    uint8_t *values = page + at->values + lane / 4 * 64 * pairs + lane % 4;
    for (int32_t i = 0; i < 16 * pairs; i += 8) {
        uint64_t low, high; /* eight codes each; a loop over bytes takes seconds to compile */
        const uint8_t *eight = codes + i + i / 16 * 16;
        memcpy(&low, eight, 8);
        memcpy(&high, eight + 16, 8);
        low |= high << 4;
        for (int32_t j = 0; j < 8; j++, low >>= 8) values[4 * (i + j)] = (uint8_t)low;
    }
}

static void write_int8(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                       const float *key, const float *value) {
    uint8_t codes[MAX_HEAD_DIM];
    float of_key = highest_magnitude(key, dim), of_value = highest_magnitude(value, dim);
    float check = not_finite(of_key, of_value);
    write_byte_key(page, at, dim, lane, key, of_key, check);
    quantize_symmetric(value, dim, of_value, check, codes, page + at->value_scales + 2 * lane);
    uint8_t *values = page + at->values + lane / 4 * 4 * dim + lane % 4;
    for (int32_t d = 0; d < dim; d++) values[4 * d] = codes[d];
}

static void write_int4(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                       const float *key, const float *value) {
    uint8_t codes[MAX_HEAD_DIM], *scales = page + at->scales + 2 * lane;
    float rotated[MAX_HEAD_DIM];
    float check = not_finite(highest_magnitude(key, dim), highest_magnitude(value, dim));
    rotate(key, dim, rotated);
    quantize_nibbles(rotated, dim, check, codes, scales, scales + 32);
    store_nibble_key(page, dim, lane, codes);
    write_nibble_value(page, at, dim, lane, value, check);
}

/* The pages of one layer, in its blocks or its open blocks. */
typedef struct {
    uint8_t *base;
    int64_t stride; /* bytes from block to block */
    int32_t pages;  /* of 16 tokens, in a block */
    int32_t format;
    ap_page at;
} page_store;

INLINE page_store blocks_of(const ap_cache *cache, int32_t layer, int32_t dim) {
    const ap_cache_layer *of = &cache->layers[layer];
    return (page_store){cache->base + of->offset, cache->block_bytes,
                        cache->block_size / AP_LANES, of->format, page_of(of->format, dim)};
}

INLINE page_store open_blocks_of(const ap_cache *cache, int32_t layer, int32_t dim) {
    return (page_store){cache->open_base + cache->layers[layer].open_offset, cache->open_bytes,
                        cache->block_size / AP_LANES, AP_INT8, page_of(AP_INT8, dim)};
}

/* The pages that a step writes. */
INLINE page_store written_pages_of(const ap_cache *cache, int32_t layer, int32_t dim) {
    return is_sealed(cache->layers[layer].format) ? open_blocks_of(cache, layer, dim)
                                                  : blocks_of(cache, layer, dim);
}

/* The page of a head in a block; `index` counts pages of 16 tokens in the block. */
INLINE uint8_t *page_in(const page_store *store, int64_t block, int32_t head, int32_t index) {
    return store->base + block * store->stride +
           ((int64_t)head * store->pages + index) * store->at.bytes;
}

/* Write one token's heads; key, value (num_kv_heads, head_dim). */
static void kv_write_token(const ap_attention *a, const ap_cache *cache, int32_t layer,
                           const float *key, const float *value, int64_t slot) {
    int32_t dim = a->head_dim;
    int32_t token = (int32_t)(slot % cache->block_size), lane = token % AP_LANES;
    page_store store = written_pages_of(cache, layer, dim);
    const ap_cache_layer *of = &cache->layers[layer];
    const ap_page *at = &store.at;
    for (int32_t head = 0; head < a->num_kv_heads; head++, key += dim, value += dim) {
        uint8_t *page = page_in(&store, slot / cache->block_size, head, token / AP_LANES);
        float centred[MAX_HEAD_DIM];
        const float *kept = key;
        if (of->key_mean) {
            for (int32_t d = 0; d < dim; d++) centred[d] = key[d] - of->key_mean[head * dim + d];
            kept = centred;
        }
        switch (store.format) {
            case AP_F32:
                write_floats(AP_F32, page, at, dim, lane, kept, value);
                break;
            case AP_F16:
                write_floats(AP_F16, page, at, dim, lane, kept, value);
                break;
            case AP_BF16:
                write_floats(AP_BF16, page, at, dim, lane, kept, value);
                break;
            case AP_INT8:
                write_int8(page, at, dim, lane, kept, value);
                break;
            case AP_FP8:
                write_fp8(page, at, dim, lane, kept, value,
                          (float[]){of->head_scales[head],
                                    of->head_scales[a->num_kv_heads + head]});
                break;
            default:
                write_int4(page, at, dim, lane, kept, value);
        }
    }
}

#endif
