"""Lays out a model source for the CPU library, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.parts import LibraryLinear
from appliance.kernels.cpu.structs import (
    AttentionStruct,
    HeadNormsCode,
    JoinStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
    OutputGateCode,
    RopeStruct,
    TokenInputsStruct,
    TokenInputStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.checked import load_checked
from appliance.model.layer_weights import AttentionWeights, ExpertsWeights, LatentWeights
from appliance.model.linear import stack_neighbours
from appliance.model.native import NativeDecoder
from appliance.model.native_latent import lay_out_latent
from appliance.model.native_mlp import (
    ACTIVATIONS,
    gating_struct,
    lay_out_experts,
    lay_out_mlp,
)
from appliance.model.native_recurrent import lay_out_recurrent
from appliance.model.reader import ModelReader
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.shard.shard import WHOLE_LAYER, Part
from appliance.model.shard.stage import Stage
from appliance.model.shard.weights import WeightCutter
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.layer_weights import (
        LayerInputWeights,
        LayerWeights,
        MLPWeights,
        TokenInputWeights,
    )
    from appliance.model.names import JoinNames
    from appliance.model.norm import Norm
    from appliance.model.shard.shard import LayerShare, Shard
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec, MLPSpec, RopeSpec


def load_native(
    source: ModelSource,
    engine: NativeEngine,
    dtype: Any,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
    part: Part | None = None,
    target: NativeDecoder | None = None,
    shared: Collection[Role] = (),
    join: JoinNames | None = None,
) -> NativeDecoder:
    """Read all weights and lay them out.

    Args:
        source: a model for which `why_unsupported` returns None.
        engine: lays out the weights and later executes them.
        dtype: of unpacked weights.
        on_progress: called with a stage, the number of parts done, and their total.
        context_length: most tokens of a sequence; by default the model's own.
        part: a rank's part of the model; None is all of it.
        target: the model that a head drafts for; it must outlive the result.
        shared: matrices that such a head shares with it, embedding or output matrix.
        join: names of the parts that join such a head's embedding and hidden state.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        MemoryError: the system has too little memory for the weights.
    """
    spec = source.spec if part is None else part.spec
    shard, stage = _kind_of(part)
    first_layer = 0 if stage is None else stage.layers[0]
    cutter = None if shard is None else WeightCutter(shard)
    report = on_progress or (lambda stage, done, total: None)
    reader = ModelReader(source, None, dtype, native=True)
    arena = Arena()
    packer = WeightPacker(engine, arena, dtype)
    ropes = distinct_ropes(spec)
    total = len(spec.layers) + 1
    report("weights", 0, total)
    layers = (LayerStruct * len(spec.layers))()
    for index in range(len(spec.layers)):
        weights = reader.layer(first_layer + index)
        if cutter is not None:
            weights = cutter.layer(weights, index)
        share = WHOLE_LAYER if shard is None else shard.layers[index]
        layers[index] = _layer(packer, weights, spec, index, ropes, share)
        report("weights", index + 1, total)
    if stage is not None:
        embedding, head = _ends(packer, reader, stage)
    elif target is None or Role.EMBEDDING not in shared:
        matrix, head_matrix = reader.embedding_and_head()
        if cutter is not None:
            matrix, head_matrix = cutter.vocabulary(matrix, head_matrix)
        embedding = packer.linear(matrix)
        bias = reader.head_bias()
        if bias is not None and shard is not None:
            bias = bias[shard.own_tokens]
        head = embedding if head_matrix is matrix else packer.linear(head_matrix, bias)
    else:
        embedding, head = target.model.embedding, target.model.head
        if Role.HEAD not in shared:
            head = packer.linear(load_checked(source, f"{source.family.names.head}.weight", None))
    length = spec.context_length if context_length is None else context_length
    is_first, is_last = stage is None or stage.is_first, stage is None or stage.is_last
    positions = reader.positions() if is_first else None
    model = ModelStruct(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_layers=len(spec.layers),
        num_ropes=len(ropes),
        layers=layers,
        ropes=(RopeStruct * len(ropes))(
            *(_rope(packer, rope, Rope.of(rope, length, None)) for rope in ropes)
        ),
        final_norm=_norm(packer, reader.first_norm(len(source.spec.layers)) if is_last else None),
        embedding=embedding,
        head=head,
        embedding_scale=spec.embedding_scale if is_first else 1.0,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap or 0.0,
        token_inputs=_token_inputs(packer, spec, reader.token_input()),
        positions=LinearStruct() if positions is None else packer.linear(positions),
        first_tokens=None if shard is None else packer.integers(shard.tokens),
        first_token=0 if shard is None else shard.own_tokens.start,
        widest_vocab=0 if shard is None else shard.widest_tokens,
        norms_replace=spec.norms_replace,
        join=_join(packer, reader, join),
    )
    report("weights", total, total)
    return NativeDecoder(
        spec=spec,
        dtype=dtype,
        engine=engine,
        model=model,
        arena=arena,
        weight_format=reader.weight_format(),
        part=part,
        num_dense=0 if cutter is None else cutter.num_dense,
    )


def _kind_of(part: Part | None) -> tuple[Shard | None, Stage | None]:
    """Return a part as a share of each layer, or as a run of layers."""
    if part is None:
        return None, None
    return (None, part) if isinstance(part, Stage) else (part, None)


def _ends(
    packer: WeightPacker, reader: ModelReader, stage: Stage
) -> tuple[LinearStruct, LinearStruct]:
    """Lay out what a stage has of embedding and head; it reads both to tell the head's format."""
    if not (stage.is_first or stage.is_last):
        return LinearStruct(), LinearStruct()
    matrix, head = reader.embedding_and_head()
    return (
        packer.linear(matrix) if stage.is_first else LinearStruct(),
        packer.linear(head, reader.head_bias()) if stage.is_last else LinearStruct(),
    )


def _join(packer: WeightPacker, reader: ModelReader, names: JoinNames | None) -> JoinStruct:
    if names is None:
        return JoinStruct()
    token_norm, hidden_norm, linear = reader.join(names)
    return JoinStruct(
        _norm(packer, token_norm),
        _norm(packer, hidden_norm),
        LinearStruct() if linear is None else packer.linear(linear),
        names.stream_is_normed,
    )


def load_linear(source: ModelSource, name: str, engine: NativeEngine, dtype: Any) -> LibraryLinear:
    """Lay out one linear without a bias, by its full name without `.weight`.

    Raises:
        CheckpointError: it holds NaN or infinity.
        MemoryError: the system has too little memory for it.
    """
    packer = WeightPacker(engine, Arena(), dtype)
    linear = packer.linear(load_checked(source, f"{name}.weight", None))
    return LibraryLinear(engine, linear, packer.arena)


def _layer(
    packer: WeightPacker,
    weights: LayerWeights,
    decoder: DecoderSpec,
    index: int,
    ropes: tuple[RopeSpec, ...],
    share: LayerShare,
) -> LayerStruct:
    spec = decoder.layers[index]
    struct = LayerStruct(
        cache_layer=decoder.cache_places.get(index, 0),
        mixer_is_part=share.heads is not None,
        mlp_is_part=share.has_part_of_mlp,
    )
    if isinstance(spec.mixer, AttentionSpec):
        assert isinstance(weights.mixer, AttentionWeights)
        struct.attention = _attention(packer, weights.mixer, spec.mixer, ropes)
    elif isinstance(spec.mixer, LatentAttentionSpec):
        assert isinstance(weights.mixer, LatentWeights)
        rope = ropes.index(spec.mixer.rope)
        lay_out_latent(packer, struct, weights.mixer, spec.mixer, rope)
    elif spec.mixer is not None:
        assert weights.mixer is not None
        lay_out_recurrent(packer, struct, weights.mixer, spec.mixer, decoder.state_offsets[index])
    if spec.mlp is not None:
        assert weights.mlp is not None
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


def _attention(
    packer: WeightPacker,
    weights: AttentionWeights,
    spec: AttentionSpec,
    ropes: tuple[RopeSpec, ...],
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
        rope=ropes.index(spec.rope),
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
    )
