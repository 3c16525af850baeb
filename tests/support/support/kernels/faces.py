"""Settings that make libraries, and ours, compute as on processors with fewer instructions.

As a script it prints them, a line for each such processor that this machine can imitate. A process
that is told to use instructions that this machine lacks would be killed.
"""

from __future__ import annotations

import sys

import torch

from appliance.kernels.cpu.library import load_library, supported_isas
from appliance.kernels.cpu.structs import Isa

# Settings for torch's own kernels, the products of oneDNN, and the CPU library's.
FACES = (
    ("default", "AVX2", "scalar"),
    ("avx2", "AVX512_CORE", "avx2"),
    ("avx512", "AVX512_CORE_BF16", "avxvnni"),
    ("avx512", "AVX512_CORE_AMX", "avx512"),
)
CAPABILITIES = ("default", "avx2", "avx512")


def leave_out(name: str) -> None:
    """Hide the instruction sets above one from our library, from now on."""
    loaded = load_library()
    is_supported = loaded.ap_isa_supported

    def limited(isa: int) -> bool:
        return isa <= Isa[name.upper()] and bool(is_supported(isa))

    loaded.ap_isa_supported = limited  # type: ignore[attr-defined]


def main() -> None:
    """Print the processors that this machine can imitate, and name the others."""
    best = CAPABILITIES.index(torch.backends.cpu.get_cpu_capability().lower())
    isas = {isa.name.lower() for isa in supported_isas(load_library())}
    for capability, onednn, isa in FACES:
        settings = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn}
        if CAPABILITIES.index(capability) > best:
            sys.stderr.write(f"left out: this CPU has no {capability}\n")
            continue
        if isa in isas:
            settings["APPLIANCE_CPU_ISA"] = isa
        else:
            sys.stderr.write(f"without APPLIANCE_CPU_ISA={isa}, which this CPU has not\n")
        sys.stdout.write(" ".join(f"{name}={value}" for name, value in settings.items()) + "\n")


if __name__ == "__main__":
    main()
