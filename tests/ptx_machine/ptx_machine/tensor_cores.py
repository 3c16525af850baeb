"""Matrix products and the moves of their fragments; layouts as in NVIDIA's PTX ISA, 9.7.14-15."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx_machine.numbers import Bits, from_bf16, from_e4m3
from ptx_machine.shared_memory import SharedMemory

Values = NDArray[Any]
Floats = NDArray[np.float64]
Order = NDArray[np.intp]
LANES = 32
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
    if kind == "s8":
        return words.view(np.int8).astype(np.float64)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    raise NotImplementedError(f"products of {kind}")


def rows_of_a(kind: str, registers: list[Bits]) -> Floats:
    """Fragments (threads,) of A to matrices (warps, 16, depth)."""
    elements, each = _elements(kind, registers)
    order = _order_in_a(len(registers), each)
    return elements.take(order, axis=1).reshape(-1, 16, 2 * each * len(registers))


def columns_of_b(kind: str, registers: list[Bits]) -> Floats:
    """Fragments of B to matrices (warps, depth, 8)."""
    elements, each = _elements(kind, registers)
    order = _order_in_b(len(registers), each)
    return elements.take(order, axis=1).reshape(-1, 4 * each * len(registers), 8)


def sums_of(registers: list[Bits], kind: type = np.float32) -> Floats:
    """Fragments of float32 or int32 sums to matrices (warps, 16, columns)."""
    sums: Values = _words(registers).view(kind).take(_order_in_sums(len(registers)), axis=1)
    return sums.astype(np.float64).reshape(-1, 16, 2 * len(registers))


def fragments_of_sums(matrix: NDArray[Any], kind: type = np.float32) -> list[Bits]:
    """The inverse of `sums_of`."""
    count = matrix.shape[2] // 2
    sums = np.ascontiguousarray(matrix.astype(kind)).reshape(-1, LANES * count).view(np.uint32)
    words = sums.take(_places_of_sums(count), axis=1).reshape(-1, count, LANES)
    return [words[:, i].reshape(-1) for i in range(count)]


def _words(registers: list[Bits]) -> Bits:
    """What the threads of a warp hold, side by side: (warps, registers * lanes)."""
    words = np.stack([one.reshape(-1, LANES) for one in registers], axis=1)
    return words.reshape(len(words), -1)


def _elements(kind: str, registers: list[Bits]) -> tuple[Floats, int]:
    """The same as numbers, (warps, registers * lanes * each), and how many a word has of them."""
    numbers = numbers_of(kind, _words(registers))
    return numbers.reshape(len(numbers), -1), numbers.shape[-1]


# Where in a fragment, as `_elements` gives it, each element of a matrix stands.


@cache
def _order_in_a(count: int, each: int) -> Order:
    number, lane, part = np.ogrid[:count, :LANES, :each]
    row = lane // 4 + 8 * (number % 2)
    column = lane % 4 * each + part + 4 * each * (number // 2)
    return np.argsort((row * 2 * each * count + column).ravel())


@cache
def _order_in_b(count: int, each: int) -> Order:
    number, lane, part = np.ogrid[:count, :LANES, :each]
    row = lane % 4 * each + part + 4 * each * number
    return np.argsort((row * 8 + lane // 4).ravel())


@cache
def _order_in_sums(count: int) -> Order:
    number, lane = np.ogrid[:count, :LANES]
    row = lane // 4 + number // 2 % 2 * 8
    column = lane % 4 * 2 + number % 2 + number // 4 * 8
    return np.argsort((row * 2 * count + column).ravel())


@cache
def _places_of_sums(count: int) -> Order:
    return np.argsort(_order_in_sums(count))


def multiply(kinds: tuple[str, str], a: list[Bits], b: list[Bits], c: list[Bits]) -> list[Bits]:
    """`mma.sync`: a @ b + c for every warp."""
    product = rows_of_a(kinds[0], a) @ columns_of_b(kinds[1], b)
    return fragments_of_sums(product + sums_of(c))


def multiply_integers(
    kinds: tuple[str, str], a: list[Bits], b: list[Bits], c: list[Bits], *, saturates: bool
) -> list[Bits]:
    """`mma.sync` of integers: exact sums, of which int32 keeps the low bits or the nearest."""
    product = rows_of_a(kinds[0], a) @ columns_of_b(kinds[1], b)
    sums = (product + sums_of(c, np.int32)).astype(np.int64)
    if saturates:
        sums = sums.clip(-(1 << 31), (1 << 31) - 1)
    return fragments_of_sums(sums, np.int32)


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
    data = memory.at(program, address[..., None] + np.arange(each))
    return numbers_of(kind, np.ascontiguousarray(data).view(f"u{each}")[..., 0])[..., 0]
