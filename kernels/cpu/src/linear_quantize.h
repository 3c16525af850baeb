/* Quantizes rows of activations, so that their products with a weight's codes are integer sums.
 *
 * Every 16 inputs have a scale, however large the weight's groups are: with 32 the likeliest token
 * changed at 3.1 % of positions (SmolLM2-135M), with 16 at 2.1 %
 * (scripts/benchmark cpu_quality). */
#ifndef AP_LINEAR_QUANTIZE_H
#define AP_LINEAR_QUANTIZE_H

#include "engine.h"
#include "half.h"
#include "linear_layout.h"

#define INPUTS_PER_SCALE 16

/* The scale of 16 inputs of a row, and numbers derived from it. */
typedef struct {
    float scale; /* x = code * scale, about */
    float lift;  /* -VI_BIAS_FLOAT * scale, see vf_unbias */
    float sum;   /* scale * the sum of the codes; in a group's first: the total over the group */
    /* initial value of a dot product, so that it ends at VI_BIAS + the sum */
    int32_t start_centered_nibbles;
    int32_t start_centered_bytes;
    int32_t start_bytes;
} row_scale;

/* Rows are interleaved in blocks, so that a kernel for several rows reads from one address. */
#define ROWS_SIDE_BY_SIDE 12

/* The rows that a linear multiplies: float32, and for integer weights quantized per group. */
typedef struct {
    const float *x; /* (rows, stride) */
    const int32_t *rows_of_x; /* (rows,), the place of each row in x; NULL: in order */
    int32_t stride;
    int32_t rows;
    int32_t group;     /* of the weight to multiply by; 0: not quantized */
    const int32_t *order; /* of their columns in the quantized form: see ap_linear.input_order */
    bool rotated;         /* in the quantized form: of a trellis */
    int8_t *codes;     /* block after block: (in_features / 4, rows of the block, 4), -127 .. 127 */
    row_scale *scales; /* block after block: (in_features / 16, rows of the block) */
    /* (rows / 16, in_features / 32, INPUT_PARTS, 16, 32) bfloat16, both quotients rounded up: see
     * linear_split.h; NULL: not split */
    uint16_t *parts;
    bool is_split;
} rows_in;

/* bytes of workspace for the quantized form of `rows` rows */
static int64_t quantized_bytes(int32_t rows, int32_t width, int32_t group) {
    if (!group) return 0;
    int64_t scales = (int64_t)rows * (width / INPUTS_PER_SCALE) * (int64_t)sizeof(row_scale);
    return ap_claim_bytes((int64_t)rows * width) + ap_claim_bytes(scales);
}

/* set the pointers of `in` into `memory` of quantized_bytes, 64-byte aligned */
static void quantized_place(rows_in *in, char *memory, int32_t width) {
    in->codes = (int8_t *)memory;
    in->scales = (row_scale *)(memory + ap_claim_bytes((int64_t)in->rows * width));
}

/* rows in the block of a row, and how many of them precede it */
INLINE int32_t block_rows(const rows_in *in, int32_t row) {
    return smaller(in->rows - row / ROWS_SIDE_BY_SIDE * ROWS_SIDE_BY_SIDE, ROWS_SIDE_BY_SIDE);
}
INLINE int8_t *row_codes(const rows_in *in, int32_t row, int32_t width) {
    int32_t before = row % ROWS_SIDE_BY_SIDE;
    return in->codes + (int64_t)(row - before) * width + 4 * before;
}
INLINE row_scale *row_scales(const rows_in *in, int32_t row, int32_t width) {
    int32_t before = row % ROWS_SIDE_BY_SIDE;
    return in->scales + (int64_t)(row - before) * (width / INPUTS_PER_SCALE) + before;
}

/* Bounds of magnitudes whose scale is a normal number with room for its products. */
#define LARGEST_INPUT 0x1p100f
#define SMALLEST_INPUT 0x1p-100f

/* Quantize 16 inputs; stores the codes in fours, which begin `apart` bytes apart. */
static void quantize_inputs(const float *x, int8_t *codes, int32_t apart, row_scale *out) {
    vfloat inputs = vf_load(x);
    float largest = from_bits((uint32_t)vi_highest(vi_magnitude_bits(inputs)));
    float scale = 0.0f;
    vint code = vi_zero(); /* stays if the inputs are out of bounds */
    if (largest >= SMALLEST_INPUT && largest <= LARGEST_INPUT) {
        code = vi_round(vf_mul(inputs, vf_set(127.0f / largest)));
        /* two bits shorter, so that 3 * scale is a float and `lift` is exact */
        scale = from_bits((to_bits(largest / 127.0f) + 2u) & ~3u);
    } else if (!(largest < SMALLEST_INPUT)) {
        scale = NAN; /* which the engine finds in the result */
    }
    int8_t bytes[INPUTS_PER_SCALE];
    vi_store_bytes(bytes, code);
    for (int i = 0; i < INPUTS_PER_SCALE; i += 4, codes += apart) memcpy(codes, bytes + i, 4);
    int32_t sum = vi_sum(code);
    out->scale = scale;
    out->lift = -VI_BIAS_FLOAT * scale;
    out->sum = scale * (float)sum;
    out->start_centered_nibbles = VI_BIAS - 8 * sum;
    out->start_centered_bytes = VI_BIAS + (BYTE_ZERO - 128) * sum;
    out->start_bytes = VI_BIAS + BYTE_ZERO * sum;
}

/* one row; `width` is in_features */
static void quantize_row(rows_in *in, int32_t row, int32_t width) {
    int32_t row_of_x = in->rows_of_x ? in->rows_of_x[row] : row;
    const float *x = in->x + (int64_t)row_of_x * in->stride;
    int32_t beside = block_rows(in, row);
    int8_t *codes = row_codes(in, row, width);
    row_scale *out = row_scales(in, row, width), *first = out;
    for (int32_t k = 0; k < width; k += INPUTS_PER_SCALE, out += beside) {
        float gathered[INPUTS_PER_SCALE], turned[TRELLIS_BLOCK];
        for (int32_t i = 0; in->order && i < INPUTS_PER_SCALE; i++)
            gathered[i] = x[in->order[k + i]];
        const float *inputs = in->order ? gathered : x + k;
        if (in->rotated) {
            if (k % TRELLIS_BLOCK == 0) {
                memcpy(turned, x + k, sizeof turned);
                trellis_change_signs(turned);
                trellis_transform(turned);
            }
            inputs = turned + k % TRELLIS_BLOCK;
        }
        quantize_inputs(inputs, codes + (int64_t)k * beside, 4 * beside, out);
        if (k % in->group)
            first->sum += out->sum;
        else
            first = out;
    }
}

#endif
