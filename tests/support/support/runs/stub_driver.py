"""Stands in for NVIDIA's driver: libraries that answer as one would, and a program's output."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The functions of cuda.h and nvml.h that are asked before a card is used, with their signatures.
_LIBCUDA = """
int cuDriverGetVersion(int *version) {{ *version = {cuda}; return 0; }}
"""
# What Triton's module links to and does not call before a kernel is loaded.
_LINKED = """
CtxGetCurrent CtxGetLimit CtxSetCurrent CtxSetLimit DeviceGet DeviceGetAttribute
DevicePrimaryCtxRetain FuncGetAttribute FuncSetAttribute FuncSetCacheConfig GetErrorString
ModuleGetFunction ModuleLoadData PointerGetAttribute
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_LIBCUDA += "".join(
    f"int cu{name}(void) {{{{ return {_NO_DEVICE}; }}}}\n" for name in _LINKED.split()
)
_LIBNVML = """
#include <string.h>
typedef struct card *handle;
static const char *names[] = {{ {names} "" }};
static const char *uuids[] = {{ {uuids} "" }};
static const int capabilities[] = {{ {capabilities} 0 }};
static const int lost[] = {{ {lost} 0 }};
static int count = {count};
int nvmlInitWithFlags(unsigned flags) {{ return {error}; }}
int nvmlInit_v2(void) {{ return {error}; }}
int nvmlShutdown(void) {{ return 0; }}
int nvmlDeviceGetCount_v2(unsigned *found) {{ *found = count; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *found) {{
    *found = (handle)(unsigned long)(index + 1);
    return lost[index] ? 15 : 0;
}}
int nvmlDeviceGetName(handle card, char *name, unsigned size) {{
    strncpy(name, names[(unsigned long)card - 1], size);
    return 0;
}}
int nvmlDeviceGetUUID(handle card, char *uuid, unsigned size) {{
    strncpy(uuid, uuids[(unsigned long)card - 1], size);
    return 0;
}}
int nvmlDeviceGetCudaComputeCapability(handle card, int *major, int *minor) {{
    *major = capabilities[(unsigned long)card - 1] / 10;
    *minor = capabilities[(unsigned long)card - 1] % 10;
    return 0;
}}
int nvmlSystemGetDriverVersion(char *version, unsigned size) {{
    strncpy(version, "{driver}", size);
    return 0;
}}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {{ *version = {cuda}; return 0; }}
int nvmlSystemGetCudaDriverVersion(int *version) {{ *version = {cuda}; return 0; }}
"""
# The first lines of what nvidia-smi of these drivers prints; from 610 on CUDA's label is another.
_TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} {driver_label} {driver:<14} {cuda_label} {cuda:<9}|
+-----------------------------------------+------------------------+----------------------+
"""


@dataclass(frozen=True, slots=True)
class StubCard:
    name: str
    capability: int
    is_lost: bool = False


RTX_3090 = StubCard("NVIDIA GeForce RTX 3090", 86)
RTX_5090 = StubCard("NVIDIA GeForce RTX 5090", 120)
GTX_1080_TI = StubCard("NVIDIA GeForce GTX 1080 Ti", 61)


@dataclass(frozen=True, slots=True)
class StubDriver:
    """A driver of a version, with the CUDA that NVIDIA's release notes give it.

    Attributes:
        cuda: as the driver counts, of which 12080 is 12.8.
        error: of the management library's first call, by nvml.h.
    """

    version: str
    cuda: int
    cards: tuple[StubCard, ...] = (RTX_3090,)
    error: int = 0

    def libraries(self, folder: Path) -> Path:
        """Compile libcuda and libnvidia-ml into a folder for LD_LIBRARY_PATH."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "cuda": self.cuda,
            "driver": self.version,
            "error": self.error,
            "count": len(self.cards),
            "names": "".join(f"{json.dumps(card.name)}, " for card in self.cards),
            "uuids": "".join(f'"GPU-{index}", ' for index in range(len(self.cards))),
            "capabilities": "".join(f"{card.capability}, " for card in self.cards),
            "lost": "".join(f"{card.is_lost:d}, " for card in self.cards),
        }
        for name, source in (("libcuda.so.1", _LIBCUDA), ("libnvidia-ml.so.1", _LIBNVML)):
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-"]
            subprocess.run(
                [*command, "-o", folder / name],
                input=source.format(**values),
                text=True,
                check=True,
            )
        return folder

    def program(self, *, is_new: bool = False) -> str:
        """Return the text of an nvidia-smi, with the labels since driver 610 if `is_new`."""
        table = _TABLE.format(
            driver=self.version,
            driver_label="KMD Version:" if is_new else "Driver Version:",
            cuda_label="CUDA UMD Version:" if is_new else "CUDA Version:",
            cuda=f"{self.cuda // 1000}.{self.cuda % 1000 // 10}",
        )
        rows = "".join(
            f"{card.capability // 10}.{card.capability % 10}, {card.name}\n" for card in self.cards
        )
        listed = "".join(
            f"GPU {index}: {card.name} (UUID: GPU-{index})\n"
            for index, card in enumerate(self.cards)
        )
        return (
            '#!/bin/sh\ncase "$*" in\n'
            f"*compute_cap*) cat <<'END'\n{rows}END\n;;\n"
            f"-L) cat <<'END'\n{listed}END\n;;\n"
            f"*) cat <<'END'\n{table}END\n;;\nesac\n"
        )


DRIVERS = {
    "470": StubDriver("470.256.02", 11040),
    "535": StubDriver("535.183.01", 12020),
    "550": StubDriver("550.163.01", 12040),
    "570": StubDriver("570.211.01", 12080),
    "580": StubDriver("580.95.05", 13000),
}
