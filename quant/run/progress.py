"""Records finished units in the journal and reports them as events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.progress.quantize_events import (
    QuantizeEvent,
    UnitFinished,
    encode_event,
    ignore_event,
)
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.run import Record
from appliance.runtime import release_unused

if TYPE_CHECKING:
    import torch

    from appliance.progress.quantize_events import OnEvent
    from appliance.quant.run.run import Journal

EVENTS_NAME = "events.jsonl"
LAYER = "layer "  # prefix of the names of units that are layers


class EventLog:
    """Passes events on and appends them to `events.jsonl` in the state folder."""

    def __init__(self, folder: Path, on_event: OnEvent = ignore_event) -> None:
        self._path = folder / EVENTS_NAME
        self._on_event = on_event

    def __call__(self, event: QuantizeEvent) -> None:
        self.record(event)
        self._on_event(event)

    def record(self, event: QuantizeEvent) -> None:
        with self._path.open("ab") as file:
            file.write(encode_event(event) + b"\n")


class UnitLog:
    """Commits finished units.

    Args:
        bytes_done: bytes of units that an earlier run finished.
    """

    def __init__(
        self,
        journal: Journal,
        on_event: OnEvent,
        *,
        total_units: int,
        total_layers: int,
        total_bytes: int,
        bytes_done: int,
        device: torch.device,
    ) -> None:
        self._journal = journal
        self._on_event = on_event
        self._total_units = total_units
        self._total_layers = total_layers
        self._total_bytes = total_bytes
        self._bytes_done = bytes_done
        self._bytes_before = bytes_done
        self._device = device
        self._started = time.monotonic()
        self._layer_seconds: list[float] = []

    def commit(
        self,
        name: str,
        nbytes: int,
        seconds: float,
        *,
        losses: dict[str, float] | None = None,
        notes: tuple[str, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Record a finished unit, whose output must be on disk."""
        use = MemoryUse.now(self._device)
        release_unused()  # otherwise freed blocks fragment the heap and memory grows
        record = Record(
            unit=name, seconds=seconds, losses=losses or {}, notes=notes, facts=facts or {}
        )
        self._journal.commit(record, use.peak_ram, use.peak_vram)
        self._bytes_done += nbytes
        if name.startswith(LAYER):
            self._layer_seconds.append(seconds)
        self._on_event(
            UnitFinished(
                name=name,
                done=len(self._journal.records),
                total=self._total_units,
                seconds=seconds,
                losses=record.losses,
                notes=notes,
                bytes_done=self._bytes_done,
                bytes_total=self._total_bytes,
                remaining_seconds=self._remaining_seconds(),
                ram=use.ram,
                peak_ram=use.peak_ram,
                vram=use.vram,
                peak_vram=use.peak_vram,
            )
        )

    def _remaining_seconds(self) -> float:
        """Estimate by this run's layers, nearly all of the work; without any, by bytes."""
        if self._layer_seconds:
            done = sum(record.unit.startswith(LAYER) for record in self._journal.records)
            mean = sum(self._layer_seconds) / len(self._layer_seconds)
            return mean * (self._total_layers - done)
        rate = (time.monotonic() - self._started) / (self._bytes_done - self._bytes_before)
        return rate * (self._total_bytes - self._bytes_done)
