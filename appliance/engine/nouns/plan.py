"""The plan of one step and its results: the scheduler makes it, others execute it.

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

    from appliance.engine.nouns.messages import Candidate, TokenLogprobs
    from appliance.engine.nouns.moves import BlockCopy, BlockLoad, BlockSave, StateMoves
    from appliance.engine.nouns.request import FinishReason
    from appliance.engine.nouns.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Runs rows [start, start + num_tokens) of a sequence's token ids in this step.

    Attributes:
        start: its num_computed once all earlier plans are committed.
        num_tokens: number of rows, drafts included.
        samples: the sequence's last row, and each draft's, yields a new token.
        follows: the previous plan samples this entry's only token; if that token ends the sequence,
            this row is wasted.
        read: positions that need more than keys and values, see `Request.to_read`.
        drafts: proposed tokens, in the last rows.
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
        """True if the rows yield more than keys and values."""
        return self.samples or bool(self.read)

    @property
    def num_results(self) -> int:
        """Number of results: one per sampling row, or one for reading a prompt."""
        return 1 + len(self.drafts) if self.samples else int(bool(self.read))

    @property
    def num_own(self) -> int:
        return self.num_tokens - len(self.drafts)

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step, drafts included, without the sampled one."""
        return self.start + self.num_tokens


def sampling_rows(scheduled: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return an entry for each row that yields a token, as if the step ended there.

    Each keeps the drafts up to its own row.
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
    """The quantities that determine a step's duration.

    Attributes:
        num_answers: sequences with a single row, or one row and drafts.
        context: sum of the tokens before these rows.
        prompt_rows: rows of the other sequences.
        prompt_work: sum of the tokens before each of these rows.
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
        scheduled: each sequence at most once; single rows come first.
        copies: to make before writing any row. No block is the destination of two copies or both
            source and destination, so their order is free.
        started: ids of requests that leave the queue for the first time.
        preempted: sequences that lost their blocks and wait again.
        open_blocks: with sealed layers, the open blocks that each entry writes.
        saves: content to copy out first, before it is overwritten.
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

        The others belong to prompts, or recompute preempted sequences.
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

        Logarithmic time, so every step can read it.
        """
        return bisect_left(self.scheduled, 2, key=attrgetter("num_tokens"))

    @property
    def load(self) -> StepLoad:
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
        return [entry for entry in self.scheduled[self.num_single_rows :] if entry.drafts]

    @property
    def num_prompt_rows(self) -> int:
        """Rows of sequences with several rows and no drafts, whose tokens are known."""
        several = self.scheduled[self.num_single_rows :]
        return sum([entry.num_tokens for entry in several if not entry.drafts])


class Sampled(NamedTuple):
    """The result of one row: a token, a prompt's scores, or an error."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    broken: bool = False  # the model's fault, not the request's
    continuations: Continuations | None = None  # of a beam
    scores: tuple[TokenLogprobs, ...] = ()  # of the tokens after the rows read
    pooled: array[float] | None = None  # pooled sum of hidden states, or labels' logits


@dataclass(frozen=True, slots=True)
class Continuations:
    """The likeliest tokens after a beam, likeliest first.

    Attributes:
        candidates: with the log probabilities that rank beams, without banned tokens.
        top: the requested number, with the model's log probabilities.
    """

    candidates: tuple[Candidate, ...]
    top: tuple[Candidate, ...] = ()


class Update(NamedTuple):
    """Tokens that a step added to a sequence, or the sequence's end.

    A token that ends the answer (end of sequence, stop token) belongs to the sequence and the
    update; the detokenizer decides whether to show it.

    Attributes:
        token_ids: the next ones; all at once if nothing is shown before the end.
        finish_reason: set with the last token.
        logprobs: per token, if requested.
        cumulative_logprob: of a beam search, natural logarithm of the answer's probability.
        prompt_logprobs: of the prompt's next tokens.
        pooled: the prompt's pooled hidden state, or its labels' logits: float32 in the machine's
            byte order.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: bytes | None = None
