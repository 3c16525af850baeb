"""Positions of rows in time, height and width, where a prompt has pictures (M-RoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.engine.nouns.picture import PromptPictures


@dataclass(frozen=True, slots=True)
class RowAxes:
    """Positions in time, height and width of a prompt's rows, as Qwen2-VL counts them.

    Text has one position for all three. A picture's rows share the time at which it begins, and
    count rows and columns from there; the text behind goes on after the largest.

    Attributes:
        shifts: how much less than its place a row's position is: before the first picture, and
            after each.
    """

    pictures: PromptPictures
    shifts: tuple[int, ...]

    @classmethod
    def of(cls, pictures: PromptPictures) -> RowAxes:
        saved = []
        for span in pictures.spans:
            cells = pictures.canvases[span.canvas].cells
            saved.append(span.length - max(cells))
        return cls(pictures, tuple(accumulate(saved, initial=0)))

    def __call__(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions of rows [first, last), prompt or answer: (3, last - first)."""
        spans = self.pictures.spans
        places = np.arange(first, last)
        behind = np.searchsorted([span.stop for span in spans], places, side="right")
        found = np.tile(places - np.array(self.shifts)[behind], (3, 1))
        for index, span in enumerate(spans):
            rows = range(max(span.start, first), min(span.stop, last))
            if not rows:
                continue
            columns = self.pictures.canvases[span.canvas].cells[1]
            cells = np.arange(rows.start, rows.stop) - span.start
            begin = span.start - self.shifts[index]
            own = slice(rows.start - first, rows.stop - first)
            found[0, own] = begin
            found[1, own] = begin + cells // columns
            found[2, own] = begin + cells % columns
        return found
