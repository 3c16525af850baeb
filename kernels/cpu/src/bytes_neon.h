/* Products of bytes by ARM's dot products; included by vector_scalar.h. They are integers, so their
 * bits are those of plain C. SDOT and UDOT come with dotprod; USDOT, which mixes signs, with
 * i8mm. */
#include <arm_neon.h>

/* the values of 4-bit codes: bytes of a table of 16 */
INLINE b16 lookup_part(b16 a, uint8x16_t table) {
    return (b16)vqtbl1q_u8(table, (uint8x16_t)a);
}
INLINE vbyte vb_lookup(vbyte a, const uint8_t *table) {
    uint8x16_t all = vld1q_u8(table);
    return (vbyte){lookup_part(a.a, all), lookup_part(a.b, all), lookup_part(a.c, all),
                   lookup_part(a.d, all)};
}

/* four bytes for each of four lanes */
INLINE int8x16_t repeated(const void *four) {
    int32_t bits;
    memcpy(&bits, four, sizeof bits);
    return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}
INLINE i4 dot_signed_part(i4 acc, b16 a, int8x16_t four) {
    return (i4)vdotq_s32((int32x4_t)acc, (int8x16_t)a, four);
}
#ifdef __ARM_FEATURE_MATMUL_INT8
INLINE i4 dot_part(i4 acc, b16 a, int8x16_t four) {
    return (i4)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, four);
}
#else
/* a * f = (a - 128) * f + 128 * f, both by SDOT */
INLINE i4 dot_part(i4 acc, b16 a, int8x16_t four) {
    int32x4_t sum = vdotq_s32((int32x4_t)acc, veorq_s8((int8x16_t)a, vdupq_n_s8(-128)), four);
    return (i4)vsubq_s32(sum, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-1), four), 7));
}
#endif
#define DOT(part, bytes, four)                                                            \
    ((vint){part(acc.a, bytes.a, four), part(acc.b, bytes.b, four),                       \
            part(acc.c, bytes.c, four), part(acc.d, bytes.d, four)})
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    int8x16_t all = repeated(four);
    return DOT(dot_part, a, all);
}
/* the same for a up to 63, which is positive as a signed byte, too */
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) {
    int8x16_t all = repeated(four);
    return DOT(dot_signed_part, a, all);
}
/* the same for four from -64 to 64 */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    int8x16_t all = repeated(four);
    return DOT(dot_signed_part, b, all);
}
#undef DOT
/* Running sums over 32 inputs: begin, add four inputs at a time, end. */
typedef vint vpart;
INLINE vpart vp_begin(vint acc) { return acc; }
INLINE vpart vp_dot_nibbles(vpart part, vbyte a, const int8_t *four) {
    return vi_dot_nibbles(part, a, four);
}
INLINE vint vp_end(vpart part, vint acc) { return (void)acc, part; }
/* acc[j] += sum over t of (a[j][t] - BYTE_ZERO) * four[t] */
#ifdef __ARM_FEATURE_MATMUL_INT8
#define BYTE_ZERO 0
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
#else
#define BYTE_ZERO 128
INLINE i4 dot_bytes_part(i4 acc, b16 a, int8x16_t four) {
    return (i4)vdotq_s32((int32x4_t)acc, veorq_s8((int8x16_t)a, vdupq_n_s8(-128)), four);
}
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) {
    int8x16_t all = repeated(four);
    return (vint){dot_bytes_part(acc.a, a.a, all), dot_bytes_part(acc.b, a.b, all),
                  dot_bytes_part(acc.c, a.c, all), dot_bytes_part(acc.d, a.d, all)};
}
#endif
