/* AVX-512 with VNNI: one register a vector. */
#include <immintrin.h>

typedef __m512 vfloat;
/* not __m512i: the dot product works on this type, and GCC does not keep a sum in one register if a
 * loop alternates between two types */
typedef int32_t vint __attribute__((vector_size(64)));
typedef __m512i vbyte;

#define VECTORS 32 /* that fit the registers */

INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1u); }

INLINE vfloat vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vfloat vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vfloat a) { _mm512_storeu_ps(p, a); }
/* the first n < 16 lanes; the others are 0 */
INLINE vfloat vf_load_first(const float *p, int n) {
    touch(p, n);
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
INLINE void vf_store_first(float *p, vfloat a, int n) {
    touch(p, n);
    _mm512_mask_storeu_ps(p, first_lanes(n), a);
}
INLINE vfloat vf_add(vfloat a, vfloat b) { return _mm512_add_ps(a, b); }
INLINE vfloat vf_sub(vfloat a, vfloat b) { return _mm512_sub_ps(a, b); }
INLINE vfloat vf_mul(vfloat a, vfloat b) { return _mm512_mul_ps(a, b); }
INLINE vfloat vf_div(vfloat a, vfloat b) { return _mm512_div_ps(a, b); }
INLINE vfloat vf_min(vfloat a, vfloat b) { return _mm512_min_ps(a, b); }
INLINE vfloat vf_max(vfloat a, vfloat b) { return _mm512_max_ps(a, b); }
INLINE vfloat vf_abs(vfloat a) { return _mm512_abs_ps(a); }
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) { return _mm512_fmadd_ps(a, b, c); }
/* c - a * b */
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) { return _mm512_fnmadd_ps(a, b, c); }
/* lanes below n from a, the others from b; 0 <= n <= 16 */
INLINE vfloat vf_first(int n, vfloat a, vfloat b) {
    return _mm512_mask_blend_ps(first_lanes(n), b, a);
}
/* bit i: whether a[i] >= b[i]; 0 with NaN */
INLINE uint32_t vf_at_least(vfloat a, vfloat b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
/* lanes of `yes` where a >= b, of `no` elsewhere */
INLINE vfloat vf_choose(vfloat a, vfloat b, vfloat yes, vfloat no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
}
/* a * 2^n */
INLINE vfloat vf_scale(vfloat a, vint n) {
    return _mm512_scalef_ps(a, _mm512_cvtepi32_ps((__m512i)n));
}
INLINE float vf_sum(vfloat a) {
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float vf_highest(vfloat a) { return _mm512_reduce_max_ps(a); }

INLINE vfloat vf_from_int(vint a) { return _mm512_cvtepi32_ps((__m512i)a); }
INLINE vfloat vf_load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vfloat vf_load_bfloat(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vfloat vf_load_signed(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vfloat vf_load_unsigned(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* E4M3: its bits are those of a float16, except for the bias of the exponent */
INLINE vfloat vf_load_fp8(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(127));
    __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(127));
    __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(wide, magnitude), 8);
    magnitude = _mm256_mask_mov_epi16(_mm256_slli_epi16(magnitude, 7), nan,
                                      _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, magnitude)), _mm512_set1_ps(256.0f));
}
/* E8M0: an exponent alone; 0 is a subnormal float */
INLINE vfloat vf_load_e8m0(const uint8_t *p) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(E8M0_ZERO)));
}
INLINE void vf_store_half(uint16_t *p, vfloat a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/* to nearest, ties to even; NaN stays NaN only if its upper 16 bits are NaN */
INLINE void vf_store_bfloat(uint16_t *p, vfloat a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

INLINE vint vi_set(int32_t x) { return (vint)_mm512_set1_epi32(x); }
INLINE vint vi_load(const int32_t *p) { return (vint)_mm512_loadu_si512(p); }
INLINE void vi_store(int32_t *p, vint a) { _mm512_storeu_si512(p, (__m512i)a); }
INLINE vint vi_add(vint a, vint b) { return a + b; }
INLINE vint vi_sub(vint a, vint b) { return a - b; }
/* to nearest, ties to even */
INLINE vint vi_round(vfloat a) { return (vint)_mm512_cvtps_epi32(a); }
/* the bits of |a|: ordered as the numbers are, and NaN above all of them */
INLINE vint vi_magnitude_bits(vfloat a) { return (vint)_mm512_abs_ps(a); }
INLINE vint vi_max(vint a, vint b) {
    return (vint)_mm512_max_epi32((__m512i)a, (__m512i)b);
}
INLINE int32_t vi_highest(vint a) { return _mm512_reduce_max_epi32((__m512i)a); }
/* (biased - VI_BIAS) * scale; `lift` must be -VI_BIAS_FLOAT * scale, exactly */
INLINE vfloat vf_unbias(vint biased, float scale, float lift) {
    return _mm512_fmadd_ps((__m512)biased, _mm512_set1_ps(scale), _mm512_set1_ps(lift));
}
INLINE int32_t vi_sum(vint a) { return _mm512_reduce_add_epi32((__m512i)a); }
INLINE vint vi_shift_left(vint a, int bits) {
    return (vint)_mm512_slli_epi32((__m512i)a, (unsigned)bits);
}
/* Numbers of 14 bits as two parts of 7: byte 16g + 4k + t of each is of lane 4g + t of a, b, c, d
 * by k. */
INLINE void vi_store_sevens(uint8_t *high, uint8_t *low, vint a, vint b, vint c, vint d) {
    __m512i ab = _mm512_packus_epi32((__m512i)a, (__m512i)b);
    __m512i cd = _mm512_packus_epi32((__m512i)c, (__m512i)d);
    __m512i mask = _mm512_set1_epi16(127);
    _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(ab, 7),
                                                  _mm512_srli_epi16(cd, 7)));
    _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(ab, mask),
                                                 _mm512_and_si512(cd, mask)));
}
/* the low byte of each lane */
INLINE void vi_store_bytes(void *p, vint a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
}

INLINE vbyte vb_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vbyte vb_low(vbyte a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE vbyte vb_high(vbyte a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
/* the values of 4-bit codes: bytes of a table of 16 */
INLINE vbyte vb_lookup(vbyte a, const uint8_t *table) {
    __m128i values = _mm_loadu_si128((const __m128i *)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), a);
}
INLINE vbyte vb_add(vbyte a, vbyte b) { return _mm512_add_epi8(a, b); }
INLINE vbyte vb_xor(vbyte a, vbyte b) { return _mm512_xor_si512(a, b); }
INLINE void vb_store(void *p, vbyte a) { _mm512_storeu_si512(p, a); }
/* lanes of `a` moved up by n of 1 to 4, after the last n of `before`; n is a constant */
#define vb_after(before, a, n) _mm512_alignr_epi32(a, before, 16 - (n))
INLINE vbyte vb_or(vbyte a, vbyte b) { return _mm512_or_si512(a, b); }
/* each byte's bits from place `from` on, moved to place `to`; mask: the bits there that are kept */
INLINE vbyte vb_bits(vbyte a, int from, int to, int mask) {
    a = from > to ? _mm512_srli_epi16(a, (unsigned)(from - to))
                  : _mm512_slli_epi16(a, (unsigned)(to - from));
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, a, _mm512_set1_epi32(word));
}
/* the same for a up to 24 */
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* the same for four from -64 to 64 */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    int32_t word;
    memcpy(&word, four, 4);
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(word), b);
}
/* Running sums over 32 inputs: begin, add four inputs at a time, end. */
typedef vint vpart;
INLINE vpart vp_begin(vint acc) { return acc; }
INLINE vpart vp_dot_nibbles(vpart part, vbyte a, const int8_t *four) {
    return vi_dot_nibbles(part, a, four);
}
INLINE vint vp_end(vpart part, vint acc) { return (void)acc, part; }
/* acc[j] += sum over t of (a[j][t] - BYTE_ZERO) * four[t] */
#define BYTE_ZERO 0
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
/* into the second-level cache */
INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }
