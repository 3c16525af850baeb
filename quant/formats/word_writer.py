"""Writes packed weights losslessly as AWQ or GPTQ checkpoints.

Both formats have one bit width and one group size per model, so larger groups are split into
several with the same scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError
from appliance.kernels.packed import PackedWeight
from appliance.quant.formats import awq, gptq
from appliance.quant.formats.awq import AwqLayout
from appliance.quant.formats.gptq import V1, V2, GptqLayout
from appliance.quant.formats.scheme import GROUP_SIZES, WeightScheme
from appliance.quant.formats.store import in_torch
from appliance.quant.formats.word_packed import G_IDX, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.fp8 import Fp8Weight
    from appliance.kernels.ggml import GgmlWeight
    from appliance.quant.formats.scheme import LinearScheme

Weights = dict[str, tuple[tuple[int, int], WeightScheme]]  # shape and scheme by name


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

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight | GgmlWeight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
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
