/* The size of a cache page. */
#include "page.h"

int64_t ap_page_bytes(int32_t format, int32_t head_dim) {
    if (format < AP_F32 || format >= AP_NUM_FORMATS) return -1;
    if (head_dim <= 0 || head_dim > 512 || head_dim % AP_LANES) return -1;
    return page_of(format, head_dim).bytes;
}
