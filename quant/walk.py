"""Runs calibration rows through a model with one layer in memory, the rest of it on the disk.

What flows from layer to layer, the residual stream of all rows, lies in a memory-mapped file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.backend import select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.ragged import RaggedBatch
from appliance.model.embedding import Embedding
from appliance.model.loader import LayerBuilder
from appliance.model.reader import ModelReader
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.step import Step
from appliance.quant.block import Block, Moments, dense_parts, observing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.kv_cache import LayerCache
    from appliance.model.source import ModelSource
    from appliance.quant.block import ObservedLinear
    from appliance.quant.kv import AttentionWatch

BLOCK_SIZE = 32  # which every backend has
TOKENS_AT_ONCE = 4096
FLOAT = torch.float32


class Walk:
    """Calibration rows on their way through a model.

    Args:
        source: an opened model.
        rows: (num_rows, row_tokens) int64.
        stream: file for the residual stream, 4 bytes for each token and hidden element; made here.
        device: where layers compute.
        watch: sees every layer's attention, for `kv`.
    """

    def __init__(
        self,
        source: ModelSource,
        rows: Tensor,
        stream: Path,
        device: torch.device,
        watch: AttentionWatch | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._num_rows, self._row_tokens = rows.shape
        self._backend = observing(select_backend(device))
        if watch is not None:
            self._backend = watch.on(self._backend)
        self._reader = ModelReader(source, device, FLOAT)
        kinds = distinct_ropes(source.spec)
        self._builder = LayerBuilder(self._backend, FLOAT, kinds)
        self._ropes = tuple(Rope.of(kind, self._row_tokens, device) for kind in kinds)
        width = source.spec.hidden_size
        size = rows.numel() * width
        stream.touch()
        self._stream = torch.from_file(str(stream), shared=True, size=size, dtype=FLOAT)
        self._stream = self._stream.view(self._num_rows, self._row_tokens, width)
        matrix, _ = self._reader.embedding_and_head()
        embedding = Embedding.of(matrix, source.spec.embedding_scale, FLOAT)
        for index, row in enumerate(rows):
            self._stream[index] = embedding(row.to(device)).cpu()

    def block(self, index: int) -> Block:
        """Read a layer, in float32."""
        weights = dense_parts(self._reader.layer(index))
        norm = weights.attention_norm
        return Block(self._builder.layer(weights, self._source.spec.layers[index], norm), norm)

    def observe(self, block: Block, linears: list[ObservedLinear]) -> list[Moments]:
        """Show all rows to a layer; returns what some of its linears saw."""
        moments = [Moments(linear.in_features, self._device) for linear in linears]
        for linear, seen in zip(linears, moments, strict=True):
            linear.moments = seen
        for _ in self._run(block):
            pass
        for linear in linears:
            linear.moments = None
        return moments

    def advance(self, block: Block) -> None:
        """Put all rows through a layer as it is now; the next one sees what comes out."""
        for rows, after in self._run(block):
            self._stream[rows] = after.view(-1, *self._stream.shape[1:]).cpu()

    def energy(self) -> Tensor:
        """Means of squares of the stream as it is now: (num_rows, row_tokens)."""
        return torch.stack([row.square().mean(-1) for row in self._stream])

    def _run(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and the stream after the layer, some rows at a time."""
        at_once = max(1, TOKENS_AT_ONCE // self._row_tokens)
        norm = block.attention_norm
        for start in range(0, self._num_rows, at_once):
            rows = slice(start, min(start + at_once, self._num_rows))
            stream = self._stream[rows].flatten(0, 1).to(self._device)
            hidden = self._backend.rms_norm(stream, norm.weight, norm.eps)
            step, cache = self._step(rows.stop - rows.start, block)
            _, after = block.layer(hidden, stream, step, cache, None)
            yield rows, after

    def _step(self, count: int, block: Block) -> tuple[Step, LayerCache]:
        """A step of whole rows, and blocks for one layer of them."""
        length, attention = self._row_tokens, block.layer.attention.spec
        width = -(-length // BLOCK_SIZE)
        tables = [tuple(range(i * width, (i + 1) * width)) for i in range(count)]
        batch = RaggedBatch.of(
            [length] * count, [length] * count, tables, block_size=BLOCK_SIZE, device=self._device
        )
        positions = torch.arange(length, device=self._device).repeat(count)
        step = Step(
            batch=batch,
            attention_work=self._backend.plan_attention(batch, BLOCK_SIZE),
            rotations=tuple(rope.rotation(positions) for rope in self._ropes),
        )
        cache = self._backend.allocate_cache(
            KVFormat.FP32,
            num_blocks=count * width,
            block_size=BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            device=self._device,
        )
        return step, cache
