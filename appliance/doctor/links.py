"""The ways between GPUs, tried by copies that are compared."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.doctor.finding import Finding, Grade, Scope, show_gib
from appliance.engine.links.device_probe import probe_devices
from appliance.errors import EngineError
from appliance.runtime import visible_gpus
from appliance.server.gpu import GpuProbe, open_nvml

ROW_BYTES = 8192  # of a hidden state of 4,096 numbers, which ranks exchange


def check_links(scope: Scope) -> Iterator[Finding]:
    """Copy random data between each two GPUs, straight and through host memory."""
    try:
        count = len(GpuProbe(open_nvml(scope.nvml)).read(0))
    except Exception:  # `check_gpus` tells why
        return
    shown = visible_gpus()
    count = count if shown is None else min(count, len(shown))
    if count < 2:
        return
    if scope.is_quick:
        yield Finding("links", Grade.UNKNOWN, "left out by --quick")
        return
    try:
        found = probe_devices([f"cuda:{place}" for place in range(count)], ROW_BYTES)
    except EngineError as error:
        yield Finding("links", Grade.WARN, str(error), "see what nvidia-smi says")
        return
    for memory in found.memory:
        words = f"it copies {memory.bytes_per_second / 1e9:,.0f} GB/s, read and written"
        free = "" if memory.free_bytes is None else f"; {show_gib(memory.free_bytes)} free"
        yield Finding(f"cuda:{memory.place} copies", Grade.OK, words + free)
    for (first, second), choice in found.links.items():
        name = f"cuda:{first} and cuda:{second}"
        if choice.trial is None:
            fix = "let each GPU serve a model of its own; dmesg may tell of IOMMU or Xid errors"
            yield Finding(name, Grade.FAIL, f"no sound way: {choice.reason}", fix)
        elif choice.reason:
            fix = "a BIOS without IOMMU or ACS, or another slot, may make the straight way usable"
            yield Finding(name, Grade.WARN, f"{choice.trial}, since {choice.reason}", fix)
        else:
            yield Finding(name, Grade.OK, str(choice.trial))
