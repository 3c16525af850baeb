"""The states of an engine, as its clients see it."""

from __future__ import annotations

from enum import Enum


class EngineState(Enum):
    LOADING = "loading"  # for the first time
    READY = "ready"
    RESTARTING = "restarting"
    ASLEEP = "asleep"  # there is no process, or it ends; a request starts another
    WAKING = "waking"  # that one loads
    FAILED = "failed"  # the first load failed, so there is nothing to serve
    STOPPED = "stopped"

    @property
    def accepts(self) -> bool:
        """True if a request may be handed over: it runs, or wakes the engine and waits for it."""
        return self in (EngineState.READY, EngineState.ASLEEP, EngineState.WAKING)
