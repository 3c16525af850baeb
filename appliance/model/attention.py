"""Attention of one layer: project, rotate, write to the cache, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.backend import Backend, Linear
    from appliance.kernels.kv_cache import KVBlocks
    from appliance.model.norm import Norm
    from appliance.model.spec import AttentionSpec
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        spec: heads, scale, window, soft cap.
        rope: index into `Step.rotations`.
        qkv: hidden to query heads, key heads and value heads, in this order.
        output: query heads to hidden.
        query_norm: of each query head before RoPE; with `key_norm`, or neither.
        key_norm: of each key head before RoPE.
    """

    spec: AttentionSpec
    backend: Backend
    rope: int
    qkv: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None

    def __call__(self, hidden: Tensor, step: Step, cache: KVBlocks) -> Tensor:
        """Attend: hidden (num_tokens, hidden_size) to the same shape."""
        spec, backend = self.spec, self.backend
        num_tokens = hidden.shape[0]
        qkv = self.qkv(hidden).view(num_tokens, -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            query = self._norm_heads(rotated[:, : spec.num_heads], self.query_norm)
            key = self._norm_heads(rotated[:, spec.num_heads :], self.key_norm)
            rotated = torch.cat((query, key), dim=1)
        cos, sin = step.rotations[self.rope]
        rotated = backend.rotary(rotated, cos, sin)  # (num_tokens, num_rotated, head_dim)
        query, key = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        backend.write_kv(key, value, cache, step.batch.slot_mapping)
        attended = backend.paged_attention(
            query,
            cache,
            step.attention_work,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return self.output(attended.reshape(num_tokens, -1))

    def _norm_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        """Norm each head of (num_tokens, heads, head_dim)."""
        rows = heads.reshape(-1, heads.shape[-1])
        return self.backend.rms_norm(rows, norm.weight, norm.eps).view(heads.shape)
