"""Multiplies FP8 weights by FP8 activations on the GPU, and quantizes activations row by row."""

import triton
import triton.language as tl

from appliance.kernels.packed_matmul.kernel import leave_partial, sum_partials

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
LEAST_NORMAL: tl.constexpr = tl.constexpr(0.015625)  # 2**-6
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23; see kv_write
SCALE_BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit
def to_e4m3(b_x):
    """Return e4m3 codes as uint8, rounded to nearest even; |x| is at most 448."""
    b_bits = tl.abs(b_x).to(tl.int32, bitcast=True)
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    b_small = (tl.abs(b_x) * 512.0 + ROUNDER).to(tl.int32, bitcast=True) & 0xF
    b_code = tl.where(tl.abs(b_x) < LEAST_NORMAL, b_small, b_normal)
    b_sign = (b_x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (b_code | b_sign).to(tl.uint8)


@triton.jit
def from_e4m3(b_code):
    """Return the float32 value of each code."""
    b_code = b_code.to(tl.int32)
    b_exponent = (b_code >> 3) & 15
    b_mantissa = (b_code & 7).to(tl.float32)
    b_normal = (8.0 + b_mantissa) * tl.exp2((b_exponent - 10).to(tl.float32))
    b_size = tl.where(b_exponent > 0, b_normal, b_mantissa * 0.001953125)
    return tl.where(b_code > 127, -b_size, b_size)


@triton.jit
def quantize_rows_kernel(
    codes_ptr,  # (num_tokens, in_features) uint8
    scales_ptr,  # (num_tokens,) float32
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    in_features,
    x_stride,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    b_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, in_features, BLOCK):
        b_mask = start + o < in_features
        b_x = tl.load(x_ptr + i_row * x_stride + start + o, mask=b_mask, other=0.0)
        b_largest = tl.maximum(b_largest, tl.abs(b_x.to(tl.float32)))
    scale = tl.div_rn(tl.max(b_largest, 0), E4M3_MAX)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    for start in range(0, in_features, BLOCK):
        b_mask = start + o < in_features
        b_x = tl.load(x_ptr + i_row * x_stride + start + o, mask=b_mask, other=0.0)
        b_x = tl.minimum(tl.maximum(b_x.to(tl.float32) * inverse, -E4M3_MAX), E4M3_MAX)
        tl.store(codes_ptr + i_row * in_features + start + o, to_e4m3(b_x), mask=b_mask)
    tl.store(scales_ptr + i_row, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def fp8_matmul_kernel(
    out_ptr,  # (num_tokens, out_features)
    x_ptr,  # (num_tokens, in_features) uint8, codes
    x_scales_ptr,  # (num_tokens,) float32
    codes_ptr,  # (out_features, in_features) uint8
    scales_ptr,  # float32, (out_features,), or by blocks if BLOCKWISE
    bias_ptr,  # (out_features,) float32, or None
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    BLOCKWISE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128: inputs that the tensor cores sum, and that share a scale
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,  # multiply e4m3 itself, else its values in bfloat16
):
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    b_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_valid_m, b_valid_n = b_m < num_tokens, b_n < out_features
    p_x = x_ptr + b_m.to(tl.int64)[None, :] * in_features + o_k[:, None]
    p_codes = codes_ptr + b_n.to(tl.int64)[:, None] * in_features + o_k[None, :]
    blocks_k = tl.cdiv(in_features, BLOCK_K)
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_block in tl.range(
        blocks_k * i_split // splits, blocks_k * (i_split + 1) // splits, num_stages=STAGES
    ):
        start = i_block * BLOCK_K
        b_mask_x, b_mask_codes = b_valid_m[None, :], b_valid_n[:, None]
        if not EVEN_K:
            b_valid_k = start + o_k < in_features
            b_mask_x = b_mask_x & b_valid_k[:, None]
            b_mask_codes = b_mask_codes & b_valid_k[None, :]
        b_x = tl.load(p_x + start, mask=b_mask_x, other=0)
        b_codes = tl.load(p_codes + start, mask=b_mask_codes, other=0)
        if NATIVE:
            b_codes = b_codes.to(tl.float8e4nv, bitcast=True)
            b_product = tl.dot(b_codes, b_x.to(tl.float8e4nv, bitcast=True))
        else:
            b_weight = from_e4m3(b_codes).to(tl.bfloat16)
            b_product = tl.dot(b_weight, from_e4m3(b_x).to(tl.bfloat16))
        if BLOCKWISE:
            b_scale = tl.load(scales_ptr + b_n // SCALE_BLOCK * blocks_k + i_block, mask=b_valid_n)
            b_acc += b_product * b_scale[:, None]
        else:
            b_acc += b_product
    if splits > 1:
        i_out = i_n * tl.num_programs(0) + i_m
        if not leave_partial(b_acc, partial_ptr, arrived_ptr, i_out, i_split, splits):
            return
        b_acc = sum_partials(partial_ptr, arrived_ptr, i_out, splits, BLOCK_N, BLOCK_M)
    if not BLOCKWISE:
        b_acc *= tl.load(scales_ptr + b_n, mask=b_valid_n, other=0.0)[:, None]
    b_acc *= tl.load(x_scales_ptr + b_m, mask=b_valid_m, other=0.0)[None, :]
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + b_n, mask=b_valid_n, other=0.0)[:, None]
    b_at = b_m.to(tl.int64)[None, :] * out_features + b_n[:, None]
    b_mask = b_valid_m[None, :] & b_valid_n[:, None]
    tl.store(out_ptr + b_at, b_acc.to(out_ptr.dtype.element_ty), mask=b_mask)
