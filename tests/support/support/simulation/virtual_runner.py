"""A runner whose only computation is reading through block tables, on slots of integers.

The model is that of `virtual_model`. Every slot that a step reads is compared with what the
sequence's tokens should have left there: a wrong, stale, missing or shared block is found at once.
A recurrent model's state is the same hash, in rows of its own.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.simulation.plan_judge import look_at
from support.simulation.simulated_pictures import read_of
from support.simulation.virtual_model import EOS, content_of, logprob_of, next_token, ranking

from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.moves import BlockLoad, BlockSave, SavedBlock, StateCopy
from appliance.engine.nouns.plan import Continuations, Sampled
from appliance.engine.nouns.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.plan import Plan, ScheduledSequence
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.encoded_pictures import EncodedPictures

STEP_SECONDS, ROW_SECONDS = 0.01, 0.001
JUNK = -1
BROKEN = Sampled(error="the virtual model broke", broken=True)


def continuations_of(content: int, request: Request, num_tokens: int) -> Continuations:
    """The sampler's continuations of a beam whose answer has so many tokens."""
    count = request.sampling.num_candidates((EOS,))
    found = ranking(content, request, num_tokens, count)
    return Continuations(tuple(Candidate(token, logprob) for token, logprob in found))


@dataclass(slots=True)
class Clock:
    """The simulation's time, in seconds."""

    now: float = 0.0

    def read(self) -> float:
        """See `time.monotonic`."""
        return self.now


class DeviceLostError(Exception):
    """The virtual device failed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry as a device gets it: later changes do not reach it."""

    scheduled: ScheduledSequence
    table: list[int]
    opened: tuple[int, ...]
    tokens: list[int]
    state: int  # row


class VirtualRunner:
    """Runs plans when they are collected, with their content at launch.

    Args:
        blocks: the block manager, to check that each written block has one owner.
        max_rows: of a step.
        sealed: whether tokens lie in open blocks until their block is full.
        depth: plans in flight when the next one is launched.
        noise: chooses what a failing step leaves behind.
        clock: advances with each step.
        pictures: gives the rows of pictures; None if requests have none.

    Attributes:
        fault: the next fault: "memory", "launch", "collect" or "nan"; empty: none.
        seen: how often each notable case came up.
        latest: the last launched plan.
    """

    seconds = 0.0

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_rows: int,
        sealed: bool,
        depth: int,
        noise: random.Random,
        clock: Clock,
        pictures: EncodedPictures | None = None,
    ) -> None:
        self.depth = depth
        self.fault = ""
        self.seen: Counter[str] = Counter()
        self.latest: Plan | None = None
        self._blocks = blocks
        self._size = blocks.block_size
        self._max_rows = max_rows
        self._sealed = sealed
        self._noise = noise
        self._clock = clock
        self._pictures = pictures
        self._slots = [JUNK] * blocks.num_slots
        self._opened: dict[int, list[int]] = {}
        self.states = [JUNK] * (0 if blocks.states is None else blocks.states.num_rows)
        self._truth: dict[Sequence, list[int]] = {}  # what their tokens should leave
        self._latest: dict[Sequence, int] = {}
        self._flight: deque[tuple[Plan, list[_Entry], tuple[SavedBlock, ...]]] = deque()

    def launch(self, plan: Plan) -> tuple[SavedBlock, ...]:
        """See `Runner`."""
        self.latest = plan
        assert 0 < plan.num_tokens <= self._max_rows, "the budget was exceeded"
        opened = plan.open_blocks or ((),) * len(plan.scheduled)
        assert (plan.open_blocks is not None) == self._sealed
        in_flight = [flying for flying, *_ in self._flight]
        look_at(plan, in_flight, self._blocks, depth=int(self.depth == 1))
        entries, first, given = [], 0, self._given(plan)
        for scheduled, entry_opened in zip(plan.scheduled, opened, strict=True):
            sequence, start, end = scheduled.sequence, scheduled.start, scheduled.end
            table = list(sequence.block_table[: -(-end // self._size)])
            tokens = [] if scheduled.follows else sequence.token_ids[start:end]
            tokens = [*tokens, *scheduled.drafts]
            tokens = [given.get(row, token) for row, token in enumerate(tokens, first)]
            first += scheduled.num_tokens
            assert len(tokens) == (0 if scheduled.follows else scheduled.num_tokens)
            entries.append(_Entry(scheduled, table, entry_opened, tokens, sequence.slot - 1))
        saved = self.save(plan.saves)
        if plan.states is not None:
            saved += self.save_states(plan.states.saves)
        if self.fault in ("memory", "launch"):
            self._scribble(plan, entries, saved)
            fault, self.fault = self.fault, ""
            raise MemoryError("no memory") if fault == "memory" else DeviceLostError("launch")
        self._flight.append((plan, entries, saved))
        return saved

    def _given(self, plan: Plan) -> dict[int, int]:
        """Return what the rows of pictures in a step hold, by their place in it."""
        found = None if self._pictures is None else self._pictures.given(plan.scheduled)
        if found is None:
            return {}
        self.seen["rows of pictures"] += len(found.embeddings)
        sources = enumerate(found.sources)
        return {row: int(found.embeddings[one, 0]) for row, one in sources if one >= 0}

    def collect(self) -> list[Sampled]:
        """See `Runner`."""
        plan, entries, saved = self._flight.popleft()
        self._clock.now += STEP_SECONDS + ROW_SECONDS * plan.num_tokens
        fails = self.fault == "collect"
        if fails and self._noise.random() < 0.5:
            self._scribble(plan, entries, saved)
            self.fault = ""
            raise DeviceLostError("collect")
        for entry in entries:
            table = entry.scheduled.sequence.block_table[: len(entry.table)]
            assert list(table) == entry.table, "blocks left a plan in flight"
        self.copy(plan)
        for load in plan.loads:
            self._load(load, saved)
        self._prepare_states(plan, saved)
        sampled: dict[Sequence, int] = {}
        results: list[Sampled] = []
        for entry in entries:
            *_, last = contents = self._run(entry)
            scheduled = entry.scheduled
            request = scheduled.sequence.request
            if scheduled.samples and request.sampling.use_beam_search:
                num_tokens = scheduled.end - scheduled.sequence.num_prompt_tokens
                follows = continuations_of(last, request, num_tokens)
                sampled[scheduled.sequence] = -1
                results.append(Sampled(continuations=follows))
            elif scheduled.samples:
                index = scheduled.sequence.index
                for content in contents[-1 - len(scheduled.drafts) :]:
                    token = next_token(content, index)
                    sampled[scheduled.sequence] = token
                    logprobs = None
                    if request.sampling.logprobs is not None:
                        logprobs = TokenLogprobs(Candidate(token, logprob_of(content, index)), ())
                    results.append(Sampled(token, logprobs))
        if plan.states is not None:
            self._copy_states(plan.states.checkpoints)
        if fails:  # everything was computed, but the result is lost
            self.fault = ""
            raise DeviceLostError("collect")
        self._latest = sampled
        self._count(plan)
        if self.fault == "nan" and results:
            results[self._noise.randrange(len(results))] = BROKEN
            self.fault = ""
        return results

    def save(self, saves: Sequences[BlockSave]) -> tuple[SavedBlock, ...]:
        """Copy blocks out of the cache; see `BlockMoves`."""
        return tuple(SavedBlock(self._content_of(save)) for save in saves)

    def save_states(self, rows: Sequences[int]) -> tuple[SavedBlock, ...]:
        """Copy states out of the cache."""
        return tuple(SavedBlock(array("q", (self.states[row],)).tobytes()) for row in rows)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._flight

    def discard(self) -> None:
        """See `Runner`."""
        self._flight.clear()
        self._latest = {}

    def idle(self) -> None:
        """See `Runner`."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._truth.pop(sequence, None)

    def _count(self, plan: Plan) -> None:
        seen = self.seen
        seen["rows"] += plan.num_tokens
        seen["copies"] += len(plan.copies)
        seen["copies of open blocks"] += sum(copy.open_source >= 0 for copy in plan.copies)
        seen["drafts"] += sum(len(entry.drafts) for entry in plan.scheduled)
        seen["rows ahead"] += sum(entry.follows for entry in plan.scheduled)
        seen["rows for nothing"] += sum(
            entry.sequence.status is SequenceStatus.FINISHED for entry in plan.scheduled
        )
        seen["mixed steps"] += len({entry.num_own > 1 for entry in plan.scheduled}) == 2
        seen["preempted beams"] += sum(
            one.request.sampling.use_beam_search for one in plan.preempted
        )
        seen["shared blocks"] += self._blocks.pool.num_shared

    def copy(self, plan: Plan) -> None:
        size, slots = self._size, self._slots
        if not plan.copies:
            return
        destinations = {copy.destination for copy in plan.copies}
        assert not destinations & {copy.source for copy in plan.copies}
        for copy in self._noise.sample(plan.copies, len(plan.copies)):
            to, origin = copy.destination * size, copy.source * size
            slots[to : to + size] = slots[origin : origin + size]
            if self._sealed:
                self._opened[copy.open_destination] = list(self._open_block(copy.open_source))

    def _prepare_states(self, plan: Plan, saved: Sequences[SavedBlock]) -> None:
        if plan.states is None:
            return
        for load in plan.states.loads:
            (self.states[load.row],) = array("q", bytes(load.content(saved).read()))
            self.seen["loaded states"] += 1
        self._copy_states(plan.states.copies)

    def _copy_states(self, copies: Sequences[StateCopy]) -> None:
        for copy in copies:
            self.states[copy.destination] = self.states[copy.source]

    def _content_of(self, save: BlockSave) -> bytes:
        first = save.block * self._size
        parts = self._slots[first : first + self._size]
        if save.open_block >= 0:
            parts = parts + self._open_block(save.open_block)
        return array("q", parts).tobytes()

    def _load(self, load: BlockLoad, saved: Sequences[SavedBlock]) -> None:
        parts = array("q", bytes(load.content(saved).read())).tolist()
        first = load.block * self._size
        self._slots[first : first + self._size] = parts[: self._size]
        if load.open_block >= 0:
            assert len(parts) == 2 * self._size, "an open block was not saved with its block"
            self._opened[load.open_block] = parts[self._size :]

    def _open_block(self, block: int) -> list[int]:
        return self._opened.setdefault(block, [JUNK] * self._size)

    def _run(self, entry: _Entry) -> list[int]:
        """Run an entry; return what the slots of its rows hold then."""
        scheduled, table, size, slots = entry.scheduled, entry.table, self._size, self._slots
        sequence, start = scheduled.sequence, scheduled.start
        sealed = start // size * size if self._sealed else start
        found: list[int] = []
        for block in table[: -(-sealed // size)]:
            found += slots[block * size : block * size + size]
        del found[sealed:]
        if sealed < start:
            found += self._open_block(entry.opened[0])[: start - sealed]
        truth = self._truth.setdefault(sequence, [])
        if sequence.request.sampling.use_beam_search:
            truth.clear()  # its tokens may now be those of another beam
        salt = sequence.request.cache_salt
        tokens = entry.tokens or [self._latest[sequence]]
        for token in read_of(sequence, len(truth), start):
            truth.append(content_of(salt, truth[-1] if truth else 0, token))
        known = truth[:start] if len(truth) > start else truth
        assert found == known, f"{sequence.request.request_id} reads what it never wrote"
        previous = truth[start - 1] if start else 0
        if self.states:
            previous = self.state_before(entry)
            assert not start or previous == truth[start - 1], "it goes on from another state"
        del truth[start:]  # later tokens may be computed again
        for position, token in enumerate(tokens, start):
            previous = content_of(salt, previous, token)
            truth.append(previous)
            self._write(entry, position, previous)
        if self.states:
            self.states[entry.state] = previous
        return truth[start:]

    def state_before(self, entry: _Entry) -> int:
        return self.states[entry.state] if entry.scheduled.start else 0

    def _write(self, entry: _Entry, position: int, value: int) -> None:
        size = self._size
        index, offset = divmod(position, size)
        first = entry.table[index] * size
        if not self._sealed:
            self._slots[first + offset] = value
            return
        written = self._open_block(entry.opened[index - entry.scheduled.start // size])
        written[offset] = value
        if offset + 1 == size:
            self._slots[first : first + size] = written

    def _scribble(self, plan: Plan, entries: list[_Entry], saved: Sequences[SavedBlock]) -> None:
        """Leave the effects of a failed step: some copies, and some rows, written wrongly."""
        noise = self._noise
        for copy in plan.copies:
            if noise.random() < 0.5:
                first = copy.destination * self._size
                self._slots[first : first + self._size] = [JUNK] * self._size
        for load in plan.loads:
            if noise.random() < 0.5:
                self._load(load, saved)
        moved = () if plan.states is None else (*plan.states.copies, *plan.states.checkpoints)
        for state in moved:
            if noise.random() < 0.5:
                self.states[state.destination] = JUNK
        for entry in entries:
            if noise.random() < 0.5:
                if self.states:
                    self.states[entry.state] = JUNK
                for position in range(entry.scheduled.start, entry.scheduled.end):
                    self._write(entry, position, JUNK)
