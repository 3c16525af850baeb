"""KV write on the GPU: one program casts or quantizes some heads of one token into its slot."""

import triton
import triton.language as tl

INT8_MAX: tl.constexpr = tl.constexpr(127.0)
FLOAT16_MAX: tl.constexpr = tl.constexpr(65504.0)
# Added and taken away again, it rounds a small float32 to the nearest integer, halves to even.
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23


@triton.jit
def write_rows(
    elements_ptr,
    scales_ptr,
    b_x,  # (BLOCK_HEADS, HEAD_DIM_PADDED), zero where masked
    b_row,  # (BLOCK_HEADS,) slot * num_kv_heads + head
    b_offset,  # (BLOCK_HEADS, HEAD_DIM_PADDED)
    b_valid,
    b_mask,
    KV_FORMAT: tl.constexpr,
):
    if KV_FORMAT == "int8":
        b_x = b_x.to(tl.float32)
        b_scale = tl.div_rn(tl.max(tl.abs(b_x), 1), INT8_MAX)
        b_scale = tl.minimum(b_scale, FLOAT16_MAX).to(tl.float16)
        # Codes are made with the scale as it is stored; where that is 0, so are the codes.
        b_divisor = b_scale.to(tl.float32)
        b_divisor = tl.where(b_divisor > 0.0, b_divisor, float("inf"))[:, None]
        b_x = (tl.div_rn(b_x, b_divisor) + ROUNDER) - ROUNDER
        b_x = tl.minimum(tl.maximum(b_x, -INT8_MAX), INT8_MAX)
        tl.store(scales_ptr + b_row, b_scale, mask=b_valid)
    tl.store(elements_ptr + b_offset, b_x.to(elements_ptr.dtype.element_ty), mask=b_mask)


@triton.jit
def kv_write_kernel(
    keys_ptr,  # (num_blocks, block_size, num_kv_heads, head_dim)
    values_ptr,
    key_scales_ptr,  # (num_blocks, block_size, num_kv_heads) float16, or None
    value_scales_ptr,
    key_ptr,  # (num_tokens, num_kv_heads, head_dim), rows key_stride apart
    value_ptr,
    slot_mapping_ptr,  # (num_tokens,) int64
    key_stride,
    value_stride,
    num_kv_heads,
    KV_FORMAT: tl.constexpr,  # the value of a KVFormat
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    i_token, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + i_token)
    o_head = i_part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_valid = o_head < num_kv_heads
    b_mask = b_valid[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_row = slot * num_kv_heads + o_head
    b_offset = b_row[:, None] * HEAD_DIM + o_dim[None, :]
    b_source = (o_head * HEAD_DIM)[:, None] + o_dim[None, :]
    b_key = tl.load(key_ptr + i_token * key_stride + b_source, mask=b_mask, other=0.0)
    b_value = tl.load(value_ptr + i_token * value_stride + b_source, mask=b_mask, other=0.0)
    write_rows(keys_ptr, key_scales_ptr, b_key, b_row, b_offset, b_valid, b_mask, KV_FORMAT)
    write_rows(values_ptr, value_scales_ptr, b_value, b_row, b_offset, b_valid, b_mask, KV_FORMAT)
