"""Instructions that load, store, copy and add."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptx_machine.numbers import UNSIGNED
from ptx_machine.syntax import WAIT_FOR_PREVIOUS, Immediate, Instruction, Register, Vector

if TYPE_CHECKING:
    from ptx_machine.machine import Machine
    from ptx_machine.steps import Step

Mask = NDArray[np.bool_]


def _load(instruction: Instruction) -> Step:
    space = instruction.parts[1]
    kind, (target, source) = instruction.parts[-1], instruction.operands
    width = int(kind[1:])
    if space == "param":
        return lambda machine, mask: machine.write(target, machine.argument(source, width), mask)
    items = target.items if isinstance(target, Vector) else (target,)

    def load(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes(mask)
        memory = machine.shared if "shared" in space else machine.global_memory(lanes)
        address = machine.address(source)
        results = memory.load(address, lanes, width // 8, len(items))
        for item, result in zip(items, results, strict=True):
            signed = result.view(f"i{width // 8}") if kind[0] == "s" else result
            machine.set_lanes(item, signed, lanes)

    return load


def _store(instruction: Instruction) -> Step:
    space = instruction.parts[1]
    kind, (target, source) = instruction.parts[-1], instruction.operands
    items = source.items if isinstance(source, Vector) else (source,)
    width = int(kind[1:])

    def store(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes(mask)
        memory = machine.shared if "shared" in space else machine.global_memory(lanes)
        values = [
            machine.read(item, width)[lanes].astype(UNSIGNED[width], copy=False) for item in items
        ]
        memory.store(machine.address(target), lanes, values)

    return store


def _atomic(instruction: Instruction) -> Step:
    operation, kind = instruction.parts[-2:]
    if operation != "add" or kind[0] == "f":
        raise NotImplementedError(instruction.opcode)
    width = int(kind[1:])
    is_shared = "shared" in instruction.parts[1]

    def add(machine: Machine, mask: Mask) -> None:
        target, place, operand = instruction.operands[:3]
        lanes = machine.lanes(mask)
        values = machine.read(operand, width)[lanes]
        memory = machine.shared if is_shared else machine.global_memory(lanes)
        old = memory.add(machine.address(place), lanes, values)
        if isinstance(target, Register):
            machine.set_lanes(target, old, lanes)

    return add


def _copy(instruction: Instruction) -> Step:
    if "commit_group" in instruction.opcode:
        return lambda machine, mask: machine.shared.close_group(machine.lanes(mask))
    if "wait_group" in instruction.opcode or "wait_all" in instruction.opcode:
        pending = instruction.operands[0] if instruction.operands else Immediate(-1)
        assert isinstance(pending, Immediate)
        return lambda machine, mask: machine.shared.wait_for_groups(
            machine.lanes(mask), pending.bits
        )
    target, source, size = instruction.operands[:3]
    assert isinstance(size, Immediate)

    def copy(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes(mask)
        data = np.zeros((len(lanes), size.bits), np.uint8)
        count = machine.constant(size.bits, 32)
        if len(instruction.operands) > 3:
            count = machine.read(instruction.operands[3], 32)
        assert np.isin(count[lanes], (0, size.bits)).all(), "a part of a copy"
        full = count[lanes] != 0
        address = machine.address(source)
        memory = machine.global_memory(lanes[full])
        words = memory.load(address, lanes[full], 4, size.bits // 4)
        data[full] = np.stack(words, axis=1).view(np.uint8)
        machine.shared.copy(machine.address(target), lanes, data)

    return copy


def _wait_for_previous(instruction: Instruction) -> Step:
    return lambda machine, mask: machine.wait_for_previous(mask)


MEMORY_STEPS: dict[str, Callable[[Instruction], Step]] = {
    "ld.": _load,
    "st.": _store,
    "atom.": _atomic,
    "cp.async.": _copy,
    WAIT_FOR_PREVIOUS: _wait_for_previous,
}
