"""Builds the torch decoder from a model source, layer by layer.

Weights are laid out for the backend and released at once, so that peak memory is about the finished
model and one layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.model.attention import Attention
from appliance.model.decoder import Decoder
from appliance.model.embedding import Embedding
from appliance.model.layers import MLP, DecoderLayer, GatedLinear
from appliance.model.linear import prepare_fused, stack_neighbours
from appliance.model.reader import ModelReader
from appliance.model.rope import Rope, distinct_ropes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.kernels.activation import Activation
    from appliance.kernels.backend import Backend, Linear
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm
    from appliance.model.reader import LayerWeights
    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec, RopeSpec


def load_decoder(
    source: ModelSource,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
) -> Decoder:
    """Read all weights and lay them out.

    Args:
        source: an opened and checked model.
        backend: lays out the weights and later executes them.
        device: where they go.
        dtype: of activations, and of weights that are not packed.
        on_progress: called with a stage, the number of parts done, and their total.
        context_length: most tokens of a sequence; the model's own by default. Some models rotate
            differently if it exceeds their training context.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        UnsupportedModelError: a weight that is not packed has a type of less than 16 bits.
    """
    reader = ModelReader(source, device, dtype)
    report = on_progress or (lambda stage, done, total: None)
    spec = source.spec
    ropes = distinct_ropes(spec)
    builder = LayerBuilder(backend, dtype, ropes)
    total = len(spec.layers) + 1
    report("weights", 0, total)
    first_norm = builder.counted(reader.first_norm(0))
    layers: list[DecoderLayer] = []
    for index, layer_spec in enumerate(spec.layers):
        next_norm = builder.counted(reader.first_norm(index + 1))
        layers.append(builder.layer(reader.layer(index), layer_spec, next_norm))
        report("weights", index + 1, total)
    matrix, head_matrix = reader.embedding_and_head()
    embedding = Embedding.of(matrix, spec.embedding_scale, dtype)
    if head_matrix is matrix and isinstance(embedding.weight, Tensor):
        head_matrix = embedding.weight  # one copy, where the backend keeps it as it is
    head = backend.prepare_linear(head_matrix, None, dtype)
    is_shared = isinstance(head, DenseLinear) and head.weight is embedding.weight
    report("weights", total, total)
    length = spec.context_length if context_length is None else context_length
    return Decoder(
        spec=spec,
        backend=backend,
        dtype=dtype,
        device=device,
        embedding=embedding,
        ropes=tuple(Rope.of(rope, length, device) for rope in ropes),
        first_norm=first_norm,
        layers=tuple(layers),
        head=head,
        weight_bytes=builder.nbytes + head.nbytes + (0 if is_shared else embedding.nbytes),
        weight_format=reader.weight_format(),
    )


class LayerBuilder:
    """Lays weights out for one backend and counts their bytes."""

    def __init__(self, backend: Backend, dtype: torch.dtype, ropes: tuple[RopeSpec, ...]) -> None:
        self.nbytes = 0
        self._backend = backend
        self._dtype = dtype
        self._ropes = ropes

    def layer(self, weights: LayerWeights, spec: LayerSpec, next_norm: Norm) -> DecoderLayer:
        """Lay out one layer."""
        return DecoderLayer(
            backend=self._backend,
            attention=Attention(
                spec=spec.attention,
                backend=self._backend,
                rope=self._ropes.index(spec.attention.rope),
                qkv=self._linear(weights.qkv),
                output=self._linear([weights.output]),
                query_norm=self._optional(weights.query_norm),
                key_norm=self._optional(weights.key_norm),
            ),
            mlp=MLP(
                gated=self.gated(weights.gate_up, spec.mlp.activation),
                down=self._linear([weights.down]),
            ),
            mlp_norm=self.counted(weights.mlp_norm),
            next_norm=next_norm,
            attention_post_norm=self._optional(weights.attention_post_norm),
            mlp_post_norm=self._optional(weights.mlp_post_norm),
        )

    def gated(self, parts: list[LinearPart], activation: Activation) -> Linear:
        """Build act(gate(x)) * up(x), fused if the backend and the packing allow it."""
        stacked = stack_neighbours(parts)
        if len(stacked) == 1:
            (part,) = stacked
            linear = self._backend.prepare_gated(part.weight, part.bias, self._dtype, activation)
            if linear is not None:
                self.nbytes += linear.nbytes
                return linear
        return GatedLinear(self._backend, activation, self._linear(stacked))

    def counted(self, norm: Norm) -> Norm:
        """Count a norm's bytes and return it."""
        self.nbytes += norm.weight.nbytes
        return norm

    def _optional(self, norm: Norm | None) -> Norm | None:
        return None if norm is None else self.counted(norm)

    def _linear(self, parts: list[LinearPart]) -> Linear:
        linear = prepare_fused(parts, self._backend, self._dtype)
        self.nbytes += linear.nbytes
        return linear
