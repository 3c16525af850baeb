"""Cuts a rank's part out of weights as they are read, and out of what adapters add to them.

A cut through inputs that share scales makes a weight dense, which is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.cache.kv_format import LayerPrecision
from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.weight import cloned, column_unit, dense, some_columns
from appliance.model.layer_weights import (
    AttentionWeights,
    EndWeights,
    ExpertsWeights,
    GatedDeltaWeights,
    LatentWeights,
    Mamba2Weights,
    MLPWeights,
    ShortConvWeights,
)
from appliance.model.linear import LinearPart
from appliance.model.shard.split import (
    channel_ranges,
    input_ranges,
    output_columns,
    query_range,
)
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.adapters.targets import AdapterTarget, TargetRows
    from appliance.model.layer_weights import LayerWeights, MixerWeights
    from appliance.model.reader import ModelReader
    from appliance.model.shard.shard import Part
    from appliance.model.shard.split import Columns, Heads, LayerShare
    from appliance.model.spec import LayerSpec, MixerSpec


@dataclass(slots=True)
class WeightCutter:
    """Cuts the layers of one model for one rank.

    Attributes:
        copies: copy parts, so that they do not keep the whole weight alive.
        num_dense: weights that became dense because a cut split a block.
    """

    part: Part
    copies: bool = False
    num_dense: int = field(default=0)

    def read(self, reader: ModelReader, index: int) -> LayerWeights:
        """Read a rank's part of one of its layers.

        Args:
            index: among the rank's layers.
        """
        return self.layer(reader.layer(self.part.layers[0] + index), index)

    def layer(self, weights: LayerWeights, index: int) -> LayerWeights:
        """Return a rank's part of a layer's weights."""
        share = self.part.shares[index]
        spec = self.part.whole.layers[self.part.layers[0] + index]
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

    def ends(self, weights: EndWeights) -> EndWeights:
        """Return a rank's rows of embedding and head."""
        if not self.part.tokens:
            return weights
        embedding, head, bias = weights.embedding, weights.head, weights.head_bias
        assert embedding is not None
        assert head is not None
        embedding, head = self.vocabulary(embedding, head)
        bias = None if bias is None else bias[self.part.own_tokens]
        return replace(weights, embedding=embedding, head=head, head_bias=bias)

    def vocabulary(self, embedding: Weight, head: Weight) -> tuple[Weight, Weight]:
        """Return a rank's rows of embedding and head; one object if they are tied."""
        own = self._copied(LinearPart(embedding, None).rows(self.part.own_tokens)).weight
        if head is embedding:
            return own, own
        return own, self._copied(LinearPart(head, None).rows(self.part.own_tokens)).weight

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
        bias = part.bias if self.part.rank == 0 else None
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


def own_precisions(layers: Sequence[LayerPrecision], part: Part) -> tuple[LayerPrecision, ...]:
    """Cut the precisions of all layers' heads down to a rank's, by its cache layers."""
    shares = [part.shares[index].heads for index in part.spec.cache_layers]
    return tuple(
        layer
        if heads is None
        else LayerPrecision(
            layer.format,
            _own_heads(layer.head_scales, heads, dim=1),
            _own_heads(layer.key_mean, heads, dim=0),
        )
        for layer, heads in zip(layers[part.cache_layers], shares, strict=True)
    )


def _own_heads(values: Tensor | None, heads: Heads, dim: int) -> Tensor | None:
    if values is None:
        return None
    own = slice(heads.first_kv, heads.first_kv + heads.num_kv)
    return values[:, own] if dim else values[own]


def own_targets(targets: Mapping[str, AdapterTarget], part: Part) -> dict[str, AdapterTarget]:
    """Return a rank's part of each linear that adapters change: of its outputs, or of its inputs.

    The ranks' products add up.
    """
    return {name: _own(target, part) for name, target in targets.items()}


def _own(target: AdapterTarget, part: Part) -> AdapterTarget:
    first, last = part.layers
    if not first <= target.layer < last:
        return target
    layer, share = part.whole.layers[target.layer], part.shares[target.layer - first]
    is_mixer = target.place in (AdapterPlace.INTO_MIXER, AdapterPlace.OUT_OF_MIXER)
    own = _of_mixer(layer, share) if is_mixer else _of_mlp(layer, share)
    if own is None:
        return target
    ranges, columns = own
    if target.place in (AdapterPlace.INTO_MIXER, AdapterPlace.INTO_MLP):
        return replace(target, pieces=_cut_outputs(target.pieces, ranges))
    return replace(target, columns=columns)


def _of_mixer(layer: LayerSpec, share: LayerShare) -> tuple[list[Columns], Columns] | None:
    """Return a rank's outputs of the first linears, and inputs of the last one."""
    if share.heads is None or layer.mixer is None:
        return None
    return input_ranges(layer.mixer, share.heads), output_columns(layer.mixer, share.heads)


def _of_mlp(layer: LayerSpec, share: LayerShare) -> tuple[list[Columns], Columns] | None:
    mlp, columns = layer.mlp, share.columns
    if isinstance(mlp, ExpertsSpec):  # adapters change the shared MLP
        mlp, columns = mlp.shared, share.shared
    if columns is None or mlp is None:
        return None
    width = mlp.intermediate_size
    return middle_ranges(width, width * (1 + mlp.gated), columns), columns


def _cut_outputs(pieces: tuple[TargetRows, ...], ranges: list[Columns]) -> tuple[TargetRows, ...]:
    """Return the rows in ranges of a place's outputs, made adjacent."""
    found, begin = [], 0
    for first, last in ranges:
        for piece in pieces:
            low = max(first, piece.first_output)
            high = min(last, piece.first_output + piece.count)
            if low < high:
                found.append(piece.part(low, high, begin + low - first))
        begin += last - first
    return tuple(found)
