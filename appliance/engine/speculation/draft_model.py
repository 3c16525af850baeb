"""Proposes the next tokens of a smaller model, or of a head, one by one. Imports no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from appliance.engine.speculation.controller import RowCosts
from appliance.engine.speculation.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.draft_blocks import DraftBlocks
    from appliance.engine.speculation.proposal import Chance

READ_ROWS = 256  # tokens read per step: a long prompt takes several
SOURCES = ("draft", "sampled draft")  # greedy answers, and sampled ones


class DraftRows(NamedTuple):
    """Rows of one sequence for a draft model.

    Attributes:
        start: position of the first.
        blocks: the draft model's, for all tokens up to the last of these.
        draws: the last row draws a token.
        skipped: positions before `start` that `blocks` omits.
    """

    sequence: Sequence
    start: int
    token_ids: Ordered[int]
    blocks: Ordered[int]
    draws: bool = True
    skipped: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class DraftModel(Protocol):
    """A model and its cache."""

    def copy(self, pairs: Ordered[tuple[int, int]]) -> None:
        """Copy blocks, given as source and destination."""
        ...

    def run(self, rows: Ordered[DraftRows]) -> list[tuple[int, float]]:
        """Run rows; return token and probability of each drawing sequence, in order.

        The rows are all of known tokens, or all of drafts. Draws with the target's random number
        for the same position.
        """
        ...


class _Growing(NamedTuple):
    """A draft in the making."""

    sequence: Sequence
    start: int  # position of its first row
    most: int
    token_ids: list[int]
    supports: list[int]


class DraftModelProposer:
    """Lets a draft model continue answers.

    Args:
        model: its vocabulary is the target's.
        blocks: content of its cache.
        vocab_size: the target's; a draft ends before a token beyond it.

    Attributes:
        costs: seconds of a round by the number of its sequences.
        read_seconds: per token, read with many others.
    """

    def __init__(
        self,
        model: DraftModel,
        blocks: DraftBlocks,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = RowCosts()
        self.read_seconds = 0.0
        self._model = model
        self.blocks = blocks
        self._vocab_size = vocab_size
        self.clock = clock

    def source(self, sequence: Sequence) -> str:
        """Return the source under which to learn a sequence's acceptance."""
        return SOURCES[sequence.request.sampling.temperature > 0]

    def unread(self, sequence: Sequence) -> int:
        """Return the number of tokens to read before the first draft."""
        return self.blocks.num_rows(sequence) - (self.blocks.num_read(sequence) or 0)

    def propose(
        self, answers: Ordered[tuple[Sequence, int]], chance: Chance, least: float
    ) -> dict[Sequence, Proposal]:
        """Return proposals for sequences whose tokens are all read.

        Args:
            answers: running sequences, each with the maximum of useful tokens, at least 1.
            chance: of a token, by sequence, source and support.
            least: stop a draft when its chance as a whole falls below this.
        """
        rows = self._first_rows([sequence for sequence, _ in answers])
        if not rows:
            return {}
        most = dict(answers)
        drafts = [
            _Growing(one.sequence, one.start, most[one.sequence], [], [])
            for one in rows
            if one.draws
        ]
        self._model.copy(self.blocks.take_copies())
        drawn = self._round(rows)
        for one in rows:
            self.blocks.wrote(one.sequence, one.start, one.token_ids)
        growing, chances = drafts, [1.0] * len(drafts)
        while growing:
            kept = []
            for draft, before, (token_id, probability) in zip(growing, chances, drawn, strict=True):
                if not 0 <= token_id < self._vocab_size:
                    continue
                support = int(100 * probability)
                draft.token_ids.append(token_id)
                draft.supports.append(support)
                after = before * chance(draft.sequence, self.source(draft.sequence), support)
                if len(draft.token_ids) < draft.most and after >= least:
                    kept.append((draft, after))
            growing, chances = [draft for draft, _ in kept], [after for _, after in kept]
            if growing:
                drawn = self._round([self._next_row(draft) for draft in growing])
        return self._finished(drafts)

    def end(self, sequence: Sequence) -> None:
        self.blocks.end(sequence)

    def _first_rows(self, sequences: Ordered[Sequence]) -> list[DraftRows]:
        """Return rows of unread tokens, as many as one step may read."""
        found, room, size = [], READ_ROWS, self.blocks.block_size
        for sequence in sequences:
            start, end = self.blocks.num_read(sequence), self.blocks.num_rows(sequence)
            if start is None:
                continue
            is_whole = end - start <= room
            if not is_whole:
                end = (start + room) // size * size
            if end <= start:
                continue
            room -= end - start
            blocks, ahead = self.blocks.table(sequence, end), self.blocks.ahead
            tokens = sequence.token_ids[start + ahead : end + ahead]
            skipped = self.blocks.num_skipped(sequence)
            found.append(DraftRows(sequence, start, tokens, blocks, is_whole, skipped))
        return found

    def _next_row(self, one: _Growing) -> DraftRows:
        end = self.blocks.num_rows(one.sequence) + len(one.token_ids)
        blocks = self.blocks.table(one.sequence, end)
        skipped = self.blocks.num_skipped(one.sequence)
        return DraftRows(one.sequence, end - 1, one.token_ids[-1:], blocks, skipped=skipped)

    def _round(self, rows: Ordered[DraftRows]) -> list[tuple[int, float]]:
        begin = self.clock()
        drawn = self._model.run(rows)
        seconds, count = self.clock() - begin, sum(len(one.token_ids) for one in rows)
        if count <= 2 * len(rows):
            self.costs.observe(len(rows), seconds)
        elif count >= READ_ROWS // 4:
            self.read_seconds = seconds / count
        return drawn

    def _finished(self, drafts: Ordered[_Growing]) -> dict[Sequence, Proposal]:
        found = {}
        for sequence, _, _, token_ids, supports in drafts:
            if token_ids:
                # A head's draft rows run again, with hidden states of the served model.
                if not self.blocks.ahead:
                    self.blocks.wrote(sequence, len(sequence.token_ids), token_ids[:-1])
                found[sequence] = Proposal(
                    tuple(token_ids), self.source(sequence), supports=tuple(supports)
                )
        return found
