"""Recurrent states move unchanged: between rows, to pinned host memory, and back."""

from __future__ import annotations

import pytest
import torch
from support.engine.late_device import LateDevice

from appliance.engine.nouns.moves import Rates, StateCopy, StateLoad
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.moves import StateRows
from appliance.engine.run.pinned_memory import PinnedMemory


@pytest.mark.parametrize("device", [HostDevice(), LateDevice()], ids=["host", "late"])
def test_rows_come_back_as_they_were(device: HostDevice) -> None:
    rows = torch.randint(256, (6, 64), dtype=torch.uint8)
    pinned = PinnedMemory(device, 1024, 64)
    before, states = rows.clone(), StateRows(rows, device, Rates(), pinned)
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
