"""Cuts a rank's part out of weights as they are read.

A cut through inputs that share scales makes a weight dense, which is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.kv_format import LayerPrecision
from appliance.kernels.weight import cloned, column_unit, dense, some_columns
from appliance.model.layer_weights import (
    AttentionWeights,
    ExpertsWeights,
    GatedDeltaWeights,
    LatentWeights,
    Mamba2Weights,
    MLPWeights,
    ShortConvWeights,
)
from appliance.model.linear import LinearPart
from appliance.model.shard.mixer_ranges import (
    channel_ranges,
    input_ranges,
    output_columns,
    query_range,
)
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.layer_weights import LayerWeights, MixerWeights
    from appliance.model.reader import ModelReader
    from appliance.model.shard.shard import LayerShare, Shard
    from appliance.model.shard.split import Columns, Heads
    from appliance.model.spec import MixerSpec


@dataclass(slots=True)
class WeightCutter:
    """Cuts the layers of one model for one rank.

    Attributes:
        copies: copy parts, so that they do not keep the whole weight alive.
        num_dense: weights that became dense because a cut split a block.
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
            assert mixer is not None
            assert spec.mixer is not None
            mixer = self._mixer(mixer, spec.mixer, share.heads)
        if isinstance(mlp, ExpertsWeights) and share.has_part_of_mlp:
            assert isinstance(spec.mlp, ExpertsSpec)
            mlp = self._experts(mlp, spec.mlp, share)
        elif isinstance(mlp, MLPWeights) and share.columns is not None:
            assert isinstance(spec.mlp, MLPSpec)
            mlp = self._mlp(mlp, spec.mlp.intermediate_size, share.columns)
        return replace(weights, mixer=mixer, mlp=mlp)

    def vocabulary(self, embedding: Weight, head: Weight) -> tuple[Weight, Weight]:
        """Return a rank's rows of embedding and head; one object if they are tied."""
        own = self._copied(LinearPart(embedding, None).rows(self.shard.own_tokens)).weight
        if head is embedding:
            return own, own
        return own, self._copied(LinearPart(head, None).rows(self.shard.own_tokens)).weight

    def _mixer(self, weights: MixerWeights, spec: MixerSpec, heads: Heads) -> MixerWeights:
        inputs = self._rows(weights.inputs, input_ranges(spec, heads))
        output = self._columns(weights.output, output_columns(spec, heads))
        own = slice(heads.first, heads.first + heads.count)
        if isinstance(weights, AttentionWeights):
            sinks = None if weights.sinks is None else weights.sinks[own]
            return replace(weights, inputs=inputs, output=output, sinks=sinks)
        if isinstance(weights, LatentWeights):
            assert isinstance(spec, LatentAttentionSpec)
            queries = weights.queries
            if queries is not None:
                queries = self._copied(queries.rows(slice(*query_range(spec, heads))))
            return replace(
                weights,
                inputs=inputs,
                queries=queries,
                keys=weights.keys[own].clone(),
                values=weights.values[own].clone(),
                output=output,
            )
        assert not isinstance(spec, AttentionSpec | LatentAttentionSpec)
        channels = channel_ranges(spec, heads)
        filters = _picked(weights.filters, channels)
        if isinstance(weights, ShortConvWeights):
            bias = None if weights.bias is None else _picked(weights.bias, channels)
            return ShortConvWeights(inputs, output, filters, bias)
        if isinstance(weights, GatedDeltaWeights):
            rates, decay_bias = weights.rates[own].clone(), weights.decay_bias[own].clone()
            return GatedDeltaWeights(inputs, output, filters, rates, decay_bias, weights.norm)
        values = output_columns(spec, heads)
        bias = weights.filter_bias
        return Mamba2Weights(
            inputs=inputs,
            output=output,
            filters=filters,
            filter_bias=None if bias is None else _picked(bias, channels),
            step_bias=weights.step_bias[own].clone(),
            rates=weights.rates[own].clone(),
            skip=weights.skip[own].clone(),
            norm=replace(weights.norm, weight=_picked(weights.norm.weight, [values])),
        )

    def _mlp(self, weights: MLPWeights, width: int, columns: Columns) -> MLPWeights:
        rows = sum(part.weight.shape[0] for part in weights.gate_up)
        return MLPWeights(
            gate_up=self._rows(weights.gate_up, middle_ranges(width, rows, columns)),
            down=self._columns(weights.down, columns),
        )

    def _experts(
        self, weights: ExpertsWeights, spec: ExpertsSpec, share: LayerShare
    ) -> ExpertsWeights:
        of_all = weights.shared
        if of_all is not None and share.shared is not None:
            assert spec.shared is not None
            of_all = self._mlp(of_all, spec.shared.intermediate_size, share.shared)

        def expert(number: int) -> MLPWeights:
            whole = weights.expert(number)
            if share.columns is not None:
                return self._mlp(whole, spec.intermediate_size, share.columns)
            return MLPWeights(
                [self._copied(part) for part in whole.gate_up], self._copied(whole.down)
            )

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


def middle_ranges(width: int, rows: int, columns: Columns) -> list[Columns]:
    """Return a rank's rows of gate and up, each `width` wide, or of up alone."""
    first, last = columns
    return [(begin + first, begin + last) for begin in range(0, rows, width)]


def rows_of(parts: list[LinearPart], ranges: list[Columns]) -> list[LinearPart]:
    """Take ranges of the rows of concatenated parts, in order."""
    found: list[tuple[int, LinearPart]] = []
    for first, last in ranges:
        begin = 0
        for place, part in enumerate(parts):
            end = begin + part.weight.shape[0]
            if first < end and last > begin:
                rows = slice(max(first, begin) - begin, min(last, end) - begin)
                found.append((place, part.rows(rows)))
            begin = end
    # A part that is cut through blocks becomes dense: all of it, so that its rows still stack.
    cut = {place for place, own in found if arrays.is_array(own.weight)}
    return [_in_dense(own) if place in cut else own for place, own in found]


def _in_dense(part: LinearPart) -> LinearPart:
    if arrays.is_array(part.weight):
        return part
    assert isinstance(part.weight, Fp8Weight), "other forms can be cut between any rows"
    return LinearPart(part.weight.dequantize(), part.bias)


def _picked(values: Tensor, ranges: list[Columns]) -> Tensor:
    """Copy ranges of the first dimension, one after another."""
    found: Tensor = arrays.cat([values[first:last] for first, last in ranges])
    return found


def shard_precisions(layers: Sequence[LayerPrecision], shard: Shard) -> tuple[LayerPrecision, ...]:
    """Cut the precisions of all heads down to a rank's, by cache layer."""
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
