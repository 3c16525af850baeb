"""Multiplies activations by a packed or dense weight, laid out once for its backend."""
