"""Compiles a kernel with each assembler of the triton wheel, and reads the order of its code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.kernels.compiled_kernels.compile import compile_kernel
from support.kernels.compiled_kernels.listing import read
from support.kernels.compiled_kernels.lower import target_of
from support.kernels.compiled_kernels.order import (
    WAIT,
    overwritten_operands,
    products_of_registers,
    too_early,
)
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas, ptx_get_version

if TYPE_CHECKING:
    from support.kernels.compiled_kernels.signature import KernelSignature
    from triton.knobs import NvidiaTool

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One kernel as one assembler made it.

    Attributes:
        registers: per thread.
        stack: bytes per thread; more than 0 means that registers were spilled.
        operands: products of a warpgroup with operand A in registers.
        overwritten: what writes to such registers while a product may still read them.
        waits: for the kernel before.
        early: accesses to memory, and ends, before that wait; empty without one.
    """

    registers: int
    stack: int
    operands: int
    overwritten: tuple[str, ...]
    waits: int
    early: tuple[str, ...]


def assemble_kernel(signature: KernelSignature, capability: int) -> dict[str, MachineCode]:
    """Compile a kernel, and assemble its PTX with all assemblers that read that version of PTX."""
    files: dict[str, str] = {}
    metadata: dict[str, Any] = {}

    def note(**compiled: Any) -> None:
        files.update(compiled["metadata_group"])
        metadata.update(compiled["metadata"])

    with knobs.compilation.scope():
        knobs.compilation.listener = note
        compile_kernel(signature, capability)
    by_ending = {Path(name).suffix: Path(path) for name, path in files.items()}
    ptx = by_ending[".ptx"].read_text()
    backend = CUDABackend(target_of(capability))
    options = backend.parse_options({"enable_fp_fusion": signature.fuses})
    version = _VERSION.search(ptx)
    assert version, signature.name
    tools = {"ptxas": knobs.nvidia.ptxas, "ptxas-blackwell": knobs.nvidia.ptxas_blackwell}
    made = {}
    for name, tool in tools.items():
        if tool == get_ptxas(capability):
            made[name] = machine_code(by_ending[".cubin"].read_bytes())
        elif ptx_get_version(tool.version) >= int(version[1]) * 10 + int(version[2]):
            with knobs.nvidia.scope():
                # Whatever the architecture; these take a path, and give a tool.
                knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell = tool.path
                made[name] = machine_code(backend.make_cubin(ptx, metadata, options, capability))
    return made


def machine_code(cubin: bytes) -> MachineCode:
    """Read a file of one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump, "--dump-resource-usage", file.name)
        sass = _run(knobs.nvidia.nvdisasm, "--print-code", "--no-dataflow", file.name)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    listing = read(sass)
    waits = sum(each.opcode == WAIT for each in listing.code)
    return MachineCode(
        registers=int(registers),
        stack=int(stack),
        operands=products_of_registers(listing.code),
        overwritten=tuple(overwritten_operands(listing)),
        waits=waits,
        early=tuple(too_early(listing)) if waits else (),
    )


def _run(tool: NvidiaTool, *arguments: str) -> str:
    command = [tool.path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
