"""An adapter as read: the low-rank factors of the linears that it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one linear: W + scale * b @ a.

    Attributes:
        a: (rank, in_features), as stored.
        b: (out_features, rank), as stored, rows in the order of the Hugging Face checkpoint.
        scale: alpha / rank, or what else the adapter's settings make of the two.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter; it fits the model that it was read for.

    Attributes:
        digest: of the files' content, in hexadecimal digits.
        parts: by the name of the linear in Hugging Face checkpoints, without `.weight`.
        notes: what the user should know.
    """

    digest: str
    parts: Mapping[str, LowRank]
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of a linear."""
        return max(part.rank for part in self.parts.values())

    @property
    def num_parameters(self) -> int:
        return sum(part.a.numel() + part.b.numel() for part in self.parts.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """Last parts of the names of the linears, each once, in order of appearance."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.parts))
