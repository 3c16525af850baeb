"""Multiplies activations in 16 bits or in FP8 by FP8 weights."""
