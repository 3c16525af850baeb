"""Reads and checks a model's weights part by part, for any executor.

Knows no family and no file format.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.layer_weights import (
    AttentionWeights,
    EndWeights,
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
from appliance.model.linear import LinearPart
from appliance.model.norm import Norm, with_unit_lengths
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.row_orders import (
    delta_rate_rows,
    delta_rows,
    heads_in_order,
    turning_in_halves,
)
from appliance.model.spec import AttentionSpec, ExpertsSpec, HeadNorm, LatentAttentionSpec
from appliance.model.tensor_reader import TensorReader
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.layer_weights import MixerWeights
    from appliance.model.names import JoinNames
    from appliance.model.shard.shard import Part
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
        self._use(TensorReader(source, device, dtype, native=native))

    def _use(self, tensors: TensorReader) -> None:
        self._tensors = tensors
        self._mixers = MixerReader(tensors)

    def for_host(self) -> ModelReader:
        """Return a reader that keeps weights in host memory for the CPU library, counting here."""
        reader = copy(self)
        reader._use(self._tensors.for_host())
        return reader

    def layer(self, index: int) -> LayerWeights:
        spec, names = self._source.spec.layers[index], self._names
        mixer, mlp = spec.mixer is not None, spec.mlp is not None
        return LayerWeights(
            mixer=None if spec.mixer is None else self._mixers.read(index, spec.mixer),
            mlp=None if spec.mlp is None else self._mlp_or_experts(index, spec.mlp),
            first_norm=self.first_norm(index),
            mixer_post_norm=self._post_norm(index, names.mixer_post_norm, spec) if mixer else None,
            mlp_norm=self._inner_norm(index) if mixer and mlp and not spec.one_norm else None,
            mlp_post_norm=self._post_norm(index, names.mlp_post_norm, spec) if mlp else None,
            token_input=self._layer_input(index, spec.norm),
            output_scale=self._tensors.exact(index, names.output_scale).item()
            if spec.output_scale
            else None,
        )

    def first_norm(self, index: int) -> Norm | None:
        """Read the norm at the start of a layer; past the last layer, the decoder's own.

        None before the first layer if norms follow additions, or if a join comes first; also
        before a layer that norms only what it adds.
        """
        spec = self._source.spec
        if spec.norms_replace:
            name = self._names.in_layer(index - 1, self._names.mlp_norm)
            return self._tensors.norm(name, spec.final_norm) if index else None
        if index == len(spec.layers):
            return self._tensors.norm(self._names.final_norm, spec.final_norm)
        layer, names = spec.layers[index], self._names
        if layer.joins or not layer.pre_norms:
            return None
        first = names.mlp_norm if layer.mixer is None else names.mixer_norm
        return self._tensors.norm(names.in_layer(index, first), layer.norm)

    def _inner_norm(self, index: int) -> Norm | None:
        names, spec = self._names, self._source.spec
        if not spec.layers[index].pre_norms:
            return None
        part = names.mixer_norm if spec.norms_replace else names.mlp_norm
        return self._tensors.norm(names.in_layer(index, part), spec.layers[index].norm)

    def ends(
        self, part: Part, shared: Collection[Role] = (), join: JoinNames | None = None
    ) -> EndWeights:
        """Read what a part of the model has before its first layer and after its last.

        Args:
            shared: matrices that another model has.
            join: names of the parts that join a draft head's embedding and hidden state.
        """
        embedding, head, bias = None, None, None
        if Role.EMBEDDING not in shared:
            # A part that has one of them reads both, for the head's format.
            if part.is_first or part.is_last:
                embedding, head = self.embedding_and_head()
                bias = self.head_bias() if part.is_last else None
        elif Role.HEAD not in shared:
            head = self._tensors.load(f"{self._names.head}.weight")
        return EndWeights(
            embedding=embedding if part.is_first else None,
            head=head if part.is_last else None,
            head_bias=bias,
            final_norm=self.first_norm(len(self._source.spec.layers)) if part.is_last else None,
            positions=self.positions() if part.is_first else None,
            token_input=self.token_input(),
            join=None if join is None else self.join(join),
        )

    def embedding_and_head(self) -> tuple[Weight, Weight]:
        """Read embedding and head, (vocab_size, hidden_size); one object if they are tied.

        Embeddings of another width are multiplied by their projections here.
        """
        names = self._names
        embedding = self._tensors.load(f"{names.embedding}.weight")
        head = (
            embedding if self._source.spec.tied_head else self._tensors.load(f"{names.head}.weight")
        )
        if self._source.spec.embedding_width is not None:
            into, out = (
                self._tensors.dense(f"{name}.weight").float()
                for name in (names.into_stream, names.out_of_stream)
            )
            embedding, head = (dense(matrix, "float32") for matrix in (embedding, head))
            embedding, head = (
                dense(embedding @ into.T, self._tensors.dtype),
                dense(head @ out, self._tensors.dtype),
            )
        head = self.normed_head(head)
        self._tensors.formats.set_head(self._tensors.format(head))
        return embedding, head

    def normed_head(self, head: Weight) -> Weight:
        """Divide rows or columns of a head by their lengths, if the model's has such norms."""
        kind = self._source.spec.head_norm
        if kind is None:
            return head
        rows = with_unit_lengths(dense(head, "float32"), of_rows=kind is HeadNorm.ROWS)
        return dense(rows, self._tensors.dtype)

    def head_bias(self) -> Tensor | None:
        """Read the bias of the logits, (vocab_size,) float32."""
        if not self._source.spec.head_bias:
            return None
        return self._tensors.dense(f"{self._names.head}.bias").float()

    def join(self, names: JoinNames) -> tuple[Norm, Norm, Weight | None]:
        """Read the norms of embedding and hidden state, and the linear (hidden, 2 * hidden)."""
        norm = self._source.spec.final_norm
        linear = self._tensors.load(f"{names.linear}.weight") if names.linear else None
        return (
            self._tensors.norm(names.token_norm, norm),
            self._tensors.norm(names.hidden_norm, norm),
            linear,
        )

    def positions(self) -> Weight | None:
        """Read learned position embeddings, (count, hidden_size), from position 0 on."""
        spec = self._source.spec.positions
        if spec is None:
            return None
        table = LinearPart(self._tensors.load(f"{self._names.positions}.weight"), None)
        return table.rows(slice(spec.skipped, None)).weight

    def weight_format(self) -> str:
        """Describe the formats of the weights read: layers by frequency, then the head."""
        return self._tensors.formats.in_words()

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
            gate_up=self._tensors.linears(index, gate_up, bias),
            down=self._tensors.linears(index, (down,), bias)[0],
        )

    def _experts(self, index: int, spec: ExpertsSpec) -> ExpertsWeights:
        names, full = self._names.experts, partial(self._tensors.exact, index)
        shared, of_all = spec.shared, (names.shared_gate_up, names.shared_down)
        return ExpertsWeights(
            router=full(f"{names.router}.weight"),
            router_bias=full(f"{names.router}.bias") if spec.router.bias else None,
            selection_bias=full(names.selection_bias).reshape(-1)
            if spec.router.selection_bias
            else None,
            expert=partial(self.expert, index),
            shared=None if shared is None else self._mlp(index, *of_all, shared.bias),
            shared_gate=full(f"{names.shared_gate}.weight") if spec.shared_gate else None,
            expert_scale=full(names.expert_scale) if spec.router.expert_scale else None,
            norms=self._expert_norms(index) if spec.own_norms else None,
            latent=None if spec.latent is None else self._expert_latent(index),
        )

    def _expert_latent(self, index: int) -> tuple[LinearPart, LinearPart]:
        names = self._names.experts
        # One by one: rows of different widths are no parts of one matrix.
        (into,) = self._tensors.linears(index, (names.into_latent,), bias=False)
        (out_of,) = self._tensors.linears(index, (names.out_of_latent,), bias=False)
        return into, out_of

    def expert(self, index: int, number: int) -> MLPWeights:
        names, spec = self._names.experts, self._source.spec.layers[index].mlp
        assert isinstance(spec, ExpertsSpec)
        gate_up = tuple(part.format(number) for part in names.gate_up)
        return self._mlp(index, gate_up, names.down.format(number), spec.bias)

    def _expert_norms(self, index: int) -> ExpertNorms:
        names, spec = self._names.experts, self._source.spec.layers[index].norm

        def norm(part: str) -> Norm:
            return self._tensors.norm(self._names.in_layer(index, part), spec)

        # The router's norm has no weight: a vector and 1 / sqrt(hidden_size) multiply its output.
        scale = self._tensors.exact(index, names.router_norm) * self._source.spec.hidden_size**-0.5
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
            embedding=self._tensors.load(f"{names.embedding}.weight"),
            projection=LinearPart(self._tensors.load(f"{names.projection}.weight"), None),
            norm=self._tensors.norm(names.norm, spec.norm),
        )

    def _layer_input(self, index: int, norm: NormSpec) -> LayerInputWeights | None:
        if self._source.spec.token_input is None:
            return None
        names = self._names.token_input
        gate, up = self._tensors.linears(index, (names.gate, names.up), bias=False)
        return LayerInputWeights(
            gate, up, self._tensors.norm(self._names.in_layer(index, names.layer_norm), norm)
        )

    def _post_norm(self, index: int, part: str, layer: LayerSpec) -> Norm | None:
        if not layer.post_norms:
            return None
        return self._tensors.norm(self._names.in_layer(index, part), layer.norm)


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
            inputs=heads_in_order(
                self._tensors.linears(index, sources, spec.qkv_bias), spec, self._names
            )
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
