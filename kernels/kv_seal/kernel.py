"""Sealing on the GPU: one program requantizes the 32 tokens of one KV head."""

import triton
import triton.language as tl

from appliance.kernels.kv_page import layout
from appliance.kernels.kv_write.kernel import (
    _KEY_BITS_4,
    _KEY_BITS_8,
    _KEY_PAIR,
    _VALUE_BITS_4,
    _VALUE_BITS_8,
    _VALUE_PAIR,
    FLOAT16_MAX,
    SMALLEST_SCALE,
    code_byte,
    round_even,
)

PAGE: tl.constexpr = tl.constexpr(layout.PAGE_TOKENS)


@triton.jit
def int4_scales(b_lowest, b_highest):
    """Return float16 scale and offset of values between two bounds."""
    b_scale = tl.div_rn(b_highest - b_lowest, 15.0 + tl.zeros_like(b_lowest))
    b_scale = tl.minimum(tl.maximum(b_scale, SMALLEST_SCALE), FLOAT16_MAX).to(tl.float16)
    b_offset = b_lowest + 8.0 * b_scale.to(tl.float32)
    return b_scale, tl.minimum(tl.maximum(b_offset, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)


@triton.jit
def int4_codes(b_x, b_scale, b_offset):
    b_divisor = b_scale.to(tl.float32) + tl.zeros_like(b_x)
    b_code = round_even(tl.div_rn(b_x - b_offset.to(tl.float32), b_divisor))
    return tl.minimum(tl.maximum(b_code + 8.0, 0.0), 15.0).to(tl.int32)


@triton.jit
def open_values(pages_ptr, halves_ptr, base, IS_VALUE: tl.constexpr, HEAD_DIM_STORED, b_in):
    """Return an open block's keys or values, (32, dims) float32."""
    o_token = tl.arange(0, PAGE)
    o_dim = tl.arange(0, b_in.shape[0])
    o_byte = code_byte(
        o_dim[None, :], o_token[:, None], _VALUE_BITS_8 if IS_VALUE else _KEY_BITS_8, 10
    )
    if IS_VALUE:
        o_byte += PAGE * HEAD_DIM_STORED
    b_code = tl.load(pages_ptr + base + o_byte, mask=b_in[None, :], other=128).to(tl.int32) - 128
    record = (base + 2 * PAGE * HEAD_DIM_STORED) // 2 + (1 if IS_VALUE else 0)
    b_scale = tl.load(halves_ptr + record + o_token * 2).to(tl.float32)
    return b_code.to(tl.float32) * b_scale[:, None]


@triton.jit
def store_nibbles(
    pages_ptr, base, b_code, SOURCES: tl.constexpr, PAIR: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store codes (32, dims) in the bytes from `base` on."""
    DIMS: tl.constexpr = b_code.shape[1]
    b_code = tl.reshape(b_code, (PAGE, DIMS // (2 * PAIR), 2, PAIR))
    b_low, b_high = tl.split(tl.permute(b_code, 0, 1, 3, 2))
    b_code = tl.reshape(b_low | (b_high << 4), (PAGE, DIMS // 2))
    o_half = tl.arange(0, DIMS // 2)
    o_half = o_half // PAIR * (2 * PAIR) + o_half % PAIR
    o_byte = code_byte(o_half[None, :], tl.arange(0, PAGE)[:, None], SOURCES, 9)
    b_mask = (o_half < HEAD_DIM)[None, :] & (tl.arange(0, PAGE) >= 0)[:, None]
    tl.store(pages_ptr + base + o_byte, b_code.to(tl.uint8), mask=b_mask)


@triton.jit
def seal_kernel(
    closed_ptr,  # (num_blocks, num_kv_heads, page) uint8
    closed_halves_ptr,  # the same memory as float16
    open_ptr,  # (num_open, num_kv_heads, page) uint8
    open_halves_ptr,
    moves_ptr,  # (num_moves, 2) int64: open block, block; a negative one is padding
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    CLOSED_BYTES: tl.constexpr,
    OPEN_BYTES: tl.constexpr,
):
    p_move = moves_ptr + tl.program_id(0) * 2
    slot = tl.load(p_move)
    if slot < 0:
        return
    i_head = tl.program_id(1)
    source = (slot * num_kv_heads + i_head) * OPEN_BYTES
    target = (tl.load(p_move + 1) * num_kv_heads + i_head) * CLOSED_BYTES
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    o_token = tl.arange(0, PAGE)
    b_in = o_dim < HEAD_DIM

    b_key = open_values(open_ptr, open_halves_ptr, source, False, HEAD_DIM_STORED, b_in)
    b_scale, b_offset = int4_scales(tl.min(b_key, 0), tl.max(b_key, 0))
    b_code = tl.where(b_in[None, :], int4_codes(b_key, b_scale[None, :], b_offset[None, :]), 0)
    store_nibbles(closed_ptr, target, b_code, _KEY_BITS_4, _KEY_PAIR, HEAD_DIM)
    record = (target + PAGE * HEAD_DIM_STORED) // 2  # in halves
    # The row of a dimension in the keys' tile: the inverse of `key_dims`.
    o_row = (o_dim & ~28) | ((o_dim & 4) << 2) | ((o_dim & 24) >> 1)
    p_channel = closed_halves_ptr + record + 2 * PAGE + o_row
    tl.store(p_channel, b_scale, mask=b_in)
    tl.store(p_channel + HEAD_DIM_STORED, b_offset, mask=b_in)

    b_value = open_values(open_ptr, open_halves_ptr, source, True, HEAD_DIM_STORED, b_in)
    b_lowest = tl.min(tl.where(b_in[None, :], b_value, float("inf")), 1)
    b_highest = tl.max(tl.where(b_in[None, :], b_value, -float("inf")), 1)
    b_scale, b_offset = int4_scales(b_lowest, b_highest)
    b_code = tl.where(b_in[None, :], int4_codes(b_value, b_scale[:, None], b_offset[:, None]), 0)
    values = target + PAGE * HEAD_DIM_STORED // 2
    store_nibbles(closed_ptr, values, b_code, _VALUE_BITS_4, _VALUE_PAIR, HEAD_DIM)
    tl.store(closed_halves_ptr + record + o_token * 2, b_scale)
    tl.store(closed_halves_ptr + record + o_token * 2 + 1, b_offset)
