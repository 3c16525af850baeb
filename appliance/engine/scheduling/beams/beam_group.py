"""A beam search as a sequence group: one sequence per beam; beams fork one another.

Admits and preempts all beams together, so none waits for a slot or blocks that another one holds.
Only the leader runs at first; the others hold a slot without blocks until they can fork. Imports no
torch.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from appliance.engine.nouns.limits import max_beam_tokens
from appliance.engine.nouns.plan import Update
from appliance.engine.nouns.request import FinishReason
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.nouns.sequence_group import SequenceGroup
from appliance.engine.scheduling.beams.beam_search import Beam, BeamSearch

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.plan import Continuations, Sampled
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


class BeamGroup(SequenceGroup):
    """The beams of one request.

    Args:
        members: one per beam; the first leads.

    Attributes:
        beams: beam by member; all have the same number of tokens.
    """

    def __init__(
        self,
        request: Request,
        members: tuple[Sequence, ...],
        bounds: Bounds,
        blocks: BlockManager,
    ) -> None:
        super().__init__(request, members, bounds)
        num_prompt_tokens = len(request.prompt_token_ids)
        longest = max_beam_tokens(
            num_prompt_tokens,
            len(members),
            bounds.block_size,
            bounds.num_blocks,
            is_recurrent=bounds.is_recurrent,
        )
        room = min(bounds.limits.context_length, longest) - num_prompt_tokens
        max_tokens = min(room, request.sampling.max_tokens or room)
        self.beams = {members[0]: Beam()}
        self._members = members
        self._blocks = blocks
        self._search = BeamSearch(request, bounds.eos_token_ids, max_tokens)
        self._heard: dict[Sequence, Continuations] = {}  # continuations of computed beams
        # Blocks beyond the leader's that the group needs soon, or held at its preemption.
        self._num_beside_leader = len(members) - 1

    def unit(self, sequence: Sequence) -> tuple[Sequence, ...]:
        return self._members

    def num_beside(self, sequence: Sequence) -> int:
        """See `SequenceGroup`; never exceeds the cache."""
        own = self._blocks.blocks_for(len(sequence.token_ids))
        return max(0, min(self._num_beside_leader, self._blocks.num_blocks - own))

    def start(self) -> None:
        """Hold all members except the leader."""
        for member in self._members[1:]:
            member.is_held = True

    def lose(self) -> None:
        self._heard.clear()
        for member in self._members:
            member.is_held = False
        tables = [member.block_table for member in self._members]
        self._num_beside_leader = max(
            len(self._members) - 1, len(set().union(*tables)) - len(tables[0])
        )

    def take(
        self, sequence: Sequence, run: Ordered[Sampled], updates: list[Update]
    ) -> FinishReason | None:
        """See `SequenceGroup`; the updates come with the last beam of the last step."""
        (sampled,) = run
        assert sampled.continuations is not None
        self._heard[sequence] = sampled.continuations
        if len(self._heard) < len(self.beams):
            self._fork_next()
            return None
        parents = list(self.beams)
        grown = self._search.advance([(self.beams[one], self._heard[one]) for one in parents])
        self._heard.clear()
        if self._search.over:
            updates += self._best()
            return FinishReason.STOP
        self._regroup([(parents[place], beam) for place, beam in grown])
        return None

    def cut(self) -> tuple[Update, ...]:
        """Return the best answers so far, from beams past the prompt."""
        self._search.cut(self.beams.values())
        return self._best()

    def _regroup(self, grown: list[tuple[Sequence, Beam]]) -> None:
        """Assign sequences to the surviving beams.

        A beam's best continuation stays in its sequence. The others fork it into sequences of beams
        that ended.
        """
        chosen: dict[Sequence, tuple[Sequence, Beam]] = {}
        forks = []
        for parent, beam in grown:
            if parent in chosen:
                forks.append((parent, beam))
            else:
                chosen[parent] = (parent, beam)
        empty = [member for member in self._members if member not in chosen]
        chosen |= zip(empty, forks, strict=False)
        leader = self._members[0]
        if leader not in chosen:  # many beams have ended, so the forks are too few
            chosen[leader] = chosen.pop(next(iter(chosen)))
        parents = {parent for parent, _ in chosen.values()}
        for member in self._members:
            if member not in parents:
                self._blocks.free(member)
        for member, (parent, beam) in chosen.items():
            if member is not parent:
                member.token_ids = [*parent.token_ids, beam.token_id]
                self._blocks.fork(parent, member, parent.num_computed)
                member.is_held = False
        for member in self._members:
            if member not in chosen:
                self._blocks.free(member)
                member.token_ids = list(member.request.prompt_token_ids)
                member.block_hashes = []
                member.is_held = True
            elif chosen[member][0] is member:
                member.token_ids.append(chosen[member][1].token_id)
        self.beams = {member: chosen[member][1] for member in self._members if member in chosen}

    def _fork_next(self) -> None:
        """After a preemption, start the held beam that shares most with a computed one.

        Starts one at a time, so that beams share blocks as before.
        """
        waiting = [member for member in self.beams if member.is_held]
        if len(self._heard) + len(waiting) < len(self.beams):
            return  # one of them is being computed
        pairs = [(parent, child) for parent in self._heard for child in waiting]
        parent, child = max(pairs, key=lambda pair: _num_common(*pair))
        num_tokens = min(_num_common(parent, child), len(child.token_ids) - 1)
        self._blocks.fork(parent, child, num_tokens)
        child.is_held = False

    def _best(self) -> tuple[Update, ...]:
        """Return the answers, best first, as updates of the first members."""
        sampling = self.request.sampling
        return tuple(
            Update(
                member,
                found.token_ids,
                found.reason,
                None if sampling.logprobs is None else found.logprobs,
                found.cumulative_logprob,
            )
            for member, found in zip(
                self._members[: sampling.n], self._search.finished, strict=False
            )
        )

    def check_invariants(self) -> None:
        """Assert that members wait or run together, and that only held ones lack blocks."""
        is_running = self._members[0].status is SequenceStatus.RUNNING
        states = {member.status for member in self._members}
        assert len(states) == 1, "a group waits in part"
        assert self._members[0] in self.beams
        assert len({len(member.token_ids) for member in self.beams}) == 1
        assert set(self._heard) < set(self.beams)
        for member in self._members:
            assert member.group is self
            assert is_running or not member.is_held
            assert not (member.block_table and member.is_held)
            if member in self._heard:
                assert not member.num_uncomputed
            elif member not in self.beams and is_running:
                assert member.is_held


def _num_common(one: Sequence, other: Sequence) -> int:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
