"""Vector arithmetic. Loads numpy."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

import numpy as np

from appliance.server.retrieval.answers import EmbeddingRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def matrix_of(
    pooled: Sequence[bytes], *, dimensions: int | None, normalize: bool
) -> NDArray[np.float32]:
    """Return one vector per text, (num_texts, dimensions) float32.

    Args:
        pooled: hidden states, float32 in the machine's byte order.
        dimensions: length to cut them to; None keeps them whole.
        normalize: to length 1, after the cut.
    """
    rows = np.stack([np.frombuffer(content, np.float32) for content in pooled])
    rows = rows[:, :dimensions]
    return _unit(rows) if normalize else rows


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
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
    rows = _unit(rows)
    return [float(np.clip(rows[one] @ rows[other], -1.0, 1.0)) for one, other in pairs]
