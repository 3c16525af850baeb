"""Gloo links between torch ranks, of which one end may be faulty."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from appliance.engine.ranks.link import SLOW_SECONDS, LinkPath
from appliance.engine.ranks.torch_probes import send_back, try_joint
from appliance.model.shard.joint import Joint

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.ranks.link import LinkTrial

LIMIT = 60.0
CPU = torch.device("cpu")


def tried(others: list[type[Joint]], patience: float = LIMIT) -> tuple[LinkTrial, ...]:
    """Test the links to ranks of some kinds, each a thread."""
    store, size = HashStore(), 1 + len(others)
    kinds: list[type[Joint]] = [Joint, *others]
    joints = [kind(store, rank, size, CPU) for rank, kind in enumerate(kinds)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda joint: joint.connect(timedelta(seconds=patience)), joints))
        first, *rest = joints
        del joints

        def serve(joint: Joint) -> None:
            with suppress(RuntimeError):
                send_back(joint)

        for joint in rest:
            pool.submit(serve, joint)
        del rest, joint
        try:
            return try_joint(first, LinkPath.SOCKET, patience)
        finally:
            released.set()
            del first


released = Event()


class Sound(Joint):
    pass


class Changing(Joint):
    """A link that changes one number of what it sends back."""

    def sum(self, x: Tensor) -> Tensor:
        if x.numel() > 1 and x.any():
            x[7] += 1
        return super().sum(x)


class Hanging(Joint):
    def sum(self, x: Tensor) -> Tensor:
        if x.numel() > 1:
            released.wait()
            raise RuntimeError("the test is over")
        return super().sum(x)


class Slow(Joint):
    def sum(self, x: Tensor) -> Tensor:
        if x.numel() > 1:
            time.sleep(2 * SLOW_SECONDS)
        return super().sum(x)


class Ending(Joint):
    def sum(self, x: Tensor) -> Tensor:
        if x.numel() > 1:
            self._group = None
            raise RuntimeError("this rank ends")
        return super().sum(x)


@pytest.fixture(autouse=True)
def _hold() -> None:
    released.clear()


def test_sound_links_are_measured() -> None:
    trials = tried([Sound, Sound])
    assert [(one.path, one.problem) for one in trials] == [(LinkPath.SOCKET, "")] * 2
    assert all(one.speed is not None and one.speed.bytes_per_second > 0 for one in trials)


def test_a_slow_link_is_measured_and_seen() -> None:
    (trial,) = tried([Slow])
    assert trial.problem == ""
    assert trial.is_slow


def test_a_changed_number_is_found_and_ends_the_test() -> None:
    trials = tried([Sound, Changing, Sound])
    assert [one.problem for one in trials] == [
        "",
        "changes data: 1 of 16 numbers that came back were others",
    ]


def test_a_hanging_rank_is_left_in_time() -> None:
    (trial,) = tried([Hanging], patience=1.0)
    assert "did not answer in time: 64 bytes" in trial.problem


def test_a_rank_that_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        tried([Ending])
