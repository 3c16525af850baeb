"""Capping of logits: cap * tanh(logits / cap)."""

from appliance.kernels.soft_cap.reference import soft_cap

__all__ = ["soft_cap"]
