"""Times on each card how a model's kernels are launched best, and keeps that for later starts.

What `run.kernel_times` finds is kept in one file for each name of a card, with all that it depends
on. A file with another driver, torch, Triton or version of ours is ignored, and replaced by the
next timing. Without a file the choices are those that were computed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from appliance.config import tuning_dir
from appliance.errors import ApplianceError, CheckpointError, ConfigError
from appliance.files import read_json, write_json
from appliance.kernels.gpu.cards import driver_version
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.engine.run.kernel_times import PartTimes
    from appliance.kernels.cache.kv_format import KVFormat
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.model.decoder import Decoder

START_SECONDS = 5.0  # of a start, at most, for what is not timed yet
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """A card and versions, on which timed choices depend."""

    card: str
    driver: str
    torch: str
    triton: str
    version: str

    @classmethod
    def of(cls, card: str) -> Circumstances:
        """Return those of a card and of this installation."""
        return cls(card, driver_version(), _version("torch"), _version("triton"), __version__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of timed choices.

    Attributes:
        when: it was written, in seconds since 1970.
        is_stale: something else is installed now, so it is ignored.
        choices: by the names of forms.
    """

    path: Path
    circumstances: Circumstances
    when: float
    is_stale: bool
    choices: dict[str, TimedChoices]

    @property
    def age(self) -> float:
        """Seconds since it was written."""
        return time.time() - self.when

    @property
    def count(self) -> int:
        """Number of choices that were timed."""
        return sum(each.count for each in self.choices.values())


def kept_files(folder: Path | None = None) -> list[Kept]:
    """Return all readable files, those of other cards and versions too."""
    folder = folder or tuning_dir()
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    return [kept for kept in found if kept is not None]


def kept_for(card: str, folder: Path | None = None) -> Kept | None:
    """Return what was timed on a card, by its name; None if that is nothing, or stale."""
    kept = _read(_path(card, folder or tuning_dir()))
    return None if kept is None or kept.is_stale else kept


def keep(card: str, choices: Mapping[str, TimedChoices], folder: Path | None = None) -> None:
    """Write down what was timed on a card.

    Raises:
        CheckpointError: it cannot be written.
    """
    from appliance.kernels.gpu.timed import as_json

    path = _path(card, folder or tuning_dir())
    path.parent.mkdir(parents=True, exist_ok=True)
    about = Circumstances.of(card)
    value = {
        "circumstances": {each.name: getattr(about, each.name) for each in fields(about)},
        "when": time.time(),
        "choices": as_json(choices),
    }
    write_json(path, value)


class Part(Protocol):
    """A model, or a rank's part of it, on a card."""

    @property
    def card(self) -> str:
        """The card's name."""
        ...

    def time(self, known: Mapping[str, TimedChoices], seconds: float) -> PartTimes:
        """Time what is missing, for so many seconds at most; 0 only says what could be timed."""
        ...

    def use(self, choices: Mapping[str, TimedChoices]) -> None:
        """Work by these choices from now on; what they lack is computed."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPart:
    """This process's part."""

    decoder: Decoder
    card: str
    most_rows: int
    kv_format: KVFormat
    on_progress: Callable[[str, int, int], None]

    def time(self, known: Mapping[str, TimedChoices], seconds: float) -> PartTimes:
        from appliance.engine.run.kernel_times import time_kernels

        given = seconds, known, self.kv_format, self.on_progress
        return time_kernels(self.decoder, self.most_rows, *given)

    def use(self, choices: Mapping[str, TimedChoices]) -> None:
        from appliance.engine.run.kernel_times import use_timed

        use_timed(self.decoder, choices, self.kv_format)


@dataclass(frozen=True, slots=True)
class RankPart:
    """Another rank's part."""

    ranks: TorchRanks
    rank: int
    card: str
    most_rows: int
    kv_format: KVFormat

    def time(self, known: Mapping[str, TimedChoices], seconds: float) -> PartTimes:
        given = known, self.most_rows, seconds, self.kv_format
        return self.ranks.time_kernels(self.rank, *given)

    def use(self, choices: Mapping[str, TimedChoices]) -> None:
        self.ranks.use_timed(self.rank, choices, self.kv_format)


def tune(
    executor: object,
    most_rows: int,
    seconds: float,
    kv_format: KVFormat,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> str:
    """Let a decoder, in all its ranks, work as was timed on their cards; time what is missing.

    Args:
        executor: on GPUs.
        most_rows: of a step.
        seconds: to time for, at most; 0 only reads what was kept.
        kv_format: of most layers' cache.
        on_progress: called with stage, done, total.

    Returns:
        How many choices were timed, and how many computed, in words.

    Raises:
        ConfigError: our kernels do not execute it on GPUs.
        CheckpointError: what was found cannot be written.
        EngineError: a rank has ended.
    """
    parts = _parts(executor, most_rows, kv_format, on_progress)
    if not parts:
        raise ConfigError("only a model on GPUs is timed, by our own kernels")
    known: dict[str, dict[str, TimedChoices]] = {}
    for part in parts:
        kept = kept_for(part.card)
        known[part.card] = {} if kept is None else dict(kept.choices)
    before = {card: sum(one.count for one in found.values()) for card, found in known.items()}
    wanted = time_parts(parts, seconds, known)
    words = []
    for card, choices in known.items():
        if sum(one.count for one in choices.values()) > before[card]:
            keep(card, choices)
        asked = wanted[card]
        left = sum(not _has(choices, entry, name) for entry, name in asked)
        words.append(
            f"{len(asked) - left} of {len(asked)} choices were timed on this {card},"
            f" {left} are computed"
        )
    return "; ".join(words)


def time_parts(
    parts: Sequence[Part],
    seconds: float,
    known: dict[str, dict[str, TimedChoices]],
    now: Callable[[], float] = time.monotonic,
) -> dict[str, set[tuple[int, str]]]:
    """Time the parts of all ranks, one after another, and let all use the same choices.

    What one rank has timed, others on equal cards do not time again. Ranks on unlike cards may not
    take different timed kernels for a form that all of them have: what each computes for itself,
    such as a router's input, would differ between them. Those forms stay computed.

    Args:
        parts: of the ranks, in order.
        seconds: for all of them together.
        known: choices by card and form; what is found is added.
        now: a clock of seconds.

    Returns:
        Entries and forms that can be timed, by card.
    """
    end = now() + seconds
    forms: list[set[str]] = []
    wanted: dict[str, set[tuple[int, str]]] = {}
    for part in parts:
        times = part.time(known[part.card], max(0.0, end - now()))
        known[part.card] = times.choices
        forms.append({name for _, name in times.wanted})
        wanted.setdefault(part.card, set()).update(times.wanted)
    for part in parts:
        elsewhere = {
            name
            for other, names in zip(parts, forms, strict=True)
            if other.card != part.card
            for name in names
        }
        choices = known[part.card].items()
        part.use({name: one for name, one in choices if name not in elsewhere})
    return wanted


def _parts(
    executor: object,
    most_rows: int,
    kv_format: KVFormat,
    on_progress: Callable[[str, int, int], None],
) -> list[Part]:
    """Return the parts of a decoder on GPUs, rank 0's first; none of anything else."""
    from appliance.engine.ranks.ranked_decoder import RankedDecoder
    from appliance.model.decoder import Decoder

    own = executor.own if isinstance(executor, RankedDecoder) else executor
    if not isinstance(own, Decoder) or own.device.type != "cuda":
        return []
    import torch

    card = torch.cuda.get_device_name(own.device)
    parts: list[Part] = [OwnPart(own, card, most_rows, kv_format, on_progress)]
    if isinstance(executor, RankedDecoder):
        from appliance.engine.ranks.torch_ranks import TorchRanks

        assert isinstance(executor.link, TorchRanks)
        parts += (
            RankPart(executor.link, rank, torch.cuda.get_device_name(rank), most_rows, kv_format)
            for rank in range(1, executor.link.group.size)
        )
    return parts


def _has(choices: Mapping[str, TimedChoices], entry: int, name: str) -> bool:
    from appliance.kernels.gpu.timed import LIBRARY

    one = choices.get(name)
    if one is None:
        return False
    return one.own_rows is not None if entry == LIBRARY else entry in one.entries


def tune_model(
    config: EngineConfig, seconds: float, on_progress: Callable[[str, int, int], None]
) -> str:
    """Load a model's weights to its GPUs and tune it; see `tune`.

    Raises:
        ConfigError: our kernels do not execute it on GPUs.
    """
    from appliance.engine.load.execution.choice import choose_execution
    from appliance.engine.served_model import open_served

    source = open_served(config)
    execution, _ = choose_execution(config, source, threads=1)
    if not execution.uses_triton:
        raise ConfigError("tiles are timed on a GPU; `appliance doctor` says what is here")
    rows = config.max_num_batched_tokens
    execution = execution.started(source)
    executor = execution.load(source, on_progress, config.max_model_len or rows)
    return tune(executor, rows, seconds, execution.precision.kv_format, on_progress)


def tune_at_start(
    setting: str,
    executor: object,
    most_rows: int,
    kv_format: KVFormat,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Tune a decoder with Triton's kernels on GPUs, for a few seconds; see `tune`."""
    seconds = START_SECONDS if setting == "auto" else 0.0
    if not _parts(executor, most_rows, kv_format, on_progress):
        return
    try:
        words = tune(executor, most_rows, seconds, kv_format, on_progress)
    except CheckpointError as error:
        words = f"{error}; the choices of this start are not kept"
    logger.info("tiles: %s", words)


def _read(path: Path) -> Kept | None:
    """Return a file's content; None if it is missing or not one of ours."""
    from appliance.kernels.gpu.timed import from_json

    try:
        value = read_json(path)
        about = Circumstances(**value["circumstances"])
        choices = from_json(value["choices"])
        return Kept(
            path, about, float(value["when"]), about != Circumstances.of(about.card), choices
        )
    except (ApplianceError, KeyError, TypeError, ValueError, AttributeError) as error:
        if path.exists():
            logger.warning("%s is ignored: %s", path, error)
        return None


def _path(card: str, folder: Path) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
