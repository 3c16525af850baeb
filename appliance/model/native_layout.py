"""Lays a model out for the CPU library: the structs of its layers, mixers, MLPs and ends.

Takes weights as read; knows no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.cpu.structs import (
    AttentionStruct,
    ExpertsStruct,
    FiltersStruct,
    GatedDeltaStruct,
    GatingStruct,
    HeadNormsCode,
    JoinStruct,
    LatentStruct,
    LayerStruct,
    LinearStruct,
    Mamba2Struct,
    ModelStruct,
    NormStruct,
    OutputGateCode,
    RopeStruct,
    RouterStruct,
    ScoringCode,
    ShortConvStruct,
    TokenInputsStruct,
    TokenInputStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.routing import Scoring
from appliance.model.layer_weights import (
    AttentionWeights,
    ExpertsWeights,
    GatedDeltaWeights,
    LatentWeights,
    Mamba2Weights,
    ShortConvWeights,
)
from appliance.model.linear import stack_neighbours
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, SplitGroup
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import Array

    from torch import Tensor

    from appliance.kernels.activation import Gating
    from appliance.model.layer_weights import (
        EndWeights,
        LayerInputWeights,
        LayerWeights,
        MixerWeights,
        MLPWeights,
        TokenInputWeights,
    )
    from appliance.model.linear import LinearPart
    from appliance.model.names import JoinNames
    from appliance.model.norm import Norm
    from appliance.model.shard.shard import Part
    from appliance.model.spec import DecoderSpec, MLPSpec, RopeSpec


ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.RELU_SQUARED: 3,
    Activation.RELU: 4,
    Activation.GELU: 5,
    Activation.QUICK_GELU: 7,
}
_CLAMPED_SWIGLU, _BOUNDED_SWIGLU = 2, 6
_SCORINGS = {scoring: ScoringCode[scoring.name] for scoring in Scoring}


def lay_out_model(
    packer: WeightPacker,
    part: Part,
    layers: Array[LayerStruct],
    ends: EndWeights,
    context_length: int,
    *,
    joins: JoinNames | None = None,
    beside: ModelStruct | None = None,
) -> ModelStruct:
    """Lay out what is around the layers of a rank's part.

    Args:
        layers: laid out by `lay_out_layer`.
        context_length: most tokens of a sequence.
        joins: names of the parts in `ends.join`.
        beside: has the matrices that `ends` lacks; empty ones by default.
    """
    spec = part.spec
    beside = ModelStruct() if beside is None else beside
    embedding = beside.embedding if ends.embedding is None else packer.linear(ends.embedding)
    if ends.head is None:
        head = beside.head
    else:
        is_tied = ends.head is ends.embedding
        head = embedding if is_tied else packer.linear(ends.head, ends.head_bias)
    return ModelStruct(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_layers=len(layers),
        num_ropes=len(distinct_ropes(spec)),
        layers=layers,
        ropes=lay_out_ropes(packer, spec, context_length),
        final_norm=_norm(packer, ends.final_norm),
        embedding=embedding,
        head=head,
        embedding_scale=spec.embedding_scale if part.is_first else 1.0,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap or 0.0,
        token_inputs=_token_inputs(packer, spec, ends.token_input),
        positions=LinearStruct() if ends.positions is None else packer.linear(ends.positions),
        first_tokens=packer.integers(part.tokens) if part.tokens else None,
        first_token=part.own_tokens.start,
        widest_vocab=part.widest_tokens,
        norms_replace=spec.norms_replace,
        join=_join(packer, ends, joins),
    )


def lay_out_ropes(
    packer: WeightPacker, spec: DecoderSpec, context_length: int
) -> Array[RopeStruct]:
    """Lay out the RoPEs, which depend on the most tokens of a sequence; weights do not."""
    ropes = distinct_ropes(spec)
    return (RopeStruct * len(ropes))(
        *(_rope(packer, rope, Rope.of(rope, context_length, None)) for rope in ropes)
    )


def lay_out_layer(
    packer: WeightPacker, weights: LayerWeights, part: Part, index: int
) -> LayerStruct:
    """Lay out layer `index` of a rank's part."""
    spec, share = part.spec.layers[index], part.shares[index]
    struct = LayerStruct(
        cache_layer=part.spec.cache_places.get(index, 0),
        mixer_is_part=share.heads is not None,
        mlp_is_part=share.has_part_of_mlp,
    )
    if weights.mixer is not None:
        _lay_out_mixer(packer, struct, weights.mixer, part.spec, index)
    if weights.mlp is not None:
        assert spec.mlp is not None
        _lay_out_mlp(packer, struct, weights.mlp, spec.mlp)
    first = _norm(packer, weights.first_norm)
    struct.mixer_norm = first if spec.mixer is not None else NormStruct()
    struct.mixer_post_norm = _norm(packer, weights.mixer_post_norm)
    own = first if spec.mixer is None or spec.one_norm else _norm(packer, weights.mlp_norm)
    struct.mlp_norm, struct.is_parallel = own, spec.parallel
    struct.mlp_post_norm = _norm(packer, weights.mlp_post_norm)
    struct.token_input = _layer_input(packer, weights.token_input)
    struct.output_scale = weights.output_scale or 0.0
    return struct


def _lay_out_mixer(
    packer: WeightPacker,
    struct: LayerStruct,
    weights: MixerWeights,
    decoder: DecoderSpec,
    index: int,
) -> None:
    """Lay out the mixer of layer `index`; a recurrent one's tensors have places in a slot."""
    match weights, decoder.layers[index].mixer:
        case AttentionWeights() as own, AttentionSpec() as spec:
            rope = distinct_ropes(decoder).index(spec.rope)
            struct.attention = _attention(packer, own, spec, rope)
        case LatentWeights() as own, LatentAttentionSpec() as spec:
            rope = distinct_ropes(decoder).index(spec.rope)
            struct.attention = _latent_heads(packer, own, spec, rope)
            struct.latent = _latent(packer, own, spec)
        case ShortConvWeights() as own, ShortConvSpec():
            struct.short_conv = _short_conv(packer, own, decoder.state_offsets[index])
        case GatedDeltaWeights() as own, GatedDeltaSpec() as spec:
            state = decoder.state_offsets[index]
            struct.gated_delta = _gated_delta(packer, own, spec, state)
        case Mamba2Weights() as own, Mamba2Spec() as spec:
            struct.mamba2 = _mamba2(packer, own, spec, decoder.state_offsets[index])
        case _, other:
            raise AssertionError(f"{type(weights).__name__} are no weights of {other}")


def _attention(
    packer: WeightPacker,
    weights: AttentionWeights,
    spec: AttentionSpec,
    rope: int,
) -> AttentionStruct:
    parts = stack_neighbours(weights.inputs)
    return AttentionStruct(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window or 0,
        chunk=spec.chunk or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        rope=rope,
        num_qkv=len(parts),
        output_gate=OutputGateCode.HEADS if spec.head_gates else OutputGateCode(spec.output_gate),
        qkv=(LinearStruct * 4)(*(packer.linear(part.weight, part.bias) for part in parts)),
        output=packer.linear(weights.output.weight, weights.output.bias),
        query_norm=_norm(packer, weights.query_norm),
        key_norm=_norm(packer, weights.key_norm),
        value_norm=_norm(packer, weights.value_norm),
        sinks=None if weights.sinks is None else packer.floats(weights.sinks),
        only_reads=spec.kv_layer is not None,
        keys_are_values=spec.keys_are_values and spec.kv_layer is None,
        head_norms=HeadNormsCode[spec.head_norms.name],
        looks_ahead=spec.looks_ahead,
        sees_picture=spec.sees_picture,
    )


def _latent_heads(
    packer: WeightPacker, weights: LatentWeights, spec: LatentAttentionSpec, rope: int
) -> AttentionStruct:
    """Lay out the heads of latent attention with RoPE number `rope`."""
    return AttentionStruct(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        rope=rope,
        num_qkv=len(weights.inputs),
        qkv=(LinearStruct * 4)(*(packer.linear(part.weight, part.bias) for part in weights.inputs)),
        output=packer.linear(weights.output.weight, weights.output.bias),
    )


def _latent(packer: WeightPacker, weights: LatentWeights, spec: LatentAttentionSpec) -> int:
    """Lay out the latents of latent attention; return the address of their struct."""
    norm, up = weights.query_norm, weights.queries
    latent = LatentStruct(
        latent=spec.latent,
        plain_dim=spec.plain_dim,
        value_dim=spec.value_dim,
        query_norm=NormStruct() if norm is None else packer.norm(norm.weight, norm.eps),
        queries=LinearStruct() if up is None else packer.linear(up.weight, up.bias),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        keys=_heads(packer, weights.keys.mT),
        values=_heads(packer, weights.values),
    )
    return packer.structs(LatentStruct, [latent])


def _heads(packer: WeightPacker, weights: Tensor) -> int:
    """Lay out a linear per head, (num_heads, out_features, in_features)."""
    return packer.structs(LinearStruct, [packer.linear(head.contiguous()) for head in weights])


def _short_conv(packer: WeightPacker, weights: ShortConvWeights, state: tuple[int, ...]) -> int:
    """Lay out a short convolution with tensors at `state` in a slot.

    Returns:
        Address of its struct in the arena.
    """
    (inputs,) = stack_neighbours(weights.inputs)
    struct = ShortConvStruct(
        filters=_filters(packer, weights.filters, weights.bias, state[0]),
        input=packer.linear(inputs.weight, inputs.bias),
        output=packer.linear(weights.output.weight, weights.output.bias),
    )
    return packer.structs(ShortConvStruct, [struct])


def _gated_delta(
    packer: WeightPacker, weights: GatedDeltaWeights, spec: GatedDeltaSpec, state: tuple[int, ...]
) -> int:
    """Lay out Gated DeltaNet, as `_short_conv` does."""
    inputs = stack_neighbours(weights.inputs)
    tail, maps = state
    struct = GatedDeltaStruct(
        num_key_heads=spec.num_key_heads,
        num_value_heads=spec.num_value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        num_inputs=len(inputs),
        filters=_filters(packer, weights.filters, None, tail),
        inputs=(LinearStruct * 4)(*(packer.linear(part.weight, part.bias) for part in inputs)),
        output=packer.linear(weights.output.weight),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        rates=packer.floats(weights.rates),
        decay_bias=packer.floats(weights.decay_bias),
        state=maps,
    )
    return packer.structs(GatedDeltaStruct, [struct])


def _mamba2(
    packer: WeightPacker, weights: Mamba2Weights, spec: Mamba2Spec, state: tuple[int, ...]
) -> int:
    """Lay out Mamba-2, as `_short_conv` does."""
    (inputs,) = stack_neighbours(weights.inputs)
    tail, maps = state
    split = spec.split or SplitGroup(0, 0, 0)
    struct = Mamba2Struct(
        num_heads=spec.num_heads,
        num_groups=spec.num_groups,
        head_dim=spec.head_dim,
        state_dim=spec.state_dim,
        split_groups=split.count,
        split_group=split.index,
        split_width=split.width,
        filters=_filters(packer, weights.filters, weights.filter_bias, tail),
        input=packer.linear(inputs.weight, inputs.bias),
        output=packer.linear(weights.output.weight, weights.output.bias),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        step_bias=packer.floats(weights.step_bias),
        rates=packer.floats(weights.rates),
        skip=packer.floats(weights.skip),
        state=maps,
    )
    return packer.structs(Mamba2Struct, [struct])


def _filters(
    packer: WeightPacker, filters: Tensor, bias: Tensor | None, state: int
) -> FiltersStruct:
    width, taps = filters.shape
    return FiltersStruct(
        width=width,
        taps=taps,
        filters=packer.floats(filters.T),
        bias=None if bias is None else packer.floats(bias),
        state=state,
    )


def _lay_out_mlp(
    packer: WeightPacker,
    struct: LayerStruct,
    weights: MLPWeights | ExpertsWeights,
    spec: MLPSpec | ExpertsSpec,
) -> None:
    """Lay out an MLP, or experts with their shared MLP."""
    of_all: MLPWeights | None
    if isinstance(weights, ExpertsWeights):
        assert isinstance(spec, ExpertsSpec)
        struct.experts, of_all = lay_out_experts(packer, weights, spec), weights.shared
        struct.expert_gating = gating_struct(spec.activation)
        spec = spec.shared or spec
    else:
        of_all = weights
    if of_all is not None:
        linears = lay_out_mlp(packer, of_all, gated=spec.gated)
        struct.gate, struct.up, struct.down = linears
    struct.gating = gating_struct(spec.activation)


def lay_out_experts(packer: WeightPacker, weights: ExpertsWeights, spec: ExpertsSpec) -> int:
    """Lay out the experts that are here, one at a time, and their router.

    Returns:
        Address of their struct in the arena.
    """
    router = spec.router
    gate, up, down = lay_out_each(packer, weights.expert, spec)
    # Routers make choices, so their weights are never rounded.
    exact = WeightPacker(packer.engine, packer.arena, "float32")
    bias, scale, norms = weights.selection_bias, weights.expert_scale, weights.norms
    struct = ExpertsStruct(
        router=RouterStruct(
            num_experts=router.num_experts,
            top_k=router.top_k,
            scoring=_SCORINGS[router.scoring],
            renormalize=router.renormalize,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            best_of_group=router.best_of_group,
            scale=router.scale,
            epsilon=router.epsilon,
            selection_bias=None if bias is None else packer.floats(bias),
            expert_scale=None if scale is None else packer.floats(scale),
        ),
        logits=exact.linear(weights.router, weights.router_bias),
        shared_gate=LinearStruct()
        if weights.shared_gate is None
        else exact.linear(weights.shared_gate),
        first_expert=spec.experts.start,
        num_here=len(spec.experts),
        weighs_inputs=spec.weighs_inputs,
        gate=gate,
        up=up,
        down=down,
    )
    if weights.latent is not None:
        into, out_of = weights.latent
        struct.into_latent = packer.linear(into.weight, into.bias)
        struct.out_of_latent = packer.linear(out_of.weight, out_of.bias)
    if norms is not None:
        for name in ("router", "input", "shared", "output"):
            norm = getattr(norms, name)
            setattr(struct, f"{name}_norm", packer.norm(norm.weight, norm.eps))
    return packer.structs(ExpertsStruct, [struct])


def lay_out_each(
    packer: WeightPacker, expert: Callable[[int], MLPWeights], spec: ExpertsSpec
) -> tuple[int, int | None, int]:
    """Lay out the experts that are here, one at a time.

    Returns:
        Addresses of the structs of gates, ups and downs, as from `lay_out_mlp`.
    """
    linears = [lay_out_mlp(packer, expert(number), gated=spec.gated) for number in spec.experts]
    gates, ups, downs = zip(*linears, strict=True)
    return (
        packer.structs(LinearStruct, gates),
        packer.structs(LinearStruct, ups) if spec.gated else None,
        packer.structs(LinearStruct, downs),
    )


def lay_out_mlp(
    packer: WeightPacker, weights: MLPWeights, *, gated: bool
) -> tuple[LinearStruct, LinearStruct, LinearStruct]:
    """Lay out gate, up and down; without a gate, up, an empty linear and down."""
    down = packer.linear(weights.down.weight, weights.down.bias)
    if not gated:
        (up,) = weights.gate_up
        return packer.linear(up.weight, up.bias), LinearStruct(), down
    gate, up = _gate_and_up(weights.gate_up)
    return packer.linear(gate.weight, gate.bias), packer.linear(up.weight, up.bias), down


def _gate_and_up(parts: list[LinearPart]) -> tuple[LinearPart, LinearPart]:
    """Return gate and up, splitting them if the checkpoint fuses them."""
    if len(parts) == 1:
        width = parts[0].weight.shape[0] // 2
        return parts[0].rows(slice(0, width)), parts[0].rows(slice(width, None))
    gate, up = parts
    return gate, up


def gating_struct(gating: Gating) -> GatingStruct:
    if isinstance(gating, ClampedSwiGLU):
        return GatingStruct(_CLAMPED_SWIGLU, gating.limit, gating.alpha)
    if isinstance(gating, BoundedSwiGLU):
        return GatingStruct(_BOUNDED_SWIGLU, gating.limit)
    return GatingStruct(ACTIVATIONS[gating])


def _join(packer: WeightPacker, ends: EndWeights, names: JoinNames | None) -> JoinStruct:
    if ends.join is None or names is None:
        return JoinStruct()
    token_norm, hidden_norm, linear = ends.join
    return JoinStruct(
        _norm(packer, token_norm),
        _norm(packer, hidden_norm),
        LinearStruct() if linear is None else packer.linear(linear),
        names.stream_is_normed,
    )


def _layer_input(packer: WeightPacker, weights: LayerInputWeights | None) -> TokenInputStruct:
    if weights is None:
        return TokenInputStruct()
    gate, up = packer.linear(weights.gate.weight), packer.linear(weights.up.weight)
    return TokenInputStruct(gate, up, _norm(packer, weights.norm))


def _token_inputs(
    packer: WeightPacker, spec: DecoderSpec, weights: TokenInputWeights | None
) -> TokenInputsStruct:
    of_tokens = spec.token_input
    if weights is None or of_tokens is None:
        return TokenInputsStruct()
    return TokenInputsStruct(
        width=of_tokens.width,
        activation=ACTIVATIONS[of_tokens.activation],
        embedding=packer.linear(weights.embedding),
        projection=packer.linear(weights.projection.weight),
        norm=_norm(packer, weights.norm),
        embedding_scale=of_tokens.width**0.5,
        projection_scale=spec.hidden_size**-0.5,
        scale=2**-0.5,
    )


def _norm(packer: WeightPacker, norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else packer.norm(norm.weight, norm.eps, norm.bias)


def _rope(packer: WeightPacker, spec: RopeSpec, rope: Rope) -> RopeStruct:
    return RopeStruct(
        spec.rotary_dim,
        rope.amplitude,
        packer.floats(rope.frequencies),
        spec.query_beta,
        spec.original_context,
        spec.query_shift,
        axes=packer.integers(spec.axes) if spec.axes else None,
    )
