"""Measures the load of server and machine, at most once a second, and exports it to Prometheus."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.events import Machine
from appliance.server.metrics.gpu import REASONS, GpuProbe
from appliance.server.metrics.metric_families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import psutil
    from prometheus_client.core import Metric

    from appliance.engine.process.client import EngineClient
    from appliance.events import Gpu
    from appliance.log import RecentWarnings

# A metric's name and help, and its field of `Gpu`.
_GPU_GAUGES = (
    ("appliance_gpu_utilization_ratio", "Share of time with work, 0 to 1.", "utilization"),
    ("appliance_gpu_memory_used_bytes", "Memory in use, by anybody.", "memory_used_bytes"),
    ("appliance_gpu_memory_total_bytes", "Memory of the GPU.", "memory_total_bytes"),
    ("appliance_gpu_power_watts", "Power drawn.", "power_watts"),
    ("appliance_gpu_power_limit_watts", "Most power it may draw.", "power_limit_watts"),
    ("appliance_gpu_temperature_celsius", "Temperature of the chip.", "temperature_celsius"),
    ("appliance_gpu_joules_per_token", "Over the last minute of reads.", "joules_per_token"),
)
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


class MachineCollector(Collector):
    """Counts warnings and exports the last reading; takes none, because that may block."""

    def __init__(self, warnings: RecentWarnings, machine: MachineProbe) -> None:
        self._warnings, self._machine = warnings, machine

    def collect(self) -> Iterable[Metric]:
        warnings = self._warnings.total
        yield counter("appliance_log_warnings", "Warnings and errors in the log.", [({}, warnings)])
        machine = self._machine.latest
        if machine is None:
            return
        yield counter(
            "appliance_process_cpu_seconds",
            "CPU time of the server's processes.",
            [
                ({"process": "api"}, machine.api_cpu_seconds),
                ({"process": "engine"}, machine.engine_cpu_seconds),
            ],
        )
        yield gauge(
            "appliance_process_resident_memory_bytes",
            "Host memory of the server's processes.",
            [
                ({"process": "api"}, machine.api_rss_bytes),
                ({"process": "engine"}, machine.engine_rss_bytes),
            ],
        )
        for name, text, value in (
            ("appliance_host_memory_total_bytes", "Memory.", machine.memory_total_bytes),
            (
                "appliance_host_memory_available_bytes",
                "Not in use.",
                machine.memory_available_bytes,
            ),
            ("appliance_host_cpu_cores", "Cores that the server may use.", machine.cpu_cores),
        ):
            yield gauge(name, text, [({}, value)])
        if machine.gpus:
            yield from _gpus(machine.gpus)


def _gpus(gpus: tuple[Gpu, ...]) -> Iterator[Metric]:
    labelled = [({"gpu": str(number)}, gpu) for number, gpu in enumerate(gpus)]
    names = [({**labels, "name": gpu.name}, 1.0) for labels, gpu in labelled]
    yield gauge("appliance_gpu_info", "The GPUs of this machine.", names)
    for name, text, field in _GPU_GAUGES:
        known = [(labels, getattr(gpu, field)) for labels, gpu in labelled]
        yield gauge(name, text, [pair for pair in known if pair[1] is not None])
    clocks = [(labels, gpu.sm_clock_mhz) for labels, gpu in labelled]
    yield gauge(
        "appliance_gpu_sm_clock_hertz",
        "Clock of the multiprocessors.",
        [(labels, 1e6 * clock) for labels, clock in clocks if clock is not None],
    )
    yield counter(
        "appliance_gpu_energy_joules",
        "Energy since the driver was loaded.",
        [(labels, gpu.energy_joules) for labels, gpu in labelled if gpu.energy_joules is not None],
    )
    yield gauge(
        "appliance_gpu_throttled",
        "1 while this reason holds the clocks down.",
        [
            ({**labels, "reason": reason}, float(reason in gpu.throttled))
            for labels, gpu in labelled
            for _, reason in REASONS
        ],
    )
