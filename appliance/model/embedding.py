"""Token embeddings: before the first layer, and those that are added after each layer.

A plain or packed matrix; only the rows that are looked up are unpacked. See `TokenInputSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense

if TYPE_CHECKING:
    from appliance.kernels.activation import Activation
    from appliance.kernels.operations import Backend, Linear, RowTable
    from appliance.kernels.weights.weight import Weight
    from appliance.model.norm import Norm


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks up rows of a matrix and scales them.

    Attributes:
        weight: (vocab_size, hidden_size), of type `dtype`, packed, or as the backend laid it out.
        scale: multiplies the rows, rounded to `dtype` as in training.
    """

    weight: Tensor | PackedWeight | GgmlWeight | RowTable
    scale: float
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map token_ids (num_tokens,) to (num_tokens, hidden_size)."""
        if isinstance(self.weight, PackedWeight | GgmlWeight):
            rows = self.weight.rows(token_ids).dequantize(self.dtype)
        elif isinstance(self.weight, Tensor):
            rows = functional.embedding(token_ids, self.weight)
        else:
            rows = self.weight.rows(token_ids, self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    @classmethod
    def of(
        cls, weight: Weight, scale: float, dtype: torch.dtype, backend: Backend | None = None
    ) -> Embedding:
        """Prepare a matrix for lookups of type `dtype`; without a backend, by torch."""
        scale = torch.tensor(scale, dtype=dtype).item()
        table = None if backend is None else backend.prepare_table(weight, dtype)
        if table is not None:
            return cls(table, scale, dtype)
        # A graph cannot capture how torch decodes GGML's blocks.
        if isinstance(weight, PackedWeight) or (
            isinstance(weight, GgmlWeight) and not weight.blocks.is_cuda
        ):
            return cls(weight, scale, dtype)
        return cls(dense(weight, dtype), scale, dtype)

    @property
    def table(self) -> RowTable | None:
        """The matrix as a linear, if the backend laid it out for lookups, too."""
        if isinstance(self.weight, Tensor | PackedWeight | GgmlWeight):
            return None
        return self.weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Computes the inputs of all layers, once per step.

    Attributes:
        embedding: (vocab_size, num_layers * width), with its scale.
        projection: hidden_size to num_layers * width.
        norm: of each layer's part of the projection.
    """

    backend: Backend
    embedding: Embedding
    projection: Linear
    norm: Norm

    def __call__(self, token_ids: Tensor, stream: Tensor) -> Tensor:
        """Compute inputs from tokens (num_tokens,) and the stream (num_tokens, hidden_size).

        Returns:
            (num_tokens, num_layers, width).
        """
        width = self.norm.weight.shape[0]
        projected = self.projection(stream) * stream.shape[1] ** -0.5
        normed = self.norm.of(projected.view(-1, width), self.backend)
        inputs = (normed + self.embedding(token_ids).view(-1, width)) * 2**-0.5
        return inputs.view(len(token_ids), -1, width)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Computes what a layer's input adds to the stream, before its norm."""

    backend: Backend
    activation: Activation
    gate: Linear  # hidden_size to width
    up: Linear  # width to hidden_size
    norm: Norm

    def __call__(self, stream: Tensor, inputs: Tensor) -> Tensor:
        """Map stream (num_tokens, hidden_size) and inputs (num_tokens, width) to its shape."""
        return self.up(self.backend.gated_activation(self.gate(stream), self.activation, inputs))
