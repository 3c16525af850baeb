"""Runs a draft model's rows and draws its tokens, with the target's random numbers.

Leaves penalties, bias and grammars to the target, which draws every token anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.engine.run.slot_settings import random_key, uniform_numbers
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.sampling import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.run.sampler import SampleTokens
    from appliance.engine.speculation.draft_model import DraftRows
    from appliance.model.executor import Cache, Executor


class DraftExecutor:
    """A loaded draft model with its cache; see `DraftModel`."""

    _ahead = 0  # distance from a row's next token to the drawn one

    def __init__(self, executor: Executor[Any], cache: Cache, sample_tokens: SampleTokens) -> None:
        self._executor = executor
        self._cache = cache
        self._sample_tokens = sample_tokens

    def copy(self, pairs: Ordered[tuple[int, int]]) -> None:
        """Copy blocks, given as source and destination."""
        if pairs:
            self._cache.copy_blocks([source for source, _ in pairs], [to for _, to in pairs])

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
            block_size=self._cache.block_size,
            device=self._executor.device,
        )
        # The served model may have a few more tokens; drafts after one of them are bad guesses.
        most = self._executor.spec.num_embedded - 1
        logits = self._logits(
            rows,
            torch.tensor(token_ids).clamp(max=most),
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
        return self._executor.forward(token_ids, positions, batch, self._cache, wanted)


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
