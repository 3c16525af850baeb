"""What is scheduled as one: the sequences of one request, and how they depend on each other.

The scheduler asks a group and knows of no kind of it. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.limits import reason_to_finish
from appliance.engine.plan import Update
from appliance.engine.request import FinishReason

if TYPE_CHECKING:
    from appliance.engine.limits import Bounds
    from appliance.engine.plan import Sampled
    from appliance.engine.request import Request
    from appliance.engine.sequence import Sequence


class SequenceGroup:
    """A sequence, or `n` siblings that share a prompt; each of them is served by itself.

    Args:
        request: what was asked.
        members: one for each choice, by index.
        bounds: where answers end.

    Attributes:
        live: members that have not ended.
    """

    def __init__(self, request: Request, members: tuple[Sequence, ...], bounds: Bounds) -> None:
        self.request = request
        self.live = list(members)
        self._bounds = bounds
        for member in members:
            member.group = self

    def unit(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """The live members that start, give way and end together with one, the first leads."""
        return (sequence,)

    def num_beside(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence's unit will soon need beside its own, if it has any."""
        return 0

    def start(self) -> None:
        """A unit was admitted: its leader has blocks."""

    def lose(self) -> None:
        """A unit is about to lose its blocks; all but its tokens will be computed again."""

    def take(
        self, sequence: Sequence, sampled: Sampled, updates: list[Update]
    ) -> FinishReason | None:
        """Grow by what was sampled for a member whose tokens are all computed.

        Args:
            sequence: the member.
            sampled: that came of its last row.
            updates: what clients are told, to which this adds.

        Returns:
            Why the member ends now, and its unit with it, if it does.
        """
        if not sequence.request.generates:
            updates.append(Update(sequence, finish_reason=FinishReason.LENGTH))
            return FinishReason.LENGTH
        sequence.token_ids.append(sampled.token_id)
        reason = reason_to_finish(sequence, self._bounds)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        updates.append(Update(sequence, (sampled.token_id,), reason, logprobs))
        return reason

    def cut(self) -> tuple[Update, ...]:
        """The answers that can be given now that there is no more time."""
        return ()

    def check_invariants(self) -> None:
        """Assert that the members are where the group thinks they are."""
        assert all(member.group is self for member in self.live)
        assert not any(member.is_held for member in self.live)
