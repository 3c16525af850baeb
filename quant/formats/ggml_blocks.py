"""Stores codes in blocks of GGML types: those of `BlockScheme`, and a folder's as they are.

Codes do not change; a group of more than 32 inputs repeats its scale. The layouts are those of
llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.ggml_forms import FORMS, GROUP, BlockScheme
from appliance.quant.formats.pack import (
    exact_enough,
    pack_codes,
    scales_in_groups,
    zero_points_of,
)
from appliance.quant.formats.scheme import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.kernels.weights.weight import Packed
    from appliance.quant.formats.scheme import LinearScheme

_TYPES = {  # of schemes in groups of 32
    WeightScheme(4, GROUP): "Q4_0",
    WeightScheme(4, GROUP, symmetric=False): "Q4_1",
    WeightScheme(8, GROUP): "Q8_0",
}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """The numbers of blocks beside their codes.

    Attributes:
        step: (out_features, blocks) float16, the scale of a group or super-block.
        minimum: likewise; None without. Subtracted if it is a super-block's, else added.
        scales: (out_features, groups) whole multiples of `step`; None if a group is a block.
        minima: likewise, of `minimum`.
    """

    step: Tensor
    minimum: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None


def row_bytes(type_name: str, in_features: int) -> int:
    """Return the bytes of a row of whole blocks."""
    known = GGML_TYPES.get(type_name)
    of_block = _BLOCK_BYTES[type_name] if known is None else known.block_bytes
    return in_features // FORMS[type_name].block_size * of_block


def encode_blocks(
    type_name: str, codes: Tensor, numbers: BlockNumbers
) -> GgmlWeight | PackedWeight:
    """Build a weight of a type of `FORMS`.

    Args:
        codes: (out_features, in_features) uint8, places in the type's values.
    """
    if type_name in _BLOCK_BYTES:
        return _packed(type_name, codes, numbers)
    rows, blocks = numbers.step.shape
    codes = codes.view(rows, blocks, -1)
    found = _LAYOUTS[type_name](codes, _Parts.of(numbers))
    return GgmlWeight(type_name, torch.cat(found, dim=-1))


def _packed(type_name: str, codes: Tensor, numbers: BlockNumbers) -> PackedWeight:
    """Build a weight of a type that is held with neighbouring codes in a byte."""
    form = FORMS[type_name]
    bits = (len(form.values) - 1).bit_length()
    offset = form.values[0] * numbers.step if numbers.minimum is None else numbers.minimum
    return PackedWeight(
        codes=pack_codes(codes, bits),
        scale=numbers.step,
        offset=offset,
        offset_kind=OffsetKind.ADDITIVE,
        bits=bits,
        group_size=form.group_size,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Numbers of blocks as bytes, (rows, blocks, 2), and integers, (rows, blocks, groups)."""

    step: Tensor
    minimum: Tensor
    scales: Tensor
    minima: Tensor

    @classmethod
    def of(cls, numbers: BlockNumbers) -> _Parts:
        none = numbers.step.new_empty((*numbers.step.shape, 0))

        def integers(values: Tensor | None) -> Tensor:
            if values is None:
                return none
            return values.view(*numbers.step.shape, -1).to(torch.int8)

        return cls(
            _bytes(numbers.step),
            none if numbers.minimum is None else _bytes(numbers.minimum),
            integers(numbers.scales),
            integers(numbers.minima),
        )

    @property
    def bytes_of_scales(self) -> Tensor:
        return self.scales.view(torch.uint8)

    @property
    def around_32(self) -> Tensor:
        return (self.scales + 32).view(torch.uint8)


def _q5(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    """Lay out Q5_0 and Q5_1: 32 fifth bits in four bytes before the nibbles."""
    eights = (codes >> 4).unflatten(-1, (4, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    high = (eights << shifts).sum(-1, dtype=torch.uint8)
    halves = (parts.step, parts.minimum) if parts.minimum.numel() else (parts.step,)
    return *halves, high, _nibble_runs(codes & 0xF, 16)


def _q2_k(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    both = parts.bytes_of_scales | parts.minima.view(torch.uint8) << 4
    return both, _bit_pairs(codes), parts.step, parts.minimum


def _q3_k(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    scales = parts.around_32
    low = scales[..., :8] & 0xF | (scales[..., 8:] & 0xF) << 4
    high = _joined((scales >> 4).unflatten(-1, (4, 4)), 2)
    return _bit_runs(codes >> 2), _bit_pairs(codes & 3), low, high, parts.step


def _q4_k(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    integers = _six_bits(parts.bytes_of_scales, parts.minima.view(torch.uint8))
    return parts.step, parts.minimum, integers, _nibble_runs(codes, 32)


def _q5_k(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    *numbers, nibbles = _q4_k(codes & 0xF, parts)
    return *numbers, _bit_runs(codes >> 4), nibbles


def _q6_k(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    low, high = _nibble_runs(codes & 0xF, 64), _bit_pairs(codes >> 4)
    return low, high, parts.bytes_of_scales, parts.step


def _iq4_nl(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    return parts.step, _nibble_runs(codes, 16)


def _iq4_xs(codes: Tensor, parts: _Parts) -> tuple[Tensor, ...]:
    scales = parts.around_32
    high = _joined((scales >> 4).unflatten(-1, (2, 4)).transpose(-1, -2), 2)
    low = _joined((scales & 0xF).unflatten(-1, (4, 2)).transpose(-1, -2), 4)
    return parts.step, high, low, _nibble_runs(codes, 16)


_LAYOUTS = {
    "Q5_0": _q5,
    "Q5_1": _q5,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def _joined(planes: Tensor, bits: int) -> Tensor:
    """Join (..., planes, n) uint8 below 2 ** bits into (..., n), the first plane lowest."""
    found = planes[..., 0, :]
    for place in range(1, planes.shape[-2]):
        found = found | planes[..., place, :] << bits * place
    return found


def _nibble_runs(codes: Tensor, run: int) -> Tensor:
    """Pack (rows, blocks, n): of each two runs the first in the low nibbles."""
    return _joined(codes.unflatten(-1, (-1, 2, run)), 4).flatten(2)


def _bit_pairs(codes: Tensor) -> Tensor:
    """Pack (rows, blocks, 256) below 4, four runs of 32 in each 32 bytes, the first lowest."""
    return _joined(codes.unflatten(-1, (2, 4, 32)), 2).flatten(2)


def _bit_runs(bits: Tensor) -> Tensor:
    """Pack (rows, blocks, 256) below 2, eight runs of 32, the first lowest."""
    return _joined(bits.unflatten(-1, (8, 32)), 1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack 8 scales and 8 minima below 64 into 12 bytes: (rows, blocks, 12)."""
    high = scales[..., 4:] >> 4, minima[..., 4:] >> 4
    return torch.cat(
        (
            scales[..., :4] | high[0] << 6,
            minima[..., :4] | high[1] << 6,
            scales[..., 4:] & 0xF | minima[..., 4:] << 4,
        ),
        dim=-1,
    )


def block_type(name: str, weight: PackedWeight) -> str:
    """Choose the GGML type that holds all of a weight's codes and scales.

    Returns:
        `Q4_0` or `Q8_0`; `Q4_1` for 4 bits with zero points, its minima rounded to 16 bits.

    Raises:
        QuantizeError: no type holds them.
    """
    if weight.input_order is not None:
        raise _refusal(name, "inputs in an order of their own (act-order)")
    if weight.group_size % GROUP:
        raise _refusal(name, f"groups of {weight.group_size}")
    zero_points = zero_points_of(weight)
    if zero_points is not None and bool((zero_points == 1 << (weight.bits - 1)).all()):
        return "Q4_0" if weight.bits == 4 else "Q8_0"
    if weight.bits != 4:
        raise _refusal(name, "8 bits with zero points")
    return "Q4_1"


def encode(name: str, weight: PackedWeight, type_name: str) -> Tensor:
    """Encode a weight as (out_features, bytes of a row) uint8.

    Args:
        type_name: from `block_type` or `type_of_scheme`.

    Raises:
        QuantizeError: float16 cannot hold a scale.
    """
    rows = weight.shape[0]
    scale = _in_blocks(exact_enough(name, weight.scale), weight)
    codes = weight.unpack().view(rows, -1, GROUP)
    if type_name == "Q8_0":
        return torch.cat((_bytes(scale), codes ^ 0x80), dim=-1).flatten(1)
    halves = [_bytes(scale)]
    if type_name == "Q4_1":
        offset = weight.offset.float()
        if weight.offset_kind is OffsetKind.ZERO_POINT:
            offset = -offset * weight.scale.float()
        minimum = offset.half()
        if not bool(minimum.isfinite().all()):
            raise _refusal(name, "an offset beyond float16")
        halves.append(_bytes(_in_blocks(minimum, weight)))
    nibbles = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return torch.cat((*halves, nibbles), dim=-1).flatten(1)


def _in_blocks(values: Tensor, weight: PackedWeight) -> Tensor:
    """Repeat values (rows, groups) once per 32 inputs."""
    return scales_in_groups(values, weight.group_size, GROUP)


def _bytes(halves: Tensor) -> Tensor:
    """View float16 (rows, blocks) as bytes (rows, blocks, 2)."""
    return halves.contiguous().unsqueeze(-1).view(torch.uint8)


def _refusal(name: str, what: str) -> QuantizeError:
    return QuantizeError(
        f"{name} has {what}, which no block of Q4_0, Q4_1 or Q8_0 holds; quantize it with --bits 4,"
        " or with --method int8 --group-size 32"
    )


@dataclass(frozen=True, slots=True)
class GGUFStore:
    """A `WeightStore` whose tensors are a GGUF file's: rows of blocks, under the weight's name."""

    @classmethod
    def of(cls, schemes: Mapping[str, LinearScheme | None]) -> GGUFStore:
        """Return the store; raise ConfigError if no type holds one of the schemes."""
        for name, scheme in schemes.items():
            if scheme is not None:
                type_of_scheme(name, scheme)
        return cls()

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        width = row_bytes(type_of_scheme(name, scheme), shape[1])
        return {name: (torch.uint8, (shape[0], width))}

    def encode(self, name: str, weight: Packed, scheme: LinearScheme) -> dict[str, Tensor]:
        if isinstance(weight, GgmlWeight):
            if not weight.is_finite():
                raise _refusal(name, "weights beyond float16")
            return {name: weight.blocks.flatten(1)}
        assert isinstance(weight, PackedWeight), name
        return {name: encode(name, weight, type_of_scheme(name, scheme))}

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        """Return nothing: the file names the type of each tensor."""
        return {}


def type_of_scheme(name: str, scheme: LinearScheme) -> str:
    """Return the type that holds a scheme's codes and scales.

    Raises:
        ConfigError: no type that is written does.
    """
    if isinstance(scheme, BlockScheme):
        return scheme.type_name
    found = _TYPES.get(scheme) if isinstance(scheme, WeightScheme) else None
    if found is None:
        raise ConfigError(
            f"--format gguf holds no weight such as {name} with {scheme}; name a type with --type"
        )
    return found
