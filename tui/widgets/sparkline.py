"""A bar graph of recent values in one colour on the background: few bytes over a slow line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, height: int, top: float) -> list[str]:
    """Lines of a bar graph, the newest value at the right edge.

    Args:
        values: oldest first; only the last `width` are drawn.
        width: cells.
        height: lines; each shows eight steps.
        top: value that fills the whole height. Anything above zero shows at least one step.
    """
    shown = values[max(0, len(values) - width) :] if width > 0 else ()
    steps = [_steps(value, 8 * height, top) for value in shown]
    lines = []
    for line in reversed(range(height)):
        bars = "".join(_EIGHTHS[min(max(step - 8 * line, 0), 8)] for step in steps)
        lines.append(bars.rjust(width))
    return lines


def _steps(value: float, full: int, top: float) -> int:
    if value <= 0 or top <= 0:
        return 0
    return max(1, round(min(full, full * value / top)))
