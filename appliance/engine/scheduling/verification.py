"""Verifies drafts: keeps those that equal the target's own draws, and takes the others back.

Each row of a step draws its token as it would without drafts, from the same random number, so the
answer is the plain one whatever was proposed. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.plan import Sampled, ScheduledSequence, StepLoad
    from appliance.engine.request import Request
    from appliance.engine.sequence import Sequence


class Speculates(Protocol):
    """Proposes the next tokens of running answers."""

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts of some sequences.

        Args:
            answers: those of the next step, each with its own rows and the most drafts that it may
                have.
            room: drafts in all.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise RequestError if a request cannot be served with it."""
        ...

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn the duration of a step."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...


def accepted_run(drafts: Ordered[int], results: Ordered[Sampled]) -> Ordered[Sampled]:
    """Return the results that count: up to the first that is not the draft behind its row.

    A row that failed behind accepted drafts is left out; it runs again, by itself.

    Args:
        drafts: tokens proposed.
        results: of the row before each of these, and of the last one's row.
    """
    count = 0
    while count < len(drafts) and results[count].token_id == drafts[count]:
        count += 1
    if count and results[count].error is not None:
        return results[:count]
    return results[: count + 1]


def settle_run(blocks: BlockManager, entry: ScheduledSequence, num_accepted: int) -> None:
    """Record the rows of an entry up to its last accepted draft, and take back the blocks behind.

    The state of recurrent layers is behind the last row, so where a draft was rejected they go back
    to before the first one, and the rows are run again.

    Args:
        blocks: the KV cache's.
        entry: its accepted tokens are in the sequence.
        num_accepted: drafts.
    """
    sequence, states = entry.sequence, blocks.states
    if states is None or num_accepted == len(entry.drafts):
        blocks.commit(sequence, entry.num_own + num_accepted)
    if states is not None:
        if num_accepted == len(entry.drafts):
            states.forget(sequence)
        else:
            states.rewind(sequence)
    blocks.truncate(sequence)
