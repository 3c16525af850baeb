/* Softmax and sum of values over the tokens of one split, from their scores.
 *
 * With integer values a weight times its token's scale becomes an integer of 14 bits in two parts
 * of 7; the largest of a tile becomes the largest integer. So a tile's sum is exact, too.
 */
#ifndef AP_ATTENTION_VALUES_H
#define AP_ATTENTION_VALUES_H

#include "attention_scores.h"

enum { WEIGHT_HIGHEST = (1 << 14) - 1, TILE_TOKENS = TILE_PAGES * AP_LANES };

/* The tokens that a row sees: first .. last - 1 of its sequence. */
typedef struct {
    int32_t first;
    int32_t last;
} visible_tokens;

/* a in the lanes of the page at `token` that are seen, b in the others */
INLINE vfloat seen_lanes(visible_tokens seen, int32_t token, vfloat a, vfloat b) {
    int32_t first = seen.first - token, last = seen.last - token;
    first = first < 0 ? 0 : first > 16 ? 16 : first;
    last = last < 0 ? 0 : last > 16 ? 16 : last;
    return vf_first(first, b, vf_first(last, a, b));
}

INLINE bool sees_all(visible_tokens seen, int32_t token, int32_t count) {
    return seen.first <= token && token + count <= seen.last;
}

/* The highest score of a row, in all lanes; `scores` lie page after page. With a cap c they arrive
 * divided by c, and become c * tanh(score). */
static vfloat highest_score(float *scores, int32_t pages, int32_t token, visible_tokens seen,
                            float cap) {
    vfloat highest = vf_set(-INFINITY);
    for (int32_t p = 0; p < pages; p++, token += AP_LANES) {
        float *at = scores + p * MOST_ROWS * 16;
        vfloat score = vf_load(at);
        if (cap != 0.0f) {
            score = vf_mul(vf_tanh(score), vf_set(cap));
            vf_store(at, score);
        }
        if (!sees_all(seen, token, AP_LANES))
            score = seen_lanes(seen, token, score, vf_set(-INFINITY));
        highest = vf_max(highest, score);
    }
    return vf_set(vf_highest(highest));
}

/* A row's state over the tiles of a split. */
typedef struct {
    vfloat highest;
    vfloat sum;    /* of the weights, lane by lane */
    vfloat offset; /* of the weights times the offsets of 4-bit values, lane by lane */
} row_softmax;

/* Compute the weights of a row and tile. For float values they replace the scores; for integer
 * values they become integers, parts (2, TILE_TOKENS), and the value of one unit is returned.
 * `scales` are the tile's value scales, then offsets. */
INLINE float tile_weights(int format, bool sees_tile, row_softmax *row, float *scores,
                          const float *scales, int32_t token, visible_tokens seen,
                          uint8_t *parts) {
    vfloat weight[TILE_PAGES], most = vf_zero();
    UNROLL for (int p = 0; p < TILE_PAGES; p++) {
        weight[p] = vf_exp2(vf_sub(vf_load(scores + p * MOST_ROWS * 16), row->highest));
        if (!sees_tile)
            weight[p] = seen_lanes(seen, token + 16 * p, weight[p], vf_zero());
        row->sum = vf_add(row->sum, weight[p]);
    }
    if (!is_integer(format)) {
        UNROLL for (int p = 0; p < TILE_PAGES; p++)
            vf_store(scores + p * MOST_ROWS * 16, weight[p]);
        return 0.0f;
    }
    UNROLL for (int p = 0; p < TILE_PAGES; p++) {
        vfloat scale = vf_load(scales + 16 * p);
        if (!sees_tile) scale = seen_lanes(seen, token + 16 * p, scale, vf_zero());
        weight[p] = vf_mul(weight[p], scale);
        most = vf_max(most, weight[p]);
    }
    float highest = vf_highest(most), step = highest * (1.0f / WEIGHT_HIGHEST);
    vfloat inverse = vf_set(highest > 1e-30f ? WEIGHT_HIGHEST / highest : 0.0f);
    vint whole[TILE_PAGES];
    UNROLL for (int p = 0; p < TILE_PAGES; p++) whole[p] = vi_round(vf_mul(weight[p], inverse));
    vi_store_sevens(parts, parts + TILE_TOKENS, whole[0], whole[1], whole[2], whole[3]);
    if (!has_byte_values(format)) {
        vfloat sum = vf_zero();
        UNROLL for (int p = 0; p < TILE_PAGES; p++) {
            vfloat offset = vf_load(scales + TILE_TOKENS + 16 * p);
            if (!sees_tile) offset = seen_lanes(seen, token + 16 * p, offset, vf_zero());
            sum = vf_fma(vf_from_int(whole[p]), offset, sum);
        }
        row->offset = vf_fma(sum, vf_set(step), row->offset);
    }
    return step;
}

/* out[m] += weights . values for a constant number of rows and of vectors, from dimension
 * 16 * first on. With 4 bits `first` is even, and `count` too except at an odd end. Sum i is that
 * of row i / count and vector i % count. */
INLINE void integer_values(int format, const int rows, const int count, int32_t first_page,
                           int32_t last_page, const uint8_t *const *page, int32_t dim,
                           int32_t first, const uint8_t *parts, const float *step, float *out,
                           int32_t stride) {
    vint high[12], low[12];
    int32_t values = page_of(format, dim).values;
    int32_t group_bytes = has_byte_values(format) ? 4 * dim : (dim + 31) / 32 * 64;
    UNROLL for (int i = 0; i < rows * count; i++) high[i] = low[i] = vi_zero();
    for (int32_t p = first_page; p < last_page; p++)
        for (int g = 0; g < 4; g++) { /* groups of 4 tokens */
            const uint8_t *at = page[p] + values + g * group_bytes;
            const uint8_t *weights = parts + 16 * g + 4 * p;
            UNROLL for (int i = 0; i < rows * count; i++) {
                int c = first + i % count;
                const uint8_t *weight = weights + 2 * TILE_TOKENS * (i / count);
                vbyte value;
                if (has_byte_values(format))
                    value = vb_load(at + 64 * c);
                else if (i % count % 2)
                    value = vb_high(vb_load(at + 32 * (c - 1)));
                else
                    value = vb_low(vb_load(at + 32 * c));
                high[i] = vi_dot_signed(high[i], weight, value);
                low[i] = vi_dot_signed(low[i], weight + TILE_TOKENS, value);
            }
        }
    UNROLL for (int i = 0; i < rows * count; i++) {
        float *to = out + (int64_t)(i / count) * stride + 16 * (first + i % count);
        vfloat sum = vf_from_int(vi_add(vi_shift_left(high[i], 7), low[i]));
        vf_store(to, vf_fma(sum, vf_set(step[i / count]), vf_load(to)));
    }
}

/* The same for float values of one page, tokens first_token .. last_token - 1 of it; weights are
 * 16 floats apart from row to row. */
INLINE void float_values(int format, const int rows, const int count, const uint8_t *page,
                         int32_t dim, int32_t first, int32_t first_token, int32_t last_token,
                         const float *weights, float *out, int32_t stride) {
    vfloat sum[12];
    int32_t values = page_of(format, dim).values;
    UNROLL for (int i = 0; i < rows * count; i++)
        sum[i] = vf_load(out + (int64_t)(i / count) * stride + 16 * (first + i % count));
    for (int32_t t = first_token; t < last_token; t++)
        UNROLL for (int i = 0; i < rows * count; i++) {
            int64_t index = (int64_t)t * dim + 16 * (first + i % count);
            sum[i] = vf_fma(vf_set(weights[i / count * 16 + t]),
                            load_floats(format, page + values, index), sum[i]);
        }
    UNROLL for (int i = 0; i < rows * count; i++)
        vf_store(out + (int64_t)(i / count) * stride + 16 * (first + i % count), sum[i]);
}

/* The operands of a tile's sum of values. */
typedef struct {
    int32_t dim;
    int32_t first_page; /* first_page .. last_page - 1 are used */
    int32_t last_page;
    int32_t token; /* of page 0 */
    const uint8_t *const *page;
    const visible_tokens *seen; /* of each row */
    const float *weights;       /* (pages, MOST_ROWS, 16), float values */
    const uint8_t *parts;       /* (rows, 2, TILE_TOKENS), integer values */
    const float *step;          /* of each row, integer values */
    float *out;                 /* of each row */
    int32_t stride;
} value_tile;

/* Add a constant number of rows and vectors. A page that some row sees only in part is done row by
 * row: tokens that a row does not see may not be finite, so they are not read. */
INLINE void values_of(int format, const int rows, const int count, const value_tile *tile,
                      int32_t row, int32_t first) {
    float *out = tile->out + (int64_t)row * tile->stride;
    if (is_integer(format)) {
        integer_values(format, rows, count, tile->first_page, tile->last_page, tile->page,
                       tile->dim, first, tile->parts + 2 * TILE_TOKENS * row, tile->step + row,
                       out, tile->stride);
        return;
    }
    for (int32_t p = tile->first_page; p < tile->last_page; p++) {
        int32_t token = tile->token + p * AP_LANES;
        const float *weights = tile->weights + (MOST_ROWS * p + row) * 16;
        bool all = true;
        for (int m = 0; m < rows; m++)
            all &= sees_all(tile->seen[row + m], token, AP_LANES);
        if (all) {
            float_values(format, rows, count, tile->page[p], tile->dim, first, 0, AP_LANES,
                         weights, out, tile->stride);
            continue;
        }
        for (int m = 0; m < rows; m++) {
            int32_t from = tile->seen[row + m].first - token, to = tile->seen[row + m].last - token;
            float_values(format, 1, count, tile->page[p], tile->dim, first, from < 0 ? 0 : from,
                         to > AP_LANES ? AP_LANES : to, weights + 16 * m,
                         out + (int64_t)m * tile->stride, tile->stride);
        }
    }
}

typedef void (*values_kernel)(const value_tile *, int32_t, int32_t);
#define KERNEL(format, rows, count)                                                            \
    static void values_##format##_##rows##_##count(const value_tile *tile, int32_t row,        \
                                                   int32_t first) {                            \
        values_of(AP_##format, rows, count, tile, row, first);                                 \
    }
#if VECTORS < 32
#define KERNELS(format) KERNEL(format, 1, 1) KERNEL(format, 1, 2) KERNEL(format, 1, 4)
#define TABLE(format) \
    { {values_##format##_1_1, values_##format##_1_2, values_##format##_1_4} }
enum { MOST_ROWS_OF_VALUES = 1 };
#else
#define KERNELS(format)                                                                        \
    KERNEL(format, 1, 1) KERNEL(format, 1, 2) KERNEL(format, 1, 4)                             \
    KERNEL(format, 2, 1) KERNEL(format, 2, 2) KERNEL(format, 2, 4)                             \
    KERNEL(format, 3, 1) KERNEL(format, 3, 2) KERNEL(format, 3, 4)                             \
    KERNEL(format, 4, 1) KERNEL(format, 4, 2)
#define TABLE(format)                                                                          \
    {                                                                                          \
        {values_##format##_1_1, values_##format##_1_2, values_##format##_1_4},                 \
        {values_##format##_2_1, values_##format##_2_2, values_##format##_2_4},                 \
        {values_##format##_3_1, values_##format##_3_2, values_##format##_3_4},                 \
        {values_##format##_4_1, values_##format##_4_2},                                        \
    }
enum { MOST_ROWS_OF_VALUES = 4 };
#endif
KERNELS(F32)
KERNELS(F16)
KERNELS(BF16)
KERNELS(INT8)
KERNELS(INT4)
KERNELS(SEALED)
KERNELS(FP8)
KERNELS(K8V4)

static const values_kernel values_kernels[AP_NUM_FORMATS][MOST_ROWS_OF_VALUES][3] = {
    [AP_F32] = TABLE(F32),   [AP_F16] = TABLE(F16),       [AP_BF16] = TABLE(BF16),
    [AP_INT8] = TABLE(INT8), [AP_INT4] = TABLE(INT4),     [AP_SEALED] = TABLE(SEALED),
    [AP_FP8] = TABLE(FP8),   [AP_K8V4] = TABLE(K8V4),
};
#undef TABLE
#undef KERNELS
#undef KERNEL

/* Add all rows and dimensions of a tile; the sums of each call fit the registers. */
INLINE void tile_values(int format, int32_t rows, const value_tile *tile) {
    int32_t vectors = tile->dim / 16;
    for (int32_t m = 0, together; m < rows; m += together) {
        together = VECTORS < 32 ? 1 : next_rows(rows - m);
        int32_t widest = (VECTORS < 32 && is_integer(format)) || together == 4 ? 2 : 4;
        for (int32_t c = 0, count; c < vectors; c += count) {
            int32_t left = vectors - c;
            count = left >= widest ? widest : left >= 2 ? 2 : 1;
            values_kernels[format][together - 1][count / 2](tile, m, c);
        }
    }
}

#endif
