"""State slots: the recurrent state of running sequences, and its moves.

A step reads a sequence's state from its slot, or begins from zero at position 0, and writes the
state after its last row back, so a slot is always at the sequence's last row. A sequence that
continues elsewhere first needs a copy: of a checkpoint, of the slot it forks, of its own state
before rejected drafts, or of content in the tiers below. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.blocks.checkpoints import Checkpoint, Checkpoints
from appliance.engine.nouns.moves import StateCopy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Restore:
    """A state on its way into a sequence's slot.

    Attributes:
        copy: None if the tiers below load it.
        checkpoint: the source, if it is one.
    """

    sequence: Sequence
    copy: StateCopy | None = None
    checkpoint: Checkpoint | None = None


class StateSlots:
    """The rows of recurrent state: a slot per running sequence, then checkpoints.

    Copies take effect in plan order. So a checkpoint becomes findable when the plan that writes it
    is committed, and stays until the plans that read it are.

    Args:
        num_slots: sequences that run at once.
        row_bytes: of a slot or checkpoint, for display.

    Attributes:
        checkpoints: found by content.
        num_restored: sequences that continued from a checkpoint so far.
        num_saved: checkpoints made so far.
        num_rewound: sequences rewound past rejected drafts so far.
    """

    def __init__(self, num_slots: int, num_checkpoints: int, row_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self.row_bytes = row_bytes
        self.checkpoints = Checkpoints(range(num_slots, num_slots + num_checkpoints))
        self.num_restored = 0
        self.num_saved = 0
        self.num_rewound = 0
        self.restores: dict[Sequence, _Restore] = {}
        self._in_plans: deque[list[_Restore]] = deque()  # of uncommitted plans, oldest first
        # Rows being written for a sequence, by its number of tokens.
        self._coming: dict[Sequence, dict[int, int]] = {}
        # Rows with the state before the drafts of a sequence's last step; True once copied there.
        self._before: dict[Sequence, tuple[int, bool]] = {}
        # Each answer's last checkpoint; the next one replaces it unless others use it.
        self._tails: dict[Sequence, bytes] = {}
        self._ended: set[int] = set()  # rows of sequences that ended since the last plan

    @property
    def num_rows(self) -> int:
        return self.num_slots + self.checkpoints.num_rows

    @staticmethod
    def row(sequence: Sequence) -> int:
        return sequence.slot - 1

    def is_present(self, sequence: Sequence) -> bool:
        """Return True if a sequence's state is in its slot once all plans have run."""
        return sequence not in self.restores

    def restore(self, sequence: Sequence, content: bytes) -> None:
        """Continue a sequence from a checkpoint, with the next plan."""
        checkpoint = self.checkpoints.get(content)
        assert checkpoint is not None
        self.checkpoints.touch(content)
        self._share(content)
        checkpoint.num_restores += 1
        self.num_restored += 1
        copy = StateCopy(checkpoint.row, self.row(sequence))
        self._begin(_Restore(sequence, copy, checkpoint))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Continue a sequence where another one is, with the next plan."""
        source, checkpoint = self.row(parent), None
        waiting = self.restores.get(parent)
        if waiting is not None and waiting.copy is not None and not self._is_planned(waiting):
            source, checkpoint = waiting.copy.source, waiting.checkpoint
        if checkpoint is not None:
            checkpoint.num_restores += 1
        self._begin(_Restore(child, StateCopy(source, self.row(child)), checkpoint))

    def expect(self, sequence: Sequence, num_tokens: int, *, is_checkpoint: bool) -> int:
        """Continue a sequence from content that arrives from outside with the next plan.

        Args:
            num_tokens: tokens before the state.
            is_checkpoint: other sequences may continue from it too, once it has arrived.

        Returns:
            The row to load the content into.
        """
        row = self.checkpoints.take() if is_checkpoint else None
        if row is None:
            self._begin(_Restore(sequence))
            return self.row(sequence)
        self._coming.setdefault(sequence, {})[num_tokens] = row
        self._begin(_Restore(sequence, StateCopy(row, self.row(sequence))))
        return row

    def _begin(self, restore: _Restore) -> None:
        assert restore.sequence not in self.restores
        self.restores[restore.sequence] = restore

    def remember(self, sequence: Sequence) -> bool:
        """Keep a sequence's state before its next rows; return False if there is no room."""
        if sequence in self._before:
            return True
        if sequence in self.restores:
            return False  # the same plan fills its slot
        row = self.checkpoints.take()
        if row is None:
            return False
        self._before[sequence] = row, False
        return True

    def rewind(self, sequence: Sequence) -> None:
        """Rewind a sequence to the state that `remember` kept, with the next plan."""
        row, _ = self._before[sequence]
        self.num_rewound += 1
        self._begin(_Restore(sequence, StateCopy(row, self.row(sequence))))

    def forget(self, sequence: Sequence) -> None:
        """Drop the state that `remember` kept, if any: the last rows are valid."""
        kept = self._before.get(sequence)
        if kept is not None and sequence not in self.restores:
            del self._before[sequence]
            self.checkpoints.give_back(kept[0])

    def plan(
        self, checkpoints: Iterable[ScheduledSequence]
    ) -> tuple[tuple[StateCopy, ...], tuple[StateCopy, ...]]:
        """Return a complete plan's copies, before its rows and after them.

        Args:
            checkpoints: entries whose last row a checkpoint should follow, if there is room.
        """
        begun = [restore for restore in self.restores.values() if not self._is_planned(restore)]
        self._in_plans.append(begun)
        saved = []
        for entry in checkpoints:
            row = self.checkpoints.take()
            if row is None:
                break
            self._coming.setdefault(entry.sequence, {})[entry.end] = row
            saved.append(StateCopy(self.row(entry.sequence), row))
        copies = [restore.copy for restore in begun if restore.copy is not None]
        for sequence, (row, is_copied) in self._before.items():
            if not is_copied:
                copies.append(StateCopy(self.row(sequence), row))
                self._before[sequence] = row, True
        return tuple(copies), tuple(saved)

    def take_ended(self, copies: Iterable[StateCopy]) -> tuple[int, ...]:
        """Return the rows that ended sequences left since the last plan, without filled ones.

        Args:
            copies: of the plan being made, before its rows.
        """
        ended = self._ended - {copy.destination for copy in copies}
        self._ended = set()
        return tuple(sorted(ended))

    def _is_planned(self, restore: _Restore) -> bool:
        return any(restore in restores for restores in self._in_plans)

    def settle(self) -> None:
        """Record that the oldest plan has run."""
        for restore in self._in_plans.popleft():
            if self.restores.get(restore.sequence) is restore:
                self.end_restore(restore)

    def discard_plans(self) -> list[Sequence]:
        """Forget all plans after a failure; return the sequences whose copies they held."""
        lost = [restore for restores in self._in_plans for restore in restores]
        self._in_plans.clear()
        return [one.sequence for one in lost if self.restores.get(one.sequence) is one]

    def confirm(self, sequence: Sequence, num_tokens: int, block_size: int) -> None:
        """Let others find the checkpoint after a sequence's tokens, if one was written."""
        coming = self._coming.get(sequence)
        row = None if coming is None else coming.pop(num_tokens, None)
        if row is None:
            return
        if not coming:
            del self._coming[sequence]
        hashes = sequence.block_hashes[: num_tokens // block_size]
        is_new = self.checkpoints.add(hashes, row)
        if not is_new:
            self._share(hashes[-1])
            return
        self.num_saved += 1
        if num_tokens > sequence.num_prompt_tokens:
            passed = self._tails.get(sequence)
            self._tails[sequence] = hashes[-1]
            if passed is not None and passed in self.checkpoints:
                self.checkpoints.drop(passed)

    def _share(self, content: bytes) -> None:
        """Keep a checkpoint even when its answer grows past it."""
        for answer in [one for one, tail in self._tails.items() if tail == content]:
            del self._tails[answer]

    def free(self, sequence: Sequence) -> None:
        """Take the state from a sequence; its checkpoints stay."""
        self._ended.add(self.row(sequence))
        restore = self.restores.get(sequence)
        if restore is not None:
            self.end_restore(restore)
        for row in self._coming.pop(sequence, {}).values():
            self.checkpoints.give_back(row)
        self.forget(sequence)
        self._tails.pop(sequence, None)

    def end_restore(self, restore: _Restore) -> None:
        """Forget a restore that is done or no longer wanted; its checkpoint may be evicted."""
        del self.restores[restore.sequence]
        if restore.checkpoint is not None:
            restore.checkpoint.num_restores -= 1

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each slot belongs to one sequence, and that no row is lost."""
        holders = list(sequences)
        rows = [self.row(sequence) for sequence in holders]
        assert len(set(rows)) == len(rows), "two sequences have a state slot"
        assert all(0 <= row < self.num_slots for row in rows), "a sequence runs without a slot"
        assert set(self.restores) <= set(holders), "a state is restored for nobody"
        assert set(self._coming) <= set(holders), "a checkpoint is written for nobody"
        assert set(self._tails) <= set(holders)
        assert set(self._before) <= set(holders), "a state is kept for nobody"
        assert all(sequence.num_computed for sequence in self.restores)
        restores = [one for one in self.restores.values() if one.checkpoint is not None]
        self.checkpoints.check_invariants(
            [one.checkpoint.row for one in restores if one.checkpoint is not None],
            [
                *(row for coming in self._coming.values() for row in coming.values()),
                *(row for row, _ in self._before.values()),
            ],
        )
