"""What is said of the ways between GPUs; the copies are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from appliance.doctor import links
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.links import check_links
from appliance.engine.links.choice import LinkChoice
from appliance.engine.links.device_messages import DeviceMemory
from appliance.engine.links.device_probe import DeviceProbe
from appliance.engine.links.link import LinkPath, LinkSpeed, LinkTrial
from appliance.errors import EngineError
from tests.doctor.test_gpus import Nvml

Look = Callable[[Check, Scope], dict[str, Finding]]
STRAIGHT = LinkTrial(LinkPath.PEER, LinkSpeed(8e-6, 25e9))
STAGED = LinkTrial(LinkPath.HOST, LinkSpeed(25e-6, 9e9))


class OneGpu(Nvml):
    def nvmlDeviceGetCount(self) -> int:
        return 1


def found_by(
    look: Look, monkeypatch: pytest.MonkeyPatch, choice: LinkChoice | EngineError
) -> dict[str, Finding]:
    def probe(devices: Sequence[str], num_bytes: float) -> DeviceProbe:
        assert list(devices) == ["cuda:0", "cuda:1"]
        if isinstance(choice, EngineError):
            raise choice
        memory = tuple(DeviceMemory(place, 8e11, 2**34) for place in range(2))
        return DeviceProbe(memory, {(0, 1): choice})

    monkeypatch.setattr(links, "probe_devices", probe)
    return look(check_links, Scope(nvml=Nvml()))


@pytest.mark.parametrize(
    ("choice", "grade", "said"),
    [
        (LinkChoice(STRAIGHT), Grade.OK, "peer to peer 8.0 us, 25.0 GB/s"),
        (
            LinkChoice(STAGED, "peer to peer changes data: 1 of 16 numbers"),
            Grade.WARN,
            "through host memory 25.0 us, 9.0 GB/s, since peer to peer changes data: 1 of 16",
        ),
        (LinkChoice(None, "all hang"), Grade.FAIL, "no sound way: all hang"),
    ],
    ids=["straight", "staged", "none"],
)
def test_a_pair_is_told_with_its_path_and_the_reason(
    look: Look, monkeypatch: pytest.MonkeyPatch, choice: LinkChoice, grade: Grade, said: str
) -> None:
    found = found_by(look, monkeypatch, choice)
    assert found["cuda:1 copies"].found == "it copies 800 GB/s, read and written; 16.0 GiB free"
    pair = found["cuda:0 and cuda:1"]
    assert (pair.grade, pair.found.startswith(said)) == (grade, True)
    assert bool(pair.fix) is (grade is not Grade.OK)


def test_gpus_that_cannot_be_opened_are_a_warning(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_by(look, monkeypatch, EngineError("the links were not tested: no driver"))
    assert (found["links"].grade, "no driver" in found["links"].found) == (Grade.WARN, True)


def test_nothing_is_tried_with_one_gpu_or_without_time(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "probe_devices", None)
    assert look(check_links, Scope(nvml=OneGpu())) == {}
    assert look(check_links, Scope(nvml=Nvml(error="no driver"))) == {}
    assert look(check_links, Scope(nvml=Nvml(), is_quick=True))["links"].grade is Grade.UNKNOWN
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert look(check_links, Scope(nvml=Nvml())) == {}
