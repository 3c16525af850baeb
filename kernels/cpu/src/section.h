/* The parallel sections that a step is made of: over rows, and over the tiles of linears. */
#ifndef AP_SECTION_H
#define AP_SECTION_H

#include "adapted.h"
#include "pointwise.h"

/* Rows are handed out in pieces, several per thread, so that no thread waits long for another. */
#define PIECES_PER_THREAD 4
/* A chunk of a linear takes at least this many multiplications: some microseconds. */
#define LEAST_WORK 200000
/* Rows of one chunk of a linear: few enough that their codes stay in the second-level cache. */
#define ROW_BLOCK 256

static int32_t ceil_div(int64_t a, int64_t b) { return (int32_t)((a + b - 1) / b); }

/* ---- over rows ---- */

typedef void (*row_function)(void *context, int32_t row);

typedef struct {
    row_function function;
    void *context;
    int32_t rows;
    int32_t rows_per_chunk;
} row_section;

static void row_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const row_section *section = context;
    int32_t first = chunk * section->rows_per_chunk;
    int32_t last = first + section->rows_per_chunk;
    if (last > section->rows) last = section->rows;
    for (int32_t row = first; row < last; row++) section->function(section->context, row);
}

/* function(context, 0 .. rows - 1) */
static void for_rows(ap_engine *engine, row_function function, void *context, int32_t rows) {
    row_section section = {.function = function, .context = context, .rows = rows};
    int32_t pieces = PIECES_PER_THREAD * ap_pool_threads(engine->pool);
    /* one or two rows take less time than telling another thread */
    section.rows_per_chunk = rows <= 2 ? rows : ceil_div(rows, pieces);
    int32_t chunks = rows ? ceil_div(rows, section.rows_per_chunk) : 0;
    if (chunks) ap_pool_run(engine->pool, row_chunk, &section, chunks);
}

/* ---- the input of linears ---- */

#define MOST_FORMS 4

/* Rows that linears multiply, in every form that one of them needs. */
typedef struct {
    rows_in forms[MOST_FORMS];
    int32_t num_forms;
    int32_t width;
} input;

static bool is_quantized(const ap_linear *linear) {
    return has_groups(linear);
}

/* True if rows take another form before they are multiplied. */
static bool is_prepared(const ap_linear *linear) {
    return is_quantized(linear) || multiplies_parts(linear);
}

static bool is_form_of(const rows_in *form, const ap_linear *linear) {
    if (!is_quantized(linear)) return !form->group;
    /* without offsets nothing is summed by group */
    bool fits = form->group == linear->group || (form->group && linear->offset_kind == AP_CENTERED);
    return fits && form->order == linear->input_order && form->rotated == is_trellis(linear);
}

/* The form that a linear multiplies. */
static const rows_in *form_of(const input *in, const ap_linear *linear) {
    int32_t i = 0;
    while (!is_form_of(&in->forms[i], linear)) i++;
    return &in->forms[i];
}

static void add_form(input *in, const ap_linear *linear) {
    int32_t i = 0;
    while (i < in->num_forms && !is_form_of(&in->forms[i], linear)) i++;
    rows_in *form = &in->forms[i];
    form->is_split |= multiplies_parts(linear);
    if (i < in->num_forms) return;
    in->num_forms++;
    form->group = is_quantized(linear) ? linear->group : 0;
    form->order = is_quantized(linear) ? linear->input_order : NULL;
    form->rotated = is_trellis(linear);
}

static input forms_of(const ap_linear *const *linears, int32_t count) {
    input in = {.width = linears[0]->in_features};
    for (int32_t i = 0; i < count; i++) add_form(&in, linears[i]);
    return in;
}

/* The bytes that a form takes beside its rows x. */
static int64_t form_bytes(const rows_in *form, int32_t rows, int32_t width) {
    return form->is_split ? split_bytes(rows, width) : quantized_bytes(rows, width, form->group);
}

/* The bytes that an input's forms take. */
static int64_t input_bytes(const ap_linear *const *linears, int32_t count, int32_t rows) {
    input in = forms_of(linears, count);
    int64_t bytes = 0;
    for (int32_t i = 0; i < in.num_forms; i++) bytes += form_bytes(&in.forms[i], rows, in.width);
    return bytes;
}

/* Give an input its rows x, and `memory` with room for its forms. */
static void place_forms(input *in, const float *x, int32_t rows, char *memory) {
    for (int32_t i = 0; i < in->num_forms; i++) {
        rows_in *form = &in->forms[i];
        form->x = x;
        form->stride = in->width;
        form->rows = rows;
        if (form->group) quantized_place(form, memory, in->width);
        if (form->is_split) form->parts = (uint16_t *)(void *)memory;
        memory += form_bytes(form, rows, in->width);
    }
}

/* Rows x as the input of linears of one width; `memory` has room for the forms, which `prepare_row`
 * makes row by row. */
static input input_of(const ap_linear *const *linears, int32_t count, const float *x, int32_t rows,
                      char *memory) {
    input in = forms_of(linears, count);
    place_forms(&in, x, rows, memory);
    return in;
}

static void prepare_row(input *in, int32_t row) {
    for (int32_t i = 0; i < in->num_forms; i++) {
        if (in->forms[i].group) quantize_row(&in->forms[i], row, in->width);
        if (in->forms[i].is_split) split_row(&in->forms[i], row, in->width);
    }
}

/* ---- over the tiles of a linear ---- */

/* Finishes a linear's outputs in columns [first, last) of a row. */
typedef void (*finish_function)(void *context, int32_t row, int32_t first, int32_t last);

typedef struct {
    const ap_linear *linears[2]; /* the second has the shape of the first, or is NULL */
    const rows_in *in[2];
    float *out[2];
    int32_t out_stride;
    bool add; /* accumulate in out */
    finish_function finish;
    void *context;
    const adapted_rows *adapted; /* NULL: no adapter may change these linears */
    ap_place place;              /* of these linears */
    int32_t first_output;        /* of the first linear in that place */
    int32_t tiles_per_chunk;
    int32_t rows_per_chunk;
    int32_t row_chunks;
} linear_section;

static place_tiles place_tiles_of(const linear_section *s, int32_t i, int32_t first_tile,
                                  int32_t last_tile) {
    int32_t outputs = s->linears[i]->out_features;
    return (place_tiles){s->place, s->first_output + i * outputs, outputs, first_tile, last_tile};
}

/* Expand one part of a place into outputs of rows of a linear; the part's output 0 is the linear's
 * output `shift`. */
static void expand_part(const linear_section *s, const ap_expansion *part, int32_t first_row,
                        int32_t last_row, place_tiles own, float *out, int32_t shift) {
    int32_t rows = s->in[0]->rows;
    rows_in in = {
        .x = s->adapted->shrunk + part->first_rank,
        .stride = s->adapted->stride,
        .rows = rows,
    };
    if (is_quantized(&part->linear)) in = shrunk_tile(s->adapted, rows, part->first_rank);
    linear_tiles(&part->linear, &in, first_row, last_row, own.first, own.last, out + shift,
                 s->out_stride, true);
}

/* Add the adapters' expansions to the outputs of linear `i` in a chunk. */
static void expand_chunk(const linear_section *s, int32_t i, int32_t first_row, int32_t last_row,
                         int32_t first_tile, int32_t last_tile) {
    place_tiles tiles = place_tiles_of(s, i, first_tile, last_tile);
    for (int32_t k = 0; k < s->adapted->count; k++) {
        const adapter_span *span = &s->adapted->spans[k];
        int32_t from = span->first > first_row ? span->first : first_row;
        int32_t to = smaller(span->first + span->rows, last_row);
        if (from >= to) continue;
        const ap_low_rank *factors = factors_at(span, s->adapted->layer, s->place);
        for (int32_t p = 0; p < factors->num_expansions; p++) {
            const ap_expansion *part = &factors->expansions[p];
            place_tiles own = tiles_of_part(part, tiles);
            if (own.first < own.last)
                expand_part(s, part, from, to, own, s->out[i], part->first_output - tiles.begin);
        }
    }
}

/* Multiply rows by tiles of linear `i`. If the rows fit the registers, factors are prefetched
 * meanwhile: so few rows are done before the factors would come from memory. */
static void multiply_chunk(const linear_section *s, int32_t i, int32_t first_row, int32_t last_row,
                           int32_t first_tile, int32_t last_tile) {
    const char *fetched[MOST_FETCHED];
    multiplication m = {
        .w = s->linears[i],
        .in = s->in[i],
        .row = first_row,
        .rows = last_row - first_row,
        .tile = first_tile,
        .last_tile = last_tile,
        .out = s->out[i],
        .out_stride = s->out_stride,
        .add = s->add,
    };
    if (s->adapted && s->adapted->count && m.rows <= REGISTER_ROWS) {
        place_tiles tiles = place_tiles_of(s, i, first_tile, last_tile);
        m.fetches = (fetch_list){fetched, fetched + list_factors(s->adapted, tiles, fetched)};
    }
    multiply_tiles(m);
}

static void linear_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const linear_section *s = context;
    int32_t num_tiles = ceil_div(s->linears[0]->out_features, AP_LANES);
    int32_t first_tile = chunk / s->row_chunks * s->tiles_per_chunk;
    int32_t last_tile = first_tile + s->tiles_per_chunk;
    int32_t first_row = chunk % s->row_chunks * s->rows_per_chunk;
    int32_t last_row = first_row + s->rows_per_chunk;
    if (last_tile > num_tiles) last_tile = num_tiles;
    if (last_row > s->in[0]->rows) last_row = s->in[0]->rows;
    for (int32_t i = 0; i < 2 && s->linears[i]; i++)
        multiply_chunk(s, i, first_row, last_row, first_tile, last_tile);
    for (int32_t i = 0; s->adapted && i < 2 && s->linears[i]; i++)
        expand_chunk(s, i, first_row, last_row, first_tile, last_tile);
    if (!s->finish) return;
    int32_t last = last_tile * AP_LANES;
    if (last > s->linears[0]->out_features) last = s->linears[0]->out_features;
    for (int32_t row = first_row; row < last_row; row++)
        s->finish(s->context, row, first_tile * AP_LANES, last);
}

static void run_linear(ap_engine *engine, linear_section *s) {
    int64_t rows = s->in[0]->rows;
    int64_t in_features = s->linears[0]->in_features * (s->linears[1] ? 2 : 1);
    int32_t num_tiles = ceil_div(s->linears[0]->out_features, AP_LANES);
    s->row_chunks = ceil_div(rows, ROW_BLOCK);
    s->rows_per_chunk = ceil_div(rows, s->row_chunks);
    if (s->in[0]->parts) s->rows_per_chunk = ceil_div(s->rows_per_chunk, TILE_ROWS) * TILE_ROWS;
    int64_t tile_work = in_features * AP_LANES * s->rows_per_chunk;
    int32_t pieces = PIECES_PER_THREAD * ap_pool_threads(engine->pool);
    s->tiles_per_chunk = ceil_div((int64_t)num_tiles * s->row_chunks, pieces);
    int32_t least = ceil_div(LEAST_WORK, tile_work);
    if (s->tiles_per_chunk < least) s->tiles_per_chunk = least;
    /* kernels of many rows take two tiles at once */
    if (s->in[0]->parts || rows > REGISTER_ROWS) s->tiles_per_chunk += s->tiles_per_chunk % 2;
    if (s->tiles_per_chunk > num_tiles) s->tiles_per_chunk = num_tiles;
    ap_pool_run(engine->pool, linear_chunk, s,
                ceil_div(num_tiles, s->tiles_per_chunk) * s->row_chunks);
}

#endif
