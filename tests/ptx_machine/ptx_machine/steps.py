"""A function for each instruction, which executes it in some threads of a machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptx_machine.arithmetic import Function, function_of
from ptx_machine.memory_steps import MEMORY_STEPS
from ptx_machine.syntax import Immediate, Instruction, Program
from ptx_machine.tensor_steps import TENSOR_STEPS
from ptx_machine.warp_steps import WARP_STEPS

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

Mask = NDArray[np.bool_]
Step = Callable[["Machine", Mask], None]

_NOTHING = (
    "bar.warp.sync", "fence.", "membar", "wgmma.fence", "wgmma.commit",
    "prefetch.", "griddepcontrol.launch_dependents",
)  # fmt: skip

_STEPS = {**MEMORY_STEPS, **WARP_STEPS, **TENSOR_STEPS}  # by how an opcode begins
_HEADS = {prefix.partition(".")[0] for prefix in _STEPS}


def compiled(program: Program) -> list[Step]:
    """A function for each instruction.

    Raises:
        NotImplementedError: an instruction is unknown.
    """
    return [_step(instruction) for instruction in program.instructions]


def _step(instruction: Instruction) -> Step:
    head, operands = instruction.head, instruction.operands
    if instruction.opcode == "bar.sync" and operands == (Immediate(0),) and not instruction.guard:
        return _nothing  # `Machine.run` knows it, as it does jumps
    if instruction.opcode.startswith(_NOTHING) or head in {"bra", "ret", "exit"}:
        return _nothing
    act = _action(instruction)
    if instruction.guard is None:
        return act
    return lambda machine, mask: act(machine, machine.guarded(instruction, mask))


def _action(instruction: Instruction) -> Step:
    """What it does in the threads whose predicate holds."""
    if instruction.head in _HEADS:
        for prefix, make in _STEPS.items():
            if instruction.opcode.startswith(prefix):
                return make(instruction)
    target, *operands = instruction.operands
    if instruction.head in {"mov", "cvta"}:
        kind, source = instruction.parts[-1], operands[0]
        width = int(kind[1:]) if kind != "pred" else 1
        return lambda machine, mask: machine.write(target, machine.read(source, width), mask)
    function, widths = _computation(instruction.opcode, len(operands))
    sources = list(zip(operands, widths, strict=True))

    def compute(machine: Machine, mask: Mask) -> None:
        read = machine.read
        machine.write(target, function(*[read(one, width) for one, width in sources]), mask)

    return compute


@cache
def _computation(opcode: str, count: int) -> tuple[Function, list[int]]:
    """What an opcode computes of so many operands, and their widths."""
    parts = opcode.split(".")
    return function_of(parts), _operand_widths(parts, count)


def _nothing(machine: Machine, mask: Mask) -> None:
    """Of no effect here: threads of a warp go on together, and memory is always up to date."""


def _operand_widths(parts: list[str], count: int) -> list[int]:
    """Bits of the operands, which say how wide a constant is."""
    kind = parts[-1]
    number, _, packed = kind.lstrip("subfe").partition("x")
    width = 1 if kind == "pred" else 32 if "m" in number else int(number) * int(packed or 1)
    widths = [width] * count
    if parts[0] in {"shl", "shr"}:
        widths[1] = 32
    elif parts[0] in {"bfe", "bfi"}:
        widths[-2:] = [32, 32]
    elif parts[0] == "lop3":
        widths[3] = 32
    elif parts[0] == "selp" or (parts[0] == "setp" and count == 3):
        widths[2] = 1
    elif parts[0] == "mad" and "wide" in parts and count == 3:
        widths[2] = 2 * width
    elif len(parts) > 2 and parts[-2] == "f32" and parts[0] in {"add", "sub", "fma"}:
        widths[-1] = 32
    elif parts[0] == "cvt" and kind == "e4m3x2":
        widths = [16]
    return widths
