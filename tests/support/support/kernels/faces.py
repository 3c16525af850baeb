"""Settings under which libraries, and ours, compute as on processors with fewer instructions.

Run as a script it prints them, a line for each face that this machine can wear; one that asks for
instructions that are not here would be killed for it.
"""

from __future__ import annotations

import sys

import torch

from appliance.kernels.cpu.library import load_library, supported_isas
from appliance.kernels.cpu.structs import Isa

# torch's own kernels, the products of oneDNN, and the CPU library's.
FACES = (
    ("default", "AVX2", "scalar"),
    ("avx2", "AVX512_CORE", "avx2"),
    ("avx512", "AVX512_CORE_BF16", "avxvnni"),
    ("avx512", "AVX512_CORE_AMX", "avx512"),
)
CAPABILITIES = ("default", "avx2", "avx512")


def leave_out(name: str) -> None:
    """From now on this CPU has no instruction set above one, as far as our library is asked."""
    loaded = load_library()
    is_supported = loaded.ap_isa_supported

    def limited(isa: int) -> bool:
        return isa <= Isa[name.upper()] and bool(is_supported(isa))

    loaded.ap_isa_supported = limited  # type: ignore[attr-defined]


def main() -> None:
    """Print what this machine can wear; say what it cannot."""
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
