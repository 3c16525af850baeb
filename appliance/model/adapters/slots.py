"""Protocols of adapters laid out for an executor in numbered slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from appliance.model.adapters.adapter import Adapter


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
