/* Paged attention: cuts a ragged batch into blocks of rows and shares them among the threads. */
#ifndef AP_ATTENTION_H
#define AP_ATTENTION_H

#include <stdatomic.h>

#include "attention_split.h"

/* Rows of a sequence and KV head: row r is query head r % group of that KV head, token r / group of
 * the sequence's rows in this batch. */
typedef struct {
    int32_t seq;
    int32_t kv_head;
    int32_t first_row;
    int32_t rows;
    int32_t first_split;
    int32_t end_split;
    int32_t open_splits; /* of them, a sealed layer's last ones, of open blocks */
    int32_t first_part; /* number of its first split among those computed alone, or -1 */
    _Atomic int32_t left; /* splits not computed yet, if they are computed alone */
} attention_block;

/* A chunk of the pool: a block, or one split of it. */
typedef struct {
    int32_t block;
    int32_t split; /* -1: all, one after the other */
} attention_chunk;

typedef struct {
    int32_t blocks;
    int32_t chunks;
    int32_t parts; /* splits computed alone */
} attention_size;

typedef struct {
    const ap_attention *attention;
    const ap_cache *cache;
    const ap_batch *batch;
    const float *query;
    float *out;
    int32_t layer;
    int32_t query_stride;
    attention_scratch *scratch; /* of each worker */
    attention_block *blocks;
    attention_chunk *chunks;
    float *partials; /* (parts, MOST_ROWS, partial_stride) */
} attention_run;

static visible_tokens seen_by(const ap_attention *a, const ap_batch *batch, int32_t seq,
                              int32_t row) {
    int32_t group = a->num_heads / a->num_kv_heads;
    int32_t tokens = batch->query_start[seq + 1] - batch->query_start[seq];
    int32_t last = batch->context_lens[seq] - tokens + row / group + 1;
    int32_t first = a->window && last > a->window ? last - a->window : 0;
    if (a->chunk) first = (last - 1) / a->chunk * a->chunk;
    if (a->sees_picture && batch->sees) last = batch->sees[batch->query_start[seq] + row / group];
    if (!a->looks_ahead) return (visible_tokens){first, last};
    int32_t end = batch->context_lens[seq], ahead = last + a->window - 1;
    return (visible_tokens){first, a->window && ahead < end ? ahead : end};
}

/* Tokens that a sealed layer reads from sealed blocks: a row reads its own block, and those behind
 * it, in the open form. The rows of a sequence lie in one block. */
static visible_tokens before_block(const ap_cache *cache, const ap_batch *batch, int32_t seq,
                                   visible_tokens seen) {
    int32_t own = (batch->context_lens[seq] - 1) / cache->block_size * cache->block_size;
    return (visible_tokens){seen.first < own ? seen.first : own, own};
}

/* Count a block, its chunks and its parts in `all`; with `blocks`, also store it and its chunks.
 * Both passes must visit the blocks in the same order. */
static void place_block(const attention_block *block, int64_t quota, attention_size *all,
                        attention_block *blocks, attention_chunk *chunks) {
    int32_t splits = block->end_split - block->first_split;
    bool alone = splits > 1 && (int64_t)splits * block->rows > quota;
    if (blocks) {
        blocks[all->blocks] = *block;
        blocks[all->blocks].first_part = alone ? all->parts : -1;
        for (int32_t i = 0; i < (alone ? splits : 1); i++)
            chunks[all->chunks + i] =
                (attention_chunk){all->blocks, alone ? block->first_split + i : -1};
    }
    all->blocks++;
    all->chunks += alone ? splits : 1;
    all->parts += alone ? splits : 0;
}

/* Cut the batch into blocks; return their work, in splits times rows. A block with more work than
 * the quota is computed split by split. */
static int64_t cut_attention(const ap_attention *a, const ap_cache *cache, bool sealed,
                             const ap_batch *batch, int64_t quota, attention_size *size,
                             attention_block *blocks, attention_chunk *chunks) {
    int32_t group = a->num_heads / a->num_kv_heads;
    int64_t work = 0;
    *size = (attention_size){0};
    for (int32_t seq = 0; seq < batch->num_seqs; seq++) {
        int32_t rows = (batch->query_start[seq + 1] - batch->query_start[seq]) * group;
        for (int32_t row = 0; row < rows; row += MOST_ROWS) {
            attention_block block = {.seq = seq, .first_row = row};
            block.rows = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            visible_tokens first = seen_by(a, batch, seq, row);
            visible_tokens last = seen_by(a, batch, seq, row + block.rows - 1);
            if (sealed) {
                int32_t end = last.last;
                first = last = before_block(cache, batch, seq, first);
                block.open_splits = end_split((visible_tokens){0, end - last.last});
            }
            block.first_split = first_split(first);
            block.end_split = end_split(last) + block.open_splits;
            atomic_init(&block.left, block.end_split - block.first_split);
            for (block.kv_head = 0; block.kv_head < a->num_kv_heads; block.kv_head++) {
                place_block(&block, quota, size, blocks, chunks);
                work += (int64_t)(block.end_split - block.first_split) * block.rows;
            }
        }
    }
    return work;
}

/* Splits times rows above which a block keeps the other threads waiting. */
static int64_t attention_quota(int32_t threads, int64_t work) {
    return threads == 1 ? INT64_MAX : work / (2 * threads);
}

static attention_size measure_attention(const ap_engine *engine, const ap_attention *a,
                                        const ap_cache *cache, int32_t layer,
                                        const ap_batch *batch, int64_t *quota) {
    bool sealed = is_sealed(cache->layers[layer].format);
    attention_size size;
    int64_t work = cut_attention(a, cache, sealed, batch, 0, &size, NULL, NULL);
    *quota = attention_quota(ap_pool_threads(engine->pool), work);
    cut_attention(a, cache, sealed, batch, *quota, &size, NULL, NULL);
    return size;
}

/* Lay out the parts of a run's memory; with memory NULL only count their bytes. */
static int64_t place_run(const ap_engine *engine, const ap_attention *a, attention_size size,
                         char *memory, attention_run *run) {
    int64_t threads = ap_pool_threads(engine->pool);
    int64_t scratch = ap_claim_bytes(threads * (int64_t)sizeof(attention_scratch));
    int64_t blocks = ap_claim_bytes(size.blocks * (int64_t)sizeof(attention_block));
    int64_t chunks = ap_claim_bytes(size.chunks * (int64_t)sizeof(attention_chunk));
    int64_t partials = (int64_t)size.parts * MOST_ROWS * partial_stride(a->head_dim) * 4;
    if (memory) {
        run->scratch = (attention_scratch *)(void *)memory;
        run->blocks = (attention_block *)(void *)(memory + scratch);
        run->chunks = (attention_chunk *)(void *)(memory + scratch + blocks);
        run->partials = (float *)(void *)(memory + scratch + blocks + chunks);
    }
    return scratch + blocks + chunks + ap_claim_bytes(partials);
}

/* bytes of workspace that `attend` needs for this batch */
static int64_t attend_bytes(const ap_engine *engine, const ap_attention *a, const ap_cache *cache,
                            int32_t layer, const ap_batch *batch) {
    int64_t quota;
    attention_size size = measure_attention(engine, a, cache, layer, batch, &quota);
    return place_run(engine, a, size, NULL, NULL);
}

/* Divide the tokens that a sealed layer's rows see into those of sealed blocks and of open ones. */
static void open_last_blocks(const attention_run *run, const attention_block *block, float scale,
                            attention_scratch *scratch) {
    query_block *b = &scratch->block, *open = &scratch->open;
    int32_t dim = run->attention->head_dim;
    visible_tokens before = before_block(run->cache, run->batch, block->seq, b->any);
    *open = *b;
    open->store = open_blocks_of(run->cache, run->layer, dim);
    open->block_table = run->batch->open_blocks + block->seq; /* on into the next sequences' */
    for (int32_t m = 0; m < b->rows; m++) {
        visible_tokens seen = b->seen[m];
        int32_t first = seen.first - before.last;
        open->seen[m] = (visible_tokens){first < 0 ? 0 : first, seen.last - before.last};
        b->seen[m] = before_block(run->cache, run->batch, block->seq, seen);
        prepare_query(AP_INT8, b->query[m].query, dim, scale,
                      scratch->open_query_parts + 2 * dim * m, &open->query[m]);
    }
    open->any = (visible_tokens){open->seen[0].first, open->seen[b->rows - 1].last};
    b->any = before;
}

static void open_block(const attention_run *run, const attention_block *block,
                       attention_scratch *scratch) {
    const ap_attention *a = run->attention;
    query_block *b = &scratch->block;
    int32_t group = a->num_heads / a->num_kv_heads, dim = a->head_dim;
    const ap_cache_layer *of = &run->cache->layers[run->layer];
    bool sealed = is_sealed(of->format);
    float scale = a->softcap != 0.0f ? a->scale / a->softcap : a->scale * LOG2_E;
    b->attention = a;
    b->store = blocks_of(run->cache, run->layer, dim);
    b->kv_head = block->kv_head;
    if (of->format == AP_FP8) {
        scale *= of->head_scales[block->kv_head];
        b->value_scale = of->head_scales[a->num_kv_heads + block->kv_head];
    }
    b->rows = block->rows;
    b->block_table = run->batch->block_tables + (int64_t)block->seq * run->batch->table_width;
    for (int32_t m = 0; m < b->rows; m++) {
        int32_t row = block->first_row + m;
        int64_t token = run->batch->query_start[block->seq] + row / group;
        int32_t head = block->kv_head * group + row % group;
        b->seen[m] = seen_by(a, run->batch, block->seq, row);
        b->out[m] = run->out + (token * a->num_heads + head) * dim;
        b->sink[m] = a->sinks ? a->sinks[head] * LOG2_E : 0.0f;
        prepare_query(of->format, run->query + token * run->query_stride + head * dim, dim, scale,
                      scratch->query_parts + 2 * dim * m, &b->query[m]);
    }
    b->any = (visible_tokens){b->seen[0].first, b->seen[b->rows - 1].last};
    if (sealed) open_last_blocks(run, block, scale, scratch);
}

static void attend_chunk(void *context, int32_t number, int32_t worker) {
    const attention_run *run = context;
    const attention_chunk *chunk = &run->chunks[number];
    attention_block *block = &run->blocks[chunk->block];
    attention_scratch *scratch = &run->scratch[worker];
    open_block(run, block, scratch);
    const query_block *b = &scratch->block;
    bool begun[MOST_ROWS] = {false};
    int32_t end = block->end_split - block->open_splits; /* of the splits of blocks */
    if (chunk->split < 0) {
        for (int32_t split = block->first_split; split < end; split++) {
            attend_split(b, split, scratch, scratch->partial);
            merge_split(b, split, scratch->partial, scratch->merged, begun);
        }
        for (int32_t split = 0; split < block->open_splits; split++) {
            attend_split(&scratch->open, split, scratch, scratch->partial);
            merge_split(&scratch->open, split, scratch->partial, scratch->merged, begun);
        }
        finish_rows(b, scratch->merged);
        return;
    }
    int64_t stride = (int64_t)MOST_ROWS * partial_stride(run->attention->head_dim);
    float *partials = run->partials + block->first_part * stride;
    bool of_open = chunk->split >= end;
    attend_split(of_open ? &scratch->open : b, of_open ? chunk->split - end : chunk->split,
                 scratch, partials + (chunk->split - block->first_split) * stride);
    /* the last thread to finish merges */
    if (atomic_fetch_sub_explicit(&block->left, 1, memory_order_acq_rel) > 1) return;
    for (int32_t split = block->first_split; split < end; split++)
        merge_split(b, split, partials + (split - block->first_split) * stride, scratch->merged,
                    begun);
    for (int32_t split = 0; split < block->open_splits; split++)
        merge_split(&scratch->open, split, partials + (end + split - block->first_split) * stride,
                    scratch->merged, begun);
    finish_rows(b, scratch->merged);
}

/* query rows at query + token * query_stride, (num_heads, head_dim) each;
 * out (num_tokens, num_heads, head_dim). `memory` has attend_bytes. */
static void attend(ap_engine *engine, char *memory, const ap_attention *a, const ap_cache *cache,
                   int32_t layer, const ap_batch *batch, const float *query, int32_t query_stride,
                   float *out) {
    attention_run run = {.attention = a, .cache = cache, .batch = batch, .query = query,
                         .out = out, .layer = layer, .query_stride = query_stride};
    int64_t quota;
    attention_size size = measure_attention(engine, a, cache, layer, batch, &quota);
    place_run(engine, a, size, memory, &run);
    cut_attention(a, cache, is_sealed(cache->layers[layer].format), batch, quota, &size,
                  run.blocks, run.chunks);
    ap_pool_run(engine->pool, attend_chunk, &run, size.chunks);
}

/* ---- the cache ---- */

/* True if attention can read a layer of the cache. */
static bool attention_supported(const ap_attention *a, const ap_cache *cache, int32_t layer) {
    const ap_cache_layer *of = &cache->layers[layer];
    if (is_sealed(of->format) && (cache->block_size != SEALED_TOKENS || !cache->open_base))
        return false;
    if (of->format == AP_FP8 && !of->head_scales) return false;
    if (a->looks_ahead && is_sealed(of->format)) return false;
    return ap_page_bytes(cache->layers[layer].format, a->head_dim) > 0 &&
           cache->block_size > 0 && cache->block_size % AP_LANES == 0 && a->num_kv_heads > 0 &&
           a->num_heads % a->num_kv_heads == 0;
}

typedef struct {
    const ap_attention *attention;
    const ap_cache *cache;
    const int32_t *open_blocks;
    const int32_t *blocks;
    int32_t layer;
} kv_seal_run;

static void kv_seal_chunk(void *context, int32_t chunk, int32_t worker) {
    const kv_seal_run *run = context;
    (void)worker;
    seal_block(run->attention, run->cache, run->layer, run->open_blocks[chunk], run->blocks[chunk]);
}

/* Seal full open blocks into `blocks`. */
static void kv_seal(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                    int32_t layer, int32_t count, const int32_t *open_blocks,
                    const int32_t *blocks) {
    kv_seal_run run = {attention, cache, open_blocks, blocks, layer};
    ap_pool_run(engine->pool, kv_seal_chunk, &run, count);
}

/* True if the rows of each sequence lie in one block that has an open block. */
static bool open_blocks_fit(const ap_cache *cache, const ap_batch *batch) {
    if (!batch->open_blocks) return false;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t rows = batch->query_start[i + 1] - batch->query_start[i];
        int32_t last = batch->context_lens[i] - 1, open = batch->open_blocks[i];
        if (open < 0 || open >= cache->num_open) return false;
        if (last / cache->block_size != (last + 1 - rows) / cache->block_size) return false;
    }
    return true;
}

#endif
