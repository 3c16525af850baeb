"""Recurrent states move unchanged: between rows, to pinned host memory, and back."""

from __future__ import annotations

import pytest
import torch
from support.engine.late_device import LateDevice

from appliance.engine.nouns.moves import Rates, StateCopy, StateLoad
from appliance.engine.run import moves
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.moves import PinnedRows, StateRows


@pytest.mark.parametrize("device", [HostDevice(), LateDevice()], ids=["host", "late"])
def test_rows_come_back_as_they_were(device: HostDevice) -> None:
    rows = torch.randint(256, (6, 64), dtype=torch.uint8)
    before, states = rows.clone(), StateRows(rows, device, Rates())
    saved = states.save([0, 3])
    rows[:4] = 7
    states.load([StateLoad(1, 1), StateLoad(2, saved[0])], saved)
    assert rows[1].equal(before[3])
    assert rows[2].equal(before[0])
    assert bytes(saved[1].read()) == before[3].numpy().tobytes()


def test_copies_are_done_in_order() -> None:
    rows = torch.arange(4, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    StateRows(rows, HostDevice(), Rates()).copy([StateCopy(1, 0), StateCopy(2, 1)])
    assert rows[:, 0].tolist() == [1, 2, 2, 3]


class Counting(HostDevice):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return super().pinned(num_bytes)


def test_a_row_is_taken_as_long_as_somebody_holds_its_bytes() -> None:
    rows = PinnedRows(Counting(), 24)
    row, content = rows.take()
    row.fill_(7)
    assert content == bytes([7]) * 24
    place = row.data_ptr()
    part = torch.frombuffer(content, dtype=torch.uint8)
    del row, content
    others = [rows.take() for _ in range(moves.MOST_ROWS - 1)]
    assert place not in [other.data_ptr() for other, _ in others]
    assert part.tolist() == [7] * 24
    del part
    assert rows.take()[0].data_ptr() == place


@pytest.mark.parametrize(("num_bytes", "count"), [(16, 4), (100, 2), (300, 1)])
def test_pieces_are_pinned_as_they_are_needed_and_used_again(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, count: int
) -> None:
    monkeypatch.setattr(moves, "PIECE_BYTES", 256)
    monkeypatch.setattr(moves, "MOST_ROWS", 4)
    device = Counting()
    rows = PinnedRows(device, num_bytes)
    assert not device.sizes
    for _ in range(2):
        held = [rows.take() for _ in range(2 * count)]
        assert len({row.data_ptr() for row, _ in held}) == 2 * count
        del held
    assert device.sizes == [count * num_bytes] * 2
