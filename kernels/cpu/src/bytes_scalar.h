/* Products of bytes in plain C, as 16-bit integers; included by vector_scalar.h. */

/* the values of 4-bit codes: bytes of a table of 16 */
INLINE vbyte vb_lookup(vbyte a, const uint8_t *table) {
    uint8_t codes[64];
    memcpy(codes, &a, sizeof a);
    for (int i = 0; i < 64; i++) codes[i] = table[codes[i]];
    return vb_load(codes);
}

/* Products of bytes, in 16 bits: those of bytes 0 and 2 of each lane, and those of 1 and 3. */
typedef struct { s8 even, odd; } products;
INLINE products multiply(s8 even, s8 odd, int16_t f0, int16_t f1, int16_t f2, int16_t f3) {
    return (products){even * (s8){f0, f2, f0, f2, f0, f2, f0, f2},
                      odd * (s8){f1, f3, f1, f3, f1, f3, f1, f3}};
}
INLINE products of_unsigned(b16 a, const int8_t *four) {
    return multiply((s8)a & 255, (s8)((h8)a >> 8), four[0], four[1], four[2], four[3]);
}
INLINE products of_signed(b16 b, const uint8_t *four) {
    return multiply((s8)((h8)b << 8) >> 8, (s8)b >> 8, four[0], four[1], four[2], four[3]);
}
INLINE i4 pair_sums(s8 a) { return ((i4)((u4)a << 16) >> 16) + ((i4)a >> 16); }
INLINE i4 sum_wide(products p) { return pair_sums(p.even) + pair_sums(p.odd); }
INLINE i4 sum_narrow(products p) { return pair_sums(p.even + p.odd); }
#define DOT(sum, of, bytes, four)                                                         \
    ((vint){acc.a + sum(of(bytes.a, four)), acc.b + sum(of(bytes.b, four)),               \
            acc.c + sum(of(bytes.c, four)), acc.d + sum(of(bytes.d, four))})
/* acc[j] += sum over t of a[j][t] * four[t], a unsigned */
INLINE vint vi_dot(vint acc, vbyte a, const int8_t *four) {
    return DOT(sum_wide, of_unsigned, a, four);
}
/* the same for a up to 24: two products fit 16 bits */
INLINE vint vi_dot_nibbles(vint acc, vbyte a, const int8_t *four) {
    return DOT(sum_narrow, of_unsigned, a, four);
}
/* the same for four from -64 to 64 */
INLINE vint vi_dot_small(vint acc, vbyte a, const int8_t *four) {
    return DOT(sum_narrow, of_unsigned, a, four);
}
/* acc[j] += sum over t of four[t] * b[j][t], four below 128, b signed: two products fit 16 bits */
INLINE vint vi_dot_signed(vint acc, const uint8_t *four, vbyte b) {
    return DOT(sum_narrow, of_signed, b, four);
}
#undef DOT
/* Running sums over 32 inputs: begin, add four inputs at a time, end. They have 16 bits: over 32
 * inputs 16 products of at most 15 * 127 fit, over 16 inputs 8 of at most 24 * 127. */
typedef struct { s8 a, b, c, d; } vpart;
INLINE vpart vp_begin(vint acc) { return (void)acc, (vpart){}; }
INLINE s8 add_products(s8 part, products p) { return part + p.even + p.odd; }
INLINE vpart vp_dot_nibbles(vpart part, vbyte a, const int8_t *four) {
    return (vpart){
        add_products(part.a, of_unsigned(a.a, four)),
        add_products(part.b, of_unsigned(a.b, four)),
        add_products(part.c, of_unsigned(a.c, four)),
        add_products(part.d, of_unsigned(a.d, four)),
    };
}
INLINE vint vp_end(vpart part, vint acc) {
    return (vint){acc.a + pair_sums(part.a), acc.b + pair_sums(part.b), acc.c + pair_sums(part.c),
                  acc.d + pair_sums(part.d)};
}
/* acc[j] += sum over t of (a[j][t] - BYTE_ZERO) * four[t] */
#define BYTE_ZERO 0
INLINE vint vi_dot_bytes(vint acc, vbyte a, const int8_t *four) { return vi_dot(acc, a, four); }
