"""Builds the torch decoder from a model source, layer by layer.

Each weight is laid out for the backend and released, so that peak memory is about the finished
model and one layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.model.decoder import Decoder
from appliance.model.embedding import Embedding
from appliance.model.layer_builder import LayerBuilder
from appliance.model.reader import ModelReader
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.shard.joint import PartialEmbedding, PartialHead
from appliance.model.shard.weights import WeightCutter
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from appliance.kernels.operations import Backend
    from appliance.model.host_experts import HostSide
    from appliance.model.layers import DecoderLayer
    from appliance.model.shard.joint import JoinedShard
    from appliance.model.source import ModelSource


def load_decoder(
    source: ModelSource,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
    host: HostSide | None = None,
    host_layers: Collection[int] = (),
    part: JoinedShard | None = None,
) -> Decoder:
    """Read all weights and lay them out.

    Args:
        backend: lays out the weights and later executes them.
        dtype: of activations and of unpacked weights.
        on_progress: called with a stage, the number of parts done, and their total.
        context_length: most tokens of a sequence, by default the model's own; some models rotate
            differently beyond their training context.
        host: multiplies the experts in host memory.
        host_layers: layers with experts in host memory.
        part: the rank's part of the model; None loads all of it.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        UnsupportedModelError: an unpacked weight has a type of less than 16 bits.
    """
    reader = ModelReader(source, device, dtype)
    for_host = reader.for_host()
    report = on_progress or (lambda stage, done, total: None)
    spec = source.spec if part is None else part.shard.spec
    length = spec.context_length if context_length is None else context_length
    spec = spec.for_context(length)
    cutter = None if part is None else WeightCutter(part.shard, copies=True)
    read = reader.layer if cutter is None else partial(cutter.read, reader)
    ropes = distinct_ropes(spec)
    builder = LayerBuilder(backend, dtype, spec, part)
    total = len(spec.layers) + 1
    report("weights", 0, total)
    first_norm = builder.optional(reader.first_norm(0))
    layers: list[DecoderLayer] = []
    for index, layer_spec in enumerate(spec.layers):
        next_norm = builder.optional(reader.first_norm(index + 1))
        in_host = None
        if index in host_layers:
            assert host is not None
            assert isinstance(layer_spec.mlp, ExpertsSpec)
            in_host = host.lay_out(
                partial(for_host.expert, index),
                layer_spec.mlp,
                # Of a prompt the last layer computes the rows that sample only.
                may_stream=index + 1 < len(spec.layers),
            )
        # No variable keeps a layer's weights alive while the next layer's are read.
        layers.append(builder.layer(index, read(index), layer_spec, next_norm, in_host))
        report("weights", index + 1, total)
    if host is not None:
        host.finish()
    token_inputs = builder.token_inputs(reader.token_input())
    positions = builder.positions(reader.positions())
    matrix, head_matrix = reader.embedding_and_head()
    if cutter is not None:
        matrix, head_matrix = cutter.vocabulary(matrix, head_matrix)
    embedding = Embedding.of(matrix, spec.embedding_scale, dtype, backend)
    table = embedding.table if head_matrix is matrix else None
    if head_matrix is matrix and isinstance(embedding.weight, Tensor):
        head_matrix = embedding.weight  # one copy, if the backend does not change its layout
    bias = reader.head_bias()
    if bias is not None and part is not None:
        bias = bias[part.shard.own_tokens]
    head = table or backend.prepare_linear(head_matrix, bias, dtype)
    is_shared = head is table or (isinstance(head, DenseLinear) and head.weight is embedding.weight)
    report("weights", total, total)
    return Decoder(
        spec=spec,
        backend=backend,
        dtype=dtype,
        device=device,
        embedding=embedding if part is None else PartialEmbedding(embedding, part),
        ropes=tuple(Rope.of(rope, length, device) for rope in ropes),
        first_norm=first_norm,
        layers=tuple(layers),
        token_inputs=token_inputs,
        positions=positions,
        head=head if part is None else PartialHead(head, part),
        weight_bytes=builder.nbytes + head.nbytes + (0 if is_shared else embedding.nbytes),
        weight_format=reader.weight_format(),
        num_dense=0 if cutter is None else cutter.num_dense,
        shard=None if part is None else part.shard,
    )
