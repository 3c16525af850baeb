/* Multiplies rows by integer weights: integer sums over 16 inputs, then float sums.
 *
 * A kernel holds the sums of 1 to REGISTER_ROWS rows and one tile in registers, and unpacks the
 * codes there. For 12 rows unpacking costs a tenth of the time, less than an unpacked copy in the
 * cache, which was tried. So were tiles (tiles.h): the sums of 16 inputs must leave them before the
 * next, which takes what their products save.
 */
#ifndef AP_LINEAR_INTEGER_H
#define AP_LINEAR_INTEGER_H

#include "linear_block.h"

/* the most rows whose integer and float sums fit the registers */
#if VECTORS >= 32
#define REGISTER_ROWS 12
#elif VECTORS >= 8
#define REGISTER_ROWS 4
#else
#define REGISTER_ROWS 1
#endif

/* Only E2M1 has scales of E8M0: the constant format removes the test for all others. */
INLINE vfloat load_scale(const void *scales, int64_t index, int32_t scale_format, int format) {
    if (scale_format == AP_F16) return vf_load_half((const uint16_t *)scales + index);
    if (format == AP_E2M1 && scale_format == AP_E8M0) /* a code is twice its value */
        return vf_mul(vf_load_e8m0((const uint8_t *)scales + index), vf_set(0.5f));
    return vf_load((const float *)scales + index);
}

/* added to code * scale */
INLINE vfloat load_offset(const ap_linear *w, int64_t index, vfloat scale, int format) {
    vfloat offset = load_scale(w->offsets, index, w->scale_format, format);
    return w->offset_kind == AP_ADDITIVE ? offset : vf_fnma(offset, scale, vf_zero());
}

INLINE void prefetch_scales(const ap_linear *w, int64_t index, int format) {
    int32_t few = w->scale_format == AP_F16 ? 2 : 4;
    int64_t byte = index * (format == AP_E2M1 ? scale_bytes(w->scale_format) : few);
    prefetch((const char *)w->scales + byte);
    if (w->offset_kind != AP_CENTERED) prefetch((const char *)w->offsets + byte);
}

#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)

#ifndef SUM_NOW
#define SUM_NOW(sums) ((void)(sums))
#endif
/* one row's products fit the registers */
#define SUM_ROWS_NOW(sums)                                                                     \
    if (rows > 1) EACH_ROW SUM_NOW((sums)[r])

/* The initial value of dot products of 16 inputs, which end at VI_BIAS + the sum. */
INLINE void start_dots(const ap_linear *w, const row_scale *row, int format, int rows, vint *dot) {
    if (format == AP_E2M1) { /* E2M1_ZERO is one and a half times 8 */
        EACH_ROW dot[r] = vi_set(row[r].start_centered_nibbles +
                                 (row[r].start_centered_nibbles - VI_BIAS) / 2);
    } else if (w->offset_kind == AP_CENTERED) {
        EACH_ROW dot[r] = vi_set(format == AP_INT4 ? row[r].start_centered_nibbles
                                                   : row[r].start_centered_bytes);
    } else {
        EACH_ROW dot[r] = vi_set(format == AP_INT4 || !BYTE_ZERO ? VI_BIAS : row[r].start_bytes);
    }
}

/* Add products of 16 inputs: 128 bytes of codes, and rows with x_step bytes between groups of four
 * inputs. E2M1 becomes twice its value + E2M1_ZERO: integers from 0 to 24. */
INLINE void add_dots_nibbles(const uint8_t *codes, const int8_t *x, ptrdiff_t x_step, int format,
                             int rows, vint *dot) {
    vpart part[REGISTER_ROWS];
    EACH_ROW part[r] = vp_begin(dot[r]);
    UNROLL for (int i = 0; i < 2; i++, codes += 64) {
        vbyte packed = vb_load(codes), low = vb_low(packed), high = vb_high(packed);
        prefetch(codes + PREFETCH_BYTES);
        if (format == AP_E2M1)
            low = vb_lookup(low, e2m1_values), high = vb_lookup(high, e2m1_values);
        EACH_ROW part[r] = vp_dot_nibbles(part[r], low, x + 4 * r);
        SUM_ROWS_NOW(part);
        x += x_step;
        EACH_ROW part[r] = vp_dot_nibbles(part[r], high, x + 4 * r);
        SUM_ROWS_NOW(part);
        x += x_step;
    }
    EACH_ROW dot[r] = vp_end(part[r], dot[r]);
}

/* The same for 256 bytes of codes. */
INLINE void add_dots_bytes(const uint8_t *codes, const int8_t *x, ptrdiff_t x_step, int rows,
                           vint *dot) {
    UNROLL for (int i = 0; i < 4; i++, codes += 64, x += x_step) {
        vbyte packed = vb_load(codes);
        prefetch(codes + PREFETCH_BYTES);
        EACH_ROW dot[r] = vi_dot_bytes(dot[r], packed, x + 4 * r);
        SUM_ROWS_NOW(dot);
    }
}

/* m->rows is `rows`, a constant like `format`, so that the sums stay in registers. Each sum takes
 * the same float operations in the same order for any number of rows. */
INLINE void multiply_integer(const multiplication *m, int format, int rows) {
    const ap_linear *w = m->w;
    const int32_t groups = num_groups(w), sixteens = w->group / INPUTS_PER_SCALE;
    const ptrdiff_t beside = block_rows(m->in, m->row), code_bytes = format == AP_INT8 ? 256 : 128;
    const uint8_t *codes = tile_codes(w, m->tile);
    int64_t scale_at = (int64_t)m->tile * groups * AP_LANES;
    fetch_list fetches = m->fetches;
    int64_t scales_ahead = PREFETCH_BYTES / code_bytes / sixteens * AP_LANES;
    for (int32_t tile = m->tile; tile < m->last_tile; tile++) {
        const int8_t *x = row_codes(m->in, m->row, w->in_features);
        const row_scale *row = row_scales(m->in, m->row, w->in_features);
        vfloat acc[REGISTER_ROWS];
        EACH_ROW acc[r] = vf_zero();
        for (int32_t g = 0; g < groups; g++, scale_at += AP_LANES) {
            prefetch_scales(w, scale_at + scales_ahead, format);
            vfloat scale = load_scale(w->scales, scale_at, w->scale_format, format);
            if (format != AP_E2M1 && w->offset_kind != AP_CENTERED) {
                vfloat offset = load_offset(w, scale_at, scale, format);
                EACH_ROW acc[r] = vf_fma(offset, vf_set(row[r].sum), acc[r]);
            }
            for (int32_t i = 0; i < sixteens; i++) {
                vint dot[REGISTER_ROWS];
                fetch_next(&fetches);
                start_dots(w, row, format, rows, dot);
                if (format == AP_INT8)
                    add_dots_bytes(codes, x, 4 * beside, rows, dot);
                else
                    add_dots_nibbles(codes, x, 4 * beside, format, rows, dot);
                EACH_ROW acc[r] =
                    vf_fma(vf_unbias(dot[r], row[r].scale, row[r].lift), scale, acc[r]);
                codes += code_bytes;
                x += INPUTS_PER_SCALE * beside;
                row += beside;
            }
        }
        float sums[REGISTER_ROWS * AP_LANES];
        EACH_ROW vf_store(sums + r * AP_LANES, acc[r]);
        store_outputs(m, tile, sums);
    }
}

/* Add the products of 16 inputs by whole tiles of bytes without scales. */
INLINE void expand_codes(const multiplication *m, int rows) {
    const ptrdiff_t beside = block_rows(m->in, m->row), stride = m->out_stride;
    const uint8_t *codes = tile_codes(m->w, m->tile);
    const int8_t *x = row_codes(m->in, m->row, INPUTS_PER_SCALE);
    const row_scale *row = row_scales(m->in, m->row, INPUTS_PER_SCALE);
    float *out = m->out + m->row * stride + m->tile * AP_LANES;
    for (int32_t tile = m->tile; tile < m->last_tile; tile++, out += AP_LANES) {
        vint dot[REGISTER_ROWS];
        EACH_ROW dot[r] = vi_set(row[r].start_centered_bytes);
        UNROLL for (int i = 0; i < 4; i++, codes += 64) {
            vbyte packed = vb_load(codes);
            EACH_ROW dot[r] = vi_dot_bytes(dot[r], packed, x + 4 * (i * beside + r));
            SUM_ROWS_NOW(dot);
        }
        EACH_ROW {
            vfloat sum = vf_unbias(dot[r], row[r].scale, row[r].lift);
            vf_store(out + r * stride, vf_add(sum, vf_load(out + r * stride)));
        }
    }
}

/* The same as `multiply_integer` for bytes without scales. */
INLINE void multiply_codes(const multiplication *m, int rows) {
    const int32_t inputs = m->w->in_features;
    bool whole = m->last_tile * AP_LANES <= m->w->out_features;
    if (inputs == INPUTS_PER_SCALE && whole && m->add && !m->w->bias) {
        expand_codes(m, rows);
        return;
    }
    const ptrdiff_t beside = block_rows(m->in, m->row);
    const uint8_t *codes = tile_codes(m->w, m->tile);
    for (int32_t tile = m->tile; tile < m->last_tile; tile++) {
        const int8_t *x = row_codes(m->in, m->row, inputs);
        const row_scale *row = row_scales(m->in, m->row, inputs);
        vfloat acc[REGISTER_ROWS];
        EACH_ROW acc[r] = vf_zero();
        for (int32_t k = 0; k < inputs; k += INPUTS_PER_SCALE) {
            vint dot[REGISTER_ROWS];
            EACH_ROW dot[r] = vi_set(row[r].start_centered_bytes);
            add_dots_bytes(codes, x, 4 * beside, rows, dot);
            EACH_ROW acc[r] = vf_add(acc[r], vf_unbias(dot[r], row[r].scale, row[r].lift));
            codes += INPUTS_PER_SCALE * AP_LANES;
            x += INPUTS_PER_SCALE * beside;
            row += beside;
        }
        float sums[REGISTER_ROWS * AP_LANES];
        EACH_ROW vf_store(sums + r * AP_LANES, acc[r]);
        store_outputs(m, tile, sums);
    }
}
#undef EACH_ROW

#define KERNEL(rows)                                                                           \
    static void nibbles_##rows(const multiplication *m) { multiply_integer(m, AP_INT4, rows); } \
    static void e2m1_##rows(const multiplication *m) { multiply_integer(m, AP_E2M1, rows); }    \
    static void bytes_##rows(const multiplication *m) { multiply_integer(m, AP_INT8, rows); }   \
    static void codes_##rows(const multiplication *m) { multiply_codes(m, rows); }
KERNEL(1)
#define TO_1(codes) codes##_1
#if REGISTER_ROWS > 1
KERNEL(2)
KERNEL(3)
KERNEL(4)
#define TO_4(codes) TO_1(codes), codes##_2, codes##_3, codes##_4
#endif
#if REGISTER_ROWS > 4
KERNEL(5)
KERNEL(6)
KERNEL(7)
KERNEL(8)
KERNEL(9)
KERNEL(10)
KERNEL(11)
KERNEL(12)
#define TO_8(codes) TO_4(codes), codes##_5, codes##_6, codes##_7, codes##_8
#define TO_12(codes) TO_8(codes), codes##_9, codes##_10, codes##_11, codes##_12
#endif
#define KERNELS_(codes, rows) {TO_##rows(codes)}
#define KERNELS(codes, rows) KERNELS_(codes, rows)
static const block_kernel integer_kernels[4][REGISTER_ROWS] = {
    KERNELS(bytes, REGISTER_ROWS),
    KERNELS(nibbles, REGISTER_ROWS),
    KERNELS(e2m1, REGISTER_ROWS),
    KERNELS(codes, REGISTER_ROWS),
};
#undef KERNEL
#undef KERNELS
#undef KERNELS_

static void multiply_bytes(const multiplication *m) { integer_kernels[0][m->rows - 1](m); }
static void multiply_nibbles(const multiplication *m) { integer_kernels[1][m->rows - 1](m); }
static void multiply_e2m1(const multiplication *m) { integer_kernels[2][m->rows - 1](m); }
static void multiply_unscaled(const multiplication *m) { integer_kernels[3][m->rows - 1](m); }

#endif
