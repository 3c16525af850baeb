"""Beam search over one prompt: grows beams, ranks answers and decides when to stop.

Decides as transformers' `generate(num_beams=...)` does, so both find the same answers. Knows
nothing of blocks. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import Candidate, TokenLogprobs
from appliance.engine.nouns.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from appliance.engine.nouns.plan import Continuations
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sampling_params import SamplingParams


def num_candidates(sampling: SamplingParams, eos_token_ids: Collection[int]) -> int:
    """Return the number of continuations to rank per beam.

    At most one continuation per beam survives, plus tokens that end the answer. Any token may
    complete a stop string, so it keeps some to spare.
    """
    return 2 * sampling.num_sequences + len({*eos_token_ids, *sampling.stop_token_ids})


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


class BeamSearch:
    """The search for one request.

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
