"""Reads waiting sequences' blocks from disk into host memory before they start.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.moves import SavedBlock
from appliance.engine.tiers.host_store import HostBlock
from appliance.engine.tiers.resume import wanted_from_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.sequence import Sequence
    from appliance.engine.tiers.disk_tier import DiskTier, ReadJob
    from appliance.engine.tiers.host_store import HostStore

# Computing fewer takes about as long as finding and opening their files.
MIN_READ_TOKENS = 64
_READ_SECONDS = 0.01  # per wait for the disk, between checks for other events


class ReadAhead:
    """The sequences that wait for the disk.

    Args:
        host: receives the blocks, for which room is reserved.
        disk: None has no blocks.
    """

    def __init__(self, blocks: BlockManager, host: HostStore, disk: DiskTier | None) -> None:
        self._blocks = blocks
        self._host = host
        self._disk = disk
        self._jobs: dict[Sequence, ReadJob] = {}

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._jobs)

    def begin(self, sequence: Sequence) -> bool:
        """Start to read a chain's blocks; return True if the sequence must wait."""
        if self._disk is None:
            return False
        wanted, gain = wanted_from_disk(sequence, self._blocks, self._host, self._disk)
        if self._blocks.states is None:
            del wanted[self._host.room :]
            gain = len(wanted)
        if not wanted or gain * self._blocks.block_size < MIN_READ_TOKENS:
            return False
        if not self._host.reserve(wanted):
            return False
        self._jobs[sequence] = self._disk.read(wanted, sequence)
        return True

    def take(self) -> Iterator[tuple[Sequence, list[bytes]]]:
        """Yield sequences whose reads have ended, with the content reserved in host memory.

        Content that failed to load is missing there.
        """
        if self._disk is None:
            return
        for job in self._disk.take_read():
            if job.cancelled:
                self._host.release(job.hashes)
                continue
            del self._jobs[job.sequence]
            for content, data in job.found:
                if self._host.takes(content):
                    self._host.put(content, HostBlock(SavedBlock(data), from_disk=True))
            yield job.sequence, job.hashes

    def cancel(self, sequence: Sequence) -> bool:
        """Give up a sequence's read; return False if there is none."""
        job = self._jobs.pop(sequence, None)
        if job is not None:
            job.cancelled = True
        return job is not None

    def wait(self) -> bool:
        """Wait briefly for the disk; return False if no sequence waits for it."""
        if not self._jobs or self._disk is None:
            return False
        self._disk.wait_for_read(_READ_SECONDS)
        return True
