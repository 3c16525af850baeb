"""Captures decode steps as graphs, one per padded batch size.

All are captured while the model is loaded, about a tenth of a second each: no request waits for
one. A size without a graph, for want of memory, runs eagerly.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from appliance.engine.run.device import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.run.device import Device, Graph

logger = logging.getLogger(__name__)

# Padding rows cost next to nothing below the width of a tensor core's tile.
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48)
_STEP = 32  # beyond: 64, 96, 128, ...


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes that decode batches are padded to; the last one holds any batch."""
    sizes = (*_SMALL, *range(2 * _STEP, max_num_seqs + _STEP, _STEP))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphCache:
    """Graphs by batch size, under a bound on their memory.

    Args:
        sizes: buckets, rising.
        limit_bytes: no graph is captured once they take this much; 0 turns graphs off.
    """

    def __init__(self, device: Device, sizes: tuple[int, ...], limit_bytes: int) -> None:
        self._device = device
        self.sizes = sizes
        self._limit_bytes = limit_bytes
        self._graphs: dict[int, Graph] = {}
        self.num_bytes = 0

    def bucket(self, num_rows: int) -> int:
        """Return the smallest size that holds a batch."""
        return next(size for size in self.sizes if size >= num_rows)

    def run(self, bucket: int, function: Callable[[], None]) -> None:
        """Replay the graph of a size, or call the function it would capture."""
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
            return
        function()

    @property
    def has_room(self) -> bool:
        """False once graphs take what they may, or one could not be captured."""
        return self.num_bytes < self._limit_bytes

    def capture(self, bucket: int, function: Callable[[], None]) -> None:
        """Capture the step of a size; after a failure, none is captured any more."""
        # A capture releases unused reserves, which would hide what the graph takes.
        before = self._device.begin_peak()
        try:
            self._graphs[bucket] = self._device.capture(function)
        except (MemoryError, CaptureError) as error:
            logger.warning("no more CUDA graphs: %s", error)
            self._limit_bytes = 0
            return
        self.num_bytes += max(0, self._device.memory_in_use() - before)
        logger.debug("captured decode steps of %d, %.0f MiB in all", bucket, self.num_bytes / 2**20)

    @property
    def captured(self) -> tuple[int, ...]:
        return tuple(sorted(self._graphs))
