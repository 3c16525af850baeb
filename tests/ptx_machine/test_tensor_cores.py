"""Layouts by the PTX ISA's tables (9.7.14, 9.7.15), an element at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ptx_machine.inline import WARP, Array, launch
from ptx_machine.memory import MemoryAccessError
from torch import Tensor

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
WARPGROUP = 128


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Numbers whose products are exact, in float64."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (rows, columns), generator=random).double() / 8


def encoded(values: Tensor, kind: str) -> Array:
    """A matrix as unsigned integers of its elements' size."""
    if kind == "tf32":  # bits that the tensor cores ignore
        return values.float().numpy().view(np.uint32) | np.uint32(0x1FFF)
    size = DTYPES[kind].itemsize
    whole = {1: torch.uint8, 2: torch.int16}[size]
    return values.to(DTYPES[kind]).view(whole).numpy().view(f"u{size}")


def row_of_a(group: int, i: int, each: int) -> int:
    """The row of element i of a thread's A, where a register holds so many."""
    return group + 8 * (i // each % 2)


def depth_of_a(place: int, i: int, each: int) -> int:
    return place * each + i % each + (i // (2 * each)) * 4 * each


def depth_of_b(place: int, i: int, each: int) -> int:
    return place * each + i % each + (i // each) * 4 * each


def sum_at(group: int, place: int, i: int) -> tuple[int, int]:
    return group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * place + i % 2


def lanes() -> Iterator[tuple[int, int, int]]:
    """Each lane with its group and its place in the group."""
    for lane in range(WARP):
        yield lane, lane // 4, lane % 4


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("f16", 16), ("bf16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4), ("e4m3", 32)],
)
def test_products_of_a_warp(kind: str, depth: int) -> None:
    warps = 2
    left = [matrix(16, depth, warp) for warp in range(warps)]
    right = [matrix(depth, 8, 9 + warp) for warp in range(warps)]
    sums = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(warps)]
    found = products(
        f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32",
        [encoded(a, kind) for a in left],
        [encoded(b, kind) for b in right],
        [c.numpy() for c in sums],
    )
    for a, b, c, product in zip(left, right, sums, found, strict=True):
        assert np.array_equal(product, (a @ b + c.double()).float())


@pytest.mark.parametrize("depth", [16, 32])
@pytest.mark.parametrize("saturates", [False, True])
def test_products_of_integers(depth: int, saturates: bool) -> None:
    """Sums at both ends of int32: `.satfinite` stays there, without it they wrap."""
    random = np.random.default_rng(depth)
    a = random.integers(-128, 128, (16, depth), np.int8)
    b = random.integers(-128, 128, (depth, 8), np.int8)
    a[0], b[:, 0] = -128, -128
    c = random.integers(-(1 << 31), 1 << 31, (16, 8)).astype(np.int32)
    c[0], c[1:8] = (1 << 31) - 1, random.choice([-(1 << 31), (1 << 31) - 1], (7, 8))
    mode = ".satfinite" * saturates
    found = products(
        f"m16n8k{depth}.row.col{mode}.s32.s8.s8.s32", [a.view(np.uint8)], [b.view(np.uint8)], [c]
    )
    exact = a.astype(np.int64) @ b.astype(np.int64) + c
    outside = (exact < -(1 << 31)) | (exact >= 1 << 31)
    assert outside.any()
    assert not outside.all()
    expected = exact.clip(-(1 << 31), (1 << 31) - 1) if saturates else exact
    assert np.array_equal(found[0], expected.astype(np.int32))


def products(shape: str, left: list[Array], right: list[Array], sums: list[Array]) -> list[Array]:
    """What `mma.sync` makes of each warp's matrices of encoded elements, and of its sums."""
    warps, depth = len(left), left[0].shape[1]
    each = 4 // left[0].itemsize
    half = depth // (4 * each)  # registers of B
    fragments_a = np.zeros((warps * WARP, 2 * half * each), left[0].dtype)
    fragments_b = np.zeros((warps * WARP, half * each), right[0].dtype)
    held = np.zeros((warps * WARP, 4), sums[0].dtype)
    for warp, (lane, group, place) in itertools.product(range(warps), lanes()):
        thread = warp * WARP + lane
        for i in range(2 * half * each):
            at = row_of_a(group, i, each), depth_of_a(place, i, each)
            fragments_a[thread, i] = left[warp][at]
        for i in range(half * each):
            fragments_b[thread, i] = right[warp][depth_of_b(place, i, each), group]
        for i in range(4):
            held[thread, i] = sums[warp][sum_at(group, place, i)]
    registers_a = [f"r{4 + i}" for i in range(2 * half)]
    registers_b = [f"r{8 + i}" for i in range(half)]
    loads = [f"ld.global.b32 {r}, [d0+{4 * i}];" for i, r in enumerate(registers_a)]
    loads += [f"ld.global.b32 {r}, [d1+{4 * i}];" for i, r in enumerate(registers_b)]
    launch(
        f"""mad.wide.u32 d0, at, {8 * half}, p0; mad.wide.u32 d1, at, {4 * half}, p1;
        mad.wide.u32 d2, at, 16, p2; {"".join(loads)}
        ld.global.v4.b32 {{r12, r13, r14, r15}}, [d2];
        mma.sync.aligned.{shape} {{r16, r17, r18, r19}},
            {{{", ".join(registers_a)}}}, {{{", ".join(registers_b)}}}, {{r12, r13, r14, r15}};
        st.global.v4.b32 [d2], {{r16, r17, r18, r19}};""",
        aligned(fragments_a),
        aligned(fragments_b),
        memory := aligned(held),
        threads=warps * WARP,
    )
    fragments = memory.view(sums[0].dtype).reshape(warps, WARP, 4)
    found = [np.zeros_like(one) for one in sums]
    for warp, (lane, group, place) in itertools.product(range(warps), lanes()):
        for i in range(4):
            found[warp][sum_at(group, place, i)] = fragments[warp, lane, i]
    return found


def aligned(array: Array) -> Array:
    """A copy at a multiple of 16 bytes, as words."""
    words = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
    memory = np.zeros(len(words) + 4, np.uint32)
    held = memory[-memory.ctypes.data % 16 // 4 :][: len(words)]
    held[:] = words
    return held


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("store", [False, True])
def test_moves_of_matrices(count: int, transposed: bool, store: bool) -> None:
    """Thread 8 i + r points to row r of matrix i, thread 4 r + c has its columns 2c and 2c + 1."""
    matrices = np.random.default_rng(count).permutation(count * 64).astype(np.uint16)
    matrices = matrices.reshape(count, 8, 8)
    order = np.random.default_rng(9).permutation(32)  # addresses of the rows
    memory = np.full((32, 8), 0xFFFF, np.uint16)
    memory[order[: 8 * count]] = matrices.reshape(-1, 8)
    fragments = np.zeros((WARP, 4, 2), np.uint16)
    for lane, group, place in lanes():
        for i, j in itertools.product(range(count), range(2)):
            row, column = group, 2 * place + j
            fragments[lane, i, j] = (
                matrices[i, column, row] if transposed else matrices[i, row, column]
            )
    registers = "{" + ", ".join(f"r{i}" for i in range(4, 4 + count)) + "}"
    shape = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    rows = (order * 16).astype(np.uint32)
    places = "mad.wide.u32 d0, tid, 16, p0; mad.wide.u32 d1, tid, 4, p2; ld.global.b32 r0, [d1];"
    own = "mad.wide.u32 d2, tid, 16, p1; mul.lo.s32 r1, tid, 16;"
    all_r, none = "{r4, r5, r6, r7}", "mov.b32 r4, 0; mov.b32 r5, 0; mov.b32 r6, 0; mov.b32 r7, 0;"
    if store:
        held = aligned(np.full(128, 0xFFFFFFFF, np.uint32))
        launch(
            f"""{places} {own} ld.global.v4.b32 {all_r}, [d2];
            stmatrix.{shape} [r0], {registers};
            ld.shared.v4.b32 {all_r}, [r1]; st.global.v4.b32 [d0], {all_r};""",
            held, aligned(fragments), rows, shared=512,
        )  # fmt: skip
        assert np.array_equal(held.view(np.uint16).reshape(32, 8), memory)
        return
    held = aligned(np.zeros(128, np.uint32))
    launch(
        f"""{places} {own} ld.global.v4.b32 {all_r}, [d0]; st.shared.v4.b32 [r1], {all_r}; {none}
        ldmatrix.{shape} {registers}, [r0]; st.global.v4.b32 [d2], {all_r};""",
        aligned(memory), held, rows, shared=512,
    )  # fmt: skip
    assert np.array_equal(held.view(np.uint16).reshape(32, 4, 2), fragments)


SWIZZLES = {128: 1, 64: 2, 32: 3, 16: 0}  # bytes of an atom's row -> value in a descriptor


def swizzled(address: int, width: int) -> int:
    """Swizzle<B, 4, 3>: flip bits 4 .. 4 + B - 1 by those three places above."""
    for bit in range({128: 3, 64: 2, 32: 1, 16: 0}[width]):
        address ^= (address >> 7 + bit & 1) << 4 + bit
    return address


def canonical(across: int, depth: int, size: int, width: int, *, k_major: bool) -> tuple[
    list[list[int]], int, int
]:  # fmt: skip
    """Places of bytes by the ISA's table of canonical layouts, with leading and stride offsets.

    T elements are 16 bytes; m and k count repetitions: m fastest where both do.
    """
    t, atom = 16 // size, width // 16
    places = [[0] * depth for _ in range(across)]
    if k_major:
        stride = 8 * width  # ((8, m), (T, 2k)) : ((atom T, SBO), (1, T or LBO))
        leading = stride * (across // 8) if atom == 1 else 16
        for n, k in itertools.product(range(across), range(depth)):
            places[n][k] = n % 8 * width + n // 8 * stride + k % t * size + k // t * leading
    else:
        repeated, eight = 8 * width, 8 * width * -(-across * size // width)
        for n, k in itertools.product(range(across), range(depth)):
            inner = n * size
            places[n][k] = (inner % width + inner // width * repeated
                            + k % 8 * width + k // 8 * eight)  # fmt: skip
        # ((T, atom, m), (8, k)) : ((1, T, LBO), (atom T, SBO)), the two exchanged for atom == 1.
        leading, stride = (eight, repeated) if atom == 1 else (repeated, eight)
    return [[swizzled(p, width) for p in row] for row in places], leading, stride


def in_shared_memory(values: Tensor, kind: str, width: int, *, k_major: bool) -> tuple[Array, int]:
    """Bytes of a matrix (across, depth) in wgmma's layout, and its descriptor's upper bits."""
    across, depth = values.shape
    bits = encoded(values, kind)
    size = bits.itemsize
    places, leading, stride = canonical(across, depth, size, width, k_major=k_major)
    held = np.zeros(max(map(max, places)) + size + 1023 & ~1023, np.uint8)
    for n, k in itertools.product(range(across), range(depth)):
        held[places[n][k] :][:size] = np.frombuffer(bits[n, k].tobytes(), np.uint8)
    return held, leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[width] << 62


def wgmma(
    kind: str, columns: int, width: int, *, a_in: str, k_major: tuple[bool, bool], barrier: str
) -> tuple[Array, Tensor]:
    """The sums of a warpgroup, and the expected ones, (64, columns)."""
    depth = {"e4m3": 32, "tf32": 8}.get(kind, 16)
    a, b = matrix(64, depth, 1), matrix(columns, depth, 2)
    bytes_a, upper_a = in_shared_memory(a, kind, width, k_major=k_major[0])
    bytes_b, upper_b = in_shared_memory(b, kind, width, k_major=k_major[1])
    image = aligned(np.concatenate([bytes_a, bytes_b]))
    upper_b |= len(bytes_a) >> 4
    count = columns // 2
    each = 32 // 8 // encoded(a, kind).itemsize
    fragments, bits = np.zeros((WARPGROUP, 4 * each), encoded(a, kind).dtype), encoded(a, kind)
    for warp, (lane, group, place) in itertools.product(range(4), lanes()):
        for i in range(4 * each):
            row = 16 * warp + row_of_a(group, i, each)
            fragments[warp * WARP + lane, i] = bits[row, depth_of_a(place, i, each)]
    names = [f"s{i}" for i in range(count)]
    zeros = "".join(f"mov.b32 {name}, 0x3f800000;" for name in names)
    stores = "".join(f"st.global.b32 [d2+{4 * i}], {name};" for i, name in enumerate(names))
    left = "{r0, r1, r2, r3}" if a_in == "registers" else "d3"
    transposes = ""
    if kind in ("f16", "bf16"):
        majors = k_major[1:] if a_in == "registers" else k_major
        transposes = "".join(f", {int(not one)}" for one in majors)
    found = np.zeros((WARPGROUP, count), np.uint32)
    launch(
        f""".reg .b32 s<{count}>;
        mov.b32 r4, 0; mul.lo.s32 r5, tid, 4; mad.wide.u32 d0, tid, 4, p0;
        loop: setp.ge.u32 c0, r4, {image.nbytes}; @c0 bra done;
        ld.global.b32 r6, [d0]; st.shared.b32 [r5], r6;
        add.s32 r4, r4, 512; add.s32 r5, r5, 512; add.s64 d0, d0, 512; bra loop;
        done: {barrier}
        mad.wide.u32 d1, tid, 16, p1; ld.global.v4.b32 {{r0, r1, r2, r3}}, [d1];
        mov.b64 d3, {upper_a}; mov.b64 d4, {upper_b}; setp.eq.s32 c1, r4, r4; {zeros}
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}
            {{{", ".join(names)}}}, {left}, d4, c1, 1, 1{transposes};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mad.wide.u32 d2, tid, {4 * count}, p2; {stores}""",
        image,
        aligned(fragments),
        found,
        threads=WARPGROUP,
        shared=image.nbytes,
    )
    sums = np.zeros((64, columns), np.float32)
    for warp, (lane, group, place) in itertools.product(range(4), lanes()):
        for i in range(count):
            row, column = sum_at(group, place, i)
            sums[16 * warp + row, column] = found.view(np.float32)[warp * WARP + lane, i]
    return sums, (a @ b.T + 1).float()


@pytest.mark.parametrize("width", SWIZZLES)
@pytest.mark.parametrize("a_in", ["registers", "shared"])
@pytest.mark.parametrize(
    ("kind", "columns", "k_major"),
    [
        ("f16", 16, (True, True)),
        ("bf16", 128, (True, True)),
        ("bf16", 64, (True, False)),
        ("f16", 128, (False, False)),
        ("bf16", 32, (False, True)),
        ("e4m3", 64, (True, True)),
        ("tf32", 32, (True, True)),
    ],
)
def test_products_of_a_warpgroup(
    kind: str, columns: int, k_major: tuple[bool, bool], width: int, a_in: str
) -> None:
    found, expected = wgmma(kind, columns, width, a_in=a_in, k_major=k_major, barrier="bar.sync 0;")
    assert np.array_equal(found, expected.numpy())


def test_a_warpgroup_reads_behind_a_barrier() -> None:
    with pytest.raises(MemoryAccessError, match="before a barrier"):
        wgmma("f16", 16, 128, a_in="shared", k_major=(True, True), barrier="")
