"""The states of an engine, as clients see them."""

from __future__ import annotations

from enum import Enum


class EngineState(Enum):
    LOADING = "loading"  # for the first time
    READY = "ready"
    RESTARTING = "restarting"
    ASLEEP = "asleep"  # without a process, or its process is ending; a request starts another
    WAKING = "waking"  # a process loads after sleep
    FAILED = "failed"  # the first load failed: nothing to serve
    STOPPED = "stopped"

    @property
    def accepts(self) -> bool:
        """True if it accepts requests: it runs, or a request wakes it."""
        return self in (EngineState.READY, EngineState.ASLEEP, EngineState.WAKING)
