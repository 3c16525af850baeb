"""The console that Textual renders with, whose tracebacks show no local values."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import COLOR_SYSTEMS, Console
from rich.traceback import Traceback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.color import ColorSystem
    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.traceback import Trace


class PrivateConsole(Console):
    """Hides local values in tracebacks: they may hold a prompt or a key."""

    def __init__(self, system: ColorSystem) -> None:
        (name,) = (name for name, one in COLOR_SYSTEMS.items() if one is system)
        super().__init__(
            color_system=name,  # type: ignore[arg-type]  # one of its literals
            file=io.StringIO(), force_terminal=True, highlight=False, emoji=False, safe_box=False,
        )  # fmt: skip

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Traceback):
            _drop_locals(renderable.trace)
        return super().render(renderable, options)


def _drop_locals(trace: Trace) -> None:
    for stack in trace.stacks:
        for frame in stack.frames:
            frame.locals = None
        for one in stack.exceptions:
            _drop_locals(one)
