"""Ranks before they load anything: the engine tests their links and measures their memory."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from appliance.engine.ranks import probes
from appliance.engine.ranks.link import LinkPath
from appliance.engine.ranks.probes import copy_rates, try_links
from appliance.engine.ranks.rank_group import RankGroup
from appliance.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    ranks = RankGroup("--tensor-parallel 2", 2)
    yield ranks
    ranks.close()


def test_a_link_is_sound_and_memory_is_measured(
    ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trial,) = try_links(ranks, limit=60.0)
    assert trial.problem == ""
    assert trial.path is LinkPath.SHARED
    assert trial.speed is not None
    assert trial.speed.seconds > 0
    monkeypatch.setattr(probes, "copy_bandwidth", lambda threads: 1.0)
    (own, other) = copy_rates(ranks, (1, 1))
    assert own == other, "ranks with as many threads are alike"
    assert own > 1e6
    assert copy_rates(ranks, (2, 1))[0] == 1.0


def test_a_rank_that_hangs_is_ended_in_time(ranks: RankGroup) -> None:
    (member,) = ranks.members
    asked = member.send_back

    def stop_first(count: int, rounds: int) -> None:
        os.kill(member.process.pid, signal.SIGSTOP)
        asked(count, rounds)

    member.send_back = stop_first  # type: ignore[method-assign]
    (trial,) = try_links(ranks, limit=0.3)
    assert "did not answer in time: 64 bytes" in trial.problem
    assert member.process.wait(60) == -signal.SIGKILL


def test_a_rank_that_dies_in_the_test_is_named(ranks: RankGroup) -> None:
    (member,) = ranks.members
    pid = member.process.pid
    member.send_back = lambda count, rounds: member.process.kill()  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=rf"rank 1 .*process {pid}.* ended by signal 9"):
        try_links(ranks, limit=60.0)


def test_ranks_end_with_their_group() -> None:
    ranks = RankGroup("--tensor-parallel 2", 2)
    (pid,) = ranks.pids
    del ranks
    assert not psutil.pid_exists(pid)
