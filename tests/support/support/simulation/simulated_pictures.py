"""Pictures in simulated conversations: a few contents, some nearly equal, and what their rows hold.

What a row holds follows from the picture's pixels alone, and not from the ids by which caches tell
pictures apart: a wrong picture is a wrong row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Ordered
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.media.processor_config import image_processor_of
from appliance.media.sizing import Canvas
from appliance.model.vision.tower import PictureRows

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence

Row = tuple[bytes, int]  # a picture's pixels, and the place of a cell in it
Element = int | Row  # of a prompt

_SPEC = image_processor_of(
    {"image_processor_type": "Qwen2VLImageProcessor"}, {}, {"model_type": "qwen3_vl"}
)
_PIXEL = 3  # bytes; a cell has one pixel
_CONTENTS = 4
_ROW_BYTES = 8  # of rows that are kept


def picture(rng: random.Random) -> list[Element]:
    """All rows of a picture, which others resemble in all but one byte."""
    cells = rng.choice([1, 2, 2, 5])
    pixels = bytearray([rng.randrange(_CONTENTS)] * (_PIXEL * cells))
    if rng.random() < 0.3:
        pixels[rng.choice([0, -1])] ^= 1
    return [(bytes(pixels), cell) for cell in range(cells)]


def compiled(elements: Ordered[Element]) -> tuple[tuple[int, ...], PromptPictures | None]:
    """Return a prompt's ids and pictures."""
    ids = tuple(one if isinstance(one, int) else 0 for one in elements)
    starts = [
        place
        for place, one in enumerate(elements)
        if not isinstance(one, int) and (place == 0 or elements[place - 1] != (one[0], one[1] - 1))
    ]
    spans: list[PictureSpan] = []
    canvases: list[CanvasPixels] = []
    for start, stop in pairwise([*starts, len(elements)]):
        pixels, first = elements[start]  # type: ignore[misc]
        length = next(
            (n for n, one in enumerate(elements[start:stop]) if isinstance(one, int)), stop - start
        )
        spans.append(PictureSpan(start, length, len(spans), first))
        canvases.append(canvas_of(pixels))
    return ids, PromptPictures(tuple(canvases), tuple(spans)) if spans else None


@lru_cache(maxsize=256)
def canvas_of(pixels: bytes) -> CanvasPixels:
    cells = len(pixels) // _PIXEL
    canvas = Canvas(((1, cells),))
    return CanvasPixels(_SPEC.digest((canvas,), (pixels,)) + b"\0", canvas, pixels, (1, cells))


def elements_of(request: Request) -> list[Element]:
    """Return the elements of a request's prompt."""
    elements: list[Element] = list(request.prompt_token_ids)
    if request.pictures is not None:
        for span in request.pictures.spans:
            pixels = request.pictures.canvases[span.canvas].pixels
            cells = range(span.first, span.first + span.length)
            elements[span.start : span.stop] = [(pixels, cell) for cell in cells]
    return elements


@lru_cache(maxsize=4096)
def row_of(pixels: bytes, cell: int) -> int:
    """Return what a row of a picture is to the virtual model, as a token is one."""
    digest = blake2b(pixels + bytes((cell,)), digest_size=_ROW_BYTES).digest()
    return -(int.from_bytes(digest, "little") >> 2)


def prompt_of(request: Request) -> list[int]:
    """Return what the model reads of a prompt: tokens, and rows of pictures."""
    if request.pictures is None:
        return list(request.prompt_token_ids)
    return [one if isinstance(one, int) else row_of(*one) for one in elements_of(request)]


def read_of(sequence: Sequence, start: int, stop: int) -> list[int]:
    """Return what the model reads of a sequence from one place to another."""
    if sequence.request.pictures is None:
        return sequence.token_ids[start:stop]
    prompt = prompt_of(sequence.request)
    return [*prompt, *sequence.token_ids[len(prompt) :]][start:stop]


def encode(canvas: CanvasPixels) -> PictureRows:
    """See `PictureEncoder`; the virtual tower."""
    rows = [row_of(canvas.pixels, cell) for cell in range(canvas.num_rows)]
    return PictureRows(np.array(rows, dtype=np.int64).reshape(-1, 1))
