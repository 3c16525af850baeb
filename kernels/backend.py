"""Which implementation of each operation runs where: one frozen table of functions per backend.

Every entry has a torch reference that is slow and obviously right; the other tables replace
entries of it. Choosing is explicit, by device, and never falls back in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from appliance.kernels.activation import Activation
from appliance.kernels.kv_cache import KVBlocks
from appliance.kernels.packed import PackedWeight
from appliance.kernels.ragged import RaggedBatch


class Linear(Protocol):
    """A weight laid out for one backend: x (num_tokens, in) -> (num_tokens, out), dtype of x."""

    in_features: int
    out_features: int
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class PagedAttention(Protocol):
    """Attention of every row over its own sequence's blocks."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, head_dim)
        cache: KVBlocks,  # this step's keys and values are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...  # (num_tokens, num_heads, head_dim), dtype of query


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations a decoder step is made of."""

    name: str
    # weight (out, in) dense or packed, bias (out,) or None, activation dtype -> Linear
    prepare_linear: Callable[[Tensor | PackedWeight, Tensor | None, torch.dtype], Linear]
    # x (num_tokens, dim), weight (dim,) float32, eps -> (num_tokens, dim)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x, residual, weight, eps -> (rms_norm(x + residual), x + residual)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # x (num_tokens, heads, head_dim), cos and sin (num_tokens, rotary_dim / 2) float32 -> like x
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    # gate and up side by side (num_tokens, 2 * intermediate) -> (num_tokens, intermediate)
    gated_activation: Callable[[Tensor, Activation], Tensor]
    # key, value (num_tokens, num_kv_heads, head_dim), cache, slot_mapping (num_tokens,)
    write_kv: Callable[[Tensor, Tensor, KVBlocks, Tensor], None]
    # once per step, shared by all layers; the second argument is the block size
    plan_attention: Callable[[RaggedBatch, int], object]
    paged_attention: PagedAttention
