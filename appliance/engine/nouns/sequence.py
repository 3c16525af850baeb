"""A sequence and its group: token ids with block table and status, the only object that changes.

A group holds the sequences of one request, scheduled together. The scheduler calls its methods and
knows no kind of group. Imports no torch.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from appliance.engine.nouns.limits import reason_to_finish
from appliance.engine.nouns.plan import Update
from appliance.engine.nouns.request import FinishReason
from appliance.engine.nouns.row_axes import RowAxes

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.engine.nouns.plan import Sampled
    from appliance.engine.nouns.request import Request


class SequenceStatus(Enum):
    WAITING = "waiting"  # without blocks: new, or preempted
    RUNNING = "running"  # with blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer of one choice of a request.

    Attributes:
        index: its number among the request's choices.
        token_ids: prompt, then answer.
        num_prompt_tokens: tokens of the client's prompt.
        max_tokens: the request's maximum, prompt and answer.
        num_computed: leading tokens whose keys and values are in the cache.
        num_cached: prompt tokens from the prefix cache at first admission.
        to_read: positions of the prompt that need more than keys and values; the first sequence of
            a request reads for all.
        num_read: `to_read` is done before this position.
        pooled: sum of these positions' hidden states, for their mean.
        num_kept: while it waits after a preemption, leading tokens whose blocks are kept.
        num_alike: when it started, leading tokens in cached blocks, even without a state.
        axes: positions in time, height and width of its rows; None without pictures.
        block_table: block ids, append-only while running; 32 bits each, as devices read them.
        block_hashes: chained hash of each full block known so far.
        parent: sibling whose prompt blocks it forks once they are computed.
        group: all sequences of the request, and operations on them together.
        is_held: runs without blocks until it forks a sibling's.
        slot: small number that identifies it in block metadata while it runs.
    """

    request: Request
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    to_read: range = range(0)
    num_read: int = 0
    pooled: array[float] | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    num_kept: int = 0
    num_alike: int = 0
    axes: RowAxes | None = field(init=False)
    block_table: array[int] = field(default_factory=partial(array, "i"))
    block_hashes: list[bytes] = field(default_factory=list)
    parent: Sequence | None = None
    group: SequenceGroup = field(init=False, repr=False)
    is_held: bool = False
    slot: int = 0
    arrival: float = 0.0  # monotonic seconds
    first_scheduled: float | None = None
    num_preemptions: int = 0
    num_overtaken: int = 0  # by later sequences that started before it
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        pictures = self.request.pictures
        self.axes = None if pictures is None else RowAxes.of(pictures)
        most = self.request.sampling.max_tokens
        self.max_tokens = sys.maxsize if most is None else self.num_prompt_tokens + most
        if not self.token_ids:
            self.token_ids = self.request.ids()
        if self.index == 0:
            self.to_read = self.request.to_read
            self.num_read = self.to_read.start

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose keys and values may come from elsewhere; later rows must run."""
        most = len(self.token_ids) - 1  # logits need the last one
        return most if self.num_read >= self.to_read.stop else min(most, self.num_read)

    def rows_to_read(self, start: int, end: int) -> range:
        """Return those of the rows [start, end) that need more than keys and values."""
        return range(max(start, self.num_read), min(end, self.to_read.stop))

    @property
    def num_uncomputed(self) -> int:
        """Tokens not in the cache yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed


class SequenceGroup:
    """A sequence, or `n` siblings that share a prompt; each is scheduled on its own.

    Attributes:
        live: members that have not ended.
        generates: members have answers; otherwise each ends with its prompt.
    """

    def __init__(self, request: Request, members: tuple[Sequence, ...], bounds: Bounds) -> None:
        self.request = request
        self.live = list(members)
        self.generates = request.generates
        self._bounds = bounds
        for member in members:
            member.group = self

    def unit(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Return the live members that start, are preempted and end together; the first leads."""
        return (sequence,)

    def num_beside(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence's unit will soon need beyond its own."""
        return 0

    def start(self) -> None:
        """Start an admitted unit, whose leader has blocks."""

    def lose(self) -> None:
        """Prepare a unit for losing its blocks; its tokens will be recomputed."""

    def take(
        self, sequence: Sequence, run: Ordered[Sampled], updates: list[Update]
    ) -> FinishReason | None:
        """Append a member's samples up to one that ends it.

        Args:
            sequence: a member whose tokens are all computed.
            run: its next tokens; several if drafts were accepted.
            updates: receives the client's updates.

        Returns:
            Why the member ends now, with its unit, or None.
        """
        if not self.generates:
            updates.append(Update(sequence, finish_reason=FinishReason.LENGTH))
            return FinishReason.LENGTH
        reason = None
        tokens: tuple[int, ...] = ()
        reports: tuple[TokenLogprobs, ...] = ()
        for sampled in run:
            sequence.token_ids.append(sampled.token_id)
            tokens += (sampled.token_id,)
            if sampled.logprobs is not None:
                reports += (sampled.logprobs,)
            reason = reason_to_finish(sequence, self._bounds)
            if reason is not None:
                break
        updates.append(Update(sequence, tokens, reason, reports or None))
        return reason

    def cut(self) -> tuple[Update, ...]:
        """Return the answers available at a timeout."""
        return ()

    def check_invariants(self) -> None:
        assert all(member.group is self for member in self.live)
        assert not any(member.is_held for member in self.live)
