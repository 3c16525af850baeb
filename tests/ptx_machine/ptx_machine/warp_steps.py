"""Instructions by which the threads of a warp exchange registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptx_machine.memory import WARP
from ptx_machine.numbers import Bits
from ptx_machine.syntax import Immediate, Instruction, Pair

if TYPE_CHECKING:
    from ptx_machine.machine import Machine
    from ptx_machine.steps import Step

Mask = NDArray[np.bool_]


def _shuffle(instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    target, source, by, limits = instruction.operands[:4]

    def shuffle(machine: Machine, mask: Mask) -> None:
        if isinstance(by, Immediate) and isinstance(limits, Immediate):
            chosen, inside = _chosen_alike(machine.size, mode, by.bits, limits.bits)
        else:
            chosen, inside = _chosen(mode, machine.read(by, 32), machine.read(limits, 32))
        assert mask.all() or mask[chosen[mask]].all(), "a shuffle reads a thread that has no part"
        values = machine.read(source, 32)[chosen]
        if isinstance(target, Pair):
            machine.write(target.value, values, mask)
            machine.write(target.predicate, inside, mask)
        else:
            machine.write(target, values, mask)

    return shuffle


def _chosen(mode: str, by: Bits, limits: Bits) -> tuple[NDArray[np.int64], Mask]:
    """The thread that each one reads, and whether that is in its segment: its own if not."""
    amount, bounds = by.astype(np.int64) & 31, limits.astype(np.int64)
    threads = np.arange(len(by))
    lane = threads % WARP
    segment = bounds >> 8 & 31
    last = (lane & segment) | (bounds & 31 & ~segment)
    place = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount}.get(
        mode, (lane & segment) | (amount & ~segment)
    )
    inside: Mask = place >= last if mode == "up" else place <= last
    return threads - lane + np.where(inside, place, lane), inside


@lru_cache(maxsize=256)
def _chosen_alike(size: int, mode: str, by: int, limits: int) -> tuple[NDArray[np.int64], Mask]:
    return _chosen(mode, *(np.full(size, one & 0xFFFFFFFF, np.uint32) for one in (by, limits)))


def _reduce(instruction: Instruction) -> Step:
    operation, kind = instruction.parts[-2:]
    if kind not in {"s32", "u32", "b32"}:
        raise NotImplementedError(instruction.opcode)
    act = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]

    def reduce(machine: Machine, mask: Mask) -> None:
        taking = mask.reshape(-1, WARP).sum(1)
        assert ((taking == 0) | (taking == WARP)).all(), "a part of a warp reduces"
        values = machine.read(instruction.operands[1], 32)
        values = values.view(np.int32) if kind == "s32" else values
        result = act.reduce(values.reshape(-1, WARP), axis=1, dtype=values.dtype)
        machine.write(instruction.operands[0], np.repeat(result, WARP).view(np.uint32), mask)

    return reduce


def _vote(instruction: Instruction) -> Step:
    mode = instruction.parts[2]
    if mode not in {"ballot", "any", "all"}:
        raise NotImplementedError(instruction.opcode)

    def vote(machine: Machine, mask: Mask) -> None:
        votes = (machine.read(instruction.operands[1], 1) & mask).reshape(-1, WARP)
        taking = mask.reshape(-1, WARP)
        result: NDArray[Any]
        if mode == "ballot":
            bits = votes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)
            result = bits.sum(1, dtype=np.uint32)
        else:
            result = np.asarray(votes.any(1) if mode == "any" else (votes | ~taking).all(1))
        machine.write(instruction.operands[0], np.repeat(result, WARP), mask)

    return vote


WARP_STEPS: dict[str, Callable[[Instruction], Step]] = {
    "shfl.sync": _shuffle,
    "redux.sync": _reduce,
    "vote.sync": _vote,
}
