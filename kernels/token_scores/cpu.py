"""Scores given tokens by the CPU library: one pass over the logits of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.cpu.engine import check
from appliance.kernels.operations import TokenScores

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.engine import NativeEngine


class NativeScores:
    """Scores as `reference.score_tokens` does, up to float32 rounding.

    Args:
        engine: runs nothing else during a call.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    def __call__(self, logits: Tensor, targets: Tensor, count: int) -> TokenScores:
        """See `ScoreTokens`; logits are contiguous.

        Raises:
            MemoryError: the workspace is beyond the engine's limit or the system's memory.
        """
        num_rows, vocab_size = logits.shape
        assert arrays.dtype_name(logits.dtype) == "float32"
        assert logits.is_contiguous()
        assert arrays.dtype_name(targets.dtype) == "int64"
        assert targets.is_contiguous()
        assert len(targets) == num_rows
        found = TokenScores(
            arrays.empty(num_rows, "float32", logits),
            arrays.empty((num_rows, count), "float32", logits),
            arrays.empty((num_rows, count), "int64", logits),
        )
        check(
            self._engine.library.ap_score(
                self._engine.handle,
                logits.data_ptr(),
                num_rows,
                vocab_size,
                targets.data_ptr(),
                count,
                *(tensor.data_ptr() for tensor in found),
            )
        )
        return found
