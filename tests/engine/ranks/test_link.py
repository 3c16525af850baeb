"""Links that are slow, hang or change data get a verdict in time, and never hang the probe."""

from __future__ import annotations

import re

import pytest
from support.ranks.fake_links import FakeLink

from appliance.engine.ranks.link import TRIAL_SECONDS, LinkPath, LinkSpeed, choose_link, try_link

PCIE = LinkSpeed(8e-6, 25e9)
STAGED = LinkSpeed(25e-6, 9e9)
SLOW = LinkSpeed(900e-6, 0.4e9)
LATE = LinkSpeed(900e-6, 45e6)  # the last rounds take more than half of the remaining time
ROW = 8192


def peer(speed: LinkSpeed = PCIE, **faults: int) -> FakeLink:
    return FakeLink(LinkPath.PEER, speed, **faults)


def host(speed: LinkSpeed = STAGED, **faults: int) -> FakeLink:
    return FakeLink(LinkPath.HOST, speed, **faults)


@pytest.mark.parametrize("speed", [PCIE, STAGED, SLOW, LATE], ids=str)
def test_a_sound_link_is_measured(speed: LinkSpeed) -> None:
    trial = try_link(peer(speed), 1)
    assert trial.problem == ""
    assert trial.speed is not None
    assert trial.speed.seconds == pytest.approx(speed.seconds, rel=0.01)
    assert trial.speed.bytes_per_second == pytest.approx(speed.bytes_per_second, rel=0.3)


@pytest.mark.parametrize("place", [0, 1, 20, 33, 34, 37])
def test_a_changed_number_is_found_wherever_it_is(place: int) -> None:
    trial = try_link(peer(breaks_after=place), place)
    assert trial.speed is None
    assert "changes data: 1 of" in trial.problem


@pytest.mark.parametrize("place", [0, 1, 20, 33, 34, 37])
def test_a_hanging_link_ends_in_time(place: int) -> None:
    link = peer(hangs_after=place)
    trial = try_link(link, place)
    assert "did not answer in time" in trial.problem
    assert link.spent <= TRIAL_SECONDS + 1e-9


def test_a_link_that_is_far_too_slow_is_left_in_time() -> None:
    link = peer(LinkSpeed(10e-3, 1e5))
    assert "did not answer in time: 4,194,304 bytes" in try_link(link, 0).problem
    assert link.spent <= TRIAL_SECONDS + 1e-9


def test_a_link_too_slow_for_all_rounds_is_measured_by_one() -> None:
    link = peer(LinkSpeed(1e-3, 10e6))
    trial = try_link(link, 0)
    assert trial.speed is not None
    assert trial.speed.bytes_per_second == pytest.approx(10e6, rel=0.01)
    assert link.spent <= TRIAL_SECONDS


def test_data_differ_from_test_to_test() -> None:
    seen = []

    class Recorder(FakeLink):
        def echo(self, data, rounds, limit):  # type: ignore[no-untyped-def]
            seen.append(data.tobytes())
            return super().echo(data, rounds, limit)

    for seed in (1, 2):
        try_link(Recorder(LinkPath.PEER, PCIE), seed)
    assert len(set(seen)) == len(seen)


def test_the_fastest_sound_way_is_chosen() -> None:
    found = choose_link([try_link(peer(), 0), try_link(host(), 0)], ROW)
    assert found.trial is not None
    assert (found.trial.path, found.reason) == (LinkPath.PEER, "")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (peer(SLOW), r"peer to peer takes \d+\.\d times as long for 8,192 bytes"),
        (peer(hangs_after=5), "peer to peer did not answer in time"),
        (peer(breaks_after=5), "peer to peer changes data: 1 of 16 numbers"),
    ],
    ids=["slow", "hanging", "corrupting"],
)
def test_a_bad_way_gives_way_to_the_next_with_the_reason(first: FakeLink, said: str) -> None:
    found = choose_link([try_link(first, 0), try_link(host(), 0)], ROW)
    assert found.trial is not None
    assert found.trial.path is LinkPath.HOST
    assert pytest.approx(STAGED.seconds, rel=0.01) == found.trial.speed.seconds  # type: ignore[union-attr]
    assert re.match(said, found.reason)


def test_without_a_sound_way_there_is_none_and_both_reasons_are_told() -> None:
    bad = [try_link(peer(breaks_after=0), 0), try_link(host(hangs_after=0), 0)]
    found = choose_link(bad, ROW)
    assert found.trial is None
    assert "peer to peer changes data" in found.reason
    assert "through host memory did not answer in time" in found.reason
