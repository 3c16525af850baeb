"""Reads the GPUs with NVML; empty without a driver.

A call can block for milliseconds, so this runs in a thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from appliance.events import Gpu
from appliance.runtime import open_nvml

ENERGY_SECONDS = 60.0  # window of joules per token

# Bits of nvml.h, "clocks event reasons", except idle clocks and the owner's own settings.
REASONS = (
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x20, "thermal limit"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def ask(call: Callable[[], ResultT]) -> ResultT | None:
    """Call the library; return None if this GPU or driver does not support the call."""
    try:
        return call()
    except Exception as error:  # NVMLError has a class per code, and old drivers lack functions
        logger.debug("a GPU does not say: %s", error)
        return None


class GpuProbe:
    """Reads all GPUs of the machine."""

    def __init__(self, library: Any = None) -> None:
        self._library = library  # pynvml; loaded on first use
        self._handles: list[Any] | None = None
        self._meters: list[EnergyMeter] = []

    def read(self, generated_tokens: int) -> tuple[Gpu, ...]:
        """Read every GPU.

        Args:
            generated_tokens: the engine's total.
        """
        if self._handles is None:
            self._handles = self._open()
            self._meters = [EnergyMeter() for _ in self._handles]
        now = time.monotonic()
        return tuple(
            self._read_one(handle, meter, now, generated_tokens)
            for handle, meter in zip(self._handles, self._meters, strict=True)
        )

    @property
    def handles(self) -> list[Any]:
        """NVML's device handles, in the order of `read`."""
        return self._handles or []

    def _open(self) -> list[Any]:
        try:
            self._library = open_nvml(self._library)
            count = self._library.nvmlDeviceGetCount()
        except Exception as error:
            # Normal on a machine without a GPU.
            logger.debug("no facts of GPUs: %s", error)
            return []
        # A GPU that fell off the bus, or is another user's, must not hide the others.
        found = [ask(partial(self._library.nvmlDeviceGetHandleByIndex, at)) for at in range(count)]
        return [handle for handle in found if handle is not None]

    def _read_one(self, handle: Any, meter: EnergyMeter, now: float, tokens: int) -> Gpu:
        nvml = self._library
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        millijoules = ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if reasons is None:  # drivers before 535 have an older name
            reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        energy = None if millijoules is None else millijoules / 1000
        return Gpu(
            name=_text(ask(lambda: nvml.nvmlDeviceGetName(handle))),
            utilization=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            temperature_celsius=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, 0)),
            sm_clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, 1)),
            throttled=tuple(text for bit, text in REASONS if reasons & bit),
            energy_joules=energy,
            joules_per_token=None if energy is None else meter.update(now, energy, tokens),
        )


class EnergyMeter:
    """Energy per generated token over the last minute, idle time included."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()

    def update(self, now: float, joules: float, tokens: int) -> float | None:
        """Return joules per token over the last minute; None without tokens."""
        samples = self._samples
        if samples and (tokens < samples[-1][2] or joules < samples[-1][1]):
            samples.clear()  # a new engine or driver restarts the counters
        samples.append((now, joules, tokens))
        while now - samples[0][0] > ENERGY_SECONDS:
            samples.popleft()
        _, first_joules, first_tokens = samples[0]
        generated = tokens - first_tokens
        return (joules - first_joules) / generated if generated else None


def _text(name: str | bytes | None) -> str:
    if name is None:
        return "GPU"
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
