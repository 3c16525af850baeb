/* Conversions between float and the 16-bit formats, in plain C. */
#ifndef AP_HALF_H
#define AP_HALF_H

#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    if ((h & 0x7c00u) == 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x7fffffu));
    /* the product shifts the exponent's bias and is right for subnormal numbers, too */
    return from_bits(sign | to_bits(from_bits(magnitude) * 0x1p112f));
}

static inline uint16_t float_to_half(float x) { /* to nearest, ties to even */
    uint32_t bits = to_bits(x);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;
    if (bits >= 0x477ff000u) return sign | 0x7c00u;
    if (bits < 0x38800000u) /* a subnormal half: let the addition round */
        return sign | (uint16_t)(to_bits(from_bits(bits) + 0.5f) - 0x3f000000u);
    return sign | (uint16_t)((bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13);
}

static inline float bfloat_to_float(uint16_t b) { return from_bits((uint32_t)b << 16); }

#endif
