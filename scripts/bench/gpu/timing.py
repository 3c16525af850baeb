"""Time calls on a GPU: cold operands, one captured graph, beside the bandwidth of a copy.

Without a GPU the same calls are timed by the clock, so that a benchmark can be tried anywhere with
small shapes; such figures say nothing, and the result carries `"device": "cpu"`.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]
COPY_BYTES = 4 << 30  # that are read, and as many written; on a small card an eighth of its memory
COLD = 3  # operands together are so many times the second-level cache
MOST_COPIES = 48


@dataclass(frozen=True, slots=True)
class Bench:
    """The device, and how long to measure on it.

    Attributes:
        device: cuda, or cpu to try a script.
        replays: of each captured graph.
        copy_bandwidth: bytes per second, read and written, of a large copy in this run.
        dtype: of activations.
        most_copies: sets of operands.
    """

    device: torch.device
    replays: int
    copy_bandwidth: float
    dtype: torch.dtype = torch.bfloat16
    most_copies: int = MOST_COPIES

    @classmethod
    def here(cls, replays: int) -> Bench:
        """Measure the copy bandwidth of the first GPU, or of the CPU."""
        device = first_device()
        if device.type == "cpu":
            return cls(device, 1, _copy_bandwidth(device, 1 << 24))
        eighth = torch.cuda.get_device_properties(device).total_memory // 8
        return cls(device, replays, _copy_bandwidth(device, min(COPY_BYTES, eighth)))

    @classmethod
    def to_compile(cls) -> Bench:
        """Return a bench that makes calls and measures nothing."""
        return cls(first_device(), 1, 1.0, most_copies=1)

    @classmethod
    def unmeasured(cls) -> Bench:
        """Return a bench without a copy bandwidth."""
        return cls(first_device(), 1, 1.0)

    @property
    def is_gpu(self) -> bool:
        """Whether times mean anything."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the second-level cache."""
        if not self.is_gpu:
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def copies(self, nbytes: int) -> int:
        """Count the sets of operands of `nbytes` that make them cold when they take turns."""
        if not self.is_gpu:
            return 1
        return min(self.most_copies, max(2, -(-COLD * self.cache_bytes // max(nbytes, 1))))

    def microseconds(self, calls: Sequence[Call], *, captured: bool = True) -> dict[str, float]:
        """Return the median, fastest and slowest time of one call.

        Args:
            calls: the same work on different operands.
            captured: as one CUDA graph; else launched one by one, which small work cannot hide.
        """
        for call in calls:
            call()
        if not self.is_gpu:
            return _spread([_clock(calls) / len(calls) for _ in range(self.replays)])
        torch.cuda.synchronize()
        if not captured:
            return _spread([_events(lambda: _run(calls)) for _ in range(self.replays)], len(calls))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(calls)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            _run(calls)
        graph.replay()
        times = [_events(graph.replay) for _ in range(self.replays)]
        del graph
        return _spread(times, len(calls))


def first_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_facts(bench: Bench) -> dict[str, Any]:
    """Return the device's facts that figures must be read with."""
    facts: dict[str, Any] = {
        "device": bench.device.type,
        "copy_gb_per_second": round(bench.copy_bandwidth / 1e9, 1),
        "copy_counts": "bytes read and written",
    }
    if bench.is_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        facts |= {
            "name": torch.cuda.get_device_name(bench.device),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size >> 20,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver, clocks, power limit": _nvidia_smi(),
        }
    return facts


def _nvidia_smi() -> str:
    """Return driver, clocks and power limit; empty without nvidia-smi."""
    query = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def _copy_bandwidth(device: torch.device, nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    target.copy_(source)
    if device.type == "cuda":
        seconds = [_events(lambda: target.copy_(source)) / 1e6 for _ in range(7)]
    else:
        seconds = [_clock([lambda: target.copy_(source)]) / 1e6 for _ in range(3)]
    return 2 * nbytes / statistics.median(seconds)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _events(work: Call) -> float:
    """Time work on a stream in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def _clock(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    _run(calls)
    return 1e6 * (time.perf_counter() - begin)


def _spread(times: list[float], calls: int = 1) -> dict[str, float]:
    each = sorted(one / calls for one in times)
    return {
        "median": round(statistics.median(each), 3),
        "min": round(each[0], 3),
        "max": round(each[-1], 3),
    }
