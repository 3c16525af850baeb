"""Vector arithmetic. Loads numpy."""

from __future__ import annotations

import math
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.server.retrieval.answers import EmbeddingRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from appliance.model_files.retrieval_recipe import EmbeddingRecipe


_ERF = np.vectorize(math.erf, otypes=[np.float32])
_ACTIVATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1.0 + _ERF(x * np.float32(0.5**0.5))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def matrix_of(
    pooled: Sequence[bytes], recipe: EmbeddingRecipe, *, dimensions: int | None
) -> NDArray[np.float32]:
    """Return one vector per text, (num_texts, dimensions) float32.

    Args:
        pooled: hidden states, float32 in the machine's byte order.
        recipe: linears that map them, and if the result has length 1, after the cut.
        dimensions: length to cut them to; None keeps them whole.
    """
    rows = np.stack([np.frombuffer(content, np.float32) for content in pooled])
    for step in recipe.dense:
        rows = rows @ step.weight.T
        rows = rows if step.bias is None else rows + step.bias
        rows = _ACTIVATIONS[step.activation](rows).astype(np.float32)
    rows = rows[:, :dimensions]
    return unit_rows(rows) if recipe.normalize else rows


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to length 1; keep zero rows."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths == 0.0, 1.0, lengths)).astype(np.float32)


def embeddings_of(rows: NDArray[np.float32], *, base64: bool) -> list[EmbeddingRow]:
    """Encode rows as base64 of little-endian float32, or as numbers."""
    if base64:
        texts = [b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
        return [EmbeddingRow(index=number, embedding=text) for number, text in enumerate(texts)]
    return [EmbeddingRow(index=number, embedding=row) for number, row in enumerate(floats_of(rows))]


def floats_of(rows: NDArray[np.float32]) -> list[list[float]]:
    """Return numbers with the fewest digits that read back as the same float32."""
    return [[float(text) for text in row.astype(str)] for row in rows]


def cosines(rows: NDArray[np.float32], pairs: Sequence[tuple[int, int]]) -> list[float]:
    rows = unit_rows(rows)
    return [float(np.clip(rows[one] @ rows[other], -1.0, 1.0)) for one, other in pairs]
