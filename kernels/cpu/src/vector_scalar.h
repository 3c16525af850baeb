/* Plain C, for every processor: 16 lanes in arrays. */
#include "half.h"

typedef struct { float lane[16]; } vfloat;
typedef struct { int32_t lane[16]; } vint;
typedef struct { uint8_t lane[64]; } vbyte;

#define VECTORS 1 /* that fit the registers */

#define LANES for (int i = 0; i < 16; i++)

INLINE vfloat vf_set(float x) {
    vfloat r;
    LANES r.lane[i] = x;
    return r;
}
INLINE vfloat vf_load(const float *p) {
    vfloat r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void vf_store(float *p, vfloat a) { memcpy(p, &a, sizeof a); }
/* the first n < 16 lanes; the others are 0 */
INLINE vfloat vf_load_first(const float *p, int n) {
    vfloat r = vf_set(0.0f);
    memcpy(&r, p, (size_t)n * sizeof(float));
    return r;
}
INLINE void vf_store_first(float *p, vfloat a, int n) { memcpy(p, &a, (size_t)n * sizeof(float)); }
#define BINARY(name, type, expression)                                                    \
    INLINE type name(type a, type b) {                                                    \
        type r;                                                                           \
        LANES {                                                                           \
            r.lane[i] = (expression);                                                     \
        }                                                                                 \
        return r;                                                                         \
    }
#define A a.lane[i]
#define B b.lane[i]
BINARY(vf_add, vfloat, A + B)
BINARY(vf_sub, vfloat, A - B)
BINARY(vf_mul, vfloat, A *B)
BINARY(vf_div, vfloat, A / B)
BINARY(vf_min, vfloat, A < B ? A : B)
BINARY(vf_max, vfloat, A > B ? A : B)
BINARY(vi_add, vint, A + B)
BINARY(vi_sub, vint, A - B)
#undef BINARY
#undef A
#undef B
INLINE vfloat vf_abs(vfloat a) {
    LANES a.lane[i] = fabsf(a.lane[i]);
    return a;
}
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) {
    LANES c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) {
    LANES c.lane[i] -= a.lane[i] * b.lane[i];
    return c;
}
/* lanes below n from a, the others from b; 0 <= n <= 16 */
INLINE vfloat vf_first(int n, vfloat a, vfloat b) {
    LANES b.lane[i] = i < n ? a.lane[i] : b.lane[i];
    return b;
}
/* bit i: whether a[i] >= b[i], never with NaN */
INLINE uint32_t vf_at_least(vfloat a, vfloat b) {
    uint32_t bits = 0;
    LANES bits |= (uint32_t)(a.lane[i] >= b.lane[i]) << i;
    return bits;
}
/* lanes of `yes` where a >= b, of `no` elsewhere */
INLINE vfloat vf_choose(vfloat a, vfloat b, vfloat yes, vfloat no) {
    LANES no.lane[i] = a.lane[i] >= b.lane[i] ? yes.lane[i] : no.lane[i];
    return no;
}
/* a * 2^n, for results that are normal numbers */
INLINE vfloat vf_scale(vfloat a, vint n) {
    LANES a.lane[i] *= from_bits((uint32_t)(n.lane[i] + 127) << 23);
    return a;
}
INLINE float vf_sum(vfloat a) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a.lane[i] += a.lane[i + width];
    return a.lane[0];
}
INLINE float vf_highest(vfloat a) {
    float r = a.lane[0];
    LANES r = a.lane[i] > r ? a.lane[i] : r;
    return r;
}

INLINE vfloat vf_from_int(vint a) {
    vfloat r;
    LANES r.lane[i] = (float)a.lane[i];
    return r;
}
INLINE vfloat vf_load_half(const uint16_t *p) {
    vfloat r;
    LANES r.lane[i] = half_to_float(p[i]);
    return r;
}
INLINE vfloat vf_load_bfloat(const uint16_t *p) {
    vfloat r;
    LANES r.lane[i] = from_bits((uint32_t)p[i] << 16);
    return r;
}
INLINE vfloat vf_load_signed(const int8_t *p) {
    vfloat r;
    LANES r.lane[i] = p[i];
    return r;
}
INLINE vfloat vf_load_unsigned(const uint8_t *p) {
    vfloat r;
    LANES r.lane[i] = p[i];
    return r;
}
/* E4M3: its bits are those of a float16, except that the exponent counts from elsewhere */
INLINE vfloat vf_load_fp8(const uint8_t *p) {
    vfloat r;
    LANES {
        uint32_t magnitude = p[i] & 127u, sign = p[i] & 128u;
        uint32_t bits = magnitude == 127 ? 0x7e00 : magnitude << 7;
        r.lane[i] = half_to_float((uint16_t)(sign << 8 | bits)) * 256.0f;
    }
    return r;
}
INLINE void vf_store_half(uint16_t *p, vfloat a) { LANES p[i] = float_to_half(a.lane[i]); }
/* to nearest, ties to even; NaN stays NaN only in its upper bits */
INLINE void vf_store_bfloat(uint16_t *p, vfloat a) {
    LANES {
        uint32_t bits = to_bits(a.lane[i]);
        p[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

INLINE vint vi_set(int32_t x) {
    vint r;
    LANES r.lane[i] = x;
    return r;
}
INLINE vint vi_load(const int32_t *p) {
    vint r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void vi_store(int32_t *p, vint a) { memcpy(p, &a, sizeof a); }
/* to nearest, ties to even */
INLINE vint vi_round(vfloat a) {
    vint r;
    LANES r.lane[i] = (int32_t)lrintf(a.lane[i]);
    return r;
}
/* the bits of |a|: ordered as the numbers are, and NaN above all of them */
INLINE vint vi_magnitude_bits(vfloat a) {
    vint r;
    LANES r.lane[i] = (int32_t)(to_bits(a.lane[i]) & 0x7fffffffu);
    return r;
}
INLINE vint vi_max(vint a, vint b) {
    LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
INLINE int32_t vi_highest(vint a) {
    int32_t r = a.lane[0];
    LANES r = a.lane[i] > r ? a.lane[i] : r;
    return r;
}
/* (biased - VI_BIAS) * scale; `lift` must be -VI_BIAS_FLOAT * scale, exactly */
INLINE vfloat vf_unbias(vint biased, float scale, float lift) {
    vfloat r;
    (void)lift;
    LANES r.lane[i] = (float)(biased.lane[i] - VI_BIAS) * scale;
    return r;
}
INLINE int32_t vi_sum(vint a) {
    int32_t r = 0;
    LANES r += a.lane[i];
    return r;
}
INLINE vint vi_shift_left(vint a, int bits) {
    LANES a.lane[i] = (int32_t)((uint32_t)a.lane[i] << bits);
    return a;
}
/* Numbers of 14 bits as two parts of 7: byte 16g + 4k + t of each is of lane 4g + t of a, b, c, d
 * by k. */
INLINE void vi_store_sevens(uint8_t *high, uint8_t *low, vint a, vint b, vint c, vint d) {
    const vint *of[] = {&a, &b, &c, &d};
    for (int k = 0; k < 4; k++) LANES {
            int at = i / 4 * 16 + 4 * k + i % 4;
            high[at] = (uint8_t)(of[k]->lane[i] >> 7 & 127);
            low[at] = (uint8_t)(of[k]->lane[i] & 127);
        }
}
/* the low byte of each lane */
INLINE void vi_store_bytes(void *p, vint a) { LANES((uint8_t *)p)[i] = (uint8_t)a.lane[i]; }

INLINE vbyte vb_load(const void *p) {
    vbyte r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE vbyte vb_low(vbyte a) {
    for (int i = 0; i < 64; i++) a.lane[i] &= 15;
    return a;
}
INLINE vbyte vb_high(vbyte a) {
    for (int i = 0; i < 64; i++) a.lane[i] >>= 4;
    return a;
}
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    LANES for (int t = 0; t < 4; t++) acc.lane[i] += a.lane[4 * i + t] * four[t];
    return acc;
}
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* the same for four from -64 to 64 */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    LANES for (int t = 0; t < 4; t++) acc.lane[i] += four[t] * (int8_t)b.lane[4 * i + t];
    return acc;
}
/* Sums on the way over 32 inputs: begin, add four inputs at a time, end. */
typedef vint vpart;
INLINE vpart vp_begin(vint acc) { return acc; }
INLINE vpart vp_dot_nibbles(vpart part, vbyte a, const int8_t *four) {
    return vi_dot_nibbles(part, a, four);
}
INLINE vint vp_end(vpart part, vint acc) { return (void)acc, part; }
/* acc[j] += sum over t of (a[j][t] - BYTE_ZERO) * four[t] */
#define BYTE_ZERO 0
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
INLINE void prefetch(const void *p) { (void)p; }
