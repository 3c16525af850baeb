"""What one step is to do and what came of it: decided by the scheduler, executed by others.

Plain frozen data. Imports no torch and knows neither tensors nor devices.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.blocks.block_metadata import MAX_OWNER

if TYPE_CHECKING:
    from appliance.engine.messages import Candidate, TokenLogprobs
    from appliance.engine.moves import BlockCopy, BlockLoad, BlockSave
    from appliance.engine.request import FinishReason
    from appliance.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much runs at once.

    With at least as many rows as sequences, every running sequence moves in every step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int  # rows of one step
    context_length: int  # tokens of one sequence, prompt and answer together

    def __post_init__(self) -> None:
        assert 0 < self.max_num_seqs <= MAX_OWNER
        assert self.max_num_batched_tokens > 0
        assert self.context_length > 1


class ScheduledSequence(NamedTuple):
    """Rows [start, start + num_tokens) of a sequence's token ids run in this step.

    Attributes:
        sequence: whose rows they are.
        start: the sequence's num_computed once all plans before this one are committed.
        num_tokens: how many rows.
        samples: the last row yields a new token.
        follows: the only row's token is the one that the plan before samples, and nobody knows it
            yet: where that token ends the sequence, this row was for nothing.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    follows: bool = False

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step, the one that it samples not included."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What decides how long a step takes.

    Attributes:
        num_answers: sequences with a single row.
        context: tokens before these rows, all together.
        prompt_rows: rows of the others.
        prompt_work: for each of these rows the tokens before it, summed up.
    """

    num_answers: int = 0
    context: int = 0
    prompt_rows: int = 0
    prompt_work: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        scheduled: each sequence at most once; those with a single row come first.
        copies: to be done before any row of this step is written. No block is the destination of
            two of them, and none is both a source and a destination, so their order is free.
        started: request ids that left the queue for the first time.
        preempted: sequences that lost their blocks and wait again.
        open_pages: with sealed layers, of each entry those of the blocks that its rows lie in.
        saves: content to be taken out before anything else is done, since it may be overwritten.
        loads: content to be put in after the copies and before any row.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    started: tuple[str, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    open_pages: tuple[tuple[int, ...], ...] | None = None
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum([entry.num_tokens for entry in self.scheduled])

    @property
    def num_decode_tokens(self) -> int:
        """Rows that extend an answer; the rest are prompts, and what a preemption lost."""
        return sum(
            entry.samples
            and entry.num_tokens == 1
            and entry.start >= entry.sequence.num_prompt_tokens
            for entry in self.scheduled
        )

    @property
    def num_single_rows(self) -> int:
        """Sequences with one row: all that extend an answer, and now and then a prompt's end.

        Takes the same time for any number of them, so it can be asked in every step.
        """
        return bisect_left(self.scheduled, 2, key=attrgetter("num_tokens"))

    @property
    def load(self) -> StepLoad:
        """How much work it is."""
        single = self.num_single_rows
        prompts = self.scheduled[single:]
        return StepLoad(
            single,
            sum([entry.start for entry in self.scheduled[:single]]),
            sum(entry.num_tokens for entry in prompts),
            sum(entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in prompts),
        )

    @property
    def num_samples(self) -> int:
        """Sequences that get a token from this step."""
        return sum(entry.samples for entry in self.scheduled)


class Update(NamedTuple):
    """The token that a step added to a sequence, and why it was the last one, if it was.

    A token that ends the answer (end of sequence, stop token) is part of the sequence and of the
    update; whether it is shown is up to the detokenizer.
    """

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None


class Sampled(NamedTuple):
    """What one sequence got: a token, or the reason why there is none."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    broken: bool = False  # the model's fault, not the request's
    continuations: Continuations | None = None  # of a beam


@dataclass(frozen=True, slots=True)
class Continuations:
    """What may follow a beam: the likeliest tokens, likeliest first.

    Attributes:
        candidates: with the log probabilities that the search goes by; banned tokens left out.
        top: as many as the request wants to be told of, with the model's log probabilities.
    """

    candidates: tuple[Candidate, ...]
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """One of the answers that a beam search ends with.

    Attributes:
        sequence: whose index is the answer's place, 0 for the best.
        token_ids: the whole answer, with the token that ends it.
        logprobs: of each token.
        cumulative_logprob: natural logarithm of the answer's probability.
        finish_reason: why it ended.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float
    finish_reason: FinishReason
