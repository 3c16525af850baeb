"""Causal convolution over a few positions, each channel by itself."""

from appliance.kernels.short_conv.reference import short_conv

__all__ = ["short_conv"]
