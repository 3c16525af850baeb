"""Matrix products and the moves of their fragments; layouts as in NVIDIA's PTX ISA, 9.7.14-15."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx_machine.memory import SharedMemory
from ptx_machine.numbers import Bits, from_bf16, from_e4m3

Values = NDArray[Any]
Floats = NDArray[np.float64]
LANE = np.arange(32)
WARPGROUP = 128  # threads
_SIZES = re.compile(r"m(\d+)n(\d+)k(\d+)$")


def sizes_of(parts: list[str]) -> tuple[int, int, int]:
    """Rows, columns and depth in an opcode."""
    match = next(filter(None, map(_SIZES.match, parts)))
    rows, columns, depth = map(int, match.groups())
    return rows, columns, depth


def numbers_of(kind: str, words: Bits) -> Floats:
    """Elements of 32-bit words: (..., elements in a word)."""
    words = np.ascontiguousarray(words)[..., None]
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return from_bf16(words.view(np.uint16)).astype(np.float64)
    if kind == "e4m3":
        return from_e4m3(words.view(np.uint8)).astype(np.float64)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    raise NotImplementedError(f"products of {kind}")


def rows_of_a(kind: str, registers: list[Bits]) -> Floats:
    """Fragments (threads,) of A to matrices (warps, 16, depth)."""
    elements = [numbers_of(kind, one.reshape(-1, 32)) for one in registers]
    each = elements[0].shape[-1]  # elements of a word
    halves = len(registers) // 2
    matrix = np.zeros((len(elements[0]), 16, 4 * each * halves))
    for i, values in enumerate(elements):
        row = LANE[:, None] // 4 + 8 * (i % 2)
        column = LANE[:, None] % 4 * each + np.arange(each) + 4 * each * (i // 2)
        matrix[:, row, column] = values
    return matrix


def columns_of_b(kind: str, registers: list[Bits]) -> Floats:
    """Fragments of B to matrices (warps, depth, 8)."""
    elements = [numbers_of(kind, one.reshape(-1, 32)) for one in registers]
    each = elements[0].shape[-1]
    matrix = np.zeros((len(elements[0]), 4 * each * len(registers), 8))
    for i, values in enumerate(elements):
        row = LANE[:, None] % 4 * each + np.arange(each) + 4 * each * i
        matrix[:, row, LANE[:, None] // 4] = values
    return matrix


def sums_of(registers: list[Bits]) -> Floats:
    """Fragments of float32 sums to matrices (warps, 16, columns)."""
    matrix = np.zeros((len(registers[0]) // 32, 16, 2 * len(registers)))
    for i, one in enumerate(registers):
        matrix[:, *_sum_at(i)] = one.view(np.float32).reshape(-1, 32)
    return matrix


def fragments_of_sums(matrix: Floats) -> list[Bits]:
    """The inverse of `sums_of`."""
    return [
        np.ascontiguousarray(matrix[:, *_sum_at(i)], np.float32).reshape(-1).view(np.uint32)
        for i in range(matrix.shape[2] // 2)
    ]


def _sum_at(i: int) -> tuple[Values, Values]:
    """Row and column of each thread's number i."""
    return LANE // 4 + i // 2 % 2 * 8, LANE % 4 * 2 + i % 2 + i // 4 * 8


def multiply(kinds: tuple[str, str], a: list[Bits], b: list[Bits], c: list[Bits]) -> list[Bits]:
    """`mma.sync`: a @ b + c for every warp."""
    product = rows_of_a(kinds[0], a) @ columns_of_b(kinds[1], b)
    return fragments_of_sums(product + sums_of(c))


def load_matrices(rows: NDArray[np.uint8], count: int, *, transposed: bool) -> list[Bits]:
    """`ldmatrix`: rows (threads, 16) of 8 x 8 matrices of halves to fragments.

    Args:
        rows: what each thread's address points to; those of matrix i are threads 8 i to 8 i + 7.
        count: matrices.
        transposed: as it says.
    """
    matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)  # (warps, matrix, row, column)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 4, 32)
    return [np.ascontiguousarray(words[:, i]).reshape(-1) for i in range(count)]


def store_matrices(registers: list[Bits], *, transposed: bool) -> NDArray[np.uint8]:
    """`stmatrix`: the inverse of `load_matrices`; (warps, matrices, 8 rows, 16) bytes."""
    words = np.stack([one.reshape(-1, 32) for one in registers], axis=1)
    matrices = np.ascontiguousarray(words).view(np.uint16).reshape(len(words), -1, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    return np.ascontiguousarray(matrices).view(np.uint8)


def described(
    memory: SharedMemory,
    program: int,
    warp: int,
    descriptor: int,
    kind: str,
    across: int,
    depth: int,
    *,
    depth_last: bool,
) -> Floats:
    """A matrix in shared memory that a descriptor of `wgmma` describes: (across, depth).

    Args:
        memory: of several programs.
        program: one of them.
        warp: the first of its warpgroup.
        descriptor: what the instruction is given.
        kind: of the elements.
        across: rows of A, or columns of B.
        depth: along the products' sums.
        depth_last: whether the depth's elements lie side by side ("K-major").
    """
    each = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1}[kind]
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    width = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62]  # bytes of a row of an atom
    assert not descriptor >> 49 & 7, "a base offset"
    n, k = np.arange(across)[:, None], np.arange(depth)[None, :]
    if depth_last:
        inner, outer = k * each, n
        further = inner // width * leading if width == 16 else inner
        address = start + outer // 8 * stride + outer % 8 * width
        address = address + (further + inner % width if width == 16 else inner)
    else:
        inner, outer = n * each, k
        if width == 16:
            leading, stride = stride, leading
        address = start + inner // width * leading + outer // 8 * stride
        address = address + outer % 8 * width + inner % width
    if width > 16:
        turns = width // 16 - 1
        address = address ^ ((address >> 7 & turns) << 4)
    data = memory.at(program, address[..., None] + np.arange(each), range(warp, warp + 4))
    return numbers_of(kind, np.ascontiguousarray(data).view(f"u{each}")[..., 0])[..., 0]
