"""Executes the PTX of a kernel on the CPU, many programs at once, a number per thread and register.

Threads go on together; where they part, those that are furthest behind go first, so that they
meet again at the end of a branch or a loop. What a GPU would refuse, or give no certain answer to,
is an error: see `memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx_machine.memory import WARP, GlobalMemory, Lanes, MemoryAccessError
from ptx_machine.numbers import UNSIGNED, Bits, joined
from ptx_machine.shared_memory import SharedMemory
from ptx_machine.steps import Step
from ptx_machine.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Symbol,
    Vector,
)

Mask = NDArray[np.bool_]

UNSET = 0xCBCBCBCBCBCBCBCB  # what registers hold that nobody has set
_PARTS_THREADS = {"bra", "ret", "exit", "bar"}


class Machine:
    """Some programs of a grid, side by side.

    Args:
        program: what all of them execute.
        arguments: values of the parameters.
        memory: what pointers point to.
        blocks: the programs' numbers (x, y, z).
        grid: how many there are of each.
        shared_bytes: of each program.
        traffic: counts of instructions and accesses, added to; None to count none.
    """

    def __init__(
        self,
        program: Program,
        arguments: dict[str, int],
        memory: GlobalMemory,
        blocks: Sequence[tuple[int, int, int]],
        grid: tuple[int, int, int],
        shared_bytes: int,
        traffic: Counter[str] | None,
    ) -> None:
        self.program = program
        self._memory = memory
        self.threads = program.threads
        self.size = len(blocks) * program.threads
        self.shared = SharedMemory(shared_bytes, program.threads, len(blocks), traffic)
        self.traffic = traffic
        self._arguments = arguments
        self._constants: dict[tuple[int, int], Bits] = {}
        self._everyone = np.ones(self.size, bool)
        self._lanes = (self._everyone, np.arange(self.size))  # of the mask that was last asked for
        thread = np.tile(np.arange(program.threads, dtype=np.uint32), len(blocks))
        places = np.repeat(np.array(blocks, dtype=np.uint32), program.threads, axis=0)
        self._special = {
            "%tid.x": thread,
            "%laneid": thread % np.uint32(WARP),
            "%warpid": thread // np.uint32(WARP),
            "%ntid.x": self.constant(program.threads, 32),
        }
        for i, axis in enumerate("xyz"):
            self._special[f"%ctaid.{axis}"] = np.ascontiguousarray(places[:, i])
            self._special[f"%nctaid.{axis}"] = self.constant(grid[i], 32)
        for axis in "yz":
            self._special[f"%tid.{axis}"] = self.constant(0, 32)
        # Replaced, never changed in place, so all that nobody has set may be one array.
        self.registers = [self.constant(UNSET, width) for width in program.widths]
        self._waiting: list[tuple[int, Mask]] = []  # at a barrier: where to go on, and who
        self.alive = np.ones(self.size, bool)
        # Threads that have to wait for the kernel before; until then they neither load nor store.
        self._early: Mask | None = self._everyone if program.waits else None

    def run(self, steps: Sequence[Step]) -> None:
        """Execute to the end.

        Raises:
            MemoryAccessError: an access was wrong, or a warp's threads wait at different barriers.
        """
        groups = {0: self.alive.copy()}
        with np.errstate(all="ignore"):
            while groups:
                at = min(groups)
                mask = groups.pop(at)
                mask = self._everyone if mask.all() else mask
                for after, part in self._go_on(steps, at, mask, min(groups, default=len(steps))):
                    groups[after] = groups[after] | part if after in groups else part

    def _go_on(
        self, steps: Sequence[Step], at: int, mask: Mask, others: int
    ) -> list[tuple[int, Mask]]:
        """Execute until these threads part, wait, or come to where others are."""
        warps = int(mask.reshape(-1, WARP).any(1).sum())
        instructions = self.program.instructions
        while True:
            instruction = instructions[at]
            head = instruction.head
            if self.traffic is not None:
                self.traffic[head] += warps
            if head not in _PARTS_THREADS:
                steps[at](self, mask)
                at += 1
            elif head == "bra":
                goes = self.guarded(instruction, mask)
                target = instruction.operands[0]
                assert isinstance(target, Symbol)
                to = self.program.labels[target.name]
                if goes.all() or (goes == mask).all():
                    at = to
                elif goes.any():
                    return [(to, goes), (at + 1, mask & ~goes)]
                else:
                    at += 1
            elif head in {"ret", "exit"}:
                goes = self.guarded(instruction, mask)
                if self._early is not None and self._early[goes].any():
                    raise MemoryAccessError("a thread ends without waiting for the kernel before")
                self.alive &= ~goes
                left = mask & ~goes
                return self._released() + ([(at + 1, left)] if left.any() else [])
            elif instruction.opcode == "bar.sync":
                self._waiting.append((at + 1, mask))
                return self._released()
            else:
                steps[at](self, mask)
                at += 1
            if at >= others:
                return [(at, mask)]

    def _released(self) -> list[tuple[int, Mask]]:
        """Threads of programs that wait at a barrier as a whole."""
        waiting = np.zeros(self.size, bool)
        for _, mask in self._waiting:
            waiting |= mask
        shape = (-1, self.threads)
        ready = (waiting | ~self.alive).reshape(shape).all(1) & waiting.reshape(shape).any(1)
        if not ready.any():
            return []
        self.shared.barrier(np.flatnonzero(ready))
        goes = np.repeat(ready, self.threads)
        released: dict[int, Mask] = {}
        for at, mask in self._waiting:
            released[at] = released.get(at, False) | mask & goes
        warps = np.stack([mask.reshape(-1, WARP).any(1) for mask in released.values()])
        if warps.sum(0).max() > 1:
            raise MemoryAccessError("threads of a warp wait at different barriers")
        self._waiting = [(at, mask & ~goes) for at, mask in self._waiting if (mask & ~goes).any()]
        return [(at, mask) for at, mask in released.items() if mask.any()]

    def wait_for_previous(self, mask: Mask) -> None:
        """Let threads load and store."""
        if self._early is not None:
            self._early = left if (left := self._early & ~mask).any() else None

    def global_memory(self, lanes: Lanes) -> GlobalMemory:
        """Return what pointers point to, for the threads with these numbers.

        Raises:
            MemoryAccessError: one of them has not waited for the kernel before.
        """
        if self._early is not None and self._early[lanes].any():
            raise MemoryAccessError("an access before waiting for the kernel before")
        return self._memory

    def guarded(self, instruction: Instruction, mask: Mask) -> Mask:
        """Those of the threads whose predicate holds."""
        if instruction.guard is None:
            return mask
        predicate = self.registers[instruction.guard.index]
        return mask & (~predicate if instruction.negated else predicate)

    def lanes(self, mask: Mask) -> Lanes:
        """The numbers of the threads that a mask holds."""
        known, lanes = self._lanes
        if known is not mask:
            lanes = np.flatnonzero(mask)
            self._lanes = (mask, lanes)
        return lanes

    def constant(self, bits: int, width: int) -> Bits:
        """The same number for all threads, which nobody can change in place."""
        found = self._constants.get((bits, width))
        if found is None:
            found = np.full(self.size, bits & (1 << width) - 1, UNSIGNED[width])
            found.flags.writeable = False
            self._constants[bits, width] = found
        return found

    def read(self, operand: Operand, width: int) -> Bits:
        """What an operand holds, where a constant takes the width."""
        if isinstance(operand, Register):
            return self.registers[operand.index]
        if isinstance(operand, Immediate):
            return self.constant(operand.bits, width)
        if isinstance(operand, Vector):
            part = width // len(operand.items)
            return self._pack([self.read(item, part) for item in operand.items])
        assert isinstance(operand, Symbol), operand
        if operand.name in self._special:
            return self._special[operand.name]
        return self._shared_start(operand, width)

    def _shared_start(self, symbol: Symbol, width: int) -> Bits:
        assert symbol.name.endswith("smem"), symbol.name  # the one array that Triton has
        return self.constant(0, width)

    def _pack(self, parts: list[Bits]) -> Bits:
        while len(parts) > 1:
            parts = [joined(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]

    def words(self, operand: Operand) -> list[Bits]:
        """Registers of a vector."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.read(item, 32) for item in items]

    def write(self, operand: Operand, values: NDArray[Any], mask: Mask) -> None:
        """Set a register in some threads."""
        if isinstance(operand, Symbol):
            assert operand.name == "_", operand
            return
        if isinstance(operand, Vector):
            kind = UNSIGNED[8 * values.dtype.itemsize // len(operand.items)]
            parts = np.ascontiguousarray(values).view(kind).reshape(len(values), -1)
            for i, item in enumerate(operand.items):
                self.write(item, np.ascontiguousarray(parts[:, i]), mask)
            return
        assert isinstance(operand, Register), operand
        before = self.registers[operand.index]
        if values.dtype is not before.dtype:
            values = values.astype(before.dtype)
        if mask is not self._everyone:
            values = np.where(mask, values, before)
        self.registers[operand.index] = values

    def set_lanes(self, operand: Operand, values: Bits, lanes: NDArray[np.intp]) -> None:
        """Set a register in the threads with these numbers."""
        assert isinstance(operand, Register), operand
        before = self.registers[operand.index]
        values = values.astype(before.dtype, copy=False)
        if len(lanes) == self.size:
            self.registers[operand.index] = values
            return
        register = before.copy()
        register[lanes] = values
        self.registers[operand.index] = register

    def address(self, operand: Operand) -> Bits:
        """Where memory is accessed."""
        assert isinstance(operand, Address), operand
        if isinstance(operand.base, Symbol):
            base = self._shared_start(operand.base, 32)
        else:
            base = self.registers[operand.base.index]
        if not operand.offset:
            return base
        address: Bits = base + base.dtype.type(operand.offset & (1 << 8 * base.dtype.itemsize) - 1)
        return address

    def argument(self, operand: Operand, width: int) -> Bits:
        """A parameter."""
        assert isinstance(operand, Address), operand
        assert isinstance(operand.base, Symbol)
        return self.constant(self._arguments[operand.base.name], width)
