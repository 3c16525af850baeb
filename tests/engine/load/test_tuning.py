"""What was timed on a card is kept, and ignored when something else is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.engine.load.tuning import keep, kept_files, kept_for, time_parts
from appliance.engine.run.kernel_times import PartTimes
from appliance.errors import ConfigError
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices, Timer, missing, time_choices
from appliance.kernels.packed_matmul.tiles import MatmulTile

CARD = "NVIDIA GeForce RTX 3090"
TILE = MatmulTile(16, 16, 64, 2, 4)
CHOICES = {"4096 x 4096 int4 fp32 128": TimedChoices({16: LaunchChoice(TILE, 3)}, 256)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    return tmp_path / "tuning"


def test_what_was_timed_is_read_again_for_its_own_card(folder: Path) -> None:
    assert kept_for(CARD) is None
    keep(CARD, CHOICES)
    found = kept_for(CARD)
    assert found is not None
    assert (found.choices, found.count, found.is_stale) == (CHOICES, 2, False)
    assert [path.name for path in folder.iterdir()] == ["nvidia-geforce-rtx-3090.json"]
    assert kept_for("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("what", ["driver", "torch", "triton", "version"])
def test_another_version_makes_it_stale(what: str, folder: Path) -> None:
    keep(CARD, CHOICES)
    path = folder / "nvidia-geforce-rtx-3090.json"
    value = json.loads(path.read_text())
    value["circumstances"][what] += ".1"
    path.write_text(json.dumps(value))
    assert kept_for(CARD) is None
    assert [kept.is_stale for kept in kept_files()] == [True]
    keep(CARD, CHOICES)  # the next timing replaces it
    assert kept_for(CARD) is not None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"circumstances": {}}', '{"choices": {"a": 1}}', "\x00"]
)
def test_a_file_that_is_not_ours_is_ignored(
    content: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / "nvidia-geforce-rtx-3090.json").write_text(content)
    assert kept_for(CARD) is None
    assert "is ignored" in caplog.text


def test_a_tile_of_another_version_is_ignored(folder: Path) -> None:
    keep(CARD, CHOICES)
    path = folder / "nvidia-geforce-rtx-3090.json"
    path.write_text(path.read_text().replace('"num_warps"', '"warps"'))
    assert kept_for(CARD) is None


def test_the_driver_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 0,
        nvmlSystemGetDriverVersion=lambda: "535.183.01",
        nvmlSystemGetCudaDriverVersion=lambda: 12020,
    )
    monkeypatch.setitem(sys.modules, "pynvml", said)
    keep(CARD, CHOICES)
    assert kept_files()[0].circumstances.driver == "535.183.01"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_the_command_lists_and_deletes_what_is_kept(folder: Path) -> None:
    assert "all choices are computed" in call("--show").output
    keep(CARD, CHOICES)
    assert f"{CARD}: 2 choices of 1 forms of work, now" in call("--show").output
    assert call("--forget").output.startswith("deleted: ")
    assert not list(folder.iterdir())
    assert isinstance(call("--show", "--forget").exception, ConfigError)


def test_without_a_gpu_nothing_is_timed(tiny_llama: Path, folder: Path) -> None:
    error = call(str(tiny_llama)).exception
    assert isinstance(error, ConfigError)
    assert "timed on a GPU" in str(error)
    assert not folder.exists()


class Shape:
    """A linear of one form, with two choices for each of two entries; the second is faster."""

    has_splits = False

    def __init__(self, name: str) -> None:
        self.name, self.timed = name, TimedChoices()

    def entries(self, most_rows: int) -> tuple[int, ...]:
        return (8, 16)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        return (LaunchChoice(splits=1), LaunchChoice(splits=2))

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        self.timed = timed

    def inputs(self, entry: int, dtype: Any, device: Any) -> tuple[Any, ...]:
        return ()

    def run(self, *inputs: Any) -> object:
        return None


class Rank:
    """A rank's part on a card, whose measurements take a second each of a common clock."""

    def __init__(self, world: World, card: str, *forms: str) -> None:
        self.world, self.card = world, card
        self.shapes = [Shape(form) for form in forms]

    def time(self, known: Mapping[str, TimedChoices], seconds: float) -> PartTimes:
        def measured(works: Sequence[Any], entry: int) -> float:
            self.world.seconds += 1
            self.world.measured.append((self.card, works[0].name))
            return 1.0 / float(works[0].timed.entries[entry].splits)

        timer = Timer(measured, seconds, self.world.now)
        found = time_choices(self.shapes, 16, timer, known)
        return PartTimes(tuple(missing(self.shapes, 16, {})), found)

    def use(self, choices: Mapping[str, TimedChoices]) -> None:
        for shape in self.shapes:
            shape.use(choices.get(shape.name, TimedChoices()))


class World:
    """The clock of all ranks, and what was measured by it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.measured: list[tuple[str, str]] = []

    def now(self) -> float:
        return self.seconds


BEST = TimedChoices({8: LaunchChoice(splits=2), 16: LaunchChoice(splits=2)})


def test_equal_ranks_are_timed_once_and_take_the_same_kernels() -> None:
    world, known = World(), {CARD: dict[str, TimedChoices]()}
    ranks = [Rank(world, CARD, "half", "router") for _ in range(3)]
    wanted = time_parts(ranks, 1000.0, known, world.now)
    assert len(world.measured) == 2 * 2 * 2 * 2  # forms, entries, choices, rounds
    assert wanted == {CARD: {(entry, name) for entry in (8, 16) for name in ("half", "router")}}
    for rank in ranks:
        assert [shape.timed for shape in rank.shapes] == [BEST, BEST]
    time_parts(ranks, 1000.0, known, world.now)
    assert len(world.measured) == 16


def test_ranks_with_unequal_shares_time_what_is_their_own() -> None:
    """A linear that is not divided takes one kernel everywhere; each share its own."""
    world, known = World(), {CARD: dict[str, TimedChoices]()}
    ranks = [Rank(world, CARD, "two thirds", "whole"), Rank(world, CARD, "one third", "whole")]
    time_parts(ranks, 1000.0, known, world.now)
    counts = {name: world.measured.count((CARD, name)) for name in known[CARD]}
    assert counts == {"two thirds": 8, "whole": 8, "one third": 8}
    assert ranks[0].shapes[1].timed == ranks[1].shapes[1].timed == BEST


@pytest.mark.parametrize("seconds", [3.0, 9.0, 13.0])
def test_ranks_share_the_seconds_of_a_start(seconds: float) -> None:
    world, known = World(), {CARD: dict[str, TimedChoices]()}
    ranks = [Rank(world, CARD, "two thirds", "whole"), Rank(world, CARD, "one third", "whole")]
    time_parts(ranks, seconds, known, world.now)
    assert world.seconds <= seconds
    assert ranks[0].shapes[1].timed == ranks[1].shapes[1].timed


def test_what_unlike_cards_both_compute_stays_as_it_is_computed() -> None:
    """Their kernels for it could round otherwise, and each rank goes on with its own result."""
    world, other = World(), "NVIDIA GeForce RTX 4090"
    known = {CARD: dict[str, TimedChoices](), other: dict[str, TimedChoices]()}
    ranks = [
        Rank(world, CARD, "two fifths", "whole"),
        Rank(world, other, "three fifths", "whole"),
        Rank(world, CARD, "two fifths", "whole"),
    ]
    wanted = time_parts(ranks, 1000.0, known, world.now)
    assert {card: len(each) for card, each in wanted.items()} == {CARD: 4, other: 4}
    for rank in ranks:
        assert [shape.timed for shape in rank.shapes] == [BEST, TimedChoices()]
    assert known[CARD]["whole"] == BEST, "kept for a start on equal cards"
