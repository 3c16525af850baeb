"""A sequence group: the sequences of one request, scheduled together.

The scheduler calls a group's methods and knows no kind of group. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.limits import reason_to_finish
from appliance.engine.nouns.plan import Update
from appliance.engine.nouns.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.engine.nouns.plan import Sampled
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


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
