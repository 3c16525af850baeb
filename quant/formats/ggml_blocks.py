"""Stores codes in blocks of the GGML types Q4_0, Q4_1, Q8_0, Q4_K and Q6_K.

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
from appliance.kernels.weights.ggml_types import GGML_TYPES, SUPERBLOCK
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.pack import exact_enough, scales_in_groups, zero_points_of
from appliance.quant.formats.scheme import SuperBlockScheme, WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.kernels.weights.fp8 import Fp8Weight
    from appliance.quant.formats.scheme import LinearScheme

GROUP = 32  # weights of a block
_TYPES = {  # of schemes in groups of 32
    WeightScheme(4, GROUP): "Q4_0",
    WeightScheme(4, GROUP, symmetric=False): "Q4_1",
    WeightScheme(8, GROUP): "Q8_0",
}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """The numbers of K-type blocks beside their codes.

    Attributes:
        step: (out_features, super-blocks) float16.
        min_step: likewise; unused in Q6_K.
        scales: (out_features, groups) whole numbers, multiples of `step`.
        minima: likewise, of `min_step`; they are subtracted.
    """

    step: Tensor
    min_step: Tensor
    scales: Tensor
    minima: Tensor


def row_bytes(type_name: str, in_features: int) -> int:
    """Return the bytes of a row of whole blocks."""
    if type_name in _BLOCK_BYTES:
        return in_features // GROUP * _BLOCK_BYTES[type_name]
    return in_features // SUPERBLOCK * GGML_TYPES[type_name].block_bytes


def encode_super_blocks(type_name: str, codes: Tensor, parts: SuperBlocks) -> GgmlWeight:
    """Build a weight from codes, (out_features, in_features) uint8."""
    rows, blocks = parts.step.shape
    scales = parts.scales.view(rows, blocks, -1)
    codes = codes.view(rows, blocks, SUPERBLOCK)
    if type_name == "Q6_K":
        found = torch.cat(
            (
                _nibble_runs(codes & 0xF, 64),
                _bit_pairs(codes >> 4),
                scales.to(torch.int8).view(torch.uint8),
                _bytes(parts.step),
            ),
            dim=-1,
        )
    else:
        minima = parts.minima.view(rows, blocks, -1)
        found = torch.cat(
            (
                _bytes(parts.step),
                _bytes(parts.min_step),
                _six_bits(scales.to(torch.uint8), minima.to(torch.uint8)),
                _nibble_runs(codes, 32),
            ),
            dim=-1,
        )
    return GgmlWeight(type_name, found)


def _nibble_runs(codes: Tensor, run: int) -> Tensor:
    """Pack (rows, blocks, 256): of each two runs the first in the low nibbles."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2, run))
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)


def _bit_pairs(codes: Tensor) -> Tensor:
    """Pack (rows, blocks, 256) below 4, four runs of 32 in each 32 bytes, the first lowest."""
    runs: Tensor = codes.unflatten(-1, (2, 4, 32))
    first, second, third, fourth = runs.unbind(-2)
    return (first | second << 2 | third << 4 | fourth << 6).flatten(2)


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

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight | GgmlWeight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
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
    if isinstance(scheme, SuperBlockScheme):
        return scheme.type_name
    found = _TYPES.get(scheme) if isinstance(scheme, WeightScheme) else None
    if found is None:
        raise ConfigError(
            f"--format gguf holds no weight such as {name} with {scheme}; use --bits 4, 6 or 8 in"
            " groups of 32"
        )
    return found
