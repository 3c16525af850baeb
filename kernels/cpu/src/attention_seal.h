/* Sealing: turns an open block of 8 bits into a block with values of 4 bits, and with keys of 4
 * bits that have scales by dimension, or unchanged keys of 8 bits.
 *
 * The 8-bit form is its only input, so the same tokens always give the same block.
 */
#ifndef AP_ATTENTION_SEAL_H
#define AP_ATTENTION_SEAL_H

#include "attention_page.h"

enum { SEALED_TOKENS = 2 * AP_LANES, KEY_CENTRE = 8 };

/* Dequantize a page of AP_INT8: keys, values (16, head_dim). */
static void read_int8(const uint8_t *page, const ap_page *at, int32_t dim, float *keys,
                      float *values) {
    float key_scales[16], value_scales[16];
    const int8_t *codes = (const int8_t *)(page + at->values);
    vf_store(key_scales, vf_load_half((const uint16_t *)(const void *)(page + at->scales)));
    vf_store(value_scales, vf_load_half((const uint16_t *)(const void *)(page + at->value_scales)));
    for (int32_t d = 0; d < dim; d++)
        for (int32_t j = 0; j < AP_LANES; j++) {
            float key = (float)(page[d / 4 * 64 + 4 * j + d % 4] - 128);
            keys[j * dim + d] = key * key_scales[j];
            values[j * dim + d] = (float)codes[j / 4 * 4 * dim + 4 * d + j % 4] * value_scales[j];
        }
}

/* Quantize keys (32, head_dim) into two pages; `check` is 0, or NaN if a key is not finite. */
static void seal_keys(uint8_t *const page[2], const ap_page *at, int32_t dim, const float *keys,
                      float check) {
    uint8_t codes[SEALED_TOKENS][MAX_HEAD_DIM];
    for (int32_t d = 0; d < dim; d += 16) {
        vfloat low = vf_load(keys + d), high = low;
        for (int32_t t = 1; t < SEALED_TOKENS; t++) {
            low = vf_min(low, vf_load(keys + t * dim + d));
            high = vf_max(high, vf_load(keys + t * dim + d));
        }
        uint16_t halves[2][16];
        vfloat scale = vf_div(vf_sub(high, low), vf_set(15.0f));
        scale = vf_min(vf_set(65504.0f), vf_max(vf_set(0x1p-24f), scale));
        vf_store_half(halves[0], scale);
        scale = vf_load_half(halves[0]);
        vfloat offset = vf_add(low, vf_mul(vf_set((float)KEY_CENTRE), scale));
        offset = vf_min(vf_set(65504.0f), vf_max(vf_set(-65504.0f), offset));
        vf_store_half(halves[1], offset);
        offset = vf_load_half(halves[1]);
        for (int32_t t = 0; t < SEALED_TOKENS; t++) {
            vfloat code = vf_div(vf_sub(vf_load(keys + t * dim + d), offset), scale);
            code = vf_max(vf_min(code, vf_set(7.0f)), vf_set(-8.0f));
            vi_store_bytes(codes[t] + d, vi_add(vi_round(code), vi_set(KEY_CENTRE)));
        }
        vf_store_half(halves[0], vf_add(scale, vf_set(check)));
        for (int32_t i = 0; i < 2; i++) memcpy(page[i] + at->channels + 2 * d, halves[i], 32);
    }
    for (int32_t t = 0; t < SEALED_TOKENS; t++)
        store_nibble_key(page[t / AP_LANES], dim, t % AP_LANES, codes[t]);
}

static void seal_block(const ap_attention *a, const ap_cache *cache, int32_t layer, int64_t open,
                       int64_t block) {
    float keys[SEALED_TOKENS * MAX_HEAD_DIM], values[SEALED_TOKENS * MAX_HEAD_DIM];
    int32_t dim = a->head_dim, half = AP_LANES * dim;
    page_store from = open_blocks_of(cache, layer, dim), to = blocks_of(cache, layer, dim);
    for (int32_t head = 0; head < a->num_kv_heads; head++) {
        uint8_t *const page[2] = {page_in(&to, block, head, 0), page_in(&to, block, head, 1)};
        for (int32_t i = 0; i < 2; i++)
            read_int8(page_in(&from, open, head, i), &from.at, dim, keys + i * half,
                      values + i * half);
        if (to.format == AP_K8V4) {
            for (int32_t i = 0; i < 2; i++) {
                const uint8_t *full = page_in(&from, open, head, i);
                memcpy(page[i], full, (size_t)half);
                memcpy(page[i] + to.at.scales, full + from.at.scales, 32);
            }
        } else {
            float check = 0.0f;
            for (int32_t t = 0; t < SEALED_TOKENS; t++) check += keys[t * dim] * 0.0f;
            seal_keys(page, &to.at, dim, keys, check);
        }
        for (int32_t t = 0; t < SEALED_TOKENS; t++)
            write_nibble_value(page[t / AP_LANES], &to.at, dim, t % AP_LANES, values + t * dim,
                               values[t * dim] * 0.0f);
    }
}

#endif
