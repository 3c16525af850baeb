"""Runs whole rows of text through layers that are read when needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_format import KVFormat
from appliance.model.attention import Attention, LatentAttention
from appliance.model.layer_builder import LayerBuilder
from appliance.model.spec import ExpertsSpec
from appliance.quant.walk.block import TransformerBlock
from appliance.quant.walk.overlay import OverlaidWeights
from appliance.quant.walk.pieces import FloatReader
from appliance.quant.walk.row_steps import BLOCK_SIZE, RowSteps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.operations import Backend, RoutedMLPs
    from appliance.kernels.packed import PackedWeight
    from appliance.model.layers import MLP, MixerCache
    from appliance.model.source import ModelSource
    from appliance.model.step import Step


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
        others: Mapping[str, PackedWeight] | None = None,
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

    def expert(self, index: int, number: int, others: Mapping[str, PackedWeight]) -> MLP:
        """Read one expert of a layer, with `others` in place of some of its weights."""
        spec = self._specs[index].mlp
        assert isinstance(spec, ExpertsSpec)
        return self._builder.mlp(self._reader_with(others).expert(index, number), spec)

    def _reader_with(self, others: Mapping[str, PackedWeight] | None) -> FloatReader:
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
