/* The rows of a step that adapters change, and the factors that tiles of a linear need. */
#ifndef AP_ADAPTED_H
#define AP_ADAPTED_H

#include "linear.h"

/* The most rows in a span of one adapter: longer runs are split among the threads. */
#define ADAPTED_ROWS 48

typedef struct {
    const ap_adapter *adapter;
    int32_t first;
    int32_t rows;
} adapter_span;

typedef struct {
    adapter_span *spans;
    int32_t count;
    int32_t num_layers;
    int32_t stride;
    float *shrunk; /* (rows, stride), for the place whose linears run next */
    int8_t *codes; /* the same, quantized: 16 numbers of all rows, then the next 16: shrunk_tile */
    row_scale *scales;
    int32_t layer; /* of that place */
} adapted_rows;

static const ap_low_rank *factors_at(const adapter_span *span, int32_t layer, ap_place place) {
    return span->adapter->places + (int64_t)layer * AP_NUM_PLACES + place;
}

/* The quantized shrunk numbers `first` to `first` + 15 of all rows, as an expansion's input. */
static rows_in shrunk_tile(const adapted_rows *adapted, int32_t rows, int32_t first) {
    int64_t before = (int64_t)rows * first;
    return (rows_in){
        .rows = rows,
        .group = AP_LANES,
        .codes = adapted->codes + before,
        .scales = adapted->scales + before / AP_LANES,
    };
}

/* Tiles of a linear that yields the outputs of a place from `begin` on. */
typedef struct {
    ap_place place;
    int32_t begin;
    int32_t outputs; /* of the linear */
    int32_t first;
    int32_t last;
} place_tiles;

/* Convert them to tiles of a part: [first, last), none if first >= last. */
static place_tiles tiles_of_part(const ap_expansion *part, place_tiles tiles) {
    int32_t shift = part->first_output - tiles.begin;
    int32_t first = tiles.first * AP_LANES - shift;
    int32_t last = smaller(tiles.last * AP_LANES, tiles.outputs) - shift;
    last = smaller(last, part->linear.out_features);
    tiles.first = first > 0 ? first / AP_LANES : 0;
    tiles.last = last > 0 ? (last + AP_LANES - 1) / AP_LANES : 0;
    return tiles;
}

/* ---- factors that are prefetched while a linear's weight is multiplied ---- */

#define MOST_FETCHED 1024

static int32_t list_bytes(const void *from, int64_t bytes, const char **list, int32_t count) {
    for (int64_t i = 0; i < bytes && count < MOST_FETCHED; i += FETCHED_BYTES)
        list[count++] = (const char *)from + i;
    return count;
}

static int32_t list_tiles(const ap_linear *w, int64_t first, int64_t last, const char **list,
                          int32_t count) {
    if (first >= last) return count;
    return list_bytes(tile_codes(w, (int32_t)first), (last - first) * tile_bytes(w), list, count);
}

/* List the pieces of the factors that expand some tiles, and these tiles' share of the factors that
 * shrink for the next place; returns the number of pieces. */
static int32_t list_factors(const adapted_rows *adapted, place_tiles tiles, const char **list) {
    int32_t count = 0, next = adapted->layer * AP_NUM_PLACES + (int32_t)tiles.place + 1;
    int64_t all = (tiles.outputs + AP_LANES - 1) / AP_LANES;
    bool goes_on = tiles.begin == 0 && next < adapted->num_layers * AP_NUM_PLACES;
    for (int32_t k = 0; k < adapted->count; k++) {
        const ap_low_rank *factors = factors_at(&adapted->spans[k], adapted->layer, tiles.place);
        for (int32_t p = 0; p < factors->num_expansions; p++) {
            place_tiles own = tiles_of_part(&factors->expansions[p], tiles);
            count = list_tiles(&factors->expansions[p].linear, own.first, own.last, list, count);
        }
    }
    for (int32_t k = 0; goes_on && k < adapted->count; k++) {
        const ap_linear *shrink = &adapted->spans[k].adapter->places[next].shrink;
        if (!shrink->codes) continue;
        int64_t pieces = num_tiles(shrink) * tile_bytes(shrink) / FETCHED_BYTES;
        int64_t first = pieces * tiles.first / all, last = pieces * tiles.last / all;
        const char *from = (const char *)shrink->codes + first * FETCHED_BYTES;
        count = list_bytes(from, (last - first) * FETCHED_BYTES, list, count);
    }
    return count;
}

#endif
