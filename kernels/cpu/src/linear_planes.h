/* Multiplies rows by the weights of GGML's types: codes of 2 to 6 bits in planes, or indices of a
 * table; the scales of 256 inputs at a time are made from integers and halves.
 *
 * Sums are those of linear_integer.h, in the same order; only codes and scales are loaded
 * differently.
 */
#ifndef AP_LINEAR_PLANES_H
#define AP_LINEAR_PLANES_H

#include "linear_integer.h"
#include "linear_scales.h"

#define PIECE 32 /* inputs with planes side by side */

/* In kernels of formats that name values `format` gives their bits: `named` has the values. */
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)

/* Begin the dot products of 16 inputs; offsets, if any, are added elsewhere. */
INLINE void start_plane_dots(const row_scale *row, int format, bool additive, int rows, vint *dot) {
    if (additive) {
        EACH_ROW dot[r] = vi_set(VI_BIAS);
    } else if (names_values(format)) {
        EACH_ROW dot[r] = vi_set(row[r].start_centered_bytes);
    } else { /* start_centered_nibbles assumes a center of 8 */
        int32_t middle = middle_code(format);
        EACH_ROW dot[r] =
            vi_set(VI_BIAS + (row[r].start_centered_nibbles - VI_BIAS) / 4 * (middle / 2));
    }
}

/* The planes of 16 inputs. */
typedef struct {
    vbyte nibbles[2];
    vbyte pairs;
    vbyte bits; /* of 32 inputs */
} planes;

#define HAS_NIBBLES(format) (format_bits(format) > 3)
#define HAS_PAIRS(format) (format_bits(format) % 4 > 1)
#define HAS_BITS(format) (format_bits(format) % 2)

INLINE planes load_planes(const uint8_t *codes, int half, int format) {
    planes p;
    if (HAS_NIBBLES(format)) {
        UNROLL for (int i = 0; i < 2; i++) {
            p.nibbles[i] = vb_load(codes + (2 * half + i) * 64);
            prefetch(codes + (2 * half + i) * 64 + PREFETCH_BYTES);
        }
        codes += 256;
    }
    if (HAS_PAIRS(format)) {
        p.pairs = vb_load(codes + half * 64);
        prefetch(codes + half * 64 + PREFETCH_BYTES);
        codes += 128;
    }
    if (HAS_BITS(format)) {
        p.bits = vb_load(codes);
        if (half) prefetch(codes + PREFETCH_BYTES);
    }
    return p;
}

/* The codes of inputs 4v to 4v + 3 of 16, 0 to 63. */
INLINE vbyte plane_codes(const planes *p, int half, int v, int format) {
    if (!HAS_NIBBLES(format)) {
        vbyte low = vb_bits(p->pairs, 2 * v, 0, 3);
        return format == AP_INT2 ? low : vb_or(low, vb_bits(p->bits, 4 * half + v, 2, 4));
    }
    vbyte low = v % 2 ? vb_high(p->nibbles[v / 2]) : vb_low(p->nibbles[v / 2]);
    if (format == AP_INT6) return vb_or(low, vb_bits(p->pairs, 2 * v, 4, 0x30));
    if (format == AP_INT5) return vb_or(low, vb_bits(p->bits, 4 * half + v, 4, 0x10));
    return low;
}

/* Add products of 16 inputs, the first or the second half of a piece. Two lanes of 16-bit sums hold
 * 16 products of at most 31 * 127, or half as many of 63 * 127. */
INLINE void add_dots_planes(const uint8_t *codes, const uint8_t *named, const int8_t *x,
                            ptrdiff_t x_step, int half, int format, int rows, vint *dot) {
    planes p = load_planes(codes, half, format);
    if (names_values(format)) {
        UNROLL for (int v = 0; v < 4; v++, x += x_step) {
            vbyte values = vb_lookup(plane_codes(&p, half, v, format), named);
            EACH_ROW dot[r] = vi_dot_bytes(dot[r], values, x + 4 * r);
            SUM_ROWS_NOW(dot);
        }
        return;
    }
    const int at_once = format == AP_INT6 ? 2 : 4;
    UNROLL for (int first = 0; first < 4; first += at_once) {
        vpart part[REGISTER_ROWS];
        EACH_ROW part[r] = vp_begin(dot[r]);
        UNROLL for (int v = first; v < first + at_once; v++, x += x_step) {
            vbyte values = plane_codes(&p, half, v, format);
            EACH_ROW part[r] = vp_dot_nibbles(part[r], values, x + 4 * r);
            SUM_ROWS_NOW(part);
        }
        EACH_ROW dot[r] = vp_end(part[r], dot[r]);
    }
}

/* m->rows is `rows`, a constant like `format`, so that the sums stay in registers. */
INLINE void multiply_planes(const multiplication *m, int format, int rows) {
    const ap_linear *w = m->w;
    const bool additive = w->offset_kind != AP_CENTERED;
    const int32_t each = w->group / INPUTS_PER_SCALE, shift = __builtin_ctz((unsigned)each);
    const ptrdiff_t beside = block_rows(m->in, m->row);
    const uint8_t *codes = tile_codes(w, m->tile), *named = code_values(w->format);
    fetch_list fetches = m->fetches;
    const ptrdiff_t piece_bytes = format_bits(format) * (PIECE * AP_LANES / 8);
    for (int32_t tile = m->tile; tile < m->last_tile; tile++) {
        const int8_t *x = row_codes(m->in, m->row, w->in_features);
        const row_scale *row = row_scales(m->in, m->row, w->in_features);
        vfloat acc[REGISTER_ROWS];
        EACH_ROW acc[r] = vf_zero();
        for (int32_t first = 0; first < w->in_features; first += SUPERBLOCK) {
            block_scales scales;
            load_block_scales(w, tile, first, &scales);
            int32_t sixteens = smaller(w->in_features - first, SUPERBLOCK) / INPUTS_PER_SCALE;
            for (int32_t i = 0; i < sixteens; i += 2, codes += piece_bytes) {
                UNROLL for (int half = 0; half < 2; half++) {
                    int32_t g = (i + half) >> shift;
                    vfloat scale = vf_load(scales.scale[g]);
                    if (additive && ((i + half) & (each - 1)) == 0) {
                        vfloat offset = vf_load(scales.offset[g]);
                        EACH_ROW acc[r] = vf_fma(offset, vf_set(row[r].sum), acc[r]);
                    }
                    vint dot[REGISTER_ROWS];
                    fetch_next(&fetches);
                    start_plane_dots(row, format, additive, rows, dot);
                    add_dots_planes(codes, named, x, 4 * beside, half, format, rows, dot);
                    EACH_ROW acc[r] =
                        vf_fma(vf_unbias(dot[r], row[r].scale, row[r].lift), scale, acc[r]);
                    x += INPUTS_PER_SCALE * beside;
                    row += beside;
                }
            }
        }
        float sums[REGISTER_ROWS * AP_LANES];
        EACH_ROW vf_store(sums + r * AP_LANES, acc[r]);
        store_outputs(m, tile, sums);
    }
}
#undef EACH_ROW

#define ROWS(format, rows)                                                                     \
    case rows:                                                                                 \
        multiply_planes(m, format, rows);                                                      \
        break;
#define ROWS_1(format) ROWS(format, 1)
#define ROWS_4(format) ROWS_1(format) ROWS(format, 2) ROWS(format, 3) ROWS(format, 4)
#define ROWS_12(format)                                                                        \
    ROWS_4(format) ROWS(format, 5) ROWS(format, 6) ROWS(format, 7) ROWS(format, 8)             \
    ROWS(format, 9) ROWS(format, 10) ROWS(format, 11) ROWS(format, 12)
#define KERNEL_(name, format, most)                                                            \
    static void multiply_##name(const multiplication *m) {                                     \
        switch (m->rows) { ROWS_##most(format) }                                               \
    }
#define KERNEL_UP_TO(name, format, most) KERNEL_(name, format, most)
#define KERNEL(name, format) KERNEL_UP_TO(name, format, REGISTER_ROWS)
KERNEL(int2, AP_INT2)
KERNEL(int3, AP_INT3)
KERNEL(int4, AP_INT4)
KERNEL(int5, AP_INT5)
KERNEL(int6, AP_INT6)
KERNEL(iq4, AP_IQ4)
KERNEL(iq3, AP_IQ2)
#undef ROWS
#undef ROWS_1
#undef ROWS_4
#undef ROWS_12
#undef KERNEL_
#undef KERNEL_UP_TO
#undef KERNEL

static void multiply_in_planes(multiplication m) {
    switch (m.w->format) {
        case AP_INT2:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_int2);
            break;
        case AP_INT3:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_int3);
            break;
        case AP_INT4:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_int4);
            break;
        case AP_INT5:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_int5);
            break;
        case AP_INT6:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_int6);
            break;
        case AP_IQ4:
        case AP_IQ3_S:
        case AP_IQ3_XXS:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_iq4);
            break;
        case AP_IQ2:
        case AP_IQ1:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_iq3);
            break;
    }
}

#endif
