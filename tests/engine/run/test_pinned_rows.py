from __future__ import annotations

import pytest
import torch

from appliance.engine.run import moves
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.moves import PinnedRows


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
