/* Vectors of 16 lanes, the same functions for every instruction set.
 *
 * vfloat: 16 floats. vint: 16 int32. vbyte: 16 lanes of 4 bytes, which an integer dot product
 * multiplies with 4 signed bytes that are the same for all lanes. Reductions add in one fixed
 * order, so that AVX2 and AVX-512 give the same bits; the scalar path has no fused multiply-add.
 */
#ifndef AP_VECTOR_H
#define AP_VECTOR_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Tests and sanitizers define AP_APART, which inlines nothing: otherwise the kernels would take
 * minutes to compile. */
#ifdef AP_APART
#define INLINE static __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline))
#endif

/* Sanitizers (AP_CHECKED) do not see masked accesses: the lanes are read one by one, too. */
INLINE void touch(const float *p, int n) {
#ifdef AP_CHECKED
    for (int i = 0; i < n; i++) (void)*(const volatile float *)(p + i);
#else
    (void)p, (void)n;
#endif
}

/* An integer sum that begins at VI_BIAS and changes by less than 2^22 needs no conversion: as a
 * float, its bits are VI_BIAS_FLOAT plus the change. */
#define VI_BIAS 0x4b400000
#define VI_BIAS_FLOAT 0x1.8p23f

/* Twice the values of E2M1 codes, plus E2M1_ZERO. */
#define E2M1_ZERO 12
static const uint8_t e2m1_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
/* The values, plus 128, that codes name: of AP_IQ4, AP_IQ3_S, AP_IQ3_XXS, AP_IQ2 and AP_IQ1. */
static const uint8_t named_values[5][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {136, 152, 168, 184, 200, 216, 232, 248, 120, 104, 88, 72, 56, 40, 24, 8},
    {136, 152, 168, 184, 200, 216, 232, 252, 120, 104, 88, 72, 56, 40, 24, 4},
    {136, 153, 171, 128, 120, 103, 85, 128},
    {121, 129, 137, 128, 119, 127, 135, 128},
};

/* The bits of 2^-127. */
#define E8M0_ZERO 0x00400000

#if defined(__AVX512VNNI__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#else
#include "vector_scalar.h"
#endif

/* Before a loop of constant length over vectors, which are to stay in registers. */
#if VECTORS < 8 || defined(AP_APART)
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vfloat vf_zero(void) { return vf_set(0.0f); }
INLINE vint vi_zero(void) { return vi_set(0); }

/* e^x, with a relative error below 2e-7; below -87 the result is that of -87. NaN stays NaN: min
 * and max give their second argument then. */
INLINE vfloat vf_exp(vfloat x) {
    x = vf_min(vf_set(88.0f), vf_max(vf_set(-87.0f), x));
    vint whole = vi_round(vf_mul(x, vf_set(1.44269504088896341f)));
    vfloat n = vf_from_int(whole);
    vfloat r = vf_fma(n, vf_set(-0.693145751953125f), x);
    r = vf_fma(n, vf_set(-1.42860677e-6f), r);
    vfloat p = vf_set(1.9875691500e-4f); /* minimax polynomial of Cephes' expf (Moshier) */
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set(1.0f)));
    return vf_scale(p, whole);
}

/* 2^x for x below 127, with a relative error below 2e-7; below -126 the result is that of -126. NaN
 * stays NaN. */
INLINE vfloat vf_exp2(vfloat x) {
    x = vf_max(vf_set(-126.0f), x);
    vint whole = vi_round(x);
    vfloat r = vf_sub(x, vf_from_int(whole));
    vfloat p = vf_set(1.32647273e-3f); /* the polynomial with p(0) = 1 of least relative error */
    p = vf_fma(p, r, vf_set(9.67151299e-3f));
    p = vf_fma(p, r, vf_set(5.55073358e-2f));
    p = vf_fma(p, r, vf_set(2.40222424e-1f));
    p = vf_fma(p, r, vf_set(6.93147004e-1f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_scale(p, whole);
}

INLINE vfloat vf_tanh(vfloat x) {
    /* 1 - 2 / (e^2x + 1), exact at both ends */
    vfloat e = vf_exp(vf_add(x, x));
    vfloat one = vf_set(1.0f);
    return vf_sub(one, vf_div(vf_set(2.0f), vf_add(e, one)));
}

#endif
