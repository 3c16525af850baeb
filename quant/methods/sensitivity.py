"""Measures how changing one linear changes a model's answers, many changes in one pass.

The rows pass through the original model and one variant per change together, layer by layer, so
each layer is read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.backend import select_backend
from appliance.kernels.weights.weight import dense
from appliance.quant.walk.block import Moments, observing
from appliance.quant.walk.row_layers import RowLayers

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.walk.block import TransformerBlock

FLOAT = torch.float32
HEAD_ROWS = 64  # tokens whose logits are in memory at once


class Variants:
    """The residual streams of one set of rows, one per variant of a model.

    Args:
        rows: (num_rows, row_tokens) int64.
    """

    def __init__(self, source: ModelSource, rows: Tensor) -> None:
        self._source = source
        self._device = torch.device("cpu")
        self._backend = observing(select_backend(self._device))
        self._layers = RowLayers(source, rows.shape[1], self._backend, self._device)
        self._reader = self._layers.reader
        self._streams = [self._reader.embed(rows.flatten())]  # the original model, then each change
        self._branches: list[Tensor] = []  # variants of the current layer, after it

    def block(self, index: int) -> TransformerBlock:
        return self._layers.block(index)

    def observe(self, block: TransformerBlock) -> list[Moments]:
        """Return the moments of the inputs of an unchanged layer's linears."""
        linears = list(block.linears())
        for linear in linears:
            linear.moments = Moments(linear.in_features, self._device)
        self._layers.run(block, self._streams[0])
        moments = []
        for linear in linears:
            assert linear.moments is not None
            moments.append(linear.moments)
            linear.moments = None
        return moments

    def branch(self, block: TransformerBlock) -> Tensor:
        """Start a variant from the original stream and a changed layer.

        Returns:
            The stream after the layer, (num_rows * row_tokens, hidden_size) float32.
        """
        self._branches.append(self._layers.run(block, self._streams[0]))
        return self._branches[-1]

    def advance(self, block: TransformerBlock) -> None:
        """Pass the original and all earlier variants through the unchanged layer."""
        for index, stream in enumerate(self._streams):  # one by one: they take most of the memory
            self._streams[index] = self._layers.run(block, stream)
        self._streams += self._branches
        self._branches = []

    def divergences(self) -> list[float]:
        """Return each variant's mean KL divergence, in the order they were started."""
        norm = self._reader.first_norm(len(self._source.spec.layers))
        assert norm is not None, "refused before"
        _, matrix = self._reader.embedding_and_head()
        head, bias = dense(matrix, FLOAT), self._reader.head_bias()
        softcap, scale = self._source.spec.logit_softcap, self._source.spec.logit_scale
        tokens = self._streams[0].shape[0]
        sums = [0.0] * (len(self._streams) - 1)
        for start in range(0, tokens, HEAD_ROWS):

            def answers(stream: Tensor, start: int = start) -> Tensor:
                hidden = norm.of(stream[start : start + HEAD_ROWS], self._backend)
                logits = hidden @ head.T
                logits = (logits if bias is None else logits + bias) * scale
                if softcap is not None:
                    logits = self._backend.soft_cap(logits, softcap)
                return logits.log_softmax(-1)

            exact = answers(self._streams[0])
            weight = exact.exp()
            for index, stream in enumerate(self._streams[1:]):
                sums[index] += float((weight * (exact - answers(stream))).sum())
        return [max(total / tokens, 0.0) for total in sums]
