/* Multiplies many rows by integer weights: the codes of two tiles are unpacked into bytes for 48
 * rows, six of which are multiplied at a time.
 *
 * Sums are those of linear_integer.h and linear_planes.h, in the same order. One load of an input
 * serves two products, and codes of 6 or 3 bits, or that name values, are unpacked more seldom:
 * 1.1 to 1.3 times the rate (AVX-512, benchmark cpu_linears).
 */
#ifndef AP_LINEAR_PAIRS_H
#define AP_LINEAR_PAIRS_H

#include "linear_planes.h"

#define PAIR_ROWS 6       /* whose sums for two tiles fit 32 registers */
#define PAIR_INPUTS 768   /* unpacked at a time: with their scales they stay in the first cache */
#define PAIR_MOST_ROWS 48 /* multiplied by what was unpacked: few enough for the caches */
#define ROWS_FOR_PAIRS 16 /* fewer are not worth the unpacking */

/* Some inputs of two tiles. 128 is the zero of the codes. */
typedef struct {
    const uint8_t *codes[2]; /* (inputs / 4, 16, 4): in `bytes`, or of the weight */
    int32_t sixteens;
    _Alignas(64) uint8_t bytes[2][PAIR_INPUTS * AP_LANES];
    float scale[2][PAIR_INPUTS / INPUTS_PER_SCALE][AP_LANES]; /* by group */
} unpacked_pair;

/* True if pairs are faster: not with offsets, whose kernels load less for a row, and not with codes
 * of 4 bits that stand for themselves, which unpack fast. */
static inline bool multiplies_pairs(const ap_linear *w) {
    return VECTORS >= 32 && has_groups(w) && w->format != AP_INT4 && !is_trellis(w) &&
           w->offset_kind == AP_CENTERED && w->scale_format != AP_SCALES_NONE;
}

#if VECTORS >= 32
/* What is added to the codes of a format, so that all have the same zero. */
INLINE int lift_of_codes(const ap_linear *w) {
    if (names_values(w->format)) return 0;
    return 128 - (w->format == AP_E2M1 ? E2M1_ZERO : middle_code(w->format));
}

INLINE void put_codes(uint8_t *out, vbyte codes, const uint8_t *lifts) {
    vb_store(out, vb_add(codes, vb_load(lifts)));
}

static void unpack_e2m1(const uint8_t *codes, int32_t sixteens, const uint8_t *lifts,
                        uint8_t *out) {
    for (int32_t i = 0; i < 2 * sixteens; i++, codes += 64, out += 128) {
        vbyte packed = vb_load(codes);
        prefetch(codes + PREFETCH_BYTES);
        put_codes(out, vb_lookup(vb_low(packed), e2m1_values), lifts);
        put_codes(out + 64, vb_lookup(vb_high(packed), e2m1_values), lifts);
    }
}

INLINE void unpack_planes(const uint8_t *codes, const uint8_t *named, int32_t sixteens, int format,
                          const uint8_t *lifts, uint8_t *out) {
    for (int32_t i = 0; i < sixteens; i += 2, codes += format_bits(format) * 64)
        UNROLL for (int half = 0; half < 2; half++) {
            planes p = load_planes(codes, half, format);
            UNROLL for (int v = 0; v < 4; v++, out += 64) {
                vbyte values = plane_codes(&p, half, v, format);
                if (names_values(format)) values = vb_lookup(values, named);
                put_codes(out, values, lifts);
            }
        }
}

static void unpack_codes(const ap_linear *w, const uint8_t *codes, int32_t sixteens,
                         const uint8_t *lifts, uint8_t *out) {
    const uint8_t *named = code_values(w->format);
    switch (w->format) {
#define UNPACK(format)                                                                         \
    unpack_planes(codes, named, sixteens, format, lifts, out);                                 \
    break
        case AP_E2M1:
            unpack_e2m1(codes, sixteens, lifts, out);
            break;
        case AP_INT2:
            UNPACK(AP_INT2);
        case AP_INT3:
            UNPACK(AP_INT3);
        case AP_INT5:
            UNPACK(AP_INT5);
        case AP_INT6:
            UNPACK(AP_INT6);
        case AP_IQ2:
        case AP_IQ1:
            UNPACK(AP_IQ2);
        default:
            UNPACK(AP_IQ4);
#undef UNPACK
    }
}

/* Unpack the scales of the groups of some inputs. */
static void unpack_scales(const ap_linear *w, int32_t tile, int32_t first, int32_t inputs,
                          float (*scale)[AP_LANES]) {
    if (has_planes(w)) {
        block_scales scales;
        for (int32_t k = 0; k < inputs; k += SUPERBLOCK) {
            size_t groups = (size_t)(smaller(inputs - k, SUPERBLOCK) / w->group);
            load_block_scales(w, tile, first + k, &scales);
            memcpy(scale[k / w->group], scales.scale, groups * sizeof *scale);
        }
        return;
    }
    int64_t at = tile * tile_scales(w) + (int64_t)(first / w->group) * AP_LANES;
    for (int32_t g = 0; g < inputs / w->group; g++, at += AP_LANES)
        vf_store(scale[g], load_scale(w->scales, at, w->scale_format, w->format));
}

static void unpack_pair(const ap_linear *w, int32_t tile, int32_t first, int32_t inputs,
                        unpacked_pair *out) {
    uint8_t lifts[64];
    memset(lifts, lift_of_codes(w), sizeof lifts);
    out->sixteens = inputs / INPUTS_PER_SCALE;
    for (int i = 0; i < 2; i++) {
        const uint8_t *codes = tile_codes(w, tile + i) +
                               (int64_t)first * AP_LANES * format_bits(w->format) / 8;
        bool bytes = w->format == AP_INT8;
        out->codes[i] = bytes ? codes : out->bytes[i];
        if (!bytes) unpack_codes(w, codes, out->sixteens, lifts, out->bytes[i]);
        unpack_scales(w, tile + i, first, inputs, out->scale[i]);
    }
}

/* Add the products of some rows, a constant number, to sums (2, PAIR_MOST_ROWS, 16). */
INLINE void add_products(const unpacked_pair *p, int32_t group, const int8_t *x,
                         const row_scale *row, ptrdiff_t beside, float *sums, int rows) {
    const int32_t shift = __builtin_ctz((unsigned)(group / INPUTS_PER_SCALE));
    const uint8_t *one = p->codes[0], *other = p->codes[1];
    vfloat acc[2][PAIR_ROWS];
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)
#define EACH EACH_ROW UNROLL for (int t = 0; t < 2; t++)
    EACH acc[t][r] = vf_load(sums + (t * PAIR_MOST_ROWS + r) * AP_LANES);
    for (int32_t i = 0; i < p->sixteens; i++) {
        const int32_t g = i >> shift;
        vint dot[2][PAIR_ROWS];
        EACH dot[t][r] = vi_set(row[r].start_centered_bytes);
        UNROLL for (int v = 0; v < 4; v++, one += 64, other += 64, x += 4 * beside) {
            vbyte codes[2] = {vb_load(one), vb_load(other)};
            EACH dot[t][r] = vi_dot(dot[t][r], codes[t], x + 4 * r);
        }
        vfloat scale[2] = {vf_load(p->scale[0][g]), vf_load(p->scale[1][g])};
        EACH acc[t][r] =
            vf_fma(vf_unbias(dot[t][r], row[r].scale, row[r].lift), scale[t], acc[t][r]);
        row += beside;
    }
    EACH vf_store(sums + (t * PAIR_MOST_ROWS + r) * AP_LANES, acc[t][r]);
#undef EACH
#undef EACH_ROW
}

typedef void (*pair_kernel)(const unpacked_pair *, int32_t, const int8_t *, const row_scale *,
                            ptrdiff_t, float *);
#define KERNEL(rows)                                                                           \
    static void pair_##rows(const unpacked_pair *p, int32_t group, const int8_t *x,            \
                            const row_scale *row, ptrdiff_t beside, float *sums) {             \
        add_products(p, group, x, row, beside, sums, rows);                                    \
    }
KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(5)
KERNEL(6)
#undef KERNEL
static const pair_kernel pair_kernels[PAIR_ROWS] = {pair_1, pair_2, pair_3,
                                                    pair_4, pair_5, pair_6};

/* Add the products of at most PAIR_MOST_ROWS rows and the unpacked inputs from `first` on. */
static void add_pair(const multiplication *m, const unpacked_pair *p, int32_t first, float *sums) {
    const int32_t width = m->w->in_features, last_row = m->row + m->rows;
    for (int32_t row = m->row, rows; row < last_row; row += rows, sums += rows * AP_LANES) {
        const ptrdiff_t beside = block_rows(m->in, row);
        int32_t left = smaller(last_row - row, ROWS_SIDE_BY_SIDE - row % ROWS_SIDE_BY_SIDE);
        rows = smaller(left, PAIR_ROWS);
        pair_kernels[rows - 1](
            p, m->w->group, row_codes(m->in, row, width) + first * beside,
            row_scales(m->in, row, width) + first / INPUTS_PER_SCALE * beside, beside, sums);
    }
}

/* Multiply all rows by the pairs of tiles of m; return the first tile that is left over. */
static int32_t multiply_in_pairs(multiplication m) {
    const int32_t width = m.w->in_features, first_row = m.row, last_row = m.row + m.rows;
    /* parts of nearly one size, and of whole super-blocks */
    const int32_t parts = (width + PAIR_INPUTS - 1) / PAIR_INPUTS;
    const int32_t most = ((width + parts - 1) / parts + SUPERBLOCK - 1) / SUPERBLOCK * SUPERBLOCK;
    unpacked_pair pair;
    float sums[2 * PAIR_MOST_ROWS * AP_LANES];
    for (m.row = first_row; m.row < last_row; m.row += m.rows) {
        m.rows = smaller(last_row - m.row, PAIR_MOST_ROWS);
        for (int32_t tile = m.tile; tile + 1 < m.last_tile; tile += 2) {
            memset(sums, 0, sizeof sums);
            for (int32_t first = 0, inputs; first < width; first += inputs) {
                inputs = smaller(width - first, most);
                unpack_pair(m.w, tile, first, inputs, &pair);
                add_pair(&m, &pair, first, sums);
            }
            store_outputs(&m, tile, sums);
            store_outputs(&m, tile + 1, sums + PAIR_MOST_ROWS * AP_LANES);
        }
    }
    return m.last_tile - (m.last_tile - m.tile) % 2;
}
#else
static int32_t multiply_in_pairs(multiplication m) { return m.tile; }
#endif

#endif
