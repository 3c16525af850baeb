/* Laying out row-major weights in tiles; see ap_linear. The same for every instruction set. */
#ifndef AP_PACK_H
#define AP_PACK_H

#include "engine.h"

ap_status pack_linear(ap_engine *engine, const ap_linear *linear, const void *codes,
                      const void *scales, const void *offsets, int32_t source_scale_format,
                      int32_t source_group);

#endif
