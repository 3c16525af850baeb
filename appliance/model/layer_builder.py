"""Builds decoder layers from their weights, for one backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from appliance.kernels.activation import Activation
from appliance.kernels.operations import RouterWeights
from appliance.model.attention import Attention, LatentAttention
from appliance.model.embedding import Embedding, LayerInput, TokenInputs
from appliance.model.experts import Experts, LatentRows, group_experts
from appliance.model.layer_weights import (
    AttentionWeights,
    ExpertsWeights,
    GatedDeltaWeights,
    LatentWeights,
    Mamba2Weights,
    MLPWeights,
    ShortConvWeights,
)
from appliance.model.layers import MLP, ActivatedLinear, DecoderLayer, GatedLinear
from appliance.model.linear import prepare_fused, stack_neighbours
from appliance.model.recurrent import GatedDelta, Mamba2, ShortConv
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.rope import distinct_ropes
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from appliance.kernels.activation import Gating
    from appliance.kernels.operations import Backend, Linear, RoutedMLPs
    from appliance.kernels.weights.weight import Weight
    from appliance.model.host_experts import HostExperts
    from appliance.model.layer_weights import (
        ExpertNorms,
        LayerInputWeights,
        LayerWeights,
        MixerWeights,
        TokenInputWeights,
    )
    from appliance.model.layers import Mixer
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm
    from appliance.model.shard.joint import JoinedShard
    from appliance.model.spec import DecoderSpec, LayerSpec, MixerSpec, MLPSpec


def _with_experts(norm: Norm | None, norms: ExpertNorms | None) -> Norm | None:
    """Stack the norms that MLP, router and experts read, of one stream."""
    if norm is None or norms is None:
        return norm
    assert norm.eps == norms.router.eps == norms.input.eps
    weights = [each.weight for each in (norm, norms.router, norms.input)]
    return replace(norm, weight=torch.stack(weights))


class LayerBuilder:
    """Lays weights out for one backend and counts their bytes."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        spec: DecoderSpec,
        part: JoinedShard | None = None,
    ) -> None:
        self.nbytes = 0
        self._backend = backend
        self._dtype = dtype
        self._spec = spec
        self._part = part
        self._ropes = distinct_ropes(spec)
        self._places = spec.cache_places

    def layer(
        self,
        index: int,
        weights: LayerWeights,
        spec: LayerSpec,
        next_norm: Norm | None,
        experts: HostExperts | RoutedMLPs | None = None,
    ) -> DecoderLayer:
        """Build a layer; `experts` run in place of its routed ones, which are not read."""
        mixer_joint, mlp_joint = (None, None) if self._part is None else self._part.joints(index)
        norms = weights.mlp.norms if isinstance(weights.mlp, ExpertsWeights) else None
        return DecoderLayer(
            backend=self._backend,
            mixer=None
            if weights.mixer is None or spec.mixer is None
            else self._mixer(weights.mixer, spec.mixer),
            mlp=None
            if weights.mlp is None or spec.mlp is None
            else self._mlp_or_experts(weights.mlp, spec.mlp, experts),
            mlp_norm=self.optional(_with_experts(weights.mlp_norm, norms)),
            next_norm=next_norm,
            mixer_post_norm=self.optional(weights.mixer_post_norm),
            mlp_post_norm=self.optional(weights.mlp_post_norm),
            index=index,
            cache_place=self._places.get(index),
            token_input=self._layer_input(weights.token_input),
            output_scale=weights.output_scale,
            is_parallel=spec.parallel,
            replaces=self._spec.norms_replace,
            mixer_joint=mixer_joint,
            mlp_joint=mlp_joint,
            parts=None
            if norms is None
            else (self.counted(norms.output), self.counted(norms.shared)),
        )

    def token_inputs(self, weights: TokenInputWeights | None) -> TokenInputs | None:
        spec = self._spec.token_input
        if weights is None or spec is None:
            return None
        embedding = Embedding.of(weights.embedding, spec.width**0.5, self._dtype, self._backend)
        self.nbytes += embedding.nbytes
        return TokenInputs(
            backend=self._backend,
            embedding=embedding,
            projection=self._linear([weights.projection]),
            norm=self.counted(weights.norm),
        )

    def positions(self, table: Weight | None) -> Embedding | None:
        if table is None:
            return None
        embedding = Embedding.of(table, 1.0, self._dtype, self._backend)
        self.nbytes += embedding.nbytes
        return embedding

    def _layer_input(self, weights: LayerInputWeights | None) -> LayerInput | None:
        spec = self._spec.token_input
        if weights is None or spec is None:
            return None
        return LayerInput(
            backend=self._backend,
            activation=spec.activation,
            gate=self._linear([weights.gate]),
            up=self._linear([weights.up]),
            norm=self.counted(weights.norm),
        )

    def gated(self, parts: list[LinearPart], activation: Gating) -> Linear:
        """Build act(gate(x)) * up(x), fused if backend and packing allow it."""
        stacked = stack_neighbours(parts)
        if len(stacked) == 1:
            (part,) = stacked
            linear = self._backend.prepare_gated(part.weight, part.bias, self._dtype, activation)
            if linear is not None:
                self.nbytes += linear.nbytes
                return linear
        return GatedLinear(self._backend, activation, self._linear(stacked))

    def _mixer(self, weights: MixerWeights, spec: MixerSpec) -> Mixer:
        match weights, spec:
            case AttentionWeights() as own, AttentionSpec() as mixer:
                return self._attention(own, mixer)
            case LatentWeights() as own, LatentAttentionSpec() as mixer:
                return self._latent(own, mixer)
            case ShortConvWeights() as own, ShortConvSpec() as mixer:
                return self._short_conv(own, mixer)
            case GatedDeltaWeights() as own, GatedDeltaSpec() as mixer:
                return self._gated_delta(own, mixer)
            case Mamba2Weights() as own, Mamba2Spec() as mixer:
                return self._mamba2(own, mixer)
        raise AssertionError(f"{type(weights).__name__} are no weights of {spec}")

    def _short_conv(self, weights: ShortConvWeights, spec: ShortConvSpec) -> ShortConv:
        own = (weights.filters, weights.bias)
        self.nbytes += sum(tensor.nbytes for tensor in own if tensor is not None)
        return ShortConv(
            spec=spec,
            backend=self._backend,
            inputs=self._linear(weights.inputs),
            filters=weights.filters,
            bias=weights.bias,
            output=self._linear([weights.output]),
        )

    def _gated_delta(self, weights: GatedDeltaWeights, spec: GatedDeltaSpec) -> GatedDelta:
        own = (weights.filters, weights.rates, weights.decay_bias)
        self.nbytes += sum(tensor.nbytes for tensor in own)
        return GatedDelta(
            spec=spec,
            backend=self._backend,
            inputs=self._linear(weights.inputs),
            filters=weights.filters,
            rates=weights.rates,
            decay_bias=weights.decay_bias,
            norm=self.counted(weights.norm),
            output=self._linear([weights.output]),
        )

    def _latent(self, weights: LatentWeights, spec: LatentAttentionSpec) -> LatentAttention:
        self.nbytes += weights.keys.nbytes + weights.values.nbytes
        return LatentAttention(
            spec=spec,
            backend=self._backend,
            rope=self._ropes.index(spec.rope),
            inputs=self._linear(weights.inputs),
            queries=None if weights.queries is None else self._linear([weights.queries]),
            query_norm=self.optional(weights.query_norm),
            norm=self.counted(weights.norm),
            keys=weights.keys.to(self._dtype).contiguous(),
            values=weights.values.to(self._dtype).contiguous(),
            output=self._linear([weights.output]),
        )

    def _mamba2(self, weights: Mamba2Weights, spec: Mamba2Spec) -> Mamba2:
        own = (weights.filters, weights.filter_bias, weights.step_bias, weights.rates, weights.skip)
        self.nbytes += sum(tensor.nbytes for tensor in own if tensor is not None)
        return Mamba2(
            spec=spec,
            backend=self._backend,
            inputs=self._linear(weights.inputs),
            filters=weights.filters,
            filter_bias=weights.filter_bias,
            step_bias=weights.step_bias,
            rates=weights.rates,
            skip=weights.skip,
            norm=self.counted(weights.norm),
            output=self._linear([weights.output]),
            joint=None if self._part is None else self._part.joint,
        )

    def _attention(self, weights: AttentionWeights, spec: AttentionSpec) -> Attention:
        return Attention(
            spec=spec,
            backend=self._backend,
            rope=self._ropes.index(spec.rope),
            qkv=self._linear(weights.inputs),
            output=self._linear([weights.output]),
            query_norm=self.optional(weights.query_norm),
            key_norm=self.optional(weights.key_norm),
            value_norm=weights.value_norm,
            sinks=weights.sinks,
        )

    def _mlp_or_experts(
        self,
        weights: MLPWeights | ExpertsWeights,
        spec: MLPSpec | ExpertsSpec,
        elsewhere: HostExperts | RoutedMLPs | None,
    ) -> MLP | Experts:
        if isinstance(weights, MLPWeights):
            return self.mlp(weights, spec)
        assert isinstance(spec, ExpertsSpec)
        return self._experts(weights, spec, elsewhere)

    def mlp(self, weights: MLPWeights, spec: MLPSpec | ExpertsSpec) -> MLP:
        """Build an MLP or one expert."""
        down = self._linear([weights.down])
        if spec.gated:
            return MLP(self.gated(weights.gate_up, spec.activation), down)
        assert isinstance(spec.activation, Activation), "a clamp has a gate"
        middle = ActivatedLinear(self._backend, spec.activation, self._linear(weights.gate_up))
        return MLP(middle, down)

    def _experts(
        self,
        weights: ExpertsWeights,
        spec: ExpertsSpec,
        elsewhere: HostExperts | RoutedMLPs | None,
    ) -> Experts:
        others = (
            weights.router,
            weights.router_bias,
            weights.selection_bias,
            weights.shared_gate,
        )
        self.nbytes += sum(tensor.nbytes for tensor in others if tensor is not None)
        grouped, num_shared = elsewhere, 0
        if grouped is None:
            grouped, num_shared = group_experts(
                weights.expert, weights.shared, spec, self._backend, self._dtype
            )
            self.nbytes += 0 if grouped is None else grouped.nbytes
        shared = None
        if weights.shared is not None and not num_shared:
            assert spec.shared is not None
            shared = self.mlp(weights.shared, spec.shared)
        router, router_bias = weights.router, weights.router_bias
        gate = weights.shared_gate
        # Where each operation costs a launch, the router's product is that of the gate too.
        has_gate_row = weights.norms is None and self._backend.prepare_experts is not None
        if gate is not None and has_gate_row:
            router = torch.cat((router, gate))
            router_bias = None if router_bias is None else pad(router_bias, (0, 1))
            gate = None
        return Experts(
            router=spec.router,
            held=spec.experts,
            router_weights=RouterWeights(
                router, router_bias, weights.selection_bias, weights.expert_scale
            ),
            grouped=grouped,
            experts=tuple(self.mlp(weights.expert(number), spec) for number in spec.experts)
            if grouped is None
            else (),
            shared=shared,
            shared_gate=gate,
            latent=self._latent_rows(weights.latent),
            backend=self._backend,
            weighs_inputs=spec.weighs_inputs,
            has_gate_row=len(router) > spec.router.num_experts,
            num_shared=num_shared,
        )

    def _latent_rows(self, parts: tuple[LinearPart, LinearPart] | None) -> LatentRows | None:
        if parts is None:
            return None
        into, out_of = parts
        return LatentRows(self._linear([into]), self._linear([out_of]))

    def counted(self, norm: Norm) -> Norm:
        self.nbytes += norm.nbytes
        return norm

    def optional(self, norm: Norm | None) -> Norm | None:
        return None if norm is None else self.counted(norm)

    def _linear(self, parts: list[LinearPart]) -> Linear:
        linear = prepare_fused(parts, self._backend, self._dtype)
        self.nbytes += linear.nbytes
        return linear
