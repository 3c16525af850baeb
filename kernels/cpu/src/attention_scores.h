/* Scores of query rows against the keys of pages: q . k * scale, one vector a page and row.
 *
 * Float keys are multiplied in the order of the dimensions. For integer keys the query becomes
 * integers of 14 bits in two parts from -64 to 64: 128 * high + low. For sealed keys the query has
 * 8 bits and is quantized anew for each block; its squared error is at most a tenth of the keys'
 * own, with a head_dim of 64. Integer sums are exact, so the result does not depend on the number
 * of rows and pages that are multiplied together.
 */
#ifndef AP_ATTENTION_SCORES_H
#define AP_ATTENTION_SCORES_H

#include "attention_seal.h"

enum {
    SPLIT_TOKENS = 256, /* sequences are cut at its multiples: benchmark cpu_attention */
    SPLIT_PAGES = SPLIT_TOKENS / AP_LANES,
    TILE_PAGES = 4, /* pages whose values are summed as integers */
    MOST_ROWS = 24, /* of a KV head in a block: a split's scores stay in the L1 cache */
    QUERY_HIGHEST = 64 * 128,
    SEALED_QUERY_HIGHEST = 127,
};

#define LOG2_E 1.44269504088896341f /* scores are exponents of 2 */

/* The query of a row, and the factors of its scores. */
typedef struct {
    const float *query; /* (head_dim,), for float keys */
    const int8_t *high; /* (head_dim,), for integer keys */
    const int8_t *low;
    int32_t sum; /* of the integers 128 * high + low */
    float scale;
    float offset; /* added to all scores of a block, sealed keys */
} query_row;

/* Split x into integer parts, given its highest magnitude; parts has room for 2 * dim. */
INLINE void integer_query(const float *x, float highest, int32_t dim, float scale, int8_t *parts,
                          query_row *row) {
    row->scale = highest / QUERY_HIGHEST * scale;
    row->high = parts;
    row->low = parts + dim;
    row->sum = 0;
    if (!(highest > 1e-30f)) { /* all zero, or not finite: then the scale is NaN */
        memset(parts, 0, 2 * (size_t)dim);
        return;
    }
    float inverse = QUERY_HIGHEST / highest;
    vint sum = vi_zero();
    for (int32_t d = 0; d < dim; d += 16) {
        vint whole = vi_round(vf_mul(vf_load(x + d), vf_set(inverse)));
        vint high = vi_round(vf_mul(vf_from_int(whole), vf_set(1.0f / 128.0f)));
        sum = vi_add(sum, whole);
        vi_store_bytes(parts + d, high);
        vi_store_bytes(parts + dim + d, vi_sub(whole, vi_shift_left(high, 7)));
    }
    row->sum = vi_sum(sum);
}

/* Prepare a row's query, rotated as the keys are. Keys of AP_SEALED need a query per block: see
 * `seal_query`. */
static void prepare_query(int format, const float *x, int32_t dim, float scale, int8_t *parts,
                          query_row *row) {
    float rotated[MAX_HEAD_DIM];
    row->query = x;
    row->scale = scale;
    if (!is_integer(format) || format == AP_SEALED) return;
    if (format == AP_INT4) {
        rotate(x, dim, rotated);
        x = rotated;
    }
    integer_query(x, highest_magnitude(x, dim), dim, scale, parts, row);
}

/* Prepare a row's query for one sealed block: multiply it by the keys' scales, and reduce their
 * offsets to one number. page: the block's two; codes has room for dim. */
INLINE void seal_query(const query_row *row, const uint8_t *const *page, int32_t at, int32_t dim,
                       int8_t *codes, query_row *out) {
    const uint16_t *scales = (const uint16_t *)(const void *)(page[0] + at);
    const uint16_t *offsets = (const uint16_t *)(const void *)(page[1] + at);
    float scaled[MAX_HEAD_DIM];
    vfloat sum = vf_zero();
    vint highest = vi_zero();
    for (int32_t d = 0; d < dim; d += 16) {
        vfloat query = vf_load(row->query + d), x = vf_mul(query, vf_load_half(scales + d));
        sum = vf_fma(query, vf_load_half(offsets + d), sum);
        highest = vi_max(highest, vi_magnitude_bits(x));
        vf_store(scaled + d, x);
    }
    int32_t bits = vi_highest(highest);
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude = magnitude < INFINITY ? magnitude : NAN;
    out->scale = magnitude * (1.0f / SEALED_QUERY_HIGHEST) * row->scale;
    out->offset = vf_sum(sum) * row->scale;
    out->high = codes;
    out->sum = 0;
    if (!(magnitude > 1e-30f)) { /* all zero, or not finite: then the scale is NaN */
        memset(codes, 0, (size_t)dim);
        return;
    }
    vfloat inverse = vf_set(SEALED_QUERY_HIGHEST / magnitude);
    vint whole_sum = vi_zero();
    for (int32_t d = 0; d < dim; d += 16) {
        vint whole = vi_round(vf_mul(vf_load(scaled + d), inverse));
        whole_sum = vi_add(whole_sum, whole);
        vi_store_bytes(codes + d, whole);
    }
    out->sum = vi_sum(whole_sum);
}

INLINE vfloat load_floats(int format, const uint8_t *p, int64_t index) {
    if (format == AP_F32) return vf_load((const float *)(const void *)p + index);
    if (format == AP_F16) return vf_load_half((const uint16_t *)(const void *)p + index);
    if (format == AP_FP8) return vf_load_fp8(p + index);
    return vf_load_bfloat((const uint16_t *)(const void *)p + index);
}

INLINE vfloat page_scales(const uint8_t *p) {
    return vf_load_half((const uint16_t *)(const void *)p);
}

/* Prefetch a line of the keys and of the values of the pages one tile ahead. The processor's own
 * prefetcher is too slow for integer pages; for float pages this gained nothing. */
INLINE void prefetch_ahead(const int pages, const uint8_t *const *page, int32_t at,
                           int32_t values) {
    UNROLL for (int p = 0; p < pages; p++) {
        prefetch(page[p + TILE_PAGES] + at);
        prefetch(page[p + TILE_PAGES] + values + at);
    }
}

/* Score a constant number of rows against a constant number of pages. A row's scores are MOST_ROWS
 * vectors apart from page to page. Sum i belongs to row i % rows and page i / rows: compilers
 * unroll such a flat loop early enough to keep the sums in registers. */
INLINE void float_scores(int format, const int rows, const int pages, const query_row *row,
                         const uint8_t *const *page, int32_t dim, float *scores) {
    vfloat sum[16];
    UNROLL for (int i = 0; i < rows * pages; i++) sum[i] = vf_zero();
    for (int32_t d = 0; d < dim; d++)
        UNROLL for (int i = 0; i < rows * pages; i++)
            sum[i] = vf_fma(vf_set(row[i % rows].query[d]),
                            load_floats(format, page[i / rows], 16 * (int64_t)d), sum[i]);
    UNROLL for (int i = 0; i < rows * pages; i++)
        vf_store(scores + (i / rows * MOST_ROWS + i % rows) * 16,
                 vf_mul(sum[i], vf_set(row[i % rows].scale)));
}

INLINE void integer_scores(int format, const int rows, const int pages, const query_row *row,
                           const uint8_t *const *page, int32_t dim, float *scores) {
    vint high[16], low[16];
    UNROLL for (int i = 0; i < rows * pages; i++) {
        high[i] = vi_zero();
        /* codes of 8 bits are stored with 128 added, sealed ones with KEY_CENTRE */
        int centre = has_byte_keys(format) ? 128 : format == AP_SEALED ? KEY_CENTRE : 0;
        low[i] = vi_set(-centre * row[i % rows].sum);
        if (format == AP_SEALED) high[i] = low[i];
    }
    int32_t values = page_of(format, dim).values;
    if (has_byte_keys(format))
        for (int32_t d = 0; d < dim; d += 4) {
            prefetch_ahead(pages, page, 16 * d, values);
            UNROLL for (int i = 0; i < rows * pages; i++) {
                vbyte key = vb_load(page[i / rows] + 16 * d);
                high[i] = vi_dot_small(high[i], key, row[i % rows].high + d);
                low[i] = vi_dot_small(low[i], key, row[i % rows].low + d);
            }
        }
    else
        for (int32_t d = 0; d < dim; d += 8) {
            prefetch_ahead(pages, page, 8 * d, values);
            UNROLL for (int i = 0; i < rows * pages; i++) {
                vbyte both = vb_load(page[i / rows] + 8 * d);
                high[i] = vi_dot_nibbles(high[i], vb_low(both), row[i % rows].high + d);
                high[i] = vi_dot_nibbles(high[i], vb_high(both), row[i % rows].high + d + 4);
                if (format == AP_SEALED) continue;
                low[i] = vi_dot_nibbles(low[i], vb_low(both), row[i % rows].low + d);
                low[i] = vi_dot_nibbles(low[i], vb_high(both), row[i % rows].low + d + 4);
            }
        }
    int32_t scales = page_of(format, dim).scales;
    UNROLL for (int i = 0; i < rows * pages; i++) {
        const query_row *of = row + i % rows;
        const uint8_t *at = page[i / rows] + scales;
        bool one_part = format == AP_SEALED;
        vfloat sum = vf_from_int(one_part ? high[i] : vi_add(vi_shift_left(high[i], 7), low[i]));
        if (format == AP_INT4)
            sum = vf_fma(page_scales(at + 32), vf_set((float)of->sum), sum);
        if (format == AP_SEALED)
            sum = vf_fma(sum, vf_set(of->scale), vf_set(of->offset));
        else
            sum = vf_mul(sum, vf_mul(page_scales(at), vf_set(of->scale)));
        vf_store(scores + (i / rows * MOST_ROWS + i % rows) * 16, sum);
    }
}

/* One function each: compilers keep the sums in registers only in small functions. */
typedef void (*scores_kernel)(const query_row *, const uint8_t *const *, int32_t, float *);
#define KERNEL(kind, format, rows, pages)                                                      \
    static void scores_##format##_##rows(const query_row *row, const uint8_t *const *page,     \
                                         int32_t dim, float *scores) {                         \
        kind##_scores(AP_##format, rows, pages, row, page, dim, scores);                       \
    }
#if VECTORS >= 32
#define KERNELS(kind, format)                                                                  \
    KERNEL(kind, format, 1, 4) KERNEL(kind, format, 2, 4) KERNEL(kind, format, 3, 4)           \
    KERNEL(kind, format, 4, 2)
/* the two pages of a block */
#define SEALED_KERNELS                                                                         \
    KERNEL(integer, SEALED, 1, 2) KERNEL(integer, SEALED, 2, 2) KERNEL(integer, SEALED, 3, 2)  \
    KERNEL(integer, SEALED, 4, 2)
#define TABLE(format) \
    {scores_##format##_1, scores_##format##_2, scores_##format##_3, scores_##format##_4}
enum { MOST_ROWS_OF_SCORES = 4 };
static const int32_t pages_of_scores[] = {4, 4, 4, 2};
#else
#define KERNELS(kind, format) KERNEL(kind, format, 1, 2) KERNEL(kind, format, 2, 1)
#define SEALED_KERNELS KERNELS(integer, SEALED)
#define TABLE(format) {scores_##format##_1, scores_##format##_2}
enum { MOST_ROWS_OF_SCORES = 2 };
static const int32_t pages_of_scores[] = {2, 1};
#endif
KERNELS(float, F32)
KERNELS(float, F16)
KERNELS(float, BF16)
KERNELS(integer, INT8)
KERNELS(integer, INT4)
KERNELS(float, FP8)
KERNELS(integer, K8V4)
SEALED_KERNELS

static const scores_kernel scores_kernels[AP_NUM_FORMATS][MOST_ROWS_OF_SCORES] = {
    [AP_F32] = TABLE(F32),   [AP_F16] = TABLE(F16),       [AP_BF16] = TABLE(BF16),
    [AP_INT8] = TABLE(INT8), [AP_INT4] = TABLE(INT4),     [AP_SEALED] = TABLE(SEALED),
    [AP_FP8] = TABLE(FP8),   [AP_K8V4] = TABLE(K8V4),
};
#undef TABLE
#undef SEALED_KERNELS
#undef KERNELS
#undef KERNEL

/* Rows to compute together, of `left`: 3 and 4 are best, 1 is worst. */
INLINE int32_t next_rows(int32_t left) {
    if (left <= MOST_ROWS_OF_SCORES) return left;
    if (MOST_ROWS_OF_SCORES == 2) return 2;
    return left % 4 == 1 || left % 4 == 2 ? 3 : 4;
}

/* Score all rows against the two pages of a sealed block; codes has room for dim of each row. */
INLINE void sealed_scores(int32_t rows, const query_row *row, const uint8_t *const *page,
                          int32_t dim, int8_t *codes, float *scores) {
    query_row of_block[MOST_ROWS];
    int32_t channels = page_of(AP_SEALED, dim).channels;
    for (int32_t m = 0; m < rows; m++)
        seal_query(row + m, page, channels, dim, codes + dim * m, of_block + m);
    for (int32_t m = 0, together; m < rows; m += together) {
        together = next_rows(rows - m);
        int32_t pages = pages_of_scores[together - 1] < 2 ? 1 : 2;
        for (int32_t p = 0; p < 2; p += pages)
            scores_kernels[AP_SEALED][together - 1](of_block + m, page + p, dim,
                                                    scores + (p * MOST_ROWS + m) * 16);
    }
}

/* Score all rows against TILE_PAGES pages; the sums of each call fit the registers. */
INLINE void tile_scores(int format, int32_t rows, const query_row *row,
                        const uint8_t *const *page, int32_t dim, float *scores) {
    for (int32_t m = 0, together; m < rows; m += together) {
        together = next_rows(rows - m);
        int32_t pages = pages_of_scores[together - 1];
        for (int32_t p = 0; p < TILE_PAGES; p += pages)
            scores_kernels[format][together - 1](row + m, page + p, dim,
                                                 scores + (p * MOST_ROWS + m) * 16);
    }
}

#endif
