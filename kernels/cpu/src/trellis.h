/* The trellis code of weights, version 1: see AP_SCALES_TRELLIS.
 *
 * A symbol has 2 to 5 bits. A weight's value is the sum of three or four bytes, each looked up by
 * bits of its symbol and of those before it along the outputs, in all 12 bits. The tables are those
 * of kernels/weights/trellis.py: fitted to normal numbers by coding and least squares in turns. */
#ifndef AP_TRELLIS_H
#define AP_TRELLIS_H

#include <stdint.h>

#include "formats.h"

#define TRELLIS_BLOCK 64 /* outputs of a closed sequence, inputs that are rotated together */
#define TRELLIS_STATES 4096 /* the symbols that a value depends on: 12 bits, the latest lowest */
#define TRELLIS_TABLES 4

/* The first table is raised by 128, so that a sum is a byte. */
static const uint8_t trellis_tables[4][TRELLIS_TABLES][16] = {
    {
     {177, 94, 147, 127, 108, 108, 117, 166, 149, 80, 149, 127, 142, 113, 116, 128},
     {13, 21, 244, 251, 250, 6, 2, 238, 239, 230, 24, 7, 14, 250, 23, 237},
     {8, 235, 210, 241, 230, 1, 10, 221, 249, 33, 28, 6, 44, 8, 239, 30},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    },
    {
     {120, 133, 114, 146, 181, 154, 75, 99, 120, 133, 114, 146, 181, 154, 75, 99},
     {233, 248, 254, 253, 1, 13, 13, 7, 233, 248, 254, 253, 1, 13, 13, 7},
     {8, 26, 233, 253, 5, 241, 248, 7, 8, 26, 233, 253, 5, 241, 248, 7},
     {250, 8, 25, 15, 252, 229, 6, 238, 250, 8, 25, 15, 252, 229, 6, 238},
    },
    {
     {125, 193, 147, 172, 120, 95, 110, 63, 86, 142, 137, 161, 103, 154, 132, 115},
     {8, 240, 10, 255, 15, 30, 8, 251, 0, 227, 238, 250, 243, 22, 2, 248},
     {247, 2, 30, 235, 0, 8, 15, 2, 238, 9, 226, 251, 12, 19, 241, 251},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    },
    {
     {191, 140, 66, 110, 87, 96, 125, 169, 135, 130, 145, 115, 120, 104, 161, 152},
     {246, 5, 4, 18, 248, 251, 29, 237, 14, 8, 252, 1, 242, 229, 12, 255},
     {2, 16, 5, 247, 252, 29, 237, 2, 242, 255, 20, 8, 247, 251, 12, 227},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    },
};

/* Signs of a block's inputs before the Hadamard transform; bit i is set where i is negated. */
#define TRELLIS_SIGNS UINT64_C(0x5b1d9c7e30a6f842)

/* Rotate 64 inputs: signs, then a Hadamard transform of norm 1. */
static inline void trellis_transform(float *x) {
    for (int width = 1; width < TRELLIS_BLOCK; width *= 2)
        for (int i = 0; i < TRELLIS_BLOCK; i += 2 * width)
            for (int j = i; j < i + width; j++) {
                float a = x[j], b = x[j + width];
                x[j] = a + b;
                x[j + width] = a - b;
            }
    for (int i = 0; i < TRELLIS_BLOCK; i++) x[i] *= 0.125f;
}
static inline void trellis_change_signs(float *x) {
    for (int i = 0; i < TRELLIS_BLOCK; i++)
        if (TRELLIS_SIGNS >> i & 1) x[i] = -x[i];
}

/* The place in each table for the symbols of a state. */
static inline void trellis_places(int32_t bits, uint32_t state, uint8_t *places) {
    uint32_t c[6];
    for (int i = 0; i < 6; i++) c[i] = state >> bits * i & ((1u << bits) - 1);
    switch (bits) {
        case 2: {
            uint32_t now = c[0] | c[1] << 2, one = c[1] | c[2] << 2, two = c[2] | c[3] << 2;
            places[0] = (uint8_t)now;
            places[1] = (uint8_t)(two ^ one);
            places[2] = (uint8_t)((c[4] | c[5] << 2) ^ now);
            break;
        }
        case 3:
            for (int i = 0; i < 4; i++) places[i] = (uint8_t)c[i];
            return;
        case 4:
            for (int i = 0; i < 3; i++) places[i] = (uint8_t)c[i];
            break;
        default: /* 5 */
            places[0] = c[0] & 15;
            places[1] = c[1] & 15;
            places[2] = (uint8_t)(c[0] >> 4 | c[1] >> 4 << 1 | (c[2] & 3) << 2);
            break;
    }
    places[3] = 0; /* where the fourth table is 0 */
}

static inline int32_t trellis_value(int32_t bits, uint32_t state) {
    uint8_t places[TRELLIS_TABLES], sum = 0;
    trellis_places(bits, state, places);
    for (int i = 0; i < TRELLIS_TABLES; i++) sum += trellis_tables[bits - 2][i][places[i]];
    return (int32_t)sum - 128;
}

#endif
