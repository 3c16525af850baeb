"""Supplies a model's weights in parts for evaluation, in float32: as stored, or rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from appliance.errors import ConfigError
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.weight import dense, some_rows
from appliance.model.embedding import Embedding
from appliance.model.layer_weights import ExpertsWeights, MLPWeights
from appliance.model.linear import stack_neighbours
from appliance.model.reader import ModelReader
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import rtn
from appliance.quant.walk.pieces import FloatReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.weights.weight import Weight
    from appliance.model.layer_weights import LayerWeights, MixerWeights
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm
    from appliance.model.source import ModelSource

FLOAT = torch.float32
ROWS_AT_ONCE = 1 << 20  # numbers of a weight to round at once
FEW_ROWS = 32  # enough to tell a weight's scheme


class WeightSet(Protocol):
    """Supplies a model's weights without keeping them."""

    @property
    def source(self) -> ModelSource: ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up rows of the embedding, (num_tokens, hidden_size) float32."""
        ...

    def layer(self, index: int) -> LayerWeights: ...

    def norm(self, index: int) -> Norm:
        """Load the norm before a layer; past the last layer, the decoder's own."""
        ...

    def head(self) -> Weight:
        """Load the head, (vocab_size, hidden_size), as the model multiplies by it."""
        ...

    def head_rows(self, head: Weight, rows: slice) -> Tensor: ...

    def head_bias(self) -> Tensor | None:
        """Load the bias of the logits, (vocab_size,) float32."""
        ...


class StoredWeights:
    """Supplies a checkpoint's weights as stored."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self.source = source
        self._device = device
        self.reader = ModelReader(source, device, FLOAT)

    def embed(self, token_ids: Tensor) -> Tensor:
        matrix = self.matrix(self.source.family.names.embedding)
        return self.lookup(matrix, token_ids)

    def lookup(self, matrix: Weight, token_ids: Tensor) -> Tensor:
        """Look up rows of a matrix, scaled as the model's embeddings."""
        rows = some_rows(matrix, token_ids, FLOAT)
        every = torch.arange(len(token_ids), device=token_ids.device)
        return Embedding.of(rows, self.source.spec.embedding_scale, FLOAT)(every)

    def layer(self, index: int) -> LayerWeights:
        return FloatReader(self.source, self._device).layer(index)

    def norm(self, index: int) -> Norm:
        norm = self.reader.first_norm(index)
        assert norm is not None, "refused before"
        return norm

    def head(self) -> Weight:
        names = self.source.family.names
        head = self.matrix(names.embedding if self.source.spec.tied_head else names.head)
        return self.reader.normed_head(head)

    def head_rows(self, head: Weight, rows: slice) -> Tensor:
        return some_rows(head, rows, FLOAT)

    def head_bias(self) -> Tensor | None:
        return self.reader.head_bias()

    def matrix(self, module: str) -> Weight:
        matrix = self.source.weights.load(f"{module}.weight")
        return matrix.to(self._device)


class RoundedWeights:
    """Supplies a base with weights rounded to nearest in a candidate's schemes.

    Args:
        candidate: its packed weights give the schemes.
    """

    def __init__(self, base: StoredWeights, candidate: StoredWeights) -> None:
        self.source = base.source
        self._base = base
        self._candidate = candidate
        names = candidate.source.family.names
        tied = candidate.source.spec.tied_head
        self._embedding = scheme_of(candidate.matrix(names.embedding))
        head = self._embedding if tied else scheme_of(candidate.matrix(names.head))
        self._head = head

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up rows of the embedding and round only those: rows round independently."""
        matrix = self._base.matrix(self.source.family.names.embedding)
        rows = some_rows(matrix, token_ids, FLOAT)
        every = torch.arange(len(token_ids), device=token_ids.device)
        return self._base.lookup(_rounded(rows, self._embedding), every)

    def layer(self, index: int) -> LayerWeights:
        weights = self._base.reader.layer(index)
        packed = self._candidate.reader.layer(index)
        return _dense_parts(
            replace(
                weights,
                mixer=_rounded_mixer(weights.mixer, packed.mixer),
                mlp=_with_mlps(weights.mlp, packed.mlp, _rounded_mlp),
            )
        )

    def norm(self, index: int) -> Norm:
        return self._base.norm(index)

    def head(self) -> Weight:
        return self._base.head()

    def head_rows(self, head: Weight, rows: slice) -> Tensor:
        return _rounded(self._base.head_rows(head, rows), self._head)

    def head_bias(self) -> Tensor | None:
        return self._base.head_bias()


def _dense_parts(weights: LayerWeights) -> LayerWeights:
    return replace(
        weights,
        mixer=None
        if weights.mixer is None
        else replace(weights.mixer, inputs=stack_neighbours(weights.mixer.inputs)),
        mlp=_with_mlps(weights.mlp, weights.mlp, _stacked_mlp),
    )


def _rounded_mixer(mixer: MixerWeights | None, packed: MixerWeights | None) -> MixerWeights | None:
    if mixer is None or packed is None:
        return None
    return replace(
        mixer,
        inputs=_rounded_parts(mixer.inputs, packed.inputs),
        output=_rounded_parts([mixer.output], [packed.output])[0],
    )


def _stacked_mlp(mlp: MLPWeights, _: MLPWeights) -> MLPWeights:
    return replace(mlp, gate_up=stack_neighbours(mlp.gate_up))


def _rounded_mlp(mlp: MLPWeights, packed: MLPWeights) -> MLPWeights:
    return MLPWeights(
        gate_up=_rounded_parts(mlp.gate_up, packed.gate_up),
        down=_rounded_parts([mlp.down], [packed.down])[0],
    )


def _with_mlps(
    weights: MLPWeights | ExpertsWeights | None,
    like: MLPWeights | ExpertsWeights | None,
    change: Callable[[MLPWeights, MLPWeights], MLPWeights],
) -> MLPWeights | ExpertsWeights | None:
    """Change each MLP of a layer, paired with another model's; experts when they are read."""
    if weights is None:
        return None
    if isinstance(weights, MLPWeights):
        assert isinstance(like, MLPWeights)
        return change(weights, like)
    assert isinstance(like, ExpertsWeights)
    shared = None
    if weights.shared is not None and like.shared is not None:
        shared = change(weights.shared, like.shared)
    return replace(
        weights,
        expert=lambda number: change(weights.expert(number), like.expert(number)),
        shared=shared,
    )


def scheme_of(weight: Weight) -> WeightScheme | None:
    """Return the scheme of a packed weight; None if it is dense or no scheme describes it."""
    if not isinstance(weight, PackedWeight):
        return None
    few = weight.rows(slice(0, FEW_ROWS))
    # 3-bit codes take 4 bits in memory.
    bits = 3 if few.bits == 4 and int(few.unpack().max()) < 8 else few.bits
    zero = -(1 << (bits - 1)) * few.scale
    symmetric = few.offset_kind is OffsetKind.ADDITIVE and torch.equal(few.offset, zero)
    group_size = None if few.group_size == few.shape[1] else few.group_size
    try:
        return WeightScheme(bits, group_size, symmetric)
    except ConfigError:
        return None


def _rounded_parts(parts: list[LinearPart], packed: list[LinearPart]) -> list[LinearPart]:
    return [
        replace(part, weight=_rounded(part.weight, scheme_of(like.weight)))
        for part, like in zip(parts, packed, strict=True)
    ]


def _rounded(weight: Weight, scheme: WeightScheme | None) -> Tensor:
    """Round a weight by packing and unpacking it, (out_features, in_features) float32."""
    if scheme is None:
        return dense(weight, FLOAT)
    out = torch.empty(weight.shape, device=some_rows(weight, slice(0, 1), FLOAT).device)
    step = max(1, ROWS_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        packed = rtn.quantize(some_rows(weight, rows, FLOAT), scheme, torch.bfloat16)
        out[rows] = packed.dequantize()
    return out
