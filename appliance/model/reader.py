"""Reads and checks a model's weights part by part, for any executor.

Knows no family and no file format.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.weight import dense
from appliance.model.checked import load_checked
from appliance.model.layer_weights import (
    AttentionWeights,
    ExpertNorms,
    ExpertsWeights,
    GatedDeltaWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Mamba2Weights,
    MLPWeights,
    ShortConvWeights,
    TokenInputWeights,
)
from appliance.model.linear import LinearPart, turning_in_halves, with_gates
from appliance.model.norm import Norm
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.row_orders import attention_rows, delta_rate_rows, delta_rows
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.model.weight_format import FormatCounts, format_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.kernels.packed import PackedWeight
    from appliance.kernels.weight import Weight
    from appliance.model.layer_weights import MixerWeights
    from appliance.model.names import JoinNames
    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec, MixerSpec, MLPSpec, NormSpec


class ModelReader:
    """Reads parts of one source and counts their formats.

    Args:
        device: torch device of the weights; None leaves them as they were read.
        dtype: of unpacked weights.
        native: the executor is the CPU library.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device | None,
        dtype: Any,
        *,
        native: bool = False,
    ) -> None:
        self._source = source
        self._names = source.family.names
        self._device = device
        self._dtype = dtype
        self._native = native
        self._formats = FormatCounts()

    def for_host(self) -> ModelReader:
        """Return a reader that keeps weights in host memory for the CPU library, counting here."""
        reader = copy(self)
        reader._device, reader._native = None, True
        return reader

    def layer(self, index: int) -> LayerWeights:
        spec, names = self._source.spec.layers[index], self._names
        mixer, mlp = spec.mixer is not None, spec.mlp is not None
        return LayerWeights(
            mixer=None if spec.mixer is None else self._mixer(index, spec.mixer),
            mlp=None if spec.mlp is None else self._mlp_or_experts(index, spec.mlp),
            first_norm=self.first_norm(index),
            mixer_post_norm=self._post_norm(index, names.mixer_post_norm, spec) if mixer else None,
            mlp_norm=self._inner_norm(index) if mixer and mlp and not spec.one_norm else None,
            mlp_post_norm=self._post_norm(index, names.mlp_post_norm, spec) if mlp else None,
            token_input=self._layer_input(index, spec.norm),
            output_scale=self._exact(index, names.output_scale).item()
            if spec.output_scale
            else None,
        )

    def first_norm(self, index: int) -> Norm | None:
        """Read the norm at the start of a layer; past the last layer, the decoder's own.

        None before the first layer if norms follow additions, or if a join comes first.
        """
        spec = self._source.spec
        if spec.norms_replace:
            name = self._names.in_layer(index - 1, self._names.mlp_norm)
            return self._norm(name, spec.final_norm) if index else None
        if index == len(spec.layers):
            return self._norm(self._names.final_norm, spec.final_norm)
        layer, names = spec.layers[index], self._names
        if layer.joins:
            return None
        first = names.mlp_norm if layer.mixer is None else names.mixer_norm
        return self._norm(names.in_layer(index, first), layer.norm)

    def _inner_norm(self, index: int) -> Norm:
        names, spec = self._names, self._source.spec
        part = names.mixer_norm if spec.norms_replace else names.mlp_norm
        return self._norm(names.in_layer(index, part), spec.layers[index].norm)

    def embedding_and_head(self) -> tuple[Weight, Weight]:
        """Read embedding and head, (vocab_size, hidden_size); one object if they are tied.

        Embeddings of another width are multiplied by their projections here.
        """
        names = self._names
        embedding = self._load(f"{names.embedding}.weight")
        head = embedding if self._source.spec.tied_head else self._load(f"{names.head}.weight")
        if self._source.spec.embedding_width is not None:
            into, out = (
                self._dense(f"{name}.weight").float()
                for name in (names.into_stream, names.out_of_stream)
            )
            embedding, head = (dense(matrix, "float32") for matrix in (embedding, head))
            embedding, head = dense(embedding @ into.T, self._dtype), dense(head @ out, self._dtype)
        self._formats.set_head(self._format(head))
        return embedding, head

    def join(self, names: JoinNames) -> tuple[Norm, Norm, Weight | None]:
        """Read the norms of embedding and hidden state, and the linear (hidden, 2 * hidden)."""
        norm = self._source.spec.final_norm
        linear = self._load(f"{names.linear}.weight") if names.linear else None
        return self._norm(names.token_norm, norm), self._norm(names.hidden_norm, norm), linear

    def positions(self) -> Weight | None:
        """Read learned position embeddings, (count, hidden_size), from position 0 on."""
        spec = self._source.spec.positions
        if spec is None:
            return None
        table = LinearPart(self._load(f"{self._names.positions}.weight"), None)
        return table.rows(slice(spec.skipped, None)).weight

    def weight_format(self) -> str:
        """Describe the formats of the weights read: layers by frequency, then the head."""
        return self._formats.in_words()

    def _mixer(self, index: int, spec: MixerSpec) -> MixerWeights:
        match spec:
            case AttentionSpec():
                return self._attention(index, spec)
            case LatentAttentionSpec():
                return self._latent(index, spec)
            case ShortConvSpec():
                return self._short_conv(index, spec)
            case GatedDeltaSpec():
                return self._gated_delta(index, spec)
            case Mamba2Spec():
                return self._mamba2(index, spec)

    def _attention(self, index: int, spec: AttentionSpec) -> AttentionWeights:
        names, reads = self._names, spec.kv_layer is not None
        sources = names.qkv[: 1 if reads else 2 if spec.keys_are_values else 3]
        return AttentionWeights(
            inputs=self._heads(index, sources, spec),
            output=self._parts(index, (names.output,), spec.output_bias)[0],
            query_norm=self._head_norm(index, names.query_norm, spec.qk_norm),
            key_norm=None if reads else self._head_norm(index, names.key_norm, spec.qk_norm),
            value_norm=None
            if reads or spec.value_norm is None
            else self._plain_norm(spec.head_dim, spec.value_norm),
            sinks=self._exact(index, names.sinks) if spec.sinks else None,
        )

    def _heads(self, index: int, sources: tuple[str, ...], spec: AttentionSpec) -> list[LinearPart]:
        parts = self._parts(index, sources, spec.qkv_bias)
        if self._names.qkv_by_key_head:
            return [part.rows(attention_rows(spec)) for part in parts]
        return with_gates(parts, spec)

    def _latent(self, index: int, spec: LatentAttentionSpec) -> LatentWeights:
        names, bias = self._names.latent, spec.bias
        token = self._parts(index, (names.token,), bias)[0]
        up, query_norm = None, None
        if spec.query_rank is None:
            first = self._parts(index, (names.query,), bias=False)[0]
            first = first.rows(turning_in_halves(spec.num_heads, spec.plain_dim, spec))
        else:
            first = self._parts(index, (names.query_down,), bias)[0]
            query_norm = self._norm(self._names.in_layer(index, names.query_norm), spec.norm)
            up = self._parts(index, (names.query_up,), bias=False)[0]
            up = up.rows(turning_in_halves(spec.num_heads, spec.plain_dim, spec))
        made = dense(self._load(self._names.in_layer(index, f"{names.heads}.weight")), self._dtype)
        heads = made.unflatten(0, (spec.num_heads, -1))
        return LatentWeights(
            inputs=[first, token.rows(turning_in_halves(1, spec.latent, spec))],
            queries=up,
            query_norm=query_norm,
            norm=self._norm(self._names.in_layer(index, names.norm), spec.norm),
            keys=heads[:, : spec.plain_dim],
            values=heads[:, spec.plain_dim :],
            output=self._parts(index, (self._names.output,), bias)[0],
        )

    def _short_conv(self, index: int, spec: ShortConvSpec) -> ShortConvWeights:
        names = self._names.short_conv
        filters, bias = self._filters(index, names.filter, spec.bias)
        return ShortConvWeights(
            inputs=self._parts(index, (names.input,), spec.bias),
            output=self._parts(index, (names.output,), spec.bias)[0],
            filters=filters,
            bias=bias,
        )

    def _gated_delta(self, index: int, spec: GatedDeltaSpec) -> GatedDeltaWeights:
        names = self._names.gated_delta
        filters, _ = self._filters(index, names.filter, bias=False)
        log_rates, decay_bias = self._rates(index, names.log_rates, names.decay_bias)
        return GatedDeltaWeights(
            inputs=self._delta_inputs(index, spec),
            output=self._parts(index, (names.output,), bias=False)[0],
            filters=filters,
            rates=arrays.exp(log_rates),
            decay_bias=decay_bias,
            norm=self._norm(self._names.in_layer(index, names.norm), spec.norm),
        )

    def _delta_inputs(self, index: int, spec: GatedDeltaSpec) -> list[LinearPart]:
        names = self._names.gated_delta
        inputs = (names.joined,) if names.joined else (names.qkv, names.gate)
        rates = (names.joined_rates,) if names.joined_rates else (names.share, names.decay)
        if not names.joined and not names.joined_rates:
            return self._parts(index, (*inputs, *rates), bias=False)
        first, last = self._parts(index, inputs, False), self._parts(index, rates, False)
        if names.joined:
            first = [part.rows(delta_rows(spec)) for part in first]
        if names.joined_rates:
            last = [part.rows(delta_rate_rows(spec)) for part in last]
        return [*first, *last]

    def _mamba2(self, index: int, spec: Mamba2Spec) -> Mamba2Weights:
        names = self._names.mamba2
        filters, filter_bias = self._filters(index, names.filter, spec.filter_bias)
        rates = self._rates(index, names.log_rates, names.step_bias, names.skip)
        log_rates, step_bias, skip = rates
        return Mamba2Weights(
            inputs=self._parts(index, (names.input,), spec.bias),
            output=self._parts(index, (names.output,), spec.bias)[0],
            filters=filters,
            filter_bias=filter_bias,
            step_bias=step_bias,
            rates=arrays.exp(log_rates),
            skip=skip,
            norm=self._norm(self._names.in_layer(index, names.norm), spec.norm),
        )

    def _rates(self, index: int, *parts: str) -> list[Tensor]:
        return [self._dense(self._names.in_layer(index, part)).float() for part in parts]

    def _filters(self, index: int, part: str, bias: bool) -> tuple[Tensor, Tensor | None]:
        name = self._names.in_layer(index, part)
        filters = self._dense(f"{name}.weight").float().flatten(1)
        return filters, self._dense(f"{name}.bias").float() if bias else None

    def _mlp_or_experts(
        self, index: int, spec: MLPSpec | ExpertsSpec
    ) -> MLPWeights | ExpertsWeights:
        if isinstance(spec, ExpertsSpec):
            return self._experts(index, spec)
        return self._mlp(index, self._names.gate_up, self._names.down, spec.bias)

    def _mlp(
        self, index: int, gate_up: tuple[str, ...], down: str, bias: bool = False
    ) -> MLPWeights:
        return MLPWeights(
            gate_up=self._parts(index, gate_up, bias), down=self._parts(index, (down,), bias)[0]
        )

    def _experts(self, index: int, spec: ExpertsSpec) -> ExpertsWeights:
        names, full = self._names.experts, partial(self._exact, index)
        shared, of_all = spec.shared, (names.shared_gate_up, names.shared_down)
        return ExpertsWeights(
            router=full(f"{names.router}.weight"),
            router_bias=full(f"{names.router}.bias") if spec.router.bias else None,
            selection_bias=full(names.selection_bias) if spec.router.selection_bias else None,
            expert=partial(self.expert, index),
            shared=None if shared is None else self._mlp(index, *of_all, shared.bias),
            shared_gate=full(f"{names.shared_gate}.weight") if spec.shared_gate else None,
            expert_scale=full(names.expert_scale) if spec.router.expert_scale else None,
            norms=self._expert_norms(index) if spec.own_norms else None,
        )

    def expert(self, index: int, number: int) -> MLPWeights:
        names, spec = self._names.experts, self._source.spec.layers[index].mlp
        assert isinstance(spec, ExpertsSpec)
        gate_up = tuple(part.format(number) for part in names.gate_up)
        return self._mlp(index, gate_up, names.down.format(number), spec.bias)

    def _expert_norms(self, index: int) -> ExpertNorms:
        names, spec = self._names.experts, self._source.spec.layers[index].norm

        def norm(part: str) -> Norm:
            return self._norm(self._names.in_layer(index, part), spec)

        # The router's norm has no weight: a vector and 1 / sqrt(hidden_size) multiply its output.
        scale = self._exact(index, names.router_norm) * self._source.spec.hidden_size**-0.5
        return ExpertNorms(
            router=Norm(scale, spec.eps),
            input=norm(names.input_norm),
            shared=norm(names.shared_norm),
            output=norm(names.output_norm),
        )

    def token_input(self) -> TokenInputWeights | None:
        spec, names = self._source.spec.token_input, self._names.token_input
        if spec is None:
            return None
        return TokenInputWeights(
            embedding=self._load(f"{names.embedding}.weight"),
            projection=LinearPart(self._load(f"{names.projection}.weight"), None),
            norm=self._norm(names.norm, spec.norm),
        )

    def _layer_input(self, index: int, norm: NormSpec) -> LayerInputWeights | None:
        if self._source.spec.token_input is None:
            return None
        names = self._names.token_input
        gate, up = self._parts(index, (names.gate, names.up), bias=False)
        return LayerInputWeights(
            gate, up, self._norm(self._names.in_layer(index, names.layer_norm), norm)
        )

    def _parts(self, index: int, sources: tuple[str, ...], bias: bool) -> list[LinearPart]:
        parts = []
        for source in sources:
            name = self._names.in_layer(index, source)
            weight = self._load(f"{name}.weight")
            parts.append(LinearPart(weight, self._dense(f"{name}.bias") if bias else None))
            self._formats.add(self._format(weight), weight.nbytes)
        return parts

    def _head_norm(self, index: int, part: str, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._norm(self._names.in_layer(index, part), spec)

    def _post_norm(self, index: int, part: str, layer: LayerSpec) -> Norm | None:
        if not layer.post_norms:
            return None
        return self._norm(self._names.in_layer(index, part), layer.norm)

    def _norm(self, name: str, spec: NormSpec) -> Norm:
        weight = self._dense(f"{name}.weight").float() + spec.offset
        return Norm(
            weight, spec.eps, self._dense(f"{name}.bias").float() if spec.centered else None
        )

    def _exact(self, index: int, part: str) -> Tensor:
        """Read a tensor that stays in float32."""
        return dense(self._load(self._names.in_layer(index, part)), "float32")

    def _plain_norm(self, width: int, spec: NormSpec) -> Norm:
        if self._device is None:
            return Norm(arrays.of_numpy(np.ones(width, dtype=np.float32)), spec.eps)
        import torch

        return Norm(torch.ones(width, device=self._device), spec.eps)

    def _dense(self, name: str) -> Tensor:
        tensor = self._load(name)
        assert arrays.is_array(tensor), f"{name} is quantized"
        return tensor

    def _load(self, name: str) -> Weight:
        weight = load_checked(self._source, name, self._device)
        on_gpu = self._device is not None and self._device.type == "cuda"
        if on_gpu and isinstance(weight, GgmlWeight):
            return self._widen(weight)
        return weight

    def _widen(self, weight: GgmlWeight) -> PackedWeight:
        """Convert GGML blocks to the packed form of GPU kernels."""
        from appliance.gguf.converted import widen

        packed, loss = widen(weight)
        self._formats.add_loss(weight.type_name, loss)
        return packed

    def _format(self, weight: Weight) -> str:
        return format_of(weight, self._dtype, self._device, native=self._native)
