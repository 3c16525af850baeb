"""The plan of one step and its results: made by the scheduler, executed by others.

Plain frozen data. Imports no torch and knows neither tensors nor devices.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from appliance.engine.messages import Candidate, TokenLogprobs
    from appliance.engine.moves import BlockCopy, BlockLoad, BlockSave, StateMoves
    from appliance.engine.request import FinishReason
    from appliance.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Rows [start, start + num_tokens) of a sequence's token ids run in this step.

    Attributes:
        start: its num_computed once all earlier plans are committed.
        num_tokens: rows, with those of drafts.
        samples: the last row of its own yields a new token, and so does each draft's.
        follows: the only row's token is the one that the plan before samples, and nobody knows it
            yet: where that token ends the sequence, this row was for nothing.
        read: places of the rows that are wanted for more than keys and values, see
            `Request.to_read`.
        drafts: tokens proposed to follow its own; the last rows are theirs.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    follows: bool = False
    read: range = range(0)
    drafts: tuple[int, ...] = ()

    @property
    def yields(self) -> bool:
        """True if the rows have a result beside keys and values."""
        return self.samples or bool(self.read)

    @property
    def num_results(self) -> int:
        """Results of the rows: a token of each that samples, or what was read of a prompt."""
        return 1 + len(self.drafts) if self.samples else int(bool(self.read))

    @property
    def num_own(self) -> int:
        """Rows of tokens that the sequence has."""
        return self.num_tokens - len(self.drafts)

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step, drafts included, without the sampled one."""
        return self.start + self.num_tokens


def sampling_rows(scheduled: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return an entry for each row that yields a token, as if the step ended there.

    Of its entry such a row has the drafts up to its own.
    """
    rows: list[ScheduledSequence] = []
    for entry in scheduled:
        if not entry.samples:
            continue
        if not entry.drafts:
            rows.append(entry)
            continue
        own, drafts = entry.num_own, entry.drafts
        rows += [
            entry._replace(num_tokens=own + count, drafts=drafts[:count])
            for count in range(len(drafts) + 1)
        ]
    return rows


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The quantities that decide how long a step takes.

    Attributes:
        num_answers: sequences with a single row, or one row and drafts.
        context: sum of the tokens before these rows.
        prompt_rows: rows of the others.
        prompt_work: sum over these rows of the tokens before each.
        draft_rows: rows of drafts.
    """

    num_answers: int = 0
    context: int = 0
    prompt_rows: int = 0
    prompt_work: float = 0.0
    draft_rows: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        scheduled: each sequence at most once; those with a single row come first.
        copies: to be done before any row of this step is written. No block is the destination of
            two copies, and none is both a source and a destination, so their order is free.
        started: request ids that left the queue for the first time.
        preempted: sequences that lost their blocks and wait again.
        open_blocks: with sealed layers, the open blocks of the blocks that each entry writes.
        saves: content to copy out first of all, since it may be overwritten.
        loads: content to write after the copies and before any row.
        states: moves of recurrent states; None for models without.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    started: tuple[str, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    open_blocks: tuple[tuple[int, ...], ...] | None = None
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    states: StateMoves | None = None

    @property
    def num_tokens(self) -> int:
        return sum([entry.num_tokens for entry in self.scheduled])

    @property
    def num_decode_tokens(self) -> int:
        """Rows that extend an answer, drafts included.

        The rest are prompts, and most of what preemption lost.
        """
        return sum(
            [
                entry.num_tokens
                for entry in self.scheduled
                if entry.samples and entry.start >= entry.sequence.num_prompt_tokens
            ]
        )

    @property
    def num_single_rows(self) -> int:
        """Sequences with one row: answers without drafts, and sometimes the end of a prompt.

        Takes the same time for any number of them, so it can be read in every step.
        """
        return bisect_left(self.scheduled, 2, key=attrgetter("num_tokens"))

    @property
    def load(self) -> StepLoad:
        """The amount of work in this step."""
        single = self.num_single_rows
        if single == len(self.scheduled):
            return StepLoad(single, sum([entry.start for entry in self.scheduled]))
        answers = [*self.scheduled[:single], *self.drafted]
        prompts = [entry for entry in self.scheduled[single:] if not entry.drafts]
        return StepLoad(
            len(answers),
            sum([entry.start for entry in answers]),
            sum([entry.num_tokens for entry in prompts]),
            sum([entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in prompts]),
            sum([entry.num_tokens - 1 for entry in self.drafted]),
        )

    @property
    def drafted(self) -> list[ScheduledSequence]:
        """The entries with drafts."""
        return [entry for entry in self.scheduled[self.num_single_rows :] if entry.drafts]

    @property
    def num_prompt_rows(self) -> int:
        """Rows of sequences that have several and no drafts: they read what is known."""
        several = self.scheduled[self.num_single_rows :]
        return sum([entry.num_tokens for entry in several if not entry.drafts])


class Sampled(NamedTuple):
    """The result of one row: a token, scores of a prompt, or why there is neither."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    broken: bool = False  # the model's fault, not the request's
    continuations: Continuations | None = None  # of a beam
    scores: tuple[TokenLogprobs, ...] = ()  # of the tokens behind the rows that were read
    pooled: array[float] | None = None  # or the sum of their hidden states, or logits of labels


@dataclass(frozen=True, slots=True)
class Continuations:
    """The likeliest tokens after a beam, likeliest first.

    Attributes:
        candidates: with the log probabilities that rank beams, without banned tokens.
        top: as many as the request wants reported, with the model's log probabilities.
    """

    candidates: tuple[Candidate, ...]
    top: tuple[Candidate, ...] = ()


class Update(NamedTuple):
    """Tokens that a step added to a sequence, or the sequence's end.

    A token that ends the answer (end of sequence, stop token) is part of the sequence and of the
    update; the detokenizer decides whether it is shown.

    Attributes:
        sequence: the sequence; in a beam search its index is the answer's rank.
        token_ids: the next ones; all at once where nothing is shown before the end.
        finish_reason: set with the last token.
        logprobs: of each token, if the request wants them.
        cumulative_logprob: natural logarithm of the whole answer's probability, of a beam search.
        error: what went wrong, if something did.
        prompt_logprobs: of the next tokens of the prompt.
        pooled: the hidden state that stands for the prompt, or the logits of its labels: float32
            in the machine's byte order.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: bytes | None = None
