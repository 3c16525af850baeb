"""What the scheduler asks of the tiers below the cache: keep, find, bring back.

A preempted sequence's full blocks stay in the cache, by their hashes, as long as nobody needs
their place; those that have to go are kept in host memory until it is back, and so is its last
block, which has no hash. What the disk holds of a chain is read before its sequence may start.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.plan import BlockMove, HeldBlock
from appliance.engine.scheduling.policy import should_swap
from appliance.engine.sequence import SequenceStatus
from appliance.engine.tiers.disk_rule import num_on_disk
from appliance.engine.tiers.host_store import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.blocks.prefix_cache import Prefix
    from appliance.engine.rates import Rates
    from appliance.engine.sequence import Sequence
    from appliance.engine.tiers.disk_tier import DiskTier, ReadJob
    from appliance.engine.tiers.write_behind import WriteBehind
    from appliance.stats import EngineStats

# Fewer are computed in about the time that it takes to find and open their files.
MIN_READ_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Room in the tiers, and what a block takes there; bytes."""

    block_bytes: int
    open_bytes: int = 0  # of an open page
    host_bytes: int = 0
    keeps_evicted: bool = False  # in host memory, wanted or not


@dataclass(slots=True)
class _Kept:
    """What is reserved in host memory for a sequence that waits."""

    hashes: list[bytes] = field(default_factory=list)
    last: HeldBlock | None = None  # the block that is not full
    last_room: int = 0  # blocks


@dataclass(frozen=True, slots=True)
class _Loading:
    """A sequence that starts with content from outside, until its plan has run."""

    first: int  # index of the first block of those
    kept: _Kept | None
    num_kept: int


@dataclass(slots=True)
class TierCounters:
    """Totals; blocks unless said otherwise."""

    swaps: int = 0  # sequences whose preemption kept their blocks
    swapped_out: int = 0
    swapped_in: int = 0
    host_hits: int = 0  # tokens found in host memory at first admission
    disk_hits: int = 0  # tokens


class Tiers:
    """Host memory and disk behind one cache.

    Args:
        blocks: the cache's books.
        sizes: of what it holds and of host memory.
        rates: measured elsewhere.
        disk: files; None keeps nothing there.
        writes: what goes there.
    """

    def __init__(
        self,
        blocks: BlockManager,
        sizes: TierSizes,
        rates: Rates,
        disk: DiskTier | None = None,
        writes: WriteBehind | None = None,
    ) -> None:
        self.counters = TierCounters()
        self.rates = rates
        self.disk = disk
        self.writes = writes
        self._blocks = blocks
        self._sizes = sizes
        capacity = sizes.host_bytes // sizes.block_bytes
        self.host = HostStore(capacity, keeps_unwanted=sizes.keeps_evicted)
        self._last_room = 1 - (-sizes.open_bytes // sizes.block_bytes)
        self._kept: dict[Sequence, _Kept] = {}
        self._loading: dict[Sequence, _Loading] = {}  # on its way into the cache
        self._reading: dict[Sequence, ReadJob] = {}
        self._saves: list[BlockMove] = []
        blocks.pool.on_evict = self._evicted

    @property
    def reading(self) -> tuple[Sequence, ...]:
        """Sequences that wait for the disk."""
        return tuple(self._reading)

    def keep(self, sequence: Sequence) -> None:
        """Decide how a victim comes back; called before its blocks are taken from it.

        If by recomputing, nothing is done.
        """
        blocks, num_tokens = self._blocks, self._blocks.num_held(sequence)
        num_full, num_last = divmod(num_tokens, blocks.block_size)
        last_room = self._last_room if num_last else 0
        num_bytes = (num_full + last_room) * self._sizes.block_bytes
        rates = self.rates
        if sequence in self._kept or num_tokens == 0 or num_full + last_room > self.host.room:
            return
        if not should_swap(num_tokens, num_bytes, prefill=rates.prefill, moves=rates.moves):
            return
        blocks.index.extend_hashes(sequence, num_full)
        kept = _Kept(sequence.block_hashes[:num_full], last_room=last_room)
        reserved = self.host.reserve(kept.hashes, last_room)
        assert reserved, "there was room"
        if num_last:
            block = sequence.block_table[num_full]
            kept.last = HeldBlock()
            self._saves.append(BlockMove(block, kept.last, blocks.open_page(block)))
            self.counters.swapped_out += 1
        self._kept[sequence] = kept
        sequence.num_kept = num_tokens
        self.counters.swaps += 1

    def begin_reading(self, sequence: Sequence) -> bool:
        """Have the disk's part of a chain read; True if the sequence has to wait for that."""
        if self.disk is None:
            return False
        num_blocks = (len(sequence.token_ids) - 1) // self._blocks.block_size
        self._blocks.index.extend_hashes(sequence, num_blocks)
        chain = sequence.block_hashes[:num_blocks]
        wanted = []
        for content in chain[len(self._blocks.index.find_full(chain)) :]:
            if self.host.get(content) is None:
                if content not in self.disk:
                    break
                wanted.append(content)
        del wanted[self.host.room :]
        if len(wanted) * self._blocks.block_size < MIN_READ_TOKENS:
            return False
        self.host.reserve(wanted)
        self._reading[sequence] = self.disk.read(wanted, sequence)
        return True

    def take_read(self) -> Iterator[Sequence]:
        """Sequences whose part of the disk is in host memory now, or cannot be had."""
        if self.disk is None:
            return
        for job in self.disk.take_read():
            if job.cancelled:
                self.host.release(job.hashes)
                continue
            sequence = job.sequence
            del self._reading[sequence]
            for content, data in job.found:
                if self.host.takes(content):
                    self.host.put(content, HeldBlock(data, from_disk=True))
            self._kept.setdefault(sequence, _Kept()).hashes += job.hashes
            yield sequence

    def num_held(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that were read or kept for it, outside the cache or not."""
        kept = self._kept.get(sequence)
        return 0 if kept is None else len(kept.hashes) * self._blocks.block_size

    def num_in_host(self, sequence: Sequence) -> int:
        """Blocks in host memory that a waiting sequence comes back to."""
        kept = self._kept.get(sequence)
        if kept is None:
            return 0
        found = sum(self.host.get(content) is not None for content in kept.hashes)
        return found + (kept.last is not None)

    def choose(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """A prefix that is in the cache, cut at its last full block if more is known from there."""
        num_full, num_last = divmod(prefix.num_tokens, self._blocks.block_size)
        if not num_last or self._continuation(sequence, num_full)[1] <= num_last:
            return prefix
        return self._blocks.whole(prefix)

    def bring_back(self, sequence: Sequence) -> list[BlockMove]:
        """Continue the block table of a sequence that starts with what is in host memory.

        Returns:
            What is to be loaded in the plan that it starts in.
        """
        first, num_last = divmod(sequence.num_computed, self._blocks.block_size)
        held, num_tokens = ([], 0) if num_last else self._continuation(sequence, first)
        kept = self._kept.pop(sequence, None)
        loads: list[BlockMove] = []
        if held:
            self._count(sequence, held)
            self._loading[sequence] = _Loading(first, kept, sequence.num_kept)
            loads = self._blocks.load(sequence, held, num_tokens)
        elif kept is not None:
            self._release(kept)
        sequence.num_kept = 0
        return loads

    def _continuation(self, sequence: Sequence, first: int) -> tuple[list[HeldBlock], int]:
        """What is in host memory from a block index on, and how many tokens it holds."""
        size, held = self._blocks.block_size, []
        for content in sequence.block_hashes[first : (len(sequence.token_ids) - 1) // size]:
            one = self.host.get(content)
            if one is None:
                break
            held.append(one)
        num_tokens = len(held) * size
        kept = self._kept.get(sequence)
        num_last = sequence.num_kept % size
        if (
            kept is not None
            and kept.last is not None
            and first * size + num_tokens == sequence.num_kept - num_last
        ):
            held.append(kept.last)
            num_tokens += num_last
        return held, num_tokens

    def _release(self, kept: _Kept) -> None:
        self.host.release(kept.hashes, kept.last_room)

    def _count(self, sequence: Sequence, found: list[HeldBlock]) -> None:
        size = self._blocks.block_size
        if sequence.num_preemptions:
            self.counters.swapped_in += len(found)
        else:
            from_disk = sum(held.from_disk for held in found)
            self.counters.disk_hits += from_disk * size
            self.counters.host_hits += (len(found) - from_disk) * size

    def confirm(self, sequence: Sequence) -> None:
        """The plan that loaded a sequence's blocks, if any did, has run."""
        loading = self._loading.pop(sequence, None)
        if loading is not None:
            self._blocks.confirm_loads(sequence, loading.first)
            if loading.kept is not None:
                self._release(loading.kept)

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a plan that is not committed yet brings some of a sequence's blocks."""
        return sequence in self._loading

    def discard(self, sequence: Sequence) -> None:
        """The plan that was to load a sequence's blocks, if any was, does not run."""
        loading = self._loading.pop(sequence, None)
        if loading is None:
            return
        sequence.num_computed = loading.first * self._blocks.block_size
        if loading.kept is None:
            return
        if sequence.status is SequenceStatus.FINISHED:
            self._release(loading.kept)
        else:
            self._kept[sequence] = loading.kept
            sequence.num_kept = loading.num_kept

    def discard_saves(self) -> None:
        """Plans that were to save something have failed."""
        self.host.discard_empty()
        coming = [move.held for move in self._saves]
        for kept in self._kept.values():
            if kept.last is not None and kept.last.content is None and kept.last not in coming:
                kept.last = None

    def offer(self, sequence: Sequence) -> None:
        """Let what `disk_rule` allows be written to the disk; called before it is freed."""
        if self.writes is None or sequence.parent is not None:
            return  # what siblings share, one of them offers
        if num_blocks := num_on_disk(sequence.num_cached, self._blocks.block_size):
            self.writes.offer(sequence.block_hashes[:num_blocks])

    def forget(self, sequence: Sequence) -> bool:
        """A sequence has ended; True if it was waiting for the disk."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._release(kept)
        job = self._reading.pop(sequence, None)
        if job is not None:
            job.cancelled = True
        return job is not None

    def take_saves(self) -> tuple[BlockMove, ...]:
        """What the plan that is complete now must save first."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def _evicted(self, content: bytes, block: int) -> None:
        """The cache is about to give up a block's content."""
        if self.host.takes(content):
            held = HeldBlock()
            self._saves.append(BlockMove(block, held))
            self.host.put(content, held)
            self.counters.swapped_out += 1
        if self.writes is not None:
            self.writes.lost(content)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """The snapshot with the tiers' share."""
        counters = self.counters
        num_last = sum(one.last is not None for one in self._all_kept())
        stats = msgspec.structs.replace(
            stats,
            swaps_total=counters.swaps,
            swapped_out_total=counters.swapped_out,
            swapped_in_total=counters.swapped_in,
            prefix_hits_host_total=counters.host_hits,
            prefix_hits_disk_total=counters.disk_hits,
            swapped=sum(sequence.num_kept > 0 for sequence in self._kept),
            kv_host_blocks=len(self.host) + num_last,
            kv_host_swapped=self.host.num_swapped + num_last,
            kv_host_capacity=self.host.capacity,
        )
        if self.disk is None or self.writes is None:
            return stats
        store, found = self.disk.store, self.disk.store.counters
        return msgspec.structs.replace(
            stats,
            kv_disk_writing=not self.disk.trouble,
            kv_disk_blocks=len(store),
            kv_disk_bytes=found.bytes_used,
            kv_disk_capacity_bytes=store.capacity,
            kv_disk_pending=len(self.writes),
            kv_disk_written_total=found.written,
            kv_disk_read_total=found.read,
            kv_disk_dropped_total=self.writes.num_dropped,
            kv_disk_corrupt_total=found.corrupt,
            kv_disk_evicted_total=found.evicted,
        )

    def _all_kept(self) -> Iterator[_Kept]:
        yield from self._kept.values()
        for loading in self._loading.values():
            if loading.kept is not None:
                yield loading.kept

    def check_invariants(self) -> None:
        """Assert that every reservation belongs to a sequence that waits, or a job under way."""
        kept = [len(one.hashes) + one.last_room for one in self._all_kept()]
        jobs = [] if self.disk is None else self.disk.unfinished
        self.host.check_invariants(iter([*kept, *(len(job.hashes) for job in jobs)]))
