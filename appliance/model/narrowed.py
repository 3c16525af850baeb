"""Presents a model's matrices at fewer bits, rounded to nearest: the model, smaller and worse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.weights.packed import DEQUANTIZE_AT_ONCE, PackedWeight
from appliance.kernels.weights.weight import some_rows
from appliance.model.tensors import Role
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats import WeightReader

# Eight bits as `quantize --method int8` has them.
_SCHEMES = {8: WeightScheme(8, None), 4: WeightScheme(4, 32, symmetric=False)}
_TABLES = (Role.EMBEDDING, Role.HEAD)
_TABLE_BITS = 8  # of embedding and head with --weight-bits, whatever the layers have


class NarrowedWeights:
    """Reads a model's tensors, some of them at fewer bits.

    Args:
        weights: the model's.
        schemes: of the tensors to narrow, by name.
    """

    def __init__(self, weights: WeightReader, schemes: Mapping[str, WeightScheme]) -> None:
        self._weights = weights
        self._schemes = schemes

    def tensor_names(self) -> list[str]:
        return self._weights.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a matrix's codes."""
        scheme = self._schemes.get(name)
        return self._weights.packed_bits(name) if scheme is None else scheme.bits

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale of codes."""
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._weights.group_size(name)
        return scheme.group_size or self.shape(name)[1]

    def float_bits(self, name: str) -> int | None:
        """Return the bits of floating-point codes, None of others."""
        return None if name in self._schemes else self._weights.float_bits(name)

    def load(self, name: str) -> Weight:
        """Read one tensor and round it if it is to be narrowed."""
        weight = self._weights.load(name)
        scheme = self._schemes.get(name)
        return weight if scheme is None else _rounded(weight, scheme)

    def notes(self) -> tuple[str, ...]:
        """Say that numbers were rounded, beside the notes of the tensors loaded so far."""
        bits = " and ".join(str(bits) for bits in sorted({s.bits for s in self._schemes.values()}))
        note = (
            f"{len(self._schemes)} matrices are rounded to {bits} bits while they are loaded;"
            " appliance quantize makes closer ones and measures the difference"
        )
        return (note, *self._weights.notes())


def narrowed_matrix(weight: Weight, bits: int) -> Weight:
    """Round a matrix to 8 or 4 bits, if its width divides into groups of 32."""
    return weight if weight.shape[1] % 32 else _rounded(weight, _SCHEMES[bits])


def _rounded(weight: Weight, scheme: WeightScheme) -> PackedWeight:
    """Round a matrix, a few rows at a time."""
    count, width = weight.shape
    step = max(1, DEQUANTIZE_AT_ONCE // width)
    return PackedWeight.concatenate(
        [
            quantize(some_rows(weight, slice(i, i + step), "float32"), scheme)
            for i in range(0, count, step)
        ]
    )


def narrowed(
    source: ModelSource, bits: int | None, table_bits: int | None = None
) -> ModelSource | None:
    """Return a model with its wide matrices at 8 or 4 bits; None if it has hardly any.

    Wide are those of more bits, if their width divides into groups of 32.

    Args:
        source: the model.
        bits: of the layers; None leaves them as they are, and rounds embedding and head alone.
        table_bits: of embedding and head; None is 8.
    """
    table_bits = table_bits or _TABLE_BITS
    if source.fallback is not None:
        from appliance.model.fallback.matrices import one_by_one  # loads torch

        source = one_by_one(source)
    matrices = [slot for slot in source.slots() if slot.is_linear or slot.role in _TABLES]
    asked = ((slot, table_bits if slot.role in _TABLES else bits) for slot in matrices)
    schemes = {
        slot.name: _SCHEMES[one]
        for slot, one in asked
        if one is not None and _is_wide(slot, source.weights, _SCHEMES[one])
    }
    if bits is None:
        return (
            replace(source, weights=NarrowedWeights(source.weights, schemes)) if schemes else None
        )
    of_layers = sum(slot.shape[0] * slot.shape[1] for slot in matrices if slot.is_linear)
    narrow = sum(
        slot.shape[0] * slot.shape[1]
        for slot in matrices
        if slot.is_linear and slot.name in schemes
    )
    if narrow < of_layers / 2:
        return None
    return replace(source, weights=NarrowedWeights(source.weights, schemes))


def _is_wide(slot: TensorSlot, weights: WeightReader, scheme: WeightScheme) -> bool:
    bits = weights.float_bits(slot.name) or weights.packed_bits(slot.name)
    return (bits is None or bits > scheme.bits) and slot.shape[1] % 32 == 0
