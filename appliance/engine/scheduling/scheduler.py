"""Continuous batching: plans each step and commits its results.

`plan` picks rows and blocks, a runner runs them, `commit` appends the tokens and verifies drafts.
`state.py` holds every sequence, `policy.py` the order of service. Imports no torch.
"""

from __future__ import annotations

import math
from array import array
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Protocol

from appliance.engine.blocks.block_metadata import MAX_OWNER
from appliance.engine.nouns.limits import Bounds, check_request
from appliance.engine.nouns.limits import SchedulerLimits as SchedulerLimits
from appliance.engine.nouns.plan import Plan, StepLoad, Update
from appliance.engine.nouns.request import FinishReason
from appliance.engine.nouns.sequence import Sequence, SequenceGroup, SequenceStatus
from appliance.engine.scheduling.beams import BeamGroup
from appliance.engine.scheduling.plan_builder import PlanBuilder, extend, wanted_rows
from appliance.engine.scheduling.policy import may_draft, most_drafts
from appliance.engine.scheduling.state import InFlight, State, add_states
from appliance.engine.scheduling.turns import plan_prompts
from appliance.engine.tiers.tiers import Tiers
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from collections.abc import Sequence as Ordered

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.plan import Sampled, ScheduledSequence
    from appliance.engine.nouns.request import Request
    from appliance.engine.scheduling.plan_builder import Rows
    from appliance.stats import EngineStats


class Speculates(Protocol):
    """Proposes the next tokens of running answers."""

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts for some sequences.

        Args:
            answers: of the next step, each with its own rows and its maximum of drafts.
            room: drafts in all.
        """
        ...

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        """Return True if drafts after the results in flight promise more than planning ahead.

        Args:
            answers: in flight without drafts; see `propose`.
            room: drafts in all.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise RequestError if a request excludes speculation."""
        ...

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None: ...

    def end(self, sequence: Sequence) -> None: ...


class Scheduler:
    """Turns requests into plans, and sampled tokens into updates.

    Between `plan` and `commit` a plan is in flight: its sequences are not preempted, and blocks of
    those that end meanwhile stay until `commit`. So `plan` may be called again before `commit`; it
    then plans for other sequences and, with look-ahead, for the next rows of sequences in one plan
    in flight. Plans run and commit in order.

    Args:
        blocks: the KV cache's block manager; only the scheduler changes it.
        eos_token_ids: tokens that end an answer, unless the request ignores them.
        look_ahead: the runner can feed a sampled token to the next plan by itself.
        tiers: keep evicted content; None keeps nothing.
        speculator: proposes drafts; None runs none. With `look_ahead` no plan is made while drafts
            are in flight, nor while its own next drafts promise more than planning ahead.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        eos_token_ids: Collection[int] = (),
        *,
        look_ahead: bool = False,
        tiers: Tiers | None = None,
        speculator: Speculates | None = None,
    ) -> None:
        assert limits.max_num_seqs <= MAX_OWNER, "slots are written down in 16 bits"
        bounds = Bounds(
            limits,
            blocks.num_blocks,
            blocks.block_size,
            frozenset(eos_token_ids),
            is_recurrent=blocks.states is not None,
        )
        in_flight = InFlight(bounds.max_tokens, look_ahead=look_ahead)
        self.state = State(blocks, tiers or Tiers.none(blocks), bounds, in_flight)
        self.speculator = speculator
        self._last_arrival = -math.inf

    @property
    def has_work(self) -> bool:
        return bool(self.state.groups)

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over all live sequences, by request in order of arrival."""
        return self.state.sequences()

    def stamp(self, now: float) -> float:
        """Return the arrival of a request that something else holds first, for `add`.

        Two requests in one clock tick still have an order, and one that was held has its place.
        """
        self._last_arrival = max(now, math.nextafter(self._last_arrival, math.inf))
        return self._last_arrival

    def add(self, request: Request, now: float, *, arrival: float | None = None) -> None:
        """Queue a request.

        Args:
            now: monotonic seconds.
            arrival: a `stamp`; None if it arrives now.

        Raises:
            ContextLengthError: the prompt leaves no room in the context for an answer.
            RequestError: the prompt is empty or fills the KV cache, the id is taken, there is no
                room for so many beams, or the configured speculation excludes them.
        """
        state = self.state
        if request.request_id in state.groups:
            raise RequestError(f"request id {request.request_id} is in use; choose another")
        check_request(request, state.bounds)
        if self.speculator is not None:
            self.speculator.check(request)
        arrival = self.stamp(now) if arrival is None else arrival
        state.enter(_group_of(request, arrival, state.bounds, state.blocks))
        state.counters.prompt_tokens += len(request.prompt_token_ids)

    def num_cached(self, request: Request) -> int:
        """Count the leading tokens of a prompt that would not run if it came next.

        0 if it would have to wait, since others may take their blocks meanwhile.
        """
        state = self.state
        if state.num_waiting or not state.slots:
            return 0
        sequence = Sequence(request)
        return state.tiers.num_found(sequence, state.blocks.find_prefix(sequence))

    def expire(self, now: float) -> list[Update]:
        """End the sequences past their deadline, with the best answers of their groups so far.

        Args:
            now: monotonic seconds.
        """
        updates: list[Update] = []
        for sequence in self.state.deadlines.take(now):
            if sequence.status is not SequenceStatus.FINISHED:
                answers = {answer.sequence: answer for answer in sequence.group.cut()}
                for one in self.finish(sequence, FinishReason.TIMEOUT):
                    over = Update(one, finish_reason=FinishReason.TIMEOUT)
                    updates.append(answers.get(one, over))
        expired = {update.sequence.request.request_id for update in updates}
        self.state.counters.expired += len(expired)
        return updates

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one choice of it, in any phase; return False if it was not live.

        Beams end together.
        """
        group = self.state.groups.get(request_id)
        live = [] if group is None else group.live
        ending = [sequence for sequence in live if index is None or sequence.index == index]
        for sequence in ending:
            self.finish(sequence, FinishReason.ABORT)
        self.state.counters.aborted += bool(ending)
        return bool(ending)

    def finish(self, sequence: Sequence, reason: FinishReason) -> tuple[Sequence, ...]:
        """End one sequence, in any phase, with its unit; return the sequences that this ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return ()
        ended = sequence.group.unit(sequence)
        for member in ended:
            self.state.end(member, reason)
            if self.speculator is not None:
                self.speculator.end(member)
        return ended

    def fail(self, sequence: Sequence, error: str | None) -> list[Update]:
        """End a sequence after an error, with its unit."""
        reason = FinishReason.ERROR
        return [
            Update(ended, finish_reason=reason, error=error)
            for ended in self.finish(sequence, reason)
        ]

    def plan(self, now: float) -> Plan | None:
        """Plan the next step: decodes, then prompts that run or may start, within the budget.

        Args:
            now: monotonic seconds.

        Returns:
            None if there is nothing to run before the plan in flight is committed; without one,
            that means no work at all, or only sequences that wait for the disk.
        """
        state = self.state
        state.blocks.metadata.begin_step(now)
        builder = PlanBuilder(state.bounds.limits.planned_rows, now)
        state.wake(now)
        decodes, prompts = wanted_rows(state)
        state.in_flight.starved = None
        if self._waits(decodes, prompts):
            return None
        drafts = self._drafts(decodes, prompts)
        for place, (sequence, num_left) in enumerate(decodes, 1):
            if num_left > 1:
                num_later = len(decodes) - place  # each of these gets a row as well
                num_left = max(1, min(num_left, builder.budget - num_later))
            extend(state, builder, sequence, num_left, drafts.get(sequence, ()) if drafts else ())
        state.accounts.charge(builder.entries)
        if builder.budget and (prompts or state.waiting):
            plan_prompts(state, builder, prompts)
        state.blocks.settle()
        if not builder.entries:
            return None
        state.counters.steps += 1
        state.in_flight.add(builder.entries.values())
        state.counters.last_plan = plan = builder.finished(state.blocks, state.tiers)
        return plan

    def commit(self, plan: Plan, sampled: Ordered[Sampled]) -> list[Update]:
        """Record that a plan was run.

        Args:
            plan: the oldest one in flight.
            sampled: one per scheduled sequence that yields something, in plan order; ignores those
                of sequences that have ended.

        Returns:
            Updates for the clients: new tokens, ends and failures.
        """
        state, results = self.state, iter(sampled)
        blocks, in_flight, counters = state.blocks, state.in_flight, state.counters
        parked, num_generated = state.waiting.parked, 0
        if blocks.states is not None:
            blocks.states.settle()
        state.tiers.confirm(plan.scheduled)
        updates: list[Update] = []
        for entry in plan.scheduled:
            sequence = entry.sequence
            # `entry.yields` without its call: this runs for every row of every step
            result = next(results) if entry.samples or entry.read else None
            others = tuple(islice(results, len(entry.drafts))) if entry.drafts else ()
            if result is not None and result.error is not None:
                updates += self.fail(sequence, result.error)
            is_idle = in_flight.remove(entry)
            if sequence.status is SequenceStatus.FINISHED:
                if is_idle:
                    state.release(sequence)
                continue
            if others:
                assert result is not None
                self._commit_run(entry, (result, *others), updates)
                continue
            blocks.commit(sequence, entry.num_tokens)
            if blocks.states is not None:
                blocks.states.forget(sequence)
            if result is None:
                continue
            if entry.read:
                _take_read(entry, result, updates)
            if not entry.samples:
                continue
            group = sequence.group
            num_generated += group.generates
            reason = group.take(sequence, (result,), updates)
            if sequence in parked:
                state.waiting.unpark(sequence)
            if reason is not None:
                self.finish(sequence, reason)
        counters.generation_tokens += num_generated
        assert next(results, None) is None, "there are more results than the plan has rows for"
        return updates

    def _waits(self, decodes: Rows, prompts: Rows) -> bool:
        """Return True if the plan in flight decides what the next one should hold."""
        speculator, in_flight = self.speculator, self.state.in_flight
        if speculator is None or not in_flight.entries:
            return False
        if in_flight.has_drafts:
            return True
        if not self._may_draft(decodes, prompts):
            return False
        ahead = [(one, rows) for one, rows in decodes if one in in_flight.entries]
        # Their next token is on its way: the drafts are those after it.
        bounds = self.state.bounds
        most = [(one, rows, most_drafts(one, rows, bounds, is_ahead=True)) for one, rows in ahead]
        return bool(ahead) and speculator.awaits(most, self._room(decodes, prompts))

    def _drafts(self, decodes: Rows, prompts: Rows) -> dict[Sequence, tuple[int, ...]]:
        """Ask for drafts, in steps that may hold some."""
        speculator, in_flight = self.speculator, self.state.in_flight
        if speculator is None or not self._may_draft(decodes, prompts):
            return {}
        bounds = self.state.bounds
        most = [
            (one, rows, 0 if one in in_flight.entries else most_drafts(one, rows, bounds))
            for one, rows in decodes
        ]
        return speculator.propose(most, self._room(decodes, prompts))

    def _may_draft(self, decodes: Rows, prompts: Rows) -> bool:
        num_startable = len(self.state.waiting) if self.state.slots else 0
        return bool(decodes) and may_draft(len(prompts), num_startable)

    def _room(self, decodes: Rows, prompts: Rows) -> int:
        """Return the number of drafts for which a step has room; a row is left for each prompt."""
        limits = self.state.bounds.limits
        return min(
            limits.planned_rows - sum([rows for _, rows in decodes]) - len(prompts),
            limits.sample_rows - len(decodes),
        )

    def _commit_run(
        self, entry: ScheduledSequence, results: Ordered[Sampled], updates: list[Update]
    ) -> None:
        """Append the tokens of an entry with drafts; keep its rows up to the last accepted one."""
        sequence, state = entry.sequence, self.state
        before = len(sequence.token_ids)
        reason = sequence.group.take(sequence, accepted_run(entry.drafts, results), updates)
        added = len(sequence.token_ids) - before
        settle_run(state.blocks, entry, added - 1)
        state.counters.generation_tokens += added
        state.counters.count_drafts(entry, added - 1)
        state.accounts.of(sequence).served += added - 1
        if reason is not None:
            self.finish(sequence, reason)

    def discard_plans(self) -> None:
        """Forget all plans in flight: their steps failed.

        Their live sequences wait and start over, because some blocks may not have been written.
        """
        state, states = self.state, self.state.blocks.states
        in_plans = state.in_flight.clear()
        if states is not None:
            in_plans += [one for one in states.discard_plans() if one not in in_plans]
        for sequence in in_plans:
            state.tiers.discard(sequence)
            if sequence.status is SequenceStatus.FINISHED:
                state.release(sequence)
            elif sequence.status is SequenceStatus.RUNNING:  # otherwise requeued with its unit
                state.requeue(sequence)
        state.tiers.discard_saves()

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        """Learn a step's duration, to size the prompt rows and drafts of others.

        Args:
            is_ahead: the step was planned while the one before it ran.
        """
        self.state.budget.observe(load, seconds)
        if self.speculator is not None:
            self.speculator.observe(load, seconds, is_ahead=is_ahead)

    def stats(self) -> EngineStats:
        """Return the scheduler's part of the snapshot; the engine adds times."""
        state = self.state
        snapshot = state.counters.snapshot(state.blocks, len(state.running), state.num_waiting)
        return add_states(state.tiers.add_stats(snapshot), state.blocks.states)

    def check_invariants(self) -> None:
        """Assert that every live sequence is in exactly one place and the records agree."""
        self.state.check_invariants()


def _group_of(
    request: Request, arrival: float, bounds: Bounds, blocks: BlockManager
) -> SequenceGroup:
    """Return a new group; none of its sequences runs yet.

    `arrival`, in monotonic seconds, is unique to the group.
    """
    parent = Sequence(request, arrival=arrival)
    children = [
        Sequence(request, index=index, arrival=arrival, parent=parent)
        for index in range(1, request.sampling.num_sequences)
    ]
    members = (parent, *children)
    if request.sampling.use_beam_search:
        return BeamGroup(request, members, bounds, blocks)
    return SequenceGroup(request, members, bounds)


def _take_read(entry: ScheduledSequence, result: Sampled, updates: list[Update]) -> None:
    """Record that an entry's rows were read; pass on their scores, or sum them until complete.

    Args:
        entry: of an executed plan, with rows to read.
        updates: receives the client's updates.
    """
    sequence = entry.sequence
    sequence.num_read = entry.read.stop
    if result.pooled is None:
        updates.append(Update(sequence, prompt_logprobs=result.scores))
        return
    before = sequence.pooled
    pooled = result.pooled if before is None else array("d", map(add, before, result.pooled))
    sequence.pooled = pooled
    if sequence.num_read == sequence.to_read.stop:
        updates.append(Update(sequence, pooled=_mean(sequence, pooled)))


def _mean(sequence: Sequence, pooled: array[float]) -> bytes:
    return array("f", [value / len(sequence.to_read) for value in pooled]).tobytes()


def accepted_run(drafts: Ordered[int], results: Ordered[Sampled]) -> Ordered[Sampled]:
    """Return the valid results: up to the first that differs from the draft after its row.

    Each row draws its token as without drafts, from the same random number, so the answer is the
    same for any proposal. Drops a row that failed after accepted drafts; it runs again by itself.

    Args:
        results: of the row before each draft, and of the last one's row.
    """
    count = 0
    while count < len(drafts) and results[count].token_id == drafts[count]:
        count += 1
    if count and results[count].error is not None:
        return results[:count]
    return results[: count + 1]


def settle_run(blocks: BlockManager, entry: ScheduledSequence, num_accepted: int) -> None:
    """Record an entry's rows up to its last accepted draft, and release the blocks after it.

    A recurrent state is after the last row. So if a draft was rejected, it is rewound to before the
    first one, and the rows run again.

    Args:
        entry: its accepted tokens are in the sequence.
    """
    sequence, states = entry.sequence, blocks.states
    if states is None or num_accepted == len(entry.drafts):
        blocks.commit(sequence, entry.num_own + num_accepted)
    if states is not None:
        if num_accepted == len(entry.drafts):
            states.forget(sequence)
        else:
            states.rewind(sequence)
    blocks.truncate(sequence)
