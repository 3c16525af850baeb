"""Checks NVIDIA's driver and GPUs through its management library."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.doctor.finding import Finding, Grade, Scope, show_gib
from appliance.server.metrics.gpu import GpuProbe, ask, open_nvml

if TYPE_CHECKING:
    from appliance.events import Gpu

NVIDIA = "0x10de"  # of PCI
DISPLAY = "0x03"  # the class of PCI devices
P2P_READ, P2P_OK = 0, 0  # of nvml.h: NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK
SM_CLOCK = 1
_COOLING = "clean fans and filters, and let air flow freely"
_POWER = "check the power supply and its cables to the card"
_FIXES = {
    "power cap": "normal under load; nvidia-smi -pl WATTS (as root) raises the limit",
    "thermal limit": _COOLING,
    "hardware thermal slowdown": _COOLING,
    "hardware slowdown": f"{_COOLING}; {_POWER}",
    "power brake": _POWER,
}


def check_gpus(scope: Scope) -> Iterator[Finding]:
    """Check the driver, then each GPU, then each pair."""
    try:
        library = open_nvml(scope.nvml)
    except Exception as error:  # each error of the library has its own class
        yield _without_driver(scope, str(error))
        return
    probe = GpuProbe(library)
    gpus = probe.read(0)
    if not gpus:
        grade = Grade.FAIL if scope.engine.device == "cuda" else Grade.WARN
        yield Finding("driver", grade, "it has no GPU that this user may use", "run: nvidia-smi -L")
        return
    yield from _driver(library)
    handles = probe.handles
    for index, (gpu, handle) in enumerate(zip(gpus, handles, strict=True)):
        name = f"GPU {index}"
        yield _capability(name, gpu, library, handle)
        yield _memory(name, gpu, scope)
        yield _clocks(name, gpu, library, handle)
    for (first, a), (second, b) in combinations(enumerate(handles), 2):
        yield _peers(f"GPUs {first} and {second}", library, a, b)


def _without_driver(scope: Scope, why: str) -> Finding:
    cards = [
        device.parent.name
        for device in scope.root.glob("sys/bus/pci/devices/*/vendor")
        if device.read_text().strip() == NVIDIA
        and device.with_name("class").read_text().startswith(DISPLAY)
    ]
    if "mismatch" in why.lower():
        return Finding("driver", Grade.FAIL, why, "it was updated: restart the machine")
    if cards:
        fix = "install NVIDIA's driver and see that nvidia-smi works; in a container, pass the GPU"
        return Finding("driver", Grade.FAIL, f"{why}, but a card is at {cards[0]}", fix)
    if scope.engine.device == "cuda":
        found = f"device = cuda, but {why}"
        return Finding("driver", Grade.FAIL, found, "set device to auto, or install the driver")
    return Finding("driver", Grade.OK, "no NVIDIA GPU; the CPU serves")


def _driver(library: Any) -> Iterator[Finding]:
    driver = _text(ask(lambda: library.nvmlSystemGetDriverVersion()))
    number = ask(lambda: library.nvmlSystemGetCudaDriverVersion())  # 12080 is 12.8
    cuda = None if number is None else (number // 1000, number % 1000 // 10)
    built = cuda_of_torch()
    shown = "unknown CUDA" if cuda is None else f"CUDA {cuda[0]}.{cuda[1]}"
    found = f"{driver}, up to {shown}; PyTorch is built for {built or 'CPUs only'}"
    if built is None:
        fix = "install PyTorch's CUDA build: remove .venv and run scripts/setup again"
        yield Finding("driver", Grade.FAIL, found, fix)
    elif cuda is not None and cuda[0] < int(built.partition(".")[0]):
        yield Finding("driver", Grade.FAIL, found, "update NVIDIA's driver")
    else:
        yield Finding("driver", Grade.OK, found)


def _capability(name: str, gpu: Gpu, library: Any, handle: Any) -> Finding:
    from appliance.kernels.packed_matmul.tiles import architecture  # imports torch

    found = ask(lambda: library.nvmlDeviceGetCudaComputeCapability(handle))
    if found is None:
        return Finding(name, Grade.UNKNOWN, f"{gpu.name} does not report its compute capability")
    major, minor = found
    words = f"{gpu.name}, compute capability {major}.{minor}"
    if architecture(10 * major + minor) is None:
        fix = "use --device cpu, or a card of 8.0 or later (RTX 30, A100)"
        return Finding(name, Grade.FAIL, f"{words}; the kernels need 8.0", fix)
    return Finding(name, Grade.OK, words)


def _memory(name: str, gpu: Gpu, scope: Scope) -> Finding:
    name = f"{name} memory"
    if gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return Finding(name, Grade.UNKNOWN, f"{gpu.name} does not report it")
    free = gpu.memory_total_bytes - gpu.memory_used_bytes
    found = f"{show_gib(free)} of {show_gib(gpu.memory_total_bytes)} free"
    share = scope.engine.gpu_memory_utilization
    if free < share * gpu.memory_total_bytes:
        fix = "unless that is this server, nvidia-smi lists what else uses it: end it, or set"
        fix += " gpu_memory_utilization lower"
        return Finding(name, Grade.WARN, f"{found}, and {share:.0%} may be planned with", fix)
    return Finding(name, Grade.OK, found)


def _clocks(name: str, gpu: Gpu, library: Any, handle: Any) -> Finding:
    name = f"{name} clocks"
    if gpu.sm_clock_mhz is None:
        return Finding(name, Grade.UNKNOWN, f"{gpu.name} does not report them")
    most = ask(lambda: library.nvmlDeviceGetMaxClockInfo(handle, SM_CLOCK))
    found = f"{gpu.sm_clock_mhz} MHz" + ("" if most is None else f" of at most {most}")
    if gpu.temperature_celsius is not None:
        found += f", {gpu.temperature_celsius} °C"
    if gpu.power_watts is not None and gpu.power_limit_watts is not None:
        found += f", {gpu.power_watts:.0f} of {gpu.power_limit_watts:.0f} W"
    if gpu.throttled:
        fixes = "; ".join(dict.fromkeys(_FIXES[reason] for reason in gpu.throttled))
        return Finding(name, Grade.WARN, f"{found}; slowed by {', '.join(gpu.throttled)}", fixes)
    return Finding(name, Grade.OK, f"{found}; not slowed now (look again under load)")


def _peers(name: str, library: Any, first: Any, second: Any) -> Finding:
    status = ask(lambda: library.nvmlDeviceGetP2PStatus(first, second, P2P_READ))
    if status is None:
        return Finding(name, Grade.UNKNOWN, "the driver does not report if they reach each other")
    if status == P2P_OK:
        return Finding(name, Grade.OK, "they read each other's memory (P2P)")
    # No warning: many cards for homes have none, and the ranks' own test measures what that costs.
    return Finding(name, Grade.OK, "no P2P: copies between them go through the host's memory")


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the installed torch without importing it; None for CPU."""
    try:
        if version("torch").endswith("+cpu"):
            return None
    except PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= '([0-9.]+)'", text, re.M)
    return None if found is None else found[1]


def _text(name: str | bytes | None) -> str:
    if name is None:
        return "of unknown version"
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
