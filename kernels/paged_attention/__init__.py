"""Attention of ragged rows over keys and values that lie in blocks."""

from appliance.kernels.paged_attention.reference import paged_attention, plan_attention

__all__ = ["paged_attention", "plan_attention"]
