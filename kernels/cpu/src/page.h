/* The layout of a cache page, the same for every instruction set.
 *
 * A page holds the keys and values of 16 tokens of one head: key codes, value codes, scales.
 * D is head_dim. Every part begins at a multiple of 64 bytes, and no two tokens share a byte, so
 * tokens may be written concurrently.
 *
 *   AP_F32, AP_F16, AP_BF16, AP_FP8; AP_FP8: x = element * the head's scale
 *       keys    (D, 16) elements: element [d][j] is token j
 *       values  (16, D) elements
 *   AP_INT8   x = code * scale, code in -127..127
 *       keys    (D / 4, 16, 4) bytes: byte [k][j][t] is code + 128 of token j, dimension 4k + t
 *       values  (4, D, 4) bytes: byte [g][d][t] is the code, signed, of token 4g + t, dimension d
 *       scales  2 x 16 float16: of the keys, of the values
 *   AP_INT4   x = (code + offset) * scale, code in 0..15; keys are rotated (see `rotate`)
 *       keys    (D / 8, 16, 4) bytes: byte [k][j][t] is token j, dimension 8k + t (low nibble)
 *               and 8k + 4 + t (high nibble)
 *       values  (4, P, 16, 4) bytes with P = D / 32 rounded up: byte [g][p][i][t] is token
 *               4g + t, dimension 32p + i (low nibble) and 32p + 16 + i (high nibble)
 *       scales  4 x 16 float16: scales of the keys, offsets of the keys, the same of the values
 *   AP_K8V4   keys as AP_INT8, values as AP_INT4
 *       scales  3 x 16 float16: of the keys; scales and offsets of the values
 *   AP_SEALED codes as AP_INT4; values as AP_INT4. Keys are not rotated, x = (code - 8) * scale +
 *             offset with both by dimension, over the 32 tokens of the block's two pages
 *       scales  2 x 16 float16: scales and offsets of the values; then D float16: in the first
 *               page of a block the scales of the keys, in the second one their offsets
 */
#ifndef AP_PAGE_H
#define AP_PAGE_H

#include "appliance_cpu.h"

typedef struct {
    int32_t values; /* offsets in bytes; the keys are at 0 */
    int32_t scales;
    int32_t value_scales;
    int32_t channels; /* AP_SEALED */
    int32_t bytes;
} ap_page;

static inline ap_page page_of(int32_t format, int32_t head_dim) {
    int32_t keys, values, scales, of_keys = 0, channels = 0;
    int32_t nibbles = (head_dim + 31) / 32 * 256;
    switch (format) {
        case AP_F32:
            keys = values = 64 * head_dim;
            scales = 0;
            break;
        case AP_INT8:
            keys = values = 16 * head_dim;
            of_keys = 32, scales = 64;
            break;
        case AP_INT4:
            keys = 8 * head_dim, values = nibbles;
            of_keys = 64, scales = 128;
            break;
        case AP_K8V4:
            keys = 16 * head_dim, values = nibbles;
            of_keys = 32, scales = 128;
            break;
        case AP_SEALED:
            keys = 8 * head_dim, values = nibbles;
            scales = 64, channels = (2 * head_dim + 63) / 64 * 64;
            break;
        case AP_FP8:
            keys = values = 16 * head_dim;
            scales = 0;
            break;
        default: /* AP_F16, AP_BF16 */
            keys = values = 32 * head_dim;
            scales = 0;
    }
    int32_t at = keys + values;
    return (ap_page){keys, at, at + of_keys, at + scales, at + scales + channels};
}

/* True if tokens lie in open blocks until their block is full and sealed. */
static inline int is_sealed(int format) { return format == AP_SEALED || format == AP_K8V4; }

/* The kinds of a page's codes. */
static inline int is_integer(int format) {
    return format == AP_INT8 || format == AP_INT4 || format == AP_SEALED || format == AP_K8V4;
}
static inline int has_byte_keys(int format) { return format == AP_INT8 || format == AP_K8V4; }
static inline int has_byte_values(int format) { return format == AP_INT8; }

#endif
