"""Converts quantized weights to a folder's tensors: one protocol, and the writers of all formats.

AWQ and GPTQ checkpoints have one bit width and one group size per model, so larger groups are split
into several with the same scale, which loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.errors import ConfigError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import BLOCK, SIGNS, TABLES, TrellisWeight
from appliance.quant.formats import awq, compressed_tensors, gptq, trellis
from appliance.quant.formats.awq import AwqLayout
from appliance.quant.formats.compressed_tensors_config import quantization_config
from appliance.quant.formats.gptq import V1, V2, GptqLayout
from appliance.quant.formats.scheme import GROUP_SIZES, WeightScheme
from appliance.quant.formats.word_packed import G_IDX, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Packed
    from appliance.quant.formats.scheme import LinearScheme

Weights = dict[str, tuple[tuple[int, int], WeightScheme]]  # shape and scheme by name


class WeightStore(Protocol):
    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the type and shape of each tensor that `encode` makes.

        Args:
            name: such as model.layers.0.self_attn.q_proj.weight.
            shape: (out_features, in_features).
            dtype: of scales, if the format allows a choice.
        """
        ...

    def encode(self, name: str, weight: Packed, scheme: LinearScheme) -> dict[str, Tensor]:
        """Convert a weight into stored tensors; raise QuantizeError if a scale does not fit."""
        ...

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        """Build config.json's `quantization_config`.

        Args:
            schemes: one per quantized module, by module name.
            kept: linear modules that stay unquantized.
            named: list the quantized modules by name, since some are no linears.
        """
        ...


def in_torch(
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Replace the names of types in a layout by torch's types."""
    return {part: (getattr(torch, name), shape) for part, (name, shape) in layout.items()}


@dataclass(frozen=True, slots=True)
class CompressedTensorsStore:
    """Writes compressed-tensors, which holds every scheme."""

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return in_torch(compressed_tensors.encoded_layout(name, shape, scheme, dtype_name(dtype)))

    def encode(self, name: str, weight: Packed, scheme: LinearScheme) -> dict[str, Tensor]:
        assert isinstance(weight, PackedWeight | Fp8Weight | Fp4Weight), name
        return compressed_tensors.encode(name, weight, scheme)

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        return quantization_config(schemes, kept, named=named)


@dataclass(frozen=True, slots=True)
class TrellisStore:
    """A `WeightStore` for the trellis format."""

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        module, (rows, columns) = name.removesuffix(WEIGHT), shape
        return {
            module + trellis.SYMBOLS: (torch.uint8, (-(-rows // BLOCK), columns, 8 * scheme.bits)),
            module + trellis.SCALE: (dtype, (rows,)),
        }

    def encode(self, name: str, weight: Packed, scheme: LinearScheme) -> dict[str, Tensor]:
        """Return symbols and scales; these are numbers of the stored type already."""
        assert isinstance(weight, TrellisWeight), name
        module = name.removesuffix(WEIGHT)
        return {module + trellis.SYMBOLS: weight.symbols, module + trellis.SCALE: weight.scale}

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        used = {scheme.bits for scheme in schemes.values()}
        return {
            "quant_method": trellis.METHOD,
            "version": trellis.VERSION,
            "signs": SIGNS.astype(int).tolist(),
            "tables": {str(bits): TABLES[bits] for bits in sorted(used)},
            "ignore": list(kept),
        }


@dataclass(frozen=True, slots=True)
class WordWriter:
    """A `WeightStore` for AWQ or GPTQ."""

    words: AwqLayout | GptqLayout

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the parts of a weight; all weights share one layout, with float16 scales."""
        parts = self.words.layout(shape)
        if isinstance(self.words, GptqLayout):
            parts[G_IDX] = ("int32", (shape[1],))
        found = {name.removesuffix(WEIGHT) + part: layout for part, layout in parts.items()}
        return in_torch(found)

    def encode(self, name: str, weight: Packed, scheme: LinearScheme) -> dict[str, Tensor]:
        assert isinstance(weight, PackedWeight), name
        parts = self.words.encode(name, weight)
        return {name.removesuffix(WEIGHT) + part: tensor for part, tensor in parts.items()}

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        if isinstance(self.words, AwqLayout):
            return awq.quantization_config(self.words, list(kept))
        return gptq.quantization_config(self.words, list(kept))


def awq_writer(weights: Weights) -> WordWriter:
    """Return an AWQ writer; raise ConfigError if AWQ cannot hold one of the weights."""
    _bits("awq", weights, (awq.BITS,))
    _check_rows("awq", weights, awq.PER_WORD)
    return WordWriter(AwqLayout(_group_size("awq", weights)))


def gptq_writer(weights: Weights) -> WordWriter:
    """Return a GPTQ writer: version 1, which all readers know, if all weights are symmetric.

    Raises:
        ConfigError: GPTQ cannot hold one of them.
    """
    bits = _bits("gptq", weights, gptq.BITS)
    _check_rows("gptq", weights, 32 // bits)
    version = V1 if all(scheme.symmetric for _, scheme in weights.values()) else V2
    return WordWriter(GptqLayout(bits, _group_size("gptq", weights), version))


def _bits(format: str, weights: Weights, supported: tuple[int, ...]) -> int:
    found = {scheme.bits for _, scheme in weights.values()}
    if len(found) != 1 or not found <= set(supported):
        raise ConfigError(
            f"--format {format} holds {' or '.join(map(str, supported))} bits, the same for all"
            f" layers, not {' and '.join(map(str, sorted(found)))}; use --format compressed-tensors"
        )
    return found.pop()


def _check_rows(format: str, weights: Weights, multiple: int) -> None:
    for name, ((rows, _), _) in weights.items():
        if rows % multiple:
            raise ConfigError(
                f"--format {format} holds multiples of {multiple} outputs, but {name} has {rows};"
                " use --format compressed-tensors"
            )


def _group_size(
    format: str, weights: Mapping[str, tuple[tuple[int, int], WeightScheme]]
) -> int | None:
    """Return the largest size that divides every group; None if every group is a row."""
    if all(scheme.group_size is None for _, scheme in weights.values()):
        return None
    common = math.gcd(*(scheme.group_size or columns for (_, columns), scheme in weights.values()))
    for size in GROUP_SIZES:
        if common % size == 0:
            return size
    raise ConfigError(
        f"--format {format} holds one group size, but the weights' have none of"
        f" {', '.join(map(str, GROUP_SIZES))} in common; use --format compressed-tensors"
    )
