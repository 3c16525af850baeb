"""Lowers the logits of tokens already seen, by each sequence's own counts."""

from appliance.kernels.penalties.rows import PenaltyRows

__all__ = ["PenaltyRows"]
