"""Presents a checkpoint's tensors by the names of transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.kernels.weight import Weight
    from appliance.quant.formats import WeightReader


def names_in_model(model: Any, stored: list[str]) -> dict[str, str]:
    """Return stored names by the names that a model's class has for them now.

    Older checkpoints keep the names of their day, which transformers changes as it loads them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if type(change) is WeightRenaming]
    found = {}
    for name in stored:
        own = name
        for renaming in renamings:
            own = renaming.rename_source_key(own)[0]
        found[own] = name
    return found


class RenamedWeights:
    """A `WeightReader` under other names.

    Args:
        stored: names in the checkpoint by those that are asked for.
    """

    def __init__(self, weights: WeightReader, stored: dict[str, str]) -> None:
        self._weights = weights
        self._stored = stored

    def tensor_names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._stored[name])

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a quantized weight's codes, None if it is dense."""
        return self._weights.packed_bits(self._stored[name])

    def float_bits(self, name: str) -> int | None:
        """Return the bits of floating-point codes, None of others."""
        return self._weights.float_bits(self._stored[name])

    def load(self, name: str) -> Weight:
        """Read one tensor."""
        return self._weights.load(self._stored[name])

    def load_rows(self, name: str, start: int, stop: int) -> Any:
        """Read rows `start` to `stop` of a dense tensor."""
        return self._weights.load_rows(self._stored[name], start, stop)  # type: ignore[attr-defined]

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()
