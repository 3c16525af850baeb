"""Exports log counts, processes and GPUs to Prometheus, as `machine` read them for this scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.server.metrics.gpu import REASONS
from appliance.server.metrics.metric_families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from appliance.events import Gpu
    from appliance.log import RecentWarnings
    from appliance.server.metrics.machine import MachineProbe

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
