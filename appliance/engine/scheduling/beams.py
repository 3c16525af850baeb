"""Beam search: a request's beams as sequences, and the search that grows them.

`BeamSearch` decides as transformers' `generate(num_beams=...)` does, so both find the same answers;
only `BeamGroup` knows of blocks. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from appliance.engine.nouns.limits import max_beam_tokens
from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.plan import Update
from appliance.engine.nouns.request import FinishReason
from appliance.engine.nouns.sequence import SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as Ordered

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.plan import Continuations, Sampled
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


class BeamGroup(SequenceGroup):
    """The beams of one request, each in a sequence; they fork one another.

    Admits and preempts all beams together, so none waits for a slot or blocks that another one
    holds. Only the leader runs at first; the others hold a slot without blocks until they can fork.

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
                member.token_ids = member.request.ids()
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


class BeamSearch:
    """The search for one request: grows beams, ranks answers and decides when to stop.

    Args:
        eos_token_ids: tokens that end an answer, unless the request ignores them.

    Attributes:
        finished: the best answers so far, best first; at most as many as beams.
        over: no growing beam can still improve `finished`.
    """

    def __init__(self, request: Request, eos_token_ids: Collection[int], max_tokens: int) -> None:
        sampling = request.sampling
        self.finished: list[Hypothesis] = []
        self.over = False
        self._sampling = sampling
        self._width = sampling.num_sequences
        self._max_tokens = max_tokens
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._stop = [string.encode() for string in sampling.stop]
        self._tail_bytes = max(map(len, self._stop), default=1) - 1
        self._pieces = request.stop_pieces

    def advance(self, heard: list[tuple[Beam, Continuations]]) -> list[tuple[int, Beam]]:
        """Grow all beams by one token.

        Args:
            heard: all beams, of equal length, with each one's continuations.

        Returns:
            The surviving beams, best first, each with its parent's index in `heard`; none if the
                search
            is over.
        """
        ranked = sorted(
            (-beam.score - candidate.logprob, place, rank)
            for place, (beam, continuations) in enumerate(heard)
            for rank, candidate in enumerate(continuations.candidates)
        )
        num_tokens = heard[0][0].num_tokens + 1
        is_last = num_tokens >= self._max_tokens
        grown: list[tuple[int, Beam]] = []
        for position, (_, place, rank) in enumerate(ranked):
            if position >= self._width and (is_last or len(grown) == self._width):
                break
            beam, ends = self._extend(*heard[place], rank)
            if not (ends or is_last):
                if len(grown) < self._width:
                    grown.append((place, beam))
            elif position < self._width:  # lower ranks only replace candidates that ended
                self._finish(beam, FinishReason.STOP if ends else FinishReason.LENGTH)
        self.over = not grown or self._is_settled(grown[0][1])
        return [] if self.over else grown

    def cut(self, beams: Iterable[Beam]) -> None:
        """End the search: beams past the prompt become answers.

        They compete with the finished answers by the same score.
        """
        for beam in beams:
            if beam.num_tokens:
                self._finish(beam, FinishReason.TIMEOUT)
        self.over = True

    def _extend(self, beam: Beam, continuations: Continuations, rank: int) -> tuple[Beam, bool]:
        candidate = continuations.candidates[rank]
        token_id, num_before = candidate.token_id, beam.num_tokens
        tail, ends = self._extend_tail(beam.tail, token_id)
        bias = self._sampling.bias_at(num_before).get(token_id, 0.0)
        grown = Beam(
            score=beam.score + candidate.logprob,
            num_tokens=num_before + 1,
            token_id=token_id,
            logprob=candidate.logprob - bias,
            top=continuations.top,
            before=beam,
            tail=tail,
        )
        # Before min_tokens nothing ends: the sampler bans tokens that would.
        return grown, ends or token_id in self._ends

    def _extend_tail(self, tail: bytes, token_id: int) -> tuple[bytes, bool]:
        """Return the text's tail after one more token, and True if it contains a stop string."""
        if not self._stop:
            return b"", False
        piece = self._pieces.get(token_id)
        if piece is None:  # shares no byte with a stop string
            return b"", False
        text = tail + piece
        ends = any(stop in text for stop in self._stop)
        return text[len(text) - min(len(text), self._tail_bytes) :], ends

    def _finish(self, beam: Beam, reason: FinishReason) -> None:
        score = beam.score / math.pow(beam.num_tokens, self._sampling.length_penalty)
        self.finished.append(Hypothesis(beam, score, reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._width :]

    def _is_settled(self, best: Beam) -> bool:
        """Return True if the best growing beam cannot beat the finished answers."""
        if len(self.finished) < self._width:
            return False
        early_stopping = self._sampling.early_stopping
        if early_stopping is True:
            return True
        penalty = self._sampling.length_penalty
        longest = early_stopping == "never" and penalty > 0.0
        num_tokens = self._max_tokens if longest else best.num_tokens
        return best.score / math.pow(num_tokens, penalty) <= self.finished[-1].score


@dataclass(frozen=True, slots=True)
class Beam:
    """The last token of a growing answer, linked through `before` to all earlier ones.

    Attributes:
        score: sum of the log probabilities that rank beams, `logit_bias` included.
        token_id: the last token.
        logprob: the model's log probability of this token, without bias.
        top: the likeliest tokens in its place, if reported.
        before: its parent; None at the prompt.
        tail: the last bytes of the text, where a stop string may begin.
    """

    score: float = 0.0
    num_tokens: int = 0
    token_id: int = -1
    logprob: float = 0.0
    top: tuple[Candidate, ...] = ()
    before: Beam | None = None
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    beam: Beam
    score: float  # with the length penalty
    reason: FinishReason

    def path(self) -> list[Beam]:
        path, beam = [], self.beam
        while beam.before is not None:
            path.append(beam)
            beam = beam.before
        return path[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(beam.token_id for beam in self.path())

    @property
    def cumulative_logprob(self) -> float:
        """Natural logarithm of the answer's probability."""
        return math.fsum(beam.logprob for beam in self.path())

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(
            TokenLogprobs(Candidate(beam.token_id, beam.logprob), beam.top) for beam in self.path()
        )
