"""Doors of the server: calls with inputs of a given shape and size, whose growth a test judges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.server.growth import CountedText, check_growth

from appliance.errors import ApplianceError

SECONDS, KNOWN_SECONDS = 0.02, 0.1  # processor seconds, for the largest input of a shape
SHAPES = int(os.environ.get("APPLIANCE_TEST_COSTS", "0"))
Make = Callable[[Any, int], Callable[[], object]]


class Door(NamedTuple):
    """A call, and the shapes of its inputs.

    Attributes:
        make: prepares a call from a shape and a size.
        size: the smallest, with which a call takes some hundred lines.
        known: shapes to try in any case, with larger inputs.
    """

    shapes: st.SearchStrategy[Any]
    make: Make
    size: int
    known: tuple[Any, ...]

    def measure(self, shape: Any, enough: float) -> None:
        self.make(shape, self.size)()  # makes what is made once, such as a compiled expression
        check_growth(lambda size: self.make(shape, size), self.size, enough)


class Doors(dict[str, Door]):
    """Doors by name."""

    def door(
        self, shapes: st.SearchStrategy[Any], size: int, *known: Any
    ) -> Callable[[Make], None]:
        """Register the function that follows."""

        def add(make: Make) -> None:
            name = make.__name__.strip("_").replace("_", " ")
            self[name] = Door(shapes, make, size, known)

        return add

    def check(self, name: str) -> None:
        """Measure known shapes and those that Hypothesis generates."""
        door = self[name]
        for shape in door.known:
            door.measure(shape, KNOWN_SECONDS)

        @settings(
            max_examples=SHAPES or 2,
            derandomize=not SHAPES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(door.shapes)
        def check(shape: Any) -> None:
            door.measure(shape, SECONDS)

        check()


UNITS = st.lists(
    st.text(st.sampled_from('ab \n"\\{}[](),:<>/|=1'), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


def lenient(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that ignores refusals, which must not cost more either."""

    def refusing() -> None:
        with contextlib.suppress(ApplianceError, msgspec.MsgspecError, ValueError, RecursionError):
            call()

    return refusing


def repeated(units: list[str], size: int) -> str:
    """Repeat some texts up to a length."""
    return "".join(islice(cycle(units), max(1, size // max(1, sum(map(len, units)) // len(units)))))


def halves(units: list[str], size: int) -> str:
    """Repeat the first text, then the others."""
    return repeated(units[:1], size // 2) + repeated(units[1:] or units, size // 2)


def names(kind: str, count: int) -> Iterator[CountedText]:
    """Yield names: all equal, all different, or a few repeated."""
    for number in range(count):
        yield CountedText(
            f"name_{0 if kind == 'equal' else number % 3 if kind == 'few' else number}"
        )


NAMES = st.sampled_from(["equal", "distinct", "few"])
