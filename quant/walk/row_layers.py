"""Runs whole rows of text through layers that are read when needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.rows.state_spans import StateSpans
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.kernels.weights.weight import some_rows
from appliance.model.attention import Attention, LatentAttention
from appliance.model.layer_builder import LayerBuilder
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.spec import ExpertsSpec
from appliance.model.step import Step
from appliance.quant.walk.block import TransformerBlock
from appliance.quant.walk.pieces import FloatReader, ReadsRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.operations import Backend, RoutedMLPs
    from appliance.kernels.weights.weight import CodedWeight, Weight
    from appliance.model.layers import MLP, MixerCache
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.quant.formats import WeightReader

BLOCK_SIZE = 32  # supported by every backend and every KV format


class RowLayers:
    """A model's layers in float32, for rows of one length."""

    def __init__(
        self, source: ModelSource, row_tokens: int, backend: Backend, device: torch.device
    ) -> None:
        self.reader = FloatReader(source, device)
        self._source = source
        self._specs = source.spec.layers
        self._row_tokens = row_tokens
        self._backend = backend
        self._device = device
        self._builder = LayerBuilder(backend, torch.float32, source.spec)
        self._steps = RowSteps(source.spec, row_tokens, backend, device)

    def block(
        self,
        index: int,
        others: Mapping[str, CodedWeight] | None = None,
        experts: RoutedMLPs | None = None,
    ) -> TransformerBlock:
        """Read a layer, with `others` in place of some of its weights.

        Routed experts are read too, unless others run in their place.
        """
        weights = self._reader_with(others).layer(index)
        norm = weights.first_norm
        assert norm is not None, "refused before"
        layer = self._builder.layer(index, weights, self._specs[index], norm, experts)
        return TransformerBlock(layer, norm)

    def expert(self, index: int, number: int, others: Mapping[str, CodedWeight]) -> MLP:
        """Read one expert of a layer, with `others` in place of some of its weights."""
        spec = self._specs[index].mlp
        assert isinstance(spec, ExpertsSpec)
        return self._builder.mlp(self._reader_with(others).expert(index, number), spec)

    def _reader_with(self, others: Mapping[str, CodedWeight] | None) -> FloatReader:
        if not others:
            return self.reader
        overlaid = OverlaidWeights(self._source.weights, others)
        return FloatReader(replace(self._source, weights=overlaid), self._device)

    def run(self, block: TransformerBlock, stream: Tensor) -> Tensor:
        """Run a layer on a stream (num_rows * row_tokens, hidden_size); return the new stream."""
        norm = block.mixer_norm
        hidden = norm.of(stream, self._backend)
        step, cache = self._step(len(stream) // self._row_tokens, block)
        return block.layer(hidden, stream, step, cache, None)[1]

    def _step(self, count: int, block: TransformerBlock) -> tuple[Step, MixerCache | None]:
        mixer = block.layer.mixer
        if mixer is None:
            return self._steps.step(count), None
        if not isinstance(mixer, Attention | LatentAttention):
            return self._steps.step(count), mixer.fresh_state(count, self._device)
        attention = mixer.spec
        cache = self._backend.allocate_cache(
            KVFormat.FP32,
            num_blocks=count * self._steps.row_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            device=self._device,
        )
        return self._steps.step(count), cache


class OverlaidWeights:
    """A `WeightReader` that replaces some weights, by name."""

    def __init__(self, weights: WeightReader, others: Mapping[str, CodedWeight]) -> None:
        self._weights = weights
        self._others = others

    def tensor_names(self) -> list[str]:
        return self._weights.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        other = self._others.get(name)
        if isinstance(other, Fp4Weight):
            return None
        return self._weights.packed_bits(name) if other is None else other.bits

    def group_size(self, name: str) -> int | None:
        other = self._others.get(name)
        if isinstance(other, Fp4Weight):
            return None
        if isinstance(other, TrellisWeight):
            return other.shape[1]
        return self._weights.group_size(name) if other is None else other.group_size

    def float_bits(self, name: str) -> int | None:
        if (other := self._others.get(name)) is not None:
            return 4 if isinstance(other, Fp4Weight) else None
        return self._weights.float_bits(name)

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()

    def load(self, name: str) -> Weight:
        return self._others[name] if name in self._others else self._weights.load(name)

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        if name in self._others:
            other = self._others[name]
            if isinstance(other, TrellisWeight):
                return other.dequantize(rows=slice(start, stop))
            return other.rows(slice(start, stop))
        if isinstance(self._weights, ReadsRows):
            return self._weights.load_rows(name, start, stop)
        return some_rows(self._weights.load(name), slice(start, stop), torch.float32)


class RowSteps:
    """Builds steps of rows of one length, from their first token on.

    Attributes:
        row_blocks: cache blocks per row; a step's blocks begin with block 0.

    Raises:
        UnsupportedModelError: a layer needs more than the stream and its own cache.
    """

    def __init__(
        self, spec: DecoderSpec, row_tokens: int, backend: Backend, device: torch.device
    ) -> None:
        if not spec.goes_layer_by_layer:
            raise UnsupportedModelError(
                f"a model like {spec.architecture} with embeddings of each layer or of positions, "
                "or with layers that read the keys and values of others, is not measured layer by "
                "layer"
            )
        self.row_blocks = -(-row_tokens // BLOCK_SIZE)
        self._row_tokens = row_tokens
        self._is_recurrent = spec.state_bytes > 0
        self._backend = backend
        self._device = device
        self._chunks = spec.chunks
        self._ropes = tuple(Rope.of(kind, row_tokens, device) for kind in distinct_ropes(spec))
        self._steps: dict[tuple[int, bool], Step] = {}

    def step(self, count: int, *, is_sealed: bool = False) -> Step:
        """Return a step of `count` rows; in a sealed cache each row has an open block."""
        key = count, is_sealed
        if key not in self._steps:
            self._steps[key] = self._make(count, is_sealed=is_sealed)
        return self._steps[key]

    def _make(self, count: int, *, is_sealed: bool) -> Step:
        length, width = self._row_tokens, self.row_blocks
        tables = [tuple(range(i * width, (i + 1) * width)) for i in range(count)]
        batch = RaggedBatch.of(
            [length] * count,
            [length] * count,
            tables,
            block_size=BLOCK_SIZE,
            device=self._device,
            open_blocks=tables if is_sealed else None,
            state_slots=range(count) if self._is_recurrent else None,
        )
        positions = torch.arange(length, device=self._device).repeat(count)
        return Step(
            batch=batch,
            attention_work=self._backend.plan_attention(batch, BLOCK_SIZE),
            chunked_work={
                chunk: self._backend.plan_attention(
                    batch.within_chunks(chunk, BLOCK_SIZE), BLOCK_SIZE
                )
                for chunk in self._chunks
            },
            rotations=tuple(rope.rotation(positions) for rope in self._ropes),
            query_scales=tuple(rope.query_scale(positions) for rope in self._ropes),
            spans=StateSpans.of(batch) if self._is_recurrent else None,
        )
