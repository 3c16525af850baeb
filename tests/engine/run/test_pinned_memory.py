"""Pinned memory is made by a thread before steps take it, and never by a step."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.run import pinned_memory
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.pinned_memory import PIECE_BYTES, PinnedMemory, PinnedRows, piece_sizes

MIB = 1 << 20


class Pinning(HostDevice):
    """Notes what is pinned, and by which thread; pins when it is let."""

    def __init__(self, *, begins: bool = True) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.may_pin = threading.Event()
        if begins:
            self.may_pin.set()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        assert self.may_pin.wait(30)
        self.sizes.append(num_bytes)
        self.threads.add(threading.get_ident())
        return super().pinned(num_bytes)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 256)


@given(st.integers(0, 8 << 30), st.integers(1, 200 * MIB))
def test_pieces_fit_what_is_planned_and_waste_little(num_bytes: int, row_bytes: int) -> None:
    sizes = list(piece_sizes(num_bytes, row_bytes))
    assert sum(sizes) <= num_bytes
    assert all(size.bit_count() == 1 and size >= row_bytes for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    # Only less than two rows at the end, and the ends of pieces, cannot be used.
    assert num_bytes - sum(sizes) < 2 * row_bytes
    largest = [size for size in sizes if size >= PIECE_BYTES and size == sizes[0]]
    for size in largest[:-1]:
        assert size % row_bytes <= size / 8


@pytest.mark.usefixtures("small_pieces")
def test_all_of_it_is_pinned_at_once_by_another_thread_and_then_used_again() -> None:
    device = Pinning()
    memory = PinnedMemory(device, 600, 60)
    memory.finish()
    assert device.sizes == [256, 256, 64]
    rows = PinnedRows(memory, 60)
    for _ in range(3):
        held = [rows.take() for _ in range(4 + 4 + 1)]
        assert len({row.data_ptr() for row, _ in held}) == len(held)
        del held
    assert device.sizes == [256, 256, 64]
    assert device.threads.isdisjoint({threading.get_ident()})


@pytest.mark.usefixtures("small_pieces")
def test_a_row_is_taken_as_long_as_somebody_holds_its_bytes() -> None:
    memory = PinnedMemory(Pinning(), 256, 24)
    memory.finish()
    rows = PinnedRows(memory, 24)
    row, content = rows.take()
    row.fill_(7)
    assert content == bytes([7]) * 24
    place = row.data_ptr()
    part = torch.frombuffer(content, dtype=torch.uint8)
    del row, content
    others = [rows.take() for _ in range(256 // 24 - 1)]
    assert place not in [other.data_ptr() for other, _ in others]
    assert part.tolist() == [7] * 24
    del part
    assert rows.take()[0].data_ptr() == place


@pytest.mark.usefixtures("small_pieces")
def test_without_pinned_memory_rows_are_ordinary_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = Pinning(begins=False)
    memory = PinnedMemory(device, 256, 100)
    rows = PinnedRows(memory, 100)
    held = [rows.take() for _ in range(3)]
    assert not device.sizes, "a step neither pins nor waits for the thread that does"
    for i, (row, content) in enumerate(held):
        row.fill_(i)
        assert bytes(content) == bytes([i]) * 100
    assert caplog.text.count("no pinned memory") == 1
    ordinary = {row.data_ptr() for row, _ in held}
    device.may_pin.set()
    memory.finish()
    del held, row, content
    pinned = [rows.take() for _ in range(2)]
    assert len({row.data_ptr() for row, _ in pinned} - ordinary) >= 1
    assert device.sizes == [256]


@pytest.mark.usefixtures("small_pieces")
def test_a_thread_ends_once_nobody_needs_its_memory() -> None:
    device = Pinning(begins=False)
    memory = PinnedMemory(device, 1024, 100)
    thread = next(thread for thread in threading.enumerate() if thread.name == "pinning")
    del memory
    device.may_pin.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(device.sizes) <= 1
