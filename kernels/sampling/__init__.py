"""Chooses token ids from logits, one independent row per sequence."""

from appliance.kernels.sampling.rows import SamplingRows

__all__ = ["SamplingRows"]
