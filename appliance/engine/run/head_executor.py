"""Runs the head that a checkpoint brings for drafting, on hidden states of the served model.

Behind the last of these it goes on from its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.engine.run.draft_executor import DraftExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from torch import Tensor

    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.engine.run.sampler import SampleTokens
    from appliance.engine.sequence import Sequence
    from appliance.engine.speculation.draft_model import DraftRows
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.native import NativeDecoder


class HeadExecutor(DraftExecutor):
    """A loaded head with its cache.

    The row of a position has the hidden state of that position and the token behind it, and draws
    the token after that.

    Args:
        target: the served model, whose embedding and output matrix it reads.
        kept: hidden states of the served model.
        chains_normed: its own hidden states are those under its last norm.
    """

    _ahead = 1

    def __init__(
        self,
        head: NativeDecoder,
        target: NativeDecoder,
        cache: NativeCache,
        sample_tokens: SampleTokens,
        kept: HiddenRows,
        *,
        chains_normed: bool,
    ) -> None:
        super().__init__(head, cache, sample_tokens)
        self._head = head
        self._head_cache = cache
        self._target = target
        self._kept = kept
        self._chains_normed = chains_normed
        self._own: dict[Sequence, Tensor] = {}  # of the rows that drew last, (1, hidden_size)

    def _logits(
        self,
        rows: Ordered[DraftRows],
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
    ) -> Tensor:
        """Run one step; return logits of the wanted rows."""
        given = torch.cat([self._given(one) for one in rows])
        stream, hidden = self._head.draft(
            token_ids, positions, batch, self._head_cache, given, wanted
        )
        own = hidden if self._chains_normed else stream
        drawing = [one.sequence for one in rows if one.draws]
        self._own = dict(zip(drawing, own.split(1), strict=True))
        return self._target.logits(hidden)

    def _given(self, rows: DraftRows) -> Tensor:
        sequence, end = rows.sequence, rows.start + len(rows.token_ids)
        if end >= len(sequence.token_ids):
            return self._own[sequence]
        given = torch.from_numpy(self._kept.of(sequence, rows.start, end))
        self._kept.drop_before(sequence, end - 1)
        return given
