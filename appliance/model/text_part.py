"""Finds the tensors of a text part in a checkpoint with other parts, such as a vision tower.

They have a longer prefix. Knows no family.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model_files.checkpoint import CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.names import TensorNames
    from appliance.quant.formats import WeightReader

# Prefixes of a decoder's layers: in its own checkpoint, in an embedding model's, as the text part
# of newer and older files, and of models with several generators.
PREFIXES = (
    "model.",
    "",
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "thinker.model.",
    "thinker.model.language_model.",
    "llm.model.",
    "llm.",
    "language.model.",
    "model.language_model.model.",
    "model.text_model.model.",
    "model.llm.",
    "text_model.",
    "language_model.",
    "backbone.",
    "language_model.backbone.",
    "model.language_model.backbone.",
)

# Spellings of a layer's place; transformers 5.24 saves Kimi K2.5 and Qianfan with the others.
_LAYERS = ("layers.", "blocks.", "encoder.layers.")
_SHARED = ("model.", "")  # where other parts may lie beside the text's


def names_in(
    weights: WeightReader, names: TensorNames, others: TensorNames | None = None
) -> TensorNames:
    """Return the names under the checkpoint's prefix; unchanged if no prefix matches.

    The head may lie under any part of the prefix. Returns `others` if the first norm, and a router
    where both sets name it differently, has its name there.
    """
    present = set(weights.tensor_names())
    under = [names.under(prefix) for prefix in PREFIXES]
    if others is not None:
        under += [others.under(prefix) for prefix in PREFIXES]
        routers = {names.experts.router, others.experts.router}
        under = [
            found
            for found in under
            if _first_norm(found) in present and (len(routers) == 1 or _has_router(found, present))
        ]
    by_embedding = (found for found in under if f"{found.embedding}.weight" in present)
    # The file of a tied model may hold the head alone.
    by_norm = (found for found in under if f"{found.final_norm}.weight" in present)
    found = _spelled(next(by_embedding, None) or next(by_norm, names), present)
    parts = found.layer.split(".")
    above = (".".join([*parts[:count], names.head]) for count in range(len(parts), -1, -1))
    head = next((name for name in above if f"{name}.weight" in present), found.head)
    return replace(found, head=head)


def not_found(model: str, model_type: str, names: TensorNames, present: Sequence[str]) -> str:
    """Say that no tensor of a family's decoder is in a checkpoint, and what is."""
    inside = names.embedding.removeprefix("model.")
    known = ", ".join(f"{prefix}{inside}.weight" for prefix in PREFIXES)
    return (
        f"{model}: {CONFIG_NAME} describes a {model_type} decoder, and none of its tensors is "
        f"here by a name that is known: looked for {known}; the first of the {len(present)} "
        f"stored are {', '.join(sorted(present)[:3])}. If they are the decoder's, load the folder "
        "with transformers and save it again, which writes known names; if they are another part "
        "(vision, audio, an adapter), use the folder of the whole model"
    )


def prefix_of_layers(name: str) -> str | None:
    """Return the prefix of a text's layers in the name of a part of one; None in others."""
    before, found, _ = name.partition("layers.")
    return before if found and before in PREFIXES else None


def _spelled(names: TensorNames, present: set[str]) -> TensorNames:
    """Return names whose layers are spelled as the checkpoint has them."""
    spelled = (replace(names, layer=names.layer.replace("layers.", each)) for each in _LAYERS)
    return next((found for found in spelled if _first_norm(found) in present), names)


def _first_norm(names: TensorNames) -> str:
    return f"{names.in_layer(0, names.mixer_norm)}.weight"


def _has_router(names: TensorNames, present: set[str]) -> bool:
    before, _, after = names.layer.partition("{}")
    ending = f"{after}{names.experts.router}.weight"
    return any(name.startswith(before) and name.endswith(ending) for name in present)


class TextPart:
    """A `WeightReader` of the text part's tensors."""

    def __init__(self, weights: WeightReader, names: TensorNames) -> None:
        self._weights = weights
        stored = weights.tensor_names()
        layers = names.layer.removesuffix("{}.")
        prefix = next((layers.removesuffix(each) for each in _LAYERS[::-1] if each in layers), "")
        own: tuple[str, ...] = (prefix, f"{names.head}.")
        if prefix in _SHARED:
            own = (layers, *(f"{name}." for name in names.outside_layers))
        self._names = [name for name in stored if name.startswith(own)]
        self._left = sorted(set(stored) - set(self._names))

    def tensor_names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        return self._weights.packed_bits(name)

    def group_size(self, name: str) -> int | None:
        return self._weights.group_size(name)

    def float_bits(self, name: str) -> int | None:
        return self._weights.float_bits(name)

    def load(self, name: str) -> Weight:
        return self._weights.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        rows: Tensor = self._weights.load_rows(name, start, stop)  # type: ignore[attr-defined]
        return rows

    @property
    def left(self) -> list[str]:
        """Names of other parts' tensors, which `load` reads too."""
        return self._left

    def beside(self, names: Iterable[str]) -> TextPart:
        """Return the same part where something else reads other tensors, by their stored names."""
        found = copy(self)
        found._left = sorted(set(self._left) - set(names))
        return found

    def notes(self) -> tuple[str, ...]:
        """Say what is left out, beside the notes of the tensors loaded so far."""
        return (*left_out(len(self._left)), *self._weights.notes())


def left_out(count: int) -> tuple[str, ...]:
    """Say how many tensors belong to other parts, if any do."""
    note = f"text only: {count} tensors of other parts, such as vision, are left out"
    return (note,) if count else ()
