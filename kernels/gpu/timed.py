"""Times which launches of a kernel a card executes fastest, in place of what is computed for it.

The tables of tiles and the models of splits were made without a GPU. Each kind of work names, for
each of its sizes, a few launches that are compiled and proven; the fastest is used from then on.
All of them sum the same products, in another order: results differ within the kernel's tolerance.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from appliance.kernels.packed_matmul.tiles import MatmulTile

LEAST_GAIN = 0.03  # share of the time; less is noise, and what was computed stays
ROUNDS = 2  # of all candidates, as a card that was idle is slow at first
LIBRARY = 1 << 31  # in place of an entry, and after all of them
ALWAYS_OWN = 1 << 30  # rows: the library is never asked
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """A way to launch a kernel; what is None is computed.

    Attributes:
        tile: of a program.
        splits: programs that share the inputs of an output tile.
        keys: of a span of attention.
    """

    tile: MatmulTile | None = None
    splits: int | None = None
    keys: int | None = None


@dataclass(slots=True)
class TimedChoices:
    """Timed choices for one form of work; those that are missing are computed.

    Attributes:
        entries: what replaces an entry of the form's table, by the largest size that it is for.
        own_rows: rows of x up to which our kernel is faster than the library; None: not timed.
    """

    entries: dict[int, LaunchChoice] = field(default_factory=dict)
    own_rows: int | None = None

    @property
    def count(self) -> int:
        """Number of choices that were timed."""
        return len(self.entries) + (self.own_rows is not None)

    def take(self, other: TimedChoices) -> None:
        """Become equal to others."""
        self.entries = dict(other.entries)
        self.own_rows = other.own_rows

    def to_json(self) -> dict[str, Any]:
        entries = {
            str(entry): {name: value for name, value in asdict(one).items() if value is not None}
            for entry, one in self.entries.items()
        }
        return {"entries": entries, "own_rows": self.own_rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TimedChoices:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError or ValueError: it did not write this.
        """
        from appliance.kernels.packed_matmul.tiles import MatmulTile

        entries = {}
        for entry, kept in value["entries"].items():
            tile = kept.get("tile")
            if tile is not None:
                tile = MatmulTile(**{each.name: tile[each.name] for each in fields(MatmulTile)})
            entries[int(entry)] = LaunchChoice(**{**kept, "tile": tile})
        return cls(entries, value["own_rows"])


class Timeable(Protocol):
    """Work of a model that can be timed: a linear, a layer's experts, attention of decode."""

    @property
    def name(self) -> str:
        """The form, by which choices are kept: works of one form take the same time."""
        ...

    @property
    def has_splits(self) -> bool:
        """True if there are more candidates once the fastest of the first has run."""
        ...

    def entries(self, most_rows: int) -> tuple[int, ...]:
        """Return the sizes of the entries of its table that steps of so many rows reach."""
        ...

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        """Return the choices worth timing, the computed one first.

        Args:
            entry: of the table.
            best: of the choices without it, which has just run.
        """
        ...

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        """Return the most rows that our kernel always has, then rows to time the library with.

        None at all if the library is not asked in steps of so many rows.
        """
        ...

    def use(self, timed: TimedChoices) -> None:
        """Work by these choices from now on; what they lack is computed."""
        ...

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return random inputs of an entry's size, for all works of the form."""
        ...

    def run(self, *inputs: Any) -> object:
        """Do the work once."""
        ...


class OutOfTimeError(Exception):
    """No further measurement fits into the time that is left."""


class Timer:
    """Measures works, as long as its time lasts.

    A measurement begins only if one as long as the longest so far would end in time; the first may
    take longer, as it compiles kernels.

    Args:
        measure: seconds of works of one form, one after another, at an entry's size; None if a
            kernel cannot run on the card.
        seconds: for all measurements together.
        now: a clock of seconds.
    """

    def __init__(
        self,
        measure: Callable[[Sequence[Timeable], int], float | None],
        seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._now = measure, now
        self._begin, self._seconds, self._longest = now(), seconds, 0.0

    @property
    def left(self) -> float:
        """Seconds that are left; not below 0."""
        return max(0.0, self._begin + self._seconds - self._now())

    def seconds(self, members: Sequence[Timeable], entry: int) -> float | None:
        """Measure works of one form.

        Raises:
            OutOfTimeError: there is no time for it.
        """
        begin = self._now()
        if self.left <= self._longest:
            raise OutOfTimeError
        found = self._measure(members, entry)
        self._longest = max(self._longest, self._now() - begin)
        return found


def by_form(works: Iterable[Timeable]) -> dict[str, list[Timeable]]:
    """Return works by the names of their forms."""
    found: dict[str, list[Timeable]] = defaultdict(list)
    for work in works:
        found[work.name].append(work)
    return found


def missing(
    works: Iterable[Timeable], most_rows: int, known: Mapping[str, TimedChoices]
) -> list[tuple[int, str]]:
    """Return what is not timed yet: entries and names of forms, small sizes first.

    LIBRARY in place of an entry is the choice between our kernel and the library.
    """
    found = []
    for name, members in by_form(works).items():
        choices = known.get(name, TimedChoices())
        wanted = members[0].entries(most_rows)
        found += [(entry, name) for entry in wanted if entry not in choices.entries]
        if choices.own_rows is None and members[0].library_rows(most_rows):
            found.append((LIBRARY, name))
    return sorted(found)


def time_choices(
    works: Sequence[Timeable], most_rows: int, timer: Timer, known: Mapping[str, TimedChoices]
) -> dict[str, TimedChoices]:
    """Time the forms of a model's works until no time is left, and let the works use it.

    Entries of small sizes come first, as answers are most of a server's work. What there is no time
    for stays computed, until another call.

    Args:
        works: of the model.
        most_rows: of a step.
        timer: of the card.
        known: what was timed before, by the names of forms.

    Returns:
        What is known now.
    """
    members = by_form(works)
    found = {name: TimedChoices(dict(one.entries), one.own_rows) for name, one in known.items()}
    use_choices(works, found)
    for entry, name in missing(works, most_rows, known):
        choices = found.get(name, TimedChoices())
        try:
            if entry == LIBRARY:
                rows = members[name][0].library_rows(most_rows)
                choices.own_rows = _own_rows(members[name], choices, rows, timer)
            elif (best := _best_of_entry(members[name], choices, entry, timer)) is not None:
                choices.entries[entry] = best
        except OutOfTimeError:
            break
        finally:
            if choices.count:
                found[name] = choices
            use_choices(members[name], found)
    return found


def as_json(choices: Mapping[str, TimedChoices]) -> dict[str, Any]:
    """Return choices by the names of forms, for a file or a message."""
    return {name: each.to_json() for name, each in choices.items()}


def from_json(value: Mapping[str, Any]) -> dict[str, TimedChoices]:
    """Read what `as_json` returned; see `TimedChoices.from_json`."""
    return {name: TimedChoices.from_json(each) for name, each in value.items()}


def use_choices(works: Iterable[Timeable], known: Mapping[str, TimedChoices]) -> None:
    """Let works take what was timed for their forms."""
    for name, members in by_form(works).items():
        for work in members:
            work.use(known.get(name, TimedChoices()))


def _best_of_entry(
    members: Sequence[Timeable], choices: TimedChoices, entry: int, timer: Timer
) -> LaunchChoice | None:
    """Return the fastest choice for an entry; None if none can run."""

    def seconds(one: LaunchChoice) -> float:
        for work in members:
            work.use(TimedChoices({**choices.entries, entry: one}, ALWAYS_OWN))
        return timer.seconds(members, entry) or math.inf

    work = members[0]
    best, least = _fastest(work.candidates(entry), seconds)
    if least == math.inf:
        return None
    if work.has_splits:
        seconds(best)  # which tells its splits
        best, _ = _fastest(work.candidates(entry, best), seconds)
    return best


def _own_rows(
    members: Sequence[Timeable], choices: TimedChoices, tried: Sequence[int], timer: Timer
) -> int | None:
    """Return up to how many rows the library is slower; None if it cannot be timed."""
    found = tried[0]
    for rows in tried[1:]:
        times = []
        for most in (ALWAYS_OWN, tried[0]):  # our kernel, then the library
            for work in members:
                work.use(TimedChoices(choices.entries, most))
            times.append(timer.seconds(members, rows))
        ours, library = times
        if ours is None or library is None:
            return None
        if ours <= library:
            found = rows
    return found


def _fastest(tried: Sequence[T], seconds: Callable[[T], float]) -> tuple[T, float]:
    """Return what takes least, and its time; the first if others gain hardly anything."""
    rounds = [[seconds(one) for one in tried] for _ in range(ROUNDS)]
    times = [min(each) for each in zip(*rounds, strict=True)]
    best = min(range(len(tried)), key=times.__getitem__)
    place = best if times[best] < times[0] * (1 - LEAST_GAIN) else 0
    return tried[place], times[place]
