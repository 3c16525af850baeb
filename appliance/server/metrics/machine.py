"""Measures the load of server and machine, at most once a second and only on request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from appliance.events import Machine
from appliance.server.metrics.gpu import GpuProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psutil

    from appliance.engine.process.client import EngineClient

FRESH_SECONDS = 0.9
PATIENCE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class MachineProbe:
    """Reads processes and GPUs once for all watchers.

    Args:
        engines: lists the engines whose processes count with this one.
    """

    def __init__(
        self, engines: Callable[[], Sequence[EngineClient]], gpus: GpuProbe | None = None
    ) -> None:
        self.latest: Machine | None = None
        self._engines = engines
        self._gpus = gpus or GpuProbe()
        self._reading: asyncio.Task[Machine] | None = None
        self._when = 0.0
        self._busy: dict[int, float] = {}  # CPU seconds by process
        self._processes: dict[int, psutil.Process] = {}

    async def read(self) -> Machine | None:
        """Return a new or the last reading; None if the first takes too long.

        A hanging driver costs one thread and a short wait, a failing one a line in the log.
        """
        now = time.monotonic()
        stale = self.latest is None or now - self._when > FRESH_SECONDS
        if stale and self._reading is None:
            engines = self._engines()
            tokens = sum(engine.stats.generation_tokens_total for engine in engines)
            pids = {engine.pid for engine in engines if engine.pid is not None}
            work = asyncio.to_thread(self._read, now, pids, tokens)
            self._reading = asyncio.create_task(work, name="machine")
        reading = self._reading
        if reading is not None:
            await asyncio.wait({reading}, timeout=PATIENCE_SECONDS)
            if reading.done() and reading is self._reading:
                self._reading = None  # even if it failed: the next call tries again
                try:
                    self.latest = reading.result()
                except Exception:
                    logger.exception("the machine's load could not be read")
        return self.latest

    def _read(self, now: float, engine_pids: set[int], tokens: int) -> Machine:
        import psutil  # only if someone watches

        seconds, self._when = now - self._when, now
        before, self._busy = self._busy, {}
        resident = {}
        for pid in {os.getpid(), *engine_pids}:
            try:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                times = process.cpu_times()
                self._busy[pid] = times.user + times.system
                resident[pid] = process.memory_info().rss
            except psutil.Error:  # it has ended
                self._processes.pop(pid, None)
        used = sum(spent - before[pid] for pid, spent in self._busy.items() if pid in before)
        memory = psutil.virtual_memory()
        return Machine(
            cpu_cores=len(os.sched_getaffinity(0)),
            cpu_used=used / seconds if before else 0.0,
            api_cpu_seconds=self._busy.get(os.getpid(), 0.0),
            engine_cpu_seconds=sum(self._busy.get(pid, 0.0) for pid in engine_pids),
            api_rss_bytes=resident.get(os.getpid(), 0),
            engine_rss_bytes=sum(resident.get(pid, 0) for pid in engine_pids),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            gpus=self._gpus.read(tokens),
        )
