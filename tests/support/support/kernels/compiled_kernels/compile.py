"""Compiles a kernel ahead of time, without a GPU, and reads the resources of its machine code.

The disassemblers are those of the triton wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import triton
from support.kernels.compiled_kernels.lower import options_of, source_of, target_of

if TYPE_CHECKING:
    from support.kernels.compiled_kernels.signature import KernelSignature

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Opcodes in SASS, the machine code.
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)
_WIDE_LOAD = re.compile(r"LD(?:G|GSTS)\..*\b128\b")
_MATRIX_PRODUCT = re.compile(r"[HIQO]G?MMA\b|DMMA\b")
_WARPGROUP_PRODUCT = re.compile(r"[HIQ]GMMA\b")
_SPILL = re.compile(r"(?:STL|LDL)\b")
# Lines of a listing: a label, or an instruction with its opcode and operands.
_LINE = re.compile(
    r"^(?:(\.L_\w+):|\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*))", re.MULTILINE
)
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one kernel on one architecture."""

    registers: int  # per thread
    stack: int  # bytes per thread; more than 0 means that registers were spilled
    spills: int  # instructions that store to or load from that stack
    shared: int  # bytes per program, dynamic included
    instructions: int
    wide_loads: int  # instructions that load 16 bytes per thread from global memory
    matrix_products: int  # tensor core instructions
    matrix_kinds: tuple[str, ...]  # opcodes of the latter, such as HMMA or HGMMA
    loop: dict[str, int]  # instructions of the hot loop by the first part of their opcode
    beside: dict[str, int]  # those of them that are issued while a tensor core product is in flight
    loop_elements: int  # of the signature


def compile_kernel(signature: KernelSignature, capability: int) -> Resources:
    """Compile a kernel for one compute capability (86 is 8.6) and disassemble it."""
    compiled = triton.compile(
        source_of(signature), target=target_of(capability), options=options_of(signature)
    )
    return _read(compiled.asm["cubin"], compiled.metadata.shared, signature.loop_elements)


def _read(cubin: bytes, shared: int, loop_elements: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "--print-code", "--no-dataflow", file.name)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    opcodes = _INSTRUCTION.findall(sass)
    loop = hot_loop(sass)
    products = [code for code in opcodes if _MATRIX_PRODUCT.match(code)]
    return Resources(
        registers=int(registers),
        stack=int(stack),
        spills=sum(bool(_SPILL.match(code)) for code in opcodes),
        # The cubin states the static part only; triton requests the rest at launch.
        shared=shared,
        instructions=len(opcodes),
        wide_loads=sum(bool(_WIDE_LOAD.match(code)) for code in opcodes),
        matrix_products=len(products),
        matrix_kinds=tuple(sorted({code.split(".")[0] for code in products})),
        loop=_counts(loop),
        beside=_counts(beside_products(loop)),
        loop_elements=loop_elements,
    )


def hot_loop(sass: str) -> list[str]:
    """Opcodes of the innermost loop with the most tensor core instructions; empty without any.

    Of several such loops it is the first: later ones take the remainder.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []  # (first, last + 1) of loops with products, inner ones first
    for label, opcode, operands in _LINE.findall(sass):
        if label:
            labels[label] = len(opcodes)
            continue
        opcodes.append(opcode)
        target = _TARGET.search(operands) if opcode.startswith("BRA") else None
        if not target or target[1] not in labels:  # a jump backwards: its label has been seen
            continue
        first = labels[target[1]]
        is_outer = any(begin >= first for begin, _ in loops)
        if not is_outer and any(map(_MATRIX_PRODUCT.match, opcodes[first:])):
            loops.append((first, len(opcodes)))
    bodies = [opcodes[first:end] for first, end in loops]
    return max(
        bodies,
        key=lambda body: sum(bool(_MATRIX_PRODUCT.match(code)) for code in body),
        default=[],
    )


def beside_products(loop: list[str]) -> list[str]:
    """Opcodes of a loop that are issued while one of its tensor core instructions is in flight.

    For mma.sync (one warp) these lie between the first and the last product, as a warp need not
    wait for one before the next; for wgmma (a warpgroup) they lie before its wait, which may come
    in the next iteration.
    """
    places = [i for i, code in enumerate(loop) if _MATRIX_PRODUCT.match(code)]
    if not any(map(_WARPGROUP_PRODUCT.match, loop)):
        return loop[places[0] + 1 : places[-1]] if places else []
    pending = False
    for _ in range(2):  # the second pass begins with the products that the first left in flight
        found: list[str] = []
        for code in loop:
            pending = pending and not code.startswith("WARPGROUP.DEPBAR")
            if pending:
                found.append(code)
            pending = pending or bool(_WARPGROUP_PRODUCT.match(code))
    return found


def _counts(opcodes: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(code.split(".")[0] for code in opcodes).items()))


def _run(tool: str, *arguments: str) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
