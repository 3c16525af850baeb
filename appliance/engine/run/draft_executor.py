"""Runs a draft model's rows, or a draft head's, and draws their tokens with the target's numbers.

The numbers are random; penalties, bias and grammars stay with the target, which draws every token
anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.engine.run.slot_settings import random_key, uniform_numbers
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.sampling.rows import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.engine.run.sampler import SampleTokens
    from appliance.engine.speculation.draft_model import DraftRows
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.parts import LibraryLinear
    from appliance.model.executor import Cache, Executor
    from appliance.model.native import NativeDecoder


class DraftExecutor:
    """A loaded draft model with its cache; see `DraftModel`."""

    _ahead = 0  # distance from a row's next token to the drawn one

    def __init__(self, executor: Executor[Any], cache: Cache, sample_tokens: SampleTokens) -> None:
        self._executor = executor
        self.cache = cache
        self._sample_tokens = sample_tokens

    def copy(self, pairs: Ordered[tuple[int, int]]) -> None:
        """Copy blocks, given as source and destination."""
        if pairs:
            self.cache.copy_blocks([source for source, _ in pairs], [to for _, to in pairs])

    @torch.inference_mode()
    def run(self, rows: Ordered[DraftRows]) -> list[tuple[int, float]]:
        """Run rows; return token and probability of each drawing sequence, in order."""
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for one in rows:
            token_ids += one.token_ids
            positions += range(one.start, one.start + len(one.token_ids))
            if one.draws:
                wanted.append(len(token_ids) - 1)
        batch = RaggedBatch.of(
            [len(one.token_ids) for one in rows],
            [one.start + len(one.token_ids) - one.skipped for one in rows],
            [one.blocks for one in rows],
            block_size=self.cache.block_size,
            device=self._executor.device,
        )
        # The served model may have a few more tokens, and rows of pictures have none; drafts after
        # one of them are bad guesses.
        most = self._executor.spec.num_embedded - 1
        logits = self._logits(
            rows,
            torch.tensor(token_ids).clamp(0, most),
            torch.tensor(positions),
            batch,
            torch.tensor(wanted, dtype=torch.int64),
        )
        drawing = [one for one in rows if one.draws]
        if not drawing:
            return []
        tokens = self._sample_tokens(logits, _settings(drawing, self._ahead))
        probabilities = _probabilities(logits.numpy(), tokens.clamp(min=0).numpy())
        return list(zip(self._named(tokens).tolist(), probabilities, strict=True))

    def _named(self, tokens: Tensor) -> Tensor:
        """Map tokens to the served model's ids."""
        return tokens

    def _logits(
        self,
        rows: Ordered[DraftRows],
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
    ) -> Tensor:
        return self._executor.forward(token_ids, positions, batch, self.cache, wanted)


class HeadExecutor(DraftExecutor):
    """A loaded draft head with its cache, fed by hidden states of the served model's layers.

    Beyond the last of these it continues from its own hidden states.
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


def _probabilities(logits: NDArray[np.float32], token_ids: NDArray[np.int64]) -> list[float]:
    """Return each row's probability of a token.

    Not by torch, whose threads would spin beside the CPU library's when the next round begins.
    """
    chosen = logits[np.arange(len(logits)), token_ids]
    with np.errstate(over="ignore"):  # of a token without a chance
        shares = np.exp(logits - chosen[:, None]).sum(axis=1)
    return (1 / shares).tolist()  # type: ignore[no-any-return]


def _settings(rows: Ordered[DraftRows], ahead: int) -> SamplingRows:
    """Return the rows' sampling settings; each draws the token after its last one."""
    sampling = [one.sequence.request.sampling for one in rows]
    keys = np.array([random_key(one.sequence) for one in rows], dtype=np.uint64)
    positions = np.array([one.start + len(one.token_ids) + ahead for one in rows])
    return SamplingRows.of(
        [one.temperature for one in sampling],
        [one.top_k for one in sampling],
        [one.top_p for one in sampling],
        [one.min_p for one in sampling],
        uniform_numbers(keys, positions).tolist(),
    )
