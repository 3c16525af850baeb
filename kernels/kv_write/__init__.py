"""Writes a step's keys and values into their cache slots, quantized if the format requires it."""
