"""Compares the ends that a folder of a tied model stores: embedding and head.

`tie_word_embeddings` speaks of a model as its maker trained it. A file whose head has values of its
own was trained or merged further, and transformers 5 keeps that head; a file with the head alone
has the embedding in it. Knows no family, and reads no more than the first part that differs.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from appliance.model.fallback.renamed import RenamedWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.fallback.renamed import Stored
    from appliance.model.names import TensorNames
    from appliance.model_files.checkpoint import SafetensorsFolder
    from appliance.quant.formats import WeightReader

_KEYS = ("tie_word_embeddings", "tie_embedding")  # LFM2 has the second


class StoredEnds(Enum):
    """The ends that a folder stores, of a model whose settings tie embedding and head."""

    ONE = "the embedding, or both with equal bytes"
    HEAD_ONLY = "the head alone"
    APART = "a head of other values"


def stored_ends(
    folder: SafetensorsFolder,
    weights: WeightReader,
    names: TensorNames,
    stored: Mapping[str, Stored] | None = None,
) -> StoredEnds:
    """Compare embedding and head as they are stored.

    Args:
        weights: of `folder`, by the names of `names`.
        stored: the folder's names by those; None if they are the same.

    Raises:
        CheckpointError: the folder has changed since it was opened.
    """
    embedding, head = _ends(names)
    present = weights.tensor_names()
    if head not in present:
        return StoredEnds.ONE
    if embedding not in present:
        return StoredEnds.HEAD_ONLY
    places = [embedding, head] if stored is None else [stored[embedding], stored[head]]
    plain = set(folder.tensor_names())
    # Quantized ends have other names there: each rounds for itself.
    names_alone = [place for place in places if isinstance(place, str) and place in plain]
    same = len(names_alone) == len(places) and folder.has_same_bytes(*names_alone)
    return StoredEnds.ONE if same else StoredEnds.APART


def head_as_embedding(weights: WeightReader, names: TensorNames) -> WeightReader:
    """Present a head that is stored alone as the embedding of a tied model."""
    embedding, head = _ends(names)
    others = {name: name for name in weights.tensor_names() if name != head}
    return RenamedWeights(weights, others | {embedding: head}, is_part=False)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that do not tie embedding and head, neither those of a text part."""
    keys = [key for key in _KEYS if key == _KEYS[0] or key in config]
    parts = {
        name: untied(part)
        for name, part in config.items()
        if name == "text_config" and isinstance(part, dict)
    }
    return dict(config) | dict.fromkeys(keys, False) | parts


def apart_note(names: TensorNames) -> str:
    """Say that the file's own head is kept."""
    embedding, head = _ends(names)
    return (
        f"config.json ties embedding and head ({_KEYS[0]}), but {head} holds other values than"
        f" {embedding}: the head of the file is kept"
    )


def _ends(names: TensorNames) -> tuple[str, str]:
    return f"{names.embedding}.weight", f"{names.head}.weight"
