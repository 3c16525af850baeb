/* The struct of an ap_engine, and the table of functions of an instruction set. */
#ifndef AP_ENGINE_H
#define AP_ENGINE_H

#include <stddef.h>

#include "appliance_cpu.h"
#include "pool.h"

struct ap_engine {
    ap_pool *pool;
    int64_t max_workspace_bytes; /* 0: no limit */
    int64_t workspace_bytes;     /* allocated */
    int64_t workspace_used;
    char *workspace;
    uint64_t *progress; /* of a watcher, or NULL */
    ap_group *group;    /* of this process; NULL without other ranks */
};

/* Show a watcher that the step makes progress. */
static inline void ap_advance(ap_engine *engine) {
    if (engine->progress) __atomic_fetch_add(engine->progress, 1, __ATOMIC_RELAXED);
}

/* With sanitizers, a gap that must not be touched follows each claim. */
#ifdef AP_CHECKED
#define AP_GAP 64
#else
#define AP_GAP 0
#endif

/* Claims take the workspace in order, and it is released as a whole. `ap_reserve` makes room for a
 * number of bytes before the first claim; later claims cannot fail. */
ap_status ap_reserve(ap_engine *engine, int64_t bytes);
void *ap_claim(ap_engine *engine, int64_t bytes); /* 64-byte aligned */
/* bytes that a claim takes */
static inline int64_t ap_claim_bytes(int64_t bytes) { return (bytes + AP_GAP + 63) / 64 * 64; }

typedef struct {
    ap_status (*step)(ap_engine *, const ap_model *, const ap_cache *, const ap_batch *, float *,
                      float *);
    ap_status (*make_room)(ap_engine *, const ap_model *, const ap_cache *, const ap_batch *);
    ap_status (*head)(ap_engine *, const ap_model *, const float *, int32_t, float *);
    const ap_linear *(*quantized_at)(const ap_model *, int32_t, int32_t);
    ap_status (*experts)(ap_engine *, const ap_experts *, const ap_gating *, const ap_routed *);
    ap_status (*attend)(ap_engine *, const ap_attention *, const ap_cache *, int32_t,
                        const ap_batch *, const float *, float *);
    ap_status (*multiply)(ap_engine *, const ap_linear *, const float *, int32_t, float *);
    ap_status (*find_rows)(ap_engine *, const ap_linear *, const int64_t *, int32_t, float *);
    ap_status (*encode)(ap_engine *, int32_t, const float *, const float *, int32_t, uint8_t *,
                        float *);
    ap_status (*sample)(ap_engine *, const float *, int32_t, int32_t, const ap_sampling *,
                        int64_t *);
    ap_status (*score)(ap_engine *, const float *, int32_t, int32_t, const int64_t *, int32_t,
                       float *, float *, int64_t *);
} ap_kernels;

extern const ap_kernels ap_kernels_scalar;
#ifdef AP_X86
extern const ap_kernels ap_kernels_avx2;
extern const ap_kernels ap_kernels_avxvnni;
extern const ap_kernels ap_kernels_avx512;
extern const ap_kernels ap_kernels_amx;
#elif defined(AP_ARM)
extern const ap_kernels ap_kernels_neon; /* with dot products */
extern const ap_kernels ap_kernels_i8mm; /* and those of mixed signs */
#endif

#endif
