"""Reads waiting sequences' blocks from disk into host memory before they start.

A sequence waits no longer than computing the tokens would take. Imports no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.tiers.host_memory import HostBlock
from appliance.engine.tiers.resume import wanted_from_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import Rates
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.tiers.disk_tier import DiskTier, ReadJob
    from appliance.engine.tiers.host_memory import HostStore

# Computing fewer takes about as long as finding and opening their files.
MIN_READ_TOKENS = 64
# Seconds that a sequence waits at least: opening files on a disk that has spun down takes as long.
MIN_WAIT = 5.0
_READ_SECONDS = 0.01  # per wait for the disk, between checks for other events

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reading:
    job: ReadJob
    num_tokens: int  # that need not be computed
    since: float | None = None  # monotonic seconds


class ReadAhead:
    """The sequences that wait for the disk.

    Args:
        host: receives the blocks, for which room is reserved.
        rates: the speed of computing instead.
        disk: None has no blocks.
    """

    def __init__(
        self, blocks: BlockManager, host: HostStore, rates: Rates, disk: DiskTier | None
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._rates = rates
        self._disk = disk
        self._reading: dict[Sequence, _Reading] = {}
        self._late: ReadJob | None = None  # the latest one that nobody waits for any more

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._reading)

    def begin(self, sequence: Sequence) -> bool:
        """Start to read a chain's blocks; return True if the sequence must wait."""
        wanted, gain = self._wanted(sequence)
        if not wanted or self._disk is None or not self._host.reserve(wanted):
            return False
        job = self._disk.read(wanted, sequence)
        self._reading[sequence] = _Reading(job, gain * self._blocks.block_size)
        return True

    def num_readable(self, sequence: Sequence) -> int:
        """Count the leading tokens of a new sequence that it would have after `begin`."""
        wanted, gain = self._wanted(sequence)
        if not wanted:
            return 0
        size, states = self._blocks.block_size, self._blocks.states
        depth = len(self._blocks.index.find_chain(sequence))
        chain = sequence.block_hashes[: sequence.num_reusable // size]
        if states is not None:
            return (states.checkpoints.depth(chain[:depth]) + gain) * size
        for content in chain[depth:]:
            if content not in wanted and self._host.get(content) is None:
                break
            depth += 1
        return depth * size

    def _wanted(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return the content to read for a sequence, and the blocks gained; nothing if few.

        Reads nothing while the disk is still at a read that took too long.
        """
        if self._disk is None or self._late in self._disk.unfinished:
            return [], 0
        wanted, gain = wanted_from_disk(sequence, self._blocks, self._host, self._disk)
        if self._blocks.states is None:
            del wanted[self._host.room :]
            gain = len(wanted)
        if gain * self._blocks.block_size < MIN_READ_TOKENS:
            return [], 0
        return wanted, gain

    def take(self, now: float) -> Iterator[tuple[Sequence, list[bytes]]]:
        """Yield sequences that wait no longer, with the content reserved in host memory.

        Content that failed to load is missing there.

        Args:
            now: monotonic seconds.
        """
        if self._disk is None:
            return
        for job in self._disk.take_read():
            if job.cancelled:
                self._host.release(job.hashes)
                continue
            del self._reading[job.sequence]
            for content, data in job.found:
                if self._host.takes(content):
                    self._host.put(content, HostBlock(SavedBlock(data), from_disk=True))
            yield job.sequence, job.hashes
        for sequence in self._overdue(now):
            yield sequence, []

    def cancel(self, sequence: Sequence) -> bool:
        """Give up a sequence's read; return False if there is none."""
        reading = self._reading.pop(sequence, None)
        if reading is not None:
            reading.job.cancelled = True
        return reading is not None

    def wait(self) -> bool:
        """Wait briefly for the disk; return False if no sequence waits for it."""
        if not self._reading or self._disk is None:
            return False
        self._disk.wait_for_read(_READ_SECONDS)
        return True

    def _overdue(self, now: float) -> list[Sequence]:
        """Give up the reads that take longer than computing would."""
        overdue, prefill = [], self._rates.prefill
        for sequence, reading in tuple(self._reading.items()):
            if reading.since is None:
                reading.since = now
            waited, num_tokens = now - reading.since, reading.num_tokens
            if waited < max(MIN_WAIT, num_tokens / prefill if prefill else 0.0):
                continue
            self.cancel(sequence)
            self._late = reading.job
            overdue.append(sequence)
            logger.warning(
                "the disk of KV blocks has not answered for %.0f s: computing %d tokens instead",
                waited,
                num_tokens,
            )
        return overdue
