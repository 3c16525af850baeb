"""The scheduler's interface to the tiers below the cache: keep, find, bring back.

A preempted sequence's full blocks stay in the cache, by hash, until their space is needed. Host
memory keeps evicted ones until the sequence is back, and its last block, which has no hash. Before
a sequence starts, its chain's blocks are read from disk. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.blocks.block_hashes import is_state, state_key
from appliance.engine.blocks.prefix_cache import Prefix
from appliance.engine.nouns.moves import Rates
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.tiers.host_memory import (
    Arrival,
    HostBlock,
    HostStore,
    PlannedMoves,
    PlannedSaves,
)
from appliance.engine.tiers.read_ahead import ReadAhead
from appliance.engine.tiers.resume import Reservation, Resume, continuation, resume_with_state
from appliance.engine.tiers.write_behind import num_on_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Sequences

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.tiers.disk_tier import DiskTier
    from appliance.engine.tiers.write_behind import WriteBehind
    from appliance.stats import EngineStats


_FLUSH_SECONDS = 2.0  # for the disk, when the engine ends


@dataclass(frozen=True, slots=True)
class TierSizes:
    block_bytes: int
    open_bytes: int = 0  # of an open block
    host_bytes: int = 0
    keeps_evicted: bool = False  # also blocks that no sequence wants
    state_bytes: int = 0  # of one recurrent state


class Tiers:
    """Host memory and disk behind one cache.

    Args:
        disk: files; None keeps nothing there.
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
        self._state_room = -(-sizes.state_bytes // sizes.block_bytes)
        self.host = HostStore(
            capacity, keeps_unwanted=sizes.keeps_evicted, state_room=self._state_room
        )
        self._last_room = 1 - (-sizes.open_bytes // sizes.block_bytes)
        self._kept: dict[Sequence, Reservation] = {}
        self._loading: dict[Sequence, _Loading] = {}  # loads in uncommitted plans
        self._reads = ReadAhead(blocks, self.host, rates, disk)
        self._saves = PlannedSaves()
        blocks.pool.on_evict = self._evicted
        if blocks.states is not None:
            blocks.states.checkpoints.on_evict = self._state_evicted

    @classmethod
    def none(cls, blocks: BlockManager) -> Tiers:
        """Build tiers without room, which lose evicted content."""
        return cls(blocks, TierSizes(block_bytes=1), Rates())

    @property
    def reading(self) -> tuple[Sequence, ...]:
        return self._reads.waiting

    def keep(self, sequence: Sequence) -> None:
        """Decide how a victim comes back; call it before its blocks are taken.

        Leaves a victim alone that will be recomputed.
        """
        blocks, num_tokens = self._blocks, self._blocks.num_held(sequence)
        states = blocks.states
        num_full, num_last = divmod(num_tokens, blocks.block_size)
        other_room = self._state_room + (self._last_room if num_last else 0)
        num_bytes = (num_full + other_room) * self._sizes.block_bytes
        rates = self.rates
        if sequence in self._kept or num_tokens == 0 or num_full + other_room > self.host.room:
            return
        if states is not None and not states.is_present(sequence):
            return  # it has not run since it started
        if not should_swap(num_tokens, num_bytes, prefill=rates.prefill, moves=rates.moves):
            return
        blocks.index.extend_hashes(sequence, num_full)
        kept = Reservation(sequence.block_hashes[:num_full], other_room=other_room)
        reserved = self.host.reserve(kept.hashes, other_room)
        assert reserved, "there was room"
        if states is not None:
            kept.state = self._saves.save_state(states.row(sequence))
        if num_last:
            block = sequence.block_table[num_full]
            kept.last = self._saves.save_block(block, blocks.open_block(block))
            self.counters.swapped_out += 1
        self._kept[sequence] = kept
        sequence.num_kept = num_tokens
        self.counters.swaps += 1

    def begin_reading(self, sequence: Sequence) -> bool:
        """Start reading a chain's blocks from disk; return True if the sequence must wait."""
        return self._reads.begin(sequence)

    def take_read(self, now: float) -> Iterator[Sequence]:
        """Yield sequences whose disk reads have ended, successfully or not, or take too long.

        Args:
            now: monotonic seconds.
        """
        for sequence, reserved in self._reads.take(now):
            self._kept.setdefault(sequence, Reservation()).hashes += reserved
            yield sequence

    def num_held(self, sequence: Sequence) -> int:
        """Count the tokens that were read or kept for a waiting sequence."""
        kept = self._kept.get(sequence)
        if kept is None:
            return 0
        return sum(not is_state(one) for one in kept.hashes) * self._blocks.block_size

    def num_in_host(self, sequence: Sequence) -> int:
        """Count the blocks in host memory to which a waiting sequence returns."""
        kept = self._kept.get(sequence)
        if kept is None:
            return 0
        found = sum(self.host.get(content) is not None for content in kept.hashes)
        return found + (kept.last is not None)

    def num_found(self, sequence: Sequence, prefix: Prefix) -> int:
        """Count the leading tokens of a new sequence with content here or in the cache.

        Only whole blocks count: there may be no room to copy a partial one.

        Args:
            prefix: those in the cache.
        """
        whole = self._blocks.whole(prefix)
        resume = self._resume(sequence, len(whole.blocks))
        return max(whole.num_tokens, resume.num_tokens, self._reads.num_readable(sequence))

    def choose(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """Cut a cached prefix at its last full block if host memory continues it further.

        With recurrent layers host memory may also have a state further on in the cached blocks.
        """
        num_full, num_last = divmod(prefix.num_tokens, self._blocks.block_size)
        if self._blocks.states is not None:
            resume = self._resume(sequence, 0)
            if resume.num_tokens <= prefix.num_tokens:
                return prefix
            num_tokens = len(resume.blocks) * self._blocks.block_size
            return Prefix(resume.blocks, num_tokens, num_alike=prefix.num_alike)
        if not num_last or self._resume(sequence, num_full).num_tokens <= prefix.num_tokens:
            return prefix
        return self._blocks.whole(prefix)

    def bring_back(self, sequence: Sequence) -> list[Arrival]:
        """Extend a starting sequence's block table by its content in host memory.

        Returns:
            The loads for the plan in which it starts.
        """
        states = self._blocks.states
        first, num_last = divmod(sequence.num_computed, self._blocks.block_size)
        is_whole = num_last or not (states is None or states.is_present(sequence))
        resume = Resume() if is_whole else self._resume(sequence, first)
        kept = self._kept.pop(sequence, None)
        arrivals: list[Arrival] = []
        if resume.held or resume.state is not None:
            self._count(sequence, resume.held)
            self._loading[sequence] = _Loading(first, kept, sequence.num_kept)
            num_tokens = resume.num_tokens - sequence.num_computed
            found = self._blocks.expect(sequence, len(resume.held), num_tokens)
            arrivals = [
                Arrival(block, host, self._blocks.open_block(block))
                for block, host in zip(found, resume.held, strict=True)
            ]
            if states is not None and resume.state is not None:
                row = states.expect(
                    sequence, sequence.num_computed, is_checkpoint=resume.is_checkpoint
                )
                arrivals.append(Arrival(row, resume.state, is_state=True))
        elif kept is not None:
            self._release(kept)
        sequence.num_kept = 0
        return arrivals

    def _resume(self, sequence: Sequence, first: int) -> Resume:
        """Find where a sequence with some blocks in the cache continues."""
        kept = self._kept.get(sequence)
        if self._blocks.states is not None:
            return resume_with_state(sequence, self._blocks, self.host, kept)
        return continuation(sequence, first, self._blocks, self.host, kept)

    def _release(self, kept: Reservation) -> None:
        self.host.release(kept.hashes, kept.other_room)

    def _count(self, sequence: Sequence, found: Sequences[HostBlock]) -> None:
        size = self._blocks.block_size
        if sequence.num_preemptions:
            self.counters.swapped_in += len(found)
        else:
            from_disk = sum(held.from_disk for held in found)
            self.counters.disk_hits += from_disk * size
            self.counters.host_hits += (len(found) - from_disk) * size

    def confirm(self, scheduled: Iterable[ScheduledSequence]) -> None:
        if not self._loading:
            return
        for entry in scheduled:
            loading = self._loading.pop(entry.sequence, None)
            if loading is not None:
                self._blocks.confirm_loads(entry.sequence, loading.first)
                if loading.kept is not None:
                    self._release(loading.kept)

    def is_loading(self, sequence: Sequence) -> bool:
        """Return True if an uncommitted plan loads some of a sequence's blocks."""
        return sequence in self._loading

    def discard(self, sequence: Sequence) -> None:
        """Undo the loads of a sequence whose plan will not run."""
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
        self.host.discard_empty()
        self._saves.discard()
        for kept in self._kept.values():
            kept.last = None if self._saves.is_lost(kept.last) else kept.last
            kept.state = None if self._saves.is_lost(kept.state) else kept.state

    def offer(self, sequence: Sequence) -> None:
        """Queue blocks for writing, as `num_on_disk` allows; call it before they are freed."""
        if self.writes is None or sequence.parent is not None:
            return  # one sibling offers the blocks they share
        num_blocks = num_on_disk(sequence.num_cached, self._blocks.block_size)
        chain = sequence.block_hashes[:num_blocks]
        if (states := self._blocks.states) is not None and chain:
            depth = states.checkpoints.depth(chain)
            chain = [*chain[:depth], state_key(chain[depth - 1])] if depth else []
        if chain:
            self.writes.offer(chain)

    def forget(self, sequence: Sequence) -> bool:
        """Forget an ended sequence; return True if it was waiting for the disk."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._release(kept)
        return self._reads.cancel(sequence)

    def take_moves(self, arrivals: Sequences[Arrival]) -> PlannedMoves:
        """Return the moves of a complete plan.

        Call `hold` with the saved content after launching it, before making the next plan.
        """
        return self._saves.take(arrivals)

    def hold(self, saved: Sequences[SavedBlock]) -> None:
        self._saves.hold(saved)

    def _evicted(self, content: bytes, block: int) -> None:
        """Save a block's content before its eviction, if it should be kept."""
        if self.host.takes(content):
            self.host.put(content, self._saves.save_block(block))
            self.counters.swapped_out += 1
        if self.writes is not None:
            self.writes.lost(content)

    def _state_evicted(self, content: bytes, row: int) -> None:
        """Save a checkpoint before its eviction, if it should be kept."""
        key = state_key(content)
        if self.host.takes(key):
            self.host.put(key, self._saves.save_state(row))
        if self.writes is not None:
            self.writes.lost(key)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        last = sum(one.last is not None for one in self._all_kept())
        swapped = sum(sequence.num_kept > 0 for sequence in self._kept)
        stats = self.counters.add_to(stats, self.host, num_last=last, num_swapped=swapped)
        if self.disk is None or self.writes is None:
            return stats
        return add_disk(stats, self.disk, self.writes)

    def _all_kept(self) -> Iterator[Reservation]:
        yield from self._kept.values()
        for loading in self._loading.values():
            if loading.kept is not None:
                yield loading.kept

    @property
    def has_writes(self) -> bool:
        """True if there is something to write to disk now."""
        return self.writes is not None and self.writes.has_work

    def after_step(self) -> None:
        """Use the disk's share of the last step."""
        if self.writes is not None:
            self.writes.after_step()

    def idle(self) -> bool:
        """Use an idle moment for the disk; return False if there is nothing to do."""
        if self._reads.wait():
            return True
        if self.writes is None or not self.writes.has_work:
            return False
        self.writes.idle()
        return True

    def close(self) -> None:
        """Write pending blocks to disk, as far as time allows."""
        if self.writes is not None and self.disk is not None:
            self.writes.flush(_FLUSH_SECONDS)
            self.disk.close(_FLUSH_SECONDS)

    def check_invariants(self) -> None:
        """Assert that every reservation belongs to a waiting sequence or an unfinished job."""
        kept = [self.host.room_of(one.hashes) + one.other_room for one in self._all_kept()]
        jobs = [] if self.disk is None else self.disk.unfinished
        self.host.check_invariants(iter([*kept, *(self.host.room_of(job.hashes) for job in jobs)]))


@dataclass(frozen=True, slots=True)
class _Loading:
    """A sequence that starts with content from outside, until its plan has run."""

    first: int  # index of the first loaded block
    kept: Reservation | None
    num_kept: int


def should_swap(num_tokens: int, num_bytes: int, *, prefill: float, moves: float) -> bool:
    """Return True if a victim's blocks should go to host memory instead of being recomputed.

    It pays if moving them out and back is faster than computing their tokens. Returns True without
    measurements: the first swap measures.

    Args:
        num_tokens: to recompute.
        num_bytes: of their blocks.
        prefill: tokens per second, 0 if unknown.
        moves: bytes per second in one direction, 0 if unknown.
    """
    if prefill == 0 or moves == 0:
        return True
    return 2 * num_bytes / moves < num_tokens / prefill


@dataclass(slots=True)
class TierCounters:
    """Totals; blocks unless noted."""

    swaps: int = 0  # sequences preempted with kept blocks
    swapped_out: int = 0
    swapped_in: int = 0
    host_hits: int = 0  # tokens found in host memory at first admission
    disk_hits: int = 0  # tokens

    def add_to(
        self, stats: EngineStats, host: HostStore, *, num_last: int, num_swapped: int
    ) -> EngineStats:
        """Add host memory's part to a snapshot.

        Args:
            host: blocks by hash.
            num_last: partial blocks, without a hash.
            num_swapped: waiting sequences with kept content.
        """
        return msgspec.structs.replace(
            stats,
            swaps_total=self.swaps,
            swapped_out_total=self.swapped_out,
            swapped_in_total=self.swapped_in,
            prefix_hits_host_total=self.host_hits,
            prefix_hits_disk_total=self.disk_hits,
            swapped=num_swapped,
            kv_host_blocks=len(host) + num_last,
            kv_host_swapped=host.num_swapped + num_last,
            kv_host_capacity=host.capacity,
        )


def add_disk(stats: EngineStats, disk: DiskTier, writes: WriteBehind) -> EngineStats:
    """Add the disk's part to a snapshot."""
    store, found = disk.store, disk.store.counters
    return msgspec.structs.replace(
        stats,
        kv_disk_writing=not disk.trouble,
        kv_disk_blocks=len(store),
        kv_disk_bytes=found.bytes_used,
        kv_disk_capacity_bytes=store.capacity,
        kv_disk_pending=len(writes),
        kv_disk_written_total=found.written,
        kv_disk_read_total=found.read,
        kv_disk_dropped_total=writes.num_dropped,
        kv_disk_corrupt_total=found.corrupt,
        kv_disk_evicted_total=found.evicted,
    )
