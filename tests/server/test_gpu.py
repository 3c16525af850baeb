from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from appliance.server.gpu import EnergyMeter, GpuProbe


class UnknownHereError(Exception):
    """Like the library's, for what a GPU or its driver cannot tell."""


@dataclass
class Library:
    """NVIDIA's management library as two GPUs would have it, the second one old and silent."""

    energy: int = 5_000_000  # millijoules
    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return "RTX 4090" if handle == 0 else b"Tesla K80"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=3, total=24)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._only_new(handle)
        return SimpleNamespace(gpu=80, memory=20)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._only_new(handle)
        return 320_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._only_new(handle)
        return 450_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._only_new(handle)
        return self.energy

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._only_new(handle)
        return 0x01 | 0x04 | 0x40  # idle is no news

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == 0
        return 71

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        assert clock == 1
        self._only_new(handle)
        return 2520

    @staticmethod
    def _only_new(handle: int) -> None:
        if handle == 1:
            raise UnknownHereError


def test_each_gpu_says_what_it_can() -> None:
    library = Library()
    probe = GpuProbe(library)
    new, old = probe.read(100)
    assert (new.name, new.utilization, new.power_watts) == ("RTX 4090", 0.8, 320.5)
    assert (new.memory_used_bytes, new.memory_total_bytes) == (3, 24)
    assert new.throttled == ("power cap", "hardware thermal slowdown")
    assert (new.energy_joules, new.joules_per_token) == (5000.0, None)
    assert (old.name, old.temperature_celsius) == ("Tesla K80", 71)
    assert (old.utilization, old.power_watts, old.sm_clock_mhz) == (None, None, None)
    assert old.throttled == ()

    library.energy += 30_000
    new, _ = probe.read(120)
    assert new.joules_per_token == pytest.approx(1.5)
    assert library.calls == ["init"], "once for all"


def test_a_machine_without_a_driver_has_no_gpus(caplog: pytest.LogCaptureFixture) -> None:
    class Missing(Library):
        def nvmlInit(self) -> None:
            super().nvmlInit()
            raise UnknownHereError("driver not loaded")

    library = Missing()
    probe = GpuProbe(library)
    assert probe.read(0) == probe.read(0) == ()
    assert library.calls == ["init"], "it is not looked for again and again"
    assert not [record for record in caplog.records if record.levelname != "DEBUG"], "quietly"


def test_energy_is_that_of_the_last_minute_and_of_one_engine() -> None:
    meter = EnergyMeter()
    assert meter.update(0.0, 100.0, 10) is None
    assert meter.update(10.0, 200.0, 60) == 2.0
    assert meter.update(65.0, 500.0, 120) == 5.0, "since 10 s"
    assert meter.update(66.0, 510.0, 0) is None, "another engine"
    assert meter.update(67.0, 530.0, 4) == 5.0
