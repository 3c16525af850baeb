"""Converts quantized weights to a folder's tensors: one protocol for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.kernels.arrays import dtype_name
from appliance.kernels.ggml import GgmlWeight
from appliance.quant.formats import compressed_tensors
from appliance.quant.formats.compressed_tensors_config import quantization_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.fp8 import Fp8Weight
    from appliance.kernels.packed import PackedWeight
    from appliance.quant.formats.scheme import LinearScheme


def in_torch(
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Replace the names of types in a layout by torch's types."""
    return {part: (getattr(torch, name), shape) for part, (name, shape) in layout.items()}


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

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight | GgmlWeight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
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


@dataclass(frozen=True, slots=True)
class CompressedTensorsStore:
    """Writes compressed-tensors, which holds every scheme."""

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return in_torch(compressed_tensors.encoded_layout(name, shape, scheme, dtype_name(dtype)))

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight | GgmlWeight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
        assert not isinstance(weight, GgmlWeight), name
        return compressed_tensors.encode(name, weight, scheme)

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        return quantization_config(schemes, kept, named=named)
