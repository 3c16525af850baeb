"""Widens the codes of the CPU library's tiles on the GPU; see linear_rows.h for their places."""

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(16)  # outputs of a tile
PIECE: tl.constexpr = tl.constexpr(32)  # inputs with planes side by side


@triton.jit
def widen_kernel(
    out_ptr,  # (out_features, in_features)
    words_ptr,  # (tiles, in_features * BITS / 2) int32: codes
    scale_ptr,  # (tiles, in_features / GROUP, 16) float32
    offset_ptr,  # the same
    values_ptr,  # (16,) float32, what codes stand for; None if for themselves
    order_ptr,  # (in_features,) int32, or None
    out_features,
    in_features,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write some inputs of one tile's outputs: code * scale + offset."""
    i_tile = tl.program_id(0).to(tl.int64)
    o_lane = tl.arange(0, LANES)[:, None]
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b_in = (o_k < in_features)[None, :]
    # A lane's word holds inputs 0 to 3 in the lowest bits of its bytes, then 4 to 7, and so on.
    p_words = words_ptr + i_tile * in_features * BITS // 2 + o_lane
    b_piece = (o_k // PIECE * (BITS * LANES))[None, :]
    b_at = (o_k % PIECE)[None, :]
    b_code = tl.zeros((LANES, BLOCK_K), tl.int32)
    if BITS == 8:
        b_word = tl.load(p_words + b_piece + b_at // 4 * LANES, mask=b_in, other=0)
        b_code = b_word >> b_at % 4 * 8 & 255
    else:
        if BITS > 3:
            b_word = tl.load(p_words + b_piece + b_at // 8 * LANES, mask=b_in, other=0)
            b_code = b_word >> b_at % 4 * 8 + b_at % 8 // 4 * 4 & 15
        LOW: tl.constexpr = 4 if BITS > 3 else 0
        if BITS % 4 >= 2:
            p_pairs = p_words + LOW * LANES + b_piece
            b_word = tl.load(p_pairs + b_at // 16 * LANES, mask=b_in, other=0)
            b_code = b_code | (b_word >> b_at % 4 * 8 + b_at % 16 // 4 * 2 & 3) << LOW
        if BITS % 2 == 1:
            b_word = tl.load(p_words + (BITS - 1) * LANES + b_piece, mask=b_in, other=0)
            b_code = b_code | (b_word >> b_at % 4 * 8 + b_at // 4 & 1) << (BITS - 1)
    b_value = b_code.to(tl.float32) if values_ptr is None else tl.load(values_ptr + b_code)
    b_group = (i_tile * (in_features // GROUP) + o_k // GROUP)[None, :] * LANES + o_lane
    b_scale = tl.load(scale_ptr + b_group, mask=b_in, other=0.0)
    b_value = b_value * b_scale + tl.load(offset_ptr + b_group, mask=b_in, other=0.0)
    b_column = o_k
    if order_ptr is not None:
        b_column = tl.load(order_ptr + o_k, mask=o_k < in_features, other=0)
    b_row = i_tile * LANES + o_lane
    tl.store(
        out_ptr + b_row * in_features + b_column[None, :],
        b_value.to(out_ptr.dtype.element_ty),
        mask=b_in & (b_row < out_features),
    )
