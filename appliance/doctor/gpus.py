"""Checks if torch uses a GPU, and each GPU through NVIDIA's management library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.doctor.finding import Finding, Grade, Scope, show_gib
from appliance.kernels.cpu.build import BuildError, find_compiler
from appliance.kernels.gpu.cards import GpuFacts, read_facts
from appliance.kernels.gpu.obstacle import decide
from appliance.runtime import open_nvml
from appliance.server.metrics.gpu import GpuProbe, ask
from appliance.wording import age_in_words, counted

if TYPE_CHECKING:
    from appliance.events import Gpu

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
    """Decide as the engine does whether a GPU is used, then check each GPU and each pair."""
    facts = read_facts(scope.root, scope.nvml)
    yield _use(scope, facts)
    try:
        library = open_nvml(scope.nvml)
    except Exception:  # each error of the library has its own class; `facts` has its words
        return
    probe = GpuProbe(library)
    gpus, handles = probe.read(0), probe.handles
    for index, (gpu, handle) in enumerate(zip(gpus, handles, strict=True)):
        name = f"GPU {index}"
        yield _capability(name, gpu, library, handle)
        yield _memory(name, gpu, scope)
        yield _clocks(name, gpu, library, handle)
        yield _tiles(name, gpu)
    for (first, a), (second, b) in combinations(enumerate(handles), 2):
        yield _peers(f"GPUs {first} and {second}", library, a, b)
    if gpus:
        yield from _compiler_of_triton()


def _use(scope: Scope, facts: GpuFacts) -> Finding:
    use = decide(facts)
    if use.obstacle is not None:
        is_lost = facts.has_card and not use.is_usable
        grade = Grade.FAIL if is_lost or scope.engine.device == "cuda" else Grade.WARN
        return Finding("GPU use", grade, use.obstacle.reason, use.obstacle.fix)
    if use.is_usable:
        driver = facts.driver or "of unknown version"
        runs = "unknown CUDA" if facts.cuda is None else f"CUDA {facts.cuda[0]}.{facts.cuda[1]}"
        built = "CPUs only" if facts.torch_cuda is None else "{}.{}".format(*facts.torch_cuda)
        found = f"driver {driver}, up to {runs}; PyTorch is built for {built}"
        return Finding("GPU use", Grade.OK, found)
    if scope.engine.device == "cuda":
        fix = "set device to auto, or install NVIDIA's driver"
        return Finding("GPU use", Grade.FAIL, "device = cuda, but no NVIDIA GPU was found", fix)
    return Finding("GPU use", Grade.OK, "no NVIDIA GPU; the CPU serves")


def _compiler_of_triton() -> Iterator[Finding]:
    """Look for what Triton needs to build what launches kernels."""
    lacking = []
    try:
        find_compiler()
    except BuildError:
        lacking.append("a C compiler")
    headers = Path(str(sysconfig.get_config_var("INCLUDEPY")), "Python.h")
    if not headers.is_file():
        lacking.append(str(headers))
    if lacking:
        found = f"Triton needs {' and '.join(lacking)} to launch kernels"
        yield Finding("GPU compiler", Grade.FAIL, found, "apt install gcc python3-dev")
    else:
        yield Finding("GPU compiler", Grade.OK, "a C compiler and Python.h, for Triton")


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


def _tiles(name: str, gpu: Gpu) -> Finding:
    """Say whether choices of the matmuls were timed on this card, or only computed for it."""
    from appliance.engine.load.tuning import kept_for  # imports torch

    name, kept = f"{name} tiles", kept_for(gpu.name)
    if kept is None:
        found = "computed, none was timed on this card; a start times some, `appliance tune` all"
        return Finding(name, Grade.OK, found)
    found = f"{counted(kept.count, 'choice')} timed on this card, {age_in_words(kept.age)}"
    return Finding(name, Grade.OK, f"{found}; the rest is computed")


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
