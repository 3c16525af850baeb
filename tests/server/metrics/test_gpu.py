from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from appliance.events import Gpu
from appliance.server.metrics.gpu import REASONS, EnergyMeter, GpuProbe


class UnknownHereError(Exception):
    """Like the library's error, for what a GPU or its driver cannot report."""


@dataclass
class Library:
    """NVIDIA's management library for two GPUs, of which the second is old and reports little."""

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
        return 0x01 | 0x04 | 0x40  # idle is not reported

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        raise UnknownHereError

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
    assert meter.update(68.0, 1.0, 5) is None, "another driver"
    assert meter.update(69.0, 7.0, 7) == 3.0


NOT_SUPPORTED, GPU_IS_LOST = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST
HANDLES = (0x1000, 0x2000)


class Driver:
    """libnvidia-ml as the real Python library calls it, with a subset of its functions.

    Args:
        answers: by function, what it writes to its last argument's target, or a `Failure` with the
            code that it returns.
    """

    def __init__(self, **answers: Any) -> None:
        self._answers = {"nvmlDeviceGetCount_v2": 2, **answers}

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        failed = self._answers.get("handles", (0, 0))[index.value]
        handle._obj.contents = ctypes.cast(HANDLES[index.value], type(handle._obj)).contents
        return int(failed)

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: ctypes.c_uint) -> int:
        name.value = b"NVIDIA GeForce RTX 4090"
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._answers:
            raise AttributeError(name)  # this driver is older than the function
        answer = self._answers[name]

        def function(*arguments: Any) -> int:
            if isinstance(answer, Failure):
                return answer.code
            target = arguments[-1]._obj
            for field_name, value in answer.items() if isinstance(answer, dict) else ():
                setattr(target, field_name, value)
            if not isinstance(answer, dict):
                target.value = answer
            return 0

        return function


@dataclass(frozen=True)
class Failure:
    """The code that a function of the driver returns when it fails."""

    code: int


FULL = {
    "nvmlDeviceGetMemoryInfo": {"total": 24 << 30, "used": 20 << 30, "free": 4 << 30},
    "nvmlDeviceGetUtilizationRates": {"gpu": 93, "memory": 40},
    "nvmlDeviceGetPowerUsage": 320_500,
    "nvmlDeviceGetEnforcedPowerLimit": 450_000,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x20,
    "nvmlDeviceGetTemperature": 71,
    "nvmlDeviceGetClockInfo": 2520,
}


def gpus_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return list(GpuProbe().read(0))


def test_the_real_library_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Gpu(
        name="NVIDIA GeForce RTX 4090", utilization=0.93, memory_used_bytes=20 << 30,
        memory_total_bytes=24 << 30, power_watts=320.5, power_limit_watts=450.0,
        temperature_celsius=71, sm_clock_mhz=2520, throttled=("thermal limit",),
        energy_joules=5000.0,
    )  # fmt: skip
    assert gpus_of(Driver(**FULL), monkeypatch) == [expected, expected]


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("how", ["missing", "not supported"])
def test_what_one_driver_does_not_tell_hides_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    whole = gpus_of(Driver(**FULL), monkeypatch)[0]
    answers: dict[str, Any] = {**FULL, name: Failure(NOT_SUPPORTED)}
    if how == "missing":
        del answers[name]
    found = gpus_of(Driver(**answers), monkeypatch)[0]
    fields = msgspec.structs.asdict
    lost = {key for key, value in fields(found).items() if value != fields(whole)[key]}
    assert 1 <= len(lost) <= 2
    assert all(not fields(found)[key] for key in lost)
    assert not [record for record in caplog.records if record.levelname != "DEBUG"], "quietly"


def test_reasons_and_kinds_are_what_the_library_calls_them() -> None:
    names = (
        "SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown",
        "HwPowerBrakeSlowdown",
    )  # fmt: skip
    bits = [getattr(pynvml, f"nvmlClocksEventReason{name}") for name in names]
    assert [bit for bit, _ in REASONS] == bits
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM) == (0, 1)


def test_old_drivers_are_asked_for_reasons_by_their_old_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, Any] = {**FULL, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04}
    del answers["nvmlDeviceGetCurrentClocksEventReasons"]
    assert gpus_of(Driver(**answers), monkeypatch)[0].throttled == ("power cap",)


def test_a_gpu_that_is_lost_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gpus_of(Driver(**FULL, handles=(GPU_IS_LOST, 0)), monkeypatch)) == 1


def test_without_a_driver_the_real_library_stays_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_such_file(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_such_file)
    assert GpuProbe().read(0) == ()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
