"""Tracks each sequence's rows in uncommitted plans. Imports no torch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.policy import may_look_ahead, rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.policy import Rank


class InFlight:
    """Entries of plans in flight; some of the sequences may have ended since.

    Args:
        look_ahead: a sequence may be in two plans at once.

    Attributes:
        entries: by sequence, oldest first; never empty.
        starved: best rank among sequences that found no block and no victim.
    """

    def __init__(self, max_tokens: int, *, look_ahead: bool) -> None:
        self.entries: dict[Sequence, list[ScheduledSequence]] = {}
        self.starved: Rank | None = None
        self._look_ahead = look_ahead
        self._max_tokens = max_tokens

    def add(self, entries: Iterable[ScheduledSequence]) -> None:
        for entry in entries:
            self.entries.setdefault(entry.sequence, []).append(entry)

    def remove(self, entry: ScheduledSequence) -> bool:
        """Remove a finished plan's entry; return True if its sequence has none left in flight."""
        own = self.entries[entry.sequence]
        assert own.pop(0) is entry, "plans are committed in the order they were made in"
        if own:
            return False
        del self.entries[entry.sequence]
        return True

    @property
    def has_drafts(self) -> bool:
        """True if the next rows of some sequence depend on what is accepted."""
        return any(entry.drafts for own in self.entries.values() for entry in own)

    def clear(self) -> list[Sequence]:
        """Remove all entries; return their sequences in rank order."""
        sequences = sorted(self.entries, key=rank)
        self.entries.clear()
        return sequences

    def starve(self, sequence: Sequence) -> None:
        """Record that a sequence found no block and no victim."""
        self.starved = min(self.starved or rank(sequence), rank(sequence))

    def num_left(self, sequence: Sequence) -> int:
        """Count a sequence's plannable rows, the next token's included; 0 if it must wait."""
        own = self.entries[sequence]
        if not self._look_ahead or len(own) > 1:
            return 0
        if self.starved is not None and rank(sequence) > self.starved:
            return 0  # once idle, its blocks can be taken
        first = own[0]
        end = first.start + first.num_tokens
        if not first.samples:
            return len(sequence.token_ids) - end
        is_last = end + 1 >= sequence.max_tokens or end + 1 >= self._max_tokens
        if is_last or not may_look_ahead(sequence):
            return 0
        return len(sequence.token_ids) + 1 - end

    def check_invariants(self, running: list[Sequence]) -> list[Sequence]:
        """Assert that the entries are consistent; return the ended sequences."""
        ended = [seq for seq in self.entries if seq.status is SequenceStatus.FINISHED]
        assert set(self.entries) <= {*running, *ended}
        for sequence, own in self.entries.items():
            assert 0 < len(own) <= 1 + self._look_ahead
            assert all(a.end == b.start for a, b in pairwise(own))
            if sequence.status is SequenceStatus.RUNNING:
                assert own[0].start == sequence.num_computed
                assert len(sequence.token_ids) >= own[0].end - len(own[0].drafts)
        return ended
