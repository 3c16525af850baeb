"""Computes rotary frequencies of every scaling kind, and a step's cosines and sines.

Sources: linear (position interpolation, arXiv 2306.15595), YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753), Llama 3.1 (its reference code). Proportional scaling rotates only a head's first pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.model.spec import AxisFrequencies, CachedSpec, RopeScaling

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]

    from appliance.model.spec import DecoderSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Rope:
    """One kind of rotary embedding, shared by all layers that use it."""

    frequencies: Tensor  # (rotary_dim / 2,) float32, radians per position
    amplitude: float  # multiplies cosine and sine
    query_beta: float = 0.0  # see `RopeSpec`
    original_context: int = 0
    query_shift: int = 0
    axes: Tensor | None = None  # (rotary_dim / 2,) int64, see `RopeSpec.axes`

    @classmethod
    def of(cls, spec: RopeSpec, context_length: int, device: torch.device | None) -> Rope:
        """Compute the frequencies.

        Args:
            context_length: most tokens of a sequence. LongRoPE has one set of frequencies up to its
                original context and another beyond; since all keys in a cache must be rotated
                alike, this limit decides, not the current length.
            device: a torch device; None makes a `HostArray`.
        """
        frequencies = arrays.of_numpy(_frequencies(spec, context_length))
        axes = arrays.of_numpy(np.array(spec.axes)) if spec.axes else None
        return cls(
            frequencies if device is None else frequencies.to(device),
            spec.attention_factor,
            spec.query_beta,
            spec.original_context,
            spec.query_shift,
            axes if axes is None or device is None else axes.to(device),
        )

    def rotation(self, positions: Tensor, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of rows, both (num_tokens, rotary_dim / 2) float32.

        Args:
            positions: (num_tokens,).
            axes: (3, num_tokens), see `RaggedBatch`; ropes without axes rotate by the positions.
        """
        if axes is None or self.axes is None:
            angles = positions.float().unsqueeze(1) * self.frequencies
        else:
            angles = axes.float()[self.axes].T * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.amplitude == 1.0 else (cos * self.amplitude, sin * self.amplitude)

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """Return the float32 factor of queries at positions (num_tokens,), or None."""
        if not self.query_beta:
            return None
        import torch

        shifted = positions + self.query_shift
        periods = torch.div(shifted, self.original_context, rounding_mode="floor")
        return 1 + self.query_beta * torch.log1p(periods.float())


def distinct_ropes(spec: DecoderSpec) -> tuple[RopeSpec, ...]:
    """List a model's kinds of RoPE, in order of appearance."""
    mixers = (layer.mixer for layer in spec.layers)
    return tuple(dict.fromkeys(mixer.rope for mixer in mixers if isinstance(mixer, CachedSpec)))


def _frequencies(spec: RopeSpec, context_length: int) -> Floats:
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    if spec.sections is not None:
        exponents = _by_axis(spec, exponents)
    # Computed in float64 and rounded, so that every machine gets the same.
    periods = (spec.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / periods  # (rotary_dim / 2,)
    if spec.scaling is RopeScaling.NONE:
        return plain
    if spec.scaling is RopeScaling.PROPORTIONAL:
        plain[spec.turning :] = 0
        return plain / spec.factor
    if spec.scaling is RopeScaling.LINEAR:
        return plain / spec.factor
    if spec.scaling is RopeScaling.LLAMA3:
        return _llama3(spec, plain)
    if spec.scaling is RopeScaling.YARN:
        return _yarn(spec, plain)
    assert spec.scaling is RopeScaling.LONGROPE
    is_long = context_length > spec.original_context
    factors = np.array(spec.long_factors if is_long else spec.short_factors, dtype=np.float32)
    return np.float32(1) / (factors * periods)


def _by_axis(spec: RopeSpec, exponents: Floats) -> Floats:
    """Order the exponents of all frequencies by the axes that rotate by them."""
    assert spec.sections is not None
    if spec.axis_frequencies is AxisFrequencies.EACH:
        counts = [count for count in spec.sections if count]
        return np.concatenate([np.arange(n, dtype=np.float32) / np.float32(n) for n in counts])
    if spec.axis_frequencies is AxisFrequencies.EVERY_OTHER:
        return np.concatenate((exponents[::2], exponents[1::2]))
    return exponents


def _llama3(spec: RopeSpec, plain: Floats) -> Floats:
    """Keep high frequencies, divide low ones by the factor, and blend in between."""
    turns = spec.original_context * plain / (2 * math.pi)  # in the original context
    between = spec.high_freq_factor - spec.low_freq_factor
    above = turns - spec.low_freq_factor
    # Llama 4 Scout has nothing in between.
    blend: Floats = (above / between if between else np.sign(above)).clip(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RopeSpec, plain: Floats) -> Floats:
    """Blend between the dimensions that rotate `beta_fast` and `beta_slow` times."""

    def dimension(turns: float) -> float:
        wavelength = spec.original_context / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    first, last = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    steps = np.arange(spec.rotary_dim // 2, dtype=np.float32)
    stretched: Floats = ((steps - first) / (max(last - first, 0.001))).clip(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)
