"""Finds where the columns of a layer's last linears can be cut, and where a cut costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.kernels.packed import SMALLEST_GROUP
from appliance.kernels.weight import column_unit
from appliance.model.gguf_weights import GGUFWeights
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.model.source import ModelSource

COLUMN_UNIT = 32  # inputs of the smallest group that all kernels support
USUAL_GROUP = 128  # inputs of a block of FP8, and of the largest group


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Numbers of adjacent columns, by a layer's index and its number of columns.

    Attributes:
        together: columns that should stay together: a block, or a usual group.
        uncut: columns that must stay together, or a weight becomes dense.
    """

    together: dict[tuple[int, int], int] = field(default_factory=dict)
    uncut: dict[tuple[int, int], int] = field(default_factory=dict)

    def usual(self, layer: int, width: int) -> int:
        return self.together.get((layer, width), COLUMN_UNIT)

    def least(self, layer: int, width: int) -> int:
        return self.uncut.get((layer, width), 1)


def column_units(source: ModelSource) -> ColumnUnits:
    """Find the units of MLPs, experts and short convolutions; reads an expert's weight, if any."""
    units = ColumnUnits()
    is_ordered: bool | None = None
    for slot in source.slots():
        if slot.layer is None or len(slot.shape) != 2:
            continue
        mixer = source.spec.layers[slot.layer].mixer
        is_convolved = slot.role is Role.OUTPUT and isinstance(mixer, ShortConvSpec)
        if slot.role is not Role.DOWN and not is_convolved:
            continue
        at = slot.layer, slot.shape[1]
        units.together[at] = max(units.together.get(at, 0), _usual(source, slot.name))
        if slot.expert is None:
            continue
        if is_ordered is None:
            is_ordered = _is_ordered(source, slot.name)
        least = slot.shape[1] if is_ordered else _least(source, slot.name)
        units.uncut[at] = max(units.uncut.get(at, 0), least)
    return units


def _usual(source: ModelSource, name: str) -> int:
    weights = source.weights
    if isinstance(weights, GGUFWeights):
        return max(weights.block_size(name), COLUMN_UNIT)
    is_packed = weights.packed_bits(name) is not None or weights.float_bits(name) is not None
    return USUAL_GROUP if is_packed else COLUMN_UNIT


def _least(source: ModelSource, name: str) -> int:
    weights = source.weights
    if isinstance(weights, GGUFWeights):
        return weights.block_size(name)
    bits = weights.float_bits(name)
    if bits == 8:
        return USUAL_GROUP
    return 1 if bits is None and weights.packed_bits(name) is None else SMALLEST_GROUP


def _is_ordered(source: ModelSource, name: str) -> bool:
    """Return True if inputs have an order of their own, which is a checkpoint's, not a layer's."""
    is_packed = source.weights.packed_bits(name) is not None
    return is_packed and column_unit(source.weights.load(name)) is None
