"""Repacks a weight for the GPU kernels, once, at load; in torch only.

Codes become tiles in the order of `weight_codes.order`. Scale and offset of a group become one
32-bit word for each output feature, tile by tile in the order of the codes, where w = (q - center)
* scale + offset with center 8 (4 bits) or 128 (8 bits).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.errors import UnsupportedModelError
from appliance.kernels.weight_codes.order import TILE_N, TileOrder, to_int32
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.trellis import symbols_of

if TYPE_CHECKING:
    from appliance.kernels.weights.fp4 import Fp4Weight
    from appliance.kernels.weights.trellis import TrellisWeight

ROW_MULTIPLE = 2 * TILE_N  # the tallest block of a kernel
REPACKED_AT_ONCE = 1 << 22  # elements; each takes about 20 bytes meanwhile
GATE_RUN = 8  # rows of gate, then of up: a thread of the epilogue has both
FLIP = 0x80  # top bit of 8-bit integer codes, which the kernels expect flipped
MOST_ZERO_POINT = 127  # the largest that a mantissa of bfloat16 holds beside 128
# Powers of two: by CODE_POWERS widened e2m1 is too small, and LEAST_POWERS is how far below them a
# scale stays exact with a code.
CODE_POWERS = {torch.bfloat16: 126, torch.float16: 14}
LEAST_POWERS = {torch.bfloat16: 120, torch.float16: 20}
E4M3_TOP = 9  # e4m3 stays below this power of two
HALF_ROUNDING = 2.0**-11


class Codes(Enum):
    """Kinds of codes; the values are those of the kernel's CODES."""

    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"
    # Codes that name values of a table
    IQ4 = "iq4"
    IQ3_S = "iq3_s_4"
    IQ3_XXS = "iq3_xxs_4"
    IQ2 = "iq2_3"
    IQ1 = "iq1_3"
    TRELLIS2 = "trellis2"  # symbols of `TrellisWeight`
    TRELLIS3 = "trellis3"
    TRELLIS4 = "trellis4"
    TRELLIS5 = "trellis5"

    @property
    def bits(self) -> int:
        return int(self.value[-1])

    @property
    def names_values(self) -> bool:
        """True if codes are places in a table of values."""
        return self.value.startswith("iq")

    @property
    def is_trellis(self) -> bool:
        return self.value.startswith("trellis")


class Params(Enum):
    """Kinds of scale words; the values are those of the kernel's PARAMS."""

    NONE = "none"  # one scale for each output feature, outside the words
    FP32 = "fp32"  # a float32 scale; the offset is zero everywhere
    FP16_ZERO = "fp16_zero"  # float16 scale in the low half, an integer zero point in the high one
    HALVES = "halves"  # two scales in the dtype of activations; each row has one more
    FP16_OFFSET = "fp16_offset"  # float16 scale and offset, in the low and the high half
    FP32_OFFSET = "fp32_offset"  # two words: float32 scale, float32 offset
    # Records of GGML's types, see `scale_records`.
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q6_K = "q6_k"
    IQ4_XS = "iq4_xs"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    ODD_32 = "odd_32"
    ODD_16 = "odd_16"


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A weight (out_features, in_features) in the kernels' layout.

    Attributes:
        codes: (tiles in n, tiles in k, words of a tile) int32.
        params: (tiles in n, groups, TILE_N) int32, with an axis of 2 before the last for
            FP32_OFFSET; (tiles in n, tiles in k, words, TILE_N) for HALVES; (tiles in n, records,
            words of a record) for records; None for NONE.
        channel_scale: (padded out_features,) float32 for NONE and HALVES, else None.
        kind: of the codes.
        params_kind: of the scale words.
        group_size: inputs that share a scale; 0 means all.
        block_k: inputs of a kernel's block; a row of tiles is a multiple of it.
        in_features: width of x.
        out_features: rows, without padding.
    """

    codes: Tensor
    params: Tensor | None
    channel_scale: Tensor | None
    kind: Codes
    params_kind: Params
    group_size: int
    block_k: int
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        tensors = (self.codes, self.params, self.channel_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def order(self) -> TileOrder:
        return TileOrder(self.kind.bits)

    @property
    def has_records(self) -> bool:
        """True if scales are made of a GGML type's integers and halves."""
        return record_words(self.params_kind, self.block_k) > 0


def record_words(kind: Params, block_k: int) -> int:
    """Return the words of a record: of 256 inputs, or of a kernel's block; 0 for other kinds."""
    short = {Params.Q5_0: block_k, Params.Q5_1: 2 * block_k}
    return {**_RECORD_WORDS, **short}.get(kind, 0)


_RECORD_WORDS = {
    Params.Q2_K: 5 * TILE_N,
    Params.Q3_K: 3 * TILE_N + TILE_N // 2,
    Params.Q4_K: 4 * TILE_N,
    Params.Q6_K: 4 * TILE_N + TILE_N // 2,
    Params.IQ4_XS: 2 * TILE_N,
    Params.ODD_32: TILE_N + TILE_N // 2,
    Params.ODD_16: 2 * TILE_N + TILE_N // 2,
}


def tile_packed(weight: PackedWeight) -> TiledWeight:
    """Repack integer codes in groups of a multiple of 32."""
    scale, offset = centered(weight)
    group_size = kernel_group_size(weight.group_size)
    assert group_size is not None, weight.group_size
    repeats = weight.group_size // group_size
    scale, offset = (t.repeat_interleave(repeats, dim=1) for t in (scale, offset))
    block_k = usual_block_k(weight.shape[1])
    groups = padded(weight.shape[1], block_k) // group_size
    words = _zero_words(weight)
    if words is not None and bool(offset.any()):
        kind, words = Params.FP16_ZERO, words.repeat_interleave(repeats, dim=1)
        words = _pad(words, groups).unsqueeze(1)
    else:
        kind, words = _words(_pad(scale, groups), _pad(offset, groups))
    flip = FLIP if weight.bits == 8 else 0
    return TiledWeight(
        codes=tile_codes(
            lambda rows: weight.rows(rows).unpack() ^ flip,
            weight.shape,
            TileOrder(weight.bits),
            block_k,
        ),
        params=_tile_rows(words),
        channel_scale=None,
        kind=Codes.INT4 if weight.bits == 4 else Codes.INT8,
        params_kind=kind,
        group_size=group_size,
        block_k=block_k,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
    )


def tile_fp8(codes: Tensor, scale: Tensor, group_size: int) -> TiledWeight:
    """Repack e4m3 codes.

    Args:
        codes: (out_features, in_features) uint8, the bits of e4m3.
        scale: (out_features,) float32 where group_size is 0, else (out_features, groups).
        group_size: 0 or 128.
    """
    block_k = usual_block_k(codes.shape[1])
    if group_size:
        groups = padded(codes.shape[1], block_k) // group_size
        params = _tile_rows(_pad(scale, groups).view(torch.int32).unsqueeze(1))
    return TiledWeight(
        codes=tile_codes(lambda rows: codes[rows], codes.shape, TileOrder(8), block_k),
        params=params if group_size else None,
        channel_scale=None if group_size else _pad_rows(scale),
        kind=Codes.FP8,
        params_kind=Params.FP32 if group_size else Params.NONE,
        group_size=group_size,
        block_k=block_k,
        in_features=codes.shape[1],
        out_features=codes.shape[0],
    )


def tile_fp4(weight: Fp4Weight, dtype: torch.dtype) -> TiledWeight:
    """Repack e2m1 codes; scales become the dtype of activations, exactly.

    The kernels build a value from a code's bits, too small by a power of two that the scales make
    up for; the row's own scale takes a part of it, so that no scale overflows.

    Raises:
        UnsupportedModelError: the range of a row's scales exceeds float16.
    """
    power = CODE_POWERS[dtype]
    scale, row_scale = weight.scale.float(), weight.row_scale
    if weight.scale.dtype == torch.float8_e4m3fn:
        down = torch.full_like(row_scale, 2.0**-E4M3_TOP)
    else:
        down = 1 / scale.amax(1)
    stored = (scale.double() * down.double()[:, None] * 2.0**power).to(dtype)
    if bool((stored.double() < 2.0 ** (power - LEAST_POWERS[dtype])).any()):
        msg = f"an MXFP4 weight of {weight.shape} has scales too far apart for {dtype}"
        raise UnsupportedModelError(f"{msg}; serve it in bfloat16")
    block_k, order = usual_block_k(weight.shape[1]), TileOrder(4)
    per_tile = order.tile_k // weight.group_size
    tiles_k = padded(weight.shape[1], block_k) // order.tile_k
    words = _pad(stored, tiles_k * per_tile).view(torch.int32)
    words = words.view(weight.shape[0], tiles_k * per_tile // 2).unsqueeze(1)
    return TiledWeight(
        codes=tile_codes(lambda rows: weight.rows(rows).unpack(), weight.shape, order, block_k),
        params=_tile_rows(words).unflatten(1, (tiles_k, per_tile // 2)),
        channel_scale=_pad_rows(row_scale / down),
        kind=Codes.FP4,
        params_kind=Params.HALVES,
        group_size=weight.group_size,
        block_k=block_k,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
    )


def tile_trellis(weight: TrellisWeight) -> TiledWeight:
    """Repack symbols in the order of `device.trellis_symbols`; x must be rotated."""
    block_k = usual_block_k(weight.shape[1])
    rows = torch.arange(16).view(8, 2).t().flatten().to(weight.symbols.device)

    def nibbles(low: int, size: int) -> Tensor:
        """Tile some bits of each symbol: (tiles in n, tiles in k, lanes, 4) int32."""

        def codes_of(some: slice) -> Tensor:
            blocks = weight.symbols[some.start // TILE_N : -(-some.stop // TILE_N)]
            codes: Tensor = symbols_of(blocks).transpose(1, 2) >> low & (1 << size) - 1
            by_lane: Tensor = codes.to(torch.uint8).unflatten(1, (-1, 16))
            return by_lane[:, :, rows].flatten(0, 2)

        shape = padded(weight.shape[0], TILE_N), weight.shape[1]
        tiles: Tensor = tile_codes(codes_of, shape, TileOrder(4), block_k).unflatten(2, (-1, 4))
        return tiles

    words = nibbles(0, min(weight.bits, 4))
    if weight.bits == 2:
        planes = [words[..., ::2] | words[..., 1::2] << 2]
    elif weight.bits == 3:
        tops = [(words[..., 3:] >> i & 0x11111111) << 3 for i in range(3)]
        planes = [words[..., :2] | torch.cat(tops[:2], -1), words[..., 2:3] | tops[2]]
    else:
        planes = [words]
    if weight.bits == 5:
        fifths = nibbles(4, 1)
        shifts = torch.arange(4, device=fifths.device)
        planes.append(to_int32((fifths.long() << shifts).sum(-1, keepdim=True)))
    return TiledWeight(
        codes=torch.cat([plane.flatten(2) for plane in planes], -1),
        params=None,
        channel_scale=_pad_rows(weight.scale.float()),
        kind=Codes(f"trellis{weight.bits}"),
        params_kind=Params.NONE,
        group_size=0,
        block_k=block_k,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
    )


def kernel_group_size(group_size: int) -> int | None:
    """Return the kernels' size of groups; a longer group becomes several with the same scale."""
    return next((size for size in (128, 64, 32) if group_size % size == 0), None)


def centered(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return float32 scale and offset of (q - center) * scale + offset, the offset rounded once."""
    center = 1 << (weight.bits - 1)
    scale, offset = weight.scale.double(), weight.offset.double()
    if weight.offset_kind is OffsetKind.ZERO_POINT:
        offset = (center - offset) * scale
    else:
        offset = offset + center * scale
    return scale.float(), offset.float()


def interleaved_gate_up(out_features: int) -> Tensor:
    """Return row numbers of gate above up in alternating runs, for the gated epilogue."""
    halves = torch.arange(out_features).view(2, -1, GATE_RUN)
    return halves.transpose(0, 1).flatten()


def pad_bias(bias: Tensor | None) -> Tensor | None:
    """Pad a bias, (out_features,) of any dtype, and convert it to float32."""
    return None if bias is None else _pad_rows(bias.float())


def _zero_words(weight: PackedWeight) -> Tensor | None:
    """Return words (out_features, groups) int32 of FP16_ZERO; None if they are inexact."""
    if weight.bits != 4 or weight.offset_kind is not OffsetKind.ZERO_POINT:
        return None
    scale, zero = weight.scale.half(), weight.offset.float()
    is_whole = bool(((zero >= 0) & (zero <= MOST_ZERO_POINT) & (zero == zero.round())).all())
    if not is_whole or not torch.equal(scale.float(), weight.scale.float()):
        return None
    low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
    return low | (zero.to(torch.int32) << 16)


def _words(scale: Tensor, offset: Tensor) -> tuple[Params, Tensor]:
    """Return scale words (out_features, words of a group, groups) int32, smallest exact form."""
    if not bool(offset.any()):
        return Params.FP32, scale.view(torch.int32).unsqueeze(1)
    halves = scale.half(), offset.half()
    bound = HALF_ROUNDING * torch.maximum(offset.abs(), scale.abs())
    fits = torch.equal(halves[0].float(), scale) & bool(
        ((halves[1].float() - offset).abs() <= bound).all()
    )
    if not fits:
        return Params.FP32_OFFSET, torch.stack((scale, offset), dim=1).view(torch.int32)
    return Params.FP16_OFFSET, torch.stack(halves, dim=-1).view(torch.int32).transpose(1, 2)


def _tile_rows(words: Tensor) -> Tensor:
    """Tile (out_features, words of a group, groups) to (tiles, groups, [words,] TILE_N)."""
    tiles = _pad_rows(words).view(-1, TILE_N, *words.shape[1:]).permute(0, 3, 2, 1)
    return (tiles.squeeze(2) if words.shape[1] == 1 else tiles).contiguous()


def tile_codes(
    codes_of: Callable[[slice], Tensor], shape: tuple[int, ...], order: TileOrder, block_k: int
) -> Tensor:
    """Tile codes, some rows at a time.

    Args:
        codes_of: returns the codes of some rows, (rows, in_features) uint8.
        shape: of the weight.
        order: of a tile.
        block_k: inputs of a kernel's block.

    Returns:
        (tiles in n, tiles in k, words of a tile) int32, padded with zeros.
    """
    out_features, in_features = shape
    width = padded(in_features, block_k)
    tiles_k = width // order.tile_k
    tiles: Tensor | None = None
    rows_at_once = max(TILE_N, REPACKED_AT_ONCE // width // TILE_N * TILE_N)
    for start in range(0, out_features, rows_at_once):
        codes = codes_of(slice(start, start + rows_at_once))
        if tiles is None:
            count = padded(out_features, ROW_MULTIPLE) // TILE_N
            tiles = codes.new_zeros(count, tiles_k, order.words, dtype=torch.int32)
        rows = padded(codes.shape[0], TILE_N) - codes.shape[0]
        codes = functional.pad(codes, (0, width - in_features, 0, rows))
        parts = codes.view(-1, TILE_N, tiles_k, order.tile_k).transpose(1, 2)
        first = start // TILE_N
        tiles[first : first + len(parts)] = order.pack(parts)
    assert tiles is not None
    return tiles


def usual_block_k(in_features: int) -> int:
    """Return the inputs of a kernel's block."""
    return 128 if in_features % 128 == 0 else 64


def padded(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


def _pad(x: Tensor, columns: int) -> Tensor:
    return functional.pad(x, (0, columns - x.shape[1])).contiguous()


def _pad_rows(x: Tensor) -> Tensor:
    rows = x.new_zeros(padded(x.shape[0], ROW_MULTIPLE), *x.shape[1:])
    rows[: x.shape[0]] = x
    return rows
