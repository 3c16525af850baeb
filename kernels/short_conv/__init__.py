"""Causal convolution over a few positions, channel by channel."""
