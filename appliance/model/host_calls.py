"""Runs the host's part of a step in its place, or where a capture of the device's part is cut."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class HostCalls:
    """The calls that a step makes to the host, between pieces of work for the device.

    A call takes and leaves tensors at fixed places, so a graph's replay can repeat it.
    """

    def __init__(self) -> None:
        self._cut: Callable[[Callable[[], None]], None] | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Run a call now, or hand it to whoever cuts."""
        if self._cut is None:
            call()
        else:
            self._cut(call)

    @contextmanager
    def cut_by(self, cut: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Hand calls to `cut` instead of running them."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None
