/* The C ABI: picks the kernels of one instruction set and owns the workspace. */
#define _GNU_SOURCE /* syscall */

#include "engine.h"
#include "parts_api.h"

#include <stdlib.h>
#include <string.h>

#ifndef AP_VERSION
#error "AP_VERSION must be the version of the package"
#endif

static const ap_kernels *const all_kernels[AP_NUM_ISAS] = {
    [AP_SCALAR] = &ap_kernels_scalar,
#ifdef AP_X86
    [AP_AVX2] = &ap_kernels_avx2,
    [AP_AVXVNNI] = &ap_kernels_avxvnni,
    [AP_AVX512] = &ap_kernels_avx512,
    [AP_AMX] = &ap_kernels_amx,
#elif defined(AP_ARM)
    [AP_NEON] = &ap_kernels_neon,
    [AP_I8MM] = &ap_kernels_i8mm,
#endif
};

static const ap_kernels *kernels; /* of the instruction set in use; NULL before the first call */
static int32_t current_isa;

int32_t ap_abi(void) { return AP_ABI; }

const char *ap_build_version(void) { return AP_VERSION; }

int64_t ap_struct_bytes(const char *name) {
#define STRUCT(type) \
    if (!strcmp(name, #type)) return (int64_t)sizeof(type)
    STRUCT(ap_linear);
    STRUCT(ap_norm);
    STRUCT(ap_rope);
    STRUCT(ap_attention);
    STRUCT(ap_router);
    STRUCT(ap_experts);
    STRUCT(ap_gating);
    STRUCT(ap_routed);
    STRUCT(ap_token_input);
    STRUCT(ap_token_inputs);
    STRUCT(ap_filters);
    STRUCT(ap_short_conv);
    STRUCT(ap_gated_delta);
    STRUCT(ap_mamba2);
    STRUCT(ap_latent);
    STRUCT(ap_layer);
    STRUCT(ap_join);
    STRUCT(ap_model);
    STRUCT(ap_cache_layer);
    STRUCT(ap_cache);
    STRUCT(ap_expansion);
    STRUCT(ap_low_rank);
    STRUCT(ap_adapter);
    STRUCT(ap_batch);
    STRUCT(ap_sampling);
#undef STRUCT
    return -1;
}

#ifdef AP_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* of arch_prctl: ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* a state that is saved for threads with permission alone */

/* Ask once for the process, whose threads then have the permission, too. */
static int may_use_tiles(void) {
    static _Atomic int answer; /* 1: no, 2: yes */
    if (!answer) answer = 1 + !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    return answer == 2;
}
#else
static int may_use_tiles(void) { return 0; }
#endif

static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int has(uint32_t word, int bit) { return word >> bit & 1; }

static int cpu_has(int32_t isa) {
    uint32_t a, b, c, d, subleaves, b7, c7, d7, a71, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return 0; /* OSXSAVE */
    int has_fma = has(c, 12) && has(c, 29) && has(c, 28);         /* FMA, F16C, AVX */
    uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &subleaves, &b7, &c7, &d7)) return 0;
    a71 = 0;
    if (subleaves >= 1) __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
    int avx2 = has_fma && (state & 6) == 6 && has(b7, 5);
    switch (isa) {
        case AP_AVX2:
            return avx2;
        case AP_AVXVNNI:
            return avx2 && has(a71, 4);
        case AP_AVX512: /* F, DQ, BW, VL, VNNI, and the registers saved by the system */
            return avx2 && (state & 0xe6) == 0xe6 && has(b7, 16) && has(b7, 17) && has(b7, 30) &&
                   has(b7, 31) && has(c7, 11);
        case AP_AMX: /* BF16, TILE, INT8 */
            return cpu_has(AP_AVX512) && (state & 0x60000) == 0x60000 && has(d7, 22) &&
                   has(d7, 24) && has(d7, 25) && may_use_tiles();
        default:
            return 0;
    }
}
#elif defined(AP_ARM)
#include <sys/auxv.h>

#define DOTPROD (1UL << 20) /* of AT_HWCAP */
#define I8MM (1UL << 13)    /* of AT_HWCAP2 */

static int cpu_has(int32_t isa) {
    if (!(getauxval(AT_HWCAP) & DOTPROD)) return 0;
    return isa == AP_NEON || (isa == AP_I8MM && (getauxval(AT_HWCAP2) & I8MM));
}
#else
static int cpu_has(int32_t isa) {
    (void)isa;
    return 0;
}
#endif

int32_t ap_isa_supported(int32_t isa) {
    if (isa < 0 || isa >= AP_NUM_ISAS || !all_kernels[isa]) return 0;
    return isa == AP_SCALAR || cpu_has(isa);
}

int32_t ap_use_isa(int32_t isa) {
    if (!ap_isa_supported(isa)) return AP_UNSUPPORTED_ISA;
    current_isa = isa;
    kernels = all_kernels[isa];
    return AP_OK;
}

static const ap_kernels *chosen(void) {
    for (int32_t isa = AP_NUM_ISAS - 1; !kernels; isa--) ap_use_isa(isa);
    return kernels;
}

int32_t ap_current_isa(void) {
    chosen();
    return current_isa;
}

ap_engine *ap_engine_create(int32_t threads, int64_t max_workspace_bytes) {
    ap_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    engine->max_workspace_bytes = max_workspace_bytes;
    engine->pool = ap_pool_create(threads);
    if (engine->pool) return engine;
    free(engine);
    return NULL;
}

void ap_engine_destroy(ap_engine *engine) {
    if (!engine) return;
    ap_pool_destroy(engine->pool);
    free(engine->workspace);
    free(engine);
}

int64_t ap_workspace_bytes(const ap_engine *engine) { return engine->workspace_bytes; }

void ap_engine_watch(ap_engine *engine, uint64_t *progress) { engine->progress = progress; }

void ap_engine_join(ap_engine *engine, ap_group *group) { engine->group = group; }

#ifdef AP_CHECKED
#include <sanitizer/asan_interface.h>

static void open_workspace(ap_engine *engine) {
    __asan_unpoison_memory_region(engine->workspace, (size_t)engine->workspace_bytes);
}

/* Fill a claim with NaN, and forbid access to the gap behind it. */
static void fence(char *claimed, int64_t bytes) {
    if (!bytes) return;
    memset(claimed, 0xff, (size_t)bytes);
    __asan_poison_memory_region(claimed + bytes, (size_t)(ap_claim_bytes(bytes) - bytes));
}
#else
static void open_workspace(ap_engine *engine) { (void)engine; }
static void fence(char *claimed, int64_t bytes) { (void)claimed, (void)bytes; }
#endif

ap_status ap_reserve(ap_engine *engine, int64_t bytes) {
    engine->workspace_used = 0;
    open_workspace(engine);
    if (bytes <= engine->workspace_bytes) return AP_OK;
    if (engine->max_workspace_bytes && bytes > engine->max_workspace_bytes) return AP_NO_MEMORY;
    char *larger = aligned_alloc(64, (size_t)ap_claim_bytes(bytes));
    if (!larger) return AP_NO_MEMORY;
    free(engine->workspace);
    engine->workspace = larger;
    engine->workspace_bytes = ap_claim_bytes(bytes);
    return AP_OK;
}

void *ap_claim(ap_engine *engine, int64_t bytes) {
    char *claimed = engine->workspace + engine->workspace_used;
    engine->workspace_used += ap_claim_bytes(bytes);
    fence(claimed, bytes);
    return claimed;
}

int32_t ap_step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                const ap_batch *batch, float *hidden, float *logits) {
    return chosen()->step(engine, model, cache, batch, hidden, logits);
}

int32_t ap_make_room(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                     const ap_batch *batch) {
    return chosen()->make_room(engine, model, cache, batch);
}

int32_t ap_head(ap_engine *engine, const ap_model *model, const float *hidden, int32_t rows,
                float *logits) {
    return chosen()->head(engine, model, hidden, rows, logits);
}

const ap_linear *ap_quantized_at(const ap_model *model, int32_t layer, int32_t place) {
    return chosen()->quantized_at(model, layer, place);
}

int32_t ap_run_experts(ap_engine *engine, const ap_experts *experts, const ap_gating *gating,
                       const ap_routed *routed) {
    return chosen()->experts(engine, experts, gating, routed);
}

int32_t ap_attend(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                  int32_t layer, const ap_batch *batch, const float *qkv, float *out) {
    return chosen()->attend(engine, attention, cache, layer, batch, qkv, out);
}

int32_t ap_multiply(ap_engine *engine, const ap_linear *linear, const float *x, int32_t rows,
                    float *out) {
    return chosen()->multiply(engine, linear, x, rows, out);
}

int32_t ap_rows(ap_engine *engine, const ap_linear *linear, const int64_t *ids, int32_t count,
                float *out) {
    return chosen()->find_rows(engine, linear, ids, count, out);
}

int32_t ap_trellis_encode(ap_engine *engine, int32_t bits, const float *x, const float *weights,
                          int32_t count, uint8_t *symbols, float *found) {
    if (bits < 2 || bits > 5 || count < 0 || !x || !weights || !symbols || !found)
        return AP_BAD_ARGUMENT;
    return chosen()->encode(engine, bits, x, weights, count, symbols, found);
}

int32_t ap_sample(ap_engine *engine, const float *logits, int32_t num_rows, int32_t vocab_size,
                  const ap_sampling *sampling, int64_t *tokens) {
    return chosen()->sample(engine, logits, num_rows, vocab_size, sampling, tokens);
}

int32_t ap_score(ap_engine *engine, const float *logits, int32_t num_rows, int32_t vocab_size,
                 const int64_t *targets, int32_t top, float *logprobs, float *top_logprobs,
                 int64_t *top_ids) {
    return chosen()->score(engine, logits, num_rows, vocab_size, targets, top, logprobs,
                           top_logprobs, top_ids);
}
