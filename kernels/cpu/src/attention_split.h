/* Attends to one split of a sequence's tokens with a block of query rows, and merges splits.
 *
 * A sequence is cut at multiples of SPLIT_TOKENS whatever the batch, and a row's splits are merged
 * from the first to the last, so its result does not depend on what else is computed.
 */
#ifndef AP_ATTENTION_SPLIT_H
#define AP_ATTENTION_SPLIT_H

#include "attention_values.h"

/* A row's result of one split: `highest` and `sum` in all lanes, then head_dim values. */
enum { HIGHEST_AT = 0, SUM_AT = 16, VALUES_AT = 32 };

INLINE int32_t partial_stride(int32_t head_dim) { return VALUES_AT + head_dim; }

/* Rows of one KV head that read its pages together. In a sealed layer there are two: one for the
 * pages of sealed blocks, then one for those of open blocks. */
typedef struct {
    const ap_attention *attention;
    page_store store;
    float value_scale; /* multiplies all values, AP_FP8 */
    int32_t kv_head;
    int32_t rows;
    const int32_t *block_table;
    visible_tokens any; /* that any of its rows sees */
    visible_tokens seen[MOST_ROWS];
    query_row query[MOST_ROWS];
    float *out[MOST_ROWS];
    float sink[MOST_ROWS]; /* a base-2 score without a value, if the layer has sinks */
} query_block;

/* A worker's scratch memory. */
typedef struct {
    float scores[SPLIT_PAGES * MOST_ROWS * 16];
    float partial[MOST_ROWS * (VALUES_AT + MAX_HEAD_DIM)];
    float merged[MOST_ROWS * VALUES_AT]; /* highest and sum of the splits so far */
    row_softmax softmax[MOST_ROWS];
    float scales[2 * TILE_TOKENS];
    float step[MOST_ROWS];
    const uint8_t *page[SPLIT_PAGES + 2 * TILE_PAGES];
    int8_t query_parts[MOST_ROWS * 2 * MAX_HEAD_DIM];
    int8_t open_query_parts[MOST_ROWS * 2 * MAX_HEAD_DIM];
    uint8_t weight_parts[MOST_ROWS * 2 * TILE_TOKENS];
    query_block block;
    query_block open; /* sealed layers */
} attention_scratch;

INLINE int32_t first_split(visible_tokens seen) { return seen.first / SPLIT_TOKENS; }
/* equals first_split if nothing is seen */
INLINE int32_t end_split(visible_tokens seen) {
    if (seen.first >= seen.last) return first_split(seen);
    return (seen.last + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
}

/* Value scales of a tile's pages, then their offsets. */
INLINE void load_value_scales(int format, const uint8_t *const *page, int32_t at, float *scales) {
    if (!is_integer(format)) return;
    for (int32_t p = 0; p < TILE_PAGES; p++) {
        vf_store(scales + 16 * p, page_scales(page[p] + at));
        if (!has_byte_values(format))
            vf_store(scales + TILE_TOKENS + 16 * p, page_scales(page[p] + at + 32));
    }
}

/* The pages of one split that a block sees: first .. last - 1, counted from its beginning. */
typedef struct {
    int32_t split;
    int32_t first;
    int32_t last;
    int32_t first_tile; /* page that its first tile begins at */
} split_pages;

/* Find a split's pages, and those of one more tile to prefetch. The first and the last tile are
 * padded with the nearest page; the scores of this padding are not read. */
static split_pages find_pages(const query_block *b, int32_t split, const uint8_t **page) {
    int32_t pages_in_block = b->store.pages, origin = split * SPLIT_PAGES;
    int32_t first = b->any.first / AP_LANES - origin;
    if (b->store.format == AP_SEALED) first -= first & 1; /* its pages come in pairs */
    int32_t end = (b->any.last + AP_LANES - 1) / AP_LANES - origin;
    split_pages found = {.split = split, .first = first < 0 ? 0 : first};
    found.last = end > SPLIT_PAGES ? SPLIT_PAGES : end;
    found.first_tile = found.first / TILE_PAGES * TILE_PAGES;
    int32_t here = found.first, block = (origin + here) / pages_in_block;
    int32_t index = (origin + here) % pages_in_block;
    for (int32_t p = found.first_tile; p < found.last + 2 * TILE_PAGES; p++) {
        if (here < p && here + 1 < end) {
            here++;
            index = index + 1 == pages_in_block ? 0 : index + 1;
            block += index == 0;
        }
        page[p] = page_in(&b->store, b->block_table[block], b->kv_head, index);
    }
    return found;
}

/* Compute all scores of a split, and begin each row's softmax. */
INLINE void split_scores(int format, const query_block *b, split_pages pages,
                         attention_scratch *scratch) {
    int32_t token = (pages.split * SPLIT_PAGES + pages.first) * AP_LANES;
    if (format == AP_SEALED)
        for (int32_t p = pages.first; p < pages.last; p += 2)
            sealed_scores(b->rows, b->query, scratch->page + p, b->attention->head_dim,
                          scratch->query_parts, scratch->scores + p * MOST_ROWS * 16);
    else
        for (int32_t p = pages.first_tile; p < pages.last; p += TILE_PAGES)
            tile_scores(format, b->rows, b->query, scratch->page + p, b->attention->head_dim,
                        scratch->scores + p * MOST_ROWS * 16);
    for (int32_t m = 0; m < b->rows; m++)
        scratch->softmax[m] = (row_softmax){
            .highest = highest_score(scratch->scores + (pages.first * MOST_ROWS + m) * 16,
                                     pages.last - pages.first, token, b->seen[m],
                                     b->attention->softcap * LOG2_E),
            .sum = vf_zero(),
            .offset = vf_zero(),
        };
}

/* Add the weighted values of the tile that begins at page p to those in `partial`. */
INLINE void split_tile(int format, const query_block *b, split_pages pages, int32_t p,
                       attention_scratch *scratch, float *partial) {
    int32_t dim = b->attention->head_dim;
    value_tile tile = {
        .dim = dim,
        .first_page = p < pages.first ? pages.first - p : 0,
        .last_page = pages.last - p < TILE_PAGES ? pages.last - p : TILE_PAGES,
        .token = (pages.split * SPLIT_PAGES + p) * AP_LANES,
        .page = scratch->page + p,
        .seen = b->seen,
        .weights = scratch->scores + p * MOST_ROWS * 16,
        .parts = scratch->weight_parts,
        .step = scratch->step,
        .out = partial + VALUES_AT,
        .stride = partial_stride(dim),
    };
    load_value_scales(format, tile.page, page_of(format, dim).value_scales, scratch->scales);
    for (int32_t m = 0; m < b->rows; m++) {
        row_softmax *row = &scratch->softmax[m];
        float *scores = scratch->scores + (p * MOST_ROWS + m) * 16;
        uint8_t *parts = scratch->weight_parts + 2 * TILE_TOKENS * m;
        visible_tokens seen = b->seen[m];
        scratch->step[m] = sees_all(seen, tile.token, TILE_TOKENS)
                               ? tile_weights(format, true, row, scores, scratch->scales,
                                              tile.token, seen, parts)
                               : tile_weights(format, false, row, scores, scratch->scales,
                                              tile.token, seen, parts);
    }
    tile_values(format, b->rows, &tile);
}

INLINE void split_with(int format, const query_block *b, int32_t split,
                       attention_scratch *scratch, float *partial) {
    int32_t dim = b->attention->head_dim, stride = partial_stride(dim);
    split_pages pages = find_pages(b, split, scratch->page);
    split_scores(format, b, pages, scratch);
    for (int32_t m = 0; m < b->rows; m++)
        for (int32_t d = 0; d < dim; d += 16)
            vf_store(partial + m * stride + VALUES_AT + d, vf_zero());
    for (int32_t p = pages.first_tile; p < pages.last; p += TILE_PAGES)
        split_tile(format, b, pages, p, scratch, partial);
    for (int32_t m = 0; m < b->rows; m++, partial += stride) {
        const row_softmax *row = &scratch->softmax[m];
        vf_store(partial + HIGHEST_AT, row->highest);
        vf_store(partial + SUM_AT, vf_set(vf_sum(row->sum)));
        if (format == AP_FP8)
            for (int32_t d = VALUES_AT; d < VALUES_AT + dim; d += 16)
                vf_store(partial + d, vf_mul(vf_load(partial + d), vf_set(b->value_scale)));
        if (!is_integer(format) || has_byte_values(format)) continue;
        vfloat offset = vf_set(vf_sum(row->offset));
        for (int32_t d = VALUES_AT; d < VALUES_AT + dim; d += 16)
            vf_store(partial + d, vf_add(vf_load(partial + d), offset));
    }
}

#define SPLIT_OF(name, format)                                                            \
    static void name(const query_block *b, int32_t split, attention_scratch *scratch,     \
                     float *partial) {                                                    \
        split_with(format, b, split, scratch, partial);                                   \
    }
SPLIT_OF(split_f32, AP_F32)
SPLIT_OF(split_f16, AP_F16)
SPLIT_OF(split_bf16, AP_BF16)
SPLIT_OF(split_int8, AP_INT8)
SPLIT_OF(split_int4, AP_INT4)
SPLIT_OF(split_sealed, AP_SEALED)
SPLIT_OF(split_fp8, AP_FP8)
SPLIT_OF(split_k8v4, AP_K8V4)
#undef SPLIT_OF

/* partial (rows, partial_stride) of one split */
static void attend_split(const query_block *b, int32_t split, attention_scratch *scratch,
                         float *partial) {
    switch (b->store.format) {
        case AP_F32: split_f32(b, split, scratch, partial); break;
        case AP_F16: split_f16(b, split, scratch, partial); break;
        case AP_BF16: split_bf16(b, split, scratch, partial); break;
        case AP_INT8: split_int8(b, split, scratch, partial); break;
        case AP_SEALED: split_sealed(b, split, scratch, partial); break;
        case AP_FP8: split_fp8(b, split, scratch, partial); break;
        case AP_K8V4: split_k8v4(b, split, scratch, partial); break;
        default: split_int4(b, split, scratch, partial);
    }
}

/* Merge the next split's partial results into those before it, in `merged` and `out`. `begun`: a
 * row has some. */
static void merge_split(const query_block *b, int32_t split, const float *partial, float *merged,
                        bool *begun) {
    int32_t dim = b->attention->head_dim;
    for (int32_t m = 0; m < b->rows; m++, partial += partial_stride(dim), merged += VALUES_AT) {
        if (split < first_split(b->seen[m]) || split >= end_split(b->seen[m])) continue;
        float *out = b->out[m];
        if (!begun[m]) {
            begun[m] = true;
            memcpy(merged, partial, VALUES_AT * sizeof(float));
            memcpy(out, partial + VALUES_AT, (size_t)dim * sizeof(float));
            continue;
        }
        vfloat before = vf_load(merged + HIGHEST_AT), now = vf_load(partial + HIGHEST_AT);
        vfloat highest = vf_max(before, now);
        before = vf_exp2(vf_sub(before, highest));
        now = vf_exp2(vf_sub(now, highest));
        vf_store(merged + HIGHEST_AT, highest);
        vfloat sum = vf_mul(vf_load(partial + SUM_AT), now);
        vf_store(merged + SUM_AT, vf_fma(vf_load(merged + SUM_AT), before, sum));
        for (int32_t d = 0; d < dim; d += 16) {
            vfloat value = vf_mul(vf_load(partial + VALUES_AT + d), now);
            vf_store(out + d, vf_fma(vf_load(out + d), before, value));
        }
    }
}

/* Divide by the sum of weights, including a sink's. */
static void finish_rows(const query_block *b, const float *merged) {
    for (int32_t m = 0; m < b->rows; m++, merged += VALUES_AT) {
        vfloat sum = vf_load(merged + SUM_AT);
        if (b->attention->sinks) {
            float beyond = b->sink[m] - merged[HIGHEST_AT];
            sum = vf_add(sum, vf_set(exp2f(beyond < 127.0f ? beyond : 127.0f)));
        }
        vfloat inverse = vf_div(vf_set(1.0f), sum);
        for (int32_t d = 0; d < b->attention->head_dim; d += 16)
            vf_store(b->out[m] + d, vf_mul(vf_load(b->out[m] + d), inverse));
    }
}

#endif
