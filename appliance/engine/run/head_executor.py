"""Runs a draft head on the hidden states of the served model's layers.

Beyond the last of these it continues from its own hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.engine.run.draft_executor import DraftExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from torch import Tensor

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.engine.run.sampler import SampleTokens
    from appliance.engine.speculation.draft_model import DraftRows
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.parts import LibraryLinear
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.native import NativeDecoder


class HeadExecutor(DraftExecutor):
    """A loaded head with its cache.

    A position's row has its hidden state and the token after it, and draws the token after that.

    Args:
        output: has the output matrix: the head itself, or the served model.
        kept: hidden states of the served model.
        fuse: makes a hidden state from these; None uses them as they are.
        chains_normed: continues from its own hidden states after the last norm.
        names: (num_tokens,) int64 from the head's tokens to the served model's; None if equal.
    """

    _ahead = 1

    def __init__(
        self,
        head: NativeDecoder,
        output: NativeDecoder,
        cache: NativeCache,
        sample_tokens: SampleTokens,
        kept: HiddenRows,
        *,
        fuse: LibraryLinear | None,
        chains_normed: bool,
        names: Tensor | None,
    ) -> None:
        super().__init__(head, cache, sample_tokens)
        self._head = head
        self._head_cache = cache
        self._output = output
        self._kept = kept
        self._fuse = fuse
        self._chains_normed = chains_normed
        self._names = names
        self._own: dict[Sequence, Tensor] = {}  # of rows that drew last, (1, hidden_size)

    def _logits(
        self,
        rows: Ordered[DraftRows],
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
    ) -> Tensor:
        given = self._given(rows)
        stream, hidden = self._head.draft(
            token_ids, positions, batch, self._head_cache, given, wanted
        )
        own = hidden if self._chains_normed else stream
        drawing = [one.sequence for one in rows if one.draws]
        self._own = dict(zip(drawing, own.split(1), strict=True))
        return self._output.logits(hidden)

    def _named(self, tokens: Tensor) -> Tensor:
        if self._names is None:
            return tokens
        return torch.where(tokens < 0, tokens, self._names[tokens.clamp(min=0)])

    def _given(self, rows: Ordered[DraftRows]) -> Tensor:
        """Return hidden states: the served model's for known tokens, the head's own for drafts."""
        if rows[0].end >= len(rows[0].sequence.token_ids):
            return torch.cat([self._own[one.sequence] for one in rows])
        kept = [torch.from_numpy(self._kept.of(one.sequence, one.start, one.end)) for one in rows]
        for one in rows:
            self._kept.drop_before(one.sequence, one.end - 1)
        given = torch.cat(kept)
        return given if self._fuse is None else self._fuse(given)
