"""Times on the card how its kernels multiply best, and keeps that for later starts.

What `kernels.packed_matmul.timed` finds is kept in one file for each name of a card, with all that
it depends on. A file with another driver, torch, Triton or version of ours is ignored, and replaced
by the next timing. Without a file the choices are those that were computed.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.config import tuning_dir
from appliance.errors import ApplianceError, ConfigError
from appliance.files import read_json, write_json
from appliance.version import __version__

if TYPE_CHECKING:
    import torch

    from appliance.config import EngineConfig
    from appliance.kernels.packed_matmul.launch import TiledLinear
    from appliance.kernels.packed_matmul.timed import Timeable, TimedChoices
    from appliance.model.decoder import Decoder

START_SECONDS = 5.0  # of a start, at most, for what is not timed yet
LEAST_SECONDS = 2e-3  # of one measurement
REPEATS = 3
MOST_LINEARS = 16  # of one form, multiplied with in turn: more than a cache holds
DRIVER = Path("/proc/driver/nvidia/version")
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
        dense = sum(each.widened_rows is not None for each in self.choices.values())
        return dense + sum(len(each.tiles) for each in self.choices.values())


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
    path = _path(card, folder or tuning_dir())
    path.parent.mkdir(parents=True, exist_ok=True)
    about = Circumstances.of(card)
    value = {
        "circumstances": {each.name: getattr(about, each.name) for each in fields(about)},
        "when": time.time(),
        "choices": {name: each.to_json() for name, each in choices.items()},
    }
    write_json(path, value)


def tune(
    decoder: Decoder,
    most_rows: int,
    seconds: float,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> str:
    """Let a decoder multiply as was timed on its card, and time what is missing.

    Args:
        decoder: on a GPU.
        most_rows: of a step.
        seconds: to time for, at most; 0 only reads what was kept.
        on_progress: called with stage, done, total.

    Returns:
        How many choices were timed, and how many computed, in words.
    """
    import torch

    from appliance.kernels.gpu.target import target_of
    from appliance.kernels.packed_matmul.timed import Timer, missing, time_choices

    card, linears = torch.cuda.get_device_name(decoder.device), list(tiled_linears(decoder))
    capability = target_of(decoder.device).capability
    kept = kept_for(card)
    known: dict[str, TimedChoices] = {} if kept is None else kept.choices
    wanted = len(missing(linears, most_rows, capability, {}))
    open_before = len(missing(linears, most_rows, capability, known))
    end = time.monotonic() + seconds
    calls = 0

    def timed(members: Sequence[Timeable], rows: int) -> float | None:
        nonlocal calls
        calls += 1
        on_progress("timing tiles", calls, 0)
        return seconds_of(members, rows, decoder.dtype, decoder.device)

    timer = Timer(capability, timed, lambda: time.monotonic() >= end)
    found = time_choices(linears, most_rows, timer, known)
    left = len(missing(linears, most_rows, capability, found))
    if left < open_before:
        torch.cuda.empty_cache()
        keep(card, found)
    return f"{wanted - left} of {wanted} choices were timed on this {card}, {left} are computed"


def tune_model(
    config: EngineConfig, seconds: float, on_progress: Callable[[str, int, int], None]
) -> str:
    """Load a model's weights to its GPU and tune it; see `tune`.

    Raises:
        ConfigError: our kernels do not run it on one GPU.
    """
    from appliance.engine.load.execution.choice import choose_execution
    from appliance.engine.served_model import open_served
    from appliance.model.decoder import Decoder

    source = open_served(config)
    execution, _ = choose_execution(config, source, threads=1)
    if not execution.uses_triton:
        raise ConfigError("tiles are timed on a GPU; `appliance doctor` says what is here")
    rows = config.max_num_batched_tokens
    executor = execution.load(source, on_progress, config.max_model_len or rows)
    if not isinstance(executor, Decoder):
        raise ConfigError("only a model on one GPU is timed, by our own kernels")
    return tune(executor, rows, seconds, on_progress)


def tune_at_start(
    setting: str,
    executor: object,
    most_rows: int,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Tune a decoder with Triton's kernels on a GPU, for a few seconds; see `tune`."""
    from appliance.model.decoder import Decoder

    if not isinstance(executor, Decoder) or executor.device.type != "cuda":
        return
    try:
        words = tune(executor, most_rows, START_SECONDS if setting == "auto" else 0.0, on_progress)
    except ApplianceError as error:
        words = f"{error}; the choices of this start are not kept"
    logger.info("tiles: %s", words)


def tiled_linears(decoder: Decoder) -> Iterator[TiledLinear]:
    """Yield the linears of a decoder's layers and head whose tiles can be timed."""
    from appliance.kernels.packed_matmul.launch import TiledLinear

    def inside(value: Any) -> Iterator[TiledLinear]:
        if isinstance(value, TiledLinear):
            yield value
        elif is_dataclass(value):
            for each in fields(value):
                yield from inside(getattr(value, each.name))
        elif isinstance(value, tuple | list):
            for one in value:
                yield from inside(one)

    yield from inside((decoder.layers, decoder.head))


def seconds_of(
    linears: Sequence[Any], rows: int, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Time products of some rows by linears in turn, on a GPU; None if one cannot run there."""
    import torch
    from triton.runtime.errors import TritonError

    several = linears[:MOST_LINEARS]
    x = torch.randn(rows, several[0].in_features, dtype=dtype, device=device)

    def run(passes: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(passes):
            for linear in several:
                linear(x)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    try:
        run(1)  # compiles and loads the kernel
    except TritonError as error:
        logger.debug("not timed: %s", error)
        return None
    passes = math.ceil(LEAST_SECONDS / max(run(1), 1e-6))
    return sorted(run(passes) / passes for _ in range(REPEATS))[REPEATS // 2]


def _read(path: Path) -> Kept | None:
    """Return a file's content; None if it is missing or not one of ours."""
    from appliance.kernels.packed_matmul.timed import TimedChoices

    try:
        value = read_json(path)
        about = Circumstances(**value["circumstances"])
        choices = {name: TimedChoices.from_json(each) for name, each in value["choices"].items()}
        return Kept(
            path, about, float(value["when"]), about != Circumstances.of(about.card), choices
        )
    except (ApplianceError, KeyError, TypeError, ValueError, AttributeError) as error:
        if path.exists():
            logger.warning("%s is ignored: %s", path, error)
        return None


def _path(card: str, folder: Path) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json")


def driver_version() -> str:
    """Return the driver's version as it says itself; under WSL it does not."""
    try:
        first = DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "unknown"
    found = re.search(r"(?<!\d)\d+\.\d+(\.\d+)?", first)
    return found.group() if found else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
