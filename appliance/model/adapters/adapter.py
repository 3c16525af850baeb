"""An adapter: the low-rank factors of the linears that it changes, and slots for laid out ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one linear: W + scale * b @ a.

    Attributes:
        a: (rank, in_features), as stored.
        b: (out_features, rank), as stored, with rows in the Hugging Face checkpoint's order.
        scale: alpha / rank, or another quotient that the adapter's settings ask for.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter that fits its model.

    Attributes:
        digest: of the files' content, in hexadecimal digits.
        parts: by the linear's name in Hugging Face checkpoints, without `.weight`.
    """

    digest: str
    parts: Mapping[str, LowRank]
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Largest rank of a linear."""
        return max(part.rank for part in self.parts.values())

    @property
    def num_parameters(self) -> int:
        return sum(part.a.numel() + part.b.numel() for part in self.parts.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """Last parts of the linears' names, each once, in order of appearance."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.parts))


class LaidOut(Protocol):
    """An adapter in the layout of one executor."""

    @property
    def nbytes(self) -> int: ...


class AdapterSlots(Protocol):
    """Adapters that a step may use, by slot; `AdapterRows.table` of a batch."""

    def lay_out(self, adapter: Adapter) -> LaidOut:
        """Lay out an adapter; any thread may call this while steps run.

        Raises:
            MemoryError: the system has too little memory.
        """
        ...

    def put(self, slot: int, laid_out: Any) -> None:
        """Fill a slot between steps, or empty it with None."""
        ...
