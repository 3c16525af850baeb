/* Where the parts of a cache page lie; the same for every instruction set.
 *
 * A page holds the keys and values of 16 tokens of one head: key codes, value codes, scales.
 * D is head_dim. Every part begins at a multiple of 64 bytes, and no two tokens share a byte, so
 * tokens may be written at the same time.
 *
 *   AP_F32, AP_F16, AP_BF16
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
 */
#ifndef AP_PAGE_H
#define AP_PAGE_H

#include "appliance_cpu.h"

typedef struct {
    int32_t values; /* offsets in bytes; the keys are at 0 */
    int32_t scales;
    int32_t bytes;
} ap_page;

static inline ap_page page_of(int32_t format, int32_t head_dim) {
    int32_t keys, values, scales;
    switch (format) {
        case AP_F32:
            keys = values = 64 * head_dim;
            scales = 0;
            break;
        case AP_INT8:
            keys = values = 16 * head_dim;
            scales = 64;
            break;
        case AP_INT4:
            keys = 8 * head_dim;
            values = (head_dim + 31) / 32 * 256;
            scales = 128;
            break;
        default: /* AP_F16, AP_BF16 */
            keys = values = 32 * head_dim;
            scales = 0;
    }
    return (ap_page){keys, keys + values, keys + values + scales};
}

#endif
