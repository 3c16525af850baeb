"""Instructions of the tensor cores, on the registers and the shared memory of a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptx_machine.syntax import Immediate, Instruction, Operand, Vector
from ptx_machine.tensor_cores import (
    WARPGROUP,
    Floats,
    described,
    fragments_of_sums,
    load_matrices,
    multiply,
    multiply_integers,
    rows_of_a,
    sizes_of,
    store_matrices,
    sums_of,
)

if TYPE_CHECKING:
    from ptx_machine.machine import Machine
    from ptx_machine.steps import Step

Mask = NDArray[np.bool_]


def _whole(mask: Mask, threads: int) -> Mask:
    """Which groups of so many threads take part; each does so as a whole."""
    taking = mask.reshape(-1, threads).sum(1)
    assert ((taking == 0) | (taking == threads)).all(), "a part of a warp at the tensor cores"
    whole: Mask = taking == threads
    return whole


def _mma(instruction: Instruction) -> Step:
    *_, result, kind_a, kind_b, added = instruction.parts
    kinds = kind_a, kind_b
    is_whole = (result, *kinds, added) == ("s32", "s8", "s8", "s32")
    if (result, added) != ("f32", "f32") and not is_whole:
        raise NotImplementedError(instruction.opcode)
    saturates = "satfinite" in instruction.parts

    def product(machine: Machine, mask: Mask) -> None:
        _whole(mask, 32)
        target, *sources = instruction.operands
        assert isinstance(target, Vector)
        a, b, c = (machine.words(source) for source in sources)
        with np.errstate(all="ignore"):
            if is_whole:
                sums = multiply_integers(kinds, a, b, c, saturates=saturates)
            else:
                sums = multiply(kinds, a, b, c)
        for register, values in zip(target.items, sums, strict=True):
            machine.write(register, values, mask)

    return product


def _form(instruction: Instruction) -> tuple[int, bool]:
    """How many matrices are moved, and whether they are transposed."""
    count = int(next(part for part in instruction.parts if part in {"x1", "x2", "x4"})[1])
    return count, "trans" in instruction.parts


def _pointing(mask: Mask, count: int) -> NDArray[np.intp]:
    """The threads whose addresses are those of rows of so many matrices, of whole warps."""
    _whole(mask, 32)
    return np.flatnonzero(mask & (np.arange(len(mask)) % 32 < 8 * count))


def _load_matrix(instruction: Instruction) -> Step:
    count, transposed = _form(instruction)

    def load(machine: Machine, mask: Mask) -> None:
        target, source = instruction.operands
        items = target.items if isinstance(target, Vector) else (target,)
        pointing = _pointing(mask, count)
        rows = np.zeros((machine.size, 16), np.uint8)
        rows[pointing] = machine.shared.rows(machine.address(source), pointing)
        matrices = load_matrices(rows, count, transposed=transposed)
        for item, words in zip(items, matrices, strict=True):
            machine.write(item, words, mask)

    return load


def _store_matrix(instruction: Instruction) -> Step:
    count, transposed = _form(instruction)

    def store(machine: Machine, mask: Mask) -> None:
        target, source = instruction.operands
        rows = store_matrices(machine.words(source), transposed=transposed)
        rows = np.concatenate((rows, np.zeros((len(rows), 4 - count, 8, 16), np.uint8)), axis=1)
        pointing = _pointing(mask, count)
        words = np.ascontiguousarray(rows.reshape(-1, 16)[pointing]).view(np.uint32)
        values = [np.ascontiguousarray(words[:, i]) for i in range(4)]
        machine.shared.store(machine.address(target), pointing, values)

    return store


def _described(
    machine: Machine,
    groups: Mask,
    operand: Operand,
    kind: str,
    shape: tuple[int, int],
    *,
    transposed: bool,
) -> Floats:
    """What the descriptors of some warpgroups describe: (warpgroups, *shape), else zeros."""
    matrices = np.zeros((len(groups), *shape))
    descriptors = machine.read(operand, 64)
    for group in map(int, np.flatnonzero(groups)):
        thread = group * WARPGROUP
        matrices[group] = described(
            machine.shared,
            thread // machine.threads,
            int(descriptors[thread]),
            kind,
            *shape,
            depth_last=not transposed,
        )
    return matrices


def _wgmma(instruction: Instruction) -> Step:
    if "wait_group" in instruction.opcode:
        return lambda machine, mask: None
    rows, columns, depth = sizes_of(instruction.parts)
    kind_a, kind_b = instruction.parts[-2:]
    target, a, b, accumulates, *signs = instruction.operands
    numbers = [sign.bits for sign in signs if isinstance(sign, Immediate)]
    assert numbers[:2] == [1, 1], "a product with a sign"
    # Which of the operands in shared memory are; types of 8 bits cannot be.
    transposed_a, transposed_b = map(bool, [0, 0, *numbers[2:]][-2:])

    def product(machine: Machine, mask: Mask) -> None:
        groups = _whole(mask, WARPGROUP)
        assert isinstance(target, Vector)
        before = sums_of(machine.words(target)).reshape(-1, rows, columns)
        keeps = machine.read(accumulates, 1).reshape(-1, WARPGROUP)[:, 0]
        sums = np.where(keeps[:, None, None], before, 0.0)
        if isinstance(a, Vector):
            left = rows_of_a(kind_a, machine.words(a)).reshape(-1, rows, depth)
        else:
            left = _described(machine, groups, a, kind_a, (rows, depth), transposed=transposed_a)
        right = _described(machine, groups, b, kind_b, (columns, depth), transposed=transposed_b)
        with np.errstate(all="ignore"):
            sums = sums + left @ right.swapaxes(1, 2)
        for register, values in zip(
            target.items, fragments_of_sums(sums.reshape(-1, 16, columns)), strict=True
        ):
            machine.write(register, values, mask)

    return product


TENSOR_STEPS: dict[str, Callable[[Instruction], Step]] = {
    "mma.sync": _mma,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "wgmma.mma_async": _wgmma,
    "wgmma.wait_group": _wgmma,
}
