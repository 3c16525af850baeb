"""Causal convolution over a few positions, channel by channel."""

from appliance.kernels.short_conv.reference import short_conv

__all__ = ["short_conv"]
