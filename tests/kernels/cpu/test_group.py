"""Ranks that meet in shared memory: all get the same sums, and notice a rank that ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.ranks.rank_threads import Memory

from appliance.kernels.cpu.engine import RankLostError
from appliance.kernels.cpu.group import NativeGroup

FLOATS = 64


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_the_same_sums(loaded: ctypes.CDLL, size: int) -> None:
    memory = Memory(size, FLOATS)
    values = torch.randn(size, 3 * FLOATS + 5, generator=torch.Generator().manual_seed(1))

    def add(rank: int) -> torch.Tensor:
        group = NativeGroup(loaded, memory.address, rank=rank, size=size, floats=FLOATS)
        own = values[rank].clone()
        for _ in range(50):
            own.copy_(values[rank])
            group.sum(own)
        return own

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(add, range(size)))
    expected = values[0].clone()
    for other in values[1:]:
        expected += other
    assert all(torch.equal(one, expected) for one in found)


def test_a_rank_that_has_ended_is_missed_and_no_later_call_waits(loaded: ctypes.CDLL) -> None:
    memory = Memory(2, FLOATS)
    other = subprocess.Popen([sys.executable, "-P", "-c", ""], env={})
    watched = os.pidfd_open(other.pid)
    group = NativeGroup(
        loaded, memory.address, rank=0, size=2, floats=FLOATS, processes=(-1, watched)
    )
    with pytest.raises(RankLostError):
        group.meet()
    for call in (group.meet, group.wait, lambda: group.sum(torch.ones(3))):
        with pytest.raises(RankLostError):
            call()
    os.close(watched)
    other.wait()
