"""Multi-head latent attention as a layer's mixer; it never builds per-head keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.sealed_blocks import SealedBlocks

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.operations import Backend, Linear
    from appliance.model.norm import Norm
    from appliance.model.spec import LatentAttentionSpec
    from appliance.model.step import Step


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
