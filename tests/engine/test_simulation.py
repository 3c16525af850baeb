"""The whole engine under random loads and faults; `scripts/simulate` runs it for longer."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.simulation import simulated_pictures, virtual_engine
from support.simulation.engine_simulation import Simulation
from support.simulation.load_script import Script
from support.simulation.simulated_eras import failure_of, script_of, shrink, simulate
from support.simulation.simulated_pictures import encode
from support.simulation.virtual_runner import VirtualRunner

from appliance.engine.blocks.block_hashes import is_state
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.checkpoints import Checkpoints
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.nouns import picture
from appliance.engine.scheduling import scheduler
from appliance.engine.scheduling.policy import most_drafts
from appliance.engine.scheduling.state import InFlight
from appliance.media.spec import ImageProcessorSpec
from appliance.model.vision.tower import PictureRows

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.picture import CanvasPixels
    from appliance.engine.nouns.plan import Sampled, ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.media.sizing import Canvas

pytestmark = pytest.mark.no_cover  # millions of steps of code that other tests cover

STEPS = 20_000
CONVERSATIONS = 10_000


def test_every_request_gets_the_right_answer_whatever_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    seen = simulate(STEPS, seed=20261122)
    assert seen["steps"] >= STEPS
    for name in (
        "preempted",
        "swapped",
        "failed steps",
        "deaths",
        "evictions",
        "refused",
        "tokens from the cache",
        "tokens from the host",
        "tokens from the disk",
        "damaged files",
        "beams",
        "beams cut off",
        "best of several",
        "preempted beams",
        "copies",
        "copies of open blocks",
        "shared blocks",
        "mixed steps",
        "rows ahead",
        "rows for nothing",
        "blocks back from the host",
        "beams without an answer",
        "accepted drafts",
        "rejected drafts",
        "rewound states",
        "checkpoints",
        "evicted checkpoints",
        "restored checkpoints",
        "loaded states",
    ):
        assert seen[name] >= 10, f"the loads hardly touch {name}: {seen}"
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert seen[f"ended: {reason}"] >= 50


def test_a_script_runs_the_same_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    runs = [Simulation(script_of(seed=3, era=5)) for _ in range(2)]
    assert runs[0].run() == runs[1].run()
    assert runs[0].seen == runs[1].seen
    assert runs[0].clock == runs[1].clock


def test_room_for_a_state_that_the_disk_still_reads_is_kept_for_somebody() -> None:
    """Repeats a failed era: its last request is aborted while the disk reads blocks and a state."""
    era = Simulation(script_of(seed=99, era=273))
    era.run()
    assert era.disk is not None
    assert any(is_state(key) for job in era.disk.unfinished for key in job.hashes)


def test_a_request_that_gives_way_in_the_step_that_admits_it_still_waits() -> None:
    """Repeats a failed era: nothing was computed for it, and it waited beyond its limit."""
    assert failure_of(script_of(seed=21, era=67), check_every=500) is None


def test_a_sequence_that_starts_beside_its_siblings_gets_rows_at_once() -> None:
    """Repeats a failed era: a fork that waited for rows shared the block its parent wrote next."""
    assert failure_of(script_of(seed=7, era=8), check_every=500) is None


def test_no_conversation_gets_another_picture(caplog: pytest.LogCaptureFixture) -> None:
    """Pictures that differ in a byte, are equal, come again, and change places."""
    caplog.set_level(logging.CRITICAL)
    seen = simulate(STEPS, seed=20261130, pictures=True)
    while seen["conversations"] < CONVERSATIONS:
        seen += simulate(STEPS, seed=seen["conversations"], pictures=True)
    assert seen["pictures encoded"] >= CONVERSATIONS // 4
    for name in ("pictures met again", "rows of pictures", "tokens from the disk", "swapped"):
        assert seen[name] >= 100, f"the loads hardly touch {name}: {seen}"


def _by_place(key: bytes, cell: int) -> int:
    return -1 - cell


def _by_pixel_in_the_middle(
    self: object, canvases: tuple[Canvas, ...], pixels: tuple[bytes, ...]
) -> bytes:
    return pixels[0][3:-3]


def _first_rows(canvas: CanvasPixels) -> PictureRows:
    return PictureRows(encode(canvas).embeddings[[0] * canvas.num_rows])


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (picture, "row_id", _by_place, "what it never wrote"),
        (ImageProcessorSpec, "digest", _by_pixel_in_the_middle, "what it never wrote"),
        (virtual_engine, "encode", _first_rows, "what it never wrote"),
    ],
    ids=["id", "digest", "rows"],
)
def test_a_wrong_picture_is_noticed(
    owner: Any,
    name: str,
    fault: Callable[..., object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    simulated_pictures.canvas_of.cache_clear()
    monkeypatch.setattr(owner, name, fault)
    scripts = (script_of(seed=5, era=era, pictures=True) for era in range(60))
    found = next(filter(None, (failure_of(one, check_every=5) for one in scripts)), "")
    simulated_pictures.canvas_of.cache_clear()
    assert says in found


def test_a_failure_is_found_again_and_cut_down_to_a_few_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(VirtualRunner, "copy", lambda self, plan: None)

    def fails(script: Script) -> bool:
        return failure_of(script, check_every=1) is not None

    failing = next(script for era in range(30) if fails(script := script_of(seed=1, era=era)))
    small = shrink(failing, fails)
    assert len(small.events) <= 4
    assert fails(small)


def _from_another_slot(slots: StateSlots, sequence: Sequence) -> int:
    return sequence.slot % slots.num_slots


def _without_release(slots: StateSlots, restore: Any) -> None:
    del slots.restores[restore.sequence]


def _although_it_is_read(checkpoints: Checkpoints) -> int | None:
    if not checkpoints.free and checkpoints.found:
        one = next(reversed(checkpoints.found.values()))
        one.num_restores = 0
        checkpoints.evict(one.content)
    return checkpoints.free.pop() if checkpoints.free else None


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (StateSlots, "fork", lambda slots, parent, child: None, "another state"),
        (StateSlots, "row", _from_another_slot, "nobody wrote that state"),
        (StateSlots, "end_restore", _without_release, "about to go on"),
        (Checkpoints, "take", _although_it_is_read, "shared while written"),
        (Checkpoints, "evict", lambda checkpoints, content: None, "without its block"),
        (VirtualRunner, "state_before", lambda self, entry: self.states[entry.state], "token"),
    ],
    ids=["fork", "slot", "release", "shared", "block", "reset"],
)
def test_a_wrong_state_is_noticed(
    owner: type,
    name: str,
    fault: Callable[..., object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    scripts = [script_of(seed=5, era=era) for era in range(60)]
    scripts = [one for one in scripts if one.setting.recurrent and one.setting.checkpoints]
    monkeypatch.setattr(owner, name, fault)
    found = next(filter(None, (failure_of(one, check_every=5) for one in scripts)), "")
    assert says in found


def _all_that_it_wrote(blocks: BlockManager, entry: ScheduledSequence, num_accepted: int) -> None:
    blocks.commit(entry.sequence, entry.num_own + num_accepted)
    if blocks.states is not None:
        blocks.states.forget(entry.sequence)
    blocks.truncate(entry.sequence)


def _whatever_was_drawn(drafts: Ordered[int], results: Ordered[Sampled]) -> Ordered[Sampled]:
    return results


def _without_taking_back(blocks: BlockManager, sequence: Sequence) -> None:
    pass


def _up_to_the_end_of_a_block(
    sequence: Sequence, num_left: int, bounds: Bounds, **ahead: bool
) -> int:
    return most_drafts(sequence, num_left, replace(bounds, is_recurrent=False), **ahead)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (scheduler, "settle_run", _all_that_it_wrote, "another state"),
        (scheduler, "accepted_run", _whatever_was_drawn, "a wrong token"),
        (BlockManager, "truncate", _without_taking_back, "blocks behind its tokens"),
        (scheduler, "most_drafts", _up_to_the_end_of_a_block, "a checkpoint is passed"),
        (StateSlots, "remember", lambda slots, sequence: True, "KeyError"),
    ],
    ids=["rewind", "acceptance", "truncate", "checkpoint", "copy"],
)
def test_a_trace_of_rejected_drafts_is_noticed(
    owner: Any,
    name: str,
    fault: Callable[..., object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    changes: dict[str, Any] = {"drafts": 0.6, "drafts_eagerly": True, "depth": 0}
    changes |= {"recurrent": True, "checkpoints": 30, "prefix_caching": True}
    changes |= {"max_num_batched_tokens": 64}
    scripts = [script_of(seed=6, era=era) for era in range(40)]
    scripts = [
        replace(one, setting=replace(one.setting, **changes))
        for one in scripts
        if one.setting.block_size >= 4
    ]
    monkeypatch.setattr(owner, name, fault)
    found = next(filter(None, (failure_of(one, check_every=5) for one in scripts)), "")
    assert says in found


def test_a_plan_behind_drafts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault shows where the next step is planned before the last one's tokens are known."""
    caplog.set_level(logging.CRITICAL)
    changes: dict[str, Any] = {"drafts": 0.6, "drafts_eagerly": True, "depth": 1}
    scripts = [script_of(seed=6, era=era) for era in range(60)]
    scripts = [replace(one, setting=replace(one.setting, **changes)) for one in scripts]
    assert not any(failure_of(one, check_every=50) for one in scripts[:4])
    monkeypatch.setattr(InFlight, "has_drafts", False)
    found = next(filter(None, (failure_of(one, check_every=5) for one in scripts)), "")
    assert "looks too far ahead" in found or "rows are left out" in found or "Error" in found
