"""Multiplying activations by FP8 weights, with the activations in 16 bits or in FP8 as well."""
