"""Times how a card multiplies by packed weights best, in place of what is computed for it.

The tables of `tiles` and the model of `slices` were made without a GPU. For each form of a linear
this times, on the card: the tile of each entry of its table against those of the entries beside it,
the splits of the fastest one, and up to how many rows codes are widened in registers. All of them
are kernels that are compiled and proven for some number of rows. Imports no triton.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from appliance.kernels.packed_matmul.slices import WIDENED_ROWS
from appliance.kernels.packed_matmul.tiles import MatmulTile, choose_tile, tiles_of
from appliance.kernels.packed_matmul.variant import may_fold, product_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from appliance.kernels.packed_matmul.slices import LinearForm

LEAST_GAIN = 0.03  # share of the time; less is noise, and what was computed stays
DENSE_ROWS = (256, 512, 1024, 2048)  # of x, for which dense slices are tried
DENSE = 1 << 31  # in place of rows, and after all of them
WIDEST = 1 << 30  # rows: codes are always widened in registers
T = TypeVar("T")
TILE_FIELDS = tuple(each.name for each in fields(MatmulTile))


@dataclass(slots=True)
class TimedChoices:
    """Timed choices for one form of linears; those that are missing are computed.

    Attributes:
        tiles: what replaces an entry of the table, by its `max_rows`: a tile, and the splits, which
            None leaves to be computed.
        widened_rows: rows of x up to which codes are widened in registers; None: not timed.
    """

    tiles: dict[int, tuple[MatmulTile, int | None]] = field(default_factory=dict)
    widened_rows: int | None = None

    def to_json(self) -> dict[str, Any]:
        tiles = {
            str(rows): {**{name: getattr(tile, name) for name in TILE_FIELDS}, "splits": splits}
            for rows, (tile, splits) in self.tiles.items()
        }
        return {"tiles": tiles, "widened_rows": self.widened_rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TimedChoices:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError or ValueError: it did not write this.
        """
        tiles = {
            int(rows): (
                MatmulTile(**{name: kept[name] for name in TILE_FIELDS}),
                kept["splits"],
            )
            for rows, kept in value["tiles"].items()
        }
        return cls(tiles, value["widened_rows"])


class Timeable(Protocol):
    """A linear that can be timed: `launch.TiledLinear`."""

    @property
    def form(self) -> LinearForm: ...

    def use(self, timed: TimedChoices) -> None:
        """Multiply by these choices from now on; what they lack is computed."""

    def splits_for(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """Return the splits for so many rows of x, and those that could be."""


@dataclass(frozen=True, slots=True)
class Timer:
    """A card, as `time_choices` asks it.

    Attributes:
        capability: compute capability (86 is 8.6).
        seconds: of a product of so many rows with each of some linears, one after another; None if
            a kernel cannot run on the card.
        is_over: no time is left.
    """

    capability: int
    seconds: Callable[[Sequence[Timeable], int], float | None]
    is_over: Callable[[], bool]


def name_of(form: LinearForm) -> str:
    """Return a form's name, by which choices are kept."""
    gated = " gated" if form.gated else ""
    codes = f"{form.kind.value} {form.params_kind.value} {form.group_size}"
    return f"{form.out_features} x {form.in_features} {codes}{gated}"


def by_form(linears: Iterable[Timeable]) -> dict[str, list[Timeable]]:
    """Return linears by the names of their forms."""
    found: dict[str, list[Timeable]] = defaultdict(list)
    for linear in linears:
        found[name_of(linear.form)].append(linear)
    return found


def entries(form: LinearForm, capability: int, most_rows: int) -> tuple[int, ...]:
    """Return the most rows of each entry of a form's table that steps reach."""
    group = product_group(form.kind, form.group_size)
    tiles = tiles_of(capability, group, may_fold=may_fold(form.kind, form.group_size))
    reached = [0, *(tile.max_rows for tile in tiles)]
    return tuple(rows for before, rows in pairwise(reached) if before < most_rows)


def candidates(form: LinearForm, rows: int, capability: int) -> tuple[MatmulTile, ...]:
    """Return the tiles worth timing for an entry: its own first, then those of the ones beside it.

    One that would round weights otherwise is left out.
    """
    group, folds = product_group(form.kind, form.group_size), may_fold(form.kind, form.group_size)
    table = tiles_of(capability, group, may_fold=folds)
    place = next(number for number, tile in enumerate(table) if rows <= tile.max_rows)
    own = choose_tile(rows, capability, group, may_fold=folds)
    beside = (*table[max(place - 1, 0) : place], *table[place + 1 : place + 2])
    others = (replace(tile, max_rows=own.max_rows) for tile in beside if tile.folds == own.folds)
    return tuple(dict.fromkeys((own, *others)))


def missing(
    linears: Iterable[Timeable], most_rows: int, capability: int, known: Mapping[str, TimedChoices]
) -> list[tuple[int, str]]:
    """Return what is not timed yet: rows of an entry and a form's name, few rows first.

    DENSE in place of rows is the choice between codes widened in registers and dense slices.
    """
    found = []
    for name, members in by_form(linears).items():
        choices, form = known.get(name, TimedChoices()), members[0].form
        rows = entries(form, capability, most_rows)
        found += [(each, name) for each in rows if each not in choices.tiles]
        if choices.widened_rows is None and most_rows >= DENSE_ROWS[0]:
            found.append((DENSE, name))
    return sorted(found)


def time_choices(
    linears: Sequence[Timeable], most_rows: int, timer: Timer, known: Mapping[str, TimedChoices]
) -> dict[str, TimedChoices]:
    """Time the forms of a model's linears until no time is left, and let the linears use it.

    Entries for few rows come first, as answers are most of a server's work. What there is no time
    for stays computed, until another call.

    Args:
        linears: of the model.
        most_rows: of a step.
        timer: of the card.
        known: what was timed before, by the names of forms.

    Returns:
        What is known now.
    """
    members = by_form(linears)
    found = {name: TimedChoices(dict(one.tiles), one.widened_rows) for name, one in known.items()}
    use_choices(linears, found)
    for rows, name in missing(linears, most_rows, timer.capability, known):
        if timer.is_over():
            break
        choices = found.setdefault(name, TimedChoices())
        if rows == DENSE:
            choices.widened_rows = _widened_rows(members[name], choices, most_rows, timer)
        else:
            _time_entry(members[name], choices, rows, timer)
        use_choices(members[name], found)
    return found


def use_choices(linears: Iterable[Timeable], known: Mapping[str, TimedChoices]) -> None:
    """Let linears multiply by what was timed for their forms."""
    for name, members in by_form(linears).items():
        for linear in members:
            linear.use(known.get(name, TimedChoices()))


def _time_entry(
    members: Sequence[Timeable], choices: TimedChoices, rows: int, timer: Timer
) -> None:
    """Time the tiles of an entry, then other splits of the fastest."""

    def seconds(tile: MatmulTile, splits: int | None) -> float:
        tried = TimedChoices({**choices.tiles, rows: (tile, splits)}, WIDEST)
        for linear in members:
            linear.use(tried)
        return timer.seconds(members, rows) or math.inf

    form = members[0].form
    tiles = candidates(form, rows, timer.capability)
    tile, least = _fastest(tiles, lambda tile: seconds(tile, None))
    if least == math.inf:
        return
    seconds(tile, None)  # whose splits are asked for next
    computed, others = members[0].splits_for(rows)
    place = others.index(computed)
    tried = (computed, *others[max(place - 1, 0) : place], *others[place + 1 : place + 2])
    splits, _ = _fastest(tried, lambda splits: seconds(tile, splits))
    choices.tiles[rows] = tile, splits


def _widened_rows(
    members: Sequence[Timeable], choices: TimedChoices, most_rows: int, timer: Timer
) -> int | None:
    """Return up to how many rows dense slices are slower; None if none can be timed."""
    widened = WIDENED_ROWS
    for rows in (rows for rows in DENSE_ROWS if rows <= most_rows):
        times = []
        for most in (WIDEST, WIDENED_ROWS):  # all widened, then all dense
            for linear in members:
                linear.use(TimedChoices(choices.tiles, most))
            times.append(timer.seconds(members, rows))
        by_codes, by_slices = times
        if by_codes is None or by_slices is None:
            return None
        if by_codes <= by_slices:
            widened = rows
    return WIDEST if widened == DENSE_ROWS[-1] else widened


def _fastest(tried: Sequence[T], seconds: Callable[[T], float]) -> tuple[T, float]:
    """Return what takes least, and its time; the first if others gain hardly anything."""
    times = [seconds(one) for one in tried]
    best = min(range(len(tried)), key=times.__getitem__)
    place = best if times[best] < times[0] * (1 - LEAST_GAIN) else 0
    return tried[place], times[place]
