"""Lays a model source out for the CPU library, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.activation import Activation
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.structs import (
    AttentionStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
    RopeStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.linear import stack_neighbours
from appliance.model.native import CPU, NativeDecoder
from appliance.model.reader import ModelReader
from appliance.model.rope import Rope, distinct_ropes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm
    from appliance.model.reader import LayerWeights
    from appliance.model.source import ModelSource
    from appliance.model.spec import AttentionSpec, LayerSpec, RopeSpec

_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}
HEAD_WIDTH_STEP = 16  # the library's vectors
MOST_HEAD_WIDTH = 256


def why_unsupported(source: ModelSource) -> str | None:
    """Say why the CPU library does not cover a model; None if it does."""
    for index, layer in enumerate(source.spec.layers):
        width = layer.attention.head_dim
        if width % HEAD_WIDTH_STEP or width > MOST_HEAD_WIDTH:
            return (
                f"layer {index} has heads of {width} elements; the CPU library covers multiples "
                f"of {HEAD_WIDTH_STEP} up to {MOST_HEAD_WIDTH}"
            )
    return None


def load_native(
    source: ModelSource,
    engine: NativeEngine,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
) -> NativeDecoder:
    """Read all weights and lay them out.

    Args:
        source: an opened and checked model for which `why_unsupported` returns None.
        engine: lays out the weights and later executes them.
        dtype: of weights that are not packed.
        on_progress: called with a stage, the number of parts done, and their total.
        context_length: most tokens of a sequence; the model's own by default.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        MemoryError: the system has too little memory for the weights.
    """
    spec = source.spec
    report = on_progress or (lambda stage, done, total: None)
    reader = ModelReader(source, CPU, dtype)
    arena = Arena()
    packer = WeightPacker(engine, arena, dtype)
    ropes = distinct_ropes(spec)
    total = len(spec.layers) + 1
    report("weights", 0, total)
    layers = (LayerStruct * len(spec.layers))()
    for index, layer_spec in enumerate(spec.layers):
        layers[index] = _layer(packer, reader.layer(index), layer_spec, ropes)
        report("weights", index + 1, total)
    matrix, head_matrix = reader.embedding_and_head()
    embedding = packer.linear(matrix)
    head = embedding if head_matrix is matrix else packer.linear(head_matrix)
    length = spec.context_length if context_length is None else context_length
    model = ModelStruct(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_layers=len(spec.layers),
        num_ropes=len(ropes),
        layers=layers,
        ropes=(RopeStruct * len(ropes))(
            *(_rope(packer, rope, Rope.of(rope, length, CPU)) for rope in ropes)
        ),
        final_norm=_norm(packer, reader.first_norm(len(spec.layers))),
        embedding=embedding,
        head=head,
        embedding_scale=spec.embedding_scale,
        logit_softcap=spec.logit_softcap or 0.0,
    )
    report("weights", total, total)
    return NativeDecoder(
        spec=spec,
        dtype=dtype,
        engine=engine,
        model=model,
        arena=arena,
        weight_format=reader.weight_format(),
    )


def _layer(
    packer: WeightPacker, weights: LayerWeights, spec: LayerSpec, ropes: tuple[RopeSpec, ...]
) -> LayerStruct:
    gate, up = _gate_and_up(weights.gate_up, spec.mlp.intermediate_size)
    return LayerStruct(
        attention=_attention(packer, weights, spec.attention, ropes),
        gate=packer.linear(gate.weight, gate.bias),
        up=packer.linear(up.weight, up.bias),
        down=packer.linear(weights.down.weight, weights.down.bias),
        activation=_ACTIVATIONS[spec.mlp.activation],
        attention_norm=_norm(packer, weights.attention_norm),
        attention_post_norm=_norm(packer, weights.attention_post_norm),
        mlp_norm=_norm(packer, weights.mlp_norm),
        mlp_post_norm=_norm(packer, weights.mlp_post_norm),
    )


def _attention(
    packer: WeightPacker, weights: LayerWeights, spec: AttentionSpec, ropes: tuple[RopeSpec, ...]
) -> AttentionStruct:
    parts = stack_neighbours(weights.qkv)
    return AttentionStruct(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        rope=ropes.index(spec.rope),
        num_qkv=len(parts),
        qkv=(LinearStruct * 3)(*(packer.linear(part.weight, part.bias) for part in parts)),
        output=packer.linear(weights.output.weight, weights.output.bias),
        query_norm=_norm(packer, weights.query_norm),
        key_norm=_norm(packer, weights.key_norm),
    )


def _gate_and_up(parts: list[LinearPart], width: int) -> tuple[LinearPart, LinearPart]:
    """Return gate and up, which some checkpoints hold in one weight."""
    if len(parts) == 1:
        return parts[0].rows(slice(0, width)), parts[0].rows(slice(width, None))
    gate, up = parts
    return gate, up


def _norm(packer: WeightPacker, norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else packer.norm(norm.weight, norm.eps)


def _rope(packer: WeightPacker, spec: RopeSpec, rope: Rope) -> RopeStruct:
    frequencies = packer.floats(rope.frequencies)
    return RopeStruct(spec.rotary_dim, rope.amplitude, frequencies)
