"""Presents linears that a checkpoint stores inputs first, or many in one tensor, as any other.

Each is a matrix of its own then, outputs first. Reading packed weights needs it, as does counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats import WeightReader


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """A tensor that holds linears in another form.

    Attributes:
        slot: the tensor, (count, rows, columns) or (rows, columns).
        turned: its rows are inputs.
    """

    slot: TensorSlot
    turned: bool

    def slots(self) -> list[TensorSlot]:
        """List its matrices, (out_features, in_features), in their order."""
        *stack, rows, columns = self.slot.shape
        one = replace(
            self.slot, role=Role.UP, shape=(columns, rows) if self.turned else (rows, columns)
        )
        if not stack:
            return [one]
        return [replace(one, name=name_of(one.name, i), expert=i) for i in range(stack[0])]


def name_of(stack: str, number: int) -> str:
    """Name one matrix of a stack."""
    return f"{stack}.{number}"


def one_by_one(source: ModelSource) -> ModelSource:
    """Return a model all of whose linears are matrices of their own, outputs first."""
    fallback = source.fallback
    assert fallback is not None
    if fallback.is_one_by_one:
        return source
    stored = {each.slot.name: each for each in fallback.matrices}
    slots = [
        slot
        for each in fallback.slots
        for slot in (stored[each.name].slots() if each.name in stored else [each])
    ]
    return replace(
        source,
        fallback=replace(fallback, slots=tuple(slots), is_one_by_one=True),
        weights=_OneByOne(source.weights, fallback.matrices),
    )


class _OneByOne:
    """A `WeightReader` of matrices out of tensors that hold them in another form."""

    def __init__(self, weights: WeightReader, matrices: tuple[StoredMatrices, ...]) -> None:
        self._weights = weights
        self._parts = {slot.name: (each, slot) for each in matrices for slot in each.slots()}
        self._stacks = {each.slot.name for each in matrices}
        self._held: tuple[str, Tensor] | None = None  # the stack that was read last

    def tensor_names(self) -> list[str]:
        others = [name for name in self._weights.tensor_names() if name not in self._stacks]
        return [*others, *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        return self._weights.shape(name) if part is None else part[1].shape

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a quantized weight's codes, None if it is dense."""
        return None if name in self._parts else self._weights.packed_bits(name)

    def group_size(self, name: str) -> int | None:
        return None if name in self._parts else self._weights.group_size(name)

    def float_bits(self, name: str) -> int | None:
        """Return the bits of floating-point codes, None of others."""
        return None if name in self._parts else self._weights.float_bits(name)

    def load(self, name: str) -> Weight:
        """Read one tensor; a stack is read once for all that follow each other."""
        if name not in self._parts:
            self._held = None
            return self._weights.load(name)
        stored, slot = self._parts[name]
        if self._held is None or self._held[0] != stored.slot.name:
            self._held = None  # before the next is read
            weight = self._weights.load(stored.slot.name)
            held = weight if arrays.is_array(weight) else dense(weight, "float32")
            self._held = stored.slot.name, held
        matrix = self._held[1] if slot.expert is None else self._held[1][slot.expert]
        return (matrix.T if stored.turned else matrix).contiguous()

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()
