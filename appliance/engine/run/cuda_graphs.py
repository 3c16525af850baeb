"""Captures steps as graphs: decode steps by padded batch size, and small mixed ones.

Captures all during loading, at about a tenth of a second each, so no request waits for one. A size
without a graph, for lack of memory, runs eagerly.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.run.device import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.nouns.limits import SchedulerLimits
    from appliance.engine.run.device import Device, Graph

logger = logging.getLogger(__name__)

# Padding rows cost almost nothing below the width of a tensor core's tile.
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48)
_STEP = 32  # beyond: 64, 96, 128, ...
# With more prompt rows the device takes longer for a step than the host takes to launch it.
PROMPT_ROWS = (32, 64, 128, 192, 256, 384, 512)
PROMPTS = 8  # sequences that share these rows
# With more rows, experts in host memory take so long that launches between them do not count: eight
# rows of Qwen3-30B-A3B read 130 MB there in each layer, 3 ms at 40 GB/s, and about twenty launches
# take 0.1 ms.
HOST_ROWS = 8
MOST_ROWS = 8  # of a sequence with drafts
VERIFIED_ROWS = (2, 4, MOST_ROWS)
MOST_VERIFYING = 16  # sequences: with more, rows for drafts seldom pay
# A size's rows, of the most that the scheduler gives a step: padding may exceed them, so that a
# chunk of a long prompt that fills a step has a graph with any number of answers beside it.
MOST_PADDED = 1.25


class StepSize(NamedTuple):
    """Room of a captured step.

    Attributes:
        num_singles: sequences with one row each.
        prompt_rows: rows of up to PROMPTS other sequences; 0 in a decode step.
        is_adapted: some may have adapters; other steps do not pay for that.
        draft_rows: more rows of the first sequences, then without prompts.
        rows_each: most rows of one of them.
    """

    num_singles: int
    prompt_rows: int = 0
    is_adapted: bool = False
    draft_rows: int = 0
    rows_each: int = 1

    @property
    def num_rows(self) -> int:
        return self.num_singles + self.draft_rows + self.prompt_rows

    @property
    def num_samples(self) -> int:
        """Rows that may sample: single ones, drafts, and each prompt's last."""
        return self.num_singles + self.draft_rows + (PROMPTS if self.prompt_rows else 0)

    def holds(self, other: StepSize) -> bool:
        """Return True if a step of another size can be padded to this one."""
        return (
            self.is_adapted == other.is_adapted
            and self.num_singles >= other.num_singles
            and self.prompt_rows >= other.prompt_rows
            and bool(self.draft_rows) == bool(other.draft_rows)
            and self.draft_rows >= other.draft_rows
            and self.rows_each >= other.rows_each
        )

    def num_prompts(self, block_size: int | None) -> int:
        """Return the number of sequences besides single ones; with a block size, cut at blocks."""
        if not self.prompt_rows:
            return 0
        return PROMPTS if block_size is None else self.prompt_rows // block_size + 2 * PROMPTS


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes to which decode batches are padded; the last one holds any batch."""
    sizes = (*_SMALL, *range(2 * _STEP, max_num_seqs + _STEP, _STEP))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def step_sizes(
    limits: SchedulerLimits,
    *,
    is_adapted: bool = False,
    calls_host: bool = False,
    is_recurrent: bool = False,
) -> tuple[StepSize, ...]:
    """Return the sizes to capture, by padding: the first that holds a step has the least.

    Args:
        is_adapted: capture everything again for steps with adapters.
        calls_host: each layer waits for the host; capture small decode steps only.
        is_recurrent: capture no steps with drafts, whose rows pass through states.
    """
    most = min(limits.max_num_seqs, HOST_ROWS) if calls_host else limits.max_num_seqs
    sizes = [StepSize(size) for size in buckets(most)]
    if not calls_host:
        # Each four times its predecessor; at least one sequence has the prompt.
        most = limits.max_num_seqs - 1
        singles = [*(size for size in (8, 32, 128, 512) if size < most), most]
        most_rows = limits.max_num_batched_tokens
        mixed = [StepSize(size, rows) for size in singles for rows in PROMPT_ROWS]
        sizes += [
            size
            for size in mixed
            if size.prompt_rows <= most_rows and size.num_rows <= MOST_PADDED * most_rows
        ]
        if limits.verifies and not is_recurrent:
            sizes += _verifying(limits)
    adapted = [size._replace(is_adapted=True) for size in sizes] if is_adapted else []
    return (*sizes, *adapted)


def _verifying(limits: SchedulerLimits) -> list[StepSize]:
    """Return the sizes of steps with drafts, of which there is room for a few."""
    room = min(limits.sample_rows, limits.max_num_batched_tokens)
    found = [
        StepSize(size, draft_rows=min(size * (rows - 1), room - size), rows_each=rows)
        for size in buckets(min(limits.max_num_seqs, MOST_VERIFYING))
        for rows in VERIFIED_ROWS
    ]
    return [size for size in found if size.draft_rows > 0]


class GraphCache:
    """Graphs by size, within a memory limit.

    Args:
        limit_bytes: capture none beyond this; 0 turns graphs off.
    """

    def __init__(self, device: Device, sizes: Iterable[StepSize], limit_bytes: int) -> None:
        self._device = device
        self.sizes = tuple(sizes)
        self._limit_bytes = limit_bytes
        self._graphs: dict[StepSize, Graph] = {}
        self.num_bytes = 0

    def size_of(self, step: StepSize) -> StepSize | None:
        """Return the size to which a step is padded; None leaves it unpadded."""
        for size in self.sizes:
            # Pads a decode step even without a graph: its sizes have kernels.
            if size.holds(step) and (
                size in self._graphs if step.num_rows > step.num_singles else not size.prompt_rows
            ):
                return size
        return None

    def run(self, size: StepSize, function: Callable[[], None]) -> None:
        """Replay a size's graph, or call the function that it would capture."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
            return
        function()

    @property
    def has_room(self) -> bool:
        """False once graphs reach the limit, or a capture failed."""
        return self.num_bytes < self._limit_bytes

    def capture(self, size: StepSize, function: Callable[[], None]) -> None:
        """Capture the step of a size; after a failure, capture nothing more."""
        # A capture releases unused reserves, which would hide the graph's memory.
        before = self._device.begin_peak()
        try:
            self._graphs[size] = self._device.capture(function)
        except (MemoryError, CaptureError) as error:
            logger.warning("no more CUDA graphs: %s", error)
            self._limit_bytes = 0
            return
        self.num_bytes += max(0, self._device.memory_in_use() - before)
        logger.debug("captured %s, %.0f MiB in all", size, self.num_bytes / 2**20)

    @property
    def captured(self) -> tuple[StepSize, ...]:
        return tuple(sorted(self._graphs))
