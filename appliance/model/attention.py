"""Attention of one layer: project, rotate, write to the cache, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.kernels.kv_write.head_norms import HeadNorms
from appliance.kernels.sealed_pages import SealedPages

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.backend import Backend, Linear
    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.norm import Norm
    from appliance.model.spec import AttentionSpec
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        spec: heads, scale, window, soft cap.
        rope: index into `Step.rotations`.
        qkv: maps hidden to query heads, key heads and value heads, in this order.
        output: maps query heads to hidden.
        query_norm: of each query head before RoPE; set together with `key_norm`.
        key_norm: of each key head before RoPE.
    """

    spec: AttentionSpec
    backend: Backend
    rope: int
    qkv: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None

    def __call__(self, hidden: Tensor, step: Step, cache: AnyLayerCache) -> Tensor:
        """Attend: hidden (num_tokens, hidden_size) to the same shape."""
        spec, backend = self.spec, self.backend
        num_tokens = hidden.shape[0]
        qkv = self.qkv(hidden).view(num_tokens, -1, spec.head_dim)
        cos, sin = step.rotations[self.rope]
        query = write_step(backend, qkv, cos, sin, cache, step.batch, self._norms())
        attended = backend.paged_attention(
            query,
            cache,
            step.attention_work,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return self.output(attended.reshape(num_tokens, -1))

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
    """Write a step's keys and values to the cache, and seal the blocks they fill.

    The arguments are those of `kv_write.reference.rotate_and_write_with`; returns the queries.
    """
    if not isinstance(cache, SealedPages):
        return backend.rotate_and_write(qkv, cos, sin, cache, batch.slot_mapping, norms)
    spans = batch.sealed
    assert spans is not None
    assert spans.slot_mapping is not None
    query = backend.rotate_and_write(qkv, cos, sin, cache.open, spans.slot_mapping, norms)
    if spans.moves is not None and len(spans.moves):
        backend.seal_kv(cache, spans.moves)
    return query
