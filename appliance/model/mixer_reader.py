"""Reads the weights of a layer's mixer: attention, or a recurrent one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.weight import dense
from appliance.model.layer_weights import (
    AttentionWeights,
    GatedDeltaWeights,
    LatentWeights,
    Mamba2Weights,
    ShortConvWeights,
)
from appliance.model.linear import LinearPart, turning_in_halves, with_gates
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.row_orders import delta_rate_rows, delta_rows, head_rows
from appliance.model.spec import AttentionSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.model.layer_weights import MixerWeights
    from appliance.model.norm import Norm
    from appliance.model.spec import MixerSpec, NormSpec
    from appliance.model.tensor_reader import TensorReader


class MixerReader:
    def __init__(self, tensors: TensorReader) -> None:
        self._tensors = tensors
        self._names = tensors.names

    def read(self, index: int, spec: MixerSpec) -> MixerWeights:
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
        gates = (names.head_gates,) if spec.head_gates else ()
        return AttentionWeights(
            inputs=self._heads(index, sources, spec)
            + self._tensors.linears(index, gates, bias=False),
            output=self._tensors.linears(index, (names.output,), spec.output_bias)[0],
            query_norm=self._head_norm(index, names.query_norm, spec.qk_norm, spec.head_dim),
            key_norm=None
            if reads
            else self._head_norm(index, names.key_norm, spec.qk_norm, spec.head_dim),
            value_norm=None
            if reads or spec.value_norm is None
            else self._tensors.plain_norm(spec.head_dim, spec.value_norm),
            sinks=self._tensors.exact(index, names.sinks) if spec.sinks else None,
        )

    def _heads(self, index: int, sources: tuple[str, ...], spec: AttentionSpec) -> list[LinearPart]:
        parts = self._tensors.linears(index, sources, spec.qkv_bias)
        orders = [head_rows(spec, self._names, part) for part in range(len(parts))]
        weighted = spec.qk_norm is not None and spec.qk_norm.weight
        assert not weighted or orders[0] is None, "norms of heads would have to follow"
        parts = [
            part if rows is None else part.rows(rows)
            for part, rows in zip(parts, orders, strict=True)
        ]
        return parts if orders[0] is not None else with_gates(parts, spec)

    def _latent(self, index: int, spec: LatentAttentionSpec) -> LatentWeights:
        names, bias = self._names.latent, spec.bias
        token = self._tensors.linears(index, (names.token,), bias)[0]
        up, query_norm = None, None
        if spec.query_rank is None:
            first = self._tensors.linears(index, (names.query,), bias=False)[0]
            first = first.rows(turning_in_halves(spec.num_heads, spec.plain_dim, spec))
        else:
            first = self._tensors.linears(index, (names.query_down,), bias)[0]
            query_norm = self._tensors.norm(
                self._names.in_layer(index, names.query_norm), spec.norm
            )
            up = self._tensors.linears(index, (names.query_up,), bias=False)[0]
            up = up.rows(turning_in_halves(spec.num_heads, spec.plain_dim, spec))
        made = dense(
            self._tensors.load(self._names.in_layer(index, f"{names.heads}.weight")),
            self._tensors.dtype,
        )
        heads = made.unflatten(0, (spec.num_heads, -1))
        return LatentWeights(
            inputs=[first, token.rows(turning_in_halves(1, spec.latent, spec))],
            queries=up,
            query_norm=query_norm,
            norm=self._tensors.norm(self._names.in_layer(index, names.norm), spec.norm),
            keys=heads[:, : spec.plain_dim],
            values=heads[:, spec.plain_dim :],
            output=self._tensors.linears(index, (self._names.output,), bias)[0],
        )

    def _short_conv(self, index: int, spec: ShortConvSpec) -> ShortConvWeights:
        names = self._names.short_conv
        filters, bias = self._filters(index, names.filter, spec.bias)
        return ShortConvWeights(
            inputs=self._tensors.linears(index, (names.input,), spec.bias),
            output=self._tensors.linears(index, (names.output,), spec.bias)[0],
            filters=filters,
            bias=bias,
        )

    def _gated_delta(self, index: int, spec: GatedDeltaSpec) -> GatedDeltaWeights:
        names = self._names.gated_delta
        filters, _ = self._filters(index, names.filter, bias=False)
        log_rates, decay_bias = self._rates(index, names.log_rates, names.decay_bias)
        return GatedDeltaWeights(
            inputs=self._delta_inputs(index, spec),
            output=self._tensors.linears(index, (names.output,), bias=False)[0],
            filters=filters,
            rates=arrays.exp(log_rates),
            decay_bias=decay_bias,
            norm=self._tensors.norm(self._names.in_layer(index, names.norm), spec.norm),
        )

    def _delta_inputs(self, index: int, spec: GatedDeltaSpec) -> list[LinearPart]:
        names = self._names.gated_delta
        inputs = (names.joined,) if names.joined else (names.qkv, names.gate)
        rates = (names.joined_rates,) if names.joined_rates else (names.share, names.decay)
        if not names.joined and not names.joined_rates:
            return self._tensors.linears(index, (*inputs, *rates), bias=False)
        first, last = (
            self._tensors.linears(index, inputs, False),
            self._tensors.linears(index, rates, False),
        )
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
            inputs=self._tensors.linears(index, (names.input,), spec.bias),
            output=self._tensors.linears(index, (names.output,), spec.bias)[0],
            filters=filters,
            filter_bias=filter_bias,
            step_bias=step_bias,
            rates=arrays.exp(log_rates),
            skip=skip,
            norm=self._tensors.norm(self._names.in_layer(index, names.norm), spec.norm),
        )

    def _rates(self, index: int, *parts: str) -> list[Tensor]:
        return [self._tensors.dense(self._names.in_layer(index, part)).float() for part in parts]

    def _filters(self, index: int, part: str, bias: bool) -> tuple[Tensor, Tensor | None]:
        name = self._names.in_layer(index, part)
        filters = self._tensors.dense(f"{name}.weight").float().flatten(1)
        return filters, self._tensors.dense(f"{name}.bias").float() if bias else None

    def _head_norm(self, index: int, part: str, spec: NormSpec | None, width: int) -> Norm | None:
        if spec is None:
            return None
        if not spec.weight:
            return self._tensors.plain_norm(width, spec)
        return self._tensors.norm(self._names.in_layer(index, part), spec)
