"""Verifies drafts: keeps those equal to the target's own draws, and takes the others back.

Each row draws its token as without drafts, from the same random number, so the answer is the same
for any proposal. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.plan import Sampled, ScheduledSequence, StepLoad
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


class Speculates(Protocol):
    """Proposes the next tokens of running answers."""

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts for some sequences.

        Args:
            answers: of the next step, each with its own rows and its maximum of drafts.
            room: drafts in all.
        """
        ...

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        """Return True if drafts after the results in flight promise more than planning ahead.

        Args:
            answers: in flight without drafts; see `propose`.
            room: drafts in all.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise RequestError if a request excludes speculation."""
        ...

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None: ...

    def end(self, sequence: Sequence) -> None: ...


def accepted_run(drafts: Ordered[int], results: Ordered[Sampled]) -> Ordered[Sampled]:
    """Return the valid results: up to the first that differs from the draft after its row.

    Drops a row that failed after accepted drafts; it runs again by itself.

    Args:
        results: of the row before each draft, and of the last one's row.
    """
    count = 0
    while count < len(drafts) and results[count].token_id == drafts[count]:
        count += 1
    if count and results[count].error is not None:
        return results[:count]
    return results[: count + 1]


def settle_run(blocks: BlockManager, entry: ScheduledSequence, num_accepted: int) -> None:
    """Record an entry's rows up to its last accepted draft, and release the blocks after it.

    A recurrent state is after the last row. So if a draft was rejected, it is rewound to before the
    first one, and the rows run again.

    Args:
        entry: its accepted tokens are in the sequence.
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
