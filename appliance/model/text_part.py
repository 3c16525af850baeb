"""Finds the text part of a checkpoint with other parts, such as a vision tower.

Its settings are nested under `text_config`, and its tensors have a longer prefix. Knows no family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.class_defaults import text_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.names import TensorNames
    from appliance.quant.formats import WeightReader

_SECTION = "text_config"
# Prefixes of tensor names: of a decoder's own checkpoint, of an embedding model, of the text part
# in newer and older files, of Nemotron-H.
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "backbone.")


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the text part, which include those of the whole model."""
    section = config.get(_SECTION)
    if not isinstance(section, dict):
        return dict(config)
    others = {
        key: value
        for key, value in config.items()
        if key not in (_SECTION, "model_type") and not key.endswith("_config")
    }
    kept = {key: config[key] for key in ("quantization_config",) if key in config}
    return {"model_type": text_type(config.get("model_type"))} | section | others | kept


def has_other_parts(config: Mapping[str, Any]) -> bool:
    """Return True if the model has other parts than text."""
    return isinstance(config.get(_SECTION), dict)


def names_in(
    weights: WeightReader, names: TensorNames, others: TensorNames | None = None
) -> TensorNames:
    """Return the names under the checkpoint's prefix; unchanged if no prefix matches.

    Returns `others` if the first norm has its name there.
    """
    present = set(weights.tensor_names())
    if others is not None and f"{others.in_layer(0, others.mixer_norm)}.weight" in present:
        return others
    under = [names.under(prefix) for prefix in PREFIXES]
    by_embedding = (found for found in under if f"{found.embedding}.weight" in present)
    # The file of a tied model may hold the head alone.
    by_norm = (found for found in under if f"{found.final_norm}.weight" in present)
    return next(by_embedding, None) or next(by_norm, names)


class TextPart:
    """A `WeightReader` of the text part's tensors."""

    def __init__(self, weights: WeightReader, names: TensorNames) -> None:
        self._weights = weights
        stored = weights.tensor_names()
        prefix = names.layer.removesuffix("layers.{}.")
        self._names = [name for name in stored if name.startswith((prefix, f"{names.head}."))]
        self._left = sorted(set(stored) - set(self._names))

    def tensor_names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        return self._weights.packed_bits(name)

    def float_bits(self, name: str) -> int | None:
        return self._weights.float_bits(name)

    def load(self, name: str) -> Weight:
        return self._weights.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        rows: Tensor = self._weights.load_rows(name, start, stop)  # type: ignore[attr-defined]
        return rows

    def notes(self) -> tuple[str, ...]:
        """Say what is left out, beside the notes of the tensors loaded so far."""
        return (*left_out(len(self._left)), *self._weights.notes())


def left_out(count: int) -> tuple[str, ...]:
    """Say how many tensors belong to other parts, if any do."""
    note = f"text only: {count} tensors of other parts, such as vision, are left out"
    return (note,) if count else ()
