"""Continuous batching: decides what each step runs and remembers what came of it.

`plan` picks rows and blocks, someone else runs them, `commit` appends the tokens. The order of
service is in `policy.py`. Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from appliance.engine.beams.beam_groups import BeamGroups
from appliance.engine.limits import check_beams, check_prompt, reason_to_finish
from appliance.engine.plan import Plan, StepLoad, Update
from appliance.engine.plan import SchedulerLimits as SchedulerLimits
from appliance.engine.request import FinishReason
from appliance.engine.scheduling.admission import Admission
from appliance.engine.scheduling.counters import Counters
from appliance.engine.scheduling.deadlines import Deadlines
from appliance.engine.scheduling.draft import Draft
from appliance.engine.scheduling.fairness import Accounts
from appliance.engine.scheduling.in_flight import InFlight
from appliance.engine.scheduling.policy import choose_victim, rank
from appliance.engine.scheduling.turns import PromptTurns
from appliance.engine.sequence import Sequence, SequenceStatus
from appliance.engine.tiers.tiers import Tiers
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.plan import BeamAnswer, Continuations
    from appliance.engine.request import Request
    from appliance.stats import EngineStats


class Scheduler:
    """Requests in, plans out, tokens in, updates out.

    Between `plan` and `commit` the plan is in flight: its sequences are not preempted, and the
    blocks of those that end meanwhile are kept from others until `commit`. So `plan` may be called
    again before `commit`; it then plans for the other sequences and, if it may look ahead, also
    for the next rows of those that are in one plan in flight and whose length does not end them
    there. Plans are run and committed in the order in which they were made.

    Args:
        blocks: the KV cache's books; nobody else changes them.
        limits: how much runs at once.
        eos_token_ids: tokens that end an answer, unless the request ignores them.
        look_ahead: whether whoever runs plans can feed a sampled token to the next plan by itself.
        tiers: where content goes that leaves the cache; None is nowhere.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        eos_token_ids: Collection[int] = (),
        *,
        look_ahead: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        self._blocks = blocks
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        # To sample a token, all before it must be in the cache, and the token itself not yet.
        self._max_tokens = min(limits.context_length, blocks.num_slots + 1)
        self._requests: dict[str, list[Sequence]] = {}  # live sequences only
        self._counters = Counters()
        self._accounts = Accounts()
        self.tiers = tiers or Tiers.none(blocks)
        self._beams = BeamGroups(blocks, self._eos_token_ids, limits.context_length)
        self._admission = Admission(
            blocks, self._counters, self._accounts, self.tiers, limits.max_num_seqs, self._beams
        )
        self._turns = PromptTurns(self._admission, blocks, self._accounts, self._extend)
        self._waiting = self._admission.waiting
        self._running: list[Sequence] = []  # in the order of rank
        self._in_flight = InFlight(self._max_tokens, look_ahead=look_ahead)
        self._last_arrival = -math.inf
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is live."""
        return bool(self._requests)

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, by request in the order of arrival."""
        for siblings in self._requests.values():
            yield from siblings

    @property
    def held(self) -> Collection[Sequence]:
        """Beams that hold no blocks until they fork a sibling's."""
        return self._beams.held

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Args:
            request: what was asked.
            now: monotonic seconds.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer in the context.
            RequestError: the prompt is empty or as large as the KV cache, the id is taken, or
                there is no room for so many beams.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use; choose another")
        num_tokens = len(request.prompt_token_ids)
        check_prompt(
            num_tokens,
            context_length=self._limits.context_length,
            cache_tokens=self._blocks.num_slots,
        )
        num_sequences = request.sampling.num_sequences
        if request.sampling.use_beam_search:
            check_beams(
                num_tokens,
                num_sequences,
                max_num_seqs=self._limits.max_num_seqs,
                blocks=(self._blocks.num_blocks, self._blocks.block_size),
            )
        # Two requests of one clock tick still have an order.
        self._last_arrival = max(now, math.nextafter(self._last_arrival, math.inf))
        parent = Sequence(request, arrival=self._last_arrival)
        children = [
            Sequence(request, index=index, arrival=self._last_arrival, parent=parent)
            for index in range(1, num_sequences)
        ]
        self._requests[request.request_id] = [parent, *children]
        self._accounts.open(request.owner, num_sequences)
        if request.sampling.use_beam_search:
            self._beams.add(request, [parent, *children])
        self._queue(parent)
        self._waiting.park(parent, children)
        for sequence in (parent, *children):
            self._deadlines.add(sequence)
        self._counters.prompt_tokens += num_tokens

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose time is over; beam searches with the best they have so far.

        Args:
            now: monotonic seconds.

        Returns:
            Those that were live until now; for beams, see `take_answers`.
        """
        over = self._deadlines.take(now)
        for sequence in over:
            self._beams.cut(sequence)
            self.finish(sequence, FinishReason.TIMEOUT)
        self._counters.expired += len({sequence.request.request_id for sequence in over})
        return over

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one choice of it, in whatever phase; False if it was not live.

        Beams end together.
        """
        ending = [
            sequence
            for sequence in self._requests.get(request_id, ())
            if index is None or sequence.index == index
        ]
        for sequence in ending:
            self.finish(sequence, FinishReason.ABORT)
        self._counters.aborted += bool(ending)
        return bool(ending)

    def finish(self, sequence: Sequence, reason: FinishReason) -> tuple[Sequence, ...]:
        """End one sequence, in whatever phase, and tell which ones have ended by that.

        A beam takes its siblings with it; what has ended already stays as it is.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return ()
        ended = tuple(self._beams.dissolve(sequence))
        for member in ended:
            self._end(member, reason)
        return ended

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        was_reading = self.tiers.forget(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        elif not was_reading:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._waiting.unpark(sequence)
        self._accounts.close(sequence)
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def plan(self, now: float) -> Plan | None:
        """Decide the next step: decodes, then prompts that run or may start, within the budget.

        Args:
            now: monotonic seconds.

        Returns:
            None if there is nothing to run; without a plan in flight, that means no work at all,
            or only sequences that wait for the disk.
        """
        self._blocks.metadata.begin_step(now)
        for sequence in self.tiers.take_read():
            self._waiting.push(sequence)
        draft = Draft(self._limits.max_num_batched_tokens)
        decodes, prompts = self._ready()
        self._in_flight.starved = None
        for sequence in decodes:
            self._extend(sequence, 1, draft)
        self._accounts.charge(draft.entries)
        if draft.budget and (prompts or self._waiting):
            self._turns.plan(prompts, draft, self._running, now, self._counters.steps)
        self._blocks.settle()
        if not draft.entries:
            return None
        self._counters.steps += 1
        self._in_flight.add(draft.entries.values())
        self._counters.last_plan = plan = draft.finished(self._blocks, self.tiers)
        return plan

    def commit(
        self,
        plan: Plan,
        token_ids: list[int],
        continuations: Mapping[Sequence, Continuations] | None = None,
    ) -> list[Update]:
        """Record that a plan was run.

        Args:
            plan: the oldest one in flight.
            token_ids: one for each scheduled sequence that samples, in the plan's order; those of
                sequences that ended meanwhile are ignored, and those of beams.
            continuations: what may follow each beam among them.

        Returns:
            One update for each sequence that got a token; none for beams, see `take_answers`.
        """
        assert len(token_ids) == plan.num_samples
        tokens = iter(token_ids)
        updates = []
        for entry in plan.scheduled:
            sequence = entry.sequence
            token_id = next(tokens) if entry.samples else None
            self.tiers.confirm(sequence)
            is_idle = self._in_flight.remove(entry)
            if sequence.status is SequenceStatus.FINISHED:
                if is_idle:
                    self._admission.release(sequence)
                continue
            self._blocks.commit(sequence, entry.num_tokens)
            if token_id is None:
                continue
            self._counters.generation_tokens += 1
            if sequence.request.sampling.use_beam_search:
                assert continuations is not None
                if self._beams.take(sequence, continuations[sequence]):
                    self.finish(sequence, FinishReason.STOP)
                continue
            sequence.token_ids.append(token_id)
            self._waiting.unpark(sequence)
            reason = reason_to_finish(sequence, self._eos_token_ids, self._max_tokens)
            if reason is not None:
                self.finish(sequence, reason)
            updates.append(Update(sequence, token_id, reason))
        return updates

    def take_answers(self) -> list[BeamAnswer]:
        """The answers of the beam searches that have ended since the last call."""
        return self._beams.take_answers()

    def discard_plans(self) -> None:
        """Forget all plans in flight: their steps failed and nothing of them runs any more.

        Their sequences, as far as they have not ended, wait and start over, since nobody knows
        what of their blocks was written.
        """
        for sequence in self._in_flight.clear():
            self.tiers.discard(sequence)
            if sequence.status is SequenceStatus.FINISHED:
                self._admission.release(sequence)
            elif sequence.status is SequenceStatus.RUNNING:  # else it went with a sibling
                self._requeue(sequence)
        self.tiers.discard_saves()

    def _ready(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Running sequences that want one row, and those that want more, in the order of rank."""
        decodes, prompts = [], []
        in_flight, held = self._in_flight.entries, self._beams.held
        for sequence in self._running:
            if sequence in in_flight:
                num_left = self._in_flight.num_left(sequence)
            elif sequence in held:
                continue
            else:
                num_left = len(sequence.token_ids) - sequence.num_computed
            if num_left == 1:
                decodes.append(sequence)
            elif num_left:  # it may wait for what is in flight, or as a beam for its siblings
                prompts.append((sequence, num_left))
        return decodes, prompts

    def _extend(self, sequence: Sequence, num_left: int, draft: Draft) -> None:
        """Give a running sequence its next rows, at the cost of later ones if blocks run out.

        If there is nobody to take blocks from, it keeps its own and waits for the next step.
        """
        before = self._in_flight.first(sequence)
        num_before = 0 if before is None else before.num_tokens
        num_tokens = min(num_left, draft.budget)
        if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
            return
        while (copies := self._blocks.allocate(sequence, num_before + num_tokens)) is None:
            spared = self._beams.spared(sequence, self._in_flight.entries)
            victim = choose_victim(self._running, sequence, spared)
            if victim is None:
                self._in_flight.starve(sequence)
                return
            members = self._beams.members(victim)
            for member in members:
                self.tiers.discard(member)
            if len(members) == 1:
                self.tiers.keep(victim)
            self._requeue(victim)
            for member in members:
                draft.take_back(member)
                draft.preempted.append(member)
                member.num_preemptions += 1
                self._counters.preemptions += 1
        draft.add(sequence, num_tokens, copies, before)

    def _requeue(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; its tokens stay and are computed again later.

        A beam's siblings go with it.
        """
        self._beams.lose(sequence)
        leader, *others = self._beams.members(sequence)
        for member in (leader, *others):
            self._stop(member)
            member.status = SequenceStatus.WAITING
        self._queue(leader)
        if others:
            self._waiting.park(leader, others)

    def _queue(self, sequence: Sequence) -> None:
        """Have a sequence wait, first for what the disk has of it."""
        if not self.tiers.begin_reading(sequence):
            self._waiting.push(sequence)

    def _stop(self, sequence: Sequence) -> None:
        index = bisect_left(self._running, rank(sequence), key=rank)
        assert self._running[index] is sequence
        del self._running[index]
        self._accounts.of(sequence).num_running -= 1
        if sequence not in self._in_flight.entries:
            self._admission.release(sequence)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn how long a step took, for the number of prompt rows beside answers."""
        self._turns.budget.observe(load, seconds)

    def stats(self) -> EngineStats:
        """The scheduler's share of the snapshot; times are the engine's to add."""
        waiting = len(self._waiting) + len(self.tiers.reading)
        snapshot = self._counters.snapshot(self._blocks, len(self._running), waiting)
        return self.tiers.add_stats(snapshot)

    def check_invariants(self) -> None:
        """Assert that every live sequence is in exactly one place and the books agree."""
        waiting, running = [*self._waiting, *self.tiers.reading], self._running
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
        assert not any(seq.block_table for seq in waiting)
        assert running == sorted(running, key=rank)
        ended = self._in_flight.check_invariants(running)
        assert len(waiting) == len(self._waiting) + len(self.tiers.reading)
        self.tiers.check_invariants()
        assert len({*running, *waiting}) == len(running) + len(waiting)
        assert {*running, *waiting} == set(self.sequences())
        self._accounts.check_invariants(list(self._waiting.queued()), running)
        self._beams.check_invariants(running)
        holders = [*running, *ended]
        self._admission.check_invariants(holders, self._limits.max_num_seqs)
        self._blocks.check_invariants(holders)
