"""What is said where torch can use no GPU: facts are of stub drivers, torch's words its own.

The words of torch are of c10/cuda/CUDAFunctions.cpp, as people report them in its issues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.runs.stub_driver import (
    DRIVERS,
    GTX_1080_TI,
    RTX_3090,
    RTX_5090,
    StubCard,
    StubDriver,
)

from appliance.kernels.gpu import obstacle
from appliance.kernels.gpu.cards import GpuFacts, NvidiaCard, cuda_of_torch, read_facts
from appliance.kernels.gpu.obstacle import GpuUse, decide
from appliance.runtime import VISIBLE_GPUS

TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version {}). Please"
    " update your GPU driver by downloading and installing a new version from the URL:"
    " http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to"
    " install a PyTorch version that has been compiled with your version of the CUDA driver."
    " (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
)
UNKNOWN = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up"
    " environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the"
    " available devices to be zero. (Triggered internally at"
    " /pytorch/c10/cuda/CUDAFunctions.cpp:109.)"
)
MISMATCH = (
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda"
    " functions before calling NumCudaDevices() that might have already set an error? Error 803:"
    " system has unsupported display driver / cuda driver combination (Triggered internally at"
    " ../c10/cuda/CUDAFunctions.cpp:108.)"
)

Torch = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run as an installation without `scripts/setup`, and drop what is made visible."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    before = os.environ.pop(VISIBLE_GPUS, None)
    yield
    os.environ.pop(VISIBLE_GPUS, None)
    if before is not None:
        os.environ[VISIBLE_GPUS] = before


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Let torch see cards by their capabilities, or none, with a warning."""

    def see(*capabilities: tuple[int, int], warning: str = "") -> None:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, UserWarning, stacklevel=1)
            return bool(capabilities)

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: capabilities[at])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: f"card {at} of torch")

    return see


def facts_of(driver: StubDriver, /, **more: object) -> GpuFacts:
    """The facts of a machine with that driver and torch's usual build."""
    return replace(
        GpuFacts(
            has_library=True,
            cards=tuple(
                NvidiaCard(
                    card.name,
                    None if card.is_lost else card.capability,
                    f"GPU-{index}",
                    "GPU is lost" if card.is_lost else "",
                )
                for index, card in enumerate(driver.cards)
            ),
            driver=driver.version,
            cuda=(driver.cuda // 1000, driver.cuda % 1000 // 10),
            torch_cuda=(13, 0),
        ),
        **more,  # type: ignore[arg-type]
    )


def said(use: GpuUse) -> str:
    assert not use.is_usable
    assert use.obstacle is not None
    assert use.obstacle.reason in use.in_words()
    assert use.obstacle.fix in use.refusal(), "all doors have the same words"
    return str(use.obstacle)


@pytest.mark.parametrize("name", ["535", "550", "570"])
def test_a_driver_older_than_torchs_cuda(torch_sees: Torch, name: str) -> None:
    driver = DRIVERS[name]
    torch_sees(warning=TOO_OLD.format(driver.cuda))
    words = said(decide(facts_of(driver)))
    shown = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    assert f"NVIDIA's driver {driver.version} is too old" in words
    assert f"it runs CUDA {shown}, and torch is built for 13.0" in words
    assert "update NVIDIA's driver to 580 or later; or, to keep this driver, run: uv pip" in words
    assert "--torch-backend cu126 torch==2" in words
    words = said(decide(facts_of(replace(driver, cards=(RTX_5090,)))))
    assert words.endswith("to 580 or later"), "CUDA 12.6 has no kernels for it"
    in_wsl = said(decide(facts_of(driver, in_wsl=True)))
    assert "update NVIDIA's driver in Windows to 580" in in_wsl
    torch_sees(warning=TOO_OLD.format(driver.cuda))
    unknown = facts_of(driver, cuda=None, driver="")
    assert f"it runs CUDA {shown}" in said(decide(unknown)), "torch knows it too"


def test_a_driver_of_the_time_serves(torch_sees: Torch) -> None:
    torch_sees((8, 6))
    assert decide(facts_of(DRIVERS["580"])) == GpuUse(True)
    assert decide(facts_of(DRIVERS["535"], torch_cuda=(12, 6))) == GpuUse(True)


def test_no_driver_is_said_only_beside_a_card() -> None:
    none = decide(GpuFacts(has_library=False))
    assert (none, none.in_words()) == (GpuUse(False), "")
    assert "no NVIDIA GPU was found" in none.refusal()
    bare = said(decide(GpuFacts(has_library=False, on_pci=("0000:01:00.0",))))
    assert "card is at 0000:01:00.0, and its driver is not installed" in bare
    assert "install NVIDIA's driver 580 or later" in bare
    held = said(decide(GpuFacts(has_library=False, in_container=True, on_pci=("0000:01:00.0",))))
    assert "the container was not given" in held
    assert "docker run --gpus all" in held


@pytest.mark.parametrize(
    ("facts", "warning", "words"),
    [
        ({"missing": ("/dev/nvidia-uvm",)}, UNKNOWN, "sudo nvidia-modprobe -c0 -u"),
        ({"missing": ("/dev/nvidiactl", "/dev/nvidia0")}, "", "are missing, without which CUDA"),
        (
            {"missing": ("/dev/nvidia-uvm",), "in_container": True},
            UNKNOWN,
            "in this container; start the container anew with docker run --gpus all",
        ),
        ({"refused": ("/dev/nvidiactl: Permission denied",)}, "", "sudo usermod -aG GROUP USER"),
        (
            {"refused": ("/dev/nvidiactl: Operation not permitted",), "in_container": True},
            "",
            "may not open /dev/nvidiactl: Operation not permitted, in this container",
        ),
        ({"missing": ("/dev/dxg",), "in_wsl": True}, "", "wsl --update"),
        (
            {"missing": ("/dev/dxg",), "in_wsl": True, "in_container": True},
            "",
            "in this container; start the container anew",
        ),
        ({"problem": "Driver/library version mismatch"}, "", "restart the machine"),
        ({}, MISMATCH, "(Error 803: system has unsupported display driver / cuda driver comb"),
        ({"is_hidden": True}, "", "unset CUDA_VISIBLE_DEVICES"),
        ({}, UNKNOWN, "torch cannot use NVIDIA GeForce RTX 3090 (compute capability 8.6) (CUDA un"),
        ({"cards": (), "problem": "Driver Not Loaded"}, "", "(Driver Not Loaded)"),
        ({"in_wsl": True}, "", "wsl --shutdown"),
    ],
)
def test_a_driver_that_cannot_start(
    torch_sees: Torch, facts: dict[str, object], warning: str, words: str
) -> None:
    torch_sees(warning=warning)
    assert words in said(decide(facts_of(DRIVERS["580"], **facts)))


def test_a_card_that_fell_off_the_bus(torch_sees: Torch) -> None:
    lost = replace(RTX_3090, is_lost=True)
    torch_sees(warning=UNKNOWN)
    words = said(decide(facts_of(replace(DRIVERS["580"], cards=(lost,)))))
    assert "a card does not answer (NVIDIA GeForce RTX 3090: GPU is lost); restart" in words
    torch_sees((8, 6))
    use = decide(facts_of(replace(DRIVERS["580"], cards=(RTX_3090, lost))))
    assert use.is_usable
    assert "GPU is lost" in use.in_words(), "the other one serves, and it is said"


@pytest.mark.parametrize(
    "old", [GTX_1080_TI, StubCard("Tesla V100", 70), StubCard("NVIDIA GeForce RTX 2080", 75)]
)
def test_a_card_without_kernels_is_never_taken(torch_sees: Torch, old: StubCard) -> None:
    torch_sees(divmod(old.capability, 10))
    words = said(decide(facts_of(replace(DRIVERS["580"], cards=(old,)))))
    assert f"here is {old.name}" in words
    assert "use --device cpu, or a card of compute capability 8.0" in words
    words = said(decide(facts_of(replace(DRIVERS["580"], cards=()))))
    assert "torch takes card 0 of torch" in words, "the library may not have named it"


def test_of_two_unlike_cards_the_one_with_kernels_is_used(torch_sees: Torch) -> None:
    torch_sees((8, 6))
    use = decide(facts_of(replace(DRIVERS["580"], cards=(GTX_1080_TI, RTX_3090))))
    assert use.is_usable
    assert os.environ[VISIBLE_GPUS] == "GPU-1"
    assert use.in_words().startswith("NVIDIA GeForce GTX 1080 Ti (compute capability 6.1) is left")
    os.environ[VISIBLE_GPUS] = "0,1"
    torch_sees((6, 1), (8, 6))
    words = said(decide(facts_of(replace(DRIVERS["580"], cards=(GTX_1080_TI, RTX_3090)))))
    assert os.environ[VISIBLE_GPUS] == "0,1", "the user's choice stays"
    assert "let CUDA_VISIBLE_DEVICES name a newer card first" in words
    del os.environ[VISIBLE_GPUS]
    torch_sees((8, 6))
    driver = replace(DRIVERS["570"], cards=(RTX_5090, RTX_3090))
    use = decide(facts_of(driver, torch_cuda=(12, 6)))
    assert os.environ[VISIBLE_GPUS] == "GPU-1"
    assert "RTX 5090 (compute capability 12.0) is left out: this build of torch" in use.in_words()
    assert "update NVIDIA's driver to 580 or later, then run: uv" in use.in_words()


def test_a_build_without_kernels_for_the_card(torch_sees: Torch) -> None:
    torch_sees((12, 0))
    old = facts_of(replace(DRIVERS["570"], cards=(RTX_5090,)), torch_cuda=(12, 6))
    words = said(decide(old))
    assert "torch is built for CUDA 12.6, which has no kernels for NVIDIA GeForce RTX 5090" in words
    assert "update NVIDIA's driver to 580 or later, then run:" in words
    new = facts_of(replace(DRIVERS["580"], cards=(RTX_5090,)), torch_cuda=(12, 6))
    assert "update" not in said(decide(new))
    assert "--torch-backend cu130" in said(decide(new))
    assert decide(facts_of(replace(DRIVERS["580"], cards=(RTX_5090,)))).is_usable


@pytest.mark.parametrize(
    ("driver", "fix"),
    [
        (DRIVERS["580"], "run: uv pip install"),
        (DRIVERS["535"], "--torch-backend cu126"),
        (DRIVERS["470"], "update NVIDIA's driver to 580 or later, then run:"),
        (replace(DRIVERS["570"], cards=(RTX_5090,)), "update NVIDIA's driver to 580"),
    ],
)
def test_the_build_for_cpus_beside_a_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: StubDriver, fix: str
) -> None:
    words = said(decide(facts_of(driver, torch_cuda=None)))
    assert f"torch is the build for CPUs, and here is {driver.cards[0].name}" in words
    assert fix in words
    in_image = said(decide(facts_of(driver, torch_cuda=None, in_container=True)))
    assert "build the image with torch for CUDA" in in_image
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").touch()
    words = said(decide(facts_of(driver, torch_cuda=None)))
    assert words.endswith(f"run: rm -r {tmp_path}/venv && {tmp_path}/scripts/setup")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = said(decide(facts_of(driver, torch_cuda=None)))
    assert words.endswith("run: rm -r ~/venv && ~/scripts/setup"), "/health is public"


def test_torch_that_fails_at_the_card_is_no_crash(
    torch_sees: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(at: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA ker")

    torch_sees((8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_capability", busy)
    words = said(decide(facts_of(DRIVERS["580"])))
    assert "(CUDA error: all CUDA-capable devices are busy or unavailable)" in words


def machine(tmp_path: Path, *, version: str = "Linux version 6.8.0") -> Path:
    """The system's files of a machine with a card, in a folder."""
    root = tmp_path / "root"
    card = root / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030000\n")
    (root / "proc").mkdir()
    (root / "proc" / "version").write_text(version)
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
        (root / "dev" / name).touch()
    return root


class Nvml:
    """Answers nothing."""

    def nvmlInit(self) -> None:
        raise RuntimeError("Driver Not Loaded")


def test_the_files_of_the_system_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path)
    facts = read_facts(root, Nvml())
    assert (facts.on_pci, facts.problem) == (("0000:01:00.0",), "Driver Not Loaded")
    assert (facts.missing, facts.refused) == ((), ())
    assert not facts.in_container
    assert not facts.in_wsl
    (root / "dev" / "nvidia-uvm").unlink()
    assert read_facts(root, Nvml()).missing == ("/dev/nvidia-uvm",)
    (root / "dev" / "nvidia0").unlink()
    assert read_facts(root, Nvml()).missing == ("/dev/nvidia-uvm", "/dev/nvidia0")
    opened = os.open

    def refuse(path: Path, flags: int) -> int:
        if path.name == "nvidiactl":
            raise PermissionError(1, "Operation not permitted")
        return opened(path, flags)

    (root / ".dockerenv").touch()
    assert read_facts(root, Nvml()).in_container
    monkeypatch.setattr(os, "open", refuse)
    assert read_facts(root, Nvml()).refused == ("/dev/nvidiactl: Operation not permitted",)


def test_wsl_has_a_file_of_its_own(tmp_path: Path) -> None:
    root = machine(tmp_path, version="Linux version 5.15.153.1-microsoft-standard-WSL2")
    facts = read_facts(root, Nvml())
    assert (facts.in_wsl, facts.missing) == (True, ("/dev/dxg",))
    (root / "dev" / "dxg").touch()
    assert read_facts(root, Nvml()).missing == ()


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    found = None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")))
    assert cuda_of_torch() == found


PROGRAM = """
import json, sys
from dataclasses import asdict
from appliance.kernels.gpu.cards import folder_of_library, read_facts, usable_cards
from appliance.kernels.gpu import cards
facts = read_facts()
found = {"torch": "torch" in sys.modules, "facts": asdict(facts)}
cards.cuda_of_torch = lambda: (13, 0)
print(json.dumps(found | {
    "folder": str(folder_of_library()), "usable": [card.name for card in usable_cards()]
}))
"""


@pytest.mark.parametrize(
    ("driver", "usable"),
    [
        (DRIVERS["535"], []),
        (DRIVERS["550"], []),
        (DRIVERS["570"], []),
        (DRIVERS["580"], ["NVIDIA GeForce RTX 3090"]),
        (replace(DRIVERS["580"], cards=(RTX_5090, GTX_1080_TI)), ["NVIDIA GeForce RTX 5090"]),
        (replace(DRIVERS["580"], error=18), []),
        (replace(DRIVERS["580"], cards=(replace(RTX_3090, is_lost=True),)), []),
    ],
    ids=["535", "550", "570", "580", "unlike", "mismatch", "lost"],
)
def test_a_driver_is_read_through_its_libraries(
    tmp_path: Path, driver: StubDriver, usable: list[str]
) -> None:
    folder = driver.libraries(tmp_path / "lib")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout)
    facts = found["facts"]
    assert not found["torch"]
    assert found["folder"] == str(folder)
    assert found["usable"] == usable
    assert facts["has_library"]
    assert facts["cuda"] == [driver.cuda // 1000, driver.cuda % 1000 // 10]
    if driver.error:
        assert "mismatch" in facts["problem"], "pynvml's own words"
        return
    assert facts["driver"] == driver.version
    for card, stub in zip(facts["cards"], driver.cards, strict=True):
        assert (card["problem"] == "GPU is lost") == stub.is_lost
        assert card["capability"] == (None if stub.is_lost else stub.capability)


def test_it_is_asked_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [GpuFacts(has_library=False)]
    monkeypatch.setattr(obstacle, "read_facts", answers.pop)
    obstacle.gpu_use.cache_clear()
    assert obstacle.gpu_use() == obstacle.gpu_use() == GpuUse(False)
    obstacle.gpu_use.cache_clear()
