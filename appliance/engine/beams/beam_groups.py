"""The sequences of beam searches: as many per request as it has beams, which fork one another.

A group's sequences are admitted and preempted together, so that none of them waits for a slot or
blocks that another one waits with. Among them only the first runs at first; the others are held,
with a slot and without blocks, until there is something to fork. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from appliance.engine.beams.beam_search import Beam, BeamSearch
from appliance.engine.limits import max_beam_tokens
from appliance.engine.plan import BeamAnswer

if TYPE_CHECKING:
    from collections.abc import Collection

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.plan import Continuations
    from appliance.engine.request import Request
    from appliance.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One request under way.

    Attributes:
        members: one sequence per beam, the first of which leads.
        search: which beams go on.
        beams: of the members that have one; they all have equally many tokens.
        heard: what may follow those that are computed.
        num_beside_leader: blocks that it needs soon, or held when it was preempted, beside those
            of the leader.
    """

    members: tuple[Sequence, ...]
    search: BeamSearch
    beams: dict[Sequence, Beam]
    num_beside_leader: int
    heard: dict[Sequence, Continuations] = field(default_factory=dict)


class BeamGroups:
    """All beam searches that are live.

    Args:
        blocks: the KV cache's books.
        eos_token_ids: tokens that end an answer, unless the request ignores them.
        context_length: tokens of one sequence, prompt and answer together.

    Attributes:
        held: members of running groups that wait for a sibling to fork.
    """

    def __init__(
        self, blocks: BlockManager, eos_token_ids: Collection[int], context_length: int
    ) -> None:
        self.held: set[Sequence] = set()
        self._blocks = blocks
        self._eos_token_ids = eos_token_ids
        self._context_length = context_length
        self._groups: dict[str, BeamGroup] = {}
        self._answers: list[BeamAnswer] = []

    def add(self, request: Request, members: list[Sequence]) -> None:
        """Begin a search; nothing of it runs yet."""
        num_prompt_tokens = len(request.prompt_token_ids)
        longest = max_beam_tokens(
            num_prompt_tokens, len(members), self._blocks.block_size, self._blocks.num_blocks
        )
        room = min(self._context_length, longest) - num_prompt_tokens
        max_tokens = min(room, request.sampling.max_tokens or room)
        self._groups[request.request_id] = BeamGroup(
            members=tuple(members),
            search=BeamSearch(request, self._eos_token_ids, max_tokens),
            beams={members[0]: Beam()},
            num_beside_leader=len(members) - 1,
        )

    def members(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """All sequences that live and wait with this one; without beam search, itself."""
        if not sequence.request.sampling.use_beam_search:
            return (sequence,)
        return self._groups[sequence.request.request_id].members

    def dissolve(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Forget the sequence's group, if it has one; returns who was in it."""
        members = self.members(sequence)
        self._groups.pop(sequence.request.request_id, None)
        self.held.difference_update(members)
        return members

    def start(self, sequence: Sequence) -> None:
        """Hold back all but the leader of a group that was just admitted."""
        self.held.update(self.members(sequence)[1:])

    def lose(self, sequence: Sequence) -> None:
        """Prepare for a group to lose its blocks: all but its tokens has to be computed again."""
        if not sequence.request.sampling.use_beam_search:
            return
        group = self._groups[sequence.request.request_id]
        group.heard.clear()
        self.held.difference_update(group.members)
        tables = [member.block_table for member in group.members]
        group.num_beside_leader = max(
            len(group.members) - 1, len(set().union(*tables)) - len(tables[0])
        )

    def num_beside(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence's siblings will soon need, as far as there are so many."""
        if not sequence.request.sampling.use_beam_search:
            return 0
        own = self._blocks.blocks_for(len(sequence.token_ids))
        group = self._groups[sequence.request.request_id]
        return max(0, min(group.num_beside_leader, self._blocks.num_blocks - own))

    def spared(self, sequence: Sequence, in_flight: Collection[Sequence]) -> Collection[Sequence]:
        """Who must not be preempted for a sequence: its siblings, and groups of which one runs."""
        if not self._groups:
            return in_flight
        spared = set(in_flight)
        for group in self._groups.values():
            if sequence in group.members or not spared.isdisjoint(group.members):
                spared.update(group.members)
        return spared

    def take(self, sequence: Sequence, continuations: Continuations) -> bool:
        """A beam's tokens are all computed; returns whether that ends the search."""
        group = self._groups[sequence.request.request_id]
        group.heard[sequence] = continuations
        if len(group.heard) < len(group.beams):
            self._fork_next(group)
            return False
        parents = list(group.beams)
        grown = group.search.advance([(group.beams[one], group.heard[one]) for one in parents])
        group.heard.clear()
        if group.search.over:
            self._answers += self._best(group)
            return True
        self._regroup(group, [(parents[place], beam) for place, beam in grown])
        return False

    def cut(self, sequence: Sequence) -> None:
        """Let the search that the sequence is part of, if any, end with the best it has now."""
        group = self._groups.get(sequence.request.request_id)
        if group is not None:
            group.search.cut(group.beams.values())
            self._answers += self._best(group)

    def take_answers(self) -> list[BeamAnswer]:
        """What came of the searches that ended since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _regroup(self, group: BeamGroup, grown: list[tuple[Sequence, Beam]]) -> None:
        """Let the beams that go on have the sequences.

        The best continuation of a beam stays in its sequence. The others fork it and go into those
        of beams that end here.
        """
        chosen: dict[Sequence, tuple[Sequence, Beam]] = {}
        forks = []
        for parent, beam in grown:
            if parent in chosen:
                forks.append((parent, beam))
            else:
                chosen[parent] = (parent, beam)
        empty = [member for member in group.members if member not in chosen]
        chosen |= zip(empty, forks, strict=False)
        leader = group.members[0]
        if leader not in chosen:  # so many beams have ended that there are not enough forks
            chosen[leader] = chosen.pop(next(iter(chosen)))
        parents = {parent for parent, _ in chosen.values()}
        for member in group.members:
            if member not in parents:
                self._blocks.free(member)
        for member, (parent, beam) in chosen.items():
            if member is not parent:
                member.token_ids = [*parent.token_ids, beam.token_id]
                self._blocks.fork(parent, member, parent.num_computed)
                self.held.discard(member)
        for member in group.members:
            if member not in chosen:
                self._blocks.free(member)
                member.token_ids = list(member.request.prompt_token_ids)
                member.block_hashes = []
                self.held.add(member)
            elif chosen[member][0] is member:
                member.token_ids.append(chosen[member][1].token_id)
        group.beams = {member: chosen[member][1] for member in group.members if member in chosen}

    def _fork_next(self, group: BeamGroup) -> None:
        """After a preemption: start the held beam that shares most with one that is computed.

        One after another, so that blocks are shared as they were before.
        """
        waiting = [member for member in group.beams if member in self.held]
        if len(group.heard) + len(waiting) < len(group.beams):
            return  # one of them is being computed
        pairs = [(parent, child) for parent in group.heard for child in waiting]
        parent, child = max(pairs, key=lambda pair: _num_common(*pair))
        num_tokens = min(_num_common(parent, child), len(child.token_ids) - 1)
        self._blocks.fork(parent, child, num_tokens)
        self.held.remove(child)

    @staticmethod
    def _best(group: BeamGroup) -> list[BeamAnswer]:
        num_answers = group.members[0].request.sampling.n
        return [
            BeamAnswer(
                member, found.token_ids, found.logprobs, found.cumulative_logprob, found.reason
            )
            for member, found in zip(
                group.members[:num_answers], group.search.finished, strict=False
            )
        ]

    def check_invariants(self, running: Collection[Sequence]) -> None:
        """Assert that groups wait or run as a whole and that only held members have no blocks."""
        members = {member for group in self._groups.values() for member in group.members}
        assert self.held <= members & set(running)
        for group in self._groups.values():
            states = {member.status for member in group.members}
            assert len(states) == 1, "a group waits in part"
            assert group.members[0] in group.beams
            assert len({len(member.token_ids) for member in group.beams}) == 1
            assert set(group.heard) < set(group.beams)
            for member in group.members:
                assert not (member.block_table and member in self.held)
                if member in group.heard:
                    assert not member.num_uncomputed
                elif member not in group.beams and member in running:
                    assert member in self.held


def _num_common(one: Sequence, other: Sequence) -> int:
    """Tokens that two sequences begin with alike."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
