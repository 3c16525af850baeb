/* Writing a token into its page; page.h describes the pages. */
#ifndef AP_ATTENTION_PAGE_H
#define AP_ATTENTION_PAGE_H

#include "engine.h"
#include "page.h"

enum { MAX_HEAD_DIM = 256 };

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

/* NaN if one of these magnitudes is, else 0. It is added to all scales of a token: what is not
 * finite must not look like a number later. */
INLINE float not_finite(float of_key, float of_value) { return of_key * 0.0f + of_value * 0.0f; }

/* Stores x rounded to float16, saturated; returns what was stored. */
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

/* One scale for all of x, so that the largest magnitude becomes 127. `check` is 0 or NaN. */
INLINE void quantize_symmetric(const float *x, int32_t count, float magnitude, float check,
                               uint8_t *codes, uint8_t *scale) {
    float stored = store_half(scale, magnitude / 127.0f + check);
    quantize_codes(x, count, stored, 0.0f, -127.0f, 127.0f, codes);
}

/* Spread over the range of x. The range counts as no smaller than what keeps float16 offsets exact
 * to one code. */
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

static void write_int8(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                       const float *key, const float *value) {
    uint8_t codes[MAX_HEAD_DIM], *scales = page + at->scales + 2 * lane;
    float of_key = highest_magnitude(key, dim), of_value = highest_magnitude(value, dim);
    float check = not_finite(of_key, of_value);
    quantize_symmetric(key, dim, of_key, check, codes, scales);
    for (int32_t d = 0; d < dim; d++) codes[d] ^= 128;
    for (int32_t d = 0; d < dim; d += 4) memcpy(page + 16 * d + 4 * lane, codes + d, 4);
    quantize_symmetric(value, dim, of_value, check, codes, scales + 32);
    uint8_t *values = page + at->values + lane / 4 * 4 * dim + lane % 4;
    for (int32_t d = 0; d < dim; d++) values[4 * d] = codes[d];
}

static void write_int4(uint8_t *page, const ap_page *at, int32_t dim, int32_t lane,
                       const float *key, const float *value) {
    uint8_t codes[MAX_HEAD_DIM + 16], *scales = page + at->scales + 2 * lane;
    float rotated[MAX_HEAD_DIM];
    float check = not_finite(highest_magnitude(key, dim), highest_magnitude(value, dim));
    rotate(key, dim, rotated);
    quantize_nibbles(rotated, dim, check, codes, scales, scales + 32);
    for (int32_t d = 0; d < dim; d += 8)
        for (int32_t t = 0; t < 4; t++)
            page[8 * d + 4 * lane + t] = (uint8_t)(codes[d + t] | codes[d + 4 + t] << 4);
    quantize_nibbles(value, dim, check, codes, scales + 64, scales + 96);
    memset(codes + dim, 0, 16); /* the partners of an odd number of 16 dimensions */
    int32_t pairs = (dim + 31) / 32;
    uint8_t *values = page + at->values + lane / 4 * 64 * pairs + lane % 4;
    for (int32_t pair = 0; pair < pairs; pair++)
        for (int32_t i = 0; i < 16; i++)
            values[64 * pair + 4 * i] =
                (uint8_t)(codes[32 * pair + i] | codes[32 * pair + 16 + i] << 4);
}

/* The page of a head in a block; `index` counts pages of 16 tokens in the block. */
INLINE uint8_t *page_in(const ap_cache *cache, int32_t layer, const ap_page *at, int64_t block,
                        int32_t head, int32_t index) {
    int64_t number = (int64_t)head * (cache->block_size / AP_LANES) + index;
    return cache->base + block * cache->block_bytes + cache->layers[layer].offset +
           number * at->bytes;
}

/* Write one token's heads; key, value (num_kv_heads, head_dim). */
static void kv_write_token(const ap_attention *a, const ap_cache *cache, int32_t layer,
                           const float *key, const float *value, int64_t slot) {
    int32_t dim = a->head_dim, format = cache->layers[layer].format;
    int32_t token = (int32_t)(slot % cache->block_size), lane = token % AP_LANES;
    ap_page at = page_of(format, dim);
    for (int32_t head = 0; head < a->num_kv_heads; head++, key += dim, value += dim) {
        uint8_t *page = page_in(cache, layer, &at, slot / cache->block_size, head,
                                token / AP_LANES);
        switch (format) {
            case AP_F32:
                write_floats(AP_F32, page, &at, dim, lane, key, value);
                break;
            case AP_F16:
                write_floats(AP_F16, page, &at, dim, lane, key, value);
                break;
            case AP_BF16:
                write_floats(AP_BF16, page, &at, dim, lane, key, value);
                break;
            case AP_INT8:
                write_int8(page, &at, dim, lane, key, value);
                break;
            default:
                write_int4(page, &at, dim, lane, key, value);
        }
    }
}

#endif
