"""Attention of one layer: project, rotate, write to the cache, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.kernels.kv_write.head_norms import HeadNorms
from appliance.kernels.sealed_blocks import SealedBlocks
from appliance.model.adapters.torch_slots import run_adapted

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.norm import Norm
    from appliance.model.spec import AttentionSpec
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        rope: index into `Step.rotations`.
        qkv: maps hidden to query heads, key heads, value heads and gates, in this order; without
            those that other heads or another layer provide.
        output: maps query heads to hidden.
        query_norm: of each query head before RoPE; set together with `key_norm`.
        key_norm: of each key head before RoPE.
        value_norm: of each value head; its weight is 1.
        sinks: (num_heads,) float32.
    """

    spec: AttentionSpec
    backend: Backend
    rope: int
    qkv: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None
    sinks: Tensor | None

    def __call__(
        self,
        hidden: Tensor,
        step: Step,
        cache: AnyLayerCache,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape."""
        spec, backend = self.spec, self.backend
        num_tokens = hidden.shape[0]
        qkv = run_adapted(self.qkv, hidden, adapters, AdapterPlace.INTO_MIXER)
        qkv = qkv.view(num_tokens, -1, spec.head_dim)
        gates = None
        if spec.output_gate:
            qkv, gates = qkv[:, : -spec.num_heads].contiguous(), qkv[:, -spec.num_heads :]
        cos, sin = step.rotations[self.rope]
        if spec.kv_layer is None:
            qkv = self._with_values(qkv)
            query = write_step(backend, qkv, cos, sin, cache, step.batch, self._norms())
        else:
            query = backend.rotary(self._normed(qkv, self.query_norm), cos, sin)
        factor = step.query_scales[self.rope]
        if factor is not None:
            query = query * factor.view(-1, 1, 1).to(query.dtype)
        attended = backend.paged_attention(
            query,
            cache,
            step.attention_work,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
        )
        if gates is not None:
            attended = attended * gates.float().sigmoid().to(attended.dtype)
        attended = attended.reshape(num_tokens, -1)
        return run_adapted(self.output, attended, adapters, AdapterPlace.OUT_OF_MIXER)

    def _with_values(self, qkv: Tensor) -> Tensor:
        """Append or norm the value heads."""
        spec = self.spec
        if not spec.keys_are_values and self.value_norm is None:
            return qkv
        before_values = spec.num_heads + spec.num_kv_heads
        values = qkv[:, -spec.num_kv_heads :]
        return torch.cat((qkv[:, :before_values], self._normed(values, self.value_norm)), dim=1)

    def _normed(self, heads: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return heads
        rows = heads.reshape(-1, self.spec.head_dim)
        return norm.of(rows, self.backend).view(heads.shape)

    def _norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        assert self.query_norm.eps == self.key_norm.eps
        return HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)


def write_step(
    backend: Backend,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: AnyLayerCache,
    batch: RaggedBatch,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Write a step's keys and values to the cache and seal the blocks they fill.

    Arguments as for `kv_write.reference.rotate_and_write_with`; returns the queries.
    """
    if not isinstance(cache, SealedBlocks):
        return backend.rotate_and_write(qkv, cos, sin, cache, batch.slot_mapping, norms)
    spans = batch.sealed
    assert spans is not None
    assert spans.slot_mapping is not None
    query = backend.rotate_and_write(qkv, cos, sin, cache.open, spans.slot_mapping, norms)
    if spans.moves is not None and len(spans.moves):
        backend.seal_kv(cache, spans.moves)
    return query
