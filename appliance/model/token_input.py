"""Adds token embeddings to the stream after each layer; see `TokenInputSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Activation
    from appliance.kernels.operations import Backend, Linear
    from appliance.model.embedding import Embedding
    from appliance.model.norm import Norm


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
    """Adds a layer's input to the stream."""

    backend: Backend
    activation: Activation
    gate: Linear  # hidden_size to width
    up: Linear  # width to hidden_size
    norm: Norm

    def __call__(self, stream: Tensor, inputs: Tensor) -> Tensor:
        """Add inputs (num_tokens, width) to the stream (num_tokens, hidden_size)."""
        beside = torch.cat((self.gate(stream), inputs), dim=-1)
        added = self.up(self.backend.gated_activation(beside, self.activation))
        return stream + self.norm.of(added, self.backend)
