"""Lists the tensors of a decoder with their names and shapes.

Knows no family: names are data, so that a safetensors folder and a GGUF file of one model differ
only in their `TensorNames`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from appliance.kernels.head_norms import HeadNormKind
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.names import TensorNames, TokenInputNames
    from appliance.model.spec import DecoderSpec, LayerSpec, MixerSpec, MLPSpec, NormSpec


class Role(Enum):
    EMBEDDING = "embedding"
    POSITIONS = "positions"  # learned position embeddings
    WIDTH = "width"  # maps embeddings of another width
    HEAD = "head"
    NORM = "norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QKV = "qkv"  # query, key and value rows
    INPUT = "input"  # of a recurrent mixer
    LATENT_HEADS = "latent heads"  # keys and values from latents; multiplied from both sides
    OUTPUT = "output"
    GATE = "gate"
    UP = "up"
    GATE_UP = "gate_up"  # gate rows, then up rows
    DOWN = "down"
    ROUTER = "router"  # router of experts, and the shared expert's gate
    EXPERT_LATENT = "expert latent"  # maps a row to what experts read, or back
    HEAD_GATES = "head gates"  # gates of attention heads' outputs
    NUMBERS = "numbers"  # sinks and factors
    TOKEN_INPUT = "token input"  # per-layer inputs from tokens
    HEAD_NORM = "head norm"  # norm of a recurrent head's output
    FILTER = "filter"  # taps of a short convolution
    RATE = "rate"  # decay and update rates of a recurrent state
    OTHER_PART = "other part"  # of a model that reads more than text

    @property
    def decides(self) -> bool:
        """True for small tensors with a large effect, which are never quantized."""
        return self in (Role.ROUTER, Role.RATE, Role.LATENT_HEADS, Role.HEAD_GATES)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]  # (out_features, in_features), or (dim,) of a norm or bias
    role: Role
    layer: int | None = None  # None outside the layers
    expert: int | None = None  # index of its expert

    @property
    def is_linear(self) -> bool:
        """True for a layer's linear weight, which a quantizer quantizes."""
        kept = self.role.decides or self.role in (Role.TOKEN_INPUT, Role.EXPERT_LATENT)
        return self.layer is not None and len(self.shape) == 2 and not kept

    @property
    def is_norm_weight(self) -> bool:
        """True for a norm's weight, to which some files add a constant, and not for its bias."""
        return self.role is Role.NORM and not self.name.endswith(".bias")


def tensor_slots(spec: DecoderSpec, names: TensorNames) -> list[TensorSlot]:
    """List every tensor of a decoder, in the order of use.

    The order depends only on the spec, so lists with different names can be zipped.
    """
    return list(_all_slots(spec, names))


@lru_cache(maxsize=2)  # a plan asks again and again, and experts are tens of thousands
def _all_slots(spec: DecoderSpec, names: TensorNames) -> tuple[TensorSlot, ...]:
    slots = list(_first_slots(spec, names))
    for index, layer in enumerate(spec.layers):
        slots += _layer_slots(spec, names, index, layer)
    return (*slots, *_last_slots(spec, names))


def slots_beside(spec: DecoderSpec, names: TensorNames, slot: TensorSlot) -> list[TensorSlot]:
    """List the tensors of a slot's layer, or those outside the layers."""
    if slot.layer is None:
        return [*_first_slots(spec, names), *_last_slots(spec, names)]
    return layer_slots(spec, names, slot.layer) if slot.layer < len(spec.layers) else []


def layer_slots(spec: DecoderSpec, names: TensorNames, index: int) -> list[TensorSlot]:
    return list(_layer_slots(spec, names, index, spec.layers[index]))


def _first_slots(spec: DecoderSpec, names: TensorNames) -> Iterator[TensorSlot]:
    yield _matrix_slot(spec, names.embedding, Role.EMBEDDING, spec.num_embedded)
    yield from _stream_slots(spec, names)
    yield from _token_input_slots(spec, names.token_input)


def _last_slots(spec: DecoderSpec, names: TensorNames) -> Iterator[TensorSlot]:
    if not spec.norms_replace:
        yield from norm_slots(names.final_norm, spec.hidden_size, spec.final_norm)
    if not spec.tied_head:
        yield _matrix_slot(spec, names.head, Role.HEAD, spec.vocab_size)
    if spec.head_bias:
        yield TensorSlot(f"{names.head}.bias", (spec.vocab_size,), Role.NUMBERS)
    if spec.score is not None:
        yield TensorSlot(f"{names.score}.weight", (1, spec.hidden_size), Role.NUMBERS)


def _matrix_slot(spec: DecoderSpec, name: str, role: Role, rows: int) -> TensorSlot:
    width = spec.embedding_width or spec.hidden_size
    return TensorSlot(f"{name}.weight", (rows, width), role)


def norm_slots(
    name: str, dim: int, norm: NormSpec, layer: int | None = None
) -> Iterator[TensorSlot]:
    yield TensorSlot(f"{name}.weight", (dim,), Role.NORM, layer)
    if norm.centered and norm.bias:
        yield TensorSlot(f"{name}.bias", (dim,), Role.NORM, layer)


def _stream_slots(spec: DecoderSpec, names: TensorNames) -> Iterator[TensorSlot]:
    """List the tensors between embeddings and the stream."""
    hidden, width = spec.hidden_size, spec.embedding_width
    if spec.positions is not None:
        rows = spec.positions.count + spec.positions.skipped
        yield TensorSlot(f"{names.positions}.weight", (rows, hidden), Role.POSITIONS)
    if width is not None:
        yield TensorSlot(f"{names.into_stream}.weight", (hidden, width), Role.WIDTH)
        yield TensorSlot(f"{names.out_of_stream}.weight", (width, hidden), Role.WIDTH)


def _layer_slots(
    spec: DecoderSpec, names: TensorNames, index: int, layer: LayerSpec
) -> Iterator[TensorSlot]:
    found = _LayerTensors(names, index)
    hidden = spec.hidden_size
    if layer.mixer is not None:
        if layer.pre_norms and not layer.joins:
            yield from found.stream_norm(names.mixer_norm, hidden, layer.norm)
        yield from _mixer_slots(found, hidden, layer.mixer, 2 if layer.joins else 1)
        if layer.post_norms:
            yield found.norm(names.mixer_post_norm, hidden)
    if layer.mlp is not None:
        if layer.pre_norms and not layer.one_norm:
            yield from found.stream_norm(names.mlp_norm, hidden, layer.norm)
        if isinstance(layer.mlp, ExpertsSpec):
            yield from _expert_slots(found, hidden, layer.mlp)
        else:
            yield from found.mlp(names.gate_up, names.down, hidden, layer.mlp)
        if layer.post_norms:
            yield found.norm(names.mlp_post_norm, hidden)
    if spec.token_input is not None:
        own, width = names.token_input, spec.token_input.width
        yield from found.linear(own.gate, Role.TOKEN_INPUT, width, hidden, bias=False)
        yield from found.linear(own.up, Role.TOKEN_INPUT, hidden, width, bias=False)
        yield found.norm(own.layer_norm, hidden)
    if layer.output_scale:
        yield found.numbers(names.output_scale, 1)


def _token_input_slots(spec: DecoderSpec, names: TokenInputNames) -> Iterator[TensorSlot]:
    if spec.token_input is None:
        return
    width, role = spec.token_input.width, Role.TOKEN_INPUT
    all_layers = len(spec.layers) * width
    table = (spec.token_input.vocab_size, all_layers)
    yield TensorSlot(f"{names.embedding}.weight", table, role)
    yield TensorSlot(f"{names.projection}.weight", (all_layers, spec.hidden_size), role)
    yield TensorSlot(f"{names.norm}.weight", (width,), Role.NORM)


@dataclass(frozen=True, slots=True)
class _LayerTensors:
    names: TensorNames
    index: int

    def norm(self, part: str, dim: int) -> TensorSlot:
        name = f"{self.names.in_layer(self.index, part)}.weight"
        return TensorSlot(name, (dim,), Role.NORM, self.index)

    def stream_norm(self, part: str, dim: int, norm: NormSpec) -> Iterator[TensorSlot]:
        return norm_slots(self.names.in_layer(self.index, part), dim, norm, self.index)

    def numbers(self, name: str, count: int) -> TensorSlot:
        full = self.names.in_layer(self.index, name)
        return TensorSlot(full, (count,), Role.NUMBERS, self.index)

    def rates(self, name: str, count: int) -> TensorSlot:
        full = self.names.in_layer(self.index, name)
        return TensorSlot(full, (count,), Role.RATE, self.index)

    def head_norm(self, part: str, dim: int) -> TensorSlot:
        name = f"{self.names.in_layer(self.index, part)}.weight"
        return TensorSlot(name, (dim,), Role.HEAD_NORM, self.index)

    def linear(
        self, part: str, role: Role, rows: int, columns: int, bias: bool, expert: int | None = None
    ) -> Iterator[TensorSlot]:
        name = self.names.in_layer(self.index, part)
        yield TensorSlot(f"{name}.weight", (rows, columns), role, self.index, expert)
        if bias:
            yield TensorSlot(f"{name}.bias", (rows,), role, self.index, expert)

    def filters(self, part: str, width: int, taps: int, bias: bool) -> Iterator[TensorSlot]:
        name = self.names.in_layer(self.index, part)
        yield TensorSlot(f"{name}.weight", (width, 1, taps), Role.FILTER, self.index)
        if bias:
            yield TensorSlot(f"{name}.bias", (width,), Role.FILTER, self.index)

    def mlp(
        self,
        gate_up: tuple[str, ...],
        down: str,
        hidden: int,
        mlp: MLPSpec | ExpertsSpec,
        expert: int | None = None,
    ) -> Iterator[TensorSlot]:
        middle = mlp.intermediate_size
        parts = [(Role.GATE, middle), (Role.UP, middle)]
        if not mlp.gated:
            parts = [(Role.UP, middle)]
        elif len(gate_up) == 1:
            parts = [(Role.GATE_UP, 2 * middle)]
        for part, (role, rows) in zip(gate_up, parts, strict=True):
            yield from self.linear(part, role, rows, hidden, mlp.bias, expert)
        yield from self.linear(down, Role.DOWN, hidden, middle, mlp.bias, expert)


def _mixer_slots(
    found: _LayerTensors, hidden: int, mixer: MixerSpec, halves: int
) -> Iterator[TensorSlot]:
    match mixer:
        case AttentionSpec():
            return _attention_slots(found, hidden, mixer, halves)
        case LatentAttentionSpec():
            return _latent_slots(found, hidden, mixer)
        case ShortConvSpec():
            return _short_conv_slots(found, hidden, mixer)
        case GatedDeltaSpec():
            return _gated_delta_slots(found, hidden, mixer)
        case Mamba2Spec():
            return _mamba2_slots(found, hidden, mixer)


def _attention_slots(
    found: _LayerTensors, hidden: int, attention: AttentionSpec, halves: int
) -> Iterator[TensorSlot]:
    names = found.names
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    gated = 2 * queries if attention.output_gate else queries
    parts = [(Role.QUERY, gated)]
    if attention.kv_layer is None:
        parts += (
            [(Role.KEY, keys)]
            if attention.keys_are_values
            else [(Role.KEY, keys), (Role.VALUE, keys)]
        )
    if len(names.qkv) == 1:
        parts = [(Role.QKV, queries + 2 * keys)]
    for part, (role, rows) in zip(names.qkv[: len(parts)], parts, strict=True):
        yield from found.linear(part, role, rows, halves * hidden, attention.qkv_bias)
    if attention.head_gates:
        heads, inputs = attention.num_heads, halves * hidden
        yield from found.linear(names.head_gates, Role.HEAD_GATES, heads, inputs, bias=False)
    if attention.qk_norm is not None and attention.qk_norm.weight:
        at_once = attention.head_norms is HeadNormKind.ALL
        yield found.norm(names.query_norm, queries if at_once else attention.head_dim)
        if attention.kv_layer is None:
            yield found.norm(names.key_norm, keys if at_once else attention.head_dim)
    if attention.sinks:
        yield found.numbers(names.sinks, attention.num_heads)
    yield from found.linear(names.output, Role.OUTPUT, hidden, queries, attention.output_bias)


def _latent_slots(
    found: _LayerTensors, hidden: int, mixer: LatentAttentionSpec
) -> Iterator[TensorSlot]:
    names, heads, bias = found.names.latent, mixer.num_heads, mixer.bias
    queries = heads * mixer.query_dim
    if mixer.query_rank is None:
        yield from found.linear(names.query, Role.QUERY, queries, hidden, bias=False)
    else:
        rank = mixer.query_rank
        yield from found.linear(names.query_down, Role.QUERY, rank, hidden, bias)
        yield found.norm(names.query_norm, rank)
        yield from found.linear(names.query_up, Role.QUERY, queries, rank, bias=False)
    yield from found.linear(names.token, Role.KEY, mixer.width, hidden, bias)
    yield found.norm(names.norm, mixer.latent)
    made = heads * (mixer.plain_dim + mixer.value_dim)
    yield from found.linear(names.heads, Role.LATENT_HEADS, made, mixer.latent, bias=False)
    out = heads * mixer.value_dim
    yield from found.linear(found.names.output, Role.OUTPUT, hidden, out, bias)


def _short_conv_slots(
    found: _LayerTensors, hidden: int, mixer: ShortConvSpec
) -> Iterator[TensorSlot]:
    names, width = found.names.short_conv, mixer.width
    yield from found.linear(names.input, Role.INPUT, 3 * width, hidden, mixer.bias)
    yield from found.filters(names.filter, width, mixer.taps, mixer.bias)
    yield from found.linear(names.output, Role.OUTPUT, hidden, width, mixer.bias)


def _gated_delta_slots(
    found: _LayerTensors, hidden: int, mixer: GatedDeltaSpec
) -> Iterator[TensorSlot]:
    names, heads = found.names.gated_delta, mixer.num_value_heads
    inputs = [(names.qkv, mixer.channels), (names.gate, mixer.values)]
    if names.joined:
        inputs = [(names.joined, mixer.channels + mixer.values)]
    rates = [(names.share, heads), (names.decay, heads)]
    if names.joined_rates:
        rates = [(names.joined_rates, 2 * heads)]
    for part, rows in inputs:
        yield from found.linear(part, Role.INPUT, rows, hidden, bias=False)
    for part, rows in rates:
        yield from found.linear(part, Role.RATE, rows, hidden, bias=False)
    yield from found.filters(names.filter, mixer.channels, mixer.taps, bias=False)
    for part in (names.log_rates, names.decay_bias):
        yield found.rates(part, heads)
    yield found.head_norm(names.norm, mixer.value_dim)
    yield from found.linear(names.output, Role.OUTPUT, hidden, mixer.values, bias=False)


def _mamba2_slots(found: _LayerTensors, hidden: int, mixer: Mamba2Spec) -> Iterator[TensorSlot]:
    names = found.names.mamba2
    yield from found.linear(names.input, Role.INPUT, mixer.inputs, hidden, mixer.bias)
    yield from found.filters(names.filter, mixer.channels, mixer.taps, mixer.filter_bias)
    for part in (names.step_bias, names.log_rates, names.skip):
        yield found.rates(part, mixer.num_heads)
    yield found.head_norm(names.norm, mixer.values)
    yield from found.linear(names.output, Role.OUTPUT, hidden, mixer.values, mixer.bias)


def _expert_slots(found: _LayerTensors, hidden: int, mlp: ExpertsSpec) -> Iterator[TensorSlot]:
    names, count = found.names.experts, mlp.router.num_experts
    yield from found.linear(names.router, Role.ROUTER, count, hidden, bias=mlp.router.bias)
    if mlp.router.selection_bias:
        name = found.names.in_layer(found.index, names.selection_bias)
        shape = (1, count) if names.selection_bias_in_row else (count,)
        yield TensorSlot(name, shape, Role.ROUTER, found.index)
    if mlp.router.expert_scale:
        yield found.numbers(names.expert_scale, count)
    if mlp.own_norms:
        yield found.numbers(names.router_norm, hidden)
        for norm in (names.input_norm, names.shared_norm, names.output_norm):
            yield found.norm(norm, hidden)
    width = mlp.latent or hidden
    if mlp.latent is not None:
        role = Role.EXPERT_LATENT
        yield from found.linear(names.into_latent, role, width, hidden, bias=False)
        yield from found.linear(names.out_of_latent, role, hidden, width, bias=False)
    for expert in range(count):
        gate_up = tuple(part.format(expert) for part in names.gate_up)
        yield from found.mlp(gate_up, names.down.format(expert), width, mlp, expert)
    if mlp.shared is not None:
        yield from found.mlp(names.shared_gate_up, names.shared_down, hidden, mlp.shared)
    if mlp.shared_gate:
        yield from found.linear(names.shared_gate, Role.ROUTER, 1, hidden, bias=False)
