"""Presents a checkpoint's tensors by the names of transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.text_part import left_out

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


def names_of_text(model: Any, stored: list[str]) -> dict[str, str]:
    """Return the stored names of a text part, by the names of the class that serves it alone.

    Its layers lie under a prefix of their own, beside other parts: that of an embedding under which
    most of the class's tensors are found. What lies outside of the layers, as the head, may lie
    under any part of it. A tensor that has no place among the layers is in the result as well.
    """
    base = f"{model.base_model_prefix}."
    own, present = list(model.state_dict()), set(stored)
    inner = [name.removeprefix(base) for name in own if name.startswith(base)]
    first = {name.partition(".")[0] for name in inner}
    names = {id(module): name for name, module in model.named_modules()}
    embedding = f"{names[id(model.get_input_embeddings())].removeprefix(base)}.weight"
    prefixes = {name.removesuffix(embedding) for name in stored if name.endswith(embedding)}
    if not prefixes:
        return {}
    prefix = max(sorted(prefixes), key=lambda each: sum(each + name in present for name in inner))
    found = {
        base + name.removeprefix(prefix): name
        for name in stored
        if name.startswith(prefix) and name.removeprefix(prefix).partition(".")[0] in first
    }
    parents = [prefix[:end] for end in range(len(prefix) + 1) if not end or prefix[end - 1] == "."]
    outer = [name for name in own if not name.startswith(base)]
    places = [(name, above + name) for name in outer for above in parents]
    return found | {name: place for name, place in places if place in present}


class RenamedWeights:
    """A `WeightReader` under other names.

    Args:
        stored: names in the checkpoint by those that are asked for.
        is_part: the others belong to other parts.
    """

    def __init__(self, weights: WeightReader, stored: dict[str, str], *, is_part: bool) -> None:
        self._weights = weights
        self._stored = stored
        self._left = len(weights.tensor_names()) - len(stored) if is_part else 0

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
        """Say what is left out, beside the notes of the tensors loaded so far."""
        return (*left_out(self._left), *self._weights.notes())
