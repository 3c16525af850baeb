from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx_machine.inline import evaluate, launch
from ptx_machine.memory import MemoryAccessError

LANES = np.arange(32, dtype=np.uint32)


def uints(*shape: int) -> NDArray[np.uint32]:
    return np.zeros(shape, np.uint32)


INDEX = "mad.wide.u32 d0, at, 4, p0;"


@pytest.mark.parametrize(
    "access",
    ["ld.global.b32 r0, [d0];", "st.global.b32 [d0], tid;", "atom.global.add.u32 r0, [d0], 1;"],
)
@pytest.mark.parametrize(("fits", "offset"), [(True, 0), (False, 4), (False, -4), (False, -256)])
def test_global_memory_has_bounds(access: str, fits: bool, offset: int) -> None:
    body = f"{INDEX} add.s64 d0, d0, {offset}; {access}"
    if fits:
        launch(body, uints(32))
        return
    with pytest.raises(MemoryAccessError, match="outside"):
        launch(body, uints(32))


def test_an_address_below_zero_is_outside() -> None:
    with pytest.raises(MemoryAccessError, match="outside"):
        launch("mov.b64 d0, -16; ld.global.v4.b32 {r0, r1, r2, r3}, [d0];", uints(32))


def test_a_thread_that_a_predicate_leaves_out_touches_nothing() -> None:
    numbers = uints(32)
    body = f"{INDEX} setp.lt.u32 c0, tid, 30; @!c0 mov.b64 d0, 0; @c0 st.global.b32 [d0], tid;"
    launch(body, numbers)
    assert numbers.tolist() == [*range(30), 0, 0]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("offset", "fits"), [(0, True), (4, False), (8, False), (16, True)])
def test_vectors_are_aligned_to_their_size(space: str, offset: int, fits: bool) -> None:
    base = "mov.b64 d0, p0;" if space == "global" else "mov.b64 d0, 0;"
    store = f"{base} add.s64 d0, d0, {offset}; st.{space}.v4.b32 [d0], {{0, 0, 0, 0}};"
    load = f"{base} add.s64 d0, d0, {offset}; ld.{space}.v4.b32 {{r0, r1, r2, r3}}, [d0];"
    memory = np.zeros(32, np.complex128).view(np.uint32)  # at a multiple of 16
    for body in (store, load):
        if fits:
            launch(body, memory, shared=64)
            continue
        with pytest.raises(MemoryAccessError):
            launch(body, memory, shared=64)


@pytest.mark.parametrize("access", ["ld.shared.b32 r0, [r1];", "st.shared.b32 [r1], tid;"])
@pytest.mark.parametrize(("shared", "fits"), [(128, True), (124, False), (0, False)])
def test_shared_memory_has_bounds(access: str, shared: int, fits: bool) -> None:
    if fits:
        launch(f"shl.b32 r1, tid, 2; {access}", shared=shared)
        return
    with pytest.raises(MemoryAccessError, match="which has"):
        launch(f"shl.b32 r1, tid, 2; {access}", shared=shared)


# Each warp accesses its neighbour's words: r1 is its own place, r2 the neighbour's.
NEIGHBOURS = "shl.b32 r1, tid, 2; xor.b32 r2, r1, 128;"
READ, WRITE = "ld.shared.b32 r0, [{0}];", "st.shared.b32 [{0}], tid;"
ADD = "atom.shared.add.u32 r0, [{0}], 1;"


@pytest.mark.parametrize(
    ("first", "second"),
    [(WRITE, READ), (READ, WRITE), (WRITE, WRITE), (ADD, READ), (READ, ADD), (WRITE, ADD)],
)
def test_warps_meet_at_a_barrier_between_accesses(first: str, second: str) -> None:
    one, other = first.format("r1"), second.format("r2")
    with pytest.raises(MemoryAccessError, match="a warp"):
        launch(f"{NEIGHBOURS} {one} {other}", threads=64, shared=256)
    launch(f"{NEIGHBOURS} {one} bar.sync 0; {other}", threads=64, shared=256)


@pytest.mark.parametrize("access", [READ, ADD])
def test_warps_may_read_and_add_at_the_same_place(access: str) -> None:
    launch("mov.b32 r1, 0;" + access.format("r1") * 2, threads=64, shared=256)


def test_threads_store_the_same_at_the_same_place() -> None:
    launch("st.shared.b32 [global_smem], 7;", shared=4)
    with pytest.raises(MemoryAccessError, match="different"):
        launch("st.shared.b32 [global_smem], tid;", shared=4)


def test_what_was_never_written_is_poison() -> None:
    found = uints(32)
    launch(f"{INDEX} shl.b32 r1, tid, 2; ld.shared.b32 r0, [r1]; st.global.b32 [d0], r0;",
           found, shared=128)  # fmt: skip
    assert (found == 0xFFFFFFFF).all()


COPY = """
mad.wide.u32 d0, tid, 16, p0; mad.wide.u32 d1, tid, 16, p1; shl.b32 r1, tid, 4;
st.shared.v4.b32 [r1], {0, 0, 0, 0}; bar.sync 0;
cp.async.cg.shared.global [r1], [d0], 16; cp.async.commit_group;
add.s32 r2, r1, 512;
cp.async.cg.shared.global [r2], [d0], 16, r3; cp.async.commit_group;
{wait}
ld.shared.v4.b32 {r4, r5, r6, r7}, [r1]; st.global.v4.b32 [d1], {r4, r5, r6, r7};
ld.shared.v4.b32 {r4, r5, r6, r7}, [r2]; st.global.v4.b32 [d1+512], {r4, r5, r6, r7};
"""


@pytest.mark.parametrize(
    ("wait", "landed"),
    [
        ("", 0),
        ("cp.async.wait_group 2;", 0),
        ("cp.async.wait_group 1;", 1),
        ("cp.async.wait_group 0;", 2),
        ("cp.async.wait_all;", 2),
    ],
)
@pytest.mark.parametrize("source_bytes", [0, 16])
def test_copies_land_when_they_are_waited_for(wait: str, landed: int, source_bytes: int) -> None:
    source, found = np.arange(1, 129, dtype=np.uint32), uints(2, 128)
    body = f"mov.b32 r3, {source_bytes};" + COPY.replace("{wait}", wait)
    launch(body, source, found, shared=1024)
    second = source if source_bytes else np.zeros_like(source)
    for number, expected in enumerate((source, second)):
        is_there = number < landed
        assert np.array_equal(found[number], expected if is_there else found[number] | 0xFFFFFFFF)


def test_what_another_warp_copied_is_read_after_a_barrier() -> None:
    body = f"""{NEIGHBOURS} mad.wide.u32 d0, tid, 4, p0;
    cp.async.ca.shared.global [r1], [d0], 4; cp.async.commit_group; cp.async.wait_group 0;"""
    with pytest.raises(MemoryAccessError, match="read before a barrier"):
        launch(f"{body} ld.shared.b32 r0, [r2];", uints(64), threads=64, shared=256)
    launch(f"{body} bar.sync 0; ld.shared.b32 r0, [r2];", uints(64), threads=64, shared=256)
    # Waiting after the barrier is too late for the other warps.
    late = body.replace("cp.async.wait_group", "bar.sync 0; cp.async.wait_group")
    with pytest.raises(MemoryAccessError, match="read before a barrier"):
        launch(f"{late} ld.shared.b32 r0, [r2];", uints(64), threads=64, shared=256)


@pytest.mark.parametrize(("first", "meets"), [(32, True), (64, True), (20, False)])
def test_a_warp_meets_at_one_barrier(first: int, meets: bool) -> None:
    body = f"setp.lt.u32 c0, tid, {first}; @c0 bra there; bar.sync 0; ret; there: bar.sync 0; ret;"
    if meets:
        launch(body, threads=64)
        return
    with pytest.raises(MemoryAccessError, match="different barriers"):
        launch(body, threads=64)
    # A barrier does not wait for warps that have ended.
    launch(body.replace("bar.sync 0; ret; there", "ret; there"), threads=64)


@pytest.mark.parametrize(
    "text",
    [
        "bar.sync 1, 64;",
        "@c0 bar.sync 0;",
        "red.global.add.u32 [p0], 1;",
        "atom.global.max.u32 r0, [p0], 1;",
        "vote.sync.uni.pred c0, c1, -1;",
        "redux.sync.add.f32 r0, r1, -1;",
        "cvt.rz.f16.f32 h0, r0;",
        "cvt.sat.s8.s32 h0, r0;",
        "setp.lt.ftz.f32 c0, r0, r1;",
        "add.sat.s32 r0, r1, r2;",
        "add.rz.f32 r0, r1, r2;",
        "fma.rn.relu.f16 h0, h1, h2, h3;",
        "shf.l.clamp.b32 r0, r1, r2, r3;",
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {r0}, {r1}, {r2}, {r3};",
    ],
)
def test_what_is_not_modelled_is_refused(text: str) -> None:
    with pytest.raises(NotImplementedError):
        launch(text, uints(1))


def test_branches_within_a_warp_meet_again() -> None:
    found = uints(32)
    launch(
        f"""{INDEX} and.b32 r0, tid, 1; setp.eq.s32 c0, r0, 0;
        @c0 bra even;
        mul.lo.s32 r1, tid, 100; bra meet;
        even: neg.s32 r1, tid;
        meet: shfl.sync.bfly.b32 r2, r1, 1, 31, -1;
        st.global.b32 [d0], r2;""",
        found,
    )
    expected = [-(i ^ 1) if i & 1 else 100 * (i ^ 1) for i in range(32)]
    assert found.view(np.int32).tolist() == expected


def test_loops_of_different_lengths() -> None:
    found = uints(3, 64)
    launch(
        f"""{INDEX} mov.b32 r0, 0; mov.b32 r1, 0; add.s32 r2, tid, pid;
        loop: setp.ge.u32 c0, r1, r2; @c0 bra done;
        add.s32 r1, r1, 1; add.s32 r0, r0, r1; bra loop;
        done: bar.sync 0; st.global.b32 [d0], r0;""",
        found,
        threads=64,
        programs=3,
    )
    counts = np.arange(64) + np.arange(3)[:, None]
    assert np.array_equal(found, counts * (counts + 1) // 2)


def test_some_threads_end_early() -> None:
    found = uints(64)
    launch(f"{INDEX} setp.gt.u32 c0, tid, 40; @c0 ret; st.global.b32 [d0], 1;", found, threads=64)
    assert found.tolist() == [1] * 41 + [0] * 23


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [32, 8])
def test_shuffles(mode: str, segment: int) -> None:
    for by in (0, 1, 5, 16, 31):
        clamp = 0 if mode == "up" else 31
        limits = (32 - segment) << 8 | clamp
        values, inside = evaluate(
            f"shfl.sync.{mode}.b32 $0|$1, $2, {by}, {limits}, -1;", [32, 1], LANES * 3
        )
        for lane in range(32):
            first = lane // segment * segment
            place = {
                "up": lane - by,
                "down": lane + by,
                "bfly": lane ^ by,
                "idx": first | by & (segment - 1),
            }[mode]
            # `up` reads below the segment only; the others compare with its last lane.
            is_inside = place >= first if mode == "up" else place < first + segment
            assert inside[lane] == is_inside
            assert values[lane] == 3 * (place if is_inside else lane)


def test_a_shuffle_wraps_the_amount() -> None:
    assert evaluate("shfl.sync.idx.b32 $0, $1, 35, 31, -1;", [32], LANES)[0].tolist() == [3] * 32


def test_a_shuffle_from_a_thread_that_takes_no_part() -> None:
    body = "setp.lt.u32 c0, tid, 8; @c0 shfl.sync.bfly.b32 r0, tid, 16, 31, -1;"
    with pytest.raises(AssertionError, match="no part"):
        launch(body)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.s32", lambda x: int(x.sum()) & 0xFFFFFFFF),
        ("add.u32", lambda x: int(x.sum()) & 0xFFFFFFFF),
        ("min.s32", lambda x: int(x.view(np.int32).min()) & 0xFFFFFFFF),
        ("max.s32", lambda x: int(x.view(np.int32).max()) & 0xFFFFFFFF),
        ("min.u32", lambda x: int(x.min())),
        ("max.u32", lambda x: int(x.max())),
        ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
    ],
)
def test_reductions_of_a_warp(operation: str, expected: Any) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 64, dtype=np.uint32)
    (found,) = evaluate(f"redux.sync.{operation} $0, $1, -1;", [32], words)
    for warp, result in zip(words.reshape(2, 32), found.reshape(2, 32), strict=True):
        assert (result == expected(warp)).all()


def test_votes() -> None:
    chosen = np.concatenate([np.zeros(32, bool), LANES % 3 == 0, np.ones(32, bool)])
    (ballot,) = evaluate("vote.sync.ballot.b32 $0, $1, -1;", [32], chosen)
    assert ballot[::32].tolist() == [0, sum(1 << i for i in range(0, 32, 3)), 0xFFFFFFFF]
    (some,) = evaluate("vote.sync.any.pred $0, $1, -1;", [1], chosen)
    assert some[::32].tolist() == [False, True, True]
    (all_of_them,) = evaluate("vote.sync.all.pred $0, $1, -1;", [1], chosen)
    assert all_of_them[::32].tolist() == [False, False, True]


@pytest.mark.parametrize("space", ["global", "shared"])
def test_threads_add_one_after_another(space: str) -> None:
    places = np.random.default_rng(0).integers(0, 4, 64, dtype=np.uint32)
    found, sums = uints(64), uints(4)
    global_place = "mad.wide.u32 d1, r0, 4, p2; mov.b32 r3, 0;"
    shared_place = "shl.b32 r2, r0, 2; cvt.u64.u32 d1, r2; mov.b32 r3, -1;"
    launch(
        f"""{INDEX} mad.wide.u32 d3, at, 4, p1; ld.global.b32 r0, [d0];
        {global_place if space == "global" else shared_place}
        atom.{space}.add.u32 r1, [d1], tid; sub.s32 r1, r1, r3; st.global.b32 [d3], r1;""",
        places,
        found,
        sums,
        threads=64,
        shared=16,
    )
    expected = [0, 0, 0, 0]
    for thread, place in enumerate(places.tolist()):
        assert found[thread] == expected[place]
        expected[place] += thread
    assert space == "shared" or sums.tolist() == expected


def test_atomics_of_no_thread() -> None:
    launch("setp.lt.u32 c0, tid, 0; @c0 atom.shared.add.u32 r0, [r1], 1;", shared=4)
    sums = uints(1)
    launch("setp.eq.u32 c0, tid, 3; @c0 atom.global.add.u32 _, [p0], 5;", sums, programs=3)
    assert sums[0] == 15


def test_programs_do_not_share_their_memory() -> None:
    found = uints(4, 32)
    launch(
        f"""{INDEX} shl.b32 r1, tid, 2; st.shared.b32 [r1], at; bar.sync 0;
        xor.b32 r1, r1, 4; ld.shared.b32 r2, [r1]; st.global.b32 [d0], r2;""",
        found,
        programs=4,
        shared=128,
    )
    assert np.array_equal(found.ravel(), np.arange(128) ^ 1)


def aligned(words: int) -> NDArray[np.uint32]:
    """A copy at a multiple of 128 bytes."""
    memory = uints(words + 32)
    return memory[-memory.ctypes.data % 128 // 4 :][:words]


@pytest.mark.parametrize(
    ("stride", "width", "sectors", "turns"),
    [
        (0, 1, 1, 1),
        (1, 1, 4, 1),
        (2, 1, 8, 2),
        (32, 1, 32, 32),
        (33, 1, 32, 1),
        (2, 2, 8, 2),
        (4, 2, 16, 4),
        (4, 4, 16, 4),
        (8, 4, 32, 8),
    ],
)
def test_counts_of_accesses(stride: int, width: int, sectors: int, turns: int) -> None:
    target = ["r4", "{r4, r5}", None, "{r4, r5, r6, r7}"][width - 1]
    kind = f"v{width}.b32" if width > 1 else "b32"
    traffic = launch(
        f"""mul.lo.s32 r0, tid, {4 * stride}; cvt.u64.u32 d1, r0; add.s64 d1, d1, p0;
        ld.global.{kind} {target}, [d1]; ld.shared.{kind} {target}, [r0];""",
        aligned(1100),
        shared=4400,
    )
    assert traffic["global load bytes"] == 32 * 4 * width
    assert traffic["global load sectors"] == sectors
    assert traffic["shared turns"] == turns
    assert traffic["shared turns at best"] == width
    assert traffic["mul"] == 1


WAIT = "griddepcontrol.wait;"
LOAD = f"{INDEX} ld.global.b32 r0, [d0];"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{WAIT} {LOAD}", None),
        (f"{INDEX} prefetch.global.L2 [d0]; {WAIT} griddepcontrol.launch_dependents;", None),
        (f"{LOAD} {WAIT}", "before waiting"),
        (f"{INDEX} st.global.b32 [d0], tid; {WAIT}", "before waiting"),
        (
            f"{INDEX} mov.b32 r1, 0; cp.async.ca.shared.global [r1], [d0], 4; {WAIT}",
            "before waiting",
        ),
        (f"setp.lt.u32 c0, tid, 8; @c0 ret; {WAIT}", "ends without waiting"),
        (f"setp.lt.u32 c0, tid, 8; @c0 {WAIT} {LOAD}", "before waiting"),
    ],
)
def test_what_waits_for_the_kernel_before_touches_nothing_until_then(
    body: str, message: str | None
) -> None:
    if message is None:
        launch(body, uints(32), shared=4)
        return
    with pytest.raises(MemoryAccessError, match=message):
        launch(body, uints(32), shared=4)
