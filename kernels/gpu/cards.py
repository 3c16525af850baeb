"""The NVIDIA cards of this machine, their driver and torch's build; imports no torch.

Much of it can be asked only where the driver works, so each fact may be missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from appliance.runtime import open_nvml, visible_gpus

LEAST_CAPABILITY = 80  # of our kernels
# https://docs.nvidia.com/cuda/blackwell-compatibility-guide: from here on, CUDA 12.8 is needed.
BLACKWELL, BLACKWELL_CUDA = 100, (12, 8)

_NVIDIA = "0x10de"  # of PCI
_DISPLAY = "0x03"  # the class of PCI devices
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container")
_KUBERNETES = "var/run/secrets/kubernetes.io"


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A card as the management library lists it.

    Attributes:
        capability: compute capability (86 is 8.6); None if unknown.
        problem: the library's words if the card does not answer.
    """

    name: str
    capability: int | None
    uuid: str = ""
    problem: str = ""

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} (compute capability {self.capability // 10}.{self.capability % 10})"

    @property
    def is_too_old(self) -> bool:
        return self.capability is not None and self.capability < LEAST_CAPABILITY

    def needs_newer(self, cuda: tuple[int, int]) -> bool:
        """Return True if builds of torch for a version of CUDA have no kernels for it."""
        is_new = self.capability is not None and self.capability >= BLACKWELL
        return is_new and cuda < BLACKWELL_CUDA


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A machine as torch will find it.

    Attributes:
        has_library: libcuda can be loaded, without which torch sees no GPU.
        on_pci: addresses of NVIDIA's cards on the bus.
        missing: device files that CUDA opens and that are not here.
        refused: those that this process may not open, with the system's reason.
        driver: its version; empty if unknown.
        cuda: the newest CUDA that the driver runs; None if unknown.
        problem: why the management library does not work; empty if it does.
        torch_cuda: the CUDA that torch is built for; None for the build for CPUs.
        is_hidden: the environment shows no GPU to CUDA.
    """

    has_library: bool
    in_container: bool = False
    in_wsl: bool = False
    on_pci: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    cards: tuple[NvidiaCard, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None
    problem: str = ""
    torch_cuda: tuple[int, int] | None = None
    is_hidden: bool = False

    @property
    def has_card(self) -> bool:
        """True if a card is seen, or its driver is installed whole and does not work."""
        return bool(self.on_pci or self.cards) or "mismatch" in self.problem.lower()


@lru_cache
def has_driver() -> bool:
    """Return True if the library exists without which torch sees no GPU either."""
    return _cuda_library() is not None


def read_facts(root: Path = Path("/"), nvml: Any = None) -> GpuFacts:
    """Look at this machine.

    Args:
        root: of the system's own files.
        nvml: replaces pynvml.
    """
    in_container = any((root / mark).exists() for mark in (*_CONTAINER_MARKS, _KUBERNETES))
    in_wsl = _is_wsl(root)
    if nvml is None and not has_driver():
        return GpuFacts(False, in_container, in_wsl, _on_pci(root))
    cards, driver, cuda, problem = _ask_nvml(nvml)
    missing, refused = _device_files(root, in_wsl=in_wsl, cards=len(cards))
    return GpuFacts(
        has_library=nvml is not None or has_driver(),
        in_container=in_container,
        in_wsl=in_wsl,
        on_pci=_on_pci(root),
        missing=missing,
        refused=refused,
        cards=cards,
        driver=driver,
        cuda=cuda or _cuda_of_library(),
        problem=problem,
        torch_cuda=cuda_of_torch(),
        is_hidden=visible_gpus() == [],
    )


def usable_cards() -> list[NvidiaCard]:
    """Return the cards that torch's build and the kernels are for, without asking torch."""
    built = cuda_of_torch() if has_driver() else None
    if built is None:
        return []
    cards, _, cuda, _ = _ask_nvml(None)
    if cuda is not None and cuda[0] < built[0]:
        return []
    return [card for card in with_kernels(cards, built) if card.uuid]


def driver_version(nvml: Any = None) -> str:
    """Return the version of the cards' driver; "unknown" where it does not say.

    Args:
        nvml: replaces pynvml.
    """
    return _ask_nvml(nvml)[1] or "unknown"


def with_kernels(cards: Sequence[NvidiaCard], built: tuple[int, int]) -> list[NvidiaCard]:
    """Return the cards for which our kernels are made, and torch's of a build for CUDA."""
    return [card for card in cards if not (card.is_too_old or card.needs_newer(built))]


def cuda_of_torch() -> tuple[int, int] | None:
    """Return the CUDA version of the installed torch without importing it; None for CPUs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= '(\d+)\.(\d+)", text, re.M)
    return None if found is None else (int(found[1]), int(found[2]))


def folder_of_library() -> Path | None:
    """Return the folder of the libcuda.so.1 that this process has loaded; None without one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = Path(line[line.find("/") :])  # of what is mapped there, if it is a file
        if path.name.startswith("libcuda.so") and path.with_name("libcuda.so.1").exists():
            return path.parent
    return None


def _cuda_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _cuda_of_library() -> tuple[int, int] | None:
    """Ask libcuda, which answers even where nothing else of the driver works."""
    found = ctypes.c_int()
    try:
        library = _cuda_library()
        if library is None or library.cuDriverGetVersion(ctypes.byref(found)) or not found.value:
            return None
    except AttributeError:
        return None
    return as_version(found.value)


def as_version(number: int) -> tuple[int, int]:
    """Read CUDA's number of a version, of which 12080 is 12.8."""
    return number // 1000, number % 1000 // 10


def _ask_nvml(nvml: Any) -> tuple[tuple[NvidiaCard, ...], str, tuple[int, int] | None, str]:
    """Return the cards, the driver's version, its CUDA, and why there are none of these."""
    try:
        nvml = open_nvml(nvml)
        count = nvml.nvmlDeviceGetCount()
    except Exception as error:  # pynvml has a class for each
        return (), "", None, str(error)
    cards = tuple(_card(nvml, index) for index in range(count))
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = as_version(nvml.nvmlSystemGetCudaDriverVersion())
    except Exception:
        return cards, "", None, ""
    return cards, driver, cuda, ""


def _card(nvml: Any, index: int) -> NvidiaCard:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
    except Exception as error:
        return NvidiaCard(f"card {index}", None, problem=str(error))
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return NvidiaCard(name, 10 * major + minor, _text(nvml.nvmlDeviceGetUUID(handle)))
    except Exception:
        return NvidiaCard(name, None)


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name


def _is_wsl(root: Path) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text().lower()
    except OSError:
        return False


def _on_pci(root: Path) -> tuple[str, ...]:
    found = []
    for device in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        try:
            if device.read_text().strip() == _NVIDIA:
                kind = device.with_name("class").read_text()
                found += [device.parent.name] if kind.startswith(_DISPLAY) else []
        except OSError:  # it was unplugged
            continue
    return tuple(found)


def _device_files(
    root: Path, *, in_wsl: bool, cards: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files that are missing and those that are refused."""
    if sys.platform != "linux":
        return (), ()
    names = ["dxg"] if in_wsl else ["nvidiactl", "nvidia-uvm"]
    if not in_wsl and not (cards or any(root.glob("dev/nvidia[0-9]*"))):
        names.append("nvidia0")
    names += [] if in_wsl else sorted(path.name for path in root.glob("dev/nvidia[0-9]*"))
    missing, refused = [], []
    for name in names:
        try:
            os.close(os.open(root / "dev" / name, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            missing.append(f"/dev/{name}")
        except OSError as error:
            refused.append(f"/dev/{name}: {error.strerror}")
    return tuple(missing), tuple(refused)
