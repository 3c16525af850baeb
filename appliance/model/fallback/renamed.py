"""Presents a checkpoint's tensors by the names and in the form of transformers' modules.

Imports no torch: a tied model whose folder stores the head alone is read so by any executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from appliance.kernels.weights.weight import dense
from appliance.model.text_part import left_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.fallback.conversion import Converted
    from appliance.quant.formats import WeightReader

# A name in the checkpoint, or what is made of several tensors.
Stored: TypeAlias = "str | Converted"


class RenamedWeights:
    """A `WeightReader` under other names.

    Args:
        stored: what the checkpoint has, by the names that are asked for.
        is_part: the others belong to other parts.
    """

    def __init__(
        self, weights: WeightReader, stored: Mapping[str, Stored], *, is_part: bool
    ) -> None:
        self._weights = weights
        self._stored = stored
        read = {
            name
            for each in stored.values()
            for name in ([each] if isinstance(each, str) else each.names())
        }
        self._left = len(set(weights.tensor_names()) - read) if is_part else 0

    def tensor_names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        if isinstance(stored, str):
            return self._weights.shape(stored)
        return stored.shape({source: self._weights.shape(source) for source in stored.names()})

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a quantized weight's codes, None if it is dense."""
        stored = self._stored[name]
        return self._weights.packed_bits(stored) if isinstance(stored, str) else None

    def group_size(self, name: str) -> int | None:
        stored = self._stored[name]
        return self._weights.group_size(stored) if isinstance(stored, str) else None

    def float_bits(self, name: str) -> int | None:
        """Return the bits of floating-point codes, None of others."""
        stored = self._stored[name]
        return self._weights.float_bits(stored) if isinstance(stored, str) else None

    def load(self, name: str) -> Weight:
        """Read one tensor; one that is made of others is made dense."""
        stored = self._stored[name]
        if isinstance(stored, str):
            return self._weights.load(stored)
        loaded = {source: self._weights.load(source) for source in stored.names()}
        return stored.computed({source: _in_torch(weight) for source, weight in loaded.items()})

    def load_rows(self, name: str, start: int, stop: int) -> Any:
        """Read rows `start` to `stop` of a dense tensor."""
        stored = self._stored[name]
        if isinstance(stored, str):
            return self._weights.load_rows(stored, start, stop)  # type: ignore[attr-defined]
        return dense(self.load(name), "float32")[start:stop]

    def notes(self) -> tuple[str, ...]:
        """Say what is left out, beside the notes of the tensors loaded so far."""
        return (*left_out(self._left), *self._weights.notes())


def _in_torch(weight: Weight) -> Tensor:
    """Make a weight dense for transformers' rules, which are written for torch's tensors."""
    values: Any = dense(weight, "float32")
    tensor: Tensor = values if hasattr(values, "untyped_storage") else values.tensor()
    return tensor
