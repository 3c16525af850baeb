/* AVX2 with FMA and F16C, with or without AVX-VNNI: two registers a vector. */
#include <immintrin.h>

typedef struct { __m256 low, high; } vfloat;
typedef struct { __m256i low, high; } vint;
typedef struct { __m256i low, high; } vbyte;

#define VECTORS 8 /* that fit the registers */

/* all bits of the lanes below n */
INLINE __m256i lanes_below(int n, int base) {
    __m256i index = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                     _mm256_set1_epi32(base));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), index);
}

INLINE vfloat vf_set(float x) { return (vfloat){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vfloat vf_load(const float *p) {
    return (vfloat){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
INLINE void vf_store(float *p, vfloat a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
/* the first n < 16 lanes; the others are 0. Not by masked moves, which on some processors, and in
 * emulators, fault on memory of lanes that are left out. */
INLINE vfloat vf_load_first(const float *p, int n) {
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return vf_load(lanes);
}
INLINE void vf_store_first(float *p, vfloat a, int n) {
    float lanes[16];
    vf_store(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof(float));
}
#define BINARY(name, type, instruction)                                                   \
    INLINE type name(type a, type b) {                                                    \
        return (type){instruction(a.low, b.low), instruction(a.high, b.high)};            \
    }
BINARY(vf_add, vfloat, _mm256_add_ps)
BINARY(vf_sub, vfloat, _mm256_sub_ps)
BINARY(vf_mul, vfloat, _mm256_mul_ps)
BINARY(vf_div, vfloat, _mm256_div_ps)
BINARY(vf_min, vfloat, _mm256_min_ps)
BINARY(vf_max, vfloat, _mm256_max_ps)
BINARY(vi_add, vint, _mm256_add_epi32)
BINARY(vi_sub, vint, _mm256_sub_epi32)
BINARY(vi_max, vint, _mm256_max_epi32)
#undef BINARY
INLINE vfloat vf_abs(vfloat a) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return (vfloat){_mm256_and_ps(a.low, mask), _mm256_and_ps(a.high, mask)};
}
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) {
    return (vfloat){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
/* c - a * b */
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) {
    return (vfloat){_mm256_fnmadd_ps(a.low, b.low, c.low),
                    _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
/* lanes below n from a, the others from b; 0 <= n <= 16 */
INLINE vfloat vf_first(int n, vfloat a, vfloat b) {
    return (vfloat){
        _mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(lanes_below(n, 0))),
        _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(lanes_below(n, 8))),
    };
}
/* bit i: whether a[i] >= b[i]; 0 with NaN */
INLINE uint32_t vf_at_least(vfloat a, vfloat b) {
    int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
    return (uint32_t)(low | high << 8);
}
/* lanes of `yes` where a >= b, of `no` elsewhere */
INLINE vfloat vf_choose(vfloat a, vfloat b, vfloat yes, vfloat no) {
    return (vfloat){
        _mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ)),
        _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)),
    };
}
/* a * 2^n, for results that are normal numbers */
INLINE __m256 scale_half(__m256 a, __m256i n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
INLINE vfloat vf_scale(vfloat a, vint n) {
    return (vfloat){scale_half(a.low, n.low), scale_half(a.high, n.high)};
}
INLINE float vf_sum(vfloat a) {
    __m256 x = _mm256_add_ps(a.low, a.high);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float vf_highest(vfloat a) {
    __m256 x = _mm256_max_ps(a.low, a.high);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE vfloat vf_from_int(vint a) {
    return (vfloat){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}
INLINE vfloat vf_load_half(const uint16_t *p) {
    return (vfloat){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE __m256 bfloat_half(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vfloat vf_load_bfloat(const uint16_t *p) {
    return (vfloat){bfloat_half(p), bfloat_half(p + 8)};
}
INLINE vfloat vf_load_signed(const int8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vfloat){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE vfloat vf_load_unsigned(const uint8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vfloat){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
/* E4M3: its bits are those of a float16, except for the bias of the exponent */
INLINE vfloat vf_load_fp8(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(127));
    __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(127));
    __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(wide, magnitude), 8);
    magnitude = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                                _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    wide = _mm256_or_si256(sign, magnitude);
    __m256 bias = _mm256_set1_ps(256.0f);
    return (vfloat){
        _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(wide)), bias),
        _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1)), bias),
    };
}
/* E8M0: an exponent alone; 0 is a subnormal float */
INLINE __m256 powers_of_two(__m128i bytes) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(E8M0_ZERO)));
}
INLINE vfloat vf_load_e8m0(const uint8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vfloat){powers_of_two(bytes), powers_of_two(_mm_srli_si128(bytes, 8))};
}
INLINE void vf_store_half(uint16_t *p, vfloat a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256i rounded_upper(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(bits, 16);
}
/* to nearest, ties to even; NaN stays NaN only if its upper 16 bits are NaN */
INLINE void vf_store_bfloat(uint16_t *p, vfloat a) {
    __m256i packed = _mm256_packus_epi32(rounded_upper(a.low), rounded_upper(a.high));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

INLINE vint vi_set(int32_t x) { return (vint){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE vint vi_load(const int32_t *p) {
    return (vint){_mm256_loadu_si256((const __m256i *)p),
                  _mm256_loadu_si256((const __m256i *)(p + 8))};
}
INLINE void vi_store(int32_t *p, vint a) {
    _mm256_storeu_si256((__m256i *)p, a.low);
    _mm256_storeu_si256((__m256i *)(p + 8), a.high);
}
/* to nearest, ties to even */
INLINE vint vi_round(vfloat a) {
    return (vint){_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)};
}
/* the bits of |a|: ordered as the numbers are, and NaN above all of them */
INLINE vint vi_magnitude_bits(vfloat a) {
    a = vf_abs(a);
    return (vint){_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)};
}
INLINE int32_t vi_highest(vint a) {
    __m256i x = _mm256_max_epi32(a.low, a.high);
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
/* (biased - VI_BIAS) * scale; `lift` must be -VI_BIAS_FLOAT * scale, exactly */
INLINE vfloat vf_unbias(vint biased, float scale, float lift) {
    vfloat a = {_mm256_castsi256_ps(biased.low), _mm256_castsi256_ps(biased.high)};
    return vf_fma(a, vf_set(scale), vf_set(lift));
}
INLINE int32_t vi_sum(vint a) {
    __m256i x = _mm256_add_epi32(a.low, a.high);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
INLINE vint vi_shift_left(vint a, int bits) {
    return (vint){_mm256_slli_epi32(a.low, bits), _mm256_slli_epi32(a.high, bits)};
}
INLINE void store_sevens(uint8_t *high, uint8_t *low, __m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i ab = _mm256_packus_epi32(a, b), cd = _mm256_packus_epi32(c, d);
    __m256i mask = _mm256_set1_epi16(127);
    _mm256_storeu_si256((__m256i *)high, _mm256_packus_epi16(_mm256_srli_epi16(ab, 7),
                                                             _mm256_srli_epi16(cd, 7)));
    _mm256_storeu_si256((__m256i *)low, _mm256_packus_epi16(_mm256_and_si256(ab, mask),
                                                            _mm256_and_si256(cd, mask)));
}
/* Numbers of 14 bits as two parts of 7: byte 16g + 4k + t of each is of lane 4g + t of a, b, c, d
 * by k. */
INLINE void vi_store_sevens(uint8_t *high, uint8_t *low, vint a, vint b, vint c, vint d) {
    store_sevens(high, low, a.low, b.low, c.low, d.low);
    store_sevens(high + 32, low + 32, a.high, b.high, c.high, d.high);
}
/* the low byte of each lane */
INLINE void vi_store_bytes(void *p, vint a) {
    __m256i mask = _mm256_set1_epi32(255);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.low, mask),
                                        _mm256_and_si256(a.high, mask));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words),
                                     _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}

INLINE vbyte vb_load(const void *p) {
    return (vbyte){_mm256_loadu_si256((const __m256i *)p),
                   _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE __m256i low_nibbles(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE __m256i high_nibbles(__m256i a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
INLINE vbyte vb_low(vbyte a) { return (vbyte){low_nibbles(a.low), low_nibbles(a.high)}; }
INLINE vbyte vb_high(vbyte a) { return (vbyte){high_nibbles(a.low), high_nibbles(a.high)}; }

/* the values of 4-bit codes: bytes of a table of 16 */
INLINE vbyte vb_lookup(vbyte a, const uint8_t *table) {
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vbyte){_mm256_shuffle_epi8(values, a.low), _mm256_shuffle_epi8(values, a.high)};
}
INLINE vbyte vb_add(vbyte a, vbyte b) {
    return (vbyte){_mm256_add_epi8(a.low, b.low), _mm256_add_epi8(a.high, b.high)};
}
INLINE vbyte vb_xor(vbyte a, vbyte b) {
    return (vbyte){_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
INLINE void vb_store(void *p, vbyte a) {
    _mm256_storeu_si256((__m256i *)p, a.low);
    _mm256_storeu_si256((__m256i *)p + 1, a.high);
}
/* lanes of `a` moved up by n of 1 to 4, after the last n of `before`; n is a constant */
#define HALF_AFTER(before, a, n) \
    _mm256_alignr_epi8(a, _mm256_permute2x128_si256(before, a, 0x21), 16 - 4 * (n))
#define vb_after(before, a, n)                       \
    ((vbyte){HALF_AFTER((before).high, (a).low, n),  \
             HALF_AFTER((a).low, (a).high, n)})
INLINE vbyte vb_or(vbyte a, vbyte b) {
    return (vbyte){_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
INLINE __m256i moved_bits(__m256i a, int from, int to, int mask) {
    a = from > to ? _mm256_srli_epi16(a, from - to) : _mm256_slli_epi16(a, to - from);
    return _mm256_and_si256(a, _mm256_set1_epi8((char)mask));
}
/* each byte's bits from place `from` on, moved to place `to`; mask: the bits there that are kept */
INLINE vbyte vb_bits(vbyte a, int from, int to, int mask) {
    return (vbyte){moved_bits(a.low, from, to, mask), moved_bits(a.high, from, to, mask)};
}

INLINE __m256i four_everywhere(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
}
#if defined(__AVXVNNI__)
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    __m256i b = four_everywhere(four);
    return (vint){_mm256_dpbusd_avx_epi32(acc.low, a.low, b),
                  _mm256_dpbusd_avx_epi32(acc.high, a.high, b)};
}
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* the same for four from -64 to 64 */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    __m256i a = four_everywhere((const int8_t *)four);
    return (vint){_mm256_dpbusd_avx_epi32(acc.low, a, b.low),
                  _mm256_dpbusd_avx_epi32(acc.high, a, b.high)};
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
#else
/* 16-bit sums of two products: no overflow, since a is up to 24 and b at least -128 */
INLINE __m256i dot_nibbles(__m256i a, __m256i b, int16_t weight) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(weight));
}
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) {
    __m256i b = four_everywhere(four);
    return (vint){_mm256_add_epi32(acc.low, dot_nibbles(a.low, b, 1)),
                  _mm256_add_epi32(acc.high, dot_nibbles(a.high, b, 1))};
}
/* the same for four from -64 to 64: the sums of two products fit too */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) {
    return vi_dot_nibbles(acc, a, four);
}
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned: a pair of products may exceed 16 bits, so
 * the upper and lower nibbles are multiplied one after the other */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    __m256i b = four_everywhere(four);
    acc = vi_dot_nibbles(acc, vb_low(a), four);
    return (vint){_mm256_add_epi32(acc.low, dot_nibbles(high_nibbles(a.low), b, 16)),
                  _mm256_add_epi32(acc.high, dot_nibbles(high_nibbles(a.high), b, 16))};
}
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed: two products fit 16 bits */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    __m256i a = four_everywhere((const int8_t *)four);
    return (vint){_mm256_add_epi32(acc.low, dot_nibbles(a, b.low, 1)),
                  _mm256_add_epi32(acc.high, dot_nibbles(a, b.high, 1))};
}
/* Running sums over 32 inputs: begin, add four inputs at a time, end. They have 16 bits: over 32
 * inputs 16 products of at most 15 * 127 fit, over 16 inputs 8 of at most 24 * 127. */
typedef vint vpart;
INLINE vpart vp_begin(vint acc) { return (void)acc, vi_set(0); }
INLINE vpart vp_dot_nibbles(vpart part, vbyte a, const int8_t *four) {
    __m256i b = four_everywhere(four);
    return (vint){_mm256_add_epi16(part.low, _mm256_maddubs_epi16(a.low, b)),
                  _mm256_add_epi16(part.high, _mm256_maddubs_epi16(a.high, b))};
}
INLINE vint vp_end(vpart part, vint acc) {
    __m256i ones = _mm256_set1_epi16(1);
    return (vint){_mm256_add_epi32(acc.low, _mm256_madd_epi16(part.low, ones)),
                  _mm256_add_epi32(acc.high, _mm256_madd_epi16(part.high, ones))};
}
/* acc[j] += sum over t of (a[j][t] - BYTE_ZERO) * four[t]: a magnitude of up to 128, times four
 * with its sign, so that a pair of products fits in 16 bits; four must not hold -128 */
#define BYTE_ZERO 128
INLINE __m256i dot_centered(__m256i acc, __m256i a, __m256i b) {
    a = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) {
    __m256i b = four_everywhere(four);
    return (vint){dot_centered(acc.low, a.low, b), dot_centered(acc.high, a.high, b)};
}
/* forces the sums now: a compiler that makes more products before it adds them spills those */
#define SUM_NOW(sums) __asm__("" : "+x"((sums).low), "+x"((sums).high))
#endif
INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
/* into the second-level cache */
INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }
