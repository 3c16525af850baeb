"""Turns the pixels of a picture into rows: patches, the tower, one result for all tiles."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from appliance.media.patches import patches
from appliance.model.vision.tower import PatchGrid, PictureRows
from appliance.model.vision.workspace import tiles_at_once

if TYPE_CHECKING:
    from appliance.engine.nouns.picture import CanvasPixels
    from appliance.media.spec import ImageProcessorSpec
    from appliance.model.vision.tower import Tower


@dataclass(frozen=True, slots=True)
class PictureEncoder:
    """A tower, and what comes before it; safe in any thread.

    Attributes:
        processor: of the pixels.
    """

    tower: Tower
    processor: ImageProcessorSpec
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, canvas: CanvasPixels) -> PictureRows:
        """Encode a canvas, some tiles in each call of the tower.

        Raises:
            MemoryError: there is too little memory for it.
        """
        merge = self.tower.spec.merge
        tiles = patches(replace(self.processor, block=merge), canvas.canvas, canvas.pixels)
        rows, columns = (cells * merge for cells in canvas.cells)
        grids = [PatchGrid(tile, rows, columns) for tile in tiles]
        at_once = tiles_at_once(rows * columns)
        with self._alone:
            found = [
                one
                for first in range(0, len(grids), at_once)
                for one in self.tower(grids[first : first + at_once])
            ]
        return PictureRows.joined(found)
