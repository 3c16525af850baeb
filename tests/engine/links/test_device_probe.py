"""Links of devices are tested in another process, which may hang or die."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from appliance.engine.links.device_probe import DeviceProbe, probe_devices
from appliance.engine.links.link import LinkPath
from appliance.errors import EngineError

FAKE = Path(__file__).parents[2] / "support" / "fake_probe.py"
ROW = 8192


def probed(fault: str) -> DeviceProbe:
    command = (sys.executable, str(FAKE), fault)
    return probe_devices(("cuda:0", "cuda:1"), ROW, limit=0.5, command=command)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hangs", "peer to peer did not answer in time: 0.5 s"),
        ("dies", "peer to peer ended the process that tested it"),
        ("corrupts", "peer to peer changes data"),
    ],
)
def test_a_straight_path_that_fails_gives_way_to_the_host(fault: str, said: str) -> None:
    found = probed(fault)
    chosen = found.links[0, 1]
    assert chosen.trial is not None
    assert (chosen.trial.path, chosen.reason) == (LinkPath.HOST, said)
    assert [one.free_bytes for one in found.memory] == [2**34] * 2


def test_without_a_sound_path_none_is_chosen() -> None:
    chosen = probed("both dies").links[0, 1]
    assert chosen.trial is None
    assert "peer to peer ended" in chosen.reason
    assert "through host memory ended" in chosen.reason


def test_devices_that_cannot_be_opened_are_told() -> None:
    with pytest.raises(EngineError, match="cuda:0, cuda:1 were not tested: CUDA driver version"):
        probed("silent")


def test_torchs_own_copies_pass_both_ways() -> None:
    """Between two views of the CPU, in the real process."""
    found = probe_devices(("cpu", "cpu"), ROW, limit=60.0)
    chosen = found.links[0, 1]
    assert chosen.trial is not None
    assert chosen.trial.speed is not None
    assert chosen.trial.speed.bytes_per_second > 0
    assert "changes data" not in chosen.reason
    assert [one.bytes_per_second > 0 for one in found.memory] == [True, True]
    assert [one.free_bytes for one in found.memory] == [None, None]
