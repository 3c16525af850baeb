"""The weights of a model to evaluate, part by part in float32: as stored, or rounded on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from appliance.errors import ConfigError
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.kernels.weight import dense
from appliance.model.embedding import Embedding
from appliance.model.reader import ModelReader
from appliance.quant import rtn
from appliance.quant.block import dense_parts
from appliance.quant.scheme import WeightScheme

if TYPE_CHECKING:
    from appliance.kernels.weight import Weight
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm
    from appliance.model.reader import LayerWeights
    from appliance.model.source import ModelSource

FLOAT = torch.float32
ROWS_AT_ONCE = 1 << 20  # numbers of a weight that are rounded at once


class WeightSet(Protocol):
    """What a walk through a model needs of its weights; nothing is kept once it is handed out."""

    @property
    def source(self) -> ModelSource:
        """The model, for its spec."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, (num_tokens, hidden_size) float32."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """A layer in float32."""
        ...

    def norm(self, index: int) -> Norm:
        """The norm before a layer; past the last one, the decoder's own."""
        ...

    def head(self) -> Weight:
        """(vocab_size, hidden_size), as it is stored."""
        ...

    def head_rows(self, head: Weight, rows: slice) -> Tensor:
        """Some of its rows in float32."""
        ...


class StoredWeights:
    """The weights of a checkpoint as they are."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self.source = source
        self._device = device
        self.reader = ModelReader(source, device, FLOAT)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `WeightSet`."""
        matrix = self.matrix(self.source.family.names.embedding)
        return self.lookup(matrix, token_ids)

    def lookup(self, matrix: Weight, token_ids: Tensor) -> Tensor:
        """Rows of a matrix, scaled as the model wants it."""
        rows = _rows(matrix, token_ids)
        every = torch.arange(len(token_ids), device=token_ids.device)
        return Embedding.of(rows, self.source.spec.embedding_scale, FLOAT)(every)

    def layer(self, index: int) -> LayerWeights:
        """See `WeightSet`."""
        return dense_parts(self.reader.layer(index))

    def norm(self, index: int) -> Norm:
        """See `WeightSet`."""
        return self.reader.first_norm(index)

    def head(self) -> Weight:
        """See `WeightSet`."""
        names = self.source.family.names
        return self.matrix(names.embedding if self.source.spec.tied_head else names.head)

    def head_rows(self, head: Weight, rows: slice) -> Tensor:
        """See `WeightSet`."""
        return dense(_rows(head, rows), FLOAT)

    def matrix(self, module: str) -> Weight:
        """A matrix outside the layers."""
        return self.source.weights.load(f"{module}.weight").to(self._device)


class RoundedWeights:
    """A base, its weights rounded to nearest where a candidate's are packed, by the same scheme.

    Args:
        base: what is rounded.
        candidate: says what is packed, and how.
    """

    def __init__(self, base: StoredWeights, candidate: StoredWeights) -> None:
        self.source = base.source
        self._base = base
        self._candidate = candidate
        names = candidate.source.family.names
        tied = candidate.source.spec.tied_head
        self._embedding = scheme_of(_first_rows(candidate.matrix(names.embedding)))
        head = self._embedding if tied else scheme_of(_first_rows(candidate.matrix(names.head)))
        self._head = head

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `WeightSet`; rows are rounded one by one, so those looked up are enough."""
        matrix = self._base.matrix(self.source.family.names.embedding)
        rows = _rows(matrix, token_ids)
        every = torch.arange(len(token_ids), device=token_ids.device)
        return self._base.lookup(_rounded(rows, self._embedding), every)

    def layer(self, index: int) -> LayerWeights:
        """See `WeightSet`."""
        weights = self._base.reader.layer(index)
        packed = self._candidate.reader.layer(index)
        return dense_parts(
            replace(
                weights,
                qkv=_rounded_parts(weights.qkv, packed.qkv),
                output=_rounded_parts([weights.output], [packed.output])[0],
                gate_up=_rounded_parts(weights.gate_up, packed.gate_up),
                down=_rounded_parts([weights.down], [packed.down])[0],
            )
        )

    def norm(self, index: int) -> Norm:
        """See `WeightSet`."""
        return self._base.norm(index)

    def head(self) -> Weight:
        """See `WeightSet`."""
        return self._base.head()

    def head_rows(self, head: Weight, rows: slice) -> Tensor:
        """See `WeightSet`."""
        return _rounded(self._base.head_rows(head, rows), self._head)


def scheme_of(weight: Weight) -> WeightScheme | None:
    """How a weight is packed, in the terms of a quantizer; None if it is not, or in no such way."""
    if not isinstance(weight, PackedWeight):
        return None
    bits = weight.bits
    if bits == 4 and int(torch.maximum(weight.codes & 0xF, weight.codes >> 4).max()) < 8:
        bits = 3  # which lie in the form of 4
    zero = -(1 << (bits - 1)) * weight.scale
    symmetric = weight.offset_kind is OffsetKind.ADDITIVE and torch.equal(weight.offset, zero)
    width = weight.shape[1]
    group_size = None if weight.group_size == width else weight.group_size
    try:
        return WeightScheme(bits, group_size, symmetric)
    except ConfigError:
        return None


def _first_rows(matrix: Weight) -> Weight:
    return _rows(matrix, slice(0, 32))


def _rows(matrix: Weight, rows: Tensor | slice) -> Weight:
    """Some outputs; of FP8, whose blocks they may cut, dense."""
    if isinstance(matrix, PackedWeight):
        return matrix.rows(rows)
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.dequantize()[rows]


def _rounded_parts(parts: list[LinearPart], packed: list[LinearPart]) -> list[LinearPart]:
    return [
        replace(part, weight=_rounded(part.weight, scheme_of(like.weight)))
        for part, like in zip(parts, packed, strict=True)
    ]


def _rounded(weight: Weight, scheme: WeightScheme | None) -> Tensor:
    """A weight after packing and unpacking, (out_features, in_features) float32."""
    if scheme is None:
        return dense(weight, FLOAT)
    out = dense(weight, FLOAT).clone()
    step = max(1, ROWS_AT_ONCE // out.shape[1])
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        out[rows] = rtn.quantize(out[rows], scheme, torch.bfloat16).dequantize()
    return out
