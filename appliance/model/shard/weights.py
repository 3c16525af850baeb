"""Cuts a rank's part out of weights as they are read.

A cut through inputs that share scales makes a weight dense, which is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from appliance.kernels.kv_format import LayerPrecision
from appliance.kernels.weight import cloned, column_unit, dense, some_columns
from appliance.model.layer_weights import AttentionWeights, ExpertsWeights, MLPWeights
from appliance.model.linear import LinearPart
from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.layer_weights import LayerWeights
    from appliance.model.reader import ModelReader
    from appliance.model.shard.shard import Columns, Shard
    from appliance.model.shard.split import Heads


@dataclass(slots=True)
class WeightCutter:
    """Cuts the layers of one model for one rank.

    Attributes:
        copies: parts do not keep the whole weight alive, for an executor that uses weights as read.
        num_dense: weights that became dense because a block was cut.
    """

    shard: Shard
    copies: bool = False
    num_dense: int = field(default=0)

    def read(self, reader: ModelReader, index: int) -> LayerWeights:
        """Read a layer's weights, and return a rank's part of them."""
        return self.layer(reader.layer(index), index)

    def layer(self, weights: LayerWeights, index: int) -> LayerWeights:
        """Return a rank's part of a layer's weights."""
        spec, share = self.shard.whole.layers[index], self.shard.layers[index]
        mixer, mlp = weights.mixer, weights.mlp
        if share.heads is not None:
            assert isinstance(mixer, AttentionWeights)
            assert isinstance(spec.mixer, AttentionSpec)
            mixer = self._attention(mixer, spec.mixer, share.heads)
        if share.columns is not None:
            if isinstance(mlp, ExpertsWeights):
                assert isinstance(spec.mlp, ExpertsSpec)
                mlp = self._experts(mlp, spec.mlp, share.columns, share.shared)
            else:
                assert mlp is not None
                assert isinstance(spec.mlp, MLPSpec)
                mlp = self._mlp(mlp, spec.mlp.intermediate_size, share.columns)
        return replace(weights, mixer=mixer, mlp=mlp)

    def vocabulary(self, embedding: Weight, head: Weight) -> tuple[Weight, Weight]:
        """Return a rank's rows of embedding and head; one object if they are tied."""
        own = self._copied(LinearPart(embedding, None).rows(self.shard.own_tokens)).weight
        if head is embedding:
            return own, own
        return own, self._copied(LinearPart(head, None).rows(self.shard.own_tokens)).weight

    def _attention(
        self, weights: AttentionWeights, spec: AttentionSpec, heads: Heads
    ) -> AttentionWeights:
        width = spec.head_dim
        queries = (heads.first * width, (heads.first + heads.count) * width)
        own_heads = slice(heads.first, heads.first + heads.count)
        return replace(
            weights,
            inputs=self._rows(weights.inputs, input_ranges(spec, heads)),
            output=self._columns(weights.output, queries),
            sinks=None if weights.sinks is None else weights.sinks[own_heads],
        )

    def _mlp(self, weights: MLPWeights, width: int, columns: Columns) -> MLPWeights:
        rows = sum(part.weight.shape[0] for part in weights.gate_up)
        return MLPWeights(
            gate_up=self._rows(weights.gate_up, middle_ranges(width, rows, columns)),
            down=self._columns(weights.down, columns),
        )

    def _experts(
        self, weights: ExpertsWeights, spec: ExpertsSpec, columns: Columns, shared: Columns | None
    ) -> ExpertsWeights:
        of_all = weights.shared
        if of_all is not None:
            assert spec.shared is not None
            assert shared is not None
            of_all = self._mlp(of_all, spec.shared.intermediate_size, shared)

        def expert(number: int) -> MLPWeights:
            return self._mlp(weights.expert(number), spec.intermediate_size, columns)

        return replace(weights, expert=expert, shared=of_all)

    def _rows(self, parts: list[LinearPart], ranges: list[Columns]) -> list[LinearPart]:
        return [self._copied(part) for part in rows_of(parts, ranges)]

    def _copied(self, part: LinearPart) -> LinearPart:
        if not self.copies:
            return part
        bias = None if part.bias is None else part.bias.clone()
        return LinearPart(cloned(part.weight), bias)

    def _columns(self, part: LinearPart, columns: Columns) -> LinearPart:
        """Cut inputs of a linear; only the first rank adds its bias."""
        bias = part.bias if self.shard.rank == 0 else None
        unit = column_unit(part.weight)
        if unit is None or columns[0] % unit or columns[1] % unit:
            self.num_dense += 1
            whole = dense(part.weight, "float32")
            return LinearPart(whole[:, columns[0] : columns[1]].contiguous(), bias)
        return LinearPart(some_columns(part.weight, *columns), bias)


def input_ranges(spec: AttentionSpec, heads: Heads) -> list[Columns]:
    """Return a rank's rows of queries, keys, values and gates, in this order."""
    width = spec.head_dim
    queries = (heads.first * width, (heads.first + heads.count) * width)
    keys = (heads.first_kv * width, (heads.first_kv + heads.num_kv) * width)
    ranges, end = [queries], spec.num_heads * width
    for _ in range(0 if spec.kv_layer is not None else 1 if spec.keys_are_values else 2):
        ranges.append((end + keys[0], end + keys[1]))
        end += spec.num_kv_heads * width
    if spec.output_gate:
        ranges.append((end + queries[0], end + queries[1]))
    return ranges


def middle_ranges(width: int, rows: int, columns: Columns) -> list[Columns]:
    """Return a rank's rows of gate and up, or of up alone, each of `width`."""
    first, last = columns
    return [(begin + first, begin + last) for begin in range(0, rows, width)]


def rows_of(parts: list[LinearPart], ranges: list[Columns]) -> list[LinearPart]:
    """Take ranges of the rows of concatenated parts, in order."""
    found = []
    for first, last in ranges:
        begin = 0
        for part in parts:
            end = begin + part.weight.shape[0]
            if first < end and last > begin:
                found.append(part.rows(slice(max(first, begin) - begin, min(last, end) - begin)))
            begin = end
    return found


def shard_precisions(layers: Sequence[LayerPrecision], shard: Shard) -> tuple[LayerPrecision, ...]:
    """Return the precisions of a rank's heads, from those of all heads, by cache layer."""
    shares = [shard.layers[index].heads for index in shard.spec.cache_layers]
    return tuple(
        layer
        if heads is None
        else LayerPrecision(
            layer.format,
            _own_heads(layer.head_scales, heads, dim=1),
            _own_heads(layer.key_mean, heads, dim=0),
        )
        for layer, heads in zip(layers, shares, strict=True)
    )


def _own_heads(values: Tensor | None, heads: Heads, dim: int) -> Tensor | None:
    if values is None:
        return None
    own = slice(heads.first_kv, heads.first_kv + heads.num_kv)
    return values[:, own] if dim else values[own]
