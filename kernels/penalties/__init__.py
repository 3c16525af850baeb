"""Logits of tokens that were seen before are lowered, each sequence's own number of times."""

from appliance.kernels.penalties.rows import PenaltyRows

__all__ = ["PenaltyRows"]
