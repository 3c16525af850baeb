"""Builds decoder steps of whole rows of text and keeps one of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.state_spans import StateSpans
from appliance.model.rope import Rope, distinct_ropes
from appliance.model.step import Step

if TYPE_CHECKING:
    from appliance.kernels.operations import Backend
    from appliance.model.spec import DecoderSpec

BLOCK_SIZE = 32  # supported by every backend and every KV format


class RowSteps:
    """Builds steps of rows of one length, from their first token on.

    Attributes:
        row_blocks: cache blocks per row; a step's blocks begin with block 0.

    Raises:
        UnsupportedModelError: a layer needs more than the stream and its own cache.
    """

    def __init__(
        self, spec: DecoderSpec, row_tokens: int, backend: Backend, device: torch.device
    ) -> None:
        if not spec.goes_layer_by_layer:
            raise UnsupportedModelError(
                f"a model like {spec.architecture} with embeddings of each layer or of positions, "
                "or with layers that read the keys and values of others, is not measured layer by "
                "layer"
            )
        self.row_blocks = -(-row_tokens // BLOCK_SIZE)
        self._row_tokens = row_tokens
        self._is_recurrent = spec.state_bytes > 0
        self._backend = backend
        self._device = device
        self._chunks = spec.chunks
        self._ropes = tuple(Rope.of(kind, row_tokens, device) for kind in distinct_ropes(spec))
        self._steps: dict[tuple[int, bool], Step] = {}

    def step(self, count: int, *, is_sealed: bool = False) -> Step:
        """Return a step of `count` rows; in a sealed cache each row has an open block."""
        key = count, is_sealed
        if key not in self._steps:
            self._steps[key] = self._make(count, is_sealed=is_sealed)
        return self._steps[key]

    def _make(self, count: int, *, is_sealed: bool) -> Step:
        length, width = self._row_tokens, self.row_blocks
        tables = [tuple(range(i * width, (i + 1) * width)) for i in range(count)]
        batch = RaggedBatch.of(
            [length] * count,
            [length] * count,
            tables,
            block_size=BLOCK_SIZE,
            device=self._device,
            open_blocks=tables if is_sealed else None,
            state_slots=range(count) if self._is_recurrent else None,
        )
        positions = torch.arange(length, device=self._device).repeat(count)
        return Step(
            batch=batch,
            attention_work=self._backend.plan_attention(batch, BLOCK_SIZE),
            chunked_work={
                chunk: self._backend.plan_attention(
                    batch.within_chunks(chunk, BLOCK_SIZE), BLOCK_SIZE
                )
                for chunk in self._chunks
            },
            rotations=tuple(rope.rotation(positions) for rope in self._ropes),
            query_scales=tuple(rope.query_scale(positions) for rope in self._ropes),
            spans=StateSpans.of(batch) if self._is_recurrent else None,
        )
