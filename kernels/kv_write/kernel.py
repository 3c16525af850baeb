"""KV write on the GPU: norm, RoPE, Hadamard transform, quantization and scatter in one launch."""

import triton
import triton.language as tl

from appliance.kernels.device.hadamard import hadamard
from appliance.kernels.kv_page import layout

INT8_MAX: tl.constexpr = tl.constexpr(127.0)
FLOAT16_MAX: tl.constexpr = tl.constexpr(65504.0)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-24)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
# Adding and subtracting it rounds a small float32 to the nearest integer, halves to even.
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23
# The same to multiples of 2^-9, the smallest E4M3: the sum's last bits are the code.
E4M3_ROUNDER: tl.constexpr = tl.constexpr(16384.0)
PAGE: tl.constexpr = tl.constexpr(layout.PAGE_TOKENS)
ALL_BLOCK: tl.constexpr = tl.constexpr(1024)  # elements that a norm of all heads reads at a time


def _sources(order):
    """Return the sources of the bits of a byte's address: n is bit n of the token, 8 + n of d."""
    return tuple(int(name[1:]) + 8 * (name[0] == "d") for name in order.byte)


_KEY_BITS_8: tl.constexpr = tl.constexpr(_sources(layout.KEYS[8]))
_VALUE_BITS_8: tl.constexpr = tl.constexpr(_sources(layout.VALUES[8]))
_ROW_BITS_8: tl.constexpr = tl.constexpr(_sources(layout.IN_ROWS))
_KEY_BITS_4: tl.constexpr = tl.constexpr(_sources(layout.KEYS[4]))
_VALUE_BITS_4: tl.constexpr = tl.constexpr(_sources(layout.VALUES[4]))
# Dimensions between the two codes of a byte.
_KEY_PAIR: tl.constexpr = tl.constexpr(1 << int(layout.KEYS[4].nibble[1:]))
_VALUE_PAIR: tl.constexpr = tl.constexpr(1 << int(layout.VALUES[4].nibble[1:]))


@triton.jit
def code_byte(o_dim, token, SOURCES: tl.constexpr, COUNT: tl.constexpr):
    """Return the byte of a page's codes with a dimension of a token: `CodeOrder.address`."""
    address = (o_dim >> 5) << COUNT
    for place in tl.static_range(COUNT):
        if SOURCES[place] < 8:
            address += ((token >> SOURCES[place]) & 1) << place
        else:
            address += ((o_dim >> (SOURCES[place] - 8)) & 1) << place
    return address


@triton.jit
def round_even(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def e4m3_code(x):
    """Return the nearest E4M3 code, saturated; in integers, so every GPU gives the same."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    b_size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = b_size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (b_size + E4M3_ROUNDER).to(tl.int32, bitcast=True) & 0xFF
    return sign | tl.where(b_size < 0.015625, small, normal)


@triton.jit
def root_of_all(p_row, count, eps):
    """Return 1 / sqrt(mean(x^2) + eps) of a token's heads, which lie side by side."""
    o_at = tl.arange(0, ALL_BLOCK)
    b_sum = tl.zeros((ALL_BLOCK,), tl.float32)
    for start in tl.range(0, count, ALL_BLOCK, num_stages=1):
        b_x = tl.load(p_row + start + o_at, mask=start + o_at < count, other=0.0).to(tl.float32)
        b_sum += b_x * b_x
    return tl.rsqrt(tl.sum(b_sum, 0) / count + eps)


@triton.jit
def roots_of_each(b_x, eps, HEAD_DIM: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each head, (heads, 1)."""
    return tl.rsqrt(tl.sum(b_x * b_x, 1) / HEAD_DIM + eps)[:, None]


@triton.jit
def prepare(
    p_row,  # where the token's first head begins
    num_heads,
    b_head,  # (BLOCK_HEADS,)
    b_valid,
    norm_ptr,
    p_cos,
    p_sin,
    eps,
    mean_ptr,  # (num_heads, HEAD_DIM)
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated dimensions; 0 without RoPE
    NORM: tl.constexpr,  # the value of a HeadNormKind, or None
    HAS_MEAN: tl.constexpr,
    HADAMARD: tl.constexpr,  # size; 0 without one
):
    """Return heads after norm and RoPE, subtraction of their mean and Hadamard transform.

    They are rounded to their dtype after each step.
    """
    DTYPE: tl.constexpr = p_row.dtype.element_ty
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_in = o_dim < HEAD_DIM
    b_at = (b_head * HEAD_DIM)[:, None]
    b_mask = b_valid[:, None] & b_in[None, :]
    b_x = tl.load(p_row + b_at + o_dim[None, :], mask=b_mask, other=0.0).to(tl.float32)
    p_weight = norm_ptr
    if NORM == "all":  # heads have weights of their own
        b_root = root_of_all(p_row, num_heads * HEAD_DIM, eps)
        p_weight += b_at
    elif NORM == "each":
        b_root = roots_of_each(b_x, eps, HEAD_DIM)
    if NORM == "all" or NORM == "each":
        b_weight = tl.load(p_weight + o_dim[None, :], mask=b_mask, other=0.0)
        b_x = (b_x * b_root * b_weight).to(DTYPE).to(tl.float32)
    if HALF > 0:
        b_turned = o_dim < 2 * HALF
        o_pair = tl.where(o_dim < HALF, o_dim + HALF, o_dim - HALF)
        b_pair_mask = b_valid[:, None] & b_turned[None, :]
        p_pair = p_row + b_at + o_pair[None, :]
        b_pair = tl.load(p_pair, mask=b_pair_mask, other=0.0).to(tl.float32)
        if NORM == "all" or NORM == "each":
            b_weight = tl.load(p_weight + o_pair[None, :], mask=b_pair_mask, other=0.0)
            b_pair = (b_pair * b_root * b_weight).to(DTYPE).to(tl.float32)
        b_cos = tl.load(p_cos + o_dim % HALF, mask=b_turned, other=1.0)
        b_sin = tl.load(p_sin + o_dim % HALF, mask=b_turned, other=0.0)
        b_sin = tl.where(o_dim < HALF, -b_sin, b_sin)
        b_x = b_x * b_cos[None, :] + b_pair * b_sin[None, :]
        b_x = b_x.to(DTYPE).to(tl.float32)
    if NORM == "rotated":
        b_weight = tl.load(norm_ptr + o_dim, mask=b_in, other=0.0)[None, :]
        b_x = (b_x * roots_of_each(b_x, eps, HEAD_DIM) * b_weight).to(DTYPE).to(tl.float32)
    if HAS_MEAN:
        b_x -= tl.load(mean_ptr + b_at + o_dim[None, :], mask=b_mask, other=0.0)
        b_x = b_x.to(DTYPE).to(tl.float32)
    if HADAMARD > 0:
        b_x = hadamard(b_x, HADAMARD).to(DTYPE).to(tl.float32)
    return b_x


@triton.jit
def write_heads(
    b_x,  # (BLOCK_HEADS, HEAD_DIM_PADDED) float32
    pages_ptr,
    halves_ptr,
    head_scales_ptr,
    b_page,  # (BLOCK_HEADS,) int64, number of the page
    token,
    b_head,
    b_valid,
    KV_FORMAT: tl.constexpr,
    IS_VALUE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,  # or bytes
):
    """Quantize one token's keys or values and store them in its slot."""
    DIMS: tl.constexpr = b_x.shape[1]
    HEADS: tl.constexpr = b_x.shape[0]
    o_dim = tl.arange(0, DIMS)
    b_in = o_dim < HEAD_DIM
    b_mask = b_valid[:, None] & b_in[None, :]
    b_base = b_page * PAGE_ELEMENTS
    if KV_FORMAT == "int8" or KV_FORMAT == "int8-rows" or KV_FORMAT == "fp8":
        if KV_FORMAT != "fp8":
            b_scale = tl.div_rn(tl.max(tl.abs(b_x), 1), INT8_MAX)
            b_scale = tl.minimum(b_scale, FLOAT16_MAX).to(tl.float16)
            # Codes use the stored scale; a row too small for one has codes 0.
            b_divisor = b_scale.to(tl.float32)
            b_divisor = tl.where(b_divisor > 0.0, b_divisor, float("inf"))[:, None]
            b_code = round_even(tl.div_rn(b_x, b_divisor))
            b_code = tl.minimum(tl.maximum(b_code, -INT8_MAX), INT8_MAX).to(tl.int32) + 128
            b_scale = tl.maximum(b_scale.to(tl.float32), SMALLEST_SCALE).to(tl.float16)
            b_record = (b_base + 2 * PAGE * HEAD_DIM_STORED) // 2 + token * 2
            tl.store(halves_ptr + b_record + (1 if IS_VALUE else 0), b_scale, mask=b_valid)
        else:
            b_divisor = tl.load(head_scales_ptr + b_head, mask=b_valid, other=1.0)[:, None]
            b_code = e4m3_code(tl.div_rn(b_x, b_divisor + tl.zeros_like(b_x)))
        if KV_FORMAT == "int8-rows":
            o_byte = code_byte(o_dim, token, _ROW_BITS_8, 10)
        else:
            o_byte = code_byte(o_dim, token, _VALUE_BITS_8 if IS_VALUE else _KEY_BITS_8, 10)
        if IS_VALUE:
            o_byte += PAGE * HEAD_DIM_STORED
        tl.store(pages_ptr + b_base[:, None] + o_byte[None, :], b_code.to(tl.uint8), mask=b_mask)
    elif KV_FORMAT == "int4":
        b_lowest = tl.min(tl.where(b_in[None, :], b_x, float("inf")), 1)
        b_highest = tl.max(tl.where(b_in[None, :], b_x, -float("inf")), 1)
        b_scale = tl.div_rn(b_highest - b_lowest, 15.0 + tl.zeros_like(b_lowest))
        b_scale = tl.minimum(tl.maximum(b_scale, SMALLEST_SCALE), FLOAT16_MAX).to(tl.float16)
        b_offset = b_lowest + 8.0 * b_scale.to(tl.float32)
        b_offset = tl.minimum(tl.maximum(b_offset, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)
        b_divisor = b_scale.to(tl.float32)[:, None] + tl.zeros_like(b_x)
        b_code = round_even(tl.div_rn(b_x - b_offset.to(tl.float32)[:, None], b_divisor))
        b_code = tl.minimum(tl.maximum(b_code + 8.0, 0.0), 15.0).to(tl.int32)
        b_record = (b_base + PAGE * HEAD_DIM_STORED) // 2 + token * 2
        if IS_VALUE:
            b_record += 2 * PAGE
        tl.store(halves_ptr + b_record, b_scale, mask=b_valid)
        tl.store(halves_ptr + b_record + 1, b_offset, mask=b_valid)
        # Padding dimensions stay 0, as allocated.
        b_code = tl.where(b_in[None, :], b_code, 0)
        PAIR: tl.constexpr = _VALUE_PAIR if IS_VALUE else _KEY_PAIR
        b_code = tl.reshape(b_code, (HEADS, DIMS // (2 * PAIR), 2, PAIR))
        b_low, b_high = tl.split(tl.permute(b_code, 0, 1, 3, 2))
        b_code = tl.reshape(b_low | (b_high << 4), (HEADS, DIMS // 2))
        o_half = tl.arange(0, DIMS // 2)
        o_half = o_half // PAIR * (2 * PAIR) + o_half % PAIR
        o_byte = code_byte(o_half, token, _VALUE_BITS_4 if IS_VALUE else _KEY_BITS_4, 9)
        if IS_VALUE:
            o_byte += PAGE * HEAD_DIM_STORED // 2
        b_mask = b_valid[:, None] & (o_half < HEAD_DIM)[None, :]
        tl.store(pages_ptr + b_base[:, None] + o_byte[None, :], b_code.to(tl.uint8), mask=b_mask)
    else:
        o_element = token * HEAD_DIM + o_dim
        if IS_VALUE:
            o_element += PAGE * HEAD_DIM
        b_x = b_x.to(pages_ptr.dtype.element_ty)
        tl.store(pages_ptr + b_base[:, None] + o_element[None, :], b_x, mask=b_mask)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def kv_write_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim), the queries; None without
    pages_ptr,  # (num_blocks, num_kv_heads, page) elements, or bytes if quantized
    halves_ptr,  # the same memory as float16, or None
    head_scales_ptr,  # (2, num_kv_heads) float32, or None
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    key_ptr,
    value_ptr,
    cos_ptr,  # (num_tokens, HALF) float32, or None
    sin_ptr,
    query_norm_ptr,  # (head_dim,) float32, for "all" (num_heads * head_dim,); or None
    key_norm_ptr,
    query_scale_ptr,  # (num_tokens,) float32, or None
    key_mean_ptr,  # (num_kv_heads, head_dim) float32, or None
    slot_mapping_ptr,  # (num_tokens,) int64; rows with a negative slot are not written
    query_stride,
    key_stride,
    value_stride,
    num_heads,
    num_kv_heads,
    eps,
    value_eps,  # of a norm of values, or None
    KV_FORMAT: tl.constexpr,  # the pages' layout
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HADAMARD: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_KEY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    o_head = tl.arange(0, BLOCK_HEADS)
    p_cos = cos_ptr
    p_sin = sin_ptr
    if HALF > 0:
        p_cos += i_token * HALF
        p_sin += i_token * HALF
    kv_parts = 0
    if HAS_KEY:
        kv_parts = (num_kv_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
        if i_part < kv_parts:
            slot = tl.load(slot_mapping_ptr + i_token)
            if slot >= 0:
                b_head = i_part * BLOCK_HEADS + o_head
                b_valid = b_head < num_kv_heads
                b_page = slot // PAGE * num_kv_heads + b_head
                token = (slot % PAGE).to(tl.int32)
                b_key = prepare(
                    key_ptr + i_token * key_stride,
                    num_kv_heads,
                    b_head,
                    b_valid,
                    key_norm_ptr,
                    p_cos,
                    p_sin,
                    eps,
                    key_mean_ptr,
                    HEAD_DIM,
                    HEAD_DIM_PADDED,
                    HALF,
                    NORM,
                    HAS_MEAN,
                    HADAMARD,
                )
                p_value = value_ptr + i_token * value_stride + (b_head * HEAD_DIM)[:, None]
                b_mask = b_valid[:, None] & (o_dim < HEAD_DIM)[None, :]
                b_value = tl.load(p_value + o_dim[None, :], mask=b_mask, other=0.0).to(tl.float32)
                if value_eps is not None:
                    b_value *= roots_of_each(b_value, value_eps, HEAD_DIM)
                    b_value = b_value.to(value_ptr.dtype.element_ty).to(tl.float32)
                write_heads(
                    b_key,
                    pages_ptr,
                    halves_ptr,
                    head_scales_ptr,
                    b_page,
                    token,
                    b_head,
                    b_valid,
                    KV_FORMAT,
                    False,
                    HEAD_DIM,
                    HEAD_DIM_STORED,
                    PAGE_ELEMENTS,
                )
                if KV_FORMAT == "fp8":
                    head_scales_ptr += num_kv_heads
                write_heads(
                    b_value,
                    pages_ptr,
                    halves_ptr,
                    head_scales_ptr,
                    b_page,
                    token,
                    b_head,
                    b_valid,
                    KV_FORMAT,
                    True,
                    HEAD_DIM,
                    HEAD_DIM_STORED,
                    PAGE_ELEMENTS,
                )
    if HAS_QUERY:  # noqa: SIM102  # a constant decides whether the rest is compiled
        if i_part >= kv_parts:
            b_head = (i_part - kv_parts) * BLOCK_HEADS + o_head
            b_valid = b_head < num_heads
            b_query = prepare(
                query_ptr + i_token * query_stride,
                num_heads,
                b_head,
                b_valid,
                query_norm_ptr,
                p_cos,
                p_sin,
                eps,
                None,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                HALF,
                NORM,
                False,
                HADAMARD,
            )
            if query_scale_ptr is not None:
                DTYPE: tl.constexpr = query_ptr.dtype.element_ty
                b_query *= tl.load(query_scale_ptr + i_token).to(DTYPE).to(tl.float32)
            p_output = (
                output_ptr + (i_token * num_heads + b_head)[:, None] * HEAD_DIM + o_dim[None, :]
            )
            b_mask = b_valid[:, None] & (o_dim < HEAD_DIM)[None, :]
            tl.store(p_output, b_query.to(output_ptr.dtype.element_ty), mask=b_mask)
