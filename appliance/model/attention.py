"""Attention of one layer: project, rotate, write to the cache, attend, project back.

Latent attention never builds keys and values of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.kernels.operations import HeadNorms
from appliance.model.adapters.torch_slots import run_adapted
from appliance.model.spec import HeadNormKind

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.norm import Norm
    from appliance.model.spec import AttentionSpec, LatentAttentionSpec
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        rope: index into `Step.rotations`.
        qkv: maps hidden to query heads, key heads, value heads and gates, of their elements or of
            whole heads, in this order; without those that other heads or another layer provide.
        output: maps query heads to hidden.
        query_norm: of query heads, as `spec.head_norms` says; set together with `key_norm`.
        key_norm: of key heads.
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
        gates = None
        if spec.head_gates:
            qkv, gates = qkv[:, : -spec.num_heads].contiguous(), qkv[:, -spec.num_heads :, None]
        qkv = qkv.view(num_tokens, -1, spec.head_dim)
        if spec.output_gate:
            qkv, gates = qkv[:, : -spec.num_heads].contiguous(), qkv[:, -spec.num_heads :]
        cos, sin = step.rotations[self.rope]
        if spec.kv_layer is None:
            qkv = self._with_values(qkv)
            if spec.head_norms is HeadNormKind.ROTATED:
                qkv, cos, sin = self._rotated(qkv, cos, sin), cos[:, :0], sin[:, :0]
            elif spec.head_norms is HeadNormKind.ALL:
                qkv = self._normed_at_once(qkv)
            query = write_step(backend, qkv, cos, sin, cache, step.batch, self._norms())
        else:
            assert spec.head_norms is HeadNormKind.EACH, "a layer that reads another's keys"
            query = backend.rotary(self._normed(qkv, self.query_norm), cos, sin)
        factor = step.query_scales[self.rope]
        if factor is not None:
            query = query * factor.view(-1, 1, 1).to(query.dtype)
        attended = backend.paged_attention(
            query,
            cache,
            step.attention_work if spec.chunk is None else step.chunked_work[spec.chunk],
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

    def _normed_at_once(self, qkv: Tensor) -> Tensor:
        """Norm all queries of a token as one vector, and all its keys."""
        assert self.query_norm is not None
        assert self.key_norm is not None
        queries, keys, values = self._split(qkv)
        normed = [
            norm.of(heads.reshape(heads.shape[0], -1), self.backend).view(heads.shape)
            for heads, norm in ((queries, self.query_norm), (keys, self.key_norm))
        ]
        return torch.cat((*normed, values), dim=1)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries and keys, then norm them."""
        queries, keys, values = self._split(qkv)
        turned = [self.backend.rotary(heads.contiguous(), cos, sin) for heads in (queries, keys)]
        norms = (self.query_norm, self.key_norm)
        normed = [self._normed(heads, norm) for heads, norm in zip(turned, norms, strict=True)]
        return torch.cat((*normed, values), dim=1)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        queries, keys, values = qkv.split(counts, dim=1)
        return queries, keys, values

    def _normed(self, heads: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return heads
        rows = heads.reshape(-1, self.spec.head_dim)
        return norm.of(rows, self.backend).view(heads.shape)

    def _norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        if self.spec.head_norms is not HeadNormKind.EACH:
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


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention in the latent space; see `LatentAttentionSpec`.

    Attributes:
        rope: index into `Step.rotations`.
        inputs: maps hidden to queries or their latents, then to the cached token.
        queries: maps query latents to query heads; set together with `query_norm`.
        norm: of latents.
        keys: (num_heads, plain_dim, latent), map queries into the latent space.
        values: (num_heads, value_dim, latent), map attended latents to values.
        output: maps the heads' values to hidden.
    """

    spec: LatentAttentionSpec
    backend: Backend
    rope: int
    inputs: Linear
    queries: Linear | None
    query_norm: Norm | None
    norm: Norm
    keys: Tensor
    values: Tensor
    output: Linear

    def __call__(self, hidden: Tensor, step: Step, cache: AnyLayerCache) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape."""
        spec = self.spec
        found = self.inputs(hidden)
        queries, tokens = found[:, : -spec.width].contiguous(), found[:, -spec.width :]
        self._write(tokens, step, cache)
        if self.queries is not None and self.query_norm is not None:
            queries = self.queries(self._normed(queries, self.query_norm))
        heads = queries.unflatten(-1, (spec.num_heads, spec.query_dim))
        plain, turning = heads.split([spec.plain_dim, spec.rope_dim], dim=-1)
        plain = torch.einsum("nhd,hdl->nhl", plain, self.keys.to(plain.dtype))
        query = torch.cat((plain, self._rotated(turning, step)), dim=-1)
        factor = step.query_scales[self.rope]
        if factor is not None:
            query = query * factor.view(-1, 1, 1).to(query.dtype)
        attended = self.backend.latent_attention(
            query, cache, step.attention_work, scale=spec.scale, latent=spec.latent
        )
        values = torch.einsum("nhl,hvl->nhv", attended, self.values.to(attended.dtype))
        return self.output(values.flatten(1))

    def _write(self, tokens: Tensor, step: Step, cache: AnyLayerCache) -> None:
        """Write tokens (num_tokens, width) to the cache."""
        spec = self.spec
        latents, turning = tokens.split([spec.latent, spec.rope_dim], dim=-1)
        rotated = self._rotated(turning.unsqueeze(1), step).squeeze(1)
        kept = torch.cat((self._normed(latents.contiguous(), self.norm), rotated), dim=-1)
        first, second = kept.unsqueeze(1).chunk(2, dim=-1)
        assert not isinstance(cache, SealedBlocks), "refused before"
        slots = step.batch.slot_mapping
        self.backend.write_kv(first.contiguous(), second.contiguous(), cache, slots)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return norm.of(x, self.backend)

    def _rotated(self, heads: Tensor, step: Step) -> Tensor:
        cos, sin = step.rotations[self.rope]
        return self.backend.rotary(heads.contiguous(), cos, sin)
