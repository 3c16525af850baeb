"""The report on GPUs; the library's answers are invented, no card was queried."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from appliance.config import EngineConfig
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.gpus import check_gpus
from appliance.engine.load.tuning import keep
from appliance.kernels.gpu import cards
from appliance.kernels.gpu.timed import TimedChoices
from appliance.runtime import VISIBLE_GPUS

Look = Callable[[Check, Scope], dict[str, Finding]]


class DriverError(Exception):
    """Like the library's error."""


@dataclass
class Nvml:
    """NVIDIA's management library with two GPUs."""

    error: str = ""
    cuda: int = 13000
    capability: tuple[int, int] = (8, 6)
    used: int = 1 << 30
    reasons: int = 0
    p2p: int = 0

    def nvmlInit(self) -> None:
        if self.error:
            raise DriverError(self.error)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [*self.capability]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=self.used, total=24 << 30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.reasons

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 83

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1395

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return 2100

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, index: int) -> int:
        assert (first, second, index) == (0, 1, 0)
        return self.p2p


@pytest.fixture(autouse=True)
def _torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a machine where PyTorch has its usual build."""
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    monkeypatch.setattr(cards, "cuda_of_torch", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: "NVIDIA GeForce RTX 3090")


def test_two_gpus_that_are_well(look: Look) -> None:
    found = look(check_gpus, Scope(nvml=Nvml()))
    assert {one.grade for one in found.values()} == {Grade.OK}
    driver = "driver 580.65.06, up to CUDA 13.0; PyTorch is built for 13.0"
    assert found["GPU use"].found == driver
    assert "Python.h" in found["GPU compiler"].found
    assert found["GPU 1"].found == "NVIDIA GeForce RTX 3090, compute capability 8.6"
    assert found["GPU 0 memory"].found == "23.0 GiB of 24.0 GiB free"
    assert found["GPU 0 clocks"].found.startswith("1395 MHz of at most 2100, 83 °C")
    assert "P2P" in found["GPUs 0 and 1"].found


def test_tiles_are_said_to_be_computed_until_they_are_timed(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    found = look(check_gpus, Scope(nvml=Nvml()))["GPU 1 tiles"]
    assert "computed, none was timed on this card" in found.found
    keep("NVIDIA GeForce RTX 3090", {"4096 x 4096": TimedChoices(own_rows=256)})
    found = look(check_gpus, Scope(nvml=Nvml()))["GPU 1 tiles"]
    assert found.found == "1 choice timed on this card, now; the rest is computed"


@pytest.mark.parametrize(
    ("nvml", "name", "grade", "words"),
    [
        (Nvml(capability=(7, 5)), "GPU 0", Grade.FAIL, "the kernels need 8.0"),
        (Nvml(used=20 << 30), "GPU 1 memory", Grade.WARN, "90% may be planned with"),
        (Nvml(reasons=0x40 | 0x04), "GPU 0 clocks", Grade.WARN, "hardware thermal slowdown"),
        (Nvml(capability=(7, 5)), "GPU use", Grade.FAIL, "the kernels need compute capability"),
        (Nvml(p2p=1), "GPUs 0 and 1", Grade.OK, "no P2P"),
    ],
)
def test_what_can_be_wrong(look: Look, nvml: Nvml, name: str, grade: Grade, words: str) -> None:
    found = look(check_gpus, Scope(nvml=nvml))[name]
    assert (found.grade, words in found.found) == (grade, True), found
    assert bool(found.fix) == (grade is not Grade.OK)


def test_what_a_driver_does_not_tell_is_unknown(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CudaComputeCapability", "MemoryInfo", "ClockInfo", "P2PStatus"):
        monkeypatch.delattr(Nvml, f"nvmlDeviceGet{name}")
    found = look(check_gpus, Scope(nvml=Nvml()))
    names = ("GPU 0", "GPU 0 memory", "GPU 0 clocks", "GPUs 0 and 1")
    assert {found[name].grade for name in names} == {Grade.UNKNOWN}


def test_pytorch_for_cpus_beside_a_gpu(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "cuda_of_torch", lambda: None)
    found = look(check_gpus, Scope(nvml=Nvml()))["GPU use"]
    assert (found.grade, "build for CPUs" in found.found) == (Grade.FAIL, True)
    assert found.fix


def test_a_driver_older_than_pytorch(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = look(check_gpus, Scope(nvml=Nvml(cuda=12080)))["GPU use"]
    assert (found.grade, "it runs CUDA 12.8" in found.found) == (Grade.FAIL, True)
    assert found.fix.startswith("update NVIDIA's driver")


def test_without_python_h_triton_cannot_start(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    found = look(check_gpus, Scope(nvml=Nvml()))["GPU compiler"]
    assert (found.grade, str(tmp_path / "Python.h") in found.found) == (Grade.FAIL, True)
    assert "python3-dev" in found.fix


def test_a_machine_without_a_gpu_is_well(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cards, "has_driver", lambda: False)
    found = look(check_gpus, Scope(root=tmp_path))["GPU use"]
    assert (found.grade, found.found) == (Grade.OK, "no NVIDIA GPU; the CPU serves")
    wanted = EngineConfig(device="cuda")
    found = look(check_gpus, Scope(root=tmp_path, engine=wanted))["GPU use"]
    assert found.grade is Grade.FAIL


def test_a_card_without_a_driver(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cards, "has_driver", lambda: False)
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")
    assert look(check_gpus, Scope(root=tmp_path))["GPU use"].grade is Grade.OK, "sound"
    (card / "class").write_text("0x030000\n")
    found = look(check_gpus, Scope(root=tmp_path))["GPU use"]
    assert (found.grade, "0000:01:00.0" in found.found) == (Grade.FAIL, True)


def test_a_driver_that_was_updated_wants_a_restart(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nvml = Nvml(error="Driver/library version mismatch")
    assert "restart" in look(check_gpus, Scope(nvml=nvml))["GPU use"].fix
