"""Bar graphs of recent values in one or two colours, in few bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, height: int, top: float) -> list[str]:
    """Draw a bar graph as lines of text, the newest value at the right edge.

    Args:
        values: oldest first; only the last `width` are drawn.
        height: lines of eight steps each.
        top: value of a full bar; any value above zero shows at least one step.
    """
    shown = values[max(0, len(values) - width) :] if width > 0 else ()
    steps = [_steps(value, 8 * height, top) for value in shown]
    lines = []
    for line in reversed(range(height)):
        bars = "".join(_EIGHTHS[min(max(step - 8 * line, 0), 8)] for step in steps)
        lines.append(bars.rjust(width))
    return lines


def stacked(
    lower: Sequence[float], upper: Sequence[float], width: int, height: int, top: float,
    colors: tuple[str, str],
) -> list[Text]:  # fmt: skip
    """Draw a bar graph whose bars have two parts, the newest at the right edge.

    Args:
        lower: oldest first; only the last `width` are drawn.
        upper: the part on top of each.
        height: lines of eight steps each.
        top: sum of a full bar.
        colors: of the lower and the upper part.
    """
    count = min(len(lower), len(upper), max(0, width))
    below = [_steps(value, 8 * height, top) for value in lower[len(lower) - count :]]
    sums = zip(lower[len(lower) - count :], upper[len(upper) - count :], strict=True)
    ends = [_steps(one + other, 8 * height, top) for one, other in sums]
    lines = []
    for line in reversed(range(height)):
        text = Text(" " * (width - count))
        for first, last in zip(below, ends, strict=True):
            low, high = (min(max(step - 8 * line, 0), 8) for step in (first, last))
            if low == 0:
                text.append(_EIGHTHS[high], colors[1])
            elif high == 8:  # the parts meet in this cell
                text.append(_EIGHTHS[low], f"{colors[0]} on {colors[1]}")
            else:
                text.append(_EIGHTHS[high], colors[0])
        lines.append(text)
    return lines


def _steps(value: float, full: int, top: float) -> int:
    if value <= 0 or top <= 0:
        return 0
    return max(1, round(min(full, full * value / top)))
