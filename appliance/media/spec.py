"""The description of one model's preprocessing, and of the prompt around a picture: plain data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.media.sizing import TokenRange, row_limit

if TYPE_CHECKING:
    from appliance.media.sizing import Canvas, SizeRule

VERSION = 1  # of all that changes pixels here; part of every digest
_LOW = 256  # image rows at most for little detail


class ImageDetail(StrEnum):
    """A request's wish, in OpenAI's words; AUTO, HIGH and ORIGINAL mean all that is allowed."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"
    ORIGINAL = "original"


@dataclass(frozen=True, slots=True)
class PromptWords:
    """Texts around the image rows in the prompt, of control tokens and newlines.

    Attributes:
        placeholder: the template writes it once for each picture; all of this replaces it.
        before: all rows.
        after: all rows.
        row_end: behind each line of cells but the last.
        tile: before a tile, with `{row}` and `{column}` from 1.
        tile_row_end: behind each line of tiles.
        view: before the view of the whole that follows tiles.
        alone: before a picture that was not cut.
        beside: texts before and behind all that, without control tokens, which tokens may share
            with the prompt's own text.
    """

    placeholder: str
    before: str = ""
    after: str = ""
    row_end: str = ""
    tile: str = ""
    tile_row_end: str = ""
    view: str = ""
    alone: str = ""
    beside: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A text, perhaps empty, and the number of image rows behind it."""

    text: str
    rows: int


@dataclass(frozen=True, slots=True)
class ImageProcessorSpec:
    """The way of a picture to patches, and of its rows into the prompt.

    Attributes:
        size_rule: plans the canvases.
        patch: pixels along the side of a patch.
        resample: Pillow's number of the filter: 1 Lanczos, 2 bilinear, 3 bicubic.
        rescale: factor of the values from 0 to 255.
        mean: of each channel after that; None with `std` None, where values are not normalised.
        std: of each channel.
        block: patches along the side of a square that come one behind the other; 1 is raster order.
        channels_last: a patch is (height, width, channel); otherwise (channel, height, width).
        words: around the rows.
    """

    size_rule: SizeRule
    patch: int
    resample: int
    rescale: float
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    block: int
    channels_last: bool
    words: PromptWords

    def canvases(self, height: int, width: int) -> tuple[Canvas, ...]:
        """Plan the canvases of a picture, as it stands upright.

        Raises:
            ImageError: the model cannot take its ratio.
        """
        return self.size_rule.plan(height, width)

    def rows(self, canvases: tuple[Canvas, ...]) -> int:
        """Count the rows that a picture's canvases become in the prompt."""
        return sum(canvas.tiles * self._tile_rows(canvas) for canvas in canvases)

    def segments(self, canvases: tuple[Canvas, ...]) -> tuple[PromptSegment, ...]:
        """Lay out what replaces the placeholder: texts, each with the rows behind it."""
        words = self.words
        text, found = words.before, list[PromptSegment]()
        for canvas in canvases:
            if canvas.tiles == 1:
                text += words.view if len(canvases) > 1 else words.alone
                found += self._lines(text, canvas)
                text = ""
                continue
            for row in range(1, canvas.rows + 1):
                for column in range(1, canvas.columns + 1):
                    text += words.tile.format(row=row, column=column)
                    found += self._lines(text, canvas)
                    text = ""
                text = words.tile_row_end
        return (*found, PromptSegment(text + words.after, 0))

    def narrowed(self, tokens: TokenRange) -> ImageProcessorSpec:
        """Keep pictures within a number of rows.

        Raises:
            ConfigError: the model cannot.
        """
        allowed = tokens.within(row_limit(self.size_rule))
        return replace(self, size_rule=self.size_rule.narrowed(allowed))

    def at_detail(self, detail: ImageDetail, allowed: TokenRange) -> ImageProcessorSpec:
        """Narrow to what a request asks for; little detail counts where the model knows it.

        Args:
            allowed: for all requests; its least also holds for little detail.

        Raises:
            ConfigError: the model cannot keep `allowed`.
        """
        spec = self.narrowed(allowed)
        if detail is not ImageDetail.LOW:
            return spec
        low = TokenRange(allowed.least, max(allowed.least, allowed.below(_LOW)))
        with contextlib.suppress(ConfigError):
            spec = self.narrowed(low)
        return spec

    def digest(self, canvases: tuple[Canvas, ...], pixels: tuple[bytes, ...]) -> bytes:
        """Hash a picture's content after the resize: 32 bytes.

        Copies of equal pixels in other files meet; pictures that differ in one value do not.
        """
        shape = [(canvas.height, canvas.width, canvas.rows, canvas.columns) for canvas in canvases]
        found = blake2b(repr((VERSION, shape)).encode(), digest_size=32)
        for part in pixels:
            found.update(part)
        return found.digest()

    def _tile_rows(self, canvas: Canvas) -> int:
        height, width = canvas.tile
        return (height // self.size_rule.cell) * (width // self.size_rule.cell)

    def _lines(self, text: str, canvas: Canvas) -> list[PromptSegment]:
        """A tile's rows, line by line where a word ends each."""
        if not self.words.row_end:
            return [PromptSegment(text, self._tile_rows(canvas))]
        lines, columns = (side // self.size_rule.cell for side in canvas.tile)
        return [
            PromptSegment(self.words.row_end if line else text, columns) for line in range(lines)
        ]
