"""PromptPictures of a request: their pixels, and the prompt's rows that they become.

Such a row has no token. In a sequence its id is negative and made of the picture's content, so that
caches which compare ids tell pictures apart and meet the same one again. Imports no torch.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from appliance.media.sizing import Canvas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TEXTS_ONLY = (
    "this model reads texts only; leave the pictures out, or serve a model that takes them, of GGUF"
    " models one with its mmproj file beside it, and without --no-images"
)
MOST_PIXEL_BYTES = 512 << 20  # of a request's pictures together, after resizing
_ID_BYTES = 8
_ID_BITS = 62
_KEPT_SPANS = 64  # whose ids are kept: a conversation's pictures come again with each turn


class CanvasPixels(msgspec.Struct, frozen=True):
    """Pixels that the tower turns into rows at once: a picture, or all equal tiles of one.

    Attributes:
        key: of the content, and of all that is done to it before the tower.
        pixels: (height, width, 3) bytes, as the canvas says.
        cells: rows and columns of cells in a tile, each of which becomes a row of the prompt.
    """

    key: bytes
    canvas: Canvas
    pixels: bytes
    cells: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.canvas.tiles * self.cells[0] * self.cells[1]


class PictureSpan(msgspec.Struct, frozen=True):
    """Consecutive rows of a prompt that are consecutive cells of a canvas.

    Attributes:
        start: the first row's place in the prompt.
        canvas: its place among the request's.
        first: the first row's cell.
    """

    start: int
    length: int
    canvas: int
    first: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length


class PromptPictures(msgspec.Struct, frozen=True):
    """The pictures of a prompt; spans are in order, and no two share a row."""

    canvases: tuple[CanvasPixels, ...]
    spans: tuple[PictureSpan, ...]

    @property
    def num_rows(self) -> int:
        return sum(span.length for span in self.spans)

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return a prompt's ids, with those of the pictures' rows in place of placeholders."""
        ids = list(token_ids)
        for span in self.spans:
            key = self.canvases[span.canvas].key
            ids[span.start : span.stop] = _row_ids(key, span.first, span.length)
        return ids

    def within(self, first: int, last: int) -> Iterator[tuple[range, PictureSpan]]:
        """Yield the rows of each span that lie in [first, last), with the span."""
        for span in self.spans:
            rows = range(max(span.start, first), min(span.stop, last))
            if rows:
                yield rows, span


@lru_cache(maxsize=_KEPT_SPANS)
def _row_ids(key: bytes, first: int, length: int) -> tuple[int, ...]:
    return tuple(row_id(key, cell) for cell in range(first, first + length))


def row_id(key: bytes, cell: int) -> int:
    """Return the id of a picture's row: below 0, and equal for equal contents alone."""
    digest = blake2b(key + cell.to_bytes(4, "little"), digest_size=_ID_BYTES).digest()
    return -1 - (int.from_bytes(digest, "little") >> (8 * _ID_BYTES - _ID_BITS))
