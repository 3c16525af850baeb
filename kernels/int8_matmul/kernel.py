"""Int8 matmul on the GPU: out.T = weight @ x.T by tensor cores that sum int8 products in int32.

Rows of x are rounded to int8, with a scale for each group that the weight has one for. Words of
4-bit codes, stored as for `packed_matmul`, become operand A's fragments of `mma.m16n8k32` in
registers. For that the codes of x stand in another order, that of `in_order`.
"""

import triton
import triton.language as tl

from appliance.kernels.device.group_products import TILE_N, load_scales
from appliance.kernels.device.scale_records import load_record, record_scales
from appliance.kernels.gated_activation.kernel import gated_rows
from appliance.kernels.packed_matmul.kernel import leave_partial, sum_partials

MOST: tl.constexpr = tl.constexpr(127.0)  # of a code of x
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # float32
LEAST_SCALE: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # whose inverse is finite
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: its mantissa takes an integer
ROUNDER_BITS: tl.constexpr = tl.constexpr(0x4B400000)
TILE_K: tl.constexpr = tl.constexpr(64)  # inputs of a stored tile
TILE_BYTES: tl.constexpr = tl.constexpr(2048)  # of its codes
LANES: tl.constexpr = tl.constexpr(128)  # of all warps that share a tile
MIDDLE: tl.constexpr = tl.constexpr(8)  # the code that stands for 0
# Codes less the middle one, in the upper halves of bytes: 16 times as large, with their sign.
SIXTEENTH: tl.constexpr = tl.constexpr(0.0625)
# a & b ^ c leaves a nibble and flips its sign; bytes 0 and 2 of a word belong to the first of its
# two output features, 1 and 3 to the second.
WIDEN: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, u; shl.b32 t, $2, 4;"
    " lop3.b32 t, t, 0xf0f0f0f0, 0x80808080, 0x6a; lop3.b32 u, $2, 0xf0f0f0f0, 0x80808080, 0x6a;"
    " prmt.b32 $0, t, u, 0x6420; prmt.b32 $1, t, u, 0x7531; }"
)


@triton.jit
def in_order(b_code):
    """Move the codes of every 16 inputs: bits 2, 1, 3 and 0 of an input become those of its place.

    A word of 4-bit codes has inputs 0, 1, 8 and 9 for a lane, which a fragment of int8 takes side
    by side.
    """
    ROWS: tl.constexpr = b_code.shape[0]
    COLUMNS: tl.constexpr = b_code.shape[1]
    b_bits = tl.reshape(b_code, (ROWS, COLUMNS // 16, 2, 2, 2, 2))
    return tl.reshape(tl.permute(b_bits, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_inputs_kernel(
    codes_ptr,  # (num_tokens, padded inputs) int8, in the order of `in_order`
    # (groups, columns) float32, 0 behind num_tokens; NaN if not all of a group is finite
    scales_ptr,
    sums_ptr,  # (groups, columns) float32, of codes over a group; 0 likewise; or None
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    num_tokens,
    in_features,
    x_stride,
    columns,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    b_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b_valid_m = (b_m < num_tokens)[:, None]
    b_row = b_m.to(tl.int64)[:, None]
    b_mask = b_valid_m & (b_k < in_features)[None, :]
    b_x = tl.load(x_ptr + b_row * x_stride + b_k[None, :], mask=b_mask, other=0.0).to(tl.float32)
    b_x = tl.reshape(b_x, (BLOCK_M, GROUPS, GROUP))
    b_finite = tl.abs(b_x) <= LARGEST
    b_x = tl.where(b_finite, b_x, 0.0)
    b_scale = tl.div_rn(tl.max(tl.abs(b_x), 2), MOST)
    b_has = b_scale >= LEAST_SCALE
    b_inverse = tl.where(b_has, tl.div_rn(1.0, tl.where(b_has, b_scale, 1.0)), 0.0)
    b_code = (b_x * b_inverse[:, :, None] + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    p_code = codes_ptr + b_row * (tl.num_programs(1) * BLOCK_K) + b_k[None, :]
    b_bytes = tl.reshape(b_code.to(tl.int8), (BLOCK_M, BLOCK_K))
    tl.store(p_code, in_order(b_bytes), mask=b_valid_m)
    b_group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    b_at = b_group[None, :] * columns + b_m[:, None]
    b_scale = tl.where(b_has, b_scale, 0.0)
    b_scale = tl.where(tl.min(b_finite.to(tl.int32), 2) == 1, b_scale, float("nan"))
    tl.store(scales_ptr + b_at, b_scale, mask=(b_m < columns)[:, None])
    if sums_ptr is not None:
        b_sum = tl.sum(b_code, 2).to(tl.float32)
        tl.store(sums_ptr + b_at, b_sum, mask=(b_m < columns)[:, None])


@triton.jit
def to_int8(
    b_bytes,  # of words of 4-bit codes, one after another
    AXES: tl.constexpr,  # of `TileOrder.int8_axes`
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return 16 times the codes less the middle one, (SIDE_N, SIDE_K) int8."""
    TILES_N: tl.constexpr = SIDE_N // TILE_N
    if ASM:
        b_one, b_other = tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [b_bytes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        b_first, b_second = tl.split(tl.reshape(b_bytes, (b_bytes.numel // 4, 2, 2)))
        b_one, b_other = both_halves(b_first), both_halves(b_second)
    b_planes = tl.join(b_one, b_other)
    if len(AXES) == 14:
        b_bits = tl.reshape(b_planes, (TILES_N, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12], AXES[13],
        )  # fmt: skip
    else:
        b_bits = tl.reshape(b_planes, (TILES_N, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12],
        )  # fmt: skip
    b_weight = tl.reshape(b_bits, (SIDE_N, SIDE_K))
    if ASM:
        # No instruction; see `weight_codes.kernel.as_operand`.
        b_weight = tl.inline_asm_elementwise(
            "", "=r,0", [b_weight], dtype=tl.int8, is_pure=False, pack=4
        )
    return b_weight


@triton.jit
def both_halves(b_bytes):
    """Do to two bytes of each word what WIDEN does."""
    b_bytes = b_bytes.to(tl.int32)
    b_low = (((b_bytes & 15) - MIDDLE) * 16).to(tl.int8)
    b_high = (((b_bytes >> 4 & 15) - MIDDLE) * 16).to(tl.int8)
    return tl.reshape(tl.permute(tl.join(b_low, b_high), (0, 2, 1)), (b_bytes.shape[0], 4))


@triton.jit
def bytes_of_group(b_bytes, GROUP: tl.constexpr):
    """Return the bytes of some tiles that hold one of their two groups of 32 inputs."""
    b_lanes = tl.reshape(b_bytes, (b_bytes.shape[0] * LANES, 2, 8))
    b_first, b_second = tl.split(tl.permute(b_lanes, (0, 2, 1)))
    return b_first if GROUP == 0 else b_second


@triton.jit(do_not_specialize=["num_tokens"])
def int8_matmul_kernel(
    out_ptr,  # (num_tokens, out_features)
    x_ptr,  # (num_tokens, inputs of all blocks) int8; this and the next two of the kernel above
    x_scales_ptr,
    sums_ptr,  # None without offsets
    codes_ptr,  # this and the next as for `packed_matmul_kernel`
    params_ptr,
    bias_ptr,  # (padded out_features,) float32, or None
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,  # of the result; half of the weight's rows if there is an ACTIVATION
    columns,
    blocks_k,  # of BLOCK_K inputs
    AXES: tl.constexpr,
    PARAMS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale, of the weight and of x: 32, 64 or 128
    ACTIVATION: tl.constexpr,  # of `gated_rows`; None: all rows are said
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    STEP_K: tl.constexpr = min(GROUP, TILE_K)
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    i_tile = i_n * TILES_N
    tiles_k = blocks_k * (BLOCK_K // TILE_K)
    num_groups = blocks_k * (BLOCK_K // GROUP)

    b_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_x_row = tl.minimum(b_m, num_tokens - 1).to(tl.int64) * (blocks_k * BLOCK_K)
    b_tile = (i_tile + tl.arange(0, TILES_N)).to(tl.int64)[:, None] * tiles_k
    p_tile = codes_ptr.to(tl.pointer_type(tl.int8)) + b_tile * TILE_BYTES
    o_byte = tl.arange(0, TILE_BYTES)[None, :]
    o_n = tl.arange(0, BLOCK_N)
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_block in tl.range(
        blocks_k * i_split // splits, blocks_k * (i_split + 1) // splits, num_stages=STAGES
    ):
        b_record = None
        if RECORD:
            b_record = load_record(params_ptr, o_n, i_tile, i_block, blocks_k, RECORD, PARAMS)
        # An integer in the mantissa of ROUNDER, which makes it a float without a conversion.
        b_product = tl.full((BLOCK_N, BLOCK_M), ROUNDER_BITS, tl.int32)
        for i_step in tl.static_range(BLOCK_K // STEP_K):
            at = i_block * BLOCK_K + i_step * STEP_K
            if STEP_K == TILE_K or i_step % 2 == 0:
                b_bytes = tl.load(p_tile + at // TILE_K * TILE_BYTES + o_byte)
            b_some = b_bytes if STEP_K == TILE_K else bytes_of_group(b_bytes, i_step % 2)
            b_weight = to_int8(b_some, AXES, BLOCK_N, STEP_K, ASM)
            b_x = tl.load(x_ptr + b_x_row[None, :] + (at + tl.arange(0, STEP_K))[:, None])
            b_product = tl.dot(b_weight, b_x, b_product, out_dtype=tl.int32)
            if (i_step + 1) * STEP_K % GROUP == 0:
                i_group = at // GROUP
                if RECORD:
                    b_0, b_1, b_2, b_3 = b_record
                    b_scale, b_offset = record_scales(b_0, b_1, b_2, b_3, i_step, MIDDLE, PARAMS)
                else:
                    b_scale, b_offset = load_scales(
                        params_ptr, i_tile, num_groups, i_group, TILES_N, PARAMS
                    )
                b_value = b_product.to(tl.float32, bitcast=True) - ROUNDER
                b_value *= (b_scale * SIXTEENTH)[:, None]
                if sums_ptr is not None:
                    b_sum = tl.load(sums_ptr + i_group * columns + b_m)
                    b_value += b_sum[None, :] * b_offset[:, None]
                b_acc += b_value * tl.load(x_scales_ptr + i_group * columns + b_m)[None, :]
                b_product = tl.full((BLOCK_N, BLOCK_M), ROUNDER_BITS, tl.int32)

    if splits > 1:
        i_out = i_n * tl.num_programs(0) + i_m
        if not leave_partial(b_acc, partial_ptr, arrived_ptr, i_out, i_split, splits):
            return
        b_acc = sum_partials(partial_ptr, arrived_ptr, i_out, splits, BLOCK_N, BLOCK_M)
    b_n = i_n * BLOCK_N + o_n
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + b_n)[:, None]
    if ACTIVATION is not None:
        b_acc = gated_rows(b_acc, ACTIVATION, LIMIT, ALPHA)
        b_n = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    b_at = b_m.to(tl.int64)[None, :] * out_features + b_n[:, None]
    b_mask = (b_m < num_tokens)[None, :] & (b_n < out_features)[:, None]
    tl.store(out_ptr + b_at, b_acc.to(out_ptr.dtype.element_ty), mask=b_mask)
