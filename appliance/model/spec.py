"""A decoder as plain frozen data: its arithmetic layer by layer, without implementation.

Two executors read it: the torch decoder and the CPU library. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.kernels.activation import Activation


class RopeScaling(Enum):
    """Method that stretches rotary frequencies beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, halves convention: element i pairs with i + rotary_dim / 2."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0  # LLAMA3
    original_context: int = 0  # LLAMA3, LONGROPE, YARN
    short_factors: tuple[float, ...] = ()  # LONGROPE, rotary_dim / 2 values
    long_factors: tuple[float, ...] = ()  # LONGROPE
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    truncate: bool = True  # YARN: the blended range begins and ends at whole dimensions


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k
    rope: RopeSpec
    window: int | None = None  # a query sees this many latest positions, its own included
    softcap: float | None = None  # a query sees this many latest positions, including its own
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None  # per head, before RoPE


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """Gated MLP of one layer."""

    intermediate_size: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += attn(norm(x)); x += mlp(norm(x)), with optional norms after each."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    post_norms: bool = False  # Gemma: norm the output of attention and MLP before adding


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder-only model."""

    architecture: str  # family name, for people
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_head: bool
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
