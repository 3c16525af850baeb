"""Rows that pictures became, kept by content, and given to the steps that read them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.rows.ragged import GivenRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.request import Request
    from appliance.engine.run.device import Device
    from appliance.model.vision.tower import PictureRows


class EncodedPictures:
    """Keeps what a tower made of pictures, the most recently used up to a limit.

    Args:
        encode: runs the tower.
        sees_ahead: rows of a picture see those that follow them.
    """

    def __init__(
        self,
        encode: Callable[[CanvasPixels], PictureRows],
        device: Device,
        *,
        limit_bytes: int,
        sees_ahead: bool = False,
    ) -> None:
        self._encode = encode
        self._device = device
        self._limit_bytes = limit_bytes
        self._sees_ahead = sees_ahead
        self._rows: OrderedDict[bytes, PictureRows] = OrderedDict()
        self._users: dict[str, frozenset[bytes]] = {}
        self.num_bytes = 0
        self.num_encoded = 0
        self.num_hits = 0

    def missing(
        self, request: Request, num_cached: Callable[[Request], int] | None = None
    ) -> list[CanvasPixels]:
        """Return the pictures of a request to encode before it starts; keep the others for it.

        Args:
            num_cached: counts a request's leading tokens that will not run; a picture among them
                is not encoded.
        """
        pictures = request.pictures
        assert pictures is not None
        canvases = {canvas.key: canvas for canvas in pictures.canvases}
        self._users[request.request_id] = frozenset(canvases)
        for key in canvases.keys() & self._rows.keys():
            self._rows.move_to_end(key)
            self.num_hits += 1
        missing = [canvas for key, canvas in canvases.items() if key not in self._rows]
        if not missing or num_cached is None:
            return missing
        first = num_cached(request)
        runs = {pictures.canvases[span.canvas].key for span in pictures.spans if span.stop > first}
        return [canvas for canvas in missing if canvas.key in runs]

    def forget(self, request_id: str) -> None:
        self._users.pop(request_id, None)

    def put(self, key: bytes, rows: PictureRows) -> None:
        """Keep a picture's rows."""
        if key not in self._rows:
            self.num_bytes += rows.nbytes
            self.num_encoded += 1
        self._rows[key] = rows

    @property
    def is_over(self) -> bool:
        """True if it keeps more than the limit."""
        return self.num_bytes > self._limit_bytes

    def trim(self, live: set[str]) -> None:
        """Drop rows beyond the limit, but none that one of these requests may need yet."""
        self._users = {one: keys for one, keys in self._users.items() if one in live}
        needed = frozenset[bytes]().union(*self._users.values())
        for key in [key for key in self._rows if key not in needed]:
            if not self.is_over:
                return
            self.num_bytes -= self._rows.pop(key).nbytes

    def given(self, scheduled: Sequences[ScheduledSequence]) -> GivenRows | None:
        """Return the embeddings of a step's rows of pictures; None if it has none."""
        parts: list[PictureRows] = []
        places: list[tuple[int, range, int]] = []  # first row, rows and their first embedding
        row, count = 0, 0
        for entry in scheduled:
            for rows, span, pictures in _of_entry(entry):
                found = self._of(pictures.canvases[span.canvas])
                first = span.first + rows.start - span.start
                parts.append(found.between(first, first + len(rows)))
                places.append((row + rows.start - entry.start, rows, count))
                count += len(rows)
            row += entry.num_tokens
        if not parts:
            return None
        sources = np.full(row, -1, dtype=np.int32)
        for begin, rows, place in places:
            sources[begin : begin + len(rows)] = np.arange(place, place + len(rows))
        addends = [part.addends for part in parts if part.addends is not None]
        return GivenRows(
            self._device.send(sources),
            arrays.cat([part.embeddings for part in parts]),
            arrays.cat(addends, dim=1) if addends else None,
        )

    def sees(self, scheduled: Sequences[ScheduledSequence]) -> Tensor | None:
        """Return the leading tokens that each row of a step sees, see `RaggedBatch`.

        None if no row sees more than those up to its own.
        """
        if not self._sees_ahead:
            return None
        seen = [np.arange(entry.start, entry.end, dtype=np.int32) + 1 for entry in scheduled]
        sees_more = False
        for own, entry in zip(seen, scheduled, strict=True):
            for rows, span, _ in _of_entry(entry):
                assert rows.stop == span.stop, "a step cuts a picture"
                own[rows.start - entry.start : rows.stop - entry.start] = span.stop
                sees_more = True
        return self._device.send(np.concatenate(seen)) if sees_more else None

    def _of(self, canvas: CanvasPixels) -> PictureRows:
        if canvas.key not in self._rows:  # dropped before a sequence that gave way starts again
            self.put(canvas.key, self._encode(canvas))
        return self._rows[canvas.key]


def _of_entry(
    entry: ScheduledSequence,
) -> Iterable[tuple[range, PictureSpan, PromptPictures]]:
    """Yield an entry's rows of pictures, as places in the prompt, with the span of each."""
    pictures = entry.sequence.request.pictures
    if pictures is None:
        return
    for rows, span in pictures.within(entry.start, entry.start + entry.num_own):
        yield rows, span, pictures
