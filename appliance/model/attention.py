"""Attention of one layer: project, rotate, write to the cache, attend, project back.

Latent attention never builds keys and values of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.kernels.head_norms import HeadNorms
from appliance.model.adapters.torch_slots import run_adapted

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
            qkv, gates = qkv[:, : -spec.num_heads], qkv[:, -spec.num_heads :, None]
        qkv = qkv.view(num_tokens, -1, spec.head_dim)
        if spec.output_gate:
            qkv, gates = qkv[:, : -spec.num_heads], qkv[:, -spec.num_heads :]
        query = write_step(
            backend,
            qkv,
            *step.rotations[self.rope],
            cache,
            None if spec.kv_layer is not None else step.batch,
            self._norms(),
            step.query_scales[self.rope],
            keys_are_values=spec.keys_are_values,
        )
        attended = backend.paged_attention(
            query,
            cache,
            step.attention_work if spec.chunk is None else step.chunked_work[spec.chunk],
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
            sees=step.batch.sees if spec.sees_picture else None,
        )
        if gates is not None:
            attended = backend.gate_heads(attended, gates)
        attended = attended.reshape(num_tokens, -1)
        return run_adapted(self.output, attended, adapters, AdapterPlace.OUT_OF_MIXER)

    def _norms(self) -> HeadNorms | None:
        query, key, value = self.query_norm, self.key_norm, self.value_norm
        if query is None:
            assert value is None, "values are normed where queries are"
            return None
        assert key is None or query.eps == key.eps
        return HeadNorms(
            query.weight,
            None if key is None else key.weight,
            query.eps,
            self.spec.head_norms,
            None if value is None else value.eps,
        )


def write_step(
    backend: Backend,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: AnyLayerCache,
    batch: RaggedBatch | None,
    norms: HeadNorms | None = None,
    query_scale: Tensor | None = None,
    *,
    keys_are_values: bool = False,
) -> Tensor:
    """Write a step's keys and values to the cache and seal the blocks they fill.

    Arguments as for `kv_write.reference.rotate_and_write_with`; returns the queries. Without a
    batch, qkv are the queries alone of a layer that reads what another has written.
    """
    written = cache.open if isinstance(cache, SealedBlocks) else cache
    slots, spans = None if batch is None else batch.slot_mapping, None
    if isinstance(cache, SealedBlocks) and batch is not None:
        spans = batch.sealed
        assert spans is not None
        assert spans.slot_mapping is not None
        slots = spans.slot_mapping
    query = backend.rotate_and_write(
        qkv, cos, sin, written, slots, norms, query_scale, keys_are_values=keys_are_values
    )
    if spans is not None and spans.moves is not None and len(spans.moves):
        assert isinstance(cache, SealedBlocks)
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
        spec, backend = self.spec, self.backend
        cos, sin = step.rotations[self.rope]
        found = self.inputs(hidden)
        queries = backend.write_latents(
            found, cos, sin, cache, step.batch.slot_mapping, self.norm, self.query_norm
        )
        if self.queries is None:
            queries = found[:, : -spec.width]
        else:
            assert queries is not None
            queries = self.queries(queries)
        values = backend.latent_attention(
            queries.view(len(hidden), spec.num_heads, spec.query_dim),
            cos,
            sin,
            cache,
            step.attention_work,
            keys=self.keys,
            values=self.values,
            scale=spec.scale,
            query_scale=step.query_scales[self.rope],
        )
        return self.output(values.flatten(1))
