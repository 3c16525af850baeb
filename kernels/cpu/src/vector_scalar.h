/* Plain C, for every processor: GCC's and clang's extension for vectors of 16 bytes, which become
 * SSE2, NEON or whatever the processor has; four of them are a vector of 16 lanes. Only products of
 * bytes differ where ARM has instructions for them. */
#include "half.h"

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef int16_t s8 __attribute__((vector_size(16))); /* two of a lane */
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b16 __attribute__((vector_size(16))); /* four of a lane */
typedef uint16_t h4 __attribute__((vector_size(8)));
typedef int8_t c4 __attribute__((vector_size(4)));
typedef uint8_t b4 __attribute__((vector_size(4)));

typedef struct { f4 a, b, c, d; } vfloat;
typedef struct { i4 a, b, c, d; } vint;
typedef struct { b16 a, b, c, d; } vbyte;

#ifdef __ARM_FEATURE_DOTPROD
#define VECTORS 8 /* that fit the registers: 32 of 16 bytes */
#else
#define VECTORS 1
#endif

/* lanes of `yes` where all bits of the mask are set, of `no` where none is */
INLINE i4 pick(i4 mask, i4 yes, i4 no) { return (mask & yes) | (~mask & no); }
INLINE f4 pick_floats(i4 mask, f4 yes, f4 no) { return (f4)pick(mask, (i4)yes, (i4)no); }
INLINE i4 highest_of(i4 a, i4 b) { return pick(a > b, a, b); }
/* all bits of the lanes below n */
INLINE i4 lanes_below(int n, int base) { return (i4){base, base + 1, base + 2, base + 3} < n; }

INLINE vfloat vf_set(float x) {
    f4 part = {x, x, x, x};
    return (vfloat){part, part, part, part};
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
    INLINE type name(type x, type y) {                                                    \
        return (type){expression(x.a, y.a), expression(x.b, y.b), expression(x.c, y.c),   \
                      expression(x.d, y.d)};                                              \
    }
#define ADD(x, y) (x) + (y)
#define SUB(x, y) (x) - (y)
#define MUL(x, y) (x) * (y)
#define DIV(x, y) (x) / (y)
#define MIN(x, y) pick_floats((x) < (y), x, y)
#define MAX(x, y) pick_floats((x) > (y), x, y)
BINARY(vf_add, vfloat, ADD)
BINARY(vf_sub, vfloat, SUB)
BINARY(vf_mul, vfloat, MUL)
BINARY(vf_div, vfloat, DIV)
BINARY(vf_min, vfloat, MIN)
BINARY(vf_max, vfloat, MAX)
BINARY(vi_add, vint, ADD)
BINARY(vi_sub, vint, SUB)
BINARY(vi_max, vint, highest_of)
#undef BINARY
#undef ADD
#undef SUB
#undef MUL
#undef DIV
#undef MIN
#undef MAX
#define UNARY(name, to, from, function)                                                   \
    INLINE to name(from x) {                                                              \
        return (to){function(x.a), function(x.b), function(x.c), function(x.d)};          \
    }
INLINE i4 magnitude_bits(f4 a) { return (i4)a & 0x7fffffff; }
INLINE f4 magnitude(f4 a) { return (f4)magnitude_bits(a); }
UNARY(vf_abs, vfloat, vfloat, magnitude)
/* c + a * b, rounded twice */
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) { return vf_add(c, vf_mul(a, b)); }
/* c - a * b */
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) { return vf_sub(c, vf_mul(a, b)); }
/* lanes below n from a, the others from b; 0 <= n <= 16 */
INLINE vfloat vf_first(int n, vfloat a, vfloat b) {
    return (vfloat){
        pick_floats(lanes_below(n, 0), a.a, b.a),
        pick_floats(lanes_below(n, 4), a.b, b.b),
        pick_floats(lanes_below(n, 8), a.c, b.c),
        pick_floats(lanes_below(n, 12), a.d, b.d),
    };
}
/* bit i: whether a[i] >= b[i]; 0 with NaN */
INLINE uint32_t vf_at_least(vfloat a, vfloat b) {
    i4 bits = ((a.a >= b.a) & (i4){1, 2, 4, 8}) | ((a.b >= b.b) & (i4){16, 32, 64, 128})
              | ((a.c >= b.c) & (i4){256, 512, 1024, 2048})
              | ((a.d >= b.d) & (i4){4096, 8192, 16384, 32768});
    return (uint32_t)(bits[0] | bits[1] | bits[2] | bits[3]);
}
/* lanes of `yes` where a >= b, of `no` elsewhere */
INLINE vfloat vf_choose(vfloat a, vfloat b, vfloat yes, vfloat no) {
    return (vfloat){
        pick_floats(a.a >= b.a, yes.a, no.a),
        pick_floats(a.b >= b.b, yes.b, no.b),
        pick_floats(a.c >= b.c, yes.c, no.c),
        pick_floats(a.d >= b.d, yes.d, no.d),
    };
}
/* a * 2^n, for results that are normal numbers */
INLINE f4 power_of_two(i4 n) { return (f4)((n + 127) << 23); }
INLINE vfloat vf_scale(vfloat a, vint n) {
    return (vfloat){a.a * power_of_two(n.a), a.b * power_of_two(n.b), a.c * power_of_two(n.c),
                    a.d * power_of_two(n.d)};
}
INLINE float vf_sum(vfloat a) {
    f4 x = (a.a + a.c) + (a.b + a.d);
    return (x[0] + x[2]) + (x[1] + x[3]);
}
INLINE float vf_highest(vfloat a) {
    f4 x = pick_floats(a.a > a.b, a.a, a.b), y = pick_floats(a.c > a.d, a.c, a.d);
    x = pick_floats(x > y, x, y);
    float r = x[0] > x[1] ? x[0] : x[1], s = x[2] > x[3] ? x[2] : x[3];
    return r > s ? r : s;
}

#define FLOATS(x) __builtin_convertvector(x, f4)
#define INTS(x) __builtin_convertvector(x, i4)
/* load 16 consecutive numbers as four parts of four */
#define LOAD(name, number, vector, function)                                              \
    INLINE vfloat name(const number *p) {                                                 \
        vector a, b, c, d;                                                                \
        memcpy(&a, p, sizeof a);                                                          \
        memcpy(&b, p + 4, sizeof b);                                                      \
        memcpy(&c, p + 8, sizeof c);                                                      \
        memcpy(&d, p + 12, sizeof d);                                                     \
        return (vfloat){function(INTS(a)), function(INTS(b)), function(INTS(c)),          \
                        function(INTS(d))};                                               \
    }
/* as half_to_float */
INLINE f4 floats_of_halves(i4 h) {
    i4 size = (h & 0x7fff) << 13;
    i4 special = (size >= 0x0f800000) & 0x7f800000;
    return (f4)((h & 0x8000) << 16 | (i4)((f4)size * 0x1p112f) | special);
}
INLINE f4 floats_of_bfloats(i4 b) { return (f4)(b << 16); }
INLINE f4 floats_of_ints(i4 a) { return FLOATS(a); }
/* E4M3: its bits are those of a float16, except for the bias of the exponent */
INLINE f4 floats_of_fp8(i4 e) {
    i4 size = e & 127, sign = (e & 128) << 8;
    return floats_of_halves(sign | pick(size == 127, (i4){} + 0x7e00, size << 7)) * 256.0f;
}
/* E8M0: an exponent alone; 0 is a subnormal float */
INLINE f4 powers_of_two(i4 e) { return (f4)pick(e == 0, (i4){} + E8M0_ZERO, e << 23); }
UNARY(vf_from_int, vfloat, vint, floats_of_ints)
LOAD(vf_load_half, uint16_t, h4, floats_of_halves)
LOAD(vf_load_bfloat, uint16_t, h4, floats_of_bfloats)
LOAD(vf_load_signed, int8_t, c4, floats_of_ints)
LOAD(vf_load_unsigned, uint8_t, b4, floats_of_ints)
LOAD(vf_load_fp8, uint8_t, b4, floats_of_fp8)
LOAD(vf_load_e8m0, uint8_t, b4, powers_of_two)
#undef LOAD
#define STORE(name, number, vector, from, function)                                       \
    INLINE void name(number *p, from x) {                                                 \
        vector a = __builtin_convertvector(function(x.a), vector);                        \
        vector b = __builtin_convertvector(function(x.b), vector);                        \
        vector c = __builtin_convertvector(function(x.c), vector);                        \
        vector d = __builtin_convertvector(function(x.d), vector);                        \
        memcpy(p, &a, sizeof a);                                                          \
        memcpy(p + 4, &b, sizeof b);                                                      \
        memcpy(p + 8, &c, sizeof c);                                                      \
        memcpy(p + 12, &d, sizeof d);                                                     \
    }
/* as float_to_half */
INLINE i4 halves_of_floats(f4 x) {
    i4 sign = (i4)((u4)x >> 16) & 0x8000, bits = magnitude_bits(x);
    i4 small = (i4)((f4)bits + 0.5f) - 0x3f000000;
    i4 normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
    i4 r = pick(bits < 0x38800000, small, normal);
    r = pick(bits >= 0x477ff000, (i4){} + 0x7c00, r);
    return sign | pick(bits > 0x7f800000, (i4){} + 0x7e00, r);
}
/* to nearest, ties to even; NaN stays NaN only if its upper 16 bits are NaN */
INLINE u4 bfloats_of_floats(f4 x) {
    u4 bits = (u4)x;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
INLINE i4 as_is(i4 a) { return a; }
STORE(vf_store_half, uint16_t, h4, vfloat, halves_of_floats)
STORE(vf_store_bfloat, uint16_t, h4, vfloat, bfloats_of_floats)
STORE(store_bytes, uint8_t, b4, vint, as_is)
#undef STORE
/* the low byte of each lane */
INLINE void vi_store_bytes(void *p, vint a) { store_bytes(p, a); }

INLINE vint vi_set(int32_t x) {
    i4 part = {x, x, x, x};
    return (vint){part, part, part, part};
}
INLINE vint vi_load(const int32_t *p) {
    vint r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void vi_store(int32_t *p, vint a) { memcpy(p, &a, sizeof a); }
/* to nearest, ties to even: the last bit of the sum counts ones; 0 for magnitudes from 2^22 on and
 * for NaN */
INLINE i4 nearest(f4 a) {
    i4 fits = magnitude_bits(a) < 0x4a800000;
    return fits & ((i4)(a + VI_BIAS_FLOAT) - VI_BIAS);
}
UNARY(vi_round, vint, vfloat, nearest)
/* the bits of |a|: ordered as the numbers are, and NaN above all of them */
UNARY(vi_magnitude_bits, vint, vfloat, magnitude_bits)
INLINE int32_t vi_highest(vint a) {
    i4 x = highest_of(highest_of(a.a, a.b), highest_of(a.c, a.d));
    int32_t r = x[0] > x[1] ? x[0] : x[1], s = x[2] > x[3] ? x[2] : x[3];
    return r > s ? r : s;
}
/* (biased - VI_BIAS) * scale; `lift` must be -VI_BIAS_FLOAT * scale, exactly */
INLINE vfloat vf_unbias(vint biased, float scale, float lift) {
    (void)lift;
    return vf_mul(vf_from_int(vi_sub(biased, vi_set(VI_BIAS))), vf_set(scale));
}
INLINE int32_t vi_sum(vint a) {
    i4 x = a.a + a.b + a.c + a.d;
    return x[0] + x[1] + x[2] + x[3];
}
INLINE vint vi_shift_left(vint a, int bits) {
    return (vint){a.a << bits, a.b << bits, a.c << bits, a.d << bits};
}
/* Numbers of 14 bits as two parts of 7: byte 16g + 4k + t of each is of lane 4g + t of a, b, c, d
 * by k. */
INLINE i4 upper_seven(i4 a) { return a >> 7 & 127; }
INLINE i4 lower_seven(i4 a) { return a & 127; }
UNARY(upper_sevens, vint, vint, upper_seven)
UNARY(lower_sevens, vint, vint, lower_seven)
INLINE void vi_store_sevens(uint8_t *high, uint8_t *low, vint a, vint b, vint c, vint d) {
    vint w = {a.a, b.a, c.a, d.a}, x = {a.b, b.b, c.b, d.b};
    vint y = {a.c, b.c, c.c, d.c}, z = {a.d, b.d, c.d, d.d};
    store_bytes(high, upper_sevens(w)), store_bytes(high + 16, upper_sevens(x));
    store_bytes(high + 32, upper_sevens(y)), store_bytes(high + 48, upper_sevens(z));
    store_bytes(low, lower_sevens(w)), store_bytes(low + 16, lower_sevens(x));
    store_bytes(low + 32, lower_sevens(y)), store_bytes(low + 48, lower_sevens(z));
}

INLINE vbyte vb_load(const void *p) {
    vbyte r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE b16 low_nibbles(b16 a) { return a & 15; }
INLINE b16 high_nibbles(b16 a) { return a >> 4; }
UNARY(vb_low, vbyte, vbyte, low_nibbles)
UNARY(vb_high, vbyte, vbyte, high_nibbles)
INLINE vbyte vb_add(vbyte a, vbyte b) {
    return (vbyte){a.a + b.a, a.b + b.b, a.c + b.c, a.d + b.d};
}
INLINE vbyte vb_xor(vbyte a, vbyte b) {
    return (vbyte){a.a ^ b.a, a.b ^ b.b, a.c ^ b.c, a.d ^ b.d};
}
INLINE void vb_store(void *p, vbyte a) { memcpy(p, &a, sizeof a); }
/* lanes of `a` moved up by n of 1 to 4, after the last n of `before` */
INLINE vbyte vb_after(vbyte before, vbyte a, int n) {
    uint8_t both[128];
    vb_store(both, before);
    vb_store(both + 64, a);
    return vb_load(both + 64 - 4 * n);
}
INLINE vbyte vb_or(vbyte a, vbyte b) {
    return (vbyte){a.a | b.a, a.b | b.b, a.c | b.c, a.d | b.d};
}
INLINE b16 moved_bits(b16 a, int from, int to, int mask) {
    return (from > to ? a >> (from - to) : a << (to - from)) & (uint8_t)mask;
}
/* each byte's bits from place `from` on, moved to place `to`; mask: the bits there that are kept */
INLINE vbyte vb_bits(vbyte a, int from, int to, int mask) {
    return (vbyte){moved_bits(a.a, from, to, mask), moved_bits(a.b, from, to, mask),
                   moved_bits(a.c, from, to, mask), moved_bits(a.d, from, to, mask)};
}
#undef UNARY

#ifdef __ARM_FEATURE_DOTPROD
#include "bytes_neon.h"
#else
#include "bytes_scalar.h"
#endif
INLINE void prefetch(const void *p) { (void)p; }
INLINE void prefetch_far(const void *p) { (void)p; }
