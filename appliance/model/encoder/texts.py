"""The texts of a step, one behind the other and without padding. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of texts, in the order of their lengths.

    Attributes:
        ids: (num_tokens,) int64.
        positions: (num_tokens,) int64, in the token's own text.
        types: (num_tokens,) int64; 1 in the second text of a pair.
        lengths: tokens of each text.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    types: NDArray[np.int64]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Texts:
        """Join texts, each as its ids and types; they must be in the order of their lengths."""
        lengths = tuple(len(ids) for ids, _ in texts)
        assert list(lengths) == sorted(lengths)
        return cls(
            np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in texts]),
            np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
            np.concatenate([np.asarray(types, dtype=np.int64) for _, types in texts]),
            lengths,
        )

    @property
    def starts(self) -> NDArray[np.int32]:
        """The first row of each text, and of none behind the last: (num_texts + 1,)."""
        return np.cumsum((0, *self.lengths), dtype=np.int32)
